r"""Losses of training with compressed all-to-alls between experts, with paired seeds.

    python benchmarks/evidence/experts.py --seeds 2 --steps 3                     # CPU
    python benchmarks/evidence/experts.py --seeds 32 --json runs/experts.json     # one GPU
    python benchmarks/evidence/experts.py --model mid --seeds 8 --json runs/experts.json

Eight simulated workers on one device hold one expert of every layer each (top-2 routing, capacity
factor 1.25; what exceeds it is dropped). `dq.all_to_all` brings tokens to experts and back. A row
"8/6" has codes of 8 bits forwards and of 6 bits backwards. Gradients of all other parameters are
averaged exactly, and validation exchanges tokens exactly. Every row is compared with "bf16" seed by
seed: start, tokens and key of the rounding depend on (seed, step) alone.
"""

import json
import shlex
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import Array, lax
from training import ahead, difference
from training_model import MODELS, Shape, Tree, init, loss, times
from training_run import AXIS, arguments, batches_of_seeds, load_task, make_optimizer, run_seeds

import dynamiq_jax as dq

WORKERS = 8
CAPACITY_FACTOR, BALANCE = 1.25, 0.01
ROWS = ("bf16", "8/8", "8/6", "6/8", "6/6", "5/8", "5/6")
RATES = {"tiny": 2e-3, "mid": 1e-3}
SHAPES = {
    "tiny": Shape(256, 64, 2, 128, 4, 8 * 160, jnp.float32, 2, 200, 512, 32),  # 1.2 M parameters
    "mid": Shape(4096, 256, 6, 256, 4, 8 * 352, jnp.bfloat16, 4, 200, 256, 8),  # 17 M
}
SPLIT = {"gate": 2, "up": 2, "down": 1}
"""The axis of stacked parameters along which experts follow each other."""


def method_of(text: str) -> Any:
    """The method of "bf16", or of the number of bits of a code."""
    return dq.BF16() if text == "bf16" else dq.DynamiQ(bits=int(text) + 0.5, backend="jnp")


def exchanger(row: str) -> Any:
    """The ``exchange(x, key)`` of a row; "f32" is exact."""
    forth, _, back = row.partition("/")
    if row == "f32":
        return lambda x, key: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    request = dq.Compression(method_of(forth), min_bucket_bytes=0)
    options = {"method": request, "backward": method_of(back or forth)}
    return lambda x, key: dq.all_to_all(x, AXIS, 0, 0, tiled=True, key=key, **options)


def experts(exchange: Any, key: Array, balance: float, x: Array, layer: Tree) -> tuple:
    """`training_model.FeedForward` of this worker's tokens by the experts of all workers."""
    tokens = x.reshape(-1, x.shape[-1])
    chances = jax.nn.softmax(times(tokens.astype(jnp.float32), layer, "router"))
    weight, chosen = lax.top_k(chances, 2)  # [T, 2]
    weight = weight / jnp.sum(weight, axis=1, keepdims=True)
    wanted = jax.nn.one_hot(chosen.T.reshape(-1), WORKERS, dtype=jnp.int32)  # first choices first
    place = jnp.sum((jnp.cumsum(wanted, axis=0) - 1) * wanted, axis=1).reshape(2, -1).T
    capacity = int(CAPACITY_FACTOR * 2 * tokens.shape[0] / WORKERS)
    sent = jnp.zeros((WORKERS, capacity, tokens.shape[1]), x.dtype)
    sent = sent.at[chosen, place].set(tokens[:, None], mode="drop", unique_indices=True)
    own = exchange(sent, jax.random.fold_in(key, 2 * layer["number"]))
    hidden = jax.nn.silu(times(own, layer, "gate")) * times(own, layer, "up")
    back = times(hidden, layer, "down")
    back = exchange(back, jax.random.fold_in(key, 2 * layer["number"] + 1))
    found = back.at[chosen, place].get(mode="fill", fill_value=0)
    load = jnp.mean(wanted[: tokens.shape[0]].astype(jnp.float32), axis=0)
    term = balance * WORKERS * jnp.sum(load * jnp.mean(chances, axis=0))
    return jnp.sum(found * weight[..., None].astype(x.dtype), axis=1).reshape(x.shape), term


def start(shape: Shape, key: Array, kind: Array) -> Tree:
    """Parameters of the dense model, whose hidden units the experts share out, and routers."""
    params = init(shape, key, kind)
    router = jax.random.normal(jax.random.fold_in(key, 1), (shape.n_layers, shape.dim, WORKERS))
    return params | {"blocks": params["blocks"] | {"router": 0.02 * router}}


def by_expert(tree: Tree) -> Tree:
    """Blocks with an axis of experts in the place of all their hidden units."""

    def apart(x: Array, axis: int) -> Array:
        return x.reshape(*x.shape[:axis], WORKERS, -1, *x.shape[axis + 1 :])

    return tree | {name: apart(tree[name], axis) for name, axis in SPLIT.items()}


