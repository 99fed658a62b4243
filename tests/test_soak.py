"""Training under random models, methods and topologies: replicas never drift, nothing grows.

`make soak` runs 2000 steps (`SOAK_STEPS`); the suite a short form. One episode trains one small
network on 8 devices, each of which keeps a copy of its own of parameters and optimizer state.
"""

import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import assert_replicas_equal, auto_mesh
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

STEPS = int(os.environ.get("SOAK_STEPS", "24"))
EPISODE = 12
SMALL = {"min_leaf_size": 1, "min_bucket_size": 512}
METHODS = [
    dq.DynamiQ(**SMALL),
    dq.DynamiQ(bits=4, rounding="correlated", **SMALL),
    dq.DynamiQ(bits=6, widths=(0, 2, 4, 6, 8, 10), bucket_bytes=4096, **SMALL),
    dq.DynamiQ(bits=7, group_scale="bf16", levels="uniform", subtract_mean=False, **SMALL),
]
TOPOLOGIES = [dq.Ring(), dq.Ring(unroll_up_to=1), dq.Butterfly(), dq.Direct(), None]

shapes = st.lists(st.integers(1, 70), min_size=1, max_size=3)
episodes = st.tuples(
    shapes, st.sampled_from(METHODS), st.sampled_from(TOPOLOGIES), st.integers(0, 2**31 - 1)
)


def init(sizes, seed):
    keys = jax.random.split(jax.random.key(seed), len(sizes) + 1)
    widths = [33, *sizes, 5]
    pairs = zip(widths[:-1], widths[1:], keys, strict=True)
    return [
        {"w": jax.random.normal(k, (a, b)) / np.sqrt(a), "b": jnp.zeros(b)} for a, b, k in pairs
    ]


def loss_of(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def train(sizes, method, topology, seed):
    """The losses of `EPISODE` steps, and every worker's parameters after them."""
    mesh, optimizer = auto_mesh(), optax.adam(3e-3)

    def one(params, opt_state, x, y):
        params, opt_state = jax.tree.map(lambda p: p[0], (params, opt_state))
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads = dq.pmean(grads, "data", method=method, topology=topology)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        own = jax.tree.map(lambda p: p[None], (params, opt_state))
        return *own, jax.lax.pmean(loss, "data")

    specs = {"in_specs": P("data"), "out_specs": (P("data"), P("data"), P())}
    step = jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))
    params = init(sizes, seed)
    everywhere = NamedSharding(mesh, P("data"))

    def copies(tree):
        return jax.device_put(jax.tree.map(lambda p: jnp.stack([p] * 8), tree), everywhere)

    params, opt_state = copies(params), copies(optimizer.init(params))
    rng, losses = np.random.default_rng(seed), []
    target = rng.normal(size=(33, 5)).astype(np.float32)
    for _ in range(EPISODE):
        x = rng.normal(size=(32, 33)).astype(np.float32)
        params, opt_state, loss = step(params, opt_state, x, x @ target)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return losses, jax.device_get(params)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


SEEN = []


@settings(
    max_examples=max(STEPS // EPISODE, 1),
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(episodes)
def episode(drawn):
    losses, params = train(*drawn)
    assert_replicas_equal(params)
    assert np.isfinite(losses).all()
    assert losses[-1] < 1.2 * losses[0]  # twelve steps of the smallest net learn little
    jax.clear_caches()  # every episode is a new program: what it compiled is not a leak
    SEEN.append((len(jax.live_arrays()), resident_bytes()))


def test_replicas_do_not_drift_and_nothing_grows():
    SEEN.clear()
    episode()
    live, resident = zip(*SEEN, strict=True)
    assert len(SEEN) * EPISODE >= STEPS
    assert max(live) <= live[0] + 8  # constants of the library, made once
    if len(SEEN) > 20:
        half = len(SEEN) // 2
        assert np.mean(resident[half:]) < 1.25 * np.mean(resident[5:half])
