"""Shards in the pipeline: gradients scatter beside the backward pass (ZeRO-1), and FSDP.

`test_ways` trains by both.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_sequential
from asserts import assert_close, assert_same_bits
from cases import CHEAP, EXACT, daily
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, local, mesh_of

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.jaxprs.phases import cut
from dynamiq_jax.training import interleaved

N, DIM, LAYERS = 4, 16, 3
F32 = dataclasses.replace(EXACT, min_leaf_size=DIM * DIM)
SOME = dataclasses.replace(CHEAP, min_leaf_size=DIM * DIM)


def embed(w, x):
    return jnp.tanh(x.astype(w["in"].dtype) @ w["in"])


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def head(w, x):
    return jnp.mean((x @ w["out"]).astype(jnp.float32) ** 2)


FUNCTIONS = [embed, *[block] * LAYERS, head]


def problem() -> Any:
    """Parameters of the functions, and the examples of all workers."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape) / 4
    params = [
        {"in": normal(32, DIM)},
        *({"kernel": normal(DIM, DIM), "bias": np.full(DIM, 0.1)} for _ in range(LAYERS)),
        {"out": normal(DIM, 64)},
    ]
    scale = np.linspace(0.4, 8.0, 2 * N)[:, None]  # the later workers' are larger
    return jax.tree.map(np.float32, params), np.float32(normal(2 * N, 32) * scale)


def plain(params, x, functions=FUNCTIONS):
    return test_sequential.plain(functions, params, x)


def in_pipeline(params, x, **options):
    return dq.overlapped(FUNCTIONS, params, x, **options)


def test_gradients_travel_once_in_few_bits_after_a_round_of_statistics(monkeypatch):
    """One round less than an all-reduce; no gradient is gathered."""
    seen = []
    monkeypatch.setattr(
        interleaved, "cut", lambda *args, **small: seen.append(cut(*args, **small)) or seen[-1]
    )
    size, method = 512, dataclasses.replace(CHEAP, topology=dq.Direct())
    options = {"axis_name": "data", "specs": [P("data")], "compression": method}

    def grad(shard, copy, x):
        run = lambda own: dq.overlapped([lambda w, x: x @ w], [own], x, copies=[copy], **options)
        return jax.grad(lambda own: run(own).sum())(shard)

    shapes = (size // N, size), (size, size), (2, size)
    given = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    text = str(jax.make_jaxpr(grad, axis_env=[("data", N)])(*given))
    assert "all_gather" not in text
    ((n, words),) = re.findall(r"u32\[(\d+),(\d+)\] = all_to_all", text)
    assert 4.4 < 32 * int(n) * int(words) / size**2 < 4.6
    names = [{op.equation.primitive.name for op in ops} for ops in seen[0].rounds]
    assert names == [{"psum"}, {"all_to_all"}]


def test_functions_without_copies_have_the_gathers_of_fsdp():
    """Also beside functions with copies: their parameters would otherwise be of 2.5 bits."""
    w = jax.random.normal(jax.random.key(0), (256, 64))
    method = dataclasses.replace(SOME, method=dq.DynamiQ())

    def first(shards, copies):
        told = {"specs": [P("data")] * 2, "copies": copies, "compression": method}
        functions = [lambda own, _: own, lambda _, x: x]
        return dq.overlapped(functions, [shards, shards], jnp.float32(0), "data", **told)

    maps = {"in_specs": (P("data"), P()), "out_specs": P(), "check_vma": False}
    run = jax.jit(jax.shard_map(lambda own, w: first(own, [None, w]), mesh=auto_mesh(2), **maps))
    assert jnp.linalg.norm(run(w, w) - w) < 0.05 * jnp.linalg.norm(w)


def test_what_cannot_be_is_refused():
    params, examples = problem()
    optimizer = dq.optax.sharded(optax.adamw(1e-2), "data", compression=F32)
    mesh, x = auto_mesh(N), examples[:2]
    state = dq.optax.init(optimizer, params, mesh)
    splits = dq.optax.state_specs(state)
    options = {"x": x, "axis_name": "data", "specs": splits.masters}

    def copied(copies):
        return lambda _, state: jax.grad(partial(in_pipeline, copies=copies, **options))(
            state.masters
        )

    def differentiated(params, state):
        return jax.grad(lambda own: in_pipeline(state.masters, copies=own, **options))(params)

    def mixed(params, state):
        return optimizer.update([params[0], *state.masters[1:]], state, params)[0]

    def in_shards(params, state):
        return optimizer.update(state.masters, state, state.masters)[0]

    short = jax.tree.map(lambda w: w[..., :8], params)
    both = r"leaf 1/kernel has shape \(16, 4\).*\(16, 16\).*leaf 0/in has \(32, 16\).*\(32, 4\)"
    for words, function in (
        (r"copies: leaf \['in'\] is float32\[32, 8\].*\[32, 16\]", copied(short)),
        (r"copies: leaf .* is int32\[32, 16\]", copied(jax.tree.map(jnp.int32, params))),
        ("copies are PyTreeDef.*the same structure", copied([{}, *params[1:]])),
        ("5 functions and 2 copies", copied(params[:2])),
        ("copies are differentiated.*jax.grad of the argument", differentiated),
        (f"gradients: {both}", mixed),
        (r"params: leaf 0/in has shape \(32, 4\).*whole", in_shards),
    ):
        maps = {"in_specs": (P(), splits), "out_specs": P(), "check_vma": False}
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(jax.shard_map(function, mesh=mesh, **maps), params, state)
    with jax.set_mesh(mesh_of(N, kind=AxisType.Explicit)):
        with pytest.raises(ValueError, match=r"copies=\.\.\. are for maps"):
            dq.fsdp(params, "data", copies=params)


def test_without_specs_copies_have_the_gradients_of_an_all_reduce():
    """Mixed precision: f32 gradients of what the functions take in bf16."""
    params, examples = problem()
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def both(params, half, x):
        loss = partial(in_pipeline, x=x, axis_name="data", compression=F32, copies=half)
        own = jax.grad(plain)(local(half, True), x)
        return jax.grad(loss)(params), dq.pmean(own, "data", compression=F32)

    maps = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "mesh": auto_mesh(N)}
    found, expected = jax.jit(jax.shard_map(both, **maps))(params, half, examples)
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


