"""A small training script for one GPU, changed so that it runs on four hosts.

`one_gpu.py` is the script for one GPU; docs/multihost.md explains the seven changes, which are
numbered here. On one host, with four virtual devices in the place of GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/four_hosts.py runs/four

Expect (2 x86-64 cores, JAX 0.10.2): a table of what travels, then

    step   20  loss 0.2926
    ...
    step   80  loss 0.1267
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import P

import dynamiq_jax as dq
import dynamiq_jax.optax

if "NUM_HOSTS" in os.environ:  # 1: every process finds the others
    hosts, own_id = int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"])
    jax.distributed.initialize(os.environ["COORDINATOR"], hosts, own_id)

STEPS, BATCH, WIDTH = 80, 64, 512
mesh = dq.make_mesh((-1,), ("data",))  # 2: all GPUs of all hosts
jax.set_mesh(mesh)
bits5 = dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)  # 0: small buckets, too


def loss_fn(params, batch):
    """The mean squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    hidden = jnp.tanh(hidden @ params["middle"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def read_batch(step):
    """The examples of a step, f32."""
    x = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    rows = np.split(np.arange(BATCH), jax.process_count())[jax.process_index()]
    own = {"x": x[rows], "y": np.sin(x[rows, :64])}  # 3: each process its own rows
    split = jax.NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(split, a), own)


sizes = {"in": WIDTH, "middle": WIDTH, "out": 64}
pairs = zip(jax.random.split(jax.random.key(0), 3), sizes.items(), strict=True)
params = {name: jax.random.normal(key, (WIDTH, n)) / WIDTH**0.5 for key, (name, n) in pairs}
params = jax.device_put(params, P())  # 4: a copy on every GPU
optimizer = dq.optax.sharded(optax.adamw(2e-3), "data", compression=bits5)  # 5: was optax.adamw
opt_state = optimizer.init(params)
grad_fn = dq.value_and_grad(loss_fn, axis_name="data", compression=bits5, unreduced=True)  # 6: dq


@dq.jit
def train_step(params, opt_state, batch):
    """The next parameters and optimizer state, and the loss."""
    loss, grads = grad_fn(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


bits5.check_agreement(params, mesh, "data")  # 7: raises on all hosts if options differ
if jax.process_index() == 0:
    dq.explain(params, mesh.size, compression=bits5)
checkpoints = ocp.CheckpointManager(Path(sys.argv[1]).absolute())
first = 0
if (newest := checkpoints.latest_step()) is not None:
    leaves, treedef = jax.tree.flatten((params, opt_state))
    restored = checkpoints.restore(newest, args=ocp.args.StandardRestore(leaves))
    (params, opt_state), first = treedef.unflatten(restored), newest
for step in range(first + 1, STEPS + 1):
    params, opt_state, loss = train_step(params, opt_state, read_batch(step))
    if step % 20 == 0:
        leaves = jax.tree.leaves((params, opt_state))
        checkpoints.save(step, args=ocp.args.StandardSave(leaves))
        if jax.process_index() == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)
checkpoints.wait_until_finished()
