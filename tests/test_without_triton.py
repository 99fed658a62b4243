"""The day that JAX loses Pallas' Triton lowering: all programs run, and say which kernels do."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import over, small
from compiler import FLAGS
from jax.sharding import PartitionSpec as P
from without_triton import N
from workers import auto_mesh, gradient

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.commands.bench.contenders import parse_method
from pallas_kernels import _compat, backend
from pallas_kernels._compat import RUNS_MOSAIC, runs_triton

ROOT = Path(__file__).parent.parent


def without_triton(task: str) -> dict:
    """Runs ``tests/without_triton.py``, and returns the object that it prints."""
    flags = f"{FLAGS} --xla_force_host_platform_device_count={N}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/without_triton.py"), task]
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.release
def test_trainings_on_cpu_do_without_triton():
    found = without_triton("train")
    assert found.pop("kernels") == "jnp"
    assert set(found) == {"psum", "plan", "MX floats", "sharded"}
    for way, losses in found.items():
        assert len(losses) == 10
        assert losses[-1] < 0.15 * losses[0], way


@pytest.mark.skipif(not RUNS_MOSAIC, reason="this JAX has too little of Mosaic GPU")
def test_programs_for_gpus_have_kernels_of_mosaic_alone():
    found = without_triton("lower")
    assert "kernels of the backend 'mosaic': JAX" in found.pop("explained")
    coding = {
        "psum": ["decompress_accumulate_recompress", "decompress"],
        # Each sink is decoded into the result of the one before, which varies.
        "psum by permutes": ["decompress_accumulate_recompress", "decompress"],
        "psum_scatter": ["decompress_accumulate"],
        "all_gather": ["decompress"],
        # Leaves that are typed as equal on all workers, as JAX types what Mosaic returns, stay.
        "scattered, gathered": ["decompress_accumulate", "decompress"],
        "all_to_all": ["decompress"],
        "sharded": ["decompress_accumulate", "decompress"],
        "MX floats": ["mx_hop", "mx_decode"],
    }
    assert set(found) == set(coding)
    for name, calls in found.items():
        assert "mosaic_gpu_v2" in calls
        assert not [call for call in calls if "triton" in call.lower()]
        kernels = ["mx_encode" if name == "MX floats" else "compress", *coding[name]]
        assert {f"dynamiq_{kernel}" for kernel in kernels} <= set(calls), name


@pytest.fixture
def hopper(monkeypatch):
    """As with a Hopper GPU and a JAX that has lost Triton; arrays remain on the CPU."""
    kind = {"device_kind": "NVIDIA H100", "platform": "gpu"}
    gpu, devices = SimpleNamespace(compute_capability="9.0", **kind), jax.devices
    monkeypatch.setattr(jax, "devices", lambda *kind: devices(*kind) if kind else [gpu])
    monkeypatch.setattr(backend, "_on_nvidia", lambda: True)
    monkeypatch.setattr(backend, "RUNS_MOSAIC", True)
    monkeypatch.setattr(backend, "runs_triton", lambda: False)
    monkeypatch.setattr(backend, "triton", lambda: None)
    return SimpleNamespace(gpu=gpu, setattr=partial(monkeypatch.setattr, backend))


MANY_GROUPS = pk.WireFormat(group_size=8, super_group_size=512)
NO_TRITON = f"JAX {jax.__version__} has no Triton lowering of Pallas kernels"


def test_no_backend_means_the_fastest_that_runs(hopper):
    assert pk.choose_backend(None) == ("mosaic", NO_TRITON)
    assert pk.choose_backend(None, pk.WireFormat()) == ("mosaic", NO_TRITON)
    chosen, why = map(str, pk.choose_backend(None, MANY_GROUPS))
    assert chosen == "jnp"
    assert "up to 32 groups" in why and "has 64 of group_size=8 (pass group_size >= 16)" in why
    for named in ("jnp", "mosaic"):
        assert pk.choose_backend(named) == (pk.resolve_backend(named), None)

    hopper.setattr("RUNS_MOSAIC", False)
    assert pk.resolve_backend(None) == "jnp"
    assert "needs JAX >= 0.11" in str(pk.choose_backend(None).reason)
    hopper.gpu.compute_capability = "8.0"
    assert pk.resolve_backend(None) == "jnp"
    assert "9.0 (Hopper) or later, and these have 8.0" in str(pk.choose_backend(None).reason)
    with pytest.raises(NotImplementedError, match="'mosaic' needs .* have 8.0; pass backend=None"):
        pk.resolve_backend("mosaic")

    hopper.setattr("runs_triton", lambda: True)
    assert pk.choose_backend(None, MANY_GROUPS) == ("triton", None)
    hopper.setattr("_on_nvidia", lambda: False)
    assert pk.choose_backend(None) == ("jnp", None)


@pytest.mark.parametrize("named", ["triton", "interpret"])
def test_named_kernels_of_triton_are_refused(named, hopper):
    remedy = "pass backend=None .the fastest that runs here. or 'jnp'"
    with pytest.raises(NotImplementedError, match=f"{named}.*{NO_TRITON}; {remedy}"):
        pk.resolve_backend(named)


SLOW = dq.DynamiQ(format=dq.Format(group_size=8, super_group_size=512), plan=False)


def test_kernels_of_xla_warn_once_and_give_their_bits(hopper):
    x = gradient(0, N, 2**14)

    def summed(method):
        one = partial(dq.psum, axis_name="data", compression=small(method))
        return jax.vmap(one, axis_name="data")(x)

    with pytest.warns(UserWarning, match=f"kernels that XLA makes.*{NO_TRITON}") as warned:
        found = summed(SLOW)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    named: Any = dataclasses.replace(SLOW, backend="jnp")
    assert_same_bits(np.asarray(found), np.asarray(summed(named)))


def test_explanations_and_rows_name_the_kernels(hopper):
    tree = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    topology = dq.Ring()
    for method, kernels in (
        (dq.DynamiQ(), "mosaic"), (SLOW, "jnp"), (dq.contrib.MXFP8(), "mosaic"),
        (dq.ErrorFeedback(dq.DynamiQ()), "mosaic"), (dq.BF16(), "xla"),
        (dq.DynamiQ(backend="triton"), "triton"),
    ):  # fmt: skip
        found = dq.explain(tree, N, compression=over(topology, method), verbose=False)
        assert found.kernels == kernels, method
        said = f"kernels of the backend {kernels!r}: {NO_TRITON}"
        assert (said in str(found)) == (kernels in ("mosaic", "jnp")), method
    rows = {text: parse_method(text, topology).backend for text in ("dynamiq:5", "mxfp8", "bf16")}
    assert rows == {"dynamiq:5": "mosaic", "mxfp8": "mosaic", "bf16": "xla"}


def test_a_module_without_a_lowering_is_not_taken_for_triton(monkeypatch):
    class CompilerParams:
        """No lowering rule is registered for it."""

    monkeypatch.setattr(_compat, "triton", lambda: SimpleNamespace(CompilerParams=CompilerParams))
    assert not runs_triton.__wrapped__()
    monkeypatch.setattr(_compat, "triton", lambda: None)
    assert not runs_triton.__wrapped__()


@pytest.mark.skipif(RUNS_MOSAIC, reason="this JAX lowers kernels of Triton beside a GPU alone")
def test_triton_is_found_inside_of_a_map():
    found = []

    def one(x):
        found.append(runs_triton.__wrapped__())
        return x

    x = jnp.ones((N, 8))
    jax.eval_shape(
        jax.shard_map(one, mesh=auto_mesh(N), in_specs=P("data"), out_specs=P("data")), x
    )
    assert found == [True]
