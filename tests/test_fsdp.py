"""FSDP by `reduce_in_backward`: shards gathered in the layers, gradients scattered, compressed."""

import dataclasses
import functools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, EIGHT, assert_copies_equal, assert_same_bits, daily, relative_error
from compiler import AS_USERS
from hlo import OPERATION, arrays_of, bits_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.collectives import sum as sums

N, DIM, LAYERS = 4, 128, 3
EXACT = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0)
SPECS = {"kernel": P("data"), "bias": P()}
KEY = jax.device_put(np.uint32([3, 5]))


def layer(x, w):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def model(layers, x, each=lambda w: w, scanned=True, remat=True):
    """The loss; ``each`` is done to the parameters of every layer."""

    def step(x, w):
        return layer(x, each(w)), None

    step = jax.checkpoint(step) if remat else step
    if scanned:
        x, _ = lax.scan(step, x, layers)
    else:
        for i in range(LAYERS):
            x, _ = step(x, {name: w[i] for name, w in layers.items()})
    return jnp.mean(x**2)


@functools.cache
def problem():
    """Layers, and examples of which later workers have larger ones."""
    rng = np.random.default_rng(0)
    layers = {
        "kernel": np.float32(rng.standard_normal((LAYERS, DIM, DIM)) / DIM**0.5),
        "bias": np.float32(rng.standard_normal((LAYERS, DIM))),
    }
    x = rng.standard_normal((6 * N, DIM)) * np.linspace(0.2, 2.0, 6 * N)[:, None]
    return layers, np.float32(x)


@functools.cache
def expected():
    """The gradient of all examples on one device."""
    return jax.device_get(jax.jit(jax.grad(model))(*problem()))


def stacked(specs):
    """The specs of all layers."""
    return {name: P(None, *spec) for name, spec in specs.items()}


def mesh_of(*names, kind=AxisType.Auto):
    """Four devices: (4,), or (2, 2) with two axes."""
    sizes = (4,) if len(names) == 1 else (2, 2)
    return jax.make_mesh(sizes, names, devices=jax.devices()[:4], axis_types=(kind,) * len(names))


def gradient(mesh, axes, specs, *, check_vma=True, scanned=True, remat=True, **options):
    """A compiled function of all layers and examples, for gradients that are sharded alike."""
    each = partial(dq.reduce_in_backward, axis_name=axes, specs=specs, **options)
    grad = jax.grad(partial(model, each=each, scanned=scanned, remat=remat))
    maps = {"in_specs": (stacked(specs), P(axes)), "out_specs": stacked(specs)}
    return jax.jit(jax.shard_map(grad, mesh=mesh, check_vma=check_vma, **maps))


def put(tree, mesh, specs):
    return jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs))


def assert_close(found, rtol=2e-5):
    for name, own in expected().items():
        np.testing.assert_allclose(found[name], own, rtol=rtol, atol=1e-7)


# --- Inside of maps -------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
@pytest.mark.parametrize("scanned", [True, False])
def test_exact_gradients_are_those_of_one_device(check_vma, scanned):
    exact = {"method": EXACT, "gather": dq.F32()}
    told = {"check_vma": check_vma, "scanned": scanned, "remat": scanned}
    assert_close(gradient(mesh_of("data"), "data", SPECS, **told, **exact)(*problem()))


LAYOUTS = {
    "columns": (("data",), {"kernel": P(None, "data"), "bias": P("data")}),
    "both axes": (("node", "gpu"), {"kernel": P(("node", "gpu")), "bias": P()}),
    "hsdp": (("replica", "fsdp"), {"kernel": P("fsdp"), "bias": P()}),
    "a dimension each": (("a", "b"), {"kernel": P("b", "a"), "bias": P("b")}),
}


@pytest.mark.parametrize("name", daily(LAYOUTS, ["columns", "a dimension each"]))
def test_any_dimension_over_any_of_the_axes(name):
    axes, specs = LAYOUTS[name]
    op = "sum" if name == "hsdp" else "mean"
    f = gradient(mesh_of(*axes), axes, specs, method=EXACT, gather=dq.F32(), op=op)
    over = N if op == "sum" else 1
    assert_close({name: own / over for name, own in jax.device_get(f(*problem())).items()})


LAYER = dataclasses.replace(CHEAP, min_leaf_size=4096)


