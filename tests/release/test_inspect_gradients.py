"""examples/inspect_gradients.py: what it says of gradients whose answer is known."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import inspect_gradients

SIZES = {"large": 40_960, "small": 40_960, "norm": 100}


@pytest.fixture
def file(tmp_path):
    """Four workers; one leaf is a hundred times another, and one is too small to compress."""
    rng = np.random.default_rng(0)
    scale = np.repeat([1.0, 0.01, 1.0], list(SIZES.values())).astype(np.float32)
    common = rng.standard_normal(scale.size)
    each = (common + 0.3 * rng.standard_normal((4, scale.size))) * scale
    names, sizes = np.array(list(SIZES)), np.array(list(SIZES.values()))
    target = tmp_path / "grads.npz"
    np.savez(target, gradients=each.astype(np.float32), names=names, sizes=sizes, step=0)
    return target


def invoke(*arguments):
    app = typer.Typer()
    app.command()(inspect_gradients.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_large_leaves_are_wide_and_more_bits_err_less(file, tmp_path):
    ran = invoke(file, "--budgets", "4,6", "--out", tmp_path / "runs")
    assert ran.exit_code == 0, ran.output
    kept = json.loads((tmp_path / "runs" / "gradients.json").read_text())
    for widths in kept["widths"].values():
        assert widths["norm"] == 16 and widths["large"] > widths["small"] + 0.1
    assert kept["widths"]["last"]["large"] > kept["widths"]["first"]["large"]
    four, six = kept["budgets"]
    for name in ("large", "small"):
        assert 1e-5 < six["leaf_errors"][name] < 0.2 * four["leaf_errors"][name] < 0.02
        assert re.search(rf"{name} .* 40,960 .* {four['leaf_errors'][name]:.1e}", ran.output)
    assert four["leaf_errors"]["norm"] < 1e-12
    assert four["wire_bytes"] / six["wire_bytes"] == pytest.approx(4 / 6, rel=0.02)
    assert (tmp_path / "runs" / "gradients.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gradients": np.zeros((1, 81_920 + 100))}, "expected those of two workers or more"),
        ({"sizes": np.array([1, 2])}, "leaves of 3 coordinates in all, and gradients of 82020"),
        ({"names": None}, "has no gradients, names and sizes"),
    ],
)
def test_other_files_are_refused(file, change, complaint):
    with np.load(file) as kept:
        arrays = {**kept, **change}
    np.savez(file, **{name: x for name, x in arrays.items() if x is not None})
    ran = invoke(file)
    assert ran.exit_code == 2
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", ran.output).split())
    assert complaint in text
