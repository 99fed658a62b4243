"""Times of the kernels by which one device encodes, adds up and decodes a whole gradient.

    python benchmarks/coding_kernels.py [--size 512MiB] [--bits 4] [--dither] [--backend mosaic]
    python benchmarks/coding_kernels.py --traffic [--size 64MiB] [--bits 4] [--dither]
    python benchmarks/coding_kernels.py --mx mxfp8,mxfp4 [--size 512MiB]

Every kernel of `pallas_kernels` processes all coordinates in one call, as a single chunk under
the plan that the gradient itself gets at the given bits per coordinate. Calls are dispatched
back-to-back and waited for once, so that their dispatch hides behind the device's work. *Copy* is
XLA's ``x + 1`` on the same bf16 array. *Join leaves* brings 20 leaves into one array, as the leaves
of a bucket.

``--traffic`` runs nothing and needs no GPU. It prints the bytes that each kernel reads and writes
for one coordinate, from the shapes of its operands and results in the traced program.

``--mx`` times the kernels of MX floats instead, beside the programs that XLA makes for the same
operations (``jnp``), with the bytes that each must move and the share of the GPU's peak rate.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer

from dynamiq_jax import contrib
from dynamiq_jax.commands.bench.contenders import parse_size
from dynamiq_jax.commands.bench.timing import Timing, time_calls
from dynamiq_jax.commands.options import checked, workers_text
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import inner_jaxprs
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.dynamiq.codec import (
    SharedPlan,
    chunk_codec,
    order_and_tiles,
    pack_statistics,
    shared_plan,
)
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.topologies import Direct
from dynamiq_jax.tree.leaves import joined
from pallas_kernels import (
    Backend,
    Result,
    Source,
    Target,
    compress,
    decompress,
    resolve_backend,
    statistics,
)

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
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Count bytes instead; needs no GPU.")
    ] = False,
    mx: Annotated[
        str | None, typer.Option(help="Time these MX floats instead, such as mxfp8,mxfp4.")
    ] = None,
) -> None:
    """Time the coding kernels on one device beside a plain copy."""
    checked("--bits", DynamiQ, bits=bits, dither=dither)
    coords = checked("--size", parse_size, size) // 2
    if traffic:
        print_traffic(coords, bits=bits, dither=dither)
        return
    if mx is not None:
        print_mx(coords, mx.split(","), repeats=repeats, backend=backend)
        return
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
    layout = one_chunk(coords, bits, dither)
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


def one_chunk(coords: int, bits: float, dither: bool) -> OneChunk:
    """The layout of one chunk of ``coords``, with widths and floors of eight workers' chunks."""
    among_eight = DynamiQ(bits=bits, dither=dither).layout(8 * coords, 8, Direct(streams=1))
    fields = dataclasses.fields(among_eight)
    return OneChunk(**{f.name: getattr(among_eight, f.name) for f in fields} | {"size": coords})


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


class Traffic(NamedTuple):
    """The bytes per coordinate that one kernel moves between itself and device memory."""

    read: float
    """All operands, each once."""
    written: float
    """All results, each once."""
    least: float
    """The gradient, the payloads and the result, each once, without plan and statistics."""
    unfused: float | None = None
    """All that decompress to f32, add and compress move one after the other, where they differ."""


def count_traffic(coords: int, *, bits: float, dither: bool = False) -> dict[str, Traffic]:
    """Bytes per coordinate of the kernels that all-reduces and reduce-scatters run, by name.

    The kernels take ``coords`` bf16 coordinates as in `bench_kernels`, and a hop adds one payload.
    Nothing runs: the operands and results of ``pallas_call`` in the traced program give the bytes.
    """
    layout = one_chunk(coords, bits, dither)
    moved: dict[str, tuple[int, int]] = {}

    def trace(x):
        mean, sqnorm = statistics(x, super_group_size=layout.super_group_size, backend="interpret")
        stats = pack_statistics(mean, sqnorm, layout)
        for name, call in traffic_calls(x, stats, layout).items():
            moved[name] = bytes_moved(jax.make_jaxpr(call)())

    jax.eval_shape(trace, jax.ShapeDtypeStruct((coords,), jnp.bfloat16))
    first, second = (4 * words for words in layout.payload_words)  # uint32
    gradient = result = 2 * coords
    message = layout.rows * layout.stats_per_super_group * 2  # bf16 on the wire
    least = {
        "statistics": gradient + message,
        "compress": gradient + first,
        "decompress-accumulate-recompress": gradient + first + second,
        "decompress-accumulate": gradient + first + result,
        "decompress": second + result,
    }
    unfused = {name: sum(moved[f"{name}, unfused"]) / coords for name in [*least][2:4]}
    return {
        name: Traffic(*(n / coords for n in (*moved[name], least[name])), unfused.get(name))
        for name in least
    }


