"""Gradients of any number of workers, each made when its turn comes and never stored.

Coordinates of super-group j are N(0, M_j² / 256), independent between workers; the magnitudes M_j
are common to all (`synthetic.lognormal_magnitudes`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from dynamiq_jax.commands.synthetic import lognormal_magnitudes
from pallas_kernels import mix, seed_words

SUPER_GROUP = 256
"""Coordinates of a super-group."""

Values = Float[Array, " d"]


class Source(NamedTuple):
    """The source of all workers' gradients."""

    seed: UInt[Array, " 2"]
    deviation: Float[Array, " M"]
    """Standard deviation of the coordinates of every super-group."""


def mixture_source(key: Array, super_groups: int) -> Source:
    """The paper's mixture."""
    magnitude_key, value_key = jax.random.split(key)
    deviation = lognormal_magnitudes(magnitude_key, super_groups) / math.sqrt(SUPER_GROUP)
    return Source(jax.random.bits(value_key, (2,), jnp.uint32), deviation)


def worker_gradient(source: Source, worker: Int[Array, ""] | int) -> Values:
    """The gradient of one worker: a function of the seed, its number and the coordinate alone."""
    a, b = seed_words(source.seed + mix(jnp.asarray(worker, jnp.uint32) + jnp.uint32(1)))
    counter = jnp.arange(source.deviation.size * SUPER_GROUP, dtype=jnp.uint32)
    word = mix(mix(counter ^ a) + b)
    # Odd multiples of 2^-23 between -1 and 1: symmetric, and exact in f32.
    uniform = ((word >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
    normal = lax.erf_inv(uniform).reshape(-1, SUPER_GROUP)
    return (normal * (math.sqrt(2.0) * source.deviation)[:, None]).reshape(-1)


def contribution(source: Source, worker: Int[Array, ""] | int, n_inner: int) -> Values:
    """The native sum of the ``n_inner`` workers that ``worker`` stands for.

    More than one are added in bf16, every partial sum rounded, as a native ring adds them.
    """
    if n_inner == 1:
        return worker_gradient(source, worker)

    def add(i, total):
        return to_bf16(total + to_bf16(worker_gradient(source, worker * n_inner + i)))

    zeros = jnp.zeros((source.deviation.size * SUPER_GROUP,), jnp.float32)
    return lax.fori_loop(0, n_inner, add, zeros)


def to_bf16(x: Array) -> Array:
    """f32 values rounded to bf16; a cast to and fro might be optimised away."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
