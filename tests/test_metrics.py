"""The error measure, and the synthetic gradients it is used on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.metrics import vnmse, worst_leaf_error

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
    for error in (vnmse, worst_leaf_error):  # bf16 keeps 8 bits: a relative error of step²/12
        low = error(exact.astype(jnp.bfloat16), exact)
        assert 1e-6 < float(low) < 5e-6 and low.dtype == jnp.float32 and low.shape == ()


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


@pytest.mark.filterwarnings("ignore:.*error of a super-group")
@pytest.mark.parametrize(("bits", "trusted"), [(5, True), (2.5, False)])
def test_what_estimates_of_the_error_are_worth(bits, trusted):
    """Near at 5 bits; where they are above 0.3 they say that they are too low, and are."""
    n, size = 13, 30_001
    x = jnp.asarray(np.random.default_rng(0).standard_normal((n, size)), jnp.float32)
    exact = np.asarray(x, np.float64).mean(0)
    method = dq.Compression(dq.DynamiQ(bits=bits), topology=dq.Ring(), min_bucket_bytes=0)
    run = lambda x: dq.reduce(x, "d", op="mean", method=method, metrics=True)
    found = jax.jit(jax.vmap(run, axis_name="d"))(x)
    told = dq.explain(jax.ShapeDtypeStruct((size,), "float32"), n, method=method, verbose=False)
    error = np.sum((np.asarray(found.tree[0], np.float64) - exact) ** 2) / np.sum(exact**2)
    estimates = told.relative_error, float(found.metrics.vnmse[0])
    if trusted:
        assert all(0.5 * error < x < 2 * error for x in estimates), (error, estimates)
    else:
        assert all(0.3 < x < error for x in estimates), (error, estimates)
    assert ("above 0.3 this is too low" in str(told)) == (not trusted)
