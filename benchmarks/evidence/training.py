r"""Losses of training with a quantised all-reduce, with paired seeds.

    python benchmarks/evidence/training.py --methods bf16-psum,dynamiq:5,mxfp8 --seeds 2  # CPU

Trains small models of `examples/llm_model.py` (`MODELS`) by AdamW or Muon with workers that one
device simulates. Start, tokens and key of the rounding depend on (seed, step) alone, so that the
runs of all methods are paired: every row is compared seed by seed with the exact mean in f32, which
always runs. To compare numbers of workers, give them one batch, which is split evenly:

    for N in 8 16 64; do
        python benchmarks/evidence/training.py --workers $N --global-batch 64 --models mid \
            --topologies ring,butterfly,direct --methods bf16-psum,dynamiq:5,dynamiq:4 --seeds 2
    done

Rows have the validation loss, and *top-1*: the share of held-out positions whose next token has the
largest logit (the first of equal ones). If ``bf16-psum`` is among the methods, rows also have top-1
in % of that of bf16 psum.

Methods are those of ``dynamiq-jax error`` (``f32`` and ``bf16`` sum uncompressed over the
topology), those of `METHODS`, and

* ``bf16-psum``: `lax.pmean` of all gradients in bf16;
* ``dynamiq:5/dynamiq-dither:2.5``: `dq.optax.sharded`, which scatters gradients at 5 bits and
  gathers differences of parameters at 2.5;
* ``dynamiq:5/dynamiq:8/whole``: FSDP, which gathers the parameters themselves.

Every finished row is added to ``--json`` at once, and ``--resume`` trains the missing ones.

A GPU spends most of a row of ``mid`` on compiling. Rows and processes share a part of it if
``XLA_FLAGS`` has ``--xla_gpu_per_fusion_autotune_cache_dir``.
"""

import json
import math
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import Array, lax
from scipy.stats import t as student

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import contenders

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llm_data import Corpus, load_corpus, train_batch, validation_batches
from llm_model import CONFIGS, INITS, Config, init_params, make_forward, make_stages
from train_llm import (
    LEARNING_RATES,
    MAX_NORM,
    MIN_LEAF_SIZE,
    RECIPES,
    Recipe,
    environment,
    make_optimizer,
)

Tree = Any
Row = dict[str, Any]
Backend = Literal["jnp", "triton", "mosaic"]
Optimiser = Literal["adamw", "optax.contrib.muon"]

CURVE_WINDOW = 25
"""Steps that a point of the kept training curve averages."""
VALIDATION_ROWS = 8
"""Sequences of a validation batch."""


class Workers(NamedTuple):
    """The workers that one device simulates."""

    number: int = 8
    backend: Backend = "jnp"
    """The backend of the kernels of DynamiQ and of MX floats."""


EIGHT = Workers()


class Model(NamedTuple):
    """A model, and how it is trained by default."""

    config: Config
    recipe: Recipe
    """Its batch size is that of a worker."""
    seeds_at_once: int
    """That a GPU trains in one program, with 8 workers each."""
    workers_at_once: int | None = None
    """Whose gradients are computed together; `None`: all."""


MODELS = {
    "micro": Model(  # 0.1 M parameters: for tests
        replace(CONFIGS["tiny"], seq_len=16, dim=64, n_heads=2, n_kv_heads=2, hidden=128),
        Recipe(steps=20, batch_size=2, learning_rate=1e-3, validation_batches=8),
        seeds_at_once=8,
    ),
    "tiny": Model(
        CONFIGS["tiny"], RECIPES["tiny"]._replace(validation_batches=64), seeds_at_once=32
    ),
    "mid": Model(  # 17 M parameters
        replace(
            CONFIGS["125m"], vocab_size=4096, seq_len=256, n_layers=8, dim=384, n_heads=6,
            n_kv_heads=6, hidden=1024,
        ),
        Recipe(steps=400, batch_size=4, learning_rate=1e-3, validation_batches=32),
        seeds_at_once=8,
    ),
    "125m": Model(
        CONFIGS["125m"],
        Recipe(steps=200, batch_size=2, learning_rate=6e-4, validation_batches=8),
        seeds_at_once=1,
        workers_at_once=1,
    ),
}  # fmt: skip


