"""`psum_scatter` and `all_gather`: the halves of an all-reduce, for training with shards."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax.collectives.checks import Fixed, check_varying, fixed_leaves
from dynamiq_jax.collectives.in_maps import with_tangent
from dynamiq_jax.core.axis import Axis, AxisName, Varying
from dynamiq_jax.core.checks import axis_sizes, check_axis, check_groups
from dynamiq_jax.core.compat import inlined
from dynamiq_jax.core.seeds import Seed, bucket_seed, check_key, key_words
from dynamiq_jax.methods import Method, ShardedMethod
from dynamiq_jax.methods.base import Call, Limits, check_choice
from dynamiq_jax.methods.dynamiq.crossover import PSUM_BYTES, PSUM_SCATTER_BYTES
from dynamiq_jax.request.agreement import compare_first
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.request.routes import Route
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import (
    Bucket,
    Grouping,
    Leaf,
    concatenate,
    describe_leaves,
    from_flat,
    joined,
    to_flat,
)
from dynamiq_jax.tree.placement import check_whole

Tree = TypeVar("Tree")


def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    method: Compression | ShardedMethod | ByPath | None = None,
    topology: Topology | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Sums every leaf over the mapped axis and leaves worker i with the i-th slice of it.

    This is the reduce-scatter half of `psum`, with the semantics of `jax.lax.psum_scatter`. The sum
    of a slice is decoded by its owner and not encoded again. Widths are chosen for every slice
    apart, each at ``method.bits`` bits per coordinate, the statistics of the whole included. The
    derivative is that of `jax.lax.psum_scatter`.

    Args:
      x: any pytree; which leaves are compressed is as in `psum`. Slices of leaves other than
        along dimension 0, slices that are not a multiple of 256 coordinates, and a ``scale_axis``
        that is not the last one cost a copy.
      axis_name: the mapped axis; a tuple counts as one axis.
      scatter_dimension: the dimension of every leaf that is sliced; negative ones count from the
        last.
      tiled: if true the dimension is a multiple of the n workers and becomes 1/n of it, otherwise
        it is n and is removed.
      method: as for `psum`.
      topology: as for `psum`, but for `Hierarchical`.
      key: as for `psum`.
      axis_index_groups: as for `psum`, and with ``check_vma=True`` as well.

    Raises:
      ValueError: a leaf's dimension does not divide, a leaf that would be compressed does not vary
        over the axis, or an argument is malformed.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: ``axis_index_groups`` under `jax.vmap`, positional axes, or leaves to be
        compressed where `jax.shard_map` left axes of the mesh automatic or explicit.
    """
    axis = check_axis(axis_name, axis_index_groups)
    if not axis.names:
        return x
    request, sizes = as_compression(method, topology), axis_sizes(axis, "psum_scatter")
    n = math.prod(sizes)
    values, treedef = jax.tree.flatten(x)
    leaves = describe_leaves(x)
    told = {"key": key, "scatter_dimension": scatter_dimension, "tiled": tiled}
    compare_first("psum_scatter", axis, leaves, facts_of(request, axis, sizes, leaves, told))
    check_groups(axis, all_reduce=False)
    whole = group_parts(request, leaves, sizes, Route.scattered_bits)
    for leaf in leaves:
        _check_divides(leaf, scatter_dimension, n, tiled=tiled)
    check_key(key, axis)
    fixed = fixed_leaves(leaves, values, axis)
    check_varying(whole, fixed, axis)
    options = {"fixed": fixed, "methods": whole.methods}
    grouping = group_parts(request, leaves, sizes, Route.scattered_bits, **options)
    check_whole(grouping, axis)
    run = _scatter_leaves if axis.several_vmapped else _scatter_compiled
    options = {"scatter_dimension": scatter_dimension, "tiled": tiled, "n_workers": n}
    values = run(values, key, grouping=grouping, axis=axis, **options)
    return jax.tree.unflatten(treedef, values)


def _scatter_leaves(
    values: list[Array],
    key: Array | None,
    *,
    grouping: Grouping,
    axis: Axis,
    scatter_dimension: int,
    tiled: bool,
    n_workers: int,
) -> list[Array]:
    n, words, values = n_workers, key_words(key), list(values)

    cut: dict[str, Any] = {"dimension": scatter_dimension, "n_workers": n, "tiled": tiled}

    for leaf, _ in grouping.exact:
        total = axis.psum_scatter(slices_of(values[leaf.index], leaf, **cut))
        values[leaf.index] = from_flat(total, slice_of(leaf, **cut))
    for bucket in grouping.buckets:
        parts = [slices_of(values[leaf.index], leaf, **cut) for leaf in bucket.leaves]
        x = joined(parts)
        exact = axis.psum_scatter
        method, topology = bucket.route.halves()
        run = _scatter_bucket if axis.several_vmapped else _scatter_alike
        compressed = functools.partial(run, axis=axis, method=method, topology=topology)
        total = (exact if n == 1 else _with_seed(compressed, exact, words, bucket))(x)
        start = 0
        for leaf, part in zip(bucket.leaves, parts, strict=True):
            stop = start + part.shape[1]
            values[leaf.index] = from_flat(total[start:stop], slice_of(leaf, **cut))
            start = stop
    return values


