"""Where compression starts to pay is measured, and the library takes what was written."""

import json
import warnings
from functools import partial

import jax
import pytest
from cases import limits_of
from crossover import FILE, MIB, Point, crossover_bytes  # noqa: E402

import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq import crossover as taken


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
    for entry in written:
        n = entry["n_devices"]
        limits = limits_of(dq.DynamiQ(), n, fast_links=True)
        assert limits.min_bucket_bytes == taken.psum_bytes(n) == entry["psum_bytes"]
        assert taken.psum_scatter_bytes(n) == entry["psum_scatter_bytes"] > taken.psum_bytes(n)


def test_the_limit_is_of_as_many_gpus_or_the_next_that_were_measured(monkeypatch):
    entries = [{"n_devices": n, "psum_bytes": n * MIB} for n in (2, 4, 8)]
    monkeypatch.setattr(taken, "_MEASURED", entries)
    assert [taken.psum_bytes(n) // MIB for n in (2, 3, 4, 6, 8, 16)] == [2, 4, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("collective", "least"),
    [("psum", taken.psum_bytes(4)), ("psum_scatter", taken.psum_scatter_bytes(4))],
)
def test_both_halves_have_the_limit_that_was_measured_for_them(monkeypatch, collective, least):
    """The smallest bucket that is compressed is sent by all_to_all, smaller ones by XLA's sum."""
    monkeypatch.setattr("dynamiq_jax.request.compression.fast_links", lambda: True)
    n, options = 4, {"tiled": True} if collective == "psum_scatter" else {}
    method = dq.Compression(dq.DynamiQ(backend="jnp"), topology=dq.Direct())
    reduce = partial(getattr(dq, collective), axis_name="data", method=method, **options)
    warnings.simplefilter("ignore")  # of large leaves that are not compressed
    native = {"psum": "psum", "psum_scatter": "reduce_scatter"}[collective]
    smallest = -(-least // (4 * n)) * n
    for size, compressed in ((smallest - n, False), (smallest, True)):
        x = jax.ShapeDtypeStruct((size,), "float32")
        text = str(jax.make_jaxpr(reduce, axis_env=[("data", n)])(x))
        assert ("all_to_all[" in text) == compressed
        assert (f"{native}[" in text) or compressed


def test_shards_are_gathered_compressed_where_the_whole_is_large_enough(monkeypatch):
    monkeypatch.setattr("dynamiq_jax.request.compression.fast_links", lambda: True)
    n, method = 4, dq.Compression(dq.DynamiQ(backend="jnp"))
    gather = partial(dq.all_gather, axis_name="data", tiled=True, method=method)
    smallest = -(-taken.psum_scatter_bytes(n) // (4 * n))
    for size, dtype in ((smallest - 1, "f32"), (smallest, "u32")):
        x = jax.ShapeDtypeStruct((size,), "float32")
        text = str(jax.make_jaxpr(gather, axis_env=[("data", n)])(x))
        assert ("u32[" in text) == (dtype == "u32")
