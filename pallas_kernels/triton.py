"""The five operations as Pallas kernels, lowered through Triton, for NVIDIA GPUs.

One program handles one tile: `TILE_ROWS` super-groups gathered through ``order``, held as f32
[R, groups, group_size] in registers from the first load to the last store. The tile's width is
read at run time and selects a branch compiled for that width, in which every shift, mask and
level constant is static. The arithmetic is that of `pallas_kernels.reference`, operation by
operation where rounding could differ: no product of inexact operands meets an addition, so that
FMA contraction cannot change a bit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._compat import shape_struct
from pallas_kernels.format import SCALE_SLACK, TILE_ROWS, Input, WireFormat, plane_shift, planes_of
from pallas_kernels.hashing import NOISE_WORDS, Noise, noise_words
from pallas_kernels.tuning import tuning_for

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class _Tile(NamedTuple):
    """What a kernel body needs to know of its tile; all static but the arrays."""

    fmt: WireFormat
    interpret: bool
    table_ref: Any  # level tables of "geometric" levels

    @property
    def shape(self) -> tuple[int, int, int]:
        return TILE_ROWS, self.fmt.groups, self.fmt.group_size


def _u32(x) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _f32(bits) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _as_word(value: int):
    return jnp.uint32(value & 0xFFFFFFFF)


def _reciprocal(x, interpret: bool):
    """1/x correctly rounded; 0 where x is too small for that to be finite."""
    safe = x >= _SMALLEST_NORMAL
    x = jnp.where(safe, x, 1.0)
    if interpret:
        inverse = 1.0 / x
    else:
        (inverse,) = plgpu.elementwise_inline_asm(
            "rcp.rn.ftz.f32 $0, $1;",
            args=[x],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
    return jnp.where(safe, inverse, 0.0)


def _by_width(width, widths: tuple[int, ...], branch, *operands):
    """``branch(w)(*operands)`` for the ``w`` in ``widths`` that ``width`` equals."""
    if len(widths) == 1:
        return branch(widths[0])(*operands)
    return lax.cond(
        width == widths[0],
        branch(widths[0]),
        lambda *rest: _by_width(width, widths[1:], branch, *rest),
        *operands,
    )


def _words_at(offset, rows: int, per_row: int):
    """Word indices [rows, per_row] of a section that starts at ``offset``."""
    row = lax.broadcasted_iota(jnp.int32, (rows, per_row), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, per_row), 1)
    return offset + row * per_row + column


def _shifts(shape: tuple[int, ...], bits: int):
    """0, bits, 2*bits, ... along the last axis."""
    return lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * _as_word(bits)


def _store_packed(out_ref, index, offset, fields, bits: int):
    """Packs fields [R, k] of ``bits`` bits to words and stores them at ``out_ref[*index]``."""
    rows, count = fields.shape
    per_word = 32 // bits
    fields = fields.reshape(rows, count // per_word, per_word)
    words = jnp.sum(fields << _shifts(fields.shape, bits), axis=2, dtype=jnp.uint32)
    plgpu.store(out_ref.at[(*index, _words_at(offset, *words.shape))], words)


def _load_fields(ref, index, offset, rows: int, count: int, bits: int):
    """Fields [rows, count] of ``bits`` bits; for the few values that scales are."""
    row = lax.broadcasted_iota(jnp.int32, (rows, count), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, count), 1)
    at = row * count + column
    words = plgpu.load(ref.at[(*index, offset + at // (32 // bits))])
    shift = (at % (32 // bits) * bits).astype(jnp.uint32)
    return (words >> shift) & _as_word((1 << bits) - 1)


def _decode_scales(ref, index, offset, width: int, tile: _Tile):
    """Group scales f32[R, groups, 1] of a record."""
    fmt = tile.fmt
    if fmt.group_scale == "bf16":
        fields = _load_fields(ref, index, offset, TILE_ROWS, fmt.groups, 16)
        return _finite_scale(fields, width, fmt)[:, :, None]
    fields = _load_fields(ref, index, offset, TILE_ROWS, 1, 16)
    super_scale = _finite_scale(fields, width, fmt)
    start = offset + fmt.super_scale_words(width)
    fraction = _load_fields(ref, index, start, TILE_ROWS, fmt.groups, 8)
    return _group_scale(super_scale, fraction.astype(jnp.int32) + 1, width, fmt)[:, :, None]


def _finite_scale(fields, width: int, fmt: WireFormat):
    """A bf16 scale as f32: whatever the bits, not negative, finite and at most the cap."""
    cap = int(np.float32(fmt.super_scale_cap(width)).view(np.uint32))
    return _f32(jnp.minimum((fields & _as_word(0x7FFF)) << 16, _as_word(cap)))


def _group_scale(super_scale, fraction, width: int, fmt: WireFormat):
    """super_scale * fraction / 256, rounded up to the width's significant bits."""
    scale = super_scale * (fraction.astype(jnp.float32) * (1.0 / 256))
    drop = (1 << (24 - fmt.scale_bits(width))) - 1
    if fmt.scale_bits(width) >= 16:
        return scale
    return _f32((_u32(scale) + _as_word(drop)) & _as_word(~drop))


