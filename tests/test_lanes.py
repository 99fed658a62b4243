"""Packed words: lanes add up, fields leave no gaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.comparators import lanes

pack_lanes = jax.jit(lanes.pack_lanes, static_argnames=("lane_bits", "max_sum"))
unpack_lanes = jax.jit(lanes.unpack_lanes, static_argnames=("size", "lane_bits"))
pack_bits = jax.jit(lanes.pack_bits, static_argnames="bits")
unpack_bits = jax.jit(lanes.unpack_bits, static_argnames=("size", "bits"))


@pytest.mark.parametrize(
    ("granularity", "n", "bits"),
    [(15, 2, 5), (15, 4, 6), (15, 17, 8), (15, 18, 9), (30, 8, 8), (30, 9, 9), (30, 136, 12)]
    + [(30, 137, 13), (1, 1, 1), ((1 << 32) - 1, 1, 32)],
)
def test_lane_bits(granularity, n, bits):
    assert lanes.lane_bits_for(granularity, n) == bits


@pytest.mark.parametrize(("granularity", "n"), [(1, 3), (15, 2), (30, 8), (30, 9), (255, 257)])
@pytest.mark.parametrize("m", [1, 1000])
def test_packed_lanes_add_up_exactly(granularity, n, m):
    lane_bits = lanes.lane_bits_for(granularity, n)
    values = np.random.default_rng(m).integers(0, granularity + 1, (n, 2, m)).astype(np.uint32)
    values[:, :, ::3] = granularity  # lanes at their maximum between others
    words = pack_lanes(values, lane_bits=lane_bits, max_sum=n * granularity)
    assert words.shape == (n, 2, -(-m // (32 // lane_bits)))
    assert words.dtype == jnp.uint32
    total = np.add.reduce(np.asarray(words), axis=0, dtype=np.uint32)
    total = unpack_lanes(total, size=m, lane_bits=lane_bits)
    assert np.array_equal(total, values.sum(axis=0))


def test_lanes_that_overflow_are_refused():
    with pytest.raises(ValueError, match="sums up to 256 overflow lanes of 8 bits.* at least 9"):
        lanes.pack_lanes(jnp.zeros(4, jnp.uint32), 8, max_sum=256)
    with pytest.raises(ValueError, match="lanes of 33 bits"):
        lanes.pack_lanes(jnp.zeros(4, jnp.uint32), 33, max_sum=1)
    with pytest.raises(ValueError, match="sum to 4294967296.* at most 65535"):
        lanes.lane_bits_for(1 << 16, 1 << 16)
    with pytest.raises(ValueError, match="granularity 0 and 8 workers"):
        lanes.lane_bits_for(0, 8)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 9, 12, 31])
@pytest.mark.parametrize("m", [33, 256])
def test_fields_pack_without_gaps(bits, m):
    fields = np.random.default_rng(bits).integers(0, 1 << bits, (3, m)).astype(np.uint32)
    words = pack_bits(fields, bits=bits)
    assert words.shape == (3, lanes.bit_words(m, bits))
    if m % 32 == 0:
        assert words.shape[1] == m * bits // 32
    assert np.array_equal(unpack_bits(words, size=m, bits=bits), fields)


def test_packing_refuses_other_sizes():
    words = lanes.pack_bits(jnp.arange(64, dtype=jnp.uint32) % 8, 3)
    with pytest.raises(ValueError, match="6 words, but 64 fields of 4 bits take 8"):
        lanes.unpack_bits(words, 64, 4)
    with pytest.raises(ValueError, match="fields of 32 bits"):
        lanes.pack_bits(words, 32)
