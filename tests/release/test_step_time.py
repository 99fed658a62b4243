"""step_time.py: steps that are timed."""

import dataclasses
import json
import re

import against_the_clock
import jax
import llm_data
import llm_model
import numpy as np
import pytest
import step_time
import train_llm
import typer
import ways
from rich.console import Console
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
METHODS = "bf16-psum,dynamiq:5"
LAYER = dataclasses.replace(
    llm_model.CONFIGS["tiny"], n_layers=1, dim=64, n_heads=2, n_kv_heads=2, hidden=128, seq_len=16
)


def invoke(main, *arguments):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def plain(text):
    """Error text without the frame and line breaks that a terminal adds."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


# --- Step times -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """The command's file for a model of one layer."""
    file = tmp_path_factory.mktemp("steps") / "steps.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(llm_model.CONFIGS, "tiny", LAYER)
        chosen = ["--model", "tiny", "--ways", f"none,{METHODS}", "--samples", 2, "--steps", 2]
        for _ in range(2):  # rows are added
            options = ["--batch", 1, "--json", file]
            ran = invoke(step_time.main, *chosen, *options)
            assert ran.exit_code == 0, ran.output
    return ran.stdout, json.loads(file.read_text())


class TestStepTime:
    def test_rows_are_those_of_the_methods_and_of_none(self, timed):
        output, kept = timed
        assert [run["options"]["tokens"] for run in kept["runs"]] == [16, 16]
        none, bf16, five = kept["runs"][-1]["rows"]
        assert [row["method"] for row in (none, bf16, five)] == ["none", *METHODS.split(",")]
        for row in (bf16, five, none):
            assert row["exposed_ms"] == pytest.approx(row["step_ms"] - none["step_ms"])
            assert 0 < row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
            assert row["mfu"] is None
            assert row["method"] in output

    def test_programs_alone_run_no_step(self, monkeypatch, tmp_path):
        monkeypatch.setattr(step_time, "measure", None)
        told = ["--ways", METHODS, "--model", "tiny", "--batch", 1, "--compile-only", "--layers", 1]
        file = tmp_path / "rows.json"
        ran = invoke(step_time.main, *told, "--json", file)
        assert ran.exit_code == 0, ran.output
        rows = [row.split() for row in ran.stdout.splitlines() if row.split()[0] in METHODS]
        assert [row[0] for row in rows] == METHODS.split(",")
        assert all(float(figure) > 0 for row in rows for figure in row[2:])
        (run,) = json.loads(file.read_text())["runs"]
        assert [row["method"] for row in run["rows"]] == METHODS.split(",")
        assert run["rows"][0]["compile_s"] == pytest.approx(float(rows[0][-1]), abs=0.06)
        refused = invoke(step_time.main, *told, "--profile", tmp_path)
        assert refused.exit_code == 2 and "runs no step" in plain(refused.output)

    def test_layers_of_a_run_are_those_that_are_told(self):
        for layers, expected in ((5, 5), (None, llm_model.CONFIGS["7b"].n_layers)):
            run = step_time.make_run("7b", batch=1, attention="xla", layers=layers)
            model = run.training.make_model(False, True)
            assert model.shapes[1]["attention"]["q"]["kernel"].shape == (expected, 4096, 4096)

    def test_operations_are_what_xla_counts(self):
        """Where attention is little: XLA multiplies what the mask hides, too."""
        params = llm_model.init_params(LAYER, jax.random.key(0))
        tokens = np.zeros((2, LAYER.seq_len + 1), np.int32)
        grad = jax.jit(jax.grad(llm_model.make_loss(LAYER))).lower(params, tokens).compile()
        counted = grad.cost_analysis()["flops"]
        assert llm_model.training_flops(LAYER, params, 2 * LAYER.seq_len) == pytest.approx(
            counted, rel=0.1
        )

    def test_a_way_that_fails_is_a_line_and_the_others_go_on(self, monkeypatch):
        monkeypatch.setitem(llm_model.CONFIGS, "tiny", LAYER)
        good = ways.KINDS["bf16-zero"]

        def build(*_):
            raise RuntimeError("out of luck")

        monkeypatch.setitem(ways.KINDS, "bf16-zero", good._replace(build=build))
        options = ["--model", "tiny", "--samples", 1, "--steps", 1, "--batch", 1]
        ran = invoke(step_time.main, *options, "--ways", "bf16-zero,bf16-psum")
        assert ran.exit_code == 0
        assert "bf16-zero failed: RuntimeError: out of luck" in plain(ran.output)
        assert "bf16-psum  " in ran.stdout and "bf16-zero  " not in ran.stdout

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--model", "tny"], "--model 'tny': choose one of tiny"),
            (["--model", "tiny", "--ways", "dynamique:5"], "method 'dynamique' is not known"),
            (["--model", "tiny", "--topology", "torus"], "topology 'torus' is not known"),
            (["--model", "tiny", "--attention", "flash"], "choose one of xla, cudnn"),
            (["--model", "tiny", "--json", __file__], "is no file of this command"),
        ],
    )
    def test_wrong_options_are_refused(self, arguments, complaint):
        ran = invoke(step_time.main, *arguments)
        assert ran.exit_code == 2
        assert complaint in plain(ran.output)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_host_waits_for_the_loss_of_so_many_steps_before(ahead):
    """Losses keep their order and none is lost; steps start before earlier losses are read."""
    config = dataclasses.replace(LAYER, vocab_size=256)
    recipe = train_llm.RECIPES["tiny"]._replace(steps=5, batch_size=1, validation_batches=1)
    run = train_llm.Run(
        model=config, recipe=recipe, corpus=llm_data.load_corpus(256), seed=0, measure_every=9,
        mesh=train_llm.make_mesh("data=8"), loss_fn=llm_model.make_loss(config),
        worker_grads=lambda *_: None, console=Console(quiet=True),
    )  # fmt: skip
    events = []

    class Loss:
        def __init__(self, number):
            self.number = number

        def __float__(self):
            events.append(("read", self.number))
            return float(self.number)

    def step(params, opt_state, tokens):
        events.append(("start", opt_state))
        return params, opt_state + 1, Loss(opt_state)

    result = train_llm.Result(method="f32", wire_bytes=0.0, bits_per_coord=32.0)
    train_llm.fit(run, result, step, run.init(), 0, ahead=ahead)
    assert result.losses == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert result.seconds_per_step > 0 and result.mfu is None
    read = events.index(("read", 0))
    assert [event for event in events[:read] if event[0] == "start"] == [
        ("start", i) for i in range(ahead + 1)
    ]


