"""The wire format: what the bits of a payload mean, and the order of what they hold.

No other file defines them.

Terms (docs/algorithm.md): a *super-group* is ``super_group_size`` consecutive coordinates. A *quad*
is four consecutive coordinates. Four *groups* of ``group_size`` coordinates take quads in turn, so
threads that hold one group each load neighbouring quads together. A *tile* is ``TILE_ROWS``
super-groups that share one bit width.
A *payload* is a flat ``uint32`` array that holds the *records* of one chunk's tiles; the record of
a tile of width ``w`` starts at a word offset that the plan chooses and is laid out as

====================  =========================  ==========================================
section               words                      content
====================  =========================  ==========================================
super-group scales    TILE_ROWS / 2              bf16, two to a word (only "uint8" scales)
group scales          TILE_ROWS * groups / 4     uint8 k, four to a word: scale = sg*(k+1)/256
                      (or / 2)                   ("bf16": the scale itself, two to a word)
bit planes of w       TILE_ROWS * size * p / 32  p = 16, 8, 4, 2, 1 where w has that bit; a
                                                 larger plane holds the lower code bits
====================  =========================  ==========================================

Every section is ordered by row (a super-group), then by group, then by coordinate.
Fields fill a word from its low end, so that coordinates of one group share a word. Widths 0 and 16
have no scales: width 0 sends nothing and decodes to 0, width 16 sends stochastically rounded bf16.

A code of width 2..15 is a sign (its top bit) and a level index ``r``; it decodes to
``+-level[r] * scale`` with integer levels (`WireFormat.level_table`). Width 1 is a sign alone.
Integer levels times scales of few significant bits are exact products in f32. So decoding gives
the same bits whether or not a compiler contracts a multiply and an add into one FMA.

With *dither* a code of width 1..15 is a level number and its sign in two's complement: ``r`` for a
positive level, ``~r`` for a negative one. Levels are odd multiples of half a step. So zero is
no level, and no code is lost to a second zero. The decoder regenerates the encoder's noise word and
uses its top `DITHER_BITS`. It subtracts from the level what they tell about the rounding error:
``(+-level[r] - amplitude * (u - 1/2)) * scale``. Here u is the middle of its sixteenth of 0..1, and
the amplitude is `WireFormat.dither_amplitude`. Since u - 1/2 is zero on average, the result is as
unbiased as the rounding itself. For equidistant levels the error is uniform within half a step for
every value, and has half the variance.

With dither a group that holds an exact zero is *marked*. Its levels are even multiples of half a
step (`WireFormat.level_table`). So 0 is one of them, and ``~0`` is left: it means the exact zero,
which decodes to 0 without dither. No bits are added. The sign of a bf16 scale, which is never
negative, marks the group; with "uint8" scales it marks the super-group, and then the low bit of k
marks the group, whose scale has the low bit 1. A marked group of width 1 sends 1, with probability
``|v| / scale``, where the top bit of u is the sign of the value v. It decodes to twice the scale
with this sign, and 0 decodes to 0.

*Levels of energy* order super-groups: the last section of this file. A *shard* is one worker's
slice of the plan, which is sorted separately. An all-reduce has one shard, which holds all
super-groups.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

TILE_ROWS = 8
"""Super-groups in a tile, which is the unit of widths and of the kernels."""

QUAD = 4
"""Consecutive coordinates that are dealt to a group together."""

PLANES = (16, 8, 4, 2, 1)
DITHER_BITS = 4
"""Bits of a coordinate's noise that the decoder uses; the others would remove 0.4% of its error."""
WIDEST_DITHERED = 8
"""Wider codes decode without noise: their error is small, and exact products need the bits."""
DEALT = 4
"""Groups that take quads in turn. Their threads touch whole sectors of 32 bytes of 16-bit
gradients. There are no more such groups, since nearby coordinates have similar scales."""

MAX_WIDTH = 16
SCALE_SLACK = 1.0 - 2.0**-20
"""Scales are rounded up from this fraction of the maximum, so that an exactly representable maximum
stays exact. A value saturates by at most one millionth of itself."""

GEOMETRIC_TOP = 1 << 15
_GEOMETRIC_EPSILON = {2: 0.23, 3: 0.20, 4: 0.18, 5: 0.16, 6: 0.14, 7: 0.12, 8: 0.10, 9: 0.07}

