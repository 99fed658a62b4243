r"""Times training steps by how their gradients are averaged: what a step computes, and waits for.

    python benchmarks/step_time.py --model 1b --methods bf16-psum,dynamiq:5,dynamiq-dither:3.5
    NCCL_P2P_DISABLE=1 python benchmarks/step_time.py --model 350m --batch 3

One process with all GPUs, or one for each (``--processes``, ``--process-id``, ``--coordinator``);
the first one prints. Data-parallel training of the models in `examples/llm_model.py` with the
optimizer of `examples/train_llm.py`: bf16 matrix products, f32 parameters and moments, gradients in
bf16, parameters and state donated, random tokens. The host waits for nobody
within a sample of several steps.

A step that averages nothing is what computation takes; what a step takes beyond that is *exposed*
communication, kernels of the compression included. *MFU* is the share of the GPUs' peak that the
model's own operations take, see `llm_model.training_flops`.

Methods are those of ``dynamiq-jax error``, with bits where they have a choice; ``bf16-psum``:
`lax.pmean` of every leaf after the backward pass, with XLA's own options, by which it overlaps what
it can; and ``bf16-native``: XLA's all-reduce where the other methods reduce.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timeline
import typer
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.all_reduce import make_mesh, transport
from dynamiq_jax.commands.bench.timing import compile_together
from dynamiq_jax.core.xla import compiled_by, compiler_options

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from llm_model import (  # pyright: ignore[reportMissingImports]
    CONFIGS,
    AttentionKernel,
    Config,
    Stages,
    init_params,
    make_stages,
    peak_flops,
    training_flops,
)
from train_llm import MIN_LEAF_SIZE, RECIPES, make_optimizer  # pyright: ignore[reportMissingImports]

NONE, BF16, NATIVE = "none", "bf16-psum", "bf16-native"

ValueAndGrad = Callable[[Any, Array], tuple[Array, Any]]
"""(one worker's parameters in bf16, those of each stage, and its tokens) -> (its own loss, the mean
gradients)."""


class Way(NamedTuple):
    """One way to train a step."""

    value_and_grad: ValueAndGrad
    wire_bytes: Callable[[Any], float]
    """(gradients) -> bytes that a worker sends."""
    options: dict[str, Any]
    """Options of the compiler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to average; times in milliseconds, the rest without unit but for bytes."""

    model: str
    tokens: int
    """Per worker and step."""
    method: str
    topology: str
    transport: str
    n_workers: int
    step_ms: float
    p10_ms: float
    p90_ms: float
    exposed_ms: float
    """Beyond the step that averages nothing."""
    mfu: float | None
    """`None` where the peak of the device is not known."""
    wire_bytes: float
    """That a worker sends in a step."""
    transfer_ms: float | None = None
    """While a transfer is under way, in one step on the first GPU; by ``--profile``."""
    hidden_ms: float | None = None
    """The part of them beside other kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Settings that all rows share."""

    model: str
    config: Config
    mesh: Mesh
    topology: Any
    batch: int
    """Sequences of every worker."""
    samples: int
    steps: int
    """In a sample."""
    staged: bool
    """Whether gradients are reduced in the backward pass, or after it."""
    scanned: bool = False
    """Whether the blocks are a loop over a stack of their parameters."""
    together: int = 1
    """Blocks to a function of `dq.sequential`."""
    lag: int
    """See `dq.sequential`."""
    bucket_bytes: int | None
    profiles: Path | None
    """A folder for timelines."""
    xla: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the compiler, beside those of `dq.jit`."""

    @property
    def stages(self) -> Stages:
        """The model as functions that follow each other."""
        return make_stages(self.config, self.scanned, self.together)

    @property
    def options(self) -> dict[str, Any]:
        """Settings that the file keeps beside the rows."""
        return {
            "model": self.model, "attention": self.config.attention, "remat": self.config.remat,
            "bucket_bytes": self.bucket_bytes, "staged": self.staged, "lag": self.lag,
            "scanned": self.scanned, "together": self.together, "xla": self.xla,
        }  # fmt: skip


