"""Shards in the pipeline: gradients scatter beside the backward pass (ZeRO-1), and FSDP."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CHEAP, assert_close, assert_same_bits, auto_mesh, daily, promoting
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.axis import Axis, axis_names
from dynamiq_jax.training import interleaved
from dynamiq_jax.training.phases import cut

N, DIM, LAYERS = 4, 16, 3
EXACT = dq.Compression(dq.F32(), min_leaf_size=DIM * DIM, min_bucket_size=0)
SOME = dataclasses.replace(CHEAP, min_leaf_size=DIM * DIM)
FULL = [True, False]


def embed(w, x):
    return jnp.tanh(x.astype(w["in"].dtype) @ w["in"])


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def head(w, x):
    return jnp.mean((x @ w["out"]).astype(jnp.float32) ** 2)


FUNCTIONS = [embed, *[block] * LAYERS, head]


def problem(dtype: Any = np.float32) -> Any:
    """Parameters of the functions, and a batch for each of three steps."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape) / 4  # noqa: E731
    params = [
        {"in": normal(32, DIM)},
        *({"kernel": normal(DIM, DIM), "bias": np.full(DIM, 0.1)} for _ in range(LAYERS)),
        {"out": normal(DIM, 64)},
    ]
    scale = np.linspace(0.4, 8.0, 2 * N)[None, :, None]  # the later workers' are larger
    batches = np.float32(normal(3, 2 * N, 32) * scale)
    return jax.tree.map(lambda x: x.astype(dtype), params), batches


def plain(params, x):
    for f, own in zip(FUNCTIONS, params, strict=True):
        x = f(own, x)
    return x


def in_pipeline(params, x, **options):
    return dq.sequential(FUNCTIONS, params, x, **options)


def at_once(params, x, **options):
    return plain(dq.reduce_in_backward(params, **options), x)


WAYS = {"in a pipeline": in_pipeline, "at once": at_once}


def make(method=EXACT, axes: Any = "data", **options):
    rule = options.pop("rule", optax.adamw(1e-2, weight_decay=0.1))
    return promoting(dq.optax.sharded(rule, axes, method=method, differences=method, **options))


def stepper(optimizer, params, way=None, method=EXACT, *, mesh=None, axes="data", check_vma=True):
    """The state, and jit of a step; ``way`` is a loss that scatters, `None` a plain one."""
    mesh = auto_mesh(N) if mesh is None else mesh
    state = dq.optax.init(optimizer, params, mesh)
    splits = dq.optax.state_specs(state)

    def step(params, state, x):
        if way is None:
            grads = jax.grad(plain)(Axis(axis_names(axes)).to_varying(params), x)
        else:
            specs = dq.optax.state_specs(state).masters
            options = {"axis_name": axes, "specs": specs, "copies": params, "method": method}
            grads = jax.grad(partial(way, x=x, **options))(state.masters)
            for g, master in zip(*map(jax.tree.leaves, (grads, state.masters)), strict=True):
                assert g.shape == master.shape and g.dtype == jnp.float32
        updates, state = optimizer.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    maps = {"in_specs": (P(), splits, P(axes)), "out_specs": (P(), splits)}
    return state, jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **maps))


def train(params, batches, optimizer, *args, **options):
    state, step = stepper(optimizer, params, *args, **options)
    mesh = options.get("mesh") or auto_mesh(N)
    params = jax.device_put(params, NamedSharding(mesh, P()))  # as after a step: one program
    for x in batches:
        params, state = step(params, state, x)
    return params, state


SGD = optax.sgd(0.5, momentum=0.9)


CHECKED = [("in a pipeline", True), ("in a pipeline", False), ("at once", True)]


@pytest.mark.parametrize(("way", "check_vma"), daily(CHECKED, CHECKED[:1]))
def test_with_exact_sums_a_step_is_that_of_sharded_alone(way, check_vma):
    params, batches = problem()
    optimizer = make(rule=SGD, max_norm=0.05 if check_vma else None)
    found = train(params, batches, optimizer, WAYS[way], check_vma=check_vma)
    expected = train(params, batches, optimizer, check_vma=check_vma)
    assert_close(found, expected)
    if way == "at once":  # the same program, but for the place of the reductions
        assert_same_bits(jax.device_get(found[0]), jax.device_get(expected[0]))
    for own, first in zip(*map(jax.tree.leaves, (found[0], params)), strict=True):
        assert np.max(np.abs(np.asarray(own) - first)) > 1e-4  # and the bound of closeness is 1e-5


