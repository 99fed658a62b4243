"""From which size on compression pays on fast links, as `benchmarks/crossover.py` measured it.

`crossover.json` beside this file holds one entry for each number of GPUs. The entry of eight is
twice the largest size that was measured, at which compression did not pay: its note says so.
"""

import json
from importlib import resources
from typing import Any

_MEASURED: list[dict[str, Any]] = json.loads(
    resources.files("dynamiq_jax.methods.dynamiq").joinpath("crossover.json").read_text()
)


def _entry(n_workers: int) -> dict[str, Any]:
    """The measurement on at least so many GPUs, or on the most."""
    enough = (entry for entry in _MEASURED if entry["n_devices"] >= n_workers)
    return next(enough, _MEASURED[-1])


def psum_bytes(n_workers: int) -> int:
    """Buckets of fewer bytes are faster by `jax.lax.psum` on GPUs that NVLink connects."""
    return _entry(n_workers)["psum_bytes"]


def psum_scatter_bytes(n_workers: int) -> int:
    """The limit for `jax.lax.psum_scatter`, which sends half as many bytes as `jax.lax.psum`."""
    return _entry(n_workers)["psum_scatter_bytes"]
