"""`fsdp`: gradients are those of a reduction after `jax.grad`, layer by layer.

Shards of parameters (FSDP) are gathered in the layers, and gradients are scattered.
"""

import dataclasses
import itertools
import re
import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers
from asserts import (
    assert_close,
    assert_copies_equal,
    assert_replicas_equal,
    assert_same_bits,
    relative_error,
)
from cases import CHEAP, EIGHT, EXACT, daily, over, small
from compiler import AS_USERS
from hlo import moves_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, local, mapped, once, put

import dynamiq_jax as dq
from dynamiq_jax.compression import shards
from dynamiq_jax.reduction import reduction

N, DIM, LAYERS = 4, 128, 3
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"kernel": P("data"), "bias": P()}
KEY = jax.device_put(np.uint32([3, 5]))


def layer(x, w):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def model(layers, x, each=lambda w: w, scanned=True, remat=False):
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


def in_backward(gather=None, *, axis_name="data", compression=EXACT, **options):
    policy = dq.Policy(gradients=compression, parameters=gather)
    return partial(dq.fsdp, axis_name=axis_name, compression=policy, **options)


@once
def inputs():
    """Layers that all workers have, and every worker's own examples; later ones' are larger."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "kernel": jax.random.normal(keys[0], (LAYERS, DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[1], (LAYERS, DIM)),
    }
    x = jax.random.normal(keys[2], (N, 6, DIM))
    return layers, x * jnp.linspace(0.2, 2.0, N)[:, None, None]


@cache
def means():
    """The gradient of all examples on one device, which is the mean of all workers'."""
    layers, x = inputs()
    return jax.device_get(jax.jit(jax.grad(model))(layers, x.reshape(-1, DIM)))


def assert_means(found):
    """Gradients are `means`, those of every worker if they have an axis of workers."""
    for name, own in found.items():
        expected = np.broadcast_to(means()[name], own.shape)
        np.testing.assert_allclose(own, expected, rtol=2e-5, atol=1e-7)


def problem():
    """Layers, and the examples of all workers."""
    layers, x = inputs()
    return layers, x.reshape(-1, DIM)


def stacked(specs):
    """The specs of all layers."""
    return {name: P(None, *spec) for name, spec in specs.items()}


def mesh_of(*names, kind=AxisType.Auto):
    """Four devices: (4,), or (2, 2) with two axes."""
    return workers.mesh_of(*((4,) if len(names) == 1 else (2, 2)), names=names, kind=kind)


def gradient(mesh, axes, specs, *, check_vma=True, scanned=True, **options):
    """A compiled function of all layers and examples, for gradients that are sharded alike."""
    each = in_backward(axis_name=axes, specs=specs, **options)
    grad = jax.grad(partial(model, each=each, scanned=scanned, remat=scanned))
    specs = P() if specs is None else stacked(specs)
    maps = {"in_specs": (specs, P(axes)), "out_specs": specs}
    return jax.jit(jax.shard_map(grad, mesh=mesh, check_vma=check_vma, **maps))


# --- Parameters that all workers hold -------------------------------------------------------------


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
@pytest.mark.parametrize("op", daily(["mean", "sum"], ["mean"]))
def test_a_whole_model_has_the_bits_of_a_reduction_after_grad(check_vma, op):
    options = {"op": op, "compression": CHEAP, "key": KEY}

    def inside(layers, x):
        return jax.grad(lambda layers: model(in_backward(**options)(layers), x))(layers)

    def after(layers, x):
        own = jax.grad(model)(local(layers, check_vma), x)
        return dq.reduce(own, "data", **options).tree

    found, expected = (mapped(f, check_vma)(*inputs()) for f in (inside, after))
    assert_same_bits(found, expected)
    assert_replicas_equal(found)
    assert all(np.any(own != 0) for own in found.values())


def test_in_a_scan_the_collectives_are_inside_the_backward_loop():
    collectives = re.compile(r"= \S+ (all-to-all|all-gather|all-reduce)")
    method = over(dq.Direct(), CHEAP)

    def counts(f):
        text = mapped(f, True).lower(*inputs()).compile().as_text()
        bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
        found = [0, 0]
        for block in re.split(r"\n(?=%|ENTRY)", text):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", block.lstrip())
            found[not (name and name[1] in bodies)] += len(collectives.findall(block))
        return found

    within, outside = counts(jax.grad(partial(model, each=in_backward(compression=method))))
    assert within >= 2 and outside == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Strict:
    """A pytree that takes arrays alone."""

    kernel: jax.Array
    number: jax.Array

    def __post_init__(self):
        """As modules that validate do."""
        if self.number is None:
            raise TypeError("number is missing")


