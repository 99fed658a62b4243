"""Push kernels: one Mosaic GPU kernel writes into the memory of all workers, over NVLink.

A block (peer, part) of `exchange` copies its part of the words for that peer, by stores of 16 bytes
where rows are multiples of them, adds one to the peer's counter, and waits until the block of the
same number on another worker has done so here. Then all that this worker gets is there when its
kernel ends, and XLA sees a custom call as any other. XLA begins a kernel once all workers have come
to it.

A block of `all_reduce` goes through some tiles, the same of every chunk. It encodes those of other
workers' chunks into their memory, and waits for the blocks of its number. It adds up the tiles of
its worker's chunk, encodes the sums into the memory of all, and waits again. Then it decodes all
sums. Blocks of one number read what each other wrote, and nothing else.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import mosaic
from pallas_kernels._compat import shape_struct
from pallas_kernels.backend import check_push
from pallas_kernels.format import TILE_ROWS, Input, Result, Source, WireFormat
from pallas_kernels.kernels import accumulate, decode_tile, encode_tile, load, rows_of
from pallas_kernels.mosaic import THREADS
from pallas_kernels.tile import level_tables

BLOCKS = 512
"""Most blocks, of 128 threads: all of them are resident on any Hopper GPU, so that no block waits
for one that has yet to begin."""
AT_ONCE = 4
"""Loads of a thread that are under way together."""
_POLLS = 2**26
"""Reads of a counter, about half a minute. After them the kernel traps, and JAX raises an error."""


class Copy(NamedTuple):
    """How the blocks of one peer share out a row of words among themselves."""

    words: int
    """Words of a unit: what a thread moves at once."""
    units: int
    """Units of a row."""
    parts: int
    """Blocks of a peer."""

    @property
    def rounds(self) -> int:
        """Tiles of every block, some of which may lie beyond the row."""
        return -(-self.units // (self.parts * AT_ONCE * THREADS))

    def first(self, turn, part):
        """The first of a tile's units: its thread t moves units t, t + 128, and so on."""
        return (turn * self.parts + part) * (AT_ONCE * THREADS)


