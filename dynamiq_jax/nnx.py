"""Gradients of losses of Flax NNX modules.

```python
import dynamiq_jax as dq  # dq.nnx needs flax; the library itself does not

grad_fn = dq.nnx.value_and_grad(loss_fn, axis_name="data")  # was nnx.value_and_grad(loss_fn)
loss, grads = grad_fn(model, batch)
```
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.compression.shards import told_gathers
from dynamiq_jax.core.axis import Axis, AxisName, is_explicit
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.former import formerly, unless
from dynamiq_jax.jaxprs.walk import passed_arguments
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.training.auto_axes import same_everywhere
from dynamiq_jax.training.loss import Told, Wanted, is_key, leaf_specs
from dynamiq_jax.training.value_and_grad import (
    ForAuto,
    check_names,
    gradients,
    mesh_around,
)

__all__ = ["value_and_grad"]


@formerly(reduce=unless("unreduced", default=True), gather=unless("ungathered", default=True))
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    axis_name: AxisName,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    compression: AnyPolicy | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    metrics: bool = False,
    op: Op = "mean",
    unreduced: bool = False,
    ungathered: bool = False,
    specs: Any = None,
    batch_specs: Any = None,
    closed_specs: Any = None,
    weight: Callable[..., Any] | None = None,
    aux: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` of the global batch's loss (Explicit axes) or a worker's (Auto axes).

    Gradients are reduced over the data axes, compressed. The loss takes modules as positional or
    keyword arguments. All arrays of modules, variables or not, are whole on every worker; arrays
    among the other arguments are the batch. Changes that the loss makes to its modules, such as
    batch statistics and counters of random streams, are written back.

    On Explicit axes the loss is that of the global batch. On Auto axes every worker runs the loss
    on its own examples, and the loss is a mean over these. There a changed state must be the same
    on all workers: a state that depends only on parameters is, as in an `nnx.WeightNorm`, and
    `nnx.BatchNorm` needs its ``axis_name``. Every worker folds its index into the keys of random
    streams.

    If one module is passed several times, its gradients are in the state of the first argument that
    ``argnums`` selects.

    Args:
      loss_fn: ``loss_fn(*args, **kwargs) -> loss``, or ``-> (loss, aux)`` with ``has_aux``, of
        modules and a batch.
      axis_name: as for `dynamiq_jax.value_and_grad`.
      argnums: which positional arguments are differentiated. A number selects all `nnx.Param` of a
        module, and `nnx.DiffState` selects the variables that pass a filter, such as
        `nnx.LoRAParam`.
      has_aux: as for `dynamiq_jax.value_and_grad`.
      compression: as for `dynamiq_jax.psum`.
      mesh: as for `dynamiq_jax.value_and_grad`.
      metrics: as for `dynamiq_jax.value_and_grad`.
      op: as for `dynamiq_jax.value_and_grad`.
      unreduced: as for `dynamiq_jax.value_and_grad`.
      ungathered: as for `dynamiq_jax.value_and_grad`.
      specs: as for `dynamiq_jax.value_and_grad`.
      batch_specs: as for `dynamiq_jax.value_and_grad`, for the arguments that ``argnums`` does not
        select; pass `None` for a module among them.
      closed_specs: as for `dynamiq_jax.value_and_grad`.
      weight: as for `dynamiq_jax.value_and_grad`; it takes the arguments of ``loss_fn``.
      aux: as for `dynamiq_jax.value_and_grad`.

    Returns:
      ``f(*args, key=None, state=None, **kwargs) -> (loss, grads)``, or ``((loss, aux), grads)``, to
      be called under `nnx.jit`. ``grads`` is an `nnx.State` of the variables that are
      differentiated, or a tuple of them if ``argnums`` is a sequence.

    Raises:
      ValueError: ``argnums`` selects nothing; the loss adds or removes variables, or changes an
        array in a tuple of a module; a changed state differs between workers; or as for
        `dynamiq_jax.value_and_grad`.
    """
    axis = check_axis(axis_name)
    total = Reduction(axis, as_compression(compression), op)
    wanted = Wanted(
        total,
        0,
        has_aux=True,
        metrics=metrics,
        unreduced=unreduced,
        ungathered=ungathered,
        gathers=told_gathers(compression),
    )
    choice = _Choice.of(argnums)

    def of_modules(*args: Any, key: Any = None, state: Any = None, **kwargs: Any) -> Any:
        check_names(loss_fn, args, key=key, state=state)
        call, modules, batch = _Call.of(args, kwargs, choice.numbers(len(args)))
        graph, chosen, variables = nnx.split(modules, choice.takes, ...)
        params = choice.params(chosen, args, call.numbers)
        pure = _Pure(loss_fn, has_aux, axis, choice, call, graph)
        weigh = None if weight is None else functools.partial(pure.weight, weight)
        told = ForAuto(specs, batch_specs, aux, weigh, closed_specs)
        around = mesh_around(params) if mesh is None else mesh
        if not is_explicit(around.abstract_mesh if isinstance(around, Mesh) else around):
            whole = [Told("a variable", P())] * len(jax.tree.leaves(variables))
            leaves = call.leaf_specs(batch_specs, loss_fn, batch, axis)
            told = told._replace(aux=(aux, "same"), batch_specs=lambda _: whole + leaves)
        grad_fn = gradients(functools.partial(_Pure.loss, pure), wanted, mesh, told)
        (value, (more, changes)), grads = grad_fn(params, variables, *batch, key=key, state=state)
        _write(call, modules, _flat((choice.joined(params), variables)), changes)
        return ((value, more) if has_aux else value), grads

    return of_modules


