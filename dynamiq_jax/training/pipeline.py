"""Functions one after another, whose gradients are reduced beside the backward pass: a pipeline.

A reduction takes several rounds of collectives (`training.phases`). Between the backward passes
of two functions stand two barriers: what has arrived waits for the one before, the one after waits
for the kernels that make of it what is sent next. So each round of a reduction travels beside the
backward pass of one function, and reductions of several functions are under way at a time::

    backward of function    9       8       7       6       5
    of function 10        stats   first  second
    of function 9                 stats   first  second
    of function 8                         stats   first  second

Parameters that are shards are gathered in the forward pass beside the function before theirs, and
again in the backward pass beside the function after theirs, unless the payloads were kept.

Differences of parameters that are `Pending` (sharded updates) are gathered in the forward pass in
the same way, and added to the copies::

    forward of function              0       1       2
    differences of function    0     1       2       3

The backward pass needs no gather: what it takes of copies is what the caller gets back.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from dynamiq_jax.collectives.pending import Pending
from dynamiq_jax.collectives.reduction import Reduction, gathers_of
from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.core.seeds import key_words
from dynamiq_jax.methods import Method
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.training.in_backward import Reducer, constant_copies
from dynamiq_jax.training.interleaved import Pipeline, Seeds, Traces, announce, arrive, send
from dynamiq_jax.training.phases import Progress

Function = Callable[[Any, Any], Any]
"""(own parameters, x) -> the next function's x."""


