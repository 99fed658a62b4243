"""`dq.scan`: gradients of stacked layers are those of `jax.lax.scan` and one reduction after it."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close, assert_replicas_equal, assert_same_arithmetic, assert_same_bits
from cases import CHEAP, EXACT, daily, small
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, local, mapped, mesh_of, once

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.compat import inner_jaxprs

N, DIM, LAYERS = 4, 32, 4
KEY = jax.random.key(5)


@once
def arrays(n_layers, dtype):
    """Stacked parameters, values for all layers, and every worker's first x."""
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "kernel": (jax.random.normal(keys[0], (n_layers, DIM, DIM)) / DIM**0.5).astype(dtype),
        "bias": jax.random.normal(keys[1], (n_layers, DIM)).astype(dtype),
        "number": jnp.arange(n_layers),
    }
    scale = jnp.linspace(0.3, 3.0, N)[:, None, None]  # the later workers' are larger
    x = jax.random.normal(keys[2], (N, 6, DIM)) * scale
    return layers, {"gain": jax.random.normal(keys[3], (DIM,))}, x.astype(dtype)


def layer(shared, carry, own):
    """A layer with pytrees everywhere, an integer in the carry, outputs, and shared values."""
    x, count = carry
    y = jnp.tanh(x @ own["kernel"]) * shared["gain"].astype(x.dtype)[None]
    x = x + y + own["bias"][None]
    return (x, count + own["number"]), {"mean": jnp.mean(y, axis=0), "count": count}


def loss_of(scan, wrap, layers, shared, x, **options):
    (x, count), outputs = scan(wrap(partial(layer, shared)), (x, 0), layers, **options)
    weights = jnp.arange(1.0, 1 + len(outputs["mean"]))[:, None]
    aux = jnp.sum(weights * outputs["mean"].astype(jnp.float32))
    return jnp.mean(x.astype(jnp.float32) ** 2) + aux / 64, (count, outputs)


same = lambda f: f
SAVE_DOTS = jax.checkpoint_policies.dots_saveable
FORMS: dict[str, Any] = {
    "plain": {},
    "remat": {"wrap": jax.checkpoint},
    "policy": {"wrap": partial(jax.checkpoint, policy=SAVE_DOTS)},
    "unroll": {"unroll": 2},
    "unroll all": {"unroll": True},
    "reverse": {"reverse": True},
    "reverse, remat": {"reverse": True, "wrap": jax.checkpoint},
    "one": {"n_layers": 1},
    "two": {"n_layers": 2},
    "bf16": {"dtype": jnp.bfloat16},
    "length": {"length": LAYERS},
    "unchecked": {"check_vma": False},
}


@pytest.mark.parametrize("form", daily(FORMS, ["policy", "unroll", "reverse", "one", "bf16"]))
def test_exact_gradients_have_the_bits_of_lax_scan_and_one_mean(form):
    options = dict(FORMS[form])
    wrap, check_vma = options.pop("wrap", same), options.pop("check_vma", True)
    arguments = arrays(options.pop("n_layers", LAYERS), options.pop("dtype", jnp.float32))
    grad = partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True, allow_int=True)

    def as_array(tree):
        return jax.tree.map(lambda g: jnp.zeros(()) if g.dtype == jax.dtypes.float0 else g, tree)

    def ours(args, x):
        scan = partial(dq.scan, axis_name="data", compression=EXACT, **options)
        found, (own, shared, of_x) = grad(partial(loss_of, scan, wrap))(*args, x)
        return found, as_array(own), lax.pmean(shared, "data") if not check_vma else shared, of_x

    def theirs(args, x):
        layers, shared = args
        varying = layers | local({k: layers[k] for k in ("kernel", "bias")}, check_vma)
        scan = partial(lax.scan, **options)
        found, (own, of_shared, of_x) = grad(partial(loss_of, scan, wrap))(varying, shared, x)
        own = lax.pmean(as_array(own), "data")
        return found, own, lax.pmean(of_shared, "data") if not check_vma else of_shared, of_x

    *params, x = arguments
    found, expected = (mapped(f, check_vma)(params, x) for f in (ours, theirs))
    assert_same_bits(found, expected)
    assert_replicas_equal(found[1])
    assert all(np.any(g != 0) for g in jax.tree.leaves((found[1]["kernel"], found[2])))


