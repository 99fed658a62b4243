"""The tables of docs/comparison.md and pictures of the pages, from ``results``.

    python benchmarks/evidence/pages.py           # writes all of them (`make figures`)

Losses are rows of `training.py`, errors those of ``dynamiq-jax error --json``, times those of
``dynamiq-jax bench all-reduce`` and of `step_time.py`. Nothing is measured here.

* ``docs/comparison.md`` gets tables between its markers. Each is of one setting, in groups of wire
  bits, and within a group by loss. ``docs/multihost.md`` and ``docs/performance.md`` get steps by
  way to train.
* ``docs/training-quality.md`` gets losses and top-1 by the number of workers, and accuracies beside
  bf16's. A table has the rows of all runs of its file, each run under a line of its own.
* ``docs/time-to-accuracy.md`` gets times to bf16's loss, and trainings against the clock.
* ``docs/speedups.png`` has speed-ups of steps by links and way. ``docs/time-to-accuracy.png`` has
  losses by seconds.
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
from training import BF16, CURVE_WINDOW, EXACT, difference, of_reference, paired

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = Path(__file__).resolve().parents[2] / "docs"
TRANSPORTS = "comparison_transports.json"
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
SHOWN |= {"fsdp-keep:5/8": "FSDP, 5 + 8 bits"}
"""The bars of the picture, by names of `ways.py`."""
WITHIN = ("NVLink", "2 × H200"), ("NVLink", "4 × H200")
WITHIN += ("host memory", "2 × H200"), ("host memory", "2 × H100")
"""Runs of one host."""
COLOURS = "#9ecae1", "#08519c", "#d9842b"
STEPS_OF = {
    "none": "no gradient exchange",
    "bf16-psum": "bf16 psum",
    "bf16-zero": "bf16 ZeRO-1 by hand",
    "zero-pipeline:bf16/bf16": "sharded updates, bf16",
    "dp:mxfp8": "MXFP8",
    "dp:mxfp4": "MXFP4",
    "dp:5": SHOWN["dp:5"],
    "dp:4": "data parallel, 4 bits",
    "zero-pipeline:5/2.5": SHOWN["zero-pipeline:5/2.5"],
    "zero-pipeline:4d/2.5": "sharded updates, 4 bits with dither + 2.5",
    "xla-fsdp": "XLA's FSDP",
    "bf16-fsdp": "bf16 FSDP",
    "fsdp:5/8": SHOWN["fsdp-keep:5/8"],
    "fsdp-keep:5/8": "FSDP, 5 + 8 bits, payloads kept",
    "fsdp-checkpoint:5/8": "FSDP, 5 + 8 bits, blocks checkpointed",
    "fsdp-keep-checkpoint:5/8": "payloads kept, blocks checkpointed",
}


def speedups() -> Figure:
    """Bars for every run with data parallel, one for each way, and a line where psum stands.

    FSDP is without kept payloads where the run has none.
    """
    runs = [run for run in load(WAYS)["runs"] if "dp:5" in run["ms"]]
    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SHOWN)
    for place, (way, colour) in enumerate(zip(SHOWN, COLOURS, strict=True)):
        bars = []
        for number, run in enumerate(runs):
            found = run["ms"].get(way) or run["ms"].get(way.replace("-keep", ""))
            if found:
                bars.append((number + (place - 1) * width, run["ms"][BF16][0] / found[0]))
        drawn = axes.bar(*zip(*bars, strict=True), 0.92 * width, color=colour, label=SHOWN[way])
        label = {"fontsize": 7, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.3}}
        axes.bar_label(drawn, fmt="%.2f", padding=1, **label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(runs)), [f"{r['links']}\n{r['cards']}" for r in runs], fontsize=7)
    axes.set_ylabel("steps per second,\nover bf16 psum's")
    axes.set_title("A training step of 1.1 B parameters", fontsize=9)
    axes.legend(frameon=False, loc="upper right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def milliseconds(found: Sequence[float]) -> str:
    """A median, and its percentiles if they are known, with as many digits as are kept."""
    median, *spread = map(str, found)
    return f"{median} ({'–'.join(spread)})" if spread else median


def steps_table(*columns: tuple[str, str]) -> str:
    """Milliseconds of all ways in some runs, which are named by their links and cards."""
    runs = {(run["links"], run["cards"]): run["ms"] for run in load(WAYS)["runs"]}
    columns_ms = [runs[column] for column in columns]
    cards = {card for _, card in columns}
    titles = [links if len(cards) == 1 else f"{links}, {card}" for links, card in columns]
    lines = [("", *titles)]
    for way, title in STEPS_OF.items():
        if any(way in column for column in columns_ms):
            cells = (milliseconds(column[way]) if way in column else "" for column in columns_ms)
            lines.append((title, *cells))
    return markdown(lines)


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

PANEL = ("learning_rate", "workers", "seeds")
"""Further settings that rows of one table have in common."""


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


def loss_text(row: Row) -> str:
    """A row's difference to the exact mean in %, with two digits of its standard error."""
    return with_error(*(row["summary"]["validation"][name] for name in ("percent", "error")))


