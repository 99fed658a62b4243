"""Eight CPU devices for every test, one file per test process, bounded memory maps.

Programs are compiled with the least effort, and annotated shapes are checked.
"""

import gc
import importlib.util
import os
from pathlib import Path

import jaxtyping
import pytest
from compiler import FLAGS

if importlib.util.find_spec("beartype"):  # GPU tests do without; `test_shapes` does not
    jaxtyping.install_import_hook(["dynamiq_jax", "pallas_kernels"], "shapes.checked")

SLOW = """
    psum multihost kernels schedules topologies reduce accuracy ring optimized allocation
    every_method wire_bytes drop_in recipes sharded corruption simulate hierarchical bench_error
    training_benchmark cli mx_methods soak meshes train_meshes gradients_on_meshes sequential
    error_feedback scale_axis phases marsit
""".split()
"""Files of more than 20 seconds of a core, in the order in which they start, before all others:
what starts last should be short. `make quick` leaves them out."""

MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
"""XLA on CPU maps memory for every compiled program, and crashes where Linux allows no more: at
65,530 maps of a process."""


def pytest_configure(config):
    """Before JAX starts its backend; what the environment has already stays in force."""
    on_gpu = all("gpu" in Path(argument).parts for argument in config.args)
    if not on_gpu:
        flags = f"{FLAGS} --xla_force_host_platform_device_count=8"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # which no test reads
    gc.set_threshold(200_000, 20, 50)  # tracing makes many objects, and leaves few that are garbage


def pytest_collection_modifyitems(config, items):
    """Marks slow files and, where several processes share the tests, puts them first."""
    order = {f"test_{name}.py": number for number, name in enumerate(SLOW)}
    for item in items:
        if item.path.name in order:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order.get(item.path.name, len(order)))


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

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None
