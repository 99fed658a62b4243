"""All-reduces as gradient transformations: every worker has the whole optimizer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Int

from dynamiq_jax.collectives.all_reduce import way_of
from dynamiq_jax.collectives.sum import Sum
from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.methods import Method
from dynamiq_jax.methods.metrics import Metrics
from dynamiq_jax.optax.state import PerWorker, known_sizes
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.tree.leaves import describe_leaves


class AllReduceState(NamedTuple):
    """The state of `all_reduce` in ``opt_state``."""

    step: Int[Array, ""]
    """Reductions so far, int32."""
    memory: PerWorker | None
    """The state of the method, as `Compression.init_state` makes it; `None` if it has none."""
    metrics: Metrics | None
    """The metrics of the last reduction (zeros before the first); `None` unless asked for."""


def all_reduce(
    axis_name: AxisName,
    *,
    method: Compression | Method | ByPath | None = None,
    op: Op = "mean",
    key: Array | None = None,
    metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Reduces updates over the mapped axis, compressed; `dynamiq_jax.reduce` as a transformation.

    Put it first in `optax.chain`: the norm to clip by, and the moments, are those of the mean.
    ``update`` runs where `dynamiq_jax.psum` does, inside `jax.shard_map` or `jax.pmap`.

    ``init`` needs the number of workers where the method keeps a memory: call `init` of this
    module, or ``optimizer.init`` inside the map.

    Args:
      axis_name: as for `dynamiq_jax.psum`.
      method: as for `dynamiq_jax.psum`; methods with memory serve, too.
      op: "mean" or "sum".
      key: a PRNG key for the rounding, the same on all workers; the number of the step is folded
        into it. Default: as for `dynamiq_jax.psum`.
      metrics: whether the state has the `Metrics` of the last reduction.
    """
    axis, compression = check_axis(axis_name), as_compression(method)

    def init(params) -> Any:
        memory = first_memory(params, axis, compression)
        return AllReduceState(jnp.zeros((), jnp.int32), memory, _no_metrics() if metrics else None)

    def update(updates, state, params=None, **extra) -> Any:
        del params
        if gone := extra.keys() & {"emit", "method"}:  # others are those of optimizers in a chain
            raise TypeError(
                f"update got {'= and '.join(sorted(gone))}=, which all_reduce takes no more: "
                "dq.optax.multi_steps reduces once per window, and for another method in a step "
                "call the update of another all_reduce"
            )
        memory = state.memory
        folded = None if key is None else jax.random.fold_in(key, state.step)
        before = None if memory is None else memory.own()
        run = way_of(Sum(axis, compression, op), updates)
        found = run(updates, folded, before, metrics=metrics)
        memory = None if memory is None else memory.after(found.state)
        return found.tree, AllReduceState(state.step + 1, memory, found.metrics)

    return optax.GradientTransformationExtraArgs(init, update)


def multi_steps(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Array],
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """`optax.MultiSteps` around an `all_reduce`: workers accumulate alone, and reduce once.

    ``inner`` runs at the last mini-step of a window only (`optax.MultiSteps` runs it at every one
    and throws away what it returns), on the mean of the window's updates; the other mini-steps send
    nothing and return zeros. The state is an `optax.MultiStepsState` whose ``acc_grads`` is a
    `PerWorker` of f32, so that it passes through `jax.shard_map` and into checkpoints as it is.

    Args:
      inner: an optimizer that has `all_reduce` in it.
      every: mini-steps in a window, or a function of ``gradient_step`` that says how many.
      axis_name: that of `all_reduce`.

    Raises:
      ValueError: ``every`` is below 1, or ``update`` is called outside of maps.
    """
    axis = check_axis(axis_name)
    inner = optax.with_extra_args_support(inner)
    if not callable(every) and every < 1:
        raise ValueError(f"every={every}: a window has at least 1 mini-step; pass 1 for no windows")

    def init(params) -> Any:
        sizes, inside = known_sizes(axis, "multi_steps")
        n_workers = 1 if inside else math.prod(sizes or ())
        zeros = jax.tree.map(lambda p: jnp.zeros((n_workers, *jnp.shape(p)), jnp.float32), params)
        if inside:
            zeros = axis.to_varying(zeros)
        accumulated = PerWorker(zeros, axis.name, "mean")
        first, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two: states are donated
        return optax.MultiStepsState(first, none, inner.init(params), accumulated)

    def update(updates, state, params=None, **extra) -> Any:
        if not axis.mapped:
            raise ValueError(
                f"multi_steps found no map over axis {axis.name!r}, where each worker accumulates "
                "its own; call it under jax.shard_map, or outside of maps add gradients of "
                "dq.value_and_grad(reduce=False) by +"
            )
        length = every(state.gradient_step) if callable(every) else every
        count = (state.mini_step + 1).astype(jnp.float32)
        _check_shapes(updates, state.acc_grads.own())
        accumulated = jax.tree.map(
            lambda mean, x: mean + (x.astype(jnp.float32) - mean) / count,
            state.acc_grads.own(),
            updates,
        )

        def last():
            mean = jax.tree.map(lambda a, x: a.astype(x.dtype), accumulated, updates)
            final, inner_state = inner.update(mean, state.inner_opt_state, params, **extra)
            zeros = state.acc_grads.after(jax.tree.map(jnp.zeros_like, accumulated))
            start = jnp.zeros_like(state.mini_step)
            count = state.gradient_step + 1
            return final, optax.MultiStepsState(start, count, inner_state, zeros)

        def other():
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(last)[0])
            kept = state.acc_grads.after(accumulated)
            return zeros, state._replace(mini_step=state.mini_step + 1, acc_grads=kept)

        return lax.cond(state.mini_step >= length - 1, last, other)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_shapes(updates: Any, accumulated: Any) -> None:
    """Refuses gradients that could not be added up, such as slices for `sharded`."""
    pairs = zip(describe_leaves(updates), jax.tree.leaves(accumulated), strict=True)
    for leaf, own in pairs:
        if leaf.shape != own.shape:
            raise ValueError(
                f"multi_steps: the gradient of leaf {leaf.name} has shape {leaf.shape}, and the "
                f"parameter {own.shape}; accumulate whole gradients, before any reduction"
            )


def first_memory(params: Any, axis: Axis, compression: Compression) -> PerWorker | None:
    """The memory of all workers, or inside a map of this one; `None` if the method has none."""
    sizes, inside = known_sizes(axis)

    def first() -> Any:
        known = sizes or (2,) * len(axis.names)
        return compression.init_state(params, known, stacked=not inside)

    if not jax.tree.leaves(jax.eval_shape(first)):
        return None
    known_sizes(axis, f"method={compression.method!r}")
    memory = PerWorker(first(), axis.name, "reset")
    return memory.after(memory.value) if inside else memory


def _no_metrics() -> Metrics:
    shapes = {name: () for name in Metrics._fields} | {"widths": (17,)}
    return Metrics(**{name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})
