r"""Whole trainings against the clock: loss by seconds, by way to train.

    python benchmarks/evidence/against_the_clock.py --model 1b --attention cudnn --steps 400
    NCCL_P2P_DISABLE=1 python benchmarks/evidence/against_the_clock.py \
        --ways bf16-psum,dp:5,dp:mxfp8

The step of `step_time.py`, on text instead of random tokens: every method starts from the same
parameters and sees the same batches. Seconds are those of the host from the first step, which is
compiled by then, to the moment at which a step's loss is known; the host is one step ahead. Where
`time_to_accuracy.py` multiplies steps by a step's time, this is what passes.

*Target*: the mean loss of the last steps of the first method, as many as ``--window``, and
``--tolerance`` percent more. A method's time to it ends with the first window of steps whose mean
is there.
"""

import dataclasses
import json
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.all_reduce import make_mesh, transport
from dynamiq_jax.commands.bench.timing import compile_together

sys.path.append(str(Path(__file__).resolve().parents[1]))

import step_time
import ways
from llm_data import Corpus, load_corpus, train_batch, validation_batches  # found by step_time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The result of one method's training."""

    method: str
    seconds: list[float]
    """When the loss of each step was known, from the start of the first step."""
    losses: list[float]
    """Nats per token, of every step."""
    validation_loss: float
    target_seconds: float | None = None
    """`None`: it does not get there."""


class Texts(NamedTuple):
    """Batches of all workers."""

    corpus: Corpus
    rows: int
    length: int
    seed: int
    sharding: NamedSharding

    def train(self, step: int) -> Array:
        """i32[rows, length]."""
        options = {"rows": self.rows, "length": self.length, "seed": self.seed}
        return jax.device_put(train_batch(self.corpus, step, **options), self.sharding)

    def validation(self, count: int) -> list[Array]:
        """So many batches."""
        own = validation_batches(self.corpus, rows=self.rows, length=self.length, count=count)
        return [jax.device_put(batch, self.sharding) for batch in own]


def train(step: Any, state: Any, texts: Texts, steps: int) -> tuple[Any, list[float], list[float]]:
    """The last state, and seconds and losses of every step."""
    waiting: deque[Array] = deque()
    seconds, losses = [], []
    ahead = 0 if jax.default_backend() == "cpu" else 1  # virtual devices have too few threads
    tokens = texts.train(0)
    jax.block_until_ready((state, tokens))
    start = time.perf_counter()
    for i in range(steps):
        state, loss = step(state, tokens)
        waiting.append(loss)
        tokens = texts.train(i + 1)
        while len(waiting) > (ahead if i + 1 < steps else 0):
            losses.append(float(waiting.popleft()))
            seconds.append(time.perf_counter() - start)
    return state, seconds, losses


