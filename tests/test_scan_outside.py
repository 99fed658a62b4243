"""`dq.scan` in a loss of `dq.value_and_grad`, on Auto and on Explicit axes."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_copies_equal, assert_same_arithmetic, assert_same_bits
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


def test_jax_sums_large_leaves_of_a_layer_for_whose_use_it_has_no_rule():
    """On Explicit axes; the bias is added to examples, and the kernel meets them in a product."""
    large = dataclasses.replace(EXACT, min_leaf_size=1)
    with pytest.warns(UserWarning, match=r"gradients of leaf \['bias'\].*of each layer of dq.scan"):
        found = on("explicit", partial(loss_of, scan=partial(dq.scan, axis_name="data")), large)
    assert_same_bits(found, on("explicit", loss_of, F32))
    wrong = lambda params, x: dq.scan(
        lambda x, own: (x @ own["bias"], None), x, params["layers"], "data"
    )
    with pytest.raises(TypeError, match="carry"):
        on("explicit", wrong, large)


@pytest.mark.usefixtures("padding_is_free")
@pytest.mark.parametrize("kind", daily(KINDS, []))
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


def shapes_of(kind, loss, compression=F32, **options):
    """Traces the loss and its gradients, and compiles nothing."""
    return on(kind, loss, compression, call=lambda grad: partial(jax.eval_shape, grad), **options)


OURS = partial(dq.scan, axis_name="data")


def penalized(params, x):
    return loss_of(params, x, OURS) + sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def masked(params, x):
    layers = jax.tree.map(lambda w: w * jnp.mean(x), params["layers"])
    return loss_of(params | {"layers": layers}, x, OURS)


def constant(params, x):
    layers = jax.tree.map(jnp.ones_like, params["layers"])
    return loss_of(params | {"layers": layers}, x, OURS)


def averaged(params, x):
    return lax.pmean(loss_of(params, x, OURS), "data")


def constrained(params, x):
    x = jax.lax.with_sharding_constraint(x, P("data"))
    return loss_of(params, x, OURS)


plainly = partial(loss_of, scan=OURS)
WARNED: dict[str, Any] = {
    "another use": (penalized, {}, "layers/bias, layers/kernel are also used outside of it"),
    "no parameters": (constant, {}, "none of its operands is made of parameters"),
    "metrics": (plainly, {"metrics": True}, "metrics=True are those of all gradients"),
}
ON_AUTO: dict[str, Any] = {
    "examples": (masked, {}, "an operand of it depends on an argument that is no parameter"),
    "weight": (plainly, {"weight": lambda params, x: x.shape[0]}, "weight= scales gradients after"),
    "constraint": (constrained, {}, "traced outside of a map.*such as a sharding constraint"),
}
ROWS = [(k, name) for k in KINDS for name in WARNED] + [("auto", name) for name in ON_AUTO]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_scan_that_reduces_nothing_says_why(kind, name):
    loss, options, reason = (WARNED | ON_AUTO)[name]
    with pytest.warns(UserWarning, match="dq.scan in a loss .* reduces no gradients.*" + reason):
        shapes_of(kind, loss, **options)


@pytest.mark.release
@pytest.mark.parametrize(
    ("kind", "ours", "reason"),
    [
        ("auto", penalized, "are also used outside of it"),
        ("explicit", penalized, "are also used outside of it"),
        ("auto", constrained, "traced outside of a map"),
        ("auto", averaged, None),
    ],
)
def test_such_losses_have_the_gradients_of_lax_scan(monkeypatch, kind, ours, reason):
    with nullcontext() if reason is None else pytest.warns(UserWarning, match=reason):
        found = on(kind, ours, F32)
    monkeypatch.setitem(globals(), "OURS", lax.scan)
    assert_same_bits(found, on(kind, ours, F32))


@pytest.mark.parametrize("kind", KINDS)
def test_unreduced_gradients_are_not_reduced_in_a_scan(kind):
    """As asked, and without a warning."""
    shapes_of(kind, plainly, unreduced=True)


def test_without_a_derivative_it_is_lax_scan():
    params, x = problem()
    assert_same_bits(jax.jit(plainly)(params, x), jax.jit(loss_of)(params, x))
    with pytest.raises(NameError, match="axis 'data' is not mapped.*Pass the loss to dq.value"):
        jax.eval_shape(jax.grad(plainly), params, x)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_value_and_grad_is_refused(kind):
    with pytest.raises(ValueError, match="scan is over axis 'model', and value_and_grad over"):
        shapes_of(kind, partial(loss_of, scan=partial(dq.scan, axis_name="model")))
    with pytest.raises(ValueError, match="paths in a scan are those of one layer"):
        shapes_of(kind, plainly, dataclasses.replace(F32, exclude="bias"))


def test_shards_outside_of_maps_are_refused():
    mesh = mesh_of(N, kind=AxisType.Explicit)
    params, x = problem()
    params = jax.device_put(params, NamedSharding(mesh, P()))
    params["layers"]["kernel"] = jax.device_put(
        params["layers"]["kernel"], NamedSharding(mesh, P(None, "data"))
    )
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    options = {"axis_name": "data", "mesh": mesh, "ungathered": True, "compression": F32}
    with pytest.raises(ValueError, match="stacked leaves that are sharded .* dq.fsdp in the layer"):
        jax.eval_shape(dq.value_and_grad(plainly, **options), params, x)


POLICIES = jax.checkpoint_policies
WRAPS = [
    lambda f: f,
    jax.checkpoint,
    partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    partial(jax.checkpoint, policy=POLICIES.nothing_saveable, prevent_cse=False),
]


@pytest.mark.release
@pytest.mark.parametrize("seed", range(8))
def test_random_scans_have_the_bits_of_lax_scan(seed):
    """Pytrees in all places, integers and `None` among them."""
    rng = np.random.default_rng(seed)
    kind, wrap = [*KINDS][seed % 2], WRAPS[rng.integers(4)]
    told: dict[str, Any] = {
        "reverse": bool(rng.integers(2)),
        "unroll": [1, 2, True][rng.integers(3)],
    }
    n_layers, has_length, has_outputs = int(rng.integers(1, 6)), rng.integers(2), rng.integers(2)
    told |= {"length": n_layers} if has_length else {}

    def step(gain, carry, xs):
        own, (number, none) = xs
        assert none is None
        y = jnp.tanh(carry["x"] @ own["kernel"]) * gain
        x = carry["x"] + y + own["bias"][None]
        carry = {"x": x, "seen": (carry["seen"][0] + number, None)}
        return carry, {"mean": (jnp.mean(y**2), number)} if has_outputs else None

    def loss(scan, params, x):
        first = {"x": x, "seen": (jnp.int32(0), None)}
        xs = params["layers"], (jnp.arange(n_layers), None)
        carry, outputs = scan(wrap(partial(step, params["rest"]["out"][0, 0])), first, xs, **told)
        aux = (
            jnp.sum(outputs["mean"][0] * (1.0 + outputs["mean"][1].astype(jnp.float32)))
            if has_outputs
            else 0.0
        )
        out = jnp.mean((carry["x"] @ params["rest"]["out"]) ** 2)
        return out + aux + carry["seen"][0].astype(jnp.float32)

    found, expected = (
        on(kind, partial(loss, scan), F32, n_layers=n_layers) for scan in (OURS, lax.scan)
    )
    assert_same_arithmetic(found, expected)
