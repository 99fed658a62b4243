"""`dq.optax.sharded` on a GPU: simulated workers on one, and real ones where there are several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import promoting
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax

WORKERS = 4
LIMITS = {"min_leaf_size": 1024, "min_bucket_bytes": 0}


def problem(n):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (512, 1024)) / 22,
        "out": jax.random.normal(keys[1], (1024, 512)) / 32,
        "scale": jnp.ones(512),
    }
    return params, jax.random.normal(keys[2], (3, 64 * n, 512))


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] * params["scale"] - 1))


def make(backend):
    gradients = dq.Compression(dq.DynamiQ(backend=backend), **LIMITS)
    differences = dq.DynamiQ(bits=2.5, dither=True, backend=backend)
    options = {"method": gradients, "differences": dq.Compression(differences, **LIMITS)}
    return dq.optax.sharded(optax.adamw(1e-2), "data", max_norm=1.0, **options)


def simulated(backend):
    """Parameters and masters after three steps of workers that one GPU plays."""
    optimizer, (params, batches) = promoting(make(backend)), problem(WORKERS)
    rows = batches.reshape(3, WORKERS, -1, 512)

    def one(x):
        own, state = params, optimizer.init(params)
        for batch in x:
            grads = jax.grad(loss_fn)(own, batch)
            updates, state = optimizer.update(grads, state, own)
            own = optax.apply_updates(own, updates)
        return own, state.masters

    return jax.jit(jax.vmap(one, in_axes=1, axis_name="data"))(rows)


def test_kernels_give_the_bits_of_the_reference():
    copies, masters = simulated("triton")
    expected, _ = simulated("jnp")
    for name, copy in copies.items():
        np.testing.assert_array_equal(copy, np.broadcast_to(copy[:1], copy.shape))
        np.testing.assert_allclose(copy, expected[name], rtol=2e-2, atol=2e-3)
    gap = copies["in"][0] - masters["in"].reshape(512, 1024)
    step = 1e-2 * gap.size**0.5  # the norm of one step of AdamW, of which an encoding loses a half
    assert 0 < float(jnp.linalg.norm(gap)) < 0.6 * step


def test_real_workers_train_and_have_equal_copies():
    n = jax.device_count()
    if n < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {n}")
    mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer, (params, batches) = promoting(make(None)), problem(n)
    state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(state)

    @dq.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    def step(params, state, x):
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    losses = []
    for x in [*batches] * 4:
        params, state, loss = step(params, state, x)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    for x in jax.tree.leaves(params):
        first, *others = x.addressable_shards
        for other in others:
            np.testing.assert_array_equal(other.data, first.data)
    assert state.masters["in"].addressable_shards[0].data.shape == (512 // n, 1024)