class _Choice(NamedTuple):
    """The variables that ``argnums`` names: of some arguments those that pass a filter."""

    argnums: Any
    several: bool
    """Whether gradients come in a tuple."""
    positions: list[int]
    filters: list[Callable[[tuple, Any], bool]]
    """The filter of each position."""

    @classmethod
    def of(cls, argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState]) -> "_Choice":
        """The choice; a number stands for all parameters of an argument."""
        told = argnums if isinstance(argnums, Sequence) else (argnums,)
        states = [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, nnx.Param) for x in told]
        filters = [nnx.filterlib.to_predicate(x.filter) for x in states]
        return cls(argnums, isinstance(argnums, Sequence), [x.argnum for x in states], filters)

    def numbers(self, count: int) -> list[int]:
        """The numbers of the arguments, of so many positional ones."""
        found = [i % count for i in self.positions if -count <= i < count]
        if len({*found}) < len(self.positions):
            raise ValueError(
                f"argnums={self.argnums!r}, and the loss got {count} positional arguments; pass "
                "each number once, and modules by position"
            )
        return found

    def takes(self, path: tuple, x: Any) -> bool:
        """Whether a leaf of `_Call.modules` is differentiated."""
        kind, number, *rest = path
        return kind == 0 and self.filters[number](tuple(rest), x)

    def params(self, chosen: nnx.State, args: tuple, numbers: Sequence[int]) -> Any:
        """The variables as parameters; refuses an argument that has none."""
        own = tuple(chosen.get(0, {}).get(i, nnx.State({})) for i in range(len(numbers)))
        for number, state, keep in zip(numbers, own, self.filters, strict=True):
            # A module that stands before among the arguments has its variables there.
            if not state and not nnx.state(args[number], keep):
                raise ValueError(
                    f"argnums={self.argnums!r} selects no variable of argument {number}, and the "
                    f"loss got {len(args)} positional arguments; pass modules by position, and a "
                    "filter that some of their variables pass"
                )
        return own if self.several else own[0]

    def joined(self, params: Any) -> nnx.State:
        """The variables as a state of `_Call.modules`, from parameters."""
        return nnx.State({0: dict(enumerate(params if self.several else (params,)))})


