"""Training steps as users write them: they skip bad steps alike, and compile once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import (
    EVERY_METHOD,
    assert_replicas_equal,
    auto_mesh,
    bits_of,
    compilations,
    daily,
    first_state,
    promoting,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

N = 8
SHAPE = (48, 50)
"""The parameters' shape: whole and started blocks for each of eight workers, for any method."""


def draw(seed, n=N, shape=SHAPE):
    """A linear task: every worker's inputs, and targets of what is to be learnt."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 16, shape[0])).astype(np.float32)
    return x, x @ np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def loss_of(w, x, y):
    return jnp.mean((x @ w - y).astype(jnp.float32) ** 2)


# --- Skipping bad steps ---------------------------------------------------------------------------

LIMITS = {"min_leaf_size": 100, "min_bucket_size": 100}
SKIPPING = {
    "dynamiq": dq.Compression(dq.DynamiQ(widths=(4,)), **LIMITS),
    "thc, memory": dq.Compression(dq.ErrorFeedback(dq.comparators.THC(piece_size=1024)), **LIMITS),
}


PATIENCE = 3


def next_scale(scale, good, finite):
    """Dynamic loss scaling: halved by a bad step, doubled after `PATIENCE` good ones in a row."""
    good = jnp.where(finite, good + 1, 0)
    grow = good == PATIENCE
    scale = jnp.where(finite, jnp.where(grow, 2 * scale, scale), scale / 2)
    return scale, jnp.where(grow, 0, good)


def on_devices(one):
    """jit of `one` on eight devices, every one with its own copy of all that it carries."""

    def body(own, x, y):
        own, x, y = jax.tree.map(lambda a: a[0], (own, x, y))
        return jax.tree.map(lambda a: a[None], one(own, x, y))

    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(body, mesh=auto_mesh(N), **specs))


def copies(tree):
    """One for every device, where it belongs."""
    return jax.device_put(
        jax.tree.map(lambda a: jnp.stack([a] * N), tree), NamedSharding(auto_mesh(N), P("data"))
    )


def hash_of(tree):
    return [bits_of(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", daily(SKIPPING, ["thc, memory"]))
def test_apply_if_finite_skips_a_step_that_is_bad_on_one_worker(name):
    optimizer = promoting(optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=5))

    def one(own, x, y):
        w, opt_state, memory = own
        loss, grads = jax.value_and_grad(loss_of)(w, x, y)
        grads, memory, _ = dq.reduce(grads, "data", method=SKIPPING[name], state=memory)
        updates, opt_state = optimizer.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state, memory), (loss, grads)

    w = jnp.zeros(SHAPE)
    memory = as_compression(SKIPPING[name]).init_state(w, N)
    step, own = on_devices(one), copies((w, optimizer.init(w), memory))
    losses, skipped = [], 0
    for number in range(24):
        x, y = draw(number)
        bad = number in (4, 5, 11)
        if bad:
            x[number % N, 0, 7] = (np.nan, np.inf, -np.inf)[number % 3]
        before = own
        own, (loss, grads) = step(own, x, y)
        (w, opt_state, memory), skipped = own, skipped + bad
        assert_replicas_equal((w, opt_state, grads))
        np.testing.assert_array_equal(opt_state.last_finite, not bad)
        np.testing.assert_array_equal(opt_state.total_notfinite, skipped)
        unchanged = hash_of((w, opt_state.inner_state)) == hash_of((before[0], before[1][3]))
        assert unchanged == bad
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((w, memory)))
        losses.append(float(np.mean(loss)))
    assert losses[-1] < 0.5 * losses[0]
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", daily(SKIPPING, ["dynamiq"]))
def test_dynamic_loss_scaling_finds_its_scale_on_all_workers_alike(name):
    """f16 gradients: scales that are too large for the worker of largest data halve for all."""
    method = SKIPPING[name]

    def one(own, x, y):
        w, memory, scale, good = own

        def scaled(w):
            loss = loss_of(w, x.astype(jnp.float16), y.astype(jnp.float16))
            return scale * loss, loss

        grads, loss = jax.grad(scaled, has_aux=True)(w.astype(jnp.float16))
        here = jnp.all(jnp.isfinite(grads))
        grads = grads.astype(jnp.float32) / scale
        grads, memory, _ = dq.reduce(grads, "data", method=method, state=memory)
        finite = jnp.all(jnp.isfinite(grads))
        w = jnp.where(finite, w - 8 * grads, w)
        return (w, memory, *next_scale(scale, good, finite)), (loss, here, finite)

    step = on_devices(one)
    w = jnp.zeros(SHAPE)
    memory = as_compression(method).init_state(w, N)
    own = copies((w, memory, jnp.float32(2.0**22), jnp.int32(0)))
    losses, scales, alone = [], [], 0
    for number in range(40):
        x, y = draw(number)
        x[5], y[5] = 2 * x[5], 2 * y[5]
        before = own
        own, (loss, here, finite) = step(own, x, y)
        w, memory, scale, good = own
        assert_replicas_equal((w, scale, good, finite))
        alone += bool(0 < np.sum(here) < N)
        # No worker's overflow is lost, and nothing else is taken for one.
        assert finite[0] == np.all(here)
        assert (hash_of(w) == hash_of(before[0])) == (not finite[0])
        assert float(scale[0] / before[2][0]) in ((1, 2) if finite[0] else (0.5,))
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((w, memory)))
        losses.append(float(np.mean(np.asarray(loss, np.float64))))
        scales.append(float(scale[0]))
    assert alone > 0
    assert any(b > a for a, b in zip(scales[:-1], scales[1:], strict=True))
    assert losses[-1] < 0.5 * losses[0]
    assert step._cache_size() == 1


# --- Compiling once -------------------------------------------------------------------------------

ROUTE = {"dynamiq": "direct", "bf16": "native", "f32": "butterfly"}
"""The topology of a train step; of others the first."""


@pytest.mark.parametrize("name", daily(EVERY_METHOD, ["dynamiq", "marsit, full rounds"]))
def test_a_train_step_compiles_once_whatever_the_data_keys_and_norms(name):
    """value_and_grad, pmean and an optimizer, over norms of 1e-20 to 1e20 and a NaN."""
    row, n, shape = EVERY_METHOD[name], 4, (32, 33)
    method = row.method
    topology = row.routes.get(ROUTE.get(name, ""), next(iter(row.routes.values())))
    optimizer = promoting(optax.apply_if_finite(optax.sgd(0.5), max_consecutive_errors=9))

    def one(w, opt_state, memory, key, scale, x, y):
        loss, grads = jax.value_and_grad(loss_of)(w, x, y)
        options = {"method": method, "topology": topology, "key": key, "state": memory}
        grads, memory, _ = dq.reduce(scale * grads, "data", **options)
        updates, opt_state = optimizer.update(grads / scale, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, memory, jax.lax.pmean(loss, "data")

    own = (0, 0, 0)
    step = jax.jit(jax.vmap(one, in_axes=(*own, None, None, 0, 0), axis_name="data"))
    w = jnp.zeros((n, *shape))
    own = (
        w,
        jax.tree.map(lambda a: jnp.stack([a] * n), optimizer.init(w[0])),
        jax.device_put(first_state(method, w, n, topology)),  # as a step returns it
    )
    scales = [1, 1e-20, 1e-3, 1e20, 1, np.nan, 1, 1]
    arguments = [
        (jax.random.key(7 * i), np.float32(scale), *draw(i, n, shape))
        for i, scale in enumerate(scales)
    ]
    losses = []
    for i, rest in enumerate(arguments):
        before = own
        with compilations() as compiled:
            *own, loss = step(*own, *rest)
            losses.append(float(np.asarray(loss)[0]))
        assert len(compiled) == (i == 0)
        assert_replicas_equal((own[0], loss))
        assert np.all(np.isfinite(own[0]))
        # A running estimate that f32 holds at the size of 1 may lose gradients of 1e-20.
        if scales[i] != 1e-20 or getattr(method.method, "kind", "ef14") == "ef14":
            assert (hash_of(own[0]) == hash_of(before[0])) == np.isnan(scales[i])
    assert step._cache_size() == 1
    if not method.method.needs_state:  # whose memory of the step of 1e20 is delivered later
        assert losses[-1] < losses[0]
