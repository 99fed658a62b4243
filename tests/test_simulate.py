"""The simulator of large all-reduces: that it does what the library does, in bounded memory."""

import functools
import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits, daily
from jax import lax
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import cli
from dynamiq_jax.commands.bench import tables
from dynamiq_jax.commands.simulate import (
    Given,
    Source,
    add_exactly,
    mixture_source,
    shared_by_all,
    simulate,
    worker_gradient,
    workers_of,
)
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors import sequential
from dynamiq_jax.executors.sequential import decode_chunk, reduce_chunk
from dynamiq_jax.methods.base import Call

METHOD = dq.DynamiQ(bits=5.5, widths=(4, 8))
SUPER_GROUPS = 64
TOPOLOGIES = {
    4: dq.Direct(streams=1),
    8: dq.Butterfly(streams=1),
    16: dq.Ring(streams=1, unroll_up_to=1),
}
"""By the number of workers that they are tested with."""
SEED = jnp.array([3, 5], jnp.uint32)


@functools.partial(jax.jit, static_argnums=1)
def rows_of(source, n):
    return jax.vmap(functools.partial(worker_gradient, source))(jnp.arange(n))


class TestGradients:
    def test_a_worker_is_the_same_in_any_loop(self):
        source = mixture_source(jax.random.key(0), 3)
        rows = rows_of(source, 5)
        assert_same_bits(rows[4], jax.jit(worker_gradient)(source, 4))
        assert len(np.unique(np.asarray(rows))) > 0.99 * rows.size

    def test_magnitudes_are_the_mixtures(self):
        key = jax.random.key(4)
        source = mixture_source(key, 64)
        x = lognormal_mixture(jax.random.split(key)[0], 512, 64).reshape(512, 64, 256)
        np.testing.assert_allclose(jnp.std(x, axis=(0, 2)), source.deviation, rtol=0.02)


@functools.cache
def library(method, topology, n):
    """jit of (f32[n, n * 64 * 256], seed) -> the workers' all-reduced sums, and what they share."""
    bound = method.bind(n * SUPER_GROUPS * 256, n, topology)

    def one(x, seed):
        call = Call(Axis(("w",)), topology, seed)
        return method.all_reduce(x, call).value, method.agreed(x, call, bound)

    return jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="w"))


@functools.cache
def repeated_source(n, seed):
    """As many super-groups of every magnitude as there are chunks."""
    source = mixture_source(jax.random.split(jax.random.key(seed))[0], SUPER_GROUPS)
    return Source(source.seed + 1, jnp.tile(source.deviation, n))


PLAIN = {
    "f32": (dq.F32(), dq.Ring(unroll_up_to=1), 5),
    "bf16": (dq.BF16(), dq.Butterfly(), 4),
    "mxfp4": (dq.comparators.MXFP4(rounding="stochastic"), dq.Direct(), 3),
    "mxfp8, shared": (dq.comparators.MXFP8(sum="shared-scale"), dq.Ring(), 4),
}
CASES = {f"dynamiq, {n}": (METHOD, topology, n) for n, topology in TOPOLOGIES.items()} | PLAIN


class Rows(NamedTuple):
    """Workers whose gradients are rows, which no other program may round otherwise."""

    method: Any
    bound: Any

    def __call__(self, given, worker):
        x, shared = given
        return self.method.codec(x[worker], shared, self.bound, dtype=jnp.float32)


@pytest.mark.parametrize("name", daily(CASES, ["dynamiq, 4"]))
def test_a_chunk_of_the_library_bit_for_bit(name):
    """With the library's own sizes and plan, one worker after the other gives its chunk 0."""
    method, topology, n = CASES[name]
    x = rows_of(repeated_source(n, 0), n)
    totals, shared = library(method, topology, n)(x, SEED)
    shared = jax.tree.map(lambda leaf: leaf[0], shared)
    workers = Rows(method, method.bind(n * SUPER_GROUPS * 256, n, topology))
    payload = reduce_chunk(topology, n, workers, (x, shared))
    found = decode_chunk(workers, topology, n, (x, shared), payload)
    own = np.arange(SUPER_GROUPS) if name in PLAIN else np.asarray(shared.plan.order[0])
    own = (256 * own[:, None] + np.arange(256)).reshape(-1)
    assert len(np.unique(np.asarray(found)[own])) > 1
    assert_same_bits(found[own], totals[0][own])


