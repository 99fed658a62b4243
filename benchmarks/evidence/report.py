"""The tables of the paper's evaluation from our own code: writes REPORT.md beside it.

    python benchmarks/evidence/report.py          # CPU: small models, a small simulation
    python benchmarks/evidence/report.py --models tiny,tiny-8k,125m --super-groups 32768  # a GPU

Trains the example's models with exact gradients for their dumps, measures vNMSE (squared error of
the sum over squared norm of the sum) of every method on all of them, and of every leaf of the
models by itself, and simulates n = 8192. Every finished figure is kept in ``--work``, so that an
interrupted run goes on where it was.

Here are the tables and the text. What is measured is in report_measure.py, what the paper measured
in report_published.py.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import report_measure as ours
import report_published as published
import typer
from report_measure import MODELS, Notebook, Row
from rich.console import Console
from training_report import markdown

from dynamiq_jax.commands.bench.error import MIN_LEAF_SIZE

PAPER_SUPER_GROUPS = 32768


def error_table(rows: Sequence[Row], found: ours.Errors) -> str:
    """vNMSE: a line for every row, a column for every source and one for the paper."""
    body = [
        [row.label, *(_spread(own[row.label]) for own in found.values()), _range(row.published)]
        for row in rows
    ]
    return markdown([["", *found, "paper"], *body])


def ratio_table(
    rows: Sequence[Row], found: ours.Errors, paper: Mapping[str, published.Figures]
) -> str:
    """Other methods' error over DynamiQ's, ours beside the paper's of each of its workloads.

    Of all methods over the first row of DynamiQ, and of MXFP8 over every one.
    """
    others = [row for row in rows if row.family != "DynamiQ"]
    bases = [row for row in rows if row.family == "DynamiQ"]
    pairs = [(row, bases[0]) for row in others]
    pairs += [(row, base) for base in bases[1:] for row in others if row.family == "MXFP8"]
    body = []
    for row, base in pairs:
        means = [(np.mean(own[row.label]), np.mean(own[base.label])) for own in found.values()]
        theirs = zip(paper[row.family], paper[base.family], strict=True)
        cells = [_ratio(a / b) for a, b in means]
        body.append([row.label, base.label, *cells, _range([a / b for a, b in theirs], _ratio)])
    return markdown([["error of", "over that of", *found, "paper"], *body])


def worst_leaf_table(rows: Sequence[Row], found: Mapping[str, Mapping[str, tuple | None]]) -> str:
    """The worst leaf's relative error and name: a column for every model."""

    def cell(worst: tuple | None) -> str:
        return f"{_spread(worst[1])}, {worst[0]}" if worst else "-"

    body = [[row.label, *(cell(own[row.label]) for own in found.values())] for row in rows]
    return markdown([["", *found], *body])


def simulation_table(found: Iterable[tuple[ours.Simulation, Sequence[float]]]) -> str:
    """vNMSE of thousands of workers, beside the paper's."""
    body = []
    for simulation, (vnmse, lowest, highest) in found:
        spread = f"{_figure(vnmse)} ({_figure(lowest)}–{_figure(highest)})"
        bits, paper = f"{simulation.case.bits:g}", simulation.published
        theirs = ["", ""] if paper is None else [_figure(paper), _figure(vnmse / paper)]
        body.append([simulation.topology, simulation.label, bits, spread, *theirs])
    return markdown([["topology", "method", "bits", "vNMSE", "paper", "ours / paper"], *body])


def source_table(described: Mapping[str, Mapping[str, float]]) -> str:
    """A table that describes the gradients."""
    body = [
        [name, ours.SOURCE_NOTES[name], f"{f['coordinates']:,}", f"{f['top']:.0%}",
         f"{f['agreement']:.2f}", _figure(f["bound"])]
        for name, f in described.items()
    ]  # fmt: skip
    return markdown([["", "what", "coordinates", "top 1%", "agreement", "bound at 5 bits"], *body])


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _range(values: Sequence[float], text=_figure) -> str:
    """The least and the largest; nothing of none."""
    return "–".join(text(v) for v in sorted({min(values), max(values)})) if values else ""


def _spread(values: Sequence[float]) -> str:
    mean, low, high = np.mean(values), min(values), max(values)
    if high <= low * 1.0005:
        return f"{mean:.3g}"
    return f"{mean:.3g} ({low:.3g}–{high:.3g})"


