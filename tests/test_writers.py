"""Metrics in CSV files."""

import csv
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax.commands.writers import CSVWriter
from dynamiq_jax.methods.metrics import Metrics

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


def test_csv_starts_anew_and_keeps_the_order_of_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    for _ in range(2):
        with CSVWriter(path) as log:
            log.write(0, a=1, b=2)
            log.write(1, b=2, a=1)
    assert path.read_text().splitlines() == ["step,a,b", "0,1.0,2.0", "1,1.0,2.0"]


def test_csv_refuses_other_columns(tmp_path):
    with CSVWriter(tmp_path / "metrics.csv") as log:
        log.write(7, c=1)
        with pytest.raises(ValueError, match=r"\['step', 'c'\], and step 8 .* \['step', 'd'\]"):
            log.write(8, d=1)
    assert read(tmp_path / "metrics.csv") == [{"step": "7", "c": "1.0"}]


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with CSVWriter(tmp_path / "log") as log:
        log.write(0, METRICS, loss=1)
    assert not list(tmp_path.iterdir())