def _decode(ref, index, offset, width: int, tile: _Tile):
    """The decoded coordinates f32[R, groups, group_size] of a record of static ``width``."""
    fmt, shape = tile.fmt, tile.shape
    if width == 0:
        return jnp.zeros(shape, jnp.float32)
    code = jnp.uint32(0)
    for plane in planes_of(width):
        per_row = fmt.super_group_size * plane // 32
        at = _words_at(offset + fmt.plane_offset(width, plane), TILE_ROWS, per_row)
        words = plgpu.load(ref.at[(*index, at)])
        spread = (TILE_ROWS, per_row, 32 // plane)
        fields = jnp.broadcast_to(words[:, :, None], spread) >> _shifts(spread, plane)
        fields = fields.reshape(shape)
        if plane < 16 or width > 16:
            fields = fields & _as_word((1 << plane) - 1)
        fields = fields << _as_word(plane_shift(width, plane))
        code = fields | code
    if width == 16:
        magnitude = jnp.minimum(code & _as_word(0x7FFF), _as_word(0x7F7F))
        return _f32((magnitude << 16) | (code >> 15 << 31))
    scale = _decode_scales(ref, index, offset, width, tile)
    if width == 1:
        return _f32(_u32(jnp.broadcast_to(scale, shape)) | ((code ^ 1) << 31))
    sign = (code << _as_word(32 - width)) & _as_word(1 << 31)
    level = code & _as_word((1 << (width - 1)) - 1)
    return _f32(_u32(_decode_levels(level, width, tile)) | sign) * scale


def _table_start(width: int, fmt: WireFormat) -> int:
    smaller = [w for w in fmt.widths if 1 < w < 16 and w < width]
    return sum(1 << (w - 1) for w in smaller)


def _decode_levels(level, width: int, tile: _Tile):
    fmt = tile.fmt
    if fmt.levels == "geometric":
        at = level.astype(jnp.int32) + _table_start(width, fmt)
        return plgpu.load(tile.table_ref.at[at])
    bits = fmt.octave_bits(width)
    low = np.float32((1 << bits) + fmt.level_start(width))
    return _f32((level << _as_word(23 - bits)) + _as_word(int(low.view(np.uint32)))) - low


def _bf16_up(x, cap: float):
    bits = jnp.minimum(_u32(x), _as_word(0x7F7F0000)) + _as_word(0xFFFF)
    return jnp.minimum(_f32(bits & _as_word(0xFFFF0000)), cap)


def _encode_scales(values, ref, index, offset, width: int, tile: _Tile):
    """Chooses and stores the scales; returns the reciprocals [R, groups, 1] to encode with."""
    fmt = tile.fmt
    cap, to_scale = fmt.super_scale_cap(width), SCALE_SLACK / fmt.level_top(width)
    top = jnp.max(jnp.abs(values), axis=2)
    if fmt.group_scale == "bf16":
        scale = _bf16_up(top * to_scale, cap)
        _store_packed(ref, index, offset, _u32(scale) >> 16, 16)
        return _reciprocal(scale, tile.interpret)[:, :, None]
    super_scale = _bf16_up(jnp.max(top, axis=1) * to_scale, cap)
    fields = (_u32(super_scale) >> 16).reshape(1, TILE_ROWS)
    _store_packed(ref, index, offset, fields, 16)
    inverse = _reciprocal(super_scale, tile.interpret)
    fraction = top * inverse[:, None] * np.float32(256 * SCALE_SLACK / fmt.level_top(width))
    fraction = jnp.clip(jnp.ceil(fraction), 1.0, 256.0).astype(jnp.int32)
    start = offset + fmt.super_scale_words(width)
    _store_packed(ref, index, start, (fraction - 1).astype(jnp.uint32), 8)
    scale = _group_scale(super_scale[:, None], fraction, width, fmt)
    return _reciprocal(scale, tile.interpret)[:, :, None]


def _encode(values, noise, ref, index, offset, width: int, tile: _Tile):
    """Encodes f32[R, groups, group_size] at static ``width`` and stores the record."""
    if width == 0:
        return
    fmt = tile.fmt
    if width == 16:
        own = _u32(values)
        rounding = (noise ^ (_as_word(0) - (own >> 31))) >> 16
        raw = jnp.minimum((own & _as_word(0x7FFFFFFF)) + rounding, _as_word(0x7F7FFFFF)) >> 16
        code = raw | (own >> 31 << 15)
    else:
        inverse = _encode_scales(values, ref, index, offset, width, tile)
        z = values * inverse
        code = _round(z, noise, width, tile)
    for plane in planes_of(width):
        fields = code >> _as_word(plane_shift(width, plane))
        if plane < width:
            fields = fields & _as_word((1 << plane) - 1)
        fields = fields.reshape(TILE_ROWS, fmt.super_group_size)
        _store_packed(ref, index, offset + fmt.plane_offset(width, plane), fields, plane)


def _round(z, noise, width: int, tile: _Tile):
    """The codes of values in units of levels, rounded by ``noise``."""
    fmt = tile.fmt
    if width == 1:
        two = int(np.float32(2.0).view(np.uint32))
        up = _u32(jnp.clip(z, -1.0, 1.0) + 3.0) - _as_word(two) + (noise >> 9)
        return jnp.minimum(up >> 23, _as_word(1))
    sign = _u32(z) >> 31
    noise = noise ^ (_as_word(0) - sign)
    last = _as_word((1 << (width - 1)) - 1)
    if fmt.levels == "geometric":
        level = _round_to_table(jnp.abs(z), noise, width, tile)
    else:
        bits = fmt.octave_bits(width)
        low = np.float32((1 << bits) + fmt.level_start(width))
        steps = _u32(jnp.abs(z) + low) - _as_word(int(low.view(np.uint32)))
        level = (steps + (noise >> _as_word(9 + bits))) >> _as_word(23 - bits)
    return jnp.minimum(level, last) | (sign << _as_word(width - 1))


def _round_to_table(z, noise, width: int, tile: _Tile):
    """Binary search in the level table, then one random step up."""
    start, count = _table_start(width, tile.fmt), 1 << (width - 1)
    below = jnp.zeros(z.shape, jnp.int32)
    step = count // 2
    while step:
        candidate = below + step
        level = plgpu.load(tile.table_ref.at[candidate + start])
        below = jnp.where(level <= z, candidate, below)
        step //= 2
    below = jnp.minimum(below, max(count - 2, 0))
    lower = plgpu.load(tile.table_ref.at[below + start])
    upper = plgpu.load(tile.table_ref.at[below + (start + 1)])
    scaled = (jnp.int32(0xFFFF) - (noise >> 16).astype(jnp.int32)).astype(jnp.float32)
    threshold = scaled * ((upper - lower) * 2**-16)
    return jnp.where(z - lower > threshold, below + 1, below).astype(jnp.uint32)


def _noise(rows, noise_ref, tile: _Tile):
    """Noise words [R, groups, group_size] of the super-groups ``rows[R]``."""
    fmt = tile.fmt
    quads = fmt.super_group_size // 4
    noise = Noise(*(noise_ref[i] for i in range(NOISE_WORDS)))
    quad = lax.broadcasted_iota(jnp.uint32, (TILE_ROWS, quads, 1), 1)
    counter = rows.astype(jnp.uint32)[:, None, None] * _as_word(quads) + quad
    rotation = _shifts((TILE_ROWS, quads, 4), 8)
    return noise_words(counter, rotation, noise, fmt.rounding).reshape(tile.shape)


def _load_rows(x_ref, mean_ref, rows, n_rows: int, tile: _Tile):
    """``x - mean`` of super-groups ``rows``: f32[R, groups, group_size]."""
    row, column = _rows_and_columns(rows, tile)
    x = plgpu.load(x_ref.at[row, column], mask=row < n_rows, other=0.0)
    mean = plgpu.load(mean_ref.at[rows])
    return x.astype(jnp.float32) - mean[:, None, None]


def _unpack_entry(tiles_ref, chunk, t):
    entry = tiles_ref[chunk, t]
    return (entry >> 5) * 4, entry & 31


class _InputRefs(NamedTuple):
    """References of one `Input`; ``skip_ref`` is None where nothing is left out."""

    payloads_ref: Any
    tiles_ref: Any
    skip_ref: Any


def _accumulate(total, inputs: list[_InputRefs], chunk, t, c, tile: _Tile):
    """``total`` plus the decoded records of tile ``t`` of ``chunk``, the c-th, in all inputs."""
    for payloads_ref, tiles_ref, skip_ref in inputs:
        offset, width = _unpack_entry(tiles_ref, chunk, t)
        count = payloads_ref.shape[0] - (skip_ref is not None)

        def branch(w, ref=payloads_ref, offset=offset, skip_ref=skip_ref, count=count):
            def add(k, so_far):
                if skip_ref is not None:
                    k = k + 1 + ((k - skip_ref[0]) >> 31)  # + (k >= skip): booleans do not add up
                return so_far + _decode(ref, (k, c), offset, w, tile)

            def add_all(so_far):
                return add(0, so_far) if count == 1 else lax.fori_loop(0, count, add, so_far)

            return add_all

        total = _by_width(width, tile.fmt.widths, branch, total)
    return total


def _rows_and_columns(rows, tile: _Tile):
    """Indices [R, groups, group_size] of all coordinates of super-groups ``rows[R]``."""
    column = lax.broadcasted_iota(jnp.int32, tile.shape, 1) * tile.fmt.group_size
    column = column + lax.broadcasted_iota(jnp.int32, tile.shape, 2)
    return jnp.broadcast_to(rows[:, None, None], tile.shape), column


def _encode_kernel(
    x_ref, mean_ref, order_ref, tiles_ref, chunks_ref, noise_ref, table_ref, *rest,
    fmt, n_rows, with_skip, skips_chunk, interpret,
):  # fmt: skip
    """compress (no inputs) and decompress-accumulate-recompress."""
    tile = _Tile(fmt, interpret, table_ref)
    t, c = pl.program_id(0), pl.program_id(1)
    out_ref, inputs = rest[-1], _input_refs(rest[skips_chunk:-1], with_skip)

    def run():
        chunk = chunks_ref[c]
        rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
        total = _load_rows(x_ref, mean_ref, rows, n_rows, tile)
        total = _accumulate(total, inputs, chunk, t, c, tile)
        noise = _noise(rows, noise_ref, tile)
        offset, width = _unpack_entry(tiles_ref, chunk, t)

        def branch(w):
            def encode(total, noise):
                _encode(total, noise, out_ref, (c,), offset, w, tile)
                return jnp.int32(0)

            return encode

        _by_width(width, fmt.widths, branch, total, noise)

    if skips_chunk:
        pl.when(c != rest[0][0])(run)
    else:
        run()


def _store_rows(out_ref, value, rows, mean_sum, divisor: int, tile: _Tile):
    """Writes finished super-groups to those of ``rows[R]`` that exist."""
    value = value + mean_sum
    if divisor != 1:
        value = value * np.float32(1.0 / divisor)
    row, column = _rows_and_columns(rows, tile)
    inside = (row >= 0) & (row < out_ref.shape[0])
    plgpu.store(out_ref.at[row, column], value.astype(out_ref.dtype), mask=inside)


def _finish_kernel(
    x_ref, mean_ref, mean_sum_ref, order_ref, chunks_ref, start_ref, table_ref, *rest,
    fmt, n_rows, with_skip, divisor, aliased, interpret,
):  # fmt: skip
    """decompress-accumulate; an aliased input only keeps what other calls wrote."""
    inputs, out_ref = _input_refs(rest[: -1 - aliased], with_skip), rest[-1]
    tile = _Tile(fmt, interpret, table_ref)
    t, c = pl.program_id(0), pl.program_id(1)
    chunk = chunks_ref[c]
    rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
    total = _load_rows(x_ref, mean_ref, rows, n_rows, tile)
    total = _accumulate(total, inputs, chunk, t, c, tile)
    mean_sum = plgpu.load(mean_sum_ref.at[rows])[:, None, None]
    _store_rows(out_ref, total, rows - start_ref[0], mean_sum, divisor, tile)


def _decode_kernel(
    mean_sum_ref, order_ref, tiles_ref, chunks_ref, table_ref, payloads_ref, *in_and_out,
    fmt, divisor, interpret,
):  # fmt: skip
    """decompress; an aliased input only keeps what other calls wrote."""
    out_ref = in_and_out[-1]
    tile = _Tile(fmt, interpret, table_ref)
    t, c = pl.program_id(0), pl.program_id(1)
    chunk = chunks_ref[c]
    rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
    mean_sum = plgpu.load(mean_sum_ref.at[rows])[:, None, None]
    offset, width = _unpack_entry(tiles_ref, chunk, t)

    def branch(w):
        def decode(mean_sum):
            value = _decode(payloads_ref, (c,), offset, w, tile)
            _store_rows(out_ref, value, rows, mean_sum, divisor, tile)
            return jnp.int32(0)

        return decode

    _by_width(width, fmt.widths, branch, mean_sum)


def _statistics_kernel(x_ref, mean_ref, sqnorm_ref, *, n_rows, size, rows_per_program):
    start = pl.program_id(0) * rows_per_program
    shape = rows_per_program, size
    row = start + lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    x = plgpu.load(x_ref.at[row, column], mask=row < n_rows, other=0.0).astype(jnp.float32)
    at = start + lax.broadcasted_iota(jnp.int32, (rows_per_program,), 0)
    inside = at < n_rows
    plgpu.store(mean_ref.at[at], jnp.sum(x * np.float32(1.0 / size), axis=1), mask=inside)
    plgpu.store(sqnorm_ref.at[at], jnp.sum(x * x, axis=1), mask=inside)


def _rows(x, super_group_size: int):
    """x as [rows, S]: free where S divides d, one padded copy otherwise."""
    pad = -x.shape[0] % super_group_size
    return (jnp.pad(x, (0, pad)) if pad else x).reshape(-1, super_group_size)


def _table(fmt: WireFormat):
    tables = [fmt.level_table(w) for w in fmt.widths if 1 < w < 16]
    if fmt.levels != "geometric" or not tables:
        return jnp.zeros((1,), jnp.float32)
    return jnp.asarray(np.concatenate(tables), jnp.float32)


def _call(kernel, name: str, grid, out_shape, operands, *, fmt, interpret, aliases=None, **static):
    params = {}
    if not interpret:
        tuning = tuning_for(name)
        params["compiler_params"] = plgpu.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, fmt=fmt, interpret=interpret, **static),
        out_shape=out_shape,
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=whole,
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=f"dynamiq_{name}",
        **params,
    )(*operands)


