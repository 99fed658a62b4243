r"""Accuracy of a classifier trained with a quantised all-reduce, with paired seeds.

    pip install scikit-learn
    python benchmarks/evidence/classifier.py --methods bf16-psum,dynamiq:5,mxfp8 --seeds 8

A vision transformer learns scikit-learn's digits: 1,797 images of 8 x 8 pixels, of which every
fifth is held out. As in `training.py` one device simulates the workers, methods have the same
names, and start, batches and key of the rounding depend on (seed, step) alone. So each row is
compared seed by seed with the exact mean in f32, which always runs.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import Array, lax
from training import (
    BF16,
    EIGHT,
    EXACT,
    Methods,
    Recipe,
    Way,
    contenders,
    invocation,
    make_ways,
    of_reference,
)

Tree = Any
Rows = Mapping[str, Any]

N_WORKERS = EIGHT.number
CLASSES, SIDE, PATCH = 10, 8, 2
WIDTH, HEADS, BLOCKS = 64, 4, 2
HELD_OUT = 5
"""One image of so many is held out."""


class Digits(NamedTuple):
    """Images f32[m, 8, 8] from 0 to 1, and their digits i32[m]: to train on, and held out."""

    images: Array
    labels: Array
    held_images: Array
    held_labels: Array


def load() -> Digits:
    """Scikit-learn's digits, in an order of their own."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] / 16).astype(np.float32)
    labels = found.target[order].astype(np.int32)
    held = np.arange(len(order)) % HELD_OUT == 0
    return Digits(*map(jnp.asarray, (images[~held], labels[~held], images[held], labels[held])))


# --- The model ------------------------------------------------------------------------------------


