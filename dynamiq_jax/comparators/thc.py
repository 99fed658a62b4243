"""The THC method (Li et al., NSDI 2024): integers that add up on the way, in native collectives.

Numerics are those of `thc_codec`. All workers agree by a pmax on one scale per piece, rotate,
round to integers 0..g and sum these by one native all-reduce, in lanes wide enough for the sum. The
sum is exact, so that its order does not matter.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from dynamiq_jax.comparators import hadamard
from dynamiq_jax.comparators import thc_codec as thc
from dynamiq_jax.comparators.lanes import coordinate_noise, pack_lanes, unpack_lanes
from dynamiq_jax.comparators.native import NativeMethod, StepState
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import Seed, seed_of, statistics_seed
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, Outcome, State, TellsLosses, clipped, ring_bits
from dynamiq_jax.topologies import Topology
from pallas_kernels.hashing import slot_noise

MAX_BITS = 8
MAX_GRANULARITY = 1023
MAX_SUM_BITS = 31  # of what `thc.dequantize_sum` decodes
STEPS = 1 << 24  # step numbers are hashed as f32, which are exact below this


@dataclass(frozen=True, kw_only=True, slots=True)
class THC(NativeMethod, TellsLosses):
    """Homomorphic compression: rotated, clipped and rounded to integers that can be summed.

    Unbiased but for clipping. Without state the rounding is new only where the caller's key is.

    Attributes:
      bits: of an index, 1 to 8: ``2**bits`` levels.
      granularity: g, the largest integer of a worker, 2**bits - 1 or more; default: twice that (30
        at 4 bits).
      p: the fraction of coordinates that is clipped if they are normal.
      piece_size: the most coordinates that are rotated together, a power of two.
    """

    bits: int = 4
    granularity: int | None = None
    p: float = 1 / 32
    piece_size: int = hadamard.PIECE_SIZE

    counts_steps: ClassVar[bool] = True

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits={self.bits} must be an integer from 1 to {MAX_BITS}")
        if not 2**self.bits - 1 <= self.g <= MAX_GRANULARITY:
            raise ValueError(
                f"granularity={self.granularity} must be {2**self.bits - 1} to {MAX_GRANULARITY} "
                f"with bits={self.bits}; pass such a number, None, or other bits"
            )
        thc.clip_threshold(self.p)
        hadamard.piece_shape(1, piece_size=self.piece_size)

    @property
    def g(self) -> int:
        """The granularity, with its default filled in."""
        return 2 * (2**self.bits - 1) if self.granularity is None else self.granularity

    @property
    def integers(self) -> Int[np.ndarray, " levels"]:
        """The integers that an index may stand for."""
        return thc.optimal_table(self.bits, self.g, self.p)

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies, and sums that overflow their bits."""
        NativeMethod.check(self, n_workers, topology)
        most, room = n_workers * self.g, (1 << MAX_SUM_BITS) - 1
        if most > room:
            raise ValueError(
                f"sums of {n_workers} workers of granularity={self.g} reach {most}, which exceeds "
                f"the {room} of {MAX_SUM_BITS} bits; pass a granularity of at most "
                f"{room // n_workers}"
            )

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        pieces, length = hadamard.piece_shape(size, piece_size=self.piece_size)
        lanes = -(-pieces * length // (32 // self._sum_bits(n_workers)))
        return ring_bits(32 * (pieces + lanes), n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        axis, n_workers, state = call.axis, call.n_workers, call.state
        threshold = thc.clip_threshold(self.p)
        with jax.named_scope("thc_all_reduce"):
            pieces = hadamard.cut(x, piece_size=self.piece_size)
            scale = axis.pmax(thc.scale_of(pieces))
            seed = _seed_of_step(call.seed, scale, state, axis)
            z = hadamard.rotate(thc.standardize(pieces, scale), seed)
            own = slot_noise(seed, n_workers, "independent")[axis.index]
            noise = coordinate_noise(own, z.size).reshape(z.shape)
            index = thc.quantize(z, self.integers, threshold, noise)

            def decode(total, n: int):
                z = thc.dequantize_sum(total, n, self.g, threshold)
                return clipped(thc.unstandardize(hadamard.unrotate(z, seed), scale))

            width = self._sum_bits(n_workers)
            integers = thc.lookup(index.reshape(-1), self.integers)
            total = unpack_lanes(axis.psum(pack_lanes(integers, width)), index.size, width)
            mean = decode(total.reshape(index.shape), n_workers)
            result = clipped(hadamard.join(mean, x.shape[0]) * (n_workers / call.divisor))
            lost = pieces - decode(integers.reshape(index.shape), 1)
            state = state and StepState((state.step + 1) % STEPS)
            lost = hadamard.join(lost, x.shape[0])
            return Outcome(result.astype(x.dtype), state, lost=lost)

    def _sum_bits(self, n_workers: int) -> int:
        return (n_workers * self.g).bit_length()


def _seed_of_step(
    seed: Seed, scale: Float[Array, " p"], state: State, axis: Axis
) -> UInt32[Array, " 2"]:
    """The seed of the rotation and the rounding, new in every step where steps are counted."""
    if not state:
        return seed_of(seed, scale)
    step = axis.assume_invarying(state.step).astype(jnp.float32)[None]
    if seed.ndim == 1:
        return seed_of(seed, scale) ^ statistics_seed(step)
    return seed_of(seed, jnp.append(scale, step))
