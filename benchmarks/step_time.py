r"""Times training steps by the ways of `ways.py`: what a step computes, sends and waits for.

    python benchmarks/step_time.py --model 1b --ways bf16-psum,dp:5,zero-pipeline:5/2.5,fsdp:5/8
    NCCL_P2P_DISABLE=1 python benchmarks/step_time.py --model 350m --batch 3

One process has all GPUs, or several find each other by NUM_HOSTS, HOST_ID and COORDINATOR in the
environment; the first one prints. The model is that of `examples/llm_model.py` with the optimizer
of `examples/train_llm.py`: bf16 matrix products, f32 parameters (or masters) and moments, bf16
gradients, state donated, fresh random tokens in each step. The host waits for nobody within a
sample of several steps. JAX_ENABLE_PGLE=true lets JAX profile each way's first steps, and compile
again by their times.
``--profile`` keeps JAX's profile of three steps of each way, which xprof shows. ``--compile-only``
runs no step and compiles one way after the other, so that times of compilation compare; ways that
come later find parts of them traced.

``none`` has no gradient exchange: what a step takes beyond it is *exposed* communication, kernels
of the compression included, and less the work that shards save. `dq.explain` tells bytes.
*Temporaries* are XLA's for one device. *MFU* is the share of the GPUs' peak that the model's own
operations take, see `llm_model.training_flops`.
"""

import dataclasses
import gc
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timeline
import typer
import ways
from hosts import join_hosts
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.all_reduce import make_mesh
from dynamiq_jax.commands.options import announce

from llm_model import (  # isort: skip  # pyright: ignore[reportMissingImports]
    CONFIGS,
    AttentionKernel,
    Config,
    peak_flops,
    training_flops,
)
from train_llm import (  # isort: skip  # pyright: ignore[reportMissingImports]
    MAX_NORM,
    MIN_LEAF_SIZE,
    RECIPES,
    check_choice,
    make_optimizer,
)

TUNE_ALONE = "xla_gpu_shard_autotuning=false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way's step; times in milliseconds, the rest without unit but for bytes."""

    method: str
    """The way, as on the command line."""
    step_ms: float
    p10_ms: float
    p90_ms: float
    mfu: float | None
    """`None` where the peak of the device is not known."""
    temporary_bytes: int
    trace_s: float
    compile_s: float
    loss: float
    exposed_ms: float | None = None
    """Beyond the step without gradient exchange, if that was timed."""


COLUMNS = (
    tables.Column("way", lambda r: r.method),
    tables.Column("step ms", lambda r: f"{r.step_ms:.2f}"),
    tables.Column("p10-p90 ms", lambda r: f"{r.p10_ms:.2f}-{r.p90_ms:.2f}"),
    tables.Column("exposed ms", lambda r: "-" if r.exposed_ms is None else f"{r.exposed_ms:.2f}"),
    tables.Column("MFU", lambda r: f"{r.mfu:.1%}" if r.mfu else "-"),
    tables.Column("temp GiB", lambda r: f"{r.temporary_bytes / 2**30:.2f}"),
    tables.Column("trace s", lambda r: f"{r.trace_s:.1f}"),
    tables.Column("compile s", lambda r: f"{r.compile_s:.1f}"),
    tables.Column("loss", lambda r: f"{r.loss:.3f}"),
)


OF_PROGRAMS = tuple(c for c in COLUMNS if c.title in ("way", "temp GiB", "trace s", "compile s"))


def line(columns: Sequence[tables.Column], row: Any = None) -> str:
    """A row of the table, or its titles; it is printed as soon as its way is timed."""
    texts = [c.title if row is None else c.cell(row) for c in columns]
    widths = {"way": 36, "p10-p90 ms": 15}
    pairs = zip(columns, texts, strict=True)
    return "  ".join(f"{text:>{widths.get(c.title, 10)}}" for c, text in pairs)


