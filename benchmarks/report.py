"""The tables of the paper's evaluation from our own code: writes benchmarks/REPORT.md.

    python benchmarks/report.py                     # CPU: small models, a small simulation
    python benchmarks/report.py --models tiny,tiny-8k,125m --super-groups 32768      # on a GPU

Trains the example's models with exact gradients for their dumps, measures vNMSE (squared error of
the sum over squared norm of the sum) of every method on all of them, and of every leaf of the
models by itself, and simulates n = 8192.
Every finished figure is kept in ``--work``, so that an interrupted run goes on where it was.
"""

import os

# The training of models shares the GPU with this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from accuracy import (
    BITS,
    LEAST_SQUARED_ERROR,
    OUR_ABLATION,
    PAPER,
    PAPERS_ABLATION,
    measure,
)
from rich.console import Console

import dynamiq_jax as dq
from dynamiq_jax.bench import error
from dynamiq_jax.bench.error import load_gradients, rate_distortion
from dynamiq_jax.simulate import PUBLISHED, Case, MXComparator, study
from dynamiq_jax.synthetic import lognormal_mixture

ROOT = Path(__file__).resolve().parent.parent
N_WORKERS = 8
ASKED_RATIO = 2.4
"""How many times smaller than MXFP8's (8.25 bits) DynamiQ's error at 5 bits should be."""

MODELS: Mapping[str, tuple[str, ...]] = {
    "tiny": ("--model", "tiny", "--init", "unit", "--batch-size", "2"),
    "tiny-8k": ("--model", "tiny", "--init", "unit", "--vocab-size", "8192", "--batch-size", "2"),
    "125m": ("--model", "125m", "--init", "unit", "--batch-size", "8"),
}
"""Options of train_llm.py; batch sizes are those of one of eight workers."""

MODEL_NOTES = {
    "mixture": "the paper's log-normal mixture, 4096 super-groups, independent workers",
    "tiny": "1.1 M parameters, one token per byte",
    "tiny-8k": "4.1 M parameters, vocabulary of 8192 pieces",
    "125m": "123 M parameters, vocabulary of 24576 pieces",
}

# The paper's figures. Columns of its first table: BERT-large, LLaMA-1B chat, Gemma-1B chat,
# LLaMA-1B MMLU.
WORKLOADS = ("BERT-large", "LLaMA-1B chat", "Gemma-1B chat", "LLaMA-1B MMLU")
PAPER_ERRORS = {
    "DynamiQ": (0.00217, 0.00149, 0.00122, 0.00096),
    "MXFP8": (0.00591, 0.00320, 0.00308, 0.00299),
    "MXFP6": (0.0233, 0.0135, 0.0146, 0.0130),
    "MXFP4": (0.121, 0.111, 0.116, 0.0904),
    "OmniReduce": (0.155, 0.0804, 0.0468, 0.0453),
    "THC": (0.00897, 0.120, 0.152, 0.196),
}
PAPER_BITS = {3.0: (0.01603, 0.02334), 4.0: (0.00589, 0.00831), 5.0: (0.00096, 0.00122),
              6.0: (0.00059, 0.00053)}  # MMLU, Gemma  # fmt: skip
PAPER_BUTTERFLY = {"DynamiQ": 0.00067, "MXFP8": 0.00203, "MXFP6": 0.0201, "MXFP4": 0.171}
PAPER_ABLATION = dict(
    zip(PAPERS_ABLATION, (0.1278, 0.0707, 0.0198, 0.0138, 0.0091), strict=True)
)  # chat


class Row(NamedTuple):
    """A method as a table shows it."""

    label: str
    method: Any
    topology: Any
    published: str = ""


class Source(NamedTuple):
    """Gradients that errors are measured on."""

    name: str
    load: Callable[[], list[jax.Array]]
    """f32[n, d] for every seed, or one for all of them."""
    file: Path | None = None
    """Where a model's gradients are once they are loaded, with the leaves they consist of."""


class Notebook:
    """Figures by key, kept in a file as soon as they are known."""

    def __init__(self, file: Path, console: Console):
        self.file, self.console = file, console
        self.figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def __call__(self, key: str, compute: Callable[[], Any]) -> Any:
        """What is kept under ``key``, or else ``compute()``, from now on."""
        if key not in self.figures:
            self.console.print(" | ".join(key.split(" | ")[:3]), highlight=False)
            self.figures[key] = compute()
            self.file.write_text(json.dumps(self.figures, indent=1))
        return self.figures[key]


