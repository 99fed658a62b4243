"""The Marsit method (Wu et al., DAC 2022): one bit per coordinate and hop; biased coins merge.

Worker i encodes the signs of y_i = x_i + c_i, its gradient plus its compensation. A hop merges the
bit of a partial result of a workers with the bit of one of b workers: if the two differ, a coin
keeps the former with probability a / (a + b). So the finished bit is the sign of a worker that is
drawn uniformly. The mean is estimated as g = s (+-1), and c_i becomes y_i - g. Every ``period``-th
round has full precision: its result is the mean of the y_i (in the paper, of the x_i, and the c_i
are dropped), and the c_i become zero.

In the paper the length s of a step is a constant. Here it is ``scale`` times the mean magnitude of
all workers' *gradients* in a block: with the mean magnitude of the y_i, compensations would amplify
themselves. The paper does not define the sign of zero; here a coin draws it.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from dynamiq_jax.contrib.lanes import bit_words, pack_bits, uniform, unpack_bits
from dynamiq_jax.core.axis import fold_seed, seed_of
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.core.fingerprint import assert_same_on_workers
from dynamiq_jax.executors.codec import ChunkCodec
from dynamiq_jax.executors.collectives import all_reduce
from dynamiq_jax.methods.base import LARGEST, Call, Outcome, clipped, ring_bits, with_memory
from dynamiq_jax.methods.plain import ChunkLayout, PlainMethod, chunk_noise
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.schedules import gradients_in

LONGEST_PERIOD = 4096
MOST_WORKERS = 4096
"""The round's index is summed over workers in f32, which is exact below 2^24."""


