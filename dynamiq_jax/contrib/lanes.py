"""Small integers in ``uint32`` words, and numbers from uniform words.

*Lanes* (`pack_lanes`) are wide enough for a sum over all workers, so that words can be added
without decoding. `pack_bits` packs fields of any width without gaps, for payloads that are decoded
before they are added. In both, field i is in word i mod W of W words, so that the low bits of all
words are filled first: packing is arithmetic on long vectors, for any number of lanes in a word.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt, UInt32

from pallas_kernels.format import plane_shift, planes_of


def pack_lanes(values: UInt[Array, "*rows m"], width: int) -> UInt32[Array, "*rows words"]:
    """Packs nonnegative integers in lanes of ``width`` bits, 32 // width to a word, row by row."""
    lanes = 32 // width
    words = -(-values.shape[-1] // lanes)
    spare = [(0, 0)] * (values.ndim - 1) + [(0, lanes * words - values.shape[-1])]
    fields = jnp.pad(values.astype(jnp.uint32), spare)
    fields = fields.reshape(*fields.shape[:-1], lanes, words)
    shifts = lax.broadcasted_iota(jnp.uint32, fields.shape, fields.ndim - 2) * width
    return jnp.sum(fields << shifts, axis=-2, dtype=jnp.uint32)


def unpack_lanes(
    words: UInt32[Array, "*rows words"], size: int, width: int
) -> UInt32[Array, "*rows m"]:
    """The ``size`` integers per row of packed lanes, or of a sum of packed lanes."""
    shape = *words.shape[:-1], 32 // width, words.shape[-1]
    shifts = lax.broadcasted_iota(jnp.uint32, shape, words.ndim - 1) * width
    fields = words[..., None, :] >> shifts & jnp.uint32((1 << width) - 1)
    return fields.reshape(*words.shape[:-1], -1)[..., :size]


def bit_words(size: int, bits: int) -> int:
    """The number of words of ``size`` fields of 1 to 31 bits: size bits / 32, rounded."""
    return sum(-(-size // (32 // plane)) for plane in planes_of(bits))


def pack_bits(fields: UInt[Array, "*rows m"], bits: int) -> UInt32[Array, "*rows words"]:
    """Packs fields below 2^bits in power-of-two planes, like the formats of `pallas_kernels`.

    The first plane is the largest and holds the lowest bits of all fields: 3 bits need planes of 2
    and 1.
    """
    fields = fields.astype(jnp.uint32)
    planes = []
    for plane in planes_of(bits):
        part = fields >> plane_shift(bits, plane) & jnp.uint32((1 << plane) - 1)
        planes.append(pack_lanes(part, plane))
    return jnp.concatenate(planes, axis=-1)


def unpack_bits(
    words: UInt32[Array, "*rows words"], size: int, bits: int
) -> UInt32[Array, "*rows m"]:
    """The ``size`` fields per row that `pack_bits` packed; refuses rows of another size."""
    if words.shape[-1] != bit_words(size, bits):
        raise ValueError(
            f"rows have {words.shape[-1]} words, but {size} fields of {bits} bits take "
            f"{bit_words(size, bits)}; pass the size and bits they were packed with"
        )
    fields, at = jnp.uint32(0), 0
    for plane in planes_of(bits):
        end = at + bit_words(size, plane)
        part = unpack_lanes(words[..., at:end], size, plane)
        fields, at = fields | part << plane_shift(bits, plane), end
    return jnp.asarray(fields)


def uniform(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Numbers in [0, 1) from uniform words, multiples of 2^-23."""
    return (words >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)


def words_of(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of numbers as f32."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def floats_of(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The inverse of `words_of`."""
    return lax.bitcast_convert_type(words, jnp.float32)
