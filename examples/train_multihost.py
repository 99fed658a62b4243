"""Training on several hosts, one process per host or per GPU, with restart from checkpoints.

Under SLURM, Open MPI or Kubernetes, JAX finds out by itself who is who:

    srun python examples/train_multihost.py --model 1b --checkpoint-dir /shared/run1

Elsewhere each process is told. Here two on one machine without a GPU, of two virtual devices each:

    for i in 0 1; do
      python examples/train_multihost.py --steps 60 --checkpoint-dir /tmp/run1 \
        --coordinator localhost:29400 --num-processes 2 --process-id $i &
    done; wait

Expect (2 busy x86-64 cores, jax 0.10.2, Python 3.11.7; left out: versions, and what gloo says):

    mesh: {'node': 2, 'gpu': 2}, 2 processes
    starting after step 0
    step   10  loss 3.8134  0.391 s
    ...
    step   60  loss 2.5604  0.796 s
    topology: Hierarchical(outer=Butterfly(...)): several axes, whose last one has fast links

Losses depend a little on the Python version, whose standard library is the training text, and on
the processor, see ``train_llm.py``. The loss curve (PNG) and all numbers (JSON) land in ``runs/``.
Started again with the same ``--checkpoint-dir``, after whatever end, the run goes on from its
newest complete checkpoint and draws the same curve, bit for bit. Under ``dynamiq-jax run`` it
starts again by itself, from copies in the memory of hosts (docs/when-a-host-dies.md).
docs/multihost.md: launching, mesh and topology, network interfaces, time-outs, and what happens
when a process dies.
"""

import os

# Two virtual CPU devices a process, unless the caller chose a number; GPUs are not affected.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )

import errno
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llm_data import Corpus, load_corpus
from llm_model import CONFIGS, MODELS, Config, init_params, make_loss
from rich.console import Console
from train_llm import (
    RECIPES,
    Recipe,
    Result,
    check_choice,
    environment,
    make_optimizer,
    plot,
)

import dynamiq_jax as dq
from dynamiq_jax.hosts import Copies, load_or_compile, slow_hosts

AXES = ("node", "gpu")  # the outer axis first: dq reduces over the inner one's fast links before it
PROGRESS = "DYNAMIQ_JAX_PROGRESS"  # the variable by which a supervisor asks for progress
# Variables of those that end all processes when one fails: a supervisor, srun and mpirun.
ENDS_OTHERS = PROGRESS, "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"
PREEMPTED = 128 + 15  # the exit status of a process that SIGTERM ended


# --- Who takes part -------------------------------------------------------------------------------


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: int,
    cluster: str | None = None,
) -> None:
    """Makes this process one of several. Must precede everything else that JAX is asked.

    What is `None` JAX finds out by itself, from ``cluster`` or from the first it detects.

    Whoever stops sending heartbeats for ``timeout`` seconds counts as dead, and JAX ends all the
    others with an error that names it. A process that ends by itself waits as long for the others.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method=cluster,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
        )
    except ValueError as error:
        raise typer.BadParameter(
            f"{error} Pass --coordinator HOST:PORT, --num-processes N and --process-id 0..N-1; "
            "under SLURM, Open MPI and Kubernetes JAX finds them out by itself"
        ) from error
    if any(name in os.environ for name in ENDS_OTHERS):
        sys.excepthook = partial(end_at_once, sys.excepthook)
    report("joined")


def end_at_once(write: Callable[..., None], *error: Any) -> None:
    """Ends this process after an exception, where something else ends the others.

    Without that, JAX waits at the end of a process for all others, and tells them who has failed.
    """
    write(*error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def report(progress: int | str) -> None:
    """Tells a supervisor (`dynamiq-jax run`) how far this process is; nothing without one."""
    if path := os.environ.get(PROGRESS):
        Path(path).write_text(str(progress))


def node_of(device: Any) -> int:
    """The host of a device; on GPUs the NVLink domain, where JAX was told of one."""
    return device.process_index if device.platform == "cpu" else device.slice_index


def make_mesh() -> Mesh:
    """All devices, a row of axis "gpu" for every node."""
    sizes = Counter(map(node_of, jax.devices()))
    if len({*sizes.values()}) > 1:
        raise ValueError(f"devices per node: {dict(sizes)}; start as many processes on each")
    return dq.make_mesh((len(sizes), -1), AXES, axis_types=(AxisType.Auto,) * 2)


# --- Every process its own part of the data -------------------------------------------------------


def own_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """Which rows of the global batch this process's devices hold."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices]))