# --- What is timed --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model and its training, which all ways share."""

    config: Config
    training: ways.Training
    batch: int
    """Sequences of every worker."""

    @property
    def tokens_per_worker(self) -> int:
        """In a step."""
        return self.batch * self.config.seq_len

    def tokens(self, way: ways.Way) -> jax.ShapeDtypeStruct:
        """Shape and sharding of all workers' tokens."""
        shape = way.mesh.size * self.batch, self.config.seq_len + 1
        own = NamedSharding(way.mesh, P(way.mesh.axis_names))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=own)

    def first_state(self, way: ways.Way) -> Any:
        """A way's state with random parameters."""
        return way.init(random_params(way.model.shapes, NamedSharding(way.mesh, P())))


def make_run(
    model: str,
    *,
    batch: int,
    attention: str,
    layers: int | None = None,
    steps: int | None = None,
    topology: str = "direct",
    nodes: int = 1,
    transport: str | None = None,
) -> Run:
    """A model by its recipe, of so many layers and steps: AdamW, norms clipped, functions in bf16.

    Raises:
      ValueError: the topology is not known, or the devices are not so many equal nodes.
    """
    config = CONFIGS[model]
    config = dataclasses.replace(config, attention=attention, n_layers=layers or config.n_layers)
    recipe = RECIPES[model]._replace(steps=steps or RECIPES[model].steps)
    limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
    training = ways.Training(
        make_model=partial(ways.llama, config), optimizer=make_optimizer(recipe, optax.identity()),
        mesh=make_mesh(jax.devices(), nodes), max_norm=MAX_NORM, dtype=jnp.bfloat16,
        check_vma=False, limits=limits | {"transport": transport},
        topology=contenders.parse_topology(topology, nodes),
    )  # fmt: skip
    return Run(config=config, training=training, batch=batch)


@cache
def _drawer(shape: tuple[int, ...], sharding: Any) -> Callable[[Array], Array]:
    def draw(key: Array) -> Array:
        return 0.02 * jax.random.normal(key, shape) if len(shape) > 1 else jnp.ones(shape)

    return jax.jit(draw, out_shardings=sharding)


def random_params(shapes: Any, sharding: Any) -> Any:
    """Parameters as they are initialised but for the scale of single matrices.

    A program for every shape: initialising all layers in one takes a minute to compile.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawers = (_drawer(leaf.shape, sharding) for leaf in leaves)
    return treedef.unflatten(draw(key) for draw, key in zip(drawers, keys, strict=True))


Draw = Callable[[], Array]
"""Returns fresh tokens at each call."""


def make_draw(like: jax.ShapeDtypeStruct, vocab_size: int) -> Draw:
    """Draws tokens for one step after the other, all below ``vocab_size``.

    A model that trains on one batch alone learns it by heart within a hundred steps. Its gradients
    are then almost 0, which those of a training never are.
    """

    def draw(number: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(1), number)
        return jax.random.randint(key, like.shape, 0, vocab_size, like.dtype)

    numbers = itertools.count()
    jitted = jax.jit(draw, out_shardings=like.sharding)
    return lambda: jitted(np.uint32(next(numbers)))


def time_steps(
    step: Callable, state: Any, draw: Draw, samples: int, steps: int
) -> tuple[Any, float, list[float]]:
    """The state and the loss after all steps, and every sample's milliseconds per step.

    The first sample is not counted. Virtual devices have too few threads for two steps: there each
    is waited for.
    """
    found, alone = [], jax.default_backend() == "cpu"
    for _ in range(samples + 1):
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = step(state, draw())
            if alone:
                jax.block_until_ready(loss)
        jax.block_until_ready((loss, jax.tree.leaves(state)[0]))
        found.append((time.perf_counter() - start) * 1e3 / steps)
    if not math.isfinite(float(loss)):
        raise ArithmeticError(f"the loss is {float(loss)}")
    return state, float(loss), found[1:]


def profiled(step: Callable, state: Any, draw: Draw) -> Any:
    """The state after so many runs that JAX has compiled the step again, by their profile."""
    for _ in range(jax.config.jax_pgle_profiling_runs + 1):
        state, loss = step(state, draw())
        jax.block_until_ready((loss, state))
    return state


def profile(step: Any, state: Any, draw: Draw, folder: Path) -> None:
    """Leaves a profile of three steps of a compiled function, for `timeline.py`.

    As in `time_steps` the host waits for nobody: a wait would leave the GPUs idle before each step.
    """
    found = timeline.collectives_of(step.as_text(), jax.local_device_count())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / timeline.COLLECTIVES).write_text(json.dumps(found, indent=1) + "\n")
    with jax.profiler.trace(folder):
        for _ in range(3):
            state, loss = step(state, draw())
            if jax.default_backend() == "cpu":
                jax.block_until_ready(loss)
        jax.block_until_ready((loss, state))


# --- Command line ---------------------------------------------------------------------------------


class Program(NamedTuple):
    """A way's step, compiled."""

    method: str
    way: ways.Way
    step: Any
    trace_s: float
    compile_s: float

    @property
    def temporary_bytes(self) -> int:
        """XLA's for one device."""
        return self.step.memory_analysis().temp_size_in_bytes

    @property
    def row(self) -> dict[str, Any]:
        """The fields of `Row` that a program has which does not run."""
        names = "method", "temporary_bytes", "trace_s", "compile_s"
        return {name: getattr(self, name) for name in names}


