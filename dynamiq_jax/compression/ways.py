"""Bytes and wire times of the ways to train: data parallel, sharded updates (ZeRO-1), FSDP."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamiq_jax.methods import BF16, F32, DynamiQ, Method, unless_plain
from dynamiq_jax.plan.plan import Plan
from dynamiq_jax.tree.leaves import COMPRESSED_DTYPES, Bucket, Leaf
from dynamiq_jax.tree.placement import Padding, split_dimension

DIFFERENCES = DynamiQ(bits=2.5, dither=True)
"""The default encoding of parameters' differences; docs/results.md has the losses."""

PARAMETERS = DynamiQ(bits=8)
"""The default encoding of parameters that are gathered for a layer."""


class Sharded(NamedTuple):
    """The methods by which training scatters gradients and gathers what workers do not hold."""

    gradients: Method
    gathers: Method


def fsdp_methods(*, fast_links: bool) -> Sharded:
    """The methods of FSDP if none is passed: `BF16` over links as fast as NVLink.

    There a step of 1.1 B parameters takes 51 ms by `BF16` and 55 with compression
    (docs/results.md).
    """
    return Sharded(BF16(), BF16()) if fast_links else Sharded(DynamiQ(), PARAMETERS)


MOMENTS = 8
"""Bytes that AdamW keeps of a parameter besides the parameter: two f32 moments."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train with AdamW: the bytes that one worker sends and holds.

    Attributes:
      name: "data parallel", "sharded updates" or "FSDP".
      call: the function of the library.
      sent_bytes: per step; FSDP gathers parameters twice, in the forward and the backward pass.
      outer_bytes: of these, what crosses the outer axes of `Hierarchical`; of another topology all.
      kept_bytes: from step to step: parameters, masters where they are not the parameters, moments.
      gradient_bytes: at the end of the backward pass.
      wire_ms: milliseconds of ``sent_bytes`` at the link's rate; `None` if no rate is known.
    """

    name: str
    call: str
    sent_bytes: float
    outer_bytes: float
    kept_bytes: float
    gradient_bytes: float
    wire_ms: float | None = None


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


def padded_leaves(plan: Plan, n_workers: int, least: int) -> tuple[PaddedLeaf, ...]:
    """The leaves that `dq.optax.sharded` pads: in buckets, and large ones that travel exactly.

    ``least`` is the number of coordinates from which it splits a leaf.
    """
    leaves = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    leaves += [
        leaf
        for leaf, _, _ in plan.exact
        if leaf.size >= least
        and leaf.dtype.name in COMPRESSED_DTYPES
        and plan.methods[leaf.index] is not None
    ]
    found = []
    for leaf in sorted(leaves, key=lambda leaf: leaf.index):
        padding = _padding(leaf, n_workers)
        if padding is not None and padding.zeros:
            shape = padding.padded_shape(leaf.shape)
            nbytes = (4 + MOMENTS) * (math.prod(shape) - leaf.size)
            found.append(PaddedLeaf(leaf.name, leaf.shape, shape, nbytes))
    return tuple(found)


def _padding(leaf: Leaf, n_workers: int) -> Padding | None:
    """How `dq.optax.sharded` pads a leaf; `None` if workers cannot split it."""
    parts = zip(leaf.shape, leaf.whole or leaf.shape, strict=True)
    taken = [d for d, (own, whole) in enumerate(parts) if own != whole]
    dimension = split_dimension(leaf.shape, n_workers, taken)
    if dimension is None:
        return None
    return Padding(dimension - len(leaf.shape), -leaf.shape[dimension] % n_workers)


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


Choose = Callable[[list[Leaf]], list[Method | None]]
"""The method of every leaf, `None` for those that travel exactly."""


