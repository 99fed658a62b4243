"""`train_multihost.py` under Ray: a process on each host of a cluster, started again after faults.

    ray start --head                            # on the first host
    ray start --address=10.0.0.1:6379           # on the others
    python examples/train_ray.py --gpus 8 --copies /dev/shm/run1 -- --model 1b

All after ``--`` are options of ``train_multihost.py``. A run takes all hosts of the cluster that
are alive and have what a process needs. When a process or a host dies, all processes end, and the
run goes on with the hosts that are left, from copies in their memory or from a checkpoint. When a
host has joined the cluster, all copy and end after the same step, and start again with it.

JAX lets no process join again. So no actor has ``max_restarts``: all are made anew.
"""

import os
import signal
import socket
import time
from typing import Annotated, Any

import ray
import typer
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOOK = 2.0  # seconds between two looks for hosts that have joined
TOGETHER = 1.0  # seconds in which the failures of other hosts come after the first one
HEALTHY = 60.0  # seconds after which a failure no longer counts as one in a row
PLACED = 5.0  # seconds for a placement; Ray counts a host that has died as alive for a while


@ray.remote(max_concurrency=2)  # `leave` is called while `train` runs
class Host:
    """The process of a host."""

    def address(self) -> str:
        """An address for JAX's coordinator."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, copies: str, words: list[str]) -> int:
        """Trains; returns the status with which ``train_multihost.py`` would end."""
        if copies:
            os.environ["DYNAMIQ_JAX_COPIES"] = copies
        import train_multihost  # JAX reads the environment, which Ray has set by now

        app = typer.Typer()
        app.command()(train_multihost.main)
        return app(words, standalone_mode=False) or 0

    def leave(self) -> None:
        """Lets all processes copy and end after the same step."""
        os.kill(os.getpid(), signal.SIGTERM)


def hosts(needs: dict[str, float]) -> int:
    """The number of hosts that are alive and have what a process needs."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(has.get(name, 0) >= n for name, n in needs.items()) for has in alive)


def place(needs: dict[str, float], least: int) -> tuple[PlacementGroup, int]:
    """Waits for a place on each host; returns how many there are, too."""
    while True:
        if (n := hosts(needs)) >= least:
            group = placement_group([needs] * n, strategy="STRICT_SPREAD")
            if group.wait(PLACED):
                return group, n
            remove_placement_group(group)
        time.sleep(1)


def run(
    group: PlacementGroup, n: int, needs: dict[str, float], copies: str, words: list[str]
) -> list[int | str]:
    """Trains once; returns the hosts' statuses. A text says why a host has failed."""
    actors: list[Any] = []
    for i in range(n):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
        actors.append(Host.options(scheduling_strategy=where, **options).remote())
    addresses = ray.get([actor.address.remote() for actor in actors])
    who = ["--coordinator", addresses[0], "--num-processes", str(n), "--process-id"]
    trained = [a.train.remote(copies, [*words, *who, str(i)]) for i, a in enumerate(actors)]
    told, running = False, trained
    while len(running) == n:
        _, running = ray.wait(running, timeout=LOOK)
        if not told and len(running) == n and hosts(needs) > n:
            print("a host has joined: all copy and start again", flush=True)
            told = bool(actors[0].leave.remote())
    ended, _ = ray.wait(trained, num_returns=n, timeout=TOGETHER)
    return [status(*pair) for pair in zip(addresses, trained, strict=True) if pair[1] in ended]


def status(address: str, ended: Any) -> int | str:
    """The status of a host, or why it has failed."""
    try:
        return ray.get(ended)
    except ray.exceptions.RayTaskError as error:  # what the process has raised
        lines = f"{type(error.cause).__name__}: {error.cause}".splitlines()
        return f"host {address}: {' '.join(lines)}"
    except ray.exceptions.RayError as error:
        why, _, _ = str(error).strip().splitlines()[-1].partition(". ")
        return f"host {address}: {type(error).__name__}: {why}"


def main(
    words: Annotated[list[str] | None, typer.Argument(help="of train_multihost.py")] = None,
    gpus: Annotated[int, typer.Option(help="of each host")] = 0,
    min_hosts: Annotated[int, typer.Option(min=1, help="fewer hosts wait for others")] = 1,
    copies: Annotated[str, typer.Option(help="a folder in each host's memory")] = "",
    starts: Annotated[
        int, typer.Option(min=1, help="failures in a row, each within a minute, that end the run")
    ] = 10,
) -> None:
    """Trains on all hosts of a Ray cluster, and starts again after faults."""
    ray.init(address="auto")
    needs = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    left = starts
    while left:
        began = time.monotonic()
        group, n = place(needs, min_hosts)
        print(f"starting on {n} hosts", flush=True)
        try:
            statuses = run(group, n, needs, copies, words or [])
        except ray.exceptions.RayError as error:  # before training
            statuses = [f"{type(error).__name__}: {error}"]
        remove_placement_group(group)  # which ends the processes that are left
        if set(statuses) == {0}:
            return
        print(*statuses, sep="\n", flush=True)
        left = left - 1 if time.monotonic() - began < HEALTHY else starts
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
