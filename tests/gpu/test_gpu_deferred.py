"""Gradients that stay unreduced on Explicit meshes, on GPUs: the losses of `test_deferred`."""

import jax
import pytest
import test_deferred as cpu
from cases import assert_close

import dynamiq_jax as dq

LOSSES = (
    "masked", "linear penalty", "penalty", "factor", "checkpointed penalty", "parameters alone"
)  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_global_loss(name):
    if (n := jax.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {n}")
    args = cpu.placed(jax.make_mesh((n,), ("data",)))
    f = dq.value_and_grad(cpu.LOSSES[name], axis_name="data", method=cpu.F32)
    with jax.default_matmul_precision("highest"):
        assert_close(jax.jit(f)(*args), cpu.plain(cpu.LOSSES[name]))
