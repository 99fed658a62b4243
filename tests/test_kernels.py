"""Kernels give the reference's bits on Pallas' interpreter, and lower for GPUs on any machine."""

import itertools
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from jax.sharding import PartitionSpec as P
from kernel_runs import (
    FORMATS,
    dealt,
    energies,
    kernels_of,
    lowered_for_cuda,
    operands,
    payloads,
    programs,
    run,
)

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.jaxprs.walk import equations_of
from pallas_kernels import kernels, push, triton
from pallas_kernels._compat import JOINS_PROCESSES, RUNS_MOSAIC
from pallas_kernels.format import DEALT, QUAD, padded_count
from pallas_kernels.mosaic import Mosaic, _Tile
from pallas_kernels.triton import Triton
from pallas_kernels.tuning import _HOPPER

SIZE = 2 * 8 * 2 * 256 + 1000  # two chunks of two tiles and more; no multiple of anything


@cache
def case(name, dtype="float32"):
    """The layout of a format, its operands, and payloads that arrive."""
    layout, given = operands(FORMATS[name], SIZE, jnp.dtype(dtype))
    return layout, given, payloads(layout, FORMATS[name], given)


def test_a_format_without_bits_is_traced():
    """A release compares what its kernels return."""
    fmt, out = FORMATS["width 0"], jnp.float32

    def traced():
        layout, given = operands(fmt, SIZE, out)
        arrived = payloads(layout, fmt, given)
        coding = programs(layout, fmt, out, "jnp")
        return [coding[name](given, arrived) for name in kernels_of("width 0")]

    assert len(jax.eval_shape(traced)) == len(kernels_of("width 0"))


@pytest.mark.parametrize("name", daily(FORMATS, ["width 4", "dither, width 6"]))
def test_interpreted_kernels_give_the_bits_of_the_reference(name):
    dtype, fmt = jnp.float32 if len(name) % 2 else jnp.bfloat16, FORMATS[name]
    layout, given, arrived = case(name, dtype.__name__)
    expected, actual = (
        run(kernels_of(name), layout, fmt, dtype, backend, given, arrived)
        for backend in ("jnp", "interpret")
    )
    for kernel, value in expected.items():
        np.testing.assert_array_equal(actual[kernel], value, err_msg=kernel)


@pytest.mark.parametrize("kernel", ["decompress into", "decompress_accumulate into"])
def test_other_chunks_keep_what_they_are_placed_into(kernel):
    layout, given, arrived = case("default")
    part = run([kernel], layout, FORMATS["default"], jnp.float32, "jnp", given, arrived)[kernel]
    other = np.asarray(given.order)[0]
    other = other[other < part.shape[0]]
    assert (part[other] == 7).all()
    assert (np.delete(part, other, axis=0) != 7).any()


def test_interpreted_statistics_agree_to_rounding():
    x = jax.random.normal(jax.random.key(0), (SIZE,)) + 0.5
    for actual, expected in zip(
        pk.statistics(x, backend="interpret"), pk.statistics(x, backend="jnp"), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)


SHARDS = [(1, 3, 80, 0), (1, 61, 80, 5), (1, 1, 8, 3), (2, 2, 96, 5)]
"""Shards, the chunks of each, super-groups of a chunk, and how many of a shard are padding.

Means of 8 * 61 super-groups of the kind "edges" are rounded below their level.
"""


@pytest.mark.parametrize(("shards", "chunks", "size", "padding"), daily(SHARDS, SHARDS[1::2]))
def test_interpreted_kernels_deal_as_the_reference(shards, chunks, size, padding, monkeypatch):
    # So that programs are many: blocks of 32 super-groups, columns of 2 blocks, 2 and 4 tiles.
    for kernel, rows in {"deal_count": 32, "deal_begin": 2, "deal_width": 4}.items():
        monkeypatch.setitem(_HOPPER, kernel, _HOPPER[kernel]._replace(rows_per_program=rows))
    monkeypatch.setattr(triton, "_MOST_MEMBERS", 2 * padded_count(8 * chunks))
    deal = jax.jit(lambda e: [dealt(e, chunks, size, of) for of in ("jnp", "interpret")])
    for kind, energy in energies(shards, chunks * size - padding).items():
        expected, actual = deal(energy)
        for field, one, other in zip(expected._fields, expected, actual, strict=True):
            jax.tree.map(
                partial(np.testing.assert_array_equal, err_msg=f"{field}, {kind}"), one, other
            )


