"""`value_and_grad` where parameters are sharded: over model axes, over data axes, over both."""

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EIGHT, assert_copies_equal, daily, once, small
from hlo import OPERATION, arrays_of, bits_of, crossing_bytes
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods.base import Outcome, ShardedMethod
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.request.compression import as_compression

F32 = small(dq.F32())
SHAPES = {"in": (16, 64), "bias": (64,), "out": (64, 24), "scale": (24,)}


KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
EXACT = {"automatic": F32, "explicit": small(dq.F32(), exclude="bias|scale")}
"""JAX has no rule for sums of examples and what is typed as reduced over Explicit axes."""


class Layout(NamedTuple):
    """A mesh, its data axes, and how parameters are sharded over it."""

    mesh: dict[str, int]
    data: str | tuple[str, ...]
    specs: Any

    @property
    def sizes(self):
        return tuple(self.mesh.values())

    def make(self, kind="automatic"):
        types = (KINDS[kind],) * len(self.mesh)
        return jax.make_mesh(self.sizes, tuple(self.mesh), axis_types=types)


def specs(first, second):
    """``first`` splits the input layer's columns, ``second`` its rows."""
    columns, rows = P(second, first), P(first, second)
    return {"in": columns, "bias": P(first), "out": rows, "scale": P()}


LAYOUTS = {
    "tensor parallel": Layout({"data": 4, "model": 2}, "data", specs("model", None)),
    "fsdp": Layout({"fsdp": 8}, "fsdp", specs(None, "fsdp")),
    "hsdp": Layout({"replica": 2, "fsdp": 4}, ("replica", "fsdp"), specs(None, "fsdp")),
    "fsdp of all data axes": Layout({"replica": 2, "fsdp": 4}, ("replica", "fsdp"),
        specs(None, ("replica", "fsdp"))),
    "fsdp and tensor parallel": Layout({"fsdp": 4, "model": 2}, "fsdp", specs("model", "fsdp")),
    "hsdp and tensor parallel": Layout({"replica": 2, "fsdp": 2, "model": 2}, ("replica", "fsdp"),
        specs("model", "fsdp")),
    "both in one dimension": Layout({"fsdp": 4, "model": 2}, "fsdp",
        specs(("fsdp", "model"), None)),
    "a data axis for each dimension": Layout({"replica": 2, "fsdp": 4}, ("replica", "fsdp"),
        specs("replica", "fsdp")),
}  # fmt: skip


def model(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"][None])
    hidden = hidden * np.linspace(0.5, 1.5, 64, dtype=np.float32)[None]  # units have an order
    examples, features = jax.typeof(hidden).sharding.spec
    # On Explicit axes products over a dimension that is split have to say what becomes of it.
    told = {} if features is None else {"out_sharding": P(examples)}
    out = jnp.matmul(hidden, params["out"], **told)
    return jnp.mean(jnp.square(out * params["scale"][None] - y))


@once
def problem():
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=False)
    }
    # Workers differ a lot: later examples are larger.
    x = jax.random.normal(keys[4], (32, 16)) * jnp.linspace(0.2, 2.0, 32)[:, None]
    return params, (x, jax.random.normal(keys[5], (32, 24)))


@functools.cache
def expected():
    params, batch = problem()
    return jax.device_get(jax.value_and_grad(model)(params, *batch))


def placed(layout, mesh):
    params, batch = problem()
    sharding = functools.partial(NamedSharding, mesh)
    return (
        jax.device_put(params, jax.tree.map(sharding, layout.specs)),
        jax.device_put(batch, sharding(P(layout.data))),
    )


def told_specs(layout, kind):
    """``specs=``, where types do not say them."""
    return {} if kind == "explicit" else {"specs": layout.specs}


def assert_as_plain(found, params):
    (loss, grads), (plain_loss, plain) = found, expected()
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)
        np.testing.assert_allclose(grad, plain[name], rtol=1e-4, atol=1e-6)


