"""Reductions inside the backward pass: of each layer's gradients as soon as they are there."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._compat import AxisNames, axis_tuple, to_varying, varying_axes
from dynamiq_jax.arguments import AnyMethod, AnyTopology, check_axis
from dynamiq_jax.collectives import Op, reduce
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.seeds import key_words


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

    Stands in the loss, where parameters are used. Under `jax.shard_map` it is the cast of
    replicated parameters to varying ones (``jax.lax.pcast(params, axis_name, to="varying")``),
    whose derivative is a sum over the axis: here `dq.reduce`. So `jax.grad` of such a loss gives
    reduced gradients, and nothing is to be reduced after it::

        def layer(x, params):  # of jax.lax.scan, or of a loop in Python
            return block(dq.reduce_in_backward(params, "data"), x), None

    In a scan over layers the reduction is a part of the scan's backward pass: layer by layer,
    where a reduction after `jax.grad` waits for the last of them. All leaves of one call share
    buckets and small ones travel exactly, as in `reduce`; call it with a whole layer. Parameters
    that are used twice pass once, above both uses. There are derivatives of the first order, in
    reverse mode.

    Args:
      params: any pytree; leaves that are not floating-point pass.
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
      ValueError: ``op`` is neither; in the backward pass, what `reduce` raises.
    """
    axis_name = check_axis(axis_name)
    check_choice("op", op, get_args(Op))
    own_axes = set(axis_tuple(axis_name))
    varied = [bool(varying_axes(x) & own_axes) for x in jax.tree.leaves(params)]

    @jax.custom_vjp
    def passed(params: Any, words: Array | None) -> Any:
        return to_varying(params, axis_name)

    def forward(params: Any, words: Array | None) -> tuple[Any, Array | None]:
        return passed(params, words), words

    def backward(words: Array | None, gradients: Any) -> tuple[Any, None]:
        leaves, treedef = jax.tree.flatten(gradients)
        moving = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]  # the others are float0
        own = treedef.unflatten(x if m else None for x, m in zip(leaves, moving, strict=True))
        options = {"op": op, "method": method, "topology": topology, "specs": specs}
        found = iter(jax.tree.leaves(reduce(own, axis_name, key=words, **options).tree))
        reduced = [next(found) if m else x for x, m in zip(leaves, moving, strict=True)]
        # The gradient of what came in varying varies, too: in type, with the same bits everywhere.
        pairs = zip(reduced, varied, strict=True)
        return treedef.unflatten(to_varying(x, axis_name) if v else x for x, v in pairs), None

    passed.defvjp(forward, backward)
    return passed(params, key_words(key))
