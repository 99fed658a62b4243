"""Reductions outside of maps: of values that JAX's types call unreduced over Explicit axes.

An unreduced array is a sum that nobody has done yet: every device along the axis holds a term of
it. JAX types gradients so where parameters are typed as reduced, see `training.deferred`.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.in_maps import reduce_over
from dynamiq_jax.collectives.sum import Sum
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.compat import zero_tangent
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.request.compression import Compression
from dynamiq_jax.tree.placement import (
    bucket_axes,
    flat_specs,
    names_of,
    only,
    placed_leaves,
    several,
)


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh of `jax.set_mesh`, else that of the first leaf that has one; it may be empty."""
    meshes = [get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def is_explicit(mesh: AbstractMesh) -> bool:
    """Whether JAX's types say how arrays lie on every axis of the mesh."""
    return not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit}


def is_outside(axis: Axis, tree: Any) -> bool:
    """Whether a collective is called outside of maps, on an Explicit mesh that has its axes."""
    if axis.groups is not None or axis.mapped:
        return False
    mesh = mesh_of(tree)
    return is_explicit(mesh) and set(axis.names) <= set(mesh.axis_names)


def reduce_outside(
    axis: Axis,
    tree: Any,
    op: Op,
    compression: Compression,
    *,
    weight: Array | float | None = None,
    **options: Any,
) -> Reduced:
    """`reduce` outside of maps; warns where there is nothing to sum.

    Raises:
      ValueError: a mean or a weight, or as for `reduce_unreduced`.
    """
    if op != "sum" or weight is not None:
        raise ValueError(
            f"op={op!r} over axis {axis.name!r} outside of maps: every device holds a term of the "
            "gradient, and their sum is the gradient already. Pass op='sum', or call dq.psum; a "
            "loss that divides by all of its examples or tokens gives means"
        )
    if not any(map(unreduced_axes, jax.tree.leaves(tree))):
        warnings.warn(
            f"no leaf is unreduced over axis {axis.name!r}: outside of maps they count as summed "
            "already and are returned as they are. Take gradients by dq.value_and_grad("
            "reduce=False), with Compression(min_leaf_size=0, min_bucket_bytes=0) if all leaves "
            "are small; or call this under jax.shard_map",
            stacklevel=3,
        )
    return reduce_unreduced(tree, axis, compression, **options)


def unreduced_axes(x: Any) -> frozenset[str]:
    """The axes over which terms of ``x`` are still to be summed."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced)


def reduce_unreduced(
    tree: Any,
    axis: Axis,
    compression: Compression,
    *,
    key: Array | None = None,
    state: State | None = None,
    metrics: bool = False,
    specs: Any = None,
) -> Reduced:
    """Sums leaves that are unreduced over ``axis``, under a map over the whole mesh.

    JAX has summed other leaves; they are only sharded as ``specs`` say.

    Args:
      tree: leaves with types of an Explicit mesh.
      axis: the workers.
      compression: the request.
      key: as for `psum`.
      state: `Compression.init_state`'s with ``stacked=True``.
      metrics: as for `reduce`.
      specs: how sums are sharded, a tree like ``tree`` or a prefix of it; `None`: as their terms.
        What the axes of ``axis`` split is scattered over these.

    Raises:
      ValueError: a leaf is unreduced over other axes than ``axis``, or the state is for other
        leaves.
      NotImplementedError: a state, or metrics, of leaves that are scattered.
    """
    mesh = mesh_of(tree)
    leaves, treedef = jax.tree.flatten(tree)
    check_axes(tree, axis, mesh)
    moves = [bool(unreduced_axes(x)) for x in leaves]
    terms = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    targets = terms if specs is None else flat_specs(specs, tree, mesh.axis_names)
    some = [i for i, moved in enumerate(moves) if moved]
    over = several(axis.names, mesh.shape)
    own = Sum.of(axis, [targets[i] for i in some], over=over, compression=compression, op="sum")
    scattered = any(own.splits)
    if scattered and (state is not None or metrics):
        raise NotImplementedError(
            f"leaves are to be sharded over the data axes {axis.names}, and scattering keeps no "
            "state and has no metrics; pass metrics=False, no state, and a method without memory, "
            "or replicate the parameters over these axes"
        )

    def moving(found: Sequence[Any]) -> Any:
        return treedef.unflatten([x if moves[i] else None for i, x in enumerate(found)])

    pairs = zip(terms, leaves, strict=True)
    unreduced = [P(*spec, unreduced=unreduced_axes(x)) for spec, x in pairs]

    @jax.custom_jvp
    def total(tree: Any, key: Array | None, state: State | None) -> Reduced:
        tree = _not_batched(tree)
        if not scattered:
            parts = tree, moving(terms), moving(unreduced)
            return _mapped(*parts, axis, compression, mesh, key, state, metrics)
        after = moving([scattered_spec(spec, axis) for spec in targets])
        mapped = jax.shard_map(
            own.scatter,
            mesh=mesh,
            in_specs=(moving(unreduced), P()),
            out_specs=after,
            check_vma=False,
        )
        return Reduced(mapped(tree, key), None, None)

    @total.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Reduced, Reduced]:
        """That of the exact sum: JAX transposes a map of unreduced arrays to n times too much."""
        found = total(*primals)

        def exact(x: Array, own: Array) -> Array:
            return resharded(x, mesh, P(*jax.typeof(own).sharding.spec.partitions))

        rest = jax.tree.map(zero_tangent, found._replace(tree=None))
        return found, rest._replace(tree=jax.tree.map(exact, tangents[0], found.tree))

    found = Reduced(moving(leaves), state, None)
    if any(moves) or state is not None or metrics:
        found = total(moving(leaves), key, state)
    done = iter(jax.tree.leaves(found.tree))
    sums = [next(done) if moved else x for moved, x in zip(moves, leaves, strict=True)]
    pairs = zip(sums, targets, strict=True)
    return found._replace(tree=treedef.unflatten([resharded(x, mesh, spec) for x, spec in pairs]))


@jax.custom_batching.custom_vmap
def _not_batched(tree: Any) -> Any:
    """``tree``, of which `jax.vmap` takes one alone, in a function under `jax.jit`, too."""
    return tree


@_not_batched.def_vmap
def _(size: int, batched: Any, tree: Any) -> Any:
    raise NotImplementedError(
        f"jax.vmap over {size} sums of unreduced gradients, by value_and_grad or psum on Explicit "
        "axes: JAX does not batch them; make one call for each, in a loop, or take a mesh of Auto "
        "axes"
    )


def large_leaves(
    tree: Any, placed: list[P], mesh: AbstractMesh, axis: Axis, compression: Compression
) -> set[int]:
    """The leaves that the request compresses, of leaves that are whole over the axis."""
    others = [name for name in mesh.axis_names if name not in axis.names]
    specs = jax.tree.structure(tree).unflatten(only(spec, others) for spec in placed)
    leaves, _ = placed_leaves(tree, mesh, specs)
    sizes = tuple(mesh.shape[name] for name in axis.names)
    grouping = compression.group(leaves, sizes)
    return {leaf.index for bucket in grouping.buckets for leaf in bucket.leaves}


def resharded(x: Any, mesh: AbstractMesh, spec: P) -> Array:
    """``x`` as the spec says; nothing happens to an array that its type says is so."""
    if isinstance(x, Array) and not jax.typeof(x).sharding.mesh.empty:
        if jax.typeof(x).sharding.spec == spec:
            return x
    return jax.reshard(x, NamedSharding(mesh, spec))


def check_axes(tree: Any, axis: Axis, mesh: AbstractMesh) -> None:
    """Refuses leaves that are unreduced over other axes than ``axis``.

    Raises:
      ValueError: there are some.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        found = unreduced_axes(x)
        if found and several(found ^ {*axis.names}, mesh.shape):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is unreduced over the axes {sorted(found)}, "
                f"and axis_name={axis.name!r}; pass axis_name="
                f"{tuple(name for name in mesh.axis_names if name in found)}"
            )


