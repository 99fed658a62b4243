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
from cases import (
    CHEAP,
    assert_close,
    assert_copies_equal,
    assert_same_bits,
    auto_mesh,
    daily,
    promoting,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.axis import Axis, axis_names
from dynamiq_jax.training import interleaved
from dynamiq_jax.training.phases import cut

N, DIM, LAYERS = 4, 16, 8
EXACT = dq.Compression(dq.F32(), min_leaf_size=DIM * DIM, min_bucket_size=0)
SOME = dataclasses.replace(CHEAP, min_leaf_size=DIM * DIM)
FULL = [True, False]


def embed(w, x):
    return jnp.tanh(x.astype(w["in"].dtype) @ w["in"])


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def head(w, x):
    return jnp.mean((x @ w["out"]).astype(jnp.float32) ** 2)


FUNCTIONS = [embed, dq.Scanned(block), head]
"""Layers as many as two for each worker: their axis divides by the workers, too."""


def problem(dtype: Any = np.float32) -> Any:
    """Parameters of the functions, and a batch for each of three steps."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape) / 4  # noqa: E731
    params = [
        {"in": normal(32, DIM)},
        {"kernel": normal(LAYERS, DIM, DIM), "bias": np.full((LAYERS, DIM), 0.1)},
        {"out": normal(DIM, 64)},
    ]
    scale = np.linspace(0.4, 8.0, 2 * N)[None, :, None]  # the later workers' are larger
    batches = np.float32(normal(3, 2 * N, 32) * scale)
    return jax.tree.map(lambda x: x.astype(dtype), params), batches


def plain(params, x):
    for f, own in zip(FUNCTIONS, params, strict=True):
        x = f(own, x)
    return x


def unrolled(params, x, **options):
    """The loss by a pipeline whose layers are functions of their own."""

    def split(tree):
        if tree is None:
            return [None] * (LAYERS + 2)
        is_leaf = lambda s: isinstance(s, P)  # noqa: E731
        one = lambda w, i: P(*w[1:]) if isinstance(w, P) else w[i]  # noqa: E731
        layers = [jax.tree.map(lambda w, i=i: one(w, i), tree[1], is_leaf=is_leaf)
                  for i in range(LAYERS)]  # fmt: skip
        return [tree[0], *layers, tree[2]]

    own = {name: split(options.pop(name)) for name in ("specs", "copies")}
    return dq.sequential([embed, *[block] * LAYERS, head], split(params), x, **own, **options)


def in_loop(params, x, **options):
    return dq.sequential(FUNCTIONS, params, x, **options)


def at_once(params, x, **options):
    return plain(dq.reduce_in_backward(params, **options), x)


WAYS = {"in a loop": in_loop, "unrolled": unrolled, "at once": at_once}


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


CHECKED = [*zip(WAYS, (True, False, True), strict=True)]


@pytest.mark.parametrize(("way", "check_vma"), daily(CHECKED, CHECKED[:1]))
def test_with_exact_sums_a_step_is_that_of_sharded_alone(way, check_vma):
    params, batches = problem()
    optimizer = make(rule=SGD, max_norm=0.05 if way == "in a loop" else None)
    found = train(params, batches, optimizer, WAYS[way], check_vma=check_vma)
    expected = train(params, batches, optimizer, check_vma=check_vma)
    assert_close(found, expected)
    if way == "at once":  # the same program, but for the place of the reductions
        assert_same_bits(jax.device_get(found[0]), jax.device_get(expected[0]))
    for own, first in zip(*map(jax.tree.leaves, (found[0], params)), strict=True):
        assert np.max(np.abs(np.asarray(own) - first)) > 1e-4  # and the bound of closeness is 1e-5


def test_layers_are_split_along_another_axis_than_theirs():
    params, _ = problem()
    specs = dq.optax.state_specs(dq.optax.init(make(), params, auto_mesh(N))).masters
    assert specs == [
        {"in": P(None, "data")},
        {"kernel": P(None, "data", None), "bias": P(None, None)},
        {"out": P(None, "data")},
    ]


@pytest.mark.release
def test_compressed_copies_stay_equal_and_train():
    params, batches = problem()
    optimizer = make(SOME, rule=SGD)
    found, state = train(params, batches, optimizer, in_loop, SOME)
    expected, _ = train(params, batches, make(rule=SGD), in_loop)
    assert_copies_equal(found)
    for own, other, first in zip(*map(jax.tree.leaves, (found, expected, params)), strict=True):
        moved = np.linalg.norm(np.asarray(other) - first)
        assert 0 < np.linalg.norm(np.asarray(own) - np.asarray(other)) < 0.4 * moved
    assert state.masters[1]["kernel"].addressable_shards[1].data.shape == (LAYERS, DIM // N, DIM)


@pytest.mark.release
def test_data_by_model():
    """Products over a part of the parameters; the workers' axis splits that part."""
    axes, rng = ("data", "model"), np.random.default_rng(0)
    devices = {"devices": jax.devices()[:N], "axis_types": (AxisType.Auto,) * 2}
    mesh = jax.make_mesh((2, 2), axes, **devices)
    params = [
        {"up": np.float32(rng.standard_normal((3, 8, 16))), "scale": np.ones((3, 8), np.float32)},
        {},
    ]
    of_params = [{"up": P(None, None, "model"), "scale": P()}, {}]
    method = dq.Compression(dq.F32(), min_leaf_size=128, min_bucket_size=0)
    x = np.float32(rng.standard_normal((4, 8)))

    def layer(w, x):
        x = lax.all_gather(x @ w["up"] * 0.1, "model", axis=1, tiled=True)
        return x[:, :8] * w["scale"][None]

    functions = [dq.Scanned(layer), lambda _, x: jnp.sum(x**2)]
    optimizer = make(method, specs=of_params, rule=SGD)
    state = dq.optax.init(optimizer, params, mesh)
    splits = dq.optax.state_specs(state)
    assert splits.masters[0]["up"] == P(None, "data", "model")

    def step(params, state, x, scatters):
        def loss(own):
            options = {"specs": splits.masters, "copies": params} if scatters else {}
            if scatters:
                return dq.sequential(functions, own, x, "data", method=method, **options)
            return functions[1]({}, functions[0](own[0], x))

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


@pytest.mark.parametrize("way", ["in a loop", "unrolled"])
def test_a_function_takes_a_round_of_statistics_and_one_of_payloads(way, monkeypatch):
    """One less than an all-reduce; no gradient is gathered."""
    seen = []

    def watched(*args):
        seen.append(cut(*args))
        return seen[-1]

    monkeypatch.setattr(interleaved, "cut", watched)
    method = dataclasses.replace(SOME, topology=dq.Direct())
    params, batches = problem()
    state, step = stepper(make(method), params, WAYS[way], method)
    step.trace(params, state, batches[0])
    assert len(seen) == 3  # of the embedding, a layer, and the head
    for traced in seen:
        moves = [op for op in traced.operations if op.moves]
        names = [(op.round, op.equation.primitive.name.removesuffix("_invariant")) for op in moves]
        payloads = [own for own in names if own[0] == 1]
        assert traced.rounds == 2 and payloads == [(1, "all_to_all")]
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
            return jax.grad(lambda m: in_loop(m, x, axis_name="data", **options))(state.masters)

        maps = {"in_specs": (P(), splits, P()), "out_specs": P(), "check_vma": False}
        jax.eval_shape(jax.shard_map(step, mesh=mesh, **maps), params, state, x)

    short = jax.tree.map(lambda w: w[..., :8], params)
    with pytest.raises(ValueError, match=r"copies: leaf \['in'\] is float32\[32, 8\].*\[32, 16\]"):
        tried(copies=short)
    with pytest.raises(ValueError, match=r"copies: leaf .* is int32\[32, 16\]"):
        tried(copies=jax.tree.map(jnp.int32, params))
    with pytest.raises(ValueError, match="copies are PyTreeDef.*the same structure"):
        tried(copies=[{}, *params[1:]])
    with pytest.raises(ValueError, match="3 functions and 2 copies"):
        tried(copies=params[:2])
    layers = [{"in": P(None, "data")}, {"kernel": P("data"), "bias": P()}, {"out": P(None, "data")}]
    with pytest.raises(ValueError, match=r"functions\[1\].*specs split it.*exclude="):
        tried(specs=layers)

    def differentiated(params, state, x):
        options = {"specs": dq.optax.state_specs(state).masters, "axis_name": "data"}
        return jax.grad(lambda own: in_loop(state.masters, x, copies=own, **options))(params)

    with pytest.raises(ValueError, match="copies are differentiated.*jax.grad of the argument"):
        tried(differentiated)

    def mixed(params, state, x):
        grads = [params[0], *state.masters[1:]]
        return optimizer.update(grads, state, params)[0]

    message = (
        r"gradients: leaf 1/kernel has shape \(8, 4, 16\).*\(8, 16, 16\)"
        r".*leaf 0/in has \(32, 16\).*\(32, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        tried(mixed)

    def in_shards(params, state, x):
        return optimizer.update(state.masters, state, state.masters)[0]

    with pytest.raises(ValueError, match=r"params: leaf 0/in has shape \(32, 4\).*whole"):
        tried(in_shards)

    def accumulated(params, state, x):
        several = dq.optax.multi_steps(optimizer, 2, "data")
        return several.update(state.masters, several.init(params), params)[0]

    with pytest.raises(ValueError, match=r"multi_steps: .*\(32, 4\).*accumulate whole gradients"):
        tried(accumulated)
    with jax.set_mesh(jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])):
        with pytest.raises(ValueError, match=r"copies=\.\.\. are for maps"):
            dq.reduce_in_backward(params, "data", copies=params)


