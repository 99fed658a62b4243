"""`dq.optax.sharded` of leaves none of whose dimensions divides by the workers: zeros end them."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_copies_equal, assert_same_bits, relative_error
from cases import EXACT, daily, small
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations, mesh_of, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax import contrib
from dynamiq_jax.tree.leaves import split_dimension

F32 = dataclasses.replace(EXACT, min_leaf_size=64)
SOME = dataclasses.replace(small(contrib.MinMax()), min_leaf_size=64)
"""A quantiser, which compiles in a third of DynamiQ's time, and rounds at random."""
RULES = {
    "adamw": (optax.adamw(1e-2, weight_decay=0.1), None),
    # Powers of two: products are exact, whether or not XLA contracts a product and a sum.
    "sgd": (optax.sgd(0.125, momentum=0.5), None),
    "clip": (optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.9)), 0.5),
    "away from zero": (  # its update of a zero is none, and its state does not begin with zeros
        optax.chain(
            optax.scale_by_rss(initial_accumulator_value=0.5),
            optax.stateless_with_tree_map(lambda g, p: g + 1 / p.size),
        ),
        None,
    ),
}


def make(rule, n_axes="data", compression=F32, differences=F32, **options):
    inner, max_norm = RULES[rule]
    told = {
        "compression": dq.Policy(gradients=compression, parameters=differences),
        "max_norm": max_norm,
    }
    return promoting(dq.optax.sharded(inner, n_axes, **told, **options))


