"""Stacked layers, whose gradients are reduced one layer after the other beside the backward pass.

`jax.lax.scan` runs one layer's program for all layers, and XLA moves no exchange from one turn of a
loop to another. So here the loop itself carries what travels. Step t is the t-th layer that the
forward pass runs, of L layers::

    forward    a scan that stacks what the derivative of each step needs
    backward   step L - 1, before the loop: its gradient is summed up and encoded
               loop, t = L - 2 ... 0: the payload of step t + 1 travels beside the products of step
                   t (neither takes a result of the other); it is decoded into its row of the
                   gradients; the gradient of step t is encoded for the next turn
               after the loop: the payload of step 0 travels beside the function before the scan

    forward with gathers (FSDP, pending differences): before the loop: the parameters of step 0
               loop, t = 0 ... L - 2: those of step t + 1 travel beside step t, whose own are
                   decoded and those of step t + 2 encoded meanwhile (`_Ahead`)
               step L - 1, after the loop: the next function's parameters are gathered beside it
    backward with gathers: the same way back; step 0 is after the loop

A turn carries the gradient of x and what one step has encoded (`Progress.held`). The first step of
the backward pass is outside of the loop, since there is nothing to send beside it: in the loop it
would send zeros, a layer's worth of wire. So a program has two copies of a layer's derivative (with
gathers three), whatever the number of layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.jaxprs.phases import Progress
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.training.in_backward import Reducer, gradient_like, inexact_leaves
from dynamiq_jax.training.interleaved import (
    Beside,
    Gathers,
    Pipeline,
    Seeds,
    arrive,
    hold,
    land,
    send,
    without,
)
from dynamiq_jax.tree.leaves import LAYERS, describe_leaves, names_of

Body = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(one layer's parameters, values for all layers, x) -> (x, the layer's output)."""


class Loop(NamedTuple):
    """How a scan goes over its layers."""

    body: Body
    length: int
    reverse: bool
    unroll: int | bool
    alone: bool
    """Whether x comes with values for all layers, and the result with all layers' outputs."""

    def place(self, step: Any) -> Any:
        """The row of stacked leaves that belongs to a step."""
        return self.length - 1 - step if self.reverse else step

    def scan(self, turn: Callable, carry: Any, steps: range) -> tuple[Any, Any]:
        """`lax.scan` over numbers of steps; what it stacks is in their order."""
        numbers = np.asarray(steps, np.int32)
        # Never reversed: the numbers say the order.
        return lax.scan(turn, carry, numbers, unroll=self.unroll)

    def entered(self, x: Any) -> tuple[Any, Any]:
        """Values for all layers, and x."""
        return x if self.alone else ((), x)

    def left(self, x: Any, outputs: Any) -> Any:
        """The result of the scan, from its last x and outputs in the order of steps."""
        return (x, self.flipped(outputs)) if self.alone else x

    def flipped(self, stacked: Any) -> Any:
        """Rows of steps, in the order of layers."""
        return jax.tree.map(lambda x: jnp.flip(x, 0), stacked) if self.reverse else stacked


@dataclasses.dataclass(frozen=True)
class Scanned:
    """A function of stacked layers, for `overlapped`: ``x = function(row, x)`` for every row.

        functions = [embed, dq.Scanned(block), head_and_loss]
        parts = [p["embed"], p["blocks"], p["head"]]  # every leaf of p["blocks"] has a row a layer
        loss = dq.overlapped(functions, parts, tokens, "data")

    The program has one layer's operations, whatever the number of layers. See `scan`.

    Attributes:
      function: (one layer's parameters, x) -> x; x keeps its types.
      reverse: whether the last row comes first, as for `jax.lax.scan`.
      unroll: as for `jax.lax.scan`.
    """

    function: Callable[[Any, Any], Any]
    reverse: bool = False
    unroll: int | bool = 1

    def __call__(self, params: Any, x: Any) -> Any:
        """The result by `jax.lax.scan`, which exchanges nothing: to evaluate."""
        turn = lambda x, own: (self.function(own, x), None)
        return lax.scan(turn, x, params, reverse=self.reverse, unroll=self.unroll)[0]

    def layers(self, total: Reduction, number: int, params: Any, **options: Any) -> "Layers":
        """The part of a chain that it is, for these stacked parameters."""
        check_rows(options.get("specs"), total.axis, copied=options.get("copies") is not None)
        # Such a function takes no values for all layers, and has no outputs by layer.
        body = lambda own, _, x: (self.function(own, x), None)
        loop = Loop(body, length_of(params), self.reverse, self.unroll, alone=False)
        return Layers(loop, reducer_of_rows(total, params, "overlapped", **options), number)


