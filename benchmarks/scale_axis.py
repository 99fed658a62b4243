"""Times what `DynamiQ(scale_axis=0)` costs: a transposition alone, and inside a training step.

    python benchmarks/scale_axis.py [--shape 16384,32768] [--tokens 4096]

All GPUs of one process. "alone" reduces one bf16 leaf; in "step" the leaf is the product of
activations and their gradients, and updates a parameter: there XLA may fold the transposition into
the product. Medians, and the 10th and 90th percentile.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich import print

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.all_reduce import make_mesh
from dynamiq_jax.commands.bench.timing import compile_calls, time_calls

ANY_SIZE = {"min_bucket_bytes": 0, "min_bucket_size": 1}
METHODS: dict[str, Any] = {
    "bf16": None,
    "5 bits": dq.DynamiQ(**ANY_SIZE),
    "5 bits, scale_axis=0": dq.DynamiQ(scale_axis=0, **ANY_SIZE),
    "4 bits, dither": dq.DynamiQ(bits=4.0, dither=True, **ANY_SIZE),
    "4 bits, dither, scale_axis=0": dq.DynamiQ(bits=4.0, dither=True, scale_axis=0, **ANY_SIZE),
}


def mean(gradient: Array, method: Any) -> Array:
    """By `lax.pmean`, or by a method."""
    if method is None:
        return jax.lax.pmean(gradient, "gpu")
    return dq.pmean(gradient, "gpu", method=method)


def step(args: tuple[Array, Array, Array], method: Any, reduce: Callable = mean) -> Array:
    """The parameter after one step."""
    activations, gradients, parameter = args
    product = jnp.einsum("btr,btc->rc", activations, gradients, preferred_element_type=jnp.float32)
    return parameter - 0.1 * reduce(product.astype(jnp.bfloat16), method)


def main(
    shape: Annotated[str, typer.Option(help="Of the leaf.")] = "16384,32768",
    tokens: Annotated[int, typer.Option(min=1, help="Per device.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Samples.")] = 8,
) -> None:
    """Measures and prints."""
    sizes = shape.split(",")
    if len(sizes) != 2 or not all(size.isdigit() for size in sizes):
        raise typer.BadParameter(f"--shape {shape!r}: pass two sizes, as 16384,32768")
    rows, columns = map(int, sizes)
    mesh = make_mesh(jax.devices())
    n = mesh.size
    own, whole = NamedSharding(mesh, P("gpu")), NamedSharding(mesh, P())

    def normal(size: tuple[int, ...], sharding: NamedSharding) -> Array:
        draw = partial(jax.random.normal, jax.random.key(0), size, jnp.bfloat16)
        return jax.jit(draw, out_shardings=sharding)()

    leaf = normal((n, rows, columns), own)
    parts = normal((n, tokens, rows), own), normal((n, tokens, columns), own)
    parts = (*parts, normal((rows, columns), whole))

    def program(f: Callable, in_specs: Any) -> Callable:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(in_specs,), out_specs=P(), check_vma=False)
        return jax.jit(mapped, compiler_options=dq.xla_options())

    def timed(what: str, programs: dict[str, Callable], x: Any) -> None:
        calls = compile_calls(list(programs.values()), x)
        timings = time_calls(calls, repeats=repeats, in_flight=5)
        for name, (median, p10, p90) in zip(programs, timings, strict=True):
            print(f"{what}, {name}: {median:.0f} µs ({p10:.0f}-{p90:.0f})")

    alone = {k: program(lambda x, m=m: mean(x[0], m), P("gpu")) for k, m in METHODS.items()}
    timed("alone", alone, leaf)
    specs = P("gpu"), P("gpu"), P()
    steps = {k: program(lambda x, m=m: step(x, m), specs) for k, m in METHODS.items()}
    steps["no all-reduce"] = program(lambda x: step(x, None, lambda g, _: g), specs)
    timed("step", steps, parts)


if __name__ == "__main__":
    typer.run(main)
