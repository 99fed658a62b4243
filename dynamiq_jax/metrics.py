"""How far an estimate is from the exact sum."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def vnmse(estimate, exact) -> Float[Array, ""]:
    """Vector-normalised mean squared error: |estimate - exact|² / |exact|² over a whole pytree.

    Both trees have the same structure; arithmetic is f32. Zero for two zero trees (unitless).
    """
    difference = jax.tree.map(
        lambda a, b: jnp.asarray(a, jnp.float32) - jnp.asarray(b, jnp.float32), estimate, exact
    )
    error, norm = _squared(difference), _squared(exact)
    return jnp.where(error == 0, 0.0, error / norm)


def worst_leaf_error(estimate, exact, *, min_size: int = 0) -> Float[Array, ""]:
    """The largest relative error of a leaf: |estimate - exact|² / |exact|² of each leaf alone.

    It predicts the training loss better than `vnmse`: Adam takes equal steps in all coordinates, so
    that a leaf of little energy suffers from noise as much as one of much, and `vnmse` hardly sees
    it.

    Both trees have the same structure; arithmetic is f32. A leaf whose exact value is all zero has
    no relative error and does not count: an estimate of it that is not zero would be infinitely
    wrong and hide all other leaves. Zero if no leaf counts (unitless).

    Args:
      estimate: arrays of any shapes.
      exact: arrays of the same shapes.
      min_size: leaves of fewer coordinates do not count. `psum` sums those below its method's
        ``min_leaf_size`` exactly.
    """
    errors = jax.tree.leaves(jax.tree.map(vnmse, estimate, exact))
    counted = (
        jnp.where(_squared(leaf) == 0, 0.0, error)
        for error, leaf in zip(errors, jax.tree.leaves(exact), strict=True)
        if jnp.size(leaf) >= min_size
    )
    return functools.reduce(jnp.maximum, counted, jnp.float32(0))


def _squared(tree) -> Float[Array, ""]:
    """|tree|², in f32."""
    return sum(
        (jnp.sum(jnp.square(jnp.asarray(x, jnp.float32))) for x in jax.tree.leaves(tree)),
        start=jnp.float32(0),
    )
