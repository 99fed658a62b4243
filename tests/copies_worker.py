"""A training whose state is in the memory of hosts alone, for `dynamiq-jax run`.

    python copies_worker.py FOLDER OPTIMIZER STEPS SECONDS

The batch is the same for any number of hosts. "sharded" has masters and moments on their owners,
and exact sums. "memory" has DynamiQ with error feedback, and each worker's memory. The first
process writes the losses of all steps.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.experimental.multihost_utils
import jax.numpy as jnp
import numpy as np
import optax
from cases import EXACT, small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.hosts.copies import Copies

ROWS = 24
OPTIMIZERS = {
    "sharded": lambda: dq.optax.sharded(optax.adam(2e-2), "data", compression=EXACT),
    "memory": lambda: optax.chain(
        dq.optax.all_reduce("data", compression=small(dq.ErrorFeedback(dq.DynamiQ(bits=4)))),
        optax.adam(2e-2),
    ),
}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean(jnp.square(hidden @ params["down"] - jnp.sin(3 * x)))


def training(name, mesh):
    """A new state, and ``step(state, x) -> (state, loss)``."""
    optimizer = OPTIMIZERS[name]()
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((48, 96), np.float32) / 7,
              "down": rng.standard_normal((96, 48), np.float32) / 10,
              "bias": np.zeros(96, np.float32)}  # fmt: skip
    params = jax.device_put(params, NamedSharding(mesh, P()))
    opt_state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(opt_state)

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
    )
    def step(params, opt_state, x):
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    return params, opt_state, step


def batch(mesh, number):
    """The rows of a step, which are the same for any mesh."""
    x = np.random.default_rng(number).standard_normal((ROWS, 48), np.float32)
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P("data")), lambda rows: x[rows]
    )


def main(folder, name, steps, seconds):
    jax.distributed.initialize(
        os.environ["COORDINATOR"], int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"]),
        heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
    )  # fmt: skip
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    params, opt_state, step = training(name, mesh)
    copies, losses, begun = Copies(), [], 0
    fresh = {"params": params, "opt_state": opt_state}
    if copy := copies.restore(fresh):
        restored = dq.optax.restore_state(copy.state, fresh)
        params, opt_state = restored["params"], restored["opt_state"]
        losses = copy.note
        assert copy.step == len(losses)
    print(f"{jax.process_count()} hosts begin after step {len(losses)}", flush=True)
    while len(losses) < steps:
        Path(os.environ["DYNAMIQ_JAX_PROGRESS"]).write_text(str(len(losses)))
        print(f"step {len(losses)}", flush=True)
        x = batch(mesh, len(losses))
        params, opt_state, loss = step(params, opt_state, x)
        losses.append(float(loss))
        copies.save(len(losses), {"params": params, "opt_state": opt_state}, losses)
        time.sleep(seconds)
        begun += 1
        if jax.experimental.multihost_utils.reached_preemption_sync_point(begun):
            sys.exit(143)
    if jax.process_index() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    jax.experimental.multihost_utils.sync_global_devices("written")


if __name__ == "__main__":
    folder, name, steps, seconds = sys.argv[1:]
    main(Path(folder), name, int(steps), float(seconds))
