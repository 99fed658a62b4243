"""Counter-based randomness for stochastic rounding. No other file defines the hash.

Every coordinate of every encoding gets a *noise word*, a uint32 that is uniform on 0 .. 2^32-1. It
depends only on (seed, super-group, coordinate, slot). So nothing is stored, nothing is sent, and
chunking, tiles, backend and device do not change the result. One 32-bit hash serves four
consecutive coordinates: coordinate c of a quad uses the hash rotated by 8c bits. So each word is
uniform on all of its bits, and words of one quad are nearly independent (correlation below 2^-8).

A *slot* is the index of an encoding among all encodings of one chunk (0, 1, 2, ...; in a ring the
hop). The format's `rounding` says how the words of different slots are related:

* ``independent``: they are unrelated.
* ``antithetic``: slots are paired, and the second of a pair uses the complement of the first's
  words. Consecutive hops of a ring carry sums of nearly equal size, so their errors cancel best.
* ``correlated`` (the paper's): word = (pi(slot) + own) * 2^32 / n. Here own is uniform on 0..1, and
  pi is a random permutation of 0..n-1 that differs between coordinates. So one word falls into each
  n-th of the range.
* ``nearest``: every word is just below one half of the range, so that values are rounded to the
  nearest level.

Each encoding alone is unbiased in the first three. But a ring's later encodings start from the
results of earlier ones, so related words make the ring's *result* slightly biased for a given
gradient. On the gradients of a small transformer at 5 bits, the squared bias was 1.2% of the
squared error with antithetic words, 0.2% with correlated words and zero with independent words. But
independent words had 1.8 times the squared error of antithetic words.

Encoders complement the word of a negative coordinate, so that correlation acts on values and
not on magnitudes.

All functions work on numpy, jax and Pallas values alike: they use only integer operators.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.format import Rounding

NOISE_WORDS = 8
"""Length of the `uint32` row that describes one slot's noise; see `slot_noise`."""
NEAREST = np.uint32(0x7FFFFFFF)
"""The word that rounds to the nearest: below one half, so that halves go down."""


class Noise(NamedTuple):
    """The unpacked row of one slot (all `uint32` scalars)."""

    seed_a: jax.Array
    seed_b: jax.Array
    flip: jax.Array  # 0, or 2^32-1 to complement
    shared_a: jax.Array
    shared_b: jax.Array
    perm_low: jax.Array  # four 16-bit candidates for pi(slot), two per word
    perm_high: jax.Array
    n_slots: jax.Array


def mix(x):
    """A bijective 32-bit finaliser; every input bit reaches every output bit."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x21F0AAAD)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


def quad_hash(counter, seed_a, seed_b):
    """Hashes a `uint32` counter under a 64-bit seed.

    The seed's second word enters between rounds: streams of two seeds are no shifts of each other.
    """
    x = counter + seed_a
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15) ^ seed_b) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


def rotate_bits(x, bits):
    """Rotate `uint32` left by ``bits`` (0, 8, 16 or 24; an array or a number)."""
    bits = np.uint32(bits) if isinstance(bits, int) else bits
    return (x << bits) | (x >> ((np.uint32(32) - bits) & np.uint32(31)))


def seed_words(words):
    """Two hashed `uint32` seed words from a ``uint32[2]`` seed."""
    a = mix(words[0] ^ np.uint32(0x9E3779B9))
    b = mix(words[1] + a)
    return a, b


def slot_noise(seed: jax.Array, n_slots: int, rounding: Rounding) -> jax.Array:
    """The noise description of every slot.

    Args:
      seed: ``uint32[2]``, equal on all workers.
      n_slots: the number of encodings of one chunk (n for n workers).
      rounding: see the module docstring.

    Returns:
      ``uint32[n_slots, NOISE_WORDS]``: one row for each slot, in the form that kernels need.
    """
    slot = np.arange(n_slots, dtype=np.uint32)
    columns = noise_columns(seed, slot, n_slots, rounding)
    if rounding == "correlated":
        a, b = seed_words(seed)
        draws = mix(mix(a ^ (slot[None, :] + 1)) + b + jnp.arange(4, dtype=jnp.uint32)[:, None])
        perms = jnp.argsort(jnp.argsort(draws, axis=1), axis=1).astype(jnp.uint32)
        columns[5:7] = perms[0] | perms[1] << 16, perms[2] | perms[3] << 16
    return jnp.stack(columns, axis=1)


def noise_columns(seed, slot, n_slots: int, rounding: Rounding) -> list:
    """The columns of `slot_noise`: the words of `Noise` by slot, without permutations.

    Args:
      seed: two words, `uint32`.
      slot: the slots, `uint32` of any shape.
      n_slots: as for `slot_noise`.
      rounding: as for `slot_noise`.
    """
    a, b = seed_words(seed)
    zero = slot ^ slot
    # If slots are odd in number, the first has no partner: it carries the smallest partial sum.
    place = slot + np.uint32(n_slots % 2)
    stream = place >> 1 if rounding == "antithetic" else slot
    flip = zero - (place & 1) if rounding == "antithetic" else zero
    stream_a = mix(a + (stream + 1) * np.uint32(0x9E3779B1))
    stream_b = mix(b ^ stream_a)
    n = zero + np.uint32(n_slots)
    return [stream_a, stream_b, flip, zero + a, zero + b, zero, zero, n]


def noise_from(row: jax.Array, first: jax.Array) -> jax.Array:
    """The row that gives coordinates 0, 1, ... the noise of ``first``, ``first`` + 1, ...

    ``first`` is a coordinate, int32 scalar, a multiple of four.
    """
    quads = (first // 4).astype(jnp.uint32)
    a, shared_a = Noise._fields.index("seed_a"), Noise._fields.index("shared_a")
    return row.at[a].add(quads).at[shared_a].add(quads)


def noise_words(quad_counter, rotation, noise: Noise, rounding: Rounding):
    """The `uint32` noise words of coordinates.

    Args:
      quad_counter: `uint32`, super-group index * quads per super-group + quad in it.
      rotation: `uint32` 8 * (coordinate mod 4), broadcasting against ``quad_counter``.
      noise: the slot's description.
      rounding: the static scheme.
    """
    if rounding == "nearest":
        zero = quad_counter ^ quad_counter  # has the layout that a kernel gives to its noise
        return zero + (rotation ^ rotation) + NEAREST
    word = quad_hash(quad_counter, noise.seed_a, noise.seed_b)
    if rounding == "antithetic":
        word = word ^ noise.flip
    word = rotate_bits(word, rotation)
    if rounding != "correlated":
        return word
    shared = rotate_bits(quad_hash(quad_counter, noise.shared_a, noise.shared_b), rotation)
    return _permuted(word, shared, noise)


def _permuted(word, shared, noise: Noise):
    """(pi + word / 2^32) * 2^32 / n; pi is one of four permutations, rotated at random."""
    pair = jnp.where((shared & 1) == 0, noise.perm_low, noise.perm_high)
    pi = (pair >> ((shared & 2) << 3)) & np.uint32(0xFFFF)
    pi = pi + (((shared >> 16) * noise.n_slots) >> 16)
    pi = jnp.where(pi >= noise.n_slots, pi - noise.n_slots, pi)
    width = np.uint32(0xFFFFFFFF) // noise.n_slots
    return pi * width + (word >> 16) * (width >> 16)
