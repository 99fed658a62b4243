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
    result = {"dtype": x.dtype, "divisor": divisor, **common}

    def inputs(arrived: tuple[Arrived, ...]) -> tuple[pk.Input, ...]:
        return tuple(pk.Input(a.payloads, plan.tiles[a.stage], a.skip) for a in arrived)

    def encode(arrived, chunks, stage, slot, skip=None):
        out = {"payload_words": layout.payload_words[stage], **common}
        rest = x, plan.mean, plan.order, plan.tiles[stage], chunks, noise[slot]
        if not arrived:
            return pk.compress(*rest, skip, **out)
        return pk.decompress_accumulate_recompress(inputs(arrived), *rest, **out)

    def decode(payloads, chunks, into):
        return pk.decompress(
            payloads,
            plan.mean_sum,
            plan.order,
            plan.tiles[-1],
            chunks,
            into,
            rows=layout.rows,
            **result,
        )

    def finish(arrived, chunks, into):
        assert slice_start is not None
        return pk.decompress_accumulate(
            inputs(arrived),
            x,
            plan.mean,
            plan.mean_sum,
            plan.order,
            chunks,
            slice_start,
            into,
            rows=layout.shard_rows,
            **result,
        )

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
    return pk.compress(
        x,
        mean,
        own[None],
        lax.dynamic_slice_in_dim(plan.tiles[0], me, 1),
        jnp.zeros(1, jnp.int32),
        noise,
        payload_words=layout.payload_words[0],
        fmt=fmt,
        backend=backend,
    )[0]
