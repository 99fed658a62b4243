r"""Losses of training with a quantised all-reduce, with paired seeds.

    python benchmarks/evidence/training.py --methods bf16-psum,dynamiq:5,mxfp8 --seeds 2  # CPU
    python benchmarks/evidence/training.py --models tiny,mid,125m --optimisers adamw,sgd,muon,lion \
        --topologies direct,ring,butterfly --seeds 16 --until 3000    # one GPU

Trains small language models (`training_model.MODELS`) with several simulated workers on one
device. The library's own `dq.pmean` averages their gradients. Start, tokens and key of the rounding
depend on (seed, step) alone, so that the runs of all methods are paired: every row is compared
seed by seed with the exact mean in f32, which always runs.

Methods are those of `dynamiq-jax error` (``f32`` and ``bf16`` sum uncompressed over the topology),
and

* ``bf16-psum``: `lax.pmean` of all gradients in bf16;
* ``dynamiq-piecewise:5``: floors as in the default, but the levels of least squared error;
* ``dynamiq-memory:3``: the default with error feedback over all hops;
* ``powersgd-memory``, ``arc-top-k-memory:4``, ``clt-k-memory:4``, ``sidco-memory:4``,
  ``topk-chunked-memory:4``: these with error feedback;
* ``dynamiq-axis:4``, ``dynamiq-dither-axis:4``: with ``scale_axis="auto"``;
* ``dynamiq-dither-axis-companded:4``, ``dynamiq-dither-axis-floor2:3``: the latter with other
  levels, and with floors of 2 bits in all stages;
* ``dynamiq-dither-companded:4``, ``dynamiq-dither-uniform:4``: as `dynamiq-dither`, with other
  levels.

Every finished row is kept in ``--json`` at once. Rows that the file has are not trained again, so
that an interrupted command goes on where it was. Several commands may share the file.
"""

import fcntl
import json
import math
import os
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from training_model import INITS, MODELS
from training_report import PLAIN_WIDTH, compared, plot, print_rows, write_table
from training_run import (
    EXACT,
    OPTIMISERS,
    Mean,
    Task,
    arguments,
    batches_of_seeds,
    exact_mean,
    has_muon,
    large_leaves,
    load_task,
    make_trainer,
    parse_means,
    run_seeds,
)

from dynamiq_jax.commands.bench import contenders

RATES = {
    ("adamw", "gpt2"): 1e-3, ("adamw", "unit"): 1e-3, ("adamw", "unit", "tiny"): 2e-3,
    ("adamw", "gpt2", "125m"): 6e-4, ("adamw", "unit", "125m"): 6e-4,
    ("sgd", "gpt2"): 0.3, ("sgd", "unit"): 0.3,
    ("muon", "gpt2"): 8e-3, ("muon", "unit"): 8e-3,
    ("lion", "gpt2"): 8e-4, ("lion", "unit"): 8e-4,
}  # fmt: skip
"""Peak learning rates by (optimiser, initialisation), or by those and the model."""

CURVE_WINDOW = 25
"""Steps that a point of the kept training curve averages."""
EARLY_STEPS = 50
"""Steps after the first quarter of the training, which "early" averages."""
CPU_SEEDS = 2
"""That one program trains by default on a CPU."""

LABEL = ("model", "init", "optimiser", "method", "topology")
"""Settings that name a row."""

Row = dict[str, Any]


# --- Figures --------------------------------------------------------------------------------------


