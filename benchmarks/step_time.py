r"""Times training steps by the ways of `ways.py`: what a step computes, sends and waits for.

    python benchmarks/step_time.py --model 1b --ways bf16-psum,dp:5,zero-pipeline:5/2.5,fsdp:5/8
    NCCL_P2P_DISABLE=1 python benchmarks/step_time.py --model 350m --batch 3 --rate 200gbit

One process with all GPUs, or several, which the environment's NUM_HOSTS, HOST_ID and COORDINATOR
tell of each other; the first one prints. The model is that of
`examples/llm_model.py` with the optimizer of `examples/train_llm.py`: bf16 matrix products, f32
parameters (or masters) and moments, bf16 gradients, state donated, random tokens. The host waits
for nobody within a sample of several steps.
JAX_ENABLE_PGLE=true lets JAX profile each way's first steps, and compile again by their times.
``--profile`` keeps JAX's profile of each way, for xprof, and prints the largest kernels.

``none`` averages nothing: what a step takes beyond it is *exposed* communication, kernels of the
compression included, and less the work that shards save. *Wire* is counted in the compiled
program. *Link* is the share of ``--rate`` that the wire takes over the whole step. *Temporaries*
are XLA's for one device. *MFU* is the share of the GPUs' peak that the model's own operations take,
see `llm_model.training_flops`.
"""

import dataclasses
import gc
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timeline
import typer
import ways
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.all_reduce import make_mesh, payloads_by
from dynamiq_jax.request.ways import bytes_per_second

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

NONE = "none"
TUNE_ALONE = "xla_gpu_shard_autotuning=false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way's step; times in milliseconds, the rest without unit but for bytes."""

    model: str
    tokens: int
    """Per worker and step."""
    method: str
    """The way, as on the command line."""
    topology: str
    transport: str
    n_workers: int
    step_ms: float
    p10_ms: float
    p90_ms: float
    mfu: float | None
    """`None` where the peak of the device is not known."""
    wire_bytes: float
    """That a worker sends in a step."""
    temporary_bytes: int
    trace_s: float
    compile_s: float
    loss: float
    exposed_ms: float | None = None
    """Beyond the step that averages nothing, if that was timed."""
    link_share: float | None = None
    """The share of the link's rate, where one was given."""
    transfer_ms: float | None = None
    """While a transfer is under way, in one step on the first GPU; by ``--profile``."""
    hidden_ms: float | None = None
    """The part of them beside other kernels."""


COLUMNS = (
    tables.Column("way", lambda r: r.method),
    tables.Column("step ms", lambda r: f"{r.step_ms:.2f}"),
    tables.Column("p10-p90 ms", lambda r: f"{r.p10_ms:.2f}-{r.p90_ms:.2f}"),
    tables.Column("exposed ms", lambda r: "-" if r.exposed_ms is None else f"{r.exposed_ms:.2f}"),
    tables.Column("MFU", lambda r: f"{r.mfu:.1%}" if r.mfu else "-"),
    tables.Column("wire MB", lambda r: f"{r.wire_bytes / 1e6:,.4g}"),
    tables.Column("link", lambda r: "-" if r.link_share is None else f"{r.link_share:.0%}"),
    tables.Column("temp GiB", lambda r: f"{r.temporary_bytes / 2**30:.2f}"),
    tables.Column("trace s", lambda r: f"{r.trace_s:.1f}"),
    tables.Column("compile s", lambda r: f"{r.compile_s:.1f}"),
    tables.Column("loss", lambda r: f"{r.loss:.3f}"),
    tables.Column("hidden", lambda r: f"{r.hidden_ms:.1f} / {r.transfer_ms:.1f}"),
)


def line(texts: Sequence[str]) -> str:
    """A row of the table; it is printed as soon as its way is timed."""
    widths = 30, 10, 15, *[10] * len(texts)
    return "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=False))


# --- What is timed --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model and its training, which all ways share."""

    model: str
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
    steps: int | None = None,
    topology: str = "direct",
    nodes: int = 1,
    transport: str | None = None,
) -> Run:
    """A model by its recipe, of so many steps: AdamW, norms clipped, functions in bf16.

    Raises:
      ValueError: the topology is not known, or the devices are not so many equal nodes.
    """
    config = dataclasses.replace(CONFIGS[model], attention=attention)
    recipe = RECIPES[model]._replace(steps=steps or RECIPES[model].steps)
    limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
    training = ways.Training(
        make_model=partial(ways.llama, config), optimizer=make_optimizer(recipe, optax.identity()),
        mesh=make_mesh(jax.devices(), nodes), max_norm=MAX_NORM, dtype=jnp.bfloat16,
        check_vma=False, limits=limits | {"transport": transport},
        topology=contenders.parse_topology(topology, nodes),
    )  # fmt: skip
    return Run(model=model, config=config, training=training, batch=batch)


