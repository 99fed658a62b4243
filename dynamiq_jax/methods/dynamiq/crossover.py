"""From which size on compression pays on fast links, as `benchmarks/crossover.py` measured it."""

import json
from importlib import resources

_MEASURED = json.loads(
    resources.files("dynamiq_jax.methods.dynamiq").joinpath("crossover.json").read_text()
)

PSUM_BYTES: int = _MEASURED["psum_bytes"]
"""Buckets of less are faster by `jax.lax.psum` on GPUs that NVLink connects all to all."""
PSUM_SCATTER_BYTES: int = _MEASURED["psum_scatter_bytes"]
"""The limit for `jax.lax.psum_scatter`: statistics and plan are as much work for half the bytes."""
