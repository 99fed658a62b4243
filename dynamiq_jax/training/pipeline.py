"""A pipeline of functions whose gradients are reduced while the backward pass goes on.

A reduction has several rounds of collectives (`jaxprs.phases`). There are barriers between
the backward passes of two functions. Payloads that have arrived wait for the earlier backward pass;
the later backward pass waits for the kernels that compute the next payloads. So each round of a
reduction overlaps with the backward pass of one function, and reductions of several functions run
at the same time::

    backward of function    9       8       7       6       5
    of function 10        stats   first  second
    of function 9                 stats   first  second
    of function 8                         stats   first  second

If parameters are shards, a function's parameters are gathered in the forward pass during the
previous function, and again in the backward pass during the next function, unless the payloads were
kept.

If differences of parameters are `Pending` (sharded updates), they are gathered in the forward pass
in the same way, and added to the copies::

    forward of function              0       1       2
    differences of function    0     1       2       3

The backward pass needs no gather: it uses the copies that the caller gets back.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from dynamiq_jax.compression.compression import AnyPolicy, as_compression, as_parameters
from dynamiq_jax.compression.shards import gathers_of
from dynamiq_jax.core.axis import Axis, AxisName, key_words
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.former import formerly
from dynamiq_jax.jaxprs.phases import Progress
from dynamiq_jax.reduction.reduction import Inner, Pending, Reduction, noted, noting
from dynamiq_jax.training.in_backward import Reducer, constant_copies
from dynamiq_jax.training.interleaved import (
    Beside,
    Gathers,
    Pipeline,
    Seeds,
    Traces,
    announce,
    arrive,
    send,
    without,
)
from dynamiq_jax.training.layers import Layers, Scanned
from dynamiq_jax.training.scans import check_once, marked

Function = Callable[[Any, Any], Any]
"""(own parameters, x) -> the next function's x."""


