"""Reductions outside of maps: of values that JAX's types call unreduced over Explicit axes.

An unreduced array is a sum that nobody has done yet: every device along the axis holds a term of
it. JAX types gradients so where parameters are typed as reduced, see `training.deferred`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.checks import Op
from dynamiq_jax.compression import Compression
from dynamiq_jax.lax.axis import Axis
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.tree.placement import bucket_axes, placed_leaves


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


def check_outside(tree: Any, axis: Axis, op: Op, specs: Any, weight: Any) -> None:
    """Refuses arguments that mean nothing outside of maps; warns where there is nothing to sum.

    Raises:
      ValueError: a mean, a weight or specs.
    """
    if op != "sum" or weight is not None:
        raise ValueError(
            f"op={op!r} over axis {axis.name!r} outside of maps: every device holds a term of the "
            "gradient, and their sum is the gradient already. Pass op='sum', or call dq.psum; a "
            "loss that divides by all of its examples or tokens gives means"
        )
    if specs is not None:
        raise ValueError(
            f"specs={specs!r}: outside of maps the types of leaves say how they are sharded; leave "
            "specs out"
        )
    if not any(map(unreduced_axes, jax.tree.leaves(tree))):
        warnings.warn(
            f"no leaf is unreduced over axis {axis.name!r}: outside of maps they count as summed "
            "already and are returned as they are. Take gradients by dq.value_and_grad("
            "reduce=False), with Compression(min_leaf_size=0, min_bucket_bytes=0) if all leaves "
            "are small; or call this under jax.shard_map",
            stacklevel=4,
        )


def unreduced_axes(x: Any) -> frozenset[str]:
    """The axes over which terms of ``x`` are still to be summed."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced)


def reduce_unreduced(
    run: Callable[..., Reduced],
    tree: Any,
    axis: Axis,
    compression: Compression,
    *,
    key: Array | None,
    state: State | None,
    metrics: bool,
) -> Reduced:
    """Maps ``run`` over the whole mesh for leaves that are unreduced over ``axis``.

    Other leaves pass as they are: JAX has summed them.

    Args:
      run: ``(tree, specs=, key=, state=, metrics=) -> Reduced``, a sum of one device's terms. Its
        ``specs`` say which axes split leaves.
      tree: leaves with types of an Explicit mesh.
      axis: the workers.
      compression: the request that ``run`` follows.
      key: as for `psum`.
      state: `Compression.init_state`'s with ``stacked=True``.
      metrics: whether ``run`` returns them.

    Raises:
      ValueError: a leaf is unreduced over other axes than ``axis``, or the state is for other
        leaves.
    """
    mesh = mesh_of(tree)
    leaves, treedef = jax.tree.flatten(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path, x in zip(paths, leaves, strict=True):
        found = unreduced_axes(x)
        if found and found != {*axis.names}:
            raise ValueError(
                f"leaf {path} is unreduced over the axes {sorted(found)}, and axis_name="
                f"{axis.name!r}; pass axis_name={tuple(n for n in mesh.axis_names if n in found)}"
            )
    moves = [bool(unreduced_axes(x)) for x in leaves]

    if not any(moves) and state is None and not metrics:
        return Reduced(tree, None, None)

    def moving(found: list) -> Any:
        return treedef.unflatten([x if moves[i] else None for i, x in enumerate(found)])

    partitions = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    specs, sizes = moving(partitions), tuple(mesh.shape[name] for name in axis.names)
    terms = [P(*spec, unreduced=frozenset(axis.names)) for spec in partitions]
    own, _ = placed_leaves(moving(leaves), mesh, specs)
    buckets = compression.group(own, sizes).buckets
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
        in_specs=(moving(terms), P(), of_state),
        out_specs=Reduced(specs, of_state, P()),  # type: ignore[arg-type]
        check_vma=False,
    )
    found = mapped(moving(leaves), key, state)
    done = iter(jax.tree.leaves(found.tree))
    whole = [next(done) if moves[i] else x for i, x in enumerate(leaves)]
    return found._replace(tree=treedef.unflatten(whole))
