"""Training of stacked layers in a scan, which exchanges one layer beside the products of another.

    python examples/train_scanned.py --way deferred --compare

The blocks of the model of ``train_llm.py`` are stacked, so that the program does not grow with
their number. ``--way`` is "data" (`dq.scan` in a loss of `dq.value_and_grad`), "sharded" (updates:
gradients at 5 bits per coordinate, differences of parameters at 2.5), "deferred" (the same, with
differences beside the next forward pass) or "fsdp" (gradients at 5 bits, parameters at 8). The
second run of the comparison is plain JAX: ``lax.scan``, and ``lax.psum`` in f32. Without a GPU it
runs on 8 virtual CPU devices. Expect (2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

    method    validation loss  s/step
    deferred           2.0105    0.98
    f32                2.0131    0.26

Virtual devices exchange all through memory: their times say nothing about a network.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
import train_llm as llm  # asks for 8 virtual CPU devices, before JAX looks for any
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, MODELS, Stages
from train_llm import AXIS, RECIPES, Result, Run

import dynamiq_jax as dq
import dynamiq_jax.optax

WAYS = ("data", "sharded", "deferred", "fsdp")


def scanned_loss(stages: Stages, parts: Any, tokens: jax.Array) -> jax.Array:
    """The loss; `dq.scan` reduces gradients of blocks, and `dq.value_and_grad` the others."""
    embed, blocks, head = stages.functions
    assert isinstance(blocks, dq.Scanned)
    x, _ = dq.scan(
        lambda x, own: (blocks.function(own, x), None), embed(parts[0], tokens), parts[1], AXIS
    )
    return head(parts[2], x)


def data_parallel(run: Run, policy: dq.Policy) -> tuple[Any, Any, Callable, Callable]:
    """Parameters, the optimizer's state, the step, and how to read current parameters."""
    assert run.stages is not None
    params, optimizer = run.init(), llm.make_optimizer(run.recipe)
    loss = partial(scanned_loss, run.stages)
    grad = dq.value_and_grad(loss, mesh=run.mesh, axis_name=AXIS, compression=policy)
    method = llm.Method("data", grad, None, 0.0, 0.0)
    state = run.replicated(optimizer.init, params)
    return params, state, llm.make_step(method, optimizer), lambda params, state: params


def sharded(run: Run, policy: dq.Policy, *, deferred: bool) -> tuple[Any, Any, Callable, Callable]:
    """As `data_parallel`, with updates of slices; the clip is ``max_norm``."""
    rule, params = llm.make_optimizer(run.recipe, optax.identity()), run.init()
    moves: dict[str, Any] = {"max_norm": llm.MAX_NORM, "deferred": deferred}
    optimizer = dq.optax.sharded(rule, AXIS, compression=policy, **moves)
    state = dq.optax.init(optimizer, params, run.mesh)
    specs = dq.optax.state_specs(state)

    def loss(masters: Any, params: Any, pending: Any, tokens: jax.Array) -> Any:
        assert run.stages is not None
        told = {"specs": specs.masters, "copies": params, "pending": pending}
        told["compression"] = policy
        found = dq.overlapped(run.stages.functions, masters, tokens, AXIS, **told)
        return (found, params) if pending is None else found

    options: Any = {"in_specs": (P(), specs, P(AXIS)), "out_specs": (P(), specs, P())}

    @dq.jit(donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=run.mesh, **options)
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        both = jax.value_and_grad(loss, has_aux=True)
        (value, params), grads = both(state.masters, params, state.pending, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, AXIS)

    return params, state, step, dq.optax.gathered


