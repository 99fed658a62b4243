"""The advice that follows from measured rows: a function of them alone.

The rule: compression has to save `MIN_GAIN` of a training step (of the all-reduce, where the
step's time is not known), and fewer bits as much again. A setting of which `explain` warns is only
taken where no other pays.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.settings import SettingRow

MIN_GAIN = 0.05
"""The share of time that has to be saved, to compress at all and for every step to fewer bits."""

TIE = 0.02
"""Topologies whose times differ by no more than this share count as equally fast."""

BACKWARD = 2 / 3
"""The part of a step's computation that an all-reduce can hide under."""


class StepTimes(NamedTuple):
    """Milliseconds that a training step takes."""

    exposed: float
    """Where the all-reduce begins when the backward pass has ended."""
    hidden: float
    """Where it runs under the backward pass, and only what is left is waited for."""


def step_times(step_ms: float, native_us: float, ours_us: float) -> StepTimes:
    """The times of a step of ``step_ms`` with bf16 psum, if the all-reduce takes ``ours_us``.

    A step takes no less than its all-reduce, whatever ``step_ms`` says.
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
    """The row of the setting to use, bf16 psum's if compression does not pay, and why in words."""

    row: SettingRow
    sentences: tuple[str, ...]

    @property
    def setting(self) -> dq.Compression:
        """The `Compression` of the row, or bf16 psum, for the argument ``method``."""
        return self.row.setting or dq.Compression(dq.BF16())

    def snippet(self, axis_names: tuple[str, ...] = ("data",)) -> str:
        """The lines of a training script."""
        axis = repr(axis_names[0] if len(axis_names) == 1 else axis_names).replace("'", '"')
        method = re.sub(r"\b([A-Z]\w*\()", r"dq.\1", repr(self.setting))
        lines = [f"grads = dq.pmean(grads, {axis}, compression={method})"]
        if self.row.transport == "permutes":
            lines.append("step = dq.jit(step)")
        return "\n".join(lines)


def decide(
    rows: Sequence[SettingRow], *, step_ms: float | None = None, reason: str | None = None
) -> Advice:
    """The advice that rows of one tree give, of which bf16 psum's is the first.

    ``step_ms`` is a training step with bf16 psum; ``reason`` says why there are no settings.
    """
    native, *ours = rows
    if not ours:
        said = (f"Do not bother: everything would travel natively ({reason}).",)
        return Advice(row=native, sentences=said)
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
        return Advice(row=native, sentences=tuple(verdict))
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
        f"{_ms(native.time_us)} with bf16 psum ({_speedup(chosen, native)}).",
        *_step_sentences(step_ms, native, chosen),
        "Fewer bits cost training loss: docs/results.md has how much.",
    ]
    if chosen.warning is not None:
        sentences.append(f"No setting pays without this warning: {chosen.warning}.")
    if chosen.p90_us > native.p10_us:
        sentences.append(
            f"The spread is as large as the gain ({_ms(chosen.p10_us)} to {_ms(chosen.p90_us)}, "
            f"bf16 psum {_ms(native.p10_us)} to {_ms(native.p90_us)}): measure again on a quiet "
            "machine, with more --repeats."
        )
    return Advice(row=chosen, sentences=tuple(sentences))


def check(rows: Sequence[SettingRow]) -> str:
    """The sentence about rows of a CPU, whose times say nothing about GPUs; psum's is first."""
    native, *ours = rows
    least = min(ours, key=lambda row: row.wire_bytes)
    return (
        f"Checked, not measured: bf16 psum and {len(ours)} setting(s) ran. Times of CPU devices "
        "say nothing about GPUs, so no advice follows from them: run this where you train. By "
        f"bytes, {least.label} sends {least.wire_bytes / 1e6:,.4g} MB a step from each worker, "
        f"and bf16 psum {native.wire_bytes / 1e6:,.4g}."
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


def _speedup(row: SettingRow, native: SettingRow) -> str:
    return f"{native.time_us / row.time_us:.2f}x"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.4g} ms"
