"""Sums are deterministic, the same on all workers, and carry a NaN in one super-group.

    python examples/recipes/same_bits.py

prints

    the same bits on all workers, twice
    an infinity makes 256 coordinates NaN
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from start import compression, mesh

import dynamiq_jax as dq

x = jax.random.normal(jax.random.key(0), (mesh.size, 2**19))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def mean(x):
    return dq.pmean(x, "data", compression=compression).reshape(1, -1)


first, second = mean(x), mean(x)
assert bool(jnp.all(first == second)) and bool(jnp.all(first == first[:1]))
print("the same bits on all workers, twice")
bad = mean(x.at[-1, 1000].set(jnp.inf))
assert bool(jnp.all(jnp.isnan(bad) == jnp.isnan(bad[:1])))
print(f"an infinity makes {int(jnp.sum(jnp.isnan(bad[0])))} coordinates NaN")
