"""Flax Linen layers that `nn.scan` stacks; their gradients are reduced in the backward pass.

    python examples/recipes/linen_scan.py

prints

    loss 0.950
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from start import batches, compression, mesh

import dynamiq_jax as dq


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.tanh(nn.Dense(x.shape[-1])(nn.LayerNorm()(x))), None


options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 6}
stack, head = nn.scan(Block, **options)(), nn.Dense(8)
keys = jax.random.split(jax.random.key(0))
weights = {
    "layers": stack.init(keys[0], batches[0]["x"])["params"],
    "head": head.init(keys[1], batches[0]["x"])["params"],
}


def model_loss(weights, batch):
    layer = lambda x, own: Block().apply({"params": own}, x)
    x, _ = dq.scan(layer, batch["x"], weights["layers"], "data")  # 1: was stack.apply
    return jnp.mean((head.apply({"params": weights["head"]}, x) - batch["y"]) ** 2)


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