def traffic_calls(x: jax.Array, stats: jax.Array, layout: Layout) -> dict[str, Callable[[], Any]]:
    """The kernels of `count_traffic`, and the sequences that fused kernels replace."""
    chunk, seed = jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.uint32)
    shared = shared_plan(stats, seed, layout, 2, "interpret")
    call = Call(Axis(()), None, seed)
    codec: ChunkCodec = chunk_codec(
        x, shared, layout, call, slice_start=jnp.int32(0), backend="interpret"
    )
    slots = jnp.arange(2, dtype=jnp.int32)
    payloads = [jnp.zeros((1, words), jnp.uint32) for words in layout.payload_words]
    arrived = (Arrived(payloads[0][None], Encoder(0, slots[:1], chunk)),)
    finish = codec.finish
    assert finish is not None
    return {
        "statistics": partial(
            statistics, x, super_group_size=layout.super_group_size, backend="interpret"
        ),
        "compress": lambda: codec.encode((), chunk, Encoder(0, slots[0], 0), None)[0],
        "decompress-accumulate-recompress": lambda: codec.encode(
            arrived, chunk, Encoder(1, slots[1], 0), None
        )[0],
        "decompress-accumulate": lambda: finish(arrived, chunk, None),
        "decompress": lambda: codec.decode(payloads[1], chunk, Encoder(1, slots[1:], chunk), None),
        "decompress-accumulate-recompress, unfused": partial(
            unfused_hop, x, payloads[0], shared, layout
        ),
        "decompress-accumulate, unfused": partial(unfused_sum, x, payloads[0], shared, layout),
    }


def unfused_sum(x, payload, shared: SharedPlan, layout: Layout, dtype=jnp.bfloat16) -> jax.Array:
    """Decompresses to f32, then adds ``x``; nothing but the sum of one element is fused."""
    plan, chunk = shared.plan, jnp.zeros(1, jnp.int32)
    result = Result(plan.mean_sum, plan.order, layout.rows, jnp.float32)
    known = shared.noise[:1] if layout.fmt.dither else None
    sent = decompress(
        payload, plan.tiles[0], chunk, result, known, fmt=layout.fmt, backend="interpret"
    )
    return added(sent.reshape(-1)[: x.size], x, dtype)