def test_leaves_that_have_no_gradient_pass():
    """So do values of those that have one; a pytree that refuses `None` may hold integers."""

    def inside(layers, x):
        def loss(kernel, bias):
            strict = Strict(kernel, jnp.arange(LAYERS))
            passed, bias, none = in_backward()((strict, bias, None))
            assert none is None and passed.number.dtype == jnp.int32
            return model({"kernel": passed.kernel, "bias": bias}, x), passed.kernel

        found = jax.grad(loss, argnums=(0, 1), has_aux=True)(layers["kernel"], layers["bias"])
        return dict(zip(("kernel", "bias"), found[0], strict=True)), found[1]

    found, values = mapped(inside, True)(*inputs())
    assert_means(found)
    assert_same_bits(values[3], inputs()[0]["kernel"])


@pytest.mark.parametrize("mapping", daily(["vmap", "pmap"], ["vmap"]))
def test_other_maps(mapping):
    grad = jax.grad(partial(model, each=in_backward()))
    options = {"axis_name": "data", "in_axes": (None, 0)}
    run = jax.jit(jax.vmap(grad, **options)) if mapping == "vmap" else jax.pmap(grad, **options)
    assert_means(run(*inputs()))


def test_sharded_over_another_axis_it_reduces_parts():
    """Partial-manual, with an automatic axis: ``specs`` as for `psum`."""
    each = in_backward(specs={"kernel": P(None, "model"), "bias": P()})
    maps = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}

    @partial(jax.shard_map, mesh=mesh_of("data", "model"), **maps)
    def grad(layers, x):
        return jax.grad(partial(model, each=each, scanned=False))(layers, x.reshape(-1, DIM))

    assert_means(jax.jit(grad)(*inputs()))


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_there_are_no_second_derivatives(check_vma):
    def curvature(layers, x):
        first = jax.grad(partial(model, each=in_backward(), scanned=False))
        return jax.grad(lambda w: jnp.sum(first(w, x)["kernel"]))(layers)

    with pytest.raises(NotImplementedError, match="first order only"):
        mapped(curvature, check_vma)(*inputs())


def test_parameters_may_vary_over_some_of_the_axes_already():
    axes = ("node", "gpu")
    specs = {"in_specs": (P(), P(axes)), "out_specs": P("gpu")}

    @partial(jax.shard_map, mesh=mesh_of(*axes), **specs)
    def grad(layers, x):
        layers = lax.pcast(layers, "gpu", to="varying")
        found = jax.grad(partial(model, each=in_backward(axis_name=axes)))(layers, x[0])
        return jax.tree.map(lambda g: g[None], found)

    assert_means(jax.jit(grad)(*inputs()))


OUTSIDE = [*itertools.product([False, True], ["inside", "outside"])]


@pytest.mark.parametrize(("in_scan", "averaged"), daily(OUTSIDE, OUTSIDE[1:3]))
def test_a_gradient_from_outside_of_the_map_is_refused_where_it_would_be_too_small(
    in_scan, averaged
):
    def own(params, x):
        def layer(total, _):
            return total + jnp.mean(in_backward()(params)[None] * x), None

        start = jnp.sum(0 * x)
        total = jax.lax.scan(layer, start, None, length=2)[0] if in_scan else layer(start, None)[0]
        return jax.lax.pmean(total, "data") if averaged == "inside" else total[None]

    specs = {"in_specs": (P(), P("data")), "out_specs": P() if averaged == "inside" else P("data")}

    def gradient_of(check_vma):
        mapped = jax.shard_map(own, mesh=auto_mesh(N), check_vma=check_vma, **specs)
        return jax.grad(lambda params: jnp.mean(mapped(params, jnp.ones((N, 64)))))(jnp.ones(64))

    with pytest.raises(ValueError, match="jax.grad outside of jax.shard_map.*inside the map"):
        jax.eval_shape(lambda: gradient_of(True))
    np.testing.assert_allclose(gradient_of(False), 2 / 64 if in_scan else 1 / 64, rtol=1e-6)


# --- Shards, inside of maps -----------------------------------------------------------------------