def reducer_of_rows(
    total: Reduction, params: Any, caller: str, *, specs: Any = None, copies: Any = None
) -> Reducer:
    """The reducer of one layer; params, ``specs`` and ``copies`` are those of stacked leaves."""
    length = length_of(params)
    # Copies without leaves, as of a layer without parameters, have no length.
    if copies is not None and jax.tree.leaves(copies) and length_of(copies) != length:
        raise ValueError(
            f"copies have {length_of(copies)} layers, and params {length}; pass the whole "
            "parameters of the same layers"
        )
    # Any row will do: the reducer takes types, and no values.
    row = None if copies is None else row_of(copies, 0)
    return Reducer(total, row_of(params, 0), caller, specs=_of_rows(specs), copies=row)


def whole_row(reducer: Reducer, params: Any, copies: Any) -> Any:
    """One layer's whole parameters, as its function takes them; nobody reads their values."""
    own = row_of(params if copies is None else copies, 0)
    whole = reducer.whole(own, None) if reducer.gathers else own
    return reducer.axis.inexact_to_varying(whole)


def length_of(stacked: Any, length: int | None = None) -> int:
    """The number of layers of stacked leaves; refuses leaves that differ."""
    leaves = describe_leaves(stacked)
    lengths = {}
    for leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"leaf {leaf.name} of the stacked parameters is a scalar; stack the layers of each "
                "leaf along its first dimension, as for jax.lax.scan"
            )
        lengths[leaf.shape[0]] = leaf.name
    if length is not None:
        lengths.setdefault(length, "length=")
    if len(lengths) != 1:
        told = ", ".join(f"{name} {count}" for count, name in lengths.items()) or "none"
        raise ValueError(
            f"the number of layers is the first dimension of every leaf, and they are: {told}; "
            "stack as many layers in each leaf"
        )
    (count,) = lengths
    if not count:
        raise ValueError(
            f"leaf {lengths[0]} of the stacked parameters has 0 layers, which leaves nothing to "
            "reduce; stack at least one, or call jax.lax.scan"
        )
    return count


def check_rows(specs: Any, axis: Axis, *, copied: bool) -> None:
    """Refuses specs that split the layers; before lengths, which are then those of shards."""
    for path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P)):
        first = spec[0] if isinstance(spec, P) and len(spec) else None
        if not {*names_of(first)} & {*axis.names}:
            continue
        remedy = f"split another dimension, as P(None, {axis.name!r})"
        if copied:
            remedy = (
                "dq.optax.sharded does so where no other dimension is a multiple of the "
                f"{axis.size} workers, or where there are {LAYERS} layers or more: make another "
                "one a multiple, or pass it dq.Compression(exclude=...) for this leaf, whose "
                "masters are then whole"
            )
        raise ValueError(
            f"specs{jax.tree_util.keystr(path)}: {spec} splits the layers themselves over "
            f"{axis.name!r}, and each worker runs all layers; {remedy}"
        )


def _of_rows(specs: Any) -> Any:
    """The specs of one layer, from those of stacked leaves."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P))


class Kept(NamedTuple):
    """Values of the forward pass that the backward pass needs."""

    rows: Any
    """(pull, payload) of each step, stacked; without the last step's if there are gathers."""
    last: Any
    """(pull, payload) of the last step, or `None`."""
    stacked: Any
    """Parameters that the steps take, or their shards."""
    shared: Any
    """Values for all layers."""


