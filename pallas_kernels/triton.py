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

from pallas_kernels import reference
from pallas_kernels._compat import shape_struct
from pallas_kernels.format import (
    DEALT,
    ENERGY_LEVELS,
    MANTISSA_BITS,
    QUAD,
    TILE_ROWS,
    Dealt,
    Upgrades,
    WireFormat,
    mean_of,
    octave_parts,
    pack_tiles,
    padded_count,
    unpack_tiles,
)
from pallas_kernels.kernels import Launch, rows_of
from pallas_kernels.tile import as_word
from pallas_kernels.tuning import tuning_for

# JAX 0.11 warns everyone who lowers a program, and users of these kernels cannot change that.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def _asm(code: str, x, *others, dtype=jnp.float32):
    """PTX that computes a word of ``dtype``, ``$0``, from words ``$1``, ``$2``, ..."""
    others = [jnp.broadcast_to(other, x.shape) for other in others]
    (y,) = plgpu.elementwise_inline_asm(
        "{" + code + "\n}",
        args=[x, *others],
        constraints="=r,r" + ",r" * len(others),
        pack=4 // x.dtype.itemsize,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return y


def _inverse(x):
    """1/x as by ``rcp.rn``, for 2^-126 <= x < 2^126, without its branch for other x."""
    return _asm(
        """.reg .f32 guess, error;
        rcp.approx.ftz.f32 guess, $1;
        fma.rn.f32 error, $1, guess, 0fBF800000;
        neg.f32 error, error;
        fma.rn.f32 $0, guess, error, guess;""",
        x,
    )


def _magnitude_plus(x, c):
    """One instruction: Triton's |x| flushes denormals, so it cannot be part of an addition."""
    return _asm(".reg .f32 m; abs.f32 m, $1; add.rn.f32 $0, m, $2;", x, c)


def _field_shifts(shape: tuple[int, ...], bits: int):
    """0, bits, 2*bits, ... along the last axis: uint32[shape]."""
    return lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * as_word(bits)


def _divmod(x, by: int):
    """Quotient and remainder of int32 x >= 0; JAX's operators would also handle signs."""
    divisors = jnp.full_like(x, by)
    return lax.div(x, divisors), lax.rem(x, divisors)


def _pack(fields, bits: int):
    """Packs fields uint32[..., k] below 2^bits into words: uint32[...]."""
    return jnp.sum(fields << _field_shifts(fields.shape, bits), axis=-1, dtype=jnp.uint32)


def _by_width(width, widths: tuple[int, ...], branch, *operands):
    """``branch(w)(*operands)`` for the ``w`` in ``widths`` that equals ``width``."""
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
        """Loads each field separately, since there are few scales."""
        # A word has k = 32 // bits fields: field ``at`` is number at % k in word at // k.
        word, field = _divmod(_row_major((TILE_ROWS, count)), 32 // bits)
        words = plgpu.load(self._at(offset + word))
        return (words >> (field * bits).astype(jnp.uint32)) & as_word((1 << bits) - 1)

    def store_group_scales(self, offset, fields, bits: int):
        """Stores each word once."""
        rows, count = fields.shape
        words = _pack(fields.reshape(rows, count * bits // 32, 32 // bits), bits)
        plgpu.store(self._at(offset + _row_major(words.shape)), words)

    def load_plane(self, offset, bits: int):
        """Loads each word once, or once for each of several groups that share it."""
        tile = self.tile
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            fields = plgpu.load(self._at(offset + at))[..., None]
            return (fields >> _field_shifts((*at.shape, 2), bits)).reshape(tile.shape)
        quads_in_word = 32 // (QUAD * bits)
        if quads <= quads_in_word:  # Triton must not see that words of groups are neighbours
            # A group's first quad among all quads; a word holds quads of one group or of several.
            word, place = _divmod(_row_major((rows, groups)) * quads, quads_in_word)
            words = plgpu.load(self._at(offset + word))
            words = words >> (place * (QUAD * bits)).astype(jnp.uint32)
            words = words.reshape(1, 1, rows, groups, 1)
        else:
            at = _words_of_groups(quads // quads_in_word, tile)
            words = plgpu.load(self._at(offset + at)).reshape(-1, 1, rows, groups, 1)
        shape = 1, min(quads, quads_in_word), 1, 1, QUAD
        shifts = lax.broadcasted_iota(jnp.uint32, shape, 1) * as_word(QUAD * bits)
        return (words >> (shifts + _field_shifts(shape, bits))).reshape(tile.shape)

    def store_plane(self, offset, fields, bits: int):
        """Stores each word separately; a word may hold several quads, also of several groups."""
        tile = self.tile
        quads, rows, groups, _ = tile.shape
        if QUAD * bits > 32:
            at = _half_quads(tile)
            plgpu.store(self._at(offset + at), _pack(fields.reshape(*at.shape, 2), bits))
            return
        # A word has 32 bits: of several quads if these are short, then of several groups.
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
    """The numbers of a plane's words, ``words`` for each group: int32[words / k, k, R, groups].

    One axis has k words of a group, up to 16 bytes, which a thread moves at once.
    """
    _, rows, groups, _ = tile.shape
    # Word i of group g in row r is word (r * groups + g) * words + i; i = first axis * k + second.
    at_once = min(words, 4)
    shape = words // at_once, at_once, rows, groups
    word = lax.broadcasted_iota(jnp.int32, shape, 0) * at_once
    word = word + lax.broadcasted_iota(jnp.int32, shape, 1)
    row = lax.broadcasted_iota(jnp.int32, shape, 2) * (groups * words)
    return row + lax.broadcasted_iota(jnp.int32, shape, 3) * words + word


def _half_quads(tile: "_Tile"):
    """The numbers of words that hold two 16-bit fields: int32[quads, R, groups, 2]."""
    quads, rows, groups, _ = tile.shape
    # Two words to a quad: word h of quad q is ((r * groups + g) * quads + q) * 2 + h.
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


_MOST_TO_DEAL = 2**17
"""The most super-groups that the counting sort orders. On an H100 (JAX 0.11.2) it takes 19, 43 and
243 us for 2^15, 2^17 and 2^20 super-groups; XLA's sort takes 46, 43 and 50 us."""
_MOST_MEMBERS = 512
"""The most super-groups whose energies a program averages. Halving 4,096 of them six times
takes Triton's compiler 70 s on an H100's host (JAX 0.11.2); 512 take one second."""


def call_options(name: str, interpret: bool) -> dict[str, Any]:
    """The options of every launch of the kernel ``name``."""
    options = {"name": f"dynamiq_{name}", "interpret": interpret}
    if interpret:
        return options
    tuning = tuning_for(name)
    params = plgpu.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
    return {**options, "compiler_params": params}


@dataclass(frozen=True)
class _Tile:
    """The `pallas_kernels.tile.Tile` of Triton."""

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
        """Row and column indices [quads, R, groups, QUAD] of the coordinates of ``rows[R]``."""
        # Four groups take quads in turn: group g begins at quad g % 4 of its four's coordinates,
        # and each next quad comes four quads later.
        four, group = _divmod(lax.broadcasted_iota(jnp.int32, self.shape, 2), DEALT)
        column = four * (DEALT * self.fmt.group_size) + group * QUAD
        column = column + lax.broadcasted_iota(jnp.int32, self.shape, 0) * (DEALT * QUAD)
        column = column + lax.broadcasted_iota(jnp.int32, self.shape, 3)
        return jnp.broadcast_to(rows[None, :, None, None], self.shape), column

    def load(self, x_ref, rows, n_rows):
        row, column = self._coordinates(rows)
        return plgpu.load(x_ref.at[row, column], mask=row < n_rows, other=0.0)

    def pinned(self, x, width):
        if not self.interpret:
            # The comment makes the branches' code different.
            x = _asm(f"mov.b32 $0, $1; // {width}", x, dtype=x.dtype)
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
        # Quads are numbered through all super-groups, and in one by group: group * quads + quad.
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

    def if_any(self, of_groups, run, otherwise):
        found = jnp.max(jnp.max(of_groups.astype(jnp.int32), axis=1), axis=0)
        return lax.cond(found > 0, run, otherwise)


@dataclass(frozen=True)
class Triton:
    """The `pallas_kernels.kernels.Lowering` of Triton."""

    interpret: bool = False
    """Whether kernels run on Pallas' interpreter."""

    def tile(self, fmt, table_ref, tiles):
        """The tile of the running program."""
        t, c = pl.program_id(0), pl.program_id(1)
        return _Tile(fmt, table_ref, self.interpret, t, c)

    def programs(self, launch: Launch) -> int:
        """The programs of a chunk."""
        return launch.tiles

    def launch(self, launch: Launch, operands):
        """The result of a launch; an aliased operand only holds what other calls wrote."""
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
            grid=(self.programs(launch), launch.chunks),
            in_specs=[whole] * len(operands),
            out_specs=whole,
            input_output_aliases=aliases,
            **call_options(launch.name, self.interpret),
        )(*operands)

    def statistics(self, x, super_group_size):
        """Mean and squared norm of every super-group."""
        return _statistics(x, super_group_size, self.interpret)

    def deal(self, energy, taken, upgrades, shape):
        """See `pallas_kernels.deal`; XLA's sort is faster for many super-groups."""
        members = TILE_ROWS * shape[0] // energy.shape[0]
        if energy.size > _MOST_TO_DEAL or members > _MOST_MEMBERS:
            return reference.deal(energy, taken, upgrades, shape)
        names = "count", "begin", "width"
        sizes = tuple(tuning_for(f"deal_{name}").rows_per_program for name in names)
        return _deal(energy, taken, upgrades, shape, sizes, self.interpret)


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
            **call_options("statistics", interpret),
        )(rows)
    )


# The plan takes five launches. The first three are a counting sort: blocks of super-groups count
# their levels; columns of levels compute where each block's levels begin; blocks place their
# super-groups. Then tiles add up their energies and count their levels, and these counts determine
# their widths.
#
# A block counts levels below the end of its own largest octave, since no program knows yet the end
# for its shard (see `pallas_kernels.format`). The difference between the ends moves all levels of
# the block by the same number, down to the last level.


def _level(energy, end):
    """`steps_below` with one end for all."""
    return jnp.clip(end - octave_parts(energy), 0, ENERGY_LEVELS - 1)


def _steps(energy_ref, at, shard, end=None):
    """Energies of super-groups ``at``, levels below ``end``, and ``end``, by default theirs."""
    energy = plgpu.load(energy_ref.at[shard, at], mask=at < energy_ref.shape[1], other=0.0)
    if end is None:
        end = jnp.max(octave_parts(energy)) | ((1 << MANTISSA_BITS) - 1)
    return energy, _level(energy, end), end


def _counts_below(level, inside):
    """For each level, how many entries ``inside`` have a lower level: int32[ENERGY_LEVELS]."""
    level = jnp.where(inside, level, ENERGY_LEVELS)
    every = lax.broadcasted_iota(jnp.int32, (*level.shape, ENERGY_LEVELS), 1)
    return jnp.sum((level[:, None] < every).astype(jnp.int32), axis=0)


def _count_kernel(energy_ref, below_ref, end_ref, *, size, per_shard):
    block, shard = pl.program_id(0), pl.program_id(1)
    at = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
    _, level, end = _steps(energy_ref, at, shard)
    below = _counts_below(level, at < per_shard)
    plgpu.store(below_ref.at[shard, block, pl.ds(0, ENERGY_LEVELS)], below)
    end_ref[shard, block] = end


def _begin_kernel(below_ref, ends_ref, begin_ref, end_ref, *, size, per_shard, at_once, levels):
    """Where ``levels`` levels begin in every block; handles ``at_once`` blocks at a time."""
    column, shard = pl.program_id(0), pl.program_id(1)
    blocks = below_ref.shape[1]
    parts = -(-blocks // at_once)

    def fold(body, init):
        return body(0, init) if parts == 1 else lax.fori_loop(0, parts, body, init)

    def ends(part):
        block = part * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
        return plgpu.load(ends_ref.at[shard, block], mask=block < blocks, other=0)

    end = fold(lambda part, so_far: jnp.maximum(so_far, jnp.max(ends(part))), jnp.int32(0))
    shape = at_once, levels
    level = column * levels + lax.broadcasted_iota(jnp.int32, shape, 1)

    def blocks_of(part):
        return part * at_once + lax.broadcasted_iota(jnp.int32, shape, 0)

    def below(part, further):
        """For each block, how many super-groups lie before the levels ``level + further``."""
        # A block counted from its own end: the shard's level l is the block's level l - moved.
        block = blocks_of(part)
        moved = jnp.broadcast_to((end - ends(part))[:, None], shape)
        at = jnp.clip(level + further - moved, 0, ENERGY_LEVELS - 1)
        count = plgpu.load(below_ref.at[shard, block, at], mask=block < blocks, other=0)
        # Nothing lies further below than the last level.
        every = jnp.clip(per_shard - block * size, 0, size)
        return jnp.where(level + further == ENERGY_LEVELS, every, count)

    def place(part, so_far):
        lower = below(part, 0)
        own = below(part, 1) - lower  # super-groups of each block on each level
        begin = so_far[None] + jnp.cumsum(own, axis=0) - own  # after those of earlier blocks
        block = blocks_of(part)
        plgpu.store(begin_ref.at[shard, block, level], begin, mask=block < blocks)
        return so_far + jnp.sum(own, axis=0)

    zeros = jnp.zeros(levels, jnp.int32)
    fold(place, fold(lambda part, so_far: so_far + jnp.sum(below(part, 0), axis=0), zeros))
    end_ref[shard, 0] = end


def _place_kernel(
    energy_ref, begin_ref, end_ref, order_ref, sorted_ref, *, size, per_shard, shards
):  # fmt: skip
    block, shard = pl.program_id(0), pl.program_id(1)
    rows, shard_chunks = energy_ref.shape[1], order_ref.shape[0] // shards
    at = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
    energy, level, _ = _steps(energy_ref, at, shard, end_ref[shard, 0])
    begin = plgpu.load(begin_ref.at[shard, block, level])
    # The rank: where the block's level begins, plus the equal levels earlier in the block.
    one, other = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    earlier = (level[:, None] == level[None]) & (other < one)
    rank = begin + jnp.sum(earlier.astype(jnp.int32), axis=1)
    # Padding has the last numbers of all.
    spare = shards * rows + shard * (per_shard - rows) + at - rows
    number = jnp.where(at < rows, shard * rows + at, spare)
    chunk, position = shard * shard_chunks + rank % shard_chunks, rank // shard_chunks
    plgpu.store(order_ref.at[chunk, position], number, mask=at < per_shard)
    plgpu.store(sorted_ref.at[shard, rank], energy, mask=at < per_shard)


def _level_kernel(sorted_ref, end_ref, energy_ref, tiles_of_ref, *, size, at_once):
    """Mean energies of ``at_once`` tiles of ``size`` super-groups, and how many lie before levels.

    Levels of tiles ascend. So a program stores the counts for levels after the level of the
    previous program's last tile, up to the level of its own last tile.
    """
    part, shard = pl.program_id(0), pl.program_id(1)
    tiles, end, start = energy_ref.shape[1], end_ref[shard, 0], part * at_once

    def tiles_from(first, count):
        """Energies and levels of ``count`` tiles; tiles beyond the end have the last level."""
        tile = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
        member = lax.broadcasted_iota(jnp.int32, (count, padded_count(size)), 1)
        inside = (tile < tiles)[:, None] & (member < size)
        # Tile t has ranks t * size and on; its first and last member bound its level.
        at = tile[:, None] * size + member
        energy = mean_of(plgpu.load(sorted_ref.at[shard, at], mask=inside, other=0.0), size)
        ends = (_steps(sorted_ref, tile * size + at, shard, end)[1] for at in (0, size - 1))
        return energy, jnp.clip(_level(energy, end), *ends)

    energy, level = tiles_from(start, at_once)
    tile = start + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
    plgpu.store(energy_ref.at[shard, tile], energy, mask=tile < tiles)
    before = jnp.where(start == 0, -1, jnp.max(tiles_from(jnp.maximum(start - 1, 0), 1)[1]))
    last = jnp.where(start + at_once >= tiles, ENERGY_LEVELS, jnp.max(level))
    levels = lax.broadcasted_iota(jnp.int32, (ENERGY_LEVELS,), 0)
    count = start + _counts_below(level, tile < tiles)
    own = (before < levels) & (levels <= last)
    plgpu.store(tiles_of_ref.at[shard, pl.ds(0, ENERGY_LEVELS)], count, mask=own)


def _width_kernel(tiles_of_ref, taken_ref, *out_refs, upgrades: Upgrades, at_once):
    """Writes ``at_once`` tiles of a chunk; every program finds the states of its shard."""
    part, chunk = pl.program_id(0), pl.program_id(1)
    chunks, tiles = out_refs[0].shape
    shard = chunk // (chunks // tiles_of_ref.shape[0])
    tile = part * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
    states = taken_ref.shape[2] - 1
    state_of = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(states),), 0)

    def tiles_of(levels):
        """The number of tiles on the first ``levels`` levels."""
        count = plgpu.load(tiles_of_ref.at[shard, jnp.minimum(levels, ENERGY_LEVELS - 1)])
        return jnp.where(levels == ENERGY_LEVELS, tiles, count)

    # As `reference.widened`, whose comments explain the indices.
    for i, (out_ref, budget) in enumerate(zip(out_refs, upgrades.budgets, strict=True)):
        costs = [words[i] for words in upgrades.words]
        inside = state_of < states
        spent = jnp.where(inside, 0, max(budget, 0) + 1)
        for u, words in enumerate(costs):
            levels = plgpu.load(taken_ref.at[u, i, state_of], mask=inside, other=0)
            spent = spent + tiles_of(levels) * words
        state = jnp.maximum(jnp.sum((spent <= budget).astype(jnp.int32)) - 1, 0)
        now = [taken_ref[u, i, state] for u in range(len(costs))]
        upgraded = [tiles_of(levels) for levels in now]
        left = budget - sum(count * words for count, words in zip(upgraded, costs, strict=True))
        offset, width = tile * upgrades.tile_words, jnp.full_like(tile, upgrades.narrowest)
        for u, words in enumerate(costs):
            # The rest pays for a part of the next upgrade.
            more = lax.div(jnp.maximum(left, 0), jnp.int32(words))
            count = upgraded[u] + jnp.where(taken_ref[u, i, state + 1] > now[u], more, 0)
            offset = offset + jnp.minimum(tile, count) * words
            width = width + jnp.where(tile < count, upgrades.wider[u][i], 0)
        plgpu.store(out_ref.at[chunk, tile], pack_tiles(offset, width), mask=tile < tiles)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _deal(energy, taken, upgrades: Upgrades, shape, sizes, interpret: bool) -> Dealt:
    """Programs have ``sizes``: super-groups of a block, blocks of a column, tiles."""
    (shards, _), (chunks, chunk_size), (size, column, part) = energy.shape, shape, sizes
    per_shard, tiles = chunks * chunk_size // shards, chunk_size // TILE_ROWS
    blocks, levels = pl.cdiv(per_shard, size), 8  # of a column: 32 bytes
    column, part = (min(pl.next_power_of_2(n), m) for n, m in ((blocks, column), (tiles, part)))
    members = TILE_ROWS * chunks // shards
    together = min(_MOST_MEMBERS // padded_count(members), 128)

    def call(kernel, grid, outs, *operands, **static):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        name = kernel.__name__.removeprefix("_").removesuffix("_kernel")
        return pl.pallas_call(
            functools.partial(kernel, **static),
            out_shape=[shape_struct(*out, *operands) for out in outs],
            grid=grid,
            in_specs=[whole] * len(operands),
            out_specs=[whole] * len(outs),
            **call_options(f"deal_{name}", interpret),
        )(*operands)

    counts, end_shape = ((shards, blocks, ENERGY_LEVELS), jnp.int32), ((shards, 1), jnp.int32)
    of_levels = (shards, ENERGY_LEVELS), jnp.int32
    blocked = {"size": size, "per_shard": per_shard}
    outs = [counts, ((shards, blocks), jnp.int32)]
    below, ends = call(_count_kernel, (blocks, shards), outs, energy, **blocked)
    grid, outs = (ENERGY_LEVELS // levels, shards), [counts, end_shape]
    begin, end = call(
        _begin_kernel, grid, outs, below, ends, at_once=column, levels=levels, **blocked
    )
    outs = [(shape, jnp.int32), ((shards, per_shard), jnp.float32)]
    order, ranked = call(
        _place_kernel, (blocks, shards), outs, energy, begin, end, shards=shards, **blocked
    )
    grid, outs = (pl.cdiv(tiles, together), shards), [((shards, tiles), jnp.float32), of_levels]
    tile_energy, tiles_of = call(
        _level_kernel, grid, outs, ranked, end, size=members, at_once=together
    )
    grid, outs = (pl.cdiv(tiles, part), chunks), [((chunks, tiles), jnp.int32)] * len(upgrades[2])
    widths = call(_width_kernel, grid, outs, tiles_of, taken, upgrades=upgrades, at_once=part)
    return Dealt(order, tuple(widths), tile_energy)