def fsdp(run: Run, policy: dq.Policy) -> tuple[Any, Any, Callable, Callable]:
    """As `data_parallel`, with shards of parameters: matrices are split by rows."""

    def spec(path: Any, leaf: Any) -> P:
        if leaf.ndim < 2 or llm.is_scale(path):
            return P()
        return P(*[None] * (leaf.ndim - 2), AXIS)  # the first dimension of three counts blocks

    specs_of = partial(jax.tree_util.tree_map_with_path, spec)

    def clip(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        squares = [(jax.numpy.sum(g**2), spec(path, g) != P()) for path, g in leaves]
        norm = jax.lax.psum(sum(x for x, split in squares if split), AXIS)
        norm = jax.numpy.sqrt(norm + sum(x for x, split in squares if not split))
        scale = llm.MAX_NORM / jax.numpy.maximum(norm, llm.MAX_NORM)
        return jax.tree.map(lambda g: g * scale, updates), state

    clipped = optax.GradientTransformation(lambda params: optax.EmptyState(), clip)
    optimizer, params = llm.make_optimizer(run.recipe, clipped), run.init()
    whole = params, jax.eval_shape(optimizer.init, params)
    specs = specs_of(whole)
    placed = jax.tree.map(partial(NamedSharding, run.mesh), specs)
    params = jax.device_put(params, placed[0])
    state = jax.jit(optimizer.init, out_shardings=placed[1])(params)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        assert run.stages is not None
        told: dict[str, Any] = {"specs": specs[0], "compression": policy}
        return dq.overlapped(run.stages.functions, params, tokens, AXIS, **told)

    options: Any = {"in_specs": (*specs, P(AXIS)), "out_specs": (*specs, P())}

    @dq.jit(donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=run.mesh, **options)
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, AXIS)

    return params, state, step, lambda params, state: params


def make(run: Run, way: str, policy: dq.Policy) -> tuple[Any, Any, Callable, Callable]:
    """Parameters, state, step and reader of a way."""
    if way == "data":
        return data_parallel(run, policy)
    return fsdp(run, policy) if way == "fsdp" else sharded(run, policy, deferred=way == "deferred")


def policy_of(way: str, bits: float) -> dq.Policy:
    """How gradients travel, and differences or parameters."""
    small = partial(dq.Compression, min_bucket_bytes=0)  # compress small buckets, too
    others = dq.DynamiQ(bits=8) if way == "fsdp" else dq.DynamiQ(bits=2.5, dither=True)
    return dq.Policy(gradients=small(dq.DynamiQ(bits=bits)), parameters=small(others))


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    way: Annotated[str, typer.Option(help=f"one of {', '.join(WAYS)}")] = "data",
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of gradients")] = 5.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    compare: Annotated[bool, typer.Option(help="plain JAX, too")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model whose blocks are stacked."""
    llm.check_choice(model, CONFIGS, "--model")
    llm.check_choice(way, WAYS, "--way")
    recipe = RECIPES[model]._replace(steps=steps or RECIPES[model].steps)
    out.mkdir(parents=True, exist_ok=True)
    run, where = llm.start(model, recipe, seed, scan=True)
    llm.introduce(run, model)
    params, state, step, read = make(run, way, policy_of(way, bits))
    results = [Result(method=way, wire_bytes=float("nan"), bits_per_coord=bits)]
    llm.fit(run, results[0], step, params, state, read=read)
    if compare:
        params, optimizer = run.init(), llm.make_optimizer(recipe)
        method = llm.lax_psum(run.loss_fn, params, run.mesh, "f32")
        results.append(Result(method="f32", wire_bytes=method.wire_bytes, bits_per_coord=32.0))
        state = run.replicated(optimizer.init, params)
        llm.fit(run, results[1], llm.make_step(method, optimizer), params, state)
    run.console.print("method    validation loss  s/step")
    for r in results:
        figures = f"{r.method:9} {r.validation_loss:15.4f}  {r.seconds_per_step:6.2f}"
        run.console.print(figures, highlight=False)
    record = {"environment": where, "model": model, "recipe": recipe._asdict(), "seed": seed}
    llm.keep(run, results, record, f"{model}-{way}-scanned{'-compare' if compare else ''}", out)


if __name__ == "__main__":
    typer.run(main)
