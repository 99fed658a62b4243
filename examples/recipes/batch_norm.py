"""BatchNorm with the statistics of all workers, in Flax Linen.

    python examples/recipes/batch_norm.py

prints

    loss 0.320
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from start import batches, compression, mesh, sgd

import dynamiq_jax as dq


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(1024)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name="data")(x)  # 1: new
        return nn.Dense(8)(nn.tanh(x))


def normed_loss(params, stats, batch):
    variables = {"params": params, "batch_stats": stats}
    out, new = Normed().apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]


variables = Normed().init(jax.random.key(0), batches[0]["x"])
weights, stats = variables["params"], variables["batch_stats"]
grad_fn = dq.value_and_grad(
    normed_loss, has_aux=True, mesh=mesh, axis_name="data", compression=compression,
    batch_specs={"stats": P()}, aux="same",  # 2: whole before, the same on all workers after
)  # fmt: skip


@jax.jit
def step(weights, stats, batch):
    (loss, stats), grads = grad_fn(weights, stats, batch)
    return sgd(weights, grads, 0.1), stats, loss


for batch in batches:
    weights, stats, loss = step(weights, stats, batch)
print(f"loss {loss:.3f}")
