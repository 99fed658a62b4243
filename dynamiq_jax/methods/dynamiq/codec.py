"""The DynamiQ codec: one worker's gradient under a plan, as the operations an executor needs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import Seed
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder
from dynamiq_jax.methods.base import Call, clipped
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.dynamiq.plan import Plan, even_plan, make_plan


class SharedPlan(NamedTuple):
    """The values that all workers know before the first encoding."""

    plan: Plan
    noise: UInt[Array, "slots 8"]
    """The randomness of every slot."""
    part: UInt[Array, " 2"] | None = None
    """This worker's part of the seed, if a push kernel adds up the parts of all workers."""


def shared_plan(
    stats: Float[Array, "k M"], seed: Seed, layout: Layout, n_slots: int, backend: pk.Backend | None
) -> SharedPlan:
    """The plan from the sum of workers' messages, for chunks with ``n_slots`` encodings."""
    if layout.planned:
        plan = make_plan(stats, seed, layout, backend)
    else:
        plan = even_plan(stats, seed, layout)
    return SharedPlan(plan, pk.slot_noise(plan.seed, n_slots, layout.fmt.rounding))


def chunk_codec(
    x: Float[Array, " d"],
    shared: SharedPlan,
    layout: Layout,
    call: Call,
    *,
    slice_start: Array | None = None,
    backend: pk.Backend | None,
) -> ChunkCodec:
    """Binds the kernels to one gradient and the plan that all workers share.

    With `Call.keep_error` the errors of encodings are f32[rows, S] in the gradient's order. If
    there are several shards, ``x`` has shards of whole super-groups; ``slice_start`` is the index
    of this worker's first super-group, for `ChunkCodec.finish`.
    """
    tells = call.keep_error
    if tells and layout.fmt.carries_nan:
        # With NaN for infinities, an infinite total tells that finite numbers were too large
        # together.
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    centred = layout.stats_per_super_group == 2
    own = pk.Source(x, shared.plan.mean if centred else None, shared.plan.order)
    codec = _Codec(own, shared, layout, call, slice_start, backend)
    if tells:
        zeros = jnp.zeros((layout.rows, layout.super_group_size), jnp.float32)
        return ChunkCodec(codec.encode_and_tell, codec.decode, lost=zeros)
    push = codec.push if pk.pushes(layout.fmt, backend) else None
    return ChunkCodec(codec.encode, codec.decode, codec.finish, push=push)


@dataclasses.dataclass(frozen=True, eq=False)
class _Codec:
    """The operations of `ChunkCodec` by kernels, on one gradient under a plan."""

    own: pk.Source
    """This worker's gradient."""
    shared: SharedPlan
    layout: Layout
    call: Call
    slice_start: Array | None
    """The number of this worker's first super-group, for `finish`."""
    backend: pk.Backend | None

    def encode(
        self,
        arrived: tuple[Arrived, ...],
        chunks: Array,
        encoder: Encoder,
        lost: None,
        skip: Array | None = None,
    ) -> tuple[Array, None]:
        """See `ChunkCodec.encode`; nobody asks for what is lost."""
        target = self._target(encoder)
        if not arrived:
            return pk.compress(self.own, chunks, target, skip, **self._kernels), None
        inputs = self._inputs(arrived)
        hop = pk.decompress_accumulate_recompress
        return hop(inputs, self.own, chunks, target, **self._kernels), None

    def encode_and_tell(
        self,
        arrived: tuple[Arrived, ...],
        chunks: Array,
        encoder: Encoder,
        lost: Array,
        skip: Array | None = None,
    ) -> tuple[Array, Array]:
        """See `ChunkCodec.encode`; the payloads are decoded again to see what they lost."""
        plan, layout, target = self.shared.plan, self.layout, self._target(encoder)
        summed = self._less_means(start=jnp.int32(0))
        inputs = self._inputs(arrived)
        total = pk.decompress_accumulate(inputs, self.own, chunks, summed, **self._kernels)
        total = clipped(total) if layout.fmt.carries_nan else total
        source = pk.Source(total.reshape(-1), None, plan.order)
        payloads = pk.compress(source, chunks, target, skip, **self._kernels)
        noise = self._noise(jnp.full_like(chunks, encoder.slot))
        decoded = self._less_means()
        sent = pk.decompress(payloads, target.tiles, chunks, decoded, noise, **self._kernels)
        rows = plan.order[chunks].reshape(-1)
        # Numbers from layout.rows on are padding: clipped here, dropped in the next line.
        less = (total - sent).at[rows].get(mode="clip")
        return payloads, lost.at[rows].set(less, mode="drop", unique_indices=True)

    def decode(
        self, payloads: Array, chunks: Array, encoders: Encoder, into: Array | None
    ) -> Array:
        """See `ChunkCodec.decode`."""
        result = self._sums(self.layout.rows, into=into)
        tiles, noise = self.shared.plan.tiles[-1], self._noise(encoders.slot)
        return pk.decompress(payloads, tiles, chunks, result, noise, **self._kernels)

    def finish(self, arrived: tuple[Arrived, ...], chunks: Array, into: Array | None) -> Array:
        """See `ChunkCodec.finish`."""
        assert self.slice_start is not None
        result = self._sums(self.layout.shard_rows, self.slice_start, into)
        inputs = self._inputs(arrived)
        return pk.decompress_accumulate(inputs, self.own, chunks, result, **self._kernels)

    def push(self, axis: Axis) -> Array:
        """See `ChunkCodec.push`."""
        (plan, noise, part), layout = self.shared, self.layout
        noise = noise if part is None else axis.to_varying(part)
        source, result = self.own._replace(x=axis.to_varying(self.own.x)), self._sums(layout.rows)
        words, even = layout.payload_words, not layout.planned and layout.shards == 1
        told = {"fmt": layout.fmt, "even": even}
        return pk.all_reduce(source, plan.tiles, noise, words, result, axis.sizes, **told)

    @property
    def _kernels(self) -> dict[str, Any]:
        """The keywords of all kernels."""
        return {"fmt": self.layout.fmt, "backend": self.backend}

    def _noise(self, slots: Array | int) -> Array | None:
        """The noise of the encoders in these slots, for decoders."""
        return self.shared.noise[slots] if self.layout.fmt.dither else None

    def _inputs(self, arrived: tuple[Arrived, ...]) -> tuple[pk.Input, ...]:
        """The arrived data that kernels add up."""
        tiles = self.shared.plan.tiles
        return tuple(
            pk.Input(a.payloads, tiles[a.encoder.stage], a.skip, self._noise(a.encoder.slot))
            for a in arrived
        )

    def _target(self, encoder: Encoder) -> pk.Target:
        """Where and by which randomness an encoder's payloads are written."""
        (plan, noise, _), stage = self.shared, encoder.stage
        return pk.Target(plan.tiles[stage], noise[encoder.slot], self.layout.payload_words[stage])

    def _less_means(self, start: Array | None = None) -> pk.Result:
        """All rows of f32 values from which means are subtracted."""
        plan = self.shared.plan
        nothing, rows = jnp.zeros_like(plan.mean), self.layout.rows
        return pk.Result(nothing, plan.order, rows, jnp.float32, start=start)

    def _sums(self, rows: int, start: Array | None = None, into: Array | None = None) -> pk.Result:
        """So many rows of finished sums, from the super-group ``start`` on."""
        plan, divisor = self.shared.plan, self.call.divisor
        dtype = self.own.x.dtype
        return pk.Result(plan.mean_sum, plan.order, rows, dtype, divisor, start, into)


