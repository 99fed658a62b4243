r"""The tables of docs/comparison.md and pictures of the pages, from ``results``.

    python benchmarks/evidence/pages.py           # writes all of them (`make figures`)

Losses are rows of `training.py` and `long.py`, errors those of ``dynamiq-jax error --json``, times
those of ``dynamiq-jax bench all-reduce`` and of `step_time.py`. Nothing is measured here.

* ``docs/comparison.md`` gets tables between its markers. Each is of one setting, in groups of wire
  bits, and within a group by loss. ``docs/training-quality.md`` gets that of long training,
  ``docs/multihost.md`` and ``docs/performance.md`` get steps by way to train.
* ``docs/speedups.png`` has speed-ups of steps by links and way.
* ``docs/time-to-accuracy.png`` has losses against bf16's by step.
* ``docs/long-training.png`` has losses and biases of long training.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from training import BF16, CURVE_WINDOW, difference

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "comparison.md"
TRANSPORTS, STEPS = "comparison_transports.json", "step_time_pipeline.json"

TOLERANCE = 0.5
"""Above bf16's last training loss, %: the target of the times to a loss."""
Row = Mapping[str, Any]


@cache
def load(file: str) -> Any:
    """Reads a JSON file of ``results`` once."""
    return json.loads((RESULTS / file).read_text())


# --- Names ----------------------------------------------------------------------------------------

TITLES = {
    "bf16-psum": "bf16 psum",
    "dynamiq": "**DynamiQ**",
    "dynamiq-dither": "**DynamiQ**, dither",
    "dynamiq-axis": "**DynamiQ**, `scale_axis`",
    "dynamiq-dither-axis": "**DynamiQ**, dither, `scale_axis`",
    "mxfp8": "MXFP8",
    "mxfp6": "MXFP6",
    "mxfp4": "MXFP4",
    "mxfp4-stochastic": "MXFP4, random rounding",
    "mxfp4-ef14": "MXFP4, error feedback EF14",
    "mxfp4-ef21": "MXFP4, error feedback EF21",
    "thc": "THC",
    "omnireduce": "OmniReduce",
    "topk-chunked": "Chunked top-k, no memory",
    "topk-chunked-memory": "Chunked top-k",
    "minmax": "MinMax, random rounding (QSDP's)",
    "flash": "MinMax, to nearest (Flash Communication's)",
    "qsgd": "Global-QSGD",
    "marsit": "Marsit",
    "powersgd": "PowerSGD, rank 4, no memory",
    "powersgd-memory": "PowerSGD, rank 4",
    "arc-top-k": "ARC-Top-K, no memory",
    "arc-top-k-memory": "ARC-Top-K",
    "clt-k": "CLT-k, no memory",
    "clt-k-memory": "CLT-k",
    "sidco": "SIDCo, no memory",
    "sidco-memory": "SIDCo",
    "perm-k": "PermK",
}
"""Markdown, by names on the command line without bits."""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first line is its head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


# --- Steps by way to train ------------------------------------------------------------------------

WAYS = "ways.json"
"""Medians of a step, with 10th and 90th percentiles, in runs of one machine each."""
SHOWN = {"dp:5": "data parallel, 5 bits", "zero-pipeline:5/2.5": "sharded updates, 5 + 2.5 bits"}
SHOWN |= {"fsdp:5/8": "FSDP, 5 + 8 bits"}
"""The bars of the picture, by names of `ways.py`."""
COLOURS = "#9ecae1", "#08519c", "#d9842b"
STEPS_OF = {
    "none": "averages nothing",
    "bf16-psum": "bf16 psum",
    "bf16-zero": "bf16 ZeRO-1 by hand",
    "zero-pipeline:bf16/bf16": "sharded updates, bf16",
    "dp:5": SHOWN["dp:5"],
    "zero-pipeline:5/2.5": SHOWN["zero-pipeline:5/2.5"],
    "zero-pipeline:4d/2.5": "sharded updates, 4 bits with dither + 2.5",
    "xla-fsdp": "XLA's FSDP",
    "bf16-fsdp": "bf16 FSDP by `sequential`",
    "fsdp:5/8": SHOWN["fsdp:5/8"],
    "fsdp-keep:5/8": "FSDP, 5 + 8 bits, payloads kept",
}


