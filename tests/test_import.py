"""`import dynamiq_jax` loads and shows little, and works without the extra `[cli]`."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dynamiq_jax as dq
from dynamiq_jax import former
from dynamiq_jax.contrib import liec
from dynamiq_jax.core import checks
from dynamiq_jax.methods import base
from dynamiq_jax.topologies import links, schedules

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKED = "import sys; sys.modules[{!r}] = None\n"


def python(code, *arguments):
    """Runs ``code`` in a fresh interpreter, on the CPU."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


FRESH = """
import sys, warnings
sys.modules["rich"] = sys.modules["typer"] = None
import jax, dynamiq_jax as dq
print("loaded:", [name for name in sys.argv[1:] if sys.modules.get(name)])
print(dq.optax.all_reduce)
dq.explain({"weight": jax.ShapeDtypeStruct((2048, 256), "float32")}, 8)
warnings.simplefilter("error")
import pallas_kernels.triton
warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning)
"""


def test_a_fresh_interpreter_loads_little_and_explains_without_rich():
    """Users are not told of what only the kernels can change."""
    heavy = "rich typer matplotlib optax flax dynamiq_jax.__main__".split()
    heavy += [f"dynamiq_jax.commands.{name}" for name in ("bench", "error", "cli")]
    result = python(FRESH, *heavy)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("loaded: []\n<function all_reduce"), result.stdout
    for text in ("['weight']", "2048x256", "compressed, bucket 0", "total"):
        assert text in result.stdout


PUBLIC = """
import builtins, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
native = builtins.__import__

def public(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "").partition(".")[0]
    private = name.startswith("jax._") or name == "jax" and "_src" in (fromlist or ())
    if private and asks in ("dynamiq_jax", "pallas_kernels"):
        raise ImportError(f"{globals['__name__']} imports {name}")
    return native(name, globals, locals, fromlist, level)

builtins.__import__ = public
import jax, optax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import dynamiq_jax as dq
from dynamiq_jax.compression.compression import ByPath

method = dq.Compression(dq.DynamiQ(), min_leaf_size=0, min_bucket_size=0, min_bucket_bytes=0)
params = {"w": jnp.ones((512, 64))}
batch = jnp.ones((8, 512))

def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

def traced(step, specs, *more, kind=AxisType.Auto):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    maps = {"mesh": mesh, "in_specs": (specs, *more, P("data")), "out_specs": specs}
    return mesh, jax.shard_map(step, **maps)

def gradients(params, x):
    return jax.grad(loss_fn)(jax.lax.pcast(params, "data", to="varying"), x)

def all_reduced(params, x):
    return dq.psum(gradients(params, x), "data", compression=method)

def averaged(params, x):
    found = dq.reduce(gradients(params, x), "data", compression=method).tree
    return dq.pmean(gradients(found, x), "data", compression=method)

def scattered(params, x):
    options = {"compression": method, "tiled": True}
    slices = dq.psum_scatter(gradients(params, x), "data", **options)
    return dq.all_gather(slices, "data", to="invarying", **options)

def exchanged(tokens, x):
    return dq.all_to_all(tokens, "data", 0, 0, tiled=True, compression=method)

def gathered(params, x):
    gather = dq.fsdp
    whole = lambda own: gather(own, "data", compression=method, specs=P("data"))
    return jax.grad(lambda own: loss_fn(whole(own), x))(params)

def piped(params, x):
    options = {"compression": method}
    return jax.grad(lambda own: dq.overlapped([loss_fn], own, x, "data", **options))(params)

jax.eval_shape(traced(all_reduced, P())[1], params, batch)
jax.eval_shape(traced(averaged, P())[1], params, batch)
jax.eval_shape(traced(scattered, P())[1], params, batch)
jax.eval_shape(traced(exchanged, P("data"))[1], jnp.ones((4, 512)), batch)
jax.eval_shape(traced(gathered, P("data"))[1], params, batch)
jax.eval_shape(traced(piped, P())[1], [params], batch)
for make in (dq.optax.all_reduce, None):
    mesh = traced(None, P())[0]
    if make:
        optimizer = optax.chain(make("data", compression=method), optax.sgd(0.1))
    else:
        optimizer = dq.optax.sharded(optax.sgd(0.1), "data", compression=method)
    state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(state)

    def step(given, x):
        params, state = given
        updates, state = optimizer.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state
    jax.eval_shape(traced(step, (P(), specs))[1], (params, state), batch)
for kind in AxisType.Auto, AxisType.Explicit:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        own = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P("data")))
        both = dq.value_and_grad(loss_fn, axis_name="data", compression=method)
        jax.eval_shape(jax.jit(both), params, own)
        terms = dq.value_and_grad(loss_fn, axis_name="data", compression=method, unreduced=True)
        total = lambda *args: dq.psum(terms(*args)[1], "data", compression=method)
        jax.eval_shape(jax.jit(total), params, own)
print("public")
"""


