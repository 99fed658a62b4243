"""A simulated all-reduce over links that lose packets; it sums the packets that arrive.

Every worker sends each slice of its gradient to the slice's owner in datagrams, which are not sent
again. The owner averages the packets that arrive (Weintraub et al., "Distributed Training under
Packet Loss", 2025). Here a *packet* is ``packet_size`` consecutive coordinates of one worker, and
is lost with probability p, independently of all other packets and of the data.

Let k of n workers' packets arrive. The sum is estimated as n / k times the sum of these k: a lost
packet is replaced by the mean of those that arrived. At least one of n packets arrives: if all
would be lost, one of them, drawn uniformly, is sent again. So, given k, every set of k workers is
equally likely, and the estimate is unbiased. For gradients that are independent between workers,
its squared error is n E[1 / k] - 1 of |sum|², about p / (1 - p); for equal gradients it is zero.

XLA's collectives lose no packets. So each worker's gradient is multiplied by the weight, n / k or
0, before it is encoded; for the owner this is equivalent to weighting the decoded values. The small
all-reduce of the agreement and the all-gather of finished sums lose nothing, so all workers get the
same bits.
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt

from dynamiq_jax.core.axis import fold_seed, seed_of
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.executors.codec import ChunkCodec
from dynamiq_jax.methods.base import (
    Call,
    Collective,
    HopMethod,
    Layout,
    Message,
    Outcome,
    Shared,
    WrappedMethod,
    clipped,
    compounded,
    ring_bits,
)
from dynamiq_jax.methods.metrics import PayloadFacts, finite_norm
from dynamiq_jax.topologies import Direct, Topology

TAG = 0x10557
"""A constant that makes the seed of losses differ from that of the method's rounding."""


class Lossy(NamedTuple):
    """The values that all workers know before the first encoding."""

    inner: Shared
    """The value that `HopMethod.share` of the method returned."""
    seed: UInt[Array, " 2"]
    """The seed of the losses."""