class Layers(NamedTuple):
    """A part of `overlapped` that is a scan over layers."""

    loop: Loop
    reducer: Reducer
    """Gathers one layer's shards, and reduces its gradients."""
    number: int

    def seeds(self, seeds: Seeds) -> Seeds:
        """The seeds of the layers, from those of all functions of a chain."""
        return seeds.of_layers(self.number, self.loop.length)

    def run(self, gathers: Gathers, taken: Any, x: Any) -> tuple[Any, Any]:
        """The result of the scan without a derivative, and the parameters if they are gathered."""
        loop = self.loop
        shared, x = loop.entered(x)
        gathered = self.start(gathers, taken, 0) is not None

        def step(x: Any, t: Array) -> tuple[Any, Any]:
            own = row_of(taken, loop.place(t))
            # Nothing runs beside it: without a derivative there is no pipeline.
            if gathered:
                progress = self.start(gathers, taken, t)
                arrive(progress, send(progress, ()))
                own = progress.result
            x, output = loop.body(gathers.axis.inexact_to_varying(own), shared, x)
            return x, (output, own if gathers.pending is not None else None)

        x, (outputs, current) = loop.scan(step, x, range(loop.length))
        return loop.left(x, outputs), loop.flipped(current)

    def start(self, gathers: Gathers, taken: Any, step: Any = 0, payload: Any = None) -> Any:
        """The gather of a step's parameters, first of those of step 0; or `None`."""
        place = self.loop.place(step)
        return gathers.start(row_of(taken, place), place, payload)

    def forward(
        self, gathers: Gathers, taken: Any, mine: Progress | None, x: Any, beside: Beside
    ) -> tuple[Any, Kept, Any]:
        """The result of the scan, what `backward` needs, and the parameters if they are pending.

        ``mine`` is the gather of step 0, which has arrived.
        """
        loop, axis = self.loop, gathers.axis
        shared, x = loop.entered(x)

        def applied(own: Any, x: Any) -> tuple[Any, Any, Any]:
            own = axis.inexact_to_varying(own)
            (x, output), pull = jax.vjp(loop.body, own, shared, x)
            return x, output, without(pull, (own, shared))

        # Nothing is gathered here: what the next function needs travels beside the whole loop.
        if mine is None:

            def step(x: Any, t: Array) -> tuple[Any, Any]:
                x, output, pull = applied(row_of(taken, loop.place(t)), x)
                return x, ((pull, None), output)

            x, (rows, outputs) = loop.scan(step, beside.send(x), range(loop.length))
            return loop.left(beside.arrive(x), outputs), Kept(rows, None, taken, shared), None

        ahead = _Ahead(self, gathers, taken, mine)

        def turn(carry: Any, t: Array) -> tuple[Any, Any]:
            x, state = carry
            coming, own, x, rest = ahead.turn(state, x, t)
            x, output, pull = applied(own.result, x)
            x = land(coming, x)
            return (x, ahead.landed(coming, rest)), ((pull, kept(own)), output)

        kept = lambda progress: progress.payload if gathers.keeps else None
        (x, state), (rows, outputs) = loop.scan(turn, (x, ahead.state), range(loop.length - 1))
        x = beside.send(x)
        own, current = ahead.last(state)
        x, output, pull = applied(own.result, x)
        # The loop has stacked all outputs but that of the last step.
        outputs = jax.tree.map(lambda y, z: jnp.concatenate([y, z[None]]), outputs, output)
        stacked = taken if current is None else current
        kept_all = Kept(rows, (pull, kept(own)), stacked, shared)
        return loop.left(beside.arrive(x), outputs), kept_all, current

    def last_gather(self, gathers: Gathers, kept: Kept) -> Progress | None:
        """The gather that the backward pass needs first."""
        payload = None if kept.last is None else kept.last[1]
        return self.start(gathers, kept.stacked, self.loop.length - 1, payload)

    def _again(self, gathers: Gathers, kept: Kept, step: Any) -> Progress | None:
        return self.start(gathers, kept.stacked, step, row_of(kept.rows[1], step))

    def backward(
        self,
        gathers: Gathers,
        kept: Kept,
        gather: tuple[Progress | None, Progress | None],
        pipeline: Pipeline,
        gradient: Any,
    ) -> tuple[Callable[[], Any], Any]:
        """Takes the backward pass through all layers, from the last step to the first.

        ``gather`` are the gather of the last step, which has arrived, and that of the function
        before the scan, which is to come. Returns a function that gives the reduced gradients of
        the parameters once the pipeline has finished, and the gradient of the scan's input.
        """
        last, (mine, before) = self.loop.length - 1, gather
        back = _Back(self, gathers, kept, gradient)
        passing, own = back.start, None if mine is None else mine.result
        # With one layer, or without gathers, the function before the scan is next to be gathered.
        coming = before if mine is None or not last else self._again(gathers, kept, last - 1)
        begun, passing = back.step(pipeline, last, own, passing, coming)
        finals, rows = {last: begun}, self.reducer.rows(begun.shapes, self.loop.length)
        # With gathers step 0 is after the loop, beside the gather of the function before the scan.
        first = 0 if mine is None else 1
        if last > first:
            own = None if coming is None or mine is None else coming.result
            held, (passing, own, rows) = back.loop(
                pipeline, begun, range(last - 1, first - 1, -1), (passing, own, rows)
            )
            # If nothing travels, each turn wrote its own row, and that of the last step is left.
            # Else a turn wrote the row of the turn before, and that of the loop's last step is
            # left.
            finals = {last: begun} if held is None else {first: held}
        elif last:  # two layers with gathers: the loop would have no turn
            own = coming.result  # type: ignore[union-attr]
        if mine is not None and last:
            finals[0], passing = back.step(pipeline, 0, own, passing, before)
        return lambda: back.joined(rows, finals), back.finished(passing)


