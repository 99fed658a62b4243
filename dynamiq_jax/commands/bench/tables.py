"""Rows of the benchmarks as a table on the terminal, or JSON in a file."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynamiq_jax.commands.options import printable
from pallas_kernels import peers


class Column(NamedTuple):
    """A column of the table: its title, with the unit, and the text of a row's cell."""

    title: str
    cell: Callable[[Any], str]
    is_text: bool = False
    """Whether it is aligned to the left."""


TIME_COLUMNS = (
    Column("time us", lambda r: f"{r.time_us:.1f}"),
    Column("p10-p90 us", lambda r: f"{r.p10_us:.1f}-{r.p90_us:.1f}"),
)

ALL_REDUCE_COLUMNS = (
    Column("size", lambda r: format_size(r.size_bytes)),
    Column("method", lambda r: r.method, True),
    *TIME_COLUMNS,
    Column("busbw GB/s", lambda r: f"{r.busbw_gb_per_s:.3g}"),
    Column("wire GB/s", lambda r: f"{r.wire_gb_per_s:.3g}"),
    Column("speedup", lambda r: f"{r.speedup:.2f}x"),
    Column("vNMSE", lambda r: f"{r.vnmse:.2e}"),
    Column("#wrong", lambda r: str(r.wrong)),
    Column("backend", lambda r: r.backend, True),
    Column("payloads by", lambda r: r.transport, True),
)

ERROR_COLUMNS = (
    Column("method", lambda r: r.method, True),
    Column("topology", lambda r: r.topology, True),
    Column("workers", lambda r: str(r.n_workers)),
    Column("bits/coordinate", lambda r: f"{r.bits_per_coord:.3f}"),
    Column("vNMSE", lambda r: f"{r.vnmse:.3e}"),
    Column("lowest-highest", lambda r: f"{r.lowest:.2e}-{r.highest:.2e}"),
)

LEAF_COLUMNS = (
    Column(
        "worst leaf's error",
        lambda r: "-" if r.worst_leaf_error is None else f"{r.worst_leaf_error:.3e}",
    ),
    Column("worst leaf", lambda r: r.worst_leaf or "-", True),
)


def setting_columns(native_us: float) -> list[Column]:
    """The columns of a table of settings beside native psum, which takes ``native_us``."""
    return [
        Column("setting", lambda r: r.label, True),
        *TIME_COLUMNS,
        Column("speedup", lambda r: f"{native_us / r.time_us:.2f}x"),
        Column("wire MB", lambda r: f"{r.wire_bytes / 1e6:,.4g}"),
        Column("compressed", lambda r: f"{r.compressed:.0%}"),
        Column("error", lambda r: f"{r.relative_error:.2g}" if r.relative_error else "-"),
        Column("payloads by", lambda r: r.transport, True),
    ]


def format_size(size_bytes: int) -> str:
    """``size_bytes`` in the largest binary unit that leaves at least 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g}{unit}"
    return f"{size_bytes}B"


def nccl_version() -> str | None:
    """The version of the NCCL that this process has loaded or would load; `None` without one."""
    version = peers.nccl_version()
    return None if version is None else ".".join(map(str, version))


def surroundings(devices: Sequence[Any]) -> dict[str, Any]:
    """Facts that belong to the numbers: versions, devices, and the options of NCCL and XLA."""
    told = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "XLA_FLAGS"))}
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "nccl": nccl_version() if devices[0].platform == "gpu" else None,
        "platform_version": " ".join(devices[0].client.platform_version.split()),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "n_devices": len(devices),
        "environment": told,
    }


def report(
    rows: Sequence[Any],
    columns: Sequence[Column],
    title: str,
    devices: Sequence[Any],
    file: Path | None = None,
) -> None:
    """Prints rows and versions; writes ``{"about": ..., "rows": [...]}`` to a JSON file.

    Markup in names of users is printed as it is.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # wide enough for every column
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify = "left" if column.is_text else "right"
        table.add_column(column.title, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(column.cell(row))) for column in columns))
    console.print(printable(title), highlight=False, markup=False)
    console.print(table)
    about = surroundings(devices)
    told = [f"{name} {about[name]}" for name in ("jax", "jaxlib", "nccl") if about[name]]
    told += [about["platform_version"], *(f"{k}={v}" for k, v in about["environment"].items())]
    typer.echo(printable("; ".join(told)))
    if file is not None:
        fields = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row)} for row in rows]
        document = {"about": about, "rows": fields}
        file.write_text(json.dumps(document, indent=1, default=repr) + "\n")