COLUMNS = (
    tables.Column("method", lambda r: r.method),
    tables.Column("topology", lambda r: r.topology),
    tables.Column("step ms", lambda r: f"{r.step_ms:.2f}"),
    tables.Column("p10-p90 ms", lambda r: f"{r.p10_ms:.2f}-{r.p90_ms:.2f}"),
    tables.Column("exposed ms", lambda r: f"{r.exposed_ms:.2f}"),
    tables.Column("MFU", lambda r: f"{r.mfu:.1%}" if r.mfu else "-"),
    tables.Column("wire MB", lambda r: f"{r.wire_bytes / 1e6:,.4g}"),
    tables.Column("hidden", lambda r: f"{r.hidden_ms:.1f} / {r.transfer_ms:.1f}"),
    tables.Column("transport", lambda r: r.transport),
)


def parse_options(texts: Sequence[str]) -> dict[str, bool | int | float | str]:
    """XLA's options as it wants them, truths, numbers or text, from texts as ``name=true``.

    Raises:
      ValueError: a text has no ``=``.
    """
    found: dict[str, bool | int | float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option {text!r}: pass NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


# --- What is timed --------------------------------------------------------------------------------


def parse_way(text: str, run: Run) -> Way:
    """How a step with gradients averaged as ``text`` says comes to its loss and gradients.

    ``bf16-psum`` and ``none`` are compiled with XLA's own options, whatever is staged.

    Raises:
      ValueError: the method or its bits are not known.
    """
    sizes, stages = run.mesh.devices.shape, run.stages
    names = run.mesh.axis_names
    axes = names if len(names) > 1 else names[0]
    if text in (NONE, BF16):
        sent = 2 * (math.prod(sizes) - 1) / math.prod(sizes) if text == BF16 else 0.0

        def plainly(params: Any, tokens: Array) -> tuple[Array, Any]:
            loss, grads = jax.value_and_grad(stages.loss)(params, tokens)
            return loss, lax.pmean(grads, axes) if text == BF16 else grads

        return Way(
            plainly, lambda grads: sent * sum(2 * g.size for g in jax.tree.leaves(grads)), {}
        )
    native = contenders.native_only(text) or text == NATIVE
    request = dq.Compression(
        contenders.make_method("bf16" if text == NATIVE else text),
        topology=None if native else run.topology,
        min_leaf_size=MIN_LEAF_SIZE,
        min_bucket_size=1,
        bucket_bytes=run.bucket_bytes,
    )

    def in_stages(params: Any, tokens: Array) -> Array:
        return dq.sequential(stages.functions, params, tokens, axes, lag=run.lag, method=request)

    def value_and_grad(params: Any, tokens: Array) -> tuple[Array, Any]:
        if run.staged:
            return jax.value_and_grad(in_stages)(params, tokens)
        loss, grads = jax.value_and_grad(stages.loss)(params, tokens)
        return loss, dq.pmean(grads, axes, method=request)

    def wire_bytes(grads: Any) -> float:
        told = partial(request.explain, n_workers=sizes, verbose=False)
        if not run.staged:
            return told(grads).wire_bytes

        def of_stage(function: Any, own: Any) -> float:
            if not isinstance(function, dq.Scanned):
                return told(own).wire_bytes
            layer = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), own)
            return run.config.n_layers * told(layer).wire_bytes

        return sum(map(of_stage, stages.functions, grads))

    return Way(value_and_grad, wire_bytes, compiler_options() | run.xla)


def make_step(
    optimizer: optax.GradientTransformation, mesh: Mesh, way: Way
) -> Callable[[Any, Array], tuple[Any, Array]]:
    """Returns ``step((params, opt_state), tokens) -> ((params, opt_state), loss)``, jitted.

    The first argument is donated.
    """
    axes = mesh.axis_names

    # A step that averages nothing returns gradients that differ: JAX must not check.
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=False)
    def value_and_grad(params: Any, tokens: Array) -> tuple[Array, Any]:
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss, grads = way.value_and_grad(narrow, tokens)
        return lax.pmean(loss, axes), grads

    @partial(jax.jit, donate_argnums=0, compiler_options=way.options)
    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        params, opt_state = state
        with compiled_by(way.options):
            loss, grads = value_and_grad(params, tokens)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def random_params(config: Config, sharding: NamedSharding, seed: int = 0) -> Any:
    """Parameters as they are initialised but for the scale of single matrices.

    A program for every shape: initialising all layers in one takes a minute to compile.
    """

    @partial(jax.jit, static_argnums=1, out_shardings=sharding)
    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        return 0.02 * jax.random.normal(key, shape) if len(shape) > 1 else jnp.ones(shape)

    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten(draw(key, x.shape) for key, x in zip(keys, leaves, strict=True))


