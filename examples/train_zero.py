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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from rich.table import Column, Table
from train_llm import (
    AXIS,
    MAX_NORM,
    RECIPES,
    Recipe,
    Result,
    Run,
    check_choice,
    fit,
    introduce,
    keep,
    lax_psum,
    make_optimizer,
    make_step,
    start,
)

import dynamiq_jax as dq

TOPOLOGIES = {"direct": dq.Direct(), "ring": dq.Ring(), "butterfly": dq.Butterfly()}


# --- The two collectives: parameters gathered, gradients scattered --------------------------------


class Wire(NamedTuple):
    """What travels: lists of every worker's shards, to all of the whole matrices, and back.

    ``gather(shards)`` gives whole matrices, the same on all workers; ``scatter(grads)`` takes each
    worker's gradients of them and gives it its slices of their sums.
    """

    name: str
    gather: Callable[[list[jax.Array]], list[jax.Array]]
    scatter: Callable[[list[jax.Array]], list[jax.Array]]


def lax_gather(shards: list[jax.Array], dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """Gathers in ``dtype``, exactly."""
    return [jax.lax.all_gather(x.astype(dtype), AXIS, tiled=True) for x in shards]


def dynamiq_gather(shards: list[jax.Array], method: dq.Compression) -> list[jax.Array]:
    """Gathers quantised: the same bits on all workers, unbiased but for the cast to bf16."""
    return [x.astype(jnp.bfloat16) for x in dq.all_gather(shards, AXIS, tiled=True, method=method)]


def lax_scatter(grads: list[jax.Array], dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """The baseline: jax.lax.psum_scatter in the wire's dtype."""
    return [jax.lax.psum_scatter(g.astype(dtype), AXIS, tiled=True) for g in grads]


def dynamiq_scatter(grads: list[jax.Array], method: dq.Compression) -> list[jax.Array]:
    """Scatters compressed sums."""
    return dq.psum_scatter(grads, AXIS, tiled=True, method=method)


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


class Sharded(NamedTuple):
    """Compiled functions; the arrays have the whole model's shapes, spread over the devices."""

    init: Callable[[jax.Array], tuple[Any, Any]]
    """From a PRNG key to (params, opt_state), every device its own part of them."""
    step: Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]
    """As `train_llm.make_step`'s."""


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


# --- What travels and what stays ------------------------------------------------------------------

SENT = {  # bytes that each of n workers sends, by byte of the operand
    "all_gather": lambda n: n - 1,
    "all_gather_invariant": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
    "psum": lambda n: 2 * (n - 1) / n,
    "psum_invariant": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


def sent_bytes(function: Callable, *args: Any, inside: str, n_workers: int) -> float:
    """Bytes that one worker sends in the calls of the jitted function named ``inside``."""

    def visit(eqns: list, times: int, counts: bool) -> float:
        total = 0.0
        for eqn in eqns:
            params = eqn.params
            if counts and eqn.primitive.name in SENT:
                operands = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
                total += times * SENT[eqn.primitive.name](n_workers) * operands
            trips = times * params.get("length", 1)
            for jaxpr in subjaxprs(params):
                total += visit(jaxpr.eqns, trips, counts or params.get("name") == inside)
        return total

    return visit(jax.make_jaxpr(function)(*args).jaxpr.eqns, 1, False)


def subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The programs inside an operation, as of jit, shard_map, remat or scan."""
    for param in params.values():
        for value in param if isinstance(param, tuple) else (param,):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield value


def bytes_per_worker(tree: Any) -> int:
    """What the first device holds of a tree of arrays."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@dataclass(kw_only=True)
class Sharing(Result):
    """`Result`, and where the bytes are; ``wire_bytes`` counts both directions."""

    gradient_bytes: float  # sent by one worker per step
    param_bytes: float  # the same, for gathering
    state_bytes: int  # parameters and moments that one worker holds


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


def train_replicated(run: Run) -> Sharing:
    """The same with all parameters on every worker, and the gradient's f32 lax.psum."""
    params, optimizer = run.init(), make_optimizer(run.recipe)
    opt_state = run.replicated(optimizer.init, params)
    method = lax_psum(run.loss_fn, params, run.mesh, "f32")
    result = Sharing(
        method="replicated",
        wire_bytes=method.wire_bytes,
        bits_per_coord=method.bits_per_coord,
        gradient_bytes=method.wire_bytes,
        param_bytes=0.0,
        state_bytes=bytes_per_worker((params, opt_state)),
    )
    fit(run, result, make_step(method, optimizer), params, opt_state)
    return result


def table(results: list[Sharing]) -> Table:
    """The comparison, one row per run; megabytes are one worker's."""
    figures = ("validation loss", "gradients MB/step", "params MB/step", "bits/coord", "state MB")
    columns = [Column(name.replace(" ", "\n"), justify="right") for name in (*figures, "s/step")]
    out = Table("method", *columns)
    for r in results:
        out.add_row(
            r.method, f"{r.validation_loss:.4f}", f"{r.gradient_bytes / 1e6:,.2f}",
            f"{r.param_bytes / 1e6:,.2f}", f"{r.bits_per_coord:.2f}",
            f"{r.state_bytes / 1e6:,.2f}", f"{r.seconds_per_step:.3f}",
        )  # fmt: skip
    return out


# --- Command line ---------------------------------------------------------------------------------


def compression(bits: float, option: str, topology: str | None = None) -> dq.Compression:
    """DynamiQ at so many bits, for buckets as small as the tiny model's embedding, too."""
    try:
        route = TOPOLOGIES.get(topology or "")
        return dq.Compression(dq.DynamiQ(bits=bits), topology=route, min_bucket_size=32_768)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {bits}: {error}") from error


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
