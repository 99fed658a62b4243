"""The randomized Hadamard transform: an orthogonal matrix, after which data look normal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.comparators import hadamard
from dynamiq_jax.comparators import thc_codec as thc

SEED = np.array([3, 4], np.uint32)
SIZE = 1 << 17

rotate, unrotate = jax.jit(hadamard.rotate), jax.jit(hadamard.unrotate)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("length", [1, 2, 512])
def test_rotation_is_a_hadamard_matrix_with_shared_signs(length):
    eye = jnp.eye(length)
    matrix = np.asarray(jax.vmap(rotate, (0, None))(eye, SEED), np.float64).T
    matrix = matrix * np.sqrt(length)
    row, column = np.indices((length, length))
    parity = np.vectorize(lambda bits: bits.bit_count() % 2)((row & column).astype(object))
    np.testing.assert_allclose(matrix, (1 - 2 * parity.astype(int)) * matrix[0], atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix[0]), 1, atol=1e-6)
    back = jax.vmap(unrotate, (0, None))(jnp.asarray(matrix.T / np.sqrt(length)), SEED)
    np.testing.assert_allclose(back, eye, atol=1e-6)


@pytest.mark.parametrize("shape", [(1 << 21,), (3, 1 << 15), (2, 3, 128)])
def test_rotation_keeps_norms_and_inverts(shape):
    x = normal(shape)
    r = rotate(x, SEED)
    norms = np.linalg.norm(x.astype(np.float64), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(r, np.float64), axis=-1), norms, rtol=1e-6)
    back = np.asarray(unrotate(r, SEED))
    # Every factor of up to 128 terms rounds once per term, in proportion to the piece's norm.
    assert np.sqrt(np.mean((back - x) ** 2)) < 1e-6
    assert np.max(np.abs(back - x)) < 1e-5


def test_rotated_data_is_nearly_normal():
    x = jnp.exp(normal((1, SIZE))) * normal((1, SIZE), 1000)
    z = np.asarray(rotate(thc.standardize(x, thc.scale_of(x)), SEED), np.float64)
    assert np.mean((x / np.std(x)) ** 4) > 50
    # Deviations expected of 2^17 true normal numbers: .0039, .0028 (the norm is fixed), .0135.
    assert abs(np.mean(z)) < 0.015
    assert np.mean(z**2) == pytest.approx(1, abs=1e-5)
    assert np.mean(z**4) == pytest.approx(3, abs=0.06)
    for p in (1 / 2, 1 / 32, 1 / 1024):
        outside = np.mean(np.abs(z) > thc.clip_threshold(p))
        assert abs(outside - p) < 5 * np.sqrt(p / SIZE)


def test_signs_are_fair_and_differ_between_pieces_and_seeds():
    # H sends the first unit vector to ones, so that unrotate shows the signs.
    first = jnp.zeros((16, 4096)).at[:, 0].set(1.0)

    def signs(*seed):
        return np.sign(np.asarray(unrotate(first, np.array(seed, np.uint32))))

    one, other = signs(3, 4), signs(3, 5)
    flat = one.reshape(-1)
    assert set(np.unique(flat)) == {-1, 1}
    for lag in (0, 1, 2, 31, 32, 64, 4096):
        correlation = np.mean(flat[lag:] * flat[: flat.size - lag]) if lag else np.mean(flat)
        assert abs(correlation) < 5 / np.sqrt(flat.size - lag)
    assert abs(np.mean(one * other)) < 5 / np.sqrt(flat.size)


@pytest.mark.parametrize(
    ("size", "piece_size", "shape"),
    [
        (1 << 17, 1 << 17, (1, 1 << 17)),
        (1 << 20, 1 << 17, (8, 1 << 17)),
        ((1 << 17) + 1, 1 << 17, (17, 1 << 13)),
        (1000, 1 << 17, (1, 1024)),
        (1500, 1 << 17, (2, 1024)),
        (100, 64, (2, 64)),
        (1, 1 << 17, (1, 1)),
    ],
)
def test_pieces(size, piece_size, shape):
    x = jnp.asarray(normal((size,)))
    pieces = hadamard.cut(x, piece_size=piece_size)
    assert pieces.shape == shape == hadamard.piece_shape(size, piece_size=piece_size)
    assert np.array_equal(hadamard.join(pieces, size), x)
    assert not np.any(pieces.reshape(-1)[size:])


def test_rotation_refuses_lengths_that_are_no_powers_of_two():
    with pytest.raises(ValueError, match="have 96 coordinates"):
        hadamard.rotate(jnp.zeros(96), jnp.asarray(SEED))
    with pytest.raises(ValueError, match="piece_size is 100"):
        hadamard.cut(jnp.zeros(96), piece_size=100)
