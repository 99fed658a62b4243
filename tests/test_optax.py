"""`dynamiq_jax.optax` on 8 devices: against plain optax on the whole batch, and its state."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_refused, assert_same_bits
from cases import CHEAP, EXACT, daily, first_state, over, small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations, gradient, loss_fn, mesh_of, problem, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.contrib import liec

N = 8
SCALED = small(dq.ErrorFeedback(dq.contrib.MXFP8()))  # a memory, and cheap to compile
MEMORY = small(dq.ErrorFeedback(dq.contrib.OmniReduce(block_size=64)))
POWER = dq.Compression(dq.ErrorFeedback(dq.contrib.PowerSGD(rank=2)), min_leaf_size=1)
KEY = jax.random.key(0)
REDUCED = dq.optax.all_reduce("data", compression=dq.F32())
SHARDED = promoting(dq.optax.sharded(optax.sgd(0.1), "data", compression=EXACT))
SGD = promoting(optax.sgd(0.1, momentum=0.9))
"""Its updates have the scale of gradients, where Adam's are the same for a sum and a mean."""
ADAM = promoting(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


@functools.cache
def started(optimizer, mesh, check_vma=True):
    """The first state, and the step."""
    state = dq.optax.init(optimizer, problem(1)[0], mesh)
    grads_of = optax_steps.of_batch(loss_fn)
    return state, optax_steps.stepper(optimizer, state, grads_of, mesh, check_vma=check_vma)


def train(optimizer, steps, mesh=None, poisoned=None, **options):
    """(params, opt_state) after ``steps`` steps; ``poisoned`` has a NaN for one worker."""
    params, batches = problem(steps)
    state, step = started(optimizer, mesh or auto_mesh(), **options)
    if poisoned is not None:
        batches = [*batches]
        batches[poisoned] = jnp.asarray(batches[poisoned]).at[5, 0].set(jnp.nan)
    return optax_steps.train(step, params, state, batches, mesh or auto_mesh())


@pytest.mark.parametrize("kind", daily(["auto", "explicit", "unchecked"], ["auto"]))
def test_first_in_a_chain_it_is_the_optimizer_of_the_whole_batch(kind):
    mesh = mesh_of(N, kind=AxisType.Explicit) if kind == "explicit" else auto_mesh()
    optimizer = optax.chain(REDUCED, SGD)
    params, (reduced, _) = train(optimizer, 4, mesh, check_vma=kind != "unchecked")
    assert_close(params, optax_steps.plain(SGD, loss_fn, *problem(4)))
    assert (int(reduced.step), reduced.memory, reduced.metrics) == (4, None, None)


def every(steps, inner):
    return promoting(optax.MultiSteps(inner, steps).gradient_transformation())


def test_multi_steps_of_optax_go_after_the_reduction_and_are_refused_around_it():
    """Around it workers' sums differ, and its state says that they do not."""
    params, state = train(optax.chain(REDUCED, every(2, SGD)), 4)
    assert_close(params, optax_steps.plain(every(2, SGD), loss_fn, *problem(4)))
    assert int(state[0].step) == 4
    with pytest.raises(ValueError, match="MultiSteps is around dq.optax.all_reduce"):
        train(every(2, optax.chain(REDUCED, SGD)), 1)


def careful(optimizer):
    return promoting(optax.apply_if_finite(optimizer, 3))


def test_what_is_not_finite_on_one_worker_is_skipped_on_all():
    """In the wrong order every worker would decide by its own gradient."""
    optimizer = optax.chain(REDUCED, careful(SGD))
    before, _ = train(optimizer, 1)
    skipped, (_, state) = train(optimizer, 2, poisoned=1)
    assert_same_bits(skipped, before)
    assert (int(state.notfinite_count), int(state.total_notfinite)) == (1, 1)
    with pytest.raises(ValueError, match="apply_if_finite is around dq.optax.all_reduce"):
        train(careful(optax.chain(REDUCED, SGD)), 1)


@pytest.mark.release
def test_it_compresses_as_reduce_does_and_keeps_its_state():
    """Every step has a key of its own."""
    method = small(dq.ErrorFeedback(dq.contrib.MXFP8(rounding="stochastic")))
    method = over(dq.Direct(), method)
    options = {"op": "sum", "metrics": True, "compression": method}
    optimizer = dq.optax.all_reduce("data", key=KEY, **options)
    grads = {"w": gradient(0, N, 5000)}

    def by_reduce(grads, state, step):
        key = jax.random.fold_in(KEY, step)
        return dq.reduce(grads, "data", key=key, state=state, **options)

    mapped = functools.partial(jax.vmap, axis_name="data")
    ours = jax.jit(mapped(lambda grads, state: optimizer.update(grads, state)))
    expected = jax.jit(mapped(by_reduce, in_axes=(0, 0, None)))
    opt_state = mapped(lambda g: optimizer.init(jax.tree.map(jnp.zeros_like, g)))(grads)
    state = first_state(method, grads, N)
    for i in range(3):
        total, opt_state = ours(grads, opt_state)
        found = expected(grads, state, i)
        state = found.state
        assert_same_bits((total, opt_state.metrics), (found.tree, found.metrics))
        assert opt_state.step.tolist() == [i + 1] * N
        assert_same_bits(jax.tree.map(lambda x: x[:, 0], opt_state.memory.value), state)
        residual = np.asarray(state[0].residual)
        assert np.any(residual[0] != residual[1])


@pytest.mark.parametrize("name", ["emit", "method"])
def test_arguments_that_all_reduce_had_are_refused_in_a_chain(name):
    optimizer = optax.chain(dq.optax.all_reduce("data"), ADAM)
    grads = jnp.ones(3)
    with pytest.raises(TypeError, match=f"update got {name}=.*in a scan"):
        optimizer.update(grads, optimizer.init(grads), grads, **{name: None})


def stateful(method=SCALED):
    topology = None if method in (MEMORY, POWER) else dq.Direct()
    reduced = dq.optax.all_reduce("data", compression=over(topology, method), metrics=True)
    return optax.chain(reduced, ADAM)


@pytest.mark.parametrize("method", daily([SCALED, POWER], [SCALED]))
def test_a_checkpoint_of_orbax_goes_on_bit_by_bit(method, tmp_path):
    optimizer = stateful(method)
    params, opt_state = train(optimizer, 3)
    fresh, step = started(optimizer, auto_mesh())
    # Warnings are errors here.
    saved = optax_steps.saved_and_restored(tmp_path, opt_state)
    restored = dq.optax.restore_state(saved, fresh)
    assert_same_bits(restored, opt_state)
    for ours, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True):
        assert ours.sharding == expected.sharding
    x = problem(1)[1][0]
    assert_same_bits(step(params, restored, x), step(params, opt_state, x))


