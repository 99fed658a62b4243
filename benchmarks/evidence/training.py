r"""Losses of training with a quantised all-reduce, with paired seeds.

    python benchmarks/evidence/training.py --methods bf16-psum,dynamiq:5,mxfp8 --seeds 2  # CPU

Trains small language models (`MODELS`) by AdamW with several workers that one device simulates.
Start, tokens and key of the rounding depend on (seed, step) alone, so that the runs of all methods
are paired: every row is compared seed by seed with the exact mean in f32, which always runs.

Methods are those of ``dynamiq-jax error`` (``f32`` and ``bf16`` sum uncompressed over the
topology), those of `METHODS`, and

* ``bf16-psum``: `lax.pmean` of all gradients in bf16;
* ``dynamiq:5/dynamiq-dither:2.5``: `dq.optax.sharded`, which scatters gradients at 5 bits and
  gathers differences of parameters at 2.5;
* ``dynamiq:5/dynamiq:8/whole``: FSDP, which gathers the parameters themselves.

Every finished row is kept in ``--json`` at once. Rows that the file has are not trained again, so
that an interrupted command goes on where it was. `git show 4ffd39a:benchmarks/evidence/training.py`
has other optimisers and methods.
"""

import json
import math
import os
import platform
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import Array, lax

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import contenders

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llm_data import Corpus, load_corpus  # pyright: ignore[reportMissingImports]

Tree = Any
Row = dict[str, Any]

RATES = {"tiny": {"unit": 2e-3}, "125m": {"gpt2": 6e-4, "unit": 6e-4}}
"""Peak learning rates of models and initialisations where they are not 1e-3."""

CURVE_WINDOW = 25
"""Steps that a point of the kept training curve averages."""


# --- The model ------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape of a model, and how it is trained by default."""

    vocab_size: int
    seq_len: int
    n_layers: int
    dim: int
    n_heads: int
    hidden: int
    dtype: jax.typing.DTypeLike
    """The dtype of matrix products; parameters and gradients are f32."""
    sequences: int
    """Per worker and step."""
    steps: int
    windows: int
    """Sequences of the validation text."""
    seeds_at_once: int
    """That a GPU trains in one program."""
    workers_at_once: int = 8
    """Whose gradients are computed together."""


MODELS = {
    "micro": Shape(256, 16, 2, 64, 2, 128, jnp.float32, 2, 20, 64, 8),  # 0.1 M: for tests
    "tiny": Shape(256, 64, 2, 192, 6, 576, jnp.float32, 2, 200, 512, 32),  # 1.1 M, bytes
    "mid": Shape(4096, 256, 8, 384, 6, 1024, jnp.bfloat16, 4, 400, 256, 8),  # 17 M
    "125m": Shape(24576, 1024, 12, 768, 12, 2048, jnp.bfloat16, 2, 200, 64, 1, 1),
}

INITS = ("gpt2", "unit")
"""How parameters start; a traced index into this tuple chooses."""


def init(shape: Shape, key: Array, kind: Array) -> Tree:
    """Fresh f32 parameters.

    Args:
      shape: the model.
      key: a PRNG key; under every ``kind`` it gives the same numbers but for their deviations.
      kind: index into `INITS`. "gpt2": deviation 0.02 everywhere. "unit": activations of unit
        variance (embedding 1, matrices 1/sqrt(inputs), head a quarter of that). Both scale what
        is added to the residual stream by 1/sqrt(2 layers).
    """
    vocab_size, dim, hidden, layers = shape.vocab_size, shape.dim, shape.hidden, shape.n_layers
    residual = (2 * layers) ** -0.5
    square, wide = ((layers, dim, dim), 1.0, dim**-0.5), ((layers, dim, hidden), 1.0, dim**-0.5)
    drawn = {  # size, factor in both, deviation of "unit"
        "embed": ((vocab_size, dim), 1.0, 1.0), "head": ((dim, vocab_size), 1.0, 0.25 * dim**-0.5),
        "q": square, "k": square, "v": square, "gate": wide, "up": wide,
        "o": ((layers, dim, dim), residual, dim**-0.5),
        "down": ((layers, hidden, dim), residual, hidden**-0.5),
    }  # fmt: skip
    ends = np.cumsum([math.prod(size) for size, *_ in drawn.values()])
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])  # one draw compiles fastest
    tree = {
        name: part.reshape(size) * factor * jnp.asarray([0.02, unit])[kind]
        for (name, (size, factor, unit)), part in zip(drawn.items(), parts, strict=True)
    }
    outer = {"embed": tree.pop("embed"), "head": tree.pop("head"), "norm": jnp.ones(dim)}
    tree |= {name: jnp.ones((layers, dim)) for name in ("attention_norm", "mlp_norm")}
    blocks = [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(layers)]
    return outer | {"blocks": blocks}


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale[None, None]).astype(x.dtype)


