"""ARC-Top-K end to end: which rows travel, what they sum up to, what memory remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    first_state,
    relative_error,
    small,
    stepper,
)
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(0)


def PLAIN(**options):
    """The method without memory, however small a leaf is."""
    return small(dq.comparators.ARCTopK(**options))


def ARCTopK(**options):
    """Error feedback around it."""
    return small(dq.ErrorFeedback(dq.comparators.ARCTopK(**options)))


def draw(seed, n, shape=(150, 40), spread=1.0):
    """f32[n, *shape]: rows of very different length, distinct on each worker."""
    rng = np.random.default_rng(seed)
    length = np.exp(spread * rng.standard_normal((*shape[:-1], 1)))
    return jnp.asarray(rng.standard_normal((n, *shape)) * length, jnp.float32)


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


def rows_of(x):
    return np.asarray(x).reshape(-1, x.shape[-1])


def energies(x):
    return np.sum(rows_of(total_of(x)) ** 2, axis=1)


def reduce(method, x, key=KEY):
    """One step's sums, and which rows are not zero."""
    found, _ = stepper(method)(x, key, first_state(method, x, len(x)))
    assert_replicas_equal(found)
    found = np.asarray(found[0], np.float64)
    return found, np.any(rows_of(found) != 0, axis=1)


def check_rows(found, x, sent):
    """Rows that were sent hold the sum, up to n roundings to bf16."""
    own, found = np.asarray(x, np.float64), rows_of(found)
    sizes = rows_of(np.abs(own).sum(axis=0))[sent]
    error = np.abs(found - rows_of(own.sum(axis=0)))[sent]
    assert np.all(error <= len(own) * 2.0**-8 * sizes)


@pytest.mark.parametrize("n", range(2, 9))
def test_some_rows_are_summed_and_the_others_are_zero(n):
    shape = [(150, 40), (7, 11, 13), (61, 9)][n % 3]
    density, x = [0.2, 0.5, 0.03][n % 3], draw(n, n, shape)
    found, sent = reduce(PLAIN(density=density), x)
    assert sent.sum() == np.ceil(density * np.prod(shape[:-1]))
    check_rows(found, x, sent)


@pytest.mark.parametrize("rank", [1, 4, 20])
def test_rows_of_most_energy_are_found_as_well_as_the_rank_allows(rank):
    """Against the best rows, and rows at random, by the mean over keys."""
    x, method = draw(0, 4, spread=1.0), PLAIN(rank=rank)
    energy = energies(x) / energies(x).sum()
    best = np.sort(energy)[-30:].sum()
    kept = [energy[reduce(method, x, jax.random.key(i))[1]].sum() for i in range(8)]
    low, high = {1: (0.6, 0.87), 4: (0.88, 0.975), 20: (0.97, 1.0)}[rank]
    assert low * best < np.mean(kept) < high * best
    assert 0.5 < best < 0.95  # at random: 0.2


def test_density_one_is_exact():
    x = draw(1, 5, (33, 20))
    found, _ = reduce(PLAIN(density=1, wire="f32"), x)
    exact = jax.vmap(lambda x: lax.psum(x, "data"), axis_name="data")(x)
    assert_same_bits(found.astype(np.float32), np.asarray(exact[0]))
    low, _ = reduce(PLAIN(density=1), x)
    check_rows(low, x, np.ones(33, bool))
    assert relative_error(low, total_of(x)) > 1e-7


def test_rows_that_only_one_worker_has_are_summed_whole():
    """Disjoint and sparse: 24 rows of 150, and no others."""
    x = np.array(draw(2, 3))
    owner = np.arange(150) % 3
    x[:, 24:] = 0
    x[owner[None, :] != np.arange(3)[:, None]] = 0
    found, sent = reduce(PLAIN(density=0.16), jnp.asarray(x))
    np.testing.assert_array_equal(sent, np.arange(150) < 24)
    np.testing.assert_allclose(found, x.sum(axis=0), rtol=2.0**-8)


def test_identical_workers_and_workers_that_cancel():
    own = np.asarray(draw(3, 1)[0])
    found, sent = reduce(PLAIN(), jnp.asarray([own] * 4))
    np.testing.assert_allclose(rows_of(found)[sent], 4 * own[sent], rtol=2.0**-8)
    opposite = np.array([own, -own])
    opposite[:, 100:130] = own[100:130]
    found, sent = reduce(PLAIN(), jnp.asarray(opposite))
    np.testing.assert_array_equal(np.flatnonzero(sent), np.arange(100, 130))
    zeros, _ = reduce(PLAIN(), jnp.zeros((3, 150, 40)))
    np.testing.assert_array_equal(zeros, 0)


def test_what_a_message_rounds_off_is_in_memory():
    """One worker alone sends, so that sums to bf16 round nothing."""
    method, x = ARCTopK(density=0.5), draw(10, 3).at[1:].set(0)
    state, run = first_state(method, x, 3), stepper(method)
    delivered = 0.0
    for _ in range(3):
        found, state = run(x, KEY, state)
        delivered = delivered + np.asarray(found[0], np.float64)
    gap = delivered + total_of(state[0].residual).reshape(150, 40) - 3 * total_of(x)
    assert np.max(np.abs(gap)) < 1e-6 * np.max(np.abs(np.asarray(x)))


def test_every_step_and_every_key_has_a_sketch_of_its_own():
    x, method = draw(8, 3, spread=0.1), PLAIN()
    state, run = first_state(method, x, 3), stepper(method)
    first, later = run(x, KEY, state)
    second, _ = run(x, KEY, later)
    other, _ = run(x, jax.random.key(1), state)
    again, _ = run(x, KEY, state)
    assert_same_bits(np.asarray(first), np.asarray(again))
    assert np.mean(first[0] != second[0]) > 0.1
    assert np.mean(first[0] != other[0]) > 0.1

    def one(x, key):
        return dq.psum(x, "data", method=method, key=key)

    plain = jax.vmap(lambda x: one(x, None), axis_name="data")
    assert_same_bits(np.asarray(plain(x)), np.asarray(plain(x)))
    keyed = jax.vmap(one, in_axes=(0, None), axis_name="data")(x, KEY)
    assert np.mean(keyed != plain(x)) > 0.1


def test_wire_bits_and_memory():
    leaf, n = jax.ShapeDtypeStruct((1024, 512), jnp.float32), 8

    def bits(**options):
        method = dq.comparators.ARCTopK(**options)
        return dq.explain(leaf, n, method=method, verbose=False).bits_per_coord

    assert bits(density=0.25) == 16 * (0.25 + 4 / 512)
    assert bits(density=0.5, rank=8, wire="f32") == 32 * 0.5 + 16 * 8 / 512
    state = jax.eval_shape(lambda: as_compression(ARCTopK()).init_state(leaf, n))
    assert sum(4 * s.size for s in jax.tree.leaves(state)) == 4 * 1024 * 512 + 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0}, "density=0 must be above 0 and at most 1"),
        ({"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        ({"rank": 0}, "rank=0 must be a positive integer"),
        ({"wire": "fp8"}, "wire='fp8'; expected one of"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.ARCTopK(**fields)
