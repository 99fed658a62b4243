"""`dq.nnx.value_and_grad`: losses of modules against `nnx.value_and_grad` on the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close
from cases import CHEAP, over, small
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of, put

import dynamiq_jax as dq
from dynamiq_jax.jaxprs.walk import passed_arguments
from dynamiq_jax.methods.metrics import vnmse

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
OURS = functools.partial(dq.nnx.value_and_grad, axis_name="data", compression=small(dq.F32()))


@functools.cache
def batches():
    """Other examples on every worker, of which another part counts."""
    x = np.asarray(jax.random.normal(jax.random.key(1), (3, 32, 16)))
    x = x * np.linspace(0.2, 2.0, 32, dtype=np.float32)[:, None]
    mask = np.float32(np.arange(32.0) % 5 < np.linspace(1, 4, 32))
    return [{"x": own, "y": np.tanh(own[:, :4]), "mask": mask} for own in x]


class Model(nnx.Module):
    def __init__(self, axis_name=None, rate=0.0):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.LoRALinear(16, 64, lora_rank=4, rngs=rngs)
        self.hidden.lora.lora_b[...] += 0.1
        self.norm = nnx.BatchNorm(64, rngs=rngs, axis_name=axis_name)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x)))))


def errors(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch.pop("y")), axis=-1)


def loss_fn(model, scale, batch):
    """Calls the layers twice, so that statistics move twice; takes its batch apart."""
    own = errors(model, batch) * scale
    return jnp.mean(own) + 0.1 * jnp.mean(model(batch["x"]) ** 2), {"rows": own}


def trained(kind, value_and_grad, wrt, axis_name=None, **options):
    """States and losses after three steps."""
    with jax.set_mesh(mesh_of(8, kind=KINDS[kind])):
        model = Model(axis_name)
        optimizer = nnx.Optimizer(model, optax.sgd(0.3, momentum=0.9), wrt=wrt)
        for own in (model, optimizer):
            nnx.update(own, jax.device_put(nnx.state(own), P()))

        @nnx.jit
        def step(model, optimizer, batch):
            own = nnx.DiffState(0, wrt)
            f = value_and_grad(loss_fn, argnums=own, has_aux=True, **options)
            (loss, aux), grads = f(model, jnp.float32(2), batch=dict(batch))
            optimizer.update(model, grads)
            return loss, aux

        placed = [jax.device_put(batch, P("data")) for batch in batches()]
        found = [step(model, optimizer, batch) for batch in placed]
    return jax.device_get((nnx.state(model, nnx.Not(nnx.RngKey)), found))


@functools.cache
def plain(wrt):
    return trained("auto", nnx.value_and_grad, wrt)


@pytest.mark.parametrize(
    ("kind", "wrt"),
    [("auto", nnx.Param), ("auto", nnx.LoRAParam), ("explicit", nnx.LoRAParam)],
    ids=["auto", "auto, LoRA", "explicit, LoRA"],
)
def test_steps_are_those_of_nnx(kind, wrt):
    """State that the loss changes, aux, keywords, a filter, and a batch that the loss changes."""
    options = {"axis_name": "data", "aux": "rows"} if kind == "auto" else {}
    found, expected = trained(kind, OURS, wrt, **options), plain(wrt)
    assert_close(found, expected)
    start = nnx.state(Model())
    assert not np.array_equal(found[0]["norm"]["mean"][...], start["norm"]["mean"][...])
    moved = not np.array_equal(found[0]["out"]["kernel"][...], start["out"]["kernel"][...])
    assert moved == (wrt is nnx.Param)


def test_steps_in_a_map_are_those_of_nnx():
    """`dq.pmean` takes gradients, which are states of the module, in `nnx.shard_map`."""

    def in_a_map(loss_fn, **options):
        def run(model, scale, batch):
            (loss, aux), grads = nnx.value_and_grad(loss_fn, **options)(model, scale, batch)
            grads = dq.pmean(grads, "data", compression=small(dq.F32()))
            return (jax.lax.pmean(loss, "data"), aux), grads

        maps = {"in_specs": (P(), P(), P("data")), "out_specs": ((P(), P("data")), P())}
        mapped = nnx.shard_map(run, mesh=auto_mesh(), check_vma=False, **maps)
        return lambda model, scale, batch: mapped(model, scale, batch)

    assert_close(trained("auto", in_a_map, nnx.Param, axis_name="data"), plain(nnx.Param))


def test_paths_of_states_exclude_norms():
    asked = []

    def by_path(path, leaf):
        asked.append(path)
        return None if path.startswith("norm/") else dq.contrib.MXFP8()

    grads = nnx.state(Model(), nnx.Param)
    found = dq.explain(grads, 8, compression=over(dq.Direct(), small(by_path)), verbose=False)
    assert "out/kernel/value" in asked
    routes = {row.name: row.route for row in found.rows}
    assert {route for name, route in routes.items() if "norm" in name} == {"exact: excluded"}
    assert {route for name, route in routes.items() if "norm" not in name} == {"compressed"}


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_random_numbers_move_on(kind):
    """On Auto axes workers draw masks of their own, and the model's key stays."""

    def loss(model, x):
        kept = model.dropout(x)
        return jnp.mean(model.out(kept) ** 2), kept

    with jax.set_mesh(mesh_of(8, kind=KINDS[kind])):
        model = Model(rate=0.5)
        x = jax.device_put(jnp.ones((32, 64)), P("data"))
        own = {"aux": "rows"} if kind == "auto" else {"compression": small(dq.F32(), exclude=".")}
        f = nnx.jit(OURS(loss, has_aux=True, **own))
        (_, first), _ = f(model, x)
        (_, second), _ = f(model, x)
        expected = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(Model(rate=0.5), x)[0][1]
    assert int(model.dropout.rngs.count[...]) == 2
    assert model.dropout.rngs.key[...] == Model().dropout.rngs.key[...]
    assert len(np.unique(first, axis=0)) == 32
    assert not np.array_equal(first, second)
    assert np.array_equal(first, expected) == (kind == "explicit")