def make_loss(config: Config) -> Callable[[Tree, Array], Array]:
    """The example's loss, which looks the embedding up in f32.

    So gradients of rows that a batch uses often are summed in f32, too.
    """
    stages = make_stages(config)

    def embed(params: Tree, tokens: Array) -> tuple[Array, Array]:
        (table,) = jax.tree.leaves(params)
        return table[tokens[:, :-1]].astype(config.dtype), tokens[:, 1:]

    stages = stages._replace(functions=(embed, *stages.functions[1:]))
    return lambda params, tokens: stages.loss(stages.split(params), tokens)


# --- Methods --------------------------------------------------------------------------------------

AXIS = "data"
EXACT, BF16, FLOAT8 = "exact", "bf16-psum", "float8-psum"


def _around(method: Any, kind: Any = "ef14", **options: Any) -> dq.ErrorFeedback:
    """Error feedback around a method that has no choice of bits."""
    return dq.ErrorFeedback(method(**options), kind=kind)


LARGE_GROUPS = dq.Format(group_size=64, super_group_size=512, scale_axis="auto")
"""Half of the metadata."""
METHODS: Mapping[str, Callable[..., Any]] = {
    **contenders.METHODS,
    "dynamiq-axis": partial(dq.DynamiQ, format=dq.Format(scale_axis="auto")),
    "dynamiq-dither-axis": partial(dq.DynamiQ, dither=True, format=dq.Format(scale_axis="auto")),
    "dynamiq-dither-1-2-3": partial(dq.DynamiQ, **contenders.NARROW, dither=True),
    "dynamiq-dither-64": partial(dq.DynamiQ, dither=True, format=LARGE_GROUPS),
    "dynamiq-nearest": partial(dq.DynamiQ, rounding="nearest", format=dq.Format(scale_axis="auto")),
    "mxfp4-stochastic": partial(dq.contrib.MXFP4, rounding="stochastic"),
    "mxfp4-ef14": partial(_around, dq.contrib.MXFP4),  # biased: it rounds to nearest
    "mxfp4-ef21": partial(_around, dq.contrib.MXFP4, "ef21"),
    "powersgd-memory": partial(_around, dq.contrib.PowerSGD),
    "arc-top-k-memory": partial(_around, contenders.METHODS["arc-top-k"]),
    **{
        f"{name}-memory": partial(contenders.remembered, "ef14", contenders.METHODS[name])
        for name in ("clt-k", "topk-chunked", "sidco")
    },
}
"""By names without bits; "memory" is error feedback."""


def make_method(text: str, backend: Backend = "jnp") -> Any:
    """The method that ``text`` means, for example ``dynamiq:5``.

    Raises:
      ValueError: the method or its bits are not known.
    """
    options = {"backend": backend} if text.startswith(("dynamiq", "mxfp")) else {}
    return contenders.make_method(text, METHODS, **options)


# --- Ways to train --------------------------------------------------------------------------------


class Way(NamedTuple):
    """One way to train; ``grads`` have an axis of workers first, and so has a sharded state."""

    method: str
    topology: str
    bits_per_coord: Callable[[Tree], float]
    """From one worker's gradients to wire bits, where a bf16 all-reduce takes 16."""
    init: Callable[[Tree], Any]
    """From parameters to the first state of the optimizer and the mean."""
    update: Callable[[Tree, Any, Tree, Array], tuple[Tree, Any]]
    """(grads, state, parameters, key) -> parameters, state."""
    used: Callable[[Tree, Array], Tree] = lambda params, key: params
    """(parameters, key) -> those that the loss takes."""


