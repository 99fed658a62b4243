"""`phases`: functions run round by round, and give what they give at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, auto_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.training.phases import Progress, cut

N = 4
TABLE = np.arange(5, dtype=np.float32)


def trace(function, *args):
    return cut(*jax.make_jaxpr(function, return_shape=True)(*args))


def chained(x, y):
    """Three collectives, two of which wait for others; one result needs none, one no argument."""
    total = lax.psum(x * TABLE, "data")
    largest = lax.pmax(total.sum() + y, "data")
    moved = lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])
    return {"a": largest * x + moved, "b": 2 * y, "c": 3.0}


def in_calls(x, y):
    """Collectives within jit, checkpoint and functions with rules of their own."""

    @jax.custom_jvp
    def total(x):
        return lax.psum(x, "data")

    total.defjvp(lambda primals, tangents: (total(*primals), tangents[0]))
    twice = jax.jit(lambda x: total(x) + TABLE)
    return jax.checkpoint(lambda x: twice(twice(x)))(x) + lax.pmax(y, "data")


def in_a_loop(x, y):
    """A loop with collectives is one of them."""
    return lax.fori_loop(0, 3, lambda i, x: lax.psum(x, "data") / N + y, x) + 1


def called_twice(x, y):
    """JAX traces a jitted function once: its equations are the same objects in both calls."""
    total = jax.jit(lambda x: lax.psum(x, "data") + 1)
    return total(x) * total(2 * x + y)


def rounds(function, x, y):
    """The result and how many rounds it took."""
    progress = Progress.start(trace(function, x, y), x, y)
    progress.compute()
    count = 0
    while not progress.done:
        progress.exchange()
        progress.compute()
        count += 1
    return progress.result, count


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("function", "expected"),
    [(chained, 2), (in_calls, 2), (in_a_loop, 1), (called_twice, 1), (lambda x, y: x - y, 0)],
)
def test_a_function_in_rounds_gives_what_it_gives_at_once(function, expected, check_vma):
    x = jax.random.normal(jax.random.key(0), (N, 5))
    y = jnp.arange(N, dtype=jnp.float32)[:, None]
    counts = []

    def run(x, y):
        if function is in_a_loop:  # the carry of a loop varies from the start
            x = x * 1
        found, count = rounds(function, x[0], y[0, 0])
        counts.append(count)
        pairs = zip(*map(jax.tree.leaves, (found, function(x[0], y[0, 0]))), strict=True)
        return [jnp.stack([a * jnp.ones(5), b * jnp.ones(5)]) + 0 * x for a, b in pairs]

    mapped = jax.shard_map(
        run, mesh=auto_mesh(N), in_specs=P("data"), out_specs=P(None, "data"), check_vma=check_vma
    )
    for pair in jax.tree.leaves(jax.jit(mapped)(x, y)):
        np.testing.assert_array_equal(pair[0], pair[1])
        assert np.any(np.asarray(pair) != 0)
    assert set(counts) == {expected}


@pytest.mark.parametrize(
    ("topology", "count"),
    [(dq.Direct(), 3), (dq.Ring(unroll_up_to=N), N + 1), (dq.Butterfly(), 4)],
    ids=["direct", "ring", "butterfly"],
)
def test_rounds_of_an_all_reduce(topology, count):
    """The statistics, every hop, and the sums."""
    x = jax.random.normal(jax.random.key(0), (N, 2048))
    reduce = partial(dq.psum, axis_name="data", method=CHEAP, topology=topology)

    def both(x):
        found, rounds_taken = rounds(lambda x, y: reduce(x), x, x[0])
        assert rounds_taken == count
        return found, reduce(x)

    found, expected = jax.jit(jax.vmap(both, axis_name="data"))(x)
    np.testing.assert_array_equal(found, expected)


def test_runs_of_one_function_share_what_they_compute():
    """Each further run adds calls alone, whatever is computed between its collectives."""

    def function(x):
        for _ in range(2):
            x = lax.psum(jnp.tanh(jnp.sin(jnp.cos(x + 1) * 2) - 3), "data")
        return jnp.exp(jnp.tanh(x / 2) + 1)

    def lines(runs):
        def several(x):
            traced = trace(function, x)
            for _ in range(runs):
                progress = Progress.start(traced, x)
                progress.compute()
                while not progress.done:
                    progress.exchange()
                    progress.compute()
                x = progress.result
            return x

        return str(jax.make_jaxpr(several, axis_env=[("data", N)])(jnp.ones(3))).count("\n")

    calls, sums = 3, 2
    assert lines(9) - lines(1) <= 8 * (calls + sums)


def test_a_primitive_that_is_not_known_is_one_round_and_said_so():
    def function(x, y):
        def total(_, x):
            return lax.psum(lax.psum(x, "data"), "data")

        return jax.custom_derivatives.linear_call(total, lambda _, t: t, (), x) + y

    counts = []
    one = lambda x: counts.append(rounds(function, x, x)[1])
    with pytest.warns(UserWarning, match="primitive 'linear_call' has collectives.* one round"):
        jax.make_jaxpr(one, axis_env=[("data", N)])(jnp.ones(3))
    assert counts == [1]