Levels = Literal["companded", "piecewise", "geometric", "uniform"]
Rounding = Literal["antithetic", "correlated", "independent", "nearest"]
GroupScale = Literal["uint8", "bf16"]


def planes_of(width: int) -> tuple[int, ...]:
    """The power-of-two bit planes that make up ``width``, largest first (6 -> (4, 2))."""
    return tuple(p for p in PLANES if width & p)


def plane_shift(width: int, plane: int) -> int:
    """The position, in a code of ``width`` bits, of the lowest bit that ``plane`` holds."""
    return sum(p for p in planes_of(width) if p > plane)


def pack_tiles(offset, width):
    """``word_offset / 4 << 5 | width`` as int32; offsets are multiples of 4 words."""
    return (offset << 3) | width


def unpack_tiles(tiles):
    """The (word_offset, width) of packed tile entries."""
    return (tiles >> 5) * 4, tiles & 31


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Static description of a payload; hashable, so that it can be a jit-static argument.

    Attributes:
      widths: the widths (bits per code) a tile may have, ascending, a subset of 0..16.
      group_size: coordinates that share a scale.
      super_group_size: consecutive coordinates that share a width and statistics.
      levels: "companded": steps of 1, 2, 4 and 8 from zero outwards, a quarter of the levels each;
        "piecewise": steps of 1 near zero and 2 further out; "geometric": the paper's (1+2e^2)^r law
        on a grid of 2^15; "uniform": equidistant.
      rounding: how the noise words of one chunk's encoders are related, see
        `pallas_kernels.hashing`.
      group_scale: "uint8" fractions of a bf16 super-group scale, or "bf16" for each group.
      carries_nan: whether a super-group (a group, with "bf16" scales) with a value that is not
        finite decodes to NaN. Otherwise decoded values are finite for any bits.
      dither: whether levels are odd multiples of half a step and decoders subtract the noise they
        know; not for "geometric".
    """

    widths: tuple[int, ...] = (2, 4, 6, 8, 10)
    group_size: int = 32
    super_group_size: int = 256
    levels: Levels = "companded"
    rounding: Rounding = "antithetic"
    group_scale: GroupScale = "uint8"
    dither: bool = False
    carries_nan: bool = False

    @property
    def groups(self) -> int:
        """Groups in a super-group."""
        return self.super_group_size // self.group_size

    @property
    def planes(self) -> tuple[int, ...]:
        """Every plane that some width of this format uses, largest first."""
        return tuple(p for p in PLANES if any(w & p for w in self.widths))

    def super_scale_words(self, width: int) -> int:
        """Words of the super-group scales of a tile record."""
        has = self.group_scale == "uint8" and 0 < width < 16
        return TILE_ROWS // 2 if has else 0

    def group_scale_words(self, width: int) -> int:
        """Words of the group scales of a tile record."""
        per_word = 4 if self.group_scale == "uint8" else 2
        return TILE_ROWS * self.groups // per_word if 0 < width < 16 else 0

    def plane_words(self, plane: int) -> int:
        """Words of one bit plane of a tile record."""
        return TILE_ROWS * self.super_group_size * plane // 32

    def plane_offset(self, width: int, plane: int) -> int:
        """Word offset of ``plane`` inside the record of a tile of ``width``."""
        before = sum(self.plane_words(p) for p in planes_of(width) if p > plane)
        return self.super_scale_words(width) + self.group_scale_words(width) + before

    def tile_words(self, width: int) -> int:
        """Words of the whole record of a tile of ``width``; a multiple of 4."""
        scales = self.super_scale_words(width) + self.group_scale_words(width)
        return scales + sum(self.plane_words(p) for p in planes_of(width))

    def bits_per_coord(self, width: int) -> float:
        """Bits per coordinate of a tile of ``width``, its share of the scales included."""
        return 32 * self.tile_words(width) / (TILE_ROWS * self.super_group_size)

    def level_start(self, width: int) -> int:
        """Where the levels of ``width`` >= 2 start in their first octave.

        With 2^p levels in an octave (p = `octave_bits`), level r is ``value(start + r) -
        value(start)``, where ``value`` counts like the bits of a float: ``value(i) = (2^p + i mod
        2^p) 2^(i div 2^p)``. For "piecewise", 3/16 of an octave minimises the error for Gaussian
        groups at every width from 3 to 10.

        With dither the first octave starts half a step below the first level, and level r, in
        half-steps, is ``2 value(1 + r) - 2 value(0) - 1``.
        """
        octave = 1 << (width - 1)
        if self.dither or self.levels != "piecewise" or width <= 2:
            return 0
        return max(2, -(-3 * octave // 16))

    def octave_bits(self, width: int) -> int:
        """The base-2 logarithm of the number of levels in an octave, where the step is constant.

        The levels of "companded" span four octaves. Levels of "piecewise" span a little more than
        one octave, or two with dither.
        """
        if self.dither and width <= 2:
            return width - 1
        octaves = {"companded": 4, "piecewise": 2 if self.dither else 1}.get(self.levels, 1)
        return max(width - 1 - (octaves - 1).bit_length(), 0)

    def level_table(self, width: int, marked: bool = False) -> np.ndarray:
        """Integer levels of ``width`` in 1..15: ``int64[2^(width-1)]``, ascending.

        They start at 0 and count steps. With dither they start at 1 and count half-steps; the
        levels of ``marked`` groups start at 0. (Width 1 has the single magnitude 1.) The last entry
        decodes to the group's scale times `level_top`.
        """
        if width == 1:
            return np.array([1])
        index = np.arange(1 << (width - 1))
        if self.levels == "geometric":
            epsilon = _GEOMETRIC_EPSILON.get(width, 0.05)
            power = np.power(1 + 2 * epsilon**2, index.astype(np.float64))
            law = (power - 1) / (power[-1] - 1)
            return np.round(law * GEOMETRIC_TOP).astype(np.int64)
        # value(position) - value(start), see `level_start`; value(start) is octave + start.
        octave, start = 1 << self.octave_bits(width), self.level_start(width)
        first = int(self.dither and not marked)
        position = start + index + first
        value = ((octave + position % octave) << (position // octave)) - (octave + start)
        return 2 * value - first if self.dither else value

    def level_top(self, width: int, marked: bool = False) -> int:
        """The largest level of ``width`` in 1..15."""
        return int(self.level_table(width, marked)[-1])

    def dither_amplitude(self, width: int) -> float:
        """Half-steps of the first octave over which the dither of ``width`` spreads; 0: no dither.

        It is a multiple of 1/2. All levels share it, which keeps rounding unbiased where the step
        changes. For equidistant levels one step is best. Where steps grow, more is best: the error
        is within 4% of what a separate amplitude for each level would leave for "piecewise"
        levels, and within a fourth for "companded" ones.
        """
        if not self.dither or not 0 < width <= WIDEST_DITHERED:
            return 0.0
        amplitude = {"companded": 4.0, "piecewise": 2.5}.get(self.levels, 2.0)
        return amplitude if width > 2 else 2.0

    def scale_bits(self, width: int) -> int:
        """Significant bits a group scale may have so that level * scale is exact in f32."""
        largest, amplitude = self.level_top(width), self.dither_amplitude(width)
        if amplitude:  # multiples of 1 / 2^(DITHER_BITS + 2)
            largest = int((largest + amplitude / 2) * 2 ** (DITHER_BITS + 2))
        return min(16, 24 - largest.bit_length())

    def super_scale_cap(self, width: int) -> float:
        """The largest scale. Decoded values stay finite, and its reciprocal is a normal f32."""
        largest = self.level_top(width) + self.dither_amplitude(width) / 2
        bits = np.float32(3.38e38 / largest).view(np.uint32) & np.uint32(0xFFFF0000)
        return min(float(bits.view(np.float32)), 2.0**125)


NAN_SCALE = 0xFFFF
"""The field of a bf16 scale that means NaN. The sign of other fields marks groups with zeros."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""The smallest f32 that is not flushed to zero: smaller values count as exact zeros."""


