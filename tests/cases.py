"""Rows of methods and topologies, and their sums, which several test files share.

A row of `EVERY_METHOD` buys a method the tests of every file that is parametrised over them. A
comparator that is a quantiser gets one by itself; one of your own has other bounds. A new option
of DynamiQ is a row in `METHODS`.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from compiler import AS_USERS
from jax.sharding import PartitionSpec as P
from workers import OnHost, auto_mesh

import dynamiq_jax as dq
from dynamiq_jax import contrib
from dynamiq_jax.compression.compression import as_compression

SMALL: dict[str, Any] = {"min_leaf_size": 1, "min_bucket_size": 1}
"""Compress however small a leaf is."""


def small(method: Any = None, **options: Any) -> dq.Compression:
    """Compresses however small a leaf is."""
    return dq.Compression(method, **SMALL, **options)


def over(topology: Any, compression: Any = None) -> dq.Compression:
    """A method or a compression over a topology; `None` leaves it as it is."""
    given = isinstance(compression, dq.Compression)
    own = compression if given else dq.Compression(compression)
    return own if topology is None else dataclasses.replace(own, topology=topology)


def low(method: Any = None, **options: Any) -> dq.Compression:
    """Compresses all but the smallest leaves."""
    return dq.Compression(method, min_leaf_size=100, min_bucket_size=100, **options)


@contextlib.contextmanager
def without_limit_of_padding():
    """Compresses buckets that padding widens to 16 bits; to users these travel exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dq.DynamiQ, "most_bits", math.inf)
        jax.clear_caches()  # a program does not tell with which limit it was traced
        yield
    jax.clear_caches()


CHEAP = small(dq.DynamiQ(widths=(4,), format=dq.Format(group_scale="bf16"), bits=5.5))
"""For tests of what surrounds a method: one width compiles in a third of the default's time."""

EIGHT = small(dq.DynamiQ(widths=(8,), format=dq.Format(group_scale="bf16"), bits=9.5))
"""As `CHEAP`, with 8 bits, for tests that need results near the exact ones."""

EXACT = small(dq.F32())
"""Sums that lose nothing, of leaves of any size."""

TWO_WIDTHS = small(dq.DynamiQ(widths=(3, 6), format=dq.Format(group_scale="bf16"), bits=5.5))
"""The least that has a plan: for tests of who shares one, and where."""

LOOP = dq.Ring(unroll_up_to=1, balance=0.0)
"""A ring as a loop, which compiles in half the time; the same bits as unrolled (`test_topologies`).
Its stages have equal bits, so that width 4 is what the least of chunks gets of 5 bits."""

TWO_STREAMS = {"streams": 2}
TOPOLOGIES = {
    "ring": (dq.Ring(unroll_up_to=4), range(1, 10)),
    "butterfly": (dq.Butterfly(), (1, 2, 4, 8)),
    "direct": (dq.Direct(), range(1, 10)),
    "ring, two streams": (dq.Ring(unroll_up_to=4, **TWO_STREAMS), (1, 4, 5)),
    "butterfly, two streams": (dq.Butterfly(**TWO_STREAMS), (1, 2, 8)),
    "direct, two streams": (dq.Direct(**TWO_STREAMS), (1, 2, 7)),
}
"""Topologies, and numbers of workers to try: of one stream, all below 10 that they serve."""


def formatted(**fields: Any) -> dq.Compression:
    """DynamiQ of this format with independent rounding, however small a leaf is."""
    return small(dq.DynamiQ(format=dq.Format(**fields), **INDEPENDENT))


INDEPENDENT: dict[str, Any] = {"rounding": "independent"}
PIECEWISE = dq.Format(levels="piecewise")
PAPER = dq.Format(group_size=16, levels="geometric", subtract_mean=True)
METHODS = {
    "default": small(dq.DynamiQ()),
    "correlated": small(dq.DynamiQ(rounding="correlated")),
    "independent": small(dq.DynamiQ(**INDEPENDENT)),
    "geometric": formatted(levels="geometric"),
    "uniform": formatted(levels="uniform"),
    "bf16_scales": small(dq.DynamiQ(format=dq.Format(group_scale="bf16"), bits=6, **INDEPENDENT)),
    "squared_error": small(dq.DynamiQ(floor=None, format=PIECEWISE, **INDEPENDENT)),
    "mean": formatted(subtract_mean=True),
    "paper": small(dq.DynamiQ(
        widths=(2, 4, 8), floor=None, rounding="correlated", format=PAPER,
    )),
    "group_8": formatted(group_size=8),
    "group_64": formatted(group_size=64, group_scale="bf16"),
    "super_128": formatted(super_group_size=128),
    "super_1024": formatted(super_group_size=1024, group_size=32),
    "all_widths": small(dq.DynamiQ(widths=tuple(range(1, 17)), floor=None, bits=7, **INDEPENDENT)),
    "dither": small(dq.DynamiQ(dither=True, **INDEPENDENT)),
    "dither_all_widths": small(dq.DynamiQ(
        dither=True, widths=(*range(1, 15), 16), floor=None, bits=7,
        format=dq.Format(levels="companded"), **INDEPENDENT,
    )),
    "no_plan": small(dq.DynamiQ(plan=False, bits=4.4, **INDEPENDENT)),
    "width_0": small(dq.DynamiQ(widths=(0, 3, 6), floor=None, **INDEPENDENT)),
}  # fmt: skip
DAILY = ("default", "no_plan", "paper", "dither", "all_widths", "bf16_scales")
"""The formats that daily tests draw; a release draws all."""

