"""Local steps (DiLoCo): workers train alone, and average what has become of their parameters.

    python examples/train_local_steps.py --every 10 --bits 4

Every worker takes ``--every`` steps of AdamW on its own batches and sends nothing. Then all send
by how much they have moved, at ``--bits`` bits per coordinate: the mean of that over the workers,
by ``dq.pmean``, is the gradient of an outer step of SGD with Nesterov's momentum, from which all
workers go on. Adam's moments stay with their worker. Four runs from the same start and on the same
tokens are compared: outer steps by DynamiQ, outer steps in f32, and gradients of every step by
DynamiQ at 5 bits and by ``lax.psum`` in f32. Without a GPU it runs on 8 virtual CPU devices. Expect
(2 busy x86-64 cores, jax 0.10.2, Python 3.11.7):

                       steps   validation      loss      wire   bits/
    method           between         loss    vs f32   kB/step   coord   s/step
    local, dynamiq        10       2.2989   +14.20%      93.1    4.02    0.151
    local, f32            10       2.2998   +14.24%     740.4   32.00    0.107
    dynamiq                1       1.9914    -1.08%   1,162.4    5.02    0.469
    f32                    1       2.0131         0   7,404.1   32.00    0.112

What local steps cost here is theirs, not the bits': 200 steps have 20 outer ones, and every worker
sees 2 sequences per step. Outer steps at 4 bits lose nothing against f32. DiLoCo's momentum is 0.9,
for hundreds of outer steps; in 20 it ends at 2.565, and 0.4, the default here, at 2.299.

Kilobytes are what one worker sends per step on average, those of outer steps spread over the steps
between. DynamiQ's losses differ between processors, see ``train_llm.py``. Virtual devices exchange
everything through memory: the time per step says nothing about a network. ``--outer-lr 1 --momentum
0`` is plain averaging of parameters.

The curves (PNG) and all numbers (JSON) land in ``runs/``. A step's loss is the mean over workers of
that of their own parameters; the validation loss is that of the parameters after the last outer
step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, Loss
from rich import box
from rich.table import Column, Table

# Asks for 8 virtual CPU devices, unless the caller did, before JAX looks for any.
from train_llm import (
    AXIS,
    RECIPES,
    TOPOLOGIES,
    Method,
    Result,
    Run,
    check_choice,
    compare_losses,
    dynamiq,
    fit,
    introduce,
    keep,
    lax_psum,
    make_optimizer,
    make_step,
    start,
)

import dynamiq_jax as dq

SYNCHRONOUS = dq.DynamiQ(bits=5)  # of gradients, in the run that is compared with


# --- The two programs: a local step, which sends nothing, and an outer step -----------------------


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How often, how and by what rule workers meet.

    Attributes:
      every: local steps from one outer step to the next.
      learning_rate: of the outer SGD; 1 without momentum makes the mean of the workers' parameters.
      momentum: Nesterov's, of the outer SGD.
      method: how the workers' movements travel.
    """

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.4
    method: dq.Compression = dq.Compression(dq.DynamiQ(bits=4))

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"every={self.every}: pass at least 1 local step per outer step")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: pass a positive number")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: pass a number from 0 to below 1")

    def check(self, steps: int) -> None:
        """Refuses numbers of steps after which workers would not have met."""
        if steps % self.every:
            raise ValueError(
                f"{steps} steps are no multiple of the {self.every} from one outer step to the "
                f"next: what the last {steps % self.every} did would be lost; take "
                f"{steps + -steps % self.every}"
            )

    def optimizer(self) -> optax.GradientTransformation:
        """Of the outer steps."""
        momentum = self.momentum or None  # None keeps no state
        return optax.sgd(self.learning_rate, momentum, nesterov=self.momentum > 0)


class State(NamedTuple):
    """What training carries beside the parameters of the newest outer step."""

    number: int
    """Of local steps that every worker has taken."""
    local: Any
    """Parameters with a leading axis of workers, one on each."""
    inner: Any
    """The inner optimizer's state, likewise."""
    outer: Any
    """The outer optimizer's, the same on all workers."""


class Programs(NamedTuple):
    """Compiled functions; ``params`` are those of the newest outer step, on every worker."""

    init: Callable[[Any], State]
    """``init(params)``."""
    local_step: Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]
    """``(local, inner, tokens)`` to the next ``local`` and ``inner``, and each worker's loss."""
    outer_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    """``(params, local, outer)`` to the next ones of all three."""


def own(tree: Any) -> Any:
    """This worker's part of arrays with a leading axis of workers, inside of shard_map."""
    return jax.tree.map(lambda x: x[0], tree)


def stacked(tree: Any) -> Any:
    """The reverse."""
    return jax.tree.map(lambda x: x[None], tree)


