"""Weighted means: every worker counts by its weight, and what weighs nothing goes nowhere."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import CHEAP, EIGHT, daily, small
from jax.sharding import PartitionSpec as P
from workers import OnHost, auto_mesh, gradient

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.methods.metrics import vnmse

N, SIZE = 4, 3000
EXACT = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0)
KEY = jax.random.key(1)
WEIGHTS = np.array([1.0, 0.5, 0.0, 6.0], np.float32)


def tree():
    """Whole leaves and small ones, in three dtypes, every worker's own."""
    x = gradient(0, N, SIZE)
    return {"a": x, "b": x[:, :700].astype(jnp.bfloat16), "c": x[:, :3].astype(jnp.float16)}


@cache
def mapped(check_vma=True, **options):
    """jit of (tree, weights [N]) -> every worker's mean, with a leading axis."""

    def one(tree, weight):
        own = jax.tree.map(lambda x: x[0], tree)
        mean = dq.pmean(own, "data", weight=weight[0], key=KEY, **options)
        return jax.tree.map(lambda x: x[None], mean)

    out = P() if check_vma else P("data")
    specs = {"in_specs": P("data"), "out_specs": out, "check_vma": check_vma}
    return OnHost(jax.jit(jax.shard_map(one, mesh=auto_mesh(N), **specs)))


def expected(x, weights=WEIGHTS):
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    return np.where(weights[:, None] > 0, x * weights[:, None], 0).sum(0) / weights.sum()


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
@pytest.mark.parametrize("method", [EXACT, EIGHT], ids=["f32", "dynamiq"])
@pytest.mark.usefixtures("padding_is_free")
def test_it_is_the_sum_of_weight_times_leaf_over_the_sum_of_weights(check_vma, method):
    found = mapped(check_vma, compression=method)(tree(), jnp.asarray(WEIGHTS))
    for name, x in tree().items():
        error = float(vnmse(np.asarray(found[name][0], np.float64), expected(x)))
        most = {"a": 1e-12, "b": 2e-5, "c": 1e-6}[name]
        assert error < (most if method is EXACT else 5e-3)
    assert_same_bits(found, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), found))


def test_the_largest_weights_count_as_others():
    """1 / 3e38 is no normal number, and a compiler may multiply by it."""

    @jax.jit
    def run(x, weights):
        one = lambda x, weight: dq.pmean(x, "data", weight=weight)
        return jax.vmap(one, axis_name="data")(x, weights)

    x = np.arange(12, dtype=np.float32).reshape(N, 3)
    weights = np.array([3e38, 3e38, 0, 1.5e38], np.float32)
    found = np.asarray(run(x, weights))
    np.testing.assert_allclose(found, np.broadcast_to(expected(x, weights), x.shape), rtol=1e-6)


@pytest.mark.usefixtures("padding_is_free")
def test_what_weighs_nothing_may_be_nan():
    x = tree()
    bad = jax.tree.map(lambda leaf: leaf.at[2].set(jnp.nan), x)
    run = mapped(compression=CHEAP)
    assert_same_bits(run(x, jnp.asarray(WEIGHTS)), run(bad, jnp.asarray(WEIGHTS)))
    shown = run(bad, jnp.ones(N))
    assert np.isnan(np.asarray(shown["a"])).all()


@pytest.mark.parametrize(
    ("weights", "everywhere"),
    [([0.0] * N, 0), *(([1.0, bad, 0.0, 6.0], np.nan) for bad in (np.nan, np.inf, -1.0, -np.inf))],
)
def test_no_weight_gives_zeros_and_one_that_counts_nothing_nan(weights, everywhere):
    for leaf in jax.tree.leaves(mapped(compression=CHEAP)(tree(), jnp.array(weights))):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), everywhere)


@pytest.mark.parametrize("scale", [2.0**126, 2.0**-120])
def test_weights_whose_sum_f32_does_not_hold_weigh_the_same(scale):
    run, weights = mapped(compression=CHEAP), jnp.array([1.0, 0.5, 2.0, 1.0])
    assert_same_bits(run(tree(), weights), run(tree(), weights * scale))


def test_leaves_that_all_hold_alike_are_their_own_mean():
    @jax.jit
    @partial(jax.shard_map, mesh=auto_mesh(N), in_specs=(P(), P("data")), out_specs=P())
    def run(rate, weight):
        return dq.pmean({"rate": rate, "one": 1.5}, "data", weight=weight[0], compression=EXACT)

    found = run(jnp.float32(0.3), jnp.asarray(WEIGHTS))
    assert float(found["rate"]) == np.float32(0.3) and float(found["one"]) == 1.5


def test_memory_keeps_what_was_not_sent():
    """The memory of a worker that weighs nothing is sent later, not lost."""
    method = small(dq.ErrorFeedback(dq.contrib.OmniReduce(density=0.5, block_size=64)))
    x = gradient(3, N, 1024)
    state = as_compression(method).init_state(x[0], N, stacked=True)

    def step(x, state, weight):
        found = dq.reduce(x, "data", compression=method, state=state, weight=weight)
        return found.tree, found.state

    run = jax.jit(jax.vmap(step, axis_name="data"))
    mean, after = run(x, state, jnp.asarray(WEIGHTS))
    residual = np.asarray(jax.tree.leaves(after)[0], np.float64)
    delivered = np.asarray(mean[0], np.float64) * N
    inputs = np.asarray(x, np.float64) * (WEIGHTS * N / WEIGHTS.sum())[:, None]
    np.testing.assert_allclose(delivered + residual.sum(0), inputs.sum(0), rtol=0.02, atol=0.05)
    assert np.all(residual[2] == 0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weight": jnp.ones(3)}, r"weight has shape \(3,\)"),
        ({"weight": 1.0, "op": "sum"}, "weight goes with op='mean', and op='sum'"),
        ({"weight": 1.0, "tree": {"n": jnp.arange(4)}}, r"leaf \['n'\] is int32"),
    ],
)
def test_what_has_no_weighted_mean_is_refused(options, complaint):
    options = {"tree": gradient(0, 1, 64)[0]} | options

    def run(x):
        return dq.reduce(axis_name="data", **options).tree

    with pytest.raises(ValueError, match=complaint):
        jax.vmap(run, axis_name="data")(jnp.zeros(N))
