r"""Time to a loss: training curves per step, and step times per transport, put together.

    cd benchmarks/evidence
    python time_to_accuracy.py --step-times results/step_time.json \
        --losses results/time_to_accuracy_losses.json --model mid --step-model 1b

The loss after a step depends on the method, not on the links; the step's time on both. So curves
are measured once (`training.py`), times for every transport (`step_time.py`), and a method's time
to a loss is the steps that it takes there times its time per step on that transport.

The *target* is the training loss that bf16 psum ends with, its last window of steps, averaged over
seeds, and ``--tolerance`` percent more. Curves are averages over windows; between their middles
they count as straight. Where a method does not get to the target, "-" stands for its time. The
relative time is that of bf16 psum on the same transport. Methods have the same names in both files.
A method that differs from another in the order of coordinates alone has the other's step time where
it has none of its own, and the table says so.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from method_titles import colour, title
from rich.console import Console
from rich.table import Column, Table
from training import CURVE_WINDOW, difference
from training_run import BF16, EXACT

NONE = "none"
STAND_INS = {"dynamiq-dither-axis": "dynamiq-dither", "dynamiq-axis": "dynamiq"}
"""Whose step times serve for methods that differ in the order of coordinates alone."""

LINKS = {
    "p2p, NCCL": "NVLink", "shm": "host memory", "p2p, NCCL + socket": "sockets between two nodes",
}  # fmt: skip
"""Transports by their names in step_time.py, in plain words."""

Row = Mapping[str, Any]


class Curve(NamedTuple):
    """The losses of one method's training."""

    method: str
    topology: str
    losses: np.ndarray
    """[seeds, windows], nats per token."""
    validation: np.ndarray
    """[seeds], after the last step."""

    @property
    def middles(self) -> np.ndarray:
        """[windows]: the steps in the middle of each."""
        return CURVE_WINDOW * (np.arange(self.losses.shape[1]) + 0.5)


class Result(NamedTuple):
    """One method on one transport."""

    transport: str
    method: str
    timed_as: str
    step_ms: float
    exposed_ms: float
    step_relative: float
    """The step's time over that of bf16 psum's step."""
    steps: float | None
    """To the target; `None` where it is not reached."""
    seconds: float | None
    relative: float | None
    """The time to the target over bf16 psum's."""
    loss_percent: float | None
    """Difference of the validation loss from bf16 psum's after equal steps."""
    loss_error: float | None
    """Its standard error."""


