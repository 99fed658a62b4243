"""Min-max quantisation: the codes of Flash Communication and QSDP, over any topology.

Flash Communication (Li et al., arXiv 2412.04964) rounds to nearest in groups of 128. QSDP (Markov
et al., ICML 2023) rounds gradients stochastically in buckets of 1024.

A bucket of G values has an *offset*, its minimum, and a *step*, its range over 2^b - 1, both bf16:
the offset is rounded down and the step up, so that the levels enclose all values. A payload is one
array of words: first the offsets and steps, one word for each bucket, then the codes of b bits in
bit planes.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt32

from dynamiq_jax.contrib import lanes
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.plain import PlainMethod

Rounding = Literal["nearest", "stochastic"]

MOST = 2.0**126
"""The limit at which values are clipped, so that the range of a bucket is finite."""
LEAST_RANGE = 2.0**-117
"""The limit below which the range of a bucket counts as zero, so that no step is subnormal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMax(PlainMethod):
    """All-reduce of ``bits``-bit codes between the minimum and the maximum of each bucket.

    The extremes are sent with the codes. Every encoding of a partial sum computes new extremes;
    values beyond 2^126 are clipped. In general zero is not a level, so zeros change in a bucket
    that also has other values. Flash Communication is ``rounding="nearest"`` over `Direct`; QSDP is
    ``bits=8, bucket_size=1024``.

    Attributes:
      bits: the bits of a code, 1 to 8; the wire needs 32 / ``bucket_size`` more.
      bucket_size: the number of coordinates that share offset and step, a multiple of 4.
      rounding: "nearest" (biased) or "stochastic" (unbiased, with at least twice the squared
        error). For "stochastic" pass a new key in every step: without one, the noise is always the
        same.
    """

    bits: int = 4
    bucket_size: int = 128
    rounding: Rounding = "stochastic"

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} must be an integer from 1 to 8, such as 4")
        if self.bucket_size < 4 or self.bucket_size % 4:
            raise ValueError(
                f"bucket_size={self.bucket_size} must be a positive multiple of 4, such as 128"
            )

    @property
    def unit(self) -> int:
        """Chunks have whole buckets."""
        return self.bucket_size

    def encode(
        self, values: Float[Array, " m"], noise: UInt32[Array, " m"]
    ) -> UInt32[Array, " words"]:
        """See `PlainMethod`."""
        top = (1 << self.bits) - 1
        x = values.astype(jnp.float32).reshape(-1, self.bucket_size)
        finite = jnp.all(jnp.isfinite(x), axis=1)  # the least of numbers may be taken without NaN
        values = jnp.where(finite[:, None], jnp.clip(x, -MOST, MOST), 0.0)
        offset = as_bf16(jnp.min(values, axis=1), up=False)
        span = jnp.max(values, axis=1) - offset
        step = as_bf16(jnp.where(span > LEAST_RANGE, span / top, 0.0), up=True)
        scaled = jnp.where(step > 0, 1.0 / jnp.where(step > 0, step, 1.0), 0.0)[:, None]
        # Rounded on its own, or a compiler may fuse it with the addition of the noise.
        scaled = lax.reduce_precision((values - offset[:, None]) * scaled, 8, 22)
        if self.rounding == "nearest":
            codes = jnp.round(scaled)
        else:
            codes = jnp.floor(scaled + lanes.uniform(noise.reshape(values.shape)))
        codes = jnp.clip(codes, 0, top).astype(jnp.uint32)
        offset, step = (jnp.where(finite, part, jnp.nan) for part in (offset, step))
        words = lanes.words_of(offset) >> 16 | lanes.words_of(step) & jnp.uint32(0xFFFF0000)
        return jnp.concatenate([words, lanes.pack_bits(codes.reshape(-1), self.bits)])

    def decode(self, payload: UInt32[Array, " words"], size: int) -> Float[Array, " m"]:
        """See `PlainMethod`."""
        buckets = size // self.bucket_size
        words = payload[:buckets, None]
        offset, step = lanes.floats_of(words << 16), lanes.floats_of(words & jnp.uint32(0xFFFF0000))
        levels = lanes.unpack_bits(payload[buckets:], size, self.bits).reshape(buckets, -1)
        return (offset + levels.astype(jnp.float32) * step).reshape(-1)


def as_bf16(x: Float[Array, " n"], *, up: bool) -> Float[Array, " n"]:
    """The next bf16 number, upwards or downwards."""
    bits = lanes.words_of(x)
    cut = bits & jnp.uint32(0xFFFF0000)
    away = (bits != cut) & ((bits >> 31 == 0) == up)
    return lanes.floats_of(cut + away.astype(jnp.uint32) * 0x10000)
