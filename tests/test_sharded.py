"""`psum_scatter` and `all_gather` against JAX's own: shapes, sums, noise, derivatives, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    METHODS,
    TOPOLOGIES,
    TWO_WIDTHS,
    OnHost,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    bias,
    daily,
    gradient,
    plan_is_exact,
    small,
    sum_error,
)
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_exact_sums import anchored

import dynamiq_jax as dq

DEFAULT = METHODS["default"]
EIGHT_BITS = small(dq.DynamiQ(widths=(8,), bits=9, format=dq.Format(levels="piecewise")))
ROUND_OFF = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@functools.cache
def scatter(method, topology=None, *, tiled=True, **options):
    """jit of (tree with leading worker axis, key) -> every worker's slices."""
    options |= {"method": method, "topology": topology, "tiled": tiled}

    def one(tree, key):
        return dq.psum_scatter(tree, "data", key=key, **options)

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data")))


@functools.cache
def gather(method, *, tiled=True, **options):
    """jit of (tree with leading worker axis, key) -> every worker's copy of all shards."""
    options |= {"method": method, "tiled": tiled}

    def one(tree, key):
        return dq.all_gather(tree, "data", key=key, **options)

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data")))


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


@pytest.mark.parametrize("dimension", daily([0, 1], [1]))
@pytest.mark.parametrize("tiled", daily([True, False], [True]))
def test_slices_have_the_shapes_and_values_of_lax(dimension, tiled):
    """Leaves of all kinds; no slice is a multiple of anything."""
    n = 4
    method = dq.Compression(EIGHT_BITS.method, min_leaf_size=200, min_bucket_size=200)
    length, other = (12, 7) if tiled else (4, 9)

    def shape(*rest):
        pair = [other, other]
        pair[dimension] = length
        return (*pair, *rest)

    tree = {
        "w": normal(n, *shape(31)),
        "v": [normal(n, *shape(5, 3), dtype="bfloat16"), normal(n, *shape(6), dtype="float16")],
        "b": normal(n, *shape()),  # too small to compress
        "i": normal(n, *shape(3), dtype="int32"),
        "empty": normal(n, *shape(0)),
        "none": None,
    }
    options = {"scatter_dimension": dimension, "tiled": tiled}
    found = scatter(method, dq.Direct(), **options)(tree, jax.random.key(0))
    close(found, native(lax.psum_scatter, tree, **options), tree, terms=n)


GATHERED = [(0, True), (1, True), (-1, True), (0, False), (2, False), (-1, False)]


@pytest.mark.parametrize(("axis", "tiled"), daily(GATHERED, [(1, True), (0, False)]))
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


N, SIZE = 4, 4 * (2 * 8 * 256 - 77)
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


