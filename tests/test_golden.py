"""No bit moves unsaid: plans, payloads, results and states have the hashes of `golden.json`.

`golden` says which calls there are, and how the hashes are renewed.
"""

import json

import golden
import jax
import numpy as np
import pytest
from compiler import AS_USERS

HASHES = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("name", golden.DAILY)
def test_no_bit_has_moved(name):
    assert golden.digest(golden.CALLS[name]()) == HASHES[name]


@pytest.mark.release
@pytest.mark.parametrize("name", golden.CALLS)
def test_no_bit_moves_in_programs_that_are_compiled_as_users_do(name, monkeypatch):
    """Products that meet additions are exact, so that contracting them changes nothing."""
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda f, **options: jit(f, **options | {"compiler_options": AS_USERS})
    )
    for cached in (golden.vmapped, golden.stepper, golden.sharded):
        cached.cache_clear()
    assert golden.digest(golden.CALLS[name]()) == HASHES[name]


def test_every_call_has_a_hash():
    assert list(HASHES) == list(golden.CALLS)
    assert len(set(HASHES.values())) == len(HASHES) - 1  # two transports of one all-reduce


def test_a_hash_tells_bits_shapes_and_dtypes_apart():
    x = np.arange(6, dtype=np.float32)
    others = [-x, x.reshape(2, 3), x.view(np.int32), x.astype(np.float64), [x[:3], x[3:]], x[:5]]
    found = [golden.digest(tree) for tree in [x, *others]]
    assert len(set(found)) == len(found)
    assert golden.digest(x.copy()) == found[0]
