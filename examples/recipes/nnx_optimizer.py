"""Sharded updates under nnx.Optimizer, on Explicit axes.

    python examples/recipes/nnx_optimizer.py

prints

    loss 0.346
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from start import batches, compression

import dynamiq_jax as dq
import dynamiq_jax.optax


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(256, 1024, rngs=rngs)
        self.out = nnx.Linear(1024, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def net_loss(net, batch):
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


with jax.set_mesh(dq.make_mesh((-1,), ("data",))):
    net = Net(nnx.Rngs(0))
    rule = dq.optax.sharded(  # 1: was optax.adam(1e-3)
        optax.adam(1e-3), "data", compression=compression
    )
    optimizer = nnx.Optimizer(net, rule, wrt=nnx.Param)
    grad_fn = dq.nnx.value_and_grad(  # 2
        net_loss, axis_name="data", compression=compression, unreduced=True
    )

    @nnx.jit
    def nnx_step(net, optimizer, batch):
        loss, grads = grad_fn(net, batch)
        optimizer.update(net, grads)
        return loss

    for batch in batches:
        loss = nnx_step(net, optimizer, jax.device_put(batch, P("data")))
print(f"loss {loss:.3f}")
