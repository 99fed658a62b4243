"""The plans of three ways to train: data parallel, sharded updates (ZeRO-1), FSDP."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.compression.shards import Shards, divisions, gathers_of
from dynamiq_jax.plan.plan import Plan
from dynamiq_jax.tree.leaves import Leaf, Padding, Placement

MOMENTS = 8
"""Bytes that AdamW keeps of a parameter besides the parameter: two f32 moments."""

NOTABLE = 0.1
"""The part of the bytes of a way that may travel natively without a line about it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train with AdamW: the bytes that one worker sends and holds.

    Attributes:
      name: "data parallel", "sharded updates" or "FSDP".
      call: the function of the library.
      plans: the plan of each collective, if one call has all leaves, and how often a step runs it;
        FSDP gathers parameters twice, in the forward and the backward pass.
      kept_bytes: from step to step: parameters, masters where they are not the parameters, moments.
      gradient_bytes: at the end of the backward pass.
      wire_ms: milliseconds of ``sent_bytes`` at the link's rate; `None` if no rate is known.
    """

    name: str
    call: str
    plans: tuple[tuple[Plan, int], ...]
    kept_bytes: float
    gradient_bytes: float
    wire_ms: float | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that one worker sends per step."""
        return sum(times * plan.sent_bytes for plan, times in self.plans)

    @property
    def outer_bytes(self) -> float:
        """Bytes of them that cross the outer axes of `Hierarchical`; of another topology all."""
        return sum(times * plan.outer_bytes for plan, times in self.plans)

    @property
    def natives(self) -> str | None:
        """A line about leaves that travel natively unasked, if they take many of the bytes."""
        moves = [(move, k) for plan, k in self.plans for move in plan.moves if move.unasked]
        sent = sum(k * move.sent_bits for move, k in moves) / 8
        if sent <= NOTABLE * self.sent_bytes:
            return None
        largest, _ = max(moves, key=lambda entry: entry[0].sent_bits * entry[1])
        share = 100 * sent / self.sent_bytes
        leaf = largest.leaves[0].path
        return f"{self.name}: {share:.0f}% of the bytes travel natively; {leaf}: {largest.reason}"


@dataclass(frozen=True, slots=True)
class PaddedLeaf:
    """A leaf that sharded updates pad with zeros, since no dimension divides by the workers.

    Attributes:
      name: the leaf's.
      shape: of what one device holds of the parameter, which stays as it is.
      padded_shape: of the master and of the inner optimizer's state.
      kept_bytes: of the zeros, in the f32 masters and AdamW's moments of all workers together.
    """

    name: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class RefusedWay:
    """A way that cannot run with these methods and topologies; prints as one line.

    Attributes:
      name: as that of `Way`.
      call: the function of the library, which raises an error.
      reason: the error.
    """

    name: str
    call: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.call} refuses this: {self.reason}"


class Ways(NamedTuple):
    """The ways that can run, those that cannot, and the leaves that sharded updates pad."""

    ways: tuple[Way, ...]
    padded: tuple[PaddedLeaf, ...]
    refused: tuple[RefusedWay, ...] = ()


def ways_of(leaves: Sequence[Leaf], plan: Plan, policy: AnyPolicy | None, *, here: bool) -> Ways:
    """The ways for leaves of which ``plan`` is the all-reduce; each as one call for all leaves.

    There are no ways if nothing is compressed, or a method does not scatter. A way that is refused,
    as by a method of parameters that cannot gather, leaves the others. Leaves without a
    gradient are in none of them. Sharded updates split and pad leaves by `divisions`; FSDP, whose
    specs are the user's, is told for the same dimensions where they are multiples of the workers.
    """
    if plan.n_workers == 1:
        return Ways((), ())
    leaves = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    counts = {f"axis{i}": size for i, size in enumerate(plan.sizes)}
    # A dimension shorter than the whole leaf's is split by other axes.
    lengths = [zip(leaf.shape, leaf.whole, strict=True) for leaf in leaves]
    taken = [[d for d, (own, whole) in enumerate(pairs) if own != whole] for pairs in lengths]
    compression = as_compression(policy)
    found = divisions(compression, leaves, taken, plan.sizes, here=here)
    updates = _Placed.of(leaves, [d if large else None for large, d in found], counts)
    methods = [bucket.route.method for bucket in plan.buckets]
    if not methods or not all(method.shards for method in methods):
        return Ways((), updates.padded)
    even = [
        d if large and d is not None and leaf.shape[d] % plan.n_workers == 0 else None
        for leaf, (large, d) in zip(leaves, found, strict=True)
    ]
    fsdp = _Placed.of(leaves, even, counts)
    nbytes, size = sum(leaf.nbytes for leaf in leaves), sum(leaf.size for leaf in leaves)
    rows = [Way("data parallel", "dq.psum", ((plan, 1),), nbytes + MOMENTS * size, nbytes)]
    refused = []
    for name, call, way in (
        ("sharded updates", "dq.optax.sharded", partial(updates.by_updates, nbytes=nbytes)),
        ("FSDP", "dq.fsdp", fsdp.by_fsdp),
    ):
        try:
            rows.append(Way(name, call, *way(policy, here=here)))
        except (ValueError, NotImplementedError) as error:
            # Whoever calls psum alone may have fields of a policy that only these ways read.
            refused.append(RefusedWay(name, call, str(error)))
    return Ways(tuple(rows), updates.padded, tuple(refused))


class _Costs(NamedTuple):
    """The fields of a `Way` with its numbers."""

    plans: tuple[tuple[Plan, int], ...]
    kept_bytes: float
    gradient_bytes: float


