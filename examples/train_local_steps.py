"""Local steps (DiLoCo): workers train alone, and average by how much they have moved.

    python examples/train_local_steps.py --every 10 --bits 4

Every worker takes ``--every`` steps of AdamW alone. Then the mean of the workers' movements is the
gradient of an outer step of SGD with Nesterov's momentum, by `dq.optax.sharded`: movements travel
at ``--bits`` bits, and differences of parameters come back at 2.5. The second run sends f32 both
ways. Expect (8 virtual devices of 2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

    outer steps  validation loss  kB/step
    dynamiq               2.3002     75.8
    f32                   2.2998    740.4

A worker sends ``kB/step`` on average. ``--away 0.25`` leaves a quarter of the workers, drawn every
time, out of outer steps. ``--fragments 2`` moves half of the leaves, twice as often: loss 2.2845.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_llm as llm  # asks for 8 virtual CPU devices, before JAX looks for any
import typer
from llm_model import MODELS

import dynamiq_jax as dq


def make_programs(run: llm.Run, outer: Any, *outer_states: Any) -> tuple[Any, ...]:
    """Returns parameters and Adam's states of all workers, a local step, and each fragment's outer.

    ``local_step(own, tokens) -> (own, losses)``, whose arrays have a leading axis of workers, and
    ``outer_step(copy, outer_state, own, weights) -> (copy, outer_state, own)``.
    """
    inner, mapped = llm.make_optimizer(run.recipe), partial(jax.shard_map, mesh=run.mesh)
    each = jax.P(llm.AXIS)

    @partial(jax.jit, donate_argnums=0)
    @partial(mapped, in_specs=(each, each), out_specs=(each, each))
    def local_step(own: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, state = jax.tree.map(lambda x: x[0], own)
        loss, grads = jax.value_and_grad(run.loss_fn)(params, tokens)
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], ((params, state), loss))

    def outer_step(copy: Any, outer_state: Any, own: Any, weights: jax.Array) -> tuple:
        params, share = own[0], weights[0] / jax.lax.pmean(weights[0], llm.AXIS)
        moved = jax.tree.map(lambda a, b: jnp.where(share > 0, (a - b[0]) * share, 0), copy, params)
        updates, outer_state = outer.update(moved, outer_state, copy)
        copy = optax.apply_updates(copy, updates)
        return copy, outer_state, (jax.tree.map(lambda x: x[None], copy), own[1])

    specs = [(jax.P(), dq.optax.state_specs(state), each) for state in outer_states]
    outer_steps = [mapped(outer_step, in_specs=(*own, each), out_specs=own) for own in specs]
    first = jax.vmap(lambda worker: (params := run.init(), inner.init(params)))
    own = jax.jit(first, out_shardings=jax.NamedSharding(run.mesh, each))(np.arange(run.mesh.size))
    return own, local_step, *(dq.jit(step, donate_argnums=(0, 1, 2)) for step in outer_steps)


def train(run: llm.Run, name: str, up: Any, down: Any, rule: Any, k: int, every: int, away: float):
    """Trains by local steps; ``up`` and ``down`` carry movements and differences of k fragments."""
    copy, n, rng = run.init(), run.mesh.size, np.random.default_rng(run.seed)
    small, tree = partial(dq.Compression, min_bucket_bytes=0), jax.tree.structure(copy)
    outer = dq.optax.sharded(
        rule, llm.AXIS, compression=dq.Policy(gradients=small(up), parameters=small(down))
    )
    outer_states = [dq.optax.init(outer, jax.tree.leaves(copy)[i::k], run.mesh) for i in range(k)]
    own, local_step, *outer_steps = make_programs(run, outer, *outer_states)
    whole = [small(half).explain(copy, n, verbose=False) for half in (up, down)]  # each two halves
    sent, bits = np.mean([(x.wire_bytes / every, x.bits_per_coord) for x in whole], axis=0)
    result = llm.Result(method=name, wire_bytes=sent, bits_per_coord=bits)

    def step(copy: Any, state: tuple, tokens: jax.Array) -> tuple[Any, tuple, float]:
        number, (own, losses) = state[0] + 1, local_step(state[1], tokens)
        if number % (every // k) == 0:
            i, leaves, local = number * k // every % k, *map(jax.tree.leaves, (copy, own[0]))
            part, here = slice(i, None, k), (rng.permutation(n) >= away * n).astype(np.float32)
            given = leaves[part], outer_states[i], (local[part], ()), run.shard(here)
            leaves[part], outer_states[i], (local[part], _) = outer_steps[i](*given)
            copy, own = tree.unflatten(leaves), (tree.unflatten(local), own[1])
        return copy, (number, own), float(np.mean(jax.device_get(losses)))  # the host's: no message

    llm.fit(run, result, step, copy, (0, own))
    return result


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    every: Annotated[int, typer.Option(min=1, help="local steps per outer step")] = 10,
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of movements")] = 4.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    outer_lr: Annotated[float, typer.Option(help="learning rate of outer steps")] = 0.7,
    momentum: Annotated[float, typer.Option(help="Nesterov's, of outer steps")] = 0.4,
    fragments: Annotated[int, typer.Option(min=1, help="of which one moves at a time")] = 1,
    away: Annotated[float, typer.Option(min=0, help="share of workers not counted")] = 0.0,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model by local steps, with outer steps compressed and in f32."""
    llm.check_choice(model, llm.RECIPES, "--model")
    recipe = llm.RECIPES[model]._replace(steps=steps or llm.RECIPES[model].steps)
    for count, name, of in ((recipe.steps, "every", every), (every, "fragments", fragments)):
        if count % of:
            raise typer.BadParameter(f"{count} steps are not a multiple of --{name} {of}")
    out.mkdir(parents=True, exist_ok=True)
    run, where = llm.start(model, recipe, seed=0)
    llm.introduce(run, model)
    rest = optax.sgd(outer_lr, momentum, nesterov=True), fragments, every, away
    dynamiq = dq.DynamiQ(bits=bits), dq.DynamiQ(bits=2.5, dither=True)
    results = [train(run, "dynamiq", *dynamiq, *rest), train(run, "f32", dq.F32(), dq.F32(), *rest)]
    rows = [f"{r.method:11}{r.validation_loss:17.4f}{r.wire_bytes / 1e3:9.1f}" for r in results]
    print("outer steps  validation loss  kB/step", *rows, sep="\n")
    told = {"every": every, "fragments": fragments, "bits": bits, "momentum": momentum}
    told |= {"environment": where, "model": model, "outer_lr": outer_lr, "away": away}
    llm.keep(run, results, told | {"recipe": recipe._asdict()}, f"{model}-local-steps", out)


if __name__ == "__main__":
    typer.run(main)