@functools.cache
def compressed(gather=None):
    """The compiled gradient with few bits back, and by default eight forth."""
    f = gradient(mesh_of("data"), "data", SPECS, method=LAYER, gather=gather)
    return f.lower(*problem()).compile()


def test_few_bits_back_and_eight_forth_are_close():
    found = compressed()(*problem())
    for i in range(LAYERS):
        own, exact = found["kernel"][i], expected()["kernel"][i]
        assert 1e-4 < relative_error(own, exact) < 4e-2
    assert relative_error(found["bias"], expected()["bias"]) < 1e-2


@pytest.mark.parametrize("key", daily([None, KEY], [None]))
def test_both_gathers_have_the_same_bits_on_all_workers(key):
    """The gradient of |w|² / 2 is what the backward pass has gathered."""
    kernel, seen = problem()[0]["kernel"][0], []

    def run(shard):
        def loss(shard):
            options = {"method": EXACT, "gather": EIGHT}
            w = dq.reduce_in_backward(shard, "data", specs=P("data"), key=key, **options)
            seen.append(w.shape)
            return jnp.sum(jnp.square(w)) / 2, w

        grad, w = jax.grad(jax.checkpoint(loss), has_aux=True)(shard)
        return grad, w[None]

    maps = {"mesh": mesh_of("data"), "in_specs": P("data"), "out_specs": P("data")}
    grad, gathered = jax.jit(jax.shard_map(run, **maps))(kernel)
    assert seen[0] == (DIM, DIM)
    assert_same_bits(gathered, np.broadcast_to(gathered[:1], gathered.shape))
    assert_same_bits(np.asarray(grad), np.asarray(gathered[0]))
    assert 1e-6 < relative_error(gathered[0], kernel) < 1e-3  # eight bits


