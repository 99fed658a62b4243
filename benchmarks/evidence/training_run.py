"""One compiled program of `training.py`: methods, optimisers, data, training steps."""

import inspect
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from optax import contrib
from training_model import INITS, MODELS, Shape, Tree, init, is_matrix, loss, stack, unstack

import dynamiq_jax as dq
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.comparators.local_error import LocalError
from dynamiq_jax.optax import liec

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llm_data import load_corpus  # pyright: ignore[reportMissingImports]

AXIS = "data"
MIN_LEAF_SIZE = 4096
"""Smaller leaves are summed exactly, by every method."""

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


def make_optimizer(name: str, steps: int) -> optax.GradientTransformation:
    """Warm-up and cosine decay to a tenth with a peak of 1, behind a clip to norm 1.

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
    return optax.chain(optax.clip_by_global_norm(1.0), makers[name]())


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
    corpus = load_corpus(shape.vocab_size)
    length = shape.seq_len + 1
    starts = np.linspace(0, len(corpus.validation) - length, shape.windows).astype(np.int64)
    windows = corpus.validation[starts[:, None] + np.arange(length)]
    digest = f"{zlib.crc32(corpus.validation, zlib.crc32(corpus.train)):08x}"
    text = jax.device_put(corpus.train)
    return Task(name, shape, steps or shape.steps, n_workers, text, windows, digest)


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