class _Pure(NamedTuple):
    """The loss as a function of states of modules, whose graph is known."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    axis: Axis
    choice: _Choice
    call: "_Call"
    graph: Any

    def loss(self, params: Any, variables: Any, *batch: Any) -> tuple[Any, tuple[Any, Any]]:
        """The loss, and its aux with the variables that it changes."""
        if self.axis.mapped:  # this worker's keys, of all workers' keys
            fold = jnp.vectorize(lambda key: jax.random.fold_in(key, self.axis.index))
            variables = jax.tree.map(lambda x: fold(x) if is_key(x) else x, variables)
        given = params, variables, *batch
        value, after, states = self._run(*given)
        try:
            alike = after == self.graph
        except jax.errors.TracerBoolConversionError:  # an array became a static attribute
            alike = False
        if not alike:
            raise ValueError(
                "the loss adds or removes variables or attributes of its modules; do this outside "
                "of the loss, and return captured values as aux"
            )
        value, more = value if self.has_aux else (value, None)
        states_of = lambda *given: self._run(*given)[2]
        before = _flat((self.choice.joined(params), variables))
        changes = _changes(before, _flat(states), states_of, given)
        _check_changes(self.call, changes, before, states_of, given, self.axis)
        return value, (more, changes)

    def weight(self, weight: Callable[..., Any], params: Any, variables: Any, *batch: Any) -> Any:
        """The weight of a worker, by a function of the loss's arguments."""
        args, kwargs = self.call.arguments(self._modules(params, variables), batch)
        return weight(*args, **kwargs)

    def _modules(self, params: Any, variables: Any) -> Any:
        return nnx.merge(self.graph, self.choice.joined(params), variables, copy=True)

    def _run(self, params: Any, variables: Any, *batch: Any) -> tuple[Any, Any, tuple[Any, Any]]:
        """The loss's result, then the graph, and the two states, after it."""
        modules = self._modules(params, variables)
        args, kwargs = self.call.arguments(modules, batch)
        value = self.loss_fn(*args, **kwargs)
        after, own, rest, *_ = nnx.split(modules, self.choice.takes, ...)
        return value, after, (own, rest)


def _is_module(x: Any) -> bool:
    """Whether all arrays of ``x`` are whole on every worker: a module, or other variables."""
    if isinstance(x, nnx.Variable | nnx.Module):
        return True
    if not isinstance(x, nnx.Pytree):
        return False
    return any(isinstance(own, nnx.Variable) for _, own in nnx.iter_graph(x))


class _Call(NamedTuple):
    """Which arguments of the loss are differentiated: modules are split from the batch."""

    numbers: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any], numbers: list[int]) -> tuple[Any, Any, Any]:
        """The call, its modules, and the batch: ``(args, kwargs)`` with `None` for modules.

        Modules are ``(those differentiated, other positional ones, keywords)``, with `None` for
        everything else. So a module that is passed twice counts as differentiated.
        """
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        kept = [_is_module(x) for x in leaves]
        pairs = [(x, None) if own else (None, x) for x, own in zip(leaves, kept, strict=True)]
        (own, named), batch = (tree.unflatten(x) for x in zip(*pairs, strict=True))
        rest = tuple(None if i in numbers else x for i, x in enumerate(own))
        return cls(tuple(numbers)), (tuple(own[i] for i in numbers), rest, named), batch

    def arguments(self, modules: Any, batch: Any) -> tuple[Any, Any]:
        """The positional arguments and the keywords of the loss: inverts `of`.

        The loss may change dicts and lists among them: they are new.
        """
        own, rest, named = modules
        args = list(rest)
        for number, x in zip(self.numbers, own, strict=True):
            args[number] = x
        is_leaf = lambda x: x is None or _is_module(x)
        join = lambda x, data: data if x is None else x
        return jax.tree.map(join, (tuple(args), named), batch, is_leaf=is_leaf)

    def name(self, path: tuple) -> str:
        """The name of a leaf of the modules: its argument's index or name, and its path in it."""
        kind, argument, *rest = path
        return "/".join(map(str, (self.numbers[argument] if kind == 0 else argument, *rest)))

    def leaf_specs(
        self, batch_specs: Any, loss_fn: Callable[..., Any], batch: Any, axis: Axis
    ) -> list[Told]:
        """`batches.leaf_specs` of the batch; a tuple has no entries for differentiated modules."""
        args, kwargs = batch
        told, count = batch_specs, len(args) - len(self.numbers)
        if isinstance(told, tuple | list) and len(told) == count:
            entries = iter(told)
            told = [None if i in self.numbers else next(entries) for i in range(len(args))]
        elif isinstance(told, tuple | list):
            return leaf_specs(told, loss_fn, args, kwargs, self.numbers, axis)  # refuses it
        return leaf_specs(told, loss_fn, args, kwargs, (), axis)


