"""benchmarks/evidence: trainings that are paired, and pages that have what the results say."""

import json
import re

import classifier
import finetuned
import jax
import jax.numpy as jnp
import largest
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


def test_missing_rows_alone_are_trained_on_resuming(tmp_path):
    file = tmp_path / "rows.json"
    options = ["--models", "micro", "--inits", "unit", "--json", file, "--resume", "--methods"]
    assert invoke(*options, "bf16-psum", "--steps", 2).exit_code == 0
    first = json.loads(file.read_text())["rows"]
    assert [row["settings"]["method"] for row in first] == ["exact", "bf16-psum"]
    ran = invoke(*options, "bf16-psum,dynamiq:5", "--steps", 2)
    assert ran.exit_code == 0, ran.output
    kept = json.loads(file.read_text())["rows"]
    assert kept[:2] == first and [row["settings"]["method"] for row in kept[2:]] == ["dynamiq:5"]
    assert kept[2]["summary"]["top1_of_bf16"] is not None
    apart = np.divide(kept[2]["validation_loss"], first[0]["validation_loss"])
    assert kept[2]["summary"]["validation"]["percent"] == pytest.approx(100 * (apart.mean() - 1))
    assert invoke(*options, "bf16-psum", "--steps", 3).exit_code == 0  # other rows
    assert len(json.loads(file.read_text())["rows"]) == 5


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


# --- Classifiers ----------------------------------------------------------------------------------


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


# --- A fine-tuned model ---------------------------------------------------------------------------

SOURCE = '''"""A module."""

import os


class Thing:
    """Kept apart.

    Both lines.
    """

    name = "no docstring"

    def run(self): "Short."


async def go():
    """Goes."""
    return os
'''


def test_docstrings_leave_the_code():
    code, docstrings = finetuned.separated(SOURCE)
    assert docstrings == "A module.\n\nKept apart.\n\nBoth lines.\n\nGoes.\n\nShort."
    left = [line.strip() for line in code.splitlines() if line.strip()]
    assert left == ["import os", "class Thing:", 'name = "no docstring"', *left[3:]]
    assert left[3:] == ["async def go():", "return os"]  # its line had the docstring, too


def test_whole_files_are_held_out_up_to_the_limit(monkeypatch):
    texts = {f"file {number}": f"<{number}>" * 50 for number in range(200)}
    train, held = finetuned.split(texts)
    found = [set(re.findall(rb"<(\d+)>", half)) for half in (train, held)]
    assert not found[0] & found[1] and len(found[0] | found[1]) == 200
    assert 20 < len(found[1]) < 60
    assert finetuned.split(dict(reversed(texts.items()))) == (train, held)
    monkeypatch.setattr(finetuned, "MAX_BYTES", 5000)
    few = finetuned.split(texts)
    assert 4500 < sum(map(len, few)) <= 5000 and train.startswith(few[0])


def test_chunks_have_the_text_of_their_class():
    """Token c of class c, and no other one, in batches as in held-out chunks."""
    tokens = tuple(np.full(300 + 10 * kind, kind, np.int32) for kind in range(4))
    texts = finetuned.Texts(tokens, tokens)
    for chunks, labels in (texts.batches(3, (2, 8, 4)), texts.held_out()):
        assert chunks.shape == (*labels.shape, finetuned.CHUNK)
        assert set(labels.flat) == {0, 1, 2, 3}
        np.testing.assert_array_equal(chunks, np.broadcast_to(labels[..., None], chunks.shape))
    again = texts.batches(3, (2, 8, 4))[1]
    np.testing.assert_array_equal(again, texts.batches(3, (2, 8, 4))[1])
    assert not np.array_equal(again, texts.batches(4, (2, 8, 4))[1])


