"""Inputs of workers, meshes, maps, and small models."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from pallas_kernels import TILE_ROWS, WireFormat
from pallas_kernels.format import DEALT, QUAD


class OnHost:
    """A jitted function whose results are NumPy arrays: JAX would compile every slice of them."""

    def __init__(self, run):
        self.on_devices = run

    def __call__(self, *args):
        return jax.device_get(self.on_devices(*args))

    def __getattr__(self, name):
        return getattr(self.on_devices, name)


def once(make):
    """The arrays of a function of static arguments, made by one program, on the host."""

    @functools.cache
    def made(*args):
        return jax.device_get(jax.jit(lambda: make(*args))())

    return functools.wraps(make)(lambda *args: jax.tree.map(lambda x: x, made(*args)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gradient(seed: int, n: int, size: int, super_group_size: int = 256) -> jax.Array:
    """f32[n, size]: super-groups of very different magnitude and mean, distinct on each worker."""
    keys = jax.random.split(jax.random.key(seed), 3)
    rows = -(-size // super_group_size)
    magnitude = jnp.exp(1.5 * jax.random.normal(keys[0], (rows, 1)))
    mean = 0.3 * jax.random.normal(keys[1], (rows, 1))
    noise = jax.random.normal(keys[2], (n, rows, super_group_size))
    return ((noise + mean[None]) * magnitude[None]).reshape(n, -1)[:, :size]


@functools.cache
def mesh_of(*sizes, names=("data", "model", "one"), kind=AxisType.Auto):
    """A mesh of the first devices, of axes of these sizes."""
    names, kinds = names[: len(sizes)], (kind,) * len(sizes)
    return jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)], axis_types=kinds)


def auto_mesh(n: int = 8):
    """A mesh of the first n devices with one Auto axis "data"."""
    return mesh_of(n)


WHOLE = P()


def put(tree, mesh, specs=WHOLE):
    """A tree on the devices of a mesh; ``specs`` may be those of its first levels alone."""
    return jax.device_put(tree, jax.tree.map(functools.partial(NamedSharding, mesh), specs))


@contextlib.contextmanager
def compilations():
    """The programs that XLA compiles within the block, as a list that grows."""
    found = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def plan_is_exact(n, size):
    """f32[n, size] whose statistics are exact in bf16 in whatever order workers are added.

    XLA on CPU adds a bf16 all-reduce in f32 under shard_map, and under vmap in bf16, so that the
    plan may differ. Here a super-group holds as many 1 as -1, 3 and -3, times a power of two, in
    an order of each worker's own: squared norms are 5 * 2^k, of which up to 51 add up exactly, and
    means 0. Partial sums differ between workers and coordinates, and are rounded.
    """
    rng = np.random.default_rng(0)
    rows = -(-size // 256)
    x = rng.permuted(np.tile([1.0, -1.0, 3.0, -3.0], (n, rows, 64)), axis=2)
    x = x * np.exp2(rng.integers(-6, 6, (rows, 1)))
    x[:, -1] = 0.0  # the last super-group is cut off
    return jnp.asarray(x.reshape(n, -1)[:, :size], jnp.float32)


def anchored(width, levels, n):
    """f32[n, 256 * 8 * n * 2] whose partial sums all lie on levels, whatever the ring's order.

    In each group coordinate i < n, the anchor of worker i, is the top level at that worker and
    zero elsewhere: every partial sum has the same maximum, so the same scale, a power of two. The
    rest are small integers, whose sums stay where levels are one apart. The second half of a group
    is the negative of the first, so that all means are exactly zero.
    """
    rng = np.random.default_rng(0)
    fmt = WireFormat(levels=levels)
    table = fmt.level_table(width)
    ones = int(np.argmax(np.diff(table, append=table[-1]) != 1))  # levels 0..ones are all there
    most = ones // n if levels != "geometric" else 0
    rows = 8 * n * 2
    half = rng.integers(-most, most + 1, (n, rows, 8, 16)).astype(np.float64)
    half[..., :n] = 0
    for worker in range(n):
        half[worker, ..., worker] = table[-1] * rng.choice([-1, 1], (rows, 8))
    x = np.concatenate([half, -half], axis=3) * np.exp2(rng.integers(-20, 20, (rows, 1, 1)))
    quads = x.reshape(n, rows, fmt.groups // DEALT, DEALT, -1, QUAD)  # dealt to groups in turn
    return jnp.asarray(quads.swapaxes(3, 4).reshape(n, -1), jnp.float32)


def promoting(optimizer):
    """An optimizer of optax, which promotes dtypes."""

    def update(*args, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args, **extra)

    return optimizer._replace(update=update)


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - 1))


@once
def problem(steps):
    """Parameters, and a batch of 32 rows for every step."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (16, 64)) / 4,
        "out": jax.random.normal(keys[1], (64, 4)) / 8,
    }
    return params, jax.random.normal(keys[2], (steps, 32, 16))


@once
def network():
    """Parameters of two layers, and a batch whose examples count differently on every worker."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (16, 64)) / 4,
        "bias": jax.random.normal(keys[1], (64,)),
        "down": jax.random.normal(keys[2], (64, 16)) / 8,
        "scale": jnp.float32(1.5),
    }
    x = jax.random.normal(keys[3], (32, 16)) * jnp.linspace(0.2, 2.0, 32)[:, None]
    mask = jnp.float32(jnp.arange(32.0) % 5 < jnp.linspace(1, 4, 32))
    return params, {"x": x, "mask": mask}


def mapped(f, check_vma=True):
    """``f(params, x)`` of each of four workers; results have a leading axis of workers."""

    def one(params, x):
        return jax.tree.map(lambda g: Axis(("data",)).to_varying(g[None]), f(params, x[0]))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    return OnHost(jax.jit(jax.shard_map(one, mesh=auto_mesh(4), **specs)))


def local(params, check_vma):
    return lax.pcast(params, "data", to="varying") if check_vma else params


def plan_widths(plan: Any, stage: int = 0) -> jax.Array:
    """The width of every super-group in a stage of a plan, int32[M], in the gradient's order."""
    # A tile's entry has the width in its low 5 bits; position p of a chunk is in tile p // 8.
    width = jnp.repeat(plan.tiles[stage] & 31, TILE_ROWS, axis=1).reshape(-1)
    return jnp.zeros_like(width).at[plan.order.reshape(-1)].set(width)