# --- Gradients ------------------------------------------------------------------------------------


def dump_gradients(name: str, file: Path) -> None:
    """Trains a model for 62 steps with exact gradients and saves those of step 60."""
    options = list(MODELS[name])
    per_worker = int(options.pop())
    on_cpu = jax.default_backend() == "cpu"  # where the example runs on N_WORKERS virtual devices
    per_device = per_worker * N_WORKERS // (N_WORKERS if on_cpu else len(jax.devices()))
    command = [
        sys.executable, str(ROOT / "examples" / "train_llm.py"), *options, str(per_device),
        "--method", "f32", "--steps", "62", "--dump-step", "60", "--measure-every", "1000",
        "--dump-workers", str(N_WORKERS), "--dump-gradients", str(file), "--out", str(file.parent),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def sources(models: Sequence[str], work: Path, seeds: int) -> Iterator[Source]:
    """The mixture and the models' gradients, trained when they are first needed."""
    keys = [jax.random.key(seed) for seed in range(seeds)]
    yield Source("mixture", lambda: [lognormal_mixture(k, N_WORKERS, 4096) for k in keys])
    for name in models:

        def load(name: str = name, file: Path = work / f"{name}.npz") -> list[jax.Array]:
            if not file.exists():
                dump_gradients(name, file)
            return [load_gradients(file, None)]

        yield Source(name, load, work / f"{name}.npz")


def describe(gradient: jax.Array) -> dict[str, float]:
    """What decides how well a gradient can be compressed."""
    total = jnp.sum(gradient, axis=0)
    rows = jnp.pad(total, (0, -total.size % 256)).reshape(-1, 256)
    energy = np.sort(np.asarray(jnp.sum(rows**2, axis=1), np.float64))[::-1]
    own = float(jnp.sum(gradient**2))
    return {
        "coordinates": gradient.shape[1],
        "top": float(energy[: max(len(energy) // 100, 1)].sum() / energy.sum()),
        "agreement": float(energy.sum()) / own,
        "bound": rate_distortion(gradient, [5.0])[0],
    }


# --- What is measured -----------------------------------------------------------------------------


def method_rows() -> list[Row]:
    """All methods on a ring; THC and OmniReduce have native collectives of their own."""
    ring = dq.Ring(unroll_up_to=1)
    rows = [
        Row("DynamiQ, 5 bits", dq.DynamiQ(**LEAST_SQUARED_ERROR), ring),
        Row("DynamiQ, 5 bits, the library's default", dq.DynamiQ(), ring),
        Row("DynamiQ, 5 bits, the paper's configuration", dq.DynamiQ(**PAPER), ring),
        Row("DynamiQ, 5 bits, widths 1 to 10, super-groups of 128", _every_width(1), ring),
        Row("DynamiQ, 5 bits, the same from width 0 (biased)", _every_width(0), ring),
        Row("MXFP8, 8.25 bits", dq.MXFP8(), ring),
        Row("MXFP6, 6.25 bits", dq.MXFP6(), ring),
        Row("MXFP4, 4.25 bits", dq.MXFP4(), ring),
        Row("OmniReduce, 8 bits", dq.OmniReduce(density=(8 - 1 / 16) / 16), None),
        Row("THC, 4 bits up, 8 down", dq.THC(bits=4, form="two-shot"), None),
    ]
    return [row._replace(published=_span(PAPER_ERRORS[_family(row.label)])) for row in rows]


def _every_width(narrowest: int) -> dq.DynamiQ:
    """The finest choice of widths: more branches in the kernels, twice the statistics."""
    widths = tuple(range(narrowest, 11))
    return dq.DynamiQ(widths=widths, super_group_size=128, **LEAST_SQUARED_ERROR)


def bits_rows() -> list[Row]:
    """DynamiQ at several numbers of bits, in three configurations."""
    ring = dq.Ring(unroll_up_to=1)
    return [
        Row(f"{bits:g} bits{suffix}", dq.DynamiQ(bits=bits, **fields), ring, _span(published))
        for bits, published in zip(BITS, PAPER_BITS.values(), strict=True)
        for suffix, fields in (
            ("", LEAST_SQUARED_ERROR),
            (", the library's default", {}),
            (", the paper's configuration", PAPER),
        )
    ]


def butterfly_rows() -> list[Row]:
    """What the paper measures on a butterfly."""
    return [
        Row(row.label, row.method, dq.Butterfly(), _figure(PAPER_BUTTERFLY[_family(row.label)]))
        for row in method_rows()
        if _family(row.label) in PAPER_BUTTERFLY and "width" not in row.label
    ]


def ablation_rows() -> list[Row]:
    """The paper's ingredients and ours, at 5 bits."""
    ring = dq.Ring(unroll_up_to=1)
    return [
        Row(name, dq.DynamiQ(**fields), ring, _figure(PAPER_ABLATION.get(name)))
        for name, fields in {**PAPERS_ABLATION, **OUR_ABLATION}.items()
    ]


def simulation_cases(n_workers: int, super_groups: int) -> Iterator[tuple[str, Case]]:
    """The study at n = 8192 and the widths it is done with."""
    for topology in (dq.Ring(), dq.Butterfly()):
        route = type(topology).__name__.lower()
        methods: list[tuple[str, Any]] = [
            (
                f"DynamiQ, widths {','.join(map(str, widths))}",
                dq.DynamiQ(bits=bits, widths=widths, **LEAST_SQUARED_ERROR),
            )
            for widths in ((2, 4, 6, 8, 10), (2, 4, 8, 16))
            for bits in (5.0, 6.0, 8.5)
        ]
        methods.append(("MXFP8, shared scales", MXComparator()))
        for label, method in methods:
            yield (
                f"{route} | {label}",
                Case(
                    n_workers=n_workers, super_groups=super_groups, method=method, topology=topology
                ),
            )


# --- Tables ---------------------------------------------------------------------------------------


def error_table(
    note: Notebook, section: str, rows: Sequence[Row], inputs: Sequence[Source], seeds: int,
    published: str,
) -> tuple[list[str], dict[str, dict[str, float]]]:  # fmt: skip
    """A table of vNMSE, a column for every source, and its means by (source, label)."""
    means: dict[str, dict[str, float]] = {}
    cells: dict[str, list[str]] = {row.label: [] for row in rows}
    for source in inputs:
        held: list[jax.Array] = []
        means[source.name] = {}
        for row in rows:

            def compute(row: Row = row, source: Source = source, held=held) -> list[float]:
                held.extend([] if held else source.load())
                each = 1 if len(held) > 1 else seeds
                return measure(row.method, row.topology, held, each)

            values = note(_key(section, source, row), compute)
            means[source.name][row.label] = float(np.mean(values))
            cells[row.label].append(_spread(values))
    head = ["", *(source.name for source in inputs), published]
    return _table(head, [[row.label, *cells[row.label], row.published] for row in rows]), means


def worst_leaf_table(
    note: Notebook, section: str, rows: Sequence[Row], inputs: Sequence[Source], seeds: int
) -> list[str]:
    """A table of the worst leaf's relative error and name, a column for every model.

    The same runs give the vNMSE of ``section``'s table, and are kept for it.
    """
    models = [(source, source.file) for source in inputs if source.file]
    cells: dict[str, list[str]] = {row.label: [] for row in rows}
    for source, file in models:
        held: list[jax.Array] = []
        for row in rows:

            def compute(row: Row = row, source: Source = source, file=file, held=held) -> Any:
                held.extend([] if held else source.load())
                names, sizes = error.load_leaves(file, held[0].shape[1]) or ((), ())
                method = dataclasses.replace(row.method, min_leaf_size=1, min_bucket_size=1)
                reduce = partial(dq.psum, method=method, topology=row.topology)
                found = error.measure(reduce, held, seeds, sizes)
                note(_key(section, source, row), found.vnmse.tolist)
                worst = error.worst_leaf(found, sizes)
                return None if worst is None else [names[worst], found.leaves[:, worst].tolist()]

            worst = note(_key(f"{section}, worst leaf", source, row), compute)
            cells[row.label].append(f"{_spread(worst[1])}, {worst[0]}" if worst else "-")
    head = ["", *(source.name for source, _ in models)]
    return _table(head, [[row.label, *cells[row.label]] for row in rows])


def simulation_table(note: Notebook, cases: Sequence[tuple[str, Case]], seeds: int) -> list[str]:
    """vNMSE at n = 8192."""
    body = []
    for name, case in cases:

        def compute(case: Case = case) -> list[float]:
            found = study(case, range(seeds))
            return [found.vnmse, found.lowest, found.highest]

        key = f"simulation | {name} | {case!r} | {seeds}"
        vnmse, lowest, highest = note(key, compute)[:3]
        route, label = name.split(" | ")
        ours = isinstance(case.method, dq.DynamiQ)
        published = PUBLISHED[route, "dynamiq" if ours else "mxfp8", case.method.bits]
        verdict = "" if not ours else "not above" if vnmse <= published else "**above**"
        spread = f"{_figure(vnmse)} ({_figure(lowest)}–{_figure(highest)})"
        bits = f"{case.method.bits:g}"
        body.append([route, label, bits, spread, _figure(published), verdict])
    head = ["topology", "method", "bits", "vNMSE", "paper", "ours"]
    return _table(head, body)


def verdicts(means: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Where the paper's order holds and by how much, source by source."""
    lines = []
    pairs = [
        (a, b)
        for a, better in PAPER_ERRORS.items()
        for b, worse in PAPER_ERRORS.items()
        if all(x < y for x, y in zip(better, worse, strict=True))
    ]
    for source, by_label in means.items():
        found = {_family(label): by_label[label] for label in reversed(list(by_label))}
        ratio = found["MXFP8"] / found["DynamiQ"]
        verdict = "reached" if ratio >= ASKED_RATIO else "missed"
        broken = [f"{a} > {b}" for a, b in pairs if found[a] >= found[b]]
        order = f"is broken: {', '.join(broken)}" if broken else "holds"
        lines.append(
            f"* **{source}**: MXFP8's error is {ratio:.2f} times DynamiQ's "
            f"(at least {ASKED_RATIO} asked: {verdict}). The order that all four of the paper's "
            f"workloads agree on {order}."
        )
    return lines


def _key(section: str, source: Source, row: Row) -> str:
    """The name of a kept figure: all it depends on."""
    return f"{section} | {source.name} | {row.label} | {row.method!r} {row.topology!r}"


def _family(label: str) -> str:
    return label.split(",")[0]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _span(values: Sequence[float]) -> str:
    return f"{_figure(min(values))}–{_figure(max(values))}"


def _spread(values: Sequence[float]) -> str:
    mean, low, high = np.mean(values), min(values), max(values)
    if high <= low * 1.0005:
        return f"{mean:.3g}"
    return f"{mean:.3g} ({low:.3g}–{high:.3g})"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


TEXT = """\
# The paper's tables, from our own code

Written by

    {command}

with figures measured on {environment}. vNMSE = |estimate − sum|² / |sum|² of one all-reduce; mean
of {seeds} seeds (lowest–highest; a single figure where all agree to three digits). Seeds draw the
rounding and, for the mixture, the data. Bits are those on the wire per coordinate, metadata
included, in units in which a bf16 all-reduce takes 16.

## The gradients

{sources}

Top 1%: the share of the sum's energy in its largest hundredth of super-groups; the more, the more
variable widths can save. Agreement: |Σ x_i|² / Σ |x_i|², which is 1 for independent workers and n
for equal ones; the more, the less errors count. Bound: the rate–distortion limit at 5 bits for one
encoding of the sum, as Gaussian super-groups of known variance; no code of such a source can do
better. A ring encodes n growing partial sums, which for independent workers and rounding multiplies
the error of one encoding by (n + 1)/2.

## Methods (the paper's Table 3)

Ring, n = {n}. The paper's figures: range over its four workloads.

{methods}

{verdicts}

The worst leaf: the one with the largest |estimate − sum|² / |sum|² of its own (mean of seeds),
among those of at least {min_leaf} coordinates, since `psum` sums smaller ones exactly. Its error
predicts the training loss better than vNMSE: Adam takes equal steps in all coordinates, so that a
leaf of little energy suffers from noise as much as one of much, and vNMSE hardly sees it.

{worst}

## Bits (the paper's Table 4)

Ring, n = {n}. The paper's figures: LLaMA-1B MMLU and Gemma-1B chat.

{bits}

## Butterfly (the paper's Table 5)

n = {n}. The paper's figures: LLaMA-1B MMLU.

{butterfly}

## Ingredients (the paper's Table 6)

5 bits, ring, n = {n}. The paper's figures: LLaMA-1B chat.

{ablation}

## Thousands of workers (the paper's Table 7)

n = {sim_workers}, {sim_groups} super-groups per worker, the mixture.{sim_note}

{simulation}

## Where ours differ, and why

* **Other gradients.** The paper fine-tunes models of 0.3 to 1.2 billion parameters; ours are small
  models early in training from scratch. What matters is how unequal super-groups are. Vocabulary
  rows that a batch does not touch are nearly free for DynamiQ and cost MX formats their full width,
  so the gap to MXFP8 grows with the share of such rows. A byte vocabulary has none: every
  super-group needs its five bits, and the 3.25 bits more of MXFP8 make up for most of the rest. The
  two rows of finer widths show how far five bits go there; they cost more time on a GPU.
* **Three configurations.** "DynamiQ" is ours of least squared error, `DynamiQ(floor=None,
  levels="piecewise")`: widths 2, 4, 6, 8, 10 in place of 2, 4, 8, groups of 32, no means on the
  wire, antithetic rounding, two-step levels. "The library's default" has floors and companded
  levels, for the loss of training rather than for squared error (docs/training-quality.md). "The
  paper's configuration" is the published method with our allocation of widths.
* **MXFP8 sends 8.25 bits here** (a power-of-two scale per partial sum, as the OCP format has it),
  in the paper 8.5 (shared bf16 scales, 1/n of the range). The simulation uses the paper's.
* **MXFP6 and MXFP4 round to nearest even here**; the paper's emulation rounds partly towards zero,
  shares scales, and loses more.
* **OmniReduce** keeps the blocks of most energy: on gradients whose energy is concentrated it loses
  little, on flat ones it drops what half of the blocks hold. Error feedback is off here as there.
* **THC** here is its own table-quantised form (4 bits up, 8 down, optimal table, clipping at 1/32);
  the paper's adaptation sums uniform levels hop by hop. Neither has error feedback here.
* **Simulation.** One chunk stands for all and workers keep one order (`dynamiq_jax/simulate`). With
  widths {{2, 4, 8, 16}} the widest is stochastically rounded bf16, which is little better than
  width 8 with scales; the paper's figure at 8.5 bits supposes less error of 16 bits. All other
  errors, MXFP8's included, are 4 to 40 times below the published ones: the published simulation
  must differ in the data (ours share their magnitudes among workers) or in the hops in a way that
  we could not find in the text.
"""


def main(
    models: Annotated[
        str | None, typer.Option(help=f"some of {', '.join(MODELS)} (default: all; on CPU no 125m)")
    ] = None,
    super_groups: Annotated[
        int | None, typer.Option(min=1, help="of the simulation (default: 32768; on CPU 64)")
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
    super_groups = super_groups or (64 if on_cpu else 32768)
    work.mkdir(parents=True, exist_ok=True)
    note = Notebook(work / "figures.json", Console(stderr=True))
    here = "a CPU" if on_cpu else f"one {device.device_kind}"
    here += f", JAX {jax.__version__}, Python {platform.python_version()}"
    environment = note("environment", lambda: here)
    if environment != here:
        raise typer.BadParameter(
            f"--work {work} holds figures of {environment}, this is {here}: pass another folder"
        )
    inputs = list(sources(chosen, work, seeds))

    about = [
        [s.name, MODEL_NOTES[s.name], note(f"about | {s.name}", lambda s=s: describe(s.load()[0]))]
        for s in inputs
    ]
    described = _table(
        ["", "what", "coordinates", "top 1%", "agreement", "bound at 5 bits"],
        [
            [name, what, f"{f['coordinates']:,}", f"{f['top']:.0%}", f"{f['agreement']:.2f}",
             _figure(f["bound"])]
            for name, what, f in about
        ],
    )  # fmt: skip
    worst = worst_leaf_table(note, "methods", method_rows(), inputs, seeds)
    tables, means = {}, {}
    for section, rows, published in (
        ("methods", method_rows(), "paper"),
        ("bits", bits_rows(), "paper"),
        ("butterfly", butterfly_rows(), "paper"),
        ("ablation", ablation_rows(), "paper"),
    ):
        tables[section], means[section] = error_table(note, section, rows, inputs, seeds, published)
    cases = list(simulation_cases(workers, super_groups))
    small = " A small stand-in for the paper's 32768." if super_groups < 32768 else ""
    out.write_text(
        TEXT.format(
            command=f"python benchmarks/report.py --models {','.join(chosen)} --seeds {seeds} "
            f"--workers {workers} --super-groups {super_groups}",
            environment=environment,
            seeds=seeds,
            n=N_WORKERS,
            sources="\n".join(described),
            methods="\n".join(tables["methods"]),
            verdicts="\n".join(verdicts(means["methods"])),
            min_leaf=error.MIN_LEAF_SIZE,
            worst="\n".join(worst),
            bits="\n".join(tables["bits"]),
            butterfly="\n".join(tables["butterfly"]),
            ablation="\n".join(tables["ablation"]),
            sim_workers=workers,
            sim_groups=super_groups,
            sim_note=small,
            simulation="\n".join(simulation_table(note, cases, seeds)),
        )
    )
    note.console.print(f"wrote {out}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
