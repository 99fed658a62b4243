"""The operations as Pallas kernels, for every lowering of Pallas.

One program handles one tile, or several parts of tiles. It gathers super-groups through ``order``,
and holds them in registers from the first load to the last store. The lowering
(`pallas_kernels.triton`, `pallas_kernels.mosaic`) decides how a program holds, loads and stores
them. The arithmetic is in `pallas_kernels.tile`.
"""

import functools
import itertools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.format import (
    TILE_ROWS,
    Dealt,
    Input,
    Result,
    Source,
    Target,
    Upgrades,
    WireFormat,
)
from pallas_kernels.hashing import NOISE_WORDS, Noise
from pallas_kernels.tile import Payload, Tile, decode, encode, finished, level_tables, noise_of


class Launch(NamedTuple):
    """The static facts of a launch with one result."""

    kernel: Any
    name: str
    fmt: Any
    """The `WireFormat`, or the `pallas_kernels.mx.Form`."""
    tiles: int
    """Tiles of a chunk, or parts."""
    chunks: int
    """Chunks of the call."""
    shape: tuple[int, ...]
    """The shape of the result."""
    dtype: Any
    """The dtype of the result."""
    static: tuple[tuple[str, Any], ...]
    """The kernel's keyword arguments."""
    replaces: int | None = None
    """The index of the operand that the result replaces, if any."""


class Lowering(Protocol):
    """A lowering of Pallas: how a program holds its tile, and how it is launched; hashable."""

    def tile(self, fmt: WireFormat, table_ref, tiles: int) -> Tile:
        """The tile of the running program, one of ``tiles`` in its chunk."""
        ...

    def launch(self, launch: Launch, operands: tuple) -> jax.Array:
        """The result of ``launch.kernel(*references, lowering=, fmt=, **static)``.

        The references are to ``operands``, without the replaced one, and to the result.
        """
        ...

    def statistics(self, x, super_group_size: int) -> tuple[jax.Array, jax.Array]:
        """See `pallas_kernels.statistics`."""
        ...

    def deal(self, energy, taken, upgrades: Upgrades, shape: tuple[int, int]) -> Dealt:
        """See `pallas_kernels.deal`."""
        ...


def rows_of(x, super_group_size: int):
    """x as [rows, S]: without a copy if S divides d, otherwise one padded copy."""
    pad = -x.shape[0] % super_group_size
    return (jnp.pad(x, (0, pad)) if pad else x).reshape(-1, super_group_size)


def scalar(value):
    """An operand for a scalar, which kernels read as ``ref[0]``."""
    return jnp.reshape(value, (1,)).astype(jnp.int32)


def _mean(source: Source):
    """An operand for the means; a placeholder if there are none."""
    return jnp.zeros(1, jnp.float32) if source.mean is None else source.mean


class _Inputs(NamedTuple):
    """Static facts of inputs: whether each omits one payload, and which have equal tiles."""

    with_skip: tuple[bool, ...]
    alike: tuple[int, ...]
    """How many consecutive inputs share their tiles, and with them a branch of the kernel."""
    with_noise: bool
    """Whether each input has its encoders' noise."""

    def of(self, refs) -> list[list[Input]]:
        """Inputs whose fields are references, grouped by equal tiles."""
        it = iter(refs)

        def take(skips: bool) -> Input:
            payloads, tiles = next(it), next(it)
            skip = next(it) if skips else None
            return Input(payloads, tiles, skip, next(it) if self.with_noise else None)

        found = iter([take(skips) for skips in self.with_skip])
        return [[next(found) for _ in range(count)] for count in self.alike]


def _input_operands(inputs: tuple[Input, ...], fmt: WireFormat) -> tuple[tuple, _Inputs]:
    """Inputs as a flat tuple of arrays, and their static facts."""
    with_skip = tuple(i.skip is not None for i in inputs)
    alike = tuple(len(list(group)) for _, group in itertools.groupby(inputs, lambda i: id(i.tiles)))
    flat = []
    for payloads, tiles, skip, noise in inputs:
        flat += [payloads, tiles]
        if skip is not None:
            flat.append(scalar(skip))
        if fmt.dither:
            flat.append(noise)
    return tuple(flat), _Inputs(with_skip, alike, fmt.dither)


def _noise(noise_ref, where: tuple, rows, tile: Tile):
    """The noise words of super-groups ``rows`` under the row ``noise_ref[*where]``."""
    words = Noise(*(noise_ref[(*where, i)] for i in range(NOISE_WORDS)))
    return noise_of(rows, words, tile)


def load(x_ref, mean_ref, rows, n_rows: int, tile: Tile):
    """``x - mean`` of super-groups ``rows``, in f32 or the dtype of ``x``."""
    x = tile.load(x_ref, rows, n_rows)
    return x if mean_ref is None else x.astype(jnp.float32) - tile.load_rows(mean_ref, rows)


