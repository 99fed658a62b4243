"""The DynamiQ codec: one worker's gradient under a plan, as the operations a topology needs."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt

import pallas_kernels as pk
from dynamiq_jax._compat import AxisNames, all_gather
from dynamiq_jax.layout import Layout
from dynamiq_jax.plan import Plan, make_plan, pack_statistics
from dynamiq_jax.topologies.base import Arrived, ChunkOps


def plan_for(
    x: Float[Array, " d"],
    axis_name: AxisNames,
    seed: UInt[Array, " 2"] | None,
    layout: Layout,
    backend: pk.Backend | None,
    gather: Callable[[Array, AxisNames], Array] = all_gather,
) -> Plan:
    """Statistics, the light all-reduce (the codec's only psum) and the plan that follows.

    For an all-gather of slices ``x`` the statistics are gathered as well, by ``gather``.
    """
    mean, sqnorm = pk.statistics(x, super_group_size=layout.super_group_size, backend=backend)
    stats = pack_statistics(mean, sqnorm, layout)
    if layout.collective == "all_gather":
        stats = jnp.moveaxis(gather(stats, axis_name), 0, 1).reshape(stats.shape[0], -1)
    else:
        stats = lax.psum(stats, axis_name)
    return make_plan(stats, seed, layout)


def chunk_ops(
    x: Float[Array, " d"],
    plan: Plan,
    layout: Layout,
    *,
    n_slots: int,
    divisor: int = 1,
    slice_start: Array | None = None,
    backend: pk.Backend | None,
) -> ChunkOps:
    """Binds the kernels to one gradient and its plan.

    Args:
      x: this worker's flat gradient; in shards of whole super-groups if there are several.
      plan: the plan all workers share.
      layout: its static sizes and the wire format.
      n_slots: encodings that one chunk passes through, see `topologies.base.n_slots`.
      divisor: the decoded sum is divided by this (n for a mean).
      slice_start: number of this worker's first super-group, for `ChunkOps.finish`.
      backend: which kernels run.
    """
    noise = pk.slot_noise(plan.seed, n_slots, layout.fmt.rounding)
    common = {"fmt": layout.fmt, "backend": backend}
    source = pk.Source(x, plan.mean, plan.order)

    def result(rows, start, into):
        return pk.Result(plan.mean_sum, plan.order, rows, x.dtype, divisor, start, into)

    def inputs(arrived: tuple[Arrived, ...]) -> tuple[pk.Input, ...]:
        return tuple(pk.Input(a.payloads, plan.tiles[a.stage], a.skip) for a in arrived)

    def encode(arrived, chunks, stage, slot, skip=None):
        target = pk.Target(plan.tiles[stage], noise[slot], layout.payload_words[stage])
        if not arrived:
            return pk.compress(source, chunks, target, skip, **common)
        return pk.decompress_accumulate_recompress(
            inputs(arrived), source, chunks, target, **common
        )

    def decode(payloads, chunks, into):
        whole = result(layout.rows, None, into)
        return pk.decompress(payloads, plan.tiles[-1], chunks, whole, **common)

    def finish(arrived, chunks, into):
        assert slice_start is not None
        own = result(layout.shard_rows, slice_start, into)
        return pk.decompress_accumulate(inputs(arrived), source, chunks, own, **common)

    return ChunkOps(encode=encode, decode=decode, finish=finish)


def encode_slice(
    x: Float[Array, " d"],
    plan: Plan,
    layout: Layout,
    me: Array,
    backend: pk.Backend | None,
) -> UInt[Array, " P"]:
    """The payload of worker ``me``'s own slice in an all-gather (one chunk per worker)."""
    rows, spare = layout.shard_rows, layout.chunk_super_groups - layout.shard_rows
    own = plan.order[me]
    own = jnp.where(own < layout.rows, own - me * rows, own - layout.rows - me * spare + rows)
    mean = jnp.pad(lax.dynamic_slice_in_dim(plan.mean, me * rows, rows), (0, spare))
    fmt = dataclasses.replace(layout.fmt, rounding="independent")
    noise = pk.slot_noise(plan.seed, layout.n_workers, fmt.rounding)[me]
    source = pk.Source(x, mean, own[None])
    tiles = lax.dynamic_slice_in_dim(plan.tiles[0], me, 1)
    target = pk.Target(tiles, noise, layout.payload_words[0])
    return pk.compress(source, jnp.zeros(1, jnp.int32), target, fmt=fmt, backend=backend)[0]
