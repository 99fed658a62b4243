"""The operations in plain jax.numpy: the reference of the GPU kernels and the CPU backend.

Super-groups beyond the end of ``x`` read as zeros and are not written. Tiles hold the coordinates
of a super-group group after group. See `pallas_kernels` for shapes, `pallas_kernels.format` for the
operands and the payload's layout, and `pallas_kernels.hashing` for ``noise`` rows.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.format import (
    DEALT,
    DITHER_BITS,
    ENERGY_LEVELS,
    MAX_WIDTH,
    NAN_SCALE,
    QUAD,
    SCALE_SLACK,
    SMALLEST_NORMAL,
    TILE_ROWS,
    Dealt,
    Input,
    Result,
    Source,
    Target,
    Upgrades,
    WireFormat,
    mean_of,
    octave_end,
    pack_tiles,
    padded_count,
    plane_shift,
    steps_below,
    unpack_tiles,
)
from pallas_kernels.hashing import Noise, noise_words


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


_INTEGERS = {
    "octave_bits": lambda fmt, w: fmt.octave_bits(w),
    "scale_bits": lambda fmt, w: fmt.scale_bits(w),
}
_FLOATS = {
    "cap": lambda fmt, w: fmt.super_scale_cap(w),
    "to_scale": lambda fmt, w: SCALE_SLACK / fmt.level_top(w),
    "to_scale, marked": lambda fmt, w: SCALE_SLACK / fmt.level_top(w, marked=True),
    "octave_start": lambda fmt, w: (
        ((1 << fmt.octave_bits(w)) + fmt.level_start(w)) * (2 if fmt.dither else 1)
    ),  # in half-steps
    "dither": lambda fmt, w: fmt.dither_amplitude(w) / 2 ** (DITHER_BITS + 1),
}


@functools.lru_cache(maxsize=64)
def _tables(fmt: WireFormat) -> tuple[np.ndarray, np.ndarray]:
    """Facts of each width, uint32[facts, 17] and f32[facts, 17]; 1 where a width has no scales.

    After `_INTEGERS` come the shift of every plane of the format, and the row of `_places`.
    """
    widths = range(MAX_WIDTH + 1)

    def table(facts):
        scaled = [w for w in fmt.widths if 0 < w < 16]
        return [[fact(fmt, w) if w in scaled else 1 for w in widths] for fact in facts.values()]

    own = [[plane_shift(w, p) if w in fmt.widths else 0 for w in widths] for p in fmt.planes]
    own.append([fmt.widths.index(w) if w in fmt.widths else 0 for w in widths])
    return np.array(table(_INTEGERS) + own, np.uint32), np.array(table(_FLOATS), np.float32)


def _sections(fmt: WireFormat) -> list[tuple[int, Callable[[int], int | None]]]:
    """The words of each part of a record, and where a width has it, if it does.

    First come scales: of super-groups, if the format has these, and of groups. Planes follow.
    """
    scaled = lambda w, at: at if 0 < w < 16 else None
    of_rows, of_groups = fmt.super_scale_words(1), fmt.group_scale_words(1)
    found = [(of_rows, partial(scaled, at=0))] if of_rows else []
    found.append((of_groups, partial(scaled, at=of_rows)))
    at = lambda w, plane: fmt.plane_offset(w, plane) if w & plane else None
    return found + [(fmt.plane_words(p), partial(at, plane=p)) for p in fmt.planes]


@functools.lru_cache(maxsize=64)
def _places(fmt: WireFormat) -> np.ndarray:
    """Where in a record of each width the words of all sections are; -1: not in this width."""

    def places(size: int, at: int | None) -> np.ndarray:
        return np.full(size, -1) if at is None else at + np.arange(size)

    parts = _sections(fmt)
    found = np.stack([np.concatenate([places(n, at(w)) for n, at in parts]) for w in fmt.widths])
    return found.astype(np.int16 if found.max() < 2**15 else np.int32)  # a part of each program


class _Records:
    """The records of a chunk's T tiles: where they are, and what their widths mean."""

    def __init__(self, tiles, fmt: WireFormat):
        self.offset, self.width = unpack_tiles(tiles)
        self.scaled = (self.width > 0) & (self.width < 16)
        self._integers, self._floats = (
            jnp.asarray(table).at[:, self.width].get(mode="promise_in_bounds")
            for table in _tables(fmt)
        )
        self._fmt = fmt

    def integer(self, name: str) -> Array:
        """uint32[T, 1, 1]: one of `_INTEGERS`."""
        return _per_tile(self._integers[list(_INTEGERS).index(name)])

    def float(self, name: str) -> Array:
        """f32[T, 1, 1]: one of `_FLOATS`."""
        return _per_tile(self._floats[list(_FLOATS).index(name)])

    def shift(self, plane: int) -> Array:
        """uint32[T, 1, 1]: the position of a plane's bits in a code."""
        return _per_tile(self._integers[len(_INTEGERS) + self._fmt.planes.index(plane)])

    def read(self, payload) -> list[Array]:
        """The words uint32[T, words] of each section, zero in tiles that have no such section."""
        place, used = self._places()
        # Tiles without a section read word 0, which exists.
        words = payload.at[jnp.where(used, place, 0)].get(mode="promise_in_bounds")
        sizes = [size for size, _ in _sections(self._fmt)]
        return jnp.split(jnp.where(used, words, 0), np.cumsum(sizes[:-1]), axis=1)

    def written(self, sections: list[Array], payload_words: int) -> Array:
        """A payload with these words uint32[T, words] of each section."""
        place, used = self._places()
        place = jnp.where(used, place, payload_words)  # beyond the end: dropped
        words, payload = jnp.concatenate(sections, axis=1), jnp.zeros((payload_words,), jnp.uint32)
        return payload.at[place].set(words, mode="drop", unique_indices=True)

    def _places(self) -> tuple[Array, Array]:
        """The words int32[T, words] of all sections in the payload, and whether tiles have them.

        XLA compiles each gather and each scatter for itself, so all sections share one.
        """
        table, row = jnp.asarray(_places(self._fmt)), self._integers[-1]
        place = table.at[row].get(mode="promise_in_bounds").astype(jnp.int32)
        return self.offset[:, None] + place, place >= 0


