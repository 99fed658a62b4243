"""Launch parameters of the kernels: a small table by GPU generation.

``benchmarks/coding_kernels.py`` found them, over the choices.
"""

from typing import NamedTuple


class Tuning(NamedTuple):
    """How a kernel is launched."""

    num_warps: int
    num_stages: int = 1
    rows_per_program: int = 8
    """Super-groups per program of the statistics and of ``deal_count``, which makes blocks of them;
    blocks at once of ``deal_begin``; tiles per program of ``deal_width``."""


_HOPPER = {
    "statistics": Tuning(num_warps=4, rows_per_program=16),
    "deal_count": Tuning(num_warps=4, rows_per_program=128),
    "deal_begin": Tuning(num_warps=4, rows_per_program=1024),
    "deal_place": Tuning(num_warps=4),
    "deal_level": Tuning(num_warps=4),
    "deal_width": Tuning(num_warps=8, rows_per_program=1024),
    "compress": Tuning(num_warps=2),
    "decompress": Tuning(num_warps=1),
    "decompress_accumulate": Tuning(num_warps=2),
    "decompress_accumulate_recompress": Tuning(num_warps=2),
    "mx_encode": Tuning(num_warps=4),
    "mx_hop": Tuning(num_warps=4),
    "mx_sum": Tuning(num_warps=4),
    "mx_decode": Tuning(num_warps=4),
}


def tuning_for(kernel: str) -> Tuning:
    """The launch parameters of ``kernel``; one generation is known, others use its values."""
    return _HOPPER[kernel]
