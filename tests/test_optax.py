"""`dynamiq_jax.optax` on 8 devices: against plain optax on the whole batch, and its state."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import (
    assert_close,
    assert_same_bits,
    auto_mesh,
    compilations,
    daily,
    gradient,
    loss_fn,
    problem,
    promoting,
    small,
    wire_bits,
)
from jax.sharding import PartitionSpec as P
from test_wire_bytes import moved_bits

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.request.compression import as_compression

N = 8
EXACT = dq.F32()
SCALED = small(dq.ErrorFeedback(dq.comparators.MXFP8()))  # a memory, and cheap to compile
MEMORY = small(dq.ErrorFeedback(dq.comparators.OmniReduce(block_size=64)))
POWER = dq.Compression(dq.ErrorFeedback(dq.comparators.PowerSGD(rank=2)), min_leaf_size=1)
KEY = jax.random.key(0)


def careful(optimizer):
    return promoting(optax.apply_if_finite(optimizer, 3))


ADAM = promoting(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


def make_step(optimizer, specs, mesh, *, check_vma=True):
    """jit of (params, opt_state, x) -> (params, opt_state), on the devices of a mesh."""

    def step(params, opt_state, x):
        local = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        grads = jax.grad(loss_fn)(local, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )


@functools.cache
def started(optimizer, mesh, **options):
    """The first state, and the step."""
    opt_state = dq.optax.init(optimizer, problem(1)[0], mesh)
    return opt_state, make_step(optimizer, dq.optax.state_specs(opt_state), mesh, **options)


def train(optimizer, steps, mesh=None, change=lambda i, x: x, **options):
    """(params, opt_state) after ``steps`` steps on all devices."""
    mesh = mesh or auto_mesh()
    params, batches = problem(steps)
    opt_state, step = started(optimizer, mesh, **options)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
        for i, x in enumerate(batches):
            x = jax.device_put(change(i, x), jax.sharding.NamedSharding(mesh, P("data")))
            params, opt_state = step(params, opt_state, x)
    return params, opt_state


def plain(optimizer, steps):
    """Trains on one device, without any reduction."""
    params, batches = problem(steps)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, x):
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for x in batches:
        params, opt_state = step(params, opt_state, x)
    return params


@pytest.mark.parametrize("kind", daily(["auto", "explicit", "unchecked"], ["auto"]))
def test_first_in_a_chain_it_is_the_optimizer_of_the_whole_batch(kind):
    mesh = jax.make_mesh((N,), ("data",)) if kind == "explicit" else auto_mesh()
    optimizer = optax.chain(dq.optax.all_reduce("data", method=EXACT), ADAM)
    params, (reduced, _) = train(optimizer, 4, mesh, check_vma=kind != "unchecked")
    assert_close(params, plain(ADAM, 4))
    assert (int(reduced.step), reduced.memory, reduced.metrics) == (4, None, None)


RANDOM = small(dq.comparators.MXFP8(rounding="stochastic"))


@pytest.mark.parametrize("method", daily([MEMORY, RANDOM], [MEMORY]))
def test_it_compresses_as_reduce_does_and_keeps_its_state(method):
    method = as_compression(method, None if method == MEMORY else dq.Direct())
    options = {"op": "sum", "metrics": True, "method": method}
    optimizer = dq.optax.all_reduce("data", key=KEY, **options)
    grads = {"w": gradient(0, N, 5000)}
    own = {"w": jax.ShapeDtypeStruct((5000,), jnp.float32)}

    def by_reduce(grads, state, step):
        key = jax.random.fold_in(KEY, step)
        return dq.reduce(grads, "data", key=key, state=state, **options)

    mapped = functools.partial(jax.vmap, axis_name="data")
    ours = jax.jit(mapped(lambda grads, state: optimizer.update(grads, state)))
    expected = jax.jit(mapped(by_reduce, in_axes=(0, 0, None)))
    opt_state = mapped(lambda g: optimizer.init(jax.tree.map(jnp.zeros_like, g)))(grads)
    state = as_compression(method).init_state(own, N, stacked=True)
    for i in range(3):
        total, opt_state = ours(grads, opt_state)
        found = expected(grads, state, i)
        state = found.state
        assert_same_bits(total, found.tree)
        assert_same_bits(opt_state.metrics, found.metrics)
        assert opt_state.step.tolist() == [i + 1] * N
        if method == MEMORY:
            assert_same_bits(jax.tree.map(lambda x: x[:, 0], opt_state.memory.value), state)
            residual = np.asarray(state[0].residual)
            assert np.any(residual[0] != residual[1])
        else:
            assert opt_state.memory is None


@pytest.mark.parametrize("name", ["emit", "method"])
def test_arguments_that_all_reduce_had_are_refused_in_a_chain(name):
    optimizer = optax.chain(dq.optax.all_reduce("data"), ADAM)
    grads = jnp.ones(3)
    with pytest.raises(TypeError, match=f"update got {name}=.*in a scan"):
        optimizer.update(grads, optimizer.init(grads), grads, **{name: None})


@functools.cache
def moved(optimizer, check_vma=True):
    """Bits that all workers send in the entry of a step's program, and in its branches."""
    mesh, (params, batches) = auto_mesh(), problem(1)
    opt_state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(opt_state)
    step = make_step(optimizer, specs, mesh, check_vma=check_vma)
    hlo = step.lower(params, opt_state, batches[0]).compile().as_text()
    bodies = re.findall(r"^(ENTRY )?%?([\w.\-]+) \(.*?{$(.*?)^}", hlo, re.DOTALL | re.MULTILINE)
    names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", hlo)
    names += re.findall(r"[\w.\-]+", " ".join(re.findall(r"branch_computations={(.*?)}", hlo)))
    sent = {name: sum(moved_bits(body, Counter(), N).values()) for _, name, body in bodies}
    branches = sorted(sent.pop(name) for name in set(names))
    return sum(sent.values()), branches


