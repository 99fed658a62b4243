"""Times what `dq.all_to_all` computes on one GPU: encoding for all workers, and decoding of theirs.

    python benchmarks/exchange.py --mib 64 --workers 8

The exchange itself is left out: a worker decodes its own payloads. "fp8 cast" is the least that an
FP8 wire computes: a scale for each row of 4096 coordinates, a cast, and the way back. Bytes are
those on the wire over bf16's.
"""

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

import dynamiq_jax as dq
from dynamiq_jax.collectives.all_to_all import exchange_rows
from dynamiq_jax.commands.bench.timing import compile_calls, time_calls
from dynamiq_jax.core.axis import Axis


class Alone(Axis):
    """A worker that gets what it sends, as any other would, and counts the bytes."""

    sent = 0
    index = jnp.int32(0)

    def all_to_all(self, tree):
        """Nothing moves."""
        Alone.sent = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        return tree


def fp8_cast(x: jax.Array) -> jax.Array:
    """To float8_e4m3fn and back."""
    rows = x.reshape(-1, 4096).astype(jnp.float32)
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 448
    codes = jax.lax.optimization_barrier((rows / scale).astype(jnp.float8_e4m3fn))
    return (codes.astype(jnp.float32) * scale).astype(x.dtype).reshape(x.shape)


def main(
    mib: Annotated[float, typer.Option(help="bf16 activations of one worker")] = 64.0,
    workers: Annotated[int, typer.Option(min=2)] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
) -> None:
    """Prints microseconds, bytes and errors of every method."""
    x = jax.random.normal(jax.random.key(0), (workers, int(mib * 2**19) // workers), jnp.bfloat16)
    group = (tuple(range(workers)),)
    methods = {f"{width} bits": dq.DynamiQ(bits=width + 0.5) for width in (8, 7, 6, 5)}
    methods |= {"mxfp8": dq.comparators.MXFP8(), "bf16": dq.BF16()}
    works = {"x + 1": lambda x: x + 1, "fp8 cast": fp8_cast}
    for name, method in methods.items():
        works[name] = partial(
            exchange_rows.__wrapped__, seed=jnp.uint32(1), axis=Alone(("x",), group), method=method
        )
    calls = compile_calls([jax.jit(work) for work in works.values()], x)
    times = time_calls(calls, repeats=repeats, in_flight=8)
    wide = x.astype(jnp.float32)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {workers} workers, {mib:g} MiB")
    for name, call, time in zip(works, calls, times, strict=True):
        error = float(jnp.sum((call() - wide) ** 2) / jnp.sum(wide**2))
        text = f"{name:9} {time.median_us:8.1f} us ({time.p10_us:.1f} to {time.p90_us:.1f})"
        if name in methods:
            jax.eval_shape(lambda x, name=name: works[name](x), x)
            text += f"  {Alone.sent / x.nbytes:.3f} of the bytes"
        print(text + f"  error {error:.1e}" * (name != "x + 1"))


if __name__ == "__main__":
    typer.run(main)