LOWERINGS = {"triton": Triton(), "mosaic": Mosaic()}


LOWERED = ["default", "paper", "bf16 scales", "odd widths", "dither"]


LOWERED_DAILY = [("default", "mosaic", False), ("dither", "triton", False)]


@pytest.mark.parametrize(
    ("name", "lowering", "variants"),
    daily(itertools.product(LOWERED, LOWERINGS, [False, True]), LOWERED_DAILY),
)
def test_kernels_lower_for_cuda(name, lowering, variants, monkeypatch):
    """And their variants: without means, with one worker left out, into an array that is there."""
    fmt, (layout, given, arrived) = FORMATS[name], case(name)
    options = {"lowering": LOWERINGS[lowering]}
    monkeypatch.setattr(pk, "_implementation", lambda *_: (kernels, options))
    calls = programs(layout, fmt, jnp.float32, lowering)
    calls["statistics"] = lambda o, p: pk.statistics(o.x[0])
    if lowering == "triton":  # the other leaves it to XLA
        calls["deal"] = lambda o, p: dealt(o.mean[None], 2, o.order.shape[1])
    for kernel, program in calls.items():
        if variants != (" " in kernel):
            continue
        if lowering == "mosaic" and not RUNS_MOSAIC and kernel.endswith(" into"):
            continue  # these need references as operands
        lowered = lowered_for_cuda(program, given, arrived)
        assert f"dynamiq_{kernel.split()[0]}" in lowered, kernel


def compared_after_bitcasts(program):
    """Primitives whose result depends on the sign of an int32 that was bitcast from uint32."""
    signed = {"lt", "le", "gt", "ge", "min", "max", "div", "rem", "convert_element_type", "abs"}
    kept = {"add", "sub", "mul", "and", "or", "xor", "neg", "select_n", "broadcast_in_dim"}
    kept |= {"reshape", "shift_right_arithmetic", "shift_left", "concatenate"}
    found, cast = set(), set()
    for equation in equations_of(program):
        name, operands = equation.primitive.name, [id(x) for x in equation.invars]
        if name == "bitcast_convert_type":
            kinds = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            cast |= {id(equation.outvars[0])} if kinds == (jnp.uint32, jnp.int32) else set()
        elif cast & {*operands}:
            found |= {name} & signed
            cast |= {id(x) for x in equation.outvars if name in kept}
    return found


def lowered_compression(tiles: int) -> str:
    """The program of one payload with so many tiles, for CUDA."""
    fmt, of = pk.WireFormat(widths=(4, 6)), jax.ShapeDtypeStruct
    rows = 8 * tiles - 3

    def compress(x, order, records, noise):
        target = pk.Target(records, noise, tiles * fmt.tile_words(4))
        source, chunks = pk.Source(x, None, order), jnp.zeros(1, jnp.int32)
        return kernels.compress(source, chunks, target, fmt=fmt, lowering=Triton())

    of_tiles = of((1, 8 * tiles), jnp.int32), of((1, tiles), jnp.int32)
    x, noise = of((256 * rows,), jnp.bfloat16), of((8,), jnp.uint32)
    return lowered_for_cuda(compress, x, *of_tiles, noise)


def test_python_searches_no_module_while_kernels_are_lowered(monkeypatch):
    searched = []

    class Searches:
        def find_spec(self, name, path=None, target=None):
            searched.append(name)

    monkeypatch.setattr(sys, "meta_path", [Searches(), *sys.meta_path])
    lowered_compression(1)  # loads modules
    searched.clear()
    lowered_compression(2)
    assert not searched


@pytest.mark.parametrize("name", daily(FORMATS, ["dither, odd widths"]))
def test_no_kernel_compares_a_bitcast_word(name):
    """Mosaic's lane semantics, which pushes have, would compare it as the uint32 that it was."""
    fmt, (layout, given, arrived) = FORMATS[name], case(name)
    for kernel, program in programs(layout, fmt, jnp.float32, "interpret").items():
        found = compared_after_bitcasts(jax.make_jaxpr(program)(given, arrived).jaxpr)
        assert not found, (kernel, found)
    word, limit = jnp.uint32(3), np.int32(2)
    signed = lambda x: jnp.minimum(jax.lax.bitcast_convert_type(x, jnp.int32) >> 1, limit)
    assert compared_after_bitcasts(jax.make_jaxpr(signed)(word).jaxpr) == {"min"}


