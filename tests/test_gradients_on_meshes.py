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
from asserts import assert_close, assert_copies_equal, assert_same_bits
from cases import EIGHT, EXACT, daily, over, small
from hlo import crossing_bytes, moves_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import compilations, mesh_of, network, put

import dynamiq_jax as dq
from dynamiq_jax.methods.base import Outcome
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.tree.leaves import axes_of

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
METHODS = {"automatic": EXACT, "explicit": small(dq.F32(), exclude="bias|scale")}
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
        return mesh_of(*self.sizes, names=tuple(self.mesh), kind=KINDS[kind])

    def placed(self, kind="automatic"):
        """Parameters and examples."""
        (params, batch), mesh = network(), self.make(kind)
        return put(params, mesh, self.specs), put(batch["x"], mesh, P(self.data))

    def ours(self, kind="automatic", told=True, **options):
        """`value_and_grad`; ``specs=`` where types do not say them."""
        specs = {"specs": self.specs} if told and kind == "automatic" else {}
        options = {
            "mesh": self.make(kind),
            "axis_name": self.data,
            "compression": METHODS[kind],
        } | options
        return dq.value_and_grad(model, **specs | options)


def specs(first, second):
    """``first`` splits the input layer's columns, ``second`` its rows."""
    columns, rows = P(second, first), P(first, second)
    return {"up": columns, "bias": P(first), "down": rows, "scale": P()}


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


def model(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    hidden = hidden * np.linspace(0.5, 1.5, 64, dtype=np.float32)[None]  # units have an order
    examples, features = jax.typeof(hidden).sharding.spec
    # On Explicit axes products over a dimension that is split have to say what becomes of it.
    told = {} if features is None else {"out_sharding": P(examples)}
    return jnp.mean(jnp.square(jnp.matmul(hidden, params["down"], **told) * params["scale"] - x))


@functools.cache
def expected():
    params, batch = network()
    return jax.device_get(jax.jit(jax.value_and_grad(model))(params, batch["x"]))


def assert_as_plain(found, params):
    assert_close(found, expected(), atol=1e-6)
    assert_sharded_alike(found[1], params)


def assert_sharded_alike(grads, params):
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)


EACH = [("automatic", "hsdp and tensor parallel"), ("explicit", "fsdp of all data axes")]


@pytest.mark.parametrize(("kind", "name"), daily(itertools.product(KINDS, LAYOUTS), EACH))
def test_gradients_are_those_of_the_whole_batch_and_sharded_as_parameters(kind, name):
    layout = LAYOUTS[name]
    args = layout.placed(kind)
    for f in (layout.ours(kind, told=False), jax.jit(layout.ours(kind))):
        assert_as_plain(f(*args), args[0])


def with_integers(params, x):
    """`model` with signs, booleans and a number among its parameters."""
    floats = {name: params[name] for name in ("up", "bias", "down", "scale")}
    signs = params["signs"].astype(jnp.float32) * params["kept"].astype(jnp.float32)
    return params["times"] * model(floats, x * signs[None])


