"""GPU tests skip cleanly where JAX's default platform is no NVIDIA GPU."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    """Skips every test of this folder without a GPU."""
    if jax.default_backend() not in ("gpu", "cuda"):
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU; JAX runs on " + jax.default_backend())
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(skip)
