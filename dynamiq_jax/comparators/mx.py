"""MXFP8, MXFP6 and MXFP4: OCP Microscaling floats, whose blocks of 32 share a power-of-two scale.

Every encoding of a partial sum computes new scales, which are sent with it. The *scale code* s is
an E8M0
byte: the block's scale is 2^(s - 127), and s = 255 (`NAN_SCALE`) marks a block with a NaN or an
infinity. An *element* is a float of 4, 6 or 8 bits (`ELEMENTS`); its *code* is the usual sign,
exponent and mantissa bit pattern. A value v is sent as the element nearest to v / scale.

A payload is one array of words: scale codes, four to a word, then the codes in bit planes. Rounding
and scaling use integer arithmetic on the bits of f32 numbers, so that the result is the same on
backends that flush subnormal f32 numbers to zero and on those that do not.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dynamiq_jax.comparators import lanes
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.plain import PlainMethod

BLOCK = 32
"""The number of values that share a scale."""
NAN_SCALE = 255
"""The scale code of a block with a NaN or an infinity."""

_SCALE_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF  # of an f32: 8 exponent bits above 23 mantissa bits
_MANTISSA = 0x007FFFFF
_LEADING_ONE = 0x00800000
_INFINITY = 0x7F800000


@dataclass(frozen=True, slots=True)
class Element:
    """A small float format: its exponent and mantissa bits, bias, and largest finite magnitude."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float

    @property
    def bits(self) -> int:
        """The bits of a code, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal magnitude."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """The exponent of `max_value`."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def max_code(self) -> int:
        """The code of `max_value`; larger codes, if there are any, are infinity and NaN."""
        significand = int(math.ldexp(self.max_value, self.mantissa_bits - self.emax))
        return (self.emax - self.emin << self.mantissa_bits) + significand


ELEMENTS = {
    "e4m3": Element(4, 3, 7, 448.0),
    "e5m2": Element(5, 2, 15, 57344.0),
    "e3m2": Element(3, 2, 3, 28.0),
    "e2m3": Element(2, 3, 1, 7.5),
    "e2m1": Element(2, 1, 1, 6.0),
}


def _fields(bits) -> tuple[Array, Array]:
    """(e, s) of f32 bits, int32 and uint32: the magnitude is s * 2^(e - 150), 1 <= e, s < 2^24."""
    exponent = ((bits & _MAGNITUDE) >> 23).astype(jnp.int32)
    significand = (bits & _MANTISSA) | jnp.where(exponent > 0, jnp.uint32(_LEADING_ONE), 0)
    return jnp.maximum(exponent, 1), significand


def _times_power_of_two(x, power) -> Array:
    """x * 2^power for finite f32 x and |power| < 256, rounded toward zero if it is subnormal."""
    bits = lanes.words_of(x)
    exponent, significand = _fields(bits)
    lead = jax.lax.clz(significand) - 8  # above 0 for subnormal x and zero
    significand = significand << lead
    exponent = exponent - lead.astype(jnp.int32) + power
    # The leading one, if there is one, adds the last 1 to the exponent field.
    normal = (jnp.maximum(exponent - 1, 0).astype(jnp.uint32) << 23) + significand
    subnormal = significand >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    magnitude = jnp.where(exponent > 0, jnp.minimum(normal, _INFINITY), subnormal)
    magnitude = jnp.where(significand == 0, 0, magnitude)
    return lanes.floats_of((bits & ~jnp.uint32(_MAGNITUDE)) | magnitude)


def quantize(
    u: Float[Array, "*shape"], element: Element, noise: UInt32[Array, "*shape"] | None
) -> UInt32[Array, "*shape"]:
    """The element codes of values, including subnormals; saturates at +-``max_value``.

    Without noise, values are rounded to nearest, ties to even. Uniform words round stochastically:
    up if fraction + noise / 2^32 reaches 1. For negative values the complement of the word is used.
    """
    bits = lanes.words_of(u)
    sign = bits >> 31
    exponent, significand = _fields(bits)
    octave = exponent - 127 - element.emin  # below 0: subnormal elements, one step for all of them
    shift = 23 - element.mantissa_bits + jnp.maximum(-octave, 0)
    kept = significand >> jnp.minimum(shift, 31).astype(jnp.uint32)
    # What is dropped, in units of 2^-32 steps: bits that are kept leave at the top.
    dropped = significand << jnp.clip(32 - shift, 0, 31).astype(jnp.uint32)
    dropped = dropped >> jnp.clip(shift - 32, 0, 31).astype(jnp.uint32)
    if noise is None:
        word = jnp.uint32(0x7FFFFFFF) + (kept & 1)
    else:
        word = noise ^ (jnp.uint32(0) - sign)
    up = (dropped > ~word).astype(jnp.uint32)  # dropped + word reaches 2^32
    above = jnp.maximum(octave, 0).astype(jnp.uint32) << element.mantissa_bits
    return jnp.minimum(above + kept + up, element.max_code) | sign << (element.bits - 1)


