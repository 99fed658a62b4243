"""All-reduces of one device's leaves: their rule, weights, derivatives, metrics, checks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis, Seed, by_device_order, key_words
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.compat import half_reduced_axes, is_constant, is_transposed
from dynamiq_jax.core.warned import warn
from dynamiq_jax.engine.run import Values, run
from dynamiq_jax.methods import Method, State
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.metrics import (
    BucketMetrics,
    Metrics,
    PayloadFacts,
    bucket_metrics,
    of_all_parts,
    summarise,
)
from dynamiq_jax.plan.plan import NOTABLE, Native, Plan, described
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import Bucket, Leaf, concatenate, split
from dynamiq_jax.tree.placement import Surroundings


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


# --- Rule -----------------------------------------------------------------------------------------


def weighted(
    values: list[Array],
    leaves: list[Leaf],
    fixed: Fixed,
    op: Op,
    weight: Array | float,
    axis: Axis,
) -> list[Array]:
    """Scales leaves that differ between workers so that their plain mean is the weighted mean."""
    if op != "mean":
        raise ValueError(f"weight goes with op='mean', and op={op!r}; multiply the leaves instead")
    if jnp.shape(weight) != ():
        raise ValueError(f"weight has shape {jnp.shape(weight)}; pass one number for each worker")
    wrong = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if wrong:
        raise ValueError(
            f"weight: leaf {wrong[0].name} is {wrong[0].dtype.name}, which has no weighted mean; "
            "reduce such leaves apart, or cast them to f32"
        )
    share = share_of(weight, axis)
    alike = {i for i, why in fixed.items() if why != "native"}
    return [x if i in alike else weigh(jnp.asarray(x), share) for i, x in enumerate(values)]


def share_of(weight: Array | float, axis: Axis) -> Array:
    """This worker's weight divided by the mean weight; 0 if all are 0, NaN if one is invalid."""
    weight = axis.to_varying(jnp.asarray(weight, jnp.float32))
    weight = jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)
    # The largest weight becomes 1, so that no sum overflows. The mean does not depend on it.
    largest = axis.pmax(jnp.nan_to_num(lax.stop_gradient(weight)))
    # Compilers may multiply by 1 / largest, which has to be a normal number, too.
    unit = jnp.where(largest > 2.0**64, jnp.float32(2.0**-64), 1.0)
    weight = (weight * unit) / jnp.where(largest > 0, largest * unit, 1.0)
    total = axis.psum(weight)
    return jnp.where(total == 0, 0.0, weight * (axis.size / jnp.where(total == 0, 1.0, total)))


def weigh(x: Array, share: Array | None) -> Array:
    """``x`` times the share; 0 for a share of 0, whatever ``x`` is."""
    if share is None:
        return x
    wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
    return jnp.where(share == 0, 0.0, x.astype(wide) * share.astype(wide)).astype(x.dtype)


def exact_of(axis: Axis, op: Op) -> Callable:
    """The exact reduction of a tree."""
    return axis.pmean if op == "mean" else axis.psum


class AllReduce(NamedTuple):
    """The rule of all-reduces."""

    axis: Axis
    op: Op
    metrics: bool = False
    asks: bool = False
    """Whether the program may ask for its devices (`core.axis.knows_devices`)."""

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """One call, so that XLA may send all leaves together."""
        indices = [leaf.index for leaf, _, _ in leaves]
        sums = exact_of(self.axis, self.op)([values[i] for i in indices])
        return dict(zip(indices, sums, strict=True))

    def joined(self, bucket: Bucket, values: Values) -> Any:
        """The flat bucket; of one worker its leaves, which need no copy."""
        if self.axis.size == 1:
            return [values[leaf.index] for leaf in bucket.leaves]
        return concatenate(bucket, values)

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """See `Rule`; the facts are `BucketMetrics`."""
        bucket, exact = plan.buckets[number], exact_of(self.axis, self.op)
        if self.axis.size == 1:
            found, facts = exact(x), None  # JAX knows of the results that all workers hold them
            if self.metrics:
                own = dict(zip((leaf.index for leaf in bucket.leaves), found, strict=True))
                facts = bucket_metrics(concatenate(bucket, own), PayloadFacts(error=0.0))
            return found, (state, facts)
        route = bucket.route
        method, divisor = route.runner.of_bucket(bucket), self.axis.size if self.op == "mean" else 1
        push = route.push if self._pushes(plan, number) else None
        way = _Way(self.axis, method, route.flat, divisor, self.metrics, push, self.asks)
        run = self.axis.program(_reduce_bucket)
        total, told = run(*lax.stop_gradient((x, seed, state)), way=way)
        return with_tangent(exact, x, total), told

    def _pushes(self, plan: Plan, number: int) -> bool:
        """Whether a push kernel reduces a bucket.

        JAX's collectives also run over axes of `jax.vmap`; push kernels do not. Several large
        buckets overlap with each other, but not beside a push kernel.
        """
        pushed, axis = plan.buckets[number].route.pushed, self.axis
        if pushed is None or axis.groups is not None or pk.needs_of_push(axis.names) is not None:
            return False
        return sum(bucket.nbytes for bucket in plan.buckets) <= pushed[1]

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """See `Rule`."""
        if self.axis.size == 1:
            return dict(zip((leaf.index for leaf in bucket.leaves), result, strict=True))
        return dict(split(bucket, result))


