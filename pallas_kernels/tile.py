"""The arithmetic of one tile on values in registers, shared by kernels of every lowering of Pallas.

A tile's values stay in registers from the first load to the last store, and a thread holds all
quads of a group. So threads exchange nothing for a group's maxima and words. A tile's width is
static: a kernel reads it at run time and takes the branch compiled for it (`Tile.by_width`), in
which every shift, mask and level constant is static.

The arithmetic equals `pallas_kernels.reference`, operation by operation where rounding could
differ. No addition takes a product of inexact operands, so FMA contraction cannot change a bit.
Nothing here touches memory or depends on a lowering: `Tile` and `Payload` hide how lowerings
differ.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.format import (
    DITHER_BITS,
    NAN_SCALE,
    SCALE_SLACK,
    SMALLEST_NORMAL,
    WireFormat,
    plane_shift,
    planes_of,
)
from pallas_kernels.hashing import Noise, noise_words


class Tile(Protocol):
    """A program's part of a chunk, as a lowering holds it in registers.

    Arrays of *coordinates* have the shape that the lowering chose. `to_groups` broadcasts arrays of
    *super-groups*, and `to_coordinates` arrays of *groups*.
    """

    fmt: WireFormat
    c: Any
    """The position of the program's chunk among the call's chunks: int32 scalar."""

    def rows(self, order_ref, chunk) -> jax.Array:
        """The numbers of the tile's super-groups, from ``order_ref[chunk]``: int32."""
        ...

    def by_width(self, tiles_ref, chunk, branch: Callable, *operands):
        """``branch(offset, w)(*operands)``, as the tile's entry in ``tiles_ref[chunk]`` says."""
        ...

    def load(self, x_ref, rows, n_rows: int) -> jax.Array:
        """The coordinates of super-groups ``rows`` in their dtype; 0 from row ``n_rows`` on."""
        ...

    def pinned(self, x, width: int) -> jax.Array:
        """Casts coordinates to f32 in the branch of ``width``; no compiler moves the cast out."""
        ...

    def load_rows(self, ref, rows) -> jax.Array:
        """One f32 for each of the super-groups ``rows``, for all their coordinates."""
        ...

    def store(self, out_ref, rows, values) -> None:
        """Writes f32 coordinates to the ``rows`` that ``out_ref`` has, in its dtype."""
        ...

    def payload(self, ref, where: tuple) -> "Payload":
        """The payload ``ref[*where]``."""
        ...

    def levels(self, at) -> jax.Array:
        """The f32 entries of `level_tables` at int32 indices, for coordinates."""
        ...

    def inverse(self, x) -> jax.Array:
        """1/x, correctly rounded, for normal positive f32 x below 2^126."""
        ...

    def magnitude_plus(self, x, c) -> jax.Array:
        """|x| + c for coordinates, rounded once; c is f32, for all or for coordinates."""
        ...

    def ceil(self, x) -> jax.Array:
        """Rounds f32 from 1 to 256 up to int32."""
        ...

    def zeros(self) -> jax.Array:
        """f32 zeros for all coordinates."""
        ...

    def shifts(self, bits: int) -> jax.Array:
        """0, bits, 2*bits, 3*bits for the coordinates of a quad: uint32."""
        ...

    def counters(self, rows) -> jax.Array:
        """The number of each coordinate's quad, for super-groups ``rows``: uint32."""
        ...

    def group_max(self, values) -> jax.Array:
        """The largest f32 coordinate of each group."""
        ...

    def row_max(self, of_groups) -> jax.Array:
        """The largest f32 among each super-group's groups."""
        ...

    def to_groups(self, of_rows) -> jax.Array:
        """Broadcasts super-groups' values to groups."""
        ...

    def to_coordinates(self, of_groups) -> jax.Array:
        """Broadcasts groups' values to coordinates."""
        ...

    def if_any(
        self, of_groups, run: Callable[[], jax.Array], otherwise: Callable[[], jax.Array]
    ) -> jax.Array:
        """``run()`` if some of the groups' uint32 are not 0, else ``otherwise()``, its equal."""
        ...


class Payload(Protocol):
    """How a kernel reads and writes one payload, by sections that start at word offsets."""

    def load_row_scales(self, offset) -> jax.Array:
        """Loads super-groups' fields of 16 bits: uint32."""
        ...

    def store_row_scales(self, offset, fields: jax.Array) -> None:
        """Stores super-groups' uint32 fields, each below 2^16."""
        ...

    def load_group_scales(self, offset, bits: int) -> jax.Array:
        """Loads groups' fields of ``bits`` bits: uint32."""
        ...

    def store_group_scales(self, offset, fields: jax.Array, bits: int) -> None:
        """Stores groups' uint32 fields, each below 2^bits."""
        ...

    def load_plane(self, offset, bits: int) -> jax.Array:
        """Loads coordinates' uint32 fields of ``bits`` bits; higher bits are unspecified."""
        ...

    def store_plane(self, offset, fields: jax.Array, bits: int) -> None:
        """Stores coordinates' uint32 fields, each below 2^bits."""
        ...


