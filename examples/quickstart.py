"""The README's script with something to compare: bf16 psum beside DynamiQ at 5 bits.

    python examples/quickstart.py

fits a small network on all devices, without a GPU on 8 virtual ones of the CPU. It prints what one
worker sends per step, and the time of the first step, which compiles. Expect (2 x86-64 cores, jax
0.10.2; the last digit of losses varies with the processor):

    8 workers on cpu
    method      loss    MB/step  first step, s
    bf16 psum  0.3611     0.92            0.5
    5 bits     0.3612     0.29            8.9
"""

import os

if "xla_force_host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"  # GPUs stay

import functools
import time

import jax
import jax.numpy as jnp

import dynamiq_jax as dq

mesh = dq.make_mesh((-1,), ("data",))
METHODS = {
    "bf16 psum": dq.BF16(),
    "5 bits": dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0),  # 0: however small
}


def loss_fn(params, x, y):
    """The squared error of a network of one hidden layer."""
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


@functools.partial(dq.jit, static_argnames="method")
def step(params, x, y, method):
    """One step of gradient descent."""
    loss, grads = dq.value_and_grad(loss_fn, axis_name="data", compression=method)(params, x, y)
    return jax.tree.map(lambda p, g: p - 2.0 * g, params, grads), loss


keys = jax.random.split(jax.random.key(0), 3)
start = {"up": jax.random.normal(keys[0], (256, 512)) / 16}
start["down"] = jax.random.normal(keys[1], (512, 256)) / 22
start = jax.device_put(start, jax.NamedSharding(mesh, jax.P()))
x = jax.random.normal(keys[2], (64 * mesh.size, 256))
x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
y = jnp.sin(x)
print(f"{mesh.size} workers on {jax.default_backend()}\nmethod      loss    MB/step  first step, s")
for name, method in METHODS.items():
    began = time.perf_counter()
    params, loss = jax.block_until_ready(step(start, x, y, method))
    first = time.perf_counter() - began
    for _ in range(19):
        params, loss = step(params, x, y, method)
    sent = dq.explain(start, mesh.size, compression=method, verbose=False).wire_bytes / 1e6
    print(f"{name:9}  {loss:.4f}  {sent:7.2f}  {first:13.1f}")
