"""The noise of stochastic rounding in plain codecs."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt, UInt32

from dynamiq_jax.methods.plain import ChunkLayout
from pallas_kernels.hashing import Noise, noise_words, slot_noise


def chunk_noise(
    seed: UInt[Array, " 2"], n_slots: int, layout: ChunkLayout
) -> Callable[[Array, Array | int], UInt32[Array, " m"]]:
    """The function (chunk, slot) -> a uniform word per coordinate, independent between slots.

    Chunks are multiples of 4 coordinates.
    """
    rows = slot_noise(seed, n_slots, "independent")

    def words(chunk, slot):
        within = jnp.arange(layout.chunk_size, dtype=jnp.uint32)
        quad = jnp.asarray(chunk, jnp.uint32) * (layout.chunk_size // 4) + within // 4
        return noise_words(quad, within % 4 * 8, Noise(*rows[slot]), "independent")

    return words


def uniform(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Numbers in [0, 1) from uniform words, multiples of 2^-23."""
    return (words >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)