@pytest.mark.release
@pytest.mark.parametrize("n", TOPOLOGIES, ids=str)
def test_error_is_that_of_the_library(n):
    """Each of its chunks holds what is simulated; the data are others."""
    workers = workers_of(METHOD, TOPOLOGIES[n], n, SUPER_GROUPS)
    ratios = []
    for seed in range(12):
        x = rows_of(repeated_source(n, seed), n)
        exact = np.sum(np.asarray(x, np.float64), axis=0)
        total = library(METHOD, TOPOLOGIES[n], n)(x, jnp.array([seed, 1], jnp.uint32))[0][0]
        expected = np.sum((np.asarray(total, np.float64) - exact) ** 2) / np.sum(exact**2)
        ratios.append(simulate(workers, jax.random.key(seed)) / expected)
    assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.05)


def test_sums_keep_what_f32_rounds_off():
    start = jnp.ones((2,)), jnp.zeros((2,))
    small = jnp.array([2.0**-30, -(2.0**-35)])
    high, low = jax.jit(lambda s: lax.fori_loop(0, 100, lambda i, s: add_exactly(s, small), s))(
        start
    )
    total = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    np.testing.assert_array_equal(total, 1 + 100 * np.asarray(small, np.float64))


def most_alive(monkeypatch, topology, n):
    """The most bytes of arrays that are alive when a worker has encoded, beyond those before."""
    workers = workers_of(dq.comparators.MXFP8(), topology, n, SUPER_GROUPS)
    source = mixture_source(jax.random.key(0), SUPER_GROUPS)
    given = Given(source, shared_by_all(workers, worker_gradient(source, 0), None, SEED))
    monkeypatch.setattr(sequential, "SYNC_EVERY", 1)
    alive = []

    def note(done, of):
        alive.append(sum(x.nbytes for x in jax.live_arrays()))

    before = sum(x.nbytes for x in jax.live_arrays())
    reduce_chunk(topology, n, workers, given, note)
    assert len(alive) == n
    return max(alive) - before


@pytest.mark.parametrize("topology", daily([dq.Ring(), dq.Direct()], [dq.Ring()]), ids=str)
def test_memory_is_the_same_for_any_number_of_workers(monkeypatch, topology):
    small, large = (most_alive(monkeypatch, topology, n) for n in (8, 64))
    assert 0 < large <= small + 1024


@pytest.mark.parametrize("kind", [dq.Ring, dq.Butterfly, dq.Direct])
@pytest.mark.parametrize("bits", [5.0, 8.5])
def test_wire_bits_are_the_budget(kind, bits):
    method, topology = dq.DynamiQ(bits=bits, widths=(2, 4, 8, 16)), kind(streams=1)
    layout = workers_of(method, topology, 8192, 32768).bound.layout
    assert (layout.chunks, layout.super_groups, layout.rows) == (1, 32768, 32768)
    coords = 2 * 8191 / 8192 * 8192 * layout.size  # that pass through every worker
    used = (layout.payload_bits + 8192 * layout.stats_bits) / coords
    assert bits - 0.01 < used <= bits


def test_the_command_prints_and_writes_a_row_for_each_case(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    file = tmp_path / "rows.json"
    size = ["--workers", "8", "--super-groups", "16", "--seeds", "2"]
    chosen = ["--topology", "direct", "--methods", "mxfp8,f32", "--json", str(file)]
    result = CliRunner().invoke(cli.app, ["simulate", *size, *chosen])
    assert result.exit_code == 0, result.output
    assert all(column.title in result.stdout for column in tables.ERROR_COLUMNS)
    mxfp8, f32 = json.loads(file.read_text())["rows"]
    assert [(row["topology"], row["method"], row["bits_per_coord"]) for row in (mxfp8, f32)] == [
        ("direct", "mxfp8", 8.25),
        ("direct", "f32", 32),
    ]
    assert 0 < mxfp8["lowest"] < mxfp8["vnmse"] < mxfp8["highest"] < 0.05
    assert f32["vnmse"] < 1e-12
    assert f"{mxfp8['vnmse']:.3e}" in result.stdout
    assert result.stderr.splitlines() == [
        f"{name} direct: 8 of 8 workers" for name in ("mxfp8", "f32") for _ in range(2)
    ]
