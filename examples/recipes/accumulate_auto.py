"""Accumulates the sums of tokens of micro-batches on Auto axes; reduces once.

    python examples/recipes/accumulate_auto.py

prints

    92 tokens
"""

import jax
import jax.numpy as jnp
import numpy as np
from start import batches, compression, mesh, params, rng

import dynamiq_jax as dq

masked = batches[0] | {"mask": np.float32(rng.random(64) < 0.7)}


def token_sum(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"])
    errors = jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["mask"]), {"tokens": jnp.sum(batch["mask"])}


grad_fn = dq.value_and_grad(
    token_sum, has_aux=True, mesh=mesh, axis_name="data", op="sum", unreduced=True,
    compression=compression,
)  # fmt: skip


@jax.jit
def window(params, batches):
    terms, total = None, 0.0
    for batch in batches:  # or a scan, as in explicit_axes.py
        (_, aux), more = grad_fn(params, batch)
        terms = more if terms is None else jax.tree.map(jnp.add, terms, more)
        total += aux["tokens"]
    grads = dq.psum(terms, "data", compression=compression)
    return jax.tree.map(lambda g: g / total, grads), total


grads, total = window(params, [masked, masked])
print(f"{int(total)} tokens")
