"""Measurements of report.py: gradients, methods, and figures that are kept once they are known."""

import os

# The training of models shares the GPU with this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report_published as published
from accuracy import (
    BITS,
    LEAST_SQUARED_ERROR,
    OUR_ABLATION,
    PAPER,
    PAPERS_ABLATION,
    measure,
)
from report_published import Figures
from rich.console import Console

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import error
from dynamiq_jax.commands.bench.contenders import in_full
from dynamiq_jax.commands.bench.error import load_gradients, rate_distortion
from dynamiq_jax.commands.simulate import PUBLISHED, Case, study
from dynamiq_jax.commands.simulate.study import PUBLISHED_WORKERS
from dynamiq_jax.commands.synthetic import lognormal_mixture

ROOT = Path(__file__).resolve().parents[2]
N_WORKERS = 8

MODELS: Mapping[str, tuple[str, ...]] = {
    "tiny": ("--model", "tiny", "--init", "unit", "--batch-size", "2"),
    "tiny-8k": ("--model", "tiny", "--init", "unit", "--vocab-size", "8192", "--batch-size", "2"),
    "125m": ("--model", "125m", "--init", "unit", "--batch-size", "8"),
}
"""Options of train_llm.py; batch sizes are those of one of eight workers."""

SOURCE_NOTES = {
    "mixture": "the paper's log-normal mixture, 4096 super-groups, independent workers",
    "tiny": "1.1 M parameters, one token per byte",
    "tiny-8k": "4.1 M parameters, vocabulary of 8192 pieces",
    "125m": "123 M parameters, vocabulary of 24576 pieces",
}

Errors = Mapping[str, Mapping[str, Sequence[float]]]
"""vNMSE of every seed, by source and label."""


class Row(NamedTuple):
    """A method as a table shows it."""

    label: str
    method: Any
    topology: Any
    published: Figures = ()

    @property
    def family(self) -> str:
        """The method's name in the paper."""
        return self.label.split(",")[0]


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
        """The figure under ``key``; runs ``compute()`` and keeps its result where there is none."""
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
    """Figures of a gradient that decide how well it can be compressed."""
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


# --- Methods --------------------------------------------------------------------------------------


def method_rows() -> list[Row]:
    """All methods on a ring; THC and OmniReduce have native collectives of their own."""
    ring = dq.Ring(unroll_up_to=1)
    rows = [
        Row("DynamiQ, 5 bits", dq.DynamiQ(**LEAST_SQUARED_ERROR), ring),
        Row("DynamiQ, 5 bits, the library's default", dq.DynamiQ(), ring),
        Row("DynamiQ, 5 bits, the paper's configuration", dq.DynamiQ(**PAPER), ring),
        Row("DynamiQ, 5 bits, widths 1 to 10, super-groups of 128", _every_width(1), ring),
        Row("DynamiQ, 5 bits, the same from width 0 (biased)", _every_width(0), ring),
        Row("MXFP8, 8.25 bits", dq.comparators.MXFP8(), ring),
        Row("MXFP6, 6.25 bits", dq.comparators.MXFP6(), ring),
        Row("MXFP4, 4.25 bits", dq.comparators.MXFP4(), ring),
        Row("OmniReduce, 8 bits", dq.comparators.OmniReduce(density=(8 - 1 / 16) / 16), None),
        Row("THC, 4 bits up, 8 down", dq.comparators.THC(bits=4, form="two-shot"), None),
    ]
    return [row._replace(published=published.METHODS[row.family]) for row in rows]


def _every_width(narrowest: int) -> dq.DynamiQ:
    """The finest choice of widths: more branches in the kernels, twice the statistics."""
    widths = tuple(range(narrowest, 11))
    return dq.DynamiQ(
        widths=widths, floor=None, format=dq.Format(super_group_size=128, levels="piecewise")
    )


def bits_rows() -> list[Row]:
    """DynamiQ at several numbers of bits, in three configurations."""
    ring = dq.Ring(unroll_up_to=1)
    return [
        Row(f"{bits:g} bits{suffix}", dq.DynamiQ(bits=bits, **fields), ring, published.BITS[bits])
        for bits in BITS
        for suffix, fields in (
            ("", LEAST_SQUARED_ERROR),
            (", the library's default", {}),
            (", the paper's configuration", PAPER),
        )
    ]


def butterfly_rows() -> list[Row]:
    """Rows that the paper measures on a butterfly."""
    return [
        Row(row.label, row.method, dq.Butterfly(), published.BUTTERFLY[row.family])
        for row in method_rows()
        if row.family in published.BUTTERFLY and "width" not in row.label
    ]