@pytest.mark.parametrize("reverse", daily([False, True], [False]))
def test_compressed_gradients_have_the_bits_of_a_reduction_of_each_layer(reverse):
    """Layers round differently: with a key, zero and the layer's index are folded in."""
    layers, shared, x = arrays(3, jnp.float32)

    def ours(args, x):
        told = {"axis_name": "data", "compression": CHEAP, "key": KEY, "reverse": reverse}
        run = lambda own: loss_of(partial(dq.scan, **told), same, own, args[1], x)[0]
        own = jax.grad(run, allow_int=True)(args[0])
        return {name: own[name] for name in ("kernel", "bias")}

    def theirs(args, x):
        scan = partial(lax.scan, reverse=reverse)
        run = lambda own: loss_of(scan, same, own | {"number": args[0]["number"]}, args[1], x)[0]
        own = jax.grad(run)(local({k: args[0][k] for k in ("kernel", "bias")}, True))
        keys = [jax.random.fold_in(jax.random.fold_in(words, 0), i) for i in range(3)]
        rows = [jax.tree.map(lambda g, i=i: g[i], own) for i in range(3)]
        pairs = zip(rows, keys, strict=True)
        each = [dq.pmean(g, "data", compression=CHEAP, key=key) for g, key in pairs]
        return jax.tree.map(lambda *g: jnp.stack(g), *each)

    words = jax.random.wrap_key_data(jax.random.key_data(KEY))
    found, expected = (mapped(f)((layers, shared), x) for f in (ours, theirs))
    assert_same_bits(found, expected)
    assert_replicas_equal(found)


def test_layers_are_split_over_an_explicit_axis_that_the_map_leaves_to_jax():
    """Rows of gradients have this axis in their types, as the parameters do."""
    mesh = mesh_of(2, 2, kind=AxisType.Explicit)
    layers, _, x = arrays(3, jnp.float32)
    split = {"kernel": P(None, None, "model"), "bias": P(None, "model")}
    specs = NamedSharding(mesh, P("data")), {k: NamedSharding(mesh, v) for k, v in split.items()}
    x, own = jax.device_put((x[0, :4], {name: layers[name] for name in split}), specs)
    whole = lambda x, own: (jax.reshard(square(x, own)[0], P(None, None)), None)

    def gradients(own, x, scan=lax.scan, **told):
        return jax.grad(lambda own: jnp.mean(scan(whole, x, own, **told)[0] ** 2))(own)

    def ours(own, x):
        told: dict[str, Any] = {"axis_name": "data", "compression": EXACT, "specs": split}
        return gradients(own, x, dq.scan, **told)

    theirs = lambda own, x: lax.pmean(gradients(local(own, True), x), "data")
    maps: Any = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
    with jax.set_mesh(mesh):
        found, expected = (jax.jit(jax.shard_map(f, **maps))(own, x) for f in (ours, theirs))
    assert found["kernel"].sharding.spec == split["kernel"]
    assert_same_bits(*jax.device_get((found, expected)))


def square(x, own):
    return jnp.tanh(x @ own["kernel"]) + own["bias"][None], None


def trace(n_layers, compression=CHEAP):
    """The program of a gradient."""
    layers, _, x = arrays(n_layers, jnp.float32)
    del layers["number"]

    def gradients(layers, x):
        run = lambda own: dq.scan(square, x, own, "data", compression=compression)[0].sum()
        return jax.grad(run)(layers)

    return jax.make_jaxpr(gradients, axis_env=[("data", N)])(layers, x[0])


def test_the_program_does_not_grow_with_depth():
    sizes = {str(trace(n)).count("\n") for n in (4, 16, 48)}
    assert len(sizes) == 1


