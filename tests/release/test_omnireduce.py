"""OmniReduce end to end: which blocks travel, what they sum up to, and how k finds its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, small, vmapped

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

BLOCK = 16
N = 8
KEY = jax.random.key(0)


def OmniReduce(**options):
    """The method without memory, however small a leaf is."""
    return small(dq.comparators.OmniReduce(block_size=BLOCK, **options))


def draw(seed, blocks, n=N):
    """Blocks of very different magnitude on every worker: f32[n, blocks * BLOCK]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, BLOCK)) * np.exp(rng.standard_normal((n, blocks, 1)))
    return x.astype(np.float32).reshape(n, -1)


def blocks_of(x):
    """f64[..., blocks, BLOCK] of the last axis, filled up with zeros."""
    x = np.asarray(x, np.float64)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    return np.pad(x, pad).reshape(*x.shape[:-1], -1, BLOCK)


def energies(x):
    """Squared norms: f64[n, blocks]."""
    return np.sum(blocks_of(x) ** 2, axis=-1)


def union_of(x, fraction):
    """Blocks that some worker has among the largest ``fraction`` of its own."""
    energy = energies(x)
    count = max(1, round(float(fraction) * energy.shape[1]))
    marked = np.zeros(energy.shape, bool)
    np.put_along_axis(marked, np.argsort(-energy, axis=1)[:, :count], True, axis=1)
    return np.any(marked, axis=0)


def reduce(method, x, key=KEY):
    return np.asarray(vmapped(method, None)(jnp.asarray(x), key))


def check_sum(found, x, sent):
    """Blocks that were sent hold the sum, up to n roundings to bf16; the others hold zeros."""
    own, found = blocks_of(x), blocks_of(found)
    np.testing.assert_array_equal(found[~sent], 0)
    error = np.abs(found - own.sum(axis=0))[sent]
    assert np.all(error <= len(own) * 2.0**-9 * np.abs(own).sum(axis=0)[sent])


@pytest.mark.parametrize(
    ("density", "size"), [(0.5, 640 * BLOCK), (0.11, 321 * BLOCK - 5), (1, 99)]
)
def test_blocks_of_most_energy_are_summed_and_others_are_zero(density, size):
    x, method = draw(0, 640)[:, :size], OmniReduce(density=density)
    found = reduce(method, x)
    assert_replicas_equal(found)
    energy = energies(x).sum(axis=0)
    count = int(np.ceil(density * energy.size))
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == count
    # Energies travel in bf16: only blocks within 3% of the limit may change places.
    limit = np.sort(energy)[-count]
    assert np.all(sent[energy > 1.03 * limit])
    assert not np.any(sent[energy < limit / 1.03])
    check_sum(found[0], x, sent)


def test_chunked_top_k_is_its_definition():
    """J chunks of the largest sum of squared norms, whole, and the rest in memory for later."""
    alone = dq.comparators.OmniReduce.top_k_chunked(density=0.25)
    x, method = draw(7, 4 * 40), small(dq.ErrorFeedback(alone))
    assert alone.block_size == 4 * BLOCK
    chunks = x.reshape(N, 40, 64)
    order = np.argsort(-np.sum(chunks**2, axis=(0, 2), dtype=np.float64))
    found, state = stepper(method)(x, start(method, x))
    sent = np.any(np.asarray(found[0]).reshape(40, 64) != 0, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(sent), np.sort(order[:10]))
    left = np.asarray(state[0].residual).reshape(N, 40, 64)
    np.testing.assert_array_equal(left[:, ~sent], chunks[:, ~sent])
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    bits = dq.explain(
        leaf, N, method=dq.comparators.OmniReduce.top_k_chunked(1 / 16), verbose=False
    )
    assert bits.bits_per_coord == 16 / 16 + 16 / 64  # 16 J C / d + 16 / C


def test_sparse_gradients_are_summed_whole():
    """The original skips blocks that are zero on all workers; here up to N - K of them."""
    x, place = draw(2, 100).reshape(N, 100, BLOCK), np.arange(100) % 20
    disjoint = np.where((place == np.arange(N)[:, None])[..., None], x, 0).reshape(N, -1)
    found = reduce(OmniReduce(density=0.4), disjoint)[0]
    np.testing.assert_allclose(found, disjoint.sum(axis=0), rtol=2.0**-8)  # a cast, no sums
    shared = np.where((place < N)[:, None], x, 0).reshape(N, -1)
    check_sum(reduce(OmniReduce(density=0.4), shared)[0], shared, place < N)


@functools.cache
def stepper(method):
    def one(x, state):
        return dq.reduce(x, "data", op="sum", method=method, state=state)[:2]

    return jax.jit(jax.vmap(one, axis_name="data"))