def with_error(value: float | None, error: float | None) -> str:
    """A signed difference with two digits of its standard error; one seed has none."""
    if value is None:
        return "diverged"
    digits = 2 if error is None or error < 0.995 else 1
    shown = "" if error is None else f" ± {error:.{digits}f}"
    return f"{value:+.{digits}f}{shown}".replace("-", "−")


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


def table(name: str) -> str:
    """A table of losses."""
    chosen = LOSSES[name]
    timed = name == "large"
    rows = loss_rows(chosen)
    machines = {(run["device"], run["versions"]) for run in load(chosen.file)["invocations"]}
    if len(machines) != 1:
        raise ValueError(f"{chosen}: rows of several machines in one table: {machines}")
    lines = [["method, name", "wire bits", "vNMSE", "loss, difference in %"]]
    lines[0] += ["speed-up"] * timed
    for number in sorted({group(row) for row in rows}):
        lines.append([f"*{GROUPS[number][1]}*"])
        for row in (row for row in rows if group(row) == number):
            method = row["settings"]["method"]
            cells = [titled(method), f"{row['bits_per_coord']:.2f}"]
            cells += [error_text(method), loss_text(row)] + [time_text(method)] * timed
            lines.append(cells)
    return markdown(lines)


# --- Time to bf16's loss --------------------------------------------------------------------------

LOSSES_OF = {
    BF16: BF16,
    "bf16-zero": BF16,
    "bf16-fsdp": BF16,
    "dp:mxfp8": "mxfp8",
    "dp:mxfp4": "mxfp4",
    "dp:5": "dynamiq:5",
    "dp:4": "dynamiq:4",
    "zero-pipeline:5/2.5": "dynamiq:5/dynamiq-dither:2.5",
    "zero-pipeline:4d/2.5": "dynamiq-dither:4/dynamiq-dither:2.5",
    "fsdp:5/8": "dynamiq:5/dynamiq:8/whole",
    "fsdp-keep:5/8": "dynamiq:5/dynamiq:8/whole",
}
"""Methods of `training.py` by ways of `ways.py`. Three ways take the mean of bf16 gradients."""
LONG = {BF16: "bf16", "mxfp8": "mxfp8", "dynamiq:5": "dynamiq-5"}
LONG |= {"dynamiq:5/dynamiq-dither:2.5": "dynamiq-5-dynamiq-dither-2.5"}
LONG |= {"dynamiq:5/dynamiq:8/whole": "dynamiq-5-dynamiq-8-whole"}
"""Files of ``long`` by methods."""
TIMED = ("25 Gb/s", "2 × H200"), ("25 Gb/s", "2 × H100"), ("25 Gb/s", "2 hosts × 2 H200")
TIMED += ("host memory", "2 × H200"), ("NVLink", "4 × H200"), ("NVLink", "2 × H200")


def less(share: float) -> str:
    """How much less than one a share is; nothing for one itself, and for NaN: not measured."""
    if math.isinf(share):
        return "not reached"
    differs = share != 1 and not math.isnan(share)
    return f"{round(100 * (1 - share))}%".replace("-", "−") if differs else ""


