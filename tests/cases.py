"""Rows of methods, inputs, maps and the test for bias, which several test files share.

A new method is a row in `EVERY_METHOD`, a new option of DynamiQ one in `METHODS`; the row buys it
the tests of every file that is parametrised over them.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import AS_USERS
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import comparators
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.request.compression import as_compression
from pallas_kernels import TILE_ROWS

SMALL: dict[str, Any] = {"min_leaf_size": 1, "min_bucket_size": 1}
"""Compress however small a leaf is."""

LOW_LIMITS: dict[str, Any] = {"min_leaf_size": 100, "min_bucket_size": 100}


def small(method: Any = None, **options: Any) -> dq.Compression:
    """Compresses however small a leaf is."""
    return dq.Compression(method, **SMALL, **options)


def low(method: Any = None, **options: Any) -> dq.Compression:
    """Compresses all but the smallest leaves."""
    return dq.Compression(method, **LOW_LIMITS, **options)


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
    "dynamiq, dither": Row(low(dq.DynamiQ(dither=True)), OVER, 256, 0.03),
    "dynamiq, memory": Row(low(dq.ErrorFeedback(dq.DynamiQ())), OVER, 256, 0.05),
    "bf16": Row(low(dq.BF16()), NATIVE | OVER, 1, 2e-05),
    "f32": Row(low(dq.F32()), NATIVE | OVER, 1, 1e-14),
    "mxfp8": Row(low(comparators.MXFP8()), OVER, 32, 0.005),
    "mxfp6": Row(low(comparators.MXFP6(rounding="stochastic")), OVER, 32, 0.03),
    "mxfp4": Row(low(comparators.MXFP4()), OVER, 32, 0.06),
    "minmax": Row(low(comparators.MinMax()), OVER, 128, 0.06),
    "minmax, nearest": Row(low(comparators.MinMax(bits=5, rounding="nearest")), OVER, 128, 0.01),
    "qsgd": Row(low(comparators.GlobalQSGD(piece_size=128)), OVER, 128, 0.02),
    "thc": Row(low(comparators.THC(piece_size=512)), NATIVE, 512, 0.04),
    "thc, memory": Row(
        low(dq.ErrorFeedback(comparators.THC(bits=2, piece_size=512))), NATIVE, 512, 0.6
    ),
    "omnireduce": Row(low(comparators.OmniReduce(block_size=64)), NATIVE, 64, 0.03),
    "omnireduce, memory": Row(
        low(dq.ErrorFeedback(comparators.OmniReduce(block_size=64))), NATIVE, 64, 0.15
    ),
    "mxfp4, econtrol": Row(
        low(dq.ErrorFeedback(comparators.MXFP4(), kind="econtrol")), OVER, 32, 0.3
    ),
    "dynamiq, ef21": Row(low(dq.ErrorFeedback(dq.DynamiQ(), kind="ef21")), OVER, 256, 0.1),
    "bf16, ef21": Row(
        low(dq.ErrorFeedback(dq.BF16(), kind="ef21")), NATIVE | OVER, 1, 1e-4
    ),
    "minmax, ef14": Row(low(dq.ErrorFeedback(comparators.MinMax())), OVER, 128, 0.06),
    "marsit": Row(low(comparators.Marsit(period=None, block_size=256)), OVER, 256, 5.0),
    "marsit, full rounds": Row(
        low(comparators.Marsit(period=3, block_size=256)), OVER, 256, 5.0
    ),
    "clt-k": Row(low(comparators.CLTK(density=0.5, chunk_size=64)), NATIVE, 64, 0.45),
    "clt-k, memory": Row(
        low(dq.ErrorFeedback(comparators.CLTK(density=0.3, chunk_size=50))), NATIVE, 50, 0.6
    ),
    "sidco, memory": Row(
        low(dq.ErrorFeedback(comparators.SIDCo(density=0.2, headroom=1.25, block_size=50))),
        NATIVE, 50, 0.5,
    ),
    "perm-k": Row(low(comparators.PermK()), NATIVE, 4, 4.0),
    # A worker's share of 15 x 541 is hardly of low rank: these lose up to all of it.
    "powersgd": Row(
        low(dq.ErrorFeedback(comparators.PowerSGD(rank=5))), NATIVE, 15 * 541, 1.0, 541
    ),
    "powersgd, f32": Row(
        low(comparators.PowerSGD(rank=7, wire="f32")), NATIVE, 15 * 541, 1.0, 541
    ),
    "arc top-k": Row(low(comparators.ARCTopK(density=0.5)), NATIVE, 541, 0.5, 541),
    "arc top-k, memory": Row(
        low(dq.ErrorFeedback(comparators.ARCTopK(density=0.7, rank=6))), NATIVE, 541, 0.5, 541
    ),
}  # fmt: skip
"""All methods, small leaves exact; every file that is parametrised over them tests each."""


def daily(values, keep) -> list:
    """Parameters of a test, of which those that are not in ``keep`` run in releases alone."""
    every = [value if isinstance(value, tuple) else (value,) for value in values]
    kept = [value if isinstance(value, tuple) else (value,) for value in keep]
    assert all(value in every for value in kept), "a daily parameter that the test does not have"
    return [
        pytest.param(*value, marks=() if value in kept else pytest.mark.release) for value in every
    ]


class OnHost:
    """A jitted function whose results are NumPy arrays: JAX would compile every slice of them."""

    def __init__(self, run):
        self.on_devices = run

    def __call__(self, *args):
        return jax.device_get(self.on_devices(*args))

    def __getattr__(self, name):
        return getattr(self.on_devices, name)


def once(make):
    """The arrays of a function of static arguments, made by one program, on the host."""

    @functools.cache
    def made(*args):
        return jax.device_get(jax.jit(lambda: make(*args))())

    return functools.wraps(make)(lambda *args: jax.tree.map(lambda x: x, made(*args)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gradient(seed: int, n: int, size: int, super_group_size: int = 256) -> jax.Array:
    """f32[n, size]: super-groups of very different magnitude and mean, distinct on each worker."""
    keys = jax.random.split(jax.random.key(seed), 3)
    rows = -(-size // super_group_size)
    magnitude = jnp.exp(1.5 * jax.random.normal(keys[0], (rows, 1)))
    mean = 0.3 * jax.random.normal(keys[1], (rows, 1))
    noise = jax.random.normal(keys[2], (n, rows, super_group_size))
    return ((noise + mean[None]) * magnitude[None]).reshape(n, -1)[:, :size]


@functools.cache
def vmapped(method: dq.DynamiQ, topology=LOOP, *, mean: bool = False, optimized: bool = False):
    """jit of (tree with leading worker axis, key) -> every worker's result, on one device."""
    reduce = dq.pmean if mean else dq.psum

    def one(tree, key):
        return reduce(tree, "data", method=method, topology=topology, key=key)

    options = AS_USERS if optimized else None
    mapped = jax.vmap(one, in_axes=(0, None), axis_name="data")
    return OnHost(jax.jit(mapped, compiler_options=options))


