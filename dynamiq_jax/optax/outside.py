"""Sharded updates outside of maps: one map over the whole mesh runs them.

On Explicit axes types say which gradients are still terms (`reduction.explicit_sums`). On Auto
axes `value_and_grad` returns terms with a leading axis of workers (`WorkerTerms`). There parameters
are sharded as their masters are, but for the axes of the workers.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis, knows_devices, mesh_of, set_around
from dynamiq_jax.core.warned import warn
from dynamiq_jax.reduction.explicit_sums import check_axes, unreduced_axes
from dynamiq_jax.reduction.worker_gradients import check_terms, has_terms, stacked_terms
from dynamiq_jax.tree.leaves import axes_above_one, describe_leaves, restrict_spec


class Outside(NamedTuple):
    """Static facts of an update outside of maps."""

    mesh: Mesh | AbstractMesh
    terms: tuple[P, ...]
    """The spec of every gradient."""
    own: tuple[P, ...]
    """The spec of every parameter."""
    moved: tuple[bool, ...]
    """Which gradients are terms; JAX has summed the others."""
    stacked: bool
    """Whether gradients have a leading axis of workers."""
    asks: bool
    """Whether the program may ask for its devices (`core.axis.knows_devices`)."""

    def run(
        self, step: Callable[..., Any], updates: Any, state: Any, params: Any, extra: Any
    ) -> tuple[Any, Any]:
        """``step`` under a map over the whole mesh.

        Raises:
          ValueError: ``step`` closes over traced arrays, which JAX refuses on Explicit axes.
        """
        of_terms = jax.tree.structure(updates).unflatten(self.terms)
        own, after = jax.tree.structure(params).unflatten(self.own), state.specs()

        def local(updates: Any, *rest: Any) -> Any:
            if self.stacked:
                updates = jax.tree.map(lambda x: x[0], updates)
            # A sum also for a mean: the loss has divided by all examples already.
            return step(updates, *rest, op="sum", moved=self.moved)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(of_terms, after, own, P()),
            out_specs=(own, after),
            check_vma=False,
        )
        try:
            with set_around(self.mesh, alone=True):
                return mapped(updates, state, params, extra)
        except NotImplementedError as error:
            # JAX has no type of its own for this error.
            if "Closing over" not in str(error):
                raise
            raise ValueError(
                "the inner optimizer closes over arrays of the surrounding program, such as "
                "hyperparameters of optax.inject_hyperparams around dq.optax.sharded. Pass "
                "dq.optax.sharded(optax.inject_hyperparams(...)(...), ...)"
            ) from error


def warn_of_sums(axis: Axis) -> None:
    """Warns of gradients that are no terms: JAX has summed all of them."""
    warn(
        f"no gradient is unreduced over axis {axis.name!r}: JAX has summed all of them, "
        "uncompressed. Take gradients by dq.value_and_grad(unreduced=True)",
    )


def on_auto_axes(
    axis: Axis, updates: Any, state: Any, params: Any, mesh: Mesh | AbstractMesh | None
) -> tuple[Outside, Any]:
    """The facts of an update on a mesh of Auto axes, and the arrays of the gradients.

    Raises:
      ValueError: gradients are terms of other workers, or are sharded otherwise than the masters;
        or they are no terms, and there is no mesh.
    """
    n_leaves = len(jax.tree.leaves(params))
    if not has_terms(updates):
        if mesh is None:
            raise ValueError(
                f"sharded found no map over axis {axis.name!r}, and no mesh that has it; call it "
                "under jax.shard_map, or take gradients by dq.value_and_grad(unreduced=True)"
            )
        # With one worker nothing is summed.
        if axes_above_one(axis.names, mesh.shape) and n_leaves:
            warn_of_sums(axis)
        own = _whole_specs(state, mesh, axis)
        facts = Outside(mesh, own, own, (False,) * n_leaves, stacked=False, asks=knows_devices())
        return facts, updates
    stacked, mesh, axes, given = stacked_terms(updates)
    check_terms(axis, axes)
    own = _whole_specs(state, mesh, axis)
    for leaf, spec, expected in zip(describe_leaves(params), given, own, strict=True):
        # The map would gather such gradients, or cut them, in every step.
        if not _alike(spec, expected, mesh):
            raise ValueError(
                f"leaf {leaf.path}: the gradient is sharded as {spec} over other axes than "
                f"{axis.name!r}, and its master in opt_state as {expected}; pass the same specs= "
                "to dq.value_and_grad and to dq.optax.sharded"
            )
    terms = tuple(P(axis.name, *spec) for spec in own)
    moved = (True,) * n_leaves
    return Outside(mesh, terms, own, moved, stacked=True, asks=knows_devices()), stacked


def _whole_specs(state: Any, mesh: Mesh | AbstractMesh, axis: Axis) -> tuple[P, ...]:
    """The specs of the masters without the workers' axes, which are those of the parameters."""
    others = [name for name in mesh.axis_names if name not in axis.names]
    count = len(jax.tree.leaves(state.masters))
    return tuple(restrict_spec(spec, others) for spec in state.splits[:count])


def _alike(one: P, other: P, mesh: Mesh | AbstractMesh) -> bool:
    """Whether two specs say the same, axes of one device and missing entries aside."""
    several = axes_above_one(mesh.axis_names, mesh.shape)
    pairs = itertools.zip_longest(*(restrict_spec(spec, several) for spec in (one, other)))
    return all(own == entry for own, entry in pairs)


# --- On Explicit axes -----------------------------------------------------------------------------


def on_explicit_axes(axis: Axis, updates: Any, params: Any) -> Outside:
    """The facts of an update, by the types of gradients and parameters.

    Raises:
      ValueError: gradients are unreduced over other axes.
    """
    mesh = mesh_of((updates, params))

    def specs_of(tree: Any) -> tuple[P, ...]:
        specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
        return tuple(P(*spec.partitions, unreduced=spec.unreduced) for spec in specs)

    check_axes(updates, axis, mesh)
    moved = tuple(bool(unreduced_axes(x)) for x in jax.tree.leaves(updates))
    if axes_above_one(axis.names, mesh.shape) and not any(moved):
        warn_of_sums(axis)
    specs = specs_of(updates), specs_of(params)
    return Outside(mesh, *specs, moved, stacked=False, asks=knows_devices())
