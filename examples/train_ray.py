"""`train_multihost.py` under Ray: an actor on every node, and new ones after a fault.

    ray start --head --port=6379                    # on the first node
    ray start --address=10.0.0.1:6379               # on the others
    python examples/train_ray.py --model 1b         # on one of them; --gpus 8 where they have GPUs

JAX ends all processes of a run when one dies, and none can rejoin. So after a fault all actors are
killed, and new ones start on the nodes that are alive; they go on from copies in the memory of
their nodes, or from the newest checkpoint. Ray's ``max_restarts`` would start the killed actor
alone. A node that has joined takes part from the next start on.

Expect after `kill -9` of an actor: one line with the cause, then `starting after step 8, from the
memory of hosts`.
"""

import os
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import ray  # pyright: ignore[reportMissingImports]
import typer
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

COPIES = "DYNAMIQ_JAX_COPIES"


class Worker:
    """One process of the run."""

    def address(self) -> str:
        """A free port of this node, for JAX's coordinator."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, options: dict[str, Any]) -> None:
        """Trains to the end."""
        import train_multihost  # which starts JAX

        train_multihost.main(**options)


def start(group: PlacementGroup, n: int, gpus: int, folder: str) -> list[Any]:
    """An actor on each node of a group."""
    # What the driver has in its environment counts on all nodes.
    env = {name: text for name, text in os.environ.items() if name.startswith(("JAX", "XLA"))}
    env |= {"PYTHONPATH": str(Path(__file__).parent), COPIES: folder}
    env["PYTHONPATH"] += f":{os.environ.get('PYTHONPATH', '')}"
    actor = ray.remote(Worker)
    return [
        actor.options(
            num_cpus=1, num_gpus=gpus, runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
        ).remote()
        for i in range(n)
    ]  # fmt: skip


def attempt(n: int, gpus: int, folder: str, options: dict[str, Any], patience: float) -> None:
    """Trains on ``n`` nodes; whatever ends one process ends all."""
    bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    group = placement_group([bundle] * n, strategy="STRICT_SPREAD")
    workers = []
    try:
        ray.get(group.ready(), timeout=patience)
        workers = start(group, n, gpus, folder)
        coordinator = ray.get(workers[0].address.remote(), timeout=patience)
        told = {"coordinator": coordinator, "num_processes": n} | options
        left = [w.train.remote(told | {"process_id": i}) for i, w in enumerate(workers)]
        while left:
            done, left = ray.wait(left)
            ray.get(done)  # raises what the process has raised
    finally:
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(group)


def alive() -> int:
    """How many nodes Ray counts as alive."""
    return sum(node["Alive"] for node in ray.nodes())


def main(
    model: str = "tiny",
    steps: int | None = None,
    batch_size: int | None = None,
    checkpoint_dir: Path | None = None,
    out: Path = Path("runs"),
    gpus: Annotated[int, typer.Option(help="of each node")] = 0,
    least: Annotated[int, typer.Option(help="the smallest number of nodes that train")] = 2,
    patience: Annotated[float, typer.Option(help="seconds until actors have started")] = 60,
    starts: Annotated[int, typer.Option(help="how often at most")] = 10,
    copies: Annotated[str, typer.Option(help="in every node's memory")] = "/dev/shm/dynamiq_jax",
) -> None:
    """Trains on all nodes of the Ray cluster that this one belongs to."""
    ray.init(address="auto")
    folder = f"{copies}-{ray.get_runtime_context().get_job_id()}"
    options = {"model": model, "steps": steps, "batch_size": batch_size,
               "checkpoint_dir": checkpoint_dir, "out": out}  # fmt: skip
    for _ in range(starts):
        while (n := alive()) < least:
            time.sleep(0.2)
        try:
            return attempt(n, gpus, folder, options, patience)
        except RayError as error:
            print(f"{n} nodes: {' '.join(str(error).split())[:300]}", flush=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
