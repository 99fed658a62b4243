"""Compressed all-reduce as a gradient transformation of optax, with its state in ``opt_state``.

```python
import dynamiq_jax as dq
import dynamiq_jax.optax  # needs optax; the library itself does not

optimizer = optax.chain(dq.optax.all_reduce("data"), optax.clip_by_global_norm(1.0), adamw)
opt_state = dq.optax.init(optimizer, params, mesh)
specs = dq.optax.state_specs(opt_state)  # of opt_state, for jax.shard_map
```
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from dynamiq_jax.collectives.all_reduce import reduce
from dynamiq_jax.lax.axis import Axis, AxisName, axis_names
from dynamiq_jax.lax.checks import Op, axis_sizes, check_axis
from dynamiq_jax.methods import Method
from dynamiq_jax.methods.metrics import Metrics
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.tree.leaves import describe_leaves

Tree = TypeVar("Tree")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value",),
    meta_fields=("axis_name", "other_workers"),
)
@dataclasses.dataclass(frozen=True)
class PerWorker:
    """A part of an optimizer's state that differs between workers; all else is the same on all.

    Attributes:
      value: a tree whose leaves have a leading axis of all workers; of 1 inside a map.
      axis_name: the axis, or axes, of the workers.
      other_workers: what `restore_state` gives another number of workers: fresh values ("reset"),
        or the mean over the old ones ("mean").
    """

    value: Any
    axis_name: AxisName
    other_workers: Literal["reset", "mean"]

    def own(self) -> Any:
        """Inside a map: this worker's."""
        return jax.tree.map(lambda x: x[0], self.value)

    def after(self, value: Any) -> "PerWorker":
        """Inside a map: the same part with ``value`` as this worker's."""
        value = jax.tree.map(lambda x: x[None], Axis(axis_names(self.axis_name)).to_varying(value))
        return dataclasses.replace(self, value=value)


