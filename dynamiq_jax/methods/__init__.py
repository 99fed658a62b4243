"""Methods: how one flat array is reduced over one axis."""

from dynamiq_jax.methods.dynamiq import DynamiQ

__all__ = ["DynamiQ"]
