"""Methods: how one flat array is reduced over one axis."""

from typing import Any

from dynamiq_jax.methods import base
from dynamiq_jax.methods.base import Method, State
from dynamiq_jax.methods.dynamiq import DynamiQ, Format
from dynamiq_jax.methods.error_feedback import ErrorFeedback
from dynamiq_jax.methods.plain import PlainMethod
from dynamiq_jax.methods.uncompressed import BF16, F32

__all__ = [
    "BF16",
    "DynamiQ",
    "ErrorFeedback",
    "F32",
    "Format",
    "Method",
    "PlainMethod",
    "State",
]


def __getattr__(name: str) -> Any:
    """The deprecated `ShardedMethod`, with a warning."""
    if name != "ShardedMethod":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(base, name)
