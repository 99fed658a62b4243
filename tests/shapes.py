"""Checks annotated shapes and dtypes while tests run: `conftest` installs it on both packages."""

import typing

from beartype import beartype
from jaxtyping import AbstractArray


def gives_shape(hint) -> bool:
    """Whether a jaxtyping annotation is anywhere in ``hint``."""
    is_array = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return is_array or any(map(gives_shape, typing.get_args(hint)))


def checked(function):
    """`beartype` of the annotations that give shapes.

    Others are left to pyright: what users get wrong must reach the library's own errors.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if gives_shape(hint)}
    return beartype(function)
