"""Levels of energy, by which super-groups are sorted.

A *shard* here is one worker's slice of the plan, which is sorted separately. An all-reduce has one
shard, which holds all super-groups.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

ENERGY_LEVELS = 256
"""The number of levels, which are 1/4 octave each."""
MANTISSA_BITS = 2
"""The bits of an energy's mantissa that determine its level."""


class Dealt(NamedTuple):
    """Super-groups in the order of their energy, dealt to chunks, and the widths of their tiles."""

    order: Int[Array, "C m"]
    """Chunk c's position p holds super-group ``order[c, p]``."""
    tiles: tuple[Int[Array, "C T"], ...]
    """Word offset and width of each tile's record (`pallas_kernels.pack_tiles`), for F budgets."""
    energy: Float[Array, "shards T"]
    """The mean energy of the super-groups in tile t of a shard's chunks."""


class Upgrades(NamedTuple):
    """How tiles are widened within F budgets, by U upgrades each; hashable.

    A budget with fewer upgrades has additional ones, which no tile gets.
    """

    words: tuple[tuple[int, ...], ...]
    """Words that an upgrade of one tile takes, U rows of F; at least 1."""
    wider: tuple[tuple[int, ...], ...]
    """Bits by which an upgrade widens a tile, U rows of F."""
    budgets: tuple[int, ...]
    """The words of each budget that tiles of the narrowest width leave."""
    narrowest: int
    """The width of all tiles before upgrades."""
    tile_words: int
    """The words of a tile of this width."""


def padded_count(count: int) -> int:
    """The power of two to which `mean_of` pads ``count`` energies with zeros."""
    return 1 << (count - 1).bit_length()


def mean_of(energy: Float[Array, "T k"], count: int) -> Float[Array, " T"]:
    """The means of ``count`` energies each, padded with zeros to `padded_count`.

    All backends add in the same order: the second half to the first half, until one number is left.
    Before that, all numbers are divided by a power of two. So no sum overflows, and the bits do not
    depend on whether a compiler fuses a multiplication with an addition.
    """
    padded = padded_count(count)
    energy = energy * np.float32(1 / padded)
    while energy.shape[1] > 1:
        first, second = lax.split(energy, [energy.shape[1] // 2] * 2, axis=1)
        energy = first + second
    return energy.reshape(energy.shape[0]) * np.float32(padded / count)


def octave_end(x: Float[Array, "*k s"]) -> Int[Array, "*k 1"]:
    """The end of the octave of the largest x >= 0, as `steps_below` needs it."""
    return jnp.max(octave_parts(x), axis=-1, keepdims=True) | ((1 << MANTISSA_BITS) - 1)


def steps_below(x: Float[Array, "*k s"], end: Int[Array, "*k 1"]) -> Int[Array, "*k s"]:
    """How many steps of 1/4 octave x >= 0 lies below the end of an octave.

    The result is from 0 to `ENERGY_LEVELS` - 1; all smaller x have the last step.
    """
    return jnp.clip(end - octave_parts(x), 0, ENERGY_LEVELS - 1)


def octave_parts(x: Float[Array, "*k"]) -> Int[Array, "*k"]:
    """How many steps of 1/4 octave x >= 0 lies above zero."""
    return lax.bitcast_convert_type(x, jnp.int32) >> (23 - MANTISSA_BITS)
