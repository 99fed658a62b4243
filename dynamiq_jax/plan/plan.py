"""A `Plan`: all that one call of a collective sends, as `Move`s, before it is sent.

A call builds its plan once, while it is traced. The engine runs the plan, `explain` prints it, and
its bytes are those of the compiled program (`tests/test_plans.py`). Every plan names the operations
that run it by its `Plan.scope`, so a compiled program tells which plans it runs.
"""

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from jax import Array

from dynamiq_jax.core.axis import bucket_seeds
from dynamiq_jax.core.warned import warn
from dynamiq_jax.tree.leaves import Bucket, Leaf

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]

REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})
"""The kinds whose payloads a topology sends; others are XLA's exchanges of payloads."""

SCOPE = "dynamiq_plan_"
"""The beginning of the names of plans in compiled programs."""
DERIVATIVE = "dynamiq_derivative"
"""Names what moves tangents or cotangents of a plan's leaves natively, which belongs to no plan."""


def lines_of_defaults(defaults: Iterable[str]) -> list[str]:
    """The lines by which explanations tell of `Plan.defaults`."""
    return [f"By default on this machine: {told}." for told in dict.fromkeys(defaults)]


def native_share(kind: Kind, n_workers: int) -> float:
    """The part of a leaf's bytes that a worker sends if XLA's collective moves it.

    The leaf is what this worker passes: whole terms, or for an all-gather its shard.
    """
    n = n_workers
    parts = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1.0}
    return parts.get(kind, (n - 1) / n)


EXCLUDED, BY_XLA = "excluded", "travels by XLA's collective"
"""The reason for a leaf without a method, and the end of it for a method that is a dtype."""


class Native(NamedTuple):
    """A leaf that XLA's collective moves as numbers."""

    leaf: Leaf
    reason: str
    """Why it is not compressed."""
    wire: np.dtype
    """The dtype of the numbers."""

    @classmethod
    def of(cls, kind: Kind, leaf: Leaf, reason: str) -> Self:
        """A leaf that travels in its own dtype."""
        counts = kind == "all-reduce" and leaf.dtype == np.bool_  # JAX adds up bools as int32
        return cls(leaf, reason, np.dtype(np.int32) if counts else leaf.dtype)


class Move(NamedTuple):
    """One exchange of some leaves.

    Attributes:
      kind: the collective.
      leaves: what this worker passes to it; several share a bucket.
      bucket: the number of the bucket, or `None` if XLA's collective moves the leaf as numbers.
      how: the method, or the dtype of the numbers.
      reason: why the leaf is not compressed; for a bucket, why its payloads take this topology.
      sent_bits: bits that one worker sends.
      outer_bits: those of them that cross the outer axes of `Hierarchical`; else all of them.
    """

    kind: Kind
    leaves: tuple[Leaf, ...]
    bucket: int | None
    how: str
    reason: str
    sent_bits: float
    outer_bits: float

    @property
    def size(self) -> int:
        """The number of coordinates that this worker passes."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def unasked(self) -> bool:
        """Whether the leaves travel natively though neither a method nor its absence asks so."""
        return self.bucket is None and not self.reason.endswith((EXCLUDED, BY_XLA))


class Plan(NamedTuple):
    """All that one call sends. Every leaf is in one bucket, or has a reason to travel natively."""

    kind: Kind
    sizes: tuple[int, ...]
    """The number of workers on every axis, the outermost first."""
    buckets: tuple[Bucket, ...] = ()
    exact: tuple[Native, ...] = ()
    methods: tuple[Any, ...] = ()
    """The method of every leaf of the tree, `None` for leaves that are excluded."""
    keyed: bool = False
    """Whether the call has a key: without one, and without statistics, samples give the seed."""
    apart: tuple[Leaf, ...] = ()
    """Leaves that were left out of the buckets, which would hold them otherwise."""
    defaults: tuple[str, ...] = ()
    """Defaults that links and environment of this machine decided, a line for each."""
    limited: bool = False
    """Whether the caller set a limit of buckets, and expects that small ones travel natively."""
    backward: bool = False
    """Whether this is what a backward pass sends of a call's cotangents."""
    by_jax: bool = False
    """Whether JAX itself sums the leaves where a loss uses them, by collectives without a plan."""

    @property
    def n_workers(self) -> int:
        """The number of workers on all axes."""
        return math.prod(self.sizes)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The exchanges, in their order: first leaves that travel natively, then buckets."""
        n, found = self.n_workers, []
        for leaf, reason, wire in self.exact:
            bits = native_share(self.kind, n) * 8 * leaf.size * wire.itemsize
            found.append(Move(self.kind, (leaf,), None, wire.name, reason, bits, bits))
        for number, bucket in enumerate(self.buckets):
            route = bucket.route
            sent, outer = route.bits(self.kind, bucket, keyed=self.keyed) if n > 1 else (0, 0)
            how = repr(route.method)
            found.append(Move(self.kind, bucket.leaves, number, how, route.reason, sent, outer))
        return tuple(found)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one worker sends."""
        return sum(move.sent_bits for move in self.moves) / 8

    @property
    def outer_bytes(self) -> float:
        """Bytes of them that cross the outer axes of `Hierarchical`; of one level all."""
        return sum(move.outer_bits for move in self.moves) / 8

    @property
    def needs_state(self) -> Any:
        """The first method of a bucket that a call without a state refuses, else `None`."""
        # One worker sends nothing, and needs no memory.
        needing = (bucket.route.method for bucket in self.buckets if self.n_workers > 1)
        return next((method for method in needing if method.needs_state), None)

    def bits_per_coord(self, sent_bytes: float, size: int) -> float:
        """Bits per coordinate of ``size`` that take these bytes, of which bf16 takes 16."""
        share = native_share(self.kind, self.n_workers) * size
        return 8 * sent_bytes / share if share else 0.0

    @property
    def scope(self) -> str:
        """The name under which the operations of this plan stand in a compiled program."""
        flags = [name for name in ("backward", "by_jax") if getattr(self, name)]
        own = self.kind, self.sizes, self.keyed, *flags, *self.exact, *self.buckets
        told = "\n".join(map(repr, own))
        return f"{SCOPE}{zlib.crc32(told.encode()):08x}"

    @property
    def asked_bytes(self) -> float:
        """Bytes of them, without a key, that a traced program sends by collectives."""
        asked = self._replace(keyed=False)
        pushed = {i for i, x in enumerate(self.buckets) if self.pushes and x.route.only_pushes}
        apart = sum(move.sent_bits for move in asked.moves if move.bucket in pushed)
        return asked.sent_bytes - apart / 8

    @property
    def pushes(self) -> bool:
        """Whether push kernels may send payloads; these are no collectives of a program."""
        return self.kind in REDUCTIONS and any(bucket.route.pushes for bucket in self.buckets)

    def seeds(self, words: Array | None) -> list[Any]:
        """The seed of every bucket (`core.axis.Seed`), from a key's words if there is a key."""
        return bucket_seeds(words, [bucket.tag for bucket in self.buckets])


