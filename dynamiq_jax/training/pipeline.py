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
again in the backward pass beside the function after theirs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.core.compat import assume_invarying, evaluate, varying_axes, with_constants
from dynamiq_jax.core.seeds import fold_seed, key_words
from dynamiq_jax.methods import Method
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.training.in_backward import Reducer, constant_copies
from dynamiq_jax.training.phases import Progress, Traced, trace

Function = Callable[[Any, Any], Any]
"""(own parameters, x) -> the next function's x."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A function of `sequential` that runs in a loop, once for every slice of its parameters.

    It is compiled once, however many layers there are, as by `jax.lax.scan`. Leaves of the
    parameters have a leading axis of layers; ``x`` keeps its types. The first few layers of the
    backward pass are not in the loop: they fill the pipeline. What the backward pass needs is kept
    for every layer, as by `jax.lax.scan`; `jax.checkpoint` around the function keeps less.

    Called with all layers' parameters and x it is that loop, without reductions.

    Attributes:
      function: of (one layer's parameters, x), to x.
    """

    function: Function

    def __call__(self, params: Any, x: Any) -> Any:
        """The x after all layers."""
        return lax.scan(lambda x, layer: (self.function(layer, x), None), x, params)[0]


def sequential(
    functions: Sequence[Function | Scanned],
    params: Sequence[Any],
    x: Any,
    axis_name: AxisName,
    *,
    lag: int = 1,
    op: Op = "mean",
    method: Compression | Method | ByPath | None = None,
    key: Array | None = None,
    specs: Sequence[Any] | None = None,
    gather: Compression | Method | ByPath | None = None,
    copies: Sequence[Any] | None = None,
) -> Any:
    """Functions one after another; each one's gradients are reduced beside the backward pass.

    ``x = f(p, x)`` for every function and its parameters, and the last ``x`` is returned. In the
    backward pass the gradients of a function are reduced, compressed, while the backward pass of
    those before it goes on:

        functions = [embed, *[block] * n_layers, head_and_loss]
        loss = dq.sequential(functions, [p["embed"], *p["blocks"], p["head"]], tokens, "data")

        functions = [embed, dq.Scanned(block), head_and_loss]  # layers stacked: a loop
        loss = dq.sequential(functions, [p["embed"], p["blocks"], p["head"]], tokens, "data")

    XLA's scheduler does not do this of its own accord when gradients are reduced after `jax.grad`:
    it puts the matrix products of the weights' gradients as late as they may be, and reductions of
    several steps after all of them. Here the order is part of the program, a pipeline: a function's
    gradients are complete before the backward pass goes on; while it passes the next function,
    their statistics travel, in the one after that their first payloads, and so on, and the next
    functions' reductions follow one round behind. Compile with `dynamiq_jax.jit`, or transfers
    begin late.

    All that `reduce_in_backward` says holds: the loss is this worker's own, `jax.grad` is inside
    the map, parameters that two functions use pass once, above, by `reduce_in_backward`. Each
    function's gradients are buckets of their own: of a layer or more, not of a norm. Wrap functions
    in `jax.checkpoint` to compute them again rather than keep what their backward pass needs. What
    functions need beside their parameters, as labels, travels in ``x``: JAX refuses traced values
    that they close over where these are differentiated, and where the whole loss is inside of
    another `jax.jit`, `jax.checkpoint` or scan.

    **FSDP.** Parameters whose ``specs`` name the axis are this worker's shards. Each function's are
    gathered while the function before it runs, and again, the same bits, while the backward pass
    takes the function after it. So two functions' parameters are whole at a time. `jax.checkpoint`
    around a function keeps none of what it makes of them. Cast shards before the call: whole
    parameters and gradients have their dtype. A loss without a derivative gathers one by one.

    Args:
      functions: of (own parameters, x), each to the next one's x; any pytrees. `Scanned` ones run
        once for every layer.
      params: a pytree for every function.
      x: what the first function takes; integers and the like pass.
      axis_name: as for `psum`.
      lag: functions whose backward pass a round of transfers may take, at least 0: with 0 the
        backward pass waits for every reduction. More hides more on slow links; gradients wait in
        memory for as long. Within a `Scanned` one at most 1.
      op: "mean" or "sum".
      method: as for `psum`; none with memory, which has nowhere to go.
      key: as for `psum`; the number of the function, counting layers, is folded in.
      specs: a tree as for `reduce_in_backward` for every function; of `Scanned` ones with the
        layers' axis, which they do not split. Where axes are automatic, all collectives of a
        reduction are one round.
      gather: as for `reduce_in_backward`.
      copies: as for `reduce_in_backward`, for every function; `None` for one without. Functions
        take these, and the gradients of ``params`` are this worker's slices (ZeRO-1). A scatter has
        two of an all-reduce's three rounds.

    Returns:
      What the last function returns.

    Raises:
      ValueError: there are not as many params, or specs, as functions; leaves of a `Scanned` one
        have no equal leading axes, or ``specs`` split these; or as `reduce_in_backward`.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis = check_axis(axis_name)
    told = {"functions": functions, "params": params, "specs": specs, "copies": copies}
    for name, given in told.items():
        if isinstance(given, Mapping):
            raise ValueError(f"{name} is a mapping, which has no order; pass a list of its values")
    if callable(functions):
        name = getattr(functions, "__name__", type(functions).__name__)
        raise ValueError(f"functions={name} is one function; pass a list: [function]")
    functions, params = tuple(functions), tuple(params)
    specs = (None,) * len(functions) if specs is None else tuple(specs)
    copies = (None,) * len(functions) if copies is None else tuple(copies)
    for name, given in (("params", params), ("specs", specs), ("copies", copies)):
        if len(given) != len(functions):
            raise ValueError(
                f"{len(functions)} functions and {len(given)} {name}: pass one for each function"
            )
    if not functions:
        raise ValueError("functions is empty: pass at least one")
    if isinstance(lag, bool) or not hasattr(lag, "__index__") or lag < 0:
        raise ValueError(f"lag={lag!r} must be an integer of at least 0, such as 1")
    parts: list[_Part] = []
    for number, (function, own) in enumerate(zip(functions, params, strict=True)):
        options = {"op": op, "method": as_compression(method), "gather": gather}
        options["copies"] = copies[number]
        if isinstance(function, Scanned):
            name = f"functions[{number}]"
            parts.append(_Loop(function, own, specs[number], axis, name, options))
        else:
            parts.append(_Once(function, own, specs[number], axis, options))
    firsts = [int(first) for first in np.cumsum([0, *(part.count for part in parts)])]

    def taken(params: Any, copies: Any) -> list[Any]:
        """The trees that functions take: copies, or parameters where there are none."""
        pairs = zip(params, copies, strict=True)
        return axis.to_varying([own if copy is None else copy for own, copy in pairs])

    def shards(own: Sequence[Any], words: Array | None) -> list[_Shards]:
        return [_Shards(*given, words) for given in zip(parts, own, firsts, strict=False)]

    @jax.custom_vjp
    def run(params: Any, copies: Any, x: Any, words: Array | None) -> Any:
        for part, own in zip(parts, shards(taken(params, copies), words), strict=True):
            x = part.run(own, x)
        return x

    def forward(params: Any, copies: Any, x: Any, words: Array | None) -> tuple[Any, Any]:
        given, kept = shards(taken(params, copies), words), []
        coming = given[0].gather(0)
        x = _arrive(coming, _send(coming, x))
        for part, own, following in zip(parts, given, [*given[1:], None], strict=True):
            whole = own.own if coming is None else coming.result
            coming = None if following is None else following.gather(0)
            x, of_part = part.forward(own, whole, x, coming)
            kept.append((of_part, own.own if part.gathers else None))
        return x, (kept, words)

    def backward(kept: Any, gradient: Any) -> tuple[Any, None, Any, None]:
        kept, words = kept
        pipeline, results = _Pipeline(lag, words), []
        given = shards([own for _, own in kept], words)
        coming = given[-1].gather(parts[-1].count - 1)
        gradient = _arrive(coming, _send(coming, gradient))
        for number in reversed(range(len(parts))):
            whole = None if coming is None else coming.result
            coming = given[number - 1].gather(parts[number - 1].count - 1) if number else None
            result, gradient = parts[number].backward(
                pipeline, kept[number][0], given[number], whole, coming, gradient
            )
            results.append(result)
        pipeline.finish()
        return tuple(result() for result in reversed(results)), None, gradient, None

    run.defvjp(forward, backward)
    return run(params, constant_copies(copies), x, key_words(key))


# --- Reductions under way -------------------------------------------------------------------------


class _Pipeline:
    """Reductions on their way, one round of collectives after the other."""

    def __init__(self, lag: int, words: Array | None, traced: list | None = None):
        self.lag, self.words = lag, words
        self.traced: list[tuple[Any, Traced]] = [] if traced is None else traced
        """Cache: (shapes and dtypes of the gradients, traced reduction)."""
        self.ready: list[Progress] = []
        """Reductions that go on to their next collectives."""
        self._due: list[tuple[int, Progress]] = []
        """Reductions whose collectives are under way, and when these have to be over."""
        self._done: list[Progress] = []
        """Reductions that are over and have last kernels, which may run at any time."""
        self._now = 0

    @property
    def under_way(self) -> list[Progress]:
        """All that are not done."""
        return [*(progress for _, progress in self._due), *self.ready]

    def step(
        self,
        reducer: Reducer,
        pull: Callable,
        number: Array | int,
        gradient: Any,
        coming: Progress | None,
        lag: int | None = None,
    ) -> tuple[Progress, Any]:
        """Takes the backward pass through one function and begins the reduction of its gradients.

        Returns the reduction and the gradient of the function's input. This gradient waits for the
        transfers that are due, and for the kernels that make of them what is sent next. So it does
        for the gather that is ``coming``. ``lag`` is the pipeline's by default.
        """
        lag = self.lag if lag is None else lag
        for progress in self.ready:
            progress.exchange()
            self._due.append((self._now + lag, progress))
        own, gradient = pull(_send(coming, gradient))
        own, gradient = _together(reducer.moving(own), gradient)
        self._now += 1
        gradient = _arrive(coming, gradient)
        begun = self._begin(reducer, own, number)
        moving = [*(progress for time, progress in self._due if time <= self._now), begun]
        self._due = [(time, progress) for time, progress in self._due if time > self._now]
        while True:
            gradient = _hold(moving, gradient)
            self.ready = self._compute(moving)
            gradient = _hold(self.ready, gradient)
            if lag or not self.ready:
                return begun, gradient
            moving = self.ready
            for progress in moving:
                progress.exchange()

    def finish(self) -> None:
        """Runs all rounds that are left.

        No function is left whose backward pass would hide them. The last kernels of reductions that
        are over do: an equal part of them before each arrival. What these write is an array of its
        own then; slices and shapes of it can still be part of what takes them.
        """
        arriving = [progress for _, progress in self._due]
        arrivals = len(arriving) + sum(progress.rounds_left for progress in self.under_way)
        while arriving or self.ready:
            for progress in arriving:
                share = -(-len(self._done) // arrivals)
                meanwhile, self._done = self._done[:share], self._done[share:]
                if meanwhile:
                    _hold([progress, *meanwhile], None)
                arrivals -= 1
            moving = [*self._compute(arriving), *self.ready]
            for progress in moving:
                progress.exchange()
            arriving, self.ready = moving, []

    def _compute(self, moving: Sequence[Progress]) -> list[Progress]:
        """Runs what has arrived on its way; returns those that go on."""
        for progress in moving:
            progress.compute()
        self._done += [progress for progress in moving if progress.done and progress.ready]
        return [progress for progress in moving if not progress.done]

    def _begin(self, reducer: Reducer, own: Any, number: Array | int) -> Progress:
        words = None if self.words is None else fold_seed(self.words, number)
        likeness = jax.tree.flatten((jax.tree.map(jax.typeof, own), reducer.specs))
        alike = (traced for other, traced in self.traced if other == likeness)
        if (traced := next(alike, None)) is None:
            traced = trace(reducer.reduce, own, words)
            self.traced.append((likeness, traced))
        return Progress.start(traced, own, words)


def _hold(moving: Sequence[Progress], passing: Any) -> Any:
    """``passing``, and with it what the reductions take next: all wait for each other."""
    if not moving:
        return passing
    passing, held = _together(passing, [progress.ready for progress in moving])
    for progress, ready in zip(moving, held, strict=True):
        progress.ready = ready
    return passing


def _send(progress: Progress | None, passing: Any) -> Any:
    """``passing``, after which a gather runs up to its last round, and sends that.

    The last round has the payloads; in those before it workers agree on little.
    """
    if progress is None:
        return passing
    passing = _hold([progress], passing)
    progress.compute()
    while progress.rounds_left > 1:
        progress.exchange()
        progress.compute()
    if not progress.done:
        passing = _hold([progress], passing)
        progress.exchange()
    return passing


def _arrive(progress: Progress | None, passing: Any) -> Any:
    """``passing``, which waits for what was sent; then the gather's last kernels."""
    if progress is not None and not progress.done:
        passing = _hold([progress], passing)
        progress.compute()
    return passing


