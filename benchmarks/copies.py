"""Times copies of a training's state in the memory of hosts: milliseconds, and bytes of a host.

    python benchmarks/hosts.py --hosts 3 --devices 1 -- python benchmarks/copies.py

The state is that of the examples' model with AdamW: whole on every host (data parallel), and with
sharded updates, whose masters and moments travel one host onwards. Without ``--rate`` of
``hosts.py`` the links are as fast as TCP goes.
"""

import functools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.experimental.multihost_utils
import optax
import typer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.hosts.copies import Copies
from dynamiq_jax.hosts.slots import Slots

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from llm_model import CONFIGS, MODELS, init_params  # pyright: ignore[reportMissingImports]


def states(model: str) -> dict[str, Any]:
    """{name: parameters and the optimizer's state}."""
    mesh = dq.make_mesh((-1,), ("data",), (AxisType.Auto,))
    make = functools.partial(init_params, CONFIGS[model])
    params = jax.jit(make, out_shardings=NamedSharding(mesh, P()))(jax.random.key(0))
    optimizers = {
        "data parallel": optax.adamw(1e-3),
        "sharded updates": dq.optax.sharded(optax.adamw(1e-3), "data"),
    }
    return {name: (params, dq.optax.init(o, params, mesh)) for name, o in optimizers.items()}


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    samples: Annotated[int, typer.Option(min=1, help="copies")] = 30,
) -> None:
    """Times copies of a training's state on several hosts."""
    jax.distributed.initialize(
        os.environ["COORDINATOR"], int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"])
    )
    for name, state in states(model).items():
        with Slots.made() as slots:
            assert slots, "copies take Linux"
            os.environ |= slots.environment
            copies, times, size = Copies(), [], 0
            for number in range(samples + 3):  # the first three compile, and map memory
                jax.experimental.multihost_utils.sync_global_devices("begin")
                start = time.perf_counter()
                size = copies.save(number, state)
                times.append(1e3 * (time.perf_counter() - start))
            jax.experimental.multihost_utils.sync_global_devices("measured")
            start = time.perf_counter()
            assert Copies().restore(state)
            seconds = time.perf_counter() - start
        own = sum(
            sum(shard.data.nbytes for shard in leaf.addressable_shards)
            for leaf in jax.tree.leaves(state)
        )
        median, *_, most = statistics.median(times[3:]), max(times[3:])
        print(
            f"{name}: {median:.1f} ms a copy (at most {most:.1f}), {size / 1e6:.2f} MB; the state "
            f"of this host has {own / 1e6:.2f} MB; restored in {seconds:.2f} s"
        )


if __name__ == "__main__":
    typer.run(main)
