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


def test_numbers_of_workers_train_on_one_batch(tmp_path):
    """Two and eight workers share tokens and start, so exact means end with equal losses."""
    file = tmp_path / "rows.json"
    chosen = ["--models", "micro", "--inits", "unit", "--steps", STEPS, "--global-batch", 8]
    for workers in (2, 8):
        named = ["--methods", "dynamiq:4,bf16-psum", "--topologies", "ring", "--workers", workers]
        ran = invoke(*chosen, *named, "--json", file)
        assert ran.exit_code == 0, ran.output
    two, eight = np.split(np.array(json.loads(file.read_text())["rows"]), 2)
    settings = [[row[0]["settings"][name] for row in (two, eight)] for name in ("workers", "steps")]
    assert settings == [[2, 8], [STEPS, STEPS]]
    assert [rows[0]["settings"]["worker_batch"] for rows in (two, eight)] == [4, 1]
    np.testing.assert_allclose(eight[0]["validation_loss"], two[0]["validation_loss"], rtol=1e-5)
    names = [row["settings"]["method"] for row in eight]
    assert names == ["exact", "bf16-psum", "dynamiq:4"]  # others are told against bf16 psum
    assert "top1_of_bf16" not in eight[0]["summary"]
    assert eight[1]["summary"]["top1_of_bf16"] == {"percent": 100, "low": 100, "high": 100}
    percent = [rows[2]["summary"]["validation"]["percent"] for rows in (two, eight)]
    assert 0 < abs(percent[0]) < abs(percent[1]) < 2  # seven encodings of a ring, and one
    shares = [np.mean(row["top1"]) for row in eight]
    assert 1 / 256 < min(shares) and max(shares) < 0.5


def test_top_1_is_the_share_of_next_tokens_with_the_largest_logit():
    """A text that the model itself continues is predicted everywhere; one other token is not."""
    config = training.MODELS["micro"].config
    params = training.init_params(config, jax.random.key(3))
    forward = jax.jit(training.make_forward(config))
    tokens = np.zeros((2, config.seq_len + 1), np.int32)
    tokens[:, 0] = 10, 200
    for place in range(config.seq_len):
        tokens[:, place + 1] = np.argmax(forward(params, tokens[:, :-1])[:, place], axis=-1)
    score = jax.jit(training.make_score(config))
    loss, top1 = score(params, tokens)
    assert top1 == 1
    assert loss == pytest.approx(float(training.make_loss(config)(params, tokens)), rel=1e-5)
    tokens[1, -1] ^= 1
    assert score(params, tokens)[1] == 1 - 1 / (2 * config.seq_len)


def test_curves_have_means_of_steps_and_none_where_a_run_diverged():
    ended = np.array([np.nan]), np.array([0.5])
    found = training.figures(np.arange(100.0)[None], *ended)
    assert found["training_loss"] == [[12.0, 37.0, 62.0, 87.0]]
    assert found["validation_loss"] == found["top1"] == [None]
    assert training.figures(np.ones((1, 25)), ended[1], ended[1])["top1"] == [0.5]


def test_differences_are_paired():
    found = training.difference([1.01, 2.04, 3.09], [1.0, 2.0, 3.0])
    assert (found["percent"], found["error"]) == pytest.approx((2.0, 3**-0.5))
    assert training.difference([2.0], [1.0]) == {"percent": 100.0, "error": None}
    assert training.difference([2.0, None], [1.0, 1.0]) == {"percent": None, "error": None}


def test_points_are_paired():
    found = training.points([0.51, 0.42, 0.33], [0.5, 0.4, 0.3])
    assert (found["points"], found["error"]) == pytest.approx((2.0, 3**-0.5))
    assert training.points([0.5], [0.25]) == {"points": 25.0, "error": None}
    assert training.points([None, 0.5], [0.5, 0.5]) == {"points": None, "error": None}


def test_ratios_are_paired_and_their_interval_is_of_students_t():
    """The quantile of two degrees of freedom is 4.3027; seeds that differ alike cost nothing."""
    found = training.of_reference([0.495, 0.4, 0.303], [0.5, 0.4, 0.3])
    assert found["percent"] == pytest.approx(100.0)
    half = 4.30265 * 1 / 3**0.5  # ratios of 99, 100 and 101%
    assert (found["low"], found["high"]) == pytest.approx((100 - half, 100 + half), rel=1e-5)
    alike = training.of_reference([0.4995, 0.1998], [0.5, 0.2])
    assert (alike["low"], alike["high"]) == pytest.approx((99.9, 99.9))
    assert training.of_reference([0.25], [0.5]) == {"percent": 50.0, "low": None, "high": None}
    diverged = training.of_reference([None, 0.5], [0.5, 0.5])
    assert diverged == {"percent": None, "low": None, "high": None}


def test_intervals_hold_the_mean_in_95_of_100_draws():
    draws = 1 + 1e-3 * np.random.default_rng(0).normal(size=(1000, 5))
    found = [training.of_reference(own, np.ones(5)) for own in draws]
    held = sum(own["low"] <= 100 <= own["high"] for own in found)
    assert 930 <= held <= 970


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", 3, "--global-batch", 16], "--global-batch 16 does not divide among"),
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
        first = classifier.row(data, exact, recipe, 2, {})
        again = classifier.row(data, exact, recipe, 2, {"exact": first})
        narrow = classifier.row(data, psum, recipe, 2, {"exact": first})
    assert again["losses"] == first["losses"] and first["losses"][0] != first["losses"][1]
    assert again["summary"]["difference"] == {"mean": 0, "error": 0}
    assert min(first["accuracy"]) > 90 and narrow["losses"] != first["losses"]
    paired = np.subtract(narrow["accuracy"], first["accuracy"])
    assert narrow["summary"]["difference"]["mean"] == pytest.approx(paired.mean())
