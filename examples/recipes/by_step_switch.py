"""Methods chosen by a traced number, in one program.

    python examples/recipes/by_step_switch.py

prints

    loss 0.348, 1 program
"""

import jax
import jax.numpy as jnp
from jax import lax
from start import batches, loss_fn, mesh, params, sgd

import dynamiq_jax as dq


def schedule(number):  # 1: new
    return dq.BF16() if number < 4 else dq.DynamiQ(bits=5 if number < 8 else 4)


methods = [schedule(number) for number in (0, 4, 8)]
branches = [dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", compression=m) for m in methods]


@jax.jit
def switched_step(params, batch, number):  # number: int32[]
    which = (number >= 4).astype(int) + (number >= 8).astype(int)
    loss, grads = lax.switch(which, branches, params, batch)
    return sgd(params, grads, 0.1), loss


for number, batch in enumerate(batches):
    params, loss = switched_step(params, batch, jnp.int32(number))
print(f"loss {loss:.3f}, {switched_step._cache_size()} program")
