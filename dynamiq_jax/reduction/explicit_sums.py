"""Reductions outside of maps, of values that are typed as unreduced over Explicit axes.

An unreduced array is a sum that has not been computed yet: every device along the axis holds a term
of it. If a parameter is typed as reduced, JAX types its gradient as unreduced, see `explicit_axes`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import first_states
from dynamiq_jax.core.axis import Axis, is_explicit, mesh_of, resharded
from dynamiq_jax.core.compat import check_partitioner
from dynamiq_jax.core.warned import warn
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.plan.plan import Native, Plan, remember, warn_of_native
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.leaves import (
    axes_above_one,
    bucket_axes,
    describe_leaves,
    flat_specs,
    n_parts,
    names_of,
    placed_leaves,
    restrict_spec,
)


def reduce_outside(
    total: Reduction,
    tree: Any,
    key: Array | None = None,
    state: State | None = None,
    *,
    metrics: bool = False,
    weight: Array | float | None = None,
) -> Reduced:
    """`reduce` outside of maps; warns if there is nothing to sum."""
    name = total.axis.name
    if total.op != "sum" or weight is not None:
        raise ValueError(
            f"op={total.op!r} over axis {name!r} outside of maps: every device holds a term of the "
            "gradient, and their sum is the gradient already. Pass op='sum', or call dq.psum; a "
            "loss that divides by all of its examples or tokens gives means"
        )
    several = axes_above_one(total.axis.names, mesh_of(tree).shape)
    # With one worker there is nothing to sum.
    if several and not any(map(unreduced_axes, jax.tree.leaves(tree))):
        warn(
            f"no leaf is unreduced over axis {name!r}: outside of maps they count as summed "
            "already and are returned as they are. Take gradients by dq.value_and_grad("
            "unreduced=True), with Compression(min_leaf_size=0, min_bucket_bytes=0) if all leaves "
            "are small; or call this under jax.shard_map",
        )
    return reduce_unreduced(total, tree, key, state, metrics=metrics)


def unreduced_axes(x: Any) -> frozenset[str]:
    """The axes over which terms of ``x`` are still to be summed."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced)


def reduce_unreduced(
    total: Reduction,
    tree: Any,
    key: Array | None = None,
    state: State | None = None,
    *,
    metrics: bool = False,
) -> Reduced:
    """Sums leaves that are unreduced over the axis, under a map over the whole mesh.

    JAX has summed the other leaves. Results are sharded as the placement's ``specs`` say, by
    default like their terms; leaves that the workers split are scattered over them. A state is
    stacked.
    """
    axis, mesh = total.axis, mesh_of(tree)
    if state is not None and not axes_above_one(axis.names, mesh.shape):
        # One worker sends nothing, and JAX has no terms for it: its state stays what it is.
        return reduce_unreduced(total, tree, key, metrics=metrics)._replace(state=state)
    leaves, treedef = jax.tree.flatten(tree)
    check_axes(tree, axis, mesh)
    moves = [i for i, x in enumerate(leaves) if unreduced_axes(x)]
    terms = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    specs = total.placement.specs
    targets = terms if specs is None else flat_specs(specs, tree, mesh.axis_names)

    def moving(found: Sequence[Any]) -> Any:
        return treedef.unflatten([x if i in moves else None for i, x in enumerate(found)])

    own = dataclasses.replace(total, op="sum").with_specs(moving(terms))
    own = own.placed([targets[i] for i in moves], over=axes_above_one(axis.names, mesh.shape))
    found = Reduced(moving(leaves), None, None)
    # A state and metrics come out of the map even where nothing moves.
    if moves or state is not None or metrics:
        pairs = zip(terms, leaves, strict=True)
        given = moving([P(*spec, unreduced=unreduced_axes(x)) for spec, x in pairs])
        if own.placement.is_split:
            own.check_scatter(state, metrics)
            after = moving([scattered_spec(spec, axis) for spec in targets])
            # `Reduction.reduce` would call this, too.
            summed = _with_exact_tangent(own.scatter, mesh, (given, P()), after)
            found = found._replace(tree=summed(moving(leaves), key))
        else:
            run, states, placed = functools.partial(own.reduce, metrics=metrics), state, None
            if state is not None:
                parts = _Parts.of(own, moving(leaves), mesh)
                rest = [None if i in moves else x for i, x in enumerate(leaves)]
                parts.check(state, treedef.unflatten(rest))
                run, states, placed = parts.mapped(run), parts.on_mesh(state), parts.specs
            after = Reduced(moving(terms), placed, P())  # type: ignore[arg-type]
            summed = _with_exact_tangent(run, mesh, (given, P(), placed), after)
            found = summed(moving(leaves), key, states)
    done = dict(zip(moves, jax.tree.leaves(found.tree), strict=True))
    sums = [resharded(done.get(i, x), mesh, targets[i]) for i, x in enumerate(leaves)]
    return found._replace(tree=treedef.unflatten(sums))


