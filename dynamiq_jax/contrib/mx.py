"""MXFP8, MXFP6 and MXFP4: OCP Microscaling floats, whose blocks of 32 share a power-of-two scale.

Every encoding of a partial sum computes new scales, which are sent with it. The *scale code* s is
an E8M0 byte: the block's scale is 2^(s - 127), and s = 255 marks a block with a NaN or an infinity.
An *element* is a float of 4, 6 or 8 bits (`ELEMENTS`); its *code* is the usual sign, exponent and
mantissa bit pattern. A value v is sent as the element nearest to v / scale.

A payload is one array of words, which `pallas_kernels.mx` describes. On NVIDIA GPUs one kernel
encodes a chunk, one decodes what arrived, adds it up and encodes the sum, and one decodes a
finished sum (`pallas_kernels.mx_kernels`). Elsewhere XLA makes the kernels of a codec of single
chunks (`methods.plain`). Both give the same bits.
"""

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array
from jaxtyping import Float, UInt32

from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.executors.codec import ChunkCodec
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.plain import ChunkLayout, PlainMethod
from pallas_kernels import Backend, Choice, choose_backend, resolve_backend
from pallas_kernels.mx import UNIT, Element, Form, decode, encode

ELEMENTS = {
    "e4m3": Element(4, 3, 7, 448.0),
    "e5m2": Element(5, 2, 15, 57344.0),
    "e3m2": Element(3, 2, 3, 28.0),
    "e2m3": Element(2, 3, 1, 7.5),
    "e2m1": Element(2, 1, 1, 6.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _MX(PlainMethod):
    element: str
    rounding: Literal["nearest", "stochastic"] = "nearest"
    backend: Backend | None = None
    unit = UNIT  # whole words of scale codes

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)

    @property
    def kernels(self) -> Choice:
        """See `Method`."""
        return choose_backend(self.backend)

    def encode(
        self, values: Float[Array, " m"], noise: UInt32[Array, " m"]
    ) -> UInt32[Array, " words"]:
        """See `PlainMethod`."""
        stochastic = self.rounding == "stochastic"
        return encode(values, ELEMENTS[self.element], noise if stochastic else None)

    def decode(self, payload: UInt32[Array, " words"], size: int) -> Float[Array, " m"]:
        """See `PlainMethod`."""
        return decode(payload, size, ELEMENTS[self.element])

    def codec(
        self, x: Float[Array, " d"], shared: Any, layout: ChunkLayout, call: Call
    ) -> ChunkCodec:
        """See `HopMethod`; by kernels where the backend has them."""
        backend = resolve_backend(self.kernels.backend)
        if backend == "jnp":
            return PlainMethod.codec(self, x, shared, layout, call)
        from dynamiq_jax.contrib.mx_codec import kernel_codec

        stochastic = self.rounding == "stochastic"
        form = Form(ELEMENTS[self.element], stochastic, layout.chunk_size, backend)
        return kernel_codec(x, shared, layout, call, form)


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8(_MX):
    """All-reduce of 8-bit floats in blocks of 32 with a power-of-two scale: 8.25 bits per value.

    Attributes:
      element: "e4m3" or "e5m2", named by the bits of exponent and mantissa.
      rounding: "nearest" (ties to even; biased) or "stochastic" (unbiased except for values that
        saturate, with about twice the squared error). Pass a new key in every step: without one,
        the noise is always the same.
      backend: which kernels run: "triton" or "mosaic" (NVIDIA GPUs), "jnp" (XLA's), or "interpret"
        (the first on Pallas' interpreter); `None` chooses by platform.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP6(_MX):
    """All-reduce of 6-bit floats in blocks of 32 with a power-of-two scale: 6.25 bits per value.

    It has the attributes of `MXFP8`; elements are "e3m2" and "e2m3".
    """

    element: Literal["e3m2", "e2m3"] = "e3m2"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4(_MX):
    """All-reduce of 4-bit floats in blocks of 32 with a power-of-two scale: 4.25 bits per value.

    It has the attributes of `MXFP8`; the element is "e2m1".
    """

    element: Literal["e2m1"] = "e2m1"
