"""`value_and_grad` on Auto meshes: losses written for `jax.jit` against JAX's own gradients."""

import functools
import math
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, auto_mesh, low, once, small
from flax import linen
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.collectives import sum as sums
from dynamiq_jax.core.constraints import constraints_without
from dynamiq_jax.methods.metrics import vnmse

F32 = small(dq.F32())
OPTIONS = {"axis_name": "data", "method": F32}


@once
def arrays():
    """Parameters, and examples of which another part counts on every worker."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (16, 64)) / 4,
        "down": jax.random.normal(keys[1], (64, 16)) / 8,
    }
    x = jax.random.normal(keys[2], (32, 16)) * jnp.linspace(0.2, 2.0, 32)[:, None]
    mask = jnp.float32(jnp.arange(32.0) % 5 < jnp.linspace(1, 4, 32))
    return params, {"x": x, "mask": mask}


@functools.cache
def mesh_of(*sizes):
    names = ("data", "model", "one")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def errors(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - x), axis=-1)


def loss(params, batch):
    return jnp.mean(errors(params, batch["x"]))


def masked(params, batch):
    """The mean over tokens that count."""
    own = errors(params, batch["x"]) * batch["mask"]
    return jnp.sum(own) / jnp.maximum(jnp.sum(batch["mask"]), 1)


@functools.cache
def plain(loss):
    """The loss of all examples and its gradient, on one device."""
    return jax.jit(jax.value_and_grad(loss))(*arrays())


def test_arguments_are_those_of_jax_value_and_grad():
    """Parameters anywhere among the arguments; a flag, a scalar and a tree that stays whole."""
    params, batch = arrays()
    frozen = {"table": np.linspace(0.0, 1.0, 48, dtype=np.float32).reshape(3, 16)}

    def own(up, frozen, batch, down, *, scale, doubled):
        assert isinstance(doubled, bool)
        assert frozen["table"].shape == (3, 16)
        found = loss({"up": up, "down": down}, batch) + jnp.sum(frozen["table"]) * scale
        return found * 2 if doubled else found

    args = params["up"], frozen, batch, params["down"]
    kwargs = {"scale": np.float32(0.1), "doubled": True}
    for argnums in ((0, 3), 3, -1):
        expected = jax.value_and_grad(own, argnums)(*args, **kwargs)
        rest = 2 if isinstance(argnums, tuple) else 3
        specs = (P(), None) if rest == 2 else (P(), P(), None)
        f = dq.value_and_grad(own, argnums=argnums, mesh=auto_mesh(), batch_specs=specs, **OPTIONS)
        assert_close(f(*args, **kwargs), expected)
        with_flag = functools.partial(f, doubled=True)
        assert_close(jax.jit(with_flag)(*args, scale=kwargs["scale"]), expected)


@pytest.mark.parametrize("source", ["context", "parameters"])
def test_the_mesh_may_come_from_around(source):
    params, batch = arrays()
    f = dq.value_and_grad(loss, **OPTIONS)
    expected = plain(loss)
    if source == "context":
        with jax.set_mesh(mesh_of(8)):
            assert_close(jax.jit(f)(params, batch), expected)
            assert_close(f(params, batch), expected)
    else:
        placed = jax.device_put(params, NamedSharding(mesh_of(8), P()))
        assert_close(f(placed, batch), expected)
        assert_close(jax.jit(f)(placed, batch), expected)
        with pytest.raises(ValueError, match="there is no mesh"):
            jax.jit(f)(params, batch)


def test_keys_are_each_workers_own_unless_told():
    params, batch = arrays()
    key = jax.random.key(5)

    def noise(params, batch, key):
        assert len(batch["x"]) == 4  # its own examples, also where a spec is None
        return loss(params, batch), jax.random.normal(key, (1,))

    f = functools.partial(dq.value_and_grad, noise, mesh=auto_mesh(), has_aux=True, aux="rows")
    own = jax.jit(f(**OPTIONS))(params, batch, key)[0][1]
    assert len({*np.asarray(own).tolist()}) == 8
    same = jax.jit(f(batch_specs=(None, P()), **OPTIONS))(params, batch, key)[0][1]
    np.testing.assert_array_equal(same, np.full(8, jax.random.normal(key, (1,))[0]))


def test_a_key_without_its_type_is_refused():
    params, batch = arrays()
    f = dq.value_and_grad(lambda p, b, key: loss(p, b), mesh=auto_mesh(2), **OPTIONS)
    with pytest.raises(ValueError, match="key without its type.*wrap_key_data"):
        f(params, batch, jax.random.PRNGKey(0))


def test_weights_make_a_masked_mean_exact():
    params, batch = arrays()
    expected = plain(masked)
    tokens = lambda params, batch: jnp.sum(batch["mask"])  # noqa: E731
    f = functools.partial(dq.value_and_grad, masked, mesh=auto_mesh())
    assert_close(f(weight=tokens, **OPTIONS)(params, batch), expected)
    unweighted = f(**OPTIONS)(params, batch)
    assert abs(float(unweighted[0] - expected[0])) > 1e-3  # the reason for weight=
    sharded = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(params, NamedSharding(sharded, P("data")))
    assert_close(f(weight=tokens, mesh=sharded, **OPTIONS)(placed, batch), expected)
    nothing = batch | {"mask": np.zeros(32, np.float32)}
    assert_close(
        f(weight=tokens, **OPTIONS)(params, nothing)[1], jax.tree.map(np.zeros_like, params)
    )


def test_a_loss_that_is_the_same_on_all_workers_is_that_of_all_examples():
    """Its collectives over one of two data axes leave the other one's mean to us."""
    params, batch = arrays()

    def of_all(params, batch):
        own = errors(params, batch["x"]) * batch["mask"]
        return lax.psum(jnp.sum(own), "data") / lax.psum(jnp.sum(batch["mask"]), "data")

    f = functools.partial(dq.value_and_grad, mesh=auto_mesh(), **OPTIONS)
    assert_close(f(of_all)(params, batch), plain(masked))
    halves = lambda p, b: lax.pmean(loss(p, b), "model")  # noqa: E731
    both = dq.value_and_grad(halves, mesh=mesh_of(4, 2), axis_name=("data", "model"), method=F32)
    assert_close(both(params, batch), plain(loss))
    tokens = lambda params, batch: jnp.sum(batch["mask"])  # noqa: E731
    with pytest.raises(ValueError, match=r"same on the 8 workers of axes \('data',\).*weight= out"):
        f(of_all, weight=tokens)(params, batch)


