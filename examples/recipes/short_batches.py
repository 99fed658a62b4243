"""Batches that end early on some processes.

    python examples/recipes/short_batches.py

prints

    loss 0.580 of the last 5 rows
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import batches, compression, mesh, params, sgd

import dynamiq_jax as dq


def filled(batch, rows):
    """The batch with a mask of its rows, filled up with zeros to so many rows."""
    missing = rows - len(batch["x"])
    mask = np.float32(np.arange(rows) < len(batch["x"]))
    pad = lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
    return jax.tree.map(pad, batch) | {"mask": mask}


def masked_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"]) * params["norm"]["scale"]
    errors = jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2, axis=-1)
    return jnp.sum(batch["mask"] * errors) / jnp.maximum(jnp.sum(batch["mask"]), 1)


grad_fn = jax.jit(
    dq.value_and_grad(
        masked_loss, mesh=mesh, axis_name="data", compression=compression,
        weight=lambda params, batch: jnp.sum(batch["mask"]),  # 1: new
    )
)  # fmt: skip
rows = 64 // jax.process_count()  # of a process
first = jax.process_index() * rows
own = [jax.tree.map(lambda x: x[first : first + rows], batch) for batch in batches[:3]]
if jax.process_index() == 0:  # it has a short batch more
    own.append(jax.tree.map(lambda x: x[:5], batches[3]))
steps = int(np.max(multihost_utils.process_allgather(np.array(len(own)))))
nothing = jax.tree.map(lambda x: x[:0], own[0])
sharding = NamedSharding(mesh, P("data"))
for step in range(steps):
    batch = filled(own[step] if step < len(own) else nothing, rows)
    batch = jax.make_array_from_process_local_data(sharding, batch)
    loss, grads = grad_fn(params, batch)
    params = sgd(params, grads)
print(f"loss {loss:.3f} of the last 5 rows")