def test_without_specs_copies_have_the_gradients_of_an_all_reduce():
    """Mixed precision: f32 gradients of what the functions take in bf16."""
    params, batches = problem()
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def both(params, half, x):
        found = jax.grad(partial(in_loop, x=x, axis_name="data", method=EXACT, copies=half))(params)
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
    {"kernel": P(None, "data"), "bias": P()},
    {"out": P(None, "data")},
]
REMAT = [embed, dq.Scanned(jax.checkpoint(block)), head]


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
    np.testing.assert_allclose([value, alone], [expected] * 2, rtol=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (found, grads)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unrolled", daily([False, True], [False]))
def test_payloads_that_stay_are_not_gathered_again(unrolled):
    """The gradients keep their bits."""
    (params, batches), specs, functions = problem(), SHARDS, REMAT
    if unrolled:
        layers = [jax.tree.map(lambda w, i=i: w[i], params[1]) for i in range(LAYERS)]
        params, functions = [params[0], *layers, params[2]], [embed, *[block] * LAYERS, head]
        specs = [SHARDS[0], *[{"kernel": P("data"), "bias": P()}] * LAYERS, SHARDS[2]]

    def traced(reshard):
        options = {"method": EXACT, "gather": SOME, "specs": specs}
        options["reshard_after_forward"] = reshard
        loss = lambda p, x: dq.sequential(functions, p, x, "data", **options)  # noqa: E731
        maps = {"in_specs": (specs, P("data")), "out_specs": specs, "check_vma": False}
        run = jax.shard_map(jax.grad(loss), mesh=auto_mesh(N), **maps)
        return jax.jit(run).trace(params, batches[0])

    kept, again = traced(reshard=False), traced(reshard=True)
    found, expected = (own.lower().compile()(params, batches[0]) for own in (kept, again))
    assert_same_bits(jax.device_get(found), jax.device_get(expected))
    gathers, twice = (str(own.jaxpr).count(" all_gather[") for own in (kept, again))
    begun = LAYERS + 2 if unrolled else 4  # the embedding, the first layer, the loop's, the head
    assert gathers == 2 * begun and twice > gathers  # scales and payloads


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
    for own, other in zip(
        *map(jax.tree.leaves, (jax.jit(means)(params, x), expected)), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n_layers", daily([1, 2, 4], [4]))
@pytest.mark.parametrize("last", daily(["whole", "shards", "loop"], ["loop"]))
def test_loops_of_shards_and_of_whole_parameters_take_turns(n_layers, last):
    rng = np.random.default_rng(n_layers)
    layers = lambda n: {"kernel": np.float32(rng.standard_normal((n, 8, 8)) / 4)}  # noqa: E731
    layer = lambda w, x: jnp.tanh(x @ w["kernel"])  # noqa: E731
    split = {"kernel": P(None, "data")}
    ends = {
        "whole": ([dq.Scanned(layer)], [layers(4)], [{"kernel": P()}]),
        "shards": ([layer], [{"kernel": layers(1)["kernel"][0]}], [{"kernel": P("data")}]),
        "loop": ([dq.Scanned(layer)], [layers(5)], [split]),
    }
    functions, params, specs = (
        [*one, *two, *three]
        for one, two, three in zip(
            ([dq.Scanned(layer)], [layers(2)], [{"kernel": P()}]),
            ([dq.Scanned(layer)], [layers(n_layers)], [split]),
            ends[last],
            strict=True,
        )
    )
    options = {"method": EXACT, "gather": EXACT, "specs": specs}
    run = fully_sharded(
        lambda p, x: jnp.mean(dq.sequential(functions, p, x, "data", **options) ** 2), specs=specs
    )
    x = np.float32(rng.standard_normal((N, 8)))

    def alone(params, x):
        for f, own in zip(functions, params, strict=True):
            x = f(own, x)
        return jnp.mean(x**2)

    expected = jax.jit(jax.grad(alone))(params, x)
    for own, other in zip(*map(jax.tree.leaves, (run(params, x)[2], expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("key", daily([None, 7], [7]))
def test_both_passes_gather_the_same_bits(key):
    """The gradient of a product with the parameters says what the backward pass has gathered."""
    params = np.float32(np.random.default_rng(0).standard_normal((3, 8, 64)))
    key = None if key is None else jax.random.key(key)
    square = dq.Scanned(jax.checkpoint(lambda w, x: x + jnp.sum(w**2) / 2))
    seen = dq.Scanned(lambda w, x: (x[0].at[x[1]].set(w), x[1] + 1))

    def run(shards):
        options = {"specs": [P(None, "data")], "gather": SOME, "method": EXACT, "key": key}
        total = lambda w: dq.sequential([square], [w], jnp.float32(0), "data", **options)  # noqa: E731
        start = jnp.zeros((3, 8, 64)), jnp.int32(0)
        whole, _ = dq.sequential([seen], [shards], start, "data", **options)
        return jax.grad(total)(shards), whole[None]

    maps = {"in_specs": P(None, "data"), "out_specs": (P(None, "data"), P("data"))}
    mapped = jax.shard_map(run, mesh=auto_mesh(N), check_vma=False, **maps)
    grads, whole = map(np.asarray, jax.jit(mapped)(params))
    for own in whole:
        assert_same_bits(own, whole[0])
    assert_same_bits(grads, whole[0])
    assert 1e-4 < np.linalg.norm(whole[0] - params) / np.linalg.norm(params) < 0.2


PRODUCTS = ("dot_general", "remat", "remat2", "checkpoint")


def loops_of(run, params, x):
    """The forward loop of a derivative, and the backward one."""
    traced = jax.make_jaxpr(run)(params, x)
    (mapped,) = (e for e in traced.jaxpr.eqns if "shard_map" in e.primitive.name)
    jaxpr = mapped.params["jaxpr"]
    loops = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    bodies = [{e.primitive.name for e in loop.params["jaxpr"].jaxpr.eqns} for loop in loops]
    return [loop for loop, names in zip(loops, bodies, strict=True) if names & {*PRODUCTS}]


@pytest.mark.parametrize("gather", [EXACT, SOME], ids=["exact", "dynamiq"])
def test_gathers_travel_beside_functions_and_no_layer_is_kept_whole(gather):
    """In the loops' bodies a gather begins first, and a layer's products take none of it."""
    params, batches = problem()
    options = {"method": EXACT, "gather": gather, "specs": SHARDS}

    def grad(params, x):
        return jax.grad(lambda p: dq.sequential(REMAT, p, x, "data", **options))(params)

    maps = {"in_specs": (SHARDS, P("data")), "out_specs": SHARDS, "check_vma": False}
    mapped = jax.shard_map(grad, mesh=auto_mesh(N), **maps)
    forward, backward = loops_of(mapped, params, batches[0])
    shapes = [v.aval.shape for v in forward.outvars]
    assert shapes.count((DIM, DIM)) == 1 and (LAYERS - 1, DIM, DIM) not in shapes
    assert (LAYERS - 1, 2, DIM) in shapes  # what `jax.checkpoint` keeps
    for loop in (forward, backward):
        body = loop.params["jaxpr"].jaxpr
        names = [e.primitive.name for e in body.eqns]
        products = [i for i, name in enumerate(names) if name in PRODUCTS]
        gathers = [i for i, name in enumerate(names) if name == "all_gather"]
        assert len(products) == 1 and gathers and max(gathers) < products[0]
        made = set()
        for number, e in enumerate(body.eqns):
            comes = [not hasattr(v, "val") and v in made for v in e.invars]
            if e.primitive.name == "optimization_barrier":  # each result is its operand
                made.update(v for v, own in zip(e.outvars, comes, strict=True) if own)
            elif e.primitive.name == "all_gather" or any(comes):
                made.update(e.outvars)
            assert number not in products or not any(comes)
        assert made & {*body.outvars}