def loops(jaxpr):
    """All scans of a program, also those in calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in inner_jaxprs(equation):
            yield from loops(getattr(inner, "jaxpr", inner))


def ancestors(jaxpr, variables):
    """Equations that variables of a jaxpr follow from."""
    made = {out: i for i, e in enumerate(jaxpr.eqns) for out in e.outvars}
    waiting, found = list(variables), set()
    while waiting:
        number = made.get(waiting.pop())
        if number is not None and number not in found:
            found.add(number)
            waiting += [v for v in jaxpr.eqns[number].invars if not hasattr(v, "val")]
    return [jaxpr.eqns[i] for i in found]


def collectives(equations):
    names = ("psum", "all_to_all", "all_gather", "ppermute")
    return [e for e in equations if e.primitive.name.removesuffix("_invariant") in names]


@pytest.mark.usefixtures("padding_is_free")
def test_a_payload_travels_beside_the_products_of_a_layer():
    """In a turn of the loop, neither the payload takes a product nor a product the payload."""
    method = dataclasses.replace(CHEAP, topology=dq.Direct())
    bodies = [e.params["jaxpr"].jaxpr for e in loops(trace(5, method).jaxpr)]
    (body,) = (x for x in bodies if any(e.primitive.name == "all_to_all" for e in x.eqns))
    (payload,) = [e for e in body.eqns if e.primitive.name == "all_to_all"]
    products = [e for e in body.eqns if "dot_general" in str(e)]
    assert products
    before = ancestors(body, [v for v in payload.invars if not hasattr(v, "val")])
    assert not any("dot_general" in str(e) for e in before)
    of_products = ancestors(body, [v for e in products for v in e.invars if hasattr(v, "aval")])
    assert not collectives(of_products)


def through_barriers(body, variables):
    """The operands that these variables are, behind barriers."""
    made = {out: (e, i) for e in body.eqns for i, out in enumerate(e.outvars)}
    found = []
    for v in variables:
        while v in made and made[v][0].primitive.name == "optimization_barrier":
            v = made[v][0].invars[made[v][1]]
        found.append(v)
    return found


@pytest.mark.usefixtures("padding_is_free")
def test_statistics_do_not_wait_for_a_payload():
    """In a turn of the loop they are ready to go when the payload of the turn before arrives."""
    method = dataclasses.replace(CHEAP, method=dq.DynamiQ(), topology=dq.Direct())
    bodies = [e.params["jaxpr"].jaxpr for e in loops(trace(5, method).jaxpr)]
    (body,) = (x for x in bodies if any(e.primitive.name == "all_to_all" for e in x.eqns))
    light = [e for e in collectives(body.eqns) if e.primitive.name.startswith("psum")]
    assert light
    for e in light:
        before = ancestors(body, through_barriers(body, e.invars))
        assert any("reduce_sum" in str(x) for x in before)
        assert not collectives(before)


@pytest.mark.usefixtures("padding_is_free")
def test_a_turn_begins_and_ends_with_its_gather():
    """The turn before has encoded the payload, and the turn after decodes it."""
    params, x = model(4)
    policy = dq.Policy(gradients=CHEAP, parameters=CHEAP)

    def forward(params, x):
        told = {"specs": SHARDS, "compression": policy}
        functions = [embed, dq.Scanned(block), head]
        run = lambda own: dq.overlapped(functions, own, x, "data", **told)
        return lax.pmean(jax.vjp(run, params)[0], "data")

    maps: Any = {"in_specs": (SHARDS, P("data")), "out_specs": P()}
    program = jax.make_jaxpr(jax.shard_map(forward, mesh=auto_mesh(N), **maps))(params, x)
    bodies = [e.params["jaxpr"].jaxpr for e in loops(program.jaxpr)]
    (body,) = (x for x in bodies if collectives(x.eqns))
    # The scales of the gather that follows are agreed on in this turn.
    gathers = [e for e in collectives(body.eqns) if e.invars[0].aval.dtype != jnp.bfloat16]
    taken = [v for e in gathers for v in e.invars]
    made = {v for e in gathers for v in e.outvars}
    assert made
    assert {*through_barriers(body, taken)} <= {*body.invars}
    assert made <= {*through_barriers(body, body.outvars)}
    whole = params[1]["kernel"].shape[1:]
    assert whole not in {v.aval.shape for v in body.invars}  # payloads are carried


def test_each_layer_travels_once():
    """The first step has nothing to send beside it, and is outside of the loop."""
    layers, _, x = arrays(5, jnp.float32)
    del layers["number"]

    def gradients(layers, x):
        run = lambda own: dq.scan(square, x[0], own, "data", compression=CHEAP)[0].sum()
        return jax.grad(run)(layers)

    options = {"in_specs": (P(), P("data")), "out_specs": P(), "mesh": auto_mesh(N)}
    told = dq.explain(jax.jit(jax.shard_map(gradients, **options)), layers, x)
    (run,) = told.plans
    assert run.times == 5
    assert told.agrees


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"op": "max"}, "op='max'"),
        ({"key": 3}, "key=3 is not a PRNG key"),
        ({"length": 3}, "number of layers is the first dimension .* length= 3"),
        ({"compression": small(dq.ErrorFeedback(dq.DynamiQ()))}, "has memory, and a backward pass"),
        ({"specs": P("data")}, r"splits the layers themselves.*P\(None, 'data'\)"),
        ({"xs": {"kernel": jnp.ones((3, DIM, DIM)), "bias": jnp.ones(())}}, "bias.* is a scalar"),
        ({"xs": {"kernel": jnp.ones((0, DIM, DIM)), "bias": jnp.ones((0, DIM))}}, "has 0 layers"),
        (
            {"xs": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}},
            r"\['bias'\] 2, \['kernel'\] 3; stack",
        ),
    ],
)
def test_what_cannot_be_is_refused(change, complaint):
    layers, _, x = arrays(LAYERS, jnp.float32)
    del layers["number"]
    layers = change.pop("xs", layers)
    run = lambda own, x: dq.scan(square, x, own, "data", **change)[0]
    with pytest.raises(ValueError, match=complaint):
        mapped(run)(layers, x)


@pytest.mark.parametrize("own", [{}, {"fsdp": True}, None])
def test_a_layer_may_scan_parameters_of_all_layers_but_not_its_own(own):
    """Both scans would reduce gradients of its own: a sum would be n times too large."""
    layers, _, x = arrays(2, jnp.float32)
    stack = {name: layers[name] for name in ("kernel", "bias")}

    def loss(params, x, scan):
        def layer(x, w):
            if own:
                return square(x, dq.fsdp(w, "data", op="sum", compression=EXACT))
            inner = params[1] if own is None else jax.tree.map(lambda w: w[None], w)
            return scan(square, x, inner)[0] + w["bias"][None], None

        return jnp.mean(scan(jax.checkpoint(layer), x, params[0])[0])

    scan = partial(dq.scan, axis_name="data", op="sum", compression=EXACT)
    ours = lambda params, x: jax.grad(loss)(params, x, scan)
    if own is not None:
        with pytest.raises(
            ValueError,
            match="own parameters to another .* 4 times too large; (take jax.lax.scan|leave it)",
        ):
            jax.eval_shape(mapped(ours).on_devices, (stack, stack), x)
        return
    theirs = lambda params, x: lax.psum(jax.grad(loss)(local(params, True), x, lax.scan), "data")
    found, expected = (mapped(f)((stack, stack), x) for f in (ours, theirs))
    assert_close(found, expected)


def test_a_carry_of_another_type_is_refused_as_by_lax_scan():
    layers, _, x = arrays(LAYERS, jnp.float32)
    wrong = lambda x, own: (x.astype(jnp.bfloat16), None)
    with pytest.raises(TypeError, match="carry"):
        mapped(lambda own, x: dq.scan(wrong, x, own, "data")[0])(layers, x)


def test_a_second_derivative_is_refused():
    layers, _, x = arrays(LAYERS, jnp.float32)
    del layers["number"]
    loss = lambda own, x: dq.scan(square, x, own, "data", compression=EXACT)[0].sum()
    inner = lambda own, x: sum(g.sum() for g in jax.tree.leaves(jax.grad(loss)(own, x)))
    with pytest.raises(NotImplementedError, match="scan has derivatives of the first order only"):
        mapped(jax.grad(inner))(layers, x)


# --- A scan among other functions -----------------------------------------------------------------

F32 = dataclasses.replace(EXACT, min_leaf_size=DIM * DIM)


def embed(w, x):
    return jnp.tanh(x @ w["in"])


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def head(w, x):
    return jnp.mean((x @ w["out"]) ** 2)


@once
def model(n_layers):
    """Stacked parameters of three functions, and the examples of all workers."""
    keys = jax.random.split(jax.random.key(1), 4)
    layers, _, _ = arrays(n_layers, jnp.float32)
    ends = {"in": jax.random.normal(keys[0], (16, DIM)) / 4}, {"out": jnp.ones((DIM, 64)) / 8}
    blocks = {name: layers[name] for name in ("kernel", "bias")}
    x = jax.random.normal(keys[1], (2 * N, 16)) * jnp.linspace(0.4, 8.0, 2 * N)[:, None]
    return [ends[0], blocks, ends[1]], x


def listed(stacked, n_layers):
    """One entry for every function, of stacked layers."""
    first, blocks, last = stacked
    is_spec = lambda x: isinstance(x, P)
    row = lambda w, i: P(*w[1:]) if is_spec(w) else w[i]
    rows = [jax.tree.map(partial(row, i=i), blocks, is_leaf=is_spec) for i in range(n_layers)]
    return [first, *rows, last]


def stacked(entries):
    """The other way round."""
    first, *rows, last = entries
    return [first, jax.tree.map(lambda *w: jnp.stack(w), *rows), last]


WHOLE: list = [{"in": P()}, {"kernel": P(), "bias": P()}, {"out": P()}]
SHARDS: list = [
    {"in": P("data")},
    {"kernel": P(None, "data"), "bias": P()},
    {"out": P(None, "data")},
]
AMONG: dict[str, Any] = {
    "data parallel": (WHOLE, {}, {}),
    "FSDP": (SHARDS, {}, {}),
    "FSDP, payloads kept": (SHARDS, {"reshard_after_forward": False}, {}),
    "FSDP, reverse": (SHARDS, {}, {"reverse": True}),
    "FSDP, two layers": (SHARDS, {}, {"n_layers": 2}),
    "FSDP, one layer": (SHARDS, {"reshard_after_forward": False}, {"n_layers": 1}),
    "sharded updates": (SHARDS, {}, {"copied": True}),
    "sharded updates, reverse": (SHARDS, {}, {"copied": True, "reverse": True}),
}


@pytest.mark.parametrize("way", AMONG)
@pytest.mark.parametrize("remat", [True])
def test_a_scan_among_functions_does_what_a_list_of_them_does(way, remat):
    specs, told, how = AMONG[way]
    n_layers, reverse = how.get("n_layers", 3), how.get("reverse", False)
    params, x = model(n_layers)
    one = jax.checkpoint(block) if remat else block
    told = told | {"axis_name": "data", "compression": F32}

    copied = how.get("copied", False)

    def scanned(params, copies, x):
        functions = [embed, dq.Scanned(one, reverse=reverse), head]
        copies = {"copies": copies} if copied else {}
        run = lambda p: dq.overlapped(functions, p, x, specs=specs, **copies, **told)
        return jax.value_and_grad(run)(params)

    def in_list(params, copies, x):
        functions = [embed, *[one] * n_layers, head]
        order = lambda each: [each[0], *each[1:-1][:: -1 if reverse else 1], each[-1]]
        lists = (order(listed(each, n_layers)) for each in (params, specs, copies))
        parts, of_parts, of_copies = lists
        copies = {"copies": of_copies} if copied else {}
        run = lambda p: dq.overlapped(functions, p, x, specs=of_parts, **copies, **told)
        loss, own = jax.value_and_grad(run)(parts)
        return loss, stacked(order(own))

    maps = {"in_specs": (specs, WHOLE, P("data")), "mesh": auto_mesh(N)}
    first = lambda f: lambda *args: (lambda loss, own: (loss[None], own))(*f(*args))
    run = lambda f: jax.jit(jax.shard_map(first(f), out_specs=(P("data"), specs), **maps))
    found, expected = (jax.device_get(run(f)(params, params, x)) for f in (scanned, in_list))
    assert_same_bits(found, expected)
    assert all(np.any(g != 0) for g in jax.tree.leaves(found[1]))


@pytest.mark.parametrize(("width", "exclude"), [(6, None), (6, "layers"), (8, None)])
def test_masters_that_split_the_layers_are_refused_as_such(width, exclude):
    """Four layers of 6 x 6 are split by layer; the remedies are another width, or to exclude."""
    method, mesh = small(dq.F32(), exclude=exclude), auto_mesh(N)
    params = {"layers": jnp.ones((N, width, width)), "head": jnp.ones((3 * N, 8))}
    optimizer = dq.optax.sharded(optax.sgd(0.1), "data", compression=method)
    state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(state)
    layer, last = lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.mean(x**2) * jnp.sum(w)

    def gradient(params, state, x):
        def loss(own):
            entries = lambda tree: [tree["layers"], tree["head"]]
            told = {"specs": entries(specs.masters), "copies": entries(params)}
            functions = [dq.Scanned(layer), last]
            return dq.overlapped(functions, entries(own), x, "data", compression=method, **told)

        return jax.grad(loss)(state.masters)

    maps: Any = {"in_specs": (P(), specs, P("data")), "out_specs": specs.masters, "mesh": mesh}
    run = partial(jax.eval_shape, jax.shard_map(gradient, **maps), params, state)
    if width == 8 or exclude:
        assert run(jnp.ones((N, width)))["layers"].shape == params["layers"].shape
        return
    with pytest.raises(ValueError, match=r"splits the layers themselves .* of the 4 workers, or"):
        run(jnp.ones((N, width)))


@pytest.mark.parametrize("form", daily({"": {}, "reverse": {"reverse": True}, "one": {}}, []))
def test_pending_differences_of_a_scan_have_the_bits_of_the_order_of_before(form):
    """Losses, masters and parameters; also those that `jax.lax.scan` and plain updates give."""
    params, x = model(1 if form == "one" else 3)
    functions = [embed, dq.Scanned(jax.checkpoint(block), reverse=form == "reverse"), head]

    def train(how):
        policy = dq.Policy(gradients=F32, parameters=F32)
        optimizer = dq.optax.sharded(
            optax.sgd(0.3, 0.9), "data", compression=policy, deferred=how == "pending"
        )
        mesh = auto_mesh(N)
        copies = jax.device_put(params, jax.NamedSharding(mesh, P()))
        state = dq.optax.init(optimizer, copies, mesh)
        specs = dq.optax.state_specs(state)
        assert specs.masters[1]["kernel"][:2] == (None, "data")

        def loss(masters, copies, pending, x):
            options = {"specs": specs.masters, "copies": copies, "pending": pending}
            found = dq.overlapped(functions, masters, x, "data", compression=F32, **options)
            return (found, copies) if pending is None else found

        def plain(copies, x):
            for function, own in zip(functions, copies, strict=True):
                x = function(own, x)
            return x

        def step(copies, state, x):
            if how == "plain":
                value, grads = jax.value_and_grad(plain)(local(copies, True), x)
            else:
                both = jax.value_and_grad(loss, has_aux=True)
                (value, copies), grads = both(state.masters, copies, state.pending, x)
            updates, state = optimizer.update(grads, state, copies)
            return optax.apply_updates(copies, updates), state, lax.pmean(value, "data")

        maps: Any = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs, P())}
        mapped_step = jax.shard_map(step, mesh=mesh, check_vma=True, **maps)
        run, losses = jax.jit(mapped_step), []
        for scale in (1, 0.5, 2):
            copies, state, value = run(copies, state, x * np.float32(scale))
            losses.append(value)
        return jax.device_get((losses, state.masters, dq.optax.gathered(copies, state)))

    found, before, plain = map(train, ("pending", "ready", "plain"))
    assert_same_arithmetic(found, before)
    assert_same_arithmetic(found, plain)
    assert len({*map(float, found[0])}) == 3


@pytest.mark.release
def test_pending_differences_of_a_scan_take_no_second_copy_of_the_parameters():
    """The rows of the copies become current in place: nothing else has their whole shape."""
    params, x = model(3)
    mesh, functions = auto_mesh(N), [embed, dq.Scanned(block), head]
    optimizer = dq.optax.sharded(optax.sgd(0.3), "data", compression=F32, deferred=True)
    state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(state)

    def loss(masters, copies, pending, x):
        options = {"specs": specs.masters, "copies": copies, "pending": pending}
        return dq.overlapped(functions, masters, x, "data", compression=F32, **options)

    def forward(copies, state, x):
        own = lambda masters: loss(masters, copies, state.pending, x)
        value, _, copies = jax.vjp(own, state.masters, has_aux=True)
        return copies, lax.pmean(value, "data")

    maps: Any = {"in_specs": (P(), specs, P("data")), "out_specs": P()}
    program = jax.make_jaxpr(jax.shard_map(forward, mesh=mesh, **maps))(params, state, x)
    shape = ",".join(map(str, params[1]["kernel"].shape))
    assert f"f32[{shape}]" in str(program)
    assert not re.search(rf"f32\[{shape}\]\S* = broadcast_in_dim", str(program))


def test_gradients_of_masters_wait_in_the_dtype_that_travels():
    """Rows of f32 would take twice the memory of those of bf16 until the update reads them."""
    params, x = model(3)
    mesh, functions = auto_mesh(N), [embed, dq.Scanned(block), head]
    copies, x = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (params, x))
    state = dq.optax.init(dq.optax.sharded(optax.sgd(0.3), "data", compression=F32), copies, mesh)
    specs = dq.optax.state_specs(state)

    def gradients(masters, copies, x):
        options = {"specs": specs.masters, "copies": copies, "compression": F32}
        return jax.grad(lambda own: dq.overlapped(functions, own, x, "data", **options))(masters)

    maps: Any = {"in_specs": (specs.masters, P(), P("data")), "out_specs": specs.masters}
    mapped = jax.shard_map(gradients, mesh=mesh, check_vma=False, **maps)
    program = jax.make_jaxpr(mapped)(state.masters, copies, x)
    assert program.out_avals[1].dtype == jnp.float32
    rows, columns, wide = params[1]["kernel"].shape
    zeros = rf"(\w+)\[{rows},{columns // N},{wide}\] = broadcast_in_dim"
    assert {*re.findall(zeros, str(program))} == {"bf16"}
