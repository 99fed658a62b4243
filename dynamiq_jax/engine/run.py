"""The engine: one loop over the leaves and buckets of a plan. A collective is one `Rule`.

With it is what all rules share: the leaves that JAX knows to be the same on all workers, which do
not move, and the derivative of what moves.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
from jax import Array

from dynamiq_jax.core.axis import Axis, Seed, key_words, together
from dynamiq_jax.core.compat import half_reduced_axes, inlined, is_constant, is_transposed
from dynamiq_jax.core.warned import warn
from dynamiq_jax.methods import State
from dynamiq_jax.plan.plan import (
    DERIVATIVE,
    NOTABLE,
    Native,
    Plan,
    described,
    remember,
    warn_of_native,
)
from dynamiq_jax.tree.leaves import Bucket, Leaf

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

    If any has to wait, the last ones go first: a backward pass ends with the first layers. Those
    beyond the limit by themselves come after the others, the smallest first: each takes a copy of
    its leaf, while the leaves that follow wait.
    """
    copies = plan.n_workers if plan.kind == "all-gather" else 1
    sizes = [bucket.nbytes * copies for bucket in plan.buckets]
    if limit is None or sum(sizes) <= limit:
        return [(number, []) for number in range(len(sizes))]
    under_way: list[int] = []
    found = []
    for number in sorted(reversed(range(len(sizes))), key=lambda i: max(sizes[i], limit)):
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


# --- What all rules share: leaves that do not move, and the derivative ----------------------------


Fixed = dict[int, Literal["constant", "replicated", "native"]]
"""Leaves that are not compressed whatever their size, by index, and why."""


def fixed_leaves(leaves: list[Leaf], values, axis: Axis) -> Fixed:
    """Leaves that JAX knows to be the same on all workers, and leaves that only `jax.lax` may sum.

    The latter vary over some of the axes; or they have the types "reduced" or "unreduced", which
    only `jax.lax` can pass on; or they are traced to be transposed.
    """
    tracked = axis.tracked
    fixed: Fixed = {}
    for leaf, value in zip(leaves, values, strict=True):
        if is_constant(value):
            fixed[leaf.index] = "constant"
        elif is_transposed(value):
            fixed[leaf.index] = "native"
        elif tracked and (not axis.varies(value) or half_reduced_axes(value)):
            same = axis.replicates(value)
            fixed[leaf.index] = "replicated" if same else "native"
    return fixed


def check_varying(plan: Plan, fixed: Fixed, axis: Axis) -> None:
    """Refuses leaves that would be compressed, and are known to be equal on all workers."""
    found = _replicated(plan, fixed)
    if found:
        n_workers = axis.size
        raise ValueError(
            f"{described(found)} do not vary over axis {axis.name!r}: all {n_workers} workers "
            f"hold the same value, which a psum would multiply by {n_workers}. Gradients of "
            f"replicated parameters are already summed under check_vma=True: {_CAST_FIRST}"
            f"jax.lax.pcast(params, {axis.name!r}, to='varying')"
        )


_CAST_FIRST = "differentiate with dq.value_and_grad, or cast the parameters first with "


def warn_of_equal(plan: Plan, fixed: Fixed, axis: Axis) -> None:
    """Warns of large leaves that are equal on all workers, which the caller may not expect."""
    n = axis.size
    equal = [leaf for leaf in _replicated(plan, fixed) if leaf.size >= NOTABLE]
    if equal and n > 1:
        warn(
            f"{described(equal)} do not vary over axis {axis.name!r}: all {n} workers hold the "
            "same value, so that the mean is that value and nothing is compressed. If these are "
            "gradients of replicated parameters, JAX has summed them over the axis already "
            f"(check_vma=True), and unless the loss was averaged over it they are {n} times the "
            f"mean: {_CAST_FIRST}jax.lax.pcast(params, {axis.name!r}, to='varying')",
        )


def _replicated(plan: Plan, fixed: Fixed) -> list[Leaf]:
    """Leaves that would be compressed if JAX did not know that all workers hold the same."""
    leaves = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    return [leaf for leaf in (*leaves, *plan.apart) if fixed.get(leaf.index) == "replicated"]


def with_tangent(exact: Callable, x: Array, total: Array) -> Array:
    """``total``, with the derivative of the linear ``exact(x)``.

    All other results of a compressed collective are constants. A rule could not return the tangents
    of its integers, for which JAX expects float0 that varies under `check_vma`.
    """

    @jax.custom_jvp
    def known(x: Array, total: Array) -> Array:
        return total

    @known.defjvp
    def _(primals, tangents):
        with jax.named_scope(DERIVATIVE):
            tangent = exact(tangents[0])
        return known(*primals), tangent  # `known`: its derivative has one, too

    return known(x, total)