def _with_exact_tangent(
    run: Callable[..., Any], mesh: AbstractMesh, in_specs: tuple, out_specs: Any
) -> Callable[..., Any]:
    """``run(terms, ...)`` mapped over the mesh, where its sums come first in the results.

    The derivative is that of the exact sum: JAX's transpose of a map of unreduced arrays is n times
    too large.
    """
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    alone = jax.custom_batching.custom_vmap(mapped)
    alone.def_vmap(_refuse_vmap)
    summed = jax.custom_jvp(alone)

    @summed.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        found = summed(*primals)
        results, structure = jax.tree.flatten(found)
        # Not strict: states and metrics follow the sums, and have no tangent.
        pairs = zip(jax.tree.leaves(tangents[0]), results, strict=False)
        exact = [resharded(x, mesh, P(*jax.typeof(y).sharding.spec.partitions)) for x, y in pairs]
        rest = map(_zero_tangent, results[len(exact) :])
        return found, structure.unflatten([*exact, *rest])

    return summed


def _zero_tangent(x: Array) -> Array | np.ndarray:
    """The tangent of a constant: zeros, of dtype float0 for integers."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _refuse_vmap(size: int, *_: Any) -> Any:
    raise NotImplementedError(
        f"jax.vmap over {size} sums of unreduced gradients, by value_and_grad or psum on Explicit "
        "axes: JAX does not batch them; make one call for each, in a loop, or take a mesh of Auto "
        "axes"
    )


def large_leaves(total: Reduction, tree: Any, placed: list[P], mesh: AbstractMesh) -> set[int]:
    """The leaves that the method compresses, if every worker holds whole leaves."""
    plan = plan_of_sums(total, tree, placed, mesh)
    return {leaf.index for bucket in plan.buckets for leaf in bucket.leaves}


def plan_of_sums(total: Reduction, tree: Any, placed: list[P], mesh: AbstractMesh) -> Plan:
    """The plan of an all-reduce of all leaves, if every worker holds whole ones."""
    axes = total.axis.names
    others = [name for name in mesh.axis_names if name not in axes]
    specs = jax.tree.structure(tree).unflatten(restrict_spec(spec, others) for spec in placed)
    leaves, _ = placed_leaves(tree, mesh, specs)
    # On a mesh that is not set nothing is pushed, which is not known here.
    counts = tuple(mesh.shape[name] for name in axes)
    return total.compression.plan(leaves, counts, overlaps=True)


def marked(sums: dict[int, Array], plan: Plan, why: Mapping[int, str]) -> dict[int, Array]:
    """Sums by JAX, and in the program a mark of what they are: a plan with reasons.

    ``plan`` is that of all leaves, and ``why`` has the reasons for those that it compresses.
    """
    reasons = {leaf.index: reason for leaf, reason, _ in plan.exact}
    large = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    leaves = sorted([*large, *(own.leaf for own in plan.exact)], key=lambda leaf: leaf.index)
    natives = tuple(
        Native(leaf, reasons.get(leaf.index) or why[leaf.index], leaf.dtype)
        for leaf in leaves
        if leaf.index in sums and (leaf.index in reasons or leaf.index in why)
    )
    # No mark where nothing travels.
    if not natives or plan.n_workers == 1:
        return sums
    told = Plan("all-reduce", plan.sizes, exact=natives, limited=plan.limited, by_jax=True)
    warn_of_native(told, sum(leaf.nbytes for leaf in large if leaf.index not in sums))
    first = natives[0].leaf.index
    with jax.named_scope(remember(told)):
        # One mark is enough: its scope names the plan of all.
        return sums | {first: checkpoint_name(sums[first], told.scope)}


def check_axes(tree: Any, axis: Axis, mesh: AbstractMesh) -> None:
    """Refuses leaves that are unreduced over other axes than ``axis``, or without Shardy."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        found = unreduced_axes(x)
        if found:
            check_partitioner()
        if found and axes_above_one(found ^ {*axis.names}, mesh.shape):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is unreduced over the axes {sorted(found)}, "
                f"and axis_name={axis.name!r}; pass axis_name="
                f"{tuple(name for name in mesh.axis_names if name in found)}"
            )


def scattered_spec(spec: P, axis: Axis) -> P:
    """The spec after data axes have split each device's part: data axes come last."""
    # The sort is stable: within both groups the order of the spec stays.
    entries = (sorted(names_of(entry), key=axis.names.__contains__) for entry in spec)
    return P(*(tuple(entry) or None for entry in entries))


