"""`psum` and `pmean` over pytrees, drop-in for `jax.lax`'s, and `reduce`, which knows more."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax import hierarchy
from dynamiq_jax._compat import AxisNames, zero_tangent
from dynamiq_jax.arguments import (
    AnyMethod,
    AnyTopology,
    Resolved,
    axis_counts,
    axis_sizes,
    check_axis,
    check_state,
    check_varying,
    resolve,
)
from dynamiq_jax.buckets import Grouping, Leaf, concatenate, group_leaves, split
from dynamiq_jax.by_path import by_path, join_reductions, join_states
from dynamiq_jax.explanation import explain_leaves
from dynamiq_jax.methods import State
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.metrics import (
    BucketMetrics,
    PayloadFacts,
    Reduced,
    bucket_metrics,
    of_all_parts,
    summarise,
)
from dynamiq_jax.placement import (
    Surroundings,
    bucket_axes,
    n_parts,
    placed_leaves,
    surroundings,
    told_specs,
)
from dynamiq_jax.seeds import fold_seed, key_words
from dynamiq_jax.topologies import Hierarchical

Op = Literal["sum", "mean"]


def psum(
    tree: Any,
    axis_name: AxisNames,
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    axis_index_groups: None = None,
    specs: Any = None,
) -> Any:
    """Sums every leaf over the mapped axis, compressed; stands where `jax.lax.psum` stood.

    Runs inside `jax.shard_map` (also with ``check_vma=True`` and ``out_specs=P()``), `jax.pmap`
    and ``jax.vmap(axis_name=...)``. The result has the same bits on all workers. Every encoding is
    unbiased over the rounding's randomness (but for width 0), and so is the result with
    ``rounding="independent"``; the paired roundings trade a little bias for much less error, see
    `pallas_kernels.hashing`. A NaN or infinity on any worker makes its whole super-group NaN on
    all. Differentiates as `jax.lax.psum` does.

    Args:
      tree: any pytree. f32, bf16 and f16 leaves are compressed and come back in their dtype and
        shape; other dtypes, and leaves too small to gain, are summed exactly by `jax.lax.psum`.
        `explain` lists which leaf goes which way.
      axis_name: the mapped axis, or a tuple of axes; see `Hierarchical` for which is which.
      method: how to compress; default ``DynamiQ()``, 5 bits per coordinate. Methods with memory
        take `reduce`. A function ``(path, leaf) -> method`` chooses for every leaf, and excludes
        those for which it returns `None`: ``lambda path, leaf: None if "norm" in path else
        dq.DynamiQ()``, for paths as "layers/0/kernel" and leaves as `jax.ShapeDtypeStruct`.
      topology: how payloads travel; `None` chooses by `dynamiq_jax.topologies.choice`.
      key: a PRNG key for the rounding, the same on all workers. Default: a hash of the
        all-reduced statistics, new whenever the gradient is.
      axis_index_groups: not supported; name an axis of the mesh instead.
      specs: PartitionSpecs of the leaves, a tree like ``tree`` or a prefix of it, where
        `jax.shard_map` left axes of the mesh automatic (``axis_names={"data"}``): there every
        device reduces its own part of a leaf, and JAX shows nobody how leaves are split. Axes other
        than these may be in it and do not count. Explicit axes are seen without it. With
        ``check_vma=False`` it tells which leaves are copies over other manual axes; leaves of which
        that is not known travel one by one.

    Returns:
      A tree like ``tree``.

    Raises:
      ValueError: a leaf does not vary over ``axis_name`` (its sum would be n times itself), is to
        be compressed over automatic axes without ``specs``, or an argument is malformed.
      NotImplementedError: ``axis_index_groups``, or positional axes.
    """
    axis_name = check_axis(axis_name, axis_index_groups)
    options = {"method": method, "topology": topology, "key": key, "specs": specs}
    return reduce(tree, axis_name, op="sum", **options).tree


def pmean(
    tree: Any,
    axis_name: AxisNames,
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    axis_index_groups: None = None,
    specs: Any = None,
) -> Any:
    """Averages every leaf over the mapped axis, compressed; see `psum` for everything else."""
    axis_name = check_axis(axis_name, axis_index_groups)
    options = {"method": method, "topology": topology, "key": key, "specs": specs}
    return reduce(tree, axis_name, op="mean", **options).tree


@by_path(join_reductions)
def reduce(
    tree: Any,
    axis_name: AxisNames,
    *,
    op: Op = "mean",
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    state: State | None = None,
    metrics: bool = False,
    specs: Any = None,
) -> Reduced:
    """`psum` or `pmean` for methods with memory, and for those who want to know what it did.

    Args:
      tree: as for `psum`.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      method: as for `psum`.
      topology: as for `psum`.
      key: as for `psum`.
      state: what a method with memory carries from step to step: `init_state`'s, then that of the
        step before.
      metrics: whether to return `Metrics`, at the cost of one pass over the result; of leaves that
        other axes split, those of all parts.
      specs: as for `psum`.

    Returns:
      The tree, the next step's state (`None` without ``state``) and the metrics.

    Raises:
      ValueError: ``op`` is neither, a method needs a state and has none, or as for `psum`.
    """
    axis_name = check_axis(axis_name)
    check_choice("op", op, get_args(Op))
    resolved = resolve(method, topology, axis_sizes(axis_name))
    around = surroundings(axis_name)
    leaves = around.leaves(tree, specs)
    grouping = group_leaves(leaves, **resolved.limits()._asdict())
    check_varying(leaves, jax.tree.leaves(tree), axis_name, resolved.n_workers)
    inside = [bucket_axes(bucket, around.open) for bucket in grouping.buckets]
    counts = [n_parts(axes, around.sizes) for axes in inside]
    first = functools.partial(_first_state, grouping, resolved, counts)
    states = check_state(state, first, resolved.method, resolved.n_workers)
    options = {"axis_name": axis_name, "resolved": resolved, "op": op, "metrics": metrics}
    run = functools.partial(_reduce_parts, leaves=leaves, grouping=grouping, **options)
    if grouping.buckets and around.open:
        opened = jax.tree.structure(tree).unflatten(told_specs(tree, specs, around, grouping))
        run = _over_open_axes(run, around, opened, inside)
    total, states, known = run(tree, key_words(key), states)
    found = None
    if metrics:
        sent = explain_leaves(leaves, resolved)
        bits, sent_bytes = sent.bits_per_coord, sent.wire_bytes
        found = summarise(known, bits_per_coord=bits, wire_bytes=sent_bytes)
    return Reduced(total, None if state is None else tuple(states), found)


def _reduce_parts(
    tree, words, states: list, *, leaves: list[Leaf], grouping: Grouping, axis_name: AxisNames,
    resolved: Resolved, op: Op, metrics: bool,
) -> tuple[Any, list, list[BucketMetrics]]:  # fmt: skip
    """What `reduce` does with what one device holds: the tree, the states, the metrics."""
    exact_reduce = functools.partial(lax.pmean if op == "mean" else lax.psum, axis_name=axis_name)
    values, treedef = jax.tree.flatten(tree)
    known: list[BucketMetrics] = []
    if resolved.n_workers == 1:
        if metrics:
            alone = PayloadFacts(error=0.0)
            for bucket in grouping.buckets:
                own = bucket_metrics(concatenate(bucket, values), alone)
                known.append(of_all_parts(own, bucket.axes))
        return exact_reduce(tree), states, known
    indices = [leaf.index for leaf, _ in grouping.exact]
    exact = exact_reduce([values[i] for i in indices]) if indices else []
    for i, value in zip(indices, exact, strict=True):
        values[i] = value
    after = []
    for bucket, state in zip(grouping.buckets, states, strict=True):
        seed = None if words is None else fold_seed(words, bucket.tag)
        options = {"axis_name": axis_name, "resolved": resolved, "op": op, "metrics": metrics}
        compressed = functools.partial(_reduce_flat, **options)
        flat, (state, of_bucket) = with_tangent(compressed, exact_reduce)(
            concatenate(bucket, values), seed, state
        )
        after.append(state)
        if metrics:
            known.append(of_all_parts(of_bucket, bucket.axes))
        for i, value in split(bucket, flat):
            values[i] = value
    return jax.tree.unflatten(treedef, values), after, known


def _over_open_axes(run: Callable, around: Surroundings, specs: Any, inside: list) -> Callable:
    """``run(tree, words, states)`` of what every device holds of a tree that is still whole.

    States of buckets whose parts differ have a leading axis of parts.
    """

    def each(f: Callable, states: list) -> list:
        return [jax.tree.map(f, x) if axes else x for x, axes in zip(states, inside, strict=True)]

    def of_part(tree, words, states):
        total, states, known = run(tree, words, each(lambda x: x[0], states))
        return total, each(lambda x: x[None], states), known

    of_states = [P(axes) if axes else P() for axes in inside]
    mapped = around.per_part(of_part, (specs, P(), of_states), (specs, of_states, P()))

    def of_whole(tree, words, states):
        pairs = zip(states, of_states, strict=True)
        return mapped(tree, words, [around.as_typed(state, spec) for state, spec in pairs])

    return of_whole


@by_path(join_states)
def init_state(
    tree: Any,
    n_workers: int | tuple[int, ...],
    *,
    method: AnyMethod | None,
    topology: AnyTopology | None = None,
    stacked: bool = False,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> State:
    """The state that the first `reduce` of ``tree`` takes, for every bucket.

    Under `jax.shard_map` every worker keeps its own. Called inside, cast it with
    ``jax.lax.pcast(state, axis_name, to="varying")`` (the shapes of ``tree`` are all that this
    looks at). Called outside, with ``stacked=True``, let every worker's part arise where it
    belongs: ``jax.jit(make, out_shardings=NamedSharding(mesh, P(axis_name)))()`` of a function that
    calls it.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s, as one worker passes them to `reduce`.
      n_workers: the size of the axis, or of every axis, the outermost first.
      method: as for `psum`.
      topology: as for `psum`.
      stacked: whether leaves have a leading axis of all workers, as `value_and_grad` takes them, or
        are one worker's.
      mesh: the mesh that ``specs`` are of; default: that of the surrounding `jax.shard_map`.
      specs: PartitionSpecs of the leaves over axes that are not reduced over, where there are any.
        The state of a bucket of split leaves has a leading axis of its parts (after that of the
        workers).
    """
    resolved = resolve(method, topology, axis_counts(n_workers))
    leaves, sizes = placed_leaves(tree, mesh, specs)
    grouping = group_leaves(leaves, **resolved.limits()._asdict())
    counts = [n_parts(bucket_axes(bucket, sizes), sizes) for bucket in grouping.buckets]
    state = _first_state(grouping, resolved, counts)
    if not stacked:
        return state
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (resolved.n_workers, *x.shape)), state)


def _first_state(grouping: Grouping, resolved: Resolved, counts: list[int]) -> tuple[State, ...]:
    """One worker's, for every bucket; of buckets in several parts, those of all parts."""
    method, topology, _, sizes = resolved

    def first(size: int, count: int) -> State:
        if isinstance(topology, Hierarchical):
            size, n = hierarchy.slice_size(size, sizes[-1]), resolved.n_workers // sizes[-1]
        else:
            n = resolved.n_workers
        state = method.init(size, n)
        if count == 1:
            return state
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state)

    pairs = zip(grouping.buckets, counts, strict=True)
    return tuple(first(bucket.size, count) for bucket, count in pairs)