MX = dq.optax.all_reduce("data", method=as_compression(small(dq.comparators.MXFP8()), dq.Direct()))


def test_a_chain_sends_what_reduce_does():
    params, _ = problem(1)
    once = N * wire_bits(small(dq.comparators.MXFP8()), dq.Direct())(params, N)
    assert moved(optax.chain(MX, ADAM)) == (once, [])


def by_windows(optimizer, windows, every):
    """Trains on windows of batches: gradients are added up in a scan, and reduced once."""
    mesh, (params, batches) = auto_mesh(), problem(every * windows)
    opt_state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(opt_state)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), specs, P(None, "data")), out_specs=(P(), specs)
    )
    def step(params, opt_state, window):
        local = jax.lax.pcast(params, "data", to="varying")

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(local, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, local), window)
        grads = jax.tree.map(lambda g: g / every, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(windows):
        window = jnp.stack(batches[every * i : every * (i + 1)])
        params, opt_state = step(params, opt_state, window)
    return params, opt_state


def test_windows_in_a_scan_are_those_of_optax_and_reduce_once():
    reduced = optax.chain(dq.optax.all_reduce("data", method=EXACT), ADAM)
    params, state = by_windows(reduced, 2, 3)
    assert_close(params, plain(promoting(optax.MultiSteps(ADAM, 3).gradient_transformation()), 6))
    assert int(state[0].step) == 2


def test_multi_steps_of_optax_go_after_the_reduction_and_are_refused_around_it():
    """Around it workers' sums differ, and its state says that they do not."""
    reduced = dq.optax.all_reduce("data", method=EXACT)

    def windows(inner):
        return promoting(optax.MultiSteps(inner, 2).gradient_transformation())

    params, state = train(optax.chain(reduced, windows(ADAM)), 4)
    assert_close(params, plain(windows(ADAM), 4))
    assert int(state[0].step) == 4
    with pytest.raises((TypeError, ValueError), match="acc_grads"):
        train(windows(optax.chain(reduced, ADAM)), 1)


def poison(step):
    return lambda i, x: (
        jnp.asarray(x).at[5, 0].set(jnp.nan) if i == step else x
    )  # one worker's alone


def test_what_is_not_finite_on_one_worker_is_skipped_on_all():
    optimizer = optax.chain(MX, careful(ADAM))
    before, _ = train(optimizer, 1)
    skipped, (_, state) = train(optimizer, 2, change=poison(1))
    assert_same_bits(skipped, before)
    assert (int(state.notfinite_count), int(state.total_notfinite)) == (1, 1)
    params, (_, state) = train(optimizer, 3, change=poison(1))
    assert (int(state.notfinite_count), int(state.total_notfinite)) == (0, 1)
    assert not np.array_equal(params["in"], before["in"])


def test_the_wrong_order_does_not_compile():
    """There every worker would decide by its own gradient whether to take part."""
    with pytest.raises(TypeError, match="cond"):
        train(careful(optax.chain(MX, ADAM)), 1)


@pytest.mark.release
def test_muon_gets_the_mean():
    muon = promoting(optax.contrib.muon(1e-2))
    optimizer = optax.chain(dq.optax.all_reduce("data", method=EXACT), muon)
    assert_close(train(optimizer, 2)[0], plain(muon, 2), rtol=1e-3, atol=1e-4)


def saved_and_restored(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        # As NumPy arrays: orbax refuses the old shardings where there are other devices.
        shapes = checkpointer.metadata(folder / "state").item_metadata.tree
        as_numpy = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
        return checkpointer.restore(folder / "state", as_numpy)


def stateful(method=SCALED):
    topology = None if method in (MEMORY, POWER) else dq.Direct()
    reduced = dq.optax.all_reduce("data", method=as_compression(method, topology), metrics=True)
    return optax.chain(reduced, careful(ADAM))


@pytest.mark.parametrize("method", daily([SCALED, POWER], [SCALED]))
def test_a_checkpoint_of_orbax_goes_on_bit_by_bit(method, tmp_path):
    optimizer, mesh = stateful(method), auto_mesh()
    params, opt_state = train(optimizer, 3)
    saved = saved_and_restored(tmp_path, opt_state)
    fresh = dq.optax.init(optimizer, params, mesh)
    restored = dq.optax.restore_state(saved, fresh)  # warnings are errors here
    assert_same_bits(restored, opt_state)
    for ours, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True):
        assert ours.sharding == expected.sharding
    step = make_step(optimizer, dq.optax.state_specs(fresh), mesh)
    x = problem(1)[1][0]
    assert_same_bits(step(params, restored, x), step(params, opt_state, x))


def test_other_workers_are_told_what_was_reset(tmp_path):
    optimizer = stateful()
    params, opt_state = train(optimizer, 3)
    scale = opt_state[0].memory.value
    fresh = dq.optax.init(optimizer, params, auto_mesh(4))
    with pytest.warns(UserWarning) as caught:
        state = dq.optax.restore_state(saved_and_restored(tmp_path, opt_state), fresh)
    assert [str(warning.message) for warning in caught] == [
        "opt_state: 0/memory was reset, from 8 to 4 workers"
    ]
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    memory = state[0].memory.value
    assert_same_bits(memory, fresh[0].memory.value)
    assert np.any(np.asarray(scale[0].residual)) and not np.any(np.asarray(memory[0].residual))
    for ours, old in zip(*(jax.tree.leaves(s[1]) for s in (state, opt_state)), strict=True):
        assert_same_bits(jax.device_get(ours), jax.device_get(old))
    assert int(state[0].step) == 3


def test_a_memory_that_was_not_saved_starts_anew_and_leaves_that_do_not_fit_are_refused():
    params, _ = problem(1)
    mesh = auto_mesh()
    without = dq.optax.init(stateful(dq.BF16()), params, mesh)
    fresh = dq.optax.init(stateful(), params, mesh)
    message = "0/memory was not saved and starts anew for 8 workers$"
    with pytest.warns(UserWarning, match=message):
        assert_same_bits(dq.optax.restore_state(without, fresh), fresh)
    wide = dq.optax.init(stateful(), {"in": jnp.ones((16, 3)), "out": params["out"]}, mesh)
    with pytest.raises(ValueError, match=r"mu/in has \(16, 3\) .* this optimizer has \(16, 64\)"):
        dq.optax.restore_state(wide, fresh)
    with pytest.raises(ValueError, match="0/step is missing .* has \\(\\)"):
        dq.optax.restore_state(fresh[1:], fresh)


def test_workers_that_are_not_known_are_refused():
    params, _ = problem(1)
    keeps = dq.optax.all_reduce("data", method=MEMORY)
    with pytest.raises(ValueError, match=r"'data' has; call dq\.optax\.init\(optimizer, params"):
        keeps.init(params)
    assert dq.optax.all_reduce("data").init(params).memory is None


def test_a_first_state_can_be_donated():
    """No array is in it twice, also where init runs operation by operation."""
    mesh, (params, _) = auto_mesh(), problem(1)
    optimizer = stateful()
    with jax.set_mesh(mesh):
        state = optimizer.init(params)
    arrays = {id(leaf) for leaf in jax.tree.leaves(state)}
    assert len(arrays) == len(jax.tree.leaves(state))
    assert_same_bits(state, dq.optax.init(optimizer, params, mesh))


def test_every_part_arises_where_it_belongs():
    params, _ = problem(1)
    with compilations() as compiled:
        state = dq.optax.init(stateful(MEMORY), params, auto_mesh())
        assert len(compiled) == 1
    split = [leaf for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
    assert len(split) == 1  # the residual
    for leaf in split:
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [1] * N
    specs = dq.optax.state_specs(state)
    assert Counter(jax.tree.leaves(specs)) == {P("data"): 1, P(): len(jax.tree.leaves(state)) - 1}
