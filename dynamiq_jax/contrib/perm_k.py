"""The PermK method (Szlendak, Tyurin, Richtárik, ICLR 2022): one worker sends each coordinate.

Each worker sends a different nth of its coordinates, and n times these values estimate the sum.
This needs one all-gather, which sends half the bytes of an all-reduce. Here, of every n consecutive
coordinates worker i sends number (i + shift) mod n. The error is that of using one worker's value
for all: it is zero if all workers have the same gradient, and n - 1 times |sum|² if their gradients
are independent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.contrib.native import NativeMethod
from dynamiq_jax.core.axis import seed_of
from dynamiq_jax.methods.base import Call, Outcome, clipped, ring_bits
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class PermK(NativeMethod):
    """Takes each coordinate from a random worker: unbiased except for bf16; 8 bits each."""

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates; without a key."""
        return (n_workers - 1) * 16 * -(-size // n_workers) + ring_bits(64, n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`."""
        axis, n_workers, seed = call.axis, call.n_workers, call.seed
        with jax.named_scope("perm_k_all_reduce"):
            wide = x.astype(jnp.float32)
            if seed.ndim == 0:
                known = jnp.stack([jnp.sum(wide), jnp.sum(jnp.square(wide))])
                seed = seed_of(seed, axis.psum(known))
            sets = jnp.pad(wide, (0, -x.shape[0] % n_workers)).reshape(-1, n_workers)
            # How far the workers of every set are shifted, the same on all of them.
            key = jax.random.wrap_key_data(seed, impl="threefry2x32")
            shifts = jax.random.randint(key, sets.shape[:1], 0, n_workers, jnp.int32)
            place = (axis.index + shifts) % n_workers
            own = jnp.take_along_axis(sets, place[:, None], axis=1)[:, 0]
            own = jnp.where(jnp.all(jnp.isfinite(sets), axis=1), clipped(own), jnp.nan)
            found = axis.all_gather(own.astype(jnp.bfloat16), to="invarying")
            # A set that is not finite on one worker is so in all its coordinates.
            found = jnp.where(jnp.all(jnp.isfinite(found), axis=0), found, jnp.nan)
            worker = (jnp.arange(n_workers)[None] - shifts[:, None]) % n_workers
            value = jnp.take_along_axis(found.T.astype(jnp.float32), worker, axis=1)
            value = clipped(value * n_workers) / call.divisor
            return Outcome(value.reshape(-1)[: x.shape[0]].astype(x.dtype), call.state)
