"""Names of the previous version work in this one, with a warning that says what to pass."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CHEAP, EXACT, daily, over, small
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of, once

import dynamiq_jax as dq
import dynamiq_jax.nnx
import dynamiq_jax.optax

N, SIZE, WHOLE = 4, 512, P()
MINMAX, EIGHT = dq.contrib.MinMax(), dq.contrib.MinMax(bits=8)
pytestmark = pytest.mark.usefixtures("padding_is_free")


@once
def inputs():
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (SIZE, 16)), jax.random.normal(keys[1], (N * 2, SIZE))


def loss_of(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def mapped(run, spec=WHOLE):
    """A worker's function of parameters, its examples, and options."""

    def all_workers(w, x, **options):
        one = lambda w, x: jax.tree.map(lambda x: x[None], run(w, x, **options))
        maps = {"in_specs": (spec, P("data")), "out_specs": P("data"), "check_vma": False}
        return jax.jit(jax.shard_map(one, mesh=auto_mesh(N), **maps))(w, x)

    return all_workers


def summed(collective, **fixed):
    return mapped(lambda w, x, **options: collective(x @ w, "data", **fixed, **options))


def exchanged(w, x, **options):
    exchange = functools.partial(dq.all_to_all, axis_name="data", split_axis=0, concat_axis=0)
    own = lambda w: jnp.sum(exchange(w, tiled=True, **options) ** 2)
    return jax.grad(own)(w)


def in_layers(w, x, **options):
    return jax.grad(lambda w: loss_of(dq.fsdp(w, "data", specs=P("data"), **options), x))(w)


def beside(w, x, **options):
    functions = [lambda w, x: jnp.tanh(x @ w), lambda _, x: jnp.mean(x**2)]
    options["specs"] = [P("data"), {}]
    return jax.grad(lambda w: dq.overlapped(functions, [w, {}], x, "data", **options))(w)


def updated(w, x, **options):
    optimizer = dq.optax.sharded(optax.sgd(0.1), "data", **options)
    return optimizer.update(jax.grad(loss_of)(w, x), optimizer.init(w), w)[0]


class Model(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)


def of_batch(value_and_grad, *, shards=False, terms=False):
    """The gradient of a global batch; the loss may take shards, and gradients may be terms."""

    def run(w, x, **options):
        with jax.set_mesh(mesh_of(N, kind=AxisType.Explicit)):
            w, x = jax.reshard(w, P("data" if shards else None)), jax.reshard(x, P("data"))
            whole = functools.partial(dq.fsdp, axis_name="data") if shards else lambda w: w
            of_nnx = value_and_grad is dq.nnx.value_and_grad
            loss = lambda w, x: loss_of(whole(w.w[...] if of_nnx else w), x)
            f = value_and_grad(loss, axis_name="data", compression=CHEAP, **options)
            grads = jax.tree.leaves(f(Model(w) if of_nnx else w, x)[1])
            return dq.psum(grads, "data", compression=CHEAP) if terms else grads

    return run


def planned(w, x, **options):
    found = dq.explain({"w": w}, N, verbose=False, **options)
    return np.float64([found.wire_bytes, len(found.topology)])


RING = over(dq.Ring(), CHEAP)
TOPOLOGY = {"compression": CHEAP, "topology": dq.Ring()}, {"compression": RING}
SHARDS = dq.Policy(gradients=CHEAP, parameters=MINMAX)
REDUCE, GATHER = ({"reduce": False}, {"unreduced": True}), ({"gather": False}, {"ungathered": True})
BACK = dq.Policy(activations=CHEAP, cotangents=CHEAP)
FORMER = {
    "psum": (summed(dq.psum), *TOPOLOGY),
    "psum of a policy": (
        summed(dq.psum), {"compression": dq.Policy(gradients=CHEAP), "topology": dq.Ring()},
        {"compression": dq.Policy(gradients=RING)},
    ),
    "psum, None": (summed(dq.psum), {"topology": None}, {}),
    "pmean": (summed(dq.pmean), *TOPOLOGY),
    "reduce": (mapped(lambda w, x, **own: dq.reduce(x @ w, "data", **own).tree), *TOPOLOGY),
    "psum_scatter": (mapped(lambda w, x, **own: dq.psum_scatter(w, "data", tiled=True, **own)),
        *TOPOLOGY),
    "explain": (planned, *TOPOLOGY),
    "fsdp": (mapped(in_layers, P("data")), {"compression": CHEAP, "gather": MINMAX},
        {"compression": SHARDS}),
    "fsdp, None": (mapped(in_layers, P("data")), {"compression": CHEAP, "gather": None},
        {"compression": CHEAP}),
    "overlapped": (mapped(beside, P("data")), {"compression": CHEAP, "gather": MINMAX},
        {"compression": SHARDS}),
    "sharded": (mapped(updated), {"compression": CHEAP, "differences": MINMAX},
        {"compression": SHARDS}),
    "all_to_all": (mapped(exchanged), {"compression": CHEAP, "backward": MINMAX},
        {"compression": dq.Policy(activations=CHEAP, cotangents=MINMAX)}),
    "all_to_all, None": (mapped(exchanged), {"compression": CHEAP, "backward": None},
        {"compression": BACK}),
    "all_to_all, auto": (mapped(exchanged), {"compression": CHEAP, "backward": "auto"},
        {"compression": CHEAP}),
    "value_and_grad, reduce": (of_batch(dq.value_and_grad, terms=True), *REDUCE),
    "value_and_grad, gather": (of_batch(dq.value_and_grad, shards=True), *GATHER),
    "nnx.value_and_grad, reduce": (of_batch(dq.nnx.value_and_grad, terms=True), *REDUCE),
    "nnx.value_and_grad, gather": (of_batch(dq.nnx.value_and_grad, shards=True), *GATHER),
}  # fmt: skip
"""Rows: a function of parameters, examples and options; former options, and those of today."""
DAILY = [
    "psum of a policy", "explain", "fsdp", "sharded", "all_to_all, None", "value_and_grad, reduce",
    "nnx.value_and_grad, gather",
]  # fmt: skip


