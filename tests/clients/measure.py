"""Measurements read what a compiled step sends, and whether copies of an array are equal."""

import collections
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from hlo import OPERATION, arrays_of, bits_of, groups_of

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?.*{$")
CALLED = re.compile(r"(?:calls|to_apply|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations={(.*?)}")
LOOP = re.compile(r"body=%?([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count[\\"]*:{[\\"]*n[\\"]*:[\\"]*(\d+)')


class Traffic(NamedTuple):
    """The traffic of a step.

    Attributes:
      sent: the bytes that one device sends, by the name of the collective.
      largest: the largest array of a native all-reduce or reduce-scatter, as HLO writes it.
    """

    sent: dict[str, float]
    largest: str


def traffic(program: str) -> Traffic:
    """The traffic of a program, from its optimized HLO. Loops count as often as they run."""
    entry, bodies = _computations(program)
    sent: collections.Counter[str] = collections.Counter()
    largest = 0, "none"
    for name, times in _times(entry, bodies).items():
        for line in bodies[name]:
            match = OPERATION.search(line)
            if match is None or match["name"] in ("send", "recv"):
                continue
            arrays = arrays_of(match["type"])
            sent[match["name"]] += times * _sent(line, match["name"], arrays)
            native = match["name"] in ("all-reduce", "reduce-scatter")
            if native and len(groups_of(line)[0]) > 1:
                pairs = [(bits_of(*array), f"{array[0]}[{array[1]}]") for array in arrays]
                largest = max(largest, *pairs)
    return Traffic(dict(sent), largest[1])


def _sent(line: str, name: str, arrays: list[tuple[str, str]]) -> float:
    """Bytes that one device sends for one collective, as the usual algorithms do it."""
    total = sum(bits_of(*array) for array in arrays) / 8
    if name == "collective-permute":
        return total * any(source != target for source, target in groups_of(line))
    size = len(groups_of(line)[0])
    return total * (size - 1) * {"all-reduce": 2 / size, "reduce-scatter": 1}.get(name, 1 / size)


def _computations(program: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry computation, and the lines of every computation by name."""
    entry, bodies = "", {}
    lines: list[str] = []
    for line in program.splitlines():
        if not line.startswith(" ") and (match := COMPUTATION.match(line)):
            bodies[match[1]] = lines = []
            entry = match[1] if line.startswith("ENTRY") else entry
        lines.append(line)
    return entry, bodies


def _times(entry: str, bodies: dict[str, list[str]]) -> dict[str, float]:
    """How often every computation runs in a step."""
    times: collections.Counter[str] = collections.Counter()

    def run(name: str, count: float) -> None:
        times[name] += count
        for line in bodies.get(name, ()):
            called = CALLED.findall(line)
            if branches := BRANCHES.search(line):
                called += [branch.strip().lstrip("%") for branch in branches[1].split(",")]
            for other in called:
                run(other, count)
            if loop := LOOP.search(line):
                trips = TRIPS.search(line)
                run(loop[1], count * (int(trips[1]) if trips else math.nan))

    run(entry, 1)
    return {name: count for name, count in times.items() if name in bodies}


def program_of(folder: Path, step: str) -> str:
    """The optimized HLO of the step's last compilation, among the programs that XLA has dumped."""
    found = sorted(folder.glob(f"*.{step}.*after_optimizations.txt"))
    if not found:
        names = sorted(
            {file.name.split(".")[1] for file in folder.glob("*after_optimizations.txt")}
        )
        raise RuntimeError(f"no program of the name {step} was compiled, but {', '.join(names)}")
    return found[-1].read_text()


def copies_equal(tree: Any) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits of it."""
    return all(map(_copies_equal, jax.tree.leaves(tree)))


def _copies_equal(x: Any) -> bool:
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    parts: dict[str, bytes] = {}
    return all(
        parts.setdefault(str(shard.index), data) == data
        for shard in x.addressable_shards
        for data in [np.asarray(shard.data).tobytes()]
    )
