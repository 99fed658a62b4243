"""Fully sharded training (FSDP, ZeRO-3): DynamiQ where the psum_scatter of gradients stood.

    python examples/train_fsdp.py --model tiny --compare

trains the model of ``train_llm.py`` three times, from the same start and on the same tokens: in
shards with gradients scattered by DynamiQ at 5 bits per coordinate, in shards with gradients
scattered by ``lax.psum_scatter`` in bf16, and with everything on every worker and gradients summed
by ``lax.psum`` in f32. Without a GPU it runs on 8 virtual CPU devices. Expect (2 busy x86-64
cores, jax 0.10.2, Python 3.11.7):

                 validation   gradients    params                state
    method             loss     MB/step   MB/step   bits/coord      MB   s/step
    dynamiq          1.9967        0.58      1.85         5.05    1.60    0.175
    bf16             2.0109        1.86      1.85        16.04    1.60    0.048
    replicated       2.0131        7.40      0.00        32.00   12.69    0.048

Megabytes are one worker's: sent for gradients, sent for gathering parameters, held as parameters
and Adam's moments. ``--gather dynamiq`` gathers parameters at 8 bits per coordinate instead of in
bf16: 0.92 MB/step, validation loss 1.9954. DynamiQ's losses differ between processors, see
``train_llm.py``. Virtual devices exchange everything through memory: the time per step says nothing
about a network.

Every worker holds an n-th of the rows of each matrix; vectors (the norms' scales, a thousandth of
the whole) it holds all. A layer's parameters are gathered when the forward pass comes to it, and
its gradients scattered when the backward pass has passed it. Gathered parameters are kept in
between, but for models with ``remat`` (1b): these gather a layer once more in its backward pass
and never hold all layers at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, Config, init_params, make_loss
from rich.table import Column, Table

# Asks for 8 virtual CPU devices, unless the caller did, before JAX looks for any.
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
GATHERS = ("bf16", "dynamiq")


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


def make_whole(wire: Wire) -> Callable[[Any], Any]:
    """Returns ``whole(module)``, whose derivative with respect to the shards is the mean gradient.

    Matrices are gathered; vectors are whole already and only marked as each worker's own, so that
    their gradients are, too. The backward pass scatters the gradients of the module's matrices
    and averages those of its vectors: as soon as they are known, module by module.
    """

    @jax.jit
    def gather_params(state: nnx.State) -> nnx.State:
        return by_rank(state, wire.gather, lambda x: jax.lax.pcast(x, AXIS, to="varying"))

    @jax.jit
    def scatter_grads(grads: nnx.State) -> nnx.State:
        n = jax.lax.axis_size(AXIS)

        def scatter_mean(matrices: list[jax.Array]) -> list[jax.Array]:
            return [g.astype(jnp.float32) / n for g in wire.scatter(matrices)]

        return by_rank(grads, scatter_mean, lambda g: dq.pmean(g, AXIS))

    gather = jax.custom_vjp(gather_params)
    gather.defvjp(lambda state: (gather_params(state), None), lambda _, g: (scatter_grads(g),))

    def whole(module: nnx.Module) -> nnx.Module:
        graphdef, state = nnx.split(module)
        return nnx.merge(graphdef, gather(state))

    return whole


def by_rank(state: nnx.State, to_matrices: Callable, to_vector: Callable) -> nnx.State:
    """Maps all matrices of a module at once, so that they can share a bucket, and each vector."""
    leaves, treedef = jax.tree.flatten(state)
    matrices = iter(to_matrices([x for x in leaves if x.ndim > 1]))
    return treedef.unflatten([next(matrices) if x.ndim > 1 else to_vector(x) for x in leaves])


# --- The sharded training step --------------------------------------------------------------------


def spec(leaf: Any) -> P:
    """How a parameter, or what the optimizer keeps of it, is placed: matrices split by rows."""
    return P(AXIS) if leaf.ndim > 1 else P()


def check_rows(params: Any, n_workers: int) -> None:
    """Refuses a model whose matrices cannot be split evenly."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.ndim > 1 and leaf.shape[0] % n_workers:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, no multiple of the {n_workers} devices; use a "
                "number that divides them (CUDA_VISIBLE_DEVICES, or XLA_FLAGS as in train_llm.py)"
            )


