"""Plans are the program: their bytes are those of the compiled program's collectives."""

import collections
import dataclasses
import re
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_ways
import ways
from cases import CHEAP, EXACT, daily, over
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of

import dynamiq_jax as dq
import dynamiq_jax.plan.plan as plan_module

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

LARGEST_OTHER = 4096
"""Bytes of a collective without a plan: norms, losses, flags."""


def check(found, most_other=LARGEST_OTHER, native=()):
    """The program sends what the plans say, and nothing large travels without one.

    ``native`` are kinds of collectives that JAX makes.
    """
    assert found.plans and found.counted
    assert found.agrees, (found.sent_bytes, found.program_bytes)
    large = [x for x in found.others if x.sent_bytes > most_other]
    assert {x.name for x in large} == {*native}, large


DAILY = ["explicit:5", "zero-pipeline:5/2.5", "fsdp-layers:5/8"]


@pytest.mark.parametrize("text", daily(test_ways.COMPRESSED, DAILY))
def test_the_plans_of_a_way_are_its_program(text):
    t = test_ways.Cheap(**vars(test_ways.training(auto_mesh(test_ways.N))))
    way = ways.make_way(text, t)
    split = jax.NamedSharding(way.mesh, P(way.mesh.axis_names))
    tokens = test_ways.batches(t.mesh.size)[0]
    batch = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=split)
    with jax.set_mesh(way.mesh):
        found = dq.explain(jax.jit(way.step), way.like, batch, verbose=False)
    check(found, native=["all-gather"] if text.startswith("fsdp-auto") else [])


