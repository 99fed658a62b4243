"""OCP Microscaling (MX): blocks of 32 values that share a power-of-two scale.

A *block* is `BLOCK` consecutive values v. Its *scale code* s is an E8M0 byte: the block's scale
is 2^(s - 127), and s = 255 (`NAN_SCALE`) marks a block that holds a NaN or an infinity. An
*element* is a float of 4, 6 or 8 bits (`ELEMENTS`); its *code* is the usual sign, exponent and
mantissa bit pattern. A value v is sent as the element nearest to u = multiplier * v / scale and
decodes to element * scale / multiplier.

A *payload* of m values in B = ceil(m / 32) blocks is a flat ``uint32`` array:

=================  ============  ==================================================
section            words         content
=================  ============  ==================================================
scale codes        ceil(B / 4)   four to a word
bit planes         B * p         p = 8; 4 and 2; or 4, where the element has 8, 6 or
                                 4 bits; the first plane holds the lower code bits
=================  ============  ==================================================

Fields fill a word from its low end, and what is missing from the last block reads as zeros: with
128 values or a multiple of that, a payload has 8.25, 6.25 or 4.25 bits per value.

Rounding and scaling use integer arithmetic on the bits of f32 numbers, so that the result is the
same on backends that flush subnormal f32 numbers to zero and on those that do not.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt, UInt8, UInt32

from pallas_kernels.format import plane_shift, planes_of

BLOCK = 32
"""Values that share a scale."""

NAN_SCALE = 255
"""The scale code of a block that holds a NaN or an infinity; it wins under a maximum."""

_SCALE_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF  # of an f32: 8 exponent bits above 23 mantissa bits
_MANTISSA = 0x007FFFFF
_LEADING_ONE = 0x00800000
_INFINITY = 0x7F800000


@dataclass(frozen=True, slots=True)
class Element:
    """A small float format; hashable, so that it can be a jit-static argument.

    Attributes:
      name: its name in `ELEMENTS`.
      exponent_bits: bits of the exponent field; 0 is the field of zero and the subnormals.
      mantissa_bits: bits of the mantissa field.
      bias: what the exponent field exceeds the exponent by.
      max_value: the largest finite magnitude.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float

    @property
    def bits(self) -> int:
        """Bits of a code, with the sign."""
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
        """The code of `max_value`; larger magnitudes are infinity and NaN, where there are any."""
        significand = int(math.ldexp(self.max_value, self.mantissa_bits - self.emax))
        return (self.emax - self.emin << self.mantissa_bits) + significand


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 4, 3, 7, 448.0),
        Element("e5m2", 5, 2, 15, 57344.0),
        Element("e3m2", 3, 2, 3, 28.0),
        Element("e2m3", 2, 3, 1, 7.5),
        Element("e2m1", 2, 1, 1, 6.0),
    )
}


def _bits(x) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _float(bits) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _fields(bits) -> tuple[Array, Array]:
    """(e, s) of f32 bits, int32 and uint32: the magnitude is s * 2^(e - 150), 1 <= e, s < 2^24."""
    exponent = ((bits & _MAGNITUDE) >> 23).astype(jnp.int32)
    significand = (bits & _MANTISSA) | jnp.where(exponent > 0, jnp.uint32(_LEADING_ONE), 0)
    return jnp.maximum(exponent, 1), significand


def _times_power_of_two(x, power) -> Array:
    """x * 2^power for finite f32 x and |power| < 256, cut off toward zero if that is subnormal."""
    bits = _bits(x)
    exponent, significand = _fields(bits)
    lead = jax.lax.clz(significand) - 8  # above 0 for subnormal x and zero
    significand = significand << lead
    exponent = exponent - lead.astype(jnp.int32) + power
    # The leading one, if there is one, adds the last 1 to the exponent field.
    normal = (jnp.maximum(exponent - 1, 0).astype(jnp.uint32) << 23) + significand
    subnormal = significand >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    magnitude = jnp.where(exponent > 0, jnp.minimum(normal, _INFINITY), subnormal)
    magnitude = jnp.where(significand == 0, 0, magnitude)
    return _float((bits & ~jnp.uint32(_MAGNITUDE)) | magnitude)


