"""PermK end to end: whose coordinates are taken, and that every worker's are as often."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, assert_same_bits, sharded, small, vmapped

import dynamiq_jax as dq

KEY = jax.random.key(0)
METHOD = small(dq.comparators.PermK())


def draw(seed, n, size=1003):
    """Whole numbers that bf16 has, distinct on each worker in every coordinate: f32[n, size]."""
    rng = np.random.default_rng(seed)
    rows = rng.permuted(np.tile(np.arange(-40, 40), (size, 1)), axis=1)[:, :n]
    return rows.T.astype(np.float32)


@functools.cache
def run(n, mean=False):
    return vmapped(METHOD, None, mean=mean)


@pytest.mark.parametrize("n", range(2, 9))
def test_every_coordinate_is_one_workers_and_each_gives_its_share(n):
    x = draw(n, n)
    found = np.asarray(run(n, mean=True)(x, KEY))
    assert_replicas_equal(found)
    owners = np.isclose(found[0], x, rtol=1e-6, atol=1e-6)  # n times and over n
    np.testing.assert_array_equal(owners.sum(axis=0), 1)
    sets = owners[:, : 1003 // n * n].reshape(n, -1, n)
    np.testing.assert_array_equal(sets.sum(axis=2), 1)  # one of every n neighbours
    shares = owners.mean(axis=1)
    assert np.all(np.abs(shares - 1 / n) < 0.01)
    assert len(np.unique(sets.argmax(axis=2)[0])) == n  # all shifts occur
    total = np.asarray(run(n)(x, KEY))
    np.testing.assert_array_equal(total[0], n * np.round(found[0]))


def test_sums_are_unbiased_over_keys():
    n, count = 4, 400
    x = draw(1, n, 64)
    keys = jax.random.split(jax.random.key(3), count)
    found = np.asarray(jax.vmap(lambda key: run(n)(x, key)[0])(keys), np.float64)
    exact = x.sum(axis=0)
    spread = n * x.std(axis=0) / np.sqrt(count)
    score = (found.mean(axis=0) - exact) / spread
    assert np.max(np.abs(score)) < 4
    assert 0.6 < np.mean(score**2) < 1.5
    error = np.mean(np.sum((found - exact) ** 2, axis=1))
    assert error == pytest.approx(np.sum(n**2 * x.var(axis=0)), rel=0.05)


def test_identical_workers_are_exact():
    x = np.broadcast_to(draw(2, 1), (5, 1003))
    np.testing.assert_array_equal(run(5)(x, KEY), 5 * x)


def test_zeros_and_the_largest_numbers():
    assert not np.any(run(3)(np.zeros((3, 50), np.float32), KEY))
    top = np.finfo(np.float32).max
    found = np.asarray(run(3)(np.full((3, 50), top, np.float32), KEY))
    np.testing.assert_array_equal(found, float(jnp.finfo(jnp.bfloat16).max))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_whoever_was_drawn(bad):
    x = draw(3, 4)
    for worker, place in enumerate((0, 405, 810, 1002)):
        x[worker, place] = bad
    found = np.asarray(run(4)(x, KEY))
    assert_replicas_equal(found)
    np.testing.assert_array_equal(
        np.isnan(found[0]), np.isin(np.arange(1003) // 4, [0, 405 // 4, 810 // 4, 1002 // 4])
    )


def test_without_a_key_gradients_are_the_seed():
    reduce = jax.jit(jax.vmap(lambda x: dq.psum(x, "data", method=METHOD), axis_name="data"))
    x, other = draw(4, 3), draw(4, 3)
    other[2, 7] += 1
    first, again, changed = (np.asarray(reduce(v)) for v in (x, x, other))
    assert_replicas_equal(first)
    assert_same_bits(first, again)
    assert 0.5 < np.mean(first != changed) < 0.8  # two of three draws differ


def test_devices_give_the_bits_of_vmap():
    x = draw(5, 4)
    found = np.asarray(sharded(METHOD, None, n=4)(jnp.asarray(x), KEY))
    assert_same_bits(found, np.asarray(run(4)(x, KEY)))


def test_bits_per_coordinate_and_refusals():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    told = dq.explain(leaf, 8, method=dq.comparators.PermK(), verbose=False)
    assert told.bits_per_coord == pytest.approx(8, rel=1e-4)
    with pytest.raises(NotImplementedError, match=r"PermK gathers natively.*leave topology=None"):
        dq.explain(leaf, 8, method=dq.comparators.PermK(), topology=dq.Ring())


def test_bad_fields():
    with pytest.raises(ValueError, match="min_leaf_size=-1"):
        dq.Compression(dq.comparators.PermK(), min_leaf_size=-1)