def test_equal_constants_of_other_types_are_other_programs():
    """The loss closes over a dict that is no pytree, too."""
    params, batch = arrays()
    factors = {bool: 1.0, int: 2.0, float: 3.0}
    f = dq.value_and_grad(
        lambda p, b, flag: loss(p, b) * factors[type(flag)], mesh=auto_mesh(2), **OPTIONS
    )
    own = [f(params, batch, flag)[0] / plain(loss)[0] for flag in (True, 1, 1.0)]
    np.testing.assert_allclose(own, list(factors.values()), rtol=1e-5)
    zero = dq.value_and_grad(
        lambda p, b, zero: loss(p, b) * math.copysign(1, zero), mesh=auto_mesh(2), **OPTIONS
    )
    assert zero(params, batch, 0.0)[0] == -zero(params, batch, -0.0)[0] != 0


def test_arguments_that_may_be_no_examples_are_not_split_silently():
    params, batch = arrays()
    f = functools.partial(dq.value_and_grad, mesh=auto_mesh(2), **OPTIONS)
    with pytest.warns(
        UserWarning, match=r"of 2 lengths.*\(32,\), \(6, 16\)\].*P\(\) in batch_specs"
    ):
        f(lambda p, b, table: loss(p, b))(params, batch, np.ones((6, 16), np.float32))
    with pytest.raises(ValueError, match=r"array of PRNG keys, key<fry>\[32\].*P\('data'\)"):
        f(lambda p, b, keys: loss(p, b))(params, batch, jax.random.split(jax.random.key(0), 32))
    for argnums in ((0, 2), (0, -2)):
        with pytest.raises(ValueError, match=r"argnums=\(0, -?2\), and the loss got 2 positional"):
            f(loss, argnums=argnums)(params, batch)