def given(params, state, grads):
    """The gradients of one worker: an entry of an array of those of all."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), grads)


def drawn(seed):
    """Workers, parameters, and integers as every worker's gradients: their sums are exact."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    if [*RULES][seed % len(RULES)] == "sgd":  # for means that are exact, too
        n = 2 ** int(rng.integers(1, 4))
    odd = lambda least: int(rng.integers(least // n + 1, 3 * least // n + 2)) * n + 1
    shapes = {
        "bias": (odd(70),),
        "nested": [{"matrix": (odd(16), odd(9))}, (odd(20), 3)],
        "even": (n * 4, 17),
        "small": (5,),
        "one": (),
    }
    params = jax.tree.map(
        lambda shape: np.float32(rng.standard_normal(shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(d, int) for d in x),
    )
    steps = [
        jax.tree.map(lambda x: np.float32(rng.integers(-9, 10, (n, *x.shape))), params)
        for _ in range(3)
    ]
    return n, params, steps


def plain(rule, params, steps):
    """Parameters after updates by the mean gradients, on one device."""
    inner, max_norm = RULES[rule]
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    optimizer = promoting(optax.chain(clip, inner))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        means = jax.tree.map(lambda x: jnp.sum(x, 0) / x.shape[0], grads)
        updates, state = optimizer.update(means, state, params)
        return optax.apply_updates(params, updates), state

    for grads in steps:
        params, state = step(params, state, grads)
    return params


def assert_ends_are_zeros(state):
    """In all that workers keep, of which some leaves are padded."""
    padded = [
        pair
        for pair in zip(state.padding, jax.tree.leaves((state.masters, state.inner)), strict=True)
        if pair[0].zeros
    ]
    assert padded
    for padding, x in padded:
        ends = np.moveaxis(np.asarray(x), padding.dimension, 0)[-padding.zeros :]
        assert ends.size and not ends.any()


def train(rule, n, params, steps, **options):
    """Parameters and state after updates that are compiled once."""
    optimizer, mesh = make(rule), auto_mesh(n)
    state = dq.optax.init(optimizer, params, mesh)
    step = optax_steps.stepper(optimizer, state, given, mesh, **options)
    found = put(params, mesh)
    for number, grads in enumerate(steps):
        grads = put(grads, mesh, P("data"))
        with compilations() as compiled:
            found, state = step(found, state, grads)
        assert bool(compiled) == (number == 0)
    return found, state


SEEDS = range(24)


@pytest.mark.parametrize("seed", daily(SEEDS, [0, 1, 2, 3]))
def test_padded_leaves_train_as_plain_optax_does(seed):
    """SGD has equal bits; XLA compiles divisions and roots of other shapes to other last bits."""
    (n, params, steps), rule = drawn(seed), [*RULES][seed % len(RULES)]
    found, state = train(rule, n, params, steps, check_vma=seed % 2 == 0)
    assert_ends_are_zeros(state)
    expected = plain(rule, params, steps)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)
    assert_copies_equal(found)
    if rule == "sgd":
        assert_same_bits(jax.device_get(state.unpadded()), jax.device_get(expected))
    assert_close(state.unpadded(), expected)
    assert_close(found, expected)
    # All large leaves are split: a worker has no more of one than its share, and one row.
    for own, whole in zip(*map(jax.tree.leaves, (state.masters, params)), strict=True):
        part = own.addressable_shards[-1].data
        assert (part.size < whole.size) == (whole.size >= 64)
        assert own.size < 2 * whole.size


@pytest.mark.parametrize("rule", daily(["adamw", "clip"], ["clip"]))
def test_zeros_by_hand_give_the_same_bits(rule):
    """The norm for the clip included: its sum has the same terms in the same order."""
    params, steps = {"w": np.linspace(-1, 1, 69, dtype=np.float32), "v": np.ones((9, 35), "f")}, []
    rng, ends = np.random.default_rng(0), {"w": ((0, 3),), "v": ((0, 0), (0, 5))}
    for _ in range(3):
        steps.append({k: np.float32(rng.standard_normal((8, *x.shape))) for k, x in params.items()})
    found, state = train(rule, 8, params, steps)
    by_hand = {k: np.pad(x, ends[k]) for k, x in params.items()}
    padded = [{k: np.pad(x, ((0, 0), *ends[k])) for k, x in grads.items()} for grads in steps]
    copies, expected = train(rule, 8, by_hand, padded)
    kept = lambda state: jax.device_get((state.masters, state.inner, state.norm))
    assert_same_bits(kept(state), kept(expected))
    assert_same_bits(found, {"w": copies["w"][:69], "v": copies["v"][:, :35]})


def test_norms_and_noise_stop_where_the_leaf_does():
    """Payloads have noise where the zeros are, and neither masters nor norms have it."""
    params = {"w": np.zeros(9, "f"), "v": np.zeros((9, 9), "f")}
    method = small(contrib.MinMax())
    optimizer = promoting(
        dq.optax.sharded(
            optax.sgd(1.0), "data", compression=dq.Policy(gradients=method, parameters=F32)
        )
    )
    mesh = auto_mesh(8)
    state = dq.optax.init(optimizer, params, mesh)
    step = optax_steps.stepper(optimizer, state, given, mesh)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: np.float32(rng.standard_normal((8, *x.shape))), params)
    _, after = step(put(params, mesh), state, put(grads, mesh, P("data")))
    assert_ends_are_zeros(after)
    assert jax.tree.map(jnp.shape, after.masters) == {"w": (16,), "v": (9, 16)}
    moved = [np.asarray(x) for x in jax.tree.leaves(after.unpadded())]
    norm = math.sqrt(sum(np.sum(np.square(x)) for x in moved))
    np.testing.assert_allclose(after.norm, norm, rtol=1e-6)
    exact = [-np.mean(x, 0) for x in jax.tree.leaves(grads)]
    assert all(1e-4 < relative_error(x, right) < 0.5 for x, right in zip(moved, exact, strict=True))


def test_which_dimension_is_split():
    """One that divides if there is one, else the longer one with least zeros, and layers last."""
    for lengths, n, taken, expected in (
        ((50257, 768), 64, (), 1),
        ((50257, 769), 64, (), 0),
        ((1001,), 8, (), 0),
        ((8, 1001), 8, (), 0),
        ((12, 1001, 37), 8, (), 1),
        ((12, 7, 5), 8, (), 0),
        ((63, 65), 8, (), 1),
        ((300, 33), 8, (), 0),
        ((301, 33), 8, (0,), 1),
        ((7, 7, 7, 7), 8, (), None),
        ((), 8, (), None),
    ):
        assert split_dimension(lengths, n, taken) == expected


def test_outside_of_maps_on_explicit_axes():
    """Another axis splits leaves along other dimensions, or the only one: that one stays whole."""
    rng = np.random.default_rng(0)
    shapes = {"w": (34, 17), "v": (17,), "out": (17, 38), "b": (38,)}
    params = {name: np.float32(rng.standard_normal(shape) / 4) for name, shape in shapes.items()}
    specs = {"w": P("model"), "v": P(), "out": P(None, "model"), "b": P("model")}
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    least = dataclasses.replace(F32, min_leaf_size=9)
    optimizer = make("adamw", compression=least, differences=least)

    def loss_of(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["v"][None])
        return jnp.mean(jnp.square(hidden @ params["out"] + params["b"][None] - 1))

    grad_fn = dq.value_and_grad(loss_of, axis_name="data", compression=F32, unreduced=True)

    @jax.jit
    def step(params, state, x):
        updates, state = optimizer.update(grad_fn(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state

    x = np.float32(rng.standard_normal((8, 34)))
    with jax.set_mesh(mesh):
        found = put(params, mesh, specs)
        state = dq.optax.init(optimizer, found, mesh)
        assert state.masters["w"].shape == (34, 20)
        assert state.masters["w"].sharding.spec == P("model", "data")
        for _ in range(2):
            found, state = step(found, state, put(x, mesh, P("data")))
        inside = state.unpadded()  # a length that axes do not divide is no shard's
    assert state.masters["v"].shape == (20,)
    assert state.masters["out"].sharding.spec == P("data", "model")
    assert_same_bits(*map(jax.device_get, (inside, state.unpadded())))
    assert jax.tree.map(jnp.shape, inside) == jax.tree.map(jnp.shape, params)
    assert_close(jax.device_get(inside), jax.device_get(found))
    assert (state.masters["b"].shape, state.splits[0]) == ((38,), P("model"))
    assert state.inner[0].mu["v"].addressable_shards[0].data.shape == (5,)
    expected = optax_steps.plain(promoting(RULES["adamw"][0]), loss_of, params, [x, x])
    assert_close(found, expected)
    assert_copies_equal(found)


SHAPES = {"w": (69,), "v": (9, 35), "few": (5,)}


def trained():
    """Parameters and gradients of eight workers for four updates."""
    rng = np.random.default_rng(0)
    normal = lambda *first: {
        k: np.float32(rng.standard_normal((*first, *s))) for k, s in SHAPES.items()
    }
    return normal(), [normal(8) for _ in range(4)]


@functools.cache
def after_two():
    """Parameters and state after two updates of AdamW by eight workers."""
    params, steps = trained()
    return train("adamw", 8, params, steps[:2])


@functools.cache
def after_four():
    """Parameters of AdamW after four updates on one device."""
    return jax.device_get(plain("adamw", *trained()))


def as_before(state):
    """The state as the version before had it: these leaves were whole, and no norm was kept."""
    leaves, treedef = jax.tree.flatten((state.masters, state.inner))
    masters, inner = treedef.unflatten(p.cut(x) for p, x in zip(state.padding, leaves, strict=True))
    lacks = dict.fromkeys(["norm", "skipped_in_a_row", "sent"])
    told = {"masters": masters, "inner": inner}
    return jax.device_get(dataclasses.replace(state, **told, **lacks))


CHECKPOINTS = [(8, True), (3, False), (3, True), (7, False), (1, False)]


@pytest.mark.parametrize(("n", "before"), daily(CHECKPOINTS, CHECKPOINTS[:2]))
def test_a_checkpoint_goes_to_other_numbers_of_workers(tmp_path, n, before):
    """Ends are cut and others are put on: of 3 workers one leaf has none, and of 8 it had 3."""
    params, steps = trained()
    found, state = after_two()
    saved = optax_steps.saved_and_restored(tmp_path, as_before(state) if before else state)
    assert saved["masters"]["w"].shape == ((69,) if before else (72,))
    optimizer, mesh = make("adamw"), auto_mesh(n)
    fresh = dq.optax.init(optimizer, params, mesh)
    if before:
        with pytest.warns(UserWarning, match="norm was not saved"):
            again = dq.optax.restore_state(saved, fresh)
    else:
        again = dq.optax.restore_state(saved, fresh)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
        )
        assert jax.tree.map(jnp.shape, again) == jax.tree.map(lambda x: x.shape, shapes)
    assert_same_bits(jax.device_get(again.unpadded()), jax.device_get(state.unpadded()))
    assert jax.tree.map(jnp.shape, again.masters) == jax.tree.map(jnp.shape, fresh.masters)
    assert_same_bits(as_before(again).inner, as_before(state).inner)
    if any(p.zeros for p in again.padding):
        assert_ends_are_zeros(again)
    step = optax_steps.stepper(optimizer, again, given, mesh)
    found = put(jax.device_get(found), mesh)
    for grads in steps[2:]:
        means = jax.tree.map(lambda x: np.stack([x.mean(0)] * n), grads)
        found, again = step(found, again, put(means, mesh, P("data")))
    assert_close(again.unpadded(), after_four())
    assert_close(found, after_four())


def test_a_leaf_that_more_workers_do_not_split_keeps_its_last_update():
    """Its differences were pending: its copy is an update behind, which no user has changed."""
    params = {"w": np.zeros((3, 3, 3), np.float32)}
    told = {"compression": EXACT, "deferred": True}
    optimizer = dq.optax.sharded(optax.sgd(1.0), "data", **told)
    with pytest.warns(UserWarning, match="no dimension that the 4 workers"):
        fresh = dq.optax.init(optimizer, params, auto_mesh(4))

    saved = jax.device_get(fresh)  # two workers have padded it
    masters = {"w": np.pad(params["w"] - 1, [(0, 1), (0, 0), (0, 0)])}
    pending = dataclasses.replace(saved.pending, ready=np.True_)
    saved = dataclasses.replace(saved, step=np.int32(1), masters=masters, pending=pending)
    state = dq.optax.restore_state(saved, fresh)

    def step(params, state):
        params = dq.optax.gathered(params, state)
        updates, state = optimizer.update({"w": jnp.ones_like(params["w"])}, state, params)
        return optax.apply_updates(params, updates), state

    specs = dq.optax.state_specs(state)
    maps = {"in_specs": (P(), specs), "out_specs": (P(), specs), "check_vma": False}
    found, state = jax.jit(jax.shard_map(step, mesh=auto_mesh(4), **maps))(params, state)
    np.testing.assert_array_equal(state.masters["w"], params["w"] - 2)
    np.testing.assert_array_equal(found["w"], state.masters["w"])


MOVES = [(3, 8, 1), (8, 3, 6), (1, 4, 2), (6, 8, 4), (2, 6, 1), (4, 3, 8)]
CHAINS = [(counts, deferred) for counts in MOVES for deferred in (True, False)]


@pytest.mark.filterwarnings("ignore:.*have no dimension that the")
@pytest.mark.parametrize(("counts", "deferred"), daily(CHAINS, CHAINS[:1]))
def test_no_number_of_workers_loses_an_update(counts, deferred):
    """Some numbers of workers pad a leaf, some divide it, and some keep it whole."""
    shapes = [(7, 7), (9,), (5, 3), (3, 3, 3), (2, 13), (4,), ()]
    rng, rule = np.random.default_rng(counts), optax.sgd(0.5, momentum=0.5)
    normal = lambda: [np.float32(rng.standard_normal(shape)) for shape in shapes]
    exact = small(dq.F32(), min_bucket_bytes=0)
    optimizer = promoting(
        dq.optax.sharded(
            rule,
            "data",
            compression=dq.Policy(gradients=exact, parameters=exact),
            deferred=deferred,
        )
    )
    found = expected = normal()
    state = None
    momenta = rule.init(expected)
    for n in counts:
        mesh = auto_mesh(n)
        fresh = dq.optax.init(optimizer, found, mesh)
        state = fresh if state is None else dq.optax.restore_state(state, fresh)
        assert_close(state.unpadded(), expected)
        assert_close(jax.device_get(dq.optax.gathered(put(found, mesh), state, mesh)), expected)
        maps = {"in_specs": (P(), dq.optax.state_specs(state), P("data"))}
        maps["out_specs"] = maps["in_specs"][:2]

        def step(params, state, grads):
            params = dq.optax.gathered(params, state)
            grads = given(params, state, grads)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **maps))
        found = put(found, mesh)
        for _ in range(2):
            grads = normal()
            own = [np.stack([x] * n) for x in grads]
            found, state = step(found, state, put(own, mesh, P("data")))
            updates, momenta = rule.update(grads, momenta, expected)
            expected = jax.tree.map(lambda x, u: x + np.asarray(u), expected, updates)
        found, state = jax.device_get((found, state))


