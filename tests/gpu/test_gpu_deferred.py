"""Gradients that stay unreduced on Explicit meshes, on GPUs: exact sums, copies, penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

F32 = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0, exclude="bias")
FIVE_BITS = dq.Compression(dq.DynamiQ(), min_leaf_size=0, min_bucket_size=0, exclude="bias")


@pytest.fixture(scope="module")
def problem():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {len(devices)}")
    mesh = jax.make_mesh((len(devices),), ("data",))
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (512, 2048)) / 23,
        "bias": jax.random.normal(keys[1], (2048,)),
        "down": jax.random.normal(keys[2], (2048, 512)) / 45,
    }
    x = jax.random.normal(keys[3], (64, 512)) * jnp.linspace(0.2, 2.0, 64)[:, None]
    mask = jnp.float32(jnp.arange(64.0) % 5 < jnp.linspace(1, 4, 64))
    plain = params, {"x": x, "mask": mask}
    placed = (
        jax.device_put(params, NamedSharding(mesh, P())),
        jax.device_put(plain[1], NamedSharding(mesh, P("data"))),
    )
    return mesh, jax.device_get(plain), placed


def masked(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    errors = jnp.mean(jnp.square(hidden @ params["down"] - batch["x"]), axis=-1)
    return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


LOSSES = {
    "masked": masked,
    "linear penalty": lambda p, b: masked(p, b) + jnp.sum(p["up"]),
    "penalty": lambda p, b: masked(p, b) + jnp.sum(jnp.tanh(p["up"])),
    "factor": lambda p, b: masked(p, b) * jnp.sum(jnp.tanh(p["up"])),
    "checkpointed": lambda p, b: jax.checkpoint(
        lambda p: masked(p, b) + jnp.sum(jnp.tanh(p["up"]))
    )(p),
    "parameters alone": lambda p, b: jnp.sum(jnp.square(p["up"])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_global_loss(problem, name):
    _, plain, placed = problem
    loss = LOSSES[name]
    with jax.default_matmul_precision("highest"):
        value, grads = jax.jit(dq.value_and_grad(loss, axis_name="data", method=F32))(*placed)
        expected_value, expected = jax.jit(jax.value_and_grad(loss))(*plain)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-4)
    assert float(vnmse(jax.device_get(grads), jax.device_get(expected))) < 1e-8


def test_compressed_gradients_have_equal_copies(problem):
    _, plain, placed = problem
    f = jax.jit(dq.value_and_grad(masked, axis_name="data", method=FIVE_BITS))
    _, grads = f(*placed)
    expected = jax.grad(masked)(*plain)
    assert 1e-4 < float(vnmse(jax.device_get(grads), jax.device_get(expected))) < 0.06
    for leaf in jax.tree.leaves(grads):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            assert_same_bits(other, first)


def test_a_window_is_summed_once(problem):
    mesh, _, (params, batch) = problem
    micro = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), batch)

    def window(f, reduce_grads):
        def add(total, own):
            loss, grads = f(params, own)
            return jax.tree.map(jnp.add, total, grads), loss

        first = jax.tree.map(lambda x: x[0], micro)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(f, params, first)[1])
        return reduce_grads(lax.scan(add, zeros, micro)[0])

    f = dq.value_and_grad(masked, axis_name="data", method=F32, reduce=False)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        ours = jax.jit(lambda: window(f, lambda g: dq.psum(g, "data", method=F32)))()
        native = jax.jit(lambda: window(jax.value_and_grad(masked), lambda g: g))()
    assert float(vnmse(jax.device_get(ours), jax.device_get(native))) < 1e-8
