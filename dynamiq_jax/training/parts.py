"""Functions of a pipeline with their parameters: those that run once, and loops over layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from dynamiq_jax.collectives.sum import Sum
from dynamiq_jax.core.compat import evaluate, with_constants
from dynamiq_jax.training.in_backward import Reducer
from dynamiq_jax.training.interleaved import Pipeline, Traces, arrive, send
from dynamiq_jax.training.phases import Progress

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


class Parameters(NamedTuple):
    """The parameters of a part: shards that are gathered, or whole ones."""

    part: "Part"
    own: Any
    first: int
    """The number of the part's first run."""
    words: Array | None
    traces: Traces
    payloads: Any = None
    """The payloads of all runs' gathers, if the forward pass has kept them."""

    def gather(self, layer: Array | int) -> Progress | None:
        """The gather of one run's parameters; `None` if none are shards.

        It has not begun, or all of it has arrived where the payload was kept.
        """
        reducer = self.part.reducer
        if not reducer.gathers:
            return None
        own, number = self.part.of_run(self.own, layer), self.first + layer
        progress = self.traces.start(reducer.whole, own, self.words, number, reducer.specs)
        if self.payloads is None:
            return progress
        return progress.arrived(self.part.payload_of_run(self.payloads, layer))

    def whole(self, layer: Array | int) -> Any:
        """One run's parameters, gathered."""
        progress = self.gather(layer)
        arrive(progress, send(progress, ()))
        return self.part.of_run(self.own, layer) if progress is None else progress.result


