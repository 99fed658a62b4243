"""Sharding constraints and reshards of a loss: they forget the data axes."""

import contextlib
import contextvars
import functools
import sys
import threading
import types
from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from dynamiq_jax.core.compat import reshard_primitive

_forgotten: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "dynamiq_jax_forgotten_axes", default=frozenset()
)
_lock = threading.Lock()
_users = 0
_of_jax = jax.lax.with_sharding_constraint
_replaced: list[tuple[dict[str, Any], str]] = []


@contextlib.contextmanager
def constraints_without(names: Collection[str]) -> Iterator[None]:
    """While it lasts, constraints and reshards forget axes, in this thread alone.

    A loss that is written for `jax.jit` says how its arrays are sharded, over data axes, too. Under
    a map over these JAX refuses that, and a parameter that was gathered over them is not sharded as
    the loss says. On Explicit axes constraints are assertions, and those that name one of the axes
    are dropped. There `jax.reshard` leaves a parameter typed as reduced over the axes, whole as it
    is: its gradient stays unreduced. `jax.sharding.auto_axes`, by which JAX reads rows, turns axes
    into Auto ones: they have no such types.
    """
    global _users
    primitive = reshard_primitive()
    token = _forgotten.set(frozenset(names))
    with _lock:
        _users += 1
        if _users == 1:
            primitive.bind = _reshard
            for names_of_module, name in _references():
                names_of_module[name] = _constrain
                _replaced.append((names_of_module, name))
    try:
        yield
    except ValueError as error:
        if "manual" in str(error).lower():
            error.add_note(
                f"The loss runs under a map over {sorted(names)}. Its constraints forget these if "
                "it calls jax.lax.with_sharding_constraint, or a module's own name of it; a name "
                "elsewhere, as in a functools.partial or a closure, is not found"
            )
        raise
    finally:
        _forgotten.reset(token)
        with _lock:
            _users -= 1
            if not _users:
                del primitive.bind  # that of the class is back
                while _replaced:
                    names_of_module, name = _replaced.pop()
                    names_of_module[name] = _of_jax


def _references() -> list[tuple[dict[str, Any], str]]:
    """The modules' names of JAX's function: that of `jax.lax`, and those outside of JAX."""
    outside = [m for key, m in list(sys.modules.items()) if key.partition(".")[0] != "jax"]
    return [
        (vars(module), name)
        for module in (jax.lax, *outside)
        if isinstance(module, types.ModuleType) and module.__name__ != __name__
        for name, x in list(vars(module).items())
        if x is _of_jax
    ]


@functools.wraps(_of_jax)
def _constrain(x: Any, shardings: Any, *args: Any, **options: Any) -> Any:
    names = _forgotten.get()
    if not names:
        return _of_jax(x, shardings, *args, **options)

    def is_leaf(s: Any) -> bool:
        return s is None or isinstance(s, PartitionSpec | jax.sharding.Sharding)

    def one(sharding: Any, part: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            sharding = sharding.spec
        if not isinstance(sharding, PartitionSpec):
            return part if sharding is None else _of_jax(part, sharding, *args, **options)
        spec = PartitionSpec(*(_without(entry, names) for entry in sharding))
        if spec == sharding:
            return _of_jax(part, spec, *args, **options)
        mesh = get_abstract_mesh()
        if AxisType.Explicit in mesh.axis_types or not any(spec):
            return part
        return _of_jax(part, NamedSharding(mesh, spec), *args, **options)

    return jax.tree.map(one, shardings, x, is_leaf=is_leaf)


def _reshard(x: Any, *, dst_sharding: NamedSharding, **options: Any) -> Any:
    """Binds JAX's primitive; the result is reduced over forgotten axes that do not split it."""
    spec, mesh = dst_sharding.spec, dst_sharding.mesh
    split = {*jax.tree.leaves(spec.partitions)}
    typed = {*mesh.explicit_axes} - split
    kept = jax.typeof(x).sharding.spec.reduced & _forgotten.get() & typed
    if kept:
        own = PartitionSpec(*spec.partitions, reduced=spec.reduced | kept, unreduced=spec.unreduced)
        dst_sharding = NamedSharding(mesh, own)
    primitive = reshard_primitive()
    return type(primitive).bind(primitive, x, dst_sharding=dst_sharding, **options)


def _without(entry: Any, names: frozenset[str]) -> Any:
    """One entry of a PartitionSpec over the other axes."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes = (entry,) if isinstance(entry, str) else entry
    return tuple(name for name in axes if name not in names) or None
