"""Two levels of axes: the same bits on all workers and maps, the sum, and what is left exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_refused, assert_replicas_equal, assert_same_bits, sum_error
from cases import CHEAP, TWO_WIDTHS, daily, over, small
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import OnHost, gradient, mesh_of

import dynamiq_jax as dq

EIGHT_BITS = small(dq.DynamiQ(widths=(8,), bits=9, format=dq.Format(levels="piecewise")))
NAMES = ("pod", "node", "gpu")
SIZE = 4 * 8 * 8 * 256 - 100  # a few tiles for each chunk of each slice, and a rest


@functools.cache
def on_one_device(axes, method, topology):
    """jit of (tree with a leading axis of workers for each of the mapped ``axes``, key)."""

    def one(tree, key):
        return dq.psum(tree, NAMES[-axes:], compression=over(topology, method), key=key)

    mapped = one
    for name in reversed(NAMES[-axes:]):
        mapped = jax.vmap(mapped, (0, None), axis_name=name)
    return OnHost(jax.jit(mapped))


def on_a_mesh(sizes, method, topology, x, key):
    """Every device's own copy of the result of shard_map, which JAX takes for replicated."""
    axes = NAMES[-len(sizes) :]

    def one(x, key):
        x = x.reshape(x.shape[len(sizes) :])
        return dq.psum(x, axes, compression=over(topology, method), key=key)

    specs = {"mesh": mesh_of(*sizes, names=axes), "in_specs": (P(*axes), P()), "out_specs": P()}
    result = jax.jit(jax.shard_map(one, **specs))(x, key)
    return np.stack([shard.data for shard in result.addressable_shards])


