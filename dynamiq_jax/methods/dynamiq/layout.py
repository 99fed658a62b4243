"""DynamiQ before it has seen any data: bits, floors and sizes, all of them Python numbers.

**Bits.** The rule has three parts. At every encoding each super-group gets at least the *floor* of
the stage: the largest width that fits the budget in all stages, or the next larger one in the
stages where this removes most error. The rest of the budget is spread evenly over all stages. There
it widens the super-groups where this removes most squared error
(`dynamiq_jax.methods.dynamiq.codec`).

If only the squared error counted, all super-groups with little energy would get the narrowest
width, and their error would be as large as their values. Optimisers that divide by the scale of
each coordinate, such as Adam, then take full steps along this noise: docs/results.md.

**Sizes.** How d coordinates on n workers become chunks, tiles and payload words. Values that depend
on the data (which super-group gets which width) are in `dynamiq_jax.methods.dynamiq.codec`.

A *shard* is a set of super-groups with a separate budget for their widths. An all-reduce has one
shard. A reduce-scatter or an all-gather has one shard per worker, its slice, since a slice may not
leave its worker's chunks. A *row* is a super-group as a row of S coordinates.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dynamiq_jax.methods.base import Collective, compounded
from dynamiq_jax.topologies import Stage
from pallas_kernels import distortion
from pallas_kernels.format import TILE_ROWS, Levels, WireFormat

# --- Bits -----------------------------------------------------------------------------------------


Floor = int | Literal["auto"] | None
"""A width; "auto" chooses one for every stage; `None`: squared error alone decides."""

NARROWEST_FLOOR, WIDEST_FLOOR = 2, 14
LARGEST_RELATIVE_ERROR = {False: 0.38, True: 0.124}
"""The limit of the relative error, by whether there is dither, whose noise does not shrink with the
coordinate. Beyond it, training with Adam lost at least 0.5% of validation loss in trainings
of least squared error."""
LARGEST_DITHERED_ERROR = 2.0
"""The limit beyond which dither without a floor had more squared error than no dither: the same on
rings of 32 workers, ten times as much on rings of 64 (docs/algorithm.md, section 7)."""


class Allocation(NamedTuple):
    """Static decisions for all stages of a collective, for any size."""

    fmt: WireFormat
    """The wire format; its widths are those that a tile may have."""
    floors: tuple[int, ...]
    """The smallest width in every stage."""
    held: tuple[int, ...]
    """The width for which every stage's payload has room in all tiles, even in small buckets: the
    floor, or without a floor the largest width that fits the stage's bits."""
    bits: tuple[float, ...]
    """Bits per coordinate of every stage relative to their average over all that is sent."""
    relative_error: float
    """The approximate |error|² / |sum|² of super-groups with the floors' widths, see
    `DynamiQ.relative_error`."""
    lost: float
    """The sum of the squared errors of all encodings at the floors' widths, over the energy of the
    values that workers send; unlike in `relative_error`, no errors cancel."""


class Upgrade(NamedTuple):
    """A step between neighbouring widths on the lower convex hull of (words, distortion)."""

    width: int
    words: int
    gain: float
    """The distortion removed per word, for unit energy; it decreases from upgrade to upgrade."""


def width_upgrades(fmt: WireFormat, floor: int | None = None) -> tuple[int, tuple[Upgrade, ...]]:
    """The narrowest width and the upgrades worth taking, best first.

    Widths above the convex hull (a wider one removes more error per word) are never used. With a
    ``floor`` the upgrades pass through it: first the hull of widths up to it, then the hull of
    widths from it on.
    """
    widths = sorted(fmt.widths)
    if floor is None or floor <= widths[0]:
        return widths[0], _hull(fmt, widths)
    below = _hull(fmt, [w for w in widths if w <= floor])
    return widths[0], below + _hull(fmt, [w for w in widths if w >= floor])


def _hull(fmt: WireFormat, widths: list[int]) -> tuple[Upgrade, ...]:
    """The upgrades along the lower convex hull of (words, distortion), from the first width."""
    words = [fmt.tile_words(w) for w in widths]
    errors = [distortion(fmt, w) for w in widths]
    upgrades, at = [], 0
    while at < len(widths) - 1:
        gains = [
            (errors[at] - errors[to]) / (words[to] - words[at]) for to in range(at + 1, len(widths))
        ]
        to = at + 1 + int(np.argmax(gains))  # gains[0] is that of the step to at + 1
        if gains[to - at - 1] <= 0:
            break
        upgrades.append(Upgrade(widths[to], words[to] - words[at], max(gains)))
        at = to
    return tuple(upgrades)


