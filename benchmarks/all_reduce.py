"""Times `dq.psum` with all defaults, and with a key, beside bf16 psum on all GPUs of this machine.

    python benchmarks/all_reduce.py --json rows.json

Processes, one for each GPU, meet by NUM_HOSTS, HOST_ID and COORDINATOR, as `hosts.py` sets them.

``dynamiq-jax bench all-reduce`` compares methods and topologies that are named; here the library
chooses: the transport, the plan, and what travels natively. A row has a leaf's size and the median
and the 10th and 90th percentiles in µs of each way.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
from hosts import join_hosts

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import all_reduce, contenders, tables, timing

SIZES = "4MiB,16MiB,64MiB,256MiB,1GiB"
SMALL = 128 << 20
"""Bytes below which a sample has several sums in one program, so that dispatch is hidden."""


def times(size_bytes: int, repeats: int) -> dict[str, list[int]]:
    """Median and percentiles of each way, by its name."""
    mesh = all_reduce.make_mesh(jax.devices())
    ways = [contenders.uncompressed(), contenders.Contender("us", dq.psum)]
    ways += [contenders.Contender("key_us", partial(dq.psum, key=jax.random.key(3)))]
    x = all_reduce.heavy_tailed_gradients(mesh, size_bytes // 2)
    small = size_bytes < SMALL
    counts = {"iterations": 16, "in_flight": 2} if small else {"iterations": 1, "in_flight": 8}
    programs = [all_reduce.timed_program(mesh, way, counts["iterations"]) for way in ways]
    found = timing.time_calls(timing.compile_calls(programs, x), repeats=repeats, **counts)
    names = ("psum_us", "us", "key_us")
    return {
        name: [round(us) for us in (own.time_us, own.p10_us, own.p90_us)]
        for name, own in zip(names, found, strict=True)
    }


def main() -> None:
    """Reads the options, times all sizes and prints a line for each."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sizes", default=SIZES, help="of a bf16 leaf of each GPU")
    parser.add_argument("--repeats", type=int, default=12, help="samples of each way")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    join_hosts()
    rows = []
    for size in args.sizes.split(","):
        rows.append({"size": size} | times(contenders.parse_size(size), args.repeats))
        if jax.process_index() == 0:
            print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json and jax.process_index() == 0:
        about = tables.surroundings(jax.devices())
        args.json.write_text(json.dumps({"about": about, "rows": rows}, default=repr) + "\n")


if __name__ == "__main__":
    main()