class _Ahead:
    """The gathers of a scan's forward pass: one travels while those around it are coded.

    In the turn of step t the payload of step t + 1 travels, from the first moment on: the turn
    before has encoded it. Meanwhile the payload of step t is decoded, which has arrived in the turn
    before, and that of step t + 2 is encoded. So a loop carries both payloads, and no whole
    parameters. What a gather takes, such as a row of the masters, is read again in each turn.
    """

    def __init__(self, layers: Layers, gathers: Gathers, taken: Any, mine: Progress):
        self._layers, self._gathers, self._taken = layers, gathers, taken
        self._last = layers.loop.length - 1
        current = None if gathers.pending is None else taken[1]
        self._fresh = self._start(current, 0)
        # Decoded once more in the first turn; nobody takes the first result, so XLA drops that.
        self._arrived = mine.arrived(mine.payload)
        self._ready = self._prepared(current, min(1, self._last))
        self.state = self.landed(self._arrived, (self._ready, current))
        """The state that the first turn takes."""

    def turn(self, state: Any, x: Any, t: Any) -> tuple[Progress, Progress, Any, Any]:
        """The next step's gather, on its way; this one's, which is over; x; what `landed` takes."""
        arrived, ready, current = state
        coming = self._ready.again(self._start(current, t + 1), ready)
        x, arrived = hold([coming], (x, arrived))
        if coming.rounds_left:
            coming.exchange()
        own, current = self._decoded(arrived, current, t)
        # One too many in the last turn: another copy of the layer's program would cost more.
        following = self._prepared(current, jnp.minimum(t + 2, self._last))
        return coming, own, x, (following, current)

    def landed(self, coming: Progress, state: tuple[Progress, Any]) -> Any:
        """The state that the next turn takes, once the payload has arrived."""
        following, current = state
        return coming.beyond(self._fresh), following.beyond(self._fresh), current

    def last(self, state: Any) -> tuple[Progress, Any]:
        """The last step's gather, which is over, and the parameters if they are pending."""
        arrived, _, current = state
        return self._decoded(arrived, current, self._last)

    def _start(self, current: Any, step: Any) -> Progress:
        # Differences are added to the copies as they are now. The loop carries these, whose rows
        # become current in place.
        taken = self._taken if current is None else (self._taken[0], current)
        return self._layers.start(self._gathers, taken, step)  # type: ignore[return-value]

    def _prepared(self, current: Any, step: Any) -> Progress:
        progress = self._start(current, step)
        if progress.rounds_left:
            progress.prepare()
        return progress

    def _decoded(self, arrived: Any, current: Any, step: Any) -> tuple[Progress, Any]:
        own = self._arrived.again(self._start(current, step), arrived)
        own.compute()
        if current is not None:
            current = _put(current, own.result, self._layers.loop.place(step))
        return own, current


