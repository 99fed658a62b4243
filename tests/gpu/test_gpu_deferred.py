"""Gradients that stay unreduced on Explicit meshes, on GPUs: exact sums, copies, penalties."""

import jax
import jax.numpy as jnp
import pytest
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
