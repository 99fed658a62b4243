"""Runs one chunk's part of a schedule on one device, worker after worker, however many there are.

What is alive is a partial sum and a payload for every worker on the way from the one at work to the
chunk's owner: one of each in a ring, log2 n in a butterfly.
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
from dynamiq_jax.topologies import Topology, steps_of
from dynamiq_jax.topologies.base import chunk_table, sink_slot

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

    def senders(self) -> list[list[int]]:
        """For every worker those who send to it, in the order in which they are added up."""
        found: list[list[int]] = [[] for _ in self.to]
        for worker in np.lexsort((np.arange(len(self.to)), self.step)).tolist():
            if self.to[worker] >= 0:
                found[self.to[worker]].append(worker)
        return found


def tree_of(topology: Topology, n_workers: int, owner: int = 0) -> Tree:
    """Who sends the owner's chunk when, to whom.

    Raises:
      ValueError: a worker does not send it, or twice.
    """
    stages = topology.stages(n_workers)
    tree = Tree(*(np.full(n_workers, -1) for _ in Tree._fields))
    workers = np.arange(n_workers, dtype=np.int32)
    for number, step in enumerate(steps_of(topology.schedule(n_workers))):
        if step.to is None:
            senders, to = workers[workers != owner], np.full(n_workers, owner)
        else:
            sends = (chunk_table(step, n_workers) == owner).any(axis=1)
            senders, to = workers[sends], step.to(workers)
        if (tree.step[senders] >= 0).any():
            raise ValueError(f"a worker sends chunk {owner} twice: in step {number}, too")
        for of, value in zip(tree, (number, step.stage, step.slot(workers), to), strict=True):
            of[senders] = np.broadcast_to(value, workers.shape)[senders]
    if (np.delete(tree.to, owner) < 0).any():
        raise ValueError(f"some of {n_workers} workers never send chunk {owner}")
    tree.stage[owner], tree.slot[owner] = len(stages) - 1, sink_slot(stages, owner)
    return tree


class _Node(NamedTuple):
    """A worker whose sum is under way."""

    worker: int
    left: list[int]
    """Workers that have not sent to it yet, the next one last."""
    total: Array | None = None
    """Its share and what it has added so far, if anything."""
    last: tuple[Payload, Encoder] | None = None
    """The payload that arrived last and is not added yet."""


def reduce_chunk(
    topology: Topology,
    n_workers: int,
    codec_of: CodecOf,
    arrays: Any,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Payload:
    """The payload of the finished sum of worker 0's chunk, with a leading axis of one chunk.

    Args:
      topology: whose schedule is run.
      n_workers: how many reduce.
      codec_of: what encodes; a static argument of compiled functions.
      arrays: what it needs.
      progress: called with the number of workers that have encoded, and of all.
    """
    tree = tree_of(topology, n_workers)
    senders, done = tree.senders(), 0
    stack = [_Node(0, senders[0][::-1])]
    while True:
        node = stack[-1]
        if node.left:
            worker = node.left.pop()
            stack.append(_Node(worker, senders[worker][::-1]))
            continue
        stack.pop()
        slot = jnp.int32(tree.slot[node.worker])
        encoder = Encoder(int(tree.stage[node.worker]), slot, jnp.int32(node.worker))
        payload = _encode(codec_of, encoder.stage, arrays, encoder[1:], node.total, *_split(node))
        done += 1
        if done % SYNC_EVERY == 0 or not stack:
            jax.block_until_ready(payload)
            progress(done, n_workers)
        if not stack:
            return payload
        parent = stack[-1]
        if parent.last is not None:
            worker = jnp.int32(parent.worker)
            total = _add(codec_of, arrays, worker, parent.total, *_split(parent))
            parent = parent._replace(total=total)
        stack[-1] = parent._replace(last=(payload, encoder))


def _split(node: _Node) -> tuple[int | None, Any]:
    """The payload that arrived last: the static stage of its encoder, and arrays."""
    if node.last is None:
        return None, None
    payload, encoder = node.last
    return encoder.stage, (payload, encoder[1:])


def _arrived(stage: int | None, last: Any) -> tuple[Arrived, ...]:
    if stage is None:
        return ()
    payload, (slot, worker) = last
    payloads = jax.tree.map(lambda x: x[None], payload)
    return (Arrived(payloads, Encoder(stage, slot[None], worker[None])),)


@partial(jax.jit, static_argnums=(0, 1, 5))
def _encode(codec_of: CodecOf, stage: int, arrays, of, total, last_stage, last) -> Payload:
    slot, worker = of
    codec, chunk = codec_of(arrays, worker), jnp.zeros(1, jnp.int32)
    arrived, encoder = _arrived(last_stage, last), Encoder(stage, slot, worker)
    return codec.encode(arrived, chunk, encoder, codec.carry, total)[0]


@partial(jax.jit, static_argnums=(0, 4))
def _add(codec_of: CodecOf, arrays, worker, total, last_stage, last) -> Array:
    codec, chunk = codec_of(arrays, worker), jnp.zeros(1, jnp.int32)
    return codec.add(_arrived(last_stage, last), chunk, total)


@partial(jax.jit, static_argnums=(0, 1, 2))
def decode_chunk(codec_of: CodecOf, topology: Topology, n_workers: int, arrays, payload) -> Array:
    """Decodes `reduce_chunk`'s payload as every worker does, flat."""
    stages = topology.stages(n_workers)
    codec, owner = codec_of(arrays, jnp.int32(0)), jnp.zeros(1, jnp.int32)
    encoder = Encoder(len(stages) - 1, sink_slot(stages, owner), owner)
    return codec.decode(payload, owner, encoder, None, codec.carry)[0].reshape(-1)