def of_shards(functions, specs=SHARDS, gather=None, **options):
    """The loss of shards of the functions' parameters."""
    options["compression"] = dq.Policy(gradients=F32, parameters=gather)
    return lambda p, x: dq.overlapped(functions, p, x, "data", specs=specs, **options)


def over_workers(run, out_specs, specs=SHARDS, check_vma=False):
    """A map of ``run`` of shards and every worker's examples."""
    maps = {"in_specs": (specs, P("data")), "out_specs": out_specs, "check_vma": check_vma}
    return jax.shard_map(run, mesh=auto_mesh(N), **maps)


def two(w, x):
    return jnp.tanh(x @ w["in"]), jnp.sin(x[:, :DIM])


def one(w, both):
    return block(w, both[0] * both[1])


TURNS = [
    {name: own if i in (1, 2, 4) else P() for name, own in w.items()} for i, w in enumerate(SHARDS)
]


EACH = {
    "remat": (REMAT, SHARDS),
    "unchecked": (FUNCTIONS, SHARDS),
    "more arrays": ([jax.checkpoint(two), one, *FUNCTIONS[2:]], SHARDS),
    "fewer arrays": ([two, jax.checkpoint(one), *REMAT[2:]], SHARDS),
    "shards and whole parameters take turns": (FUNCTIONS, TURNS),
}
"""Functions, of which some return more or fewer arrays than they take, and specs."""