def steps_to_loss(curves: Mapping[str, np.ndarray], window: int) -> dict[str, float]:
    """Steps until a mean over ``window`` steps is 0.5% above bf16's last one, by method.

    ``curves`` are such means. Between the middles of two windows the loss is a straight line.
    A method that does not get there has an infinite number.
    """
    target, found = 1.005 * curves[BF16][-1], {}
    for method, curve in curves.items():
        i = int(np.argmax(curve <= target))
        share = (curve[i - 1] - target) / (curve[i - 1] - curve[i])
        found[method] = window * (i - 0.5 + share) if i else math.inf
    return found


def time_to_loss_table() -> str:
    """Steps to bf16's loss, and how much less time than bf16 psum they take, by links and cards.

    A method's steps are those of the training that is worse for it, relative to bf16's.
    """
    files = (Losses(file, "125m", 200) for file in ("training_125m.json", "sharded.json"))
    rows = [row for file in files for row in loss_rows(file)]
    short = {row["settings"]["method"]: np.mean(row["training_loss"], axis=0) for row in rows}
    losses = {method: load(f"long/{file}.json")["losses"] for method, file in LONG.items()}
    long = {method: np.reshape(own, (-1, 100)).mean(axis=1) for method, own in losses.items()}
    counts = steps_to_loss(short, CURVE_WINDOW), steps_to_loss(long, 100)
    times = {(run["links"], run["cards"]): dict(run["ms"]) for run in load(WAYS)["runs"]}
    lines = [("", "steps, of 200", "of 2,300", *map(", ".join, TIMED))]
    for way, method in LOSSES_OF.items():
        ratio = max(steps[method] / steps[BF16] for steps in counts if method in steps)
        shares = [times[run].get(way, [math.nan])[0] / times[run][BF16][0] for run in TIMED]
        cells = [f"{steps[method]:,.0f}" if method in steps else "" for steps in counts]
        cells += [less(ratio * share) for share in shares]
        lines.append([STEPS_OF[way], *cells])
    return markdown(lines)


STEP_ALONE = "step_time_pipeline.json"
"""Its first run has a step without gradient exchange and bf16 psum, on two GPUs."""


def estimates_table() -> str:
    """Steps to bf16's loss of all methods, and estimates of their time over several links.

    A step is one without gradient exchange, followed by the all-reduce of all gradients. This one
    takes as many times longer than the one that was measured as it has more bytes. Methods are
    sorted by their time over host memory, and those that miss the loss by their last one.
    """
    rows = {row["settings"]["method"]: row for row in loss_rows(LOSSES["large"])}
    curves = {method: np.array(row["training_loss"]) for method, row in rows.items()}
    means = {method: curve.mean(axis=0) for method, curve in curves.items()}
    steps, last = steps_to_loss(means, CURVE_WINDOW), {m: c[:, -1] for m, c in curves.items()}
    alone, psum = load(STEP_ALONE)["runs"][0]["rows"][:2]
    times = {
        run["links"]: {
            method: alone["step_ms"] + row["time_us"] / 1e3 * psum["wire_bytes"] / row["size_bytes"]
            for method, row in by_method(run).items()
        }
        for run in load(TRANSPORTS)["runs"]
    }
    lines = []
    for method in curves.keys() & times["host memory"].keys():
        loss = difference(last[method], last[BF16])
        ratio = steps[method] / steps[BF16]
        shares = [ratio * own[method] / own[BF16] for own in times.values()]
        reached = not math.isinf(ratio)
        cells = [f"{ratio:.2f}", *(f"{share:.2f}" for share in shares)] if reached else []
        order = (shares[[*times].index("host memory")], loss["percent"])
        shown = "" if method == BF16 else with_error(*loss.values())
        bits = f"{rows[method]['bits_per_coord']:.2f}"
        cells = cells or ["not reached", *("–" for _ in shares)]
        lines.append((order, (titled(method), bits, shown, *cells)))
    head = ("method, name", "wire bits", "last training loss, %", "steps", *times)
    return markdown([head, *(line for _, line in sorted(lines))])


CLOCK, TOPOLOGIES = "against_the_clock.json", "topologies.json"


