"""Fused kernels of MX floats, through Pallas' Triton lowering; they compute `pallas_kernels.mx`.

One program handles some parts of one chunk, and holds the coordinates of all four quarters in
registers from the first load to the last store. A thread holds a quad of each quarter.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int, UInt32

from pallas_kernels._compat import shape_struct
from pallas_kernels.format import QUAD, planes_of
from pallas_kernels.hashing import NOISE_WORDS, Noise, noise_words
from pallas_kernels.kernels import rows_of, scalar
from pallas_kernels.mx import (
    AT_ONCE,
    BLOCK,
    QUADS,
    QUARTERS,
    Form,
    decode_blocks,
    encode_blocks,
    sections,
)
from pallas_kernels.tile import divided
from pallas_kernels.triton import call_options
from pallas_kernels.tuning import tuning_for


class Input(NamedTuple):
    """Payloads to be added up: uint32[k, c, P], and the index of one to leave out, or `None`."""

    payloads: Any
    skip: Any = None


@dataclass(frozen=True)
class _Program:
    """One program of a kernel, which holds ``at_once`` parts of a chunk."""

    form: Form
    at_once: int
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
        keeps = not self.form.interpret
        return decode_blocks(scales, planes, self.form.element, keeps_subnormals=keeps)

    def encode(self, values, noise, out_ref, where: tuple) -> None:
        """Encodes coordinates into the payload ``out_ref[*where]``."""
        keeps = not self.form.interpret
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

    def accumulate(self, total, inputs: list[Input]) -> Array:
        """``total`` plus the payloads of all inputs for the program's chunk."""
        for payloads_ref, skip_ref in inputs:
            count = payloads_ref.shape[0] - (skip_ref is not None)
            if skip_ref is not None:
                # As if zeros were added for the payload left out; compilers drop such an addition.
                total = jnp.where(total == 0, np.float32(0), total)

            def add(k, so_far, payloads_ref=payloads_ref, skip_ref=skip_ref):
                if skip_ref is not None:
                    k = k + (k >= skip_ref[0]).astype(jnp.int32)
                return so_far + self.decode(payloads_ref, (k, self.c))

            if count == 1:
                total = add(jnp.int32(0), total)
            elif count:
                total = lax.fori_loop(0, count, add, total)
        return total


def _inputs_of(refs, with_skip: tuple[bool, ...]) -> list[Input]:
    """Inputs whose fields are references."""
    it = iter(refs)
    return [Input(next(it), next(it) if skips else None) for skips in with_skip]


def _encode_kernel(x_ref, chunks_ref, noise_ref, *rest, start, skips_chunk, with_skip):
    """Encodes sums, of the gradient alone if there are no inputs."""
    program, inputs, out_ref = start(), _inputs_of(rest[skips_chunk:-1], with_skip), rest[-1]

    def run():
        chunk = chunks_ref[program.c]
        total = program.accumulate(program.load(x_ref, chunk), inputs)
        program.encode(total, program.noise(noise_ref, chunk), out_ref, (program.c,))

    if skips_chunk:
        pl.when(program.c != rest[0][0])(run)
    else:
        run()


def _sum_kernel(x_ref, chunks_ref, *rest, start, with_skip, divisor):
    """Writes sums; the chunk at position c of the call goes to position c of the result."""
    program = start()
    total = program.load(x_ref, chunks_ref[program.c])
    total = program.accumulate(total, _inputs_of(rest[:-1], with_skip))
    program.store(rest[-1], program.c, divided(total, divisor))


def _decode_kernel(payloads_ref, chunks_ref, *rest, start, divisor):
    """Decodes payloads to their chunks of the result."""
    program = start()
    values = program.decode(payloads_ref, (program.c,))
    program.store(rest[-1], chunks_ref[program.c], divided(values, divisor))


def _operands(inputs: tuple[Input, ...]) -> tuple[list, tuple[bool, ...]]:
    """Inputs as a flat list of arrays, and which of them leave a payload out."""
    flat = []
    for payloads, skip in inputs:
        flat += [payloads] if skip is None else [payloads, scalar(skip)]
    return flat, tuple(skip is not None for _, skip in inputs)


class _Launch(NamedTuple):
    """The static facts of a launch with one result."""

    kernel: Any
    name: str
    form: Form
    chunks: int
    """Chunks of the call."""
    shape: tuple[int, ...]
    """The shape of the result."""
    dtype: Any
    static: tuple[tuple[str, Any], ...] = ()
    """The kernel's keyword arguments."""
    into: bool = False
    """Whether the result replaces the last operand."""