def test_a_method_without_memory_has_nothing_to_restore():
    """So the part of each worker is empty, as in the state of the multi-host example."""
    fresh = {"memory": dq.optax.PerWorker((), "data"), "step": jnp.int32(0)}
    saved = {"memory": {}, "step": np.int32(3)}
    assert dq.optax.restore_state(saved, fresh)["step"] == 3


def test_other_workers_are_told_what_was_reset(tmp_path):
    optimizer = stateful()
    params, opt_state = train(optimizer, 3)
    fresh = dq.optax.init(optimizer, params, auto_mesh(4))
    saved = optax_steps.saved_and_restored(tmp_path, opt_state)
    with pytest.warns(UserWarning) as caught:
        state = dq.optax.restore_state(saved, fresh)
    assert [str(warning.message) for warning in caught] == [
        "opt_state: 0/memory was reset, from 8 to 4 workers"
    ]
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    memory = state[0].memory.value
    assert_same_bits(memory, fresh[0].memory.value)
    scale = opt_state[0].memory.value
    assert np.any(np.asarray(scale[0].residual)) and not np.any(np.asarray(memory[0].residual))
    assert_same_bits(jax.device_get(state[1]), jax.device_get(opt_state[1]))
    assert int(state[0].step) == 3


def test_a_memory_that_was_not_saved_starts_anew_and_leaves_that_do_not_fit_are_refused():
    init = lambda own, params: dq.optax.init(own, params, auto_mesh())
    params, _ = problem(1)
    without, fresh = init(stateful(dq.BF16()), params), init(stateful(), params)
    message = "0/memory was not saved and starts anew for 8 workers$"
    with pytest.warns(UserWarning, match=message):
        assert_same_bits(dq.optax.restore_state(without, fresh), fresh)
    wide = init(stateful(), {"in": jnp.ones((16, 3)), "out": params["out"]})
    keeps = dq.optax.all_reduce("data", compression=MEMORY)
    misfit = r"mu/in has \(16, 3\) .* this optimizer has \(16, 64\)"
    unknown = r"'data' has; call dq\.optax\.init\(optimizer, params"
    assert_refused(
        (ValueError, misfit, dq.optax.restore_state, wide, fresh),
        (ValueError, r"0/step is missing .* has \(\)", dq.optax.restore_state, fresh[1:], fresh),
        (ValueError, unknown, keeps.init, params),
    )
    assert dq.optax.all_reduce("data").init(params).memory is None


