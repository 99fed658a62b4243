"""The wire format: bit planes, record sizes, level tables and exact products."""

import numpy as np
import pytest

from pallas_kernels import TILE_ROWS, WireFormat, distortion
from pallas_kernels.format import _groups, plane_shift, planes_of

WIDTHS = range(1, 16)
LEVELS = ("companded", "piecewise", "geometric", "uniform")


DITHERED = [(levels, True) for levels in LEVELS if levels != "geometric"]
ROUNDED = [(levels, False) for levels in LEVELS]


def widths_of(levels, dither=False):
    """All that have a table of levels, but for 1 bit, which has no level 0."""
    if dither:
        return range(1, 15)
    return range(2, 11) if levels == "geometric" else range(2, 16)


@pytest.mark.parametrize("width", range(17))
def test_planes_are_powers_of_two_that_tile_the_code(width):
    planes = planes_of(width)
    assert sum(planes) == width
    assert all(p & (p - 1) == 0 for p in planes)
    covered = sorted(
        bit for p in planes for bit in range(plane_shift(width, p), plane_shift(width, p) + p)
    )
    assert covered == list(range(width))


@pytest.mark.parametrize("group_scale", ["uint8", "bf16"])
@pytest.mark.parametrize("group_size", [8, 16, 32, 64])
@pytest.mark.parametrize("super_group_size", [256, 512, 1024])
def test_records_are_contiguous_and_of_whole_vectors(group_size, super_group_size, group_scale):
    fmt = WireFormat(
        widths=tuple(range(17)),
        group_size=group_size,
        super_group_size=super_group_size,
        group_scale=group_scale,
    )
    groups = super_group_size // group_size
    for width in fmt.widths:
        words = fmt.tile_words(width)
        assert words % 4 == 0
        scale_bits = {"uint8": 16 + 8 * groups, "bf16": 16 * groups}[group_scale]
        scale_bits = scale_bits if 0 < width < 16 else 0
        assert 32 * words == TILE_ROWS * (scale_bits + width * super_group_size)
        at = TILE_ROWS * scale_bits // 32
        for plane in planes_of(width):
            assert fmt.plane_offset(width, plane) == at
            at += fmt.plane_words(plane)
        assert at == words


@pytest.mark.parametrize(("levels", "dither"), ROUNDED + DITHERED)
def test_levels_ascend_strictly_from_zero_or_are_odd_half_steps_with_dither(levels, dither):
    fmt = WireFormat(levels=levels, dither=dither)
    for width in widths_of(levels, dither):
        table = fmt.level_table(width)
        assert table.shape == (2 ** (width - 1),)
        assert table[0] == dither
        assert np.all(np.diff(table) > 0)
        assert np.all(table % 2 == 1) if dither else table[-1] == fmt.level_top(width)
    np.testing.assert_array_equal(fmt.level_table(1), [1])


def test_level_laws():
    np.testing.assert_array_equal(WireFormat(levels="uniform").level_table(5), np.arange(16))
    # 3/16 of the octave of 16 levels is 3: thirteen steps of 1, then steps of 2.
    np.testing.assert_array_equal(
        WireFormat(levels="piecewise").level_table(5), [*range(14), 15, 17]
    )
    # A quarter of the levels, four, in each octave: steps of 1, 2, 4 and 8.
    steps = np.repeat([1, 2, 4, 8], 4)[:15]
    np.testing.assert_array_equal(
        WireFormat(levels="companded").level_table(5), [0, *np.cumsum(steps)]
    )
    # (1.0648^r - 1) / (1.0648^7 - 1) on a grid of 2^15, epsilon = 0.18.
    table = WireFormat(levels="geometric").level_table(4)
    law = (1.0648 ** np.arange(8) - 1) / (1.0648**7 - 1) * 2**15
    np.testing.assert_allclose(table, law, atol=0.5)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ("uniform", [1, 3, 5, 7, 9, 11, 13, 15]),
        # Of four levels to an octave the first has three and the half-step to zero.
        ("piecewise", [1, 3, 5, 7, 11, 15, 19, 23]),
        ("companded", [1, 3, 7, 11, 19, 27, 43, 59]),
    ],
)
def test_level_laws_with_dither(levels, expected):
    np.testing.assert_array_equal(WireFormat(levels=levels, dither=True).level_table(4), expected)


@pytest.mark.parametrize(("levels", "dither"), ROUNDED + DITHERED)
def test_level_times_scale_is_exact_in_f32_and_finite(levels, dither):
    """With dither, a level and the noise around it."""
    fmt = WireFormat(levels=levels, dither=dither)
    rng = np.random.default_rng(1)
    for width in {1, *widths_of(levels, dither)}:
        bits = fmt.scale_bits(width)
        # bf16 has 8 significant bits: fewer would lose scales that the payload can hold.
        assert 8 <= bits <= 16
        significand = rng.integers(1 << (bits - 1), 1 << bits, 64)
        scale = np.ldexp(significand.astype(np.float64), rng.integers(-60, 60, 64))
        decoded = fmt.level_table(width)[-4096:, None].astype(np.float64)
        if dither:
            noise = (16 - (2 * np.arange(16) + 1)) / 32 * fmt.dither_amplitude(width)
            decoded = (decoded + noise).reshape(-1, 1)
        else:
            assert fmt.level_top(width).bit_length() + bits <= 24
        product = decoded.astype(np.float32) * scale.astype(np.float32)
        np.testing.assert_array_equal(product.astype(np.float64), decoded * scale)
        cap = np.float32(fmt.super_scale_cap(width))
        assert cap.view(np.uint32) & 0xFFFF == 0  # a bf16
        assert 1 / cap >= np.finfo(np.float32).tiny
        largest = cap * np.float32(decoded.max())
        assert np.isfinite(largest)
        # No smaller than these two bounds demand: bf16 steps are 1/128.
        assert largest >= min(3.3e38, 2.0**125 * decoded.max())


@pytest.mark.parametrize("levels", LEVELS)
def test_distortion_falls_with_width(levels):
    fmt = WireFormat(levels=levels)
    assert distortion(fmt, 0) == 1.0
    errors = [distortion(fmt, w) for w in widths_of(levels)]
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    # 4 per bit in the limit; more at narrow widths, where the next level is far from most values.
    # (The paper's law pays for small values with the large ones at widths 7 and 8.)
    assert np.all(ratios > (2.9 if levels == "geometric" else 3.9))
    assert np.all(ratios < 10)


@pytest.mark.parametrize("width", range(3, 11))
def test_the_two_step_law_beats_equidistant_levels(width):
    piecewise, uniform = WireFormat(levels="piecewise"), WireFormat(levels="uniform")
    gain = distortion(uniform, width) / distortion(piecewise, width)
    assert 1.1 < gain < 1.15
    # Finer steps near zero cost squared error elsewhere.
    loss = distortion(WireFormat(levels="companded"), width) / distortion(piecewise, width)
    assert 1.25 < loss < 1.9


@pytest.mark.parametrize("levels", [[-2.0, -0.5, 0.0, 0.5, 0.5, 1.0, 2.0], [0.25], [7.0]])
def test_levels_are_counted_as_by_searchsorted(levels):
    groups, levels = _groups(32), np.array(levels)
    assert (groups.t == 1).sum() >= 4096  # a level that values equal
    expected = np.searchsorted(levels, groups.t, side="right")
    np.testing.assert_array_equal(groups.levels_up_to(levels), expected)
