"""`psum` of one array under every method; `test_nonfinite` has what is not finite, and extremes."""

import functools

import jax
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits, bias, relative_error
from cases import CHEAP, LOOP, METHODS, TOPOLOGIES, daily, small, vmapped
from workers import gradient

import dynamiq_jax as dq

N, SIZE = 5, 5 * 8 * 1024 - 77
"""Five workers (an odd ring), no multiple of anything; a whole tile even of the largest rows."""
SAMPLES = 300


@functools.cache
def case(n=N):
    """Every worker's gradient and their exact sum."""
    x = gradient(0, n, SIZE)
    return x, np.sum(np.asarray(x, np.float64), axis=0)


def reduce(name, x, key=None, topology=LOOP, **options):
    run = vmapped(METHODS[name], topology, **options)
    return np.asarray(run(x, jax.random.key(1) if key is None else key))


@pytest.mark.parametrize("name", daily(METHODS, ["default", "dither"]))
def test_replicas_agree_and_the_key_alone_decides(name):
    x, exact = case()
    first, again = reduce(name, x), reduce(name, x)
    assert_replicas_equal(first)
    assert relative_error(first[0], exact) < 0.1
    assert_same_bits(first, again)
    other = reduce(name, x, jax.random.key(2))
    # Most coordinates are rounded; only those without error (width 0, exact levels) repeat.
    assert np.mean(other != first) > 0.3


@pytest.mark.release
def test_nearest_rounding_has_half_the_error_and_no_noise():
    """Over `Direct` a gradient is encoded once, and the sum again."""
    x, exact = case()
    methods = [dq.DynamiQ(bits=b, rounding=r) for b in (3.5, 5) for r in ("nearest", "independent")]
    runs = [vmapped(small(method), dq.Direct()) for method in methods]
    first, second = ([np.asarray(run(x, jax.random.key(k))) for run in runs] for k in (1, 2))
    for own, *_ in first:
        assert np.isfinite(own).all()
    assert_replicas_equal(first[0])
    assert_same_bits(first[0], second[0])
    assert (first[1] != second[1]).any()
    errors = [relative_error(own[0], exact) for own in first]
    assert errors[0] < 0.6 * errors[1] and errors[2] < 0.6 * errors[3]


UNLIKE = ["default", "all_widths", "dither_all_widths", "no_plan", "mean"]
"""Formats whose arithmetic differs."""


@pytest.mark.parametrize("name", daily(UNLIKE, UNLIKE[:1]))
def test_bits_do_not_depend_on_the_compiler(name):
    """Neither on optimisations, which contract products and additions, nor on fusions.

    Most tests compile without them; those of bias over keys do as users have it, and in releases
    `test_golden`.
    """
    x, _ = case()
    assert_same_bits(reduce(name, x), reduce(name, x, optimized=True))


@functools.cache
def bias_over_keys(name, route, n):
    """The bias of 20 blocks over SAMPLES keys."""
    x, exact = case(n)
    total, squared = np.zeros((2, SIZE))
    for key in jax.random.split(jax.random.key(3), SAMPLES):
        error = reduce(name, x, key, OVER_KEYS[route], optimized=True)[0] - exact
        total, squared = total + error, squared + error**2
    total, squared, exact = (np.pad(a, (0, 77)) for a in (total, squared, exact))
    return bias(total, squared, SAMPLES, exact, blocks=20)


OVER_KEYS = {"loop": LOOP} | {name: topology for name, (topology, _) in TOPOLOGIES.items()}
ROWS = [(name, "loop", N) for name in ("independent", "mean", "no_plan", "dither")]
ROWS += [("independent", route, 4) for route in ("ring, two streams", "butterfly", "direct")]


@pytest.mark.release
@pytest.mark.parametrize(("name", "route", "n"), ROWS)
def test_unbiased_over_keys(name, route, n):
    """The mean over keys is the exact sum, for every block of C = 2048 coordinates.

    `test_codec_error` has the encodings of all formats.

    The variance is that of n roundings. With N = 300 samples a bias of 2% of the last hop's
    step scores 0.02 sqrt(6 C N / 5) = 17 if it has a direction, and adds 0.0024 N / 5 = 0.14 to
    the spread of any signs; the mean spread of all blocks deviates by less than 0.02.
    """
    found = bias_over_keys(name, route, n)
    assert found.worst_score() < 6.5
    assert abs(np.mean(found.spread) - 1) < 0.12


def test_antithetic_rounding_has_little_bias():
    """Related noise of consecutive hops biases what is rounded twice: its square is small.

    Measured: 1% of the variance of a sum, and up to 4% on two workers. `test_paper` has correlated
    rounding.
    """
    found = bias_over_keys("default", "loop", N)
    squared_bias_over_variance = (np.mean(found.spread) - 1) / SAMPLES
    assert squared_bias_over_variance < 0.03


def test_any_kind_of_key_will_do():
    x = gradient(0, 2, 3000)
    run = vmapped(CHEAP)
    typed = np.asarray(run(x, jax.random.key(5)))
    assert_same_bits(np.asarray(run(x, jax.random.PRNGKey(5))), typed)
    rbg = [np.asarray(run(x, jax.random.key(seed, impl="rbg"))) for seed in (5, 6)]
    assert np.mean(rbg[0] != rbg[1]) > 0.3
