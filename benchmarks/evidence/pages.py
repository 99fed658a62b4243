r"""The tables of the pages and the picture of the README, from ``results``. Nothing is measured.

    python benchmarks/evidence/pages.py           # writes all of them (`make figures`)
    python benchmarks/evidence/pages.py --times results/step_time_nodes.json

Losses are rows of `training.py`, errors those of ``dynamiq-jax error --json``, times those of
``dynamiq-jax bench all-reduce`` and of `step_time.py`.

* ``docs/comparison.md`` and ``results/comparison.md`` get tables between their markers. Each is of
  one setting, in groups of wire bits, and within a group by loss.
* ``docs/speedups.png`` has speed-ups by links.
* ``--times`` prints a table of ``docs/time-to-accuracy.md``: the steps to a loss, times a step's
  time over each transport. The target is bf16 psum's last training loss and `TOLERANCE` percent
  more.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from matplotlib.figure import Figure
from training import (
    BF16,
    CURVE_WINDOW,
    EXACT,
    INITS,
    MODELS,
    difference,
    exact_mean,
    init,
    library_mean,
    unstack,
)  # fmt: skip

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, MORE = DOCS / "comparison.md", RESULTS / "comparison.md"
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
    "dynamiq-mse": "DynamiQ, squared error alone",
    "dynamiq-piecewise": "DynamiQ, piecewise levels",
    "dynamiq-memory": "DynamiQ, error feedback, groups of neighbours",
    "dynamiq-ef14": "DynamiQ, error feedback EF14",
    "dynamiq-ef21": "DynamiQ, error feedback EF21",
    "mxfp8": "MXFP8",
    "mxfp6": "MXFP6",
    "mxfp4": "MXFP4",
    "mxfp4-stochastic": "MXFP4, random rounding",
    "mxfp4-ef14": "MXFP4, error feedback EF14",
    "mxfp4-ef21": "MXFP4, error feedback EF21",
    "thc": "THC",
    "thc-saturating": "THC, saturating sums",
    "omnireduce": "OmniReduce",
    "topk-chunked": "Chunked top-k, no memory",
    "topk-chunked-memory": "Chunked top-k",
    "minmax": "MinMax, random rounding (QSDP's)",
    "flash": "MinMax, to nearest (Flash Communication's)",
    "qsgd": "Global-QSGD",
    "qsgd-exponential": "Global-QSGD, exponential",
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
    "liec": "LIEC, around MinMax with 4 bits",
}
"""Markdown, by names on the command line without bits."""

COLOURS = {"5": "#6baed6", "4": "#2171b5", "3.5": "#08306b"}
"""By bits."""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first line is its head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


# --- Speed-ups ------------------------------------------------------------------------------------


def speedups() -> Figure:
    """Bars for every row, one for each number of bits, and a line where psum stands."""
    data, chosen = load("speedups.json"), ("5", "4", "3.5")
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(chosen)
    for place, bits in enumerate(chosen):
        heights = [row["psum_us"] / row["bits_us"][bits] for row in data["rows"]]
        at = [number + (place - 1) * width for number in range(len(heights))]
        bars = axes.bar(
            at, heights, 0.92 * width, color=COLOURS[bits], label=f"DynamiQ, {bits} bits"
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


# --- Time to a loss -------------------------------------------------------------------------------

NONE = "none"
STAND_INS = {"dynamiq-dither-axis": "dynamiq-dither", "dynamiq-axis": "dynamiq"}
"""Whose step times serve for methods that differ in the order of coordinates alone."""

LINKS = {
    "p2p, NCCL": "NVLink", "shm": "host memory", "p2p, NCCL + socket": "sockets between two nodes",
}  # fmt: skip
"""Transports by their names in step_time.py, in plain words."""


class Curve(NamedTuple):
    """The losses of one method's training."""

    method: str
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


