"""No bit moves unsaid: plans, payloads, results and states have the hashes of `golden.json`.

`golden` says which calls there are, and how the hashes are renewed. Programs are compiled as tests
compile them, and in releases as users do: products that meet additions are exact, so that
contracting them changes nothing.
"""

import json

import golden
import jax
import numpy as np
import pytest
from cases import daily
from compiler import AS_USERS

HASHES = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("name", daily(golden.CALLS, golden.DAILY))
def test_no_bit_has_moved(name):
    assert golden.digest(golden.CALLS[name]()) == HASHES[name]


@pytest.mark.release
@pytest.mark.parametrize("name", golden.CALLS)
def test_optimisations_move_no_bit(name, monkeypatch):
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


def test_sums_of_squares_are_exact_in_any_order_and_inputs_distinct():
    x = golden.exact_gradients(3, 8 * 256 + 100)
    rows = x[:, : 8 * 256].reshape(3, 8, 256)
    energy = np.sum(rows.astype(np.float64) ** 2, axis=2)
    assert np.all(np.frexp(energy)[0] == 0.5)
    total = np.asarray(jax.numpy.asarray(energy, jax.numpy.bfloat16), np.float64)
    np.testing.assert_array_equal(total, energy)
    assert np.mean(rows[0] == rows[1]) < 0.5
