"""THC's numerics: tables and rounding; `test_thc_method` has the error of sums."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.comparators import thc_codec as thc
from pallas_kernels import slot_noise

SEED = np.array([3, 4], np.uint32)
SIZE = 1 << 17

RELEASED = {
    (4, 30, 1 / 32): [0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30],
    (4, 42, 1 / 1024): [0, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 42],
    (3, 42, 1 / 1024): [0, 10, 15, 19, 23, 27, 32, 42],
}
"""The tables of the authors' code, by (bits, granularity, p)."""

CODES = {
    "uniform16, 1/32": (thc.uniform_table(16), 1 / 32),
    "uniform16": (thc.uniform_table(16), 1 / 1024),
    "g30": (thc.optimal_table(4, 30, 1 / 32), 1 / 32),
    "g42": (thc.optimal_table(4, 42, 1 / 1024), 1 / 1024),
    "uniform31": (thc.uniform_table(31), 1 / 1024),
    "uniform64": (thc.uniform_table(64), 1 / 1024),
}

INDEPENDENT = {
    "uniform16, 1/32": 0.0203,
    "uniform16": 0.0345,
    "g30": 0.0199,
    "g42": 0.0224,
    "uniform31": 0.0085,
    "uniform64": 0.0020,
}
"""vNMSE of the mean of 8 independent workers. One draw of data spreads by 1% to 2.5%."""


@functools.partial(jax.jit, static_argnames="shape")
def noise(shape):
    return thc.rounding_noise(shape, slot_noise(jnp.asarray(SEED), 1, "independent")[0])


@functools.cache
def quantizer(code):
    table, p = CODES[code]
    return jax.jit(lambda z, words: thc.quantize(z, table, thc.clip_threshold(p), words))


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def lognormal_scaled(n, size=SIZE, seed=0):
    """Gaussian coordinates, each with a scale e^N(0, 1) of its own: f32[n, size]."""
    return np.exp(normal((n, size), seed)) * normal((n, size), seed + 1000)


@pytest.mark.parametrize("key", RELEASED)
def test_released_tables(key):
    assert thc.optimal_table(*key).tolist() == RELEASED[key]


@pytest.mark.parametrize(("p", "expected"), [(1 / 32, 2.15387), (1 / 1024, 3.29719)])
def test_clip_threshold(p, expected):
    assert thc.clip_threshold(p) == pytest.approx(expected, abs=5e-6)


def integrated(table, threshold):
    """`thc.expected_error` by the midpoint rule."""
    z = (np.arange(400_000) + 0.5) / 400_000 * 20 - 10
    mass = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * (20 / 400_000)
    nodes = threshold * (2 * np.asarray(table) / table[-1] - 1)
    inside = np.clip(z, -threshold, threshold)
    k = np.clip(np.searchsorted(nodes, inside), 1, len(nodes) - 1)
    rounding = (nodes[k] - inside) * (inside - nodes[k - 1])
    return np.sum(mass * rounding), np.sum(mass * (z - inside) ** 2)


@pytest.mark.parametrize("code", CODES)
def test_expected_error_is_the_integral(code):
    table, p = CODES[code]
    threshold = thc.clip_threshold(p)
    expected = thc.expected_error(table, threshold)
    np.testing.assert_allclose(expected, integrated(table, threshold), rtol=1e-6)


@pytest.mark.parametrize(
    ("bits", "granularity"), [(2, 3), (2, 8), (2, 11), (3, 7), (3, 16), (4, 21)]
)
@pytest.mark.parametrize("p", [1 / 4, 1 / 32, 1e-6])
def test_optimal_table_is_the_best_symmetric_one(bits, granularity, p):
    threshold, best = thc.clip_threshold(p), np.inf
    above = range(granularity // 2 + 1, granularity)
    for chosen in itertools.combinations(above, 2 ** (bits - 1) - 1):
        half = [*chosen, granularity]
        table = np.array([granularity - t for t in reversed(half)] + half)
        best = min(best, thc.expected_error(table, threshold)[0])
    table = thc.optimal_table(bits, granularity, p)
    assert np.array_equal(table + table[::-1], np.full(2**bits, granularity))
    assert np.all(np.diff(table) > 0)
    assert table[0] == 0
    assert thc.expected_error(table, threshold)[0] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("bits", "granularity"), [(2, 30), (4, 30), (4, 45), (8, 255), (8, 510)])
