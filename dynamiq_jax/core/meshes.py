"""Meshes of any devices; which mesh a call is on, whether its axes are Explicit, and its devices.

While a function under `jax.shard_map` is traced, JAX does not say which devices the mesh has, only
how many, nor how arguments are sharded over Auto axes. The rule that lowers a primitive sees it.
"""

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import concrete_mesh, is_mesh_set, needs_devices


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """`jax.make_mesh`, also for GPUs of several hosts, which that function refuses.

    Devices that fast links connect are one slice (``device.slice_index``): the GPUs of a host, or
    of an NVLink domain. If there are several slices, the outermost axes are between them and the
    innermost axes inside, as far as ``axis_shapes`` allows: ``(4, 8)`` on four hosts of eight GPUs
    has a row for each host, ``(32,)`` has the GPUs of a host side by side. Without several slices
    the result is that of `jax.make_mesh`.

    Args:
      axis_shapes: the size of each axis, the outermost first. One size may be -1: as many as there
        are devices for.
      axis_names: their names.
      axis_types: as for `jax.make_mesh`; `None`: all axes are Explicit.
      devices: `None`: `jax.devices()`. If there are more than the axes take, the first ones.

    Returns:
      A mesh with the shape ``axis_shapes``.

    Raises:
      ValueError: the axes take more devices than there are, or several axes are longer than one
        device and the slices have different numbers of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    axis_shapes = _sizes(axis_shapes, len(devices))
    devices = devices[: math.prod(axis_shapes)]
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    if len(slices) <= 1:
        return jax.make_mesh(axis_shapes, axis_names, axis_types, devices=devices)
    types = (AxisType.Explicit,) * len(axis_shapes) if axis_types is None else axis_types
    return Mesh(_of_slices(axis_shapes, devices, slices), tuple(axis_names), axis_types=types)


def _sizes(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes of axes of ``count`` devices or fewer; -1 becomes what the others leave."""
    known = math.prod(size for size in shape if size != -1)
    rest = list(shape).count(-1)
    if rest > 1 or min((size for size in shape if size != -1), default=1) < 1:
        raise ValueError(f"axes {tuple(shape)}: sizes are 1 or more, and one of them may be -1")
    if known > count:
        raise ValueError(
            f"axes {tuple(shape)} take {known} devices or more, but there are {count}: make axes "
            f"whose sizes multiply to {count} or less, or start more processes"
        )
    if rest and count % known:
        raise ValueError(
            f"axes {tuple(shape)}: {count} devices are no multiple of {known}; replace -1 by "
            f"{count // known} or less, or choose other sizes beside it"
        )
    return tuple(count // known if size == -1 else size for size in shape)


def _of_slices(
    shape: tuple[int, ...], devices: Sequence[Any], slices: Counter[int | None]
) -> np.ndarray:
    """Devices of several slices, by slices along the outermost axes."""
    if len({*slices.values()}) == 1:
        between, left = [], len(slices)
        for size in shape:
            between.append(math.gcd(size, left))
            left //= between[-1]
        inside = [size // parts for size, parts in zip(shape, between, strict=True)]
        return create_hybrid_device_mesh(inside, between, devices)
    if sum(size > 1 for size in shape) > 1:
        counts = ", ".join(f"{count} of slice {which}" for which, count in slices.items())
        raise ValueError(
            f"axes {shape} of slices with different numbers of devices ({counts}): use one "
            f"axis, or pass devices= with {min(slices.values())} devices of each slice"
        )
    return np.array(sorted(devices, key=lambda d: (d.slice_index, d.id))).reshape(shape)


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


def set_around(mesh: Mesh | AbstractMesh, *, alone: bool) -> contextlib.AbstractContextManager[Any]:
    """The context of maps over a mesh, if that of another mesh is set around them.

    Args:
      mesh: the mesh of the maps.
      alone: whether no map is nested in another, so that each can have the devices of ``mesh``.

    Raises:
      ValueError: JAX would take the set mesh for ``mesh`` when it lowers the maps.
    """
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    around = get_abstract_mesh()
    own, other = ((x.shape, x.axis_types) for x in (abstract, around))
    if around.empty or own == other or around.manual_axes:
        return contextlib.nullcontext()
    if isinstance(mesh, Mesh) and not is_traced(()):
        return jax.set_mesh(mesh)
    if not (alone and isinstance(mesh, Mesh)):
        check_set_mesh(abstract)
    return jax.sharding.use_abstract_mesh(abstract)


def check_set_mesh(mesh: AbstractMesh) -> None:
    """Refuses to trace a map over a mesh without devices where `jax.set_mesh` has another one.

    When JAX lowers the map, it takes the set mesh for its collectives, whatever its shape.
    """

    def counting(x: Mesh | AbstractMesh) -> list[tuple[str, int]]:
        return [(name, size) for name, size in x.shape.items() if size > 1]

    around = get_abstract_mesh()
    if around.empty or counting(around) == counting(mesh):
        return
    around = concrete_mesh()
    if not around.empty and counting(around) != counting(mesh):
        raise ValueError(
            f"the mesh has axes {dict(mesh.shape)}, and jax.set_mesh has set {dict(around.shape)} "
            "around jax.jit: JAX would sum over groups of the latter. Call the jitted function in "
            "jax.set_mesh(mesh)"
        )


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


# --- Facts that JAX tells when it lowers a program ------------------------------------------------


def by_device_order(ordered: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> Any:
    """``ordered(*args)`` if the mesh has the devices 0, 1, ... in this order, else ``otherwise``.

    Both functions are traced, and only one is in the program. They must return trees of arrays of
    the same types, and have no side effects. ``otherwise`` is chosen where the devices are not
    known (an `AbstractMesh`, or a JAX of which this library does not know how to ask), where the
    program is exported to other devices, and under `jax.vmap`.
    """
    try:
        is_set = is_mesh_set()
        if is_set:
            needs_devices(_chosen_for_set_mesh)
    except (ImportError, RuntimeError):  # a version of JAX that does not say it
        return otherwise(*args)
    leaves, treedef = jax.tree.flatten(args)
    programs, shapes = {}, None
    for name, function in (("ordered", ordered), ("otherwise", otherwise)):
        flat = lambda *xs, function=function: function(*treedef.unflatten(xs))
        programs[name], shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    # JAX limits programs that need devices to one mesh, so only those of `jax.set_mesh` are such.
    chosen = _chosen_for_set_mesh if is_set else _chosen
    return jax.tree.unflatten(jax.tree.structure(shapes), chosen.bind(*leaves, **programs))


def knows_devices() -> bool:
    """Whether a program that is traced now may ask for its devices: a key for `jax.jit`.

    JAX reuses the trace of an inner `jax.jit` for all meshes that differ only in devices, also for
    an `AbstractMesh`, which has none, and for which JAX refuses a program that asks for them.
    """
    try:
        return is_mesh_set()
    except (ImportError, RuntimeError):  # as in `by_device_order`
        return False


def in_order(devices: np.ndarray) -> bool:
    """Whether a mesh's array has the devices 0, 1, ... in row-major order."""
    return [device.id for device in devices.flat] == list(range(devices.size))


def _run(*args: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return jaxpr_as_fun(otherwise)(*args)


def _types(*_: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return list(otherwise.out_avals)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, ordered: Any, otherwise: Any) -> Any:
    results = jax.vmap(jaxpr_as_fun(otherwise), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


def _lower(context: Any, *args: Any, ordered: Any, otherwise: Any, for_set_mesh: bool) -> Any:
    module = context.module_context
    mesh = getattr(getattr(module, "axis_context", None), "mesh", None)
    exported = getattr(getattr(module, "lowering_parameters", None), "for_export", True)
    # JAX may have traced a part of the program before a mesh was set, and would lower it once.
    once = is_mesh_set() and not for_set_mesh
    known = isinstance(mesh, Mesh) and in_order(mesh.devices)
    program = ordered if known and not exported and not once else otherwise
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *args)


def _primitive(*, for_set_mesh: bool) -> Primitive:
    """The primitive of the choice, with its rules."""
    primitive = Primitive("dynamiq_by_device_order")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_types)
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, functools.partial(_lower, for_set_mesh=for_set_mesh))
    return primitive


_chosen = _primitive(for_set_mesh=False)
_chosen_for_set_mesh = _primitive(for_set_mesh=True)


# --- Shardings of a program's arguments -----------------------------------------------------------


def telling_shardings(note: Callable[[list[frozenset[str]]], None], values: Sequence[Any]) -> Any:
    """``values``; when JAX lowers the program, ``note`` gets the mesh axes that shard each of them.

    They are known of arguments of `jax.jit` that reach this call unchanged, if their shardings are.
    Others have no axes. ``note`` must be hashable.
    """
    return _telling.bind(*values, note=note)


def _axes_of_argument(value: Any) -> frozenset[str]:
    """The axes that shard a value of MLIR, if it is an argument of the program."""
    try:
        attributes = value.owner.owner.attributes["arg_attrs"][value.arg_number]
        # As <@mesh, [{"data"}, {}], replicated={"model"}>: the last brackets have the dimensions.
        dimensions, _, _ = str(attributes["sdy.sharding"]).rpartition("[")[2].partition("]")
        return frozenset(re.findall(r'"([^"]+)"', dimensions))
    except (AttributeError, IndexError, KeyError, TypeError):
        return frozenset()


def _lower_telling(context: Any, *values: Any, note: Any) -> Any:
    del context
    note([_axes_of_argument(value) for value in values])
    return values


def _telling_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, note: Any) -> Any:
    return _telling.bind(*primals, note=note), list(tangents)


_telling = Primitive("dynamiq_telling_shardings")
_telling.multiple_results = True
_telling.def_impl(lambda *values, note: list(values))
_telling.def_abstract_eval(lambda *types, note: list(types))
batching.primitive_batchers[_telling] = lambda values, dims, *, note: (list(values), list(dims))
ad.primitive_jvps[_telling] = _telling_jvp
mlir.register_lowering(_telling, _lower_telling, cacheable=False)  # the operands count