def clock_table() -> str:
    """Trainings of `against_the_clock.py`: seconds for all steps and to the target."""
    lines = [("run, target", "way", *CLOCKED)]
    for run in load(CLOCK)["runs"]:
        options, first = run["options"], run["rows"][0]
        title = f"{options['title']}: {options['target']:.3f}"
        for row in run["rows"]:
            cells = [title * (row is first), f"`{row['method']}`"]
            lines.append([*cells, *clocked(run, row, first)])
    return markdown(lines)


def topologies_table() -> str:
    """Trainings over several topologies: seconds for all steps and to the first run's target."""
    lines = [("way", "topology", "links", *CLOCKED)]
    runs = load(TOPOLOGIES)["runs"]
    (bf16,) = runs[0]["rows"]
    for run in runs:
        options, (row,) = run["options"], run["rows"]
        topology = "native" if row is bf16 else options["topology"]
        cells = [STEPS_OF[row["method"]], topology, options["title"].rpartition(", ")[2]]
        lines.append([*cells, *clocked(run, row, bf16)])
    return markdown(lines)


CLOCKED = "all steps, s", "to the target, s", "less", "last loss"


def clocked(run: Row, row: Row, first: Row) -> list[str]:
    """The cells of a training by the clock; "less" compares with the row ``first``."""
    end = row["target_seconds"]
    return [
        f"{row['seconds'][-1]:.1f}",
        f"{end:.1f}" if end else "",
        less((end or math.inf) / first["target_seconds"]),
        f"{np.mean(row['losses'][-run['options']['window'] :]):.3f}",
    ]


CURVES = STEPS_OF | {
    "dynamiq:5": SHOWN["dp:5"],
    "dynamiq-dither:3.5": "data parallel, 3.5 bits with dither",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "dynamiq:5/dynamiq-dither:2.5": SHOWN["zero-pipeline:5/2.5"],
    "dynamiq:5/dynamiq:8/whole": SHOWN["fsdp-keep:5/8"],
}
"""Names of curves, by those of `ways.py` and of methods."""


