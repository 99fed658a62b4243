"""The error measure, and the synthetic gradients it is used on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.synthetic import lognormal_mixture


def test_vnmse_is_error_over_norm():
    exact = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[0.0, 12.0]])}
    estimate = {"a": jnp.array([3.0, 2.0]), "b": jnp.array([[3.0, 12.0]])}
    # (4 + 9) / (25 + 144)
    assert float(dq.vnmse(estimate, exact)) == pytest.approx(13 / 169, rel=1e-6)


def test_vnmse_does_not_change_with_scale_and_works_on_low_precision():
    exact = jax.random.normal(jax.random.key(0), (1000,))
    estimate = exact + 0.01 * jax.random.normal(jax.random.key(1), (1000,))
    assert float(dq.vnmse(estimate, exact)) == pytest.approx(1e-4, rel=0.2)
    scaled = dq.vnmse(8 * estimate, 8 * exact)
    assert float(scaled) == pytest.approx(float(dq.vnmse(estimate, exact)), rel=1e-6)
    # bf16 keeps 8 bits: step²/12 of relative error on average, arithmetic itself in f32.
    low = dq.vnmse(exact.astype(jnp.bfloat16), exact)
    assert 1e-6 < float(low) < 5e-6
    assert low.dtype == jnp.float32


def test_vnmse_of_zeros():
    zero, one = jnp.zeros(3), jnp.ones(3)
    assert float(dq.vnmse(zero, zero)) == 0.0
    assert float(dq.vnmse({}, {})) == 0.0
    assert float(dq.vnmse(one, zero)) == np.inf
    assert float(dq.vnmse(zero, one)) == 1.0


def test_vnmse_refuses_different_structures():
    with pytest.raises(ValueError):
        dq.vnmse({"a": jnp.ones(2)}, {"b": jnp.ones(2)})


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
