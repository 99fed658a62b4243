r"""Losses of training with a quantised all-reduce, with paired seeds.

    python benchmarks/evidence/training.py --methods bf16-psum,dynamiq:5,mxfp8 --seeds 2  # CPU
    python benchmarks/evidence/training.py --models tiny,mid,125m --optimisers adamw,sgd,muon,lion \
        --topologies direct,ring,butterfly --seeds 16    # one GPU

Trains small language models (`MODELS`) with several simulated workers on one
device. The library's own `dq.pmean` averages their gradients. Start, tokens and key of the rounding
depend on (seed, step) alone, so that the runs of all methods are paired: every row is compared
seed by seed with the exact mean in f32, which always runs.

Methods are those of `dynamiq-jax error` (``f32`` and ``bf16`` sum uncompressed over the topology),
and

* ``bf16-psum``: `lax.pmean` of all gradients in bf16;
* ``dynamiq-piecewise:5``: floors as in the default, but the levels of least squared error;
* ``dynamiq-memory:3``: the default with error feedback over all hops;
* ``powersgd-memory``, ``arc-top-k-memory:4``, ``clt-k-memory:4``, ``sidco-memory:4``,
  ``topk-chunked-memory:4``: these with error feedback;
* ``dynamiq-axis:4``, ``dynamiq-dither-axis:4``: with ``scale_axis="auto"``;
* ``dynamiq-dither-axis-companded:4``, ``dynamiq-dither-axis-floor2:3``: the latter with other
  levels, and with floors of 2 bits in all stages;
* ``dynamiq-dither-companded:4``, ``dynamiq-dither-uniform:4``: as `dynamiq-dither`, with other
  levels.

Every finished row is kept in ``--json`` at once. Rows that the file has are not trained again, so
that an interrupted command goes on where it was.
"""

import inspect
import json
import math
import os
import platform
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import Array, lax
from optax import contrib

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.comparators.local_error import LocalError
from dynamiq_jax.optax import liec

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llm_data import Corpus, load_corpus  # pyright: ignore[reportMissingImports]

Tree = Any
Row = dict[str, Any]

RATES = {
    ("adamw", "gpt2"): 1e-3, ("adamw", "unit"): 1e-3, ("adamw", "unit", "tiny"): 2e-3,
    ("adamw", "gpt2", "125m"): 6e-4, ("adamw", "unit", "125m"): 6e-4,
    ("sgd", "gpt2"): 0.3, ("sgd", "unit"): 0.3,
    ("muon", "gpt2"): 8e-3, ("muon", "unit"): 8e-3,
    ("lion", "gpt2"): 8e-4, ("lion", "unit"): 8e-4,
}  # fmt: skip
"""Peak learning rates by (optimiser, initialisation), or by those and the model."""

CURVE_WINDOW = 25
"""Steps that a point of the kept training curve averages."""
EARLY_STEPS = 50
"""Steps after the first quarter of the training, which "early" averages."""
CPU_SEEDS = 2
"""That one program trains by default on a CPU."""
FOLDER = "benchmarks/evidence"
LABEL = ("model", "init", "optimiser", "method", "topology")
"""Settings that name a row."""


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
    remat: bool = False
    """Recompute each block in the backward pass: less memory, a third more work."""
    attention: Literal["xla", "cudnn"] = "xla"
    """How `jax.nn.dot_product_attention` computes it; cuDNN's wants bf16."""


MODELS = {
    "micro": Shape(256, 16, 2, 64, 2, 128, jnp.float32, 2, 20, 64, 8),  # 0.1 M: for tests
    "tiny": Shape(256, 64, 2, 192, 6, 576, jnp.float32, 2, 200, 512, 32),  # 1.1 M, bytes
    "mid": Shape(4096, 256, 8, 384, 6, 1024, jnp.bfloat16, 4, 400, 256, 8),  # 17 M
    "125m": Shape(24576, 1024, 12, 768, 12, 2048, jnp.bfloat16, 2, 200, 64, 1, remat=True),
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
    scales = {name: jnp.ones((layers, dim)) for name in ("attention_norm", "mlp_norm")}
    return outer | {"blocks": tree | scales}


def unstack(tree: Tree) -> Tree:
    """The tree with one leaf per layer and matrix; `stack` undoes it."""
    n_layers = jax.tree.leaves(tree["blocks"])[0].shape[0]
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(n_layers)]
    return tree | {"blocks": layers}


