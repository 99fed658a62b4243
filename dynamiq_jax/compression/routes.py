"""Routes: one method over one topology, or over a hierarchy, whose one call becomes three."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import Seed, fold_seed
from dynamiq_jax.methods.base import Call, Collective, Limits, Method, Outcome, State
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, psum_scatter_bytes
from dynamiq_jax.methods.hops import HopMethod
from dynamiq_jax.methods.metrics import PayloadFacts, compounded
from dynamiq_jax.plan.plan import Kind, native_share
from dynamiq_jax.topologies import AnyTopology, Topology
from dynamiq_jax.tree.leaves import Bucket

UNIT = 1024
"""Coordinates that stay together in a slice: whole super-groups and blocks of every method."""


@dataclass(frozen=True, slots=True)
class Route:
    """How buckets are reduced: a method, a topology, and how many workers there are."""

    method: Method
    topology: AnyTopology | None
    """`None`: payloads travel by XLA's collectives."""
    sizes: tuple[int, ...]
    """The number of workers on every axis, the outermost first."""
    runner: Method
    """The method that runs: ``method``, or `TwoLevels` around it."""
    limits: Limits
    reason: str = field(compare=False)
    """Why this topology was chosen."""
    pushed: tuple[int, int] | None = None
    """The bytes of all buckets of a sum from which, and up to which, push kernels do it; `None`:
    they never do."""
    shards_in_bf16: bool = False
    """Whether FSDP scatters and gathers in bf16: its default over links as fast as NVLink."""

    @property
    def n_workers(self) -> int:
        """The number of workers on all axes."""
        return math.prod(self.sizes)

    @property
    def sum_limits(self) -> Limits:
        """The limits of an all-reduce that may be one push kernel."""
        if self.pushed is None:
            return self.limits
        return self.limits._replace(min_bucket_bytes=self.pushed[0])

    @property
    def push(self) -> Topology | None:
        """The topology by which push kernels do an all-reduce; `None`: they never do."""
        if self.pushed is None:
            return None
        return dataclasses.replace(cast(Topology, self.topology), transport="push", streams=1)

    def bits(self, kind: Kind, bucket: Bucket, *, keyed: bool = False) -> tuple[int, int]:
        """Bits that one worker sends for a bucket, and how many of them on the outer axes.

        The bucket holds what a worker passes to the collective: whole terms, blocks for all
        workers, or for an all-gather one worker's shards. ``keyed``: the call has a key.
        """
        sent, outer = self._bits(kind, bucket)
        if not keyed or kind == "all-to-all" or isinstance(self.runner, TwoLevels):
            return sent, outer
        n, part = self.n_workers, -(-bucket.size // self.n_workers)
        if kind == "all-reduce":
            method = self.runner.of_bucket(bucket)
            saved = method.seed_bits(bucket.size, n, self.flat)
        elif kind == "all-gather":
            saved = self.method.seed_bits(bucket.size, n, None, "all_gather")
        else:
            saved = self.method.seed_bits(part, n, self.flat, "reduce_scatter")
        return sent - saved, outer - saved

    def _bits(self, kind: Kind, bucket: Bucket) -> tuple[int, int]:
        n, levels, part = self.n_workers, self.runner, -(-bucket.size // self.n_workers)
        if kind == "all-reduce":
            method, own = levels.of_bucket(bucket), (bucket.size, n, self.flat)
            return method.wire_bits(*own), method.outer_wire_bits(*own)
        if kind == "all-gather":
            n_outer = n // levels.n_inner if isinstance(levels, TwoLevels) else n
            sizes = (n, n_outer)
            sent, crossing = (self.method.sharded_wire_bits(bucket.size, k, None) for k in sizes)
            return sent, crossing
        if kind == "all-to-all":
            bits = cast(HopMethod, self.method.of_bucket(bucket)).exchange_bits(part, n)
        elif isinstance(levels, TwoLevels):
            return levels.scatter_wire_bits(part, n)
        else:
            bits = self.method.sharded_wire_bits(part, n, self.flat)
        return bits, bits

    def bits_per_coord(self, kind: Kind, bucket: Bucket) -> float:
        """Wire bits per coordinate of a bucket, of which bf16 takes 16."""
        n = self.n_workers
        size = bucket.size if kind in ("all-reduce", "all-gather") else n * -(-bucket.size // n)
        share = native_share(kind, n) * size
        return self.bits(kind, bucket)[0] / share if share else 0.0

    def limits_of(self, kind: Kind, passed: Mapping[str, int]) -> Limits:
        """The limits of a kind of collective; ``passed`` has those that the user passed.

        On fast links `psum_scatter` starts to pay at larger buckets than `psum`. A measured default
        limit is replaced by the one measured for `psum_scatter`; a limit that the user passed is
        kept. The limits of a gather apply to the whole leaf, of which a worker passes its shard.
        """
        if kind == "all-reduce":
            return self.sum_limits
        limits, n = self.limits, self.n_workers
        if limits.min_bucket_bytes == psum_bytes(n) and "min_bucket_bytes" not in passed:
            least = psum_scatter_bytes(n)
            bucket = max(limits.bucket_bytes, 2 * least)
            limits = limits._replace(min_bucket_bytes=least, bucket_bytes=bucket)
        shards = n if kind == "all-gather" else 1
        return Limits(*(-(-limit // shards) for limit in limits))

    def check(self, kind: Kind) -> None:
        """Refuses a method that does not do this kind of collective."""
        if kind == "all-to-all":
            check_exchanges(self.method, self.n_workers)
        elif kind != "all-reduce":
            self.sharded()

    def sharded(self) -> tuple[Method, Topology | None]:
        """The method that scatters and gathers, which may be `TwoLevels`, and the topology."""
        check_shards(self.method, "psum_scatter and all_gather")
        if self.method.needs_state:
            raise NotImplementedError(
                f"method={self.method!r} keeps a state, and psum_scatter and all_gather keep none; "
                "pass a method without error feedback"
            )
        return self.runner, self.flat

    @property
    def flat(self) -> Topology | None:
        """The topology of one level; a hierarchy has its own in `TwoLevels`."""
        return None if isinstance(self.runner, TwoLevels) else cast(Topology | None, self.topology)


def check_shards(method: Method, what: str) -> None:
    """Refuses a method that cannot scatter and gather, which ``what`` needs."""
    if not method.shards:
        raise NotImplementedError(
            f"method={method!r} does not do {what}; pass a quantiser without memory, such as "
            "dq.DynamiQ() or dq.contrib.MXFP8(), or reduce with dq.psum over a topology "
            "without them"
        )


def check_exchanges(method: Method, n_workers: int, name: str = "method") -> None:
    """Refuses methods that cannot encode blocks without an agreement between workers."""
    if not (isinstance(method, HopMethod) and method.exchanges(n_workers)):
        raise NotImplementedError(
            f"{name}={method!r}: all_to_all encodes at one width of 2 to 16 bits, without means, "
            "dither, state or lost packets, and not by XLA's own sums; pass dq.DynamiQ(bits=8.5), "
            "dq.contrib.MXFP8() or dq.BF16()"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevels(Method):
    """A method over `Hierarchical`: the inner axis scatters, the outer reduces, the inner gathers.

    It compresses on the outer axes, and on the inner one where that has a topology.
    """

    method: Method
    inner: Topology | None
    outer: Topology
    n_inner: int

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses a method and topologies that do not fit, on both axes."""
        n_outer = n_workers // self.n_inner
        self.outer.check(n_outer)
        self.method.check(n_outer, self.outer)
        if self.inner is None:
            return
        if self.method.needs_state:
            raise NotImplementedError(
                f"method={self.method!r} keeps a state, and the reduce-scatter and all-gather that "
                "Hierarchical(inner=...) needs keep none; pass inner=None, or a method without "
                "error feedback"
            )
        self.inner.check(self.n_inner)
        check_shards(self.method, "the scatter and gather that Hierarchical(inner=...) needs")

    def of_bucket(self, bucket: Bucket) -> Self:
        """The wrapper with its method for this bucket."""
        return dataclasses.replace(self, method=self.method.of_bucket(bucket))

    def init(self, size: int, n_workers: int) -> State:
        """The state of the outer reduction of one slice."""
        return self.method.init(self._slice(size), n_workers // self.n_inner)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends on both levels."""
        outer, part = self.outer_wire_bits(size, n_workers, topology), self._slice(size)
        return outer + sum(self._inner_bits(part, way) for way in (self.inner, None))

    def scatter_wire_bits(self, size: int, n_workers: int) -> tuple[int, int]:
        """Bits that one worker sends to scatter slices of ``size``, and those on the outer axes."""
        n_outer = n_workers // self.n_inner
        outer = self.method.sharded_wire_bits(size, n_outer, self.outer)
        return outer + self._inner_bits(n_outer * size, self.inner), outer

    def _inner_bits(self, part: int, topology: Topology | None) -> int:
        """Bits of a scatter or gather of n_inner slices on the inner axis."""
        if self.inner is None:
            itemsize = self.method.native_dtype(jnp.float32).itemsize
            return (self.n_inner - 1) * part * 8 * itemsize
        return self.method.sharded_wire_bits(part, self.n_inner, topology)

    def outer_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends on the outer axes."""
        return self.method.wire_bits(self._slice(size), n_workers // self.n_inner, self.outer)

    def relative_error(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> float | None:
        """The error of all encodings, of both levels one after the other."""
        errors = [self.method.relative_error(*part) for part in self._parts(n_workers)]
        return None if None in errors else compounded(cast(list[float], errors))

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """The advice for all levels."""
        found = (self.method.advice(*part) for part in self._parts(n_workers))
        return " ".join(advice for advice in found if advice) or None

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `Method`; state and facts are those of the outer reduction, of all slices."""
        inner, outer, state = call.axis.inner, call.axis.outer, call.state
        seeds = [fold_seed(call.seed, i) for i in range(3)]
        part = self._slice(x.shape[0])
        pad = self.n_inner * part - x.shape[0]  # the last slice is filled up with zeros
        slices = (jnp.pad(x, (0, pad)) if pad else x).reshape(self.n_inner, part)

        mine = self._scatter_inside(slices, inner, seeds[0])
        if call.n_workers > self.n_inner:
            slice_seed = fold_seed(seeds[1], inner.index)
            across = call._replace(axis=outer, topology=self.outer, seed=slice_seed)
            mine, state, facts, _ = self.method.all_reduce(mine, across)
            if call.metrics:
                facts = jax.tree.map(inner.psum, facts)
            if self.inner is not None:
                facts = facts._replace(error=math.nan)  # the inner encodings err, too
        else:
            mine, facts = outer.psum(mine) / call.divisor, PayloadFacts()
        with jax.named_scope("dynamiq_inner_gather"):
            if self.inner is None:
                whole = inner.all_gather(mine, to="invarying")
            else:
                gather = Call(inner, None, seeds[2])
                whole = self.method.all_gather(mine, gather, invarying=True)
        return Outcome(whole.reshape(-1)[: x.shape[0]].astype(x.dtype), state, facts)

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """See `Method`; only 1/n_inner of ``x`` travels over the outer axes."""
        inner, outer = call.axis.inner, call.axis.outer
        # Row (o, i) travels to inner worker i, and from there over the outer axes to o.
        rows = x.reshape(-1, self.n_inner, x.shape[1]).swapaxes(0, 1)
        seeds = [
            fold_seed(fold_seed(call.seed, i), axis.index) for i, axis in enumerate((outer, inner))
        ]
        mine = self._scatter_inside(rows.reshape(self.n_inner, -1), inner, seeds[0])
        mine = mine.reshape(-1, x.shape[1]).astype(x.dtype)
        if call.n_workers == self.n_inner:
            return outer.psum_scatter(mine)
        across = Call(outer, self.outer, seeds[1])
        return self.method.reduce_scatter(mine, across)

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """See `Method`: over the outer axes first, with the bits of a gather over one."""
        return self.method.all_gather(x, _by_levels(call), invarying=invarying)

    def pack(self, x: Float[Array, " s"], call: Call) -> Any:
        """See `Method`."""
        return self.method.pack(x, _by_levels(call))

    def unpack(
        self, packed: Any, size: int, dtype: Any, call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """See `Method`: payloads travel over the outer axes first."""
        return self.method.unpack(packed, size, dtype, _by_levels(call), invarying=invarying)

    def _scatter_inside(self, rows: Float[Array, "n s"], inner: Axis, seed: Seed) -> Array:
        """The sum of ``rows`` over the inner axis: every worker gets the row of its number."""
        with jax.named_scope("dynamiq_inner_scatter"):
            if self.inner is None:
                return inner.psum_scatter(rows.astype(self.method.native_dtype(rows.dtype)))
            scatter = Call(inner, self.inner, seed)
            return self.method.reduce_scatter(rows, scatter)

    def _slice(self, size: int) -> int:
        """Coordinates of one inner worker's slice: 1/n_inner of all, rounded up to whole units."""
        return -(-size // (self.n_inner * UNIT)) * UNIT

    def _parts(self, n_workers: int) -> list[tuple[int, Topology, Collective]]:
        """The compressed collectives of an all-reduce: workers, topology and kind of each."""
        found: list[tuple[int, Topology, Collective]] = []
        if self.inner is not None:
            found.append((self.n_inner, self.inner, "reduce_scatter"))
            found.append((self.n_inner, self.inner, "all_gather"))
        if n_workers > self.n_inner:
            found.append((n_workers // self.n_inner, self.outer, "all_reduce"))
        return found


def _by_levels(call: Call) -> Call:
    """The call with an axis that gathers over the outer axes first."""
    return call._replace(axis=dataclasses.replace(call.axis, levels=True))