LAYOUTS = {
    "replicated": (("data",), None),
    "rows": (("data",), SPECS),
    "columns": (("data",), {"kernel": P(None, "data"), "bias": P("data")}),
    "both axes": (("node", "gpu"), {"kernel": P(("node", "gpu")), "bias": P()}),
    "hsdp": (("replica", "fsdp"), {"kernel": P("fsdp"), "bias": P()}),
    "a dimension each": (("a", "b"), {"kernel": P("b", "a"), "bias": P("b")}),
}
EACH = [(name, True, True) for name in LAYOUTS]
EACH += [
    (name, *how)
    for name in ("rows", "replicated")
    for how in ((True, False), (False, True), (False, False))
]


@pytest.mark.parametrize(
    ("name", "check_vma", "scanned"), daily(EACH, [EACH[i] for i in (0, 1, 2, 5, 6, 10)])
)
def test_exact_gradients_are_those_of_one_device(name, check_vma, scanned):
    """A parameter may be split along any dimension, over any of the axes, or not at all."""
    axes, specs = LAYOUTS[name]
    op = "sum" if name == "hsdp" else "mean"
    options = {"check_vma": check_vma, "scanned": scanned, "gather": dq.F32(), "op": op}
    found = jax.device_get(gradient(mesh_of(*axes), axes, specs, **options)(*problem()))
    assert_means(jax.tree.map(lambda g: g / (N if op == "sum" else 1), found))


LAYER = dataclasses.replace(CHEAP, min_leaf_size=4096)


@pytest.mark.parametrize(
    ("kind", "gather", "bits"),
    daily(FEW := [(AUTO, None, 8), (EXPLICIT, None, 8), (AUTO, dq.BF16(), 16)], FEW[:2]),
)
def test_few_bits_back_and_by_default_eight_forth_are_close(kind, gather, bits):
    if kind == EXPLICIT:
        f, args = explicit(model, ("data",), SPECS, compression=LAYER, gather=gather)
    else:
        f, args = (
            gradient(mesh_of("data"), "data", SPECS, compression=LAYER, gather=gather),
            problem(),
        )
    compiled = f.lower(*args).compile()
    found = compiled(*args)[1] if kind == EXPLICIT else compiled(*args)
    for i in range(LAYERS):
        own, exact = found["kernel"][i], means()["kernel"][i]
        assert 1e-4 < relative_error(own, exact) < 4e-2
    assert relative_error(found["bias"], means()["bias"]) < 1e-2
    moves = [(name, moved / DIM**2) for name, moved in moves_of(compiled.as_text())]
    assert max(moved for _, moved in moves) < 1.15 * bits
    assert [name for name, _ in moves].count("all-gather") >= 2  # forward and in the backward pass
    assert any(name == "all-to-all" and moved > 5 / 2 for name, moved in moves)
    assert {name for name, moved in moves if moved > 6} == {"all-gather"}


@pytest.mark.parametrize("fast", daily([True, False], [True]))
def test_shards_travel_in_bf16_over_fast_links(fast, monkeypatch):
    monkeypatch.setattr(shards, "fast_links", lambda: fast)
    limits = dataclasses.replace(LAYER, method=None)
    step = gradient(mesh_of("data"), "data", SPECS, compression=limits)
    default, told = step(*problem()), dq.explain(step, *problem(), verbose=False)
    said = "By default on this machine: shards and their gradients travel in bf16"
    assert (said in str(told)) == fast
    five, bf16 = (dataclasses.replace(limits, method=x) for x in (dq.DynamiQ(), dq.BF16()))
    chosen = (bf16, dq.BF16()) if fast else (five, dq.DynamiQ(bits=8))
    other = (five, dq.DynamiQ(bits=8)) if fast else (bf16, dq.BF16())
    same, unlike = (
        gradient(mesh_of("data"), "data", SPECS, compression=one, gather=gather)(*problem())
        for one, gather in (chosen, other)
    )
    np.testing.assert_array_equal(default["kernel"], same["kernel"])
    assert (default["kernel"] != unlike["kernel"]).any()


@pytest.mark.parametrize("key", daily([None, KEY], [None]))
def test_both_gathers_have_the_same_bits_on_all_workers(key):
    """The gradient of |w|² / 2 is what the backward pass has gathered."""
    kernel = problem()[0]["kernel"][0]

    def run(shard):
        def loss(shard):
            w = in_backward(gather=EIGHT)(shard, specs=P("data"), key=key)
            assert w.shape == (DIM, DIM)
            return jnp.sum(jnp.square(w)) / 2, w

        grad, w = jax.grad(jax.checkpoint(loss), has_aux=True)(shard)
        return grad, w[None]

    maps = {"mesh": mesh_of("data"), "in_specs": P("data"), "out_specs": P("data")}
    grad, gathered = jax.device_get(jax.jit(jax.shard_map(run, **maps))(kernel))
    assert_replicas_equal(gathered)
    assert_same_bits(grad, gathered[0])
    assert 1e-6 < relative_error(gathered[0], kernel) < 1e-3  # eight bits