def reduce_leaves(
    values: Values, key: Array | None, states: list[State], *, plan: Plan, rule: AllReduce
) -> tuple[Values, list[State], Metrics | None]:
    """Sums or means of one device's leaves, the next states, and metrics if the rule has them."""
    values, after, known = run(plan, rule, values, key, states)
    if not rule.metrics:
        return values, after, None
    pairs = zip(known, plan.buckets, strict=True)
    of_leaves = [of_all_parts(facts, bucket.axes) for facts, bucket in pairs]
    moves = plan.moves
    sent = sum(move.sent_bits for move in moves) / 8
    bits = plan.bits_per_coord(sent, sum(move.size for move in moves))
    return values, after, summarise(of_leaves, bits_per_coord=bits, wire_bytes=sent)


class _Way(NamedTuple):
    """How buckets are reduced: the static fields of a `Call`, and the method that gets it."""

    axis: Axis
    method: Method
    topology: Topology | None
    divisor: int
    metrics: bool
    push: Topology | None = None
    """The topology for push kernels, if these are faster."""
    asks: bool = False
    """Whether the program may ask for its devices; a trace that does not is another one."""


# A function of its own in the program: buckets of the same size are traced and lowered once.
@functools.partial(jax.jit, static_argnames="way")
def _reduce_bucket(
    x: Array, seed: Seed, state: State, *, way: _Way
) -> tuple[Array, tuple[State, BucketMetrics | None]]:
    if way.push is not None:
        alone = way._replace(push=None)
        ways = alone._replace(topology=way.push), alone
        by = (functools.partial(_reduce_bucket, way=one) for one in ways)
        return by_device_order(*by, x, seed, state)
    call = Call(way.axis, way.topology, seed, way.divisor, state, way.metrics)
    outcome = way.method.all_reduce(x, call)
    known = bucket_metrics(outcome.value, outcome.facts) if way.metrics else None
    return outcome.value, (outcome.state, known)


def over_open_axes(run: Callable, around: Surroundings, specs: Any, split_over: list) -> Callable:
    """``run(values, key, states)`` mapped over the open axes, over which leaves are still whole.

    States of buckets whose parts differ have a leading axis of parts.
    """

    def each(f: Callable, states: list[State]) -> list[State]:
        pairs = zip(states, split_over, strict=True)
        return [jax.tree.map(f, state) if axes else state for state, axes in pairs]

    def of_part(values, words, states):
        # A device has one part, so the axis of parts has length 1 here.
        values, states, found = run(values, words, each(lambda x: x[0], states))
        return values, each(lambda x: x[None], states), found

    of_states = [P(axes) if axes else P() for axes in split_over]
    mapped = around.per_part(of_part, (specs, P(), of_states), (specs, of_states, P()))

    def of_whole(values, key, states):
        pairs = zip(states, of_states, strict=True)
        typed = [around.as_typed(state, spec) for state, spec in pairs]
        return mapped(values, key_words(key), typed)

    return of_whole


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
        return known(*primals), exact(tangents[0])  # `known`: its derivative has one, too

    return known(x, total)
