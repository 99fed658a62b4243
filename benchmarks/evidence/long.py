r"""Losses of long training with a compressed mean of gradients, in parts that go on.

    python benchmarks/evidence/long.py gather text.xz --roots /usr,/opt
    python benchmarks/evidence/long.py train --text text.xz --method dynamiq:5 --seconds 560 \
        --json dynamiq-5.json --checkpoint /tmp/dynamiq-5.npz

``gather`` makes tokens of the text that a machine has. ``train`` trains one model with eight
workers, which one device simulates: start and batches depend on the seed alone, so that runs of all
methods are paired. After ``--seconds`` it keeps a checkpoint and ends. The same command then goes
on; with another ``--workers`` it gives every worker another share of the same batches.

Methods are those of `training.py` and

* ``bf16``: a sum in bf16 over the workers in order, rounded after every addition;
* ``bf16-reversed``: the same sum in reverse order. The difference of both losses is noise;
* ``dynamiq:5/dynamiq-dither:2.5``: `dq.optax.sharded`, each worker with slices;
* ``dynamiq:5/dynamiq:8/whole``: FSDP, which gathers parameters at 8 bits in every step.

``error`` in the file has the sum of all errors so far of a mean that all workers share: its square
``sum``, the squares of the single errors, ``squares``, the square of the sum of exact means,
``exact``, and the product of both sums, ``inner``. Errors that are independent and of mean zero
have ``sum`` equal to ``squares``.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import training as base
import typer
from jax import Array, lax
from llm_data import Corpus, byte_pairs, load_corpus  # pyright: ignore[reportMissingImports]
from training import AXIS, Tree

import dynamiq_jax as dq

app = typer.Typer(add_completion=False)

# --- Text -----------------------------------------------------------------------------------------

ENDINGS = re.compile(r".*(\.(py|pyi|md|rst|txt)|/share/doc/.*|/share/man/man.*)")
PARAGRAPH = 100
"""Bytes from which a paragraph is kept once only."""
HELD_OUT_PERCENT = 2
LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
"""For numbers of two bytes."""
WINDOWS = 128
"""Sequences of the validation."""


def found_texts(roots: list[Path]) -> Iterator[tuple[bytes, bytes]]:
    """(hash, text) of every text file below the folders, in the order of their hashes, once."""
    texts = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            for path in (Path(folder, name) for name in names):
                if ENDINGS.fullmatch(str(path)) and path.is_file() and not path.is_symlink():
                    try:
                        text = path.read_bytes()
                        text = gzip.decompress(text) if path.suffix == ".gz" else text
                        text.decode()
                    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
                        continue
                    if b"\0" not in text:
                        digest = hashlib.blake2b(text, digest_size=8).digest()
                        texts.setdefault(digest, text)
    yield from sorted(texts.items())


@app.command()
def gather(
    file: Annotated[Path, typer.Argument(help="for the tokens")],
    roots: Annotated[str, typer.Option(help="folders with text, by commas")] = "/usr",
    megabytes: Annotated[int, typer.Option(min=1, help="of text; more is left out")] = 200,
    vocab_size: Annotated[int, typer.Option(min=257, max=2**16)] = 24576,
) -> None:
    """Keeps tokens of the text in Python packages and documentation.

    Files and paragraphs appear once. The hash of a file says whether it is held out.
    """
    seen, kept, total = set(), ([], []), 0
    for digest, text in found_texts([Path(root) for root in roots.split(",")]):
        fresh = []
        for paragraph in text.split(b"\n\n"):
            own = hashlib.blake2b(paragraph, digest_size=8).digest()
            if len(paragraph) < PARAGRAPH or own not in seen:
                seen.add(own)
                fresh.append(paragraph)
        text = b"\n\n".join(fresh) + b"\0"
        if len(text) > PARAGRAPH:
            kept[int.from_bytes(digest) % 100 < HELD_OUT_PERCENT].append(text)
            total += len(text)
        if total > megabytes * 1e6:
            break
    train, validation = (
        ids.astype(np.uint16) for ids in byte_pairs(*map(b"".join, kept), vocab_size)
    )
    packed = io.BytesIO()
    np.savez(packed, train=train, validation=validation, vocab_size=vocab_size)
    file.write_bytes(lzma.compress(packed.getvalue(), filters=LZMA))
    files = sum(map(len, kept))
    print(
        f"{files} files, {total / 1e6:.1f} MB, {train.size} tokens and {validation.size} held out"
    )


def read_text(file: Path | None, vocab_size: int) -> Corpus:
    """The text that `gather` kept, or without a file that of `load_corpus`.

    Raises:
      ValueError: the text has more tokens than the model.
    """
    if file is None:
        return load_corpus(vocab_size)
    with np.load(io.BytesIO(lzma.decompress(file.read_bytes()))) as kept:
        if kept["vocab_size"] > vocab_size:
            raise ValueError(
                f"{file} has {kept['vocab_size']} ids, the model {vocab_size}: gather again"
            )
        train, validation = (kept[name].astype(np.int32) for name in ("train", "validation"))
    return Corpus(train, validation, vocab_size, 0)


# --- Means ----------------------------------------------------------------------------------------


def bf16_sum(reverse: bool, steps: int) -> base.Way:
    """The mean by a sum in bf16 over the workers in order, or in reverse order."""

    def add(left: Array, right: Array) -> Array:
        return lax.reduce_precision(left + right, 8, 7)  # which XLA leaves out at no level

    def mean(g: Array) -> Array:
        every = lax.all_gather(lax.reduce_precision(g, 8, 7), AXIS)
        return reduce(add, every[::-1] if reverse else every) / lax.axis_size(AXIS)

    def average(grads: Tree, key: Array, state: Any) -> tuple[Tree, Any]:
        return jax.tree.map(mean, grads), state

    name = "bf16-reversed" if reverse else "bf16"
    return base.Way(name, "native", "", lambda g, n: 16.0, **base.replicated(average, steps))


def parse_way(text: str, steps: int, backend: str) -> base.Way:
    """The way to train with a method of this name.

    Raises:
      ValueError: the method is not known.
    """
    if text in ("bf16", "bf16-reversed"):
        return bf16_sum(text == "bf16-reversed", steps)
    return base.parse_ways([text], ["direct"], backend, steps)[-1]


# --- State ----------------------------------------------------------------------------------------


def along(state: dq.optax.ShardedState) -> list[int | None]:
    """The dimension along which every leaf of a sharded state is split, in that of one worker."""
    return [
        next((i for i, names in enumerate(spec) if names is not None), None)
        for spec in jax.tree.leaves(state.specs(), is_leaf=lambda x: isinstance(x, jax.P))
    ]


def moved(leaves: list[np.ndarray], state: Any, workers: int) -> Iterator[np.ndarray]:
    """A sharded state's whole leaves, as checkpoints have them, in slices of each worker."""
    for x, dimension in zip(leaves, along(state), strict=True):
        if dimension is None:
            yield np.stack([x] * workers)
        else:
            yield np.stack(np.split(x, workers, dimension))