def windows(corpus: Corpus, step: int, rows: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Random windows of text, ``int32[rows, length]``, each fixed by (seed, step, row).

    So nobody draws another's rows, and the global batch is the same for any number of processes.
    """
    end = len(corpus.train) - length
    starts = [np.random.default_rng((seed, step, row)).integers(end) for row in rows]
    return corpus.train[np.array(starts)[:, None] + np.arange(length)]


# --- The training step ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Settings that have to be equal in all processes."""

    model: Config
    recipe: Recipe
    mesh: Mesh
    method: dq.Compression
    seed: int


class TrainState(NamedTuple):
    """All that a run needs to go on; ``memory`` is each worker's own, the rest the same on all."""

    step: jax.Array
    """int32: steps taken."""
    key: jax.Array
    """The rounding's PRNG key."""
    params: Any
    opt_state: Any
    memory: Any
    """The method's state, ``[n_workers, ...]``; DynamiQ has none."""


class Training(NamedTuple):
    """Compiled functions."""

    shapes: TrainState
    """Shapes, dtypes and shardings of all that `init` makes."""
    init: Callable[[int], TrainState]
    """From a seed to parameters and all the rest, placed on the mesh."""
    step: Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]
    """From state and tokens ``int32[rows, length]`` to the next state and the mean loss."""


def make_training(run: Run) -> Training:
    """Data-parallel training; ``run.method`` averages gradients."""
    optimizer, mesh = make_optimizer(run.recipe), run.mesh
    workers, replicated = NamedSharding(mesh, P(AXES)), NamedSharding(mesh, P())
    placed = TrainState._make([*[replicated] * 4, workers])
    value_and_grad = dq.value_and_grad(
        make_loss(run.model), mesh=mesh, axis_name=AXES, compression=run.method
    )

    @partial(jax.jit, out_shardings=placed)
    def init(key: jax.Array) -> TrainState:
        params_key, key = jax.random.split(key)
        params = init_params(run.model, params_key)
        memory = run.method.init_state(params, tuple(mesh.shape.values()), stacked=True)
        return TrainState(jnp.int32(0), key, params, optimizer.init(params), memory)

    @partial(dq.jit, donate_argnums=0, out_shardings=(placed, replicated))
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(state.key, state.step)  # the same on all workers
        loss, reduced = value_and_grad(state.params, tokens, key=key, state=state.memory)
        grads, memory, _ = reduced
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, state.key, params, opt_state, memory), loss

    shapes = jax.tree.map(
        lambda sharding, tree: jax.tree.map(lambda x: x.update(sharding=sharding), tree),
        placed, jax.eval_shape(init, jax.random.key(0)),
    )  # fmt: skip
    return Training(shapes, lambda seed: init(jax.random.key(seed)), step)


