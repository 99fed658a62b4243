"""On a GPU, trainings do without Pallas' Triton lowering, and with the same bits."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import daily
from without_triton import N

import dynamiq_jax as dq
import pallas_kernels as pk
from pallas_kernels import backend
from pallas_kernels._compat import RUNS_MOSAIC, triton

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(not RUNS_MOSAIC, reason="this JAX has too little of Mosaic GPU")


@pytest.mark.skipif(triton() is None, reason="this process has lost Triton")
def test_triton_is_the_default_where_jax_has_it(monkeypatch):
    assert pk.choose_backend(None) == ("triton", None)
    monkeypatch.setattr(backend, "runs_triton", lambda: False)
    assert pk.resolve_backend(None) == "mosaic"


def trained(*backend: str) -> dict:
    """Runs ``tests/without_triton.py``, and returns the object that it prints.

    It loses Triton unless a backend is named.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # This process has taken most of the GPU's memory, and XLA's choice of kernels would differ from
    # process to process.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
    own = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    command = [sys.executable, str(ROOT / "tests/without_triton.py"), "train", *backend]
    ran = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_an_interpreter_without_triton_trains_with_the_same_losses():
    """Sums of statistics are rounded otherwise, so under a plan losses agree to its noise."""
    expected, actual = trained("triton"), trained()
    assert (expected.pop("kernels"), actual.pop("kernels")) == ("triton", "mosaic")
    assert set(actual) == set(expected) >= {"psum", "plan"}
    for way, losses in expected.items():
        assert len(losses) == 10
        if way == "plan":
            np.testing.assert_allclose(actual[way], losses, rtol=0.02)
        else:
            assert actual[way] == losses, way


@pytest.mark.parametrize("leaves", daily([1, 2], [2]))
def test_planned_sums_agree_under_vmap(leaves, monkeypatch):
    """By workers that are mapped on one device, and gradients that each worker maps."""
    monkeypatch.setattr(backend, "runs_triton", lambda: False)
    x = jax.random.normal(jax.random.key(0), (N, leaves, 2**16))

    def summed(x, named):
        method = dq.Compression(dq.DynamiQ(backend=named), min_leaf_size=1, min_bucket_size=1)
        one = partial(dq.psum, axis_name="data", compression=method)
        return jax.jit(jax.vmap(jax.vmap(one), axis_name="data"))(x)

    found, exact = np.asarray(summed(x, None)), np.asarray(x).sum(axis=0)
    assert (found == found[0]).all()
    error = lambda sums: ((sums - exact) ** 2).sum() / (exact**2).sum()
    reference = np.asarray(summed(x, "jnp"))[0]
    assert error(found[0]) == pytest.approx(error(reference), rel=0.05)
