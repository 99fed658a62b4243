"""States of `dq.optax.sharded` through Flax NNX, `flax.serialization` and `jax.pmap`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close, assert_same_bits
from cases import EXACT
from flax import nnx, serialization
from flax.jax_utils import replicate
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of, promoting

import dynamiq_jax as dq
import dynamiq_jax.optax


def make(**options):
    return dq.optax.sharded(optax.sgd(0.5, momentum=0.9), "data", compression=EXACT, **options)


def module(n):
    """A module with a padded kernel, and its optimizer on so many workers."""
    with jax.set_mesh(mesh_of(n, kind=AxisType.Explicit)):
        net = nnx.Linear(9, 11, use_bias=False, rngs=nnx.Rngs(n))
        return net, nnx.Optimizer(net, make(), wrt=nnx.Param)


FORMS = {
    "state": nnx.state,
    "arrays": lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer)),
    "optimizer": lambda optimizer: optimizer,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_nnx_goes_to_an_optimizer_on_other_workers(form):
    (_, eight), (_, four) = module(8), module(4)
    saved = jax.tree.map(np.asarray, FORMS[form](eight))
    found = dq.optax.restore_state(saved, four)
    assert isinstance(found, nnx.Optimizer)
    masters = lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]["masters"]
    own, other = masters(found)["kernel"], masters(eight)["kernel"]
    assert (own.shape, other.shape) == ((9, 12), (9, 16))
    assert_same_bits(jax.device_get(own)[:, :11], jax.device_get(other)[:, :11])
    with pytest.raises(ValueError, match="pass the nnx.Optimizer itself"):
        dq.optax.restore_state(saved, nnx.state(four))
    opt_state = dq.optax.restore_state(saved, four).opt_state
    arrays = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(four))["opt_state"])
    assert opt_state.sent.step.value.shape == (4,)
    assert arrays["sent"]["step"]["value"].shape == (4,)


@pytest.mark.parametrize("form", FORMS)
def test_specs_of_an_optimizer_of_nnx(form):
    """They are the shardings of its leaves; a state without types does not tell them."""
    _, optimizer = module(8)
    state, given = nnx.state(optimizer), FORMS[form](optimizer)
    if given is not optimizer:
        with pytest.raises(ValueError, match=r"in the place of nnx\.state\(optimizer\) pass"):
            dq.optax.state_specs(given)
        return
    specs = nnx.state(dq.optax.state_specs(optimizer))
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    for x, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh_of(8), spec), x.ndim)


def test_specs_of_a_memory_without_its_type():
    state = {"memory": dq.optax.state.PerWorker({"w": np.zeros((8, 4))}, "data")}
    assert dq.optax.state_specs(state)["memory"].value == {"w": P("data")}
    with pytest.raises(ValueError, match="number of workers"):
        dq.optax.state_specs(serialization.to_state_dict(state))
    others = {"memory": {"value": np.zeros(4)}}
    assert dq.optax.state_specs(others) == {"memory": {"value": P()}}


def test_a_state_that_had_a_memory_is_not_taken_for_one_without_types():
    """Gradients that are too small to be compressed have no memory."""
    memory = dq.optax.state.PerWorker({"w": np.zeros((8, 4, 3))}, "data")
    saved, fresh = ({"memory": x, "mu": np.zeros(n)} for x, n in ((memory, 12), (None, 2)))
    with pytest.raises(ValueError, match=r"has \(2,\); pass the optimizer and the parameters"):
        dq.optax.restore_state(saved, fresh)


@pytest.mark.parametrize("deferred", [False, True])
def test_flax_serialization_takes_a_state(deferred):
    params = {"w": np.arange(99, dtype=np.float32).reshape(9, 11)}
    optimizer = optax.chain(make(deferred=deferred), optax.scale(1.0))
    state = jax.device_get(dq.optax.init(optimizer, params, auto_mesh(8)))
    saved = serialization.to_bytes(state)
    fresh = jax.tree.map(np.zeros_like, state)
    found = serialization.from_bytes(fresh, saved)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_same_bits(found, state)
    other = dq.optax.init(optimizer, params, auto_mesh(4))
    found = dq.optax.restore_state(serialization.msgpack_restore(saved), other)
    assert_same_bits(jax.device_get(found[0].unpadded()), params)
    fields = serialization.to_state_dict(state)
    del fields["0"]["norm"]
    with pytest.raises(ValueError, match="has the fields .*'norm'.*dq.optax.restore_state"):
        serialization.from_state_dict(state, fields)


def test_the_advice_for_pmap_trains_as_optax_does():
    params = {"w": np.linspace(-1, 1, 99, dtype=np.float32).reshape(9, 11)}
    optimizer, plain = promoting(make()), optax.sgd(0.5, momentum=0.9)
    told = r"for jax\.pmap: (jax\.pmap\(optimizer\.init, axis_name='data'\)\(.*\))"
    with pytest.raises(ValueError, match=told) as caught:
        optimizer.init(params)
    advice = re.search(told, str(caught.value))[1]
    names = {"jax": jax, "optimizer": optimizer, "params": params}
    state = eval(
        advice.replace("flax.jax_utils.replicate", "replicate"), names | {"replicate": replicate}
    )

    @functools.partial(jax.pmap, axis_name="data")
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = dq.optax.init(optimizer, params, auto_mesh(8))
    grads = np.random.default_rng(0).standard_normal((3, 8, 9, 11)).astype(np.float32)
    with pytest.raises(ValueError, match=r"inside of the map.*by jax\.pmap\(optimizer\.init"):
        step(replicate(params), replicate(jax.device_get(whole)), {"w": grads[0]})
    copies, expected, momenta = replicate(params), params, plain.init(params)
    for own in grads:
        copies, state = step(copies, state, {"w": own})
        updates, momenta = plain.update({"w": jnp.mean(own, 0)}, momenta, expected)
        expected = optax.apply_updates(expected, updates)
    for copy in np.asarray(copies["w"]):
        assert_close(copy, expected["w"])
