"""step_time.py and evidence/time_to_accuracy.py: steps that are timed, and what follows."""

import dataclasses
import json
import math
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "evidence"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import adam_noise
import against_the_clock
import llm_data
import llm_model
import schedule
import step_time
import time_to_accuracy as tta
import train_llm

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
            ran = invoke(step_time.main, *chosen, "--batch", 1, "--json", file)
            assert ran.exit_code == 0, ran.output
    return ran.stdout, json.loads(file.read_text())


class TestStepTime:
    def test_rows_are_those_of_the_methods_and_of_none(self, timed):
        output, kept = timed
        assert len(kept["runs"]) == 2
        none, bf16, five = kept["runs"][-1]["rows"]
        assert [row["method"] for row in (none, bf16, five)] == ["none", *METHODS.split(",")]
        assert [row["topology"] for row in (bf16, five, none)] == ["native", "direct", "native"]
        for row in (bf16, five, none):
            assert row["exposed_ms"] == pytest.approx(row["step_ms"] - none["step_ms"])
            assert 0 < row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
            assert row["tokens"] == 16 and row["n_workers"] == 8 and row["mfu"] is None
            assert row["method"] in output
        shapes = jax.eval_shape(partial(llm_model.init_params, LAYER), jax.random.key(0))
        coords = sum(x.size for x in jax.tree.leaves(shapes))
        of_loss = 2 * 7 / 8 * 4
        assert bf16["wire_bytes"] == 2 * 7 / 8 * 4 * coords + of_loss  # XLA sums in f32 on CPUs
        assert none["wire_bytes"] == of_loss < five["wire_bytes"] < 0.2 * bf16["wire_bytes"]

    def test_random_parameters_have_the_shapes_of_the_model(self):
        mesh = step_time.make_mesh(jax.devices())
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        expected = jax.eval_shape(partial(llm_model.init_params, LAYER), jax.random.key(0))
        made = step_time.random_params(expected, whole)
        assert jax.tree.structure(made) == jax.tree.structure(expected)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
            lambda x: (x.shape, x.dtype), expected
        )

    def test_operations_are_what_xla_counts(self):
        """Where attention is little: XLA multiplies what the mask hides, too."""
        params = llm_model.init_params(LAYER, jax.random.key(0))
        tokens = np.zeros((2, LAYER.seq_len + 1), np.int32)
        grad = jax.jit(jax.grad(llm_model.make_loss(LAYER))).lower(params, tokens).compile()
        counted = grad.cost_analysis()["flops"]
        assert llm_model.training_flops(LAYER, params, 2 * LAYER.seq_len) == pytest.approx(
            counted, rel=0.1
        )

    @pytest.mark.parametrize(("scanned", "together", "count"), [(False, 3, 2), (True, 2, 1)])
    def test_blocks_of_one_function_compute_what_each_would(self, scanned, together, count):
        config = dataclasses.replace(LAYER, n_layers=4)
        shapes = jax.eval_shape(partial(llm_model.init_params, config), jax.random.key(0))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = step_time.random_params(shapes, one)
        tokens = jax.random.randint(jax.random.key(1), (2, LAYER.seq_len + 1), 0, 256)
        alone, grouped = (
            llm_model.make_stages(config, *choice) for choice in ((), (scanned, together))
        )
        assert len(alone.functions) == 4 + 2
        assert len(grouped.functions) == count + 2
        losses = [stages.loss(stages.split(params), tokens) for stages in (alone, grouped)]
        np.testing.assert_allclose(*losses, rtol=1e-6)
        with pytest.raises(ValueError, match="n_layers=4 blocks in a loop with 3 at a time"):
            llm_model.make_stages(config, True, 3)
        with pytest.raises(ValueError, match="together=0 must be at least 1"):
            llm_model.make_stages(config, together=0)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--model", "tny"], "--model 'tny': pass one of tiny"),
            (["--model", "tiny", "--ways", "dynamique:5"], "method 'dynamique' is not known"),
            (["--model", "tiny", "--ways", "mxfp8:5"], "mxfp8 has no choice of bits"),
            (["--model", "tiny", "--ways", "dp:5/8"], "has 2 methods, and dp takes 1"),
            (["--model", "tiny", "--topology", "torus"], "topology 'torus' is not known"),
            (["--model", "tiny", "--attention", "flash"], "pass xla or cudnn"),
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