class _Leaf(NamedTuple):
    """A variable, or another array of a module."""

    path: tuple
    value: Any
    places: range
    """The indices of its arrays among all arrays."""


def _flat(states: tuple[Any, Any]) -> list[_Leaf]:
    """The variables that are differentiated, then the others."""
    found, end = [], 0
    for state in states:
        for path, x in nnx.to_flat_state(state):
            start, end = end, end + len(jax.tree.leaves(x))
            found.append(_Leaf(path, x, range(start, end)))
    return found


def _changes(
    before: list[_Leaf], after: list[_Leaf], states_of: Callable[..., Any], args: Any
) -> dict[int, Any]:
    """The variables with new values, by their indices among all variables.

    Transformations such as `nnx.remat` and `nnx.jit` set every variable to a new array. The program
    of ``states_of(*args)``, which is that of ``after``, shows which values they leave unchanged.
    """
    new = []
    for number, (old, own) in enumerate(zip(before, after, strict=True)):
        pairs = zip(jax.tree.leaves(old.value), jax.tree.leaves(own.value), strict=True)
        if any(a is not b for a, b in pairs):
            new.append(number)
    if not new:
        return {}
    passed = passed_arguments(
        jax.make_jaxpr(lambda *args: jax.tree.leaves(states_of(*args)))(*args)
    )
    # The arguments begin with the arrays of the same two states.
    return {i: after[i].value for i in new if any(passed[k] != k for k in after[i].places)}


def _check_changes(
    call: _Call,
    changes: dict[int, Any],
    before: list[_Leaf],
    states_of: Callable[..., Any],
    args: Any,
    axis: Axis,
) -> None:
    """Refuses states that differ between workers; the map would take one worker's."""
    if not axis.mapped or all(map(axis.replicates, jax.tree.leaves(changes))):
        return
    params, *rest = args
    known = same_everywhere(lambda params, rest: states_of(params, *rest), params, rest, axis)
    for number, x in changes.items():
        if known is None or not all(known[k] for k in before[number].places):
            raise ValueError(
                f"the loss changes {call.name(before[number].path)}, {type(x).__name__}, to a "
                f"value of each worker's own examples: pass nnx.BatchNorm axis_name={axis.name!r}, "
                "update metrics outside of the loss, or take a mesh of Explicit axes"
            )


def _write(call: _Call, modules: Any, before: list[_Leaf], changes: dict[int, Any]) -> None:
    """Writes the loss's changes back to its modules, by the variables' indices among all."""
    for number, x in changes.items():
        path = before[number].path
        try:
            nnx.update(modules, nnx.from_flat_state([(path, x)]))
        except ValueError as error:
            raise ValueError(
                f"the loss changes {call.name(path)}, an array in a container that cannot be "
                "changed; make it an nnx.Variable, or an attribute of its module"
            ) from error
