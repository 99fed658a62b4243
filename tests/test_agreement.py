"""Workers that were told different things, or computed them: errors that say what and where."""

import collections
import copy
import dataclasses
import os
import re
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TWO_WIDTHS, over, small
from jax.sharding import PartitionSpec as P
from processes import coordinator, outputs
from workers import auto_mesh, gradient

import dynamiq_jax as dq
from dynamiq_jax.compression import agreement
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.core import fingerprint

TREE = {"w": jnp.ones((300, 400)), "b": jnp.ones(7, jnp.bfloat16)}


class Service:
    """JAX's coordination service, for threads that stand for processes."""

    def __init__(self):
        self.values, self.news = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.news:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.news.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.news:
            if not self.news.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, place):
        return [pair for pair in self.values.items() if pair[0].startswith(f"{place}/")]


class Processes:
    """Threads that stand for processes, on whose devices all of them trace."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.own = monkeypatch, threading.local()
        monkeypatch.delenv("DYNAMIQ_JAX_AGREEMENT", raising=False)
        monkeypatch.setattr(agreement, "_compared", set())
        monkeypatch.setattr(agreement, "_checks", collections.Counter())
        monkeypatch.setattr(agreement, "coordination_client", lambda: self.own.client)
        monkeypatch.setattr(jax, "process_index", lambda: self.own.index)
        monkeypatch.setattr(agreement, "warn", self.warn)

    def warn(self, text):
        self.said[self.own.index] += f"warning: {text}"

    def run(self, *functions, patience=20.0):
        """Errors and warnings of each process; ``service`` carried their messages."""
        self.service, self.said = Service(), [""] * len(functions)
        self.monkeypatch.setattr(jax, "process_count", lambda: len(functions))
        self.monkeypatch.setattr(agreement, "PATIENCE", patience)

        def process(index, function):
            self.own.index, self.own.client = index, copy.copy(self.service)
            try:
                function()
            except Exception as error:
                self.said[index] += f"{type(error).__name__}: {error}"

        threads = [threading.Thread(target=process, args=pair) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.said


@pytest.fixture
def processes(monkeypatch):
    return Processes(monkeypatch)


def check(tree=TREE, axis_name="data", **options):
    """A function that compares what this process is told."""
    request = as_compression(options.pop("compression", None))
    return lambda: request.check_agreement(tree, auto_mesh(), axis_name, **options)


def test_one_process_agrees_with_itself():
    check(key=jax.random.key(1))()


CHEAP = {"compression": dq.Compression(dq.BF16(), topology=dq.Direct())}
OURS = {"w": jnp.ones((8, 16))}


def traces(collective=dq.reduce, tree=OURS, n=8, **options):
    """A function that traces a collective over a mesh of n devices, and runs nothing."""
    maps = {"mesh": auto_mesh(n), "in_specs": P(), "out_specs": P(), "check_vma": False}

    def trace():  # a new function every time: what another thread has traced is there already
        mapped = jax.shard_map(lambda x: collective(x, "data", **options), **maps)
        jax.eval_shape(mapped, tree)

    return trace


LONG = {f"layer_{i:04}": jax.ShapeDtypeStruct((i + 1,), jnp.float32) for i in range(400)}
DIFFERENT = {
    "method": (check(compression=dq.DynamiQ(bits=4.0)), check()),
    "topology": (check(compression=over(dq.Ring())), check()),
    "limits": (check(compression=dq.Compression(dq.DynamiQ(), min_leaf_size=5)), check()),
    "key": (check(key=jax.random.key(2)), check(key=jax.random.key(1))),
    "presence of a key": (check(key=jax.random.key(1)), check()),
    "op": (check(op="sum"), check()),
    "weight": (check(weight=1.0), check()),
    "specs": (check(specs={"w": P("data"), "b": None}), check()),
    "tree": (check({"w": jnp.ones((300, 401)), "b": TREE["b"]}), check()),
    "end of a long tree": (
        check(LONG | {"layer_0399": jax.ShapeDtypeStruct((7,), jnp.float32)}), check(LONG)
    ),
}  # fmt: skip
"""The check of process 2, and that of the others."""
FIRST = {
    "method": (
        {"compression": dq.DynamiQ(bits=4.5)},
        "DynamiQ(bits=5.0)",
        "DynamiQ(bits=4.5)",
    ),
    "op": ({"op": "sum"}, "'mean'", "'sum'"),
    "weight": ({"weight": 2.0}, "none", "given"),
    "metrics": ({"metrics": True}, "False", "True"),
}
"""Rows: what differs in process 2's first reduction, process 0's words for it, process 2's."""
for what, (told, *texts) in FIRST.items():
    base = {"compression": dq.Compression(dq.DynamiQ(), topology=dq.Direct())}
    DIFFERENT[f"first reduction's {what}"] = (traces(**base | told), traces(**base), *texts)
