"""Pallas' Mosaic GPU lowering of the kernels of MX floats, for NVIDIA GPUs from Hopper on.

A program is a warpgroup, which handles 16 parts of a chunk. A thread holds a quad of each quarter:
coordinates are [4, 128, 4], blocks [4, 128], and words of a plane [words, 128], each in the
registers of its thread. Eight neighbouring threads share four blocks, whose maxima they exchange.
A thread beyond the last part handles that part again, and stores the same words.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import mosaic
from pallas_kernels.format import QUAD, planes_of
from pallas_kernels.hashing import NOISE_WORDS, Noise, noise_words
from pallas_kernels.mosaic import THREADS
from pallas_kernels.mx import (
    QUADS,
    QUARTERS,
    Form,
    decode_blocks,
    encode_blocks,
    sections,
)
from pallas_kernels.tile import as_word

_REF, _PER_THREAD = mosaic._REF, mosaic._PER_THREAD
_COORDINATES = mosaic._coordinates_layout(QUARTERS)
_BLOCKS = mosaic._words_layout(QUARTERS)


def word_of(coordinate: int, plane: int) -> tuple[int, int]:
    """The word and the bit where the field of a thread's coordinate (of 16) begins."""
    together = 8 // plane  # coordinates of a quad in a word
    quarter, place = divmod(coordinate, QUAD)
    return place // together, plane * (quarter + QUARTERS * (place % together))


