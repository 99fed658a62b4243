"""Eight CPU devices for every test, one file per test process, bounded memory maps.

Programs are compiled with the least effort (`FLAGS`), and annotated shapes are checked as they run.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jaxtyping
import pytest

FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_force_host_platform_device_count=8",
]
"""Compilation takes most of the time of tests; results have the same bits (`test_optimized`)."""
if importlib.metadata.version("jaxlib") < "0.11":  # newer XLA refuses it
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")

# Must be set before jax is imported; what is set already stays in force.
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

if importlib.util.find_spec("beartype"):  # GPU tests do without; `test_shapes` does not
    jaxtyping.install_import_hook(["dynamiq_jax", "pallas_kernels"], "shapes.checked")

MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
"""XLA on CPU maps memory for every compiled program, and crashes where Linux allows no more: at
65,530 maps of a process."""


@pytest.fixture(autouse=True, scope="module")
def bounded_memory_maps():
    """Lets go of compiled programs after a file that leaves many."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MANY_MAPS:
        import jax

        jax.clear_caches()


@pytest.fixture
def unchecked_shapes():
    """For tests of the library's own errors for shapes that do not fit."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file share compiled functions: keep them in one process, unless told not to."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None