PADDED = "padded to"
"""Begins the reason for a bucket whose padding takes all bits that compression saves."""
NOTABLE, LARGE = 4096, 65536
"""Coordinates of leaves that look like parameters, and of leaves that are worth compressing."""
_NATIVELY: dict[Kind, str] = {
    "all-reduce": "are summed by jax.lax.psum",
    "reduce-scatter": "are scattered by jax.lax.psum_scatter",
    "all-gather": "are gathered by jax.lax.all_gather",
    "all-to-all": "are exchanged by jax.lax.all_to_all",
}


BY_USE = "JAX sums it where the loss uses it"
"""The reason for a gradient on Explicit axes that comes back summed."""


def warn_of_native(plan: Plan, moved: int | None = None) -> None:
    """Warns if more than a tenth of a plan's compressible bytes travel natively unasked.

    The causes are padding, limits that the caller did not set, or JAX's types. ``moved`` is the
    number of bytes that are compressed, by default those of the plan's buckets.
    """
    n = plan.n_workers
    if n == 1:
        return
    if moved is None:
        moved = sum(leaf.nbytes for bucket in plan.buckets for leaf in bucket.leaves)
    parts = n if plan.kind == "all-gather" else 1  # a worker passes its shard of a leaf
    wanted = (PADDED, BY_USE, *(() if plan.limited else ("min_bucket",)))
    # If nothing is compressed, small leaves count if together they are as large as a large one.
    least, nothing = (LARGE, "") if moved else (NOTABLE, "; nothing is compressed")
    small = [
        (leaf, reason)
        for leaf, reason, _ in plan.exact
        if any(word in reason for word in wanted) and parts * leaf.size >= least
    ]
    native = sum(leaf.nbytes for leaf, _ in small)
    total = parts * sum(leaf.size for leaf, _ in small)
    if native <= (moved + native) / 10 or total < LARGE:
        return
    leaves, (reason, *_) = zip(*small, strict=True)
    reason = reason if reason == BY_USE else f"there is a {reason}"
    if PADDED in reason:
        remedy = "pass more leaves at a time, or reduce among fewer workers"
    elif reason == BY_USE:
        remedy = "dq.Compression(exclude=...) says that it is meant; Auto axes compress all"
    else:
        remedy = (
            "pass dq.Compression(min_bucket_bytes=0) to compress small buckets, too, or set one "
            "of these limits"
        )
    by = "are summed by JAX" if plan.by_jax else _NATIVELY[plan.kind]
    warn(
        f"{described(leaves)} ({native:,} bytes) {by}, since {reason}{nothing}. "
        f"dq.explain(tree, {n}) tells of every leaf which way it goes; {remedy}",
    )


def described(leaves: Sequence[Leaf]) -> str:
    """The first leaf, and how many more there are."""
    first = leaves[0]
    return f"leaf {first.label} ({first.dtype.name}{list(first.shape)}) and {len(leaves) - 1} more"


_SCOPES = re.compile(rf"{SCOPE}\w+")
_known: dict[str, Plan] = {}
"""All plans that this process has run, by their scopes."""


def scope_of(path: str) -> str | None:
    """The innermost plan in the path of an operation; "" in the transpose of a native exchange.

    Only exchanges have plans of their own for cotangents. JAX transposes those of leaves that
    travel natively, and what it puts there belongs to no plan.
    """
    found = None
    for match in _SCOPES.finditer(path):
        _, transposed, inside = path[: match.start()].rpartition("transpose(")
        back = bool(transposed) and inside.count(")") <= inside.count("(")
        plan = _known.get(match[0])
        native = back and plan is not None and plan.kind == "all-to-all"
        found = "" if native or DERIVATIVE in path[match.end() :] else match[0]
    return found


def remember(plan: Plan) -> str:
    """Keeps a plan for `known`; returns its scope."""
    scope = plan.scope
    _known[scope] = plan
    return scope


def known(scopes: Iterable[str]) -> dict[str, Plan]:
    """The plans of these scopes that this process has run."""
    return {scope: _known[scope] for scope in scopes if scope in _known}
