"""A choice between two programs that is made when JAX lowers them, by the devices of the mesh.

While a function under `jax.shard_map` is traced, JAX does not say which devices the mesh has, only
how many. The rule that lowers a primitive sees them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir


def by_device_order(ordered: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> Any:
    """``ordered(*args)`` if the mesh has the devices 0, 1, ... in this order, else ``otherwise``.

    Both functions are traced, and only one is in the program. They must return trees of arrays of
    the same types, and have no side effects. Where the devices are not known, and under `jax.vmap`,
    ``otherwise`` is chosen.
    """
    leaves, treedef = jax.tree.flatten(args)
    programs, shapes = {}, None
    for name, function in (("ordered", ordered), ("otherwise", otherwise)):
        flat = lambda *xs, function=function: function(*treedef.unflatten(xs))
        programs[name], shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), _chosen.bind(*leaves, **programs))


_chosen = Primitive("dynamiq_by_device_order")
_chosen.multiple_results = True


@_chosen.def_impl
def _(*args: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return jaxpr_as_fun(otherwise)(*args)


@_chosen.def_abstract_eval
def _(*_: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return list(otherwise.out_avals)


def _lower(context: Any, *args: Any, ordered: Any, otherwise: Any) -> Any:
    around = getattr(context.module_context, "axis_context", None)
    devices = getattr(getattr(around, "mesh", None), "devices", None)
    program = ordered if devices is not None and in_order(devices) else otherwise
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *args)


def in_order(devices: np.ndarray) -> bool:
    """Whether a mesh's array has the devices 0, 1, ... in row-major order."""
    return [device.id for device in devices.flat] == list(range(devices.size))


def _batch(args: Sequence[Any], dims: Sequence[Any], *, ordered: Any, otherwise: Any) -> Any:
    results = jax.vmap(jaxpr_as_fun(otherwise), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


mlir.register_lowering(_chosen, _lower)
batching.primitive_batchers[_chosen] = _batch
