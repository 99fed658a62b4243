"""Methods chosen by the number of the step, inside optax.

    python examples/recipes/by_step_optax.py

prints

    12 updates by 3 programs
"""

import functools

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from start import batches, loss_fn, mesh, params

import dynamiq_jax as dq
import dynamiq_jax.optax


def schedule(number):  # 1: new
    return dq.BF16() if number < 4 else dq.DynamiQ(bits=5 if number < 8 else 4)


def optimizer_of(method):
    return optax.chain(dq.optax.all_reduce("data", compression=method), optax.adamw(1e-3))


@functools.partial(jax.jit, static_argnames="method")
def optax_step(params, opt_state, batch, method):
    optimizer, specs = optimizer_of(method), dq.optax.state_specs(opt_state)

    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    def update(params, opt_state, batch):
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update(params, opt_state, batch)


trained, opt_state = params, dq.optax.init(optimizer_of(schedule(0)), params, mesh)
for number, batch in enumerate(batches):
    trained, opt_state = optax_step(trained, opt_state, batch, method=schedule(number))
print(f"{opt_state[0].step} updates by {optax_step._cache_size()} programs")