def test_a_restored_leaf_is_placed_as_the_fresh_one():
    """JAX moves arrays that nobody has put anywhere to the mesh of the others."""
    params, batches = problem(1)
    state, step = started(SHARDED, auto_mesh())
    params = jax.tree.map(jnp.asarray, params)
    fresh = {"step": 0, "rows": np.arange(3), "key": KEY, "params": params, "opt_state": state}
    saved = jax.device_get(fresh | {"step": jnp.int32(7), "rows": np.arange(3) + 4})
    found = dq.optax.restore_state(saved, fresh)
    assert type(found["step"]) is int and found["step"] == 7
    assert found["rows"].dtype == np.int64 and found["rows"].tolist() == [4, 5, 6]
    assert_same_bits(*(jax.random.key_data(x["key"]) for x in (found, fresh)))
    x = batches[0]
    assert_same_bits(step(found["params"], found["opt_state"], x), step(params, state, x))


def test_a_memory_of_all_workers_inside_of_a_map_is_refused():
    """With `P()` for the state, every worker would go on from the memory of the first one."""
    params, _ = problem(1)
    optimizer = dq.optax.all_reduce("data", compression=SCALED)
    state = dq.optax.init(optimizer, params, auto_mesh())
    maps = {"mesh": auto_mesh(), "in_specs": P(), "out_specs": P(), "check_vma": False}
    message = r"array \(8, .* pass dq\.optax\.state_specs\(opt_state\) as the specs"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.shard_map(optimizer.update, **maps), params, state)


def test_liec_outside_of_maps_is_refused():
    optimizer, (params, _) = liec.liec(optax.sgd(0.1), "data"), problem(1)
    state = dq.optax.init(optimizer, params, auto_mesh())
    with pytest.raises(ValueError, match=r"liec found no map over axis 'data'; call update under"):
        optimizer.update(params, state)


def test_parameters_on_other_devices_than_the_mesh_are_refused():
    there = jax.device_put(problem(1)[0], jax.devices()[0])
    message = r"params are not on the 8 devices of the mesh; pass jax\.device_put\(params"
    with pytest.raises(ValueError, match=message):
        dq.optax.init(SHARDED, there, auto_mesh())


def outside(mesh, specs):
    """A step outside of maps needs parameters, a batch, and ``step((params, state), x)``."""
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32)}
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    explicit = mesh.axis_types[0] == AxisType.Explicit
    placed = {"out_sharding": P("data", None)} if explicit else {}
    loss = lambda p, x: jnp.mean(
        jnp.einsum("bh,ho->bo", jnp.tanh(x @ p["up"]), p["down"], **placed)
    )
    grad_fn = dq.value_and_grad(
        loss, mesh=mesh, axis_name="data", compression=SCALED, unreduced=True,
        specs=None if explicit else specs,
    )  # fmt: skip
    optimizer = dq.optax.all_reduce("data", compression=SCALED, op="sum")

    def step(carry, x):
        params, state = carry
        updates, state = optimizer.update(grad_fn(params, x)[1], state)
        return (optax.apply_updates(params, updates), state), None

    x = rng.standard_normal((2, 16, 32), np.float32)
    return optimizer, put(params, mesh, specs), put(x, mesh, P(None, "data")), step


