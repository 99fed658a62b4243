r"""The tables of the comparison, on two pages: every method by wire bits, state, error, loss, time.

    python benchmarks/evidence/comparison.py            # prints them
    python benchmarks/evidence/comparison.py --write    # puts them into the pages, between markers

It measures nothing. Losses are rows of `training.py`, errors those of ``dynamiq-jax error --json``,
times those of ``dynamiq-jax bench all-reduce``; `LOSSES`, `ERRORS` and `TIMES` say which files of
``results``. The state is what the method keeps of a model's gradients, from its shapes.

Each table of losses is of one setting: one model on one kind of hardware. Rows are in groups of
wire bits, and within a group by loss. The table of times to a loss puts curves of one model and
times of all-reduces together, as `time_to_accuracy.py` does with times of steps.
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
from method_titles import TITLES
from time_to_accuracy import NONE, Curve, Result, combine, read_curves
from training import difference
from training_model import INITS, MODELS, init, unstack
from training_report import markdown, panels
from training_run import BF16, EXACT, exact_mean, library_mean

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
MORE = RESULTS / "comparison.md"
ERRORS = RESULTS / "comparison_error.json"
TIMES = RESULTS / "comparison_times.json"
TRANSPORTS = RESULTS / "comparison_transports.json"
STEPS = RESULTS / "step_time_pipeline.json"

TOLERANCE = 0.5
"""Above bf16's last training loss, %: the target of the times to a loss."""

Row = Mapping[str, Any]


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


# --- Rows -----------------------------------------------------------------------------------------


@cache
def load(file: Path) -> Any:
    """Reads a JSON file once."""
    return json.loads(file.read_text())


def wanted(row: Row, chosen: Losses, pattern: str) -> bool:
    """Whether a row belongs to a table."""
    settings = row["settings"]
    name = settings["method"].partition(":")[0]
    return (
        (settings["model"], settings["platform"]) == (chosen.model, chosen.platform)
        and (settings["init"], settings["optimiser"]) == ("unit", "adamw")
        and settings["topology"] in ("direct", "native")
        and settings["steps"] == chosen.steps
        and name in TITLES
        and re.match(pattern, name) is not None
    )


def loss_rows(chosen: Losses) -> list[Row]:
    """Returns a table's rows, sorted, each with its exact row's losses as ``exact``.

    Raises:
      ValueError: they were not all trained alike.
    """
    found: dict[str, Row] = {}
    for file, pattern in chosen.files.items():
        rows = load(RESULTS / file)["rows"]
        for row in rows:
            if wanted(row, chosen, pattern):
                own = {**row, "exact": exact_row(row, rows)["validation_loss"]}
                found.setdefault(row["settings"]["method"], own)
    if len(panels(list(found.values()))) != 1:
        raise ValueError(f"{chosen}: rows of several settings in one table")
    return sorted(found.values(), key=lambda row: (group(row), loss(row)))


def same_but_mean(row: Row, other: Row, method: str) -> bool:
    """Whether ``row`` is of ``method``, and all settings but that are those of ``other``."""
    of_mean = ("method", "topology", "options")
    return row["settings"]["method"] == method and all(
        row["settings"][name] == value
        for name, value in other["settings"].items()
        if name not in of_mean
    )


def exact_row(row: Row, rows: Iterable[Row]) -> Row:
    """Returns the exact row with the settings of ``row``; of several, its own command's row."""
    found = [other for other in rows if same_but_mean(other, row, EXACT)]
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
    own, its = (
        100 * np.asarray(r["validation_loss"], np.float64) / np.asarray(r["exact"], np.float64)
        for r in (row, other)
    )
    apart = own - its
    return float(apart.mean()), float(apart.std(ddof=1) / math.sqrt(apart.size))


def state_bytes_per_coord(method: str, topology: str, model: str, n_workers: int) -> float:
    """Bytes that every worker keeps from step to step, by coordinate of the model's gradients."""
    shape = MODELS[model]
    start = partial(init, shape, kind=np.int32(INITS.index("unit")))
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
    """Milliseconds of a step of the 1.1 B model that averages nothing, and its gradients' bytes.

    Of the run over NVLink that has both.
    """
    nvlink = (
        {row["method"]: row for row in run["rows"]}
        for run in load(STEPS)["runs"]
        if "NCCL_P2P_DISABLE" not in run["about"]["environment"]
    )
    (rows,) = (rows for rows in nvlink if {NONE, BF16} <= rows.keys())
    psum = rows[BF16]
    n_workers = psum["n_workers"]
    return rows[NONE]["step_ms"], psum["wire_bytes"] * n_workers / (2 * (n_workers - 1))


