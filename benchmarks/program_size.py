"""The size of the program of one `psum`: seconds to trace and to lower, and lines of StableHLO.

    python benchmarks/program_size.py --workers 8,64,256
    python benchmarks/program_size.py --workers 8,64,256 --platform cuda    # without a GPU

Nothing is compiled or run: virtual CPU devices stand for the workers, whatever the platform. The
trees are one leaf of 11.5 M coordinates, and 291 leaves of 1.5 G coordinates like those of a LLaMA.
`lax.pmean` is beside every tree.
"""

import os
import time
from typing import Annotated, Any
from unittest import mock

import typer

TOPOLOGIES = "Direct,Ring,Butterfly"


def llama() -> dict[str, tuple[int, ...]]:
    """The shapes of 291 leaves: 32 layers of nine, and three around them."""
    layer = {"q": (2048, 2048), "k": (2048, 512), "v": (2048, 512), "o": (2048, 2048)}
    layer |= {"gate": (2048, 5632), "up": (2048, 5632), "down": (5632, 2048)}
    layer |= {"norm": (2048,), "mlp_norm": (2048,)}
    found = {f"layers/{i}/{name}": shape for i in range(32) for name, shape in layer.items()}
    return found | {"embed": (32_000, 2048), "head": (2048, 32_000), "norm": (2048,)}


def main(
    workers: Annotated[str, typer.Option(help="numbers of workers")] = "8,64,256",
    topologies: Annotated[str, typer.Option(help="some of them")] = TOPOLOGIES,
    trees: Annotated[str, typer.Option(help="leaf, llama")] = "leaf,llama",
    bits: float = 5.0,
    platform: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Traces, lowers and prints a table."""
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

    P = jax.P
    shapes = {"leaf": {"w": (11_534_336,)}, "llama": llama()}

    def row(tree: str, n: int, name: str, mean: Any) -> None:
        mesh = jax.make_mesh(
            (n,), ("data",), devices=jax.devices()[:n], axis_types=(jax.sharding.AxisType.Auto,)
        )
        args = {k: jax.ShapeDtypeStruct((n, *s), jnp.float32) for k, s in shapes[tree].items()}

        def one(tree: Any) -> Any:
            return mean(jax.tree.map(lambda x: x[0], tree))

        mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P()))
        start = time.perf_counter()
        traced = mapped.trace(args)
        middle = time.perf_counter()
        lines = traced.lower(lowering_platforms=(platform,)).as_text().count("\n")
        seconds = middle - start, time.perf_counter() - middle
        print(
            f"| {tree} | {n} | {name} | {seconds[0]:.1f} | {seconds[1]:.1f} | {lines:,} |",
            flush=True,
        )

    print("| tree | workers | | trace, s | lower, s | lines |\n|---|---|---|---|---|---|")
    for tree in trees.split(","):
        for n in counts:
            row(tree, n, "`lax.pmean`", lambda x: jax.lax.pmean(x, "data"))
            for name in topologies.split(","):
                topology = getattr(dq, name)()
                method = dq.Compression(dq.DynamiQ(bits=bits), topology=topology)
                row(tree, n, f"`{name}`", lambda x, m=method: dq.pmean(x, "data", method=m))


if __name__ == "__main__":
    typer.run(main)
