"""Reads the collectives of a compiled program's text (HLO): who sends whom how much."""

import math
import re
from functools import cache

import numpy as np

ITEM_BITS = dict(pred=8, s8=8, u8=8, s16=16, u16=16, bf16=16, f16=16)
ITEM_BITS |= dict(s32=32, u32=32, f32=32, c64=64)
COLLECTIVES = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter|send|recv"
OPERATION = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<name>{COLLECTIVES})(?P<start>-start)?\(")
GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)={{(.*?)}}")
GROUPS_IN_ORDER = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
GROUPS_BY_AXES = re.compile(r"replica_groups=mesh\[(.*?)\].*? {(.*?)}")


def arrays_of(hlo_type):
    """(dtype, shape as text) of every array of an HLO type."""
    return re.findall(r"(\w+)\[([\d,]*)\]", hlo_type)


def groups_of(line):
    """The workers that exchange something, group by group; or (source, target) pairs."""
    if explicit := GROUPS.search(line):
        return [[int(i) for i in group.split(",")] for group in explicit[1].split("},{")]
    if ordered := GROUPS_IN_ORDER.search(line):  # as [4,2]<=[2,4]T(1,0)
        shape, dims, order = (
            [int(i) for i in part.split(",")] if part else None for part in ordered.groups()
        )
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    # From JAX 0.12 on: mesh['node'=2,'gpu'=4] {'gpu'}, or {'gpu':(2)2} for the minor half of 'gpu'
    mesh, axes = GROUPS_BY_AXES.search(line).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    of = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in parts}
    split = {name: of.get(name, (1, 1)) for name in sizes}
    shape = [(before, own, sizes[name] // before // own) for name, (before, own) in split.items()]
    within = [3 * list(sizes).index(name) + 1 for name in of]
    workers = np.arange(math.prod(sizes.values())).reshape([n for part in shape for n in part])
    size = math.prod(own for _, own in of.values())
    return np.moveaxis(workers, within, range(-len(within), 0)).reshape(-1, size).tolist()


def bits_of(dtype, shape):
    size = 1
    for length in filter(None, shape.split(",")):
        size *= int(length)
    return size * ITEM_BITS[dtype]


def moves_of(hlo):
    """(name, bits of all its arrays) of every collective."""
    found = filter(None, map(OPERATION.search, hlo.splitlines()))
    sizes = lambda match: (bits_of(*array) for array in arrays_of(match["type"]))
    return [(match["name"], sum(sizes(match))) for match in found]


def crossing_bytes(hlo, shape, axis):
    """Bytes of operands and results of collectives between devices that differ along an axis.

    ``shape`` has the sizes of all axes of the mesh, ``axis`` is the number of one of them.
    """
    total = 0
    for line in hlo.splitlines():
        match = OPERATION.search(line)
        if match is None:
            continue
        along = [{np.unravel_index(i, shape)[axis] for i in group} for group in groups_of(line)]
        if any(len(places) > 1 for places in along):
            total += sum(bits_of(*array) // 8 for array in arrays_of(match["type"]))
    return total


CALLED = re.compile(
    r"(?:calls|to_apply|body|called_computations|branch_computations)=({[^}]*}|%[\w.\-]+)"
)


def sent_bytes(program, n_workers):
    """Bytes that one worker sends in one run of a compiled program, given as text (HLO).

    Collectives in a loop count as often as it runs. An all-reduce sends its array twice, but for
    what the worker has. XLA sums bf16 in f32 on CPUs, which doubles these bytes there.
    """
    blocks = re.split(r"\n(?=%|ENTRY)", program)
    named = {m[1]: block for block in blocks if (m := re.match(r"(?:ENTRY )?(%[\w.\-]+)", block))}
    entry = next(block for block in blocks if block.startswith("ENTRY"))

    def of_line(line):
        if found := OPERATION.search(line):
            return _sent(found, line, n_workers)
        if "-done(" in line or "async-update(" in line:
            return 0.0
        times = re.search(r'"known_trip_count":{"n":"(\d+)"', line)
        called = re.findall(r"%[\w.\-]+", " ".join(CALLED.findall(line)))
        return int(times[1] if times else 1) * sum(of_block(name) for name in called)

    @cache
    def of_block(name):
        return sum(map(of_line, named.get(name, "").splitlines()[1:]))

    return sum(map(of_line, entry.splitlines()[1:]))


def _sent(found, line, n_workers):
    """Bytes that one worker sends in a collective, by the types of its results.

    A start's type has its operands, too: ``(operand, result)``, and from JAX 0.11 on
    ``((operands), results)``.
    """
    _, nested, results = found["type"].partition("), ")
    both = found["start"] and not nested
    arrays = arrays_of(results or found["type"])
    if found["name"] == "collective-permute":
        arrays = [(dtype, shape) for dtype, shape in arrays if shape or not both]  # no contexts
        return sum(bits_of(*array) for array in arrays) / 8 / (2 if both else 1)
    n = n_workers if "replica_groups={}" in line else len(groups_of(line)[0])
    total = sum(bits_of(*array) for array in arrays) / 8
    if found["name"] in ("all-gather", "reduce-scatter") and both:
        return total * (n - 1) / (n + 1)  # operands and results
    parts = {"all-reduce": 2, "reduce-scatter": n}
    return total * parts.get(found["name"], 1) * (n - 1) / n
