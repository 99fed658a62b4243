"""Rounding of numbers to another dtype."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def rounded_to(dtype: Any, x: Array) -> Array:
    """Rounds ``x`` to the numbers of a floating-point ``dtype``, and keeps the dtype of ``x``.

    XLA may drop a cast to ``dtype`` that a cast back follows, but not this.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)
