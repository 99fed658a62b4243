"""docs/recipes.md: every block of Python runs as pasted after the first one, on 8 devices."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
START, *RECIPES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
NAMES = [
    "optax", "accumulation", "checkpoint", "nnx map", "nnx", "linen", "scan", "sequential",
    "weight", "by path", "by step", "metrics",
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a recipe in a folder of its own and returns its variables."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the first block sets it
    monkeypatch.chdir(tmp_path)

    def run(name):
        found: dict = {}
        recipe = RECIPES[NAMES.index(name)]
        exec(compile(START + recipe, f"recipes.md: {name}", "exec"), found)
        return found

    return run


def test_every_recipe_has_a_test():
    assert len(RECIPES) == len(NAMES)


def test_at_most_three_lines_change():
    changed = [len(re.findall(r"  # [1-9]\b", recipe)) for recipe in RECIPES]
    assert dict(zip(NAMES, changed, strict=True)) == {
        "optax": 3, "accumulation": 0, "checkpoint": 0, "nnx map": 3, "nnx": 3, "linen": 3,
        "scan": 2, "sequential": 2, "weight": 1, "by path": 0, "by step": 3, "metrics": 0,
    }  # fmt: skip


def test_optax(run, capsys):
    found = run("optax")
    assert re.fullmatch(r"loss 0\.\d{3}, vNMSE \d\.\de-0\d\n", capsys.readouterr().out)
    assert float(found["loss"]) < 0.5
    assert 1e-5 < float(found["opt_state"][0].metrics.vnmse) < 0.05


def test_accumulation(run, capsys):
    found = run("accumulation")
    assert capsys.readouterr().out == "3 reductions in 12 steps\n"
    assert int(found["opt_state"].inner_opt_state[0].step) == 3


def test_checkpoint(run):
    with pytest.warns(UserWarning) as caught:
        found = run("checkpoint")
    said = re.search(r"# UserWarning: (.*)", RECIPES[NAMES.index("checkpoint")])[1]
    assert [str(warning.message) for warning in caught] == [said]
    (residual,) = found["opt_state"][0].memory.value[0]
    assert residual.shape[0] == 4


@pytest.mark.parametrize("name", ["nnx map", "nnx", "linen"])
def test_flax(run, name):
    found = run(name)
    assert float(found["loss"]) < 0.5


@pytest.mark.parametrize("name", ["scan", "sequential"])
def test_layers_reduce_in_the_backward_pass(run, capsys, name):
    found = run(name)
    assert capsys.readouterr().out.startswith("loss 0.")
    for leaf in jax.tree.leaves(found["params"]):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
        assert np.all(np.isfinite(copies[0]))


def test_a_worker_that_is_left_out(run, capsys):
    run("weight")
    assert capsys.readouterr().out == "all finite: True\n"


def test_by_path(run, capsys):
    found = run("by path")
    table = capsys.readouterr().out
    for path, route in (
        ("['hidden']['kernel']", "compressed, bucket 0"),
        ("['norm']['scale']", "exact: by path"),
        ("['out']['kernel']", "compressed, bucket 1"),
    ):
        assert re.search(rf"{re.escape(path)} .* {route} ", table)
    assert np.all(np.isfinite(found["grads"]["hidden"]["kernel"]))


def test_by_step(run, capsys):
    found = run("by step")
    assert capsys.readouterr().out == f"loss {float(found['loss']):.3f}, 3 programs\n"


def test_metrics(run, tmp_path):
    from dynamiq_jax.curves import read_runs

    run("metrics")
    (curves,) = read_runs([tmp_path / "runs"])
    assert curves.columns["step"] == list(range(12))
    assert all(1e-5 < x < 0.05 for x in curves.columns["vnmse"])