for f in (dq.pmean, dq.psum_scatter, dq.all_gather):
    odd, alike = (traces(f, compression=dq.DynamiQ(bits=bits)) for bits in (4.5, 5))
    DIFFERENT[f"first {f.__name__}'s method"] = odd, alike, "DynamiQ(", "DynamiQ(bits=4.5"


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_named_with_the_process_and_both_values(processes, what):
    """In a check, and in the first call of every collective."""
    odd, alike, *texts = DIFFERENT[what]
    said = processes.run(alike, alike, odd, alike)
    assert len({*said}) == 1
    assert said[0].startswith("RuntimeError: workers would not reduce gradients alike")
    first, last = texts or ("", "")
    parts = f"{what.split()[-1]}: process 0 has ", first, "process 2 has ", last, "on [2]"
    assert re.search(".*".join(map(re.escape, parts)), said[0], re.DOTALL), said[0]
    assert processes.run(alike, alike, alike) == [""] * 3


def test_versions_are_compared():
    rows = [agreement.versions(), agreement.versions() | {"version of jax": "0.0.1"}]
    assert [*agreement.differences(rows)] == ["version of jax"]
    # Of the source that runs: what pip knows of a checkout may be older, or nothing.
    assert rows[0]["version of dynamiq_jax"] == dq.__version__


def test_a_process_without_push_kernels_is_named_before_others_wait_for_it(processes, monkeypatch):
    """As one whose NCCL is older."""
    own = lambda names=(): processes.own.needs
    monkeypatch.setattr(agreement.pk, "needs_of_push", own)

    def process(needs):
        def trace():
            processes.own.needs = needs
            traces()()

        return trace

    said = processes.run(process(None), process("NCCL >= 2.29.2"))
    assert len({*said}) == 1
    assert "push kernels: process 0 has 'run', process 1 has 'do not run'" in said[0]
    assert processes.run(*map(process, ("NCCL >= 2.29.2", "JAX"))) == [""] * 2


def test_what_one_process_refuses_is_an_error_on_all(processes):
    said = processes.run(check(), check(axis_name="chip"))
    assert said[0].startswith("RuntimeError: workers would not reduce gradients alike")
    assert "arguments: process 0 has 'accepted', process 1 has \"ValueError: axis_name" in said[0]
    assert "tree" not in said[0].partition("What differs: ")[2]
    assert said[1].startswith("ValueError: axis_name='chip' is not in the mesh")


def test_a_process_that_never_comes_is_named(processes, monkeypatch):
    monkeypatch.setattr(agreement, "LONG_PATIENCE", 0.2)
    said = processes.run(check(), lambda: None)
    nothing = "RuntimeError: check_agreement compared nothing: process 1 did not come to one within"
    assert said[0].startswith(nothing), said


# --- Sizes of batches -----------------------------------------------------------------------------