@pytest.mark.parametrize("name", daily(OF_FOUR, ["direct"]))
def test_slices_at_five_bits(name):
    """Unequal slices each keep to their budget and error; keys decide; bad ones stay alone."""
    x, run = gradient(0, N, SIZE), scatter(DEFAULT, TOPOLOGIES[name][0])
    part = SIZE // N
    loud = jnp.repeat(jnp.array([1.0, 1e-6, 1e6, 1e-3]), part)
    x = x * loud[None]
    first, again = (np.asarray(run(x, jax.random.key(1))) for _ in range(2))
    assert first.shape == (N, part)
    assert_same_bits(first, again)
    exact = np.sum(np.asarray(x, np.float64), axis=0).reshape(N, part)
    error = np.sum((first - exact) ** 2, axis=1) / np.sum(exact**2, axis=1)
    assert np.all(error > 1e-4)
    assert np.all(error < 0.05)
    assert np.mean(np.asarray(run(x, jax.random.key(2))) != first) > 0.3
    by_data, again = (np.asarray(run(x, None)) for _ in range(2))
    assert_same_bits(by_data, again)
    assert np.mean(by_data != first) > 0.3
    bad = x.at[1, 3 * 256].set(jnp.nan).at[3, part + 5].set(jnp.inf).at[2, SIZE - 1].set(-jnp.inf)
    found = np.asarray(run(bad, jax.random.key(1)))
    sick = np.zeros((N, part), bool)
    sick[0, 3 * 256 : 4 * 256] = sick[1, :256] = sick[N - 1, (part - 1) // 256 * 256 :] = True
    np.testing.assert_array_equal(np.isfinite(found), ~sick)


def test_workers_round_by_noise_of_their_own():
    """Errors of equal gradients cancel; by one noise for all they would add up."""
    x, run = gradient(0, N, SIZE), scatter(DEFAULT, dq.Direct())
    pairs = [(run(own, jax.random.key(1)), own) for own in (x, np.tile(x[:1], (N, 1)))]
    unlike, equal = (sum_error(found.reshape(-1), own) for found, own in pairs)
    assert 0 < equal < 0.4 * unlike


def test_slices_are_unbiased():
    """C = 2048, N = 100; the variance is that of three roundings. See test_psum."""
    x, samples = gradient(0, N, SIZE), 100
    run = scatter(DEFAULT, dq.Direct())
    exact = np.sum(np.asarray(x, np.float64), axis=0)
    total, squared = np.zeros((2, SIZE))
    for key in jax.random.split(jax.random.key(3), samples):
        error = np.asarray(run(x, key)).reshape(-1) - exact
        total, squared = total + error, squared + error**2
    # Every slice has its own rest: blocks are halves of slices.
    padded = [np.pad(a.reshape(N, -1), ((0, 0), (0, 77))) for a in (total, squared, exact)]
    found = bias(*padded[:2], samples, padded[2], blocks=2 * N)
    assert found.worst_score() < 6
    assert abs(np.mean(found.spread) - 1) < 0.1


SHARD = 2 * 8 * 256 - 77


def test_gathered_shards_are_unbiased_and_the_same_everywhere():
    """With any rounding, since each is encoded once; also the own shard is as others see it."""
    n, samples = 3, 100
    x = gradient(0, n, SHARD) * jnp.array([[1.0], [1e-6], [1e6]])
    run = gather(DEFAULT, tiled=False)
    exact = np.asarray(x, np.float64)
    total, squared = np.zeros((2, n, SHARD))
    for key in jax.random.split(jax.random.key(3), samples):
        found = np.asarray(run(x, key))
        error = found[0] - exact
        total, squared = total + error, squared + error**2
    assert_replicas_equal(found)
    relative = np.sum(error**2, axis=1) / np.sum(exact**2, axis=1)
    assert np.all(relative > 1e-4)
    assert np.all(relative < 0.035)
    # The shard's first bytes decide nothing of another shard's noise.
    assert np.mean(error[0] / np.max(np.abs(error[0])) == error[1] / np.max(np.abs(error[1]))) < 0.1
    # Blocks of C = 2048 coordinates: 2% of a step score 0.02 sqrt(6 C N) = 22.
    padded = [np.pad(a, ((0, 0), (0, 77))) for a in (total, squared, exact)]
    found = bias(*padded[:2], samples, padded[2], blocks=2 * n)
    assert found.worst_score() < 6
    assert abs(np.mean(found.spread) - 1) < 0.1


def test_gathered_shards_follow_keys_and_stay_alone_if_bad():
    x, run = gradient(0, 3, SHARD), gather(DEFAULT, tiled=False)
    first, again = (np.asarray(run(x, jax.random.key(1))) for _ in range(2))
    assert_same_bits(first, again)
    assert np.mean(np.asarray(run(x, jax.random.key(2))) != first) > 0.3
    assert np.mean(np.asarray(run(x, None)) != first) > 0.3
    equal = np.asarray(run(jnp.tile(x[:1], (3, 1)), jax.random.key(1)))[0]  # noise by slice
    assert min(np.mean(equal[0] != equal[1]), np.mean(equal[1] != equal[2])) > 0.3
    bad = x.at[1, 300].set(jnp.nan).at[2, SHARD - 1].set(jnp.inf)
    found = np.asarray(run(bad, jax.random.key(1)))
    assert_replicas_equal(found)
    sick = np.zeros((3, SHARD), bool)
    sick[1, 256:512] = sick[2, (SHARD - 1) // 256 * 256 :] = True
    np.testing.assert_array_equal(np.isfinite(found[0]), ~sick)
    np.testing.assert_array_equal(np.asarray(run(0 * x, jax.random.key(1))), 0.0)


@pytest.mark.release
def test_shard_map_gives_the_bits_of_vmap():
    n, key = 4, jax.random.key(3)
    x = plan_is_exact(n, n * 3 * 8 * 256)
    shards = x[:, : 3 * 8 * 256 - 50].at[:, -206:].set(0.0)  # the last super-group is cut off
    topology = dq.Butterfly()

    def both(x, shard, key):
        scattered = dq.psum_scatter(
            x[0], "data", tiled=True, method=TWO_WIDTHS, topology=topology, key=key
        )
        gathered = dq.all_gather(shard[0], "data", tiled=True, method=TWO_WIDTHS, key=key)
        return scattered[None], gathered[None]

    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(both, mesh=auto_mesh(n), **specs)
    scattered, gathered = jax.jit(mapped)(x, shards, key)
    assert 1e-4 < sum_error(np.asarray(scattered).reshape(-1), x) < 0.1
    assert_same_bits(np.asarray(scattered), np.asarray(scatter(TWO_WIDTHS, topology)(x, key)))
    assert np.any(np.asarray(gathered[0]) != np.asarray(shards).reshape(-1))
    assert_same_bits(np.asarray(gathered), np.asarray(gather(TWO_WIDTHS)(shards, key)))


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


@pytest.mark.parametrize(
    ("shape", "options", "texts"),
    [
        ((8, 10), {"scatter_dimension": 1}, ["leaf ['leaf 1'] has 10 entries", "=1", "4 workers"]),
        ((9,), {}, ["has 9 entries", "not a multiple of the 4 workers", "pad it", "dq.psum"]),
        ((8,), {"scatter_dimension": 1}, ["scatter_dimension=1", "shape (8,)", "pass an axis"]),
        ((8,), {"scatter_dimension": -2}, ["scatter_dimension=-2", "shape (8,)"]),
        ((), {}, ["scatter_dimension=0", "shape ()", "for such leaves alone"]),
        ((8,), {"tiled": False}, ["has 8 entries", "tiled=False", "4 workers", "pass tiled=True"]),
    ],
)
def test_slices_that_do_not_divide(shape, options, texts):
    good = (4, 4, 4) if not options.get("tiled", True) else (8, 8)
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, texts))):
        traced(dq.psum_scatter, good, shape, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((), {}), ((3,), {"axis": 1}), ((3,), {"axis": -2}), ((3,), {"axis": 2, "tiled": False})],
)
def test_axes_that_are_not_there(shape, options):
    said = re.escape(f"axis={options.get('axis', 0)}: leaf ['leaf 1'] has shape {shape}")
    with pytest.raises(ValueError, match=f"(?s){said}.*every leaf has.*such leaves alone"):
        traced(dq.all_gather, (3, 3, 3), shape, **options)
    # A new axis of a scalar is no problem.
    assert traced(dq.all_gather, (), tiled=False)["leaf 0"].shape == (4, 4)