# --- Checkpoints ----------------------------------------------------------------------------------


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    """The two newest complete checkpoints of a folder that all processes see."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def check_room(folder: Any, state: TrainState) -> None:
    """Refuses a checkpoint that does not fit; orbax lets all wait ten minutes for a failure."""
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if (free := shutil.disk_usage(folder).free) < needed:
        text = f"{folder} has {free} bytes left, and a checkpoint takes {needed}: make room"
        raise OSError(errno.ENOSPC, text)


def save(checkpoints: ocp.CheckpointManager, state: TrainState, losses: list[float]) -> None:
    """Writes state and curve, while training goes on; every process calls it."""
    check_room(checkpoints.directory, state)
    curve = {"losses": losses.copy()}  # the list grows while this one is written
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state._asdict()), curve=ocp.args.JsonSave(curve)
    )
    checkpoints.save(len(losses), args=items, force=True)


def restore(
    checkpoints: ocp.CheckpointManager, shapes: TrainState
) -> tuple[TrainState, list[float]]:
    """The newest checkpoint, placed as ``shapes`` says."""
    items = ocp.args.Composite(
        state=ocp.args.StandardRestore(shapes._asdict()), curve=ocp.args.JsonRestore()
    )
    restored = checkpoints.restore(checkpoints.latest_step(), args=items)
    return TrainState(**restored["state"]), restored["curve"]["losses"]


def restore_copy(
    copies: Copies, training: Training, seed: int, than: int
) -> tuple[TrainState, list[float]] | None:
    """The copy in the memory of hosts; `None` if it is older than a step."""
    # Memories start anew where the number of workers is another one, and that takes their values.
    has_memory = jax.tree.leaves(training.shapes.memory)
    fresh = training.init(seed) if has_memory else training.shapes
    fresh = fresh._replace(memory=dq.optax.PerWorker(fresh.memory, AXES))
    copy = copies.restore(fresh)
    if copy is None or copy.step < than:
        return None
    restored = dq.optax.restore_state(copy.state, fresh)  # for the hosts that are left
    return restored._replace(memory=restored.memory.value), copy.note


def save_copy(copies: Copies, state: TrainState, losses: list[float]) -> None:
    """Keeps state and curve in the memory of hosts; every process calls it."""
    state = state._replace(memory=dq.optax.PerWorker(state.memory, AXES))
    copies.save(len(losses), state, losses)


# --- Training -------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of a run."""

    state: TrainState
    losses: list[float]
    seconds_per_step: float
    preempted: bool


