"""Reductions at the place where parameters are used: the backward pass reduces gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import (
    AnyPolicy,
    Compression,
    as_compression,
    as_parameters,
)
from dynamiq_jax.compression.shards import gathers_of
from dynamiq_jax.core.axis import Axis, AxisName, check_key, is_outside, key_words, resharded
from dynamiq_jax.core.checks import Op, axis_sizes, check_axis
from dynamiq_jax.core.compat import transposes_a_map, varying_axes
from dynamiq_jax.former import formerly
from dynamiq_jax.reduction.reduction import Reduction, noted
from dynamiq_jax.training.explicit_axes import gather_outside
from dynamiq_jax.tree.leaves import axes_of, describe_leaves


@formerly(gather=as_parameters)
def fsdp(
    params: Any,
    axis_name: AxisName,
    *,
    op: Op = "mean",
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    specs: Any = None,
    copies: Any = None,
) -> Any:
    """Gathers shards in a worker's loss (in maps) or the global batch's; reduces their gradients.

    Gathers in the forward pass and reductions in the backward pass are compressed.

    Call it in the loss, where parameters are used. It returns replicated parameters unchanged, cast
    to varying, and its derivative is `dq.reduce`. So `jax.grad` of such a loss returns reduced
    gradients; in a scan over layers they are reduced layer by layer:

        def layer(x, params):  # of jax.lax.scan, or of a loop in Python
            return block(dq.fsdp(params, "data"), x), None

    **FSDP.** Parameters whose ``specs`` name the axis are this worker's shards. They are gathered,
    compressed, and their gradients are scattered, compressed:

        @jax.checkpoint  # gathers again in the backward pass, the same bits
        def layer(x, shards):
            own = jax.tree.map(lambda w: w.astype(jnp.bfloat16), shards)
            return block(dq.fsdp(own, "data", specs=P("data")), x), None

    Cast shards to the dtype in which the layer computes; whole parameters then have this dtype.
    With several axes, leaves are gathered over the axes in their specs, and their gradients are
    scattered over these and all-reduced over the others (HSDP).

    **Sharded updates (ZeRO-1).** Every worker holds the whole parameters and passes them as
    ``copies``, so nothing is gathered. The loss takes the copies, and ``params`` are the masters of
    `dq.optax.sharded`. Their gradients are this worker's slices, reduced. Pass them to ``update``
    unchanged:

        def loss(masters):
            options = {"specs": dq.optax.state_specs(state).masters, "copies": params}
            return loss_fn(dq.fsdp(masters, "data", **options), x)

        updates, state = optimizer.update(jax.grad(loss)(state.masters), state, params)

    **Outside of maps, on a mesh of Explicit axes,** types say which parameters are shards; other
    parameters are returned unchanged. Call it in a loss of global arrays, and differentiate the
    loss with `value_and_grad` of this library, which also sums the gradients of other parameters.
    `jax.grad` is refused: its seed is a constant, which XLA counts once for every device. JAX
    cannot type parameters as reduced if they are used elementwise with examples, such as a bias:
    let JAX sum them by ``Compression(exclude=...)``.

    * Inside of maps the loss is that of this worker, without `psum` or `pmean` in it, and
      `jax.grad` is inside the map: if the loss is already averaged, its derivative has another
      factor 1 / n. `jax.grad` around a `jax.shard_map` with ``check_vma=True`` is refused.
    * All leaves of one call share buckets, and small leaves travel exactly, as in `reduce`: call it
      with a whole layer. ``Format(scale_axis="auto")`` considers only these leaves.
    * If parameters are used twice, call it once, before both uses.
    * Do not call it inside `dq.value_and_grad` on Auto axes, which reduces by itself. On Auto axes,
      code outside of any map, such as an evaluation, needs the model without this call.
    * Only first derivatives in reverse mode are supported.

    Args:
      params: any pytree; integers and similar leaves are returned unchanged. A ``compression`` by
        path and ``specs`` see `None` for such leaves.
      axis_name: as for `psum`; all axes that split the batch.
      op: "mean" or "sum". It has no effect outside of maps, where the loss is that of all examples.
      compression: how gradients travel, as for `psum`, without memory, since a backward pass cannot
        return a state; or a `Policy`, whose ``parameters`` say how shards are gathered. Default:
        ``DynamiQ(bits=8)`` for shards, with the limits and exclusions of gradients. ``BF16()`` and
        ``F32()`` are native all-gathers in 16 bits and in the leaf's dtype; if gradients travel in
        either, so do shards by default. Over NVLink, where bf16 is faster, ``BF16()`` is the
        default for shards and their gradients. A function of the path gets the shapes of whole
        leaves.
      key: as for `psum`. In a scan all layers get the same key, and round in the same way: fold in
        the layer's index, or pass no key.
      specs: as for `psum`. A PartitionSpec that names ``axis_name``, or some of its axes, also says
        that a leaf is a shard, and along which dimension. Outside of maps types say this.
      copies: inside of maps, a tree like ``params`` of whole leaves, with the same bits on all
        workers, in any floating-point dtype. Gradients have the dtype of ``params``.

    Returns:
      A tree like ``params`` of whole leaves that vary over the axis; with ``copies``, the copies.

    Raises:
      ValueError: ``op`` is neither of these; a method has memory; ``specs`` do not fit, or make a
        shard of a leaf that is the same on all workers; ``copies`` do not have the shapes of whole
        ``params``, or are differentiated. In the backward pass: as for `reduce`; `jax.grad` is
        outside of the map; or, outside of maps, the derivative is not by `value_and_grad`.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a derivative of the derivative is taken, or a method does not scatter.
    """
    axis, gathers = check_axis(axis_name), gathers_of(compression)
    total = Reduction(axis, as_compression(compression), op, gathers=gathers, overlaps=True)
    if is_outside(axis, params):
        if specs is not None or copies is not None:
            name, given = ("specs", specs) if copies is None else ("copies", "...")
            raise ValueError(
                f"{name}={given} are for maps: outside of them, on Explicit axes, types say how "
                "parameters are sharded; leave it out"
            )
        return gather_outside(total, params, key=key)
    params = noted(params, total, "dq.fsdp", specs)
    reducer = Reducer(total, params, "fsdp", specs=specs, copies=copies)
    check_key(key, axis)

    @jax.custom_vjp
    def passed(params: Any, copies: Any, words: Array | None) -> Any:
        whole = reducer.whole(params, words) if copies is None else copies
        # JAX would sum gradients of what is typed as the same on all workers.
        return axis.to_varying(whole)

    def backward(words: Array | None, gradients: Any) -> tuple[Any, None, None]:
        return reducer.joined(reducer.reduce(reducer.moving(gradients), words)), None, None

    # The backward pass needs the key's words and no values.
    passed.defvjp(lambda *args: (passed(*args), args[-1]), backward)
    return passed(params, constant_copies(copies), key_words(key))


class Reducer:
    """Checks the options, and reduces gradients of ``params`` like `dq.reduce`.

    Leaves whose ``specs`` name the axis are shards; they are gathered unless there are ``copies``.
    """

    def __init__(
        self,
        total: Reduction,
        params: Any,
        caller: str,
        *,
        specs: Any,
        copies: Any = None,
    ):
        self._leaves, self._treedef = jax.tree.flatten(jax.tree.map(jax.typeof, params))
        sizes, compression = axis_sizes(total.axis, caller), total.compression
        self.copied = copies is not None
        """Whether all workers hold copies. `overlapped` may have some for only some functions."""
        # Default methods of sharded updates are others than those of FSDP.
        total = dataclasses.replace(total, copied=self.copied)
        total, whole = total.of_shards(params, specs, copies)
        moving = [i for i, x in enumerate(self._leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        self.whole = total.whole
        """Gathers the shards in a tree, with a key's seed words; other leaves stay unchanged."""
        self.reduce = total.some(moving).reduce
        """Reduces gradients that move, with a key's seed words; shards' gradients to shards."""
        if copies is not None:
            _check_copies(copies, whole)
        _check_memory(whole, compression, sizes)
        self.gathers = total.placement.is_split and copies is None
        """Whether any leaf is a shard that has no copy."""
        self._by_name = specs is not None or compression.by_path or compression.exclude is not None
        self.axis, self._caller, self.specs = total.axis, caller, specs

    def moving(self, gradients: Any) -> Any:
        """The gradients, except those of integers, which are float0."""
        if self.axis.tracked and transposes_a_map():
            raise ValueError(
                f"{self._caller} found jax.grad outside of jax.shard_map, where the derivative of "
                "a loss that is averaged over workers has a 1 / n of its own and the mean of "
                "gradients would be n times too small; call jax.grad of each worker's own loss "
                "inside the map"
            )
        leaves, treedef = jax.tree.flatten(gradients)
        moves = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        error = NotImplementedError(
            f"{self._caller} has derivatives of the first order only; for others reduce after "
            "jax.grad, with dq.pmean"
        )
        own = [constant(x, error) for x, m in zip(leaves, moves, strict=True) if m]
        if all(moves):
            return treedef.unflatten(own)
        # Without names a list will do: equal layers share a trace whatever their keys are.
        if not self._by_name:
            return own
        found = iter(own)
        return treedef.unflatten(next(found) if m else None for m in moves)

    def joined(self, reduced: Any) -> Any:
        """A tree like the parameters, of what was reduced; it varies, in type, where these do."""
        return self._gradients(self._leaves, self.row(reduced))

    def row(self, reduced: Any) -> list[Array]:
        """The reduced gradients of one layer, which vary, in type, where the parameters do."""
        moving, found = inexact_leaves(self._leaves), []
        for own, x in zip(moving, jax.tree.leaves(reduced), strict=True):
            # A gradient has the type of its parameter, or JAX refuses it.
            axes = tuple(name for name in self.axis.names if name in varying_axes(own))
            found.append(Axis(axes).to_varying(x) if axes else x)
        return found

    def rows(self, reduced: Any, length: int) -> list[Array]:
        """Zeros in the place of each `row` of so many layers, by the shapes of what is reduced.

        They have the dtypes that travel: gradients of f32 masters in bf16 take half of the memory.
        """
        pairs = zip(inexact_leaves(self._leaves), jax.tree.leaves(reduced), strict=True)

        def zeros(own: Any, dtype: Any) -> Array:
            x, spec = jnp.zeros((length, *own.shape), dtype), own.sharding.spec
            # Explicit axes that the map leaves to JAX are part of a row's type.
            if axes_of(spec):
                x = resharded(x, own.sharding.mesh, P(None, *spec.partitions))
            return self.axis.like(x, own)

        return [zeros(own, y.dtype) for own, y in pairs]

    def stacked(self, rows: list[Array], length: int) -> Any:
        """A tree of the `rows` in the parameters' dtypes, and of float0 for integers."""
        like = [jax.ShapeDtypeStruct((length, *x.shape), x.dtype) for x in self._leaves]
        return self._gradients(like, rows)

    def _gradients(self, like: list[Any], found: list[Array]) -> Any:
        pairs = zip(inexact_leaves(like), found, strict=True)
        cast = [x.astype(own.dtype) for own, x in pairs]
        return gradient_like(self._treedef.unflatten(like), cast)