def test_mosaic_takes_as_many_groups_as_a_warp_has_threads(monkeypatch):
    fmt = pk.WireFormat(group_size=8, super_group_size=512)
    layout, given = operands(fmt, SIZE, jnp.float32)
    arrived = payloads(layout, fmt, given)
    monkeypatch.setattr(pk, "_implementation", lambda *_: (kernels, {"lowering": Mosaic()}))
    program = programs(layout, fmt, jnp.float32, "mosaic")["compress"]
    with pytest.raises(NotImplementedError, match="up to 32 groups .* pass group_size >= 16"):
        lowered_for_cuda(program, given, arrived)


DTYPES_OF_GRADIENTS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    ("size", "dtype"),
    daily(
        itertools.product([128, 256, 512, 1024, 2048], DTYPES_OF_GRADIENTS),
        [(128, "bfloat16"), (1024, "float16")],
    ),
)
def test_statistics_of_mosaic_lower_for_cuda(size, dtype):
    statistics = partial(Mosaic().statistics, super_group_size=size)
    x = jax.ShapeDtypeStruct((3, SIZE), dtype)
    assert "dynamiq_statistics" in lowered_for_cuda(statistics, x.update(shape=(SIZE,)))
    assert "@mosaic_gpu" in lowered_for_cuda(jax.vmap(statistics), x)


@pytest.mark.parametrize("group_size", [8, 64])
def test_mosaic_numbers_the_quads_of_more_coordinates_than_an_int32_has(group_size):
    fmt = pk.WireFormat(group_size=group_size)
    group, row = np.arange(fmt.groups, dtype=np.int32), 2**31 // fmt.super_group_size + 3
    tile = _Tile(fmt, None, None, group, None)
    first = np.asarray(tile._first_quad(np.full(fmt.groups, row, np.int32)))
    quads = np.sort(np.ravel(first[:, None] + DEALT * np.arange(tile.quads)))
    count = fmt.super_group_size // QUAD
    np.testing.assert_array_equal(quads, row * count + np.arange(count))