@pytest.mark.parametrize(("kind", "name"), daily(itertools.product(KINDS, LAYOUTS), EACH))
def test_integers_among_parameters_have_no_gradient(kind, name):
    """As `jax.value_and_grad` has them; sharded as other parameters are, too."""
    layout = LAYOUTS[name]
    params, x = layout.placed(kind)
    width = x.shape[1]
    signs, kept = np.resize(np.int8([1, -1, 2]), width), np.resize([True, True, False], width)
    split = P(params["down"].sharding.spec[1])
    added = put({"signs": signs, "kept": kept}, layout.make(kind), split)
    whole = network()[0] | {"signs": signs, "kept": kept, "times": 3}
    plain = jax.value_and_grad(with_integers, allow_int=True)
    right = jax.device_get(plain(whole, jax.device_get(x)))
    params |= added | {"times": 3}
    specs = {name: P() for name in params} | layout.specs | {"signs": split, "kept": split}
    told = {"specs": specs} if kind == "automatic" else {}
    common = {"mesh": layout.make(kind), "axis_name": layout.data, "compression": METHODS[kind]}
    found = dq.value_and_grad(with_integers, allow_int=True, **common | told)
    for f in (found, jax.jit(found)):
        value, grads = f(params, x)
        zeros = {name: grads.pop(name) for name in ("signs", "kept", "times")}
        for name, zero in zeros.items():
            assert (zero.dtype, zero.shape) == (jax.dtypes.float0, np.shape(params[name]))
        assert_close((value, grads), (right[0], {k: right[1][k] for k in grads}), atol=1e-6)
        assert_sharded_alike(grads, params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("padding_is_free")
def test_integers_stand_beside_states_and_what_has_no_gradient_is_refused(kind):
    params, x = DATA.placed(kind)
    integers = {"signs": jnp.ones(x.shape[1], jnp.int8), "kept": jnp.ones(x.shape[1], bool)}
    params |= put(integers, DATA.make(kind)) | {"times": 1}
    common = {"mesh": DATA.make(kind), "axis_name": "data"}
    method = small(dq.ErrorFeedback(EIGHT.method), exclude="bias|scale")
    state = method.init_state(params, 8, stacked=True)
    f = dq.value_and_grad(with_integers, compression=method, allow_int=True, metrics=True, **common)
    (_, found) = f(params, x, state=state)
    assert jax.tree.structure(found.tree) == jax.tree.structure(params)
    assert found.tree["signs"].dtype == jax.dtypes.float0
    assert float(found.metrics.vnmse) > 0 and np.any(jax.tree.leaves(found.state)[0])
    loss = functools.partial(dq.value_and_grad, with_integers, compression=method, **common)
    with pytest.raises(TypeError, match=r"'kept'\] is bool.* or allow_int=True"):
        loss()(params, x)
    with pytest.raises(TypeError, match=r"'key'\] is key.* no gradient"):
        loss(allow_int=True)(params | {"key": jax.random.key(0)}, x)
    with pytest.raises(ValueError, match="unreduced=True and allow_int=True"):
        loss(allow_int=True, unreduced=True)


DATA = Layout({"data": 8}, "data", P())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("padding_is_free")
def test_a_call_is_one_program_whose_copies_are_equal_and_follow_the_key(kind):
    """Outside of `jax.jit`, too."""
    method, args = dataclasses.replace(METHODS[kind], method=EIGHT.method), DATA.placed(kind)
    f = DATA.ours(kind, compression=method, metrics=True)
    found = [jax.jit(f)(*args, key=jax.random.key(i)) for i in (0, 0, 1)]
    for value, reduced in found:
        assert_close(value, expected()[0])
        assert 1e-7 < float(vnmse(jax.device_get(reduced.tree), expected()[1])) < 1e-3
        assert float(reduced.metrics.vnmse) > 0
        assert_copies_equal(reduced.tree)
    first, again, other = (jax.device_get(reduced.tree) for _, reduced in found)
    assert_same_bits(first, again)
    assert np.mean(first["up"] != other["up"]) > 0.3
    with compilations() as compiled:
        outside = f(*args, key=jax.random.key(0))[1]
        assert 1 <= len(compiled) <= 3  # one program, not one for each operation
        compiled.clear()
        f(*args, key=jax.random.key(0))
        assert not compiled
    assert_same_bits(jax.device_get(outside.tree), first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_may_come_from_around_or_from_arguments(kind):
    """Parameters come from nowhere where the mesh is told."""
    params, x = DATA.placed(kind)
    anywhere, f = network()[0], DATA.ours(kind, told=False, mesh=None)
    with jax.set_mesh(DATA.make(kind)):
        found = [f(params, x), jax.jit(f)(params, x)]
    for own in (*found, f(params, x), jax.jit(f)(params, x), DATA.ours(kind)(anywhere, x)):
        assert_close(own, expected())
    if kind == "automatic":
        with pytest.raises(ValueError, match="there is no mesh"):
            jax.jit(f)(anywhere, network()[1]["x"])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_what_the_loss_needs_moves_over_the_model_axis(kind):
    """Whatever the types of axes; plain JAX 0.10 moves more over Explicit ones."""
    layout = LAYOUTS["tensor parallel"]

    def plain(params, x):
        params = lax.pcast(params, "data", to="varying")
        return lax.pmean(jax.value_and_grad(model)(params, x), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
    native = jax.jit(jax.shard_map(plain, mesh=layout.make(), **specs))

    def moved(program):
        return crossing_bytes(program.as_text(), layout.sizes, 1)

    args = layout.placed(kind)
    method = over(dq.Direct(), METHODS[kind])
    program = jax.jit(layout.ours(kind, compression=method)).lower(*args).compile()
    assert moved(program) == moved(native.lower(*layout.placed()).compile()) > 0  # activations
    assert_copies_equal({"scale": program(*args)[1]["scale"]})


ROUTES = {
    "scattered compressed": dq.Direct(),
    "scattered natively": dq.Hierarchical(outer=dq.Direct()),
}


@pytest.mark.parametrize("route", daily(ROUTES, ["scattered compressed"]))
@pytest.mark.usefixtures("padding_is_free")
def test_gradients_of_shards_are_compressed(route):
    layout, key = LAYOUTS["hsdp and tensor parallel"], jax.random.key(0)
    args = layout.placed()

    def program(method):
        return jax.jit(layout.ours(compression=method)).lower(*args, key=key).compile()

    compiled = program(over(ROUTES[route], EIGHT))
    hlo, plain = compiled.as_text(), program(EXACT).as_text()
    assert (" reduce-scatter(" in hlo) == (route == "scattered natively")
    assert " all-to-all(" in hlo
    assert crossing_bytes(hlo, layout.sizes, 2) == crossing_bytes(plain, layout.sizes, 2)
    grads = compiled(*args, key=key)[1]
    assert_sharded_alike(grads, args[0])
    assert_copies_equal(grads)
    for name, grad in grads.items():
        assert 1e-8 < float(vnmse(np.asarray(grad), expected()[1][name])) < 1e-2


REFUSED = [
    ("tensor parallel", {}, ValueError,
     r"automatic axes \{'model': 2\}.*pass value_and_grad\(specs="),
    ("fsdp", {"metrics": True}, NotImplementedError, "sharded over the data axes.*metrics=False"),
    ("fsdp", {"compression": dq.contrib.THC()}, NotImplementedError, "THC.*psum_scatter"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "words"), REFUSED)
def test_shards_that_cannot_be_seen_or_scattered_are_refused(name, options, error, words):
    layout = LAYOUTS[name]
    f = layout.ours(told=False, **options)
    with pytest.raises(error, match=words):
        (f if options else jax.jit(f))(*layout.placed())


def test_shards_of_an_axis_of_size_1_are_whole():
    layout = Layout({"data": 8, "fsdp": 1}, ("data", "fsdp"), specs(None, "fsdp"))
    assert layout.ours(told=False, metrics=True)(*layout.placed())[1].metrics.norm > 0


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_a_state_of_model_shards(kind):
    """Error feedback with a tensor-parallel axis: every step takes the state of the one before."""
    layout = LAYOUTS["tensor parallel"]
    args = layout.placed(kind)
    # On Explicit meshes the loss's elementwise uses of vectors are summed by JAX.
    method = dq.ErrorFeedback(dq.contrib.OmniReduce(density=0.5, block_size=8))
    method = small(method, exclude="bias|scale")
    f = jax.jit(layout.ours(kind, compression=method))
    placing = {"mesh": layout.make(kind), "specs": layout.specs}
    state, every, plain = method.init_state(args[0], 4, stacked=True, **placing), [], expected()[1]
    for _ in range(8):
        _, found = f(*args, state=state)
        state = found.state
        every.append(jax.device_get(found.tree))
    first = float(vnmse(every[0], plain))
    assert first > 1e-3
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *every)
    assert float(vnmse(mean, plain)) < first / 10  # what was left out came later


WRONG_STATES = {
    "of leaves that JAX sums": ("", True, r"JAX itself has summed .*bias.*Exclude them"),
    "of one worker": ("bias|scale", False, r"those of one worker, .*stacked=True\) gives"),
    "of other leaves": ("bias|scale|up", True, r"keeps \[\(\d.* for \d workers; pass what"),
}


@pytest.mark.parametrize(
    ("layout", "name"),
    daily(
        itertools.product(("data", "tensor parallel"), WRONG_STATES),
        [("tensor parallel", name) for name in WRONG_STATES],
    ),
)
@pytest.mark.filterwarnings("ignore:JAX sums gradients of")
def test_on_explicit_axes_a_state_of_other_leaves_or_of_one_worker_is_refused(layout, name):
    """On Auto axes `test_error_feedback` has them."""
    excluded, stacked, words = WRONG_STATES[name]
    layout = DATA if layout == "data" else LAYOUTS[layout]
    feedback = dq.ErrorFeedback(dq.contrib.OmniReduce(density=0.5, block_size=8))
    placing = {"mesh": layout.make("explicit"), "specs": layout.specs}
    args, n = layout.placed("explicit"), layout.sizes[0]
    given = small(feedback, exclude=excluded or None)
    state = jax.eval_shape(lambda: given.init_state(args[0], n, stacked=stacked, **placing))
    used = small(feedback, exclude=excluded.removesuffix("|up") or None)
    f = layout.ours("explicit", compression=used)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(f, *args, state=state)


def test_shards_over_data_axes_are_gathered_once_and_never_all_reduced():
    layout, sizes, split = LAYOUTS["fsdp"], Counter(), 2 * 16 * 64
    hlo = jax.jit(layout.ours()).lower(*layout.placed()).compile().as_text()
    for name, bits in moves_of(hlo):
        sizes[name] += bits // 32
    assert sizes == {"all-gather": split, "reduce-scatter": split // 8, "all-reduce": 64 + 1 + 1}


@pytest.mark.parametrize(("kind", "name"), daily(itertools.product(KINDS, LAYOUTS), EACH))
def test_shards_are_gathered_as_the_policy_says(kind, name):
    """By bf16 the loss sees rounded shards; its gradients are exact, and sharded as ever."""
    layout, paths = LAYOUTS[name], []

    def chosen(path, leaf):
        paths.append(path)
        return dq.BF16()

    policy = dq.Policy(gradients=METHODS[kind], parameters=small(chosen))
    args = layout.placed(kind)
    found = jax.jit(layout.ours(kind, compression=policy))(*args)
    assert_sharded_alike(found[1], args[0])
    data = {layout.data} if isinstance(layout.data, str) else {*layout.data}
    split = {own for own, spec in layout.specs.items() if axes_of(spec) & data}
    round_bf16 = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    params, batch = network()
    params = {own: round_bf16(x) if own in split else x for own, x in params.items()}
    plain = jax.jit(jax.value_and_grad(model))(params, batch["x"])
    assert_close(found, jax.device_get(plain), atol=1e-6)
    assert split <= set(paths)


@dataclasses.dataclass(frozen=True)
class Seeds(dq.F32):
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
    f = layout.ours(compression=small(Seeds(), topology=dq.Direct()))
    grads = f(*layout.placed(), key=jax.random.key(1))[1]
    assert np.all(np.asarray(grads["up"]) != 0)
