"""Fused kernels of MX floats, for every lowering of Pallas; they compute `pallas_kernels.mx`.

One program handles some parts of one chunk, and holds the coordinates of all four quarters in
registers from the first load to the last store. The lowering (`pallas_kernels.mx_triton`,
`pallas_kernels.mx_mosaic`) decides how.
"""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, UInt32

from pallas_kernels.kernels import Launch, launched, rows_of, scalar
from pallas_kernels.mx import BLOCK, Form, sections
from pallas_kernels.tile import divided


class Input(NamedTuple):
    """Payloads to be added up: uint32[k, c, P], and the index of one to leave out, or `None`."""

    payloads: Any
    skip: Any = None


class Program(Protocol):
    """One program of a kernel, as a lowering holds its coordinates."""

    c: Any
    """The position of the chunk in the call: int32 scalar."""

    def load(self, x_ref, chunk) -> Any:
        """The coordinates of a chunk of ``x_ref`` [blocks, 32], 0 from its end on: f32."""
        ...

    def store(self, out_ref, chunk, values) -> None:
        """Writes coordinates to those blocks of a chunk that ``out_ref`` [blocks, 32] has."""
        ...

    def decode(self, payload_ref, where: tuple) -> Any:
        """The decoded coordinates of the payload ``payload_ref[*where]``: f32."""
        ...

    def encode(self, values, noise, out_ref, where: tuple) -> None:
        """Encodes coordinates into the payload ``out_ref[*where]``."""
        ...

    def noise(self, noise_ref, chunk) -> Any:
        """The noise words of a chunk's coordinates; `None` if no noise rounds them."""
        ...


class Lowering(Protocol):
    """A lowering of Pallas; hashable."""

    def program(self, form: Form) -> Program:
        """The running program."""
        ...

    def launch(self, launch: Launch, operands: tuple) -> Array:
        """See `pallas_kernels.kernels.Lowering`."""
        ...


def _lowering(form: Form) -> Any:
    """The `Lowering` of the form's backend."""
    if form.backend == "mosaic":
        from pallas_kernels.mx_mosaic import MosaicOfBlocks

        return MosaicOfBlocks()
    from pallas_kernels.mx_triton import TritonOfBlocks

    return TritonOfBlocks(interpret=form.backend == "interpret")


def _accumulate(program: Program, total, inputs: list[Input]) -> Any:
    """``total`` plus the payloads of all inputs for the program's chunk."""
    for payloads_ref, skip_ref in inputs:
        count = payloads_ref.shape[0] - (skip_ref is not None)
        if skip_ref is not None:
            # As if zeros were added for the payload left out; compilers drop such an addition.
            total = jnp.where(total == 0, np.float32(0), total)

        def add(k, so_far, payloads_ref=payloads_ref, skip_ref=skip_ref):
            if skip_ref is not None:
                k = k + 1 + ((k - skip_ref[0]) >> 31)  # k + (k >= skip)
            return so_far + program.decode(payloads_ref, (k, program.c))

        if count == 1:
            total = add(jnp.int32(0), total)
        elif count:
            total = lax.fori_loop(0, count, add, total)
    return total


def _inputs_of(refs, with_skip: tuple[bool, ...]) -> list[Input]:
    """Inputs whose fields are references."""
    it = iter(refs)
    return [Input(next(it), next(it) if skips else None) for skips in with_skip]


def _encode_kernel(
    x_ref, chunks_ref, noise_ref, *rest, lowering: Lowering, fmt: Form, skips_chunk, with_skip
):
    """Encodes sums, of the gradient alone if there are no inputs."""
    program, out_ref = lowering.program(fmt), rest[-1]
    inputs = _inputs_of(rest[skips_chunk:-1], with_skip)

    def run():
        chunk = chunks_ref[program.c]
        total = _accumulate(program, program.load(x_ref, chunk), inputs)
        program.encode(total, program.noise(noise_ref, chunk), out_ref, (program.c,))

    if skips_chunk:
        pl.when(program.c != rest[0][0])(run)
    else:
        run()


def _sum_kernel(x_ref, chunks_ref, *rest, lowering: Lowering, fmt: Form, with_skip, divisor: int):
    """Writes sums; the chunk at position c of the call goes to position c of the result."""
    program = lowering.program(fmt)
    total = program.load(x_ref, chunks_ref[program.c])
    total = _accumulate(program, total, _inputs_of(rest[:-1], with_skip))
    program.store(rest[-1], program.c, divided(total, divisor))


def _decode_kernel(
    payloads_ref, chunks_ref, out_ref, *, lowering: Lowering, fmt: Form, divisor: int
):
    """Decodes payloads to their chunks of the result."""
    program = lowering.program(fmt)
    values = program.decode(payloads_ref, (program.c,))
    program.store(out_ref, chunks_ref[program.c], divided(values, divisor))


def _operands(inputs: tuple[Input, ...]) -> tuple[list, tuple[bool, ...]]:
    """Inputs as a flat list of arrays, and which of them leave a payload out."""
    flat = []
    for payloads, skip in inputs:
        flat += [payloads] if skip is None else [payloads, scalar(skip)]
    return flat, tuple(skip is not None for _, skip in inputs)


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
    launch = Launch(
        kernel=_encode_kernel,
        name="mx_hop" if inputs else "mx_encode",
        fmt=form,
        tiles=form.parts,
        chunks=chunks.shape[0],
        shape=(chunks.shape[0], sections(form.parts, form.element)[-1]),
        dtype=jnp.dtype(jnp.uint32),
        static=(("skips_chunk", len(skipped)), ("with_skip", with_skip)),
    )
    return launched(operands, launch=launch, lowering=_lowering(form))


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
    count = chunks.shape[0]
    launch = Launch(
        kernel=_sum_kernel,
        name="mx_sum",
        fmt=form,
        tiles=form.parts,
        chunks=count,
        shape=(count * form.blocks, BLOCK),
        dtype=jnp.dtype(dtype),
        static=(("with_skip", with_skip), ("divisor", divisor)),
    )
    operands = rows_of(x, BLOCK), chunks, *flat
    values = launched(operands, launch=launch, lowering=_lowering(form))
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
    launch = Launch(
        kernel=_decode_kernel,
        name="mx_decode",
        fmt=form,
        tiles=form.parts,
        chunks=count,
        shape=shape,
        dtype=like.dtype,
        static=(("divisor", divisor),),
        replaces=None if into is None else 2,
    )
    operands = payloads, chunks, *(() if into is None else (into,))
    return launched(operands, launch=launch, lowering=_lowering(form))