def read_curves() -> dict[str, Curve]:
    """Curves by method, of one training."""
    return {
        row["settings"]["method"]: Curve(
            row["settings"]["method"],
            np.array(row["training_loss"], np.float64),
            np.array(row["validation_loss"], np.float64),
        )
        for row in load("time_to_accuracy_losses.json")["rows"]
    }


def read_times(file: str, model: str, topology: str) -> dict[str, dict[str, Row]]:
    """Rows of `step_time.py` by transport and method; later ones count.

    The transport is named by what carries native collectives.

    Raises:
      ValueError: steps over one transport differ in more than how gradients are averaged.
    """
    found: dict[str, dict[str, Row]] = {}
    kinds: dict[str, str] = {}
    for run in load(file)["runs"]:
        rows = {
            row["method"].removeprefix("psum:"): row
            for row in run["rows"]
            if row["model"] == model and row["topology"] in (topology, "native")
        }
        if not rows:
            continue
        carrier = rows[BF16]["transport"]
        of = rows[BF16]
        kind = json.dumps(run["options"] | {n: of[n] for n in ("tokens", "n_workers")})
        if kinds.setdefault(carrier, kind) != kind:
            raise ValueError(f"{file}: steps over {carrier} differ: {kinds[carrier]} and {kind}")
        found.setdefault(carrier, {}).update(rows)
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


# --- The comparison -------------------------------------------------------------------------------


class Losses(NamedTuple):
    """Rows of `training.py` that were trained alike, unit initialisation and AdamW."""

    files: Mapping[str, str]
    """Files in ``results``, and a pattern for the methods to take from each; the first counts."""
    model: str
    platform: str
    steps: int


LOSSES: Mapping[str, Losses] = {
    "125m": Losses({"training_125m.json": ".*"}, "125m", "gpu", 200),
    "small": Losses({"comparison.json": ".*"}, "tiny", "cpu", 200),
    "seeds": Losses(
        {"dither.json": ".*", "training.json": "(?!dynamiq(?!-memory))"}, "tiny", "gpu", 200
    ),
    "large": Losses({"time_to_accuracy_losses.json": ".*"}, "mid", "gpu", 800),
}
"""By the table's name. DynamiQ's rows of training.json, whose groups are of
other coordinates, count only where there are none of today's: those with error feedback."""
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

PAIRS: Mapping[str, Sequence[tuple[str, str]]] = {
    "large": (
        ("mxfp4", "dynamiq:4"), ("mxfp4", "dynamiq-dither-axis:4"), ("minmax:4", "dynamiq:4"),
        ("flash:5", "dynamiq:5"), ("thc", "dynamiq:5"), ("mxfp6", "dynamiq:5"),
        ("mxfp8", "dynamiq:5"), ("dynamiq-dither-axis:3.5", "dynamiq:4"),
    ),
    "125m": (
        ("mxfp4", "dynamiq:4"), ("mxfp4", "dynamiq:5"), ("minmax:4", "dynamiq:4"),
        ("flash:5", "dynamiq:5"), ("mxfp4-ef21", "dynamiq:4"), ("thc", "dynamiq:5"),
        ("mxfp6", "dynamiq:5"), ("mxfp8", "dynamiq:5"), ("bf16-psum", "dynamiq:5"),
        ("qsgd:8", "dynamiq:5"), ("omnireduce", "dynamiq:5"), ("perm-k", "dynamiq:5"),
        ("topk-chunked-memory:4", "dynamiq:4"), ("sidco-memory", "dynamiq:4"),
        ("arc-top-k-memory:4", "dynamiq:4"), ("clt-k-memory:4", "dynamiq:4"),
        ("powersgd-memory", "dynamiq:4"), ("dynamiq-dither-axis:3.5", "dynamiq:4"),
    ),
    "small": (
        ("mxfp4", "dynamiq:4"), ("minmax:4", "dynamiq:4"), ("thc-saturating", "dynamiq:4"),
        ("dynamiq-ef21:4", "dynamiq:4"), ("mxfp4-ef21", "dynamiq:4"),
        ("topk-chunked-memory", "dynamiq:4"), ("sidco-memory", "dynamiq:4"),
        ("clt-k-memory", "dynamiq:4"),
        ("mxfp4", "dynamiq:5"), ("minmax:4", "dynamiq:5"), ("qsgd:8", "dynamiq:5"),
        ("qsgd-exponential:8", "dynamiq:5"), ("perm-k", "dynamiq:5"),
        ("clt-k-memory", "dynamiq:5"), ("arc-top-k-memory", "dynamiq:5"),
        ("powersgd-memory", "dynamiq:5"), ("marsit", "dynamiq:5"), ("liec", "dynamiq:5"),
    ),
    "seeds": (
        ("mxfp4", "dynamiq:4"), ("mxfp4", "dynamiq-dither-axis:4"), ("thc:4", "dynamiq:5"),
        ("mxfp6", "dynamiq:5"), ("mxfp8", "dynamiq:5"), ("dynamiq-dither-axis:3.5", "dynamiq:4"),
    ),
}  # fmt: skip
"""Pairs that the page compares seed by seed: (a method, the DynamiQ beside it)."""


