"""The DynamiQ codec: one worker's gradient under a plan, as the operations a topology needs."""

from jax import Array, lax
from jaxtyping import Float, UInt

import pallas_kernels as pk
from dynamiq_jax.layout import Layout
from dynamiq_jax.plan import Plan, make_plan, pack_statistics
from dynamiq_jax.topologies.base import ChunkOps


def plan_for(
    x: Float[Array, " d"],
    axis_name: str,
    seed: UInt[Array, " 2"] | None,
    layout: Layout,
    fmt: pk.WireFormat,
    backend: pk.Backend | None,
) -> Plan:
    """Statistics, the light all-reduce (the codec's only psum) and the plan that follows."""
    mean, sqnorm = pk.statistics(x, super_group_size=fmt.super_group_size, backend=backend)
    stats = lax.psum(pack_statistics(mean, sqnorm, layout), axis_name)
    return make_plan(stats, seed, layout, fmt)


def chunk_ops(
    x: Float[Array, " d"],
    plan: Plan,
    layout: Layout,
    fmt: pk.WireFormat,
    *,
    n_slots: int,
    divisor: int,
    backend: pk.Backend | None,
) -> ChunkOps:
    """Binds the kernels to one gradient and its plan.

    Args:
      x: this worker's flat gradient.
      plan: the plan all workers share.
      layout: its static sizes.
      fmt: the wire format.
      n_slots: encodings that one chunk passes through, see `Topology.slots`.
      divisor: the decoded sum is divided by this (n for a mean).
      backend: which kernels run.
    """
    noise = pk.slot_noise(plan.seed, n_slots, fmt.rounding)
    static = {"payload_words": layout.payload_words, "fmt": fmt, "backend": backend}

    def encode(chunk, slot):
        return pk.compress(
            x, plan.mean, plan.order, plan.tiles, chunk[None], noise[slot], **static
        )[0]

    def decode_add_encode(payload, chunk, slot):
        return pk.decompress_accumulate_recompress(
            payload[None],
            x,
            plan.mean,
            plan.order,
            plan.tiles,
            plan.tiles,
            chunk,
            noise[slot],
            **static,
        )

    def decode(payloads, chunks, into):
        return pk.decompress(
            payloads,
            plan.mean_sum,
            plan.order,
            plan.tiles,
            chunks,
            into,
            rows=-(-layout.size // fmt.super_group_size),
            dtype=x.dtype,
            divisor=divisor,
            fmt=fmt,
            backend=backend,
        )

    return ChunkOps(encode=encode, decode_add_encode=decode_add_encode, decode=decode)
