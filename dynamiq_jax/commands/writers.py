"""Metrics of a step as numbers, for CSV files and other writers."""

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