def losses_of(*rows, wait=0.0, mesh=None, **options):
    """A function that traces a loss of batches of so many rows, one after the other."""
    mesh = auto_mesh() if mesh is None else mesh
    options |= {"mesh": mesh, "axis_name": "data", "compression": dq.F32()}

    def trace():  # new functions every time, as above
        grad_fn = dq.value_and_grad(lambda w, x: jnp.mean(x @ w), **options)
        for count in rows:
            time.sleep(wait)
            batch = jax.ShapeDtypeStruct((count, 4), jnp.float32)
            if mesh.axis_types[0] == jax.sharding.AxisType.Explicit:
                batch = batch.update(sharding=jax.NamedSharding(mesh, P("data")))
            jax.eval_shape(grad_fn, jnp.ones((4, 4)), batch)

    return trace


@pytest.fixture
def impatient(monkeypatch, processes):
    monkeypatch.setattr(agreement, "SHORT_PATIENCE", 0.5)
    return processes


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_processes_with_batches_of_other_sizes_are_named(impatient, axes):
    """By all of them that compile a program of their own; the others run what they have."""
    mesh = auto_mesh() if axes == "Auto" else jax.make_mesh((8,), ("data",))
    full, short = losses_of(16, mesh=mesh), losses_of(16, 8, mesh=mesh)
    assert impatient.run(full, short, short)[0] == ""
    _, said, again = impatient.run(full, short, short)
    assert said.startswith("warning: processes pass batches of different sizes, each as if all had")
    assert "'x' has shape (8, 4) on process 1, and had (16, 4) on process 0 when" in said
    assert again == said.replace("process 1", "process 2")
    assert ("weight=" in said) == (axes == "Auto")
    assert "" not in impatient.run(losses_of(8, mesh=mesh), full)


def test_batches_of_one_size_are_compared_without_a_word(impatient):
    slow = losses_of(16, 8, 16, wait=0.15)
    assert impatient.run(losses_of(16, 8, 16), slow, slow) == [""] * 3
    weight = lambda w, x: jnp.float32(x.shape[0])
    for options in ({"weight": weight}, {"op": "sum"}, {"mesh": auto_mesh(4)}):
        pair = (losses_of(rows, **options) for rows in (16, 8))
        assert impatient.run(*pair) == ["", ""]
    late = lambda: (time.sleep(0.8), losses_of(16)())  # nothing tells that it is another size
    assert impatient.run(losses_of(16), late) == ["", ""]
    impatient.monkeypatch.setenv("DYNAMIQ_JAX_AGREEMENT", "0")
    assert impatient.run(losses_of(16), losses_of(8)) == ["", ""]


def test_values_of_weights_and_addresses_of_objects_may_differ(processes):
    class Marked(dq.BF16):
        def __repr__(self):
            return f"Marked({object.__repr__(self)})"

    pairs = zip((1.0, jnp.float32(2)), (Marked(), Marked()), strict=True)
    assert processes.run(*(check(weight=w, compression=m) for w, m in pairs)) == ["", ""]


def test_fingerprints_tell_bits_places_and_leaves():
    x = jnp.arange(8.0)
    variants = [(x,), (x.at[3].set(3.0000002),), (x[::-1],), (-x,), (x, x), (x.astype(jnp.int32),)]
    variants += [(jnp.array([0.0]),), (jnp.array([-0.0]),)]
    hashes = [int(fingerprint.fingerprint(tree)) for tree in variants]
    assert len(set(hashes)) == len(hashes)


def reduced(method, x):
    def one(x):
        return dq.psum(x[0], "data", compression=method)

    mapped = jax.shard_map(one, mesh=auto_mesh(), in_specs=P("data"), out_specs=P())
    return jax.jit(mapped)(x)


@pytest.mark.release
def test_debug_checks_change_nothing_where_workers_agree():
    x = gradient(0, 8, 8 * 2048 - 5)
    plain, checked = (
        np.asarray(reduced(small(dataclasses.replace(TWO_WIDTHS.method, debug_checks=debug)), x))
        for debug in (False, True)
    )
    np.testing.assert_array_equal(plain, checked)


