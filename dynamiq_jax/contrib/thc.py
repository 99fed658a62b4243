"""The THC method (Li et al., NSDI 2024): native collectives sum integers without decoding.

By a pmax, workers agree on one scale M for each piece of D = 2^k coordinates: the largest root mean
square on any worker (the paper's M is the norm, sqrt(D) times this). Then z = H diag(s) x / (M
sqrt(D)), with signs s that all workers share, is nearly N(0, 1) or narrower (`hadamard`). z is
clipped to +-T and rounded stochastically to one of the nodes -T + 2 T table[k] / g. One native
all-reduce sums the integers table[k] of all workers, in lanes wide enough for the sum. This sum is
exact, so its order does not matter.

A *table* is an increasing integer array from 0 to its *granularity* g. The *threshold* T clips a
fraction p of N(0, 1), which is the only bias.
"""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from dynamiq_jax.contrib import hadamard
from dynamiq_jax.contrib.lanes import pack_lanes, unpack_lanes
from dynamiq_jax.contrib.native import NativeMethod, StepState
from dynamiq_jax.core.axis import Axis, Seed, seed_of, statistics_seed
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.base import Call, Outcome, State, TellsLosses, clipped, ring_bits
from dynamiq_jax.methods.plain import coordinate_noise
from dynamiq_jax.topologies import Topology
from pallas_kernels.hashing import slot_noise

MAX_BITS = 8
MAX_GRANULARITY = 1023
MAX_SUM_BITS = 31  # of what `dequantize_sum` decodes
STEPS = 1 << 24  # step numbers are hashed as f32, which are exact below this


@dataclass(frozen=True, kw_only=True, slots=True)
class THC(NativeMethod, TellsLosses):
    """Homomorphic compression: rotates, clips and rounds to integers that can be summed.

    It is unbiased except for clipping. Without a state the rounding changes only with the caller's
    key.

    Attributes:
      bits: the bits of an index, 1 to 8: ``2**bits`` levels.
      granularity: g, the largest integer of a worker, at least 2**bits - 1; default: twice that (30
        at 4 bits).
      p: the fraction of coordinates that is clipped if they are normally distributed.
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
        clip_threshold(self.p)
        hadamard.piece_shape(1, piece_size=self.piece_size)

    @property
    def g(self) -> int:
        """The granularity, or its default."""
        return 2 * (2**self.bits - 1) if self.granularity is None else self.granularity

    @property
    def integers(self) -> Int[np.ndarray, " levels"]:
        """The integers that the indices represent."""
        return optimal_table(self.bits, self.g, self.p)

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
        threshold = clip_threshold(self.p)
        with jax.named_scope("thc_all_reduce"):
            pieces = hadamard.cut(x, piece_size=self.piece_size)
            scale = axis.pmax(scale_of(pieces))
            seed = _seed_of_step(call.seed, scale, state, axis)
            z = hadamard.rotate(standardize(pieces, scale), seed)
            own = slot_noise(seed, n_workers, "independent")[axis.index]
            noise = coordinate_noise(own, z.size).reshape(z.shape)
            index = quantize(z, self.integers, threshold, noise)

            def decode(total, n: int):
                z = hadamard.unrotate(dequantize_sum(total, n, self.g, threshold), seed)
                return clipped(z * jnp.where(jnp.isfinite(scale), scale, jnp.nan)[:, None])

            width = self._sum_bits(n_workers)
            integers = jnp.asarray(self.integers, jnp.uint32)[index.reshape(-1)]
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
    """The seed of the rotation and the rounding; it changes in every step if steps are counted."""
    if not state:
        return seed_of(seed, scale)
    step = axis.assume_invarying(state.step).astype(jnp.float32)[None]
    if seed.ndim == 1:
        return seed_of(seed, scale) ^ statistics_seed(step)
    return seed_of(seed, jnp.append(scale, step))


def clip_threshold(p: float) -> float:
    """T = Phi^-1(1 - p/2): a fraction ``p`` of N(0, 1), 0 < p < 1, lies outside of +-T."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p}; pass the clipped fraction, above 0 and below 1")
    return -NormalDist().inv_cdf(p / 2)


