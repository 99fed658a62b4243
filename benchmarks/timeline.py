"""Draws what the GPUs do during one `psum`: kernels and copies, stream by stream.

    python benchmarks/timeline.py [--size 1GiB] [--bits 5] [--topology direct] [--plot FILE.png]

Profiles a few calls on all GPUs after a warm-up, takes the last one on the first GPU, prints its
kernels and copies in order of time, with what part of each ran beside others, and draws them.
"""

import collections
import csv
import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dynamiq_jax.commands.bench import all_reduce, contenders


class Span(NamedTuple):
    """One kernel or copy; microseconds since the first one."""

    stream: str
    name: str
    start_us: float
    end_us: float


def timed_program(size: str, bits: float, topology: str):
    """One psum of one bf16 leaf per GPU, and its input."""
    mesh = all_reduce.make_mesh(jax.devices())
    route = contenders.parse_topology(topology)
    contender = contenders.parse_method(f"dynamiq:{bits}", route)
    data = all_reduce.heavy_tailed_gradients(mesh, contenders.parse_size(size) // 2)
    return all_reduce.timed_program(mesh, contender, 1), data


def profile(call, times: int = 3) -> list[Span]:
    """The spans of the last of so many calls, on the first GPU."""
    for _ in range(3):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(call())
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(file))
        plane = min((p for p in data.planes if "/device:GPU" in p.name), key=lambda p: p.name)
        events = [
            (line.name, e.name, e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3)
            for line in plane.lines
            if line.name.startswith("Stream")
            for e in line.events
        ]
    events.sort(key=lambda e: e[2])
    # Calls are waited for, so that the longest pauses lie between them.
    ends = np.maximum.accumulate([end for *_, end in events])
    gaps = np.array([start for _, _, start, _ in events[1:]]) - ends[:-1]
    cuts = np.sort(np.argsort(gaps)[-(times - 1) :])
    last = events[int(cuts[-1]) + 1 :]
    zero = last[0][2]
    return [Span(stream, short(name), a - zero, b - zero) for stream, name, a, b in last]


def short(name: str) -> str:
    """A kernel's name without its arguments."""
    return re.sub(r"[(<].*", "", name)[:48]


def beside(span: Span, spans: list[Span]) -> float:
    """The part of a span during which another stream was busy, too."""
    others = union(s for s in spans if s.stream != span.stream)
    covered = both(union([span]), others)
    return covered / max(span.end_us - span.start_us, 1e-9)


Intervals = list[tuple[float, float]]
"""Apart from each other, in order of time."""


def union(spans: Iterable[Span]) -> Intervals:
    """When at least one of the spans is under way."""
    found: Intervals = []
    for start, end in sorted((s.start_us, s.end_us) for s in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Microseconds of all of them."""
    return sum(end - start for start, end in intervals)


def both(one: Intervals, other: Intervals) -> float:
    """Microseconds that lie in both."""
    return length(one) + length(other) - length(_merged(one, other))


def _merged(one: Intervals, other: Intervals) -> Intervals:
    return union(Span("", "", *interval) for interval in (*one, *other))


def is_transfer(span: Span) -> bool:
    """Whether a span moves data to another GPU: a kernel of NCCL, or a copy between peers."""
    return "nccl" in span.name.lower() or "p2p" in span.name.lower()


class Overlap(NamedTuple):
    """How much of the transfers runs beside other work; milliseconds on one GPU."""

    transfer_ms: float
    """While at least one transfer is under way."""
    hidden_ms: float
    """The part of them beside a kernel that moves nothing between GPUs."""

    def __str__(self) -> str:
        share = self.hidden_ms / self.transfer_ms if self.transfer_ms else 0.0
        return f"{self.transfer_ms:.2f} ms of transfers, {share:.0%} of it beside kernels"


def overlap(spans: list[Span]) -> Overlap:
    """Sums a profile up."""
    transfers = union(s for s in spans if is_transfer(s))
    kernels = union(s for s in spans if not is_transfer(s))
    return Overlap(length(transfers) / 1e3, both(transfers, kernels) / 1e3)


def write(spans: list[Span], file: pathlib.Path) -> None:
    """All of them as CSV."""
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(Span._fields)
        rows.writerows((s.stream, s.name, f"{s.start_us:.2f}", f"{s.end_us:.2f}") for s in spans)


def draw(spans: list[Span], title: str, file: pathlib.Path) -> None:
    """One row for each stream."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    streams = list(dict.fromkeys(s.stream for s in spans))
    bars: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)
    taken: collections.Counter[str] = collections.Counter()
    for s in spans:
        bars[s.stream, s.name].append((s.start_us / 1e3, (s.end_us - s.start_us) / 1e3))
        taken[s.name] += s.end_us - s.start_us  # pyright: ignore[reportArgumentType]
    names = [name for name, _ in taken.most_common()]
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))  # pyright: ignore
    figure = Figure(figsize=(12, 1.5 + 0.5 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for (stream, name), own in bars.items():
        at = (len(streams) - 1 - streams.index(stream) - 0.4, 0.8)
        axes.broken_barh(own, at, color=colours.get(name, "black"), linewidth=0)
    for name, colour in list(colours.items())[:10]:
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(streams)), streams[::-1])
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(file, dpi=130)


def main(
    size: Annotated[str, typer.Option(help="bf16 leaf per GPU.")] = "1GiB",
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate.")] = 5.0,
    topology: Annotated[str, typer.Option(help="direct, ring or butterfly.")] = "direct",
    plot: Annotated[pathlib.Path | None, typer.Option(help="Where the picture goes.")] = None,
) -> None:
    """Profiles, prints and draws."""
    program, data = timed_program(size, bits, topology)
    spans = profile(lambda: program(data))
    end = max(s.end_us for s in spans)
    title = f"psum of {size}, {bits:g} bits, {topology}, {jax.device_count()} GPUs: {end:.0f} µs"
    table = Table("stream", "what", "from µs", "µs", "beside others", title=title)
    for s in spans:
        if s.end_us - s.start_us >= 3:
            times = f"{s.start_us:.0f}", f"{s.end_us - s.start_us:.0f}"
            table.add_row(s.stream, s.name, *times, f"{beside(s, spans):.0%}")
    console = Console(width=120)
    console.print(table)
    small = [s for s in spans if s.end_us - s.start_us < 3]
    total = sum(s.end_us - s.start_us for s in small)
    console.print(f"and {len(small)} of less than 3 µs: {total:.0f} µs")
    if plot:
        draw(spans, title, plot)


if __name__ == "__main__":
    typer.run(main)