def crossing(steps: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """The first step at which the curve is at the target or below; `None` if it never is."""
    below = np.flatnonzero(losses <= target)
    if not below.size:
        return None
    i = int(below[0])
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def read_curves(files: Sequence[Path], model: str, init: str, topology: str) -> dict[str, Curve]:
    """Curves by method, of AdamW and one length of training.

    Raises:
      ValueError: there is no curve of bf16 psum, or curves are of different trainings.
    """
    found: dict[str, Curve] = {}
    settings = set()
    for row in (row for file in files for row in _listed(file, "rows")):
        s = row["settings"]
        if (s["model"], s["init"], s["optimiser"]) != (model, init, "adamw"):
            continue
        if s["topology"] not in (topology, "native"):
            continue
        settings.add((s["steps"], s["seeds"], s["text"], s["learning_rate"], s["workers"]))
        losses, validation = (
            np.array(row[name], np.float64) for name in ("training_loss", "validation_loss")
        )
        found[s["method"]] = Curve(s["method"], s["topology"], losses, validation)
    if len(settings) > 1:
        raise ValueError(f"curves of different trainings: {sorted(settings)}; pass one file")
    if BF16 not in found and EXACT in found:
        found[BF16] = found[EXACT]  # within 0.01%: docs/training-quality.md
    if BF16 not in found:
        raise ValueError(f"no curve of {BF16} or {EXACT} for {model}, {init}, over {topology}")
    if not np.all(np.isfinite(found[BF16].losses)):
        raise ValueError(f"{BF16} diverged with {model}, {init}: there is no target")
    return found


def read_times(file: Path, model: str, topology: str) -> dict[str, dict[str, Row]]:
    """Rows of `step_time.py` by transport and method; later ones count.

    The transport is named by what carries native collectives.

    Raises:
      ValueError: a run is without bf16 psum, or steps over one transport differ in more than how
        gradients are averaged.
    """
    found: dict[str, dict[str, Row]] = {}
    kinds: dict[str, set] = {}
    for run in _listed(file, "runs"):
        own = [row for row in run["rows"] if row["model"] == model]
        own = [row for row in own if row["topology"] in (topology, "native")]
        rows = {row["method"].removeprefix("psum:"): row for row in own}
        if own and BF16 not in rows:
            raise ValueError(f"{file}: a run of {model} has no {BF16}; time it in every run")
        if not own:
            continue
        carrier = rows[BF16]["transport"]
        kind = run["options"] | {name: own[0][name] for name in ("tokens", "n_workers")}
        kinds.setdefault(carrier, set()).add(json.dumps(kind, sort_keys=True))
        found.setdefault(carrier, {}).update(rows)
    for carrier, different in kinds.items():
        if len(different) > 1:
            said = " and ".join(sorted(different))
            raise ValueError(f"{file}: steps over {carrier} differ in more than methods: {said}")
    if not found:
        raise ValueError(f"{file} has no step times of {model} with {BF16}")
    return found


def _listed(file: Path, name: str) -> list[Any]:
    """The list that the JSON object in a file has under a name.

    Raises:
      ValueError: the file is not there, is no JSON, or has no such list.
    """
    try:
        found = json.loads(file.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no file with {name!r}: {error}") from error
    return found


def combine(
    curves: Mapping[str, Curve], times: Mapping[str, Mapping[str, Row]], tolerance: float
) -> list[Result]:
    """All methods that have a curve and a step time, by transport and time to the target."""
    bf16 = curves[BF16]
    target = float(bf16.losses[:, -1].mean()) * (1 + tolerance / 100)
    results = []
    for carrier, rows in times.items():
        own = []
        for name, curve in curves.items():
            kind, _, bits = name.partition(":")
            stand_in = ":".join(filter(None, (STAND_INS.get(kind, kind), bits)))
            timed_as = name if name in rows else stand_in
            if timed_as not in rows:
                continue
            row = rows[timed_as]
            steps = crossing(curve.middles, curve.losses.mean(axis=0), target)
            apart = difference(curve.validation, bf16.validation)
            own.append(
                Result(
                    transport=LINKS.get(carrier, carrier),
                    method=name,
                    timed_as=timed_as,
                    step_ms=row["step_ms"],
                    exposed_ms=row["exposed_ms"],
                    step_relative=row["step_ms"] / rows[BF16]["step_ms"],
                    steps=steps,
                    seconds=None if steps is None else steps * row["step_ms"] / 1e3,
                    relative=None,
                    loss_percent=apart["percent"],
                    loss_error=apart["error"],
                )
            )
        alone = next(r.seconds for r in own if r.method == BF16)
        assert alone is not None  # the target is above bf16's own last window
        own = [r._replace(relative=r.seconds and r.seconds / alone) for r in own]
        results += sorted(own, key=lambda r: (r.seconds is None, r.seconds))
    return results


def plot(file: Path, curves: Mapping[str, Curve], results: Sequence[Result]) -> None:
    """Training loss against seconds, a panel for every transport."""
    from matplotlib.figure import Figure

    carriers = list(dict.fromkeys(r.transport for r in results))
    figure = Figure(figsize=(4 * len(carriers), 4), layout="constrained")
    panels = figure.subplots(1, len(carriers), squeeze=False)[0]
    for axes, carrier in zip(panels, carriers, strict=True):
        own = [r for r in results if r.transport == carrier]
        for r in sorted(own, key=lambda r: (-r.step_ms, r.timed_as != r.method)):
            dashes = "--" if r.timed_as != r.method else "-"  # over the curve of equal steps
            curve = curves[r.method]
            seconds = curve.middles * r.step_ms / 1e3
            loss = curve.losses.mean(axis=0)
            axes.plot(seconds[1:], loss[1:], dashes, color=colour(r.method), label=title(r.method))
        axes.set(title=carrier, xlabel="seconds", ylabel="training loss (nats/token)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=200)


def _loss(r: Result) -> str:
    if r.loss_percent is None:
        return "diverged"
    error = "" if r.loss_error is None else f" ± {r.loss_error:.2f}"
    return f"{r.loss_percent:+.2f}{error}"


def main(
    losses: Annotated[str, typer.Option(help="Files of training.py.")],
    step_times: Annotated[Path, typer.Option(exists=True, help="The file of step_time.py.")],
    model: Annotated[str, typer.Option(help="Whose curves.")] = "mid",
    init: Annotated[str, typer.Option(help="And their initialisation.")] = "unit",
    topology: Annotated[str, typer.Option(help="Over which methods averaged.")] = "direct",
    step_model: Annotated[str, typer.Option(help="Whose step times.")] = "1b",
    step_topology: Annotated[
        str | None, typer.Option(help="Over which steps averaged (default: the same).")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Above bf16's loss, %.")] = 0.1,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Loss against time.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="All rows.")] = None,
) -> None:
    """Prints a table for every transport."""
    try:
        curves = read_curves(list(map(Path, losses.split(","))), model, init, topology)
        times = read_times(step_times, step_model, step_topology or topology)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results = combine(curves, times, tolerance)
    console = Console(width=max(Console().width, 140))
    show = {
        "method": lambda r: r.method,
        "step time of": lambda r: r.timed_as,
        "step ms": lambda r: f"{r.step_ms:.1f}",
        "exposed ms": lambda r: f"{r.exposed_ms:.1f}",
        "less time per step": lambda r: f"{1 - r.step_relative:.1%}",
        "steps": lambda r: "-" if r.steps is None else f"{r.steps:.0f}",
        "seconds": lambda r: "-" if r.seconds is None else f"{r.seconds:.1f}",
        "less time to the loss": lambda r: "-" if r.relative is None else f"{1 - r.relative:.1%}",
        "loss against bf16, %": _loss,
    }
    for carrier in dict.fromkeys(r.transport for r in results):
        table = Table(*(Column(name, justify="right", no_wrap=True) for name in show))
        for r in (r for r in results if r.transport == carrier):
            table.add_row(*(cell(r) for cell in show.values()))
        console.print(f"loss of {model}, {init}; steps of {step_model} over {carrier}")
        console.print(table)
    if json_file:
        json_file.write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    if plot_file:
        plot(plot_file, curves, results)


if __name__ == "__main__":
    typer.run(main)
