"""Reductions and gathers that are under way beside other work, round by round."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from dynamiq_jax.core.axis import Axis, fold_seeds, together
from dynamiq_jax.engine.run import all_at_once
from dynamiq_jax.jaxprs.phases import SMALL, Progress, Slot, Traced, cut, seeds_of
from dynamiq_jax.reduction.reduction import Pending
from dynamiq_jax.training.in_backward import Reducer

LATE = 4
"""The most reductions whose last kernels wait for the end of the backward pass.

A waiting scatter holds all terms of this worker and the arrived payloads: more than its result.
"""


class Seeds:
    """The seeds of all functions of a pass from one key, by one computation for those alike."""

    def __init__(self, words: Array | None, count: int):
        # All at once: as many computations as functions would be in the program otherwise.
        self._words = None if words is None else fold_seeds(words, range(count))
        self._rows: list[tuple[Traced, dict[Slot, Array]]] = []

    def words(self, number: Any) -> Array | None:
        """The seed words of function ``number``: the key's words, with the number folded in."""
        return None if self._words is None else self._words[number]

    def of_layers(self, number: int, count: int) -> "Seeds":
        """The seeds of a function's layers, of which the row's number is folded in."""
        return Seeds(self.words(number), count)

    def of(self, traced: Traced, number: Any) -> dict[Slot, Array]:
        """The values of ``traced.seeds`` in function ``number``."""
        rows = next((rows for known, rows in self._rows if known is traced), None)
        if rows is None:
            rows = {}
            if self._words is not None and traced.seeds:
                # Equal functions differ in their words alone, so one batched computation has the
                # seeds of all.
                rows = jax.vmap(functools.partial(seeds_of, traced))(self._words)
            self._rows.append((traced, rows))
        return {slot: values[number] for slot, values in rows.items()}


class Traces:
    """Traced functions, one for all arguments that look alike."""

    def __init__(self):
        self._known: list[tuple[Any, Traced]] = []

    def start(
        self, function: Callable, own: Any, seeds: Seeds, number: Any, alike: Any,
        *, small: int = SMALL,
    ) -> Progress:  # fmt: skip
        """A call ``function(own, words)``, with the seed words of function ``number``.

        Functions count as equal if ``alike`` is, and the types of ``own``.
        """
        words = seeds.words(number)
        likeness = jax.tree.flatten((jax.tree.map(jax.typeof, own), alike, small))
        # Compared, not hashed: specs and types in the key need no hash.
        found = (traced for other, traced in self._known if other == likeness)
        if (traced := next(found, None)) is None:
            with all_at_once():  # a wait inside of a call would be a round
                shapes = jax.make_jaxpr(function, return_shape=True)(own, words)
            traced = cut(*shapes, 0 if words is None else 1, small=small)
            self._known.append((likeness, traced))
        return Progress.start(traced, own, words, seeds=seeds.of(traced, number))


class Gathers(NamedTuple):
    """How a pass gathers parameters for one function, or for each layer of a scan."""

    axis: Axis
    reducer: Reducer
    seeds: Seeds
    traces: Traces
    pending: Pending | None
    keeps: bool
    """Whether payloads are kept for the backward pass."""

    def start(self, own: Any, number: Any, payload: Any = None) -> Progress | None:
        """The gather of shards or differences, not started yet; `None`: nothing is gathered.

        If the payload of an equal gather is passed, the gather continues after the payload's
        arrival.
        """
        specs, pending = self.reducer.specs, self.pending
        if pending is not None:

            def current(own: Any, words: Array) -> Any:
                (masters, copies), ready = own
                told = dataclasses.replace(pending, ready=ready)
                return told.current(masters, copies, words, specs)

            # An operand of the traced function: closed over, it would be a constant of the first
            # trace.
            own = own, pending.ready
            return self.traces.start(current, own, self.seeds, number, specs)
        if not self.reducer.gathers:
            return None
        progress = self.traces.start(self.reducer.whole, own, self.seeds, number, specs)
        return progress if payload is None else progress.arrived(payload)