TEXT = """\
# The paper's tables, from our own code

Written by

    {command}

with figures measured on {environment}. vNMSE = |estimate − sum|² / |sum|² of one all-reduce; mean
of {seeds} seed(s) (lowest–highest; a single figure where all agree to three digits). Seeds draw the
rounding and, for the mixture, the data. Bits are those on the wire per coordinate, metadata
included, in units in which a bf16 all-reduce takes 16. Columns "paper" are the published figures
(arXiv 2602.08923), on the paper's own gradients.

## The gradients

{sources}

Top 1%: the share of the sum's energy in its largest hundredth of super-groups; the more, the more
variable widths can save. Agreement: |Σ x_i|² / Σ |x_i|², which is 1 for independent workers and n
for equal ones; the more, the less errors count. Bound: the rate–distortion limit at 5 bits for one
encoding of the sum, as Gaussian super-groups of known variance; no code of such a source can do
better. A ring encodes n growing partial sums, which for independent workers and rounding multiplies
the error of one encoding by (n + 1)/2.

## Methods (the paper's Table 3)

Ring, n = {n}. The paper's figures: range over {workloads}.

Methods that the paper does not compare are in `docs/comparison.md`, with
wire bits, state, error and loss.

{methods}

Ratios of these errors; the paper's: range over the same workloads.

{method_ratios}

The worst leaf: the one with the largest |estimate − sum|² / |sum|² of its own (mean of seeds),
among those of at least {min_leaf} coordinates, since `psum` sums smaller ones exactly
(docs/training-quality.md says why it counts).

{worst}

## Bits (the paper's Table 4)

Ring, n = {n}. The paper's figures: LLaMA-1B MMLU and Gemma-1B chat.

{bits}

## Butterfly (the paper's Table 5)

n = {n}. The paper's figures: LLaMA-1B MMLU.

{butterfly}

{butterfly_ratios}

## Ingredients (the paper's Table 6)

5 bits, ring, n = {n}. The paper's figures: LLaMA-1B chat.

{ablation}

## Thousands of workers (the paper's Table 7)

n = {sim_workers}, {sim_groups} super-groups per worker (the paper: 8192 and {paper_groups}), the
mixture.

{simulation}

## What differs from the paper's set-up

* **Gradients.** The paper fine-tunes models of 0.3 to 1.2 billion parameters. Ours are those of
  small models at step 60 of training from scratch. Errors of variable widths depend on how unequal
  super-groups are; rows of a vocabulary that a batch does not touch hold next to no energy, and a
  byte vocabulary has hardly any of them.
* **Three configurations.** "DynamiQ" is ours of least squared error, `DynamiQ(floor=None,
  format=Format(levels="piecewise"))`: even widths from 2 to 14 in place of 2, 4, 8, groups of 32,
  no means on the wire, antithetic rounding, two-step levels. "The library's default" has floors and
  companded levels, for the loss of training rather than for squared error
  (docs/training-quality.md). "The
  paper's configuration" is the published method with our allocation of widths (docs/algorithm.md).
* **MXFP8 sends 8.25 bits here** (a power-of-two scale per partial sum, as the OCP format has it),
  in the paper 8.5 (shared bf16 scales, 1/n of the range). The simulation shares scales, too, of
  powers of two.
* **MXFP6 and MXFP4** round to nearest even here, with scales of their own. The paper's emulation
  rounds partly towards zero and shares scales.
* **OmniReduce** keeps the blocks of most energy, in bf16. Error feedback is off here as there.
* **THC** is its table-quantised form here (4 bits up, 8 down, optimal table, clipping at 1/32). The
  paper's adaptation sums uniform levels hop by hop. Neither has error feedback.
* **Simulation.** One chunk stands for all, and workers keep one order (`dynamiq_jax/simulate`). The
  magnitudes of super-groups are the same on all workers. Width 16 is stochastically rounded bf16.
"""


def main(
    models: Annotated[
        str | None, typer.Option(help=f"some of {', '.join(MODELS)} (default: all; on CPU no 125m)")
    ] = None,
    super_groups: Annotated[
        int | None,
        typer.Option(min=1, help=f"of the simulation (default: {PAPER_SUPER_GROUPS}; on CPU 64)"),
    ] = None,
    workers: Annotated[int, typer.Option(min=2, help="of the simulation")] = 8192,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    work: Annotated[Path, typer.Option(help="gradients and figures are kept here")] = Path(
        "runs/report"
    ),
    out: Annotated[Path, typer.Option(dir_okay=False)] = Path(__file__).parent / "REPORT.md",
) -> None:
    """Measures what is not yet measured and writes the report."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    chosen = (models or ("tiny,tiny-8k" if on_cpu else ",".join(MODELS))).split(",")
    if unknown := [name for name in chosen if name not in MODELS]:
        raise typer.BadParameter(f"--models {unknown[0]!r}: pass some of {', '.join(MODELS)}")
    super_groups = super_groups or (64 if on_cpu else PAPER_SUPER_GROUPS)
    work.mkdir(parents=True, exist_ok=True)
    note = Notebook(work / "figures.json", Console(stderr=True))
    here = "a CPU" if on_cpu else f"one {device.device_kind}"
    here += f", JAX {jax.__version__}, Python {platform.python_version()}"
    environment = note("environment", lambda: here)
    if environment != here:
        raise typer.BadParameter(
            f"--work {work} holds figures of {environment}, this is {here}: pass another folder"
        )

    inputs = list(ours.sources(chosen, work, seeds))
    described = {
        s.name: note(f"about | {s.name}", lambda s=s: ours.describe(s.load()[0])) for s in inputs
    }
    sections = {
        "methods": ours.method_rows(),
        "bits": ours.bits_rows(),
        "butterfly": ours.butterfly_rows(),
        "ablation": ours.ablation_rows(),
    }
    worst = ours.worst_leaves(note, "methods", sections["methods"], inputs, seeds)
    found = {name: ours.errors(note, name, rows, inputs, seeds) for name, rows in sections.items()}
    tables = {name: error_table(rows, found[name]) for name, rows in sections.items()}
    cases = ours.simulations(workers, super_groups)
    text = TEXT.format(
        command=f"python benchmarks/evidence/report.py --models {','.join(chosen)} --seeds {seeds} "
        f"--workers {workers} --super-groups {super_groups}",
        environment=environment,
        seeds=seeds,
        n=ours.N_WORKERS,
        workloads=", ".join(published.WORKLOADS),
        sources=source_table(described),
        method_ratios=ratio_table(sections["methods"], found["methods"], published.METHODS),
        butterfly_ratios=ratio_table(
            sections["butterfly"], found["butterfly"], published.BUTTERFLY
        ),
        min_leaf=MIN_LEAF_SIZE,
        worst=worst_leaf_table(sections["methods"], worst),
        sim_workers=workers,
        sim_groups=super_groups,
        paper_groups=PAPER_SUPER_GROUPS,
        simulation=simulation_table((c, ours.simulated(note, c, seeds)) for c in cases),
        **tables,
    )
    out.write_text(text)
    note.console.print(f"wrote {out}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
