"""All-reduce benchmark: compressed methods against warmed native `lax.psum`.

One bf16 leaf per device, in the manner of nccl-tests, is timed as `timing` says. Error and replica
agreement of what the timed program returns are computed once, outside the timing.

Terms (nccl-tests' own; n workers, leaf of s bytes, time t):

* busbw = s / t * 2(n-1)/n, what a bf16 all-reduce in that time would move per link;
* wire bandwidth = bytes one worker really sends / t, far less than busbw when compressed;
* vNMSE = |estimate - sum|^2 / |sum|^2 against the exact f32 sum;
* wrong = coordinates that are not the same bits on all workers; anything but 0 is a defect.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dynamiq_jax.core.axis as core_axis
from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.contenders import Contender
from dynamiq_jax.commands.bench.timing import Timing, compile_calls, repeat_on_device, time_calls
from dynamiq_jax.commands.options import checked
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.compression.compression import Compression
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.topologies.links import compiled_by, compiler_options, jit

AXES = ("node", "gpu")
"""The axes of the mesh; one node has the last of them alone."""

BLOCK = 256
"""Consecutive coordinates of the test data that share a magnitude."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRow(Timing):
    """One line of the report; bandwidths in GB/s (10^9), ratios and vNMSE without unit."""

    size_bytes: int
    method: str
    busbw_gb_per_s: float
    wire_gb_per_s: float
    wire_bytes: int
    speedup: float
    vnmse: float
    wrong: int
    n_workers: int
    iterations: int
    backend: str
    transport: str


def payloads_by(compression: Compression | None, sizes: tuple[int, ...], size_bytes: int) -> str:
    """How a psum of so many bytes sends payloads on axes of these sizes, see `Topology.transport`.

    Sums that one push kernel does are "push" whatever the topology's transport is.
    """
    if compression is None or compression.topology is None:
        return "xla"
    with compiled_by(compiler_options()):
        route: Any = compression.route(sizes)
    if route.pushed is not None and route.pushed[0] <= size_bytes <= route.pushed[1]:
        return route.push.transport
    return route.topology.levels(sizes).outer.transport