def statistics(x, *, super_group_size: int, interpret: bool = False):
    """See `pallas_kernels.statistics`."""
    rows = _rows(x, super_group_size)
    tuning = tuning_for("statistics")
    whole = pl.BlockSpec(memory_space=pl.ANY)
    params = {}
    if not interpret:
        params["compiler_params"] = plgpu.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        )
    return tuple(
        pl.pallas_call(
            functools.partial(
                _statistics_kernel,
                n_rows=rows.shape[0],
                size=super_group_size,
                rows_per_program=tuning.rows_per_program,
            ),
            out_shape=[shape_struct((rows.shape[0],), jnp.float32, x)] * 2,
            grid=(pl.cdiv(rows.shape[0], tuning.rows_per_program),),
            in_specs=[whole],
            out_specs=[whole] * 2,
            interpret=interpret,
            name="dynamiq_statistics",
            **params,
        )(rows)
    )


def _input_operands(inputs: tuple[Input, ...]) -> tuple[tuple, tuple[bool, ...]]:
    """Inputs as a flat tuple of arrays, and which of them leave one payload out."""
    with_skip = tuple(skip is not None for _, _, skip in inputs)
    flat = []
    for payloads, tiles, skip in inputs:
        flat += [payloads, tiles]
        if skip is not None:
            flat.append(jnp.reshape(skip, (1,)).astype(jnp.int32))
    return tuple(flat), with_skip


