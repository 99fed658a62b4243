"""Every topology: exact where it can be, the same bits on all workers and maps; BF16 and F32."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits, sum_error
from cases import CHEAP, TOPOLOGIES, TWO_WIDTHS, daily, over, small, vmapped
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import anchored, auto_mesh, gradient, plan_is_exact

import dynamiq_jax as dq

EIGHT_BITS = small(dq.DynamiQ(widths=(8,), bits=9, format=dq.Format(levels="piecewise")))
SERVED = [(name, n) for name, (_, numbers) in TOPOLOGIES.items() for n in numbers]


@pytest.mark.parametrize(
    ("name", "n"), daily(SERVED, [("ring", 7), ("butterfly", 4), ("direct", 4), ("direct", 1)])
)
def test_sums_come_back_for_any_number_of_workers(name, n):
    """Exactly where every partial sum lies on levels, else with the error of one encoding each."""
    run = vmapped(EIGHT_BITS, TOPOLOGIES[name][0])
    x = anchored(8, "piecewise", n)
    found = np.asarray(run(x, jax.random.key(0)))
    expected = np.broadcast_to(np.sum(np.asarray(x, np.float64), axis=0), x.shape)
    np.testing.assert_array_equal(found.astype(np.float64), expected)
    rough = gradient(n, *x.shape)
    found = np.asarray(run(rough, jax.random.key(0)))
    assert_replicas_equal(found)
    if n > 1:
        assert 1e-7 < sum_error(found[0], rough) < 5e-5 * n  # 1.9e-4 / 4.8 for each encoding


ON_DEVICES = [("ring", 4), ("butterfly", 4), ("direct", 8)]


@pytest.mark.parametrize(("name", "n"), daily(ON_DEVICES, ON_DEVICES[:2]))
def test_checked_shard_map_gives_one_result_of_the_same_bits(name, n):
    """The bits are those of vmap, since no map changes the plan of these data; the ring loops."""
    topology, x = TOPOLOGIES[name][0], plan_is_exact(n, 2 * 8 * n * 256 - 100)
    expected = np.asarray(vmapped(TWO_WIDTHS, topology)(x, jax.random.key(3)))
    assert_replicas_equal(expected)
    assert 1e-5 < sum_error(expected[0], x) < 0.2  # far from exact: rounding is compared

    def one(x, key):
        return dq.psum(x[0], "data", compression=over(topology, TWO_WIDTHS), key=key)

    checked = jax.shard_map(one, mesh=auto_mesh(n), in_specs=(P("data"), P()), out_specs=P())
    result = jax.jit(checked)(x, jax.random.key(3))
    copies = [np.asarray(shard.data) for shard in result.addressable_shards]
    assert len(copies) == n
    for copy in copies:
        assert_same_bits(copy, expected[0])
    if name == "ring":
        looped = vmapped(TWO_WIDTHS, dq.Ring(unroll_up_to=2))(x, jax.random.key(3))
        assert_same_bits(looped, expected)


@pytest.mark.parametrize("dtype", daily(["bfloat16", "float16"], ["bfloat16"]))
def test_low_precision_gradients(dtype):
    x = (gradient(6, 4, 10_000) / 64).astype(dtype)
    result = np.asarray(vmapped(CHEAP)(x, jax.random.key(0)))
    assert result.dtype == x.dtype
    assert_replicas_equal(result)
    # The sum is kept in f32 between hops: no worse than f32 but for the last cast.
    single = np.asarray(vmapped(CHEAP)(x.astype(jnp.float32), jax.random.key(0)))
    assert_same_bits(result, single.astype(result.dtype))


# --- Exact methods, of which every rounding is known ----------------------------------------------

BF16, F32 = small(dq.BF16()), small(dq.F32())
SIZE = 1000 - 3


def summed(method, topology, x):
    return np.asarray(vmapped(method, topology)(x, None))


@pytest.mark.parametrize("method", [BF16, F32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_without_a_topology_it_is_laxs_psum(method, dtype):
    wire = jnp.bfloat16 if method is BF16 else jnp.float32
    x = gradient(0, 8, SIZE).astype(dtype)

    def native(v):
        return lax.psum(v.astype(wire), "data").astype(dtype)

    assert_same_bits(summed(method, None, x), np.asarray(jax.vmap(native, axis_name="data")(x)))

    def both(v):
        ours = dq.psum(v[0], "data", compression=method)
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
        return dq.psum(v, ("node", "gpu"), compression=over(topology, method))

    return jax.jit(jax.vmap(jax.vmap(one, axis_name="gpu"), axis_name="node"))(x)


@pytest.mark.parametrize("method", [BF16, F32])
def test_hierarchies_may_use_it_across_and_inside(method):
    limit = 32 if method is BF16 else 2**20  # sums are what bf16 and f32 hold exactly, and no less
    x = np.random.default_rng(7).integers(-limit, limit + 1, (2, 2, SIZE)).astype(np.float32)
    total = x.sum(axis=(0, 1), keepdims=True)
    for inner in (None, dq.Direct()):
        found = over_two_levels(method, x, inner=inner)
        np.testing.assert_array_equal(found, np.broadcast_to(total, x.shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_hierarchies_of_f32_round_once_to_the_leafs_dtype(dtype):
    """Also inside; in the leaf's dtype, the sums of pairs would be rounded."""
    most = 2 ** (jnp.finfo(dtype).nmant + 1)  # what the dtype holds exactly
    x = np.random.default_rng(8).integers(-most, most + 1, (2, 2, SIZE)).astype(np.float32)
    total = x.sum(axis=(0, 1), keepdims=True).astype(dtype)
    found = over_two_levels(F32, jnp.asarray(x, dtype))
    assert_same_bits(np.asarray(found), np.broadcast_to(total, x.shape))
