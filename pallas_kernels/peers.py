"""Whether GPUs may, and can, reach each other's memory.

The user decides whether they may, by NCCL's environment variables. CUDA's driver knows whether GPUs
of one process can. JAX reports neither. For GPUs of several processes it reports which ones are in
one NVLink domain; their memory is shared by NCCL, so it depends on its version.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

_NEVER = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}
"""NCCL's environment variables, and the values by which GPUs never read each other's memory."""

_ALONE = {"NCCL_HOSTID": (), "NCCL_CUMEM_ENABLE": ("0",), "NCCL_WIN_ENABLE": ("0",)}
"""NCCL's environment variables, and the values (none named: any) by which processes of one host
share no memory."""

_ATOMICS = 3
"""The driver's number for an attribute of two GPUs: each executes atomic operations in the other's
memory, as over NVLink. Over PCIe they only read and write."""

SYMMETRIC_NCCL = 2, 29, 2
"""The first NCCL by which XLA finds the address of another process's memory."""

_WHEELS = "nvidia-nccl-cu13", "nvidia-nccl-cu12"
"""The packages that bring NCCL, the newer one first."""

_WITH_NVLINK = "SXM", "HBM3", "H200", "B200", "B300", "GB200", "GB300", "GH200"
"""Parts of the names of GPUs that are only built with NVLink."""


def disabled() -> str | None:
    """The setting by which the user keeps GPUs from each other's memory; `None`: there is none."""
    return _set_to(_NEVER)


def unshared() -> str | None:
    """The setting by which NCCL shares no memory between processes; `None`: there is none."""
    return _set_to(_ALONE)


def _set_to(settings: Mapping[str, tuple[str, ...]]) -> str | None:
    """The first of some variables that the environment sets to one of its values."""
    for name, values in settings.items():
        value = os.environ.get(name, "").strip()
        if value and value.upper() in (values or (value.upper(),)):
            return f"{name}={value}"
    return None


@functools.cache
def shown() -> int | None:
    """The GPUs that the driver shows to this process; `None` if it cannot be asked.

    A container may show fewer than the host has. ``CUDA_VISIBLE_DEVICES`` does not count here.
    """
    count = ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def built_with_nvlink(device: Any) -> bool:
    """Whether a GPU is of a kind that is only built with NVLink."""
    kind = device.device_kind
    return "PCIe" not in kind and any(name in kind for name in _WITH_NVLINK)


def in_one_domain(devices: Sequence[Any]) -> bool:
    """Whether JAX reports that GPUs of several processes are in one host or NVLink domain."""
    domains = {getattr(device, "slice_index", None) for device in devices}
    return len(domains) == 1 and domains != {None}


def connected(devices: Sequence[Any]) -> bool:
    """Whether NVLink connects all pairs of GPUs; where the driver cannot be asked, it is assumed.

    Args:
      devices: JAX's devices, NVIDIA GPUs of this process.
    """
    return _all_connected(tuple(device.local_hardware_id for device in devices))


@functools.cache
def _all_connected(ordinals: tuple[int, ...]) -> bool:
    """`connected` of GPUs by CUDA's numbers."""
    return all(_attribute(*pair) != 0 for pair in itertools.permutations(ordinals, 2))


def _attribute(first: int, second: int) -> int | None:
    """The driver's answer for `_ATOMICS`; `None` if it cannot be asked."""
    handles, value = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0)
        for handle, ordinal in zip(handles, (first, second), strict=True):
            failed = failed or driver.cuDeviceGet(ctypes.byref(handle), ordinal)
        value_of = driver.cuDeviceGetP2PAttribute
        failed = failed or value_of(ctypes.byref(value), _ATOMICS, *handles)
    except (OSError, AttributeError):
        return None
    return None if failed else value.value


def nccl_version() -> tuple[int, ...] | None:
    """The version of NCCL that this process has loaded, else that it would load; `None`: none.

    A package's NCCL is not loaded here. JAX loads it from a folder that it knows.
    """
    return _library_version(loaded=True) or _package()[1] or _library_version(loaded=False)


def nccl_package() -> str:
    """The package by which pip installs NCCL."""
    return _package()[0]


@functools.cache
def _package() -> tuple[str, tuple[int, ...] | None]:
    """The package that brings NCCL, and its version if it is installed."""
    for name in _WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, tuple(map(int, re.findall(r"\d+", metadata.version(name))[:3]))
    return _WHEELS[0], None


def _library_version(*, loaded: bool) -> tuple[int, ...] | None:
    """The version that the library itself tells; it is loaded unless only a ``loaded`` one counts.

    `None`: there is no such library.
    """
    code = ctypes.c_int()
    try:
        mode = os.RTLD_NOLOAD if loaded else ctypes.DEFAULT_MODE
        failed = ctypes.CDLL("libnccl.so.2", mode).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return None
    # As 22902 for 2.29.2.
    return None if failed else (code.value // 10_000, code.value // 100 % 100, code.value % 100)
