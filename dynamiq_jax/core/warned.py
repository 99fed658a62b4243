"""Warnings that name the user's line."""

import sys
import warnings

INSIDE = frozenset(
    "dynamiq_jax jax optax flax jaxtyping beartype contextlib functools importlib".split()
)
"""Packages that call this library for the user: a warning does not name their lines."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the innermost line on the stack that is neither this library's nor JAX's."""
    frame, level = sys._getframe(1), 2  # level 1 is the line below
    while frame.f_back is not None and _package(frame) in INSIDE:
        # Python does not count its own frames of an import.
        level += "importlib._bootstrap" not in frame.f_code.co_filename
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _package(frame) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""
