"""Reads the collectives of a compiled program's text (HLO): who sends whom how much, how often."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dynamiq_jax.plan.plan import scope_of

ITEM_BITS = dict(pred=8, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, bf16=16, f16=16)
ITEM_BITS |= dict(s32=32, u32=32, f32=32, s64=64, u64=64, f64=64, c64=64, c128=128)
NAMES = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter|send|recv"
OPERATION = re.compile(
    rf"= (?P<type>\(.*?\)|\S+) (?:ragged-)?(?P<name>{NAMES}|collective-broadcast)"
    r"(?P<start>-start)?\("
)
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)={{(.*?)}}")
_GROUPS_IN_ORDER = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_BY_AXES = re.compile(r"replica_groups=mesh\[(.*?)\].*? {(.*?)}")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|called_computations|branch_computations)=({[^}]*}|%[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":{"n":"(\d+)"')


def arrays_of(hlo_type: str) -> list[tuple[str, str]]:
    """(dtype, shape as text) of every array of an HLO type."""
    return re.findall(r"(\w+)\[([\d,]*)\]", hlo_type)


def bits_of(dtype: str, shape: str) -> int:
    """Bits of an array; of an f8 dtype whose name is not listed, 8 for each number."""
    return math.prod(map(int, filter(None, shape.split(",")))) * ITEM_BITS.get(dtype, 8)


def groups_of(line: str) -> list[list[int]]:
    """The workers that exchange something, group by group; or (source, target) pairs."""
    if explicit := _GROUPS.search(line):
        return [[int(i) for i in group.split(",")] for group in explicit[1].split("},{")]
    if ordered := _GROUPS_IN_ORDER.search(line):  # as [4,2]<=[2,4]T(1,0)
        shape, dims, order = (
            [int(i) for i in part.split(",")] if part else None for part in ordered.groups()
        )
        assert shape is not None and dims is not None
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    # From JAX 0.12 on: mesh['node'=2,'gpu'=4] {'gpu'}, or {'gpu':(2)2} for the minor half of 'gpu'
    by_axes = _GROUPS_BY_AXES.search(line)
    if by_axes is None:
        return []
    mesh, axes = by_axes.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    of = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in parts}
    split = {name: of.get(name, (1, 1)) for name in sizes}
    rows = [(before, own, sizes[name] // before // own) for name, (before, own) in split.items()]
    within = [3 * list(sizes).index(name) + 1 for name in of]
    workers = np.arange(math.prod(sizes.values())).reshape([n for part in rows for n in part])
    size = math.prod(own for _, own in of.values())
    return np.moveaxis(workers, within, range(-len(within), 0)).reshape(-1, size).tolist()


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      name: HLO's, such as "all-reduce".
      op_name: the path of scopes and of the JAX operation that it comes from.
      sent_bytes: bytes that one worker sends each time. An all-reduce sends its array twice, but
        for the part that the worker has.
      times: how often it runs in one run of the program.
      counted: whether ``times`` is known; a loop without a known count is taken as one turn.
      array: the dtype and shape of its largest array, as "f32[64,3]".
      groups: the devices that exchange something, group by group; empty means all together. For a
        permute, (source, target) pairs.
    """

    name: str
    op_name: str
    sent_bytes: float
    times: int
    counted: bool
    array: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def total_bytes(self) -> float:
        """Bytes that one worker sends in one run of the program."""
        return self.times * self.sent_bytes

    def spans(self, host_of: Sequence[int]) -> bool:
        """Whether devices of different hosts exchange something; ``host_of`` is by device."""
        groups = self.groups or (tuple(range(len(host_of))),)
        return any(len({host_of[i] for i in group}) > 1 for group in groups)


def collectives_of(program: str, n_devices: int) -> list[Collective]:
    """All collectives of a compiled program, given as text. Of branches the costliest counts."""
    blocks = re.split(r"\n(?=%|ENTRY)", program)
    named = {m[1]: block for block in blocks if (m := re.match(r"(?:ENTRY )?(%[\w.\-]+)", block))}
    entry = next(block for block in blocks if block.startswith("ENTRY"))

    def of_line(line: str) -> list[Collective]:
        if found := OPERATION.search(line):
            return [_collective(found, line, n_devices)]
        if "-done(" in line or "async-update(" in line:
            return []
        called = re.findall(r"%[\w.\-]+", " ".join(_CALLED.findall(line)))
        parts = [of_block(name) for name in called]
        if " conditional(" in line:
            parts = [max(parts, key=lambda part: sum(x.total_bytes for x in part), default=[])]
        trips, loops = _TRIPS.search(line), " while(" in line
        times = int(trips[1]) if trips else 1
        return [
            replace(x, times=times * x.times, counted=x.counted and not (loops and trips is None))
            for part in parts
            for x in part
        ]

    @cache
    def of_block(name: str) -> list[Collective]:
        return [x for line in named.get(name, "").splitlines()[1:] for x in of_line(line)]

    return [x for line in entry.splitlines()[1:] for x in of_line(line)]


def _collective(found: re.Match, line: str, n_devices: int) -> Collective:
    groups = groups_of(line)
    arrays = _results(found)
    name = _OP_NAME.search(line)
    largest = max(arrays, key=lambda array: bits_of(*array), default=("f32", ""))
    return Collective(
        name=found["name"],
        op_name=name[1] if name else "",
        sent_bytes=_sent(found, arrays, len(groups[0]) if groups else n_devices, groups),
        times=1,
        counted=True,
        array=f"{largest[0]}[{largest[1]}]",
        groups=tuple(map(tuple, groups)),
    )


def _results(found: re.Match) -> list[tuple[str, str]]:
    """The arrays by whose types bytes are counted.

    A start's type has its operands, too: ``(operand, result)``, and from JAX 0.11 on
    ``((operands), results)``.
    """
    _, nested, results = found["type"].partition("), ")
    arrays = arrays_of(results or found["type"])
    if found["name"] == "collective-permute" and found["start"] and not nested:
        arrays = [(dtype, shape) for dtype, shape in arrays if shape]  # no contexts
    return arrays


def _sent(
    found: re.Match, arrays: Sequence[tuple[str, str]], n: int, groups: Sequence[Sequence[int]]
) -> float:
    """Bytes that one worker sends in a collective, by the types of its results."""
    both = found["start"] and "), " not in found["type"]
    total = sum(bits_of(*array) for array in arrays) / 8
    if found["name"] == "recv":  # its send counts
        return 0.0
    if found["name"] in ("collective-permute", "send"):
        moves = [group for group in groups if len({*group}) > 1]
        share = len(moves) / len(groups) if groups else 1.0  # who sends to itself sends nothing
        return share * total / (2 if both else 1)
    if found["name"] in ("all-gather", "reduce-scatter") and both:
        return total * (n - 1) / (n + 1)  # operands and results
    parts: Mapping[str, float] = {"all-reduce": 2, "reduce-scatter": n}
    return total * parts.get(found["name"], 1) * (n - 1) / n


def scoped(found: Sequence[Collective]) -> Iterator[tuple[str | None, Collective]]:
    """Every collective with the plan in whose scope it runs."""
    for collective in found:
        yield scope_of(collective.op_name) or None, collective
