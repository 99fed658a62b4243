"""The rounding error of one encoding: no bias at any width, and the squares of `distortion`."""

import jax.numpy as jnp
import numpy as np
import pytest
from asserts import bias
from cases import daily
from chunks import FORMATS, chunk_of, normal, seeds

from pallas_kernels import distortion

SAMPLES = 400


@pytest.mark.parametrize("name", daily(FORMATS, ["default", "dither"]))
def test_every_width_is_unbiased(name):
    chunk = chunk_of(name)
    x, mean = normal(chunk)
    total, squared = np.zeros((2, chunk.size))
    for seed in seeds(SAMPLES):
        error = np.asarray(chunk.round_trip(x, mean, seed)[1] - x, np.float64)
        total, squared = total + error, squared + error**2
    signed = x - jnp.repeat(mean, chunk.fmt.super_group_size)
    found = bias(total, squared, SAMPLES, signed, blocks=len(chunk.widths))
    # Blocks are tiles of at least C = 1024 coordinates, N = 400: a bias of 2% of a step away from
    # zero would score 0.02 sqrt(6 C N) >= 31, and one of any signs add 0.96 to the spread, whose
    # own deviation is below sqrt(4 / C) = 0.06. (At widths 14 and 15 `SCALE_SLACK`, a millionth of
    # the maximum, is up to 3% of a step, but only for the few coordinates that are the maximum.)
    assert found.worst_score() < 6.5
    assert np.max(found.spread) < 1.45
    assert np.min(found.spread) > 0.6


def squared_errors(chunk, count=48):
    """Mean squared error of each width on N(0, 1), one row per seed: f64[count, tiles]."""
    zero = jnp.zeros((chunk.rows,))
    rows = []
    for i, seed in enumerate(seeds(count, seed=2)):
        x, _ = normal(chunk, seed=100 + i)
        error = np.asarray(chunk.round_trip(x, zero, seed)[1] - x, np.float64)
        rows.append((error**2).reshape(len(chunk.widths), -1).mean(axis=1))
    return np.stack(rows)


DITHERED = ("dither", "dither_companded", "dither_uniform")


@pytest.mark.parametrize(
    "name",
    daily(
        ["default", "piecewise", "geometric", "uniform", "bf16_scales", "group_64", *DITHERED],
        ["default", "dither"],
    ),
)
def test_error_of_every_width_is_what_the_format_says(name):
    chunk = chunk_of(name)
    fmt = chunk.fmt
    expected = np.array([distortion(fmt, int(w)) for w in chunk.widths])
    ratio = squared_errors(chunk).mean(axis=0) / expected
    # `distortion` leaves scales unrounded, where a group's maximum has no error. Rounded up by
    # half a percent they cost 1% everywhere and, at most, a quarter of a squared step for it.
    maximum = np.random.default_rng(0).standard_normal((4096, fmt.group_size))
    maximum = np.mean(np.max(np.abs(maximum), axis=1) ** 2) / fmt.group_size
    tables = [fmt.level_table(w) / fmt.level_top(w) if 1 < w < 16 else [1, 1] for w in chunk.widths]
    last_step = np.array([table[-1] - table[-2] for table in tables])
    assert np.all(ratio > 0.97)
    assert np.all(ratio < 1.04 + maximum * last_step**2 / 4 / expected)


@pytest.mark.parametrize("name", daily(DITHERED, DITHERED[:1]))
def test_dither_leaves_an_error_that_does_not_depend_on_the_value(name):
    """Where steps are equal: uniform within half a step, but for what the decoder cuts off."""
    chunk = chunk_of(name)
    (row,) = np.flatnonzero(chunk.widths == 6)
    fmt, tile = chunk.fmt, slice(row * 8 * 256, (row + 1) * 8 * 256)
    top = fmt.level_top(6)
    fours = np.arange(fmt.groups // 4)[:, None] * (4 * fmt.group_size)
    anchors = (fours + 4 * np.arange(4)).reshape(-1)  # the first coordinate of every group
    # In every group one coordinate is the top level: one half-step is 1. The others lie at the same
    # fraction between two levels of the first octave, or between the levels next to zero.
    for value in (0.05, 0.2, 1.0, 1.5, -1.0, -2.4):  # an exact zero has no error
        x = np.full((chunk.rows, 256), value, np.float32)
        x[:, anchors] = top
        zero = jnp.zeros((chunk.rows,))
        errors = [
            np.asarray(chunk.round_trip(jnp.asarray(x.reshape(-1)), zero, seed)[1]) - x.reshape(-1)
            for seed in seeds(12, seed=3)
        ]
        error = np.stack(errors)[:, tile].reshape(-1, 256)
        error = np.delete(error, anchors, axis=1)
        amplitude, step = fmt.dither_amplitude(6), 2
        p = (value - 1) / 2 % 1
        variance = step * (step - amplitude) * p * (1 - p) + amplitude**2 / 12
        assert error.var() == pytest.approx(variance, rel=0.03)
        assert abs(error.mean()) < 5 * np.sqrt(variance / error.size)
