"""Kernel benchmark: what one device needs to encode, add and decode a whole gradient.

Every kernel of `pallas_kernels` processes all coordinates in one call, as a single chunk under
the plan that the gradient itself gets at the given bits per coordinate. Calls are dispatched
back-to-back and waited for once, so that their dispatch hides behind the device's work.

Bytes moved are those an ideal kernel reads and writes once: the gradient, payload records,
per-super-group means and order, results. *Copy* is XLA's ``x + 1`` on the same bf16 array; its
bandwidth, measured in the same rounds, is the ceiling that the last column refers to. *Join
leaves* brings 20 leaves into one array, as the leaves of a bucket.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import tables
from dynamiq_jax.commands.bench.contenders import parse_size
from dynamiq_jax.commands.bench.timing import TimedRow, time_calls
from dynamiq_jax.commands.options import checked
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.dynamiq.layout import Layout, make_layout
from dynamiq_jax.methods.dynamiq.plan import order_and_tiles
from dynamiq_jax.topologies import Direct, Stage
from dynamiq_jax.tree.leaves import joined
from pallas_kernels import (
    Backend,
    Input,
    Result,
    Source,
    Target,
    WireFormat,
    compress,
    decompress,
    decompress_accumulate_recompress,
    resolve_backend,
    slot_noise,
    statistics,
)

LEAVES = 20
"""How many leaves are joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow(TimedRow):
    """One line of the report; ``copy_fraction`` is the share of copy bandwidth reached."""

    kernel: str
    gb_per_s: float
    copy_fraction: float
    moved_bytes: int
    coords: int
    backend: str


class _Case(NamedTuple):
    kernel: str
    call: Callable[[], Any]
    moved_bytes: int
    backend: str


