"""MXFP8, MXFP6 and MXFP4: sums of OCP Microscaling floats, whose blocks of 32 share a scale.

Every encoding of a partial sum has scales of its own, sent with it.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from dynamiq_jax.comparators import mx_codec as mx
from dynamiq_jax.comparators.lanes import bit_words, chunk_noise
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.plain import ChunkLayout, PlainCodec, PlainMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class _MX(PlainMethod):
    element: str
    rounding: Literal["nearest", "stochastic"] = "nearest"
    unit = 4 * mx.BLOCK  # whole words of scale codes

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        codes = bit_words(chunk_size, mx.ELEMENTS[self.element].bits)
        return 32 * (bit_words(chunk_size // mx.BLOCK, 8) + codes)

    def operations(
        self, x: Float[Array, " d"], shared: Array, layout: ChunkLayout, call: Call
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """Payloads of `mx.encode`."""
        element, size, noise = mx.ELEMENTS[self.element], layout.chunk_size, None
        if self.rounding == "stochastic":
            noise = chunk_noise(shared, call.n_slots, layout)

        def encode(values, chunk, slot):
            return mx.encode(values, element, None if noise is None else noise(chunk, slot))

        return x, PlainCodec(encode, lambda payload, chunk: mx.decode(payload, size, element))


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8(_MX):
    """All-reduce of 8-bit floats in blocks of 32 with a power-of-two scale: 8.25 bits per value.

    Attributes:
      element: "e4m3" or "e5m2", by bits of exponent and mantissa.
      rounding: "nearest" (ties to even; biased) or "stochastic" (unbiased but for what saturates,
        at about twice the squared error). Pass a new key in every step: without one, the noise is
        always the same.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP6(_MX):
    """All-reduce of 6-bit floats in blocks of 32 with a power-of-two scale: 6.25 bits per value.

    Attributes:
      element: "e3m2" or "e2m3".
      rounding: as in `MXFP8`.
    """

    element: Literal["e3m2", "e2m3"] = "e3m2"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4(_MX):
    """All-reduce of 4-bit floats in blocks of 32 with a power-of-two scale: 4.25 bits per value.

    Attributes:
      element: "e2m1".
      rounding: as in `MXFP8`.
    """

    element: Literal["e2m1"] = "e2m1"
