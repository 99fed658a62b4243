"""Losses on Auto axes that close over the batch, keys and objects of the step, as in plain JAX."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close, assert_same_bits
from cases import EXACT, daily
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import mesh_of, network

import dynamiq_jax as dq

OPTIONS = {"axis_name": "data", "compression": EXACT}


def arrays():
    params, batch = network()
    return {name: params[name] for name in ("up", "down")}, batch


def ours(loss, **options):
    return dq.value_and_grad(loss, mesh=mesh_of(8), **OPTIONS | options)


def errors(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - x), axis=-1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["name"])
@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "rows"


class Trainer:
    """Its method is the loss."""

    def __init__(self, batch):
        self.batch, self.others = {"mine": [batch["x"]]}, [self]

    def loss(self, params):
        return jnp.mean(errors(params, self.batch["mine"][0]))


def from_default(batch):
    def loss(params, x=batch["x"]):
        return jnp.mean(errors(params, x))

    return lambda params: loss(params)


def from_partial(batch):
    loss = lambda params, data, *, more: jnp.mean(errors(params, data["x"] + more[0]))
    return functools.partial(loss, data=Batch(batch["x"]).__dict__, more=(0.0,))


def from_nested(batch):
    def rows():
        return batch["x"]

    inner = jax.checkpoint(lambda params: jnp.mean(errors(params, rows())))
    return lambda params: inner(params) + 0 * rows()[0, 0]


def from_keywords(batch):
    def loss(params, *, x=batch["x"]):
        return jnp.mean(errors(params, x))

    return loss


FORMS = {
    "a dict": lambda batch: lambda params: jnp.mean(errors(params, batch["x"])),
    "a node": lambda batch: (
        lambda own: lambda params: jnp.mean(errors(params, own.x))
    )(Batch(batch["x"])),
    "an object": lambda batch: Trainer(batch).loss,
    "a deque": lambda batch: (
        lambda own: lambda params: jnp.mean(errors(params, own[0]))
    )(collections.deque([batch["x"]])),
    "a default": from_default,
    "a partial": from_partial,
    "a function": from_nested,
    "keywords": from_keywords,
}  # fmt: skip


@pytest.mark.parametrize("form", daily(FORMS, ["a dict", "an object", "a function"]))
def test_a_batch_in_a_closure_is_split(form):
    """However the loss holds it; with a warning where no spec tells it."""
    params, batch = arrays()
    expected = jax.jit(lambda p, b: jax.value_and_grad(FORMS[form](b))(p))(params, batch)
    run = lambda p, b, **told: ours(FORMS[form](b), **told)(p)
    assert_close(jax.jit(functools.partial(run, closed_specs=P("data")))(params, batch), expected)
    with pytest.warns(UserWarning, match=r"closes over.*P\('data'.*closed_specs=") as seen:
        found = jax.eval_shape(run, params, batch)
    assert len(seen) == 1
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


def test_rows_of_the_arguments_tell_which_arrays_are_split():
    """They are as long as examples; names of variables may tell otherwise."""
    params, batch = arrays()
    table = np.linspace(1, 2, 16, dtype=np.float32)

    def step(params, batch, table, mask, **told):
        def loss(params, x):
            own = errors(params, x) * mask
            return jnp.mean(own) * table[3] * table[15] * scale

        scale = jnp.sum(table) / 9
        return ours(loss, **told)(params, batch["x"])

    args = params, batch, table, batch["mask"]

    @jax.jit
    def plain(params, batch, table, mask):
        scale = jnp.sum(table) / 9
        loss = lambda p: jnp.mean(errors(p, batch["x"]) * mask) * table[3] * table[15] * scale
        return jax.value_and_grad(loss)(params)

    with pytest.warns(UserWarning, match=r"'mask': P\('data'.*'table': P\(\)"):
        assert_close(jax.jit(step)(*args), plain(*args))
    told = {"closed_specs": {"mask": P("data"), "table": P()}}
    assert_close(jax.jit(functools.partial(step, **told))(*args), plain(*args))
    for wrong in ({"tables": P()}, "rows"):
        with pytest.raises(
            ValueError, match=r"closed_specs=.*variables \['mask', 'scale', 'table'"
        ):
            jax.eval_shape(functools.partial(step, closed_specs=wrong), *args)

    def alone(params, batch, table):
        return ours(lambda p: jnp.mean(errors(p, batch["x"])) * table[3])(params)

    with pytest.raises(ValueError, match=r"arrays of \[16, 32\] rows.*closed_specs="):
        jax.eval_shape(alone, *args[:3])
    with pytest.raises(ValueError, match="closed_specs=.* is for Auto axes"):
        dq.value_and_grad(alone, axis_name="data", mesh=EXPLICIT, closed_specs=P())


EXPLICIT = mesh_of(8, kind=jax.sharding.AxisType.Explicit)


def test_what_no_copy_can_exchange_is_refused():
    """And an array that is not used is no reason."""
    params, batch = arrays()

    @jax.jit
    def step(params, batch):
        inner = jax.jit(lambda params: jnp.mean(errors(params, batch["x"])))
        state = {"inner": inner, "batch": batch}
        unused = lambda params, own: jnp.mean(errors(params, own if state else batch["x"]))
        found = ours(unused)(params, batch["x"])
        with pytest.raises(ValueError, match=r"closes over 1 arrays .*float32\[32,16\].*jax.jit"):
            ours(lambda params: state["inner"](params))(params)
        return found

    expected = jax.value_and_grad(lambda p: jnp.mean(errors(p, batch["x"])))(params)
    assert_close(step(params, batch), expected)


class Generator:
    """Draws keys, as EasyLM's does."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, key = jax.random.split(self.key)
        return key