def compile_all(run: Run, texts: Sequence[str], alone: bool = False) -> dict[str, Program]:
    """The programs of all ways that compile, side by side or each ``alone``.

    XLA shares the tuning of kernels out among processes, which must then compile in one order.
    """
    shared = jax.process_count() > 1 and TUNE_ALONE not in os.environ.get("XLA_FLAGS", "")
    threads = 1 if shared or alone else min(len(texts), os.cpu_count() or 1)
    traced, programs = {}, {}
    for text in texts:
        start = time.perf_counter()
        try:
            way = ways.make_way(text, run.training)
            lowered = ways.lower(way, way.like, run.tokens(way))
        except Exception as error:  # whatever a way raises: the others are worth their rows
            print(failure(text, error), flush=True)
        else:
            traced[text] = way, lowered, time.perf_counter() - start
            announce(f"traced {text}")

    def compiled(text: str, way: ways.Way, lowered: Any, trace_s: float) -> Program:
        start = time.perf_counter()
        return Program(text, way, lowered.compile(), trace_s, time.perf_counter() - start)

    with ThreadPoolExecutor(threads) as pool:
        futures = {text: pool.submit(compiled, text, *found) for text, found in traced.items()}
        for text, future in futures.items():
            try:
                programs[text] = future.result()
            except Exception as error:
                print(failure(text, error), flush=True)
            else:
                announce(f"compiled {text}")
    return everywhere(texts, programs)


def everywhere(texts: Sequence[str], programs: dict[str, Program]) -> dict[str, Program]:
    """The programs that all processes have: a step that one of them lacks would wait forever."""
    if jax.process_count() == 1:
        return programs
    own = np.array([text in programs for text in texts])
    found = multihost_utils.process_allgather(own).reshape(-1, len(texts))
    for text, had in zip(texts, found.T, strict=True):
        if not had.all():
            lacking = ", ".join(map(str, np.flatnonzero(~had)))
            announce(f"{text} failed: processes {lacking} have no program of it; see their logs")
            programs.pop(text, None)
    return programs


