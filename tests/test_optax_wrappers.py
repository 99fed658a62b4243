"""Wrappers of optax around `dynamiq_jax.optax`, and their places that train as plain optax does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_same_bits
from cases import CHEAP, EXACT, daily, small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax import contrib, transforms
from workers import auto_mesh, loss_fn, mesh_of, problem, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.optax

SGD = optax.sgd(0.1, momentum=0.9)
FUNCTIONS = {
    "all_reduce": lambda inner: optax.chain(dq.optax.all_reduce("data", compression=EXACT), inner),
    "sharded": lambda inner: dq.optax.sharded(inner, "data", compression=EXACT, differences=EXACT),
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


def test_what_follows_sharded_in_a_chain_is_refused_unless_differences_are_exact():
    """The next difference would bring back what it withholds or scales."""
    mesh = auto_mesh()
    rough = dq.optax.sharded(SGD, "data", compression=CHEAP)
    chained = {
        "apply_every": optax.chain(rough, optax.apply_every(2)),
        "scale": optax.chain(optax.chain(rough), optax.identity(), optax.scale(0.5)),
    }
    for name, optimizer in chained.items():
        told = rf"^{name} comes after dq.optax.sharded .*optax.chain\(inner, {name}"
        with pytest.raises(ValueError, match=told):
            traced(optimizer, mesh, True)
    traced(optax.chain(rough, optax.zero_nans()), mesh, True)
    for place in (
        lambda inner: optax.chain(FUNCTIONS["sharded"](inner), optax.apply_every(2)),
        lambda inner: FUNCTIONS["sharded"](optax.chain(inner, optax.apply_every(2))),
    ):
        found, _ = trained(place(SGD))
        expected = optax.chain(SGD, optax.apply_every(2))
        assert_close(found, optax_steps.plain(promoting(expected), loss_fn, *problem(4)))


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
    options = {"axis_name": "data", "compression": EXACT, "reduce": False}
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
        loss_fn, mesh=mesh, axis_name="data", compression=method, reduce=False
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
