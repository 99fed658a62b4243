"""Runs one chunk's part of a schedule on one device, one worker after another.

Memory holds only the payloads between the current worker and the chunk's owner: one in a ring, at
most log2(n)² in a butterfly, n in a direct topology.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.schedules import chunk_table, sink_slot, steps_of

CodecOf = Callable[[Any, Array], ChunkCodec]
"""(arrays, worker) -> the codec of that worker's gradient, which has one chunk; hashable."""

SYNC_EVERY = 128
"""The number of workers after which the host waits for the device."""


class Tree(NamedTuple):
    """The in-tree of one chunk: every worker but the owner encodes and sends it once."""

    step: Int[np.ndarray, " n"]
    """The step in which each worker sends; -1 for the owner, which sends nothing."""
    stage: Int[np.ndarray, " n"]
    slot: Int[np.ndarray, " n"]
    to: Int[np.ndarray, " n"]
    """The worker to which it sends; -1 for the owner."""

    def order(self) -> list[int]:
        """All workers, each after the workers whose encodings it adds, in the order of steps."""
        senders: list[list[int]] = [[] for _ in self.to]
        for worker in np.argsort(self.step, kind="stable").tolist():
            if self.to[worker] >= 0:
                senders[self.to[worker]].append(worker)
        # From the owner, whose `to` is -1, depth first: receivers before senders. Then reversed.
        left, found = [int(np.argmin(self.to))], []
        while left:
            found.append(left.pop())
            left += senders[found[-1]]
        return found[::-1]


def tree_of(topology: Topology, n_workers: int, owner: int = 0) -> Tree:
    """The in-tree of the owner's chunk: who sends it, when, and to which worker."""
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
    # The owner encodes last, as the sink.
    tree.stage[owner], tree.slot[owner] = len(stages) - 1, sink_slot(stages, owner)
    return tree


def reduce_chunk(
    topology: Topology,
    n_workers: int,
    codec_of: CodecOf,
    arrays: Any,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Payload:
    """The payload of the finished sum of worker 0's chunk, with a leading axis of one chunk.

    ``codec_of`` is a static argument of compiled functions, and takes ``arrays``. ``progress`` is
    called with the number of workers that have encoded, and the number of all.
    """
    tree, payload = tree_of(topology, n_workers), None
    # For each worker with arrivals: the senders and payloads of every step.
    waiting: dict[int, dict[int, list[tuple[int, Payload]]]] = {}
    for done, worker in enumerate(tree.order(), 1):
        arrived = []
        for sent in waiting.pop(worker, {}).values():
            senders = np.array([sender for sender, _ in sent], np.int32)
            payloads = jax.tree.map(lambda *x: np.stack(x), *(x for _, x in sent))
            stage = int(tree.stage[senders[0]])
            arrived.append((stage, np.int32(tree.slot[senders]), senders, payloads))
        stages = int(tree.stage[worker]), *(stage for stage, *_ in arrived)
        own = np.int32(tree.slot[worker]), np.int32(worker)
        payload = _encode(codec_of, stages, arrays, own, [rest for _, *rest in arrived])
        if done % SYNC_EVERY == 0 or done == n_workers:
            jax.block_until_ready(payload)
            progress(done, n_workers)
        if (to := int(tree.to[worker])) >= 0:
            steps = waiting.setdefault(to, {})
            steps.setdefault(int(tree.step[worker]), []).append((worker, payload))
    return payload


@partial(jax.jit, static_argnums=(0, 1))
def _encode(codec_of: CodecOf, stages: tuple[int, ...], arrays, own, arrived) -> Payload:
    """The payload of worker ``own = (slot, worker)``; ``stages``: its own, then the arrivals'."""
    slot, worker = own
    inputs = tuple(
        Arrived(payloads, Encoder(stage, slots, senders))
        for stage, (slots, senders, payloads) in zip(stages[1:], arrived, strict=True)
    )
    codec, encoder = codec_of(arrays, worker), Encoder(stages[0], slot, worker)
    return codec.encode(inputs, jnp.zeros(1, jnp.int32), encoder, codec.lost)[0]


@partial(jax.jit, static_argnums=(0, 1, 2))
def decode_chunk(codec_of: CodecOf, topology: Topology, n_workers: int, arrays, payload) -> Array:
    """Decodes `reduce_chunk`'s payload as every worker does, flat."""
    stages = topology.stages(n_workers)
    codec, owner = codec_of(arrays, jnp.int32(0)), jnp.zeros(1, jnp.int32)
    encoder = Encoder(len(stages) - 1, sink_slot(stages, owner), owner)
    return codec.decode(payload, owner, encoder, None).reshape(-1)