# --- Against the clock ----------------------------------------------------------------------------


class TestAgainstTheClock:
    def test_it_trains_every_method_on_the_same_text(self, tmp_path, monkeypatch):
        monkeypatch.setitem(llm_model.CONFIGS, "tiny", LAYER)
        file = tmp_path / "clock.json"
        options = ["--batch", 1, "--steps", 40, "--window", 10, "--learning-rate", 1e-2]
        chosen = ["--model", "tiny", "--ways", "bf16-psum,minmax:4", *options, "--json", file]
        ran = invoke(against_the_clock.main, *chosen)
        assert ran.exit_code == 0, ran.output
        ((psum, coded),) = (run["rows"] for run in json.loads(file.read_text())["runs"])
        for row in (psum, coded):
            assert len(row["losses"]) == len(row["seconds"]) == 40
            assert row["seconds"] == sorted(row["seconds"])
            assert row["losses"][0] == pytest.approx(np.log(256), abs=0.2)
            assert np.mean(row["losses"][-10:]) < 4.5
            assert row["validation_loss"] == pytest.approx(row["losses"][-1], abs=1)
            assert row["target_seconds"] == pytest.approx(row["seconds"][-1], rel=0.7)
        assert psum["losses"] != coded["losses"]
        np.testing.assert_allclose(psum["losses"][:5], coded["losses"][:5], rtol=0.05)

    def test_the_target_is_the_mean_of_a_window(self):
        losses, seconds = [9.0, 5.0, 7.0, 3.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]
        run = against_the_clock.Training(
            method="x", seconds=seconds, losses=losses, validation_loss=0.0
        )
        assert against_the_clock.time_to(run, 5.0, 2) == 4.0
        assert against_the_clock.time_to(run, 5.0, 1) == 2.0
        assert against_the_clock.time_to(run, 1.5, 2) is None

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--model", "tny"], "--model 'tny': pass one of tiny"),
            (["--model", "tiny", "--steps", "5"], "--window 25 is more than --steps 5"),
            (["--model", "tiny", "--ways", "mxfp8:5"], "mxfp8 has no choice of bits"),
        ],
    )
    def test_wrong_options_are_refused(self, arguments, complaint):
        ran = invoke(against_the_clock.main, *arguments)
        assert ran.exit_code == 2
        assert complaint in plain(ran.output)


# --- Time to a loss -------------------------------------------------------------------------------


def test_a_curve_crosses_between_two_points():
    steps, losses = np.array([10.0, 20.0, 30.0]), np.array([5.0, 4.0, 2.0])
    assert tta.crossing(steps, losses, 3.0) == 25.0
    assert tta.crossing(steps, losses, 6.0) == 10.0
    assert tta.crossing(steps, losses, 1.0) is None
    bumpy = np.array([3.0, 5.0, 1.0])
    assert tta.crossing(steps, bumpy, 3.0) == 10.0


def curve_row(method, losses, validation, topology="direct", **settings):
    settings = {
        "model": "mid", "init": "unit", "optimiser": "adamw", "topology": topology, "steps": 75,
        "seeds": 2, "text": "x", "learning_rate": 1e-3, "workers": 8, "method": method,
    } | settings  # fmt: skip
    own = [[loss + shift for loss in losses] for shift in (-0.1, 0.1)]
    return {"settings": settings, "training_loss": own, "validation_loss": validation}


def step_row(method, step_ms, transport="shm", model="1b"):
    facts = {"method": method, "step_ms": step_ms, "exposed_ms": step_ms - 50}
    facts |= {"topology": "direct" if "dynamiq" in method else "native"}
    return facts | {"transport": transport, "model": model, "tokens": 3072, "n_workers": 4}


def steps_file(folder, *runs):
    runs = [{"rows": list(rows), "options": {"remat": False}} for rows in runs]
    (folder / "steps.json").write_text(json.dumps({"runs": runs}))