def _input_refs(refs, with_skip: tuple[bool, ...]) -> list[_InputRefs]:
    """The inverse of `_input_operands`, for references."""
    it = iter(refs)
    return [_InputRefs(next(it), next(it), next(it) if skip else None) for skip in with_skip]


def compress(
    x, mean, order, tiles, chunks, noise, skip=None, *, payload_words, fmt, interpret=False
):
    """See `pallas_kernels.compress`."""
    rest = x, mean, order, tiles, chunks, noise
    return _encode_call("compress", (), *rest, payload_words, fmt, interpret, skip)


def decompress_accumulate_recompress(
    inputs, x, mean, order, tiles, chunks, noise, *, payload_words, fmt, interpret=False
):
    """See `pallas_kernels.decompress_accumulate_recompress`."""
    rest = x, mean, order, tiles, chunks, noise
    name = "decompress_accumulate_recompress"
    return _encode_call(name, inputs, *rest, payload_words, fmt, interpret)


def _encode_call(
    name, inputs, x, mean, order, tiles, chunks, noise, payload_words, fmt, interpret, skip=None
):
    rows = _rows(x, fmt.super_group_size)
    flat, with_skip = _input_operands(inputs)
    skipped = () if skip is None else (jnp.reshape(skip, (1,)).astype(jnp.int32),)
    operands = rows, mean, order, tiles, chunks, noise, _table(fmt), *skipped, *flat
    return _call(
        _encode_kernel,
        name,
        (tiles.shape[1], chunks.shape[0]),
        shape_struct((chunks.shape[0], payload_words), jnp.uint32, *operands),
        operands,
        fmt=fmt,
        interpret=interpret,
        n_rows=rows.shape[0],
        with_skip=with_skip,
        skips_chunk=len(skipped),
    )


