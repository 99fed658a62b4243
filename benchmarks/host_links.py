"""Times and bytes of all-reduces between hosts whose links are so slow that only bytes count.

    python benchmarks/hosts.py --hosts 4 --rate 3mbit --devices 1 -- \
      python benchmarks/host_links.py --rate 3mbit

``sent`` is what the most loaded link carried for one all-reduce, headers included, by the NIC's own
count, less what the barriers alone send. ``explained`` is the part of `dq.explain`'s bytes that
leaves a host. XLA's CPU backend sends bf16 as f32: ``as f32`` counts native sums and statistics
twice.
``wire s`` are the sent bytes over the rate, and ``s`` is the fastest of the runs. ``error`` is
|estimate - sum|² / |sum|² between the hosts.

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
from dynamiq_jax.commands.error import SUPER_GROUP
from dynamiq_jax.commands.synthetic import lognormal_mixture
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


def axis_sizes(name: str, n_hosts: int, local: int) -> tuple[int, int]:
    """The sizes of the outer and the inner axis."""
    inner = max(local, 2) if name == "hierarchical" else local
    return n_hosts * local // inner, inner


def explained(name: str, size: int, n_hosts: int, local: int) -> tuple[float, float]:
    """Bytes that one of ``n_hosts`` hosts of ``local`` devices each sends to the others.

    Statistics and gathered payloads pass from each worker to the next, which is on another host for
    the last of a host's workers alone.

    Returns:
      Those of `dq.explain`, and with native sums and statistics in f32.
    """
    topology, sizes = TOPOLOGIES[name], axis_sizes(name, n_hosts, local)
    n = n_hosts * local
    if isinstance(topology, dq.Hierarchical):
        told = {"method": METHOD, "topology": topology, "verbose": False}
        cost = dq.explain(jnp.zeros(size), sizes, **told)
        crosses = local * cost.outer_wire_bytes
        native = cost.wire_bytes - cost.outer_wire_bytes if local == 1 else 0.0
        slices = METHOD.layout(-(-size // sizes[1]), sizes[0], topology.levels(sizes).outer)
        return crosses + native, crosses + 2 * native + local * slices.stats_bits / 8
    layout = METHOD.layout(size, n, topology)
    pairs = zip(layout.payload_words, layout.payloads_sent, strict=True)
    *rounds, gathered = (4 * words * payloads for words, payloads in pairs)
    if name == "ring":
        scattered = sum(rounds)
    elif name == "direct":
        scattered = sum(rounds) * local * (n - local) / (n - 1)
    else:
        scattered = sum(local * sent for level, sent in enumerate(rounds) if 1 << level >= local)
    statistics = layout.stats_bits / 8
    return scattered + gathered + statistics, scattered + gathered + 2 * statistics


def measure(name: str, super_groups: int, repeats: int, per_second: float) -> dict[str, Any]:
    """One row of the table; all hosts call it."""
    n, local, topology = jax.device_count(), jax.local_device_count(), TOPOLOGIES[name]
    sizes, axes = axis_sizes(name, n // local, local), ("outer", "inner")
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes, axis_types=(AxisType.Auto,) * 2)
    key = jax.random.key(0)
    gradients = np.asarray(lognormal_mixture(key, n, super_groups, SUPER_GROUP))
    own = gradients[local * jax.process_index() :][:local]
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axes)), own)
    reduce = partial(dq.psum, axis_name=axes, method=METHOD, topology=topology)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(), check_vma=False)
    def step(x: jax.Array, key: jax.Array) -> jax.Array:
        return reduce(x[0], key=key)

    result = np.asarray(jax.block_until_ready(step(whole, key)))  # compiles, connects
    runs = []
    for work in (lambda: step(whole, key), lambda: None) * repeats:
        multihost_utils.sync_global_devices("start")
        before, start = sent(), time.perf_counter()
        jax.block_until_ready(work())
        seconds = time.perf_counter() - start
        multihost_utils.sync_global_devices("all have sent")
        runs.append((seconds, sent() - before))
    seconds, carried = np.max(multihost_utils.process_allgather(np.array(runs)), axis=0).T
    seconds, carried = seconds[::2], float(np.median(carried[::2]) - np.median(carried[1::2]))
    exact = np.sum(gradients, axis=0, dtype=np.float64)
    told, as_f32 = explained(name, exact.size, n // local, local)
    fastest, wire = float(np.min(seconds)), carried / per_second
    return {
        "topology": name,
        "sent MB": carried / 1e6,
        "explained MB": told / 1e6,
        "as f32 MB": as_f32 / 1e6,
        "wire s": wire,
        "s": fastest,
        "s / wire s": fastest / wire,
        "error": float(np.sum((result - exact) ** 2) / np.sum(exact**2)),
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
        per_second = bytes_per_second(rate)
        rows.append(measure(name, super_groups, repeats, per_second))
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
