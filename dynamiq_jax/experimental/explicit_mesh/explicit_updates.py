"""Sharded updates outside of maps: gradients that are unreduced over Explicit axes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.meshes import mesh_of
from dynamiq_jax.core.warned import warn
from dynamiq_jax.experimental.explicit_mesh.explicit_sums import check_axes, unreduced_axes
from dynamiq_jax.tree.placement import axes_above_one


def update_outside(
    step: Callable[..., Any], axis: Axis, updates: Any, state: Any, params: Any, extra: Any
) -> Any:
    """``step`` under a map over the whole mesh, for gradients that are unreduced outside of it.

    Raises:
      ValueError: gradients are unreduced over other axes, or ``step`` closes over traced arrays.
    """
    mesh = mesh_of((updates, params))

    def spec_of(x: Any) -> P:
        found = jax.typeof(x).sharding.spec
        return P(*found.partitions, unreduced=found.unreduced)

    check_axes(updates, axis, mesh)
    terms = jax.tree.map(spec_of, updates)
    moved = [bool(unreduced_axes(x)) for x in jax.tree.leaves(updates)]
    if axes_above_one(axis.names, mesh.shape) and not any(moved):
        warn(
            f"no gradient is unreduced over axis {axis.name!r}: JAX has summed all of them, "
            "uncompressed. Take gradients by dq.value_and_grad(reduce=False)",
        )
    own, after = jax.tree.map(spec_of, params), state.specs()
    run = jax.shard_map(
        functools.partial(step, op="sum", moved=moved),
        mesh=mesh,
        in_specs=(terms, after, own, P()),
        out_specs=(own, after),
        check_vma=False,
    )
    try:
        return run(updates, state, params, extra)
    except NotImplementedError as error:
        if "Closing over" not in str(error):
            raise
        raise ValueError(
            "the inner optimizer closes over arrays of the surrounding program, such as "
            "hyperparameters of optax.inject_hyperparams around dq.optax.sharded. Pass "
            "dq.optax.sharded(optax.inject_hyperparams(...)(...), ...)"
        ) from error
