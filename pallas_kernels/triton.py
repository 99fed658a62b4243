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
from pallas_kernels.energy import ENERGY_LEVELS, MANTISSA_BITS, Dealt, Upgrades, octave_parts
from pallas_kernels.format import DEALT, QUAD, TILE_ROWS, WireFormat, pack_tiles, unpack_tiles
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

    def by_energy(self, energy, chunks, chunk_super_groups):
        """Super-groups in the order of their energy."""
        tuning = tuning_for("by_energy_count"), tuning_for("by_energy_begin")
        size, at_once = (of.rows_per_program for of in tuning)
        return _by_energy(energy, chunks, chunk_super_groups, size, at_once, self.interpret)

    def widened(self, tiles_of, taken, upgrades, shape):
        """Word offset and width of every tile."""
        at_once = tuning_for("widened").rows_per_program
        return _widened(tiles_of, taken, upgrades, shape, at_once, self.interpret)


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


# A counting sort in three launches. Blocks count their super-groups by levels below their own
# largest energy; columns of levels add up where the super-groups of a level and block begin; blocks
# place theirs. Counts are of *lower* levels: with the end of the shard's largest octave a block's
# levels move, and a count of all below a level moves with them.


def _steps(energy_ref, at, shard, end=None):
    """Levels of super-groups ``at`` below ``end``, the end of their own octave if none, and it."""
    energy = plgpu.load(energy_ref.at[shard, at], mask=at < energy_ref.shape[1], other=0.0)
    parts = octave_parts(energy)
    if end is None:
        end = jnp.max(parts) | ((1 << MANTISSA_BITS) - 1)
    return energy, jnp.clip(end - parts, 0, ENERGY_LEVELS - 1), end


def _count_kernel(energy_ref, below_ref, end_ref, *, size, per_shard):
    block, shard = pl.program_id(0), pl.program_id(1)
    at = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
    _, step, end = _steps(energy_ref, at, shard)
    step = jnp.where(at < per_shard, step, ENERGY_LEVELS)  # beyond: below no level
    level = lax.broadcasted_iota(jnp.int32, (size, ENERGY_LEVELS), 1)
    below = jnp.sum((step[:, None] < level).astype(jnp.int32), axis=0)
    level = lax.broadcasted_iota(jnp.int32, (ENERGY_LEVELS,), 0)
    plgpu.store(below_ref.at[shard, block, level], below)
    end_ref[shard, block] = end


def _begin_kernel(below_ref, ends_ref, begin_ref, end_ref, *, size, per_shard, at_once, levels):
    """Where super-groups begin, of ``levels`` levels and all blocks, ``at_once`` of them."""
    column, shard = pl.program_id(0), pl.program_id(1)
    blocks = below_ref.shape[1]

    def each(body, init):
        return body(0, init) if at_once >= blocks else lax.fori_loop(0, parts, body, init)

    parts = -(-blocks // at_once)

    def ends(part):
        block = part * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
        return block, plgpu.load(ends_ref.at[shard, block], mask=block < blocks, other=0)

    end = each(lambda part, so_far: jnp.maximum(so_far, jnp.max(ends(part)[1])), jnp.int32(0))
    shape = at_once, levels
    level = column * levels + lax.broadcasted_iota(jnp.int32, shape, 1)

    def count(part, step):
        """How many super-groups of a block are of levels before ``level + step``."""
        block, own = ends(part)
        moved = jnp.broadcast_to((end - own)[:, None], shape)
        block = part * at_once + lax.broadcasted_iota(jnp.int32, shape, 0)
        at = jnp.maximum(level + step - moved, 0)
        at = jnp.minimum(at, ENERGY_LEVELS - 1)
        below = plgpu.load(below_ref.at[shard, block, at], mask=block < blocks, other=0)
        if step:  # nothing lies further below than the last level
            every = jnp.clip(per_shard - block * size, 0, size)
            below = jnp.where(level + step == ENERGY_LEVELS, every, below)
        return block, below

    first = each(
        lambda part, so_far: so_far + jnp.sum(count(part, 0)[1], axis=0),
        jnp.zeros(levels, jnp.int32),
    )

    def place(part, so_far):
        block, below = count(part, 0)
        own = count(part, 1)[1] - below
        earlier = jnp.cumsum(own, axis=0) - own
        where = begin_ref.at[shard, block, level]
        plgpu.store(where, so_far[None] + earlier, mask=block < blocks)
        return so_far + jnp.sum(own, axis=0)

    each(place, first)
    end_ref[shard, 0] = end


def _place_kernel(
    energy_ref, begin_ref, end_ref, order_ref, sorted_ref, *, size, per_shard, shards
):  # fmt: skip
    block, shard = pl.program_id(0), pl.program_id(1)
    rows, shard_chunks = energy_ref.shape[1], order_ref.shape[0] // shards
    at = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
    energy, step, _ = _steps(energy_ref, at, shard, end_ref[shard, 0])
    inside = at < per_shard
    begin = plgpu.load(begin_ref.at[shard, block, step])
    shape = size, size
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    earlier = (step[:, None] == step[None]) & (column < row)
    rank = begin + jnp.sum(earlier.astype(jnp.int32), axis=1)
    spare = shards * rows + shard * (per_shard - rows) + at - rows
    number = jnp.where(at < rows, shard * rows + at, spare)
    chunk, position = shard * shard_chunks + rank % shard_chunks, rank // shard_chunks
    plgpu.store(order_ref.at[chunk, position], number, mask=inside)
    plgpu.store(sorted_ref.at[shard, rank], energy, mask=inside)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _by_energy(
    energy, chunks: int, chunk_super_groups: int, size: int, at_once: int, interpret: bool
) -> Dealt:
    """With blocks of ``size`` super-groups, whose counts are added up ``at_once`` blocks a time."""
    shards, levels = energy.shape[0], 8  # of a column: 32 bytes
    per_shard = chunks * chunk_super_groups // shards
    blocks = pl.cdiv(per_shard, size)

    def call(kernel, name, grid, outs, *operands, **static):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            functools.partial(kernel, per_shard=per_shard, size=size, **static),
            out_shape=[shape_struct(shape, dtype, *operands) for shape, dtype in outs],
            grid=(grid, shards),
            in_specs=[whole] * len(operands),
            out_specs=[whole] * len(outs),
            **_options(f"by_energy_{name}", interpret),
        )(*operands)

    counts = (shards, blocks, ENERGY_LEVELS), jnp.int32
    below, ends = call(
        _count_kernel, "count", blocks, [counts, ((shards, blocks), jnp.int32)], energy
    )
    begin, end = call(
        _begin_kernel, "begin", ENERGY_LEVELS // levels, [counts, ((shards, 1), jnp.int32)], below,
        ends, at_once=min(pl.next_power_of_2(blocks), at_once), levels=levels,
    )  # fmt: skip
    outs = [((chunks, chunk_super_groups), jnp.int32), ((shards, per_shard), jnp.float32)]
    order, energy = call(_place_kernel, "place", blocks, outs, energy, begin, end, shards=shards)
    return Dealt(order, energy, end)