@functools.cache
def stepper(method, topology=None, *, mean: bool = False):
    """As `vmapped`, with memory: (tree, key, every worker's state) -> results, next states."""
    options = {"op": "mean" if mean else "sum", "method": method, "topology": topology}

    def one(tree, key, state):
        return dq.reduce(tree, "data", key=key, state=state, **options)[:2]

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None, 0), axis_name="data")))


def first_state(method, tree, n: int, topology=None):
    """One worker's state by `init_state`, for all n; the tree has a leading axis of workers."""
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    init = as_compression(method, topology).init_state
    state = jax.device_get(jax.jit(lambda: init(own, n))())
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *x.shape)), state)


def limits_of(method, n: int, *, fast_links: bool):
    """The limits of a request, or of a bare method, among n workers."""
    request = as_compression(method)
    method = request.method or dq.DynamiQ()
    return method.limits(request.limits, n, fast_links=fast_links)


def wire_bits(method=None, topology=None):
    """``f(tree, n_workers, **options)``: the bits that one worker sends, as `dq.explain` has it."""
    request = as_compression(method, topology)

    def bits(*args, **options) -> int:
        return round(8 * request.explain(*args, verbose=False, **options).wire_bytes)

    return bits


@functools.cache
def mesh_of(*sizes, names=("data", "model", "one"), kind=AxisType.Auto):
    """A mesh of the first devices, of axes of these sizes."""
    names, kinds = names[: len(sizes)], (kind,) * len(sizes)
    return jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)], axis_types=kinds)


