"""Static sizes: the budget is kept whatever the size, the padding and the number of workers."""

import pytest

import dynamiq_jax as dq
from dynamiq_jax.layout import make_layout
from pallas_kernels import TILE_ROWS, WireFormat

LARGE = [10**6, 1_000_003, 2**20, 3_333_333, 10**7]
WORKERS = [2, 3, 4, 5, 7, 8, 16, 31, 32, 64]


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("n", WORKERS)
def test_five_bits_are_five_bits(size, n):
    method, ring = dq.DynamiQ(bits=5), dq.Ring()
    bits_per_coord = method.wire_bits(size, n, ring) / (2 * (n - 1) / n * size)
    assert bits_per_coord <= 5.05
    # Nothing is given away, either, where each chunk has tiles enough to upgrade.
    if size >= 10**4 * n:
        assert bits_per_coord > 4.9


@pytest.mark.parametrize("bits", [3.0, 4.0, 4.5, 6.0, 8.0])
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_budget_is_kept_at_any_bits_and_streams(bits, streams):
    size, n = 3_333_333, 8
    layout = dq.DynamiQ(bits=bits).layout(size, n, streams)
    assert layout.message_bits <= bits * size
    assert layout.message_bits > 0.99 * bits * size


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 16384, 16385, 10**6])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("streams", [1, 2])
def test_sizes_are_whole_tiles_and_cover_the_gradient(size, n, streams):
    method = dq.DynamiQ()
    layout, fmt = method.layout(size, n, streams), method.wire_format
    assert layout.chunks == n * streams
    assert layout.super_groups == layout.chunks * layout.chunk_super_groups
    assert layout.chunk_super_groups % TILE_ROWS == 0
    assert layout.super_groups * fmt.super_group_size >= size
    # Padding is less than one tile per chunk.
    spare = layout.super_groups - -(-size // fmt.super_group_size)
    assert spare < layout.chunks * TILE_ROWS
    assert layout.payload_words % 4 == 0
    assert layout.payload_words >= layout.chunk_tiles * fmt.tile_words(2)
    assert layout.payload_words <= max(layout.chunk_tiles * fmt.tile_words(8), 4)


def test_bits_of_a_message():
    """By hand: 16 super-groups on each of 4 workers, at 5 bits."""
    layout = dq.DynamiQ(bits=5).layout(4 * 16 * 256, 4)
    assert layout.stats_bits == 2 * 16 * 64  # two bf16 for each super-group
    # 5 * 16384 bits less the statistics, over 4 chunks of 32-bit words, in fours.
    assert layout.payload_words == (5 * 16384 - 2048) // 128 // 4 * 4
    assert layout.message_bits == 2048 + 4 * 32 * layout.payload_words
    assert layout.wire_bits == layout.message_bits * 3 // 2


def test_without_means_there_is_half_the_statistics():
    size, n = 10**6, 4
    with_mean = dq.DynamiQ(bits=5).layout(size, n)
    without = dq.DynamiQ(bits=5, subtract_mean=False).layout(size, n)
    assert 2 * without.stats_bits == with_mean.stats_bits
    saved = with_mean.stats_bits - without.stats_bits
    assert 0 <= saved - 32 * n * (without.payload_words - with_mean.payload_words) < 32 * n * 4


def test_only_the_narrowest_width_may_exceed_the_budget():
    fmt = WireFormat(widths=(4, 8))
    # 100 coordinates are padded to 2 tiles, whose width of 4 cannot be met with 500 bits.
    layout = make_layout(100, 2, bits=5, fmt=fmt, stats_per_super_group=2)
    assert layout.payload_words == fmt.tile_words(4)
    # A generous budget buys no more than the widest width can use.
    layout = make_layout(10**6, 2, bits=32, fmt=fmt, stats_per_super_group=2)
    assert layout.payload_words == layout.chunk_tiles * fmt.tile_words(8)


def test_streams_split_large_gradients_only():
    ring = dq.Ring(streams=3, stream_size=1000)
    assert [ring.chunks_per_worker(size) for size in (10, 999, 1000, 5000)] == [1, 1, 3, 3]
    assert dq.DynamiQ().layout(10**6, 4, 3).chunks == 12
