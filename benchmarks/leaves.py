"""Times one large leaf against several of the same bytes: buckets with plans of their own.

    python benchmarks/leaves.py [--size 1GiB] [--leaves 1,2,4] [--bits 5,4]

All GPUs of one process, bf16, `Direct`, medians of batches of ten calls.
"""

import statistics
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich import print

import dynamiq_jax as dq
from dynamiq_jax.bench.contenders import parse_size

AXIS = "gpu"
BATCHES, CALLS = 8, 10


def time_us(reduce, tree, mesh: Mesh) -> float:
    """Microseconds of one all-reduce of a tree whose leaves have a row for every device."""

    def local(tree, key):
        return reduce(jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree), key)

    specs = {"in_specs": (PartitionSpec(AXIS), PartitionSpec()), "out_specs": PartitionSpec()}
    mapped = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    run = jax.jit(mapped, compiler_options=dq.xla_options() or None)
    key, times = jax.random.key(0), []
    jax.block_until_ready(run(tree, key))
    for _ in range(BATCHES):
        start = time.perf_counter()
        jax.block_until_ready([run(tree, key) for _ in range(CALLS)])
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def main(
    size: Annotated[str, typer.Option(help="Of all leaves together, per device.")] = "1GiB",
    leaves: Annotated[str, typer.Option(help="How many.")] = "1,2",
    bits: Annotated[str, typer.Option(help="Wire bits per coordinate.")] = "5,4",
) -> None:
    """Measures and prints."""
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,))
    shards = NamedSharding(mesh, PartitionSpec(AXIS))
    for count in map(int, leaves.split(",")):
        shape = mesh.size, parse_size(size) // 2 // count
        draw = jax.jit(
            lambda key, shape=shape: jax.random.normal(key, shape, jnp.bfloat16),
            out_shardings=shards,
        )
        tree = [draw(key) for key in jax.random.split(jax.random.key(1), count)]
        native = time_us(lambda tree, key: lax.psum(tree, AXIS), tree, mesh)
        print(f"{size} in {count}: bf16 psum {native:.0f} µs")
        for width in map(float, bits.split(",")):
            method = dq.DynamiQ(bits=width, min_bucket_bytes=0)

            def reduce(tree, key, method=method):
                return dq.psum(tree, AXIS, method=method, topology=dq.Direct(), key=key)

            found = time_us(reduce, tree, mesh)
            print(f"{size} in {count}: {width:g} bits {found:.0f} µs, {native / found:.2f}x")


if __name__ == "__main__":
    typer.run(main)
