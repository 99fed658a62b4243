"""HSDP: scattered natively over "fsdp", all-reduced compressed over "replica".

    python examples/recipes/hsdp.py

prints

    loss 1.407, a device holds (16, 4096)
"""

import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from start import normal

import dynamiq_jax as dq


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


params = {"up": normal(64, 4096) / 8, "down": normal(4096, 64) / 64}
x, y = normal(2, 16, 64)
axes = ("replica", "fsdp")
mesh = dq.make_mesh((2, -1), axes, axis_types=(AxisType.Auto,) * 2)
specs = {"up": P("fsdp"), "down": P("fsdp")}
compression = dq.Compression(topology=dq.Hierarchical())
step = dq.value_and_grad(loss_fn, mesh=mesh, axis_name=axes, specs=specs, compression=compression)
loss, grads = step(params, x, y)
print(f"loss {loss:.3f}, a device holds {grads['up'].addressable_shards[0].data.shape}")
