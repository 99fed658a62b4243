"""`psum` under any topology, number of workers, size, format and dtype; drawn by hypothesis.

Sums come back exactly where every partial sum lies on the format's levels.
"""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal, relative_error
from cases import DAILY, METHODS, daily, small, vmapped
from hypothesis import strategies as st
from workers import anchored

import dynamiq_jax as dq

ROUND_OFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}
TOPOLOGIES = {
    "ring": dq.Ring(unroll_up_to=1),
    "ring, two streams": dq.Ring(unroll_up_to=1, streams=2),
    "butterfly": dq.Butterfly(),
    "direct": dq.Direct(),
}


def check(topology, n, size, name, dtype, seed):
    """Replicas have equal bits, the dtype stays, and the error is the one expected.

    The plan of this call expects one, and `dq.explain` does before any data where a chunk fills a
    tile.
    """
    n = 2 ** (n.bit_length() - 1) if topology == "butterfly" else n
    request = dataclasses.replace(METHODS[name], topology=TOPOLOGIES[topology])
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, size)), dtype)

    def one(x):
        found = dq.reduce(x, "data", op="sum", compression=request, metrics=True)
        return found.tree, found.metrics

    found, metrics = jax.jit(jax.vmap(one, axis_name="data"))(x)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert_replicas_equal(found)
    error = relative_error(found[0], np.asarray(x, np.float64).sum(0))
    round_off = ROUND_OFF[dtype] ** 2
    if size >= 500:  # of few coordinates the error is not an average
        assert 0.3 * metrics.vnmse[0] < error < 3.5 * metrics.vnmse[0] + 4 * round_off
    if size >= n * 2 * 8 * 1024:
        expected = dq.explain(x[0], n, compression=request, verbose=False).relative_error
        assert error < 3 * expected + 4 * round_off


def drawn(formats, most, examples):
    """The test of so many examples, the same in every run."""
    values = (
        st.sampled_from(sorted(TOPOLOGIES)), st.integers(2, 8), st.integers(1, most),
        st.sampled_from(sorted(formats)), st.sampled_from(sorted(ROUND_OFF)), st.integers(0, 99),
    )  # fmt: skip
    settings = hypothesis.settings(
        deadline=None, max_examples=examples, derandomize=True, database=None,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    return settings(hypothesis.given(*values)(check))


def test_any_psum():
    drawn(DAILY, 9000, 3)()


@pytest.mark.release
def test_any_psum_of_any_format():
    drawn(METHODS, 140_000, 40)()


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
