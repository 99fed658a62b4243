"""Whether GPUs reach each other's memory by the driver, and so whether push kernels run."""

import os
from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, push_bytes
from dynamiq_jax.topologies import links
from pallas_kernels import backend, peers


class Driver:
    """As CUDA's driver, whose handles are its numbers of GPUs and 10 more."""

    def __init__(self, **failures):
        self.failures = failures

    def cuInit(self, flags):
        return self.failures.get("init", 0)

    def cuDeviceGet(self, handle, ordinal):
        handle._obj.value = ordinal + 10
        return self.failures.get("get", 0)

    def cuDeviceGetP2PAttribute(self, value, attribute, first, second):
        assert (first.value, second.value) == (12, 13)
        value._obj.value = attribute == 3
        return self.failures.get("attribute", 0)


@pytest.mark.parametrize(("linked", "size", "runs"), [
    ({(0, 1), (1, 0)}, 2, True),
    ({(0, 1), (1, 0)}, 4, False),
    ({(0, 1)}, 2, False),
    (None, 4, True),
])  # fmt: skip
def test_push_kernels_need_nvlink_between_all_gpus(linked, size, runs, monkeypatch):
    """As the driver says; a bridge connects two of four GPUs."""
    monkeypatch.setattr(backend, "_on_nvidia", lambda: True)
    monkeypatch.setattr(backend, "RUNS_MOSAIC", True)
    gpus = [SimpleNamespace(compute_capability="9.0", local_hardware_id=i) for i in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(peers, "_all_connected", peers._all_connected.__wrapped__)
    attribute = (lambda *pair: None) if linked is None else (lambda *pair: int(pair in linked))
    monkeypatch.setattr(peers, "_attribute", attribute)
    assert (pk.needs_of_push() is None) == (linked is None)  # outside of maps: all four
    found = []

    def check(x):
        found.append(pk.needs_of_push(("a",)))
        return x

    mesh = AbstractMesh((size,), ("a",))
    mapped = jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert found == [None if runs else "NVLink between all GPUs, and CUDA reports pairs without it"]


@pytest.mark.parametrize(("driver", "answer"), [
    (Driver(), 1),
    (Driver(init=100), None),
    (Driver(get=101), None),
    (Driver(attribute=1), None),
    (SimpleNamespace(cuInit=lambda flags: 0), None),
    (None, None),
])  # fmt: skip
def test_a_driver_that_cannot_be_asked_says_nothing(driver, answer, monkeypatch):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(peers.ctypes, "CDLL", load)
    assert peers._attribute(2, 3) == answer


@pytest.mark.parametrize(("processes", "linked"), [(1, False), (1, True), (2, False)])
def test_links_of_a_virtual_machine_are_fast_where_the_driver_has_nvlink(
    processes, linked, monkeypatch
):
    """The driver tells nothing of GPUs that belong to other processes."""
    kind = {"platform": "gpu", "device_kind": "NVIDIA H200", "slice_index": 0}
    gpus = [SimpleNamespace(local_hardware_id=i, **kind) for i in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(peers, "_all_connected", lambda ordinals: linked and ordinals == (0, 1))
    assert links.fast_links() == (linked or processes > 1)


@pytest.fixture
def processes(monkeypatch):
    """Makes two processes of one host with an H200 each, except for the facts that are passed."""

    def pretend(nccl=(2, 29, 2), joins=True, per_process=1, shown=2, setting="", **facts):
        monkeypatch.setattr(backend, "_on_nvidia", lambda: True)
        monkeypatch.setattr(backend, "RUNS_MOSAIC", True)
        monkeypatch.setattr(backend, "JOINS_PROCESSES", joins)
        monkeypatch.setattr(peers, "nccl_version", lambda: nccl)
        monkeypatch.setattr(peers, "_package", lambda: ("nvidia-nccl-cu12", None))
        monkeypatch.setattr(peers, "shown", lambda: shown)
        for name in peers._ALONE:
            monkeypatch.delenv(name, raising=False)
        if setting:
            monkeypatch.setenv(*setting.split("="))
        usual = {"device_kind": "NVIDIA H200", "slice_index": 0, "platform": "gpu"}
        usual |= {"compute_capability": "9.0", "core_count": 132}
        gpus = []
        for i in range(2 * per_process):
            own = {name: x[i] if isinstance(x, list) else x for name, x in facts.items()}
            gpus.append(SimpleNamespace(**usual | {"process_index": i // per_process} | own))
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "device_count", lambda: len(gpus))
        monkeypatch.setattr(jax, "devices", lambda *kind: gpus)

    return pretend


BETWEEN = {
    "JAX": ({"joins": False}, f"JAX >= 0.11.2 between processes, and this is {jax.__version__}"),
    "hosts": (
        {"slice_index": [0, 1]},
        "one host or NVLink domain for 2 processes, and JAX reports 2 of them",
    ),
    "unknown hosts": (
        {"slice_index": None},
        "one host or NVLink domain for 2 processes, and JAX reports none",
    ),
    "PCIe": (
        {"device_kind": "NVIDIA H100 PCIe"},
        "NVLink between all GPUs, and NVIDIA H100 PCIe need not have it",
    ),
    "GPUs": (
        {"per_process": 2},
        "one GPU for each of several processes, and 2 have 4; more were not tried",
    ),
    **{
        setting: (
            {"setting": setting},
            f"memory that NCCL shares between processes, and the environment has {setting}",
        )
        for setting in ("NCCL_HOSTID=a", "NCCL_CUMEM_ENABLE=0", "NCCL_WIN_ENABLE=0")
    },
    "a container each": (
        {"shown": 1},
        "all 2 GPUs in sight of every process, and this one is shown 1",
    ),
    "NCCL": (
        {"nccl": (2, 28, 9)},
        "NCCL >= 2.29.2 between processes, and this is 2.28.9 (pip install -U nvidia-nccl-cu12)",
    ),
    "no NCCL": (
        {"nccl": None},
        "NCCL >= 2.29.2 between processes, and there is none (pip install -U nvidia-nccl-cu12)",
    ),
    "nothing": ({}, None),
    "nothing, newer": ({"nccl": (2, 30, 7)}, None),
    "nothing, a driver that is not asked": ({"shown": None}, None),
    "nothing, another value": ({"setting": "NCCL_CUMEM_ENABLE=1"}, None),
    "nothing, next": ({"nccl": (3, 0, 0)}, None),
}


@pytest.mark.parametrize(("facts", "needs"), BETWEEN.values(), ids=BETWEEN.keys())
def test_push_kernels_between_processes_need(facts, needs, processes):
    """And what is missing stands in the error of ``transport="push"``, with a remedy."""
    processes(**facts)
    assert pk.needs_of_push() == needs
    n, found = 2 * facts.get("per_process", 1), []

    def check(x):
        found.append(pk.needs_of_push(("a",)))
        try:
            backend.check_push(("a",))
        except NotImplementedError as error:
            found.append(str(error))
        return x

    mapped = jax.shard_map(check, mesh=AbstractMesh((n,), ("a",)), in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), jnp.float32))
    remedy = "; pass transport='permutes' or 'collectives'"
    assert found == [needs] + ([f"transport='push' needs {needs}{remedy}"] if needs else [])


ALONE = "no sums by push kernels, which need "
CHOICES = {
    "what runs": ({}, "sums of up to 64 MiB by one push kernel for each bucket"),
    "NCCL": ({"nccl": (2, 28, 9)}, ALONE + BETWEEN["NCCL"][1]),
    "a host's name": ({"setting": "NCCL_HOSTID=a"}, ALONE + BETWEEN["NCCL_HOSTID=a"][1]),
    "JAX": ({"joins": False}, ALONE + BETWEEN["JAX"][1]),
    "no comparison": (
        {"setting": "DYNAMIQ_JAX_AGREEMENT=0"},
        f"{ALONE}sums among all 2 GPUs, whose processes compare what they have "
        "(DYNAMIQ_JAX_AGREEMENT is not 0)",
    ),
}


@pytest.mark.parametrize(("facts", "line"), CHOICES.values(), ids=CHOICES.keys())
def test_sums_between_processes_push_where_kernels_run_or_a_line_says_why_not(
    facts, line, processes, monkeypatch
):
    monkeypatch.delenv("DYNAMIQ_JAX_AGREEMENT", raising=False)
    processes(**facts)

    def route(method=None, **told):
        return dq.Compression(method or dq.DynamiQ(), **told).route((2,))

    assert line in route().defaults_of("all-reduce", {})
    assert (route().pushed is not None) == line.startswith("sums of up to")
    assert not any("push" in x for x in route().defaults_of("all-gather", {}))
    # Whoever names a transport has chosen, and a plan needs statistics before the kernel.
    named = route(transport="collectives"), route(topology=dq.Direct(transport="permutes"))
    lines = (x for one in (*named, route(dq.DynamiQ(plan=True))) for x in one.defaults)
    assert not any("one push kernel" in x or x.startswith(ALONE) for x in lines)


def test_explanations_of_sums_between_processes_say_what_nccl_to_install(processes, monkeypatch):
    processes(nccl=(2, 28, 9))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    said = dq.explain(jax.ShapeDtypeStruct((2**25,), jnp.bfloat16), 2, verbose=False)
    assert ALONE + BETWEEN["NCCL"][1] in said.defaults and "collectives" in said.topology


def test_sums_of_some_processes_alone_do_not_push(processes):
    processes()
    (why,) = [x for x in dq.Compression().route((1,)).defaults_of("all-reduce", {}) if "push" in x]
    assert why.startswith(f"{ALONE}sums among all 2 GPUs")


def test_numbers_of_processes_that_were_not_measured_push_if_told(processes):
    assert push_bytes(4) is not None
    processes()
    assert push_bytes(2) == (psum_bytes(2), 2**26) and push_bytes(4) is None
    processes(per_process=2)
    assert not any("push" in x for x in dq.Compression().route((4,)).defaults_of("all-reduce", {}))


class Management:
    """As NVIDIA's management library, which shows three GPUs."""

    def __init__(self, **failures):
        self.failures = failures

    def nvmlInit_v2(self):
        return self.failures.get("init", 0)

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 3
        return self.failures.get("count", 0)


@pytest.mark.parametrize(("library", "shown"), [
    (Management(), 3),
    (Management(init=9), None),
    (Management(count=1), None),
    (SimpleNamespace(), None),
    (None, None),
])  # fmt: skip
def test_gpus_that_the_driver_shows_are_counted(library, shown, monkeypatch):
    def load(name):
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(peers.ctypes, "CDLL", load)
    assert peers.shown.__wrapped__() == shown


class NCCL:
    """As NCCL's library, of version 2.30.7."""

    def __init__(self, failed=0):
        self.failed = failed

    def ncclGetVersion(self, code):
        code._obj.value = 23007
        return self.failed


@pytest.mark.parametrize(("library", "loaded", "package", "version"), [
    (NCCL(), True, "2.28.9", (2, 30, 7)),
    (NCCL(), False, "2.28.9", (2, 28, 9)),
    (NCCL(), False, "2.29.2.post1", (2, 29, 2)),
    (NCCL(), False, None, (2, 30, 7)),
    (NCCL(failed=1), True, "2.28.9", (2, 28, 9)),
    (SimpleNamespace(), False, None, None),
    (None, False, None, None),
])  # fmt: skip
def test_the_nccl_that_is_loaded_counts_before_the_one_that_is_installed(
    library, loaded, package, version, monkeypatch
):
    opened = []

    def load(name, mode):
        assert name == "libnccl.so.2"
        opened.append(mode == os.RTLD_NOLOAD)
        if library is None or opened[-1] and not loaded:
            raise OSError(name)
        return library

    def installed(name):
        if package is None or name != "nvidia-nccl-cu12":
            raise metadata.PackageNotFoundError(name)
        return package

    monkeypatch.setattr(peers.ctypes, "CDLL", load)
    monkeypatch.setattr(peers.metadata, "version", installed)
    monkeypatch.setattr(peers, "_package", peers._package.__wrapped__)
    assert peers.nccl_version() == version
    # JAX would take another library than the package's if this one loaded it first.
    assert opened == ([True] if package else [True, False])
    assert peers.nccl_package() == ("nvidia-nccl-cu12" if package else "nvidia-nccl-cu13")