NATIVE: dict[str, Any] = {"native": None}
OVER: dict[str, Any] = {"ring": LOOP, "butterfly": dq.Butterfly(balance=0.0), "direct": dq.Direct()}


class Row(NamedTuple):
    """A method, and what its docstring promises."""

    method: Any
    routes: dict[str, Any]
    """The topologies it serves, by name; `None` is native."""
    reach: int
    """Coordinates of a bucket that one value takes along if it is not finite: those of a block."""
    error: float
    """vNMSE of a sum of four `gradient`s, rounded up."""
    columns: int | None = None
    """Columns of the matrices that `test_nonfinite` reduces; `None`: the method takes vectors."""


EVERY_METHOD = {
    "dynamiq": Row(low(dq.DynamiQ()), OVER, 256, 0.05),
    "dynamiq, no plan": Row(low(dq.DynamiQ(plan=False)), OVER, 256, 0.1),
    "dynamiq, no plan, memory": Row(
        low(dq.ErrorFeedback(dq.DynamiQ(plan=False))), OVER, 256, 0.1
    ),
    "dynamiq, nearest": Row(low(dq.DynamiQ(rounding="nearest")), OVER, 256, 0.04),
    "dynamiq, dither": Row(low(dq.DynamiQ(dither=True)), OVER, 256, 0.03),
    "dynamiq, memory": Row(low(dq.ErrorFeedback(dq.DynamiQ())), OVER, 256, 0.05),
    # A packet of the largest values may be lost, with up to all of the sum's energy.
    "dynamiq, packet loss": Row(
        low(contrib.PacketLoss(dq.DynamiQ(), packet_size=64)), {"direct": dq.Direct()}, 256, 1.0
    ),
    "bf16": Row(low(dq.BF16()), NATIVE | OVER, 1, 2e-05),
    "f32": Row(low(dq.F32()), NATIVE | OVER, 1, 1e-14),
    "mxfp8": Row(low(contrib.MXFP8()), OVER, 32, 0.005),
    "mxfp6": Row(low(contrib.MXFP6(rounding="stochastic")), OVER, 32, 0.03),
    "mxfp4": Row(low(contrib.MXFP4()), OVER, 32, 0.06),
    "minmax": Row(low(contrib.MinMax()), OVER, 128, 0.06),
    "minmax, nearest": Row(low(contrib.MinMax(bits=5, rounding="nearest")), OVER, 128, 0.01),
    "block-int": Row(low(contrib.BlockInt()), OVER, 128, 2e-4),
    "block-int, smooth": Row(
        low(contrib.BlockInt(bits=4, rounding="stochastic", smooth=True)), OVER, 128, 0.15
    ),
    "loco": Row(low(contrib.LoCo(contrib.BlockInt(bits=4))), OVER, 128, 0.06),
    "qsgd": Row(low(contrib.GlobalQSGD(piece_size=128)), OVER, 128, 0.02),
    "thc": Row(low(contrib.THC(piece_size=512)), NATIVE, 512, 0.04),
    "thc, memory": Row(
        low(dq.ErrorFeedback(contrib.THC(bits=2, piece_size=512))), NATIVE, 512, 0.6
    ),
    "omnireduce": Row(low(contrib.OmniReduce(block_size=64)), NATIVE, 64, 0.03),
    "omnireduce, memory": Row(
        low(dq.ErrorFeedback(contrib.OmniReduce(block_size=64))), NATIVE, 64, 0.15
    ),
    "mxfp4, econtrol": Row(
        low(dq.ErrorFeedback(contrib.MXFP4(), kind="econtrol")), OVER, 32, 0.3
    ),
    "dynamiq, ef21": Row(low(dq.ErrorFeedback(dq.DynamiQ(), kind="ef21")), OVER, 256, 0.1),
    "bf16, ef21": Row(
        low(dq.ErrorFeedback(dq.BF16(), kind="ef21")), NATIVE | OVER, 1, 1e-4
    ),
    "minmax, ef14": Row(low(dq.ErrorFeedback(contrib.MinMax())), OVER, 128, 0.06),
    "marsit": Row(low(contrib.Marsit(period=None, block_size=256)), OVER, 256, 5.0),
    "marsit, full rounds": Row(
        low(contrib.Marsit(period=3, block_size=256)), OVER, 256, 5.0
    ),
    "clt-k": Row(low(contrib.CLTK(density=0.5, chunk_size=64)), NATIVE, 64, 0.45),
    "clt-k, memory": Row(
        low(dq.ErrorFeedback(contrib.CLTK(density=0.3, chunk_size=50))), NATIVE, 50, 0.6
    ),
    "sidco, memory": Row(
        low(dq.ErrorFeedback(contrib.SIDCo(density=0.2, headroom=1.25, block_size=50))),
        NATIVE, 50, 0.5,
    ),
    "perm-k": Row(low(contrib.PermK()), NATIVE, 4, 4.0),
    # A worker's share of 15 x 541 is hardly of low rank: these lose up to all of it.
    "powersgd": Row(
        low(dq.ErrorFeedback(contrib.PowerSGD(rank=5))), NATIVE, 15 * 541, 1.0, 541
    ),
    "powersgd, f32": Row(
        low(contrib.PowerSGD(rank=7, wire="f32")), NATIVE, 15 * 541, 1.0, 541
    ),
    "arc top-k": Row(low(contrib.ARCTopK(density=0.5)), NATIVE, 541, 0.5, 541),
    "arc top-k, memory": Row(
        low(dq.ErrorFeedback(contrib.ARCTopK(density=0.7, rank=6))), NATIVE, 541, 0.5, 541
    ),
}  # fmt: skip
"""All methods, small leaves exact; every file that is parametrised over them tests each."""


