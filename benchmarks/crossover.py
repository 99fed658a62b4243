"""Finds from which size on compression pays on fast links, and writes it where the library looks.

    python benchmarks/crossover.py [--write]

Times bf16 `lax.psum` and `lax.psum_scatter` against `DynamiQ()` over `Direct` on all GPUs, at sizes
around the expected ones, and takes the smallest from which on compression is faster, between sizes
by their logarithms. ``--write`` puts it into ``crossover.json`` of ``dynamiq_jax/methods/dynamiq``,
which has an entry for each number of GPUs (``CUDA_VISIBLE_DEVICES`` chooses them). Smaller buckets
travel natively (`Compression.min_bucket_bytes`).
"""

import json
import math
import pathlib
from functools import partial
from typing import Annotated, NamedTuple

import jax
import typer
from rich import print

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import all_reduce, contenders, tables, timing
from dynamiq_jax.methods.dynamiq import crossover as taken

FILE = pathlib.Path(taken.__file__).with_name("crossover.json")
MIB = 2**20
SIZES = {"psum": (16, 24, 32, 48, 64), "psum_scatter": (32, 64, 96, 128, 192)}
"""In MiB on two GPUs; twice as large on more."""


class Point(NamedTuple):
    """One size."""

    size_bytes: int
    speedup: float


def crossover_bytes(points: list[Point]) -> int:
    """The size from which on the speed-up is at least 1, up to whole MiB; of ascending points.

    Raises:
      ValueError: compression does not pay at the largest size.
    """
    slower = [i for i, point in enumerate(points) if point.speedup < 1]
    if not slower:
        return points[0].size_bytes
    if slower[-1] == len(points) - 1:
        raise ValueError(
            f"compression takes {1 / points[-1].speedup:.2f} times as long at "
            f"{points[-1].size_bytes / MIB:g} MiB, the largest size; measure larger ones"
        )
    low, high = points[slower[-1]], points[slower[-1] + 1]
    part = -math.log(low.speedup) / (math.log(high.speedup) - math.log(low.speedup))
    size = low.size_bytes * (high.size_bytes / low.size_bytes) ** part
    return math.ceil(size / MIB) * MIB


def measure(collective: str, repeats: int) -> list[Point]:
    """Speed-ups over the native collective at all sizes."""
    method = dq.Compression(dq.DynamiQ(), topology=dq.Direct(), min_bucket_size=0)
    options = {} if collective == "psum" else {"tiled": True}
    pair = [
        contenders.Contender(name, partial(f, **options), replicated=collective == "psum")
        for name, f in (
            ("native", getattr(jax.lax, collective)),
            ("compressed", partial(getattr(dq, collective), compression=method)),
        )
    ]
    mesh, found = all_reduce.make_mesh(jax.devices()), []
    unit = MIB if jax.device_count() == 2 else 2 * MIB
    print(f"{collective}: {method}")
    for size in SIZES[collective]:
        data = all_reduce.heavy_tailed_gradients(mesh, size * unit // 2)
        # As many at all sizes: programs of one collective would wait for the host.
        programs = [all_reduce.timed_program(mesh, contender, 16) for contender in pair]
        calls = timing.compile_calls(programs, data)
        native, ours = timing.time_calls(calls, repeats=repeats, iterations=16)
        found.append(Point(size * unit, native.time_us / ours.time_us))
        print(f"  {size * unit // MIB} MiB: {ours.time_us:.0f} µs, {found[-1].speedup:.2f}x")
    return found


def main(
    write: Annotated[bool, typer.Option(help="Whether the library takes them.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Samples per size.")] = 20,
) -> None:
    """Measures, prints and writes."""
    found = {f"{name}_bytes": crossover_bytes(measure(name, repeats)) for name in SIZES}
    print({name: f"{size // MIB} MiB" for name, size in found.items()})
    if write:
        surroundings = tables.surroundings(jax.devices())
        entry = {"n_devices": surroundings.pop("n_devices"), **found, "measured_on": surroundings}
        others = [x for x in json.loads(FILE.read_text()) if x["n_devices"] != entry["n_devices"]]
        entries = sorted([*others, entry], key=lambda x: x["n_devices"])
        FILE.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
