"""Sharded updates outside of maps: gradients that are unreduced over Explicit axes."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.lowering import knows_devices
from dynamiq_jax.core.meshes import mesh_of
from dynamiq_jax.optax.outside import Outside, warn_of_sums
from dynamiq_jax.reduction.explicit_sums import check_axes, unreduced_axes
from dynamiq_jax.tree.placement import axes_above_one


def on_explicit_axes(axis: Axis, updates: Any, params: Any) -> Outside:
    """The facts of an update, by the types of gradients and parameters.

    Raises:
      ValueError: gradients are unreduced over other axes.
    """
    mesh = mesh_of((updates, params))

    def specs_of(tree: Any) -> tuple[P, ...]:
        found = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
        return tuple(P(*spec.partitions, unreduced=spec.unreduced) for spec in found)

    check_axes(updates, axis, mesh)
    moved = tuple(bool(unreduced_axes(x)) for x in jax.tree.leaves(updates))
    if axes_above_one(axis.names, mesh.shape) and not any(moved):
        warn_of_sums(axis)
    specs = specs_of(updates), specs_of(params)
    return Outside(mesh, *specs, moved, stacked=False, asks=knows_devices())
