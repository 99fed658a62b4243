"""Dataclasses of options: how they print, and whether fields hold what they are annotated with."""

import dataclasses
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

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
        value = _as_plain(given)
        if not _fits(value, field.type):
            wanted = _alternatives(field.type)
            raise ValueError(
                f"{field.name}={given!r}; expected {'one of ' * (len(wanted) > 1)}"
                f"{', '.join(wanted)}, such as {field.name}={field.default!r}"
            )
        if value is not given:
            object.__setattr__(options, field.name, value)


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