class MarsitState(NamedTuple):
    """The state from step to step."""

    residual: Float[Array, " d"]
    """The compensation c, f32, different on every worker."""
    step: Int[Array, ""]
    """The index of the round, int32, the same on all workers; 0 again after a full round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marsit(PlainMethod):
    """All-reduce of signs: 1 bit per coordinate and hop, and 32 bits every ``period`` rounds.

    It is unbiased for the mean sign, but not for the gradient. The results (as sums) of all steps
    and the compensations of all workers add up to all gradients; after a full round the results
    alone do. If workers' gradients differ for many rounds, the result of a full round may be as
    large as ``period`` gradients. A block that is not finite does not change its compensation.
    Compensations take 4 bytes per coordinate on every worker.

    Attributes:
      period: rounds from one round of full precision to the next, 2 to 4096; `None`: no such
        rounds.
      scale: the length of a step, relative to the mean magnitude of the workers' gradients, above
        0.
      block_size: the number of coordinates that share a step, a multiple of 32; it takes 64 /
        ``block_size`` wire bits.
    """

    period: int | None = 100
    scale: float = 1.0
    block_size: int = 1024

    needs_state: ClassVar[bool] = True
    shards: ClassVar[bool] = False

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        period = self.period
        if period is not None and not 2 <= period <= LONGEST_PERIOD:
            raise ValueError(
                f"period={period} must be an integer from 2 to {LONGEST_PERIOD}, or None for no "
                "rounds of full precision; for nothing but such rounds pass dq.F32()"
            )
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale={self.scale} must be above 0 and finite, such as 1.0")
        size = self.block_size
        if size < 32 or size % 32:  # whole words of signs
            raise ValueError(f"block_size={size} must be a positive multiple of 32, as 1024")

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses more workers than can agree on the index of a round."""
        if n_workers > MOST_WORKERS:
            raise ValueError(
                f"Marsit serves up to {MOST_WORKERS} workers, and here are {n_workers}; pass "
                "topology=dq.Hierarchical(), with which it serves those of the outer axis"
            )

    def init(self, size: int, n_workers: int) -> MarsitState:
        """The initial state: no compensation."""
        return MarsitState(jnp.zeros(size, jnp.float32), jnp.zeros((), jnp.int32))

    @property
    def unit(self) -> int:
        """Chunks have whole blocks."""
        return self.block_size

    def measure(self, x: Float[Array, " d"], layout: ChunkLayout) -> Array:
        """The mean magnitude of every block, divided by n, f32; not finite if x is not."""
        blocks = jnp.pad(x.astype(jnp.float32), (0, -x.shape[0] % self.block_size))
        blocks = blocks.reshape(-1, self.block_size)
        filled = jnp.full(blocks.shape[0], self.block_size).at[-1].add(x.shape[0] - blocks.size)
        # Divided first, so that what is finite has a finite sum.
        share = jnp.abs(clipped(blocks)) / (filled * layout.n_workers).astype(jnp.float32)[:, None]
        finite = jnp.all(jnp.isfinite(blocks), axis=1)
        return jnp.where(finite, jnp.sum(share, axis=1), jnp.inf)

    def share(self, message: Array, layout: ChunkLayout, call: Call) -> tuple[Array, ...]:
        """The seed of the coins, lengths of steps (finite if gradients are), the round's index."""
        seed = seed_of(call.seed, message)
        step = jnp.round(message[-1] / layout.n_workers).astype(jnp.int32)
        length = jnp.minimum(message[:-1] * self.scale, LARGEST / layout.n_workers)
        length = jnp.where(jnp.isfinite(message[:-1]), length, jnp.inf)
        return fold_seed(seed, step), length, step

    def codec(
        self, x: Float[Array, " d"], shared: tuple[Array, ...], layout: ChunkLayout, call: Call
    ) -> ChunkCodec:
        """Merges signs, weighted by the number of their workers; results are means, f32."""
        assert call.topology is not None
        seed, lengths, _ = shared
        m, streams = layout.chunk_size, layout.chunks_per_worker
        standing = jnp.asarray(gradients_in(call.topology, call.n_workers))
        of_merge = chunk_noise(fold_seed(seed, 0), call.n_slots, layout)
        of_zero = chunk_noise(fold_seed(seed, 1), 1, layout)
        spare = layout.padded_size // self.block_size - lengths.shape[0]
        steps = jnp.pad(lengths, (0, spare)).reshape(layout.chunks, -1)
        y = jnp.pad(x.astype(jnp.float32), (0, layout.padded_size - x.shape[0]))
        y = y.reshape(layout.chunks, m)
        # Signs of zero are drawn by coins that are the same on all workers.
        coins = jax.vmap(of_zero, (0, None))(jnp.arange(layout.chunks, dtype=jnp.int32), 0)
        drawn = jnp.where(coins >> 31 == 1, 1.0, -1.0)
        signs = jnp.where(y > 0, 1.0, jnp.where(y < 0, -1.0, drawn))

        def encode(arrived, chunks, encoder, lost, skip=None):
            """Uses the coin of the encoding that arrived; a left-out encoding has weight 0."""
            del encoder, skip

            def merge(total, arriving):
                payloads, slot = arriving
                others = standing[slot, chunks // streams].astype(jnp.float32)[:, None]
                both = jnp.abs(total) + others
                theirs = uniform(jax.vmap(of_merge, (0, None))(chunks, slot)) * both < others
                bits = jnp.where(unpack_bits(payloads, m, 1) == 1, 1.0, -1.0)
                return jnp.where(theirs, bits, jnp.sign(total)) * both, None

            total = signs.at[chunks].get(mode="promise_in_bounds")
            for inputs in arrived:
                k = inputs.payloads.shape[0]
                slots = jnp.broadcast_to(jnp.asarray(inputs.encoder.slot), k)
                total, _ = lax.scan(merge, total, (inputs.payloads, slots), unroll=min(k, 16))
            return pack_bits((total > 0).astype(jnp.uint32), 1), lost

        def decode(payloads, chunks, encoders, into):
            length = jnp.repeat(steps[chunks], self.block_size, axis=1)
            values = jnp.where(unpack_bits(payloads, m, 1) == 1, length, -length)
            into = jnp.zeros((layout.chunks, m), jnp.float32) if into is None else into
            return into.at[chunks].set(values, unique_indices=True, mode="promise_in_bounds")

        return ChunkCodec(encode, decode)

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        return 32 * bit_words(chunk_size, 1)

    def agreed_bits(self, size: int) -> int:
        """Bits for the mean magnitude of every block, and for the index of the round."""
        return 32 * (-(-size // self.block_size) + 1)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates, averaged over a period."""
        signs = PlainMethod.wire_bits(self, size, n_workers, topology)
        if self.period is None:
            return signs
        full = ring_bits(self.agreed_bits(size), n_workers) + ring_bits(32 * size, n_workers)
        return ((self.period - 1) * signs + full) // self.period

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`."""
        assert call.topology is not None
        assert isinstance(call.state, MarsitState)
        axis, n_workers, state, topology = call.axis, call.n_workers, call.state, call.topology
        layout, size = self.layout(x.shape[0], n_workers, topology), x.shape[0]
        with jax.named_scope("marsit_all_reduce"):
            y = with_memory(x, state.residual)
            # A state varies, for all that JAX knows: the round is one that all have added up.
            message = jnp.append(self.measure(x, layout), state.step.astype(jnp.float32))
            shared = self.share(axis.psum(message), layout, call)
            _, lengths, step = shared
            if self.debug_checks:
                assert_same_on_workers(shared, axis, "the plan")

            def signs() -> tuple[Array, Array]:
                codec = self.codec(y, shared, layout, call)
                result, _ = all_reduce(topology, codec, axis, layout.chunks_per_worker)
                mean = result.reshape(-1)[:size]
                return mean, y - mean

            def full() -> tuple[Array, Array]:
                sent = jnp.clip(y, -LARGEST / n_workers, LARGEST / n_workers)
                return axis.psum(sent) / n_workers, y - sent

            if self.period is None:
                mean, left = signs()
            else:
                last = step % self.period == self.period - 1
                mean, left = lax.cond(last, full, signs)
            known = jnp.repeat(jnp.isfinite(lengths), self.block_size)[:size]
            mean = jnp.where(known, mean, jnp.nan)
            if self.debug_checks:
                assert_same_on_workers(mean, axis, "the result")
            residual = jnp.where(known, clipped(left), state.residual)
            after = MarsitState(residual, (state.step + 1) % (self.period or LONGEST_PERIOD))
            value = mean
            if call.divisor != n_workers:
                value = clipped(mean * (n_workers / call.divisor))
            return Outcome(value.astype(x.dtype), after)