def accumulate(total, inputs: list[list[Input]], rows, chunk, tile: Tile):
    """``total`` plus the decoded records of the tile of ``chunk`` in all inputs."""
    for alike in inputs:

        def branch(offset, w, alike=alike):
            def add_all(so_far):
                # A conversion before the branch would wait for the coordinates while no payload
                # is under way; after it, the additions would keep both operands in registers.
                so_far = tile.pinned(so_far, w)
                for one in alike:
                    so_far = _add(so_far, one, rows, offset, w, tile)
                return tile.pinned(so_far, w)

            return add_all

        total = tile.by_width(alike[0].tiles, chunk, branch, total)
    return total


def _add(total, one: Input, rows, offset, width: int, tile: Tile):
    """``total`` plus the decoded records at ``offset`` in one input."""
    payloads_ref: Any = one.payloads
    skip_ref: Any = one.skip
    count = payloads_ref.shape[0] - (skip_ref is not None)

    def add(k, so_far):
        if skip_ref is not None:
            k = k + 1 + ((k - skip_ref[0]) >> 31)  # k + (k >= skip): the shift is -1 where k < skip
        noise = functools.partial(_noise, one.noise, (k,), rows, tile)
        return so_far + decode(tile.payload(payloads_ref, (k, tile.c)), offset, width, noise, tile)

    return add(0, total) if count == 1 else jax.lax.fori_loop(0, count, add, total)


def _encode_kernel(
    x_ref, mean_ref, order_ref, tiles_ref, chunks_ref, noise_ref, table_ref, *rest,
    lowering, fmt, n_rows, with_mean, arrived, skips_chunk,
):  # fmt: skip
    """Kernel of compress (no inputs) and decompress-accumulate-recompress."""
    tile = lowering.tile(fmt, table_ref, tiles_ref.shape[1])
    out_ref, inputs = rest[-1], arrived.of(rest[skips_chunk:-1])

    def run():
        chunk = chunks_ref[tile.c]
        rows = tile.rows(order_ref, chunk)
        total = load(x_ref, mean_ref if with_mean else None, rows, n_rows, tile)
        total = accumulate(total, inputs, rows, chunk, tile)
        payload = tile.payload(out_ref, (tile.c,))
        encode_tile(total, rows, (noise_ref, ()), (tiles_ref, chunk), payload, tile)

    if skips_chunk:
        pl.when(tile.c != rest[0][0])(run)
    else:
        run()


def encode_tile(total, rows, noise: tuple, record: tuple, payload: Any, tile: Tile):
    """Encodes ``total``, the super-groups ``rows``, into a payload.

    ``noise`` is a reference and the place of a row; ``record`` is a reference to tiles and a chunk.
    """
    (noise_ref, place), (tiles_ref, chunk) = noise, record

    def branch(offset, w):
        def encode_record(total):
            encode(total, _noise(noise_ref, place, rows, tile), payload, offset, w, tile)
            return jnp.int32(0)

        return encode_record

    tile.by_width(tiles_ref, chunk, branch, total.astype(jnp.float32))


class Finish(NamedTuple):
    """How sums are finished, and where they are written."""

    mean_sum_ref: Any
    """The sums of means; `None` if they are zero."""
    out_ref: Any
    divisor: int


def decode_tile(payload: Payload, rows, noise: tuple, record: tuple, finish: Finish, tile: Tile):
    """Decodes finished super-groups to the result's ``rows``; see `encode_tile`."""
    (tiles_ref, chunk), (mean_sum_ref, out_ref, divisor) = record, finish

    def branch(offset, w):
        def decode_record(mean_sum):
            words = functools.partial(_noise, *noise, rows, tile)
            value = decode(payload, offset, w, words, tile)
            _store(out_ref, value, rows, 0, mean_sum, divisor, tile)
            return jnp.int32(0)

        return decode_record

    mean_sum = np.float32(0) if mean_sum_ref is None else tile.load_rows(mean_sum_ref, rows)
    tile.by_width(tiles_ref, chunk, branch, mean_sum)


def _store(out_ref, value, rows, start, mean_sum, divisor: int, tile: Tile):
    """Writes finished super-groups ``rows`` to ``out_ref``, whose row 0 is number ``start``."""
    tile.store(out_ref, rows - start, finished(value, mean_sum, divisor))


