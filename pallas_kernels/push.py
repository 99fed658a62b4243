"""Push kernels: one Mosaic GPU kernel writes into the memory of all workers, over NVLink.

A block (peer, part) of `exchange` copies its part of the 32-bit words for that peer, by stores of
16 bytes if rows are multiples of 16 bytes. It adds one to the peer's counter, and waits until the
block of the same number on another worker has done the same here. So all words for this worker have
arrived when its kernel ends, and XLA sees an ordinary custom call. XLA begins a kernel once all
workers have reached it.

A block of `all_reduce` handles some tiles, the same ones of every chunk. If workers have parts of a
seed, it first sends its part to the blocks of its number on all workers, and adds up the parts that
it gets. It encodes the tiles of other workers' chunks into their memory, and waits for the blocks
of its number. It adds up the tiles of its worker's chunk, encodes the sums into the memory of all
workers, and waits again. Then it decodes all sums. Blocks of one number read what each other wrote,
and nothing else.
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
from pallas_kernels._compat import typed_by_operands
from pallas_kernels.backend import check_push
from pallas_kernels.format import TILE_ROWS, Input, Result, Rounding, Source, WireFormat
from pallas_kernels.hashing import NOISE_WORDS, noise_columns
from pallas_kernels.kernels import Finish, accumulate, decode_tile, encode_tile, load, rows_of
from pallas_kernels.mosaic import THREADS
from pallas_kernels.tile import level_tables

BLOCKS = 512
"""The most blocks, of 128 threads. All of them are resident on any Hopper GPU, so no block waits
for a block that has not begun."""
AT_ONCE = 4
"""Loads that a thread has under way at once."""
MEETINGS = 10
"""Bits of a counter that count one meeting of blocks: at most 3 meetings of 2^10 workers."""
_POLLS = 2**26
"""Reads of a counter, about half a minute. After them the kernel traps, and JAX raises an error."""


class Copy(NamedTuple):
    """How the blocks of one peer share out a row of words among themselves."""

    words: int
    """Words of a unit, which a thread moves at once."""
    units: int
    """Units of a row."""
    parts: int
    """Blocks of a peer."""

    @property
    def rounds(self) -> int:
        """The number of turns of every block; some may lie beyond the row."""
        return -(-self.units // (self.parts * AT_ONCE * THREADS))

    def first(self, turn, part):
        """The first unit of a turn: thread t moves units t, t + 128, ... from there."""
        return (turn * self.parts + part) * (AT_ONCE * THREADS)


def copies(lengths: list[int], n_workers: int) -> list[Copy]:
    """The copies of rows of these lengths in words, by one grid of blocks."""
    at_once = [math.gcd(length, 4) for length in lengths]
    units = [length // words for length, words in zip(lengths, at_once, strict=True)]
    parts = min(BLOCKS // n_workers, max(1, -(-max(units) // (AT_ONCE * THREADS))))
    return [Copy(words, count, parts) for words, count in zip(at_once, units, strict=True)]


def _multiprocessors() -> int:
    return jax.devices()[0].core_count


def resident(fmt: WireFormat) -> int:
    """Blocks of `all_reduce` that a multiprocessor holds at once, with all their registers.

    With three blocks a thread has up to 168 registers, with two the largest possible number. Large
    groups and geometric levels need more than 168.
    """
    return 2 if fmt.group_size > 32 or fmt.levels == "geometric" else 3


def _check_mesh() -> None:
    """Refuses a kernel between processes that JAX, when it lowers it, takes for one process's."""

    def check(kernel) -> None:
        if jax.process_count() > 1 and not kernel.multihost_kernel:
            raise NotImplementedError(
                f"push kernels between {jax.process_count()} processes need a mesh of devices, and "
                "jax.shard_map has an AbstractMesh; pass mesh= a jax.sharding.Mesh"
            )

    inlined: Any = plgpu.inline_mgpu()(check)
    inlined()