def replicated(
    average: Callable[[Tree, Array, Any], tuple[Tree, Any]],
    recipe: Recipe,
    memory: Callable[[Tree], Any] = lambda params: (),
) -> dict[str, Any]:
    """``init`` and ``update`` where all workers run the whole optimizer; here it runs once.

    Args:
      average: (one worker's gradients, key, memory) -> their mean over `AXIS`, the next memory.
      recipe: of the optimizer.
      memory: from parameters to all workers' first memory.
    """
    optimizer = make_optimizer(recipe)

    def init(params: Tree) -> Any:
        return optimizer.init(params), memory(params)

    def update(grads: Tree, state: Any, params: Tree, key: Array) -> tuple[Tree, Any]:
        copies, kept = jax.vmap(average, (0, None, 0), axis_name=AXIS)(grads, key, state[1])
        mean = jax.tree.map(lambda x: x[0], copies)
        updates, inner = optimizer.update(mean, state[0], params)
        return optax.apply_updates(params, updates), (inner, kept)

    return {"init": init, "update": update}


def psum(name: str, dtype: Any, recipe: Recipe) -> Way:
    """`lax.pmean` in a dtype, and back to that of the gradients."""

    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        mean = lax.pmean(jax.tree.map(lambda g: g.astype(dtype), grads), AXIS)
        return jax.tree.map(lambda m, g: m.astype(g.dtype), mean, grads), memory

    bits = 8.0 * jnp.dtype(dtype).itemsize
    return Way(name, "native", lambda grads: bits, **replicated(average, recipe))


def float8_psum(recipe: Recipe) -> Way:
    """`lax.psum` of float8 with one scale for each leaf, as a ring of GPUs rounds its sums.

    XLA leaves the dtype to NCCL, which rounds every sum of two; on CPU it would sum in f16.
    """
    dtype = jnp.float8_e4m3fn

    def mean_of(x: Array) -> Array:
        n = lax.axis_size(AXIS)
        scale = lax.pmax(jnp.max(jnp.abs(x)), AXIS) * n / float(jnp.finfo(dtype).max)
        terms = lax.all_gather((x / jnp.maximum(scale, 1e-30)).astype(dtype), AXIS)
        total = terms[0]
        for term in terms[1:]:
            total = (total.astype(jnp.float32) + term.astype(jnp.float32)).astype(dtype)
        return total.astype(jnp.float32) * scale / n

    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        return jax.tree.map(mean_of, grads), memory

    return Way(FLOAT8, "native", lambda grads: 8.0, **replicated(average, recipe))


def all_reduced(text: str, topology: str, recipe: Recipe, workers: Workers) -> Way:
    """The library's mean by the method and over the topology of these names."""
    name, colon, bits = text.partition(":")
    method = make_method(text, workers.backend)
    route = None if topology == "native" else contenders.parse_topology(topology)
    if isinstance(route, dq.Ring):
        route = replace(route, unroll_up_to=1)  # compiles faster, gives the same bits
    request = dq.Compression(method, topology=route, min_leaf_size=MIN_LEAF_SIZE, min_bucket_size=1)

    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        return dq.reduce(grads, AXIS, compression=request, key=key, state=memory)[:2]

    def bits_per_coord(grads: Tree) -> float:
        return request.explain(grads, workers.number, verbose=False).bits_per_coord

    memory = partial(request.init_state, n_workers=workers.number, stacked=True)
    label = f"{name}:{float(bits):g}" if colon else name
    return Way(label, topology, bits_per_coord, **replicated(average, recipe, memory))


def sharded(text: str, topology: str, recipe: Recipe, workers: Workers) -> Way:
    """`dq.optax.sharded`, GRADIENTS/DIFFERENCES, or FSDP, GRADIENTS/WEIGHTS/whole.

    Raises:
      ValueError: a part is not known.
    """
    parts = text.split("/")
    fsdp = parts[2:] == ["whole"]
    if len(parts) > 2 and not fsdp:
        raise ValueError(f"method {text!r}: pass GRADIENTS/DIFFERENCES or GRADIENTS/WEIGHTS/whole")
    named = ("f32" if part == EXACT else part for part in parts[:2])
    methods = [make_method(name, workers.backend) for name in named]
    limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
    route = None if isinstance(methods[0], dq.F32) else contenders.parse_topology(topology)
    scatter = dq.Compression(methods[0], topology=route, **limits)
    gather = dq.Compression(methods[1], **limits)
    leaf = jax.ShapeDtypeStruct((2**24,), jnp.float32)  # so large that rests do not count
    costs = [half.explain(leaf, workers.number, verbose=False) for half in (scatter, gather)]
    bits = sum(cost.bits_per_coord for cost in costs) / 2
    own = (_fully_sharded if fsdp else _sharded_updates)(scatter, gather, recipe, workers.number)
    return Way(text, topology, lambda grads: bits, **own)


