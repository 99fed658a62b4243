"""Tables of README and docs/results.md, and pictures of the pages, from ``results``.

    python benchmarks/evidence/pages.py           # writes all of them (`make figures`)

Nothing is measured here: `benchmarks/results.py` (`make results`) measures, and then calls this. A
table stands between markers, and under it what it was measured on and the command.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import break_even
import largest
import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from training import BF16, CURVE_WINDOW, EXACT, of_reference, paired

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TRANSPORTS = "transports.json"
Row = Mapping[str, Any]


@cache
def load(file: str) -> Any:
    """Reads a JSON file of ``results`` once."""
    return json.loads((RESULTS / file).read_text())


def caption(only: str, *told: str) -> str:
    """The line under a table: how it was measured, and the command that measures it again."""
    return f"*{'; '.join(told)}.* `make results ONLY={only}`"


# --- Names ----------------------------------------------------------------------------------------

TITLES = {
    "bf16-psum": "bf16 psum",
    "dynamiq": "**DynamiQ**",
    "dynamiq-dither": "**DynamiQ**, dither",
    "dynamiq-dither-axis": "**DynamiQ**, dither, `scale_axis`",
    "dynamiq-nearest": "**DynamiQ**, to nearest",
    "dynamiq-paper": "**DynamiQ**, the paper's configuration",
    "dynamiq-mse": "**DynamiQ**, least squared error",
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
    return "\n".join(f"|{'|'.join(line)}|" for line in ruled)


# --- Steps by way to train ------------------------------------------------------------------------

STEPS = "steps.json"
"""Medians of a step, with 10th and 90th percentiles, by links and cards."""
SHOWN = {"dp:5": "data parallel, 5 bits", "zero-pipeline:5/2.5": "sharded updates, 5 + 2.5 bits"}
SHOWN |= {"fsdp-keep:5/8": "FSDP, 5 + 8 bits"}
"""The bars of the picture, by names of `ways.py`."""
COLOURS = "#9ecae1", "#08519c", "#d9842b"
STEPS_OF = {
    "none": "no gradient exchange",
    "bf16-psum": "bf16 psum",
    "bf16-zero": "bf16 ZeRO-1 by hand",
    "bf16-fsdp": "bf16 FSDP by hand",
    "dp:mxfp8": "MXFP8",
    "dp:mxfp4": "MXFP4",
    "psum:5": "`dq.pmean`, 5 bits",
    "auto:5": "`dq.value_and_grad`, 5 bits",
    "explicit:5": "`dq.value_and_grad`, Explicit axes",
    "dp:5": "data parallel, 5 bits, pipeline",
    "dp:4": "data parallel, 4 bits, pipeline",
    "zero:5/2.5": "`dq.optax.sharded`, 5 + 2.5 bits",
    "zero-explicit:5/2.5": "`dq.optax.sharded`, Explicit axes",
    "zero-pipeline:5/2.5": "sharded, 5 + 2.5, pipeline",
    "zero-dear:5/2.5": "sharded, 5 + 2.5, deferred",
    "zero-pipeline:4d/2.5": "sharded, 4 with dither + 2.5, pipeline",
    "zero-dear:4d/2.5": "sharded, 4 with dither + 2.5, deferred",
    "zero-dear:few/few": "sharded, `few_bits` (3.5 + 2.25), deferred",
    "zero-dear:mxfp4/2.5": "sharded, MXFP4 + 2.5, deferred",
    "fsdp:5/8": "FSDP, 5 + 8, pipeline",
    "fsdp-keep:5/8": "FSDP, payloads kept",
    "fsdp-checkpoint:5/8": "FSDP, blocks checkpointed",
    "fsdp-keep-checkpoint:5/8": "FSDP, payloads kept, blocks checkpointed",
}
README_WAYS = {
    "bf16 psum": ["bf16-psum"],
    "bf16 ZeRO-1, by hand": ["bf16-zero"],
    "MXFP4, `dq.contrib.MXFP4()`, in a [pipeline](docs/overlap.md)": ["dp:mxfp4"],
    "data parallel: `dq.value_and_grad`, `dq.pmean`": ["auto:5", "psum:5"],
    "the same in a pipeline": ["dp:5"],
    "sharded updates: [`dq.optax.sharded`](docs/sharded-updates.md)": ["zero:5/2.5"],
    "the same in a pipeline, deferred": ["zero-dear:5/2.5"],
    "the same with `dq.optax.few_bits()`": ["zero-dear:few/few"],
    "[FSDP](docs/fsdp.md) in a pipeline, payloads kept": ["fsdp-keep:5/8"],
}
"""The rows of README's table, and the ways that they are, the first one that was measured."""
README_LINKS = {
    "25 Gb/s, two hosts of one H200": ("25 Gb/s", "2 × H200"),
    "host memory, two H200": ("host memory", "2 × H200"),
    "NVLink, four H200": ("NVLink", "4 × H200"),
}


