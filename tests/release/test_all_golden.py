"""All golden hashes, from programs that are compiled as tests and as users compile them.

Products that meet additions are exact, so that contracting them changes nothing.
"""

import json

import golden
import jax
import pytest
from compiler import AS_USERS

HASHES = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("name", golden.CALLS)
def test_no_bit_has_moved(name):
    assert golden.digest(golden.CALLS[name]()) == HASHES[name]


@pytest.mark.parametrize("name", golden.CALLS)
def test_optimisations_move_no_bit(name, monkeypatch):
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda f, **options: jit(f, **options | {"compiler_options": AS_USERS})
    )
    for cached in (golden.vmapped, golden.stepper, golden.sharded):
        cached.cache_clear()
    assert golden.digest(golden.CALLS[name]()) == HASHES[name]
