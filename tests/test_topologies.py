"""Every topology: exact where it can be, unbiased, the same bits on all workers and maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHEAP,
    TOPOLOGIES,
    TWO_WIDTHS,
    anchored,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    daily,
    gradient,
    plan_is_exact,
    small,
    sum_error,
    vmapped,
)
from jax.sharding import PartitionSpec as P

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
        return dq.psum(x[0], "data", method=TWO_WIDTHS, topology=topology, key=key)

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