def _interval_error(a, b) -> np.ndarray:
    """The integral of (b - z)(z - a) phi(z) over a < z < b: the error of N(0, 1) between nodes."""

    def tail(x):  # 1 - Phi(x), exact in relative terms where Phi(x) is nearly 1
        return np.vectorize(math.erfc, otypes=[float])(x / math.sqrt(2)) / 2

    density_a, density_b = (np.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (a, b))
    moment0, moment1 = tail(a) - tail(b), density_a - density_b
    moment2 = moment0 + a * density_a - b * density_b
    return (a + b) * moment1 - moment2 - a * b * moment0


@functools.lru_cache(maxsize=64)
def optimal_table(bits: int, granularity: int, p: float) -> Int[np.ndarray, " levels"]:
    """The read-only symmetric table of ``2**bits`` nodes with the least squared error on N(0, 1).

    It is exact: a dynamic programme in f64 over the nodes above zero; those below mirror them.
    """
    upper = np.arange(granularity // 2 + 1, granularity + 1)
    nodes = clip_threshold(p) * (2 * upper / granularity - 1)
    i, j = np.triu_indices(upper.size, 1)
    cost = np.full((upper.size, upper.size), np.inf)
    cost[i, j] = _interval_error(nodes[i], nodes[j])
    # best[j]: the error from zero to node j with the nodes chosen so far, of which j is the last.
    best = _interval_error(-nodes, nodes) / 2
    came_from = []
    for _ in range(2 ** (bits - 1) - 1):
        total = best[:, None] + cost
        came_from.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    chosen = [upper.size - 1]
    for previous in reversed(came_from):
        chosen.append(previous[chosen[-1]])
    half = upper[chosen]
    table = np.concatenate([granularity - half, half[::-1]])
    table.setflags(write=False)
    return table


def _to_middle(x) -> Array:
    """The power of two that scales ``x`` so that its square and its inverse are normal f32."""
    return jnp.where(x > 2.0**40, 2.0**-80, jnp.where(x < 2.0**-40, 2.0**80, 1.0))


def scale_of(x: Float[Array, "*pieces D"]) -> Float[Array, "*pieces"]:
    """The root mean square of every piece, f32: finite if all of its coordinates are."""
    x = x.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    factor = _to_middle(jnp.max(jnp.abs(x), axis=-1))
    scale = jnp.sqrt(jnp.mean((x * factor[..., None]) ** 2, axis=-1)) / factor
    return jnp.where(finite, scale, jnp.inf)


def standardize(
    x: Float[Array, "*pieces D"], scale: Float[Array, "*pieces"]
) -> Float[Array, "*pieces D"]:
    """x / scale; a scale of 0 counts as 1 (then all values are 0)."""
    scale = jnp.where(scale == 0, 1.0, scale)
    factor = _to_middle(scale)
    return x * factor[..., None] / (scale * factor)[..., None]


def quantize(
    z: Float[Array, "*shape"],
    table: Int[np.ndarray, " levels"],
    threshold: float,
    noise: UInt32[Array, "*shape"],
) -> UInt32[Array, "*shape"]:
    """The indices of nodes next to z, clipped to +-T; a small noise word rounds up."""
    granularity = int(table[-1])
    position = jnp.clip(z * (granularity / (2 * threshold)) + granularity / 2, 0, granularity)
    cell = jnp.clip(position.astype(jnp.int32), 0, granularity - 1)
    # Nodes lie on the grid of cells: one look-up per cell finds the interval it belongs to.
    index = np.searchsorted(table, np.arange(granularity), side="right") - 1
    below = jnp.asarray(index, jnp.int32)[cell]
    start = jnp.asarray(table[index], jnp.float32)[cell]
    gap = jnp.asarray(table[index + 1] - table[index], jnp.float32)[cell]
    fraction = (position - start) / gap
    up = (noise >> 8).astype(jnp.float32) < fraction * 2.0**24
    return (below + up.astype(jnp.int32)).astype(jnp.uint32)


def dequantize_sum(
    total: UInt32[Array, "*shape"], n_workers: int, granularity: int, threshold: float
) -> Float[Array, "*shape"]:
    """The mean z of workers from the sum of their integers: (total/n - g/2) 2T/g, f32."""
    most = n_workers * granularity
    # Centred as an integer first: exact (modulo 2^32), and a sum in the middle decodes to zero.
    centred = (2 * total).astype(jnp.int32) - most
    return centred.astype(jnp.float32) * (threshold / most)
