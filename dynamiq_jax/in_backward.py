"""Reductions inside the backward pass: of each layer's gradients as soon as they are there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._compat import (
    AxisNames,
    assume_invarying,
    axis_tuple,
    to_varying,
    varying_axes,
)
from dynamiq_jax.arguments import (
    AnyMethod,
    AnyTopology,
    ByPath,
    axis_sizes,
    check_axis,
    chooses_by_path,
    resolve,
)
from dynamiq_jax.by_path import methods_of
from dynamiq_jax.collectives import Op, reduce
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.phases import Progress, Traced, trace
from dynamiq_jax.seeds import fold_seed, key_words


def reduce_in_backward(
    params: Any,
    axis_name: AxisNames,
    *,
    op: Op = "mean",
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    specs: Any = None,
) -> Any:
    """The parameters themselves; their gradients are reduced, compressed, on their way back.

    Stands in the loss, where parameters are used. It casts replicated parameters to varying ones,
    as ``jax.lax.pcast(params, axis_name, to="varying")`` does, and its derivative is `dq.reduce`.
    So `jax.grad` of such a loss gives reduced gradients, and nothing is to be reduced after it::

        def layer(x, params):  # of jax.lax.scan, or of a loop in Python
            return block(dq.reduce_in_backward(params, "data"), x), None

    In a scan over layers the reduction is a part of the scan's backward pass: layer by layer,
    where a reduction after `jax.grad` waits for the last of them.

    * The loss is this worker's own, without `psum` or `pmean` in it, and `jax.grad` is inside the
      map: the derivative of a loss that is averaged already has a 1 / n of its own.
    * All leaves of one call share buckets, and small ones travel exactly, as in `reduce`: call it
      with a whole layer. ``DynamiQ(scale_axis="auto")`` looks at these leaves alone.
    * Parameters that are used twice pass once, above both uses.
    * Not inside `dq.value_and_grad`, which reduces by itself. What runs outside of any map, such as
      an evaluation, takes the model without it.
    * Derivatives are of the first order, in reverse mode.

    Args:
      params: any pytree; integers and the like pass. Where it has such leaves, ``method`` by path
        and ``specs`` see `None` in their place.
      axis_name: as for `psum`.
      op: "mean" or "sum".
      method: as for `psum`; none with memory, which has nowhere to go.
      topology: as for `psum`.
      key: as for `psum`. In a scan all layers see the same key, and round alike: fold in the
        layer's number, or leave it out.
      specs: as for `psum`.

    Returns:
      A tree like ``params``, varying over the axis.

    Raises:
      ValueError: ``op`` is neither, or a method has memory; in the backward pass, what `reduce`
        raises.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis_name = check_axis(axis_name)
    options = {"op": op, "method": method, "topology": topology, "specs": specs}
    reducer = _Reducer(params, axis_name, "reduce_in_backward", **options)

    @jax.custom_vjp
    def passed(params: Any, words: Array | None) -> Any:
        return to_varying(params, axis_name)

    def forward(params: Any, words: Array | None) -> tuple[Any, Array | None]:
        return passed(params, words), words

    def backward(words: Array | None, gradients: Any) -> tuple[Any, None]:
        return reducer.joined(gradients, reducer.reduce(reducer.moving(gradients), words)), None

    passed.defvjp(forward, backward)
    return passed(params, key_words(key))