def speedups() -> Figure:
    """Bars for every kind of links, one for each way to train, and a line where psum stands."""
    runs = load(WAYS)["runs"]
    links = list(dict.fromkeys(run["links"] for run in runs))
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SHOWN)
    for place, (way, colour) in enumerate(zip(SHOWN, COLOURS, strict=True)):
        timed = [run for run in runs if way in run["ms"]]
        heights = [run["ms"][BF16][0] / run["ms"][way][0] for run in timed]
        at = [links.index(run["links"]) + (place - 1) * width for run in timed]
        bars = axes.bar(at, heights, 0.92 * width, color=colour, label=SHOWN[way])
        label = {"fontsize": 8, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.4}}
        axes.bar_label(bars, fmt="%.2f", padding=1, **label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(links)), links)
    axes.set_ylabel("steps per second,\nover bf16 psum's")
    h200 = " and ".join(run["links"] for run in runs if "H200" in run["cards"])
    title = "A training step of 1.1 B parameters on two H100"
    axes.set_title(f"{title} (data parallel over {h200}: H200)", fontsize=9)
    axes.legend(frameon=False, loc="upper right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def milliseconds(found: Sequence[float]) -> str:
    """A median, and its percentiles if they are known, with as many digits as are kept."""
    median, *spread = map(str, found)
    return f"{median} ({'–'.join(spread)})" if spread else median


def steps_table(*links: str) -> str:
    """Milliseconds of all ways over some kinds of links, on H100s."""
    runs = [run for run in load(WAYS)["runs"] if "H100" in run["cards"]]
    columns = [next(run["ms"] for run in runs if run["links"] == name) for name in links]
    lines = [("", *links)]
    for way, title in STEPS_OF.items():
        if any(way in column for column in columns):
            cells = (milliseconds(column[way]) if way in column else "" for column in columns)
            lines.append((title, *cells))
    return markdown(lines)


# --- Long training --------------------------------------------------------------------------------

LONG = RESULTS / "long"
"""Rows of `long.py`, a file for each."""
NOISE = "bf16-reversed"
"""The run that differs from bf16's in the order of a sum alone."""


def long_rows(folder: Path) -> dict[str, Row]:
    """Rows by method; the method's name is followed by a number of workers that changed.

    Raises:
      ValueError: rows differ in more than the method.
    """
    found, alike = {}, set()
    for file in sorted(folder.glob("*.json")):
        row = json.loads(file.read_text())
        own = {k: v for k, v in row["settings"].items() if k not in ("topology", "options")}
        method, last = own.pop("method"), row["parts"][-1]["workers"]
        changed = last != row["parts"][0]["workers"]
        found[method + (f", then {last} workers" if changed else "")] = row
        alike.add(json.dumps(own))
    if len(alike) != 1:
        raise ValueError(f"{folder}: rows differ in more than the method: {alike}")
    return found


def apart(row: Row, base: Row, window: int) -> tuple[list[int], np.ndarray, list[int], np.ndarray]:
    """Steps and differences from ``base`` in %: of means of training losses, of validation."""
    n = len(row["losses"]) // window
    own, its = (
        np.reshape(r["losses"][: n * window], (n, window)).mean(axis=1) for r in (row, base)
    )
    validation = {part["step"]: part["validation"] for part in base["parts"]}
    parts = {
        part["step"]: 100 * (part["validation"] / validation[part["step"]] - 1)
        for part in row["parts"]
    }
    steps = [window * (i + 1) for i in range(n)]
    return steps, 100 * (own / its - 1), list(parts), np.array(list(parts.values()))


def growth(row: Row) -> dict[int, float]:
    """By steps: the size of the sum of all errors so far over that of independent ones."""
    errors = {part["step"]: part["errors"] for part in row["parts"] if "errors" in part}
    return {step: (e["sum"] / e["squares"]) ** 0.5 for step, e in errors.items()}


def long_training(folder: Path = LONG, window: int = 50) -> Figure:
    """Losses against bf16's, with the noise, and how errors add up."""
    rows = long_rows(folder)
    base = rows.pop("bf16")
    figure = Figure(figsize=(7.2, 8), layout="constrained")
    *losses, below = figure.subplots(3)
    million = base["settings"]["tokens"] / base["settings"]["steps"] / 1e6
    order = [NOISE, *(method for method in rows if method != NOISE)]
    colours = {method: f"C{i}" for i, method in enumerate(["bf16", *order])}
    for method in order:
        found = apart(rows[method], base, window)
        for axes, steps, percent in zip(losses, found[::2], found[1::2], strict=True):
            tokens = million * np.array(steps)
            if method == NOISE:
                most = np.maximum.accumulate(np.abs(percent))
                axes.fill_between(tokens, -most, most, color="0.85", label="noise of bf16")
            else:
                axes.plot(tokens, percent, label=method, linewidth=1, color=colours[method])
    for method, row in {"bf16": base, **rows}.items():
        if method != NOISE and (grown := growth(row)):
            below.semilogx(*zip(*grown.items(), strict=True), label=method, color=colours[method])
    for axes, name in zip(losses, ("training", "validation"), strict=True):
        axes.set(
            xlabel="tokens, millions", ylabel=f"{name} loss against bf16's, %", ylim=(-0.5, 0.5)
        )
    below.axhline(1, color="black", linewidth=0.8, linestyle="--")
    below.set(xlabel="steps", ylabel="sum of errors / its deviation")
    for axes in (*losses, below):
        axes.legend(frameon=False, fontsize=8, ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def long_table() -> str:
    """Losses against bf16's and errors of every long run."""
    rows = long_rows(LONG)
    base = rows["bf16"]
    heads = "tokens, M", "training loss, %", "validation, %", "errors, 300 steps", "errors, end"
    lines = [("method", *heads, "along the sum, %")]
    for method, row in rows.items():
        steps = len(row["losses"])
        _, training, _, validation = apart(row, base, steps // 5)
        cells = ["", ""] if row is base else [f"{x[-1]:+.2f}" for x in (training, validation)]
        grown, last = growth(row), row["parts"][-1].get("errors")
        cells += [f"{grown[step]:.2f}" if step in grown else "" for step in (300, steps)]
        cells.append(f"{100 * last['inner'] / last['exact']:+.2f}" if last else "")
        tokens = steps * base["settings"]["tokens"] / base["settings"]["steps"] / 1e6
        cells = [cell.replace("-", "−") for cell in cells]
        lines.append((f"`{method}`", f"{tokens:.0f}", *cells))
    return markdown(lines)


# --- Time to a loss -------------------------------------------------------------------------------


class Result(NamedTuple):
    """One method over one kind of links."""

    method: str
    steps: float | None
    """To the target; `None` where it is not reached."""
    relative: float | None
    """The time to the target over bf16 psum's."""


def crossing(losses: np.ndarray, target: float) -> float | None:
    """The first step at which the windows' losses are at the target or below, if they are."""
    below = np.flatnonzero(losses <= target)
    if not below.size:
        return None
    i = int(below[0])
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i]) if i else 1.0
    return CURVE_WINDOW * float(i - 0.5 + share)


def read_curves() -> dict[str, np.ndarray]:
    """Losses, [seeds, windows] in nats per token, by method, of one training."""
    rows = load(LOSSES["large"].file)["rows"]
    return {row["settings"]["method"]: np.array(row["training_loss"]) for row in rows}


COMPARED = ("dynamiq:5", "dynamiq-dither:3.5", "mxfp8", "mxfp4")
"""Methods of the picture of losses."""


def loss_differences() -> Figure:
    """Training losses against bf16 psum's by step, paired by seed, with standard errors."""
    curves = read_curves()
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for method in COMPARED:
        percent = 100 * (curves[method] / curves[BF16] - 1)
        error = percent.std(axis=0, ddof=1) / len(percent) ** 0.5
        steps = CURVE_WINDOW * (np.arange(percent.shape[1]) + 0.5)
        mean = percent.mean(axis=0)
        axes.plot(steps, mean, label=method)
        axes.fill_between(steps, mean - error, mean + error, alpha=0.25)
    axes.axhline(0, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="steps", ylabel="training loss\nagainst bf16 psum's, %", ylim=(-1.2, 1.2))
    axes.legend(frameon=False, fontsize=8, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# --- The comparison -------------------------------------------------------------------------------


class Losses(NamedTuple):
    """Rows of `training.py` that were trained alike, unit initialisation and AdamW, on a GPU."""

    file: str
    model: str
    steps: int


LOSSES: Mapping[str, Losses] = {
    "125m": Losses("training_125m.json", "125m", 200),
    "large": Losses("time_to_accuracy_losses.json", "mid", 800),
}
"""By the table's name."""
DEFAULTS = {"thc": "thc:4", "omnireduce": "omnireduce:8"}
"""Full names of methods that are named without bits."""

GROUPS = (
    (12.0, "not compressed"),
    (5.9, "6 to 8.5 bits"),
    (3.95, "4 to 5.3 bits"),
    (2.9, "3 to 3.8 bits"),
    (0.0, "below 3 bits"),
)
"""Least wire bits, and the group's name."""

PANEL = ("model", "init", "optimiser", "learning_rate", "workers", "steps", "seeds")
"""Settings that rows of one table have in common."""


def loss_rows(chosen: Losses) -> list[Row]:
    """Returns a table's rows, sorted."""
    found = []
    for row in load(chosen.file)["rows"]:
        s = row["settings"]
        own = s["model"], s["steps"], s["platform"], s["init"], s["optimiser"]
        known = s["method"].partition(":")[0] in TITLES and s["topology"] in ("direct", "native")
        if known and own == (chosen.model, chosen.steps, "gpu", "unit", "adamw"):
            found.append(row)
    settings = {tuple(row["settings"][name] for name in PANEL) for row in found}
    if len(settings) != 1:
        raise ValueError(f"{chosen}: rows of several settings in one table")

    def order(row: Row) -> tuple[int, float]:
        percent = row["summary"]["validation"]["percent"]
        return group(row), math.inf if percent is None else percent

    return sorted(found, key=order)


def group(row: Row) -> int:
    """The index in `GROUPS`."""
    return next(i for i, (least, _) in enumerate(GROUPS) if row["bits_per_coord"] >= least)


def by_method(run: Row) -> dict[str, Row]:
    """The rows of one run of all-reduces by the method's name, bf16 psum first."""
    psum, *others = run["rows"]
    return {BF16: psum} | {row["method"].split()[0]: row for row in others}


def step_alone() -> tuple[float, float]:
    """Milliseconds of a step of the 1.1 B model that averages nothing, and its gradients' bytes."""
    nvlink = (
        {row["method"]: row for row in run["rows"]}
        for run in load(STEPS)["runs"]
        if "NCCL_P2P_DISABLE" not in run["about"]["environment"]
    )
    (rows,) = (rows for rows in nvlink if {"none", BF16} <= rows.keys())
    n_workers = rows[BF16]["n_workers"]
    return rows["none"]["step_ms"], rows[BF16]["wire_bytes"] * n_workers / (2 * (n_workers - 1))


def times_to_loss() -> dict[str, dict[str, Result]]:
    """Results by links and method, of methods that have a curve and times of their own.

    Everything of the 1.1 B model's step is averaged after all else. The all-reduce of all gradients
    takes as many times longer than the measured one as it is larger.
    """
    alone, gradient_bytes = step_alone()
    curves = read_curves()
    target = float(curves[BF16][:, -1].mean()) * (1 + TOLERANCE / 100)
    found: dict[str, dict[str, Result]] = {}
    for run in load(TRANSPORTS)["runs"]:
        times = {
            method: alone + row["time_us"] / 1e3 * gradient_bytes / row["size_bytes"]
            for method, row in by_method(run).items()
        }
        steps = {
            method: crossing(curve.mean(axis=0), target)
            for method, curve in curves.items()
            if method in times
        }
        psum = steps[BF16]
        assert psum is not None  # the target is above bf16's own last window
        found[run["links"]] = {
            method: Result(method, n, n and n * times[method] / (psum * times[BF16]))
            for method, n in steps.items()
        }
    return found


def signed(percent: float, error: float) -> str:
    """A difference in % with its standard error, two digits of the latter."""
    digits = 2 if error < 0.995 else 1
    return f"{percent:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def loss_text(row: Row) -> str:
    """A row's difference to the exact mean in %."""
    found = row["summary"]["validation"]
    return "diverged" if found["percent"] is None else signed(**found)


def titled(method: str) -> str:
    """A method's title and its name on the command line."""
    return f"{TITLES[method.partition(':')[0]]}, `{method}`"


def error_text(method: str) -> str:
    """vNMSE of the method, or of what does the same to one flat leaf in its first step."""
    errors = {
        row["method"]: f"{row['vnmse']:#.2g}" for row in load("comparison_error.json")["rows"]
    }
    name, colon, bits = method.partition(":")
    plain = re.sub("-(memory|ef14|ef21)$", "", name).removesuffix("-axis")
    choices = (method, plain + colon + bits, DEFAULTS.get(plain, plain))
    return next((errors[choice] for choice in choices if choice in errors), "")


def time_text(method: str) -> str:
    """Speed-up over bf16 psum, by the columns of the file of times."""
    rows = load("comparison_times.json")["rows"]
    timed = [(row["psum_us"], row["us"].get(method)) for row in rows]
    if not any(us for _, us in timed):
        return ""
    return " / ".join(f"{psum / us:.2f}" if us else "–" for psum, us in timed)


def settings_text(chosen: Losses, rows: Sequence[Row]) -> str:
    """The commands, hardware and versions of a table."""
    settings = rows[0]["settings"]
    runs = load(chosen.file)["invocations"]
    machines = {f"{run['device']}; {run['versions']}" for run in runs}
    if len(machines) != 1:
        raise ValueError(f"{chosen}: rows of several machines in one table: {machines}")
    options = f"--models {chosen.model} --inits unit --topologies direct --steps {chosen.steps}"
    (machine,) = machines
    machine = machine.replace("; ", ", ").replace("cpu, ", "CPU, ").replace(" jax ", " JAX ")
    return (
        f"    python benchmarks/evidence/training.py {options} \\\n"
        f"        --seeds {settings['seeds']} --methods NAME\n\n"
        f"{settings['seeds']} seeds, {settings['workers']} workers; {machine}; all rows, in\n"
        f"`benchmarks/evidence/results`: `{chosen.file}`."
    )


def table(name: str) -> str:
    """A table of losses, under its command."""
    chosen = LOSSES[name]
    rows = loss_rows(chosen)
    timed = name == "large"
    lines = [["method, name", "wire bits", "vNMSE", "loss, difference in %"]]
    lines[0] += ["speed-up"] * timed
    for number in sorted({group(row) for row in rows}):
        lines.append([f"*{GROUPS[number][1]}*"])
        for row in (row for row in rows if group(row) == number):
            method = row["settings"]["method"]
            cells = [titled(method), f"{row['bits_per_coord']:.2f}"]
            cells += [error_text(method), loss_text(row)] + [time_text(method)] * timed
            lines.append(cells)
    return settings_text(chosen, rows) + "\n\n" + markdown(lines)


def time_to_loss_table() -> str:
    """Times to bf16 psum's loss over several transports, relative to its own, and their origin.

    By time over host memory; methods that do not get there stand last, by their last loss.
    """
    losses, found = read_curves(), times_to_loss()
    bits = {row["settings"]["method"]: row["bits_per_coord"] for row in loss_rows(LOSSES["large"])}
    last = {
        method: difference(curve[:, -1], losses[BF16][:, -1]) for method, curve in losses.items()
    }
    rows = found["host memory"]
    least = rows[BF16].steps
    assert least is not None  # the target is above bf16's own last window

    def order(result: Result) -> tuple[bool, float]:
        if result.relative is None:
            return True, last[result.method]["percent"]
        return False, result.relative

    lines = [("method, name", "wire bits", "last training loss, %", "steps", *found)]
    for result in sorted(rows.values(), key=order):
        method = result.method
        loss_cell = "" if method == BF16 else signed(**last[method])
        cells = [titled(method), f"{bits[method]:.2f}", loss_cell]
        if result.steps is None:
            cells += ["not reached"] + ["–"] * len(found)
        else:
            times = (own[method].relative for own in found.values())
            cells += [f"{result.steps / least:.2f}", *(f"{time:.2f}" for time in times)]
        lines.append(cells)
    about = load(TRANSPORTS)["runs"][0]["about"]
    alone, gradient_bytes = step_alone()
    return (
        "    python benchmarks/evidence/pages.py\n\n"
        f"Curves: `{LOSSES['large'].file}`; all-reduces: `{TRANSPORTS}`,\n"
        f"{about['n_devices']} × {about['device_kind']}, JAX {about['jax']}; "
        f"the rest of a step, {alone:.1f} ms, and gradients of\n"
        f"{gradient_bytes / 1e9:.2f} GB: `{STEPS}`.\n\n" + markdown(lines)
    )


def error_origin() -> str:
    """The command, hardware and versions of the errors."""
    found = load("comparison_error.json")
    row, about = found["rows"][0], found["about"]
    machine = f"{about['device_kind'].replace('cpu', 'CPU')}, JAX {about['jax']}"
    return (
        "    dynamiq-jax error --topology direct --methods NAME\n\n"
        f"{row['n_workers']} workers, mean of {row['seeds']} seeds; {machine}."
    )


def transport_table() -> str:
    """All-reduces of all methods over several transports, over bf16 psum, and their command."""
    runs = load(TRANSPORTS)["runs"]
    sizes = [f"{run['rows'][0]['size_bytes'] >> 20} MiB" for run in runs]
    found = [by_method(run) for run in runs]
    psum = [rows.pop(BF16) for rows in found]
    heads = [f"{run['links']}, {size}" for run, size in zip(runs, sizes, strict=True)]
    lines = [("method, name", *heads)]
    times = (f"{row['time_us'] / 1e3:.3g} ms" for row in psum)
    lines.append((f"bf16 psum, `{BF16}`", *times))
    for name in sorted(found[1], key=lambda name: -found[1][name]["speedup"]):
        lines.append((titled(name), *(f"{rows[name]['speedup']:.2f}" for rows in found)))
    about = runs[0]["about"]
    machine = f"{about['n_devices']} × {about['device_kind']}, NVLink multicast off"
    return (
        f"    {runs[0]['command'].partition('--methods')[0]}--methods NAME --sizes 256MiB\n\n"
        f"{machine}, JAX {about['jax']}; all rows and commands:\n"
        f"`benchmarks/evidence/results/{TRANSPORTS}`.\n\n" + markdown(lines)
    )


def blocks() -> dict[str, str]:
    """The texts between the page's markers, by the block's name."""
    about = load("comparison_times.json")
    times = f"{about['hardware']}, {about['versions']}."
    return {name: table(name) for name in LOSSES} | {
        "time-to-loss": time_to_loss_table(), "errors": error_origin(), "times": times,
        "transports": transport_table(),
    }  # fmt: skip


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with ``texts`` between its markers.

    Raises:
      ValueError: the page lacks a block, or has one that is not known.
    """
    pattern = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    names = [match[2] for match in pattern.finditer(page)]
    if sorted(names) != sorted(texts):
        raise ValueError(f"the page has the blocks {names}, and there are {list(texts)}")
    return pattern.sub(lambda match: f"{match[1]}\n{texts[match[2]]}\n\n{match[4]}", page)


def texts() -> dict[Path, str]:
    """The pages, as they should be."""
    quality = DOCS / "training-quality.md"
    found = {PAGE: blocks(), quality: {"long": long_table()}}
    found[DOCS / "multihost.md"] = {"steps": steps_table("10 Gb/s", "25 Gb/s", "37 Gb/s")}
    found[DOCS / "performance.md"] = {"steps": steps_table("NVLink", "host memory")}
    return {path: filled(path.read_text(), own) for path, own in found.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
    speedups().savefig(DOCS / "speedups.png", dpi=160)
    loss_differences().savefig(DOCS / "time-to-accuracy.png", dpi=120)
    long_training().savefig(DOCS / "long-training.png", dpi=120)
