"""The README's script with something to compare: bf16 psum beside DynamiQ at 5 bits.

    python examples/quickstart.py

fits a small network on all devices, without a GPU on 8 virtual ones of the CPU, and prints what one
worker sends per step. Expect (2 x86-64 cores, jax 0.10.2; the last digit of losses varies with the
processor):

    8 workers on cpu
    method      loss    MB/step
    bf16 psum  0.3611     0.92
    5 bits     0.3612     0.29
"""

import os

if "xla_force_host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"  # GPUs stay

import functools

import jax
import jax.numpy as jnp

import dynamiq_jax as dq

mesh = jax.make_mesh((jax.device_count(),), ("data",))
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
    loss, grads = dq.value_and_grad(loss_fn, axis_name="data", method=method)(params, x, y)
    return jax.tree.map(lambda p, g: p - 2.0 * g, params, grads), loss


keys = jax.random.split(jax.random.key(0), 3)
start = {"up": jax.random.normal(keys[0], (256, 512)) / 16}
start["down"] = jax.random.normal(keys[1], (512, 256)) / 22
start = jax.device_put(start, jax.NamedSharding(mesh, jax.P()))
x = jax.random.normal(keys[2], (64 * mesh.size, 256))
x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
y = jnp.sin(x)
print(f"{mesh.size} workers on {jax.default_backend()}\nmethod      loss    MB/step")
for name, method in METHODS.items():
    params, loss = step(start, x, y, method)
    for _ in range(19):
        params, loss = step(params, x, y, method)
    megabytes = dq.explain(start, mesh.size, method=method, verbose=False).wire_bytes / 1e6
    print(f"{name:9}  {loss:.4f}  {megabytes:7.2f}")