def mapped(function, *shapes):
    """A step of 4 workers, and its arguments: arrays of these shapes, split over the workers."""
    mesh = auto_mesh(4)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
        for shape in shapes
    ]
    step = jax.shard_map(
        function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return step, *args


COLLECTIVES = {
    "psum": lambda x, **how: dq.psum(x, "data", **how),
    "psum_scatter": lambda x, **how: dq.psum_scatter(x, "data", tiled=True, **how),
    "all_gather": lambda x, **how: dq.all_gather(x, "data", tiled=True, **how),
    "all_to_all": lambda x, **how: dq.all_to_all(x, "data", 0, 0, tiled=True, **how),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("keyed", [False, True])
def test_the_plan_of_a_collective_is_its_program(name, keyed):
    how = {"compression": CHEAP} | ({"key": jax.random.key(0)} if keyed else {})
    found = dq.explain(*mapped(lambda x: COLLECTIVES[name](x, **how), (4 * 8192,)), verbose=False)
    check(found, most_other=0)
    (run,) = found.plans
    assert run.times == 1 and len(run.plan.buckets) == 1 and found.native_bytes == 0


def test_a_plan_in_a_scan_runs_as_often_as_the_scan():
    def layers(x):
        total = lambda x, _: (dq.pmean(x, "data", compression=CHEAP), None)
        return jax.lax.scan(total, x, None, length=3)[0]

    found = dq.explain(*mapped(layers, (4 * 8192,)), verbose=False)
    check(found, most_other=0)
    assert [run.times for run in found.plans] == [3]


def test_what_xla_drops_is_told_as_sent_by_no_plan():
    """Nobody reads a sum, and a gather repeats another one, of payloads or natively."""

    def repeats(x):
        dq.psum(2 * x, "data", compression=CHEAP)
        natively = [dq.all_gather(x, "data", compression=dq.BF16()) for _ in range(2)]
        return sum(natively)[0] + dq.all_gather(x, "data", compression=CHEAP)[0]

    found = dq.explain(*mapped(repeats, (4 * 8192,)), verbose=False)
    check(found, most_other=0)
    assert [(run.plan.kind, run.times) for run in found.plans] == [("all-gather", 1)] * 2


HOPS = over(dq.Direct(), EXACT)
"""Values that travel as payloads do, without an encoding to compile."""


def test_the_derivative_of_a_collective_is_native_and_in_no_plan():
    def back(x):
        both = [partial(COLLECTIVES[name], compression=HOPS) for name in ("psum", "psum_scatter")]
        # XLA would drop what the two exchanges have in common.
        found, pullback = jax.vjp(lambda x: [f(i * x) for i, f in enumerate(both, 1)], x)
        return pullback(found)[0]

    found = dq.explain(*mapped(back, (4 * 8192,)), verbose=False)
    check(found, native=["all-reduce", "all-gather"])
    assert sorted((x.plan.kind, x.times) for x in found.plans) == [
        ("all-reduce", 1), ("reduce-scatter", 1)
    ]  # fmt: skip


def test_workers_of_vmap_send_nothing():
    one = lambda x: dq.psum(x, "data", compression=CHEAP)
    found = dq.explain(jax.vmap(one, axis_name="data"), jnp.ones((2, 8192)), verbose=False)
    assert found.agrees and found.plans == () and found.sent_bytes == 0


def test_bools_are_summed_as_the_numbers_that_jax_makes_of_them():
    step, x = mapped(lambda x: dq.psum(x > 0, "data"), (4 * 8192,))
    found = dq.explain(step, x, verbose=False)
    check(found, most_other=0)
    tree = jax.ShapeDtypeStruct((8192,), jnp.bool_)
    assert dq.explain(tree, 4, verbose=False).wire_bytes == found.program_bytes


def test_a_program_that_sends_more_or_less_than_its_plans_is_told(monkeypatch):
    """The user's own psum is a row; a plan that is too cheap or too dear is named."""

    def both(x):
        return dq.psum(x, "data", compression=CHEAP) + jax.lax.psum(2 * x, "data")

    found = dq.explain(*mapped(both, (4 * 8192,)), verbose=False)
    assert found.agrees and len(found.plans) == 1
    (own,) = found.others  # XLA may join it with the statistics
    assert own.name == "all-reduce"
    assert own.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * 8192, rel=0.02)
    assert found.sent_bytes == found.plans[0].sent_bytes + own.sent_bytes
    assert "all-reduce" in str(found) and "no plan: " in str(found)
    alone = mapped(lambda x: dq.psum(x, "data", compression=CHEAP), (4 * 8192,))
    honest = plan_module.Plan.sent_bytes.fget
    monkeypatch.setattr(plan_module.Plan, "sent_bytes", property(lambda x: 1.1 * honest(x)))
    found = dq.explain(*alone, verbose=False)
    assert not found.agrees and "is not what its plans say" in str(found)
    monkeypatch.setattr(plan_module.Plan, "sent_bytes", property(lambda x: 0.8 * honest(x)))
    assert not dq.explain(*alone, verbose=False).agrees


def test_leaves_that_are_split_along_different_dimensions_share_buckets():
    """Alone, each kind would be too small to be compressed by default."""
    shapes = [(128, 4, 32)] * 6 + [(4, 32, 128)] * 2 + [(512, 128)] + [(128, 512)]
    mesh = mesh_of(8, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        replicated, split = (jax.NamedSharding(mesh, spec) for spec in (P(), P("data")))
        params = [jnp.ones(shape, device=replicated) for shape in shapes]
        batch = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=split)
        optimizer = dq.optax.sharded(optax.sgd(0.1), "data")
        state = dq.optax.init(optimizer, params, mesh)
        grads_of = dq.value_and_grad(loss, axis_name="data", unreduced=True)

        def step(params, state, batch):
            _, grads = grads_of(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        found = dq.explain(step, params, state, batch, verbose=False)
    check(found)
    kinds = {run.plan.kind: len(run.plan.buckets) for run in found.plans}
    assert kinds == {"reduce-scatter": 1, "all-gather": 1}
    assert not any(run.native_bytes for run in found.plans)


def loss(params, batch):
    return sum(jnp.mean((batch @ w.reshape(128, -1)) ** 2) for w in params)


def test_what_explain_is_given_is_a_step_or_a_tree():
    with pytest.raises(ValueError, match="got a step, and compression, which a step has inside"):
        dq.explain(lambda x: x, jnp.ones(3), compression=CHEAP)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a tree and n_workers, and got 0 arguments"):
        dq.explain({"w": jnp.ones(3)})  # type: ignore[call-overload]
    assert dq.explain(tree=jnp.ones(8), n_workers=4, verbose=False).n_workers == 4


COTANGENTS = {
    "default": (None, [8.34, 8.34]),
    "other bits": (dq.DynamiQ(bits=4.5), [8.34, 4.34]),
    "plain": (dq.BF16(), [8.34, 16]),
    "exact": (dq.F32(), [8.34, 32]),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_cotangents_of_an_exchange_have_a_plan(name):
    """One leaf is excluded: its own cotangents are JAX's, which no plan of ours has."""
    cotangents, bits = COTANGENTS[name]
    limits = {"min_leaf_size": 1, "min_bucket_size": 1, "min_bucket_bytes": 0}
    activations = dq.Compression(exclude="b", **limits)
    policy = dq.Policy(activations=activations, cotangents=cotangents)

    def gradient(x):
        def loss(x):
            found = COLLECTIVES["all_to_all"]({"a": x, "b": x[:8]}, compression=policy)
            return jnp.sum(found["a"] ** 2) + jnp.sum(found["b"] ** 3)

        return jax.grad(loss)(x)

    found = dq.explain(*mapped(gradient, (4 * 8192,)), verbose=False)
    check(found, most_other=100)
    forward, backward = found.plans
    assert (forward.plan.backward, backward.plan.backward) == (False, True)
    assert [run.times for run in found.plans] == [1, 1]
    moves = [move for run in found.plans for move in run.plan.moves if move.bucket is not None]
    sent = [move.sent_bits / (3 / 4 * 8192) for move in moves]
    assert sent == pytest.approx(bits, rel=0.01)
    assert "all-to-all of cotangents" in str(found)
    (own,) = found.others
    assert own.sent_bytes == 3 / 4 * 8 * 4  # of the excluded leaf


EXPLICIT_LIMITS = {"min_leaf_size": 100, "min_bucket_size": 1, "min_bucket_bytes": 0}


def on_explicit(loss, shapes, **limits):
    """The gradients of a loss on Explicit axes, of 4 workers, and its arguments."""
    mesh = mesh_of(4, kind=AxisType.Explicit)
    replicated, split = (jax.NamedSharding(mesh, spec) for spec in (P(), P("data")))
    params = {k: jax.ShapeDtypeStruct(v, "f", sharding=replicated) for k, v in shapes.items()}
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=split)
    method = dq.Compression(CHEAP.method, **limits)
    return mesh, dq.value_and_grad(loss, axis_name="data", compression=method), params, x


def scaled(params, x):
    return jnp.mean((x * params["scale"][None] @ params["w"]) ** 2) * jnp.sum(params["norm"])


def test_what_jax_sums_on_explicit_axes_is_told_with_its_reason():
    shapes = {"w": (256, 64), "scale": (256,), "norm": (300,), "bias": (7,)}
    mesh, *step = on_explicit(scaled, shapes, exclude="norm", **EXPLICIT_LIMITS)
    with jax.set_mesh(mesh):
        found = dq.explain(*step, verbose=False)
    check(found)
    by_jax, ours = sorted(found.plans, key=lambda run: not run.plan.by_jax)
    why = {own.leaf.path: own.reason for own in by_jax.plan.exact}
    by_use = "JAX sums it where the loss uses it"
    assert why == {"bias": "size 7 < min_leaf_size 100", "norm": "excluded", "scale": by_use}
    assert by_jax.sent_bytes == by_jax.native_bytes == 0  # those of XLA's collectives
    assert [leaf.path for bucket in ours.plan.buckets for leaf in bucket.leaves] == ["w"]
    assert f"  ['scale'] 256 float32: {by_use}" in str(found)
    assert "float32, by JAX: see below" in str(found)


# --- A large share that travels natively ----------------------------------------------------------

NOT_ENOUGH = (384, 256)
"""More coordinates than `plan.LARGE`, and fewer than a bucket of 4 workers needs by default."""
PER_WORKER = (4 * NOT_ENOUGH[0], NOT_ENOUGH[1])


def sharded_update(x):
    optimizer = dq.optax.sharded(optax.sgd(0.1), "data")
    return optimizer.update(x, optimizer.init(jnp.ones_like(x)), jnp.ones_like(x))[0]


def fsdp_gradient(x):
    return jax.grad(lambda own: jnp.sum(dq.fsdp(own, "data", specs=P("data")) ** 2))(x)


def linear(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def on_auto():
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (NOT_ENOUGH[::-1], (64, 256)))
    return dq.value_and_grad(linear, axis_name="data", mesh=auto_mesh(4)), {"w": w}, x


KINDS = {
    **{name: (name, 1) for name in COLLECTIVES},
    "sharded updates": (sharded_update, 2),  # gradients, and differences of parameters
    "FSDP": (fsdp_gradient, 2),
    "Auto": (None, 1),
    "Explicit": (None, 1),
}
"""A call, and how many of its collectives have nothing compressed."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_share_that_travels_natively_is_warned_of_in_every_way(kind):
    call, count = KINDS[kind]
    mesh = None
    if kind == "Auto":
        step, *args = on_auto()
    elif kind == "Explicit":
        mesh, step, *args = on_explicit(linear, {"w": NOT_ENOUGH[::-1]})
    elif kind in COLLECTIVES:
        shape = NOT_ENOUGH if kind == "all_gather" else PER_WORKER  # its shards are a fourth
        step, *args = mapped(lambda x: COLLECTIVES[call](x, compression=dq.DynamiQ()), shape)
    else:
        shape = NOT_ENOUGH if kind == "FSDP" else PER_WORKER
        step, *args = mapped(call, shape)
    with warnings.catch_warnings(record=True) as seen, jax.set_mesh(mesh or auto_mesh(4)):
        warnings.simplefilter("always")
        jax.jit(step).trace(*args)
    said = [str(one.message) for one in seen]
    assert len(said) == count, said
    words = r"leaf .* \([\d,]+ bytes\) are .*, since there is a bucket of \d+ coordinates < min_buc"
    assert all(re.search(words, one) and "min_bucket_bytes=0) to compress" in one for one in said)
    assert all(Path(one.filename) == Path(__file__) for one in seen)


def test_gradients_that_jax_sums_where_they_are_used_are_warned_of():
    shapes = {"w": (256, 64), "scale": (256, 300), "norm": (3,)}

    def loss(params, x):
        return scaled(params | {"scale": jnp.sum(params["scale"], 1)}, x)

    mesh, step, *args = on_explicit(loss, shapes, **EXPLICIT_LIMITS)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="where the loss uses it.*exclude="):
        jax.jit(step).trace(*args)


# --- A model that is not there: what `explain` prints of a tree -----------------------------------

LAYERS = 3
"""The layers of FSDP, each like the tree: XLA on CPUs drops a gather that repeats another one."""


def random_model(seed):
    """A tree with small, large and odd leaves; workers on one axis or two; a policy."""
    rng = np.random.default_rng(seed)
    sizes = [(2,), (3,), (4,), (8,), (2, 2), (2, 4)][seed % 6]
    lengths = lambda: tuple(map(int, rng.choice([3, 5, 8, 24, 48, 120], rng.integers(1, 4))))
    shapes = [*(lengths() for _ in range(4)), (48, 64), (7, 7, 7, 7), (1203,)]
    tree = {f"{'ab'[i % 2]}{i}": np.ones(shape, "f") for i, shape in enumerate(shapes)}
    pick = lambda *values: values[int(rng.integers(len(values)))]
    gradients = dq.Compression(
        pick(dq.DynamiQ(), dq.contrib.MinMax(), dq.F32(), CHEAP.method),
        exclude=pick(None, "a0|b1"),
        min_leaf_size=500,
        min_bucket_size=pick(1, 3000),
        min_bucket_bytes=0,
    )
    gathers = pick(None, dq.BF16(), dq.contrib.MinMax(), dq.DynamiQ(bits=4))
    return tree, sizes, dq.Policy(gradients=gradients, parameters=gathers)


def steps_of_ways(tree, sizes, policy):
    """A step of each way that `explain` of the tree tells of, its arguments, and its calls."""
    names, n = ("node", "gpu")[-len(sizes) :], int(np.prod(sizes))
    mesh = mesh_of(*sizes, names=names)
    maps = {"mesh": mesh, "check_vma": False}

    def like(tree, specs):
        placed = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
        )
        return jax.tree.map(placed, tree, specs)

    whole = jax.tree.map(lambda _: P(), tree)
    sums = lambda tree: dq.psum(tree, names, compression=policy)
    yield jax.shard_map(sums, in_specs=P(), out_specs=P(), **maps), [like(tree, whole)], 1

    optimizer = dq.optax.sharded(optax.sgd(0.1), names, compression=policy)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(optimizer.init, tree)
    specs = dq.optax.state_specs(state)
    in_specs, out_specs = (P(), specs, P()), (P(), specs)
    update = jax.shard_map(optimizer.update, in_specs=in_specs, out_specs=out_specs, **maps)
    yield update, [like(tree, whole), like(state, specs), like(tree, whole)], 1

    def split(spec, x):  # as sharded updates do where they need no zeros
        even = all(x.shape[d] % n == 0 for d, entry in enumerate(spec) if entry)
        return spec if even else P()

    of_layer = jax.tree.map(split, specs.masters, tree)
    shards = jax.tree.map(lambda spec: P(None, *spec), of_layer)

    @jax.checkpoint
    def layer(x, own):
        used = dq.fsdp(own, names, specs=of_layer, compression=policy)
        return sum(jnp.sum(jnp.sin(w * x)) for w in jax.tree.leaves(used)), None

    def gradients(layers):
        return jax.value_and_grad(lambda own: jax.lax.scan(layer, jnp.float32(1), own)[0])(layers)

    layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype), tree)
    fsdp = jax.shard_map(gradients, in_specs=(shards,), out_specs=(P(), shards), **maps)
    yield fsdp, [like(layers, shards)], LAYERS


@pytest.mark.filterwarnings("ignore:.*have no dimension", "ignore:.*are summed by jax.lax.psum")
@pytest.mark.parametrize("seed", daily(range(24), [5]))
def test_the_ways_of_a_tree_are_the_plans_of_their_steps(seed):
    tree, sizes, policy = random_model(seed)
    told = dq.explain(tree, sizes, compression=policy, verbose=False)
    for way, (step, args, calls) in zip(told.ways, steps_of_ways(tree, sizes, policy), strict=True):
        found = dq.explain(step, *args, verbose=False)
        check(found)
        planned = collections.Counter()
        for plan, times in way.plans:
            planned[plan.scope] += calls * times
        assert {run.plan.scope: run.times for run in found.plans} == planned, way.name
        sent = sum(run.sent_bytes for run in found.plans)
        assert sent == pytest.approx(calls * way.sent_bytes)


# --- Sums of constants, which XLA folds -----------------------------------------------------------

TINY = {"w": (64, 8), "unused": (3000,)}


def of_unused(compression, constant=jnp.zeros_like):
    """A step of 4 workers, whose tree has a leaf that is a constant; and what `explain` tells."""

    def one(w):
        tree = {"w": w, "unused": constant(jnp.zeros(TINY["unused"]))}
        return dq.pmean(tree, "data", compression=compression)

    return dq.explain(*mapped(one, (4 * 64, 8)), verbose=False)


@pytest.mark.parametrize(
    ("compression", "folds"),
    [
        (None, True),
        (dataclasses.replace(EXACT, bucket_bytes=0), True),
        (dq.Compression(dq.BF16(), min_leaf_size=1, min_bucket_size=1, bucket_bytes=0), True),
        (over(dq.Direct(), dataclasses.replace(EXACT, bucket_bytes=0)), False),
    ],
)
def test_zeros_that_xla_does_not_send_are_told(compression, folds):
    """As gradients of leaves that no loss uses; payloads of zeros travel."""
    found = of_unused(compression)
    check(found)
    (run,) = found.plans
    assert (run.folded_bytes > 0) == folds == ("XLA does not send" in str(found))
    assert run.sent_bytes == run.plan.sent_bytes - run.folded_bytes
    zeros = sum(x.sent_bits for x in run.plan.moves if x.leaves[0].path == "unused") / 8
    assert run.folded_bytes == (zeros if folds else 0)


def test_other_constants_travel():
    found = of_unused(None, lambda x: jnp.arange(x.size, dtype=x.dtype))
    check(found)
    assert found.plans[0].folded_bytes == 0
    assert found.sent_bytes == pytest.approx(found.program_bytes)


def test_equal_sums_of_which_one_is_folded_are_told_apart():
    """They share one function of the traced program."""
    method = dataclasses.replace(EXACT, bucket_bytes=0)

    def one(w):
        return dq.psum({"w": w, "z": jnp.zeros_like(w)}, "data", compression=method)

    found = dq.explain(*mapped(one, (4 * 64, 8)), verbose=False)
    check(found)
    assert found.plans[0].folded_bytes == found.sent_bytes == 2 * 3 / 4 * 64 * 8 * 4


def test_a_plan_that_is_too_dear_is_told_though_xla_folds_a_part(monkeypatch):
    honest = plan_module.Plan.sent_bytes.fget
    monkeypatch.setattr(plan_module.Plan, "sent_bytes", property(lambda x: 1.1 * honest(x)))
    assert not of_unused(None).agrees
