"""Checks of the leaves and states that a collective is given."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dynamiq_jax.compression.compression import PADDED
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import half_reduced_axes, is_constant, is_transposed
from dynamiq_jax.core.warned import warn
from dynamiq_jax.plan.plan import Plan
from dynamiq_jax.tree.leaves import Leaf


def check_state(state: Any, expected: tuple, plan: Plan) -> list:
    """The states of all buckets, of ``expected`` shapes; empty where the caller keeps none."""
    n_buckets = len(expected)
    methods = list(dict.fromkeys(bucket.route.method for bucket in plan.buckets))
    if state is None:
        needing = [m for m in methods if m.needs_state]
        if needing and plan.buckets[0].route.n_workers > 1:
            raise ValueError(
                f"method={needing[0]!r} needs a state: call dq.reduce(tree, axis_name, "
                "compression=method, state=dq.Compression(method).init_state(tree, n_workers)) and "
                "carry the state that it returns to the next step. The function that "
                "dq.value_and_grad returns takes state=, too, made with stacked=True"
            )
        return [()] * n_buckets
    state = tuple(state) if isinstance(state, list) else state  # as checkpoints may return it
    remedy = "pass what dq.Compression(method, ...).init_state(tree, n_workers) gave for the same"
    if not isinstance(state, tuple) or len(state) != n_buckets:
        found = len(state) if isinstance(state, tuple) else repr(type(state).__name__)
        raise ValueError(
            f"state is for {found} buckets and the tree has {n_buckets}; {remedy} arguments"
        )
    wanted, given = ([jnp.shape(x) for x in jax.tree.leaves(t)] for t in (expected, state))
    if jax.tree.structure(expected) != jax.tree.structure(state) or wanted != given:
        raise ValueError(
            f"state has leaves of shapes {given}, and method={methods[0]!r} keeps {wanted} of this "
            f"tree on each worker; {remedy} arguments, one worker's part if it is stacked"
        )
    return list(state)


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
            f"{_described(found)} do not vary over axis {axis.name!r}: all {n_workers} workers "
            f"hold the same value, which a psum would multiply by {n_workers}. Gradients of "
            f"replicated parameters are already summed under check_vma=True: {_CAST_FIRST}"
            f"jax.lax.pcast(params, {axis.name!r}, to='varying')"
        )


_CAST_FIRST = "differentiate with dq.value_and_grad, or cast the parameters first with "
NOTABLE, LARGE = 4096, 65536
"""Coordinates of leaves that look like parameters, and of leaves that are worth compressing."""


def warn_of_uncompressed(plan: Plan, fixed: Fixed, axis: Axis, *, limited: bool) -> None:
    """Warns of large leaves that are not compressed, if the caller may not expect it.

    They are equal on all workers, or padding or limits exclude more than a tenth of the
    compressible bytes. Limits that the caller set (``limited``) cause no warning.
    """
    n = axis.size
    equal = [leaf for leaf in _replicated(plan, fixed) if leaf.size >= NOTABLE]
    if equal and n > 1:
        warn(
            f"{_described(equal)} do not vary over axis {axis.name!r}: all {n} workers hold the "
            "same value, so that the mean is that value and nothing is compressed. If these are "
            "gradients of replicated parameters, JAX has summed them over the axis already "
            f"(check_vma=True), and unless the loss was averaged over it they are {n} times the "
            f"mean: {_CAST_FIRST}jax.lax.pcast(params, {axis.name!r}, to='varying')",
        )
    if n == 1:
        return
    wanted = (PADDED,) if limited else (PADDED, "min_bucket")
    # If nothing is compressed, small leaves count if together they are as large as a large one.
    least, nothing = (LARGE, "") if plan.buckets else (NOTABLE, "; nothing is compressed")
    small = [
        (leaf, reason)
        for leaf, reason, _ in plan.exact
        if any(word in reason for word in wanted) and leaf.size >= least and leaf.index not in fixed
    ]
    moved = sum(leaf.nbytes for bucket in plan.buckets for leaf in bucket.leaves)
    native = sum(leaf.nbytes for leaf, _ in small)
    if native > (moved + native) / 10 and sum(leaf.size for leaf, _ in small) >= LARGE:
        leaves, reasons = zip(*small, strict=True)
        if PADDED in reasons[0]:
            remedy = "more leaves at a time, or reduce among fewer workers"
        else:
            remedy = (
                "dq.Compression(min_bucket_bytes=0) to compress small buckets, too, or set one of "
                "these limits"
            )
        warn(
            f"{_described(leaves)} ({native:,} bytes) are summed by jax.lax.psum, since there is a "
            f"{reasons[0]}{nothing}. dq.explain(tree, {n}) tells of every leaf which way it goes; "
            f"pass {remedy}",
        )


def _replicated(plan: Plan, fixed: Fixed) -> list[Leaf]:
    """Leaves that would be compressed if JAX did not know that all workers hold the same."""
    leaves = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    return [leaf for leaf in (*leaves, *plan.apart) if fixed.get(leaf.index) == "replicated"]


def _described(leaves: Sequence[Leaf]) -> str:
    """The first leaf, and how many more there are."""
    first = leaves[0]
    return f"leaf {first.name} ({first.dtype.name}{list(first.shape)}) and {len(leaves) - 1} more"