def row_of(method: Any) -> Row:
    """The row of a quantiser that has none in the table: its options are the defaults."""
    assert method.shards, f"{method.__name__} is no quantiser: write a row of EVERY_METHOD for it"
    return Row(low(method()), OVER, method().unit, 0.3)


def rows_of_others(comparators_by_name: Any) -> dict[str, Row]:
    """Rows of the comparators that the table lacks."""
    around = [row.method.method for row in EVERY_METHOD.values()]
    known = {type(getattr(method, "method", method)) for method in around}
    others = {name: own for name, own in comparators_by_name.items() if own not in known}
    return {name.lower(): row_of(own) for name, own in others.items()}


OTHERS = rows_of_others(contrib.METHODS)
EVERY_METHOD |= OTHERS


def daily(values, keep) -> list:
    """Parameters of a test, of which those that are not in ``keep`` run in releases alone."""
    every = [value if isinstance(value, tuple) else (value,) for value in values]
    kept = [value if isinstance(value, tuple) else (value,) for value in keep]
    assert all(value in every for value in kept), "a daily parameter that the test does not have"
    return [
        pytest.param(*value, marks=() if value in kept else pytest.mark.release) for value in every
    ]


@functools.cache
def vmapped(method: dq.DynamiQ, topology=LOOP, *, mean: bool = False, optimized: bool = False):
    """jit of (tree with leading worker axis, key) -> every worker's result, on one device."""
    reduce = dq.pmean if mean else dq.psum

    def one(tree, key):
        return reduce(tree, "data", compression=over(topology, method), key=key)

    options = AS_USERS if optimized else None
    mapped = jax.vmap(one, in_axes=(0, None), axis_name="data")
    return OnHost(jax.jit(mapped, compiler_options=options))


@functools.cache
def stepper(method, topology=None, *, mean: bool = False):
    """As `vmapped`, with memory: (tree, key, every worker's state) -> results, next states."""
    options = {"op": "mean" if mean else "sum", "compression": over(topology, method)}

    def one(tree, key, state):
        return dq.reduce(tree, "data", key=key, state=state, **options)[:2]

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None, 0), axis_name="data")))


def first_state(method, tree, n: int, topology=None):
    """One worker's state by `init_state`, for all n; the tree has a leading axis of workers."""
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    init = over(topology, method).init_state
    state = jax.device_get(jax.jit(lambda: init(own, n))())
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *x.shape)), state)


def limits_of(method, n: int, *, fast_links: bool):
    """The limits of a request, or of a bare method, among n workers."""
    request = as_compression(method)
    method = request.method or dq.DynamiQ()
    return method.limits(request.limits, n, fast_links=fast_links)


def wire_bits(method=None, topology=None):
    """``f(tree, n_workers, **options)``: the bits that one worker sends, as `dq.explain` has it."""
    request = over(topology, method)

    def bits(*args, **options) -> int:
        return round(8 * request.explain(*args, verbose=False, **options).wire_bytes)

    return bits


@functools.cache
def sharded(method: dq.DynamiQ, topology=None, *, n: int = 8):
    """As `vmapped` on n devices: every worker's own copy of the result, unchecked by JAX."""

    def one(tree, key):
        tree = jax.tree.map(lambda x: x[0], tree)
        total = dq.psum(tree, "data", compression=over(topology, method), key=key)
        return jax.tree.map(lambda x: x[None], total)

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))