def exact_within_nodes(sizes, size):
    """f32[*sizes, size]: sums over the inner axis have statistics that are exact in any order.

    All partial sums within a node are integers below 16 times the super-group's 2^k, exact in
    bf16. A node's sums are as many 1 as -1, 3 as -3, in an order of its own: their mean is 0, and
    up to four squared norms of 5 * 2^8 add up exactly in bf16.
    """
    rng = np.random.default_rng(0)
    *outer, inner = sizes
    rows = -(-size // 256)
    total = rng.permuted(np.tile([1.0, -1.0, 3.0, -3.0], (*outer, 1, rows, 64)), axis=-1)
    others = rng.integers(-2, 3, (*outer, inner - 1, rows, 256))
    first = total - others.sum(axis=len(outer), keepdims=True)
    x = np.concatenate([first, others], axis=len(outer)) * np.exp2(rng.integers(-6, 6, (rows, 1)))
    x[..., -1, :] = 0.0  # the last super-group is cut off
    return jnp.asarray(x.reshape(*sizes, -1)[..., :size], jnp.float32)


def flat(x, axes=2):
    """All workers along one axis."""
    return np.asarray(x).reshape(-1, *x.shape[axes:])


NATIVE = {
    "2 nodes of 4": ((2, 4), dq.Hierarchical(outer=dq.Butterfly(balance=0))),
    "4 nodes of 2": ((4, 2), dq.Hierarchical(outer=dq.Ring(balance=0))),
}
INSIDE = {
    "compressed inside, 2 of 2": ((2, 2), dq.Hierarchical(inner=dq.Direct(), outer=dq.Ring())),
    "compressed inside, 4 of 2": ((4, 2), dq.Hierarchical(inner=dq.Direct(), outer=dq.Butterfly())),
}


@pytest.mark.parametrize(
    "name", daily(NATIVE | INSIDE, ["2 nodes of 4", "compressed inside, 2 of 2"])
)
def test_sums_are_close_on_all_workers_and_have_the_same_bits_on_all_maps(name):
    """Natively inside, only outer workers compress: errors are those of so many."""
    sizes, topology = (NATIVE | INSIDE)[name]
    method, most = (TWO_WIDTHS, 0.02 * sizes[0]) if name in NATIVE else (EIGHT_BITS, 4e-4)
    x, key = gradient(3, int(np.prod(sizes)), SIZE), jax.random.key(3)
    run = on_one_device(2, method, topology)
    found = flat(run(x.reshape(*sizes, -1), key))
    assert_replicas_equal(found)
    assert most / 400 < sum_error(found[0], x) < most
    bad = x.at[-1, 3 * 256 + 7].set(jnp.nan).at[2, SIZE - 1].set(jnp.inf)
    found = flat(run(bad.reshape(*sizes, -1), key))
    assert_replicas_equal(found)
    group = np.arange(SIZE) // 256
    np.testing.assert_array_equal(np.isnan(found[0]), np.isin(group, [3, group[-1]]))
    x = exact_within_nodes(sizes, SIZE)
    expected = flat(run(x, key))
    assert most / 4000 < sum_error(expected[0], flat(x)) < 2 * most  # rounding is compared
    assert_same_bits(on_a_mesh(sizes, method, topology, x, key), expected)


@pytest.mark.usefixtures("padding_is_free")
def test_levels_of_one_worker():
    x, key = gradient(4, 3, 9000), jax.random.key(1)
    ring = dq.Ring(balance=0)
    # Nodes of one worker: the outer topology alone.
    alone = on_one_device(2, CHEAP, dq.Hierarchical(outer=ring))(x.reshape(3, 1, -1), key)
    only = on_one_device(1, CHEAP, ring)(x, key)
    assert_same_bits(flat(alone), np.asarray(only))
    # One node: nothing but its native sums, in bf16.
    run = on_one_device(2, CHEAP, dq.Hierarchical())
    found = flat(run(x.reshape(1, 3, -1), key))
    assert_replicas_equal(found)
    assert sum_error(found[0], x) < 2.0**-15
    one = run(x[:1].reshape(1, 1, -1), key)
    assert_same_bits(np.asarray(one).reshape(1, -1), np.asarray(x[:1]))


@pytest.mark.usefixtures("padding_is_free")
def test_derivatives_are_those_of_the_exact_sum():
    x, tangent = (gradient(seed, 4, 3000).reshape(2, 2, -1) for seed in (0, 1))

    def pushed(reduce, **options):
        of_sum = lambda x: reduce(x, NAMES[-2:], **options)
        one = lambda x, tangent: jax.jvp(of_sum, (x,), (tangent,))[1]
        mapped = jax.vmap(jax.vmap(one, axis_name="gpu"), axis_name="node")
        return np.asarray(jax.jit(mapped)(x, tangent))

    ours = pushed(dq.psum, compression=over(dq.Hierarchical(outer=dq.Ring()), CHEAP))
    assert_same_bits(ours, pushed(lax.psum))


def reduced(collective, sizes, topology, axis=None):
    """Traces a collective over the innermost of the axes, or over ``axis``."""

    def one(x):
        return collective(x, axis or NAMES[-len(sizes) :], compression=over(topology))

    for name in reversed(NAMES[-len(sizes) :]):
        one = jax.vmap(one, axis_name=name)
    return jax.eval_shape(one, jnp.ones((*sizes, 512)))


def test_each_level_must_serve_its_workers():
    explain = functools.partial(dq.explain, jnp.ones(3), 8)
    uneven = r"power of two of workers, and the axis has 3"
    one = r"(?s)needs two axes and got 1.*\('node', 'gpu'\)"
    assert_refused(
        *(
            (ValueError, one, reduced, reduce, (2, 2), dq.Hierarchical(), axis)
            for axis in ("gpu", ("gpu",), ["node"])
            for reduce in (dq.psum, dq.pmean)
        ),
        (
            ValueError,
            "needs two axes and got 1",
            lambda: explain(compression=over(dq.Hierarchical())),
        ),
        (ValueError, uneven, reduced, dq.psum, (3, 2), dq.Hierarchical(outer=dq.Butterfly())),
        (ValueError, uneven, reduced, dq.psum, (2, 3), dq.Hierarchical(inner=dq.Butterfly())),
    )
    # Left to itself, the outer level takes what serves it.
    assert reduced(dq.psum, (3, 2), dq.Hierarchical()).shape == (3, 2, 512)


HALVES = {
    "native inside": dq.Hierarchical(outer=dq.Direct()),
    "compressed inside": dq.Hierarchical(inner=dq.Direct(), outer=dq.Ring()),
}


MESHES = {"2x4": (2, 4), "2x2x2": (2, 2, 2), "1x4": (1, 4)}


def halves(x, method, topology, sizes=(2, 4)):
    """Every worker's slice of the sum of x[workers, d], and its gathered copy of all slices."""
    axes, method = NAMES[-len(sizes) :], over(topology, method)

    def one(x, key):
        mine = dq.psum_scatter(x[0], axes, tiled=True, compression=method, key=key)
        return mine, dq.all_gather(
            mine, axes, tiled=True, to="invarying", compression=method, key=key
        )

    specs = {"in_specs": (P(axes), P()), "out_specs": (P(axes), P())}
    mapped = jax.jit(jax.shard_map(one, mesh=mesh_of(*sizes, names=axes), **specs))
    mine, gathered = mapped(x, jax.random.key(0))
    return np.asarray(mine), np.stack([shard.data for shard in gathered.addressable_shards])


@pytest.mark.parametrize("name", daily(HALVES, ["native inside"]))
@pytest.mark.parametrize("mesh", daily(MESHES, ["2x4"]))
@pytest.mark.usefixtures("padding_is_free")
def test_halves_on_two_levels_leave_the_slices_of_the_flat_ones(name, mesh):
    """Integers are exact in bf16, and every worker's are others."""
    sizes = MESHES[mesh]
    n, part = int(np.prod(sizes)), 3 * 256 + 40
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-9, 10, (n, n * part)), jnp.float32)
    method = small(dq.DynamiQ(widths=(16,), bits=32))
    mine, gathered = halves(x, method, HALVES[name], sizes)
    np.testing.assert_array_equal(mine, np.sum(np.asarray(x), axis=0))
    np.testing.assert_array_equal(gathered, np.broadcast_to(mine, gathered.shape))