def test_every_gather_and_scatter_of_a_leaf_has_noise_of_its_own(monkeypatch):
    """A leaf that two axes split along two dimensions: two gathers and two scatters."""
    seeds = []

    def spy(name, change):
        def call(axis, part, compression, at, *, key, **options):
            seeds.append((name, tuple(np.asarray(key).tolist())))
            found = {
                leaf: jnp.zeros([change(n) if i == at else n for i, n in enumerate(x.shape)])
                for leaf, x in part.items()
            }
            leaves, treedef = jax.tree.flatten(found)
            return found if name == "gather_over" else (lambda: leaves, treedef)

        monkeypatch.setattr(sums, name, call)

    def loss(shard):
        options = {"method": CHEAP, "key": KEY, "gather": CHEAP}
        return jnp.sum(dq.reduce_in_backward(shard, ("a", "b"), specs=P("a", "b"), **options))

    spy("gather_over", lambda n: 2 * n)
    spy("scattering", lambda n: n // 2)
    run = jax.vmap(jax.vmap(jax.grad(loss), axis_name="b"), axis_name="a")
    run(np.ones((2, 2, 64, 256), np.float32))
    assert [name for name, _ in seeds].count("scattering") == 2
    assert len({seed for _, seed in {*seeds}}) == 4, seeds


@pytest.mark.release
def test_leaves_of_all_kinds_keep_their_dtypes():
    rng = np.random.default_rng(0)
    wide, narrow = rng.standard_normal((2, 8, 256)).astype(np.float32)
    scale = np.ones(256, np.float32)
    trained = {"wide": wide, "narrow": narrow.astype(jnp.bfloat16), "scale": scale}
    specs = {"wide": P("data"), "narrow": P("data"), "table": P("data"), "scale": P(), "none": None}
    x = np.float32(rng.standard_normal((N, 8)))

    def loss(trained, table, x, each):
        w = each(trained | {"table": table, "none": None})
        assert w["none"] is None and w["table"].shape == (8,) and w["wide"].shape == (8, 256)
        assert w["narrow"].dtype == jnp.bfloat16
        rows = w["wide"][w["table"][::-1]] + w["narrow"].astype(jnp.float32)
        return jnp.mean(jnp.tanh(x @ rows * w["scale"][None]) ** 2)

    each = partial(
        dq.reduce_in_backward, axis_name="data", method=EXACT, specs=specs, gather=dq.F32()
    )
    own = {name: specs[name] for name in trained}
    maps = {"in_specs": (own, P("data"), P("data")), "out_specs": own, "mesh": mesh_of("data")}
    f = jax.shard_map(jax.grad(partial(loss, each=each)), **maps)
    found = jax.jit(f)(trained, np.arange(8), x)
    exact = jax.jit(jax.grad(partial(loss, each=lambda w: w)))(trained, np.arange(8), x)
    for name, grad in exact.items():
        assert found[name].dtype == grad.dtype and found[name].shape == grad.shape
        assert relative_error(found[name], grad) < (1e-4 if name == "narrow" else 1e-10)


@pytest.mark.parametrize("kind", daily([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]))
def test_copies_over_another_axis_stay_equal(kind):
    """Types say what explicit axes split; of automatic ones ``specs`` do."""
    mesh, rng = mesh_of("data", "model", kind=kind), np.random.default_rng(0)
    arrays = {name: np.float32(rng.standard_normal((64, 128))) for name in ("copied", "parted")}
    x = np.float32(rng.standard_normal((2, 64, 128)))
    told = {"copied": P("data"), "parted": P("data", "model")}
    specs = dict.fromkeys(told, P("data"))

    def grad(params, x):
        options = {"specs": told if kind == AxisType.Auto else specs, "gather": CHEAP}
        each = partial(dq.reduce_in_backward, axis_name="data", method=CHEAP, **options)
        return jax.grad(lambda p: sum(jnp.sum(w * x[0]) for w in each(p).values()))(params)

    maps = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    with jax.set_mesh(mesh):
        args = put(arrays, mesh, told), put(x, mesh, P("data"))
        mapped = jax.shard_map(grad, axis_names={"data"}, check_vma=False, **maps)
        found = jax.jit(mapped)(*args)
    for own in found.values():
        assert relative_error(own, x.mean(0)) < 0.05
    assert_copies_equal(found)


def test_by_path_and_under_vmap():
    """Leaves that the method leaves out are gathered exactly; both see shapes of whole leaves."""
    shapes, layers = set(), {"kernel": problem()[0]["kernel"][0], "rest": problem()[0]["kernel"][1]}

    def method(path, leaf):
        shapes.add(leaf.shape)
        return None if path == "rest" else dq.DynamiQ(bits=5)

    def run(shards):
        request = dq.Compression(method, min_leaf_size=0, min_bucket_size=0)
        return dq.reduce_in_backward(shards, "data", method=request, specs=P(None, "data"))

    shards = jax.tree.map(lambda w: np.moveaxis(w.reshape(DIM, N, -1), 1, 0), layers)
    whole = jax.jit(jax.vmap(run, axis_name="data"))(shards)
    assert shapes == {(DIM, DIM)}
    assert_same_bits(whole, jax.tree.map(lambda w: np.broadcast_to(w[:1], w.shape), whole))
    assert_same_bits(np.asarray(whole["rest"][0]), layers["rest"])
    assert 1e-6 < relative_error(whole["kernel"][0], layers["kernel"]) < 1e-3


def large(text, bits):
    """Collectives whose arrays have more than so many bits together."""
    found = []
    for line in text.splitlines():
        if match := OPERATION.search(line):
            size = sum(bits_of(*array) for array in arrays_of(match["type"]))
            found += [(match["name"], match["type"])] if size > bits else []
    return found


@pytest.mark.parametrize(("gather", "bits"), daily([(None, 8), (dq.BF16(), 16)], [(None, 8)]))
def test_what_travels_is_narrow(gather, bits):
    text = compressed(gather).as_text()
    gathered = [own for own in large(text, 0) if own[0] == "all-gather"]
    assert len(gathered) >= 2  # forward and again in the backward pass
    assert not large(text, 1.15 * bits * DIM * DIM)
    scattered = [own for own in large(text, 5 * DIM * DIM / 2) if own[0] == "all-to-all"]
    assert scattered and {name for name, _ in large(text, 6 * DIM * DIM)} == {"all-gather"}


WHOLE, BOTH = ({"kernel": P(*own), "bias": P()} for own in ((), [("data", "model")]))
REFUSED = [
    (r"kernel.* sharded over \('data',\).*hold the same", {"own": WHOLE}),
    ("bias.*has shape.*3 entries", {"specs": WHOLE | {"bias": P(None, None, "data")}}),
    ("specs name the axis 'model'", {"specs": P("model")}),
    ("method=8 is not a method", {"gather": 8}),
    (r"split over \('data', 'model'\).*out of order", {"specs": BOTH, "own": BOTH}),
]


@pytest.mark.parametrize(("complaint", "changes"), REFUSED)
def test_what_cannot_be_is_refused(complaint, changes):
    options = {"specs": SPECS} | changes
    own = options.pop("own", SPECS)
    mesh = mesh_of("data", "model") if own is BOTH else mesh_of("data")
    each = partial(dq.reduce_in_backward, axis_name="data", **options)
    maps = {"in_specs": (stacked(own), P("data")), "out_specs": stacked(own)}
    f = jax.shard_map(jax.grad(partial(model, each=each)), mesh=mesh, **maps)
    with pytest.raises(ValueError, match=complaint):
        jax.eval_shape(f, *problem())


# --- Outside of maps, on Explicit axes ------------------------------------------------------------

TYPED = dq.Compression(dq.F32(), min_leaf_size=DIM * DIM, min_bucket_size=0)
"""Vectors stay as they are: JAX has no rule for sums of examples and what is typed as reduced."""


def explicit(loss, axes, specs, method=TYPED, gather=None, options=None):
    """The loss and gradients of `value_and_grad`, whose loss gathers."""
    mesh = mesh_of(*axes, kind=AxisType.Explicit)
    name = axes if len(axes) > 1 else axes[0]
    each = partial(dq.reduce_in_backward, axis_name=name, method=method, gather=gather)
    f = dq.value_and_grad(partial(loss, each=each), axis_name=name, method=method, gather=False)
    layers, x = problem()
    args = put(layers, mesh, stacked(specs)), put(x, mesh, P(name))
    with jax.set_mesh(mesh):
        return jax.jit(f, compiler_options=options), args


def penalised(layers, x, each):
    """Gradients of which some parts come from constants alone."""
    w = each({name: own[0] for name, own in layers.items()})
    loss = model(layers, x, each)
    return loss * (1 + 0.01 * jnp.sum(w["kernel"])) + 0.01 * jnp.sum(jnp.tanh(w["kernel"]))


def penalty_in_scan(layers, x, each):
    def step(carry, w):
        x, total = carry
        w = each(w)
        return (layer(x, w), total + 0.01 * jnp.sum(w["kernel"])), None

    (x, total), _ = lax.scan(jax.checkpoint(step), (x, jnp.float32(0)), layers)
    return jnp.mean(x**2) + total


def unused(layers, x, each):
    """A layer that is gathered, and not used."""
    each({name: own[1] for name, own in layers.items()})
    return model(layers, x, lambda w: each(w) | {"bias": w["bias"]})


LOSSES = {
    "scan": model, "loop": partial(model, scanned=False, remat=False), "penalised": penalised,
    "penalty in scan": penalty_in_scan, "unused": unused,
}  # fmt: skip


@pytest.mark.parametrize("name", daily(LOSSES, ["loop", "penalty in scan", "unused"]))
def test_explicit_gradients_are_those_of_one_device(name):
    """Compiled as users do: optimisations move types of unreduced values to constants."""
    f, args = explicit(LOSSES[name], ("data",), SPECS, gather=dq.F32(), options=AS_USERS)
    loss, found = f(*args)
    plain = jax.value_and_grad(partial(LOSSES[name], each=lambda w: w))
    exact, grads = jax.jit(plain)(*problem())
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    for own, other, arg in zip(*map(jax.tree.leaves, (found, grads, args[0])), strict=True):
        assert own.sharding.is_equivalent_to(arg.sharding, own.ndim)
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", daily(["columns", "hsdp"], ["hsdp"]))
def test_explicit_layouts(layout):
    axes, specs = LAYOUTS[layout]
    f, args = explicit(model, axes, specs, gather=dq.F32())
    assert_close(f(*args)[1])


def test_explicit_collectives_are_narrow_and_close():
    f, args = explicit(model, ("data",), SPECS, method=LAYER)
    compiled = f.lower(*args).compile()
    assert not large(compiled.as_text(), 1.15 * 8 * DIM * DIM)
    found = compiled(*args)[1]
    errors = [relative_error(found["kernel"][i], expected()["kernel"][i]) for i in range(LAYERS)]
    assert all(1e-4 < error < 4e-2 for error in errors), errors


def test_explicit_shards_outside_of_the_layers_are_named():
    mesh = mesh_of("data", kind=AxisType.Explicit)
    layers, x = problem()

    def loss(params, x):
        x = x @ jax.reshard(params["in"], P())
        return model(params["layers"], x, partial(dq.reduce_in_backward, axis_name="data"))

    params = {"in": np.eye(DIM, dtype=np.float32), "layers": layers}
    args = put(params, mesh, {"in": P("data"), "layers": stacked(SPECS)}), put(x, mesh, P("data"))
    f = partial(dq.value_and_grad, loss, axis_name="data", method=TYPED)
    with jax.set_mesh(mesh):
        with pytest.warns(UserWarning, match=r"^1 sharded .* \(in\) do not"):
            jax.eval_shape(f(gather=False), *args)
        with pytest.raises(ValueError, match="has gathered: pass value_and_grad.*gather=False"):
            jax.eval_shape(f(), *args)


def test_explicit_evaluation_needs_no_derivative_and_others_are_refused():
    mesh = mesh_of("data", kind=AxisType.Explicit)
    layers, x = problem()
    args = put(layers, mesh, stacked(SPECS)), put(x, mesh, P("data"))
    each = partial(dq.reduce_in_backward, axis_name="data", method=TYPED, gather=dq.F32())
    loss = partial(model, each=each)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(loss)(*args), jax.jit(model)(layers, x), rtol=1e-5)
        with pytest.raises(ValueError, match="not dq.value_and_grad's: JAX's seed is a constant"):
            jax.eval_shape(jax.grad(loss), *args)
        with pytest.raises(ValueError, match="specs=.* are for maps"):
            jax.eval_shape(partial(model, each=partial(each, specs=SPECS)), *args)

    jitted = jax.jit(loss)
    options = {"axis_name": "data", "mesh": mesh, "method": TYPED, "gather": False}
    with jax.set_mesh(mesh):  # what JAX has traced before counts for nothing
        jax.eval_shape(jitted, *args)
        text = str(jax.make_jaxpr(dq.value_and_grad(jitted, **options))(*args))
        assert "reduce_scatter" in text and f"f32[{LAYERS},{DIM},{DIM}]{{R" not in text
        with pytest.raises(ValueError, match="not dq.value_and_grad's"):
            jax.eval_shape(jax.grad(jitted), *args)

    def inner(layers, x):  # a derivative inside of the loss has a seed of its own
        return loss(layers, x) + jnp.sum(lax.stop_gradient(jax.grad(loss)(layers, x)["bias"]))

    with pytest.raises(ValueError, match="not dq.value_and_grad's"):
        jax.eval_shape(dq.value_and_grad(inner, **options), *args)


