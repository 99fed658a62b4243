"""Wrappers of optax around `dynamiq_jax.optax`, and their places that train as plain optax does."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_same_bits
from cases import EIGHT, EXACT, daily, small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax import contrib, transforms
from workers import auto_mesh, loss_fn, mesh_of, problem, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.optax

SGD = optax.sgd(0.1, momentum=0.9)
FUNCTIONS = {
    "all_reduce": lambda inner: optax.chain(dq.optax.all_reduce("data", compression=EXACT), inner),
    "sharded": lambda inner: dq.optax.sharded(inner, "data", compression=EXACT),
}


def windows(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


def every_other(step, **_):
    return step % 2 == 0


WRAPPERS = {
    "MultiSteps": windows,
    "sum of MultiSteps": lambda inner: optax.MultiSteps(
        inner, 2, use_grad_mean=False
    ).gradient_transformation(),
    "skip_not_finite": lambda inner: optax.MultiSteps(
        inner, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "skip_large_updates": lambda inner: optax.MultiSteps(
        inner,
        2,
        should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1e9),
    ).gradient_transformation(),
    "conditionally_mask": lambda inner: transforms.conditionally_mask(inner, every_other),
    "conditionally_transform": lambda inner: transforms.conditionally_transform(inner, every_other),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "mechanize": contrib.mechanize,
    "sam": lambda inner: contrib.sam(inner, optax.sgd(0.01)),
}
UNTYPED = [*WRAPPERS][:5]
"""Wrappers that are refused only where JAX has types for what differs between workers."""


def started(optimizer, mesh, check_vma=True):
    """The first state, and the step, of which nothing is computed yet."""
    optimizer = promoting(optimizer)
    state = dq.optax.init(optimizer, problem(1)[0], mesh)
    grads_of = optax_steps.of_batch(loss_fn)
    return state, optax_steps.stepper(optimizer, state, grads_of, mesh, check_vma=check_vma)


def traced(optimizer, mesh, check_vma):
    state, step = started(optimizer, mesh, check_vma)
    params, batches = problem(1)
    with jax.set_mesh(mesh):
        jax.eval_shape(step, params, state, put(batches[0], mesh, P("data")))


def trained(optimizer, check_vma=True, steps=4):
    state, step = started(optimizer, auto_mesh(), check_vma)
    return optax_steps.train(step, *problem(steps)[:1], state, problem(steps)[1], auto_mesh())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("chain", ["chain", "named_chain"])
def test_a_clip_before_the_reduction_warns_with_its_place(chain, function):
    """It would clip by the norm of each worker's own gradient."""
    members = [optax.scale(1.0), optax.clip_by_global_norm(0.1), FUNCTIONS[function](SGD)]
    if chain == "named_chain":
        optimizer = optax.named_chain(*zip("abc", members, strict=True))
    else:
        optimizer = optax.chain(*members)
    remedy = {"sharded": "max_norm=", "all_reduce": r"all_reduce\(...\), optax.clip_by_global_norm"}
    message = (
        rf"clip_by_global_norm is before dq.optax.{function} .*own gradient.*{remedy[function]}"
    )
    with pytest.warns(UserWarning, match=message):
        traced(optimizer, auto_mesh(), True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_around_that_uses_own_gradients_is_refused_with_a_remedy(name, function):
    optimizer = WRAPPERS[name](FUNCTIONS[function](SGD))
    own = "MultiSteps" if name in UNTYPED[:4] else name
    if own == "apply_if_finite" and function == "sharded":
        remedy = "Leave it out"
    elif own == "mechanize" or function == "all_reduce":
        remedy = rf"optax.chain\(dq.optax.all_reduce\(...\), .*{own}\(inner"
    else:
        remedy = rf"Pass dq.optax.sharded\(.*{own}\(inner"
    message = rf"{own} is around dq.optax.{function}: it .*{remedy}"
    with pytest.raises(ValueError, match=message):
        traced(optimizer, auto_mesh(), True)
    if name == "apply_if_finite":  # the last version took it
        with pytest.warns(UserWarning, match=message):
            traced(optimizer, auto_mesh(), False)
    elif name not in UNTYPED:
        with pytest.raises(ValueError, match=message):
            traced(optimizer, auto_mesh(), False)


@pytest.mark.parametrize("name", UNTYPED)
def test_on_explicit_axes_outside_of_maps_the_first_state_is_refused(name):
    """There JAX itself refuses a sum of unreduced gradients, before any update of ours."""
    mesh = mesh_of(8, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        optimizer = WRAPPERS[name](FUNCTIONS["sharded"](SGD))
        with pytest.raises(ValueError, match="is around dq.optax.sharded"):
            jax.eval_shape(optimizer.init, put(problem(1)[0], mesh))


PLACES = {
    ("MultiSteps", "all_reduce", "after"): True,
    ("MultiSteps", "sharded", "inside"): True,
    ("MultiSteps", "sharded", "around"): False,
    ("MultiSteps", "all_reduce", "around"): False,
    ("conditionally_mask", "sharded", "inside"): True,
    ("conditionally_mask", "all_reduce", "around"): False,
    ("conditionally_transform", "sharded", "inside"): True,
    ("conditionally_transform", "all_reduce", "after"): True,
}
"""Whether JAX tracks types; where it does not, a wrapper around sums what it should."""
DAILY = [place for place in PLACES if place[0] == "MultiSteps"][:3]


@pytest.mark.parametrize(("name", "function", "where"), daily(PLACES, DAILY))
def test_in_its_place_a_wrapper_trains_as_plain_optax_does(name, function, where):
    wrap, ours = WRAPPERS[name], FUNCTIONS[function]
    optimizer = wrap(ours(SGD)) if where == "around" else ours(wrap(SGD))
    params, _ = trained(optimizer, PLACES[name, function, where])
    assert_close(params, optax_steps.plain(promoting(wrap(SGD)), loss_fn, *problem(4)))


def pairs(reset):
    """Lookahead, which takes gradients of the fast parameters alone."""

    def wrap(inner):
        init, update = optax.lookahead(inner, 2, 0.5, reset_state=reset)
        return optax.GradientTransformation(init, lambda g, s, p: update(g.fast, s, p))

    return wrap


def plateau(inner):
    """Halves the updates after every two steps."""
    own = optax.chain(inner, contrib.reduce_on_plateau(0.5, patience=1))
    update = functools.partial(own.update, value=jnp.float32(1.0))
    return optax.GradientTransformation(own.init, update)


def then(after):
    return lambda inner: optax.chain(inner, after)


class Row(NamedTuple):
    """A wrapper of an optimizer that changes its updates, or what follows it in a chain."""

    wrap: Any
    apart: float | None = 0.15
    """With compression, the largest distance from plain optax, relative to the distance trained;
    `None`: what acts on whole leaves amplifies errors."""
    inside: str | None = None
    """The remedy where `sharded` refuses it inside; `None`: it trains there, too."""


ALONE, PUT_AFTER = "depend on its own coordinate", "Put it after"
CHANGING = {
    "apply_every": Row(then(optax.apply_every(2))),
    "scale": Row(then(optax.scale(0.5))),
    "named_chain": Row(lambda inner: optax.named_chain(("a", inner), ("b", optax.scale(0.5)))),
    "nested chain": Row(lambda inner: optax.chain(optax.chain(inner), optax.scale(0.5))),
    "ema": Row(then(optax.ema(0.9))),
    "trace": Row(then(optax.trace(0.5))),
    "clip": Row(then(optax.clip(0.02))),
    "add_decayed_weights": Row(then(optax.add_decayed_weights(-0.1))),
    "keep_params_nonnegative": Row(then(optax.keep_params_nonnegative())),
    "freeze": Row(then(transforms.freeze({"in": True, "out": False}))),
    "reduce_on_plateau": Row(plateau),
    "schedule_free": Row(lambda inner: contrib.schedule_free(inner, 0.1)),
    "lookahead": Row(pairs(False), inside="skip"),
    "lookahead, reset": Row(pairs(True), 0.3, "skip"),
    "partition": Row(lambda x: optax.partition({"a": x, "b": x}, {"in": "a", "out": "b"})),
    "snapshot": Row(then(transforms.snapshot("norm", optax.tree.norm)), inside=ALONE),
    "flatten": Row(optax.flatten, inside="Leave out flatten"),
    "adaptive_grad_clip": Row(then(optax.adaptive_grad_clip(0.1)), None, PUT_AFTER),
    "normalize_by_update_norm": Row(then(optax.normalize_by_update_norm(0.1)), None, PUT_AFTER),
    "scale_by_trust_ratio": Row(
        then(optax.chain(optax.scale_by_trust_ratio(), optax.scale(0.01))), None, PUT_AFTER
    ),
    "add_noise": Row(then(optax.add_noise(1e-3, 0.5, 0)), inside="use dq.optax.all_reduce"),
}
DAILY_CHANGING = ["apply_every", "schedule_free", "lookahead, reset", "normalize_by_update_norm"]
COARSE = small(dq.contrib.MinMax(bits=3))


def fast_loss(params, x):
    return loss_fn(getattr(params, "fast", params), x)


def trained_by(name, place, **compression):
    """Parameters after six steps: the wrapper is around `sharded` or inside, or in plain optax."""
    wrap, (params, batches) = CHANGING[name].wrap, problem(6)
    ours = lambda inner: dq.optax.sharded(inner, "data", **compression)
    if name.startswith("lookahead"):
        params = optax.LookaheadParams.init_synced(params)
    if place == "plain":
        return optax_steps.plain(promoting(wrap(SGD)), fast_loss, params, batches)
    optimizer = promoting(wrap(ours(SGD)) if place == "around" else ours(wrap(SGD)))
    state = dq.optax.init(optimizer, params, auto_mesh())
    grads_of = optax_steps.of_batch(fast_loss)
    step = optax_steps.stepper(optimizer, state, grads_of, auto_mesh())
    return optax_steps.train(step, params, state, batches, auto_mesh())[0]


@pytest.mark.parametrize("name", daily(CHANGING, DAILY_CHANGING))
def test_what_changes_updates_trains_as_with_plain_optax(name):
    """Masters follow what is applied, and refused is what slices cannot compute."""
    row, plain = CHANGING[name], trained_by(name, "plain")
    assert_close(trained_by(name, "around", compression=EXACT), plain)
    if row.inside is None:
        assert_close(trained_by(name, "inside", compression=EXACT), plain)
    elif row.inside != "skip":  # the parameters of lookahead are pairs
        with pytest.raises(ValueError, match=row.inside):
            trained_by(name, "inside", compression=EXACT)
    if row.apart is not None:
        found = trained_by(
            name, "around", compression=dq.Policy(gradients=EIGHT, parameters=COARSE)
        )
        first = problem(1)[0]
        first = optax.LookaheadParams.init_synced(first) if "lookahead" in name else first
        far = lambda a, b: float(
            optax.tree.norm(jax.tree.map(jnp.subtract, *jax.device_get((a, b))))
        )
        assert far(found, plain) < row.apart * far(first, plain)


@pytest.mark.parametrize("name", ["apply_every", "named_chain", "schedule_free", "lookahead"])
def test_what_would_change_deferred_updates_is_refused(name):
    told = rf"{name.replace('named_chain', 'scale')} would change the updates .*leave out deferred"
    with pytest.raises(ValueError, match=told):
        trained_by(name, "around", compression=EXACT, deferred=True)


def labelled(optimizers, label):
    return optax.partition(optimizers, lambda params: dict.fromkeys(params, label))


def test_an_optimizer_for_none_of_the_parameters_changes_nothing():
    """A label of `optax.partition` may have no leaves."""
    alone = FUNCTIONS["sharded"](SGD)
    params, _ = trained(labelled({"all": alone, "none": FUNCTIONS["sharded"](SGD)}, "all"), steps=2)
    expected, _ = trained(alone, steps=2)
    assert_same_bits(params, expected)


def test_hyperparameters_around_sharded_on_explicit_axes_are_refused_with_their_place():
    """There the inner optimizer runs under a map, which takes no array from around it."""
    mesh = mesh_of(8, kind=AxisType.Explicit)

    @optax.inject_hyperparams
    def around(rate):
        return FUNCTIONS["sharded"](optax.sgd(rate))

    inside = FUNCTIONS["sharded"](optax.inject_hyperparams(optax.sgd)(0.1))
    options = {"axis_name": "data", "compression": EXACT, "unreduced": True}
    grad_fn = dq.value_and_grad(loss_fn, **options)
    params, batches = problem(1)
    with jax.set_mesh(mesh):
        params, x = put(params, mesh), put(batches[0], mesh, P("data"))

        def step(optimizer, params, x):
            state = optimizer.init(params)
            return promoting(optimizer).update(grad_fn(params, x)[1], state, params)

        with pytest.raises(ValueError, match=r"closes over.*Pass dq.optax.sharded\(optax.inject"):
            jax.eval_shape(functools.partial(step, around(rate=0.1)), params, x)
        jax.eval_shape(functools.partial(step, inside), params, x)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_keeps_its_memory_outside_of_maps_as_reduce_does(kind):
    mesh = mesh_of(8, kind=KINDS[kind])
    method = small(dq.ErrorFeedback(dq.contrib.MXFP8()))
    options = {"compression": method, "op": "sum"}
    grad_fn = dq.value_and_grad(
        loss_fn, mesh=mesh, axis_name="data", compression=method, unreduced=True
    )
    optimizer = dq.optax.all_reduce("data", **options)
    params, batches = problem(2)
    state = dq.optax.init(optimizer, params, mesh)
    with jax.set_mesh(mesh):
        params = put(params, mesh)
        kept = put(method.init_state(params, 8, stacked=True), mesh, P("data"))

        @jax.jit
        def step(state, kept, x):
            _, grads = grad_fn(params, x)
            found = dq.reduce(grads, "data", state=kept, **options)
            return *optimizer.update(grads, state), found

        for x in batches:
            updates, state, found = step(state, kept, put(x, mesh, P("data")))
            kept = found.state
            assert_same_bits((updates, state.memory.value), (found.tree, kept))
    residual = np.asarray(jax.tree.leaves(kept)[0])
    assert residual.shape[0] == 8 and np.any(residual[0] != residual[1])
    assert jnp.shape(state.step) == () and int(state.step) == 2
