"""Push kernels between two processes of this machine with a GPU each, beside NCCL's collectives.

    python benchmarks/push_between.py 4 16 64

It compares exchanges with `lax.all_to_all`, and 5-bit sums with those by collectives, then times
sums of these MiB of bf16 in µs: the median of samples of 20 calls, the shortest and the longest.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import pallas_kernels as pk

METHOD = dq.DynamiQ(bits=5, plan=False)
SIZE = 2**23
"""Coordinates of the sums that are compared: 16 MiB."""
PATIENCE = 120
"""Seconds after which processes are ended: each waits for the other one for ever."""


def run(*mib: int) -> list[dict]:
    """The objects that process 0 prints: the comparison, and times of sums of each size.

    Raises:
      RuntimeError: a process has failed; with the end of what each said.
    """
    with socket.create_server(("localhost", 0)) as probe:
        address = f"localhost:{probe.getsockname()[1]}"
    env = os.environ | {"COORDINATOR": address, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, *map(str, mib)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env=env | {"PYTHONPATH": path, "HOST_ID": str(i)}, **pipes)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(error[-3000:] for _, error in said))
    return [json.loads(line) for line in said[0][0].splitlines() if line.startswith("{")]


def put(mesh, make, *shape):
    """An array [2, *shape], a process's row of which is ``make``'s for its own key."""
    own = np.asarray(make(jax.random.key(jax.process_index()), shape))[None]
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own)


def own(x):
    """This process's row."""
    return np.asarray(x.addressable_shards[0].data)


def programs(mesh):
    """`lax.psum`, in bf16 and in f32, and 5-bit sums by two transports."""

    def summed(x, transport):
        topology = dq.Direct(transport=transport, streams=1)
        route = dq.Compression(METHOD, topology=topology, min_bucket_size=1)
        return dq.psum(x[0], "data", key=jax.random.key(3), compression=route)[None]

    ways = {
        "bf16": lambda x: lax.psum(x, "data"),
        "f32": lambda x: lax.psum(x.astype(jnp.float32), "data"),
        **{name: partial(summed, transport=name) for name in ("push", "collectives")},
    }
    spec = P("data")
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    return {name: jax.jit(mapped(way)) for name, way in ways.items()}


def comparison(mesh) -> dict:
    """Whether words and sums are those of collectives, in three calls; and the sum's error."""

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def moved(x):
        pushed = pk.exchange(x[0], {"data": 2}, to_all=False)
        return pushed[None], lax.all_to_all(x[0], "data", 0, 0)[None]

    words = put(mesh, partial(jax.random.bits, dtype=jnp.uint32), 2, 2**18 + 4)
    x, sums = put(mesh, partial(jax.random.normal, dtype=jnp.bfloat16), SIZE), programs(mesh)
    wanted, exact = own(sums["collectives"](x)), own(sums["f32"](x))
    totals = [own(sums["push"](x)) for _ in range(3)]
    lost = totals[0].astype(np.float32) - exact
    return {
        "exchange": [np.array_equal(*map(own, moved(words))) for _ in range(3)],
        "psum": [np.array_equal(total, wanted) for total in totals],
        "error": float((lost**2).sum() / (exact**2).sum()),
    }


def timed(function, x, calls: int = 20) -> list[float]:
    """The median, the least and the most µs of a call, by 7 samples."""
    found = []
    for sample in range(-1, 7):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(x)
        jax.block_until_ready(result)
        if sample >= 0:
            found.append((time.perf_counter() - start) / calls * 1e6)
    return [round(float(us), 1) for us in (np.median(found), min(found), max(found))]


def main() -> None:
    """Starts two processes, or is one of them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("mib", nargs="*", type=int, help="sizes of the sums that are timed")
    sizes = parser.parse_args().mib
    if "COORDINATOR" not in os.environ:
        print(*map(json.dumps, run(*sizes)), sep="\n")
        return
    me = int(os.environ["HOST_ID"])
    jax.distributed.initialize(os.environ["COORDINATOR"], 2, me, local_device_ids=[me])
    say = (lambda line: print(json.dumps(line), flush=True)) if me == 0 else lambda line: None
    mesh = dq.make_mesh((2,), ("data",))
    say(comparison(mesh))
    for mib in sizes:
        x = put(mesh, partial(jax.random.normal, dtype=jnp.bfloat16), mib * 2**19)
        ways = programs(mesh)
        say({"mib": mib} | {name: timed(ways[name], x) for name in ("bf16", "push", "collectives")})


if __name__ == "__main__":
    main()