def stack(tree: Tree) -> Tree:
    """The tree with the layers' leaves stacked."""
    return tree | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *tree["blocks"])}


def is_matrix(params: Tree) -> Tree:
    """True for matrices, stacked or not, False for the scales of norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


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


def _block(shape: Shape, x: Array, layer: Tree) -> tuple[Array, None]:
    """One decoder layer on ``[B, T, dim]``, as `lax.scan` takes it."""
    y = _norm(x, layer["attention_norm"])
    q, k, v = (times(y, layer, name).reshape(*y.shape[:2], shape.n_heads, -1) for name in "qkv")
    attended = jax.nn.dot_product_attention(
        _rotate(q), _rotate(k), v, is_causal=True, implementation=shape.attention
    )
    x = x + times(attended.reshape(x.shape), layer, "o")
    y = _norm(x, layer["mlp_norm"])
    hidden = jax.nn.silu(times(y, layer, "gate")) * times(y, layer, "up")
    return x + times(hidden, layer, "down"), None


def loss(shape: Shape, params: Tree, tokens: Array) -> Array:
    """Mean cross-entropy in nats per token; ``tokens`` is ``int32[batch, seq_len + 1]``."""
    # Looked up in f32: gradients of rows that a batch uses often are summed in f32, too.
    x = params["embed"][tokens[:, :-1]].astype(shape.dtype)
    block = partial(_block, shape)
    block = jax.checkpoint(block) if shape.remat else block
    if isinstance(params["blocks"], list):  # as `unstack` gives them
        for layer in params["blocks"]:
            x, _ = block(x, layer)
    else:
        x, _ = lax.scan(block, x, params["blocks"])
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
DITHER_AXIS = partial(dq.DynamiQ, dither=True, format=dq.Format(scale_axis="auto"))


def _around(method: Any, kind: Any = "ef14", **options: Any) -> dq.ErrorFeedback:
    """Error feedback around a method that has no choice of bits."""
    return dq.ErrorFeedback(method(**options), kind=kind)


def _liec(bits: float = 4, **options: Any) -> LocalError:
    """The method by which `dynamiq_jax.optax.liec` sends gradients, around MinMax of ``bits``."""
    return LocalError(dq.comparators.MinMax(bits=int(bits), **options))


METHODS: Mapping[str, Callable[..., Any]] = {
    **contenders.METHODS,
    "dynamiq-piecewise": partial(dq.DynamiQ, format=dq.Format(levels="piecewise")),
    "dynamiq-memory": partial(contenders.remembered, "ef14"),
    "mxfp4-stochastic": partial(dq.comparators.MXFP4, rounding="stochastic"),
    "mxfp4-ef14": partial(_around, dq.comparators.MXFP4),  # biased: it rounds to nearest
    "mxfp4-ef21": partial(_around, dq.comparators.MXFP4, "ef21"),
    "mxfp4-ef21m": partial(_around, dq.comparators.MXFP4, "ef21m"),
    "mxfp4-econtrol": partial(_around, dq.comparators.MXFP4, "econtrol"),
    "dynamiq-axis": partial(dq.DynamiQ, format=dq.Format(scale_axis="auto")),
    "dynamiq-dither-axis": DITHER_AXIS,
    "dynamiq-dither-axis-companded": partial(
        DITHER_AXIS, format=dq.Format(scale_axis="auto", levels="companded")
    ),
    "dynamiq-dither-axis-floor2": partial(DITHER_AXIS, floor=2),
    "dynamiq-dither-companded": partial(
        dq.DynamiQ, dither=True, format=dq.Format(levels="companded")
    ),
    "dynamiq-dither-uniform": partial(dq.DynamiQ, dither=True, format=dq.Format(levels="uniform")),
    "dynamiq-1-2-3": partial(dq.DynamiQ, widths=(1, 2, 3), floor=None),
    "dynamiq-0-2-4": partial(dq.DynamiQ, widths=(0, 2, 4), floor=None),
    "dynamiq-64": partial(dq.DynamiQ, format=dq.Format(group_size=64)),
    "dynamiq-dither-1-2-3": partial(dq.DynamiQ, widths=(1, 2, 3), floor=None, dither=True),
    "clt-k-memory": partial(contenders.remembered, "ef14", contenders.METHODS["clt-k"]),
    "topk-chunked-memory": partial(
        contenders.remembered, "ef14", contenders.METHODS["topk-chunked"]
    ),
    "sidco-memory": partial(contenders.remembered, "ef14", contenders.METHODS["sidco"]),
    "powersgd-memory": partial(_around, dq.comparators.PowerSGD),
    "arc-top-k-memory": partial(contenders.remembered, "ef14", contenders.arc_top_k),
    "liec": _liec,
}

PERIODS: Mapping[str, int] = {"liec": 32}
"""Methods whose result is another one on every worker, so that every worker has a model of its own,
and after how many steps the mean of these models, in f32, takes their place."""


def period_of(method: str) -> int:
    """The entry of `PERIODS` for a method's name, with or without bits; 0 without local steps."""
    return PERIODS.get(method.strip().partition(":")[0], 0)


