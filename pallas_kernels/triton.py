"""The five operations as Pallas kernels, lowered through Triton, for NVIDIA GPUs.

One program handles one tile: `TILE_ROWS` super-groups gathered through ``order``, held in registers
from the first load to the last store. Here are memory and launches; what happens in between is in
`pallas_kernels.tile`.
"""

import functools
import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._compat import shape_struct
from pallas_kernels.format import (
    QUAD,
    TILE_ROWS,
    Input,
    Result,
    Source,
    Target,
    WireFormat,
    unpack_tiles,
)
from pallas_kernels.hashing import NOISE_WORDS, Noise
from pallas_kernels.tile import (
    Tile,
    as_word,
    by_width,
    coordinates,
    decode,
    encode,
    field_shifts,
    finished,
    level_tables,
    noise_of,
    pack,
)
from pallas_kernels.tuning import tuning_for

# JAX 0.11 says so to whoever lowers a program; users of these kernels can do nothing about it.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def _asm(code: str, x):
    """PTX that makes one f32, ``$0``, of one, ``$1``."""
    (y,) = plgpu.elementwise_inline_asm(
        "{" + code + "}",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y


def _inverse(x):
    """The reciprocal of ``rcp.rn`` for 2^-126 <= x < 2^126, without its branch for the rest."""
    return _asm(
        """.reg .f32 guess, error;
        rcp.approx.ftz.f32 guess, $1;
        fma.rn.f32 error, $1, guess, 0fBF800000;
        neg.f32 error, error;
        fma.rn.f32 $0, guess, error, guess;""",
        x,
    )


def _magnitude_plus(x, c: np.float32):
    """One instruction: Triton's |x| flushes denormals, and so cannot be part of an addition."""
    bits = int(c.view(np.uint32))
    return _asm(f".reg .f32 m; abs.f32 m, $1; add.rn.f32 $0, m, 0f{bits:08X};", x)


def _tile(fmt: WireFormat, table_ref, interpret: bool) -> Tile:
    def levels(at):
        return plgpu.load(table_ref.at[at])

    if interpret:
        return Tile(fmt, levels, lambda x: 1.0 / x, lambda x, c: jnp.abs(x) + c)
    return Tile(fmt, levels, _inverse, _magnitude_plus)


class _Payload(NamedTuple):
    """A `pallas_kernels.tile.Payload` in memory: ``ref[*where]``."""

    ref: Any
    where: tuple[Any, ...]

    def _at(self, word):
        return self.ref.at[(*self.where, word)]

    def load_scales(self, offset, count: int, bits: int):
        """One load for each field: scales are few."""
        at = _row_major((TILE_ROWS, count))
        words = plgpu.load(self._at(offset + at // (32 // bits)))
        shift = (at % (32 // bits) * bits).astype(jnp.uint32)
        return (words >> shift) & as_word((1 << bits) - 1)

    def store_scales(self, offset, fields, bits: int):
        """One store for each word."""
        rows, count = fields.shape
        words = pack(fields.reshape(rows, count * bits // 32, 32 // bits), bits)
        plgpu.store(self._at(offset + _row_major(words.shape)), words)

    def load_plane(self, offset, bits: int, tile: Tile):
        """One load for each word; one that several groups share is loaded for each."""
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            fields = plgpu.load(self._at(offset + at))[..., None]
            return (fields >> field_shifts((*at.shape, 2), bits)).reshape(tile.shape)
        quads_in_word = 32 // (QUAD * bits)
        if quads <= quads_in_word:  # Triton must not see that words of groups are neighbours
            quad = _row_major((rows, groups)) * quads
            words = plgpu.load(self._at(offset + quad // quads_in_word))
            words = words >> (quad % quads_in_word * (QUAD * bits)).astype(jnp.uint32)
            words = words.reshape(1, 1, rows, groups, 1)
        else:
            at = _words_of_groups(quads // quads_in_word, tile)
            words = plgpu.load(self._at(offset + at)).reshape(-1, 1, rows, groups, 1)
        shape = 1, min(quads, quads_in_word), 1, 1, QUAD
        shifts = lax.broadcasted_iota(jnp.uint32, shape, 1) * as_word(QUAD * bits)
        return (words >> (shifts + field_shifts(shape, bits))).reshape(tile.shape)

    def store_plane(self, offset, fields, bits: int, tile: Tile):
        """One store for each word, which may hold several quads, and those of several groups."""
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            plgpu.store(self._at(offset + at), pack(fields.reshape(*at.shape, 2), bits))
            return
        words, bits = pack(fields, bits), QUAD * bits
        together = min(quads, 32 // bits)
        words = words.reshape(quads // together, together, rows, groups)
        words = words << field_shifts((together,), bits)[None, :, None, None]
        words, bits = jnp.sum(words, axis=1, dtype=jnp.uint32), together * bits
        if bits < 32:
            words = pack(words.reshape(rows, groups * bits // 32, 32 // bits), bits)
            at = _row_major(words.shape)
        else:
            at = _words_of_groups(words.shape[0], tile)
        plgpu.store(self._at(offset + at), words.reshape(at.shape))


def _row_major(shape: tuple[int, ...]):
    """0, 1, 2, ...: int32[shape]."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return row * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)


def _words_of_groups(words: int, tile: Tile):
    """The numbers of a plane's words, so many for each group: int32[words / k, k, R, groups].

    With k words of a group in an axis, up to 16 bytes, a thread moves them at once.
    """
    _, rows, groups, _ = tile.shape
    at_once = min(words, 4)
    shape = words // at_once, at_once, rows, groups
    word = lax.broadcasted_iota(jnp.int32, shape, 0) * at_once
    word = word + lax.broadcasted_iota(jnp.int32, shape, 1)
    row = lax.broadcasted_iota(jnp.int32, shape, 2) * (groups * words)
    return row + lax.broadcasted_iota(jnp.int32, shape, 3) * words + word


def _half_quads(tile: Tile):
    """The numbers of words of two fields of 16 bits: int32[quads, R, groups, 2]."""
    quads, rows, groups, _ = tile.shape
    shape = quads, rows, groups, 2
    row = lax.broadcasted_iota(jnp.int32, shape, 1) * (groups * quads * 2)
    group = lax.broadcasted_iota(jnp.int32, shape, 2) * (quads * 2)
    quad = lax.broadcasted_iota(jnp.int32, shape, 0) * 2
    return row + group + quad + lax.broadcasted_iota(jnp.int32, shape, 3)


def _load_rows(x_ref, mean_ref, rows, n_rows: int, tile: Tile):
    """``x - mean`` of super-groups ``rows``: f32[quads, R, groups, QUAD]."""
    row, column = coordinates(rows, tile)
    x = plgpu.load(x_ref.at[row, column], mask=row < n_rows, other=0.0).astype(jnp.float32)
    if mean_ref is None:
        return x
    return x - plgpu.load(mean_ref.at[rows])[None, :, None, None]


def _noise(noise_ref, where: tuple, rows, tile: Tile):
    """The noise words of super-groups ``rows`` under the row ``noise_ref[*where]``."""
    words = Noise(*(noise_ref[(*where, i)] for i in range(NOISE_WORDS)))
    return noise_of(rows, words, tile)


def _accumulate(total, inputs: list[list[Input]], rows, chunk, t, c, tile: Tile):
    """``total`` plus the decoded records of tile ``t`` of ``chunk``, the c-th, in all inputs."""
    for alike in inputs:
        offset, width = unpack_tiles(alike[0].tiles[chunk, t])

        def branch(w, alike=alike, offset=offset):
            def add_all(so_far):
                for one in alike:
                    so_far = _add(so_far, one, rows, c, offset, w, tile)
                return so_far

            return add_all

        total = by_width(width, tile.fmt.widths, branch, total)
    return total


def _add(total, one: Input, rows, c, offset, width: int, tile: Tile):
    """``total`` plus the decoded records at ``offset`` in one input."""
    payloads_ref: Any = one.payloads
    skip_ref: Any = one.skip
    count = payloads_ref.shape[0] - (skip_ref is not None)

    def add(k, so_far):
        if skip_ref is not None:
            k = k + 1 + ((k - skip_ref[0]) >> 31)  # + (k >= skip): booleans do not add up
        noise = functools.partial(_noise, one.noise, (k,), rows, tile)
        return so_far + decode(_Payload(payloads_ref, (k, c)), offset, width, noise, tile)

    return add(0, total) if count == 1 else lax.fori_loop(0, count, add, total)


def _encode_kernel(
    x_ref, mean_ref, order_ref, tiles_ref, chunks_ref, noise_ref, table_ref, *rest,
    fmt, n_rows, with_mean, arrived, skips_chunk, interpret,
):  # fmt: skip
    """compress (no inputs) and decompress-accumulate-recompress."""
    tile = _tile(fmt, table_ref, interpret)
    t, c = pl.program_id(0), pl.program_id(1)
    out_ref, inputs = rest[-1], arrived.of(rest[skips_chunk:-1])

    def run():
        chunk = chunks_ref[c]
        rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
        total = _load_rows(x_ref, mean_ref if with_mean else None, rows, n_rows, tile)
        total = _accumulate(total, inputs, rows, chunk, t, c, tile)
        noise = _noise(noise_ref, (), rows, tile)
        offset, width = unpack_tiles(tiles_ref[chunk, t])

        def branch(w):
            def encode_tile(total, noise):
                encode(total, noise, _Payload(out_ref, (c,)), offset, w, tile)
                return jnp.int32(0)

            return encode_tile

        by_width(width, fmt.widths, branch, total, noise)

    if skips_chunk:
        pl.when(c != rest[0][0])(run)
    else:
        run()


def _store_rows(out_ref, value, rows, mean_sum, divisor: int, tile: Tile):
    """Writes finished super-groups to those of ``rows[R]`` that exist."""
    value = finished(value, mean_sum, divisor)
    row, column = coordinates(rows, tile)
    inside = (row >= 0) & (row < out_ref.shape[0])
    plgpu.store(out_ref.at[row, column], value.astype(out_ref.dtype), mask=inside)


def _finish_kernel(
    x_ref, mean_ref, mean_sum_ref, order_ref, chunks_ref, start_ref, table_ref, *rest,
    fmt, n_rows, with_mean, arrived, divisor, aliased, interpret,
):  # fmt: skip
    """decompress-accumulate; an aliased input only keeps what other calls wrote."""
    inputs, out_ref = arrived.of(rest[: -1 - aliased]), rest[-1]
    tile = _tile(fmt, table_ref, interpret)
    t, c = pl.program_id(0), pl.program_id(1)
    chunk = chunks_ref[c]
    rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
    total = _load_rows(x_ref, mean_ref if with_mean else None, rows, n_rows, tile)
    total = _accumulate(total, inputs, rows, chunk, t, c, tile)
    mean_sum = plgpu.load(mean_sum_ref.at[rows])[None, :, None, None]
    _store_rows(out_ref, total, rows - start_ref[0], mean_sum, divisor, tile)


def _decode_kernel(
    mean_sum_ref, order_ref, tiles_ref, chunks_ref, table_ref, noise_ref, payloads_ref, *in_and_out,
    fmt, divisor, interpret,
):  # fmt: skip
    """decompress; an aliased input only keeps what other calls wrote."""
    out_ref = in_and_out[-1]
    tile = _tile(fmt, table_ref, interpret)
    t, c = pl.program_id(0), pl.program_id(1)
    chunk = chunks_ref[c]
    rows = plgpu.load(order_ref.at[chunk, pl.ds(t * TILE_ROWS, TILE_ROWS)])
    mean_sum = plgpu.load(mean_sum_ref.at[rows])[None, :, None, None]
    offset, width = unpack_tiles(tiles_ref[chunk, t])

    def branch(w):
        def decode_tile(mean_sum):
            noise = functools.partial(_noise, noise_ref, (c,), rows, tile)
            value = decode(_Payload(payloads_ref, (c,)), offset, w, noise, tile)
            _store_rows(out_ref, value, rows, mean_sum, divisor, tile)
            return jnp.int32(0)

        return decode_tile

    by_width(width, fmt.widths, branch, mean_sum)


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


def _options(name: str, interpret: bool) -> dict[str, Any]:
    """The options of every launch of the kernel ``name``."""
    options = {"name": f"dynamiq_{name}", "interpret": interpret}
    if interpret:
        return options
    tuning = tuning_for(name)
    params = plgpu.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
    return {**options, "compiler_params": params}


class _Launch(NamedTuple):
    """The static facts of a launch with one result."""

    kernel: Any
    name: str
    grid: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    interpret: bool
    replaces: int | None
    """The operand that the result takes the place of."""
    static: tuple[tuple[str, Any], ...]
    """The name of the kernel."""


@functools.partial(jax.jit, static_argnames="launch")
def _launched(operands: tuple, *, launch: _Launch):
    """The result of a launch. Equal launches of a program are traced and lowered once."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    aliases = {} if launch.replaces is None else {launch.replaces: 0}
    return pl.pallas_call(
        functools.partial(launch.kernel, interpret=launch.interpret, **dict(launch.static)),
        out_shape=shape_struct(launch.shape, launch.dtype, *operands),
        grid=launch.grid,
        in_specs=[whole] * len(operands),
        out_specs=whole,
        input_output_aliases=aliases,
        **_options(launch.name, launch.interpret),
    )(*operands)


def _call(kernel, name: str, grid, shape, dtype, operands, *, interpret, replaces=None, **static):
    """The result of a launch, of this shape and dtype; ``static`` are the kernel's."""
    static = tuple(static.items())
    launch = _Launch(kernel, name, grid, shape, jnp.dtype(dtype), interpret, replaces, static)
    return _launched(operands, launch=launch)


@functools.partial(jax.jit, static_argnames=("super_group_size", "interpret"))
def statistics(x, *, super_group_size: int, interpret: bool = False):
    """See `pallas_kernels.statistics`."""
    rows = _rows(x, super_group_size)
    rows_per_program = tuning_for("statistics").rows_per_program
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return tuple(
        pl.pallas_call(
            functools.partial(
                _statistics_kernel,
                n_rows=rows.shape[0],
                size=super_group_size,
                rows_per_program=rows_per_program,
            ),
            out_shape=[shape_struct((rows.shape[0],), jnp.float32, x)] * 2,
            grid=(pl.cdiv(rows.shape[0], rows_per_program),),
            in_specs=[whole],
            out_specs=[whole] * 2,
            **_options("statistics", interpret),
        )(rows)
    )


def _scalar(value):
    """An operand for a scalar, which kernels read as ``ref[0]``."""
    return jnp.reshape(value, (1,)).astype(jnp.int32)


def _mean(source: Source):
    """An operand for the means, whether there are any or not."""
    return jnp.zeros(1, jnp.float32) if source.mean is None else source.mean


class _Inputs(NamedTuple):
    """Static facts of inputs: whether each leaves one payload out; which have equal tiles."""

    with_skip: tuple[bool, ...]
    alike: tuple[int, ...]
    """How many that follow each other share their tiles, and with them a branch of the kernel."""
    with_noise: bool
    """Whether each has the noise of its encoders."""

    def of(self, refs) -> list[list[Input]]:
        """Inputs whose fields are references, of equal tiles together."""
        it = iter(refs)

        def take(skips: bool) -> Input:
            payloads, tiles = next(it), next(it)
            skip = next(it) if skips else None
            return Input(payloads, tiles, skip, next(it) if self.with_noise else None)

        found = iter([take(skips) for skips in self.with_skip])
        return [[next(found) for _ in range(count)] for count in self.alike]


def _input_operands(inputs: tuple[Input, ...], fmt: WireFormat) -> tuple[tuple, _Inputs]:
    """Inputs as a flat tuple of arrays, and what is static of them."""
    with_skip = tuple(i.skip is not None for i in inputs)
    alike = tuple(len(list(group)) for _, group in itertools.groupby(inputs, lambda i: id(i.tiles)))
    flat = []
    for payloads, tiles, skip, noise in inputs:
        flat += [payloads, tiles]
        if skip is not None:
            flat.append(_scalar(skip))
        if fmt.dither:
            flat.append(noise)
    return tuple(flat), _Inputs(with_skip, alike, fmt.dither)


def compress(source: Source, chunks, target: Target, skip=None, *, fmt, interpret=False):
    """See `pallas_kernels.compress`."""
    return _encode_call("compress", (), source, chunks, target, skip, fmt, interpret)


def decompress_accumulate_recompress(
    inputs: tuple[Input, ...], source: Source, chunks, target: Target, *, fmt, interpret=False
):
    """See `pallas_kernels.decompress_accumulate_recompress`."""
    name = "decompress_accumulate_recompress"
    return _encode_call(name, inputs, source, chunks, target, None, fmt, interpret)


def _encode_call(name, inputs, source: Source, chunks, target: Target, skip, fmt, interpret):
    rows = _rows(source.x, fmt.super_group_size)
    flat, arrived = _input_operands(inputs, fmt)
    skipped = () if skip is None else (_scalar(skip),)
    operands = (
        rows, _mean(source), source.order, target.tiles, chunks, target.noise, level_tables(fmt),
        *skipped, *flat,
    )  # fmt: skip
    return _call(
        _encode_kernel,
        name,
        (target.tiles.shape[1], chunks.shape[0]),
        (chunks.shape[0], target.payload_words),
        jnp.uint32,
        operands,
        fmt=fmt,
        interpret=interpret,
        n_rows=rows.shape[0],
        with_mean=source.mean is not None,
        arrived=arrived,
        skips_chunk=len(skipped),
    )


def decompress_accumulate(
    inputs: tuple[Input, ...], source: Source, chunks, result: Result, *, fmt, interpret=False
):
    """See `pallas_kernels.decompress_accumulate`."""
    rows = _rows(source.x, fmt.super_group_size)
    flat, arrived = _input_operands(inputs, fmt)
    operands = (
        rows, _mean(source), result.mean_sum, source.order, chunks, _scalar(result.start),
        level_tables(fmt), *flat,
    )  # fmt: skip
    return _finish_call(
        _finish_kernel,
        "decompress_accumulate",
        (source.order.shape[1] // TILE_ROWS, chunks.shape[0]),
        operands,
        result,
        fmt=fmt,
        interpret=interpret,
        n_rows=rows.shape[0],
        with_mean=source.mean is not None,
        arrived=arrived,
        aliased=int(result.into is not None),
    )


def decompress(payloads, tiles, chunks, result: Result, noise=None, *, fmt, interpret=False):
    """See `pallas_kernels.decompress`."""
    words = noise if fmt.dither else jnp.zeros((1, NOISE_WORDS), jnp.uint32)
    operands = result.mean_sum, result.order, tiles, chunks, level_tables(fmt), words, payloads
    grid = tiles.shape[1], payloads.shape[0]
    return _finish_call(
        _decode_kernel, "decompress", grid, operands, result, fmt=fmt, interpret=interpret
    )


def _finish_call(kernel, name, grid, operands, result: Result, *, fmt, **static):
    """A call that writes ``result``; what it is written into is the last operand, aliased."""
    operands = operands if result.into is None else (*operands, result.into)
    return _call(
        kernel,
        name,
        grid,
        (result.rows, fmt.super_group_size),
        result.dtype,
        operands,
        replaces=None if result.into is None else len(operands) - 1,
        fmt=fmt,
        divisor=result.divisor,
        **static,
    )
