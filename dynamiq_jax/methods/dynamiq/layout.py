"""Static sizes: how d coordinates on n workers become chunks, tiles and payload words.

All sizes here are Python integers known at trace time. Values that depend on the data (which
super-group gets which width) are in `dynamiq_jax.methods.dynamiq.plan`.

A *shard* is a set of super-groups with a separate budget for their widths. An all-reduce has one
shard. A reduce-scatter or an all-gather has one shard per worker, its slice, since a slice may not
leave its worker's chunks. A *row* is a super-group as a row of S coordinates.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from dynamiq_jax.methods.base import Collective
from dynamiq_jax.methods.dynamiq.allocation import Allocation, width_upgrades
from dynamiq_jax.topologies import Stage
from pallas_kernels.format import TILE_ROWS, WireFormat

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
      floors: the smallest width in every stage, see `dynamiq_jax.methods.dynamiq.allocation`.
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
