"""One simulation, and a row of vNMSE for a topology, a method and a number of bits."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.commands.simulate.gradients import SUPER_GROUP, mixture_source, to_bf16
from dynamiq_jax.commands.simulate.survey import Given, Progress, Workers, shared_by_all, survey
from dynamiq_jax.comparators import MXFP8
from dynamiq_jax.executors.sequential import decode_chunk, reduce_chunk
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.hops import Bound, HopMethod
from dynamiq_jax.methods.plain import ChunkLayout
from dynamiq_jax.topologies import AnyTopology, Topology
from dynamiq_jax.topologies.base import Levels
from pallas_kernels import resolve_backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One simulated all-reduce.

    Attributes:
      n_workers: how many reduce.
      super_groups: super-groups of 256 coordinates in each worker's gradient.
      method: what encodes.
      topology: how payloads travel, in one stream whatever its ``streams``.
      n_inner: only with `Hierarchical`: workers on the inner axis, summed natively in bf16.
    """

    n_workers: int
    super_groups: int
    method: HopMethod
    topology: AnyTopology
    n_inner: int = 8

    def __post_init__(self):
        """Refuses what the topology or the simulator cannot do."""
        if self.super_groups < 1 or self.n_inner < 1:
            raise ValueError(
                f"super_groups={self.super_groups} and n_inner={self.n_inner} must be at least 1"
            )
        if self.n_outer < 2 or self.n_outer * self.inner_workers != self.n_workers:
            raise ValueError(
                f"n_inner={self.inner_workers}: {self.n_workers} workers are not two or more sets "
                f"of {self.inner_workers}; pass more workers, or a divisor of theirs"
            )
        method = self.method
        if isinstance(method, DynamiQ) and method.format.super_group_size != SUPER_GROUP:
            raise ValueError(
                f"super_group_size={method.format.super_group_size}, but magnitudes are drawn for "
                f"super-groups of {SUPER_GROUP}; pass super_group_size={SUPER_GROUP}"
            )
        if self._levels.inner is not None:
            raise NotImplementedError(
                f"inner={self._levels.inner!r}: only a native inner axis is simulated; "
                "pass inner=None"
            )
        if method.needs_state:
            raise NotImplementedError(
                f"method={method!r}: one step is simulated, in which memory is empty; pass a "
                "method without a state, as the one that dq.ErrorFeedback is around"
            )
        self.outer.check(self.n_outer)

    @property
    def _levels(self) -> Levels:
        return self.topology.levels((self.n_workers // self.n_inner, self.n_inner))

    @property
    def inner_workers(self) -> int:
        """Workers that are summed natively; without a hierarchy 1."""
        return self._levels.n_inner

    @property
    def n_outer(self) -> int:
        """Workers of the compressed all-reduce."""
        return self.n_workers // self.inner_workers

    @property
    def outer(self) -> Topology:
        """The topology of the compressed all-reduce."""
        found: Any = self._levels.outer
        return dataclasses.replace(found, streams=1) if hasattr(found, "streams") else found

    @property
    def bits(self) -> float:
        """Bits on the wire per coordinate; of a hierarchy on its outer axis."""
        if isinstance(self.method, DynamiQ):
            return self.method.bits
        n, size = self.n_outer, self.n_outer * self.super_groups * SUPER_GROUP
        sent = self.method.wire_bits(size, n, self.outer)
        return round(sent / (2 * (n - 1) / n * size), 2)

    def workers(self) -> Workers:
        """The static facts of the workers."""
        n, size, outer = self.n_outer, self.super_groups * SUPER_GROUP, self.outer
        whole = self.method.bind(n * size, n, outer)
        return Workers(self.method, one_chunk(whole, size), self.inner_workers)


class _OneChunk(Layout):
    """A layout of a single chunk that all ``n_workers`` add to."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


def one_chunk(whole: Bound, size: int) -> Bound:
    """Sizes for one chunk of ``size`` coordinates, as the n chunks of ``whole`` have them.

    So every stage has the bits that the library gives it, with no padding but that of one chunk.
    """
    layout = whole.layout
    assert layout.chunks_per_worker == 1
    if isinstance(layout, Layout):
        names = (field.name for field in dataclasses.fields(layout))
        sizes: dict[str, Any] = {name: getattr(layout, name) for name in names}
        sizes["size"] = size
        return whole._replace(layout=_OneChunk(**sizes))
    chunk = layout.chunk_size
    own = ChunkLayout(size=size, n_workers=1, chunks_per_worker=1, chunk_size=chunk)
    return whole._replace(layout=own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A row of the study.

    Attributes:
      workers: how many reduce.
      super_groups: of 256 coordinates, in each worker's gradient.
      topology: its name, of a hierarchy with its inner workers.
      method: "dynamiq", "mxfp8" (shared scales) or "mxfp8-own".
      bits: on the wire per coordinate; of a hierarchy on its outer axis.
      widths: DynamiQ's widths.
      vnmse: mean over seeds of |estimate - sum|² / |sum|².
      lowest: the least of them.
      highest: the largest of them.
      seeds: how many.
      seconds: for all seeds, compilation included.
      backend: which kernels ran.
    """

    workers: int
    super_groups: int
    topology: str
    method: str
    bits: float
    widths: tuple[int, ...]
    vnmse: float
    lowest: float
    highest: float
    seeds: int
    seconds: float
    backend: str


def _silent(loop: str, done: int, of: int) -> None:
    pass


def simulate(case: Case, key: Array, progress: Progress = _silent) -> float:
    """The vNMSE of one all-reduce, |estimate - sum|² / |sum|².

    Args:
      case: what is simulated.
      key: magnitudes, gradients and rounding follow from it.
      progress: called now and then.
    """
    workers, outer, n = case.workers(), case.outer, case.n_outer
    data_key, seed_key = jax.random.split(key)
    source = mixture_source(data_key, case.super_groups)
    totals = survey(workers, source, progress)
    seed = jax.random.bits(seed_key, (2,), jnp.uint32)
    given = Given(source, shared_by_all(workers, totals.high, totals.message, seed))

    def encoded(done: int, of: int) -> None:
        progress("hops", done, of)

    payload = reduce_chunk(outer, n, workers, given, encoded)
    estimate = decode_chunk(workers, outer, n, given, payload)
    if workers.n_inner > 1:
        estimate = to_bf16(estimate)  # as the inner axis gathers it
    exact = np.asarray(totals.high, np.float64) + np.asarray(totals.low, np.float64)
    error = np.asarray(estimate, np.float64) - exact
    return float(np.sum(error**2) / np.sum(exact**2))


def _widths(case: Case) -> tuple[int, ...]:
    if not isinstance(case.method, DynamiQ):
        return ()
    return case.method.allocation(case.n_outer, case.outer).fmt.widths


def study(case: Case, seeds: Sequence[int], progress: Progress = _silent) -> Result:
    """`simulate` for every seed."""
    begin = time.perf_counter()
    found = [simulate(case, jax.random.key(seed), progress) for seed in seeds]
    method = case.method
    ours = isinstance(method, DynamiQ)
    name = type(method).__name__.lower()
    if isinstance(method, MXFP8) and method.sum == "recompress":
        name += "-own"
    route = type(case.topology).__name__.lower()
    return Result(
        workers=case.n_workers,
        super_groups=case.super_groups,
        topology=route if case.inner_workers == 1 else f"{route}, {case.inner_workers} inner",
        method=name,
        bits=case.bits,
        widths=_widths(case),
        vnmse=float(np.mean(found)),
        lowest=min(found),
        highest=max(found),
        seeds=len(found),
        seconds=time.perf_counter() - begin,
        backend=resolve_backend(method.backend) if ours else "xla",
    )
