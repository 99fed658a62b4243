"""`wire_bits` is what the compiled program moves, bit for bit."""

import dataclasses
import math
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import TWO_WIDTHS, daily, low, over, small, wire_bits
from hlo import OPERATION, arrays_of, bits_of, groups_of, sent_bytes
from jax.sharding import PartitionSpec as P
from workers import mesh_of

import dynamiq_jax as dq
from dynamiq_jax.tree.leaves import describe_leaves

ASKED = re.compile(
    r'"stablehlo\.(all_reduce|all_gather|reduce_scatter)".*?\) -> tensor<([\dx]*)(\w+)>', re.DOTALL
)


def lower(collective, tree, sizes, compression, topology=None):
    """The HLO of a collective of ``tree`` (one worker's) on a mesh, and what it has in bf16."""
    n, axis = math.prod(sizes), ("node", "gpu")[-len(sizes) :]
    options = {"compression": over(topology, compression)}

    def one(tree):
        return collective(jax.tree.map(lambda x: x[0], tree), axis, **options)

    out = P() if collective is dq.psum else P(axis)
    mapped = jax.shard_map(one, mesh=mesh_of(*sizes, names=axis), in_specs=P(axis), out_specs=out)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), tree)
    lowered = jax.jit(mapped).lower(stacked)
    asked = Counter(
        (name.replace("_", "-"), ",".join(shape.split("x")[:-1]))
        for name, shape, dtype in ASKED.findall(lowered.as_text())
        if dtype == "bf16"
    )
    return lowered.compile().as_text(), asked


