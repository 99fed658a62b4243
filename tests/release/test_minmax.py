"""Min-max quantisation: levels, errors as Flash Communication and QSDP have them, halves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_replicas_equal, auto_mesh, gradient, low
from hlo import crossing_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.comparators import minmax_codec as minmax

KEY = jax.random.key(3)


def words(seed, size):
    return jax.random.bits(jax.random.key(seed), (size,), jnp.uint32)


def round_trip(x, bits, bucket_size, rounding, noise=None):
    options = {"bits": bits, "bucket_size": bucket_size, "rounding": rounding, "noise": noise}
    payload = minmax.encode(x, **options)
    assert payload.shape == (minmax.payload_words(x.size, bits, bucket_size),)
    return minmax.decode(payload, x.size, **options)


# --- The codec ------------------------------------------------------------------------------------


@given(
    bits=st.integers(1, 8),
    rounding=st.sampled_from(minmax.ROUNDINGS),
    scale=st.sampled_from([1e-33, 1e-20, 1.0, 1e20, 1e35]),
    middle=st.sampled_from([0.0, 3.0, -100.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_every_value_is_within_a_step(bits, rounding, scale, middle, seed):
    """Half a step to nearest; a bit more by what bf16 cuts of offset and step."""
    x = (jax.random.normal(jax.random.key(seed), (4, 32)) + middle) * scale
    noise = None if rounding == "nearest" else words(seed, x.size)
    found = np.asarray(round_trip(x.reshape(-1), bits, 32, rounding, noise), np.float64)
    x = np.asarray(x, np.float64)
    span = np.ptp(x, axis=1, keepdims=True) + np.abs(x).max(axis=1, keepdims=True) / 128
    step = 1.01 * span / (2**bits - 1)
    most = step if rounding == "stochastic" else (0.5 + 0.01) * step
    assert np.all(np.abs(found.reshape(x.shape) - x) <= most)


def test_values_on_the_grid_are_exact():
    x = jnp.arange(16.0)[::-1] - 4
    np.testing.assert_array_equal(round_trip(x, 4, 16, "nearest"), x)
    np.testing.assert_array_equal(round_trip(x, 4, 16, "stochastic", words(1, 16)), x)


@pytest.mark.parametrize("rounding", ["stochastic", "shift"])
def test_rounding_at_random_is_unbiased(rounding):
    """By a z-test over draws; to nearest it is not."""
    x, draws = jax.random.normal(jax.random.key(0), (256,)), 4000
    found = np.asarray(
        jax.vmap(lambda noise: round_trip(x, 3, 64, rounding, noise))(
            jax.random.bits(KEY, (draws, 256), jnp.uint32)
        ),
        np.float64,
    )
    z = (found.mean(0) - np.asarray(x)) / (found.std(0) / draws**0.5 + 1e-6)
    assert np.abs(z).max() < 5
    nearest = np.asarray(round_trip(x, 3, 64, "nearest"))
    assert np.abs((nearest - np.asarray(x)) / (found.std(0) / draws**0.5 + 1e-6)).max() > 20


def test_squared_errors_are_those_of_the_grid():
    """step²/12 to nearest and shifted, step²/6 at random."""
    x = jax.random.uniform(jax.random.key(1), (64 * 1024,))
    step = 1 / 31
    for rounding, share in (("nearest", 12), ("shift", 12), ("stochastic", 6)):
        error = round_trip(x, 5, 1024, rounding, words(2, x.size)) - x
        assert float(jnp.mean(error**2)) == pytest.approx(step**2 / share, rel=0.04)


# --- The method -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "expected"), [(8, 6.9e-5), (6, 1.1e-3), (5, 4.7e-3), (4, 2.0e-2), (3, 9.4e-2)]
)
@pytest.mark.parametrize("n", [4, 8])
def test_flash_communication_has_its_error_whatever_the_number_of_workers(bits, expected, n):
    """Gaussian gradients, groups of 128, over `Direct`: two roundings in all.

    The figures are of both roundings for everybody. An owner's own share is rounded once only.
    """
    x = jax.random.normal(jax.random.key(n), (n, 128 * 256))
    method = low(dq.comparators.MinMax.flash_communication(bits))
    one = partial(dq.psum, axis_name="data", method=method, topology=dq.Direct())
    found = jax.jit(jax.vmap(one, axis_name="data"))(x)
    assert_replicas_equal(found)
    share = (1 + (n - 1) / n) / 2
    assert float(dq.vnmse(found[0], x.sum(0))) == pytest.approx(share * expected, rel=0.06)


def test_presets_are_those_of_the_papers():
    flash = dq.comparators.MinMax.flash_communication(5)
    assert (flash.bits, flash.bucket_size, flash.rounding) == (5, 128, "nearest")
    gradients, weights = dq.comparators.MinMax.qsdp(), dq.comparators.MinMax.qsdp_weights(4)
    assert (gradients.bits, gradients.bucket_size, gradients.rounding) == (8, 1024, "stochastic")
    assert (weights.bits, weights.bucket_size, weights.rounding) == (4, 1024, "shift")
    leaf = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    for method, extra in ((flash, 32 / 128), (gradients, 32 / 1024)):
        cost = dq.explain(leaf, 8, method=method, topology=dq.Direct(), verbose=False)
        assert cost.bits_per_coord == pytest.approx(method.bits + extra)


HALVES = {
    "qsdp": low(dq.comparators.MinMax.qsdp(6)),
    "flash": low(dq.comparators.MinMax.flash_communication(5)),
    "weights": low(dq.comparators.MinMax.qsdp_weights(6)),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("topology", [dq.Direct(), dq.Ring(), dq.Direct(streams=2, stream_size=1)])
def test_halves_are_sums_of_slices_and_the_same_shards_for_all(name, topology):
    n, size, method = 4, 3000, HALVES[name]
    x = gradient(0, n, n * size)

    @jax.jit
    @partial(jax.shard_map, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P("data"))
    def halves(x):
        options = {"tiled": True, "method": method, "key": KEY}
        own = dq.psum_scatter(x[0], "data", topology=topology, **options)
        return own, dq.all_gather(own, "data", **options)[None]

    own, gathered = halves(x)
    exact = np.asarray(x, np.float64).sum(0)
    assert 1e-5 < float(dq.vnmse(own, exact)) < 0.02
    assert_replicas_equal(gathered)
    assert 1e-5 < float(dq.vnmse(gathered[0], own)) < 0.01


def test_wire_bits_of_halves_are_what_the_compiled_collectives_move():
    n, size = 4, 5000
    method = low(dq.comparators.MinMax(bits=3, bucket_size=64))
    maps = {"mesh": auto_mesh(n), "in_specs": P("data"), "out_specs": P("data")}
    x = jax.ShapeDtypeStruct((n, n * size), jnp.float32)

    def moved(f):
        text = jax.jit(jax.shard_map(f, **maps)).lower(x).compile().as_text()
        return crossing_bytes(text, (n,), 0)

    options = {"tiled": True, "method": method, "key": KEY}
    payload = 4 * minmax.payload_words(5056, 3, 64)  # 79 buckets
    for f, topology in (
        (lambda x: dq.psum_scatter(x[0], "data", topology=dq.Direct(), **options), dq.Direct()),
        (lambda x: dq.all_gather(x[0, :size], "data", **options), None),
    ):
        assert method.method.sharded_wire_bits(size, n, topology) == 8 * (n - 1) * payload
        assert payload * n <= moved(f) <= 2.1 * payload * n  # operands, results


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"bits": 9}, "bits=9 must be an integer from 1 to 8"),
        ({"bits": 4.5}, "bits=4.5"),
        ({"bucket_size": 30}, "bucket_size=30 must be a positive multiple of 4"),
        ({"rounding": "up"}, "rounding='up'"),
    ],
)
def test_wrong_options_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        dq.comparators.MinMax(**options)
