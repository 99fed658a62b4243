"""The DynamiQ method: its options, and the all-reduce of one flat array (dynamiq.md, section 2)."""

from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt

from dynamiq_jax._compat import AxisNames, all_gather, all_gather_invarying
from dynamiq_jax.codecs.dynamiq import chunk_ops, encode_slice, plan_for
from dynamiq_jax.fingerprint import assert_same_on_workers
from dynamiq_jax.layout import Collective, Layout, make_layout
from dynamiq_jax.methods.base import Limits, State, check_choice, check_not_negative
from dynamiq_jax.topologies import ChunkOps, Stage, Topology
from dynamiq_jax.topologies.base import all_reduce, n_slots, reduce_scatter
from pallas_kernels import Backend, WireFormat
from pallas_kernels.format import TILE_ROWS, GroupScale, Levels, Rounding

MIN_BUCKET_SIZE = 65536
MIN_TILES_PER_WORKER = 16
BUCKET_BYTES = 32 * 2**20
FAST_LINK_BYTES = 96 * 2**20
"""Where `Direct` overtakes bf16 psum on eight H200 with NVLink; README, "How fast"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamiQ:
    """Compressed multi-hop all-reduce at a fixed number of bits per coordinate.

    Attributes:
      bits: average bits on the wire per coordinate, all metadata included (b-bar of the paper).
      widths: the widths that a super-group may get, any of 0..16; 0 sends nothing (biased),
        16 sends bf16.
      group_size: coordinates that share a scale: 8, 16, 32 or 64.
      super_group_size: coordinates that share a width and statistics: 128, 256, 512 or 1024.
      levels: "piecewise" (two step sizes, no transcendentals), "geometric" (the paper's law;
        widths up to 10) or "uniform".
      rounding: how stochastic rounding is correlated between the encoders of a chunk:
        "antithetic" (pairs of encoders complement each other), "correlated" (the paper's
        permutation) or "independent".
      group_scale: "uint8" fractions of a bf16 super-group scale, or "bf16" for each group.
      subtract_mean: whether the mean of each super-group travels apart, as in the paper. It takes
        1/16 bit, and pays for gradients of which the means hold more than a tenth of the energy.
      min_leaf_size: leaves of fewer coordinates go through `lax.psum` exactly.
      min_bucket_size: buckets of fewer coordinates do, too. Default: 65536, but at least 16 tiles
        of 8 super-groups for each worker, since padding would take the bits of less.
      min_bucket_bytes: and so do buckets of fewer bytes. Default: 96 MiB on GPUs that NVLink
        connects all to all, where native psum is faster below that (unless ``min_bucket_size`` is
        given), 0 elsewhere.
      bucket_bytes: leaves up to this size are concatenated to buckets of about this size;
        larger ones are buckets of their own. Default: 32 MiB, but 4 ``min_bucket_bytes`` at least.
      backend: which kernels run, see `pallas_kernels`; `None` chooses by platform.
      debug_checks: whether every all-reduce verifies, at some cost, that plan and result have the
        same bits on all workers, with an error at run time if not.
    """

    bits: float = 5.0
    widths: tuple[int, ...] = (2, 4, 6, 8, 10)
    group_size: int = 32
    super_group_size: int = 256
    levels: Levels = "piecewise"
    rounding: Rounding = "antithetic"
    group_scale: GroupScale = "uint8"
    subtract_mean: bool = False
    min_leaf_size: int = 4096
    min_bucket_size: int | None = None
    min_bucket_bytes: int | None = None
    bucket_bytes: int | None = None
    backend: Backend | None = None
    debug_checks: bool = False

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        object.__setattr__(self, "widths", tuple(sorted(self.widths)))
        if not self.widths or len(set(self.widths)) < len(self.widths):
            raise ValueError(
                f"widths={self.widths} must be distinct and at least one, as (2, 4, 6, 8, 10)"
            )
        if not all(isinstance(w, int) and 0 <= w <= 16 for w in self.widths):
            raise ValueError(
                f"widths={self.widths} must be integers from 0 to 16, as (2, 4, 6, 8, 10)"
            )
        check_choice("group_size", self.group_size, (8, 16, 32, 64))
        check_choice("super_group_size", self.super_group_size, (128, 256, 512, 1024))
        if self.super_group_size // self.group_size < 4:
            raise ValueError(
                f"super_group_size={self.super_group_size} holds fewer than 4 groups of "
                f"group_size={self.group_size}; pass group_size <= {self.super_group_size // 4}"
            )
        check_choice("levels", self.levels, get_args(Levels))
        check_choice("rounding", self.rounding, get_args(Rounding))
        check_choice("group_scale", self.group_scale, get_args(GroupScale))
        check_choice("backend", self.backend, (None, *get_args(Backend)))
        if self.levels == "geometric" and any(10 < w < 16 for w in self.widths):
            raise ValueError(
                f"widths={self.widths} exceed 10, where levels='geometric' has no distinct "
                "levels; drop the widths 11..15 or pass levels='piecewise'"
            )
        least, most = self._bits_per_coord(min), self._bits_per_coord(max)
        if not least <= self.bits:
            raise ValueError(
                f"bits={self.bits} is below {least:.4g}, what widths={self.widths} need with "
                f"their metadata at group_size={self.group_size}; raise bits, or add a narrower "
                "width or a larger group_size"
            )
        if self.bits > 32:
            raise ValueError(
                f"bits={self.bits} exceeds 32, what an uncompressed f32 takes "
                f"(widths={self.widths} can use at most {most:.4g}); lower bits"
            )
        names = ("min_leaf_size", "min_bucket_size", "min_bucket_bytes", "bucket_bytes")
        given = {name: getattr(self, name) for name in names}
        check_not_negative(**{name: v for name, v in given.items() if v is not None})

    @property
    def wire_format(self) -> WireFormat:
        """The payload's format."""
        return WireFormat(
            widths=self.widths,
            group_size=self.group_size,
            super_group_size=self.super_group_size,
            levels=self.levels,
            rounding=self.rounding,
            group_scale=self.group_scale,
        )

    @property
    def native(self) -> bool:
        """`None` chooses a topology by the mesh."""
        return False

    @property
    def needs_state(self) -> bool:
        """Nothing is carried from step to step."""
        return False

    def init(self, size: int, n_workers: int) -> tuple[()]:
        """No state."""
        return ()

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Serves any number of workers on any topology."""

    def limits(self, n_workers: int, *, fast_links: bool) -> Limits:
        """Which buckets pay; see the fields."""
        tile = TILE_ROWS * self.super_group_size
        size, least, bucket = self.min_bucket_size, self.min_bucket_bytes, self.bucket_bytes
        if size is None:
            size = max(MIN_BUCKET_SIZE, MIN_TILES_PER_WORKER * n_workers * tile)
        if least is None:
            least = FAST_LINK_BYTES if fast_links and self.min_bucket_size is None else 0
        if bucket is None:
            bucket = max(BUCKET_BYTES, 4 * least)
        return Limits(self.min_leaf_size, size, least, bucket)

    @property
    def stats_per_super_group(self) -> int:
        """Numbers per super-group in the light all-reduce: squared norm and perhaps mean."""
        return 2 if self.subtract_mean else 1

    def _bits_per_coord(self, pick) -> float:
        fmt = self.wire_format
        words = pick(fmt.tile_words(w) for w in self.widths)
        stats = 16 * self.stats_per_super_group / self.super_group_size
        return 32 * words / (8 * self.super_group_size) + stats

    def layout(
        self, size: int, n_workers: int, topology: Topology, collective: Collective = "all_reduce"
    ) -> Layout:
        """Static sizes; ``size`` coordinates, of a reduce-scatter in one worker's slice."""
        stages = topology.stages(n_workers)
        scatter = collective == "reduce_scatter"
        return make_layout(
            size,
            n_workers,
            stages[:-1] if scatter else stages,
            bits=self.bits,
            fmt=self.wire_format,
            stats_per_super_group=self.stats_per_super_group,
            collective=collective,
            chunks_per_worker=topology.chunks_per_worker(size * (n_workers if scatter else 1)),
            balance=topology.balance,
        )

    def gather_layout(self, size: int, n_workers: int) -> Layout:
        """Static sizes of an all-gather of ``size`` coordinates from each worker."""
        return make_layout(
            size,
            n_workers,
            (Stage(n_workers - 1, range(1), 1.0),),
            bits=self.bits,
            fmt=self.wire_format,
            stats_per_super_group=self.stats_per_super_group,
            collective="all_gather",
        )

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

    def all_reduce(
        self,
        x: Float[Array, " d"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        topology: Topology | None,
        seed: UInt[Array, " 2"] | None,
        divisor: int = 1,
        state: State = (),
    ) -> tuple[Float[Array, " d"], State]:
        """See `methods.base.Method`."""
        assert topology is not None
        layout = self.layout(x.shape[0], n_workers, topology)
        with jax.named_scope("dynamiq_all_reduce"):
            ops = self._ops(x, axis_name, seed, layout, topology, divisor=divisor)
            result = all_reduce(topology, ops, axis_name, n_workers, layout.chunks_per_worker)
            if self.debug_checks:
                assert_same_on_workers(result, axis_name, "the result")
            return result.reshape(-1)[: x.shape[0]], state

    def reduce_scatter(
        self,
        x: Float[Array, "n s"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        topology: Topology,
        seed: UInt[Array, " 2"] | None,
    ) -> Float[Array, " s"]:
        """Row ``me`` of the sum of ``x`` over the axis, on every worker its own."""
        size = x.shape[1]
        layout = self.layout(size, n_workers, topology, "reduce_scatter")
        with jax.named_scope("dynamiq_reduce_scatter"):
            pad = -size % self.super_group_size
            flat = (jnp.pad(x, ((0, 0), (0, pad))) if pad else x).reshape(-1)
            start = lax.axis_index(axis_name) * layout.shard_rows
            ops = self._ops(flat, axis_name, seed, layout, topology, slice_start=start)
            result = reduce_scatter(topology, ops, axis_name, n_workers, layout.chunks_per_worker)
            return result.reshape(-1)[:size]

    def all_gather(
        self,
        x: Float[Array, " s"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        seed: UInt[Array, " 2"] | None,
        invarying: bool = False,
    ) -> Float[Array, "n s"]:
        """All workers' ``x``, each encoded once by itself; the same bits on all workers.

        With ``invarying`` JAX counts the result as replicated.
        """
        size = x.shape[0]
        layout = self.gather_layout(size, n_workers)
        gather = all_gather_invarying if invarying else all_gather
        with jax.named_scope("dynamiq_all_gather"):
            plan = plan_for(x, axis_name, seed, layout, self.backend, gather=gather)
            me = lax.axis_index(axis_name)
            payload = encode_slice(x, plan, layout, me, self.backend)
            ops = chunk_ops(x, plan, layout, n_slots=1, backend=self.backend)
            owners = jnp.arange(n_workers, dtype=jnp.int32)
            result = ops.decode(gather(payload, axis_name), owners, None)
            return result.reshape(n_workers, -1)[:, :size]

    def _ops(self, x, axis_name, seed, layout: Layout, topology: Topology, **rest) -> ChunkOps:
        plan = plan_for(x, axis_name, seed, layout, self.backend)
        if self.debug_checks:
            assert_same_on_workers(plan, axis_name, "the plan")
        slots = n_slots(topology.stages(layout.n_workers))
        return chunk_ops(x, plan, layout, n_slots=slots, backend=self.backend, **rest)