def weights(
    seed: UInt[Array, " 2"], n_workers: int, packets: int, rate: float
) -> Float[Array, "n packets"]:
    """The factor of every worker's packet, f32: n / k if it is one of the k that arrive, else 0."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    drawn = jax.random.uniform(key, (n_workers, packets))
    # Whoever draws most is kept; it is one of those that arrive, unless all were lost.
    kept = (drawn >= rate) | (drawn == jnp.max(drawn, axis=0, keepdims=True))
    return jnp.where(kept, n_workers / jnp.sum(kept, axis=0, keepdims=True), 0.0)


@dataclass(frozen=True, slots=True)
class PacketLoss(HopMethod, WrappedMethod):
    """A method over `Direct` whose packets of gradients are lost at random; it stays unbiased.

        lossy = dq.contrib.PacketLoss(dq.DynamiQ(), rate=0.1)
        grads = dq.psum(grads, "data", compression=lossy, topology=dq.Direct(), key=key)

    It simulates a network that loses packets and does not send them again, to show how this affects
    training. It does not save time. The losses depend on ``key``, or without a key on a hash of all
    gradients. All workers get the same bits, since finished sums lose nothing. Values that are not
    finite become NaN on all workers even if their packet is lost.

    Attributes:
      method: the method that compresses; it runs over topologies and has no memory.
      rate: the probability that a packet is lost, at least 0 and below 1. A worker's own slice may
        also be lost, so that all workers count equally.
      packet_size: consecutive coordinates of a packet. 2048 coordinates of 5 bits are 1280 bytes,
        which fit an Ethernet frame.

    Raises:
      ValueError: a field is out of range, or ``method`` does not run over topologies.
      NotImplementedError: the topology is not `Direct`, or error feedback is put around the method.
    """

    method: HopMethod
    rate: float = 0.1
    packet_size: int = 2048

    needs_state: ClassVar[bool] = False
    native_by_default: ClassVar[Any] = False
    agreement: ClassVar[Any] = property(attrgetter("method.agreement"))
    debug_checks: ClassVar[Any] = property(attrgetter("method.debug_checks"))

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        method: Any = self.method
        if not isinstance(method, HopMethod) or method.needs_state:
            raise ValueError(
                f"method={method!r} is not a method over topologies without memory; pass for "
                "example dq.contrib.PacketLoss(dq.DynamiQ())"
            )
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate} must be a probability from 0 to below 1, as 0.1")
        if self.packet_size < 1:
            raise ValueError(f"packet_size={self.packet_size} must be positive, as 2048")

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies in which a lost packet also contains other workers' gradients."""
        if not isinstance(topology, Direct):
            raise NotImplementedError(
                f"PacketLoss over topology={topology!r}: a lost packet would take along the parts "
                "of all workers before it; pass topology=dq.Direct()"
            )
        self.method.check(n_workers, topology)

    def layout(self, size: int, n_workers: int, topology: Topology) -> Layout:
        """See the method's own."""
        return self.method.layout(size, n_workers, topology)

    def measure(self, x: Float[Array, " d"], layout: Layout) -> Message:
        """The method's message, and two sums, which make the losses of two steps differ."""
        own = jnp.stack([jnp.sum(x), jnp.sum(jnp.square(x))])
        return self.method.measure(x, layout), own

    def share(self, message: Message, layout: Layout, call: Call) -> Lossy:
        """Returns the method's shared value, and the seed of the losses."""
        inner, known = message
        seed = fold_seed(seed_of(call.seed, known), TAG)
        return Lossy(self.method.share(inner, layout, call), seed)

    def codec(self, x: Float[Array, " d"], shared: Lossy, layout: Layout, call: Call) -> ChunkCodec:
        """The method's codec for the packets of this worker that arrive."""
        packets = -(-x.shape[0] // self.packet_size)
        own = weights(shared.seed, call.n_workers, packets, self.rate)[call.axis.index]
        weighted = clipped(x * jnp.repeat(own, self.packet_size)[: x.shape[0]])
        weighted = jnp.where(jnp.isfinite(x), weighted, jnp.nan)
        return self.method.codec(weighted, shared.inner, layout, call)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `Method`."""
        if call.keep_error:
            raise NotImplementedError(
                "dq.ErrorFeedback around PacketLoss would have to know which packets were lost, "
                "and senders do not; pass PacketLoss without it"
            )
        # Weighted gradients are f32, since bf16 would round the weights' products.
        found = HopMethod.all_reduce(self, x.astype(jnp.float32), call)
        return found._replace(value=found.value.astype(x.dtype))

    def facts(self, shared: Lossy, result: Array, layout: Layout, call: Call) -> PayloadFacts:
        """The method's facts, with the error of the losses added for independent gradients."""
        found = self.method.facts(shared.inner, result, layout, call)
        excess = self.excess(call.n_workers)
        # |result|² is expected to be (1 + excess) |sum|².
        return found._replace(error=found.error + finite_norm(result) * excess / (1 + excess))

    def excess(self, n_workers: int) -> float:
        """|error|² / |sum|² of the losses, for independent gradients: n E[1 / k] - 1."""
        p, n = self.rate, n_workers
        if p == 0:
            return 0.0
        logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n)]
        # The probability that k < n arrive; that of none counts as one.
        chances = [
            math.exp(log + k * math.log1p(-p) + (n - k) * math.log(p)) for k, log in enumerate(logs)
        ]
        mean = sum(chance / max(k, 1) for k, chance in enumerate(chances)) + (1 - p) ** n / n
        return n * mean - 1

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends, including lost packets."""
        return self.method.wire_bits(size, n_workers, topology) + ring_bits(64, n_workers)

    def relative_error(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> float | None:
        """The relative error of the method, and of the losses for independent gradients."""
        own = self.method.relative_error(n_workers, topology, collective)
        return None if own is None else compounded([own, self.excess(n_workers)])

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """The method's advice."""
        return self.method.advice(n_workers, topology, collective)
