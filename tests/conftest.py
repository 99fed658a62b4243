"""Eight CPU devices for every test, one file per test process, bounded memory maps, budgets.

Programs are compiled with the least effort, and annotated shapes are checked. JAX refuses to
promote ranks and dtypes, since users may tell it to. Tests in `release/` and tests marked
``release`` run with ``--release``, and only these do.
"""

import gc
import importlib.util
import json
import os
from pathlib import Path

import jaxtyping
import pytest
from budget import FILE, Census
from compiler import FLAGS

if importlib.util.find_spec("beartype"):  # GPU tests do without; `test_shapes` does not
    jaxtyping.install_import_hook(["dynamiq_jax", "pallas_kernels"], "shapes.checked")

MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
"""XLA on CPU maps memory for every compiled program, and crashes where Linux allows no more: at
65,530 maps of a process."""


census = Census()


def pytest_addoption(parser):
    """How `make test-release` and `budget` run the tests."""
    parser.addoption("--release", action="store_true", help="the tests of a release, and no others")
    parser.addoption("--no-budget", action="store_true", help="files may cost what they like")
    parser.addoption("--census", metavar="FILE", help="keep what every file cost, as JSON")


def pytest_configure(config):
    """Before JAX starts its backend; what the environment has already stays in force."""
    kept = config.option.census
    if kept and not kept.endswith(".json"):
        raise pytest.UsageError(
            f"--census={kept} would be overwritten; pass the name of a .json file"
        )
    on_gpu = all("gpu" in Path(argument).parts for argument in config.args)
    if not on_gpu:
        flags = f"{FLAGS} --xla_force_host_platform_device_count=8"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # which no test reads
    os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
    if "JAX_NUMPY_DTYPE_PROMOTION" not in os.environ:  # not in subprocesses, where optax promotes
        import jax

        jax.config.update("jax_numpy_dtype_promotion", "strict")
    gc.set_threshold(200_000, 20, 50)  # tracing makes many objects, and leaves few that are garbage


def pytest_ignore_collect(collection_path, config):
    """Daily tests do without the folder; `None` leaves the rest to pytest."""
    return True if collection_path.name == "release" and not config.option.release else None


def pytest_collection_modifyitems(config, items):
    """Keeps daily tests or those of a release; where processes share them, the dearest file first.

    What starts last should be short.
    """
    wanted = config.option.release

    def release(item):
        return item.path.parent.name == "release" or item.get_closest_marker("release") is not None

    config.hook.pytest_deselected(items=[item for item in items if release(item) != wanted])
    items[:] = [item for item in items if release(item) == wanted]
    if hasattr(config, "workerinput"):
        budgets = json.loads(FILE.read_text())
        items.sort(key=lambda item: -budgets.get(item.path.name, {"seconds": 0})["seconds"])


@pytest.fixture(autouse=True, scope="module")
def within_budget(request):
    """Fails a file, after its last test, that takes more than `budget.json` grants.

    Files of `tests/gpu` have no budget: most of their time is a GPU's compiler.
    """
    tests = sum(item.path == request.path for item in request.session.items)
    census.start(request.path.name, tests)
    yield
    over = census.stop()
    options = request.config.option
    without = options.release or options.no_budget or request.path.parent.name == "gpu"
    if over and not without:
        pytest.fail(over, pytrace=False)


def pytest_sessionfinish(session):
    """Where several processes share the tests, the first one writes down what all of them cost."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["census"] = census.files
    elif session.config.option.census:
        Path(session.config.option.census).write_text(json.dumps(census.files))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Files run in one process each, so that counts of different processes never meet."""
    census.files |= getattr(node, "workeroutput", {}).get("census", {})


@pytest.fixture(autouse=True, scope="module")
def bounded_memory_maps():
    """Lets go of compiled programs after a file that leaves many."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MANY_MAPS:
        import jax

        jax.clear_caches()


@pytest.fixture
def padding_is_free():
    """For tests of small buckets: these are compressed however much padding they have."""
    from cases import without_limit_of_padding

    with without_limit_of_padding():
        yield


@pytest.fixture
def unchecked_shapes():
    """For tests of the library's own errors for shapes that do not fit."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def keep_xla_flags():
    """For tests in whose process the command, or a page's first block, extends XLA_FLAGS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


@pytest.fixture(scope="module")
def dtypes_promoted():
    """For tests that run optax's optimisers, which promote dtypes, in whatever thread."""
    import jax

    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file share compiled functions: keep them in one process, unless told not to."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None
