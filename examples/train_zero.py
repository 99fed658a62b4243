"""Sharded optimizer states (ZeRO-1), the two halves of the all-reduce a step apart (DeAR).

    python examples/train_zero.py --compare

An all-reduce is a reduce-scatter and an all-gather, and nothing needs the second one before the
next forward pass. So a step begins by gathering the parameters, which each worker keeps an n-th of,
and ends by scattering the gradients and updating that n-th. Each half has a codec of its own.
Every module (embedding, block, norm and head) is a group of its own: the forward pass of the first
block waits for no other block's parameters, and the scatter of the last block's gradients for no
other block's. So half of the communication may run under the forward pass, the other half under
the backward pass. XLA overlaps nothing across programs; that is why the gather is at the top of the
step that uses it.

Four runs from the same start and on the same tokens: gradients scattered by DynamiQ at 5 bits and
parameters gathered by DynamiQ at 8; the same, gathered in bf16; both in bf16; and with everything
on every worker and gradients summed by ``lax.psum`` in f32. Without a GPU it runs on 8 virtual CPU
devices. Expect (2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

                    validation   gradients    params                state
    method                loss     MB/step   MB/step   bits/coord      MB   s/step
    dynamiq             1.9994        0.58      0.93         5.02    1.59    0.724
    dynamiq, bf16       2.0131        0.58      1.85         5.02    1.59    0.674
    bf16                2.0115        1.85      1.85        16.00    1.59    0.092
    replicated          2.0131        7.40      0.00        32.00   12.69    0.134

Megabytes are one worker's: sent for gradients, sent for gathering parameters, held from step to
step as parameters and Adam's moments. Within a step every worker holds all parameters; in
``train_fsdp.py`` it may gather them twice and never hold all. Updates are of f32 parameters, which
stay in their shards: what gathering rounds is gone in the next step. DynamiQ's losses differ
between processors, see ``train_llm.py``. Virtual devices exchange everything through memory: the
time per step says nothing about a network.

The curves (PNG) and all numbers (JSON) land in ``runs/``.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, Config, init_params, make_loss
from train_fsdp import (
    TOPOLOGIES,
    Sharded,
    Sharing,
    Wire,
    bytes_per_worker,
    compression,
    dynamiq_gather,
    dynamiq_scatter,
    lax_gather,
    lax_scatter,
    sent_bytes,
    table,
    train_replicated,
)
from train_llm import (
    AXIS,
    MAX_NORM,
    RECIPES,
    Recipe,
    Run,
    check_choice,
    fit,
    introduce,
    keep,
    make_optimizer,
    start,
)

import dynamiq_jax as dq

# --- Shards: every leaf flat, in equal slices, the last one filled up with zeros ------------------


class Shape(NamedTuple):
    """What a flat leaf was."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Coordinates."""
        return math.prod(self.shape)


def flat(leaf: jax.Array, n_workers: int) -> jax.Array:
    """Its coordinates one after the other, and zeros up to a multiple of the workers."""
    return jnp.pad(leaf.reshape(-1), (0, -leaf.size % n_workers))


def whole(coords: jax.Array, like: Shape) -> jax.Array:
    """The leaf again, of its coordinates and the zeros."""
    return coords[: like.size].reshape(like.shape)


def groups_of(params: Any) -> list[list[int]]:
    """The numbers of each module's leaves: the embedding, every block, norm and head.

    In the order in which the forward pass needs them.
    """
    found: dict[int, list[int]] = {}
    for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        top, second = (str(getattr(entry, "key", "")) for entry in path[:2])
        if top == "blocks":
            group = 1 + int(second)
        else:
            group = 0 if top == "embed" else 1 + len(params["blocks"])
        found.setdefault(group, []).append(number)
    return [found[group] for group in sorted(found)]


