"""The randomness of rounding: uniform words, and how words of different slots relate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NOISE_WORDS, Noise, mix, slot_noise
from pallas_kernels.hashing import noise_words

ROUNDINGS = ("antithetic", "correlated", "independent")
QUADS = 1 << 14


@functools.partial(jax.jit, static_argnames=("n_slots", "rounding"))
def words_of(seed, n_slots, rounding):
    """The noise words of 4 * QUADS coordinates in every slot: uint32[n_slots, 4 * QUADS]."""
    noise = slot_noise(seed, n_slots, rounding)
    counter = jnp.arange(QUADS, dtype=jnp.uint32)[:, None]
    rotation = jnp.arange(4, dtype=jnp.uint32)[None] * 8
    words = [noise_words(counter, rotation, Noise(*row), rounding) for row in noise]
    return jnp.stack(words).reshape(n_slots, -1)


def words(n_slots, rounding, seed=(1, 2)):
    return np.asarray(words_of(jnp.array(seed, jnp.uint32), n_slots, rounding))


def chi_square(values, bins):
    """The z-score of a chi-square test that integers are uniform on 0..bins-1."""
    counts = np.bincount(values.ravel(), minlength=bins)
    expected = values.size / bins
    statistic = np.sum((counts - expected) ** 2) / expected
    return (statistic - (bins - 1)) / np.sqrt(2 * (bins - 1))


def test_mix_is_a_bijection():
    # A random function would map 2^20 inputs to about 128 collisions.
    x = jnp.arange(1 << 20, dtype=jnp.uint32) * jnp.uint32(4099)
    assert np.unique(np.asarray(mix(x))).size == 1 << 20


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("n_slots", [1, 2, 5, 8])
def test_words_are_uniform_in_every_slot_and_quad_position(n_slots, rounding):
    every = words(n_slots, rounding)
    for slot in range(n_slots):
        for position in range(4):
            high = every[slot, position::4] >> 16
            # 16384 words in 64 bins: one half 6% fuller than the other would score 5, 10% 14.
            assert chi_square(high >> 10, 64) < 6
            # What rounding needs most; six sigma, 1.4% of the range, is one false alarm in 10^9.
            assert abs(high.mean() / 65535 - 0.5) < 6 * np.sqrt(1 / 12 / QUADS)


@pytest.mark.parametrize("rounding", ["antithetic", "independent"])
def test_every_bit_of_a_word_is_fair(rounding):
    every = words(2, rounding)
    for bit in range(32):
        ones = ((every >> bit) & 1).mean(axis=1)
        assert np.all(np.abs(ones - 0.5) < 6 * 0.5 / np.sqrt(4 * QUADS))


@pytest.mark.parametrize(
    ("n_slots", "rounding"),
    [(2, "antithetic"), (3, "antithetic"), (8, "antithetic"), (4, "independent")],
)
def test_slots_are_unrelated_but_for_complementary_pairs(n_slots, rounding):
    every = words(n_slots, rounding)
    # Of antithetic slots an odd one out is the first.
    seconds = range(n_slots % 2 + 1, n_slots, 2) if rounding == "antithetic" else ()
    for slot in seconds:
        np.testing.assert_array_equal(every[slot - 1] ^ every[slot], 0xFFFFFFFF)
    fraction = np.delete(every, seconds, axis=0) / 2.0**32 - 0.5
    products = fraction @ fraction.T / fraction.shape[1] * 12
    np.testing.assert_allclose(products, np.eye(len(fraction)), atol=9 / np.sqrt(4 * QUADS))
    neighbours = fraction[0].reshape(-1, 4)
    within = neighbours.T @ neighbours / QUADS * 12
    np.testing.assert_allclose(within, np.eye(4), atol=2**-8 + 6 / np.sqrt(QUADS))


@pytest.mark.parametrize("n_slots", [2, 3, 5, 8, 17])
def test_correlated_slots_share_out_the_range(n_slots):
    strata = words(n_slots, "correlated") // (0xFFFFFFFF // n_slots)
    expected = np.broadcast_to(np.arange(n_slots)[:, None], strata.shape)
    np.testing.assert_array_equal(np.sort(strata, axis=0), expected)
    for slot in range(n_slots):
        assert chi_square(strata[slot].astype(np.int64), n_slots) < 6


def test_correlated_slots_have_the_correlation_of_a_permutation():
    # Of n stratified words any two correlate by -1/n (1 - 1/n^2) n/(n-1), about -1/(n-1).
    n_slots = 8
    fraction = words(n_slots, "correlated") / 2.0**32 - 0.5
    products = fraction @ fraction.T / fraction.shape[1] * 12
    others = products[~np.eye(n_slots, dtype=bool)]
    assert others.mean() == pytest.approx(-(1 - 1 / n_slots**2) / (n_slots - 1), rel=0.02)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_both_seed_words_change_every_word(rounding):
    base = words(3, rounding)
    for seed in [(1, 3), (2, 2), (0x80000001, 2), (1, 0x80000002)]:
        differing = np.unpackbits((base ^ words(3, rounding, seed)).view(np.uint8)).mean()
        # Correlated words agree in their highest bits more often than not at three slots.
        assert abs(differing - 0.5) < (0.02 if rounding == "correlated" else 0.005)
    np.testing.assert_array_equal(base, words(3, rounding))


def test_streams_of_two_seeds_are_not_shifts_of_each_other():
    first, second = (set(words(1, "independent", seed)[0].tolist()) for seed in [(1, 2), (1, 3)])
    # Random sets of 65536 words out of 2^32 share one; shifted streams would share nearly all.
    assert len(first & second) < 20


def test_slot_noise_is_one_row_per_slot():
    noise = slot_noise(jnp.array([5, 6], jnp.uint32), 7, "correlated")
    assert noise.shape == (7, NOISE_WORDS)
    assert noise.dtype == jnp.uint32
    rows = np.asarray(noise)
    low = np.stack([rows[:, 5] & 0xFFFF, rows[:, 5] >> 16, rows[:, 6] & 0xFFFF, rows[:, 6] >> 16])
    np.testing.assert_array_equal(np.sort(low, axis=1), np.tile(np.arange(7), (4, 1)))
    assert len({tuple(perm) for perm in low}) == 4