def _rotate(x: Array) -> Array:
    """Turns the pairs (x[i], x[i + head_dim/2]) by position x frequency i; ``[B, T, H, d]``."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None]
    angle = angle[None, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def times(y: Array, layer: Tree, name: str) -> Array:
    """The product with one of a layer's matrices, in the dtype of ``y``."""
    return y @ layer[name].astype(y.dtype)


def _block(shape: Shape, x: Array, layer: Tree) -> Array:
    """One decoder layer on ``[B, T, dim]``."""
    y = _norm(x, layer["attention_norm"])
    q, k, v = (times(y, layer, name).reshape(*y.shape[:2], shape.n_heads, -1) for name in "qkv")
    attended = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    x = x + times(attended.reshape(x.shape), layer, "o")
    y = _norm(x, layer["mlp_norm"])
    hidden = jax.nn.silu(times(y, layer, "gate")) * times(y, layer, "up")
    return x + times(hidden, layer, "down")


def loss(shape: Shape, params: Tree, tokens: Array) -> Array:
    """Mean cross-entropy in nats per token; ``tokens`` is ``int32[batch, seq_len + 1]``."""
    # Looked up in f32: gradients of rows that a batch uses often are summed in f32, too.
    x = params["embed"][tokens[:, :-1]].astype(shape.dtype)
    for layer in params["blocks"]:
        x = _block(shape, x, layer)
    logits = _norm(x, params["norm"]) @ params["head"].astype(shape.dtype)
    logits = logits.astype(jnp.float32)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


# --- Methods --------------------------------------------------------------------------------------

AXIS = "data"
MIN_LEAF_SIZE = 4096
"""Smaller leaves are summed exactly, by every method."""
MAX_NORM = 1.0
"""To which the norm of gradients is clipped."""

EXACT, BF16 = "exact", "bf16-psum"


def in_full(options: Any) -> str:
    """All fields of a dataclass, for the keys of kept figures: defaults may change."""
    return "None" if options is None else f"{type(options).__name__}{asdict(options)}"


def _around(method: Any, kind: Any = "ef14", **options: Any) -> dq.ErrorFeedback:
    """Error feedback around a method that has no choice of bits."""
    return dq.ErrorFeedback(method(**options), kind=kind)


METHODS: Mapping[str, Callable[..., Any]] = {
    **contenders.METHODS,
    "dynamiq-piecewise": partial(dq.DynamiQ, format=dq.Format(levels="piecewise")),
    "dynamiq-memory": partial(contenders.remembered, "ef14"),
    "dynamiq-axis": partial(dq.DynamiQ, format=dq.Format(scale_axis="auto")),
    "dynamiq-dither-axis": partial(dq.DynamiQ, dither=True, format=dq.Format(scale_axis="auto")),
    "dynamiq-dither-1-2-3": partial(dq.DynamiQ, widths=(1, 2, 3), floor=None, dither=True),
    "mxfp4-stochastic": partial(dq.comparators.MXFP4, rounding="stochastic"),
    "mxfp4-ef14": partial(_around, dq.comparators.MXFP4),  # biased: it rounds to nearest
    "mxfp4-ef21": partial(_around, dq.comparators.MXFP4, "ef21"),
    "powersgd-memory": partial(_around, dq.comparators.PowerSGD),
    "arc-top-k-memory": partial(_around, contenders.METHODS["arc-top-k"]),
    **{
        f"{name}-memory": partial(contenders.remembered, "ef14", contenders.METHODS[name])
        for name in ("clt-k", "topk-chunked", "sidco")
    },
}
"""By names without bits; "memory" is error feedback."""

# --- Ways to train --------------------------------------------------------------------------------


