"""LoRA over a frozen base that is encoded once and gathered at 8 bits.

    python examples/recipes/lora.py

prints

    loss 0.578, 8.0 bits a coordinate
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, mesh, normal, sgd

import dynamiq_jax as dq

base = {"up": normal(256, 512) / 16, "down": normal(512, 256) / 22}
adapters = {k: (normal(n, 4) / 16, np.zeros((4, m), "f")) for k, (n, m) in
            {"up": (256, 512), "down": (512, 256)}.items()}  # fmt: skip
eight_bits = dq.Compression(dq.DynamiQ(bits=8), min_bucket_size=1, min_bucket_bytes=0)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def packed_once(shards):
    return dq.optax.pack(shards, "data", compression=eight_bits)  # 1: before training


def adapted_loss(adapters, base, batch):
    whole = {k: base[k] + a @ b for k, (a, b) in adapters.items()}
    found = jnp.tanh(batch["x"] @ whole["up"]) @ whole["down"]
    return jnp.mean((found[:, :8] - batch["y"]) ** 2)


@dq.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
def adapter_step(adapters, packed, batch):
    base = dq.all_gather(packed, "data", tiled=True)  # 2: the payloads, of 8 bits
    own = lax.pcast(adapters, "data", to="varying")
    loss, grads = jax.value_and_grad(adapted_loss)(own, base, batch)
    grads = dq.pmean(grads, "data", compression=compression)
    return sgd(adapters, grads, rate=2.0), lax.pmean(loss, "data")


packed = packed_once(base)
for batch in batches:
    adapters, loss = adapter_step(adapters, packed, batch)
kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(packed))
print(f"loss {loss:.3f}, {8 * 8 * kept / sum(w.size for w in base.values()):.1f} bits a coordinate")
