"""Local steps: what is each worker's own, what is equal on all, and what it is without momentum."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from cases import assert_replicas_equal, assert_same_bits, auto_mesh
from hlo import COLLECTIVES
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import llm_model
import train_llm
import train_local_steps
from train_local_steps import Outer

N, STEPS, EVERY = 8, 12, 3
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CONFIG = replace(
    llm_model.CONFIGS["tiny"],
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden=128, seq_len=16,
)  # fmt: skip
LOSS = llm_model.make_loss(CONFIG)
BITS = dq.Compression(dq.DynamiQ(bits=4), min_leaf_size=1, min_bucket_size=4096)
PLAIN = {"learning_rate": 1.0, "momentum": 0.0, "method": dq.F32()}
"""Outer steps to the mean of the workers' parameters."""


def first_params():
    init = jax.jit(lambda key: llm_model.init_params(CONFIG, key))
    return jax.device_put(init(jax.random.key(0)), NamedSharding(auto_mesh(N), P()))


def batches():
    """Of every worker sequences of its own, the same in every step."""
    tokens = np.random.default_rng(0).integers(0, 32, (2 * N, CONFIG.seq_len + 1), np.int32)
    return [jax.device_put(tokens, NamedSharding(auto_mesh(N), P("data")))] * STEPS


def host(tree):
    return jax.device_get(tree)


def copies(tree):
    """What every device holds of replicated arrays, with a leading axis."""
    return jax.tree.map(
        lambda x: np.stack([np.asarray(s.data) for s in x.addressable_shards]), tree
    )


def local_run(outer, inner):
    """Yields (params, state, loss) after every step, the first ones with no loss."""
    programs = train_local_steps.make_programs(LOSS, inner, outer, auto_mesh(N))
    step = train_local_steps.make_local_step(programs, outer.every)
    params = first_params()
    state = programs.init(params)
    yield host(params), host(state), None
    for tokens in batches():
        params, state, loss = step(params, state, tokens)
        assert_replicas_equal(copies(params))
        yield host(params), host(state), loss


@pytest.fixture(scope="module")
def adam_run():
    """Local steps of AdamW, and outer steps with momentum at 4 bits."""
    return list(local_run(Outer(every=EVERY, method=BITS), optax.adamw(5e-3)))


def differ(tree):
    """Of large leaves with a leading axis of workers: no two workers hold the same."""
    large = [x for x in jax.tree.leaves(tree) if x[0].size > 64]
    return all(len({own.tobytes() for own in x}) == N for x in large)


def test_workers_are_equal_after_outer_steps_and_there_alone(adam_run):
    for number, (params, state, _) in enumerate(adam_run):
        if number % EVERY == 0:
            assert_replicas_equal(state.local)
            assert_same_bits(jax.tree.map(lambda x: x[0], state.local), params)
        else:
            assert differ(state.local)
            assert_same_bits(params, adam_run[number - 1][0])
    assert adam_run[-1][2] < adam_run[1][2] - 0.5


@pytest.mark.release
def test_moments_stay_with_their_worker(adam_run):
    """Not even an outer step makes them alike."""
    for _, state, _ in adam_run[1:]:
        assert differ(optax.tree_utils.tree_get(state.inner, "mu"))
    for number, (_, state, _) in enumerate(adam_run):
        np.testing.assert_array_equal(optax.tree_utils.tree_get(state.inner, "count"), number)


@pytest.mark.release
def test_outer_steps_are_nesterov_of_the_mean_movement():
    """By hand, in float64, from what the workers' parameters were before and after."""
    outer = Outer(every=1, learning_rate=0.6, momentum=0.8, method=dq.F32())
    programs = train_local_steps.make_programs(LOSS, optax.sgd(0.1), outer, auto_mesh(N))
    params = first_params()
    state = programs.init(params)
    at = jax.tree.map(np.float64, host(params))
    velocity = jax.tree.map(np.zeros_like, at)
    local, momentum = state.local, state.outer
    for tokens in batches()[:3]:
        local, _, _ = programs.local_step(local, programs.init(params).inner, tokens)
        moved = jax.tree.map(lambda a, x: a - np.float64(x).mean(0), at, host(local))
        velocity = jax.tree.map(lambda v, d: 0.8 * v + d, velocity, moved)
        at = jax.tree.map(lambda a, v, d: a - 0.6 * (0.8 * v + d), at, velocity, moved)
        params, local, momentum = programs.outer_step(params, local, momentum)
        assert dq.vnmse(host(params), at) < 1e-10


@pytest.fixture(scope="module")
def synchronous_run():
    """Parameters after plain SGD with the mean gradient of every step, in f32."""
    optimizer, params = optax.sgd(0.5), first_params()
    method = train_llm.lax_psum(LOSS, params, auto_mesh(N), "f32")
    step, state = train_llm.make_step(method, optimizer), optimizer.init(params)
    for tokens in batches():
        params, state, _ = step(params, state, tokens)
    return host(params)


@pytest.mark.release
@pytest.mark.parametrize("every", [1, EVERY])
def test_plain_sgd_with_a_meeting_in_every_step_is_synchronous_sgd(synchronous_run, every):
    (start, _, _), *_, (params, _, _) = local_run(Outer(every=every, **PLAIN), optax.sgd(0.5))
    moved = jax.tree.map(np.subtract, params, start)
    error = float(dq.vnmse(moved, jax.tree.map(np.subtract, synchronous_run, start)))
    assert error < 1e-8 if every == 1 else error > 1e-4


@pytest.mark.release
def test_local_steps_send_nothing():
    outer = Outer(every=EVERY, method=replace(BITS, topology=dq.Direct()))
    programs = train_local_steps.make_programs(LOSS, optax.adamw(5e-3), outer, auto_mesh(N))
    params = first_params()
    state = programs.init(params)
    called = re.compile(rf" (?:{COLLECTIVES})(?:-start)?\(")
    local = programs.local_step.lower(state.local, state.inner, batches()[0])
    assert not called.search(local.compile().as_text())
    meeting = programs.outer_step.lower(params, state.local, state.outer)
    assert called.search(meeting.compile().as_text())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every=0: pass at least 1"),
        ({"every": 2, "learning_rate": 0.0}, "learning_rate=0.0: pass a positive"),
        ({"every": 2, "momentum": 1.0}, "momentum=1.0: pass a number from 0"),
    ],
)
def test_wrong_options_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Outer(**options)


def test_the_last_step_has_to_be_an_outer_one():
    with pytest.raises(ValueError, match="200 steps are no multiple of the 7 .* lost; take 203"):
        Outer(every=7).check(200)
    Outer(every=8).check(200)
