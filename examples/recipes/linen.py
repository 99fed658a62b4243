"""A Flax Linen model under TrainState.

    python examples/recipes/linen.py

prints

    loss 0.313
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from start import batches, compression, mesh

import dynamiq_jax as dq

model = nn.Sequential([nn.Dense(1024), nn.LayerNorm(), nn.tanh, nn.Dense(8)])
weights = model.init(jax.random.key(0), batches[0]["x"])["params"]
state = TrainState.create(apply_fn=model.apply, params=weights, tx=optax.adamw(1e-3))


@jax.jit
def step(state, batch):
    def model_loss(params, batch):  # 1: was (params)
        out = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    # 2: was jax.value_and_grad
    grad_fn = dq.value_and_grad(model_loss, mesh=mesh, axis_name="data", compression=compression)
    loss, grads = grad_fn(state.params, batch)  # 3: was grad_fn(state.params)
    return state.apply_gradients(grads=grads), loss


for batch in batches:
    state, loss = step(state, batch)
print(f"loss {loss:.3f}")
