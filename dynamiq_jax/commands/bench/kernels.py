"""Kernel benchmark: what one device needs to encode, add and decode a whole gradient.

Every kernel of `pallas_kernels` processes all coordinates in one call, as a single chunk under
the plan that the gradient itself gets at the given bits per coordinate. Calls are dispatched
back-to-back and waited for once, so that their dispatch hides behind the device's work.

Bytes moved are those an ideal kernel reads and writes once: the gradient, payload records,
per-super-group means and order, results. *Copy* is XLA's ``x + 1`` on the same bf16 array; its
bandwidth, measured in the same rounds, is the ceiling that the last column refers to. *Join
leaves* brings 20 leaves into one array, as the leaves of a bucket.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from dynamiq_jax.commands.simulate import one_chunk
from dynamiq_jax.executors import Arrived, Encoder
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.dynamiq.codec import chunk_codec, shared_plan
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.dynamiq.plan import order_and_tiles, pack_statistics
from dynamiq_jax.topologies import Direct
from dynamiq_jax.tree.leaves import joined
from pallas_kernels import Backend, resolve_backend, statistics

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
    function: Callable[..., Any]
    args: tuple[Any, ...]
    moved_bytes: int
    backend: str = "xla"


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
    among_eight = DynamiQ(bits=bits, dither=dither).bind(8 * coords, 8, Direct(streams=1))
    layout = one_chunk(among_eight, coords).layout
    sums = partial(statistics, super_group_size=layout.super_group_size, backend=ran)
    mean, sqnorm = jax.jit(sums)(x)
    plan = partial(order_and_tiles, layout=layout, backend=ran)
    order, (tiles, _), _ = jax.jit(plan)(sqnorm)
    plan_bytes = sqnorm.nbytes + order.nbytes + 2 * tiles.nbytes
    parts = jnp.split(x, [coords * i // LEAVES // 256 * 256 for i in range(1, LEAVES)])
    cases = [
        _Case("copy", lambda x: x + 1, (x,), 2 * x.nbytes),
        _Case("join leaves", joined, (parts,), 2 * x.nbytes),
        _Case("concatenate leaves", jnp.concatenate, (parts,), 2 * x.nbytes),
        _Case("statistics", sums, (x,), x.nbytes + mean.nbytes + sqnorm.nbytes, ran),
        _Case("plan", plan, (sqnorm,), plan_bytes, ran),
        *_coding_cases(x, pack_statistics(mean, sqnorm, layout), layout, ran),
    ]
    flying = 1 if jax.default_backend() == "cpu" else 10
    calls = [partial(jax.jit(case.function), *case.args) for case in cases]
    timings = time_calls(calls, repeats=repeats, in_flight=flying)
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


def _coding_cases(x: jax.Array, stats: jax.Array, layout: Layout, backend: Backend) -> list[_Case]:
    """The coding kernels: compress for the first stage, hop to the second, decompress that."""
    chunk, slots = jnp.zeros(1, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    seed = jnp.zeros(2, jnp.uint32)
    shared = jax.jit(lambda s: shared_plan(s, seed, layout, len(slots), backend))(stats)
    codec = partial(chunk_codec, layout=layout, dtype=x.dtype, backend=backend)

    @jax.jit
    def encode(x, shared):
        return codec(x, shared).encode((), chunk, Encoder(0, slots[0], 0), ())[0]

    @jax.jit
    def hop(x, shared, sent):
        arrived = (Arrived(sent[None], Encoder(0, slots[:1], chunk)),)
        return codec(x, shared).encode(arrived, chunk, Encoder(1, slots[1], 0), ())[0]

    def decode(x, shared, payloads):
        return codec(x, shared).decode(payloads, chunk, Encoder(1, slots[1:], chunk), None, ())[0]

    sent = encode(x, shared)
    gathered = hop(x, shared, sent)
    plan = shared.plan
    read = x.nbytes + plan.mean.nbytes + plan.order.nbytes + plan.tiles[0].nbytes
    both = sent.nbytes + gathered.nbytes
    return [
        _Case("compress", encode, (x, shared), read + sent.nbytes, backend),
        _Case("decompress", decode, (x, shared, gathered), read + gathered.nbytes, backend),
        _Case("decompress-accumulate-recompress", hop, (x, shared, sent), read + both, backend),
    ]