def measured(links: str, cards: str) -> Mapping[str, Sequence[float]]:
    """The ways of one column."""
    (run,) = (r for r in load(STEPS)["runs"] if (r["links"], r["cards"]) == (links, cards))
    return run["ms"]


def readme_table() -> str:
    """Whole milliseconds of the ways that a user has, by links."""
    lines = [("way", *README_LINKS)]
    for title, ways in README_WAYS.items():
        found = []
        for column in README_LINKS.values():
            ms = measured(*column)
            if title.startswith("FSDP") and column[0] == "NVLink":
                found.append(f"{ms['bf16-fsdp'][0]:.0f} (bf16, its default there)")
                continue
            own = next((ms[way] for way in ways if way in ms), None)
            found.append("" if own is None else f"{own[0]:.0f}")
        lines.append((title, *found))
    return markdown(lines)


def speedups() -> Figure:
    """Bars for every run with data parallel, one for each way, and a line where psum stands.

    FSDP is without kept payloads where the run has none.
    """
    runs = [run for run in load(STEPS)["runs"] if BF16 in run["ms"] and "dp:5" in run["ms"]]
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


def steps_table() -> str:
    """Milliseconds of all ways by links and cards."""
    runs = load(STEPS)["runs"]
    lines = [("", *(f"{run['links']}, {run['cards']}" for run in runs))]
    for way, title in STEPS_OF.items():
        if any(way in run["ms"] for run in runs):
            cells = (milliseconds(run["ms"][way]) if way in run["ms"] else "" for run in runs)
            lines.append((title, *cells))
    return markdown(lines)


SCANNED_OF = {
    "none": "no gradient exchange",
    "bf16-psum": "bf16 psum",
    "bf16-zero": "bf16 ZeRO-1 by hand",
    "auto:5": "`dq.value_and_grad`, 5 bits",
    "explicit:5": "the same, Explicit axes",
    "dp:5": "`dq.scan`, data parallel",
    "zero:5/2.5": "`dq.optax.sharded`, 5 + 2.5 bits",
    "zero-explicit:5/2.5": "the same, Explicit axes",
    "zero-pipeline:5/2.5": "`dq.scan`, sharded",
    "zero-dear:5/2.5": "`dq.scan`, sharded, deferred",
    "zero-dear:few/few": "the same, `few_bits`",
    "xla-fsdp": "FSDP by XLA, bf16",
    "fsdp:5/8": "`dq.scan`, FSDP",
    "fsdp-keep:5/8": "the same, payloads kept",
}
"""Ways with scanned layers, by names of `ways.py` without that."""


