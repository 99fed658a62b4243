"""`MXFP8`, `MXFP6` and `MXFP4`: sums of block floats hop by hop, with and without shared scales."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import (
    LOOP,
    TOPOLOGIES,
    assert_replicas_equal,
    assert_same_bits,
    small,
    vmapped,
)

import dynamiq_jax as dq
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.comparators import mx_codec as mx
from dynamiq_jax.comparators.mx import ScaleState
from dynamiq_jax.request.compression import as_compression

SIZE = 8 * 256 - 77
SHARED: dict[str, Any] = {"sum": "shared-scale"}
METHODS = {
    "e4m3": small(dq.comparators.MXFP8()),
    "e5m2": small(dq.comparators.MXFP8(element="e5m2")),
    "e3m2": small(dq.comparators.MXFP6()),
    "e2m3": small(dq.comparators.MXFP6(element="e2m3")),
    "e2m1": small(dq.comparators.MXFP4()),
    "e4m3, shared": small(dq.comparators.MXFP8(**SHARED)),
    "e5m2, shared": small(dq.comparators.MXFP8(element="e5m2", **SHARED)),
    "e3m2, shared": small(dq.comparators.MXFP6(**SHARED)),
    "e2m3, shared": small(dq.comparators.MXFP6(element="e2m3", **SHARED)),
    "e2m1, shared": small(dq.comparators.MXFP4(**SHARED)),
}
ROUTES = [(name, n) for name, (_, served) in TOPOLOGIES.items() for n in (4, 5, 8) if n in served]
CASES = [(list(METHODS)[3 * i % 10], *route) for i, route in enumerate(ROUTES)]
"""Every method, and every topology with every number of workers, at least once."""
DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def state_of(method, mu):
    """A state with the multiplier mu, for every worker the same."""
    return (ScaleState(jnp.float32(mu)),) if method.method.sum == "shared-scale" else ((),)


@functools.cache
def stateful(method, topology=LOOP):
    """jit of (tree with leading worker axis, state, key) -> every worker's (result, state)."""

    def one(tree, state, key):
        options = {"method": method, "topology": topology, "key": key}
        return dq.reduce(tree, "data", op="sum", state=state, **options)[:2]

    return jax.jit(jax.vmap(one, in_axes=(0, None, None), axis_name="data"))


def summed(method, topology, x, *, mu=0.25, key=None):
    return np.asarray(stateful(method, topology)(x, state_of(method, mu), key)[0])


