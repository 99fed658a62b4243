"""Tables and buffers that are whole on every worker.

    python examples/recipes/batch_specs.py

prints

    loss 0.821
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from start import batches, compression, mesh, params

import dynamiq_jax as dq


def table_loss(params, batch, table, *, buffers):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"])
    out = (hidden @ params["out"]["kernel"]) * table[batch["label"]][:, None]
    return jnp.mean((out - batch["y"]) ** 2) * buffers["scale"][0]


whole = {"table": P(), "buffers": P()}
grad_fn = dq.value_and_grad(
    table_loss, mesh=mesh, axis_name="data", compression=compression, batch_specs=whole
)
labelled = batches[0] | {"label": np.arange(64)}
buffers = {"scale": np.ones(64, np.float32)}
loss, grads = jax.jit(grad_fn)(params, labelled, np.ones(64, np.float32), buffers=buffers)
print(f"loss {loss:.3f}")
