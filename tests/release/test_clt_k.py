"""CLT-k end to end: who leads, which coordinates travel, what memory remembers and forgets."""

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
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(0)
CHUNK = 16


def PLAIN(**options):
    """The method without memory, however small a leaf is."""
    return small(dq.comparators.CLTK(chunk_size=CHUNK, **options))


def CLTK(**options):
    """Error feedback around it."""
    return small(dq.ErrorFeedback(dq.comparators.CLTK(chunk_size=CHUNK, **options)))


def draw(seed, n, size=333):
    """f32[n, size], distinct on each worker."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, size)) * np.exp(rng.standard_normal(size))).astype(np.float32)


def chosen_by(x, count):
    """The coordinates of one worker's chunks that are largest."""
    chunks = np.pad(np.abs(x), (0, -x.size % CHUNK), constant_values=-1).reshape(-1, CHUNK)
    sent = np.zeros(chunks.shape, bool)
    np.put_along_axis(sent, np.argsort(-chunks, axis=1, kind="stable")[:, :count], True, axis=1)
    return sent.reshape(-1)[: x.size]


def check_sum(found, x, sent):
    """The sum, up to n roundings to bf16, where it was sent; else zeros."""
    own = np.asarray(x, np.float64)
    np.testing.assert_array_equal(found[~sent], 0)
    error = np.abs(found - own.sum(axis=0))[sent]
    assert np.all(error <= len(own) * 2.0**-8 * np.abs(own).sum(axis=0)[sent])
    assert np.all(found[sent] != 0)


@pytest.mark.parametrize("n", range(2, 9))
def test_every_worker_leads_in_turn(n):
    x, method = draw(n, n), PLAIN(density=3 / CHUNK)
    state, run = first_state(method, x, n), stepper(method)
    for step in range(n + 1):
        found, state = run(x, KEY, state)
        assert_replicas_equal(found)
        check_sum(np.asarray(found[0], np.float64), x, chosen_by(x[step % n], 3))
    assert np.all(state[0].step == n + 1)
    alone = np.asarray(vmapped(method, None)(x, KEY))
    check_sum(alone[0].astype(np.float64), x, chosen_by(x[0], 3))


def test_density_one_sums_everything():
    """In bf16: of whole numbers without any error."""
    x = np.random.default_rng(1).integers(-20, 21, (5, 333)).astype(np.float32)
    found = np.asarray(vmapped(PLAIN(density=1), None)(x, KEY))
    np.testing.assert_array_equal(found, np.broadcast_to(x.sum(axis=0), found.shape))


def test_identical_workers_and_zeros():
    own = draw(2, 1)[0]
    found = np.asarray(vmapped(PLAIN(density=0.25), None)(np.stack([own] * 4), KEY))
    sent = chosen_by(own, 4)
    np.testing.assert_allclose(found[0][sent], 4 * own[sent], rtol=2.0**-8)
    assert not np.any(vmapped(PLAIN(density=0.25), None)(np.zeros((4, 333), np.float32), KEY))


def test_what_only_others_have_waits_until_these_lead():
    """Disjoint workers: the first step has the first one's alone, after three all is delivered."""
    x = np.where(np.arange(333) % 3 == np.arange(3)[:, None], draw(3, 3), 0)
    method = CLTK(density=6 / CHUNK)
    state, run = first_state(method, x, 3), stepper(method)
    total = np.zeros(333)
    for worker in range(3):
        found, state = run(x if worker == 0 else 0 * x, KEY, state)
        total += np.asarray(found[0], np.float64)
        if worker == 0:
            np.testing.assert_allclose(total[::3], x[0, ::3], rtol=2.0**-8)
            assert np.mean(total[1::3] != 0) < 0.2  # in places that were left over
    np.testing.assert_allclose(total, x.sum(axis=0), rtol=2.0**-8)


def test_what_is_not_delivered_is_in_memory_to_the_last_bit():
    """One worker alone sends, so that sums to bf16 round nothing."""
    x = draw(5, 3)
    x[[0, 2]] = 0
    method = CLTK(density=0.25)
    state, run = first_state(method, x, 3), stepper(method)
    delivered = 0.0
    for _ in range(5):
        found, state = run(x, KEY, state)
        delivered = delivered + np.asarray(found[0], np.float64)
    gap = delivered + np.sum(np.asarray(state[0].residual, np.float64), axis=0) - 5.0 * x[1]
    assert np.max(np.abs(gap)) < 1e-5
    assert np.mean(delivered != 0) > 0.3


def test_eta_filters_what_is_left():
    x, before = draw(6, 3), draw(7, 3)
    method = small(dq.ErrorFeedback(dq.comparators.CLTK(density=0.25, chunk_size=CHUNK), eta=0.3))
    state, run = first_state(method, x, 3), stepper(method)
    state = (state[0]._replace(residual=jnp.asarray(before)),)
    found, after = run(x, KEY, state)
    sent = chosen_by((x + before)[0], 4)
    np.testing.assert_array_equal(np.asarray(found[0]) != 0, sent)
    left = np.where(sent, 0, x + before)
    expected = 0.7 * before + 0.3 * left
    rest = 0.3 * 2.0**-8 * np.abs(x + before) + 1e-6  # of rounding
    assert np.all(np.abs(after[0].residual - expected) <= rest)


def test_states_differ_between_devices_and_places_do_not():
    x, method = draw(9, 4), CLTK(density=0.25)

    def one(x):
        state = as_compression(method).init_state(x[0], 4)
        return jax.tree.map(lambda v: v[None], dq.reduce(x[0], "data", method=method, state=state))

    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    found = jax.jit(jax.shard_map(one, mesh=auto_mesh(4), **specs))(x)
    assert_replicas_equal((found.tree, found.state[0].inner.step))
    left = np.asarray(found.state[0].residual)
    assert len({part.tobytes() for part in left}) == 4
    unsent = np.asarray(found.tree[0]) == 0
    assert_same_bits(left[:, unsent], x[:, unsent])


def test_bits_per_coordinate():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def bits(**options):
        return dq.explain(
            leaf, 8, method=dq.comparators.CLTK(**options), verbose=False
        ).bits_per_coord

    assert bits() == 24 / 64
    assert bits(density=0.1, chunk_size=64) == 24 * 7 / 64
    state = jax.eval_shape(lambda: as_compression(CLTK()).init_state(leaf, 8))
    assert sum(4 * s.size for s in jax.tree.leaves(state)) == 4 * (1 << 20) + 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0}, "density=0 must be above 0 and at most 1"),
        ({"chunk_size": 257}, "chunk_size=257 must be an integer, 1 to 256"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.CLTK(**fields)