def bits_of(x) -> jax.Array:
    """The bits of f32 numbers, uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def floats_of(bits) -> jax.Array:
    """The f32 numbers of bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits_of(x) -> int:
    """The bits of the f32 number ``x``."""
    return int(np.float32(x).view(np.uint32))


def as_word(value: int):
    """``value`` modulo 2^32 as uint32."""
    return np.uint32(value & 0xFFFFFFFF)


def noise_of(rows, noise: Noise, tile: Tile):
    """Noise words [quads, R, groups, QUAD] of the super-groups ``rows[R]``."""
    return noise_words(tile.counters(rows), tile.shifts(8), noise, tile.fmt.rounding)


def finished(value, mean_sum, divisor: int):
    """The finished sum: ``value + mean_sum``, divided by ``divisor``."""
    return divided(value + mean_sum, divisor)


def divided(value, divisor: int):
    """``value``, f32, times the reciprocal of ``divisor``."""
    return value if divisor == 1 else value * np.float32(1.0 / divisor)


def decode(payload: Payload, offset, width: int, noise: Callable[[], jax.Array], tile: Tile):
    """The decoded coordinates f32[quads, R, groups, QUAD] of the record at word ``offset``."""
    fmt = tile.fmt
    if width == 0:
        return tile.zeros()
    code = jnp.uint32(0)
    # A plane holds ``plane`` bits of every code, from bit `plane_shift` on.
    for plane in planes_of(width):
        fields = payload.load_plane(offset + fmt.plane_offset(width, plane), plane)
        if plane < 16:
            fields = fields & as_word((1 << plane) - 1)
        fields = fields << as_word(plane_shift(width, plane))
        code = fields | code
    if width == 16:
        magnitude = code & as_word(0x7FFF)
        if not fmt.carries_nan:
            magnitude = jnp.minimum(magnitude, as_word(0x7F7F))
        return floats_of((magnitude << 16) | (code >> 15 << 31))
    scale, marked = _decode_scales(payload, offset, width, tile)
    if fmt.dither:
        return _decode_dithered(code, marked, noise, width, tile) * scale
    if width == 1:
        return floats_of(bits_of(scale) | ((code ^ 1) << 31))
    # The code's top bit becomes the f32's sign; the bits below are the level's index.
    sign = (code << as_word(32 - width)) & as_word(1 << 31)
    level = code & as_word((1 << (width - 1)) - 1)
    return floats_of(bits_of(_decode_levels(level, width, tile)) | sign) * scale


def _decode_dithered(code, marked, noise: Callable[[], jax.Array], width: int, tile: Tile):
    """Levels minus their dither, f32 in half-steps; every operation is exact."""
    words: Any = noise() if tile.fmt.dither_amplitude(width) else None

    def with_zeros():
        if width == 1:
            # The noise's top bit is the sign of 2.0.
            sent = floats_of((words & as_word(1 << 31)) | as_word(_bits_of(2.0)))
            sent = jnp.where(code == as_word(1), sent, np.float32(0))
            level, marks = _dithered_level(code, None, words, width, tile), marked
            return jnp.where(tile.to_coordinates(marks) == as_word(1), sent, level)
        level = _dithered_level(code, marked, words, width, tile)
        return jnp.where(code == _zero_code(marked, width, tile), np.float32(0), level)

    # Zeros are rare, and one instruction for each coordinate takes 3% of a kernel's time.
    return tile.if_any(marked, with_zeros, lambda: _dithered_level(code, None, words, width, tile))


def _dithered_level(code, marked, words, width: int, tile: Tile):
    """Levels minus the dither of noise ``words``; ``marked`` is `None` if no group is marked."""
    negative = _sign_mask(code << as_word(32 - width))
    # A level's index at bit 23 - bits of an f32 counts steps, which double from octave to octave.
    index = (code ^ negative) & as_word((1 << (width - 1)) - 1)
    first, low = _first_level(marked, width, tile)
    level = floats_of((index << as_word(23 - tile.fmt.octave_bits(width))) + first) - low
    level = floats_of(bits_of(level) ^ (negative & as_word(1 << 31)))
    amplitude = np.float32(tile.fmt.dither_amplitude(width))
    if not amplitude:
        return level
    # 1 + k / 2^DITHER_BITS for the known bits k; u is the middle of the interval that k leaves.
    known = (words >> as_word(9)) & as_word((0xFFFFFFFF << (23 - DITHER_BITS)) & 0x7FFFFF)
    known = floats_of(known | as_word(_bits_of(1.0)))
    return (level + amplitude * np.float32(1.5 - 0.5 ** (DITHER_BITS + 1))) - amplitude * known


