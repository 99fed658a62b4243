"""What `psum` does with a tree: which leaf travels how, and how many bytes that takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from dynamiq_jax import hierarchy
from dynamiq_jax.arguments import AnyMethod, AnyTopology, Resolved, axis_counts, resolve
from dynamiq_jax.buckets import COMPRESSED_DTYPES, Bucket, Leaf, describe_leaves, group_leaves
from dynamiq_jax.by_path import by_path
from dynamiq_jax.methods import DynamiQ, ErrorFeedback
from dynamiq_jax.placement import placed_leaves
from dynamiq_jax.topologies import Hierarchical, assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One leaf.

    Attributes:
      name: its path in the tree.
      shape: its shape.
      dtype: its dtype's name.
      bucket: the bucket it is reduced with, or `None` if it travels exactly.
      route: "compressed", or why not.
      wire_bytes: bytes one worker sends for it (its share of its bucket's).
      bits_per_coord: wire bits per coordinate, in units in which a bf16 all-reduce takes 16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int | None
    route: str
    wire_bytes: float
    bits_per_coord: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The rows of all leaves and their totals; prints as a table.

    Attributes:
      rows: one per leaf, in the tree's order.
      n_workers: workers on all axes.
      method: how gradients are compressed.
      topology: how payloads travel.
      reason: why this topology, and what is assumed of a cluster that is not this one.
      wire_bytes: bytes one worker sends in all.
      outer_wire_bytes: of these, what crosses the outer axes of `Hierarchical`; of another
        topology all.
      bf16_wire_bytes: what a bf16 all-reduce of the floating-point leaves would send.
      bits_per_coord: average over all coordinates, in units in which bf16 takes 16.
      relative_error: about the |error|² / |sum|² of super-groups of little energy, see
        `DynamiQ.relative_error`; `None` where the method does not know or nothing is compressed.
      advice: what to do where that is too much; `None` if it is not.
    """

    rows: tuple[Row, ...]
    n_workers: int
    method: str
    topology: str
    reason: str
    wire_bytes: float
    outer_wire_bytes: float
    bf16_wire_bytes: float
    bits_per_coord: float
    relative_error: float | None
    advice: str | None

    def __str__(self) -> str:
        title = f"{self.n_workers} workers, {self.topology}: {self.reason}"
        caption = [self.method]
        if self.relative_error is not None:
            error = f"about {self.relative_error:.2g}, of the worst up to three times that"
            caption.append(f"expected |error|² / |sum|² of a super-group: {error}")
        if self.advice is not None:
            caption.append(self.advice)
        body = []
        for row in self.rows:
            route = row.route if row.bucket is None else f"{row.route}, bucket {row.bucket}"
            shape = "x".join(map(str, row.shape)) or "scalar"
            numbers = f"{row.wire_bytes:,.0f}", f"{row.bits_per_coord:.3f}"
            body.append((row.name, shape, row.dtype, route, *numbers))
        totals = [("total", self.wire_bytes)]
        if self.outer_wire_bytes < self.wire_bytes:
            totals.append(("of it on outer axes", self.outer_wire_bytes))
        feet = [
            (name, "", "", "", f"{sent:,.0f}", f"{self._bits_per_coord(sent):.3f}")
            for name, sent in totals
        ]
        return "\n".join([title, "", *_table(body, feet), "", *caption])

    def _bits_per_coord(self, sent: float) -> float:
        """Bytes in the unit of ``bits_per_coord``."""
        return self.bits_per_coord * sent / self.wire_bytes if self.wire_bytes else 0.0


def _join(calls, tree, options) -> Explanation:
    """One explanation of leaves of several methods."""
    parts = [(method, call(verbose=False)) for method, call in calls]
    rows: list[Row] = []
    buckets = 0
    for method, part in parts:
        numbers = {row.bucket for row in part.rows} - {None}
        for row in part.rows:
            route = "exact: by path" if method is None else row.route
            bucket = None if row.bucket is None else row.bucket + buckets
            rows.append(replace(row, route=route, bucket=bucket))
        buckets += len(numbers)
    order = {leaf.name: leaf.index for leaf in describe_leaves(tree)}
    sizes = [sum(math.prod(row.shape) for row in part.rows) for _, part in parts]
    bits = sum(size * p.bits_per_coord for size, (_, p) in zip(sizes, parts, strict=True))
    methods = (f"{len(p.rows)} leaves: {p.method if method else 'exact'}" for method, p in parts)
    compressed = [part for method, part in parts if method is not None] or [parts[0][1]]
    errors = [part.relative_error for part in compressed if part.relative_error is not None]
    explanation = Explanation(
        rows=tuple(sorted(rows, key=lambda row: order[row.name])),
        n_workers=parts[0][1].n_workers,
        method="; ".join(methods),
        topology="; ".join(dict.fromkeys(part.topology for part in compressed)),
        reason="; ".join(dict.fromkeys(part.reason for part in compressed)),
        wire_bytes=sum(part.wire_bytes for _, part in parts),
        outer_wire_bytes=sum(part.outer_wire_bytes for _, part in parts),
        bf16_wire_bytes=sum(part.bf16_wire_bytes for _, part in parts),
        bits_per_coord=bits / max(sum(sizes), 1),
        relative_error=max(errors, default=None),
        advice=" ".join(dict.fromkeys(p.advice for p in compressed if p.advice)) or None,
    )
    if options["verbose"]:
        print(explanation)
    return explanation


