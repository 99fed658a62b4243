"""`psum_scatter` and `all_gather`: the halves of an all-reduce, for training with shards."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax import _compat
from dynamiq_jax._compat import AxisNames
from dynamiq_jax.arguments import (
    ByPath,
    Resolved,
    axis_sizes,
    check_axis,
    check_varying,
    resolve,
    sharded,
)
from dynamiq_jax.buckets import Bucket, Leaf, describe_leaves, group_leaves
from dynamiq_jax.by_path import by_path, join_trees
from dynamiq_jax.collectives import with_tangent
from dynamiq_jax.methods import ShardedMethod
from dynamiq_jax.placement import check_whole
from dynamiq_jax.seeds import fold_seed, key_words
from dynamiq_jax.topologies import Topology

Tree = TypeVar("Tree")


@by_path(join_trees)
def psum_scatter(
    tree: Tree,
    axis_name: AxisNames,
    *,
    scatter_dimension: int = 0,
    tiled: bool = True,
    method: ShardedMethod | ByPath | None = None,
    topology: Topology | None = None,
    key: Array | None = None,
    axis_index_groups: None = None,
) -> Tree:
    """Sums every leaf over the mapped axis and leaves worker i with the i-th slice of it.

    The reduce-scatter half of `psum`, with the semantics of `jax.lax.psum_scatter` (whose default
    is ``tiled=False``). The sum of a slice is decoded by its owner and not encoded again. Widths
    are chosen for every slice apart, each at ``method.bits`` bits per coordinate, the statistics
    of the whole included. Differentiates as `jax.lax.psum_scatter` does.

    Args:
      tree: any pytree; which leaves are compressed is as in `psum`. Slices of leaves other than
        along dimension 0, and slices that are no multiple of 256 coordinates, cost a copy.
      axis_name: the mapped axis; a tuple counts as one axis.
      scatter_dimension: the dimension of every leaf that is sliced.
      tiled: if true the dimension is a multiple of the n workers and becomes 1/n of it, otherwise
        it is n and is removed.
      method: as for `psum`.
      topology: as for `psum`, but for `Hierarchical`.
      key: as for `psum`.
      axis_index_groups: not supported; name an axis of the mesh instead.

    Raises:
      ValueError: a leaf's dimension does not divide, does not vary over the axis, or an argument
        is malformed.
      NotImplementedError: ``axis_index_groups``, positional axes, or leaves to be compressed where
        `jax.shard_map` left axes of the mesh automatic or explicit.
    """
    axis_name = check_axis(axis_name, axis_index_groups)
    resolved = resolve(method, topology, axis_sizes(axis_name), hierarchies=False)
    n = resolved.n_workers
    values, treedef = jax.tree.flatten(tree)
    leaves = describe_leaves(tree)
    check_varying(leaves, values, axis_name, n)
    for leaf in leaves:
        _check_divides(leaf, scatter_dimension, n, tiled=tiled)
    words = key_words(key)

    def rows(value):
        """Slices as rows: [n, coordinates of a slice]."""
        return jnp.moveaxis(value, scatter_dimension, 0).reshape(n, -1)

    def back(leaf: Leaf, part):
        shape = list(leaf.shape)
        length = shape.pop(scatter_dimension)
        if not tiled:
            return part.reshape(shape)
        return jnp.moveaxis(part.reshape(length // n, *shape), 0, scatter_dimension)

    def exact(x):
        return _compat.psum_scatter(x, axis_name)

    chosen, route = sharded(resolved)
    assert route is not None

    def compressed(x, seed):
        return chosen.reduce_scatter(x, axis_name, n_workers=n, topology=route, seed=seed)

    grouping = group_leaves(leaves, **_limits(resolved))
    check_whole(grouping, axis_name)
    for leaf, _ in grouping.exact:
        values[leaf.index] = back(leaf, exact(rows(values[leaf.index])))
    for bucket in grouping.buckets:
        parts = [rows(values[leaf.index]) for leaf in bucket.leaves]
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        total = (exact if n == 1 else _with_seed(compressed, exact, words, bucket))(x)
        start = 0
        for leaf, part in zip(bucket.leaves, parts, strict=True):
            stop = start + part.shape[1]
            values[leaf.index], start = back(leaf, total[start:stop]), stop
    return jax.tree.unflatten(treedef, values)


@by_path(join_trees)
def all_gather(
    tree: Tree,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    tiled: bool = True,
    method: ShardedMethod | ByPath | None = None,
    key: Array | None = None,
    axis_index_groups: None = None,
) -> Tree:
    """Gathers every worker's leaves, quantised: all workers end with the same bits.

    The semantics are those of `jax.lax.all_gather` (whose default is ``tiled=False``), the result
    that of it plus unbiased noise: every worker encodes its shard once, at ``method.bits`` bits per
    coordinate with widths from that shard's own statistics. Differentiates as
    `jax.lax.all_gather` does: the cotangents are summed exactly, in their dtype.

    Parameters, unlike gradients, are of even energy: widths close to ``bits`` serve them best, as
    ``DynamiQ(bits=8)``.

    Args:
      tree: any pytree of shards, of equal shapes on all workers; which leaves are compressed is as
        in `psum`, for the gathered leaf.
      axis_name: the mapped axis; a tuple counts as one axis.
      axis: the dimension along which shards are put together.
      tiled: whether they are concatenated along it, or stacked as a new one.
      method: as for `psum`.
      key: as for `psum`.
      axis_index_groups: not supported; name an axis of the mesh instead.

    Raises:
      ValueError: a leaf does not have the axis, or an argument is malformed.
      NotImplementedError: ``axis_index_groups``, positional axes, or leaves to be compressed where
        `jax.shard_map` left axes of the mesh automatic or explicit.
    """
    axis_name = check_axis(axis_name, axis_index_groups)
    resolved = resolve(method, None, axis_sizes(axis_name), hierarchies=False)
    n = resolved.n_workers
    values, treedef = jax.tree.flatten(tree)
    leaves = describe_leaves(tree)
    words = key_words(key)
    for leaf in leaves:
        if not -len(leaf.shape) - (not tiled) <= axis < len(leaf.shape) + (not tiled):
            raise ValueError(
                f"axis={axis}: leaf {leaf.name} has shape {leaf.shape}; pass an axis that every "
                "leaf has, or gather such leaves apart"
            )

    def back(leaf: Leaf, gathered):
        ndim = len(leaf.shape) + 1
        at = axis % ndim if not tiled else axis % (ndim - 1)
        whole = jnp.moveaxis(gathered.reshape(n, *leaf.shape), 0, at)
        if not tiled:
            return whole
        shape = list(leaf.shape)
        shape[at] *= n
        return whole.reshape(shape)

    def exact(x):
        return _compat.all_gather(x, axis_name)

    chosen, _ = sharded(resolved)

    def compressed(x, seed):
        return chosen.all_gather(x, axis_name, n_workers=n, seed=seed)

    limits = {name: -(-limit // n) for name, limit in _limits(resolved).items()}  # of a shard
    grouping = group_leaves(leaves, **limits)
    check_whole(grouping, axis_name)
    for leaf, _ in grouping.exact:
        values[leaf.index] = back(leaf, exact(jnp.asarray(values[leaf.index])))
    for bucket in grouping.buckets:
        parts = [values[leaf.index].reshape(-1) for leaf in bucket.leaves]
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        gathered = (exact if n == 1 else _with_seed(compressed, exact, words, bucket))(x)
        start = 0
        for leaf in bucket.leaves:
            stop = start + leaf.size
            values[leaf.index], start = back(leaf, gathered[:, start:stop]), stop
    return jax.tree.unflatten(treedef, values)


def _limits(resolved: Resolved) -> dict[str, int]:
    """Those of the all-reduce, but that half of it pays on fast links from larger buckets on.

    Statistics and plan are the same work for half the traffic: on eight H200 with NVLink
    `psum_scatter` overtakes the native one at 2 to 3 times the size at which `psum` does.
    """
    limits = resolved.limits()._asdict()
    limits["min_bucket_bytes"] *= 3
    limits["bucket_bytes"] = max(limits["bucket_bytes"], 2 * limits["min_bucket_bytes"])
    return limits


def _with_seed(compressed, exact, words, bucket: Bucket):
    """``compressed`` with the bucket's seed and the derivative of ``exact``."""
    seed = None if words is None else fold_seed(words, bucket.tag)

    def stateless(x, seed, state):
        return compressed(x, seed), state

    return lambda x: with_tangent(stateless, exact)(x, seed, ())[0]


def _check_divides(leaf: Leaf, dimension: int, n_workers: int, *, tiled: bool) -> None:
    if not 0 <= dimension < len(leaf.shape):
        raise ValueError(
            f"scatter_dimension={dimension}: leaf {leaf.name} has shape {leaf.shape}; pass a "
            "dimension that every leaf has, or scatter such leaves apart"
        )
    length = leaf.shape[dimension]
    if tiled and length % n_workers:
        raise ValueError(
            f"leaf {leaf.name} has {length} entries along scatter_dimension={dimension}, which is "
            f"no multiple of the {n_workers} workers; pad it, or reduce it with dq.psum"
        )
    if not tiled and length != n_workers:
        raise ValueError(
            f"leaf {leaf.name} has {length} entries along scatter_dimension={dimension} and "
            f"tiled=False needs one for each of the {n_workers} workers; pass tiled=True"
        )
