"""`psum` and `pmean` over pytrees, which replace `jax.lax`'s, and `reduce`, with more options."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from dynamiq_jax.compression.compression import AnyPolicy, as_compression, as_topology
from dynamiq_jax.core.axis import AxisName, is_outside
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.former import formerly
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.explicit_sums import reduce_outside
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.reduction.worker_gradients import WorkerTerms, reduce_terms
from dynamiq_jax.tree.leaves import Placement


@formerly(topology=as_topology)
def psum(
    x: Any,
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    specs: Any = None,
) -> Any:
    """Sums every leaf over the mapped axis, compressed; replaces `jax.lax.psum`.

    It runs inside `jax.shard_map` (also with ``check_vma=True`` and ``out_specs=P()``), `jax.pmap`
    and ``jax.vmap(axis_name=...)``. The result has the same bits on all workers. Every encoding is
    unbiased over the rounding's randomness (except for width 0). With ``rounding="independent"``
    the result is also unbiased. Paired roundings, the default, trade a little bias for much less
    error (`pallas_kernels.hashing`). A NaN or infinity on any worker makes its whole super-group
    NaN on all workers. The derivative is that of `jax.lax.psum`.

    A leaf that JAX knows to be the same on all workers (a constant; under ``check_vma=True`` a
    value that does not vary over the axis) is never compressed. Large leaves of this kind are
    usually gradients that JAX has summed already: `psum` refuses them, and `pmean` warns. A warning
    also names large leaves that are not compressed because of a limit (``min_bucket_size``,
    ``min_bucket_bytes``) that the caller did not set.

    Outside of maps `psum` sums the gradients that `value_and_grad` returns with ``unreduced=True``.
    On a mesh of Explicit axes it sums the leaves that are typed as unreduced over the data axes;
    other leaves are sums already.

    Args:
      x: any pytree. f32, bf16 and f16 leaves are compressed; the result has their dtype and shape.
        `jax.lax.psum` sums other dtypes, and leaves that are too small to gain, exactly. `explain`
        lists how each leaf is summed.
      axis_name: the mapped axis, or a tuple of axes; see `Hierarchical` for their order.
      compression: how to compress: a `Compression`, or only its method. Default: ``DynamiQ()``, 5
        bits per coordinate. Methods with memory need `reduce`. A function ``(path, leaf) ->
        method`` chooses a method for every leaf, and excludes leaves for which it returns `None`:
        ``lambda path, leaf: None if "norm" in path else dq.DynamiQ()``. A path is a string such as
        "layers/0/kernel", and a leaf is a `jax.ShapeDtypeStruct`.
      key: a PRNG key for the rounding, the same on all workers. A key that varies over the axis,
        according to JAX's types, is refused. If JAX does not track this (``check_vma=False``,
        `jax.pmap`, `jax.vmap`), ``DynamiQ(debug_checks=True)`` detects it. Default: a hash of the
        all-reduced statistics (for DynamiQ, sums of squares in bf16) and of the bucket's leaf
        names. It changes whenever the statistics change; methods without statistics round in the
        same way in every step.
      axis_index_groups: groups of workers of equal size, such as ``[[0, 1], [2, 3]]``; each group
        has its own sum. They work where `jax.lax.psum` accepts them: under `jax.pmap`, and under
        `jax.shard_map` with ``check_vma=False``.
      specs: PartitionSpecs of the leaves, a tree like ``x`` or a prefix of it. They are needed if
        `jax.shard_map` left axes of the mesh automatic (``axis_names={"data"}``): every device
        reduces its own part of a leaf, and JAX does not show how automatic axes split the leaf.
        Other axes in the specs are ignored; JAX's types show how Explicit axes split it. With
        ``check_vma=False`` the specs say which leaves are copies over other manual axes; without
        specs each leaf then travels in a bucket of its own. Outside of maps the specs say how sums
        are sharded, also over the summed axes. By default sums are sharded like their terms.

    Returns:
      A tree like ``x``.

    Raises:
      ValueError: a leaf that would be compressed does not vary over ``axis_name``, or has automatic
        axes around it and no ``specs``, or has a size that `jax.export` leaves open; ``key``
        varies over ``axis_name``; or an argument is malformed.
      NameError: ``axis_name`` is neither mapped nor an axis of an Explicit mesh.
      NotImplementedError: ``axis_index_groups`` are used elsewhere, or axes are positional.
    """
    axis = check_axis(axis_name, axis_index_groups)
    total = Reduction(axis, as_compression(compression), "sum", Placement(specs))
    return reducer_for(total, x)(x, key).tree


@formerly(topology=as_topology)
def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    specs: Any = None,
    weight: Array | float | None = None,
) -> Any:
    """Averages every leaf over the mapped axis, compressed; replaces `jax.lax.pmean`.

    It runs inside of maps. What `psum` says about bits, keys and leaves also holds here.

    Args:
      x: any pytree. f32, bf16 and f16 leaves are compressed; the result has their dtype and shape.
        Small leaves and other dtypes are averaged exactly, by the rules of `jax.lax.pmean`.
      axis_name: as for `psum`.
      compression: as for `psum`.
      key: as for `psum`.
      axis_index_groups: as for `psum`; each group has its own mean.
      specs: as for `psum`.
      weight: how much this worker counts, as for `reduce`: a scalar, such as its number of tokens.

    Returns:
      A tree like ``x``, with the same bits on all workers. With a ``weight`` it holds weighted
      means.

    Raises:
      ValueError: as for `psum`; a ``weight`` is not a scalar, or leaves are integers; or the call
        is outside of maps, where `psum` adds up terms of a mean.
      NameError: as for `psum`.
      NotImplementedError: as for `psum`.
    """
    axis = check_axis(axis_name, axis_index_groups)
    total = Reduction(axis, as_compression(compression), "mean", Placement(specs))
    return reducer_for(total, x)(x, key, weight=weight).tree


@formerly(topology=as_topology)
def reduce(
    tree: Any,
    axis_name: AxisName,
    *,
    op: Op = "mean",
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    state: State | None = None,
    metrics: bool = False,
    specs: Any = None,
    weight: Array | float | None = None,
) -> Reduced:
    """Sums or averages like `psum` and `pmean`, with states and metrics.

    Args:
      tree: as for `psum`.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      compression: as for `psum`.
      key: as for `psum`.
      state: the state of a method with memory: first that of `init_state`, then the one that the
        previous step returned.
      metrics: whether to return `Metrics`, at the cost of one pass over the result. If other axes
        split a leaf, they cover all of its parts.
      specs: as for `psum`.
      weight: this worker's weight in a mean: a nonnegative scalar, such as its number of tokens.
        The mean is the sum of weight times leaf, divided by the sum of weights. A worker of weight
        0 contributes nothing, not even NaN. If all weights are 0, the mean is 0. A negative,
        infinite or NaN weight makes the mean NaN on all workers. Leaves must be floating-point; for
        f16 leaves, n times their values must fit f16.

    Returns:
      The tree, the next step's state (`None` without ``state``) and the metrics.

    Raises:
      ValueError: as for `psum`; ``op`` is neither of these; a method needs a state, and none is
        passed; or a ``weight`` is not a scalar, or is for a sum or for integers.
    """
    total = Reduction(check_axis(axis_name), as_compression(compression), op, Placement(specs))
    return reducer_for(total, tree)(tree, key, state, metrics=metrics, weight=weight)


def reducer_for(total: Reduction, tree: Any) -> Callable[..., Reduced]:
    """The function that reduces ``tree``, by whether the call is inside of a map or outside."""
    is_terms = lambda x: isinstance(x, WorkerTerms)
    if any(map(is_terms, jax.tree.leaves(tree, is_leaf=is_terms))):
        return functools.partial(reduce_terms, total)
    if not is_outside(total.axis, tree):
        return total.reduce
    return functools.partial(reduce_outside, total)
