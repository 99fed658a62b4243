"""The reduction of one device's leaves: buckets, exact leaves, weights, derivatives, metrics."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.compat import inlined
from dynamiq_jax.core.lowering import by_device_order
from dynamiq_jax.core.seeds import Seed, key_words
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
from dynamiq_jax.reduction.checks import Fixed
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import Grouping, Leaf, concatenate, split
from dynamiq_jax.tree.placement import Surroundings


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


class Told(NamedTuple):
    """Static facts, beside its leaves, that a program is made for."""

    sent: tuple[float, float] | None
    """With metrics: the bits per coordinate and the bytes that a worker sends."""
    asks: bool
    """Whether the program may ask for its devices (`core.lowering.knows_devices`)."""


@functools.partial(inlined, static_argnames=("grouping", "axis", "op", "told"))
def reduce_leaves(
    values: dict[int, Array],
    key: Array | None,
    states: list[State],
    *,
    grouping: Grouping,
    axis: Axis,
    op: Op,
    told: Told,
) -> tuple[dict[int, Array], list[State], Metrics | None]:
    """Reduces one device's leaves, ``values`` by `Leaf.index`; ``states`` are those of the buckets.

    Returns the sums or means, the next states, and the metrics if ``told`` has what is sent.
    """
    exact_reduce, values, after = exact_of(axis, op), dict(values), list(states)
    sent = told.sent
    known: list[BucketMetrics] = []
    if axis.size == 1:
        if sent is not None:
            alone = PayloadFacts(error=0.0)
            known = [bucket_metrics(concatenate(b, values), alone) for b in grouping.buckets]
        values = exact_reduce(values)
    else:
        seeds = grouping.seeds(key_words(key))
        indices = [leaf.index for leaf, _ in grouping.exact]
        exact = exact_reduce([values[i] for i in indices]) if indices else []
        values |= zip(indices, exact, strict=True)
        divisor, metrics = axis.size if op == "mean" else 1, sent is not None
        run = axis.program(_reduce_bucket)
        # JAX's collectives also run over axes of `jax.vmap`; push kernels do not.
        pushes = axis.groups is None and pk.needs_of_push(axis.names) is None
        nbytes = sum(bucket.nbytes for bucket in grouping.buckets)
        # Buckets keep their order: seeds[number] and after[number] belong to bucket ``number``.
        for number, bucket in enumerate(grouping.buckets):
            route = bucket.route
            method = route.runner.of_bucket(bucket)
            # Several large buckets overlap with each other, but not beside a push kernel.
            fits = pushes and route.pushed is not None and nbytes <= route.pushed[1]
            push = route.push if fits else None
            way = _Way(axis, method, route.flat, divisor, metrics, push, told.asks)
            x = concatenate(bucket, values)
            constants = lax.stop_gradient((x, seeds[number], after[number]))
            total, (after[number], facts) = run(*constants, way=way)
            known.append(facts)
            values |= split(bucket, with_tangent(exact_reduce, x, total))
    if sent is None:
        return values, after, None
    pairs = zip(known, grouping.buckets, strict=True)
    of_leaves = [of_all_parts(facts, bucket.axes) for facts, bucket in pairs]
    return values, after, summarise(of_leaves, bits_per_coord=sent[0], wire_bytes=sent[1])


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