def dequantize(codes: UInt32[Array, "*shape"], element: Element) -> Float[Array, "*shape"]:
    """The values of codes that `quantize` returns, exactly (f32)."""
    size = element.mantissa_bits
    sign = codes >> (element.bits - 1) << 31
    magnitude = codes & ((1 << element.bits - 1) - 1)
    normal = (magnitude << 23 - size) + jnp.uint32(127 - element.bias << 23)
    subnormal = lanes.words_of(magnitude.astype(jnp.float32) * 2.0 ** (element.emin - size))
    return lanes.floats_of(jnp.where(magnitude >> size > 0, normal, subnormal) | sign)


def encode(
    x: Float[Array, " m"], element: Element, noise: UInt32[Array, " m"] | None = None
) -> UInt32[Array, " words"]:
    """The payload of m flat values, m a multiple of 32; ``noise`` is as for `quantize`.

    Scale codes follow the floor rule: floor(log2(max|x|)) - emax + 127, at least 0. So the largest
    value divided by its scale is in [2^emax, 2^(emax + 1)); values beyond ``max_value`` saturate.
    """
    blocks = x.reshape(-1, BLOCK)
    # The maximum of bits orders subnormals too; none of them, nor zero, reaches past code 0.
    exponent = (jnp.max(lanes.words_of(blocks) & _MAGNITUDE, axis=-1) >> 23).astype(jnp.int32)
    scales = jnp.where(exponent == 255, NAN_SCALE, jnp.maximum(exponent - element.emax, 0))
    units = _times_power_of_two(blocks, _SCALE_BIAS - scales[:, None])
    codes = quantize(units.reshape(-1), element, noise)
    scales = lanes.pack_bits(scales.astype(jnp.uint32), 8)
    return jnp.concatenate([scales, lanes.pack_bits(codes, element.bits)])


def decode(payload: UInt32[Array, " words"], size: int, element: Element) -> Float[Array, " m"]:
    """The exact f32 values of a payload, including subnormals; NaN in blocks of `NAN_SCALE`."""
    at = lanes.bit_words(size // BLOCK, 8)
    scales = lanes.unpack_bits(payload[:at], size // BLOCK, 8).astype(jnp.int32)[:, None]
    units = dequantize(lanes.unpack_bits(payload[at:], size, element.bits), element)
    values = _times_power_of_two(units.reshape(-1, BLOCK), scales - _SCALE_BIAS)
    return jnp.where(scales == NAN_SCALE, jnp.nan, values).reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MX(PlainMethod):
    element: str
    rounding: Literal["nearest", "stochastic"] = "nearest"
    unit = 4 * BLOCK  # whole words of scale codes

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)

    def encode(
        self, values: Float[Array, " m"], noise: UInt32[Array, " m"]
    ) -> UInt32[Array, " words"]:
        """See `PlainMethod`."""
        stochastic = self.rounding == "stochastic"
        return encode(values, ELEMENTS[self.element], noise if stochastic else None)

    def decode(self, payload: UInt32[Array, " words"], size: int) -> Float[Array, " m"]:
        """See `PlainMethod`."""
        return decode(payload, size, ELEMENTS[self.element])


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8(_MX):
    """All-reduce of 8-bit floats in blocks of 32 with a power-of-two scale: 8.25 bits per value.

    Attributes:
      element: "e4m3" or "e5m2", named by the bits of exponent and mantissa.
      rounding: "nearest" (ties to even; biased) or "stochastic" (unbiased except for values that
        saturate, with about twice the squared error). Pass a new key in every step: without one,
        the noise is always the same.
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
