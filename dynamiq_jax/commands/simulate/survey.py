"""The pass over all workers ahead of the first hop: the exact sum, and what they agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.commands.simulate.gradients import (
    SUPER_GROUP,
    Source,
    Values,
    contribution,
    worker_gradient,
)
from dynamiq_jax.executors import ChunkCodec
from dynamiq_jax.methods.hops import Bound, HopMethod, Message, Shared

SEGMENTS = 64
"""Compiled calls, so that progress can be shown."""

Progress = Callable[[str, int, int], object]
"""(name of the loop, workers done, of how many)."""


class Given(NamedTuple):
    """The arrays that every encoding needs."""

    source: Source
    shared: Shared


@dataclass(frozen=True, slots=True)
class Workers:
    """Static facts of the workers of one simulation; called, one worker's codec.

    Attributes:
      method: what encodes.
      bound: its sizes, for one chunk that all workers add to.
      n_inner: workers that each of these stands for.
    """

    method: HopMethod
    bound: Bound
    n_inner: int

    def __call__(self, given: Given, worker: Array) -> ChunkCodec:
        """The codec of one worker's gradient."""
        x = contribution(given.source, worker, self.n_inner)
        return self.method.codec(x, given.shared, self.bound, dtype=jnp.float32)


class Totals(NamedTuple):
    """The findings of the pass."""

    high: Values
    """The exact sum of all gradients is high + low, in twice f32's precision."""
    low: Values
    message: Message
    """Floats are summed in f32."""


def survey(workers: Workers, source: Source, progress: Progress) -> Totals:
    """Exact sum and message of all workers."""
    zeros = jnp.zeros((source.deviation.size * SUPER_GROUP,), jnp.float32)
    message = jax.eval_shape(partial(_message, workers), zeros)
    message = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)
    totals, n = Totals(zeros, zeros, message), workers.bound.n_workers
    step = -(-n // SEGMENTS)
    for first in range(0, n, step):
        last = min(first + step, n)
        totals = jax.block_until_ready(survey_workers(workers, source, totals, first, last))
        progress("statistics", last, n)
    return totals


def add_exactly(sums: tuple[Values, Values], x: Values) -> tuple[Values, Values]:
    """``(high, low)`` plus ``x``: what high rounds off goes to low."""
    high, low = sums
    total = high + x
    added = total - high
    return total, low + ((high - (total - added)) + (x - added))


@partial(jax.jit, static_argnums=0)
def survey_workers(workers: Workers, source: Source, totals: Totals, first, last) -> Totals:
    """Adds workers ``first .. last - 1``."""
    k = workers.n_inner

    def one(worker, totals):
        def exactly(i, sums):
            return add_exactly(sums, worker_gradient(source, worker * k + i))

        sums = lax.fori_loop(0, k, exactly, (totals.high, totals.low))
        own = _message(workers, contribution(source, worker, k))
        together = jnp.add if workers.method.agreement == "sum" else jnp.maximum
        return Totals(sums[0], sums[1], jax.tree.map(together, totals.message, own))

    return lax.fori_loop(first, last, one, totals)


@partial(jax.jit, static_argnums=0)
def shared_by_all(workers: Workers, x: Values, message: Message, seed) -> Shared:
    """The plan that every worker has after the small all-reduce; ``x`` is any worker's gradient."""
    method, bound = workers.method, workers.bound
    kind: Any = jax.eval_shape(partial(method.measure, bound=bound), x)
    message = jax.tree.map(lambda leaf, sent: leaf.astype(sent.dtype), message, kind)
    return method.share(message, seed, bound)


def _message(workers: Workers, x: Values) -> Message:
    """One worker's message as it is sent; floats as f32."""

    def widened(leaf):
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(widened, workers.method.measure(x, workers.bound))
