"""Static sizes: the budget is kept, but for what padding takes, at any size and any workers."""

import dataclasses
import functools

import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq.allocation import allocate, stage_bits
from dynamiq_jax.methods.dynamiq.layout import make_layout
from pallas_kernels import TILE_ROWS, WireFormat

NAMED = {"ring": dq.Ring(), "butterfly": dq.Butterfly(), "direct": dq.Direct()}


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 16384, 16385, 10**6])
@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("streams", [1, 2])
def test_sizes_are_whole_tiles_and_cover_the_gradient(size, n, streams, collective):
    method, whole = dq.DynamiQ(), collective == "all_reduce"
    if collective == "all_gather":
        layout, streams = method.gather_layout(size, n), 1
    else:
        layout = method.layout(size, n, dq.Ring(streams=streams), collective)
        streams = min(streams, max(size * (1 if whole else n), 1))
    assert layout.shards == (1 if whole else n)
    assert layout.chunks == n * streams == layout.shards * layout.shard_chunks
    assert layout.super_groups == layout.chunks * layout.chunk_super_groups
    assert layout.chunk_super_groups == layout.chunk_tiles * TILE_ROWS
    assert layout.chunk_tiles >= 1
    assert layout.shard_rows == -(-size // layout.super_group_size)
    assert layout.rows == layout.shards * layout.shard_rows
    # Padding is less than one tile per chunk, but no chunk is without a tile.
    spare = layout.super_groups // layout.shards - layout.shard_rows
    assert 0 <= spare < layout.shard_chunks * TILE_ROWS + (size == 0)
    stages = 2 if whole else 1
    assert len(layout.payload_words) == len(layout.payloads_sent) == stages
    for words in layout.payload_words:
        assert words % 4 == 0
        assert words >= layout.chunk_tiles * layout.fmt.tile_words(2)
        assert words <= max(layout.chunk_tiles * layout.fmt.tile_words(8), 4)


@pytest.mark.parametrize("n", [2, 4, 31])
def test_five_bits_of_slices_are_five_bits(n):
    """`test_wire_bytes` compares the statistics among them with those that programs move."""
    size, method = 10**6, dq.DynamiQ(bits=5, format=dq.Format(subtract_mean=True))
    scatter = method.layout(size, n, dq.Direct(), "reduce_scatter")
    for layout in (scatter, method.gather_layout(size, n)):
        assert layout.payloads_sent == (n - 1,)
        assert 4.9 < layout.wire_bits / ((n - 1) * size) <= 5


def test_only_the_narrowest_width_may_exceed_the_budget():
    fmt, stages = WireFormat(widths=(4, 8)), dq.Ring().stages(2)
    of = functools.partial(allocate, stages, fmt, widths=(4, 8), floor=None, balance=None)
    # 100 coordinates are padded to 2 tiles, whose width of 4 cannot be met with 500 bits.
    options = {"stats_per_super_group": 2}
    layout = make_layout(100, 2, stages, bits=5, allocation=of(bits=5), **options)
    assert layout.payload_words == (fmt.tile_words(4),) * 2
    # A generous budget buys no more than the widest width can use.
    layout = make_layout(10**6, 2, stages, bits=32, allocation=of(bits=32), **options)
    assert layout.payload_words == (layout.chunk_tiles * fmt.tile_words(8),) * 2


def test_streams_split_large_gradients_only_unless_they_are_passed():
    assert dq.Direct(transport="push").chunks_per_worker(2**32) == 1
    for topology, most, worth in (
        (dq.Ring(), 2, 2**24),
        (dq.Butterfly(), 2, 2**24),
        (dq.Direct(), 4, 2**26),
        (dq.Direct(transport="permutes"), 2, 2**27),
    ):
        sizes = (0, 10, worth, 2 * worth - 1, 2 * worth, most * worth, 2**32)
        assert [topology.chunks_per_worker(size) for size in sizes] == [1, 1, 1, 1, 2, most, most]
        topology = dataclasses.replace(topology, streams=3)
        assert [topology.chunks_per_worker(size) for size in (0, 1, 2, 10)] == [1, 1, 2, 3]
        assert dq.DynamiQ().layout(10**6, 4, topology).chunks == 12
        # A slice of a reduce-scatter counts with all others.
        assert dq.DynamiQ().layout(750, 4, topology, "reduce_scatter").chunks == 12


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("balance", [-2.0, -0.5, 0.0, 0.5, 2.0, None])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_balance_moves_bits_between_stages_within_the_budget(name, balance, n):
    """The average over all that is sent stays; payloads of earlier stages differ as asked."""
    size, method = 2**20, dq.DynamiQ(bits=5, floor=None)
    topology = dataclasses.replace(NAMED[name], balance=balance)
    stages, layout = topology.stages(n), method.layout(size, n, topology)
    offsets = stage_bits(stages, balance)
    sent = sum(stage.sent for stage in stages)
    mean = sum(o * stage.sent for o, stage in zip(offsets, stages, strict=True)) / sent
    assert mean == pytest.approx(0, abs=1e-12)
    budget = 5 * 2 * (n - 1) / n * size
    assert 0.99 * budget < layout.wire_bits <= budget
    coords = size / layout.chunks
    per_coord = [32 * words / coords for words in layout.payload_words]
    least, most = (layout.fmt.tile_words(w) * 32 / (8 * 256) for w in (2, 8))
    if all(least + 0.1 < bits < most - 0.1 for bits in per_coord):
        for i, bits in enumerate(per_coord):
            assert bits - per_coord[-1] == pytest.approx(offsets[i] - offsets[-1], abs=0.01)
    order = sorted(range(len(stages)), key=lambda i: offsets[i])
    ranked = [layout.payload_words[i] for i in order]
    assert ranked == sorted(ranked)
