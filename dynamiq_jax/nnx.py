"""Gradients of losses of Flax NNX modules.

```python
import dynamiq_jax as dq  # dq.nnx needs flax; the library itself does not

grad_fn = dq.nnx.value_and_grad(loss_fn, axis_name="data")  # was nnx.value_and_grad(loss_fn)
loss, grads = grad_fn(model, batch)
```
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.explicit_sums import is_explicit
from dynamiq_jax.collectives.sum import Sum
from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.core.compat import varying_axes
from dynamiq_jax.methods import Method
from dynamiq_jax.request.compression import ByPath, Compression, as_compression
from dynamiq_jax.training.value_and_grad import check_names, gradients, mesh_around

__all__ = ["value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    axis_name: AxisName,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    method: Compression | Method | ByPath | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    metrics: bool = False,
    op: Op = "mean",
    reduce: bool = True,
    gather: bool = True,
    specs: Any = None,
    weight: Callable[..., Any] | None = None,
    aux: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for data-parallel steps, with a compressed sum of gradients.

    The loss takes modules among its arguments, positional or by keyword. Variables that are not
    differentiated are whole on every worker, and other arrays are the batch. State that the loss
    changes, such as batch statistics and counters of random streams, is written back.

    On Auto axes every worker runs the loss on its own examples. A changed state has to be the same
    on all workers there: pass `nnx.BatchNorm` its ``axis_name``. Every worker folds its number into
    the keys of random streams.

    All arguments are those of `dynamiq_jax.value_and_grad`, but for ``argnums``: numbers stand for
    all `nnx.Param` of a module, and `nnx.DiffState` for variables that pass a filter, such as
    `nnx.LoRAParam`. ``weight`` takes the arguments of ``loss_fn``.

    Returns:
      ``f(*args, key=None, state=None, **kwargs) -> (loss, grads)``, or ``((loss, aux), grads)``, to
      be called under `nnx.jit`. ``grads`` is an `nnx.State` of the variables that are
      differentiated, or a tuple of them if ``argnums`` is a sequence.

    Raises:
      ValueError: ``argnums`` selects nothing; the loss adds or removes variables, or changes those
        that are differentiated; a changed state differs between workers; or for the reasons of
        `dynamiq_jax.value_and_grad`.
    """
    several, axis = isinstance(argnums, Sequence), check_axis(axis_name)
    total = Sum(axis, as_compression(method), op)
    filters = {}
    for own in argnums if isinstance(argnums, Sequence) else (argnums,):
        told = own if isinstance(own, nnx.DiffState) else nnx.DiffState(own, nnx.Param)
        filters[told.argnum] = nnx.filterlib.to_predicate(told.filter)

    def chosen(path: tuple, x: Any) -> bool:
        """Whether a leaf of ``(args, kwargs)`` is differentiated."""
        kind, number, *rest = path
        return kind == 0 and number in filters and filters[number](tuple(rest), x)

    def joined(params: Any) -> nnx.State:
        """The variables that are differentiated, by argument."""
        own = params if several else (params,)
        return nnx.State({0: dict(zip(filters, own, strict=True))})

    def weigh(graph: Any, params: Any, variables: Any, arrays: Any) -> Any:
        assert weight is not None
        args, kwargs = nnx.merge(graph, joined(params), variables, arrays, copy=True)
        return weight(*args, **kwargs)

    def pure(graph: Any, params: Any, variables: Any, arrays: Any) -> tuple[Any, Any]:
        """The loss, and aux with the variables that the loss changes."""
        if axis.mapped:  # this worker's keys, of all workers' keys
            is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            fold = jnp.vectorize(lambda key: jax.random.fold_in(key, axis.index))
            variables = jax.tree.map(lambda x: fold(x) if is_key(x) else x, variables)
        modules = nnx.merge(graph, joined(params), variables, arrays, copy=True)
        # The loss may change dicts and lists that are not modules.
        is_node = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
        args, kwargs = jax.tree.map(lambda x: x, modules, is_leaf=is_node)
        value = loss_fn(*args, **kwargs)
        after, own, rest, _ = nnx.split(modules, chosen, nnx.Variable, ...)
        if after != graph or _changes(joined(params), own):
            raise ValueError(
                "the loss adds or removes variables or attributes of its modules, or changes "
                "variables that it is differentiated by; do this outside of the loss, and "
                "return captured values as aux"
            )
        value, more = value if has_aux else (value, None)
        changes = _changes(variables, rest)
        _check_changes(changes, variables, axis)
        return value, (more, changes)

    def of_modules(*args: Any, key: Any = None, state: Any = None, **kwargs: Any) -> Any:
        check_names(loss_fn, args, key=key, state=state)
        graph, found, variables, arrays = nnx.split((args, kwargs), chosen, nnx.Variable, ...)
        missing = [number for number in filters if number not in found.get(0, {})]
        if missing:
            raise ValueError(
                f"argnums={argnums!r} selects no variable of argument {missing[0]}, and the loss "
                f"got {len(args)} positional arguments; pass modules by position, and a filter "
                "that some of their variables pass"
            )
        params = tuple(found[0][number] for number in filters)
        params = params if several else params[0]
        around = mesh_around(params) if mesh is None else mesh
        own = {"specs": specs, "weight": weight and functools.partial(weigh, graph)}
        own |= {"aux": aux, "batch_specs": None}
        if not is_explicit(around.abstract_mesh if isinstance(around, Mesh) else around):
            own |= {"aux": (aux, "same"), "batch_specs": (P(), None)}
        options = {"metrics": metrics, "reduces": reduce, "gathers": gather, "for_auto": own}
        of_graph = functools.partial(pure, graph)
        grad_fn = gradients(of_graph, total, argnums=0, has_aux=True, mesh=mesh, **options)
        (value, (more, changes)), grads = grad_fn(params, variables, arrays, key=key, state=state)
        paths = [path for path, _ in nnx.to_flat_state(variables)]
        changed = [(paths[number], x) for number, x in changes.items()]
        nnx.update((args, kwargs), nnx.from_flat_state(changed))
        return ((value, more) if has_aux else value), grads

    return of_modules


def _changes(before: Any, after: Any) -> dict[int, Any]:
    """The variables with new values, by their numbers among all."""
    pairs = zip(nnx.to_flat_state(before), nnx.to_flat_state(after), strict=True)
    return {
        number: x
        for number, ((_, old), (_, x)) in enumerate(pairs)
        if any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(x), strict=True))
    }


def _check_changes(changes: dict[int, Any], variables: Any, axis: Axis) -> None:
    """Refuses states that differ between workers; the map would take one worker's."""
    for number, x in changes.items():
        if any(varying_axes(leaf) & {*axis.names} for leaf in jax.tree.leaves(x)):
            path = "/".join(map(str, nnx.to_flat_state(variables)[number][0][1:]))
            raise ValueError(
                f"the loss changes {path}, {type(x).__name__}, to a value of each worker's own "
                f"examples: pass nnx.BatchNorm axis_name={axis.name!r}, update metrics outside of "
                "the loss, or take a mesh of Explicit axes"
            )
