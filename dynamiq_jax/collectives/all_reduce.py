"""`psum` and `pmean` over pytrees, drop-in for `jax.lax`'s, and `reduce`, which knows more."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from dynamiq_jax.collectives.explicit_sums import is_outside, reduce_outside
from dynamiq_jax.collectives.reduction import Reduction
from dynamiq_jax.collectives.worker_gradients import WorkerGradients, reduce_terms
from dynamiq_jax.core.axis import AxisName
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.methods import Method, State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.topologies import AnyTopology


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    compression: Compression | Method | ByPath | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    specs: Any = None,
    method: Compression | Method | ByPath | None = None,
) -> Any:
    """Sums every leaf over the mapped axis, compressed; replaces `jax.lax.psum`.

    It runs inside `jax.shard_map` (also with ``check_vma=True`` and ``out_specs=P()``), `jax.pmap`
    and ``jax.vmap(axis_name=...)``. The result has the same bits on all workers. Every encoding is
    unbiased over the rounding's randomness (but for width 0). With ``rounding="independent"`` the
    result is unbiased, too. Paired roundings, the default, trade a little bias for much less error
    (`pallas_kernels.hashing`). A NaN or infinity on any worker makes its whole super-group NaN on
    all. The derivative is that of `jax.lax.psum`.

    A leaf that JAX knows to be the same on all workers (a constant; under ``check_vma=True`` a
    value that does not vary over the axis) is never compressed. Large leaves of that kind are
    mostly gradients that JAX has summed already: `psum` refuses them, and `pmean` warns. A warning
    also names large leaves that are not compressed because of a limit (``min_bucket_size``,
    ``min_bucket_bytes``) that the caller did not set.

    Outside of maps it sums the gradients that `value_and_grad` returns with ``reduce=False``. On a
    mesh of Explicit axes these are leaves that JAX's types call unreduced over the data axes; other
    leaves are sums already.

    Args:
      x: any pytree. f32, bf16 and f16 leaves are compressed and come back in their dtype and
        shape; other dtypes, and leaves too small to gain, are summed exactly by `jax.lax.psum`.
        `explain` lists which leaf goes which way.
      axis_name: the mapped axis, or a tuple of axes; see `Hierarchical` for which is which.
      compression: how to compress: a `Compression`, or its method alone. Default ``DynamiQ()``,
        5 bits per coordinate. Methods with memory take `reduce`. A function ``(path, leaf) ->
        method`` chooses for every leaf, and excludes those for which it returns `None`: ``lambda
        path, leaf: None if "norm" in path else dq.DynamiQ()``, for paths as "layers/0/kernel" and
        leaves as `jax.ShapeDtypeStruct`.
      topology: how payloads travel; `None` chooses by `dynamiq_jax.topologies.choice`.
      key: a PRNG key for the rounding, the same on all workers. A key that JAX knows to vary over
        the axis is refused. Where JAX does not track this (``check_vma=False``, `jax.pmap`,
        `jax.vmap`) ``DynamiQ(debug_checks=True)`` finds it. Default: a hash of the all-reduced
        statistics (for DynamiQ sums of squares in bf16) and of the bucket's leaf names. It is new
        whenever the statistics are; methods without statistics round alike in every step.
      axis_index_groups: groups of workers of equal size, such as ``[[0, 1], [2, 3]]``; each sums
        for itself. They serve where `jax.lax.psum` takes them: `jax.pmap`, and `jax.shard_map` with
        ``check_vma=False``.
      specs: PartitionSpecs of the leaves, a tree like ``x`` or a prefix of it. It is needed where
        `jax.shard_map` left axes of the mesh automatic (``axis_names={"data"}``): every device
        reduces its own part of a leaf, and JAX does not show how automatic axes split it. Other
        axes in it do not count. Types show Explicit axes. With ``check_vma=False`` it tells which
        leaves are copies over other manual axes; without it each leaf then travels alone. Outside
        of maps it says how sums are sharded, over the summed axes, too. By default sums are
        sharded as their terms.
      method: the former name of ``compression``. It warns, and goes with the next version.

    Returns:
      A tree like ``x``.

    Raises:
      ValueError: a leaf that would be compressed does not vary over ``axis_name``, or has automatic
        axes around it and no ``specs``; ``key`` varies over ``axis_name``; or an argument is
        malformed.
      NameError: ``axis_name`` is not mapped, and no axis of an Explicit mesh.
      NotImplementedError: ``axis_index_groups`` elsewhere, or positional axes.
    """
    axis = check_axis(axis_name, axis_index_groups)
    total = Reduction(
        axis, as_compression(compression, topology, method=method), "sum", specs=specs
    )
    return reducer_for(total, x)(x, key).tree


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    compression: Compression | Method | ByPath | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    specs: Any = None,
    weight: Array | float | None = None,
    method: Compression | Method | ByPath | None = None,
) -> Any:
    """Averages every leaf over the mapped axis, compressed; replaces `jax.lax.pmean`.

    It runs inside of maps, and all that `psum` says of bits, keys and leaves holds.

    Args:
      x: any pytree. f32, bf16 and f16 leaves are compressed and come back in their dtype and shape.
        Small ones and other dtypes are averaged exactly, by `jax.lax.pmean`'s rules.
      axis_name: as for `psum`.
      compression: as for `psum`.
      topology: as for `psum`.
      key: as for `psum`.
      axis_index_groups: as for `psum`; each group averages for itself.
      specs: as for `psum`.
      weight: how much this worker counts, as for `reduce`: a scalar, such as its number of tokens.
      method: the former name of ``compression``. It warns, and goes with the next version.

    Returns:
      A tree like ``x``, with the same bits on all workers. With a ``weight`` it is the weighted
      mean.

    Raises:
      ValueError: as for `psum`; a ``weight`` is not a scalar, or is for leaves of integers; or the
        call is outside of maps, where `psum` adds up what is a mean already.
      NameError: as for `psum`.
      NotImplementedError: as for `psum`.
    """
    axis = check_axis(axis_name, axis_index_groups)
    total = Reduction(
        axis, as_compression(compression, topology, method=method), "mean", specs=specs
    )
    return reducer_for(total, x)(x, key, weight=weight).tree


def reduce(
    tree: Any,
    axis_name: AxisName,
    *,
    op: Op = "mean",
    compression: Compression | Method | ByPath | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    state: State | None = None,
    metrics: bool = False,
    specs: Any = None,
    weight: Array | float | None = None,
    method: Compression | Method | ByPath | None = None,
) -> Reduced:
    """Sums or averages as `psum` and `pmean` do; takes and returns states, and returns metrics.

    Args:
      tree: as for `psum`.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      compression: as for `psum`.
      topology: as for `psum`.
      key: as for `psum`.
      state: what a method with memory carries from step to step: `init_state`'s, then that of the
        step before.
      metrics: whether to return `Metrics`, at the cost of one pass over the result. They cover all
        parts of leaves that other axes split.
      specs: as for `psum`.
      weight: how much this worker counts in a mean: a scalar that is not negative, such as its
        number of tokens. The mean is the sum of weight times leaf over the sum of weights. A worker
        of weight 0 adds nothing, not even NaN. If all weights are 0 the mean is 0. A weight that is
        negative, infinite or NaN makes the mean NaN on all workers. Leaves are floating-point; n
        times their values must fit f16 if they are f16.
      method: the former name of ``compression``. It warns, and goes with the next version.

    Returns:
      The tree, the next step's state (`None` without ``state``) and the metrics.

    Raises:
      ValueError: ``op`` is neither, a method needs a state and has none, a ``weight`` is not a
        scalar, or is for a sum or for integers, or as for `psum`.
    """
    total = Reduction(
        check_axis(axis_name), as_compression(compression, topology, method=method), op, specs=specs
    )
    return reducer_for(total, tree)(tree, key, state, metrics=metrics, weight=weight)


def reducer_for(total: Reduction, tree: Any) -> Callable[..., Reduced]:
    """The function that reduces ``tree``: inside of maps, or outside by where terms are."""
    if isinstance(tree, WorkerGradients):
        return functools.partial(reduce_terms, total)
    outside = is_outside(total.axis, tree)
    return functools.partial(reduce_outside, total) if outside else total.reduce
