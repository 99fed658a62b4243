"""The coding kernels on one set of inputs, for comparing backends bit by bit."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.codec import Arrived, Encoder
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.dynamiq.codec import order_and_tiles, upgrades_of
from dynamiq_jax.methods.dynamiq.layout import Layout, Transfers, allocate, make_layout

FORMATS = {
    "default": dq.DynamiQ().allocation(8, dq.Direct()).fmt,
    "squared error": dq.DynamiQ(floor=None).allocation(8, dq.Direct()).fmt,
    "paper": pk.WireFormat(levels="geometric", rounding="correlated"),
    "uniform": pk.WireFormat(levels="uniform", rounding="independent"),
    "bf16 scales": pk.WireFormat(group_scale="bf16", group_size=32),
    "small groups": pk.WireFormat(group_size=8, super_group_size=128),
    "large groups": pk.WireFormat(group_size=64, super_group_size=1024),
    "odd widths": pk.WireFormat(widths=(0, 1, 3, 6, 16)),
    "carries NaN": pk.WireFormat(widths=(3, 4, 16), carries_nan=True),
    "nearest": pk.WireFormat(widths=(0, 1, 2, 3, 6, 16), rounding="nearest"),
    "dither": dq.DynamiQ(dither=True, format=dq.Format(levels="piecewise"))
    .allocation(8, dq.Direct())
    .fmt,
    "dither, width 6": pk.WireFormat(widths=(6,), dither=True),
    "dither, odd widths": pk.WireFormat(widths=(0, 1, 2, 3, 6, 9, 16), dither=True),
} | {f"width {w}": pk.WireFormat(widths=(w,)) for w in range(17)}

BOTH, SWAPPED = np.array([0, 1], np.int32), np.array([1, 0], np.int32)


class Operands(NamedTuple):
    """Gradients of four workers in two chunks; ``tiles`` are those of two stages."""

    x: jax.Array
    mean: jax.Array
    mean_sum: jax.Array
    order: jax.Array
    tiles: tuple[jax.Array, jax.Array]
    noise: jax.Array


class Payloads(NamedTuple):
    """Payloads that arrive: [k, c, P] of each stage, for the chunks 1 and 0."""

    first: jax.Array
    second: jax.Array


def operands(fmt, size, dtype) -> tuple[Layout, Operands]:
    """Inputs of all kernels under a plan whose second stage has fewer bits than the first.

    Every second super-group has no mean, and exact zeros: half of it, every tenth coordinate, or
    both, on all workers.
    """
    bits = 5.0 if len(fmt.widths) > 1 else fmt.widths[0] + 1.0
    stages = dq.Ring().stages(2)
    options = {"widths": fmt.widths, "floor": None, "balance": 0.8}
    allocation = allocate(stages, fmt, bits=bits, **options)
    transfers = Transfers(2, stages)
    layout = make_layout(size, transfers, bits=bits, allocation=allocation, stats_per_super_group=2)

    @jax.jit
    def make(key):
        shape = layout.rows, fmt.super_group_size
        x = lognormal_mixture(key, 4, *shape)[:, :size]
        row, column = (lax.broadcasted_iota(jnp.int32, shape, i).reshape(-1)[:size] for i in (0, 1))
        some, half = (row % 4 == 1) & (column % 10 == 3), (row % 8 > 4) & (column * 2 < shape[1])
        x = jnp.where(((some | half) & (row % 2 == 1))[None], 0.0, x)
        mean, sqnorm = pk.statistics(x[0], super_group_size=fmt.super_group_size, backend="jnp")
        order, tiles, _ = order_and_tiles(sqnorm, layout, "jnp")
        mean = jnp.pad(mean, (0, layout.super_groups - layout.rows))
        mean = mean.astype(jnp.bfloat16).astype(jnp.float32).at[1::2].set(0.0)
        mean_sum = (2 * mean).at[3].set(jnp.nan)
        noise = pk.slot_noise(jnp.array([3, 4], jnp.uint32), 5, fmt.rounding)
        return Operands(x.astype(dtype), mean, mean_sum, order, tiles, noise)

    return layout, make(jax.random.key(1))


def energies(shards: int, rows: int) -> dict[str, np.ndarray]:
    """Energies to sort, f32[shards, rows], of several kinds."""
    rng = np.random.default_rng(rows)
    spread = rng.lognormal(0.0, 3.0, (shards, rows)).astype(np.float32)
    rising = np.geomspace(1e-38, 3e38, shards * rows, dtype=np.float32).reshape(shards, rows)
    return {
        "spread": spread, "rising": rising, "falling": rising[:, ::-1],
        "equal": np.full_like(spread, 0.7), "zero": np.zeros_like(spread),
        "edges": np.float32(1.75) * 2.0 ** rng.integers(0, 3, spread.shape).astype(np.float32),
        "one": np.float32(5 * (np.arange(rows) == rows // 2))[None] + np.zeros_like(spread),
        "poisoned": np.where(rng.random((shards, rows)) < 0.2, 0.0, spread),
        "tiny": spread * np.float32(1e-40),
    }  # fmt: skip


def dealt(energy, chunks: int, size: int, backend=None) -> pk.Dealt:
    """Super-groups in chunks of ``size``, so many for each shard, under two budgets."""
    fmt, shape = FORMATS["default"], (energy.shape[0] * chunks, size)
    tiles = size // pk.TILE_ROWS
    budgets = tuple(tiles * fmt.tile_words(w) + 4 for w in sorted(fmt.widths)[1:3])
    taken, upgrades = upgrades_of(fmt, tiles, budgets, (None, fmt.widths[1]))
    return pk.deal(energy, jnp.asarray(taken), upgrades, shape, backend=backend)


def used_words(tiles, fmt) -> int:
    """How many words of a payload the records cover; the rest is unspecified."""
    last = int(tiles[0, -1])
    return (last >> 5) * 4 + fmt.tile_words(last & 31)


def programs(layout: Layout, fmt, dtype, backend):
    """Every coding kernel as a function of (operands, payloads), by name.

    Hops and finished sums add two payloads of the first stage and, but for the middle one, three
    of the second.
    """
    kw = {"fmt": fmt, "backend": backend}
    rows = layout.rows
    start, part = 2, rows - 4  # a slice without the first and last two super-groups

    def inputs(o: Operands, p: Payloads, chunks=slice(None)):
        first, second = p.first[:, chunks], p.second[:, chunks]
        skipping = pk.Input(second, o.tiles[1], jnp.int32(1), o.noise[1:4])
        return pk.Input(first, o.tiles[0], noise=o.noise[:2]), skipping

    def source(o: Operands, worker):
        return pk.Source(o.x[worker], o.mean, o.order)

    def target(o: Operands, stage, slot):
        return pk.Target(o.tiles[stage], o.noise[slot], layout.payload_words[stage])

    def compress(o: Operands, p):
        return pk.compress(source(o, 0), jnp.asarray(BOTH), target(o, 0, 0), **kw)

    def compress_one(o: Operands, p):
        chunks, skip = jnp.asarray(SWAPPED), jnp.int32(0)
        return pk.compress(source(o, 0), chunks, target(o, 1, 2), skip, **kw)[1:]

    def hop(o: Operands, p: Payloads):
        chunks = jnp.asarray(SWAPPED)
        return pk.decompress_accumulate_recompress(
            inputs(o, p), source(o, 1), chunks, target(o, 1, 1), **kw
        )

    def hop_without_means(o: Operands, p: Payloads):
        # Inputs of one stage share their tiles, and with them a branch of the kernel.
        alike = tuple(
            pk.Input(p.second[k : k + 1], o.tiles[1], noise=o.noise[k + 1 : k + 2]) for k in (2, 0)
        )
        given = (pk.Input(p.first, o.tiles[0], noise=o.noise[:2]), *alike)
        own = source(o, 1)._replace(mean=None)
        return pk.decompress_accumulate_recompress(
            given, own, jnp.asarray(SWAPPED), target(o, 1, 1), **kw
        )

    def sums(o: Operands, p: Payloads):
        # As in a reduce-scatter, its chunks hold nothing that comes before it.
        order = jnp.where(o.order < start, layout.super_groups - start + o.order, o.order)
        own = source(o, 1)._replace(order=order)
        result = pk.Result(o.mean_sum, order, part, dtype, start=jnp.int32(start))
        return pk.decompress_accumulate(inputs(o, p), own, jnp.asarray(SWAPPED), result, **kw)

    def sums_into(o: Operands, p: Payloads):
        into = jnp.full((rows, fmt.super_group_size), 7, dtype)
        result = pk.Result(o.mean_sum, o.order, rows, dtype, 3, jnp.int32(0), into)
        return pk.decompress_accumulate(
            inputs(o, p, slice(0, 1)), source(o, 1), jnp.asarray(BOTH[1:]), result, **kw
        )

    def decompress(o: Operands, p: Payloads):
        result = pk.Result(o.mean_sum, o.order, rows, dtype, divisor=3)
        noise = o.noise[jnp.array([1, 1])]
        return pk.decompress(p.second[0], o.tiles[1], jnp.asarray(SWAPPED), result, noise, **kw)

    def decompress_into(o: Operands, p: Payloads):
        into = jnp.full((rows, fmt.super_group_size), 7, dtype)
        result = pk.Result(o.mean_sum, o.order, rows, dtype, into=into)
        chunks, noise = jnp.asarray(BOTH[1:]), o.noise[:1]
        return pk.decompress(p.first[0, :1], o.tiles[0], chunks, result, noise, **kw)

    return {
        "compress": compress, "compress skipping": compress_one,
        "decompress_accumulate_recompress": hop,
        "decompress_accumulate_recompress without means": hop_without_means,
        "decompress_accumulate": sums, "decompress_accumulate into": sums_into,
        "decompress": decompress, "decompress into": decompress_into,
    }  # fmt: skip


def payloads(layout: Layout, fmt, o: Operands) -> Payloads:
    """Encodes workers 0 and 1 in stage 0, 1 to 3 in stage 1, by the reference."""

    @functools.partial(jax.jit, static_argnums=3)
    def compress(source, tiles, noise, words):
        target = pk.Target(tiles, noise, words)
        return pk.compress(source, jnp.asarray(SWAPPED), target, fmt=fmt, backend="jnp")

    def encode(worker, stage):
        source = pk.Source(o.x[worker], o.mean, o.order)
        return compress(source, o.tiles[stage], o.noise[worker], layout.payload_words[stage])

    first, second = ([encode(i, stage) for i in of] for stage, of in enumerate(((0, 1), (1, 2, 3))))
    return Payloads(jnp.stack(first), jnp.stack(second))


def kernels_of(name: str) -> tuple[str, ...]:
    """Kernels worth comparing for a format: where results are placed does not depend on widths."""
    coding = "compress", "decompress_accumulate_recompress", "decompress"
    if name.startswith("width"):
        return coding
    others = "compress skipping", "decompress into", "decompress_accumulate into"
    others = (*others, "decompress_accumulate_recompress without means")
    others = others if name == "odd widths" else ()
    return (*coding, "decompress_accumulate", *others)


def run(names, layout: Layout, fmt, dtype, backend, o, p) -> dict[str, np.ndarray]:
    """The results of the named kernels, without unspecified words."""
    kernels = programs(layout, fmt, dtype, backend)
    found = {name: np.asarray(jax.jit(kernels[name])(o, p)) for name in names}
    found = {n: a.astype(np.float32) if a.dtype == dtype else a for n, a in found.items()}
    for name in found:
        if name.startswith(("compress", "decompress_accumulate_recompress")):
            stage = 0 if name == "compress" else 1
            found[name] = found[name][:, : used_words(o.tiles[stage], fmt)]
    return found


def lowered_for_cuda(function, *args, mesh=((), ())) -> str:
    """The GPU program of ``function``, lowered on whatever machine this is."""
    if jax.__version_info__ < (0, 11):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    from jax.sharding import AbstractDevice, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    types = (AxisType.Auto,) * len(mesh[0])
    with use_abstract_mesh(AbstractMesh(*mesh, axis_types=types, abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


MX = {
    f"{element}, {rounding}": method(element=element, rounding=rounding)
    for method, elements in (
        (dq.contrib.MXFP8, ("e4m3", "e5m2")),
        (dq.contrib.MXFP6, ("e3m2", "e2m3")),
        (dq.contrib.MXFP4, ("e2m1",)),
    )
    for element in elements
    for rounding in ("nearest", "stochastic")
}


def mx_gradients(size: int, *, finite: bool) -> np.ndarray:
    """Gradients of four workers, f32[4, size], whose blocks have tops from 2^-149 to 2^110.

    Some blocks are zero, and some have few values that are not. Only if they need not be finite,
    some have an infinity or a NaN.
    """
    rng = np.random.default_rng(size)
    blocks = -(-size // 32)
    power = np.exp2(rng.integers(-149, 110, (4, blocks, 1)).astype(np.float64))
    power[:, 0], power[:, -1] = 2.0**-149, 2.0**110
    spread = np.exp2(-rng.integers(0, 20, (4, blocks, 32)))
    x = (rng.normal(size=(4, blocks, 32)) * spread * power).astype(np.float32)
    x[:, 1::9], x[:, 2::9, 1:], x[:, 3::9, ::3] = 0.0, 0.0, -0.0
    if not finite:
        x[0, 4::9, 31], x[1, 5::9, 0], x[2, 6::9, 7] = np.nan, np.inf, -np.inf
    return x.reshape(4, -1)[:, :size]


@functools.cache
def mx_program(method, size: int, dtype, backend: pk.Backend):
    """The function of f32[4, size], gradients of four workers, to results in two chunks, by name.

    They are of every operation of a codec.
    """
    method = dataclasses.replace(method, backend=backend)
    layout = method.layout(size, 2, dq.Ring(streams=1))
    call = Call(Axis(()), dq.Ring(streams=1), jnp.array([3, 4], jnp.uint32), divisor=4)
    one, chunks = Encoder(0, 0, 0), jnp.asarray(SWAPPED)

    def results(x):
        shared = method.share(None, layout, call)
        codecs = [method.codec(worker, shared, layout, call) for worker in x.astype(dtype)]
        own, told = codecs[3], method.codec(x[3], shared, layout, call._replace(keep_error=True))
        sent = [codec.encode((), chunks, one, None)[0] for codec in codecs]
        skipping = own.encode((), chunks, one, None, skip=jnp.int32(0))[0][1:]
        arrived = (
            Arrived(jnp.stack(sent[:3]), one, skip=jnp.int32(1)),
            Arrived(sent[1][None], one),
        )
        hop = own.encode(arrived, chunks, one, None)[0]
        finish, first = own.finish, (Arrived(arrived[0].payloads[:, :1], one),)
        sums = finish(first, chunks[:1], None)
        into = own.decode(hop[1:], chunks[1:], one, own.decode(hop[:1], chunks[:1], one, None))
        again, lost = told.encode(arrived, chunks, one, told.lost)
        return {
            "encode": jnp.stack(sent), "encode skipping": skipping, "hop": hop,
            "sum": sums, "decode": own.decode(hop, chunks, one, None).reshape(-1)[:size],
            "decode into": into.reshape(-1)[:size], "encode and tell": again, "lost": lost,
        }  # fmt: skip

    return jax.jit(results)


def mx_results(method, x, dtype, backend: pk.Backend) -> dict[str, np.ndarray]:
    """The results of `mx_program` on gradients f32[4, size]."""
    return jax.tree.map(np.asarray, mx_program(method, x.shape[1], dtype, backend)(x))


def assert_same_mx(actual: dict, expected: dict, *, finite: bool) -> None:
    """Compares all bits; of values that are not finite, which they are, and no payload's codes."""
    for name, value in expected.items():
        found = actual[name]
        assert found.dtype == value.dtype and found.shape == value.shape, name
        if value.dtype != np.uint32:
            nan = np.isnan(value)
            np.testing.assert_array_equal(np.isnan(found), nan, err_msg=name)
            bits = np.uint16 if value.dtype.itemsize == 2 else np.uint32
            value, found = (np.where(nan, 0, v).view(bits) for v in (value, found))
        elif not finite:
            continue
        np.testing.assert_array_equal(found, value, err_msg=name)