OPTIMISERS = ("adamw", "sgd", "muon", "lion")


# --- Ways to average gradients --------------------------------------------------------------------


class Mean(NamedTuple):
    """One way to average gradients over the workers."""

    method: str
    topology: str
    options: str
    """Options that change the result, besides the names."""
    average: Callable[[Tree, Array, Any], tuple[Tree, Any]]
    """(one worker's gradients, key, its state) -> their mean over `AXIS`, the next state."""
    bits_per_coord: Callable[[Tree, int], float]
    """(gradients, workers) -> wire bits, in units in which a bf16 all-reduce takes 16."""
    init: Callable[[Tree, int], Any] = lambda grads, n_workers: ()
    """(gradients, workers) -> all workers' first state."""
    period: int = 0
    """As in `PERIODS`; 0: all workers have the same model."""
    spread: Callable[[Tree, Array, int], Tree] | None = None
    """(masters - copy, key, workers) -> what all add to the copy; `None`: there is no copy."""
    copy_dtype: Any = jnp.float32
    copy_kept: bool = True
    """Whether the copy starts from that of the step before, or from zero."""


def exact_mean() -> Mean:
    """The f32 mean."""

    def average(grads: Tree, key: Array, state: Any) -> tuple[Tree, Any]:
        return lax.pmean(grads, AXIS), state

    return Mean(EXACT, "native", "", average, lambda g, n: 32.0)


def bf16_mean() -> Mean:
    """`lax.pmean` in bf16, and back to the gradients' dtype."""

    def average(grads: Tree, key: Array, state: Any) -> tuple[Tree, Any]:
        narrow = lax.pmean(jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), AXIS)
        return jax.tree.map(lambda m, g: m.astype(g.dtype), narrow, grads), state

    return Mean(BF16, "native", "", average, lambda g, n: 16.0)


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


