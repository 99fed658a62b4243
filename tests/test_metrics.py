"""The error measure, and the synthetic gradients it is used on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily

import dynamiq_jax as dq
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.metrics import (
    BucketMetrics,
    PayloadFacts,
    bucket_metrics,
    summarise,
    vnmse,
    worst_leaf_error,
)

ZERO, ONE = np.zeros(3, np.float32), np.ones(3, np.float32)
TREE = {"a": np.float32([3, 4]), "b": [np.float32([[0, 12]]), np.float32(2)]}
OFF = {"a": np.float32([3, 2]), "b": [np.float32([[3, 12]]), np.float32(2.5)]}
NAN, INF = np.float32([1, np.nan, 1]), np.float32([1, np.inf, 1])
LARGE, SMALL = np.ones((2, 3), np.float32), np.ones(5, np.float32)
CASES = [
    # (4 + 9 + 1/4) / (25 + 144 + 4); the worst leaf has 4 / 25, 9 / 144 or 0.25 / 4
    (OFF, TREE, 13.25 / 173, 4 / 25),
    (OFF | {"a": TREE["a"]}, TREE, 9.25 / 173, 9 / 144),
    (ZERO, ZERO, 0, 0),
    ({}, {}, 0, 0),
    (ONE, ZERO, np.inf, 0),
    (ZERO, ONE, 1, 1),
    ([ONE, 1.5 * ONE], [ZERO, ONE], 3.75 / 3, 0.25),  # a zero leaf does not hide the others
    ([NAN, 2 * ONE], [ONE, ONE], np.nan, np.nan),
    ([2 * ONE, INF], [ONE, ONE], np.inf, np.inf),
]


@pytest.mark.parametrize(("estimate", "exact", "whole", "worst"), CASES)
def test_errors_by_hand(estimate, exact, whole, worst):
    np.testing.assert_allclose(vnmse(estimate, exact), whole, rtol=1e-6)
    np.testing.assert_allclose(worst_leaf_error(estimate, exact), worst, rtol=1e-6)


def test_leaves_below_a_size_are_left_out_of_the_worst():
    worst = jax.jit(worst_leaf_error, static_argnames="min_size")
    pair = [1.5 * LARGE, 2 * SMALL], [LARGE, SMALL]
    assert [float(worst(*pair, min_size=n)) for n in (0, 5, 6, 7)] == [1.0, 1.0, 0.25, 0.0]


def test_errors_do_not_change_with_scale_and_are_f32_in_low_precision():
    exact = jax.random.normal(jax.random.key(0), (1000,))
    estimate = exact + 0.01 * jax.random.normal(jax.random.key(1), (1000,))
    assert float(vnmse(estimate, exact)) == pytest.approx(1e-4, rel=0.2)
    scaled = vnmse(8 * estimate, 8 * exact)
    assert float(scaled) == pytest.approx(float(vnmse(estimate, exact)), rel=1e-6)
    for exponent in (-110, -60, 60, 120):  # squares of f32 have exponents of -126 to 127
        pair = (x * np.float32(2.0**exponent) for x in (estimate, exact))
        assert float(vnmse(*pair)) == float(vnmse(estimate, exact))
    assert float(worst_leaf_error([ONE * 1.5e-30, ONE], [ONE * 1e-30, ONE])) == pytest.approx(0.25)
    for error in (vnmse, worst_leaf_error):  # bf16 keeps 8 bits: a relative error of step²/12
        low = error(exact.astype(jnp.bfloat16), exact)
        assert 1e-6 < float(low) < 5e-6 and low.dtype == jnp.float32 and low.shape == ()


@pytest.mark.release
def test_mixture_has_the_papers_magnitudes():
    n, super_groups = 4, 20000
    x = np.asarray(lognormal_mixture(jax.random.key(0), n, super_groups), np.float64)
    x = x.reshape(n, super_groups, 256)
    assert len({float(worker.sum()) for worker in x}) == n  # coordinates differ between workers
    norm = np.sqrt(np.sum(x**2, axis=2))
    # |x| over 256 coordinates N(0, M²/256) is M, up to 5%, the same on all workers.
    np.testing.assert_allclose(norm[0], norm[1], rtol=0.5)
    log = np.log(norm.mean(axis=0))
    wide = log < -10  # 99.999% of the first component lies above, 92% of the second below
    assert np.mean(wide) == pytest.approx(0.21 * 0.9157, abs=0.01)
    middle = np.median(log[log > -7.5])
    assert middle == pytest.approx(-3.99, abs=0.05)
    assert np.std(log[log > -7.5]) == pytest.approx(1.22, abs=0.05)
    correlation = np.mean(x[0] * x[1]) / np.sqrt(np.mean(x[0] ** 2) * np.mean(x[1] ** 2))
    assert abs(correlation) < 0.02


ESTIMATED = [
    (bits, topology, n)
    for bits in (2.5, 3.5, 5)
    for topology in (dq.Ring(), dq.Butterfly(), dq.Direct())
    for n in (4, 13)
    if (topology, n) != (dq.Butterfly(), 13)
]


@pytest.mark.filterwarnings("ignore:.*error of a super-group")
@pytest.mark.parametrize(
    ("bits", "topology", "n"),
    daily(ESTIMATED, [(5, dq.Direct(), 13)]),
    ids=lambda part: str(part) if isinstance(part, int | float) else type(part).__name__,
)
def test_estimates_of_the_error_are_near_the_measured_one(bits, topology, n):
    """Also where a later encoding sends errors of earlier ones, and the result is mostly error."""
    size = 2**15
    x = np.random.default_rng(0).standard_normal((n, size)).astype(np.float32)
    exact = x.astype(np.float64).mean(0)
    method = dq.Compression(dq.DynamiQ(bits=bits), topology=topology, min_bucket_bytes=0)
    run = lambda x: dq.reduce(x, "d", op="mean", compression=method, metrics=True)
    found = jax.jit(jax.vmap(run, axis_name="d"))(x)
    told = dq.explain(
        jax.ShapeDtypeStruct((size,), "float32"), n, compression=method, verbose=False
    )
    error = np.sum((np.asarray(found.tree[0], np.float64) - exact) ** 2) / np.sum(exact**2)
    for estimate in (told.relative_error, float(found.metrics.vnmse[0])):
        assert 0.7 < estimate / error < 1.7, (error, estimate)


@pytest.mark.parametrize(
    ("error", "norm", "expected"),
    [(6.0, 7.0, 6.0), (7.0, 7.0, np.inf), (0.0, 0.0, 0.0), (0.1, np.nan, np.nan), (0.0, 2.0, 0.0)],
)
def test_the_estimate_is_relative_to_the_sum_without_its_error(error, norm, expected):
    """Unbiased errors add to |result|²; where they are all of it, nothing is known of the sum."""
    bucket = BucketMetrics(PayloadFacts(error=error), norm, 0.0)
    found = summarise([bucket], bits_per_coord=2.5, wire_bytes=1)
    np.testing.assert_allclose(found.vnmse, expected, rtol=1e-6)


@pytest.mark.parametrize(("scale", "known", "squares"), [
    (0.0, True, 0.0),
    (1e-25, False, np.nan),
    (1e-20, False, 1e-40),
    (4e-19, True, 16e-38),
    (1.0, True, 1.0),
    (1e16, True, 1e32),
    (1e19, False, np.nan),
])  # fmt: skip
def test_squares_that_f32_does_not_hold_make_no_infinite_error(scale, known, squares):
    """For coordinates of 1e-20, f32 holds the sum of enough squares, but no square."""
    size = 2**16
    value, error = np.full(size, np.float32(scale)), 1e-4 * squares * size
    found = jax.jit(lambda x: bucket_metrics(x, PayloadFacts(error=error)))(value)
    told = summarise([found], bits_per_coord=16.0, wire_bytes=0.0)
    np.testing.assert_allclose(told.norm, squares * size, rtol=1e-5)
    expected = 1e-4 / (1 - 1e-4) if scale else 0.0
    np.testing.assert_allclose(told.vnmse, expected if known else np.nan, rtol=1e-5)
