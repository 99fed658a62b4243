"""The size from which compression pays on fast links, measured by `benchmarks/crossover.py`.

`crossover.json` beside this file holds one entry for each number of GPUs. The entry of eight is
twice the largest size that was measured, at which compression did not pay: its note says so.
"""

import json
from importlib import resources
from typing import Any

import jax

_MEASURED: list[dict[str, Any]] = json.loads(
    resources.files("dynamiq_jax.methods.dynamiq").joinpath("crossover.json").read_text()
)


def _entry(n_workers: int) -> dict[str, Any]:
    """The measurement on at least this many GPUs, or on the largest number."""
    enough = (entry for entry in _MEASURED if entry["n_devices"] >= n_workers)
    return next(enough, _MEASURED[-1])


def _here(name: str) -> str:
    """The name of an answer for one process, or for one process of several with a GPU each."""
    return name if jax.process_count() == 1 else f"{name}_of_processes"


def psum_bytes(n_workers: int) -> int:
    """The bytes of a bucket below which `jax.lax.psum` is faster on GPUs connected by NVLink.

    One process for each GPU has no copy engines, so its limit is larger.
    """
    entry = _entry(n_workers)
    return entry.get(_here("psum_bytes"), entry["psum_bytes"])


def push_bytes(n_workers: int) -> tuple[int, int] | None:
    """The bytes of a call's buckets from which, and up to which, push kernels are the fastest.

    `None`: push kernels were not measured on this many GPUs, or between as many processes.
    """
    found = _entry(n_workers).get(_here("push_bytes"))
    measured = n_workers <= _MEASURED[-1]["n_devices"]
    return tuple(found) if found is not None and measured else None


def psum_scatter_bytes(n_workers: int) -> int:
    """The limit for `jax.lax.psum_scatter`, which sends half as many bytes as `jax.lax.psum`."""
    return _entry(n_workers)["psum_scatter_bytes"]
