"""Averaging along one axis of a grid per round: exact after as many rounds as there are axes.

The rule by which random partitions contract is that of an analysis of variance: of the squared
deviations of N peers from their mean, (r - 1) / (N - 1) lie between the means of r equal groups.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, gradient, relative_error, small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

AXES = ("a", "b", "c")
N = 8
EXACT = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0)


def grid(sizes):
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def rounds(mesh, method, x, weights, *, carried, topology=None):
    """Every peer's value after each round; its weight is `carried` along, or as it was."""

    @partial(jax.jit, static_argnames="axis")
    def average(x, weight, axis):
        def one(x, weight):
            mean = dq.pmean(x[0], axis, method=method, topology=topology, weight=weight[0])
            return mean[None], jax.lax.psum(weight, axis)

        peers = P(mesh.axis_names)
        specs = {"in_specs": (peers, peers), "out_specs": (peers, peers), "check_vma": False}
        return jax.shard_map(one, mesh=mesh, **specs)(x, weight)

    found, weight = [], jnp.asarray(weights, jnp.float32)
    for axis in mesh.axis_names:
        x, total = average(x, weight, axis)
        weight = total if carried else weight
        found.append(np.asarray(x))
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("carried", [True, False])
def test_all_alive_have_the_mean_after_as_many_rounds_as_axes(sizes, carried):
    x = gradient(0, N, 700)
    found = rounds(grid(sizes), EXACT, x, np.ones(N), carried=carried)
    mean = np.asarray(x, np.float64).mean(0)
    for average in found[:-1]:
        assert relative_error(average[0], mean) > 0.01
        np.testing.assert_allclose(average.mean(0), mean, rtol=1e-4, atol=1e-4)
    assert_replicas_equal(found[-1])
    assert relative_error(found[-1][0], mean) < 1e-12


def test_with_dead_peers_the_weights_that_go_along_make_the_mean_of_the_others():
    """Unevenly dead, so that the mean of the columns' means is another one; and they are NaN."""
    x, alive = gradient(1, N, 700), np.array([1, 0, 0, 1, 0, 1, 0, 1], np.float32)
    mean = np.asarray(x, np.float64)[alive > 0].mean(0)
    x = x.at[alive == 0].set(jnp.nan)
    found = rounds(grid((4, 2)), EXACT, x, alive, carried=True)
    assert_replicas_equal(found[-1])
    assert relative_error(found[-1][0], mean) < 1e-12
    forgetful = rounds(grid((4, 2)), EXACT, x, alive, carried=False)
    assert relative_error(np.nan_to_num(forgetful[-1][0]), mean) > 0.01


def test_compressed_rounds_end_in_equal_bits_close_to_the_mean():
    x = gradient(2, N, 5000)
    method, direct = small(dq.DynamiQ(bits=8)), dq.Direct()
    found = rounds(grid((4, 2)), method, x, np.ones(N), carried=True, topology=direct)
    assert_replicas_equal(found[-1])
    assert 0 < relative_error(found[-1][0], np.asarray(x, np.float64).mean(0)) < 0.02


@pytest.mark.parametrize("n_groups", [2, 4, 8])
def test_random_partitions_leave_their_share_of_the_variance(n_groups):
    """(r - 1) / (N - 1) of it, within four standard errors of the mean over many partitions."""
    n_peers, trials = 16, 2000
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n_peers).astype(np.float32) ** 3  # uneven, the same in all trials
    orders = np.argsort(rng.random((trials, n_peers)), axis=1)
    dealt = x[orders].reshape(trials, n_groups, -1)
    within = jax.vmap(
        lambda own: dq.pmean(own, "peers", method=EXACT, weight=1.0), axis_name="peers"
    )
    means = np.asarray(jax.jit(within)(jnp.moveaxis(dealt, -1, 0)))
    left = means[0].var(axis=-1) / x.var()
    error = left.std() / np.sqrt(trials)
    assert abs(left.mean() - (n_groups - 1) / (n_peers - 1)) < 4 * error < 0.02