def command(
    size: Annotated[
        str | None, typer.Option(help="bf16 gradient (default: 512MiB; on CPU 512KiB).")
    ] = None,
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate.")] = 5.0,
    dither: Annotated[
        bool, typer.Option("--dither", help="Decode with the encoders' noise.")
    ] = False,
    repeats: options.Repeats = None,
    backend: Annotated[
        str | None,
        typer.Option(help="triton, mosaic, jnp or interpret (default: the fastest here)."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time the coding kernels on one device against a plain copy."""
    options.writable({"--json": json_file})
    checked("--bits", DynamiQ, bits=bits, dither=dither)
    size_bytes = None if size is None else checked("--size", parse_size, size)
    ran = checked("--backend", resolve_backend, backend)
    workers = jax.devices()[:1]
    on_cpu = options.on_cpu(workers)
    repeats = repeats or (5 if on_cpu else 20)
    coords = (size_bytes or (2**19 if on_cpu else 2**29)) // 2
    rows = bench_kernels(coords, bits=bits, dither=dither, repeats=repeats, backend=ran)
    title = f"kernels at {bits:g} bits{' with dither' * dither}, {coords:,} bf16 coordinates, "
    title += f"{options.workers_text(workers)}, {repeats} repeats"
    tables.report(rows, tables.KERNEL_COLUMNS, title, workers, json_file)


def bench_kernels(
    coords: int,
    *,
    bits: float,
    dither: bool = False,
    repeats: int,
    backend: Backend | None = None,
) -> list[KernelRow]:
    """Times joining of leaves, statistics, the plan and the three coding kernels on a device.

    Widths and floors are those of `DynamiQ` over `Direct` among eight workers. A sample has 10
    calls, on a CPU one. The copy's row comes first.
    """
    ran = resolve_backend(backend)
    # Magnitudes vary from super-group to super-group, as a gradient's do.
    key_size, key_value = jax.random.split(jax.random.key(0))
    rows = -(-coords // 256)
    scale = jnp.exp(1.2 * jax.random.normal(key_size, (rows, 1)))
    x = (scale * jax.random.normal(key_value, (rows, 256))).astype(jnp.bfloat16)
    x = x.reshape(-1)[:coords]
    layout = single_chunk(coords, DynamiQ(bits=bits, dither=dither))
    cases = [
        _Case("copy", partial(jax.jit(lambda x: x + 1), x), 2 * x.nbytes, "xla"),
        *_join_cases(x),
        _statistics_case(x, ran),
        *_plan_cases(x, layout, ran),
        *_coding_cases(x, layout, ran),
    ]
    flying = 1 if jax.default_backend() == "cpu" else 10
    timings = time_calls([case.call for case in cases], repeats=repeats, in_flight=flying)
    speeds = [c.moved_bytes / t.time_us / 1e3 for c, t in zip(cases, timings, strict=True)]
    return [
        KernelRow(
            kernel=case.kernel,
            gb_per_s=speed,
            copy_fraction=speed / speeds[0],
            moved_bytes=case.moved_bytes,
            coords=coords,
            backend=case.backend,
            **timing._asdict(),
        )
        for case, timing, speed in zip(cases, timings, speeds, strict=True)
    ]


def _join_cases(x: jax.Array) -> list[_Case]:
    """Joining of leaves as in a bucket, and XLA's concatenation of the same leaves."""
    ends = [x.size * i // LEAVES // 256 * 256 for i in range(1, LEAVES)]
    parts = jnp.split(x, ends)
    calls = {"join leaves": joined, "concatenate leaves": jnp.concatenate}
    return [
        _Case(name, partial(jax.jit(call), parts), 2 * x.nbytes, "xla")
        for name, call in calls.items()
    ]


def _statistics_case(x: jax.Array, backend: Backend) -> _Case:
    size = WireFormat().super_group_size
    call = jax.jit(partial(statistics, super_group_size=size, backend=backend))
    moved_bytes = x.nbytes + 2 * 4 * math.ceil(x.size / size)
    return _Case("statistics", partial(call, x), moved_bytes, backend)


def single_chunk(coords: int, method: DynamiQ) -> Layout:
    """The layout of one chunk that holds all coordinates and passes through two stages."""
    stages = (Stage(1, range(1), 1.0), Stage(1, range(1, 2), 1.0))
    layout = make_layout(
        coords,
        2,
        stages,
        bits=len(stages) * method.bits,
        allocation=method.allocation(8, Direct()),
        stats_per_super_group=len(stages),
        collective="all_gather",
    )
    return replace(layout, n_workers=1)


def _plan_cases(x: jax.Array, layout: Layout, backend: Backend) -> list[_Case]:
    """The plan, and on other backends that of the reference, which sorts."""
    _, sqnorm = statistics(x, super_group_size=layout.super_group_size, backend=backend)
    cases = []
    runs: list[tuple[str, Backend]] = [("plan", backend), ("plan by a sort", "jnp")]
    for name, used in runs if backend != "jnp" else runs[:1]:
        plan = jax.jit(partial(order_and_tiles, layout=layout, backend=used))
        order, (tiles, _), _ = plan(sqnorm)
        moved_bytes = sqnorm.nbytes + order.nbytes + 2 * tiles.nbytes
        cases.append(_Case(name, partial(plan, sqnorm), moved_bytes, used))
    return cases


def _coding_cases(x: jax.Array, layout: Layout, backend: Backend) -> list[_Case]:
    """The coding kernels: compress for the first stage, hop to the second, decompress that."""
    fmt = layout.fmt
    _, sqnorm = statistics(x, super_group_size=fmt.super_group_size, backend=backend)
    order, tiles, _ = jax.jit(lambda energy: order_and_tiles(energy, layout, backend))(sqnorm)
    mean = jnp.zeros(layout.super_groups, jnp.float32)
    first, second = slot_noise(jnp.arange(2, dtype=jnp.uint32), 2, fmt.rounding)

    static: dict[str, Any] = {"fmt": fmt, "backend": backend}
    words = layout.payload_words
    rows = math.ceil(x.size / fmt.super_group_size)

    @jax.jit
    def encode(source, chunks, tiles, noise):
        return compress(source, chunks, Target(tiles, noise, words[0]), **static)

    @jax.jit
    def hop(inputs, source, chunks, tiles, noise):
        target = Target(tiles, noise, words[1])
        return decompress_accumulate_recompress(inputs, source, chunks, target, **static)

    @jax.jit
    def decode(payloads, tiles, chunks, mean_sum, order, noise):
        result = Result(mean_sum, order, rows, x.dtype)
        return decompress(payloads, tiles, chunks, result, noise, **static)

    source, chunks = Source(x, None, order), jnp.zeros(1, jnp.int32)
    encode_args = (source, chunks, tiles[0], first)
    sent = encode(*encode_args)
    hop_args = ((Input(sent[None], tiles[0], noise=first[None]),), source, chunks, tiles[1], second)
    gathered = hop(*hop_args)
    decode_args = (gathered, tiles[1], chunks, mean, order, second[None])

    plan_bytes = mean.nbytes + order.nbytes + tiles[0].nbytes
    hop_bytes = x.nbytes + sent.nbytes + gathered.nbytes
    calls = (
        ("compress", encode, encode_args, x.nbytes + sent.nbytes),
        ("decompress", decode, decode_args, gathered.nbytes + x.nbytes),
        ("decompress-accumulate-recompress", hop, hop_args, hop_bytes),
    )
    return [
        _Case(name, partial(call, *args), moved + plan_bytes, backend)
        for name, call, args, moved in calls
    ]
