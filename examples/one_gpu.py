"""Trains a small network on one GPU, with checkpoints; `four_hosts.py` is the same on four hosts.

    python examples/one_gpu.py runs/one

prints a line every 20 steps, and goes on from the newest checkpoint. It needs JAX, optax and orbax:

    step   80  loss 0.1265
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

STEPS, BATCH, WIDTH = 80, 64, 512


def loss_fn(params, batch):
    """The mean squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    hidden = jnp.tanh(hidden @ params["middle"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def read_batch(step):
    """The examples of a step, f32."""
    x = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :64])}


sizes = {"in": WIDTH, "middle": WIDTH, "out": 64}
pairs = zip(jax.random.split(jax.random.key(0), 3), sizes.items(), strict=True)
params = {name: jax.random.normal(key, (WIDTH, n)) / WIDTH**0.5 for key, (name, n) in pairs}
optimizer = optax.adamw(2e-3)
opt_state = optimizer.init(params)
grad_fn = jax.value_and_grad(loss_fn)


@jax.jit
def train_step(params, opt_state, batch):
    """The next parameters and optimizer state, and the loss."""
    loss, grads = grad_fn(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


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
        print(f"step {step:4}  loss {loss:.4f}", flush=True)
checkpoints.wait_until_finished()