EACH = [("automatic", "hsdp and tensor parallel"), ("explicit", "fsdp of all data axes")]


@pytest.mark.parametrize(("kind", "name"), daily(itertools.product(KINDS, LAYOUTS), EACH))
def test_gradients_are_those_of_the_whole_batch_and_sharded_as_parameters(kind, name):
    layout = LAYOUTS[name]
    mesh = layout.make(kind)
    options = {"mesh": mesh, "axis_name": layout.data, "method": EXACT[kind]}
    params, batch = placed(layout, mesh)
    seen = dq.value_and_grad(model, **options)(params, *batch)
    assert_as_plain(seen, params)
    told = dq.value_and_grad(model, **told_specs(layout, kind), **options)
    assert_as_plain(jax.jit(told)(params, *batch), params)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_what_the_loss_needs_moves_over_the_model_axis(kind):
    """Whatever the types of axes; plain JAX 0.10 moves more over Explicit ones."""
    layout = LAYOUTS["tensor parallel"]
    options = {
        "axis_name": "data",
        "method": as_compression(EXACT[kind], dq.Direct()),
        **told_specs(layout, kind),
    }
    ours = dq.value_and_grad(model, mesh=layout.make(kind), **options)

    def plain(params, *batch):
        params = lax.pcast(params, "data", to="varying")
        return lax.pmean(jax.value_and_grad(model)(params, *batch), "data")

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "axis_names": {"data"}}
    native = jax.shard_map(plain, mesh=layout.make(), **specs)

    def compiled(function, kind):
        params, batch = placed(layout, layout.make(kind))
        return jax.jit(function).lower(params, *batch).compile(), (params, *batch)

    def moved(program):
        return crossing_bytes(program.as_text(), layout.sizes, 1)

    program, args = compiled(ours, kind)
    assert moved(program) == moved(compiled(native, "automatic")[0]) > 0  # activations
    assert_copies_equal({"scale": program(*args)[1]["scale"]})


ROUTES = {
    "scattered compressed": dq.Direct(),
    "scattered natively": dq.Hierarchical(outer=dq.Direct()),
}


@pytest.mark.parametrize("route", daily(ROUTES, ["scattered compressed"]))
def test_gradients_of_shards_are_compressed(route):
    layout = LAYOUTS["hsdp and tensor parallel"]
    mesh = layout.make()
    params, batch = placed(layout, mesh)
    options = {"mesh": mesh, "axis_name": layout.data, "specs": layout.specs}
    f = jax.jit(dq.value_and_grad(model, method=as_compression(EIGHT, ROUTES[route]), **options))
    compiled = f.lower(params, *batch, key=jax.random.key(0)).compile()
    hlo = compiled.as_text()
    assert (" reduce-scatter(" in hlo) == (route == "scattered natively")
    assert " all-to-all(" in hlo
    native = jax.jit(dq.value_and_grad(model, method=F32, **options))
    plain = native.lower(params, *batch, key=jax.random.key(0)).compile().as_text()
    assert crossing_bytes(hlo, layout.sizes, 2) == crossing_bytes(plain, layout.sizes, 2)
    loss, grads = compiled(params, *batch, key=jax.random.key(0))
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)
        assert 1e-8 < float(vnmse(np.asarray(grad), expected()[1][name])) < 1e-2
    assert_copies_equal(grads)


UNSEEN = r"automatic axes \{'model': 2\}.*pass value_and_grad\(specs="
REFUSED = [
    ("tensor parallel", jax.jit, {"method": F32}, ValueError, UNSEEN),
    ("fsdp", lambda f: f, {"method": F32, "metrics": True}, NotImplementedError,
     "sharded over the data axes.*metrics=False"),
    ("fsdp", lambda f: f, {"method": dq.comparators.THC()}, NotImplementedError,
     "THC.*psum_scatter"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "options", "error", "words"), REFUSED)
