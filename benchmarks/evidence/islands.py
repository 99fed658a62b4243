r"""Losses of local steps (DiLoCo) with compressed outer steps, with paired seeds.

    python benchmarks/evidence/islands.py --seeds 2 --steps 20 --every 10 --rows pmean:4  # CPU
    python benchmarks/evidence/islands.py --every 10,50 --seeds 32                        # one GPU

Eight workers of one device train alone by AdamW, ``--every`` steps at a time. Then the mean of
their movements is the gradient of an outer step of SGD with Nesterov's momentum. Models, starts,
tokens and inner optimizers are those of `training.py`. A row is named by how movements travel, and
by how differences of parameters come back to all workers:

* ``f32``: the exact mean; every worker takes the whole outer step.
* ``pmean:4``: the same by `dq.pmean` at 4 bits.
* ``4d/2.5d``: `dq.optax.sharded`; movements go to the owners of slices at 4 bits, and differences
  come back at 2.5 bits. "d" is dither, "f32" is exact, and "2d" has the widths 1 to 3.
* ``4d+memory/2.5d``: the same, and every worker adds what its encodings of movements have lost to
  its next movements.

The table has each row's validation loss, and the mean over seeds of its difference from that of
``f32`` with the standard error. Kilobytes are what one worker sends per inner step. Every finished
row is kept in ``--json``, and is not trained again.
"""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import Array, lax
from training import Record, ahead, difference, environment, learning_rate
from training_model import INITS, MODELS, init, loss, stack, unstack
from training_run import AXIS, MIN_LEAF_SIZE, Task, arguments, load_task, make_optimizer

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.collectives import reduce_scatter
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.dynamiq.codec import chunk_codec
from dynamiq_jax.methods.hops import Bound

WORKERS = 8
ROWS = "pmean:4,5/2.5d,4d/2.5d,4d+memory/2.5d,2.5d/2.5d,2.5d+memory/2.5d,2d/2d,f32/2.5d"


# --- How movements and differences travel ---------------------------------------------------------


class Exchange(NamedTuple):
    """One row: the two halves of an outer step."""

    name: str
    up: dq.Compression
    down: dq.Compression | None
    """`None`: the first half is a whole all-reduce."""
    memory: bool

    def kilobytes(self, params: Any) -> float:
        """One worker's of an outer step."""
        if self.down is None:
            return self.up.explain(params, WORKERS, verbose=False).wire_bytes / 1e3
        return sum(half(each, params) for each in (self.up, self.down)) / 1e3


def half(compression: dq.Compression, params: Any) -> float:
    """Bytes that one worker sends in one half of an all-reduce: the mean of both halves."""
    return compression.explain(params, WORKERS, verbose=False).wire_bytes / 2


def method_of(text: str) -> dq.Compression:
    """The method called ``text``, such as "4d"."""
    limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
    if text == "f32":
        return dq.Compression(dq.F32(), **limits)
    bits, dither = float(text.removesuffix("d")), text.endswith("d")
    narrow: Any = {"widths": (1, 2, 3), "floor": None} if bits == 2 else {}
    method = dq.DynamiQ(bits=bits, dither=dither, backend="jnp", **narrow)
    return dq.Compression(method, topology=dq.Direct(), **limits)


def parse(name: str) -> Exchange:
    """The row called ``name``."""
    if name == "f32" or name.startswith("pmean:"):
        return Exchange(name, method_of(name.removeprefix("pmean:")), None, memory=False)
    up, down = name.split("/")
    remembers = up.endswith("+memory")
    return Exchange(name, method_of(up.removesuffix("+memory")), method_of(down), remembers)


def make_outer(exchange: Exchange, rate: Array, momentum: Array, key: Array) -> Any:
    """The outer optimizer of one worker; it takes the worker's own movements as gradients."""
    rule, first = optax.sgd(rate, momentum, nesterov=True), optax.identity()
    if exchange.down is None:
        return optax.chain(dq.optax.all_reduce(AXIS, method=exchange.up, key=key), rule)
    up = exchange.up
    if exchange.memory:
        first, up = remembering(exchange.up, key), method_of("f32")
    return optax.chain(
        first, dq.optax.sharded(rule, AXIS, method=up, differences=exchange.down, key=key)
    )