def _reduce_flat(x, seed, state, *, axis_name: AxisNames, resolved: Resolved, op: Op, metrics):
    method, topology, _, sizes = resolved
    divisor = resolved.n_workers if op == "mean" else 1
    options = {"seed": seed, "state": state, "divisor": divisor, "metrics": metrics}
    if isinstance(topology, Hierarchical):
        assert isinstance(axis_name, tuple)
        outcome = hierarchy.all_reduce(
            x, axis_name, sizes=sizes, method=method, topology=topology, **options
        )
    else:
        n_workers = resolved.n_workers
        outcome = method.all_reduce(x, axis_name, n_workers=n_workers, topology=topology, **options)
    if not metrics:
        return outcome.value, (outcome.state, None)
    return outcome.value, (outcome.state, bucket_metrics(outcome.value, outcome.facts))


def with_tangent(compressed: Callable, exact: Callable) -> Callable:
    """``compressed(x, seed, state) -> (y, rest)`` with the derivative of the linear ``exact(x)``.

    The rest counts as a constant.
    """
    reduce_flat = jax.custom_jvp(compressed)

    @reduce_flat.defjvp
    def _(primals, tangents):
        result, rest = reduce_flat(*primals)
        return (result, rest), (exact(tangents[0]), jax.tree.map(zero_tangent, rest))

    return reduce_flat
