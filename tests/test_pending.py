"""Differences that travel at the top of the next step, function by function (DeAR's order)."""

import dataclasses
import itertools
import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_copies_equal, assert_same_bits
from cases import CHEAP, EXACT, daily
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sequential_sharded import DIM, FUNCTIONS, LAYERS, REMAT, N, gathers_ahead, problem
from workers import auto_mesh, compilations

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.reduction import reduction

LIMITS = {"min_leaf_size": DIM * DIM, "min_bucket_size": 1, "min_bucket_bytes": 0}
F32 = dataclasses.replace(EXACT, **LIMITS)
SOME = dataclasses.replace(CHEAP, **LIMITS)
DITHER = dq.Compression(dq.DynamiQ(bits=2.5, dither=True), **LIMITS)
PLANNED = dataclasses.replace(DITHER, method=dataclasses.replace(DITHER.method, plan=True))


def make(differences: Any = F32, **options: Any) -> Any:
    inner = optax.sgd(0.3, momentum=0.9)
    return dq.optax.sharded(
        inner, "data", compression=dq.Policy(gradients=F32, parameters=differences), **options
    )


def make_step(optimizer: Any, state: Any, n: int = N, functions: Any = FUNCTIONS) -> Any:
    """(params, state, examples) -> (params, state, loss, the parameters that functions had)."""
    specs = dq.optax.state_specs(state)

    def loss(masters, params, pending, x):
        options = {"compression": F32, "specs": specs.masters, "copies": params, "pending": pending}
        found = dq.overlapped(functions, masters, x, "data", **options)
        return (found, params) if pending is None else found

    def step(params, state, x):
        own = jax.value_and_grad(loss, has_aux=True)
        (value, params), grads = own(state.masters, params, state.pending, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(value, "data"), params

    maps = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs, P(), P())}
    return jax.shard_map(step, mesh=auto_mesh(n), **maps)


def start(optimizer: Any, dtype: Any = jnp.float32, n: int = N) -> tuple[Any, Any]:
    mesh = auto_mesh(n)
    params = jax.device_put(problem()[0], NamedSharding(mesh, P()))
    state = dq.optax.init(optimizer, params, mesh)
    return jax.tree.map(lambda w: w.astype(dtype), params), state


def batches() -> list[Any]:
    """Examples of four steps; the gradients of the second are not finite."""
    _, examples = problem()
    return [examples * np.float32(scale) for scale in (1, np.inf, 0.5, 2)]


def train(optimizer: Any, dtype: Any = jnp.float32) -> tuple[list[Any], Any, Any, list[Any]]:
    """Losses, the last parameters and state, and the parameters that functions had in each step."""
    params, state = start(optimizer, dtype)
    step, losses, seen = jax.jit(make_step(optimizer, state)), [], []
    for x in batches():
        x = jax.device_put(x, NamedSharding(auto_mesh(N), P("data")))
        params, state, loss, had = step(params, state, x)
        losses.append(np.asarray(loss))
        seen.append(jax.device_get(had))
    return losses, params, state, seen