def library_mean(text: str, topology: str, backend: str) -> Mean:
    """The library's mean by the method and over the topology of these names.

    Raises:
      ValueError: one of them is not known.
    """
    name, method = parse_method(text, backend)
    route = None if topology == "native" else contenders.parse_topology(topology)
    if isinstance(route, dq.Ring):
        route = replace(route, unroll_up_to=1)  # compiles faster, gives the same bits
    request = dq.Compression(method, topology=route, min_leaf_size=MIN_LEAF_SIZE, min_bucket_size=1)

    def average(grads: Tree, key: Array, state: Any) -> tuple[Tree, Any]:
        return dq.reduce(grads, AXIS, method=request, key=key, state=state)[:2]

    def init_state(grads: Tree, n_workers: int) -> Any:
        return request.init_state(grads, n_workers, stacked=True)

    period = period_of(name)

    def bits_per_coord(grads: Tree, n_workers: int) -> float:
        own = request.explain(grads, n_workers, verbose=False).bits_per_coord
        return own + (32 / period if period else 0)

    options = f"{contenders.in_full(method)} {contenders.in_full(route)}" + (
        f" period={period}" if period else ""
    )
    return Mean(name, topology, options, average, bits_per_coord, init_state, period)


def sharded_mean(text: str, topology: str, backend: str) -> Mean:
    """Sharded updates, GRADIENTS/DIFFERENCES, with /bf16 or /whole after it.

    A method, or "exact", scatters gradients to the owners of slices. Another one gathers how much
    the owners' masters differ from the copy that all workers have, in f32 or bf16. With "whole" it
    gathers the parameters themselves, as FSDP does.

    Raises:
      ValueError: a part is not known.
    """
    scattered, gathered, *copy = text.strip().split("/")
    if copy not in ([], ["bf16"], ["whole"]):
        raise ValueError(f"method {text!r}: pass GRADIENTS/DIFFERENCES, and /bf16 or /whole")
    requests: list[Any] = []
    for part in (scattered, gathered):
        if part == EXACT:
            requests.append(None)
            continue
        method = parse_method(part, backend)[1]
        route = None if len(requests) else contenders.parse_topology(topology)
        limits = {"min_leaf_size": MIN_LEAF_SIZE, "min_bucket_size": 1, "min_bucket_bytes": 0}
        requests.append(dq.Compression(method, topology=route, **limits))
    scatter, gather = requests

    def average(grads: Tree, key: Array, state: Any) -> tuple[Tree, Any]:
        if scatter is None:
            return lax.pmean(grads, AXIS), state
        own = dq.psum_scatter(grads, AXIS, tiled=True, method=scatter, key=key)
        whole = jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), own)
        return jax.tree.map(lambda x: x / lax.axis_size(AXIS), whole), state

    def spread(differences: Tree, key: Array, n_workers: int) -> Tree:
        if gather is None:
            return differences

        def own(_: Array) -> Tree:
            def mine(x: Array) -> Array:
                rows = x.shape[0] // n_workers
                return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * rows, rows)

            slices = jax.tree.map(mine, differences)
            return dq.all_gather(slices, AXIS, tiled=True, method=gather, key=key)

        every = jax.vmap(own, axis_name=AXIS)(jnp.arange(n_workers))
        return jax.tree.map(lambda x: x[0], every)

    def bits_per_coord(grads: Tree, n_workers: int) -> float:
        return sum(32.0 if r is None else r.method.bits for r in requests) / 2

    options = " / ".join(contenders.in_full(r and r.method) for r in requests)
    dtype = jnp.bfloat16 if copy == ["bf16"] else jnp.float32
    return Mean(
        text.strip(), topology, options, average, bits_per_coord, spread=spread, copy_dtype=dtype,
        copy_kept=copy != ["whole"],
    )  # fmt: skip


def parse_means(methods: Sequence[str], topologies: Sequence[str], backend: str) -> list[Mean]:
    """The exact mean, and what the command line asks for.

    Raises:
      ValueError: a method or a topology is not known.
    """
    found = [exact_mean()]
    for text in methods:
        if text == BF16:
            found.append(bf16_mean())
        elif text != EXACT:
            routes = topologies
            if "/" not in text and (contenders.native_only(text) or period_of(text)):
                routes = ["native"]
            mean = sharded_mean if "/" in text else library_mean
            found += [mean(text, route, backend) for route in routes]
    return found


# --- Training -------------------------------------------------------------------------------------


