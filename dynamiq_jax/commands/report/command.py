"""The command `dynamiq-jax report`."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import Mesh

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import all_reduce, contenders, tables
from dynamiq_jax.commands.options import announce, checked, checked_file
from dynamiq_jax.commands.report import hosts, network, page, steps
from dynamiq_jax.topologies.schedules import automatic

LEAST, MOST = 3, 20
"""Timed samples of each row."""

FEW = 8
"""All-reduces of one program, below the size from which `repetitions` has one."""


def command(
    out: Annotated[Path, typer.Option(help="A folder for report.json, report.md and NCCL's logs.")],
    sizes: Annotated[
        str | None,
        typer.Option(help="bf16 leaf per device (default: 1MiB,16MiB,256MiB; on CPU 64KiB)."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="For measuring; programs have to be compiled besides.")
    ] = 40,
    processes: options.Processes = None,
    process_id: options.ProcessId = 0,
    coordinator: options.Coordinator = "localhost:29400",
) -> None:
    """Write links, all-reduces, a step by four ways, versions and NCCL's network to two files.

    With --processes, or under srun or mpirun, run it in every process; the first one writes.
    """
    if sizes is not None:
        checked("--sizes", contenders.parse_sizes, sizes)
    with checked_file(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
    network.ask_for_log(out)
    options.join(processes, process_id, coordinator)
    start, devices = time.monotonic(), jax.devices()
    if len(devices) < 2:
        raise typer.BadParameter("1 device found: an all-reduce takes two; pass --processes")
    on_cpu = options.on_cpu(devices)
    found = measure(
        contenders.parse_sizes(sizes or ("64KiB" if on_cpu else "1MiB,16MiB,256MiB")),
        steps.SMALL if on_cpu else steps.Model(),
        seconds,
    )
    found["seconds"] = time.monotonic() - start
    if jax.process_index() > 0:
        return
    (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    text = page.page(found)
    (out / "report.md").write_text(text)
    typer.echo(text)
    announce(f"{out / 'report.md'} and report.json are to send; they name no host")


def measure(sizes_bytes: Sequence[int], model: steps.Model, seconds: float) -> dict[str, Any]:
    """All that a report holds; all processes call this function alike."""
    devices = jax.devices()
    mesh = all_reduce.make_mesh(devices, nodes_of(devices))
    topology, reason = automatic(mesh.devices.shape)
    ours = contenders.parse_method("dynamiq:5", topology)
    rows, left_out = all_reduces(mesh, sizes_bytes, ours, seconds / 2)
    trained = steps.bench_steps(mesh, model, within(seconds / 2))
    own = hosts.own_facts() | {"network": network.read(network.own_log())}
    facts = hosts.of_all(own)
    report = {
        "processes": facts,
        "mesh": list(mesh.devices.shape),
        "on_cpu": options.on_cpu(devices),
        "route": f"`dq.psum` goes by {type(topology).__name__}: {reason}.",
        "model": asdict(model) | {"parameters": model.parameters},
        "all_reduces": [asdict(row) for row in rows],
        "left_out": left_out,
        "steps": [asdict(row) for row in trained],
    }
    return report | {"warnings": warnings(report)}


def nodes_of(devices: Sequence[Any]) -> int:
    """The size of the outer axis: as many as slices, or CPU processes, of several devices each."""
    places = [getattr(d, "slice_index", None) for d in devices]
    if None in places or options.on_cpu(devices):
        places = [d.process_index for d in devices]
    counts = {places.count(place) for place in places}
    return len({*places}) if len(counts) == 1 and counts != {1} else 1


def within(seconds: float) -> Callable[[Sequence[Callable[[], Any]]], int]:
    """A function of calls: how many rounds of them take so many seconds, by the first process."""

    def rounds(calls: Sequence[Callable[[], Any]]) -> int:
        ends = []
        for _ in range(2):  # the first is slower, and does not count
            for call in calls:
                jax.block_until_ready(call())
            ends.append(time.perf_counter())
        return samples(seconds, hosts.of_first(ends[1] - ends[0]))

    return rounds


def samples(seconds: float, each: float) -> int:
    """How many samples of ``each`` seconds are taken in ``seconds``."""
    return max(LEAST, min(MOST, math.floor(seconds / max(each, 1e-6))))


def all_reduces(
    mesh: Mesh, sizes_bytes: Sequence[int], ours: contenders.Contender, seconds: float
) -> tuple[list[all_reduce.AllReduceRow], list[str]]:
    """Rows of psum and of ours for all sizes that fit into the time, and a line for each other."""
    rows, left_out, rate, devices = [], [], 0.0, jax.devices()
    for size in sorted(sizes_bytes):
        iterations = FEW if size < 128 * 2**20 else None
        counts = all_reduce.repetitions(size, devices[0].platform, iterations)
        # By the rate of the size before; the smallest one is a guess of 1 ms.
        each = 2 * max(1e-3, rate * size) * counts["iterations"] * counts["in_flight"]
        if LEAST * each > seconds:
            text = f"{LEAST * each:.0f} s, more than the {seconds:.0f} s of --seconds"
            left_out.append(f"{tables.format_size(size)} was left out: it would take about {text}")
            continue
        repeats = samples(seconds / len(sizes_bytes), each)
        told = {"nodes": nodes_of(devices), "iterations": counts["iterations"]}
        rows += all_reduce.bench_all_reduce(
            [size], [ours], devices=devices, repeats=repeats, **told
        )
        slowest = max(row.time_us for row in rows[-2:])
        rate = hosts.of_first(slowest / 1e6 / size)
    return rows, left_out


def warnings(report: dict[str, Any]) -> list[str]:
    """Sentences about what a reader should look at first."""
    facts = report["processes"]
    found = network.warnings(facts, [own["network"] for own in facts])
    names = dict.fromkeys(name for own in facts for name in own["variables"])
    told = {f"the variable {x}": [own["variables"].get(x) for own in facts] for x in names}
    told |= {x: [own[x] for own in facts] for x in (*hosts.VERSIONS, "kind", "devices")}
    for name, values in told.items():
        if len({*values}) > 1 and name != "the variable NCCL_HOSTID":
            each = ", ".join(f"{value} (process {who})" for who, value in enumerate(values))
            found.append(f"processes differ in {name}: {each}")
    for row in report["all_reduces"]:
        if row["wrong"]:
            size = tables.format_size(row["size_bytes"])
            text = f"{row['wrong']:,} coordinates are not the same bits on all workers"
            found.append(f"all-reduce of {size} by {row['method']}: {text}")
    for row in report["steps"]:
        if len({*row["hashes"]}) > 1:
            found.append(f"{row['way']}: parameters are not the same bits on all workers")
    return found