@pytest.mark.release
def test_data_by_model():
    """Products over a part of the parameters; the workers' axis splits that part."""
    axes, rng = ("data", "model"), np.random.default_rng(0)
    devices = {"devices": jax.devices()[:N], "axis_types": (AxisType.Auto,) * 2}
    mesh = jax.make_mesh((2, 2), axes, **devices)
    layers = [
        {"up": np.float32(rng.standard_normal((8, 16))), "scale": np.ones(8, np.float32)}
        for _ in range(3)
    ]
    params, of_params = [*layers, {}], [*[{"up": P(None, "model"), "scale": P()}] * 3, {}]
    method = dq.Compression(dq.F32(), min_leaf_size=64, min_bucket_size=0)
    x = np.float32(rng.standard_normal((4, 8)))

    def layer(w, x):
        x = lax.all_gather(x @ w["up"] * 0.1, "model", axis=1, tiled=True)
        return x[:, :8] * w["scale"][None]

    functions = [*[layer] * 3, lambda _, x: jnp.sum(x**2)]
    optimizer = make(method, specs=of_params, rule=SGD)
    state = dq.optax.init(optimizer, params, mesh)
    splits = dq.optax.state_specs(state)
    assert splits.masters[0]["up"] == P(None, ("model", "data"))

    def step(params, state, x, scatters):
        def loss(own):
            if scatters:
                options = {"specs": splits.masters, "copies": params, "method": method}
                return dq.sequential(functions, own, x, "data", **options)
            found = x
            for function, w in zip(functions, own, strict=True):
                found = function(w, found)
            return found

        grads = jax.grad(loss)(state.masters if scatters else params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    maps = {"in_specs": (of_params, splits, P("data")), "out_specs": (of_params, splits)}
    found, expected = (
        jax.jit(jax.shard_map(partial(step, scatters=own), mesh=mesh, check_vma=False, **maps))(
            params, state, x
        )
        for own in FULL
    )
    assert_close(found, expected)
    assert np.max(np.abs(np.asarray(found[0][0]["up"]) - params[0]["up"])) > 1e-4


def test_a_function_takes_a_round_of_statistics_and_one_of_payloads(monkeypatch):
    """One less than an all-reduce; no gradient is gathered."""
    seen = []

    def watched(*args):
        seen.append(cut(*args))
        return seen[-1]

    monkeypatch.setattr(interleaved, "cut", watched)
    method = dataclasses.replace(SOME, topology=dq.Direct())
    params, batches = problem()
    state, step = stepper(make(method), params, in_pipeline, method)
    step.trace(params, state, batches[0])
    assert len(seen) == 3  # of the embedding, a layer, and the head
    for traced in seen:
        moves = [(k, op) for k, ops in enumerate(traced.rounds) for op in ops]
        names = [(k, op.equation.primitive.name.removesuffix("_invariant")) for k, op in moves]
        payloads = [own for own in names if own[0] == 1]
        assert len(traced.rounds) == 2 and payloads == [(1, "all_to_all")]
        assert {*names} == {(0, "psum"), *payloads}


def test_gradients_travel_once_in_few_bits():
    size, method = 512, dataclasses.replace(CHEAP, topology=dq.Direct())
    options = {"axis_name": "data", "specs": [P("data")], "method": method}

    def grad(shard, copy, x):
        run = lambda own: dq.sequential([lambda w, x: x @ w], [own], x, copies=[copy], **options)  # noqa: E731
        return jax.grad(lambda own: run(own).sum())(shard)

    shapes = (size // N, size), (size, size), (2, size)
    given = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    text = str(jax.make_jaxpr(grad, axis_env=[("data", N)])(*given))
    assert "all_gather" not in text
    ((n, words),) = re.findall(r"u32\[(\d+),(\d+)\] = all_to_all", text)
    assert 4.4 < 32 * int(n) * int(words) / size**2 < 4.6


def test_what_cannot_be_is_refused():
    params, batches = problem()
    optimizer = make()
    mesh, x = auto_mesh(N), batches[0][:2]
    state = dq.optax.init(optimizer, params, mesh)
    splits = dq.optax.state_specs(state)

    def tried(way=None, **changes):
        """Traces a step of changed arguments."""

        def step(params, state, x):
            options = {"specs": splits.masters, "copies": params} | changes
            if way is not None:
                return way(params, state, x)
            return jax.grad(lambda m: in_pipeline(m, x, axis_name="data", **options))(state.masters)

        maps = {"in_specs": (P(), splits, P()), "out_specs": P(), "check_vma": False}
        jax.eval_shape(jax.shard_map(step, mesh=mesh, **maps), params, state, x)

    short = jax.tree.map(lambda w: w[..., :8], params)
    with pytest.raises(ValueError, match=r"copies: leaf \['in'\] is float32\[32, 8\].*\[32, 16\]"):
        tried(copies=short)
    with pytest.raises(ValueError, match=r"copies: leaf .* is int32\[32, 16\]"):
        tried(copies=jax.tree.map(jnp.int32, params))
    with pytest.raises(ValueError, match="copies are PyTreeDef.*the same structure"):
        tried(copies=[{}, *params[1:]])
    with pytest.raises(ValueError, match="5 functions and 2 copies"):
        tried(copies=params[:2])

    def differentiated(params, state, x):
        options = {"specs": dq.optax.state_specs(state).masters, "axis_name": "data"}
        return jax.grad(lambda own: in_pipeline(state.masters, x, copies=own, **options))(params)

    with pytest.raises(ValueError, match="copies are differentiated.*jax.grad of the argument"):
        tried(differentiated)

    def mixed(params, state, x):
        grads = [params[0], *state.masters[1:]]
        return optimizer.update(grads, state, params)[0]

    message = (
        r"gradients: leaf 1/kernel has shape \(16, 4\).*\(16, 16\)"
        r".*leaf 0/in has \(32, 16\).*\(32, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        tried(mixed)

    def in_shards(params, state, x):
        return optimizer.update(state.masters, state, state.masters)[0]

    with pytest.raises(ValueError, match=r"params: leaf 0/in has shape \(32, 4\).*whole"):
        tried(in_shards)
    with jax.set_mesh(jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])):
        with pytest.raises(ValueError, match=r"copies=\.\.\. are for maps"):
            dq.reduce_in_backward(params, "data", copies=params)


def test_without_specs_copies_have_the_gradients_of_an_all_reduce():
    """Mixed precision: f32 gradients of what the functions take in bf16."""
    params, batches = problem()
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def both(params, half, x):
        found = jax.grad(partial(in_pipeline, x=x, axis_name="data", method=EXACT, copies=half))(
            params
        )
        own = jax.grad(plain)(lax.pcast(half, "data", to="varying"), x)
        return found, dq.pmean(own, "data", method=EXACT)

    maps = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "mesh": auto_mesh(N)}
    found, expected = jax.jit(jax.shard_map(both, **maps))(params, half, batches[0])
    assert {g.dtype for g in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        other = np.float32(other)
        assert np.linalg.norm(own - other) < 0.05 * np.linalg.norm(other)


# --- Shards of parameters (FSDP) ------------------------------------------------------------------

SHARDS: list = [
    {"in": P("data")},
    *[{"kernel": P("data"), "bias": P()}] * LAYERS,
    {"out": P(None, "data")},
]
REMAT = [embed, *[jax.checkpoint(block)] * LAYERS, head]


def fully_sharded(loss, check_vma=True, specs=SHARDS, axes="data", mesh=None):
    """Jit of a map: the loss of a function of shards, and its gradients."""

    def run(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return lax.pmean(value, axes), lax.pmean(loss(params, x), axes), grads

    maps = {"in_specs": (specs, P(axes)), "out_specs": (P(), P(), specs), "check_vma": check_vma}
    return jax.jit(jax.shard_map(run, mesh=mesh or auto_mesh(N), **maps))


KEPT = [("remat", True), ("plain", False)]


@pytest.mark.parametrize(("kind", "check_vma"), daily(KEPT, KEPT[:1]))
def test_exact_shards_have_the_gradients_of_one_device(kind, check_vma):
    """Without a derivative, too."""
    functions = REMAT if kind == "remat" else FUNCTIONS
    params, batches = problem()
    exact = {"method": EXACT, "gather": EXACT, "specs": SHARDS}
    run = fully_sharded(
        lambda p, x: dq.sequential(functions, p, x, "data", **exact), check_vma=check_vma
    )
    value, alone, found = run(params, batches[0])
    expected, grads = jax.jit(jax.value_and_grad(plain))(params, batches[0])
    assert_close((value, alone, found), (expected, expected, grads))


@pytest.mark.parametrize("functions", daily([FUNCTIONS, REMAT], [REMAT]))
@pytest.mark.parametrize("bits", daily([False, True], [False]))
def test_payloads_that_stay_are_not_gathered_again(functions, bits):
    """The gradients keep their ``bits``."""
    params, batches = problem()

    def traced(reshard):
        options = {"method": EXACT, "gather": SOME, "specs": SHARDS}
        options["reshard_after_forward"] = reshard
        loss = lambda p, x: dq.sequential(functions, p, x, "data", **options)  # noqa: E731
        maps = {"in_specs": (SHARDS, P("data")), "out_specs": SHARDS, "check_vma": False}
        run = jax.shard_map(jax.grad(loss), mesh=auto_mesh(N), **maps)
        return jax.jit(run).trace(params, batches[0])

    kept, again = traced(reshard=False), traced(reshard=True)
    gathers, twice = (str(own.jaxpr).count(" all_gather[") for own in (kept, again))
    assert gathers == 2 * len(functions) and twice == 2 * gathers  # scales and payloads
    if bits:
        found, expected = (own.lower().compile()(params, batches[0]) for own in (kept, again))
        assert_same_bits(jax.device_get(found), jax.device_get(expected))


def test_functions_may_return_more_or_fewer_arrays_than_they_take():
    params = [{"in": np.eye(8, dtype=np.float32)}, {"out": np.ones((8, 4), np.float32)}]
    x = np.linspace(-1, 2, N * 8, dtype=np.float32).reshape(N, 8)

    def two(w, x):
        return jnp.tanh(x @ w["in"]), jnp.sin(x)

    def one(w, both):
        return jnp.mean((both[0] @ w["out"]) ** 2) + jnp.mean((both[1] @ w["out"]) ** 3)

    options = {"method": EXACT, "gather": EXACT, "specs": [{"in": P("data")}, {"out": P("data")}]}
    functions = [two, jax.checkpoint(one)], [jax.checkpoint(two), one]
    maps = {"in_specs": (options["specs"], P("data")), "out_specs": options["specs"]}

    @partial(jax.shard_map, mesh=auto_mesh(N), **maps)
    def means(params, x):
        losses = [
            partial(dq.sequential, own, x=x, axis_name="data", **options) for own in functions
        ]
        return jax.tree.map(lambda a, b: (a + b) / 2, *(jax.grad(f)(params) for f in losses))

    expected = jax.jit(jax.grad(lambda p: one(p[1], two(p[0], x))))(params)
    assert_close(jax.jit(means)(params, x), expected)


def test_shards_and_whole_parameters_take_turns():
    rng = np.random.default_rng(0)
    layer = lambda w, x: jnp.tanh(x @ w["kernel"])  # noqa: E731
    params = [{"kernel": np.float32(rng.standard_normal((8, 8)) / 4)} for _ in range(5)]
    specs = [{"kernel": own} for own in (P(), P("data"), P("data"), P(), P("data"))]
    options = {"method": EXACT, "gather": EXACT, "specs": specs}
    run = fully_sharded(
        lambda p, x: jnp.mean(dq.sequential([layer] * 5, p, x, "data", **options) ** 2), specs=specs
    )
    x = np.float32(rng.standard_normal((N, 8)))

    def alone(params, x):
        for own in params:
            x = layer(own, x)
        return jnp.mean(x**2)

    assert_close(run(params, x)[2], jax.jit(jax.grad(alone))(params, x))


@pytest.mark.parametrize("key", daily([None, 7], [7]))
def test_both_passes_gather_the_same_bits(key):
    """The gradient of a product with the parameters says what the backward pass has gathered."""
    params = [np.float32(x) for x in np.random.default_rng(0).standard_normal((3, 8, 64))]
    key = None if key is None else jax.random.key(key)
    square = jax.checkpoint(lambda w, x: x + jnp.sum(w**2) / 2)

    def run(shards):
        options = {"specs": [P("data")] * 3, "gather": SOME, "method": EXACT, "key": key}
        total = lambda w: dq.sequential([square] * 3, w, jnp.float32(0), "data", **options)  # noqa: E731
        seen = dq.sequential([lambda w, x: (*x, w)] * 3, shards, (), "data", **options)
        return jax.grad(total)(shards), [w[None] for w in seen]

    maps = {"in_specs": P("data"), "out_specs": (P("data"), P("data"))}
    mapped = jax.shard_map(run, mesh=auto_mesh(N), check_vma=False, **maps)
    grads, whole = jax.tree.map(np.asarray, jax.jit(mapped)(params))
    for grad, seen, own in zip(grads, whole, params, strict=True):
        assert_same_bits(seen, np.broadcast_to(grad, seen.shape))
        assert 1e-4 < np.linalg.norm(grad - own) / np.linalg.norm(own) < 0.2


@pytest.mark.parametrize("gather", [EXACT, SOME], ids=["exact", "dynamiq"])
def test_gathers_travel_beside_functions(gather):
    """When a layer is reached, in both passes, a gather has begun that it takes nothing of."""
    params, batches = problem()
    options = {"method": EXACT, "gather": gather, "specs": SHARDS}

    def grad(params, x):
        return jax.grad(lambda p: dq.sequential(REMAT, p, x, "data", **options))(params)

    maps = {"in_specs": (SHARDS, P("data")), "out_specs": SHARDS, "check_vma": False}
    mapped = jax.shard_map(grad, mesh=auto_mesh(N), **maps)
    traced = jax.make_jaxpr(mapped)(params, batches[0])
    (mapped,) = (e for e in traced.jaxpr.eqns if "shard_map" in e.primitive.name)
    made, begun, ahead = {}, set(), []
    for e in mapped.params["jaxpr"].eqns:
        comes = [set() if hasattr(v, "val") else made.get(v, set()) for v in e.invars]
        if e.primitive.name == "optimization_barrier":  # each result is its operand
            made |= zip(e.outvars, comes, strict=True)
            continue
        if e.primitive.name == "all_gather":
            comes.append({id(e)})
            begun.add(id(e))
        shapes = [v.aval.shape for v in e.invars]
        if e.primitive.name in ("dot_general", "remat", "remat2", "checkpoint"):
            if (DIM, DIM) in shapes:  # a layer's product, or all of its backward pass
                ahead.append(len(begun.difference(*comes)))
        made |= dict.fromkeys(e.outvars, set().union(*comes))
    assert len(ahead) == 2 * LAYERS and all(ahead)


@pytest.mark.parametrize("functions", [FUNCTIONS, REMAT], ids=["plain", "remat"])
def test_no_function_is_kept_whole(functions):
    """The backward pass gets shards in the place of parameters."""
    params, batches = problem()
    options = {"method": EXACT, "gather": EXACT, "specs": SHARDS}

    def kept(params, x):
        loss = lambda p: dq.sequential(functions, p, x, "data", **options)  # noqa: E731
        return jax.tree.leaves(jax.vjp(loss, params)[1])

    def run(params, x):
        shapes.extend(leaf.shape for leaf in kept(params, x))
        return ()

    shapes = []
    maps = {"in_specs": (SHARDS, P("data")), "out_specs": (), "check_vma": False}
    jax.eval_shape(jax.shard_map(run, mesh=auto_mesh(N), **maps), params, batches[0])
    assert shapes.count((DIM // N, DIM)) == LAYERS
    assert shapes.count((DIM, DIM)) == 1  # the head's shard
    assert not {(32, DIM), (DIM, 64)} & {*shapes}