def clip_by_norm_of_slices(max_norm: float) -> optax.GradientTransformation:
    """optax.clip_by_global_norm for leaves in slices: the norm is that of all workers'."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        squared = sum(jnp.sum(g**2) for g in jax.tree.leaves(updates))
        norm = jnp.sqrt(jax.lax.psum(squared, AXIS))
        return jax.tree.map(lambda g: g * (max_norm / jnp.maximum(norm, max_norm)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# --- The step -------------------------------------------------------------------------------------


def make_zero(config: Config, recipe: Recipe, mesh: jax.sharding.Mesh, wire: Wire) -> Sharded:
    """Training whose every worker carries 1/n of all parameters and of Adam's moments of them.

    ``params`` of the functions that it returns are the flat leaves, spread over the workers.
    """
    loss_fn, n = make_loss(config), mesh.size
    abstract = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    treedef, groups = jax.tree.structure(abstract), groups_of(abstract)
    shapes = [Shape(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    decays = treedef.unflatten([len(leaf.shape) > 1 for leaf in shapes])
    optimizer = make_optimizer(recipe, clip_by_norm_of_slices(MAX_NORM), decays)

    @jax.jit
    def gather_params(shards: Any) -> Any:
        """Every group by itself, so that the first may be used before the last has arrived."""
        leaves = jax.tree.leaves(shards)
        for group in groups:
            arrived = wire.gather([leaves[i] for i in group])
            for i, coords in zip(group, arrived, strict=True):
                leaves[i] = whole(coords, shapes[i]).astype(shapes[i].dtype)
        return treedef.unflatten(leaves)

    @jax.jit
    def scatter_grads(grads: Any) -> Any:
        """Their means; the groups in the order in which the backward pass completes them."""
        leaves = jax.tree.leaves(grads)
        for group in reversed(groups):
            own = wire.scatter([flat(leaves[i], n) for i in group])
            for i, coords in zip(group, own, strict=True):
                leaves[i] = coords.astype(shapes[i].dtype) / n
        return treedef.unflatten(leaves)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = jax.tree.map(partial(flat, n_workers=n), init_params(config, key))
        return params, optimizer.init(params)

    state = jax.eval_shape(init, jax.random.key(0))
    specs = jax.tree.map(lambda leaf: P(AXIS) if leaf.ndim else P(), state)

    @partial(dq.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=(*specs, P()))
    def step(shards: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        params = gather_params(shards)
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(scatter_grads(grads), opt_state, shards)
        return optax.apply_updates(shards, updates), opt_state, jax.lax.pmean(loss, AXIS)

    placed = jax.tree.map(partial(NamedSharding, mesh), specs)
    return Sharded(jax.jit(init, out_shardings=placed), step)


def make_complete(config: Config) -> Callable[[Any], Any]:
    """Returns ``complete(params)``: the model's parameters, of `make_zero`'s flat leaves."""
    abstract = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return partial(jax.tree.map, lambda like, x: whole(x, Shape(like.shape, like.dtype)), abstract)


# --- Runs -----------------------------------------------------------------------------------------


def train_zero(run: Run, wire: Wire) -> Sharing:
    """Trains from ``run.init()``'s parameters, each worker with its slices of them."""
    zero, n = make_zero(run.model, run.recipe, run.mesh, wire), run.mesh.size
    params, opt_state = zero.init(jax.random.key(run.seed))
    tokens = jax.ShapeDtypeStruct((run.rows, run.model.seq_len + 1), jnp.int32)
    count = partial(sent_bytes, zero.step, params, opt_state, tokens, n_workers=n)
    gradient_bytes, param_bytes = count(inside="scatter_grads"), count(inside="gather_params")
    coords_sent = (n - 1) / n * sum(p.size for p in jax.tree.leaves(params))
    result = Sharing(
        method=wire.name,
        wire_bytes=gradient_bytes + param_bytes,
        bits_per_coord=8 * gradient_bytes / coords_sent if n > 1 else 0.0,
        gradient_bytes=gradient_bytes,
        param_bytes=param_bytes,
        state_bytes=bytes_per_worker((params, opt_state)),
    )
    complete = make_complete(run.model)
    flat_run = replace(run, loss_fn=lambda params, tokens: run.loss_fn(complete(params), tokens))
    fit(flat_run, result, zero.step, params, opt_state)
    return result


# --- Command line ---------------------------------------------------------------------------------


def main(
    model: Annotated[str, typer.Option(help="tiny, 125m or 1b")] = "tiny",
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of gradients")] = 5.0,
    topology: Annotated[str, typer.Option(help="of gradients: direct, ring or butterfly")] = (
        "direct"
    ),
    gather_bits: Annotated[float, typer.Option(help="per coordinate of parameters")] = 8.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per device")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    compare: Annotated[bool, typer.Option(help="three other ways, too")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model with gradients scattered and parameters gathered compressed."""
    check_choice(model, CONFIGS, "--model")
    check_choice(topology, TOPOLOGIES, "--topology")
    quantised = partial(dynamiq_gather, method=compression(gather_bits, "--gather-bits"))
    reduction = compression(bits, "--bits", topology)
    scatter = partial(dynamiq_scatter, method=reduction)
    in_bf16 = {
        "gather": partial(lax_gather, dtype=jnp.bfloat16),
        "scatter": partial(lax_scatter, dtype=jnp.bfloat16),
    }
    recipe = RECIPES[model]
    recipe = recipe._replace(
        steps=steps or recipe.steps, batch_size=batch_size or recipe.batch_size
    )
    out.mkdir(parents=True, exist_ok=True)

    run, where = start(model, recipe, seed)
    params = jax.eval_shape(run.init)
    reduction.check_agreement(params, run.mesh, AXIS)
    n_params = introduce(run, model)

    results = [train_zero(run, Wire("dynamiq", quantised, scatter))]
    if compare:
        results += [
            train_zero(run, Wire("dynamiq, bf16", in_bf16["gather"], scatter)),
            train_zero(run, Wire("bf16", **in_bf16)),
            train_replicated(run),
        ]
    run.console.print(table(results))

    record = {
        "environment": where, "model": model, "n_params": n_params, "recipe": recipe._asdict(),
        "seq_len": run.model.seq_len, "seed": seed, "bits": bits, "topology": topology,
        "gather_bits": gather_bits,
    }  # fmt: skip
    name = f"{model}-zero{'-compare' if compare else ''}"
    keep(run, results, record, name, out)


if __name__ == "__main__":
    typer.run(main)
