"""Runs schedules by XLA's collectives inside a mapped axis: all-to-all, ppermute, all-gather.

How payloads travel is the topology's transport (`topologies.links`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.topologies import Rounds, Step, Topology
from dynamiq_jax.topologies.links import Transport
from dynamiq_jax.topologies.schedules import check_schedule, chunk_table, permuted, sink_slot


class _Received(NamedTuple):
    """Payloads of one stream that reached a worker in one step, and the owners of their chunks."""

    owners: Int[np.ndarray, "n c"]
    """For every worker, the owners of the chunks that it received in one step."""
    arrived: Arrived


def all_reduce(
    topology: Topology, codec: ChunkCodec, axis: Axis, streams: int
) -> tuple[Array, Array | None]:
    """Reduces every chunk; each owner encodes its sums once, and all workers decode them.

    Returns the result of `ChunkCodec.decode` for all chunks, and the errors of this worker's
    encodings.
    """
    sends = topology.sends
    if sends.reduces and streams == 1 and codec.push is not None:
        check_schedule(topology, axis.size)
        return axis.assume_invarying(codec.push(axis)), None
    stages = topology.stages(axis.size)
    last, me = len(stages) - 1, axis.index
    own = Encoder(last, sink_slot(stages, me), me)
    inputs, lost = _reduce(topology, codec, axis, streams)
    result = None
    for i, arrived in enumerate(inputs):
        chunk = (me * streams + i)[None]  # stream i of this worker's chunks
        payloads, lost = codec.encode(arrived, chunk, own, lost)
        for sinks, owners in sends.gather(axis, payloads):
            slots = jnp.broadcast_to(sink_slot(stages, owners), owners.shape)
            encoders = Encoder(last, slots, owners)
            result = codec.decode(sinks, owners * streams + i, encoders, result)
    assert result is not None
    return axis.assume_invarying(result) if sends.one_by_one else result, lost


def reduce_scatter(topology: Topology, codec: ChunkCodec, axis: Axis, streams: int) -> Array:
    """Reduces every chunk; returns the result of `ChunkCodec.finish` for this worker's chunks."""
    # This worker's chunks have the indices mine, ..., mine + streams - 1.
    mine = axis.index * streams
    inputs, _ = _reduce(topology, codec, axis, streams)
    assert codec.finish is not None
    result = None
    for i, arrived in enumerate(inputs):
        result = codec.finish(arrived, (mine + i)[None], result)
    assert result is not None
    return result


def _reduce(
    topology: Topology, codec: ChunkCodec, axis: Axis, streams: int
) -> tuple[list[tuple[Arrived, ...]], Array | None]:
    """Collects, for each chunk of every worker, all payloads to be added to its own share."""
    n_workers = axis.size
    check_schedule(topology, n_workers)
    run = _Run(codec, axis, n_workers, streams, topology.sends)
    held: list[list[_Received]] = [[] for _ in range(streams)]
    lost = codec.lost
    schedule = topology.schedule(n_workers)
    if topology.sends.one_by_one:
        schedule = permuted(schedule, n_workers)
    for rounds in schedule:
        looped = rounds.looped and rounds.length > 2
        # `loop` runs all rounds but the first.
        for t in range(1 if looped else rounds.length):
            step = rounds.step(t)
            table = chunk_table(step, n_workers)
            for stream, mine in enumerate(held):
                arrived = run.inputs(mine, table)
                payloads, lost = run.encode(step, stream, arrived, lost)
                mine.append(run.held(step, run.send(step, payloads)))
        if looped:
            held, lost = run.loop(rounds, held, lost)
    own = np.arange(n_workers, dtype=np.int32)[:, None]
    # In the end every worker needs the chunk that it owns: its own index, int32[n, 1].
    return [run.inputs(mine, own) for mine in held], lost


