"""`dq.make_mesh`: GPUs of several hosts are slices, which `jax.make_mesh` refuses."""

import re
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

import dynamiq_jax as dq

ROOT = Path(__file__).parent.parent
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@dataclass(frozen=True)
class Gpu:
    """A device with all that JAX's meshes read."""

    slice_index: int
    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def gpus(*counts):
    """So many GPUs of each slice; their numbers are in the order of slices."""
    owners = [which for which, count in enumerate(counts) for _ in range(count)]
    return [Gpu(which, number) for number, which in enumerate(owners)]


def slices(mesh):
    """The slice of every device, nested as the mesh."""
    return [[device.slice_index for device in row] for row in mesh.devices]


def test_jax_refuses_what_this_is_for():
    """Without this there is nothing to do: `jax.make_mesh` serves."""
    with pytest.raises(ValueError, match="multi-slice"):
        jax.make_mesh((2,), ("data",), devices=gpus(1, 1))


@pytest.mark.parametrize("counts", [(1, 1), (1,) * 4, (2, 2), (8,) * 3, (2, 1), (1, 3, 2)])
def test_one_axis_has_all_gpus_slice_by_slice(counts):
    """Also of hosts with different numbers of GPUs, and in whatever order JAX lists them."""
    devices = gpus(*counts)
    mesh = dq.make_mesh((len(devices),), ("data",), devices=devices[::-1])
    assert list(mesh.devices) == devices
    assert mesh.axis_names == ("data",) and mesh.axis_types == (EXPLICIT,)


@pytest.mark.parametrize(
    "counts, shape, expected",
    [
        ((1, 1), (2, 1), [[0], [1]]),
        ((2, 2), (2, 2), [[0, 0], [1, 1]]),
        ((2, 2), (4, 1), [[0], [0], [1], [1]]),
        ((2, 2), (1, 4), [[0, 0, 1, 1]]),
        ((4, 4), (4, 2), [[0, 0], [0, 0], [1, 1], [1, 1]]),
        ((2,) * 4, (2, 4), [[0, 0, 1, 1], [2, 2, 3, 3]]),
        ((3,) * 4, (3, 4), [[0, 1, 2, 3]] * 3),
        ((1, 2), (3, 1), [[0], [1], [1]]),
    ],
)
def test_outer_axes_are_between_slices(counts, shape, expected):
    devices = gpus(*counts)
    mesh = dq.make_mesh(shape, ("node", "gpu"), (AUTO, EXPLICIT), devices=devices)
    assert slices(mesh) == expected and {*mesh.devices.flat} == {*devices}
    assert mesh.axis_names == ("node", "gpu") and mesh.axis_types == (AUTO, EXPLICIT)


@pytest.mark.parametrize("shape", [(8,), (3,), (2, 4), (1, 2, 2)])
def test_one_slice_is_jax_own(shape):
    """Also of fewer devices than there are."""
    names = tuple("abc"[: len(shape)])
    assert dq.make_mesh(shape, names) == jax.make_mesh(shape, names)
    types = (AUTO,) * len(shape)
    assert dq.make_mesh(shape, names, types) == jax.make_mesh(shape, names, types)
    own = gpus(8)
    assert dq.make_mesh(shape, names, devices=own) == jax.make_mesh(shape, names, devices=own)


def test_fewer_devices_of_several_slices_are_the_first():
    devices = gpus(2, 2, 2)
    mesh = dq.make_mesh((2, 2), ("node", "gpu"), devices=devices)
    assert [*mesh.devices.flat] == devices[:4]


def test_several_axes_of_uneven_slices_are_refused():
    told = r"axes \(3, 2\) of slices .*4 of slice 0, 2 of slice 1.*with 2 devices of each"
    with pytest.raises(ValueError, match=told):
        dq.make_mesh((3, 2), ("node", "gpu"), devices=gpus(4, 2))


def test_more_devices_than_there_are_is_refused():
    told = r"axes \(4, 2\) take 8 devices or more, but there are 2: .* multiply to 2 or less"
    with pytest.raises(ValueError, match=told):
        dq.make_mesh((4, 2), ("node", "gpu"), devices=gpus(1, 1))


@pytest.mark.parametrize(
    "shape, sizes", [((-1,), (8,)), ((-1, 2), (4, 2)), ((2, -1), (2, 4)), ((8, -1), (8, 1))]
)
def test_one_size_may_be_what_is_left(shape, sizes):
    names = ("node", "gpu")[: len(shape)]
    expected = dq.make_mesh(sizes, names, devices=gpus(4, 4))
    assert dq.make_mesh(shape, names, devices=gpus(4, 4)) == expected


@pytest.mark.parametrize(
    "shape, told",
    [
        ((-1, -1), r"axes \(-1, -1\): .* one of them may be -1"),
        ((0, 2), r"axes \(0, 2\): sizes are 1 or more"),
        ((-1, 3), r"axes \(-1, 3\): 8 devices are no multiple of 3; replace -1 by 2 or less"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(shape, told):
    with pytest.raises(ValueError, match=told):
        dq.make_mesh(shape, ("node", "gpu"))


def test_pages_and_scripts_make_meshes_that_hosts_take():
    """No example, page or benchmark calls `jax.make_mesh`, and the library calls it once."""
    files = [ROOT / "README.md"]
    for folder in ("docs", "examples", "benchmarks", "dynamiq_jax"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py")]
    call = re.compile(r"jax\.make_mesh\(")
    calls = {str(path.relative_to(ROOT)): len(call.findall(path.read_text())) for path in files}
    assert {path: n for path, n in calls.items() if n} == {"dynamiq_jax/core/axis.py": 1}