@pytest.mark.parametrize("name", daily(EACH, [name for name in EACH if name != "unchecked"]))
def test_exact_shards_have_the_gradients_of_one_device(name):
    """Without a derivative, too."""
    functions, specs = EACH[name]
    params, examples = problem()
    loss = of_shards(functions, specs)

    def run(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return lax.pmean(value, "data"), lax.pmean(loss(params, x), "data"), grads

    mapped = over_workers(run, (P(), P(), specs), specs, check_vma=name != "unchecked")
    whole = jax.jit(jax.value_and_grad(partial(plain, functions=functions)))
    expected, grads = whole(params, examples)
    assert_close(jax.jit(mapped)(params, examples), (expected, expected, grads))


@pytest.mark.parametrize("functions", daily([FUNCTIONS, REMAT], [REMAT]))
@pytest.mark.usefixtures("padding_is_free")
def test_payloads_that_stay_are_not_gathered_again(functions):
    params, examples = problem()

    def traced(reshard):
        loss = of_shards(functions, gather=SOME, reshard_after_forward=reshard)
        return jax.jit(over_workers(jax.grad(loss), SHARDS)).trace(params, examples)

    kept, again = traced(reshard=False), traced(reshard=True)
    gathers, twice = (str(own.jaxpr).count(" all_gather[") for own in (kept, again))
    assert gathers == 2 * len(functions) and twice == 2 * gathers  # scales and payloads


@pytest.mark.parametrize(
    ("key", "reshard"), daily([(None, True), (7, True), (7, False)], [(7, True), (7, False)])
)
@pytest.mark.usefixtures("padding_is_free")
def test_both_passes_gather_the_same_bits(key, reshard):
    """The gradient of a product with the parameters says what the backward pass has gathered."""
    params = [np.float32(x) for x in np.random.default_rng(0).standard_normal((3, 8, 64))]
    key = None if key is None else jax.random.key(key)
    square = jax.checkpoint(lambda w, x: x + jnp.sum(w**2) / 2)
    options = {"specs": [P("data")] * 3, "gather": SOME, "key": key}

    def run(shards):
        total = of_shards([square] * 3, reshard_after_forward=reshard, **options)
        seen = of_shards([lambda w, x: (*x, w)] * 3, **options)(shards, ())
        return jax.grad(total)(shards, jnp.float32(0)), [w[None] for w in seen]

    maps = {"in_specs": P("data"), "out_specs": (P("data"), P("data"))}
    mapped = jax.shard_map(run, mesh=auto_mesh(N), check_vma=False, **maps)
    grads, whole = jax.tree.map(np.asarray, jax.jit(mapped)(params))
    for grad, seen, own in zip(grads, whole, params, strict=True):
        assert_same_bits(seen, np.broadcast_to(grad, seen.shape))
        assert 1e-4 < np.linalg.norm(grad - own) / np.linalg.norm(own) < 0.2


def gathers_ahead(traced):
    """Returns what each layer finds, in the order of a map's program, and how many gathers it has.

    How many gathers have begun that the layer takes nothing of, and of how many it takes something.
    """
    (mapped,) = (e for e in traced.jaxpr.eqns if "shard_map" in e.primitive.name)
    made, begun, ahead, waits = {}, set(), [], []
    for e in mapped.params["jaxpr"].eqns:
        comes = [set() if hasattr(v, "val") else made.get(v, set()) for v in e.invars]
        if e.primitive.name == "optimization_barrier":  # each result is its operand
            made |= zip(e.outvars, comes, strict=True)
            continue
        if "all_gather" in e.primitive.name:
            comes.append({id(e)})
            begun.add(id(e))
        shapes = [v.aval.shape for v in e.invars]
        if e.primitive.name in ("dot_general", "remat", "remat2", "checkpoint"):
            if (DIM, DIM) in shapes:  # a layer's product, or all of its backward pass
                ahead.append(len(begun.difference(*comes)))
                waits.append(len(set().union(*comes)))
        made |= dict.fromkeys(e.outvars, set().union(*comes))
    return ahead, waits, len(begun)


@pytest.mark.parametrize("gather", [F32, SOME], ids=["exact", "dynamiq"])
@pytest.mark.usefixtures("padding_is_free")
def test_gathers_travel_beside_functions(gather):
    """When a layer is reached, in both passes, a gather has begun that it takes nothing of."""
    params, examples = problem()
    mapped = over_workers(jax.grad(of_shards(REMAT, gather=gather)), SHARDS)
    ahead, _, _ = gathers_ahead(jax.make_jaxpr(mapped)(params, examples))
    assert len(ahead) == 2 * LAYERS and all(ahead)


@pytest.mark.parametrize("functions", [FUNCTIONS, REMAT], ids=["plain", "remat"])
def test_no_function_is_kept_whole(functions):
    """The backward pass gets shards in the place of parameters."""
    params, examples = problem()
    shapes = []

    def run(params, x):
        kept = jax.vjp(partial(of_shards(functions), x=x), params)[1]
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(kept))
        return ()

    jax.eval_shape(over_workers(run, ()), params, examples)
    assert shapes.count((DIM // N, DIM)) == LAYERS
    assert shapes.count((DIM, DIM)) == 1  # the head's shard
    assert not {(32, DIM), (DIM, 64)} & {*shapes}