@pytest.fixture
def files(tmp_path):
    """Curves that fall by 1 in 25 steps, or slower; steps of 200 ms with bf16."""
    curves = [
        curve_row("bf16-psum", [4.0, 3.0, 2.0], [2.0, 2.0], topology="native"),
        curve_row("dynamiq:5", [4.0, 3.0, 2.0], [2.0, 2.002]),
        curve_row("dynamiq-dither-axis:3.5", [4.0, 3.0, 1.98], [2.02, 2.02]),
        curve_row("mxfp4", [4.0, 3.5, 3.0], [3.0, 3.0]),
        curve_row("dynamiq:4", [4.0, 3.0, 2.0], [2.0, 2.0], topology="ring"),
        curve_row("dynamiq:5", [9.0, 9.0, 9.0], [9.0, 9.0], optimiser="sgd"),
    ]
    (tmp_path / "curves.json").write_text(json.dumps({"rows": curves}))
    steps_file(
        tmp_path,
        [step_row("bf16-psum", 200.0), step_row("dynamiq:5", 100.0)],
        [step_row("bf16-psum", 200.0), step_row("dynamiq-dither:3.5", 80.0)],
        [step_row("bf16-psum", 60.0, "p2p"), step_row("mxfp4", 55.0, "p2p")],
        [step_row("bf16-psum", 1.0, model="350m")],
    )
    return tmp_path


def results_of(folder, tolerance=0.0):
    curves = tta.read_curves([folder / "curves.json"], "mid", "unit", "direct")
    times = tta.read_times(folder / "steps.json", "1b", "direct")
    return tta.combine(curves, times, tolerance)