def _together(*trees: Any) -> tuple[Any, ...]:
    """Passes trees through a barrier: users of one of their arrays wait for all of them.

    JAX lets what passes a barrier vary over all axes over which one of the arrays does.
    """

    def as_before(held: Array, x: Array) -> Array:
        return assume_invarying(held, tuple(sorted(varying_axes(held) - varying_axes(x))))

    def passes(x: Array) -> bool:
        return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    leaves, treedef = jax.tree.flatten(trees)
    moving = list(filter(passes, leaves))
    held = iter(map(as_before, lax.optimization_barrier(moving), moving))
    return treedef.unflatten(next(held) if passes(x) else x for x in leaves)


# --- Functions ------------------------------------------------------------------------------------


class _Shards(NamedTuple):
    """The parameters of a part: shards to be gathered, or whole ones."""

    part: "_Part"
    own: Any
    first: int
    """The number of the part's first run."""
    words: Array | None

    def gather(self, layer: Array | int) -> Progress | None:
        """The gather of one run's parameters, which has not begun; `None` if none are shards."""
        if not self.part.gathers:
            return None
        own = self.part.of_run(self.own, layer)
        words = None if self.words is None else fold_seed(self.words, self.first + layer)
        return Progress.start(trace(self.part.whole, own, words), own, words)

    def whole(self, layer: Array | int) -> Any:
        """One run's parameters, gathered."""
        progress = self.gather(layer)
        _arrive(progress, _send(progress, ()))
        return self.part.of_run(self.own, layer) if progress is None else progress.result


