"""An equinox network with sharded updates, on Explicit axes.

    python examples/recipes/equinox_net.py

prints

    loss 0.182
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from start import batches, compression

import dynamiq_jax as dq
import dynamiq_jax.optax


def net_loss(params, static, batch):
    out = jax.vmap(eqx.combine(params, static))(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2)


with jax.set_mesh(dq.make_mesh((-1,), ("data",))):
    net = eqx.nn.MLP(256, 8, 512, 2, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    params = jax.device_put(params, P())
    optimizer = dq.optax.sharded(  # 1: was optax.adam(1e-3)
        optax.adam(1e-3), "data", compression=compression
    )
    opt_state = optimizer.init(params)
    grad_fn = dq.value_and_grad(  # 2: was jax.value_and_grad(net_loss)
        net_loss, axis_name="data", compression=compression, unreduced=True
    )

    @eqx.filter_jit
    def net_step(params, opt_state, batch):
        loss, grads = grad_fn(params, static, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    for batch in batches:
        params, opt_state, loss = net_step(params, opt_state, jax.device_put(batch, P("data")))
net = eqx.combine(params, static)
print(f"loss {loss:.3f}")
