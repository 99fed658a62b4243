"""One page of HTML about runs of ``train_llm.py``: losses, bytes, milliseconds, replicas.

The page needs no other file and no network.
"""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

COLORS = ("#0b6e99", "#d9730d", "#6c6c6c")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56em; margin: 2em auto; color: #222 }
td, th { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { width: 100%; border: 1px solid #ddd }
"""
COLUMNS = (
    "method", "validation loss", "against bf16", "kB sent per step", "first step, ms",
    "median step, ms", "90th percentile, ms", "replicas checked",
)  # fmt: skip


def row(result: Any, bf16: Any | None) -> list[str]:
    """The cells of one run, in the order of `COLUMNS`; a dash for what was not measured."""
    against = "–"
    if bf16 is not None:
        against = f"{100 * (result.validation_loss / bf16.validation_loss - 1):+.2f}%"
    sent = f"{result.wire_bytes / 1e3:,.1f}" if np.isfinite(result.wire_bytes) else "–"
    first, *later = [1e3 * seconds for seconds in result.seconds]  # the first step compiles
    steps = [f"{np.percentile(later, q):.1f}" if later else "–" for q in (50, 90)]
    checked = "–"
    if result.replicas is not None:
        equal = "all equal" if not result.replicas_differ else f"{result.replicas_differ} DIFFER"
        checked = f"{result.replicas}, {equal}"
    loss = f"{result.validation_loss:.4f}"
    return [result.method, loss, against, sent, f"{first:.1f}", *steps, checked]


def curves(results: Sequence[Any]) -> str:
    """Training losses by step, as SVG, with a legend."""
    width, height = 800, 260
    finite = [loss for r in results for loss in r.losses if np.isfinite(loss)] or [0.0]
    low, high = min(finite), max(finite)
    lines = []
    for place, (r, color) in enumerate(zip(results, COLORS, strict=False)):
        x = np.linspace(50, width - 10, len(r.losses))
        y = 10 + (height - 40) * (high - np.array(r.losses)) / ((high - low) or 1)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        name, at = html.escape(r.method), 30 + 20 * place
        lines.append(f'<text x="{width - 90}" y="{at}" fill="{color}">{name}</text>')
    last = len(results[0].losses)
    lines.append(f'<text x="5" y="20">{high:.2f}</text>')
    lines.append(f'<text x="5" y="{height - 30}">{low:.2f}</text>')
    lines.append(f'<text x="50" y="{height - 8}">step 1</text>')
    lines.append(f'<text x="{width - 80}" y="{height - 8}">step {last}</text>')
    return f'<svg viewBox="0 0 {width} {height}" font-size="13">{"".join(lines)}</svg>'


def page(results: Sequence[Any], title: str) -> str:
    """The page. Results are those of ``train_llm.py``, with at least one step each."""
    bf16 = next((r for r in results if r.method == "bf16"), None)
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    cells = [[html.escape(cell) for cell in row(r, bf16)] for r in results]
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in own)}</tr>\n" for own in cells)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
<table><tr>{head}</tr>
{body}</table>
<p>The first step compiles. A replica is a device's copy of a parameter, or of its shard; it is
compared bit by bit with the first copy after the last step.</p>
<h2>Training loss (nats per token)</h2>
{curves(results)}
</html>
"""
