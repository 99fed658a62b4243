"""Measures the all-reduce of a model's gradients in all settings beside bf16 psum.

Settings are what users would pass, with their limits: leaves that are too small to gain travel
natively here, too.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import all_reduce
from dynamiq_jax.commands.bench.contenders import TOPOLOGIES, Contender, uncompressed
from dynamiq_jax.commands.bench.timing import Timing, compile_calls, time_calls
from dynamiq_jax.compression.compression import AnyTopology
from dynamiq_jax.compression.explanation import Explanation
from dynamiq_jax.topologies.links import compiled_by, compiler_options


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow(Timing):
    """The all-reduce of a tree in one setting.

    Attributes:
      setting: what `dq.psum` takes as method; `None`: bf16 psum.
      wire_bytes: what one worker sends.
      compressed: the share of coordinates that travel compressed.
      relative_error: of a super-group, see `dq.explain`.
      warning: what `dq.explain` advises where that is too much.
      transport: what moves payloads: "collectives", "permutes" or "push"; of native psum "xla".
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


def bench_settings(
    mesh: Mesh,
    leaves: Sequence[jax.ShapeDtypeStruct],
    chosen: Sequence[dq.Compression],
    *,
    repeats: int,
) -> list[SettingRow]:
    """Times the all-reduce of a tree by native bf16 psum, leaf by leaf, and in all settings.

    All processes of the workers call this function alike. The first row is that of bf16 psum.
    """
    sizes, leaves = mesh.devices.shape, list(leaves)
    options = compiler_options()  # of timed programs
    psum = uncompressed()

    def native(tree: Any, axis_name: Any) -> Any:
        return jax.tree.map(lambda x: psum.reduce(x, axis_name), tree)

    contenders = [psum._replace(reduce=native)]
    contenders += [Contender("", partial(dq.psum, compression=setting)) for setting in chosen]
    data = _gradients(mesh, leaves)
    size_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    counts = all_reduce.repetitions(size_bytes, mesh.devices.flat[0].platform)
    programs = [all_reduce.timed_program(mesh, c, counts["iterations"]) for c in contenders]
    timings = time_calls(compile_calls(programs, data), repeats=repeats, **counts)
    coords = sum(x.size for x in leaves)
    rows = [
        SettingRow(
            setting=None,
            wire_bytes=psum.wire_bytes(coords, sizes),
            compressed=0.0,
            transport="xla",
            **asdict(timings[0]),
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
                transport=all_reduce.payloads_by(setting, sizes, size_bytes),
                **asdict(timing),
            )
        )
    return rows


def _gradients(mesh: Mesh, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Leaves [n, *shape], row i on worker i: each has the first of the largest one's numbers."""
    flat = all_reduce.heavy_tailed_gradients(mesh, max(x.size for x in leaves))
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @partial(jax.jit, out_shardings=rows)
    def cut(flat: jax.Array) -> list[jax.Array]:
        return [flat[:, : x.size].reshape(-1, *x.shape).astype(x.dtype) for x in leaves]

    return cut(flat)