def start(method, x, fraction=None):
    """Every worker's first state, perhaps with another k."""
    state = as_compression(method).init_state(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), len(x))
    state = jax.tree.map(lambda s: jnp.broadcast_to(s, (len(x), *s.shape)), state)
    if fraction is not None:
        state = (state[0]._replace(fraction=jnp.full(len(x), fraction, jnp.float32)),)
    return state


def inputs(kind, step, blocks=1000):
    """One step's gradients: stationary in distribution, new in every step."""
    if kind == "identical":
        return np.broadcast_to(draw(step, blocks, 1), (N, blocks * BLOCK))
    x = draw(step, blocks).reshape(N, blocks, BLOCK)
    if kind == "disjoint":
        x[np.arange(N)[:, None] != np.arange(blocks) % N] *= 0
    return x.reshape(N, -1)


@pytest.mark.parametrize(
    ("kind", "settled"), [("identical", 0.5), ("disjoint", 0.5 / N), ("independent", 0.66 / N)]
)
@pytest.mark.parametrize("from_above", [False, True])
def test_k_settles_where_the_union_has_the_density(kind, settled, from_above):
    """Independent: the root of 1 - (1 - k)^8 = 1/2."""
    method = OmniReduce(select="union")
    state = start(method, inputs(kind, 0), 0.5 if from_above else None)
    assert from_above or np.all(state[0].fraction == 0.5 / N)
    fractions, ratios = [], []
    for step in range(60):
        x = inputs(kind, step)
        ratios.append(union_of(x, state[0].fraction[0]).mean() / 0.5)
        _, state = stepper(method)(x, state)
        assert_replicas_equal(state[0].fraction)
        fractions.append(float(state[0].fraction[0]))
        # The rule, from its definition.
        ratio = np.clip(ratios[-1], 0.6, 1 / 0.6)
        before = ([0.5 if from_above else 0.5 / N] + fractions)[-2]
        assert fractions[-1] == pytest.approx(min(0.5, before * (0.75 + 0.25 / ratio)), rel=1e-5)
    assert stepper(method)._cache_size() == 1
    assert np.mean(ratios[40:]) == pytest.approx(1, abs=0.01)
    assert np.max(np.abs(np.array(ratios[40:]) - 1)) < 0.06
    assert np.mean(fractions[40:]) == pytest.approx(settled, rel=0.02)


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_marked_blocks_go_first(fraction):
    """A union that is too small leaves room for others, one that is too large loses its least."""
    x, method = draw(5, 200), OmniReduce(select="union", density=0.3)
    union, energy = union_of(x, fraction), energies(x).sum(axis=0)
    found, _ = stepper(method)(x, start(method, x, fraction))
    assert_replicas_equal(found)
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 60
    if union.sum() < 60:
        assert np.all(sent[union])
        contested = ~union
    else:
        assert np.all(union[sent])
        contested = union
    assert np.min(energy[contested & sent]) > np.max(energy[contested & ~sent]) / 1.03
    check_sum(found[0], x, sent)


def test_k_stays_in_bounds_where_there_is_nothing_to_mark():
    method, x = OmniReduce(select="union"), np.zeros((3, 640), np.float32)
    state = start(method, x)
    for _ in range(30):
        found, state = stepper(method)(x, state)
    assert not np.any(found)
    np.testing.assert_array_equal(state[0].fraction, 0.5)


def test_counts_of_many_workers_do_not_wrap():
    """256 workers that mark the same block: 256 is 0 in uint8."""
    x = np.tile(np.array([[1.0] * BLOCK + [0.5] * BLOCK], np.float32), (256, 1))
    method = OmniReduce(select="union")
    found, _ = stepper(method)(x, start(method, x))
    np.testing.assert_array_equal(blocks_of(found[0])[:, 0], [256, 0])


def test_bits_per_coordinate():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def bits(n=8, **options):
        method = dq.comparators.OmniReduce(**options)
        return dq.explain(leaf, n, method=method, verbose=False).bits_per_coord

    assert bits() == 16 * 0.5 + 16 / 256
    assert bits(density=0.25, block_size=128) == 16 * 0.25 + 16 / 128
    assert bits(select="union") == 16 * 0.5 + (16 + 8) / 256
    assert bits(256, select="union") == 16 * 0.5 + (16 + 32) / 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0}, "density=0 must be above 0 and at most 1"),
        ({"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        ({"block_size": 0}, "block_size=0 must be a positive integer"),
        ({"select": "random"}, "select='random'; expected one of"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.OmniReduce(**fields)
