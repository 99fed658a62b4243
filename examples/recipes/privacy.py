"""DP-SGD: each worker adds noise before the compressed sum.

    python examples/recipes/privacy.py

prints

    loss 0.813
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params, sgd

import dynamiq_jax as dq

CLIP, SIGMA = 1.0, 0.5


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
def private_step(params, batch, key):
    local = lax.pcast(params, "data", to="varying")
    of_one = lambda x, y: jax.grad(loss_fn)(local, {"x": x[None], "y": y[None]})
    each = jax.vmap(of_one)(batch["x"], batch["y"])
    norms = jax.vmap(optax.tree.norm)(each)
    clip = jnp.minimum(1.0, CLIP / norms)
    grads = jax.tree.map(lambda g: jnp.einsum("b,b...->...", clip, g), each)
    leaves, treedef = jax.tree.flatten(grads)
    own = jax.random.fold_in(key, lax.axis_index("data"))  # noise of this worker's own
    keys = jax.random.split(own, len(leaves))
    noisy = [
        g + SIGMA * CLIP * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)
    ]
    total = dq.psum(treedef.unflatten(noisy), "data", compression=compression)  # 1: after the noise
    return sgd(params, total, 0.01 / 64)


for number, batch in enumerate(batches):
    params = private_step(params, batch, jax.random.fold_in(jax.random.key(0), number))
print(f"loss {loss_fn(params, batches[0]):.3f}")
