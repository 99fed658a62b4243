"""Tables and plots of `training.py`, from the rows that it keeps.

    python benchmarks/evidence/training_report.py

This command draws ``docs/training-quality.png``: AdamW's losses with 1.1 M and 17 M parameters over
`Direct` and `Ring`, from ``results/dither.json`` and, where that has no row,
``results/training.json``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from method_titles import colour, title
from rich.console import Console
from rich.table import Column, Table

Row = dict[str, Any]

PLAIN_WIDTH = 120
"""Characters of a line where the output is not a terminal."""

COLUMNS = (
    "method", "topology", "wire bits", "validation loss", "difference %", "early %", "vNMSE",
    "worst leaf", "which",
)  # fmt: skip

TEXT = """\
# What a quantised all-reduce does to the training loss

Measured by these commands, whose script and files are in `benchmarks/evidence/` today:

{invocations}

Every method trains from the same starts on the same tokens as the exact mean in f32. Wire bits are
those of a coordinate, metadata included, in units in which a bf16 all-reduce takes 16. Difference:
mean over seeds of 100 (loss / loss of the exact mean − 1) after the last step, on validation text,
± its standard error; "-" where one seed has none. Early: the same of the training loss, averaged
over the 50 steps that follow the first quarter. vNMSE: |mean − exact mean|² / |exact mean|² of the
compressed leaves, averaged over steps. Worst leaf: the largest of these figures of a single leaf.
"""

PANEL = ("model", "init", "optimiser", "learning_rate", "workers", "steps", "seeds")
"""Settings that rows of one table, and of one panel of the plot, have in common."""


def compared(row: Row, name: str) -> str:
    """A row's difference in % from the exact row, with its standard error."""
    figure = row["summary"][name]
    if figure["percent"] is None:
        return "diverged"
    error = "-" if figure["error"] is None else f"{figure['error']:.3f}"
    return f"{figure['percent']:+.3f} ± {error}"


