"""Losses of packets: unbiased, of the expected size, the same on all workers, none at rate 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits
from cases import CHEAP, first_state, small, stepper, vmapped
from workers import gradient

import dynamiq_jax as dq
from dynamiq_jax.contrib import PacketLoss
from dynamiq_jax.contrib.packet_loss import weights

DRAWS = 4096
KEY = jax.random.key(3)


@functools.cache
def drawn(n, rate):
    """The weights of n workers' packets in many draws, f64[draws, n]."""
    seeds = jax.random.bits(jax.random.key(n), (DRAWS // 8, 2), jnp.uint32)
    draw = jax.jit(jax.vmap(lambda seed: weights(seed, n, 8, rate)))
    found = np.asarray(draw(seeds), np.float64)  # [draws / 8, n, packets]
    return np.moveaxis(found, 2, 1).reshape(DRAWS, n)


@pytest.mark.parametrize(("n", "rate"), [(2, 0.6), (8, 0.1)])
def test_every_weight_is_one_on_average_and_some_packet_arrives(n, rate):
    found = drawn(n, rate)
    arrived = np.sum(found > 0, axis=1)
    assert arrived.min() >= 1
    np.testing.assert_allclose(found, np.where(found > 0, n / arrived[:, None], 0), rtol=1e-6)
    # What is weighted 1 by all workers loses nothing: the sum of weights is always n.
    np.testing.assert_allclose(np.sum(found, axis=1), n, rtol=1e-6)
    deviation = np.std(found, axis=0) / np.sqrt(DRAWS)
    assert np.all(np.abs(np.mean(found, axis=0) - 1) < 4 * deviation)
    share = 1 - np.mean(arrived) / n  # lost
    alone = rate**n / n  # one of n is sent again where all would be lost
    assert share == pytest.approx(rate - alone, abs=4 * np.sqrt(rate / (n * DRAWS)))


@pytest.mark.parametrize(("n", "rate"), [(2, 0.6), (8, 0.1)])
def test_the_error_of_unrelated_gradients_is_the_promised_one(n, rate):
    """|Σ (w_i - 1) g_i|² is Σ (w_i - 1)² on average, for gradients of |g_i|² = 1."""
    errors = np.mean(np.square(drawn(n, rate) - 1), axis=1)
    expected = PacketLoss(dq.F32(), rate=rate).excess(n)
    assert np.mean(errors) == pytest.approx(expected, abs=4 * np.std(errors) / np.sqrt(DRAWS))


def lossy(rate, method=CHEAP.method, packet_size=512):
    return small(PacketLoss(method, rate=rate, packet_size=packet_size))


def test_rate_zero_is_the_method_alone():
    x = np.asarray(gradient(0, 4, 8192))
    alone, none = (vmapped(method, dq.Direct())(x, KEY) for method in (CHEAP, lossy(0.0)))
    assert_same_bits(alone, none)


def test_all_workers_get_the_mean_of_what_arrived():
    """Packets of 512 coordinates, the last one of 88; 1 from every worker is a sum of 4."""
    n, size = 4, 512 * 40 + 88
    run = vmapped(lossy(0.5, dq.F32()), dq.Direct())
    x = np.exp2(2.0 * np.arange(n, dtype=np.float32))[:, None] * np.ones((n, size), np.float32)
    found = run(x, KEY)
    assert_replicas_equal(found)
    packets = np.split(found[0], range(512, size, 512))
    assert all(len(np.unique(packet)) == 1 for packet in packets)
    # Worker i sends 4^i: digits of sum * k / n, base 4, tell which k packets arrived.
    for packet in packets:
        subsets = [s for s in range(1, 2**n) if np.isclose(packet[0], mean_of(s, n), rtol=1e-6)]
        assert len(subsets) == 1
    assert len({packet[0] for packet in packets}) > 5
    assert np.any(run(x, jax.random.key(4))[0] != found[0])
    assert_same_bits(run(np.ones((n, size), np.float32), KEY)[0], np.full(size, n, np.float32))


def mean_of(subset, n):
    """n times the mean of 4^i over the bits i of ``subset``."""
    kept = [4.0**i for i in range(n) if subset >> i & 1]
    return n * sum(kept) / len(kept)


def test_what_is_not_finite_is_nan_for_all_though_it_is_lost():
    x = np.ones((4, 8192), np.float32)
    x[1, 100], x[2, 5000] = np.nan, np.inf
    found = vmapped(lossy(0.5, dq.F32()), dq.Direct())(x, KEY)
    assert np.array_equal(np.unique(np.nonzero(np.isnan(found))[1]), [100, 5000])
    assert np.isfinite(np.delete(found, [100, 5000], axis=1)).all()


@pytest.mark.parametrize("fields", [{"rate": 1.0}, {"rate": -0.1}, {"packet_size": 0}])
def test_fields_out_of_range(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        PacketLoss(dq.DynamiQ(), **fields)


def test_what_it_does_not_serve():
    with pytest.raises(ValueError, match="not a method over topologies"):
        PacketLoss(dq.contrib.THC())
    x = np.ones((4, 8192), np.float32)
    with pytest.raises(NotImplementedError, match=r"pass topology=dq.Direct\(\)"):
        vmapped(lossy(0.1), dq.Ring())(x, KEY)
    with pytest.raises(NotImplementedError, match="PacketLoss without it"):
        memory = small(dq.ErrorFeedback(PacketLoss(dq.DynamiQ())))
        stepper(memory, dq.Direct())(x, KEY, first_state(memory, x, 4, dq.Direct()))