class Input(NamedTuple):
    """Payloads to add up, and where their records are."""

    payloads: UInt[Array, "k c P"]
    """k payloads for each of c chunks."""
    tiles: Int[Array, "C T"]
    """Word offset and width of the record of every tile of every chunk; see `pack_tiles`."""
    skip: Int[Array, ""] | None = None
    """The index of a payload to leave out, if any."""
    noise: UInt[Array, "k 8"] | None = None
    """The randomness that each payload was encoded with, for formats with dither."""


class Source(NamedTuple):
    """One worker's gradient, and how its super-groups are dealt to chunks."""

    x: Float[Array, " d"]
    """The flat gradient, f32, bf16 or f16; super-groups past its end read as zeros."""
    mean: Float[Array, " M"] | None
    """The number that is subtracted from every coordinate of a super-group before encoding, f32;
    `None`: nothing is subtracted."""
    order: Int[Array, "C m"]
    """The super-groups of every chunk."""


class Target(NamedTuple):
    """Payloads to write."""

    tiles: Int[Array, "C T"]
    """Word offset and width of the record of every tile of every chunk; see `pack_tiles`."""
    noise: UInt[Array, " 8"]
    """The slot's randomness, one row of `hashing.slot_noise`."""
    payload_words: int
    """Length P of a payload; static."""


