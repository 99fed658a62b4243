"""The five operations in plain jax.numpy: the reference of the GPU kernels and the CPU backend.

Shapes: d coordinates in M = C * m super-groups of S coordinates; chunk c owns the super-groups
``order[c]`` (m of them, T = m / TILE_ROWS tiles); payloads have P words. Super-groups beyond the
end of ``x`` read as zeros and are not written. Tiles hold the coordinates of a super-group group
after group. See `pallas_kernels.format` for the operands and the
payload's layout, and `pallas_kernels.hashing` for ``noise`` rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.format import (
    DEALT,
    DITHER_BITS,
    MAX_WIDTH,
    QUAD,
    SCALE_SLACK,
    TILE_ROWS,
    Input,
    Result,
    Source,
    Target,
    WireFormat,
    plane_shift,
    unpack_tiles,
)
from pallas_kernels.hashing import Noise, noise_words

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def _per_width(function, fmt: WireFormat, dtype) -> jax.Array:
    """A table over widths 0..16 of ``function(width)``; 0 for widths not in the format."""
    values = [function(w) if w in fmt.widths else 0 for w in range(MAX_WIDTH + 1)]
    return jnp.asarray(np.array(values), dtype)


def _rows(x: Array, super_group_size: int) -> Array:
    pad = -x.shape[0] % super_group_size
    return jnp.pad(x, (0, pad)).reshape(-1, super_group_size)


def statistics(
    x: Float[Array, " d"], *, super_group_size: int
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Mean and squared norm of each super-group, f32 (the last one padded with zeros).

    The mean is finite exactly if all coordinates are; the squared norm may overflow to infinity.
    """
    rows = _rows(x, super_group_size).astype(jnp.float32)
    mean = jnp.sum(rows * (1.0 / super_group_size), axis=1)
    return mean, jnp.sum(rows * rows, axis=1)


def _tile_rows(source: Source, chunk, fmt: WireFormat) -> Array:
    """``x - mean`` of the super-groups of ``chunk``: f32[T, R, S]."""
    order = source.order[chunk]
    rows = _rows(source.x, fmt.super_group_size)
    values = rows.at[order].get(mode="fill", fill_value=0).astype(jnp.float32)
    if source.mean is not None:
        values = values - source.mean[order][:, None]
    return _by_groups(values, fmt).reshape(-1, TILE_ROWS, fmt.super_group_size)


