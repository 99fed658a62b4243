"""The model of steps by rate against the steps that were measured."""

import json

import break_even
import pytest
from break_even import GROUPS, MEASURED, NEAR, WAYS, Model, Sizes

STEPS = json.loads((break_even.RESULTS / "steps.json").read_text())


def test_measured_steps_lie_between_the_ends_of_the_model():
    model, compared = Model(STEPS), 0
    for rate, place in [*MEASURED.items(), *((model.near[name], NEAR[name]) for name in NEAR)]:
        sizes = GROUPS[", 2 × 2"] if "hosts" in place[1] else GROUPS[""]
        for way in WAYS:
            low, high = model.step_ms(way, rate, sizes)
            ms = break_even.first(model.columns[place], way)
            if ms is not None:
                assert 0.99 * low <= ms <= 1.01 * high, (rate, way)
                compared += 1
    assert compared == 13


def test_bytes_are_those_of_the_plans():
    """1.1 B parameters at 5 and 5 + 2.5 bits: `dq.explain` has 692 and 517 MB, 346 and 260."""
    model = Model(STEPS)
    found = [1e3 / 8 * model.gbit_sent(w, s) for s in GROUPS.values() for w in WAYS]
    assert found == pytest.approx([2215, 692, 517, 1661, 346, 260], rel=0.005)


def test_at_break_even_both_ways_take_the_same_time():
    model = Model(STEPS)
    ours, psum, sizes = "sharded, 5 + 2.5", "bf16 psum", Sizes(2, 1)
    hides, open_ = model.break_even()
    assert model.step_ms(psum, hides, sizes)[0] == pytest.approx(
        model.step_ms(ours, hides, sizes)[1]
    )
    assert model.step_ms(psum, open_, sizes)[1] == pytest.approx(
        model.step_ms(ours, open_, sizes)[1]
    )
    assert model.break_even(batches=2)[0] < hides < open_
    assert f"{hides:,.0f}" in break_even.sentence(STEPS)