def scanned_table() -> str:
    """Milliseconds and temporaries of ways whose layers are scanned, of two models.

    The last column has the largest model that fits.
    """
    by_way: list[dict[str, list[Any]]] = []
    for name in ("scanned", "scanned_7b", "first_step_16", "first_step_32", "largest"):
        by_way.append({})
        for row in load(f"{name}.json")["rows"]:
            by_way[-1].setdefault(row["method"].replace("-checkpoint-scanned", ""), []).append(row)
    *timed, programs, deeper, depths = by_way
    memory = load("largest.json")["memory_gib"] * 2**30
    lines = [("", "1.1 B, ms", "GiB", "first, s", "7 B, ms", "GiB", "largest, B")]
    for way, title in SCANNED_OF.items():
        cells: list[str] = []
        for rows in timed:
            (row,) = rows.get(way, [{}])
            times = [f"{row[k]:.1f}" for k in ("step_ms", "p10_ms", "p90_ms") if k in row]
            # The steps of 7 B are one sample.
            cells.append(milliseconds(times if rows is timed[0] else times[:1]) if times else "")
            cells.append(f"{row['temporary_bytes'] / 2**30:.1f}" if row else "")
        own = [row for found in (programs, deeper) for row in found.get(way, [])]
        cells.insert(2, ", ".join(f"{row['trace_s'] + row['compile_s']:.1f}" for row in own))
        sizes = [largest.Row(**row) for row in depths.get(way, [])]
        cells.append(f"{largest.largest(sizes, memory) / 1e9:.1f}" if sizes else "")
        lines.append((title, *cells))
    return markdown(lines)


def break_even_table() -> str:
    """Milliseconds of steps by rate, modelled and measured, and where bf16 wins."""
    found = load(STEPS)
    return f"{markdown(break_even.lines(found))}\n\n{break_even.sentence(found)}"


def report_table() -> str:
    """The steps that `dynamiq-jax report` measured on two hosts, and how."""
    found = load("report.json")
    lines = [["way", "ms", "MB"]]
    for row in found["steps"]:
        lines.append([row["way"], milliseconds(row["ms"]).replace(" ", ""), str(row["sent_mb"])])
    assert not found["warnings"] and all(row["equal"] for row in found["steps"])
    told = f"{found['links']}, {found['cards']}; JAX {found['jax']}, NCCL {found['nccl']}"
    return f"{markdown(lines)}\n\n*{told}.* `{found['command']}`"


def all_reduce_table() -> str:
    """Microseconds of sums at 5 bits, and how many times as fast as bf16 psum they are."""
    lines = [("links, GPUs", "size", "bf16 psum, µs", "5 bits, µs", "speed-up", "with a key")]
    before = None
    for row in load("all_reduce.json")["rows"]:
        psum, own, key = row["psum_us"], row["us"], row.get("key_us")
        place = f"{row['links']}, {row['cards']}"
        cells = [place if place != before else "", row["size"], f"{psum[0]:,}"]
        cells += [milliseconds(own), f"{psum[0] / own[0]:.2f}"]
        lines.append([*cells, f"{psum[0] / key[0]:.2f}" if key else ""])
        before = place
    return markdown(lines)


# --- Losses ---------------------------------------------------------------------------------------

LOSS_COLUMNS = {
    "1.1 M, GPT-2's start": ("tiny", "gpt2"),
    "1.1 M, unit": ("tiny", "unit"),
    "17 M, unit": ("mid", "unit"),
}
LOSS_ROWS = {
    "bf16-psum": "bf16 psum",
    "mxfp8": "MXFP8",
    "mxfp6": "MXFP6",
    "mxfp4": "MXFP4",
    "dynamiq-even:6": "6 bits, no plan",
    "dynamiq-planned:5": "5 bits, plan",
    "dynamiq-even:5": "5 bits, no plan",
    "dynamiq:4": "4 bits",
    "dynamiq:3.5": "3.5 bits",
    "dynamiq:3": "3 bits",
    "dynamiq-dither:4": "4 bits, dither",
    "dynamiq-dither:3.5": "3.5 bits, dither",
    "dynamiq-dither:3": "3 bits, dither",
    "dynamiq-planned:5/dynamiq-planned-dither:2.5": "sharded updates, 5 + 2.5, plans",
    "dynamiq-planned:5/dynamiq-even-dither:2.5": "5 + 2.5, plan of gradients",
    "dynamiq-even:5/dynamiq-even-dither:2.5": "5 + 2.5, no plan",
    "dynamiq-planned-dither:4/dynamiq-planned-dither:2.5": "4 with dither + 2.5, plans",
    "dynamiq-even-dither:4/dynamiq-even-dither:2.5": "4 with dither + 2.5, no plan",
    "dynamiq:5/dynamiq:8/whole": "FSDP, 5 + 8 bits",
}
MUON = "optax.contrib.muon"
OWNED = (("exact/exact", "exact"), ("dynamiq:5/dynamiq-dither:2.5", "5 + 2.5"))