def _zero_code(marked, width: int, tile: Tile):
    """The code of the exact zero: all ones in a marked group, and no code in another."""
    return tile.to_coordinates(as_word(1 << width) - marked)


def _sign_mask(bits):
    """All ones where the top bit is set, else 0: uint32."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(bits, jnp.int32) >> 31, jnp.uint32)


def _octaves(width: int, fmt: WireFormat) -> tuple[np.float32, int]:
    """Where the first octave of levels starts, in units of levels, and `octave_bits`."""
    bits = fmt.octave_bits(width)
    low = (1 << bits) + fmt.level_start(width)
    return np.float32(2 * low if fmt.dither else low), bits


def _first_level(marked, width: int, tile: Tile):
    """Where levels with dither start, for coordinates: the bits of an f32, and the f32 itself.

    The first level is 0 in a marked group, and half a step in another.
    """
    low, bits = _octaves(width, tile.fmt)
    first = _bits_of(low) + (1 << (23 - bits))
    if marked is None:
        return as_word(first), low + np.float32(1)
    start = jnp.where(marked == as_word(1), low, low + np.float32(1))
    return tile.to_coordinates(as_word(first) - (marked << as_word(23 - bits))), (
        tile.to_coordinates(start)
    )


def _decode_scales(payload: Payload, offset, width: int, tile: Tile):
    """Group scales f32[1, R, groups, 1] of a record, and which groups are marked, uint32."""
    fmt = tile.fmt
    if fmt.group_scale == "bf16":
        fields = payload.load_group_scales(offset, 16)
        return tile.to_coordinates(_finite_scale(fields, width, fmt)), fields >> 15
    fields = payload.load_row_scales(offset)
    super_scale = tile.to_groups(_finite_scale(fields, width, fmt))
    start = offset + fmt.super_scale_words(width)
    fraction, marked = payload.load_group_scales(start, 8), None
    if fmt.dither:
        some = tile.to_groups(fields >> 15)
        fraction, marked = fraction | some, fraction & some
    scale = _group_scale(super_scale, fraction.astype(jnp.int32) + 1, width, fmt)
    return tile.to_coordinates(scale), marked


def _finite_scale(fields, width: int, fmt: WireFormat):
    """A bf16 scale as f32: finite, and from 0 to the cap, except for `NAN_SCALE`."""
    cap = _bits_of(fmt.super_scale_cap(width))
    scale = floats_of(jnp.minimum((fields & as_word(0x7FFF)) << 16, as_word(cap)))
    return jnp.where(fields == as_word(NAN_SCALE), jnp.nan, scale) if fmt.carries_nan else scale


def _group_scale(super_scale, fraction, width: int, fmt: WireFormat):
    """super_scale * fraction / 256, rounded up to the width's significant bits."""
    scale = super_scale * (fraction.astype(jnp.float32) * (1.0 / 256))
    # Adding ones in all bits that are dropped rounds up.
    drop = (1 << (24 - fmt.scale_bits(width))) - 1
    if fmt.scale_bits(width) >= 16:
        return scale
    return floats_of((bits_of(scale) + as_word(drop)) & as_word(~drop))


def level_tables(fmt: WireFormat) -> jax.Array:
    """The "geometric" levels of all widths, one width after another: f32; else one zero."""
    tables = [fmt.level_table(w) for w in fmt.widths if 1 < w < 16]
    if fmt.levels != "geometric" or not tables:
        return jnp.zeros((1,), jnp.float32)
    return jnp.asarray(np.concatenate(tables), jnp.float32)


def _table_start(width: int, fmt: WireFormat) -> int:
    smaller = [w for w in fmt.widths if 1 < w < 16 and w < width]
    return sum(1 << (w - 1) for w in smaller)


def _decode_levels(level, width: int, tile: Tile):
    fmt = tile.fmt
    if fmt.levels == "geometric":
        return tile.levels(level.astype(jnp.int32) + _table_start(width, fmt))
    low, bits = _octaves(width, fmt)
    return floats_of((level << as_word(23 - bits)) + as_word(int(low.view(np.uint32)))) - low


