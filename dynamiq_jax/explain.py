"""What `psum` does with a tree: which leaf travels how, and how many bytes that takes."""

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from dynamiq_jax.buckets import COMPRESSED_DTYPES, describe_leaves, group_leaves
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.topologies import Ring, Topology


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
      n_workers: workers on the axis.
      topology: how payloads travel.
      wire_bytes: bytes one worker sends in all.
      bf16_wire_bytes: what a bf16 all-reduce of the floating-point leaves would send.
      bits_per_coord: average over all coordinates, in units in which bf16 takes 16.
    """

    rows: tuple[Row, ...]
    n_workers: int
    topology: str
    wire_bytes: float
    bf16_wire_bytes: float
    bits_per_coord: float

    def __str__(self) -> str:
        table = Table(title=f"{self.n_workers} workers, {self.topology}")
        for column in ("leaf", "shape", "dtype", "route", "wire bytes", "bits/coordinate"):
            table.add_column(column, justify="right" if column[0] in "wb" else "left")
        for row in self.rows:
            route = row.route if row.bucket is None else f"{row.route}, bucket {row.bucket}"
            shape = "x".join(map(str, row.shape)) or "scalar"
            numbers = f"{row.wire_bytes:,.0f}", f"{row.bits_per_coord:.3f}"
            table.add_row(row.name, shape, row.dtype, route, *numbers)
        table.add_section()
        table.add_row("total", "", "", "", f"{self.wire_bytes:,.0f}", f"{self.bits_per_coord:.3f}")
        text = io.StringIO()
        Console(width=120, file=text).print(table)
        return text.getvalue()


def explain(
    tree,
    n_workers: int,
    *,
    method: DynamiQ | None = None,
    topology: Topology | None = None,
    verbose: bool = True,
) -> Explanation:
    """Explains `psum` of ``tree`` over ``n_workers``; prints the table unless ``verbose=False``.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s (nothing is computed).
      n_workers: the size of the axis.
      method: as for `psum`.
      topology: as for `psum`.
      verbose: whether to print.
    """
    if n_workers < 1:
        raise ValueError(f"n_workers={n_workers} must be at least 1")
    method = DynamiQ() if method is None else method
    topology = Ring() if topology is None else topology
    leaves = describe_leaves(tree)
    grouping = group_leaves(
        leaves,
        min_leaf_size=method.min_leaf_size,
        min_bucket_size=method.smallest_bucket(n_workers),
        bucket_bytes=method.bucket_bytes,
    )
    share = 2 * (n_workers - 1) / n_workers
    rows = {}
    for leaf, reason in grouping.exact:
        rows[leaf.index] = _row(leaf, None, f"exact: {reason}", share * leaf.nbytes, share)
    for number, bucket in enumerate(grouping.buckets):
        wire_bytes = method.wire_bits(bucket.size, n_workers, topology) / 8
        for leaf in bucket.leaves:
            part = wire_bytes * leaf.size / bucket.size
            rows[leaf.index] = _row(leaf, number, "compressed", part, share)
    total = sum(row.wire_bytes for row in rows.values())
    size = sum(leaf.size for leaf in leaves)
    floats = sum(leaf.size for leaf in leaves if leaf.dtype.name in COMPRESSED_DTYPES)
    explanation = Explanation(
        rows=tuple(rows[i] for i in sorted(rows)),
        n_workers=n_workers,
        topology=repr(topology),
        wire_bytes=total,
        bf16_wire_bytes=share * 2 * floats,
        bits_per_coord=8 * total / (share * size) if share * size else 0.0,
    )
    if verbose:
        print(explanation)
    return explanation


def wire_bits(
    tree, n_workers: int, *, method: DynamiQ | None = None, topology: Topology | None = None
) -> int:
    """Bits that one worker sends in `psum` of ``tree``: what the compiled collectives move."""
    explanation = explain(tree, n_workers, method=method, topology=topology, verbose=False)
    return round(8 * explanation.wire_bytes)


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