# --- The first call of every process --------------------------------------------------------------


def together(*functions):
    return lambda: [function() for function in functions]


ALIKE, OTHER = traces(**CHEAP), traces(tree=TREE, **CHEAP)


def test_later_calls_are_not_compared(processes):
    """A process may trace again, or alone, or something else."""
    functions = together(ALIKE, OTHER, ALIKE), ALIKE
    assert processes.run(*functions, patience=5.0) == ["", ""]
    assert len(processes.service.values) == 3


@pytest.mark.parametrize("first", [(ALIKE, OTHER), (ALIKE, traces(n=8, **CHEAP, tree=[OURS["w"]]))])
def test_processes_that_trace_other_leaves_first_are_warned(processes, first):
    """They may be meant to: one that looks at another program before it trains, or threads."""
    said = processes.run(*first)
    assert said[0] == said[1]
    assert said[0].startswith("warning: the first all-reduce of all processes was not compared")
    assert "tree: process 0 has \"['w']: float32[8, 16]\", process 1 has" in said[0]
    assert "DYNAMIQ_JAX_AGREEMENT=0" in said[0]


@pytest.mark.parametrize("present", [0, 1])
def test_a_process_that_does_not_come_is_waited_for_in_vain_and_not_for_ever(processes, present):
    functions = [lambda: None, lambda: None]
    functions[present] = together(ALIKE, ALIKE)
    said = processes.run(*functions, patience=0.2)
    reason = ("process 1 did not come to one within 0.2 s", "no answer from process 0: DEADLINE")
    assert said[1 - present] == ""
    assert said[present].count("warning: the first all-reduce of all processes was not") == 1
    assert f"compared: {reason[present]}" in said[present]


def vmapped():
    jax.eval_shape(jax.vmap(lambda x: dq.pmean(x, "data"), axis_name="data"), OURS)


NOT_COMPARED = {
    "a loss": (traces(dq.pmean, jnp.float32(1)), lambda: None),
    "some of the devices": (traces(n=4, **CHEAP), lambda: None),
    "vmap": (vmapped, lambda: None),
    "one process": (ALIKE,),
    "turned off": (ALIKE, traces(compression=dq.Compression(dq.BF16(), topology=dq.Ring()))),
}


@pytest.mark.parametrize("what", NOT_COMPARED)
def test_what_is_not_compared(processes, monkeypatch, what):
    """Calls that may differ between processes, and those that the user does not want compared."""
    if what == "turned off":
        monkeypatch.setenv("DYNAMIQ_JAX_AGREEMENT", "0")
    functions = NOT_COMPARED[what]
    assert processes.run(*functions, patience=0.1) == [""] * len(functions)
    assert not processes.service.values


TWO_PROCESSES = """
import sys, time
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import dynamiq_jax as dq

me = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, me, shutdown_timeout_seconds=10)
mesh = jax.make_mesh((2,), ("data",))
step = lambda x: dq.pmean(
    x, "data", compression=dq.Compression(topology=[dq.Direct(), dq.Ring()][me])
)
mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
x = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
start = time.monotonic()
try:
    mapped.lower(x)
except RuntimeError as error:
    print(f"{time.monotonic() - start} s: {error}")
"""


def test_two_processes_with_different_topologies_fail_within_seconds():
    """Processes of the operating system, over loopback, by JAX's own service."""
    address, keep = coordinator(), ("HOME", "PATH")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = outputs([[sys.executable, "-c", TWO_PROCESSES, address, str(i)] for i in range(2)], env)
    for text, _ in said:
        took, error = re.search(r"([\d.]+) s: (workers would not .*)", text).groups()
        assert float(took) < 30, text
        assert re.search(r"topology: process 0 has .Direct\(.*process 1 has .Ring\(", error)