def ablation_rows() -> list[Row]:
    """The paper's ingredients and ours, at 5 bits."""
    ring = dq.Ring(unroll_up_to=1)
    known = dict(zip(PAPERS_ABLATION, published.ABLATION, strict=True))
    return [
        Row(name, dq.DynamiQ(**fields), ring, (known[name],) if name in known else ())
        for name, fields in {**PAPERS_ABLATION, **OUR_ABLATION}.items()
    ]


class Simulation(NamedTuple):
    """A case of the study of thousands of workers."""

    topology: str
    label: str
    case: Case

    @property
    def published(self) -> float | None:
        """The paper's figure, where it has one for as many workers."""
        if self.case.n_workers != PUBLISHED_WORKERS:
            return None
        name = "dynamiq" if isinstance(self.case.method, dq.DynamiQ) else "mxfp8"
        return PUBLISHED[self.topology, name, self.case.bits]


def simulations(n_workers: int, super_groups: int) -> Iterator[Simulation]:
    """The study with our widths of least squared error, and with the paper's."""
    for topology in (dq.Ring(), dq.Butterfly()):
        methods: list[tuple[str, Any]] = [
            (
                f"DynamiQ, widths {','.join(map(str, widths))}",
                dq.DynamiQ(bits=bits, widths=widths, **LEAST_SQUARED_ERROR),
            )
            for widths in ((2, 4, 6, 8, 10, 12, 14), (2, 4, 8, 16))
            for bits in (5.0, 6.0, 8.5)
        ]
        methods.append(("MXFP8, shared scales", dq.comparators.MXFP8(sum="shared-scale")))
        for label, method in methods:
            case = Case(
                n_workers=n_workers, super_groups=super_groups, method=method, topology=topology
            )
            yield Simulation(type(topology).__name__.lower(), label, case)


# --- Figures --------------------------------------------------------------------------------------


def errors(
    note: Notebook, section: str, rows: Sequence[Row], inputs: Sequence[Source], seeds: int
) -> Errors:
    """vNMSE of all rows on all sources."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    for source in inputs:
        held: list[jax.Array] = []
        found[source.name] = {}
        for row in rows:

            def compute(row: Row = row, source: Source = source, held=held) -> list[float]:
                held.extend([] if held else source.load())
                each = 1 if len(held) > 1 else seeds
                return measure(row.method, row.topology, held, each)

            found[source.name][row.label] = note(_key(section, source, row), compute)
    return found


def worst_leaves(
    note: Notebook, section: str, rows: Sequence[Row], inputs: Sequence[Source], seeds: int
) -> Mapping[str, Mapping[str, tuple[str, Sequence[float]] | None]]:
    """By model and label, the worst leaf's name and its relative error of every seed.

    The same runs give the vNMSE of ``section``, and are kept for it.
    """
    found: dict[str, dict[str, Any]] = {}
    for source in inputs:
        if source.file is None:
            continue
        held: list[jax.Array] = []
        found[source.name] = {}
        for row in rows:

            def compute(row: Row = row, source: Source = source, held=held) -> Any:
                held.extend([] if held else source.load())
                assert source.file is not None
                names, sizes = error.load_leaves(source.file, held[0].shape[1]) or ((), ())
                request = dq.Compression(
                    row.method, topology=row.topology, min_leaf_size=1, min_bucket_size=1
                )
                reduce = partial(dq.psum, method=request)
                run = error.measure(reduce, held, seeds, sizes)
                note(_key(section, source, row), run.vnmse.tolist)
                worst = error.worst_leaf(run, sizes)
                return None if worst is None else [names[worst], run.leaves[:, worst].tolist()]

            key = _key(f"{section}, worst leaf", source, row)
            found[source.name][row.label] = note(key, compute)
    return found


def simulated(note: Notebook, simulation: Simulation, seeds: int) -> Sequence[float]:
    """Mean, least and largest vNMSE over seeds."""

    def compute() -> list[float]:
        found = study(simulation.case, range(seeds))
        return [found.vnmse, found.lowest, found.highest]

    name = f"{simulation.topology} | {simulation.label}"
    return note(f"simulation | {name} | {in_full(simulation.case)} | {seeds}", compute)


def _key(section: str, source: Source, row: Row) -> str:
    """The name of a kept figure: all it depends on."""
    return (
        f"{section} | {source.name} | {row.label} | {in_full(row.method)} {in_full(row.topology)}"
    )
