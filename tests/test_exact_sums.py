"""Gradients whose every partial sum lies on the format's levels: their sum comes back exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily, small, vmapped

import dynamiq_jax as dq
from pallas_kernels import WireFormat
from pallas_kernels.format import DEALT, QUAD


def anchored(width, levels, n, seed=0):
    """f32[n, 256 * 8 * n * 2] whose partial sums all lie on levels, whatever the ring's order.

    In each group coordinate i < n, the anchor of worker i, is the top level at that worker and
    zero elsewhere: every partial sum has the same maximum, so the same scale, a power of two. The
    rest are small integers, whose sums stay where levels are one apart. The second half of a group
    is the negative of the first, so that all means are exactly zero.
    """
    rng = np.random.default_rng(seed)
    fmt = WireFormat(levels=levels)
    table = fmt.level_table(width)
    ones = int(np.argmax(np.diff(table, append=table[-1]) != 1))  # levels 0..ones are all there
    most = ones // n if levels != "geometric" else 0
    rows = 8 * n * 2
    half = rng.integers(-most, most + 1, (n, rows, 8, 16)).astype(np.float64)
    half[..., :n] = 0
    for worker in range(n):
        half[worker, ..., worker] = table[-1] * rng.choice([-1, 1], (rows, 8))
    x = np.concatenate([half, -half], axis=3) * np.exp2(rng.integers(-20, 20, (rows, 1, 1)))
    quads = x.reshape(n, rows, fmt.groups // DEALT, DEALT, -1, QUAD)  # dealt to groups in turn
    return jnp.asarray(quads.swapaxes(3, 4).reshape(n, -1), jnp.float32)


ON_LEVELS = [(2, "piecewise"), (4, "piecewise"), (8, "piecewise"), (8, "uniform"), (4, "geometric")]


@pytest.mark.parametrize(("width", "levels"), daily(ON_LEVELS, [(4, "geometric")]))
def test_sums_on_levels_are_exact(width, levels):
    n = 5
    x = anchored(width, levels, n)
    method = small(
        dq.DynamiQ(widths=(width,), floor=None, format=dq.Format(levels=levels), bits=width + 1)
    )
    result = np.asarray(vmapped(method)(x, jax.random.key(0)))
    expected = np.broadcast_to(np.sum(np.asarray(x, np.float64), axis=0), x.shape)
    np.testing.assert_array_equal(result.astype(np.float64), expected)


@pytest.mark.parametrize(("n", "subtract_mean"), daily([(8, True), (5, False)], [(5, False)]))
def test_sums_of_small_integers_are_exact_in_bf16(n, subtract_mean):
    rng = np.random.default_rng(n)
    half = rng.integers(-15, 16, (n, 8 * n * 2, 128))
    offset = 4 * rng.integers(-2, 3, (1, 8 * n * 2, 1)) if subtract_mean else 0
    x = (np.concatenate([half, -half], axis=2) + offset).reshape(n, -1)
    method = small(dq.DynamiQ(widths=(16,), bits=17, format=dq.Format(subtract_mean=subtract_mean)))
    result = np.asarray(vmapped(method)(jnp.asarray(x, jnp.float32), jax.random.key(0)))
    np.testing.assert_array_equal(result, np.broadcast_to(x.sum(axis=0), x.shape))
