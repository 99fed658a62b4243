"""Curves of runs, from the CSV files that `dynamiq_jax.commands.writers.CSVWriter` writes."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynamiq_jax.commands.bench.tables import require_matplotlib

LABELS = {
    "loss": "training loss",
    "vnmse": "vNMSE",
    "bits_per_coord": "wire bits per coordinate",
    "wire_bytes": "bytes that a worker sends",
}
DEFAULT = ("loss", "vnmse", "bits_per_coord")
LOG_SCALE = ("vnmse", "worst_leaf")


class Curves(NamedTuple):
    """One run."""

    name: str
    columns: dict[str, list[float]]
    """Columns of equal length; NaN stands for an unknown value."""


def read_runs(paths: Sequence[Path]) -> list[Curves]:
    """The runs of files, and of all CSV files in folders, whatever their depth.

    A run is called as its file; ``metrics.csv`` as its folder.

    Raises:
      ValueError: a path is not there, a folder has no CSV file, or a file no column "step".
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(path.rglob("*.csv")) if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):
            what = "has no .csv file in it" if path.is_dir() else "is not there"
            raise ValueError(f"{path} {what}; pass what CSVWriter wrote")
        files += found
    return [Curves(_name(file), _read(file)) for file in files]


def plot_runs(runs: Sequence[Curves], file: Path, columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Draws columns against the step, a line for every run that has them, and names what it drew.

    Args:
      runs: at least one.
      file: the image to write; its suffix says of which kind.
      columns: which; by default those of ``DEFAULT`` that a run has.

    Raises:
      ValueError: no run has finite numbers in one of the columns, or matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    known = {
        name
        for run in runs
        for name, values in run.columns.items()
        if name != "step" and any(map(math.isfinite, values))
    }
    chosen = tuple(columns) or tuple(name for name in DEFAULT if name in known)
    missing = [name for name in chosen if name not in known]
    if missing or not chosen:
        raise ValueError(
            f"no run has a finite number in a column {', '.join(missing or DEFAULT)}; they have "
            f"some in {sorted(known)}"
        )
    figure = Figure(figsize=(5 * len(chosen), 4.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        for run in runs:
            pairs = zip(run.columns["step"], run.columns.get(name, ()), strict=False)
            points = [(step, value) for step, value in pairs if math.isfinite(value)]
            # A run without this column gets an empty line, so that colours stay with runs.
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=run.name)
        axes.set(xlabel="step", ylabel=LABELS.get(name, name))
        positive = any(value > 0 for run in runs for value in run.columns.get(name, ()))
        if name in LOG_SCALE and positive:
            axes.set_yscale("log")
    figure.axes[0].legend()
    figure.savefig(file, dpi=120)
    return chosen


def _name(file: Path) -> str:
    return str(file.parent if file.name == "metrics.csv" else file.with_suffix(""))


def _read(file: Path) -> dict[str, list[float]]:
    try:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not a CSV file: {error}") from error
    if not rows or "step" not in rows[0]:
        raise ValueError(f"{file} has {len(rows)} rows and no column 'step' with a step in each")
    try:
        return {name: [float(row[name]) for row in rows] for name in rows[0]}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}; every cell is a number, nan where unknown") from error