class Result(NamedTuple):
    """Finished sums to write, as rows of super-groups."""

    mean_sum: Float[Array, " M"]
    """The number that is added to every coordinate of a super-group: n times the mean that was
    subtracted, or NaN if the super-group has to become NaN; f32."""
    order: Int[Array, "C m"]
    """The super-groups of every chunk; `decompress_accumulate` uses its source's order."""
    rows: int
    """The number of super-groups to write: all ceil(d / S), or the owner's slice; static."""
    dtype: Any
    """The dtype of the result; static."""
    divisor: int = 1
    """The divisor of the sum; static."""
    start: Int[Array, ""] | None = None
    """The first row of the owner's slice, for `decompress_accumulate` alone."""
    into: Float[Array, "rows S"] | None = None
    """The result so far, written in place if XLA can. Rows of other chunks keep its values; without
    it they are unspecified."""


@functools.lru_cache(maxsize=256)
def distortion(fmt: WireFormat, width: int, marked: bool = False) -> float:
    """Mean squared error of one encoding of N(0, 1) coordinates at ``width`` (unitless).

    It is computed, not tabulated: the expected stochastic-rounding error of the format's levels on
    4096 Gaussian groups from a fixed seed. Width 0 gives 1, the energy that is not sent. With
    ``marked``, the error of the other coordinates of groups that hold exact zeros.
    """
    if width == 0:
        return 1.0
    groups = _groups(fmt.group_size)
    if width == 16:
        step = 2.0 ** (np.floor(np.log2(groups.x)) - 7)
        return float(np.mean(step**2) / 6)
    t, top = groups.t, groups.top
    if fmt.dither:
        return _dithered_distortion(fmt, width, marked, groups)
    if width == 1:
        return float(np.mean(top**2 - groups.x**2))
    levels = fmt.level_table(width) / fmt.level_top(width)
    upper = np.clip(groups.levels_up_to(levels), 1, len(levels) - 1)
    return float(np.mean((t - levels[upper - 1]) * (levels[upper] - t) * top**2))


class _Groups(NamedTuple):
    """Gaussian groups; a process computes the distortion of some thirty widths and formats."""

    x: np.ndarray
    """Magnitudes, [groups, coordinates]."""
    top: np.ndarray
    """The largest of each group."""
    t: np.ndarray
    """Magnitudes relative to it."""
    order: np.ndarray
    """The places of ``t`` in ascending order."""

    def levels_up_to(self, levels: np.ndarray) -> np.ndarray:
        """How many ascending levels are at most ``t``: `np.searchsorted`, in less time."""
        begins = np.searchsorted(self.t.reshape(-1), levels, sorter=self.order)
        found = np.empty(self.t.size, np.int64)
        counts = np.diff(begins, prepend=0, append=self.t.size)
        found[self.order] = np.repeat(np.arange(len(levels) + 1), counts)
        return found.reshape(self.t.shape)


@functools.lru_cache(maxsize=2)
def _groups(size: int) -> _Groups:
    x = np.abs(np.random.default_rng(0).standard_normal((4096, size)))
    top = x.max(axis=1, keepdims=True)
    t = x / top
    return _Groups(x, top, t, np.argsort(t, axis=None))