def _finish_kernel(
    x_ref, mean_ref, mean_sum_ref, order_ref, chunks_ref, start_ref, table_ref, *rest,
    lowering, fmt, n_rows, with_mean, arrived, divisor,
):  # fmt: skip
    """Kernel of decompress-accumulate."""
    inputs, out_ref = arrived.of(rest[:-1]), rest[-1]
    tile = lowering.tile(fmt, table_ref, order_ref.shape[1] // TILE_ROWS)
    chunk = chunks_ref[tile.c]
    rows = tile.rows(order_ref, chunk)
    total = load(x_ref, mean_ref if with_mean else None, rows, n_rows, tile)
    total = accumulate(total, inputs, rows, chunk, tile)
    mean_sum = tile.load_rows(mean_sum_ref, rows)
    _store(out_ref, total, rows, start_ref[0], mean_sum, divisor, tile)


def _decode_kernel(
    mean_sum_ref, order_ref, tiles_ref, chunks_ref, table_ref, noise_ref, payloads_ref, out_ref,
    *, lowering, fmt, divisor,
):  # fmt: skip
    """Kernel of decompress."""
    tile = lowering.tile(fmt, table_ref, tiles_ref.shape[1])
    chunk = chunks_ref[tile.c]
    rows = tile.rows(order_ref, chunk)
    payload, noise = tile.payload(payloads_ref, (tile.c,)), (noise_ref, (tile.c,))
    record = tiles_ref, chunk
    finish = Finish(mean_sum_ref, out_ref, divisor)
    decode_tile(payload, rows, noise, record, finish, tile)


@functools.partial(jax.jit, static_argnames=("launch", "lowering"))
def launched(operands: tuple, *, launch: Launch, lowering: Lowering):
    """The result of a launch. Equal launches of a program are traced and lowered once."""
    return lowering.launch(launch, operands)


def statistics(x, *, super_group_size: int, lowering: Lowering):
    """See `pallas_kernels.statistics`."""
    return lowering.statistics(x, super_group_size)


def deal(energy, taken, upgrades: Upgrades, shape: tuple[int, int], *, lowering: Lowering) -> Dealt:
    """See `pallas_kernels.deal`."""
    return lowering.deal(energy, taken, upgrades, shape)


def compress(source: Source, chunks, target: Target, skip=None, *, fmt, lowering: Lowering):
    """See `pallas_kernels.compress`."""
    return _encode_call((), source, chunks, target, skip, fmt, lowering)


def decompress_accumulate_recompress(
    inputs: tuple[Input, ...], source: Source, chunks, target: Target, *, fmt, lowering: Lowering
):
    """See `pallas_kernels.decompress_accumulate_recompress`."""
    return _encode_call(inputs, source, chunks, target, None, fmt, lowering)


def _encode_call(
    inputs: tuple[Input, ...], source: Source, chunks, target: Target, skip, fmt, lowering: Lowering
):
    """Encodes sums, or ``source`` alone if there are no inputs."""
    rows = rows_of(source.x, fmt.super_group_size)
    flat, arrived = _input_operands(inputs, fmt)
    skipped = () if skip is None else (scalar(skip),)
    operands = (
        rows, _mean(source), source.order, target.tiles, chunks, target.noise, level_tables(fmt),
        *skipped, *flat,
    )  # fmt: skip
    static = {
        "n_rows": rows.shape[0],
        "with_mean": source.mean is not None,
        "arrived": arrived,
        "skips_chunk": len(skipped),
    }
    tiles, count = target.tiles.shape[1], chunks.shape[0]
    shape, dtype = (count, target.payload_words), jnp.dtype(jnp.uint32)
    name = "decompress_accumulate_recompress" if inputs else "compress"
    kept = tuple(static.items())
    launch = Launch(_encode_kernel, name, fmt, tiles, count, shape, dtype, kept)
    return launched(operands, launch=launch, lowering=lowering)


def decompress_accumulate(
    inputs: tuple[Input, ...], source: Source, chunks, result: Result, *, fmt, lowering: Lowering
):
    """See `pallas_kernels.decompress_accumulate`."""
    rows = rows_of(source.x, fmt.super_group_size)
    flat, arrived = _input_operands(inputs, fmt)
    operands = (
        rows, _mean(source), result.mean_sum, source.order, chunks, scalar(result.start),
        level_tables(fmt), *flat,
    )  # fmt: skip
    static = {
        "divisor": result.divisor,
        "n_rows": rows.shape[0],
        "with_mean": source.mean is not None,
        "arrived": arrived,
    }
    name, tiles, count = (
        "decompress_accumulate",
        source.order.shape[1] // TILE_ROWS,
        chunks.shape[0],
    )
    shape, dtype = (result.rows, fmt.super_group_size), jnp.dtype(result.dtype)
    kept = tuple(static.items())
    launch = Launch(_finish_kernel, name, fmt, tiles, count, shape, dtype, kept)
    return _finish_call(launch, operands, result.into, lowering)


def decompress(
    payloads, tiles, chunks, result: Result, noise=None, *, fmt, lowering: Lowering
):  # fmt: skip
    """See `pallas_kernels.decompress`."""
    words = noise if fmt.dither else jnp.zeros((1, NOISE_WORDS), jnp.uint32)
    operands = result.mean_sum, result.order, tiles, chunks, level_tables(fmt), words, payloads
    shape, dtype = (result.rows, fmt.super_group_size), jnp.dtype(result.dtype)
    count, into = payloads.shape[0], result.into
    if into is None and count < tiles.shape[0]:
        # Later calls write into the result. With an empty result all calls are one kernel.
        into = lax.empty(shape, result.dtype)
    kept = (("divisor", result.divisor),)
    launch = Launch(_decode_kernel, "decompress", fmt, tiles.shape[1], count, shape, dtype, kept)
    return _finish_call(launch, operands, into, lowering)


def _finish_call(launch: Launch, operands: tuple, into, lowering: Lowering):
    """The result of a launch, written into the array ``into`` if there is one."""
    if into is not None:
        launch, operands = launch._replace(replaces=len(operands)), (*operands, into)
    return launched(operands, launch=launch, lowering=lowering)