class AllReduceState(NamedTuple):
    """The state of `all_reduce` in ``opt_state``."""

    step: Int[Array, ""]
    """Reductions so far, int32."""
    memory: PerWorker | None
    """The state of the method, as `dynamiq_jax.init_state` gives it; `None` if it has none."""
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
    ``update`` runs where `dynamiq_jax.psum` does, inside `jax.shard_map` or `jax.pmap`, and takes
    two more arguments:

    * ``emit`` (a bool scalar, the same on all workers): where it is false nothing is reduced or
      sent, and updates come back as zeros. For `optax.MultiSteps`, which calls the inner optimizer
      at every mini-step and throws the result away: ``optimizer.update(grads, opt_state, params,
      emit=opt_state.mini_step == every - 1)``. `multi_steps` needs no such care.
    * ``method``: another method for this step, as `dynamiq_jax.by_step` gives it. The memory
      belongs to ``all_reduce``'s own method. A method for one step takes it if it needs a state, or
      if it is of the same type and keeps one; else the memory waits.

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
    axis, own_method = check_axis(axis_name), as_compression(method)

    def init(params) -> Any:
        memory = first_memory(params, axis, own_method)
        return AllReduceState(jnp.zeros((), jnp.int32), memory, _no_metrics() if metrics else None)

    def update(updates, state, params=None, *, emit=True, method=method, **extra) -> Any:
        del params, extra

        def reduced():
            own = None if state.memory is None else state.memory.own()
            sizes, chosen = axis_sizes(axis, "all_reduce"), as_compression(method)
            keeps = jax.eval_shape(lambda: chosen.init_state(updates, sizes))
            leaves = describe_leaves(updates)
            now, always = chosen.methods_of(leaves), own_method.methods_of(leaves)
            takes = list(map(type, now)) == list(map(type, always))
            takes |= any(each is not None and each.needs_state for each in now)
            found = reduce(
                updates,
                axis.name,
                op=op,
                method=chosen,
                key=None if key is None else jax.random.fold_in(key, state.step),
                state=own if jax.tree.leaves(keeps) and takes else None,
                metrics=metrics,
            )
            kept = own if found.state is None else found.state
            memory = None if state.memory is None else state.memory.after(kept)
            return found.tree, AllReduceState(state.step + 1, memory, found.metrics)

        if emit is True:
            return reduced()

        def skipped():
            zeros, _ = jax.eval_shape(reduced)
            return jax.tree.map(jnp.zeros_like, zeros), state

        return lax.cond(emit, reduced, skipped)

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
    """
    axis = check_axis(axis_name)
    inner = optax.with_extra_args_support(inner)
    if not callable(every) and every < 1:
        raise ValueError(f"every={every}: a window has at least 1 mini-step; pass 1 for no windows")

    def init(params) -> Any:
        sizes, inside = known_sizes(axis)
        n_workers = 1 if inside else product(sizes, axis, "multi_steps")
        zeros = jax.tree.map(lambda p: jnp.zeros((n_workers, *jnp.shape(p)), jnp.float32), params)
        if inside:
            zeros = axis.to_varying(zeros)
        accumulated = PerWorker(zeros, axis.name, "mean")
        first, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two: states are donated
        return optax.MultiStepsState(first, none, inner.init(params), accumulated)

    def update(updates, state, params=None, **extra) -> Any:
        length = every(state.gradient_step) if callable(every) else every
        count = (state.mini_step + 1).astype(jnp.float32)
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


def init(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """``optimizer.init(params)`` with every worker's part on that worker; outside of `jax.jit`.

    Args:
      optimizer: one that has `all_reduce` or `multi_steps` in it, at any depth.
      params: as one worker passes its gradients; every device gets all of what is made of them.
      mesh: that of the training step.

    Returns:
      The state. Leaves of `PerWorker` are split over the workers, all others are replicated.
    """
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(optimizer.init, params)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), state_specs(shapes))
        return jax.jit(optimizer.init, out_shardings=shardings)(params)


def state_specs(opt_state: Tree) -> Tree:
    """How `jax.shard_map` splits an optimizer's state: a `PartitionSpec` for every leaf.

    ``P(axis_name)`` for leaves of `PerWorker`, ``P()`` for all others.
    """

    def spec(part):
        own = PartitionSpec(part.axis_name) if isinstance(part, PerWorker) else PartitionSpec()
        return jax.tree.map(lambda _: own, part)

    return jax.tree.map(spec, opt_state, is_leaf=lambda x: isinstance(x, PerWorker))


def restore_state(saved: Any, fresh: Tree) -> Tree:
    """``saved`` for the workers that ``fresh`` is of, and a warning that says what was reset.

    With as many workers as before this is ``saved``, bit for bit. With another number the memories
    of methods start anew, since every worker had its own, and what `multi_steps` has accumulated
    becomes the mean over the old workers.

    Args:
      saved: the state that was saved: a tree like ``fresh``, or the nested dicts and lists that
        ``orbax.checkpoint`` gives where it is not told the type of the tree.
      fresh: `init` of the same optimizer and parameters for the new workers; its leaves say where
        those of the result are.

    Raises:
      ValueError: a leaf is missing, or has another shape and is not one of `PerWorker`.
    """
    old = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    parts, treedef = jax.tree_util.tree_flatten_with_path(
        fresh, is_leaf=lambda x: isinstance(x, PerWorker)
    )
    done: list[Any] = []
    notes = []
    for path, part in parts:
        leaves, inner = jax.tree_util.tree_flatten_with_path(part)
        names = [_name((*path, *within)) for within, _ in leaves]
        now = [leaf for _, leaf in leaves]
        then = [old.get(name) for name in names]
        same = [x is not None and jnp.shape(x) == y.shape for x, y in zip(then, now, strict=True)]
        if all(same):
            values = [_placed(x, like) for x, like in zip(then, now, strict=True)]
        elif not isinstance(part, PerWorker):
            name, has = names[0], "is missing" if then[0] is None else f"has {jnp.shape(then[0])}"
            raise ValueError(
                f"opt_state: leaf {name} {has} in what was saved, and this optimizer has "
                f"{now[0].shape}; pass the optimizer and the parameters that it was saved with"
            )
        else:
            values, note = _resized(part, then, now)
            notes.append(f"{_name(path)} {note}")
        done.append(jax.tree.unflatten(inner, values))
    if notes:
        warnings.warn("opt_state: " + "; ".join(notes), stacklevel=2)
    return jax.tree.unflatten(treedef, done)


def _resized(part: PerWorker, then: list, now: list) -> tuple[list, str]:
    """The leaves of a part for another number of workers, and what became of them."""
    workers = f"{now[0].shape[0]} workers"
    if any(x is None for x in then):
        return now, f"was not saved and starts anew for {workers}"
    workers = f"from {jnp.shape(then[0])[0]} to {workers}"
    fit = all(jnp.shape(x)[1:] == y.shape[1:] for x, y in zip(then, now, strict=True))
    if part.other_workers == "reset" or not fit:
        return now, f"was reset, {workers}"
    means = (jnp.mean(jnp.asarray(x), axis=0, keepdims=True) for x in then)
    spread = [_placed(jnp.broadcast_to(m, y.shape), y) for m, y in zip(means, now, strict=True)]
    return spread, f"became its mean over workers, {workers}"


def _placed(x: Any, like: Array) -> Array:
    return jax.device_put(jnp.asarray(x, like.dtype), like.sharding)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def known_sizes(axis: Axis) -> tuple[tuple[int, ...] | None, bool]:
    """Workers on every axis if that is known, and whether a map around us has the axis."""
    try:
        return axis_sizes(axis), True
    except NameError:  # outside of any map: the mesh of jax.set_mesh, if there is one
        mesh = jax.sharding.get_abstract_mesh()
    known = all(name in mesh.shape for name in axis.names)
    return tuple(mesh.shape[name] for name in axis.names) if known else None, False


def product(sizes: tuple[int, ...] | None, axis: Axis, what: str) -> int:
    """The number of workers; refuses ``what`` where that is not known."""
    if sizes is None:
        raise ValueError(
            f"{what} keeps a part of every worker's own, and optimizer.init does not know how many "
            f"workers axis {axis.name!r} has; call dq.optax.init(optimizer, params, mesh)"
        )
    return math.prod(sizes)


def first_memory(params: Any, axis: Axis, compression: Compression) -> PerWorker | None:
    """The memory of all workers, or inside a map of this one; `None` if the method has none."""
    sizes, inside = known_sizes(axis)

    def first() -> Any:
        known = sizes or (2,) * len(axis.names)
        return compression.init_state(params, known, stacked=not inside)

    if not jax.tree.leaves(jax.eval_shape(first)):
        return None
    product(sizes, axis, f"method={compression.method!r}")
    memory = PerWorker(first(), axis.name, "reset")
    return memory.after(memory.value) if inside else memory


def _no_metrics() -> Metrics:
    shapes = {name: () for name in Metrics._fields} | {"widths": (17,)}
    return Metrics(**{name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})