def test_every_gather_and_scatter_of_a_leaf_has_noise_of_its_own(monkeypatch):
    """A leaf that two axes split along two dimensions: two gathers and two scatters."""
    seeds = []

    def spy(name, change):
        def call(axis, part, compression, at, *, key, **options):
            seeds.append((name, tuple(np.asarray(key).tolist())))
            return {
                leaf: jnp.zeros([change(n) if i == at else n for i, n in enumerate(x.shape)])
                for leaf, x in part.items()
            }

        monkeypatch.setattr(reduction, name, call)

    def loss(shard):
        options = {"compression": dq.Policy(gradients=CHEAP, parameters=CHEAP), "key": KEY}
        return jnp.sum(dq.fsdp(shard, ("a", "b"), specs=P("a", "b"), **options))

    spy("gather_over", lambda n: 2 * n)
    spy("scatter_over", lambda n: n // 2)
    run = jax.vmap(jax.vmap(jax.grad(loss), axis_name="b"), axis_name="a")
    run(np.ones((2, 2, 64, 256), np.float32))
    assert [name for name, _ in seeds].count("scatter_over") == 2
    assert len({seed for _, seed in {*seeds}}) == 4, seeds


@pytest.mark.parametrize("kind", daily([AUTO, EXPLICIT], [EXPLICIT]))
def test_copies_over_another_axis_stay_equal(kind):
    """Types say what explicit axes split; of automatic ones ``specs`` do."""
    mesh, rng = mesh_of("data", "model", kind=kind), np.random.default_rng(0)
    arrays = {name: np.float32(rng.standard_normal((64, 128))) for name in ("copied", "parted")}
    x = np.float32(rng.standard_normal((2, 64, 128)))
    told = {"copied": P("data"), "parted": P("data", "model")}
    specs = dict.fromkeys(told, P("data"))

    def grad(params, x):
        options = {"specs": told if kind == AUTO else specs, "gather": CHEAP}
        each = in_backward(compression=CHEAP, **options)
        return jax.grad(lambda p: sum(jnp.sum(w * x[0]) for w in each(p).values()))(params)

    maps = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    with jax.set_mesh(mesh):
        args = put(arrays, mesh, told), put(x, mesh, P("data"))
        mapped = jax.shard_map(grad, axis_names={"data"}, check_vma=False, **maps)
        found = jax.jit(mapped)(*args)
    for own in found.values():
        assert relative_error(own, x.mean(0)) < 0.05
    assert_copies_equal(found)


def test_by_path_and_under_vmap_leaves_of_all_kinds():
    """Leaves that the method leaves out, and integers, are gathered exactly.

    Both see shapes of whole leaves. Gradients have the dtypes of parameters.
    """
    shapes, (kernel, rest, narrow) = set(), problem()[0]["kernel"]
    narrow, table = narrow.astype(jnp.bfloat16), np.arange(DIM**2, dtype=np.int32).reshape(DIM, DIM)
    layers = {"kernel": kernel, "rest": rest, "narrow": narrow}

    def method(path, leaf):
        shapes.add(leaf.shape)
        return None if path == "rest" else dq.DynamiQ(bits=5)

    def loss(shards, table):
        whole = each(shards | {"table": table, "none": None})
        assert whole.pop("none") is None
        return sum(jnp.sum(whole[name].astype(jnp.float32)) for name in layers), whole

    each = in_backward(compression=small(method), specs=P(None, "data"))
    split = lambda w: np.moveaxis(w.reshape(DIM, N, -1), 1, 0)
    run = jax.jit(jax.vmap(jax.grad(loss, has_aux=True), axis_name="data"))
    grads, whole = jax.device_get(run(jax.tree.map(split, layers), split(table)))
    assert shapes == {(DIM, DIM)}
    assert_replicas_equal(whole)
    assert_same_bits((whole["rest"][0], whole["table"][0]), (rest, table))
    for name in ("kernel", "narrow"):
        assert whole[name].dtype == grads[name].dtype == layers[name].dtype
        assert 1e-6 < relative_error(whole[name][0], np.float32(layers[name])) < 1e-3
    for grad in grads.values():
        np.testing.assert_allclose(np.float32(grad), 1, rtol=0.2)


WHOLE, BOTH = ({"kernel": P(*own), "bias": P()} for own in ((), [("data", "model")]))
REFUSED = [
    (r"kernel.* sharded over \('data',\).*hold the same", {"own": WHOLE}),
    ("bias.*has shape.*3 entries", {"specs": WHOLE | {"bias": P(None, None, "data")}}),
    ("specs name the axis 'model'", {"specs": P("model")}),
    ("parameters=8 is not a method", {"gather": 8}),
    (r"split over \('data', 'model'\).*out of order", {"specs": BOTH, "own": BOTH}),
    ("op='max'", {"op": "max"}),
    ("key=3 is not a PRNG key", {"key": 3}),
    ("has memory, and a backward pass", {"compression": small(dq.ErrorFeedback(dq.DynamiQ()))}),
    ("has memory", {"compression": lambda path, leaf: dq.ErrorFeedback(dq.contrib.THC())}),
]


@pytest.mark.parametrize(("complaint", "changes"), REFUSED)
def test_what_cannot_be_is_refused(complaint, changes):
    options = {"specs": SPECS} | changes
    own = options.pop("own", SPECS)
    mesh = mesh_of("data", "model") if own is BOTH else mesh_of("data")
    maps = {"in_specs": (stacked(own), P("data")), "out_specs": P()}
    with pytest.raises(ValueError, match=complaint):  # in the forward pass already
        forward = partial(model, each=in_backward(**options))
        jax.eval_shape(jax.shard_map(forward, mesh=mesh, **maps), *problem())


# --- Shards, outside of maps, on Explicit axes ----------------------------------------------------

checkpointed = partial(model, remat=True)
TYPED = dataclasses.replace(EXACT, min_leaf_size=DIM * DIM)
"""Vectors stay as they are: JAX has no rule for sums of examples and what is typed as reduced."""


def placed(mesh, specs, axes):
    layers, x = problem()
    return put(layers, mesh, stacked(specs)), put(x, mesh, P(axes))


def explicit(loss, axes, specs, compression=TYPED, gather=None, options=None):
    """The loss and gradients of `value_and_grad`, whose loss gathers."""
    mesh = mesh_of(*axes, kind=EXPLICIT)
    each = in_backward(axis_name=axes, compression=compression, gather=gather)
    f = dq.value_and_grad(
        partial(loss, each=each), axis_name=axes, compression=compression, ungathered=True
    )
    with jax.set_mesh(mesh):
        return jax.jit(f, compiler_options=options), placed(mesh, specs, axes)


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
    return checkpointed(layers, x, lambda w: each(w) | {"bias": w["bias"]})


LOSSES = {
    "scan": checkpointed, "loop": partial(model, scanned=False),
    "penalty in scan": penalty_in_scan, "unused": unused,
}  # fmt: skip


TYPES = [*((name, "rows") for name in LOSSES), ("scan", "columns"), ("scan", "hsdp")]


@pytest.mark.parametrize(("name", "layout"), daily(TYPES, [TYPES[i] for i in (1, 2, 3, 5)]))
def test_explicit_gradients_are_those_of_one_device(name, layout):
    """Compiled as users do: optimisations move types of unreduced values to constants."""
    f, args = explicit(LOSSES[name], *LAYOUTS[layout], gather=dq.F32(), options=AS_USERS)
    found = f(*args)
    plain = jax.jit(jax.value_and_grad(partial(LOSSES[name], each=lambda w: w)))
    assert_close(found, plain(*problem()), atol=1e-6)
    for own, arg in zip(*map(jax.tree.leaves, (found[1], args[0])), strict=True):
        assert own.sharding.is_equivalent_to(arg.sharding, own.ndim)


def test_explicit_shards_of_one_worker_are_whole():
    """JAX tells the size of an axis of one device outside of maps, too."""
    mesh = workers.mesh_of(1, kind=EXPLICIT)
    layers, x = problem()
    each = in_backward(axis_name="data", compression=TYPED, gather=dq.F32())
    loss = dq.value_and_grad(
        partial(checkpointed, each=each), axis_name="data", compression=TYPED, ungathered=True
    )
    with jax.set_mesh(mesh):
        args = put(layers, mesh, stacked(SPECS)), put(x, mesh, P("data"))
        found = jax.jit(loss)(*args)
    plain = jax.jit(jax.value_and_grad(partial(checkpointed, each=lambda w: w)))
    assert_close(found, plain(*problem()), atol=1e-6)


def test_explicit_shards_outside_of_the_layers_are_named():
    mesh = mesh_of("data", kind=EXPLICIT)

    def loss(params, x):
        x = x @ jax.reshard(params["in"], P())
        return checkpointed(params["layers"], x, partial(dq.fsdp, axis_name="data"))

    layers, x = placed(mesh, SPECS, "data")
    args = {"in": put(np.eye(DIM, dtype=np.float32), mesh, P("data")), "layers": layers}, x
    f = partial(dq.value_and_grad, loss, axis_name="data", compression=TYPED)
    with jax.set_mesh(mesh):
        with pytest.warns(UserWarning, match=r"^1 sharded .* \(in\) do not"):
            jax.eval_shape(f(ungathered=True), *args)
        with pytest.raises(ValueError, match="has gathered: pass value_and_grad.*ungathered=True"):
            jax.eval_shape(f(), *args)


def test_explicit_evaluation_needs_no_derivative_and_others_are_refused():
    mesh = mesh_of("data", kind=EXPLICIT)
    args = placed(mesh, SPECS, "data")
    each = in_backward(compression=TYPED, gather=dq.F32())
    loss = partial(checkpointed, each=each)
    jitted = jax.jit(loss)
    options = {"axis_name": "data", "mesh": mesh, "compression": TYPED, "ungathered": True}

    def inner(layers, x):  # a derivative inside of the loss has a seed of its own
        return loss(layers, x) + jnp.sum(lax.stop_gradient(jax.grad(loss)(layers, x)["bias"]))

    of_jax = "not dq.value_and_grad's: JAX's seed is a constant"
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jitted(*args), jax.jit(model)(*problem()), rtol=1e-5)
        # What JAX has traced before counts for nothing.
        text = str(jax.make_jaxpr(dq.value_and_grad(jitted, **options))(*args))
        assert "reduce_scatter" in text and f"f32[{LAYERS},{DIM},{DIM}]{{R" not in text
        for words, function in (
            (of_jax, jax.grad(loss)),
            (of_jax, jax.grad(jitted)),
            (of_jax, dq.value_and_grad(inner, **options)),
            ("specs=.* are for maps", partial(checkpointed, each=partial(each, specs=SPECS))),
        ):
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(function, *args)