def whole(state: Any) -> Iterator[np.ndarray]:
    """The leaves of a sharded state without an axis of workers."""
    for x, dimension in zip(jax.tree.leaves(state), along(state), strict=True):
        x = np.asarray(x)
        yield x[0] if dimension is None else np.concatenate(x, dimension)


class Errors(NamedTuple):
    """Sums over the steps so far."""

    errors: Tree
    exact: Tree
    squares: Array
    """The sum over all errors, f32[]."""


def summed(errors: Errors) -> dict[str, Array]:
    """The figures that the file has, from `Errors`."""

    def product(left: Tree, right: Tree) -> Array:
        pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        return jnp.sum(jnp.stack([jnp.sum(x * y) for x, y in pairs]))

    found, exact, squares = errors
    return {
        "sum": product(found, found), "squares": squares, "exact": product(exact, exact),
        "inner": product(found, exact),
    }  # fmt: skip


def save(file: Path, carry: tuple[Tree, Any, Any], record: dict[str, Any]) -> None:
    """Keeps parameters, state and errors, whole whatever the number of workers, and the record."""
    params, state, errors = carry
    inner = whole(state) if isinstance(state, dq.optax.ShardedState) else jax.tree.leaves(state)
    leaves = [*jax.tree.leaves(params), *inner, *jax.tree.leaves(errors)]
    draft = file.with_name(file.name + ".part.npz")
    text = np.frombuffer(json.dumps(record).encode(), np.uint8)
    np.savez(draft, **{f"{i}": np.asarray(x) for i, x in enumerate(leaves)}, record=text)
    os.replace(draft, file)


