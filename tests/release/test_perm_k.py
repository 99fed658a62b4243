"""PermK end to end: whose coordinates are taken, and that every worker's are as often."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, assert_same_bits, small, vmapped

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


def test_identical_workers_are_exact():
    x = np.broadcast_to(draw(2, 1), (5, 1003))
    np.testing.assert_array_equal(run(5)(x, KEY), 5 * x)


def test_without_a_key_gradients_are_the_seed():
    reduce = jax.jit(jax.vmap(lambda x: dq.psum(x, "data", method=METHOD), axis_name="data"))
    x, other = draw(4, 3), draw(4, 3)
    other[2, 7] += 1
    first, again, changed = (np.asarray(reduce(v)) for v in (x, x, other))
    assert_replicas_equal(first)
    assert_same_bits(first, again)
    assert 0.5 < np.mean(first != changed) < 0.8  # two of three draws differ


def test_bits_per_coordinate_and_refusals():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    told = dq.explain(leaf, 8, method=dq.comparators.PermK(), verbose=False)
    assert told.bits_per_coord == pytest.approx(8, rel=1e-4)
    with pytest.raises(NotImplementedError, match=r"PermK gathers natively.*leave topology=None"):
        dq.explain(leaf, 8, method=dq.comparators.PermK(), topology=dq.Ring())


def test_bad_fields():
    with pytest.raises(ValueError, match="min_leaf_size=-1"):
        dq.Compression(dq.comparators.PermK(), min_leaf_size=-1)