def test_explicit_integers_are_gathered_exactly():
    mesh = mesh_of("data", kind=AxisType.Explicit)
    tree = put({"table": np.arange(8), "none": None}, mesh, {"table": P("data"), "none": None})
    found = jax.jit(lambda tree: dq.reduce_in_backward(tree, "data"))(tree)
    assert jax.typeof(found["table"]).sharding.spec == P(None) and found["none"] is None
    np.testing.assert_array_equal(found["table"], np.arange(8))


# --- `value_and_grad` says what it gathers --------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_large_gather_before_the_loss_is_warned_of(kind):
    mesh = mesh_of("data", kind=kind)
    sharded, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def traced(rows, sharding, each=lambda w: w, **options):
        def loss(w, x):
            return jnp.mean(x @ each(w))

        specs = {"specs": sharding.spec} if kind == AxisType.Auto else {}
        f = dq.value_and_grad(loss, axis_name="data", mesh=mesh, **specs, **options)
        w = jax.ShapeDtypeStruct((rows, 1 << 14), jnp.float32, sharding=sharding)
        x = jax.ShapeDtypeStruct((N, rows), jnp.float32, sharding=sharded)
        jax.eval_shape(f, w, x)

    rows = (1 << 14) + N
    with pytest.warns(UserWarning, match=rf"1 sharded parameters.*{4 * rows << 14:,} bytes.*dq"):
        traced(rows, sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(1 << 14, sharded)
        traced(rows, whole)
        if kind == AxisType.Explicit:
            each = partial(dq.reduce_in_backward, axis_name="data")
            traced(rows, sharded, each, gather=False)