def load(file: Path, like: tuple[Tree, Any, Any], workers: int) -> tuple[Any, dict[str, Any]]:
    """Reads a file of `save` for so many workers: a tree like ``like``, and the record."""
    with np.load(file) as kept:
        record = json.loads(kept["record"].tobytes())
        leaves = [kept[f"{i}"] for i in range(len(kept) - 1)]
    params, state, _ = like
    start = len(jax.tree.leaves(params))
    end = start + len(jax.tree.leaves(state))
    if isinstance(state, dq.optax.ShardedState):
        leaves[start:end] = moved(leaves[start:end], state, workers)
    return jax.tree.unflatten(jax.tree.structure(like), leaves), record


# --- Training -------------------------------------------------------------------------------------


def make_parts(
    task: base.Task, way: base.Way, kind: str, peak: float, seed: int
) -> tuple[Callable, Callable]:
    """Returns ``init() -> carry`` and ``run(carry, number, starts, text, windows)``.

    ``run`` trains one step for each row of ``starts``, i32[steps, sequences], from step ``number``
    on. It returns the carry, losses f32[steps], the validation loss and the figures of errors.
    """
    start_key, key = jax.random.split(jax.random.key(seed))
    one_step = base.make_step(task.shape, way, task.n_workers)

    def init() -> tuple[Tree, Any, Any]:
        params = base.init(task.shape, start_key, jnp.int32(base.INITS.index(kind)))
        state = way.init(params, task.n_workers)
        if isinstance(state, dq.optax.ShardedState):
            return params, state, ()
        zeros, again = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return params, state, Errors(zeros, again, jnp.zeros(()))

    def step(text: Array, carry: tuple[Tree, Any, Any], now: Any) -> tuple[Any, Array]:
        params, state, errors = carry
        number, starts = now
        step_key = jax.random.fold_in(key, number)
        params, state, loss, exact, found = one_step(params, state, step_key, peak, text, starts)
        if errors:
            error = jax.tree.map(jnp.subtract, found, exact)
            squares = sum((jnp.sum(e * e) for e in jax.tree.leaves(error)), errors.squares)
            sums = jax.tree.map(jnp.add, (errors.errors, errors.exact), (error, exact))
            errors = Errors(*sums, squares)
        return (params, state, errors), loss

    def run(carry: Any, number: Array, starts: Array, text: Array, windows: Array) -> tuple:
        numbers = number + jnp.arange(starts.shape[0])
        carry, losses = lax.scan(partial(step, text), carry, (numbers, starts))
        params, _, errors = carry
        used = way.used(params, jax.random.fold_in(key, number), task.n_workers)
        validation = base.validation_loss(task.shape, used, windows)
        return carry, losses, validation, summed(errors) if errors else {}

    return jax.jit(init), jax.jit(run, donate_argnums=0)