def moved_bits(hlo, asked_in_bf16, n, n_inner=None):
    """Bits that all n workers together send, by collective; "crossing": between nodes.

    XLA on CPU widens bf16 collectives to f32. What crosses a real network is what was asked for,
    as GPUs do it: an f32 result of the shape of one that was asked for in bf16 counts as that.
    """
    moved, pending = Counter(), asked_in_bf16.copy()
    for line in hlo.splitlines():
        match = OPERATION.search(line)
        if match is None:
            continue
        name, arrays = match["name"], arrays_of(match["type"])
        assert not match["start"], "asynchronous forms list operands, too"
        groups = groups_of(line)
        total = 0
        for dtype, shape in arrays:
            bits = bits_of(dtype, shape)
            if dtype == "f32" and pending[name, shape] > 0:
                pending[name, shape] -= 1
                bits //= 2
            total += bits
        if name == "collective-permute":
            sent = total * sum(source != target for source, target in groups)
        else:
            size = len(groups[0])
            assert sorted(sum(groups, [])) == list(range(n)), line
            # The result of an all-gather and of an all-to-all is what a worker passes on and its
            # own part; that of a reduce-scatter is one part.
            parts = {"all-gather": 1, "all-to-all": 1, "all-reduce": 2, "reduce-scatter": size}
            sent = total * parts[name] * (size - 1) * (n // size)
        moved[name] += sent
        if n_inner and any(len({worker // n_inner for worker in group}) > 1 for group in groups):
            moved["crossing"] += sent
    assert not +pending
    return moved


TREE = {
    "w": jax.ShapeDtypeStruct((301, 99), jnp.float32),
    "v": jax.ShapeDtypeStruct((20_011,), jnp.bfloat16),
    "b": jax.ShapeDtypeStruct((97,), jnp.float32),
    "low": jax.ShapeDtypeStruct((53,), jnp.float16),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "phase": jax.ShapeDtypeStruct((7, 2), jnp.complex64),
}


def flat_of(size, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((size,), dtype)]


FIVE, ONE = small(dq.DynamiQ()), flat_of(12_345)
FEW = small(dq.DynamiQ(bits=3.5, floor=None, format=dq.Format(group_scale="bf16")))
TWO = low(TWO_WIDTHS.method)
HALVES, SCATTERED = {"collective-permute", "all-gather"}, {"all-to-all", "all-gather"}
CASES = {
    "tree": (TREE, (4,), low(dq.DynamiQ()), dq.Ring(balance=0), HALVES),
    "tree_exactly": (TREE, (4,), dq.DynamiQ(), None, set()),
    "eight_workers": (ONE, (8,), FIVE, dq.Ring(), HALVES),
    "six_workers": (flat_of(50_000, jnp.float16), (6,), FEW, dq.Ring(), HALVES),
    "streams": (flat_of(70_000), (3,), small(dq.DynamiQ(bits=6)), dq.Ring(streams=2), HALVES),
    "butterfly": (ONE, (8,), FIVE, dq.Butterfly(balance=0.5), HALVES),
    "butterfly, streams": (ONE, (4,), FIVE, dq.Butterfly(streams=2), HALVES),
    "direct": (TREE, (4,), TWO, None, SCATTERED),
    "direct, streams": (ONE, (3,), FIVE, dq.Direct(streams=2, balance=0.5), SCATTERED),
    "flat": (ONE, (2, 4), FIVE, dq.Butterfly(), HALVES),
    "hierarchy": (TREE, (2, 4), TWO, dq.Hierarchical(), {"reduce-scatter", *HALVES}),
    "hierarchy, f32": (TREE, (2, 4), low(dq.F32()), dq.Hierarchical(), {"reduce-scatter", *HALVES}),
    "hierarchy, compressed inside": (
        ONE, (2, 4), FIVE, dq.Hierarchical(inner=dq.Direct(), outer=dq.Ring()),
        {"all-to-all", *HALVES},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", daily(CASES, ["direct", "hierarchy"]))
def test_wire_bits_are_what_the_program_moves(name):
    tree, sizes, method, topology, expected = CASES[name]
    n = math.prod(sizes)
    hlo, asked = lower(dq.psum, tree, sizes, method, topology)
    moved = moved_bits(hlo, asked, n, sizes[-1])
    crossing = moved.pop("crossing", 0)
    assert set(moved) == expected | {"all-reduce"}
    options = {"compression": over(topology, method)}
    promised = wire_bits(method, topology)(tree, sizes)
    # Integers but for 2 (n-1)/n, which is rounded once for each bucket and once for all.
    explanation = dq.explain(tree, sizes, **options, verbose=False)
    buckets = len({row.bucket for row in explanation.rows})
    assert abs(promised - sum(moved.values()) / n) <= buckets
    if isinstance(topology, dq.Hierarchical):
        # `explain` counts exact leaves with the outer links, whatever XLA does.
        exact = sum(row.wire_bytes for row in explanation.rows if row.bucket is None)
        outside = explanation.outer_wire_bytes - exact
        assert abs(crossing / n - 8 * exact - 8 * outside) <= buckets
        assert 0 < crossing / n < promised
    elif topology is not None and topology.balance == 0:
        assert moved["collective-permute"] == moved["all-gather"]


SHARDED = {  # the most bits of a coordinate: 20.2 super-groups take 3 tiles of 8, in two streams 4
    "direct": (3, dq.Direct(), {"all-to-all", "all-reduce"}, 5.7),
    "ring": (4, dq.Ring(streams=2), {"collective-permute", "all-reduce"}, 7.2),
    "butterfly": (4, dq.Butterfly(), {"collective-permute", "all-reduce"}, 5.7),
    "all-gather": (4, None, {"all-gather"}, 5.4),
}


@pytest.mark.parametrize("name", daily(SHARDED, ["direct", "all-gather"]))
def test_halves_move_what_the_method_says(name):
    """Scatters and their statistics, and an all-gather."""
    n, topology, expected, most = SHARDED[name]
    size, method = 256 * 20 + 40, small(dq.DynamiQ())
    half = partial(dq.all_gather if topology is None else dq.psum_scatter, tiled=True)
    tree = jax.ShapeDtypeStruct((size if topology is None else n * size,), jnp.float32)
    moved = moved_bits(*lower(half, tree, (n,), method, topology), n)
    assert set(moved) == expected
    assert abs(method.method.sharded_wire_bits(size, n, topology) - sum(moved.values()) / n) <= 1
    assert sum(moved.values()) / n < most * (n - 1) * size


MINMAX, QSGD, MXFP6 = (
    method() for method in (dq.contrib.MinMax, dq.contrib.GlobalQSGD, dq.contrib.MXFP6)
)
DERIVED = {
    "minmax, direct": (MINMAX, dq.Direct(), {"all-to-all"}),
    "mxfp6, ring": (MXFP6, dq.Ring(streams=2), {"collective-permute"}),
    "qsgd, butterfly": (QSGD, dq.Butterfly(), {"collective-permute", "all-reduce"}),
    "bf16, direct": (dq.BF16(), dq.Direct(), {"all-to-all"}),
    "bf16, native": (dq.BF16(), None, {"reduce-scatter"}),
    "f32, native": (dq.F32(), None, {"reduce-scatter"}),
    "mxfp6, all-gather": (MXFP6, "gather", {"all-gather"}),
    "qsgd, all-gather": (QSGD, "gather", {"all-gather"}),
    "bf16, all-gather": (dq.BF16(), "gather", {"all-gather"}),
}


@pytest.mark.parametrize("name", daily(DERIVED, ["minmax, direct", "qsgd, all-gather"]))
def test_derived_halves_move_what_the_method_says(name):
    """Slices of 5160 coordinates are not whole units of any of these methods."""
    n, size, (method, topology, expected) = 4, 256 * 20 + 40, DERIVED[name]
    topology, gather = (None, True) if topology == "gather" else (topology, False)
    half = partial(dq.all_gather if gather else dq.psum_scatter, tiled=True)
    tree = jax.ShapeDtypeStruct((size if gather else n * size,), jnp.float32)
    moved = moved_bits(*lower(half, tree, (n,), small(method), topology), n)
    assert set(moved) == expected
    assert method.sharded_wire_bits(size, n, topology) == sum(moved.values()) / n


LEVELS = {
    "native inside": (dq.Hierarchical(outer=dq.Direct()), {"reduce-scatter", "all-to-all"}),
    "compressed inside": (
        dq.Hierarchical(inner=dq.Direct(), outer=dq.Ring()),
        {"all-to-all", "collective-permute"},
    ),
}


@pytest.mark.parametrize("name", daily(LEVELS, ["native inside"]))
def test_halves_over_two_levels_move_what_the_route_says(name):
    """2 hosts of 4: a worker's link carries one payload; without levels it carries four."""
    topology, expected = LEVELS[name]
    sizes, n, part = (2, 4), 8, 256 * 20 + 40
    method = dataclasses.replace(small(dq.DynamiQ()), topology=topology)
    own, whole = flat_of(part), flat_of(n * part)
    scatter, gather = (partial(f, tiled=True) for f in (dq.psum_scatter, dq.all_gather))
    for run, kind, part_of_all, moves in (
        (scatter, "reduce-scatter", whole, expected | {"all-reduce"}),
        (gather, "all-gather", own, {"all-gather"}),
    ):
        (move,) = method.plan(describe_leaves(part_of_all), sizes, kind).moves
        promised = move.sent_bits, move.outer_bits
        moved = moved_bits(*lower(run, part_of_all, sizes, method), n, n_inner=4)
        crossing = moved.pop("crossing")
        assert set(moved) == moves
        assert abs(promised[0] - sum(moved.values()) / n) <= 1
        assert abs(promised[1] - crossing / n) <= 1
        assert 0 < promised[1] < 5.7 * part


def test_parser_reads_groups_by_axes():
    line = "%a = f32[9] all-reduce(%b), replica_groups=mesh['node'=2,'gpu'=4] {'AXES'}"
    assert groups_of(line.replace("AXES", "gpu")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of(line.replace("AXES", "node")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_of(line.replace("AXES", "node','gpu")) == [[*range(8)]]
    pairs = line.replace("'AXES'", "'gpu':(2)2")
    assert groups_of(pairs) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(line.replace("'AXES'", "'gpu':(1)2")) == [[0, 2], [1, 3], [4, 6], [5, 7]]


PROGRAM = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8,4]) -> bf16[2,4] {
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add
}

%body (x: f32[100]) -> f32[100] {
  ROOT %ar = f32[100]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (p: f32[100]) -> f32[100] {
  %loop = f32[100]{0} while(%p), condition=%test, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %s = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}) async-start(%q), calls=%wrapped
  %d = bf16[2,4]{1,0} async-done(%s), calls=%wrapped
  %g = (u8[10]{0}, u8[20]{0}) all-gather-start(%u), replica_groups={{0,1},{2,3}}, dimensions={0}
  %h = u8[20]{0} all-gather-done(%g)
  %g2 = ((u8[10]{0}), u8[20]{0}) all-gather-start(%u), replica_groups={{0,1},{2,3}}, dimensions={0}
  %e = ((u32[2,7]{1,0}), u32[2,7]{1,0}) all-to-all-start(%y), replica_groups={{0,1},{2,3}}
  %r = ((bf16[9]{0}), bf16[9]{0}) all-reduce-start(%y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %c = (u32[5]{0}, u32[5]{0}, u32[], u32[]) collective-permute-start(%v), channel_id=1
  %t = (pred[6]{0}, pred[6]{0}) all-to-all(%w, %z), replica_groups=mesh['a'=2,'b'=2] {'b'}
}
"""


def test_bytes_that_a_program_sends():
    by_hand = {
        "three all-reduces of 400 bytes among 4": 3 * 2 * 3 / 4 * 400,
        "a scatter of 64 bytes among 4": 3 / 4 * 64,
        "a gather of 20 bytes in pairs": 1 / 2 * 20,
        "another one, as JAX 0.11 writes it": 1 / 2 * 20,
        "an exchange of 56 bytes in pairs": 1 / 2 * 56,
        "an all-reduce of 18 bytes in pairs": 2 * 1 / 2 * 18,
        "a permute of 20 bytes": 20,
        "an exchange of 12 bytes in pairs": 1 / 2 * 12,
    }
    assert sent_bytes(PROGRAM, 4) == sum(by_hand.values())