@pytest.mark.usefixtures("padding_is_free")
def test_weights_and_several_arguments():
    """A masked mean of two modules, a part of whose variables are in shards (FSDP)."""
    first, second = nnx.Linear(16, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 4, rngs=nnx.Rngs(1))
    mesh, batch = auto_mesh(), batches()[0]

    def masked(first, batch, second):
        own = errors(nnx.Sequential(first, nnx.tanh, second), dict(batch)) * batch["mask"]
        return jnp.sum(own) / jnp.maximum(jnp.sum(batch["mask"]), 1)

    expected = nnx.value_and_grad(masked, argnums=(0, 2))(first, batch, second)
    tokens = lambda first, batch, second: jnp.sum(batch["mask"])
    nnx.update(first, put(nnx.state(first), mesh))
    first.kernel[...] = put(first.kernel[...], mesh, P(None, "data"))
    f = OURS(masked, argnums=(0, 2), mesh=mesh, weight=tokens)
    found = f(first, batch, second)
    assert_close(found, expected)
    assert found[1][0]["kernel"][...].sharding.spec == P(None, "data")
    compressed = OURS(masked, argnums=(0, 2), mesh=mesh, weight=tokens, compression=CHEAP)
    with pytest.warns(UserWarning, match=r"^1 parameters \(0/kernel/value\) are sharded over"):
        _, grads = nnx.jit(compressed)(first, batch, second)
    assert 1e-6 < float(vnmse(jax.device_get(grads), expected[1])) < 0.1


@functools.cache
def first_state(make):
    """A module's graph and its state, made once."""
    graph, state = nnx.split(make())
    return graph, jax.device_get(state)


def made(make, mesh=None):
    """A new module, on the devices of a mesh."""
    graph, state = first_state(make)
    return nnx.merge(graph, jax.device_put(state, mesh and NamedSharding(mesh, P())))


