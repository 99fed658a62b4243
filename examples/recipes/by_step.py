"""Methods chosen by the number of the step.

    python examples/recipes/by_step.py

prints

    loss 0.348, 3 programs
"""

import functools

import jax
from start import batches, loss_fn, mesh, params, sgd

import dynamiq_jax as dq


def schedule(number):  # 1: new
    return dq.BF16() if number < 4 else dq.DynamiQ(bits=5 if number < 8 else 4)


@functools.partial(jax.jit, static_argnames="method")  # 2: was jax.jit
def step(params, batch, method):
    grad_fn = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", compression=method)
    loss, grads = grad_fn(params, batch)
    return sgd(params, grads, 0.1), loss


for number, batch in enumerate(batches):
    params, loss = step(params, batch, method=schedule(number))  # 3: new
print(f"loss {loss:.3f}, {step._cache_size()} programs")
