"""Eight CPU devices for every test, one file per test process, bounded memory maps."""

import os
from pathlib import Path

import pytest

# Must be set before jax is imported; what is set already stays in force.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file share compiled functions: keep them in one process, unless told not to."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None
