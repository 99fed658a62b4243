"""`BF16` and `F32`: by `lax.psum` and over topologies, where every rounding is known."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import assert_same_bits, auto_mesh, gradient, small, vmapped
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

BF16, F32 = small(dq.BF16()), small(dq.F32())
SIZE = 1000 - 3


def summed(method, topology, x, mean=False):
    return np.asarray(vmapped(method, topology, mean=mean)(x, None))


@pytest.mark.parametrize("method", [BF16, F32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_without_a_topology_it_is_laxs_psum(method, dtype):
    wire = jnp.bfloat16 if method is BF16 else jnp.float32
    x = gradient(0, 8, SIZE).astype(dtype)

    def native(v):
        return lax.psum(v.astype(wire), "data").astype(dtype)

    assert_same_bits(summed(method, None, x), np.asarray(jax.vmap(native, axis_name="data")(x)))

    def both(v):
        ours = dq.psum(v[0], "data", method=method)
        return ours, native(v[0])

    mapped = jax.shard_map(both, mesh=auto_mesh(8), in_specs=P("data"), out_specs=P())
    assert_same_bits(*jax.jit(mapped)(x))


def test_every_hop_of_a_ring_rounds_to_the_nearest_bf16():
    n, chunk = 5, 208
    x = np.zeros((n, n * chunk), np.float32)
    x[:, :SIZE] = gradient(2, n, SIZE)
    expected = np.empty(n * chunk, np.float32)
    for c in range(n):
        own = x[:, c * chunk : (c + 1) * chunk]
        partial = np.zeros(chunk, np.float32)
        for hop in range(1, n + 1):
            partial = (own[(c + hop) % n] + partial).astype(ml_dtypes.bfloat16).astype(np.float32)
        expected[c * chunk : (c + 1) * chunk] = partial
    assert_same_bits(summed(BF16, dq.Ring(), x[:, :SIZE])[0], expected[:SIZE])


def over_two_levels(method, x, inner=None):
    topology = dq.Hierarchical(inner=inner, outer=dq.Ring())

    def one(v):
        return dq.psum(v, ("node", "gpu"), method=method, topology=topology)

    return jax.jit(jax.vmap(jax.vmap(one, axis_name="gpu"), axis_name="node"))(x)


@pytest.mark.parametrize("method", [BF16, F32])
def test_hierarchies_may_use_it_across_but_not_inside(method):
    limit = 32 if method is BF16 else 2**20  # sums are what bf16 and f32 hold exactly, and no less
    x = np.random.default_rng(7).integers(-limit, limit + 1, (2, 2, SIZE)).astype(np.float32)
    total = x.sum(axis=(0, 1), keepdims=True)
    np.testing.assert_array_equal(over_two_levels(method, x), np.broadcast_to(total, x.shape))
    with pytest.raises(NotImplementedError, match="the halves that Hierarchical"):
        over_two_levels(method, x, inner=dq.Direct())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_hierarchies_of_f32_round_once_to_the_leafs_dtype(dtype):
    """Also inside; in the leaf's dtype, the sums of pairs would be rounded."""
    most = 2 ** (jnp.finfo(dtype).nmant + 1)  # what the dtype holds exactly
    x = np.random.default_rng(8).integers(-most, most + 1, (2, 2, SIZE)).astype(np.float32)
    total = x.sum(axis=(0, 1), keepdims=True).astype(dtype)
    found = over_two_levels(F32, jnp.asarray(x, dtype))
    assert_same_bits(np.asarray(found), np.broadcast_to(total, x.shape))