def make_optimizer(
    name: str, steps: int, max_norm: float | None = MAX_NORM
) -> optax.GradientTransformation:
    """Warm-up and cosine decay to a tenth with a peak of 1, behind a clip to ``max_norm``.

    The caller multiplies its updates by the peak learning rate, in which they are linear. AdamW
    and Lion decay matrices by 0.1, SGD decays nothing. Muon takes the matrices of the blocks,
    with decay and with updates as large as Adam's; the rest is left to Adam, without decay.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(steps // 10, 1), steps, 0.1)
    decay: dict[str, Any] = {"weight_decay": 0.1, "mask": is_matrix}

    def stacked_matrices(params: Tree) -> Tree:
        numbers = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(lambda p: numbers if p.ndim == 3 else None, params)

    def muon() -> optax.GradientTransformation:
        return contrib.muon(
            rate, weight_decay=0.1, consistent_rms=0.2, adam_b1=0.9, adam_b2=0.95,
            muon_weight_dimension_numbers=stacked_matrices,
        )  # fmt: skip

    makers = {
        "adamw": lambda: optax.adamw(rate, b1=0.9, b2=0.95, **decay),
        "sgd": lambda: optax.sgd(rate, momentum=0.9),
        "muon": muon,
        "lion": lambda: optax.lion(rate, **decay),
    }
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
    return optax.chain(clip, makers[name]())


def has_muon() -> bool:
    """Whether the installed optax has a Muon that takes stacked matrices."""
    options = inspect.signature(contrib.muon).parameters if hasattr(contrib, "muon") else ()
    return {"consistent_rms", "muon_weight_dimension_numbers"} <= set(options)


def large_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves that methods compress, by name."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return {name: leaf for name, leaf in named.items() if leaf.size >= MIN_LEAF_SIZE}


def squares(tree: Tree) -> Array:
    """f32[leaves]: the squared norm of each leaf that methods compress."""
    return jnp.stack([jnp.sum(jnp.square(x)) for x in large_leaves(tree).values()])


def worker_tokens(text: Array, starts: Array, shape: Shape, n_workers: int) -> Array:
    """Every worker's windows of the text, from where they start: i32[n, sequences, seq_len + 1]."""
    tokens = text[starts[:, None] + jnp.arange(shape.seq_len + 1)[None]]
    return tokens.reshape(n_workers, -1, shape.seq_len + 1)


