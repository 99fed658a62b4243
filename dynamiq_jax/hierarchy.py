"""The all-reduce of `Hierarchical`: scatter on the fast axis, reduce on the slow one, gather."""

import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax._compat import all_gather_invarying, psum_scatter
from dynamiq_jax.methods import Method, ShardedMethod, State
from dynamiq_jax.methods.base import Collective, Outcome
from dynamiq_jax.metrics import PayloadFacts
from dynamiq_jax.seeds import Seed, fold_seed
from dynamiq_jax.topologies import Hierarchical, Topology

UNIT = 1024
"""Coordinates that stay together: whole super-groups and blocks of every method."""


def slice_size(size: int, n_inner: int) -> int:
    """Coordinates of the slice that one inner worker takes over."""
    return -(-size // (n_inner * UNIT)) * UNIT


def wire_bits(
    size: int, dtype, sizes: tuple[int, ...], method: Method, topology: Hierarchical
) -> tuple[int, int]:
    """Bits that one worker sends of ``dtype[size]`` on the inner and on the outer axis."""
    n_inner, n_outer = sizes[-1], math.prod(sizes[:-1])
    part = slice_size(size, n_inner)
    if topology.inner is None:
        inner = 2 * (n_inner - 1) * part * 8 * method.native_dtype(dtype).itemsize
    else:
        halves = cast(ShardedMethod, method)
        inner = halves.sharded_wire_bits(part, n_inner, topology.inner)
        inner += halves.sharded_wire_bits(part, n_inner, None)
    assert topology.outer is not None
    return inner, method.wire_bits(part, n_outer, topology.outer)


def collectives(
    sizes: tuple[int, ...], topology: Topology | Hierarchical
) -> list[tuple[int, Topology, Collective]]:
    """The compressed collectives of an all-reduce, with their workers and topologies."""
    if not isinstance(topology, Hierarchical):
        return [(math.prod(sizes), topology, "all_reduce")]
    n_inner, n_outer = sizes[-1], math.prod(sizes[:-1])
    found: list[tuple[int, Topology, Collective]] = []
    if topology.inner is not None:
        found.append((n_inner, topology.inner, "reduce_scatter"))
        found.append((n_inner, topology.inner, "all_gather"))
    if n_outer > 1:
        assert topology.outer is not None
        found.append((n_outer, topology.outer, "all_reduce"))
    return found


def all_reduce(
    x: Float[Array, " d"],
    axis_names: tuple[str, ...],
    *,
    sizes: tuple[int, ...],
    method: Method,
    topology: Hierarchical,
    seed: Seed,
    divisor: int = 1,
    state: State = (),
    metrics: bool = False,
) -> Outcome:
    """The sum of ``x`` over all axes, over ``divisor``, and the state of the outer reduction.

    The facts are those of the outer payloads of all slices.
    """
    outer_axis = axis_names[0] if len(axis_names) == 2 else axis_names[:-1]
    inner_axis, n_inner, n_outer = axis_names[-1], sizes[-1], math.prod(sizes[:-1])
    inner, outer = topology.inner, topology.outer
    assert outer is not None
    seeds = [fold_seed(seed, i) for i in range(3)]
    part = slice_size(x.shape[0], n_inner)
    pad = n_inner * part - x.shape[0]
    slices = (jnp.pad(x, (0, pad)) if pad else x).reshape(n_inner, part)

    with jax.named_scope("dynamiq_inner_scatter"):
        if inner is None:
            mine = psum_scatter(slices.astype(method.native_dtype(x.dtype)), inner_axis)
        else:
            mine = cast(ShardedMethod, method).reduce_scatter(
                slices, inner_axis, n_workers=n_inner, topology=inner, seed=seeds[0]
            )
    if n_outer > 1:
        own_seed = fold_seed(seeds[1], lax.axis_index(inner_axis))
        mine, state, facts = method.all_reduce(
            mine,
            outer_axis,
            n_workers=n_outer,
            topology=outer,
            seed=own_seed,
            divisor=divisor,
            state=state,
            metrics=metrics,
        )
        if metrics:
            facts = jax.tree.map(lambda f: lax.psum(f, inner_axis), facts)
        if inner is not None:
            facts = facts._replace(error=math.nan)  # the inner encodings err, too
    else:
        mine, facts = lax.psum(mine, outer_axis) / divisor, PayloadFacts()
    with jax.named_scope("dynamiq_inner_gather"):
        if inner is None:
            whole = all_gather_invarying(mine, inner_axis)
        else:
            whole = cast(ShardedMethod, method).all_gather(
                mine, inner_axis, n_workers=n_inner, seed=seeds[2], invarying=True
            )
    return Outcome(whole.reshape(-1)[: x.shape[0]].astype(x.dtype), state, facts)
