"""An outer step of two islands that have trained alone (DiLoCo).

    python examples/recipes/islands.py

prints

    every weight is near 0.78
"""

import os
from functools import partial

# Of the CPU; GPUs stay as they are.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import dynamiq_jax as dq

mesh = dq.make_mesh((2, -1), ("island", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
params = {"up": jnp.ones((512, 1024)), "down": jnp.ones((1024, 512))}
specs = jax.tree.map(lambda _: jax.P(None, "data"), params)  # a device sends its part alone
rule = optax.sgd(0.7, 0.6, nesterov=True)
compression = dq.Compression(dq.DynamiQ(bits=4), min_bucket_bytes=0)  # 0: small buckets, too
outer = dq.optax.sharded(rule, "island", compression=compression, specs=specs)
params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
state = dq.optax.init(outer, params, mesh)
held = dq.optax.state_specs(state)
apart = jax.tree.map(lambda _: jax.P("island", None, "data"), params)


@dq.jit
@partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(specs, held, apart, jax.P("island")),
    out_specs=(specs, held),
)
def outer_step(params, state, local, weight):
    share = weight[0] / jax.lax.pmean(weight[0], "island")
    moved = jax.tree.map(
        lambda a, b: jnp.where(weight[0] > 0, (a - b[0]) * share, 0), params, local
    )
    updates, state = outer.update(moved, state, params)
    return optax.apply_updates(params, updates), state


local = jax.tree.map(lambda x: jnp.stack([x - 0.1, x - 0.3]), params)  # of each island
params, state = outer_step(params, state, local, jnp.array([1.0, 1.0]))
print(f"every weight is near {params['up'].mean():.2f}")