def measure(
    run: Run, text: str, program: Program, samples: int, steps: int, profiles: Path | None = None
) -> Row:
    """Draws parameters, trains, and times."""
    config, way, step = run.config, program.way, program.step
    with jax.set_mesh(way.mesh):
        draw = make_draw(run.tokens(way), config.vocab_size)
        state = run.first_state(way)
        if jax.config.jax_enable_pgle:
            step = ways.jitted(way)
            state = profiled(step, state, draw)
        state, loss, times = time_steps(step, state, draw, samples, steps)
        if profiles:
            profile(program.step, state, draw, profiles / text.replace(":", "-").replace("/", "-"))
    p10, median, p90 = map(float, np.percentile(times, [10, 50, 90]))
    flops = training_flops(config, way.model.shapes, run.tokens_per_worker)
    peak = peak_flops(jax.devices()[0].device_kind)
    return Row(
        method=text, step_ms=median, p10_ms=p10, p90_ms=p90,
        mfu=flops / (median / 1e3) / peak if peak else None,
        temporary_bytes=program.temporary_bytes,
        trace_s=program.trace_s, compile_s=program.compile_s, loss=loss,
    )  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "350m",
    chosen: Annotated[str, typer.Option("--ways", help="How to train: see ways.py.")] = (
        "none,bf16-psum,dp:5,bf16-zero,zero-pipeline:5/2.5,bf16-fsdp,fsdp:5/8"
    ),
    topology: Annotated[
        str, typer.Option(help="direct, ring, butterfly, hierarchical.")
    ] = "direct",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of every worker.")] = 3,
    attention: Annotated[str, typer.Option(help="cudnn (flash attention) or xla.")] = "xla",
    transport: Annotated[
        str | None, typer.Option(help="Of payloads: collectives, permutes, push.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of every way.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="In a sample.")] = 5,
    nodes: Annotated[int, typer.Option(min=1, help="Equal nodes: a mesh of two axes.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the model's own.")] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Run no step.")] = False,
    profiles: Annotated[
        Path | None,
        typer.Option("--profile", help="Folder for JAX's profiles of all ways."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows are added here.")] = None,
) -> None:
    """Measures and prints."""
    check_choice(model, CONFIGS, "--model")
    check_choice(attention, get_args(AttentionKernel), "--attention")
    if compile_only and profiles:
        raise typer.BadParameter("runs no step; leave --profile out", param_hint="--compile-only")
    kept = kept_runs(json_file)
    join_hosts()  # ahead of all that looks for devices
    texts = sorted(contenders.parts(chosen), key=lambda text: text != "none")
    told = {"batch": batch, "attention": attention, "transport": transport, "layers": layers}
    try:
        run = make_run(model, topology=topology, nodes=nodes, **told)
        for text in texts:
            ways.parse(text, run.training)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ways, --topology, --nodes") from error
    first, rows, alone_ms = jax.process_index() == 0, [], None
    columns = OF_PROGRAMS if compile_only else COLUMNS
    told |= {"model": model, "topology": topology, "tokens": run.tokens_per_worker}
    if first:
        print(
            f"{model}, {run.tokens_per_worker:,} tokens per worker and step, "
            f"{run.training.mesh.size} x {jax.devices()[0].device_kind}, "
            f"{jax.process_count()} process(es), {topology}"
        )
        print(line(columns), flush=True)
    programs = compile_all(run, texts, alone=compile_only)
    if compile_only and first:
        print(*[line(columns, program) for program in programs.values()], sep="\n")
        keep(json_file, kept, told, [program.row for program in programs.values()])
    if compile_only:
        return
    for text in [*programs]:
        try:
            row = measure(run, text, programs.pop(text), samples, steps, profiles)
        except Exception as error:  # such as memory that is not there: the others may fit
            announce(failure(text, error))
            continue
        finally:
            gc.collect()  # the arrays of a way are gone before those of the next
        alone_ms = row.step_ms if text == "none" else alone_ms
        if alone_ms is not None:
            row = dataclasses.replace(row, exposed_ms=row.step_ms - alone_ms)
        rows.append(row)
        if first:
            print(line(columns, row), flush=True)
        if first:  # row by row: a command that is cut off leaves what it has
            keep(json_file, kept, told, [*map(asdict, rows)])


def keep(json_file: Path | None, kept: list[Any], told: dict[str, Any], rows: list[Any]) -> None:
    """Writes the runs that the file has, and this one."""
    if json_file is None:
        return
    found = {"about": tables.surroundings(jax.devices()), "options": told, "rows": rows}
    json_file.write_text(json.dumps({"runs": [*kept, found]}, indent=1) + "\n")


def failure(text: str, error: Exception) -> str:
    """One line."""
    return f"{text} failed: {type(error).__name__}: {' '.join(str(error).split())[:600]}"


def kept_runs(json_file: Path | None) -> list[Any]:
    """Runs that the file has already; refuses early a file to which none could be added."""
    if json_file is None or not json_file.exists():
        return []
    try:
        return json.loads(json_file.read_text())["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"--json {json_file} is no file of this command") from error


if __name__ == "__main__":
    typer.run(main)