def make_trainer(shape: Shape, exchange: Any, steps: int) -> Any:
    """The program that trains one model for every seed; its arguments are those of `arguments`."""
    optimizer = make_optimizer("adamw", steps)
    axes = dict.fromkeys(("embed", "head", "norm"))
    names = ("q", "k", "v", "o", "attention_norm", "mlp_norm", "router", "number")
    axes["blocks"] = dict.fromkeys(names) | SPLIT

    def whole_loss(params: Tree, tokens: Array, key: Array, exchange: Any, balance: float):
        return loss(shape, params, tokens, partial(experts, exchange, key, balance))

    def numbered(params: Tree) -> Tree:
        number = jnp.arange(shape.n_layers)
        return params | {"blocks": by_expert(params["blocks"]) | {"number": number}}

    def worker(params: Tree, tokens: Array, key: Array) -> tuple[Array, Tree]:
        number = params["blocks"].pop("number")

        def own_loss(params):
            blocks = params["blocks"] | {"number": number}
            return whole_loss(params | {"blocks": blocks}, tokens, key, exchange, BALANCE)

        value, grads = jax.value_and_grad(own_loss)(params)
        local = {name: grads["blocks"][name] / WORKERS for name in SPLIT}
        grads = lax.pmean(grads, AXIS)
        return lax.pmean(value, AXIS), grads | {"blocks": grads["blocks"] | local}

    out_axes = axes | {"blocks": {k: v for k, v in axes["blocks"].items() if k != "number"}}
    workers = jax.vmap(worker, (axes, 0, None), (None, out_axes), axis_name=AXIS)

    def validate(params: Tree, tokens: Array) -> Array:
        own = partial(whole_loss, key=jax.random.key(0), exchange=exchanger("f32"), balance=0.0)
        return jnp.mean(jax.vmap(own, (axes, 0), axis_name=AXIS)(numbered(params), tokens))

    def train(kind, peak, seed, starts, text, windows) -> dict[str, Array]:
        start_key, key = jax.random.split(jax.random.key(seed))

        def step(carry, now):
            params, state = carry
            number, own = now
            tokens = text[own[:, None] + jnp.arange(shape.seq_len + 1)[None]]
            tokens = tokens.reshape(WORKERS, -1, shape.seq_len + 1)
            value, grads = workers(numbered(params), tokens, jax.random.fold_in(key, number))
            grads = jax.tree.map(lambda g, p: g.reshape(p.shape), grads, params)
            updates, state = optimizer.update(grads, state, params)
            return (jax.tree.map(lambda p, u: p + peak * u, params, updates), state), value

        params = start(shape, start_key, kind)
        carry = params, optimizer.init(params)
        (params, _), losses = lax.scan(step, carry, (jnp.arange(steps), starts))
        rows = windows.reshape(-1, WORKERS, shape.sequences, shape.seq_len + 1)
        validation = jnp.mean(lax.map(partial(validate, params), rows))
        return {"losses": losses, "validation": validation}

    return jax.jit(jax.vmap(train, (None, None, 0, 0, None, None)))


def main(
    model: Annotated[str, typer.Option(help=f"{' or '.join(SHAPES)}")] = "tiny",
    rows: Annotated[str, typer.Option(help="f32, bf16, and FORWARD/BACKWARD bits")] = ",".join(
        ROWS
    ),
    seeds: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int | None, typer.Option(min=2, help="default: the model's")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="rows are added to it")] = None,
) -> None:
    """Trains models of experts with compressed all-to-alls and compares validation losses."""
    shape, device = SHAPES[model], jax.devices()[0]
    MODELS[model] = shape
    task, kind = load_task(model, WORKERS, steps), "gpt2"
    at_once = 1 if device.platform == "cpu" else shape.seeds_at_once
    chosen = ["bf16", *(row for row in rows.split(",") if row != "bf16")]

    def compiled(row: str) -> Any:
        own = arguments(task, kind, 0.0, batches_of_seeds(seeds, at_once)[0])
        return make_trainer(shape, exchanger(row), task.steps).lower(*own).compile()

    programs = ahead([partial(compiled, row) for row in chosen], 1 if at_once == 1 else 6)
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    where = {"command": shlex.join(sys.argv), "device": device.device_kind, "versions": packages}
    reference, found = None, []
    for row, program in zip(chosen, programs, strict=True):
        run, begin = program.result(), time.perf_counter()
        result = run_seeds(run, task, kind, RATES[model], seeds, at_once)["validation"].tolist()
        reference = reference or result
        settings = {"model": model, "row": row, "steps": task.steps, "seeds": seeds}
        found.append(settings | where | {"validation": result, **difference(result, reference)})
        percent, error = (found[-1][name] or 0.0 for name in ("percent", "error"))
        took = f"{time.perf_counter() - begin:.1f} s"
        print(f"{model} {row:5} {sum(result) / seeds:.4f} {percent:+.3f} +- {error:.3f} % {took}")
        if json_file:
            kept = json.loads(json_file.read_text())["rows"] if json_file.exists() else []
            kept = [old for old in kept if any(old[k] != v for k, v in settings.items())]
            lines = ",\n".join(map(json.dumps, [*kept, found[-1]]))
            json_file.write_text(f'{{"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    typer.run(main)