@pytest.mark.release
@pytest.mark.parametrize("name", HALVES)
def test_halves_on_two_levels_err_about_as_flat_ones(name):
    x, method = gradient(2, 8, 8 * (16 * 256 + 40)), small(dq.DynamiQ())
    errors = []
    for topology in (dq.Direct(), HALVES[name]):
        mine, gathered = halves(x, method, topology)
        assert_replicas_equal(gathered)
        errors.append([sum_error(mine, x), sum_error(gathered[0], mine[None])])
    (flat_scatter, flat_gather), (scatter, gather) = errors
    most = 1.5 if HALVES[name].inner is None else 2.5  # inside, sums are encoded once more
    assert 1e-4 < scatter < most * flat_scatter
    assert gather == pytest.approx(flat_gather, rel=0.1)


def test_payloads_gathered_on_two_levels_decode_to_the_bits_of_one():
    x, key, axes = gradient(5, 8, 3000), jax.random.key(1), NAMES[-2:]
    specs = {"in_specs": (P(axes), P()), "out_specs": P(axes), "mesh": mesh_of(2, 4, names=axes)}

    def gathered(topology):
        def one(x, key):
            return dq.all_gather(x, axes, compression=over(topology, CHEAP), key=key)

        mapped = jax.vmap(jax.vmap(one, (0, None), axis_name="gpu"), (0, None), axis_name="node")
        on_mesh = jax.shard_map(lambda x, key: one(x[0], key)[None], **specs)
        return flat(jax.jit(mapped)(x.reshape(2, 4, -1), key)), jax.jit(on_mesh)(x, key)

    found, expected = gathered(dq.Hierarchical()), gathered(dq.Direct())
    assert_same_bits(*map(np.asarray, expected))  # of both maps
    for ours, of_one in zip(found, expected, strict=True):
        assert_same_bits(ours, of_one)
        assert_replicas_equal(np.asarray(ours))


@pytest.mark.parametrize("name", daily(HALVES, ["native inside"]))
def test_inner_groups_scatter_with_noise_of_their_own(name):
    """Equal gradients on all workers: slices of equal values are rounded apart."""
    row = gradient(4, 1, 16 * 256)[0]
    x = jnp.broadcast_to(jnp.tile(row, 8), (8, 8 * row.size))
    slices = halves(x, CHEAP, HALVES[name])[0].reshape(8, -1)
    assert len({found.tobytes() for found in slices}) == 8


def test_inner_workers_send_their_slices_with_noise_of_their_own():
    """Slices of equal values are rounded apart."""
    x = jnp.broadcast_to(jnp.tile(gradient(4, 1, 16 * 256)[0], 4), (2, 4, 4 * 16 * 256))
    found = on_one_device(2, CHEAP, HALVES["native inside"])(x, jax.random.key(0))
    assert len({part.tobytes() for part in found[0, 0].reshape(4, -1)}) == 4
