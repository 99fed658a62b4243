"""A budget of micro-batches, so that no worker waits for a slow one.

    python examples/recipes/micro_batches.py

prints

    25 of 32 micro-batches, [4 4 4 4 1 4 4 0]
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, compression, loss_fn, mesh, params, sgd

import dynamiq_jax as dq


def budgets(seconds, deadline, most):
    """Returns the micro-batches, at most `most`, of each worker within the deadline."""
    return np.minimum(most, deadline // np.asarray(seconds)).astype(np.int32)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
def step(params, budget, batch):
    micro = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    local = lax.pcast(params, "data", to="varying")

    def take(carry):
        count, total = carry
        grads = jax.grad(loss_fn)(local, jax.tree.map(lambda x: x[count], micro))
        return count + 1, jax.tree.map(jnp.add, total, grads)

    start = 0 * budget[0], jax.tree.map(jnp.zeros_like, local)
    count, total = lax.while_loop(lambda carry: carry[0] < budget[0], take, start)
    grads = jax.tree.map(lambda g: g / count, total)  # NaN of a worker that took none
    grads = dq.pmean(grads, "data", compression=compression, weight=count)  # 1: new
    return sgd(params, grads, rate=0.1)


seconds = [0.1, 0.1, 0.12, 0.1, 0.3, 0.1, 0.1, 0.9]  # per micro-batch
budget = budgets(seconds, deadline=0.5, most=4)
params = step(params, budget, batches[0])
print(f"{budget.sum()} of 32 micro-batches, {budget}")  # 25 of 32, [4 4 4 4 1 4 4 0]
