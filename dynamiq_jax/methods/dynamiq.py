"""The DynamiQ method: its options, and the all-reduce of one flat array (dynamiq.md, section 2)."""

from dataclasses import dataclass
from typing import get_args

import jax
from jax import Array
from jaxtyping import Float, UInt

from dynamiq_jax.codecs.dynamiq import chunk_ops, plan_for
from dynamiq_jax.layout import Layout, make_layout
from dynamiq_jax.topologies import Topology
from pallas_kernels import Backend, WireFormat
from pallas_kernels.format import TILE_ROWS, GroupScale, Levels, Rounding

MIN_BUCKET_SIZE = 65536
MIN_TILES_PER_WORKER = 16


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
      subtract_mean: whether the mean of each super-group travels apart.
      min_leaf_size: leaves of fewer coordinates go through `lax.psum` exactly.
      min_bucket_size: buckets of fewer coordinates do, too. Default: 65536, but at least 16 tiles
        of 8 super-groups for each worker, since padding would take the bits of less.
      bucket_bytes: leaves up to this size are concatenated to buckets of about this size;
        larger ones are buckets of their own.
      backend: which kernels run, see `pallas_kernels`; `None` chooses by platform.
    """

    bits: float = 5.0
    widths: tuple[int, ...] = (2, 4, 8)
    group_size: int = 16
    super_group_size: int = 256
    levels: Levels = "piecewise"
    rounding: Rounding = "antithetic"
    group_scale: GroupScale = "uint8"
    subtract_mean: bool = True
    min_leaf_size: int = 4096
    min_bucket_size: int | None = None
    bucket_bytes: int = 32 * 2**20
    backend: Backend | None = None

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        object.__setattr__(self, "widths", tuple(sorted(self.widths)))
        if not self.widths or len(set(self.widths)) < len(self.widths):
            raise ValueError(
                f"widths={self.widths} must be distinct and at least one, as (2, 4, 8)"
            )
        if not all(isinstance(w, int) and 0 <= w <= 16 for w in self.widths):
            raise ValueError(f"widths={self.widths} must be integers from 0 to 16, as (2, 4, 8)")
        _one_of("group_size", self.group_size, (8, 16, 32, 64))
        _one_of("super_group_size", self.super_group_size, (128, 256, 512, 1024))
        if self.super_group_size // self.group_size < 4:
            raise ValueError(
                f"super_group_size={self.super_group_size} holds fewer than 4 groups of "
                f"group_size={self.group_size}; pass group_size <= {self.super_group_size // 4}"
            )
        _one_of("levels", self.levels, get_args(Levels))
        _one_of("rounding", self.rounding, get_args(Rounding))
        _one_of("group_scale", self.group_scale, get_args(GroupScale))
        _one_of("backend", self.backend, (None, *get_args(Backend)))
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
        for name in ("min_leaf_size", "min_bucket_size", "bucket_bytes"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative; pass 0")

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

    def smallest_bucket(self, n_workers: int) -> int:
        """Coordinates from which on a bucket is compressed."""
        if self.min_bucket_size is not None:
            return self.min_bucket_size
        tile = TILE_ROWS * self.super_group_size
        return max(MIN_BUCKET_SIZE, MIN_TILES_PER_WORKER * n_workers * tile)

    @property
    def stats_per_super_group(self) -> int:
        """Numbers per super-group in the light all-reduce: squared norm and perhaps mean."""
        return 2 if self.subtract_mean else 1

    def _bits_per_coord(self, pick) -> float:
        fmt = self.wire_format
        words = pick(fmt.tile_words(w) for w in self.widths)
        stats = 16 * self.stats_per_super_group / self.super_group_size
        return 32 * words / (8 * self.super_group_size) + stats

    def layout(self, size: int, n_workers: int, chunks_per_worker: int = 1) -> Layout:
        """Static sizes of the all-reduce of ``size`` coordinates."""
        return make_layout(
            size,
            n_workers,
            bits=self.bits,
            fmt=self.wire_format,
            stats_per_super_group=self.stats_per_super_group,
            chunks_per_worker=chunks_per_worker,
        )

    def wire_bits(self, size: int, n_workers: int, topology: Topology) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates over n workers."""
        return self.layout(size, n_workers, topology.chunks_per_worker(size)).wire_bits

    def all_reduce(
        self,
        x: Float[Array, " d"],
        axis_name: str,
        *,
        n_workers: int,
        topology: Topology,
        seed: UInt[Array, " 2"] | None,
        divisor: int = 1,
    ) -> Float[Array, " d"]:
        """The sum of ``x`` over the axis, over ``divisor``; the same bits on all workers."""
        streams = topology.chunks_per_worker(x.shape[0])
        layout, fmt = self.layout(x.shape[0], n_workers, streams), self.wire_format
        with jax.named_scope("dynamiq"):
            plan = plan_for(x, axis_name, seed, layout, fmt, self.backend)
            ops = chunk_ops(
                x,
                plan,
                layout,
                fmt,
                n_slots=topology.slots(n_workers),
                divisor=divisor,
                backend=self.backend,
            )
            result = topology.all_reduce(ops, axis_name, n_workers, streams)
            return result.reshape(-1)[: x.shape[0]]


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {allowed}")
