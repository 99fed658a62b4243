"""Sharded updates (ZeRO-1) in a trainer for jax.jit.

    python examples/recipes/sharded_jit.py

prints

    loss 0.336
"""

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params

import dynamiq_jax as dq
import dynamiq_jax.optax

optimizer = dq.optax.sharded(  # 1: around the optimizer, without clip_by_global_norm
    optax.adamw(1e-3), "data", compression=compression, max_norm=1.0
)


grad_fn = dq.value_and_grad(  # 2: was jax.value_and_grad
    loss_fn, mesh=mesh, axis_name="data", compression=compression, unreduced=True
)
copy, opt_state = params, optimizer.init(params)  # params are on the mesh


@jax.jit
def step(params, opt_state, batch):
    loss, grads = grad_fn(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    copy, opt_state, loss = step(copy, opt_state, batch)
print(f"loss {loss:.3f}")