def time_to(training: Training, target: float, window: int) -> float | None:
    """Seconds until the mean of so many steps' losses is at the target or below."""
    means = np.convolve(training.losses, np.full(window, 1 / window), "valid")
    reached = np.flatnonzero(means <= target)
    return training.seconds[int(reached[0]) + window - 1] if reached.size else None


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(step_time.CONFIGS)}.")] = "350m",
    chosen: Annotated[
        str, typer.Option("--ways", help="As for step_time.py; the first one sets the target.")
    ] = "bf16-psum,dp:5",
    topology: Annotated[str, typer.Option(help="direct, ring, butterfly.")] = "direct",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of every worker.")] = 3,
    attention: Annotated[str, typer.Option(help="cudnn (flash attention) or xla.")] = "xla",
    steps: Annotated[int, typer.Option(min=2, help="Of every training.")] = 400,
    learning_rate: Annotated[float | None, typer.Option(help="Peak; default: the model's.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps whose losses are averaged.")] = 25,
    tolerance: Annotated[
        float, typer.Option(help="Above the first method's last loss, in %.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Results are added here.")
    ] = None,
) -> None:
    """Trains and prints."""
    if model not in step_time.CONFIGS:
        raise typer.BadParameter(f"--model {model!r}: pass one of {', '.join(step_time.CONFIGS)}")
    if window > steps:
        raise typer.BadParameter(
            f"--window {window} is more than --steps {steps}; pass at most that"
        )
    kept = step_time.kept_runs(json_file)
    config = dataclasses.replace(step_time.CONFIGS[model], attention=attention)
    mesh = make_mesh(jax.devices(), 1)
    texts = contenders.parts(chosen)
    try:
        training = step_time.make_training(
            model, mesh, make_model=partial(ways.llama, config), steps=steps,
            learning_rate=learning_rate, topology=contenders.parse_topology(topology),
        )  # fmt: skip
        made = {text: ways.make_way(text, training) for text in texts}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ways, --topology") from error
    console = Console(stderr=True)
    corpus = load_corpus(config.vocab_size)

    def fresh(way: ways.Way) -> Any:
        whole = NamedSharding(way.mesh, P())
        return way.init(step_time.random_params(way.model.shapes, whole, seed))

    def batches(way: ways.Way) -> Texts:
        own = NamedSharding(way.mesh, P(way.mesh.axis_names))
        return Texts(corpus, mesh.size * batch, config.seq_len + 1, seed, own)

    lowered = [ways.lower(way, way.like, batches(way).train(0)) for way in made.values()]
    programs = compile_together(lowered, console.log)
    found: list[Training] = []
    for (text, way), program in zip(made.items(), programs, strict=True):
        data = batches(way)
        with jax.set_mesh(way.mesh):
            state, _ = program(fresh(way), data.train(0))  # links are set up at the first call
            del state
            state, seconds, losses = train(program, fresh(way), data, steps)
            params, evaluate = way.read(state)[0], jax.jit(way.model.loss)
            alone = [float(evaluate(params, tokens)) for tokens in data.validation(4)]
        del state, params
        found.append(
            Training(
                method=text, seconds=seconds, losses=losses, validation_loss=float(np.mean(alone))
            )
        )
        console.log(f"{text}: {steps} steps in {seconds[-1]:.1f} s")
    target = float(np.mean(found[0].losses[-window:])) * (1 + tolerance / 100)
    found = [dataclasses.replace(t, target_seconds=time_to(t, target, window)) for t in found]
    title = (
        f"{model}, {steps} steps of {batch * config.seq_len:,} tokens per worker, {mesh.size} x "
        f"{jax.devices()[0].device_kind}, {transport(jax.devices()[0].platform, None)}; to "
        f"a loss of {target:.4f}"
    )
    if json_file:
        about = tables.surroundings(jax.devices())
        options = {"model": model, "attention": attention, "learning_rate": learning_rate}
        options |= {"seed": seed, "window": window, "tolerance": tolerance, "title": title}
        rows = [dataclasses.asdict(t) for t in found]
        new = {"about": about, "options": options, "rows": rows}
        json_file.write_text(json.dumps({"runs": [*kept, new]}) + "\n")
    first = found[0]

    def less(t: Training) -> str:
        if t.target_seconds is None or first.target_seconds is None:
            return "-"
        return f"{100 * (1 - t.target_seconds / first.target_seconds):.1f}%"

    columns = (
        tables.Column("method", lambda t: t.method),
        tables.Column("all steps, s", lambda t: f"{t.seconds[-1]:.1f}"),
        tables.Column(
            "to the target, s", lambda t: f"{t.target_seconds:.1f}" if t.target_seconds else "-"
        ),
        tables.Column("less", less),
        tables.Column("last loss", lambda t: f"{np.mean(t.losses[-window:]):.4f}"),
        tables.Column("validation", lambda t: f"{t.validation_loss:.4f}"),
    )
    tables.print_table(found, columns, title)


if __name__ == "__main__":
    typer.run(main)
