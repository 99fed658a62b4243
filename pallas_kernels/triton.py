"""Pallas' Triton lowering of the kernels, for NVIDIA GPUs.

One program handles one tile. Its values are f32[quads, R, groups, QUAD] (R = `TILE_ROWS`). Triton
deals the last axes to threads first, so that a thread holds all quads of a group.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._compat import shape_struct
from pallas_kernels.format import DEALT, QUAD, TILE_ROWS, WireFormat, unpack_tiles
from pallas_kernels.kernels import Launch, rows_of
from pallas_kernels.tile import as_word
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


def _field_shifts(shape: tuple[int, ...], bits: int):
    """0, bits, 2*bits, ... along the last axis: uint32[shape]."""
    return lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * as_word(bits)


def _pack(fields, bits: int):
    """Fields uint32[..., k] below 2^bits, added up as parts of words: uint32[...]."""
    return jnp.sum(fields << _field_shifts(fields.shape, bits), axis=-1, dtype=jnp.uint32)


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


class _Payload(NamedTuple):
    """A `pallas_kernels.tile.Payload` in memory: ``ref[*where]``."""

    ref: Any
    where: tuple[Any, ...]
    tile: "_Tile"

    def _at(self, word):
        return self.ref.at[(*self.where, word)]

    def load_row_scales(self, offset):
        return self._load_scales(offset, 1, 16).reshape(TILE_ROWS)

    def store_row_scales(self, offset, fields):
        self.store_group_scales(offset, fields[None], 16)

    def load_group_scales(self, offset, bits: int):
        return self._load_scales(offset, self.tile.fmt.groups, bits)

    def _load_scales(self, offset, count: int, bits: int):
        """One load for each field: scales are few."""
        at = _row_major((TILE_ROWS, count))
        words = plgpu.load(self._at(offset + at // (32 // bits)))
        shift = (at % (32 // bits) * bits).astype(jnp.uint32)
        return (words >> shift) & as_word((1 << bits) - 1)

    def store_group_scales(self, offset, fields, bits: int):
        """One store for each word."""
        rows, count = fields.shape
        words = _pack(fields.reshape(rows, count * bits // 32, 32 // bits), bits)
        plgpu.store(self._at(offset + _row_major(words.shape)), words)

    def load_plane(self, offset, bits: int):
        """One load for each word; one that several groups share is loaded for each."""
        tile = self.tile
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            fields = plgpu.load(self._at(offset + at))[..., None]
            return (fields >> _field_shifts((*at.shape, 2), bits)).reshape(tile.shape)
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
        return (words >> (shifts + _field_shifts(shape, bits))).reshape(tile.shape)

    def store_plane(self, offset, fields, bits: int):
        """One store for each word, which may hold several quads, and those of several groups."""
        tile = self.tile
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            plgpu.store(self._at(offset + at), _pack(fields.reshape(*at.shape, 2), bits))
            return
        words, bits = _pack(fields, bits), QUAD * bits
        together = min(quads, 32 // bits)
        words = words.reshape(quads // together, together, rows, groups)
        words = words << _field_shifts((together,), bits)[None, :, None, None]
        words, bits = jnp.sum(words, axis=1, dtype=jnp.uint32), together * bits
        if bits < 32:
            words = _pack(words.reshape(rows, groups * bits // 32, 32 // bits), bits)
            at = _row_major(words.shape)
        else:
            at = _words_of_groups(words.shape[0], tile)
        plgpu.store(self._at(offset + at), words.reshape(at.shape))


def _row_major(shape: tuple[int, ...]):
    """0, 1, 2, ...: int32[shape]."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return row * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)


def _words_of_groups(words: int, tile: "_Tile"):
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


def _half_quads(tile: "_Tile"):
    """The numbers of words of two fields of 16 bits: int32[quads, R, groups, 2]."""
    quads, rows, groups, _ = tile.shape
    shape = quads, rows, groups, 2
    row = lax.broadcasted_iota(jnp.int32, shape, 1) * (groups * quads * 2)
    group = lax.broadcasted_iota(jnp.int32, shape, 2) * (quads * 2)
    quad = lax.broadcasted_iota(jnp.int32, shape, 0) * 2
    return row + group + quad + lax.broadcasted_iota(jnp.int32, shape, 3)


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


def _options(name: str, interpret: bool) -> dict[str, Any]:
    """The options of every launch of the kernel ``name``."""
    options = {"name": f"dynamiq_{name}", "interpret": interpret}
    if interpret:
        return options
    tuning = tuning_for(name)
    params = plgpu.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
    return {**options, "compiler_params": params}


