"""The start of all recipes: a mesh, a small model, batches of data, and plain SGD.

Recipes run on 8 virtual devices of a CPU, or on an even number of GPUs, and need the extra
``[train]``. Lines that change in a training script are marked ``# 1`` to ``# 3``. What a recipe
prints is from 8 virtual devices; last digits vary.
"""

import os

# Of the CPU; GPUs stay as they are.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

mesh = dq.make_mesh((-1,), ("data",), axis_types=(AxisType.Auto,))
compression = dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)  # 0: small buckets, too
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


inputs = normal(12, 64, 256)  # 12 batches of 64 rows
batches = [{"x": x, "y": np.tanh(x[:, :8])} for x in inputs]
params = {
    "hidden": {"kernel": normal(256, 1024) / 16},
    "norm": {"scale": np.ones(1024, np.float32)},
    "out": {"kernel": normal(1024, 8) / 32},
}
params = jax.device_put(params, NamedSharding(mesh, P()))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"]) * params["norm"]["scale"]
    return jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2)


def sgd(params, grads, rate=0.01):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def train(loss_fn, params, specs=P(), rate=0.01):
    """Trains by a loss that reduces its own gradients."""

    @dq.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, rate), lax.pmean(loss, "data")

    for batch in batches:
        params, loss = step(params, batch)
    print(f"loss {loss:.3f}")
    return params