class Beside(NamedTuple):
    """Gathers of the functions that follow, beside one function of a forward pass."""

    coming: Progress | None
    second: Progress | None
    third: Progress | None

    def send(self, passing: Any) -> Any:
        """``passing``, after which the next function's parameters are on their way."""
        return send(self.coming, announce(self.second, self.third, passing))

    def arrive(self, passing: Any) -> Any:
        """``passing``, which waits for them."""
        return arrive(self.coming, passing)


class Pipeline:
    """Reductions on their way, one round of collectives after the other."""

    def __init__(self, seeds: Seeds, traces: Traces | None = None):
        self._seeds, self._traces = seeds, traces or Traces()
        self._ready: list[Progress] = []
        """Reductions that go on to their next collectives: all that are not done."""
        self._done: list[Progress] = []
        """Up to `LATE` reductions that are over but for last kernels, which may run at any time."""

    def step(
        self,
        reducer: Reducer,
        pull: Callable,
        number: Any,
        gradient: Any,
        coming: Progress | None,
        *,
        seeds: Seeds | None = None,
    ) -> tuple[Progress, Any]:
        """Takes the backward pass through one function and begins the reduction of its gradients.

        Returns the reduction and the gradient of the function's input. This gradient waits for the
        transfers beside the function, for the kernels that make of them what is sent next, for the
        gather that is ``coming``, and for the last kernels of all but `LATE` reductions. A layer of
        a scan has ``seeds`` of its own.
        """
        # The transfers begin before the products, which take nothing from them.
        for progress in self._ready:
            progress.exchange()
        own, gradient = pull(send(coming, gradient))
        # Gradients of parameters are due here, not when something takes them.
        own, gradient = together(reducer.moving(own), gradient)
        gradient = arrive(coming, gradient)
        alike = reducer.specs, reducer.copied
        # In a loop late sums cannot join those of other layers: they travel in the first round.
        small = SMALL if seeds is None else 0
        seeds = seeds or self._seeds
        begun = self._traces.start(reducer.reduce, own, seeds, number, alike, small=small)
        # Its statistics need nothing that is on its way.
        begun.compute()
        moving = [*self._ready, begun]
        gradient = hold(moving, gradient)
        self._ready = self._compute(moving)
        # The newest ones wait: their last kernels may run beside the transfers that follow.
        now, self._done = self._done[:-LATE], self._done[-LATE:]
        return begun, hold([*self._ready, *now], gradient)

    @contextlib.contextmanager
    def beside_a_loop(self, begun: Progress) -> Iterator[Progress | None]:
        """A block with a loop over layers. It gets the reduction that has ``begun``, to carry it.

        That one is ready to send its payload, or `None` if nothing moves. The other reductions have
        one round beside the whole loop.
        """
        # Outside of the loop, so that what the loop carries is a payload in each turn.
        others = [progress for progress in self._ready if progress is not begun]
        if begun.light_left:
            begun.exchange()
            # Statistics go first: the loop's first payload is then encoded beside those of others.
            hold([begun, *others], None)
        begun.prepare()
        for progress in others:
            progress.exchange()
        self._ready = []
        yield None if begun.done else begun
        self._ready = [*self._compute(others), *self._ready]

    def inside(self, before: Progress | None) -> "Pipeline":
        """The pipeline in a turn of the loop, with the reduction that the turn before has begun."""
        # The same traces: a turn's reduction equals the one before the loop, which it continues.
        in_turn = Pipeline(self._seeds, self._traces)
        in_turn._ready = [] if before is None else [before]
        return in_turn

    def settle(self, begun: Progress) -> None:
        """Runs reductions to their ends, and that which has ``begun`` up to its payload."""
        left = lambda x: x.light_left if x is begun else x.rounds_left
        while moving := [progress for progress in self._ready if left(progress)]:
            for progress in moving:
                progress.exchange()
            self._compute(moving)

    def goes_on(self, progress: Progress) -> Progress:
        """Takes up the reduction that a loop has carried."""
        self._ready.append(progress)
        return progress

    def finish(self) -> None:
        """Runs all rounds that are left.

        No function is left whose backward pass would hide them. The last kernels of reductions that
        are over do: an equal part of them before each arrival. What these write is an array of its
        own then; slices and shapes of it can still be part of what takes them.
        """
        arriving: list[Progress] = []
        arrivals = sum(progress.rounds_left for progress in self._ready)
        while arriving or self._ready:
            for progress in arriving:
                # Rounded up, so that none are left for the time after the last arrival.
                share = -(-len(self._done) // arrivals)
                meanwhile, self._done = self._done[:share], self._done[share:]
                if meanwhile:
                    hold([progress, *meanwhile], None)
                arrivals -= 1
            moving = [*self._compute(arriving), *self._ready]
            for progress in moving:
                progress.exchange()
            arriving, self._ready = moving, []

    def _compute(self, moving: Sequence[Progress]) -> list[Progress]:
        """Runs what has arrived on its way; returns those that go on."""
        for progress in moving:
            if not progress.computed:
                progress.compute()
        self._done += [progress for progress in moving if progress.done and progress.ready]
        return [progress for progress in moving if not progress.done]


def hold(moving: Sequence[Progress], passing: Any) -> Any:
    """``passing``, and with it what the reductions take next: all wait for each other."""
    # A barrier of one tree would only forbid fusions.
    if not moving:
        return passing
    passing, held = together(passing, [progress.ready for progress in moving])
    for progress, ready in zip(moving, held, strict=True):
        progress.ready = ready
    return passing


def send(progress: Progress | None, passing: Any) -> Any:
    """``passing``, after which a gather runs up to the round with its payload, and sends that.

    In the rounds before it workers agree on little.
    """
    if progress is None:
        return passing
    passing = hold([progress], passing)
    progress.prepare()
    if not progress.done:
        passing = hold([progress], passing)
        progress.exchange()
    return passing


def announce(coming: Progress | None, following: Progress | None, passing: Any) -> Any:
    """``passing``, after which a gather runs its rounds before the one with the payload.

    Its statistics then travel with the payload of the gather before it, and its payload is ready to
    go when that one has arrived. The gather that follows computes its own statistics meanwhile.
    """
    moving = [x for x in (coming, following) if x is not None and x.light_left]
    passing = hold(moving, passing)
    for progress in moving:
        if progress is coming:
            progress.prepare()
        elif not progress.computed:
            progress.compute()
    return passing


def arrive(progress: Progress | None, passing: Any) -> Any:
    """``passing``, which waits for what was sent; then the gather's last kernels."""
    if progress is None or progress.done:
        return passing
    passing = land(progress, passing)
    progress.compute()
    return passing


def land(progress: Progress, passing: Any) -> Any:
    """``passing``, which waits for what was sent; the gather's last kernels have not run.

    Rounds after the payload's come first: over links inside of a host these take little.
    """
    while progress.rounds_left:
        passing = hold([progress], passing)
        progress.compute()
        progress.exchange()
    return hold([progress], passing)


def without(pull: Callable, known: Any) -> Callable:
    """A function of the arrays in ``known`` that returns ``pull``, and keeps no copy of them."""
    leaves, treedef = jax.tree.flatten(pull)
    # By identity: JAX's pullback keeps the very arrays that it was given.
    places = {id(x): place for place, x in enumerate(jax.tree.leaves(known))}
    known_at = [places.get(id(x)) for x in leaves]
    kept = [x for x, place in zip(leaves, known_at, strict=True) if place is None]

    def pull_of(kept: list[Array], known: Any) -> Callable:
        given, rest = jax.tree.leaves(known), iter(kept)
        return treedef.unflatten(next(rest) if at is None else given[at] for at in known_at)

    return jax.tree_util.Partial(pull_of, kept)
