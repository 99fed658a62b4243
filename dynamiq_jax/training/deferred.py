"""Gradients on Explicit meshes: JAX leaves them unreduced, and one collective sums them.

JAX's types say of a value on an Explicit mesh whether it is reduced or unreduced over an axis. The
cotangent of a reduced value is unreduced: every device holds a term of it, and nobody has summed
the terms. So a large parameter is typed as reduced ("deferred") before the loss takes it. The loss
itself stays a function of global arrays.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.scattered import split_of, warn_of_gather
from dynamiq_jax.collectives.unreduced import (
    large_leaves,
    reduce_unreduced,
    resharded,
    unreduced_axes,
)
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import equations, traced_for
from dynamiq_jax.core.constraints import constraints_without
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.request.compression import Compression
from dynamiq_jax.training.gathered import BACKWARD, gathered_inputs, watched
from dynamiq_jax.tree.leaves import describe_leaves
from dynamiq_jax.tree.placement import axes_of, names_of, only, placed_leaves


class Deferred(NamedTuple):
    """How to differentiate a loss of global arrays, and how to sum its gradients.

    Attributes:
      mesh: a mesh of Explicit axes.
      axis: the data axes.
      compression: which leaves are compressed, and how.
      has_aux: whether the loss comes with more.
      metrics: whether gradients come with `Metrics`.
      reduces: whether gradients are summed; else those of deferred leaves stay unreduced.
    """

    mesh: AbstractMesh
    axis: Axis
    compression: Compression
    has_aux: bool
    metrics: bool
    reduces: bool

    def __call__(
        self,
        loss: Callable[[Any, Any], Any],
        params: Any,
        data: Any,
        *,
        key: Array | None = None,
        state: State | None = None,
    ) -> tuple[Any, Any]:
        """The value and the gradients of ``loss(params, data)``.

        Args:
          loss: ``(params, data) -> loss`` or ``-> (loss, aux)``.
          params: all that is differentiated.
          data: the other arguments of the loss.
          key: as for `psum`.
          state: `Compression.init_state`'s with ``stacked=True``.

        Returns:
          The value, as `jax.value_and_grad` has it, and gradients like ``params``; a `Reduced` in
          their place with metrics or a state.
        """
        call = functools.partial(self._call, loss, key=key, state=state)
        if 1 not in self.mesh.axis_sizes:
            return call(params, data)
        # Types name axes of size 1, too: those of the arrays, of the loss and of ours may differ.
        with contextlib.suppress(Exception):
            return call(params, data, strict=True)
        specs = jax.tree.map(_spec, params)
        with contextlib.suppress(Exception), jax.remove_size_one_mesh_axis_from_type(True):
            value, found = call(*jax.tree.map(self._without_ones, (params, data)))
            with jax.remove_size_one_mesh_axis_from_type(False):
                if isinstance(found, Reduced):
                    return value, found._replace(tree=self._typed(found.tree, specs))
                return value, self._typed(found, specs)
        return call(params, data)  # the loss may close over arrays of the other types

    def _call(
        self,
        loss: Callable[[Any, Any], Any],
        params: Any,
        data: Any,
        *,
        key: Array | None,
        state: State | None,
        strict: bool = False,
    ) -> tuple[Any, Any]:
        """See `__call__`; ``strict`` refuses losses that do not take all large leaves deferred."""
        leaves, treedef = jax.tree.flatten(params)
        placed = [P(*_spec(x).partitions) for x in leaves]
        large = large_leaves(params, placed, self.mesh, self.axis, self.compression)
        own = self._own(loss, params, data, large)
        chosen = large - own
        self._warn(params, placed, own)
        call = functools.partial(self._differentiate, loss=lambda p: loss(p, data))
        trace = functools.partial(call, treedef=treedef)
        value, grads, why = None, [], None
        try:
            value, grads = trace(self._held(leaves, placed, chosen, own))
        except Exception as error:
            if strict or not chosen:
                raise
            why = error
        if why is not None:  # outside of the handler: the loss may raise the same again
            chosen = self._deferrable(params, data, placed, chosen, own, trace, why)
            value, grads = trace(self._held(leaves, placed, chosen, own))
        grads = treedef.unflatten(grads)
        if not self.reduces:
            return value, grads
        found = self._reduce(grads, placed, key, state)
        return value, found if self.metrics or state is not None else found.tree

    def _own(
        self, loss: Callable[[Any, Any], Any], params: Any, data: Any, large: set[int]
    ) -> set[int]:
        """The sharded leaves that stay so: all, if the loss is one of shards; else none.

        It is if it calls `reduce_in_backward`. It is, too, if it traces with shards, and does not
        trace with whole leaves or hands other operands to a `jax.shard_map` then: such a map
        takes the shards, as those of experts, as they are. A loss that calls `reduce_in_backward`
        for some leaves is warned of ``large`` others: JAX sums the gradients of these.
        """
        leaves, treedef = jax.tree.flatten(params)
        placed = [P(*_spec(x).partitions) for x in leaves]
        sharded = {i for i, spec in enumerate(placed) if axes_of(spec) & {*self.axis.names}}

        def program(own: Collection[int]) -> Any:
            """That of the loss; `None` if it does not trace."""

            def run(leaves: list[Array]) -> Any:
                return loss(treedef.unflatten(self._held(leaves, placed, (), own)), data)

            with contextlib.suppress(Exception):
                return jax.make_jaxpr(run)(leaves)
            return None

        if not sharded:
            return sharded
        with watched() as calls, constraints_without(self.axis.names):
            found = program(sharded)
            if not calls:
                whole = None if found is None else program(())
                stay = found is not None and _of_maps(found) != _of_maps(whole)
                return sharded if stay else set()
        if found is not None:
            others = (sharded & large) - gathered_inputs(found)
            names = [leaf.path for leaf in describe_leaves(params) if leaf.index in others]
            if names:
                warnings.warn(
                    f"{len(names)} sharded parameters do not pass dq.reduce_in_backward, and JAX "
                    f"sums their gradients, uncompressed: {', '.join(names[:8])}. Call it for "
                    "these, too, or exclude them by Compression(exclude=...)",
                    stacklevel=5,
                )
        return sharded

    def _warn(self, params: Any, placed: list[P], own: Collection[int]) -> None:
        """Warns if sharded leaves that are not the loss's ``own`` are large together."""
        specs = jax.tree.structure(params).unflatten(map(self._whole, placed))
        parts, _ = placed_leaves(params, self.mesh, specs)
        splits = [split_of(spec, self.axis.names) for spec in placed]
        gathered = [() if i in own else split for i, split in enumerate(splits)]
        warn_of_gather(parts, gathered, "call dq.reduce_in_backward in each layer of the loss")

    def _held(
        self, leaves: list[Array], placed: list[P], deferred: Collection[int], own: Collection[int]
    ) -> list[Array]:
        """Leaves that are whole over the data axes, and typed as reduced where they are deferred.

        A leaf that data axes shard (FSDP) is gathered, but for those of ``own``.
        """

        def whole(i: int, x: Array) -> Array:
            partitions = self._whole(placed[i])
            reduced = self.axis.names if i in deferred else ()
            return resharded(x, self.mesh, P(*partitions, reduced=frozenset(reduced)))

        return [x if i in own else whole(i, x) for i, x in enumerate(leaves)]

    def _differentiate(
        self, held: list[Array], *, treedef: Any, loss: Callable[[Any], Any]
    ) -> tuple[Any, list[Array]]:
        """The value, and the gradient of every held leaf.

        Scalars are differentiated as vectors of one entry. The gradient of a scalar that the loss
        does not use is the constant 0, typed as unreduced, and XLA has one constant for it and for
        what a slice's derivative is padded with: from JAX 0.12 on it refuses that pad.
        """
        shapes = [x.shape for x in held]

        def loss_of(held: list[Array]) -> tuple[Array, Any]:
            own = zip(held, shapes, strict=True)
            found = loss(treedef.unflatten(x.reshape(shape) for x, shape in own))
            value, aux = found if self.has_aux else (found, None)
            value = jnp.asarray(value)
            if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
                raise TypeError(
                    f"the loss has shape {value.shape} and dtype {value.dtype}; return a scalar of "
                    "floating-point numbers, such as the mean over all examples"
                )
            # A loss that is a function of deferred parameters alone is typed as reduced, and its
            # cotangent would be unreduced: a 1 on every device.
            return self._plain(value), jax.tree.map(self._plain, aux)

        with constraints_without(self.axis.names):
            lines = [x if x.shape else x[None] for x in held]
            value, back, aux = jax.vjp(loss_of, lines, has_aux=True)
            with traced_for(BACKWARD):
                (grads,) = back(self._seed(value.dtype))
            grads = [x.reshape(shape) for x, shape in zip(grads, shapes, strict=True)]
        return ((value, aux) if self.has_aux else value), grads

    def _seed(self, dtype: Any) -> Array:
        """The cotangent of the loss: 1, in total.

        XLA may move the type of an unreduced value to a constant that the value is made of, alone
        or merged with other constants: then every device holds all of it, and the gradient is n
        times too large. No type moves into a map.
        """
        seed = jax.shard_map(
            lambda: lax.optimization_barrier(jnp.ones((), dtype)),
            mesh=self.mesh,
            in_specs=(),
            out_specs=P(),
            check_vma=False,
        )
        return seed()

    def _deferrable(
        self,
        params: Any,
        data: Any,
        placed: list[P],
        chosen: set[int],
        own: set[int],
        trace: Callable[[list[Array]], Any],
        why: Exception,
    ) -> set[int]:
        """The chosen leaves that the loss takes as reduced; warns of the others.

        JAX has rules for products, casts, slices and sums of reduced values, and none for some
        other uses, such as elementwise products with data. Where the loss does not trace (``why``),
        leaves are tried by class: a path without its numbers, and a shape. The warning is for
        leaves that have more than a tenth of the bytes.
        """
        leaves = jax.tree.leaves(params)

        def traces(deferred: Collection[int]) -> bool:
            try:
                shapes(deferred)
            except Exception:
                return False
            return True

        def shapes(deferred: Collection[int]) -> Any:
            return jax.eval_shape(lambda: trace(self._held(leaves, placed, deferred, own)))

        shapes(())  # raises what is wrong without us

        def most(base: set[int], classes: list[set[int]]) -> set[int]:
            together = base.union(*classes)
            if not classes or traces(together):
                return together
            if len(classes) == 1:
                return base
            half = len(classes) // 2
            return most(most(base, classes[:half]), classes[half:])

        described = [leaf for leaf in describe_leaves(params) if leaf.index in chosen]
        found: set[int] = set()
        for matrices in (True, False):  # vectors are mostly biases and scales, used elementwise
            classes: dict[tuple, set[int]] = {}
            for leaf in described:
                if (len(leaf.shape) > 1) == matrices:
                    name = "".join(c for c in leaf.path if not c.isdigit())
                    classes.setdefault((name, leaf.shape), set()).add(leaf.index)
            found = most(found, list(classes.values()))
        if not found:
            self._check_split(data, why)
        kept = [leaf for leaf in described if leaf.index not in found]
        native = sum(leaf.nbytes for leaf in kept)
        if native > sum(leaf.nbytes for leaf in described) / 10:
            names = ", ".join(leaf.path or leaf.name for leaf in kept[:8]) + (
                ", …" if len(kept) > 8 else ""
            )
            warnings.warn(
                f"{len(kept)} leaves of {native:,} bytes are summed by JAX, uncompressed: {names}. "
                f"The loss uses them in ways for which JAX has no rule if they are reduced over "
                f"axis {self.axis.name!r}. Exclude them, so that they are not tried again, by "
                "Compression(exclude=...), or take a mesh of Auto axes. The first error was "
                f"{type(why).__name__}: {_first_line(why)}",
                stacklevel=4,
            )
        return found

    def _check_split(self, data: Any, why: Exception) -> None:
        """Refuses arguments of which devices hold other examples than ``axis_name`` says.

        Raises:
          ValueError: there are arrays, and no leading axis is sharded over the data axes, or one is
            sharded over more axes.
        """
        own = {*self.axis.names}
        several = [name for name, size in self.mesh.shape.items() if size > 1]
        arrays = [only(_spec(x), several) for x in jax.tree.leaves(data) if jnp.ndim(x)]
        leading = [names_of(spec[0]) for spec in arrays]
        more = [names for names in leading if own < {*names}]
        if more:
            raise ValueError(
                f"an argument of the loss is sharded over {more[0]} along its leading axis, and "
                f"axis_name={self.axis.name!r}; pass axis_name={more[0]}: gradients are summed "
                "over all axes that split the batch, together"
            ) from why
        if arrays and not any(axes_of(spec) & own for spec in arrays):
            raise ValueError(
                f"no argument of the loss besides the parameters is sharded over axis "
                f"{self.axis.name!r}: every device would compute all examples. Shard the batch, as "
                f"jax.device_put(batch, NamedSharding(mesh, P({self.axis.name!r}))), or in "
                f"jax.jit jax.reshard(batch, P({self.axis.name!r}))"
            ) from why

    def _reduce(
        self, grads: Any, placed: list[P], key: Array | None, state: State | None
    ) -> Reduced:
        """Sums what is unreduced, and shards gradients as parameters are."""
        specs = jax.tree.structure(grads).unflatten(placed)
        options = {"key": key, "state": state, "metrics": self.metrics, "specs": specs}
        return reduce_unreduced(grads, self.axis, self.compression, **options)

    def _without_ones(self, x: Any) -> Any:
        """``x``, whose type names no axis of size 1."""
        several = [name for name, size in self.mesh.shape.items() if size > 1]
        if not isinstance(x, Array) or axes_of(_spec(x)) <= {*several}:
            return x
        return resharded(x, self.mesh, only(_spec(x), several))

    def _typed(self, grads: Any, specs: Any) -> Any:
        """Gradients that name the axes which the specs name; unreduced ones stay as they are."""

        def typed(x: Any, spec: P) -> Any:
            return x if unreduced_axes(x) else resharded(x, self.mesh, P(*spec.partitions))

        return jax.tree.map(typed, grads, specs)

    def _whole(self, spec: P) -> P:
        """The spec over axes that are not data axes."""
        return only(spec, [name for name in self.mesh.axis_names if name not in self.axis.names])

    def _plain(self, x: Any) -> Any:
        """``x``, typed as neither reduced nor unreduced."""
        return resharded(x, self.mesh, P(*_spec(x).partitions)) if isinstance(x, Array) else x


def _of_maps(jaxpr: Any) -> list[Any] | None:
    """Types of the operands of every `jax.shard_map` in a program, if there is one."""
    if jaxpr is None:
        return None
    maps = (own for own in equations(jaxpr) if own.primitive.name == "shard_map")
    return [x.aval for own in maps for x in own.invars]


def _spec(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