def remembering(compression: dq.Compression, key: Array) -> optax.GradientTransformation:
    """The mean of large leaves by the first half of `sharded`, with a memory of what it lost."""
    method: Any = compression.method
    axis, topology = Axis((AXIS,)), dq.Direct()

    def large(tree: Any) -> list[Array]:
        return [x for x in jax.tree.leaves(tree) if x.size >= MIN_LEAF_SIZE]

    def rows(tree: Any) -> Array:
        return jnp.concatenate([x.reshape(WORKERS, -1) for x in large(tree)], axis=1)

    def start(params: Any) -> Any:
        return jnp.int32(0), jnp.zeros_like(rows(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        step, lost = state
        x = rows(updates) + lost
        pad = -x.shape[1] % method.format.super_group_size
        flat = jnp.pad(x, ((0, 0), (0, pad))).reshape(-1)
        layout = method.layout(x.shape[1], WORKERS, topology, "reduce_scatter")
        seed = jax.random.bits(jax.random.fold_in(key, step), (2,), jnp.uint32)
        call = Call(axis, topology, seed)
        shared = method.agreed(flat, call, Bound(layout, topology, WORKERS))
        slice_start = axis.index * layout.shard_rows
        options = {"slice_start": slice_start, "keep_error": True, "backend": "jnp"}
        codec = chunk_codec(flat, shared, layout, dtype=jnp.float32, **options)
        own, kept = reduce_scatter(topology, codec, axis, layout.chunks_per_worker)
        lost = kept.lost.reshape(WORKERS, -1)[:, : x.shape[1]]
        lost = lost.at[axis.index].set(0.0)  # a worker sends its own slice to nobody
        whole = lax.all_gather(own.reshape(-1)[: x.shape[1]] / WORKERS, AXIS)
        ends = np.cumsum([leaf.size // WORKERS for leaf in large(updates)])[:-1]
        parts = iter(jnp.split(whole, ends, axis=1))
        leaves, treedef = jax.tree.flatten(updates)
        means = [next(parts).reshape(x.shape) if x.size >= MIN_LEAF_SIZE else x for x in leaves]
        return treedef.unflatten(means), (step + 1, lost)

    return optax.GradientTransformation(start, update)


# --- Training -------------------------------------------------------------------------------------


def make_trainer(task: Task, exchange: Exchange, every: int) -> Any:
    """The program that trains a model for every seed.

    Its arguments are those of `training_run.make_trainer`, and rate and momentum of outer steps. It
    returns the validation loss [S] of the copy, and the largest difference between the workers'
    copies [S].
    """
    shape, inner = task.shape, make_optimizer("adamw", task.steps)

    def train(kind, peak, seed, starts, text, windows, rate, momentum) -> dict[str, Array]:
        start_key, key = jax.random.split(jax.random.key(seed))
        outer = make_outer(exchange, rate, momentum, key)

        def local_step(carry: Any, tokens: Array) -> Any:
            params, state = carry
            grads = jax.grad(partial(loss, shape))(params, tokens)
            updates, state = inner.update(grads, state, params)
            params = jax.tree.map(lambda p, u: p + peak * u, params, updates)
            return (params, state), None

        def worker_round(copy: Any, states: Any, tokens: Array) -> Any:
            """One worker's local steps, and its part of the outer step."""
            (local, state), _ = lax.scan(local_step, (copy, states[0]), tokens)
            moved = unstack(jax.tree.map(jnp.subtract, copy, local))
            updates, outer_state = outer.update(moved, states[1], unstack(copy))
            copy = jax.tree.map(jnp.add, copy, stack(updates))
            return copy, (state, outer_state)

        def one_round(carry: Any, own: Array) -> Any:
            tokens = text[own[..., None] + jnp.arange(shape.seq_len + 1)]
            tokens = tokens.reshape(every, WORKERS, shape.sequences, -1)
            return jax.vmap(worker_round, (0, 0, 1), axis_name=AXIS)(*carry, tokens), None

        def first(params: Any) -> Any:
            return params, (inner.init(params), outer.init(unstack(params)))

        params = init(shape, start_key, kind)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), params)
        carry = jax.vmap(first, axis_name=AXIS)(copies)
        rounds = starts.reshape(-1, every, starts.shape[-1])
        (copies, _), _ = lax.scan(one_round, carry, rounds)
        apart = [jnp.max(jnp.abs(x - x[:1])) for x in jax.tree.leaves(copies)]
        params = jax.tree.map(lambda x: x[0], copies)
        rows = windows.reshape(-1, shape.sequences, shape.seq_len + 1)
        validation = jnp.mean(lax.map(partial(loss, shape, params), rows))
        apart = jnp.max(jnp.stack(apart))
        return {"validation_loss": validation, "apart": apart}

    return jax.jit(jax.vmap(train, (None, None, 0, 0, None, None, None, None)))


# --- Rows -----------------------------------------------------------------------------------------


def settings_of(
    task: Task, kind: str, every: int, name: str, seeds: int, rate: float, momentum: float
) -> dict[str, Any]:
    """All that the figures of a row depend on."""
    return {
        "model": task.name, "init": kind, "optimiser": "adamw",
        "learning_rate": learning_rate("adamw", kind, task.name), "workers": WORKERS,
        "steps": task.steps, "seeds": seeds, "text": task.digest,
        "platform": jax.default_backend(), "every": every, "outer_rate": rate,
        "momentum": momentum, "row": name,
    }  # fmt: skip


def compile_program(task: Task, exchange: Exchange, every: int, seeds: int) -> Any:
    """The compiled program of some rows."""
    zero, given = np.float32(0), arguments(task, INITS[0], 0.0, range(seeds))
    return make_trainer(task, exchange, every).lower(*given, zero, zero).compile()


def train_row(program: Any, task: Task, settings: dict[str, Any], at_once: int) -> dict[str, Any]:
    """Trains all seeds of a row."""
    start, found = time.perf_counter(), []
    outer = np.float32(settings["outer_rate"]), np.float32(settings["momentum"])
    for first in range(0, settings["seeds"], at_once):
        seeds = range(first, first + at_once)
        given = arguments(task, settings["init"], settings["learning_rate"], seeds)
        found.append(jax.device_get(program(*given, *outer)))
    result = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    if np.any(result["apart"] != 0):
        raise RuntimeError(f"{settings['row']}: copies differ by {result['apart'].max()}")
    params = task.gradients
    return {
        "settings": settings,
        "kilobytes_per_step": parse(settings["row"]).kilobytes(params) / settings["every"],
        "seconds": round(time.perf_counter() - start, 1),
        "validation_loss": [float(f"{x:.7g}") for x in result["validation_loss"]],
    }


def line(row: dict[str, Any], exact: dict[str, Any]) -> str:
    """A row of the table."""
    settings = row["settings"]
    figure = difference(row["validation_loss"], exact["validation_loss"])
    shown = "diverged" if figure["percent"] is None else f"{figure['percent']:+8.3f}"
    error = "-" if figure["error"] is None else f"{figure['error']:.3f}"
    return (
        f"{settings['model']:6}{settings['init']:5}{settings['every']:6}"
        f"{settings['momentum']:9g} {settings['row']:17}{row['kilobytes_per_step']:10.2f}"
        f"{np.mean(row['validation_loss']):10.4f} {shown} +- {error:6}{row['seconds']:8.1f}"
    )


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "tiny",
    inits: Annotated[str, typer.Option(help=f"some of {', '.join(INITS)}")] = "unit",
    every: Annotated[str, typer.Option(help="local steps per outer step")] = "10,50",
    rows: Annotated[str, typer.Option(help="f32 always runs")] = ROWS,
    seeds: Annotated[int, typer.Option(min=1)] = 32,
    seeds_at_once: Annotated[int | None, typer.Option(min=1, help="default: all")] = None,
    steps: Annotated[int, typer.Option(min=2)] = 1000,
    outer_rate: Annotated[float, typer.Option(help="learning rate of outer steps")] = 0.7,
    momentum: Annotated[str, typer.Option(help="Nesterov's, of outer steps")] = "0.6",
    compile_threads: Annotated[int, typer.Option(min=1)] = 1,
    until: Annotated[float, typer.Option(help="seconds after which no row begins")] = 1e9,
    json_file: Annotated[Path, typer.Option("--json")] = Path("runs/islands.json"),
) -> None:
    """Trains by local steps with compressed outer steps, and compares losses with f32's."""
    deadline = time.perf_counter() + until
    task, at_once = load_task(model, WORKERS, steps), seeds_at_once or seeds
    periods = [int(text) for text in every.split(",")]
    if seeds % at_once or any(steps % period for period in periods):
        raise typer.BadParameter(
            f"--seeds {seeds} has to be a multiple of --seeds-at-once {at_once}, and --steps "
            f"{steps} of each of --every {every}"
        )
    json_file.parent.mkdir(parents=True, exist_ok=True)
    record = Record(json_file, environment())
    record.invocation["command"] = record.invocation["command"].replace("training.py", "islands.py")
    names = ["f32", *(name for name in rows.split(",") if name not in ("", "f32"))]
    programs = [(period, parse(name)) for period in periods for name in names]
    builds = [partial(compile_program, task, of, period, at_once) for period, of in programs]
    figures = "kB/step      loss  vs f32, %           seconds"
    print(f"model init  every momentum {'row':17}   {figures}")
    for (period, exchange), program in zip(programs, ahead(builds, compile_threads), strict=True):
        for kind in inits.split(","):
            for beta in map(float, momentum.split(",")):
                if time.perf_counter() > deadline:
                    raise SystemExit("--until is over: the same command goes on from here")
                told = (task, kind, period)
                settings = settings_of(*told, exchange.name, seeds, outer_rate, beta)
                row = record.find(settings)
                if row is None:
                    row = train_row(program.result(), task, settings, at_once)
                    record.add(row)
                exact = record.find(settings | {"row": "f32"})
                assert exact is not None
                print(line(row, exact), flush=True)


if __name__ == "__main__":
    typer.run(main)