def _sharded_updates(scatter: Any, gather: Any, recipe: Recipe, n_workers: int) -> dict[str, Any]:
    optimizer = dq.optax.sharded(
        make_optimizer(recipe, optax.identity()), AXIS,
        compression=dq.Policy(gradients=scatter, parameters=gather), max_norm=MAX_NORM,
    )  # fmt: skip

    def init(params: Tree) -> Any:
        return jax.vmap(lambda _: optimizer.init(params), axis_name=AXIS)(jnp.arange(n_workers))

    def update(grads: Tree, state: Any, params: Tree, key: Array) -> tuple[Tree, Any]:
        mapped = jax.vmap(optimizer.update, (0, 0, None), axis_name=AXIS)
        updates, state = mapped(grads, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates)), state

    return {"init": init, "update": update}


def _fully_sharded(scatter: Any, gather: Any, recipe: Recipe, n_workers: int) -> dict[str, Any]:
    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        own = dq.psum_scatter(grads, AXIS, tiled=True, compression=scatter, key=key)
        sums = jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), own)
        return jax.tree.map(lambda x: x / n_workers, sums), memory

    def used(params: Tree, key: Array) -> Tree:
        def gathered(slices: Tree) -> Tree:
            return dq.all_gather(slices, AXIS, tiled=True, compression=gather, key=key)

        slices = jax.tree.map(lambda x: x.reshape(n_workers, -1, *x.shape[1:]), params)
        return jax.tree.map(lambda x: x[0], jax.vmap(gathered, axis_name=AXIS)(slices))

    return replicated(average, recipe) | {"used": used}


def make_ways(
    methods: Sequence[str],
    topologies: Sequence[str],
    recipe: Recipe,
    workers: Workers = EIGHT,
) -> list[Way]:
    """The exact mean, and the ways that the command line names; bf16 psum first among these.

    Raises:
      ValueError: a method or a topology is not known.
    """
    found = [psum(EXACT, jnp.float32, recipe)]
    for text in sorted(methods, key=lambda text: text != BF16):
        if text == BF16:
            found.append(psum(BF16, jnp.bfloat16, recipe))
        elif text == FLOAT8:
            found.append(float8_psum(recipe))
        elif text != EXACT:
            native = "/" not in text and contenders.is_native(make_method(text))
            make = sharded if "/" in text else all_reduced
            routes = ["native"] if native else topologies
            found += [make(text, route, recipe, workers) for route in routes]
    return found


# --- Training -------------------------------------------------------------------------------------


def corpus_of(vocab_size: int, folder: Path | None) -> Corpus:
    """The standard library's text, or all of a folder's."""
    return load_corpus(vocab_size, folder=folder, **({"max_bytes": 2**30} if folder else {}))


