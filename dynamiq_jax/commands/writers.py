"""Metrics of a run, step by step, into a CSV file."""

import csv
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from dynamiq_jax.methods.metrics import Metrics


def scalars(metrics: Metrics) -> dict[str, float]:
    """The metrics by name: the fields, and ``width_0`` to ``width_16`` for the shares of widths.

    Waits for the step that they are of, as `float` does.
    """
    found = metrics._asdict()
    widths = np.asarray(found.pop("widths"))
    values = {name: float(value) for name, value in found.items()}
    return values | {f"width_{width}": float(share) for width, share in enumerate(widths)}


class CSVWriter:
    """Writes a CSV file: a column ``step``, then one for every scalar of the first `write`.

    Process 0 writes, and the others do nothing. Every row is on disk when `write` returns.

    Args:
      path: the file, which replaces what was there; its folders are made.
    """

    def __init__(self, path: str | Path):
        self._columns: list[str] = []
        self._file = None
        if jax.process_index() == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("w", newline="")  # noqa: SIM115  # `close` closes it

    def write(self, step: int, metrics: Metrics | None = None, /, **values: Any) -> None:
        """Writes what is known of one step.

        Args:
          step: its number.
          metrics: of `Reduced.metrics`, or `None`.
          **values: other scalars, such as ``loss=loss``: numbers or arrays of one element.

        Raises:
          ValueError: the scalars are not those of the columns.
        """
        if self._file is None:
            return
        row = {"step": int(step)} | {name: float(value) for name, value in values.items()}
        row |= {} if metrics is None else scalars(metrics)
        writer = csv.writer(self._file)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(row)
        if set(row) != set(self._columns):
            raise ValueError(
                f"{self._file.name} has the columns {self._columns}, and step {step} was given "
                f"with {list(row)}; write the same scalars in every step (float('nan') for what "
                "is not known), or another file"
            )
        writer.writerow([row[name] for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