def make_trainer(
    shape: Shape, optimiser: str, mean: Mean, n_workers: int, steps: int
) -> Callable[..., dict[str, Array]]:
    """Returns the program that trains one model for every seed.

    Its arguments: index of the initialisation, peak learning rate, seeds i32[S], the windows'
    starts i32[S, steps, n_workers * sequences], the training text i32[tokens], the validation
    windows i32[windows, seq_len + 1]. It returns the validation loss [S], the training losses
    [S, steps], and of every leaf that methods compress the squared error and the squared norm of
    the mean, [S, steps, leaves]. Where every worker has a model of its own the validation loss is
    that of the models' mean, and the error that of the mean of results.
    """
    optimizer = make_optimizer(optimiser, steps)

    def mean_of(copies: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), copies)

    def copied(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (n_workers, *jnp.shape(x))), tree)

    def worker(params: Tree, tokens: Array, key: Array, memory: Any):
        own_loss, grads = jax.value_and_grad(partial(loss, shape))(params, tokens)
        grads = unstack(grads)
        averaged = mean.average(grads, key, memory)
        return lax.pmean(own_loss, AXIS), lax.pmean(grads, AXIS), averaged

    def meet(step: Array, params: Tree) -> Tree:
        every = partial(liec.average_every, mean.period, step, axis_name=AXIS)
        return jax.vmap(every, axis_name=AXIS)(params)

    apart = 0 if mean.period else None  # the axis of workers' own models
    workers = jax.vmap(worker, (apart, 0, None, 0), (None, None, 0), axis_name=AXIS)

    def train(kind, peak, seed, starts, text, windows) -> dict[str, Array]:
        start_key, key = jax.random.split(jax.random.key(seed))

        def update(params, state, grads):
            updates, state = optimizer.update(stack(grads), state, params)
            return jax.tree.map(lambda p, u: p + peak * u, params, updates), state

        def moved(masters, copy, key):
            if not mean.copy_kept:
                copy = jax.tree.map(jnp.zeros_like, copy)

            narrow = mean.copy_dtype
            left = jax.tree.map(
                lambda m, c: (m - c.astype(jnp.float32)).astype(narrow), masters, copy
            )
            added = stack(mean.spread(unstack(left), jax.random.fold_in(key, 1), n_workers))
            return jax.tree.map(lambda c, a: c + a, copy, added)

        def step(carry, now):
            params, state, memory = carry
            number, own = now
            tokens = worker_tokens(text, own, shape, n_workers)
            step_key = jax.random.fold_in(key, number)
            used = params
            if mean.spread is not None:
                params, copy = params
                used = jax.tree.map(lambda x: x.astype(jnp.float32), copy)
            mean_loss, exact, (copies, memory) = workers(used, tokens, step_key, memory)
            if mean.period:
                found = mean_of(copies)
                params, state = jax.vmap(update)(params, state, copies)
                params = meet(number + 1, params)
            else:
                found = jax.tree.map(lambda x: x[0], copies)
                params, state = update(params, state, found)
            if mean.spread is not None:
                params = params, moved(params, copy, step_key)
            error = jax.tree.map(jnp.subtract, found, exact)
            measured = {"losses": mean_loss, "errors": squares(error), "norms": squares(exact)}
            return (params, state, memory), measured

        params = init(shape, start_key, kind)
        memory = mean.init(unstack(params), n_workers)
        carry = params, optimizer.init(params), memory
        if mean.period:
            carry = *copied(carry[:2]), memory
        if mean.spread is not None:
            copy = jax.tree.map(lambda x: x.astype(mean.copy_dtype), params)
            carry = (params, copy), *carry[1:]
        (params, *_), measured = lax.scan(step, carry, (jnp.arange(steps), starts))
        if mean.period:
            params = mean_of(params)
        if mean.spread is not None:
            params = params[1]
        rows = windows.reshape(-1, shape.sequences, shape.seq_len + 1)
        validation = jnp.mean(lax.map(partial(loss, shape, params), rows))
        return measured | {"validation": validation}

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
        return jax.eval_shape(lambda: unstack(init(self.shape, jax.random.key(0), jnp.int32(0))))


def load_task(name: str, n_workers: int, steps: int | None) -> Task:
    """The model called ``name`` with its text."""
    shape = MODELS[name]
    return make_task(name, shape, n_workers, steps or shape.steps, load_corpus(shape.vocab_size))


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


def arguments(task: Task, kind: str, peak: float, seeds: Sequence[int]) -> tuple:
    """Arguments of the program that `make_trainer` makes."""
    starts = np.stack([window_starts(task, seed) for seed in seeds])
    index, own = np.int32(INITS.index(kind)), np.asarray(seeds, np.int32)
    return index, np.float32(peak), own, starts, task.text, task.windows