class Task(NamedTuple):
    """A model, how it starts and is trained, and its data."""

    name: str
    model: Model
    corpus: Corpus
    workers: Workers

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all workers."""
        return self.workers.number * self.model.recipe.batch_size

    @property
    def gradients(self) -> Tree:
        """Shapes of the gradients as they are averaged."""
        return jax.eval_shape(partial(init_params, self.model.config), jax.random.key(0))

    @property
    def digest(self) -> str:
        """A hash of the text, since other Python versions have another standard library."""
        return f"{zlib.crc32(self.corpus.validation, zlib.crc32(self.corpus.train)):08x}"

    def tokens(self, seed: int) -> np.ndarray:
        """i32[steps, workers, sequences, seq_len + 1]: what a seed trains on."""
        recipe, length = self.model.recipe, self.model.config.seq_len + 1
        told = {"rows": self.global_batch, "length": length, "seed": seed}
        steps = [train_batch(self.corpus, step, **told) for step in range(recipe.steps)]
        return np.stack(steps).reshape(recipe.steps, self.workers.number, -1, length)

    def validation(self) -> np.ndarray:
        """i32[batches, sequences, seq_len + 1]."""
        count, length = self.model.recipe.validation_batches, self.model.config.seq_len + 1
        told = {"rows": VALIDATION_ROWS, "length": length, "count": count}
        return np.stack([*validation_batches(self.corpus, **told)])


def make_score(config: Config) -> Callable[[Tree, Array], tuple[Array, Array]]:
    """Returns the function (parameters, tokens) -> validation loss in nats, and top-1 from 0 to 1.

    Tokens are i32[sequences, seq_len + 1]; both results are means over all positions, f32[].
    """
    forward = make_forward(config)

    def score(params: Tree, tokens: Array) -> tuple[Array, Array]:
        logits, targets = forward(params, tokens[:, :-1]).astype(jnp.float32), tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=-1) == targets)

    return score


def make_trainer(model: Model, way: Way) -> Callable[..., tuple[Array, Array, Array]]:
    """Returns the program that trains one model for every seed.

    From seeds i32[S], their tokens [S, ...] and validation batches (see `Task`) it computes the
    losses of all steps [S, steps], the validation loss [S] and its top-1 [S].
    """
    loss, score = make_loss(model.config), make_score(model.config)

    def train(seed: Array, tokens: Array, windows: Array) -> tuple[Array, Array, Array]:
        count = tokens.shape[1]
        at_once = min(model.workers_at_once or count, count)
        start_key, key = jax.random.split(jax.random.key(seed))

        def step(carry: tuple[Tree, Any], now: tuple[Array, Array]) -> tuple:
            (params, state), (number, own) = carry, now
            step_key = jax.random.fold_in(key, number)
            used = way.used(params, jax.random.fold_in(step_key, 1))
            one = partial(jax.value_and_grad(loss), used)
            losses, grads = lax.map(one, own, batch_size=at_once)
            return way.update(grads, state, params, step_key), jnp.mean(losses)

        params = init_params(model.config, start_key)
        numbered = jnp.arange(tokens.shape[0]), tokens
        (params, _), losses = lax.scan(step, (params, way.init(params)), numbered)
        scores = lax.map(partial(score, way.used(params, key)), windows)
        return losses, jnp.mean(scores[0]), jnp.mean(scores[1])

    return jax.jit(jax.vmap(train, (0, 0, None)))


def run_seeds(task: Task, way: Way, seeds: int) -> tuple[np.ndarray, ...]:
    """Losses and top-1 of all seeds; see `make_trainer`."""
    program, validation = make_trainer(task.model, way), task.validation()
    fit = max(1, task.model.seeds_at_once * EIGHT.number // task.workers.number)
    at_once = 2 if jax.default_backend() == "cpu" else fit
    parts = []
    for first in range(0, seeds, at_once):
        own = np.arange(first, min(first + at_once, seeds), dtype=np.int32)
        tokens = np.stack([task.tokens(seed) for seed in own])
        parts.append(jax.device_get(program(own, tokens, validation)))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


# --- Figures --------------------------------------------------------------------------------------


def figures(losses: np.ndarray, validation: np.ndarray, top1: np.ndarray) -> Row:
    """Figures of a row's runs, for every seed; see `make_trainer`. `None` is not finite.

    A run whose validation loss is not finite has no top-1.
    """
    starts = range(0, losses.shape[1], CURVE_WINDOW)
    curve = [np.mean(losses[:, i : i + CURVE_WINDOW], axis=1, dtype=np.float64) for i in starts]
    right = np.where(np.isfinite(validation), top1, np.nan)
    found = {"validation_loss": validation, "top1": right}
    found["training_loss"] = np.stack(curve, axis=1)
    return {
        name: np.where(np.isfinite(values), np.asarray(values, object), None).tolist()
        for name, values in found.items()
    }


def paired(apart: np.ndarray) -> tuple[float | None, float | None]:
    """Mean over seeds of paired differences, and its standard error.

    One seed has no standard error. If a run diverged there is neither.
    """
    if not np.all(np.isfinite(apart)):
        return None, None
    error = float(apart.std(ddof=1) / math.sqrt(apart.size)) if apart.size > 1 else None
    return float(apart.mean()), error


def difference(values: Sequence[float], exact: Sequence[float]) -> dict[str, float | None]:
    """The paired difference of losses in %; see `paired`."""
    percent = 100 * (np.asarray(values, np.float64) / np.asarray(exact, np.float64) - 1)
    return dict(zip(("percent", "error"), paired(percent), strict=True))


def points(values: Sequence[float], exact: Sequence[float]) -> dict[str, float | None]:
    """The paired difference of shares in points (hundredths); see `paired`."""
    apart = 100 * (np.asarray(values, np.float64) - np.asarray(exact, np.float64))
    return dict(zip(("points", "error"), paired(apart), strict=True))


def of_reference(values: Sequence[float], reference: Sequence[float]) -> dict[str, float | None]:
    """Mean over seeds of the paired ratio in %, and its 95% interval by Student's t.

    Seeds are the sample: a claim "at least 99.9%" is shown if ``low`` is at least 99.9, refuted if
    ``high`` is below it, and else open. One seed has no interval, and a run that diverged no ratio.
    """
    percent = 100 * np.asarray(values, np.float64) / np.asarray(reference, np.float64)
    mean, error = paired(percent)
    if mean is None or error is None:
        return {"percent": mean, "low": None, "high": None}
    half = float(student.ppf(0.975, percent.size - 1)) * error
    return {"percent": mean, "low": mean - half, "high": mean + half}


# --- Rows -----------------------------------------------------------------------------------------


def invocation() -> dict[str, str]:
    """Command line, hardware, versions and time."""
    script = f"benchmarks/evidence/{Path(sys.argv[0]).name}"
    return environment() | {
        "command": f"python {script} {shlex.join(sys.argv[1:])}".strip(),
        "device": jax.devices()[0].device_kind,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def settings_of(task: Task, way: Way, seeds: int) -> dict[str, Any]:
    """The settings of a row: rows of equal settings have equal figures, up to rounding."""
    recipe = task.model.recipe
    return {
        "model": task.name, "init": task.model.config.init, "optimiser": recipe.optimiser,
        "learning_rate": recipe.learning_rate, "workers": task.workers.number,
        "global_batch": task.global_batch, "worker_batch": recipe.batch_size,
        "steps": recipe.steps, "seeds": seeds, "text": task.digest,
        "platform": jax.default_backend(), "backend": task.workers.backend,
        "method": way.method, "topology": way.topology,
    }  # fmt: skip


def train_row(task: Task, way: Way, settings: dict[str, Any], earlier: Mapping[str, Row]) -> Row:
    """A row's settings and figures, beside those of earlier rows of the task, by method."""
    start = time.perf_counter()
    found = figures(*run_seeds(task, way, settings["seeds"]))
    seconds = round(time.perf_counter() - start, 3)
    known = {way.method: found, **earlier}
    apart = difference(found["validation_loss"], known[EXACT]["validation_loss"])
    summary = {"validation": apart, "top1": points(found["top1"], known[EXACT]["top1"])}
    if BF16 in known:
        summary["top1_of_bf16"] = of_reference(found["top1"], known[BF16]["top1"])
    row = {"settings": settings, "bits_per_coord": way.bits_per_coord(task.gradients)}
    row |= {"seconds": seconds, **found, "summary": summary}
    print(told(row), flush=True)
    return row