def of_table(row: Row, chosen: Losses, pattern: str) -> bool:
    """Whether a row belongs to a table."""
    s = row["settings"]
    name = s["method"].partition(":")[0]
    own = (s["model"], s["platform"], s["init"], s["optimiser"], s["steps"])
    return (
        own == (chosen.model, chosen.platform, "unit", "adamw", chosen.steps)
        and s["topology"] in ("direct", "native")
        and name in TITLES
        and re.match(pattern, name) is not None
    )


PANEL = ("model", "init", "optimiser", "learning_rate", "workers", "steps", "seeds")
"""Settings that rows of one table have in common."""


def loss_rows(chosen: Losses) -> list[Row]:
    """Returns a table's rows, sorted, each with its exact row's losses as ``exact``."""
    found: dict[str, Row] = {}
    for file, pattern in chosen.files.items():
        rows = load(file)["rows"]
        for row in (row for row in rows if of_table(row, chosen, pattern)):
            own = {**row, "exact": exact_row(row, rows)["validation_loss"]}
            found.setdefault(row["settings"]["method"], own)
    settings = {tuple(row["settings"][name] for name in PANEL) for row in found.values()}
    if len(settings) != 1:
        raise ValueError(f"{chosen}: rows of several settings in one table")
    return sorted(found.values(), key=lambda row: (group(row), loss(row)))


def exact_row(row: Row, rows: Iterable[Row]) -> Row:
    """Returns the exact row with the settings of ``row``; of several, its own command's row."""
    of_mean = {"method": EXACT, "topology": "native", "options": ""}
    found = [other for other in rows if other["settings"] == row["settings"] | of_mean]
    if len(found) > 1:
        found = [other for other in found if other["invocation"] == row["invocation"]]
    (exact,) = found
    return exact


def group(row: Row) -> int:
    """The index in `GROUPS`."""
    return next(i for i, (least, _) in enumerate(GROUPS) if row["bits_per_coord"] >= least)


def loss(row: Row) -> float:
    """The difference to the exact mean in %; infinity where a run diverged."""
    percent = row["summary"]["validation"]["percent"]
    return math.inf if percent is None else percent


def pair_difference(row: Row, other: Row) -> tuple[float, float]:
    """Mean over seeds of the difference of two rows' differences in %, its standard error.

    Each row is compared with its own exact mean first, so rows may be of two commands.
    """
    own, its = (100 * np.divide(r["validation_loss"], r["exact"]) for r in (row, other))
    apart = own - its
    return float(apart.mean()), float(apart.std(ddof=1) / math.sqrt(apart.size))


