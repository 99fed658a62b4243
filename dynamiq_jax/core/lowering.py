"""Facts that JAX tells when it lowers a program: the mesh's devices, and arguments' shardings.

While a function under `jax.shard_map` is traced, JAX does not say which devices the mesh has, only
how many, nor how arguments are sharded over Auto axes. The rule that lowers a primitive sees it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from dynamiq_jax.core.compat import is_mesh_set, needs_devices


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