def told(row: Row) -> str:
    """A line about a row: bits, means over seeds, and differences to the exact mean."""
    settings, summary = row["settings"], row["summary"]
    names = "model", "init", "workers", "method", "topology"
    label = " ".join(str(settings[name]) for name in names)
    if None in row["validation_loss"]:
        return f"{label}: {row['bits_per_coord']:.2f} bits, diverged ({row['seconds']} s)"
    apart = [summary["validation"]["percent"], summary["validation"]["error"]]
    apart += [summary["top1"]["points"], summary["top1"]["error"]]
    shown = ["–" if value is None else f"{value:.3f}" for value in apart]
    return (
        f"{label}: {row['bits_per_coord']:.2f} bits, {np.mean(row['validation_loss']):.4f} nats, "
        f"{shown[0]} ± {shown[1]} %; top-1 {100 * np.mean(row['top1']):.2f} %, "
        f"{shown[2]} ± {shown[3]} points ({row['seconds']} s)"
    )


Methods = Annotated[
    str, typer.Option(help="bf16-psum, float8-psum, or a method with its wire bits per coordinate")
]
"""The option of all scripts here that train."""


Text = Annotated[
    Path | None,
    typer.Option(
        "--text", help="folder whose *.py files are the text (default: the standard library's)"
    ),
]
"""Scripts that train for long take an option of this type."""