def leaf_errors(errors: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """[S, leaves]: mean over steps of |error|^2 / |exact|^2, both given as [S, steps, leaves].

    A step in which a leaf's exact mean is zero has no relative error and counts as 0.
    """
    errors, norms = np.asarray(errors, np.float64), np.asarray(norms, np.float64)
    return np.divide(errors, norms, out=np.zeros_like(errors), where=norms != 0).mean(axis=1)


def figures(result: Mapping[str, np.ndarray], leaves: Sequence[str]) -> Row:
    """Figures of a row's runs, for every seed; see `training_run.make_trainer`."""
    losses = np.asarray(result["losses"], np.float64)
    steps = losses.shape[1]
    by_leaf = leaf_errors(result["errors"], result["norms"])
    whole = (np.sum(result[name], axis=2, keepdims=True) for name in ("errors", "norms"))
    windows = [losses[:, i : i + CURVE_WINDOW].mean(axis=1) for i in range(0, steps, CURVE_WINDOW)]
    found = {
        "validation_loss": result["validation"],
        "early_loss": losses[:, steps // 4 : steps // 4 + EARLY_STEPS].mean(axis=1),
        "training_loss": np.stack(windows, axis=1),
        "vnmse": leaf_errors(*whole)[:, 0],
        "worst_leaf": by_leaf.max(axis=1),
    }
    plain = {name: _plain(np.asarray(value, np.float64)) for name, value in found.items()}
    return plain | {"worst_leaf_name": leaves[int(np.argmax(by_leaf.mean(axis=0)))]}


def _plain(values: np.ndarray) -> Any:
    """Lists for JSON, which has no NaN and no infinity: `None` stands for both."""
    if values.ndim:
        return [_plain(value) for value in values]
    return float(values) if np.isfinite(values) else None


def difference(values: Sequence[float], exact: Sequence[float]) -> dict[str, float | None]:
    """Mean over seeds of the paired difference in %, and its standard error.

    One seed has no standard error. If a run diverged there is neither.
    """
    percent = 100 * (np.asarray(values, np.float64) / np.asarray(exact, np.float64) - 1)
    if not np.all(np.isfinite(percent)):
        return {"percent": None, "error": None}
    error = float(percent.std(ddof=1) / math.sqrt(percent.size)) if percent.size > 1 else None
    return {"percent": float(percent.mean()), "error": error}


def summarise(row: Row, exact: Row) -> Row:
    """Means over seeds, and the differences from ``exact``, the same runs with the exact mean."""
    means = {}
    for name in ("validation_loss", "vnmse", "worst_leaf"):
        mean = float(np.mean(np.asarray(row[name], np.float64)))
        means[name] = mean if math.isfinite(mean) else None
    return means | {
        "validation": difference(row["validation_loss"], exact["validation_loss"]),
        "early": difference(row["early_loss"], exact["early_loss"]),
    }


# --- The file of rows -----------------------------------------------------------------------------


class Record:
    """Finished rows in a file, with the commands and machines that they come from."""

    def __init__(self, file: Path, invocation: Mapping[str, str]):
        self.file, self.invocation = file, dict(invocation)
        self.invocations: list[Row] = []
        self.rows: list[Row] = []
        self._read()

    def _read(self) -> None:
        """Takes what the file has, which another command may have added to."""
        if self.file.exists():
            kept = json.loads(self.file.read_text())
            self.invocations, self.rows = kept["invocations"], kept["rows"]

    def find(self, settings: Row) -> Row | None:
        """The row with these settings."""
        return next((row for row in self.rows if row["settings"] == settings), None)

    def add(self, row: Row) -> None:
        """Keeps a row, in memory and on disk.

        A reader never sees half a file, and no row of another command is lost.
        """
        with open(f"{self.file}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            if self.find(row["settings"]) is not None:
                return  # another command was faster
            if self.invocation not in self.invocations:
                self.invocations.append(self.invocation)
            self.rows.append(row | {"invocation": self.invocations.index(self.invocation)})
            draft = self.file.with_name(self.file.name + ".part")
            draft.write_text(one_per_line(invocations=self.invocations, rows=self.rows))
            os.replace(draft, self.file)


def one_per_line(**lists: Sequence[Row]) -> str:
    """JSON of lists that a version control system can compare."""
    parts = (
        f'"{name}": [\n' + ",\n".join(map(json.dumps, values)) + "\n]"
        for name, values in lists.items()
    )
    return "{" + ", ".join(parts) + "}\n"


def environment() -> dict[str, str]:
    """Command line, hardware, versions and time."""
    packages = (f"{name} {version(name)}" for name in ("jax", "jaxlib", "optax"))
    return {
        "command": f"python benchmarks/evidence/training.py {shlex.join(sys.argv[1:])}".strip(),
        "device": jax.devices()[0].device_kind,
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *packages]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


# --- Rows -----------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A program that is compiled once, and the settings of the rows that it runs."""

    task: Task
    optimiser: str
    mean: Mean
    at_once: int
    """Seeds that it trains."""
    settings: list[Row]


class Compiled(NamedTuple):
    """A program that is ready to run."""

    run: Callable
    seconds: float


def learning_rate(optimiser: str, kind: str, model: str) -> float:
    """The peak for an optimiser, an initialisation and a model; see `RATES`."""
    return RATES.get((optimiser, kind, model), RATES[optimiser, kind])


def settings_of(
    task: Task, optimiser: str, kind: str, mean: Mean, seeds: int, rate: float | None
) -> Row:
    """All that the figures of a row depend on; rows to be compared differ in the mean alone."""
    rate = learning_rate(optimiser, kind, task.name) if rate is None else rate
    return {
        "model": task.name, "init": kind, "optimiser": optimiser,
        "learning_rate": rate, "workers": task.n_workers,
        "steps": task.steps, "seeds": seeds, "text": task.digest,
        "platform": jax.default_backend(), **_mean_settings(mean),
    }  # fmt: skip


def _mean_settings(mean: Mean) -> Row:
    return {"method": mean.method, "topology": mean.topology, "options": mean.options}


def ahead(builds: Sequence[Callable[[], Any]], threads: int) -> Iterator[Future]:
    """The functions' results, in their order; as many as there are threads work ahead."""
    pool, waiting = ThreadPoolExecutor(threads), deque[Future]()
    try:
        for build in builds:
            waiting.append(pool.submit(build))
            if len(waiting) > threads:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(cancel_futures=True)


def compile_program(program: Program) -> Compiled:
    """Compiles a program for the shapes of its rows."""
    task, first, start = program.task, program.settings[0], time.perf_counter()
    mean = program.mean
    trainer = make_trainer(task.shape, program.optimiser, mean, task.n_workers, task.steps)
    seeds = batches_of_seeds(first["seeds"], program.at_once)[0]
    run = trainer.lower(*arguments(task, first["init"], 0.0, seeds)).compile()
    return Compiled(run, time.perf_counter() - start)


def train_row(compiled: Compiled, program: Program, settings: Row, record: Record) -> Row:
    """Trains all seeds of a row and compares them with the exact row.

    Raises:
      LookupError: the record has no exact row.
    """
    task, exact = program.task, record.find(settings | _mean_settings(exact_mean()))
    if exact is None and settings["method"] != EXACT:
        raise LookupError("there is no exact row to compare with")
    start = time.perf_counter()
    kind, peak, seeds = (settings[name] for name in ("init", "learning_rate", "seeds"))
    result = run_seeds(compiled.run, task, kind, peak, seeds, program.at_once)
    row = {
        "settings": settings,
        "bits_per_coord": program.mean.bits_per_coord(task.gradients, task.n_workers),
        "seconds": round(time.perf_counter() - start, 3),
        "compile_seconds": round(compiled.seconds, 3),
        **figures(result, list(large_leaves(task.gradients))),
    }
    return row | {"summary": summarise(row, exact or row)}


def run_all(
    programs: Sequence[Program], record: Record, threads: int, deadline: float, console: Console
) -> bool:
    """Trains the programs' rows and records them; whether all of them are there then."""
    complete = True
    compiling = ahead([partial(compile_program, program) for program in programs], threads)
    for program, compiled in zip(programs, compiling, strict=True):
        for settings in program.settings:
            if time.perf_counter() > deadline:
                console.print("--until is over: the same command goes on from here")
                return False
            label = " ".join(settings[name] for name in LABEL)
            try:
                row = train_row(compiled.result(), program, settings, record)
            except (LookupError, jax.errors.JaxRuntimeError) as error:
                complete = False
                text = f"{label}: left out. {error}\nIf memory is short: --seeds-at-once"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
                continue
            record.add(row)
            took = f"{row['seconds']:.1f} s, compiled in {row['compile_seconds']:.1f} s"
            text = f"{label}: {compared(row, 'validation')} % ({took})"
            console.print(text, highlight=False, soft_wrap=True)
    return complete


# --- Command line ---------------------------------------------------------------------------------


def names(text: str, known: Sequence[str], option: str) -> list[str]:
    """The comma-separated names; refuses unknown ones."""
    found = contenders.parts(text)
    if unknown := [name for name in found if name not in known]:
        raise typer.BadParameter(f"{option} {unknown[0]!r}: pass some of {', '.join(known)}")
    return found


def in_a_folder(path: Path | None) -> Path | None:
    """Refuses early what could not be written after minutes of training."""
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}: create it first")
    return path


def checked_means(
    methods: str, topologies: str, backend: str, tasks: Mapping[str, Any], workers: int
) -> list[Mean]:
    """The means that are asked for; refuses those that are unknown or cannot serve."""
    try:
        means = parse_means(contenders.parts(methods), contenders.parts(topologies), backend)
        for mean in means:
            for task in tasks.values():
                mean.bits_per_coord(task.gradients, workers)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--methods, --topologies") from error
    return means


def main(
    models: Annotated[str, typer.Option(help=f"some of {', '.join(MODELS)}")] = "tiny",
    methods: Annotated[
        str, typer.Option(help="bf16-psum, or a method with its wire bits per coordinate")
    ] = "bf16-psum,dynamiq:5,dynamiq:4,dynamiq-mse:5,mxfp8",
    topologies: Annotated[str, typer.Option(help="some of direct, ring, butterfly")] = "direct",
    inits: Annotated[str, typer.Option(help=f"some of {', '.join(INITS)}")] = ",".join(INITS),
    optimisers: Annotated[str, typer.Option(help=f"some of {', '.join(OPTIMISERS)}")] = "adamw",
    seeds: Annotated[int, typer.Option(min=1, help="training runs of every row")] = 4,
    steps: Annotated[int | None, typer.Option(min=2, help="default: the model's")] = None,
    workers: Annotated[int, typer.Option(min=2, help="simulated on one device")] = 8,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="peak (default: by optimiser and initialisation)")
    ] = None,
    backend: Annotated[str, typer.Option(help="DynamiQ's kernels: jnp, triton, interpret")] = "jnp",
    seeds_at_once: Annotated[
        int | None, typer.Option(min=1, help="in one program (default: the model's; on CPU 2)")
    ] = None,
    compile_threads: Annotated[
        int | None, typer.Option(min=1, help="compile ahead (default: 4; on CPU 1)")
    ] = None,
    until: Annotated[
        float, typer.Option(help="seconds from the start after which no row begins")
    ] = math.inf,
    json_file: Annotated[
        Path, typer.Option("--json", help="rows are kept here, and read from here")
    ] = Path("runs/training.json"),
    plot_file: Annotated[
        Path | None, typer.Option("--plot", callback=in_a_folder, help="draw all rows of --json")
    ] = None,
    table_file: Annotated[
        Path | None,
        typer.Option("--table", callback=in_a_folder, help="write all rows of --json as Markdown"),
    ] = None,
) -> None:
    """Trains models with compressed gradients and compares losses with those of exact ones."""
    deadline = time.perf_counter() + until
    chosen_models = names(models, tuple(MODELS), "--models")
    chosen_inits = names(inits, INITS, "--inits")
    chosen_optimisers = names(optimisers, OPTIMISERS, "--optimisers")
    if "muon" in chosen_optimisers and not has_muon():
        raise typer.BadParameter(
            f"--optimisers 'muon': optax {version('optax')} lacks it or its options; upgrade "
            "optax, or leave muon out"
        )
    tasks = {name: load_task(name, workers, steps) for name in chosen_models}
    means = checked_means(methods, topologies, backend, tasks, workers)
    json_file.parent.mkdir(parents=True, exist_ok=True)

    console, record = Console(stderr=True), Record(json_file, environment())
    wanted, programs, on_cpu = [], [], jax.default_backend() == "cpu"
    for task in tasks.values():
        for optimiser in chosen_optimisers:
            for mean in means:
                own = [
                    settings_of(task, optimiser, kind, mean, seeds, learning_rate)
                    for kind in chosen_inits
                ]
                wanted += own
                missing = [settings for settings in own if record.find(settings) is None]
                if missing:
                    at_once = seeds_at_once or (CPU_SEEDS if on_cpu else task.shape.seeds_at_once)
                    programs.append(Program(task, optimiser, mean, at_once, missing))
    threads = compile_threads or (1 if on_cpu else 4)
    complete = run_all(programs, record, threads, deadline, console)
    shown = Console() if Console().is_terminal else Console(width=PLAIN_WIDTH)
    print_rows([row for row in map(record.find, wanted) if row is not None], shown)
    if table_file:
        write_table(table_file, record.invocations, record.rows)
    if plot_file:
        plot(plot_file, record.rows)
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