def copies(lengths: list[int], n_workers: int) -> list[Copy]:
    """The copies of rows of so many words each, by one grid of blocks."""
    at_once = [math.gcd(length, 4) for length in lengths]
    units = [length // words for length, words in zip(lengths, at_once, strict=True)]
    parts = min(BLOCKS // n_workers, max(1, -(-max(units) // (AT_ONCE * THREADS))))
    return [Copy(words, count, parts) for words, count in zip(at_once, units, strict=True)]


def _multiprocessors() -> int:
    return jax.devices()[0].core_count


def resident(fmt: WireFormat) -> int:
    """Blocks of `all_reduce` that a multiprocessor holds at once, with all their registers.

    With three, a thread has up to 168 registers, with two as many as there can be. Large groups and
    geometric levels need more than 168.
    """
    return 2 if fmt.group_size > 32 or fmt.levels == "geometric" else 3


def _number(axes: dict[str, int]):
    """This worker's number."""
    me = jnp.int32(0)
    for name, size in axes.items():
        me = me * size + lax.axis_index(name)
    return me


def peer_of(me, block, axes: dict[str, int]) -> tuple[Any, Any]:
    """Whom a block of a worker sends to, itself last, and its place on the axes of the mesh."""
    peer = lax.rem(me + block + 1, math.prod(axes.values()))
    place, rest = {}, peer
    for name, size in reversed(axes.items()):
        place[name], rest = lax.rem(rest, size), lax.div(rest, size)
    return peer, place


def exchange(tree: Any, axes: dict[str, int], *, to_all: bool) -> Any:
    """See `pallas_kernels.exchange`."""
    check_push(tuple(axes))
    n, (leaves, treedef) = math.prod(axes.values()), jax.tree.flatten(tree)
    if n == 1:
        return jax.tree.map(lambda x: x[None] if to_all else x, tree)
    sent = [_words(x, 1 if to_all else n) for x in leaves]
    plans = copies([x.shape[1] for x in sent], n)

    def kernel(*refs):
        me = _number(axes)
        peer, place = peer_of(me, lax.axis_index("pushed_to"), axes)
        for plan, source, target in zip(plans, refs, refs[len(plans) : -1], strict=False):
            far = plgpu.remote_ref(target, place)
            _copy(plan, source, 0 if to_all else peer, far, me)
        pl.semaphore_signal(refs[-1], device_id=place)  # after all that the block has written
        _wait(refs[-1], 1)

    kernel.__name__ = "dynamiq_push"
    came = _alone(
        kernel,
        out_type=[shape_struct((n * x.shape[1],), x.dtype, *sent) for x in sent],
        grid=(n, plans[0].parts),
        grid_names=("pushed_to", "pushed_part"),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*(x.reshape(-1) for x in sent))
    return treedef.unflatten(
        _values(words, (n, *(x.shape if to_all else x.shape[1:])), x.dtype)
        for words, x in zip(came, leaves, strict=True)
    )


def _alone(kernel, **options):
    """`plgpu.kernel` that refuses `jax.vmap`: more blocks would wait than are resident."""
    call = jax.custom_batching.custom_vmap(plgpu.kernel(kernel, **options))

    @call.def_vmap
    def refuse(size, _, *operands):
        raise NotImplementedError(
            f"push kernels send one array for each GPU, and jax.vmap asks for {size}; call the "
            "reduction outside of jax.vmap, or pass transport='permutes' or 'collectives'"
        )

    return call


def _words(x, rows: int):
    """The bits of an array as uint32[rows, words]; zeros fill up the last word of a row."""
    x, each = x.reshape(rows, -1), max(1, 4 // x.dtype.itemsize)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % each)))
    x = x.reshape(rows, -1, each) if each > 1 else x
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(rows, -1)


def _values(words, shape: tuple[int, ...], dtype):
    """The inverse of `_words`."""
    words = words.reshape(shape[0], -1, *([2] if dtype.itemsize == 8 else []))
    x = lax.bitcast_convert_type(words, dtype).reshape(shape[0], -1)
    return x[:, : math.prod(shape[1:])].reshape(shape)


def _copy(plan: Copy, source, from_row, target, to_row) -> None:
    """The part of this block of a row, from one memory to another."""
    per_thread, size = mosaic._PER_THREAD, 4 * plan.words

    @mosaic._inline((mosaic._REF, per_thread, mosaic._REF, per_thread, per_thread))
    def move(source, begin, target, end, unit):
        moved = []
        for i in range(AT_ONCE):
            at = arith.addi(unit[0], mosaic._constant(i * THREADS))
            inside = arith.cmpi(arith.CmpIPredicate.slt, at, mosaic._constant(plan.units))
            inside = arith.extui(mosaic._i32(), inside)
            address = mosaic._address(source, arith.addi(begin[0], at), size)
            words = mosaic._load(address, plan.words, inside)
            address = mosaic._address(target, arith.addi(end[0], at), size)
            moved.append((address, words, inside))
        for of in moved:
            mosaic._store(*of)

    def step(turn, _):
        thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=per_thread)
        unit = thread + plan.first(turn, lax.axis_index("pushed_part"))
        begin, end = (0 * thread + row * plan.units for row in (from_row, to_row))
        move(source, begin, target, end, unit)
        return 0

    lax.fori_loop(0, plan.rounds, step, 0)


def _wait(counter, count: int, meeting: int = 0) -> None:
    """Waits for one half of a counter to reach ``count``; too long a wait ends in an error.

    Then all threads read what was written before others counted.
    """

    @mosaic._inline((mosaic._REF,))
    def wait(counter):
        at = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(counter))
        code = f"""{{ .reg .pred p; .reg .u32 v, n;
            mov.u32 n, %tid.x; setp.ne.u32 p, n, 0; @p bra DONE;
            MORE: ld.acquire.sys.global.u32 v, [$0]; bfe.u32 v, v, {16 * meeting}, 16;
            setp.ge.u32 p, v, {count}; @p bra DONE;
            add.u32 n, n, 1; setp.lt.u32 p, n, {_POLLS}; @p bra MORE;
            trap;
            DONE: }}"""
        mosaic._ptx(code, "l,~{memory}", ir.Type.parse("!llvm.void"), at, effects=True)
        mgpu.utils.warpgroup_barrier()

    wait(counter)


def _meet(counter, meeting: int, me, axes: dict[str, int]) -> None:
    """Tells the blocks of this number on all other workers, and waits for them to do so.

    Meetings 0 and 1 count in a half of the counter each: some worker may come to the second one
    before another has told of the first.
    """

    @mosaic._inline(())
    def written():
        mgpu.utils.warpgroup_barrier()

    written()
    others = math.prod(axes.values()) - 1
    for i in range(others):
        place = peer_of(me, i, axes)[1]
        pl.semaphore_signal(counter, 1 << 16 * meeting, device_id=place)
    _wait(counter, others, meeting)


class _Everywhere(NamedTuple):
    """Payloads that get the same fields."""

    payloads: list[mosaic._Payload]

    def store_row_scales(self, offset, fields):
        for payload in self.payloads:
            payload.store_row_scales(offset, fields)

    def store_group_scales(self, offset, fields, bits):
        for payload in self.payloads:
            payload.store_group_scales(offset, fields, bits)

    def store_plane(self, offset, fields, bits):
        for payload in self.payloads:
            payload.store_plane(offset, fields, bits)


def all_reduce(
    source: Source,
    tiles: tuple[Any, ...],
    noise,
    words: tuple[int, ...],
    result: Result,
    axes: dict[str, int],
    *,
    fmt: WireFormat,
    even: bool,
):
    """See `pallas_kernels.all_reduce`."""
    check_push(tuple(axes))
    n, x = math.prod(axes.values()), rows_of(source.x, fmt.super_group_size)
    n_tiles = tiles[0].shape[1]
    parts = mosaic.parts_of(fmt, n_tiles)
    blocks = min(parts, resident(fmt) * _multiprocessors())
    dealt = (None, None) if even else (source.order, result.mean_sum)
    tiles = tuple(each[:1] for each in tiles) if even else tiles  # XLA knows one row by its values
    operands = x, source.mean, *dealt, *tiles, noise, level_tables(fmt)
    passed = [operand for operand in operands if operand is not None]

    def kernel(*refs):
        refs = iter(refs)
        of_operands: Any = [None if operand is None else next(refs) for operand in operands]
        x_ref, mean_ref, order_ref, mean_sum_ref, first_ref, last_ref, noise_ref, table_ref = (
            of_operands
        )
        out_ref, came_ref, sums_ref, met = refs
        me, block = _number(axes), lax.axis_index("pushed_part")
        turns = lax.div(parts - 1 - block, blocks) + 1  # parts block, block + blocks, ...

        def each(count, run):
            """``run(i, tile)`` for i below ``count`` and every tile of this block."""

            def step(at, _):
                part = block + lax.rem(at, turns) * blocks
                tile = mosaic.tile_of(fmt, table_ref, n_tiles, part, 0, fresh=True)
                run(lax.div(at, turns), tile)
                return 0

            lax.fori_loop(0, count * turns, step, 0)

        def rows_of_chunk(tile, chunk):
            if order_ref is not None:
                return tile.rows(order_ref, chunk)
            return (chunk * n_tiles + tile.t) * TILE_ROWS + tile.row

        def record(ref, chunk):
            return ref, 0 if even else chunk

        def send(i, tile):
            peer, place = peer_of(me, i, axes)
            rows = rows_of_chunk(tile, peer)
            values = load(x_ref, mean_ref, rows, x.shape[0], tile)
            payload = tile.payload(plgpu.remote_ref(came_ref, place), (me, 0))
            encode_tile(values, rows, (noise_ref, (me,)), record(first_ref, peer), payload, tile)

        def add(_, tile):
            rows = rows_of_chunk(tile, me)
            total = load(x_ref, mean_ref, rows, x.shape[0], tile)
            skip: Any = (me,)  # as a reference of one number is read
            arrived = Input(came_ref, first_ref, skip, noise_ref)
            total = accumulate(total, [[arrived]], rows, record(first_ref, me)[1], tile)
            places = [peer_of(me, i, axes)[1] for i in range(n - 1)]
            refs = sums_ref, *(plgpu.remote_ref(sums_ref, place) for place in places)
            payload = _Everywhere([tile.payload(ref, (me,)) for ref in refs])
            encode_tile(total, rows, (noise_ref, (me,)), record(last_ref, me), payload, tile)

        def read(owner, tile):
            rows, payload = rows_of_chunk(tile, owner), tile.payload(sums_ref, (owner,))
            where, noise = record(last_ref, owner), (noise_ref, (owner,))
            decode_tile(payload, rows, noise, where, mean_sum_ref, out_ref, result.divisor, tile)

        each(n - 1, send)
        _meet(met, 0, me, axes)
        each(1, add)
        _meet(met, 1, me, axes)
        each(n, read)

    kernel.__name__ = "dynamiq_push_all_reduce"
    shapes = [(n, 1, words[0]), (n, words[1])]
    return _alone(
        kernel,
        out_type=[
            shape_struct((result.rows, fmt.super_group_size), result.dtype, *passed),
            *(shape_struct(shape, jnp.uint32, *passed) for shape in shapes),
        ],
        grid=(blocks,),
        grid_names=("pushed_part",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*passed)[0]