def loss_table() -> str:
    """Losses by bits of AdamW over `Direct`, and of Muon."""
    found = {
        (r["model"], r["init"], r["method"], r["optimiser"]): (r["percent"], r["error"])
        for r in load("losses.json")["rows"]
        if r["topology"] != "ring" and r["seeds"] > 2
    }
    lines = [("", *LOSS_COLUMNS)]
    rows = [(*row, "adamw") for row in LOSS_ROWS.items()]
    rows.append(("dynamiq-planned:5", "Muon, 5 bits, plan", MUON))
    rows += [(method, f"Muon, sharded, {title}; 4 seeds", MUON) for method, title in OWNED]
    for row in load("sharded_muon.json")["rows"]:
        own, apart = row["settings"], row["summary"]["validation"]
        key = own["model"], own["init"], own["method"], own["optimiser"]
        found[key] = apart["percent"], apart["error"]
    for method, title, optimiser in rows:
        keys = ((*column, method, optimiser) for column in LOSS_COLUMNS.values())
        lines.append((title, *(with_error(*found[k]) if k in found else "" for k in keys)))
    return markdown(lines)


def packet_loss_table() -> str:
    """Losses if packets of gradients are lost."""
    titles = {"f32-packet-loss": "f32, 10% lost", "packet-loss:5": "5 bits, 10% lost"}
    titles |= {"dynamiq:5": "5 bits, none lost"}
    rows = [r for r in load("losses.json")["rows"] if r["seeds"] == 2 and r["method"] in titles]
    lines = [(titles[r["method"]], with_error(r["percent"], r["error"])) for r in rows]
    return markdown([("", "loss, %"), *lines])


class Losses(NamedTuple):
    """Rows of `training.py` that were trained alike, unit initialisation and AdamW, on a GPU."""

    file: str
    model: str
    steps: int


LARGE = Losses("time_to_accuracy_losses.json", "mid", 800)
M125 = Losses("training_125m.json", "125m", 200)
SHARDED = Losses("sharded_125m.json", "125m", 200)
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

    return found


def by_method(run: Row) -> dict[str, Row]:
    """The rows of one run of all-reduces by the method's name, bf16 psum first."""
    psum, *others = run["rows"]
    return {BF16: psum} | {row["method"].split()[0]: row for row in others}


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


def methods_table() -> str:
    """All methods: bits, error, losses of two models, and speed-ups over three transports.

    Sorted by the loss of the larger model, then by that of the other one.
    """
    errors = {row["method"]: f"{row['vnmse']:#.2g}" for row in load("errors.json")["rows"]}
    runs = load(TRANSPORTS)["runs"]
    times = [by_method(run) for run in runs]
    models = [{r["settings"]["method"]: r for r in loss_rows(kind)} for kind in (M125, LARGE)]
    aliases = {"thc:4": "thc", "omnireduce:8": "omnireduce"}

    def found_in(rows: Mapping[str, Any], method: str) -> Any:
        """The figure of the method, or of it without memory, which sends and errs the same."""
        plain = re.sub("-(memory|ef14|ef21)(?=:|$)", "", method)
        names = (method, plain, plain.partition(":")[0]) if plain != method else (method,)
        return next((rows[name] for name in names if name in rows), None)

    def order(method: str) -> list[float]:
        found = [own[method]["summary"]["validation"]["percent"] if method in own else 99.0
                 for own in models]  # fmt: skip
        return [100.0 if x is None else x for x in found]

    lines = [("method, name", "bits", "vNMSE", "loss, 123 M", "17 M", *(r["links"] for r in runs))]
    errors |= {aliases.get(name, name): value for name, value in errors.items()}
    for method in sorted({m for own in models for m in own} - {EXACT}, key=order):
        own = [rows.get(method) for rows in models]
        bits = next(row["bits_per_coord"] for row in own if row)
        cells = [titled(method), f"{bits:.2f}", found_in(errors, method) or ""]
        cells += [with_error(*row["summary"]["validation"].values()) if row else "" for row in own]
        for rows in times:
            row = found_in(rows, method)
            cells.append("" if row is None or method == BF16 else f"{row['speedup']:.2f}")
        lines.append(cells)
    return markdown(lines)


