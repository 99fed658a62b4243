"""Promises of every method to its users, whatever it does inside; `test_nonfinite` has the rest.

Rows of `cases.EVERY_METHOD` are reduced as parts of a tree, among one to eight workers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits
from cases import EVERY_METHOD, LOOP, OTHERS, daily, first_state, over, stepper, wire_bits
from jax import lax
from test_wire_bytes import TREE, lower, moved_bits
from workers import compilations, gradient

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.methods.metrics import vnmse

KEY = jax.random.key(1)


def route(row, n, turn=0):
    """A topology for n workers, another one at every turn."""
    served = [t for t in row.routes.values() if n & (n - 1) == 0 or t != dq.Butterfly(balance=0.0)]
    return served[turn % len(served)]


@functools.cache
def mixed(n):
    """Leaves of every kind, distinct on each worker: two large ones, the others exact.

    And what `lax.pmean` makes of them.
    """
    rng = np.random.default_rng(n)
    low = jnp.bfloat16 if n % 2 else jnp.float16
    # Bits of started super-groups are paid as whole ones: nearly eight of them for each worker.
    x = np.asarray(gradient(n, n, 2 * 2048 * n))
    tree = {
        "layers": [
            {"w": x[:, : 1984 * n].reshape(n, 31, -1), "b": x[:, -17:]},
            (x[:, 2048 * n : -80].astype(low).reshape(n, 16, -1), x[:, :50].astype(low)),
        ],
        "empty": np.zeros((n, 0, 4), np.float32),
        "mask": rng.random((n, 9)) < 0.5,
        "phase": (rng.standard_normal((n, 2, 3)) * (1 + 2j)).astype(np.complex64),
        "counts": rng.integers(0, 9, (n, 1000)).astype(np.uint8),
        "step": np.arange(n, dtype=np.int32),
        "nothing": None,
    }
    native = jax.vmap(lambda tree: lax.pmean(tree, "data"), axis_name="data")
    return tree, jax.jit(native)(tree)


def large(tree):
    return [tree["layers"][0]["w"], tree["layers"][1][0]]


def others(tree):
    return [x for x in jax.tree.leaves(tree) if all(x is not y for y in large(tree))]


NAMES = list(EVERY_METHOD)
NUMBERS = [
    (name, n) for i, name in enumerate(NAMES) for n in (1, 2 + i % 6, 8)
]  # fmt: skip
"""Every method alone, among eight and another number of workers; `test_nonfinite` has four, and
the test below three."""


KINDS = ("bf16", "mxfp8", "thc", "powersgd", "marsit")
"""One of each way to move: hop by hop, native, a matrix by itself, with a state."""
DAILY = [(name, 2 + NAMES.index(name) % 6) for name in KINDS] + [("f32", 1)]


@pytest.mark.parametrize(("name", "n"), daily(NUMBERS, DAILY))
def test_trees_keep_structure_shapes_and_dtypes_and_means_are_accurate(name, n):
    row, (tree, native) = EVERY_METHOD[name], mixed(n)
    topology = route(row, n, turn=n)
    run = stepper(row.method, topology, mean=True)
    state = first_state(row.method, tree, n, topology)
    found, after = run(tree, KEY, state)
    assert_replicas_equal(found)
    assert jax.tree.structure(found) == jax.tree.structure(native)
    for own, expected in zip(jax.tree.leaves(found), jax.tree.leaves(native), strict=True):
        assert (own.shape, own.dtype) == (expected.shape, expected.dtype)
    assert_same_bits(*(others(jax.tree.map(np.asarray, tree)) for tree in (found, native)))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    # The next step, of another key and data, has types for which there is a program already.
    state = run.on_devices(tree, KEY, state)[1]
    other, key = jax.tree.map(np.flip, tree), jax.random.key(2)  # which may compile, too
    with compilations() as compiled:
        run.on_devices(other, key, state)
    assert not compiled
    for leaf, mean in zip(large(tree), large(found), strict=True):
        exact = np.mean(np.asarray(leaf, np.float64), axis=0)
        lost = float(vnmse(mean[0], exact))
        if n == 1:
            assert_same_bits(np.asarray(mean), leaf)
        elif name != "f32":
            assert 1e-7 < lost < 3 * row.error + 1e-5  # the result is rounded to bf16 or f16
        else:
            assert lost < 1e-5


def alone(method):
    """A method without the error feedback around it."""
    return method.method if isinstance(method, dq.ErrorFeedback) else method


BY_KEY = [
    name
    for name, row in EVERY_METHOD.items()
    if getattr(alone(row.method.method), "rounding", "") != "nearest"
    and any(kind in name for kind in ("dynamiq", "thc", "qsgd", "marsit", "perm"))
    or getattr(alone(row.method.method), "rounding", "") == "stochastic"
]


@pytest.mark.parametrize("name", daily(NAMES, ["mxfp8", "thc"]))
def test_the_key_decides_about_rounding_and_means_are_sums_over_n(name):
    """The workers are three, since one by three is not exact."""
    row, n = EVERY_METHOD[name], 3
    topology, x = route(row, n), mixed(n)[0]["layers"][0]["w"]
    state = first_state(row.method, x, n, topology)
    run = stepper(row.method, topology)
    first, again, other = (run(x, jax.random.key(seed), state)[0] for seed in (1, 1, 2))
    assert_same_bits(first, again)
    differing = np.mean(np.asarray(other != first))
    if "arc" in name:  # keys decide which rows travel, where their lengths leave a choice
        assert 0 < differing < 1
    elif name in OTHERS:  # rows that nobody wrote do not say whether noise decides
        assert differing == 0 or differing > 0.1
    else:
        assert differing > 0.3 if name in BY_KEY else differing == 0
    mean, _ = stepper(row.method, topology, mean=True)(x, jax.random.key(1), state)
    np.testing.assert_allclose(mean, first / n, rtol=3e-7, atol=1e-7)


ONE_KIND = [n for n in NAMES[1:] if getattr(EVERY_METHOD[n].method.method, "period", None) is None]
"""Methods of which all steps move as much; `test_comparators` has the other."""


@pytest.mark.parametrize("name", daily(ONE_KIND, KINDS[:-1]))
def test_wire_bits_are_what_the_program_moves(name):
    """And JAX counts the result as replicated. `test_wire_bytes` does the same for DynamiQ."""
    row, n = EVERY_METHOD[name], 4
    topology = route(row, n, turn=NAMES.index(name))
    topology = dq.Ring() if topology == LOOP else topology  # a loop's body counts once
    options = {"compression": over(topology, row.method)}

    def with_state(tree, axis_name, compression, topology=None):
        state = as_compression(compression).init_state(tree, n)
        options = {"op": "sum", "compression": over(topology, compression)}
        total = dq.reduce(tree, axis_name, state=state, **options).tree
        return jax.tree.map(lambda x: x[None], total)

    collective = with_state if row.method.method.needs_state else dq.psum
    hlo, asked = lower(collective, TREE, (n,), **options)
    moved = moved_bits(hlo, asked, n)
    promised = wire_bits(row.method, topology)(TREE, n)
    # Integers but for 2 (n - 1) / n of two buckets.
    assert abs(promised - sum(moved.values()) / n) <= 2
    assert row.method.method.wire_bits(4000, 1, topology) == 0
