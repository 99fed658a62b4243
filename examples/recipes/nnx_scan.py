"""Flax NNX layers, stacked as for `nnx.scan`; their gradients are reduced in the backward pass.

    python examples/recipes/nnx_scan.py

prints

    loss 0.855
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from start import batches, compression, mesh

import dynamiq_jax as dq


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.LayerNorm(256, rngs=rngs), nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.dense(self.norm(x)))


keys = jax.random.split(jax.random.key(0), 6)
stack = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(keys)
head = nnx.Linear(256, 8, rngs=nnx.Rngs(1))
(of_block, layers), (of_head, rest) = nnx.split(stack), nnx.split(head)
weights = {"layers": layers, "head": rest}


def model_loss(weights, batch):
    layer = lambda x, own: (nnx.merge(of_block, own)(x), None)
    x, _ = dq.scan(layer, batch["x"], weights["layers"], "data")  # 1: was nnx.scan
    return jnp.mean((nnx.merge(of_head, weights["head"])(x) - batch["y"]) ** 2)


# 2: was jax.value_and_grad
grad_fn = dq.value_and_grad(model_loss, mesh=mesh, axis_name="data", compression=compression)
optimizer = optax.adamw(1e-3)
opt_state = optimizer.init(weights)


@dq.jit  # 3: was jax.jit
def step(weights, opt_state, batch):
    loss, grads = grad_fn(weights, batch)
    updates, opt_state = optimizer.update(grads, opt_state, weights)
    return optax.apply_updates(weights, updates), opt_state, loss


for batch in batches:
    weights, opt_state, loss = step(weights, opt_state, batch)
print(f"loss {loss:.3f}")