AXES = [{"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 4}, {"x": 1, "y": 2}]


@pytest.mark.parametrize("axes", daily(AXES, [AXES[1], AXES[3]]))
@pytest.mark.parametrize("lengths", [[4 * 70_000, 7], [513 * 4], [6, 1], [4 * 512 * 64 * 3 + 4]])
def test_blocks_push_every_word_once_to_where_it_belongs(axes, lengths):
    n = int(np.prod(list(axes.values())))
    plans = push.copies(lengths, n)
    parts = plans[0].parts
    assert {plan.parts for plan in plans} == {parts}
    assert n * parts <= push.BLOCKS
    sends = [[push.peer_of(me, block, axes) for block in range(n)] for me in range(n)]
    for me, peers in enumerate(sends):
        assert sorted(int(peer) for peer, _ in peers) == list(range(n))
        assert int(peers[-1][0]) == me
        for peer, place in peers:
            at = tuple(int(place[name]) for name in axes)
            assert np.ravel_multi_index(at, tuple(axes.values())) == peer
    for block in range(n):  # one signal for the counter of every worker's block of this number
        assert sorted(int(peers[block][0]) for peers in sends) == list(range(n))
    thread = np.arange(push.THREADS)
    for plan, length in zip(plans, lengths, strict=True):
        assert plan.words * plan.units == length
        turn, part, load = np.ogrid[: plan.rounds, :parts, : push.AT_ONCE]
        units = (plan.first(turn, part) + load * push.THREADS)[..., None] + thread
        units = units[units < plan.units]
        np.testing.assert_array_equal(np.sort(units), np.arange(plan.units))


DTYPES = ["uint8", "bfloat16", "float32", "uint32", "int64"]
SHAPES = [((3, 5),), ((3, 2, 4),), ((3,),)]


@pytest.mark.parametrize("dtype", daily(DTYPES, ["bfloat16", "int64"]))
@pytest.mark.parametrize("shape", daily(SHAPES, SHAPES[:1]))
def test_words_of_a_push_hold_the_bits_of_any_dtype(shape, dtype):
    with jax.enable_x64(True):
        x = jax.random.bits(jax.random.key(0), shape, jnp.uint32).astype(dtype)
        words = push._words(x, 3)
        assert words.dtype == jnp.uint32 and words.shape[0] == 3
        back = push._values(words.reshape(-1), shape, x.dtype)
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(back, x)


@pytest.mark.skipif(not RUNS_MOSAIC, reason="this JAX has too little of Mosaic GPU")
@pytest.mark.parametrize("axes", [{"x": 4}, {"y": 2}, {"x": 4, "y": 2}])
def test_pushes_lower_for_cuda(axes, monkeypatch):
    monkeypatch.setattr(push, "check_push", lambda names: None)
    sizes, n = (4, 2), int(np.prod(list(axes.values())))
    leaves = [
        jax.ShapeDtypeStruct((8, n, k), dtype) for k, dtype in ((640, "uint32"), (7, "uint8"))
    ]

    def both(*leaves):
        leaves = [x[0] for x in leaves]
        moved = pk.exchange(leaves, axes, to_all=False), pk.exchange(leaves, axes, to_all=True)
        return jax.tree.map(lambda x: x[None], moved)

    spec = P(("x", "y"))
    mapped = jax.shard_map(both, in_specs=spec, out_specs=spec)
    lowered = lowered_for_cuda(mapped, *leaves, mesh=(sizes, ("x", "y")))
    assert lowered.count("dynamiq_push") >= 2
    assert lowered.count("uses_xla_collective_metadata = true") == 2


@pytest.mark.skipif(not JOINS_PROCESSES, reason="this JAX has no kernels between processes")
def test_pushes_between_processes_share_the_memory_of_all_operands(monkeypatch):
    """JAX does so where it knows from a mesh's devices that there are several processes."""
    from jax.experimental.mosaic.gpu import core

    monkeypatch.setattr(push, "check_push", lambda names: None)
    move = lambda x: pk.exchange(x[0], {"x": 2}, to_all=False)[None]
    mapped = jax.shard_map(move, in_specs=P("x"), out_specs=P("x"))
    x = jax.ShapeDtypeStruct((2, 2, 640), jnp.uint32)
    lowered = lambda: lowered_for_cuda(mapped, x, mesh=((2,), ("x",)))
    assert "symmetric_memory_parameters" not in lowered()
    jax.clear_caches()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="2 processes .* AbstractMesh; pass mesh="):
        lowered()
    monkeypatch.setattr(core, "_is_known_multihost_mesh", lambda mesh: True)
    # The words that are sent and those that come, the counter, and its copy, as JAX passes it.
    assert 'symmetric_memory_parameters = "1,1,1,1"' in lowered()


@pytest.mark.skipif(not RUNS_MOSAIC, reason="this JAX has too little of Mosaic GPU")
@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("dither", [True, False])
def test_an_all_reduce_by_one_push_kernel_lowers_for_cuda(plan, dither, monkeypatch):
    monkeypatch.setattr(push, "check_push", lambda names: None)
    monkeypatch.setattr(push, "_multiprocessors", lambda: 4)
    method = dq.Compression(
        dq.DynamiQ(bits=4, plan=plan, dither=dither), topology=dq.Direct(transport="push"),
        min_bucket_size=0, min_bucket_bytes=0,
    )  # fmt: skip

    def lowered(reduce, *shape):
        one = partial(reduce, axis_name=("x", "y"), compression=method)
        mapped = jax.shard_map(lambda x: one(x[0]), in_specs=P(("x", "y")), out_specs=P())
        x = jax.ShapeDtypeStruct((4, *shape), jnp.bfloat16)
        return lowered_for_cuda(mapped, x, mesh=((2, 2), ("x", "y")))

    program = lowered(dq.psum, 2**16)
    assert "dynamiq_push_all_reduce" in program
    # A plan needs the sum of all messages first.
    assert program.count("uses_xla_collective_metadata = true") == 1 + plan
    with pytest.raises(NotImplementedError, match="jax.vmap asks for 3; .*transport='permutes'"):
        lowered(lambda x, **told: jax.vmap(partial(dq.psum, **told))(x), 3, 2**16)


@pytest.mark.release
def test_every_kernel_of_a_gradient_is_timed():
    import coding_kernels  # pyright: ignore[reportMissingImports]

    found = coding_kernels.bench_kernels(4096, bits=4, dither=True, repeats=1, backend="jnp")
    assert [*found][3:] == [
        "statistics", "plan", "compress", "decompress", "decompress-accumulate-recompress"
    ]  # fmt: skip
    assert all(timing.time_us > 0 for timing in found.values())
