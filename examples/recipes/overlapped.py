"""A pipeline: reductions run beside the backward pass.

    python examples/recipes/overlapped.py

prints

    loss 0.911
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import compression, loss_fn, mesh, normal, params, train

import dynamiq_jax as dq

kernels = normal(6, 256, 256) / 16
blocks = [{"kernel": kernel} for kernel in kernels]
params = jax.device_put({"blocks": blocks, "rest": params}, NamedSharding(mesh, P()))


def block(own, batch):
    return batch | {"x": batch["x"] + jnp.tanh(batch["x"] @ own["kernel"])}


def staged_loss(params, batch):
    functions = [block] * len(params["blocks"]) + [loss_fn]
    parts = [*params["blocks"], params["rest"]]
    return dq.overlapped(functions, parts, batch, "data", compression=compression)  # 1: new


params = train(staged_loss, params)
