r"""Trainings on text against the clock: loss by seconds, by way to train.

    NCCL_P2P_DISABLE=1 python benchmarks/evidence/against_the_clock.py --links "host memory" \
        --model 125m --attention cudnn --steps 300 --ways bf16-psum,dp:5,zero-pipeline:5/2.5
    python benchmarks/hosts.py --hosts 2 --rate 25gbit --gpus 1 -- \
        python benchmarks/evidence/against_the_clock.py --links "25 Gb/s" --json FILE

The steps are those of `step_time.py`. Text (`examples/llm_data.py`) takes the place of its random
tokens. All ways start from the same parameters and see the same batches. Several hosts meet by the
variables COORDINATOR, NUM_HOSTS and HOST_ID; the first one prints and writes.

A step's seconds are the first host's from the start of the first step, which is compiled by then,
until the step's loss is known. The host starts each step before it reads the loss of the one before.
The *target* is the first way's mean loss over its last ``--window`` steps, plus ``--tolerance``
percent. A way is at the target after the first ``--window`` steps whose mean loss is not above it.

``--json`` adds one run to a file ``{"runs": [...]}``. A run is ``{"about", "options", "target",
"rows"}``. A row is ``{"method", "seconds", "losses", "target_seconds"}``: the way's name, two lists
with an entry for each step, and the seconds to the target, ``null`` where the way does not get there.
"""

import dataclasses
import json
import os
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.all_reduce import make_mesh

sys.path.append(str(Path(__file__).resolve().parents[1]))

import step_time
import ways
from llm_data import Corpus, load_corpus, train_batch

Row = dict[str, Any]


def train(
    run: step_time.Run, program: step_time.Program, corpus: Corpus, seed: int
) -> tuple[list[float], list[float]]:
    """Seconds and losses of all steps of one way."""
    way, step = program.way, program.step
    like = step_time.tokens_of(run, way.mesh)
    rows, length = like.shape

    def batch(number: int) -> Array:
        tokens = train_batch(corpus, number, rows=rows, length=length, seed=seed)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: tokens[index])

    def start() -> Any:
        params = step_time.random_params(way.model.shapes, NamedSharding(way.mesh, P()), seed)
        return way.init(params)

    ahead = jax.default_backend() != "cpu"  # virtual devices have too few threads for two steps
    waiting: deque[Array] = deque()
    seconds, losses = [], []
    with jax.set_mesh(way.mesh):
        jax.block_until_ready(step(start(), batch(0)))  # links are set up by the first call
        state, tokens = start(), batch(0)
        jax.block_until_ready((state, tokens))
        began = time.perf_counter()
        for number in range(run.steps):
            state, loss = step(state, tokens)
            waiting.append(loss)
            tokens = batch(number + 1)
            while len(waiting) > (ahead and number + 1 < run.steps):
                losses.append(round(float(waiting.popleft()), 4))
                seconds.append(round(time.perf_counter() - began, 3))
    return seconds, losses


def seconds_to(target: float, row: Row, window: int) -> float | None:
    """Seconds until so many steps' mean loss is at the target or below; `None` if it never is."""
    means = np.convolve(row["losses"], np.full(window, 1 / window), "valid")
    reached = np.flatnonzero(means <= target)
    return row["seconds"][int(reached[0]) + window - 1] if reached.size else None


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(step_time.CONFIGS)}.")] = "125m",
    chosen: Annotated[
        str, typer.Option("--ways", help="See ways.py; the first one sets the target.")
    ] = "bf16-psum,dp:5,zero-pipeline:5/2.5",
    links: Annotated[str, typer.Option(help="Between workers, in words, for the file.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of every worker.")] = 3,
    attention: Annotated[str, typer.Option(help="cudnn (flash attention) or xla.")] = "xla",
    steps: Annotated[int, typer.Option(min=2, help="Of every way.")] = 400,
    learning_rate: Annotated[float | None, typer.Option(help="Peak; default: the model's.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps whose losses are averaged.")] = 25,
    tolerance: Annotated[float, typer.Option(min=0, help="In percent of the loss.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="The run is added here.")] = None,
) -> None:
    """Trains and prints."""
    if model not in step_time.CONFIGS:
        raise typer.BadParameter(f"--model {model!r}: pass one of {', '.join(step_time.CONFIGS)}")
    if window > steps:
        raise typer.BadParameter(f"--window {window} is more than --steps {steps}; pass less")
    kept, texts = step_time.kept_runs(json_file), contenders.parts(chosen)
    if "COORDINATOR" in os.environ:  # ahead of all that looks for devices
        numbers = (int(os.environ[name]) for name in ("NUM_HOSTS", "HOST_ID"))
        jax.distributed.initialize(os.environ["COORDINATOR"], *numbers)
    config = dataclasses.replace(step_time.CONFIGS[model], attention=attention)
    recipe = step_time.RECIPES[model]._replace(steps=steps)
    recipe = recipe._replace(learning_rate=learning_rate or recipe.learning_rate)
    training = dataclasses.replace(
        step_time.make_training(
            model, make_mesh(jax.devices(), 1), make_model=partial(ways.llama, config),
            limits={}, topology=contenders.parse_topology("direct"),
        ),
        optimizer=step_time.make_optimizer(recipe, optax.identity()),
    )  # fmt: skip
    try:
        for text in texts:
            ways.parse(text, training)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ways") from error
    run = step_time.Run(
        model=model, training=training, config=config, batch=batch, samples=1, steps=steps,
        rate=None, profiles=None, xla={},
    )  # fmt: skip
    say = partial(print, flush=True) if jax.process_index() == 0 else lambda text: None
    corpus = load_corpus(config.vocab_size)
    programs = step_time.compile_all(run, texts, say)
    if texts[0] not in programs:
        raise SystemExit(f"{texts[0]} sets the target, and did not compile")
    options = {"model": model, "tokens": batch * config.seq_len, "steps": steps, "links": links}
    options |= {"hosts": jax.process_count(), "learning_rate": recipe.learning_rate, "seed": seed}
    options |= {"attention": attention, "window": window, "tolerance": tolerance}
    found = {"about": tables.surroundings(jax.devices()), "options": options, "rows": []}
    for text, program in programs.items():
        seconds, losses = train(run, program, corpus, seed)
        row: Row = {"method": text, "seconds": seconds, "losses": losses}
        last = float(np.mean(losses[-window:]))
        target = found.setdefault("target", round(last * (1 + tolerance / 100), 4))
        row["target_seconds"] = seconds_to(target, row, window)
        found["rows"].append(row)
        say(f"{text}: {steps} steps in {seconds[-1]:.1f} s, last loss {last:.4f}, "
            f"{target:.4f} after {row['target_seconds']} s")  # fmt: skip
        if json_file and jax.process_index() == 0:  # a command cut off leaves what it has
            json_file.write_text(json.dumps({"runs": [*kept, found]}) + "\n")


if __name__ == "__main__":
    typer.run(main)
