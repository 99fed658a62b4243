"""Buckets of equally spaced levels between their smallest and their largest value.

A bucket of G values has an *offset*, its minimum, and a *step*, its range over 2^b - 1, both bf16:
the offset is rounded down and the step up, so that the levels enclose all values. A payload is one
array of words: those of offsets and steps, one for each bucket, then codes of b bits in bit planes.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt32

from dynamiq_jax.comparators.lanes import (
    bit_words,
    floats_of,
    pack_bits,
    uniform,
    unpack_bits,
    words_of,
)

Rounding = Literal["nearest", "stochastic", "shift"]
"""To the nearest level (biased); up or down at random; or to the nearest level of a grid that is
shifted at random, by the same share of a step for the whole bucket, which the decoder knows."""

MOST = 2.0**126
"""Where values are cut, so that the range of a bucket is finite."""
LEAST_RANGE = 2.0**-117
"""Where the range of a bucket counts as zero, so that no step is subnormal."""


def payload_words(size: int, bits: int, bucket_size: int) -> int:
    """Words of the payload of ``size`` values, a multiple of ``bucket_size``."""
    return size // bucket_size + bit_words(size, bits)


def encode(
    x: Float[Array, " m"],
    noise: UInt32[Array, " m"] | None,
    *,
    bits: int,
    bucket_size: int,
    rounding: Rounding,
) -> UInt32[Array, " words"]:
    """The payload of values in f32, m a multiple of ``bucket_size``.

    Values beyond `MOST` are cut. A NaN or infinity makes its whole bucket NaN. ``noise`` is a
    uniform word for every value, unless values are rounded to nearest; a shift takes the first of
    its bucket.
    """
    top = (1 << bits) - 1
    x = x.astype(jnp.float32).reshape(-1, bucket_size)
    finite = jnp.all(jnp.isfinite(x), axis=1)  # the least of numbers may be taken without NaN
    values = jnp.where(finite[:, None], jnp.clip(x, -MOST, MOST), 0.0)
    offset = _as_bf16(jnp.min(values, axis=1), up=False)
    span = jnp.max(values, axis=1) - offset
    step = _as_bf16(jnp.where(span > LEAST_RANGE, span / top, 0.0), up=True)
    scaled = jnp.where(step > 0, 1.0 / jnp.where(step > 0, step, 1.0), 0.0)[:, None]
    # Rounded on its own, or a compiler may fuse it with the addition of the noise.
    scaled = lax.reduce_precision((values - offset[:, None]) * scaled, 8, 22)
    if rounding == "nearest":
        codes = jnp.round(scaled)
    else:
        assert noise is not None
        drawn = noise.reshape(values.shape)
        codes = jnp.floor(scaled + (uniform if rounding == "stochastic" else _shift(bits))(drawn))
    codes = jnp.clip(codes, 0, top).astype(jnp.uint32)
    offset, step = (jnp.where(finite, part, jnp.nan) for part in (offset, step))
    words = words_of(offset) >> 16 | words_of(step) & jnp.uint32(0xFFFF0000)
    return jnp.concatenate([words, pack_bits(codes.reshape(-1), bits)])


def decode(
    payload: UInt32[Array, " words"],
    noise: UInt32[Array, " m"] | None,
    size: int,
    *,
    bits: int,
    bucket_size: int,
    rounding: Rounding,
) -> Float[Array, " m"]:
    """The ``size`` values of a payload, f32; ``noise`` as for `encode` for a shift, else unread."""
    buckets = size // bucket_size
    words = payload[:buckets, None]
    offset, step = floats_of(words << 16), floats_of(words & jnp.uint32(0xFFFF0000))
    codes = unpack_bits(payload[buckets:], size, bits).reshape(buckets, bucket_size)
    levels = codes.astype(jnp.float32)
    if rounding == "shift":
        assert noise is not None
        levels = levels + (0.5 - _shift(bits)(noise.reshape(levels.shape)))
    return (offset + levels * step).reshape(-1)


def _shift(bits: int):
    """The function words [B, G] -> the noise [B, 1] of every bucket, by its first word.

    It is a multiple of 2^(bits - 16) in (0, 1): of so few bits that a level times a step is exact.
    Fused with an addition or not, it is the same.
    """

    def of(words: UInt32[Array, "B G"]) -> Float[Array, "B 1"]:
        odd = (words[:, :1] >> (bits + 17)) * 2 + 1
        return odd.astype(jnp.float32) * jnp.float32(2.0 ** (bits - 16))

    return of


def _as_bf16(x: Float[Array, " n"], *, up: bool) -> Float[Array, " n"]:
    """The next number that bf16 has, upwards or downwards."""
    bits = words_of(x)
    cut = bits & jnp.uint32(0xFFFF0000)
    away = (bits != cut) & ((bits >> 31 == 0) == up)
    return floats_of(cut + away.astype(jnp.uint32) * 0x10000)
