"""Metrics in CSV files and in TensorBoard's, and `dynamiq-jax plot`."""

import csv
import math
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import gradient, small
from tensorboardX.proto.event_pb2 import Event
from test_cli import keep_xla_flags, plain  # noqa: F401  # a fixture
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import cli, curves
from dynamiq_jax.commands.writers import CSVWriter, TensorBoardWriter
from dynamiq_jax.methods.metrics import Metrics

PNG = b"\x89PNG"
METRICS = Metrics(
    vnmse=jnp.float32(0.25),
    norm=jnp.float32(9),
    nonfinite=jnp.float32(3),
    saturated=jnp.float32(0),
    widths=jnp.zeros(17).at[jnp.array([4, 6])].set(jnp.array([0.75, 0.25])),
    bits_per_coord=jnp.float32(5),
    wire_bytes=jnp.float32(1e6),
)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder):
    """(step, tag, value) of every scalar; a record is length, checksum, event, checksum."""
    (file,) = folder.iterdir()
    raw, found = file.read_bytes(), []
    while raw:
        (length,) = struct.unpack("<Q", raw[:8])
        event = Event.FromString(raw[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        raw = raw[16 + length :]
    return found


def test_csv_has_a_row_for_every_step_at_once(tmp_path):
    path = tmp_path / "new" / "metrics.csv"
    with CSVWriter(path) as log:
        log.write(0, METRICS, loss=jnp.float32(2.5))
        assert len(read(path)) == 1  # a run that is killed has its rows
        log.write(10, METRICS._replace(vnmse=jnp.float32(np.nan)), loss=1)
    first, second = read(path)
    names = ["vnmse", "norm", "nonfinite", "saturated", "bits_per_coord", "wire_bytes"]
    assert list(first) == ["step", "loss", *names, *(f"width_{w}" for w in range(17))]
    assert [float(first[name]) for name in ("step", "loss", *names)] == [
        0,
        2.5,
        0.25,
        9,
        3,
        0,
        5,
        1e6,
    ]
    assert {n: float(x) for n, x in first.items() if n.startswith("width") and float(x)} == {
        "width_4": 0.75,
        "width_6": 0.25,
    }
    assert (float(second["step"]), float(second["loss"])) == (10, 1)
    assert math.isnan(float(second["vnmse"]))


def test_csv_goes_on_after_a_restart_or_starts_anew(tmp_path):
    path = tmp_path / "metrics.csv"
    for step, append in ((0, True), (1, True), (2, True)):
        with CSVWriter(path, append=append) as log:
            log.write(step, **({"a": 1, "b": 2} if step % 2 else {"b": 2, "a": 1}))
    assert [[float(x) for x in row.values()] for row in read(path)] == [
        [step, 2, 1] for step in range(3)
    ]
    with CSVWriter(path) as log:
        log.write(7, c=1)
    assert read(path) == [{"step": "7", "c": "1.0"}]


def test_csv_refuses_other_columns(tmp_path):
    with CSVWriter(tmp_path / "metrics.csv") as log:
        log.write(7, c=1)
        with pytest.raises(ValueError, match=r"\['step', 'c'\], and step 8 .* \['step', 'd'\]"):
            log.write(8, d=1)
    assert read(tmp_path / "metrics.csv") == [{"step": "7", "c": "1.0"}]


def test_tensorboard_gets_the_same_scalars(tmp_path):
    with TensorBoardWriter(tmp_path) as log:
        log.write(0, METRICS, loss=2.5)
        log.write(5, loss=1.5)
    found = events(tmp_path)
    assert (0, "loss", 2.5) in found
    assert (0, "dynamiq/vnmse", 0.25) in found
    assert (0, "dynamiq/width_4", 0.75) in found
    assert [entry for entry in found if entry[0] == 5] == [(5, "loss", 1.5)]
    assert len(found) == 1 + 6 + 17 + 1


def test_without_tensorboardx_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'dynamiq_jax\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


@pytest.mark.parametrize("writer", [CSVWriter, TensorBoardWriter])
def test_only_process_0_writes(tmp_path, monkeypatch, writer):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with writer(tmp_path / "log") as log:
        log.write(0, METRICS, loss=1)
    assert not list(tmp_path.iterdir())


def test_metrics_of_a_reduction_can_be_written(tmp_path):
    x = gradient(0, 4, 5000)

    def one(x):
        method = small(dq.comparators.MXFP8())
        return dq.reduce(x, "data", method=method, topology=dq.Direct(), metrics=True).metrics

    metrics = jax.tree.map(lambda m: m[0], jax.jit(jax.vmap(one, axis_name="data"))(x))
    with CSVWriter(tmp_path / "metrics.csv") as log:
        log.write(0, metrics)
    (row,) = read(tmp_path / "metrics.csv")
    sent = dq.explain(
        x[0], 4, method=small(dq.comparators.MXFP8()), topology=dq.Direct(), verbose=False
    )
    assert float(row["wire_bytes"]) == pytest.approx(sent.wire_bytes)


# --- dynamiq-jax plot -----------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["plot", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path):
    """Two runs: one of compressed gradients, one with a loss alone."""
    folder = tmp_path / "runs"
    with (
        CSVWriter(folder / "first" / "metrics.csv") as first,
        CSVWriter(folder / "second.csv") as second,
    ):
        for step in range(4):
            error = METRICS._replace(vnmse=jnp.float32(0.125 if step % 2 else np.nan))
            first.write(step, error, loss=2 - step / 10)
            second.write(step, loss=3 - step / 10)
    return folder


def test_plot_draws_all_runs_of_a_folder(runs, tmp_path):
    out = tmp_path / "drawn.png"
    result = invoke(runs, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"loss, vnmse, bits_per_coord of 2 run(s): {out}\n"
    assert out.read_bytes().startswith(PNG)


def test_lines_are_the_numbers_of_the_runs(runs, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: figures.append(a[0]) or save(*a, **k))
    found = curves.read_runs([runs / "second.csv", runs / "first"])
    assert [run.name for run in found] == [str(runs / "second"), str(runs / "first")]
    curves.plot_runs(found, tmp_path / "drawn.svg", ["vnmse", "loss", "width_4"])
    vnmse, loss, width = figures[0].axes
    assert [line.get_xydata().tolist() for line in vnmse.lines] == [[], [[1, 0.125], [3, 0.125]]]
    assert loss.lines[0].get_ydata().tolist() == pytest.approx([3, 2.9, 2.8, 2.7])
    assert loss.lines[1].get_ydata().tolist() == pytest.approx([2, 1.9, 1.8, 1.7])
    assert width.lines[1].get_ydata().tolist() == [0.75] * 4
    assert (vnmse.get_yscale(), loss.get_yscale()) == ("log", "linear")
    assert loss.get_ylabel() == "training loss"
    names = [text.get_text() for text in vnmse.get_legend().get_texts()]
    assert names == [run.name for run in found]


def test_plot_refuses_what_it_cannot_draw(runs, tmp_path):
    def said(*arguments):
        result = invoke(*arguments)
        assert result.exit_code == 2
        return plain(result.output)

    assert "does not exist" in said(tmp_path / "no.csv")
    (tmp_path / "empty").mkdir()
    assert "has no .csv file in it" in said(tmp_path / "empty")
    (tmp_path / "bad.csv").write_text("loss\n1\n")
    assert "1 rows and no column 'step'" in said(tmp_path / "bad.csv")
    (tmp_path / "word.csv").write_text("step,loss\n1,much\n")
    assert "every cell is a number, nan where unknown" in said(tmp_path / "word.csv")
    (tmp_path / "bytes.csv").write_bytes(b"step,loss\n1,\xff\n")
    found = said(tmp_path / "bytes.csv").replace(" ", "")  # long paths are broken anywhere
    assert "bytes.csvisnotaCSVfile" in found
    columns = ["--columns", "loss,speed"]
    assert "no run has a finite number in a column speed; they have" in said(runs, *columns)
    (tmp_path / "nan.csv").write_text("step,loss,vnmse\n1,nan,nan\n2,inf,nan\n")
    for columns in ([], ["--columns", "loss"]):
        assert "no run has a finite number in a column loss" in said(tmp_path / "nan.csv", *columns)
    assert "there is no folder" in said(runs, "--out", tmp_path / "none" / "x.png")
