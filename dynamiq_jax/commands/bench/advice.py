"""Advice: measures links and the all-reduce of a model's gradients, and says what to do about it.

`bench_links` and `bench_settings` measure; `decide` is a function of measured rows alone. Native
bf16 psum is what all is compared with. Settings are what users would pass, with their limits:
leaves that are too small to gain travel natively here, too.

The rule: compression has to save `MIN_GAIN` of a training step (of the all-reduce, where the
step's time is not known), and fewer bits as much again. A setting of which `explain` warns is only
taken where no other pays.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.all_reduce import (
    default_iterations,
    heavy_tailed_gradients,
    in_flight,
    timed_program,
)
from dynamiq_jax.commands.bench.contenders import TOPOLOGIES, Contender, bits_of, uncompressed
from dynamiq_jax.commands.bench.timing import (
    WARM_UP,
    Announce,
    Timing,
    compile_calls,
    silent,
    time_calls,
)
from dynamiq_jax.core.xla import compiled_by, compiler_options
from dynamiq_jax.request.compression import AnyTopology, Explanation
from dynamiq_jax.request.configuration import describe
from dynamiq_jax.request.ways import Way

MIN_GAIN = 0.05
"""The share of time that has to be saved, to compress at all and for every step to fewer bits."""

TIE = 0.02
"""Topologies whose times differ by no more than this share count as equally fast."""

MIN_LINK = 0.8
"""The share of the link's rate below which `slow_exchanges` names an exchange."""

BACKWARD = 2 / 3
"""The part of a step's computation that an all-reduce can hide under."""

NATIVE = {"name": "BF16"}
"""The method of the row that all others are compared with."""


# --- What is measured -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """How fast ``size_bytes`` per worker move."""

    exchange: str
    size_bytes: int
    time_us: float
    p10_us: float
    p90_us: float
    gb_per_s: float
    """The bandwidth of one worker, in 10^9 bytes per second."""

    @property
    def rate(self) -> str:
        """The bandwidth as `dq.explain` takes it, in whole mbit or gbit."""
        mbit = max(8e3 * self.gb_per_s, 1)
        return f"{mbit:.0f}mbit" if mbit < 1e4 else f"{mbit / 1e3:.0f}gbit"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """The all-reduce of a tree in one setting.

    Attributes:
      method: as a configuration file has it, see `dynamiq_jax.request.configuration`; `NATIVE` is
        bf16 psum.
      topology: the same.
      time_us: the median.
      p10_us: the 10th percentile.
      p90_us: the 90th percentile.
      wire_bytes: what one worker sends.
      compressed: the share of coordinates that travel compressed.
      relative_error: of a super-group, see `dq.explain`.
      warning: what `dq.explain` advises where that is too much.
      transport: what moves payloads: "collectives" or "permutes"; of native psum "xla".
      tree: what was reduced.
      min_bucket_size: as for `dq.Compression`, where the default would compress nothing.
    """

    method: Mapping[str, Any]
    topology: Mapping[str, Any] | None
    time_us: float
    p10_us: float
    p90_us: float
    wire_bytes: float
    compressed: float
    relative_error: float | None = None
    warning: str | None = None
    transport: str = "collectives"
    tree: str = ""
    min_bucket_size: int | None = None

    @property
    def bits(self) -> float:
        """Wire bits per coordinate of the method; 16 of native psum."""
        return self.method.get("bits", 16)

    @property
    def label(self) -> str:
        """How it is called in sentences and tables."""
        if self.topology is None:
            return "bf16 psum"
        dither = " with dither" if self.method.get("dither") else ""
        return f"{self.method['name']} at {self.bits:g} bits{dither} over {self.topology['name']}"


def parse_bits(text: str) -> float:
    """Wire bits per coordinate.

    Raises:
      ValueError: no number, or none that DynamiQ takes.
    """
    bits = bits_of(text)
    dq.DynamiQ(bits=bits)
    return bits


def parse_dither(text: str) -> bool:
    """Whether to dither.

    Raises:
      ValueError: neither "on" nor "off".
    """
    if text not in ("on", "off"):
        raise ValueError(f"dither {text!r} is neither: pass off, on, or off,on for both")
    return text == "on"


