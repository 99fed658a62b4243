"""Peers average in a grid, along one axis after the other.

    python examples/recipes/grid.py

prints

    along row: 8.6e-03 apart, weights [3.]
    along column: 0.0e+00 apart, weights [6.]
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from start import compression, normal, params

import dynamiq_jax as dq

grid = dq.make_mesh((-1, 2), ("row", "column"), axis_types=(AxisType.Auto,) * 2)
peers = P(("row", "column"))


@functools.partial(jax.jit, static_argnames="axis")
def average(params, weight, axis):
    @jax.shard_map(mesh=grid, in_specs=(peers, peers), out_specs=(peers, peers))
    def one(params, weight):
        own = jax.tree.map(lambda x: x[0], params)
        mean = dq.pmean(own, axis, compression=compression, weight=weight[0])  # 1: new
        return jax.tree.map(lambda x: x[None], mean), lax.psum(weight, axis)

    return one(params, weight)


noise = normal(grid.size, 256, 1024)
models = {"kernel": params["hidden"]["kernel"] + 0.01 * noise}  # every peer its own
alive = np.array([1, 1, 1, 0, 1, 1, 0, 1], np.float32)[: grid.size]
weight = alive
for axis in ("row", "column"):  # round t along axis t mod 2
    models, weight = average(models, weight, axis)
    apart = float(jnp.ptp(models["kernel"], axis=0).mean())
    print(f"along {axis}: {apart:.1e} apart, weights {np.unique(weight)}")
# along row: 9.3e-03 apart, weights [3.]
# along column: 0.0e+00 apart, weights [6.]