def expected_error(
    plan: Plan, layout: Layout, errors: tuple[float, ...], norm: Float[Array, ""]
) -> Float[Array, ""]:
    """Expected |error|² of an all-reduced sum whose encoded part has the squared norm ``norm``.

    The errors of all stages but the sink's are proportional to the energies of the values that the
    workers add up, and to earlier errors (`methods.base.compounded`). The sink's error is
    proportional to the energy of the values that it encodes; ``norm`` includes both. ``errors`` are
    `Stage.error` of every stage.
    """
    table = jnp.asarray(
        [pk.distortion(layout.fmt, w) if w in layout.fmt.widths else 0.0 for w in range(17)],
        jnp.float32,
    )
    # ``plan.energy`` has means of so many super-groups: those of tile t in a shard's chunks.
    rows = layout.shard_chunks * pk.TILE_ROWS
    energy = jnp.sum(plan.energy) * rows
    parts = [
        share * rows * jnp.sum(table[stage_widths(plan, layout, i)] * plan.energy)
        for i, share in enumerate(errors)
    ]
    # Of each stage, relative to what it encodes: the energies, or in the sink their sum.
    *hops, sink = (part / jnp.where(energy > 0, energy, 1.0) for part in parts)
    arrived = jnp.float32(0)
    for hop in hops:  # (1 + arrived)(1 + hop) - 1, without loss where both are small
        arrived = arrived + hop + arrived * hop
    return arrived * energy + norm * sink / (1 + sink)


def coords_by_width(plan: Plan, layout: Layout) -> Float[Array, " 17"]:
    """The number of coordinates that one worker sends at every width, in all stages, f32."""
    # A payload has one tile of each number t, of any of the shards: counts are averaged over these.
    size = pk.TILE_ROWS * layout.super_group_size / layout.shards
    counts = [
        sent * jnp.sum(jax.nn.one_hot(stage_widths(plan, layout, i).reshape(-1), 17), axis=0)
        for i, sent in enumerate(layout.payloads_sent)
    ]
    return size * sum(counts, start=jnp.zeros(17))


def stage_widths(plan: Plan, layout: Layout, stage: int) -> Array:
    """The width of tile t of any chunk of a shard, int32[shards, T]."""
    # All chunks of a shard have the widths of its first one, in the low 5 bits (`pk.pack_tiles`).
    return plan.tiles[stage][:: layout.shard_chunks] & 31


def encode_slice(
    x: Float[Array, " d"],
    shared: SharedPlan,
    layout: Layout,
    me: Array,
    backend: pk.Backend | None,
) -> UInt[Array, " P"]:
    """The payload of worker ``me``'s own slice in an all-gather (one chunk per worker)."""
    plan, fmt = shared.plan, layout.fmt
    rows, spare = layout.shard_rows, layout.chunk_super_groups - layout.shard_rows
    # From numbers among all slices to those of this one: its rows begin at me * rows. The plan
    # numbers padding after the rows of all slices, me * spare first; here it follows the rows.
    own = plan.order[me]
    own = jnp.where(own < layout.rows, own - me * rows, own - layout.rows - me * spare + rows)
    mean = None
    if layout.stats_per_super_group == 2:
        mean = jnp.pad(lax.dynamic_slice_in_dim(plan.mean, me * rows, rows), (0, spare))
    source = pk.Source(x, mean, own[None])
    tiles = lax.dynamic_slice_in_dim(plan.tiles[0], me, 1)
    # Noise is counted from the first coordinate of all slices.
    noise = pk.noise_from(shared.noise[me], me * rows * fmt.super_group_size)
    target = pk.Target(tiles, noise, layout.payload_words[0])
    return pk.compress(source, jnp.zeros(1, jnp.int32), target, fmt=fmt, backend=backend)[0]