def inexact_leaves(tree: Any) -> list[Any]:
    """The leaves of floating-point dtypes: those that have a gradient."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def gradient_like(tree: Any, found: list[Any]) -> Any:
    """A tree of the gradients ``found`` of its `inexact_leaves`, and of float0 for the others."""
    leaves, treedef = jax.tree.flatten(tree)
    rest = iter(found)
    return treedef.unflatten(
        next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
        for x in leaves
    )


def constant_copies(copies: Any) -> Any:
    """``copies``, which have no derivative: what the loss says of them is in that of params."""
    error = ValueError(
        "copies are differentiated, and their gradients are those of params; take jax.grad of the "
        "argument that holds params alone"
    )
    return jax.tree.map(lambda x: constant(x, error), copies)


def constant(x: Any, error: Exception) -> Any:
    """``x``; its derivative raises the error."""

    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def _(primals, tangents):
        raise error

    return same(x)


def _check_copies(copies: Any, whole: Any) -> None:
    """Refuses copies whose shapes differ from those of the gathered parameters."""
    if jax.tree.structure(copies) != jax.tree.structure(whole):
        raise ValueError(
            f"copies are {jax.tree.structure(copies)}, and params are "
            f"{jax.tree.structure(whole)}; pass trees of the same structure"
        )
    for copy, own in zip(describe_leaves(copies), describe_leaves(whole), strict=True):
        moves = [jnp.issubdtype(x.dtype, jnp.inexact) for x in (copy, own)]
        if copy.shape != own.shape or moves[0] != moves[1]:
            raise ValueError(
                f"copies: leaf {copy.name} is {copy.dtype.name}{list(copy.shape)}, and params, by "
                f"their specs, are shards of {own.dtype.name}{list(own.shape)}; pass the whole "
                "parameters, and as specs the masters' of dq.optax.state_specs(opt_state)"
            )


def _check_memory(params: Any, compression: Compression, sizes: tuple[int, ...]) -> None:
    """Refuses methods with memory before the backward pass."""
    for method in dict.fromkeys(compression.methods_of(describe_leaves(params))):
        if method is None:
            continue
        compression.route(sizes, method)
        if method.needs_state:
            raise ValueError(
                f"method={method} has memory, and a backward pass has nowhere to keep it; pass one "
                "without, or reduce after jax.grad with dq.reduce"
            )
