"""The THC method (Li et al., NSDI 2024): integers that add up on the way, in native collectives.

Numerics are those of `thc_codec`. All workers agree by a pmax on one scale per piece, rotate,
round to integers 0..g and sum these; the sum is exact, so that its order does not matter and both
forms return the same bits:

* ``form="psum"``: one native all-reduce of lanes wide enough for the sum, both ways.
* ``form="two-shot"``: an all-to-all of indices in ``bits`` bits, table look-up and sum at the
  owner, an all-gather of sums in ceil(log2(n g + 1)) bits: 4 up and 8 down for up to 8 workers.

With ``saturate`` sums keep to fewer bits (Han et al., HotNets 2024), by default those of an index.
Rotated coordinates have signs of their own on every worker, so that their sum grows as sqrt(n): of
z that are normal, a fraction ``2 Phi(-H / sqrt(n))`` of sums is beyond what ``sum_bits`` can say,
``H = (2**sum_bits - 1) T / g`` on either side. These end there. A sum saturates once, at its owner:
`lax.psum` would wrap. What was beyond is lost at the owner, whose memory `ErrorFeedback` keeps.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from dynamiq_jax.comparators import hadamard
from dynamiq_jax.comparators import thc_codec as thc
from dynamiq_jax.comparators.lanes import (
    bit_words,
    coordinate_noise,
    pack_bits,
    pack_lanes,
    unpack_bits,
    unpack_lanes,
)
from dynamiq_jax.comparators.native import NativeMethod, StepState
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import Seed, seed_of, statistics_seed
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, Outcome, State, TellsLosses, clipped, ring_bits
from dynamiq_jax.topologies import Topology
from pallas_kernels.format import Rounding
from pallas_kernels.hashing import slot_noise

MAX_BITS = 8
MAX_GRANULARITY = 1023
MAX_SUM_BITS = 31  # of what `thc.dequantize_sum` decodes
STEPS = 1 << 24  # step numbers are hashed as f32, which are exact below this


@dataclass(frozen=True, kw_only=True, slots=True)
class THC(NativeMethod, TellsLosses):
    """Homomorphic compression: rotated, clipped and rounded to integers that can be summed.

    Unbiased but for clipping, whatever the ``rounding``. Without state the rounding is new only
    where the caller's key is.

    Attributes:
      bits: of an index, 1 to 8: ``2**bits`` levels.
      table: the optimal non-uniform table, or uniform levels (Uniform-THC).
      granularity: g, the largest integer of a worker; with a table 2**bits - 1 or more, by default
        twice that (30 at 4 bits); without one at most that, which is the default.
      p: the fraction of coordinates that is clipped if they are normal.
      form: which native collectives run, see the module.
      sum_bits: bits of a sum on the wire; `None`: the fewest that will do, or ``bits`` where sums
        saturate.
      saturate: whether sums that ``sum_bits`` have no room for end at the largest they have, which
        takes ``form="two-shot"``; else they are refused. What loses least then has ``table=False``
        and a ``p`` that leaves room for the sum: for 8 workers with 4 bits 1e-6, or 1e-2 with
        ``sum_bits=6``.
      rounding: how workers' noise is related, see `pallas_kernels.hashing`.
      piece_size: the most coordinates that are rotated together, a power of two.
    """

    bits: int = 4
    table: bool = True
    granularity: int | None = None
    p: float = 1 / 32
    form: Literal["psum", "two-shot"] = "psum"
    sum_bits: int | None = None
    saturate: bool = False
    rounding: Rounding = "independent"
    piece_size: int = hadamard.PIECE_SIZE

    counts_steps: ClassVar[bool] = True

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits={self.bits} must be an integer from 1 to {MAX_BITS}")
        top = 2**self.bits - 1
        least, most = (top, MAX_GRANULARITY) if self.table else (1, top)
        if not least <= self.g <= most:
            raise ValueError(
                f"granularity={self.granularity} must be {least} to {most} with bits={self.bits} "
                f"and table={self.table}; pass such a number, None, or other bits"
            )
        thc.clip_threshold(self.p)
        hadamard.piece_shape(1, piece_size=self.piece_size)
        if self.sum_bits is not None and not 1 <= self.sum_bits <= MAX_SUM_BITS:
            raise ValueError(f"sum_bits={self.sum_bits} must be 1 to {MAX_SUM_BITS}, or None")
        if self.saturate and self.form != "two-shot":
            raise ValueError(
                f"saturate=True with form={self.form!r}: native sums wrap; pass form='two-shot'"
            )

    @property
    def g(self) -> int:
        """The granularity, with its default filled in."""
        if self.granularity is not None:
            return self.granularity
        return (2 if self.table else 1) * (2**self.bits - 1)

    @property
    def integers(self) -> Int[np.ndarray, " levels"]:
        """The integers that an index may stand for."""
        if self.table:
            return thc.optimal_table(self.bits, self.g, self.p)
        return thc.uniform_table(self.g + 1)

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies, and sums that overflow their bits."""
        NativeMethod.check(self, n_workers, topology)
        most, room = n_workers * self.g, self.sum_bits or MAX_SUM_BITS
        if self.saturate:
            room = MAX_SUM_BITS
        if most >= 1 << room:
            fits = ((1 << room) - 1) // n_workers
            raise ValueError(
                f"sums of {n_workers} workers of granularity={self.g} reach {most}, which exceeds "
                f"the {(1 << room) - 1} of {room} bits; pass "
                + (f"sum_bits={most.bit_length()}, or " if room < MAX_SUM_BITS else "")
                + f"a granularity of at most {fits}"
            )

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        pieces, length = hadamard.piece_shape(size, piece_size=self.piece_size)
        width = self._sum_bits(n_workers)
        if self.form == "psum":
            lanes = -(-pieces * length // (32 // width))
            return ring_bits(32 * (pieces + lanes), n_workers)
        part = _part_size(pieces * length, n_workers)
        words = bit_words(part, self.bits) + bit_words(part, width)
        return ring_bits(32 * pieces, n_workers) + 32 * words * (n_workers - 1)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        axis, n_workers, state = call.axis, call.n_workers, call.state
        threshold = thc.clip_threshold(self.p)
        with jax.named_scope("thc_all_reduce"):
            pieces = hadamard.cut(x, piece_size=self.piece_size)
            scale = axis.pmax(thc.scale_of(pieces))
            seed = _seed_of_step(call.seed, scale, state, axis)
            z = hadamard.rotate(thc.standardize(pieces, scale), seed)
            own = slot_noise(seed, n_workers, self.rounding)[axis.index]
            noise = coordinate_noise(own, z.size, rounding=self.rounding).reshape(z.shape)
            index = thc.quantize(z, self.integers, threshold, noise)

            def decode(total, n: int):
                z = thc.dequantize_sum(total, n, self.g, threshold)
                return clipped(thc.unstandardize(hadamard.unrotate(z, seed), scale))

            total, beyond = self._total(index, axis, n_workers)
            mean = decode(total, n_workers)
            result = clipped(hadamard.join(mean, x.shape[0]) * (n_workers / call.divisor))
            delivered = thc.lookup(index, self.integers).astype(jnp.int32) - beyond
            lost = pieces - decode(delivered.astype(jnp.uint32), 1)
            state = state and StepState((state.step + 1) % STEPS)
            lost = hadamard.join(lost, x.shape[0])
            return Outcome(result.astype(x.dtype), state, lost=lost)

    def _total(
        self, index: UInt32[Array, "p D"], axis: Axis, n: int
    ) -> tuple[UInt32[Array, "p D"], Int[Array, "p D"] | int]:
        """The sum of all workers' integers, and what saturation took from it at this worker."""
        width, flat = self._sum_bits(n), index.reshape(-1)
        if self.form == "psum":
            words = pack_lanes(thc.lookup(flat, self.integers), width)
            total = unpack_lanes(axis.psum(words), flat.size, width)
            return total.reshape(index.shape), 0
        part = _part_size(flat.size, n)
        parts = jnp.pad(flat, (0, n * part - flat.size)).reshape(n, part)
        arrived = axis.all_to_all(pack_bits(parts, self.bits))
        integers = thc.lookup(unpack_bits(arrived, part, self.bits), self.integers)
        exact = jnp.sum(integers, axis=0, dtype=jnp.uint32)
        # What fits lies around the middle, n g / 2; `low` is zero where all of it does.
        most = (1 << width) - 1
        low = jnp.uint32(max(0, n * self.g - most + 1) // 2)
        total = jnp.clip(exact, low, low + most) if self.saturate else exact
        words = pack_bits(total - low, width)
        gathered = unpack_bits(axis.all_gather(words, to="invarying"), part, width) + low

        def back(all_parts: Array) -> Array:
            return all_parts.reshape(-1)[: flat.size].reshape(index.shape)

        if not self.saturate:
            return back(gathered), 0
        mine = axis.index == jnp.arange(n)[:, None]
        return back(gathered), back(jnp.where(mine, (exact - total).astype(jnp.int32), 0))

    def _sum_bits(self, n_workers: int) -> int:
        if self.saturate:
            return self.sum_bits or self.bits
        return self.sum_bits or (n_workers * self.g).bit_length()


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


def _part_size(size: int, n_workers: int) -> int:
    """Coordinates that one worker sums up: a multiple of 32, which fill words at any width."""
    return -(-size // (32 * n_workers)) * 32
