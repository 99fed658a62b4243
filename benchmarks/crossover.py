"""Finds from which size on compression pays on fast links, and writes it where the library looks.

    python benchmarks/crossover.py [--write]

Times `DynamiQ()` over `Direct` by each transport against the way that it replaces, on all GPUs, at
sizes around the expected ones. A limit is the smallest size from which on the transport is faster,
between two sizes by their logarithms. ``--write`` puts the limits into ``crossover.json`` of
``dynamiq_jax/methods/dynamiq``, which has an entry for each number of GPUs
(``CUDA_VISIBLE_DEVICES`` chooses them). Smaller buckets travel natively
(`Compression.min_bucket_bytes`).

One process has all GPUs, or several find each other by NUM_HOSTS, HOST_ID and COORDINATOR in the
environment. Processes with one GPU each have limits of their own.
"""

import json
import math
import pathlib
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import typer
from hosts import join_hosts
from rich import print

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.commands.bench import all_reduce, contenders, tables, timing
from dynamiq_jax.methods.dynamiq import crossover as taken
from dynamiq_jax.topologies.schedules import COPYING

FILE = pathlib.Path(taken.__file__).with_name("crossover.json")
MIB = 2**20


class Question(NamedTuple):
    """From which size on is ``transport`` faster than ``than``?"""

    collective: str
    transport: str
    than: str
    """Another transport, or "native": the collective in bf16."""
    sizes_mib: tuple[int, ...]


class Point(NamedTuple):
    """One size."""

    size_bytes: int
    speedup: float


def questions(n: int, n_processes: int) -> dict[str, list[Question]]:
    """The questions for so many GPUs, by the name of their answers in ``crossover.json``."""
    large = 1 if n == 2 else 2  # more GPUs pay from larger sizes on
    sums = tuple(large * mib for mib in (16, 24, 32, 48, 64))
    alone = n_processes == 1
    sent = "permutes" if alone and n <= COPYING else "collectives"
    least = (4, 8, 12, 16, 32) if alone else (8, 16, 24, 32, 64)
    found = {
        "psum_bytes": [Question("psum", sent, "native", sums)],
        "push_bytes": [
            Question("psum", "push", "native", least),
            Question("psum", sent, "push", (96, 128, 192, 256, 384)),
        ],
    }
    if not alone:
        return {f"{name}_of_processes": asked for name, asked in found.items()}
    shards = tuple(large * mib for mib in (32, 64, 96, 128, 192))
    return found | {"psum_scatter_bytes": [Question("psum_scatter", sent, "native", shards)]}


def crossover_bytes(points: list[Point]) -> int:
    """The size from which on the speed-up is at least 1, up to whole MiB; of ascending points.

    Raises:
      ValueError: the largest size is slower.
    """
    slower = [i for i, point in enumerate(points) if point.speedup < 1]
    if not slower:
        return points[0].size_bytes
    if slower[-1] == len(points) - 1:
        raise ValueError(
            f"it takes {1 / points[-1].speedup:.2f} times as long at "
            f"{points[-1].size_bytes / MIB:g} MiB, the largest size; measure larger ones"
        )
    low, high = points[slower[-1]], points[slower[-1] + 1]
    part = -math.log(low.speedup) / (math.log(high.speedup) - math.log(low.speedup))
    size = low.size_bytes * (high.size_bytes / low.size_bytes) ** part
    return math.ceil(size / MIB) * MIB


def contender(collective: str, transport: str) -> contenders.Contender:
    """The collective in bf16, or compressed and sent by the transport."""
    options: dict[str, Any] = {} if collective == "psum" else {"tiled": True}
    module: Any = jax.lax
    if transport != "native":
        method = dq.Compression(
            dq.DynamiQ(), topology=dq.Direct(transport=transport), min_bucket_size=0
        )
        module, options = dq, {**options, "compression": method}
    reduce = partial(getattr(module, collective), **options)
    return contenders.Contender(transport, reduce, replicated=collective == "psum")


def answer(question: Question, repeats: int) -> int:
    """The size in bytes, see `crossover_bytes`."""
    collective, transport, than, sizes = question
    pair = [contender(collective, name) for name in (than, transport)]
    mesh, found = all_reduce.make_mesh(jax.devices()), []
    if jax.process_index() == 0:
        print(f"{collective} by {transport} in the place of {than}:")
    for mib in sizes:
        data = all_reduce.heavy_tailed_gradients(mesh, mib * MIB // 2)
        # As many at all sizes: programs of one collective would wait for the host.
        programs = [all_reduce.timed_program(mesh, one, 16) for one in pair]
        calls = timing.compile_calls(programs, data)
        before, ours = timing.time_calls(calls, repeats=repeats, iterations=16)
        found.append(Point(mib * MIB, before.time_us / ours.time_us))
        if jax.process_index() == 0:
            print(f"  {mib} MiB: {ours.time_us:.0f} µs, {found[-1].speedup:.2f}x", flush=True)
    return crossover_bytes(found)


def written(entries: list[dict[str, Any]], n: int, found: dict[str, Any], where: str) -> list[Any]:
    """The entries with what was found on ``n`` GPUs, which replaces answers of the same name."""
    before: dict[str, Any] = next((x for x in entries if x["n_devices"] == n), {})
    measured_on = before.get("measured_on", {}) | dict.fromkeys(found, where)
    entry = {"n_devices": n} | before | found | {"measured_on": measured_on}
    return sorted(
        [*(x for x in entries if x["n_devices"] != n), entry], key=lambda x: x["n_devices"]
    )


def main(
    write: Annotated[bool, typer.Option(help="Whether the library takes them.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Samples per size.")] = 20,
) -> None:
    """Measures, prints and writes."""
    join_hosts()
    n, found = jax.device_count(), {}
    for name, asked in questions(n, jax.process_count()).items():
        needs = pk.needs_of_push() if name.startswith("push") else None
        if needs is not None:
            print(f"{name} is not measured, which needs {needs}")
            continue
        answers = [answer(question, repeats) for question in asked]
        found[name] = answers[0] if len(answers) == 1 else answers
    if jax.process_index() > 0:
        return
    print(found)
    if write:
        about = tables.surroundings(jax.devices())
        where = f"{n} x {about['device_kind']}, JAX {about['jax']}, NCCL {about['nccl']}"
        entries = written(json.loads(FILE.read_text()), n, found, where)
        FILE.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
