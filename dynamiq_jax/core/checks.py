"""Checks of arguments: of those that name the workers of a collective, and of options.

Options are dataclasses: how they print, and whether fields hold what they are annotated with.
"""

import dataclasses
import math
import operator
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from dynamiq_jax.core.axis import Axis, AxisName

Op = Literal["sum", "mean"]
"""The operation over workers."""


def axis_counts(n_workers: int | tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of all axes, from one size or from several."""
    given = tuple(n_workers) if isinstance(n_workers, tuple | list) else (n_workers,)
    try:
        sizes = tuple(map(operator.index, given))
    except TypeError:
        sizes = None
    if sizes is None or any(isinstance(size, bool) for size in given):
        axis = next((size for size in given if isinstance(size, str)), "data")
        raise ValueError(
            f"n_workers={_brief(n_workers)} is not a number of workers; pass an int, or one for "
            f"each axis, such as mesh.shape[{axis!r}], or inside a map jax.lax.axis_size({axis!r})"
        )
    if not sizes or min(sizes) < 1:
        raise ValueError(f"n_workers={n_workers} must be at least 1")
    return sizes


def _brief(value: Any) -> str:
    """How a value prints; a tree of arrays, whose numbers say nothing, by its type."""
    return f"a {type(value).__name__}" if len(text := repr(value)) > 80 else text


def check_axis(
    axis_name: AxisName | list[str], axis_index_groups: Sequence[Sequence[int]] | None = None
) -> Axis:
    """The workers of a collective, from its arguments."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise NotImplementedError(
            f"axis_name={axis_name!r}: expected the name of a mapped axis (a str), or a tuple of "
            "names; positional axes of jax.lax.psum are not supported"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; pass each once")
    axis = Axis(names)
    if axis_index_groups is None or not names:
        return axis
    try:
        groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    except TypeError as error:
        raise ValueError(
            f"axis_index_groups={axis_index_groups!r} are not lists of worker indices ({error}); "
            "pass for example [[0, 1], [2, 3]]"
        ) from error
    n_workers = math.prod(axis_sizes(axis, "the collective"))
    if sorted(worker for group in groups for worker in group) != list(range(n_workers)):
        raise ValueError(
            f"axis_index_groups={groups} must cover all indices exactly once, and axis "
            f"{axis.name!r} has those from 0 to {n_workers - 1}; pass a partition of these"
        )
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"axis_index_groups={groups} has groups of {sizes} workers; pass groups that are all "
            "the same size"
        )
    return Axis(names, groups)


def axis_sizes(axis: Axis, collective: str = "the reduction") -> tuple[int, ...]:
    """The workers on every axis, which must be mapped for ``collective``; groups count as one."""
    if axis.groups is not None:
        return (axis.size,)
    try:
        return tuple(map(lax.axis_size, axis.names))
    except NameError as error:
        raise NameError(
            f"Found an {error}. To fix this, please call {collective} under `jax.shard_map`, "
            "`jax.pmap` or `jax.vmap` with an axis of this name. In a step under `jax.jit` "
            "alone call dq.value_and_grad, whose gradients are reduced."
        ) from None


def check_is_mesh(mesh: Any) -> None:
    """Refuses what is no mesh, such as the sizes of its axes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh={_brief(mesh)} is not a mesh; pass for example dq.make_mesh((-1,), ('data',))"
        )


def sizes_on(mesh: Mesh | AbstractMesh, axis: Axis) -> tuple[int, ...]:
    """The workers on every axis of a mesh; refuses a mesh without these axes."""
    check_is_mesh(mesh)
    missing = [name for name in axis.names if name not in mesh.shape]
    if missing:
        raise ValueError(f"axis_name={missing[0]!r} is not in the mesh; it has {mesh.axis_names}")
    return tuple(mesh.shape[name] for name in axis.names)


def check_groups(axis: Axis, *, all_reduce: bool) -> None:
    """Refuses groups of workers where `jax.lax` does not support them."""
    if axis.groups is None:
        return
    given = f"axis_index_groups={axis.groups}"
    remedy = "give each group an axis of its own and pass its name, as axis_name='gpu' of axes "
    remedy += "('node', 'gpu')"
    if axis.vmapped:
        raise NotImplementedError(f"{given}: jax.vmap has no groups of workers; {remedy}")
    if all_reduce and axis.tracked:
        raise NotImplementedError(
            f"{given}: under jax.shard_map with check_vma=True no sum is replicated within groups "
            f"alone; pass check_vma=False, or {remedy}"
        )


# --- Options --------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, str, NoneType)


ALWAYS = frozenset(("bits", "density", "rank"))
"""Fields that say how much travels: they are printed at their defaults, too."""


class Options:
    """The base of dataclasses of options.

    It prints the fields that are not at their defaults, and those of `ALWAYS`.
    """

    __slots__ = ()

    def __init_subclass__(cls):
        """Keeps `dataclasses.dataclass` from adding a `__repr__` of all fields."""
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Options.__repr__

    def __repr__(self) -> str:
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = ((field, getattr(self, field.name)) for field in fields)
        told = (
            f"{field.name}={value!r}"
            for field, value in values
            if field.name in ALWAYS or value != field.default
        )
        return f"{type(self).__name__}({', '.join(told)})"


def check_fields(options: Any) -> None:
    """Refuses a field whose value is not of the annotated type; for ``__post_init__``.

    An int serves as a float, and a bool serves as neither. Scalars of NumPy become Python's, and
    lists and ranges become tuples, so that every field can be hashed and saved. Of annotations by
    classes only dataclasses are checked. Annotations must not be strings.
    """
    for field in dataclasses.fields(options):
        given = getattr(options, field.name)
        if given is field.default:
            continue
        value = checked(field.name, given, field.type, field.default)
        if value is not given:
            object.__setattr__(options, field.name, value)


def checked(name: str, given: Any, hint: Any, default: Any) -> Any:
    """An option's value as `check_fields` keeps it; refuses one that is not of the type."""
    value = _as_plain(given)
    if not _fits(value, hint):
        wanted = _alternatives(hint)
        raise ValueError(
            f"{name}={given!r}; expected {'one of ' * (len(wanted) > 1)}"
            f"{', '.join(wanted)}, such as {name}={default!r}"
        )
    return value


def _as_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | range | tuple):
        return tuple(map(_as_plain, value))
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as `check_fields` knows such types."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[-1] is Ellipsis:
            return all(_fits(part, parts[0]) for part in value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if hint not in _PLAIN:
        options = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        return isinstance(value, hint) if options else True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _alternatives(hint: Any) -> list[str]:
    """The values that an annotation allows, in words."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return [word for part in parts for word in _alternatives(part)]
    if kind is Literal:
        return [repr(part) for part in parts]
    if kind is tuple:
        return [str(hint)]
    return ["None" if hint is NoneType else hint.__name__]
