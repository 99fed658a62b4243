"""Pallas' Triton lowering of the kernels of MX floats, for NVIDIA GPUs.

One program handles some parts of one chunk. A thread holds a quad of each quarter.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.format import QUAD, planes_of
from pallas_kernels.hashing import NOISE_WORDS, Noise, noise_words
from pallas_kernels.mx import (
    AT_ONCE,
    QUADS,
    QUARTERS,
    Form,
    decode_blocks,
    encode_blocks,
    sections,
)
from pallas_kernels.triton import Triton

PARTS = 16
"""The most parts of a program. Its 128 threads have a quad of each quarter."""


@dataclass(frozen=True)
class _Program:
    """The `pallas_kernels.mx_kernels.Program` of Triton."""

    form: Form
    at_once: int
    """Parts of the program."""
    index: Any
    """The program's number in the chunk: int32 scalar."""
    c: Any
    """The position of the chunk in the call: int32 scalar."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of coordinates."""
        return QUARTERS, self.at_once, QUADS, QUAD

    def parts(self, shape: tuple[int, ...], axis: int) -> Array:
        """The numbers of the program's parts along an axis: int32[shape]."""
        return self.index * self.at_once + lax.broadcasted_iota(jnp.int32, shape, axis)

    def blocks(self) -> tuple[Array, Array, Array]:
        """For coordinates: block of the chunk, place in the block, whether the chunk has it.

        A block beyond the chunk's end has the number of another block.
        """
        part = self.parts(self.shape, 1)
        block = lax.broadcasted_iota(jnp.int32, self.shape, 0) * self.form.parts + part
        column = lax.broadcasted_iota(jnp.int32, self.shape, 2) * QUAD
        column = column + lax.broadcasted_iota(jnp.int32, self.shape, 3)
        return block, column, part < self.form.parts

    def load(self, x_ref, chunk) -> Array:
        """The coordinates of a chunk of ``x_ref`` [blocks, 32], 0 from its end on: f32."""
        block, column, inside = self.blocks()
        row = chunk * self.form.blocks + block
        inside = inside & (row < x_ref.shape[0])
        return plgpu.load(x_ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)

    def store(self, out_ref, chunk, values) -> None:
        """Writes coordinates to those blocks of a chunk that ``out_ref`` [blocks, 32] has."""
        block, column, inside = self.blocks()
        row = chunk * self.form.blocks + block
        inside = inside & (row < out_ref.shape[0])
        plgpu.store(out_ref.at[row, column], values.astype(out_ref.dtype), mask=inside)

    def _words(self, start: int, plane: int) -> tuple[Array, Array]:
        """Positions of the words of a plane, and whether the payload has them."""
        shape = self.at_once, QUADS, plane // 2
        part = self.parts(shape, 0)
        word = start + part * (QUADS * plane // 2)
        word = word + lax.broadcasted_iota(jnp.int32, shape, 1) * (plane // 2)
        return word + lax.broadcasted_iota(jnp.int32, shape, 2), part < self.form.parts

    def _scale_words(self) -> tuple[Array, Array]:
        """As `_words`; zeros follow the last part, as the codes of blocks that do not exist."""
        part = self.parts((self.at_once,), 0)
        return part, part < sections(self.form.parts, self.form.element)[0]

    def _sections(self) -> list[tuple[Array, Array]]:
        """Positions of the words of all planes, and whether the payload has them."""
        element = self.form.element
        starts = sections(self.form.parts, element)
        return [self._words(*of) for of in zip(starts, planes_of(element.bits), strict=False)]

    def decode(self, payload_ref, where: tuple) -> Array:
        """The decoded coordinates of the payload ``payload_ref[*where]``: f32."""
        scales, *planes = (
            plgpu.load(payload_ref.at[(*where, word)], mask=inside, other=np.uint32(0))
            for word, inside in (self._scale_words(), *self._sections())
        )
        keeps = self.form.backend != "interpret"
        return decode_blocks(scales, planes, self.form.element, keeps_subnormals=keeps)

    def encode(self, values, noise, out_ref, where: tuple) -> None:
        """Encodes coordinates into the payload ``out_ref[*where]``."""
        keeps = self.form.backend != "interpret"
        scales, planes = encode_blocks(values, self.form.element, noise, keeps_subnormals=keeps)
        places = self._scale_words(), *self._sections()
        for (word, inside), words in zip(places, (scales, *planes), strict=True):
            plgpu.store(out_ref.at[(*where, word)], words, mask=inside)

    def noise(self, noise_ref, chunk) -> Array | None:
        """The noise words of a chunk's coordinates, if noise rounds them."""
        if not self.form.stochastic:
            return None
        shape = (*self.shape[:3], 1)  # one hash serves a quad
        block = lax.broadcasted_iota(jnp.int32, shape, 0) * self.form.parts + self.parts(shape, 1)
        quad = chunk * (self.form.chunk_size // QUAD) + block * QUADS
        quad = (quad + lax.broadcasted_iota(jnp.int32, shape, 2)).astype(jnp.uint32)
        rotation = lax.broadcasted_iota(jnp.uint32, (1, 1, 1, QUAD), 3) * np.uint32(8)
        row = Noise(*(noise_ref[i] for i in range(NOISE_WORDS)))
        return noise_words(quad, rotation, row, "independent")


@dataclass(frozen=True)
class TritonOfBlocks(Triton):
    """The `pallas_kernels.mx_kernels.Lowering` of Triton."""

    def programs(self, launch):
        """The programs of a chunk."""
        return pl.cdiv(launch.fmt.parts, _at_once(launch.fmt))

    def program(self, form: Form) -> _Program:
        """The running program."""
        return _Program(form, _at_once(form), pl.program_id(0), pl.program_id(1))


def _at_once(form: Form) -> int:
    """A power of two, at least 4, so that programs have the words that pad the scale codes."""
    return min(PARTS, pl.next_power_of_2(max(form.parts, AT_ONCE)))