class Way(NamedTuple):
    """One way to train; ``grads`` have an axis of workers first, and so has a sharded state."""

    method: str
    topology: str
    options: str
    """Options that change the result, besides the names."""
    bits_per_coord: Callable[[Tree, int], float]
    """(one worker's gradients, workers) -> wire bits, where a bf16 all-reduce takes 16."""
    init: Callable[[Tree, int], Any]
    """(parameters, workers) -> the first state of the optimizer and the mean."""
    update: Callable[..., tuple[Tree, Any, Tree]]
    """(grads, state, parameters, key, peak) -> parameters, state, and the mean if it is seen."""
    used: Callable[[Tree, Array, int], Tree] = lambda params, key, n: params
    """(parameters, key, workers) -> those that the loss takes."""


def replicated(
    average: Callable[[Tree, Array, Any], tuple[Tree, Any]],
    steps: int,
    memory: Callable[[Tree, int], Any] = lambda params, n: (),
) -> dict[str, Any]:
    """``init`` and ``update`` where all workers run the whole optimizer; here it runs once.

    Args:
      average: (one worker's gradients, key, memory) -> their mean over `AXIS`, the next memory.
      steps: of the schedule.
      memory: (parameters, workers) -> all workers' first memory.
    """
    optimizer = make_optimizer(steps, MAX_NORM)

    def init(params: Tree, n: int) -> Any:
        return optimizer.init(params), memory(params, n)

    def update(grads: Tree, state: Any, params: Tree, key: Array, peak: Any) -> tuple:
        copies, kept = jax.vmap(average, (0, None, 0), axis_name=AXIS)(grads, key, state[1])
        found = jax.tree.map(lambda x: x[0], copies)
        updates, inner = optimizer.update(found, state[0], params, peak=peak)
        return optax.apply_updates(params, updates), (inner, kept), found

    return {"init": init, "update": update}


def psum(name: str, dtype: Any, steps: int) -> Way:
    """`lax.pmean` in a dtype, and back to that of the gradients."""

    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        found = lax.pmean(jax.tree.map(lambda g: g.astype(dtype), grads), AXIS)
        return jax.tree.map(lambda m, g: m.astype(g.dtype), found, grads), memory

    bits = 8.0 * jnp.dtype(dtype).itemsize
    return Way(name, "native", "", lambda g, n: bits, **replicated(average, steps))


def parse_method(text: str, backend: str) -> tuple[str, Any]:
    """The name and the method meant by ``text``, for example ``dynamiq:5``.

    Raises:
      ValueError: the method or its bits are not known.
    """
    name, _, bits = text.strip().partition(":")
    if name not in METHODS:
        known = ", ".join((EXACT, BF16, *METHODS))
        raise ValueError(f"method {text!r} is not known: pass some of {known}")
    method = contenders.make_method(text, METHODS)
    alone = method.method if isinstance(method, dq.ErrorFeedback) else method
    if "backend" in (field.name for field in fields(alone)):
        alone = replace(alone, backend=backend)
    method = replace(method, method=alone) if isinstance(method, dq.ErrorFeedback) else alone
    return f"{name}:{float(bits):g}" if bits else name, method


def all_reduced(text: str, topology: str, backend: str, steps: int) -> Way:
    """The library's mean by the method and over the topology of these names.

    Raises:
      ValueError: one of them is not known.
    """
    name, method = parse_method(text, backend)
    route = None if topology == "native" else contenders.parse_topology(topology)
    if isinstance(route, dq.Ring):
        route = replace(route, unroll_up_to=1)  # compiles faster, gives the same bits
    request = dq.Compression(method, topology=route, min_leaf_size=MIN_LEAF_SIZE, min_bucket_size=1)

    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        return dq.reduce(grads, AXIS, method=request, key=key, state=memory)[:2]

    def memory(params: Tree, n_workers: int) -> Any:
        return request.init_state(params, n_workers, stacked=True)

    def bits_per_coord(grads: Tree, n_workers: int) -> float:
        return request.explain(grads, n_workers, verbose=False).bits_per_coord

    options = f"{in_full(method)} {in_full(route)}"
    return Way(name, topology, options, bits_per_coord, **replicated(average, steps, memory))


