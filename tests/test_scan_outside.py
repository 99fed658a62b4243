"""`dq.scan` in a loss of `dq.value_and_grad`, on Auto and on Explicit axes."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_copies_equal, assert_same_bits
from cases import CHEAP, EXACT, daily
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import mesh_of, once

import dynamiq_jax as dq

N, DIM, LAYERS = 4, 32, 4
LIMITS = {"min_leaf_size": DIM * DIM, "min_bucket_size": 1, "min_bucket_bytes": 0}
F32, SOME = (dataclasses.replace(x, **LIMITS) for x in (EXACT, CHEAP))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@once
def problem(n_layers=LAYERS):
    """Parameters, and examples of which the later workers' are larger."""
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "kernel": jax.random.normal(keys[0], (n_layers, DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[1], (n_layers, DIM)),
    }
    rest = {"out": jax.random.normal(keys[2], (DIM, 2 * DIM)) / DIM**0.5}
    x = jax.random.normal(keys[3], (4 * N, DIM)) * jnp.linspace(0.3, 3.0, 4 * N)[:, None]
    return {"layers": layers, "rest": rest}, x


def layer(gain, x, own):
    y = jnp.tanh(x @ own["kernel"].astype(x.dtype))
    x = x + gain * y + own["bias"].astype(x.dtype)[None]
    return x, jnp.mean(y**2)


def loss_of(params, x, scan=lax.scan, wrap=lambda f: f):
    layers = jax.tree.map(lambda w: w[:, ::-1] * 2, params["layers"])  # reaches only the scan
    x, aux = scan(wrap(partial(layer, params["rest"]["out"][0, 0])), x, layers)
    return jnp.mean((x @ params["rest"]["out"]) ** 2) + jnp.sum(aux) / 8


def on(kind, loss, compression, call=jax.jit, **options):
    """The loss and gradients of `problem` on axes of a kind."""
    mesh = mesh_of(N, kind=KINDS[kind])
    params, x = problem(options.pop("n_layers", LAYERS))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    key = options.pop("key", None)
    grad = dq.value_and_grad(loss, axis_name="data", mesh=mesh, compression=compression, **options)
    with jax.set_mesh(mesh):
        return call(grad)(params, x, key=key)


FORMS: dict[str, Any] = {
    "plain": {},
    "remat": {"wrap": jax.checkpoint},
    "reverse": {"reverse": True},
    "unroll": {"unroll": 2},
    "one": {"n_layers": 1},
    "two": {"n_layers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", daily(FORMS, ["remat"]))
def test_exact_gradients_have_the_bits_of_lax_scan(kind, form):
    options = dict(FORMS[form])
    wrap, told = options.pop("wrap", lambda f: f), {"n_layers": options.pop("n_layers", LAYERS)}
    ours = partial(dq.scan, axis_name="data", **options)
    found = on(kind, partial(loss_of, scan=ours, wrap=wrap), F32, **told)
    theirs = partial(lax.scan, **options)
    expected = on(kind, partial(loss_of, scan=theirs, wrap=wrap), F32, **told)
    assert_same_bits(found, expected)
    assert_copies_equal(found[1])
    assert all(np.any(g != 0) for g in jax.tree.leaves(found[1]))


@pytest.mark.usefixtures("padding_is_free")
@pytest.mark.parametrize("kind", daily(KINDS, ["explicit"]))
def test_layers_travel_in_the_backward_pass_once(kind):
    method, plans = dataclasses.replace(SOME, topology=dq.Direct()), []

    def explained(grad):
        def run(params, x, key):
            plans.append(dq.explain(jax.jit(grad), params, x, verbose=False))
            return jax.jit(grad)(params, x)

        return run

    loss = partial(loss_of, scan=partial(dq.scan, axis_name="data"))
    _, found = on(kind, loss, method, call=explained)
    assert sorted(run.times for run in plans[0].plans if run.plan.buckets) == [1, LAYERS]
    assert_copies_equal(found)
    _, exact = on(kind, loss_of, F32)
    for g, x in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        if np.prod(x.shape[-2:]) >= DIM * DIM:
            assert 0 < np.linalg.norm(g - x) < 0.2 * np.linalg.norm(x)
