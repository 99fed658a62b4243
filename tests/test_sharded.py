"""`psum_scatter` and `all_gather` against JAX's own: shapes, sums, noise, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits, sum_error
from cases import METHODS, TOPOLOGIES, daily, over, small
from jax import lax
from workers import OnHost, anchored, gradient

import dynamiq_jax as dq

DEFAULT = METHODS["default"]
EIGHT_BITS = small(dq.DynamiQ(widths=(8,), bits=9, format=dq.Format(levels="piecewise")))
ROUND_OFF = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@functools.cache
def run_of(collective, method, topology=None, **options):
    """jit of (tree with leading worker axis, key) -> what every worker gets."""
    options = {"tiled": True, "compression": over(topology, method)} | options

    def one(tree, key):
        return collective(tree, "data", key=key, **options)

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data")))


scatter = functools.partial(run_of, dq.psum_scatter)
gather = functools.partial(run_of, dq.all_gather)


def native(collective, tree, **options):
    """The tree after a collective of `jax.lax`."""
    mapped = jax.vmap(lambda tree: collective(tree, "data", **options), axis_name="data")
    return jax.jit(mapped)(tree)


def normal(n, *shape, dtype="float32"):
    rng = np.random.default_rng(len(shape) + n)
    if dtype == "int32":
        return jnp.asarray(rng.integers(-50, 50, (n, *shape)), dtype)
    return jnp.asarray(rng.standard_normal((n, *shape)), dtype)


def close(trees, exact_trees, inputs, terms):
    """Compares with exact trees: dtypes, shapes, values to ``terms`` roundings; "b" is exact."""
    assert jax.tree.structure(trees) == jax.tree.structure(exact_trees)
    paths = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(trees)]
    for name, found, expected, own in zip(
        paths, *map(jax.tree.leaves, (trees, exact_trees, inputs)), strict=True
    ):
        assert found.dtype == expected.dtype == own.dtype
        assert found.shape == expected.shape
        if found.dtype == jnp.int32 or found.size == 0 or name == "b":
            assert_same_bits(np.asarray(found), np.asarray(expected))
            continue
        most = np.max(np.abs(own).astype(np.float64))
        step = 2 / 150 * 1.01 * terms * most + 2 * ROUND_OFF[found.dtype.name] * terms * most
        error = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
        assert np.max(error) < terms * step
        assert np.any(error > 0)


SLICED = [(dimension, tiled) for tiled in (True, False) for dimension in (0, 1)]


@pytest.mark.parametrize(("dimension", "tiled"), daily(SLICED, [(1, True)]))
@pytest.mark.usefixtures("padding_is_free")
def test_slices_have_the_shapes_and_values_of_lax(dimension, tiled):
    """Leaves of all kinds; no slice is a multiple of anything."""
    length, other = (12, 7) if tiled else (4, 9)

    def own(*rest, dtype="float32"):
        pair = (other, length) if dimension else (length, other)
        return normal(4, *pair, *rest, dtype=dtype)

    tree = {
        "w": own(31),
        "v": [own(5, 3, dtype="bfloat16"), own(6, dtype="float16")],
        "b": own(),  # too small to compress
        "i": own(3, dtype="int32"),
        "empty": own(0),
        "none": None,
    }
    options = {"scatter_dimension": dimension, "tiled": tiled}
    method = dq.Compression(EIGHT_BITS.method, min_leaf_size=200, min_bucket_size=200)
    found = scatter(method, dq.Direct(), **options)(tree, jax.random.key(0))
    close(found, native(lax.psum_scatter, tree, **options), tree, terms=4)


GATHERED = [(0, True), (1, True), (-1, True), (0, False), (2, False), (-1, False)]


@pytest.mark.parametrize(("axis", "tiled"), daily(GATHERED, [(1, True), (0, False)]))
@pytest.mark.usefixtures("padding_is_free")
def test_gathered_leaves_have_the_shapes_and_values_of_lax(axis, tiled):
    n = 3
    method = dq.Compression(EIGHT_BITS.method, min_leaf_size=600, min_bucket_size=600)
    tree = {
        "w": normal(n, 5, 61),
        "v": [normal(n, 7, 30, dtype="bfloat16"), normal(n, 2, 101, dtype="float16")],
        "b": normal(n, 3, 9),  # with the others' not yet 600 in all
        "i": normal(n, 3, 70, dtype="int32"),
        "empty": [normal(n, 3, 0), normal(n, 0, 3)],
    }
    options = {"axis": axis, "tiled": tiled}
    found = gather(method, **options)(tree, jax.random.key(0))
    assert_replicas_equal(found)
    close(found, native(lax.all_gather, tree, **options), tree, terms=1)


N, SHARD = 4, 2 * 8 * 256 - 77
SIZE = N * SHARD
OF_FOUR = ["ring, two streams", "butterfly", "direct"]


@pytest.mark.parametrize("name", daily(OF_FOUR, ["butterfly"]))
def test_finished_sums_are_not_rounded_again(name):
    x, run = anchored(8, "piecewise", N), scatter(EIGHT_BITS, TOPOLOGIES[name][0])
    found = np.asarray(run(x, jax.random.key(0)))
    exact = np.sum(np.asarray(x, np.float64), axis=0)
    np.testing.assert_array_equal(found.astype(np.float64), exact.reshape(N, -1))
    # An owner's own share is not encoded at all: alone it comes back whatever it is.
    rough = gradient(5, N, x.shape[1])
    owner = jnp.arange(x.shape[1]) // (x.shape[1] // N)
    alone = jnp.where(owner[None] == jnp.arange(N)[:, None], rough, 0)
    found = np.asarray(run(alone, jax.random.key(0)))
    assert_same_bits(found.reshape(-1), np.asarray(jnp.sum(alone, axis=0)))
    found = np.asarray(run(rough, jax.random.key(0)))
    assert 1e-7 < sum_error(found.reshape(-1), rough) < 5e-5 * (N - 1)


GATHER = "all_gather"


@pytest.mark.parametrize("name", daily([*OF_FOUR, GATHER], ["direct", GATHER]))
def test_slices_and_shards_at_five_bits(name):
    """Unequal ones each keep to their budget and error; keys decide; bad ones stay alone."""
    loud = jnp.array([1.0, 1e-6, 1e6, 1e-3])
    if name == GATHER:
        x, gathered = gradient(0, N, SHARD) * loud[:, None], gather(DEFAULT, tiled=False)
        exact, run = np.asarray(x, np.float64), lambda *args: gathered(*args)[0]
        bad = x.at[0, 3 * 256].set(jnp.nan).at[1, 5].set(jnp.inf).at[N - 1, -1].set(-jnp.inf)
    else:
        run = scatter(DEFAULT, TOPOLOGIES[name][0])
        x = gradient(0, N, SIZE) * jnp.repeat(loud, SHARD)[None]
        exact = np.sum(np.asarray(x, np.float64), axis=0).reshape(N, SHARD)
        bad = x.at[1, 3 * 256].set(jnp.nan).at[3, SHARD + 5].set(jnp.inf).at[2, -1].set(-jnp.inf)
    first, again = (run(x, jax.random.key(1)) for _ in range(2))
    assert_same_bits(first, again)
    error = np.sum((first - exact) ** 2, axis=1) / np.sum(exact**2, axis=1)
    assert np.all((error > 1e-4) & (error < 0.05))
    assert np.mean(run(x, jax.random.key(2)) != first) > 0.3
    by_data, again = (run(x, None) for _ in range(2))
    assert_same_bits(by_data, again)
    assert np.mean(by_data != first) > 0.3
    sick = np.zeros((N, SHARD), bool)
    sick[0, 3 * 256 : 4 * 256] = sick[1, :256] = sick[N - 1, (SHARD - 1) // 256 * 256 :] = True
    np.testing.assert_array_equal(np.isfinite(run(bad, jax.random.key(1))), ~sick)
    np.testing.assert_array_equal(run(0 * x, jax.random.key(1)), 0.0)


def test_workers_round_by_noise_of_their_own():
    """Errors of equal gradients cancel; by one noise for all they would add up."""
    x, run = gradient(0, N, SIZE), scatter(DEFAULT, dq.Direct())
    pairs = [(run(own, jax.random.key(1)), own) for own in (x, np.tile(x[:1], (N, 1)))]
    unlike, equal = (sum_error(found.reshape(-1), own) for found, own in pairs)
    assert 0 < equal < 0.4 * unlike
    shards = gather(DEFAULT, tiled=False)(jnp.tile(x[:1, :SHARD], (3, 1)), jax.random.key(1))
    assert_replicas_equal(shards)
    assert all(np.mean(shards[0, i] != shards[0, i + 1]) > 0.3 for i in range(2))


def test_one_worker_keeps_its_bits():
    low = normal(1, 6, 900, dtype="bfloat16")
    tree = {"w": normal(1, 70, 3), "low": low, "i": np.ones((1, 2), np.float32)}
    key = jax.random.key(0)
    assert_same_bits(scatter(DEFAULT)(tree, key), tree)
    assert_same_bits(gather(DEFAULT)(tree, key), tree)
    one = jax.tree.map(lambda x: x[:, None], tree)
    assert_same_bits(scatter(DEFAULT, tiled=False)(one, key), tree)
    assert_same_bits(gather(DEFAULT, tiled=False)(tree, key), one)


def traced(collective, *shapes, n=4, tiled=True, **options):
    options["tiled"] = tiled
    trees = [jax.ShapeDtypeStruct((n, *shape), jnp.float32) for shape in shapes]
    mapped = jax.vmap(lambda tree: collective(tree, "data", **options), axis_name="data")
    return jax.eval_shape(mapped, {f"leaf {i}": tree for i, tree in enumerate(trees)})


REFUSED = [
    (dq.psum_scatter, (8, 10), {"scatter_dimension": 1}, "'leaf 1'] has 10 entries|=1|4 workers"),
    (dq.psum_scatter, (9,), {}, "has 9 entries|not a multiple of the 4 workers|pad it|dq.psum"),
    (dq.psum_scatter, (8,), {"scatter_dimension": 1}, "dimension=1|shape (8,)|pass an axis"),
    (dq.psum_scatter, (8,), {"scatter_dimension": -2}, "scatter_dimension=-2|shape (8,)"),
    (dq.psum_scatter, (), {}, "scatter_dimension=0|shape ()|for such leaves alone"),
    (dq.psum_scatter, (8,), {"tiled": False}, "has 8 entries|tiled=False|4 workers|tiled=True"),
    (
        dq.all_gather,
        (),
        {},
        "axis=0: leaf ['leaf 1'] has shape ()|every leaf has|such leaves alone",
    ),
    (dq.all_gather, (3,), {"axis": 1}, "axis=1: leaf ['leaf 1'] has shape (3,)"),
    (dq.all_gather, (3,), {"axis": -2}, "axis=-2: leaf ['leaf 1'] has shape (3,)"),
    (dq.all_gather, (3,), {"axis": 2, "tiled": False}, "axis=2: leaf ['leaf 1'] has shape (3,)"),
]
"""Collectives, the shape of a leaf, options, and what the error says in this order."""


@pytest.mark.parametrize(("collective", "shape", "options", "texts"), REFUSED)
def test_axes_that_are_not_there_or_do_not_divide(collective, shape, options, texts):
    good = (4, 4, 4) if not options.get("tiled", True) else (8, 8, 8)
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, texts.split("|")))):
        traced(collective, good, shape, **options)


def test_a_new_axis_of_a_scalar_is_no_problem():
    assert traced(dq.all_gather, (), tiled=False)["leaf 0"].shape == (4, 4)