def sharded(text: str, topology: str, backend: str, steps: int) -> Way:
    """`dq.optax.sharded`, GRADIENTS/DIFFERENCES, or FSDP, GRADIENTS/WEIGHTS/whole.

    Raises:
      ValueError: a part is not known.
    """
    parts = text.strip().split("/")
    fsdp = parts[2:] == ["whole"]
    if len(parts) > 2 and not fsdp:
        raise ValueError(f"method {text!r}: pass GRADIENTS/DIFFERENCES or GRADIENTS/WEIGHTS/whole")
    names = ["f32" if part == EXACT else part for part in parts[:2]]
    methods = [parse_method(name, backend)[1] for name in names]
    limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
    scatter = dq.Compression(methods[0], topology=contenders.parse_topology(topology), **limits)
    gather = dq.Compression(methods[1], **limits)
    options = " / ".join(map(in_full, methods))
    bits = sum(method.bits for method in methods) / 2
    if fsdp:
        own = _fully_sharded(scatter, gather, steps)
    else:
        own = _sharded_updates(scatter, gather, steps)
        options = f"dq.optax.sharded {options}"
    return Way(text.strip(), topology, options, lambda g, n: bits, **own)


def _sharded_updates(scatter: Any, gather: Any, steps: int) -> dict[str, Any]:
    optimizer = dq.optax.sharded(
        make_optimizer(steps, None), AXIS, method=scatter, differences=gather, max_norm=MAX_NORM
    )

    def init(params: Tree, n: int) -> Any:
        return jax.vmap(lambda _: optimizer.init(params), axis_name=AXIS)(jnp.arange(n))

    def update(grads: Tree, state: Any, params: Tree, key: Array, peak: Any) -> tuple:
        one = partial(optimizer.update, peak=peak)
        updates, state = jax.vmap(one, (0, 0, None), axis_name=AXIS)(grads, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates)), state, None

    return {"init": init, "update": update}


def _fully_sharded(scatter: Any, gather: Any, steps: int) -> dict[str, Any]:
    def average(grads: Tree, key: Array, memory: Any) -> tuple[Tree, Any]:
        own = dq.psum_scatter(grads, AXIS, tiled=True, method=scatter, key=key)
        sums = jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), own)
        return jax.tree.map(lambda x: x / lax.axis_size(AXIS), sums), memory

    def used(params: Tree, key: Array, n: int) -> Tree:
        def gathered(_: Array) -> Tree:
            def mine(x: Array) -> Array:
                rows = x.shape[0] // n
                return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * rows, rows)

            slices = jax.tree.map(mine, params)
            return dq.all_gather(slices, AXIS, tiled=True, method=gather, key=key)

        every = jax.vmap(gathered, axis_name=AXIS)(jnp.arange(n))
        return jax.tree.map(lambda x: x[0], every)

    return replicated(average, steps) | {"used": used}


def parse_ways(
    methods: Sequence[str], topologies: Sequence[str], backend: str, steps: int
) -> list[Way]:
    """The exact mean, and the ways that the command line names.

    Raises:
      ValueError: a method or a topology is not known.
    """
    found = [psum(EXACT, jnp.float32, steps)]
    for text in methods:
        if text == BF16:
            found.append(psum(BF16, jnp.bfloat16, steps))
        elif text != EXACT:
            native = "/" not in text and contenders.is_native(parse_method(text, backend)[1])
            make = sharded if "/" in text else all_reduced
            routes = ["native"] if native else topologies
            found += [make(text, route, backend, steps) for route in routes]
    return found


# --- Training -------------------------------------------------------------------------------------


def make_optimizer(steps: int, max_norm: float | None) -> optax.GradientTransformationExtraArgs:
    """AdamW behind a clip, with warm-up and cosine decay to a tenth.

    Its update takes the peak learning rate as ``peak``. It decays matrices by 0.1.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(steps // 10, 1), steps, 0.1)
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)

    def scale(updates: Tree, state: Any, params: Tree = None, *, peak: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: peak * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scale)
    return optax.chain(clip, adamw, scaled)


def squares(tree: Tree) -> Array:
    """f32[leaves]: the squared norm of each leaf that methods compress."""
    large = (x for x in jax.tree.leaves(tree) if x.size >= MIN_LEAF_SIZE)
    return jnp.stack([jnp.sum(jnp.square(x)) for x in large])


def worker_tokens(text: Array, starts: Array, shape: Shape, n_workers: int) -> Array:
    """Every worker's windows of the text, from where they start: i32[n, sequences, seq_len + 1]."""
    tokens = text[starts[:, None] + jnp.arange(shape.seq_len + 1)[None]]
    return tokens.reshape(n_workers, -1, shape.seq_len + 1)


