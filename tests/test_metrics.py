"""The error measure, and the synthetic gradients it is used on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.metrics import vnmse, worst_leaf_error


def test_vnmse_is_error_over_norm():
    exact = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[0.0, 12.0]])}
    estimate = {"a": jnp.array([3.0, 2.0]), "b": jnp.array([[3.0, 12.0]])}
    # (4 + 9) / (25 + 144)
    assert float(vnmse(estimate, exact)) == pytest.approx(13 / 169, rel=1e-6)


def test_vnmse_does_not_change_with_scale_and_works_on_low_precision():
    exact = jax.random.normal(jax.random.key(0), (1000,))
    estimate = exact + 0.01 * jax.random.normal(jax.random.key(1), (1000,))
    assert float(vnmse(estimate, exact)) == pytest.approx(1e-4, rel=0.2)
    scaled = vnmse(8 * estimate, 8 * exact)
    assert float(scaled) == pytest.approx(float(vnmse(estimate, exact)), rel=1e-6)
    # bf16 keeps 8 bits: step²/12 of relative error on average, arithmetic itself in f32.
    low = vnmse(exact.astype(jnp.bfloat16), exact)
    assert 1e-6 < float(low) < 5e-6
    assert low.dtype == jnp.float32


def test_vnmse_of_zeros():
    zero, one = jnp.zeros(3), jnp.ones(3)
    assert float(vnmse(zero, zero)) == 0.0
    assert float(vnmse({}, {})) == 0.0
    assert float(vnmse(one, zero)) == np.inf
    assert float(vnmse(zero, one)) == 1.0


def test_vnmse_refuses_different_structures():
    with pytest.raises(ValueError):
        vnmse({"a": jnp.ones(2)}, {"b": jnp.ones(2)})


def test_worst_leaf_error_is_the_largest_of_all_leaves():
    exact = {"a": jnp.array([3.0, 4.0]), "b": [jnp.array([[0.0, 12.0]]), jnp.array(2.0)]}
    estimate = {"a": jnp.array([3.0, 2.0]), "b": [jnp.array([[3.0, 12.0]]), jnp.array(2.5)]}
    # 4 / 25, 9 / 144 and 0.25 / 4
    assert float(worst_leaf_error(estimate, exact)) == pytest.approx(4 / 25, rel=1e-6)
    estimate["a"] = exact["a"]
    estimate["b"][1] = jnp.array(3.0)
    assert float(worst_leaf_error(estimate, exact)) == pytest.approx(1 / 4, rel=1e-6)


def test_worst_leaf_error_leaves_small_leaves_out():
    exact = {"large": jnp.ones((2, 3)), "small": jnp.ones(5)}
    estimate = {"large": jnp.full((2, 3), 1.5), "small": jnp.full(5, 2.0)}
    found = {n: float(worst_leaf_error(estimate, exact, min_size=n)) for n in (0, 5, 6, 7)}
    assert found == {0: 1.0, 5: 1.0, 6: 0.25, 7: 0.0}


def test_worst_leaf_error_of_zeros():
    zero, one = jnp.zeros(3), jnp.ones(3)
    assert float(worst_leaf_error({}, {})) == 0.0
    assert float(worst_leaf_error(zero, zero)) == 0.0
    assert float(worst_leaf_error(zero, one)) == 1.0
    # What a zero leaf gets does not hide the others.
    assert float(worst_leaf_error([one, 1.5 * one], [zero, one])) == 0.25
    assert float(worst_leaf_error(one, zero)) == 0.0


def test_worst_leaf_error_shows_what_is_not_finite():
    exact = [jnp.ones(3), jnp.ones(3)]
    for wrong, expected in ((jnp.nan, np.nan), (jnp.inf, np.inf)):
        estimate = [jnp.array([1.0, wrong, 1.0]), jnp.full(3, 2.0)]
        for order in (1, -1):
            found = float(worst_leaf_error(estimate[::order], exact))
            np.testing.assert_equal(found, expected)
    assert np.isnan(float(worst_leaf_error(exact, [jnp.full(3, jnp.nan), exact[1]])))


def test_worst_leaf_error_compiles_and_takes_low_precision():
    exact = {"a": jnp.full(1024, 3.0, jnp.bfloat16), "b": jnp.ones(4, jnp.float16)}
    estimate = {"a": jnp.full(1024, 6.0, jnp.bfloat16), "b": jnp.ones(4)}
    found = jax.jit(worst_leaf_error, static_argnames="min_size")(estimate, exact, min_size=4)
    assert found.dtype == jnp.float32
    assert found.shape == ()
    assert float(found) == 1.0


def test_worst_leaf_error_refuses_different_structures():
    for estimate in ({"b": jnp.ones(2)}, [jnp.ones(2), jnp.ones(2)]):
        with pytest.raises(ValueError):
            worst_leaf_error(estimate, {"a": jnp.ones(2)})


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
