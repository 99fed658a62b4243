"""Gradients of single workers on meshes of Auto axes, before they are summed.

JAX has a type for such values only on Explicit axes ("unreduced"). On Auto axes the terms are one
array with a leading axis of workers, which is sharded over the data axes: a device holds the terms
of its worker.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.lowering import knows_devices
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.placement import axes_above_one, constrained


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tree"],
    meta_fields=["mesh", "axes", "specs"],
)
@dataclasses.dataclass(frozen=True)
class WorkerGradients:
    """A pytree of all workers' gradients, by ``value_and_grad(reduce=False)``; `psum` sums it.

    ``jax.tree.map(jnp.add, terms, others)`` adds those of two micro-batches. A scan carries them,
    from ``jax.tree.map(jnp.zeros_like, terms)`` on.

    Attributes:
      tree: gradients; every leaf has a leading axis of workers.
      mesh: the mesh of the parameters.
      axes: the data axes.
      specs: of every leaf without its leading axis, over the other axes.
    """

    tree: Any
    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    specs: tuple[P, ...]


def reduce_terms(
    total: Reduction,
    terms: WorkerGradients,
    key: Array | None = None,
    state: Any = None,
    *,
    metrics: bool = False,
    weight: Any = None,
) -> Reduced:
    """Sums the terms of all workers, under a map over the data axes; a state is stacked."""
    axis, op, specs = total.axis, total.op, total.specs
    if op != "sum" or weight is not None or specs is not None:
        raise ValueError(
            "gradients of value_and_grad(reduce=False) are terms, and their sum is the gradient of "
            f"the loss; op={op!r}, weight={weight!r} and specs={specs!r} do not go with them: call "
            "dq.psum(terms, axis_name)"
        )
    if axis.names != terms.axes:
        raise ValueError(
            f"the gradients are terms of the workers of {terms.axes}, and axis_name is "
            f"{axis.names}; pass axis_name={terms.axes}"
        )
    if axis.mapped:
        raise ValueError(
            f"terms are summed outside of maps, and axis {axis.name!r} is mapped here; call psum "
            "after the map, or jax.value_and_grad and dq.psum in it"
        )
    told = _Told(terms.mesh, terms.specs, metrics, knows_devices())
    return _reduced(total, told, terms.tree, key, state)


class _Told(NamedTuple):
    """Static facts, beside its reduction, that a program is made for."""

    mesh: Mesh | AbstractMesh
    specs: tuple[P, ...]
    metrics: bool
    asks: bool
    """Whether it may ask for its devices (`core.lowering.knows_devices`)."""


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
    others = axes_above_one(
        [name for name in mesh.axis_names if name not in axis.names], mesh.shape
    )
    own = dataclasses.replace(total, specs=jax.tree.structure(tree).unflatten(specs))

    def local(tree: Any, key: Array | None, state: Any) -> Reduced:
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
    return found._replace(tree=constrained(found.tree, mesh, specs)) if others else found
