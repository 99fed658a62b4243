"""`dynamiq-jax explain`: which leaf of a model travels how, and what the ways to train send."""

from collections.abc import Sequence
from typing import Annotated

import jax
import typer

import dynamiq_jax as dq
from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.commands.model_tree import read_model
from dynamiq_jax.commands.options import checked
from dynamiq_jax.request.ways import Way

ROOM = 0.6
"""The share of a device's memory that parameters, optimizer and gradients may take."""


def command(
    model: options.Model,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers (default: the devices here).")
    ] = None,
    nodes: options.Nodes = 1,
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate.")] = 5.0,
    topology: Annotated[
        str | None,
        typer.Option(help="direct, ring, butterfly, hierarchical (default: as psum takes it)."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rate of a worker's link, as 25gbit, for wire times.")
    ] = None,
) -> None:
    """Print which leaf is compressed, what a worker sends and keeps, and how to train by bytes.

    Nothing is measured.
    """
    name, tree = checked("MODEL", read_model, model)
    route = topology and checked("--topology", contenders.parse_topology, topology, nodes)
    method = checked("--bits", dq.DynamiQ, bits=bits)
    n = workers or jax.device_count()
    if n % nodes:
        raise typer.BadParameter(
            f"{n} workers are not {nodes} equal nodes: pass a divisor of {n}", param_hint="--nodes"
        )
    found = checked(
        "--topology --rate",
        dq.explain,
        tree,
        n if nodes == 1 else (nodes, n // nodes),
        method=method,
        topology=route or None,
        rate=rate,
        verbose=False,
    )
    typer.echo(options.without_control(f"{name}: {found}"))
    if found.ways:
        stats = jax.devices()[0].memory_stats() or {}
        typer.echo("\n" + choose_way(found.ways, stats.get("bytes_limit")))


def choose_way(found: Sequence[Way], memory_bytes: int | None) -> str:
    """The way to train, of those that `dq.explain` compares by bytes, in sentences.

    Args:
      found: data parallel, sharded updates, FSDP.
      memory_bytes: those of a device; `None` if it does not tell.
    """
    whole = [way for way in found if way.name != "FSDP"]
    room = ROOM * (memory_bytes or float("inf"))
    fits = [way for way in whole if way.kept_bytes + way.gradient_bytes <= room]
    if not fits:
        least = min(way.kept_bytes + way.gradient_bytes for way in whole)
        return (
            f"Train with FSDP (dq.reduce_in_backward): whole parameters with gradients take at "
            f"least {least / 1e9:,.4g} GB, and {ROOM:.0%} of a device's memory are "
            f"{room / 1e9:,.4g}."
        )
    chosen = min(fits, key=lambda way: way.sent_bytes)
    said = f"Train with {chosen.name} ({chosen.call})"
    if chosen.name == "sharded updates":
        said += (
            ", if the optimizer's update of a coordinate depends on this coordinate alone, as in "
            "AdamW, Lion and SGD; else data parallel"
        )
    return f"{said}. This goes by bytes: nothing was timed."