@pytest.mark.usefixtures("dtypes_promoted")
@pytest.mark.parametrize("dtype", daily([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
def test_exact_differences_have_the_bits_of_the_order_of_before(dtype):
    """Losses and parameters of all steps; nothing is stale, and a skipped step changes nothing."""
    losses, params, state, seen = train(make(), dtype)
    found, behind, late, had = train(make(deferred=True), dtype)
    assert_same_bits(found, losses)
    assert_same_bits(had, seen)
    assert_same_bits(dq.optax.gathered(behind, late), params)
    assert_same_bits(late.masters, state.masters)
    assert int(late.skipped) == int(state.skipped) == 1
    assert np.isfinite(state.norm) and state.norm > 0
    assert_same_bits((late.norm, late.skipped_in_a_row), (state.norm, np.int32(0)))
    # Until then the split leaves are as the last step has taken them.
    assert_same_bits(behind[0]["in"], had[-1][0]["in"])
    assert (np.asarray(behind[0]["in"]) != np.asarray(params[0]["in"])).any()
    assert dq.optax.gathered(params, state) is params


@pytest.mark.parametrize("differences", daily([SOME, DITHER], [SOME]), ids=["cheap", "dither"])
@pytest.mark.usefixtures("padding_is_free")
def test_what_is_gathered_is_what_the_next_step_takes(differences):
    """Bit for bit, on all workers, with noise; differences stay small, since errors feed back."""
    optimizer = make(differences, deferred=True)
    params, state = start(optimizer)
    step, x = jax.jit(make_step(optimizer, state)), problem()[1]
    last = params
    for _ in range(3):
        before = jax.device_get(dq.optax.gathered(params, state))
        params, state, _, had = step(params, state, x)
        assert_copies_equal((params, had))
        assert_same_bits(had, before)
    pairs = zip(*map(jax.tree.leaves, (before, last)), strict=True)
    assert all((w != np.asarray(v)).any() for w, v in pairs)
    after = dq.optax.gathered(params, state)
    for w, v, m in zip(*map(jax.tree.leaves, (after, params, state.masters)), strict=True):
        errors = [np.linalg.norm(np.asarray(x) - np.asarray(m)) for x in (w, v)]
        assert errors[0] <= 0.8 * errors[1]


@pytest.mark.parametrize("functions", daily([FUNCTIONS, REMAT], [REMAT]), ids=["blocks", "remat"])
@pytest.mark.usefixtures("padding_is_free")
def test_differences_travel_beside_functions_before_theirs(functions):
    """Once; a layer waits for its own, and that of the next layer has begun."""
    optimizer = make(SOME, deferred=True)
    params, state = start(optimizer)
    given = params, state, problem()[1]
    traced = jax.make_jaxpr(make_step(optimizer, state, functions=functions))(*given)
    ahead, waits, gathers = gathers_ahead(traced)
    assert gathers == 2 * len(functions)  # scales and payloads, of the forward pass alone
    # The functions are: embed, layers, head. A layer k waits for the gathers of functions 0 to k.
    assert waits[:LAYERS] == [2 * (2 + k) for k in range(LAYERS)]
    assert all(ahead[:LAYERS])


def test_gathered_compiles_once():
    """A trainer calls it for each evaluation."""
    params, state = start(make(deferred=True))
    first = dq.optax.gathered(params, state)
    with compilations() as found:
        second = dq.optax.gathered(params, state)
    assert not found
    assert_same_bits(second, first)


def test_a_step_that_takes_no_differences_warns(monkeypatch):
    """Its parameters would never move."""
    monkeypatch.setattr(reduction, "_taken", set())
    optimizer = make(deferred=True)
    params, state = start(optimizer)
    specs = dq.optax.state_specs(state)

    def step(params, state):
        updates, state = optimizer.update(state.masters, state, params)
        return optax.apply_updates(params, updates), state

    maps = {"in_specs": (P(), specs), "out_specs": (P(), specs)}
    mapped = jax.shard_map(step, mesh=auto_mesh(N), **maps)
    with pytest.warns(UserWarning, match="pass pending=state.pending to dq.overlapped"):
        jax.eval_shape(mapped, params, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(make_step(optimizer, state), params, state, problem()[1])


def test_states_have_shapes_and_go_to_other_numbers_of_workers():
    optimizer = make(deferred=True)
    _, params, state, _ = train(optimizer)
    shapes = dq.optax.init(optimizer, jax.eval_shape(lambda: params), auto_mesh(N))
    alike = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(alike, shapes) == jax.tree.map(alike, state)
    whole = jax.device_get(dq.optax.gathered(params, state))
    saved = jax.device_get((params, state))
    _, fresh = start(optimizer, n=2)
    restored = dq.optax.restore_state(saved[1], fresh)
    params = jax.device_put(saved[0], NamedSharding(auto_mesh(2), P()))
    assert bool(restored.pending.ready)
    assert_same_bits(dq.optax.gathered(params, restored), whole)


def moved(state: Any) -> Any:
    """The state with other masters, whose differences wait for the next step."""
    masters = jax.tree.map(lambda w: w + 1, state.masters)
    pending = dataclasses.replace(state.pending, ready=jnp.ones_like(state.pending.ready))
    return dataclasses.replace(state, masters=masters, pending=pending)


def test_parameters_that_are_set_have_no_differences():
    params, state = start(make(SOME, deferred=True))
    state = moved(state)
    loaded = jax.tree.map(lambda w: w / 2, params)
    state = dq.optax.set_masters(state, loaded)
    assert_same_bits(dq.optax.gathered(loaded, state), loaded)
    assert_same_bits(dq.optax.gathered(params, state), params)  # whatever the masters are


def test_a_tree_that_is_no_list_of_functions_travels_as_one():
    params, mesh = problem()[0][1], auto_mesh(N)
    optimizer = make(deferred=True)
    state = moved(dq.optax.init(optimizer, params, mesh))
    found = jax.jit(partial(dq.optax.gathered, mesh=mesh))(params, (state,))
    np.testing.assert_array_equal(found["kernel"], params["kernel"] + 1)
    np.testing.assert_array_equal(found["bias"], params["bias"] + 1)  # whole: its master


def test_what_cannot_be_is_refused():
    optimizer = make(deferred=True)
    params, state = start(optimizer)
    specs = dq.optax.state_specs(state)
    shapes = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), (params, state, problem()[1])
    )

    def traced(axis="data", **options):
        def loss(params, state, x):
            told = {"specs": specs.masters, "copies": params, "pending": state.pending}
            told |= {name: f(params, state) for name, f in options.items()}
            return dq.overlapped(FUNCTIONS, state.masters, x, axis, **told)

        maps = {"in_specs": (P(), specs, P("data")), "out_specs": P(), "check_vma": False}
        mesh = jax.make_mesh((N, 1), ("data", "more"), axis_types=(AxisType.Auto,) * 2)
        jax.eval_shape(jax.shard_map(loss, mesh=mesh, **maps), *shapes)

    traced()
    for words, run in (
        (r"pending is of type ShardedState; pass state\.pending",
         partial(traced, pending=lambda _, state: state)),
        ("function 1 has none; pass copies=",
         partial(traced, copies=lambda params, _: [params[0], None, *params[2:]])),
        ("axis 'data', and axis_name is 'more'", partial(traced, "more")),
        ("no mesh that has axis 'data'", partial(jax.eval_shape, dq.optax.gathered, *shapes[:2])),
        ("has no state of dq.optax.sharded", partial(dq.optax.gathered, params, ())),
        ("has 2 states", partial(dq.optax.gathered, params, (state, state))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run()


def test_statistics_travel_beside_the_payload_before_theirs():
    """They wait for the payload before the last one, so that they need no time of their own.

    Differences have statistics if the user passes a plan.
    """
    layers = 5
    functions = [lambda w, x: jnp.tanh(x @ w)] * (layers - 1) + [lambda w, x: jnp.sum(x @ w)]
    params = [jnp.eye(64)] * layers  # 4 super-groups of every worker
    optimizer = make(PLANNED, deferred=True)
    mesh = auto_mesh(4)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = dq.optax.init(optimizer, params, mesh)
    step = make_step(optimizer, state, n=4, functions=functions)
    traced = jax.make_jaxpr(step)(params, state, jnp.ones((8, 64)))
    (mapped,) = (e for e in traced.jaxpr.eqns if "shard_map" in e.primitive.name)
    # What each gather comes after: all results of a barrier wait for all that it takes.
    made, after, payloads = {}, [], []
    for e in mapped.params["jaxpr"].eqns:
        found = set().union(*(made.get(v, set()) for v in e.invars if not hasattr(v, "val")))
        if "all_gather" in e.primitive.name:
            payloads.append(e.invars[0].aval.dtype == jnp.uint32)
            after.append(found)
            found = found | {len(payloads) - 1}
        made |= dict.fromkeys(e.outvars, found)
    sent = [i for i, payload in enumerate(payloads) if payload]
    waits = [{sent.index(j) for j in own if payloads[j]} for own in after]
    of_payloads = [own for own, payload in zip(waits, payloads, strict=True) if payload]
    of_statistics = [own for own, payload in zip(waits, payloads, strict=True) if not payload]
    assert of_payloads == [{*range(k)} for k in range(layers)]
    assert sorted(of_statistics, key=len) == [{*range(k - 1)} for k in range(layers)]


PLANS = list(itertools.product(["default", "methods", "by path", "planned"], [False, True]))


@pytest.mark.parametrize(("name", "deferred"), daily(PLANS, PLANS[::3] + PLANS[5:6]))
def test_updates_have_a_plan_only_if_the_user_passes_one(name, deferred):
    """Without a plan, no statistics travel over links of any kind."""
    methods = {
        "default": (None, None),
        "methods": (dq.DynamiQ(), DITHER.method),
        "planned": (dq.DynamiQ(plan=True), PLANNED.method),
        "by path": (lambda *_: dq.DynamiQ(), lambda *_: DITHER.method),
    }
    gradients, differences = methods[name]
    policy = dq.Policy(gradients=dq.Compression(gradients, **LIMITS), parameters=differences)
    optimizer = dq.optax.sharded(optax.sgd(0.3), "data", compression=policy, deferred=deferred)
    params = {"w": jnp.ones((64, 64))}

    def step(params, state):
        params = dq.optax.gathered(params, state)
        return optimizer.update(params, state, params)

    state = jax.eval_shape(lambda p: dq.optax.init(optimizer, p, auto_mesh(4)), params)
    specs = dq.optax.state_specs(state)
    maps = {"in_specs": (P(), specs), "out_specs": (P(), specs), "check_vma": False}
    mapped = jax.jit(jax.shard_map(step, mesh=auto_mesh(4), **maps))
    text = mapped.lower(params, state).compile().as_text()
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-reduce|all-gather)\(", text)
    large = [kind for shape, kind in found if shape != "f32[]"]  # that is the gradient's norm
    statistics = ["all-reduce", "all-gather"] if name == "planned" else []
    assert sorted(large) == sorted([*statistics, "all-gather"])  # of the differences' payloads


@pytest.mark.parametrize("plan", daily([None, True, False], [None, False]))
def test_gradients_beside_the_backward_pass_have_a_plan_over_slow_links(plan):
    """One number for each super-group; without a plan samples travel, two numbers each."""
    compression = dq.Compression(dq.DynamiQ(plan=plan), **LIMITS)
    params, x = [jnp.eye(64)] * 2, jnp.ones((8, 64))
    functions = [lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.sum(x @ w)]

    def grads(masters, copies, x):
        options = {"compression": compression, "specs": [P("data")] * 2, "copies": copies}
        return jax.grad(lambda own: dq.overlapped(functions, own, x, "data", **options))(masters)

    maps = {"in_specs": (P("data"), P(), P("data")), "out_specs": P("data")}
    text = str(jax.make_jaxpr(jax.shard_map(grads, mesh=auto_mesh(4), **maps))(params, params, x))
    sums = re.findall(r"bf16\[(\d),\d+\](?:\{[^}]*\})? = psum", text)
    assert {*sums} == ({"2"} if plan is False else {"1"})


def test_functions_run_beside_the_payload_between_hosts_of_several_devices():
    """No function waits for the next one's payload, which a gather on two levels sends first."""
    layers = 4
    functions = [lambda w, x: jnp.tanh(x @ w)] * (layers - 1) + [lambda w, x: jnp.sum(x @ w)]
    method = dataclasses.replace(DITHER, topology=dq.Hierarchical())
    shapes = [jnp.eye(64)] * layers
    mesh = jax.make_mesh((2, 2), ("hosts", "gpus"), axis_types=(AxisType.Auto,) * 2)

    def loss(params, x):
        own = [w.reshape(-1)[: w.size // 4].reshape(16, 64) for w in params]
        options = {"compression": method, "specs": [P(("hosts", "gpus"))] * layers}
        return dq.overlapped(functions, own, x, ("hosts", "gpus"), **options)

    maps = {"in_specs": (P(), P(("hosts", "gpus"))), "out_specs": P(("hosts", "gpus"))}
    mapped = jax.shard_map(
        lambda *args: jax.value_and_grad(loss)(*args)[0][None], mesh=mesh, check_vma=False, **maps
    )
    traced = jax.make_jaxpr(mapped)(shapes, jnp.ones((8, 64)))
    (inside,) = (e for e in traced.jaxpr.eqns if "shard_map" in e.primitive.name)
    made, sent, functions_after = {}, [], []
    for e in inside.params["jaxpr"].eqns:
        found = set().union(*(made.get(v, set()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name == "all_gather" and e.invars[0].aval.dtype == jnp.uint32:
            if "hosts" in e.params["axis_name"]:
                found = found | {len(sent)}
                sent.append(e)
        elif e.primitive.name == "dot_general":
            functions_after.append(found)
        made |= dict.fromkeys(e.outvars, found)
    assert functions_after[:layers] == [{*range(k + 1)} for k in range(layers)]
