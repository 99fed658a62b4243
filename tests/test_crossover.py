"""Where compression starts to pay is measured, and the library takes what was written."""

import json
import sys
from pathlib import Path

import pytest
from cases import limits_of

import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq import crossover as taken

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from crossover import FILE, MIB, Point, crossover_bytes  # noqa: E402


def points(*pairs):
    return [Point(size * MIB, speedup) for size, speedup in pairs]


def test_it_lies_between_the_last_slower_size_and_the_next():
    assert crossover_bytes(points((32, 0.5), (64, 0.8), (128, 1.25))) == 91 * MIB  # 64 * sqrt(2)
    assert crossover_bytes(points((32, 1.1), (64, 0.8), (128, 1.25))) == 91 * MIB
    assert crossover_bytes(points((32, 0.9), (64, 1.0))) == 64 * MIB


def test_where_all_sizes_pay_it_is_the_smallest():
    assert crossover_bytes(points((32, 1.0), (64, 1.5))) == 32 * MIB


def test_where_the_largest_does_not_pay_it_is_unknown():
    with pytest.raises(ValueError, match=r"1\.25 times as long at 64 MiB, the largest size"):
        crossover_bytes(points((32, 1.1), (64, 0.8)))


def test_the_library_takes_what_was_written():
    written = json.loads(FILE.read_text())
    limits = limits_of(dq.DynamiQ(), 4, fast_links=True)
    assert limits.min_bucket_bytes == taken.PSUM_BYTES == written["psum_bytes"]
    assert taken.PSUM_SCATTER_BYTES == written["psum_scatter_bytes"] > taken.PSUM_BYTES