class _Back:
    """The backward pass of one scan."""

    def __init__(self, layers: Layers, gathers: Gathers, kept: Kept, gradient: Any):
        self._layers, self._gathers, self._kept = layers, gathers, kept
        alone = layers.loop.alone
        self._gradient = gradient[0] if alone else gradient
        self._outputs = gradient[1] if alone else None
        shared = [jnp.zeros_like(x) for x in inexact_leaves(kept.shared)]
        self.start = (
            inexact_leaves(self._gradient),
            gathers.axis.like(shared, inexact_leaves(kept.shared)),
        )
        """The gradients that pass from step to step: of x, and of what is shared."""

    def step(
        self, pipeline: Pipeline, step: Any, own: Any, passing: Any, coming: Progress | None
    ) -> tuple[Progress, Any]:
        """One step: its gradient begins to travel. ``own`` are gathered parameters."""
        loop, kept, gathers = self._layers.loop, self._kept, self._gathers
        # In the loop a step is traced, and is never the last one if there are gathers.
        last = kept.last is not None and isinstance(step, int) and step == loop.length - 1
        rows: Any = kept.last if last else row_of(kept.rows, step)
        pull, _ = rows
        place = loop.place(step)
        own = gathers.axis.inexact_to_varying(row_of(kept.stacked, place) if own is None else own)
        outputs = row_of_gradients(self._outputs, place)

        def back(passing: Any) -> tuple[Any, Any]:
            found, added = passing
            given = gradient_like(self._gradient, found), outputs
            own_gradient, shared, x = pull((own, kept.shared))(given)
            # Each layer has a gradient of what all share; their sum is this worker's.
            added = [a + b for a, b in zip(added, inexact_leaves(shared), strict=True)]
            return own_gradient, (inexact_leaves(x), added)

        told = self._layers.reducer, back, place, passing, coming
        return pipeline.step(*told, seeds=gathers.seeds)

    def loop(
        self, pipeline: Pipeline, begun: Progress, steps: range, carry: tuple[Any, Any, Any]
    ) -> tuple[Progress | None, tuple[Any, Any, Any]]:
        """All these steps; the reduction of the last one has begun, unless it is done."""
        layers, gathers, kept = self._layers, self._gathers, self._kept
        # The first reduction is in the loop's carry: turns need equal ones.
        with pipeline.beside_a_loop(begun) as held:

            def turn(carry: Any, t: Array) -> tuple[Any, None]:
                (passing, own, rows), values = carry
                # The reduction of the turn before, from the arrays that the loop carries.
                before = None if held is None else held.holding(values)
                inner = pipeline.inside(before)
                coming = None if own is None else layers._again(gathers, kept, t - 1)
                begun, passing = self.step(inner, t, own, passing, coming)
                # Only a payload crosses to the next turn: all else ends in this one.
                inner.settle(begun)
                # Where nothing travels the gradient of this very step is done.
                done, at = (begun, t) if before is None else (before, t + 1)
                rows = self._written(rows, done, at)
                own = None if coming is None else coming.result
                return ((passing, own, rows), None if held is None else begun.held), None

            values = None if held is None else held.held
            (carry, values), _ = layers.loop.scan(turn, (carry, values), steps)
            if held is not None:
                held = pipeline.goes_on(held.holding(values))
        return held, carry

    def _written(self, rows: list[Array], done: Progress, step: Any) -> list[Array]:
        """The gradients of all layers, with those of this step."""
        return _put(rows, self._layers.reducer.row(done.result), self._layers.loop.place(step))

    def joined(self, rows: list[Array], finals: dict[int, Progress]) -> Any:
        """The gradients of all layers, with those of reductions that have just finished."""
        for step, progress in finals.items():
            rows = self._written(rows, progress, step)
        return self._layers.reducer.stacked(rows, self._layers.loop.length)

    def finished(self, passing: Any) -> Any:
        """The gradient of the scan's input."""
        of_x, of_shared = passing
        x = gradient_like(self._gradient, of_x)
        return (gradient_like(self._kept.shared, of_shared), x) if self._layers.loop.alone else x


def row_of(stacked: Any, place: Any) -> Any:
    """This row of every leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, 0, keepdims=False), stacked)


def row_of_gradients(stacked: Any, place: Any) -> Any:
    """This row of every gradient."""
    # Gradients of integers are float0, of which no row can be taken.
    rows = row_of(inexact_leaves(stacked), place)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    return gradient_like(like, rows)


def _put(stacked: Any, row: Any, place: Any) -> Any:
    """The stacked leaves with this row."""
    put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, place, 0)
    return jax.tree.map(put, stacked, row)
