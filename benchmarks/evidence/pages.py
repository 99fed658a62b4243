r"""The tables of docs/comparison.md and pictures of the pages, from ``results``.

    python benchmarks/evidence/pages.py           # writes all of them (`make figures`)

Losses are rows of `training.py` and `long.py`, errors those of ``dynamiq-jax error --json``, times
those of ``dynamiq-jax bench all-reduce`` and of `step_time.py`. Nothing is measured here.

* ``docs/comparison.md`` gets tables between its markers. Each is of one setting, in groups of wire
  bits, and within a group by loss.
* ``docs/speedups.png`` has speed-ups by links.
* ``docs/long-training.png`` has losses and biases of long training, if ``results/long`` has rows.
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


# --- Speed-ups ------------------------------------------------------------------------------------


def speedups() -> Figure:
    """Bars for every row, one for each number of bits, and a line where psum stands."""
    data, colours = load("speedups.json"), {"5": "#6baed6", "4": "#2171b5", "3.5": "#08306b"}
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(colours)
    for place, bits in enumerate(colours):
        heights = [row["psum_us"] / row["bits_us"][bits] for row in data["rows"]]
        at = [number + (place - 1) * width for number in range(len(heights))]
        bars = axes.bar(
            at, heights, 0.92 * width, color=colours[bits], label=f"DynamiQ, {bits} bits"
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    names = [f"{row['links']}\n{row['size']}" for row in data["rows"]]
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("times as fast as bf16 psum")
    axes.set_ylim(0, 6.6)
    axes.set_title(f"{data['hardware'].split(' (')[0]}, {data['versions']}", fontsize=9)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


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


def long_training(folder: Path = LONG) -> Figure:
    """Losses against bf16's with the band of noise, and the growth of summed errors."""
    rows = long_rows(folder)
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    above, below = figure.subplots(2)
    base = {part["step"]: part["validation"] for part in rows["bf16"]["parts"]}

    def percent(row: Row) -> tuple[list[float], list[float]]:
        million, parts = row["settings"]["tokens"] / row["settings"]["steps"] / 1e6, row["parts"]
        differences = [100 * (part["validation"] / base[part["step"]] - 1) for part in parts]
        return [million * part["step"] for part in parts], differences

    tokens, noise = percent(rows[NOISE])
    band = np.maximum.accumulate(np.abs(noise))
    above.fill_between(tokens, -band, band, color="0.85", label="noise of bf16")
    for method, row in rows.items():
        if method not in ("bf16", NOISE):
            above.plot(*percent(row), label=method, linewidth=1)
        if "errors" in row["parts"][0] and method != NOISE:
            growth = {
                part["step"]: (part["errors"]["sum"] / part["errors"]["squares"]) ** 0.5
                for part in row["parts"]
            }
            below.loglog(*zip(*growth.items(), strict=True), label=method)
    above.set_ylim(-0.5, 0.5)
    above.set(xlabel="tokens, millions", ylabel="validation loss against bf16's, %")
    below.axhline(1, color="black", linewidth=0.8, linestyle="--")
    below.set(xlabel="steps", ylabel="|sum of errors| / its deviation")
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


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


def text() -> str:
    """The page, as it should be."""
    return filled(PAGE.read_text(), blocks())


if __name__ == "__main__":
    PAGE.write_text(text())
    speedups().savefig(DOCS / "speedups.png", dpi=160)
    if LONG.exists():
        long_training().savefig(DOCS / "long-training.png", dpi=160)