def test_shards_that_cannot_be_seen_or_scattered_are_refused(name, form, options, error, words):
    layout = LAYOUTS[name]
    mesh = layout.make()
    params, batch = placed(layout, mesh)
    with pytest.raises(error, match=words):
        form(dq.value_and_grad(model, mesh=mesh, axis_name=layout.data, **options))(params, *batch)


def test_shards_of_an_axis_of_size_1_are_whole():
    layout = Layout({"data": 8, "fsdp": 1}, ("data", "fsdp"), specs(None, "fsdp"))
    mesh = layout.make()
    params, batch = placed(layout, mesh)
    f = dq.value_and_grad(model, mesh=mesh, axis_name=layout.data, method=F32, metrics=True)
    assert f(params, *batch)[1].metrics.norm > 0


@pytest.mark.parametrize("kind", daily(["automatic", "explicit"], ["automatic"]))
def test_a_state_of_model_shards(kind):
    """Error feedback with a tensor-parallel axis: every step takes the state of the one before."""
    layout = LAYOUTS["tensor parallel"]
    mesh = layout.make(kind)
    params, batch = placed(layout, mesh)
    # On Explicit meshes the loss's elementwise uses of vectors are summed by JAX.
    method = dq.ErrorFeedback(dq.comparators.OmniReduce(density=0.5, block_size=8))
    method = small(method, exclude="bias|scale")
    options = {"method": method, "mesh": mesh, **told_specs(layout, kind)}
    f = jax.jit(dq.value_and_grad(model, axis_name="data", **options))
    placing = {"mesh": mesh, "specs": layout.specs}
    state = method.init_state(params, 4, stacked=True, **placing)
    total, plain = None, expected()[1]
    for step in range(1, 9):
        _, found = f(params, *batch, state=state)
        state, grads = found.state, jax.device_get(found.tree)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
        if step == 1:
            first = float(vnmse(total, plain))
    mean = jax.tree.map(lambda x: x / 8, total)
    assert first > 1e-3
    assert float(vnmse(mean, plain)) < first / 10  # what was left out came later


def test_shards_over_data_axes_are_gathered_once_and_never_all_reduced():
    layout = LAYOUTS["fsdp"]
    mesh = layout.make()
    params, batch = placed(layout, mesh)
    f = dq.value_and_grad(model, mesh=mesh, axis_name="fsdp", specs=layout.specs, method=F32)
    hlo = jax.jit(f).lower(params, *batch).compile().as_text()
    sizes = Counter()
    for line in hlo.splitlines():
        if match := OPERATION.search(line):
            arrays = arrays_of(match["type"])
            sizes[match["name"]] += sum(bits_of(*array) for array in arrays) // 32
    split = 16 * 64 + 64 * 24
    assert sizes == {"all-gather": split, "reduce-scatter": split // 8, "all-reduce": 64 + 24 + 1}


@dataclasses.dataclass(frozen=True)
class Seeds(dq.F32, ShardedMethod):
    """Scatters the seeds it is told, and "sums" to their spread over the groups that scattered."""

    native_by_default = False

    def all_gather(self, x, call, *, invarying=False):
        raise NotImplementedError

    def sharded_wire_bits(self, size, n_workers, topology):
        raise NotImplementedError

    def reduce_scatter(self, x, call):
        return jnp.full(x.shape[1], call.seed[0] % 1000, x.dtype) + 0 * x[0]

    def all_reduce(self, x, call):
        return Outcome(lax.pmax(x, call.axis.name) - lax.pmin(x, call.axis.name), ())


def test_groups_that_scatter_apart_do_so_with_different_noise():
    layout = LAYOUTS["hsdp"]
    mesh = layout.make()
    params, batch = placed(layout, mesh)
    options = {"mesh": mesh, "axis_name": layout.data, "specs": layout.specs}
    f = dq.value_and_grad(model, method=small(Seeds(), topology=dq.Direct()), **options)
    grads = f(params, *batch, key=jax.random.key(1))[1]
    assert np.all(np.asarray(grads["in"]) != 0)