def _number(axes: dict[str, int]):
    """This worker's number."""
    me = jnp.int32(0)
    for name, size in axes.items():
        me = me * size + lax.axis_index(name)
    return me


def peer_of(me, block, axes: dict[str, int]) -> tuple[Any, Any]:
    """The peer of a block, and its place on the mesh; the worker itself is the last peer."""
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
        _check_mesh()
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
        out_type=[jax.ShapeDtypeStruct((n * x.shape[1],), x.dtype) for x in sent],
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

    return typed_by_operands(call)


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
    """Copies this block's part of a row from one memory to another."""
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
        thread = mosaic.threads()
        unit = thread + plan.first(turn, lax.axis_index("pushed_part"))
        begin, end = (0 * thread + row * plan.units for row in (from_row, to_row))
        move(source, begin, target, end, unit)
        return 0

    lax.fori_loop(0, plan.rounds, step, 0)


def _wait(counter, count: int, meeting: int = 0) -> None:
    """Waits until one meeting's bits of a counter reach ``count``; a long wait ends in an error.

    Then all threads can read what other workers wrote before they counted.
    """

    @mosaic._inline((mosaic._REF,))
    def wait(counter):
        at = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(counter))
        code = f"""{{ .reg .pred p; .reg .u32 v, n;
            mov.u32 n, %tid.x; setp.ne.u32 p, n, 0; @p bra DONE;
            MORE: ld.acquire.sys.global.u32 v, [$0]; bfe.u32 v, v, {MEETINGS * meeting}, {MEETINGS};
            setp.ge.u32 p, v, {count}; @p bra DONE;
            add.u32 n, n, 1; setp.lt.u32 p, n, {_POLLS}; @p bra MORE;
            trap;
            DONE: }}"""
        mosaic._ptx(code, "l,~{memory}", ir.Type.parse("!llvm.void"), at, effects=True)
        mgpu.utils.warpgroup_barrier()

    wait(counter)


def _meet(counter, meeting: int, me, axes: dict[str, int]) -> None:
    """Signals the blocks of this number on all other workers, and waits for their signals.

    Every meeting counts in different bits of the counter: a worker may reach the next meeting
    before another worker has signalled this one.
    """

    @mosaic._inline(())
    def written():
        mgpu.utils.warpgroup_barrier()

    written()
    others = math.prod(axes.values()) - 1
    for i in range(others):
        place = peer_of(me, i, axes)[1]
        pl.semaphore_signal(counter, 1 << MEETINGS * meeting, device_id=place)
    _wait(counter, others, meeting)


def _tell(part, parts, place) -> None:
    """Copies the two words of a part of the seed to ``place``, perhaps on another worker."""
    per_thread = mosaic._PER_THREAD

    @mosaic._inline((mosaic._REF, mosaic._REF, per_thread, per_thread))
    def move(source, target, thread, at):
        wanted = arith.cmpi(arith.CmpIPredicate.slt, thread[0], mosaic._constant(2))
        wanted = arith.extui(mosaic._i32(), wanted)
        words = mosaic._load(mosaic._address(source, thread[0], 4), 1, wanted)
        mosaic._store(mosaic._address(target, at[0], 4), words, wanted)

    thread = mosaic.threads()
    move(part, parts, thread, thread + place)