def error_table() -> str:
    """vNMSE of the paper's mixture by topology."""
    found: dict[str, dict[str, Row]] = {}
    for row in load("error.json")["rows"]:
        found.setdefault(row["method"], {})[row["topology"]] = row
    topologies = ("ring", "butterfly", "direct")
    lines = [("method, name", "bits", *topologies)]
    for method, own in found.items():
        cells = [f"{(own.get(t) or own['native'])['vnmse']:#.2g}" for t in topologies]
        bits = next(iter(own.values()))["bits_per_coord"]
        lines.append((titled(method), f"{bits:.2f}", *cells))
    return markdown(lines)


def simulated_table() -> str:
    """vNMSE by the number of workers."""
    rows = load("simulated.json")["rows"]
    counts = sorted({row["n_workers"] for row in rows})
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        own = found.setdefault((row["method"], row["topology"]), {})
        own[row["n_workers"]] = f"{row['vnmse']:.2g}"
    lines = [("name", "topology", *map(str, counts))]
    for (method, topology), own in found.items():
        lines.append((f"`{method}`", topology, *(own.get(n, "–") for n in counts)))
    return markdown(lines)


# --- Time to bf16's loss --------------------------------------------------------------------------

LOSSES_OF = {
    BF16: BF16,
    "bf16-zero": BF16,
    "bf16-fsdp": BF16,
    "dp:mxfp8": "mxfp8",
    "dp:mxfp4": "mxfp4",
    "auto:5": "dynamiq:5",
    "psum:5": "dynamiq:5",
    "dp:5": "dynamiq:5",
    "dp:4": "dynamiq:4",
    "zero:5/2.5": "dynamiq:5/dynamiq-dither:2.5",
    "zero-pipeline:5/2.5": "dynamiq:5/dynamiq-dither:2.5",
    "zero-dear:5/2.5": "dynamiq:5/dynamiq-dither:2.5",
    "zero-pipeline:4d/2.5": "dynamiq-dither:4/dynamiq-dither:2.5",
    "fsdp:5/8": "dynamiq:5/dynamiq:8/whole",
    "fsdp-keep:5/8": "dynamiq:5/dynamiq:8/whole",
}
"""Methods of `training.py` by ways of `ways.py`. Three ways take the mean of bf16 gradients."""
TIMED = [*README_LINKS.values(), ("NVLink", "2 × H200")]


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
    rows = [row for chosen in (M125, SHARDED) for row in loss_rows(chosen)]
    short = {row["settings"]["method"]: np.mean(row["training_loss"], axis=0) for row in rows}
    long = {
        row["method"].replace("bf16", BF16): np.reshape(row["training"], (-1, 2)).mean(axis=1)
        for row in load("long.json")["rows"]
        if row["against"] == "bf16"
        and len(row["training"]) == 46
        and "reversed" not in row["method"]
    }
    counts = steps_to_loss(short, CURVE_WINDOW), steps_to_loss(long, 100)
    times = [measured(*column) for column in TIMED]
    lines = [("", "steps, of 200", "of 2,300", *map(", ".join, TIMED))]
    for way, method in LOSSES_OF.items():
        if not any(way in own for own in times):
            continue
        ratio = max(steps[method] / steps[BF16] for steps in counts if method in steps)
        shares = [own.get(way, [math.nan])[0] / own[BF16][0] for own in times]
        cells = [f"{steps[method]:,.0f}" if method in steps else "" for steps in counts]
        lines.append([STEPS_OF[way], *cells, *(less(ratio * share) for share in shares)])
    return markdown(lines)


