"""Gradients of losses of equinox modules, whose leaves are not all arrays.

```python
import dynamiq_jax as dq  # dq.equinox needs nothing that the library does not

grad_fn = dq.equinox.filter_value_and_grad(loss_fn, axis_name="data")  # was eqx's
loss, grads = grad_fn(model, batch)
```
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.compression.shards import told_gathers
from dynamiq_jax.core.axis import AxisName, is_explicit
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.training.loss import ARRAYS, Told, Wanted, leaf_specs, together
from dynamiq_jax.training.value_and_grad import ForAuto, gradients, mesh_around

__all__ = ["filter_value_and_grad"]


def filter_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    axis_name: AxisName,
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
    """`equinox.filter_value_and_grad` of the global batch's loss, or on Auto axes of a worker's.

    Gradients are reduced over the data axes, compressed. The loss's first argument is the model, a
    tree whose floating-point arrays are the parameters. Its other arrays are whole on every worker,
    and its other leaves, such as activation functions, are constants of the program.

    Args:
      loss_fn: ``loss_fn(model, *args, **kwargs) -> loss``, or ``-> (loss, aux)`` with ``has_aux``.
      axis_name: as for `dynamiq_jax.value_and_grad`, like all that follow.
      has_aux: whether ``loss_fn`` returns more than the loss.
      compression: a method without memory.
      mesh: the mesh, if neither `jax.set_mesh` nor the parameters tell it.
      metrics: whether ``f`` returns the `Metrics` of the gradient.
      op: "mean" or "sum".
      unreduced: whether gradients are returned before their sum over workers.
      ungathered: whether the loss takes the shards of sharded parameters.
      specs: a tree like ``equinox.filter(model, equinox.is_inexact_array)``, or a prefix of it.
      batch_specs: for the arguments after the model.
      closed_specs: for the arrays that the loss closes over.
      weight: a function of the arguments of ``loss_fn``.
      aux: words for the leaves of aux.

    Returns:
      ``f(model, *args, **kwargs) -> (loss, grads)``, or ``((loss, aux), grads)``. ``grads`` is a
      tree like the model, with `None` for each leaf that is no parameter. All keywords are those of
      the loss, ``key`` included.

    Raises:
      ValueError: as for `dynamiq_jax.value_and_grad`; or the model is not passed by position.
    """
    axis = check_axis(axis_name)
    total = Reduction(axis, as_compression(compression), op)
    gathers = told_gathers(compression)
    wanted = Wanted(total, 0, has_aux, metrics, unreduced, ungathered, gathers=gathers)

    def joined(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_parts(params: Any, rest: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            return function(together(params, rest), *args, **kwargs)

        return of_parts

    def specs_of(data: Any) -> list[Told]:
        (rest, args, kwargs), _ = data
        whole = [Told("the model", P())] * len(jax.tree.leaves(rest))
        return whole + leaf_specs(batch_specs, loss_fn, (None, *args), kwargs, (0,), axis)

    def filtered(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise ValueError(
                "the loss got no positional argument; pass the model, by which it is "
                "differentiated, as the first one"
            )
        model, *others = args
        params, rest = _parts(model)
        around = mesh_around(params) if mesh is None else mesh
        on_auto = not is_explicit(around.abstract_mesh if isinstance(around, Mesh) else around)
        weigh = None if weight is None else joined(weight)
        told = ForAuto(specs, specs_of if on_auto else batch_specs, aux, weigh, closed_specs)
        grad_fn = gradients(joined(loss_fn), wanted, mesh, told)
        return grad_fn(params, rest, tuple(others), kwargs)

    return filtered


def _parts(model: Any) -> tuple[Any, Any]:
    """Parameters and the other leaves, with `None` in the place of each other's."""
    leaves, treedef = jax.tree.flatten(model)
    chosen = [isinstance(x, ARRAYS) and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    pairs = [(x, None) if own else (None, x) for x, own in zip(leaves, chosen, strict=True)]
    params, rest = zip(*pairs, strict=True) if pairs else ((), ())
    return treedef.unflatten(params), treedef.unflatten(rest)
