"""Flax Linen's lookups and dropout on Explicit axes.

    python examples/recipes/linen_explicit.py

prints

    loss 0.974
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from start import compression, rng, sgd

import dynamiq_jax as dq

tokens_mesh = dq.make_mesh((-1,), ("data",))


def sharded_dropout(x, key, rate):  # for nn.Dropout
    kept = jax.random.bernoulli(key, 1 - rate, x.shape, out_sharding=jax.typeof(x).sharding)
    return jnp.where(kept, x / (1 - rate), 0)


class TokenModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(64, 256).embedding
        rows = P(*jax.typeof(ids).sharding.spec, None)
        x = table.at[ids].get(out_sharding=rows)  # for nn.Embed(64, 256)(ids)
        x = sharded_dropout(x, self.make_rng("dropout"), rate=0.1)
        return nn.Dense(64)(nn.tanh(x))


def next_loss(params, ids, key):
    logits = TokenModel().apply({"params": params}, ids[:, :-1], rngs={"dropout": key})
    found = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.sum(found * jax.nn.one_hot(ids[:, 1:], 64), axis=-1))


@jax.jit
def token_step(weights, ids, key):
    grad_fn = dq.value_and_grad(next_loss, axis_name="data", compression=compression)
    loss, grads = grad_fn(weights, ids, key)
    return sgd(weights, grads, rate=5.0), loss


ids = np.cumsum(rng.integers(1, 3, (64, 16)), axis=1) % 64
with jax.set_mesh(tokens_mesh):
    key, ids = jax.random.key(0), jax.device_put(ids, P("data"))
    weights = TokenModel().init({"params": key, "dropout": key}, ids[:, :-1])["params"]
    for i in range(12):
        weights, loss = token_step(weights, ids, jax.random.fold_in(key, i))
print(f"loss {loss:.3f}")