def test_a_leaf_that_does_not_vary_is_not_summed():
    def one(x):
        return dq.psum_scatter({"w": jnp.ones(2**19), "x": x}, "data", tiled=True)

    mapped = jax.shard_map(one, mesh=auto_mesh(), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"leaf \['w'\].*0 more do not vary over axis 'data'"):
        jax.eval_shape(mapped, jnp.ones(64))


@pytest.mark.release
def test_a_tuple_of_axes_counts_as_one():
    """Slices and shards are numbered row by row, on any map."""
    names, types = ("node", "gpu"), (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), names, devices=jax.devices()[:4], axis_types=types)
    x, key = anchored(8, "piecewise", 4), jax.random.key(0)

    def both(x, key):
        options = {"method": EIGHT_BITS, "key": key, "tiled": True}
        part = dq.psum_scatter(x, names, topology=dq.Direct(), **options)
        return part, dq.all_gather(part, names, **options)

    def one(x, key):
        return jax.tree.map(lambda y: y[None], both(x[0], key))

    specs = {"in_specs": (P(names), P()), "out_specs": P(names)}
    exact = np.sum(np.asarray(x, np.float64), axis=0)
    nested = jax.vmap(jax.vmap(both, (0, None), axis_name="gpu"), (0, None), axis_name="node")
    for found in (
        jax.jit(jax.shard_map(one, mesh=mesh, **specs))(x, key),
        jax.jit(nested)(x.reshape(2, 2, -1), key),
    ):
        part, whole = (np.asarray(y, np.float64).reshape(4, -1) for y in found)
        np.testing.assert_array_equal(part, exact.reshape(4, -1))
        np.testing.assert_array_equal(whole, np.broadcast_to(exact, whole.shape))