class _Run(NamedTuple):
    """Static facts of one run, and the parts of its steps."""

    codec: ChunkCodec
    axis: Axis
    n_workers: int
    streams: int
    sends: Transport

    def loop(
        self, rounds: Rounds, held: list[list[_Received]], lost: Array | None
    ) -> tuple[list[list[_Received]], Array | None]:
        """All rounds but the first, as a loop: a round adds the payloads of the round before."""
        # In round t a worker has to encode what it got in round t - 1, in the same order.
        first, second = rounds.step(0), rounds.step(1)
        if not np.array_equal(self._owners(first), chunk_table(second, self.n_workers)):
            raise ValueError(
                "looped rounds have to encode what arrived in the round before, and a schedule "
                "encodes other chunks; pass Rounds(looped=False)"
            )

        def round_of(t, state):
            before, lost = state
            step, previous = rounds.step(t), rounds.step(t - 1)
            after = []
            for stream, payloads in enumerate(before):
                arrived = Arrived(payloads, self._sender(previous))
                payloads, lost = self.encode(step, stream, (arrived,), lost)
                after.append(self.send(step, payloads))
            return after, lost

        last = rounds.step(rounds.length - 1)
        start = [mine[-1].arrived.payloads for mine in held], lost
        moved, lost = lax.fori_loop(1, rounds.length, round_of, start)
        arrived = [self.held(last, payloads) for payloads in moved]
        return [[*mine[:-1], new] for mine, new in zip(held, arrived, strict=True)], lost

    def inputs(self, held: list[_Received], wanted: Int[np.ndarray, "n c"]) -> tuple[Arrived, ...]:
        """The arrived payloads of the chunks of the owners ``wanted[me]``."""
        found = []
        for owners, arrived in held:
            at = _positions(owners, wanted)
            if at is None:
                continue
            if not np.array_equal(owners, wanted):
                mine = jnp.asarray(at)[self.axis.index]
                # From payloads [k, c], take the wanted chunks of all k senders.
                take = lambda x, at=mine: x.at[:, at].get(mode="promise_in_bounds")
                arrived = arrived._replace(payloads=jax.tree.map(take, arrived.payloads))
            found.append(arrived)
        return tuple(found)

    def encode(
        self, step: Step, stream: int, arrived: tuple[Arrived, ...], lost: Array | None
    ) -> tuple[Payload, Array | None]:
        """The payloads of one stream's chunks in a step."""
        me = self.axis.index
        # From owners to chunks, which have the indices owner * streams + stream.
        chunks = jnp.asarray(step.chunks(me), jnp.int32) * self.streams + stream
        encoder = Encoder(step.stage, step.slot(me), me)
        # If all workers send to all, the chunk at position me is this worker's own, and stays here.
        skip = me if step.to is None and not arrived else None
        return self.codec.encode(arrived, chunks, encoder, lost, skip=skip)

    def send(self, step: Step, payloads: Payload) -> Payload:
        """The payloads that this worker gets, with leading axes [k, c] as in `Arrived`."""
        if step.to is None:
            # One payload of each of k = n senders, for the c = 1 chunk of this worker: [n, 1, ...].
            return jax.tree.map(lambda x: x[:, None], self.sends.exchange(self.axis, payloads))
        workers = np.arange(self.n_workers, dtype=np.int32)
        pairs = list(zip(workers.tolist(), step.to(workers).tolist(), strict=True))
        # The payloads of one sender, k = 1, for its c chunks: [1, c, ...].
        return jax.tree.map(lambda x: x[None], self.axis.ppermute(payloads, pairs))

    def held(self, step: Step, moved: Payload) -> _Received:
        """The payloads from `send`, with their encoders."""
        if step.to is not None:
            return _Received(self._owners(step), Arrived(moved, self._sender(step)))
        everyone = jnp.arange(self.n_workers, dtype=jnp.int32)
        encoder = Encoder(step.stage, step.slot(everyone), everyone)
        return _Received(self._owners(step), Arrived(moved, encoder, skip=self.axis.index))

    def _sender(self, step: Step) -> Encoder:
        """The encoder of the payloads that this worker gets in a step of a permutation."""
        sender = jnp.asarray(_senders(step, self.n_workers))[self.axis.index]
        return Encoder(step.stage, jnp.asarray(step.slot(sender))[None], sender[None])

    def _owners(self, step: Step) -> Int[np.ndarray, "n c"]:
        """The owners of the chunks that each worker receives."""
        if step.to is None:
            return np.arange(self.n_workers, dtype=np.int32)[:, None]
        # Row w of the result is the row of the worker that sends to w.
        return chunk_table(step, self.n_workers)[_senders(step, self.n_workers)]


def _senders(step: Step, n_workers: int) -> Int[np.ndarray, " n"]:
    """The sender to every worker: the inverse of the permutation ``step.to``."""
    assert step.to is not None
    return np.argsort(step.to(np.arange(n_workers, dtype=np.int32))).astype(np.int32)


def _positions(
    owners: Int[np.ndarray, "n c"], wanted: Int[np.ndarray, "n k"]
) -> Int[np.ndarray, "n k"] | None:
    """The position of each wanted chunk among the chunks received; `None`: none was received."""
    # place[w, o]: at which position worker w got the chunk of owner o.
    n = owners.shape[0]
    place = np.full((n, n), -1, np.int32)
    np.put_along_axis(place, owners, np.arange(owners.shape[1], dtype=np.int32)[None], axis=1)
    at = np.take_along_axis(place, wanted, axis=1)
    if (at < 0).all():
        return None
    if (at < 0).any():
        raise ValueError(
            f"a schedule sends some of the chunks {wanted.tolist()} in one step to a worker that "
            "encodes them with others in the next; encode in one step chunks that arrived together"
        )
    return at