def quantize(
    u: Float[Array, "*shape"], element: Element, *, noise: UInt32[Array, "*shape"] | None = None
) -> UInt32[Array, "*shape"]:
    """Rounds to the element format, with subnormals, and saturates at +-``max_value``.

    Args:
      u: values in units of elements, f32 (NaN gets the code of +-``max_value``).
      element: the format.
      noise: `None` rounds to nearest, ties to even. Uniform words round stochastically: up where
        fraction + noise / 2^32 reaches 1, so that the expected result is ``u`` up to saturation.
        Words of negative values are complemented, as the words of `pallas_kernels` are.

    Returns:
      Codes of ``element.bits`` bits.
    """
    bits = _bits(u)
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


def dequantize(codes: UInt[Array, "*shape"], element: Element) -> Float[Array, "*shape"]:
    """The values of codes, exactly (f32); includes codes of infinity and NaN, never sent."""
    codes = codes.astype(jnp.uint32)
    size = element.mantissa_bits
    sign = codes >> (element.bits - 1) << 31
    magnitude = codes & ((1 << element.bits - 1) - 1)
    normal = (magnitude << 23 - size) + jnp.uint32(127 - element.bias << 23)
    special = _INFINITY | (magnitude << 23 - size & _MANTISSA)
    subnormal = _bits(magnitude.astype(jnp.float32) * 2.0 ** (element.emin - size))
    bits = jnp.where(magnitude >> size > 0, normal, subnormal)
    return _float(jnp.where(magnitude > element.max_code, special, bits) | sign)


def block_exponent(x: Float[Array, "*blocks 32"], element: Element) -> UInt8[Array, "*blocks"]:
    """The scale code of each block by the floor rule: floor(log2(max|x|)) - emax + 127.

    The largest u is in [2^emax, 2^(emax + 1)): what exceeds ``max_value`` saturates. Codes stop
    at 0, which blocks of zeros have, and are `NAN_SCALE` where a value is not finite.

    Raises:
      ValueError: the last axis is not one block.
    """
    if x.shape[-1:] != (BLOCK,):
        raise ValueError(f"x has shape {x.shape}; reshape it so that the last axis is {BLOCK}")
    # The maximum of bits orders subnormals too; none of them, nor zero, reaches past code 0.
    exponent = (jnp.max(_bits(x) & _MAGNITUDE, axis=-1) >> 23).astype(jnp.int32)
    code = jnp.maximum(exponent - element.emax, 0)
    return jnp.where(exponent == 255, NAN_SCALE, code).astype(jnp.uint8)


def _blocks(x) -> Array:
    """Flat values as blocks [B, 32], the last one filled with zeros."""
    return jnp.pad(x, (0, -x.shape[0] % BLOCK)).reshape(-1, BLOCK)


def scale_codes(x: Float[Array, " m"], element: Element) -> UInt8[Array, " B"]:
    """`block_exponent` of flat values; workers share scales by taking the maximum of theirs."""
    return block_exponent(_blocks(x), element)