def floating_leaves(tree: Any) -> list[jax.ShapeDtypeStruct]:
    """The leaves that count: no integers, which always travel exactly, and no empty ones.

    Raises:
      ValueError: there are none.
    """
    leaves = jax.tree.leaves(tree)
    found = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    if not found:
        raise ValueError(
            f"none of {len(leaves)} leaves has floating-point numbers; pass a model's gradients"
        )
    return found


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

    What travels are words, as in payloads: XLA's CPU backend sends bf16 as f32.

    Args:
      mesh: the workers; see `all_reduce.make_mesh`.
      size_bytes: what each of them has; it is cut to a multiple.
      repeats: samples per exchange.

    Returns:
      A row for every exchange. The last one has the link's bandwidth: its message is alone.
    """
    axes, n = mesh.axis_names, mesh.size
    words = max(size_bytes // 4 // n, 1) * n
    size_bytes = 4 * words

    def permute(label: str, axis: Any, steps: Sequence[tuple[int, int]]) -> Contender:
        move = lambda x, axis_name: lax.ppermute(x, axis, steps)  # noqa: E731
        return Contender(label, "exchange", move, lambda *_: 0, "xla")

    def neighbours(axis: str) -> Contender:
        steps = [(i, (i + 1) % mesh.shape[axis]) for i in range(mesh.shape[axis])]
        return permute(f"to the next on axis {axis}", axis, steps)

    everyone = Contender(
        "all to all",
        "exchange",
        lambda x, axis_name: lax.all_to_all(x, axis_name, 0, 0, tiled=True),
        lambda *_: 0,
        "xla",
    )
    exchanges = [neighbours(axis) for axis in axes if mesh.shape[axis] > 1] + [everyone]
    exchanges.append(permute("from the last to the first", axes, [(n - 1, 0)]))
    sent = [size_bytes * (n - 1) // n if move is everyone else size_bytes for move in exchanges]
    rows = NamedSharding(mesh, PartitionSpec(axes))
    data = jax.jit(partial(jnp.zeros, (n, words), jnp.uint32), out_shardings=rows)()
    timings = _time(mesh, exchanges, data, size_bytes, repeats, None)
    return [
        LinkRow(
            exchange=exchange.label,
            size_bytes=size_bytes,
            time_us=timing.median_us,
            p10_us=timing.p10_us,
            p90_us=timing.p90_us,
            gb_per_s=bytes_sent / timing.median_us / 1e3,
        )
        for exchange, timing, bytes_sent in zip(exchanges, timings, sent, strict=True)
    ]


def slow_exchanges(links: Sequence[LinkRow]) -> str | None:
    """A sentence about the exchanges that take longer than their bytes between CPU processes.

    Gloo keeps one connection for every pair of processes. A process whose peer is ready to receive
    sends at once, and tells only behind this message that it is ready, too.

    Args:
      links: of `bench_links`, between processes of a CPU.

    Returns:
      `None` if all exchanges reach `MIN_LINK` of the link's bandwidth, which is the last one's.
    """
    slow = [row.exchange for row in links if row.gb_per_s < MIN_LINK * links[-1].gb_per_s]
    if not slow:
        return None
    return (
        f"The link carries {links[-1].rate}, the delay of one message included. Less than "
        f"{MIN_LINK:.0%} of it are reached by: {', '.join(slow)}. Workers of a process share its "
        "link, and gloo lets two processes that exchange messages take turns."
    )


def bench_settings(
    mesh: Mesh,
    leaves: Sequence[jax.ShapeDtypeStruct],
    chosen: Sequence[dq.Compression],
    *,
    repeats: int,
    name: str = "",
    iterations: int | None = None,
    seed: int = 0,
    announce: Announce = silent,
) -> list[SettingRow]:
    """Times the all-reduce of a tree by native bf16 psum, leaf by leaf, and in all settings.

    Args:
      mesh: the workers; see `all_reduce.make_mesh`. Where they belong to several processes, all of
        these call this function alike.
      leaves: of the tree, floating and not empty.
      chosen: see `settings`.
      repeats: samples per setting.
      name: the tree's, for the rows.
      iterations: all-reduces per sample; `None` takes `default_iterations` of the tree's bytes.
      seed: of the test data.
      announce: is told how far it is.

    Returns:
      The row of bf16 psum, and one for every setting.
    """
    sizes, leaves = mesh.devices.shape, list(leaves)
    options = compiler_options()  # of timed programs
    psum = uncompressed("bf16")

    def native(tree: Any, axis_name: Any) -> Any:
        return jax.tree.map(lambda x: psum.reduce(x, axis_name), tree)

    contenders = [psum._replace(reduce=native)]
    for s in chosen:
        reduce = partial(dq.psum, method=s)
        contenders.append(Contender("", "psum", reduce, lambda *_: 0, ""))
    data = _gradients(mesh, leaves, seed)
    size_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    timings = _time(mesh, contenders, data, size_bytes, repeats, iterations, announce)
    coords = sum(x.size for x in leaves)
    rows = [
        SettingRow(
            method=NATIVE,
            topology=None,
            wire_bytes=psum.wire_bytes(coords, sizes),
            compressed=0.0,
            transport="xla",
            tree=name,
            **_times(timings[0]),
        )
    ]
    for setting, timing in zip(chosen, timings[1:], strict=True):
        named = describe(setting)
        with compiled_by(options):
            said = setting.explain(leaves, sizes, verbose=False)
            route: Any = setting.route(sizes).topology
        method: Any = setting.method
        rows.append(
            SettingRow(
                method=named["method"] | {"bits": method.bits},
                topology=named["topology"],
                min_bucket_size=setting.min_bucket_size,
                wire_bytes=said.wire_bytes,
                compressed=_compressed(said),
                relative_error=said.relative_error,
                warning=said.advice,
                transport=route.levels(sizes).outer.transport,
                tree=name,
                **_times(timing),
            )
        )
    return rows


def _time(
    mesh: Mesh,
    contenders: Sequence[Contender],
    data: Any,
    size_bytes: int,
    repeats: int,
    iterations: int | None,
    announce: Announce = silent,
) -> list[Timing]:
    platform = mesh.devices.flat[0].platform
    times = iterations or default_iterations(size_bytes, platform)
    programs = [timed_program(mesh, contender, times) for contender in contenders]
    flying = in_flight(times, platform)
    begin = time.perf_counter()
    calls = compile_calls(programs[:2], data)
    jax.block_until_ready(calls[-1]())
    compiled = time.perf_counter()
    jax.block_until_ready(calls[-1]())
    once = time.perf_counter() - compiled
    each, settings = compiled - begin + (WARM_UP + repeats * flying) * once, len(programs) - 1
    if settings:
        announce(
            f"{settings} setting(s), {_about(each)} each: {_about(each * settings)} in all, less "
            "where compilations overlap"
        )
    calls += compile_calls(programs[2:], data, announce)
    return time_calls(calls, repeats=repeats, iterations=times, in_flight=flying, announce=announce)


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def _times(timing: Timing) -> dict[str, Any]:
    return dict(zip(("time_us", "p10_us", "p90_us"), timing, strict=True))


def _gradients(mesh: Mesh, leaves: Sequence[jax.ShapeDtypeStruct], seed: int) -> list[jax.Array]:
    """Leaves [n, *shape], row i on worker i: each has the first of the largest one's numbers."""
    flat = heavy_tailed_gradients(mesh, max(x.size for x in leaves), seed)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @partial(jax.jit, out_shardings=rows)
    def cut(flat: jax.Array) -> list[jax.Array]:
        return [flat[:, : x.size].reshape(-1, *x.shape).astype(x.dtype) for x in leaves]

    return cut(flat)


