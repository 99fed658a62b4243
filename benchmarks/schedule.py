r"""The order in which XLA would run a training step on GPUs, found without a GPU.

    pip install 'jax[cuda13]'                                   # the compiler; no driver is needed
    JAX_PLATFORMS=cpu python benchmarks/schedule.py --layers 4 --way dp:5

Compiles the step of `step_time.py` for H200s that are not there, and prints the order of what
matters: matrix products of the forward and the backward pass, DynamiQ's kernels, collectives.
``x*3`` are three in a row, ``~*3`` three other kernels. What it counts:

* *kernels*: launches that are no collectives;
* *begun early*: collectives that start before the last matrix product, so that they may run beside
  the backward pass. XLA starts none of them earlier than its order says.

A few layers show what many do. Nothing is tuned without a GPU, so products are other kernels than
in a real step, and times are not known. With a GPU CUB sorts; without one XLA compiles many
kernels for every sort (28 of 2^18 super-groups, JAX 0.11.2).
"""

import dataclasses
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Annotated, Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import step_time
import typer
import ways
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax.core.xla
import pallas_kernels.backend
from dynamiq_jax.commands.bench import contenders

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
"""Description of an H200 for XLA: a `GpuTargetConfigProto`."""

INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.\-]+) = .*? (?P<op>[\w\-]+)\(")
NOTHING = {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "copy", "iota"}
COLLECTIVE = re.compile(
    r"(all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute)(-start|-done)?$"
)
OTHER, FORWARD, BACKWARD = "~", "product", "product'"


class Counts(NamedTuple):
    """Totals of an order."""

    kernels: int
    collectives: int
    begun_early: int


def kind(line: str) -> str | None:
    """The kind of one line of the compiled program; `None` if it does nothing."""
    found = INSTRUCTION.match(line)
    if found is None or found["op"] in NOTHING:
        return None
    if COLLECTIVE.match(found["op"]):
        return found["op"]
    if ours := re.search(r"/dynamiq_(\w+)/pallas_call", line):
        return ours[1].replace("decompress_accumulate_recompress", "hop")
    if re.search(r"gemm|dot|cublas", found["name"]):
        source = re.search(r'op_name="([^"]*)"', line)
        return BACKWARD if source and "transpose" in source[1] else FORWARD
    return OTHER


def orders(program: str) -> list[list[str]]:
    """The kinds of the lines of the bodies of loops that send, and of the main computation.

    As XLA has put them.
    """
    bodies = set(re.findall(r"body=%?([\w.\-]+)", program))
    found = []
    for block in re.split(r"\n(?=%|ENTRY)", program):
        name = re.match(r"(ENTRY )?%?([\w.\-]+)", block)
        if name and (name[1] or name[2] in bodies):
            kinds = [found for found in map(kind, block.splitlines()) if found]
            if name[1] or any(map(COLLECTIVE.match, kinds)):
                found.append(kinds)
    return found


def short(kinds: list[str]) -> str:
    """One after the other, those in a row together."""
    runs = ((name, len(list(run))) for name, run in groupby(kinds))
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def counts(kinds: list[str]) -> Counts:
    """Adds up an order."""
    starts = [i for i, k in enumerate(kinds) if COLLECTIVE.match(k) and not k.endswith("-done")]
    last = max((i for i, k in enumerate(kinds) if k in (FORWARD, BACKWARD)), default=-1)
    kernels = sum(COLLECTIVE.match(k) is None for k in kinds)
    return Counts(kernels, len(starts), sum(i < last for i in starts))


def compiled(make_program: Callable[[Mesh], Any], n_gpus: int) -> str:
    """The text of the program, scheduled for so many GPUs of one host."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="NVIDIA H200", target_config=TARGET,
        topology=f"1x1x{n_gpus}",
    )  # fmt: skip
    # As if these GPUs were there: which kernels run and how payloads travel follows from it.
    with (
        mock.patch.object(pallas_kernels.backend, "_on_nvidia", lambda: True),
        mock.patch.object(dynamiq_jax.core.xla, "_is_known", lambda name, value: True),
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(jax, "device_count", lambda *_: n_gpus),
    ):
        return make_program(Mesh(np.array(topology.devices), ("gpu",))).compile().as_text()


def main(
    model: Annotated[str, typer.Option(help="Whose shapes.")] = "1b",
    layers: Annotated[int, typer.Option(min=1, help="Instead of the model's.")] = 4,
    way: Annotated[str, typer.Option(help="As for step_time.py.")] = "dp:5",
    topology: Annotated[str, typer.Option(help="direct or ring.")] = "direct",
    gpus: Annotated[int, typer.Option(min=2, help="Of one host.")] = 4,
    bucket_mib: Annotated[
        float | None, typer.Option(help="Of leaves that travel together.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of XLA, beside those of dq.jit.")
    ] = None,
) -> None:
    """Compiles and prints."""
    if model not in step_time.CONFIGS:
        raise typer.BadParameter(f"--model {model!r}: pass one of {', '.join(step_time.CONFIGS)}")
    config = dataclasses.replace(step_time.CONFIGS[model], n_layers=layers)

    def make_program(mesh: Mesh) -> Any:
        training = step_time.make_training(
            model, mesh, make_model=partial(ways.llama, config),
            topology=contenders.parse_topology(topology),
            limits={"bucket_bytes": int(bucket_mib * 2**20)} if bucket_mib else {},
        )  # fmt: skip
        made = ways.make_way(way, training)
        own = NamedSharding(made.mesh, P("gpu"))
        rows = gpus * 3, config.seq_len + 1
        tokens = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=own)
        return ways.lower(made, made.like, tokens, step_time.parse_options(option or ()))

    try:
        program = compiled(make_program, gpus)
    except NotImplementedError as error:
        raise typer.BadParameter(
            f"JAX has no compiler for GPUs here: pip install 'jax[cuda13]' ({error})"
        ) from error
    for kinds in orders(program):
        print(short(kinds), end="\n\n")
    found = counts(kinds)  # of the main computation, which is the last one
    print(
        f"{found.kernels} kernels; {found.begun_early} of {found.collectives} collectives begun "
        "before the last matrix product"
    )


if __name__ == "__main__":
    typer.run(main)
