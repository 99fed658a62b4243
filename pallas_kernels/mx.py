"""The format and the arithmetic of MX floats: blocks of 32 that share a power-of-two scale.

A chunk of m = 128 T coordinates has four quarters of T *blocks* each. Arrays of a chunk have the
shape [4, T, 8, 4]: quarter, block of the quarter, *quad* of the block, coordinate of the quad. Part
t of a chunk has block t of every quarter. Its sections are whole words of a payload:

==============  =================  =============================================================
section         words              content of a part's words
==============  =================  =============================================================
scale codes     T, and up to 3     a byte for each quarter; words of zeros follow, so that threads
                                   can move four words of a plane at once
planes of bits  4 T p              p = 8, 4, 2, 1 where a code has that many bits or their sum;
                                   the larger plane holds the lower bits of a code
==============  =================  =============================================================

A word of a plane holds one place of a quad from all quarters, then the quad's next place, until the
word is full. So neighbouring threads, which hold neighbouring quads of all quarters, move
neighbouring words, and exchange only the maxima of their blocks.

Rounding and scaling use integer arithmetic on the bits of f32 numbers, so that the result is the
same on backends that flush subnormal f32 numbers to zero and on those that do not. With
``keeps_subnormals`` they multiply instead, where multiplication is known to be exact.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt32

from pallas_kernels.backend import Backend
from pallas_kernels.format import QUAD, plane_shift, planes_of
from pallas_kernels.tile import as_word, bits_of, floats_of

BLOCK = 32
"""The number of values that share a scale."""
QUARTERS = 4
"""Parts of a chunk whose scale codes share words."""
UNIT = QUARTERS * BLOCK
"""Coordinates whose scale codes are whole words."""
QUADS = BLOCK // QUAD
"""The quads of a block."""
AT_ONCE = 4
"""Words that a thread moves at once; a payload's scale codes take a multiple of this number."""
NAN_SCALE = 255
"""The scale code of a block with a NaN or an infinity; the codes of its elements say nothing."""

_SCALE_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF  # of an f32: 8 exponent bits above 23 mantissa bits
_MANTISSA = 0x007FFFFF
_LEADING_ONE = 0x00800000
_INFINITY = 0x7F800000
_NAN = 0x7FC00000


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


class Form(NamedTuple):
    """The static facts of chunks and of their payloads."""

    element: Element
    stochastic: bool
    """Whether noise decides how to round; otherwise values go to the nearest element."""
    chunk_size: int
    """Coordinates of a chunk, a multiple of `UNIT`."""
    backend: Backend = "triton"
    """Which kernels run."""

    @property
    def parts(self) -> int:
        """The parts of a chunk."""
        return self.chunk_size // UNIT

    @property
    def blocks(self) -> int:
        """The blocks of a chunk."""
        return self.chunk_size // BLOCK


def _fields(bits) -> tuple[Array, Array]:
    """(e, s) of f32 bits, int32 and uint32: the magnitude is s * 2^(e - 150), 1 <= e, s < 2^24."""
    exponent = ((bits & as_word(_MAGNITUDE)) >> 23).astype(jnp.int32)
    leading = jnp.where(exponent > 0, as_word(_LEADING_ONE), as_word(0))
    return jnp.maximum(exponent, 1), (bits & as_word(_MANTISSA)) | leading


def _times_power_of_two(x, power) -> Array:
    """x * 2^power for finite f32 x and |power| < 256, rounded toward zero if it is subnormal."""
    bits = bits_of(x)
    exponent, significand = _fields(bits)
    lead = lax.clz(significand) - as_word(8)  # above 0 for subnormal x and zero
    significand = significand << lead
    exponent = exponent - lead.astype(jnp.int32) + power
    # The leading one, if there is one, adds the last 1 to the exponent field.
    normal = (jnp.maximum(exponent - 1, 0).astype(jnp.uint32) << 23) + significand
    subnormal = significand >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    magnitude = jnp.where(exponent > 0, jnp.minimum(normal, as_word(_INFINITY)), subnormal)
    magnitude = jnp.where(significand == 0, as_word(0), magnitude)
    return floats_of((bits & as_word(1 << 31)) | magnitude)


def quantize(
    u: Float[Array, "*shape"], element: Element, noise: UInt32[Array, "*shape"] | None
) -> UInt32[Array, "*shape"]:
    """The element codes of values, including subnormals; saturates at +-``max_value``.

    Without noise, values are rounded to nearest, ties to even. Uniform words round stochastically:
    up if fraction + noise / 2^32 reaches 1. For negative values the complement of the word is used.
    """
    bits = bits_of(u)
    round_bits = _round_to_nearest if noise is None else functools.partial(_round_up, noise=noise)
    code = jnp.minimum(round_bits(bits, element), as_word(element.max_code))
    return code | (bits >> 31 << (element.bits - 1))


