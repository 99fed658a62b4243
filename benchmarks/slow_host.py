"""A slow host: what a step takes while one of the hosts needs longer for its work.

    python benchmarks/hosts.py --hosts 3 --devices 1 -- python benchmarks/slow_host.py micro-batches
    python benchmarks/hosts.py --hosts 4 --devices 1 -- python benchmarks/slow_host.py grid

Sleeps stand for the work, so that hosts of one machine do not slow each other. Exchanges are real:
`dq.pmean` of a small network at 5 bits, by the recipes of docs/data-parallel.md.

*micro-batches*: every worker has `MOST` micro-batches a step, and all wait for the last worker.
With a budget (DropCompute) a worker takes as many as it can within the deadline, by the times of
its own last step. The deadline is `SLACK` times what `MOST` micro-batches take. The second host is
the slow one.

*grid*: peers work for a round, and average along one axis of a grid of two columns (Moshpit), or
with all others. The second peer is slow, or another one each round, or the second one is missing:
it works for no time and has weight 0.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import P, lax

import dynamiq_jax as dq

MOST, SLACK = 4, 1.25
SLOW_HOST = 1
METHOD = dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)
Measured = tuple[float, float, int]
"""Seconds of one step, of them those of the exchange, and micro-batches that this host took."""


class What(StrEnum):
    """The measurement."""

    MICRO_BATCHES = "micro-batches"
    GRID = "grid"


class Row(NamedTuple):
    """Figures of several steps."""

    name: str
    seconds: float
    """From the first step's beginning to the last one's end, of the host that took longest."""
    step_ms: float
    """The median over steps, of host 0."""
    wait_ms: float
    """The median of what host 0 waits after its own work, exchange included."""
    taken: int
    """Micro-batches, or rounds of work, of all hosts."""


def budget(seconds: float, deadline: float, most: int = MOST) -> int:
    """The micro-batches, at most ``most``, that a worker takes within the deadline."""
    return int(min(most, deadline // seconds))


def main(
    what: Annotated[What, typer.Argument(help="which recipe")],
    seconds: Annotated[float, typer.Option(min=0.001, help="of a micro-batch")] = 0.1,
    steps: Annotated[int, typer.Option(min=2, help="steps of each row")] = 10,
    factor: Annotated[float, typer.Option(min=1, help="how much slower the slow host is")] = 2.0,
) -> None:
    """Measures steps with a slow host, on hosts of `hosts.py`."""
    if "NUM_HOSTS" not in os.environ:
        raise SystemExit(
            "slow_host.py runs on several hosts: python benchmarks/hosts.py --hosts 3 --devices 1 "
            f"-- python benchmarks/slow_host.py {what}"
        )
    hosts, me = int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"])
    if what is What.GRID and (hosts < 4 or hosts % 2):
        raise SystemExit(f"a grid of two columns takes 4, 6, ... hosts, and there are {hosts}")
    jax.distributed.initialize(os.environ["COORDINATOR"], hosts, me)
    measure = measure_micro_batches if what is What.MICRO_BATCHES else measure_grid
    rows = measure(hosts, me, seconds, steps, factor)
    if me == 0:
        work = f"{MOST} micro-batches" if what is What.MICRO_BATCHES else "a round"
        print(
            f"{what}: {work} of {1000 * seconds:g} ms by sleeps, one host {factor:g} times slower, "
            f"{steps} steps, {hosts} hosts on one {platform.machine()} CPU of {os.cpu_count()} "
            f"cores, JAX {jax.__version__}"
        )
        print("| steps | all, s | a step, ms | host 0 waits, ms | taken | taken per s |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            cells = f"{row.seconds:.2f} | {row.step_ms:.0f} | {row.wait_ms:.0f} | {row.taken}"
            cells += f" | {row.taken / row.seconds:.1f}"
            print(f"| {row.name} | {cells} |", flush=True)


def figures(name: str, steps: int, mesh: jax.sharding.Mesh, step: Callable[[int], Measured]) -> Row:
    """The figures of ``step(0), step(1), ...``; all hosts begin together."""
    every = jax.NamedSharding(mesh, P(mesh.axis_names))
    total = jax.jit(lambda x: (jnp.max(x[:, 0]), jnp.sum(x[:, 1])))

    def among_hosts(*values: float) -> tuple[float, float]:
        own = np.asarray([values], np.float32)
        found = total(jax.make_array_from_process_local_data(every, own))
        return float(found[0]), float(found[1])

    among_hosts(0.0, 0.0)
    start = time.perf_counter()
    found = [step(i) for i in range(steps)]
    longest, taken = among_hosts(time.perf_counter() - start, sum(n for _, _, n in found))
    times, waits = ([1000 * measured[i] for measured in found] for i in (0, 1))
    return Row(name, longest, statistics.median(times), statistics.median(waits), round(taken))


def timed(work: float, exchange: Callable[[], Any]) -> tuple[float, float, Any]:
    """Works for so many seconds, then exchanges: seconds in all, of the exchange, its result."""
    start = time.perf_counter()
    time.sleep(work)
    worked = time.perf_counter()
    result = jax.block_until_ready(exchange())
    end = time.perf_counter()
    return end - start, end - worked, result


def measure_micro_batches(
    hosts: int, me: int, seconds: float, steps: int, factor: float
) -> list[Row]:
    """Rows of the recipe "a budget of micro-batches"."""
    mesh = dq.make_mesh((hosts,), ("data",))
    each = jax.NamedSharding(mesh, P("data"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(params: Any, counts: jax.Array, batch: jax.Array) -> Any:
        micro, local = batch.reshape(MOST, -1, 256), lax.pcast(params, "data", to="varying")

        def take(carry: tuple) -> tuple:
            count, total = carry
            grads = jax.grad(loss_fn)(local, micro[count])
            return count + 1, jax.tree.map(jnp.add, total, grads)

        start = 0 * counts[0], jax.tree.map(jnp.zeros_like, local)
        count, total = lax.while_loop(lambda carry: carry[0] < counts[0], take, start)
        grads = jax.tree.map(lambda g: g / count, total)
        grads = dq.pmean(grads, "data", compression=METHOD, weight=count)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(key, (256, 256)) / 16 for key in keys]
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    batch = np.random.default_rng(me).normal(size=(MOST * 8, 256)).astype(np.float32)
    batch = jax.make_array_from_process_local_data(each, batch)
    measured = seconds  # of this host's last micro-batch

    def one(_: int, *, slower: float, deadline: float) -> Measured:
        nonlocal measured, params
        own, count = seconds * (slower if me == SLOW_HOST else 1), budget(measured, deadline)

        def exchange() -> Any:
            counts = np.asarray([count], np.int32)
            return step(params, jax.make_array_from_process_local_data(each, counts), batch)

        whole, waited, params = timed(count * own, exchange)
        # A worker that took none does not learn how fast it is.
        measured = (whole - waited) / count if count else seconds
        return whole, waited, count

    forever = {"deadline": float("inf")}
    one(0, slower=1, **forever)  # compiles
    cases = {
        "all hosts alike": partial(one, slower=1, **forever),
        "one slow, all wait": partial(one, slower=factor, **forever),
        "one slow, with a budget": partial(one, slower=factor, deadline=SLACK * MOST * seconds),
    }
    rows = []
    for name, case in cases.items():
        one(0, slower=1, **forever)  # each case begins with a host that is not slow yet
        rows.append(figures(name, steps, mesh, case))
    return rows


def measure_grid(hosts: int, me: int, seconds: float, steps: int, factor: float) -> list[Row]:
    """Rows of the recipe "averaging in a grid", beside averages among all."""
    mesh = dq.make_mesh((hosts // 2, 2), ("row", "column"))
    peers = P(("row", "column"))
    each = jax.NamedSharding(mesh, peers)

    @partial(jax.jit, static_argnames="axes")
    def average(params: jax.Array, weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        @partial(jax.shard_map, mesh=mesh, in_specs=(peers, peers), out_specs=peers)
        def one(params: jax.Array, weight: jax.Array) -> jax.Array:
            return dq.pmean(params[0], axes, compression=METHOD, weight=weight[0])[None]

        return one(params, weight)

    def placed(own: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(each, own)

    params = placed(np.random.default_rng(me).normal(size=(1, 2**16)).astype(np.float32))

    def one(number: int, *, in_grid: bool, slow: Callable[[int], int], missing: int) -> Measured:
        own = 0 if me == missing else seconds * (factor if me == slow(number) else 1)
        axes = (mesh.axis_names[number % 2],) if in_grid else mesh.axis_names
        weight = placed(np.asarray([me != missing], np.float32))
        whole, waited, _ = timed(own, lambda: average(params, weight, axes=axes))
        return whole, waited, int(me != missing)

    nobody = -1
    kinds = {
        "all alike": {"slow": lambda _: nobody, "missing": nobody},
        "one slow": {"slow": lambda _: SLOW_HOST, "missing": nobody},
        "one slow, in turn": {"slow": lambda number: number % hosts, "missing": nobody},
        "one missing": {"slow": lambda _: nobody, "missing": SLOW_HOST},
    }
    rows = []
    for kind, options in kinds.items():
        for way, in_grid in {"among all": False, "in a grid": True}.items():
            case = partial(one, in_grid=in_grid, **options)
            for number in range(2):  # compiles both axes
                case(number)
            rows.append(figures(f"{kind}, {way}", steps, mesh, case))
    return rows


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """The mean square of a small network's outputs less its inputs."""
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - x) ** 2)


if __name__ == "__main__":
    typer.run(main)
