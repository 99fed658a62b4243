r"""Accuracy of fine-tuning with a quantised all-reduce, from a model that is pretrained here.

    python benchmarks/evidence/finetuned.py --model micro --seeds 8

Every seed pretrains one LLaMA-style model of `training.MODELS` on the example's text by next
tokens, with exact gradients in f32. All methods then start from it. They fine-tune all parameters,
with a new linear head, to tell of a chunk of text which of `KINDS` it is. The texts are files of
installed packages. Every fifth *file* is held out, so no held-out text was seen in training.

As in `training.py` one device simulates 8 workers, and methods have the same names. Batches and key
of the rounding depend on (seed, step) alone. So each row is compared seed by seed with the exact
mean in f32, which always runs, and with bf16 psum, if that is among the methods.
"""

import ast
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from classifier import make_row
from jax import Array, lax
from llm_data import Corpus, encode, load_corpus, train_batch
from llm_model import Config, init_params, make_forward
from training import (
    EIGHT,
    LEARNING_RATES,
    MODELS,
    Methods,
    Recipe,
    Way,
    contenders,
    invocation,
    make_loss,
    make_optimizer,
    make_ways,
)

Tree = Any

KINDS = ("code", "docstrings", "stubs", "READMEs")
"""The classes: both parts of the ``.py`` files of `PACKAGES`, their ``.pyi`` files, and the
descriptions of all other installed distributions."""
PACKAGES = ("numpy", "scipy", "jax", "jaxlib", "flax", "optax", "matplotlib", "rich")
"""Packages that the examples need, by the names under which they are imported and installed."""
SKIPPED = {"test", "tests", "testing", "__pycache__"}
"""Folders whose files are left out."""
CHUNK = 64
"""Tokens of a chunk."""
MAX_BYTES = 4 * 2**20
"""The most bytes of a class."""
HELD_OUT = 5
"""One file of so many is held out."""
HELD_CHUNKS = 1024
"""Held-out chunks of a class."""
AT_ONCE = 256
"""Held-out chunks that are classified together."""


class Texts(NamedTuple):
    """Tokens i32[t] of all files of each class: to train on, and held out."""

    train: tuple[np.ndarray, ...]
    held: tuple[np.ndarray, ...]

    @property
    def digest(self) -> str:
        """A hash of all tokens, since other versions of packages have other files."""
        value = 0
        for own in (*self.train, *self.held):
            value = zlib.crc32(own.tobytes(), value)
        return f"{value:08x}"

    def batches(self, seed: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Random chunks i32[*shape, `CHUNK`] of training text, and their classes i32[*shape]."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, len(self.train), shape).astype(np.int32)
        drawn = rng.random(shape)
        chunks = np.empty((*shape, CHUNK), np.int32)
        for number, own in enumerate(self.train):
            where = labels == number
            starts = (drawn[where] * (len(own) - CHUNK)).astype(np.int64)
            chunks[where] = own[starts[:, None] + np.arange(CHUNK)]
        return chunks, labels

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Chunks i32[m, `CHUNK`], spread evenly over held-out text, and their classes i32[m]."""
        chunks = []
        for own in self.held:
            starts = np.linspace(0, len(own) - CHUNK, HELD_CHUNKS).astype(np.int64)
            chunks.append(own[starts[:, None] + np.arange(CHUNK)])
        labels = np.repeat(np.arange(len(self.held), dtype=np.int32), HELD_CHUNKS)
        return np.concatenate(chunks), labels


def order(name: str) -> int:
    """A stable hash of a file's name."""
    return zlib.crc32(name.encode())


def separated(source: str) -> tuple[str, str]:
    """A Python file's lines without those of its docstrings, and the docstrings."""
    lines, docstrings = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                docstrings.append(text)
                first, last = node.body[0].lineno, node.body[0].end_lineno or 0
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join(lines), "\n\n".join(docstrings)


def files(suffix: str) -> dict[str, str]:
    """The texts of the files of `PACKAGES` whose names end so, by name.

    Raises:
      ModuleNotFoundError: one of `PACKAGES` is not installed.
    """
    found = {}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"{package} is not installed: pip install '.[train]' scipy")
        for root in map(Path, spec.submodule_search_locations):
            for path in root.rglob(f"*{suffix}"):
                name = path.relative_to(root)
                if not SKIPPED.intersection(name.parts):
                    found[f"{package}/{name.as_posix()}"] = path.read_text("utf-8")
    return found


