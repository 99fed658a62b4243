"""The ring under every map of JAX: the same bits, whatever runs it, for any number of workers."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHEAP,
    LOOP,
    METHODS,
    TWO_WIDTHS,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    daily,
    gradient,
    sharded,
    vmapped,
)
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

METHOD = TWO_WIDTHS
UNROLLED = dq.Ring(unroll_up_to=16)
N = 4
STREAMS = dq.Ring(streams=3, unroll_up_to=1, balance=0.0)


def relative_error(result, x):
    exact = np.sum(np.asarray(x, np.float64), axis=0)
    return np.sum((np.asarray(result, np.float64) - exact) ** 2) / np.sum(exact**2)


def plan_is_exact(n, size, seed=0):
    """f32[n, size] whose statistics are exact in bf16 in whatever order workers are added.

    XLA on CPU adds a bf16 all-reduce in f32 under shard_map, and under vmap in bf16, so that the
    plan may differ. Here a super-group holds as many 1 as -1, 3 and -3, times a power of two, in
    an order of each worker's own: squared norms are 5 * 2^k, of which up to 51 add up exactly, and
    means 0. Partial sums differ between workers and coordinates, and are rounded.
    """
    rng = np.random.default_rng(seed)
    rows = -(-size // 256)
    x = rng.permuted(np.tile([1.0, -1.0, 3.0, -3.0], (n, rows, 64)), axis=2)
    x = x * np.exp2(rng.integers(-6, 6, (rows, 1)))
    x[:, -1] = 0.0  # the last super-group is cut off
    return jnp.asarray(x.reshape(n, -1)[:, :size], jnp.float32)


@pytest.fixture(scope="module")
def on_one_device():
    x = plan_is_exact(N, 2 * 8 * N * 256 - 100)
    result = np.asarray(vmapped(METHOD, UNROLLED)(x, jax.random.key(3)))
    assert_replicas_equal(result)
    assert 1e-4 < relative_error(result[0], x) < 0.2  # far from exact: rounding is compared
    return x, result


@pytest.mark.release
def test_unchecked_shard_map_gives_the_bits_of_vmap(on_one_device):
    x, expected = on_one_device
    result = sharded(METHOD, UNROLLED, n=N)(x, jax.random.key(3))
    assert len({shard.device for shard in result.addressable_shards}) == N
    assert_same_bits(np.asarray(result), expected)


def test_shard_map_gives_the_bits_of_vmap_and_one_result(on_one_device):
    x, expected = on_one_device

    def one(x, key):
        return dq.psum(x[0], "data", method=METHOD, topology=UNROLLED, key=key)

    checked = jax.shard_map(one, mesh=auto_mesh(N), in_specs=(P("data"), P()), out_specs=P())
    result = jax.jit(checked)(x, jax.random.key(3))
    copies = [np.asarray(shard.data) for shard in result.addressable_shards]
    assert len(copies) == N
    for copy in copies:
        assert_same_bits(copy, expected[0])


@pytest.mark.release
def test_pmap_gives_them_too(on_one_device):
    x, expected = on_one_device
    reduce = functools.partial(dq.psum, axis_name="data", method=METHOD, topology=UNROLLED)
    mapped = jax.pmap(lambda x, key: reduce(x, key=key), axis_name="data", in_axes=(0, None))
    assert_same_bits(np.asarray(mapped(x, jax.random.key(3))), expected)


def test_looped_ring_gives_the_bits_of_the_unrolled_one(on_one_device):
    x, expected = on_one_device
    looped = np.asarray(vmapped(METHOD, dq.Ring(unroll_up_to=2))(x, jax.random.key(3)))
    assert_same_bits(looped, expected)


@pytest.mark.release
def test_shard_map_replicas_agree_on_any_data():
    """With rounded statistics, too, all devices hold the same plan and result."""
    x = gradient(1, 8, 2 * 8 * 8 * 256 - 100)
    result = np.asarray(sharded(METHOD, UNROLLED)(x, jax.random.key(0)))
    assert_replicas_equal(result)
    assert relative_error(result[0], x) < 0.05


@pytest.mark.parametrize("n", daily([2, 3, 8, 17, 33], [17]))
def test_any_number_of_workers(n):
    x = gradient(n, n, 8 * 256 * n - 13)  # a tile of width 4 for each chunk
    result = np.asarray(vmapped(CHEAP)(x, jax.random.key(0)))
    assert_replicas_equal(result)
    # One hop more for each worker, each with a larger sum: n times the error of one encoding.
    assert relative_error(result[0], x) < 0.02 * n


@pytest.mark.parametrize("n", daily([2, 5], [2]))
def test_streams(n):
    x = gradient(n, n, 3 * 8 * 256 * n - 13)
    run = vmapped(CHEAP, STREAMS)
    result = np.asarray(run(x, jax.random.key(0)))
    assert_replicas_equal(result)
    assert relative_error(result[0], x) < 0.02 * n
    bad = np.asarray(run(x.at[n - 1, 777].set(jnp.nan), jax.random.key(0)))
    assert_replicas_equal(bad)
    np.testing.assert_array_equal(np.isnan(bad[0]), np.arange(x.shape[1]) // 256 == 777 // 256)


@pytest.mark.parametrize("size", daily([1, 7, 255, 257, 4099], [257]))
def test_small_and_odd_sizes(size):
    method = dq.Compression(dq.DynamiQ(bits=32, widths=(8,)), min_leaf_size=1, min_bucket_size=1)
    x = gradient(5, 3, size)
    result = np.asarray(vmapped(method)(x, jax.random.key(0)))
    assert result.shape == (3, size)
    assert_replicas_equal(result)
    # Three roundings in steps of at most 2/150 of a partial sum's maximum.
    most = np.max(np.abs(x), axis=1).sum()
    assert np.max(np.abs(result[0] - np.sum(x, axis=0))) < 3 * 2 / 150 * 1.01 * most


@pytest.mark.parametrize("dtype", daily(["bfloat16", "float16"], ["bfloat16"]))
def test_low_precision_gradients(dtype):
    x = (gradient(6, 4, 10_000) / 64).astype(dtype)
    result = np.asarray(vmapped(CHEAP)(x, jax.random.key(0)))
    assert result.dtype == x.dtype
    assert_replicas_equal(result)
    # The sum is kept in f32 between hops: no worse than f32 but for the last cast.
    single = np.asarray(vmapped(CHEAP)(x.astype(jnp.float32), jax.random.key(0)))
    assert_same_bits(result, single.astype(result.dtype))


def program(ring, n):
    """The program of a ring of n workers."""
    x = jax.ShapeDtypeStruct((n, 8 * 256 * n), jnp.float32)
    return vmapped(METHODS["default"], ring).lower(x, None).as_text()


def operations(text):
    """How many operations of each kind a program has."""
    return Counter(re.findall(r"\b(?:stablehlo|chlo|func)\.\w+|call @", text))


def test_rings_of_any_length_are_programs_of_the_same_size():
    half, whole = program(dq.Ring(), 32), program(dq.Ring(), 64)
    # Twice as many super-groups share a tile: their energies are halved and added once more.
    more = operations(whole) - operations(half)
    assert more.total() <= 4 and not operations(half) - operations(whole)
    assert abs(len(whole) / len(half) - 1) < 0.05  # tables do not grow either


def test_a_loop_is_smaller_than_sixteen_hops():
    looped, unrolled = (operations(program(ring, 8)).total() for ring in (LOOP, UNROLLED))
    assert looped < 0.75 * unrolled  # whose hops share the functions of tiles