def state_bytes_per_coord(method: str, topology: str, model: str, n_workers: int) -> float:
    """Bytes that every worker keeps from step to step, by coordinate of the model's gradients."""
    start = partial(init, MODELS[model], kind=np.int32(INITS.index("unit")))
    grads = jax.eval_shape(lambda key: unstack(start(key)), jax.random.key(0))
    native = method in (EXACT, BF16)
    mean = exact_mean() if native else library_mean(method, topology, "jnp")
    state = jax.eval_shape(lambda: mean.init(grads, n_workers))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return held / n_workers / sum(leaf.size for leaf in jax.tree.leaves(grads))


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
    (rows,) = (rows for rows in nvlink if {NONE, BF16} <= rows.keys())
    n_workers = rows[BF16]["n_workers"]
    return rows[NONE]["step_ms"], rows[BF16]["wire_bytes"] * n_workers / (2 * (n_workers - 1))


def step_times() -> dict[str, dict[str, Row]]:
    """Steps of the 1.1 B model that average after all else, by links and method.

    The all-reduce of all gradients takes as many times longer than the measured one as it is
    larger.
    """
    alone, gradient_bytes = step_alone()
    found: dict[str, dict[str, Row]] = {}
    for run in load(TRANSPORTS)["runs"]:
        own = found.setdefault(run["links"], {})
        for method, row in by_method(run).items():
            exposed = row["time_us"] / 1e3 * gradient_bytes / row["size_bytes"]
            own[method] = {"step_ms": alone + exposed, "exposed_ms": exposed}
    return found


def times_to_loss() -> dict[str, dict[str, Result]]:
    """Results by links and method, of methods that have a curve and times of their own."""
    found: dict[str, dict[str, Result]] = {}
    for result in combine(read_curves(), step_times(), TOLERANCE):
        if result.timed_as == result.method:
            found.setdefault(result.transport, {})[result.method] = result
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


def listed(files: Iterable[str]) -> str:
    """The names in a sentence."""
    *others, last = (f"`{file}`" for file in files)
    return " and ".join([", ".join(others), last] if others else [last])


def settings_text(chosen: Losses, rows: Sequence[Row]) -> str:
    """The commands, hardware and versions of a table."""
    settings = rows[0]["settings"]
    kept = [load(file)["invocations"] for file in chosen.files]
    machines = {f"{run['device']}; {run['versions']}" for runs in kept for run in runs}
    if len(machines) != 1:
        raise ValueError(f"{chosen}: rows of several machines in one table: {machines}")
    options = f"--models {chosen.model} --inits unit --topologies direct --steps {chosen.steps}"
    files = listed(chosen.files)
    (machine,) = machines
    machine = machine.replace("; ", ", ").replace("cpu, ", "CPU, ").replace(" jax ", " JAX ")
    return (
        f"    python benchmarks/evidence/training.py {options} \\\n"
        f"        --seeds {settings['seeds']} --methods NAME\n\n"
        f"{settings['seeds']} seeds, {settings['workers']} workers; {machine}; all rows, in\n"
        f"`benchmarks/evidence/results`: {files}."
    )


STATE, SPEEDUP = "state, bytes", "speed-up"
LAST: Mapping[str, str] = {"small": STATE, "seeds": STATE, "large": SPEEDUP}
"""The last column of tables that have more than bits, error and loss."""


def table(name: str) -> str:
    """A table of losses, under its command."""
    chosen = LOSSES[name]
    rows = loss_rows(chosen)
    last = LAST.get(name)
    heads = ["method, name", "wire bits", "vNMSE", "loss, difference in %"]
    lines = [[*heads, last] if last else heads]
    for number in sorted({group(row) for row in rows}):
        lines.append([f"*{GROUPS[number][1]}*"])
        for row in (row for row in rows if group(row) == number):
            settings = row["settings"]
            method, workers = settings["method"], settings["workers"]
            cells = [titled(method), f"{row['bits_per_coord']:.2f}"]
            cells += [error_text(method), loss_text(row)]
            if last == STATE:
                state = state_bytes_per_coord(method, settings["topology"], chosen.model, workers)
                cells.append(f"{state:.2g}")
            elif last == SPEEDUP:
                cells.append(time_text(method))
            lines.append(cells)
    return settings_text(chosen, rows) + "\n\n" + markdown(lines)