@app.command()
def train(
    method: Annotated[
        str, typer.Option(help="bf16, bf16-reversed, dynamiq:5, mxfp8 and others")
    ] = "dynamiq:5",
    model: Annotated[str, typer.Option(help=f"one of {', '.join(base.MODELS)}")] = "125m",
    text: Annotated[Path | None, typer.Option(help="of gather; default: the library's")] = None,
    steps: Annotated[int, typer.Option(min=2, help="of the whole training")] = 2300,
    every: Annotated[int, typer.Option(min=1, help="steps between validations")] = 50,
    until: Annotated[int | None, typer.Option(help="ends after this step")] = None,
    seconds: Annotated[float, typer.Option(help="ends before a part that would pass them")] = 1e9,
    workers: Annotated[int, typer.Option(min=2, help="they share 64 sequences")] = 8,
    sequences: Annotated[int, typer.Option(min=1, help="of a step, for all workers")] = 64,
    learning_rate: Annotated[float | None, typer.Option(help="peak; default: RATES")] = None,
    seed: Annotated[int, typer.Option(help="of start, batches and rounding")] = 0,
    backend: Annotated[str, typer.Option(help="DynamiQ's kernels: jnp, triton")] = "jnp",
    attention: Annotated[str | None, typer.Option(help="xla or cudnn; default: by device")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="for the row")] = Path("runs/long.json"),
    checkpoint: Annotated[Path, typer.Option(help="it goes on from here")] = Path("runs/long.npz"),
) -> None:
    """Trains with one method, or goes on."""
    began = time.perf_counter()
    if steps % every or sequences % workers:
        raise typer.BadParameter(
            f"--steps {steps} must be a multiple of --every {every}, and --sequences {sequences} "
            f"of --workers {workers}"
        )
    on_gpu = jax.default_backend() == "gpu"
    shape = base.MODELS[model]._replace(sequences=sequences // workers)
    shape = shape._replace(attention=attention or ("cudnn" if on_gpu else "xla"), windows=WINDOWS)
    rate = base.learning_rate(model, "unit") if learning_rate is None else learning_rate
    try:
        task = base.make_task(model, shape, workers, steps, read_text(text, shape.vocab_size))
        way = parse_way(method, steps, backend)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = {
        "model": model, "init": "unit", "optimiser": "adamw", "learning_rate": rate,
        "steps": steps, "every": every, "sequences": sequences, "seed": seed,
        "text": task.digest, "train_tokens": int(task.text.size),
        "tokens": steps * sequences * shape.seq_len, **base.way_settings(way),
    }  # fmt: skip
    init, run = make_parts(task, way, "unit", rate, seed)
    record: dict[str, Any] = {"settings": settings, "losses": [], "parts": [], "invocations": []}
    if checkpoint.exists():
        carry, record = load(checkpoint, jax.eval_shape(init), workers)
        if record["settings"] != settings:
            old = {k: v for k, v in record["settings"].items() if settings.get(k) != v}
            raise typer.BadParameter(f"{checkpoint} has other settings: {old}; remove it")
        carry = jax.device_put(carry)
    else:
        carry = init()
    record["invocations"].append(base.environment() | {"workers": str(workers)})
    all_starts = base.window_starts(task, seed)
    number = len(record["losses"])
    fixed = task.text, jnp.asarray(task.windows)
    arguments = jnp.int32(number), jnp.asarray(all_starts[:every])
    program = run.lower(carry, *arguments, *fixed).compile()
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    longest = 0.0
    while number < min(steps, until or steps):
        start = time.perf_counter()
        if longest and start + 1.1 * longest - began > seconds:
            break
        starts = jnp.asarray(all_starts[number : number + every])
        carry, losses, *figures = program(carry, jnp.int32(number), starts, *fixed)
        losses, (validation, errors) = jax.device_get((losses, figures))
        longest = max(longest, took := time.perf_counter() - start)
        number += every
        record["losses"] += [round(float(x), 5) for x in losses]
        speed = every * sequences * shape.seq_len / took
        own = {name: float(x) for name, x in errors.items()}
        part = {"step": number, "validation": float(validation), "tokens_per_s": round(speed)}
        record["parts"].append(part | {"workers": workers} | ({"errors": own} if own else {}))
        print(f"{method} step {number}: loss {losses.mean():.4f}, validation {validation:.4f}, "
              f"{speed:.0f} tokens/s", flush=True)  # fmt: skip
    for file in (json_file, checkpoint):
        file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(record) + "\n")
    save(checkpoint, carry, record)


if __name__ == "__main__":
    app()
