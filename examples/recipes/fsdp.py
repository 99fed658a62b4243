"""FSDP, layer by layer, and the specs of an optimizer's moments.

    python examples/recipes/fsdp.py

prints

    loss 1.196
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from start import compression, mesh, normal, train

import dynamiq_jax as dq

specs = {"kernel": P(None, "data"), "scale": P()}  # of stacked layers
of_layer = {"kernel": P("data"), "scale": P()}
layers = {"kernel": normal(6, 256, 256) / 16, "scale": np.ones((6, 256), np.float32)}
layers = {k: jax.device_put(layers[k], NamedSharding(mesh, specs[k])) for k in specs}


@jax.checkpoint
def layer(x, own):
    own = jax.tree.map(lambda w: w.astype(jnp.bfloat16), own)
    own = dq.fsdp(own, "data", compression=compression, specs=of_layer)  # 1: new
    return x + jnp.tanh(x.astype(jnp.bfloat16) * own["scale"] @ own["kernel"]), None


def sharded_loss(layers, batch):
    x, _ = lax.scan(layer, batch["x"], layers)
    return jnp.mean((x - batch["x"][:, ::-1]) ** 2)


layers = train(sharded_loss, layers, specs, rate=5.0)


adam = optax.adamw(1e-3)
state_specs = optax.tree_map_params(
    adam, lambda _, spec: spec, jax.eval_shape(adam.init, layers), specs,
    transform_non_params=lambda _: P(),
)  # fmt: skip
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs)
opt_state = jax.jit(adam.init, out_shardings=shardings)(layers)
