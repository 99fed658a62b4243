"""Accumulates the gradients of micro-batches in a scan; reduces once per window.

    python examples/recipes/accumulate_scan.py

prints

    3 reductions in 12 steps
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params

import dynamiq_jax as dq
import dynamiq_jax.optax

optimizer = optax.chain(
    dq.optax.all_reduce("data", compression=compression, metrics=True),  # 1: for lax.pmean(grads)
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3),
)
trained, opt_state = params, dq.optax.init(optimizer, params, mesh)
specs = dq.optax.state_specs(opt_state)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), specs, P(None, "data")), out_specs=(P(), specs))
def window_step(params, opt_state, window):
    local = lax.pcast(params, "data", to="varying")

    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(local, batch)), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, local), window)
    grads = jax.tree.map(lambda g: g / 4, total)  # the mean of four
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


for i in range(0, len(batches), 4):
    window = jax.tree.map(lambda *x: np.stack(x), *batches[i : i + 4])
    trained, opt_state = window_step(trained, opt_state, window)
print(f"{opt_state[0].step} reductions in {len(batches)} steps")
