"""Reductions and gathers that are under way beside other work, round by round."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.core.compat import assume_invarying, varying_axes
from dynamiq_jax.core.seeds import fold_seeds
from dynamiq_jax.jaxprs.phases import Progress, Slot, Traced, cut, seeds_of
from dynamiq_jax.training.in_backward import Reducer

LATE = 4
"""The most reductions whose last kernels wait for the end of the backward pass.

A waiting scatter holds all terms of this worker and the arrived payloads: more than its result.
"""


class Seeds:
    """The seeds of all functions of a pass from one key, by one computation for those alike."""

    def __init__(self, words: Array | None, count: int):
        self._words = None if words is None else fold_seeds(words, range(count))
        self._rows: list[tuple[Traced, dict[Slot, Array]]] = []

    def words(self, number: int) -> Array | None:
        """The seed words of function ``number``: the key's words, with the number folded in."""
        return None if self._words is None else self._words[number]

    def of(self, traced: Traced, number: int) -> dict[Slot, Array]:
        """The values of ``traced.seeds`` in function ``number``."""
        rows = next((rows for known, rows in self._rows if known is traced), None)
        if rows is None:
            rows = {}
            if self._words is not None and traced.seeds:
                rows = jax.vmap(functools.partial(seeds_of, traced))(self._words)
            self._rows.append((traced, rows))
        return {slot: values[number] for slot, values in rows.items()}


class Traces:
    """Traced functions, one for all arguments that look alike."""

    def __init__(self):
        self._known: list[tuple[Any, Traced]] = []

    def start(
        self, function: Callable, own: Any, seeds: Seeds, number: int, alike: Any
    ) -> Progress:
        """A call ``function(own, words)``, with the seed words of function ``number``.

        Functions count as equal if ``alike`` is, and the types of ``own``.
        """
        words = seeds.words(number)
        likeness = jax.tree.flatten((jax.tree.map(jax.typeof, own), alike))
        found = (traced for other, traced in self._known if other == likeness)
        if (traced := next(found, None)) is None:
            shapes = jax.make_jaxpr(function, return_shape=True)(own, words)
            traced = cut(*shapes, 0 if words is None else 1)
            self._known.append((likeness, traced))
        return Progress.start(traced, own, words, seeds=seeds.of(traced, number))


class Pipeline:
    """Reductions on their way, one round of collectives after the other."""

    def __init__(self, seeds: Seeds):
        self._seeds, self._traces = seeds, Traces()
        self._ready: list[Progress] = []
        """Reductions that go on to their next collectives: all that are not done."""
        self._done: list[Progress] = []
        """Up to `LATE` reductions that are over but for last kernels, which may run at any time."""

    def step(
        self,
        reducer: Reducer,
        pull: Callable,
        number: int,
        gradient: Any,
        coming: Progress | None,
    ) -> tuple[Progress, Any]:
        """Takes the backward pass through one function and begins the reduction of its gradients.

        Returns the reduction and the gradient of the function's input. This gradient waits for the
        transfers beside the function, for the kernels that make of them what is sent next, for the
        gather that is ``coming``, and for the last kernels of all but `LATE` reductions.
        """
        for progress in self._ready:
            progress.exchange()
        own, gradient = pull(send(coming, gradient))
        own, gradient = together(reducer.moving(own), gradient)
        gradient = arrive(coming, gradient)
        alike = reducer.specs, reducer.copied
        begun = self._traces.start(reducer.reduce, own, self._seeds, number, alike)
        moving = [*self._ready, begun]
        gradient = hold(moving, gradient)
        self._ready = self._compute(moving)
        now, self._done = self._done[:-LATE], self._done[-LATE:]
        return begun, hold([*self._ready, *now], gradient)

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
            progress.compute()
        self._done += [progress for progress in moving if progress.done and progress.ready]
        return [progress for progress in moving if not progress.done]


def hold(moving: Sequence[Progress], passing: Any) -> Any:
    """``passing``, and with it what the reductions take next: all wait for each other."""
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
    """``passing``, which waits for what was sent; then the gather's last kernels.

    Rounds after the payload's come first: over links inside of a host these take little.
    """
    while progress is not None and not progress.done:
        passing = hold([progress], passing)
        progress.compute()
        if not progress.done:
            progress.exchange()
    return passing


def together(*trees: Any) -> tuple[Any, ...]:
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