class Layers(nnx.Module):
    """A stack of layers in a scan, and one layer through other transformations."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs), in_axes=0, out_axes=0)
        self.stack = make(rngs.split(2))
        self.out = nnx.Linear(16, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x, how=nnx.remat):
        layer = lambda module, x: nnx.tanh(module(x))
        self.calls[...] += 1
        x = nnx.scan(nnx.remat(layer), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)
        return how(layer)(self.out, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [nnx.remat, nnx.jit, lambda f: nnx.jit(nnx.remat(f))])
def test_layers_through_transformations_are_not_taken_for_changed(how, kind):
    batch = {name: batches()[0][name] for name in ("x", "y")}
    loss = lambda model, x, y, how: jnp.mean((model(x, how) - y) ** 2)
    plain = nnx.value_and_grad(lambda model, x, y: loss(model, x, y, lambda f: f))
    expected = nnx.jit(plain)(made(Layers), **batch)
    mesh = mesh_of(8, kind=KINDS[kind])
    model = made(Layers, mesh)
    with jax.set_mesh(mesh):
        own = {} if kind == "auto" else {"compression": small(dq.F32(), exclude=".")}
        f = OURS(lambda model, x, y: loss(model, x, y, how), **own)
        found = nnx.jit(f)(model, **jax.device_put(batch, P("data")))
    assert_close(found, expected)
    assert float(model.calls[...]) == 1


def test_results_that_are_arguments_are_known_through_calls_loops_and_branches():
    expected = {}

    def program(a, b, rows, flag):
        """Notes for every result the number of the argument that it is."""
        found = []

        def note(name, x, number):
            expected[name] = number
            found.append(x)

        step = lambda carry, row: ((carry[0], carry[2], carry[1]), (row, 2 * row))
        (kept, swapped, _), ys = jax.lax.scan(step, (a, a, b), rows)
        note("carry", kept, 0)
        note("swapped carries", swapped, None)
        note("rows", ys[0], 2)
        note("other rows", ys[1], None)
        keep = jax.checkpoint(lambda x: (jnp.sin(x), x))
        note("rows through a checkpoint", jax.lax.scan(lambda _, x: (0, keep(x)), 0, rows)[1][1], 2)
        last = jax.lax.scan(lambda _, x: (x, None), b, rows)[0]
        note("the last row", last, None)
        moves = lambda x: (x[0] + a, x[1], x[3], x[2])
        loop = jax.lax.while_loop(lambda x: x[0][0] < 3, moves, (a, b, a, b))
        note("swapped in a loop", loop[2], None)
        note("a counter", loop[0], None)
        note("beside a counter", loop[1], 1)
        first, second = jax.lax.cond(flag, lambda x, y: (x, y), lambda x, y: (x, x), a, b)
        note("in both branches", first, 0)
        note("in one branch", second, None)
        inner = jax.shard_map(lambda x: (x, -x), mesh=auto_mesh(2), in_specs=P(), out_specs=P())
        same, negative = jax.jit(inner)(b)
        note("in a map", same, 1)
        note("its negative", negative, None)
        one = jax.shard_map(lambda x: x, mesh=auto_mesh(2), in_specs=P(), out_specs=P("data"))
        note("copies", one(a), None)
        note("a constant", jnp.ones(3), None)
        return found

    a, rows = jnp.zeros(3), jnp.zeros((2, 3))
    found = passed_arguments(jax.make_jaxpr(program)(a, a, rows, True))
    assert dict(zip(expected, found, strict=True)) == expected


def test_a_change_within_a_transformation_is_still_found():
    """A parameter or a statistic is set to a value of each worker's own examples."""

    def scaled(module, x):
        module.out.bias[...] = module.out.bias[...] * jnp.mean(x)
        return module(x)

    def counted(module, x):
        module.calls[...] = module.calls[...] + jnp.sum(x)
        return module(x)

    errors = {
        scaled: "changes 0/out/bias, Param, .*own",
        counted: "changes 0/calls, Variable, .*own",
    }
    for layer, message in errors.items():
        loss = lambda model, x, layer=layer: jnp.mean(nnx.remat(layer)(model, x))
        with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match=message):
            nnx.eval_shape(OURS(loss), made(Layers), batches()[0]["x"])


