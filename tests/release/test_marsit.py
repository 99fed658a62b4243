"""Marsit end to end: whose sign a coordinate gets, full rounds, and what compensations make up.

`test_every_method` and `test_nonfinite` have rows of it.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    LOOP,
    SMALL,
    TOPOLOGIES,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    first_state,
    gradient,
    stepper,
)
from jax.sharding import PartitionSpec as P
from test_wire_bytes import moved_bits

import dynamiq_jax as dq
from dynamiq_jax.comparators.marsit import workers_in
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(5)
SIZE = 3011
BLOCK = 256


def Marsit(**options) -> dq.Compression:
    """The method, for leaves of any size."""
    return dq.Compression(dq.comparators.Marsit(block_size=BLOCK, **options), **SMALL)


ROUTES = [(name, n) for name, (_, served) in TOPOLOGIES.items() for n in (2, 5, 8) if n in served]


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@functools.cache
def draw(n, steps=1):
    """f32[steps, n, SIZE]: a part that lasts, and one of every step."""
    lasting = np.asarray(gradient(7, n, SIZE))
    return np.stack([lasting + 0.3 * np.asarray(gradient(seed, n, SIZE)) for seed in range(steps)])


def lengths(x):
    """The length of one step, by coordinate: mean magnitudes of blocks, of all workers."""
    pad = np.pad(np.abs(np.asarray(x, np.float64)).mean(axis=0), (0, -SIZE % BLOCK))
    filled = np.clip(SIZE - BLOCK * np.arange(pad.size // BLOCK), 0, BLOCK)
    return np.repeat(pad.reshape(-1, BLOCK).sum(axis=1) / filled, BLOCK)[:SIZE]


@functools.cache
def first_signs(n, topology, samples):
    """(y f32[n, SIZE], key) -> the finished signs [samples, SIZE] of a first round."""
    method = Marsit(period=None)

    def one(x, key, state):
        options = {"op": "mean", "method": method, "topology": topology}
        return dq.reduce(x, "data", key=key, state=state, **options).tree

    run = jax.vmap(one, in_axes=(0, None, 0), axis_name="data")
    return jax.jit(jax.vmap(run, in_axes=(None, 0, None)))


@pytest.mark.parametrize(("route", "n"), [*ROUTES, ("direct", 3), ("ring", 6), ("ring", 7)])
def test_a_coordinate_gets_the_sign_of_a_worker_drawn_uniformly(route, n):
    """Coordinate c is positive on the first c mod (n + 1) workers: the mean sign is exact.

    So is the variance, 1 - mean².
    """
    topology, samples = TOPOLOGIES[route][0], 256
    positive = np.arange(SIZE) % (n + 1)
    x = np.where(np.arange(n)[:, None] < positive, 1.0, -1.0).astype(np.float32)
    keys = jax.random.split(KEY, samples)
    state = first_state(Marsit(period=None), x, n, topology)
    found = np.asarray(first_signs(n, topology, samples)(x, keys, state))
    assert_replicas_equal(np.moveaxis(found, 1, 0))
    np.testing.assert_allclose(np.abs(found), 1, rtol=2e-7)
    signs = np.sign(found[:, 0])
    counts = np.array([np.mean(signs[:, positive == k]) for k in range(n + 1)])
    expected = 2 * np.arange(n + 1) / n - 1
    deviation = np.sqrt((1 - expected**2) / (samples * SIZE / (n + 1)))
    assert np.all(np.abs(counts - expected) <= 4.5 * deviation)
    assert counts[0] == -1
    assert counts[-1] == 1
    # Coins of coordinates and of keys are not related.
    middle = signs[:, positive == n // 2]
    assert abs(np.var(middle.mean(axis=1)) * middle.shape[1] / np.var(middle) - 1) < 0.45
    assert abs(np.var(middle.mean(axis=0)) * samples / np.var(middle) - 1) < 0.45


def test_every_worker_is_drawn_as_often():
    """Only one worker's sign is positive, in 1 / n of the coordinates, whoever it is."""
    n, samples = 8, 128
    for topology in (LOOP, dq.Butterfly(balance=0.0), dq.Direct()):
        run, state = first_signs(n, topology, samples), None
        for worker in (0, 3, 7):
            x = np.where(np.arange(n)[:, None] == worker, 1.0, -np.ones((n, SIZE), np.float32))
            state = first_state(Marsit(period=None), x, n, topology)
            share = np.mean(
                run(x.astype(np.float32), jax.random.split(KEY, samples), state)[:, 0] > 0
            )
            assert abs(share - 1 / n) < 4.5 * np.sqrt(1 / n * (1 - 1 / n) / (samples * SIZE))