@dataclass(frozen=True)
class _Tile:
    """A `pallas_kernels.tile.Tile` of Triton's."""

    fmt: WireFormat
    table: Any
    """The reference of `level_tables`."""
    interpret: bool
    t: Any
    c: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.fmt.group_size // QUAD, TILE_ROWS, self.fmt.groups, QUAD

    def rows(self, order_ref, chunk):
        return plgpu.load(order_ref.at[chunk, pl.ds(self.t * TILE_ROWS, TILE_ROWS)])

    def by_width(self, tiles_ref, chunk, branch, *operands):
        offset, width = unpack_tiles(tiles_ref[chunk, self.t])
        branch = functools.partial(branch, offset)
        return _by_width(width, self.fmt.widths, branch, *operands)

    def _coordinates(self, rows):
        """Indices [quads, R, groups, QUAD], each, of row and column of super-groups ``rows[R]``."""
        group = lax.broadcasted_iota(jnp.int32, self.shape, 2)
        column = group // DEALT * (DEALT * self.fmt.group_size) + group % DEALT * QUAD
        column = column + lax.broadcasted_iota(jnp.int32, self.shape, 0) * (DEALT * QUAD)
        column = column + lax.broadcasted_iota(jnp.int32, self.shape, 3)
        return jnp.broadcast_to(rows[None, :, None, None], self.shape), column

    def load(self, x_ref, rows, n_rows):
        row, column = self._coordinates(rows)
        x = plgpu.load(x_ref.at[row, column], mask=row < n_rows, other=0.0)
        return x.astype(jnp.float32)

    def load_rows(self, ref, rows):
        return plgpu.load(ref.at[rows])[None, :, None, None]

    def store(self, out_ref, rows, values):
        row, column = self._coordinates(rows)
        inside = (row >= 0) & (row < out_ref.shape[0])
        plgpu.store(out_ref.at[row, column], values.astype(out_ref.dtype), mask=inside)

    def payload(self, ref, where):
        return _Payload(ref, where, self)

    def levels(self, at):
        return plgpu.load(self.table.at[at])

    def inverse(self, x):
        return 1.0 / x if self.interpret else _inverse(x)

    def magnitude_plus(self, x, c):
        return jnp.abs(x) + c if self.interpret else _magnitude_plus(x, c)

    def ceil(self, x):
        return jnp.ceil(x).astype(jnp.int32)

    def zeros(self):
        return jnp.zeros(self.shape, jnp.float32)

    def shifts(self, bits):
        return _field_shifts(self.shape, bits)

    def counters(self, rows):
        first = rows.astype(jnp.uint32) * as_word(self.fmt.super_group_size // QUAD)
        shape = quads, *_ = self.shape[:3]
        quad = lax.broadcasted_iota(jnp.int32, shape, 2) * quads
        quad = quad + lax.broadcasted_iota(jnp.int32, shape, 0)
        return (first[None, :, None] + quad.astype(jnp.uint32))[..., None]

    def group_max(self, values):
        return jnp.max(jnp.max(values, axis=3), axis=0)

    def row_max(self, of_groups):
        return jnp.max(of_groups, axis=1)

    def to_groups(self, of_rows):
        return of_rows[:, None]

    def to_coordinates(self, of_groups):
        return of_groups[None, :, :, None]


@dataclass(frozen=True)
class Triton:
    """A `pallas_kernels.kernels.Lowering`."""

    interpret: bool = False
    """Whether kernels run on Pallas' interpreter."""

    def tile(self, fmt, table_ref, tiles):
        """The tile of the program that runs."""
        t, c = pl.program_id(0), pl.program_id(1)
        return _Tile(fmt, table_ref, self.interpret, t, c)

    def launch(self, launch: Launch, operands):
        """The result of a launch; an aliased operand only keeps what other calls wrote."""
        whole = pl.BlockSpec(memory_space=pl.ANY)
        body = functools.partial(
            launch.kernel, lowering=self, fmt=launch.fmt, **dict(launch.static)
        )

        def kernel(*refs):
            given = refs[:-1] if launch.replaces is None else refs[:-2]
            body(*given, refs[-1])

        aliases = {} if launch.replaces is None else {launch.replaces: 0}
        return pl.pallas_call(
            kernel,
            out_shape=shape_struct(launch.shape, launch.dtype, *operands),
            grid=(launch.tiles, launch.chunks),
            in_specs=[whole] * len(operands),
            out_specs=whole,
            input_output_aliases=aliases,
            **_options(launch.name, self.interpret),
        )(*operands)

    def statistics(self, x, super_group_size):
        """Mean and squared norm of every super-group."""
        return _statistics(x, super_group_size, self.interpret)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _statistics(x, super_group_size: int, interpret: bool):
    rows = rows_of(x, super_group_size)
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