def result(run, **options):
    """The arrays of a function."""
    return jax.tree.leaves(run(*inputs(), **options))


@pytest.mark.parametrize("name", daily(FORMER, DAILY))
def test_former_keywords_warn_and_have_the_same_bits(name):
    run, former, now = FORMER[name]
    gone = "|".join(former.keys() - now.keys())
    new = [key for key in now if key not in former or now[key] != former[key]]
    remedy = f"pass {new[0]}=" if new else "leave it out"
    with pytest.warns(DeprecationWarning, match=f"^({gone})= of .*{remedy}") as seen:
        found = result(run, **former)
    assert {one.filename for one in seen} == {__file__}
    assert found
    for a, b in zip(found, result(run, **now), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_former_keyword_is_not_silently_another():
    """The value that was passed has an effect; what contradicts it is refused."""
    run, former, now = FORMER["sharded"]
    with pytest.warns(DeprecationWarning, match="Policy.gradients=.*parameters=MinMax"):
        found = result(run, **former)[0]
    other = result(run, compression=now["compression"].gradients)[0]
    assert np.any(np.asarray(found) != other)
    with pytest.raises(ValueError, match="topology=Direct.*has topology=Ring.*one of them"):
        dq.psum(1.0, "data", compression=RING, topology=dq.Direct())
    with pytest.raises(TypeError, match="unexpected keyword argument 'method'"):
        dq.psum(1.0, "data", method=CHEAP)


@pytest.mark.parametrize(
    ("former", "now"), {"sequential": dq.overlapped, "reduce_in_backward": dq.fsdp}.items()
)
def test_former_names_of_functions_warn(former, now):
    with pytest.warns(DeprecationWarning, match=f"dq.{former} .*dq.{now.__name__}") as seen:
        assert getattr(dq, former) is now
    assert [one.filename for one in seen] == [__file__]
    assert former not in dir(dq)


def test_signatures_have_the_names_of_today():
    """Help and editors show them."""
    for function in (dq.psum, dq.fsdp, dq.overlapped, dq.optax.sharded, dq.value_and_grad):
        names = inspect.signature(function).parameters
        assert "compression" in names or "axis_name" in names
        assert not {"topology", "gather", "differences", "backward", "reduce", "method"} & {*names}


def test_each_function_reads_its_fields_of_a_policy():
    """One policy serves all; a field that a function does not read has no effect there."""
    fields = {"gradients": CHEAP, "parameters": EIGHT, "activations": CHEAP, "cotangents": EIGHT}
    reads = {
        summed(dq.psum): {"gradients"},
        summed(dq.all_gather): {"parameters"},
        mapped(updated): {"gradients", "parameters"},
        mapped(exchanged): {"activations", "cotangents"},
    }
    policy = dq.Policy(**{name: small(x) if x is EIGHT else x for name, x in fields.items()})
    for run, own in reads.items():
        programs = {
            name: str(jax.make_jaxpr(functools.partial(run, compression=told))(*inputs()))
            for name, told in [
                ("as it is", policy),
                *((name, dataclasses.replace(policy, **{name: EXACT})) for name in fields),
            ]
        }
        texts = {name: re.sub("0x[0-9a-f]+", "", text) for name, text in programs.items()}
        assert {name for name in texts if texts[name] != texts["as it is"]} == own


def test_a_policy_is_static_and_checked():
    policy = dq.Policy(gradients=CHEAP, parameters=EIGHT)
    assert hash(policy) == hash(dq.Policy(gradients=CHEAP, parameters=EIGHT))
    assert eval(repr(dq.Policy(gradients=dq.F32())), vars(dq)) == dq.Policy(gradients=dq.F32())
    with pytest.raises(ValueError, match="cotangents=8 is not a method; pass for example dq"):
        dq.Policy(cotangents=8)
    with pytest.raises(ValueError, match="parameters=Policy.* is not a method"):
        dq.Policy(parameters=policy)