@functools.lru_cache(maxsize=256)
def allocate(
    stages: tuple[Stage, ...],
    fmt: WireFormat,
    *,
    bits: float,
    widths: tuple[int, ...] | None,
    floor: Floor,
    balance: float | None,
) -> Allocation:
    """Floors, widths and bits of all stages, for ``bits`` per coordinate of payloads on average.

    Without ``widths`` a tile may get the floors, one below them, and even widths above.
    """
    step = 2 if floor is None else 1  # a floor may have any width
    candidates = widths or tuple(range(NARROWEST_FLOOR, widest_floor(fmt.levels) + 1, step))
    every = dataclasses.replace(fmt, widths=candidates)
    if floor == "auto" and balance is None:
        floors = _joint_floors(stages, every, bits)
        offsets = _less_average(stages, [every.bits_per_coord(w) for w in floors])
    else:
        offsets = stage_bits(stages, balance)
        if floor == "auto":
            floors = tuple(_widest_within(every, bits + offset) for offset in offsets)
        else:
            floors = (min(candidates) if floor is None else floor,) * len(stages)
    if widths is None and floor is not None:
        every = dataclasses.replace(fmt, widths=_widths_around(floors, fmt.levels))
    held = floors
    if floor != "auto":
        within = (_widest_within(every, bits + offset) for offset in offsets)
        held = tuple(map(max, floors, within))
    errors = [s.error * distortion(every, w) for s, w in zip(stages, floors, strict=True)]
    # `Stage.error` halves all stages but the sinks', which twice the sum counts once too often.
    lost = 2 * sum(errors) - errors[-1]
    return Allocation(every, floors, held, offsets, compounded(errors), lost)


def stage_bits(stages: tuple[Stage, ...], balance: float | None) -> tuple[float, ...]:
    """Bits per coordinate of every stage relative to their average over all that is sent.

    With errors that fall as ``2^(-a bits)``, the sum of ``error_i 2^(-a bits_i)`` is least for a
    given sum of ``sent_i bits_i`` if ``bits_i`` is the logarithm of ``error_i / sent_i`` over a,
    but for a constant. Where super-groups differ as gradients' do, a is 2 at high rates and 2 to 3
    at three to six bits.
    """
    if balance is None:
        return _less_average(stages, [math.log2(s.error / s.sent) / 2.5 for s in stages])
    return _less_average(stages, [balance] * (len(stages) - 1) + [0.0])


def _less_average(stages: tuple[Stage, ...], bits: list[float]) -> tuple[float, ...]:
    """Bits less their average over all payloads that are sent."""
    total = sum(stage.sent for stage in stages)
    average = sum(b * stage.sent for b, stage in zip(bits, stages, strict=True)) / total
    return tuple(b - average for b in bits)


def widest_floor(levels: Levels) -> int:
    """The largest width that is chosen automatically."""
    return 10 if levels == "geometric" else WIDEST_FLOOR


def _widths_around(floors: tuple[int, ...], levels: Levels) -> tuple[int, ...]:
    """From one width below the floors to the widest floor, then even ones to 10 or 4 bits above."""
    least, most = min(floors), max(floors)
    floor_widths = range(max(least - 1, min(least, NARROWEST_FLOOR)), most + 1)
    above = range(most + 2 - most % 2, min(max(10, most + 4), widest_floor(levels)) + 1, 2)
    return (*floor_widths, *above)


def _widest_within(fmt: WireFormat, bits: float) -> int:
    """The largest width on the hull that takes at most this many bits per coordinate."""
    narrowest, upgrades = width_upgrades(fmt)
    fitting = (u.width for u in upgrades if fmt.bits_per_coord(u.width) <= bits + 1e-9)
    return max([narrowest, *fitting])


def _joint_floors(stages: tuple[Stage, ...], fmt: WireFormat, bits: float) -> tuple[int, ...]:
    """The largest width for all stages, and the next larger one where it removes most error."""
    narrowest, upgrades = width_upgrades(fmt)
    widths = (narrowest, *(u.width for u in upgrades))
    common = _widest_within(fmt, bits)
    floors = [common] * len(stages)
    if common == widths[-1]:
        return tuple(floors)
    wider = widths[widths.index(common) + 1]
    step = fmt.bits_per_coord(wider) - fmt.bits_per_coord(common)
    # ``left`` is in bits per coordinate times payloads, of which stage i sends ``sent``.
    left = (bits - fmt.bits_per_coord(common)) * sum(stage.sent for stage in stages)
    for i in sorted(range(len(stages)), key=lambda i: -stages[i].error / stages[i].sent):
        if stages[i].sent * step <= left:
            floors[i] = wider
            left -= stages[i].sent * step
    return tuple(floors)