@cache
def _drawer(shape: tuple[int, ...], ones: bool, sharding: Any) -> Callable[[Array], Array]:
    def draw(key: Array) -> Array:
        return jnp.ones(shape) if ones else 0.02 * jax.random.normal(key, shape)

    return jax.jit(draw, out_shardings=sharding)


def random_params(shapes: Any, sharding: Any, seed: int = 0) -> Any:
    """Parameters as they are initialised but for the scale of single matrices.

    A program for every shape: initialising all layers in one takes a minute to compile.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key: Array, path: Any, leaf: Any) -> Array:
        ones = len(leaf.shape) < 2 or "norm" in jax.tree_util.keystr(path)  # of layers, stacked
        return _drawer(leaf.shape, ones, sharding)(key)

    return treedef.unflatten(draw(key, *leaf) for key, leaf in zip(keys, leaves, strict=True))


def time_steps(
    step: Callable, state: Any, tokens: Array, samples: int, steps: int
) -> tuple[Any, float, list[float]]:
    """The state and the loss after all steps, and every sample's milliseconds per step.

    The first sample is not counted. Virtual devices have too few threads for two steps: there each
    is waited for.
    """
    found, alone = [], jax.default_backend() == "cpu"
    for _ in range(samples + 1):
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = step(state, tokens)
            if alone:
                jax.block_until_ready(loss)
        jax.block_until_ready((loss, jax.tree.leaves(state)[0]))
        found.append((time.perf_counter() - start) * 1e3 / steps)
    if not math.isfinite(float(loss)):
        raise ArithmeticError(f"the loss is {float(loss)}")
    return state, float(loss), found[1:]


def profiled(step: Callable, state: Any, tokens: Array) -> Any:
    """The state after so many runs that JAX has compiled the step again, by their profile."""
    for _ in range(jax.config.jax_pgle_profiling_runs + 1):
        state, loss = step(state, tokens)
        jax.block_until_ready((loss, state))
    return state


def profile_step(step: Callable, state: Any, tokens: Array, folder: Path) -> timeline.Overlap:
    """Prints a step's kernels by time; returns what of its transfers is hidden."""

    def call() -> Any:
        nonlocal state
        state, loss = step(state, tokens)
        return loss, jax.tree.leaves(state)

    spans = timeline.profile(call, folder)
    found = timeline.overlap(spans)
    if jax.process_index() == 0:
        times, counts = Counter(), Counter(span.name for span in spans)
        for span in spans:
            times[span.name] += span.end_us - span.start_us  # pyright: ignore[reportArgumentType]
        print(f"{folder.name}: busy {timeline.busy_us(spans) / 1e3:.2f} ms; {found}")
        for name, us in times.most_common(25):
            print(f"  {us / 1e3:8.2f} ms {counts[name]:5} x {name}", flush=True)
    return found


# --- Command line ---------------------------------------------------------------------------------


@dataclass
class Program:
    """A way's step, compiled."""

    way: ways.Way
    lowered: Any
    trace_s: float
    step: Any = None
    compile_s: float = 0.0

    def compile(self) -> None:
        """Fills `step`."""
        start = time.perf_counter()
        self.step = self.lowered.compile()
        self.compile_s = time.perf_counter() - start


def compile_all(run: Run, texts: Sequence[str], say: Callable[[str], None]) -> dict[str, Program]:
    """The programs of all ways that compile, side by side.

    XLA shares the tuning of kernels out among processes, which must then compile in one order.
    """
    shared = jax.process_count() > 1 and TUNE_ALONE not in os.environ.get("XLA_FLAGS", "")
    threads = 1 if shared else min(len(texts), os.cpu_count() or 1)
    found, programs = {}, {}
    for text in texts:
        start = time.perf_counter()
        try:
            way = ways.make_way(text, run.training)
            lowered = ways.lower(way, way.like, run.tokens(way))
        except Exception as error:  # whatever a way raises: the others are worth their rows
            say(failure(text, error))
        else:
            found[text] = Program(way, lowered, time.perf_counter() - start)
            say(f"traced {text}")
    with ThreadPoolExecutor(threads) as pool:
        futures = {text: pool.submit(program.compile) for text, program in found.items()}
        for text, future in futures.items():
            try:
                future.result()
            except Exception as error:
                say(failure(text, error))
            else:
                programs[text] = found[text]
                say(f"compiled {text}")
    return programs