def init_params(key: Array) -> Tree:
    """Parameters f32: matrices of deviation ``fan_in**-0.5``, scales of one."""
    keys = iter(jax.random.split(key, 3 + 4 * BLOCKS))
    normal = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5
    block = lambda: {
        "in": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH),
        "up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH),
        "scales": jnp.ones((2, WIDTH)),
    }  # fmt: skip
    return {
        "patches": normal(PATCH**2, WIDTH),
        "places": 0.1 * normal((SIDE // PATCH) ** 2, WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "head": normal(WIDTH, CLASSES),
    }


def logits(params: Tree, images: Array) -> Array:
    """f32[m, 10] of images f32[m, 8, 8]."""
    count = SIDE // PATCH
    x = images.reshape(-1, count, PATCH, count, PATCH)
    x = x.transpose(0, 1, 3, 2, 4).reshape(-1, count**2, PATCH**2)  # [m, patches, pixels]
    x = x @ params["patches"] + params["places"]
    normed = lambda x, scale: scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    for block in params["blocks"]:
        joined = normed(x, block["scales"][0]) @ block["in"]
        q, k, v = jnp.split(joined.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normed(x, block["scales"][1]) @ block["up"]) @ block["down"]
    return jnp.mean(x, axis=1) @ params["head"]


def loss(params: Tree, images: Array, labels: Array) -> Array:
    """The mean cross-entropy in nats."""
    chosen = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.take_along_axis(chosen, labels[:, None], axis=1))


# --- Training -------------------------------------------------------------------------------------


def make_trainer(data: Digits, way: Way, recipe: Recipe) -> Callable[[Array], tuple[Array, Array]]:
    """From a seed i32[] to the loss of held-out images, and the share that is classified right."""

    def train(seed: Array) -> tuple[Array, Array]:
        start_key, key, batches = jax.random.split(jax.random.key(seed), 3)

        def step(carry: tuple[Tree, Any], number: Array) -> tuple[tuple[Tree, Any], None]:
            params, state = carry
            drawn = jax.random.fold_in(batches, number)
            own = jax.random.randint(drawn, (N_WORKERS, recipe.batch_size), 0, len(data.labels))
            step_key = jax.random.fold_in(key, number)
            used = way.used(params, jax.random.fold_in(step_key, 1))
            gradient = partial(jax.grad(loss), used)
            grads = jax.vmap(gradient)(data.images[own], data.labels[own])
            return way.update(grads, state, params, step_key), None

        params = init_params(start_key)
        (params, _), _ = lax.scan(step, (params, way.init(params)), jnp.arange(recipe.steps))
        used = way.used(params, key)
        right = jnp.argmax(logits(used, data.held_images), axis=1) == data.held_labels
        return loss(used, data.held_images, data.held_labels), jnp.mean(right)

    return jax.jit(train)


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean and its standard error."""
    return {
        "mean": float(np.mean(values)),
        "error": float(np.std(values, ddof=1)) / math.sqrt(len(values)),
    }


def make_row(
    way: Way, example: Tree, train: Callable[[int], tuple[Array, Array]], seeds: int, earlier: Rows
) -> dict[str, Any]:
    """Figures of all seeds, and the differences of accuracies to the exact mean's, in points.

    Args:
      way: to train.
      example: of one worker's gradients.
      train: from a seed to the loss of held-out examples, and the share that is classified right.
      seeds: how many.
      earlier: rows by method; without one of the exact mean, this row is it.
    """
    start = time.perf_counter()
    losses, shares = zip(*(map(float, train(seed)) for seed in range(seeds)), strict=True)
    accuracy = [100 * share for share in shares]
    known = {EXACT: {"accuracy": accuracy}, way.method: {"accuracy": accuracy}, **earlier}
    apart = np.subtract(accuracy, known[EXACT]["accuracy"]).tolist()
    bits = way.bits_per_coord(example)
    told = {"accuracy": summary(accuracy), "difference": summary(apart)}
    shown = [f"{own['mean']:+.2f} ± {own['error']:.2f}" for own in told.values()]
    line = f"{way.method:32} {bits:5.2f} bits  {shown[0]} %  {shown[1]} points"
    if BF16 in known:
        ratio = told["of_bf16"] = of_reference(accuracy, known[BF16]["accuracy"])
        line += f"  {ratio['percent']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) % of bf16"
    print(f"{line}  ({time.perf_counter() - start:.0f} s)", flush=True)
    found = {"method": way.method, "topology": way.topology, "bits_per_coord": bits}
    return found | {"losses": losses, "accuracy": accuracy, "summary": told}


def row(data: Digits, way: Way, recipe: Recipe, seeds: int, earlier: Rows) -> dict[str, Any]:
    """A row of the digits."""
    example = jax.eval_shape(init_params, jax.random.key(0))
    train = make_trainer(data, way, recipe)
    return make_row(way, example, lambda seed: train(np.int32(seed)), seeds, earlier)


def main(
    methods: Methods = "bf16-psum,dynamiq:5,dynamiq:5/dynamiq-dither:2.5,mxfp8,mxfp4,thc",
    topology: Annotated[str, typer.Option(help="direct, ring or butterfly")] = "direct",
    seeds: Annotated[int, typer.Option(min=2, help="training runs of every row")] = 8,
    steps: Annotated[int, typer.Option(min=2)] = 300,
    file: Annotated[Path, typer.Option("--json")] = Path("runs/classifier.json"),
) -> None:
    """Trains a classifier with compressed gradients, and compares its accuracy."""
    recipe = Recipe(steps=steps, batch_size=8, learning_rate=2e-3, validation_batches=0)
    data, rows = load(), []
    for way in make_ways(contenders.parts(methods), [topology], recipe):
        rows.append(row(data, way, recipe, seeds, {own["method"]: own for own in rows}))
        file.parent.mkdir(parents=True, exist_ok=True)
        settings = {
            "steps": steps,
            "seeds": seeds,
            "workers": N_WORKERS,
            "rows": N_WORKERS * recipe.batch_size,
        }
        record = {"invocation": invocation(), "settings": settings, "rows": rows}
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
