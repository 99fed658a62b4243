"""One reduction for a window of batches, for optax.MultiSteps: unreduced gradients are added up.

    python examples/recipes/multi_steps.py

prints

    loss 0.608
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, params

import dynamiq_jax as dq
import dynamiq_jax.optax

WINDOW = 4


def window_loss(params, batch):  # a quarter: unreduced gradients cannot be divided
    return loss_fn(params, batch) / WINDOW


with jax.set_mesh(dq.make_mesh((-1,), ("data",))):
    weights = jax.device_put(jax.device_get(params), P())
    optimizer = dq.optax.sharded(  # 1: was optax.MultiSteps(optax.adam(1e-3), WINDOW)
        optax.adam(1e-3), "data", compression=compression
    )
    opt_state = optimizer.init(weights)
    grad_fn = dq.value_and_grad(  # 2
        window_loss, axis_name="data", compression=compression, unreduced=True
    )

    @dq.jit
    def window_step(weights, opt_state, window):
        def add(sums, batch):
            loss, grads = grad_fn(weights, batch)
            return jax.tree.map(jnp.add, sums, grads), loss

        first = jax.tree.map(lambda x: x[0], window)
        _, like = jax.eval_shape(grad_fn, weights, first)
        sums, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, like), window)  # 3: new
        updates, opt_state = optimizer.update(sums, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, jnp.sum(losses)

    for i in range(0, len(batches), WINDOW):
        window = jax.tree.map(lambda *x: np.stack(x), *batches[i : i + WINDOW])
        window = jax.device_put(window, P(None, "data"))
        weights, opt_state, loss = window_step(weights, opt_state, window)
print(f"loss {loss:.3f}")