def test_for_how_many_workers_an_encoding_stands():
    assert workers_in(dq.Ring(), 4).tolist() == [[k] * 4 for k in (1, 2, 3, 0)]
    assert workers_in(dq.Butterfly(), 4).tolist() == [[k] * 4 for k in (1, 1, 2, 0)]
    assert workers_in(dq.Direct(), 3).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_zeros_have_no_sign_on_average():
    n, samples = 3, 256
    x = np.zeros((n, SIZE), np.float32)
    x[:, :BLOCK] = np.where(np.arange(BLOCK) % 2, 2.0, 0.0)  # half of one block
    x[0, -1] = 1.0
    state = first_state(Marsit(period=None), x, n, dq.Direct())
    found = np.asarray(
        first_signs(n, dq.Direct(), samples)(x, jax.random.split(KEY, samples), state)
    )[:, 0]
    np.testing.assert_array_equal(found[:, 1:BLOCK:2], 1.0)
    zeros = found[:, :BLOCK:2]
    np.testing.assert_array_equal(np.abs(zeros), 1.0)
    assert abs(zeros.mean()) < 4.5 / np.sqrt(zeros.size)
    last = -(-SIZE // BLOCK) * BLOCK - BLOCK
    np.testing.assert_array_equal(found[:, BLOCK:last], 0.0)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_delivered_and_compensations_make_up_the_inputs(n, scale):
    """In every step; full rounds come in time, deliver all, and leave nothing."""
    period, x = 3, draw(n, 7)
    method = Marsit(period=period, scale=scale)
    state, run = first_state(method, x[0], n, LOOP), stepper(method, LOOP)
    delivered = exact = 0.0
    before = run._cache_size()
    for i, own in enumerate(x):
        found, state = run(own, KEY, state)
        assert_replicas_equal(found)
        result = np.asarray(found[0], np.float64)
        delivered, exact = delivered + result, exact + total_of(own)
        residual = np.asarray(state[0].residual, np.float64)
        size = np.abs(exact).max()
        assert np.abs(delivered + residual.sum(axis=0) - exact).max() < 2e-6 * size
        assert state[0].step.tolist() == [(i + 1) % period] * n
        if i % period == period - 1:
            np.testing.assert_array_equal(residual, 0)
            assert np.abs(delivered - exact).max() < 2e-6 * size
        else:
            np.testing.assert_allclose(np.abs(result), n * scale * lengths(own), rtol=2e-6)
            assert np.all(np.any(residual != 0, axis=0))
    assert run._cache_size() <= before + 1  # one program for both kinds of rounds


def test_rounds_have_coins_of_their_own():
    """Every step has one key and gradient; also without a key."""
    n, x = 4, draw(4)[0]
    for key in (KEY, None):
        method = Marsit(period=None)

        def one(x, state, key=key, method=method):
            options = {"op": "sum", "method": method, "topology": LOOP}
            return dq.reduce(x, "data", key=key, state=state, **options)[:2]

        run = jax.jit(jax.vmap(one, axis_name="data"))
        first = first_state(method, x, n, LOOP)
        start, _ = run(x, first)
        later, _ = run(x, (first[0]._replace(step=first[0].step + 1),))
        again, _ = run(x, first)
        assert_same_bits(start, again)
        assert np.mean(np.asarray(start != later)) > 0.2


@pytest.mark.parametrize("topology", [dq.Ring(), dq.Direct()])
def test_wire_bits_are_what_the_rounds_move(topology):
    """A conditional with two branches, of which one is a full round; their mean over a period."""
    n, size, method = 4, 20_000, Marsit(period=5)
    own = jax.ShapeDtypeStruct((size,), jnp.float32)

    def one(x, state):
        x, state = jax.tree.map(lambda leaf: leaf[0], (x, state))
        options = {"op": "sum", "method": method, "topology": topology}
        total, state, _ = dq.reduce(x, "data", state=state, **options)
        return total, jax.tree.map(lambda leaf: leaf[None], state)

    state = as_compression(method, topology).init_state(own, n, stacked=True)
    specs = {"in_specs": P("data"), "out_specs": (P(), P("data"))}
    step = jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))
    hlo = step.lower(jnp.zeros((n, size)), state).compile().as_text()
    bodies = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?{$(.*?)^}", hlo, re.DOTALL | re.MULTILINE)
    names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", hlo)
    names += re.findall(r"[\w.\-]+", " ".join(re.findall(r"branch_computations={(.*?)}", hlo)))
    sent = {name: sum(moved_bits(body, Counter(), n).values()) / n for name, body in bodies}
    branches = sorted(sent.pop(name) for name in set(names))
    agreed, one_bit, full = method.method.round_bits(size, n, topology)
    assert (branches, sum(sent.values())) == ([one_bit, full], agreed)
    assert method.method.wire_bits(size, n, topology) == agreed + (4 * one_bit + full) // 5
    assert one_bit < 1.06 * 2 * (n - 1) / n * size
    assert method.method.wire_bits(size, 1, topology) == 0


def test_what_makes_no_sense_is_refused():
    for fields, message in (
        ({"period": 1}, r"period=1 must be .* 2 to 4096, or None .* pass dq\.F32\(\)"),
        ({"period": 5000}, "period=5000 must be an integer from 2 to 4096"),
        ({"period": 2.5}, "period=2.5; expected one of int, None"),
        ({"scale": 0}, "scale=0 must be above 0 and finite, such as 1.0"),
        ({"scale": float("inf")}, "scale=inf must be above 0 and finite"),
        ({"scale": float("nan")}, "scale=nan must be above 0 and finite"),
        ({"block_size": 48}, "block_size=48 must be a positive multiple of 32, as 1024"),
        ({"block_size": 0}, "block_size=0 must be a positive multiple of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            dq.comparators.Marsit(**fields)
    with pytest.raises(ValueError, match="up to 4096 workers, and here are 5000; pass topology=dq"):
        as_compression(dq.comparators.Marsit(), dq.Ring()).init_state(jnp.zeros(1 << 20), 5000)
    x = jnp.ones((2, 8192))
    with pytest.raises(ValueError, match=r"Marsit\(.* needs a state"):
        jax.vmap(lambda x: dq.psum(x, "data", method=Marsit()), axis_name="data")(x)
