"""Workers with different numbers of tokens; one with NaN is left out.

    python examples/recipes/weight.py

prints

    all finite: True
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params, sgd

import dynamiq_jax as dq


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def step(params, batch):
    local = lax.pcast(params, "data", to="varying")
    grads = jax.grad(loss_fn)(local, batch)
    n_rows = jnp.sum(batch["x"][:, 0] > -2.0)  # rows that count, by a rule of the data
    weight = jnp.where(jnp.isfinite(optax.tree.norm(grads)), n_rows, 0)
    grads = dq.pmean(grads, "data", compression=compression, weight=weight)  # 1: new
    return sgd(params, grads)


broken = batches[0] | {"y": batches[0]["y"].copy()}
broken["y"][3] = np.nan  # on the first of eight workers
params = step(params, broken)
print(f"all finite: {bool(jnp.isfinite(optax.tree.norm(params)))}")
