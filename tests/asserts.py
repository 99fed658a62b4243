"""Assertions about results: bits, closeness, equal copies, refusals, and the test for bias."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def relative_error(estimate, exact):
    """|estimate - exact|² / |exact|² in f64."""
    exact = np.asarray(exact, np.float64)
    return np.sum((np.asarray(estimate, np.float64) - exact) ** 2) / np.sum(exact**2)


def sum_error(result, x):
    """`relative_error` of a sum of all workers' x."""
    return relative_error(result, np.sum(np.asarray(x, np.float64), axis=0))


def bits_of(x) -> np.ndarray:
    """The bytes of an array, so that NaNs and signed zeros count in comparisons."""
    x = np.ascontiguousarray(x)
    return x.view(np.uint8) if x.ndim else x.reshape(1).view(np.uint8)


def assert_same_bits(a, b) -> None:
    """Two trees have equal structure, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        np.testing.assert_array_equal(bits_of(left), bits_of(right))


def assert_close(found, expected, rtol=1e-4, atol=1e-5) -> None:
    """Two trees have equal structure, dtypes, and values but for rounding.

    ``atol`` counts in the largest value of a leaf, in 0.1 at least.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(left) == jnp.result_type(right)
        most = atol * np.max(np.abs(right), initial=0.1)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=most)


def assert_copies_equal(tree) -> None:
    """All devices that hold the same part of an array hold the same bits."""
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            assert_same_bits(data, first.setdefault(str(shard.index), data))


def assert_same_arithmetic(found, expected) -> None:
    """Two programs compute the same numbers, in the same order.

    With JAX 0.10 results have the same bits. Later compilers for CPU round the one product of a
    multiply and add that they fuse in one of the programs alone, which is seen in the last bit.
    """
    if jax.__version_info__ < (0, 11):
        assert_same_bits(found, expected)
    else:
        assert_close(found, expected, rtol=2**-22, atol=2**-22)


def assert_replicas_equal(tree) -> None:
    """All slices along the leading worker axis have the same bits."""
    for leaf in jax.tree.leaves(tree):
        leaf = np.asarray(leaf)
        assert_same_bits(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def assert_refused(*rows) -> None:
    """Every row has an error, words of its message, and a function that raises it of arguments."""
    for error, words, function, *args in rows:
        with pytest.raises(error, match=words):
            function(*args)


class Bias(NamedTuple):
    """How far mean errors are from zero, for blocks of coordinates.

    With N samples of C coordinates in a block whose rounding errors have variance about g²/6 for
    steps g, a bias of 2% of a step in one direction moves a z-score by 0.02 sqrt(6 C N), and one
    of any pattern of signs moves ``spread`` by 0.0024 N.
    """

    up: np.ndarray
    """z-score of the mean error."""
    outward: np.ndarray
    """z-score of the mean error away from zero."""
    spread: np.ndarray
    """Mean over coordinates of (mean error)² over its variance: 1 if unbiased."""

    def worst_score(self) -> float:
        """The largest z-score of the blocks."""
        return float(np.max(np.abs([self.up, self.outward])))


def bias(total, total_squared, samples: int, sign, blocks: int) -> Bias:
    """The bias of errors from their sums and sums of squares over ``samples`` samples."""
    total = np.asarray(total, np.float64).reshape(blocks, -1)
    total_squared = np.asarray(total_squared, np.float64).reshape(blocks, -1)
    sign = np.sign(np.asarray(sign)).reshape(blocks, -1)
    variance = (total_squared - total**2 / samples).sum(axis=1) / (samples - 1) * samples
    variance = np.maximum(variance, np.finfo(np.float64).tiny)
    up = total.sum(axis=1) / np.sqrt(variance)
    outward = (total * sign).sum(axis=1) / np.sqrt(variance)
    return Bias(up, outward, (total**2).sum(axis=1) / variance)
