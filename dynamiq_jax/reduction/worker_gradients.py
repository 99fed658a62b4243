"""Gradients of single workers on meshes of Auto axes, before they are summed.

JAX has a type for such values only on Explicit axes ("unreduced"). On Auto axes the terms are one
array with a leading axis of workers, which is sharded over the data axes: a device holds the terms
of its worker.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis, knows_devices, set_around
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.leaves import axes_above_one, constrained


class Placement(NamedTuple):
    """How the terms of a leaf lie on a mesh."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    """The data axes, over which the leading axis is sharded."""
    spec: P
    """The spec of the other axes of the array, over the other axes of the mesh."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stacked"], meta_fields=["placement"]
)
@dataclasses.dataclass(frozen=True)
class WorkerTerms:
    """All workers' gradients of one parameter, by ``value_and_grad(unreduced=True)``.

    It is a pytree node in the place of the parameter's gradient. ``jax.tree.map(jnp.add, grads,
    others)`` adds the terms of two micro-batches. A scan carries them, from
    ``jax.tree.map(jnp.zeros_like, grads)`` on. `psum` and `dynamiq_jax.optax.sharded` sum them.

    Attributes:
      stacked: the terms, with a leading axis of workers.
      placement: how they lie on a mesh.
    """

    stacked: Any
    placement: Placement

    def __jax_array__(self) -> Array:
        """Refuses functions of arrays, which `jnp` and operators call with single leaves."""
        x, axis_name = jax.typeof(self.stacked), self.placement.axes
        raise ValueError(
            f"a gradient of value_and_grad(unreduced=True) is a node of the terms of {x.shape[0]} "
            f"workers, {x.str_short()}, and a function of arrays got the node. Sum terms by "
            f"dq.psum(grads, {axis_name[0] if len(axis_name) == 1 else axis_name!r}), and use "
            "the sums; with dq.optax.sharded divide the loss instead. To add up micro-batches "
            "begin with zeros of the gradients' shapes, not of the parameters': "
            "jax.tree.map(jnp.zeros_like, like), where like is "
            "jax.eval_shape(grad_fn, params, batch)[1]"
        )

    def _refused(self, other: Any = None) -> Any:
        """Refuses operators, also those of Python's numbers, which do not ask for an array."""
        return self.__jax_array__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _refused


def is_terms(x: Any) -> bool:
    """Whether ``x`` has the terms of a leaf."""
    return isinstance(x, WorkerTerms)


def has_terms(tree: Any) -> bool:
    """Whether a tree has terms of workers."""
    return any(map(is_terms, jax.tree.leaves(tree, is_leaf=is_terms)))


def stacked_terms(tree: Any) -> tuple[Any, Mesh | AbstractMesh, tuple[str, ...], tuple[P, ...]]:
    """The stacked terms of a tree, their mesh, their data axes, and the spec of every leaf.

    Raises:
      ValueError: a leaf has no terms, or those of other workers.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_terms)
    first = next(x for _, x in paths if is_terms(x)).placement
    for path, x in paths:
        # Mesh and axes must agree; specs are each leaf's own.
        own = x.placement[:2] if is_terms(x) else f"an array, {jax.typeof(x)}"
        if own != first[:2]:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is {own}, and other leaves are terms of the "
                f"workers of {first[:2]}; pass gradients of one call of value_and_grad alone"
            )
    terms = [x for _, x in paths]
    stacked = treedef.unflatten(x.stacked for x in terms)
    return stacked, first.mesh, first.axes, tuple(x.placement.spec for x in terms)


def terms_of(
    stacked: Any, mesh: Mesh | AbstractMesh, axes: tuple[str, ...], specs: Sequence[P]
) -> Any:
    """A tree like ``stacked``, of `WorkerTerms`."""
    leaves, treedef = jax.tree.flatten(stacked)
    pairs = zip(leaves, specs, strict=True)
    return treedef.unflatten(WorkerTerms(x, Placement(mesh, axes, spec)) for x, spec in pairs)


def reduce_terms(
    total: Reduction,
    terms: Any,
    key: Array | None = None,
    state: Any = None,
    *,
    metrics: bool = False,
    weight: Any = None,
) -> Reduced:
    """Sums the terms of all workers, under a map over the data axes; a state is stacked."""
    axis, op, specs = total.axis, total.op, total.placement.specs
    if op != "sum" or weight is not None or specs is not None:
        raise ValueError(
            "gradients of value_and_grad(unreduced=True) are terms whose sum is the gradient of "
            "the loss, also of a mean over all workers: call dq.psum(terms, axis_name), or "
            f"dq.reduce with op='sum', instead of op={op!r}, weight={weight!r} and specs={specs!r}"
        )
    stacked, mesh, axes, placed = stacked_terms(terms)
    check_terms(axis, axes)
    told = _Told(mesh, placed, metrics, knows_devices())
    with set_around(mesh, alone=not _others(mesh, axes)):
        return _reduced(total, told, stacked, key, state)


def check_terms(axis: Axis, axes: tuple[str, ...]) -> None:
    """Refuses terms of other workers, and a call inside of a map."""
    if axis.names != axes:
        raise ValueError(
            f"the gradients are terms of the workers of {axes}, and axis_name is {axis.names}; "
            f"pass axis_name={axes}"
        )
    if axis.mapped:
        raise ValueError(
            f"terms are summed outside of maps, and axis {axis.name!r} is mapped here; call psum "
            "after the map, or jax.value_and_grad and dq.psum in it"
        )


class _Told(NamedTuple):
    """Static facts, beside its reduction, that a program is made for."""

    mesh: Mesh | AbstractMesh
    specs: tuple[P, ...]
    metrics: bool
    asks: bool
    """Whether it may ask for its devices (`core.axis.knows_devices`)."""


def _others(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of several devices that are no data axes."""
    return axes_above_one([name for name in mesh.axis_names if name not in axes], mesh.shape)


@functools.partial(jax.jit, inline=True, static_argnums=(0, 1))
def _reduced(
    total: Reduction,
    told: _Told,
    tree: Any,
    key: Array | None,
    state: Any,
) -> Reduced:
    """`reduce_terms` as one program: JAX runs maps over some of a mesh's axes only in programs."""
    axis, (mesh, specs, metrics, _) = total.axis, told
    over = P(axis.name)
    others = _others(mesh, axis.names)
    own = total.with_specs(jax.tree.structure(tree).unflatten(specs))

    def local(tree: Any, key: Array | None, state: Any) -> Reduced:
        # A worker has one row: its own terms and its own state.
        mine, before = (jax.tree.map(lambda x: x[0], x) for x in (tree, state))
        found = own.reduce(mine, key, before, metrics=metrics)
        after = jax.tree.map(lambda x: axis.to_varying(x)[None], found.state)
        return found._replace(state=after)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        axis_names={*mesh.axis_names} - {*others},
        in_specs=(over, P(), over),
        out_specs=Reduced(P(), over, P()),  # type: ignore[arg-type]
    )
    found = mapped(tree, key, state)
    # The map leaves other axes to the compiler, which may gather over them.
    return found._replace(tree=constrained(found.tree, mesh, specs)) if others else found