def batches_of_seeds(seeds: int, at_once: int) -> list[list[int]]:
    """Equal shares of the seeds; the last one is filled up with the first seeds again."""
    count = -(-seeds // at_once)
    size = -(-seeds // count)
    return [[i % seeds for i in range(c * size, (c + 1) * size)] for c in range(count)]


def run_seeds(
    program: Callable, task: Task, kind: str, peak: float, seeds: int, at_once: int
) -> dict[str, np.ndarray]:
    """Runs a compiled program for all seeds; see `make_trainer` for what it returns."""
    parts = [
        jax.device_get(program(*arguments(task, kind, peak, own)))
        for own in batches_of_seeds(seeds, at_once)
    ]
    return {name: np.concatenate([part[name] for part in parts])[:seeds] for name in parts[0]}


# --- Figures --------------------------------------------------------------------------------------


def leaf_errors(errors: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """[S, leaves]: mean over steps of |error|^2 / |exact|^2, both given as [S, steps, leaves].

    A step in which a leaf's exact mean is zero has no relative error and counts as 0.
    """
    errors, norms = np.asarray(errors, np.float64), np.asarray(norms, np.float64)
    return np.divide(errors, norms, out=np.zeros_like(errors), where=norms != 0).mean(axis=1)


def figures(result: Mapping[str, np.ndarray], leaves: Sequence[str]) -> Row:
    """Figures of a row's runs, for every seed; see `training_run.make_trainer`."""
    losses = np.asarray(result["losses"], np.float64)
    steps = losses.shape[1]
    by_leaf = leaf_errors(result["errors"], result["norms"])
    whole = (np.sum(result[name], axis=2, keepdims=True) for name in ("errors", "norms"))
    windows = [losses[:, i : i + CURVE_WINDOW].mean(axis=1) for i in range(0, steps, CURVE_WINDOW)]
    found = {
        "validation_loss": result["validation"],
        "early_loss": losses[:, steps // 4 : steps // 4 + EARLY_STEPS].mean(axis=1),
        "training_loss": np.stack(windows, axis=1),
        "vnmse": leaf_errors(*whole)[:, 0],
        "worst_leaf": by_leaf.max(axis=1),
    }
    plain = {name: _plain(np.asarray(value, np.float64)) for name, value in found.items()}
    return plain | {"worst_leaf_name": leaves[int(np.argmax(by_leaf.mean(axis=0)))]}


def _plain(values: np.ndarray) -> Any:
    """Lists for JSON, which has no NaN and no infinity: `None` stands for both."""
    if values.ndim:
        return [_plain(value) for value in values]
    return float(values) if np.isfinite(values) else None


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
    means = {}
    for name in ("validation_loss", "vnmse", "worst_leaf"):
        mean = float(np.mean(np.asarray(row[name], np.float64)))
        means[name] = mean if math.isfinite(mean) else None
    return means | {
        "validation": difference(row["validation_loss"], exact["validation_loss"]),
        "early": difference(row["early_loss"], exact["early_loss"]),
    }


def compared(row: Row, name: str) -> str:
    """A row's difference in % from the exact row, with its standard error."""
    figure = row["summary"][name]
    if figure["percent"] is None:
        return "diverged"
    error = "-" if figure["error"] is None else f"{figure['error']:.3f}"
    return f"{figure['percent']:+.3f} ± {error}"


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
    return {
        "command": shlex.join(["python", f"{FOLDER}/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *packages]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def learning_rate(optimiser: str, kind: str, model: str) -> float:
    """The peak for an optimiser, an initialisation and a model; see `RATES`."""
    return RATES.get((optimiser, kind, model), RATES[optimiser, kind])


def settings_of(
    task: Task, optimiser: str, kind: str, mean: Mean, seeds: int, rate: float | None
) -> Row:
    """All that the figures of a row depend on; rows to be compared differ in the mean alone."""
    rate = learning_rate(optimiser, kind, task.name) if rate is None else rate
    return {
        "model": task.name, "init": kind, "optimiser": optimiser,
        "learning_rate": rate, "workers": task.n_workers,
        "steps": task.steps, "seeds": seeds, "text": task.digest,
        "platform": jax.default_backend(), **_mean_settings(mean),
    }  # fmt: skip


def _mean_settings(mean: Mean) -> Row:
    return {"method": mean.method, "topology": mean.topology, "options": mean.options}


def train_row(
    program: Callable, task: Task, mean: Mean, settings: Row, at_once: int, record: Record
) -> Row:
    """Trains all seeds of a row and compares them with the exact row."""
    exact = record.find(settings | _mean_settings(exact_mean()))
    start = time.perf_counter()
    kind, peak, seeds = (settings[name] for name in ("init", "learning_rate", "seeds"))
    result = run_seeds(program, task, kind, peak, seeds, at_once)
    row = {
        "settings": settings,
        "bits_per_coord": mean.bits_per_coord(task.gradients, task.n_workers),
        "seconds": round(time.perf_counter() - start, 3),
        **figures(result, list(large_leaves(task.gradients))),
    }
    return row | {"summary": summarise(row, exact or row)}


def train_rows(
    task: Task, optimiser: str, mean: Mean, rows: Iterable[Row], at_once: int, record: Record
) -> None:
    """Trains and prints the rows of one program that the record has not."""
    program = make_trainer(task.shape, optimiser, mean, task.n_workers, task.steps)
    for settings in rows:
        row = record.find(settings)
        if row is None:
            row = train_row(program, task, mean, settings, at_once, record)
            record.add(row)
        label = " ".join(settings[name] for name in LABEL)
        told = f"{row['bits_per_coord']:.2f} bits, {row['summary']['validation_loss']} nats"
        print(f"{label}: {told}, {compared(row, 'validation')} % ({row['seconds']} s)", flush=True)


def main(
    models: Annotated[str, typer.Option(help=f"some of {', '.join(MODELS)}")] = "tiny",
    methods: Annotated[
        str, typer.Option(help="bf16-psum, or a method with its wire bits per coordinate")
    ] = "bf16-psum,dynamiq:5,dynamiq:4,dynamiq-mse:5,mxfp8",
    topologies: Annotated[str, typer.Option(help="some of direct, ring, butterfly")] = "direct",
    inits: Annotated[str, typer.Option(help=f"some of {', '.join(INITS)}")] = ",".join(INITS),
    optimisers: Annotated[str, typer.Option(help=f"some of {', '.join(OPTIMISERS)}")] = "adamw",
    seeds: Annotated[int, typer.Option(min=1, help="training runs of every row")] = 4,
    steps: Annotated[int | None, typer.Option(min=2, help="default: the model's")] = None,
    workers: Annotated[int, typer.Option(min=2, help="simulated on one device")] = 8,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="peak (default: by optimiser and initialisation)")
    ] = None,
    backend: Annotated[str, typer.Option(help="DynamiQ's kernels: jnp, triton, interpret")] = "jnp",
    seeds_at_once: Annotated[
        int | None, typer.Option(min=1, help="in one program (default: the model's; on CPU 2)")
    ] = None,
    json_file: Annotated[
        Path, typer.Option("--json", help="rows are kept here, and read from here")
    ] = Path("runs/training.json"),
) -> None:
    """Trains models with compressed gradients and compares losses with those of exact ones."""
    known = {"--models": (models, MODELS), "--inits": (inits, INITS)}
    known["--optimisers"] = optimisers, OPTIMISERS
    for option, (text, names) in known.items():
        if unknown := [name for name in contenders.parts(text) if name not in names]:
            raise typer.BadParameter(f"{option} {unknown[0]!r}: pass some of {', '.join(names)}")
    if "muon" in optimisers and not has_muon():
        raise typer.BadParameter(f"--optimisers muon: optax {version('optax')} lacks it; upgrade")
    tasks = [load_task(name, workers, steps) for name in contenders.parts(models)]
    try:
        means = parse_means(contenders.parts(methods), contenders.parts(topologies), backend)
        for task in tasks:
            _ = [mean.bits_per_coord(task.gradients, workers) for mean in means]
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--methods, --topologies") from error
    json_file.parent.mkdir(parents=True, exist_ok=True)
    record = Record(json_file, environment())
    for task in tasks:
        on_cpu = jax.default_backend() == "cpu"
        at_once = seeds_at_once or (CPU_SEEDS if on_cpu else task.shape.seeds_at_once)
        for optimiser in contenders.parts(optimisers):
            for mean in means:
                rows = [
                    settings_of(task, optimiser, kind, mean, seeds, learning_rate)
                    for kind in contenders.parts(inits)
                ]
                train_rows(task, optimiser, mean, rows, at_once, record)


if __name__ == "__main__":
    typer.run(main)