def scattered_spec(spec: P, axis: Axis) -> P:
    """The spec after data axes have split what each device had: they come last."""
    entries = (sorted(names_of(entry), key=axis.names.__contains__) for entry in spec)
    return P(*(tuple(entry) or None for entry in entries))


def _mapped(
    tree: Any,
    specs: Any,
    unreduced: Any,
    axis: Axis,
    compression: Compression,
    mesh: AbstractMesh,
    key: Array | None,
    state: State | None,
    metrics: bool,
) -> Reduced:
    """`reduce_over` on every device, with its own part of the states."""
    run = functools.partial(reduce_over, axis, op="sum", compression=compression)
    sizes = tuple(mesh.shape[name] for name in axis.names)
    buckets = compression.group(placed_leaves(tree, mesh, specs)[0], sizes).buckets
    if state is not None and len(state) != len(buckets):
        raise ValueError(
            f"state is for {len(state)} buckets and {len(buckets)} are unreduced. The loss may use "
            "some leaves in ways that leave JAX no choice but to sum them: exclude these from the "
            "request, Compression(exclude=...), and take its init_state(..., stacked=True)"
        )
    parts = [bucket_axes(bucket, mesh.axis_names) for bucket in buckets]
    of_states = tuple(P(axis.name, axes) if axes else P(axis.name) for axes in parts)

    def local(tree: Any, key: Array | None, state: State | None) -> Reduced:
        if state is None:
            return run(tree, specs=specs, key=key, metrics=metrics)
        leading = [1 + bool(axes) for axes in parts]  # of workers, and of parts
        pairs = zip(leading, state, strict=True)
        mine = [jax.tree.map(lambda x, k=k: x.reshape(x.shape[k:]), own) for k, own in pairs]
        found = run(tree, specs=specs, key=key, state=tuple(mine), metrics=metrics)
        pairs = zip(leading, found.state, strict=True)
        after = [jax.tree.map(lambda x, k=k: x[(None,) * k], own) for k, own in pairs]
        return found._replace(state=tuple(after))

    of_state = None if state is None else of_states
    if state is not None:  # as it comes from `init_state`, say
        pairs = zip(state, of_states, strict=True)
        state = tuple(jax.reshard(own, NamedSharding(mesh, spec)) for own, spec in pairs)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(unreduced, P(), of_state),
        out_specs=Reduced(specs, of_state, P()),  # type: ignore[arg-type]
        check_vma=False,
    )
    return mapped(tree, key, state)