def _round_to_nearest(bits, element: Element) -> Array:
    """Codes of magnitudes, to nearest, ties to even: by adding 2^23 steps of an element.

    A magnitude that is zero where subnormal numbers are flushed is below half a step.
    """
    shift, magnitude = 23 - element.mantissa_bits, bits & as_word(_MAGNITUDE)
    first = as_word((element.emin + 127) << 23)
    # The power of two below the magnitude, at least the smallest normal element.
    power = jnp.maximum(bits & as_word(_INFINITY), first)
    steps = power + as_word(shift << 23)
    rounded = bits_of(floats_of(magnitude) + floats_of(steps)) - steps
    return rounded + ((power - first) >> shift)


def _round_up(bits, element: Element, noise) -> Array:
    """Codes of magnitudes, rounded up if fraction + noise reaches 1."""
    exponent, significand = _fields(bits)
    octave = exponent - 127 - element.emin  # below 0: subnormal elements, one step for all of them
    shift = 23 - element.mantissa_bits + jnp.maximum(-octave, 0)
    kept = significand >> jnp.minimum(shift, 31).astype(jnp.uint32)
    # The dropped bits, in units of 2^-32 steps; kept bits are shifted out at the top.
    dropped = significand << jnp.clip(32 - shift, 0, 31).astype(jnp.uint32)
    dropped = dropped >> jnp.clip(shift - 32, 0, 31).astype(jnp.uint32)
    word = noise ^ (as_word(0) - (bits >> 31))
    up = (dropped > ~word).astype(jnp.uint32)  # dropped + word reaches 2^32
    return (jnp.maximum(octave, 0).astype(jnp.uint32) << element.mantissa_bits) + kept + up


def dequantize(
    codes: UInt32[Array, "*shape"], element: Element, *, keeps_subnormals: bool = False
) -> Float[Array, "*shape"]:
    """The values of codes that `quantize` returns, exactly (f32)."""
    size = element.mantissa_bits
    sign = codes >> (element.bits - 1) << 31
    magnitude = codes & as_word((1 << element.bits - 1) - 1)
    at_exponent = magnitude << (23 - size)
    if keeps_subnormals:  # a subnormal element is a subnormal f32 here
        return floats_of(at_exponent | sign) * np.float32(2.0 ** (127 - element.bias))
    normal = at_exponent + as_word((127 - element.bias) << 23)
    step = np.float32(2.0 ** (element.emin - size))
    subnormal = bits_of(magnitude.astype(jnp.float32) * step)
    return floats_of(jnp.where(magnitude >> size > 0, normal, subnormal) | sign)


class Holder(Protocol):
    """How a program holds coordinates, values of blocks, and words; they need not be arrays."""

    def largest(self, of_coordinates) -> Any:
        """The largest int32 coordinate of each block."""
        ...

    def to_coordinates(self, of_blocks) -> Any:
        """Broadcasts blocks' values to coordinates."""
        ...

    def join_scales(self, codes) -> Any:
        """The words of blocks' bytes, uint32."""
        ...

    def split_scales(self, words) -> Any:
        """The inverse of `join_scales`."""
        ...

    def join(self, fields, plane: int) -> Any:
        """The words of coordinates' uint32 fields, each below 2^plane."""
        ...

    def split(self, words, plane: int) -> Any:
        """The inverse of `join`; higher bits are unspecified."""
        ...