def make_programs(
    loss_fn: Loss, inner: optax.GradientTransformation, outer: Outer, mesh: jax.sharding.Mesh
) -> Programs:
    """Training by local steps with the optimizer ``inner`` between outer steps."""
    optimizer = outer.optimizer()
    mapped = partial(jax.shard_map, mesh=mesh)
    each = P(AXIS)

    @jax.jit
    @partial(mapped, in_specs=P(), out_specs=(each, each, P()))
    def init(params: Any) -> tuple[Any, Any, Any]:
        local = jax.lax.pcast(params, AXIS, to="varying")
        return stacked(local), stacked(inner.init(local)), optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(mapped, in_specs=(each, each, each), out_specs=(each, each, each))
    def local_step(local: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        params = own(local)
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = inner.update(grads, own(state), params)
        return stacked(optax.apply_updates(params, updates)), stacked(state), loss[None]

    @partial(dq.jit, donate_argnums=(0, 1, 2))
    @partial(mapped, in_specs=(P(), each, P()), out_specs=(P(), each, P()))
    def outer_step(params: Any, local: Any, state: Any) -> tuple[Any, Any, Any]:
        moved = jax.tree.map(jnp.subtract, params, own(local))
        grads = dq.pmean(moved, AXIS, method=outer.method)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, stacked(jax.lax.pcast(params, AXIS, to="varying")), state

    return Programs(lambda params: State(0, *init(params)), local_step, outer_step)


def make_local_step(programs: Programs, every: int) -> Callable:
    """Returns ``step(params, state, tokens) -> (params, state, loss)``, as `train_llm.make_step`.

    Every so many calls end with an outer step; ``params`` changes there alone.
    """

    def step(params: Any, state: State, tokens: jax.Array) -> tuple[Any, State, float]:
        number = state.number + 1
        local, inner, losses = programs.local_step(state.local, state.inner, tokens)
        # On the host: a mean on devices would be a message, and local steps send none.
        loss = float(np.mean(jax.device_get(losses)))
        outer = state.outer
        if number % every == 0:
            params, local, outer = programs.outer_step(params, local, outer)
        return params, State(number, local, inner, outer), loss

    return step


# --- Runs -----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Met(Result):
    """`Result`, whose ``wire_bytes`` are an average over steps, and how often workers meet."""

    every: int


def train_local(run: Run, name: str, outer: Outer) -> Met:
    """Trains from ``run.init()`` by local steps."""
    outer.check(run.recipe.steps)
    params = run.init()
    outer.method.check_agreement(params, run.mesh, AXIS)
    cost = outer.method.explain(params, run.mesh.size, verbose=False)
    programs = make_programs(run.loss_fn, make_optimizer(run.recipe), outer, run.mesh)
    result = Met(
        method=name, every=outer.every,
        wire_bytes=cost.wire_bytes / outer.every, bits_per_coord=cost.bits_per_coord,
    )  # fmt: skip
    fit(run, result, make_local_step(programs, outer.every), params, programs.init(params))
    return result


def train_synchronous(run: Run, method: Method) -> Met:
    """Trains from ``run.init()`` by the mean gradient of every step."""
    params, optimizer = run.init(), make_optimizer(run.recipe)
    opt_state = run.init_optimizer(optimizer, params)
    result = Met(
        method=method.name, every=1,
        wire_bytes=method.wire_bytes, bits_per_coord=method.bits_per_coord,
    )  # fmt: skip
    fit(run, result, make_step(method, optimizer), params, opt_state)
    return result


def table(results: list[Met]) -> Table:
    """The comparison, one row per run; kilobytes are one worker's."""
    figures = (
        "steps\nbetween",
        "validation\nloss",
        "loss\nvs f32",
        "wire\nkB/step",
        "bits/\ncoord",
    )
    columns = (Column(name, justify="right") for name in (*figures, "s/step"))
    out = Table("method", *columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for r in results:
        percent = "0" if r.method == "f32" else f"{r.percent_vs_f32:+.2f}%"
        out.add_row(
            r.method, f"{r.every}", f"{r.validation_loss:.4f}", percent,
            f"{r.wire_bytes / 1e3:,.1f}", f"{r.bits_per_coord:.2f}", f"{r.seconds_per_step:.3f}",
        )  # fmt: skip
    return out


# --- Command line ---------------------------------------------------------------------------------


def main(
    every: Annotated[int, typer.Option(help="local steps from one outer step to the next")] = 10,
    bits: Annotated[float, typer.Option(help="per coordinate of what workers moved")] = 4.0,
    steps: Annotated[int | None, typer.Option(min=1, help="default: the model's recipe")] = None,
    outer_lr: Annotated[float, typer.Option(help="learning rate of outer steps")] = 0.7,
    momentum: Annotated[float, typer.Option(help="Nesterov's, of outer steps")] = 0.4,
    model: Annotated[str, typer.Option(help="tiny, 125m, 350m or 1b")] = "tiny",
    topology: Annotated[str, typer.Option(help=f"{' or '.join(TOPOLOGIES)}")] = "ring",
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per worker")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Trains a LLaMA-style model by local steps, with compressed outer steps."""
    check_choice(model, CONFIGS, "--model")
    check_choice(topology, TOPOLOGIES, "--topology")
    recipe = RECIPES[model]
    recipe = recipe._replace(
        steps=steps or recipe.steps, batch_size=batch_size or recipe.batch_size
    )
    rule = {"every": every, "learning_rate": outer_lr, "momentum": momentum}
    travels = TOPOLOGIES[topology]
    try:
        compressed = Outer(**rule, method=dq.Compression(dq.DynamiQ(bits=bits), topology=travels))
        compressed.check(recipe.steps)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)

    run, where = start(model, recipe, seed)
    params = jax.eval_shape(run.init)
    n_params = introduce(run, model)

    synchronous = dq.Compression(SYNCHRONOUS, topology=travels)
    results = [
        train_local(run, "local, dynamiq", compressed),
        train_local(run, "local, f32", Outer(**rule, method=dq.Compression(dq.F32()))),
        train_synchronous(run, dynamiq(run.loss_fn, params, run.mesh, synchronous)),
        train_synchronous(run, lax_psum(run.loss_fn, params, run.mesh, "f32")),
    ]
    compare_losses(results)
    run.console.print(table(results))

    record = {
        "environment": where, "model": model, "n_params": n_params, "recipe": recipe._asdict(),
        "seq_len": run.model.seq_len, "seed": seed, "bits": bits, "topology": topology, **rule,
    }  # fmt: skip
    name = f"{model}-local-steps"
    keep(run, results, record, name, out)


if __name__ == "__main__":
    typer.run(main)
