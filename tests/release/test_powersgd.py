"""PowerSGD end to end: what a low rank keeps, what the iteration finds, what memory remembers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    first_state,
    relative_error,
    small,
    stepper,
    wire_bits,
)

import dynamiq_jax as dq
from dynamiq_jax.comparators.powersgd import orthonormal
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(0)


def PLAIN(**options):
    """The method without memory, however small a leaf is."""
    return small(dq.comparators.PowerSGD(**options))


def PowerSGD(**options):
    """Error feedback around it."""
    return small(dq.ErrorFeedback(dq.comparators.PowerSGD(**options)))


EXACT = functools.partial(PowerSGD, wire="f32")


def draw(seed, n, shape=(60, 33), decay=0.5):
    """f32[n, *shape]: singular values of the sum that fall by ``decay``, distinct workers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, *shape))
    u, _, v = np.linalg.svd(x.sum(axis=0), full_matrices=False)
    total = (u * decay ** np.arange(u.shape[1])) @ v
    return jnp.asarray(x - x.mean(axis=0) + total / n, jnp.float32)


def of_rank(rank, n, shape=(60, 33), seed=0):
    """f32[n, *shape] of distinct workers, whose sum has that rank."""
    rng = np.random.default_rng(seed)
    rows = int(np.prod(shape[:-1]))
    total = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, shape[-1]))
    x = rng.standard_normal((n, *shape))
    return jnp.asarray(x - x.mean(axis=0) + total.reshape(shape) / n, jnp.float32)


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


def tail(x, rank):
    """The least error that a matrix of this rank can have."""
    values = np.linalg.svd(total_of(x), compute_uv=False) ** 2
    return values[rank:].sum() / values.sum()


def steps_of(method, x, count, mean=False):
    """Results of ``count`` steps on the same gradients, and the state after them."""
    state, run, found = first_state(method, x, len(x)), stepper(method, mean=mean), []
    for _ in range(count):
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        found.append(np.asarray(result[0], np.float64))
    return found, state


@pytest.mark.parametrize("n", range(2, 9))
def test_a_sum_of_low_rank_is_found_at_once(n):
    """Whatever the number of workers, and however large their differences.

    With bf16 once the factor is warm: one at random has P's columns nearly parallel.
    """
    rank, shape = 1 + n % 4, [(60, 33), (4, 11, 25), (17, 90)][n % 3]
    x = of_rank(rank, n, shape)
    (once, again), _ = steps_of(EXACT(rank=rank), x, 2)
    assert relative_error(once, total_of(x)) < 1e-9
    assert relative_error(again, total_of(x)) < 1e-9
    (low, warm), _ = steps_of(PLAIN(rank=rank), x, 2)
    assert 1e-7 < relative_error(warm, total_of(x)) < 1e-3
    assert relative_error(low, total_of(x)) < 0.1


def test_a_rank_above_that_of_the_factors_is_not_found():
    x = of_rank(3, 2)
    found, _ = steps_of(EXACT(rank=2), x, 1)
    assert relative_error(found[0], total_of(x)) > 0.99 * tail(x, 2) > 0.01


def test_warm_starts_find_the_best_matrix_of_the_rank():
    """Which a single step from a factor at random does not."""
    x = draw(1, 4, decay=0.7)
    found, _ = steps_of(PLAIN(rank=3, wire="f32"), x, 12)
    first, *_, last = (relative_error(result, total_of(x)) for result in found)
    best = tail(x, 3)
    assert first > 1.2 * best
    assert best * (1 - 1e-5) < last < 1.01 * best


def test_identical_and_opposite_workers():
    own = np.asarray(draw(2, 1)[0])
    same, _ = steps_of(EXACT(rank=4), jnp.asarray([own] * 5), 1)
    alone, _ = steps_of(EXACT(rank=4), jnp.asarray([own, 0 * own]), 1)
    np.testing.assert_allclose(same[0], 5 * alone[0], rtol=1e-3, atol=1e-4)
    (none,), state = steps_of(EXACT(rank=4), jnp.asarray([own, -own]), 1)
    np.testing.assert_array_equal(none, 0)
    np.testing.assert_allclose(state[0].residual[0].reshape(own.shape), own, rtol=1e-5, atol=1e-6)


def test_workers_of_disjoint_rows_are_summed():
    x = np.zeros((3, 60, 33), np.float32)
    for worker in range(3):
        x[worker, worker::3] = of_rank(1, 1, (20, 33), seed=worker)[0]
    found, _ = steps_of(EXACT(rank=3), jnp.asarray(x), 1)
    assert relative_error(found[0], total_of(x)) < 1e-9


def test_a_rank_that_was_missing_comes_back():
    """After gradients of rank 1 the other columns of the factor still look elsewhere."""
    method = PLAIN(rank=3, wire="f32")
    thin, x = of_rank(1, 2, seed=3), of_rank(3, 2, seed=4)
    _, state = steps_of(method, thin, 5)
    factor = np.asarray(state[0].factor[0], np.float64)
    np.testing.assert_allclose(factor.T @ factor, np.eye(3), atol=1e-5)
    found, _ = stepper(method)(x, KEY, state)
    assert relative_error(found[0], total_of(x)) < 1e-8


