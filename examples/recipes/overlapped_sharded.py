"""Sharded updates in a pipeline.

    python examples/recipes/overlapped_sharded.py

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


optimizer = dq.optax.sharded(optax.adamw(1e-3), "data", compression=compression)
opt_state = dq.optax.init(optimizer, params, mesh)
specs = dq.optax.state_specs(opt_state)


def scattered_loss(masters, copies, batch):
    trees = masters, copies, specs.masters
    masters, copies, splits = ([*tree["blocks"], tree["rest"]] for tree in trees)
    functions = [block] * (len(masters) - 1) + [loss_fn]
    options = {"compression": compression, "specs": splits, "copies": copies}  # 1: specs and copies
    return dq.overlapped(functions, masters, batch, "data", **options)


@dq.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(scattered_loss)(opt_state.masters, params, batch)  # 2: masters
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
print(f"loss {loss:.3f}")
