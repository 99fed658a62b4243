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
"""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from dynamiq_jax.core.checks import Options, check_fields
from dynamiq_jax.topologies.transports import TRANSPORTS, Transport, TransportName

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
        `dynamiq_jax.methods.dynamiq.allocation` distributes the bits.
      transport: see `dynamiq_jax.topologies.transports`; `None`: chosen by
        `dynamiq_jax.topologies.choice`.
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
