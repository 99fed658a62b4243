"""Topologies: schedules that say which worker encodes which chunk, when, and for which worker.

A topology does not send data. A *chunk* is reduced along an in-tree of workers that ends at its
*owner*. Every worker encodes every chunk once: its own share, plus all payloads that arrived for
the chunk in earlier steps. Workers send on the encodings of other workers' chunks, and all workers
gather the owner's encoding of the finished sum, the *sink*. *Executors* (`dynamiq_jax.executors`)
run schedules.

Encodings that share their bits and their plan of widths form a *stage*; the last stage has the
sinks. A *slot* is the index of an encoding of one chunk, so that a codec can correlate their
rounding; every (chunk, slot) is used at most once. The slot of a sink may depend on the owner
(`sink_slot`).

Here, chunks have the indices of their owners. With several *streams* each index means that many
chunks. They take the same route independently, so that the kernels of one overlap with the
transfers of another.

`Topology` is what all have in common; `Direct`, `Ring` and `Butterfly` have one level,
`Hierarchical` has two.

**The choice** that `topology=None` makes (`automatic`), by a rule from facts that all workers
share:

1. All devices are in one process, or in one NVLink domain: `Direct`, for any number of workers.
2. Several axes have more than one worker: `Hierarchical`. Its outer topology is `Butterfly` if the
   number of hosts is a power of two, else `Ring`, or `Direct` for more than `MANY` hosts
   (`across_hosts`).
3. There is one axis: `Butterfly` if its number of workers is a power of two, else `Ring`. If the
   axis numbers its workers host by host, both keep the traffic between hosts as low as a hierarchy
   would. `Direct` would send all gradients of a host to other hosts.

`explain` may be asked about more workers than JAX has devices. JAX's devices give no information
about these workers, so rules 2 and 3 apply, and `assumed` says so.

The transport that `transport=None` chooses: "permutes" for up to `COPYING` workers if copy engines
execute ppermutes (`topologies.links`), else "collectives". A sum over NVLink that is not beside
other work is "push" if its size is between the limits of `dynamiq_jax.methods.dynamiq.crossover`,
and the mesh has its devices in their order (`dynamiq_jax.core.axis`).
"""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dynamiq_jax.core.checks import Options, check_fields
from dynamiq_jax.topologies.links import (
    TRANSPORTS,
    Transport,
    TransportName,
    between_hosts,
    copy_engines,
    in_one_domain,
)

# --- All topologies -------------------------------------------------------------------------------


Worker = Any
"""The index of a worker: an int, or an array of int32 (JAX's or NumPy's) of any shape."""


class Stage(NamedTuple):
    """Static facts of one stage of an all-reduce."""

    sent: int
    """The number of payloads that one worker sends in this stage, for one stream."""
    slots: range
    """The slots of one chunk's encodings; in the last stage, the slots of all sinks."""
    error: float
    """The stage's share of the error at equal bits, relative to the sink's, which is 1: the energy
    of all encoded values of one chunk, for gradients that are independent between workers, halved
    since the rounding errors of paired encoders partly cancel."""


class Step(NamedTuple):
    """One exchange: every worker encodes some chunks and sends the payloads."""

    stage: int
    """The stage of all its encodings."""
    chunks: Callable[[Worker], Any]
    """(worker) -> the owners of the k chunks that it encodes, int32[..., k] for int32[..., 1]."""
    slot: Callable[[Worker], Any]
    """(worker) -> the slot of its encodings."""
    to: Callable[[Worker], Worker] | None = None
    """(worker) -> the worker that gets its k payloads: a permutation. `None`: every chunk is sent
    to its owner, where k = n and worker i owns chunk i; a worker does not send to itself."""


class Rounds(NamedTuple):
    """Successive steps that differ only in their numbers."""

    length: int
    """The number of steps."""
    step: Callable[[Any], Step]
    """(round) -> its step; the round is an int, or an int32 scalar in a loop."""
    looped: bool = False
    """Whether the steps run as a loop, so that program size does not grow with their number. Then
    the encodings of a round include all payloads of the previous round, and no others; stage and
    receivers are the same in all rounds."""


Schedule = tuple[Rounds, ...]
"""All steps of an all-reduce, except that the sinks are gathered."""


