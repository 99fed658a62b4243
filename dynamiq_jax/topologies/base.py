"""What a topology and a codec know of each other: opaque payloads, numbered stages and slots.

A *chunk* is reduced along an in-tree of workers that ends at its owner, the *sink*. Worker c owns
the chunks c * streams, ..., c * streams + streams - 1. All encodings at the same depth of these
trees form a *stage*; the last stage is the sinks' encoding of the finished sums for the
all-gather. A *slot* numbers the encodings of one chunk, so that a codec can correlate their
rounding; every (chunk, slot) is used at most once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._compat import AxisNames, all_gather_invarying

Payload = Any
"""A pytree of arrays with static shapes; leading axes as said where it is used."""


class Stage(NamedTuple):
    """Static facts of one stage of an all-reduce."""

    sent: int
    """Payloads that one worker sends in it, for one stream."""
    slots: range
    """The slots of one chunk's encodings."""
    error: float
    """The stage's share in the error at equal bits, where that of the sink is 1: the energy of all
    that is encoded of one chunk, for gradients that are unrelated between workers, halved since
    the rounding errors of paired encoders cancel in part."""


class Arrived(NamedTuple):
    """Payloads that reached a worker and are not yet decoded."""

    payloads: Payload
    """Leading axes [k, c]: k to be added up for each of c chunks."""
    stage: int
    """The stage that encoded them."""
    skip: Array | None = None
    """One of the k to leave out, if any: int32 scalar."""


class ChunkOps(NamedTuple):
    """What a codec can do with one worker's gradient."""

    encode: Callable[..., Payload]
    """(arrived, chunks int32[c], stage, slot, skip=None) -> payloads with a leading axis [c]: this
    worker's own share of each chunk plus all that arrived for it, as ``stage`` encodes. Where
    nothing arrived, ``skip`` (int32) may be the one of the c that nobody needs."""
    decode: Callable[[Payload, Array, Array | None], Array]
    """(payloads [c] of the last stage, chunks int32[c], result so far) -> result with these
    chunks' finished sums in it."""
    finish: Callable[[tuple[Arrived, ...], Array, Array | None], Array]
    """(arrived, chunks int32[1], result so far) -> this worker's slice of the result with the
    chunk's finished sum in it, exact: not encoded again."""


class Topology(Protocol):
    """How chunks travel. Implementations are frozen dataclasses of static options."""

    @property
    def balance(self) -> float | None:
        """Bits per coordinate that the stages before the last get beyond the last one.

        `None`: as `dynamiq_jax.allocation` shares them out. The average is the method's ``bits`` in
        any case.
        """
        ...

    def check(self, n_workers: int) -> None:
        """Raises ValueError if it cannot serve that many workers."""
        ...

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The stages of an all-reduce; a reduce-scatter has all but the last."""
        ...

    def chunks_per_worker(self, size: int) -> int:
        """Into how many chunks each worker's share of ``size`` coordinates is cut."""
        ...

    def reduce(
        self, ops: ChunkOps, axis_name: AxisNames, n_workers: int, streams: int
    ) -> list[tuple[Arrived, ...]]:
        """Brings to every worker, for each chunk it owns, all that is to be added to its own."""
        ...


def streams_for(size: int, streams: int, stream_size: int) -> int:
    """One stream for every ``stream_size`` coordinates, at least one and at most ``streams``."""
    return min(streams, max(1, size // max(stream_size, 1)))


def n_slots(stages: tuple[Stage, ...]) -> int:
    """How many slots one chunk has."""
    return max(stage.slots.stop for stage in stages)


def all_reduce(
    topology: Topology, ops: ChunkOps, axis_name: AxisNames, n_workers: int, streams: int
) -> Array:
    """Reduces every chunk; each owner encodes its sums once and everyone, itself too, decodes."""
    stages = topology.stages(n_workers)
    mine = lax.axis_index(axis_name) * streams
    owners = jnp.arange(n_workers, dtype=jnp.int32) * streams
    arrived = topology.reduce(ops, axis_name, n_workers, streams)
    result = None
    for i, inputs in enumerate(arrived):
        payload = ops.encode(inputs, (mine + i)[None], len(stages) - 1, stages[-1].slots.start)
        payload = jax.tree.map(lambda x: x[0], payload)
        result = ops.decode(all_gather_invarying(payload, axis_name), owners + i, result)
    assert result is not None
    return result


def reduce_scatter(
    topology: Topology, ops: ChunkOps, axis_name: AxisNames, n_workers: int, streams: int
) -> Array:
    """Reduces every chunk; each owner decodes its sums."""
    mine = lax.axis_index(axis_name) * streams
    result = None
    for i, inputs in enumerate(topology.reduce(ops, axis_name, n_workers, streams)):
        result = ops.finish(inputs, (mine + i)[None], result)
    assert result is not None
    return result


def check_balance(balance: float | None) -> None:
    """Refuses a balance that is not a finite number of bits."""
    if balance is not None and not -16 <= balance <= 16:
        raise ValueError(
            f"balance={balance} must lie between -16 and 16 bits; pass None for what the method "
            "makes of its bits"
        )
