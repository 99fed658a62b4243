"""Which mesh a call is on, and whether all axes of this mesh are Explicit.

Every function needs the answer. The code for Explicit axes is in `experimental.explicit_mesh`. It
is imported only if the answer is yes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
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


def meshes_of(tree: Any) -> list[Mesh | AbstractMesh]:
    """The meshes of the leaves that have one; those of tracers have no devices."""
    leaves = (jax.typeof(x) if isinstance(x, Tracer) else x for x in jax.tree.leaves(tree))
    shardings = (getattr(x, "sharding", None) for x in leaves)
    return [x.mesh for x in shardings if isinstance(x, NamedSharding)]


def is_traced(tree: Any) -> bool:
    """Whether JAX traces the call: a leaf is a tracer, or a `jax.jit` is around it."""
    leaves = [*jax.tree.leaves(tree), jnp.zeros(())]
    return any(isinstance(x, Tracer) for x in leaves)


def auto_mesh_of(
    axis: Axis, tree: Any, told: Mesh | AbstractMesh | None = None
) -> Mesh | AbstractMesh | None:
    """The mesh with these axes whose axes are all Auto, outside of maps; `None`: there is none.

    It is the first such among ``told``, that of `jax.set_mesh`, and those of the leaves. While JAX
    traces, it may have no devices.
    """
    traced = is_traced(tree)
    meshes: list[Any] = [told, get_abstract_mesh() if traced else jax.sharding.get_mesh()]
    for mesh in [*meshes, *meshes_of(tree)]:
        if mesh is not None and not mesh.empty and {*axis.names} <= {*mesh.axis_names}:
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            if all(kind == AxisType.Auto or mesh.shape[name] == 1 for name, kind in kinds):
                return mesh
    return None


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
