"""A compressed sum has what differential privacy supposes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, once

import dynamiq_jax as dq

N, EXAMPLES, SIZE = 8, 128, 2**14
SUMS = {"exact": dq.F32(), "5 bits": dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)}


@once
def clipped():
    """Gradients of examples, of norm 1, that have a common part."""
    common, own = jax.random.split(jax.random.key(0))
    g = jax.random.normal(common, (1, SIZE)) + 2 * jax.random.normal(own, (EXAMPLES, SIZE))
    return g / jnp.linalg.norm(g, axis=1, keepdims=True)


@functools.cache
def summed(name):
    run = lambda x: dq.psum(x.sum(0), "data", compression=SUMS[name])
    return jax.jit(jax.shard_map(run, mesh=auto_mesh(N), in_specs=P("data"), out_specs=P()))


def test_one_example_moves_a_compressed_sum_by_more_than_the_clip():
    """So noise by the clip's norm, added after the sum, protects too little."""
    gradients = clipped()
    other = gradients.copy()
    other[100] *= -1
    moved = {name: np.linalg.norm(summed(name)(gradients) - summed(name)(other)) for name in SUMS}
    assert moved["exact"] <= 2.001
    assert moved["5 bits"] > 2.5 * moved["exact"]


def test_a_compressed_sum_is_no_function_of_the_exact_sum():
    """Terms of equal sum give other results: noise in the sum alone is no argument for privacy."""
    gradients = clipped()
    moved = gradients.copy()
    shift = 4 * np.round(gradients[-1] * 2**12) / 2**12  # from one worker's term to another's
    moved[0], moved[-1] = moved[0] + shift, moved[-1] - shift
    exact = [np.asarray(summed("exact")(x)) for x in (gradients, moved)]
    np.testing.assert_allclose(*exact, atol=1e-6)
    found = [np.asarray(summed("5 bits")(x)) for x in (gradients, moved)]
    assert np.linalg.norm(found[0] - found[1]) > 100 * np.linalg.norm(exact[0] - exact[1])
