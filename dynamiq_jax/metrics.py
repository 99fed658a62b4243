"""The metrics of a step as numbers, for CSV files and other writers."""

from typing import Any

import numpy as np

from dynamiq_jax.methods.metrics import Metrics


def scalars(metrics: Metrics) -> dict[str, float]:
    """The metrics by name: the fields, and ``width_0`` to ``width_16`` for the fractions of widths.

    Waits for the step that computes them, as `float` does.
    """
    found = metrics._asdict()
    widths = np.asarray(found.pop("widths"))
    values = {name: float(value) for name, value in found.items()}
    return values | {f"width_{width}": float(share) for width, share in enumerate(widths)}


def log(writer: Any, metrics: Metrics, step: int) -> None:
    """Writes the metrics of a step, under the names of `scalars` with the prefix ``dynamiq/``.

    ``writer`` is a TensorBoard ``SummaryWriter`` (tensorboardX or PyTorch), which has
    ``add_scalar``, or a run of Weights & Biases, which has ``log``. Waits for the step.

    Raises:
      TypeError: ``writer`` has neither.
    """
    values = {f"dynamiq/{name}": value for name, value in scalars(metrics).items()}
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log"):
        writer.log(values, step=step)
    else:
        raise TypeError(
            f"{type(writer).__name__} has no add_scalar and no log: pass a SummaryWriter of "
            "tensorboardX or the run that wandb.init returned"
        )
