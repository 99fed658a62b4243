"""Synthetic gradients with the spread of magnitudes that training shows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def lognormal_magnitudes(pick_key: Array, wide_key: Array, super_groups: int) -> Float[Array, " M"]:
    """Magnitudes M of super-groups: 0.79 LogNormal(-3.99, 1.22) + 0.21 LogNormal(-16.41, 4.63)."""
    low = jax.random.uniform(pick_key, (super_groups,)) < 0.79
    normal = jax.random.normal(wide_key, (super_groups,))
    return jnp.exp(jnp.where(low, -3.99 + 1.22 * normal, -16.41 + 4.63 * normal))


def lognormal_mixture(
    key: Array, n_workers: int, super_groups: int, super_group_size: int = 256
) -> Float[Array, "n d"]:
    """Gaussian coordinates whose magnitudes are the paper's mixture, one per super-group.

    Magnitudes M (`lognormal_magnitudes`) are the same on all workers; coordinates are independent
    N(0, M²/S) per worker. Returns f32.
    """
    pick_key, wide_key, value_key = jax.random.split(key, 3)
    magnitude = lognormal_magnitudes(pick_key, wide_key, super_groups)
    x = jax.random.normal(value_key, (n_workers, super_groups, super_group_size))
    x = x * (magnitude / super_group_size**0.5)[None, :, None]
    return x.reshape(n_workers, -1)