class _Placed(NamedTuple):
    """The leaves of a model, and how workers split them."""

    leaves: list[Leaf]
    counts: dict[str, int]
    """The workers on every axis."""
    placement: Placement

    @classmethod
    def of(
        cls, leaves: list[Leaf], dimensions: Sequence[int | None], counts: dict[str, int]
    ) -> "_Placed":
        """Leaves that workers split along these dimensions, padded where it is needed."""
        axes, n = tuple(counts), math.prod(counts.values())
        pairs = list(zip(leaves, dimensions, strict=True))
        splits = tuple(() if d is None else ((d, axes),) for d in dimensions)
        padding = tuple(
            Padding() if d is None else Padding(d - len(leaf.shape), -leaf.shape[d] % n)
            for leaf, d in pairs
        )
        others = tuple(leaf.axes for leaf in leaves)
        return cls(leaves, counts, Placement(None, splits, padding, others))

    @property
    def split(self) -> list[int]:
        """The numbers of the leaves that workers split."""
        return [i for i, own in enumerate(self.placement.splits) if own]

    @property
    def padded(self) -> tuple[PaddedLeaf, ...]:
        """The leaves that have zeros."""
        found = []
        for leaf, padding in zip(self.leaves, self.placement.padding, strict=True):
            if padding.zeros:
                shape = padding.padded_shape(leaf.shape)
                nbytes = (4 + MOMENTS) * (math.prod(shape) - leaf.size)
                found.append(PaddedLeaf(leaf.name, leaf.shape, shape, nbytes))
        return tuple(found)

    @property
    def shards(self) -> list[Leaf]:
        """The leaves as one worker holds them."""
        n, place, found = math.prod(self.counts.values()), self.placement, []
        for leaf, split, padding in zip(self.leaves, place.splits, place.padding, strict=True):
            shape = [*padding.padded_shape(leaf.shape)]
            for dimension, _ in split:
                shape[dimension] //= n
            found.append(dataclasses.replace(leaf, shape=tuple(shape)))
        return found

    def by_updates(self, policy: AnyPolicy | None, *, nbytes: int, here: bool) -> _Costs:
        """Sharded updates of parameters of so many bytes."""
        gathers = gathers_of(policy, copied=True, here=here)
        told = as_compression(policy), gathers, True, False, here
        plans = Shards(self.counts, self.placement, *told).plans(
            self.leaves, "reduce-scatter", keyed=True
        )
        own, split = self.shards, self.split
        differences = Shards(self.counts, self.placement.some(split), *told)
        plans += differences.plans([own[i] for i in split], "all-gather", keyed=True)
        # Masters in f32, the moments, and the slices of the copy to which updates are added.
        kept = sum((4 + MOMENTS) * leaf.size + leaf.nbytes for leaf in own)
        return _Costs(_each(plans), nbytes + kept, nbytes)

    def by_fsdp(self, policy: AnyPolicy | None, *, here: bool) -> _Costs:
        """FSDP."""
        gathers, own = gathers_of(policy, here=here), self.shards
        told = as_compression(policy), gathers, False, True, here
        shards = Shards(self.counts, self.placement, *told)
        plans = _each(shards.plans(own, "all-gather", keyed=False), 2)
        plans += _each(shards.plans(self.leaves, "reduce-scatter", keyed=False))
        nbytes = sum(leaf.nbytes for leaf in own)
        kept = nbytes + MOMENTS * sum(leaf.size for leaf in own)
        return _Costs(plans, kept, nbytes)


def _each(plans: Sequence[Plan], times: int = 1) -> tuple[tuple[Plan, int], ...]:
    return tuple((plan, times) for plan in plans)


def bytes_per_second(rate: str) -> float:
    """The bytes per second of a link's rate, from a text such as "25gbit", "25Gb/s" or "3.1GB/s".

    A number, a prefix (k, M, G, T, of thousands), and bits ("bit", "b/s", "bps") or bytes ("B/s").
    """
    prefixes = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    pattern = r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)((?i:bit)(?:/s|ps)?|b(?:/s|ps)|B/s)\s*"
    found = re.fullmatch(pattern, rate) if isinstance(rate, str) else None
    if not found or not float(found[1]):
        raise ValueError(
            f"rate={rate!r}: give a text of a number and a unit, as in 20mbit, 25gbit, 25Gb/s "
            "(bits) or 3.1GB/s (bytes)"
        )
    unit = 1 if found[3].startswith("B/") else 8
    return float(found[1]) * prefixes[found[2].lower()] / unit


def lines(found: Sequence[Way]) -> list[str]:
    """A plain text table, in MB of a million bytes; columns are as wide as their numbers."""
    columns: list[tuple[str, list[float]]] = [
        ("sends MB/step", [way.sent_bytes / 1e6 for way in found]),
        ("keeps MB", [way.kept_bytes / 1e6 for way in found]),
        ("gradients MB", [way.gradient_bytes / 1e6 for way in found]),
    ]
    if any(way.outer_bytes < way.sent_bytes for way in found):
        columns.append(("outer axes MB", [way.outer_bytes / 1e6 for way in found]))
    if found[0].wire_ms is not None:
        columns.append(("wire ms", [way.wire_ms or 0.0 for way in found]))
    rows = [f"{text:16}" for text in ("way to train", *(way.name for way in found))]
    for title, numbers in columns:
        cells = [title, *(f"{number:,.1f}" for number in numbers)]
        width = max(map(len, cells)) + 2
        rows = [f"{row}{cell:>{width}}" for row, cell in zip(rows, cells, strict=True)]
    return [f"{row}  {by}" for row, by in zip(rows, ["by", *(w.call for w in found)], strict=True)]
