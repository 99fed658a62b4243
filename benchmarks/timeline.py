"""What the first GPU did while a function ran: kernels and copies, from JAX's profile.

    import timeline

    spans = timeline.profile(lambda: step(x), Path("runs/step"))

leaves the profile of a few calls in the folder, which xprof shows stream by stream, and returns
kernels and copies of the last one. ``step_time.py --profile`` does so for every way.
"""

import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np


class Span(NamedTuple):
    """One kernel or copy; microseconds."""

    name: str
    start_us: float
    end_us: float


def profile(call: Callable[[], Any], folder: pathlib.Path, times: int = 3) -> list[Span]:
    """The spans of the last of so many calls, on the first GPU, by their starts."""
    for _ in range(3):
        jax.block_until_ready(call())
    with jax.profiler.trace(folder):
        for _ in range(times):
            jax.block_until_ready(call())
    file = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    data = jax.profiler.ProfileData.from_file(str(file))
    plane = min((p for p in data.planes if "/device:GPU" in p.name), key=lambda p: p.name)
    spans = [
        Span(short(e.name), e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3)
        for line in plane.lines
        if line.name.startswith("Stream")
        for e in line.events
    ]
    spans.sort(key=lambda span: span.start_us)
    # Calls are waited for, so that the longest pauses lie between them.
    ends = np.maximum.accumulate([span.end_us for span in spans])
    gaps = np.array([span.start_us for span in spans[1:]]) - ends[:-1]
    last = np.sort(np.argsort(gaps)[-(times - 1) :])[-1]
    return spans[int(last) + 1 :]


def short(name: str) -> str:
    """A kernel's name without its arguments."""
    return re.sub(r"[(<].*", "", name)[:48]


def busy_us(spans: Iterable[Span]) -> float:
    """Microseconds during which at least one of the spans is under way."""
    total, until = 0.0, -np.inf
    for span in sorted(spans, key=lambda span: span.start_us):
        total += max(span.end_us - max(span.start_us, until), 0.0)
        until = max(until, span.end_us)
    return total


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


def overlap(spans: Iterable[Span]) -> Overlap:
    """Sums a profile up."""
    spans = list(spans)
    transfer_us = busy_us(s for s in spans if is_transfer(s))
    kernels_us = busy_us(s for s in spans if not is_transfer(s))
    return Overlap(transfer_us / 1e3, (transfer_us + kernels_us - busy_us(spans)) / 1e3)
