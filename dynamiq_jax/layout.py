"""Static sizes: how d coordinates on n workers become chunks, tiles and payload words.

Everything here is a Python integer known at trace time. What depends on the data (which
super-group gets which width) is in `dynamiq_jax.plan`.
"""

from dataclasses import dataclass

from pallas_kernels.format import TILE_ROWS, WireFormat

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sizes of one compressed all-reduce.

    Attributes:
      size: coordinates in the flat gradient (d).
      n_workers: workers (n).
      chunks_per_worker: chunks whose reduction ends at one worker; more than one lets the hop
        of one overlap the transfer of another.
      chunk_super_groups: super-groups per chunk (m), a multiple of `TILE_ROWS`.
      payload_words: `uint32` words of one chunk's payload (P).
      stats_per_super_group: bf16 numbers per super-group in the light all-reduce.
    """

    size: int
    n_workers: int
    chunks_per_worker: int
    chunk_super_groups: int
    payload_words: int
    stats_per_super_group: int

    @property
    def chunks(self) -> int:
        """Chunks in all (C)."""
        return self.n_workers * self.chunks_per_worker

    @property
    def super_groups(self) -> int:
        """Super-groups including padding (M = C * m)."""
        return self.chunks * self.chunk_super_groups

    @property
    def chunk_tiles(self) -> int:
        """Tiles per chunk (T)."""
        return self.chunk_super_groups // TILE_ROWS

    @property
    def stats_bits(self) -> int:
        """Bits of one worker's statistics."""
        return 16 * self.stats_per_super_group * self.super_groups

    @property
    def message_bits(self) -> int:
        """Bits of one worker's whole message: statistics and the payloads of all chunks.

        An all-reduce moves 2 (n-1)/n of this per worker, as one of 16 * d bits would.
        """
        return self.stats_bits + self.chunks * self.payload_words * WORD_BITS

    @property
    def wire_bits(self) -> int:
        """Bits that one worker sends in a bandwidth-optimal all-reduce."""
        return 2 * (self.n_workers - 1) * self.message_bits // self.n_workers


def make_layout(
    size: int,
    n_workers: int,
    *,
    bits: float,
    fmt: WireFormat,
    stats_per_super_group: int,
    chunks_per_worker: int = 1,
) -> Layout:
    """Sizes for ``size`` coordinates at ``bits`` bits each, all metadata included.

    The budget is ``bits * size``, whatever the padding; only where even the narrowest width for
    every tile does not fit is it exceeded.
    """
    chunks = n_workers * chunks_per_worker
    per_chunk = -(-size // (fmt.super_group_size * chunks))
    chunk_super_groups = -(-per_chunk // TILE_ROWS) * TILE_ROWS
    super_groups = chunk_super_groups * chunks
    tiles = chunk_super_groups // TILE_ROWS
    stats_bits = 16 * stats_per_super_group * super_groups
    budget = int(bits * size - stats_bits) // (WORD_BITS * chunks)
    narrowest = tiles * min(fmt.tile_words(w) for w in fmt.widths)
    widest = tiles * max(fmt.tile_words(w) for w in fmt.widths)
    payload_words = max(min(budget, widest) // 4 * 4, narrowest, 4)
    return Layout(
        size=size,
        n_workers=n_workers,
        chunks_per_worker=chunks_per_worker,
        chunk_super_groups=chunk_super_groups,
        payload_words=payload_words,
        stats_per_super_group=stats_per_super_group,
    )