def test_what_a_message_rounds_off_is_in_memory():
    """One worker alone sends, so that sums to bf16 round nothing."""
    x = draw(10, 3).at[1:].set(0)
    found, state = steps_of(PowerSGD(rank=3), x, 3)
    gap = sum(found) + total_of(state[0].residual).reshape(x.shape[1:]) - 3 * total_of(x)
    assert np.max(np.abs(gap)) < 2e-6 * np.max(np.abs(np.asarray(x)))


def test_without_a_state_the_key_decides_where_to_start():
    method, x = PLAIN(rank=2, wire="f32"), draw(8, 3)

    def one(x, key):
        return dq.psum(x, "data", method=method, key=key)

    run = jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))
    first, again, other = (np.asarray(run(x, jax.random.key(i))) for i in (1, 1, 2))
    assert_replicas_equal(first)
    assert_same_bits(first, again)
    assert np.mean(first != other) > 0.9
    assert relative_error(other[0], total_of(x)) < 0.7
    plain = jax.vmap(lambda x: dq.psum(x, "data", method=method), axis_name="data")(x)
    assert_replicas_equal(np.asarray(plain))
    assert relative_error(plain[0], total_of(x)) < 0.7
    with pytest.raises(ValueError, match="needs a state"):
        jax.eval_shape(
            lambda: jax.vmap(lambda x: dq.psum(x, "d", method=EXACT()), axis_name="d")(x)
        )


def test_value_and_grad_takes_its_state_and_leaves_vectors_exact():
    method, mesh, n = EXACT(rank=2), auto_mesh(3), 3
    params = {"w": jnp.zeros((60, 33)), "b": jnp.zeros(33)}
    x = {"w": of_rank(2, n), "b": jnp.asarray(np.arange(99.0).reshape(3, 33), jnp.float32)}

    def loss(params, x):
        return sum(jnp.sum(params[name] * x[name][0]) for name in params)

    step = dq.value_and_grad(loss, mesh=mesh, axis_name="data", method=method)
    state = as_compression(method).init_state(params, n, stacked=True)
    _, (mean, after, _) = step(params, x, state=state)
    assert relative_error(n * mean["w"], total_of(x["w"])) < 1e-8
    np.testing.assert_array_equal(mean["b"], np.mean(x["b"], axis=0))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_columns_become_orthonormal_and_dependent_ones_zero_or_others():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 5)).astype(np.float32)
    a[:, 1] = 0
    a[:, 3] = 1e-4 * a[:, 2] - 3 * a[:, 0]  # of the span of those before it
    a[:, 4] *= 1e-25
    found = np.asarray(orthonormal(jnp.asarray(a)), np.float64)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 0, 1, 0, 1]), atol=2e-6)
    for column in (0, 2, 4):
        own = a[:, column] / np.max(np.abs(a[:, column]))
        left = own - found @ (found.T @ own)
        assert np.linalg.norm(left) < 1e-5 * np.linalg.norm(own)
    other = rng.standard_normal((50, 5)).astype(np.float32)
    found = np.asarray(orthonormal(jnp.asarray(a), jnp.asarray(other)), np.float64)
    np.testing.assert_allclose(found.T @ found, np.eye(5), atol=2e-6)


def test_wire_bits_and_memory():
    leaf, n = jax.ShapeDtypeStruct((1024, 4096), jnp.float32), 8
    told = dq.explain(leaf, n, method=dq.comparators.PowerSGD(), verbose=False)
    assert told.bits_per_coord == pytest.approx(16 * 4 * (1 / 1024 + 1 / 4096))
    wide = wire_bits(dq.comparators.PowerSGD(wire="f32", rank=8))(leaf, n)
    assert wide == 4 * 2 * (n - 1) / n * 16 * 4 * (1024 + 4096)
    state = jax.eval_shape(lambda: as_compression(PowerSGD()).init_state(leaf, n))
    assert sum(4 * s.size for s in jax.tree.leaves(state)) == 4 * 1024 * 4096 + 4 * 4 * 4096
    routes = {(7, 5000): "matrix of 7 x 5000 < min_side 8", (9999,): "not a matrix"}
    for shape, why in routes.items():
        told = dq.explain(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            n,
            method=dq.comparators.PowerSGD(),
            verbose=False,
        )
        assert told.rows[0].route == f"exact: {why}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank=0 must be a positive integer"),
        ({"rank": 2.0}, "rank=2.0; expected int, such as rank=4"),
        ({"wire": "f16"}, "wire='f16'; expected one of"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.PowerSGD(**fields)


def test_zeros_stay_zeros_and_the_iteration_starts_again_after_them():
    """A factor of zeros would stay one for ever."""
    method, x = EXACT(rank=2), of_rank(2, 3)
    state, run = first_state(method, x, 3), stepper(method)
    for _ in range(2):
        found, state = run(0 * x, KEY, state)
        np.testing.assert_array_equal(found, 0)
    found, _ = run(x, KEY, state)
    assert relative_error(found[0], total_of(x)) < 1e-9
