"""The kernels of compressed all-reduce: statistics, compress, decompress and the fused hops.

Each operation has two implementations that produce the same integers: `pallas_kernels.reference`
(jax.numpy, any device) and `pallas_kernels.kernels` (Pallas, NVIDIA GPUs), which Pallas lowers
through Triton or Mosaic GPU. ``backend`` names one: "jnp", "triton", "mosaic" (from Hopper and JAX
0.11 on), or "interpret" (the Triton kernels on Pallas' interpreter, for tests). ``None`` takes
the fastest that runs: "triton" where JAX's default backend is an NVIDIA GPU, "jnp" elsewhere. If
JAX has no Triton lowering of Pallas it takes "mosaic", or "jnp" for GPUs and formats that "mosaic"
does not support (`choose_backend`). A named backend is never replaced by another.

Operands that belong together are grouped: `Input`, `Source`, `Target`, `Result`. Shapes used
throughout (S = super-group size, R = `TILE_ROWS`): a gradient has d coordinates, and M = C*m
super-groups (those past its end read as zeros), which are dealt to C chunks of m super-groups and T
= m / R tiles each. A call encodes or decodes the c of them that ``chunks: int32[c]`` names, with
one payload ``uint32[P]`` each.
"""

from typing import Any

from jaxtyping import Array, Float, Int, UInt

from pallas_kernels import reference
from pallas_kernels.backend import (
    Backend,
    Choice,
    check_backend,
    choose_backend,
    needs_of_push,
    pushes,
    resolve_backend,
)
from pallas_kernels.format import (
    TILE_ROWS,
    Dealt,
    Input,
    Result,
    Source,
    Target,
    Upgrades,
    WireFormat,
    distortion,
    pack_tiles,
    unpack_tiles,
)
from pallas_kernels.hashing import NOISE_WORDS, Noise, mix, noise_from, seed_words, slot_noise


def _implementation(backend: Backend | None, fmt: WireFormat | None = None):
    """The module that implements ``backend`` and the keyword arguments it takes."""
    resolved = resolve_backend(backend, fmt)
    if resolved == "jnp":
        return reference, {}
    from pallas_kernels import kernels

    if resolved == "mosaic":
        from pallas_kernels.mosaic import Mosaic

        return kernels, {"lowering": Mosaic()}
    from pallas_kernels.triton import Triton

    return kernels, {"lowering": Triton(interpret=resolved == "interpret")}


