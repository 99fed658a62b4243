"""Push kernels: one Mosaic GPU kernel writes into the memory of all workers, over NVLink.

A block (peer, part) copies its part of the words for that peer, by stores of 16 bytes where rows
are multiples of them, adds one to the peer's counter, and waits until the block of the same number
on another worker has done so here. Then all that this worker gets is there when its kernel ends,
and XLA sees a custom call as any other. XLA begins a kernel once all workers have come to it.
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
from pallas_kernels.mosaic import THREADS

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
        me = jnp.int32(0)
        for name, size in axes.items():
            me = me * size + lax.axis_index(name)
        peer, place = peer_of(me, lax.axis_index("pushed_to"), axes)
        for plan, source, target in zip(plans, refs, refs[len(plans) : -1], strict=False):
            far = plgpu.remote_ref(target, place)
            _copy(plan, source, 0 if to_all else peer, far, me)
        pl.semaphore_signal(refs[-1], device_id=place)  # after all that the block has written
        _wait(refs[-1])

    kernel.__name__ = "dynamiq_push"
    came = plgpu.kernel(
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


def _wait(counter) -> None:
    """Waits until a counter is not 0. Unlike `pl.semaphore_wait` it ends, if late, in an error."""

    @mosaic._inline((mosaic._REF,))
    def wait(counter):
        at = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(counter))
        # Thread 0 reads: the kernel ends with its last thread, and none of the others has to know.
        code = f"""{{ .reg .pred p; .reg .u32 v, n;
            mov.u32 n, %tid.x; setp.ne.u32 p, n, 0; @p bra DONE;
            MORE: ld.acquire.sys.global.u32 v, [$0]; setp.ne.u32 p, v, 0; @p bra DONE;
            add.u32 n, n, 1; setp.lt.u32 p, n, {_POLLS}; @p bra MORE;
            trap;
            DONE: }}"""
        mosaic._ptx(code, "l,~{memory}", ir.Type.parse("!llvm.void"), at, effects=True)

    wait(counter)
