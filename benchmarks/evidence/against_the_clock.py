r"""Trainings on text against the clock: loss by seconds, by way to train.

    NCCL_P2P_DISABLE=1 python benchmarks/evidence/against_the_clock.py --links "host memory" \
        --attention cudnn --ways bf16-psum,dp:5,zero-pipeline:5/2.5 --steps 300 --json FILE
    python benchmarks/hosts.py --hosts 2 --rate 25gbit --gpus 1 -- \
        python benchmarks/evidence/against_the_clock.py --links "25 Gb/s" --json FILE

Steps are those of `step_time.py`, on text (`examples/llm_data.py`). All ways start from the same
parameters and see the same batches. Hosts meet by the variables COORDINATOR, NUM_HOSTS and HOST_ID.
The first host's clock starts with the first step, which is compiled by then, and is read when a
step's loss is known. Each step starts before the loss of the one before is read. The *target* is
the first way's mean loss over its last `WINDOW` steps, plus `TOLERANCE` percent, or ``--target``. A
way is there after the first `WINDOW` steps whose mean loss is not above it.

``--json`` adds a run to a file ``{"runs": [...]}``. A run is ``{"about", "options", "rows"}``; its
options have a title and the target. A row is ``{"method", "seconds", "losses", "target_seconds"}``:
the way's name, two lists with an entry for each step, and seconds to the target, ``null`` where
the way does not get there.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax import Array
from jax.experimental.multihost_utils import sync_global_devices

from dynamiq_jax.commands.bench import contenders, tables

sys.path.append(str(Path(__file__).resolve().parents[1]))

import step_time
from llm_data import Corpus, load_corpus, train_batch

WINDOW, TOLERANCE = 25, 0.5
WAYS = "bf16-psum,dp:5,zero-pipeline:5/2.5"


def train(
    run: step_time.Run, program: step_time.Program, corpus: Corpus, steps: int
) -> dict[str, list[float]]:
    """Seconds and losses of all steps of one way."""
    way, like = program.way, run.tokens(program.way)

    def batch(number: int) -> Array:
        rows, length = like.shape
        tokens = train_batch(corpus, number, rows=rows, length=length, seed=0)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: tokens[index])

    ahead = jax.default_backend() != "cpu"  # virtual devices have too few threads for two steps
    seconds, losses, waiting = [], [], []
    with jax.set_mesh(way.mesh):
        jax.block_until_ready(
            program.step(run.first_state(way), batch(0))
        )  # the first call sets up links
        state, tokens = run.first_state(way), batch(0)
        jax.block_until_ready((state, tokens))
        sync_global_devices("start")
        began = time.perf_counter()
        for number in range(1, steps + 1):
            state, loss = program.step(state, tokens)
            waiting.append(loss)
            tokens = batch(number)
            while len(waiting) > (ahead and number < steps):
                losses.append(round(float(waiting.pop(0)), 4))
                seconds.append(round(time.perf_counter() - began, 3))
    return {"seconds": seconds, "losses": losses}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(step_time.CONFIGS)}.")] = "125m",
    chosen: Annotated[str, typer.Option("--ways", help="See ways.py.")] = WAYS,
    links: Annotated[str, typer.Option(help="Between workers, in words, for the title.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of every worker.")] = 3,
    attention: Annotated[str, typer.Option(help="cudnn (flash attention) or xla.")] = "xla",
    topology: Annotated[
        str, typer.Option(help="direct, ring, butterfly, hierarchical.")
    ] = "direct",
    target: Annotated[
        float | None, typer.Option(min=0, help="A loss (default: the first way's).")
    ] = None,
    steps: Annotated[int, typer.Option(min=WINDOW, help="Of every way.")] = 400,
    json_file: Annotated[Path | None, typer.Option("--json", help="The run is added here.")] = None,
) -> None:
    """Trains and prints."""
    kept, texts = step_time.kept_runs(json_file), contenders.parts(chosen)
    step_time.join_hosts()  # ahead of all that looks for devices
    first = jax.process_index() == 0
    say = partial(print, flush=True) if first else lambda text: None
    told = {"model": model, "batch": batch, "steps": steps, "attention": attention}
    told["topology"] = topology
    run = step_time.make_run(**told)
    corpus = load_corpus(run.config.vocab_size)
    programs = step_time.compile_all(run, texts)
    if texts[0] not in programs:
        raise SystemExit(f"{texts[0]} sets the target, and did not compile")
    title = f"{model}, {steps} steps of {run.tokens_per_worker:,} tokens per worker, "
    title += f"{jax.device_count()} x {jax.devices()[0].device_kind}, {links}"
    options = told | {"title": title, "window": WINDOW, "target": target}
    found = {"about": tables.surroundings(jax.devices()), "options": options, "rows": []}
    for text, program in programs.items():
        row: dict[str, Any] = {"method": text} | train(run, program, corpus, steps)
        means = np.convolve(row["losses"], np.full(WINDOW, 1 / WINDOW), "valid")
        options["target"] = options["target"] or round(means[-1] * (1 + TOLERANCE / 100), 4)
        reached = np.flatnonzero(means <= options["target"])
        end = row["seconds"][reached[0] + WINDOW - 1] if reached.size else None
        row["target_seconds"] = end
        found["rows"].append(row)
        say(f"{text}: {row['seconds'][-1]} s, loss {means[-1]:.4f}, target after {end} s")
        if json_file and first:  # a command that is cut off leaves what it has
            json_file.write_text(json.dumps({"runs": [*kept, found]}) + "\n")


if __name__ == "__main__":
    typer.run(main)