def step_times() -> dict[str, dict[str, Row]]:
    """Steps of the 1.1 B model that average after all else, by links and method.

    As `time_to_accuracy.combine` takes them. The all-reduce of all gradients takes as many times
    longer than the measured one as it is larger.
    """
    alone, gradient_bytes = step_alone()
    found: dict[str, dict[str, Row]] = {}
    for run in load(TRANSPORTS)["runs"]:
        own = found.setdefault(run["links"], {})
        for method, row in by_method(run).items():
            exposed = row["time_us"] / 1e3 * gradient_bytes / row["size_bytes"]
            own[method] = {"step_ms": alone + exposed, "exposed_ms": exposed}
    return found


def curves() -> dict[str, Curve]:
    """Training curves of the table "large", by method."""
    files = [RESULTS / file for file in LOSSES["large"].files]
    return read_curves(files, LOSSES["large"].model, "unit", "direct")


def times_to_loss() -> dict[str, dict[str, Result]]:
    """Results by links and method, of methods that have a curve and times of their own."""
    found: dict[str, dict[str, Result]] = {}
    for result in combine(curves(), step_times(), TOLERANCE):
        if result.timed_as == result.method:
            found.setdefault(result.transport, {})[result.method] = result
    return found


# --- Texts ----------------------------------------------------------------------------------------


def signed(percent: float, error: float) -> str:
    """A difference in % with its standard error, two digits of the latter."""
    digits = 2 if error < 0.995 else 1
    return f"{percent:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def loss_text(row: Row) -> str:
    """A row's difference to the exact mean in %."""
    found = row["summary"]["validation"]
    if found["percent"] is None:
        return "diverged"
    return signed(**found)


def titled(method: str) -> str:
    """A method's title and its name on the command line."""
    return f"{TITLES[method.partition(':')[0]]}, `{method}`"


def error_texts() -> dict[str, str]:
    """vNMSE by the method's name."""
    rows = load(ERRORS)["rows"]
    return {row["method"]: f"{row['vnmse']:#.2g}" for row in rows}


def error_text(method: str, errors: Mapping[str, str]) -> str:
    """vNMSE of the method, or of what does the same to one flat leaf in its first step."""
    name, colon, bits = method.partition(":")
    plain = re.sub("-(memory|ef14|ef21)$", "", name).removesuffix("-axis")
    choices = (method, plain + colon + bits, DEFAULTS.get(plain, plain))
    return next((errors[choice] for choice in choices if choice in errors), "")


def time_text(method: str) -> str:
    """Speed-up over bf16 psum, by the columns of the file of times."""
    timed = [(row["psum_us"], row["us"].get(method)) for row in load(TIMES)["rows"]]
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
    kept = [load(RESULTS / file)["invocations"] for file in chosen.files]
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
    rows, errors = loss_rows(chosen), error_texts()
    last = LAST.get(name)
    heads = ["method, name", "wire bits", "vNMSE", "loss, difference in %"]
    lines = [[*heads, last] if last else heads]
    for number in sorted({group(row) for row in rows}):
        lines.append([f"*{GROUPS[number][1]}*"])
        for row in (row for row in rows if group(row) == number):
            settings = row["settings"]
            method, workers = settings["method"], settings["workers"]
            cells = [titled(method), f"{row['bits_per_coord']:.2f}"]
            cells += [error_text(method, errors), loss_text(row)]
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
    losses, found = curves(), times_to_loss()
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
        "    python benchmarks/evidence/comparison.py\n\n"
        f"Curves: {files}; all-reduces: `{TRANSPORTS.name}`,\n"
        f"{about['n_devices']} × {about['device_kind']}, JAX {about['jax']}; "
        f"the rest of a step, {alone:.1f} ms, and gradients of\n"
        f"{gradient_bytes / 1e9:.2f} GB: `{STEPS.name}`.\n\n" + markdown(lines)
    )


def error_origin() -> str:
    """The command, hardware and versions of the errors."""
    found = load(ERRORS)
    row, about = found["rows"][0], found["about"]
    machine = f"{about['device_kind'].replace('cpu', 'CPU')}, JAX {about['jax']}"
    return (
        "    dynamiq-jax error --topology direct --methods NAME\n\n"
        f"{row['n_workers']} workers, mean of {row['seeds']} seeds; {machine}."
    )


def time_origin() -> str:
    """Hardware and versions of the times."""
    found = load(TIMES)
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
        f"`benchmarks/evidence/results/{TRANSPORTS.name}`.\n\n" + markdown(lines)
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


def main(
    write: Annotated[bool, typer.Option("--write", help="Put them into the pages.")] = False,
) -> None:
    """Prints the tables, or writes them into the pages."""
    texts = blocks()
    if write:
        for path, own in pages(texts).items():
            path.write_text(filled(path.read_text(), own))
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in texts.items()))


if __name__ == "__main__":
    typer.run(main)