def cells(row: Row) -> list[str]:
    """A row's texts under `COLUMNS`."""
    summary, settings = row["summary"], row["settings"]
    exact = not summary["worst_leaf"]
    figures = [_figure(summary[name]) for name in ("vnmse", "worst_leaf")]
    loss = summary["validation_loss"]
    return [
        settings["method"], settings["topology"], f"{row['bits_per_coord']:.2f}",
        "diverged" if loss is None else f"{loss:.4f}",
        compared(row, "validation"), compared(row, "early"), *figures,
        "" if exact else row["worst_leaf_name"],
    ]  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def panels(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Rows by what they have in common."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row["settings"][name] for name in PANEL), []).append(row)
    return found


def titles(key: tuple) -> tuple[str, str]:
    """A panel's title of two lines, from what its rows share."""
    model, init, optimiser, rate, workers, steps, seeds = key
    plural = "" if seeds == 1 else "s"
    counts = f"learning rate {rate:g}, {workers} workers, {steps} steps, {seeds} seed{plural}"
    return f"{model}, {init}, {optimiser}", counts


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Prints a table for every panel."""
    for key, own in panels(rows).items():
        names = (Column(n, justify="left" if n in COLUMNS[:2] else "right") for n in COLUMNS)
        table = Table(*names, box=None, pad_edge=False)
        for row in own:
            table.add_row(*cells(row))
        console.print(": ".join(titles(key)), highlight=False)
        console.print(table)


def write_table(file: Path, invocations: Sequence[Mapping[str, str]], rows: Sequence[Row]) -> None:
    """Writes all rows as Markdown, under the commands and machines that they come from."""
    origins = [
        f"    {of['command']}\n\n{of['started']}: {of['device']}, {of['host']}; {of['versions']}"
        for of in invocations
    ]
    lines = [TEXT.format(invocations="\n\n".join(origins))]
    for key, own in panels(rows).items():
        title, counts = titles(key)
        table = markdown([COLUMNS, *map(cells, own)])
        lines += [f"## {title}", "", f"{counts[0].upper()}{counts[1:]}.", "", table, ""]
    file.write_text("\n".join(lines))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first line is its head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


WAYS = {"butterfly": "over Butterfly", "direct": "over Direct", "ring": "over Ring"}
STYLES = {"direct": "o-", "ring": "s--", "butterfly": "^:", "native": "D-."}
X_TICKS = (2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16, 32)
MODEL_TITLES = {"tiny": "1.1 M parameters", "mid": "17 M parameters", "125m": "125 M parameters"}
INIT_TITLES = {"gpt2": "GPT-2's initialisation", "unit": "unit variance"}


def plot(file: Path, rows: Sequence[Row]) -> None:
    """Difference of the validation loss against wire bits: colours are methods, dashes topologies.

    Rows that diverged have no difference and are not drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = [row for row in rows if row["settings"]["method"] != "exact"]
    drawn = [row for row in drawn if row["summary"]["validation"]["percent"] is not None]
    groups = panels(drawn)
    across = min(len(groups), 2) or 1
    down = -(-len(groups) // across) or 1
    figure = Figure(figsize=(4 * across, 3.1 * down + 1.2), layout="constrained")
    grid: Any = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (key, own) in zip(grid, groups.items(), strict=False):
        for name, topology in dict.fromkeys(map(_curve, own)):
            points = sorted((r for r in own if _curve(r) == (name, topology)), key=_bits)
            differences = [row["summary"]["validation"] for row in points]
            axes.errorbar(
                [_bits(row) for row in points],
                [d["percent"] for d in differences],
                [d["error"] or 0.0 for d in differences],
                color=colour(name), fmt=STYLES.get(topology, "x-"), capsize=2, markersize=4,
                linewidth=1.2,
            )  # fmt: skip
        bits = [_bits(row) for row in own]
        ticks = [t for t in X_TICKS if 0.9 * min(bits) <= t <= 1.1 * max(bits)]
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(min(-0.05, 2 * min(r["summary"]["validation"]["percent"] for r in own)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
        axes.set_xlabel("wire bits per coordinate")
        axes.set_title(_heading(key), fontsize=9)
        axes.grid(alpha=0.3)
    for axes in grid[len(groups) :]:
        axes.set_axis_off()
    figure.supylabel("validation loss, difference from the exact mean in %", fontsize="medium")
    names = sorted({name for name, _ in map(_curve, drawn)}, key=title)
    lines = {title(name): Line2D([], [], color=colour(name), linewidth=3) for name in names}
    for way in sorted({way for _, way in map(_curve, drawn)} & {*WAYS}):
        marker, dashes = STYLES[way][0], STYLES[way][1:]
        lines[WAYS[way]] = Line2D([], [], color="grey", marker=marker, linestyle=dashes)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=200)


def _heading(key: tuple) -> str:
    model, init, optimiser, *_ = key
    names = [MODEL_TITLES.get(model, model), INIT_TITLES.get(init, init)]
    names += [optimiser] * (optimiser != "adamw")
    return f"{', '.join(names)}\n{titles(key)[1]}"


def _bits(row: Row) -> float:
    return row["bits_per_coord"]


def _curve(row: Row) -> tuple[str, str]:
    """The method without its bits, and the topology."""
    return row["settings"]["method"].partition(":")[0], row["settings"]["topology"]


OF_THE_PAGE = (
    "dynamiq", "dynamiq-dither", "dynamiq-dither-axis", "dynamiq-mse", "mxfp8", "mxfp6", "mxfp4",
    "bf16-psum",
)  # fmt: skip
"""Methods of the page's picture, without their bits."""


def rows_of_the_page() -> list[Row]:
    """Rows of the page's picture; the first file that has one counts."""
    results = Path(__file__).resolve().parent / "results"
    found: dict[tuple, Row] = {}
    for file in ("dither.json", "training.json"):
        for row in json.loads((results / file).read_text())["rows"]:
            s, (name, topology) = row["settings"], _curve(row)
            wanted = s["model"] in ("tiny", "mid") and s["optimiser"] == "adamw"
            if wanted and name in OF_THE_PAGE and topology != "butterfly":
                key = *(s[part] for part in PANEL), s["method"], topology
                found.setdefault(key, row)
    return list(found.values())


if __name__ == "__main__":
    plot(Path(__file__).resolve().parents[2] / "docs" / "training-quality.png", rows_of_the_page())