class Mixed(nnx.Module):
    """Attributes of all kinds, that the loss reads, and of which it changes some."""

    def __init__(self):
        self.a = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.codes = jax.random.normal(jax.random.key(1), (32, 16))  # as many rows as the batch
        self.odd = np.linspace(0, 1, 7, dtype=np.float32)
        self.count, self.name, self.rate = jnp.zeros(()), "mixed", 0.5
        self.tables = nnx.data({"one": jnp.arange(8.0), "more": (jnp.ones(3), 2)})
        self.parts = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(1)), nnx.Variable(jnp.ones(16))])
        self.average = nnx.Variable(jnp.zeros((16, 16)))

    def __call__(self, x):
        self.count = self.count + 1
        self.tables["one"] = self.tables["one"] + 1
        kernel = jax.lax.stop_gradient(self.a.kernel[...])
        self.average[...] = 0.9 * self.average[...] + 0.1 * kernel  # of parameters alone
        y = self.parts[0](self.a(x)) * self.parts[1][...][None]
        d = jnp.sum((y[:, None, :] - self.codes[None]) ** 2, axis=-1)
        scale = jnp.sum(self.odd) + jnp.sum(self.tables["one"]) + self.tables["more"][1]
        return jnp.min(d, axis=1) * scale * self.rate


@pytest.mark.parametrize("kind", KINDS)
def test_all_arrays_of_a_module_are_whole_and_written_back(kind):
    """Arrays that are no variables; state of parameters alone is the same on all workers."""
    loss = lambda model, x: jnp.mean(model(x))
    x, expected = batches()[0]["x"], made(Mixed)
    wanted = nnx.jit(nnx.value_and_grad(loss))(expected, x)
    mesh = mesh_of(8, kind=KINDS[kind])
    model = made(Mixed, mesh)
    with jax.set_mesh(mesh):
        own = {} if kind == "auto" else {"compression": small(dq.F32(), exclude=".")}
        found = nnx.jit(OURS(loss, **own))(model, jax.device_put(x, P("data")))
    assert_close(found, wanted)
    assert float(model.count) == 1
    np.testing.assert_array_equal(model.tables["one"], np.arange(8) + 1)
    assert_close(nnx.state(model), nnx.state(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_parameters_that_the_loss_changes_are_written_back(norm, kind):
    """By what parameters alone say; in a transformation, too."""

    class Normed(nnx.Module):
        def __init__(self):
            self.own = norm(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

        def __call__(self, x):
            update = {"update_stats": True} if norm is nnx.SpectralNorm else {}
            return self.own(x, **update)

    make = functools.cache(Normed)
    loss = lambda model, x: jnp.mean(nnx.remat(lambda model, x: model(x))(model, x) ** 2)
    x, expected = batches()[0]["x"], made(make)
    wanted = nnx.jit(nnx.value_and_grad(loss))(expected, x)
    mesh = mesh_of(8, kind=KINDS[kind])
    model = made(make, mesh)
    with jax.set_mesh(mesh):
        own = {} if kind == "auto" else {"compression": small(dq.F32(), exclude=".")}
        found = nnx.jit(OURS(loss, **own))(model, jax.device_put(x, P("data")))
    assert_close(found, wanted)
    assert_close(nnx.state(model), nnx.state(expected))


def test_what_cannot_be_written_back_is_refused_by_its_path():
    def in_place(model, x):
        model.tables["more"] = model.tables["more"][0] + 1, 2
        return jnp.mean(model(x))

    def replaced(model, x):
        model.tables = {"one": jnp.mean(x)}
        return jnp.mean(model.a(x))

    errors = {
        in_place: "changes 0/tables/more/0, .*nnx.Variable",
        replaced: "removes variables or at",
    }
    model = made(Mixed)
    for loss, message in errors.items():
        with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match=message):
            nnx.eval_shape(OURS(loss), model, batches()[0]["x"])


def test_argnums_and_modules_that_are_passed_twice():
    """Gradients of a shared module are in the first state, as in NNX."""
    x = batches()[0]["x"]
    make = lambda seed: made(functools.cache(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(seed))))
    shared, other = make(0), make(1)
    loss = lambda first, x, second: jnp.mean(second(nnx.tanh(first(x))) ** 2)
    with jax.set_mesh(auto_mesh()):
        found = OURS(loss, argnums=(0, 2))(shared, x, shared)
        plain = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 2)))
        assert_close(found, plain(shared, x, shared))
        assert not found[1][1]
        for argnums in (0, -1):  # both uses count: there is one module
            value, grads = OURS(loss, argnums=argnums)(shared, x, shared)
            assert_close((value, grads), (found[0], found[1][0]))
        last = OURS(loss, argnums=-1)(shared, x, other)
        plain = nnx.jit(nnx.value_and_grad(loss, argnums=2))
        assert_close(last, plain(shared, x, other))
        apart = OURS(lambda m, x: loss(m["one"], x, m["two"]))({"one": shared, "two": other}, x)
        assert_close(apart[0], last[0])
        assert_close(apart[1]["two"], last[1])
    for argnums in (3, -4, (0, -3)):
        with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match="argnums.* 3 positional"):
            OURS(loss, argnums=argnums)(shared, x, other)


