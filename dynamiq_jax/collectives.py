"""`psum` and `pmean` over pytrees, drop-in for `jax.lax`'s, and `reduce`, which knows more."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

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
from dynamiq_jax.buckets import Grouping, concatenate, describe_leaves, group_leaves, split
from dynamiq_jax.by_path import by_path, join_reductions, join_states
from dynamiq_jax.explanation import explain
from dynamiq_jax.methods import State
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.metrics import (
    BucketMetrics,
    PayloadFacts,
    Reduced,
    bucket_metrics,
    summarise,
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

    Returns:
      A tree like ``tree``.

    Raises:
      ValueError: a leaf does not vary over ``axis_name`` (its sum would be n times itself), or an
        argument is malformed.
      NotImplementedError: ``axis_index_groups``, or positional axes.
    """
    axis_name = check_axis(axis_name, axis_index_groups)
    options = {"method": method, "topology": topology, "key": key}
    return reduce(tree, axis_name, op="sum", **options).tree


def pmean(
    tree: Any,
    axis_name: AxisNames,
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Averages every leaf over the mapped axis, compressed; see `psum` for everything else."""
    axis_name = check_axis(axis_name, axis_index_groups)
    options = {"method": method, "topology": topology, "key": key}
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
      metrics: whether to return `Metrics`, at the cost of one pass over the result.

    Returns:
      The tree, the next step's state (`None` without ``state``) and the metrics.

    Raises:
      ValueError: ``op`` is neither, a method needs a state and has none, or as for `psum`.
    """
    axis_name = check_axis(axis_name)
    check_choice("op", op, get_args(Op))
    resolved = resolve(method, topology, axis_sizes(axis_name))
    n_workers, exact_reduce = resolved.n_workers, lax.pmean if op == "mean" else lax.psum
    values, treedef = jax.tree.flatten(tree)
    leaves = describe_leaves(tree)
    check_varying(leaves, values, axis_name, n_workers)
    words = key_words(key)
    grouping = group_leaves(leaves, **resolved.limits()._asdict())
    first = functools.partial(_first_state, grouping, resolved)
    states = check_state(state, first, resolved.method, n_workers)
    known: list[BucketMetrics] = []
    if n_workers == 1:
        total = exact_reduce(tree, axis_name)
        if metrics:
            alone = PayloadFacts(error=0.0)
            buckets = [concatenate(bucket, values) for bucket in grouping.buckets]
            known = [bucket_metrics(bucket, alone) for bucket in buckets]
    else:
        indices = [leaf.index for leaf, _ in grouping.exact]
        exact = exact_reduce([values[i] for i in indices], axis_name) if indices else []
        for i, value in zip(indices, exact, strict=True):
            values[i] = value
        for number, bucket in enumerate(grouping.buckets):
            seed = None if words is None else fold_seed(words, bucket.tag)
            options = {"axis_name": axis_name, "resolved": resolved, "op": op, "metrics": metrics}
            flat, (states[number], of_bucket) = with_tangent(
                functools.partial(_reduce_flat, **options),
                functools.partial(exact_reduce, axis_name=axis_name),
            )(concatenate(bucket, values), seed, states[number])
            known.append(of_bucket)
            for i, value in split(bucket, flat):
                values[i] = value
        total = jax.tree.unflatten(treedef, values)
    found = None
    if metrics:
        sent = explain(tree, resolved.sizes, method=method, topology=topology, verbose=False)
        bits, sent_bytes = sent.bits_per_coord, sent.wire_bytes
        found = summarise(known, bits_per_coord=bits, wire_bytes=sent_bytes)
    return Reduced(total, None if state is None else tuple(states), found)


@by_path(join_states)
def init_state(
    tree: Any,
    n_workers: int | tuple[int, ...],
    *,
    method: AnyMethod | None,
    topology: AnyTopology | None = None,
    stacked: bool = False,
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
    """
    resolved = resolve(method, topology, axis_counts(n_workers))
    grouping = group_leaves(describe_leaves(tree), **resolved.limits()._asdict())
    state = _first_state(grouping, resolved)
    if not stacked:
        return state
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (resolved.n_workers, *x.shape)), state)


def _first_state(grouping: Grouping, resolved: Resolved) -> tuple[State, ...]:
    """One worker's, for every bucket."""
    method, topology, _, sizes = resolved
    if not isinstance(topology, Hierarchical):
        return tuple(method.init(bucket.size, resolved.n_workers) for bucket in grouping.buckets)
    n_outer = resolved.n_workers // sizes[-1]
    slices = (hierarchy.slice_size(bucket.size, sizes[-1]) for bucket in grouping.buckets)
    return tuple(method.init(size, n_outer) for size in slices)


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
