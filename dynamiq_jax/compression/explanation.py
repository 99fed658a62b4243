"""Explanations of `psum`: the route of each leaf, and the number of bytes that it takes."""

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dynamiq_jax.compression.compression import Route
from dynamiq_jax.compression.ways import PaddedLeaf, RefusedWay, Way, Ways, lines
from dynamiq_jax.methods.base import Method
from dynamiq_jax.plan.plan import Plan, lines_of_defaults
from dynamiq_jax.tree.leaves import COMPRESSED_DTYPES, Leaf


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf.

    Attributes:
      bucket: the bucket that the leaf is reduced in, or `None` if it travels exactly.
      route: "compressed", or the reason why it is not.
      wire_bytes: the bytes that one worker sends for it (its share of its bucket's bytes).
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
      topology: the route of payloads.
      reason: why this topology was chosen, and the assumptions about another cluster.
      wire_bytes: all bytes that one worker sends.
      outer_wire_bytes: those of these bytes that cross the outer axes of `Hierarchical`; all of
        them with another topology.
      bf16_wire_bytes: the bytes that a bf16 all-reduce of the floating-point leaves would send.
      bits_per_coord: the average over all coordinates, in units in which bf16 takes 16.
      relative_error: the approximate |error|² / |sum|² of super-groups with little energy, see
        `DynamiQ.relative_error`; `None` if the method does not know it or nothing is compressed.
      advice: a remedy if this error is too large, else `None`.
      ways: the bytes of data parallel training, sharded updates and FSDP, with AdamW; empty if
        nothing is compressed, or if a method does not scatter. With a rate it also has wire times.
      refused: those of these ways that cannot run, each with its reason.
      fastest: the way that takes the least time on the wire, in words; `None` without a rate.
      kernels: the backend of the kernels that encode and decode on JAX's default platform, such as
        "triton"; "xla" for methods that have none. Several are joined by "; ".
      kernels_reason: why `backend=None` runs no Triton kernels on the NVIDIA GPUs here, else
        `None`.
      padded: the leaves that sharded updates pad, since no dimension is a multiple of the workers.
      defaults: what links and environment of this machine decided, a line for each.
      needs_state: whether `psum` refuses a method, which keeps a state: `reduce` sends all this.
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
    ways: tuple[Way, ...] = ()
    fastest: str | None = None
    padded: tuple[PaddedLeaf, ...] = ()
    kernels: str = "xla"
    kernels_reason: str | None = None
    defaults: tuple[str, ...] = ()
    needs_state: bool = False
    refused: tuple[RefusedWay, ...] = ()

    def __str__(self) -> str:
        count = f"{self.n_workers} worker{'s' if self.n_workers > 1 else ''}"
        title = f"{count}, {self.topology}: {self.reason}"
        caption = [self.method, *lines_of_defaults(self.defaults)]
        if self.needs_state:
            caption.append("by dq.reduce with its state; dq.psum and dq.pmean keep none and refuse")
        if self.relative_error is not None:
            error = f"about {self.relative_error:.2g}, of the worst up to three times that"
            caption.append(f"expected |error|² / |sum|² of a super-group: {error}")
        if self.kernels_reason is not None:
            caption.append(f"kernels of the backend {self.kernels!r}: {self.kernels_reason}")
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
        bits = self.bits_per_coord / (self.wire_bytes or 1)
        feet = [(name, "", "", "", f"{x:,.0f}", f"{bits * x:.3f}") for name, x in totals]
        if self.ways:
            caption += ["", *lines(self.ways)]
            caption += map(str, self.refused)
            caption += filter(None, (way.natives for way in self.ways[1:]))  # rows tell of psum
        if self.padded:
            caption += ["", _said_of(self.padded, self.n_workers)]
        if self.fastest:
            caption += ["", self.fastest]
        return "\n".join([title, "", *_table(body, feet), "", *caption])

    def at_rate(self, rate: str, per_second: float, per_host: int = 1) -> Self:
        """The explanation with the wire's times at a rate.

        Args:
          rate: the rate as it was passed.
          per_second: bytes that a link carries in each direction.
          per_host: the number of workers that share a host's link. If there are several, the link
            carries the bytes that all of them send over the outer axes of `Hierarchical`.
        """

        def ms(sent: float) -> float:
            return 1e3 * sent / per_second

        def crossing(way: Way) -> float:
            return way.sent_bytes if per_host == 1 else per_host * way.outer_bytes

        ways = tuple(dataclasses.replace(way, wire_ms=ms(crossing(way))) for way in self.ways)
        least = self.wire_bytes if per_host == 1 else per_host * self.outer_wire_bytes
        native, by, link = self.bf16_wire_bytes, "", "the wire"
        if per_host > 1:
            # On two levels a host sends as one worker among the hosts would; the bytes of all
            # workers hold 2 (n - 1) / n of an array, those of h hosts 2 (h - 1) / h.
            n, hosts = self.n_workers, self.n_workers // per_host
            native *= (1 - 1 / hosts) / (1 - 1 / n) if n > 1 else 0.0
            link = f"the link of a host, which {per_host} workers share,"
        if ways:
            best = min(ways, key=crossing)
            least, by = crossing(best), f" least, by {best.name} ({best.call})"
        psum = f"bf16 psum takes {ms(native):,.1f}" + (" on two levels" if per_host > 1 else "")
        said = f"At {rate} {link} takes {ms(least):,.1f} ms a step{by}; {psum}."
        return dataclasses.replace(self, ways=ways, fastest=said)


def explain_plan(
    plan: Plan, routes: Sequence[Route], assumed: str | None, ways: Ways
) -> Explanation:
    """Explains a plan by the ``routes`` of its methods, none if all leaves are excluded."""
    n = plan.n_workers
    share = 2 * (n - 1) / n
    bits, told = plan.bits_per_coord, list[tuple[Leaf, int | None, str, float]]()
    moves = plan.moves
    for move in moves:
        route = f"exact: {move.reason}" if move.bucket is None else "compressed"
        for leaf in move.leaves:
            part = leaf.size / move.size if len(move.leaves) > 1 else 1.0
            told.append((leaf, move.bucket, route, move.sent_bits / 8 * part))
    told.sort(key=lambda row: row[0].index)
    rows = [
        Row(leaf.name, leaf.shape, leaf.dtype.name, bucket, route, sent, bits(sent, leaf.size))
        for leaf, bucket, route, sent in told
    ]
    leaves, total = [row[0] for row in told], plan.sent_bytes
    size = sum(leaf.size for leaf in leaves)
    floats = sum(leaf.size for leaf in leaves if leaf.dtype.name in COMPRESSED_DTYPES)
    pays = bool(plan.buckets) and n > 1
    errors = [route.runner.relative_error(n, route.flat) for route in routes if pays]
    advices = [route.runner.advice(n, route.flat) for route in routes if pays]
    kernels = [route.method.kernels for route in routes]
    defaults = [line for way in ways.ways for own, _ in way.plans for line in own.defaults]
    topologies = ("XLA" if route.topology is None else repr(route.topology) for route in routes)
    reasons = [route.reason for route in routes] or ["no leaf has a method"]
    reasons += [assumed] if assumed else []
    return Explanation(
        rows=tuple(rows),
        n_workers=n,
        method=_described(routes, plan.methods),
        topology="; ".join(dict.fromkeys(topologies)) or "XLA",
        reason="; ".join(dict.fromkeys(reasons)),
        wire_bytes=total,
        outer_wire_bytes=plan.outer_bytes,
        bf16_wire_bytes=share * 2 * floats,
        bits_per_coord=bits(total, size),
        relative_error=max((error for error in errors if error is not None), default=None),
        advice=" ".join(dict.fromkeys(advice for advice in advices if advice)) or None,
        ways=ways.ways,
        padded=ways.padded,
        refused=ways.refused,
        needs_state=plan.needs_state is not None,
        defaults=tuple(dict.fromkeys((*plan.defaults, *defaults))),
        kernels="; ".join(dict.fromkeys(k.backend if k else "xla" for k in kernels)) or "xla",
        kernels_reason="; ".join(dict.fromkeys(k.reason for k in kernels if k and k.reason))
        or None,
    )


def _said_of(padded: Sequence[PaddedLeaf], n_workers: int) -> str:
    """A line about what sharded updates pad."""
    count, nbytes = len(padded), sum(leaf.kept_bytes for leaf in padded)
    shape = lambda lengths: "x".join(map(str, lengths))
    said = [f"{x.name} {shape(x.shape)} to {shape(x.padded_shape)}" for x in padded[:4]]
    more = f", and {count - 4} more" if count > 4 else ""
    leaves = "1 leaf" if count == 1 else f"{count} leaves"
    return (
        f"Sharded updates pad {leaves} with zeros, {nbytes:,} bytes of the state of all "
        f"{n_workers} workers: {', '.join(said)}{more}"
    )


def _described(routes: Sequence[Route], methods: Sequence[Method | None]) -> str:
    """The method, or the number of leaves for each of several methods."""
    counts = collections.Counter(methods)
    if len(counts) < 2 and None not in counts:
        return repr(routes[0].method) if routes else "exact"
    return "; ".join(f"{count} leaves: {m or 'exact'}" for m, count in counts.items())


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
