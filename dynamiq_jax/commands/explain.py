"""`dynamiq-jax explain`: which leaf of a model travels how, and what the ways to train send."""

from typing import Annotated

import jax
import typer

import dynamiq_jax as dq
from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.commands.models import read_model
from dynamiq_jax.commands.options import checked


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
        str | None, typer.Option(help="Rate of a host's link, as 25gbit or 25Gb/s, for wire times.")
    ] = None,
) -> None:
    """Print which leaf is compressed, and what a worker sends and keeps by way to train.

    Nothing is measured.
    """
    name, tree = checked("MODEL", read_model, model)
    route = None
    if topology is not None:
        route = checked("--topology", contenders.parse_topology, topology, nodes)
    method = checked("--bits", dq.DynamiQ, bits=bits, remedy="pass other --bits, 5 by default")
    n = workers or jax.device_count()
    if n % nodes:
        raise typer.BadParameter(
            f"{n} workers are not {nodes} equal nodes: pass a divisor of {n}", param_hint="--nodes"
        )
    sizes = n if nodes == 1 else (nodes, n // nodes)
    explain = dq.Compression(method, topology=route).explain
    found = checked("--topology --rate", explain, tree, sizes, rate=rate, verbose=False)
    typer.echo(options.without_control(f"{name}: {found}"))