def measure(
    run: Run, text: str, program: Program, samples: int, steps: int, profiles: Path | None = None
) -> Row:
    """Draws parameters, trains, and times."""
    t, config, way, step = run.training, run.config, program.way, program.step
    with jax.set_mesh(way.mesh):
        like = run.tokens(way)
        draw = partial(jax.random.randint, jax.random.key(1), like.shape, 0, config.vocab_size)
        tokens = jax.jit(draw, out_shardings=like.sharding)()
        state = run.first_state(way)
        if jax.config.jax_enable_pgle:
            step = ways.jitted(way)
            state = profiled(step, state, tokens)
        state, loss, times = time_steps(step, state, tokens, samples, steps)
        hidden = None
        if profiles:
            folder = profiles / f"{run.model}-{text}".replace(":", "-").replace("/", "-")
            hidden = profile_step(step, state, tokens, folder)
    p10, median, p90 = map(float, np.percentile(times, [10, 50, 90]))
    flops = training_flops(config, way.model.shapes, run.tokens_per_worker)
    peak = peak_flops(jax.devices()[0].device_kind)
    route = ways.parse(text, t).topology(t)
    return Row(
        model=run.model, tokens=run.tokens_per_worker, method=text,
        topology=type(route).__name__.lower() if route else "native",
        transport=payloads_by(route, t.mesh.devices.shape),
        n_workers=t.mesh.size, step_ms=median, p10_ms=p10, p90_ms=p90,
        mfu=flops / (median / 1e3) / peak if peak else None,
        wire_bytes=ways.sent_bytes(program.step.as_text(), t.mesh.size),
        temporary_bytes=program.step.memory_analysis().temp_size_in_bytes,
        trace_s=program.trace_s, compile_s=program.compile_s, loss=loss,
        transfer_ms=hidden and hidden.transfer_ms, hidden_ms=hidden and hidden.hidden_ms,
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
    rate: Annotated[str | None, typer.Option(help="Of a worker's link, as 25gbit.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="Of payloads: collectives, permutes, push.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of every way.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="In a sample.")] = 5,
    nodes: Annotated[int, typer.Option(min=1, help="Equal nodes: a mesh of two axes.")] = 1,
    profiles: Annotated[
        Path | None,
        typer.Option("--profile", help="Folder for JAX's profiles of a step; GPUs only."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows are added here.")] = None,
) -> None:
    """Measures and prints."""
    check_choice(model, CONFIGS, "--model")
    check_choice(attention, get_args(AttentionKernel), "--attention")
    kept = kept_runs(json_file)
    join_hosts()  # ahead of all that looks for devices
    if profiles and jax.default_backend() != "gpu":
        raise typer.BadParameter("--profile: kernels are seen on GPUs only; leave it out here")
    texts = sorted(contenders.parts(chosen), key=lambda text: text != NONE)
    told = {"batch": batch, "attention": attention, "transport": transport}
    try:
        per_second = bytes_per_second(rate) if rate else None
        run = make_run(model, topology=topology, nodes=nodes, **told)
        for text in texts:
            ways.parse(text, run.training)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ways, --topology, --rate") from error
    first, rows, alone_ms = jax.process_index() == 0, [], None
    say = Console(stderr=True).log if first else lambda text: None
    shown = [c for c in COLUMNS if profiles or c.title != "hidden"]
    if first:
        print(
            f"{run.model}, {run.tokens_per_worker:,} tokens per worker and step, "
            f"{run.training.mesh.size} x {jax.devices()[0].device_kind}, "
            f"{jax.process_count()} process(es), {topology}"
        )
        print(line([c.title for c in shown]), flush=True)
    programs = compile_all(run, texts, say)
    for text in [*programs]:
        try:
            row = measure(run, text, programs.pop(text), samples, steps, profiles)
        except Exception as error:  # such as memory that is not there: the others may fit
            say(failure(text, error))
            continue
        finally:
            gc.collect()  # the arrays of a way are gone before those of the next
        alone_ms = row.step_ms if text == NONE else alone_ms
        row = dataclasses.replace(
            row,
            exposed_ms=None if alone_ms is None else row.step_ms - alone_ms,
            link_share=1e3 * row.wire_bytes / per_second / row.step_ms if per_second else None,
        )
        rows.append(row)
        if first:
            print(line([c.cell(row) for c in shown]), flush=True)
        if json_file and first:  # row by row: a command that is cut off leaves what it has
            about = tables.surroundings(jax.devices())
            options = {"model": run.model, "attention": attention}
            found = {"about": about, "options": options, "rows": [*map(asdict, rows)]}
            json_file.write_text(json.dumps({"runs": [*kept, found]}, indent=1) + "\n")


def join_hosts() -> None:
    """Waits for the other processes of which the environment tells, as that of `hosts.py` does."""
    if "COORDINATOR" in os.environ:
        numbers = (int(os.environ[name]) for name in ("NUM_HOSTS", "HOST_ID"))
        jax.distributed.initialize(os.environ["COORDINATOR"], *numbers)


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