def test_trainings_against_the_clock_start_alike_and_end_at_the_target(monkeypatch, tmp_path):
    monkeypatch.setitem(llm_model.CONFIGS, "tiny", LAYER)
    file = tmp_path / "clock.json"
    options = ["--model", "tiny", "--batch", 1, "--steps", 30, "--links", "none", "--json", file]
    ran = invoke(against_the_clock.main, *options, "--ways", "bf16-psum,none,zero-pipeline:5/2.5")
    assert ran.exit_code == 0, ran.output
    (run,) = json.loads(file.read_text())["runs"]
    bf16, none, sharded = run["rows"]
    assert run["options"]["title"] == "tiny, 30 steps of 16 tokens per worker, 8 x cpu, none"
    assert run["options"]["target"] == pytest.approx(
        1.005 * np.mean(bf16["losses"][-25:]), abs=1e-4
    )
    for row in (bf16, none, sharded):
        assert len(row["losses"]) == 30 and row["seconds"] == sorted(row["seconds"])
        # The second step has the first one's update, at the rate 0.
        assert row["losses"][:2] == pytest.approx(bf16["losses"][:2], abs=2e-3)
    for row in (bf16, sharded):
        means = np.convolve(row["losses"], np.full(25, 1 / 25), "valid")
        first = int(np.argmax(means <= run["options"]["target"]))
        assert row["target_seconds"] == row["seconds"][first + 24]
    assert bf16["losses"][-1] < bf16["losses"][0] - 0.1

    target = round(run["options"]["target"] + 0.5, 2)
    ring = "--ways", "dp:5", "--topology", "ring", "--target", target
    ran = invoke(against_the_clock.main, *options, *ring)
    assert ran.exit_code == 0, ran.output
    _, other = json.loads(file.read_text())["runs"]
    assert (other["options"]["topology"], other["options"]["target"]) == ("ring", target)
    (row,) = other["rows"]
    assert row["losses"][-1] != bf16["losses"][-1]
    means = np.convolve(row["losses"], np.full(25, 1 / 25), "valid")
    assert row["target_seconds"] == row["seconds"][int(np.argmax(means <= target)) + 24]
