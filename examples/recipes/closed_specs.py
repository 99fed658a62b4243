"""A loss in the step that closes over the batch and draws keys.

    python examples/recipes/closed_specs.py

prints

    loss 0.783
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from start import batches, compression, mesh, params

import dynamiq_jax as dq


class Keys:
    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, key = jax.random.split(self.key)
        return key


@jax.jit
def closing_step(params, batch, key):
    keys = Keys(key)

    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"])
        hidden = hidden * jax.random.bernoulli(keys(), 0.9, hidden.shape)
        return jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2)

    grad_fn = dq.value_and_grad(  # 1: was jax.value_and_grad(loss)
        loss, mesh=mesh, axis_name="data", compression=compression,
        closed_specs={"batch": P("data")},
    )  # fmt: skip
    value, grads = grad_fn(params)
    return value, grads, keys()


loss, grads, key = closing_step(params, batches[0], jax.random.key(0))
print(f"loss {loss:.3f}")
