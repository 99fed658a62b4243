"""The kernels of compressed all-reduce: statistics, compress, decompress and the fused hops.

Each operation has two implementations that produce the same integers: `pallas_kernels.reference`
(jax.numpy, any device) and `pallas_kernels.triton` (Pallas, NVIDIA GPUs). ``backend`` names one:
"jnp", "pallas", or "interpret" (the Pallas kernels on Pallas' interpreter, for tests). ``None``
takes "pallas" where JAX's default backend is an NVIDIA GPU and "jnp" elsewhere; a named backend is
never replaced by another.

Shapes used throughout (S = super-group size, R = `TILE_ROWS`): ``x`` is one flat gradient of d
coordinates (f32, bf16 or f16); its M = C*m super-groups (those past the end of ``x`` read as
zeros) are dealt to C chunks: ``order: int32[C, m]``; ``mean: f32[M]`` is what is subtracted from
every coordinate of a super-group before encoding; ``tiles: int32[C, m / R]`` holds word offset and
width of each tile's record in a chunk's payload ``uint32[P]``; ``noise: uint32[NOISE_WORDS]`` is
one row of `hashing.slot_noise`.
"""

from jaxtyping import Array, Float, Int, UInt

from pallas_kernels import reference
from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.format import TILE_ROWS, Input, WireFormat, distortion
from pallas_kernels.hashing import NOISE_WORDS, Noise, mix, seed_words, slot_noise
from pallas_kernels.reference import pack_tiles, unpack_tiles


def _implementation(backend: Backend | None):
    """The module that implements ``backend`` and the keyword arguments it takes."""
    resolved = resolve_backend(backend)
    if resolved == "jnp":
        return reference, {}
    from pallas_kernels import triton

    return triton, {"interpret": resolved == "interpret"}


def statistics(
    x: Float[Array, " d"], *, super_group_size: int = 256, backend: Backend | None = None
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Mean and squared norm of every super-group of ``x`` (rows = ceil(d / S)), both f32.

    The mean is finite exactly if all coordinates are. Sums are taken in f32 in an order that
    depends on the backend: values agree to rounding, not bit for bit.
    """
    module, options = _implementation(backend)
    return module.statistics(x, super_group_size=super_group_size, **options)


def compress(
    x: Float[Array, " d"],
    mean: Float[Array, " M"],
    order: Int[Array, "C m"],
    tiles: Int[Array, "C T"],
    chunks: Int[Array, " c"],
    noise: UInt[Array, " 8"],
    skip: Int[Array, ""] | None = None,
    *,
    payload_words: int,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> UInt[Array, "c P"]:
    """Payloads of the chunks ``chunks`` of ``x - mean``.

    Words of a payload that no record covers are unspecified, and so is the whole payload ``skip``
    (a position in ``chunks``), if there is one.
    """
    module, options = _implementation(backend)
    static = {"payload_words": payload_words, "fmt": fmt}
    return module.compress(x, mean, order, tiles, chunks, noise, skip, **static, **options)


def decompress_accumulate(
    inputs: tuple[Input, ...],
    x: Float[Array, " d"],
    mean: Float[Array, " M"],
    mean_sum: Float[Array, " M"],
    order: Int[Array, "C m"],
    chunks: Int[Array, " c"],
    start: Int[Array, ""],
    into: Float[Array, "rows S"] | None = None,
    *,
    rows: int,
    dtype,
    divisor: int = 1,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> Float[Array, "rows S"]:
    """Sums at their owner: ``x - mean`` plus all inputs plus ``mean_sum``, over ``divisor``.

    Sums of the chunks ``chunks`` go to the rows ``start ..`` of the gradient, the owner's slice;
    the other arguments are those of `decompress_accumulate_recompress` and `decompress`.
    """
    module, options = _implementation(backend)
    return module.decompress_accumulate(
        inputs,
        x,
        mean,
        mean_sum,
        order,
        chunks,
        start,
        into,
        rows=rows,
        dtype=dtype,
        divisor=divisor,
        fmt=fmt,
        **options,
    )


def decompress_accumulate_recompress(
    inputs: tuple[Input, ...],
    x: Float[Array, " d"],
    mean: Float[Array, " M"],
    order: Int[Array, "C m"],
    tiles: Int[Array, "C T"],
    chunks: Int[Array, " c"],
    noise: UInt[Array, " 8"],
    *,
    payload_words: int,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> UInt[Array, "c P"]:
    """One hop: payloads of ``x - mean`` plus all inputs; the sums are never written to memory.

    Args:
      inputs: what arrived, each with tiles of its own.
      x: this worker's gradient.
      mean: what is subtracted from its super-groups.
      order: super-groups of every chunk.
      tiles: offsets and widths of the new payloads' records.
      chunks: which chunks are encoded; the i-th uses ``payloads[:, i]`` of every input.
      noise: the slot's randomness.
      payload_words: length of a new payload.
      fmt: the wire format.
      backend: which implementation runs.
    """
    module, options = _implementation(backend)
    return module.decompress_accumulate_recompress(
        inputs,
        x,
        mean,
        order,
        tiles,
        chunks,
        noise,
        payload_words=payload_words,
        fmt=fmt,
        **options,
    )


def decompress(
    payloads: UInt[Array, "c P"],
    mean_sum: Float[Array, " M"],
    order: Int[Array, "C m"],
    tiles: Int[Array, "C T"],
    chunks: Int[Array, " c"],
    into: Float[Array, "rows S"] | None = None,
    *,
    rows: int,
    dtype,
    divisor: int = 1,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> Float[Array, "rows S"]:
    """Finished sums: payload i decoded to chunk ``chunks[i]``, plus ``mean_sum``, over ``divisor``.

    Args:
      payloads: one per chunk.
      mean_sum: n times the mean that was subtracted, NaN for super-groups to be poisoned.
      order: super-groups of every chunk.
      tiles: offsets and widths of the records.
      chunks: which chunks the payloads are of.
      into: the result so far, written in place where XLA can; rows of other chunks keep its
        values, or are unspecified without it.
      rows: super-groups of the gradient, ceil(d / S).
      dtype: the result's dtype.
      divisor: what the sum is divided by.
      fmt: the wire format.
      backend: which implementation runs.
    """
    module, options = _implementation(backend)
    return module.decompress(
        payloads,
        mean_sum,
        order,
        tiles,
        chunks,
        into,
        rows=rows,
        dtype=dtype,
        divisor=divisor,
        fmt=fmt,
        **options,
    )


__all__ = [
    "NOISE_WORDS",
    "TILE_ROWS",
    "Backend",
    "Input",
    "Noise",
    "WireFormat",
    "compress",
    "decompress",
    "decompress_accumulate",
    "decompress_accumulate_recompress",
    "distortion",
    "mix",
    "pack_tiles",
    "resolve_backend",
    "seed_words",
    "slot_noise",
    "statistics",
    "unpack_tiles",
]