@by_path(_join)
def explain(
    tree,
    n_workers: int | tuple[int, ...],
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    verbose: bool = True,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> Explanation:
    """Explains `psum` of ``tree`` over ``n_workers``; prints the table unless ``verbose=False``.

    More workers than JAX has devices are those of another cluster. `explain` then assumes several
    hosts, whose devices are the last axis where there are several axes, and slow links between
    them; the reason says so.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s (nothing is computed).
      n_workers: the size of the axis, or of every axis, the outermost first.
      method: as for `psum`.
      topology: as for `psum`.
      verbose: whether to print.
      mesh: as for `init_state`.
      specs: as for `init_state`; shapes and bytes are then those of one device's parts.
    """
    sizes = axis_counts(n_workers)
    elsewhere = assumed(sizes)
    resolved = resolve(method, topology, sizes, here=elsewhere is None)
    if elsewhere is not None:
        resolved = resolved._replace(reason=f"{resolved.reason}; {elsewhere}")
    leaves, _ = placed_leaves(tree, mesh, specs)
    explanation = explain_leaves(leaves, resolved, here=elsewhere is None)
    if verbose:
        print(explanation)
    return explanation


def explain_leaves(leaves: list[Leaf], resolved: Resolved, *, here: bool = True) -> Explanation:
    """Explains the reduction of what one device holds of a tree; ``here`` as for `resolve`."""
    n = resolved.n_workers
    grouping = group_leaves(leaves, **resolved.limits(here=here)._asdict())
    share = 2 * (n - 1) / n
    rows = {}
    outer = 0.0
    for leaf, reason in grouping.exact:
        rows[leaf.index] = _row(leaf, None, f"exact: {reason}", share * leaf.nbytes, share)
        outer += share * leaf.nbytes
    for number, bucket in enumerate(grouping.buckets):
        inner_bits, outer_bits = _wire_bits(bucket, resolved)
        outer += outer_bits / 8
        for leaf in bucket.leaves:
            part = (inner_bits + outer_bits) / 8 * leaf.size / bucket.size
            rows[leaf.index] = _row(leaf, number, "compressed", part, share)
    total = sum(row.wire_bytes for row in rows.values())
    size = sum(leaf.size for leaf in leaves)
    floats = sum(leaf.size for leaf in leaves if leaf.dtype.name in COMPRESSED_DTYPES)
    error, advice = _expected_error(resolved) if grouping.buckets and n > 1 else (None, None)
    return Explanation(
        rows=tuple(rows[i] for i in sorted(rows)),
        n_workers=n,
        method=repr(resolved.method),
        topology="XLA" if resolved.topology is None else repr(resolved.topology),
        reason=resolved.reason,
        wire_bytes=total,
        outer_wire_bytes=outer,
        bf16_wire_bytes=share * 2 * floats,
        bits_per_coord=8 * total / (share * size) if share * size else 0.0,
        relative_error=error,
        advice=advice,
    )


def wire_bits(
    tree,
    n_workers: int | tuple[int, ...],
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> int:
    """Bits that one worker sends in `psum` of ``tree``: what the compiled collectives move."""
    options = {"method": method, "topology": topology, "mesh": mesh, "specs": specs}
    explanation = explain(tree, n_workers, **options, verbose=False)
    return round(8 * explanation.wire_bytes)


def _wire_bits(bucket: Bucket, resolved: Resolved) -> tuple[int, int]:
    """Bits that one worker sends for a bucket within the inner axis, and in all other ways."""
    method, topology, _, sizes = resolved.of_bucket(bucket)
    if isinstance(topology, Hierarchical):
        return hierarchy.wire_bits(bucket.size, bucket.dtype, sizes, method, topology)
    return 0, method.wire_bits(bucket.size, resolved.n_workers, topology)


def _expected_error(resolved: Resolved) -> tuple[float | None, str | None]:
    """The relative error of a super-group, and what to do where it is too large."""
    method, topology, _, sizes = resolved
    if isinstance(method, ErrorFeedback):
        method = method.method
    if not isinstance(method, DynamiQ):
        return None, None
    assert topology is not None
    parts = hierarchy.collectives(sizes, topology)
    advices = [advice for part in parts if (advice := method.advice(*part))]
    return sum(method.relative_error(*part) for part in parts), " ".join(advices) or None


def _table(body: Sequence[Sequence[str]], feet: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain text table: the last two columns, which are numbers, flush right."""
    head = ("leaf", "shape", "dtype", "route", "wire bytes", "bits/coordinate")
    widths = [max(map(len, column)) for column in zip(head, *body, *feet, strict=True)]
    aligns = "<<<<>>"

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, aligns, widths, strict=True)
        return "  ".join(f"{cell:{align}{width}}" for cell, align, width in padded)

    rule = "-" * len(line(head))
    return [line(head), rule, *map(line, body), rule, *map(line, feet)]


def _row(leaf, bucket, route, wire_bytes, share) -> Row:
    coords = share * leaf.size
    return Row(
        name=leaf.name,
        shape=leaf.shape,
        dtype=leaf.dtype.name,
        bucket=bucket,
        route=route,
        wire_bytes=wire_bytes,
        bits_per_coord=8 * wire_bytes / coords if coords else 0.0,
    )
