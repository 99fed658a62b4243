"""A sharding constraint inside the loss, on Auto axes.

    python examples/recipes/constraints.py

prints

    loss 1.407, a device holds (64, 2048)
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from start import normal

import dynamiq_jax as dq


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


params = {"up": normal(64, 4096) / 8, "down": normal(4096, 64) / 64}
x, y = normal(2, 16, 64)

tensor = 2 if jax.device_count() > 2 else 1
mesh = dq.make_mesh((-1, tensor), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def constrained(params, x, y):
    hidden = jnp.tanh(x @ params["up"])
    # Under the map it is P(None, "model").
    hidden = dq.with_sharding_constraint(hidden, P("data", "model"))  # 1: was jax.lax's
    return jnp.mean((hidden @ params["down"] - y) ** 2)


specs = {"up": P(None, "model"), "down": P("model", None)}
step = dq.value_and_grad(constrained, mesh=mesh, axis_name="data", specs=specs)
loss, grads = step(params, x, y)
print(f"loss {loss:.3f}, a device holds {grads['up'].addressable_shards[0].data.shape}")
