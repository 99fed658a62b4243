"""The mean over a leading axis of replicas, as after local steps: drjax.reduce_mean, compressed.

    python examples/recipes/replicas.py

prints

    error 0.13
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from start import compression, mesh, normal

import dynamiq_jax as dq


@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
def reduce_mean(moved):  # each replica's own movement of its parameters
    own = jax.tree.map(lambda x: x[0], moved)
    return dq.pmean(own, "data", compression=compression)


moved = {"kernel": normal(mesh.size, 256, 512)}
mean = reduce_mean(moved)
exact = jnp.mean(moved["kernel"], axis=0)
error = jnp.linalg.norm(mean["kernel"] - exact) / jnp.linalg.norm(exact)
print(f"error {error:.2f}")