def permuted(schedule: Schedule, n_workers: int) -> Schedule:
    """The schedule with n - 1 permutations instead of every step in which all send to all."""

    def shift(step: Step, by: int) -> Rounds:
        one = np.full(1, by, np.int32)
        way = {"chunks": lambda w: (w + one) % n_workers, "to": lambda w: (w + by) % n_workers}
        return Rounds(1, lambda _: step._replace(**way))

    found: list[Rounds] = []
    for rounds in schedule:
        if rounds.step(0).to is not None:
            found.append(rounds)
            continue
        for step in steps_of((rounds,)):
            found += [shift(step, by) for by in range(1, n_workers)]
    return tuple(found)


def steps_of(schedule: Schedule) -> Iterator[Step]:
    """The steps of a schedule, one after the other."""
    return (rounds.step(i) for rounds in schedule for i in range(rounds.length))


def chunk_table(step: Step, n_workers: int) -> np.ndarray:
    """The owners of the chunks that each worker encodes in a step, int32[n, k]."""
    chunks = step.chunks(np.arange(n_workers, dtype=np.int32)[:, None])
    return np.broadcast_to(chunks, (n_workers, chunks.shape[-1]))


MOST_CHECKED = 1024
"""The most workers for which `check_schedule` checks: its tables grow with their square."""


def check_schedule(topology: "Topology", n_workers: int) -> None:
    """Refuses a schedule unless it sends each worker's share of each chunk to the owner once."""
    steps = steps_of(topology.schedule(n_workers))
    if not topology.sends.to_one and any(step.to is not None for step in steps):
        raise ValueError(
            f"{topology!r} sends from one worker to one other, and push kernels send to all; pass "
            'topology=dq.Direct(transport="push"), or transport="permutes"'
        )
    if n_workers <= MOST_CHECKED:
        gradients_in(topology, n_workers)


@functools.lru_cache(maxsize=64)
def gradients_in(topology: "Topology", n_workers: int) -> np.ndarray:
    """The number of gradients in each slot's encoding, by the owner of the chunk: int32[slots, n].

    A payload that a worker would send to itself counts as 0 gradients, and so does a sink, which is
    not added to anything. The function refuses a schedule that sends a chunk twice or to the
    sender, and one whose owners do not get all gradients.
    """
    found = np.zeros((n_slots(topology.stages(n_workers)), n_workers), np.int32)
    workers = np.arange(n_workers, dtype=np.int32)[:, None]
    # By worker and chunk: how many gradients it would encode now; none once it has sent them.
    held = np.ones((n_workers, n_workers), np.int32)
    for number, step in enumerate(steps_of(topology.schedule(n_workers))):
        chunks = chunk_table(step, n_workers)
        to = chunks if step.to is None else np.broadcast_to(step.to(workers), chunks.shape)
        moves = to != workers  # all but what a worker would send to itself
        sent = np.take_along_axis(held, chunks, axis=1)
        wrong = moves & ((sent == 0) | (chunks == workers)) | ~moves & (step.to is not None)
        if wrong.any():
            worker, at = np.argwhere(wrong)[0]
            raise ValueError(
                f"{topology!r}: in step {number} worker {worker} of {n_workers} encodes chunk "
                f"{chunks[worker, at]} for worker {to[worker, at]}: its own, one that it has sent "
                "before, or for itself; its schedule has to send every other worker's chunk once"
            )
        slots = np.broadcast_to(step.slot(workers), chunks.shape)
        found[slots[moves], chunks[moves]] = sent[moves]
        np.put_along_axis(held, chunks, np.where(moves, 0, sent), axis=1)
        np.add.at(held, (to[moves], chunks[moves]), sent[moves])
    if (wrong := np.flatnonzero(np.diag(held) != n_workers)).size:
        raise ValueError(
            f"{topology!r}: the owner of chunk {wrong[0]} gets {held[wrong[0], wrong[0]]} of "
            f"{n_workers} gradients; its schedule has to send every other worker's chunk, and "
            "after all that arrives for it"
        )
    return found


