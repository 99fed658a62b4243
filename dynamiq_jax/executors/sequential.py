"""Runs one chunk's part of a schedule on one device, worker after worker, however many there are.

What is alive is a partial sum and a payload for every worker on the way from the one at work to the
chunk's owner: one of each in a ring, log2 n in a butterfly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.topologies import Topology, steps_of
from dynamiq_jax.topologies.base import check_schedule, chunk_table, sink_slot

CodecOf = Callable[[Any, Array], ChunkCodec]
"""(arrays, worker) -> the codec of that worker's gradient, which has one chunk; hashable."""

SYNC_EVERY = 128
"""Workers after which the host waits for the device."""


class Tree(NamedTuple):
    """The in-tree of one chunk: every worker but the owner encodes and sends it once."""

    step: Int[np.ndarray, " n"]
    """When each worker sends; the owner never, -1."""
    stage: Int[np.ndarray, " n"]
    slot: Int[np.ndarray, " n"]
    to: Int[np.ndarray, " n"]
    """To whom; the owner to nobody, -1."""

    def order(self) -> list[int]:
        """All workers, each after all whose encodings it adds up, and these in order of steps."""
        senders: list[list[int]] = [[] for _ in self.to]
        for worker in np.argsort(self.step, stable=True).tolist():
            if self.to[worker] >= 0:
                senders[self.to[worker]].append(worker)
        left, found = [int(np.argmin(self.to))], []
        while left:
            found.append(left.pop())
            left += senders[found[-1]]
        return found[::-1]


def tree_of(topology: Topology, n_workers: int, owner: int = 0) -> Tree:
    """Who sends the owner's chunk when, to whom."""
    stages = topology.stages(n_workers)
    tree = Tree(*(np.full(n_workers, -1) for _ in Tree._fields))
    workers = np.arange(n_workers, dtype=np.int32)
    for number, step in enumerate(steps_of(topology.schedule(n_workers))):
        if step.to is None:
            senders, to = workers[workers != owner], np.full(n_workers, owner)
        else:
            sends = (chunk_table(step, n_workers) == owner).any(axis=1)
            senders, to = workers[sends], step.to(workers)
        for of, value in zip(tree, (number, step.stage, step.slot(workers), to), strict=True):
            of[senders] = np.broadcast_to(value, workers.shape)[senders]
    tree.stage[owner], tree.slot[owner] = len(stages) - 1, sink_slot(stages, owner)
    return tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Encoded:
    """The encoding of one worker."""

    stage: int = field(metadata={"static": True})
    slot: Array
    worker: Array
    payload: Payload = None

    def arrived(self) -> Arrived:
        """As the one payload that reached a worker."""
        payloads = jax.tree.map(lambda x: x[None], self.payload)
        return Arrived(payloads, Encoder(self.stage, self.slot[None], self.worker[None]))


def reduce_chunk(
    topology: Topology,
    n_workers: int,
    codec_of: CodecOf,
    arrays: Any,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Payload:
    """The payload of the finished sum of worker 0's chunk, with a leading axis of one chunk.

    ``codec_of`` is a static argument of compiled functions, and takes ``arrays``. ``progress`` is
    called with the number of workers that have encoded, and of all.
    """
    check_schedule(topology, n_workers)
    tree, payload = tree_of(topology, n_workers), None
    # By worker: its share plus what it has added so far, if anything, and what arrived last.
    waiting: dict[int, tuple[Array | None, _Encoded]] = {}
    for done, worker in enumerate(tree.order(), 1):
        total, last = waiting.pop(worker, (None, None))
        own = _Encoded(int(tree.stage[worker]), jnp.int32(tree.slot[worker]), jnp.int32(worker))
        payload = _encode(codec_of, arrays, own, total, last)
        if done % SYNC_EVERY == 0 or done == n_workers:
            jax.block_until_ready(payload)
            progress(done, n_workers)
        if (to := int(tree.to[worker])) >= 0:
            total, last = waiting.get(to, (None, None))
            total = last and _add(codec_of, arrays, jnp.int32(to), total, last)
            waiting[to] = total, replace(own, payload=payload)
    return payload


@partial(jax.jit, static_argnums=0)
def _encode(codec_of: CodecOf, arrays, own: _Encoded, total, last: _Encoded | None) -> Payload:
    codec, encoder = codec_of(arrays, own.worker), Encoder(own.stage, own.slot, own.worker)
    arrived = (last.arrived(),) if last else ()
    return codec.encode(arrived, jnp.zeros(1, jnp.int32), encoder, codec.carry, total)[0]


@partial(jax.jit, static_argnums=0)
def _add(codec_of: CodecOf, arrays, worker, total, last: _Encoded) -> Array:
    return codec_of(arrays, worker).add((last.arrived(),), jnp.zeros(1, jnp.int32), total)


@partial(jax.jit, static_argnums=(0, 1, 2))
def decode_chunk(codec_of: CodecOf, topology: Topology, n_workers: int, arrays, payload) -> Array:
    """Decodes `reduce_chunk`'s payload as every worker does, flat."""
    stages = topology.stages(n_workers)
    codec, owner = codec_of(arrays, jnp.int32(0)), jnp.zeros(1, jnp.int32)
    encoder = Encoder(len(stages) - 1, sink_slot(stages, owner), owner)
    return codec.decode(payload, owner, encoder, None, codec.carry)[0].reshape(-1)
