"""Topologies: schedules of who encodes which chunk when, for whom. It moves nothing.

A *chunk* is reduced along an in-tree of workers that ends at its *owner*. Every worker encodes
every chunk once: its own share, plus all that has arrived for the chunk in earlier steps. Encodings
of other workers' chunks are sent on, and the owner's encoding of the finished sum, the *sink*, is
gathered by all. *Executors* (`dynamiq_jax.executors`) run schedules.

Encodings that share their bits and their plan of widths form a *stage*; the sinks are the last one.
A *slot* numbers the encodings of one chunk, so that a codec can correlate their rounding; every
(chunk, slot) is used at most once. The slot of a sink may depend on the owner (`sink_slot`).

Here, chunks have the numbers of their owners. With several *streams* each of them stands for as
many chunks that take the same way independently: the kernel of one runs under the transfer of
another.
"""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from dynamiq_jax.fields import Options, check_fields

Worker = Any
"""The number of a worker: an int, or an array of int32 (JAX's or NumPy's) of any shape."""


Transport = Literal["collectives", "permutes", "push"]
"""The mover of payloads. "collectives": all-to-all and all-gather where all workers send to all.
"permutes": one ppermute for every payload, which travels as soon as it is encoded; for links that
ppermutes use best (`dynamiq_jax.core.xla`). "push": kernels write into the memory of the other
GPUs. One does an all-reduce of one stream (`pallas_kernels.all_reduce`) if the codec has it; else
each exchange is one (`pallas_kernels.exchange`). They run on the stream of all other kernels, which
wait for them. Push takes one process, up to 8 GPUs from Hopper on, and steps from all to all alone;
nothing chooses it by itself."""


class Stage(NamedTuple):
    """Static facts of one stage of an all-reduce."""

    sent: int
    """Payloads that one worker sends in it, for one stream."""
    slots: range
    """The slots of one chunk's encodings; of the last stage those of all sinks."""
    error: float
    """The stage's share in the error at equal bits, where that of the sink is 1: the energy of all
    that is encoded of one chunk, for gradients that are unrelated between workers, halved since
    the rounding errors of paired encoders cancel in part."""


class Step(NamedTuple):
    """One exchange: every worker encodes chunks and sends the payloads."""

    stage: int
    """The stage of all its encodings."""
    chunks: Callable[[Worker], Any]
    """(worker) -> the owners of the k chunks that it encodes, int32[..., k] for int32[..., 1]."""
    slot: Callable[[Worker], Any]
    """(worker) -> the slot of its encodings."""
    to: Callable[[Worker], Worker] | None = None
    """(worker) -> who gets its k payloads: a permutation. `None`: every chunk's owner gets its own,
    where k = n and worker i owns the i-th; what a worker would send to itself is left out."""


class Rounds(NamedTuple):
    """Steps in a row that differ in numbers alone."""

    length: int
    """How many."""
    step: Callable[[Any], Step]
    """The step of a round, by its number: an int, in a loop an int32 scalar."""
    looped: bool = False
    """Whether they run as a loop, so that program size does not grow with their number. Then all
    that a worker receives in a round, and nothing else, goes into what it encodes in the next;
    stage and receivers are the same in all rounds."""


Schedule = tuple[Rounds, ...]
"""All steps of an all-reduce but for the gathering of the sinks."""


def permuted(schedule: Schedule, n_workers: int) -> Schedule:
    """The schedule with n - 1 permutations in the place of every step from all workers to all."""

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
    """The owners of the chunks that every worker encodes in a step, int32[n, k]."""
    chunks = step.chunks(np.arange(n_workers, dtype=np.int32)[:, None])
    return np.broadcast_to(chunks, (n_workers, chunks.shape[-1]))


MOST_CHECKED = 1024
"""Workers up to which `check_schedule` looks: its tables have their square."""