# --- Sizes ----------------------------------------------------------------------------------------


WORD_BITS = 32
MOST_SAMPLES = 2**14
"""The number of coordinates that a worker sends of a bucket without a plan. With their squares they
take more bytes than the limit up to which XLA combines all-reduces (`topologies.links`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sizes of one compressed collective.

    Attributes:
      collective: the kind of collective.
      size: coordinates in one shard (d; in a sharded collective d / n, one worker's slice).
      n_workers: workers (n).
      chunks_per_worker: chunks whose owner is one worker; if there are several, the hop of one
        overlaps with the transfer of another.
      chunk_super_groups: super-groups per chunk (m), a multiple of `TILE_ROWS`.
      payload_words: `uint32` words of one chunk's payload (P) in every stage.
      payloads_sent: payloads that one worker sends in every stage.
      floors: the smallest width in every stage, see the heading.
      fmt: the meaning of the bits of a payload.
      stats_per_super_group: bf16 numbers per super-group in the light all-reduce.
      planned: whether widths depend on the statistics. Without a plan all super-groups get the
        width that fits the payload, and samples of coordinates replace statistics.
    """

    collective: Collective
    size: int
    n_workers: int
    chunks_per_worker: int
    chunk_super_groups: int
    payload_words: tuple[int, ...]
    payloads_sent: tuple[int, ...]
    floors: tuple[int, ...]
    fmt: WireFormat
    stats_per_super_group: int
    planned: bool = True

    @property
    def super_group_size(self) -> int:
        """Coordinates in a super-group (S)."""
        return self.fmt.super_group_size

    @property
    def shards(self) -> int:
        """The number of sets of super-groups with separate budgets."""
        return 1 if self.collective == "all_reduce" else self.n_workers

    @property
    def summed(self) -> int:
        """The number of gradients that are added up."""
        return 1 if self.collective == "all_gather" else self.n_workers

    @property
    def chunks(self) -> int:
        """The number of all chunks (C)."""
        return self.n_workers * self.chunks_per_worker

    @property
    def shard_chunks(self) -> int:
        """The number of chunks of one shard."""
        return self.chunks // self.shards

    @property
    def super_groups(self) -> int:
        """The number of super-groups including padding (M = C * m)."""
        return self.chunks * self.chunk_super_groups

    @property
    def shard_rows(self) -> int:
        """The number of super-groups of one shard that hold coordinates."""
        return -(-self.size // self.super_group_size)

    @property
    def rows(self) -> int:
        """The number of super-groups that hold coordinates; higher indices are padding."""
        return self.shards * self.shard_rows

    @property
    def chunk_tiles(self) -> int:
        """The number of tiles per chunk (T)."""
        return self.chunk_super_groups // TILE_ROWS

    @property
    def sample_step(self) -> int:
        """The number of super-groups from one sample to the next, without a plan."""
        # Rounded up, so that a worker sends at most `MOST_SAMPLES` samples.
        return -(-self._sampled_rows // MOST_SAMPLES)

    @property
    def _sampled_rows(self) -> int:
        """The number of super-groups that one worker samples from."""
        return self.shard_rows if self.collective == "all_gather" else self.rows

    def widths(self, stage: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The widths of a chunk's tiles without a plan: two pairs, a number of tiles and a width.

        All tiles get the largest width that fits the payload for all of them, and the first tiles
        get the next larger width with the words that are left.
        """
        fmt, tiles = self.fmt, self.chunk_tiles
        width, upgrades = width_upgrades(fmt)
        left = self.payload_words[stage] - tiles * fmt.tile_words(width)
        for upgrade in upgrades:
            # Of the first upgrade that does not fit for all tiles, some get it, and none get more.
            wider = min(tiles, max(left, 0) // upgrade.words)
            if wider < tiles:
                return (wider, upgrade.width), (tiles - wider, width)
            width, left = upgrade.width, left - wider * upgrade.words
        return (0, width), (tiles, width)

    @property
    def stats_bits(self) -> int:
        """Bits that one worker sends for the light all-reduce (or all-gather)."""
        n, rows, per_row = self.n_workers, self.rows, self.stats_per_super_group
        if not self.planned:  # samples, two numbers each, of all workers in an all-gather
            own = self._sampled_rows
            rows, per_row = rows // own * -(-own // self.sample_step), 2
        # A sum passes (n - 1)/n of all rows twice (scatter, gather), a gather once, in bf16.
        passes = 1 if self.collective == "all_gather" else 2
        return passes * 16 * per_row * rows * (n - 1) // n

    @property
    def wire_bits(self) -> int:
        """All bits that one worker sends."""
        pairs = zip(self.payload_words, self.payloads_sent, strict=True)
        return self.stats_bits + sum(words * sent * WORD_BITS for words, sent in pairs)


class Transfers(NamedTuple):
    """How chunks travel, whatever their size."""

    n_workers: int
    stages: tuple[Stage, ...]
    collective: Collective = "all_reduce"
    chunks_per_worker: int = 1
    """Chunks whose reduction ends at one worker."""


def make_layout(
    size: int,
    transfers: Transfers,
    *,
    bits: float,
    allocation: Allocation,
    stats_per_super_group: int,
    planned: bool = True,
) -> Layout:
    """Sizes for shards of ``size`` coordinates at ``bits`` bits each, all metadata included.

    In a bandwidth-optimal all-reduce every worker sends 2 (n-1)/n of all coordinates, in a
    reduce-scatter or an all-gather half of that: the budget is ``bits`` for each of these. Padding
    of the last tile of every chunk may exceed it: a payload has room for `Allocation.held` in all
    tiles, even for tiles with few coordinates.
    """
    n, fmt, collective = transfers.n_workers, allocation.fmt, transfers.collective
    whole = collective == "all_reduce"
    shard_chunks = transfers.chunks_per_worker * (n if whole else 1)
    # Super-groups of a chunk, then its tiles: both divisions round up.
    per_chunk = -(-size // (fmt.super_group_size * shard_chunks))
    tiles = max(-(-per_chunk // TILE_ROWS), 1)
    sent = [stage.sent * transfers.chunks_per_worker for stage in transfers.stages]
    layout = Layout(
        collective=collective,
        size=size,
        n_workers=n,
        chunks_per_worker=transfers.chunks_per_worker,
        chunk_super_groups=tiles * TILE_ROWS,
        payload_words=(),
        payloads_sent=tuple(sent),
        floors=allocation.floors,
        fmt=fmt,
        stats_per_super_group=stats_per_super_group,
        planned=planned,
    )
    # (n - 1)/n of n slices of ``size`` in a sharded collective, twice that of one in an all-reduce.
    coords_passed = (2 if whole else n) * (n - 1) * size / n
    left = bits * coords_passed - layout.stats_bits
    # Bits per coordinate become words of a payload, which holds size / shard_chunks coordinates.
    words = _payload_words(
        left / WORD_BITS,
        sent,
        [offset * size / shard_chunks / WORD_BITS for offset in allocation.bits],
        narrowest=max(tiles * min(fmt.tile_words(w) for w in fmt.widths), 4),
        widest=max(tiles * max(fmt.tile_words(w) for w in fmt.widths), 4),
    )
    # A payload holds the least widths for all tiles, even if they exceed the budget.
    words = tuple(map(max, words, (tiles * fmt.tile_words(width) for width in allocation.held)))
    layout = dataclasses.replace(layout, payload_words=words)
    if not planned:
        # The widths are known now: the format needs no others, and payloads carry NaN in scales.
        used = {int(w) for stage in range(len(words)) for count, w in layout.widths(stage) if count}
        fmt = dataclasses.replace(fmt, widths=tuple(sorted(used)), carries_nan=True)
        layout = dataclasses.replace(layout, fmt=fmt)
    return layout


def _payload_words(
    budget: float, sent: list[int], offsets: list[float], *, narrowest: int, widest: int
) -> tuple[int, ...]:
    """The words of each stage's payload: within the total ``budget``, with these offsets, in range.

    A stage beyond an end of the range gets this end; the other stages share the rest of the budget.
    """
    words = [0] * len(sent)
    free = set(range(len(sent)))
    while free:
        # The level solves Σ sent_i (level + offset_i) = budget; payloads are multiples of 4 words.
        level = (budget - sum(sent[i] * offsets[i] for i in free)) / sum(sent[i] for i in free)
        wanted = {i: int(max(level + offsets[i], 0)) // 4 * 4 for i in free}
        low = {i for i in free if wanted[i] < narrowest}
        high = {i for i in free if wanted[i] > widest}
        settled = low or high or set(free)
        for i in settled:
            words[i] = min(max(wanted[i], narrowest), widest)
            budget -= sent[i] * words[i]
        free -= settled
    return tuple(words)
