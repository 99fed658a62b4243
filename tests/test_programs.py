"""Compiled programs that outlive a process: which ones are loaded, and what they compute."""

import copy
import gc
import os
import pickle
import sys
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import KEPT, coordinator, outputs

import dynamiq_jax as dq
from dynamiq_jax.hosts import load_or_compile, programs


@pytest.fixture
def folder(tmp_path):
    """JAX's cache of compiled programs, for a test."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]

    def configure(values):
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    configure([str(tmp_path / "cache"), 0.0])
    yield tmp_path / "cache"
    configure(before)


def step_of(rate=0.5):
    """A step with a key, whose compilations are counted."""

    def step(state, x):
        noise = jax.random.normal(state["key"], state["w"].shape)
        w = state["w"] - rate * (jnp.tanh(x) @ x.T @ state["w"] + noise)
        return state | {"w": w}, jnp.sum(w)

    return Counted(dq.jit(step, donate_argnums=0))


class Counted:
    """A jitted function that counts how often it is lowered."""

    def __init__(self, jitted):
        self.jitted, self.count, self.clear_cache = jitted, 0, jitted.clear_cache

    def __call__(self, *args):
        return self.jitted(*args)

    def lower(self, *args):
        self.count += 1
        return self.jitted.lower(*args)


def arguments(devices=slice(None)):
    """A state and rows on a mesh of some of the devices."""
    mesh = Mesh(np.array(jax.devices()[devices]), ("data",), axis_types=(AxisType.Auto,))
    x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    w = np.random.default_rng(1).standard_normal((8, 4), np.float32)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = {"key": jax.device_put(jax.random.key(3), whole), "w": jax.device_put(w, whole)}
    return state, jax.device_put(x, rows)


def results(step, arguments):
    state, total = step(*arguments)
    return [np.asarray(state["w"]), np.asarray(total)]


@pytest.mark.parametrize("devices", [slice(None), slice(None, None, -1), slice(2, 4)])
def test_a_loaded_program_computes_the_same_bits(folder, devices):
    """On any devices in any order, and though JAX's own cache had the program before."""
    given = arguments(devices)
    expected = results(step_of(), given)
    donated = [leaf.is_deleted() for leaf in jax.tree.leaves(given)]
    assert any(donated)
    jax.clear_caches()
    first, second = step_of(), step_of()
    assert_same_bits(results(first, arguments(devices)), expected)  # from JAX's cache
    compiled = load_or_compile(first, *arguments(devices), key=0.5)
    assert_same_bits(results(compiled, arguments(devices)), expected)
    jax.clear_caches()
    loaded = load_or_compile(second, *arguments(devices), key=0.5)
    assert_same_bits(results(loaded, given := arguments(devices)), expected)
    assert (first.count, second.count) == (1, 0)
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(given)] == donated


def test_processes_name_a_program_alike(folder):
    """A process waits for the program of this name from the first one, and that for 20 minutes."""
    names = []
    for _ in range(2):
        with programs._empty_cache():
            jax.jit(lambda x: x + 1).lower(np.float32(0)).compile()
            names.append(sorted(os.listdir(jax.config.jax_compilation_cache_dir)))
    assert names[0]
    assert names[0] == names[1]


