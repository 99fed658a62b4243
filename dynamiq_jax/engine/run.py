"""The engine: one loop over the leaves and buckets of a plan. A collective is one `Rule`."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import Array

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import inlined
from dynamiq_jax.core.seeds import Seed, key_words
from dynamiq_jax.methods import State
from dynamiq_jax.plan.plan import Native, Plan, remember, warn_of_native
from dynamiq_jax.tree.leaves import Bucket

Values = dict[int, Any]
"""Leaves by `Leaf.index`."""


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


@functools.partial(inlined, static_argnames=("plan", "rule"))
def _run(
    values: Values, key: Array | None, states: Sequence[State], *, plan: Plan, rule: Rule
) -> tuple[Values, list[State], list[Any]]:
    values, after, facts = dict(values), list(states), []
    with jax.named_scope(remember(plan)):
        if plan.exact:
            values |= rule.native(plan.exact, values)
        seeds = plan.seeds(key_words(key))
        # Buckets keep their order: seeds[number] and after[number] belong to bucket ``number``.
        for number, bucket in enumerate(plan.buckets):
            x = rule.joined(bucket, values)
            result, (state, found) = rule.moved(x, seeds[number], after[number], plan, number)
            after[number] = state
            facts.append(found)
            values |= rule.taken_apart(result, bucket)
    return values, after, facts


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
    return rule.axis.program(_run)(values, key, states, plan=plan, rule=rule)