def make_step(shape: Shape, way: Way, n_workers: int) -> Callable[..., tuple]:
    """Returns one step of training.

    It takes parameters, state, key, peak, the training text and the starts of this step's windows.
    It returns the next parameters and state, the mean loss, the exact mean of gradients, and the
    mean that the way has in its place, `None` if it is not seen.
    """
    one = jax.value_and_grad(partial(loss, shape))
    at_once = min(shape.workers_at_once, n_workers)

    def step(params, state, key, peak, text, starts):
        used = way.used(params, jax.random.fold_in(key, 1), n_workers)
        tokens = worker_tokens(text, starts, shape, n_workers)
        losses, grads = lax.map(partial(one, used), tokens, batch_size=at_once)
        params, state, found = way.update(grads, state, params, key, peak)
        exact = jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)
        return params, state, jnp.mean(losses), exact, found

    return step


def validation_loss(shape: Shape, params: Tree, windows: Array) -> Array:
    """The mean loss over i32[windows, seq_len + 1]."""
    rows = windows.reshape(-1, min(8, len(windows)), shape.seq_len + 1)
    return jnp.mean(lax.map(partial(loss, shape, params), rows))


def make_trainer(shape: Shape, way: Way, n_workers: int) -> Callable[..., dict[str, Array]]:
    """Returns the program that trains one model for every seed.

    Its arguments: index of the initialisation, peak learning rate, seeds i32[S], the windows'
    starts i32[S, steps, n_workers * sequences], the training text i32[tokens], the validation
    windows i32[windows, seq_len + 1]. It returns the validation loss [S], the training losses
    [S, steps], and of every leaf that methods compress the squared error and the squared norm of
    the mean, [S, steps, leaves]; zeros where the mean is not seen.
    """
    one_step = make_step(shape, way, n_workers)

    def train(kind, peak, seed, starts, text, windows) -> dict[str, Array]:
        start_key, key = jax.random.split(jax.random.key(seed))

        def step(carry, now):
            number, own = now
            step_key = jax.random.fold_in(key, number)
            params, state, mean_loss, exact, found = one_step(*carry, step_key, peak, text, own)
            error = jax.tree.map(jnp.subtract, exact if found is None else found, exact)
            measured = {"losses": mean_loss, "errors": squares(error), "norms": squares(exact)}
            return (params, state), measured

        params = init(shape, start_key, kind)
        carry = params, way.init(params, n_workers)
        (params, _), measured = lax.scan(step, carry, (jnp.arange(starts.shape[0]), starts))
        used = way.used(params, key, n_workers)
        return measured | {"validation": validation_loss(shape, used, windows)}

    return jax.jit(jax.vmap(train, (None, None, 0, 0, None, None)))


# --- Data -----------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A model and its data, on the device."""

    name: str
    shape: Shape
    steps: int
    n_workers: int
    text: Array
    windows: np.ndarray
    digest: str
    """A hash of the text, since other Python versions have another standard library."""

    @property
    def gradients(self) -> Tree:
        """Shapes of the gradients as they are averaged."""
        return jax.eval_shape(lambda: init(self.shape, jax.random.key(0), jnp.int32(0)))


def make_task(name: str, shape: Shape, n_workers: int, steps: int, corpus: Corpus) -> Task:
    """A model with a text."""
    length = shape.seq_len + 1
    starts = np.linspace(0, len(corpus.validation) - length, shape.windows).astype(np.int64)
    windows = corpus.validation[starts[:, None] + np.arange(length)]
    digest = f"{zlib.crc32(corpus.validation, zlib.crc32(corpus.train)):08x}"
    text = jax.device_put(corpus.train)
    return Task(name, shape, steps, n_workers, text, windows, digest)


def window_starts(task: Task, seed: int) -> np.ndarray:
    """i32[steps, workers * sequences]: where every sequence begins in the training text."""
    most, rows = task.text.size - task.shape.seq_len - 1, task.n_workers * task.shape.sequences
    draws = (np.random.default_rng((seed, step)) for step in range(task.steps))
    return np.stack([rng.integers(0, most, rows, np.int32) for rng in draws])


