"""Sharded updates in a pipeline, with gathers in the next forward pass.

    python examples/recipes/deferred.py

prints

    loss 0.474
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, normal, params

import dynamiq_jax as dq
import dynamiq_jax.optax

kernels = normal(6, 256, 256) / 16
blocks = [{"kernel": kernel} for kernel in kernels]
params = jax.device_put({"blocks": blocks, "rest": params}, NamedSharding(mesh, P()))


def block(own, batch):
    return batch | {"x": batch["x"] + jnp.tanh(batch["x"] @ own["kernel"])}


optimizer = dq.optax.sharded(
    optax.adamw(1e-3),
    "data",
    compression=compression,
    deferred=True,  # 1: deferred
)
functions = [block] * len(params["blocks"]) + [loss_fn]
params = [*params["blocks"], params["rest"]]  # a list with one tree for each function
opt_state = dq.optax.init(optimizer, params, mesh)
specs = dq.optax.state_specs(opt_state)


def deferred_loss(masters, copies, pending, batch):
    told = {"compression": compression, "specs": specs.masters, "copies": copies}
    return dq.overlapped(functions, masters, batch, "data", pending=pending, **told)  # 2: pending=


@dq.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
def step(params, opt_state, batch):
    both = jax.value_and_grad(deferred_loss, has_aux=True)  # 3: a pair, the loss and the copies
    (loss, params), grads = both(opt_state.masters, params, opt_state.pending, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
current = dq.optax.gathered(params, opt_state)  # to evaluate, or to export
print(f"loss {loss:.3f}")