def test_explicit_integers_are_gathered_exactly():
    mesh = mesh_of("data", kind=EXPLICIT)
    tree = {"table": put(np.arange(8), mesh, P("data")), "none": None}
    found = jax.jit(lambda tree: dq.fsdp(tree, "data"))(tree)
    assert jax.typeof(found["table"]).sharding.spec == P(None) and found["none"] is None
    np.testing.assert_array_equal(found["table"], np.arange(8))


# --- `value_and_grad` says what it gathers --------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_large_gather_before_the_loss_is_warned_of(kind):
    mesh = mesh_of("data", kind=kind)
    sharded, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def traced(rows, sharding, each=lambda w: w, **options):
        def loss(w, x):
            return jnp.mean(x @ each(w))

        specs = {"specs": sharding.spec} if kind == AUTO else {}
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
        if kind == EXPLICIT:
            each = partial(dq.fsdp, axis_name="data")
            traced(rows, sharded, each, ungathered=True)


@pytest.mark.parametrize("dtype", ["complex64", "float64", "complex128"])
def test_means_of_shards_keep_the_bits_of_wide_and_complex_numbers(dtype):
    """Scattered natively, as `jax.lax.psum_scatter` and a division have them."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        keep = (lambda x: x) if dtype.startswith("complex") else np.real
        params, x = (keep(draw(*shape)).astype(dtype) for shape in ((64, 32), (16, 64)))
        loss = lambda w, x: jnp.mean(jnp.abs(x @ w - 0.5) ** 2)
        mesh, exact = auto_mesh(N), {"compression": dq.F32(), "specs": P("data")}
        own = lambda w, x: loss(dq.fsdp(w, "data", **exact), x)
        maps = {"mesh": mesh, "in_specs": (P("data"), P("data")), "out_specs": P("data")}
        found = jax.jit(jax.shard_map(jax.grad(own), **maps))(params, x)
        expected = jax.jit(jax.grad(loss))(params, x)
        assert found.dtype == expected.dtype
        tolerance = 1e-5 if dtype == "complex64" else 1e-13
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