def encode(values, noise, payload: Payload, offset, width: int, tile: Tile) -> None:
    """Encodes f32[quads, R, groups, QUAD] and stores the record at word ``offset``."""
    if width == 0:
        return
    fmt = tile.fmt
    if width == 16:
        # bf16 is the high half of f32: noise carries into it, and the sign is put back on top.
        own = bits_of(values)
        rounding = (noise ^ (as_word(0) - (own >> 31))) >> 16
        raw = jnp.minimum((own & as_word(0x7FFFFFFF)) + rounding, as_word(0x7F7FFFFF)) >> 16
        if fmt.carries_nan:
            raw = jnp.where(_is_finite(values), raw, as_word(0x7FFF))
        code = raw | (own >> 31 << 15)
    else:
        inverse, marked = _encode_scales(values, payload, offset, width, tile)
        if fmt.dither:
            code = _round_dithered(values, inverse, marked, noise, width, tile)
        else:
            code = _round(values * inverse, noise, width, tile)
    for plane in planes_of(width):
        fields = code >> as_word(plane_shift(width, plane))
        if plane < width:
            fields = fields & as_word((1 << plane) - 1)
        payload.store_plane(offset + fmt.plane_offset(width, plane), fields, plane)


def _encode_scales(values, payload: Payload, offset, width: int, tile: Tile):
    """Chooses and stores the scales; returns the reciprocals to encode with, for coordinates.

    The second result is 1 for marked groups and 0 for others, uint32, and `None` without dither.
    """
    fmt, magnitude = tile.fmt, _magnitude(values, tile.fmt)
    top = tile.group_max(magnitude)
    marked: Any = None
    some: Any = None
    if fmt.dither:
        least = tile.group_max(-magnitude)
        marked, some = _mark(least), _mark(tile.row_max(least))
    cap, wanted = fmt.super_scale_cap(width), top * _by_mark(marked, width, fmt, SCALE_SLACK)
    if fmt.group_scale == "bf16":
        scale = _bf16_up(wanted, cap)
        payload.store_group_scales(offset, _scale_field(scale, top, marked, fmt), 16)
        return tile.to_coordinates(_reciprocal(scale, tile)), marked
    row_top = tile.row_max(wanted)
    super_scale = _bf16_up(row_top, cap)
    payload.store_row_scales(offset, _scale_field(super_scale, row_top, some, fmt))
    fraction = top * tile.to_groups(_reciprocal(super_scale, tile))
    fraction = fraction * _by_mark(marked, width, fmt, 256 * SCALE_SLACK)
    fraction = tile.ceil(jnp.clip(fraction, 1.0, 256.0))
    field = (fraction - 1).astype(jnp.uint32)
    stored = field
    if some is not None:  # the low bit of the scale is 1; that of the field marks the group
        field = field | tile.to_groups(some)
        stored = field ^ (tile.to_groups(some) ^ marked)
        fraction = field.astype(jnp.int32) + 1
    payload.store_group_scales(offset + fmt.super_scale_words(width), stored, 8)
    scale = _group_scale(tile.to_groups(super_scale), fraction, width, fmt)
    return tile.to_coordinates(_reciprocal(scale, tile)), marked


def _mark(least):
    """1 where a magnitude counts as zero, else 0: uint32; ``least`` is minus the smallest one."""
    return (least > -SMALLEST_NORMAL).astype(jnp.int32).astype(jnp.uint32)


def _by_mark(marked, width: int, fmt: WireFormat, numerator: float):
    """``numerator`` over the largest level of a group, which depends on whether it is marked."""
    value = np.float32(numerator / fmt.level_top(width))
    if marked is None:
        return value
    other = np.float32(numerator / fmt.level_top(width, marked=True))
    return jnp.where(marked == as_word(1), other, value)


def _scale_field(scale, top, marked, fmt: WireFormat):
    """The bf16 field of a scale of values up to ``top``; uint32 ``marked``, if any, is its sign."""
    field = bits_of(scale) >> 16
    field = field if marked is None else field | (marked << 15)
    return jnp.where(_is_finite(top), field, as_word(NAN_SCALE)) if fmt.carries_nan else field


def _magnitude(values, fmt: WireFormat):
    """|values|, with infinity for NaN if the format carries NaN: a maximum may ignore NaN."""
    if not fmt.carries_nan:
        return jnp.abs(values)
    return floats_of(jnp.minimum(bits_of(values) & as_word(0x7FFFFFFF), as_word(0x7F800000)))


def _is_finite(x):
    return jnp.abs(x) <= float(np.finfo(np.float32).max)


