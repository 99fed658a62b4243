"""`dq.nnx.value_and_grad`: losses of modules against `nnx.value_and_grad` on the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close
from cases import CHEAP, small
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of, put

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
OURS = functools.partial(dq.nnx.value_and_grad, axis_name="data", method=small(dq.F32()))


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
            grads = dq.pmean(grads, "data", method=small(dq.F32()))
            return (jax.lax.pmean(loss, "data"), aux), grads

        maps = {"in_specs": (P(), P(), P("data")), "out_specs": ((P(), P("data")), P())}
        mapped = nnx.shard_map(run, mesh=auto_mesh(), check_vma=False, **maps)
        return lambda model, scale, batch: mapped(model, scale, batch)

    assert_close(trained("auto", in_a_map, nnx.Param, axis_name="data"), plain(nnx.Param))


def test_paths_of_states_exclude_norms():
    asked = []

    def by_path(path, leaf):
        asked.append(path)
        return None if path.startswith("norm/") else dq.comparators.MXFP8()

    grads = nnx.state(Model(), nnx.Param)
    found = dq.explain(grads, 8, method=small(by_path), topology=dq.Direct(), verbose=False)
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
        own = {"aux": "rows"} if kind == "auto" else {"method": small(dq.F32(), exclude=".")}
        f = nnx.jit(OURS(loss, has_aux=True, **own))
        (_, first), _ = f(model, x)
        (_, second), _ = f(model, x)
        expected = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(Model(rate=0.5), x)[0][1]
    assert int(model.dropout.rngs.count[...]) == 2
    assert model.dropout.rngs.key[...] == Model().dropout.rngs.key[...]
    assert len(np.unique(first, axis=0)) == 32
    assert not np.array_equal(first, second)
    assert np.array_equal(first, expected) == (kind == "explicit")


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
    compressed = OURS(masked, argnums=(0, 2), mesh=mesh, weight=tokens, method=CHEAP)
    _, grads = nnx.jit(compressed)(first, batch, second)
    assert 1e-6 < float(vnmse(jax.device_get(grads), expected[1])) < 0.1


@nnx.jit
def _closing(model, batch):
    return OURS(lambda model, y: jnp.mean(y * jnp.mean(batch["x"])))(model, batch["y"])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (OURS(lambda m, b: errors(m, b).mean()), "0/norm/mean, BatchStat, .*axis_name='data'"),
        (OURS(loss_fn, argnums=1), "argnums=1 selects no variable of argument 1, .* 2 positional"),
        (OURS(lambda m, b: setattr(m, "new", nnx.Cache(b["x"])) or 0.0), "removes variables"),
        (OURS(lambda m, b: m.out.bias.set_value(m.out.bias * 2) or 0.0), "or changes variables"),
        (_closing, "closes over 1 arrays"),
        (OURS(lambda m, b, key: 0.0), "the loss takes key"),
    ],
    ids=["own state", "nothing", "structure", "parameters", "closure", "key"],
)  # fmt: skip
def test_what_goes_wrong_is_refused(call, match):
    model, options = Model(), {"key": jax.random.key(0)} if match.endswith("key") else {}
    with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match=match):
        call(model, batches()[0], **options)
    assert not hasattr(model, "new")
