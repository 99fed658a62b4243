"""Pallas' Mosaic GPU lowering of the kernels, for NVIDIA GPUs from Hopper on.

A program is a warpgroup of 128 threads. Each thread holds a group, and warps may have different
tiles. Coordinates are [quads, 128, QUAD], where the middle axis is that of threads; groups and
super-groups are [128]. Under the layouts named here, Mosaic GPU keeps these arrays, and all
arithmetic on them, in the registers of their threads. Inline code does what Mosaic GPU has no
primitive for: memory access at a separate index for each thread, maxima over a thread's registers
and over neighbouring threads, and broadcasts of a group's value to its coordinates.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import reference
from pallas_kernels._compat import typed_by_operands
from pallas_kernels.backend import WARP
from pallas_kernels.format import DEALT, QUAD, TILE_ROWS, WireFormat, unpack_tiles
from pallas_kernels.kernels import Launch, rows_of
from pallas_kernels.tile import as_word

THREADS = 128

_REF = plgpu.RefType()
_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _words_layout(count: int):
    """Layout of [count, 128]: ``count`` words for each thread."""
    return plgpu.Layout.WG_STRIDED((count, THREADS), vec_size=1)


def _coordinates_layout(quads: int):
    """Layout of [quads, 128, QUAD]: ``quads`` for each thread."""
    return plgpu.Layout.WG_STRIDED((quads, THREADS, QUAD), vec_size=QUAD)


def _i32():
    return ir.IntegerType.get_signless(32)


def _constant(value: int):
    """``value`` modulo 2^32."""
    value &= 0xFFFFFFFF
    return arith.constant(_i32(), value - (value >> 31 << 32))


def _of_vector(values) -> list:
    """The values in a vector."""
    count = values.type.shape[0]
    at: dict[str, Any] = {"dynamic_position": []}
    return [vector.extract(values, **at, static_position=[i]) for i in range(count)]


def _vector(values: list):
    """The inverse of `_of_vector`."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def _bitcast(values: list, kind) -> list:
    """Values of the type ``kind`` with the bits of ``values``."""
    bits = len(values) * mgpu.utils.bitwidth(values[0].type)
    to = ir.VectorType.get((bits // mgpu.utils.bitwidth(kind),), kind)
    return _of_vector(vector.bitcast(to, _vector(values)))


def _values(array) -> list:
    """The values of an array that a thread holds, in order."""
    return [value for register in array.registers.flat for value in _of_vector(register)]


def _inline(arguments: tuple, layout=None, shape: tuple[int, ...] = (), dtype: Any = None):
    """Makes a function of arrays from code on one thread's values.

    For each argument the code gets a memory reference or the thread's values. It returns the
    thread's values of the result, [*shape] under ``layout``; without a layout it has no result.
    """
    out = None if layout is None else plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)

    def decorate(code: Callable) -> Callable[..., Any]:
        @plgpu.inline_mgpu(arg_types=arguments, return_type=out)
        def run(_, *args):
            found = code(*(_values(a) if isinstance(a, mgpu.FragmentedArray) else a for a in args))
            if layout is None:
                return None
            per = layout.to_mgpu().vec_size
            registers = np.empty(len(found) // per, object)
            for i in range(len(registers)):
                registers[i] = _vector(found[i * per : (i + 1) * per])
            signed = jnp.issubdtype(dtype, jnp.signedinteger)
            signed = None if jnp.issubdtype(dtype, jnp.floating) else signed
            return mgpu.FragmentedArray(
                _registers=registers, _layout=layout.to_mgpu(), _is_signed=signed
            )

        def call(*args):
            pairs = zip(args, arguments, strict=True)
            return run(*(a if t is _REF else plgpu.layout_cast(a, t) for a, t in pairs))

        return call

    return decorate


def _address(ref, index, size: int, byte=None):
    """The i64 address ``byte`` bytes after item ``index``; an item has ``size`` bytes."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.muli(arith.extsi(i64, index), arith.constant(i64, size))
    at = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), at)
    return at if byte is None else arith.addi(at, arith.extsi(i64, byte))


def _ptx(code: str, constraints: str, result, *args, effects: bool = False) -> Any:
    return llvm.inline_asm(result, list(args), code, constraints, has_side_effects=effects)


def _names(count: int, first: int) -> tuple[str, str]:
    """PTX for ``count`` registers from ``$first`` on: ``.v2`` and ``{$0, $1}``, for example."""
    names = ", ".join(f"${first + i}" for i in range(count))
    return (f".v{count}", "{" + names + "}") if count > 1 else ("", names)


def _load(address, count: int, wanted=None, fresh: bool = False) -> list:
    """Loads ``count`` <= 4 words, 0 unless ``wanted``; this kernel may write ``fresh`` ones."""
    form, names = _names(count, 0)
    result = _i32() if count == 1 else llvm.StructType.get_literal([_i32()] * count)
    code = f"ld.global{'' if fresh else '.nc'}{form}.b32 {names}, [${count}];"
    if wanted is None:
        constraints = ",".join(["=r"] * count + ["l"])
        found = _ptx(code, constraints, result, address, effects=fresh)
    else:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        code = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {code} }}"
        constraints = ",".join(["=&r"] * count + ["l", "r"])  # outputs are written first
        found = _ptx(code, constraints, result, address, wanted)
    if count == 1:
        return [found]
    return [llvm.extractvalue(_i32(), found, [i]) for i in range(count)]


def _store(address, words: list, wanted=None) -> None:
    """Writes at most 4 words, unless the i32 ``wanted`` is 0."""
    form, names = _names(len(words), 1)
    code = f"st.global{form}.b32 [$0], {names};"
    constraints, void = ["l"] + ["r"] * len(words), ir.Type.parse("!llvm.void")
    if wanted is not None:
        code = f"{{ .reg .pred p; setp.ne.b32 p, ${len(words) + 1}, 0; @p {code} }}"
        constraints, words = [*constraints, "r"], [*words, wanted]
    _ptx(code, ",".join(constraints), void, address, *words, effects=True)


def _after(address, count: int):
    return arith.addi(address, arith.constant(address.type, count))


def threads():
    """The numbers of a block's threads, int32[128]."""
    return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_PER_THREAD)


def _load_item(ref, index, fresh: bool = False):
    """Loads 32-bit items at int32[128]: [128]; ``fresh`` as for `_load`."""
    dtype = ref.dtype

    @_inline((_REF, _PER_THREAD), _PER_THREAD, (THREADS,), dtype)
    def load(ref, index):
        (found,) = _load(_address(ref, index[0], 4), 1, fresh=fresh)
        return [arith.bitcast(ir.F32Type.get(), found) if dtype == jnp.float32 else found]

    return load(ref, index)


def _load_field(ref, word, number, bits: int, fresh: bool):
    """Loads field ``number``, of 8 or 16 bits, after ``word``, both int32[128]: uint32[128]."""
    space = "global" if fresh else "global.nc"

    @_inline((_REF, _PER_THREAD, _PER_THREAD), _PER_THREAD, (THREADS,), jnp.uint32)
    def load(ref, word, byte):
        address = _address(ref, word[0], 4, byte[0])
        code = f"{{ .reg .b16 h; ld.{space}.u{bits} h, [$1]; cvt.u32.u{bits} $0, h; }}"
        return [_ptx(code, "=r,l", _i32(), address, effects=fresh)]

    return load(ref, word, number * (bits // 8))


def _store_field(ref, word, number, fields, bits: int) -> None:
    """The inverse of `_load_field`."""

    @_inline((_REF, _PER_THREAD, _PER_THREAD, _PER_THREAD))
    def store(ref, word, byte, fields):
        address = _address(ref, word[0], 4, byte[0])
        code = f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.u{bits} [$0], h; }}"
        void = ir.Type.parse("!llvm.void")
        _ptx(code, "l,r", void, address, fields[0], effects=True)

    store(ref, word, number * (bits // 8), fields)


def _load_words(ref, word, count: int, at_once: int, fresh: bool):
    """Loads ``count`` words from ``word``, int32[128], on: uint32[count, 128]."""
    at_once = min(at_once, count)

    @_inline((_REF, _PER_THREAD), _words_layout(count), (count, THREADS), jnp.uint32)
    def load(ref, word):
        address = _address(ref, word[0], 4)
        starts = range(0, count, at_once)
        return [w for i in starts for w in _load(_after(address, 4 * i), at_once, fresh=fresh)]

    return load(ref, word)


def _store_words(ref, word, words, at_once: int) -> None:
    """The inverse of `_load_words`."""
    count = words.shape[0]
    at_once = min(at_once, count)

    @_inline((_REF, _PER_THREAD, _words_layout(count)))
    def store(ref, word, words):
        address = _address(ref, word[0], 4)
        for i in range(0, count, at_once):
            _store(_after(address, 4 * i), words[i : i + at_once])

    store(ref, word, words)


def _joined(fields, count: int):
    """Joins uint32[quads, 128, QUAD] fields, at their places in words: uint32[count, 128]."""
    quads = fields.shape[0]

    @_inline((_coordinates_layout(quads),), _words_layout(count), (count, THREADS), jnp.uint32)
    def join(fields):
        each = len(fields) // count
        parts = [fields[i * each : (i + 1) * each] for i in range(count)]
        return [functools.reduce(arith.ori, part) for part in parts]

    return join(fields)


def _spread(x, quads: int):
    """Broadcasts [128] or [count, 128] to coordinates that share a value: [quads, 128, QUAD]."""
    layout = _PER_THREAD if x.ndim == 1 else _words_layout(x.shape[0])

    @_inline((layout,), _coordinates_layout(quads), (quads, THREADS, QUAD), x.dtype)
    def spread(values):
        total = quads * QUAD
        return [values[i * len(values) // total] for i in range(total)]

    return spread(x)


def _static(quads: int, value: Callable[[int], int]):
    """uint32[quads, 128, QUAD] of constants: ``value(i)`` for coordinate i of a group."""

    @_inline((), _coordinates_layout(quads), (quads, THREADS, QUAD), jnp.uint32)
    def constants():
        return [_constant(value(i)) for i in range(quads * QUAD)]

    return constants()


def _store_item(ref, index, value, wanted) -> None:
    """Writes f32[128] to items at int32[128], except where int32[128] ``wanted`` is 0."""

    @_inline((_REF, _PER_THREAD, _PER_THREAD, _PER_THREAD))
    def store(ref, index, value, wanted):
        _store(_address(ref, index[0], 4), _bitcast(value, _i32()), wanted[0])

    store(ref, index, value, wanted)


def _over_group(operation: Callable, values):
    """Folds the coordinates of each thread's group, f32[quads, 128, QUAD]: f32[128]."""

    @_inline((_coordinates_layout(values.shape[0]),), _PER_THREAD, (THREADS,), jnp.float32)
    def fold(values):
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [operation(*pair) for pair in pairs]
        return values

    return fold(values)


def _over_row(operation: Callable, of_groups, groups: int):
    """Folds the values of ``groups`` neighbouring threads; all of them get it: f32[128]."""

    @_inline((_PER_THREAD,), _PER_THREAD, (THREADS,), jnp.float32)
    def fold(values):
        (value,), distance = values, 1
        while distance < groups:
            value = operation(value, mgpu.utils.shfl_bfly(value, distance))
            distance *= 2
        return [value]

    return fold(of_groups)


def _asm(code: str, *given, layout):
    """PTX that computes an f32, ``$0``, from f32 arrays of equal shapes: ``$1``, ``$2``, ..."""
    constraints = "=f" + ",f" * len(given)

    @_inline((layout,) * len(given), layout, given[0].shape, jnp.float32)
    def run(*values):
        each = zip(*values, strict=True)
        return [_ptx("{" + code + "}", constraints, ir.F32Type.get(), *v) for v in each]

    return run(*given)


def _scalar(x):
    """int32[128] as a scalar. Warps may have different scalars, which may only choose a branch."""
    layout = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(_PER_THREAD,), return_type=plgpu.ShapeDtypeStruct((), x.dtype, layout=layout)
    )
    def first(_, x) -> Any:
        return mgpu.FragmentedArray.splat(_values(x)[0], shape=(), is_signed=True)

    return cast(Callable[..., Any], first)(x)


class _Payload(NamedTuple):
    """A `pallas_kernels.tile.Payload`: the words of a reference from ``start`` on."""

    ref: Any
    start: Any
    tile: "_Tile"
    fresh: bool = False
    """Whether the running kernel writes it."""

    @property
    def _at_once(self) -> int:
        """Words that a thread moves at once: up to 16 bytes, as payloads are aligned."""
        return math.gcd(self.ref.shape[-1], 4)

    def load_row_scales(self, offset):
        return _load_field(self.ref, self.start + offset, self.tile.row, 16, self.fresh)

    def store_row_scales(self, offset, fields):
        _store_field(self.ref, self.start + offset, self.tile.row, fields, 16)

    def load_group_scales(self, offset, bits):
        return _load_field(self.ref, self.start + offset, self.tile.group, bits, self.fresh)

    def store_group_scales(self, offset, fields, bits):
        _store_field(self.ref, self.start + offset, self.tile.group, fields, bits)

    def _places(self, bits: int):
        """The shift of every coordinate's field in its word."""
        return _static(self.tile.quads, lambda i: i * bits % 32)

    def load_plane(self, offset, bits):
        tile, start = self.tile, self.start + offset
        size = tile.fmt.group_size * bits  # bits of a group: a part of a word, or whole words
        if size < 32:
            words = _load_field(self.ref, start, tile.group, size, self.fresh)
        else:
            count = size // 32
            first = start + tile.group * count
            words = _load_words(self.ref, first, count, self._at_once, self.fresh)
        return _spread(words, tile.quads) >> self._places(bits)

    def store_plane(self, offset, fields, bits):
        tile, start = self.tile, self.start + offset
        size = tile.fmt.group_size * bits
        count = max(size // 32, 1)
        words = _joined(fields << self._places(bits), count)
        if size < 32:
            _store_field(self.ref, start, tile.group, words.reshape(THREADS), size)
        else:
            _store_words(self.ref, start + tile.group * count, words, self._at_once)


@dataclass(frozen=True)
class _Tile:
    """The `pallas_kernels.tile.Tile` of Mosaic GPU."""

    fmt: WireFormat
    table: Any
    """The reference of `level_tables`."""
    t: Any
    """Each thread's tile in its chunk: int32[128]."""
    group: Any
    """Each thread's group in its tile: int32[128]."""
    c: Any
    fresh: bool = False
    """Whether the running kernel writes the payloads."""

    @property
    def quads(self) -> int:
        """Quads of a group."""
        return self.fmt.group_size // QUAD

    @property
    def row(self):
        """Each thread's super-group in its tile: int32[128]."""
        return self.group // self.fmt.groups

    def rows(self, order_ref, chunk):
        first = chunk * order_ref.shape[1]
        return _load_item(order_ref, first + self.t * TILE_ROWS + self.row)

    def by_width(self, tiles_ref, chunk, branch, *operands):
        entry = _load_item(tiles_ref, chunk * tiles_ref.shape[1] + self.t)
        (offset, width), widths = unpack_tiles(entry), self.fmt.widths
        branches = [branch(offset, w) for w in widths]
        if len(widths) == 1:
            return branches[0](*operands)
        # Nested conditions would be lowered repeatedly.
        number = sum((width > w).astype(jnp.int32) for w in widths[:-1])
        return lax.switch(_scalar(number), branches, *operands)

    def _first_quad(self, rows):
        """The first quad, in the flat array, of each thread's group of ``rows``.

        It counts quads, since an int32 cannot number 2^31 coordinates.
        """
        group = self.group % self.fmt.groups
        column = group // DEALT * (DEALT * self.quads) + group % DEALT
        return rows * (self.fmt.super_group_size // QUAD) + column

    def load(self, x_ref, rows, n_rows):
        dtype, quads = x_ref.dtype, self.quads
        size = QUAD * dtype.itemsize

        @_inline(
            (_REF, _PER_THREAD, _PER_THREAD),
            _coordinates_layout(quads), (quads, THREADS, QUAD), dtype,
        )  # fmt: skip
        def load(ref, quad, inside):
            address, found = _address(ref, quad[0], size), []
            kind = mgpu.utils.dtype_to_ir_type(dtype)
            for q in range(quads):
                words = _load(_after(address, q * DEALT * size), size // 4, inside[0])
                found += _bitcast(words, kind)
            return found

        inside = (rows < n_rows).astype(jnp.int32)
        return load(x_ref, self._first_quad(rows), inside)

    def pinned(self, x, width):
        layout, is_bf16 = _coordinates_layout(self.quads), x.dtype == jnp.bfloat16
        f32 = jnp.float32

        @_inline((layout,), layout, x.shape, f32 if is_bf16 else x.dtype)
        def pin(values):
            # The comment makes the branches' code different.
            code, words = f"mov.b32 $0, $1; // {width}", _bitcast(values, _i32())
            words = [_ptx(code, "=r,r", _i32(), word) for word in words]
            if not is_bf16:
                return _bitcast(words, values[0].type)
            # A word holds two bf16, and a bf16 is the high half of an f32.
            low = [arith.shli(word, _constant(16)) for word in words]
            high = [arith.andi(word, _constant(0xFFFF0000)) for word in words]
            pairs = zip(low, high, strict=True)
            return _bitcast([word for pair in pairs for word in pair], ir.F32Type.get())

        return pin(x).astype(f32)

    def load_rows(self, ref, rows):
        return self.to_coordinates(_load_item(ref, rows))

    def store(self, out_ref, rows, values):
        dtype, quads = jnp.dtype(out_ref.dtype), self.quads
        size = QUAD * dtype.itemsize

        @_inline((_REF, _PER_THREAD, _PER_THREAD, _coordinates_layout(quads)))
        def store(ref, quad, inside, values):
            address = _address(ref, quad[0], size)
            for q in range(quads):
                words = _bitcast(values[q * QUAD : (q + 1) * QUAD], _i32())
                _store(_after(address, q * DEALT * size), words, inside[0])

        inside = (rows >= 0) & (rows < out_ref.shape[0])
        store(out_ref, self._first_quad(rows), inside.astype(jnp.int32), values.astype(dtype))

    def payload(self, ref, where):
        number = where[0]
        for position, size in zip(where[1:], ref.shape[1:-1], strict=True):
            number = number * size + position
        return _Payload(ref, number * ref.shape[-1], self, self.fresh)

    def levels(self, at):
        layout = _coordinates_layout(self.quads)

        @_inline((_REF, layout), layout, at.shape, jnp.float32)
        def load(ref, at):
            words = [_load(_address(ref, i, 4), 1)[0] for i in at]
            return [arith.bitcast(ir.F32Type.get(), word) for word in words]

        return load(self.table, at)

    def inverse(self, x):
        # As ``rcp.rn``, without its branch for very large and very small numbers.
        return _asm(
            """.reg .f32 guess, error;
            rcp.approx.ftz.f32 guess, $1;
            fma.rn.f32 error, $1, guess, 0fBF800000;
            neg.f32 error, error;
            fma.rn.f32 $0, guess, error, guess;""",
            x,
            layout=_PER_THREAD,
        )

    def magnitude_plus(self, x, c):
        # PTX keeps the |x| of a product from becoming part of a multiply-add.
        code = ".reg .f32 m; abs.f32 m, $1; add.rn.f32 $0, m, $2;"
        return _asm(code, x, jnp.broadcast_to(c, x.shape), layout=_coordinates_layout(self.quads))

    def ceil(self, x):
        whole = x.astype(jnp.int32)
        return whole + jnp.where(whole.astype(jnp.float32) < x, 1, 0)

    def zeros(self):
        zeros = jnp.zeros((self.quads, THREADS, QUAD), jnp.float32)
        return plgpu.layout_cast(zeros, _coordinates_layout(self.quads))

    def shifts(self, bits):
        return _static(self.quads, lambda i: i % QUAD * bits)

    def counters(self, rows):
        group = (self.group % self.fmt.groups).astype(jnp.uint32)
        first = rows.astype(jnp.uint32) * as_word(self.fmt.super_group_size // QUAD)
        first = first + group * as_word(self.quads)
        return _spread(first, self.quads) + _static(self.quads, lambda i: i // QUAD)

    def group_max(self, values):
        return _over_group(arith.maxnumf, values)

    def row_max(self, of_groups):
        return _over_row(arith.maxnumf, of_groups, self.fmt.groups)

    def to_groups(self, of_rows):
        return of_rows

    def to_coordinates(self, of_groups):
        return _spread(of_groups, self.quads)

    def if_any(self, of_groups, run, otherwise):
        found = _over_row(arith.maxnumf, of_groups.astype(jnp.int32).astype(jnp.float32), WARP)
        return lax.cond(_scalar(found.astype(jnp.int32)) > 0, run, otherwise)


def parts_of(fmt: WireFormat, tiles: int) -> int:
    """The number of programs for a chunk of ``tiles``."""
    return pl.cdiv(tiles * TILE_ROWS * fmt.groups, THREADS)


def tile_of(fmt: WireFormat, table_ref, tiles: int, part, chunk, *, fresh: bool = False) -> _Tile:
    """The tiles of a part of a chunk of ``tiles``; beyond the last tile, that tile again."""
    if fmt.groups > WARP:
        raise NotImplementedError(
            f"backend='mosaic' takes up to {WARP} groups per super-group, and "
            f"super_group_size={fmt.super_group_size} has {fmt.groups} of "
            f"group_size={fmt.group_size}; pass group_size >= {fmt.super_group_size // WARP}, "
            "or backend=None"
        )
    thread = threads()
    number, of_tile = part * THREADS + thread, TILE_ROWS * fmt.groups
    t = jnp.minimum(number // of_tile, tiles - 1)
    return _Tile(fmt, table_ref, t, number % of_tile, chunk, fresh)


def _statistics_kernel(x_ref, mean_ref, sqnorm_ref, *, n_rows, fmt):
    """Each thread sums a group, and the threads of a super-group add up their sums."""
    thread = threads()
    number = lax.axis_index("dynamiq_part") * THREADS + thread
    row, group = number // fmt.groups, number % fmt.groups
    x = _Tile(fmt, None, None, group, None).load(x_ref, row, n_rows).astype(jnp.float32)
    own = ((group == 0) & (row < n_rows)).astype(jnp.int32)
    for out_ref, values in (
        (mean_ref, x * np.float32(1.0 / fmt.super_group_size)),
        (sqnorm_ref, x * x),
    ):
        total = _over_row(arith.addf, _over_group(arith.addf, values), fmt.groups)
        _store_item(out_ref, row, total, own)


@functools.partial(jax.jit, static_argnums=1)
def _statistics(x, super_group_size: int):
    """See `pallas_kernels.statistics`."""
    rows, n = rows_of(x, super_group_size), super_group_size
    fmt = WireFormat(group_size=max(min(32, n), n // WARP), super_group_size=n)
    n_rows = rows.shape[0]

    def kernel(*refs):
        _statistics_kernel(*refs, n_rows=n_rows, fmt=fmt)

    kernel.__name__ = "dynamiq_statistics"
    run = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((n_rows,), jnp.float32),) * 2,
        grid=(pl.cdiv(n_rows * fmt.groups, THREADS),),
        grid_names=("dynamiq_part",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return typed_by_operands(run)(rows)


@dataclass(frozen=True)
class Mosaic:
    """The `pallas_kernels.kernels.Lowering` of Mosaic GPU."""

    def tile(self, fmt, table_ref, tiles):
        """The tiles of the running program; beyond the last tile, that tile again."""
        part, chunk = map(lax.axis_index, ("dynamiq_part", "dynamiq_chunk"))
        return tile_of(fmt, table_ref, tiles, part, chunk)

    def programs(self, launch: Launch) -> int:
        """The programs of a chunk."""
        return parts_of(launch.fmt, launch.tiles)

    def launch(self, launch: Launch, operands):
        """The result of a launch."""
        given = [i for i in range(len(operands)) if i != launch.replaces]

        def kernel(*refs):
            refs = [refs[i] for i in (*given, -1)]
            launch.kernel(*refs, lowering=self, fmt=launch.fmt, **dict(launch.static))

        kernel.__name__ = f"dynamiq_{launch.name}"
        struct = jax.ShapeDtypeStruct(launch.shape, launch.dtype)
        place = launch.replaces
        run = plgpu.kernel(
            kernel,
            out_type=struct if place is None else (),
            grid=(launch.chunks, self.programs(launch)),
            grid_names=("dynamiq_chunk", "dynamiq_part"),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        )

        if place is None:
            return typed_by_operands(run)(*operands)

        def replacing(*operands):
            result = jax.new_ref(operands[place])
            run(*(operands[i] for i in given), result)
            return result[...]

        return typed_by_operands(replacing)(*operands)

    def statistics(self, x, super_group_size):
        """See `pallas_kernels.statistics`."""
        return _statistics(x, super_group_size)

    def deal(self, energy, taken, upgrades, shape):
        """See `pallas_kernels.deal`, by XLA."""
        return reference.deal(energy, taken, upgrades, shape)
