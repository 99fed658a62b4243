"""The simulator of large all-reduces: that it does what the library does, and errs as promised."""

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import CHEAP, LOOP, daily
from jax import lax
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import cli
from dynamiq_jax.commands.simulate import (
    Member,
    Source,
    add_exactly,
    mixture_source,
    simulate,
    worker_gradient,
    workers_of,
)
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.sequential import decode_chunk, reduce_chunk, tree_of
from dynamiq_jax.methods.base import Call

SUPER_GROUPS = 32
SEED = np.array([3, 5], np.uint32)
ONE = {"streams": 1}


@functools.cache
def rows_of(n):
    """f32[n, n * 32 * 256]: as many super-groups of every magnitude as there are chunks."""
    source = mixture_source(jax.random.key(0), SUPER_GROUPS)
    source = Source(source.seed, jnp.tile(source.deviation, n))
    return jax.jit(jax.vmap(functools.partial(worker_gradient, source)))(jnp.arange(n))


@functools.cache
def library(method, topology, n):
    """Every worker's all-reduced sum of `rows_of`, and what the workers share."""

    def one(x, seed):
        call = Call(Axis(("w",)), topology, seed)
        layout = method.layout(x.size, n, topology)
        return method.all_reduce(x, call).value, method.agreed(x, layout, call)

    return jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="w"))(rows_of(n), SEED)


class Rows(NamedTuple):
    """Workers whose gradients are rows, with the library's own sizes."""

    method: Any
    topology: Any
    n: int

    def __call__(self, given, worker):
        x, shared = given
        call = Call(Member((), count=self.n, number=worker), self.topology, jnp.asarray(SEED))
        layout = self.method.layout(x.shape[1], self.n, self.topology)
        return self.method.codec(x[worker], shared, layout, call)


MXFP4 = dq.contrib.MXFP4(rounding="stochastic")
CASES = {
    "dynamiq, ring of 4": (CHEAP.method, dq.Ring(unroll_up_to=1, **ONE), 4),
    "dynamiq, butterfly of 8": (CHEAP.method, dq.Butterfly(**ONE), 8),
    "dynamiq, direct of 4": (CHEAP.method, dq.Direct(**ONE), 4),
    "default, ring of 8": (dq.DynamiQ(), dq.Ring(**ONE), 8),
    "default, butterfly of 4": (dq.DynamiQ(), dq.Butterfly(**ONE), 4),
    "dither, direct of 8": (dq.DynamiQ(dither=True), dq.Direct(**ONE), 8),
    "f32, ring of 5": (dq.F32(), dq.Ring(**ONE), 5),
    "mxfp4, butterfly of 8": (MXFP4, dq.Butterfly(**ONE), 8),
    "mxfp4, direct of 3": (MXFP4, dq.Direct(**ONE), 3),
}
DAILY = ["dynamiq, ring of 4", "dynamiq, butterfly of 8", "dynamiq, direct of 4", "f32, ring of 5"]


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_a_chunk_of_the_library_bit_for_bit(name):
    """With the library's own sizes and plan, one worker after the other gives its chunk 0."""
    method, topology, n = CASES[name]
    totals, shared = library(method, topology, n)
    shared, x = jax.tree.map(lambda leaf: leaf[0], shared), rows_of(n)
    workers = Rows(method, topology, n)
    payload = reduce_chunk(topology, n, workers, (x, shared))
    found = np.asarray(decode_chunk(workers, topology, n, (x, shared), payload))
    if isinstance(method, dq.DynamiQ):  # coordinates of the super-groups that chunk 0 holds
        own = np.asarray(shared.plan.order[0])
        own = (256 * own[:, None] + np.arange(256)).reshape(-1)
    else:
        own = np.arange(SUPER_GROUPS * 256)
    assert len(np.unique(found[own])) > 10
    assert_same_bits(found[own], np.asarray(totals)[0, own])


@pytest.mark.parametrize("topology", [dq.Ring(), dq.Butterfly(), dq.Direct()], ids=str)
def test_every_worker_sends_once_and_after_all_that_it_adds(topology):
    tree = tree_of(topology, 8)
    order = tree.order()
    assert sorted(order) == list(range(8))
    assert order[-1] == 0
    assert tree.to[0] == -1
    for worker in range(1, 8):
        assert order.index(worker) < order.index(tree.to[worker])
    assert len({*zip(tree.slot.tolist(), tree.stage.tolist(), strict=True)}) == 8


@functools.cache
def simulated(topology, n):
    return simulate(workers_of(CHEAP.method, topology, n, SUPER_GROUPS), jax.random.key(1))


@pytest.mark.parametrize(
    ("topology", "n"),
    daily(
        [(LOOP, 4), (LOOP, 8), (LOOP, 64), (dq.Butterfly(), 64), (dq.Direct(), 64)],
        [(LOOP, 8), (LOOP, 64), (dq.Direct(), 64)],
    ),
)
def test_the_error_is_what_the_method_promises_for_so_many_workers(topology, n):
    """All super-groups have width 4, so that the sum errs as each of them."""
    expected = CHEAP.method.relative_error(n, topology)
    assert simulated(topology, n) == pytest.approx(expected, rel=0.2)


def test_the_error_of_a_ring_grows_with_the_workers():
    assert simulated(LOOP, 64) > 5 * simulated(LOOP, 8)


def test_sums_keep_what_f32_rounds_off():
    start = jnp.ones((2,)), jnp.zeros((2,))
    small = jnp.array([2.0**-30, -(2.0**-35)])
    add = lambda s: lax.fori_loop(0, 100, lambda i, s: add_exactly(s, small), s)
    high, low = jax.jit(add)(start)
    total = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    np.testing.assert_array_equal(total, 1 + 100 * np.asarray(small, np.float64))


@pytest.mark.parametrize("kind", [dq.Ring, dq.Butterfly, dq.Direct])
def test_wire_bits_are_the_budget(kind):
    workers = workers_of(dq.DynamiQ(), kind(), 8192, 512)
    layout = workers.layout
    assert (layout.chunks, layout.super_groups, layout.rows) == (1, 512, 512)
    coords = 2 * 8191 * layout.size  # that pass through every worker
    pairs = zip(layout.payload_words, layout.payloads_sent, strict=True)
    payloads = sum(32 * words * sent for words, sent in pairs)
    # Statistics are of one chunk, and those of all n chunks are sent.
    assert 4.8 < (payloads + 8192 * layout.stats_bits) / coords <= 5.01


def run(*arguments):
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_the_command_prints_and_writes_a_row_for_each_case(tmp_path):
    file = tmp_path / "rows.json"
    size = ["--workers", "2,8", "--super-groups", "16", "--seeds", "2", "--topology", "direct"]
    result = run(*size, "--methods", "mxfp8", "--json", str(file))
    assert result.exit_code == 0, result.output
    two, eight = json.loads(file.read_text())["rows"]
    assert (two["n_workers"], eight["n_workers"], eight["bits_per_coord"]) == (2, 8, 8.25)
    assert 0 < eight["lowest"] < eight["vnmse"] < eight["highest"] < 0.05
    assert f"{eight['vnmse']:.3e}" in result.stdout


REFUSED = {
    ("--workers", "8,many"): "not a number of workers",
    ("--workers", "1"): "'1' is not a number of workers from 2",
    ("--workers", "12", "--topology", "butterfly"): "needs a power of two",
    ("--methods", "thc"): "without memory is simulated",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refusals_take_one_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert REFUSED[arguments] in result.stderr
    assert result.stderr.count("\n") == 1
