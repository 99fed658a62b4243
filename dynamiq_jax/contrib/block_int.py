"""Blocks of symmetric integers: the codes of EQuARX, ZeRO++ and SDP4Bit, over any topology.

EQuARX (Ahmed et al., arXiv 2506.17615) sends int8 blocks in the all-reduces of XLA. ZeRO++ (Wang et
al., arXiv 2306.10209) sends gradients as int4 blocks and adds them up after decoding, so that every
gradient is encoded once. SDP4Bit (Jia et al., arXiv 2410.15526) sends gradients as int4 blocks that
a Hadamard transform has smoothed, and differences of parameters as int4 blocks.

A block has one scale, its largest magnitude over 2^(b-1) - 1, which is rounded up to bf16. A code
is a value over the scale, rounded to an integer. A payload has two arrays: the scales, and the
codes of b bits in bit planes.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt16, UInt32

from dynamiq_jax.contrib import lanes
from dynamiq_jax.contrib.hadamard import hadamard
from dynamiq_jax.contrib.minmax import Rounding, as_bf16
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.plain import PlainMethod

MOST = 2.0**124
"""The limit at which values are clipped, so that smoothed ones are finite."""
LEAST_SCALE = 2.0**-100
"""The limit below which a scale counts as zero, so that its inverse is finite."""
SMOOTHED = 32
"""Coordinates that the Hadamard transform mixes; the signs are not random."""

Payload = tuple[UInt16[Array, " blocks"], UInt32[Array, " words"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInt(PlainMethod):
    """All-reduce of ``bits``-bit integers with one bf16 scale for each block.

    Zeros stay zeros, unless ``smooth``. Values beyond 2^124 are clipped. EQuARX is the default.
    ZeRO++ sends gradients with ``bits=4`` over `Direct`, and SDP4Bit with ``bits=4, smooth=True``
    between hosts.

    Attributes:
      bits: the bits of a code, its sign included, 2 to 8; the wire needs 16 / ``block_size`` more.
      block_size: the number of coordinates that share a scale, a multiple of 32.
      rounding: "nearest" (biased) or "stochastic" (unbiased, with at least twice the squared
        error). For "stochastic" pass a new key in every step: without one, the noise is always the
        same.
      smooth: whether a Hadamard transform mixes each 32 coordinates before they are encoded.
    """

    bits: int = 8
    block_size: int = 128
    rounding: Rounding = "nearest"
    smooth: bool = False

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} must be an integer from 2 to 8, such as 8")
        if self.block_size < SMOOTHED or self.block_size % SMOOTHED:
            raise ValueError(
                f"block_size={self.block_size} must be a positive multiple of {SMOOTHED}, as 128"
            )

    @property
    def unit(self) -> int:
        """Chunks have whole blocks."""
        return self.block_size

    def encode(self, values: Float[Array, " m"], noise: UInt32[Array, " m"]) -> Payload:
        """See `PlainMethod`."""
        x = values.astype(jnp.float32).reshape(-1, self.block_size)
        finite = jnp.all(jnp.isfinite(x), axis=1)  # the largest of numbers may be taken without NaN
        x = self._smoothed(jnp.where(finite[:, None], jnp.clip(x, -MOST, MOST), 0.0))
        largest = jnp.max(jnp.abs(x), axis=1) / self._most
        scale = as_bf16(jnp.where(largest > LEAST_SCALE, largest, 0.0), up=True)
        inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)[:, None]
        # Rounded on its own, or a compiler may fuse it with the addition of the noise.
        scaled = lax.reduce_precision(x * inverse, 8, 22)
        if self.rounding == "nearest":
            codes = jnp.round(scaled)
        else:
            codes = jnp.floor(scaled + lanes.uniform(noise.reshape(x.shape)))
        codes = jnp.clip(codes, -self._most, self._most).astype(jnp.int32) + self._most
        words = lanes.pack_bits(codes.astype(jnp.uint32).reshape(-1), self.bits)
        scale = jnp.where(finite, scale, jnp.nan).astype(jnp.bfloat16)
        # XLA for CPU would send numbers of bf16 in 32 bits, and integers as they are.
        return lax.bitcast_convert_type(scale, jnp.uint16), words

    def decode(self, payload: Payload, size: int) -> Float[Array, " m"]:
        """See `PlainMethod`."""
        bits, words = payload
        scale = lax.bitcast_convert_type(bits, jnp.bfloat16)
        codes = lanes.unpack_bits(words, size, self.bits).astype(jnp.int32) - self._most
        x = codes.reshape(-1, self.block_size).astype(jnp.float32)
        return self._smoothed(x * scale.astype(jnp.float32)[:, None]).reshape(-1)

    def _smoothed(self, x: Float[Array, "blocks b"]) -> Float[Array, "blocks b"]:
        """The transform, which is its own inverse."""
        if not self.smooth:
            return x
        parts = x.reshape(-1, SMOOTHED) / math.sqrt(SMOOTHED)  # first, or sums could overflow
        return hadamard(parts).reshape(x.shape)

    @property
    def _most(self) -> int:
        """The largest magnitude of a code."""
        return 2 ** (self.bits - 1) - 1