@pytest.mark.release
def test_every_way_to_train_lives_on_public_jax():
    """No module of ours imports `jax._src`, neither when it loads nor when it traces."""
    result = python(PUBLIC)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "public\n"


def test_without_optax_it_says_what_to_install(monkeypatch):
    monkeypatch.delattr(dq, "optax", raising=False)
    for name in [name for name in sys.modules if name.startswith("dynamiq_jax.optax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optax", None)  # as if it were not installed
    with pytest.raises(AttributeError, match="dynamiq_jax.optax needs optax: pip install optax"):
        dq.optax  # noqa: B018
    with pytest.raises(AttributeError, match="module 'dynamiq_jax' has no attribute 'opax'"):
        dq.opax  # noqa: B018


@pytest.mark.parametrize("missing", ["optax", "rich", "typer"])
def test_command_says_what_to_install(missing):
    code = BLOCKED.format(missing)
    code += "import runpy; runpy.run_module('dynamiq_jax', run_name='__main__')"
    result = python(code, "--help")
    assert result.returncode == 1
    assert result.stderr == f"dynamiq-jax needs {missing}: pip install 'dynamiq_jax[cli]'\n"


def test_the_version_has_one_source():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", dq.__version__)
    changes = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = [version for version in changes if version != "Unreleased"]
    assert changes[0] == dq.__version__ == cited[1]


def test_completion_shows_the_public_names_alone():
    import dynamiq_jax.commands.bench.contenders  # noqa: F401  # a submodule that becomes an attribute

    shown = [name for name in dir(dq) if not name.startswith("__")]
    assert shown == sorted(dq.__all__)
    assert "__doc__" in dir(dq)
    assert all(hasattr(dq, name) for name in dir(dq))


def test_every_script_of_the_benchmarks_loads():
    folder = ROOT / "benchmarks"
    names = sorted(path.stem for path in folder.glob("*.py"))
    code = f"import sys; sys.path[:0] = ['.', {str(folder)!r}]\n" + "\n".join(
        f"import {name}" for name in names
    )
    result = python(code)
    assert names and result.returncode == 0, result.stderr


FORMER = {
    "dynamiq_jax.commands.copies": ("Copies", dq.hosts.Copies),
    "dynamiq_jax.commands.model_tree": ("save_model_tree", dq.save_model_tree),
    "dynamiq_jax.commands.writers": ("scalars", dq.metrics.scalars),
    "dynamiq_jax.comparators": ("MinMax", dq.contrib.MinMax),
    "dynamiq_jax.fields": ("check_fields", checks.check_fields),
    "dynamiq_jax.optax.liec": (
        "LIECState",
        liec.LIECState,
    ),
    "dynamiq_jax.methods.hops": ("HopMethod", base.HopMethod),
    "dynamiq_jax.topologies.base": ("Stage", schedules.Stage),
    "dynamiq_jax.topologies.xla": ("compiler_options", links.compiler_options),
}
"""Modules of version 0.4, with a name of each and what it is now."""


@pytest.fixture
def forgotten():
    """Former names are as before their first import."""
    for name in [x for x in sys.modules if x.startswith(tuple(FORMER))]:
        del sys.modules[name]
    vars(dq).pop("comparators", None)


def test_every_former_name_has_a_row():
    assert {f"dynamiq_jax.{name}" for name in former.FORMER} == {*FORMER}


@pytest.mark.parametrize("name", FORMER)
@pytest.mark.usefixtures("forgotten")
def test_former_names_warn_once_at_the_line_of_the_user(name):
    with pytest.warns(DeprecationWarning, match=f"{name} is now dynamiq_jax") as found:
        module = importlib.import_module(name)
        importlib.import_module(name)
    wanted, now = FORMER[name]
    assert getattr(module, wanted) is now
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.usefixtures("forgotten")
def test_modules_below_former_names_are_the_ones_of_now():
    """Else a class would be there twice."""
    with pytest.warns(DeprecationWarning, match="comparators is now") as found:
        thc = importlib.import_module("dynamiq_jax.comparators.thc")
    assert len(found) == 1 and thc.THC is dq.contrib.THC


@pytest.mark.usefixtures("forgotten")
def test_the_former_comparators_are_an_attribute():
    with pytest.warns(DeprecationWarning, match="comparators is now dynamiq_jax.contrib"):
        assert dq.comparators is dq.contrib
