"""LIEC-SGD: errors that are applied at once, those that owners keep, and averages of models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import (
    assert_replicas_equal,
    auto_mesh,
    first_state,
    loss_fn,
    problem,
    small,
    stepper,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.comparators.local_error import LocalError
from dynamiq_jax.optax import liec

KEY = jax.random.key(0)
N, BUCKET = 4, 16
ALONE = dq.comparators.MinMax(bits=3, bucket_size=BUCKET, rounding="nearest")
MINMAX, LOCAL = small(ALONE), small(LocalError(ALONE))


def draw(seed, size=500):
    """f32[N, size], distinct on each worker, of very different magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((N, size)) * np.exp(rng.standard_normal(size))).astype(np.float32)


def owners(size, memory):
    """Who owns each coordinate."""
    return np.arange(size) // memory.shape[-1]


def exact(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


def owners_errors(memory, size):
    """The owners' memories, in the gradient's order."""
    return np.asarray(memory, np.float64).reshape(-1)[:size]


@pytest.mark.parametrize("mean", [False, True])
def test_results_and_what_owners_keep_make_up_all_gradients(mean):
    method, size = LOCAL, 500
    state, run = first_state(method, draw(0), N), stepper(method, mean=mean)
    assert state[0].shape == (N, 128)  # an n-th, in whole buckets
    given = delivered = 0.0
    for step in range(4):
        x = draw(step)
        found, state = run(x, KEY, state)
        given = given + exact(x)
        delivered = delivered + exact(found) * (1 if mean else 1 / N)
        kept = owners_errors(state[0], size)
        np.testing.assert_allclose(delivered + kept, given, atol=1e-5 * np.abs(given).max())
        assert np.mean(kept != 0) > 0.5


def test_each_worker_adds_what_its_own_encoding_lost():
    """A worker adds up to half a step of its buckets to others' chunks, on either side."""
    x, method = draw(1), LOCAL
    found, state = stepper(method, mean=True)(x, KEY, first_state(method, x, N))
    found = np.asarray(found, np.float64)
    owner = owners(x.shape[1], state[0])
    sent = found[owner, np.arange(x.shape[1])]  # what all decode; owners add nothing to their own
    for worker in range(N):
        local = (found[worker] - sent)[: 31 * BUCKET].reshape(-1, BUCKET)
        parts = x[worker, : 31 * BUCKET].reshape(-1, BUCKET).astype(np.float64)
        half = np.ptp(parts, axis=1, keepdims=True) / 7 / 2
        mine = (owner == worker)[: 31 * BUCKET].reshape(-1, BUCKET)
        np.testing.assert_array_equal(local[mine], 0)
        assert np.all(np.abs(local) <= 1.05 * half + 1e-6)
        codes = (parts - local - parts.min(axis=1, keepdims=True)) / (2 * half)
        off = np.abs(codes - np.round(codes))[~mine]  # extremes travel in 16 bits
        assert np.mean(off < 0.1) > 0.95
        assert np.mean(local[~mine] != 0) > 0.7


def test_what_is_not_finite_leaves_owners_errors_alone():
    method, bad = LOCAL, draw(2)
    _, state = stepper(method)(draw(1), KEY, first_state(method, bad, N))
    bad[2, 300] = np.nan
    found, after = stepper(method)(bad, KEY, state)
    sick = np.isnan(np.asarray(found))
    assert_replicas_equal(sick)
    assert 0 < sick[0].sum() <= BUCKET
    kept, before = (owners_errors(s[0], 500) for s in (after, state))
    np.testing.assert_array_equal(kept[sick[0]], before[sick[0]])
    assert np.all(np.isfinite(kept))
    assert np.mean(kept != before) > 0.5


def train(optimizer, every, steps):
    """Every worker's parameters after each step."""
    mesh, (params, batches) = auto_mesh(N), problem(steps)
    opt_state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(opt_state)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), specs, P("data")),
        out_specs=(P("data"), specs),
    )  # fmt: skip
    def step(params, opt_state, x):
        own = jax.tree.map(lambda p: p[0], params)
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(own, x), opt_state, own)
        own = optax.apply_updates(own, updates)
        own = liec.average_every(every, opt_state.step, own, "data")
        return jax.tree.map(lambda p: p[None], own), opt_state

    params = jax.tree.map(lambda p: jnp.stack([p] * N), params)
    params = jax.device_put(params, NamedSharding(mesh, P("data")))
    found = []
    for x in batches:
        params, opt_state = step(params, opt_state, x)
        found.append(jax.device_get(params))
    assert step._cache_size() == 1
    assert opt_state.step == steps
    return found


def test_models_differ_until_they_are_averaged():
    """Every fourth step; on other steps all workers have models of their own."""
    optimizer = liec.liec(optax.sgd(0.3, momentum=0.5), "data", method=MINMAX)
    for number, models in enumerate(train(optimizer, 4, 9), start=1):
        for leaf in models.values():
            assert len({own.tobytes() for own in leaf}) == (1 if number % 4 == 0 else N)


def test_it_follows_plain_sgd():
    """Without loss all the way; with 3 bits the mean of the models stays near."""
    steps, (params, batches) = 12, problem(12)
    plain = [params]
    for x in batches:
        grads = jax.jit(jax.grad(loss_fn))(plain[-1], x)
        plain.append(jax.tree.map(lambda p, g: p - 0.3 * g, plain[-1], grads))
    for models, exact in zip(
        train(liec.liec(optax.sgd(0.3), "data", method=small(dq.F32())), 5, steps), plain[1:],
        strict=True,
    ):  # fmt: skip
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, [q] * N, atol=1e-6), models, exact)
    rounded = train(liec.liec(optax.sgd(0.3), "data", method=MINMAX), 5, steps)[-1]

    def square(tree, other):
        apart = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), tree, other)
        return sum(jax.tree.leaves(apart))

    apart = square(jax.tree.map(lambda p: p.mean(axis=0), rounded), plain[-1])
    assert 0 < apart < 0.004 * square(plain[0], plain[-1])  # 0.03 where errors are lost


@pytest.mark.parametrize(
    "method", [dq.DynamiQ(), dq.comparators.THC(), dq.comparators.OmniReduce()]
)
def test_methods_without_fixed_chunks_are_refused(method):
    with pytest.raises(
        ValueError, match=r"does not tell what its.*pass for example dq.comparators.MinMax"
    ):
        liec.liec(optax.sgd(0.1), "data", method=method)


def test_topologies_and_periods_are_refused():
    with pytest.raises(NotImplementedError, match=r"topology=Ring\(.*leave topology=None"):
        LocalError(ALONE).check(4, dq.Ring())
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        liec.average_every(0, jnp.int32(1), {}, "data")
    with pytest.raises(ValueError, match=r"liec|LocalError.*call dq.optax.init"):
        liec.liec(optax.sgd(0.1), "data", method=MINMAX).init({"w": jnp.ones(500)})