def clip_by_norm_of_shards(max_norm: float) -> optax.GradientTransformation:
    """optax.clip_by_global_norm for matrices in shards: the norm is that of all of them."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(updates)
        squared = jax.lax.psum(sum(jnp.sum(g**2) for g in leaves if g.ndim > 1), AXIS)
        norm = jnp.sqrt(squared + sum(jnp.sum(g**2) for g in leaves if g.ndim <= 1))
        return jax.tree.map(lambda g: g * (max_norm / jnp.maximum(norm, max_norm)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Sharded(NamedTuple):
    """Compiled functions; the arrays have the whole model's shapes, spread over the devices."""

    init: Callable[[jax.Array], tuple[Any, Any]]
    """From a PRNG key to (params, opt_state), every device its own part of them."""
    step: Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]
    """As `train_llm.make_step`'s."""


def make_sharded(config: Config, recipe: Recipe, mesh: jax.sharding.Mesh, wire: Wire) -> Sharded:
    """Training whose every worker holds 1/n of the matrices and of Adam's moments of them."""
    optimizer = make_optimizer(recipe, clip_by_norm_of_shards(MAX_NORM))
    loss_fn = make_loss(config, make_whole(wire))

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = init_params(config, key)
        return params, optimizer.init(params)

    state = jax.eval_shape(init, jax.random.key(0))
    check_rows(state[0], mesh.size)
    specs = jax.tree.map(spec, state)

    @partial(dq.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=(*specs, P()))
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, AXIS)

    placed = jax.tree.map(partial(NamedSharding, mesh), specs)
    return Sharded(jax.jit(init, out_shardings=placed), step)


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


def train_sharded(run: Run, wire: Wire) -> Sharing:
    """Trains from ``run.init()``'s parameters, each worker with its shards of them."""
    sharded, n = make_sharded(run.model, run.recipe, run.mesh, wire), run.mesh.size
    params, opt_state = sharded.init(jax.random.key(run.seed))
    tokens = jax.ShapeDtypeStruct((run.rows, run.model.seq_len + 1), jnp.int32)
    count = partial(sent_bytes, sharded.step, params, opt_state, tokens, n_workers=n)
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
    fit(run, result, sharded.step, params, opt_state)
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
    topology: Annotated[str, typer.Option(help="direct, ring or butterfly")] = "direct",
    gather: Annotated[str, typer.Option(help="parameters travel as bf16 or dynamiq")] = "bf16",
    gather_bits: Annotated[float, typer.Option(help="of dynamiq, per coordinate")] = 8.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per device")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    compare: Annotated[bool, typer.Option(help="bf16 psum_scatter and replicated, too")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model in shards, with compressed gradients."""
    check_choice(model, CONFIGS, "--model")
    check_choice(topology, TOPOLOGIES, "--topology")
    check_choice(gather, GATHERS, "--gather")
    bf16_gather = partial(lax_gather, dtype=jnp.bfloat16)
    quantised_gather = partial(dynamiq_gather, method=compression(gather_bits, "--gather-bits"))
    reduction = compression(bits, "--bits", topology)
    scatter = partial(dynamiq_scatter, method=reduction)
    wire = Wire("dynamiq", bf16_gather if gather == "bf16" else quantised_gather, scatter)
    baseline = Wire("bf16", bf16_gather, partial(lax_scatter, dtype=jnp.bfloat16))
    recipe = RECIPES[model]
    recipe = recipe._replace(
        steps=steps or recipe.steps, batch_size=batch_size or recipe.batch_size
    )
    out.mkdir(parents=True, exist_ok=True)

    run, where = start(model, recipe, seed)
    params = jax.eval_shape(run.init)
    reduction.check_agreement(params, run.mesh, AXIS)
    n_params = introduce(run, model)

    results = [train_sharded(run, wire)]
    if compare:
        results += [train_sharded(run, baseline), train_replicated(run)]
    run.console.print(table(results))

    record = {
        "environment": where, "model": model, "n_params": n_params, "recipe": recipe._asdict(),
        "seq_len": run.model.seq_len, "seed": seed, "bits": bits, "topology": topology,
        "gather": gather, "gather_bits": gather_bits if gather == "dynamiq" else 16,
    }  # fmt: skip
    name = f"{model}-fsdp{'-compare' if compare else ''}"
    keep(run, results, record, name, out)


if __name__ == "__main__":
    typer.run(main)
