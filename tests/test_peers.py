"""Whether GPUs reach each other's memory by the driver, and so whether push kernels run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
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
