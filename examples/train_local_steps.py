"""Local steps (DiLoCo): workers train alone, and average by how much they have moved.

    python examples/train_local_steps.py --every 10 --bits 4

Every worker takes ``--every`` steps of AdamW on its own batches and sends nothing. Then the mean of
the workers' movements is the gradient of an outer step of SGD with Nesterov's momentum, by
`dq.optax.sharded`: movements go to the owners of slices at ``--bits`` bits per coordinate, and
differences of parameters come back at 2.5. All workers go on from the same copy. The second run
sends f32 both ways. Expect (8 virtual devices of 2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

    outer steps  validation loss  kB/step
    dynamiq               2.2974     75.8
    f32                   2.2998    740.4

``kB/step`` is what one worker sends, averaged over local steps. With ``--away 0.25`` a quarter of
the workers, drawn for every outer step, does not count in it. Losses differ between processors.
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

import dynamiq_jax as dq


def make_programs(run: llm.Run, outer: Any, outer_state: Any) -> tuple[Any, Any, Any]:
    """Returns parameters and Adam's states of all workers, a local step and an outer step.

    ``local_step(own, tokens) -> (own, losses)``, whose arrays have a leading axis of workers, and
    ``outer_step(copy, outer_state, own, weights) -> (copy, outer_state, own)``.
    """
    inner, mapped = llm.make_optimizer(run.recipe), partial(jax.shard_map, mesh=run.mesh)
    each, specs = jax.P(llm.AXIS), dq.optax.state_specs(outer_state)

    @partial(jax.jit, donate_argnums=0)
    @partial(mapped, in_specs=(each, each), out_specs=(each, each))
    def local_step(own: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, state = jax.tree.map(lambda x: x[0], own)
        loss, grads = jax.value_and_grad(run.loss_fn)(params, tokens)
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], ((params, state), loss))

    @partial(dq.jit, donate_argnums=(0, 1, 2))
    @partial(mapped, in_specs=(jax.P(), specs, each, each), out_specs=(jax.P(), specs, each))
    def outer_step(copy: Any, outer_state: Any, own: Any, weights: jax.Array) -> tuple:
        params, weight = jax.tree.map(lambda x: x[0], (own[0], weights))
        share = weight / jax.lax.pmean(weight, llm.AXIS)
        moved = jax.tree.map(lambda a, b: jnp.where(weight > 0, (a - b) * share, 0), copy, params)
        updates, outer_state = outer.update(moved, outer_state, copy)
        copy = optax.apply_updates(copy, updates)
        return copy, outer_state, (jax.tree.map(lambda x: x[None], copy), own[1])

    first = jax.vmap(lambda worker: (params := run.init(), inner.init(params)))
    own = jax.jit(first, out_shardings=jax.NamedSharding(run.mesh, each))(np.arange(run.mesh.size))
    return own, local_step, outer_step


def train(run: llm.Run, name: str, up: Any, down: Any, rule: Any, every: int, away: float) -> Any:
    """Trains by local steps; ``up`` and ``down`` carry movements and differences."""
    copy, n, small = run.init(), run.mesh.size, partial(dq.Compression, min_bucket_bytes=0)
    outer = dq.optax.sharded(rule, llm.AXIS, method=small(up), differences=small(down))
    outer_state = dq.optax.init(outer, copy, run.mesh)
    own, local_step, outer_step = make_programs(run, outer, outer_state)
    whole = [small(half).explain(copy, n, verbose=False) for half in (up, down)]  # each two halves
    sent, bits = np.mean([(x.wire_bytes / every, x.bits_per_coord) for x in whole], axis=0)
    result = llm.Result(method=name, wire_bytes=sent, bits_per_coord=bits)
    rng = np.random.default_rng(run.seed)

    def step(copy: Any, state: tuple, tokens: jax.Array) -> tuple[Any, tuple, float]:
        number, own, outer_state = state
        own, losses = local_step(own, tokens)
        if (number + 1) % every == 0:
            weights = run.shard((rng.permutation(n) >= away * n).astype(np.float32))
            copy, outer_state, own = outer_step(copy, outer_state, own, weights)
        # The mean is the host's: on devices it would be a message, and local steps send none.
        return copy, (number + 1, own, outer_state), float(np.mean(jax.device_get(losses)))

    llm.fit(run, result, step, copy, (0, own, outer_state))
    return result


def main(
    model: Annotated[str, typer.Option(help="tiny, 125m or 1b")] = "tiny",
    every: Annotated[int, typer.Option(min=1, help="local steps per outer step")] = 10,
    bits: Annotated[float, typer.Option(help="wire bits per coordinate of movements")] = 4.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    outer_lr: Annotated[float, typer.Option(help="learning rate of outer steps")] = 0.7,
    momentum: Annotated[float, typer.Option(help="Nesterov's, of outer steps")] = 0.4,
    away: Annotated[float, typer.Option(min=0, help="share of workers not counted")] = 0.0,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model by local steps, with outer steps compressed and in f32."""
    llm.check_choice(model, llm.RECIPES, "--model")
    recipe = llm.RECIPES[model]._replace(steps=steps or llm.RECIPES[model].steps)
    if recipe.steps % every:
        raise typer.BadParameter(f"{recipe.steps} steps are no multiple of --every {every}")
    out.mkdir(parents=True, exist_ok=True)
    run, where = llm.start(model, recipe, seed=0)
    llm.introduce(run, model)
    rest = optax.sgd(outer_lr, momentum, nesterov=True), every, away
    dynamiq = dq.DynamiQ(bits=bits), dq.DynamiQ(bits=2.5, dither=True)
    results = [train(run, "dynamiq", *dynamiq, *rest), train(run, "f32", dq.F32(), dq.F32(), *rest)]
    print("outer steps  validation loss  kB/step")
    for r in results:
        print(f"{r.method:11}{r.validation_loss:17.4f}{r.wire_bytes / 1e3:9.1f}")
    told = {"every": every, "bits": bits, "outer_lr": outer_lr, "momentum": momentum, "away": away}
    record = {"environment": where, "model": model, "recipe": recipe._asdict(), **told}
    llm.keep(run, results, record, f"{model}-local-steps", out)


if __name__ == "__main__":
    typer.run(main)