# --- What follows from it -------------------------------------------------------------------------


class StepTimes(NamedTuple):
    """Milliseconds that a training step takes."""

    exposed: float
    """Where the all-reduce begins when the backward pass has ended."""
    hidden: float
    """Where it runs under the backward pass, and only what is left is waited for."""


def step_times(step_ms: float, native_us: float, ours_us: float) -> StepTimes:
    """The times of a step of ``step_ms`` with bf16 psum, if the all-reduce takes ``ours_us``.

    The backward pass counts as `BACKWARD` of the computation, kernels under it as free. A step
    takes no less than its all-reduce, whatever ``step_ms`` says.
    """
    native, ours = native_us / 1e3, ours_us / 1e3
    step_ms = max(step_ms, native)
    # What computes if nothing sticks out of the backward pass; else what sticks out tells.
    fits = native <= BACKWARD * step_ms
    compute = step_ms if fits else (step_ms - native) / (1 - BACKWARD)
    hidden = (1 - BACKWARD) * compute + max(BACKWARD * compute, ours)
    return StepTimes(step_ms - native + ours, hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The advice.

    Attributes:
      compress: whether it pays.
      row: the setting to use; bf16 psum's row where compression does not pay.
      saved: the share of a step, or of the all-reduce, that it saves; of the fastest setting,
        where that is too little.
      sentences: the same in words, one paragraph each.
    """

    compress: bool
    row: SettingRow
    saved: float
    sentences: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The fields of a `dq.Compression`, as its files have them."""
        row = self.row
        found = {"method": row.method, "topology": row.topology}
        found["min_bucket_size"] = row.min_bucket_size
        return {name: value for name, value in found.items() if value is not None}

    def snippet(self, axis_names: tuple[str, ...] = ("data",)) -> str:
        """The lines of a training script."""
        axis = repr(axis_names[0] if len(axis_names) == 1 else axis_names).replace("'", '"')
        arguments = {name: _expression(value) for name, value in self.config.items()}
        if self.row.min_bucket_size is not None:
            named = [f"{name}={text}" for name, text in arguments.items() if name != "method"]
            request = ", ".join([arguments["method"], *named])
            arguments = {"method": f"dq.Compression({request})"}
        passed = ", ".join(f"{name}={text}" for name, text in arguments.items())
        lines = [f"grads = dq.pmean(grads, {axis}, {passed})"]
        if self.row.transport == "permutes":
            lines.append("step = dq.jit(step)")
        return "\n".join(lines)


def decide(
    rows: Sequence[SettingRow], *, step_ms: float | None = None, reason: str | None = None
) -> Advice:
    """The advice that measured rows give.

    Args:
      rows: of one tree: that of bf16 psum first, then those of all settings.
      step_ms: milliseconds of a training step with bf16 psum.
      reason: why there are no settings, if there are none.
    """
    native, *ours = rows
    if not ours:
        said = (f"Do not bother: everything would travel natively ({reason}).",)
        return Advice(compress=False, row=native, saved=0.0, sentences=said)
    rest_us = 0.0 if step_ms is None else max(1e3 * step_ms - native.time_us, 0.0)
    what = "all-reduce" if step_ms is None else "step"

    def saved(row: SettingRow, over: SettingRow = native) -> float:
        return 1 - (rest_us + row.time_us) / (rest_us + over.time_us)

    fastest = min(ours, key=lambda row: row.time_us)
    paying = [row for row in ours if saved(row) >= MIN_GAIN]
    pool = [row for row in paying if row.warning is None] or paying
    if not pool:
        gain = f"saves {saved(fastest):.1%} of the {what}, less than {MIN_GAIN:.0%}"
        if saved(fastest) <= 0:
            gain = f"is slower than bf16 psum ({_speedup(fastest, native)})"
        verdict = [f"Do not bother: the fastest setting, {fastest.label}, {gain}."]
        verdict += [] if step_ms is None else _step_sentences(step_ms, native, fastest)
        return Advice(compress=False, row=native, saved=saved(fastest), sentences=tuple(verdict))
    ladder = [
        _best([row for row in pool if row.bits == bits])
        for bits in sorted({row.bits for row in pool}, reverse=True)
    ]
    chosen = ladder[0]
    for row in ladder[1:]:
        chosen = row if saved(row, chosen) >= MIN_GAIN else chosen
    if chosen.warning is not None:  # and so is all that pays: then the least error
        chosen = min(pool, key=_error_then_time)
    sentences = [
        f"Use {chosen.label}: an all-reduce takes {_ms(chosen.time_us)} instead of "
        f"{_ms(native.time_us)} with bf16 psum ({_speedup(chosen, native)}), and a worker sends "
        f"{chosen.wire_bytes / 1e6:,.4g} MB instead of {native.wire_bytes / 1e6:,.4g}.",
        *_step_sentences(step_ms, native, chosen),
        *_error_sentences(chosen, ladder, native, what),
        *_caveats(chosen, native),
    ]
    return Advice(compress=True, row=chosen, saved=saved(chosen), sentences=tuple(sentences))


ROOM = 0.6
"""The share of a device's memory that parameters, optimizer and gradients may take."""


def choose_way(found: Sequence[Way], memory_bytes: int | None) -> str:
    """The way to train, of those that `dq.explain` compares by bytes, in sentences.

    Args:
      found: data parallel, sharded updates, FSDP.
      memory_bytes: those of a device; `None` if it does not tell.
    """
    whole = [way for way in found if way.name != "FSDP"]
    fits = [
        way
        for way in whole
        if memory_bytes is None or way.kept_bytes + way.gradient_bytes <= ROOM * memory_bytes
    ]
    if not fits:
        least = min(way.kept_bytes + way.gradient_bytes for way in whole)
        return (
            f"Train with FSDP (dq.reduce_in_backward): whole parameters with gradients take at "
            f"least {least / 1e9:,.4g} GB, and {ROOM:.0%} of a device's memory are "
            f"{ROOM * (memory_bytes or 0) / 1e9:,.4g}."
        )
    chosen = min(fits, key=lambda way: way.sent_bytes)
    condition = (
        ", if the optimizer's update of a coordinate depends on this coordinate alone, as in "
        "AdamW, Lion and SGD; else data parallel"
        if chosen.name == "sharded updates"
        else ""
    )
    return (
        f"Train with {chosen.name} ({chosen.call}){condition}. This goes by bytes: no way but data "
        "parallel was timed here."
    )


def _best(rows: Sequence[SettingRow]) -> SettingRow:
    """The fastest; of those that are as fast, the one of the least error."""
    least = min(row.time_us for row in rows)
    as_fast = [row for row in rows if row.time_us <= (1 + TIE) * least]
    return min(as_fast, key=_error_then_time)


def _error_then_time(row: SettingRow) -> tuple[float, float]:
    return row.relative_error or 0.0, row.time_us


def _step_sentences(step_ms: float | None, native: SettingRow, row: SettingRow) -> list[str]:
    if step_ms is None:
        return ["What a step gains depends on its length: pass --step-time-ms, with bf16 psum."]
    found, before = [], max(step_ms, native.time_us / 1e3)
    if before > step_ms:
        found.append(
            f"bf16 psum alone takes {_ms(native.time_us)}, more than the {step_ms:.4g} ms of "
            "--step-time-ms, which counts as a step that does nothing else."
        )
    times = step_times(step_ms, native.time_us, row.time_us)
    exposed, hidden = (
        f"{after:.4g} ms ({1 - after / before:.1%} less)" if after < before else f"{after:.4g} ms"
        for after in times
    )
    found.append(
        f"With it a step of {before:.4g} ms takes {exposed} where the all-reduce follows the "
        f"backward pass, and {hidden} where it runs under it."
    )
    if times.exposed <= (1 - MIN_GAIN) * before < times.hidden:
        found.append("Where the backward pass hides the all-reduce, do not bother.")
    return found


def _error_sentences(
    chosen: SettingRow, ladder: Sequence[SettingRow], native: SettingRow, what: str
) -> list[str]:
    """The chosen error, that of all other bits that pay, and what speaks against fewer."""
    found = []
    if chosen.relative_error is not None:
        found.append(
            f"Expected |error|² / |sum|² of a super-group: about {chosen.relative_error:.2g}. "
            "Fewer bits cost training loss: docs/training-quality.md has how much."
        )
    if chosen.warning is not None:
        found.append(f"No setting pays without this warning: {chosen.warning}.")
    for row in ladder:
        if row is not chosen:
            error = "" if row.relative_error is None else f", error {row.relative_error:.2g}"
            found.append(f"{row.label} is {_speedup(row, native)}{error}.")
    if ladder[-1] is not chosen:
        found.append(f"Fewer bits save less than another {MIN_GAIN:.0%} of the {what}.")
    return found


def _caveats(chosen: SettingRow, native: SettingRow) -> list[str]:
    found = []
    size = chosen.min_bucket_size
    if size is not None:
        found.append(
            "With the default limits, which go by the kind of GPU, everything would travel "
            f"natively: hence min_bucket_size={size}."
        )
    if chosen.compressed < 0.995:
        found.append(
            f"{chosen.compressed:.1%} of the coordinates are compressed; the other leaves are too "
            "small to gain and are summed exactly."
        )
    if chosen.p90_us > native.p10_us:
        found.append(
            f"The spread is as large as the gain ({_ms(chosen.p10_us)} to {_ms(chosen.p90_us)}, "
            f"bf16 psum {_ms(native.p10_us)} to {_ms(native.p90_us)}): measure again on a quiet "
            "machine, with more --repeats."
        )
    return found


def _speedup(row: SettingRow, native: SettingRow) -> str:
    return f"{native.time_us / row.time_us:.2f}x"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.4g} ms"


def _expression(values: Any) -> str:
    """``dq.DynamiQ(bits=5)`` and the like, or a plain value."""
    if not isinstance(values, Mapping):
        return repr(values)
    texts = {k: _expression(v) if isinstance(v, Mapping) else repr(v) for k, v in values.items()}
    fields = [f"{field}={text}" for field, text in texts.items() if field != "name"]
    return f"dq.{values['name']}({', '.join(fields)})"
