"""The DynamiQ method: bits → floors and widths → plan → payloads."""

from dynamiq_jax.methods.dynamiq.format import Format
from dynamiq_jax.methods.dynamiq.method import DynamiQ

__all__ = ["DynamiQ", "Format"]
