"""SIDCo: the estimator on numbers of known distribution, and the blocks that the method sends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    first_state,
    small,
    stepper,
    vmapped,
)
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.comparators import sidco
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(0)
BLOCK, N = 16, 4


def PLAIN(**options):
    """The method without memory, however small a leaf is."""
    return small(dq.comparators.SIDCo(block_size=BLOCK, **options))


def SIDCo(**options):
    """Error feedback around it."""
    return small(dq.ErrorFeedback(dq.comparators.SIDCo(block_size=BLOCK, **options)))


def kept(numbers, density):
    """The part of the numbers above the threshold, over the density, by number of stages."""
    limits = np.asarray(sidco.thresholds(jnp.asarray(numbers, jnp.float32), density))
    return np.mean(numbers[:, None] >= limits, axis=0) / density


def gaussian_tail(x):
    return math.erfc(x / math.sqrt(2))


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_the_estimator_is_right_for_laplace_numbers(density):
    """Whatever the number of stages."""
    x = np.abs(np.random.default_rng(0).laplace(size=400_000))
    np.testing.assert_allclose(kept(x, density), 1, atol=0.03)


def test_the_estimator_on_normal_numbers():
    """Stages from the tail's own moments: 1.13 of a density of 0.01 with three."""
    x = np.abs(np.random.default_rng(1).standard_normal(400_000))
    expected = []
    for stages in range(1, sidco.MAX_STAGES + 1):
        limit = 0.0
        for part in sidco.parts(0.01, stages):
            density = math.sqrt(2 / math.pi) * math.exp(-(limit**2) / 2)
            limit -= (density / gaussian_tail(limit) - limit) * math.log(part)
        expected.append(gaussian_tail(limit) / 0.01)
    assert expected[2] == pytest.approx(1.13, abs=0.005)
    assert expected[0] < 0.03
    np.testing.assert_allclose(kept(x, 0.01), expected, atol=0.05)


@pytest.mark.parametrize("density", [1.0, 0.25, 0.2, 0.001])
def test_stages_keep_the_density_in_equal_ratios(density):
    for stages in range(1, sidco.MAX_STAGES + 1):
        found = sidco.parts(density, stages)
        assert len(found) == stages
        assert math.prod(found) == pytest.approx(density)
        assert max(found[1:], default=0) == pytest.approx(min(found[1:], default=0))
        assert density >= 0.25 or stages == 1 or found[0] == 0.25


def test_thresholds_of_odd_numbers():
    """At most the largest number, and never NaN: where all are equal, all are above."""
    for numbers in ([3.0] * 50, [0.0] * 50, [7.0], [-1.0, 2.0, 2.0], [0.0] * 25 + [1.0] * 25):
        x = np.array(numbers, np.float32)
        limits = np.asarray(sidco.thresholds(jnp.asarray(x), 0.01))
        np.testing.assert_array_equal(limits, x.max())
    np.testing.assert_array_equal(sidco.thresholds(-jnp.ones(9), 0.1), 0)
    np.testing.assert_array_equal(sidco.thresholds(jnp.arange(9.0), 1.0), 0)


@pytest.mark.parametrize("room", [1, 3, 6, 10])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_the_order_begins_at_its_place(room, place):
    above = np.isin(np.arange(10), [1, 4, 5, 8])
    order = np.roll(np.arange(10), -place)
    expected = [*order[above[order]], *order[~above[order]]][:room]
    found = sidco.first_of(jnp.asarray(above), jnp.int32(place), room)
    np.testing.assert_array_equal(found, expected)