def sequential(
    functions: Sequence[Callable[[Any, Any], Any]],
    params: Sequence[Any],
    x: Any,
    axis_name: AxisNames,
    *,
    lag: int = 2,
    op: Op = "mean",
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
    specs: Sequence[Any] | None = None,
) -> Any:
    """Functions one after another; each one's gradients are reduced beside the backward pass.

    ``x = f(p, x)`` for every function and its parameters, and the last ``x`` is returned. In the
    backward pass the gradients of a function are reduced, compressed, while the backward pass of
    those before it goes on::

        functions = [embed, *[block] * n_layers, head_and_loss]
        loss = dq.sequential(functions, [p["embed"], *p["blocks"], p["head"]], tokens, "data")

    XLA's scheduler does not do this of its own accord when gradients are reduced after `jax.grad`:
    it puts the matrix products of the weights' gradients as late as they may be, and reductions of
    several steps after all of them. Here the order is part of the program (optimization barriers),
    a pipeline: a function's gradients are complete before the backward pass goes on; while it
    passes the next function, their statistics travel, in the one after that their first payloads,
    and so on, while the next functions' reductions follow one round behind (`dynamiq_jax.phases`).
    Compile with `xla_options()`, or transfers begin late.

    All that `reduce_in_backward` says holds: the loss is this worker's own, `jax.grad` is inside
    the map, parameters that two functions use pass once, above, by `reduce_in_backward`. Each
    function's gradients are buckets of their own: of a layer or more, not of a norm. Wrap functions
    in `jax.checkpoint` to compute them again rather than keep what their backward pass needs. What
    functions need beside their parameters, as labels, travels in ``x``: JAX refuses traced values
    that they close over where these are differentiated, and where the whole loss is inside of
    another `jax.jit`, `jax.checkpoint` or scan.

    Args:
      functions: of (own parameters, x), each to the next one's x; any pytrees.
      params: a pytree for every function.
      x: what the first function takes; integers and the like pass.
      axis_name: as for `psum`.
      lag: functions whose backward pass a round of transfers may take, at least 0: with 0 the
        backward pass waits for every reduction. More hides more on slow links; gradients wait in
        memory for as long.
      op: "mean" or "sum".
      method: as for `psum`; none with memory, which has nowhere to go.
      topology: as for `psum`.
      key: as for `psum`; the function's number is folded in.
      specs: a tree as for `psum` for every function.

    Returns:
      What the last function returns.

    Raises:
      ValueError: there are not as many params, or specs, as functions; or as `reduce_in_backward`.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis_name = check_axis(axis_name)
    for name, given in (("functions", functions), ("params", params), ("specs", specs or ())):
        if isinstance(given, Mapping):
            raise ValueError(f"{name} is a mapping, which has no order; pass a list of its values")
    functions, params = tuple(functions), tuple(params)
    specs = (None,) * len(functions) if specs is None else tuple(specs)
    for name, given in (("params", params), ("specs", specs)):
        if len(given) != len(functions):
            raise ValueError(
                f"{len(functions)} functions and {len(given)} {name}: pass one for each function"
            )
    if not functions:
        raise ValueError("functions is empty: pass at least one")
    if isinstance(lag, bool) or not hasattr(lag, "__index__") or lag < 0:
        raise ValueError(f"lag={lag!r} must be an integer of at least 0, such as 2")
    options = {"op": op, "method": method, "topology": topology}
    reducers = [
        _Reducer(own, axis_name, "sequential", specs=spec, **options)
        for own, spec in zip(params, specs, strict=True)
    ]

    @jax.custom_vjp
    def run(params: Any, x: Any, words: Array | None) -> Any:
        for function, own in zip(functions, to_varying(params, axis_name), strict=True):
            x = function(own, x)
        return x

    def forward(params: Any, x: Any, words: Array | None) -> tuple[Any, Any]:
        pulls = []
        for function, own in zip(functions, to_varying(params, axis_name), strict=True):
            x, pull = jax.vjp(function, own, x)
            pulls.append(pull)
        return x, (pulls, words)

    def backward(kept: Any, gradient: Any) -> tuple[Any, Any, None]:
        pulls, words = kept
        pipeline = _Pipeline(reducers, lag)
        for number, pull in reversed(list(enumerate(pulls))):
            own, gradient = _together(*pull(gradient))
            own_words = None if words is None else fold_seed(words, number)
            gradient = pipeline.step(number, own, own_words, gradient)
        return pipeline.finish(), gradient, None

    run.defvjp(forward, backward)
    return run(params, x, key_words(key))


class _Pipeline:
    """Reductions on their way, each with one round of collectives under way at a time."""

    def __init__(self, reducers: Sequence["_Reducer"], lag: int):
        self._reducers, self._lag = reducers, lag
        self._whole: list[Any] = [None] * len(reducers)
        self._progress: dict[int, Progress] = {}
        self._due: dict[int, int] = {}
        """When what is under way is to be there, by number of the reduction."""
        self._traced: list[tuple[Any, Traced]] = []
        self._now = 0

    def step(self, number: int, gradients: Any, words: Array | None, passing: Any) -> Any:
        """Begins a reduction; what of the others is due goes on to its next round.

        Returns ``passing``, what the next part of the backward pass takes. It waits for what was
        due, and for the kernels that make of it what is sent next.
        """
        self._whole[number] = gradients
        self._progress[number] = self._begin(number, gradients, words)
        self._due[number] = self._now
        while due := [i for i, time in self._due.items() if time <= self._now]:
            moving = [self._progress[i] for i in due]
            passing = _hold(moving, passing)
            for progress in moving:
                progress.compute()
            passing = _hold(moving, passing)
            for i, progress in zip(due, moving, strict=True):
                if progress.done:
                    del self._due[i]
                else:
                    progress.exchange()
                    self._due[i] = self._now + self._lag
        self._now += 1
        return passing

    def finish(self) -> tuple[Any, ...]:
        """Runs all rounds that are left, and returns all reductions' results."""
        while self._due:
            for i in list(self._due):
                self._progress[i].compute()
                if self._progress[i].done:
                    del self._due[i]
                else:
                    self._progress[i].exchange()
        return tuple(
            reducer.joined(whole, self._progress[i].result)
            for i, (reducer, whole) in enumerate(zip(self._reducers, self._whole, strict=True))
        )

    def _begin(self, number: int, gradients: Any, words: Array | None) -> Progress:
        """Functions whose gradients look the same share what is traced."""
        reducer = self._reducers[number]
        own = reducer.moving(gradients)
        likeness = jax.tree.map(jax.typeof, own), words is None, reducer.specs
        alike = (traced for other, traced in self._traced if other == likeness)
        if (traced := next(alike, None)) is None:
            traced = trace(reducer.reduce, own, words)
            self._traced.append((likeness, traced))
        return Progress(traced, own, words)