def test_what_does_not_fit_is_refused():
    """An end that is not zero is a part of another model; a wrong parameter is no padded one."""
    params, steps = trained()
    found, state = after_two()
    fresh = dq.optax.init(make("adamw"), params, auto_mesh(3))
    saved = jax.device_get(state)
    other = saved.masters | {"v": saved.masters["v"] + np.float32(1)}
    with pytest.raises(
        ValueError, match=r"masters/v has \(9, 40\) .*optimizer has (\(9, 35\)|\(9, 36\))"
    ):
        dq.optax.restore_state(dataclasses.replace(saved, masters=other), fresh)
    short = saved.masters | {"w": saved.masters["w"][:66]}
    with pytest.raises(ValueError, match=r"masters/w has \(66,\)"):
        dq.optax.restore_state(dataclasses.replace(saved, masters=short), fresh)
    for wrong in (found | {"w": np.zeros(72, "f")}, found | {"w": np.zeros(68, "f")}):
        shape = re.escape(str(wrong["w"].shape))
        message = rf"leaf w has shape {shape}, and its master \(72,\), 3 zeros included"
        with pytest.raises(ValueError, match=message):
            dq.optax.set_masters(state, wrong)
        step = optax_steps.stepper(make("adamw"), state, given, auto_mesh())
        grads = steps[1] | {"w": np.zeros((8, *wrong["w"].shape), "f")}
        with pytest.raises(ValueError, match=rf"leaf w has shape {shape}.* is a slice of \(69,\)"):
            jax.eval_shape(step, wrong, state, grads)


