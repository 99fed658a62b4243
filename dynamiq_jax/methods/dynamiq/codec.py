"""DynamiQ on data, inside jit: statistics → widths and order (the plan) → payloads.

**The plan** is a pure function of the light all-reduce's result, so all workers have the same plan
without further communication. The super-groups of a shard (see
`dynamiq_jax.methods.dynamiq.layout`) are ordered by energy and dealt to its C chunks in turn (rank
q is at chunk q mod C, position q div C): the chunks have the same tile widths, and every payload of
a stage has the same static size. Within this size the widths minimise the expected squared error
above the stage's floor: first all tiles are widened to the floor; then the next upgrade is always
the upgrade that removes most error per word.

**The codec** is one worker's gradient under a plan, as the operations that an executor needs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis, Seed, seed_of
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder
from dynamiq_jax.methods.base import Call, clipped
from dynamiq_jax.methods.dynamiq.layout import Layout, width_upgrades
from pallas_kernels import Backend, WireFormat, deal, pack_tiles
from pallas_kernels.format import ENERGY_LEVELS, MANTISSA_BITS, Upgrades

# --- The plan -------------------------------------------------------------------------------------


_LARGEST_NORM = 3e38  # leaves room for rounding when n bf16 shares of it are added


class Plan(NamedTuple):
    """The plan with which every worker encodes and decodes any chunk."""

    order: Int[Array, "C m"]
    """Chunk c's position p holds super-group ``order[c, p]``."""
    tiles: tuple[Int[Array, "C T"], ...]
    """Word offset and width of each tile's record, for every stage."""
    mean: Float[Array, " M"]
    """The number that is subtracted from every coordinate of a super-group; finite."""
    mean_sum: Float[Array, " M"]
    """n * mean, or NaN if a worker's super-group has a NaN or an infinity."""
    seed: UInt[Array, " 2"]
    """The seed of the rounding."""
    energy: Float[Array, "shards T"]
    """The energies that widths were chosen for: the mean energy of the super-groups in tile t of a
    shard's chunks, summed over workers, f32."""


def pack_statistics(mean, sqnorm, layout: Layout) -> Array:
    """One worker's message in the light all-reduce: bf16[stats_per_super_group, rows].

    Means are divided by the number of workers first, so that their sum is the mean. A squared norm
    is finite if the super-group is finite, even if f32 overflows, and NaN otherwise.
    """
    n = layout.summed
    finite = jnp.isfinite(mean)
    sqnorm = jnp.where(finite, jnp.minimum(sqnorm, _LARGEST_NORM / n), jnp.nan)
    rows = [sqnorm] if layout.stats_per_super_group == 1 else [sqnorm, mean * (1.0 / n)]
    return jnp.stack(rows).astype(jnp.bfloat16)


