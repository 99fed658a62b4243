"""Global-QSGD: errors as derived, no code that wraps, no sum that runs into zero."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, low

import dynamiq_jax as dq

OVER = {"direct": dq.Direct(), "ring": dq.Ring(), "butterfly": dq.Butterfly()}


def summed(method, x, topology, key=0):
    one = partial(dq.psum, axis_name="data", method=method, topology=topology)
    run = jax.jit(jax.vmap(lambda x, key: one(x, key=key), axis_name="data", in_axes=(0, None)))
    found = run(x, jax.random.key(key))
    assert_replicas_equal(found)
    return np.asarray(found[0], np.float64)


def method_of(levels, **options):
    return low(dq.comparators.GlobalQSGD(levels=levels, **options))


@pytest.mark.parametrize("n", [4, 8, 16])
def test_linear_has_the_error_of_its_step(n):
    """(M / s)² / 6 for each worker, s = 31, 15, 7; 0.0039, 0.019, 0.077 for M = 4.8 deviations."""
    x = jax.random.normal(jax.random.key(n), (n, 4096))
    found = summed(method_of("linear"), x, dq.Direct())
    step = float(jnp.max(jnp.abs(x))) / (127 // n)
    assert float(dq.vnmse(found, x.sum(0))) == pytest.approx(step**2 / 6, rel=0.06)


def test_one_exponential_rounding_has_the_derived_error():
    """0.082, of at most 1/8: of two workers, of which one has nothing, and no further rounding."""
    x = jnp.abs(jax.random.normal(jax.random.key(0), (1, 2**15)))
    x = jnp.concatenate([x, jnp.zeros_like(x)])
    found = summed(method_of("exponential"), x, dq.Direct())
    # Worker 0's half is rounded at the sink alone; the other half once before: then it is a power
    # of two, which the sink leaves as it is.
    assert float(dq.vnmse(found, x.sum(0))) == pytest.approx(0.082, rel=0.05)


@pytest.mark.parametrize(
    ("route", "n", "most"), [("butterfly", 4, 0.24), ("butterfly", 8, 0.33), ("ring", 8, 0.45)]
)
def test_exponential_errs_less_than_merges_of_codes(route, n, most):
    """The owner's share is not rounded by itself here."""
    x = jax.random.normal(jax.random.key(1), (n, 2**14))
    found = summed(method_of("exponential"), x, OVER[route])
    assert 0.4 * most < float(dq.vnmse(found, x.sum(0))) < most


@pytest.mark.parametrize("levels", ["linear", "exponential"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("route", OVER)
def test_equal_maxima_neither_wrap_nor_vanish(levels, n, route):
    """All workers hold the largest magnitude everywhere."""
    if route == "butterfly" and n == 3:
        pytest.skip("3 is no power of two")
    x = jnp.tile(jnp.where(jnp.arange(2048) % 2 == 0, 3.0, -3.0), (n, 1))
    found = summed(method_of(levels), x, OVER[route])
    exact = 3.0 * n * np.where(np.arange(2048) % 2 == 0, 1, -1)
    assert np.all(np.sign(found) == np.sign(exact))
    if levels == "linear":  # the maximum is a level
        np.testing.assert_allclose(found, exact, rtol=1e-6)
    else:
        assert abs(np.mean(found / exact) - 1) < 0.06
        assert np.all(np.abs(found / exact) <= 2 ** (n - 1))


def test_pieces_keep_magnitudes_apart():
    scale = jnp.repeat(jnp.array([1e-4, 1.0]), 1024)[None]
    x = scale * jax.random.normal(jax.random.key(5), (4, 2048))
    small = np.asarray(x)[:, :1024].sum(0)
    apart = summed(method_of("linear", piece_size=1024), x, dq.Direct())[:1024]
    together = summed(method_of("linear", piece_size=2048), x, dq.Direct())[:1024]
    assert float(dq.vnmse(apart, small)) < 0.01 < 10 < float(dq.vnmse(together, small))


@pytest.mark.parametrize(
    ("n", "topology", "options", "complaint"),
    [
        (8, dq.Direct(), {"bits": 4}, "no step for 8 workers.*pass bits=5"),
        (128, dq.Direct(), {}, "or levels='exponential'"),
        (128, dq.Ring(), {"levels": "exponential"}, "may need 135 above the scale"),
        (8, dq.Direct(), {"bits": 9}, "bits=9 must be an integer from 3 to 8"),
        (8, dq.Direct(), {"piece_size": 100}, "piece_size=100 must be a positive multiple of 32"),
        (8, dq.Direct(), {"levels": "odd"}, "levels='odd'"),
    ],
)
def test_what_has_no_room_is_refused(n, topology, options, complaint):
    leaf = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    with pytest.raises(ValueError, match=complaint):
        method = dq.comparators.GlobalQSGD(**options)
        dq.explain(leaf, n, method=method, topology=topology, verbose=False)


def test_bits_are_those_of_the_codes_and_scales():
    leaf = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    cost = dq.explain(
        leaf, 8, method=dq.comparators.GlobalQSGD(bits=6), topology=dq.Ring(), verbose=False
    )
    assert cost.bits_per_coord == pytest.approx(6 + 32 / 4096)
