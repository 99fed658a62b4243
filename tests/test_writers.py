"""Metrics of a step in TensorBoard and in Weights & Biases."""

import numpy as np
import pytest

from dynamiq_jax import metrics
from dynamiq_jax.methods.metrics import Metrics

METRICS = Metrics(
    **{name: float(place) for place, name in enumerate(Metrics._fields) if name != "widths"},
    widths=np.linspace(0, 1, 17, dtype=np.float32),
)
WRITTEN = {f"dynamiq/{name}": value for name, value in metrics.scalars(METRICS).items()}


class Scalars(dict):
    def add_scalar(self, name, value, step):
        self[name, step] = value


class Run(dict):
    def log(self, values, step):
        self |= {(name, step): value for name, value in values.items()}


@pytest.mark.parametrize("writer", [Scalars(), Run()])
def test_every_metric_is_written_with_its_step(writer):
    metrics.log(writer, METRICS, 7)
    assert writer == {(name, 7): value for name, value in WRITTEN.items()}
    assert {"dynamiq/vnmse", "dynamiq/wire_bytes", "dynamiq/width_16"} <= WRITTEN.keys()


def test_another_object_is_refused():
    with pytest.raises(TypeError, match="dict has no add_scalar and no log: pass a SummaryWriter"):
        metrics.log({}, METRICS, 0)


def test_a_file_of_tensorboard_has_the_names(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        metrics.log(writer, METRICS, 7)
    (file,) = tmp_path.iterdir()
    assert all(name.encode() in file.read_bytes() for name in WRITTEN)
