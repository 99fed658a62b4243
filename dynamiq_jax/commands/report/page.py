"""The page of a report: a function of what its JSON holds."""

from collections.abc import Sequence
from typing import Any

from dynamiq_jax.commands.bench.tables import format_size
from dynamiq_jax.commands.options import printable
from dynamiq_jax.commands.report.hosts import VERSIONS


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    hosts, mesh = report["processes"], " x ".join(map(str, report["mesh"]))
    count = len({own["host"] for own in hosts})
    kinds = ", ".join(sorted({own["kind"] for own in hosts}))
    lines = [
        "# Report of dynamiq-jax",
        f"{mesh} x {kinds}, {count} host(s), {len(hosts)} process(es); {report['seconds']:.0f} s.",
    ]
    if report["on_cpu"]:
        lines.append("CPU devices: a check that all runs. No time says anything about GPUs.")
    lines += ["## Warnings", _listed(report["warnings"]) or "None."]
    lines += ["## Links", _links(report), report["route"]]
    lines += ["## Versions", _versions(hosts)]
    lines += ["## All-reduces of one bf16 leaf", _all_reduces(report["all_reduces"])]
    lines += _listed(report["left_out"]) and [_listed(report["left_out"])] or []
    lines += ["## A step of training", _about(report["model"]), _steps(report["steps"])]
    return "\n\n".join(lines) + "\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    ruled = [titles, ["---"] * len(titles), *rows]
    cells = [[printable(str(cell)).replace("|", "\\|") for cell in row] for row in ruled]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(f"* {printable(text)}" for text in texts)


def _links(report: dict[str, Any]) -> str:
    rows = []
    for own in report["processes"]:
        network, rdma = own["network"], own["rdma"]
        ports = [f"{port['device']} ({port['kind']}, {port['rate']})" for port in rdma]
        ports += [f"{name} ({rate})" for name, rate in own["nics"].items()]
        used = [f"{name}: {count}" for name, count in network["connections"].items()]
        nvlink = {True: "yes", False: "no", None: "-"}[own["nvlink"]]
        rows.append(
            [own["process"], own["host"], own["devices"], " ".join(map(str, own["slices"])), nvlink]
            + [", ".join(x) or "-" for x in (ports, network["networks"], used)]
        )
    titles = ["process", "host", "devices", "slice", "all by NVLink", "cards that are up"]
    return table([*titles, "NCCL's network", "its channels"], rows)


def _versions(hosts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name in VERSIONS:
        values = dict.fromkeys(str(own[name]) for own in hosts if own[name] is not None)
        rows += [[name, " / ".join(values)]] if values else []
    variables = hosts[0]["variables"].items()
    return table(["what", "version"], [*rows, *([name, value] for name, value in variables)])


def _all_reduces(rows: Sequence[dict[str, Any]]) -> str:
    titles = [
        "size",
        "method",
        "ms",
        "p10 to p90",
        "speed-up",
        "busbw GB/s",
        "error",
        "bits differ",
    ]
    return table(titles, [
        [
            format_size(row["size_bytes"]), row["method"], *_times(row), f"{row['speedup']:.2f}",
            f"{row['busbw_gb_per_s']:.3g}", f"{row['vnmse']:.2e}", row["wrong"],
        ]
        for row in rows
    ])  # fmt: skip


def _steps(rows: Sequence[dict[str, Any]]) -> str:
    titles = ["way", "ms", "p10 to p90", "speed-up", "MB sent", "loss", "hash of all parameters"]
    return table(titles, [
        [
            row["way"], *_times(row), f"{row['speedup']:.2f}", f"{row['sent_bytes'] / 1e6:,.4g}",
            f"{row['loss']:.4f} after {row['steps']} steps", _hash(row["hashes"]),
        ]
        for row in rows
    ])  # fmt: skip


def _times(row: dict[str, Any]) -> list[str]:
    ms = [row[name] / 1e3 for name in ("time_us", "p10_us", "p90_us")]
    return [f"{ms[0]:.4g}", f"{ms[1]:.4g} to {ms[2]:.4g}"]


def _hash(hashes: Sequence[str]) -> str:
    each = dict.fromkeys(hashes)
    if len(each) == 1:
        return f"{hashes[0]} on all {len(hashes)} workers"
    return f"DIFFER: {', '.join(hashes)}"


def _about(model: dict[str, int]) -> str:
    return (
        f"{model['parameters']:,} parameters: {model['blocks']} residual blocks of two "
        f"matrices, {model['width']} x {model['hidden']}, in bf16; AdamW; {model['rows']:,} rows "
        "for each worker. Gradients travel after the backward pass in all ways."
    )
