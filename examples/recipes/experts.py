"""A layer of experts on different workers; tokens travel at 8.5 bits, there and back.

    python examples/recipes/experts.py

prints

    loss 0.471, 2 experts on each
"""

import os
from functools import partial

# Of the CPU; GPUs stay as they are.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import dynamiq_jax as dq

mesh = dq.make_mesh((-1,), ("data",))
compression = dq.Compression(dq.DynamiQ(bits=8.5), min_bucket_bytes=0)  # 0: however few the tokens
exchange = partial(dq.all_to_all, axis_name="data", tiled=True, compression=compression)


def layer(experts, router, x):  # x [tokens, dim] of one worker, experts [own ones, dim, dim]
    n_experts = router.shape[1]
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
    places = int(1.25 * chosen.size / n_experts)  # of each expert, for one worker's tokens
    order = jax.nn.one_hot(chosen.T.reshape(-1), n_experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(order, axis=0) - 1) * order, axis=1).reshape(2, -1).T
    sent = jnp.zeros((n_experts, places, x.shape[1]))
    sent = sent.at[chosen, place].set(x[:, None], mode="drop")  # drops what finds no place
    own = exchange(sent, split_axis=0, concat_axis=1)  # [own experts, workers x places, dim]
    back = exchange(jnp.tanh(own @ experts), split_axis=1, concat_axis=0)
    found = back.at[chosen, place].get(mode="fill", fill_value=0)
    return jnp.sum(found * weight[..., None], axis=1)


mapped = jax.shard_map(layer, mesh=mesh, out_specs=jax.P("data"))  # no in_specs: as sharded


def loss(params, x):
    return jnp.mean((mapped(params["experts"], params["router"], x) - jnp.sin(x)) ** 2)


def put(x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


keys = jax.random.split(jax.random.key(0), 3)
params = {"experts": put(jax.random.normal(keys[0], (16, 256, 256)) / 16, "data")}  # two on each
params["router"] = put(jax.random.normal(keys[1], (256, 16)) / 16)
x = put(jax.random.normal(keys[2], (8 * 256, 256)), "data")
grad_fn = dq.value_and_grad(  # keeps shards
    loss, axis_name="data", compression=compression, ungathered=True
)
value, grads = dq.jit(grad_fn)(params, x)
print(f"loss {value:.3f}, {params['experts'].addressable_shards[0].data.shape[0]} experts on each")