def check_schedule(topology: "Topology", n_workers: int) -> None:
    """Refuses a schedule unless it brings each worker's share of each chunk to its owner once."""
    steps = steps_of(topology.schedule(n_workers))
    if topology.transport == "push" and any(step.to is not None for step in steps):
        raise ValueError(
            f"{topology!r} sends from one worker to one other, and push kernels send to all; pass "
            'topology=dq.Direct(transport="push"), or transport="permutes"'
        )
    if n_workers <= MOST_CHECKED:
        gradients_in(topology, n_workers)


@functools.lru_cache(maxsize=64)
def gradients_in(topology: "Topology", n_workers: int) -> np.ndarray:
    """How many gradients each slot's encoding holds, by the owner of the chunk: int32[slots, n].

    What a worker would send to itself counts as none, and so does a sink, which nobody adds. It
    refuses what is sent twice or to oneself, and an owner that does not get all gradients.
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
    """The topology of the last axis; `None`: native collectives."""
    outer: "Topology"
    """The topology of all other workers."""
    n_inner: int
    """Workers on the inner level; 1 where there is no such level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(Options, ABC):
    """How chunks travel on one level. Subclasses are frozen dataclasses of static options.

    Attributes:
      streams: independent chunks per worker: kernels of one run under the transfers of another.
        Default: 2 from 2^25 coordinates on, 1 below.
      balance: bits per coordinate that the stages before the last get beyond the last one; the
        average is the method's ``bits`` in any case. `None`: as
        `dynamiq_jax.methods.dynamiq.allocation` shares them out.
      transport: see `dynamiq_jax.topologies.base.Transport`; `None`: chosen by
        `dynamiq_jax.topologies.choice`.
    """

    streams: int | None = None
    balance: float | None = None
    transport: Transport | None = None

    def __post_init__(self):
        """Refuses fields of a wrong type, less than one stream, and balances beyond 16 bits."""
        check_fields(self)
        if self.streams is not None and self.streams < 1:
            raise ValueError(f"streams={self.streams} must be at least 1")
        if self.balance is not None and not -16 <= self.balance <= 16:
            raise ValueError(
                f"balance={self.balance} must lie between -16 and 16 bits; pass None for what the "
                "method makes of its bits"
            )

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raises ValueError if it cannot serve that many workers."""

    @abstractmethod
    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The stages of an all-reduce; a reduce-scatter has all but the last."""

    def chunks_per_worker(self, size: int) -> int:
        """Into how many streams each worker's share of ``size`` coordinates is cut."""
        return self.streams_for(size, 2, 2**24)

    def streams_for(self, size: int, most: int, worth: int) -> int:
        """The streams that were passed; else one for ``worth`` coordinates each, up to ``most``."""
        if self.streams is not None:
            return min(self.streams, max(1, size))
        return min(most, max(1, size // worth))

    @abstractmethod
    def schedule(self, n_workers: int) -> Schedule:
        """Who sends what to whom until the owners have all that belongs to their sums."""

    # What `Hierarchical` has, too: sizes are those of the axes, the outermost first.

    def levels(self, sizes: tuple[int, ...]) -> Levels:
        """The levels on axes of these sizes: here one of all workers."""
        return Levels(None, self, 1)

    def on(self, sizes: tuple[int, ...]) -> Self:
        """The topology that serves axes of these sizes; raises ValueError if it cannot."""
        self.check(math.prod(sizes))
        return self

    def over(self, names: tuple[str, ...], axes: tuple[str, ...]) -> Self:
        """The topology for the axes ``names``, some of all ``axes``."""
        return self

    def with_transport(self, transport: Transport) -> Self:
        """The topology with its transport filled in where it says none."""
        return dataclasses.replace(self, transport=self.transport or transport)


def sink_slot(stages: tuple[Stage, ...], owner: Worker) -> Worker:
    """The slot of the sink of this worker's chunks: the owners take the last stage's in turn."""
    slots = stages[-1].slots
    return slots.start + owner % len(slots)


def n_slots(stages: tuple[Stage, ...]) -> int:
    """How many slots one chunk has."""
    return max(stage.slots.stop for stage in stages)
