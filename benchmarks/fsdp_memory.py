"""Temporary memory of an FSDP backward pass, compiled for GPUs without a GPU.

    pip install 'jax[cuda13]'                                   # the compiler; no driver is needed
    JAX_PLATFORMS=cpu python benchmarks/fsdp_memory.py

Compiles the gradient of a stack of transformer layers for H200s that are not there. The f32
parameters are in shards, cast to bf16 and gathered by `dq.reduce_in_backward` in each layer, under
`jax.checkpoint`, or by `dq.sequential` beside the layer before (``pipeline``: `dq.Scanned`). Prints
XLA's temporary bytes for bf16 collectives and for DynamiQ.
"""

import os
from functools import partial
from typing import Annotated, Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.experimental import topologies
from jax.sharding import Mesh
from schedule import TARGET

import dynamiq_jax as dq
import dynamiq_jax.core.xla
import pallas_kernels.backend

P = jax.P
WAYS = {
    "bf16": {"method": dq.BF16(), "gather": dq.BF16()},
    "dynamiq": {"method": dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)},
}


def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """A transformer layer with one head, in bf16."""
    q, k, v = jnp.split((x * w["norm"]) @ w["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.T / 32) @ v @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def halved(params: Any) -> Any:
    """The parameters in bf16."""
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)


def loss(params: Any, x: jax.Array, way: str, specs: Any, **options: Any) -> jax.Array:
    """A mean square; ``specs`` are those of one layer."""

    @jax.checkpoint
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        whole = dq.reduce_in_backward(halved(own), "data", specs=specs, **options)
        return block(x, whole), None

    if way == "scan":
        x, _ = jax.lax.scan(layer, x, params)
    elif way == "loop":
        for i in range(len(params["norm"])):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], params))
    else:
        function = dq.Scanned(jax.checkpoint(lambda own, x: block(x, own)))
        stacked = {name: P(None, *spec) for name, spec in specs.items()}
        options |= {"specs": [stacked]}
        x = dq.sequential([function], [halved(params)], x, "data", **options)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def main(
    layers: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(help="Of the model.")] = 1024,
    tokens: Annotated[int, typer.Option(help="On every GPU.")] = 512,
    gpus: Annotated[int, typer.Option(min=2, help="Of one host.")] = 4,
) -> None:
    """Compiles and prints."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "norm": (width,)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    own = {name: P("data") if len(shape) > 1 else P() for name, shape in shapes.items()}
    specs = {name: P(None, *spec) for name, spec in own.items()}
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="NVIDIA H200", target_config=TARGET,
        topology=f"1x1x{gpus}",
    )  # fmt: skip
    mesh = Mesh(np.array(topology.devices), ("data",))

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    params = {n: array((layers, *shape), jnp.float32, specs[n]) for n, shape in shapes.items()}
    x = array((gpus * tokens, width), jnp.bfloat16, P("data"))
    maps = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    for name, options in WAYS.items():
        for way in ("scan", "loop", "pipeline"):
            grad = jax.grad(partial(loss, way=way, specs=own, **options))
            # As if these GPUs were there: which kernels run follows from it.
            with (
                mock.patch.object(pallas_kernels.backend, "_on_nvidia", lambda: True),
                mock.patch.object(dynamiq_jax.core.xla, "_is_known", lambda name, value: True),
                mock.patch.object(jax, "default_backend", lambda: "gpu"),
                mock.patch.object(jax, "device_count", lambda *_: gpus),
            ):
                compiled = dq.jit(jax.shard_map(grad, **maps)).lower(params, x).compile()
            megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
            print(f"{name:8} {way:8}  {megabytes:6.1f} MB", flush=True)


if __name__ == "__main__":
    typer.run(main)
