"""How far an estimate is from the exact sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def vnmse(estimate, exact) -> Float[Array, ""]:
    """Vector-normalised mean squared error: |estimate - exact|² / |exact|² over a whole pytree.

    Both trees have the same structure; arithmetic is f32. Zero for two zero trees (unitless).
    """

    def squared(tree):
        return sum(
            (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)),
            start=jnp.float32(0),
        )

    difference = jax.tree.map(
        lambda a, b: jnp.asarray(a, jnp.float32) - jnp.asarray(b, jnp.float32), estimate, exact
    )
    error, norm = squared(difference), squared(jax.tree.map(jnp.asarray, exact))
    return jnp.where(error == 0, 0.0, error / norm)