class Rows(nnx.Pytree):
    """A batch: it has no variables."""

    def __init__(self, x):
        self.x = x


def test_batch_specs_are_of_arguments_that_are_no_modules():
    x, table = batches()[0]["x"], np.linspace(0, 1, 32, dtype=np.float32)
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def loss(frozen, model, rows, table, *, scales):
        assert rows.x.shape == (4, 16)
        return (
            jnp.mean(model(rows.x + frozen.bias[...][None]) ** 2)
            * jnp.sum(table)
            * jnp.sum(scales["a"])
        )

    args = nnx.Linear(16, 16, rngs=nnx.Rngs(1)), model, Rows(x), table
    kwargs = {"scales": {"a": table}}
    whole = lambda model: jnp.mean(model(x + args[0].bias[...][None]) ** 2) * jnp.sum(table) ** 2
    expected = nnx.jit(nnx.value_and_grad(whole))(model)
    by_name = {"table": P(), "scales": {"a": P()}, "rows": P("data")}
    with jax.set_mesh(auto_mesh()):
        assert_close(OURS(loss, argnums=1, batch_specs=by_name)(*args, **kwargs), expected)
        in_order = OURS(loss, argnums=1, batch_specs=(None, None, P()))
        value, _ = in_order(*args, scales={"a": np.full(32, np.sum(table) / 4)})  # split in 8
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        with pytest.raises(ValueError, match=r"2 entries.* 3 positional.*\['frozen', 'rows', 'ta"):
            OURS(loss, argnums=1, batch_specs=(P(), P()))(*args, **kwargs)


def test_a_batch_in_a_closure_is_split():
    """The loss also changes its module."""
    mine, found = functools.partial(OURS, closed_specs=P("data")), []
    for value_and_grad, axis_name in ((mine, "data"), (nnx.value_and_grad, None)):
        model = Model(axis_name)

        @nnx.jit
        def step(model, batch, value_and_grad=value_and_grad):
            return value_and_grad(lambda model: jnp.mean(errors(model, dict(batch))))(model)

        with jax.set_mesh(auto_mesh()):
            found.append((step(model, batches()[0]), nnx.state(model, nnx.BatchStat)))
    assert_close(*jax.device_get(found))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (OURS(lambda m, b: errors(m, b).mean()), "0/norm/mean, BatchStat, .*axis_name='data'"),
        (OURS(loss_fn, argnums=1), "argnums=1 selects no variable of argument 1, .* 2 positional"),
        (OURS(lambda m, b: setattr(m, "new", nnx.Cache(b["x"])) or 0.0), "removes variables"),
        (OURS(lambda m, b: m.out.bias.set_value(b["y"][0]) or 0.0), "changes 0/out/bias, Param"),
        (OURS(lambda m, b, key: 0.0), "the loss takes key"),
    ],
    ids=["own state", "nothing", "structure", "parameters", "key"],
)  # fmt: skip
def test_what_goes_wrong_is_refused(call, match):
    model, options = Model(), {"key": jax.random.key(0)} if match.endswith("key") else {}
    with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match=match):
        call(model, batches()[0], **options)
    assert not hasattr(model, "new")
