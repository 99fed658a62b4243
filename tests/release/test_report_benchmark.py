"""evidence/report.py: its tables, the paper's figures beside ours, and figures that are kept."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "evidence"))

import accuracy
import report
import report_measure
import report_published
from report_measure import Row

from dynamiq_jax.commands.bench import error
from dynamiq_jax.commands.simulate import PUBLISHED

OPTIONS = ["--models", "tiny", "--seeds", 2, "--super-groups", 4]
SIZES = (4096, 5000)


def invoke(*arguments):
    app = typer.Typer()
    app.command()(report.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def cells(table, start):
    """The cells of the line of a table that starts with ``start``."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def fakes(monkeypatch):
    """Measuring takes no time and gives figures that tell methods and seeds apart."""
    runs = []

    def vnmse(method, seeds):
        runs.append(method)
        base = {"DynamiQ": 0.002, "MXFP8": 0.005}.get(type(method).__name__, 0.02)
        return [base * (1 + 0.5 * seed) for seed in range(seeds)]

    def fake_measure(method, topology, gradients, seeds):
        return vnmse(method, max(seeds, len(gradients)))

    def fake_error_measure(reduce, gradients, seeds, sizes):
        found = np.asarray(vnmse(reduce.keywords["method"].method, seeds))
        leaves = np.stack([found * 3, found * 7], axis=1)
        return error.Errors(found, leaves, np.ones((seeds, len(sizes))))

    def fake_study(case, seeds):
        runs.append(case)
        return type("Result", (), {"vnmse": 0.5, "lowest": 0.4, "highest": 0.6})

    mixture = np.random.default_rng(0).normal(size=(8, 1024)).astype(np.float32)
    monkeypatch.setattr(report_measure, "lognormal_mixture", lambda *args: mixture)
    monkeypatch.setattr(report_measure, "measure", fake_measure)
    monkeypatch.setattr(error, "measure", fake_error_measure)
    monkeypatch.setattr(report_measure, "study", fake_study)
    return runs


@pytest.fixture
def work(tmp_path):
    """A folder where the model's gradients are known."""
    gradients = np.random.default_rng(1).normal(size=(8, sum(SIZES))).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", gradients=gradients, names=["first", "second"], sizes=SIZES)
    return tmp_path


def test_published_figures_fit_the_rows_they_stand_beside():
    assert set(report_published.BITS) == set(accuracy.BITS)
    assert len(report_published.ABLATION) == len(accuracy.PAPERS_ABLATION)
    for figures in report_published.METHODS.values():
        assert len(figures) == len(report_published.WORKLOADS)
    shown = {s.published for s in report_measure.simulations(8192, 4)}
    assert shown == set(PUBLISHED.values())
    assert {s.published for s in report_measure.simulations(4096, 4)} == {None}


def test_ratios_stand_beside_the_papers():
    rows = [Row(f"{name}, x", None, None) for name in ("DynamiQ", "MXFP8", "THC")]
    rows.insert(1, Row("DynamiQ, default", None, None))
    found = {
        "one": {
            "DynamiQ, x": [1.0, 3.0], "DynamiQ, default": [4.0], "MXFP8, x": [5.0], "THC, x": [3.0]
        }
    }  # fmt: skip
    paper = {"DynamiQ": (1.0, 2.0), "MXFP8": (3.0, 4.0), "THC": (8.0, 16.0)}
    lines = report.ratio_table(rows, found, paper).splitlines()
    assert lines[0] == "| error of | over that of | one | paper |"
    assert lines[2:] == [
        "| MXFP8, x | DynamiQ, x | 2.50 | 2.00–3.00 |",
        "| THC, x | DynamiQ, x | 1.50 | 8.00 |",
        "| MXFP8, x | DynamiQ, default | 1.25 | 2.00–3.00 |",
    ]


def test_report_states_figures_and_draws_no_conclusion(fakes, work):
    out = work / "REPORT.md"
    result = invoke(*OPTIONS, "--work", work, "--out", out)
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert "--models tiny --seeds 2 --workers 8192 --super-groups 4" in text
    assert not re.search(r"asked|reached|missed|above\*|broken|\{\w*\}", text)
    methods = text.split("## Methods")[1].split("## Bits")[0]
    shown = "0.00625 (0.005–0.0075)"
    assert cells(methods, "MXFP8, 8.25 bits | DynamiQ, 5 bits")[2:] == ["2.50", "2.50", "2.15–3.11"]
    assert f"| MXFP8, 8.25 bits | {shown} | {shown} | 0.00299–0.00591 |" in methods
    assert "| MXFP8, 8.25 bits | 0.0437 (0.035–0.0525), second |" in methods
    study = text.split("## Thousands")[1]
    line = cells(study, "ring | DynamiQ, widths 2,4,8,16 | 5")
    assert line[3:] == ["0.5 (0.4–0.6)", "4.76", "0.105"]

    # All figures are kept, and those of the worst leaves' runs serve the table of methods, too.
    kept = json.loads((work / "figures.json").read_text())
    assert len(fakes) == len(kept) - len(report_measure.method_rows()) - 3
    fakes.clear()
    assert invoke(*OPTIONS, "--work", work, "--out", out).exit_code == 0
    assert not fakes
    assert out.read_text() == text


def test_unknown_models_and_figures_of_another_machine_are_refused(work):
    result = invoke("--models", "tiny,huge", "--work", work)
    assert result.exit_code == 2
    assert "--models 'huge'" in result.output
    (work / "figures.json").write_text('{"environment": "another machine"}')
    result = invoke("--models", "tiny", "--work", work)
    assert result.exit_code == 2
    assert "another machine" in result.output