CLOCK = "against_the_clock.json"


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

LONG_TITLES = {
    "bf16-reversed": "bf16, in reverse order",
    "dynamiq:5": "5 bits",
    "dynamiq:5/dynamiq-dither:2.5": "sharded updates, 5 + 2.5 bits",
    "dynamiq:5/dynamiq:8/whole": "FSDP, 5 + 8 bits",
    "dynamiq:5/dynamiq:8/whole, then 4 workers": "FSDP, 4 workers from the middle on",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "dynamiq-dither:4/dynamiq-dither-1-2-3:2": "sharded updates, 4 + 2 bits, against 5 + 2.5",
}


def long_rows() -> dict[str, tuple[Row, Row]]:
    """Runs by method, each with the run that it is compared with."""
    rows = {row["method"]: row for row in load("long.json")["rows"]}
    return {name: (row, rows[row["against"]]) for name, row in rows.items()}


def long_table() -> str:
    """Differences at the end: of the mean over the last fifth of the steps, and of validation."""
    lines = [("", "tokens, M", "training loss, %", "validation, %")]
    rows = long_rows()
    for method, title in LONG_TITLES.items():
        if method not in rows:
            continue
        row, base = rows[method]
        n = len(row["training"])
        means = [np.mean(own["training"][n - n // 5 : n]) for own in (row, base)]
        at = len(row["validation"]) - 1
        last = [own["validation"][at] for own in (row, base)]
        cells = (f"{100 * (own / its - 1):+.2f}".replace("-", "−") for own, its in (means, last))
        lines.append((title, f"{n * row['tokens_each'] / 1e6:.0f}", *cells))
    return markdown(lines)


def long_training() -> Figure:
    """Training losses against bf16's by tokens; the band is the other order of summation."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (method, title) in enumerate(LONG_TITLES.items()):
        row, base = long_rows().get(method, (None, None))
        if row is None or base is None or row["against"] != "bf16":
            continue
        n = len(row["training"])
        apart = 100 * (np.array(row["training"]) / np.array(base["training"][:n]) - 1)
        tokens = row["tokens_each"] / 1e6 * np.arange(1, 1 + n)
        if method == "bf16-reversed":
            band = np.maximum.accumulate(np.abs(apart))
            axes.fill_between(tokens, -band, band, color="0.85", label="noise of bf16")
        else:
            axes.plot(tokens, apart, color=f"C{number}", label=title, linewidth=1)
    axes.set(ylim=(-0.5, 0.5), xlabel="tokens, millions", ylabel="training loss, % from bf16's")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
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
        if "micro" in title:  # twenty steps on a CPU, of the command that everyone can run
            continue
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


def top_1_lines() -> list[list[str]]:
    """Top-1 of held-out text beside bf16's, of each run under its title."""
    lines = []
    for title, rows in in_runs(TOP_1, ["steps"]).items():
        shares = [(100 * np.array(row["top1"], float)).tolist() for row in rows]
        lines += [[f"*next token: {title[1:]}"], *accuracies(rows, shares)]
    return lines


def accuracy_table() -> str:
    """Top-1 of held-out text, and accuracies of classifiers, beside bf16's."""
    lines = [HEADS, *top_1_lines()]
    for file, kind in ((FINETUNED, "four kinds of text"), (DIGITS, "digits, a ViT of 0.1 M")):
        for run in load(file).get("runs", [load(file)]):
            s, device = run["settings"], run["invocation"]["device"]
            title = f"{kind}, fine-tuned, {SIZES[s['model']]}" if "model" in s else kind
            place = "CPU" if device == "cpu" else device
            lines.append([f"*{title}, {s['steps']} steps, {s['seeds']} seeds, {place}*"])
            lines += accuracies(run["rows"], [row["accuracy"] for row in run["rows"]])
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


JAX = "JAX 0.11.2, NCCL 2.28.9"


def save(figure: Figure, name: str, dpi: int) -> None:
    """Writes a picture in 256 colours, which take a third of the bytes of all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi)
    Image.open(drawn).convert("RGB").quantize(256).save(DOCS / name, optimize=True)


def texts() -> dict[Path, str]:
    """The pages, as they should be."""
    model = "1.1 B parameters, 3,072 tokens per GPU"
    told = f"{model}; {JAX}; median ms, 10th to 90th percentile"
    steps = caption("steps", told) + " " + " ".join(load(STEPS)["notes"])
    blocks = {
        "steps": f"{steps_table()}\n\n{steps}",
        "scanned": f"{scanned_table()}\n\n" + caption(
            "scanned", "16 and 32 checkpointed layers, 3,072 tokens per GPU, two hosts of"
            f" one H200 at 25 Gb/s; {JAX}. GiB: temporaries; 7 B one sample; first: tracing and"
            " compiling 16, 32 layers on two GPUs; largest: fits 130 GiB, by XLA's analysis"),
        "break-even": break_even_table(),
        "report": report_table(),
        "all-reduce": all_reduce_table() + "\n\n" + caption(
            "all-reduce", f"one bf16 leaf per GPU, H200 with NV18 links; {JAX}")
        + " " + " ".join(load("all_reduce.json")["notes"]),
        "loss": loss_table() + "\n\n" + caption(
            "loss", "8 workers, `Direct`; 200 steps and 32 seeds (1.1 M), 400 steps and 8 or 32"
            " seeds (17 M); H200 and H100, JAX 0.11.2; sharded Muon: CPU, JAX 0.10.2"),
        "methods": methods_table() + "\n\n" + caption(
            "methods", "losses: `Direct`, unit start, 200 steps and 3 seeds (123 M), 800 steps and"
            " 8 seeds (17 M), H200, JAX 0.11.2; vNMSE: the paper's mixture, 8 workers, CPU; speed-"
            "ups: two H200, 256 MiB, sockets 64 MiB"),
        "workers": workers_table() + "\n\n" + caption("workers", "JAX 0.10.2 (CPU), 0.11.2 (GPU)"),
        "accuracy": accuracy_table() + "\n\n" + caption(
            "accuracy", "8 workers; JAX 0.10.2 (CPU), 0.11.2 (GPU)"),
        "less": time_to_loss_table(),
        "clock": clock_table() + "\n\n" + caption("clock", f"2 × H200; {JAX}"),
        "long": long_table() + "\n\n" + caption(
            "long", "123 M parameters, 64 sequences of 1,024 tokens in a step, one seed, H100 and"
            " H200, JAX 0.11.2; 80 to 85 M tokens of Python packages and Debian's documentation"
            " (`--text`)"),
        "packets": packet_loss_table() + "\n\n" + caption(
            "packets", "1.1 M parameters, 200 steps, 2 seeds, 8 workers, CPU, JAX 0.10.2"),
        "error": error_table() + "\n\n" + caption(
            "error", "vNMSE = |estimate − sum|² / |sum|² of the paper's mixture, 8 workers, 3"
            " seeds; CPU, JAX 0.10.2"),
        "simulated": simulated_table() + "\n\n" + caption(
            "simulated", "vNMSE, 256 super-groups, one draw; CPU, JAX 0.10.2"),
    }  # fmt: skip
    readme = {"ways": readme_table()}
    pages = {ROOT / "README.md": readme, DOCS / "results.md": blocks}
    return {path: filled(path.read_text(), own) for path, own in pages.items()}


def draw() -> None:
    """Writes the pages and their pictures."""
    load.cache_clear()
    for path, text in texts().items():
        path.write_text(text)
    save(speedups(), "speedups.png", dpi=160)
    save(clock(), "time-to-accuracy.png", dpi=160)
    save(long_training(), "long-training.png", dpi=140)


if __name__ == "__main__":
    draw()
