"""Training while packets get lost, simulated: who waits for none, and goes on with what arrived.

After "Distributed Training under Packet Loss" (Weintraub, Banner and Orda, 2025). Workers own
slices of the parameters. All send every owner their share of its slice's gradient, in packets. The
owner averages what arrived, over how many that was, and updates its slice. It sends the slice to
all. A worker that misses a packet of it keeps what it had: replicas differ, by steps that they will
make up for with the next packet that arrives.

Real links lose packets below XLA, which waits until everything has arrived. So losses are drawn
here, at random and independently: `PacketLoss` runs inside a mapped axis, `jax.vmap`'s or
`jax.shard_map`'s, where it stands for the two halves of an all-reduce.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from dynamiq_jax.core.axis import Axis, AxisName, axis_names


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketLoss:
    """A network that loses packets, for simulations: `mean_scatter` and `all_gather` over it.

    Mean squared errors of a coordinate: with gradients that are independent between n workers, of
    variance v, the mean of what arrived errs by ``v p / ((1 - p) n)`` against the mean of all, up
    to terms in 1 / n^2. Where every step moves parameters by independent noise of variance v, the
    copies of two workers are ``2 p v / (1 - p^2)`` apart, however many steps there were, and
    ``p v / (1 - p)`` from their owner's.

    Attributes:
      rate: p, the part of packets that is lost, 0 up to below 1.
      packet_size: coordinates of a packet; the last one of a slice may have fewer.
      lose_own: whether owners lose their own share, too, as often as that of others. They would not
        in practice, and it counts more than others for that. With this the mean is unbiased for any
        gradients, but where nothing arrives: then it is zero.
    """

    rate: float
    packet_size: int = 512
    lose_own: bool = False

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate} must be at least 0 and below 1, such as 0.1")
        if not isinstance(self.packet_size, int) or self.packet_size < 1:
            raise ValueError(f"packet_size={self.packet_size} must be a positive integer, as 512")

    def mean_scatter(
        self, x: Float[Array, "n s"], axis_name: AxisName, *, key: Array
    ) -> Float[Array, " s"]:
        """Worker me gets the mean of all workers' ``x[me]``, of those whose packets arrived.

        Args:
          x: this worker's share of every owner's slice.
          axis_name: the mapped axis.
          key: a PRNG key, the same on all workers, another one in every step.

        Returns:
          In x's dtype; each packet is averaged in f32 over the workers of which it arrived.

        Raises:
          ValueError: ``x`` has not one row for each worker.
        """
        self._check("x", x.shape, (_axis(axis_name).size, x.shape[-1]))
        arrived = self._arrived(key, 0, x.shape, axis_name, own=not self.lose_own)
        shares = jnp.where(arrived, _axis(axis_name).all_to_all(x).astype(jnp.float32), 0)
        count = jnp.maximum(jnp.sum(arrived, axis=0, dtype=jnp.float32), 1)
        return (jnp.sum(shares, axis=0) / count).astype(x.dtype)

    def all_gather(
        self,
        x: Float[Array, " s"],
        stale: Float[Array, "n s"],
        axis_name: AxisName,
        *,
        key: Array,
    ) -> Float[Array, "n s"]:
        """All workers' slices ``x``; packets that did not arrive are those of ``stale``.

        A worker has its own slice. Others' copies differ between workers: use ``check_vma=False``,
        or count the result as varying.

        Args:
          x: this worker's slice.
          stale: what this worker had of all slices.
          axis_name: the mapped axis.
          key: as for `mean_scatter`; it may be the same.

        Raises:
          ValueError: ``stale`` has not one row like ``x`` for each worker.
        """
        self._check("stale", stale.shape, (_axis(axis_name).size, x.shape[0]))
        arrived = self._arrived(key, 1, stale.shape, axis_name, own=True)
        return jnp.where(arrived, _axis(axis_name).all_gather(x).astype(stale.dtype), stale)

    def _arrived(
        self, key: Array, way: int, shape: tuple[int, ...], axis_name: AxisName, *, own: bool
    ) -> Bool[Array, "n s"]:
        """Which coordinates reach this worker, by their sender."""
        n, size = shape
        me = _axis(axis_name).index
        key = jax.random.fold_in(jax.random.fold_in(key, way), me)
        packets = -(-size // self.packet_size)
        arrived = jax.random.bernoulli(key, 1 - self.rate, (n, packets))
        if own:
            arrived |= jnp.arange(n)[:, None] == me
        return jnp.repeat(arrived, self.packet_size, axis=1)[:, :size]

    @staticmethod
    def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ValueError(
                f"{name} has shape {shape} and has to have {expected}: one row for each worker; "
                "pad the gradient to a multiple of the workers and reshape it"
            )


def _axis(axis_name: AxisName) -> Axis:
    return Axis(axis_names(axis_name))
