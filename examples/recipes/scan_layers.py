"""Reduces the gradients of stacked layers beside the backward pass of the scan over them.

    python examples/recipes/scan_layers.py

prints

    loss 0.911
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import compression, loss_fn, mesh, normal, params, train

import dynamiq_jax as dq

layers = {"kernel": normal(6, 256, 256) / 16}
params |= {"layers": jax.device_put(layers, NamedSharding(mesh, P()))}


def scanned_loss(params, batch):
    rest = {name: value for name, value in params.items() if name != "layers"}
    rest = dq.fsdp(rest, "data", compression=compression)  # 1: new

    def layer(x, own):
        return x + jnp.tanh(x @ own["kernel"]), None

    x, _ = dq.scan(  # 2: was lax.scan
        layer, batch["x"], params["layers"], "data", compression=compression
    )
    return loss_fn(rest, batch | {"x": x})


params = train(scanned_loss, params)