class _Registers:
    """The `pallas_kernels.mx.Holder` of threads' registers."""

    def largest(self, of_coordinates):
        @mosaic._inline((_COORDINATES,), _BLOCKS, (QUARTERS, THREADS), jnp.int32)
        def fold(values):
            found = []
            for q in range(QUARTERS):
                top = functools.reduce(arith.maxsi, values[q * QUAD : (q + 1) * QUAD])
                for distance in (1, 2, 4):
                    top = arith.maxsi(top, mgpu.utils.shfl_bfly(top, distance))
                found.append(top)
            return found

        return fold(of_coordinates)

    def to_coordinates(self, of_blocks):
        return mosaic._spread(of_blocks, QUARTERS)

    def join_scales(self, codes):
        @mosaic._inline((_BLOCKS,), _PER_THREAD, (THREADS,), jnp.uint32)
        def join(codes):
            parts = [arith.shli(c, mosaic._constant(8 * q)) for q, c in enumerate(codes)]
            return [functools.reduce(arith.ori, parts)]

        return join(codes)

    def split_scales(self, words):
        @mosaic._inline((_PER_THREAD,), _BLOCKS, (QUARTERS, THREADS), jnp.uint32)
        def split(words):
            parts = [arith.shrui(words[0], mosaic._constant(8 * q)) for q in range(QUARTERS)]
            return [arith.andi(part, mosaic._constant(0xFF)) for part in parts]

        return split(words)

    def join(self, fields, plane):
        count = plane // 2
        layout = mosaic._words_layout(count)

        @mosaic._inline((_COORDINATES,), layout, (count, THREADS), jnp.uint32)
        def join(fields):
            words: list[list[Any]] = [[] for _ in range(count)]
            for coordinate, field in enumerate(fields):
                words[word_of(coordinate, plane)[0]].append(field)
            return [functools.reduce(arith.ori, parts) for parts in words]

        return join(fields << _bits(plane))

    def split(self, words, plane):
        layout = mosaic._words_layout(plane // 2)
        shape = QUARTERS, THREADS, QUAD

        @mosaic._inline((layout,), _COORDINATES, shape, jnp.uint32)
        def split(words):
            return [words[word_of(i, plane)[0]] for i in range(QUARTERS * QUAD)]

        return split(words) >> _bits(plane)


def _bits(plane: int):
    """Where coordinates' fields begin in their words."""
    return mosaic._static(QUARTERS, lambda i: word_of(i, plane)[1])


@dataclass(frozen=True)
class _Program:
    """The `pallas_kernels.mx_kernels.Program` of Mosaic GPU."""

    form: Form
    c: Any
    number: Any
    """Each thread's number of a part, which the chunk may not have: int32[128]."""
    part: Any
    """The part of this number, else the chunk's last: int32[128]."""
    quad: Any
    """Each thread's quad of the part's blocks: int32[128]."""

    @classmethod
    def running(cls, form: Form) -> "_Program":
        index, c = map(lax.axis_index, ("dynamiq_part", "dynamiq_chunk"))
        thread = index * THREADS + mosaic.threads()
        number, quad = thread // QUADS, thread % QUADS
        return cls(form, c, number, jnp.minimum(number, form.parts - 1), quad)

    def _addresses(self, ref, quad, left, size: int):
        """For each quarter: the address of a thread's quad, and whether ``ref`` has it."""
        for q in range(QUARTERS):
            block = q * self.form.parts
            inside = arith.cmpi(arith.CmpIPredicate.sgt, left, mosaic._constant(block))
            address = mosaic._address(ref, quad, size)
            yield mosaic._after(address, block * QUADS * size), arith.extui(mosaic._i32(), inside)

    def load(self, x_ref, chunk):
        dtype = x_ref.dtype
        size = QUAD * dtype.itemsize
        shape = QUARTERS, THREADS, QUAD

        @mosaic._inline((_REF, _PER_THREAD, _PER_THREAD), _COORDINATES, shape, dtype)
        def load(ref, quad, left):
            found, kind = [], mgpu.utils.dtype_to_ir_type(dtype)
            for address, inside in self._addresses(ref, quad[0], left[0], size):
                words = mosaic._load(address, size // 4, inside)
                found += mosaic._bitcast(words, kind)
            return found

        row = chunk * self.form.blocks + self.part  # the block of the first quarter
        values = load(x_ref, row * QUADS + self.quad, x_ref.shape[0] - row)
        return values.astype(jnp.float32)

    def store(self, out_ref, chunk, values):
        dtype = jnp.dtype(out_ref.dtype)
        size = QUAD * dtype.itemsize

        @mosaic._inline((_REF, _PER_THREAD, _PER_THREAD, _COORDINATES))
        def store(ref, quad, left, values):
            places = self._addresses(ref, quad[0], left[0], size)
            for q, (address, inside) in enumerate(places):
                words = mosaic._bitcast(values[q * QUAD : (q + 1) * QUAD], mosaic._i32())
                mosaic._store(address, words, inside)

        row = chunk * self.form.blocks + self.part
        left = out_ref.shape[0] - row
        store(out_ref, row * QUADS + self.quad, left, values.astype(dtype))

    def _payload(self, ref, where: tuple):
        """The first word of a payload, and those of a thread in its planes."""
        number = where[0]
        for position, size in zip(where[1:], ref.shape[1:-1], strict=True):
            number = number * size + position
        first, element = number * ref.shape[-1], self.form.element
        starts, planes = sections(self.form.parts, element), planes_of(element.bits)
        quad = self.part * QUADS + self.quad
        pairs = zip(starts, planes, strict=False)
        return first, [first + start + quad * (plane // 2) for start, plane in pairs]

    def decode(self, payload_ref, where):
        first, starts = self._payload(payload_ref, where)
        element = self.form.element
        planes = [
            mosaic._load_words(payload_ref, start, plane // 2, 4, False)
            for start, plane in zip(starts, planes_of(element.bits), strict=True)
        ]
        scales = mosaic._load_item(payload_ref, first + self.part)
        return decode_blocks(scales, planes, element, keeps_subnormals=True, holder=_Registers())

    def encode(self, values, noise, out_ref, where):
        scales, planes = encode_blocks(
            values, self.form.element, noise, keeps_subnormals=True, holder=_Registers()
        )
        first, starts = self._payload(out_ref, where)
        for start, words in zip(starts, planes, strict=True):
            mosaic._store_words(out_ref, start, words, 4)
        # Zeros follow the last part, as the codes of blocks that do not exist.
        parts, (count, *_) = self.form.parts, sections(self.form.parts, self.form.element)
        scales = jnp.where(self.number < parts, scales, as_word(0))
        own = (self.quad == 0) & (self.number < count)
        mosaic._store_item(out_ref, first + self.number, scales, own.astype(jnp.int32))

    def noise(self, noise_ref, chunk):
        if not self.form.stochastic:
            return None
        first = chunk * (self.form.chunk_size // QUAD) + self.part * QUADS + self.quad
        quarter = mosaic._static(QUARTERS, lambda i: i // QUAD * self.form.parts * QUADS)
        rotation = mosaic._static(QUARTERS, lambda i: i % QUAD * 8)
        row = Noise(*(noise_ref[i] for i in range(NOISE_WORDS)))
        quad = mosaic._spread(first.astype(jnp.uint32), QUARTERS) + quarter
        return noise_words(quad, rotation, row, "independent")


@dataclass(frozen=True)
class MosaicOfBlocks(mosaic.Mosaic):
    """The `pallas_kernels.mx_kernels.Lowering` of Mosaic GPU."""

    def programs(self, launch):
        """The programs of a chunk; they have the words that pad the scale codes."""
        return pl.cdiv(launch.fmt.parts * QUADS, THREADS)

    def program(self, form: Form) -> _Program:
        """The running program."""
        return _Program.running(form)