def _widened_kernel(tiles_of_ref, taken_ref, *out_refs, upgrades: Upgrades, at_once):
    """Tiles of one chunk, ``at_once`` of them; every program finds the state of its shard."""
    part, chunk = pl.program_id(0), pl.program_id(1)
    chunks, tiles = out_refs[0].shape
    shard = chunk // (chunks // tiles_of_ref.shape[0])
    tile = part * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
    states = taken_ref.shape[2] - 1
    state_of = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(states),), 0)
    for i, (out_ref, budget) in enumerate(zip(out_refs, upgrades.budgets, strict=True)):
        costs = [words[i] for words in upgrades.words]
        inside = state_of < states
        spent = jnp.where(inside, 0, budget + 1)
        for u, words in enumerate(costs):
            levels = plgpu.load(taken_ref.at[u, i, state_of], mask=inside, other=0)
            spent = spent + plgpu.load(tiles_of_ref.at[shard, levels]) * words
        state = jnp.maximum(jnp.sum((spent <= budget).astype(jnp.int32)) - 1, 0)
        now = [taken_ref[u, i, state] for u in range(len(costs))]
        upgraded = [tiles_of_ref[shard, levels] for levels in now]
        left = budget - sum(count * words for count, words in zip(upgraded, costs, strict=True))
        offset, width = tile * upgrades.tile_words, jnp.full_like(tile, upgrades.narrowest)
        for u, words in enumerate(costs):
            # What is left pays for the next upgrade in part.
            more = lax.div(jnp.maximum(left, 0), jnp.int32(words))
            more = jnp.where(taken_ref[u, i, state + 1] > now[u], more, 0)
            offset = offset + jnp.minimum(tile, upgraded[u] + more) * words
            width = width + jnp.where(tile < upgraded[u] + more, upgrades.wider[u][i], 0)
        plgpu.store(out_ref.at[chunk, tile], pack_tiles(offset, width), mask=tile < tiles)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _widened(tiles_of, taken, upgrades: Upgrades, shape, at_once: int, interpret: bool):
    at_once = min(pl.next_power_of_2(shape[1]), at_once)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    count = len(upgrades.budgets)
    return tuple(
        pl.pallas_call(
            functools.partial(_widened_kernel, upgrades=upgrades, at_once=at_once),
            out_shape=[shape_struct(shape, jnp.int32, tiles_of)] * count,
            grid=(pl.cdiv(shape[1], at_once), shape[0]),
            in_specs=[whole] * 2,
            out_specs=[whole] * count,
            **_options("widened", interpret),
        )(tiles_of, taken)
    )
