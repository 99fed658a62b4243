"""Small integers in ``uint32`` words, two ways.

*Lanes* (`pack_lanes`) are as wide as a sum over all workers needs, so that words can be added
without decoding; `pack_bits` packs fields of any width without gaps, for payloads that are decoded
before they are added. In both, field i is in word i mod W of W words, so that the low ends of all
words are filled first: packing is arithmetic on long vectors, however many lanes a word has.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import UInt, UInt32

from pallas_kernels.format import plane_shift, planes_of


def lane_bits_for(granularity: int, n_workers: int) -> int:
    """The smallest width w of a lane that holds any sum of n integers up to g: n g < 2^w.

    Raises:
      ValueError: no lane of up to 32 bits does.
    """
    if granularity < 1 or n_workers < 1:
        raise ValueError(f"granularity {granularity} and {n_workers} workers; pass 1 or more")
    most = n_workers * granularity
    if most >= 1 << 32:
        raise ValueError(
            f"{n_workers} workers of granularity {granularity} sum to {most}, which exceeds a "
            f"32-bit lane; pass a granularity of at most {((1 << 32) - 1) // n_workers}"
        )
    return most.bit_length()


def _packed(fields, width: int) -> Array:
    """Fields of ``width`` bits, 32 // width to a word, along the last axis."""
    lanes = 32 // width
    words = -(-fields.shape[-1] // lanes)
    spare = [(0, 0)] * (fields.ndim - 1) + [(0, lanes * words - fields.shape[-1])]
    fields = jnp.pad(fields.astype(jnp.uint32), spare)
    fields = fields.reshape(*fields.shape[:-1], lanes, words)
    shifts = lax.broadcasted_iota(jnp.uint32, fields.shape, fields.ndim - 2) * width
    return jnp.sum(fields << shifts, axis=-2, dtype=jnp.uint32)


def _unpacked(words, size: int, width: int) -> Array:
    shape = *words.shape[:-1], 32 // width, words.shape[-1]
    shifts = lax.broadcasted_iota(jnp.uint32, shape, words.ndim - 1) * width
    fields = words[..., None, :] >> shifts & jnp.uint32((1 << width) - 1)
    return fields.reshape(*words.shape[:-1], -1)[..., :size]


def pack_lanes(
    values: UInt32[Array, "*rows m"], lane_bits: int, *, max_sum: int
) -> UInt32[Array, "*rows words"]:
    """Packs 32 // w integers to a word, in lanes that can be added as long as sums fit.

    Args:
      values: nonnegative integers; each row is packed by itself.
      lane_bits: w, see `lane_bits_for`.
      max_sum: the largest sum that a lane will have to hold (n g).

    Returns:
      ``ceil(m / (32 // w))`` words per row.

    Raises:
      ValueError: w is not in 1..32, or a sum of ``max_sum`` would carry into the next lane.
    """
    if not 1 <= lane_bits <= 32:
        raise ValueError(f"lanes of {lane_bits} bits; a word has room for 1 to 32")
    if max_sum >= 1 << lane_bits:
        raise ValueError(
            f"sums up to {max_sum} overflow lanes of {lane_bits} bits; pass lane_bits of at "
            f"least {max_sum.bit_length()}"
        )
    return _packed(values, lane_bits)


def unpack_lanes(
    words: UInt32[Array, "*rows words"], size: int, lane_bits: int
) -> UInt32[Array, "*rows m"]:
    """The ``size`` integers per row of packed lanes, or of a sum of such."""
    return _unpacked(words, size, lane_bits)


def bit_words(size: int, bits: int) -> int:
    """Words that `pack_bits` makes of ``size`` fields."""
    if not 1 <= bits <= 31:
        raise ValueError(f"fields of {bits} bits; pass 1 to 31")
    return sum(-(-size // (32 // plane)) for plane in planes_of(bits))


def pack_bits(fields: UInt[Array, "*rows m"], bits: int) -> UInt32[Array, "*rows words"]:
    """Packs fields of ``bits`` bits in power-of-two planes, as the formats of `pallas_kernels` do.

    The first, largest plane holds the lowest bits of all fields: 3 bits are planes of 2 and 1.

    Args:
      fields: below ``2**bits``; each row is packed by itself.
      bits: 1 to 31.

    Returns:
      ``bit_words(m, bits)`` words per row: m bits / 32 for m a multiple of 32.

    Raises:
      ValueError: ``bits`` is out of range.
    """
    bit_words(fields.shape[-1], bits)
    fields = fields.astype(jnp.uint32)
    planes = []
    for plane in planes_of(bits):
        part = fields >> plane_shift(bits, plane) & jnp.uint32((1 << plane) - 1)
        planes.append(_packed(part, plane))
    return jnp.concatenate(planes, axis=-1)


def unpack_bits(
    words: UInt32[Array, "*rows words"], size: int, bits: int
) -> UInt32[Array, "*rows m"]:
    """The ``size`` fields per row that `pack_bits` packed.

    Raises:
      ValueError: rows are not of ``size`` fields.
    """
    if words.shape[-1] != bit_words(size, bits):
        raise ValueError(
            f"rows have {words.shape[-1]} words, but {size} fields of {bits} bits take "
            f"{bit_words(size, bits)}; pass the size and bits they were packed with"
        )
    fields, at = jnp.uint32(0), 0
    for plane in planes_of(bits):
        end = at + bit_words(size, plane)
        fields = fields | _unpacked(words[..., at:end], size, plane) << plane_shift(bits, plane)
        at = end
    return jnp.asarray(fields)