def draw(seed, blocks=2000, scales="laplace", n=N):
    """Blocks whose norms over all workers have a known distribution: f32[n, blocks * BLOCK].

    Distinct on each worker.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, BLOCK))
    norm = np.sqrt(np.sum(x**2, axis=(0, 2), keepdims=True))
    scale = {
        "laplace": np.abs(rng.laplace(size=blocks)),
        "normal": np.abs(rng.standard_normal(blocks)),
        "lognormal": np.exp(1.5 * rng.standard_normal(blocks)),
    }[scales]
    return (x / norm * scale[:, None]).reshape(n, -1).astype(np.float32)


def blocks_of(x):
    return np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, BLOCK)


def norms_of(x):
    return np.sqrt(np.sum(blocks_of(x) ** 2, axis=(0, 2)))


def check_sum(found, x, sent):
    """The sum, up to n roundings to bf16, where it was sent; else zeros."""
    own, found = blocks_of(x), blocks_of(found)
    np.testing.assert_array_equal(found[~sent], 0)
    error = np.abs(found - own.sum(axis=0))[sent]
    assert np.all(error <= len(own) * 2.0**-9 * np.abs(own).sum(axis=0)[sent])
    assert np.all(np.any(found[sent] != 0, axis=1))


def test_all_workers_sum_the_blocks_above_the_threshold():
    """And in the room that is left others in order, from the place of the state."""
    x, method = draw(2), PLAIN(density=0.1, headroom=1.5)
    found = np.asarray(vmapped(method, None)(x, KEY))
    assert_replicas_equal(found)
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 300
    check_sum(found[0], x, sent)
    norms = norms_of(x)
    limit = np.quantile(norms, 0.9)  # the fit and bf16 norms are within some percent of it
    assert np.all(sent[norms > 1.2 * limit])
    others = np.flatnonzero(sent & (norms < limit / 1.2))
    assert 60 < len(others) < 140
    # They are the first ones.
    assert np.mean(sent[: others[-1]]) == 1
    assert not np.any(sent[others[-1] + 1 :] & (norms < limit / 1.2)[others[-1] + 1 :])


def test_who_finds_no_room_is_first_in_the_next_step():
    """Equal blocks are all above the threshold, of which there is room for an eighth."""
    x, method = np.ones((3, 80 * BLOCK), np.float32), SIDCo(density=0.1, headroom=1.25)
    x *= np.arange(1, 4, dtype=np.float32)[:, None]
    state, run = first_state(method, x, 3), stepper(method)
    for step in range(3):
        found, state = run(x, KEY, state)
        sent = np.any(blocks_of(found[0]) != 0, axis=1)
        if step == 0:  # later blocks that wait are larger than those that were sent
            np.testing.assert_array_equal(sent, np.arange(80) < 10)
        assert np.all(state[0].inner.place == 10 * (step + 1))
    assert sent.sum() == 10
    assert np.all(sent[20:30])


@pytest.mark.parametrize(
    ("scales", "density", "settled"),
    [("normal", 0.01, 3), ("lognormal", 0.1, 1), ("laplace", 0.1, 2)],
)
def test_the_number_of_stages_finds_its_place(scales, density, settled):
    """Only at the end of a period, on all workers alike; then about the density is above."""
    method = PLAIN(density=density)
    state, run = first_state(method, draw(0, scales=scales), N), stepper(method)
    counts = []
    for step in range(15):
        before = state[0]
        x = draw(step, scales=scales)
        _, state = run(x, KEY, state)
        assert_replicas_equal(state)
        assert np.all(state[0].step == (step + 1) % sidco.PERIOD)
        if (step + 1) % sidco.PERIOD:
            assert_same_bits(np.asarray(state[0].stages), np.asarray(before.stages))
            counts.append((state[0].counts - before.counts)[0, before.stages[0] - 1])
    assert run._cache_size() == 1
    assert state[0].stages[0] == settled
    assert np.mean(counts[-4:]) / (2000 * density) == pytest.approx(1.05, abs=0.25)


def test_devices_choose_alike_though_their_memories_differ():
    x, method = draw(5, 300), SIDCo(density=0.2, headroom=1.25)

    def one(x):
        state = as_compression(method).init_state(x[0], N)
        return jax.tree.map(lambda v: v[None], dq.reduce(x[0], "data", method=method, state=state))

    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    found = jax.jit(jax.shard_map(one, mesh=auto_mesh(N), **specs))(x)
    assert_replicas_equal((found.tree, found.state[0].inner))
    left = np.asarray(found.state[0].residual)
    assert len({part.tobytes() for part in left}) == N
    unsent = np.asarray(found.tree[0]) == 0
    assert 0.7 < np.mean(unsent) < 0.8
    assert_same_bits(left[:, unsent], x[:, unsent])


def test_bits_per_coordinate():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def bits(**options):
        return dq.explain(
            leaf, 8, method=dq.comparators.SIDCo(**options), verbose=False
        ).bits_per_coord

    assert bits() == pytest.approx(16 * 0.1 + 16 / 64, rel=1e-3)
    assert bits(density=0.5, headroom=3, block_size=256) == 16 + 16 / 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0}, "density=0 must be above 0 and at most 1"),
        ({"headroom": 0.9}, "headroom=0.9 must be at least 1"),
        ({"headroom": math.nan}, "headroom=nan must be at least 1"),
        ({"block_size": 1.5}, "block_size=1.5; expected int"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.SIDCo(**fields)
