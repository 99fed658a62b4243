"""A method over two levels of axes: its one call becomes three."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis, Seed, fold_seed
from dynamiq_jax.methods.base import (
    Call,
    Collective,
    Method,
    Outcome,
    State,
    check_shards,
    compounded,
)
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import Bucket

UNIT = 1024
"""Coordinates that stay together in a slice: whole super-groups and blocks of every method."""


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

    def scatter_bits(self, size: int, n_workers: int, topology: Topology | None) -> tuple[int, int]:
        """See `Method`."""
        n_outer = n_workers // self.n_inner
        outer = self.method.sharded_wire_bits(size, n_outer, self.outer)
        return outer + self._inner_bits(n_outer * size, self.inner), outer

    def gather_bits(self, size: int, n_workers: int) -> tuple[int, int]:
        """See `Method`: a gather over the outer axes first has the bits of one over all."""
        sizes = n_workers, n_workers // self.n_inner
        sent, outer = (self.method.sharded_wire_bits(size, n, None) for n in sizes)
        return sent, outer

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
