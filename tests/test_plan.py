"""The plan: widths that are worth their words, records that fit, an order that loses nothing.

And static sizes: the budget is kept, but for what padding takes, at any size and any workers.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from workers import plan_widths

import dynamiq_jax as dq
from dynamiq_jax.core.axis import statistics_seed
from dynamiq_jax.methods.dynamiq.codec import make_plan, pack_statistics, upgrades_of
from dynamiq_jax.methods.dynamiq.layout import (
    Transfers,
    allocate,
    make_layout,
    stage_bits,
    width_upgrades,
)
from pallas_kernels import TILE_ROWS, WireFormat, distortion, reference, unpack_tiles
from pallas_kernels.format import octave_end, steps_below

widths_of = jax.jit(plan_widths, static_argnums=1)
NO_KEY = np.uint32(0)
"""The seed of a bucket whose number is 0, without a key."""
WIDTH_SETS = [(2, 4, 8), (0, 2, 3, 5, 16), (1, 4), (3,), tuple(range(17))]


@functools.partial(jax.jit, static_argnames=("payload_words", "fmt", "floor"))
def assigned(energy, payload_words, fmt, floor=None):
    """Widths of tiles of these energies, which the plan sorts first; checks their offsets."""
    order = jnp.argsort(-energy, stable=True)
    level = steps_below(energy[order], octave_end(energy))
    taken, upgrades = upgrades_of(fmt, level.size, (payload_words,), (floor,))
    (tiles,) = reference.widened(level[None], jnp.asarray(taken), upgrades, 1)
    offset, width = unpack_tiles(tiles[0])
    words = jnp.asarray([fmt.tile_words(w) for w in range(17)])[width]
    width = jnp.where(jnp.all(offset == jnp.cumsum(words) - words), width, -1)
    return jnp.zeros_like(width).at[order].set(width)


def words_of(fmt, widths):
    return sum(fmt.tile_words(int(w)) for w in widths)


def error_of(fmt, energy, widths):
    return sum(e * distortion(fmt, int(w)) for e, w in zip(energy, widths, strict=True))


def mean_payload(fmt, tiles):
    """A budget in the middle of what the widths can use."""
    words = [fmt.tile_words(w) for w in fmt.widths]
    return tiles * (min(words) + (max(words) - min(words)) * 2 // 5) // 4 * 4


def energies(seed, tiles):
    return np.random.default_rng(seed).lognormal(0.0, 3.0, tiles).astype(np.float32)


@pytest.mark.parametrize(
    "widths", [(2, 4, 8), (0, 2, 3, 5, 16), (1, 4), (2, 3, 4, 5, 6, 7), (0, 4, 12, 16)]
)
@pytest.mark.parametrize("seed", daily([0, 1, 2], [0]))
def test_no_assignment_of_the_same_size_has_less_error(widths, seed):
    fmt, tiles = WireFormat(widths=widths), 4
    energy = energies(seed, tiles)
    payload_words = mean_payload(fmt, tiles)
    chosen = np.asarray(assigned(energy, payload_words, fmt))
    used = words_of(fmt, chosen)
    every = itertools.product(widths, repeat=tiles)
    best = min(error_of(fmt, energy, w) for w in every if words_of(fmt, w) <= used)
    # Gains are compared in steps of 1/4 octave; these differ by more.
    assert best <= error_of(fmt, energy, chosen) <= 1.045 * best


@pytest.mark.parametrize("widths", WIDTH_SETS)
@pytest.mark.parametrize("kind", ["spread", "equal", "zero", "one", "huge_and_tiny"])
def test_widths_fit_the_budget_and_use_it(widths, kind):
    fmt, tiles = WireFormat(widths=widths), 37
    one = np.zeros(tiles, np.float32)
    one[11] = 5.0
    energy = {
        "spread": energies(3, tiles),
        "equal": np.full(tiles, 0.7, np.float32),
        "zero": np.zeros(tiles, np.float32),
        "one": one,
        "huge_and_tiny": np.geomspace(1e-38, 3e38, tiles, dtype=np.float32),
    }[kind]
    payload_words = mean_payload(fmt, tiles)
    chosen = np.asarray(assigned(energy, payload_words, fmt))
    assert set(chosen.tolist()) <= set(widths)
    _, upgrades = width_upgrades(fmt)
    # What is left unused is less than the one upgrade that no longer fitted.
    spare = payload_words - words_of(fmt, chosen)
    assert 0 <= spare < max((u.words for u in upgrades), default=1)
    # More energy, never fewer bits.
    order = np.argsort(-energy, kind="stable")
    assert np.all(np.diff(chosen[order]) <= 0)
    if kind == "one" and upgrades:
        assert chosen[11] == max(u.width for u in upgrades)


@pytest.mark.parametrize("floor", [None, 4])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_many_tiles_err_no_more_than_half_a_percent_beyond_the_optimum(spread, floor):
    """The optimum by energies that are not rounded, upgrade by upgrade."""
    fmt, tiles = WireFormat(widths=(3, 4, 5, 6, 8, 10)), 2000
    energy = np.random.default_rng(0).lognormal(0.0, spread, tiles).astype(np.float32)
    payload_words = tiles * fmt.tile_words(5)
    narrowest, upgrades = width_upgrades(fmt, floor)
    gain = np.array([u.gain for u in upgrades]) * energy[:, None]
    above = np.broadcast_to([u.width > (floor or 0) for u in upgrades], gain.shape)
    order = np.lexsort((-gain.ravel(), above.ravel()))
    words = np.broadcast_to([u.words for u in upgrades], gain.shape).ravel()[order]
    fits = np.cumsum(words) <= payload_words - tiles * fmt.tile_words(narrowest)
    removed = np.sum((gain.ravel()[order] * words)[fits])
    optimum = np.sum(energy, dtype=np.float64) * distortion(fmt, narrowest) - removed
    chosen = np.asarray(assigned(energy, payload_words, fmt, floor))
    assert words_of(fmt, chosen) <= payload_words
    assert 0.9999 * optimum <= error_of(fmt, energy, chosen) <= 1.005 * optimum


def statistics(n, rows, seed=0):
    rng = np.random.default_rng(seed)
    sqnorm = rng.lognormal(0, 4, rows).astype(np.float32) * 256
    mean = rng.normal(0, 0.3, rows).astype(np.float32) * np.sqrt(sqnorm / 256 / n)
    return jnp.asarray(np.stack([sqnorm, mean]), jnp.bfloat16)


def layout_of(method, size, n, streams=1, collective="all_reduce"):
    """That of a ring, whose hops get half a bit more than the all-gather."""
    if collective == "all_gather":
        return method.gather_layout(size, n)
    ring = dq.Ring(streams=streams, balance=0.5)
    return method.layout(size, n, ring, collective)


planned_for = jax.jit(make_plan, static_argnames="layout")


def planned(stats, seed, method, size, n):
    return planned_for(stats, seed, layout_of(method, size, n))


def check_plan(plan, stats, layout):
    """The order is a permutation within shards; records fit; wider where there is more energy."""
    fmt = layout.fmt
    assert plan.order.shape == (layout.chunks, layout.chunk_super_groups)
    np.testing.assert_array_equal(np.sort(plan.order, axis=None), np.arange(layout.super_groups))
    assert plan.mean.shape == plan.mean_sum.shape == (layout.super_groups,)
    # A shard's super-groups stay in its own chunks; the rest of these is padding.
    per_shard = np.asarray(plan.order).reshape(layout.shards, -1)
    own = np.arange(layout.rows).reshape(layout.shards, -1)
    for held, rows in zip(per_shard, own, strict=True):
        np.testing.assert_array_equal(np.sort(held[held < layout.rows]), rows)
    assert len(plan.tiles) == len(layout.payload_words)
    for stage, (tiles, payload_words) in enumerate(
        zip(plan.tiles, layout.payload_words, strict=True)
    ):
        assert tiles.shape == (layout.chunks, layout.chunk_tiles)
        for of_shard in np.asarray(tiles).reshape(layout.shards, layout.shard_chunks, -1):
            assert np.all(of_shard == of_shard[:1])  # alike in all chunks of a shard
            offset, width = map(np.asarray, unpack_tiles(of_shard[0]))
            assert set(width.tolist()) <= set(fmt.widths)
            taken = np.zeros(payload_words, int)
            for start, w in zip(offset, width, strict=True):
                assert start % 4 == 0
                assert start + fmt.tile_words(int(w)) <= payload_words
                taken[start : start + fmt.tile_words(int(w))] += 1
            assert taken.max(initial=0) <= 1
        # `plan_widths` tells the same per super-group, whichever chunk it went to.
        per_position = np.repeat(np.asarray(unpack_tiles(tiles)[1]), TILE_ROWS, axis=1)
        widths = np.asarray(widths_of(plan, stage))
        np.testing.assert_array_equal(widths[np.asarray(plan.order)], per_position)
        # Super-groups of more energy have no fewer bits; energies are sorted in 1/4 octaves, and
        # a tile is as wide as its mean deserves.
        energy = np.asarray(stats[0], np.float64)
        for shard in own:
            found = widths[shard]
            by_width = [energy[shard][found == w] for w in sorted(set(found.tolist()))]
            for narrow, wide in itertools.pairwise(by_width):
                assert np.median(narrow) < np.median(wide)


@pytest.mark.parametrize("widths", WIDTH_SETS)
@pytest.mark.parametrize(("n", "streams"), daily([(2, 1), (5, 1), (3, 2)], [(3, 2)]))
def test_order_is_a_permutation_and_records_fit(widths, n, streams):
    method = dq.DynamiQ(widths=widths, bits=max(7.0, min(widths) + 2))
    size = 256 * 8 * n * streams * 6 - 1000
    layout = layout_of(method, size, n, streams)
    stats = statistics(n, layout.rows)
    plan = planned_for(stats, NO_KEY, layout)
    check_plan(plan, stats, layout)
    # The stage with fewer bits has nowhere more of them.
    assert layout.payload_words[0] >= layout.payload_words[1]
    assert np.all(widths_of(plan, 0) >= widths_of(plan, 1))


SLICES = [("reduce_scatter", 3, 1), ("reduce_scatter", 2, 2), ("all_gather", 4, 1)]
SIZES = [256 * 8 * 12, 256 * 8 * 12 - 1000, 300]
PAIRS = [(*of, size) for of, size in itertools.product(SLICES, SIZES)]


@pytest.mark.parametrize(("collective", "n", "streams", "size"), daily(PAIRS, PAIRS[1::2]))
def test_slices_have_plans_of_their_own(collective, n, streams, size):
    """Each slice spends its own budget, however much more energy another one has."""
    method = dq.DynamiQ()
    layout = layout_of(method, size, n, streams, collective)
    stats = statistics(n, layout.rows)
    loud = np.repeat(np.where(np.arange(n) == 1, 2.0**30, 1.0), layout.shard_rows)
    stats = (np.float32(stats) * np.stack([loud, np.sqrt(loud)])).astype(jnp.bfloat16)
    plan = planned_for(stats, NO_KEY, layout)
    check_plan(plan, stats, layout)
    words = np.asarray([layout.fmt.tile_words(w) for w in range(17)])
    for stage, payload_words in enumerate(layout.payload_words):
        used = words[np.asarray(unpack_tiles(plan.tiles[stage])[1])].sum(axis=1)
        assert np.all(payload_words - used < words[8] - words[4])
    if size > 1000:
        # A slice gets the same widths whatever is in the others.
        own = slice(0, layout.shard_rows)
        others = np.arange(layout.rows) >= layout.shard_rows
        alone = np.where(others, 0, stats).astype(jnp.bfloat16)
        again = planned_for(alone, NO_KEY, layout)
        np.testing.assert_array_equal(widths_of(again, 0)[own], widths_of(plan, 0)[own])


def test_energy_is_what_the_mean_leaves():
    """Two super-groups of equal norm: the one that is nearly constant needs fewer bits."""
    fields = dq.Format(group_size=16, subtract_mean=True)
    method = dq.DynamiQ(widths=(2, 4), bits=3.7, format=fields)  # enough for half of them to get 4
    n, rows = 2, 64
    mean = jnp.zeros(rows).at[::2].set(1.0)
    sqnorm = jnp.where(mean > 0, n * 256 * 1.02, n * 256.0)
    plan = planned(jnp.stack([sqnorm, mean]).astype(jnp.bfloat16), NO_KEY, method, rows * 256, n)
    widths = np.asarray(widths_of(plan, 0))
    np.testing.assert_array_equal(widths[::2], 2)
    np.testing.assert_array_equal(widths[1::2], 4)


def test_bad_super_groups_take_no_bits_from_others():
    """The plan is that of zeros in their place, but for the sum."""
    method, n, rows = dq.DynamiQ(format=dq.Format(subtract_mean=True)), 2, 64
    bad = np.array([5, 17])
    zeros = statistics(n, rows).at[:, bad].set(0.0)
    stats = zeros.at[:, bad].set(jnp.array([np.nan, np.inf], jnp.bfloat16))
    plan, expected = (planned(x, NO_KEY, method, rows * 256, n) for x in (stats, zeros))
    np.testing.assert_array_equal(plan.order, expected.order)
    np.testing.assert_array_equal(plan.tiles, expected.tiles)
    np.testing.assert_array_equal(plan.mean, expected.mean)
    np.testing.assert_array_equal(plan.energy, expected.energy)
    np.testing.assert_array_equal(plan.mean_sum, expected.mean_sum.at[bad].set(np.nan))


def test_messages_are_finite_exactly_where_the_gradient_is():
    method = dq.DynamiQ(format=dq.Format(subtract_mean=True))
    layout = layout_of(method, 3 * 256, 4)
    mean = jnp.array([1.0, jnp.nan, 1e38])
    sqnorm = jnp.array([300.0, jnp.nan, jnp.inf])  # 1e38 squared overflows
    message = np.asarray(pack_statistics(mean, sqnorm, layout), np.float32)
    assert message.shape == (2, 3)
    np.testing.assert_array_equal(np.isnan(message[0]), [False, True, False])
    assert np.isfinite(message[0, 2] * 4)  # four workers may add it up
    np.testing.assert_allclose(message[1, [0, 2]], [0.25, 0.25e38], rtol=2**-8)
    # Of slices that are gathered, not added, a worker's own statistics are all there is.
    gathered = layout_of(method, 3 * 256, 4, collective="all_gather")
    alone = np.asarray(pack_statistics(mean, sqnorm, gathered), np.float32)
    np.testing.assert_array_equal(np.isnan(alone), np.isnan(message))
    np.testing.assert_allclose(alone[1, [0, 2]], [1.0, 1e38], rtol=2**-8)


def test_seed_comes_from_the_statistics_unless_given():
    stats = statistics(2, 64)
    seeds = [tuple(np.asarray(statistics_seed(stats)).tolist())]
    for row, column in [(0, 0), (0, 63), (1, 0), (1, 31)]:  # one bit of bf16 each
        nudged = stats.at[row, column].set(jnp.nextafter(stats[row, column], jnp.bfloat16(9e9)))
        seeds.append(tuple(np.asarray(statistics_seed(nudged)).tolist()))
    swapped = stats.at[:, :2].set(stats[:, 1::-1])
    seeds.append(tuple(np.asarray(statistics_seed(swapped)).tolist()))
    assert len(set(seeds)) == 6
    assert len({s for pair in seeds for s in pair}) == 12
    method, given = dq.DynamiQ(), jnp.array([3, 5], jnp.uint32)
    other = np.uint32(77)
    own, numbered, told = (planned(stats, s, method, 64 * 256, 2) for s in (NO_KEY, other, given))
    assert tuple(np.asarray(own.seed).tolist()) == seeds[0]
    assert np.all(np.asarray(numbered.seed) != np.asarray(own.seed))
    np.testing.assert_array_equal(told.seed, given)
    np.testing.assert_array_equal(told.order, own.order)  # the plan itself has no randomness


# --- Static sizes ---------------------------------------------------------------------------------

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
    transfers = Transfers(2, stages)
    layout = make_layout(100, transfers, bits=5, allocation=of(bits=5), **options)
    assert layout.payload_words == (fmt.tile_words(4),) * 2
    # A generous budget buys no more than the widest width can use.
    layout = make_layout(10**6, transfers, bits=32, allocation=of(bits=32), **options)
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