def _hold(progresses: Sequence[Progress], passing: Any) -> Any:
    """``passing``, and with it what the progresses take next: all wait for each other."""
    passing, held = _together(passing, [progress.ready for progress in progresses])
    for progress, ready in zip(progresses, held, strict=True):
        progress.ready = ready
    return passing


def _together(*trees: Any) -> tuple[Any, ...]:
    """The same trees; whatever needs one of their arrays waits for all of them.

    JAX lets what passes a barrier vary over all axes over which one of the arrays does.
    """

    def as_before(held: Array, x: Array) -> Array:
        return assume_invarying(held, tuple(sorted(varying_axes(held) - varying_axes(x))))

    leaves, treedef = jax.tree.flatten(trees)
    moving = [x for x in leaves if x.dtype != jax.dtypes.float0]
    held = iter(map(as_before, lax.optimization_barrier(moving), moving))
    return treedef.unflatten(x if x.dtype == jax.dtypes.float0 else next(held) for x in leaves)


class _Reducer:
    """Reduces gradients of ``params``, as `dq.reduce` does; checks the options first."""

    def __init__(
        self,
        params: Any,
        axis_name: AxisNames,
        caller: str,
        *,
        op: Op,
        method: AnyMethod | None,
        topology: AnyTopology | None,
        specs: Any,
    ):
        check_choice("op", op, get_args(Op))
        _check_memory(params, method, topology, axis_sizes(axis_name, caller), caller)
        own_axes = set(axis_tuple(axis_name))
        self._varied = [tuple(varying_axes(x) & own_axes) for x in jax.tree.leaves(params)]
        self._by_name = specs is not None or chooses_by_path(method)
        self._axis_name, self._caller, self.specs = axis_name, caller, specs
        self._options = {"op": op, "method": method, "topology": topology, "specs": specs}

    def reduce(self, moving: Any, words: Array | None) -> Any:
        """Of the gradients that move, with the words of a key."""
        return reduce(moving, self._axis_name, key=words, **self._options).tree

    def moving(self, gradients: Any) -> Any:
        """The gradients but for those of integers, which are float0."""
        leaves, treedef = jax.tree.flatten(gradients)
        moves = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        own = [_once(x, self._caller) for x, m in zip(leaves, moves, strict=True) if m]
        if all(moves):
            return treedef.unflatten(own)
        if not self._by_name:
            return own
        found = iter(own)
        return treedef.unflatten(next(found) if m else None for m in moves)

    def joined(self, gradients: Any, reduced: Any) -> Any:
        """A tree like the gradients, with what was reduced in it.

        The gradient of what came in varying varies, too: in type, with the same bits everywhere.
        """
        leaves, treedef = jax.tree.flatten(gradients)
        found = iter(jax.tree.leaves(reduced))
        total = [next(found) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
        pairs = zip(total, self._varied, strict=True)
        return treedef.unflatten(to_varying(x, axes) if axes else x for x, axes in pairs)


def _once(x: Array, caller: str) -> Array:
    """``x``, which has no derivative."""

    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"{caller} has derivatives of the first order only; for others reduce after "
            "jax.grad, with dq.pmean"
        )

    return same(x)


def _check_memory(
    params: Any,
    method: AnyMethod | None,
    topology: AnyTopology | None,
    sizes: tuple[int, ...],
    caller: str,
) -> None:
    """Refuses methods with memory ahead of the backward pass."""
    if chooses_by_path(method):
        chosen = [found for _, found in methods_of(params, cast(ByPath, method))]
    else:
        chosen = [resolve(method, topology, sizes).method]
    for found in chosen:
        if found is not None and found.needs_state:
            raise ValueError(
                f"method={found} has memory, and a backward pass has nowhere to keep it; pass one "
                "without, or reduce after jax.grad with dq.reduce"
            )