def repetitions(size_bytes: int, platform: str, iterations: int | None = None) -> dict[str, Any]:
    """Collectives in one timed program, and programs dispatched before the wait for all of them.

    A program of several copies its input once and perhaps its results: leaves from 128 MiB on have
    one collective per program, and several programs are in flight.
    """
    if platform == "cpu":
        return {"iterations": iterations or 1, "in_flight": 1}
    several = min(64, max(16, -(-(2**31) // size_bytes)))
    count = iterations or (1 if size_bytes >= 128 * 2**20 else several)
    return {"iterations": count, "in_flight": 8 if count == 1 else 1}


def bench_all_reduce(
    sizes_bytes: Sequence[int],
    methods: Sequence[Contender],
    *,
    devices: Sequence[Any],
    repeats: int,
    nodes: int = 1,
    iterations: int | None = None,
) -> list[AllReduceRow]:
    """Times bf16 psum and every method on bf16 leaves of every size per device.

    Devices of a node follow each other. Where they belong to several processes, all of these call
    this function alike. Rows are in the order of sizes, then of psum and the methods.
    """
    mesh, platform = make_mesh(devices, nodes), devices[0].platform
    chosen, n, rows = [contenders.uncompressed(), *methods], len(devices), []
    quality = quality_program(mesh)
    for size_bytes in sizes_bytes:
        coords = size_bytes // 2
        counts = repetitions(size_bytes, platform, iterations)
        data = heavy_tailed_gradients(mesh, coords)
        programs = [timed_program(mesh, c, counts["iterations"]) for c in chosen]
        calls = compile_calls(programs, data)
        checked = [quality(data, replicas_of(call(), data)) for call in calls]
        timings = time_calls(calls, repeats=repeats, **counts)
        for contender, timing, (error, wrong) in zip(chosen, timings, checked, strict=True):
            sent = contender.wire_bytes(coords, mesh.devices.shape)
            rows.append(
                AllReduceRow(
                    size_bytes=size_bytes,
                    method=contender.label,
                    busbw_gb_per_s=2 * (n - 1) / n * size_bytes / timing.time_us / 1e3,
                    wire_gb_per_s=sent / timing.time_us / 1e3,
                    wire_bytes=sent,
                    speedup=timings[0].time_us / timing.time_us,
                    vnmse=float(error),
                    wrong=int(wrong),
                    n_workers=n,
                    iterations=counts["iterations"],
                    backend=contender.backend,
                    transport=payloads_by(contender.compression, mesh.devices.shape, size_bytes),
                    **asdict(timing),
                )
            )
    return rows


def make_mesh(devices: Sequence[Any], nodes: int = 1) -> Mesh:
    """One axis, or two if there are several nodes; refuses nodes that are not equal."""
    if len(devices) % nodes:
        raise ValueError(f"{len(devices)} devices are not {nodes} equal nodes: pass a divisor")
    shape = (len(devices),) if nodes == 1 else (nodes, len(devices) // nodes)
    names = AXES[-len(shape) :]
    return core_axis.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def heavy_tailed_gradients(mesh: Mesh, coords: int) -> jax.Array:
    """The paper's mixture ``bf16[n, coords]``, row i on worker i, different on every worker."""

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    def draw() -> jax.Array:
        data = lognormal_mixture(jax.random.key(0), mesh.size, -(-coords // BLOCK), BLOCK)
        return data[:, :coords].astype(jnp.bfloat16)

    return draw()


def timed_program(mesh: Mesh, contender: Contender, iterations: int) -> Callable[[Any], Any]:
    """The program (data) -> result that reduces so many times in a row.

    ``data`` is an array or a tree of arrays of any floating dtype [n, ...], row i on worker i.
    """
    axes = mesh.axis_names
    rows = PartitionSpec(axes)
    specs = {"in_specs": rows, "out_specs": PartitionSpec() if contender.replicated else rows}
    reduce = partial(contender.reduce, axis_name=axes[0] if len(axes) == 1 else axes)

    @partial(jit, compiler_options=contender.options)
    @partial(jax.shard_map, mesh=mesh, **specs)
    def program(data: Any) -> Any:
        own = jax.tree.map(lambda x: x.reshape(x.shape[1:]), data)
        return repeat_on_device(reduce, iterations)(own)

    return program


def quality_program(
    mesh: Mesh,
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The function (data, result) -> (vNMSE of the worst worker, coordinates that differ).

    Both are bf16[n, coords], row i on worker i: see `replicas_of`. A program that also computed the
    result could take replicas for equal.
    """
    axes = mesh.axis_names

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    def quality(data: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        exact = lax.psum(data.astype(jnp.float32), axes)
        bits = lax.bitcast_convert_type(own, jnp.uint16).astype(jnp.uint32)
        differ = lax.pmax(bits, axes) != lax.pmin(bits, axes)
        return lax.pmax(vnmse(own, exact), axes), jnp.sum(differ)

    return quality


def replicas_of(result: jax.Array, data: jax.Array) -> jax.Array:
    """Every worker's own copy of a replicated ``result``, laid out as ``data`` (one row each)."""
    own = [shard.data[None] for shard in result.addressable_shards]
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, own)


def command(
    sizes: Annotated[
        str | None,
        typer.Option(help="bf16 leaf per device (default: 16MiB,64MiB,1GiB; on CPU 1MiB,4MiB)."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods with their wire bits per coordinate.")
    ] = "dynamiq:5,dynamiq:4",
    topology: Annotated[
        str, typer.Option(help="direct, ring, butterfly, hierarchical (needs --nodes), or several.")
    ] = "direct",
    nodes: options.Nodes = 1,
    processes: options.Processes = None,
    process_id: options.ProcessId = 0,
    coordinator: options.Coordinator = "localhost:29400",
    repeats: options.Repeats = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="All-reduces per sample (default: by size).")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time compressed all-reduces against bf16 psum, on GPUs also under XLA's options for it.

    With --processes, or under srun, run it in every process; the first one reports.
    """
    options.writable(json_file, first=process_id == 0)
    routes = [
        checked("--topology", contenders.parse_topology, name, nodes)
        for name in contenders.parts(topology)
    ]
    for text in contenders.parts(methods):
        checked("--methods", contenders.make_method, text)
    if sizes is not None:
        checked("--sizes", contenders.parse_sizes, sizes)
    options.join(processes, process_id, coordinator)
    # What asks for devices starts JAX's backend, which has to come after the processes have joined.
    chosen = [
        checked("--methods", contenders.parse_timed, text, route)
        for text in contenders.parts(methods)
        for route in routes
    ]
    workers = jax.devices()
    on_cpu = options.on_cpu(workers)
    repeats = repeats or (5 if on_cpu else 20)
    sizes_bytes = contenders.parse_sizes(sizes or ("1MiB,4MiB" if on_cpu else "16MiB,64MiB,1GiB"))
    shape = checked("--nodes", make_mesh, workers, nodes).devices.shape
    for contender in chosen:
        checked("--methods --topology", contender.wire_bytes, sizes_bytes[0] // 2, shape)
    rows = bench_all_reduce(
        sizes_bytes,
        chosen if on_cpu else [*contenders.tuned(), *chosen],
        devices=workers,
        repeats=repeats,
        nodes=nodes,
        iterations=iterations,
    )
    if jax.process_index() > 0:
        return
    title = f"psum of one bf16 leaf, {options.workers_text(workers)}, {repeats} repeats"
    if nodes > 1 or jax.process_count() > 1:
        title += f", {nodes} node(s), {jax.process_count()} process(es)"
    tables.report(rows, tables.ALL_REDUCE_COLUMNS, title, workers, json_file)