def _dithered_distortion(fmt: WireFormat, width: int, marked: bool, groups: _Groups) -> float:
    """`distortion` with dither, for magnitudes ``t`` relative to their groups' maxima ``top``.

    A value at a fraction p between two levels, ``step`` apart, has the error ``step (b - p) +
    amplitude (u - 1/2)``, where b is 1 if u < p and 0 otherwise. Its mean square is ``step^2 p (1 -
    p) + amplitude^2 / 12 - step amplitude p (1 - p)``, apart from the bits of u that the decoder
    does not know.
    """
    t, top = groups.t, groups.top
    if marked and width == 1:
        return float(np.mean((2 * t - t**2) * top**2))
    positive = fmt.level_table(width, marked) / fmt.level_top(width, marked)
    levels = np.concatenate([-positive[::-1], positive])
    upper = np.clip(groups.levels_up_to(levels), 1, len(levels) - 1)
    step = levels[upper] - levels[upper - 1]
    p = (t - levels[upper - 1]) / step
    amplitude = fmt.dither_amplitude(width) / fmt.level_top(width, marked)
    spread = amplitude**2 / 12 * (1 + 4.0**-DITHER_BITS)
    return float(np.mean((step * (step - amplitude) * p * (1 - p) + spread) * top**2))


# --- Levels of energy, by which super-groups are sorted -------------------------------------------


ENERGY_LEVELS = 256
"""The number of levels, which are 1/4 octave each."""
MANTISSA_BITS = 2
"""The bits of an energy's mantissa that determine its level."""


class Dealt(NamedTuple):
    """Super-groups in the order of their energy, dealt to chunks, and the widths of their tiles."""

    order: Int[Array, "C m"]
    """Chunk c's position p holds super-group ``order[c, p]``."""
    tiles: tuple[Int[Array, "C T"], ...]
    """Word offset and width of each tile's record (`pallas_kernels.pack_tiles`), for F budgets."""
    energy: Float[Array, "shards T"]
    """The mean energy of the super-groups in tile t of a shard's chunks."""


class Upgrades(NamedTuple):
    """How tiles are widened within F budgets, by U upgrades each; hashable.

    A budget with fewer upgrades has additional ones, which no tile gets.
    """

    words: tuple[tuple[int, ...], ...]
    """Words that an upgrade of one tile takes, U rows of F; at least 1."""
    wider: tuple[tuple[int, ...], ...]
    """Bits by which an upgrade widens a tile, U rows of F."""
    budgets: tuple[int, ...]
    """The words of each budget that tiles of the narrowest width leave."""
    narrowest: int
    """The width of all tiles before upgrades."""
    tile_words: int
    """The words of a tile of this width."""


def padded_count(count: int) -> int:
    """The power of two to which `mean_of` pads ``count`` energies with zeros."""
    return 1 << (count - 1).bit_length()


def mean_of(energy: Float[Array, "T k"], count: int) -> Float[Array, " T"]:
    """The means of ``count`` energies each, padded with zeros to `padded_count`.

    All backends add in the same order: the second half to the first half, until one number is left.
    Before that, all numbers are divided by a power of two. So no sum overflows, and the bits do not
    depend on whether a compiler fuses a multiplication with an addition.
    """
    padded = padded_count(count)
    energy = energy * np.float32(1 / padded)
    while energy.shape[1] > 1:
        first, second = lax.split(energy, [energy.shape[1] // 2] * 2, axis=1)
        energy = first + second
    return energy.reshape(energy.shape[0]) * np.float32(padded / count)


def octave_end(x: Float[Array, "*k s"]) -> Int[Array, "*k 1"]:
    """The end of the octave of the largest x >= 0, as `steps_below` needs it."""
    return jnp.max(octave_parts(x), axis=-1, keepdims=True) | ((1 << MANTISSA_BITS) - 1)


def steps_below(x: Float[Array, "*k s"], end: Int[Array, "*k 1"]) -> Int[Array, "*k s"]:
    """How many steps of 1/4 octave x >= 0 lies below the end of an octave.

    The result is from 0 to `ENERGY_LEVELS` - 1; all smaller x have the last step.
    """
    return jnp.clip(end - octave_parts(x), 0, ENERGY_LEVELS - 1)


def octave_parts(x: Float[Array, "*k"]) -> Int[Array, "*k"]:
    """How many steps of 1/4 octave x >= 0 lies above zero."""
    return lax.bitcast_convert_type(x, jnp.int32) >> (23 - MANTISSA_BITS)
