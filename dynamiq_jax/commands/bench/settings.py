"""Measures links, and the all-reduce of a model's gradients in all settings beside bf16 psum.

Settings are what users would pass, with their limits: leaves that are too small to gain travel
natively here, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.all_reduce import (
    heavy_tailed_gradients,
    payloads_by,
    repetitions,
    timed_program,
)
from dynamiq_jax.commands.bench.contenders import (
    TOPOLOGIES,
    Contender,
    bits_of,
    parts,
    uncompressed,
)
from dynamiq_jax.commands.bench.timing import (
    TimedRow,
    Timing,
    compile_calls,
    time_calls,
)
from dynamiq_jax.core.xla import compiled_by, compiler_options
from dynamiq_jax.request.compression import AnyTopology, Explanation


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow(TimedRow):
    """How fast ``size_bytes`` per worker move."""

    exchange: str
    size_bytes: int
    gb_per_s: float
    """The bandwidth of one worker, in 10^9 bytes per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow(TimedRow):
    """The all-reduce of a tree in one setting.

    Attributes:
      setting: what `dq.psum` takes as method; `None`: bf16 psum.
      wire_bytes: what one worker sends.
      compressed: the share of coordinates that travel compressed.
      relative_error: of a super-group, see `dq.explain`.
      warning: what `dq.explain` advises where that is too much.
      transport: what moves payloads: "collectives" or "permutes"; of native psum "xla".
    """

    setting: dq.Compression | None
    wire_bytes: float
    compressed: float
    relative_error: float | None = None
    warning: str | None = None
    transport: str = "collectives"

    @property
    def bits(self) -> float:
        """Wire bits per coordinate of the method; 16 of native psum."""
        method: Any = self.setting and self.setting.method
        return method.bits if method else 16

    @property
    def label(self) -> str:
        """How it is called in sentences and tables."""
        if self.setting is None:
            return "bf16 psum"
        method: Any = self.setting.method
        dither = " with dither" if method.dither else ""
        return f"DynamiQ at {self.bits:g} bits{dither} over {type(self.setting.topology).__name__}"


def parse_bits(text: str) -> list[float]:
    """Comma-separated wire bits per coordinate."""
    return [dq.DynamiQ(bits=bits_of(part)).bits for part in parts(text)]


def suiting_topologies(sizes: tuple[int, ...]) -> list[str]:
    """Names of the topologies that serve axes of these sizes, the outermost first."""
    return [name for name, make in TOPOLOGIES.items() if _serves(make(), sizes)]


def _serves(topology: AnyTopology, sizes: tuple[int, ...]) -> bool:
    try:
        dq.Compression(topology=topology).route(sizes)
    except ValueError:
        return False
    return not isinstance(topology, dq.Hierarchical) or min(sizes) > 1


def settings(
    tree: Any,
    sizes: tuple[int, ...],
    bits: Sequence[float],
    topologies: Sequence[AnyTopology],
    dither: Sequence[bool] = (False,),
) -> list[dq.Compression]:
    """The settings under which some of the tree travels compressed.

    Where nothing does because of the limit for fast links, which goes by the kind of GPU, they are
    without it: measuring knows better.
    """
    found = []
    n_workers = math.prod(sizes)
    for topology in topologies:
        for method in (dq.DynamiQ(bits=b, dither=d) for b in bits for d in dither):
            size = method.limits({}, n_workers, fast_links=False).min_bucket_size
            for least in (None, size):
                setting = dq.Compression(method, topology=topology, min_bucket_size=least)
                if _compressed(setting.explain(tree, sizes, verbose=False)):
                    found.append(setting)
                    break
    return found


def native_reason(tree: Any, sizes: tuple[int, ...]) -> str:
    """Why the largest leaf travels natively."""
    rows = dq.explain(tree, sizes, verbose=False).rows
    largest = max(rows, key=lambda row: math.prod(row.shape))
    return f"the largest leaf has {math.prod(largest.shape):,} coordinates; {largest.route}"


def _compressed(explanation: Explanation) -> float:
    """The share of coordinates."""
    counts = [(math.prod(row.shape), row.bucket is not None) for row in explanation.rows]
    return sum(n for n, in_bucket in counts if in_bucket) / sum(n for n, _ in counts)


