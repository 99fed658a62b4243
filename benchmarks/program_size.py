"""The size of the program of one `psum`: seconds to trace and to lower, and lines of StableHLO.

    python benchmarks/program_size.py --workers 8,64,256 --compile
    python benchmarks/program_size.py --workers 8,64,256 --platform cuda    # without a GPU

Nothing runs, and nothing is compiled without ``--compile``, which adds the seconds that XLA takes
for CPUs and the temporary memory of one device. Virtual devices stand for the workers. Seconds are
of the CPU, all threads together. The trees are one leaf of 11.5 M coordinates, 291 leaves of 1.6 G
coordinates like those of a LLaMA, and such as ``50x1024x1024``, 50 leaves of that shape.
`lax.pmean` is beside every tree.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Any
from unittest import mock

import typer

HEAD = "| tree | workers | | trace, s | lower, s | lines |"
MORE = " compile, s | temporaries, MiB |"


def llama() -> dict[str, tuple[int, ...]]:
    """The shapes of 291 leaves: 32 layers of nine, and three around them."""
    layer = {"q": (2048, 2048), "k": (2048, 512), "v": (2048, 512), "o": (2048, 2048)}
    layer |= {"gate": (2048, 5632), "up": (2048, 5632), "down": (5632, 2048)}
    layer |= {"norm": (2048,), "mlp_norm": (2048,)}
    found = {f"layers/{i}/{name}": shape for i in range(32) for name, shape in layer.items()}
    return found | {"embed": (32_000, 2048), "head": (2048, 32_000), "norm": (2048,)}


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves of a tree, by its name or as ``50x1024x1024``."""
    if text == "llama":
        return llama()
    count, *shape = [1, 11_534_336] if text == "leaf" else map(int, text.split("x"))
    return {f"{i:03}": tuple(shape) for i in range(count)}


def main(
    workers: Annotated[str, typer.Option(help="numbers of workers")] = "8,64,256",
    topologies: Annotated[str, typer.Option(help="some of them")] = "Direct,Ring,Butterfly",
    trees: Annotated[str, typer.Option(help="leaf, llama, 50x1024x1024")] = "leaf,llama",
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate.")] = 5.0,
    platform: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="and compile")] = False,
) -> None:
    """Traces, lowers, compiles if told to, and prints a table."""
    if compiled and platform != "cpu":
        raise typer.BadParameter("only programs for CPUs are compiled here", param_hint="--compile")
    counts = [int(text) for text in workers.split(",")]
    flags = f"--xla_force_host_platform_device_count={max(counts)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    import dynamiq_jax as dq
    import pallas_kernels.backend

    if platform == "cuda":  # as if GPUs were there: which kernels are lowered follows from it
        mock.patch.object(pallas_kernels.backend, "_on_nvidia", lambda: True).start()
        mock.patch.object(jax, "default_backend", lambda: "gpu").start()

    def cells(tree: str, n: int, mean: Any) -> Iterator[str]:
        mesh = jax.sharding.Mesh(jax.devices()[:n], ("data",))
        split = jax.NamedSharding(mesh, jax.P("data"))
        args = {
            k: jax.ShapeDtypeStruct((n, *s), jnp.float32, sharding=split)
            for k, s in shapes_of(tree).items()
        }

        def one(tree: Any) -> Any:
            return mean(jax.tree.map(lambda x: x[0], tree), "data")

        mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
        times = [time.process_time()]
        traced = mapped.trace(args)
        times.append(time.process_time())
        lowered = traced.lower(lowering_platforms=(platform,))
        lines = lowered.as_text().count("\n")
        times.append(time.process_time())
        yield from (f"{after - before:.1f}" for before, after in pairwise(times))
        yield f"{lines:,}"
        if compiled:
            memory = lowered.compile().memory_analysis()
            yield f"{time.process_time() - times[-1]:.1f}"
            yield f"{memory.temp_size_in_bytes / 2**20:,.0f}"

    means: dict[str, Any] = {"`lax.pmean`": jax.lax.pmean}
    for name in topologies.split(","):
        request = dq.Compression(dq.DynamiQ(bits=bits), topology=getattr(dq, name)())
        means[f"`{name}`"] = partial(dq.pmean, method=request)
    head = HEAD + MORE if compiled else HEAD
    print(head, "|---" * (head.count("|") - 1) + "|", sep="\n")
    for tree in trees.split(","):
        for n in counts:
            for name, mean in means.items():
                row = " | ".join([tree, f"{n}", name, *cells(tree, n, mean)])
                print(f"| {row} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