@pytest.mark.parametrize("way", ["dq.optax.init", "optimizer.init"])
def test_a_scan_outside_of_maps_carries_a_memory_from_its_first_type_on(way):
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        optimizer, params, x, step = outside(mesh, P())
        dq_way = way == "dq.optax.init"
        state = dq.optax.init(optimizer, params, mesh) if dq_way else optimizer.init(params)
        kept = jax.tree.leaves(state.memory)[0]
        assert kept.addressable_shards[0].data.shape == (1, *kept.shape[1:])
        after, _ = jax.eval_shape(lambda *carry: jax.lax.scan(step, carry, x), params, state)
    assert jax.tree.map(jnp.shape, after[1]) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_one_worker_keeps_its_state_and_is_not_warned(kind):
    mesh = mesh_of(1, kind={"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind])
    feedback = small(dq.ErrorFeedback(dq.contrib.OmniReduce(density=0.5, block_size=8)))
    params, x = {"w": np.ones((16, 16), np.float32)}, np.ones((4, 16), np.float32)
    state = jax.device_get(jax.jit(lambda: feedback.init_state(params, 1, stacked=True))())
    loss = lambda params, x: jnp.mean(jnp.square(x @ params["w"]))  # the gradient is 2
    options = {"axis_name": "data", "compression": feedback}

    terms = dq.value_and_grad(loss, **options, unreduced=True)

    def later(params, x, state):
        return dq.reduce(terms(params, x)[1], **options, op="sum", state=state)

    with jax.set_mesh(mesh):
        own = put(params, mesh), put(x, mesh, P("data"))
        at_once = jax.jit(dq.value_and_grad(loss, **options))(*own, state=state)[1]
        for found in (at_once, jax.jit(later)(*own, state)):
            assert_same_bits(jax.device_get(found.tree), {"w": np.full((16, 16), 2, np.float32)})
            assert_same_bits(*jax.device_get((found.state, state)))
        if kind == "explicit":  # `sharded` needs a map on the other
            step = lambda p, x: SHARDED.update(terms(p, x)[1], SHARDED.init(p), p)
            jax.eval_shape(step, *own)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_memory_of_leaves_that_other_axes_split_is_refused_outside_of_maps(kind):
    mesh = mesh_of(4, 2, kind=kind)
    with jax.set_mesh(mesh):
        specs = {"up": P(None, "model"), "down": P("model", None)}
        optimizer, params, x, step = outside(mesh, specs)
        state = dq.optax.init(optimizer, params, mesh)
        with pytest.raises(ValueError, match=r"memory of whole leaves.*dq.reduce\(grads, 'data'"):
            jax.eval_shape(step, (params, state), x[0])


@jax.tree_util.register_pytree_with_keys_class
class Alike(tuple):
    """A node whose children have keys that read alike."""

    def tree_flatten_with_keys(self):
        return [
            (jax.tree_util.DictKey(key), x) for key, x in zip((1, "1"), self, strict=True)
        ], None

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


def test_leaves_go_by_names_that_no_other_leaf_has():
    """Keys may contain slashes, and a memory's name may begin like that of another leaf."""
    worker = lambda *x: dq.optax.PerWorker({"b": np.float32(x)}, "data")
    saved = {"a/b": 1, "a": {"b": 2, "b/c": 3}, "m": worker(4), "m/b": 5}
    saved = jax.tree.map(np.float32, saved)
    fresh = jax.tree.map(lambda x: jnp.zeros(np.shape(x)), saved)
    assert_same_bits(dq.optax.restore_state(saved, fresh), saved)
    lacks = {name: x for name, x in saved.items() if name != "a/b"}
    alike = Alike([np.float32(1), np.float32(2)])
    spare = r"1 of the 6 leaves .* no place in this optimizer's state of 5: 'm/b/c'; pass"
    assert_refused(
        (ValueError, "leaf 'a/b' is missing", dq.optax.restore_state, lacks, fresh),
        (ValueError, spare, dq.optax.restore_state, saved | {"m/b/c": np.float32(6)}, fresh),
        (ValueError, "two leaves have the name x/1, and", dq.optax.restore_state,
         {"x": alike}, {"x": alike}),
    )  # fmt: skip


def test_leaves_that_were_saved_under_joined_names_are_found():
    state = dq.optax.init(dq.optax.all_reduce("data"), {"a": {"b": jnp.ones(3)}}, mesh_of(2))
    state = jax.tree.map(lambda x: x + 7, (state, {"a": {"b": jnp.ones(3)}, "c": jnp.ones(2)}))
    paths = jax.tree_util.tree_leaves_with_path(state)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    fresh = jax.tree.map(jnp.zeros_like, state)
    assert_same_bits(dq.optax.restore_state({keystr(path): x for path, x in paths}, fresh), state)
    twice = {"a": {"b/c": 1.0}, "a/b": {"c": 2.0}}
    with pytest.raises(ValueError, match="leaf a/b/c is missing"):
        dq.optax.restore_state(twice, {"a": {"b": {"c": jnp.zeros(())}}})


@pytest.mark.parametrize("how", ["nested", "joined", "half", "joined memories"])
def test_a_memory_of_more_leaves_is_reset_under_joined_names_too(how):
    """Other workers may have other buckets; a leaf beside the memory still has its own place."""
    worker = lambda *shapes: dq.optax.PerWorker([np.ones(shape, "f") for shape in shapes], "data")
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    join = lambda tree: {keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    saved = {"o": {"m": worker((4, 3), (4, 5)), "x": np.ones(2, "f")}}
    fresh = {"o": {"m": worker((2, 8)), "x": np.zeros(2, "f")}}
    form = {
        "nested": lambda tree: tree,
        "joined": join,
        "half": lambda tree: {"o": join(tree["o"])},
        "joined memories": lambda tree: {f"o/{name}": x for name, x in tree["o"].items()},
    }[how]
    fresh = jax.tree.map(jnp.asarray, fresh)
    with pytest.warns(UserWarning, match="o/m was reset, from 4 to 2 workers"):
        found = dq.optax.restore_state(form(saved), fresh)
    assert_same_bits(found, {"o": {"m": fresh["o"]["m"], "x": saved["o"]["x"]}})
    saved["o"]["m/b"] = np.ones(2, "f")
    with pytest.raises(ValueError, match=r"1 of the 4 leaves .* no place .*m/b"):
        dq.optax.restore_state(form(saved), fresh)


def test_a_first_state_can_be_donated():
    """No array is in it twice, also where init runs operation by operation."""
    optimizer, (params, _) = stateful(), problem(1)
    with jax.set_mesh(auto_mesh()):
        state = optimizer.init(params)
    leaves = jax.tree.leaves(state)
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    assert_same_bits(state, dq.optax.init(optimizer, params, auto_mesh()))


def test_every_part_arises_where_it_belongs():
    with compilations() as compiled:
        state = dq.optax.init(stateful(MEMORY), problem(1)[0], auto_mesh())
        assert len(compiled) == 1
    leaves = jax.tree.leaves(state)
    (residual,) = (leaf for leaf in leaves if not leaf.sharding.is_fully_replicated)
    assert [shard.data.shape[0] for shard in residual.addressable_shards] == [1] * N
    specs = dq.optax.state_specs(state)
    assert Counter(jax.tree.leaves(specs)) == {P("data"): 1, P(): len(leaves) - 1}


SAVED = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
}


@pytest.mark.parametrize("way", ["sharded", "all_reduce"])
@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("adamw", "sgd", "mu"),
        ("adamw", "lion", "nu"),
        ("momentum", "sgd", "trace"),
        ("sgd", "sgd", ""),
    ],
)
def test_all_that_was_saved_finds_its_place_or_is_named(way, before, after, named):
    params = {"in": jnp.ones((16, 64)), "out": jnp.ones((64, 8))}

    def state(name, params=params):
        if way == "sharded":
            rule = dq.optax.sharded(SAVED[name], "data", compression=EXACT)
        else:
            rule = optax.chain(dq.optax.all_reduce("data", compression=EXACT), SAVED[name])
        return dq.optax.init(rule, params, auto_mesh())

    saved = jax.device_get(state(before))
    if not named:
        fewer = {"in": params["in"]}
        assert jax.tree.leaves(dq.optax.restore_state(saved, state(after)))
        if way == "all_reduce":  # SGD has no leaf of a layer
            return
        with pytest.raises(ValueError, match="have no place .*masters/out"):
            dq.optax.restore_state(saved, state(after, fewer))
        return
    with pytest.raises(ValueError, match=f"have no place in this optimizer's state.*{named}/in"):
        dq.optax.restore_state(saved, state(after))


