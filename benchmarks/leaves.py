"""Times one large leaf against several of the same bytes: buckets with plans of their own.

    python benchmarks/leaves.py [--size 1GiB] [--leaves 1,2,4] [--bits 5,4]

All GPUs of one process, bf16, `Direct`; medians.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from rich import print

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.advice import bench_settings, settings
from dynamiq_jax.commands.bench.all_reduce import make_mesh
from dynamiq_jax.commands.bench.contenders import parse_size


def main(
    size: Annotated[str, typer.Option(help="Of all leaves together, per device.")] = "1GiB",
    leaves: Annotated[str, typer.Option(help="How many.")] = "1,2",
    bits: Annotated[str, typer.Option(help="Wire bits per coordinate.")] = "5,4",
    repeats: Annotated[int, typer.Option(min=1, help="Samples per setting.")] = 8,
) -> None:
    """Measures and prints."""
    mesh, wanted = make_mesh(jax.devices()), list(map(float, bits.split(",")))
    for count in map(int, leaves.split(",")):
        leaf = jax.ShapeDtypeStruct((parse_size(size) // 2 // count,), jnp.bfloat16)
        tree = [leaf] * count
        chosen = settings(tree, mesh.devices.shape, wanted, [dq.Direct()])
        native, *rows = bench_settings(mesh, tree, chosen, repeats=repeats)
        print(f"{size} in {count}: bf16 psum {native.time_us:.0f} µs")
        for row in rows:
            speedup = native.time_us / row.time_us
            print(f"{size} in {count}: {row.bits:g} bits {row.time_us:.0f} µs, {speedup:.2f}x")


if __name__ == "__main__":
    typer.run(main)
