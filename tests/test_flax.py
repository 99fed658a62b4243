"""Training loops of Flax, compressed by nothing: the same as plain ones on the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import assert_close, auto_mesh, small
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
EXACT = dq.F32()
STEPS = 3
EVERYWHERE = NamedSharding(auto_mesh(), P())
"""Where steps leave parameters: from the start, so that they are compiled once."""


def batches():
    x = jax.random.normal(jax.random.key(1), (STEPS, 32, 16))
    return [{"x": own, "y": jnp.tanh(own[:, :4])} for own in x]


class Model(nnx.Module):
    def __init__(self, axis_name=None):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs, axis_name=axis_name)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.norm(self.hidden(x))))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def trained(model, wrt, **decorator):
    """The state of the model after `STEPS`, and the losses."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=wrt)
    for own in (model, optimizer):
        nnx.update(own, jax.device_put(nnx.state(own), EVERYWHERE))

    def step(model, optimizer, batch):
        select = nnx.DiffState(0, wrt)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=select)(model, batch)
        if decorator:
            grads = dq.pmean(grads, "data", method=EXACT)
            loss = jax.lax.pmean(loss, "data")
        optimizer.update(model, grads)
        return loss

    run = nnx.jit(nnx.shard_map(step, **decorator) if decorator else step)
    losses = [float(run(model, optimizer, batch)) for batch in batches()]
    return nnx.state(model), losses


@pytest.mark.parametrize(
    "wrt", [nnx.Param, nnx.All(nnx.Param, nnx.PathContains("out"))], ids=["all", "filtered"]
)
def test_nnx_in_a_map_with_filters_and_state_that_changes(wrt):
    state, losses = trained(
        Model(axis_name="data"),
        wrt,
        mesh=auto_mesh(),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    expected, expected_losses = trained(Model(), wrt)
    assert_close(jax.device_get(state), expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    start = nnx.state(Model())
    moved = not np.array_equal(state["hidden"]["kernel"][...], start["hidden"]["kernel"][...])
    assert moved == (wrt is nnx.Param)
    assert not np.array_equal(state["norm"]["mean"][...], start["norm"]["mean"][...])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.tanh(nn.LayerNorm()(nn.Dense(64)(x))))


def test_linen_train_state():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]

    def train(value_and_grad):
        @jax.jit
        def step(state, batch):
            def loss_of(params, batch):
                return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

            loss, grads = value_and_grad(loss_of)(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
        state = jax.device_put(state, EVERYWHERE)
        for batch in batches():
            state, _ = step(state, batch)
        return state

    ours = functools.partial(dq.value_and_grad, mesh=auto_mesh(), axis_name="data", method=EXACT)
    state, expected = train(ours), train(jax.value_and_grad)
    assert int(state.step) == STEPS
    assert_close(jax.device_get(state.params), expected.params)


def test_paths_of_nnx_states_exclude_norms():
    grads = nnx.state(Model(), nnx.Param)
    asked = []

    def by_path(path, leaf):
        asked.append(path)
        return None if path.startswith("norm/") else dq.comparators.MXFP8()

    found = dq.explain(grads, 8, method=small(by_path), topology=dq.Direct(), verbose=False)
    assert "hidden/kernel/value" in asked
    routes = {row.name: row.route for row in found.rows}
    assert {route for name, route in routes.items() if "norm" in name} == {"exact: excluded"}
    assert {route for name, route in routes.items() if "norm" not in name} == {"compressed"}


def test_states_with_keys_are_refused():
    """The state of a model with dropout has the keys of its noise; gradients have none."""
    state = nnx.state(nnx.eval_shape(lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0))))
    with pytest.raises(
        ValueError, match=r"leaf \['rngs'\]\['key'\].*nnx\.state\(model, nnx\.Param"
    ):
        dq.explain(state, 2, verbose=False)