def gather_whole(
    total: Reduction, mesh: AbstractMesh, shards: Any, placed: Sequence[P], words: Array | None
) -> Any:
    """Whole leaves of global arrays, outside of maps, on axes of either type; no derivatives.

    ``placed`` has the spec of each leaf; what data axes do not split is returned as it is.
    """
    tree, own = jax.tree.structure(shards), jax.tree.map(lax.stop_gradient, shards)
    kept = [name for name in mesh.axis_names if name not in total.axis.names]
    before = [scattered_spec(spec, total.axis) for spec in placed]
    if is_explicit(mesh):
        pairs = zip(jax.tree.leaves(own), before, strict=True)
        own = tree.unflatten(resharded(x, mesh, spec) for x, spec in pairs)
    mapped = jax.shard_map(
        total.gather,
        mesh=mesh,
        in_specs=(tree.unflatten(before), P()),
        out_specs=tree.unflatten(restrict_spec(spec, kept) for spec in placed),
        check_vma=False,
    )
    return mapped(own, words)


class _Parts(NamedTuple):
    """The states of the buckets, of which every device has a part."""

    total: Reduction
    mesh: AbstractMesh
    plan: Plan
    split_over: list[tuple[str, ...]]
    """The other axes that split the leaves of each bucket."""

    @classmethod
    def of(cls, total: Reduction, tree: Any, mesh: AbstractMesh) -> "_Parts":
        """The parts of the states for the leaves of ``tree``."""
        sizes = tuple(mesh.shape[name] for name in total.axis.names)
        leaves, _ = placed_leaves(tree, mesh, total.placement.specs)
        plan = total.compression.plan(leaves, sizes, overlaps=True)
        split_over = [bucket_axes(bucket, mesh.axis_names) for bucket in plan.buckets]
        return cls(total, mesh, plan, split_over)

    @property
    def specs(self) -> tuple[P, ...]:
        """How the state of every bucket is sharded."""
        name = self.total.axis.name
        return tuple(P(name, axes) if axes else P(name) for axes in self.split_over)

    def check(self, state: State, others: Any) -> None:
        """Refuses a state of one worker, or of other leaves; JAX has summed ``others`` itself."""
        compression, sizes = self.total.compression, self.mesh.shape
        counts = [n_parts(axes, sizes) for axes in self.split_over]
        one = jax.eval_shape(functools.partial(first_states, self.plan, counts))
        n = math.prod(sizes[name] for name in self.total.axis.names)
        all_of_them = jax.tree.map(lambda x: x.update(shape=(n, *x.shape)), one)
        (given, own), (wanted, like), (single, _) = map(_described, (state, all_of_them, one))
        if given == wanted and own == like:
            return
        if given == single:
            raise ValueError(
                f"state has leaves of shapes {given}, those of one worker, and outside of maps it "
                f"has those of all {n}: pass what init_state(tree, {n}, stacked=True) gives"
            )
        workers = tuple(sizes[name] for name in self.total.axis.names)
        plan = compression.plan(describe_leaves(others), workers, overlaps=True)
        if large := [leaf.path for bucket in plan.buckets for leaf in bucket.leaves]:
            raise ValueError(
                f"state has leaves of shapes {given}, and the terms of this tree need {wanted}: "
                f"JAX itself has summed {', '.join(large[:4])} ({len(large)} leaves), since the "
                "loss uses them in ways that leave it no choice. Exclude them by "
                "Compression(exclude=...), and pass its init_state(..., stacked=True)"
            )
        raise ValueError(
            f"state has leaves of shapes {given}, and method={compression.method!r} keeps {wanted} "
            f"of this tree for {n} workers; pass what init_state(tree, {n}, stacked=True) gives "
            "for the same arguments, with mesh= and specs= where other axes split leaves"
        )

    def on_mesh(self, state: State) -> State:
        """The states, as they come from `init_state`, say, on the mesh."""
        pairs = zip(state, self.specs, strict=True)
        return tuple(jax.reshard(own, NamedSharding(self.mesh, spec)) for own, spec in pairs)

    def mapped(self, run: Callable[..., Reduced]) -> Callable[..., Reduced]:
        """``run`` with each device's part of the states."""
        leading = [1 + bool(axes) for axes in self.split_over]  # of workers, and of parts

        def local(tree: Any, key: Array | None, state: State) -> Reduced:
            pairs = zip(leading, state, strict=True)
            mine = [jax.tree.map(lambda x, k=k: x.reshape(x.shape[k:]), own) for k, own in pairs]
            found = run(tree, key, tuple(mine))
            pairs = zip(leading, found.state, strict=True)
            after = [jax.tree.map(lambda x, k=k: x[(None,) * k], own) for k, own in pairs]
            return found._replace(state=tuple(after))

        return local


def _described(state: Any) -> tuple[list[tuple[int, ...]], Any]:
    """The shapes of a state's leaves, and its structure."""
    leaves, treedef = jax.tree.flatten(tuple(state) if isinstance(state, list) else state)
    return list(map(jnp.shape, leaves)), treedef