def test_aux_becomes_what_its_words_say():
    params, batch = arrays()
    tokens = lambda params, batch: jnp.sum(batch["mask"])  # noqa: E731

    def with_aux(params, batch):
        own = errors(params, batch["x"])
        low = jnp.sum(own).astype(jnp.bfloat16)
        return masked(params, batch), {
            "loss": masked(params, batch), "low": low, "rows": own, "step": jnp.int32(7),
            "tokens": jnp.sum(batch["mask"]).astype(jnp.int32), "nothing": None,
        }  # fmt: skip

    words = {"low": "sum", "rows": "rows", "step": "same", "tokens": "sum"}  # "loss" is a mean
    f = dq.value_and_grad(
        with_aux, mesh=auto_mesh(), has_aux=True, aux=words, weight=tokens, **OPTIONS
    )
    (_, found), _ = jax.jit(f)(params, batch)
    (_, expected), _ = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(params, batch)
    low = found.pop("low")
    assert low.dtype == jnp.bfloat16
    assert float(low) == pytest.approx(float(expected.pop("low")), rel=0.02)
    assert_close(found, expected)
    assert found["rows"].shape == (32,)


@pytest.mark.parametrize(
    ("leaf", "aux", "match"),
    [
        (lambda: jnp.int32(7), None, r"aux leaf \['leaf'\] is int32\[\] .*aux=None.*'same'"),
        (lambda: jnp.ones(3), None, r"float32\[3\]"),
        (lambda: jnp.ones(3), "average", "aux='average'"),
        (lambda: jnp.ones(3), {"other": "mean"}, r"the entry \['other'\] is that of no leaf; pass"),
        (lambda: jnp.ones(3), {"leaf": {"deeper": "mean"}}, "does not fit the loss's aux"),
    ],
)
def test_aux_without_a_word_is_refused(leaf, aux, match):
    params, batch = arrays()
    f = dq.value_and_grad(
        lambda p, b: (loss(p, b), {"leaf": leaf()}), mesh=auto_mesh(), has_aux=True, aux=aux,
        **OPTIONS,
    )  # fmt: skip
    with pytest.raises(ValueError, match=match):
        f(params, batch)


def token_sum(params, batch):
    """A sum over tokens, and their number: who trains divides later."""
    count = jnp.sum(batch["mask"])
    return jnp.sum(errors(params, batch["x"]) * batch["mask"]), {"tokens": count}


@pytest.mark.parametrize(("sizes", "op"), [((8,), "sum"), ((8,), "mean"), ((4, 2), "sum")])
def test_terms_of_micro_batches_are_summed_once(sizes, op):
    """A window's gradient is that of one batch, divided by the tokens of all micro-batches."""
    params, batch = arrays()
    mesh = mesh_of(*sizes)
    specs = {"up": P(None, "model"), "down": P("model")} if len(sizes) > 1 else None
    options = {"op": op, "has_aux": True, "mesh": mesh, "specs": specs} | OPTIONS
    halves = jax.tree.map(lambda x: x.reshape(2, 16, *x.shape[1:]), batch)

    def own_loss(params, batch):
        value, aux = token_sum(params, batch)
        return value / len(batch["mask"]) if op == "mean" else value, aux

    def window(params, halves):
        f = dq.value_and_grad(own_loss, reduce=False, **options)

        def add(terms, half):
            (value, aux), more = f(params, half)
            return jax.tree.map(jnp.add, terms, more), (value, aux["tokens"])

        _, like = jax.eval_shape(f, params, jax.tree.map(lambda x: x[0], halves))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        terms, (values, tokens) = lax.scan(add, zeros, halves)
        grads = dq.psum(terms, "data", method=F32)
        return jnp.sum(values), jnp.sum(tokens), grads

    compiled = jax.jit(window).lower(params, halves).compile()
    value, tokens, grads = compiled(params, halves)
    first, second = (jax.tree.map(lambda x, i=i: x[i], halves) for i in (0, 1))
    both = lambda p: own_loss(p, first)[0] + own_loss(p, second)[0]  # noqa: E731
    assert_close((value, grads), jax.jit(jax.value_and_grad(both))(params))
    assert tokens == pytest.approx(batch["mask"].sum() * (1 if op == "sum" else 1 / sizes[0]))
    if specs is not None:
        assert {name: x.sharding.spec for name, x in grads.items()} == specs
    else:  # one reduction of the gradient, of 2,048 coordinates, and not in the loop
        text = compiled.as_text()
        large = [line for line in text.splitlines() if "all-reduce(" in line and "2048" in line]
        assert len(large) == 1


