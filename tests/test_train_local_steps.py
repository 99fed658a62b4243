"""Local steps: what is equal on all workers, what is not, and the outer step by hand."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import llm_model
import numpy as np
import optax
import pytest
import train_llm
import train_local_steps
import typer
from asserts import assert_replicas_equal, assert_same_bits
from cases import CHEAP, small
from hlo import COLLECTIVES
from jax.sharding import PartitionSpec as P
from small_llm import CONFIG, make_run, sequences
from workers import auto_mesh, put

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

N, EVERY, ROUNDS = 8, 3, 4
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
DIFFERENCES = small(dq.DynamiQ(widths=(2,), bits=2.5, dither=True))
RATE, MOMENTUM = 0.6, 0.8
WEIGHTS = np.array(
    [[1] * N, [1, 1, 1, 0, 1, 1, 0, 1], [0, 0, 2, 0, 0, 0, 0.5, 0], [0] * N], np.float32
)
"""In each outer step: all workers, some away, unequal weights, and everybody away."""


class Round(NamedTuple):
    """An outer step; arrays are on the host, with a leading axis of workers."""

    local: Any
    """Parameters before it."""
    moments: Any
    """The inner optimizer's state."""
    copies: Any
    """The copy on every device after it."""
    restarted: Any
    """Parameters after it."""
    masters: Any
    """Owners' slices after it, put together; without the axis of workers."""
    loss: float


def small_run():
    """The part of a run that programs take."""
    recipe = train_llm.Recipe(EVERY * ROUNDS, 2, 5e-3, 1)
    return make_run(recipe=recipe, loss_fn=llm_model.make_loss(CONFIG))


def programs(run, method, differences):
    rule = optax.sgd(RATE, MOMENTUM, nesterov=True)
    outer = dq.optax.sharded(
        rule, "data", compression=dq.Policy(gradients=method, parameters=differences)
    )
    copy = run.init()
    state = dq.optax.init(outer, copy, run.mesh)
    return copy, state, *train_local_steps.make_programs(run, outer, state)


def spoiled(params, weights):
    """Replaces the parameters of workers that are away by NaN."""
    nan = np.where(weights > 0, 0, np.nan).astype(np.float32)
    away = jax.tree.map(lambda x: x + nan.reshape(-1, *[1] * (x.ndim - 1)), params)
    return put(away, auto_mesh(N), P("data"))


def trained(method, differences):
    """The first copy, and a `Round` for every row of `WEIGHTS`."""
    run = small_run()
    tokens = run.shard(sequences())
    copy, state, own, local_step, outer_step = programs(run, method, differences)
    first, rounds = jax.device_get(copy), []
    for weights in WEIGHTS:
        for _ in range(EVERY):
            own, losses = local_step(own, tokens)
        own = spoiled(own[0], weights), own[1]
        before = jax.device_get(own)
        copy, state, own = outer_step(copy, state, own, run.shard(weights))
        shards = jax.tree.map(lambda x: np.stack([s.data for s in x.addressable_shards]), copy)
        after = shards, *jax.device_get((own[0], state.masters))
        rounds.append(Round(*before, *after, float(np.mean(losses))))
    return first, rounds


@pytest.fixture(scope="module")
def compressed():
    return trained(CHEAP, DIFFERENCES)


def by_hand(first, rounds):
    """Yields masters after every outer step, in float64, from how far the workers have moved."""
    copy = masters = jax.tree.map(np.float64, first)
    velocity = jax.tree.map(np.zeros_like, copy)
    for weights, own in zip(WEIGHTS, rounds, strict=True):
        here = weights > 0

        def movement(x, local, here=here, weights=weights):
            if not here.any():
                return np.zeros_like(x)
            return np.average(x - local[here], axis=0, weights=weights[here])

        moved = jax.tree.map(movement, copy, own.local)
        velocity = jax.tree.map(lambda v, d: MOMENTUM * v + d, velocity, moved)
        steps = jax.tree.map(lambda v, d: RATE * (MOMENTUM * v + d), velocity, moved)
        masters = jax.tree.map(np.subtract, masters, steps)
        copy = jax.tree.map(lambda x: np.float64(x[0]), own.copies)
        yield masters


def apart(tree):
    """Whether no two workers hold the same large leaf."""
    large = [x for x in jax.tree.leaves(tree) if x[0].size > 64]
    return all(len({own.tobytes() for own in x}) == N for x in large)