def sequential(
    functions: Sequence[Function],
    params: Sequence[Any],
    x: Any,
    axis_name: AxisName,
    *,
    op: Op = "mean",
    compression: Compression | Method | ByPath | None = None,
    key: Array | None = None,
    specs: Sequence[Any] | None = None,
    gather: Compression | Method | ByPath | None = None,
    copies: Sequence[Any] | None = None,
    pending: Pending | None = None,
    reshard_after_forward: bool = True,
    method: Compression | Method | ByPath | None = None,
) -> Any:
    """One worker's loss as functions in a row; gradients are reduced beside the backward pass.

    It runs inside of maps, on Auto and on Explicit axes: the functions take this worker's examples,
    and the last one returns a mean over these (a sum with ``op="sum"``), not averaged over workers.

    ``x = f(p, x)`` for every function and its parameters, and the last ``x`` is returned. In the
    backward pass the gradients of a function are reduced, compressed, while the backward pass of
    those before it goes on:

        functions = [embed, *[block] * n_layers, head_and_loss]
        loss = dq.sequential(functions, [p["embed"], *p["blocks"], p["head"]], tokens, "data")

    XLA's scheduler does not do this for gradients that are reduced after `jax.grad`: it puts
    reductions of several steps after all products of the weights' gradients. Here the order is part
    of the program, a pipeline. A function's gradients are complete before the backward pass goes
    on. Their statistics travel beside the backward pass of the next function, their first payloads
    beside the one after it, and so on. Compile with `dynamiq_jax.jit`, or transfers begin late.

    All that `reduce_in_backward` says holds; parameters that two functions use pass once, above, by
    `reduce_in_backward`. Each function's gradients are buckets of their own: of a layer or more,
    not of a norm. Wrap functions in `jax.checkpoint` to compute them again rather than keep what
    their backward pass needs. What functions need beside their parameters, as labels, travels in
    ``x``: JAX refuses traced values that they close over where these are differentiated, and where
    the whole loss is inside of another `jax.jit`, `jax.checkpoint` or scan.

    **FSDP.** Parameters whose ``specs`` name the axis are this worker's shards. Each function's are
    gathered while the function before it runs, and again, the same bits, while the backward pass
    takes the function after it. So two functions' parameters are whole at a time. With
    ``reshard_after_forward=False`` the payloads of all gathers stay in memory until then, 8 bits a
    coordinate by default, and nothing is gathered twice. `jax.checkpoint` around a function keeps
    none of what it makes of its parameters. Cast shards before the call: whole parameters and
    gradients have their dtype. A loss without a derivative gathers one by one.

    Args:
      functions: of (own parameters, x), each to the next one's x; any pytrees.
      params: a pytree for every function.
      x: what the first function takes; integers and the like pass.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      compression: as for `psum`; none with memory, which has nowhere to go.
      key: as for `psum`; the number of the function is folded in.
      specs: a tree as for `reduce_in_backward` for every function. Where axes are automatic, all
        collectives of a reduction are one round.
      gather: as for `reduce_in_backward`.
      copies: as for `reduce_in_backward`, for every function; `None` for one without. Functions
        take these, and the gradients of ``params`` are this worker's slices (ZeRO-1). A scatter has
        two of an all-reduce's three rounds.
      pending: ``state.pending`` of ``dq.optax.sharded(..., deferred=True)``. The copies are as the
        step before left them. Each function's differences are gathered while the function before
        it runs, and it takes the current copies. ``params`` are the masters of all functions.
      reshard_after_forward: whether shards are all that the forward pass leaves of parameters.
        `False` saves the second gather, and takes the memory of all payloads.
      method: the former name of ``compression``. It warns, and goes with the next version.

    Returns:
      What the last function returns. With ``pending`` a pair: this, and the current copies, a tree
      like ``copies``, which have no derivative.

    Raises:
      ValueError: there are not as many params, or specs, as functions; ``pending`` is not that of
        an optimizer over this axis, or has no copies; or as `reduce_in_backward`.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis, compression = check_axis(axis_name), as_compression(compression, method=method)
    told = _checked(functions=functions, params=params, specs=specs, copies=copies)
    total = Reduction(axis, compression, op, gathers=gathers_of(gather, compression))
    if pending is not None:
        _check_pending(pending, axis, told["copies"])
    parts = []
    for number, (function, own, spec, copy) in enumerate(zip(*told.values(), strict=True)):
        reducer = Reducer(total, own, "sequential", specs=spec, copies=copy)
        parts.append(_Part(function, reducer, number))
    chain = _Chain(axis, tuple(parts), Traces(), reshard_after_forward)
    run = jax.custom_vjp(chain.run)
    run.defvjp(chain.forward, chain.backward)
    constants = constant_copies(told["copies"])
    x, current = run(told["params"], constants, x, key_words(key), pending)
    if pending is None:
        return x
    leaves = jax.tree.leaves(lax.stop_gradient(current))
    return x, jax.tree.unflatten(jax.tree.structure(copies), leaves)


def _check_pending(pending: Any, axis: Axis, copies: tuple) -> None:
    """Refuses what is not pending, and functions without copies."""
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
    """All arguments with one entry for each function, as tuples."""
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


class _Part(NamedTuple):
    """One of the functions; its reducer gathers its shards and reduces its gradients."""

    function: Function
    reducer: Reducer
    number: int


class _Chain(NamedTuple):
    """The parts of one `sequential`: how they run, and their forward and backward passes."""

    axis: Axis
    parts: tuple[_Part, ...]
    traces: Traces
    """The traces of gathers."""
    reshards: bool

    def run(
        self, params: Any, copies: Any, x: Any, words: Array | None, pending: Pending | None
    ) -> tuple[Any, Any]:
        """The last function's result without a derivative, and the copies if they are pending."""
        taken, current = self._taken(params, copies, pending), []
        seeds = self._seeds(words, pending)
        for part, own in zip(self.parts, taken, strict=True):
            progress = self._gather(part, own, seeds, pending)
            arrive(progress, send(progress, ()))
            whole = own if progress is None else progress.result
            x = part.function(self.axis.to_varying(whole), x)
            current.append(whole)
        return x, None if pending is None else tuple(current)

    def forward(
        self, params: Any, copies: Any, x: Any, words: Array | None, pending: Pending | None
    ) -> tuple[Any, Any]:
        """What `run` returns, and all that the backward pass needs."""
        taken, kept, current = self._taken(params, copies, pending), [], []
        seeds = self._seeds(words, pending)
        pairs = zip(self.parts, taken, strict=True)
        gathers = [self._gather(*pair, seeds, pending) for pair in pairs]
        later = [*gathers, None, None, None]
        x = send(gathers[0], announce(later[1], later[2], x))
        x = arrive(gathers[0], x)
        for number, (part, own, mine) in enumerate(zip(self.parts, taken, gathers, strict=True)):
            coming, second, third = later[number + 1 : number + 4]
            whole = own if mine is None else mine.result
            x = send(coming, announce(second, third, x))
            x, pull = jax.vjp(part.function, self.axis.to_varying(whole), x)
            x = arrive(coming, x)
            current.append(whole)
            if mine is None or pending is not None:  # the caller keeps the current copies whole
                kept.append((pull, None, None))
            else:
                payload = None if self.reshards else mine.payload
                kept.append((_without_parameters(pull, whole), own, payload))
        return (x, None if pending is None else tuple(current)), (kept, words)

    def backward(self, kept: Any, gradients: Any) -> tuple[Any, None, Any, None, None]:
        """The gradients of the parameters, reduced, and of ``x``; current copies have none."""
        gradient, _ = gradients
        (pulls, shards, payloads), words = zip(*kept[0], strict=True), kept[1]
        seeds = self._seeds(words, None)
        pipeline, begun = Pipeline(seeds), []
        triples = zip(self.parts, shards, payloads, strict=True)
        gathers = [self._gather(part, own, seeds, None, payload) for part, own, payload in triples]
        gradient = arrive(gathers[-1], send(gathers[-1], gradient))
        before = [None, *gathers[:-1]]
        for part, pull, mine, coming in reversed(
            [*zip(self.parts, pulls, gathers, before, strict=True)]
        ):
            pull = pull if mine is None else pull(mine.result)
            progress, gradient = pipeline.step(part.reducer, pull, part.number, gradient, coming)
            begun.append(progress)
        pipeline.finish()
        pairs = zip(self.parts, reversed(begun), strict=True)
        return tuple(part.reducer.joined(p.result) for part, p in pairs), None, gradient, None, None

    def _taken(self, params: Any, copies: Any, pending: Pending | None) -> list[Any]:
        """What each function or its gather takes: copies, or parameters where there are none.

        Gathers of differences take pairs: masters, and copies, which are the same on all workers.
        """
        pairs = list(zip(params, copies, strict=True))
        if pending is not None:
            return pairs
        return self.axis.to_varying([own if copy is None else copy for own, copy in pairs])

    def _seeds(self, words: Array | None, pending: Pending | None) -> Seeds:
        """The seeds of gathers: of differences by the key of the update that left them."""
        return Seeds(words if pending is None else pending.words, len(self.parts))

    def _gather(
        self,
        part: _Part,
        own: Any,
        seeds: Seeds,
        pending: Pending | None,
        payload: Any = None,
    ) -> Progress | None:
        """The gather of a function's shards, or differences, before its start.

        With the payload of an equal gather it is as after the payload's arrival.
        """
        specs = part.reducer.specs
        if pending is not None:

            def current(own: Any, words: Array) -> Any:
                (masters, copies), ready = own
                told = dataclasses.replace(pending, ready=ready)
                return told.current(masters, copies, words, specs)

            own = own, pending.ready
            return self.traces.start(current, own, seeds, part.number, specs)
        if not part.reducer.gathers:
            return None
        progress = self.traces.start(part.reducer.whole, own, seeds, part.number, specs)
        return progress if payload is None else progress.arrived(payload)


def _without_parameters(pull: Callable, whole: Any) -> Callable:
    """A function of the parameters that returns ``pull``, and keeps no copy of them."""
    leaves, treedef = jax.tree.flatten(pull)
    places = {id(x): place for place, x in enumerate(jax.tree.leaves(whole))}
    found = [places.get(id(x)) for x in leaves]
    kept = [x for x, place in zip(leaves, found, strict=True) if place is None]

    def pull_of(kept: list[Array], whole: Any) -> Callable:
        given, rest = jax.tree.leaves(whole), iter(kept)
        return treedef.unflatten(next(rest) if at is None else given[at] for at in found)

    return jax.tree_util.Partial(pull_of, kept)
