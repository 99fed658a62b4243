"""Gradients of Flax NNX modules, with BatchNorm and Dropout.

    python examples/recipes/nnx.py

prints

    loss 0.382
"""

import jax.numpy as jnp
import optax
from flax import nnx
from start import batches, compression, mesh

import dynamiq_jax as dq


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(256, 1024, rngs=rngs)
        self.norm = nnx.BatchNorm(1024, rngs=rngs, axis_name="data")  # 1: new on Auto axes
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(1024, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x)))))


def model_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, batch):
    grad_fn = dq.nnx.value_and_grad(  # 2: was nnx.value_and_grad(model_loss)
        model_loss, axis_name="data", mesh=mesh, compression=compression
    )
    loss, grads = grad_fn(model, batch)
    optimizer.update(model, grads)
    return loss


for batch in batches:
    loss = step(model, optimizer, batch)
print(f"loss {loss:.3f}")
