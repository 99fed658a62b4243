"""`coding_kernels.py --traffic`: the bytes that kernels move, against those of arrays that ran."""

from functools import partial

import coding_kernels
import jax
import jax.numpy as jnp
import pytest

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.core.compat import inner_jaxprs
from pallas_kernels import kernels


def traffic_of(**told):
    return coding_kernels.count_traffic(2**16, **told)


@pytest.mark.parametrize("dither", [False, True])
def test_bytes_of_a_hop_are_those_of_arrays_that_it_runs_on(dither):
    size, bits = 2**16, 5.0
    layout = coding_kernels.one_chunk(size, bits, dither)
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    stats = jnp.ones((1, layout.rows), jnp.float32)
    ran = coding_kernels.coding_calls(x, stats, layout, "jnp")
    arrived, sent = (ran[name]() for name in ("compress", "decompress-accumulate-recompress"))
    order, tiles, noise = 4 * size // 256, 4 * size // 256 // pk.TILE_ROWS, 4 * pk.NOISE_WORDS
    table = kernels.level_tables(layout.fmt)
    plan = order + 2 * tiles + (1 + dither) * noise + (table.nbytes if table.size > 1 else 0)
    hop = traffic_of(bits=bits, dither=dither)["decompress-accumulate-recompress"]
    assert hop.read * size == 2 * size + arrived.nbytes + plan
    assert hop.written * size == sent.nbytes
    assert hop.least * size == 2 * size + arrived.nbytes + sent.nbytes
    # Its parts, one after the other, move a sum in f32 four times and read the gradient once.
    assert 18 < hop.unfused - (arrived.nbytes + sent.nbytes) / size < 18.2


def test_fused_kernels_move_little_more_than_the_least():
    found = traffic_of(bits=4.0)
    for row in found.values():
        assert row.least <= row.read + row.written < 1.1 * row.least
        assert row.unfused is None or row.unfused > 2.5 * row.least


def test_an_all_reduce_runs_the_kernels_whose_bytes_are_counted():
    def names(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield str(equation.params["name"])
            for inner in inner_jaxprs(equation):
                yield from names(inner)

    method = dq.Compression(dq.DynamiQ(backend="interpret"), topology=dq.Ring(), min_bucket_bytes=0)
    reduce = jax.vmap(partial(dq.psum, axis_name="i", compression=method), axis_name="i")
    program = jax.make_jaxpr(reduce)(jnp.zeros((4, 2**16), jnp.bfloat16))
    ran = {name for name in names(program) if "deal" not in name}
    assert ran == {
        f"dynamiq_{name.replace('-', '_')}"
        for name in traffic_of(bits=5.0)
        if name != "decompress-accumulate"  # runs in `psum_scatter`
    }
