"""Which network NCCL took, by its own log.

NCCL writes the log if ``NCCL_DEBUG`` is INFO when it starts, into the file that ``NCCL_DEBUG_FILE``
names. A line such as ``Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0`` says how two GPUs are
connected.
"""

import collections
import glob
import os
import platform
import re
from pathlib import Path
from typing import Any

_VIA = re.compile(r"-> [^\n]*\bvia (NET/[^/\n]+|[A-Z0-9]+)")
"""A connection: ``P2P/CUMEM/read``, ``SHM/direct/direct``, ``NET/IB/0/GDRDMA``."""
_NETWORK = re.compile(r"Using network (.+)|Assigned NET plugin (\S+)")
"""The network of a communicator, whose words differ between versions of NCCL."""
_NO_DEVICE = re.compile(r"NET/IB : No device found")


def ask_for_log(folder: Path) -> None:
    """Has NCCL write its log, unless the user has told it what to write and where.

    That is before the first collective of the process.
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    name = f"nccl.{platform.node().partition('.')[0]}.{os.getpid()}.log"
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder.absolute() / name))


def own_log() -> str:
    """The text of this process's log."""
    name = os.environ.get("NCCL_DEBUG_FILE", "")
    pattern = glob.escape(name).replace("%h", "*").replace("%p", str(os.getpid()))
    return "".join(Path(file).read_text(errors="replace") for file in sorted(glob.glob(pattern)))


def read(log: str) -> dict[str, Any]:
    """Reads a log of NCCL.

    Returns:
      ``networks``: names, as "Socket", "IB" or "AWS Libfabric"; ``connections``: how many channels
      use which link; ``no_infiniband``: whether NCCL looked for InfiniBand and found no device.
    """
    connections = collections.Counter(_VIA.findall(log))
    told = {first or second for first, second in _NETWORK.findall(log)}
    told |= {name.removeprefix("NET/") for name in connections if name.startswith("NET/")}
    return {
        "networks": sorted(name.strip() for name in told),
        "connections": dict(sorted(connections.items())),
        "no_infiniband": _NO_DEVICE.search(log) is not None,
    }


def warnings(facts: list[dict[str, Any]], networks: list[dict[str, Any]]) -> list[str]:
    """Sentences about processes whose network is not what their cards let expect."""
    found: dict[str, list[int]] = {}
    for own, network in zip(facts, networks, strict=True):
        for text in _of_process(own, network):
            found.setdefault(text, []).append(own["process"])
    return [f"{text} (processes {', '.join(map(str, who))})" for text, who in found.items()]


def _of_process(facts: dict[str, Any], network: dict[str, Any]) -> list[str]:
    found, variables = [], facts["variables"]
    if facts["slow_by_choice"]:
        found.append(f"{facts['slow_by_choice']} keeps NCCL from the NVLink of these GPUs")
    if facts["nccl"] is None:
        return found
    took = [name for name in network["networks"] if name.lower().startswith("socket")]
    if took and facts["rdma"]:
        cards = sorted({port["kind"] for port in facts["rdma"]})
        names = ("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
        told = [f"{name}={variables[name]}" for name in names if name in variables]
        why = f"the environment has {', '.join(told)}" if told else "its log says why"
        text = f"NCCL took sockets, and the host has active ports of {' and '.join(cards)}: {why}"
        found.append(text)
    if not network["networks"] and not network["connections"]:
        level = variables.get("NCCL_DEBUG")
        found.append(f"NCCL's log, with NCCL_DEBUG={level}, does not tell what it took")
    return found
