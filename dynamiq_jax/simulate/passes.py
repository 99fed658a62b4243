"""The loops over workers: the pass ahead of the first hop, and the hops of every topology.

A loop is cut into `SEGMENTS` compiled calls, so that progress can be shown. None of them holds
more than its carry and the temporaries of one hop.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import UInt

from dynamiq_jax.simulate.codecs import Arrived, Codec, Message, Payload, Shared
from dynamiq_jax.simulate.gradients import (
    SUPER_GROUP,
    Source,
    Values,
    contribution,
    worker_gradient,
)
from dynamiq_jax.topologies import Butterfly, Direct, Ring, Stage

SEGMENTS = 64
"""Calls per loop; of a butterfly subtrees."""

Progress = Callable[[str, int, int], object]
"""(name of the loop, workers done, of how many)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Static facts of one simulation.

    Attributes:
      codec: what encodes.
      stages: the topology's.
      n_workers: workers of the compressed all-reduce.
      n_inner: workers that each of these stands for.
    """

    codec: Codec
    stages: tuple[Stage, ...]
    n_workers: int
    n_inner: int


class Given(NamedTuple):
    """What every hop needs."""

    source: Source
    shared: Shared


Reduce = Callable[[Setting, Given, Progress], Payload]


class Totals(NamedTuple):
    """What the pass ahead of the first hop finds."""

    high: Values
    """The exact sum of all gradients is high + low, in twice f32's precision."""
    low: Values
    message: Message


def survey(setting: Setting, source: Source, progress: Progress) -> Totals:
    """Exact sum and message of all workers."""
    zeros = jnp.zeros((source.deviation.size * SUPER_GROUP,), jnp.float32)
    message = jax.eval_shape(setting.codec.measure, zeros)
    message = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)
    totals = Totals(zeros, zeros, message)
    n = setting.n_workers
    for first, last in _segments("statistics", 0, n, n, progress):
        totals = jax.block_until_ready(survey_workers(setting, source, totals, first, last))
    return totals


def add_exactly(sums: tuple[Values, Values], x: Values) -> tuple[Values, Values]:
    """``(high, low)`` plus ``x``: what high rounds off goes to low."""
    high, low = sums
    total = high + x
    added = total - high
    return total, low + ((high - (total - added)) + (x - added))


@partial(jax.jit, static_argnums=0)
def survey_workers(setting: Setting, source: Source, totals: Totals, first, last) -> Totals:
    """Adds workers ``first .. last - 1``."""
    codec, k = setting.codec, setting.n_inner

    def one(worker, totals):
        def exactly(i, sums):
            return add_exactly(sums, worker_gradient(source, worker * k + i))

        sums = lax.fori_loop(0, k, exactly, (totals.high, totals.low))
        own = codec.measure(contribution(source, worker, k))
        return Totals(sums[0], sums[1], codec.merge(totals.message, own))

    return lax.fori_loop(first, last, one, totals)


@partial(jax.jit, static_argnums=0)
def shared_by_all(setting: Setting, message: Message, seed: UInt[Array, " 2"]) -> Shared:
    """What every worker knows after the light all-reduce."""
    return setting.codec.share(message, seed)


@partial(jax.jit, static_argnums=0)
def finished(setting: Setting, shared: Shared, payload: Payload) -> Values:
    """What every worker decodes at the end."""
    return setting.codec.finish(shared, payload)


@partial(jax.jit, static_argnums=0)
def centered(setting: Setting, given: Given, worker) -> Values:
    """What a worker of the compressed all-reduce adds."""
    x = contribution(given.source, worker, setting.n_inner)
    return setting.codec.center(given.shared, x)


@partial(jax.jit, static_argnums=(0, 3))
def encoded(setting: Setting, given: Given, x: Values, stage: int, arrived=None) -> Payload:
    """The payload, in the first slot of a stage, of ``x`` and what stage 0 sent, if anything."""
    slot = setting.stages[stage].slots.start
    arrived = arrived if arrived is None else Arrived(arrived, 0)
    return setting.codec.encode(given.shared, x, stage, slot, arrived)


