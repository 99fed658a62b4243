"""Sharded updates under Flax's TrainState, on Explicit axes.

    python examples/recipes/train_state.py

prints

    loss 0.344
"""

import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, params

import dynamiq_jax as dq
import dynamiq_jax.optax

with jax.set_mesh(dq.make_mesh((-1,), ("data",))):
    optimizer = dq.optax.sharded(  # 1: was optax.adam(1e-3)
        optax.adam(1e-3), "data", compression=compression
    )
    copy = jax.device_put(jax.device_get(params), P())
    state = TrainState.create(apply_fn=loss_fn, params=copy, tx=optimizer)
    grad_fn = dq.value_and_grad(  # 2
        loss_fn, axis_name="data", compression=compression, unreduced=True
    )

    @dq.jit
    def train_step(state, batch):
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for batch in batches:
        state, loss = train_step(state, jax.device_put(batch, P("data")))
print(f"loss {loss:.3f}")