class TestCombination:
    def test_time_is_steps_times_time_per_step(self, files):
        found = {(r.transport, r.method): r for r in results_of(files)}
        assert set(found) == {
            ("host memory", "bf16-psum"), ("host memory", "dynamiq:5"),
            ("host memory", "dynamiq-dither-axis:3.5"), ("p2p", "bf16-psum"), ("p2p", "mxfp4"),
        }  # fmt: skip
        assert found["host memory", "bf16-psum"].seconds == pytest.approx(62.5 * 0.2)
        assert found["host memory", "dynamiq:5"].relative == pytest.approx(0.5)
        fewer = found["host memory", "dynamiq-dither-axis:3.5"]
        assert fewer.timed_as == "dynamiq-dither:3.5"
        assert fewer.steps == pytest.approx(37.5 + 25 / 1.02)
        assert fewer.relative == pytest.approx(fewer.steps * 80 / (62.5 * 200))
        assert fewer.loss_percent == pytest.approx(1.0)
        assert fewer.loss_error == pytest.approx(0.0, abs=1e-9)
        assert found["host memory", "dynamiq:5"].loss_percent == pytest.approx(0.05)
        never = found["p2p", "mxfp4"]
        assert never.steps is never.seconds is never.relative is None

    def test_the_fastest_come_first_and_those_that_never_arrive_last(self, files):
        found = results_of(files)
        assert [r.method for r in found if r.transport == "host memory"] == [
            "dynamiq-dither-axis:3.5", "dynamiq:5", "bf16-psum",
        ]  # fmt: skip
        assert [r.method for r in found if r.transport == "p2p"] == ["bf16-psum", "mxfp4"]

    def test_tolerance_raises_the_target(self, files):
        found = {r.method: r for r in results_of(files, tolerance=50.0)}
        assert found["mxfp4"].steps == pytest.approx(62.5)  # 3.0 instead of 2.0
        assert found["bf16-psum"].steps == pytest.approx(37.5)

    def test_the_exact_curve_serves_where_bf16_has_none(self, files):
        rows = json.loads((files / "curves.json").read_text())["rows"][1:]
        rows.append(curve_row("exact", [4.0, 3.0, 2.0], [2.0, 2.0], topology="native"))
        (files / "curves.json").write_text(json.dumps({"rows": rows}))
        found = {(r.transport, r.method): r for r in results_of(files)}
        assert found["host memory", "bf16-psum"].seconds == pytest.approx(12.5)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"model": "huge"}, "no curve of bf16-psum or exact for huge, unit, over direct"),
            ({"step-model": "huge"}, "no step times of huge with bf16-psum"),
        ],
    )
    def test_what_is_missing_is_said(self, files, change, complaint):
        given = {"losses": files / "curves.json", "step-times": files / "steps.json"} | change
        ran = invoke(tta.main, *(f"--{name}={value}" for name, value in given.items()))
        assert ran.exit_code == 2
        assert complaint in plain(ran.output)

    def test_a_run_that_diverged_never_arrives(self, files):
        """`training.py` writes null for what is not finite; one seed has no error."""
        rows = json.loads((files / "curves.json").read_text())["rows"]
        for row in rows:
            for name in ("training_loss", "validation_loss"):
                row[name] = row[name][:1]
        rows[1]["training_loss"][0][2] = rows[1]["validation_loss"][0] = None
        (files / "curves.json").write_text(json.dumps({"rows": rows}))
        given = ["--losses", files / "curves.json", "--step-times", files / "steps.json"]
        ran = invoke(tta.main, *given, "--tolerance", 0)
        assert ran.exit_code == 0, ran.output
        line = next(x for x in ran.output.splitlines() if "dynamiq:5" in x)
        assert "diverged" in line and " - " in line
        rows[0]["training_loss"][0][2] = None
        (files / "curves.json").write_text(json.dumps({"rows": rows}))
        ran = invoke(tta.main, *given)
        assert ran.exit_code == 2 and "bf16-psum diverged" in plain(ran.output)

    def test_steps_that_differ_otherwise_are_refused(self, files):
        row = step_row("bf16-psum", 300.0) | {"tokens": 8192}
        steps_file(files, [step_row("bf16-psum", 200.0)], [row])
        with pytest.raises(ValueError, match="differ in more than methods.*3072.*8192"):
            results_of(files)
        steps_file(files, [step_row("dynamiq:5", 200.0)])
        with pytest.raises(ValueError, match="has no bf16-psum"):
            results_of(files)

    @pytest.mark.parametrize("text", ["{}", "[]", "no JSON", None])
    def test_files_of_something_else_are_refused_by_name(self, files, text):
        (files / "curves.json").unlink()
        if text is not None:
            (files / "curves.json").write_text(text)
        given = ["--losses", files / "curves.json", "--step-times", files / "steps.json"]
        ran = invoke(tta.main, *given)
        assert ran.exit_code == 2
        assert "is no file with 'rows'" in plain(ran.output)

    def test_different_trainings_are_refused(self, files):
        rows = json.loads((files / "curves.json").read_text())["rows"]
        rows.append(curve_row("mxfp8", [4.0], [4.0], steps=25))
        (files / "curves.json").write_text(json.dumps({"rows": rows}))
        with pytest.raises(ValueError, match="curves of different trainings"):
            results_of(files)

    def test_the_command_prints_draws_and_keeps(self, files):
        out = ["--plot", files / "plot.png", "--json", files / "rows.json"]
        given = ["--losses", files / "curves.json", "--step-times", files / "steps.json"]
        ran = invoke(tta.main, *given, *out, "--tolerance", 0)
        assert ran.exit_code == 0, ran.output
        line = next(x for x in ran.output.splitlines() if "dynamiq:5" in x)
        for cell in ("100.0", "62", "50.0%", "+0.05 ± 0.05"):
            assert cell in line
        assert (files / "plot.png").read_bytes().startswith(b"\x89PNG")
        assert len(json.loads((files / "rows.json").read_text())) == 5


# --- Adam's noise ---------------------------------------------------------------------------------


