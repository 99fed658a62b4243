"""Kernel benchmark: what one device needs to encode, add and decode a whole gradient.

Every kernel of `pallas_kernels` processes all coordinates in one call, as a single chunk whose
super-groups are ordered as a plan orders them: widest first, those of one width as they lie in
memory. Calls are dispatched back-to-back and waited for once, so that their dispatch hides behind
the device's work.

Bytes moved are those an ideal kernel reads and writes once: the gradient, payload records,
per-super-group means and order, results. *Copy* is XLA's ``x + 1`` on the same bf16 array; its
bandwidth, measured in the same rounds, is the ceiling that the last column refers to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_jax.bench.timing import time_calls
from pallas_kernels import (
    TILE_ROWS,
    Backend,
    WireFormat,
    compress,
    decompress,
    decompress_accumulate_recompress,
    pack_tiles,
    resolve_backend,
    slot_noise,
    statistics,
)

STATISTICS_BITS = 32
"""Wire bits per super-group that the light all-reduce takes from the budget (two bf16)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One line of the report; ``copy_fraction`` is the share of copy bandwidth reached."""

    kernel: str
    widths: str
    time_us: float
    p10_us: float
    p90_us: float
    ns_per_coord: float
    gb_per_s: float
    copy_fraction: float
    moved_bytes: int
    coords: int
    backend: str


class _Case(NamedTuple):
    kernel: str
    widths: str
    call: Callable[[], Any]
    moved_bytes: int
    backend: str


def parse_coords(text: str) -> int:
    """The number meant by ``text``, for example ``2^28`` or ``1000000``.

    Raises:
      ValueError: not a positive whole number, or too many for 32-bit indices.
    """
    base, caret, exponent = text.replace("**", "^").partition("^")
    try:
        coords = int(base) ** int(exponent) if caret else int(base)
    except ValueError:
        raise ValueError(f"coords {text!r} is not a number: write for example 2^28") from None
    if not 1 <= coords < 2**31:
        raise ValueError(f"coords {text!r} is {coords}: pass 1 to 2^31 - 1 coordinates")
    return coords


def parse_widths(text: str) -> tuple[int, ...]:
    """The ascending widths meant by ``text``, for example ``2,4,8``.

    Raises:
      ValueError: not a list of different widths from 0 to 16.
    """
    try:
        widths = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"widths {text!r} is not a list: write for example 2,4,8") from None
    if len(set(widths)) < len(widths) or widths[0] < 0 or widths[-1] > 16:
        raise ValueError(f"widths {text!r}: pass different widths from 0 to 16")
    return widths


def mixed_widths(fmt: WireFormat, tiles: int, bits: float) -> np.ndarray:
    """Widths of ``tiles`` tiles, widest first, that use ``bits`` wire bits per coordinate.

    Shares are proportional to ``exp(-theta * words)``, the flattest mix that meets the budget.

    Args:
      fmt: its widths are mixed.
      tiles: how many to return.
      bits: the budget, all metadata included; without meaning for a format of one width.

    Raises:
      ValueError: no mix of these widths takes that many bits.
    """
    if len(fmt.widths) == 1:
        return np.full(tiles, fmt.widths[0])
    words = np.array([fmt.tile_words(width) for width in fmt.widths], float)
    to_bits = 32 / (TILE_ROWS * fmt.super_group_size)
    overhead = STATISTICS_BITS / fmt.super_group_size
    budget = (bits - overhead) / to_bits
    if not words.min() <= budget <= words.max():
        low, high = words.min() * to_bits + overhead, words.max() * to_bits + overhead
        raise ValueError(
            f"{bits:g} bits per coordinate cannot be met: widths {fmt.widths} take {low:g} to "
            f"{high:g} bits, metadata included"
        )

    def shares(theta: float) -> np.ndarray:
        weights = np.exp(-theta * (words - budget) / words.max())
        return weights / weights.sum()

    low, high = -500.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if shares(middle) @ words < budget else (middle, high)
    ends = np.round(np.cumsum(shares(high)[::-1]) * tiles).astype(int)
    return np.repeat(fmt.widths[::-1], np.diff(ends, prepend=0))


def bench_kernels(
    coords: int,
    *,
    bits: float,
    widths: tuple[int, ...],
    single_widths: bool,
    repeats: int,
    in_flight: int | None = None,
    backend: Backend | None = None,
) -> list[KernelRow]:
    """Times statistics and the three coding kernels on the default device.

    Args:
      coords: bf16 coordinates of the gradient.
      bits: wire bits per coordinate of the mix of ``widths``.
      widths: the widths in the mix.
      single_widths: whether to time also every width but 0 by itself.
      repeats: samples per kernel.
      in_flight: calls per sample; `None` takes 10 on a GPU, 1 on a CPU.
      backend: see `pallas_kernels`.

    Returns:
      A row per kernel, the copy first.
    """
    ran = resolve_backend(backend)
    # Magnitudes vary from super-group to super-group, as a gradient's do.
    key_size, key_value = jax.random.split(jax.random.key(0))
    rows = -(-coords // 256)
    scale = jnp.exp(1.2 * jax.random.normal(key_size, (rows, 1)))
    x = (scale * jax.random.normal(key_value, (rows, 256))).astype(jnp.bfloat16)
    x = x.reshape(-1)[:coords]

    formats = [(",".join(map(str, widths)), WireFormat(widths=widths))]
    if single_widths and len(widths) > 1:
        formats += [(str(w), WireFormat(widths=(w,))) for w in widths if w > 0]
    cases = [
        _Case("copy", "", partial(jax.jit(lambda x: x + 1), x), 2 * x.nbytes, "xla"),
        _statistics_case(x, ran),
    ]
    for label, fmt in formats:
        cases += _coding_cases(x, fmt, label, bits, ran)

    if in_flight is None:
        in_flight = 1 if jax.default_backend() == "cpu" else 10
    timings = time_calls([case.call for case in cases], repeats=repeats, in_flight=in_flight)
    copy_gb_per_s = cases[0].moved_bytes / timings[0].median_us / 1e3
    report = []
    for case, timing in zip(cases, timings, strict=True):
        gb_per_s = case.moved_bytes / timing.median_us / 1e3
        report.append(
            KernelRow(
                kernel=case.kernel,
                widths=case.widths,
                time_us=timing.median_us,
                p10_us=timing.p10_us,
                p90_us=timing.p90_us,
                ns_per_coord=timing.median_us * 1e3 / coords,
                gb_per_s=gb_per_s,
                copy_fraction=gb_per_s / copy_gb_per_s,
                moved_bytes=case.moved_bytes,
                coords=coords,
                backend=case.backend,
            )
        )
    return report


def _statistics_case(x: jax.Array, backend: Backend) -> _Case:
    size = WireFormat().super_group_size
    call = jax.jit(partial(statistics, super_group_size=size, backend=backend))
    moved_bytes = x.nbytes + 2 * 4 * math.ceil(x.size / size)
    return _Case("statistics", "", partial(call, x), moved_bytes, backend)


def _coding_cases(
    x: jax.Array, fmt: WireFormat, label: str, bits: float, backend: Backend
) -> list[_Case]:
    """The coding kernels at one format, its widths mixed to ``bits`` per coordinate."""
    tiles = math.ceil(x.size / (fmt.super_group_size * TILE_ROWS))
    width = mixed_widths(fmt, tiles, bits)
    words = np.array([fmt.tile_words(w) for w in range(17)])[width]
    payload_words = max(int(words.sum()), 4)
    packed = jnp.asarray(pack_tiles(np.cumsum(words) - words, width), jnp.int32)
    super_groups = tiles * TILE_ROWS
    # Which super-groups get which width is random; those of one width follow memory's order.
    shuffled = np.random.default_rng(0).permutation(super_groups)
    by_class = np.lexsort((shuffled, -np.repeat(width, TILE_ROWS)))
    order = jnp.asarray(shuffled[by_class], jnp.int32)[None]
    mean = jnp.zeros(super_groups, jnp.float32)
    first, second = slot_noise(jnp.arange(2, dtype=jnp.uint32), 2, fmt.rounding)

    static: dict[str, Any] = {"fmt": fmt, "backend": backend}
    sized = static | {"payload_words": payload_words}
    encode = jax.jit(partial(compress, **sized))
    hop = jax.jit(partial(decompress_accumulate_recompress, **sized))
    rows = math.ceil(x.size / fmt.super_group_size)
    decode = jax.jit(partial(decompress, rows=rows, dtype=x.dtype, **static))
    chunk = jnp.int32(0)
    payload = encode(x, mean, order, packed, chunk[None], first)

    plan_bytes = mean.nbytes + order.nbytes + packed.nbytes
    encode_args = (x, mean, order, packed, chunk[None], first)
    hop_args = (payload, x, mean, order, packed, packed, chunk, second)
    decode_args = (payload, mean, order, packed, chunk[None])
    code_bytes = payload.nbytes
    return [
        _Case(name, label, partial(call, *args), moved + plan_bytes, backend)
        for name, call, args, moved in (
            ("compress", encode, encode_args, x.nbytes + code_bytes),
            ("decompress", decode, decode_args, code_bytes + x.nbytes),
            ("decompress-accumulate-recompress", hop, hop_args, x.nbytes + 2 * code_bytes),
        )
    ]