def test_masters_are_set_and_begin_alike_inside_of_maps():
    params, steps = trained()
    found, state = train("away from zero", 8, params, steps[:1])
    loaded = jax.tree.map(lambda x: np.asarray(x) + np.float32(1), params)
    specs, optimizer = dq.optax.state_specs(state), make("away from zero")
    maps = {"mesh": auto_mesh(), "out_specs": specs}
    inside = jax.shard_map(dq.optax.set_masters, in_specs=(specs, P()), check_vma=False, **maps)
    for after in (dq.optax.set_masters(state, loaded), jax.jit(inside)(state, loaded)):
        assert_same_bits(jax.device_get(after.unpadded()), loaded)
        assert_ends_are_zeros(after)
    first = jax.jit(jax.shard_map(optimizer.init, in_specs=P(), **maps))(params)
    outside = dq.optax.init(optimizer, params, auto_mesh())
    assert_same_bits(jax.device_get(first), jax.device_get(outside))
    assert_ends_are_zeros(first)


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def head(w, x):
    return jnp.mean(jnp.square(x @ w["out"]))


FUNCTIONS = [block, head]


def model():
    """Parameters of the functions, none of whose matrices has a dimension of a multiple of 4."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.float32(rng.standard_normal(shape) / 4)
    layer = {"kernel": normal(30, 17), "bias": np.full(17, 0.1, "f")}
    return [layer, {"out": normal(17, 63)}], normal(8, 30)


def loss_of(params, x):
    for function, own in zip(FUNCTIONS, params, strict=True):
        x = function(own, x)
    return x


@pytest.mark.parametrize("differences", daily([F32, SOME], [SOME]), ids=["exact", "some"])
def test_gradients_and_differences_travel_in_a_pipeline(differences):
    """Deferred differences have the bits of the others, and what `gathered` says is taken."""
    params, x = model()
    mesh, seen = auto_mesh(4), []
    for deferred in (False, True):
        optimizer = make("clip", differences=differences, deferred=deferred)
        state = dq.optax.init(optimizer, params, mesh)
        specs = dq.optax.state_specs(state)

        def step(params, state, x, optimizer=optimizer, specs=specs):
            def loss(masters):
                told = {"specs": specs.masters, "copies": params, "compression": F32}
                if state.pending is not None:
                    return dq.overlapped(
                        FUNCTIONS, masters, x, "data", pending=state.pending, **told
                    )
                if differences is F32:
                    return dq.overlapped(FUNCTIONS, masters, x, "data", **told), params
                return loss_of(dq.fsdp(masters, "data", **told), x), params

            (_, params), grads = jax.value_and_grad(loss, has_aux=True)(state.masters)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        maps = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs)}
        run, found = jax.jit(jax.shard_map(step, mesh=mesh, **maps)), put(params, mesh)
        for _ in range(3):
            before = found if deferred is False else dq.optax.gathered(found, state)
            found, state = run(found, state, put(x, mesh, P("data")))
            assert_copies_equal(found)
            assert_ends_are_zeros(state)
        seen.append((dq.optax.gathered(found, state), state.unpadded(), before))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)
    if differences is F32:
        assert_same_bits(*map(jax.device_get, seen))
        assert_close(seen[1][1], plain_model(params, x))
    else:
        current, masters = seen[1][:2]
        for now, behind, master in zip(
            *map(jax.tree.leaves, (current, found, masters)), strict=True
        ):
            errors = [np.linalg.norm(np.asarray(x) - np.asarray(master)) for x in (now, behind)]
            assert errors[0] <= 0.8 * errors[1]


def plain_model(params, x):
    inner, max_norm = RULES["clip"]
    optimizer = promoting(optax.chain(optax.clip_by_global_norm(max_norm), inner))
    return optax_steps.plain(optimizer, loss_of, params, [x] * 3)


def test_stacked_states_have_the_zeros_in_each_of_them():
    """As `jax.vmap` stacks states of members that train side by side."""
    params = {"w": np.arange(69, dtype=np.float32)}
    state = dq.optax.init(make("sgd"), params, auto_mesh(4))
    assert state.masters["w"].shape == (72,)
    stacked = jax.tree.map(lambda x: np.stack([x, x + 1]), jax.device_get(state))
    found = stacked.unpadded()["w"]
    np.testing.assert_array_equal(found, np.stack([params["w"], params["w"] + 1]))


def test_large_leaves_that_travel_exactly_are_told_too():
    """A bucket that is too small travels exactly, and its leaves are split all the same."""
    leaf = jax.ShapeDtypeStruct((5001,), jnp.float32)
    (told,) = dq.explain({"b": leaf}, 8, verbose=False).padded
    assert (told.shape, told.padded_shape) == ((5001,), (5008,))
    excluded = dq.Compression(dq.DynamiQ(), exclude="b")
    assert dq.explain({"b": leaf}, 8, compression=excluded, verbose=False).padded == ()


@pytest.mark.usefixtures("padding_is_free")
def test_bytes_of_state_and_wire_shrink_and_are_told():
    params = {
        "bias": np.ones(1001, "f"),
        "table": np.ones((1013, 3), "f"),
        "kernel": np.ones((64, 64), "f"),
    }
    method = dq.Compression(
        dq.DynamiQ(bits=5), min_leaf_size=1000, min_bucket_bytes=0, min_bucket_size=1
    )
    told = dq.explain(params, 8, compression=method, verbose=False)
    assert [
        (leaf.name, leaf.shape, leaf.padded_shape, leaf.kept_bytes) for leaf in told.padded
    ] == [
        ("['bias']", (1001,), (1008,), 7 * 12),
        ("['table']", (1013, 3), (1016, 3), 9 * 12),
    ]
    line = "Sharded updates pad 2 leaves with zeros, 192 bytes of the state of all 8 workers: "
    assert line + "['bias'] 1001 to 1008, ['table'] 1013x3 to 1016x3" in str(told)
    even = dq.explain({"kernel": params["kernel"]}, 8, compression=method, verbose=False)
    assert even.padded == () and "zeros" not in str(even)
    optimizer = dq.optax.sharded(optax.adam(1e-3), "data", compression=method)
    state = dq.optax.init(optimizer, params, auto_mesh())
    own = state.masters, state.inner, state.sent.copies
    kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(own))
    sizes = [1008, 3 * 1016, 64 * 64]
    assert kept == 16 * sum(sizes) // 8 + 4  # and the count of steps
    (way,) = (way for way in told.ways if way.name == "sharded updates")
    assert way.kept_bytes == 4 * sum(x.size for x in params.values()) + 16 * sum(sizes) / 8
    step = optax_steps.stepper(promoting(optimizer), state, given, auto_mesh())
    grads = jax.tree.map(lambda x: np.ones((8, *x.shape), "f"), params)
    text = step.lower(params, state, grads).as_text()
    results = re.findall(r'"stablehlo\.(?:all_|reduce_s|collective_)(?s:.*?)-> (.*)', text)
    assert any("xui32" in result for result in results)  # payloads are seen
    floats = [shape for result in results for shape in re.findall(r"<((?:\d+x)*)f32>", result)]
    sent = [math.prod(map(int, shape.split("x")[:-1])) for shape in floats]
    assert sent and max(sent) < 500  # nothing large travels in 32 bits
