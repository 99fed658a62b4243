"""Times of the kernels by which one device encodes, adds up and decodes a whole gradient.

    python benchmarks/coding_kernels.py [--size 512MiB] [--bits 4] [--dither] [--backend mosaic]

Every kernel of `pallas_kernels` processes all coordinates in one call, as a single chunk under
the plan that the gradient itself gets at the given bits per coordinate. Calls are dispatched
back-to-back and waited for once, so that their dispatch hides behind the device's work. *Copy* is
XLA's ``x + 1`` on the same bf16 array. *Join leaves* brings 20 leaves into one array, as the leaves
of a bucket.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import tables
from dynamiq_jax.commands.bench.contenders import parse_size
from dynamiq_jax.commands.bench.timing import Timing, time_calls
from dynamiq_jax.commands.options import checked
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.codec import Arrived, Encoder
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.dynamiq.codec import chunk_codec, shared_plan
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.dynamiq.plan import order_and_tiles, pack_statistics
from dynamiq_jax.topologies import Direct
from dynamiq_jax.tree.leaves import joined
from pallas_kernels import Backend, resolve_backend, statistics

LEAVES = 20
"""How many leaves are joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow(Timing):
    """One line of the report."""

    kernel: str
    coords: int
    backend: str


class OneChunk(Layout):
    """A layout of a single chunk, with the bits that chunks of several workers have."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


COLUMNS = (
    tables.Column("kernel", lambda r: r.kernel, True),
    *tables.TIME_COLUMNS,
    tables.Column("backend", lambda r: r.backend, True),
)


def main(
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
    """Time the coding kernels on one device beside a plain copy."""
    options.writable(json_file)
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
    tables.report(rows, COLUMNS, title, workers, json_file)


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
    calls, on a CPU one.
    """
    ran = resolve_backend(backend)
    x = lognormal_mixture(jax.random.key(0), 1, -(-coords // 256))[0, :coords].astype(jnp.bfloat16)
    among_eight = DynamiQ(bits=bits, dither=dither).layout(8 * coords, 8, Direct(streams=1))
    fields = dataclasses.fields(among_eight)
    layout = OneChunk(**{f.name: getattr(among_eight, f.name) for f in fields} | {"size": coords})
    sums = partial(statistics, super_group_size=layout.super_group_size, backend=ran)
    mean, sqnorm = jax.jit(sums)(x)
    plan = partial(order_and_tiles, layout=layout, backend=ran)
    parts = jnp.split(x, [coords * i // LEAVES // 256 * 256 for i in range(1, LEAVES)])
    by_xla = {
        "copy": partial(jax.jit(lambda x: x + 1), x),
        "join leaves": partial(jax.jit(joined), parts),
        "concatenate leaves": partial(jax.jit(jnp.concatenate), parts),
    }
    ours = {
        "statistics": partial(jax.jit(sums), x),
        "plan": partial(jax.jit(plan), sqnorm),
        **coding_calls(x, pack_statistics(mean, sqnorm, layout), layout, ran),
    }
    flying = 1 if jax.default_backend() == "cpu" else 10
    calls = by_xla | ours
    timings = time_calls([*calls.values()], repeats=repeats, in_flight=flying)
    return [
        KernelRow(
            kernel=name,
            coords=coords,
            backend=ran if name in ours else "xla",
            **dataclasses.asdict(timing),
        )
        for name, timing in zip(calls, timings, strict=True)
    ]


def coding_calls(
    x: jax.Array, stats: jax.Array, layout: Layout, backend: Backend
) -> dict[str, Callable[[], Any]]:
    """The coding kernels: compress for the first stage, hop to the second, decompress that."""
    chunk, slots = jnp.zeros(1, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    seed = jnp.zeros(2, jnp.uint32)
    shared = jax.jit(lambda s: shared_plan(s, seed, layout, len(slots), backend))(stats)
    call = Call(Axis(()), None, seed)
    codec = partial(chunk_codec, layout=layout, call=call, backend=backend)

    @jax.jit
    def encode(x, shared):
        return codec(x, shared).encode((), chunk, Encoder(0, slots[0], 0), None)[0]

    @jax.jit
    def hop(x, shared, sent):
        arrived = (Arrived(sent[None], Encoder(0, slots[:1], chunk)),)
        return codec(x, shared).encode(arrived, chunk, Encoder(1, slots[1], 0), None)[0]

    @jax.jit
    def decode(x, shared, payloads):
        return codec(x, shared).decode(payloads, chunk, Encoder(1, slots[1:], chunk), None)

    sent = encode(x, shared)
    return {
        "compress": partial(encode, x, shared),
        "decompress": partial(decode, x, shared, hop(x, shared, sent)),
        "decompress-accumulate-recompress": partial(hop, x, shared, sent),
    }


if __name__ == "__main__":
    typer.run(main)