@functools.partial(jax.jit, static_argnames=("launch",))
def _launched(operands: tuple, *, launch: _Launch) -> Array:
    """The result of a launch. Equal launches of a program are traced and lowered once."""
    form, name = launch.form, f"mx_{launch.name}"
    # A power of two, at least 4, so that programs have the words that pad the scale codes.
    at_once = min(tuning_for(name).rows_per_program, pl.next_power_of_2(max(form.parts, AT_ONCE)))

    def start() -> _Program:
        return _Program(form, at_once, pl.program_id(0), pl.program_id(1))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(launch.kernel, start=start, **dict(launch.static)),
        out_shape=shape_struct(launch.shape, launch.dtype, *operands),
        grid=(pl.cdiv(form.parts, at_once), launch.chunks),
        in_specs=[whole] * len(operands),
        out_specs=whole,
        input_output_aliases={len(operands) - 1: 0} if launch.into else {},
        **call_options(name, form.interpret),
    )(*operands)


def encode(
    x: Float[Array, " d"],
    chunks: Int[Array, " c"],
    inputs: tuple[Input, ...],
    noise: UInt32[Array, " 8"],
    form: Form,
    skip: Int[Array, ""] | None = None,
) -> UInt32[Array, "c P"]:
    """Payloads of chunks of ``x``, zero beyond its end, plus all inputs, by one kernel.

    Args:
      x: the gradient.
      chunks: the chunks to encode.
      inputs: what is added; the i-th of ``chunks`` uses ``payloads[:, i]``.
      noise: the row of `pallas_kernels.slot_noise` of this encoding.
      form: the static facts.
      skip: a position in ``chunks`` whose payload stays unspecified, or `None`.
    """
    flat, with_skip = _operands(inputs)
    skipped = () if skip is None else (scalar(skip),)
    operands = rows_of(x, BLOCK), chunks, noise, *skipped, *flat
    static = ("skips_chunk", len(skipped)), ("with_skip", with_skip)
    shape = chunks.shape[0], sections(form.parts, form.element)[-1]
    name = "hop" if inputs else "encode"
    launch = _Launch(_encode_kernel, name, form, *shape[:1], shape, jnp.dtype(jnp.uint32), static)
    return _launched(operands, launch=launch)


def add(
    x: Float[Array, " d"],
    chunks: Int[Array, " c"],
    inputs: tuple[Input, ...],
    form: Form,
    divisor: int = 1,
    dtype: Any = jnp.float32,
) -> Float[Array, "c m"]:
    """Chunks of ``x`` plus all inputs, over ``divisor``, by one kernel; see `encode`."""
    flat, with_skip = _operands(inputs)
    static = ("with_skip", with_skip), ("divisor", divisor)
    count = chunks.shape[0]
    shape, dtype = (count * form.blocks, BLOCK), jnp.dtype(dtype)
    launch = _Launch(_sum_kernel, "sum", form, count, shape, dtype, static)
    values = _launched((rows_of(x, BLOCK), chunks, *flat), launch=launch)
    return values.reshape(count, form.chunk_size)


def decode(
    payloads: UInt32[Array, "c P"],
    chunks: Int[Array, " c"],
    like: Float[Array, " d"],
    form: Form,
    divisor: int = 1,
    into: Float[Array, "rows 32"] | None = None,
) -> Float[Array, "rows 32"]:
    """Payload i decoded to chunk ``chunks[i]`` of a result, over ``divisor``, by one kernel.

    Args:
      payloads: what `encode` returns.
      chunks: all chunks that ``like`` has, or some of them.
      like: an array with the result's coordinates and dtype; it is not read.
      form: the static facts.
      divisor: the number of workers for a mean.
      into: the result so far, whose other chunks stay; with `None` they are unspecified.
    """
    count, shape = chunks.shape[0], (-(-like.shape[0] // BLOCK), BLOCK)
    if into is None and count * form.blocks < shape[0]:
        # Later calls write into the result. With an empty result all calls are one kernel.
        into = lax.empty(shape, like.dtype)
    operands = payloads, chunks, *(() if into is None else (into,))
    static = (("divisor", divisor),)
    launch = _Launch(
        _decode_kernel, "decode", form, count, shape, like.dtype, static, into is not None
    )
    return _launched(operands, launch=launch)
