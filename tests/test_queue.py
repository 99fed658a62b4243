"""Buckets of one call that wait for others: the order, the bits, and the memory meanwhile."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import daily, small
from jax.extend.core import jaxpr_as_fun

import dynamiq_jax as dq
from dynamiq_jax import contrib
from dynamiq_jax.engine import run as engine
from dynamiq_jax.tree import leaves as tree_leaves

N = 4
MIN_MAX = small(contrib.MinMax(bits=8), bucket_bytes=1 << 10)
"""A bucket for each leaf of `tree`."""


def tree():
    """Distinct terms of each worker, [N, ...]; leaves are buckets of 2, 4 and 8 KiB."""
    rng = np.random.default_rng(0)
    sizes = {"a": 512, "b": 1024, "c": 2048, "d": 512}
    return {k: rng.standard_normal((N, n // 64, 64)).astype(np.float32) for k, n in sizes.items()}


def plan_of(collective):
    leaves = tree_leaves.describe_leaves(jax.tree.map(lambda x: x[0], tree()))
    return MIN_MAX.plan(leaves, (N,), collective)


ORDERS = {1: [3, 0, 1, 2], 5000: [3, 1, 0, 2], 7000: [3, 1, 0, 2], 13_000: [3, 2, 1, 0]}
"""Limits in bytes, and the order of the buckets: the large ones are last, the smallest first."""


@pytest.mark.parametrize("limit", ORDERS)
def test_no_more_travel_at_a_time_than_the_limit_says(limit):
    """Or one alone: every bucket starts after all that it waits for, and these have left."""
    for collective, copies in (("all-reduce", 1), ("all-gather", N)):
        plan, under_way, started = plan_of(collective), set(), []
        for number, before in engine.queue(plan, limit * copies):
            assert under_way.issuperset(before)
            under_way = (under_way - {*before}) | {number}
            nbytes = sum(plan.buckets[i].nbytes * copies for i in under_way)
            assert nbytes <= limit * copies or len(under_way) == 1
            started.append(number)
        assert started == ORDERS[limit]
        total = copies * sum(bucket.nbytes for bucket in plan.buckets)
        for wide in (total, None):
            assert engine.queue(plan, wide) == [(number, []) for number in range(4)]


def called(which, limit, monkeypatch):
    """The program of a collective of each worker's tree under a limit."""
    monkeypatch.setattr(engine, "IN_FLIGHT", limit)
    told = {"compression": MIN_MAX, "key": jax.random.key(1)}
    calls = {
        "psum": lambda x: dq.psum(x, "w", **told),
        "grad": jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(dq.pmean(x, "w", **told))))),
        "scatter": lambda x: dq.psum_scatter(x, "w", tiled=True, **told),
        "gather": lambda x: dq.all_gather(x, "w", tiled=True, **told),
    }
    return jax.make_jaxpr(jax.vmap(calls[which], axis_name="w"))(tree())


@pytest.mark.parametrize("which", daily(["psum", "grad", "scatter", "gather"], ["grad", "gather"]))
def test_waiting_changes_no_bit(which, monkeypatch):
    waiting, free = (called(which, limit, monkeypatch) for limit in (1, 1 << 29))
    count = lambda program: str(program).count("optimization_barrier")
    assert count(waiting) >= count(free) + 3
    found, expected = (jax.jit(jaxpr_as_fun(x))(*tree().values()) for x in (waiting, free))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def test_a_round_of_a_pipeline_waits_for_no_bucket(monkeypatch):
    """A wait would be one more round, with less beside it."""

    def program(limit):
        monkeypatch.setattr(engine, "IN_FLIGHT", limit)
        function = lambda own, x: x * sum(jnp.sum(w) for w in jax.tree.leaves(own))
        loss = lambda own, x: dq.overlapped([function], [own], x, "w", compression=MIN_MAX)
        found = jax.make_jaxpr(jax.vmap(jax.grad(loss), (0, None), axis_name="w"))(tree(), 1.0)
        return re.sub(r"0x[0-9a-f]+", "", str(found))

    assert program(1) == program(1 << 29)


def test_what_joins_leaves_takes_memory_when_they_are_there():
    """A buffer that depends on nothing would be there from the start of the program."""
    parts = [jnp.full((2, n), n, jnp.float32) for n in (64, 1, 130)]
    program = jax.make_jaxpr(partial(tree_leaves._copied.fun))(parts)
    own = {*program.jaxpr.invars}
    for equation in program.jaxpr.eqns:
        if not own.isdisjoint(x for x in equation.invars if not hasattr(x, "val")):
            own |= {*equation.outvars}
        else:
            assert all(x.aval.size == 1 for x in equation.outvars), equation
    (found,) = jaxpr_as_fun(program)(*parts)
    assert_same_bits(found, jnp.concatenate(parts, axis=-1))
