"""Times and bytes of all-reduces between hosts whose links are so slow that only bytes count.

    python benchmarks/hosts.py --hosts 4 --rate 3mbit --devices 1 -- \
      python benchmarks/host_links.py --rate 3mbit

``sent`` is what the most loaded link carried for one all-reduce, headers included, by the NIC's own
count. ``explained`` is what all devices of a host send by `dq.explain`; of `Hierarchical` it counts
the outer axis alone. ``wire s`` are the sent bytes over the rate, and ``s`` is the fastest of the
runs. ``error`` is |estimate - sum|² / |sum|² between the hosts, and ``simulated`` is what
``dynamiq-jax simulate`` finds for one of this gradient's chunks. The chunks have equal magnitudes.

The inner axis of `Hierarchical` has the devices of a host. Hosts of one device form sets of two,
and the native sums of a set cross links.
"""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from hosts import NIC
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.commands.simulate import Case, simulate
from dynamiq_jax.commands.simulate.gradients import SUPER_GROUP, mixture_source, worker_gradient
from dynamiq_jax.request.ways import bytes_per_second

METHOD = dq.DynamiQ()
TOPOLOGIES = {
    "ring": dq.Ring(),
    "butterfly": dq.Butterfly(),
    "direct": dq.Direct(),
    "hierarchical": dq.Hierarchical(outer=dq.Butterfly()),
}


def sent() -> int:
    """Bytes that left this host so far."""
    return int(Path(f"/sys/class/net/{NIC}/statistics/tx_bytes").read_text())


def measure(name: str, super_groups: int, repeats: int, per_second: float) -> dict[str, Any]:
    """One row of the table; all hosts call it."""
    n, local, topology = jax.device_count(), jax.local_device_count(), TOPOLOGIES[name]
    inner = max(local, 2) if name == "hierarchical" else local
    sizes, axes = (n // inner, inner), ("outer", "inner")
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes, axis_types=(AxisType.Auto,) * 2)
    key = jax.random.key(0)
    source = mixture_source(jax.random.split(key)[0], super_groups // n)
    source = source._replace(deviation=jnp.tile(source.deviation, n))
    first = local * jax.process_index()
    own = np.stack([np.asarray(worker_gradient(source, first + i)) for i in range(local)])
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axes)), own)
    reduce = partial(dq.psum, axis_name=axes, method=METHOD, topology=topology)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(), check_vma=False)
    def step(x: jax.Array, key: jax.Array) -> jax.Array:
        return reduce(x[0], key=key)

    result = np.asarray(jax.block_until_ready(step(whole, key)))  # compiles, connects
    runs = []
    for _ in range(repeats):
        multihost_utils.sync_global_devices("start")
        before, start = sent(), time.perf_counter()
        jax.block_until_ready(step(whole, key))
        seconds = time.perf_counter() - start
        multihost_utils.sync_global_devices("all have sent")
        runs.append((seconds, sent() - before))
    seconds, carried = np.max(multihost_utils.process_allgather(np.array(runs)), axis=0).T
    carried = float(np.median(carried))
    exact = np.sum([np.asarray(worker_gradient(source, i), np.float64) for i in range(n)], axis=0)
    told = {"method": METHOD, "topology": topology, "verbose": False}
    cost = dq.explain(jnp.zeros(exact.shape), sizes, **told)
    crosses = cost.wire_bytes if local == 1 else local * cost.outer_wire_bytes
    chunk = {"super_groups": super_groups // n, "method": METHOD, "topology": topology}
    case = Case(n_workers=n, n_inner=inner, **chunk)
    fastest, wire = float(np.min(seconds)), carried / per_second
    return {
        "topology": name,
        "sent MB": carried / 1e6,
        "explained MB": crosses / 1e6,
        "wire s": wire,
        "s": fastest,
        "s / wire s": fastest / wire,
        "error": float(np.sum((result - exact) ** 2) / np.sum(exact**2)),
        "simulated": simulate(case, key),  # on all hosts: none is late for the next row
    }


def main(
    rate: Annotated[str, typer.Option(help="of the links, as hosts.py was told")],
    topologies: Annotated[str, typer.Option(help="comma-separated")] = ",".join(TOPOLOGIES),
    super_groups: Annotated[int, typer.Option(min=64, help="of 256 coordinates")] = 2048,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON of all rows")] = None,
) -> None:
    """Measures all-reduces between the hosts of `hosts.py`."""
    host, n = int(os.environ["HOST_ID"]), int(os.environ["NUM_HOSTS"])
    jax.distributed.initialize(os.environ["COORDINATOR"], n, host)
    super_groups -= super_groups % jax.device_count()
    size = f"{super_groups * SUPER_GROUP:,} f32 coordinates"
    title = f"{n} hosts of {jax.local_device_count()} device(s), {rate}, {size}"
    rows: list[dict[str, Any]] = []
    for name in topologies.split(","):
        rows.append(measure(name, super_groups, repeats, bytes_per_second(rate)))
        if host == 0:
            if len(rows) == 1:
                print(f"{title}, {METHOD!r}, jax {jax.__version__}")
                print(" ".join(f"{column:>12}" for column in rows[0]))
            cells = (f"{x:>12}" if isinstance(x, str) else f"{x:>12.3g}" for x in rows[-1].values())
            print(" ".join(cells), flush=True)
    if out and host == 0:
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