def test_adam_noise_is_that_of_the_errors(monkeypatch):
    """More bits have less; it is the mean of e² / (v + e²)."""
    monkeypatch.setattr(adam_noise, "STEPS", (1, 2))
    ran = invoke(
        adam_noise.main, "--models", "micro", "--inits", "unit", "--seeds", 1,
        "--methods", "f32,dynamiq:8,dynamiq:4",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    rows = [line.split("│")[1:5] for line in ran.output.splitlines() if "direct" in line]
    noise = {name.strip(): float(value) for name, _, _, value in rows}
    assert 0 <= noise["f32"] < 1e-9 < noise["dynamiq:8"] < 1e-2 < noise["dynamiq:4"] < 0.3
    assert math.isfinite(noise["dynamiq:4"])


class TestThePage:
    """docs/time-to-accuracy.md says what the files of its commands hold."""

    results = Path(__file__).parents[2] / "benchmarks" / "evidence" / "results"
    page = (Path(__file__).parents[2] / "docs" / "time-to-accuracy.md").read_text()

    def rows(self, *begin):
        """Cells of the rows whose first cells are these."""
        lines = (line for line in self.page.splitlines() if line.startswith("|"))
        cells = [[c.strip(" *") for c in line.strip("|").split("|")] for line in lines]
        return [row for row in cells if tuple(row[: len(begin)]) == begin]

    names = {
        "bf16-psum": "bf16 psum",
        "bf16": "BF16, hierarchical",
        "bf16-native": "bf16, beside the backward pass",
        "mxfp8": "MXFP8",
        "mxfp6": "MXFP6",
        "mxfp4": "MXFP4",
        "dynamiq-dither:4": "DynamiQ, 4 bits, dither",
        "dynamiq-dither-axis:4": "DynamiQ, 4 bits, dither, scale axis",
        "dynamiq-dither:3.5": "DynamiQ, 3.5 bits, dither",
        "dynamiq-dither-axis:3.5": "DynamiQ, 3.5 bits, dither, scale axis",
        "dynamiq:5": "DynamiQ, 5 bits",
        "thc": "THC",
        "omnireduce": "OmniReduce",
    }

    def found(self, file, topology):
        curves = tta.read_curves(
            [self.results / "time_to_accuracy_losses.json"], "mid", "unit", "direct"
        )
        times = tta.read_times(self.results / file, "1b", topology)
        return tta.combine(curves, times, 0.5)

    @pytest.mark.parametrize(
        ("file", "topology", "links", "more", "rows"),
        [
            ("step_time.json", "direct", "host memory", "", 5),
            ("step_time_nodes.json", "hierarchical", "two nodes, sockets", ", hierarchical", 1),
        ],
    )
    def test_results(self, file, topology, links, more, rows):
        carrier, count = {"two nodes, sockets": "sockets between two nodes"}.get(links, links), 0
        for r in (r for r in self.found(file, topology) if r.transport == carrier):
            name = self.names[r.method] + ("" if r.method == "bf16-psum" else more)
            for row in self.rows(links, name):
                if len(row) < 6:
                    continue
                assert row[2] == f"{r.step_ms:.1f}"
                if r.method != "bf16-psum":
                    count += 1
                    assert row[3] == f"{1 - r.step_relative:.1%}"
                    assert row[4] == (
                        "not reached" if r.seconds is None else f"{1 - r.relative:.1%}"
                    )
                    assert row[5] == f"{r.loss_percent:+.2f} ± {r.loss_error:.2f}".replace("-", "−")
        assert count == {"host memory": 5}.get(links, 1)

    def test_a_pipeline(self):
        kept = json.loads((self.results / "step_time_pipeline.json").read_text())["runs"]
        count = 0
        for run in kept:
            options = run["options"]
            if options["scanned"] or (options["lag"], options["together"]) != (1, 1):
                continue
            psum = next(r for r in run["rows"] if r["method"] == "bf16-psum")
            links = f"{tta.LINKS[psum['transport']]}, 2 GPUs"
            for r in run["rows"]:
                for row in self.rows(links, self.names.get(r["method"], "")):
                    count += 1
                    less = f"{1 - r['step_ms'] / psum['step_ms']:.1%}".replace("-", "−")
                    share = r["hidden_ms"] / r["transfer_ms"]
                    times = [f"{r[name]:.1f}" for name in ("exposed_ms", "transfer_ms")]
                    assert row[2] == f"{r['step_ms']:.1f}"
                    assert row[3].strip("*") == ("" if r is psum else less)
                    assert row[4:] == [*times, f"{share:.0%}"]
        assert count == 12

    @pytest.mark.parametrize(
        ("number", "begin", "methods"),
        [
            (0, "1.1 B, host memory", ("dynamiq:5", "dynamiq-dither:3.5", None)),
            (1, "350 M, host memory", ("dynamiq:5", "dynamiq-dither:3.5", "mxfp6")),
            (2, "350 M, NVLink", ("dynamiq:5", None, None)),
            (3, "1.1 B, sockets", ("dynamiq:5", None, "mxfp8")),
        ],
    )
    def test_other_sizes(self, number, begin, methods):
        run = json.loads((self.results / "step_time_sizes.json").read_text())["runs"][number]
        found = {r["method"]: r for r in run["rows"]}
        (row,) = self.rows(begin)
        psum = found["bf16-psum"]["step_ms"]
        expected = [f"{found['none']['tokens']:,}"]
        expected += [f"{found[name]['step_ms']:.1f}" for name in ("none", "bf16-psum")]
        for method in methods[:2]:
            time = found[method]["step_ms"] if method else 0
            less = 1 - time / psum
            text = f"{time:.1f}, {abs(less):.1%} {'less' if less > 0 else 'more'}"
            expected.append(text if method else "")
        last = methods[2]
        expected.append(f"{self.names[last]} {found[last]['step_ms']:.1f}" if last else "")
        assert row[1:] == expected

    def test_against_the_clock(self):
        (run,) = json.loads((self.results / "against_the_clock.json").read_text())["runs"]
        first = run["rows"][0]
        text = self.page[self.page.index("## Against the clock") :]
        for r in run["rows"]:
            assert len(r["seconds"]) == len(r["losses"]) == 400
            (row,) = re.findall(rf"^\| {re.escape(self.names[r['method']])} \|(.*)\|$", text, re.M)[
                :1
            ]
            found = [cell.strip(" *") for cell in row.split("|")]
            less = 1 - r["target_seconds"] / first["target_seconds"]
            assert found == [
                f"{r['seconds'][-1]:.1f}", f"{r['target_seconds']:.1f}",
                f"{less:.1%}" if less else "", f"{np.mean(r['losses'][-25:]):.3f}",
                f"{r['validation_loss']:.3f}",
            ]  # fmt: skip


# --- The order of a step --------------------------------------------------------------------------

PROGRAM = """
%fused (a: f32[8]) -> f32[8] {
  %gemm.0 = f32[8]{0} dot(%a, %a), metadata={op_name="jit(step)/dot_general"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %gemm.1 = bf16[8]{0} fusion(%p), kind=kCustom, metadata={op_name="jit(step)/jvp/dot_general"}
  %c.1 = (f32[8]{0}) custom-call(%p), metadata={op_name="jit(s)/dynamiq_statistics/pallas_call"}
  %all-reduce-start.1 = bf16[8]{0} all-reduce-start(%c.1), channel_id=1
  %loop_add.3 = f32[8]{0} fusion(%p), kind=kLoop
  %loop_add.4 = f32[8]{0} fusion(%p), kind=kLoop
  %gemm.2 = bf16[8]{0} fusion(%p), kind=kCustom, metadata={op_name="a/transpose(jvp)/dot_general"}
  %all-reduce-done.1 = bf16[8]{0} all-reduce-done(%all-reduce-start.1)
  %t = (f32[8]{0}) custom-call(%p), metadata={op_name="x"}
  %h = u32[8]{0} custom-call(%p), metadata={op_name="s/HOP/pallas_call"}
  ROOT %cp = u32[8]{0} collective-permute(%h), channel_id=2
}
"""


def test_the_order_of_a_program():
    program = PROGRAM.replace("HOP", "dynamiq_decompress_accumulate_recompress")
    (kinds,) = schedule.orders(program)
    assert schedule.short(kinds) == (
        "product statistics all-reduce-start ~*2 product' all-reduce-done ~ hop collective-permute"
    )
    assert schedule.counts(kinds) == (7, 2, 1)
    assert schedule.counts(["~"]) == (1, 0, 0)


def test_without_a_compiler_for_gpus_it_says_what_to_install():
    if any("cuda" in plugin.name for plugin in metadata.entry_points(group="jax_plugins")):
        pytest.skip("there is one")
    ran = invoke(schedule.main, "--layers", 1)
    assert ran.exit_code == 2 and "pip install 'jax[cuda13]'" in plain(ran.output)