def time_steps(
    step: Callable, state: Any, tokens: Array, samples: int, steps: int
) -> tuple[Any, list[float]]:
    """The state after all steps, and every sample's milliseconds per step; one is not counted.

    Virtual devices have too few threads for two steps: there each is waited for.
    """
    found, alone = [], jax.default_backend() == "cpu"
    for _ in range(samples + 1):
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = step(state, tokens)
            if alone:
                jax.block_until_ready(loss)
        jax.block_until_ready(loss)
        jax.block_until_ready(jax.tree.leaves(state)[0])
        found.append((time.perf_counter() - start) * 1e3 / steps)
    if not math.isfinite(float(loss)):
        raise ArithmeticError(f"the loss is {float(loss)}")
    return state, found[1:]


def profile_step(
    step: Callable, state: Any, tokens: Array, folder: Path, title: str
) -> tuple[Any, timeline.Overlap]:
    """The state after some steps, and what the last of them hid.

    The folder gets its picture, and its kernels as CSV.
    """

    def call() -> Any:
        nonlocal state
        state, loss = step(state, tokens)
        return loss, jax.tree.leaves(state)

    spans = timeline.profile(call)
    if jax.process_index() == 0:
        file = folder / f"{title.replace(' ', '-').replace(':', '-')}.png"
        timeline.draw(spans, title, file)
        timeline.write(spans, file.with_suffix(".csv"))
    return state, timeline.overlap(spans)


# --- Command line ---------------------------------------------------------------------------------