def pair_table(name: str) -> str:
    """Methods beside a DynamiQ of about the same bits, seed by seed."""
    rows = {row["settings"]["method"]: row for row in loss_rows(LOSSES[name])}
    lines = [("method", "bits", "beside", "bits", "loss, difference in %")]
    for method, other in PAIRS[name]:
        if method in rows and other in rows:
            bits, its = (f"{rows[m]['bits_per_coord']:.2f}" for m in (method, other))
            apart = signed(*pair_difference(rows[method], rows[other]))
            lines.append((titled(method), bits, f"`{other}`", its, apart))
    return markdown(lines)


def time_to_loss_table() -> str:
    """Times to bf16 psum's loss over several transports, relative to its own, and their origin.

    By time over host memory; methods that do not get there stand last, by their last loss.
    """
    losses, found = read_curves(), times_to_loss()
    bits = {row["settings"]["method"]: row["bits_per_coord"] for row in loss_rows(LOSSES["large"])}
    last = {
        method: difference(curve.losses[:, -1], losses[BF16].losses[:, -1])
        for method, curve in losses.items()
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
    files = listed(LOSSES["large"].files)
    return (
        "    python benchmarks/evidence/pages.py\n\n"
        f"Curves: {files}; all-reduces: `{TRANSPORTS}`,\n"
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


def time_origin() -> str:
    """Hardware and versions of the times."""
    found = load("comparison_times.json")
    return f"{found['hardware']}, {found['versions']}."


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
    """The texts between the markers of both pages, by the block's name."""
    tables = {name: table(name) for name in LOSSES}
    pairs = {f"{name}-pairs": pair_table(name) for name in PAIRS}
    return tables | pairs | {
        "time-to-loss": time_to_loss_table(), "errors": error_origin(), "times": time_origin(),
        "transports": transport_table(),
    }  # fmt: skip


def pages(texts: Mapping[str, str]) -> dict[Path, dict[str, str]]:
    """The blocks of each page: pairs and the smallest model are in ``MORE``."""
    apart = {"small", "seeds", *(f"{name}-pairs" for name in PAIRS)}
    found: dict[Path, dict[str, str]] = {PAGE: {}, MORE: {}}
    for name, text in texts.items():
        found[MORE if name in apart else PAGE][name] = text
    return found


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


def time_table(file: str, topology: str) -> str:
    """Times to bf16 psum's loss by the steps of one file, as ``docs/time-to-accuracy.md`` has them.

    Losses are those over `Direct`.
    """
    heads = "links", "method", "step time of", "step, ms", "exposed, ms", "less per step"
    lines = [(*heads, "steps", "less to the loss", "final loss, %")]
    for r in combine(read_curves(), read_times(file, "1b", topology), TOLERANCE):
        less = "-" if r.relative is None else f"{1 - r.relative:.1%}"
        loss = (
            "diverged" if r.loss_percent is None else f"{r.loss_percent:+.2f} ± {r.loss_error:.2f}"
        )
        times = f"{r.step_ms:.1f}", f"{r.exposed_ms:.1f}", f"{1 - r.step_relative:.1%}"
        steps = "-" if r.steps is None else f"{r.steps:.0f}"
        lines.append((r.transport, r.method, r.timed_as, *times, steps, less, loss))
    return markdown(lines)


def texts() -> dict[Path, str]:
    """All pages that have tables, as they should be."""
    return {path: filled(path.read_text(), own) for path, own in pages(blocks()).items()}


def main(
    times: Annotated[str | None, typer.Option(help="Print the table of this file alone.")] = None,
    topology: Annotated[str, typer.Option(help="Over which its steps averaged.")] = "direct",
) -> None:
    """Writes all tables and the picture."""
    if times:
        print(time_table(Path(times).name, topology))
        return
    for path, text in texts().items():
        path.write_text(text)
    speedups().savefig(DOCS / "speedups.png", dpi=160)


if __name__ == "__main__":
    typer.run(main)