@pytest.mark.usefixtures("padding_is_free")
def test_a_memory_without_a_place_is_named():
    params = {"in": jnp.ones((64, 64))}
    make = lambda method: dq.optax.init(
        optax.chain(dq.optax.all_reduce("data", compression=method), optax.sgd(0.1)),
        params,
        auto_mesh(),
    )
    memory = make(small(dq.ErrorFeedback(CHEAP.method)))
    with pytest.raises(ValueError, match="1 of the 2 leaves that were saved have no place"):
        dq.optax.restore_state(memory, make(CHEAP))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_states_from_shapes_alone_and_inside_of_jit(kind):
    """Shapes, dtypes and shardings are those of the state itself; nothing is allocated."""
    mesh, params = mesh_of(8, kind=kind), {"in": jnp.ones((16, 64)), "scale": jnp.ones(8)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    own = dataclasses.replace(EXACT, min_leaf_size=256)
    optimizer = dq.optax.sharded(optax.adam(1e-2), "data", compression=own)
    state = dq.optax.init(optimizer, params, mesh)
    like = dq.optax.init(optimizer, shapes, mesh)
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like))
    assert described(like) == described(state)
    found = jax.eval_shape(lambda p: dq.optax.init(optimizer, p, mesh), params)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, state)
    inside = jax.jit(lambda p: dq.optax.init(optimizer, p, mesh))(params)
    jax.tree.map(np.testing.assert_array_equal, inside, state)