def _by_groups(rows, fmt: WireFormat) -> Array:
    """Super-groups [..., S] with the coordinates of a group behind each other."""
    quads = rows.reshape(*rows.shape[:-1], -1, fmt.group_size // QUAD, DEALT, QUAD)
    return jnp.swapaxes(quads, -3, -2).reshape(rows.shape)


def _in_order(rows, fmt: WireFormat) -> Array:
    """The inverse of `_by_groups`."""
    quads = rows.reshape(*rows.shape[:-1], -1, DEALT, fmt.group_size // QUAD, QUAD)
    return jnp.swapaxes(quads, -3, -2).reshape(rows.shape)


def _gather_words(payload, offset, used, shape) -> Array:
    """Words ``offset[t] ..`` of the payload as uint32[T, *shape], zero where not ``used``."""
    index = offset[:, None] + jnp.arange(int(np.prod(shape)))
    index = jnp.where(used[:, None], index, payload.shape[0])
    words = payload.at[index].get(mode="fill", fill_value=0)
    return words.reshape(-1, *shape)


def _scatter_words(payload, words, offset, used) -> Array:
    """Writes uint32[T, ...] to ``payload[offset[t] ..]`` where ``used``."""
    words = words.reshape(words.shape[0], -1)
    index = offset[:, None] + jnp.arange(words.shape[1])
    index = jnp.where(used[:, None], index, payload.shape[0])
    return payload.at[index].set(words, mode="drop", unique_indices=True)


def _pack(fields, bits: int) -> Array:
    """Packs fields of ``bits`` bits along the last axis into uint32 words, low end first."""
    per_word = 32 // bits
    fields = fields.reshape(*fields.shape[:-1], -1, per_word)
    shifts = jnp.arange(per_word, dtype=jnp.uint32) * bits
    return jnp.sum(fields << shifts, axis=-1, dtype=jnp.uint32)


def _unpack(words, bits: int) -> Array:
    """The inverse of `_pack`."""
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32) * bits
    fields = (words[..., None] >> shifts) & jnp.uint32((1 << bits) - 1)
    return fields.reshape(*words.shape[:-1], -1)


def _expand_groups(per_group, fmt: WireFormat) -> Array:
    return jnp.repeat(per_group, fmt.group_size, axis=-1)


def _decode_tiles(payload, tiles, noise, fmt: WireFormat) -> Array:
    """The decoded coordinates of every tile: f32[T, R, S]; with dither under ``noise`` words."""
    offset, width = unpack_tiles(tiles)
    scaled = (width > 0) & (width < 16)
    scale = _decode_scales(payload, offset, width, scaled, fmt)
    code = jnp.zeros((tiles.shape[0], TILE_ROWS, fmt.super_group_size), jnp.uint32)
    for plane in fmt.planes:
        start = _per_width(lambda w, p=plane: fmt.plane_offset(w, p), fmt, jnp.int32)[width]
        shift = _per_width(lambda w, p=plane: plane_shift(w, p), fmt, jnp.uint32)[width]
        used = (width & plane) > 0
        shape = (TILE_ROWS, fmt.plane_words(plane) // TILE_ROWS)
        words = _gather_words(payload, offset + start, used, shape)
        code = code | _unpack(words, plane) << shift[:, None, None]
    w = width[:, None, None].astype(jnp.uint32)
    sign = (code >> jnp.where(w > 0, w - 1, 0)) & 1
    lower = (jnp.uint32(1) << jnp.where(w > 0, w - 1, 0)) - 1
    index = (code ^ (0 - sign if fmt.dither else 0)) & lower
    magnitude = _decode_levels(index, width, fmt)
    if 1 in fmt.widths and not fmt.dither:
        one = w == 1
        magnitude, sign = jnp.where(one, 1.0, magnitude), jnp.where(one, 1 - sign, sign)
    level = _float(_bits(magnitude) | sign << 31)
    if fmt.dither:
        level = level + _dither(noise, width, fmt)
    value = level * _expand_groups(scale, fmt)
    if 16 in fmt.widths:
        magnitude = jnp.minimum(code & 0x7FFF, 0x7F7F)  # finite, whatever the bits
        value = jnp.where(w == 16, _float(magnitude << 16 | (code >> 15 & 1) << 31), value)
    return jnp.where(w > 0, value, 0.0)


def _dither(noise, width, fmt: WireFormat) -> Array:
    """What is added to levels, in half-steps: ``amplitude * (1/2 - u)`` for what is known of u."""
    known = (noise >> (32 - DITHER_BITS)).astype(jnp.float32) * 2 + 1  # of 2^(DITHER_BITS + 1)
    unit = _per_width(lambda w: fmt.dither_amplitude(w) / 2 ** (DITHER_BITS + 1), fmt, jnp.float32)
    return (2**DITHER_BITS - known) * unit[width][:, None, None]


def _decode_levels(index, width, fmt: WireFormat) -> Array:
    """Integer levels, as f32, of level indices [T, R, S]."""
    if fmt.levels == "geometric":
        tables = [
            fmt.level_table(w) if w in fmt.widths and 1 < w < 16 else np.zeros(1)
            for w in range(MAX_WIDTH + 1)
        ]
        starts = np.cumsum([0] + [len(t) for t in tables[:-1]])
        flat = jnp.asarray(np.concatenate(tables), jnp.float32)
        at = jnp.asarray(starts, jnp.uint32)[width][:, None, None] + index
        return flat[jnp.minimum(at, flat.shape[0] - 1)]
    low, first = _octave_start(width, fmt), int(fmt.dither)
    position = (index + first) << (23 - _octave_bits(width, fmt))
    return _float(_bits(low) + position) - low - first


def _octave_start(width, fmt: WireFormat) -> Array:
    def start(w):
        first = (1 << fmt.octave_bits(w)) + fmt.level_start(w) if 0 < w < 16 else 1
        return 2 * first if fmt.dither else first  # in half-steps

    return _per_width(start, fmt, jnp.float32)[width][:, None, None]


def _octave_bits(width, fmt: WireFormat) -> Array:
    def bits(w):
        return fmt.octave_bits(w) if 0 < w < 16 else 0

    return _per_width(bits, fmt, jnp.uint32)[width][:, None, None]


def _scaled_width(function, fmt: WireFormat):
    """``function`` on the widths that have scales, 1 on the others."""
    return _per_width(lambda w: function(w) if 0 < w < 16 else 1, fmt, jnp.float32)


def _decode_scales(payload, offset, width, scaled, fmt: WireFormat) -> Array:
    """The group scales f32[T, R, groups] that a payload's records hold."""
    cap = _scaled_width(fmt.super_scale_cap, fmt)[width][:, None, None]
    if fmt.group_scale == "bf16":
        words = _gather_words(payload, offset, scaled, (TILE_ROWS, fmt.groups // 2))
        return _finite_scale(_unpack(words, 16), cap)
    words = _gather_words(payload, offset, scaled, (TILE_ROWS // 2,))
    super_scale = _finite_scale(_unpack(words, 16)[..., None], cap)
    words = _gather_words(payload, offset + TILE_ROWS // 2, scaled, (TILE_ROWS, fmt.groups // 4))
    return _group_scale(super_scale, _unpack(words, 8), width, fmt)


def _finite_scale(fields, cap) -> Array:
    """bf16 scales as f32: whatever the bits, not negative, finite and at most ``cap``."""
    return _float(jnp.minimum((fields & 0x7FFF) << 16, _bits(cap)))


def _group_scale(super_scale, fraction, width, fmt: WireFormat) -> Array:
    """super_scale * (fraction + 1) / 256, rounded up to the width's significant bits."""
    scale = super_scale * ((fraction + 1).astype(jnp.float32) * (1.0 / 256))
    keep = _per_width(lambda w: fmt.scale_bits(w) if 0 < w < 16 else 16, fmt, jnp.uint32)
    drop = (jnp.uint32(1) << (24 - keep[width][:, None, None])) - 1
    return _float((_bits(scale) + drop) & ~drop)


def _bf16_up(x, cap) -> Array:
    """Non-negative f32 rounded up to bf16 (as f32), at most ``cap`` (NaN becomes ``cap``)."""
    bits = (jnp.minimum(_bits(x), jnp.uint32(0x7F7F0000)) + 0xFFFF) & jnp.uint32(0xFFFF0000)
    return jnp.minimum(_float(bits), cap)


def _reciprocal(x) -> Array:
    """1/x; 0 where x is too small for that to be finite."""
    safe = x >= _SMALLEST_NORMAL
    return jnp.where(safe, 1.0 / jnp.where(safe, x, 1.0), 0.0)


def _encode_scales(payload, values, offset, width, scaled, fmt: WireFormat):
    """Chooses and writes the scales of ``values``; returns (payload, reciprocals per group)."""
    top = jnp.max(jnp.abs(values.reshape(*values.shape[:2], fmt.groups, -1)), axis=-1)
    cap = _scaled_width(fmt.super_scale_cap, fmt)[width][:, None, None]
    to_scale = _scaled_width(lambda w: SCALE_SLACK / fmt.level_top(w), fmt)[width][:, None, None]
    if fmt.group_scale == "bf16":
        scale = _bf16_up(top * to_scale, cap)
        words = _pack(_bits(scale) >> 16, 16)
        return _scatter_words(payload, words, offset, scaled), _reciprocal(scale)
    super_scale = _bf16_up(jnp.max(top, axis=-1, keepdims=True) * to_scale, cap)
    words = _pack(_bits(super_scale[..., 0]) >> 16, 16)
    payload = _scatter_words(payload, words, offset, scaled)
    to_fraction = _scaled_width(lambda w: 256 * SCALE_SLACK / fmt.level_top(w), fmt)
    fraction = top * _reciprocal(super_scale) * to_fraction[width][:, None, None]
    fraction = jnp.clip(jnp.ceil(fraction), 1, 256).astype(jnp.uint32) - 1
    words = _pack(fraction, 8)
    payload = _scatter_words(payload, words, offset + TILE_ROWS // 2, scaled)
    return payload, _reciprocal(_group_scale(super_scale, fraction, width, fmt))


def _round_to_levels(z, noise, width, fmt: WireFormat) -> Array:
    """Level indices of ``z >= 0`` in units of levels, up with the probability that keeps E[z].

    With dither they start at -1, that of the first negative level.
    """
    w = jnp.clip(width, 1, 15).astype(jnp.uint32)[:, None, None]
    last = (jnp.uint32(1) << (w - 1)) - 1
    if fmt.levels == "geometric":
        return jnp.minimum(_round_to_table(z, noise, width, fmt), last)
    # The bits of an f32 are linear between levels, whose step doubles where its exponent rises.
    low, first = _octave_start(width, fmt), int(fmt.dither)
    p = _octave_bits(width, fmt)
    steps = _bits(z + (low + first)) - _bits(low) + (noise >> (9 + p))
    return jnp.minimum(steps >> (23 - p), last + first) - first


def _round_to_table(z, noise, width, fmt: WireFormat) -> Array:
    result = jnp.zeros(z.shape, jnp.uint32)
    for w in fmt.widths:
        if 1 < w < 16:
            levels = jnp.asarray(fmt.level_table(w), jnp.float32)
            below = jnp.searchsorted(levels, z, side="right", method="scan_unrolled")
            below = jnp.clip(below - 1, 0, levels.shape[0] - 2)
            gap = levels[below + 1] - levels[below]
            # Same sense as adding noise to a fraction: up where fraction + noise reaches 1.
            threshold = (jnp.uint32(0xFFFF) - (noise >> 16)).astype(jnp.float32) * (gap * 2**-16)
            up = z - levels[below] > threshold
            index = (below + up).astype(jnp.uint32)
            result = jnp.where((width == w)[:, None, None], index, result)
    return result


def _encode_tiles(values, tiles, noise, payload_words: int, fmt: WireFormat) -> Array:
    """Payload of f32[T, R, S] values under noise words of the same shape."""
    offset, width = unpack_tiles(tiles)
    scaled = (width > 0) & (width < 16)
    payload = jnp.zeros((payload_words,), jnp.uint32)
    payload, inverse = _encode_scales(payload, values, offset, width, scaled, fmt)
    z = values * _expand_groups(inverse, fmt)
    sign = _bits(z) >> 31
    mirrored = noise ^ (jnp.uint32(0) - sign)
    w = width[:, None, None].astype(jnp.uint32)
    index = _round_to_levels(jnp.abs(z), mirrored, width, fmt)
    code = index | sign << jnp.where(w > 0, w - 1, 0)
    if fmt.dither:
        code = (index ^ (0 - sign)) & ((jnp.uint32(1) << jnp.minimum(w, 15)) - 1)
    if 1 in fmt.widths and not fmt.dither:
        # -1 and +1 lie at both ends of [2, 4), where f32 bits are linear.
        up = _bits(jnp.clip(z, -1.0, 1.0) + 3.0) - _bits(jnp.float32(2.0)) + (noise >> 9)
        code = jnp.where(w == 1, jnp.minimum(up >> 23, 1), code)
    if 16 in fmt.widths:
        own = _bits(values)
        rounding = (noise ^ (jnp.uint32(0) - (own >> 31))) >> 16
        raw = jnp.minimum((own & 0x7FFFFFFF) + rounding, jnp.uint32(0x7F7FFFFF)) >> 16
        code = jnp.where(w == 16, raw | own >> 31 << 15, code)
    for plane in fmt.planes:
        start = _per_width(lambda w, p=plane: fmt.plane_offset(w, p), fmt, jnp.int32)[width]
        shift = _per_width(lambda w, p=plane: plane_shift(w, p), fmt, jnp.uint32)[width]
        fields = (code >> shift[:, None, None]) & jnp.uint32((1 << plane) - 1)
        words = _pack(fields, plane)
        payload = _scatter_words(payload, words, offset + start, (width & plane) > 0)
    return payload


def _tile_noise(order, noise_row, fmt: WireFormat) -> Array:
    """Noise words of the super-groups ``order[m]``: uint32[T, R, S]."""
    quads = fmt.super_group_size // 4
    counter = order.astype(jnp.uint32)[:, None, None] * quads
    counter = counter + jnp.arange(quads, dtype=jnp.uint32)[:, None]
    rotation = jnp.arange(4, dtype=jnp.uint32) * 8
    words = noise_words(counter, rotation, Noise(*noise_row), fmt.rounding)
    return words.reshape(-1, TILE_ROWS, fmt.super_group_size)


def _decoding_noise(order, noise, k, fmt: WireFormat) -> Array | None:
    """The words that decoding the k-th payload repeats."""
    return _tile_noise(order, noise[k], fmt) if fmt.dither else None


def compress(source: Source, chunks, target: Target, skip=None, *, fmt: WireFormat) -> Array:
    """See `pallas_kernels.compress`; what ``skip`` leaves unspecified is encoded as well."""
    return decompress_accumulate_recompress((), source, chunks, target, fmt=fmt)


def _sum_of_chunk(inputs: tuple[Input, ...], source: Source, chunk, i, fmt: WireFormat) -> Array:
    """f32[T, R, S]: ``x - mean`` on ``chunk`` plus what all inputs hold for it, as their i-th."""
    total = _tile_rows(source, chunk, fmt)
    for payloads, tiles, skip, noise in inputs:
        for k in range(payloads.shape[0]):
            words = _decoding_noise(source.order[chunk], noise, k, fmt)
            added = total + _decode_tiles(payloads[k, i], tiles[chunk], words, fmt)
            total = added if skip is None else jnp.where(skip == k, total, added)
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
    """Finished ``super_groups``, written to those rows of the result that exist."""
    rows = result.rows
    values = _in_order(values.reshape(-1, fmt.super_group_size), fmt)
    values = values + result.mean_sum[super_groups][:, None]
    if result.divisor != 1:
        values = values * (1.0 / result.divisor)
    at = super_groups if result.start is None else super_groups - result.start
    at = jnp.where((at >= 0) & (at < rows), at, rows + jnp.arange(at.shape[0]))
    shape = rows, fmt.super_group_size
    out = jnp.zeros(shape, result.dtype) if result.into is None else result.into
    return out.at[at].set(values.astype(result.dtype), mode="drop", unique_indices=True)


__all__ = [
    "compress",
    "decompress",
    "decompress_accumulate",
    "decompress_accumulate_recompress",
    "statistics",
]
