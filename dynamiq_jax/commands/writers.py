"""Metrics of a run, step by step, into a CSV file or TensorBoard's event files."""

import csv
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
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


class _Writer:
    """The base of writers: process 0 writes, and the others do nothing."""

    prefix = ""
    """The prefix of the names of metrics."""

    def write(self, step: int, metrics: Metrics | None = None, /, **values: Any) -> None:
        """Writes what is known of one step.

        Args:
          step: its number.
          metrics: of `Reduced.metrics`, or `None`.
          **values: other scalars, such as ``loss=loss``: numbers or arrays of one element.
        """
        if jax.process_index() > 0:
            return
        given = {name: float(value) for name, value in values.items()}
        known = {} if metrics is None else scalars(metrics)
        self._write(int(step), given | {self.prefix + name: known[name] for name in known})

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the file."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CSVWriter(_Writer):
    """Writes a CSV file: a column ``step``, then one for every scalar of the first `write`.

    Every row is on disk when `write` returns.

    Args:
      path: the file, which replaces what was there; its folders are made.
      append: whether a file that is there goes on with its own columns, as after a restart.
    """

    def __init__(self, path: str | Path, *, append: bool = False):
        self._path = Path(path)
        self._columns: list[str] = []
        self._file = None
        if jax.process_index() > 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if append and self._path.exists():
            with self._path.open(newline="") as old:
                self._columns = next(csv.reader(old), [])
        self._file = self._path.open("a" if append else "w", newline="")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        assert self._file is not None
        writer = csv.writer(self._file)
        given = ["step", *values]
        if not self._columns:
            self._columns = given
            writer.writerow(given)
        if set(given) != set(self._columns):
            raise ValueError(
                f"{self._path} has the columns {self._columns}, and step {step} was given with "
                f"{given}; write the same scalars in every step (float('nan') for what is not "
                "known), or another file"
            )
        row = {"step": step, **values}
        writer.writerow([row[name] for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardWriter(_Writer):
    """Writes event files for ``tensorboard --logdir``, by tensorboardX (extra ``[tensorboard]``).

    The scalars of `Metrics` are under ``dynamiq/``, as ``dynamiq/vnmse``; others keep their names.

    Args:
      folder: where the event files are written; it is made.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    prefix = "dynamiq/"

    def __init__(self, folder: str | Path):
        self._writer = None
        if jax.process_index() > 0:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter needs tensorboardX: pip install 'dynamiq_jax[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left, and closes the files."""
        if self._writer is not None:
            self._writer.close()