def statistics(
    x: Float[Array, " d"], *, super_group_size: int = 256, backend: Backend | None = None
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Mean and squared norm of every super-group of ``x`` (rows = ceil(d / S)), both f32.

    The mean is finite exactly if all coordinates are. Sums are taken in f32 in an order that
    depends on the backend: values agree to rounding, not bit for bit.
    """
    module, options = _implementation(backend)
    return module.statistics(x, super_group_size=super_group_size, **options)


def deal(
    energy: Float[Array, "shards rows"],
    taken: Int[Array, "U F states"],
    upgrades: Upgrades,
    shape: tuple[int, int],
    *,
    backend: Backend | None = None,
) -> Dealt:
    """Sorts super-groups by energy, deals them to their shard's chunks, and widens their tiles.

    The sort is stable, by 256 steps of 1/4 octave below the largest energy of a shard
    (`pallas_kernels.format`). Rank q of a shard goes to its chunk q mod c, position q div c. If an
    upgrade no longer fits for all tiles of a level, the first tiles get it.

    Args:
      energy: finite and at least 0, for every super-group that holds coordinates.
      taken: the number of levels whose tiles have an upgrade, in consecutive states. The plan uses
        the last state that fits a budget. The final state comes twice.
      upgrades: the upgrades and F budgets.
      shape: chunks (C, a multiple of the shards) and super-groups of each (m), a multiple of
        `TILE_ROWS`. Padding of energy 0 follows a shard's super-groups; its numbers come after all
        others.
      backend: which implementation runs. All give the same bits.
    """
    module, options = _implementation(backend)
    return module.deal(energy, taken, upgrades, shape, **options)


def compress(
    source: Source,
    chunks: Int[Array, " c"],
    target: Target,
    skip: Int[Array, ""] | None = None,
    *,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> UInt[Array, "c P"]:
    """Payloads of the chunks ``chunks`` of ``x - mean``.

    Words of a payload outside of all records are unspecified. So is the whole payload ``skip`` (a
    position in ``chunks``), if it is given.
    """
    module, options = _implementation(backend, fmt)
    return module.compress(source, chunks, target, skip, fmt=fmt, **options)


def decompress_accumulate_recompress(
    inputs: tuple[Input, ...],
    source: Source,
    chunks: Int[Array, " c"],
    target: Target,
    *,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> UInt[Array, "c P"]:
    """One hop: payloads of ``x - mean`` plus all inputs; the sums are never written to memory.

    The i-th of ``chunks`` uses ``payloads[:, i]`` of every input.

    Raises:
      ValueError: an input of a format with dither has no ``noise``.
    """
    _check_noise([i.noise for i in inputs], fmt)
    module, options = _implementation(backend, fmt)
    return module.decompress_accumulate_recompress(
        inputs, source, chunks, target, fmt=fmt, **options
    )


def decompress_accumulate(
    inputs: tuple[Input, ...],
    source: Source,
    chunks: Int[Array, " c"],
    result: Result,
    *,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> Float[Array, "rows S"]:
    """Sums at their owner: ``x - mean`` plus all inputs plus ``mean_sum``, over ``divisor``.

    Super-group g of ``chunks`` goes to row ``g - start``, if the owner's slice has it; inputs are
    as for `decompress_accumulate_recompress`.

    Raises:
      ValueError: ``result`` has no ``start``, or an input of a format with dither no ``noise``.
    """
    if result.start is None:
        raise ValueError(
            "decompress_accumulate got result.start=None; pass the number of the super-group that "
            "is row 0 of the result, 0 for a whole gradient"
        )
    _check_noise([i.noise for i in inputs], fmt)
    module, options = _implementation(backend, fmt)
    return module.decompress_accumulate(inputs, source, chunks, result, fmt=fmt, **options)


def decompress(
    payloads: UInt[Array, "c P"],
    tiles: Int[Array, "C T"],
    chunks: Int[Array, " c"],
    result: Result,
    noise: UInt[Array, "c 8"] | None = None,
    *,
    fmt: WireFormat,
    backend: Backend | None = None,
) -> Float[Array, "rows S"]:
    """Finished sums: payload i decoded to chunk ``chunks[i]``, plus ``mean_sum``, over ``divisor``.

    ``noise`` is the randomness that each payload was encoded with, for formats with dither.

    Raises:
      ValueError: ``result`` has a ``start``, or a format with dither no ``noise``.
    """
    if result.start is not None:
        raise ValueError(
            "decompress got a result.start, but writes rows of a whole gradient; pass start=None"
        )
    module, options = _implementation(backend, fmt)
    _check_noise([noise], fmt)
    return module.decompress(payloads, tiles, chunks, result, noise, fmt=fmt, **options)


def exchange(tree: Any, axes: dict[str, int], *, to_all: bool) -> Any:
    """Sends the leaves of a tree to all workers by one kernel, which writes to their memory.

    It runs on the stream of all other kernels. So they wait for it, and not for copy engines.
    Workers are GPUs under `jax.shard_map`, of one process or of several of one host.

    Args:
      tree: arrays of any dtype but bool: [n, ...] for n workers, or [...] that all of them get.
      axes: the mesh axes whose workers exchange, the outermost first, and their sizes.
      to_all: whether all workers get the same, as by `lax.all_gather`; else worker i gets row i of
        each leaf, as by a tiled `lax.all_to_all`.

    Returns:
      The tree of what came, [n, ...]: row i is from worker i.

    Raises:
      NotImplementedError: the GPUs, JAX, the processes or the mesh do not support push kernels.
    """
    from pallas_kernels import push

    return push.exchange(tree, axes, to_all=to_all)


def all_reduce(
    source: Source,
    tiles: tuple[Int[Array, "n T"], ...],
    noise: UInt[Array, "n 8"] | UInt[Array, " 2"],
    words: tuple[int, ...],
    result: Result,
    axes: dict[str, int],
    *,
    fmt: WireFormat,
    even: bool = False,
) -> Float[Array, "rows S"]:
    """`compress`, an exchange, a hop, another exchange and `decompress` in one kernel.

    Worker i sums chunk i. The bits equal those that the separate kernels give. It runs where
    `exchange` does.

    Args:
      source: this worker's gradient.
      tiles: the records of gradients, and of sums.
      noise: row i is the randomness of worker i, for the gradients and for the sums it encodes. Or
        two words, this worker's part of the seed: then the kernel computes `slot_noise` of the sum
        of all workers' parts, with a rounding other than "correlated".
      words: lengths, in 32-bit words, of a payload of gradients, and of a payload of sums.
      result: all sums, without ``start`` and ``into``.
      axes: as for `exchange`.
      fmt: the wire format.
      even: whether super-groups are in their order, all chunks have equal tiles and ``mean_sum`` is
        zero. Then the kernel does without those arrays.

    Raises:
      NotImplementedError: the GPUs, JAX, the processes or the mesh do not support push kernels.
    """
    from pallas_kernels import push

    return push.all_reduce(source, tiles, noise, words, result, axes, fmt=fmt, even=even)


def _check_noise(noise: list, fmt: WireFormat) -> None:
    if fmt.dither and any(rows is None for rows in noise):
        raise ValueError(
            "a format with dither decodes with the noise of its encoders, and got noise=None; pass "
            "the rows of slot_noise that the payloads were encoded with"
        )


__all__ = [
    "NOISE_WORDS",
    "TILE_ROWS",
    "Backend",
    "Choice",
    "Dealt",
    "Input",
    "Noise",
    "Result",
    "Source",
    "Target",
    "Upgrades",
    "WireFormat",
    "all_reduce",
    "check_backend",
    "choose_backend",
    "compress",
    "deal",
    "decompress",
    "decompress_accumulate",
    "decompress_accumulate_recompress",
    "distortion",
    "mix",
    "noise_from",
    "exchange",
    "needs_of_push",
    "pack_tiles",
    "pushes",
    "resolve_backend",
    "seed_words",
    "slot_noise",
    "statistics",
    "unpack_tiles",
]