@formerly(gather=as_parameters)
def overlapped(
    functions: Sequence[Function],
    params: Sequence[Any],
    x: Any,
    axis_name: AxisName,
    *,
    op: Op = "mean",
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    specs: Sequence[Any] | None = None,
    copies: Sequence[Any] | None = None,
    pending: Pending | None = None,
    reshard_after_forward: bool = True,
) -> Any:
    """One worker's loss as successive functions; reductions overlap with the backward pass.

    It runs inside of maps, on Auto and on Explicit axes: the functions take this worker's examples,
    and the last function returns a mean over these (a sum with ``op="sum"``), not averaged over
    workers.

    It computes ``x = f(p, x)`` for every function and its parameters, and returns the last ``x``.
    In the backward pass the gradients of a function are reduced, compressed, while the backward
    pass of the functions before it goes on:

        functions = [embed, *[block] * n_layers, head_and_loss]
        loss = dq.overlapped(functions, [p["embed"], *p["blocks"], p["head"]], tokens, "data")

    XLA's scheduler does not do this for gradients that are reduced after `jax.grad`: it puts
    reductions of several steps after all products of the weights' gradients. Here the order is part
    of the program. A function's gradients are complete before the backward pass goes on. Their
    statistics are summed during the backward pass of the next function, their first payloads are
    sent during the one after it, and so on. Compile with `dynamiq_jax.jit`; otherwise transfers
    start late.

    The rules of `fsdp` also apply here. If two functions use the same parameters,
    pass these to `fsdp` once, before the pipeline. Each function's gradients have
    separate buckets, so a function should be a layer or more, not a norm. Wrap functions in
    `jax.checkpoint` to compute them again instead of keeping the values that their backward pass
    needs. Pass other inputs of functions, such as labels, in ``x``: JAX refuses traced values that
    functions close over if these are differentiated, or if the whole loss is inside of another
    `jax.jit`, `jax.checkpoint` or scan.

    **FSDP.** Parameters whose ``specs`` name the axis are this worker's shards. The shards of each
    function are gathered while the previous function runs, and again, with the same bits, during
    the backward pass of the next function. So the parameters of two functions are whole at a time.
    With ``reshard_after_forward=False`` the payloads of all gathers stay in memory until then, 8
    bits per coordinate by default, and nothing is gathered twice. `jax.checkpoint` around a
    function keeps no value that is computed from its parameters. Cast shards before the call: whole
    parameters and gradients have the dtype of the shards. A loss without a derivative gathers the
    functions one by one.

    Args:
      functions: each takes (its parameters, x) and returns the next function's x; any pytrees. A
        `Scanned` function stands for one layer after the other, and its parameters are stacked.
      params: a pytree for every function.
      x: the input of the first function; it may contain integers and other types.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      compression: as for `fsdp`.
      key: as for `psum`; the index of the function is folded in, and that of a scanned layer.
      specs: for every function a tree as for `fsdp`, of stacked leaves for a `Scanned` function:
        ``P(None, "data")``. If axes are automatic, all
        collectives of a reduction are in one round.
      copies: as for `fsdp`, for every function; `None` for a function without copies.
        Functions take the copies, and the gradients of ``params`` are this worker's slices
        (ZeRO-1). A scatter has two of an all-reduce's three rounds.
      pending: ``state.pending`` of ``dq.optax.sharded(..., deferred=True)``. The copies are those
        of the previous step. The differences of each function are gathered while the previous
        function runs, so each function takes the current copies. ``params`` are the masters of all
        functions.
      reshard_after_forward: whether the forward pass keeps only the shards of parameters. `False`
        saves the second gather, and needs memory for all payloads.

    Returns:
      The result of the last function. With ``pending`` a pair: this result, and the current copies,
      a tree like ``copies``, which have no derivative.

    Raises:
      ValueError: the number of params, or of specs, is not that of functions; ``pending`` is not
        from an optimizer over this axis, or has no copies; or as for `fsdp`.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis, gathers = check_axis(axis_name), gathers_of(compression)
    told = _checked(functions=functions, params=params, specs=specs, copies=copies)
    total = Reduction(axis, as_compression(compression), op, gathers=gathers, overlaps=True)
    told["params"] = noted(told["params"], total, "dq.overlapped", told["specs"])
    if pending is not None:
        _check_pending(pending, axis, told["copies"])
    parts, heard = [], []
    for number, (function, own, spec, copy) in enumerate(zip(*told.values(), strict=True)):
        function = reduced_once(function, total, number, heard)
        parts.append(part_of(function, total, number, own, specs=spec, copies=copy))
    chain = Chain(axis, tuple(parts), Traces(), reshard_after_forward)
    constants = constant_copies(told["copies"])
    x, current = chain.call(told["params"], constants, x, key_words(key), pending)
    if pending is None:
        return x
    leaves = jax.tree.leaves(lax.stop_gradient(current))
    return x, jax.tree.unflatten(jax.tree.structure(copies), leaves)


def reduced_once(
    function: Function | Scanned, total: Reduction, number: int, heard: list[Inner]
) -> Function | Scanned:
    """The function; it refuses to reduce gradients of its own parameters, which the chain reduces.

    ``heard`` is of all functions of a chain: JAX traces what is alike in them once.
    """
    if isinstance(function, Scanned):
        own = reduced_once(function.function, total, number, heard)
        return dataclasses.replace(function, function=own)

    def note(params: Any, call: Inner) -> Any:
        heard.append(call)
        return marked(params, call)

    @functools.wraps(function, updated=())
    def run(own: Any, x: Any) -> Any:
        with noting(note):
            found = function(own, x)
            program = jax.make_jaxpr(function)(own, x) if heard else None
        # Hardly ever: a call that reduces was heard.
        if program is not None:
            where = f"function {number} of dq.overlapped"
            check_once(program, own, total, where, "dq.overlapped")
        return found

    return run


def _check_pending(pending: Any, axis: Axis, copies: tuple) -> None:
    """Refuses a ``pending`` of another kind, and functions without copies."""
    if not isinstance(pending, Pending):
        raise ValueError(
            f"pending is of type {type(pending).__name__}; pass state.pending, where state is that "
            "of dq.optax.sharded(..., deferred=True)"
        )
    if pending.total.axis != axis:
        raise ValueError(
            f"pending differences are those of axis {pending.total.axis.name!r}, and axis_name is "
            f"{axis.name!r}; pass both the same axis"
        )
    for number, copy in enumerate(copies):
        if copy is None:
            raise ValueError(
                f"pending differences need copies to add them to, and function {number} has none; "
                "pass copies=, the parameters of all functions"
            )


def _checked(functions: Any, **told: Any) -> dict[str, tuple]:
    """The arguments that have one entry for each function, as tuples."""
    told = {"functions": functions, **told}
    for name, given in told.items():
        if isinstance(given, Mapping):
            raise ValueError(f"{name} is a mapping, which has no order; pass a list of its values")
    if callable(functions):
        name = getattr(functions, "__name__", type(functions).__name__)
        raise ValueError(f"functions={name} is one function; pass a list: [function]")
    told["functions"] = tuple(functions)
    count = len(told["functions"])
    found = {k: (None,) * count if given is None else tuple(given) for k, given in told.items()}
    for name, given in found.items():
        if len(given) != count:
            raise ValueError(
                f"{count} functions and {len(given)} {name}: pass one for each function"
            )
    if not count:
        raise ValueError("functions is empty: pass at least one")
    return found


class Single(NamedTuple):
    """A part of `overlapped` that is one function."""

    function: Function
    reducer: Reducer
    """Gathers its shards, and reduces its gradients."""
    number: int

    def seeds(self, seeds: Seeds) -> Seeds:
        """The seeds of all functions, of which one belongs to its number."""
        return seeds

    def start(self, gathers: Gathers, taken: Any) -> Progress | None:
        """The gather of its parameters, or `None`."""
        return gathers.start(taken, self.number)

    def run(self, gathers: Gathers, taken: Any, x: Any) -> tuple[Any, Any]:
        """Its result without a derivative, and its parameters."""
        progress = self.start(gathers, taken)
        # Beside nothing: an evaluation has no pipeline.
        arrive(progress, send(progress, ()))
        whole = taken if progress is None else progress.result
        return self.function(gathers.axis.to_varying(whole), x), whole

    def forward(
        self, gathers: Gathers, taken: Any, mine: Progress | None, x: Any, beside: Beside
    ) -> tuple[Any, Any, Any]:
        """Its result, what `backward` needs, and its parameters."""
        whole = taken if mine is None else mine.result
        x = beside.send(x)
        # Varying, or JAX would sum the gradients of parameters itself.
        x, pull = jax.vjp(self.function, gathers.axis.to_varying(whole), x)
        x = beside.arrive(x)
        if mine is None or gathers.pending is not None:  # the caller keeps current copies whole
            return x, (pull, None, None), whole
        payload = mine.payload if gathers.keeps else None
        return x, (without(pull, whole), taken, payload), whole

    def last_gather(self, gathers: Gathers, kept: Any) -> Progress | None:
        """The gather that the backward pass needs."""
        _, taken, payload = kept
        return gathers.start(taken, self.number, payload)

    def backward(
        self,
        gathers: Gathers,
        kept: Any,
        gather: tuple[Progress | None, Progress | None],
        pipeline: Pipeline,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """A function that gives its reduced gradients in the end, and the gradient of its x."""
        (pull, _, _), (mine, before) = kept, gather
        pull = pull if mine is None else pull(mine.result)
        begun, gradient = pipeline.step(self.reducer, pull, self.number, gradient, before)
        return lambda: self.reducer.joined(begun.result), gradient


class Chain(NamedTuple):
    """The functions of one `overlapped`, with its forward and backward passes."""

    axis: Axis
    parts: tuple[Single | Layers, ...]
    traces: Traces
    """The traces of gathers."""
    reshards: bool

    def call(
        self, params: Any, copies: Any, x: Any, words: Array | None, pending: Pending | None
    ) -> tuple[Any, Any]:
        """As `run`, with its derivative."""
        run = jax.custom_vjp(self.run)
        run.defvjp(self.forward, self.backward)
        return run(params, copies, x, words, pending)

    def run(
        self, params: Any, copies: Any, x: Any, words: Array | None, pending: Pending | None
    ) -> tuple[Any, Any]:
        """The last function's result without a derivative, and the copies if they are pending."""
        taken, current = self._taken(params, copies, pending), []
        ways = self._gathers(self._seeds(words, pending), pending)
        for part, gathers, own in zip(self.parts, ways, taken, strict=True):
            x, whole = part.run(gathers, own, x)
            current.append(whole)
        return x, None if pending is None else tuple(current)

    def forward(
        self, params: Any, copies: Any, x: Any, words: Array | None, pending: Pending | None
    ) -> tuple[Any, Any]:
        """The result of `run`, and the values that the backward pass needs."""
        taken, kept, current = self._taken(params, copies, pending), [], []
        ways = self._gathers(self._seeds(words, pending), pending)
        rows = [*zip(self.parts, ways, taken, strict=True)]
        found = [part.start(gathers, own) for part, gathers, own in rows]
        # The last functions have fewer than three after them.
        later = [*found, None, None, None]
        # The first gather has nothing to be beside; the next two get ready meanwhile.
        x = send(found[0], announce(later[1], later[2], x))
        x = arrive(found[0], x)
        for number, (part, gathers, own) in enumerate(rows):
            beside = Beside(*later[number + 1 : number + 4])
            x, needs, whole = part.forward(gathers, own, found[number], x, beside)
            kept.append(needs)
            current.append(whole)
        return (x, None if pending is None else tuple(current)), (kept, words)

    def backward(self, kept: Any, gradients: Any) -> tuple[Any, None, Any, None, None]:
        """The gradients of the parameters, reduced, and of ``x``; current copies have none."""
        (gradient, _), (kept, words) = gradients, kept
        seeds = self._seeds(words, None)
        pipeline, finals = Pipeline(seeds), []
        rows = [*zip(self.parts, self._gathers(seeds, None), kept, strict=True)]
        found = [part.last_gather(gathers, needs) for part, gathers, needs in rows]
        gradient = arrive(found[-1], send(found[-1], gradient))
        # Beside a function's backward pass the gather of the function before it.
        before = zip(found, [None, *found[:-1]], strict=True)
        for (part, gathers, needs), gather in reversed([*zip(rows, before, strict=True)]):
            final, gradient = part.backward(gathers, needs, gather, pipeline, gradient)
            finals.append(final)
        pipeline.finish()
        # Only now: results take last kernels that `finish` has placed.
        return tuple(final() for final in reversed(finals)), None, gradient, None, None

    def _taken(self, params: Any, copies: Any, pending: Pending | None) -> list[Any]:
        """The inputs of each function or its gather: copies, or parameters if there are none.

        Gathers of differences take pairs of masters and copies; copies are the same on all workers.
        """
        pairs = list(zip(params, copies, strict=True))
        if pending is not None:
            return pairs
        return self.axis.inexact_to_varying([own if copy is None else copy for own, copy in pairs])

    def _seeds(self, words: Array | None, pending: Pending | None) -> Seeds:
        """The seeds of gathers; for differences, from the key of the update that computed them."""
        return Seeds(words if pending is None else pending.words, len(self.parts))

    def _gathers(self, seeds: Seeds, pending: Pending | None) -> list[Gathers]:
        """How each function's parameters are gathered."""
        keeps = not self.reshards and pending is None
        told = self.traces, pending, keeps
        return [Gathers(self.axis, x.reducer, x.seeds(seeds), *told) for x in self.parts]


def part_of(
    function: Function | Scanned, total: Reduction, number: int, params: Any, **options: Any
) -> Single | Layers:
    """A part of a chain; ``options`` are the specs and copies of its parameters."""
    if isinstance(function, Scanned):
        return function.layers(total, number, params, **options)
    reducer = Reducer(total, params, "overlapped", **options)
    return Single(function, reducer, number)