def _write_noise(parts, noises, block, n_workers: int, rounding: Rounding) -> None:
    """Writes `slot_noise` of the sum of all parts, for one block; a thread writes one word."""
    per_thread = mosaic._PER_THREAD

    @mosaic._inline((mosaic._REF, per_thread, per_thread, per_thread))
    def write(noises, thread, at, word):
        wanted = arith.cmpi(
            arith.CmpIPredicate.slt, thread[0], mosaic._constant(n_workers * NOISE_WORDS)
        )
        words = [word[0]]
        mosaic._store(mosaic._address(noises, at[0], 4), words, arith.extui(mosaic._i32(), wanted))
        mgpu.utils.warpgroup_barrier()

    thread = mosaic.threads()
    first = 0 * thread + 2 * n_workers * block
    arrived = lambda worker, word: mosaic._load_item(parts, first + 2 * worker + word, fresh=True)
    # Words 0 and 1 of the seed: the sums over workers.
    seed = [sum(arrived(i, word) for i in range(n_workers)) for word in (0, 1)]
    slot, column = (thread // NOISE_WORDS).astype(jnp.uint32), thread % NOISE_WORDS
    columns = noise_columns(seed, slot, n_workers, rounding)
    word = columns[0]
    for i in range(1, NOISE_WORDS):
        word = jnp.where(column == i, columns[i], word)
    write(noises, thread, thread + n_workers * NOISE_WORDS * block, word)


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


class _References(NamedTuple):
    """Operands and results of an all-reduce kernel; `None` for operands that it does not use."""

    x: Any
    mean: Any
    order: Any
    mean_sum: Any
    first: Any
    """The records of gradients; ``last`` has the records of sums."""
    last: Any
    noise: Any
    table: Any
    out: Any
    came: Any
    """Payloads of gradients by their sender; ``sums`` has payloads of sums by their owner."""
    sums: Any
    parts: Any
    """The parts of the seed that arrived for every block, by worker."""
    noises: Any
    """The noise of every worker, as every block computes it from the parts."""
    met: Any
    """The counter of `_meet`."""

    @classmethod
    def of(cls, arrays: tuple, refs: tuple) -> "_References":
        """The references of operands and results that are not `None`, and of the counter."""
        found = iter(refs)
        return cls(*(None if x is None else next(found) for x in arrays), *found)


class _Facts(NamedTuple):
    """The static facts of an all-reduce."""

    axes: dict[str, int]
    fmt: WireFormat
    even: bool
    n_rows: int
    """Super-groups of a gradient."""
    n_tiles: int
    """Tiles of a chunk."""
    divisor: int

    @property
    def workers(self) -> int:
        """The number of workers; each sums one chunk."""
        return math.prod(self.axes.values())

    @property
    def parts(self) -> int:
        """The number of parts of a chunk; blocks divide the parts among themselves."""
        return mosaic.parts_of(self.fmt, self.n_tiles)

    @property
    def blocks(self) -> int:
        """Blocks, all of which are resident at once."""
        return min(self.parts, resident(self.fmt) * _multiprocessors())


class _Block(NamedTuple):
    """A block of one worker's all-reduce, which handles the same tiles of every chunk."""

    facts: _Facts
    refs: _References
    me: Any
    """This worker's number."""
    number: Any
    """The block's number."""
    turns: Any
    """How many parts of a chunk the block has: ``number``, and every ``blocks``-th after it."""

    @classmethod
    def running(cls, facts: _Facts, refs: _References) -> "_Block":
        """The running block."""
        me, number = _number(facts.axes), lax.axis_index("pushed_part")
        turns = lax.div(facts.parts - 1 - number, facts.blocks) + 1
        return cls(facts, refs, me, number, turns)

    def each(self, count: int, run) -> None:
        """``run(i, tile)`` for i below ``count`` and every tile of this block."""
        facts = self.facts

        def step(at, _):
            part = self.number + lax.rem(at, self.turns) * facts.blocks
            table, tiles = self.refs.table, facts.n_tiles
            tile = mosaic.tile_of(facts.fmt, table, tiles, part, 0, fresh=True)
            run(lax.div(at, self.turns), tile)
            return 0

        lax.fori_loop(0, count * self.turns, step, 0)

    def send(self, i, tile) -> None:
        """Encodes a tile of the chunk of peer ``i`` into that peer's memory."""
        refs = self.refs
        peer, place = peer_of(self.me, i, self.facts.axes)
        rows = self._rows(tile, peer)
        values = load(refs.x, refs.mean, rows, self.facts.n_rows, tile)
        payload = tile.payload(plgpu.remote_ref(refs.came, place), (self.me, 0))
        record = self._record(refs.first, peer)
        encode_tile(values, rows, (refs.noise, (self.me,)), record, payload, tile)

    def add(self, _, tile) -> None:
        """Adds up a tile of this worker's chunk, and encodes the sum into the memory of all."""
        refs, me, axes = self.refs, self.me, self.facts.axes
        rows = self._rows(tile, me)
        own = load(refs.x, refs.mean, rows, self.facts.n_rows, tile)
        skip: Any = (me,)  # as a reference of one number is read
        arrived = Input(refs.came, refs.first, skip, refs.noise)
        chunk = self._record(refs.first, me)[1]
        total = accumulate(own, [[arrived]], rows, chunk, tile)
        places = [peer_of(me, i, axes)[1] for i in range(self.facts.workers - 1)]
        sums = refs.sums, *(plgpu.remote_ref(refs.sums, place) for place in places)
        payload = _Everywhere([tile.payload(ref, (me,)) for ref in sums])
        record = self._record(refs.last, me)
        encode_tile(total, rows, (refs.noise, (me,)), record, payload, tile)

    def read(self, owner, tile) -> None:
        """Decodes a tile of the sums of worker ``owner``."""
        refs = self.refs
        rows, payload = self._rows(tile, owner), tile.payload(refs.sums, (owner,))
        record, noise = self._record(refs.last, owner), (refs.noise, (owner,))
        finish = Finish(refs.mean_sum, refs.out, self.facts.divisor)
        decode_tile(payload, rows, noise, record, finish, tile)

    def meet(self, meeting: int) -> None:
        """See `_meet`."""
        _meet(self.refs.met, meeting, self.me, self.facts.axes)

    def agreed(self) -> "_Block":
        """The block with the noise of all workers, by the sum of their parts of the seed."""
        refs, axes, n = self.refs, self.facts.axes, self.facts.workers
        place = 2 * (self.number * n + self.me)
        for i in range(n):
            _tell(refs.noise, plgpu.remote_ref(refs.parts, peer_of(self.me, i, axes)[1]), place)
        self.meet(0)
        _write_noise(refs.parts, refs.noises, self.number, n, self.facts.fmt.rounding)
        return self._replace(refs=refs._replace(noise=refs.noises.at[self.number]))

    def _rows(self, tile, chunk):
        """The super-groups of a tile of a chunk."""
        if self.refs.order is not None:
            return tile.rows(self.refs.order, chunk)
        return (chunk * self.facts.n_tiles + tile.t) * TILE_ROWS + tile.row

    def _record(self, ref, chunk) -> tuple[Any, Any]:
        """A chunk's row of records, or the first row if all chunks have the same."""
        return ref, 0 if self.facts.even else chunk


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
    x = rows_of(source.x, fmt.super_group_size)
    facts = _Facts(axes, fmt, even, x.shape[0], tiles[0].shape[1], result.divisor)
    dealt = (None, None) if even else (source.order, result.mean_sum)
    tiles = tuple(each[:1] for each in tiles) if even else tiles  # XLA knows one row by its values
    operands = x, source.mean, *dealt, *tiles, noise, level_tables(fmt)
    passed = [operand for operand in operands if operand is not None]
    agrees, n = noise.ndim == 1, facts.workers
    shapes: list[Any] = [(n, 1, words[0]), (n, words[1])]
    shapes += [(facts.blocks, n, k) if agrees else None for k in (2, NOISE_WORDS)]
    results = [
        jax.ShapeDtypeStruct((result.rows, fmt.super_group_size), result.dtype),
        *(shape and jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in shapes),
    ]

    def kernel(*refs):
        _check_mesh()
        block = _Block.running(facts, _References.of((*operands, *results), refs))
        if agrees:
            block = block.agreed()
        block.each(n - 1, block.send)
        block.meet(1)
        block.each(1, block.add)
        block.meet(2)
        block.each(n, block.read)

    kernel.__name__ = "dynamiq_push_all_reduce"
    return _alone(
        kernel,
        out_type=[each for each in results if each is not None],
        grid=(facts.blocks,),
        grid_names=("pushed_part",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*passed)[0]
