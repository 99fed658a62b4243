"""The DynamiQ method: its options, and the all-reduce of one flat array (docs/algorithm.md)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

import pallas_kernels as pk
from dynamiq_jax.core.axis import Varying, seed_of
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.executors.codec import ChunkCodec, Encoder, Payload
from dynamiq_jax.executors.collectives import reduce_scatter
from dynamiq_jax.methods.base import (
    MIN_BUCKET_SIZE,
    MIN_LEAF_SIZE,
    Call,
    Collective,
    HopMethod,
    Limits,
)
from dynamiq_jax.methods.dynamiq.codec import (
    SharedPlan,
    chunk_codec,
    coords_by_width,
    encode_slice,
    expected_error,
    pack_statistics,
    sampled,
    shared_plan,
)
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, push_bytes
from dynamiq_jax.methods.dynamiq.exchange import block_words, exchange
from dynamiq_jax.methods.dynamiq.format import Format
from dynamiq_jax.methods.dynamiq.layout import (
    LARGEST_DITHERED_ERROR,
    LARGEST_RELATIVE_ERROR,
    NARROWEST_FLOOR,
    WIDEST_FLOOR,
    Allocation,
    Floor,
    Layout,
    Transfers,
    allocate,
    make_layout,
    widest_floor,
)
from dynamiq_jax.methods.metrics import PayloadFacts, finite_norm
from dynamiq_jax.topologies import Direct, Stage, Topology
from dynamiq_jax.tree.leaves import ScaleAxis
from pallas_kernels import Backend, Choice, WireFormat, check_backend, choose_backend
from pallas_kernels.format import TILE_ROWS, Levels, Rounding

MIN_TILES_PER_WORKER = 16
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamiQ(HopMethod):
    """Compressed multi-hop all-reduce at a fixed number of bits per coordinate.

    Attributes:
      bits: the average wire bits per coordinate, all metadata included (b-bar of the paper).
        Padding adds bits to small buckets, see `explain`; if it would bring a bucket to the 16 bits
        of bf16 (or to ``bits``, if that is more), the bucket is summed exactly.
      widths: the widths that a super-group may have, any of 0..16; 0 sends no bits (biased), 16
        sends bf16. Default: the floors and some larger widths; without a floor, the even widths
        from 2 to 14.
      floor: the smallest width of a super-group. "auto": the largest width that all can have,
        chosen for every stage to minimise the relative error of each super-group
        (`dynamiq_jax.methods.dynamiq.layout`, `relative_error`); a width: this width in all
        stages; `None`: only the squared error decides, as in the paper, which raises the loss of
        training with Adam by 2 to 5% at 3 to 5 bits.
      plan: whether the widths of super-groups depend on statistics that all workers add up before
        every bucket. ``False``: all super-groups get the width that fits ``bits``, or some of them
        the next larger one. ``None``: ``False`` over links as fast as NVLink, where the plan takes
        more time than it saves, and in `dynamiq_jax.optax.sharded` for differences and for
        gradients that are not reduced beside a backward pass.
      rounding: how stochastic rounding is correlated between the encoders of a chunk:
        "antithetic" (pairs of encoders complement each other), "correlated" (the paper's
        permutation) or "independent". Or "nearest": no noise, about half of the squared error of
        "independent", but a bias, which adds up along a ring. It is for `dynamiq_jax.optax.sharded`
        over `Direct`, which encodes a gradient once, and has no ``dither``.
      dither: whether decoders regenerate the encoders' noise and subtract its part of the rounding
        error. This removes at least half of the error, with the same wire bits and without bias,
        but decoding takes more arithmetic. Sums of exact zeros stay zero. "geometric" levels do
        not support it.
      format: groups and super-groups, their scales and levels; see `Format`.
      backend: which kernels run, see `pallas_kernels`; `None` chooses by platform.
      debug_checks: whether every all-reduce verifies, at some cost, that plan and result have the
        same bits on all workers, with an error at run time if not.
    """

    bits: float = 5.0
    widths: tuple[int, ...] | None = None
    floor: Floor = "auto"
    plan: bool | None = None
    rounding: Rounding = "antithetic"
    dither: bool = False
    format: Format = Format()
    backend: Backend | None = None
    debug_checks: bool = False

    shards: ClassVar[bool] = True

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        check_backend(self.backend)
        check_fields(self)
        if self.widths is not None:
            object.__setattr__(self, "widths", tuple(sorted(self.widths)))
            self._check_widths(self.widths)
        if self.dither and self.format.levels == "geometric":
            raise ValueError(
                "dither=True needs levels of which all are odd multiples of half a step, and "
                "levels='geometric' are not; pass levels='piecewise'"
            )
        if self.dither and self.rounding == "nearest":
            raise ValueError(
                "dither=True subtracts the noise of stochastic rounding, and rounding='nearest' "
                "has none; pass one of the two"
            )
        if self.plan is False and (reason := self._reason_for_a_plan):
            raise ValueError(reason)
        self._check_floor()
        self._check_bits()

    def _check_widths(self, widths: tuple[int, ...]) -> None:
        if not widths or len(set(widths)) < len(widths):
            raise ValueError(
                f"widths={widths} must be distinct and at least one, as (2, 4, 6, 8, 10)"
            )
        if not all(0 <= w <= 16 for w in widths):
            raise ValueError(f"widths={widths} must be integers from 0 to 16, as (2, 4, 6, 8, 10)")
        if self.dither and 15 in widths:
            raise ValueError(
                f"widths={widths} have 15, of which products with a scale would not be exact with "
                "dither=True; pass 14 or 16 in its place"
            )
        if self.format.levels == "geometric" and any(10 < w < 16 for w in widths):
            raise ValueError(
                f"widths={widths} exceed 10, where levels='geometric' has no distinct "
                "levels; drop the widths 11..15 or pass levels='piecewise'"
            )

    @property
    def _reason_for_a_plan(self) -> str | None:
        """The reason why ``plan=False`` is refused; `None` if these options work without a plan."""
        if self.format.subtract_mean:
            return (
                "plan=False adds up no means, which subtract_mean=True needs; pass plan=True or "
                "subtract_mean=False"
            )
        if 0 in (self.widths or ()):
            return (
                f"widths={self.widths} have 0, which sends no NaN, and plan=False has no other way "
                "to send one; pass plan=True, or widths from 1 on"
            )
        return None

    def _check_floor(self) -> None:
        if self.floor is None or self.floor == "auto":
            return
        allowed = self.widths or tuple(range(1, widest_floor(self._levels) + 1))
        if self.floor not in allowed:
            raise ValueError(
                f"floor={self.floor!r} is none of the widths {allowed}; pass one of them, 'auto', "
                "or None for no floor"
            )

    def _check_bits(self) -> None:
        """Refuses bits that are too few for the floor or the narrowest width, or too many."""
        stats = 16 * self.stats_per_super_group / self.format.super_group_size
        widths = self.widths or (NARROWEST_FLOOR, WIDEST_FLOOR)
        if isinstance(self.floor, int):
            narrowest, what, remedy = self.floor, "the floor", "lower floor"
        else:
            narrowest, what, remedy = min(widths), "the narrowest width", "pass a narrower width"
        least = self._wire.bits_per_coord(narrowest) + stats
        if not least <= self.bits:
            raise ValueError(
                f"bits={self.bits} is below {least:.4g}, what {what}, {narrowest}, takes with its "
                f"metadata at group_size={self.format.group_size}; raise bits, or {remedy} or a "
                "larger group_size"
            )
        if self.bits > 32:
            most = self._wire.bits_per_coord(max(widths)) + stats
            raise ValueError(
                f"bits={self.bits} exceeds 32, what an uncompressed f32 takes (the widest width, "
                f"{max(widths)}, can use at most {most:.4g}); lower bits"
            )

    @property
    def scale_axis(self) -> ScaleAxis:
        """See `Format`."""
        return self.format.scale_axis

    @property
    def most_bits(self) -> float:
        """See `Method`: the 16 bits of bf16, or ``bits`` if that is more."""
        return max(16.0, self.bits)

    @property
    def _levels(self) -> Levels:
        """The levels, or their default."""
        return self.format.levels or ("piecewise" if self.dither else "companded")

    @property
    def _rounding_alone(self) -> Rounding:
        """The rounding of a value that only one worker encodes."""
        return "nearest" if self.rounding == "nearest" else "independent"

    @property
    def _wire(self) -> WireFormat:
        """The payload's format, except its widths, which `allocate` chooses."""
        return WireFormat(
            group_size=self.format.group_size,
            super_group_size=self.format.super_group_size,
            levels=self._levels,
            rounding=self.rounding,
            group_scale=self.format.group_scale,
            dither=self.dither,
        )

    @property
    def kernels(self) -> Choice:
        """See `Method`."""
        return choose_backend(self.backend, self._wire)

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """See `Method`. If a bucket has few tiles for each worker, padding takes its bits."""
        tile = TILE_ROWS * self.format.super_group_size
        size = max(MIN_BUCKET_SIZE, MIN_TILES_PER_WORKER * n_workers * tile)
        size = 0 if given.get("min_bucket_bytes") == 0 else size
        least = psum_bytes(n_workers) if fast_links and "min_bucket_size" not in given else 0
        least = given.get("min_bucket_bytes", least)
        own = Limits(MIN_LEAF_SIZE, size, least, max(BUCKET_BYTES, 2 * least))
        return own._replace(**given)

    def pushed(self, n_workers: int) -> tuple[int, int] | None:
        """See `Method`. A plan needs statistics first, and callbacks cannot be left out later."""
        in_one_kernel = self.plan is False and pk.pushes(self._wire, self.backend)
        if self.debug_checks or not in_one_kernel:
            return None
        return push_bytes(n_workers)

    def without_plan(self) -> Self:
        """See `Method`."""
        if self.plan is not None or self._reason_for_a_plan:
            return self
        return dataclasses.replace(self, plan=False)

    @property
    def stats_per_super_group(self) -> int:
        """Values per super-group in the light all-reduce: squared norm, and perhaps mean."""
        return 2 if self.format.subtract_mean else 1

    def allocation(
        self, n_workers: int, topology: Topology, collective: Collective = "all_reduce"
    ) -> Allocation:
        """Floors, widths and bits of every stage, for any size."""
        stages = _stages(n_workers, topology, collective)
        passes = 2 if collective == "reduce_scatter" else 1  # of statistics, per pass of payloads
        stats = passes * 16 * self.stats_per_super_group / self.format.super_group_size
        widths = self.widths
        if self.plan is False:
            stats, widths = 0.0, widths or tuple(range(2, widest_floor(self._levels) + 1))
        return allocate(
            stages,
            self._wire,
            bits=self.bits - stats,
            widths=widths,
            floor=self.floor,
            balance=None if collective == "all_gather" else topology.balance,
        )

    def relative_error(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> float:
        """The approximate |error|² / |sum|² of super-groups with the floors' widths (unitless).

        It assumes Gaussian gradients that are independent between workers. The error is smaller for
        correlated gradients, and larger for gradients that cancel in the sum (docs/algorithm.md,
        section 3). Models that were trained with more than 0.38 (0.124 with dither) lost half a
        percent of loss or more.
        """
        assert topology is not None
        return self.allocation(n_workers, topology, collective).relative_error

    def lost(self, n_workers: int, topology: Topology | None) -> float | None:
        """See `TellsLosses`; without a floor, widths depend on the losses."""
        assert topology is not None
        return None if self.floor is None else self.allocation(n_workers, topology).lost

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """Advice against a relative error that is too large: the bits that keep it small enough."""
        error = self.relative_error(n_workers, topology, collective)
        most = LARGEST_RELATIVE_ERROR[self.dither]
        where = f"bits={self.bits:g} over {type(topology).__name__} among {n_workers} workers: "
        if self.floor is None:
            if self.widths or not self.dither or error <= LARGEST_DITHERED_ERROR:
                return None
            return (
                f"{where}without a floor, the noise of dither grows from hop to hop in the "
                f"narrowest super-groups, to {error:.2g} of their energy, where more than "
                f"{LARGEST_DITHERED_ERROR:g} errs more than no dither; pass dither=False, or "
                "dq.Direct()"
            )
        if error <= most:
            return None
        enough = "wider widths" if self.widths else "floor='auto'"
        for bits in (quarters / 4 for quarters in range(int(4 * self.bits) + 1, 65)):
            wider = dataclasses.replace(self, bits=bits)
            if wider.relative_error(n_workers, topology, collective) <= most:
                enough = f"bits={bits:g}"
                break
        free = dataclasses.replace(self, floor=None).advice(n_workers, topology, collective)
        instead = "floor=None" if free is None else "floor=None with dither=False"
        return (
            f"{where}the error of a super-group is about {error:.2g} of its energy, where more "
            f"than {most} slows training with Adam; pass {enough}, or {instead} to let squared "
            "error alone decide"
        )

    def layout(
        self, size: int, n_workers: int, topology: Topology, collective: Collective = "all_reduce"
    ) -> Layout:
        """Static sizes for ``size`` coordinates: of a sharded collective's slice, or of all."""
        coords = size * (n_workers if collective == "reduce_scatter" else 1)
        streams = 1 if collective == "all_gather" else topology.chunks_per_worker(coords)
        stages = _stages(n_workers, topology, collective)
        return make_layout(
            size,
            Transfers(n_workers, stages, collective, streams),
            bits=self.bits,
            allocation=self.allocation(n_workers, topology, collective),
            stats_per_super_group=self.stats_per_super_group,
            planned=self.plan is not False,
        )

    def gather_layout(self, size: int, n_workers: int) -> Layout:
        """Static sizes of an all-gather; it rounds each value once, independently."""
        layout = self.layout(size, n_workers, Direct(), "all_gather")
        fmt = dataclasses.replace(layout.fmt, rounding=self._rounding_alone)
        return dataclasses.replace(layout, fmt=fmt)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        assert topology is not None
        return 0 if n_workers == 1 else self.layout(size, n_workers, topology).wire_bits

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits to reduce-scatter slices of ``size``; without a topology, to all-gather them."""
        if n_workers == 1:
            return 0
        if topology is None:
            return self.gather_layout(size, n_workers).wire_bits
        return self.layout(size, n_workers, topology, "reduce_scatter").wire_bits

    def seed_bits(
        self,
        size: int,
        n_workers: int,
        topology: Topology | None,
        collective: Collective = "all_reduce",
    ) -> int:
        """See `Method`: samples, whose hash is the seed where there are no statistics."""
        if self.plan is not False or n_workers == 1:
            return 0
        if collective == "all_gather":
            return self.gather_layout(size, n_workers).stats_bits
        assert topology is not None
        return self.layout(size, n_workers, topology, collective).stats_bits

    def exchange_format(self, n_workers: int) -> WireFormat:
        """The wire format of one width, the largest that fits ``bits`` for all workers."""
        # One worker sends nothing, and gets the format of two.
        found = self.allocation(max(n_workers, 2), Direct(), "all_gather")
        return dataclasses.replace(found.fmt, widths=found.floors, rounding=self._rounding_alone)

    def exchanges(self, n_workers: int) -> bool:
        """See `HopMethod`: one width of 2 to 16 bits, without means and dither."""
        one = self.floor is not None or len(self.widths or ()) == 1
        if not one or self.dither or self.format.subtract_mean:
            return False
        return self.exchange_format(n_workers).widths[0] > 1

    def exchange_bits(self, size: int, n_workers: int) -> int:
        """See `HopMethod`."""
        return (n_workers - 1) * 32 * block_words(size, self.exchange_format(n_workers))

    def exchange(self, x: Float[Array, "n s"], call: Call) -> Float[Array, "n s"]:
        """See `HopMethod`."""
        return exchange(x, call, self.exchange_format(len(x)), self.backend)

    def measure(self, x: Float[Array, " d"], layout: Layout) -> Array:
        """Squared norms (and means) of the super-groups, or samples without a plan, bf16."""
        if not layout.planned:
            return sampled(x, layout)
        size = layout.super_group_size
        mean, sqnorm = pk.statistics(x, super_group_size=size, backend=self.backend)
        return pack_statistics(mean, sqnorm, layout)

    def share(self, message: Array, layout: Layout, call: Call) -> SharedPlan:
        """The plan that is computed from the sums."""
        return shared_plan(message, call.seed, layout, call.n_slots, self.backend)

    def agreed(self, x: Float[Array, " d"], layout: Layout, call: Call) -> SharedPlan:
        """See `HopMethod`. A push kernel adds up the parts of the seed, if it needs no plan."""
        shared = HopMethod.agreed(self, x, layout, call)
        pushed = call.topology is not None and call.topology.sends.reduces
        if not pushed or layout.planned or self.rounding == "correlated" or call.seed.ndim:
            return shared
        return shared._replace(part=seed_of(call.seed, sampled(x, layout)))

    def codec(
        self, x: Float[Array, " d"], shared: SharedPlan, layout: Layout, call: Call
    ) -> ChunkCodec:
        """See `HopMethod`."""
        return chunk_codec(x, shared, layout, call, backend=self.backend)

    def facts(self, shared: SharedPlan, result: Array, layout: Layout, call: Call) -> PayloadFacts:
        """The errors by the plan, for Gaussian groups and independent gradients."""
        assert call.topology is not None
        if self.format.subtract_mean:
            spare = layout.rows * layout.super_group_size - layout.size
            rows = jnp.pad(result.astype(jnp.float32), (0, spare)).reshape(layout.rows, -1)
            result = rows - shared.plan.mean_sum[: layout.rows, None] / call.divisor
        norm = finite_norm(result) * call.divisor**2
        errors = tuple(stage.error for stage in call.topology.stages(call.n_workers))
        error = expected_error(shared.plan, layout, errors, norm) / call.divisor**2
        return PayloadFacts(error, coords_by_width(shared.plan, layout))

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """See `Method`."""
        assert call.topology is not None
        size, n = x.shape[1], call.n_workers
        self.warn(call, "reduce_scatter")
        layout = self.layout(size, n, call.topology, "reduce_scatter")
        with jax.named_scope("dynamiq_reduce_scatter"):
            # Slices are padded to whole super-groups; the first one of this worker is ``start``.
            pad = -size % self.format.super_group_size
            flat = (jnp.pad(x, ((0, 0), (0, pad))) if pad else x).reshape(-1)
            start = call.axis.index * layout.shard_rows
            shared = self.agreed(flat, layout, call)
            options = {"slice_start": start, "backend": self.backend}
            codec = chunk_codec(flat, shared, layout, call, **options)
            streams = layout.chunks_per_worker
            result = reduce_scatter(call.topology, codec, call.axis, streams)
            return result.reshape(-1)[:size]

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """See `Method`; each worker's ``x`` is encoded once, separately."""
        self.warn(call._replace(topology=Direct()), "all_gather")
        with jax.named_scope("dynamiq_all_gather"):
            layout, to = self.gather_layout(x.shape[0], call.n_workers), _typed(invarying)
            shared = self._plan_of_all(self.measure(x, layout), layout, call, to)
            payload = encode_slice(x, shared, layout, call.axis.index, self.backend)
            return self._gathered(payload, x, shared, layout, call, to)

    def pack(self, x: Float[Array, " s"], call: Call) -> tuple[Array, Payload]:
        """See `Method`: the statistics of ``x``, and its payload."""
        self.warn(call._replace(topology=Direct()), "all_gather")
        layout = self.gather_layout(x.shape[0], call.n_workers)
        stats = self.measure(x, layout)
        shared = self._plan_of_all(stats, layout, call, "varying")
        return stats, encode_slice(x, shared, layout, call.axis.index, self.backend)

    def unpack(
        self,
        packed: tuple[Array, Payload],
        size: int,
        dtype: Any,
        call: Call,
        *,
        invarying: bool = False,
    ) -> Float[Array, "n s"]:
        """See `Method`; the plan is computed again from the statistics of all workers."""
        (stats, payload), to = packed, _typed(invarying)
        with jax.named_scope("dynamiq_all_gather"):
            layout = self.gather_layout(size, call.n_workers)
            shared = self._plan_of_all(stats, layout, call, to)
            like = jnp.zeros(size, dtype)
            return self._gathered(payload, like, shared, layout, call, to)

    def _plan_of_all(self, stats: Array, layout: Layout, call: Call, to: Varying) -> SharedPlan:
        """The plan for all slices, in their order, from the statistics of every worker."""
        # Every worker encodes as the slot of its number: [workers, k, rows] to [k, workers * rows].
        stats = jnp.moveaxis(call.axis.all_gather(stats, to=to), 0, 1)
        stats = stats.reshape(stats.shape[0], -1)
        return shared_plan(stats, call.seed, layout, call.n_workers, self.backend)

    def _gathered(
        self,
        payload: Payload,
        like: Float[Array, " s"],
        shared: SharedPlan,
        layout: Layout,
        call: Call,
        to: Varying,
    ) -> Float[Array, "n s"]:
        """All slices, from every worker's payload; each is ``like`` this one in shape and dtype."""
        codec = chunk_codec(like, shared, layout, call, backend=self.backend)
        owners = jnp.arange(call.n_workers, dtype=jnp.int32)
        everyone = Encoder(0, owners, owners)
        payloads = call.axis.all_gather(payload, to=to)
        result = codec.decode(payloads, owners, everyone, None)
        return result.reshape(call.n_workers, -1)[:, : like.shape[0]]


def _typed(invarying: bool) -> Varying:
    return "invarying" if invarying else "varying"


def _stages(n_workers: int, topology: Topology, collective: Collective) -> tuple[Stage, ...]:
    """The stages of a collective; in an all-gather every slice is encoded once."""
    if collective == "all_gather":
        return (Stage(n_workers - 1, range(1), 1.0),)
    stages = topology.stages(n_workers)
    return stages[:-1] if collective == "reduce_scatter" else stages