def few_ones(seed, n, size):
    """f32[n, size] of -1, 0 and 1, four workers at most other than 0: every sum is an element."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (n, size)).astype(np.float32)
    return np.where(rng.permuted(np.arange(n)[:, None].repeat(size, 1), axis=0) < 4, x, 0)


@pytest.mark.parametrize(("name", "route", "n"), CASES)
def test_replicas_agree_exact_sums_are_exact_and_bad_blocks_are_bad(name, route, n):
    """With mu = 1/4, shared scales have room for sums of four ones, which elements hold exactly."""
    method, topology = METHODS[name], TOPOLOGIES[route][0]
    x = few_ones(n, n, SIZE)
    exact = np.broadcast_to(x.sum(axis=0), x.shape)
    np.testing.assert_array_equal(summed(method, topology, x), exact)

    normal = np.random.default_rng(1).standard_normal((n, SIZE)).astype(np.float32)
    clean = summed(method, topology, normal)
    assert_replicas_equal(clean)
    assert np.mean(clean[0] != normal.sum(axis=0)) > 0.5
    normal[0, 70], normal[1, 801], normal[2, 801], normal[3, -1] = np.nan, np.inf, -np.inf, np.inf
    found = summed(method, topology, normal)
    assert_replicas_equal(found)
    sick = np.isin(np.arange(SIZE) // 32, [70 // 32, 801 // 32, (SIZE - 1) // 32])
    np.testing.assert_array_equal(np.isnan(found[0]), sick)
    assert_same_bits(found[:, ~sick], clean[:, ~sick])


def cast(u, element):
    """Nearest elements, by ml_dtypes."""
    u = np.clip(u, -element.max_value, element.max_value)
    return u.astype(DTYPES[element.name]).astype(np.float32)


def scale_exponents(x, element):
    return np.floor(np.log2(np.max(np.abs(x), axis=-1, keepdims=True))) - element.emax


def encode_decode(x, element):
    """Values [..., 32] on the wire and back, with their own scale."""
    scale = np.exp2(scale_exponents(x, element)).astype(np.float32)
    return cast(x / scale, element) * scale


@functools.cache
def mixture(seed):
    return lognormal_mixture(jax.random.key(seed), 8, 512)


@pytest.mark.parametrize("name", METHODS)
def test_a_ring_adds_as_the_definitions_say(name):
    """An independent ring in numpy: the same bits."""
    method, n = METHODS[name], 8
    element = mx.ELEMENTS[method.method.element]
    x = np.asarray(mixture(2)).reshape(n, n, -1, 32)
    if method.method.sum == "shared-scale":
        mu = 0.25
        largest = scale_exponents(x, element).max(axis=0).astype(np.float32)
        u, encode = x * np.exp2(-largest) * mu, cast
    else:
        u, encode, largest, mu = x, encode_decode, np.float32(0), 1
    expected = []
    for c in range(n):
        partial = np.zeros_like(u[0, 0])
        for hop in range(1, n + 1):
            partial = encode(u[(c + hop) % n, c] + partial, element)
        expected.append(partial)
    expected = np.stack(expected) * np.exp2(largest) / mu
    found = summed(method, LOOP, x.reshape(n, -1))[0]
    np.testing.assert_array_equal(found, expected.reshape(-1))


def test_means_trees_and_several_axes():
    """Leaves of all dtypes; two axes as one, and as a hierarchy, whose states `init_state` fits."""
    n, rng = 4, np.random.default_rng(6)

    def leaf(shape, dtype):
        return jnp.asarray(few_ones(rng, n, int(np.prod(shape))).reshape(n, *shape), dtype)

    tree = {
        "f32": leaf((30, 20), jnp.float32),
        "bf16": leaf((601,), jnp.bfloat16),
        "f16": leaf((2, 300), jnp.float16),
        "small": leaf((7,), jnp.float32).at[:].add(2.0**-20),
        "int": leaf((700,), jnp.int32),
    }
    method = dq.Compression(
        dq.comparators.MXFP8(sum="shared-scale"), min_leaf_size=100, min_bucket_size=100
    )
    grid = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), tree)
    one_worker = jax.tree.map(lambda x: x[0], tree)

    def reduced(op, topology, workers):
        state = as_compression(method, topology).init_state(one_worker, workers)
        assert len(state) == 3
        state = tuple(ScaleState(jnp.float32(0.25)) for _ in state)

        def one(tree):
            axes = ("node", "gpu")
            options = {"op": op, "method": method, "topology": topology}
            return dq.reduce(tree, axes, state=state, **options)[:2]

        mapped = jax.jit(jax.vmap(jax.vmap(one, axis_name="gpu"), axis_name="node"))
        found, states = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped(grid))
        assert all(len(np.unique(state.mu)) == 1 for state in states)
        return found

    total = jax.tree.map(lambda x: jnp.broadcast_to(x.sum(axis=0).astype(x.dtype), x.shape), tree)
    assert_same_bits(reduced("sum", dq.Ring(), 4), total)
    mean = reduced("mean", dq.Hierarchical(outer=dq.Ring()), (2, 2))
    total["int"] = total["int"].astype(jnp.float32)  # as lax.pmean has it
    assert_same_bits(mean, jax.tree.map(lambda x: (x / 4).astype(x.dtype), total))


def room_for_leads(seed, n, size):
    """f32[n, size] whose blocks begin with 1, the largest: no sum of up to 4 can saturate."""
    x = np.random.default_rng(seed).uniform(-0.9, 0.9, (n, size)).astype(np.float32)
    x[:, ::32] = 1
    return x


def stochastic(name):
    request = METHODS[name]
    method = dataclasses.replace(request.method, rounding="stochastic")
    return dataclasses.replace(request, method=method)


def test_workers_round_independently_and_by_the_key():
    """x and -x, sent to others, leave something if one is rounded up and the other is not."""
    x = room_for_leads(9, 1, 4 * 1024)
    workers = np.concatenate([x, -x, 0 * x, 0 * x])
    first, again, other = (
        summed(stochastic("e2m1"), dq.Direct(), workers, key=jax.random.key(k)) for k in (1, 1, 2)
    )
    assert_same_bits(first, again)
    assert np.mean(first != other) > 0.2
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4])
    theirs = slice(2048, None)  # the chunks of those who have zeros
    u = np.abs(4 * x[0, theirs])
    below = np.searchsorted(grid, u, side="right") - 1
    p = (u - grid[below]) / np.append(np.diff(grid), 1)[below]
    odds = 2 * p * (1 - p)
    found = np.count_nonzero(first[0, theirs]) + np.count_nonzero(other[0, theirs])
    assert abs(found - 2 * odds.sum()) < 5 * np.sqrt(2 * np.sum(odds * (1 - odds)))


def test_without_a_key_shared_scales_seed_the_noise():
    method = stochastic("e3m2, shared")
    x = room_for_leads(10, 4, 512)
    first = summed(method, LOOP, x)
    assert_replicas_equal(first)
    assert_same_bits(first, summed(method, LOOP, x))
    assert np.mean(first[0] * 2 != summed(method, LOOP, x * 2)[0]) > 0.2


@pytest.mark.parametrize("name", ["e4m3, shared", "e2m1, shared"])
def test_multiplier_halves_on_saturation_and_grows_otherwise(name):
    method = METHODS[name]
    element, n = mx.ELEMENTS[method.method.element], 4
    x = np.random.default_rng(11).standard_normal((n, SIZE)).astype(np.float32)
    step = stateful(method)
    safe = element.max_value / (2 ** (element.emax + 1) * n)
    state = as_compression(method, LOOP).init_state(jnp.zeros(SIZE), n)
    assert state[0].mu == np.float32(safe)

    def next_mu(x, mu):
        after = np.asarray(step(x, state_of(method, mu), None)[1][0].mu)
        assert after.shape == (n,)
        assert np.all(after == after[0])
        return after[0]

    compiled_before = step._cache_size()
    assert next_mu(x, safe) == pytest.approx(safe * method.method.growth, rel=1e-6)
    assert next_mu(x, 0.8) == np.float32(0.4)
    # The threshold counts finished sums of finite blocks; NaN blocks are none.
    assert next_mu(np.where(np.arange(SIZE) == 40, np.nan, 0 * x), safe) > safe
    # Equal gradients that are all at the top fit at the safe multiplier, but just so.
    top = np.full((n, SIZE), element.max_value * 2 / 2**element.emax * 0.99, np.float32)
    assert next_mu(top, safe / 2) > safe / 2
    # Where nothing ever saturates it stops at what a single largest value needs.
    limit = element.max_value / 2**element.emax
    assert next_mu(np.zeros_like(x), limit) == np.float32(limit)
    assert step._cache_size() <= compiled_before + 1

    mu, seen = state[0].mu, []
    for _ in range(60):
        mu = next_mu(x, mu)
        seen.append(mu)
    assert step._cache_size() <= compiled_before + 1
    assert min(seen) >= safe


def test_without_state_shared_scales_use_the_safe_multiplier():
    method, n = METHODS["e4m3, shared"], 4
    x = np.random.default_rng(12).standard_normal((n, SIZE)).astype(np.float32)
    (safe,) = as_compression(method, LOOP).init_state(jnp.zeros(SIZE), n)
    found = vmapped(method)(x, None)
    assert_replicas_equal(found)
    # A division by a constant may become a product with its inverse.
    np.testing.assert_allclose(found, summed(method, LOOP, x, mu=safe.mu), rtol=1e-6)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="element='e2m1'; expected one of 'e4m3', 'e5m2'"):
        dq.comparators.MXFP8(element="e2m1")  # type: ignore
    with pytest.raises(ValueError, match="sum='psum'; expected one of"):
        dq.comparators.MXFP6(sum="psum")  # type: ignore
    with pytest.raises(ValueError, match="rounding='up'; expected one of"):
        dq.comparators.MXFP4(rounding="up")  # type: ignore
    with pytest.raises(ValueError, match="max_saturated=2 is not a fraction"):
        dq.comparators.MXFP4(max_saturated=2)
    with pytest.raises(ValueError, match="growth=0.5 must lie between 1 and 2"):
        dq.comparators.MXFP4(growth=0.5)
    with pytest.raises(ValueError, match="bucket_bytes=-1 must not be negative"):
        dq.Compression(dq.comparators.MXFP4(), bucket_bytes=-1)