@pytest.mark.parametrize(("sizes", "op"), [((8,), "mean"), ((4, 2), "sum")])
def test_a_loss_over_micro_batches_is_reduced_once(sizes, op):
    """The gradient is that of one batch; only one micro-batch's activations are kept."""
    params, batch = arrays()
    specs = {"up": P(None, "model"), "down": P("model")} if len(sizes) > 1 else None
    options = {"op": op, "mesh": mesh_of(*sizes), "specs": specs} | OPTIONS
    join = jnp.mean if op == "mean" else jnp.sum

    def over_halves(params, batch):
        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        micro_loss = jax.checkpoint(lambda half: join(errors(params, half["x"])))
        return join(lax.map(micro_loss, halves))

    compiled = jax.jit(dq.value_and_grad(over_halves, **options)).lower(params, batch).compile()
    value, grads = compiled(params, batch)
    expected = plain(lambda p, b: join(errors(p, b["x"])))
    assert_close((value, jax.device_get(grads)), expected)
    if specs is None:  # one reduction of the gradient, of 2,048 coordinates, and not in the loop
        lines = compiled.as_text().splitlines()
        assert len([line for line in lines if "all-reduce(" in line and "2048" in line]) == 1


def test_a_sum_that_the_loss_has_taken_itself_is_not_taken_again():
    params, batch = arrays()
    own = lambda p, b: lax.psum(jnp.sum(errors(p, b["x"])), "data")  # noqa: E731
    whole = lambda p, b: jnp.sum(errors(p, b["x"]))  # noqa: E731
    f = dq.value_and_grad(own, mesh=mesh_of(8), op="sum", **OPTIONS)
    assert_close(jax.jit(f)(params, batch), plain(whole))


def test_what_terms_cannot_do_is_refused():
    params, batch = arrays()
    f = dq.value_and_grad(loss, mesh=mesh_of(8), reduce=False, **OPTIONS)
    _, terms = jax.jit(f)(params, batch)
    with pytest.raises(ValueError, match="op='mean'.*dq.psum"):
        dq.pmean(terms, "data", method=F32)
    with pytest.raises(ValueError, match=r"workers of \('data',\), and axis_name is \('rows',\)"):
        dq.psum(terms, "rows", method=F32)
    sharded = {"up": P("data"), "down": P()}
    f = dq.value_and_grad(loss, mesh=mesh_of(8), reduce=False, metrics=True, **OPTIONS)
    with pytest.raises(ValueError, match="reduce=False and metrics=.*op='sum'"):
        f(params, batch)
    f = dq.value_and_grad(loss, mesh=mesh_of(8), reduce=False, specs=sharded, **OPTIONS)
    with pytest.raises(NotImplementedError, match="reduce=False.*whole gradients"):
        f(params, batch)
    with pytest.raises(ValueError, match="op='sum' and weight="):
        dq.value_and_grad(loss, op="sum", weight=lambda p, b: 1.0, **OPTIONS)


