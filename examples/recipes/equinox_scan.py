"""equinox layers, stacked by `eqx.filter_vmap`; their gradients are reduced in the backward pass.

    python examples/recipes/equinox_scan.py

prints

    loss 0.345
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from start import batches, compression, mesh

import dynamiq_jax as dq


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.dense = eqx.nn.LayerNorm(256), eqx.nn.Linear(256, 256, key=key)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(self.norm(x)))


keys = jax.random.split(jax.random.key(0), 7)
net = {"layers": eqx.filter_vmap(Block)(keys[1:]), "head": eqx.nn.Linear(256, 8, key=keys[0])}
weights, static = eqx.partition(net, eqx.is_inexact_array)


def model_loss(weights, batch):
    layer = lambda x, own: (jax.vmap(eqx.combine(own, static["layers"]))(x), None)
    x, _ = dq.scan(layer, batch["x"], weights["layers"], "data")  # 1: was jax.lax.scan
    head = eqx.combine(weights["head"], static["head"])
    return jnp.mean((jax.vmap(head)(x) - batch["y"]) ** 2)


# 2: was jax.value_and_grad
grad_fn = dq.value_and_grad(model_loss, mesh=mesh, axis_name="data", compression=compression)
optimizer = optax.adamw(1e-3)
opt_state = optimizer.init(weights)


@dq.jit  # 3: was eqx.filter_jit
def step(weights, opt_state, batch):
    loss, grads = grad_fn(weights, batch)
    updates, opt_state = optimizer.update(grads, opt_state, weights)
    return eqx.apply_updates(weights, updates), opt_state, loss


for batch in batches:
    weights, opt_state, loss = step(weights, opt_state, batch)
print(f"loss {loss:.3f}")
