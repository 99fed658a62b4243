"""All-reduce benchmark: compressed methods against warmed native `lax.psum`, on one mesh axis.

One bf16 leaf per device, in the manner of nccl-tests. What is timed is one compiled program of
`jax.jit(jax.shard_map(...))` that all-reduces the same leaf several times in a row (see
`timing.repeat_on_device`), so a time is device time and not dispatch, also at small sizes. The
contenders of one size are timed in turn within every round. Error and replica agreement are
computed once, by separate programs outside the timing.

Terms (nccl-tests' own; n workers, leaf of s bytes, time t):

* algbw = s / t;
* busbw = algbw * 2(n-1)/n, what a bf16 all-reduce in that time would move per link;
* wire bandwidth = bytes one worker really sends / t, far less than busbw when compressed;
* vNMSE = |estimate - sum|^2 / |sum|^2 against the exact f32 sum;
* wrong = coordinates that are not the same bits on all workers; anything but 0 is a defect.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import dynamiq_jax as dq
from dynamiq_jax.bench.timing import Timing, repeat_on_device, time_calls
from pallas_kernels import resolve_backend

AXIS = "data"
BLOCK = 256
"""Consecutive coordinates of the test data that share a magnitude."""

METHODS: Mapping[str, Callable[..., Any]] = {
    "dynamiq": partial(dq.DynamiQ, min_leaf_size=0, min_bucket_size=0),
}
"""Methods by the name the command line knows; each takes ``bits``. What is asked for runs, also
at sizes that the method would otherwise leave to native psum."""

TOPOLOGIES: Mapping[str, Callable[[], Any]] = {"ring": dq.Ring}

BASELINES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
"""Native all-reduces by the dtype on the wire."""


class Contender(NamedTuple):
    """One way to all-reduce the leaf."""

    label: str
    reduce: Callable[[jax.Array], jax.Array]
    wire_bytes: Callable[[int, int], int]
    """Bytes one worker sends for a leaf of (coordinates, workers)."""
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRow:
    """One line of the report; bandwidths in GB/s (10^9), ratios and vNMSE without unit."""

    size_bytes: int
    method: str
    time_us: float
    p10_us: float
    p90_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wire_gb_per_s: float
    wire_bytes: int
    speedup: float
    vnmse: float
    wrong: int
    n_workers: int
    iterations: int
    backend: str
    transport: str


def parse_size(text: str) -> int:
    """Bytes meant by ``text``: a number with B, KiB, MiB, GiB (powers of 2) or KB, MB, GB.

    Raises:
      ValueError: not such a size, or not a positive even number of bytes.
    """
    units = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, factor = text.strip().upper(), 1
    for unit, value in (units | {"B": 1}).items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), value
            break
    try:
        size_bytes = float(number) * factor
    except ValueError:
        raise ValueError(f"size {text!r} is not a size: write for example 16MiB or 1GiB") from None
    if not 2 <= size_bytes < 2**32 or size_bytes % 2:
        raise ValueError(
            f"size {text!r} is {size_bytes:g} bytes: a bf16 leaf takes an even number of bytes "
            f"from 2 to {2**32 - 2} (under 4GiB)"
        )
    return int(size_bytes)


def parse_method(text: str, topology: str = "ring") -> Contender:
    """The contender meant by ``text``, for example ``dynamiq:5`` (name, wire bits per coordinate).

    Raises:
      ValueError: the method, its bits or the topology is not known.
    """
    name, _, bits = text.strip().partition(":")
    if name not in METHODS:
        raise ValueError(f"method {name!r} is not known: pass one of {', '.join(METHODS)}")
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology {topology!r} is not known: pass one of {', '.join(TOPOLOGIES)}")
    try:
        options = {"bits": float(bits)} if bits else {}
    except ValueError:
        raise ValueError(
            f"method {text!r}: {bits!r} is not a number of bits: write for example {name}:5"
        ) from None
    method, route = METHODS[name](**options), TOPOLOGIES[topology]()

    def wire_bytes(coords: int, n_workers: int) -> int:
        leaf = jax.ShapeDtypeStruct((coords,), jnp.bfloat16)
        return dq.explain(leaf, n_workers, method=method, topology=route).wire_bytes

    return Contender(
        label=f"{text.strip()} {topology}",
        reduce=lambda x: dq.psum(x, AXIS, method=method, topology=route),
        wire_bytes=wire_bytes,
        backend=resolve_backend(getattr(method, "backend", None)),
    )


def native(name: str) -> Contender:
    """The baseline ``name``: `lax.psum` with that dtype on the wire.

    Raises:
      ValueError: there is no such baseline.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is not known: pass one of {', '.join(BASELINES)}")
    dtype = jnp.dtype(BASELINES[name])
    return Contender(
        label=f"{name} psum",
        reduce=lambda x: lax.psum(x.astype(dtype), AXIS).astype(x.dtype),
        wire_bytes=lambda coords, n: 2 * (n - 1) * coords * dtype.itemsize // n,
        backend="xla",
    )


def transport(platform: str, environ: Mapping[str, str] = os.environ) -> str:
    """What carries the bytes, as the environment has told NCCL."""
    if platform == "cpu":
        return "cpu"
    if environ.get("NCCL_P2P_DISABLE", "0") != "1":
        return "nvlink/p2p"
    if environ.get("NCCL_SHM_DISABLE", "0") != "1":
        return "shm"
    return "socket" if environ.get("NCCL_NET", "").lower() == "socket" else "net"