def test_arrays_that_a_loss_closes_over_are_refused_in_jit():
    """Every worker would use all examples. What is closed over and not used is no reason."""
    params, batch = arrays()

    @functools.partial(jax.jit, static_argnames="uses")
    def step(params, batch, uses):
        state = {"batch": batch, "apply": errors}

        def closing(params, own):
            x = state["batch"]["x"] if uses else own["x"]
            return jnp.mean(state["apply"](params, x))

        return dq.value_and_grad(closing, mesh=auto_mesh(), **OPTIONS)(params, batch)

    assert_close(step(params, batch, False), plain(loss))

    @jax.jit
    def keyed(params, batch, key):
        inner = lambda p, b: loss(p, b) * jax.random.uniform(key)  # noqa: E731
        outer = functools.partial(lambda p, b, inner: inner(p, b), inner=jax.checkpoint(inner))
        return dq.value_and_grad(outer, mesh=auto_mesh(), **OPTIONS)(params, batch)

    with pytest.raises(ValueError, match=r"closes over 1 arrays .*key"):
        keyed(params, batch, jax.random.key(0))
    with pytest.raises(ValueError, match=r"closes over 1 arrays .*float32\[32,16\].*batch_specs"):
        step(params, batch, True)


class Net(linen.Module):
    """Says how activations and parameters are sharded, over the data axis, too."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = self.param("up", linen.with_partitioning(init, (None, "model")), (16, 64))
        down = self.param("down", linen.with_partitioning(init, ("model", None)), (64, 16))
        hidden = lax.with_sharding_constraint(jnp.tanh(x @ up), P("data", "model"))
        hidden = linen.with_logical_constraint(hidden, ("batch", "width"))
        return lax.with_sharding_constraint({"y": hidden @ down}, {"y": P(("data", "one"))})["y"]


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_constraints_of_the_loss_forget_the_data_axes(sizes):
    mesh = mesh_of(*sizes)
    _, batch = arrays()
    with jax.set_mesh(mesh):
        boxed = Net().init(jax.random.key(0), batch["x"])
    specs = linen.get_partition_spec(boxed)
    params = jax.device_put(
        linen.unbox(boxed), jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    )

    def net_loss(params, x):
        out = Net().apply(params, x)
        out = lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", None)))
        return jnp.mean(jnp.square(out - x))

    axes = ("data", "one") if sizes[2] > 1 else "data"
    shardings = jax.tree.map(lambda x: x.sharding, params)
    f = dq.value_and_grad(net_loss, mesh=mesh, axis_name=axes, method=F32, specs=shardings)
    rules = (("batch", "data"), ("width", "model"))
    with jax.set_mesh(mesh), linen.logical_axis_rules(rules):
        found = jax.jit(f)(params, batch["x"])
        expected = jax.jit(jax.value_and_grad(net_loss))(params, batch["x"])
    assert_close(found, expected)
    for name, leaf in found[1]["params"].items():
        assert leaf.sharding.is_equivalent_to(params["params"][name].sharding, 2)


def test_constraints_are_jax_own_in_other_threads_and_afterwards():
    of_jax = lax.with_sharding_constraint
    mesh, seen = mesh_of(8), []

    def elsewhere():
        with jax.set_mesh(mesh):
            y = jax.jit(lambda x: lax.with_sharding_constraint(x, P("data")))(jnp.ones(8))
        seen.append(y.sharding.spec)

    with constraints_without({"data"}):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [P("data")]
    with constraints_without(()):
        elsewhere()
    assert seen == [P("data")] * 2
    with pytest.raises(KeyError), constraints_without({"data"}):
        raise KeyError("in the loss")
    assert lax.with_sharding_constraint is of_jax


def test_constraints_by_other_names(monkeypatch):
    """A module's own name of JAX's function forgets axes, too; a name elsewhere is told of."""
    params, batch = arrays()
    mesh, of_jax = mesh_of(4, 2), lax.with_sharding_constraint
    module = types.ModuleType("layers")
    monkeypatch.setitem(sys.modules, "layers", module)
    vars(module)["constrain"] = of_jax
    spec = NamedSharding(mesh, P("data", "model"))
    f = functools.partial(dq.value_and_grad, mesh=mesh, specs=P(), **OPTIONS)
    constrained = lambda p, b: loss(p, {"x": module.constrain(b["x"], spec)})  # noqa: E731
    assert_close(jax.jit(f(constrained))(params, batch), plain(loss))
    assert module.constrain is of_jax
    for other in (spec, P("data")):
        hidden = lambda p, b, other=other: loss(p, {"x": of_jax(b["x"], other)})  # noqa: E731
        with pytest.raises(ValueError, match="data") as caught, jax.set_mesh(mesh):
            jax.jit(f(hidden))(params, batch)
        assert "under a map over ['data']. Its constraints" in "".join(caught.value.__notes__)


def test_meshes_of_both_types_and_calls_inside_of_maps_are_refused():
    params, batch = arrays()
    types = AxisType.Auto, AxisType.Explicit
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    with pytest.raises(ValueError, match=r"\('data', 'model'\) of types.*all axes Explicit"):
        dq.value_and_grad(loss, mesh=mixed, **OPTIONS)
    inside = jax.shard_map(
        dq.value_and_grad(loss, mesh=mesh_of(8), **OPTIONS), mesh=mesh_of(8),
        in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="inside of a map over axis 'data'.*jax.value_and_grad"):
        inside(params, batch)
    f = dq.value_and_grad(loss, mesh=auto_mesh(2), **OPTIONS)
    with pytest.raises(TypeError, match=r"parameter \['step'\] is int32\[\].*argnums="):
        f(params | {"step": jnp.int32(2)}, batch)


def test_keywords_have_specs_and_frozen_shards_are_gathered_by_layer(monkeypatch):
    """LoRA: frozen weights stay sharded, and the loss gathers them; whole ones are warned of."""
    params, batch = arrays()
    up = jax.random.normal(jax.random.key(4), (16, 4096)) / 16
    frozen = {"up": up, "down": jax.random.normal(jax.random.key(5), (4096, 16)) / 64}
    mesh = mesh_of(8)
    eight = functools.partial(dq.all_gather, method=low(dq.DynamiQ(bits=8)))
    gathers = {"exact": lax.all_gather, "8 bits": eight}

    def lora(params, x, *, frozen, how=None):
        @jax.checkpoint
        def layer(x, w):
            return x @ (w if how is None else gathers[how](w, "data", tiled=True))

        return loss(params, {"x": layer(layer(x, frozen["up"]), frozen["down"])})

    x = batch["x"]
    expected = jax.jit(jax.value_and_grad(lora))(params, x, frozen=frozen)
    shards = jax.device_put(frozen, NamedSharding(mesh, P("data")))
    f = dq.value_and_grad(lora, mesh=mesh, batch_specs={"frozen": P("data")}, **OPTIONS)
    assert_close(f(params, x, frozen=shards, how="exact"), expected)
    value, grads = f(params, x, frozen=shards, how="8 bits")
    assert float(value) == pytest.approx(float(expected[0]), rel=0.01)
    assert 1e-6 < float(vnmse(grads, expected[1])) < 1e-3
    whole = dq.value_and_grad(lora, mesh=mesh, batch_specs={"frozen": P()}, **OPTIONS)
    assert_close(whole(params, x, frozen=shards), expected)
    monkeypatch.setattr(sums, "LARGE_GATHER", 1000)
    with pytest.warns(UserWarning, match="2 sharded arguments.*524,288 bytes.*lax.all_gather"):
        whole(params, x, frozen=shards)
    whole(params, x, frozen=frozen)  # on one device: nothing is gathered
    unknown = dq.value_and_grad(lora, mesh=mesh, batch_specs={"froze": P()}, **OPTIONS)
    with pytest.raises(ValueError, match=r"names 'froze'.*\['frozen', 'how'\].*by keyword"):
        unknown(params, x, frozen=frozen, how="exact")
