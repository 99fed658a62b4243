"""Draws the README's picture from measured times: speed-up over bf16 psum by links and bits.

    python benchmarks/evidence/plot_speedups.py

The script reads ``results/speedups.json`` beside it, whose figures stand with their hardware and
commands, and writes ``docs/speedups.png``.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure
from method_titles import colour, title

HERE = Path(__file__).resolve().parent
DATA = HERE / "results" / "speedups.json"
PICTURE = HERE.parents[1] / "docs" / "speedups.png"
BITS = ("5", "4", "3.5")


def speedups(row: dict) -> dict[str, float]:
    """How many times as fast as bf16 psum, by bits."""
    return {bits: row["psum_us"] / time for bits, time in row["bits_us"].items()}


def draw(data: dict) -> Figure:
    """Bars for every row, one for each number of bits, and a line where psum stands."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(BITS)
    for place, bits in enumerate(BITS):
        method = f"dynamiq:{bits}"
        heights = [speedups(row)[bits] for row in data["rows"]]
        at = [number + (place - 1) * width for number in range(len(heights))]
        bars = axes.bar(at, heights, 0.92 * width, color=colour(method), label=title(method))
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


if __name__ == "__main__":
    draw(json.loads(DATA.read_text())).savefig(PICTURE, dpi=160)