def bench_links(mesh: Mesh, size_bytes: int, *, repeats: int) -> list[LinkRow]:
    """Times ppermutes along every axis, the all-to-all of all workers, and one message.

    What travels are words, as in payloads: XLA's CPU backend sends bf16 as f32. Each worker has
    ``size_bytes``, cut to a multiple. The last row has the link's bandwidth: its message is alone.
    """
    axes, n = mesh.axis_names, mesh.size
    words = max(size_bytes // 4 // n, 1) * n
    size_bytes = 4 * words

    def permute(label: str, axis: Any, steps: Sequence[tuple[int, int]]) -> Contender:
        move = lambda x, axis_name: lax.ppermute(x, axis, steps)  # noqa: E731
        return Contender(label, move, replicated=False)

    def neighbours(axis: str) -> Contender:
        steps = [(i, (i + 1) % mesh.shape[axis]) for i in range(mesh.shape[axis])]
        return permute(f"to the next on axis {axis}", axis, steps)

    swap = lambda x, axis_name: lax.all_to_all(x, axis_name, 0, 0, tiled=True)  # noqa: E731
    everyone = Contender("all to all", swap, replicated=False)
    exchanges = [neighbours(axis) for axis in axes if mesh.shape[axis] > 1] + [everyone]
    exchanges.append(permute("from the last to the first", axes, [(n - 1, 0)]))
    sent = [size_bytes * (n - 1) // n if move is everyone else size_bytes for move in exchanges]
    rows = NamedSharding(mesh, PartitionSpec(axes))
    data = jax.jit(partial(jnp.zeros, (n, words), jnp.uint32), out_shardings=rows)()
    timings = _time(mesh, exchanges, data, size_bytes, repeats)
    return [
        LinkRow(
            exchange=exchange.label,
            size_bytes=size_bytes,
            gb_per_s=bytes_sent / timing.time_us / 1e3,
            **timing._asdict(),
        )
        for exchange, timing, bytes_sent in zip(exchanges, timings, sent, strict=True)
    ]


def bench_settings(
    mesh: Mesh,
    leaves: Sequence[jax.ShapeDtypeStruct],
    chosen: Sequence[dq.Compression],
    *,
    repeats: int,
) -> list[SettingRow]:
    """Times the all-reduce of a tree by native bf16 psum, leaf by leaf, and in all settings.

    Leaves are floating and not empty. Where workers belong to several processes, all of these call
    this function alike. The first row is that of bf16 psum.
    """
    sizes, leaves = mesh.devices.shape, list(leaves)
    options = compiler_options()  # of timed programs
    psum = uncompressed()

    def native(tree: Any, axis_name: Any) -> Any:
        return jax.tree.map(lambda x: psum.reduce(x, axis_name), tree)

    contenders = [psum._replace(reduce=native)]
    contenders += [Contender("", partial(dq.psum, method=setting)) for setting in chosen]
    data = _gradients(mesh, leaves)
    size_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    timings = _time(mesh, contenders, data, size_bytes, repeats)
    coords = sum(x.size for x in leaves)
    rows = [
        SettingRow(
            setting=None,
            wire_bytes=psum.wire_bytes(coords, sizes),
            compressed=0.0,
            transport="xla",
            **timings[0]._asdict(),
        )
    ]
    for setting, timing in zip(chosen, timings[1:], strict=True):
        with compiled_by(options):
            said = setting.explain(leaves, sizes, verbose=False)
        rows.append(
            SettingRow(
                setting=setting,
                wire_bytes=said.wire_bytes,
                compressed=_compressed(said),
                relative_error=said.relative_error,
                warning=said.advice,
                transport=payloads_by(setting.topology, sizes),
                **timing._asdict(),
            )
        )
    return rows


def _time(
    mesh: Mesh,
    contenders: Sequence[Contender],
    data: Any,
    size_bytes: int,
    repeats: int,
) -> list[Timing]:
    counts = repetitions(size_bytes, mesh.devices.flat[0].platform)
    programs = [timed_program(mesh, c, counts["iterations"]) for c in contenders]
    calls = compile_calls(programs, data)
    return time_calls(calls, repeats=repeats, **counts)


def _gradients(mesh: Mesh, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Leaves [n, *shape], row i on worker i: each has the first of the largest one's numbers."""
    flat = heavy_tailed_gradients(mesh, max(x.size for x in leaves))
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @partial(jax.jit, out_shardings=rows)
    def cut(flat: jax.Array) -> list[jax.Array]:
        return [flat[:, : x.size].reshape(-1, *x.shape).astype(x.dtype) for x in leaves]

    return cut(flat)
