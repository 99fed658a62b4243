"""Sharded updates (ZeRO-1): each worker runs the optimizer for its slices of the parameters.

    python examples/train_zero.py --compare

Gradients are scattered to the owners of slices at 5 bits per coordinate, and differences of
parameters come back at 2.5 bits. The second run of the comparison sums gradients by ``lax.psum`` in
f32, and every worker runs the whole optimizer. Without a GPU it runs on 8 virtual CPU devices.
Expect (2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

    method   validation loss  MB/step  bits/coord  state MB  s/step
    sharded           1.9976     0.87        3.75      2.13    0.28
    f32               2.0131     7.40       32.00      8.46    0.08

``MB/step`` is what one worker sends, ``state MB`` what it holds of the optimizer: f32 masters,
Adam's moments and the copies of its slices, or moments of all. DynamiQ's losses differ between
processors. Virtual devices exchange all through memory: their times say nothing about a network.
Curves (PNG) and numbers (JSON) land in ``runs/``.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
import train_llm as llm
import typer
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, MODELS
from train_llm import AXIS, RECIPES, Result, Run

import dynamiq_jax as dq


def make_sharded_step(run: Run, optimizer: optax.GradientTransformation, opt_state: Any) -> Any:
    """Returns ``step(params, opt_state, tokens) -> (params, opt_state, loss)``."""
    specs = dq.optax.state_specs(opt_state)

    options = {"in_specs": (P(), specs, P(AXIS)), "out_specs": (P(), specs, P())}

    @dq.jit(donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=run.mesh, **options)
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        own = jax.lax.pcast(params, AXIS, to="varying")
        loss, grads = jax.value_and_grad(run.loss_fn)(own, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, AXIS)

    return step


def train_sharded(run: Run, bits: float, difference_bits: float) -> tuple[Result, int]:
    """Trains with slices of the optimizer on the workers."""
    params, n = run.init(), run.mesh.size
    small = partial(dq.Compression, min_bucket_bytes=0)  # compress small buckets, too
    optimizer = dq.optax.sharded(
        llm.make_optimizer(run.recipe, optax.identity()),  # the clip is max_norm
        AXIS,
        compression=dq.Policy(
            gradients=small(dq.DynamiQ(bits=bits)),
            parameters=small(dq.DynamiQ(bits=difference_bits, dither=True)),
        ),
        max_norm=llm.MAX_NORM,
    )
    opt_state = dq.optax.init(optimizer, params, run.mesh)
    mean_bits = (bits + difference_bits) / 2
    n_params = sum(p.size for p in jax.tree.leaves(params))
    sent = 2 * (n - 1) / n * mean_bits / 8 * n_params
    result = Result(method="sharded", wire_bytes=sent, bits_per_coord=mean_bits)
    size = held(opt_state)
    llm.fit(run, result, make_sharded_step(run, optimizer, opt_state), params, opt_state)
    return result, size


def train_whole(run: Run) -> tuple[Result, int]:
    """Every worker runs the whole optimizer on an f32 ``lax.psum`` of gradients."""
    params, optimizer = run.init(), llm.make_optimizer(run.recipe)
    opt_state = run.replicated(optimizer.init, params)
    method = llm.lax_psum(run.loss_fn, params, run.mesh, "f32")
    result = Result(method="f32", wire_bytes=method.wire_bytes, bits_per_coord=32.0)
    size = held(opt_state)
    llm.fit(run, result, llm.make_step(method, optimizer), params, opt_state)
    return result, size


def held(opt_state: Any) -> int:
    """Bytes of an optimizer's state that the first device holds."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(opt_state))


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of gradients")] = 5.0,
    difference_bits: Annotated[float, typer.Option(help="the same of differences")] = 2.5,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    compare: Annotated[bool, typer.Option(help="whole optimizers and f32 sums, too")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model with sharded updates."""
    llm.check_choice(model, CONFIGS, "--model")
    recipe = RECIPES[model]._replace(steps=steps or RECIPES[model].steps)
    out.mkdir(parents=True, exist_ok=True)
    run, where = llm.start(model, recipe, seed)
    llm.introduce(run, model)
    runs = [train_sharded(run, bits, difference_bits)] + ([train_whole(run)] if compare else [])
    run.console.print("method   validation loss  MB/step  bits/coord  state MB  s/step")
    for r, size in runs:
        figures = f"{r.method:8} {r.validation_loss:15.4f}  {r.wire_bytes / 1e6:7.2f}"
        figures += f"  {r.bits_per_coord:10.2f}  {size / 1e6:8.2f}  {r.seconds_per_step:6.2f}"
        run.console.print(figures, highlight=False)
    record = {"environment": where, "model": model, "recipe": recipe._asdict(), "seed": seed}
    name = f"{model}-zero{'-compare' if compare else ''}"
    llm.keep(run, [result for result, _ in runs], record, name, out)


if __name__ == "__main__":
    typer.run(main)
