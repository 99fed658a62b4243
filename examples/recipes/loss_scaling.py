"""Loss scaling: all workers skip the same steps.

    python examples/recipes/loss_scaling.py

prints

    scale 16384
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params, sgd

import dynamiq_jax as dq


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
def step(params, scale, batch):
    local = lax.pcast(params, "data", to="varying")
    grads = jax.grad(lambda params: scale * loss_fn(params, batch))(local)
    grads = jax.tree.map(lambda g: g / scale, grads)
    grads = dq.pmean(grads, "data", compression=compression)  # 1: was lax.pmean
    finite = jnp.isfinite(optax.tree.norm(grads))
    new = sgd(params, grads)
    params = jax.tree.map(functools.partial(jnp.where, finite), new, params)
    return params, jnp.where(finite, scale, scale / 2)


broken = batches[0] | {"y": batches[0]["y"].copy()}
broken["y"][3] = np.inf  # on the first of eight workers
scale = jnp.float32(2**15)
for batch in (batches[1], broken, batches[2]):
    params, scale = step(params, scale, batch)
print(f"scale {scale:.0f}")