def ring(setting: Setting, given: Given, progress: Progress) -> Payload:
    """Worker 0 starts; every hop adds one worker; the last one is the sink."""
    n = setting.n_workers
    payload = encoded(setting, given, centered(setting, given, 0), 0)
    for first, last in _segments("hops", 1, n - 1, n, progress):
        payload = jax.block_until_ready(ring_hops(setting, given, payload, first, last))
    return encoded(setting, given, centered(setting, given, n - 1), 1, payload)


@partial(jax.jit, static_argnums=0)
def ring_hops(setting: Setting, given: Given, payload: Payload, first, last) -> Payload:
    """Workers ``first .. last - 1``: each decodes, adds its gradient and encodes."""

    def hop(t, payload):
        x = centered(setting, given, t)
        return setting.codec.encode(given.shared, x, 0, t, Arrived(payload, 0))

    return lax.fori_loop(first, last, hop, payload)


def direct(setting: Setting, given: Given, progress: Progress) -> Payload:
    """Everyone sends to worker 0."""
    n = setting.n_workers
    total = centered(setting, given, 0)
    for first, last in _segments("hops", 1, n, n, progress):
        total = jax.block_until_ready(direct_arrivals(setting, given, total, first, last))
    return encoded(setting, given, total, 1)


@partial(jax.jit, static_argnums=0)
def direct_arrivals(setting: Setting, given: Given, total: Values, first, last) -> Values:
    """Adds what workers ``first .. last - 1`` send."""
    codec, slots = setting.codec, setting.stages[0].slots

    def one(worker, total):
        x = centered(setting, given, worker)
        payload = codec.encode(given.shared, x, 0, slots.start + worker)
        return codec.add(given.shared, total, Arrived(payload, 0))

    return lax.fori_loop(first, last, one, total)


def butterfly(setting: Setting, given: Given, progress: Progress) -> Payload:
    """The tree of worker 0's chunk, depth first: a few sums per level are alive."""
    n = setting.n_workers
    block = max(n // SEGMENTS, 1).bit_length() - 1

    def reduce(level: int, root: int) -> Values:
        if level <= block:
            total = jax.block_until_ready(subtree(setting, given, level, root))
            progress("hops", root + (1 << level), n)
            return total
        left, right = reduce(level - 1, root), reduce(level - 1, root + (1 << level - 1))
        return join(setting, given, left, right, level - 1, root)

    return encoded(setting, given, reduce(n.bit_length() - 1, 0), len(setting.stages) - 1)


@partial(jax.jit, static_argnums=(0, 2))
def subtree(setting: Setting, given: Given, level: int, root) -> Values:
    """The sum of workers ``root .. root + 2^level - 1`` as it arises at worker ``root``."""
    if level == 0:
        return centered(setting, given, root)
    roots = root + jnp.arange(2, dtype=jnp.int32) * (1 << level - 1)
    left, right = lax.map(lambda r: subtree(setting, given, level - 1, r), roots)
    return join(setting, given, left, right, level - 1, root)


@partial(jax.jit, static_argnums=(0, 4))
def join(setting: Setting, given: Given, left: Values, right: Values, level: int, root) -> Values:
    """A round: ``right``, the sum of 2^level workers, is sent to ``left`` at worker ``root``."""
    slot = setting.stages[level].slots.start + (root >> level + 1)
    payload = setting.codec.encode(given.shared, right, level, slot)
    return setting.codec.add(given.shared, left, Arrived(payload, level))


def _segments(
    name: str, first: int, last: int, n_workers: int, progress: Progress
) -> Iterator[tuple[int, int]]:
    step = -(-n_workers // SEGMENTS)
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield start, stop
        progress(name, stop, n_workers)


REDUCE: Mapping[type, Reduce] = {
    Ring: ring,
    Direct: direct,
    Butterfly: butterfly,
}
"""What each topology does up to the payload that all workers gather."""
