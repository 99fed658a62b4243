"""Dropout, masks and aux on Auto axes: how the workers' results are combined.

    python examples/recipes/auto_axes.py

prints

    loss 0.805 of 46 tokens, 64 rows
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from start import batches, compression, mesh, params, rng

import dynamiq_jax as dq


def dropout_loss(params, batch, dropout, *, rate):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"])
    kept = jax.random.bernoulli(dropout, 1 - rate, hidden.shape)  # each worker's own
    out = hidden * kept @ params["out"]["kernel"]
    errors = jnp.mean((out - batch["y"]) ** 2, axis=-1)
    tokens = jnp.sum(batch["mask"])
    mean = jnp.sum(errors * batch["mask"]) / jnp.maximum(tokens, 1)
    return mean, {"tokens": tokens, "errors": errors}


grad_fn = dq.value_and_grad(  # 1: was jax.value_and_grad(dropout_loss, has_aux=True)
    dropout_loss, has_aux=True, mesh=mesh, axis_name="data", compression=compression,
    weight=lambda params, batch, *_, **__: jnp.sum(batch["mask"]),  # a worker's weight
    aux={"tokens": "sum", "errors": "rows"},
)  # fmt: skip
masked = batches[0] | {"mask": np.float32(rng.random(64) < 0.7)}
grad_fn = jax.jit(functools.partial(grad_fn, rate=0.1))
(loss, aux), grads = grad_fn(params, masked, jax.random.key(0))
print(f"loss {loss:.3f} of {int(aux['tokens'])} tokens, {aux['errors'].size} rows")