def default_iterations(size_bytes: int, platform: str) -> int:
    """All-reduces in one timed program: 4 GiB of them on a GPU (3 to 200), 2 on a CPU."""
    if platform == "cpu":
        return 2
    return min(200, max(3, -(-(2**32) // size_bytes)))


def bench_all_reduce(
    sizes_bytes: Sequence[int],
    methods: Sequence[Contender],
    baseline: Contender,
    *,
    devices: Sequence[Any],
    repeats: int,
    iterations: int | None = None,
    seed: int = 0,
) -> list[AllReduceRow]:
    """Times every method and the baseline at every size on all ``devices``.

    Args:
      sizes_bytes: sizes of the bf16 leaf per device.
      methods: the contenders, in the order of the report.
      baseline: what speedups are relative to.
      devices: the workers, one axis.
      repeats: samples per method and size.
      iterations: all-reduces per sample; `None` takes `default_iterations`.
      seed: of the test data.

    Returns:
      The baseline's row and one row per method, for each size in turn.
    """
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    contenders = [baseline, *methods]
    rows = []
    for size_bytes in sizes_bytes:
        coords = size_bytes // 2
        times = iterations or default_iterations(size_bytes, devices[0].platform)
        data = heavy_tailed_gradients(mesh, coords, seed)
        quality = [_quality(mesh, contender, data) for contender in contenders]
        calls = [partial(_timed_program(mesh, c, times), data) for c in contenders]
        timings = time_calls(calls, repeats=repeats, iterations=times)
        for contender, timing, (vnmse, wrong) in zip(contenders, timings, quality, strict=True):
            rows.append(
                _row(
                    contender,
                    timing,
                    size_bytes=size_bytes,
                    wire_bytes=contender.wire_bytes(coords, len(devices)),
                    baseline_us=timings[0].median_us,
                    vnmse=vnmse,
                    wrong=wrong,
                    n_workers=len(devices),
                    iterations=times,
                    transport=transport(devices[0].platform),
                )
            )
    return rows


def heavy_tailed_gradients(mesh: Mesh, coords: int, seed: int) -> jax.Array:
    """Test data ``bf16[n, coords]``, row i on worker i, different on every worker.

    Coordinates are normal with a standard deviation that is shared by `BLOCK` neighbours and by
    all workers, drawn from the paper's mixture of two log-normals (dynamiq.md, section 3).
    """
    blocks = -(-coords // BLOCK)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(), out_specs=PartitionSpec(AXIS))
    def draw() -> jax.Array:
        key_pick, key_size, key_value = jax.random.split(jax.random.key(seed), 3)
        large = jax.random.bernoulli(key_pick, 0.79, (blocks, 1))
        z = jax.random.normal(key_size, (blocks, 1))
        magnitude = jnp.exp(jnp.where(large, -3.99 + 1.22 * z, -16.41 + 4.63 * z))
        own_key = jax.random.fold_in(key_value, lax.axis_index(AXIS))
        values = jax.random.normal(own_key, (blocks, BLOCK)) * (magnitude / BLOCK**0.5)
        return values.astype(jnp.bfloat16).reshape(1, -1)[:, :coords]

    return draw()


def _timed_program(
    mesh: Mesh, contender: Contender, iterations: int
) -> Callable[[jax.Array], jax.Array]:
    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
    def program(data: jax.Array) -> jax.Array:
        return repeat_on_device(contender.reduce, iterations)(data.reshape(-1))

    return program


def _quality(mesh: Mesh, contender: Contender, data: jax.Array) -> tuple[float, int]:
    """(vNMSE, coordinates on which replicas differ) of one all-reduce."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=(PartitionSpec(AXIS), PartitionSpec()),
    )
    def judge(data: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = data.reshape(-1)
        estimate = contender.reduce(x)
        exact = lax.psum(x.astype(jnp.float32), AXIS)
        # Each worker hands out its own replica, to be compared by `differing_coords`.
        own = lax.pcast(estimate, AXIS, to="varying")
        return own[None], dq.vnmse(estimate, exact)

    replicas, vnmse = judge(data)
    return float(vnmse), differing_coords(mesh, replicas)


def differing_coords(mesh: Mesh, replicas: jax.Array) -> int:
    """Coordinates of bf16[n, coords], row i from worker i, that are not the same bits in all rows.

    A program of its own: one that also computed the replicas could take them for equal.
    """

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
    def count(own: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(own, jnp.uint16).astype(jnp.uint32)
        return jnp.sum(lax.pmax(bits, AXIS) != lax.pmin(bits, AXIS))

    return int(count(replicas))


def _row(
    contender: Contender, timing: Timing, *, baseline_us: float, size_bytes: int, **rest: Any
) -> AllReduceRow:
    n_workers, wire_bytes = rest["n_workers"], rest["wire_bytes"]
    algbw = size_bytes / timing.median_us / 1e3
    return AllReduceRow(
        size_bytes=size_bytes,
        method=contender.label,
        time_us=timing.median_us,
        p10_us=timing.p10_us,
        p90_us=timing.p90_us,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * 2 * (n_workers - 1) / n_workers,
        wire_gb_per_s=wire_bytes / timing.median_us / 1e3,
        speedup=baseline_us / timing.median_us,
        backend=contender.backend,
        **rest,
    )