def train(
    run: Run,
    corpus: Corpus,
    *,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int = 50,
    copy_every: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Trains to the recipe's last step, from the newest checkpoint or copy if there is one."""
    training = make_training(run)
    sharding = NamedSharding(run.mesh, P(AXES))
    shape = run.recipe.batch_size * run.mesh.size, run.model.seq_len + 1
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    program = run.model, run.recipe, run.method  # a restart loads it, if it depends on no more
    step = load_or_compile(training.step, training.shapes, tokens, key=program)
    copies = Copies()
    checkpoints = open_checkpoints(checkpoint_dir) if checkpoint_dir else None
    newest = (checkpoints.latest_step() or 0) if checkpoints else 0
    if copied := restore_copy(copies, training, run.seed, newest):
        (state, losses), where = copied, ", from the memory of hosts"
    elif checkpoints and newest:
        (state, losses), where = restore(checkpoints, training.shapes), ""
    else:
        state, losses, where = training.init(run.seed), [], ""
    if checkpoints or losses:
        log(f"starting after step {len(losses)}{where}")
    # Workers that were told different things would average garbage in silence.
    run.method.check_agreement(state.params, run.mesh, AXES, key=state.key)
    report("restored")
    rows = own_rows(sharding, shape[0])
    reading, times, preempted = [], [], False
    while len(losses) < run.recipe.steps and not preempted:
        start = time.perf_counter()
        report(len(losses))
        batch = windows(corpus, len(losses), rows, shape[1], run.seed)
        tokens = jax.make_array_from_process_local_data(sharding, batch, shape)
        reading.append(time.perf_counter() - start)
        state, loss = step(state, tokens)
        losses.append(float(loss))  # waits for the step, and so for the slowest process
        times.append(time.perf_counter() - start)
        done = len(losses)
        # True on all processes after the same step, once any of them got SIGTERM. JAX counts such
        # calls from 1: with another number a SIGTERM before the first call is lost.
        preempted = multihost_utils.reached_preemption_sync_point(len(times))
        last = preempted or done == run.recipe.steps
        if last or done % copy_every == 0:
            save_copy(copies, state, losses)
        if checkpoints and (last or done % checkpoint_every == 0):
            save(checkpoints, state, losses)
        if last or done % 10 == 0:
            log(f"step {done:4}  loss {losses[-1]:.4f}  {times[-1]:.3f} s")
        if done % 50 == 0:
            own, whole = (float(np.median(seconds[-50:])) for seconds in (reading, times))
            for slow in slow_hosts(own, whole):
                log(str(slow))
    if checkpoints:
        checkpoints.wait_until_finished()
    seconds = float(np.median(times[1:] or times or [np.nan]))  # times[0] compiles
    return Outcome(state, losses, seconds, preempted and len(losses) < run.recipe.steps)


# --- Command line ---------------------------------------------------------------------------------


def choose(bits: float) -> dq.Compression:
    """Makes the compression from the number of bits."""
    try:
        return dq.Compression(dq.DynamiQ(bits=bits))
    except ValueError as error:
        raise typer.BadParameter(f"--bits {bits}: {error}") from error


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    bits: Annotated[float, typer.Option(help="wire bits per coordinate")] = 5.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per device")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    coordinator: Annotated[
        str | None, typer.Option(envvar="COORDINATOR", help="HOST:PORT of process 0")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, envvar="NUM_HOSTS")] = None,
    process_id: Annotated[int | None, typer.Option(min=0, envvar="HOST_ID")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="slurm, ompi or mpi4py; default: what JAX detects")
    ] = None,
    heartbeat_timeout: Annotated[
        int, typer.Option(min=1, help="seconds until a silent process counts as dead")
    ] = 100,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="one that all processes see")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="steps")] = 50,
    copy_every: Annotated[
        int, typer.Option(min=1, help="steps between copies in the memory of supervised hosts")
    ] = 1,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model on several hosts with compressed gradients."""
    check_choice(model, CONFIGS, "--model")
    method = choose(bits)
    recipe = RECIPES[model]
    recipe = recipe._replace(
        steps=steps or recipe.steps, batch_size=batch_size or recipe.batch_size
    )
    join(coordinator, num_processes, process_id, heartbeat_timeout, cluster)
    run = Run(
        model=CONFIGS[model], recipe=recipe, mesh=make_mesh(), method=method, seed=seed,
    )  # fmt: skip
    console = Console(quiet=jax.process_index() > 0, highlight=False, soft_wrap=True)
    where = environment() | {"mesh": f"{dict(run.mesh.shape)}, {jax.process_count()} processes"}
    for name, value in where.items():
        console.print(f"{name}: {value}")

    outcome = train(
        run, load_corpus(run.model.vocab_size), checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every, copy_every=copy_every, log=console.print,
    )  # fmt: skip
    if jax.process_index() == 0:
        # At the end, since a restart is to be quick.
        cost = method.explain(outcome.state.params, tuple(run.mesh.shape.values()), verbose=False)
        where["topology"] = f"{cost.topology}: {cost.reason}"
        console.print(f"topology: {where['topology']}")
        result = Result(
            method=type(method.method or dq.DynamiQ()).__name__.lower(), wire_bytes=cost.wire_bytes,
            bits_per_coord=cost.bits_per_coord, losses=outcome.losses,
            seconds_per_step=outcome.seconds_per_step,
        )  # fmt: skip
        kept = ("wire_bytes", "bits_per_coord", "seconds_per_step", "losses")
        record = {
            "environment": where, "model": model, "recipe": recipe._asdict(), "seed": seed,
            "method": cost.method, **{name: getattr(result, name) for name in kept},
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        name = f"{model}-multihost"
        (out / f"{name}.json").write_text(json.dumps(record, indent=1))
        plot([result], f"{model}, {where['devices']}", out / f"{name}.png")
        console.print(f"curve and numbers: {out / name}.png, .json")
    multihost_utils.sync_global_devices("results written")  # nobody leaves before
    if outcome.preempted:
        console.print(f"preempted after step {len(outcome.losses)}; start again to go on")
        raise typer.Exit(PREEMPTED)


if __name__ == "__main__":
    typer.run(main)