def _per_tile(x) -> Array:
    """Shapes [T] to broadcast to [T, R, S]."""
    return x.reshape(-1, 1, 1)


def _rows(x: Array, super_group_size: int) -> Array:
    pad = -x.shape[0] % super_group_size
    return jnp.pad(x, (0, pad)).reshape(-1, super_group_size)


def statistics(
    x: Float[Array, " d"], *, super_group_size: int
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """See `pallas_kernels.statistics`; a squared norm may overflow to infinity."""
    rows = _rows(x, super_group_size).astype(jnp.float32)
    mean = jnp.sum(rows * (1.0 / super_group_size), axis=1)
    return mean, jnp.sum(rows * rows, axis=1)


def deal(
    energy: Float[Array, "shards rows"],
    taken: Int[Array, "U F states"],
    upgrades: Upgrades,
    shape: tuple[int, int],
) -> Dealt:
    """See `pallas_kernels.deal`: a radix sort of the levels, which have 8 bits for one shard."""
    (shards, rows), (chunks, size) = energy.shape, shape
    per_shard = chunks * size // shards
    energy = jnp.pad(energy, ((0, 0), (0, per_shard - rows)))
    end = octave_end(energy)
    # One sort serves all shards: shard s has the keys 256 s to 256 s + 255.
    key = steps_below(energy, end) + ENERGY_LEVELS * jnp.arange(shards, dtype=jnp.int32)[:, None]
    key = key.astype(jnp.uint8 if shards == 1 else jnp.uint16 if shards <= 256 else jnp.uint32)
    index = jnp.arange(energy.size, dtype=jnp.int32)
    key, order = jax.lax.sort((key.reshape(-1), index), num_keys=1, is_stable=True)
    tiles = size // TILE_ROWS
    # The tiles t of a shard's chunks hold consecutive ranks, since ranks are dealt in turn.
    ranked = energy.reshape(-1)[order].reshape(shards * tiles, -1)
    count = ranked.shape[1]
    ranked = jnp.pad(ranked, ((0, 0), (0, padded_count(count) - count)))
    tile_energy = mean_of(ranked, count).reshape(shards, tiles)
    if shards > 1 and per_shard > rows:  # padding lies between shards: give it the last numbers
        shard, local = order // per_shard, order % per_shard
        spare = shards * rows + shard * (per_shard - rows) + local - rows
        order = jnp.where(local < rows, shard * rows + local, spare)
    # Rank q is at [position q div c, chunk q mod c] of its shard; chunks come first in the result.
    order = order.reshape(shards, size, chunks // shards).transpose(0, 2, 1).reshape(shape)
    members = key.reshape(shards, tiles, count).astype(jnp.int32) & (ENERGY_LEVELS - 1)
    # But for rounding, a mean lies between its members; the clip makes levels ascend.
    level = jnp.clip(steps_below(tile_energy, end), members[..., 0], members[..., -1])
    widths = widened(level, taken, upgrades, chunks)
    return Dealt(order, widths, tile_energy)


def widened(
    level: Int[Array, "shards T"], taken: Int[Array, "U F states"], upgrades: Upgrades, chunks: int
) -> tuple[Int[Array, "C T"], ...]:
    """The tiles of `pallas_kernels.deal`, whose levels ascend.

    The first tiles get an upgrade, up to some number. So only the number of tiles below each level
    depends on the data.

    A GPU spends time on each kernel, and the compiler on each operation. So F assignments of U
    upgrades are made together, and indices are flat, and in bounds.
    """
    words, wider, budgets = (np.array(x, np.int32) for x in upgrades[:3])
    states = taken.shape[2]
    # below[s, l, t]: tile t of shard s has a level under l. Levels ascend, so the sum over t is
    # where the tiles of level l begin.
    tile = jnp.arange(level.shape[1], dtype=jnp.int32)[None, None]
    below = level[:, None] < jnp.arange(ENERGY_LEVELS + 1, dtype=jnp.int32)[None, :, None]
    tiles_of = jnp.sum(below, axis=2, dtype=jnp.int32)  # the tiles below each level
    add_up = functools.partial(jnp.sum, axis=0, dtype=jnp.int32)  # over upgrades

    def of_shard(tiles_of):
        # Words beyond those that narrowest tiles take: [F, states], ascending.
        spent = add_up(_at(tiles_of, taken[..., :-1]) * words[..., None])
        state = jnp.maximum(jnp.sum(spent <= budgets[:, None], axis=1, dtype=jnp.int32) - 1, 0)
        # ``levels`` is [U, F * states]: budget i has its state at i * states + state[i].
        levels, at = taken.reshape(len(words), -1), state + np.arange(len(budgets)) * states
        now, then = _at(levels, at), _at(levels, at + 1)  # [U, F]
        upgraded = _at(tiles_of, now)
        left = jnp.maximum(budgets - add_up(upgraded * words), 0)
        # The rest pays for a part of the next upgrade.
        more = jax.lax.div(jnp.broadcast_to(left, words.shape), words)
        upgraded = (upgraded + jnp.where(then > now, more, 0))[..., None]
        # Tile t starts after t narrowest tiles and the words that upgrades add to tiles before t.
        offset = add_up(jnp.minimum(tile, upgraded) * words[..., None])
        width = add_up(jnp.where(tile < upgraded, wider[..., None], 0))
        return pack_tiles(tile[0] * upgrades.tile_words + offset, width + upgrades.narrowest)

    found = jnp.repeat(jax.vmap(of_shard)(tiles_of), chunks // level.shape[0], axis=0)
    return tuple(found[:, i] for i in range(len(budgets)))


def _at(x, index):
    """``x[..., index]`` for indices in bounds."""
    return x.at[..., index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _tile_rows(source: Source, chunk, fmt: WireFormat) -> Array:
    """``x - mean`` of the super-groups of ``chunk``: f32[T, R, S]."""
    order = source.order[chunk]
    rows = _rows(source.x, fmt.super_group_size)
    values = rows.at[order].get(mode="fill", fill_value=0).astype(jnp.float32)
    if source.mean is not None:
        values = values - source.mean[order][:, None]
    return _by_groups(values, fmt).reshape(-1, TILE_ROWS, fmt.super_group_size)


def _by_groups(rows, fmt: WireFormat) -> Array:
    """Super-groups [..., S] with the coordinates of a group next to each other."""
    # Coordinates are [fours of groups, quad of a group, group of the four, coordinate of a quad].
    quads = rows.reshape(*rows.shape[:-1], -1, fmt.group_size // QUAD, DEALT, QUAD)
    return jnp.swapaxes(quads, -3, -2).reshape(rows.shape)


def _in_order(rows, fmt: WireFormat) -> Array:
    """The inverse of `_by_groups`."""
    quads = rows.reshape(*rows.shape[:-1], -1, DEALT, fmt.group_size // QUAD, QUAD)
    return jnp.swapaxes(quads, -3, -2).reshape(rows.shape)


def _along_last(count: int, step: int, rank: int) -> np.ndarray:
    """0, step, 2 step, ... along the last of ``rank`` axes: uint32[1, ..., 1, count]."""
    return (np.arange(count, dtype=np.uint32) * np.uint32(step)).reshape((1,) * (rank - 1) + (-1,))


def _pack(fields, bits: int) -> Array:
    """Packs the fields [T, ...] of ``bits`` bits of a tile into words [T, words], low end first."""
    fields = fields.reshape(fields.shape[0], -1, 32 // bits)
    return jnp.sum(fields << _along_last(32 // bits, bits, 3), axis=-1, dtype=jnp.uint32)


def _unpack(words, bits: int) -> Array:
    """The inverse of `_pack`: [T, R, fields]."""
    fields = (words[..., None] >> _along_last(32 // bits, bits, 3)) & jnp.uint32((1 << bits) - 1)
    return fields.reshape(words.shape[0], TILE_ROWS, -1)


def _expand_groups(per_group, fmt: WireFormat) -> Array:
    return jnp.repeat(per_group, fmt.group_size, axis=-1)


@functools.partial(jax.jit, static_argnames="fmt")
def _decode_tiles(payload, tiles, noise, fmt: WireFormat) -> Array:
    """The decoded coordinates of every tile: f32[T, R, S]; with dither under ``noise`` words."""
    records = _Records(tiles, fmt)
    sections = records.read(payload)
    scale, marked = _decode_scales(sections, records, fmt)
    code = jnp.zeros((tiles.shape[0], TILE_ROWS, fmt.super_group_size), jnp.uint32)
    for plane, words in zip(reversed(fmt.planes), reversed(sections), strict=False):
        code = code | _unpack(words, plane) << records.shift(plane)
    w = _per_tile(records.width).astype(jnp.uint32)
    if fmt.dither:
        level = _decode_dithered(code, _expand_groups(marked, fmt), noise, records, fmt)
    else:
        level = _decode_plain(code, records, fmt)
    value = level * _expand_groups(scale, fmt)
    if 16 in fmt.widths:
        magnitude = code & 0x7FFF
        if not fmt.carries_nan:
            magnitude = jnp.minimum(magnitude, 0x7F7F)  # finite, whatever the bits
        value = jnp.where(w == 16, _float(magnitude << 16 | (code >> 15 & 1) << 31), value)
    return jnp.where(w > 0, value, 0.0)


def _sign_and_lower(records: _Records) -> tuple[Array, Array]:
    """The place of a code's sign bit, and a mask of the bits below it: uint32[T, 1, 1]."""
    w = _per_tile(records.width).astype(jnp.uint32)
    top_bit = jnp.where(w > 0, w - 1, 0)
    return top_bit, (jnp.uint32(1) << top_bit) - 1


def _decode_plain(code, records: _Records, fmt: WireFormat) -> Array:
    """Levels of codes without dither: the sign, and below it the level's index."""
    top_bit, lower = _sign_and_lower(records)
    sign = (code >> top_bit) & 1
    magnitude = _decode_levels(code & lower, 0, records, fmt)
    if 1 in fmt.widths:
        one = _per_tile(records.width) == 1
        magnitude, sign = jnp.where(one, 1.0, magnitude), jnp.where(one, 1 - sign, sign)
    return _float(_bits(magnitude) | sign << 31)


def _decode_dithered(code, marked, noise, records: _Records, fmt: WireFormat) -> Array:
    """Levels less their dither, in half-steps: the level's index, or its complement below zero.

    In a group that is ``marked``, all ones are the exact zero.
    """
    top_bit, lower = _sign_and_lower(records)
    sign = (code >> top_bit) & 1
    magnitude = _decode_levels((code ^ (0 - sign)) & lower, 1 - marked, records, fmt)
    level = _float(_bits(magnitude) | sign << 31) + _dither(noise, records)
    is_marked, ones = marked == 1, lower << 1 | 1
    if 1 in fmt.widths:
        one = is_marked & (_per_tile(records.width) == 1)
        sent = jnp.where(code == 1, _float(_bits(jnp.float32(2.0)) | noise >> 31 << 31), 0.0)
        return jnp.where(one, sent, jnp.where(is_marked & (code == ones), 0.0, level))
    return jnp.where(is_marked & (code == ones), 0.0, level)


def _dither(noise, records: _Records) -> Array:
    """The dither of levels, in half-steps: ``amplitude * (1/2 - u)`` for the known bits of u."""
    known = (noise >> (32 - DITHER_BITS)).astype(jnp.float32) * 2 + 1  # of 2^(DITHER_BITS + 1)
    return (2**DITHER_BITS - known) * records.float("dither")


def _decode_levels(index, first, records: _Records, fmt: WireFormat) -> Array:
    """Integer levels, as f32, of level indices [T, R, S]; ``first`` half-steps are below them."""
    if fmt.levels == "geometric":
        tables = [
            fmt.level_table(w) if w in fmt.widths and 1 < w < 16 else np.zeros(1)
            for w in range(MAX_WIDTH + 1)
        ]
        starts = np.cumsum([0] + [len(t) for t in tables[:-1]])
        flat = jnp.asarray(np.concatenate(tables), jnp.float32)
        at = _per_tile(jnp.asarray(starts, jnp.uint32)[records.width]) + index
        return flat[jnp.minimum(at, flat.shape[0] - 1)]
    low = records.float("octave_start")
    position = (index + first) << (23 - records.integer("octave_bits"))
    return _float(_bits(low) + position) - low - _as_float(first)


def _as_float(first) -> Any:
    return first.astype(jnp.float32) if isinstance(first, jax.Array) else first


def _decode_scales(
    sections: list[Array], records: _Records, fmt: WireFormat
) -> tuple[Array, Array]:
    """The group scales f32[T, R, groups] in records' sections, and the marks of these groups.

    A mark is 1 or 0, uint32; without dither it has no meaning.
    """
    cap = records.float("cap")
    if fmt.group_scale == "bf16":
        fields = _unpack(sections[0], 16)
        return _finite_scale(fields, cap, fmt), fields >> 15
    fields, fraction = _unpack(sections[0], 16), _unpack(sections[1], 8)
    some = fields >> 15 if fmt.dither else jnp.uint32(0)
    super_scale = _finite_scale(fields, cap, fmt)
    return _group_scale(super_scale, fraction | some, records), fraction & some


def _finite_scale(fields, cap, fmt: WireFormat) -> Array:
    """bf16 scales as f32: finite, and from 0 to ``cap``, except for `NAN_SCALE`."""
    scale = _float(jnp.minimum((fields & 0x7FFF) << 16, _bits(cap)))
    return jnp.where(fields == NAN_SCALE, jnp.nan, scale) if fmt.carries_nan else scale


def _scale_field(scale, top, marked, fmt: WireFormat) -> Array:
    """The bf16 fields of scales; ``top`` has the largest values that they scale.

    The sign is ``marked``, 1 or 0.
    """
    field = _bits(scale) >> 16 | marked << 15
    return jnp.where(jnp.isfinite(top), field, jnp.uint32(NAN_SCALE)) if fmt.carries_nan else field


def _group_scale(super_scale, fraction, records: _Records) -> Array:
    """super_scale * (fraction + 1) / 256, rounded up to the width's significant bits."""
    scale = super_scale * ((fraction + 1).astype(jnp.float32) * (1.0 / 256))
    drop = (jnp.uint32(1) << (24 - records.integer("scale_bits"))) - 1
    return _float((_bits(scale) + drop) & ~drop)


def _bf16_up(x, cap) -> Array:
    """Non-negative f32 rounded up to bf16 (as f32), at most ``cap`` (NaN becomes ``cap``)."""
    bits = (jnp.minimum(_bits(x), jnp.uint32(0x7F7F0000)) + 0xFFFF) & jnp.uint32(0xFFFF0000)
    return jnp.minimum(_float(bits), cap)


def _reciprocal(x) -> Array:
    """1/x; 0 where x is too small for a finite 1/x."""
    safe = x >= SMALLEST_NORMAL
    return jnp.where(safe, 1.0 / jnp.where(safe, x, 1.0), 0.0)


def _encode_scales(values, records: _Records, fmt: WireFormat):
    """Chooses the scales of ``values``.

    Returns (words of scales, reciprocals per group, marks per group); see `_decode_scales`.
    """
    cap = records.float("cap")
    magnitude = jnp.abs(values)
    if fmt.carries_nan:  # a maximum may leave NaN out
        magnitude = jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude)
    groups = magnitude.reshape(*values.shape[:2], fmt.groups, -1)
    top = jnp.max(groups, axis=-1)
    marked = jnp.any(groups < SMALLEST_NORMAL, axis=-1).astype(jnp.uint32) * int(fmt.dither)
    to_scale = jnp.where(marked == 1, records.float("to_scale, marked"), records.float("to_scale"))
    if fmt.group_scale == "bf16":
        scale = _bf16_up(top * to_scale, cap)
        return [_pack(_scale_field(scale, top, marked, fmt), 16)], _reciprocal(scale), marked
    row_top = jnp.max(top * to_scale, axis=-1, keepdims=True)
    super_scale, some = _bf16_up(row_top, cap), jnp.max(marked, axis=-1, keepdims=True)
    words = [_pack(_scale_field(super_scale, row_top, some, fmt), 16)]
    fraction = top * _reciprocal(super_scale) * (256 * to_scale)
    fraction = jnp.clip(jnp.ceil(fraction), 1, 256).astype(jnp.uint32) - 1
    fraction = fraction | some  # the low bit of the scale is 1; that of the field marks the group
    words.append(_pack(fraction ^ (some ^ marked), 8))
    return words, _reciprocal(_group_scale(super_scale, fraction, records)), marked


def _round_to_levels(z, noise, first, records: _Records, fmt: WireFormat) -> Array:
    """Level indices of ``z >= 0``, in units of levels, rounded at random so that E[z] is kept.

    Levels start ``first`` half-steps above zero. If that is 1, indices start at -1, which is the
    first negative level.
    """
    w = _per_tile(jnp.clip(records.width, 1, 15)).astype(jnp.uint32)
    last = (jnp.uint32(1) << (w - 1)) - 1
    if fmt.levels == "geometric":
        return jnp.minimum(_round_to_table(z, noise, records.width, fmt), last)
    # The bits of an f32 are linear between levels, whose step doubles where its exponent rises.
    low, p = records.float("octave_start"), records.integer("octave_bits")
    steps = _bits(z + (low + _as_float(first))) - _bits(low) + (noise >> (9 + p))
    return jnp.minimum(steps >> (23 - p), last + first) - first


def _round_to_table(z, noise, width, fmt: WireFormat) -> Array:
    result = jnp.zeros(z.shape, jnp.uint32)
    for w in fmt.widths:
        if 1 < w < 16:
            levels = jnp.asarray(fmt.level_table(w), jnp.float32)
            below = jnp.searchsorted(levels, z, side="right", method="scan_unrolled")
            below = jnp.clip(below - 1, 0, levels.shape[0] - 2)
            gap = levels[below + 1] - levels[below]
            # As if noise were added to a fraction: up where fraction + noise reaches 1.
            threshold = (jnp.uint32(0xFFFF) - (noise >> 16)).astype(jnp.float32) * (gap * 2**-16)
            up = z - levels[below] > threshold
            index = (below + up.astype(jnp.int32)).astype(jnp.uint32)
            result = jnp.where((width == w)[:, None, None], index, result)
    return result


@functools.partial(jax.jit, static_argnames=("payload_words", "fmt"))
def _encode_tiles(values, tiles, noise, payload_words: int, fmt: WireFormat) -> Array:
    """Payload of f32[T, R, S] values under noise words of the same shape."""
    records = _Records(tiles, fmt)
    sections, inverse, marked = _encode_scales(values, records, fmt)
    z = values * _expand_groups(inverse, fmt)
    marked = _expand_groups(marked, fmt)
    sign = _bits(z) >> 31
    mirrored = noise ^ (jnp.uint32(0) - sign)
    w = _per_tile(records.width).astype(jnp.uint32)
    first = 1 - marked if fmt.dither else 0
    index = _round_to_levels(jnp.abs(z), mirrored, first, records, fmt)
    code = index | sign << jnp.where(w > 0, w - 1, 0)
    if fmt.dither:
        ones = (jnp.uint32(1) << jnp.minimum(w, 15)) - 1
        code = (index ^ (0 - sign)) & ones
        code = jnp.where((marked == 1) & (index == 0), 0, code)
        code = jnp.where(jnp.abs(values) < SMALLEST_NORMAL, ones, code)
    if 1 in fmt.widths and fmt.dither:
        up = _bits(jnp.abs(z) + 1.0) + (noise << 1 >> 9) >= _bits(jnp.float32(2.0))
        sent = (up & (sign == noise >> 31)).astype(jnp.uint32)
        code = jnp.where((marked == 1) & (w == 1), sent, code)
    elif 1 in fmt.widths:
        # -1 and +1 lie at both ends of [2, 4), where f32 bits are linear.
        up = _bits(jnp.clip(z, -1.0, 1.0) + 3.0) - _bits(jnp.float32(2.0)) + (noise >> 9)
        code = jnp.where(w == 1, jnp.minimum(up >> 23, 1), code)
    if 16 in fmt.widths:
        own = _bits(values)
        rounding = (noise ^ (jnp.uint32(0) - (own >> 31))) >> 16
        raw = jnp.minimum((own & 0x7FFFFFFF) + rounding, jnp.uint32(0x7F7FFFFF)) >> 16
        if fmt.carries_nan:
            raw = jnp.where(jnp.isfinite(values), raw, jnp.uint32(0x7FFF))
        code = jnp.where(w == 16, raw | own >> 31 << 15, code)
    sections += _pack_planes(code, records, fmt)
    return records.written(sections, payload_words)


def _pack_planes(code, records: _Records, fmt: WireFormat) -> list[Array]:
    """The words uint32[T, words] of each plane of the codes [T, R, S]."""
    if not fmt.planes:  # no coordinate has a bit
        return []
    # A single reduction, over quads: XLA's CPU compiler computes the codes in each that takes them.
    code, lane = code.reshape(code.shape[0], -1, QUAD), _along_last(QUAD, 1, 3)
    parts, words_of = [], [-(-plane * QUAD // 32) for plane in fmt.planes]
    for plane, words in zip(fmt.planes, words_of, strict=True):
        fields = (code >> records.shift(plane)) & np.uint32((1 << plane) - 1)
        word, place = np.divmod(lane, QUAD // words)
        shifted = fields << (place * plane)
        parts += [jnp.where(word == i, shifted, np.uint32(0)) for i in range(words)]
    add = lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True))
    found = iter(jax.lax.reduce(tuple(parts), (np.uint32(0),) * len(parts), add, (2,)))
    return [
        _pack(jnp.stack([next(found) for _ in range(words)], axis=-1), plane * QUAD // words)
        for plane, words in zip(fmt.planes, words_of, strict=True)
    ]


def _tile_noise(order, noise_row, fmt: WireFormat) -> Array:
    """Noise words of the super-groups ``order[m]``: uint32[T, R, S]."""
    # Quads are numbered through all super-groups; coordinate c of one rotates the hash by 8 c bits.
    quads = fmt.super_group_size // 4
    counter = order.astype(jnp.uint32)[:, None, None] * quads
    counter = counter + jnp.arange(quads, dtype=jnp.uint32)[None, :, None]
    words = noise_words(counter, _along_last(4, 8, 3), Noise(*noise_row), fmt.rounding)
    return words.reshape(-1, TILE_ROWS, fmt.super_group_size)


def _decoding_noise(order, noise, k, fmt: WireFormat) -> Array | None:
    """The noise words that decode the k-th payload."""
    return _tile_noise(order, noise[k], fmt) if fmt.dither else None


def compress(source: Source, chunks, target: Target, skip=None, *, fmt: WireFormat) -> Array:
    """See `pallas_kernels.compress`; the payload ``skip`` may be anything, and is encoded, too."""
    return decompress_accumulate_recompress((), source, chunks, target, fmt=fmt)


def _sum_of_chunk(inputs: tuple[Input, ...], source: Source, chunk, i, fmt: WireFormat) -> Array:
    """f32[T, R, S]: ``x - mean`` on ``chunk`` plus the i-th payloads of all inputs."""
    total = _tile_rows(source, chunk, fmt)
    for payloads, tiles, skip, noise in inputs:

        def add(k, total, payloads=payloads, tiles=tiles, skip=skip, noise=noise):
            words = _decoding_noise(source.order[chunk], noise, k, fmt)
            added = total + _decode_tiles(payloads[k, i], tiles[chunk], words, fmt)
            return added if skip is None else jnp.where(skip == k, total, added)

        several = payloads.shape[0] > 1
        total = jax.lax.fori_loop(0, payloads.shape[0], add, total) if several else add(0, total)
    return total


def _map_chunks(function, chunks) -> Array:
    """``function(chunk, i)`` stacked over ``chunks[i]``."""
    if chunks.shape[0] == 1:
        return function(chunks[0], 0)[None]
    index = jnp.arange(chunks.shape[0])
    return jax.lax.map(lambda pair: function(*pair), (chunks, index))


def decompress_accumulate_recompress(
    inputs: tuple[Input, ...], source: Source, chunks, target: Target, *, fmt: WireFormat
) -> Array:
    """See `pallas_kernels.decompress_accumulate_recompress`."""

    def one(chunk, i):
        total = _sum_of_chunk(inputs, source, chunk, i, fmt)
        words = _tile_noise(source.order[chunk], target.noise, fmt)
        return _encode_tiles(total, target.tiles[chunk], words, target.payload_words, fmt)

    return _map_chunks(one, chunks)


def decompress_accumulate(
    inputs: tuple[Input, ...], source: Source, chunks, result: Result, *, fmt: WireFormat
) -> Array:
    """See `pallas_kernels.decompress_accumulate`."""
    values = _map_chunks(lambda chunk, i: _sum_of_chunk(inputs, source, chunk, i, fmt), chunks)
    return _place(values, source.order[chunks].reshape(-1), result, fmt)


def decompress(payloads, tiles, chunks, result: Result, noise=None, *, fmt: WireFormat) -> Array:
    """See `pallas_kernels.decompress`."""

    def one(chunk, i):
        words = _decoding_noise(result.order[chunk], noise, i, fmt)
        return _decode_tiles(payloads[i], tiles[chunk], words, fmt)

    return _place(_map_chunks(one, chunks), result.order[chunks].reshape(-1), result, fmt)


def _place(values, super_groups, result: Result, fmt: WireFormat) -> Array:
    """Writes finished ``super_groups`` to their rows, if the result has them."""
    rows = result.rows
    values = _in_order(values.reshape(-1, fmt.super_group_size), fmt)
    values = values + result.mean_sum[super_groups][:, None]
    if result.divisor != 1:
        values = values * (1.0 / result.divisor)
    at = super_groups if result.start is None else super_groups - result.start
    # The others get distinct numbers beyond the end (``unique_indices``), which are dropped.
    at = jnp.where((at >= 0) & (at < rows), at, rows + jnp.arange(at.shape[0]))
    shape = rows, fmt.super_group_size
    out = jnp.zeros(shape, result.dtype) if result.into is None else result.into
    return out.at[at].set(values.astype(result.dtype), mode="drop", unique_indices=True)