def _bf16_up(x, cap: float):
    bits = jnp.minimum(bits_of(x), as_word(0x7F7F0000)) + as_word(0xFFFF)
    return jnp.minimum(floats_of(bits & as_word(0xFFFF0000)), cap)


def _reciprocal(x, tile: Tile):
    """1/x, correctly rounded; 0 where x is too small for a finite 1/x."""
    safe = x >= SMALLEST_NORMAL
    return jnp.where(safe, tile.inverse(jnp.where(safe, x, 1.0)), 0.0)


def _round(z, noise, width: int, tile: Tile):
    """The codes of values in units of levels, rounded by ``noise``, in a format without dither."""
    fmt = tile.fmt
    if width == 1:
        up = bits_of(jnp.clip(z, -1.0, 1.0) + 3.0) - as_word(_bits_of(2.0)) + (noise >> 9)
        return jnp.minimum(up >> 23, as_word(1))
    sign = bits_of(z) >> 31
    noise = noise ^ (as_word(0) - sign)
    last = as_word((1 << (width - 1)) - 1)
    if fmt.levels == "geometric":
        level = _round_to_table(jnp.abs(z), noise, width, tile)
    else:
        low, bits = _octaves(width, fmt)
        start = int(low.view(np.uint32)) >> (23 - bits)  # nothing is shifted out
        up = bits_of(tile.magnitude_plus(z, low)) + (noise >> as_word(9 + bits))
        level = (up >> as_word(23 - bits)) - as_word(start)
    return jnp.minimum(level, last) | (sign << as_word(width - 1))


def _round_dithered(values, inverse, marked, noise, width: int, tile: Tile):
    """The codes of values times their groups' ``inverse`` in a format with dither."""

    def with_zeros():
        if width == 1:
            level, marks = _dithered_code(values * inverse, None, noise, 1, tile), marked
            sent = _one_bit_or_zero(values * inverse, noise, tile)
            return jnp.where(tile.to_coordinates(marks) == as_word(1), sent, level)
        code = _dithered_code(values * inverse, marked, noise, width, tile)
        code = jnp.where(code == _zero_code(marked, width, tile), as_word(0), code)
        is_zero = jnp.abs(values) < SMALLEST_NORMAL  # in marked groups alone
        return jnp.where(is_zero, as_word((1 << width) - 1), code)

    # The products are in the branches, so that only one of both factors is in registers.
    return tile.if_any(
        marked, with_zeros, lambda: _dithered_code(values * inverse, None, noise, width, tile)
    )


def _dithered_code(z, marked, noise, width: int, tile: Tile):
    """Codes, of which ``~0`` is level 0 of a negative value in a marked group."""
    bits = tile.fmt.octave_bits(width)
    negative = _sign_mask(bits_of(z))
    first, low = _first_level(marked, width, tile)
    up = bits_of(tile.magnitude_plus(z, low)) + ((noise ^ negative) >> as_word(9 + bits))
    # All of it is unsigned: under Mosaic's lane semantics a bitcast of uint32 to int32 changes no
    # comparison. Below the first level of a positive value is that of a negative one: index -1.
    first = first >> as_word(23 - bits)  # nothing is shifted out
    level = jnp.minimum(up >> as_word(23 - bits), first + as_word((1 << (width - 1)) - 1)) - first
    return (level ^ negative) & as_word((1 << width) - 1)


def _one_bit_or_zero(z, noise, tile: Tile):
    """1 with probability |z| if the noise's top bit is the sign of z, else 0."""
    # [1, 2) has the bits of one exponent, to which the noise's other bits carry.
    up = bits_of(tile.magnitude_plus(z, np.float32(1))) + (noise << as_word(1) >> as_word(9))
    sent = (up >= as_word(_bits_of(2.0))).astype(jnp.int32).astype(jnp.uint32)
    return sent & ~((bits_of(z) ^ noise) >> 31)


def _round_to_table(z, noise, width: int, tile: Tile):
    """Binary search in the level table, then one random step up."""
    start, count = _table_start(width, tile.fmt), 1 << (width - 1)
    below = jnp.zeros(z.shape, jnp.int32)
    step = count // 2
    while step:
        candidate = below + step
        below = jnp.where(tile.levels(candidate + start) <= z, candidate, below)
        step //= 2
    below = jnp.minimum(below, max(count - 2, 0))
    lower = tile.levels(below + start)
    upper = tile.levels(below + (start + 1))
    scaled = (jnp.int32(0xFFFF) - (noise >> 16).astype(jnp.int32)).astype(jnp.float32)
    threshold = scaled * ((upper - lower) * 2**-16)
    return jnp.where(z - lower > threshold, below + 1, below).astype(jnp.uint32)
