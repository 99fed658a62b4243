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


def net_loss(net, batch):
    return jnp.mean((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2)


with jax.set_mesh(dq.make_mesh((-1,), ("data",))):
    net = eqx.nn.MLP(256, 8, 512, 2, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(net, eqx.is_array)
    net = eqx.combine(jax.device_put(arrays, P()), static)
    optimizer = dq.optax.sharded(  # 1: was optax.adam(1e-3)
        optax.adam(1e-3), "data", compression=compression
    )
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    grad_fn = dq.equinox.filter_value_and_grad(  # 2: was eqx.filter_value_and_grad
        net_loss, axis_name="data", compression=compression, unreduced=True
    )

    @eqx.filter_jit
    def net_step(net, opt_state, batch):
        loss, grads = grad_fn(net, batch)
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(net, updates), opt_state, loss

    for batch in batches:
        net, opt_state, loss = net_step(net, opt_state, jax.device_put(batch, P("data")))
print(f"loss {loss:.3f}")