class Reserve:
    """Draws keys from a reserve, as Haiku's does."""

    def __init__(self, key):
        self.key, self.reserve = key, collections.deque()

    def __call__(self):
        if not self.reserve:
            self.key, *keys = jax.random.split(self.key, 4)
            self.reserve.extend(keys)
        return self.reserve.popleft()


class Variable:
    """Draws keys by a nonlocal variable, and counts in a dict."""

    def __init__(self, key):
        counts = {"drawn": 0}

        def draw():
            nonlocal key
            key, own = jax.random.split(key)
            counts["drawn"] += 1
            counts["last"] = own
            return own

        self.draw, self.counts = draw, counts

    def __call__(self):
        return self.draw()


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", [Generator, Reserve, Variable])
@pytest.mark.parametrize("constrained", [False, True])
def test_generators_of_keys_go_on_as_in_plain_jax(kind, raw, constrained):
    """Each worker draws its own numbers, and the generator ends as if each had drawn the same."""
    params, batch = arrays()

    def step(value_and_grad, params, batch, key):
        draw = kind(key)
        first = draw()

        def loss(params, x):
            x = lax.with_sharding_constraint(x, P("data")) if constrained else x
            own = jax.random.uniform(draw(), (2,))[1:] + 0 * jax.random.uniform(draw())
            return jnp.mean(errors(params, x)), own

        (value, own), grads = value_and_grad(loss)(params, batch["x"])
        return value, grads, own, [first, draw(), draw(), draw(), draw()]

    key = jax.random.PRNGKey(3) if raw else jax.random.key(3)
    told = {} if kind is Reserve else {"closed_specs": P("data")}  # for all but keys
    mine = functools.partial(ours, has_aux=True, aux="rows", **told)
    plain = functools.partial(jax.value_and_grad, has_aux=True)
    with jax.set_mesh(mesh_of(8)):
        *found, own, keys = jax.jit(functools.partial(step, mine))(params, batch, key)
        *expected, _, drawn = jax.jit(functools.partial(step, plain))(params, batch, key)
    assert_close(found, expected)
    assert_same_bits(*(jax.tree.map(np.asarray, x if raw else jax.random.key_data(jnp.stack(x)))
                       for x in (keys, drawn)))  # fmt: skip
    assert len({*np.asarray(own).tolist()}) == 8


def test_what_a_loss_changes_to_values_of_examples_is_refused():
    """Parameters are the same on all workers, so their values may go anywhere."""
    params, batch = arrays()

    def step(params, batch, what):
        seen = {"norm": jnp.zeros(()), "node": Batch(batch["x"])}

        def loss(params, x):
            if what == "node":
                seen["node"].x = 2 * seen["node"].x
            else:
                seen["norm"] = jnp.sum(x**2) if what == "examples" else jnp.sum(params["up"] ** 2)
            return jnp.mean(errors(params, x)) + 0 * jnp.mean(seen["node"].x)

        found = ours(loss, closed_specs=P("data"))(params, batch["x"])
        return found, seen["norm"]

    run = jax.jit(step, static_argnames="what")
    np.testing.assert_allclose(
        run(params, batch, what="params")[1], np.sum(params["up"] ** 2), rtol=1e-5
    )
    with pytest.raises(ValueError, match=r"changes .*norm.* to values of examples.*as aux"):
        run(params, batch, what="examples")
    with pytest.raises(
        ValueError, match=r"changes .*node.*, a Batch that it closes over.*argument"
    ):
        run(params, batch, what="node")


def test_weights_close_over_arrays_too():
    params, batch = arrays()

    @jax.jit
    def step(params, batch):
        tokens = lambda *_: jnp.sum(batch["mask"])

        def loss(params):
            own = errors(params, batch["x"]) * batch["mask"]
            return jnp.sum(own) / jnp.maximum(tokens(), 1)

        return ours(loss, weight=tokens, closed_specs=P("data"))(params)

    def masked(params):
        own = errors(params, batch["x"]) * batch["mask"]
        return jnp.sum(own) / jnp.sum(batch["mask"])

    assert_close(step(params, batch), jax.value_and_grad(masked)(params))
