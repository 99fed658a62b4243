"""`dynamiq-jax advise`: measures, and says whether compression pays for a model, and how."""

import math
import textwrap
from typing import Annotated, Any

import jax
import typer

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import all_reduce, contenders, settings, tables
from dynamiq_jax.commands.bench.advice import check, decide
from dynamiq_jax.commands.models import floating_leaves, model_file, read_model
from dynamiq_jax.commands.options import announce, checked
from dynamiq_jax.compression.compression import Compression


def command(
    model: options.Model,
    step_time_ms: Annotated[
        float | None, typer.Option(help="A training step with bf16 psum, milliseconds.")
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(help="Wire bits per coordinate to try (default: 5,4,3.5; on CPU 5,4)."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            help="direct, ring, butterfly, hierarchical (default: all that suit; on CPU direct)."
        ),
    ] = None,
    nodes: options.Nodes = 1,
    processes: options.Processes = None,
    process_id: options.ProcessId = 0,
    coordinator: options.Coordinator = "localhost:29400",
    repeats: options.Repeats = None,
    json_file: options.JsonFile = None,
) -> None:
    """Measure this machine or cluster, and say whether compression pays for a model, and how.

    On GPUs every setting is tried with and without dither. A CPU checks that settings run, and
    gives no advice.

    With --processes, or under srun, run it in every process; the first one reports.
    """
    if step_time_ms is not None and not (step_time_ms > 0 and math.isfinite(step_time_ms)):
        raise typer.BadParameter(
            f"{step_time_ms:g} is not a positive number: pass for example 180",
            param_hint="--step-time-ms",
        )
    name, tree = checked("MODEL", read_model, model)
    leaves = checked("MODEL", floating_leaves, tree)
    options.writable(json_file, model_file(model), first=process_id == 0)
    tried = None if bits is None else checked("--bits", contenders.parse_bits, bits)
    options.join(processes, process_id, coordinator)
    workers = jax.devices()
    on_cpu = options.on_cpu(workers)
    if len(workers) < 2:
        raise typer.BadParameter("1 device found: an all-reduce takes two; pass --processes")
    mesh = checked("--nodes", all_reduce.make_mesh, workers, nodes)
    routes = _routes(topology, mesh, nodes)
    repeats = repeats or (5 if on_cpu else 20)
    dithers = [False] if on_cpu else [False, True]
    tried = tried or ([5, 4] if on_cpu else [5, 4, 3.5])
    chosen = settings.settings(leaves, mesh.devices.shape, tried, routes, dithers)
    announce(f"measuring {len(chosen)} setting(s) and bf16 psum ...")
    rows = settings.bench_settings(mesh, leaves, chosen, repeats=repeats)
    if jax.process_index() > 0:
        return
    among = " x ".join(map(str, mesh.devices.shape))
    title = f"all-reduce of {name}, leaves: {len(leaves)}, {among} workers, {repeats} repeats, "
    title += f"{options.workers_text(workers)}, {jax.process_count()} process(es)"
    typer.echo()
    columns = tables.setting_columns(rows[0].time_us)
    tables.report(rows, columns, title, workers, json_file)
    reason = None if chosen else settings.native_reason(leaves, mesh.devices.shape)
    said = decide(rows, step_ms=step_time_ms, reason=reason)
    for sentence in (check(rows),) if on_cpu and chosen else said.sentences:
        typer.echo("\n" + textwrap.fill(sentence, 100))
    if not (on_cpu and chosen):  # lines of a script
        lines = said.snippet(("data",) if nodes == 1 else mesh.axis_names)
        typer.echo("\n" + textwrap.indent(lines, "    "))


def _routes(topology: str | None, mesh: Any, nodes: int) -> list[Any]:
    """The topologies of the option, or those that suit the mesh."""
    shape = mesh.devices.shape
    if topology is None:
        names = (
            ["direct"] if options.on_cpu(mesh.devices.flat) else settings.suiting_topologies(shape)
        )
    else:
        names = contenders.parts(topology)
    routes = [checked("--topology", contenders.parse_topology, name, nodes) for name in names]
    for route in routes:
        checked("--topology", Compression(topology=route).route, shape)
    return routes
