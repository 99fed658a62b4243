"""The codec on one chunk: payloads as specified, exact where the format can be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_refused
from cases import daily
from chunks import chunk_of, normal

import pallas_kernels as pk
from pallas_kernels import TILE_ROWS
from pallas_kernels.format import plane_shift, planes_of
from pallas_kernels.hashing import noise_words


def decode_in_numpy(payload, fmt, offset, width, noise=None):
    """One tile as the format's docstring describes it, one field at a time: f64[R, S].

    With dither under ``noise`` words, group after group.
    """
    bits = np.unpackbits(payload[offset:].view(np.uint8), bitorder="little")

    def fields(start_word, count, size):
        raw = bits[32 * start_word : 32 * start_word + count * size].reshape(count, size)
        return raw @ (1 << np.arange(size, dtype=np.int64))

    def bf16(raw):
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    rows, groups = TILE_ROWS, fmt.groups
    count = rows * fmt.super_group_size
    code = np.zeros(count, np.int64)
    for plane in planes_of(width):
        start = fmt.plane_offset(width, plane)
        code |= fields(start, count, plane) << plane_shift(width, plane)
    if width == 16:
        return bf16(code).reshape(rows, -1)
    if fmt.group_scale == "bf16":
        scale = bf16(fields(0, rows * groups, 16)).reshape(rows, groups)
    else:
        top = bf16(fields(0, rows, 16))
        k = fields(fmt.super_scale_words(width), rows * groups, 8).reshape(rows, groups)
        scale = top[:, None] * (k + 1) / 256
        # At 15 and 14 bits a scale keeps only the significant bits that make products exact.
        significand, exponent = np.frexp(scale)
        keep = fmt.scale_bits(width)
        scale = np.ldexp(np.ceil(np.ldexp(significand, keep)), exponent - keep)
    scale = np.repeat(scale, fmt.group_size, axis=1)
    if fmt.dither:
        code -= (code >> (width - 1)) << width  # two's complement
        level = np.where(code < 0, -1, 1) * fmt.level_table(width)[np.where(code < 0, ~code, code)]
        u = ((noise.reshape(-1) >> 28) + 0.5) / 16
        return (level - fmt.dither_amplitude(width) * (u - 0.5)).reshape(rows, -1) * scale
    if width == 1:
        return (2 * code.reshape(rows, -1) - 1) * scale
    sign = 1 - 2 * (code >> (width - 1))
    level = fmt.level_table(width)[code & ((1 << (width - 1)) - 1)]
    return (sign * level).reshape(rows, -1) * scale


def dealt(rows, fmt):
    """Super-groups whose coordinates are listed group by group, in the gradient's order."""
    coordinate = [
        4 * (four * fmt.group_size + 4 * quad + group) + i  # of four groups in turn
        for four in range(fmt.groups // 4)
        for group in range(4)
        for quad in range(fmt.group_size // 4)
        for i in range(4)
    ]
    found = np.empty_like(rows)
    found[..., coordinate] = rows
    return found


jitted_words = jax.jit(noise_words, static_argnums=3)


def noise_of(chunk, seed, tile):
    """The noise words of the coordinates of a tile, group after group: uint32[R, S]."""
    rows = TILE_ROWS * tile + np.arange(TILE_ROWS, dtype=np.uint32)[:, None, None]
    quads = chunk.fmt.super_group_size // 4
    quad = rows * np.uint32(quads) + np.arange(quads, dtype=np.uint32)[:, None]
    rotation = 8 * jnp.arange(4, dtype=jnp.uint32)[None, None]
    row = pk.Noise(*chunk.noise(seed))
    return np.asarray(jitted_words(jnp.asarray(quad), rotation, row, chunk.fmt.rounding))


@pytest.mark.parametrize(
    "name",
    daily(
        ["default", "geometric", "bf16_scales", "group_8", "super_512", "dither", "dither_uniform"],
        ["default", "bf16_scales", "dither"],
    ),
)
def test_payload_means_what_the_format_says(name):
    chunk, seed = chunk_of(name), jnp.array([3, 4], jnp.uint32)
    x, _ = normal(chunk, seed=3)
    mean = jnp.zeros((chunk.rows,))
    payload, decoded = chunk.round_trip(x, mean, seed)
    decoded = np.asarray(decoded).reshape(len(chunk.widths), TILE_ROWS, -1)
    for tile, (offset, width) in enumerate(zip(chunk.offsets, chunk.widths, strict=True)):
        noise = noise_of(chunk, seed, tile) if chunk.fmt.dither else None
        by_hand = decode_in_numpy(np.asarray(payload[0]), chunk.fmt, offset, int(width), noise)
        by_hand = dealt(by_hand, chunk.fmt)
        np.testing.assert_array_equal(decoded[tile].astype(np.float64), by_hand)


@pytest.mark.parametrize(
    "name", daily(["default", "geometric", "uniform", "bf16_scales"], ["default", "bf16_scales"])
)
def test_values_on_levels_come_back_exactly(name):
    """Scales that are a power of two times integers on the level grid, for every width."""
    chunk = chunk_of(name)
    rng = np.random.default_rng(5)
    tiles = []
    for width in chunk.widths:
        table = chunk.fmt.level_table(width) if width < 16 else np.arange(128)
        level = rng.choice(table, (TILE_ROWS * chunk.fmt.groups, chunk.fmt.group_size))
        level[:, 3] = table[-1]  # the maximum of every group is the top level
        tiles.append(level * rng.choice([-1, 1], level.shape))
    exponent = rng.integers(-40, 40, (len(tiles), TILE_ROWS, 1))
    values = dealt(np.stack(tiles).reshape(len(tiles), TILE_ROWS, -1), chunk.fmt)
    values = values * 2.0**exponent
    x = jnp.asarray(values.reshape(-1), jnp.float32)
    mean = jnp.zeros((chunk.rows,))
    _, decoded = chunk.round_trip(x, mean, jnp.array([7, 8], jnp.uint32))
    np.testing.assert_array_equal(decoded, x)


def test_statistics():
    x = np.random.default_rng(2).normal(1.0, 2.0, 256 * 4 + 100).astype(np.float32)
    padded = np.pad(x, (0, 156)).reshape(5, 256).astype(np.float64)
    mean, sqnorm = pk.statistics(jnp.asarray(x), super_group_size=256)
    np.testing.assert_allclose(mean, padded.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(sqnorm, (padded**2).sum(axis=1), rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    """A start and a whole gradient, a slice and no start, dither and no noise of the encoders."""
    chunk = chunk_of("dither")
    payload, zero = jnp.zeros((1, chunk.payload_words), jnp.uint32), jnp.zeros(chunk.rows)
    chunks, source = jnp.zeros(1, jnp.int32), pk.Source(zero, None, chunk.order)
    inputs, target = (pk.Input(payload[None], chunk.tiles),), chunk.target(jnp.zeros(2, jnp.uint32))
    whole, placed = chunk.result(zero), chunk.result(zero, start=jnp.int32(0))
    decompress = functools.partial(pk.decompress, payload, chunk.tiles, chunks, fmt=chunk.fmt)
    hop = functools.partial(pk.decompress_accumulate_recompress, fmt=chunk.fmt)
    no_noise = "noise=None; pass the rows of slot_noise"
    assert_refused(
        (ValueError, "result.start=None.* 0 for a whole gradient",
         functools.partial(pk.decompress_accumulate, fmt=chunk.fmt), (), source, chunks, whole),
        (ValueError, "whole gradient; pass start=None", decompress, placed),
        (ValueError, no_noise, decompress, whole),
        (ValueError, no_noise, hop, inputs, source, chunks, target),
    )  # fmt: skip