def test_a_fine_tuning_starts_from_the_pretrained_model_and_learns(monkeypatch):
    """Text of even tokens against text of odd ones: a pretrained trunk, and a head of its own."""
    monkeypatch.setattr(finetuned, "HELD_CHUNKS", 64)
    config = training.MODELS["micro"].config
    corpus = training.load_corpus(config.vocab_size)
    first = training.Recipe(30, 4, 4e-3, 0)
    start = finetuned.pretrain(config, first, corpus, 0)
    task = training.Task("micro", training.MODELS["micro"], corpus, training.EIGHT)
    score = jax.jit(training.make_score(config))
    fresh = training.init_params(config, jax.random.key(0))
    losses = [float(score(params, task.validation()[0])[0]) for params in (fresh, start)]
    assert losses[1] < 0.8 * losses[0]
    headed = finetuned.with_classes(start, jax.random.key(1))
    differ = jax.tree.map(lambda x, y: x.shape != y.shape or bool((x != y).any()), headed, start)
    assert sum(jax.tree.leaves(differ)) == 1
    assert headed["head"]["kernel"].shape == (config.dim, len(finetuned.KINDS))

    rng = np.random.default_rng(0)
    tokens = tuple(np.int32(4 * rng.integers(0, 64, 4000) + kind) for kind in range(4))
    texts = finetuned.Texts(tokens, tokens)
    recipe = training.Recipe(40, 4, 4e-3, 0)
    exact, psum = training.make_ways(["bf16-psum"], ["direct"], recipe)
    batches, rows = texts.batches(0, (40, 8, 4)), {}
    for way in (exact, psum):
        trainer = finetuned.make_trainer(config, way, recipe)

        def train(seed, trainer=trainer):
            return trainer(start, np.int32(seed), batches, texts.held_out())

        rows[way.method] = classifier.make_row(way, headed, train, 2, rows)
    found, narrow = rows["exact"], rows["bf16-psum"]
    assert min(found["accuracy"]) > 60 and found["losses"][0] != found["losses"][1]
    assert narrow["summary"]["of_bf16"] == {"percent": 100, "low": 100, "high": 100}
    assert narrow["losses"] != found["losses"]
    assert max(np.abs(np.subtract(narrow["losses"], found["losses"]))) < 0.05


# --- Tables of accuracies -------------------------------------------------------------------------


def trained(method, topology, workers, percent, top1, invocation=0):
    settings = {"model": "mid", "init": "unit", "steps": 400, "global_batch": 64, "seeds": 2}
    settings |= {"platform": "gpu", "method": method, "topology": topology, "workers": workers}
    apart = {"percent": percent, "error": 0.25}, {"points": -percent / 2, "error": 0.125}
    row = {"settings": settings, "bits_per_coord": 5.0, "invocation": invocation, "top1": top1}
    return row | {"summary": dict(zip(("validation", "top1"), apart, strict=True))}


def test_tables_have_rows_of_all_runs_beside_bf16(monkeypatch):
    exact = trained("exact", "native", 8, 0.0, [0.5, 0.5])
    rows = [exact, trained("bf16-psum", "native", 8, 0.0, [0.5, 0.4])]
    rows += [
        trained("dynamiq:5", "ring", workers, workers / 10, [0.49, 0.4]) for workers in (8, 64)
    ]
    other = trained("exact", "native", 8, 0.0, [0.9, 0.9], 1)
    again = trained("exact", "native", 8, 0.0, [0.7, 0.7])
    rows += [again, other, trained("bf16-psum", "native", 8, 0.0, [0.8, 0.8], 1)]
    kept = {"invocations": [{"device": "One"}, {"device": "Two"}], "rows": rows}
    monkeypatch.setattr(pages, "load", lambda file: kept)
    by_workers = pages.workers_table().splitlines()
    assert "|loss, 8|loss, 64|top-1, 8|top-1, 64|" in by_workers[0]
    title = "17 M parameters (`mid`, unit initialisation), 400 steps of 64 sequences, 2 seeds"
    assert by_workers[2] == f"|*{title}, One*|"
    ours = "|**DynamiQ**, `dynamiq:5`|ring|+0.80 ± 0.25|+6.40 ± 0.25|−0.40 ± 0.12|−3.20 ± 0.12|"
    assert by_workers[4] == ours
    assert by_workers[5] == f"|*{title}, Two*|" and len(by_workers) == 7
    kept["rows"] = [row for row in rows if row["settings"]["workers"] == 8]
    top1 = pages.top_1_lines()
    assert len(top1) == 7  # two runs, and the exact mean of the first one is there once
    first = ["exact mean, f32", "5.00", "50.00 ± 0.00", "", "112.50 (-46.33 to 271.33)"]
    assert top1[1] == first
    assert top1[3][2:] == ["44.5 ± 4.5", "−5.5 ± 4.5", "99.00 (86.29 to 111.71)"]


def test_the_largest_model_takes_the_memory_that_there_is():
    rows = [largest.row_of("zero-checkpoint-scanned:5/2.5", n, "xla", model="tiny") for n in (2, 4)]
    third = largest.row_of("zero-checkpoint-scanned:5/2.5", 8, "xla", model="tiny")
    assert rows[0].state_bytes < rows[1].state_bytes < third.state_bytes
    fits = largest.largest(rows, third.memory)
    assert abs(fits / third.parameters - 1) < 0.1  # activations of a small model are uneven
    names = "bf16-psum-checkpoint-scanned", "bf16-zero-checkpoint-scanned"
    whole, split = ([largest.row_of(x, n, "xla", model="tiny") for n in (2, 4)] for x in names)
    assert largest.largest(whole, third.memory) < largest.largest(split, third.memory)
