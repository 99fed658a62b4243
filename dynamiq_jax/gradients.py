"""Gradients for pjit'd training steps, where there is no psum to replace."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax._compat import AxisNames, axis_tuple, to_varying
from dynamiq_jax.arguments import (
    AnyMethod,
    AnyTopology,
    check_axis,
    chooses_by_path,
    resolve,
)
from dynamiq_jax.collectives import reduce
from dynamiq_jax.metrics import Reduced


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    axis_name: AxisNames,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    has_aux: bool = False,
    metrics: bool = False,
) -> Callable[..., Any]:
    """Data-parallel `jax.value_and_grad` whose gradient mean is compressed.

    Args:
      loss_fn: ``loss_fn(params, *batch) -> loss``, a mean over the examples it is given; or
        ``-> (loss, aux)`` with ``has_aux``. Pure, as for `jax.jit`.
      mesh: a mesh with Auto or Explicit axes; its axes other than ``axis_name`` have size 1.
      axis_name: the data-parallel axis, or a tuple of axes that together are.
      method: as for `psum`.
      topology: as for `psum`.
      has_aux: whether ``loss_fn`` returns more than the loss.
      metrics: whether ``f`` returns the `Metrics` of the mean.

    Returns:
      ``f(params, *batch, key=None, state=None) -> (loss, grads)`` (``((loss, aux), grads)`` with
      ``has_aux``; with ``metrics`` or a ``state``, a `Reduced` stands in the place of ``grads``, as
      `reduce` returns it), to be called inside or outside `jax.jit`; outside it is one program,
      compiled once for all calls with the same shapes and dtypes. Parameters are replicated; every
      array of ``batch`` is split along its leading axis, and both are brought there however they
      are sharded over the mesh. A state is `init_state`'s with ``stacked=True``, then that of the
      step before: its leading axis is that of the workers. Loss, gradients and the floating-point
      leaves of aux are means over workers, other leaves of aux are sums.

    Raises:
      ValueError: ``axis_name`` is not in the mesh, or a batch axis does not divide by its size.
      NotImplementedError: the mesh has another axis of size greater than 1.
    """
    axis_name = check_axis(axis_name)
    axes = axis_tuple(axis_name)
    missing = [name for name in axes if name not in mesh.shape]
    if missing:
        raise ValueError(f"axis_name={missing[0]!r} is not in the mesh; it has {mesh.axis_names}")
    sizes = tuple(mesh.shape[name] for name in axes)
    n_workers = resolve(None if chooses_by_path(method) else method, topology, sizes).n_workers
    others = {name: size for name, size in mesh.shape.items() if name not in axes and size > 1}
    if others:
        raise NotImplementedError(
            f"value_and_grad is data-parallel over {axis_name!r} alone, but the mesh has {others} "
            "as well; call dq.pmean inside your own jax.shard_map over all axes"
        )

    def local(params, key, state, *batch):
        params = to_varying(params, axis_name)
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *batch)
        own = jax.tree.map(lambda x: x[0], state)
        options = {"method": method, "topology": topology, "metrics": metrics}
        found = reduce(grads, axis_name, key=key, state=own, **options)
        after = jax.tree.map(lambda x: to_varying(x, axis_name)[None], found.state)
        value = jax.tree.map(lambda x: _reduce_value(x, axis_name), value)
        return value, found._replace(state=after)

    @functools.partial(jax.jit, inline=True)
    def mapped(params, key, state, *batch):
        specs = (P(), P(), P(axis_name), *(P(axis_name) for _ in batch))
        args = params, key, state, *batch
        if all(kind == AxisType.Explicit for kind in mesh.axis_types):
            # There the types of arguments say how they are sharded, and must fit the specs.
            shardings = (NamedSharding(mesh, spec) for spec in specs)
            args = tuple(jax.reshard(x, s) for x, s in zip(args, shardings, strict=True))
        spec_of: Any = Reduced
        out_specs = P(), spec_of(tree=P(), state=P(axis_name), metrics=P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(*args)

    def reduced(params, *batch, key=None, state=None):
        _check_batch(batch, n_workers, axis_name)
        _check_stacked(state, sizes)
        value, found = mapped(params, key, state, *batch)
        return value, found if metrics or state is not None else found.tree

    return reduced


def _reduce_value(x, axis_name: AxisNames):
    x = to_varying(jnp.asarray(x), axis_name)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.pmean(x, axis_name)
    return lax.psum(x, axis_name)


def _check_stacked(state, sizes: tuple[int, ...]) -> None:
    n_workers = math.prod(sizes)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
    wrong = [shape for shape in shapes if shape[:1] != (n_workers,)]
    if wrong:
        raise ValueError(
            f"state has a leaf of shape {wrong[0]}, whose leading axis is not that of the "
            f"{n_workers} workers; pass dq.init_state(params, "
            f"{sizes if len(sizes) > 1 else n_workers}, ..., stacked=True)"
        )


def _check_batch(batch, n_workers: int, axis_name: AxisNames) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % n_workers:
            raise ValueError(
                f"batch argument {jax.tree_util.keystr(path)} has shape {shape}; its leading axis "
                f"must be a multiple of the {n_workers} workers on axis {axis_name!r}"
            )
