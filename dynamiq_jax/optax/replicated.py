"""All-reduces as gradient transformations: every worker has the whole optimizer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Int

from dynamiq_jax.compression.compression import AnyPolicy, Compression, as_compression
from dynamiq_jax.core.axis import Axis, AxisName, is_outside, mesh_of, resharded, set_of_leaves
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.methods.metrics import Metrics
from dynamiq_jax.optax.state import PerWorker, check_wrappers, known_sizes
from dynamiq_jax.reduction.all_reduce import reducer_for
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.reduction.worker_gradients import has_terms, stacked_terms
from dynamiq_jax.tree.leaves import axes_above_one, axes_of


class AllReduceState(NamedTuple):
    """The state of `all_reduce` in ``opt_state``."""

    step: Int[Array, ""]
    """The number of reductions so far, int32."""
    memory: PerWorker | None
    """The state of the method, as from `Compression.init_state`; `None` if it has none."""
    metrics: Metrics | None
    """The metrics of the last reduction (zeros before the first); `None` without ``metrics``."""


def all_reduce(
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    op: Op = "mean",
    key: Array | None = None,
    metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Reduces updates over the mapped axis, compressed; `dynamiq_jax.reduce` as a transformation.

    Put it first in `optax.chain`, so that the norm for clipping and the moments are those of the
    mean. ``update`` runs inside `jax.shard_map` or `jax.pmap`, like `dynamiq_jax.psum`. If the
    method keeps a memory, call `init` of this module, or ``optimizer.init`` inside the map.

    Args:
      axis_name: as for `dynamiq_jax.psum`.
      compression: as for `dynamiq_jax.psum`, also with memory.
      op: "mean" or "sum".
      key: a PRNG key for the rounding, the same on all workers; the index of the step is folded
        into it. Default: as for `dynamiq_jax.psum`.
      metrics: whether the state has the `Metrics` of the last reduction.

    Returns:
      A transformation whose ``update(grads, state, params=None)`` returns the reduced tree and a
      new `AllReduceState`. It ignores ``params``. Outside of maps it takes the gradients of
      `dynamiq_jax.value_and_grad` (``unreduced=True``), with ``op="sum"``.

    Raises:
      ValueError: an argument is invalid; a wrapper of optax around this transformation uses each
        worker's own gradients; or, outside of maps, other axes split leaves of the memory.
    """
    axis, compression = check_axis(axis_name), as_compression(compression)

    def init(params) -> Any:
        check_wrappers(axis, params, "all_reduce")
        with set_of_leaves(axis, params):
            memory = first_memory(params, axis, compression)
            shapes = dict.fromkeys(Metrics._fields, ()) | {"widths": (17,)}
            zeros = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
            known = Metrics(**zeros) if metrics else None
            return AllReduceState(jnp.zeros((), jnp.int32), memory, known)

    def update(updates, state, params=None, **extra) -> Any:
        del params
        if gone := extra.keys() & {"emit", "method"}:  # others are those of optimizers in a chain
            raise TypeError(
                f"update got {'= and '.join(sorted(gone))}=, which all_reduce takes no more: "
                "add up the gradients of a window in a scan and call update once, and for another "
                "method in a step call the update of another all_reduce"
            )
        check_wrappers(axis, updates, "all_reduce")
        memory = state.memory
        folded = None if key is None else jax.random.fold_in(key, state.step)
        run = reducer_for(Reduction(axis, compression, op), updates)
        if memory is None:
            found = run(updates, folded, metrics=metrics)
        elif axis.mapped:
            found = run(updates, folded, memory.own(), metrics=metrics)
            memory = memory.after(found.state)
        else:  # outside of maps a reduction takes the states of all workers
            try:
                found = run(updates, folded, memory.value, metrics=metrics)
            except ValueError as error:
                if "state has leaves" in str(error):
                    _check_whole(axis, updates)
                raise
            memory = dataclasses.replace(memory, value=found.state)
        return found.tree, AllReduceState(state.step + 1, memory, found.metrics)

    return optax.GradientTransformationExtraArgs(init, update)


def first_memory(params: Any, axis: Axis, compression: Compression) -> PerWorker | None:
    """The memory of all workers, or of this worker inside a map; `None` if there is none."""
    sizes, inside = known_sizes(axis)

    def first() -> Any:
        # Any number above 1 tells whether the method has memory.
        known = sizes or (2,) * len(axis.names)
        return compression.init_state(params, known, stacked=not inside)

    if not jax.tree.leaves(jax.eval_shape(first)):
        return None
    known_sizes(axis, f"method={compression.method!r}")
    memory = PerWorker(first(), axis.name)
    if inside:
        return memory.after(memory.value)
    if not is_outside(axis, params):
        return memory
    mesh, spec = mesh_of(params), PartitionSpec(axis.name)
    return jax.tree.map(lambda x: resharded(x, mesh, spec), memory)  # as `update` returns it


def _check_whole(axis: Axis, tree: Any) -> None:
    """Refuses gradients of which devices along other axes have parts."""
    if has_terms(tree):
        _, mesh, _, specs = stacked_terms(tree)
    else:
        shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(tree)]
        mesh, specs = mesh_of(tree), [PartitionSpec(*own.spec.partitions) for own in shardings]
    split = {name for spec in specs for name in axes_above_one(axes_of(spec), mesh.shape)}
    if others := sorted(split - {*axis.names}):
        raise ValueError(
            f"dq.optax.all_reduce has a memory of whole leaves, and axes {others} split gradients; "
            f"call dq.reduce(grads, {axis.name!r}, op='sum', state=state) in its place, with the "
            "state of Compression.init_state(params, n_workers, stacked=True, mesh=..., specs=...)"
        )
