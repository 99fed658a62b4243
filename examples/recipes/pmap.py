"""Sharded updates under jax.pmap.

    python examples/recipes/pmap.py

prints

    loss 0.344
"""

import functools

import jax
import optax
from flax.jax_utils import replicate
from start import batches, compression, loss_fn, params

import dynamiq_jax as dq
import dynamiq_jax.optax

rule = dq.optax.sharded(optax.adam(1e-3), "data", compression=compression)
per_device = replicate(jax.device_get(params))
opt_state = jax.pmap(rule.init, axis_name="data")(per_device)


@functools.partial(jax.pmap, axis_name="data")
def pmap_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = rule.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")


for batch in batches:
    # A part for each device:
    batch = jax.tree.map(lambda x: x.reshape(jax.device_count(), -1, *x.shape[1:]), batch)
    per_device, opt_state, loss = pmap_step(per_device, opt_state, batch)
print(f"loss {loss[0]:.3f}")