def auto_mesh(n: int = 8):
    """A mesh of the first n devices with one Auto axis "data"."""
    return mesh_of(n)


WHOLE = P()


def put(tree, mesh, specs=WHOLE):
    """A tree on the devices of a mesh; ``specs`` may be those of its first levels alone."""
    return jax.device_put(tree, jax.tree.map(functools.partial(NamedSharding, mesh), specs))


@functools.cache
def sharded(method: dq.DynamiQ, topology=None, *, n: int = 8):
    """As `vmapped` on n devices: every worker's own copy of the result, unchecked by JAX."""

    def one(tree, key):
        tree = jax.tree.map(lambda x: x[0], tree)
        total = dq.psum(tree, "data", method=method, topology=topology, key=key)
        return jax.tree.map(lambda x: x[None], total)

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))


@contextlib.contextmanager
def compilations():
    """The programs that XLA compiles within the block, as a list that grows."""
    found = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def relative_error(estimate, exact):
    """|estimate - exact|² / |exact|² in f64."""
    exact = np.asarray(exact, np.float64)
    return np.sum((np.asarray(estimate, np.float64) - exact) ** 2) / np.sum(exact**2)


def sum_error(result, x):
    """`relative_error` of a sum of all workers' x."""
    return relative_error(result, np.sum(np.asarray(x, np.float64), axis=0))


def plan_is_exact(n, size, seed=0):
    """f32[n, size] whose statistics are exact in bf16 in whatever order workers are added.

    XLA on CPU adds a bf16 all-reduce in f32 under shard_map, and under vmap in bf16, so that the
    plan may differ. Here a super-group holds as many 1 as -1, 3 and -3, times a power of two, in
    an order of each worker's own: squared norms are 5 * 2^k, of which up to 51 add up exactly, and
    means 0. Partial sums differ between workers and coordinates, and are rounded.
    """
    rng = np.random.default_rng(seed)
    rows = -(-size // 256)
    x = rng.permuted(np.tile([1.0, -1.0, 3.0, -3.0], (n, rows, 64)), axis=2)
    x = x * np.exp2(rng.integers(-6, 6, (rows, 1)))
    x[:, -1] = 0.0  # the last super-group is cut off
    return jnp.asarray(x.reshape(n, -1)[:, :size], jnp.float32)


def bits_of(x) -> np.ndarray:
    """The bytes of an array, so that NaNs and signed zeros count in comparisons."""
    x = np.ascontiguousarray(x)
    return x.view(np.uint8) if x.ndim else x.reshape(1).view(np.uint8)


def assert_same_bits(a, b) -> None:
    """Two trees have equal structure, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        np.testing.assert_array_equal(bits_of(left), bits_of(right))


def assert_close(found, expected, rtol=1e-4, atol=1e-5) -> None:
    """Two trees have equal structure, dtypes, and values but for rounding.

    ``atol`` counts in the largest value of a leaf, in 0.1 at least.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(left) == jnp.result_type(right)
        most = atol * np.max(np.abs(right), initial=0.1)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=most)


def assert_copies_equal(tree) -> None:
    """All devices that hold the same part of an array hold the same bits."""
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            assert_same_bits(data, first.setdefault(str(shard.index), data))