@partial(jax.jit, static_argnums=2)
def added(total: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """The sum of two arrays, as XLA would compute it in one pass."""
    return (total + x.astype(total.dtype)).astype(dtype)


def unfused_hop(x, payload, shared: SharedPlan, layout: Layout) -> jax.Array:
    """Decompresses to f32, adds ``x`` and compresses, by three programs one after the other."""
    plan, chunk = shared.plan, jnp.zeros(1, jnp.int32)
    total = unfused_sum(x, payload, shared, layout, jnp.float32)
    target = Target(plan.tiles[1], shared.noise[1], layout.payload_words[1])
    mean = plan.mean if layout.stats_per_super_group == 2 else None
    source = Source(total, mean, plan.order)
    return compress(source, chunk, target, fmt=layout.fmt, backend="interpret")


def bytes_moved(program: Any) -> tuple[int, int]:
    """Bytes that the kernels of a traced program read and write, and its calls of `added`.

    Operands of one number are left out, which stand for what a kernel does not have. So is an
    operand whose place a result takes.
    """
    read = written = 0
    for equation in program.eqns:
        operands, results = ([v.aval for v in vs] for vs in (equation.invars, equation.outvars))
        if equation.primitive.name == "pallas_call":
            replaced = {i for i, _ in equation.params["input_output_aliases"]}
            operands = [a for i, a in enumerate(operands) if i not in replaced and a.size > 1]
        elif equation.params.get("name") != added.__name__:
            parts = [bytes_moved(inner) for inner in inner_jaxprs(equation)]
            read, written = (n + sum(p[i] for p in parts) for i, n in enumerate((read, written)))
            continue
        read += sum(a.size * a.dtype.itemsize for a in operands)
        written += sum(a.size * a.dtype.itemsize for a in results)
    return read, written


def print_traffic(coords: int, *, bits: float, dither: bool) -> None:
    """Prints `count_traffic` as a table of pages."""
    what = f"{bits:g} bits{' with dither' * dither}, {coords:,} bf16 coordinates"
    print(f"bytes per coordinate at {what}, JAX {jax.__version__}")
    heads = "kernel", "read", "written", "in all", "least", "above the least", "unfused"
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name, row in count_traffic(coords, bits=bits, dither=dither).items():
        total = row.read + row.written
        unfused = "" if row.unfused is None else f"{row.unfused:.2f}"
        cells = f"{row.read:.3f} | {row.written:.3f} | {total:.3f} | {row.least:.3f}"
        print(f"| {name} | {cells} | {total / row.least - 1:.1%} | {unfused} |")


PEAKS = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes per second of device memory, by a part of the device's name (SXM modules)."""

MX_METHODS = {name.lower(): getattr(contrib, name) for name in ("MXFP8", "MXFP6", "MXFP4")}


def print_mx(coords: int, names: list[str], *, repeats: int, backend: str | None) -> None:
    """Prints the times of `bench_mx` with bytes and rates."""
    kind = jax.devices()[0].device_kind
    peak = next((rate for part, rate in PEAKS.items() if part in kind), None)
    ran = checked("--backend", resolve_backend, backend)
    print(
        f"{coords:,} bf16 coordinates, {workers_text(jax.devices()[:1])}, {repeats} repeats, "
        f"JAX {jax.__version__}"
    )
    for name in names:
        if name not in MX_METHODS:
            raise typer.BadParameter(f"--mx has {name!r}; choose from {', '.join(MX_METHODS)}")
        for of in dict.fromkeys((ran, "jnp")):
            for call, (timing, moved) in bench_mx(
                coords, name, repeats=repeats, backend=of
            ).items():
                rate = moved / timing.time_us * 1e6
                share = "" if peak is None else f", {rate / peak:.1%} of the peak"
                print(
                    f"{name} {of:8} {call:14} {timing.time_us:9.1f} us "
                    f"({timing.p10_us:.1f}-{timing.p90_us:.1f}), {moved / 1e6:.1f} MB, "
                    f"{rate / 1e9:.0f} GB/s{share}",
                    flush=True,
                )


def bench_mx(
    coords: int, name: str, *, repeats: int, backend: str
) -> dict[str, tuple[Timing, int]]:
    """Times and least bytes of an MX codec's operations on one chunk of all coordinates."""
    x = jax.random.normal(jax.random.key(0), (coords,), jnp.bfloat16)
    method, topology = MX_METHODS[name](backend=backend), Direct(streams=1)
    call = Call(Axis(()), topology, jnp.zeros(2, jnp.uint32))
    layout, chunk, one = (
        method.layout(coords, 1, topology),
        jnp.zeros(1, jnp.int32),
        Encoder(0, 0, 0),
    )
    codec = lambda x: method.codec(x, method.share(None, layout, call), layout, call)

    @jax.jit
    def encode(x):
        return codec(x).encode((), chunk, one, None)[0]

    @jax.jit
    def hop(x, sent):
        return codec(x).encode((Arrived(sent, one),), chunk, one, None)[0]

    @jax.jit
    def finish(x, sent):
        add = codec(x).finish
        assert add is not None
        return add((Arrived(sent, one),), chunk, None)

    @jax.jit
    def decode(x, payload):
        return codec(x).decode(payload, chunk, one, None)

    sent = encode(x)
    three = jnp.stack([sent] * 3)
    gradient, payload = 2 * coords, 4 * sent.size
    calls = {
        "encode": (partial(encode, x), gradient + payload),
        "hop": (partial(hop, x, sent[None]), gradient + 2 * payload),
        "hop, 3 arrived": (partial(hop, x, three), gradient + 4 * payload),
        "sum": (partial(finish, x, sent[None]), 2 * gradient + payload),
        "decode": (partial(decode, x, sent), gradient + payload),
    }
    flying = 1 if jax.default_backend() == "cpu" else 10
    timings = time_calls([run for run, _ in calls.values()], repeats=repeats, in_flight=flying)
    moved = (bytes_ for _, bytes_ in calls.values())
    return dict(zip(calls, zip(timings, moved, strict=True), strict=True))


if __name__ == "__main__":
    typer.run(main)
