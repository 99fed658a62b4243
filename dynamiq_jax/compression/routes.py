"""Routes: how a method sends buckets of each collective, and in how many bits."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from dynamiq_jax.methods.base import HopMethod, Limits, Method, check_shards
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, psum_scatter_bytes
from dynamiq_jax.methods.levels import TwoLevels
from dynamiq_jax.plan.plan import Kind, native_share
from dynamiq_jax.topologies import AnyTopology, Topology
from dynamiq_jax.tree.leaves import Bucket


@dataclass(frozen=True, slots=True)
class Route:
    """How buckets are reduced: a method, a topology, and how many workers there are."""

    method: Method
    topology: AnyTopology | None
    """`None`: payloads travel by XLA's collectives."""
    sizes: tuple[int, ...]
    """The number of workers on every axis, the outermost first."""
    runner: Method
    """The method that runs: ``method``, or `TwoLevels` around it."""
    flat: Topology | None
    """The topology of one level; `None` for a hierarchy, whose runner has its own."""
    limits: Limits
    reason: str = field(compare=False)
    """Why this topology was chosen."""
    pushed: tuple[int, int] | None = None
    """The bytes of all buckets of a sum from which, and up to which, push kernels do it; `None`:
    they never do."""
    defaults: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Defaults that the machine decided, for collectives of all kinds; see `defaults_of`."""

    @property
    def n_workers(self) -> int:
        """The number of workers on all axes."""
        return math.prod(self.sizes)

    @property
    def sum_limits(self) -> Limits:
        """The limits of an all-reduce that may be one push kernel."""
        if self.pushed is None:
            return self.limits
        return self.limits._replace(min_bucket_bytes=self.pushed[0])

    @property
    def push(self) -> Topology | None:
        """The topology by which push kernels do an all-reduce; `None`: they never do."""
        if self.pushed is None:
            return None
        return dataclasses.replace(cast(Topology, self.topology), transport="push", streams=1)

    def by(self, method: Method) -> "Route":
        """This route with another method."""
        runner = method
        if self.runner is not self.method:
            runner = dataclasses.replace(cast(TwoLevels, self.runner), method=method)
        return dataclasses.replace(self, method=method, runner=runner)

    def bits(self, kind: Kind, bucket: Bucket, *, keyed: bool = False) -> tuple[int, int]:
        """Bits that one worker sends for a bucket, and how many of them on the outer axes.

        The bucket holds what a worker passes to the collective: whole terms, blocks for all
        workers, or for an all-gather one worker's shards. ``keyed``: the call has a key.
        """
        n, part = self.n_workers, -(-bucket.size // self.n_workers)
        if kind == "all-to-all":
            bits = cast(HopMethod, self.method.of_bucket(bucket)).exchange_bits(part, n)
            return bits, bits
        if kind == "all-reduce":
            method, call = self.runner.of_bucket(bucket), (bucket.size, n, self.flat)
            sent, outer = method.wire_bits(*call), method.outer_wire_bits(*call)
            saved = method.seed_bits(*call)
        elif kind == "all-gather":
            sent, outer = self.runner.gather_bits(bucket.size, n)
            saved = self.runner.seed_bits(bucket.size, n, None, "all_gather")
        else:
            sent, outer = self.runner.scatter_bits(part, n, self.flat)
            saved = self.runner.seed_bits(part, n, self.flat, "reduce_scatter")
        return (sent - saved, outer - saved) if keyed else (sent, outer)

    def bits_per_coord(self, kind: Kind, bucket: Bucket) -> float:
        """Wire bits per coordinate of a bucket, of which bf16 takes 16."""
        n = self.n_workers
        size = bucket.size if kind in ("all-reduce", "all-gather") else n * -(-bucket.size // n)
        share = native_share(kind, n) * size
        return self.bits(kind, bucket)[0] / share if share else 0.0

    def limits_of(self, kind: Kind, passed: Mapping[str, int]) -> Limits:
        """The limits of a kind of collective; ``passed`` has those that the user passed.

        On fast links `psum_scatter` starts to pay at larger buckets than `psum`. A measured default
        limit is replaced by the one measured for `psum_scatter`; a limit that the user passed is
        kept. The limits of a gather apply to the whole leaf, of which a worker passes its shard.
        """
        if kind == "all-reduce":
            return self.sum_limits
        limits, n = self.limits, self.n_workers
        least = limits.min_bucket_bytes
        if least and "min_bucket_bytes" not in passed and least == psum_bytes(n):
            least = psum_scatter_bytes(n)
            bucket = max(limits.bucket_bytes, 2 * least)
            limits = limits._replace(min_bucket_bytes=least, bucket_bytes=bucket)
        shards = n if kind == "all-gather" else 1
        return Limits(*(-(-limit // shards) for limit in limits))

    def defaults_of(self, kind: Kind, passed: Mapping[str, int]) -> tuple[str, ...]:
        """Defaults that links and environment of this machine decided, a line for each."""
        shards = self.n_workers if kind == "all-gather" else 1
        least = shards * self.limits_of(kind, passed).min_bucket_bytes
        found = self.defaults
        if least and "min_bucket_bytes" not in passed:
            told = f"buckets below {least >> 20} MiB travel natively, which is faster over NVLink"
            found = *found, told
        if self.pushed is not None and kind == "all-reduce":
            most = self.pushed[1] >> 20
            found = *found, f"sums of up to {most} MiB by one push kernel for each bucket"
        return found

    def check(self, kind: Kind) -> None:
        """Refuses a method that does not do this kind of collective."""
        if kind == "all-to-all":
            check_exchanges(self.method, self.n_workers)
        elif kind != "all-reduce":
            self.sharded()

    def sharded(self) -> tuple[Method, Topology | None]:
        """The method that scatters and gathers, which may be `TwoLevels`, and the topology."""
        check_shards(self.method, "psum_scatter and all_gather")
        if self.method.needs_state:
            raise NotImplementedError(
                f"method={self.method!r} keeps a state, and psum_scatter and all_gather keep none; "
                "pass a method without error feedback"
            )
        return self.runner, self.flat


def check_exchanges(method: Method, n_workers: int, name: str = "method") -> None:
    """Refuses methods that cannot encode blocks without an agreement between workers."""
    if not method.exchanges(n_workers):
        raise NotImplementedError(
            f"{name}={method!r}: all_to_all encodes at one width of 2 to 16 bits, without means, "
            "dither, state or lost packets, and not by XLA's own sums; pass dq.DynamiQ(bits=8.5), "
            "dq.contrib.MXFP8() or dq.BF16()"
        )