def main(
    models: Annotated[str, typer.Option(help=f"some of {', '.join(MODELS)}")] = "tiny",
    methods: Methods = "bf16-psum,dynamiq:5,dynamiq:4,dynamiq-mse:5,mxfp8",
    topologies: Annotated[str, typer.Option(help="some of direct, ring, butterfly")] = "direct",
    inits: Annotated[str, typer.Option(help=f"some of {', '.join(INITS)}")] = ",".join(INITS),
    workers: Annotated[int, typer.Option(min=2, help="that one device simulates")] = 8,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="sequences of a step, over all workers (default: by model)"),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="of the kernels of DynamiQ and MX floats")
    ] = "jnp",
    seeds: Annotated[int, typer.Option(min=1, help="training runs of every row")] = 4,
    steps: Annotated[int | None, typer.Option(min=2, help="default: the model's")] = None,
    rate: Annotated[
        float | None,
        typer.Option("--learning-rate", min=0, help="peak (default: by model, init)"),
    ] = None,
    optimiser: Annotated[
        Optimiser, typer.Option(help="whose rate --learning-rate is, .008 for Muon")
    ] = "adamw",
    folder: Text = None,
    file: Annotated[Path, typer.Option("--json", help="rows are added here")] = Path(
        "runs/training.json"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="rows that --json has are not trained again")
    ] = False,
) -> None:
    """Trains models with compressed gradients and compares losses with those of exact ones."""
    known = {"--models": (models, MODELS), "--inits": (inits, INITS)}
    for option, (text, names) in known.items():
        if unknown := [name for name in contenders.parts(text) if name not in names]:
            raise typer.BadParameter(f"{option} {unknown[0]!r}: pass some of {', '.join(names)}")
    if global_batch and global_batch % workers:
        raise typer.BadParameter(
            f"--global-batch {global_batch} does not divide among --workers {workers}: pass a "
            f"multiple, for example {workers * math.ceil(global_batch / workers)}"
        )
    named = contenders.parts(methods), contenders.parts(topologies)
    simulated = Workers(workers, backend)
    runs: list[tuple[Task, list[Way]]] = []
    for name in contenders.parts(models):
        model = MODELS[name]
        config, recipe = model.config, model.recipe
        if global_batch:
            recipe = recipe._replace(batch_size=global_batch // workers)
        corpus = corpus_of(config.vocab_size, folder)
        for init in contenders.parts(inits):
            usual = LEARNING_RATES.get((name, init), recipe.learning_rate)
            peak = usual if rate is None else rate
            own = recipe._replace(
                steps=steps or recipe.steps, learning_rate=peak, optimiser=optimiser
            )
            task = Task(
                name,
                model._replace(config=replace(config, init=init), recipe=own),
                corpus,
                simulated,
            )
            try:
                ways = make_ways(*named, own, simulated)
                for way in ways:
                    way.bits_per_coord(task.gradients)
            except (ValueError, NotImplementedError) as error:
                raise typer.BadParameter(
                    str(error), param_hint="--methods, --topologies"
                ) from error
            runs.append((task, ways))
    kept = json.loads(file.read_text()) if file.exists() else {"invocations": [], "rows": []}
    number = len(kept["invocations"])
    kept["invocations"].append(invocation())
    file.parent.mkdir(parents=True, exist_ok=True)
    for task, ways in runs:
        earlier: dict[str, Row] = {}
        for way in ways:
            settings = settings_of(task, way, seeds)
            before = [row for row in kept["rows"] if row["settings"] == settings]
            if resume and before:
                earlier[way.method] = before[-1]
                continue
            row = train_row(task, way, settings, earlier)
            earlier[way.method] = row
            kept["rows"].append(row | {"invocation": number})
            file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