def ways(
    plan: Plan,
    all_reduced: tuple[float, float],
    n_workers: int,
    parameters: Choose | None = None,
) -> tuple[Way, ...]:
    """The three ways for the leaves of a plan; none if a method does not scatter.

    ``parameters`` chooses how parameters and their differences travel; `None`: by default.

    Leaves that are not in a bucket are whole on all workers, and their gradients are all-reduced. A
    worker that all-reduces all gradients sends ``all_reduced`` bytes: in all, and on the outer
    axes.
    """
    if not all(bucket.route.method.shards for bucket in plan.buckets):
        return ()
    n, whole = n_workers, [leaf for leaf, _, _ in plan.exact]
    share = 2 * (n - 1) / n
    exact = share * sum(leaf.nbytes for leaf in whole)
    kept = sum(leaf.nbytes + MOMENTS * leaf.size for leaf in whole)
    split = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    size, nbytes = sum(leaf.size for leaf in split), sum(leaf.nbytes for leaf in split)
    # Sharded updates pad leaves, and keep whole those that workers cannot split.
    left = [leaf for leaf in split if _padding(leaf, n) is None]
    padded_size = sum(_padded_size(bucket, n) for bucket in plan.buckets)
    scattered, gathered, updates = np.zeros((3, 2))
    for bucket in plan.buckets:
        scattered += _scattered_in_fsdp(bucket)
        default = BF16() if bucket.route.shards_in_bf16 else PARAMETERS
        for method, own in _by_method(bucket, parameters, default):
            gathered += _sharded_bytes(own, own.size, method)
        updates += _sharded_bytes(bucket, _padded_size(bucket, n), None)
        for method, own in _by_method(bucket, parameters, DIFFERENCES):
            updates += _sharded_bytes(own, _padded_size(own, n), method.without_plan())
    in_bf16 = any(bucket.route.shards_in_bf16 for bucket in plan.buckets)
    said = ", in bf16: over NVLink compression takes longer" if in_bf16 else ""
    gradients, copies = sum(leaf.nbytes for leaf in whole), kept + nbytes
    masters = (4 + MOMENTS) * (padded_size / n + sum(leaf.size for leaf in left))  # f32
    rows = (
        ("data parallel", "dq.psum", all_reduced, copies + MOMENTS * size, nbytes),
        (
            "sharded updates",
            "dq.optax.sharded",
            exact + share * sum(leaf.nbytes for leaf in left) + updates,
            copies + masters,
            nbytes,
        ),
        (
            "FSDP",
            f"dq.fsdp{said}",
            exact + scattered + 2 * gathered,
            kept + (nbytes + MOMENTS * size) / n,
            nbytes / n,
        ),
    )
    return tuple(
        Way(name, call, float(sent[0]), float(sent[1]), held, gradients + split_gradients)
        for name, call, sent, held, split_gradients in rows
    )


def _padded_size(bucket: Bucket, n_workers: int) -> int:
    """Coordinates of a bucket in sharded updates, with the zeros of its leaves."""
    found = [(leaf.shape, _padding(leaf, n_workers)) for leaf in bucket.leaves]
    return sum(math.prod(p.padded_shape(shape)) for shape, p in found if p is not None)


def _by_method(
    bucket: Bucket, choose: Choose | None, default: Method
) -> Iterable[tuple[Method, Bucket]]:
    """The parts of a bucket whose parameters travel by one method."""
    if choose is None:
        return [(unless_plain(bucket.route.method, default), bucket)]
    parts: dict[Method, tuple[Leaf, ...]] = {}
    for leaf, chosen in zip(bucket.leaves, choose(list(bucket.leaves)), strict=True):
        method = chosen or (BF16() if leaf.dtype.itemsize == 2 else F32())
        parts[method] = *parts.get(method, ()), leaf
    return [(method, bucket._replace(leaves=leaves)) for method, leaves in parts.items()]


def _scattered_in_fsdp(bucket: Bucket) -> np.ndarray:
    """Bytes to scatter a bucket in FSDP: in all, and on the outer axes."""
    if not bucket.route.shards_in_bf16:
        return _sharded_bytes(bucket, bucket.size, None)
    n = bucket.route.n_workers
    return np.full(2, BF16().sharded_wire_bits(-(-bucket.size // n), n, None) / 8)


def _sharded_bytes(bucket: Bucket, size: int, gathers: Method | None) -> np.ndarray:
    """Bytes to scatter or to gather so many coordinates: in all, and on the outer axes."""
    if not size:  # no leaf of the bucket can be split
        return np.zeros(2)
    route = bucket.route
    part = dataclasses.replace(bucket.leaves[0], shape=(-(-size // route.n_workers),))
    if gathers is not None:
        route = route.by(gathers)
        return np.array(route.bits("all-gather", Bucket((part,)))) / 8
    whole = dataclasses.replace(part, shape=(route.n_workers * part.size,))
    return np.array(route.bits("reduce-scatter", Bucket((whole,)))) / 8


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
