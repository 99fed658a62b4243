"""Warnings that name the user's line."""

import sys
import warnings

INSIDE = frozenset("dynamiq_jax jax optax flax jaxtyping beartype contextlib functools".split())
"""Packages that call this library for the user: a warning does not name their lines."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the innermost line on the stack that is neither this library's nor JAX's."""
    frame, level = sys._getframe(1), 2  # level 1 is the line below
    while frame.f_back is not None and _package(frame) in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""