class Part(Protocol):
    """One of the functions, with its parameters."""

    count: int
    """How often it runs."""
    reducer: Reducer
    """Reduces the gradients of one run, and gathers parameters that are shards."""

    def of_run(self, own: Any, layer: Array | int) -> Any:
        """The parameters of one run, of those of all."""
        ...

    def payload_of_run(self, payloads: Any, layer: Array | int) -> Any:
        """The payload of one run's gather, of those of all."""
        ...

    def run(self, params: Parameters, x: Any, /) -> Any:
        """The function of parameters that vary."""
        ...

    def forward(
        self, params: Parameters, first: Progress | None, x: Any, coming: Progress | None
    ) -> tuple[Any, Any, Any]:
        """Runs the function; returns the result, what `backward` needs, and the gathers' payloads.

        ``first`` is the gather of the first run's parameters, which is over. The next part's gather
        is ``coming``, beside the last run.
        """
        ...

    def backward(
        self,
        pipeline: Pipeline,
        kept: Any,
        params: Parameters,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """Begins the reductions; ``whole`` are the gathered parameters of the last run.

        Returns the reduced gradients, which may be called for once the pipeline has finished, and
        the gradient of x.
        """
        ...


class Once:
    """A function that runs once."""

    count = 1

    def __init__(self, function: Function, own: Any, total: Sum, spec: Any, copies: Any):
        self.reducer = Reducer(total, own, "sequential", specs=spec, copies=copies)
        self._function = function

    def of_run(self, own: Any, layer: Array | int) -> Any:
        """See `Part`."""
        return own

    def payload_of_run(self, payloads: Any, layer: Array | int) -> Any:
        """See `Part`."""
        return payloads

    def run(self, params: Parameters, x: Any) -> Any:
        """See `Part`."""
        return self._function(params.whole(0), x)

    def forward(
        self, params: Parameters, first: Progress | None, x: Any, coming: Progress | None
    ) -> tuple[Any, Any, Any]:
        """See `Part`."""
        x, whole = send(coming, x), params.own if first is None else first.result
        found, pull = jax.vjp(self._function, whole, x)
        if first is not None:
            pull = _without_parameters(self._function, pull, whole, x)
        return arrive(coming, found), pull, first and first.payload

    def backward(
        self,
        pipeline: Pipeline,
        kept: Any,
        params: Parameters,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """See `Part`."""
        pull = kept(whole) if self.reducer.gathers else kept
        progress, gradient = pipeline.step(self.reducer, pull, params.first, gradient, coming)
        return lambda: self.reducer.joined(progress.result), gradient


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


class Loop:
    """A function that runs for every layer.

    The backward pass takes the last layers one by one, until the pipeline is *full*: all reductions
    that are under way are of these layers, one is about to begin, and the oldest is about to take
    its last round. From there every layer does the same: it begins one reduction, moves all others
    by a round, and ends the oldest. So the other layers are a loop, whose carry are the values of
    the reductions under way, the newest in the last place.
    """

    def __init__(
        self, scanned: Scanned, own: Any, total: Sum, spec: Any, copies: Any, *, name: str
    ):
        leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((own, copies))}
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
        options = {"specs": spec, "copies": copies, "stacked": True}
        self.reducer = Reducer(total, own, "sequential", **options)

    def of_run(self, own: Any, layer: Array | int) -> Any:
        """See `Part`."""
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, keepdims=False), own)

    def payload_of_run(self, payloads: Any, layer: Array | int) -> Any:
        """See `Part`."""
        stacked, last = payloads
        return self._of_run_or_last(stacked, last, layer)

    def _of_run_or_last(self, stacked: Any, last: Any, layer: Array | int) -> Any:
        """The values of one run; those of the last are apart, unless ``last`` is `None`."""
        is_last = last is not None and isinstance(layer, int) and layer == self.count - 1
        return last if is_last else self.of_run(stacked, layer)

    def run(self, params: Parameters, x: Any) -> Any:
        """See `Part`."""
        if not self.reducer.gathers:
            return self._scanned(params.own, x)
        numbers = jnp.arange(self.count, dtype=jnp.int32)
        run = lambda x, layer: (self._function(params.whole(layer), x), None)  # noqa: E731
        return lax.scan(run, x, numbers)[0]

    def forward(
        self, params: Parameters, first: Progress | None, x: Any, coming: Progress | None
    ) -> tuple[Any, Any, Any]:
        """See `Part`."""
        layer = self.of_run(params.own, 0) if first is None else first.result
        treedef, origins = _origins(self._function, layer, x)
        kinds = [type(at) for at in origins]
        places = [at.place for at in origins if isinstance(at, _Given)]
        values = [at.value for at in origins if isinstance(at, _Fixed)]

        def run(x: Any, layer: Any) -> tuple[Any, list[Array]]:
            x, pull = jax.vjp(self._function, layer, x)
            leaves = zip(jax.tree.leaves(pull), kinds, strict=True)
            return x, [leaf for leaf, kind in leaves if kind is type(None)]

        def run_and_gather(carry: tuple[Any, Any, Any], layer: Array) -> tuple[Any, Any]:
            x, whole, payload = carry
            following = params.gather(layer + 1)
            assert following is not None
            x, kept = run(send(following, x), whole)
            x = arrive(following, x)
            return (x, following.result, following.payload), (kept, payload)

        last: list[Array] | None = None
        own, payloads = params.own, None
        if first is not None:
            own, numbers = None, jnp.arange(self.count - 1, dtype=jnp.int32)
            carry, (stacked, sent) = lax.scan(run_and_gather, (x, layer, first.payload), numbers)
            x, layer, payload = carry
            x, last = run(send(coming, x), layer)
            payloads = sent, payload
        else:
            x, stacked = lax.scan(run, send(coming, x), own)

        def pull_of(
            stacked: Any, last: Any, own: Any, values: Any, layer: Array | int, whole: Any
        ) -> Callable:
            """The kept values of one layer; values that all layers share have one copy."""
            kept = self._of_run_or_last(stacked, last, layer)
            given = jax.tree.leaves(whole) if self.reducer.gathers else jax.tree.leaves(own)
            given = [given[place] for place in places]
            if not self.reducer.gathers:
                given = self.of_run(given, layer)
            rest = {type(None): iter(kept), _Given: iter(given), _Fixed: iter(values)}
            return treedef.unflatten(next(rest[kind]) for kind in kinds)

        pull = jax.tree_util.Partial(pull_of, stacked, last, own, values)
        return arrive(coming, x), pull, payloads

    def backward(
        self,
        pipeline: Pipeline,
        kept: Any,
        params: Parameters,
        whole: Any,
        coming: Progress | None,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """See `Part`."""
        begun: dict[int, Progress] = {}

        def full() -> bool:
            own, moving = list(begun.values()), pipeline.ready
            if not own or not all(any(p is q for q in own) for p in moving):
                return False
            return not moving or moving[0].rounds_left == 1

        def step(layer: int, whole: Any, gradient: Any) -> tuple[Any, Any]:
            """Takes one layer; returns the parameters of the one before, too."""
            pull, before = kept(layer, whole), params.gather(layer - 1) if layer else coming
            number = params.first + layer
            begun[layer], gradient = pipeline.step(self.reducer, pull, number, gradient, before)
            return None if before is None or not layer else before.result, gradient

        layer = self.count - 1
        while layer >= 0 and not full():
            whole, gradient = step(layer, whole, gradient)
            layer -= 1
        left, open_ones = layer + 1, len(pipeline.ready)
        lowest = (
            0 if coming is None and not self.reducer.gathers else 1
        )  # beside 0 travels ``coming``
        ended = None
        if left > lowest:
            numbers = jnp.arange(lowest, left, dtype=jnp.int32)
            ended, whole, gradient = self._loop(pipeline, kept, params, numbers, whole, gradient)
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
            return self.reducer.joined(whole)

        return result, gradient

    def _loop(
        self,
        pipeline: Pipeline,
        kept: Any,
        params: Parameters,
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
            inner = Pipeline(pipeline.words, pipeline.traces)
            inner.ready = [p.with_values(own) for p, own in zip(under_way, values, strict=True)]
            oldest, before = inner.ready[:1], params.gather(layer - 1)
            pull, number = kept(layer, whole), params.first + layer
            begun, after = inner.step(self.reducer, pull, number, _joined(gradient, moving), before)
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

    closed, (result, pull) = jax.make_jaxpr(run, return_shape=True)(layer, x)
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

    origins = [origin(atom) for atom in jaxpr.outvars[len(jax.tree.leaves(result)) :]]
    return jax.tree.structure(pull), origins


def _moving(tree: Any) -> list[Array]:
    """The leaves but for the gradients of integers, which no loop carries."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def _joined(tree: Any, moving: Sequence[Array]) -> Any:
    """The inverse, for a tree like this one."""
    found = iter(moving)
    return jax.tree.map(lambda x: x if x.dtype == jax.dtypes.float0 else next(found), tree)


def _without_layers(specs: Any, name: str) -> Any:
    """PartitionSpecs of one layer, from those of all."""

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