def test_optimal_table_is_no_worse_than_a_uniform_one(bits, granularity):
    optimal = thc.expected_error(thc.optimal_table(bits, granularity, 1e-3), 3.29)[0]
    uniform = thc.expected_error(thc.uniform_table(2**bits), 3.29)[0]
    assert optimal <= uniform * (1 + 1e-9)
    assert (optimal < uniform * 0.95) == (granularity > 2**bits - 1)


def test_one_bit_has_the_two_outer_nodes():
    assert thc.optimal_table(1, 5, 0.1).tolist() == [0, 5]


def test_tables_refuse_what_does_not_exist():
    with pytest.raises(ValueError, match="4 bits and granularity 14"):
        thc.optimal_table(4, 14, 0.1)
    with pytest.raises(ValueError, match="p is 0;"):
        thc.optimal_table(4, 30, 0)
    with pytest.raises(ValueError, match="1 levels"):
        thc.uniform_table(1)


@pytest.mark.parametrize("code", CODES)
def test_rounding_is_unbiased_inside_the_threshold(code):
    table, p = CODES[code]
    threshold, samples = thc.clip_threshold(p), 1 << 12
    z = np.linspace(-threshold, threshold, 101, dtype=np.float32)
    tiled = jnp.broadcast_to(z, (samples, z.size))
    indices = np.asarray(quantizer(code)(tiled, noise(tiled.shape)))
    nodes = threshold * (2 * table / table[-1] - 1)
    upper = np.clip(np.searchsorted(nodes, z.astype(np.float64)), 1, len(nodes) - 1)
    # Only the two nodes beside z occur; f32 may see an outermost z just across its node.
    assert np.all((indices == upper) | (indices == upper - 1))
    error = nodes[indices].mean(axis=0) - z
    spread = np.sqrt(np.maximum((nodes[upper] - z) * (z - nodes[upper - 1]), 0) / samples)
    score = error / np.maximum(spread, 1e-6)
    assert np.max(np.abs(score)) < 5
    assert np.sqrt(np.mean(score**2)) < 1.35  # 1 +- 0.07 without bias


@pytest.mark.parametrize("code", CODES)
def test_nodes_are_exact_and_the_rest_is_clipped(code):
    table, p = CODES[code]
    threshold = thc.clip_threshold(p)
    node = thc.dequantize_sum(jnp.asarray(table, jnp.uint32), 1, int(table[-1]), threshold)
    np.testing.assert_allclose(node, threshold * (2 * table / table[-1] - 1), rtol=1e-6)
    words = jnp.full(node.shape, 1 << 16, jnp.uint32)
    # f32 may see a node 2^-20 of a step beside itself; words 2^-16 from the ends do not show it.
    for word in (words, ~words):
        indices = quantizer(code)(node, word)
        assert np.array_equal(indices, np.arange(len(table)))
        assert np.array_equal(thc.lookup(indices, table), table)
    for far in (threshold * 1.001, 1e30, np.inf):
        ends = jnp.where(jnp.arange(len(table)) == 0, -far, far)
        assert set(quantizer(code)(ends, words).tolist()) == {0, len(table) - 1}


def test_a_small_word_rounds_up():
    table = thc.uniform_table(5)  # nodes -2, -1, 0, 1, 2
    words = jnp.array([0, (1 << 30) - 256, 1 << 30, 0xFFFFFFFF], jnp.uint32)
    indices = thc.quantize(jnp.full(4, 0.25), table, 2.0, words)
    assert indices.tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize("n", [1, 7, 8192])
def test_sums_decode_to_the_mean_node(n):
    table, threshold = thc.optimal_table(4, 30, 1 / 32), 2.15
    total = np.array([0, n * 15, n * 30, n * 7 + 1], np.uint32)
    found = thc.dequantize_sum(jnp.asarray(total), n, int(table[-1]), threshold)
    np.testing.assert_allclose(found, (total / n - 15) * 2 * threshold / 30, rtol=1e-6)
    assert found[1] == 0


def test_sums_that_do_not_decode_are_refused():
    with pytest.raises(ValueError, match="sum to 2147483648"):
        thc.dequantize_sum(jnp.zeros(4, jnp.uint32), 1 << 16, 1 << 15, 1.0)