def assert_replicas_equal(tree) -> None:
    """All slices along the leading worker axis have the same bits."""
    for leaf in jax.tree.leaves(tree):
        leaf = np.asarray(leaf)
        assert_same_bits(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def assert_refused(*rows) -> None:
    """Every row has an error, words of its message, and a function that raises it of arguments."""
    for error, words, function, *args in rows:
        with pytest.raises(error, match=words):
            function(*args)


class Bias(NamedTuple):
    """How far mean errors are from zero, for blocks of coordinates.

    With N samples of C coordinates in a block whose rounding errors have variance about g²/6 for
    steps g, a bias of 2% of a step in one direction moves a z-score by 0.02 sqrt(6 C N), and one
    of any pattern of signs moves ``spread`` by 0.0024 N.
    """

    up: np.ndarray
    """z-score of the mean error."""
    outward: np.ndarray
    """z-score of the mean error away from zero."""
    spread: np.ndarray
    """Mean over coordinates of (mean error)² over its variance: 1 if unbiased."""

    def worst_score(self) -> float:
        """The largest z-score of the blocks."""
        return float(np.max(np.abs([self.up, self.outward])))


def bias(total, total_squared, samples: int, sign, blocks: int) -> Bias:
    """The bias of errors from their sums and sums of squares over ``samples`` samples."""
    total = np.asarray(total, np.float64).reshape(blocks, -1)
    total_squared = np.asarray(total_squared, np.float64).reshape(blocks, -1)
    sign = np.sign(np.asarray(sign)).reshape(blocks, -1)
    variance = (total_squared - total**2 / samples).sum(axis=1) / (samples - 1) * samples
    variance = np.maximum(variance, np.finfo(np.float64).tiny)
    up = total.sum(axis=1) / np.sqrt(variance)
    outward = (total * sign).sum(axis=1) / np.sqrt(variance)
    return Bias(up, outward, (total**2).sum(axis=1) / variance)


def promoting(optimizer):
    """An optimizer of optax, which promotes dtypes."""

    def update(*args, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args, **extra)

    return optimizer._replace(update=update)


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - 1))


@once
def problem(steps):
    """Parameters, and a batch of 32 rows for every step."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (16, 64)) / 4,
        "out": jax.random.normal(keys[1], (64, 4)) / 8,
    }
    return params, jax.random.normal(keys[2], (steps, 32, 16))


@once
def network():
    """Parameters of two layers, and a batch whose examples count differently on every worker."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (16, 64)) / 4,
        "bias": jax.random.normal(keys[1], (64,)),
        "down": jax.random.normal(keys[2], (64, 16)) / 8,
        "scale": jnp.float32(1.5),
    }
    x = jax.random.normal(keys[3], (32, 16)) * jnp.linspace(0.2, 2.0, 32)[:, None]
    mask = jnp.float32(jnp.arange(32.0) % 5 < jnp.linspace(1, 4, 32))
    return params, {"x": x, "mask": mask}


def mapped(f, check_vma=True):
    """``f(params, x)`` of each of four workers; results have a leading axis of workers."""

    def one(params, x):
        return jax.tree.map(lambda g: Axis(("data",)).to_varying(g[None]), f(params, x[0]))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    return OnHost(jax.jit(jax.shard_map(one, mesh=auto_mesh(4), **specs)))


def local(params, check_vma):
    return lax.pcast(params, "data", to="varying") if check_vma else params


def plan_widths(plan: Any, stage: int = 0) -> jax.Array:
    """The width of every super-group in a stage of a plan, int32[M], in the gradient's order."""
    # A tile's entry has the width in its low 5 bits; position p of a chunk is in tile p // 8.
    width = jnp.repeat(plan.tiles[stage] & 31, TILE_ROWS, axis=1).reshape(-1)
    return jnp.zeros_like(width).at[plan.order.reshape(-1)].set(width)
