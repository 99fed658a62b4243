"""Methods: how one flat array is reduced over one axis."""

from dynamiq_jax.methods.base import Method, State
from dynamiq_jax.methods.dynamiq import DynamiQ, Format
from dynamiq_jax.methods.error_feedback import ErrorFeedback
from dynamiq_jax.methods.plain import PlainMethod
from dynamiq_jax.methods.uncompressed import BF16, F32, unless_plain

__all__ = [
    "BF16",
    "DynamiQ",
    "ErrorFeedback",
    "F32",
    "Format",
    "Method",
    "PlainMethod",
    "State",
    "unless_plain",
]
