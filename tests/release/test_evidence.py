"""benchmarks/evidence: trainings that are paired, and pages that have what the results say."""

import json
import re

import classifier
import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
import training
import typer
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
STEPS, SEEDS = 8, 2
SHARDED, FSDP = "dynamiq:8/dynamiq:8", "dynamiq:8/dynamiq:8/whole"
METHODS = f"dynamiq:5,f32,{SHARDED},{FSDP}"
COMMAND = ["--models", "micro", "--inits", "unit", "--methods", METHODS, "--steps", STEPS]


def invoke(*arguments):
    app = typer.Typer()
    app.command()(training.main)
    return CliRunner().invoke(app, list(map(str, (*arguments, "--seeds", SEEDS))))


def test_runs_are_paired_and_learn(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('{"invocations": ["earlier"], "rows": []}')
    ran = invoke(*COMMAND, "--json", file)
    assert ran.exit_code == 0, ran.output
    kept = json.loads(file.read_text())
    assert len(kept["invocations"]) == 2
    assert {row["invocation"] for row in kept["rows"]} == {1}
    rows = {row["settings"]["method"]: row for row in kept["rows"]}
    names = "exact", "dynamiq:5", "f32", SHARDED, FSDP
    assert set(rows) == set(names)
    exact, ours, f32, sharded, fsdp = (rows[name] for name in names)
    assert exact["summary"]["validation"] == {"percent": 0.0, "error": 0.0}
    assert abs(f32["summary"]["validation"]["percent"]) < 1e-3
    ratio = np.divide(ours["validation_loss"], exact["validation_loss"])
    found = ours["summary"]["validation"]
    assert found["percent"] == pytest.approx(100 * (ratio.mean() - 1))
    assert found["error"] == pytest.approx(100 * np.abs(ratio[0] - ratio[1]) / 2)
    # Far less than seeds differ among each other: the runs are paired.
    assert 1e-4 < np.abs(ratio - 1).max() < 0.02 and np.ptp(exact["validation_loss"]) > 1e-3
    assert max(max(row["validation_loss"]) for row in (exact, ours, fsdp, sharded)) < 5.4
    assert exact["bits_per_coord"] == f32["bits_per_coord"] == 32
    assert 5 < ours["bits_per_coord"] < 5.2
    assert fsdp["bits_per_coord"] == sharded["bits_per_coord"] == 8
    apart = {row["summary"]["validation"]["percent"] for row in (ours, fsdp, sharded)}
    assert len(apart) == 3 and 0 < min(map(abs, apart)) and max(map(abs, apart)) < 1


def test_a_training_goes_on_with_nine_tenths_of_the_packets(tmp_path):
    """Losses of gradients' packets move the loss, and by less than 0.8%."""
    file = tmp_path / "rows.json"
    chosen = ["--models", "micro", "--inits", "unit", "--steps", 100]
    ran = invoke(*chosen, "--methods", "f32-packet-loss,packet-loss:5", "--json", file)
    assert ran.exit_code == 0, ran.output
    exact, *lossy = json.loads(file.read_text())["rows"]
    assert max(exact["validation_loss"]) < 4  # it learns: a uniform guess has 5.5
    for row in lossy:
        assert 0 < abs(row["summary"]["validation"]["percent"]) < 0.8


def test_curves_have_means_of_steps_and_none_where_a_run_diverged():
    found = training.figures(np.arange(100.0)[None], np.array([np.nan]))
    assert found["training_loss"] == [[12.0, 37.0, 62.0, 87.0]]
    assert found["validation_loss"] == [None]


def test_differences_are_paired():
    found = training.difference([1.01, 2.04, 3.09], [1.0, 2.0, 3.0])
    assert (found["percent"], found["error"]) == pytest.approx((2.0, 3**-0.5))
    assert training.difference([2.0], [1.0]) == {"percent": 100.0, "error": None}
    assert training.difference([2.0, None], [1.0, 1.0]) == {"percent": None, "error": None}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "tny"], "--models 'tny': pass some of"),
        (["--methods", "dynamique:5"], "method 'dynamique' is not known"),
        (["--methods", "mxfp8", "--topologies", "torus"], "topology 'torus' is not known"),
        (["--methods", "mxfp8/mxfp8/bf16"], "pass GRADIENTS/DIFFERENCES"),
    ],
)
def test_wrong_options_are_refused(arguments, complaint):
    ran = invoke(*arguments)
    output = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", ran.output).split())
    assert ran.exit_code == 2 and complaint in output


# --- Pages ----------------------------------------------------------------------------------------


def test_the_pages_have_the_tables_of_today():
    for path, text in pages.texts().items():
        assert path.read_text() == text, f"{path}: run make figures"


def test_a_classifier_learns_and_rows_are_paired():
    """Images whose bright row is their digit; held-out ones are seen by no step."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 400).astype(np.int32)
    images = np.float32(rng.random((400, 8, 8)) / 10 + (np.arange(8) == labels[:, None])[..., None])
    halves = images[80:], labels[80:], images[:80], labels[:80]
    data = classifier.Digits(*map(jnp.asarray, halves))
    recipe = classifier.Recipe(100, 4, 4e-3, 0)
    exact, psum = classifier.make_ways(["bf16-psum"], ["direct"], recipe)
    with jax.numpy_rank_promotion("allow"):
        first = classifier.row(data, exact, recipe, 2, None)
        again = classifier.row(data, exact, recipe, 2, first)
        narrow = classifier.row(data, psum, recipe, 2, first)
    assert again["losses"] == first["losses"] and first["losses"][0] != first["losses"][1]
    assert again["summary"]["difference"] == {"mean": 0, "error": 0}
    assert min(first["accuracy"]) > 90 and narrow["losses"] != first["losses"]
    paired = np.subtract(narrow["accuracy"], first["accuracy"])
    assert narrow["summary"]["difference"]["mean"] == pytest.approx(paired.mean())
