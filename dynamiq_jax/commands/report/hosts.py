"""The hosts of a report: what each process knows of its own, without names of hosts or users."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import multihost_utils

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.tables import nccl_version
from dynamiq_jax.hosts.told import told_by_all
from dynamiq_jax.topologies.links import fast_links, slow_by_choice

SYS = Path("/sys/class")
DRIVER = Path("/proc/driver/nvidia/version")

AMAZON = "0x1d0f"
"""The PCI vendor of EFA's network cards."""

VERSIONS = ("python", "jax", "jaxlib", "dynamiq_jax", "nccl", "driver", "platform_version")
"""Facts that should be the same on all hosts."""


def own_facts() -> dict[str, Any]:
    """The versions, devices and network cards of this process's host."""
    devices = jax.local_devices()
    on_gpu = devices[0].platform == "gpu"
    return {
        "host": platform.node(),
        "process": jax.process_index(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "dynamiq_jax": dq.__version__,
        "nccl": nccl_version() if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        "platform_version": " ".join(devices[0].client.platform_version.split()),
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "slices": sorted({getattr(device, "slice_index", None) or 0 for device in devices}),
        "nvlink": fast_links() if on_gpu else None,
        "slow_by_choice": slow_by_choice() if on_gpu else None,
        "rdma": rdma_ports(),
        "nics": nic_rates(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "XLA_FLAGS")) and name != "NCCL_DEBUG_FILE"
        },
    }


def driver_version() -> str | None:
    """The version of NVIDIA's driver; `None` without one."""
    found = re.search(r"\d+\.\d+(\.\d+)?", text_of(DRIVER))
    return found and found[0]


def rdma_ports() -> list[dict[str, str]]:
    """The active ports of InfiniBand, RoCE and EFA of this host, and their rates."""
    found = []
    for device in sorted(SYS.glob("infiniband/*")):
        efa = text_of(device / "device" / "vendor") == AMAZON
        for port in sorted(device.glob("ports/*")):
            # As "4: ACTIVE".
            if text_of(port / "state").endswith("ACTIVE"):
                layer = text_of(port / "link_layer")
                kind = "EFA" if efa else "RoCE" if layer == "Ethernet" else "InfiniBand"
                rate = text_of(port / "rate").partition(" (")[0]
                found.append({"device": device.name, "kind": kind, "rate": rate})
    return found


def nic_rates() -> dict[str, str]:
    """The rate of each network card that is up and tells one; virtual ones have no device."""
    found = {}
    for nic in sorted(SYS.glob("net/*")):
        speed = text_of(nic / "speed")
        if (nic / "device").exists() and text_of(nic / "operstate") == "up" and speed.isdecimal():
            found[nic.name] = f"{int(speed) / 1000:g} Gb/s"
    return found


def text_of(path: Path) -> str:
    """A file's text without space around it; none if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def of_all(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all processes, in their order; hosts get numbers in the place of names."""
    found = told_by_all(facts)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(own["host"] for own in found))}
    return [own | {"host": numbers[own["host"]]} for own in found]


def of_first(number: float) -> float:
    """The first process's number, on all processes."""
    return float(multihost_utils.broadcast_one_to_all(np.float32(number)))