def slices_of(x: Array, leaf: Leaf, dimension: int, n_workers: int, *, tiled: bool) -> Array:
    """Slices of a leaf as rows: [n, coordinates of a slice]."""
    at, shape = dimension % len(leaf.shape), list(leaf.shape)
    shape[at : at + 1] = [n_workers, shape[at] // n_workers] if tiled else [n_workers]
    slices = jnp.moveaxis(x.reshape(shape), at, 0)
    return to_flat(slices, slice_of(leaf, dimension, n_workers, tiled=tiled))


def slice_of(leaf: Leaf, dimension: int, n_workers: int, *, tiled: bool) -> Leaf:
    """The slice of a leaf for one worker; the last axis stands for a scale axis that is gone."""
    shape, axis, dimension = list(leaf.shape), leaf.scale_axis, dimension % len(leaf.shape)
    if tiled:
        shape[dimension] //= n_workers
    else:
        del shape[dimension]
        if axis is not None:
            axis = None if axis == dimension else axis - (axis > dimension)
    return replace(leaf, shape=tuple(shape), scale_axis=axis)


def _scatter_bucket(
    x: Array, seed: Seed, *, axis: Axis, method: ShardedMethod, topology: Topology | None
) -> Array:
    return method.reduce_scatter(x, Call(axis, topology, seed))


# Buckets of the same size are traced and lowered once, as in `in_maps`.
_scatter_alike = jax.jit(_scatter_bucket, static_argnames=("axis", "method", "topology"))

_scatter_compiled = inlined(
    _scatter_leaves,
    static_argnames=("grouping", "axis", "scatter_dimension", "tiled", "n_workers"),
)


def all_gather(
    x: Tree,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: Varying = "varying",
    method: Compression | ShardedMethod | ByPath | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Gathers every worker's leaves, quantised: all workers end with the same bits.

    The semantics are those of `jax.lax.all_gather`, and the result is its result with unbiased
    noise: every worker encodes its shard once, at ``method.bits`` bits per coordinate with widths
    from that shard's own statistics. The derivative is that of `jax.lax.all_gather`: cotangents are
    summed exactly, in their dtype.

    Parameters, unlike gradients, are of even energy: widths close to ``bits`` serve them best, as
    ``DynamiQ(bits=8)``.

    Args:
      x: any pytree of shards, of equal shapes on all workers; which leaves are compressed is as
        in `psum`, for the gathered leaf.
      axis_name: the mapped axis; a tuple counts as one axis.
      axis: the dimension along which shards are put together.
      tiled: whether they are concatenated along it, or stacked as a new one.
      to: what the result is over the axis where JAX tracks it, as `jax.lax.all_gather` has it:
        "varying", "invarying" (replicated) or "reduced"; elsewhere of no effect.
      method: as for `psum`.
      key: as for `psum`.
      axis_index_groups: as for `psum_scatter`; then ``to`` is "varying".

    Raises:
      ValueError: a leaf does not have the axis, or an argument is malformed.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: ``axis_index_groups`` under `jax.vmap` or with ``to``, positional axes,
        or leaves to be compressed where `jax.shard_map` left axes of the mesh automatic or
        explicit.
    """
    workers = check_axis(axis_name, axis_index_groups)
    check_choice("to", to, get_args(Varying))
    if not workers.names:
        return x
    request = replace(as_compression(method), topology=None)
    sizes = axis_sizes(workers, "all_gather")
    values, treedef = jax.tree.flatten(x)
    leaves = describe_leaves(x)
    told = {"key": key, "axis": axis, "tiled": tiled, "to": to}
    compare_first("all_gather", workers, leaves, facts_of(request, workers, sizes, leaves, told))
    check_groups(workers, all_reduce=False)
    if to != "varying" and workers.groups is not None:
        raise NotImplementedError(
            f"to={to!r}: what is gathered within axis_index_groups={workers.groups} varies "
            "between them; pass to='varying', or give each group an axis of its own"
        )
    for leaf in leaves:
        if not -len(leaf.shape) - (not tiled) <= axis < len(leaf.shape) + (not tiled):
            raise ValueError(
                f"axis={axis}: leaf {leaf.name} has shape {leaf.shape}; pass an axis that every "
                "leaf has, or gather such leaves apart"
            )
    check_key(key, workers)
    n = math.prod(sizes)
    fixed = fixed_leaves(leaves, values, workers)
    grouping = group_parts(request, leaves, sizes, Route.gathered_bits, fixed=fixed, shards=n)
    check_whole(grouping, workers)
    run = _gather_leaves if workers.several_vmapped else _gather_compiled
    options = {"axis": axis, "tiled": tiled, "to": to, "n_workers": n}
    values = run(values, key, grouping=grouping, workers=workers, **options)
    return jax.tree.unflatten(treedef, values)


def _gather_leaves(
    values: list[Array],
    key: Array | None,
    *,
    grouping: Grouping,
    workers: Axis,
    axis: int,
    tiled: bool,
    to: Varying,
    n_workers: int,
) -> list[Array]:
    n, words, values = n_workers, key_words(key), list(values)

    def back(leaf: Leaf, gathered):
        ndim = len(leaf.shape) + 1
        at = axis % ndim if not tiled else axis % (ndim - 1)
        whole = jnp.moveaxis(gathered, 0, at)
        if not tiled:
            return whole
        shape = list(leaf.shape)
        shape[at] *= n
        return whole.reshape(shape)

    def exact(x: Array) -> Array:
        return workers.all_gather(x, to)

    for leaf, _ in grouping.exact:
        values[leaf.index] = back(leaf, exact(jnp.asarray(values[leaf.index])))
    for bucket in grouping.buckets:
        x = concatenate(bucket, dict(enumerate(values)))
        run = _gather_bucket if workers.several_vmapped else _gather_alike
        method, _ = bucket.route.halves()
        compressed = functools.partial(run, workers=workers, method=method, to=to)
        gathered = (exact if n == 1 else _with_seed(compressed, exact, words, bucket))(x)
        start = 0
        for leaf in bucket.leaves:
            stop = start + leaf.size
            own = from_flat(gathered[:, start:stop], leaf)
            values[leaf.index], start = back(leaf, own), stop
    return values


def _gather_bucket(
    x: Array, seed: Seed, *, workers: Axis, method: ShardedMethod, to: Varying
) -> Array:
    whole = method.all_gather(x, Call(workers, None, seed), invarying=to != "varying")
    return workers.gathered_as(whole, to)


_gather_alike = jax.jit(_gather_bucket, static_argnames=("workers", "method", "to"))
_gather_compiled = inlined(
    _gather_leaves,
    static_argnames=("grouping", "workers", "axis", "tiled", "to", "n_workers"),
)


def group_parts(
    request: Compression,
    leaves: list[Leaf],
    sizes: tuple[int, ...],
    bits_of: Callable[[Route, Bucket], float],
    *,
    fixed: Fixed | None = None,
    methods: Sequence[Method | None] | None = None,
    shards: int = 1,
    check: Callable[[Route], object] = Route.halves,
) -> Grouping:
    """Buckets of the leaves that are not fixed; those travel exactly.

    Half of an all-reduce pays on fast links from larger buckets on. With ``shards`` the limits are
    those of leaves that are so many times as large. ``bits_of`` tells the wire bits per coordinate,
    of which bf16 takes 16. ``check`` refuses methods that cannot serve.
    """

    def limits_of(route: Route) -> Limits:
        check(route)
        limits = route.limits
        least = limits.min_bucket_bytes * PSUM_SCATTER_BYTES // PSUM_BYTES
        bucket = max(limits.bucket_bytes, 2 * least)
        limits = limits._replace(min_bucket_bytes=least, bucket_bytes=bucket)
        return Limits(*(-(-limit // shards) for limit in limits))

    fixed = fixed or {}
    options = {"methods": methods, "without": fixed, "limits_of": limits_of, "bits_of": bits_of}
    found = request.group(leaves, sizes, **options, hierarchies=False)
    kept = tuple((leaf, "not compressed") for leaf in leaves if leaf.index in fixed)
    return found._replace(exact=found.exact + kept)


def facts_of(
    request: Compression, axis: Axis, sizes: tuple[int, ...], leaves: list[Leaf], told: dict
) -> Callable[[], dict[str, str]]:
    """Returns a function that tells the facts of a call, for `compare_first`."""
    return lambda: request.facts(axis, sizes, leaves, hierarchies=False, **told)


def _with_seed(compressed, exact, words, bucket: Bucket):
    """``compressed`` with the bucket's seed and the derivative of ``exact``."""
    seed = bucket_seed(words, bucket.tag)

    def stateless(x: Array, seed: Seed, state: tuple) -> tuple[Array, tuple]:
        return compressed(x, seed), state

    return lambda x: with_tangent(stateless, exact)(x, seed, ())[0]


def _check_divides(leaf: Leaf, dimension: int, n_workers: int, *, tiled: bool) -> None:
    if not -len(leaf.shape) <= dimension < len(leaf.shape):
        raise ValueError(
            f"scatter_dimension={dimension}: leaf {leaf.name} has shape {leaf.shape}; pass a "
            "dimension that every leaf has, or scatter such leaves apart"
        )
    length = leaf.shape[dimension]
    if tiled and length % n_workers:
        raise ValueError(
            f"leaf {leaf.name} has {length} entries along scatter_dimension={dimension}, which is "
            f"not a multiple of the {n_workers} workers; pad it, or reduce it with dq.psum"
        )
    if not tiled and length != n_workers:
        raise ValueError(
            f"leaf {leaf.name} has {length} entries along scatter_dimension={dimension} and "
            f"tiled=False needs one for each of the {n_workers} workers; pass tiled=True"
        )