def to_elements(
    x: Float[Array, " m"],
    scale_code: UInt8[Array, " B"],
    multiplier: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B 32"]:
    """Flat values in units of elements, f32, in blocks; anything where the code is `NAN_SCALE`."""
    power = _SCALE_BIAS - scale_code.astype(jnp.int32)[:, None]
    return _times_power_of_two(_blocks(x), power) * multiplier


def from_elements(
    u: Float[Array, "B 32"],
    scale_code: UInt8[Array, " B"],
    multiplier: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B 32"]:
    """The inverse of `to_elements`: NaN where the code is `NAN_SCALE`; see `decode`."""
    scale_code = scale_code[:, None]
    values = _times_power_of_two(u / multiplier, scale_code.astype(jnp.int32) - _SCALE_BIAS)
    return jnp.where(scale_code == NAN_SCALE, jnp.nan, values)


def count_saturated(
    x: Float[Array, " m"],
    element: Element,
    *,
    scale_code: UInt8[Array, " B"] | None = None,
    multiplier: float | Float[Array, ""] = 1.0,
) -> Int[Array, ""]:
    """How many values `encode` would saturate (``|u| > max_value``), as int32.

    Arguments and errors are those of `encode`. Blocks marked `NAN_SCALE` count as none.
    """
    scale_code = _checked_scale_code(x, element, scale_code)
    u = to_elements(x, scale_code, multiplier)
    beyond = (jnp.abs(u) > element.max_value) & (scale_code != NAN_SCALE)[:, None]
    return jnp.sum(beyond, dtype=jnp.int32)


def _checked_scale_code(x, element: Element, scale_code) -> Array:
    own = scale_codes(x, element)
    if scale_code is None:
        return own
    if scale_code.shape != own.shape:
        raise ValueError(
            f"scale_code has shape {scale_code.shape}, but {x.shape[0]} values have "
            f"{own.shape[0]} blocks of {BLOCK}; pass one code per block, see scale_codes"
        )
    return scale_code


def _pack(fields, bits: int) -> Array:
    """Packs fields of ``bits`` bits into uint32 words, low end first."""
    fields = fields.reshape(-1, 32 // bits)
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32)[None] * bits
    return jnp.sum(fields << shifts, axis=1, dtype=jnp.uint32)


def _unpack(words, bits: int) -> Array:
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32)[None] * bits
    return (words[:, None] >> shifts & jnp.uint32((1 << bits) - 1)).reshape(-1)


def pack_codes(codes: UInt32[Array, " m"], element: Element) -> UInt32[Array, " words"]:
    """Codes of whole blocks as the bit planes of a payload, ``m // 32 * element.bits`` words."""
    sections = []
    for plane in planes_of(element.bits):
        fields = codes >> plane_shift(element.bits, plane) & jnp.uint32((1 << plane) - 1)
        sections.append(_pack(fields, plane))
    return jnp.concatenate(sections)


def unpack_codes(words: UInt32[Array, " words"], element: Element) -> UInt32[Array, " m"]:
    """The inverse of `pack_codes`."""
    blocks, at = words.shape[0] // element.bits, 0
    codes = jnp.zeros((blocks * BLOCK,), jnp.uint32)
    for plane in planes_of(element.bits):
        fields = _unpack(words[at : at + blocks * plane], plane)
        codes = codes | fields << plane_shift(element.bits, plane)
        at += blocks * plane
    return codes


def payload_words(size: int, element: Element) -> int:
    """Words of the payload of ``size`` values."""
    blocks = -(-size // BLOCK)
    return -(-blocks // 4) + blocks * element.bits


def encode(
    x: Float[Array, " m"],
    element: Element,
    *,
    noise: UInt32[Array, " m"] | None = None,
    scale_code: UInt8[Array, " B"] | None = None,
    multiplier: float | Float[Array, ""] = 1.0,
) -> UInt32[Array, " words"]:
    """The payload of flat values.

    Args:
      x: f32, or a dtype that f32 contains.
      element: the format of the values on the wire.
      noise: a uniform word per value for stochastic rounding, see `quantize`.
      scale_code: codes to use instead of the blocks' own (`scale_codes`), such as the maximum
        over workers; where one is smaller than the block's own, values saturate.
      multiplier: positive; multiplies values ahead of rounding. With a power of two the only
        rounding is that to elements.

    Returns:
      ``payload_words(m, element)`` words.

    Raises:
      ValueError: the shape of ``noise`` or ``scale_code`` does not fit ``x``.
    """
    scale_code = _checked_scale_code(x, element, scale_code)
    if noise is not None:
        if noise.shape != x.shape:
            raise ValueError(f"noise has shape {noise.shape}; pass one word per value, {x.shape}")
        noise = _blocks(noise)
    codes = quantize(to_elements(x, scale_code, multiplier), element, noise=noise)
    scales = jnp.pad(scale_code.astype(jnp.uint32), (0, -scale_code.shape[0] % 4))
    return jnp.concatenate([_pack(scales, 8), pack_codes(codes.reshape(-1), element)])


def decode(
    payload: UInt32[Array, " words"],
    size: int,
    element: Element,
    *,
    multiplier: float | Float[Array, ""] = 1.0,
) -> Float[Array, " m"]:
    """The f32 values of a payload; NaN in blocks marked `NAN_SCALE`.

    Exact where ``multiplier`` is a power of two, also for results below the normal range, which
    f32 holds down to 2^-149 (further arithmetic on these may read them as zero). Values beyond
    f32, which no block's own scale leads to, become infinities.

    Args:
      payload: from `encode`.
      size: the number of values m.
      element: the format of the values on the wire.
      multiplier: the encoder's, or what else to divide by.

    Raises:
      ValueError: the payload is not of ``size`` values.
    """
    words = payload_words(size, element)
    if payload.shape != (words,):
        raise ValueError(
            f"payload has shape {payload.shape}, but {size} {element.name} values take "
            f"{words} words; pass the encoder's size and element"
        )
    blocks = -(-size // BLOCK)
    at = -(-blocks // 4)
    scale_code = _unpack(payload[:at], 8)[:blocks].astype(jnp.uint8)
    values = dequantize(unpack_codes(payload[at:], element), element).reshape(-1, BLOCK)
    return from_elements(values, scale_code, multiplier).reshape(-1)[:size]
