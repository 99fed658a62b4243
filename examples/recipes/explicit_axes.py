"""A trainer written for jax.jit, with masks, micro-batches and aux, on Explicit axes.

    python examples/recipes/explicit_axes.py

prints

    loss 1.753 of 84 tokens
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import compression, normal, rng

import dynamiq_jax as dq

axes = ("data", "fsdp")
tensor = 2 if jax.device_count() > 2 else 1
trainer_mesh = dq.make_mesh((-1, 2, tensor), (*axes, "tensor"))
specs = {"up": P("fsdp", "tensor"), "scale": P("tensor"), "down": P("tensor", "fsdp")}
shapes = {"up": (256, 1024), "scale": (1024,), "down": (1024, 256)}


def tokens_loss(weights, batch, total):
    x, mask = batch["x"], batch["mask"]
    hidden = jnp.tanh(x @ weights["up"]) * (1 + weights["scale"])
    out = jnp.einsum("bh,ho->bo", hidden, weights["down"], out_sharding=P(axes))
    errors = jnp.mean((out - jnp.sin(x)) ** 2, axis=-1) * mask
    return jnp.sum(errors) / total, {"tokens": jnp.sum(mask), "errors": errors}


grad_fn = dq.value_and_grad(  # 1: was jax.value_and_grad(tokens_loss, has_aux=True)
    tokens_loss, has_aux=True, axis_name=axes, compression=compression, unreduced=True
)
adam = optax.adamw(1e-3)


@dq.jit
def train_step(weights, opt_state, batches):
    total = jnp.sum(batches["mask"])  # over all workers and micro-batches

    def micro_step(sums, batch):
        (loss, aux), grads = grad_fn(weights, batch, total)
        return jax.tree.map(jnp.add, sums, grads), (loss, aux)

    first = jax.tree.map(lambda x: x[0], batches)
    _, like = jax.eval_shape(grad_fn, weights, first, total)
    zeros = jax.tree.map(jnp.zeros_like, like)
    grads, (losses, aux) = lax.scan(micro_step, zeros, batches)
    grads = dq.psum(grads, axes, compression=compression, specs=specs)  # 2: new; once in a step
    updates, opt_state = adam.update(grads, opt_state, weights)
    return optax.apply_updates(weights, updates), opt_state, jnp.sum(losses), aux


with jax.set_mesh(trainer_mesh):
    weights = {k: jax.device_put(normal(*shapes[k]) / 16, specs[k]) for k in specs}
    state = adam.init(weights)
    for _ in range(4):
        batch = {"x": normal(2, 64, 256), "mask": np.float32(rng.random((2, 64)) < 0.7)}
        batch = jax.device_put(batch, P(None, axes))
        weights, state, loss, aux = train_step(weights, state, batch)
print(f"loss {loss:.3f} of {int(jnp.sum(aux['tokens']))} tokens")