class _Arrays:
    """The `Holder` of coordinates [4, T, 8, 4], blocks [4, T] and words [T] or [T, 8, p / 2]."""

    def largest(self, of_coordinates):
        return jnp.max(jnp.max(of_coordinates, axis=3), axis=2)

    def to_coordinates(self, of_blocks):
        return of_blocks[:, :, None, None]

    def join_scales(self, codes):
        return _sum_of_quarters(codes, 8)

    def split_scales(self, words):
        return (words[None] >> _shifts((QUARTERS, 1), 0, 8)) & as_word(0xFF)

    def join(self, fields, plane):
        words = _sum_of_quarters(fields, plane)
        together = 8 // plane  # coordinates of a quad in a word
        if together == 1:
            return words
        words = words.reshape(*words.shape[:2], QUAD // together, together)
        shifts = _shifts((1, 1, 1, together), 3, QUARTERS * plane)
        return jnp.sum(words << shifts, axis=3, dtype=jnp.uint32)

    def split(self, words, plane):
        together, shape = 8 // plane, (QUARTERS, *words.shape[:2], QUAD)
        if together > 1:
            shifts = _shifts((1, 1, 1, together), 3, QUARTERS * plane)
            words = (words[..., None] >> shifts).reshape(shape[1:])
        return words[None] >> _shifts((QUARTERS, 1, 1, 1), 0, plane)


ARRAYS: Holder = _Arrays()


def encode_blocks(
    x: Any,
    element: Element,
    noise: Any,
    *,
    keeps_subnormals: bool = False,
    holder: Holder = ARRAYS,
) -> tuple[Any, list[Any]]:
    """The words of scale codes and of every plane, the largest plane first.

    ``x`` are f32 coordinates, as ``holder`` holds them, and ``noise`` is as for `quantize`.

    Scale codes round down: floor(log2(max|x|)) - emax + 127, at least 0. So the largest value
    divided by its scale is in [2^emax, 2^(emax + 1)); values beyond ``max_value`` saturate.
    """
    # Bits order subnormals, too; subnormals and zero have scale code 0.
    exponent = holder.largest((bits_of(x) & as_word(_MAGNITUDE)).astype(jnp.int32)) >> 23
    scales = jnp.maximum(exponent - element.emax, 0)
    scales = jnp.where(exponent == 255, NAN_SCALE, scales)
    power = _SCALE_BIAS - scales
    if keeps_subnormals:  # 2^power is a normal number
        factor = floats_of(((power + 127) << 23).astype(jnp.uint32))
        units = x * holder.to_coordinates(factor)
    else:
        units = _times_power_of_two(x, holder.to_coordinates(power))
    codes, width = quantize(units, element, noise), element.bits
    planes = []
    for plane in planes_of(width):
        fields = codes >> plane_shift(width, plane)
        fields = fields & as_word((1 << plane) - 1) if plane < width else fields
        planes.append(holder.join(fields, plane))
    return holder.join_scales(scales.astype(jnp.uint32)), planes


def decode_blocks(
    scales: Any,
    planes: list[Any],
    element: Element,
    *,
    keeps_subnormals: bool = False,
    holder: Holder = ARRAYS,
) -> Any:
    """The exact f32 values of the words of `encode_blocks`; NaN in blocks of `NAN_SCALE`."""
    width = element.bits
    codes: Any = as_word(0)
    for plane, words in zip(planes_of(width), planes, strict=True):
        fields = holder.split(words, plane) & as_word((1 << plane) - 1)
        codes = fields << plane_shift(width, plane) | codes
    units = dequantize(codes, element, keeps_subnormals=keeps_subnormals)
    code = holder.split_scales(scales)
    if keeps_subnormals:
        scale = jnp.where(code == 0, as_word(_LEADING_ONE >> 1), code << 23)
        scale = floats_of(jnp.where(code == NAN_SCALE, as_word(_NAN), scale))
        return units * holder.to_coordinates(scale)
    code = holder.to_coordinates(code)
    values = _times_power_of_two(units, code.astype(jnp.int32) - _SCALE_BIAS)
    return jnp.where(code == NAN_SCALE, np.float32(np.nan), values)


def _shifts(shape: tuple[int, ...], axis: int, bits: int) -> Array:
    """0, bits, 2*bits, ... along an axis: uint32[shape]."""
    return lax.broadcasted_iota(jnp.uint32, shape, axis) * as_word(bits)


def _sum_of_quarters(fields, bits: int) -> Array:
    """Fields uint32[4, ...], ``bits`` apart in words: uint32[...]."""
    shape = (QUARTERS, *(1,) * (fields.ndim - 1))
    return jnp.sum(fields << _shifts(shape, 0, bits), axis=0, dtype=jnp.uint32)


def sections(parts: int, element: Element) -> tuple[int, ...]:
    """Where the planes of a payload of ``parts`` begin, and its length, in words."""
    starts = [-(-parts // AT_ONCE) * AT_ONCE]
    for plane in planes_of(element.bits):
        starts.append(starts[-1] + parts * QUADS * plane // 2)
    return tuple(starts)


def encode(
    x: Float[Array, " m"], element: Element, noise: UInt32[Array, " m"] | None = None
) -> UInt32[Array, " words"]:
    """The payload of m flat values, m a multiple of 128; ``noise`` is as for `quantize`."""
    shape = QUARTERS, x.shape[0] // UNIT, QUADS, QUAD
    noise = None if noise is None else noise.reshape(shape)
    scales, planes = encode_blocks(x.astype(jnp.float32).reshape(shape), element, noise)
    scales = jnp.pad(scales, (0, sections(shape[1], element)[0] - shape[1]))
    return jnp.concatenate([scales, *(plane.reshape(-1) for plane in planes)])


def decode(payload: UInt32[Array, " words"], size: int, element: Element) -> Float[Array, " m"]:
    """The exact f32 values of a payload, including subnormals; NaN in blocks of `NAN_SCALE`."""
    parts = size // UNIT
    scales, *planes = jnp.split(payload, sections(parts, element)[:-1])
    planes = [plane.reshape(parts, QUADS, -1) for plane in planes]
    return decode_blocks(scales[:parts], planes, element).reshape(-1)
