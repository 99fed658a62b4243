"""`wire_bits` is what the compiled program moves, bit for bit."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from cases import SMALL, auto_mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

ITEM_BITS = {"pred": 8, "s32": 32, "u32": 32, "u8": 8, "bf16": 16, "f16": 16, "f32": 32, "c64": 64}
COLLECTIVES = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter|send|recv"
OPERATION = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<name>{COLLECTIVES})(?P<start>-start)?\(")
BF16_ALL_REDUCE = re.compile(r"^\s*}\) : \(tensor<([\dx]*)bf16>\) -> tensor", re.MULTILINE)


def arrays_of(hlo_type):
    """(dtype, shape as text) of every array of an HLO type."""
    return re.findall(r"(\w+)\[([\d,]*)\]", hlo_type)


def bits_of(dtype, shape):
    size = 1
    for length in filter(None, shape.split(",")):
        size *= int(length)
    return size * ITEM_BITS[dtype]


def compiled(tree, n, method, topology=None):
    """The HLO of psum of ``tree`` (one worker's) on n devices, and its bf16 all-reduces."""

    def one(tree):
        return dq.psum(jax.tree.map(lambda x: x[0], tree), "data", method=method, topology=topology)

    mapped = jax.shard_map(one, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P())
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), tree)
    lowered = jax.jit(mapped).lower(stacked)
    asked = BF16_ALL_REDUCE.findall(lowered.as_text())
    return lowered.compile().as_text(), Counter(",".join(s.split("x")[:-1]) for s in asked)


def moved_bits(hlo, asked_in_bf16, n):
    """n times the bits that one worker sends (so that they are integers), by collective.

    XLA on CPU widens bf16 all-reduces to f32. What crosses a real network is what was asked for,
    as GPUs do it: an f32 all-reduce of the shape of one that was asked for in bf16 counts as that.
    """
    moved, pending = Counter(), asked_in_bf16.copy()
    for line in hlo.splitlines():
        match = OPERATION.search(line)
        if match is None:
            continue
        name, arrays = match["name"], arrays_of(match["type"])
        if match["start"] and name == "collective-permute":
            arrays = arrays[1:2]  # (operand, result, contexts)
        elif match["start"] and name == "all-gather":
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        for dtype, shape in arrays:
            bits = bits_of(dtype, shape)
            if name == "collective-permute":
                moved[name] += n * bits
            elif name == "all-gather":  # the result is n operands, and a worker passes on n-1
                moved[name] += (n - 1) * bits
            else:
                assert name == "all-reduce", line
                if dtype == "f32" and pending[shape] > 0:
                    pending[shape] -= 1
                    bits //= 2
                moved[name] += 2 * (n - 1) * bits
    return moved


TREE = {
    "w": jax.ShapeDtypeStruct((301, 99), jnp.float32),
    "v": jax.ShapeDtypeStruct((20_011,), jnp.bfloat16),
    "b": jax.ShapeDtypeStruct((97,), jnp.float32),
    "low": jax.ShapeDtypeStruct((53,), jnp.float16),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "phase": jax.ShapeDtypeStruct((7, 2), jnp.complex64),
}
LOW_LIMITS = {"min_leaf_size": 1000, "min_bucket_size": 1000}
CASES = {
    "tree": (TREE, 4, dq.DynamiQ(**LOW_LIMITS), None),
    "tree_exactly": (TREE, 4, dq.DynamiQ(), None),
    "eight_workers": ([jax.ShapeDtypeStruct((12_345,), jnp.float32)], 8, dq.DynamiQ(**SMALL), None),
    "six_workers": (
        [jax.ShapeDtypeStruct((50_000,), jnp.float16)],
        6,
        dq.DynamiQ(bits=3.5, subtract_mean=False, group_scale="bf16", group_size=32, **SMALL),
        None,
    ),
    "streams": (
        [jax.ShapeDtypeStruct((70_000,), jnp.float32)],
        3,
        dq.DynamiQ(bits=6, **SMALL),
        dq.Ring(streams=2, stream_size=0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wire_bits_are_what_the_program_moves(name):
    tree, n, method, topology = CASES[name]
    hlo, asked = compiled(tree, n, method, topology)
    moved = moved_bits(hlo, asked, n)
    compresses = name != "tree_exactly"
    assert (moved["collective-permute"] > 0) == compresses
    assert moved["collective-permute"] == moved["all-gather"]
    promised = dq.wire_bits(tree, n, method=method, topology=topology)
    # Integers but for 2 (n-1)/n, which is rounded once for each bucket and once for all.
    buckets = len({row.bucket for row in dq.explain(tree, n, method=method, verbose=False).rows})
    assert abs(promised - sum(moved.values()) / n) <= buckets


def test_nothing_moves_for_one_worker():
    hlo, asked = compiled(TREE, 1, dq.DynamiQ(**LOW_LIMITS))
    assert sum(moved_bits(hlo, asked, 1).values()) == 0
    assert dq.wire_bits(TREE, 1, method=dq.DynamiQ(**LOW_LIMITS)) == 0


def test_parser_reads_asynchronous_forms():
    """GPU programs have them; the numbers are those of the operations they start."""
    lines = """
    %a = (u32[8]{0}, u32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={}
    %b = u32[8]{0} collective-permute-done(%a)
    %c = (u32[8]{0}, u32[4,8]{1,0}) all-gather-start(%b), dimensions={0}
    %d = u32[4,8]{1,0} all-gather-done(%c)
    %e = (f32[2,16]{1,0}, f32[9]{0}) all-reduce-start(%d, %z), to_apply=%sum
    %f = (f32[2,16]{1,0}, f32[9]{0}) all-reduce-done(%e)
    """
    moved = moved_bits(lines, Counter({"2,16": 1}), 4)
    assert moved == {
        "collective-permute": 4 * 8 * 32,
        "all-gather": 3 * 32 * 32,
        "all-reduce": 6 * (32 * 16 + 9 * 32),
    }
