"""Gradients for pjit'd training steps, where there is no psum to replace."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax._compat import AxisNames, axis_tuple, to_varying
from dynamiq_jax.arguments import AnyTopology, check_axis, resolve
from dynamiq_jax.collectives import pmean
from dynamiq_jax.methods import Method


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    axis_name: AxisNames,
    method: Method | None = None,
    topology: AnyTopology | None = None,
    has_aux: bool = False,
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

    Returns:
      ``f(params, *batch, key=None) -> (loss, grads)`` (``((loss, aux), grads)`` with
      ``has_aux``), to be called inside or outside `jax.jit`; outside it is one program, compiled
      once for all calls with the same shapes and dtypes. Parameters are replicated; every array of
      ``batch`` is split along its leading axis, and both are brought there however they are
      sharded over the mesh. Loss, gradients and the floating-point leaves of aux are means over
      workers, other leaves of aux are sums.

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
    n_workers = resolve(method, topology, sizes).n_workers
    others = {name: size for name, size in mesh.shape.items() if name not in axes and size > 1}
    if others:
        raise NotImplementedError(
            f"value_and_grad is data-parallel over {axis_name!r} alone, but the mesh has {others} "
            "as well; call dq.pmean inside your own jax.shard_map over all axes"
        )

    def local(params, key, *batch):
        params = to_varying(params, axis_name)
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *batch)
        grads = pmean(grads, axis_name, method=method, topology=topology, key=key)
        return jax.tree.map(lambda x: _reduce_value(x, axis_name), value), grads

    @functools.partial(jax.jit, inline=True)
    def mapped(params, key, *batch):
        specs = (P(), P(), *(P(axis_name) for _ in batch))
        args = params, key, *batch
        if all(kind == AxisType.Explicit for kind in mesh.axis_types):
            # There the types of arguments say how they are sharded, and must fit the specs.
            shardings = (NamedSharding(mesh, spec) for spec in specs)
            args = tuple(jax.reshard(x, s) for x, s in zip(args, shardings, strict=True))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(*args)

    def reduced(params, *batch, key=None):
        _check_batch(batch, n_workers, axis_name)
        return mapped(params, key, *batch)

    return reduced


def _reduce_value(x, axis_name: AxisNames):
    x = to_varying(jnp.asarray(x), axis_name)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.pmean(x, axis_name)
    return lax.psum(x, axis_name)


def _check_batch(batch, n_workers: int, axis_name: AxisNames) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % n_workers:
            raise ValueError(
                f"batch argument {jax.tree_util.keystr(path)} has shape {shape}; its leading axis "
                f"must be a multiple of the {n_workers} workers on axis {axis_name!r}"
            )
