"""`dynamiq_jax.optax` on 8 devices: against plain optax on the whole batch, and its state."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_refused, assert_same_bits
from cases import daily, first_state, small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations, gradient, loss_fn, mesh_of, problem, promoting

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.request.compression import as_compression

N = 8
SCALED = small(dq.ErrorFeedback(dq.comparators.MXFP8()))  # a memory, and cheap to compile
MEMORY = small(dq.ErrorFeedback(dq.comparators.OmniReduce(block_size=64)))
POWER = dq.Compression(dq.ErrorFeedback(dq.comparators.PowerSGD(rank=2)), min_leaf_size=1)
KEY = jax.random.key(0)
REDUCED = dq.optax.all_reduce("data", method=dq.F32())
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
    with pytest.raises((TypeError, ValueError), match="acc_grads"):
        train(every(2, optax.chain(REDUCED, SGD)), 1)


def careful(optimizer):
    return promoting(optax.apply_if_finite(optimizer, 3))


def test_what_is_not_finite_on_one_worker_is_skipped_on_all():
    """In the wrong order every worker would decide by its own gradient, which does not compile."""
    optimizer = optax.chain(REDUCED, careful(SGD))
    before, _ = train(optimizer, 1)
    skipped, (_, state) = train(optimizer, 2, poisoned=1)
    assert_same_bits(skipped, before)
    assert (int(state.notfinite_count), int(state.total_notfinite)) == (1, 1)
    with pytest.raises(TypeError, match="cond"):
        train(careful(optax.chain(REDUCED, SGD)), 1)


def test_it_compresses_as_reduce_does_and_keeps_its_state():
    """Every step has a key of its own."""
    method = small(dq.ErrorFeedback(dq.comparators.MXFP8(rounding="stochastic")))
    method = as_compression(method, dq.Direct())
    options = {"op": "sum", "metrics": True, "method": method}
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
    reduced = dq.optax.all_reduce("data", method=as_compression(method, topology), metrics=True)
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
    keeps = dq.optax.all_reduce("data", method=MEMORY)
    misfit = r"mu/in has \(16, 3\) .* this optimizer has \(16, 64\)"
    unknown = r"'data' has; call dq\.optax\.init\(optimizer, params"
    assert_refused(
        (ValueError, misfit, dq.optax.restore_state, wide, fresh),
        (ValueError, r"0/step is missing .* has \(\)", dq.optax.restore_state, fresh[1:], fresh),
        (ValueError, unknown, keeps.init, params),
    )
    assert dq.optax.all_reduce("data").init(params).memory is None


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