def test_processes_may_share_what_they_compile(folder):
    """JAX shares programs only where it has a cache, and none that a process found in its own."""
    events, step, given = [], step_of(), arguments()
    results(step, given)  # which JAX's cache now has
    jax.clear_caches()
    given, listen = arguments(), lambda event, **_: events.append(event)
    jax.monitoring.register_event_listener(listen)
    try:
        load_or_compile(step, *given, key=0.5)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert [event.rpartition("/")[2] for event in events].count("cache_misses") == 1
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_another_program_is_not_taken_for_it(folder, monkeypatch):
    """Another key, shape, place, setting, or variable that compilers read."""
    state, x = arguments()
    load = lambda step, *args, key=0: load_or_compile(step, *args, key=key)
    load(step_of(), state, x)
    again = step_of()
    load(again, state, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
    assert again.count == 0
    others = [
        ((state, x), 1), ((state, jnp.concatenate([x, x], axis=1)), 0),
        (arguments(slice(None, None, -1)), 0),
    ]  # fmt: skip
    for args, key in others:
        other = step_of()
        load(other, *args, key=key)
        assert other.count == 1
    with jax.default_matmul_precision("highest"):
        load(precise := step_of(), state, x)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    load(slow := step_of(), state, x)
    assert (precise.count, slow.count) == (1, 1)


def test_processes_may_differ_in_their_host_and_gpu(folder, monkeypatch):
    """Each has a file of its own then, and they agree on what all of them have alike."""
    told = []
    monkeypatch.setattr(programs, "rows_of_all", lambda row: told.append(row) or row[None])
    for host in ("host0", "host1"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        load_or_compile(step_of(), *arguments(), key=0)
    assert len([*folder.glob("dynamiq_jax-*.program")]) == 2
    np.testing.assert_array_equal(*told)


def test_a_key_that_differs_between_processes_is_told(folder, monkeypatch):
    monkeypatch.setattr(programs, "rows_of_all", lambda row: np.stack([row, row + 1]))
    with pytest.warns(UserWarning, match="differ in key, arguments or devices"):
        load_or_compile(step_of(), *arguments(), key=0)


def test_a_changed_source_file_lets_the_step_compile_again(folder, tmp_path, monkeypatch):
    file = tmp_path / "model.py"
    file.write_text("rate = 0.5")
    module = types.ModuleType("model_of_a_test")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    counts = []
    for change in (lambda: None, lambda: None, lambda: file.write_text("rate = 0.25"),
                   lambda: os.utime(file, ns=(0, 0)), file.unlink, lambda: None):  # fmt: skip
        change()
        step = step_of()
        load_or_compile(step, *arguments(), key=0)
        counts.append(step.count)
    assert counts == [1, 0, 1, 1, 1, 0]


def test_a_broken_file_is_named_and_the_step_compiled(folder):
    load_or_compile(step_of(), *arguments(), key=0)
    (file,) = folder.glob("dynamiq_jax-*.program")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=rf"{file}: .*; the step is compiled instead"):
        load_or_compile(step := step_of(), *arguments(), key=0)
    assert step.count == 1
    load_or_compile(step, *arguments(), key=0)
    assert step.count == 1


def test_a_program_that_cannot_be_loaded_is_compiled_by_the_first_call(folder, monkeypatch):
    """Loading goes on beside other work, so that its end is known only then."""
    load_or_compile(step_of(), *arguments(), key=0)
    step, given = step_of(), arguments()
    monkeypatch.setattr(programs, "_load", lambda *_: 1 / 0)
    loaded = load_or_compile(step, *given, key=0)
    assert step.count == 0
    with pytest.warns(UserWarning, match="ZeroDivisionError: .*; the step is compiled instead"):
        found = results(loaded, given)
    assert step.count == 1
    assert_same_bits(results(loaded, arguments()), found)


def test_if_another_process_cannot_load_all_compile(folder, monkeypatch):
    load_or_compile(step_of(), *arguments(), key=0)
    loaded = load_or_compile(step := step_of(), *arguments(), key=0)
    monkeypatch.setattr(programs, "rows_of_all", lambda row: np.stack([row, np.array(False)]))
    results(loaded, arguments())
    assert step.count == 1


def test_a_step_is_loaded_while_the_process_goes_on(folder, monkeypatch):
    """Its attributes are those of the program, too."""
    load_or_compile(step_of(), *arguments(), key=0)
    goes_on, load = threading.Event(), programs._load
    monkeypatch.setattr(programs, "_load", lambda *args: goes_on.wait(60) and load(*args))
    loaded = load_or_compile(step := step_of(), *arguments(), key=0)
    assert not hasattr(loaded, "__jax_array__")
    goes_on.set()
    assert "HloModule" in loaded.as_text()
    assert step.count == 0


def test_a_loaded_program_is_one_of_jaxs(folder, monkeypatch):
    """One process alone may ask for what it says, so that it asks no other one."""
    load_or_compile(step_of(), *arguments(), key=0)
    loaded = load_or_compile(step_of(), *arguments(), key=0)
    monkeypatch.setattr(programs, "rows_of_all", lambda row: 1 / 0)
    assert isinstance(loaded, jax.stages.Compiled)
    assert loaded.args_info[0][1].shape == (8, 16)
    assert loaded.memory_analysis() is not None
    assert serialize_executable.serialize(copy.copy(loaded))
    with pytest.raises(ZeroDivisionError):
        loaded(*arguments())


def test_threads_that_call_a_loaded_step_first_ask_all_processes_once(folder, monkeypatch):
    load_or_compile(step_of(), *arguments(), key=0)
    loaded = load_or_compile(step_of(), *arguments(), key=0)
    asked, totals, given = [], [], [arguments() for _ in range(3)]
    monkeypatch.setattr(programs, "rows_of_all", lambda row: asked.append(row) or row[None])
    monkeypatch.setattr(programs.np, "array", lambda x: time.sleep(0.1) or np.asarray(x))
    threads = [threading.Thread(target=lambda i=i: totals.append(loaded(*given[i])[1]))
               for i in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert len({*map(float, totals)}) == len(totals) - 2 == 1


def test_a_loaded_step_that_is_not_called_yet_keeps_no_arrays(folder):
    """A training may restore into their memory before its first step."""
    load_or_compile(step_of(), *arguments(), key=0)
    given = arguments()
    loaded = load_or_compile(step := step_of(), *given, key=0)
    kept = weakref.ref(given[1])
    del given
    gc.collect()
    assert kept() is None
    results(loaded, arguments())
    assert step.count == 0


def test_what_cannot_be_kept_is_said(folder):
    folder.write_text("no folder")
    with pytest.warns(UserWarning, match="the next start compiles the step again"):
        load_or_compile(step_of(), *arguments(), key=0)


def test_a_key_with_an_address_is_refused(folder):
    with pytest.raises(ValueError, match=r"key=<function .* at 0x.*: an address differs"):
        load_or_compile(step_of(), *arguments(), key=step_of)


def test_without_a_folder_the_step_comes_back(monkeypatch):
    step = step_of()
    assert load_or_compile(step, *arguments(), key=0) is step


PROCESS = """
import os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
address, me, cache = sys.argv[1:]
os.environ["NCCL_HOSTID"] = "host" + me  # processes differ in this, and in local_device_ids
jax.config.update("jax_compilation_cache_dir", cache)
jax.distributed.initialize(address, 2, int(me), local_device_ids=[int(me)])
from dynamiq_jax.hosts import load_or_compile
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.ones((1, 8)), (2, 8))
traced = []
@jax.jit
def step(x):
    traced.append(0)
    return jnp.sum(jnp.sin(x))
step = load_or_compile(step, x, key=0)
if me == "0" and isinstance(step, load_or_compile.__globals__["_Loaded"]):
    step.as_text()  # this process alone
met, total = multihost_utils.process_allgather(np.float32(me)).tolist(), float(step(x))
print(met, len(traced), total)
"""


@pytest.mark.release
def test_processes_load_all_or_none(tmp_path):
    """One that traces may wait for all others to do so."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    caches = [tmp_path / str(i) for i in range(2)]

    def run():
        address = coordinator()
        commands = [[sys.executable, "-c", PROCESS, address, str(i), str(caches[i])]
                    for i in range(2)]  # fmt: skip
        said = [text.splitlines()[-1].rsplit(maxsplit=2) for text, _ in outputs(commands, env)]
        assert len({total for *_, total in said}) == 1
        assert {met for met, *_ in said} == {"[0.0, 1.0]"}
        return [int(count) for _, count, _ in said]

    assert run() == [1, 1]
    assert run() == [0, 0]
    (file,) = caches[1].glob("*.program")
    # It is one, so that both begin to load, and find out later.
    broken = pickle.dumps({}) + pickle.dumps((b"no program", None, None))
    for breaks in (file.unlink, lambda: file.write_bytes(b""), lambda: file.write_bytes(broken)):
        breaks()
        assert run() == [1, 1]
        assert run() == [0, 0]