class Levels(NamedTuple):
    """The topologies of the two levels of a reduction."""

    inner: "Topology | None"
    """The topology of the last axis; `None` means native collectives."""
    outer: "Topology"
    """The topology of all other workers."""
    n_inner: int
    """The number of workers on the inner level; 1 if there is no such level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(Options, ABC):
    """The route of chunks on one level. Subclasses are frozen dataclasses of static options.

    Attributes:
      streams: independent chunks per worker; kernels of one overlap with the transfers of another.
        Default: 2 from 2^25 coordinates on, 1 below.
      balance: the additional bits per coordinate that the stages before the last get, compared with
        the last stage; the average is always the method's ``bits``. `None`:
        `dynamiq_jax.methods.dynamiq.layout` distributes the bits.
      transport: see `dynamiq_jax.topologies.links`; `None`: chosen by
        `dynamiq_jax.topologies.schedules`.
    """

    streams: int | None = None
    balance: float | None = None
    transport: TransportName | None = None

    def __post_init__(self):
        """Refuses fields of a wrong type, fewer than one stream, and balances beyond 16 bits."""
        check_fields(self)
        if self.streams is not None and self.streams < 1:
            raise ValueError(f"streams={self.streams} must be at least 1")
        if self.balance is not None and not -16 <= self.balance <= 16:
            raise ValueError(
                f"balance={self.balance} must lie between -16 and 16 bits; pass None for what the "
                "method makes of its bits"
            )

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raises ValueError if the topology does not support this number of workers."""

    @abstractmethod
    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The stages of an all-reduce; a reduce-scatter has all stages but the last."""

    def chunks_per_worker(self, size: int) -> int:
        """The number of streams into which each worker's share of ``size`` coordinates is cut."""
        return self.streams_for(size, 2, 2**24)

    def streams_for(self, size: int, most: int, worth: int) -> int:
        """The option `streams`; by default one for every ``worth`` coordinates, up to ``most``."""
        if self.streams is not None:
            return min(self.streams, max(1, size))
        return min(most, max(1, size // worth))

    @abstractmethod
    def schedule(self, n_workers: int) -> Schedule:
        """The steps after which the owners have received all terms of their sums."""

    # `Hierarchical` has these methods, too: sizes are those of the axes, the outermost first.

    def levels(self, sizes: tuple[int, ...]) -> Levels:
        """The levels on axes of these sizes: here one level with all workers."""
        return Levels(None, self, 1)

    def on(self, sizes: tuple[int, ...]) -> Self:
        """The topology for axes of these sizes; raises ValueError if it does not support them."""
        self.check(math.prod(sizes))
        return self

    def over(self, names: tuple[str, ...], axes: tuple[str, ...]) -> Self:
        """The topology for the axes ``names``, a subset of all ``axes``."""
        return self

    @property
    def sends(self) -> Transport:
        """How payloads travel: the option `transport`, by default XLA's collectives."""
        return TRANSPORTS[self.transport or "collectives"]

    def with_transport(self, transport: TransportName) -> Self:
        """The topology with this transport, unless it names another one."""
        return dataclasses.replace(self, transport=self.transport or transport)


def sink_slot(stages: tuple[Stage, ...], owner: Worker) -> Worker:
    """The slot of the sink of this worker's chunks: owners use the last stage's slots in turn."""
    slots = stages[-1].slots
    return slots.start + owner % len(slots)


def n_slots(stages: tuple[Stage, ...]) -> int:
    """The number of slots of one chunk."""
    return max(stage.slots.stop for stage in stages)


# --- Direct ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct(Topology):
    """All-to-all topology: one encoding of each gradient, one of each sum; any number of workers.

    Attributes:
      streams: independent chunks per worker. Default: one for every 2^26 coordinates, up to 4.
        Permutes send more messages for a chunk, so their default is one for every 2^27, up to 2.
        Push kernels do not overlap with other work, so their default is one.
      balance: this and all other fields are as in `dynamiq_jax.topologies.Topology`.
    """

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The all-to-all and the all-gather.

        The slot of every worker is its index. The owner does not send its own chunk, so the sink
        uses this slot. Every encoding then has a partner, except one if their number is odd.
        """
        n = n_workers
        return Stage(n - 1, range(n), (n - 1) / (2 * n)), Stage(n - 1, range(n), 1.0)

    def chunks_per_worker(self, size: int) -> int:
        """The option `streams`, or the default that the class documents."""
        return self.streams_for(size, *self.sends.streams)

    def schedule(self, n_workers: int) -> Schedule:
        """One step."""
        everyone = np.arange(n_workers, dtype=np.int32)
        return (Rounds(1, lambda _: Step(0, lambda w: everyone, slot=lambda w: w)),)


# --- Ring -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Ring topology: n-1 re-compressions per chunk; any number of workers, neighbours only.

    Attributes:
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
      streams: this and all other fields are as in `dynamiq_jax.topologies.Topology`.
    """

    unroll_up_to: int = 16

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The hops, whose partial sums hold 1, ..., n-1 gradients, and the all-gather."""
        n = n_workers
        return Stage(n - 1, range(n - 1), (n - 1) / 4), Stage(n - 1, range(n - 1, n), 1.0)

    def schedule(self, n_workers: int) -> Schedule:
        """n-1 hops."""
        n, one = n_workers, np.zeros(1, np.int32)

        def hop(t):  # worker w passes on the chunk that began at w - t, whose owner is w - t - 1
            chunks, right = lambda w: (w - 1 - t) % n + one, lambda w: (w + 1) % n
            return Step(0, chunks, slot=lambda w: t, to=right)

        return (Rounds(n - 1, hop, looped=n > self.unroll_up_to),)


# --- Butterfly ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Butterfly(Topology):
    """Recursive halving: log2 n re-compressions per chunk; n must be a power of two.

    It has the attributes of `dynamiq_jax.topologies.Topology`.
    """

    def check(self, n_workers: int) -> None:
        """Refuses a number of workers that is not a power of two."""
        if n_workers & (n_workers - 1):
            raise ValueError(
                f"topology=Butterfly() needs a power of two of workers, and the axis has "
                f"{n_workers}; pass dq.Ring() or dq.Direct(), which take any number"
            )

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """One stage per round, whose encodings hold 2^round gradients each, and the all-gather.

        Siblings in a chunk's tree have neighbouring slots; so do the last encoding and the sink.
        """
        stages, first, encoders = [], 0, n_workers // 2
        while encoders:
            stages.append(Stage(encoders, range(first, first + encoders), 0.25))
            first, encoders = first + encoders, encoders // 2
        return (*stages, Stage(n_workers - 1, range(first, first + 1), 1.0))

    def schedule(self, n_workers: int) -> Schedule:
        """One round for every bit of the workers' indices."""
        stages = self.stages(n_workers)

        def step(level: int) -> Step:
            bit = 1 << level
            pairs = 2 * np.arange(n_workers // (2 * bit), dtype=np.int32)

            # Owners have the low bits of w, but the partner's bit ``level``, 1 - w // bit % 2. The
            # # higher bits take all values, given by ``pairs``.
            def chunks(w):
                return w % bit + bit * (pairs + 1 - w // bit % 2)

            first = stages[level].slots.start
            return Step(level, chunks, slot=lambda w: first + w // (2 * bit), to=lambda w: w ^ bit)

        return (Rounds(len(stages) - 1, step),)


# --- Hierarchical ---------------------------------------------------------------------------------


MANY = 8
"""The number of workers beyond which payloads are too small to be sent one after the other.

A message costs about 15 µs between GPUs of one process; for networks this is
an assumption. The largest default bucket of f32 gradients takes 42 MB at 5 bits, 57 MB on fast
links. Among 8 workers one payload then takes 17 µs at NVLink's 430 GB/s. Among 8 hosts of 8 GPUs it
takes 13 µs at 400 Gb/s for each GPU. With more workers the messages take longer than the bytes.
"""


def across_hosts(n_hosts: int) -> Topology:
    """The default topology between hosts, for one worker a host or the outer level.

    All topologies send the same number of bytes there. A ring's hops wait for each other, and its
    error grows with their number.
    """
    if n_hosts & (n_hosts - 1) == 0:
        return Butterfly()
    return Ring() if n_hosts <= MANY else Direct()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchical(Options):
    """Two levels, for a tuple of axes: the last axis is inner, all others are outer.

    First the gradient is reduce-scattered over the inner axis, so that each of its workers has one
    slice. Then the slices are all-reduced over the outer axes, compressed. Last, the results are
    gathered over the inner axis. Only 1/n_inner of the gradient crosses the outer links. A
    `psum_scatter` ends after the scatter over the outer axes; an `all_gather` sends its payloads
    over the outer axes first.

    Attributes:
      inner: the topology over the inner axis. `None` means native collectives, for links on which
        compression does not pay, in bf16 (f16 gradients in f16; with the methods `BF16` and `F32`,
        all gradients in that dtype). A topology also compresses there, at the cost of two more
        encodings.
      outer: the topology over the outer axes. `None` chooses `Butterfly` for powers of two, else
        `Ring`, or `Direct` for more than 8 workers.
    """

    inner: Topology | None = None
    outer: Topology | None = None

    def __post_init__(self):
        """Refuses nested hierarchies and objects that are not topologies."""
        for name, value in (("inner", self.inner), ("outer", self.outer)):
            if value is not None and not isinstance(value, Topology):
                raise ValueError(
                    f"{name}={value!r} is not a topology of one level; pass for example dq.Ring()"
                )

    def levels(self, sizes: tuple[int, ...]) -> Levels:
        """The last axis is the inner level; the other axes are the outer level."""
        outer = self.outer or across_hosts(math.prod(sizes[:-1]))
        return Levels(self.inner, outer, sizes[-1])

    def on(self, sizes: tuple[int, ...]) -> "AnyTopology":
        """The hierarchy with its outer topology chosen; only that topology if n_inner is 1."""
        if len(sizes) < 2:
            raise ValueError(
                f"topology=Hierarchical() needs two axes and got {len(sizes)}; pass "
                "axis_name=('node', 'gpu'), the axis of the fast links last"
            )
        outer = self.levels(sizes).outer
        return outer.on(sizes) if sizes[-1] == 1 else dataclasses.replace(self, outer=outer)

    def over(self, names: tuple[str, ...], axes: tuple[str, ...]) -> "AnyTopology | None":
        """The topology of one level, or the hierarchy over the inner axis and some outer axes."""
        if names == axes[-1:]:
            return self.inner
        return self if names[-1:] == axes[-1:] else self.outer

    def with_transport(self, transport: TransportName) -> "Hierarchical":
        """The hierarchy with this transport on both levels, unless a level names another one."""
        inner, outer = (
            level and level.with_transport(transport) for level in (self.inner, self.outer)
        )
        return Hierarchical(inner=inner, outer=outer)


AnyTopology = Topology | Hierarchical
"""A topology with one level or two, as a caller passes it."""


# --- The choice of topology and transport ---------------------------------------------------------


COPYING = 4
"""The largest number of workers for which copy engines send payloads. A sum of 32 MiB takes 377 µs
with the 6 copies of four H200, and 1608 with the 14 of eight (`benchmarks/crossover.py`, JAX
0.11.2)."""


def assumed(sizes: tuple[int, ...]) -> str | None:
    """Assumptions of `explain` about more workers than JAX has devices, in words, else `None`."""
    n, here = math.prod(sizes), jax.device_count()
    if n <= here:
        return None
    several = sum(size > 1 for size in sizes) > 1
    hosts = f"{n // sizes[-1]} hosts of {sizes[-1]} workers" if several else "several hosts"
    return (
        f"assumed, as {n} workers are more than the devices here ({here}): {hosts}, with links "
        "between them that are slower than NVLink"
    )


def automatic(sizes: tuple[int, ...], *, here: bool = True) -> tuple[AnyTopology, str]:
    """The topology for axes of these sizes, and the reason; ``here``: they are of JAX's devices."""
    if here and in_one_domain():
        domain = "all devices are in one process or NVLink domain"
        return Direct(), f"{domain}, where Direct errs least"
    n = math.prod(sizes)
    if sum(size > 1 for size in sizes) > 1:
        hosts = n // sizes[-1]
        outer = across_hosts(hosts)
        reason = "several axes, whose last one has fast links"
        if outer == Direct():
            reason += f"; {hosts} hosts are too many for a ring"
        return Hierarchical(outer=outer), reason
    some = f"{n} workers on several hosts"
    if n & (n - 1) == 0:
        return Butterfly(), f"{some} are a power of two"
    remedy = "; two axes, hosts first, would take fewer hops and err less" if n > MANY else ""
    return Ring(), f"{some} are not a power of two{remedy}"


def with_transport(
    topology: AnyTopology,
    transport: TransportName | None = None,
    *,
    n_workers: int,
    here: bool = True,
) -> tuple[AnyTopology, str | None]:
    """Chooses the transport of a topology, on both levels.

    Copy engines are considered only if the workers are JAX's devices (``here``). Returns the
    topology, and a note on its transfers: why copy engines are used, or that transfers start early.
    """
    engines = copy_engines() if here and transport is None else None
    if engines is None:
        note = between_hosts() if here else None
        return topology.with_transport(transport or "collectives"), note
    if n_workers > COPYING:
        why = f"{n_workers} workers are more than {COPYING}, and each of n - 1 copies takes longer"
        return topology.with_transport("collectives"), f"by collectives, since {why}"
    return topology.with_transport("permutes"), f"by copy engines, since {engines}"
