"""Whether GPUs may, and can, reach each other's memory.

The user decides whether they may, by NCCL's environment variables. CUDA's driver knows whether they
can. JAX reports neither.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

_NEVER = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}
"""NCCL's environment variables, and the values by which GPUs never read each other's memory."""

_ATOMICS = 3
"""The driver's number for an attribute of two GPUs: each executes atomic operations in the other's
memory, as over NVLink. Over PCIe they only read and write."""


def disabled() -> str | None:
    """The setting by which the user keeps GPUs from each other's memory; `None`: there is none."""
    for name, values in _NEVER.items():
        value = os.environ.get(name, "").strip()
        if value.upper() in values:
            return f"{name}={value}"
    return None


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