def read() -> tuple[dict[str, str], ...]:
    """The texts of all `KINDS` by the names of their files."""
    python = {name: separated(text) for name, text in files(".py").items()}
    code, docstrings = ({name: own[i] for name, own in python.items()} for i in range(2))
    told = {own.name: own.read_text("METADATA") or "" for own in distributions()}
    readmes = {name: text.partition("\n\n")[2] for name, text in told.items()}
    readmes.pop("dynamiq_jax", None)  # changes with every commit
    return code, docstrings, files(".pyi"), readmes


def split(texts: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Whole files in the order of their hashes, to train on and held out, up to `MAX_BYTES`."""
    halves: tuple[list[bytes], list[bytes]] = [], []
    total = 0
    for name in sorted(texts, key=order):
        text = texts[name].encode()
        total += len(text) + 1
        if total > MAX_BYTES:
            break
        halves[order(name) % HELD_OUT == 0].append(text)
    train, held = (b"\0".join(half) for half in halves)
    return train, held


@cache
def load(vocab_size: int) -> Texts:
    """All kinds in the tokens of the example's text with that many ids."""
    vocabulary = load_corpus(vocab_size).vocabulary
    halves = zip(*map(split, read()), strict=True)
    return Texts(*(tuple(encode(own, vocabulary) for own in half) for half in halves))


# --- Training -------------------------------------------------------------------------------------


def pretrain(config: Config, recipe: Recipe, corpus: Corpus, seed: int) -> Tree:
    """Parameters after next-token training by exact gradients; the batch is that of all workers."""
    told = {"rows": EIGHT.number * recipe.batch_size, "length": config.seq_len + 1, "seed": seed}
    tokens = np.stack([train_batch(corpus, step, **told) for step in range(recipe.steps)])
    return _pretrain(config, recipe, np.int32(seed), tokens)


@partial(jax.jit, static_argnums=(0, 1))
def _pretrain(config: Config, recipe: Recipe, seed: Array, tokens: Array) -> Tree:
    loss, optimizer = make_loss(config), make_optimizer(recipe)

    def step(carry: tuple[Tree, Any], batch: Array) -> tuple[tuple[Tree, Any], None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = init_params(config, jax.random.key(seed))
    return lax.scan(step, (params, optimizer.init(params)), tokens)[0][0]


def with_classes(params: Tree, key: Array) -> Tree:
    """The model's parameters with a new head, f32[dim, classes], in the place of the tokens'."""

    def of_leaf(path: tuple, leaf: Array) -> Array:
        if not any(getattr(entry, "key", None) == "head" for entry in path):
            return leaf
        shape = leaf.shape[0], len(KINDS)
        return 0.25 * leaf.shape[0] ** -0.5 * jax.random.normal(key, shape)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def make_scores(config: Config) -> Callable[[Tree, Array], Array]:
    """Returns the function from chunks i32[m, `CHUNK`] to logits f32[m, classes].

    They are means over the positions of a chunk.
    """
    forward = make_forward(config)
    return lambda params, chunks: jnp.mean(forward(params, chunks).astype(jnp.float32), axis=1)


def make_trainer(config: Config, way: Way, recipe: Recipe) -> Callable[..., tuple[Array, Array]]:
    """Returns the program that fine-tunes one model.

    From pretrained parameters, a seed i32[], batches [steps, workers, ...] and held-out chunks (see
    `Texts`) it computes the loss of held-out chunks, and the share that is classified right.
    """
    scores = make_scores(config)

    def loss(params: Tree, chunks: Array, labels: Array) -> Array:
        found = optax.softmax_cross_entropy_with_integer_labels(scores(params, chunks), labels)
        return jnp.mean(found)

    def train(pretrained: Tree, seed: Array, batches: Tree, held: Tree) -> tuple[Array, Array]:
        head_key, key = jax.random.split(jax.random.key(seed))

        def step(carry: tuple[Tree, Any], now: tuple[Array, Tree]) -> tuple[tuple[Tree, Any], None]:
            (params, state), (number, (chunks, labels)) = carry, now
            step_key = jax.random.fold_in(key, number)
            used = way.used(params, jax.random.fold_in(step_key, 1))
            grads = jax.vmap(partial(jax.grad(loss), used))(chunks, labels)
            return way.update(grads, state, params, step_key), None

        params = with_classes(pretrained, head_key)
        numbered = jnp.arange(recipe.steps), batches
        (params, _), _ = lax.scan(step, (params, way.init(params)), numbered)
        used, (chunks, labels) = way.used(params, key), held
        found = lax.map(partial(scores, used), chunks.reshape(-1, AT_ONCE, CHUNK))
        found = found.reshape(-1, found.shape[-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(found, labels)
        return jnp.mean(losses), jnp.mean(jnp.argmax(found, axis=1) == labels)

    return jax.jit(train)


class Start(NamedTuple):
    """A seed's pretrained parameters and its batches."""

    params: Tree
    batches: tuple[np.ndarray, np.ndarray]


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "micro",
    methods: Methods = "bf16-psum,dynamiq:5,dynamiq:5/dynamiq-dither:2.5,mxfp8,mxfp4,thc",
    topology: Annotated[str, typer.Option(help="direct, ring or butterfly")] = "direct",
    seeds: Annotated[int, typer.Option(min=2, help="training runs of every row")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="of fine-tuning")] = 200,
    pretraining: Annotated[
        int | None, typer.Option(min=2, help="steps before (default: the model's)")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="chunks of a worker")] = 4,
    rate: Annotated[
        float, typer.Option("--learning-rate", min=0, help="peak, of fine-tuning")
    ] = 2e-3,
    file: Annotated[Path, typer.Option("--json", help="the run is added here")] = Path(
        "runs/finetuned.json"
    ),
) -> None:
    """Fine-tunes a pretrained model with compressed gradients, and compares its accuracy."""
    if model not in MODELS:
        raise typer.BadParameter(f"--model {model!r}: pass one of {', '.join(MODELS)}")
    config = replace(MODELS[model].config, init="unit")
    first = MODELS[model].recipe
    usual = LEARNING_RATES.get((model, "unit"), first.learning_rate)
    first = first._replace(steps=pretraining or first.steps, learning_rate=usual)
    recipe = Recipe(steps=steps, batch_size=batch, learning_rate=rate, validation_batches=0)
    try:
        ways = make_ways(contenders.parts(methods), [topology], recipe)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--methods, --topology") from error
    corpus, texts = load_corpus(config.vocab_size), load(config.vocab_size)
    shape, held = (steps, EIGHT.number, batch), texts.held_out()
    starts = [
        Start(pretrain(config, first, corpus, seed), texts.batches(seed, shape))
        for seed in range(seeds)
    ]
    kept = json.loads(file.read_text()) if file.exists() else {"runs": []}
    settings = {
        "model": model, "parameters": sum(x.size for x in jax.tree.leaves(starts[0].params)),
        "pretraining": first.steps, "steps": steps, "seeds": seeds, "workers": EIGHT.number,
        "batch": EIGHT.number * batch, "learning_rate": rate, "held_out": len(held[1]),
        "text": texts.digest,
        "packages": {name: version(name) for name in PACKAGES},
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    kept["runs"].append({"invocation": invocation(), "settings": settings, "rows": rows})
    file.parent.mkdir(parents=True, exist_ok=True)
    example = jax.eval_shape(with_classes, starts[0].params, jax.random.key(0))
    for way in ways:
        trainer = make_trainer(config, way, recipe)

        def train(seed: int, trainer: Callable[..., tuple[Array, Array]] = trainer) -> Any:
            return trainer(starts[seed].params, np.int32(seed), starts[seed].batches, held)

        rows.append(make_row(way, example, train, seeds, {own["method"]: own for own in rows}))
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
