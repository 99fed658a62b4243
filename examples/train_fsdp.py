"""Fully sharded training (FSDP, ZeRO-3), layer by layer: `dq.fsdp` in the loss.

    python examples/train_fsdp.py --model tiny --compare

trains the model of ``train_llm.py`` three times, from the same start and on the same tokens: in
shards with parameters gathered at 8 bits per coordinate and gradients scattered at 5, in shards
with both in bf16, and with everything on every worker and gradients summed by ``lax.psum`` in f32.
Without a GPU it runs on 8 virtual CPU devices. Expect (2 busy x86-64 cores, jax 0.10.2):

    method       validation loss   sent MB   held MB   s/step
    dynamiq               2.0097      1.50      1.60    0.215
    bf16                  2.0109      3.70      1.60    0.080
    replicated            2.0131      7.40     12.69    0.080

Megabytes are one worker's: sent in a step (by the bits asked for), and held as parameters and
Adam's moments. Every worker holds an n-th of the rows of each matrix, and all of the norms' scales.
With ``remat`` (1b) the backward pass gathers again. Virtual devices tell no times of a network.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import train_llm as llm  # asks for 8 virtual CPU devices, before JAX looks for any
import typer
from flax import nnx
from llm_model import CONFIGS, MODELS, init_params, make_loss
from rich.table import Table

import dynamiq_jax as dq


def spec(leaf: Any) -> jax.P:
    """How a parameter or a moment of it is placed: matrices are split by rows."""
    return jax.P(llm.AXIS) if leaf.ndim > 1 else jax.P()


def clip_by_norm_of_shards(max_norm: float) -> optax.GradientTransformation:
    """optax.clip_by_global_norm for matrices in shards: the norm is that of all of them."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(updates)
        squared = jax.lax.psum(sum(jnp.sum(g**2) for g in leaves if g.ndim > 1), llm.AXIS)
        norm = jnp.sqrt(squared + sum(jnp.sum(g**2) for g in leaves if g.ndim <= 1))
        return jax.tree.map(lambda g: g * (max_norm / jnp.maximum(norm, max_norm)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_sharded(run: llm.Run, **options: Any) -> tuple[Any, Any]:
    """Returns ``init(key)`` and ``step(params, opt_state, tokens)``; their arrays are in shards."""
    optimizer = llm.make_optimizer(run.recipe, clip_by_norm_of_shards(llm.MAX_NORM))

    def whole(module: nnx.Module) -> nnx.Module:
        graphdef, own = nnx.split(module)
        own = jax.tree.map(lambda w: w.astype(run.model.dtype) if w.ndim > 1 else w, own)
        options["specs"] = jax.tree.map(spec, own)
        return nnx.merge(graphdef, dq.fsdp(own, llm.AXIS, **options))

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = init_params(run.model, key)
        return params, optimizer.init(params)

    loss_fn, mesh = make_loss(run.model, whole), run.mesh
    specs = jax.tree.map(spec, jax.eval_shape(init, jax.random.key(0)))
    maps = {"mesh": mesh, "in_specs": (*specs, jax.P(llm.AXIS)), "out_specs": (*specs, jax.P())}

    @dq.jit(donate_argnums=(0, 1))
    @partial(jax.shard_map, **maps)
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, llm.AXIS)

    return jax.jit(init, out_shardings=jax.tree.map(partial(jax.NamedSharding, mesh), specs)), step


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of gradients")] = 5.0,
    gather_bits: Annotated[float, typer.Option(help="and of parameters")] = 8.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    compare: Annotated[bool, typer.Option(help="bf16 both ways and replicated, too")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model in shards, parameters and gradients compressed."""
    llm.check_choice(model, CONFIGS, "--model")
    out.mkdir(parents=True, exist_ok=True)
    recipe, key = llm.RECIPES[model], jax.random.key(0)
    run, where = llm.start(model, recipe._replace(steps=steps or recipe.steps), seed=0)
    n_params, gathers = llm.introduce(run, model), 2 if run.model.remat else 1
    table, results = Table("method", "validation loss", "sent MB", "held MB", "s/step"), []

    def train(name: str, total: float, state: Any, step: Any) -> None:
        sent = total / 8 * n_params * (1 - 1 / run.mesh.size)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        results.append(own := llm.Result(method=name, wire_bytes=sent, bits_per_coord=total))
        llm.fit(run, own, step, *state)
        figures = f"{own.validation_loss:.4f}", f"{sent / 1e6:.2f}", f"{held / 1e6:.2f}"
        table.add_row(name, *figures, f"{own.seconds_per_step:.3f}")

    method = dq.Compression(dq.DynamiQ(bits=bits), min_bucket_size=32_768)  # tiny's layers, too
    policy = dq.Policy(gradients=method, parameters=dq.DynamiQ(bits=gather_bits))
    init, step = make_sharded(run, compression=policy)
    train("dynamiq", bits + gathers * gather_bits, init(key), step)
    if compare:
        init, step = make_sharded(run, compression=dq.BF16())
        train("bf16", 16 * (1 + gathers), init(key), step)
        params, optimizer = run.init(), llm.make_optimizer(run.recipe)
        step = llm.make_step(llm.lax_psum(run.loss_fn, params, run.mesh, "f32"), optimizer)
        train("replicated", 64, (params, run.replicated(optimizer.init, params)), step)
    run.console.print(table)
    record = {"environment": where, "model": model, "recipe": run.recipe._asdict()}
    llm.keep(run, results, record, f"{model}-fsdp{'-compare' if compare else ''}", out)


if __name__ == "__main__":
    typer.run(main)