def measure(run: Run, methods: Sequence[str], say: Callable[[str], None]) -> Iterator[Row]:
    """A row for every method; the first one averages nothing."""
    config, mesh = run.config, run.mesh
    whole, own = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    optimizer = make_optimizer(RECIPES[run.model])
    init = jax.jit(optimizer.init, out_shardings=whole)

    def fresh() -> tuple[Any, Any]:
        params = run.stages.split(random_params(config, whole))
        return params, init(params)

    state = fresh()
    shape = mesh.size * run.batch, config.seq_len + 1
    draw = partial(jax.random.randint, jax.random.key(1), shape, 0, config.vocab_size)
    tokens = jax.jit(draw, out_shardings=own)()
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), state[0])
    flops = training_flops(config, grads, run.batch * config.seq_len)
    peak = peak_flops(jax.devices()[0].device_kind)
    ways = {text: parse_way(text, run) for text in (NONE, *methods)}

    def compiled(texts: Sequence[str]) -> dict[str, Any]:
        """Leaves out, aloud, what cannot be traced."""
        lowered = {}
        for text in texts:
            try:
                lowered[text] = make_step(optimizer, mesh, ways[text]).lower(state, tokens)
            except (NotImplementedError, ValueError) as error:
                say(f"{text} is left out: {error}")
            else:
                say(f"traced {text}")
        programs = compile_together(list(lowered.values()), say)
        return dict(zip(lowered, programs, strict=True))

    programs = compiled([NONE])  # XLA tunes its matrix products here, and finds them tuned
    programs |= compiled([text for text in ways if text != NONE])
    alone_ms = 0.0
    for text, step in programs.items():
        state, times = time_steps(step, state, tokens, run.samples, run.steps)
        p10, median, p90 = map(float, np.percentile(times, [10, 50, 90]))
        say(f"{text}: {median:.2f} ms")
        found = None
        if run.profiles:
            title = f"{run.model} {text}"
            state, found = profile_step(step, state, tokens, run.profiles, title)
            say(f"{text}: {found}")
        if text == NONE:
            alone_ms = median
            state = None
            state = fresh()  # replicas had parted
        native = text in (NONE, BF16, NATIVE) or contenders.native_only(text)
        route = None if native else run.topology
        yield Row(
            model=run.model,
            tokens=run.batch * config.seq_len,
            method=text,
            topology=type(route).__name__.lower() if route else "native",
            transport=transport(mesh.devices.flat[0].platform, route),
            n_workers=mesh.size,
            step_ms=median,
            p10_ms=p10,
            p90_ms=p90,
            exposed_ms=median - alone_ms,
            mfu=flops / (median / 1e3) / peak if peak else None,
            wire_bytes=ways[text].wire_bytes(grads),
            transfer_ms=found and found.transfer_ms,
            hidden_ms=found and found.hidden_ms,
        )


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "350m",
    methods: Annotated[str, typer.Option(help="How gradients are averaged.")] = (
        "bf16-psum,mxfp8,dynamiq:5,dynamiq-dither:3.5"
    ),
    topology: Annotated[
        str, typer.Option(help="direct, ring, butterfly, hierarchical.")
    ] = "direct",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of every worker.")] = 3,
    remat: Annotated[bool, typer.Option(help="Recompute blocks in the backward pass.")] = False,
    attention: Annotated[str, typer.Option(help="cudnn (flash attention) or xla.")] = "xla",
    bucket_mib: Annotated[
        float | None, typer.Option(min=0.1, help="Of leaves that travel together, in MiB.")
    ] = None,
    staged: Annotated[
        bool, typer.Option(help="Reduce in the backward pass (dq.sequential), or after it.")
    ] = True,
    scanned: Annotated[bool, typer.Option(help="Blocks are a loop (dq.Scanned).")] = False,
    together: Annotated[int, typer.Option(min=1, help="Blocks to a function.")] = 1,
    lag: Annotated[int, typer.Option(min=0, help="Of dq.sequential.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of XLA, beside those of dq.jit.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of every method.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="In a sample.")] = 5,
    nodes: Annotated[int, typer.Option(min=1, help="Equal nodes: a mesh of two axes.")] = 1,
    processes: Annotated[int | None, typer.Option(min=1, help="This runs in so many.")] = None,
    process_id: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
    coordinator: Annotated[str, typer.Option(help="Of all processes.")] = "localhost:29400",
    profiles: Annotated[
        Path | None, typer.Option("--profile", help="Folder for timelines of a step; GPUs only.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows are added here.")] = None,
) -> None:
    """Measures and prints."""
    if model not in CONFIGS:
        raise typer.BadParameter(f"--model {model!r}: pass one of {', '.join(CONFIGS)}")
    if attention not in get_args(AttentionKernel):
        raise typer.BadParameter(f"--attention {attention!r}: pass xla or cudnn")
    if profiles and not profiles.is_dir():
        raise typer.BadParameter(f"--profile {profiles}: there is no such folder; create it first")
    kept = kept_runs(json_file)
    if processes:  # ahead of all that looks for devices
        jax.distributed.initialize(coordinator, processes, process_id)
    chosen = contenders.parts(methods)
    try:
        run = Run(
            model=model,
            config=dataclasses.replace(CONFIGS[model], remat=remat, attention=attention),
            mesh=make_mesh(jax.devices(), nodes),
            topology=contenders.parse_topology(topology, nodes),
            batch=batch,
            samples=samples,
            steps=steps,
            staged=staged,
            scanned=scanned,
            together=together,
            lag=lag,
            bucket_bytes=int(bucket_mib * 2**20) if bucket_mib else None,
            profiles=profiles,
            xla=parse_options(option or ()),
        )
        for text in chosen:
            parse_way(text, run)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--methods, --topology") from error
    if profiles and jax.default_backend() != "gpu":
        raise typer.BadParameter("--profile: kernels are seen on GPUs only; leave it out here")
    first, console, rows = jax.process_index() == 0, Console(stderr=True), []
    for row in measure(run, chosen, console.log if first else lambda text: None):
        rows.append(row)
        if json_file and first:  # row by row: a command that is cut off leaves what it has
            about = tables.surroundings(jax.devices())
            found = {
                "about": about,
                "options": run.options,
                "rows": list(map(dataclasses.asdict, rows)),
            }
            json_file.write_text(json.dumps({"runs": [*kept, found]}, indent=1) + "\n")
    if not first:
        return
    title = (
        f"{model}, {rows[0].tokens:,} tokens per worker and step, {run.mesh.size} x "
        f"{jax.devices()[0].device_kind}, {jax.process_count()} process(es)"
    )
    shown = [c for c in COLUMNS if profiles or c.title != "hidden"]
    tables.print_table(rows, shown, title)


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
