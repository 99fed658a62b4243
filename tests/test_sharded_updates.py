"""`dq.optax.sharded` on 8 devices: against plain optax on the whole batch, and its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import auto_mesh, promoting, small
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax

N = 8
EXACT = dq.Compression(dq.F32(), min_leaf_size=256)
LOSSY = dq.DynamiQ(bits=2.5, dither=True, backend="jnp")
FIVE = small(dq.DynamiQ(backend="jnp"))
KEY = jax.random.key(0)
RULES = {
    "adamw": optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(0.1, momentum=0.9),
}


def problem(dtype=jnp.float32):
    """Parameters of all kinds of leaves, and a batch of 32 rows for each of ten steps."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "in": jax.random.normal(keys[0], (16, 64)) / 4,
        "odd": jax.random.normal(keys[1], (63, 64)) / 8,  # its second dimension divides
        "neither": jax.random.normal(keys[3], (3, 5)) / 8,
        "scale": jnp.ones(64),
        "out": jax.random.normal(keys[2], (64, 8)) / 8,
    }
    return jax.tree.map(lambda x: x.astype(dtype), params), jax.random.normal(keys[4], (10, 32, 16))


def loss_fn(params, x):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    hidden = jnp.tanh(x @ params["in"]) * params["scale"][None]
    hidden = hidden + hidden[:, :63] @ params["odd"]
    bias = jnp.sum(params["neither"] ** 2)
    return jnp.mean(jnp.square(hidden @ params["out"] - 1 + bias))


def plain(inner, params, batches, max_norm=None):
    """Parameters after training on one device."""
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
    optimizer = promoting(optax.chain(clip, inner))

    @jax.jit
    def run(params, batches):
        def step(carry, x):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0]

    return run(params, batches)


@functools.cache
def stepper(optimizer, mesh, splits, check_vma=True):
    """jit of (params, opt_state, x) -> (params, opt_state) under a map."""
    specs = splits.value

    def step(params, opt_state, x):
        local = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        grads = jax.grad(loss_fn)(local, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    options = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs)}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **options))


class Held:
    """A value that `functools.cache` compares by identity."""

    def __init__(self, value):
        self.value = value


def train(optimizer, params, batches, n=N, state=None, **options):
    mesh = auto_mesh(n)
    state = dq.optax.init(optimizer, params, mesh) if state is None else state
    step = stepper(optimizer, mesh, Held(dq.optax.state_specs(state)), **options)
    for x in batches:
        params, state = step(params, state, x)
    return params, state


def assert_close(found, expected, rtol=2e-4):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=rtol, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_exact_halves_train_as_plain_optax_does(rule):
    params, batches = problem()
    options = {"method": EXACT, "differences": EXACT, "max_norm": 0.5}
    optimizer = promoting(dq.optax.sharded(RULES[rule], "data", **options))
    found, state = train(optimizer, params, batches[:4], check_vma=rule != "lion")
    expected, _ = plain(RULES[rule], params, batches[:4], 0.5)
    assert_close(found, expected)
    assert_close(state.masters, expected)
    assert int(state.step) == 4
    assert int(state.skipped) == 0