def decompress_accumulate(
    inputs, x, mean, mean_sum, order, chunks, start, into=None, *, rows, dtype, divisor, fmt,
    interpret=False,
):  # fmt: skip
    """See `pallas_kernels.decompress_accumulate`."""
    x_rows = _rows(x, fmt.super_group_size)
    flat, with_skip = _input_operands(inputs)
    start = jnp.reshape(start, (1,)).astype(jnp.int32)
    operands = x_rows, mean, mean_sum, order, chunks, start, _table(fmt), *flat
    operands = operands if into is None else (*operands, into)
    return _call(
        _finish_kernel,
        "decompress_accumulate",
        (order.shape[1] // TILE_ROWS, chunks.shape[0]),
        shape_struct((rows, fmt.super_group_size), dtype, *operands),
        operands,
        aliases={} if into is None else {len(operands) - 1: 0},
        fmt=fmt,
        interpret=interpret,
        n_rows=x_rows.shape[0],
        with_skip=with_skip,
        divisor=divisor,
        aliased=int(into is not None),
    )


def decompress(
    payloads, mean_sum, order, tiles, chunks, into=None, *, rows, dtype, divisor, fmt,
    interpret=False,
):  # fmt: skip
    """See `pallas_kernels.decompress`."""
    operands = mean_sum, order, tiles, chunks, _table(fmt), payloads
    operands = operands if into is None else (*operands, into)
    return _call(
        _decode_kernel,
        "decompress",
        (tiles.shape[1], payloads.shape[0]),
        shape_struct((rows, fmt.super_group_size), dtype, *operands),
        operands,
        aliases={} if into is None else {len(operands) - 1: 0},
        fmt=fmt,
        interpret=interpret,
        divisor=divisor,
    )