@functools.lru_cache(maxsize=64)
def upgrade_order(fmt: WireFormat, floor: int | None = None) -> np.ndarray:
    """The order in which tiles are widened: first to the floor, then where this removes most error.

    A tile's energy is one of `ENERGY_LEVELS` levels below the largest, and the gain of an upgrade
    at a level is that level's energy times the upgrade's gain. Returns int32[E + 1, U] with one row
    for each state; a state has one upgrade of one level more than the previous state. A row says,
    for each upgrade, how many of the levels with the most energy have it.
    """
    _, upgrades = width_upgrades(fmt, floor)
    step = np.arange(ENERGY_LEVELS)
    parts = 1 << MANTISSA_BITS  # of an octave, all equal, counted from its end
    # Level ``step`` lies step // parts octaves below the largest one, and step % parts parts below
    # the end of that octave: ``middle`` is the middle of this part of [1, 2).
    middle = 1 + (parts - 1 - step % parts + 0.5) / parts
    energy = middle * 2.0 ** -(step // parts)
    gain = energy[:, None] * np.array([u.gain for u in upgrades])
    above_floor = np.array([floor is None or u.width > floor for u in upgrades], bool)
    # Pairs (level, upgrade), numbered level * U + upgrade: those to the floor, then by gain.
    order = np.lexsort((-gain.ravel(), np.broadcast_to(above_floor, gain.shape).ravel()))
    upgrade = order % max(len(upgrades), 1)
    # taken[i, u]: how many of the first i + 1 pairs are upgrade u; `pad` adds a row for no pair.
    taken = np.cumsum(upgrade[:, None] == np.arange(len(upgrades)), axis=0)
    assert np.all(np.diff(taken, axis=1) <= 0), "an upgrade before the one that it follows"
    return np.pad(taken, ((1, 0), (0, 0))).astype(np.int32)


@functools.lru_cache(maxsize=64)
def upgrades_of(
    fmt: WireFormat, tiles: int, payload_words: tuple[int, ...], floors: tuple[int | None, ...]
) -> tuple[np.ndarray, Upgrades]:
    """`upgrade_order` of F floors, int32[U, F, E + 2], and the upgrades, see `pallas_kernels.deal`.

    All are padded to equal lengths, and the last state is repeated. ``payload_words`` are the F
    budgets in 32-bit words for ``tiles`` tiles. ``floors`` are the widths that all tiles get before
    any tile gets more, if the payload is large enough. `None` is the narrowest width of ``fmt``.
    """
    upgrades = [width_upgrades(fmt, floor) for floor in floors]
    orders = [upgrade_order(fmt, floor).T for floor in floors]
    shape = max(1, *(len(u) for _, u in upgrades)), len(floors)
    # taken[u, i, s]: the levels that have upgrade u under floor i in state s.
    taken = np.zeros((*shape, 1 + max(order.shape[1] for order in orders)), np.int32)
    words, wider = np.ones(shape, np.int32), np.zeros(shape, np.int32)
    # Floor i may have fewer upgrades and states: no tile gets the rest, and its last state repeats.
    for i, (order, (narrowest, own)) in enumerate(zip(orders, upgrades, strict=True)):
        repeats = taken.shape[2] - order.shape[1]
        taken[: len(own), i] = np.pad(order, ((0, 0), (0, repeats)), mode="edge")
        words[: len(own), i] = [u.words for u in own]
        wider[: len(own), i] = np.diff([narrowest, *(u.width for u in own)])
    narrowest = min(fmt.widths)
    least = fmt.tile_words(narrowest)
    return taken, Upgrades(
        words=tuple(map(tuple, words.tolist())),
        wider=tuple(map(tuple, wider.tolist())),
        budgets=tuple(own - tiles * least for own in payload_words),
        narrowest=narrowest,
        tile_words=least,
    )


def make_plan(
    stats: Float[Array, "k M"], seed: Seed, layout: Layout, backend: Backend | None = None
) -> Plan:
    """The plan from the sum of `pack_statistics` over workers; see `seed_of`."""
    sqnorm = stats[0].astype(jnp.float32)
    poisoned = ~jnp.isfinite(sqnorm)
    if layout.stats_per_super_group == 2:
        mean = stats[1].astype(jnp.float32)
        mean = jnp.where(poisoned | ~jnp.isfinite(mean), 0.0, mean)
        # Σ|x - mean|² = Σ|x|² - n S mean²; the bf16 sums are good for 1/256 of the former.
        common = layout.summed * layout.super_group_size * mean * mean
        energy = jnp.maximum(sqnorm - common, sqnorm * (1.0 / 256))
    else:
        mean, energy = jnp.zeros_like(sqnorm), sqnorm
    energy = jnp.where(poisoned, 0.0, energy)
    mean_sum = jnp.where(poisoned, jnp.nan, mean * layout.summed)
    order, tiles, tile_energy = order_and_tiles(energy, layout, backend)
    # Padding has the last indices, and mean zero.
    pad = (0, layout.super_groups - layout.rows)
    seed = seed_of(seed, stats)
    return Plan(order, tiles, jnp.pad(mean, pad), jnp.pad(mean_sum, pad), seed, tile_energy)


def sampled(x: Float[Array, " d"], layout: Layout) -> Float[Array, "2 samples"]:
    """One worker's message without a plan: squares and values of some coordinates, bf16.

    The seed of the rounding and the energy of the gradient are computed from them.
    """
    # The first coordinate of every super-group that is sampled.
    x = x[:: layout.sample_step * layout.super_group_size].astype(jnp.float32)
    return jnp.stack([x * x, x]).astype(jnp.bfloat16)


def even_plan(samples: Float[Array, "2 samples"], seed: Seed, layout: Layout) -> Plan:
    """The plan of a layout without one: super-groups in their order, widths by `Layout.widths`.

    Payloads encode NaN, see `pallas_kernels.WireFormat`. ``samples`` are the sum of `sampled` over
    workers, or in an all-gather the samples of all workers.
    """
    squares = samples[0].astype(jnp.float32)
    known = jnp.mean(jnp.where(jnp.isfinite(squares), squares, 0.0)) * layout.super_group_size
    # Padding has no energy, so the mean over all super-groups is smaller than that over rows.
    energy = known * np.float32(layout.rows / layout.super_groups)
    nothing, tiles = jnp.zeros(layout.super_groups, jnp.float32), []
    # Computed: a constant table of all tiles would be megabytes of program.
    number = jnp.arange(layout.chunk_tiles, dtype=jnp.int32)
    for stage in range(len(layout.payload_words)):  # all chunks have the same records
        (first, wide), (_, narrow) = layout.widths(stage)
        # A record starts where the record of the tile before it ends.
        offset = number * layout.fmt.tile_words(narrow)
        longer = layout.fmt.tile_words(wide) - layout.fmt.tile_words(narrow)
        offset += jnp.minimum(number, first) * longer
        records = pack_tiles(offset, jnp.where(number < first, wide, narrow))
        tiles.append(jnp.broadcast_to(records, (layout.chunks, layout.chunk_tiles)))
    return Plan(
        order=_order_of_numbers(layout),
        tiles=tuple(tiles),
        mean=nothing,
        mean_sum=nothing,
        seed=seed_of(seed, samples),
        energy=jnp.broadcast_to(energy, (layout.shards, layout.chunk_tiles)),
    )


def _order_of_numbers(layout: Layout) -> Int[Array, "C m"]:
    """Chunks of consecutive super-groups; padding has the indices after all others."""
    shape = layout.chunks, layout.chunk_super_groups
    number = jnp.arange(layout.super_groups, dtype=jnp.int32)
    if layout.shards > 1:
        # A shard's chunks hold its ``rows`` and then ``spare`` super-groups of padding.
        rows, per_shard = layout.shard_rows, layout.super_groups // layout.shards
        spare = per_shard - rows
        shard, local = number // per_shard, number % per_shard
        padding = layout.rows + shard * spare + local - rows
        number = jnp.where(local < rows, shard * rows + local, padding)
    return number.reshape(shape)


def order_and_tiles(
    energy: Float[Array, " rows"], layout: Layout, backend: Backend | None = None
) -> tuple[Int[Array, "C m"], tuple[Int[Array, "C T"], ...], Float[Array, "shards T"]]:
    """``(order, tiles, energy)`` of a plan for super-groups of the given energies.

    Energies are sorted in steps of 1/4 octave (down to 2^64 below a shard's largest), which
    increases the error by less than 1%. The mean energies of tiles have the same steps, so they are
    also ordered, except for rounding at the end of a level.
    """
    # Stages of equal budgets and floors share their tiles; ``different`` has each pair once.
    stages = tuple(zip(layout.payload_words, layout.floors, strict=True))
    different = tuple(dict.fromkeys(stages))
    payload_words, floors = zip(*different, strict=True)
    taken, upgrades = upgrades_of(layout.fmt, layout.chunk_tiles, payload_words, floors)
    shape = layout.chunks, layout.chunk_super_groups
    # Each shard is ordered separately: [rows] becomes [shards, rows of a shard].
    energy = energy.reshape(layout.shards, -1)
    order, tiles, energy = deal(energy, jnp.asarray(taken), upgrades, shape, backend=backend)
    return order, tuple(tiles[different.index(stage)] for stage in stages), energy


# --- The codec ------------------------------------------------------------------------------------


class SharedPlan(NamedTuple):
    """The values that all workers know before the first encoding."""

    plan: Plan
    noise: UInt[Array, "slots 8"]
    """The randomness of every slot."""
    part: UInt[Array, " 2"] | None = None
    """This worker's part of the seed, if a push kernel adds up the parts of all workers."""


def shared_plan(
    stats: Float[Array, "k M"], seed: Seed, layout: Layout, n_slots: int, backend: pk.Backend | None
) -> SharedPlan:
    """The plan from the sum of workers' messages, for chunks with ``n_slots`` encodings."""
    if layout.planned:
        plan = make_plan(stats, seed, layout, backend)
    else:
        plan = even_plan(stats, seed, layout)
    return SharedPlan(plan, pk.slot_noise(plan.seed, n_slots, layout.fmt.rounding))


def chunk_codec(
    x: Float[Array, " d"],
    shared: SharedPlan,
    layout: Layout,
    call: Call,
    *,
    slice_start: Array | None = None,
    backend: pk.Backend | None,
) -> ChunkCodec:
    """Binds the kernels to one gradient and the plan that all workers share.

    With `Call.keep_error` the errors of encodings are f32[rows, S] in the gradient's order. If
    there are several shards, ``x`` has shards of whole super-groups; ``slice_start`` is the index
    of this worker's first super-group, for `ChunkCodec.finish`.
    """
    tells = call.keep_error
    if tells and layout.fmt.carries_nan:
        # With NaN for infinities, an infinite total tells that finite numbers were too large
        # together.
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    centred = layout.stats_per_super_group == 2
    own = pk.Source(x, shared.plan.mean if centred else None, shared.plan.order)
    codec = _Codec(own, shared, layout, call, slice_start, backend)
    if tells:
        zeros = jnp.zeros((layout.rows, layout.super_group_size), jnp.float32)
        return ChunkCodec(codec.encode_and_tell, codec.decode, lost=zeros)
    push = codec.push if pk.pushes(layout.fmt, backend) else None
    return ChunkCodec(codec.encode, codec.decode, codec.finish, push=push)


@dataclasses.dataclass(frozen=True, eq=False)
class _Codec:
    """The operations of `ChunkCodec` by kernels, on one gradient under a plan."""

    own: pk.Source
    """This worker's gradient."""
    shared: SharedPlan
    layout: Layout
    call: Call
    slice_start: Array | None
    """The number of this worker's first super-group, for `finish`."""
    backend: pk.Backend | None

    def encode(
        self,
        arrived: tuple[Arrived, ...],
        chunks: Array,
        encoder: Encoder,
        lost: None,
        skip: Array | None = None,
    ) -> tuple[Array, None]:
        """See `ChunkCodec.encode`; nobody asks for what is lost."""
        target = self._target(encoder)
        if not arrived:
            return pk.compress(self.own, chunks, target, skip, **self._kernels), None
        inputs = self._inputs(arrived)
        hop = pk.decompress_accumulate_recompress
        return hop(inputs, self.own, chunks, target, **self._kernels), None

    def encode_and_tell(
        self,
        arrived: tuple[Arrived, ...],
        chunks: Array,
        encoder: Encoder,
        lost: Array,
        skip: Array | None = None,
    ) -> tuple[Array, Array]:
        """See `ChunkCodec.encode`; the payloads are decoded again to see what they lost."""
        plan, layout, target = self.shared.plan, self.layout, self._target(encoder)
        summed = self._less_means(start=jnp.int32(0))
        inputs = self._inputs(arrived)
        total = pk.decompress_accumulate(inputs, self.own, chunks, summed, **self._kernels)
        total = clipped(total) if layout.fmt.carries_nan else total
        source = pk.Source(total.reshape(-1), None, plan.order)
        payloads = pk.compress(source, chunks, target, skip, **self._kernels)
        noise = self._noise(jnp.full_like(chunks, encoder.slot))
        decoded = self._less_means()
        sent = pk.decompress(payloads, target.tiles, chunks, decoded, noise, **self._kernels)
        rows = plan.order[chunks].reshape(-1)
        # Numbers from layout.rows on are padding: clipped here, dropped in the next line.
        less = (total - sent).at[rows].get(mode="clip")
        return payloads, lost.at[rows].set(less, mode="drop", unique_indices=True)

    def decode(
        self, payloads: Array, chunks: Array, encoders: Encoder, into: Array | None
    ) -> Array:
        """See `ChunkCodec.decode`."""
        result = self._sums(self.layout.rows, into=into)
        tiles, noise = self.shared.plan.tiles[-1], self._noise(encoders.slot)
        return pk.decompress(payloads, tiles, chunks, result, noise, **self._kernels)

    def finish(self, arrived: tuple[Arrived, ...], chunks: Array, into: Array | None) -> Array:
        """See `ChunkCodec.finish`."""
        assert self.slice_start is not None
        result = self._sums(self.layout.shard_rows, self.slice_start, into)
        inputs = self._inputs(arrived)
        return pk.decompress_accumulate(inputs, self.own, chunks, result, **self._kernels)

    def push(self, axis: Axis) -> Array:
        """See `ChunkCodec.push`."""
        (plan, noise, part), layout = self.shared, self.layout
        noise = noise if part is None else axis.to_varying(part)
        source, result = self.own._replace(x=axis.to_varying(self.own.x)), self._sums(layout.rows)
        words, even = layout.payload_words, not layout.planned and layout.shards == 1
        told = {"fmt": layout.fmt, "even": even}
        return pk.all_reduce(source, plan.tiles, noise, words, result, axis.sizes, **told)

    @property
    def _kernels(self) -> dict[str, Any]:
        """The keywords of all kernels."""
        return {"fmt": self.layout.fmt, "backend": self.backend}

    def _noise(self, slots: Array | int) -> Array | None:
        """The noise of the encoders in these slots, for decoders."""
        return self.shared.noise[slots] if self.layout.fmt.dither else None

    def _inputs(self, arrived: tuple[Arrived, ...]) -> tuple[pk.Input, ...]:
        """The arrived data that kernels add up."""
        tiles = self.shared.plan.tiles
        return tuple(
            pk.Input(a.payloads, tiles[a.encoder.stage], a.skip, self._noise(a.encoder.slot))
            for a in arrived
        )

    def _target(self, encoder: Encoder) -> pk.Target:
        """Where and by which randomness an encoder's payloads are written."""
        (plan, noise, _), stage = self.shared, encoder.stage
        return pk.Target(plan.tiles[stage], noise[encoder.slot], self.layout.payload_words[stage])

    def _less_means(self, start: Array | None = None) -> pk.Result:
        """All rows of f32 values from which means are subtracted."""
        plan = self.shared.plan
        nothing, rows = jnp.zeros_like(plan.mean), self.layout.rows
        return pk.Result(nothing, plan.order, rows, jnp.float32, start=start)

    def _sums(self, rows: int, start: Array | None = None, into: Array | None = None) -> pk.Result:
        """So many rows of finished sums, from the super-group ``start`` on."""
        plan, divisor = self.shared.plan, self.call.divisor
        dtype = self.own.x.dtype
        return pk.Result(plan.mean_sum, plan.order, rows, dtype, divisor, start, into)


def expected_error(
    plan: Plan, layout: Layout, errors: tuple[float, ...], norm: Float[Array, ""]
) -> Float[Array, ""]:
    """Expected |error|² of an all-reduced sum whose encoded part has the squared norm ``norm``.

    The errors of all stages but the sink's are proportional to the energies of the values that the
    workers add up, and to earlier errors (`methods.base.compounded`). The sink's error is
    proportional to the energy of the values that it encodes; ``norm`` includes both. ``errors`` are
    `Stage.error` of every stage.
    """
    table = jnp.asarray(
        [pk.distortion(layout.fmt, w) if w in layout.fmt.widths else 0.0 for w in range(17)],
        jnp.float32,
    )
    # ``plan.energy`` has means of so many super-groups: those of tile t in a shard's chunks.
    rows = layout.shard_chunks * pk.TILE_ROWS
    energy = jnp.sum(plan.energy) * rows
    parts = [
        share * rows * jnp.sum(table[stage_widths(plan, layout, i)] * plan.energy)
        for i, share in enumerate(errors)
    ]
    # Of each stage, relative to what it encodes: the energies, or in the sink their sum.
    *hops, sink = (part / jnp.where(energy > 0, energy, 1.0) for part in parts)
    arrived = jnp.float32(0)
    for hop in hops:  # (1 + arrived)(1 + hop) - 1, without loss where both are small
        arrived = arrived + hop + arrived * hop
    return arrived * energy + norm * sink / (1 + sink)


def coords_by_width(plan: Plan, layout: Layout) -> Float[Array, " 17"]:
    """The number of coordinates that one worker sends at every width, in all stages, f32."""
    # A payload has one tile of each number t, of any of the shards: counts are averaged over these.
    size = pk.TILE_ROWS * layout.super_group_size / layout.shards
    counts = [
        sent * jnp.sum(jax.nn.one_hot(stage_widths(plan, layout, i).reshape(-1), 17), axis=0)
        for i, sent in enumerate(layout.payloads_sent)
    ]
    return size * sum(counts, start=jnp.zeros(17))


def stage_widths(plan: Plan, layout: Layout, stage: int) -> Array:
    """The width of tile t of any chunk of a shard, int32[shards, T]."""
    # All chunks of a shard have the widths of its first one, in the low 5 bits (`pk.pack_tiles`).
    return plan.tiles[stage][:: layout.shard_chunks] & 31


def encode_slice(
    x: Float[Array, " d"],
    shared: SharedPlan,
    layout: Layout,
    me: Array,
    backend: pk.Backend | None,
) -> UInt[Array, " P"]:
    """The payload of worker ``me``'s own slice in an all-gather (one chunk per worker)."""
    plan, fmt = shared.plan, layout.fmt
    rows, spare = layout.shard_rows, layout.chunk_super_groups - layout.shard_rows
    # From numbers among all slices to those of this one: its rows begin at me * rows. The plan
    # numbers padding after the rows of all slices, me * spare first; here it follows the rows.
    own = plan.order[me]
    own = jnp.where(own < layout.rows, own - me * rows, own - layout.rows - me * spare + rows)
    mean = None
    if layout.stats_per_super_group == 2:
        mean = jnp.pad(lax.dynamic_slice_in_dim(plan.mean, me * rows, rows), (0, spare))
    source = pk.Source(x, mean, own[None])
    tiles = lax.dynamic_slice_in_dim(plan.tiles[0], me, 1)
    # Noise is counted from the first coordinate of all slices.
    noise = pk.noise_from(shared.noise[me], me * rows * fmt.super_group_size)
    target = pk.Target(tiles, noise, layout.payload_words[0])
    return pk.compress(source, jnp.zeros(1, jnp.int32), target, fmt=fmt, backend=backend)[0]
