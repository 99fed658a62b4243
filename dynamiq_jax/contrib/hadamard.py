"""Randomized Hadamard transforms of *pieces*: power-of-two parts of a flat array.

A rotation spreads every coordinate over its whole piece: the output is nearly Gaussian for any
input, and a few outliers no longer determine the range. The rotation is linear, is its own inverse
up to signs, and preserves norms.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt32

from pallas_kernels.hashing import mix, quad_hash, seed_words

PIECE_SIZE = 1 << 17
"""The default for the most coordinates that are rotated together."""

_SMALLEST_CUT = 1 << 10  # shorter pieces save little padding and look less Gaussian
_PADDING = 1 / 16  # of an array's size, tolerated before pieces get shorter
_FACTOR_BITS = 7  # H_128 is the largest factor of a rotation
_SIGN_STREAM = 0x6A09E667  # keeps signs apart from the rounding noise of the same seed


def piece_shape(size: int, *, piece_size: int = PIECE_SIZE) -> tuple[int, int]:
    """The shape (pieces, D) for an array of ``size`` coordinates.

    D is the largest power of two, up to ``piece_size``, that adds at most 1/16 of padding; small
    arrays need more padding. Raises `ValueError` if ``piece_size`` is not a power of two.
    """
    if piece_size < 1 or piece_size & (piece_size - 1):
        raise ValueError(f"piece_size is {piece_size}; pass a power of two, such as {PIECE_SIZE}")
    length = min(piece_size, 1 << max(size - 1, 0).bit_length())
    while length > _SMALLEST_CUT and -size % length > _PADDING * size:
        length //= 2
    return max(1, -(-size // length)), length


def cut(x: Float[Array, " d"], *, piece_size: int = PIECE_SIZE) -> Float[Array, "pieces D"]:
    """A flat array as f32 pieces of `piece_shape`; zeros pad the last piece."""
    pieces, length = piece_shape(x.shape[0], piece_size=piece_size)
    x = jnp.pad(x.astype(jnp.float32), (0, pieces * length - x.shape[0]))
    return x.reshape(pieces, length)


def join(pieces: Float[Array, "pieces D"], size: int) -> Float[Array, " size"]:
    """The inverse of `cut` for an array of ``size`` coordinates."""
    return pieces.reshape(-1)[:size]


def _signs(shape: tuple[int, ...], seed) -> Array:
    """Signs +-1, f32: bit i mod 32 of the hash of i // 32, for coordinate i of the whole array."""
    a, b = seed_words(seed)
    size = math.prod(shape)
    hashed = quad_hash(
        jnp.arange(-(-size // 32), dtype=jnp.uint32), mix(a ^ jnp.uint32(_SIGN_STREAM)), b
    )
    bits = hashed[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None] & 1
    return 1 - 2 * bits.reshape(-1)[:size].reshape(shape).astype(jnp.float32)


@functools.cache
def _hadamard_matrix(bits: int) -> np.ndarray:
    """H of 2^bits rows in Sylvester's order, entries +-1."""
    matrix = np.ones((1, 1), np.float32)
    for _ in range(bits):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def hadamard(x) -> Array:
    """H x along the last axis, not normalized: H is a Kronecker product of small factors."""
    bits = x.shape[-1].bit_length() - 1
    count = -(-bits // _FACTOR_BITS)
    factors = [(bits + i) // count for i in range(count)]
    y = x.reshape(-1, *(1 << f for f in factors))
    for f in factors:  # each contracts the first factor's axis and comes out last
        matrix = jnp.asarray(_hadamard_matrix(f))
        y = jnp.tensordot(y, matrix, axes=(1, 0), precision=lax.Precision.HIGHEST)
    return y.reshape(x.shape)


def rotate(x: Float[Array, "*pieces D"], seed: UInt32[Array, " 2"]) -> Float[Array, "*pieces D"]:
    """The transform H diag(s) x / sqrt(D) of every piece, f32; the seed determines the signs s."""
    return hadamard(x * (_signs(x.shape, seed) / math.sqrt(x.shape[-1])))


def unrotate(r: Float[Array, "*pieces D"], seed: UInt32[Array, " 2"]) -> Float[Array, "*pieces D"]:
    """The inverse of `rotate` under the same seed, up to rounding."""
    return hadamard(r) * (_signs(r.shape, seed) / math.sqrt(r.shape[-1]))
