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
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from dynamiq_jax.commands.bench.contenders import parse_size
from dynamiq_jax.commands.bench.timing import Timing, time_calls
from dynamiq_jax.commands.options import checked, workers_text
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


class OneChunk(Layout):
    """A layout of a single chunk, with the bits that chunks of several workers have."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


def main(
    size: Annotated[str, typer.Option(help="bf16 gradient; 512KiB is enough on a CPU.")] = "512MiB",
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate.")] = 5.0,
    dither: Annotated[
        bool, typer.Option("--dither", help="Decode with the encoders' noise.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed samples per kernel.")] = 20,
    backend: Annotated[
        str | None,
        typer.Option(help="triton, mosaic, jnp or interpret (default: the fastest here)."),
    ] = None,
) -> None:
    """Time the coding kernels on one device beside a plain copy."""
    checked("--bits", DynamiQ, bits=bits, dither=dither)
    coords = checked("--size", parse_size, size) // 2
    ran = checked("--backend", resolve_backend, backend)
    print(
        f"kernels ({ran}) at {bits:g} bits{' with dither' * dither}, {coords:,} bf16 coordinates, "
        f"{workers_text(jax.devices()[:1])}, {repeats} repeats, JAX {jax.__version__}"
    )
    found = bench_kernels(coords, bits=bits, dither=dither, repeats=repeats, backend=ran)
    for kernel, timing in found.items():
        print(f"{kernel:32} {timing.time_us:9.1f} us ({timing.p10_us:.1f}-{timing.p90_us:.1f})")


def bench_kernels(
    coords: int,
    *,
    bits: float,
    dither: bool = False,
    repeats: int,
    backend: Backend | None = None,
) -> dict[str, Timing]:
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
    calls = {
        "copy": partial(jax.jit(lambda x: x + 1), x),
        "join leaves": partial(jax.jit(joined), parts),
        "concatenate leaves": partial(jax.jit(jnp.concatenate), parts),
        "statistics": partial(jax.jit(sums), x),
        "plan": partial(jax.jit(plan), sqnorm),
        **coding_calls(x, pack_statistics(mean, sqnorm, layout), layout, ran),
    }
    flying = 1 if jax.default_backend() == "cpu" else 10
    timings = time_calls([*calls.values()], repeats=repeats, in_flight=flying)
    return dict(zip(calls, timings, strict=True))


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