def errors(first, rounds):
    """Squared errors of how far masters and copies went, against masters by hand."""
    for by_now, own in zip(by_hand(first, rounds), rounds, strict=True):
        copy = jax.tree.map(lambda x: x[0], own.copies)
        ways = (jax.tree.map(np.subtract, x, first) for x in (own.masters, copy, by_now))
        masters, copy, expected = ways
        yield float(vnmse(masters, expected)), float(vnmse(copy, expected))


@pytest.mark.usefixtures("padding_is_free")
def test_workers_are_equal_after_outer_steps_but_for_their_moments(compressed):
    """Whoever was away."""
    _, rounds = compressed
    for number, (weights, own) in enumerate(zip(WEIGHTS, rounds, strict=True), 1):
        assert apart(own.local) or not weights.all()  # all NaN is alike
        assert_replicas_equal(own.copies)
        assert_replicas_equal(own.restarted)
        assert_same_bits(own.restarted, own.copies)
        adam = own.moments[1][0]
        assert apart(adam.mu)
        np.testing.assert_array_equal(adam.count, EVERY * number)
    assert rounds[-1].loss < rounds[0].loss - 0.3


@pytest.mark.release
def test_outer_steps_in_f32_are_nesterov_of_the_weighted_mean_movement():
    exact = dq.Compression(dq.F32(), min_leaf_size=1, min_bucket_bytes=0)
    assert max(map(max, errors(*trained(exact, exact)))) < 1e-9


def test_compressed_outer_steps_are_close_to_them(compressed):
    masters, copies = zip(*errors(*compressed), strict=True)
    assert 1e-6 < min(masters)
    assert max(masters) < 0.02
    assert copies[0] < 0.3  # one encoding of 2.5 bits
    assert copies[-1] < 0.2 * copies[0]  # what it lost has arrived


@pytest.mark.release
def test_local_steps_send_nothing():
    run = small_run()
    copy, state, own, local_step, outer_step = programs(run, CHEAP, DIFFERENCES)
    called = re.compile(rf" (?:{COLLECTIVES})(?:-start)?\(")
    assert not called.search(local_step.lower(own, run.shard(sequences())).compile().as_text())
    weights = run.shard(WEIGHTS[0])
    assert called.search(outer_step.lower(copy, state, own, weights).compile().as_text())


@pytest.mark.release
@pytest.mark.parametrize("fragments", [1, 2])
def test_the_example_trains_and_compares(tmp_path, capsys, monkeypatch, fragments):
    make, called = train_local_steps.make_programs, []

    def make_counted(*args):
        own, *programs = make(*args)

        def counted(name, program):
            def call(*args):
                weights = "".join(f"{x:.0f}" for x in np.sort(args[-1])) if name != "l" else ""
                called.append(name + weights)
                return program(*args)

            return call

        return own, *map(counted, ("l", "o0", "o1"), programs)

    monkeypatch.setattr(train_local_steps, "make_programs", make_counted)
    train_local_steps.main(every=2, steps=4, fragments=fragments, away=0.25, out=tmp_path)
    outer = [f"o{i}00111111" for i in range(2)]
    turn = ["l", outer[1], "l", outer[0]] if fragments == 2 else ["l", "l", outer[0]]
    assert called == turn * 4  # of two runs
    row = re.compile(r"^(dynamiq|f32) +([\d.]+) +([\d.]+)$", re.MULTILINE)
    (name, loss, sent), (exact, expected, whole) = row.findall(capsys.readouterr().out)
    assert (name, exact) == ("dynamiq", "f32")
    assert float(loss) == pytest.approx(float(expected), rel=5e-3)
    params = 1_057_728
    assert float(whole) == pytest.approx(2 * 7 / 8 * 4 * params / 2 / 1e3, rel=1e-3)
    assert float(sent) == pytest.approx(float(whole) * 3.25 / 32, rel=0.02)
    names = {"tiny-local-steps.json", "tiny-local-steps.png"}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert len(Path(train_local_steps.__file__).read_text().splitlines()) <= 125


def test_the_last_step_has_to_be_an_outer_one(tmp_path):
    with pytest.raises(typer.BadParameter, match="200 steps are not a multiple of --every 7"):
        train_local_steps.main(every=7, out=tmp_path)
    with pytest.raises(typer.BadParameter, match="10 steps are not a multiple of --fragments 3"):
        train_local_steps.main(fragments=3, out=tmp_path)
