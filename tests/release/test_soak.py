"""Training under random models, methods and topologies: replicas never drift, nothing grows.

`make soak` runs 2000 steps (`SOAK_STEPS`); the suite a short form. One episode trains one small
network on 8 devices, each of which keeps a copy of its own of parameters and optimizer state.
Half of the episodes are DynamiQ's, the others those of the methods it is compared with.
"""

import ctypes
import dataclasses
import gc
import os
import resource
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_replicas_equal
from cases import EVERY_METHOD, METHODS, OVER, SMALL, over
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

STEPS = int(os.environ.get("SOAK_STEPS", "24"))
EPISODE = 12
OTHERS = [
    name
    for name, row in EVERY_METHOD.items()
    if row.error < 1 and not name.startswith(("dynamiq", "clt-k", "arc top-k"))
] + ["clt-k, memory", "arc top-k, memory", "marsit, full rounds"]
"""But for methods that forget what they do not send, and so may not train."""
LEAST = {"min_leaf_size": 1, "min_bucket_size": 512}

shapes, seeds = st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(0, 2**31 - 1)
limits = st.sampled_from([SMALL, LEAST | {"bucket_bytes": 4096}])


def of_method(name, method, routes):
    return st.tuples(shapes, st.just((name, method)), st.sampled_from(routes), limits, seeds)


EVERY_ROUTE = [dq.Ring(), *OVER.values(), None]
episodes = st.one_of(
    st.sampled_from(list(METHODS)).flatmap(lambda k: of_method(k, METHODS[k], EVERY_ROUTE)),
    st.sampled_from(OTHERS).flatmap(
        lambda k: of_method(k, EVERY_METHOD[k].method, list(EVERY_METHOD[k].routes.values()))
    ),
)


def shown(name, sizes, topology, seed):
    """An episode of `EVERY_METHOD` that is always part of a run."""
    return example((sizes, (name, EVERY_METHOD[name].method), topology, SMALL, seed))


def init(sizes, seed):
    keys = jax.random.split(jax.random.key(seed), len(sizes) + 1)
    widths = [33, *sizes, 5]
    pairs = zip(widths[:-1], widths[1:], keys, strict=True)
    return [
        {"w": jax.random.normal(k, (a, b)) / np.sqrt(a), "b": jnp.zeros(b)} for a, b, k in pairs
    ]


def loss_of(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"][None] - y) ** 2)


def train(sizes, named, topology, limits, seed):
    """Losses of `EPISODE` steps; every worker's parameters, and what its memory has of scalars."""
    mesh, optimizer = auto_mesh(), optax.adam(3e-3)
    method = dataclasses.replace(named[1], **limits)

    def one(own, x, y):
        params, opt_state, memory = jax.tree.map(lambda p: p[0], own)
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        options = {"compression": over(topology, method)}
        grads, memory, _ = dq.reduce(grads, "data", state=memory, **options)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        own = jax.tree.map(lambda p: p[None], (params, opt_state, memory))
        return own, jax.lax.pmean(loss, "data")

    specs = {"in_specs": P("data"), "out_specs": (P("data"), P())}
    step = jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, **specs), donate_argnums=0)
    params = init(sizes, seed)
    everywhere = NamedSharding(mesh, P("data"))

    def copies(tree):
        return jax.device_put(jax.tree.map(lambda p: jnp.stack([p] * 8), tree), everywhere)

    memory = over(topology, method).init_state(params, 8)
    own = copies((params, optimizer.init(params), memory))
    rng, losses = np.random.default_rng(seed), []
    target = rng.normal(size=(33, 5)).astype(np.float32)
    data = rng.normal(size=(EPISODE - 1, 32, 33)).astype(np.float32)
    for number in range(EPISODE):
        x = data[number % len(data)]  # the last batch is the first, so that losses compare
        with compilations() as compiled:
            own, loss = step(own, x, x @ target)
            losses.append(float(loss))
        assert len(compiled) == (number == 0)
    assert step._cache_size() == 1
    params, _, memory = jax.device_get(own)
    return losses, params, [leaf for leaf in jax.tree.leaves(memory) if leaf.ndim == 1]


def resident_bytes():
    """Memory that is in use, without what the allocator keeps of earlier compilations (glibc's)."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Left(NamedTuple):
    """The result of an episode."""

    drawn: tuple
    arrays: int
    """Live arrays of JAX."""
    objects: int
    """All that the collector of Python knows."""
    resident: int
    """Bytes."""


SEEN: list[Left] = []


def run(drawn):
    losses, *replicas = train(*drawn)
    assert_replicas_equal(replicas)
    assert np.isfinite(losses).all()
    assert losses[-1] < 1.1 * losses[0]  # twelve steps of the smallest net learn little
    jax.clear_caches()  # every episode is a new program: what it compiled is not a leak
    resident = resident_bytes()
    SEEN.append(Left(drawn, len(jax.live_arrays()), len(gc.get_objects()), resident))


@settings(
    max_examples=max(STEPS // EPISODE, 1),
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(episodes)
@shown("thc, memory", [40], None, 0)
@shown("powersgd", [40], None, 2)
@shown("mxfp8", [9, 30], dq.Butterfly(), 1)
def episode(drawn):
    run(drawn)


def test_replicas_do_not_drift_and_nothing_grows():
    SEEN.clear()
    episode()
    assert len(SEEN) * EPISODE >= STEPS
    assert max(left.arrays for left in SEEN) <= SEEN[0].arrays + 8  # the library's, made once
    # What is imported and registered at first use; a program that is kept has 14,000 and more.
    assert max(np.diff([left.objects for left in SEEN])) < 5000
    if len(SEEN) > 20:
        # JAX and XLA keep 0.4 MB of every program, also where `lax.pmean` stands for `dq.pmean`.
        resident = [left.resident for left in SEEN]
        half = len(SEEN) // 2
        programs = (len(SEEN) - 5) / 2  # from the middle of the one part to that of the other
        assert np.mean(resident[half:]) - np.mean(resident[5:half]) < programs * 2**20
    for _ in range(2):  # once more, when nothing of it is new and what ran the others is gone
        run(SEEN[-1].drawn)
    assert SEEN[-1].objects - SEEN[-2].objects < 4  # one is this entry