class _Part(Protocol):
    """One of the functions, with its parameters."""

    count: int
    """How often it runs."""
    gathers: bool
    """Whether some of its parameters are shards."""

    def of_run(self, own: Any, layer: Array | int) -> Any:
        """The parameters of one run, of those of all."""
        ...

    def whole(self, params: Any, words: Array | None) -> Any:
        """Gathers those of one run."""
        ...

    def run(self, shards: _Shards, x: Any, /) -> Any:
        """The function of parameters that vary."""
        ...

    def forward(
        self, shards: _Shards, whole: Any, x: Any, coming: Progress | None
    ) -> tuple[Any, Any]:
        """Runs the function; returns the result and the values that `backward` needs.

        ``whole`` are the gathered parameters of the first run. The next part's gather is
        ``coming``, beside the last run.
        """
        ...

    def backward(
        self,
        pipeline: _Pipeline,
        kept: Any,
        shards: _Shards,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """Begins the reductions; ``whole`` are the gathered parameters of the last run.

        Returns the reduced gradients, which may be called for once the pipeline has finished, and
        the gradient of x.
        """
        ...


class _Once:
    """A function that runs once."""

    count = 1

    def __init__(self, function: Function, own: Any, spec: Any, axis: Axis, options: dict):
        self._reducer = Reducer(own, axis, "sequential", specs=spec, **options)
        self.gathers, self.whole = self._reducer.gathers, self._reducer.whole
        self._function = function

    def of_run(self, own: Any, layer: Array | int) -> Any:
        return own

    def run(self, shards: _Shards, x: Any) -> Any:
        return self._function(shards.whole(0), x)

    def forward(
        self, shards: _Shards, whole: Any, x: Any, coming: Progress | None
    ) -> tuple[Any, Any]:
        x = _send(coming, x)
        found, pull = jax.vjp(self._function, whole, x)
        if self.gathers:
            pull = _without_parameters(self._function, pull, whole, x)
        return _arrive(coming, found), pull

    def backward(
        self,
        pipeline: _Pipeline,
        kept: Any,
        shards: _Shards,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        pull = kept(whole) if self.gathers else kept
        progress, gradient = pipeline.step(self._reducer, pull, shards.first, gradient, coming)
        return lambda: self._reducer.joined(progress.result), gradient


def _without_parameters(function: Function, pull: Callable, whole: Any, x: Any) -> Callable:
    """A function of the parameters that returns ``pull``, and keeps no copy of them."""
    treedef, origins = _origins(function, whole, x)
    places = [at.place if isinstance(at, _Given) else None for at in origins]
    pairs = zip(jax.tree.leaves(pull), places, strict=True)
    kept = [leaf for leaf, place in pairs if place is None]

    def pull_of(kept: list[Array], whole: Any) -> Callable:
        given, rest = jax.tree.leaves(whole), iter(kept)
        return treedef.unflatten(next(rest) if at is None else given[at] for at in places)

    return jax.tree_util.Partial(pull_of, kept)


class _Loop:
    """A function that runs for every layer.

    The backward pass takes the last layers one by one, until the pipeline is *full*: all reductions
    that are under way are of these layers, one is about to begin, and the oldest is about to take
    its last round. From there every layer does the same: it begins one reduction, moves all others
    by a round, and ends the oldest. So the other layers are a loop, whose carry are the values of
    the reductions under way, the newest in the last place.
    """

    def __init__(self, scanned: Scanned, own: Any, spec: Any, axis: Axis, name: str, options: dict):
        leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((own, options["copies"]))}
        if len(leading) != 1 or () in leading:
            found = ", ".join(sorted(str(shape) for shape in leading)) or "no leaves"
            raise ValueError(
                f"{name} is scanned over the leading axis of its parameters, which have {found}; "
                "stack all layers along a leading axis of the same size"
            )
        ((self.count,),) = leading
        if not self.count:
            raise ValueError(f"{name} is scanned over 0 layers; pass at least one, or leave it out")
        self._function, self._scanned = scanned.function, scanned
        spec = _without_layers(spec, name)
        self._reducer = Reducer(own, axis, "sequential", specs=spec, stacked=True, **options)
        self.gathers, self.whole = self._reducer.gathers, self._reducer.whole

    def of_run(self, own: Any, layer: Array | int) -> Any:
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, keepdims=False), own)

    def run(self, shards: _Shards, x: Any) -> Any:
        if not self.gathers:
            return self._scanned(shards.own, x)
        numbers = jnp.arange(self.count, dtype=jnp.int32)
        run = lambda x, layer: (self._function(shards.whole(layer), x), None)  # noqa: E731
        return lax.scan(run, x, numbers)[0]

    def forward(
        self, shards: _Shards, whole: Any, x: Any, coming: Progress | None
    ) -> tuple[Any, Any]:
        layer = whole if self.gathers else self.of_run(whole, 0)
        treedef, origins = _origins(self._function, layer, x)
        kinds = [type(at) for at in origins]
        places = [at.place for at in origins if isinstance(at, _Given)]
        values = [at.value for at in origins if isinstance(at, _Fixed)]

        def run(x: Any, layer: Any) -> tuple[Any, list[Array]]:
            x, pull = jax.vjp(self._function, layer, x)
            leaves = zip(jax.tree.leaves(pull), kinds, strict=True)
            return x, [leaf for leaf, kind in leaves if kind is type(None)]

        def run_and_gather(carry: tuple[Any, Any], layer: Array) -> tuple[Any, list[Array]]:
            x, whole = carry
            following = shards.gather(layer + 1)
            assert following is not None
            x, kept = run(_send(following, x), whole)
            return (_arrive(following, x), following.result), kept

        last: list[Array] | None = None
        if self.gathers:
            numbers = jnp.arange(self.count - 1, dtype=jnp.int32)
            (x, layer), stacked = lax.scan(run_and_gather, (x, whole), numbers)
            x, last = run(_send(coming, x), layer)
        else:
            x, stacked = lax.scan(run, _send(coming, x), whole)

        def pull_of(
            stacked: Any, last: Any, own: Any, values: Any, layer: Array | int, whole: Any
        ) -> Callable:
            """The kept values of one layer; values that all layers share have one copy."""
            if last is not None and isinstance(layer, int) and layer == self.count - 1:
                kept = last
            else:
                kept = [lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacked]
            given = jax.tree.leaves(whole) if self.gathers else jax.tree.leaves(own)
            given = [given[place] for place in places]
            if not self.gathers:
                given = self.of_run(given, layer)
            rest = {type(None): iter(kept), _Given: iter(given), _Fixed: iter(values)}
            return treedef.unflatten(next(rest[kind]) for kind in kinds)

        own = None if self.gathers else whole
        return _arrive(coming, x), jax.tree_util.Partial(pull_of, stacked, last, own, values)

    def backward(
        self,
        pipeline: _Pipeline,
        kept: Any,
        shards: _Shards,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        lag = min(pipeline.lag, 1)
        begun: dict[int, Progress] = {}

        def full() -> bool:
            own, moving = list(begun.values()), pipeline.under_way
            if not own or not all(any(p is q for q in own) for p in moving):
                return False
            return not moving or moving[0].rounds_left == 1

        def step(layer: int, whole: Any, gradient: Any) -> tuple[Any, Any]:
            """Takes one layer; returns the parameters of the one before, too."""
            pull, before = kept(layer, whole), shards.gather(layer - 1) if layer else coming
            number = shards.first + layer
            begun[layer], gradient = pipeline.step(
                self._reducer, pull, number, gradient, before, lag
            )
            return None if before is None or not layer else before.result, gradient

        layer = self.count - 1
        while layer >= 0 and not full():
            whole, gradient = step(layer, whole, gradient)
            layer -= 1
        left, open_ones = layer + 1, len(pipeline.ready)
        lowest = 0 if coming is None and not self.gathers else 1  # beside 0 travels ``coming``
        ended = None
        if left > lowest:
            numbers = jnp.arange(lowest, left, dtype=jnp.int32)
            ended, whole, gradient = self._loop(
                pipeline, lag, kept, shards, numbers, whole, gradient
            )
            begun = {i: p for i, p in begun.items() if i >= open_ones + left}
            begun |= enumerate(reversed(pipeline.ready), lowest)
        if left and lowest:
            _, gradient = step(0, whole, gradient)

        def result() -> Any:
            found = {i: jax.tree.leaves(begun[i].result) for i in sorted(begun)}
            parts = [[x[None] for x in leaves] for leaves in found.values()]
            if ended is not None:  # those of as many layers, after the ones still open then
                parts.insert(lowest + open_ones, ended)
            whole = [jnp.concatenate(pieces) for pieces in zip(*parts, strict=True)]
            return self._reducer.joined(whole)

        return result, gradient

    def _loop(
        self,
        pipeline: _Pipeline,
        lag: int,
        kept: Any,
        shards: _Shards,
        layers: Array,
        whole: Any,
        gradient: Any,
    ) -> tuple[list[Array], Any, Any]:
        """Runs these layers; in the pipeline their reductions take the others' place.

        Returns the leaves of the reductions that ended, the parameters of the layer before the
        first where they are gathered, and the gradient of x.
        """
        under_way = pipeline.ready

        def body(carry: tuple[list[Array], list[Any], Any], layer: Array) -> tuple[Any, Any]:
            moving, values, whole = carry
            inner = _Pipeline(lag, pipeline.words, pipeline.traced)
            inner.ready = [p.with_values(own) for p, own in zip(under_way, values, strict=True)]
            oldest, before = inner.ready[:1], shards.gather(layer - 1)
            pull, number = kept(layer, whole), shards.first + layer
            begun, after = inner.step(
                self._reducer, pull, number, _joined(gradient, moving), before
            )
            (done,) = oldest or [begun]
            assert done.done and len(inner.ready) == len(under_way)
            found = [p.values for p in inner.ready]
            whole = None if before is None else before.result
            return (_moving(after), found, whole), jax.tree.leaves(done.result)

        start = _moving(gradient), [p.values for p in under_way], whole
        (moving, values, whole), ended = lax.scan(body, start, layers, reverse=True)
        pipeline.ready = [p.with_values(v) for p, v in zip(under_way, values, strict=True)]
        return ended, whole, _joined(gradient, moving)


class _Given(NamedTuple):
    """A leaf of the layer's own parameters."""

    place: int


class _Fixed(NamedTuple):
    """A value that all layers share."""

    value: Any


def _origins(function: Function, layer: Any, x: Any) -> tuple[Any, list[_Given | _Fixed | None]]:
    """The structure of a layer's `jax.vjp` function, and where each of its leaves comes from.

    `None` stands for a leaf of the layer's own run. The others need no copy for every layer: leaves
    of the parameters, constants, and values that follow from constants and from leaves of ``x``
    that pass. JAX's loops keep no copies of these either.
    """

    def run(layer: Any, x: Any) -> tuple[Any, Callable]:
        return jax.vjp(function, layer, x)

    closed, (_, pull) = jax.make_jaxpr(run, return_shape=True)(layer, x)
    jaxpr, constants = with_constants(closed)
    own, given = jaxpr.invars[: len(jax.tree.leaves(layer))], jax.tree.leaves(x)
    carried = jaxpr.invars[len(own) :]
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= {a: v for a, b, v in zip(carried, jaxpr.outvars, given, strict=False) if a is b}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        if not equation.effects and all(
            isinstance(a, Literal) or a in known for a in equation.invars
        ):
            made = evaluate(equation, *map(read, equation.invars))
            known.update(zip(equation.outvars, made, strict=True))

    def origin(atom: Any) -> _Given | _Fixed | None:
        if isinstance(atom, Literal) or atom in known:
            return _Fixed(read(atom))
        return _Given(own.index(atom)) if atom in own else None

    origins = [origin(atom) for atom in jaxpr.outvars[len(given) :]]
    return jax.tree.structure(pull), origins


def _moving(tree: Any) -> list[Array]:
    """The leaves but for the gradients of integers, which no loop carries."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def _joined(tree: Any, moving: Sequence[Array]) -> Any:
    """The inverse, for a tree like this one."""
    found = iter(moving)
    return jax.tree.map(lambda x: x if x.dtype == jax.dtypes.float0 else next(found), tree)


def _without_layers(specs: Any, name: str) -> Any:
    """PartitionSpecs of one layer, from those of all.

    Raises:
      ValueError: one of them splits the axis of layers.
    """

    def of_layer(spec: Any) -> Any:
        if not isinstance(spec, PartitionSpec):
            return spec  # which the reduction refuses
        if len(spec) and spec[0] is not None:
            raise ValueError(
                f"{name} is scanned over the leading axis of its parameters, and specs split it: "
                f"{spec}; keep all layers on every device, P(None, ...). dq.optax.sharded splits "
                "them where no other dimension divides by the workers: pad one, or leave the leaf "
                "out by dq.Compression(exclude=...)"
            )
        return PartitionSpec(*spec[1:])

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(of_layer, specs, is_leaf=is_spec)
