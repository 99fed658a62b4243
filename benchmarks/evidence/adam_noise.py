r"""How much of Adam's step is noise, by method: seconds in the place of a training run.

    python benchmarks/evidence/adam_noise.py --methods dynamiq:4,mxfp6 --inits gpt2,unit
    python benchmarks/evidence/adam_noise.py --methods dynamiq:3,dynamiq:4 --dealt 1,4,8

Trains a model of `training.py` with the exact mean, stops after some steps, and has every method
average the gradients of that step. Adam divides the mean gradient of a coordinate by the root of
its second moment v; with an error e it divides by that of v + e². So ``e² / (v + e²)`` is the share
of the step's square that is noise, 1 where the coordinate moves at random. "adam noise" is its mean
over all coordinates that are compressed. It ranks methods as the loss of trained models does
(docs/training-quality.md), where the squared error and the worst leaf mislead: there, too, all
coordinates count alike.

Methods and topologies are those of `training.py`. ``--dealt`` has so many groups of a super-group
take its quads in turn (`pallas_kernels.format.DEALT`), to see what that does.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_model as model
import training_run as run
import typer
from rich.console import Console
from rich.table import Column, Table
from training import learning_rate

import dynamiq_jax as dq
from pallas_kernels import reference
from pallas_kernels.format import DEALT

N_WORKERS = 8
STEPS = (8, 40, 150)
"""After which methods average."""


class Snapshot(NamedTuple):
    """One step of a training."""

    gradients: Any
    """Gradients of all workers, with a leading axis."""
    second_moments: dict[str, np.ndarray]
    """Adam's, without its bias to zero, of the leaves that methods compress."""
    clip: float
    """The factor of the mean before Adam sees it."""


class Figures(NamedTuple):
    """Figures of one method, unitless."""

    adam_noise: float
    vnmse: float
    worst_leaf: float


def snapshots(name: str, kind: str, seed: int) -> Iterator[Snapshot]:
    """Trains with the exact mean and stops after `STEPS`."""
    task = run.load_task(name, N_WORKERS, None)
    shape, optimizer = task.shape, run.make_optimizer("adamw", task.steps)
    peak = learning_rate("adamw", kind, name)

    @jax.jit
    def step(params, state, starts):
        tokens = run.worker_tokens(task.text, starts, shape, N_WORKERS)
        own = jax.vmap(jax.grad(partial(model.loss, shape)), (None, 0))(params, tokens)
        own = jax.vmap(model.unstack)(own)
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), own)
        updates, state = optimizer.update(model.stack(mean), state, params)
        params = jax.tree.map(lambda p, u: p + peak * u, params, updates)
        return params, state, own, jnp.minimum(1.0, 1.0 / optax.tree.norm(mean))

    start_key, _ = jax.random.split(jax.random.key(seed))
    params = model.init(shape, start_key, jnp.int32(model.INITS.index(kind)))
    state, starts = optimizer.init(params), run.window_starts(task, seed)
    for number in range(max(STEPS) + 1):
        params, state, own, clip = step(params, state, starts[number])
        if number in STEPS:
            unbias = 1 / (1 - 0.95 ** (number + 1))
            moments = run.large_leaves(model.unstack(optax.tree.get(state, "nu")))
            large = {n: unbias * np.asarray(x, np.float64) for n, x in moments.items()}
            yield Snapshot(own, large, float(clip))


def measure(mean: run.Mean, of: list[Snapshot]) -> Figures:
    """Geometric means over steps."""

    def average(own, memory):
        return mean.average(own, jax.random.key(7), memory)[0]

    @jax.jit
    def averaged(gradients):
        one = jax.tree.map(lambda x: x[0], gradients)
        workers = jax.vmap(average, axis_name=run.AXIS, out_axes=None)
        return workers(gradients, mean.init(one, N_WORKERS))

    rows = []
    for snapshot in of:
        exact = jax.tree.map(lambda x: np.mean(np.asarray(x, np.float64), 0), snapshot.gradients)
        found, exact = run.large_leaves(averaged(snapshot.gradients)), run.large_leaves(exact)
        noise = coords = 0.0
        for name, x in exact.items():
            squared = (snapshot.clip * (np.asarray(found[name], np.float64) - x)) ** 2
            v = snapshot.second_moments[name]
            share = np.divide(squared, v + squared, out=np.zeros_like(v), where=squared > 0)
            noise, coords = noise + share.sum(), coords + share.size
        errors = dq.vnmse(found, exact), dq.worst_leaf_error(found, exact)
        rows.append((noise / coords, *map(float, errors)))
    return Figures(*np.exp(np.mean(np.log(rows), axis=0)))


def main(
    methods: Annotated[str, typer.Option(help="As of training.py.")] = "dynamiq:4,dynamiq-dither:4",
    topologies: Annotated[str, typer.Option(help="Some of direct, ring, butterfly.")] = "direct",
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(model.MODELS)}.")] = "tiny",
    inits: Annotated[str, typer.Option(help=f"Some of {', '.join(model.INITS)}.")] = "gpt2,unit",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings.")] = 2,
    dealt: Annotated[str, typer.Option(help="Groups that take quads in turn.")] = str(DEALT),
) -> None:
    """Trains, measures and prints."""
    console = Console(width=max(Console().width, 100))
    for name in models.split(","):
        for kind in inits.split(","):
            of = [found for seed in range(seeds) for found in snapshots(name, kind, seed)]
            table = Table(Column("method", no_wrap=True), "topology", "dealt", *Figures._fields)
            for groups in map(int, dealt.split(",")):
                reference.DEALT = groups
                jax.clear_caches()
                for mean in run.parse_means(methods.split(","), topologies.split(","), "jnp")[1:]:
                    figures = measure(mean, of)
                    if not all(map(math.isfinite, figures)):
                        raise SystemExit(f"{mean.method}: {figures} is not finite")
                    shown = [f"{value:.4g}" for value in figures]
                    table.add_row(mean.method, mean.topology, str(groups), *shown)
            console.print(f"{name}, {kind}, adamw, {N_WORKERS} workers, {seeds} seeds")
            console.print(table)


if __name__ == "__main__":
    typer.run(main)
