"""Packet loss: what owners average, how far stale copies are off, and that it stays so."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits, auto_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.commands.simulate import PacketLoss

KEY = jax.random.key(0)


@functools.cache
def scattered(network):
    """jit of (f32[n, n, s], key) -> the owners' means, f32[n, s]."""
    run = jax.vmap(
        lambda x, key: network.mean_scatter(x, "data", key=key), (0, None), axis_name="data"
    )
    return jax.jit(run)


@functools.cache
def gathered(network):
    """jit of (slices f32[n, s], copies f32[n, n, s], key) -> the next copies."""

    def one(x, stale, key):
        return network.all_gather(x, stale, "data", key=key)

    return jax.jit(jax.vmap(one, (0, 0, None), axis_name="data"))


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mean_of(x):
    """The mean without loss; slice i is row i of every worker's."""
    return np.asarray(x, np.float64).mean(axis=0)


@pytest.mark.parametrize(("n", "rate"), [(64, 0.1), (32, 0.3)])
def test_the_mean_of_what_arrived_errs_as_expected(n, rate):
    """p / ((1 - p) n) of the variance; 1.74e-3 for 64 workers and a tenth."""
    x = draw(n, n, n, 96)
    found = np.asarray(scattered(PacketLoss(rate=rate, packet_size=1))(x, KEY))
    expected = rate / ((1 - rate) * n)
    assert np.mean((found - mean_of(x)) ** 2) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("lose_own", [False, True])
def test_the_mean_is_unbiased_where_own_packets_get_lost_too(lose_own):
    """Else a worker's own share has the weight of one that always arrives."""
    n, rate, size = 4, 0.5, 40_000
    values = np.array([1.0, 10.0, -3.0, 4.0], np.float32)
    x = np.broadcast_to(values[:, None, None], (n, n, size))
    found = np.asarray(scattered(PacketLoss(rate=rate, packet_size=1, lose_own=lose_own))(x, KEY))
    if lose_own:
        expected = np.full(n, values.mean()) * (1 - rate**n)  # zero where nothing arrives
    else:
        others = [math.comb(n - 1, k) * rate ** (n - 1 - k) * (1 - rate) ** k for k in range(n)]
        own = sum(part / (1 + k) for k, part in enumerate(others))
        rest = (values.sum() - values) / (n - 1)
        expected = own * values + (1 - own) * rest
        assert own > 1.5 / n
    error = (found.mean(axis=1) - expected) / (found.std(axis=1) / math.sqrt(size))
    assert np.max(np.abs(error)) < 4


def test_packets_get_lost_whole_and_at_every_owner_apart():
    n, size, packet = 4, 1000, 64
    x = np.broadcast_to(2.0 ** np.arange(n, dtype=np.float32)[:, None, None], (n, n, size))
    found = np.asarray(scattered(PacketLoss(rate=0.5, packet_size=packet))(x, KEY))
    packets = [row[i : i + packet] for row in found for i in range(0, size, packet)]
    assert all(len(set(part.tolist())) == 1 for part in packets)
    assert len({row.tobytes() for row in found}) == n
    # A mean of powers of two says which they were; the owner's is always among them.
    subsets = {sum(2.0**i for i in range(n) if s >> i & 1) / s.bit_count(): s for s in range(1, 16)}
    which = [[subsets[round(float(v) * 60) / 60] for v in row[::packet]] for row in found]
    assert all(s >> owner & 1 for owner, row in enumerate(which) for s in row)
    assert len({s for row in which for s in row}) > 8


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_stale_copies_drift_as_expected_and_no_further(rate):
    """Random walks drift by 2 p / (1 - p^2) between two workers, by p / (1 - p) from the owner."""
    n, size, run = 6, 4000, gathered(PacketLoss(rate=rate, packet_size=1))
    slices = np.zeros((n, size), np.float32)
    copies = jnp.zeros((n, n, size))
    late = []
    for step in range(24):
        slices = slices + draw((7, step), n, size)
        copies = run(slices, copies, jax.random.fold_in(KEY, step))
        if step >= 12:
            apart = np.mean((np.asarray(copies)[:, None] - np.asarray(copies)) ** 2, axis=3)
            late.append(apart)
    workers = np.arange(n)
    trio = [(a, b, o) for a in workers for b in workers for o in workers if len({a, b, o}) == 3]
    halves = [
        np.mean([late[t][i] for t in part for i in trio]) for part in (range(6), range(6, 12))
    ]
    np.testing.assert_allclose(halves, 2 * rate / (1 - rate**2), rtol=0.05)
    from_owner = np.mean(
        [apart[a, o, o] for apart in late for a in workers for o in workers if a != o]
    )
    assert from_owner == pytest.approx(rate / (1 - rate), rel=0.05)
    np.testing.assert_array_equal(np.asarray(copies)[workers, workers], slices)


def test_without_loss_it_is_the_native_pair_and_what_is_lost_may_be_nan():
    n, size = 5, 333
    x = draw(1, n, n, size)
    np.testing.assert_allclose(scattered(PacketLoss(rate=0.0))(x, KEY), mean_of(x), atol=1e-6)
    copies = np.asarray(gathered(PacketLoss(rate=0.0))(x[0], x, KEY))
    assert_same_bits(copies, np.broadcast_to(x[0], (n, n, size)))
    sick = x.copy()
    sick[2] = np.nan
    found = np.asarray(scattered(PacketLoss(rate=0.5, packet_size=100))(sick, KEY))
    assert 0 < np.mean(np.isnan(found)) < 1


def test_devices_lose_what_vmap_loses():
    n, size, network = 4, 200, PacketLoss(rate=0.3, packet_size=16)
    x, stale = draw(2, n, n, size), draw(3, n, n, size)

    def one(x, stale, key):
        own = network.mean_scatter(x[0], "data", key=key)
        return own[None], network.all_gather(own, stale[0], "data", key=key)[None]

    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    own, copies = jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))(x, stale, KEY)
    expected = np.asarray(scattered(network)(x, KEY))
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)
    assert_same_bits(np.asarray(copies), np.asarray(gathered(network)(own, stale, KEY)))


def test_shapes_and_bad_fields_are_refused(unchecked_shapes):
    network = PacketLoss(rate=0.1)
    with pytest.raises(ValueError, match=r"x has shape \(3, 8\) and has to have \(4, 8\)"):
        scattered(network)(jnp.zeros((4, 3, 8)), KEY)
    with pytest.raises(ValueError, match=r"stale has shape \(4, 9\) and has to have \(4, 8\)"):
        gathered(network)(jnp.zeros((4, 8)), jnp.zeros((4, 4, 9)), KEY)
    with pytest.raises(ValueError, match="rate=1.0 must be at least 0 and below 1"):
        PacketLoss(rate=1.0)
    with pytest.raises(ValueError, match="packet_size=0 must be a positive integer"):
        PacketLoss(rate=0.1, packet_size=0)