def run_seeds(
    program: Callable, task: Task, kind: str, peak: float, seeds: int
) -> dict[str, np.ndarray]:
    """Runs a compiled program for all seeds; see `make_trainer` for what it returns."""
    parts, at_once = [], 2 if jax.default_backend() == "cpu" else task.shape.seeds_at_once
    for first in range(0, seeds, at_once):
        own = np.arange(first, min(first + at_once, seeds), dtype=np.int32)
        starts = np.stack([window_starts(task, seed) for seed in own])
        index, rate = np.int32(INITS.index(kind)), np.float32(peak)
        parts.append(jax.device_get(program(index, rate, own, starts, task.text, task.windows)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- Figures --------------------------------------------------------------------------------------


def leaf_errors(errors: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """[S, leaves]: mean over steps of |error|^2 / |exact|^2, both given as [S, steps, leaves].

    A step in which a leaf's exact mean is zero has no relative error and counts as 0.
    """
    errors, norms = np.asarray(errors, np.float64), np.asarray(norms, np.float64)
    return np.divide(errors, norms, out=np.zeros_like(errors), where=norms != 0).mean(axis=1)


def figures(result: Mapping[str, np.ndarray]) -> Row:
    """Figures of a row's runs, for every seed; see `make_trainer`. `None` is not finite."""
    losses = np.asarray(result["losses"], np.float64)
    windows = range(0, losses.shape[1], CURVE_WINDOW)
    whole = (np.sum(result[name], axis=2, keepdims=True) for name in ("errors", "norms"))
    found = {
        "validation_loss": result["validation"],
        "training_loss": np.stack(
            [losses[:, i : i + CURVE_WINDOW].mean(axis=1) for i in windows], axis=1
        ),
        "vnmse": leaf_errors(*whole)[:, 0],
        "worst_leaf": leaf_errors(result["errors"], result["norms"]).max(axis=1),
    }
    return {
        name: np.where(np.isfinite(values), np.asarray(values, object), None).tolist()
        for name, values in found.items()
    }


def difference(values: Sequence[float], exact: Sequence[float]) -> dict[str, float | None]:
    """Mean over seeds of the paired difference in %, and its standard error.

    One seed has no standard error. If a run diverged there is neither.
    """
    percent = 100 * (np.asarray(values, np.float64) / np.asarray(exact, np.float64) - 1)
    if not np.all(np.isfinite(percent)):
        return {"percent": None, "error": None}
    error = float(percent.std(ddof=1) / math.sqrt(percent.size)) if percent.size > 1 else None
    return {"percent": float(percent.mean()), "error": error}


def summarise(row: Row, exact: Row) -> Row:
    """Means over seeds, and the differences from ``exact``, the same runs with the exact mean."""
    names = "validation_loss", "vnmse", "worst_leaf"
    means = {name: None if None in row[name] else float(np.mean(row[name])) for name in names}
    return means | {"validation": difference(row["validation_loss"], exact["validation_loss"])}


# --- Rows -----------------------------------------------------------------------------------------


class Record:
    """Finished rows in a file, with the commands and machines that they come from."""

    def __init__(self, file: Path, invocation: Mapping[str, str]):
        self.file, self.invocation = file, dict(invocation)
        kept = json.loads(file.read_text()) if file.exists() else {"invocations": [], "rows": []}
        self.invocations: list[Row] = kept["invocations"]
        self.rows: list[Row] = kept["rows"]

    def find(self, settings: Row) -> Row | None:
        """The row with these settings."""
        return next((row for row in self.rows if row["settings"] == settings), None)

    def add(self, row: Row) -> None:
        """Keeps a row, in memory and on disk."""
        if self.invocation not in self.invocations:
            self.invocations.append(self.invocation)
        self.rows.append(row | {"invocation": self.invocations.index(self.invocation)})
        draft = self.file.with_name(self.file.name + ".part")
        lists = {"invocations": self.invocations, "rows": self.rows}
        parts = (f'"{k}": [\n' + ",\n".join(map(json.dumps, v)) + "\n]" for k, v in lists.items())
        draft.write_text("{" + ", ".join(parts) + "}\n")
        os.replace(draft, self.file)


def environment() -> dict[str, str]:
    """Command line, hardware, versions and time."""
    packages = (f"{name} {version(name)}" for name in ("jax", "jaxlib", "optax"))
    script = f"benchmarks/evidence/{Path(sys.argv[0]).name}"
    return {
        "command": f"python {script} {shlex.join(sys.argv[1:])}".strip(),
        "device": jax.devices()[0].device_kind,
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *packages]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def settings_of(task: Task, kind: str, way: Way, seeds: int, rate: float | None) -> Row:
    """All that the figures of a row depend on; rows to be compared differ in the way alone."""
    rate = learning_rate(task.name, kind) if rate is None else rate
    return {
        "model": task.name, "init": kind, "optimiser": "adamw",
        "learning_rate": rate, "workers": task.n_workers,
        "steps": task.steps, "seeds": seeds, "text": task.digest,
        "platform": jax.default_backend(), **way_settings(way),
    }  # fmt: skip


def learning_rate(model: str, kind: str) -> float:
    """The peak for a model and an initialisation; see `RATES`."""
    return RATES.get(model, {}).get(kind, 1e-3)


def way_settings(way: Way) -> Row:
    """The settings by which a way differs from another one."""
    return {"method": way.method, "topology": way.topology, "options": way.options}


def train_rows(task: Task, way: Way, rows: Iterable[Row], record: Record) -> None:
    """Trains and prints the rows of one program that the record has not."""
    program = make_trainer(task.shape, way, task.n_workers)
    for settings in rows:
        row = record.find(settings)
        if row is None:
            kind, peak, seeds = (settings[name] for name in ("init", "learning_rate", "seeds"))
            start = time.perf_counter()
            found = figures(run_seeds(program, task, kind, peak, seeds))
            row = {
                "settings": settings,
                "bits_per_coord": way.bits_per_coord(task.gradients, task.n_workers),
                "seconds": round(time.perf_counter() - start, 3),
                **found,
            }
            reference = record.find(
                settings | {"method": EXACT, "topology": "native", "options": ""}
            )
            row["summary"] = summarise(row, reference or row)
            record.add(row)
        label = " ".join(settings[name] for name in ("model", "init", "method", "topology"))
        apart = row["summary"]["validation"]
        told = f"{row['bits_per_coord']:.2f} bits, {row['summary']['validation_loss']} nats"
        told += f", {apart['percent']} ± {apart['error']} % from exact ({row['seconds']} s)"
        print(f"{label}: {told}", flush=True)


def main(
    models: Annotated[str, typer.Option(help=f"some of {', '.join(MODELS)}")] = "tiny",
    methods: Annotated[
        str, typer.Option(help="bf16-psum, or a method with its wire bits per coordinate")
    ] = "bf16-psum,dynamiq:5,dynamiq:4,dynamiq-mse:5,mxfp8",
    topologies: Annotated[str, typer.Option(help="some of direct, ring, butterfly")] = "direct",
    inits: Annotated[str, typer.Option(help=f"some of {', '.join(INITS)}")] = ",".join(INITS),
    seeds: Annotated[int, typer.Option(min=1, help="training runs of every row")] = 4,
    steps: Annotated[int | None, typer.Option(min=2, help="default: the model's")] = None,
    workers: Annotated[int, typer.Option(min=2, help="simulated on one device")] = 8,
    rate: Annotated[
        float | None,
        typer.Option("--learning-rate", min=0, help="peak (default: by model, init)"),
    ] = None,
    backend: Annotated[str, typer.Option(help="DynamiQ's kernels: jnp, triton, interpret")] = "jnp",
    json_file: Annotated[
        Path, typer.Option("--json", help="rows are kept here, and read from here")
    ] = Path("runs/training.json"),
) -> None:
    """Trains models with compressed gradients and compares losses with those of exact ones."""
    known = {"--models": (models, MODELS), "--inits": (inits, INITS)}
    for option, (text, names) in known.items():
        if unknown := [name for name in contenders.parts(text) if name not in names]:
            raise typer.BadParameter(f"{option} {unknown[0]!r}: pass some of {', '.join(names)}")
    tasks = []
    for name in contenders.parts(models):
        shape = MODELS[name]
        text = load_corpus(shape.vocab_size)
        tasks.append(make_task(name, shape, workers, steps or shape.steps, text))
    try:
        named = contenders.parts(methods), contenders.parts(topologies), backend
        ways = [(task, way) for task in tasks for way in parse_ways(*named, task.steps)]
        for task, way in ways:
            way.bits_per_coord(task.gradients, workers)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--methods, --topologies") from error
    json_file.parent.mkdir(parents=True, exist_ok=True)
    record = Record(json_file, environment())
    for task, way in ways:
        rows = [settings_of(task, k, way, seeds, rate) for k in contenders.parts(inits)]
        train_rows(task, way, rows, record)


if __name__ == "__main__":
    typer.run(main)
