"""Sharded updates (ZeRO-1) inside jax.shard_map.

    python examples/recipes/sharded_map.py

prints

    loss 0.336, a worker updates (32, 1024), 0 skipped
    norm of the gradient 1.25, 0 steps skipped in a row
"""

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params

import dynamiq_jax as dq
import dynamiq_jax.optax  # dq.optax; the library itself needs no optax


def train_by(optimizer):
    trained = params
    opt_state = dq.optax.init(optimizer, params, mesh)  # 2: was optimizer.init(params)
    specs = dq.optax.state_specs(opt_state)  # 3: was P()
    in_specs, out_specs = (P(), specs, P("data")), (P(), specs, P())

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    def step(params, opt_state, batch):
        local = lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(local, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")

    for batch in batches:
        trained, opt_state, loss = step(trained, opt_state, batch)
    return opt_state, loss


optimizer = dq.optax.sharded(  # 1: around the optimizer, without clip_by_global_norm
    optax.adamw(1e-3), "data", compression=compression, max_norm=1.0
)
opt_state, loss = train_by(optimizer)
kernel = opt_state.masters["hidden"]["kernel"].addressable_shards[0].data
print(f"loss {loss:.3f}, a worker updates {kernel.shape}, {opt_state.skipped} skipped")
skipped = dq.optax.warn_of_skipped(opt_state)  # warns from 3 skipped steps in a row on
print(f"norm of the gradient {opt_state.norm:.2f}, {skipped} steps skipped in a row")