def clock() -> Figure:
    """Losses by seconds of all runs of `CLOCK`, each a mean over the run's window of steps."""
    runs = load(CLOCK)["runs"]
    figure = Figure(figsize=(7.6, 2.9 * ((len(runs) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(runs) + 1) // 2, min(len(runs), 2), squeeze=False).flat
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    for axes, run in zip(panels, runs, strict=False):
        window = run["options"]["window"]
        for row in run["rows"]:
            means = np.convolve(row["losses"], np.full(window, 1 / window), "valid")
            label = CURVES[row["method"]]
            axes.plot(row["seconds"][window - 1 :], means, label=label, linewidth=1)
        axes.axhline(run["options"]["target"], color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="seconds", ylabel="training loss")
        axes.set_title(run["options"]["title"].replace(" worker, ", " worker,\n"), fontsize=7)
        axes.legend(frameon=False, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# --- Long training --------------------------------------------------------------------------------


def long_training() -> Figure:
    """Losses against bf16's by tokens, and sizes of the sums of errors by steps, of 150 M tokens.

    The band is the noise: the largest difference so far between two orders of summation in bf16.
    """
    files = sorted((RESULTS / "long").glob("*.json"))
    runs = {file.stem: load(f"long/{file.name}") for file in files}
    bf16, reverse = runs.pop("bf16"), runs.pop("bf16-reversed")
    figure = Figure(figsize=(6.4, 8), layout="constrained")
    training, validation, errors = figure.subplots(3, 1)

    def losses(run: Row) -> tuple[np.ndarray, np.ndarray]:
        """The training loss of each part, a mean over its steps, and the validation loss."""
        steps = np.array(run["losses"]).reshape(len(run["parts"]), -1)
        return steps.mean(1), np.array([part["validation"] for part in run["parts"]])

    def against(run: Row) -> list[np.ndarray]:
        """Both losses' differences to bf16's, in %."""
        return [100 * (x / y[: len(x)] - 1) for x, y in zip(losses(run), losses(bf16), strict=True)]

    def add_errors(run: Row, colour: str) -> None:
        """Draws the size of the sum of errors so far over that of independent errors."""
        summed = [(part["step"], part["errors"]) for part in run["parts"] if part.get("errors")]
        sizes = [math.sqrt(own["sum"] / own["squares"]) for _, own in summed]
        errors.plot([step for step, _ in summed], sizes, color=colour, linewidth=1)

    settings = bf16["settings"]
    each = settings["tokens"] / settings["steps"] * settings["every"] / 1e6  # M tokens of a part
    tokens = each * np.arange(1, 1 + len(bf16["parts"]))
    for axes, apart in zip((training, validation), against(reverse), strict=True):
        band = np.maximum.accumulate(np.abs(apart))
        axes.fill_between(tokens, -band, band, color="0.85", label="noise of bf16")
        axes.set(ylim=(-0.5, 0.5), xlabel="tokens, millions")
    for number, (name, run) in enumerate(runs.items(), 1):
        label = CURVES[run["settings"]["method"]]
        label += ", then 4 workers" if name.endswith("4-workers") else ""
        colour = f"C{number}"
        for axes, apart in zip((training, validation), against(run), strict=True):
            axes.plot(tokens[: len(apart)], apart, color=colour, label=label, linewidth=1)
        add_errors(run, colour)
    add_errors(bf16, "black")
    training.set_ylabel("training loss,\n% from bf16's")
    validation.set_ylabel("validation loss,\n% from bf16's")
    errors.axhline(1, color="black", linewidth=0.8, linestyle="--")
    errors.set(xlabel="steps (black: bf16)", ylabel="sum of errors / its deviation", xscale="log")
    for axes in (training, validation, errors):
        axes.spines[["top", "right"]].set_visible(False)
    drawn = training.get_legend_handles_labels()
    figure.legend(*drawn, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


# --- Numbers of workers, and accuracies -----------------------------------------------------------

WORKERS, TOP_1 = "workers.json", "top1.json"
"""Rows of `training.py`."""
DIGITS, FINETUNED = "classifier.json", "finetuned.json"
"""The rows of `classifier.py` and `finetuned.py`."""
SIZES = {"micro": "0.1 M", "tiny": "1.1 M", "mid": "17 M", "125m": "123 M"}
"""Parameters, by the names of `training.MODELS`."""


def way_text(method: str) -> str:
    """The title of a way to train, and its name on the command line."""
    if method == EXACT:
        return "exact mean, f32"
    title, slash, _ = titled(method).partition(",")
    return f"{title}, sharded updates, `{method}`" if "/" in method and slash else titled(method)


def in_runs(file: str, names: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of `training.py` by their run's line, which has the settings of ``names``.

    A way that ran again, as the exact mean does with every command, is there once.
    """
    found: dict[str, dict[tuple[str, str, int], Row]] = {}
    for row in load(file)["rows"]:
        s, run = row["settings"], load(file)["invocations"][row["invocation"]]
        told = {
            "steps": f"{s['steps']} steps of {s['global_batch']} sequences",
            "workers": f"{s['workers']} workers",
        }
        title = [f"{SIZES[s['model']]} parameters (`{s['model']}`, {s['init']} initialisation)"]
        title += [told[name] for name in names]
        title += [f"{s['seeds']} seeds", "CPU" if s["platform"] == "cpu" else run["device"]]
        key = s["method"], s["topology"], s["workers"]
        found.setdefault(f"*{', '.join(title)}*", {}).setdefault(key, row)
    return {title: list(rows.values()) for title, rows in found.items()}


def workers_table() -> str:
    """Losses and top-1 of all ways, as differences to the exact mean, by the number of workers."""
    counts = sorted({row["settings"]["workers"] for row in load(WORKERS)["rows"]})
    heads = [f"{what}, {count}" for what in ("loss", "top-1") for count in counts]
    lines: list[Sequence[str]] = [("method, name", "topology", *heads)]
    for title, rows in in_runs(WORKERS, ["steps"]).items():
        lines.append([title])
        cells: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            s = row["settings"]
            cells.setdefault((s["method"], s["topology"]), {})[s["workers"]] = row["summary"]
        cells.pop((EXACT, "native"))
        for (method, topology), own in cells.items():
            shown = [with_error(*own[n]["validation"].values()) if n in own else "" for n in counts]
            shown += [with_error(*own[n]["top1"].values()) if n in own else "" for n in counts]
            lines.append((way_text(method), topology, *shown))
    return markdown(lines)


def of_bf16_text(found: Mapping[str, float | None]) -> str:
    """A ratio in %, and its 95% interval if it has one."""
    percent, low, high = (found[name] for name in ("percent", "low", "high"))
    if percent is None:
        return "diverged"
    between = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return f"{percent:.2f}{between}"


def accuracies(rows: Sequence[Row], shares: Sequence[Sequence[float]]) -> list[list[str]]:
    """Lines of rows in one run: wire bits, accuracy, difference to the exact mean, of bf16's.

    Args:
      rows: of `training.py`, or of classifiers.
      shares: accuracies of their seeds in %, of which the first row's are the exact mean's.
    """
    names = [row.get("method") or row["settings"]["method"] for row in rows]
    bf16 = shares[names.index(BF16)]
    lines = []
    for name, row, own in zip(names, rows, shares, strict=True):
        cells = [way_text(name), f"{row['bits_per_coord']:.2f}"]
        cells.append(with_error(*paired(np.asarray(own, float))).removeprefix("+"))
        apart = with_error(*paired(np.subtract(own, shares[0])))
        cells.append("" if name == EXACT else apart)
        lines.append([*cells, "" if name == BF16 else of_bf16_text(of_reference(own, bf16))])
    return lines


HEADS = ["method, name", "wire bits", "accuracy, %", "points from exact", "% of bf16's (95%)"]


def top_1_table() -> str:
    """Top-1 of held-out text beside bf16's."""
    lines = [[*HEADS[:2], "top-1, %", *HEADS[3:]]]
    for title, rows in in_runs(TOP_1, ["steps", "workers"]).items():
        shares = [(100 * np.array(row["top1"], float)).tolist() for row in rows]
        lines += [[title], *accuracies(rows, shares)]
    return markdown(lines)


def classifier_table(file: str) -> str:
    """Accuracies of classifiers beside bf16's, of one run or several."""
    lines = [HEADS]
    for run in load(file).get("runs", [load(file)]):
        s, device = run["settings"], run["invocation"]["device"]
        if "model" in s:
            title = f"{SIZES[s['model']]} parameters (`{s['model']}`), {s['pretraining']} steps"
            title += f" of pretraining, {s['steps']} of {s['batch']} chunks, {s['seeds']} seeds"
            lines.append([f"*{title}, {'CPU' if device == 'cpu' else device}*"])
        lines += accuracies(run["rows"], [row["accuracy"] for row in run["rows"]])
    return markdown(lines)


# --- Transports -----------------------------------------------------------------------------------


def transport_table() -> str:
    """All-reduces of all methods over several transports, over bf16 psum."""
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
    return markdown(lines)


# --- Pages ----------------------------------------------------------------------------------------


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
    found = {
        DOCS / "comparison.md": {name: table(name) for name in LOSSES}
        | {"transports": transport_table(), "estimates": estimates_table()},
        DOCS / "multihost.md": {
            "steps": steps_table(*((f"{rate} Gb/s", "2 × H100") for rate in (10, 25, 37)))
        },
        DOCS / "performance.md": {"steps": steps_table(*WITHIN)},
        DOCS / "training-quality.md": {
            "workers": workers_table(),
            "top-1": top_1_table(),
            "digits": classifier_table(DIGITS),
            "finetuned": classifier_table(FINETUNED),
        },
        DOCS / "time-to-accuracy.md": {
            "less": time_to_loss_table(),
            "clock": clock_table(),
            "topologies": topologies_table(),
        },  # fmt: skip
    }
    return {path: filled(path.read_text(), own) for path, own in found.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
    speedups().savefig(DOCS / "speedups.png", dpi=160)
    clock().savefig(DOCS / "time-to-accuracy.png", dpi=160)
    long_training().savefig(DOCS / "long-training.png", dpi=140)
