"""Which mesh a call is on, and whether all axes of this mesh are Explicit.

Every function needs the answer. The code for Explicit axes is in `experimental.explicit_mesh`. It
is imported only if the answer is yes.
"""

from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh of `jax.set_mesh`, else of the first leaf with a mesh; it may be empty."""
    meshes = [get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def is_explicit(mesh: AbstractMesh) -> bool:
    """Whether JAX's types say how arrays lie on every axis of the mesh."""
    return not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit}


def is_outside(axis: Axis, tree: Any) -> bool:
    """Whether a collective is called outside of maps, on an Explicit mesh that has its axes."""
    if axis.groups is not None or axis.mapped:
        return False
    mesh = mesh_of(tree)
    return is_explicit(mesh) and set(axis.names) <= set(mesh.axis_names)


def resharded(x: Any, mesh: AbstractMesh, spec: P) -> Array:
    """``x``, sharded by ``spec``; an array whose type has this spec is unchanged."""
    if isinstance(x, Array) and not jax.typeof(x).sharding.mesh.empty:
        if jax.typeof(x).sharding.spec == spec:
            return x
    return jax.reshard(x, NamedSharding(mesh, spec))
