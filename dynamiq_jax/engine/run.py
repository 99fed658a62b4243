"""The engine: one loop over the leaves and buckets of a plan. A collective is one `Rule`."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
from jax import Array

from dynamiq_jax.core.axis import Axis, Seed, key_words, together
from dynamiq_jax.core.compat import inlined
from dynamiq_jax.methods import State
from dynamiq_jax.plan.plan import Native, Plan, remember, warn_of_native
from dynamiq_jax.tree.leaves import Bucket

Values = dict[int, Any]
"""Leaves by `Leaf.index`."""


IN_FLIGHT = 1 << 29
"""Bytes of a call's buckets that travel at the same time. XLA would start all of them as early as
it can, and each holds a copy of its leaves, what it sends and what has arrived. At 25 Gb/s half a
GiB takes tens of milliseconds compressed, so that the wire does not wait."""

_at_once = contextvars.ContextVar("at_once", default=False)


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    """A block in which no bucket of a call waits for another one."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


class Rule(Protocol):
    """How a kind of collective moves leaves. Rules are static, so they are hashable."""

    @property
    def axis(self) -> Axis:
        """The workers."""
        ...

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """The results of leaves that XLA's collective moves."""
        ...

    def joined(self, bucket: Bucket, values: Values) -> Any:
        """A bucket as the collective takes it: one array."""
        ...

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """The result of bucket ``number``, and the next state with facts for metrics."""
        ...

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """The results of a bucket's leaves."""
        ...


def no_buckets(*_: Any) -> Any:
    """A function of a `Rule` whose plans have no buckets."""
    raise AssertionError("a plan of native moves has buckets")


def queue(plan: Plan, limit: int | None) -> list[tuple[int, list[int]]]:
    """The numbers of all buckets in the order in which they travel, and whom each one waits for.

    The last ones go first if any has to wait: a backward pass ends with the first layers.
    """
    copies = plan.n_workers if plan.kind == "all-gather" else 1
    sizes = [bucket.nbytes * copies for bucket in plan.buckets]
    if limit is None or sum(sizes) <= limit:
        return [(number, []) for number in range(len(sizes))]
    under_way: list[int] = []
    found = []
    for number in reversed(range(len(sizes))):
        before = []
        while under_way and sum(sizes[i] for i in (*under_way, number)) > limit:
            before.append(under_way.pop(0))
        under_way.append(number)
        found.append((number, before))
    return found


@functools.partial(inlined, static_argnames=("plan", "rule", "limit"))
def _run(
    values: Values,
    key: Array | None,
    states: Sequence[State],
    *,
    plan: Plan,
    rule: Rule,
    limit: int | None,
) -> tuple[Values, list[State], list[Any]]:
    values, after, results, facts = dict(values), list(states), {}, {}
    with jax.named_scope(remember(plan)):
        if plan.exact:
            values |= rule.native(plan.exact, values)
        seeds = plan.seeds(key_words(key))
        # seeds[number] and after[number] belong to bucket ``number``, whatever the order.
        for number, before in queue(plan, limit):
            bucket = plan.buckets[number]
            if before:
                own = {leaf.index for leaf in bucket.leaves} & values.keys()
                waiting = {i: values[i] for i in own}, {i: results[i] for i in before}
                waiting, arrived = together(*waiting)
                values, results = values | waiting, results | arrived
            x = rule.joined(bucket, values)
            results[number], (after[number], facts[number]) = rule.moved(
                x, seeds[number], after[number], plan, number
            )
        for number, bucket in enumerate(plan.buckets):
            values |= rule.taken_apart(results[number], bucket)
    return values, after, [facts[number] for number in range(len(plan.buckets))]


def run(
    plan: Plan,
    rule: Rule,
    values: Values,
    key: Array | None = None,
    states: Sequence[State] | None = None,
) -> tuple[Values, list[State], list[Any]]:
    """Runs a plan; returns its leaves, the next state of every bucket, and facts for metrics."""
    warn_of_native(plan)
    states = [()] * len(plan.buckets) if states is None else states
    told = {"plan": plan, "rule": rule, "limit": None if _at_once.get() else IN_FLIGHT}
    return rule.axis.program(_run)(values, key, states, **told)
