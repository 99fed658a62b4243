"""Reduces inside optax, with metrics, before the clip.

    python examples/recipes/optax_all_reduce.py

prints

    loss 0.334, vNMSE 1.7e-02
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


optimizer = optax.chain(
    dq.optax.all_reduce("data", compression=compression, metrics=True),  # 1: for lax.pmean(grads)
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3),
)
opt_state, loss = train_by(optimizer)
print(f"loss {loss:.3f}, vNMSE {opt_state[0].metrics.vnmse:.1e}")