@pytest.mark.parametrize("way", ["all_reduce", "sharded"])
@pytest.mark.usefixtures("padding_is_free")
def test_states_keep_their_types(way):
    """Else the second step compiles anew, weak types included."""
    if way == "all_reduce":
        optimizer = optax.chain(dq.optax.all_reduce("data", compression=SCALED), ADAM)
    else:
        optimizer = promoting(dq.optax.sharded(SGD, "data", compression=CHEAP))
    state, step = started(optimizer, auto_mesh())
    params, (x,) = problem(1)
    after = jax.eval_shape(step, params, state, x)[1]
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert types(after) == types(state)


def test_a_trainers_own_init_on_explicit_axes():
    """TrainState.create and nnx.Optimizer make these calls; then a step."""
    mesh = mesh_of(8, kind=AxisType.Explicit)
    own = dataclasses.replace(EXACT, min_leaf_size=256)
    rule = promoting(optax.adam(1e-2))
    optimizer = promoting(
        dq.optax.sharded(rule, "data", compression=dq.Policy(gradients=own, parameters=own))
    )
    params = {"in": jnp.ones((64, 64)) / 8, "scale": jnp.ones(8)}
    x = put(jnp.linspace(-1, 1, 16 * 64).reshape(16, 64), mesh, P("data"))
    loss = lambda p, x: jnp.mean((x @ p["in"]) ** 2) * jnp.sum(p["scale"])
    with jax.set_mesh(mesh):
        params = put(params, mesh)
        state = optimizer.init(params)
        assert state.masters["in"].sharding.spec != P()
        grads = dq.value_and_grad(loss, axis_name="data", compression=own, unreduced=True)

        @jax.jit
        def step(params, state, x):
            updates, state = optimizer.update(grads(params, x)[1], state, params)
            return optax.apply_updates(params, updates), state

        params, state = step(params, state, x)
        with compilations() as found:
            params, state = step(params, state, x)
        assert not found
    plain = {"in": jnp.ones((64, 64)) / 8, "scale": jnp.ones(8)}
    inner = rule.init(plain)
    for _ in range(2):
        updates, inner = rule.update(jax.grad(loss)(plain, jax.device_get(x)), inner, plain)
        plain = optax.apply_updates(plain, updates)
    assert_close(params, plain, atol=1e-6)
