"""`psum` and `pmean` over pytrees, drop-in for `jax.lax`'s."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from dynamiq_jax import hierarchy
from dynamiq_jax._compat import AxisNames, zero_tangent
from dynamiq_jax.arguments import (
    AnyTopology,
    Resolved,
    axis_sizes,
    check_axis,
    check_state,
    check_varying,
    fold_seed,
    key_words,
    resolve,
)
from dynamiq_jax.buckets import describe_leaves, group_leaves, join, split
from dynamiq_jax.methods import Method, State
from dynamiq_jax.topologies import Hierarchical


def psum(
    tree: Any,
    axis_name: AxisNames,
    *,
    method: Method | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    state: State | None = None,
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
      method: how to compress; default ``DynamiQ()``, 5 bits per coordinate.
      topology: how payloads travel; `None` chooses by `dynamiq_jax.topologies.choice`.
      key: a PRNG key for the rounding, the same on all workers. Default: a hash of the
        all-reduced statistics, new whenever the gradient is.
      state: what a method with memory carries from step to step, see `init_state`.
      axis_index_groups: not supported; name an axis of the mesh instead.

    Returns:
      A tree like ``tree``; with ``state``, that and the next step's state.

    Raises:
      ValueError: a leaf does not vary over ``axis_name`` (its sum would be n times itself), or an
        argument is malformed.
      NotImplementedError: ``axis_index_groups``, or positional axes.
    """
    axis_name = check_axis(axis_name, axis_index_groups)
    return _reduce(tree, axis_name, method, topology, key, state, mean=False)


def pmean(
    tree: Any,
    axis_name: AxisNames,
    *,
    method: Method | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    state: State | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Averages every leaf over the mapped axis, compressed; see `psum` for everything else."""
    axis_name = check_axis(axis_name, axis_index_groups)
    return _reduce(tree, axis_name, method, topology, key, state, mean=True)


def init_state(
    tree, n_workers: int | tuple[int, ...], *, method: Method, topology: AnyTopology | None = None
) -> State:
    """The state that the first `psum` of ``tree`` takes: one worker's, for every bucket.

    Under `jax.shard_map` every worker keeps its own: let it vary over the axis, for example by
    calling this inside (the shapes of ``tree`` are all it looks at).

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s, as one worker passes them to `psum`.
      n_workers: the size of the axis, or of every axis, the outermost first.
      method: as for `psum`.
      topology: as for `psum`.
    """
    sizes = n_workers if isinstance(n_workers, tuple) else (n_workers,)
    resolved = resolve(method, topology, sizes)
    grouping = group_leaves(describe_leaves(tree), **resolved.limits()._asdict())
    return tuple(_init_bucket(bucket.size, resolved) for bucket in grouping.buckets)


def _init_bucket(size: int, resolved: Resolved) -> State:
    method, topology, _, sizes = resolved
    if isinstance(topology, Hierarchical):
        return method.init(hierarchy.slice_size(size, sizes[-1]), resolved.n_workers // sizes[-1])
    return method.init(size, resolved.n_workers)


def _reduce(tree, axis_name: AxisNames, method, topology, key, state, *, mean: bool):
    resolved = resolve(method, topology, axis_sizes(axis_name))
    n_workers = resolved.n_workers
    exact_reduce = lax.pmean if mean else lax.psum
    values, treedef = jax.tree.flatten(tree)
    leaves = describe_leaves(tree)
    check_varying(leaves, values, axis_name, n_workers)
    words = key_words(key)
    if n_workers == 1:
        total = exact_reduce(tree, axis_name)
        return total if state is None else (total, state)
    grouping = group_leaves(leaves, **resolved.limits()._asdict())
    states = check_state(state, len(grouping.buckets), resolved.method)
    if grouping.exact:
        indices = [leaf.index for leaf, _ in grouping.exact]
        exact = exact_reduce([values[i] for i in indices], axis_name)
        for i, value in zip(indices, exact, strict=True):
            values[i] = value
    for number, bucket in enumerate(grouping.buckets):
        seed = None if words is None else fold_seed(words, bucket.tag)
        flat, states[number] = with_tangent(
            functools.partial(_reduce_flat, axis_name=axis_name, resolved=resolved, mean=mean),
            functools.partial(exact_reduce, axis_name=axis_name),
        )(join(bucket, values), seed, states[number])
        for i, value in split(bucket, flat):
            values[i] = value
    total = jax.tree.unflatten(treedef, values)
    return total if state is None else (total, tuple(states))


def _reduce_flat(x, seed, state, *, axis_name: AxisNames, resolved: Resolved, mean: bool):
    method, topology, _, sizes = resolved
    options = {"seed": seed, "state": state, "divisor": resolved.n_workers if mean else 1}
    if isinstance(topology, Hierarchical):
        assert isinstance(axis_name, tuple)
        return hierarchy.all_reduce(
            x, axis_name, sizes=sizes, method=method, topology=topology, **options
        )
    n_workers = resolved.n_workers
    return method.all_reduce(x, axis_name, n_workers=n_workers, topology=topology, **options)


def with_tangent(compressed: Callable, exact: Callable) -> Callable:
    """``compressed(x, seed, state) -> (y, state)`` with the derivative of the linear ``exact(x)``.

    The new state counts as a constant.
    """
    reduce = jax.custom_jvp(compressed)

    @reduce.defjvp
    def _(primals, tangents):
        result, state = reduce(*primals)
        return (result, state), (exact(tangents[0]), jax.tree.map(zero_tangent, state))

    return reduce
