"""The other papers' methods: each against its definition in numpy, and what all promise alike.

`test_every_method` has trees, wire bits and keys of all rows, `test_nonfinite` what is not finite
and extreme magnitudes.
"""

import functools
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from cases import (
    EVERY_METHOD,
    LOOP,
    ONE_OF_A_KIND,
    OVER,
    SMALL,
    TOPOLOGIES,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    bias,
    first_state,
    gradient,
    loss_fn,
    low,
    problem,
    relative_error,
    small,
    stepper,
    vmapped,
    wire_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_wire_bytes import moved_bits

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.comparators import hadamard, lanes, sidco
from dynamiq_jax.comparators import minmax_codec as minmax
from dynamiq_jax.comparators import mx_codec as mx
from dynamiq_jax.comparators import thc_codec as thc
from dynamiq_jax.comparators.local_error import LocalError
from dynamiq_jax.comparators.marsit import workers_in
from dynamiq_jax.comparators.mx import ScaleState
from dynamiq_jax.comparators.native import MatrixMethod
from dynamiq_jax.comparators.powersgd import orthonormal
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import Call, Outcome
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.optax import liec
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(1)
of = dq.comparators
THC = functools.partial(of.THC, piece_size=1024)


def memory(method):
    return small(dq.ErrorFeedback(method))


METHODS = {
    name: row.method
    for name, row in EVERY_METHOD.items()
    if not name.startswith(("dynamiq", "bf16", "f32"))
} | {
    "mxfp4, memory": memory(of.MXFP4()),
    "omnireduce, union": small(of.OmniReduce(select="union", block_size=64)),
    "powersgd, memory, f32": memory(of.PowerSGD(rank=5, wire="f32")),
}
NATIVE = [name for name in METHODS if METHODS[name].method.native_by_default]
MEMORY = [name for name in METHODS if getattr(METHODS[name].method, "kind", "") == "ef14"]
SOME = [name for name in METHODS if name in (*ONE_OF_A_KIND, *MEMORY)]
MATRICES = ("powersgd", "arc top-k")


def route(name):
    return None if name in NATIVE else LOOP


def draw(seed, n, name="", size=3000):
    """Blocks of 64 of very different magnitude, distinct on each worker; matrices if need be."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(rng.standard_normal(size // 64 + 1)), 64)[:size]
    x = jnp.asarray(rng.standard_normal((n, size)) * scale, jnp.float32)
    return x.reshape(n, 50, -1) if name.startswith(MATRICES) else x


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("mean", [False, True])
def test_what_is_not_delivered_is_in_memory(name, mean):
    """Delivered and remembered make up the inputs; averages of many steps are accurate."""
    n, steps, method = 4, 12, METHODS[name]
    x = draw(2, n, name)
    factor, exact = n if mean else 1, total_of(x)
    state = first_state(method, x, n, route(name))
    run = stepper(method, route(name), mean=mean)
    once, sizes = [], 0.0
    for _ in range(steps):
        sizes = sizes + np.sum(np.abs(x + state[0].residual.reshape(x.shape)), axis=0)
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        once.append(factor * np.asarray(result[0], np.float64))
    assert run._cache_size() == 1
    # All that is lost is rounding: of n - 1 sums to bf16, or of f32 arithmetic, relative to norms.
    in_f32 = name.startswith(("thc", "mxfp4", "minmax")) or "f32" in name
    bound = 3e-6 * np.max(sizes) if in_f32 else (n - 1) * 2.0**-9 * sizes
    bound = np.max(bound) if name.startswith("powersgd") else bound  # of factors of the matrix
    left = total_of(state[0].residual).reshape(exact.shape)
    gap = sum(once) + left - steps * exact
    assert np.all(np.abs(gap) <= bound + 1e-5)
    assert np.mean(once[0] != once[1]) > 0.2
    assert relative_error(sum(once) / steps, exact) < relative_error(once[0], exact) / 2


UNBIASED = {
    "mxfp8": (of.MXFP8(rounding="stochastic"), LOOP),
    "mxfp6": (of.MXFP6(rounding="stochastic"), LOOP),
    "mxfp4": (of.MXFP4(rounding="stochastic"), LOOP),
    "mxfp4, shared": (of.MXFP4(rounding="stochastic", sum="shared-scale"), LOOP),
    "minmax": (of.MinMax(), LOOP),
    "minmax, direct": (of.MinMax(bits=2), dq.Direct()),
    "qsgd": (of.GlobalQSGD(piece_size=128), LOOP),
    "qsgd, exponential": (of.GlobalQSGD(levels="exponential", piece_size=256), dq.Direct()),
    "thc": (of.THC(p=1e-9, table=False, piece_size=512), None),
    "thc, two-shot": (of.THC(p=1e-9, table=False, form="two-shot", piece_size=512), None),
    "perm-k": (of.PermK(), None),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_rounding_at_random_is_unbiased(name):
    """See `cases.Bias`: a bias of 2% of a step scores 5 or more in blocks of 128 coordinates.

    Blocks of 32 begin with 1, the largest value, so that no sum of up to 4 saturates. `MinMax`'s
    shift is one number for a bucket, which the formula of its codec has.
    """
    method, topology = UNBIASED[name]
    n, size, samples = 4, 8 * 128, 400
    x = np.random.default_rng(7).uniform(-0.9, 0.9, (n, size)).astype(np.float32)
    x[:, ::32] = 1
    exact = total_of(x)
    run = stepper(small(method), topology)
    state = first_state(small(method), x, n, topology)
    total, squared = np.zeros((2, size))
    for key in jax.random.split(jax.random.key(8), samples):
        error = np.asarray(run(x, key, state)[0][0], np.float64) - exact
        total, squared = total + error, squared + error**2
    found = bias(total, squared, samples, exact, blocks=8)
    assert found.worst_score() < 5
    assert abs(np.mean(found.spread) - 1) < 0.25


@pytest.mark.parametrize("name", SOME)
def test_devices_compute_what_vmap_does(name):
    """Three steps in one program with check_vma=True, as in a training loop.

    XLA sums bf16 in f32 on devices of a CPU, and `vmap` does in bf16.
    """
    n, method = 2, METHODS[name]
    x = draw(4, n, name)

    def steps(x):
        x = x[0]
        axis = Axis(("data",))
        state = axis.to_varying(as_compression(method, route(name)).init_state(x, n))
        options = {"op": "sum", "method": method, "topology": route(name), "key": KEY}

        def step(state, _):
            total, state, _ = dq.reduce(x, "data", state=state, **options)
            return axis.to_varying(state), total

        return lax.scan(step, state, length=3)[1]

    mapped = jax.shard_map(steps, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P())
    found = jax.jit(mapped)(x)
    state = first_state(method, x, n, route(name))
    for i in range(3):
        expected, state = stepper(method, route(name))(x, KEY, state)
        assert relative_error(found[i], expected[0]) < 1e-4


@pytest.mark.parametrize("name", SOME)
def test_the_derivative_is_the_exact_sum_and_that_of_the_next_state_is_zero(name):
    n, method = 2, METHODS[name]
    x, t = draw(5, n, name), draw(6, n, name)

    def one(x, t, state):
        def total(x):
            options = {"method": method, "topology": route(name), "state": state}
            return dq.reduce(x, "data", op="sum", **options)[:2]

        return jax.jvp(total, (x,), (t,))[1]

    run = jax.jit(jax.vmap(one, axis_name="data"))
    tangent, states = run(x, t, first_state(method, x, n, route(name)))
    np.testing.assert_allclose(tangent[0], total_of(t), rtol=1e-5, atol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states) if leaf.dtype == jnp.float32)


@pytest.mark.parametrize("name", NATIVE)
def test_topologies_and_missing_states_are_refused(name):
    method, x = METHODS[name], jnp.zeros((2, 40, 60))

    def run(**options):
        reduce = functools.partial(dq.psum, axis_name="data", method=method, **options)
        return jax.eval_shape(jax.vmap(reduce, axis_name="data"), x)

    with pytest.raises(NotImplementedError, match=r"topology=Ring\(.*leave topology=None"):
        run(topology=dq.Ring())
    if method.method.needs_state:
        with pytest.raises(ValueError, match="needs a state"):
            run()
    else:
        assert run().shape == x.shape


def test_every_comparator_is_here():
    rows = [row.method.method for row in EVERY_METHOD.values()]
    classes = {type(getattr(method, "method", method)).__name__ for method in rows}
    assert set(of.__all__) <= classes


# --- Packed words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "n"), [(1, 3), (15, 2), (30, 8), (30, 9), (255, 257)])
@pytest.mark.parametrize("m", [1, 1000])
def test_packed_lanes_add_up_exactly(most, n, m):
    width = (n * most).bit_length()
    values = np.random.default_rng(m).integers(0, most + 1, (n, 2, m)).astype(np.uint32)
    values[:, :, ::3] = most  # lanes at their maximum between others
    words = lanes.pack_lanes(jnp.asarray(values), width)
    assert words.shape == (n, 2, -(-m // (32 // width)))
    total = np.add.reduce(np.asarray(words), axis=0, dtype=np.uint32)
    total = lanes.unpack_lanes(jnp.asarray(total), m, width)
    np.testing.assert_array_equal(total, values.sum(axis=0))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 9, 12, 31])
@pytest.mark.parametrize("m", [33, 256])
def test_fields_pack_without_gaps(bits, m):
    fields = np.random.default_rng(bits).integers(0, 1 << bits, (3, m)).astype(np.uint32)
    words = lanes.pack_bits(jnp.asarray(fields), bits)
    assert words.shape == (3, lanes.bit_words(m, bits))
    assert m % 32 or words.shape[1] == m * bits // 32
    np.testing.assert_array_equal(lanes.unpack_bits(words, m, bits), fields)
    with pytest.raises(ValueError, match=f"words, but {m} fields of {bits} bits take"):
        lanes.unpack_bits(words[:, 1:], m, bits)


# --- Codecs against formulas in numpy -------------------------------------------------------------

FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
every_element = pytest.mark.parametrize("name", FLOATS)


def largest(name):
    """The largest finite value of a small float."""
    return float(ml_dtypes.finfo(FLOATS[name]).max)


def exponent(name):
    """The exponent of `largest`."""
    return math.frexp(largest(name))[1] - 1


def mx_values(codes, name):
    """The values of codes, f32."""
    return np.asarray(codes).astype(np.uint8).view(FLOATS[name]).astype(np.float32)


def mx_cast(u, name):
    """The nearest elements after clipping, as the small float."""
    return np.clip(u, -largest(name), largest(name)).astype(FLOATS[name])


def mx_scale(x, name):
    """log2 of the scales of blocks [..., 32], with a last axis of 1."""
    return np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1] - 1 - exponent(name)


def mx_round_trip(x, name):
    """Values on the wire and back, by blocks with scales of their own."""
    blocks = np.asarray(x, np.float64).reshape(-1, 32)
    scale = np.exp2(mx_scale(blocks, name))
    return (mx_cast(blocks / scale, name).astype(np.float64) * scale).reshape(np.shape(x))


@every_element
def test_mx_codes_are_those_of_ml_dtypes(name):
    """Every code decodes; ties, neighbours, all exponents and dense mantissas round to nearest."""
    element = mx.ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint32)
    found, values = np.asarray(mx.dequantize(jnp.asarray(codes), element)), mx_values(codes, name)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(np.isnan(found), ~number)
    assert_same_bits(found[number], values[number])  # infinity and -0 in their places
    top = np.sort(values[np.isfinite(values) & (codes >> (element.bits - 1) == 0)])
    middle = (top[1:] + top[:-1]) / 2
    points = np.concatenate([top, middle, [1.5 * top[-1] - 0.5 * top[-2], np.inf]])
    points = points.astype(np.float32)
    everywhere = np.arange(0, 0x7F800000, 65521, dtype=np.uint32).view(np.float32)
    u = np.concatenate([
        points, *(np.nextafter(points, np.float32(side)) for side in (0, np.inf)), everywhere,
        np.linspace(0, 1.2 * top[-1], 30011, dtype=np.float32),
        np.linspace(0, 4 * 2.0**element.emin, 30011, dtype=np.float32),
    ])  # fmt: skip
    u = np.concatenate([u, -u])
    found = mx.quantize(jnp.asarray(u), element, None)
    np.testing.assert_array_equal(found, mx_cast(u, name).view(np.uint8))


@every_element
def test_mx_noise_rounds_up_where_fraction_and_noise_reach_one(name):
    """Also below the smallest element: 2^-30 of it is rounded up by 4 words of 2^32."""
    element = mx.ELEMENTS[name]
    values = mx_values(np.arange(element.max_code + 1), name).astype(np.float64)
    below, gap = np.arange(element.max_code), np.diff(values)
    for eighth in range(1, 8):  # eighths of each gap are f32 numbers; so are the words to compare
        u = jnp.asarray(values[:-1] + gap * eighth / 8, jnp.float32)
        threshold = (8 - eighth) << 29
        for word, up in ((threshold, 1), (threshold - 1, 0), (0, 0), (2**32 - 1, 1)):
            noise = jnp.full(u.shape, word, jnp.uint32)
            np.testing.assert_array_equal(mx.quantize(u, element, noise), below + up)
            mirrored = below + up + (1 << element.bits - 1)
            np.testing.assert_array_equal(mx.quantize(-u, element, ~noise), mirrored)
    for power, words in ((30, 4), (32, 1), (33, 0), (140, 0)):
        u = jnp.full(8, values[1] * 2.0**-power, jnp.float32)
        noise = jnp.uint32(2**32 - 1) - jnp.arange(8, dtype=jnp.uint32)
        np.testing.assert_array_equal(mx.quantize(u, element, noise), np.arange(8) < words)


@every_element
def test_mx_payloads_are_scale_codes_and_nearest_elements(name):
    """Powers of two and their neighbours at the top; zeros; blocks that are not finite."""
    element, rng = mx.ELEMENTS[name], np.random.default_rng(4)
    power = np.exp2(np.arange(-110, 110, 10).astype(np.float64)).astype(np.float32)
    tops = np.concatenate([
        power, np.nextafter(power, np.float32(0)), np.nextafter(power, np.float32(np.inf)),
    ])  # fmt: skip
    x = rng.uniform(-1, 1, (-(-tops.size // 4) * 4 + 4, 32)).astype(np.float32)
    x[: tops.size] *= tops[:, None]
    x[np.arange(tops.size), 17] = tops * rng.choice([-1, 1], tops.size)
    x[-1], x[-2, 31], x[-3, 0], x[-4, 7] = 0, np.nan, np.inf, -np.inf
    payload = mx.encode(jnp.asarray(x.reshape(-1)), element)
    assert payload.shape == (mx.payload_words(x.size, element),)
    at = x.shape[0] // 4
    scales = np.asarray(lanes.unpack_bits(payload[:at], x.shape[0], 8))
    codes = np.asarray(lanes.unpack_bits(payload[at:], x.size, element.bits)).reshape(x.shape)
    sound = np.all(np.isfinite(x), axis=1)
    fine = sound & np.any(x != 0, axis=1)
    np.testing.assert_array_equal(scales[fine], mx_scale(x[fine], name)[:, 0] + 127)
    np.testing.assert_array_equal(scales[-4:], [255, 255, 255, 0])
    unit = np.exp2(scales[fine] - 127.0)[:, None]
    np.testing.assert_array_equal(codes[fine], mx_cast(x[fine] / unit, name).view(np.uint8))
    back = np.asarray(mx.decode(payload, x.size, element)).reshape(x.shape)
    np.testing.assert_array_equal(back[fine], mx_round_trip(x[fine], name))
    np.testing.assert_array_equal(back[-1], 0)
    assert np.all(np.isnan(back[~sound]))


@every_element
def test_mx_elements_times_scales_come_back_bit_for_bit(name):
    """Every finite code under every kind of scale, where v or the scale is subnormal too.

    Subnormal values that are no elements are rounded and not flushed.
    """
    element = mx.ELEMENTS[name]
    codes = np.arange(element.max_code + 1)
    codes = np.concatenate([codes, codes + (1 << element.bits - 1)])
    codes = np.resize(codes, -(-codes.size // 31) * 31).reshape(-1, 31)
    codes = np.pad(codes, ((0, 0), (0, 1)), constant_values=element.max_code)
    power = np.array([-127, -126, -120, -64, -1, 0, 1, 64, 127 - element.emax])
    x = mx_values(codes, name) * np.exp2(power.astype(np.float64))[:, None, None]
    x = jnp.asarray(x.reshape(-1), jnp.float32)
    assert np.any((np.abs(np.asarray(x)) < 2.0**-126) & (np.asarray(x) != 0))
    found = np.asarray(mx.scale_codes(x, element)).reshape(power.size, -1)
    np.testing.assert_array_equal(found, np.broadcast_to(power[:, None] + 127, found.shape))
    noise = jnp.asarray(np.random.default_rng(3).integers(0, 2**32, x.size, dtype=np.uint32))
    for word in (None, noise):
        found = mx.decode(mx.encode(x, element, word), x.size, element)
        assert_same_bits(np.asarray(found), np.asarray(x))
    if name == "e5m2":  # in units of 2^-127 = 2^22 smallest subnormals of f32
        x = np.arange(1, 65, dtype=np.float64) * 0.37 * 2.0**-131
        expected = (mx_cast(x * 2.0**127, name).astype(np.float64) * 2.0**-127).astype(np.float32)
        assert np.all(expected > 0)
        found = mx.decode(mx.encode(jnp.asarray(x, jnp.float32), element), 64, element)
        assert_same_bits(np.asarray(found), expected)


def as_bf16(x, side):
    """The next bf16 number towards ``side``, as f32."""
    near = x.astype(ml_dtypes.bfloat16)
    beyond = (near.astype(np.float32) - x) * side < 0
    step = np.where(near.view(np.uint16) >> 15 == (side < 0), 1, -1)  # in the order of magnitudes
    moved = (near.view(np.uint16) + np.where(beyond, step, 0)).astype(np.uint16)
    return moved.view(ml_dtypes.bfloat16).astype(np.float32)


def minmax_grid(x, bits):
    """Offsets and steps of buckets [B, G], f32[B, 1] each."""
    least = x.min(axis=1, keepdims=True)
    low = as_bf16(least, -1)
    return low, as_bf16((x.max(axis=1, keepdims=True) - low) / np.float32(2**bits - 1), 1)


@given(
    bits=st.integers(1, 8),
    rounding=st.sampled_from(["nearest", "stochastic", "shift"]),
    scale=st.sampled_from([1e-30, 1e-20, 1.0, 1e20, 1e35]),
    middle=st.sampled_from([0.0, 3.0, -100.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_minmax_codes_are_levels_between_enclosing_extremes(bits, rounding, scale, middle, seed):
    """Level c of the grid, which a shift moves by as much as the decoder knows.

    Uniform noise rounds up with the probability of the fraction; a shift is uniform, too, and the
    nearest level of the shifted grid is at most half a step away.
    """
    rng, (buckets, size) = np.random.default_rng(seed), (6, 32)
    x = ((rng.standard_normal((buckets, size)) + middle) * scale).astype(np.float32)
    words = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    noise = None if rounding == "nearest" else jnp.asarray(words)
    options = {"bits": bits, "bucket_size": size, "rounding": rounding}
    payload = minmax.encode(jnp.asarray(x.reshape(-1)), noise, **options)
    assert payload.shape == (minmax.payload_words(x.size, bits, size),)
    low, step = minmax_grid(x, bits)
    heads = np.concatenate([low, step], axis=1).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(payload[:buckets], heads)
    draws = words.reshape(x.shape) / 2.0**32
    shift = (np.floor(draws[:, :1] * 2.0 ** (15 - bits)) + 0.5) * 2.0 ** (bits - 15)
    share = {"nearest": 0.5, "stochastic": draws, "shift": shift}[rounding]
    exact = (x.astype(np.float64) - low) / step + share
    codes = np.asarray(lanes.unpack_bits(payload[buckets:], x.size, bits)).reshape(x.shape)
    expected = np.clip(np.floor(exact), 0, 2**bits - 1)
    clear = np.abs(exact - np.round(exact)) > 1e-4
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(codes[clear], expected[clear])
    levels = codes + (0.5 - shift if rounding == "shift" else 0)
    found = np.asarray(minmax.decode(payload, noise, x.size, **options)).reshape(x.shape)
    np.testing.assert_allclose(found, low + levels * step, rtol=1e-6, atol=1e-6 * np.abs(x).max())
    assert np.all(np.abs(found - x) <= (1 if rounding == "stochastic" else 0.5) * step * 1.001)


RELEASED = {
    (4, 30, 1 / 32): [0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30],
    (4, 42, 1 / 1024): [0, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 42],
    (3, 42, 1 / 1024): [0, 10, 15, 19, 23, 27, 32, 42],
}
"""THC's tables in its authors' code, by (bits, granularity, p)."""
TABLES = {
    "uniform16, 1/32": ({"table": False, "p": 1 / 32}, thc.uniform_table(16)),
    "g30": ({"p": 1 / 32}, np.array(RELEASED[4, 30, 1 / 32])),
    "g42": ({"granularity": 42, "p": 1 / 1024}, np.array(RELEASED[4, 42, 1 / 1024])),
    "uniform64": ({"table": False, "bits": 6, "p": 1 / 1024}, thc.uniform_table(64)),
}
SEED = jnp.array([7, 8], jnp.uint32)


def on_normal(table, threshold):
    """Mean squared errors on N(0, 1) of rounding at random and of clipping: the midpoint rule."""
    z = (np.arange(100_000) + 0.5) / 100_000 * 20 - 10
    mass = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * (20 / 100_000)
    nodes = threshold * (2 * np.asarray(table) / table[-1] - 1)
    inside = np.clip(z, -threshold, threshold)
    k = np.clip(np.searchsorted(nodes, inside), 1, len(nodes) - 1)
    rounding = (nodes[k] - inside) * (inside - nodes[k - 1])
    return np.sum(mass * rounding), np.sum(mass * (z - inside) ** 2)


def test_thc_tables_are_the_released_ones_and_the_best():
    """Against all symmetric tables of little granularity; one bit has the two outer nodes."""
    for key, table in RELEASED.items():
        assert thc.optimal_table(*key).tolist() == table
    assert thc.optimal_table(1, 5, 0.1).tolist() == [0, 5]
    assert thc.clip_threshold(1 / 32) == pytest.approx(2.15387, abs=5e-6)
    assert thc.clip_threshold(1 / 1024) == pytest.approx(3.29719, abs=5e-6)
    for (bits, g), p in itertools.product([(2, 8), (2, 11), (3, 7), (3, 12)], [1 / 4, 1e-6]):
        threshold, errors = thc.clip_threshold(p), {}
        for chosen in itertools.combinations(range(g // 2 + 1, g), 2 ** (bits - 1) - 1):
            half = [*chosen, g]
            table = tuple([g - t for t in reversed(half)] + half)
            errors[table] = on_normal(np.array(table), threshold)[0]
        found = tuple(thc.optimal_table(bits, g, p).tolist())
        assert errors[found] <= min(errors.values()) * (1 + 1e-6)


@pytest.mark.parametrize("code", TABLES)
def test_thc_indices_are_nodes_beside_z_and_a_small_word_rounds_up(code):
    """And all beyond the threshold is clipped, of nodes T (2 t / g - 1)."""
    options, table = TABLES[code]
    method, rng = dq.comparators.THC(**options), np.random.default_rng(1)
    np.testing.assert_array_equal(method.integers, table)
    threshold, g = thc.clip_threshold(method.p), int(table[-1])
    z = np.concatenate([2 * rng.standard_normal(50_000), [1e30, -1e30, np.inf, -np.inf]])
    z, words = z.astype(np.float32), rng.integers(0, 2**32, z.size, dtype=np.uint32)
    found = np.asarray(thc.quantize(jnp.asarray(z), table, threshold, jnp.asarray(words)))
    place = (np.clip(z.astype(np.float64), -threshold, threshold) + threshold) * g / (2 * threshold)
    below = np.clip(np.searchsorted(table, place, side="right") - 1, 0, len(table) - 2)
    fraction = (place - table[below]) / (table[below + 1] - table[below])
    clear = np.abs(words / 2.0**32 - fraction) > 1e-5
    np.testing.assert_array_equal(found[clear], (below + (words / 2.0**32 < fraction))[clear])
    np.testing.assert_array_equal(found[-4:], [len(table) - 1, 0, len(table) - 1, 0])
    np.testing.assert_array_equal(thc.lookup(jnp.asarray(found), table), table[found])
    for n in (1, 7, 8192):
        total = np.array([0, n * g // 2, n * g, n * g // 3 + 1], np.uint32)
        mean = thc.dequantize_sum(jnp.asarray(total), n, g, threshold)
        expected = (total / n - g / 2) * 2 * threshold / g
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 512])
def test_rotation_is_a_hadamard_matrix_with_shared_signs(length):
    eye = jnp.eye(length)
    matrix = np.asarray(jax.vmap(hadamard.rotate, (0, None))(eye, SEED), np.float64).T
    matrix = matrix * np.sqrt(length)
    row, column = np.indices((length, length))
    parity = np.vectorize(lambda bits: bits.bit_count() % 2)((row & column).astype(object))
    np.testing.assert_allclose(matrix, (1 - 2 * parity.astype(int)) * matrix[0], atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix[0]), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "piece_size", "shape"),
    [
        (1 << 17, 1 << 17, (1, 1 << 17)),
        (1 << 20, 1 << 17, (8, 1 << 17)),
        ((1 << 17) + 1, 1 << 17, (17, 1 << 13)),
        (1000, 1 << 17, (1, 1024)),
        (100, 64, (2, 64)),
        (1, 1 << 17, (1, 1)),
    ],
)
def test_pieces(size, piece_size, shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))
    pieces = hadamard.cut(x, piece_size=piece_size)
    assert pieces.shape == shape == hadamard.piece_shape(size, piece_size=piece_size)
    np.testing.assert_array_equal(hadamard.join(pieces, size), x)
    assert not np.any(pieces.reshape(-1)[size:])


# --- Sums hop by hop ------------------------------------------------------------------------------


def minmax_round_trip(bits):
    def round_trip(x):
        low, step = minmax_grid(x.reshape(-1, 128).astype(np.float32), bits)
        return (low + np.round((x.reshape(-1, 128) - low) / step) * step).reshape(x.shape)

    return round_trip


NEAREST = {
    "minmax": (of.MinMax(bits=5, rounding="nearest"), minmax_round_trip(5), 0.002),
    **{
        f"{name}, {kind}": (getattr(of, f"MXFP{mx.ELEMENTS[name].bits}")(element=name, sum=kind),
                            functools.partial(mx_round_trip, name=name), 0)
        for name in FLOATS for kind in ("recompress", "shared-scale")
    },
}  # fmt: skip
"""Methods that round to nearest, a value on the wire and back, the part that may round apart."""


@pytest.mark.parametrize("topology", [LOOP, dq.Direct()])
@pytest.mark.parametrize("name", NEAREST)
def test_sums_are_those_of_the_definition(name, topology):
    """An independent ring, and an all-to-all, in numpy: the same bits.

    With shared scales elements of mu v / 2^E are added, E the largest of all workers.
    """
    method, round_trip, apart = NEAREST[name]
    n, rng = 8, np.random.default_rng(2)
    x = rng.standard_normal((n, n, 4, 32)) * np.exp(rng.standard_normal((n, n, 4, 1)))
    x = x.astype(np.float32)
    state, unit, u = ((),), np.float32(1), x
    if "shared" in name:
        element = name.split(",")[0]
        state = (ScaleState(jnp.full(n, 0.25, jnp.float32)),)
        unit = np.exp2(mx_scale(x, element).max(axis=0).astype(np.float64)) * 4
        u, round_trip = x / unit, lambda values: mx_cast(values, element).astype(np.float64)
    expected = []
    for c in range(n):
        if topology == LOOP:
            total = np.zeros_like(u[0, 0], np.float64)
            for hop in range(1, n + 1):
                total = round_trip((u[(c + hop) % n, c] + total).astype(np.float32))
        else:
            total = u[c, c].astype(np.float64)
            for worker in range(n):
                total = total + (round_trip(u[worker, c]) if worker != c else 0)
            total = round_trip(total.astype(np.float32))
        expected.append(total)
    expected = (np.stack(expected) * unit).reshape(-1)
    found, _ = stepper(small(method), topology)(x.reshape(n, -1), KEY, state)
    assert_replicas_equal(found)
    # A sum next to a boundary may go to either side, as the order of additions decides.
    off = np.abs(np.asarray(found[0], np.float64) - expected) > 1e-5 * np.abs(expected) + 1e-7
    assert off.mean() <= apart


MinMax, QSGD = of.MinMax, of.GlobalQSGD


HALVES = {
    "qsdp": low(MinMax(bits=6, bucket_size=1024)),
    "flash": low(MinMax(bits=5, rounding="nearest")),
    "weights": low(MinMax(bits=6, bucket_size=1024, rounding="shift")),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("topology", [dq.Direct(), dq.Ring(), dq.Direct(streams=2)])
def test_minmax_halves_are_sums_of_slices_and_the_same_shards_for_all(name, topology):
    n, size, method = 4, 3000, HALVES[name]
    x = gradient(0, n, n * size)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P("data"))
    def halves(x):
        options = {"tiled": True, "method": method, "key": KEY}
        own = dq.psum_scatter(x[0], "data", topology=topology, **options)
        return own, dq.all_gather(own, "data", **options)[None]

    own, gathered = halves(x)
    assert 1e-5 < float(vnmse(own, total_of(x))) < 0.02
    assert_replicas_equal(gathered)
    assert 1e-5 < float(vnmse(gathered[0], own)) < 0.01


@pytest.mark.parametrize("levels", ["linear", "exponential"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("topology", OVER.values(), ids=OVER)
def test_qsgd_equal_maxima_neither_wrap_nor_vanish(levels, n, topology):
    """All workers hold the largest magnitude everywhere."""
    sign = np.where(np.arange(2048) % 2 == 0, 1.0, -1.0)
    x = jnp.asarray(np.tile(3 * sign, (n, 1)), jnp.float32)
    found = np.asarray(vmapped(low(QSGD(levels=levels)), topology)(x, KEY)[0], np.float64)
    ratio = found / (3 * n * sign)
    if levels == "linear":  # the maximum is a level
        np.testing.assert_allclose(ratio, 1, rtol=1e-6)
    else:
        assert abs(np.mean(ratio) - 1) < 0.06
        assert np.all((ratio > 0) & (ratio <= 2 ** (n - 1)))


def test_qsgd_pieces_keep_magnitudes_apart():
    scale = jnp.repeat(jnp.array([1e-4, 1.0]), 1024)[None]
    x = scale * jax.random.normal(jax.random.key(5), (4, 2048))
    least = total_of(x)[:1024]
    apart, together = (
        relative_error(vmapped(low(QSGD(piece_size=size)), dq.Direct())(x, KEY)[0, :1024], least)
        for size in (1024, 2048)
    )
    assert apart < 0.01 < 10 < together


@pytest.mark.parametrize("method", [of.MXFP8(sum="shared-scale"), of.MXFP4(sum="shared-scale")])
def test_mx_multiplier_halves_on_saturation_and_grows_otherwise(method):
    element, n, size = mx.ELEMENTS[method.element], 4, 1971
    x = np.random.default_rng(11).standard_normal((n, size)).astype(np.float32)
    step, safe = stepper(small(method), LOOP), largest(method.element)
    safe /= 2 ** (exponent(method.element) + 1) * n
    state = as_compression(small(method), LOOP).init_state(jnp.zeros(size), n)
    assert state[0].mu == np.float32(safe)

    def next_mu(x, mu):
        after = step(x, None, (ScaleState(jnp.full(n, mu, jnp.float32)),))[1][0].mu
        assert_replicas_equal(after)
        return float(after[0])

    assert next_mu(x, safe) == pytest.approx(safe * method.growth, rel=1e-6)
    assert next_mu(x, 0.8) == pytest.approx(0.4)
    # The threshold counts finished sums of finite blocks; NaN blocks are none.
    assert next_mu(np.where(np.arange(size) == 40, np.nan, 0 * x), safe) > safe
    # Equal gradients that are all at the top fit at the safe multiplier, but just so.
    top = np.full((n, size), element.max_value * 2 / 2**element.emax * 0.99, np.float32)
    assert next_mu(top, safe / 2) > safe / 2
    # Where nothing ever saturates it stops at what a single largest value needs.
    limit = element.max_value / 2**element.emax
    assert next_mu(np.zeros_like(x), limit) == pytest.approx(limit)
    mu, seen = safe, []
    for _ in range(60):
        mu = next_mu(x, mu)
        seen.append(mu)
    assert min(seen) >= safe * (1 - 1e-6) and len(set(seen)) > 2
    # A division by a constant may become a product with its inverse.
    known = step(x, None, (ScaleState(jnp.full(n, safe, jnp.float32)),))[0]
    np.testing.assert_allclose(vmapped(small(method))(x, None), known, rtol=1e-6)


def test_mx_shared_scales_seed_the_noise_and_a_hierarchy_has_their_state():
    x = np.random.default_rng(10).uniform(-0.9, 0.9, (4, 512)).astype(np.float32)
    run = vmapped(small(of.MXFP6(rounding="stochastic", sum="shared-scale")), LOOP)
    first, again, twice = run(x, None), run(x, None), run(x * 2, None)
    assert_same_bits(first, again)
    assert np.mean(np.asarray(first * 2 != twice)) > 0.2
    topology = dq.Hierarchical(outer=dq.Direct())
    method = dq.Compression(of.MXFP8(sum="shared-scale"), topology=topology, **SMALL)
    state = method.init_state(jnp.zeros(512), (2, 2))
    state = (state[0]._replace(mu=jnp.float32(0.25)),)  # room for sums of four ones

    def one(x):
        return dq.reduce(x, ("a", "b"), op="mean", method=method, state=state)[:2]

    ones = np.random.default_rng(6).integers(-1, 2, (2, 2, 512)).astype(np.float32)
    found, after = jax.vmap(jax.vmap(one, axis_name="b"), axis_name="a")(ones)
    exact = ones.mean(axis=(0, 1))
    np.testing.assert_array_equal(found, np.broadcast_to(exact, found.shape))
    assert len(np.unique(np.asarray(after[0].mu))) == 1


# --- THC ------------------------------------------------------------------------------------------


def lognormal(n, size=1 << 17, seed=0):
    """f32[n, size] of Gaussian coordinates, each with a scale e^N(0, 1) of its own."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.standard_normal((n, size), np.float32)) * rng.standard_normal(
        (n, size), np.float32
    )


def test_thc_correlated_words_cancel_rounding_errors_of_identical_workers():
    """One word in each eighth of the range: so many workers round up, give or take one."""
    x = np.tile(lognormal(1), (8, 1))
    independent, correlated = (
        relative_error(vmapped(small(method), None)(x, KEY)[0], total_of(x))
        for method in (
            of.THC(table=False, p=1 / 1024, rounding=rounding)
            for rounding in ("independent", "correlated")
        )
    )
    assert correlated < independent / 4


def with_seed(method, x):
    """The sum of all workers under `SEED`."""

    def one(own):
        return method.all_reduce(own, Call(Axis(("data",)), None, SEED)).value

    found = jax.jit(jax.vmap(one, axis_name="data"))(x)
    assert_replicas_equal(found)
    return found[0]


@pytest.mark.parametrize("form", ["psum", "two-shot"])
@pytest.mark.parametrize(("n", "options"), [(8, {}), (17, {"table": False})])
def test_thc_lanes_that_are_full_do_not_overflow(form, n, options):
    """Every coordinate of every worker clips at the top: sums of 8 x 30 and 17 x 15 = 255."""
    method = THC(form=form, p=0.5, sum_bits=8, **options)
    x = jnp.broadcast_to(hadamard.unrotate(jnp.ones(1024), SEED), (n, 1024))
    expected = n * thc.clip_threshold(0.5) * np.asarray(x[0])
    np.testing.assert_allclose(with_seed(method, x), expected, atol=1e-3)  # of 366


SATURATING: dict[str, Any] = {"form": "two-shot", "table": False, "saturate": True}


def ends_of(method, n):
    """The least and the largest sum in standard deviations of one worker, and the step."""
    step, room = 2 * thc.clip_threshold(method.p) / method.g, 2**method.sum_bits - 1
    least = -(-(n * method.g - room) // 2)  # half an integer above the middle where that is none
    return (least - n * method.g / 2) * step, (least + room - n * method.g / 2) * step, step


def test_thc_full_sums_end_at_their_bits_and_do_not_wrap():
    """Every coordinate of every worker clips, the first half at the bottom."""
    method = THC(p=0.5, sum_bits=5, **SATURATING)
    sign = np.where(np.arange(1024) < 512, -1, 1).astype(np.float32)
    x = hadamard.unrotate(jnp.asarray(sign)[None], SEED)
    found = with_seed(method, jnp.broadcast_to(x, (8, 1024)))
    least, most, _ = ends_of(method, 8)
    sums = hadamard.rotate(found[None], SEED)[0]
    np.testing.assert_allclose(sums, np.where(sign < 0, least, most), rtol=1e-3)


def test_thc_sums_that_fit_do_not_saturate_and_one_worker_is_exact():
    """Sums of 7 x 15 in 7 bits, of which many are 0 and many 105."""
    x = lognormal(1, 5000) * (1 + np.arange(7.0, dtype=np.float32)[:, None] / 100)
    options = {**SATURATING, "sum_bits": 7, "p": 0.5}
    first, *others = (
        np.asarray(vmapped(small(THC(**options | changed)), None)(x, KEY))
        for changed in ({}, {"saturate": False}, {"saturate": False, "form": "psum"})
    )
    for other in others:
        assert_same_bits(first, other)
    assert_same_bits(np.asarray(vmapped(small(THC()), None)(x[:1], KEY)), x[:1])


# --- Marsit ---------------------------------------------------------------------------------------

SIZE, BLOCK = 3011, 256


def Marsit(**options):
    return small(of.Marsit(block_size=BLOCK, **options))


@functools.cache
def first_signs(n, topology, samples):
    """(y f32[n, SIZE], key) -> the finished values [samples, n, SIZE] of a first round."""
    method = Marsit(period=None)

    def one(x, key, state):
        options = {"op": "mean", "method": method, "topology": topology}
        return dq.reduce(x, "data", key=key, state=state, **options).tree

    run = jax.vmap(one, in_axes=(0, None, 0), axis_name="data")
    run = jax.jit(jax.vmap(run, in_axes=(None, 0, None)))
    like = np.zeros((n, SIZE), np.float32)
    keys, state = jax.random.split(KEY, samples), first_state(method, like, n, topology)
    return lambda x: np.asarray(run(x.astype(np.float32), keys, state))


ROUTES = [(name, n) for name, (_, served) in TOPOLOGIES.items() for n in (2, 5, 8) if n in served]


@pytest.mark.parametrize(("route", "n"), [*ROUTES, ("direct", 3), ("ring", 7)])
def test_marsit_a_coordinate_gets_the_sign_of_a_worker_drawn_uniformly(route, n):
    """Coordinate c is positive on the first k workers, or on worker k - n - 1 alone.

    The mean sign is exact, whoever is positive. So is the variance, 1 - mean².
    """
    samples, kind = 128, np.arange(SIZE) % (2 * n + 1)
    worker = np.arange(n)[:, None]
    positive = np.where(kind <= n, worker < kind, worker == kind - n - 1)
    found = first_signs(n, TOPOLOGIES[route][0], samples)(np.where(positive, 1.0, -1.0))
    assert_replicas_equal(np.moveaxis(found, 1, 0))
    np.testing.assert_allclose(np.abs(found), 1, rtol=2e-7)
    signs = np.sign(found[:, 0])
    means = np.array([np.mean(signs[:, kind == k]) for k in range(2 * n + 1)])
    expected = 2 * np.array([positive[:, kind == k][:, 0].mean() for k in range(2 * n + 1)]) - 1
    deviation = np.sqrt((1 - expected**2) / (samples * SIZE / (2 * n + 1)))
    assert np.all(np.abs(means - expected) <= 4.5 * deviation)
    assert (means[0], means[n]) == (-1, 1)
    # Coins of coordinates and of keys are not related.
    middle = signs[:, kind == n // 2]
    assert abs(np.var(middle.mean(axis=1)) * middle.shape[1] / np.var(middle) - 1) < 0.6
    assert abs(np.var(middle.mean(axis=0)) * samples / np.var(middle) - 1) < 0.6


def test_marsit_encodings_stand_for_workers_and_zeros_have_no_sign_on_average():
    assert workers_in(dq.Ring(), 4).tolist() == [[k] * 4 for k in (1, 2, 3, 0)]
    assert workers_in(dq.Butterfly(), 4).tolist() == [[k] * 4 for k in (1, 1, 2, 0)]
    assert workers_in(dq.Direct(), 3).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    x = np.zeros((3, SIZE), np.float32)
    x[:, :BLOCK] = np.where(np.arange(BLOCK) % 2, 2.0, 0.0)  # half of one block
    x[0, -1] = 1.0
    found = first_signs(3, dq.Direct(), 256)(x)[:, 0]
    np.testing.assert_array_equal(found[:, 1:BLOCK:2], 1.0)
    zeros = found[:, :BLOCK:2]
    np.testing.assert_array_equal(np.abs(zeros), 1.0)
    assert abs(zeros.mean()) < 4.5 / np.sqrt(zeros.size)
    last = -(-SIZE // BLOCK) * BLOCK - BLOCK
    np.testing.assert_array_equal(found[:, BLOCK:last], 0.0)


@pytest.mark.parametrize(("n", "scale"), [(2, 1.0), (3, 0.5), (8, 1.0)])
def test_marsit_delivered_and_compensations_make_up_the_inputs(n, scale):
    """In every step; full rounds come in time, deliver all, and leave nothing.

    The length of a step is the mean magnitude in a block of all workers, times the scale.
    """
    period, rng = 3, np.random.default_rng(7)
    x = np.asarray(gradient(7, n, SIZE)) + 0.3 * rng.standard_normal((7, n, SIZE), np.float32)
    method = Marsit(period=period, scale=scale)
    state, run = first_state(method, x[0], n, LOOP), stepper(method, LOOP)
    delivered = exact = 0.0
    before = run._cache_size()
    for i, own in enumerate(x):
        found, state = run(own, KEY, state)
        assert_replicas_equal(found)
        result = np.asarray(found[0], np.float64)
        delivered, exact = delivered + result, exact + total_of(own)
        residual = np.asarray(state[0].residual, np.float64)
        room = 2e-6 * np.abs(exact).max()
        assert np.abs(delivered + residual.sum(axis=0) - exact).max() < room
        assert state[0].step.tolist() == [(i + 1) % period] * n
        if i % period == period - 1:
            np.testing.assert_array_equal(residual, 0)
            assert np.abs(delivered - exact).max() < room
        else:
            blocks = np.array_split(np.abs(own.astype(np.float64)).mean(axis=0),
                                    range(BLOCK, SIZE, BLOCK))  # fmt: skip
            lengths = np.concatenate([np.full(block.size, block.mean()) for block in blocks])
            np.testing.assert_allclose(np.abs(result), n * scale * lengths, rtol=2e-6)
            assert np.all(np.any(residual != 0, axis=0))
    assert run._cache_size() <= before + 1  # one program for both kinds of rounds


@pytest.mark.parametrize("key", [KEY, None])
def test_marsit_rounds_have_coins_of_their_own(key):
    """Every step has one key and gradient; also without a key."""
    method, x = Marsit(period=None), np.asarray(gradient(7, 4, SIZE))
    first = first_state(method, x, 4, LOOP)
    run = stepper(method, LOOP)
    start, _ = run(x, key, first)
    later, _ = run(x, key, (first[0]._replace(step=first[0].step + 1),))
    assert_same_bits(start, run(x, key, first)[0])
    assert np.mean(np.asarray(start != later)) > 0.2


@pytest.mark.parametrize("topology", [dq.Ring(), dq.Direct()])
def test_marsit_wire_bits_are_what_the_rounds_move(topology):
    """A conditional with two branches, of which one is a full round; their mean over a period."""
    n, size, method = 4, 20_000, Marsit(period=5)
    own = jax.ShapeDtypeStruct((size,), jnp.float32)

    def one(x, state):
        x, state = jax.tree.map(lambda leaf: leaf[0], (x, state))
        options = {"op": "sum", "method": method, "topology": topology}
        total, state, _ = dq.reduce(x, "data", state=state, **options)
        return total, jax.tree.map(lambda leaf: leaf[None], state)

    state = as_compression(method, topology).init_state(own, n, stacked=True)
    specs = {"in_specs": P("data"), "out_specs": (P(), P("data"))}
    step = jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))
    hlo = step.lower(jnp.zeros((n, size)), state).compile().as_text()
    bodies = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?{$(.*?)^}", hlo, re.DOTALL | re.MULTILINE)
    names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", hlo)
    names += re.findall(r"[\w.\-]+", " ".join(re.findall(r"branch_computations={(.*?)}", hlo)))
    sent = {name: sum(moved_bits(body, Counter(), n).values()) / n for name, body in bodies}
    branches = sorted(sent.pop(name) for name in set(names))
    agreed, one_bit, full = method.method.round_bits(size, n, topology)
    assert (branches, sum(sent.values())) == ([one_bit, full], agreed)
    assert method.method.wire_bits(size, n, topology) == agreed + (4 * one_bit + full) // 5
    assert one_bit < 1.06 * 2 * (n - 1) / n * size


# --- Methods that sum a part ----------------------------------------------------------------------

CHUNK = 16
Omni = functools.partial(of.OmniReduce, block_size=CHUNK)


def blocks_like(seed, n, blocks=40, columns=CHUNK, spread=1.0):
    """f32[n, blocks * columns] whose blocks differ in length, by worker."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, columns))
    x *= np.exp(spread * rng.standard_normal((n, blocks, 1)))
    return x.astype(np.float32).reshape(n, -1)


def blocks_of(x, columns=CHUNK):
    return np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, columns)


def steps_of(method, x, count):
    """Results of ``count`` steps on the same gradients, and the state after them."""
    state, run, found = first_state(method, x, len(x)), stepper(method), []
    for _ in range(count):
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        found.append(np.asarray(result[0], np.float64))
    return found, state


def check_sum(found, x, sent):
    """The sum, up to n roundings to bf16, in the coordinates that were sent; else zeros."""
    own = np.asarray(x, np.float64).reshape(len(x), -1)
    np.testing.assert_array_equal(found[~sent], 0)
    error = np.abs(found - own.sum(axis=0))[sent]
    assert np.all(error <= len(own) * 2.0**-8 * np.abs(own).sum(axis=0)[sent])
    assert np.mean(found[sent] != 0) > 0.99


def largest_of(x, count, columns=CHUNK):
    """The coordinates of chunks that are largest."""
    chunks = np.pad(np.abs(x), (0, -x.size % columns), constant_values=-1).reshape(-1, columns)
    sent = np.zeros(chunks.shape, bool)
    np.put_along_axis(sent, np.argsort(-chunks, axis=1, kind="stable")[:, :count], True, axis=1)
    return sent.reshape(-1)[: x.size]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_clt_k_every_worker_leads_in_turn(n):
    """And without memory worker 0 leads; the last chunk is not full."""
    x, method = blocks_like(n, n)[:, :333], small(of.CLTK(chunk_size=CHUNK, density=3 / CHUNK))
    found, state = steps_of(method, x, n + 1)
    for step, total in enumerate(found):
        check_sum(total, x, largest_of(x[step % n], 3))
    assert np.all(state[0].step == n + 1)
    alone = np.asarray(vmapped(method, None)(x, KEY), np.float64)
    check_sum(alone[0], x, largest_of(x[0], 3))


def energies(x, columns=CHUNK):
    """Squared norms: f64[n, blocks]."""
    return np.sum(blocks_of(x, columns) ** 2, axis=-1)


def union_of(x, fraction):
    """Blocks that some worker has among the largest ``fraction`` of its own."""
    energy = energies(x)
    count = max(1, round(float(fraction) * energy.shape[1]))
    return np.any([largest_of(own, count, own.size) for own in energy], axis=0)


def with_fraction(method, x, fraction):
    """Every worker's first state, with another k."""
    state = first_state(method, x, len(x))
    return (state[0]._replace(fraction=jnp.full(len(x), fraction, jnp.float32)),)


@pytest.mark.parametrize(
    ("method", "columns", "blocks"),
    [(Omni(density=0.11), CHUNK, 640), (Omni(density=0.25, block_size=64), 64, 160)],
)
def test_omnireduce_sums_the_blocks_of_most_energy(method, columns, blocks):
    """And memory holds all others whole. Energies travel in bf16: 3% may change places."""
    x = blocks_like(0, 8, blocks, columns)
    (found,), state = steps_of(memory(method), x, 1)
    energy = energies(x, columns).sum(axis=0)
    sent = np.any(blocks_of(found, columns) != 0, axis=1)
    count = math.ceil(method.density * blocks)
    assert sent.sum() == count
    limit = np.sort(energy)[-count]
    assert np.all(sent[energy > 1.03 * limit]) and not np.any(sent[energy < limit / 1.03])
    check_sum(found, x, np.repeat(sent, columns))
    left = blocks_of(state[0].residual, columns)
    np.testing.assert_array_equal(left[:, ~sent], blocks_of(x, columns)[:, ~sent])


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_omnireduce_sends_the_union_first(fraction):
    """A union that is too small leaves room for others, one that is too large loses its least."""
    x, method = blocks_like(5, 8, 200), small(Omni(select="union", density=0.3))
    union, energy = union_of(x, fraction), energies(x).sum(axis=0)
    found, _ = stepper(method)(x, KEY, with_fraction(method, x, fraction))
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 60
    assert np.all(sent[union]) if union.sum() < 60 else np.all(union[sent])
    contested = ~union if union.sum() < 60 else union
    assert np.min(energy[contested & sent]) > np.max(energy[contested & ~sent]) / 1.03
    check_sum(np.asarray(found[0], np.float64), x, np.repeat(sent, CHUNK))


@pytest.mark.parametrize("start", [0.5 / 8, 0.5])
def test_omnireduce_settles_where_the_union_has_the_density(start):
    """Independent workers: at the root of 1 - (1 - k)^8 = 1/2."""
    n, method = 8, small(Omni(select="union"))
    run, fractions, ratios = stepper(method), [start], []
    state = with_fraction(method, blocks_like(0, n, 1000), start)
    assert first_state(method, blocks_like(0, n, 1000), n)[0].fraction[0] == 0.5 / 8
    for step in range(60):
        x = blocks_like(step, n, 1000)
        ratios.append(union_of(x, fractions[-1]).mean() / 0.5)
        _, state = run(x, KEY, state)
        assert_replicas_equal(state[0].fraction)
        rule = fractions[-1] * (0.75 + 0.25 / np.clip(ratios[-1], 0.6, 1 / 0.6))
        fractions.append(float(state[0].fraction[0]))
        assert fractions[-1] == pytest.approx(min(0.5, rule), rel=1e-5)
    assert np.mean(ratios[40:]) == pytest.approx(1, abs=0.01)
    assert np.mean(fractions[40:]) == pytest.approx(0.66 / n, rel=0.02)


def test_omnireduce_counts_of_many_workers_do_not_wrap():
    """256 workers that mark the same block: 256 is 0 in uint8."""
    x = np.tile(np.array([[1.0] * CHUNK + [0.5] * CHUNK], np.float32), (256, 1))
    method = small(Omni(select="union"))
    found, _ = stepper(method)(x, KEY, first_state(method, x, 256))
    np.testing.assert_array_equal(blocks_of(found[0])[:, 0], [256, 0])


def kept(numbers, density):
    """The part of the numbers above the threshold, over the density, by number of stages."""
    limits = np.asarray(sidco.thresholds(jnp.asarray(numbers, jnp.float32), density))
    return np.mean(numbers[:, None] >= limits, axis=0) / density


def test_sidco_estimates_laplace_and_normal_numbers():
    """Whatever the number of stages; of normal ones as the stages' own moments say."""
    rng = np.random.default_rng(0)
    for density in (0.5, 0.01):
        np.testing.assert_allclose(kept(np.abs(rng.laplace(size=400_000)), density), 1, atol=0.03)
    expected = []
    for stages in range(1, sidco.MAX_STAGES + 1):
        limit, parts = 0.0, [0.01]
        if stages > 1:  # a quarter first, then equal ratios
            parts = [0.25] + [0.04 ** (1 / (stages - 1))] * (stages - 1)
        for part in parts:
            height = math.sqrt(2 / math.pi) * math.exp(-(limit**2) / 2)
            limit -= (height / math.erfc(limit / math.sqrt(2)) - limit) * math.log(part)
        expected.append(math.erfc(limit / math.sqrt(2)) / 0.01)
    normal = np.abs(rng.standard_normal(400_000))
    np.testing.assert_allclose(kept(normal, 0.01), expected, atol=0.05)
    for numbers in ([3.0] * 50, [0.0] * 50, [7.0], [0.0] * 25 + [1.0] * 25):
        x = np.array(numbers, np.float32)  # all are equal, and so all are above
        np.testing.assert_array_equal(sidco.thresholds(jnp.asarray(x), 0.01), x.max())


@pytest.mark.parametrize(("place", "room"), [(0, 3), (4, 1), (4, 6), (9, 10)])
def test_sidco_blocks_go_in_order_from_their_place(place, room):
    above = np.isin(np.arange(10), [1, 4, 5, 8])
    order = np.roll(np.arange(10), -place)
    expected = [*order[above[order]], *order[~above[order]]][:room]
    found = sidco.first_of(jnp.asarray(above), jnp.int32(place), room)
    np.testing.assert_array_equal(found, expected)


def of_norms(seed, scales, blocks=2000, n=4):
    """Blocks whose norms over all workers have a known distribution."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, CHUNK))
    norm = np.sqrt(np.sum(x**2, axis=(0, 2), keepdims=True))
    scale = {
        "laplace": np.abs(rng.laplace(size=blocks)),
        "normal": np.abs(rng.standard_normal(blocks)),
        "lognormal": np.exp(1.5 * rng.standard_normal(blocks)),
    }[scales]
    return (x / norm * scale[:, None]).reshape(n, -1).astype(np.float32)


def test_sidco_sums_the_blocks_above_the_threshold_and_then_others():
    """Equal blocks are all above it: those without room are first in the next step."""
    x, method = of_norms(2, "laplace"), of.SIDCo(block_size=CHUNK, density=0.1, headroom=1.5)
    found = np.asarray(vmapped(small(method), None)(x, KEY), np.float64)
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 300
    check_sum(found[0], x, np.repeat(sent, CHUNK))
    norms = np.sqrt(energies(x).sum(axis=0))
    limit = np.quantile(norms, 0.9)  # the fit and bf16 norms are within some percent of it
    assert np.all(sent[norms > 1.2 * limit])
    others = np.flatnonzero(sent & (norms < limit / 1.2))
    assert 60 < len(others) < 140
    assert np.mean(sent[: others[-1]]) == 1
    x = np.ones((3, 80 * CHUNK), np.float32) * np.arange(1, 4, dtype=np.float32)[:, None]
    found, state = steps_of(memory(of.SIDCo(block_size=CHUNK, density=0.1, headroom=1.25)), x, 3)
    sent = np.any(blocks_of(found[2]) != 0, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(sent), np.arange(20, 30))
    assert np.all(state[0].inner.place == 30)


@pytest.mark.parametrize(
    ("scales", "density", "settled"),
    [("normal", 0.01, 3), ("lognormal", 0.1, 1), ("laplace", 0.1, 2)],
)
def test_sidco_finds_its_number_of_stages(scales, density, settled):
    """Only at the end of a period, on all workers alike; then about the density is above."""
    method = small(of.SIDCo(block_size=CHUNK, density=density))
    state, run, counts = first_state(method, of_norms(0, scales), 4), stepper(method), []
    for step in range(15):
        before = state[0]
        _, state = run(of_norms(step, scales), KEY, state)
        assert_replicas_equal(state)
        if (step + 1) % sidco.PERIOD:
            assert_same_bits(np.asarray(state[0].stages), np.asarray(before.stages))
            counts.append((state[0].counts - before.counts)[0, before.stages[0] - 1])
    assert state[0].stages[0] == settled
    assert np.mean(counts[-4:]) / (2000 * density) == pytest.approx(1.05, abs=0.25)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_perm_k_every_coordinate_is_one_workers(n):
    """One of every n neighbours is each worker's, and all shifts occur."""
    rng = np.random.default_rng(n)
    rows = rng.permuted(np.tile(np.arange(-40, 40), (1003, 1)), axis=1)[:, :n]
    x, method = rows.T.astype(np.float32), small(of.PermK())
    found = np.asarray(vmapped(method, None, mean=True)(x, KEY))
    owners = np.isclose(found[0], x, rtol=1e-6, atol=1e-6)  # n times and over n
    np.testing.assert_array_equal(owners.sum(axis=0), 1)
    sets = owners[:, : 1003 // n * n].reshape(n, -1, n)
    np.testing.assert_array_equal(sets.sum(axis=2), 1)
    assert np.all(np.abs(owners.mean(axis=1) - 1 / n) < 0.01)
    assert len(np.unique(sets.argmax(axis=2)[0])) == n


@pytest.mark.parametrize("n", [2, 3, 8])
def test_arc_sums_some_rows_whole(n):
    """In any shape; with all rows in f32 it is exact. Each step has a sketch of its own."""
    shape, density = [((150, 40), 0.2), ((7, 11, 13), 0.5), ((61, 9), 0.03)][n % 3]
    x = blocks_like(n, n, math.prod(shape[:-1]), shape[-1], spread=0.1).reshape(n, *shape)
    (found, second), _ = steps_of(small(of.ARCTopK(density=density)), x, 2)
    assert np.mean(found != second) > density / 2
    rows = found.reshape(-1, shape[-1])
    sent = np.any(rows != 0, axis=1)
    assert sent.sum() == np.ceil(density * len(rows))
    check_sum(rows.reshape(-1), x, np.repeat(sent, shape[-1]))
    (found,), _ = steps_of(small(of.ARCTopK(density=1, wire="f32")), x, 1)
    np.testing.assert_allclose(found, total_of(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "least", "most"), [(1, 0.6, 0.87), (20, 0.97, 1.0)])
def test_arc_finds_rows_of_most_energy_as_well_as_its_rank_allows(rank, least, most):
    """Against the best rows, by the mean over keys; at random it would be 0.2.

    Where workers cancel, it sends what is left.
    """
    rng = np.random.default_rng(0)
    length = np.exp(rng.standard_normal((150, 1)))
    x = (rng.standard_normal((4, 150, 40)) * length).astype(np.float32)
    method, energy = small(of.ARCTopK(rank=rank)), np.sum(total_of(x) ** 2, axis=1)
    state, shares = first_state(method, x, 4), []
    for i in range(8):
        found = np.asarray(stepper(method)(x, jax.random.key(i), state)[0][0])
        shares.append(energy[np.any(found != 0, axis=1)].sum())
    best = np.sort(energy)[-30:].sum()
    assert least * best < np.mean(shares) < most * best
    x = np.array([x[0], -x[0]])
    x[1, 100:130] = x[0, 100:130]
    (found,), _ = steps_of(method, x, 1)
    np.testing.assert_array_equal(np.flatnonzero(np.any(found != 0, axis=1)), np.arange(100, 130))


EXACT = functools.partial(of.PowerSGD, wire="f32")


def of_rank(rank, n, shape=(60, 33), seed=0):
    """f32[n, *shape] of distinct workers, whose sum has that rank."""
    rng = np.random.default_rng(seed)
    total = rng.standard_normal((math.prod(shape[:-1]), rank))
    total = total @ rng.standard_normal((rank, shape[-1]))
    x = rng.standard_normal((n, *shape))
    return jnp.asarray(x - x.mean(axis=0) + total.reshape(shape) / n, jnp.float32)


def test_powersgd_iterates_on_the_subspace_from_its_factor():
    """A step is M Q made orthonormal, times its part of M; warm starts find the best matrix.

    After gradients of rank 1 the other columns of the factor still look elsewhere.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 60, 33))
    u, _, v = np.linalg.svd(x.sum(axis=0), full_matrices=False)
    x = jnp.asarray(x - x.mean(axis=0) + (u * 0.7 ** np.arange(33)) @ v / 4, jnp.float32)
    method, total = small(EXACT(rank=3)), total_of(x)
    factor = np.asarray(first_state(method, x, 4)[0].factor[0], np.float64)
    found, _ = steps_of(method, x, 12)
    for result in found[:3]:
        left = np.linalg.qr(total @ factor)[0]
        np.testing.assert_allclose(result, left @ left.T @ total, atol=2e-5)
        factor = np.linalg.qr(total.T @ left)[0]
    values = np.linalg.svd(total, compute_uv=False) ** 2
    best = values[3:].sum() / values.sum()
    assert relative_error(found[0], total) > 1.2 * best
    assert best * (1 - 1e-5) < relative_error(found[-1], total) < 1.01 * best
    _, state = steps_of(method, of_rank(1, 2, seed=3), 5)
    factor = np.asarray(state[0].factor[0], np.float64)
    np.testing.assert_allclose(factor.T @ factor, np.eye(3), atol=1e-5)
    x = of_rank(3, 2, seed=4)
    assert relative_error(stepper(method)(x, KEY, state)[0][0], total_of(x)) < 1e-8


def test_powersgd_columns_become_orthonormal_and_dependent_ones_zero_or_others():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 5)).astype(np.float32)
    a[:, 1] = 0
    a[:, 3] = 1e-4 * a[:, 2] - 3 * a[:, 0]  # of the span of those before it
    a[:, 4] *= 1e-25
    found = np.asarray(orthonormal(jnp.asarray(a)), np.float64)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 0, 1, 0, 1]), atol=2e-6)
    for column in (0, 2, 4):
        own = a[:, column] / np.max(np.abs(a[:, column]))
        assert np.linalg.norm(own - found @ (found.T @ own)) < 1e-5 * np.linalg.norm(own)
    other = jnp.asarray(rng.standard_normal((50, 5)), jnp.float32)
    found = np.asarray(orthonormal(jnp.asarray(a), other), np.float64)
    np.testing.assert_allclose(found.T @ found, np.eye(5), atol=2e-6)


@pytest.mark.parametrize("method", [EXACT(rank=2), of.ARCTopK(), of.PermK()])
def test_without_a_key_and_a_state_draws_are_those_of_the_gradients(method):
    x = blocks_like(8, 3, 60, 32, spread=0.1).reshape(3, 60, 32)
    run = vmapped(small(method), None)
    first = run(x, None)
    assert_replicas_equal(first)
    assert_same_bits(first, run(x, None))


# --- Leaves as matrices ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered(MatrixMethod):
    """Adds 1000 times the row and once the column; its state is as large as its matrix."""

    matrix: tuple[int, int] | None = None

    @property
    def min_side(self):
        return 3

    def init(self, size, n_workers):
        return {"seen": jnp.zeros(self.shape_of(size), jnp.float32)}

    def wire_bits(self, size, n_workers, topology):
        rows, columns = self.shape_of(size)
        return 100 * rows + columns

    def all_reduce(self, x, call):
        value = call.axis.psum(x) / call.divisor + numbers(*self.shape_of(x.shape[0])).reshape(-1)
        return Outcome(value, jax.tree.map(lambda seen: seen + 1, call.state))


NUMBERED = dq.Compression(Numbered(), min_leaf_size=10)


def numbers(rows, columns):
    return (1000 * np.arange(rows)[:, None] + np.arange(columns)).astype(np.float32)


def test_matrices_are_reduced_alone_and_all_else_exactly():
    shapes = {"conv": (3, 2, 7), "flat": (2, 40), "kernel": (5, 8), "small": (3, 3)}
    shapes |= {"thin": (40, 2), "vector": (50,)}
    matrices = {"conv": (6, 7), "kernel": (5, 8)}
    rng, n = np.random.default_rng(0), 4
    x = {k: rng.integers(-9, 9, (n, *s)).astype(np.float32) for k, s in shapes.items()}
    own = jax.tree.map(lambda leaf: leaf[0], x)
    state = as_compression(NUMBERED).init_state(own, n, stacked=True)
    assert [part["seen"].shape for part in state] == [(n, 6, 7), (n, 5, 8)]

    def one(tree, state):
        return dq.reduce(tree, "data", op="sum", method=NUMBERED, state=state)[:2]

    found, after = jax.vmap(one, axis_name="data")(x, state)
    assert all(np.all(part["seen"] == 1) for part in after)
    for name, shape in shapes.items():
        exact = x[name].sum(axis=0)
        if name in matrices:
            exact = exact + numbers(*matrices[name]).reshape(shape)
        assert_same_bits(np.asarray(found[name]), np.broadcast_to(exact, (n, *shape)))
    told = dq.explain(own, n, method=NUMBERED, verbose=False)
    assert {row.name[2:-2]: (row.bucket, row.route) for row in told.rows} == {
        "conv": (0, "compressed"),
        "flat": (None, "exact: matrix of 2 x 40 < min_side 3"),
        "kernel": (1, "compressed"),
        "small": (None, "exact: size 9 < min_leaf_size 10"),
        "thin": (None, "exact: matrix of 40 x 2 < min_side 3"),
        "vector": (None, "exact: not a matrix"),
    }
    exact_bits = 32 * (80 + 9 + 80 + 50) * 2 * (n - 1) // n
    assert wire_bits(NUMBERED)(own, n) == exact_bits + 607 + 508
    assert Numbered().wire_bits(50, n, None) == 150  # an array of an unknown matrix is a row


SPECS = {"columns": P(None, "model"), "rows": P("model", None), "thin": P(None, "model")}
WHOLE = {"columns": (5, 8), "rows": (8, 5), "thin": (9, 4)}
PARTS = {"columns": (5, 4), "rows": (4, 5)}


@pytest.mark.parametrize("kind", ["automatic", "explicit", "manual", "manual, unchecked"])
def test_on_a_mesh_a_matrix_is_what_one_device_holds(kind):
    """A part of two columns is none, though the whole leaf is. States are those of parts."""
    n, manual, explicit = 4, "manual" in kind, kind == "explicit"
    axis_types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    mesh = jax.make_mesh((n, 2), ("data", "model"), axis_types=axis_types)
    rng = np.random.default_rng(0)
    x = {k: rng.integers(-9, 9, (n, *s)).astype(np.float32) for k, s in WHOLE.items()}
    placed = {k: jax.device_put(v, NamedSharding(mesh, P("data", *SPECS[k]))) for k, v in x.items()}
    options = {"mesh": mesh, "specs": SPECS}
    like = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in WHOLE.items()}
    state = NUMBERED.init_state(like, n, **options, stacked=True)
    assert [part["seen"].shape for part in state] == [(n, 2, 5, 4), (n, 2, 4, 5)]

    def one(tree, state):
        tree = jax.tree.map(lambda v: lax.squeeze(v, (0,)), tree)
        if explicit:
            return dq.psum(tree, "data", method=NUMBERED), state
        own = jax.tree.map(lambda v: lax.squeeze(v, (0, 1) if manual else (0,)), state)
        told = None if manual else SPECS
        total, own, _ = dq.reduce(tree, "data", op="sum", method=NUMBERED, specs=told, state=own)
        return total, jax.tree.map(lambda v: v[None, None] if manual else v[None], own)

    specs: dict = {"in_specs": P("data"), "out_specs": (P(), P("data")), "axis_names": {"data"}}
    if manual:  # parts of a state are told by the mesh alone
        each = P("data", "model")
        specs = {"in_specs": ({k: P("data", *v) for k, v in SPECS.items()}, each)}
        specs |= {"out_specs": (SPECS, each), "check_vma": "unchecked" not in kind}
    with jax.set_mesh(mesh):
        found, after = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(placed, state)
    for name, shape in WHOLE.items():
        exact = x[name].sum(axis=0)
        if name in PARTS:
            repeats = [w // p for w, p in zip(shape, PARTS[name], strict=True)]
            exact = exact + np.tile(numbers(*PARTS[name]), repeats)
        np.testing.assert_array_equal(np.asarray(found[name]), exact)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert all(np.all(np.asarray(part["seen"]) == (not explicit)) for part in after)
    told = NUMBERED.explain(like, n, **options, verbose=False)
    assert [row.bucket for row in told.rows] == [0, 1, None]
    assert [8 * row.wire_bytes for row in told.rows[:2]] == [504, 405]


# --- LIEC-SGD -------------------------------------------------------------------------------------

THREE_BITS = of.MinMax(bits=3, bucket_size=16, rounding="nearest")
LOCAL = small(LocalError(THREE_BITS))


@pytest.mark.parametrize("mean", [False, True])
def test_liec_results_and_what_owners_keep_make_up_all_gradients(mean):
    """Coordinates that are not finite leave the owners' errors alone."""
    n, size = 4, 500
    x = np.stack([blocks_like(seed, n, 250, 2) for seed in range(4)])
    state, run = first_state(LOCAL, x[0], n), stepper(LOCAL, mean=mean)
    assert state[0].shape == (n, 128)  # an n-th, in whole buckets
    inputs = delivered = 0.0
    for own in x:
        found, state = run(own, KEY, state)
        inputs, delivered = inputs + total_of(own), delivered + total_of(found) / (1 if mean else n)
        kept = np.asarray(state[0], np.float64).reshape(-1)[:size]
        room = 1e-5 * np.abs(inputs).max()
        np.testing.assert_allclose(delivered * (1 if not mean else 1) + kept, inputs, atol=room)
        assert np.mean(kept != 0) > 0.5
    x[0, 2, 300] = np.nan
    found, after = run(x[0], KEY, state)
    sick = np.isnan(np.asarray(found))
    assert_replicas_equal(sick)
    assert 0 < sick[0].sum() <= 16
    now = np.asarray(after[0], np.float64).reshape(-1)[:size]
    np.testing.assert_array_equal(now[sick[0]], kept[sick[0]])
    assert np.all(np.isfinite(now)) and np.mean(now != kept) > 0.5


def liec_models(method, every, steps):
    """Every worker's parameters after each step."""
    mesh, (params, batches) = auto_mesh(4), problem(steps)
    optimizer = liec.liec(optax.sgd(0.3), "data", method=method)
    opt_state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(opt_state)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), specs, P("data")),
        out_specs=(P("data"), specs),
    )  # fmt: skip
    def step(params, opt_state, x):
        own = jax.tree.map(lambda p: p[0], params)
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(own, x), opt_state, own)
        own = optax.apply_updates(own, updates)
        own = liec.average_every(every, opt_state.step, own, "data")
        return jax.tree.map(lambda p: p[None], own), opt_state

    params = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
    params, found = jax.device_put(params, NamedSharding(mesh, P("data"))), []
    for x in batches:
        params, opt_state = step(params, opt_state, x)
        found.append(jax.device_get(params))
    assert opt_state.step == steps
    return found


def test_liec_models_differ_until_they_are_averaged_and_follow_plain_sgd():
    """Without loss all the way; with 3 bits the mean of the models stays near."""
    params, batches = problem(12)
    plain = [params]
    for x in batches:
        grads = jax.jit(jax.grad(loss_fn))(plain[-1], x)
        plain.append(jax.tree.map(lambda p, g: p - 0.3 * g, plain[-1], grads))
    for models, exact in zip(liec_models(small(dq.F32()), 5, 12), plain[1:], strict=True):
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, [q] * 4, atol=1e-6), models, exact)
    rounded = liec_models(small(THREE_BITS), 5, 12)
    for number, models in enumerate(rounded, start=1):
        for leaf in models.values():
            assert len({own.tobytes() for own in leaf}) == (1 if number % 5 == 0 else 4)

    def square(tree, other):
        apart = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), tree, other)
        return sum(jax.tree.leaves(apart))

    apart = square(jax.tree.map(lambda p: p.mean(axis=0), rounded[-1]), plain[-1])
    assert 0 < apart < 0.004 * square(plain[0], plain[-1])  # 0.03 where errors are lost


# --- Bits, and what is refused --------------------------------------------------------------------

VECTOR, WIDE = (1 << 20,), (1024, 4096)
SATURATED: dict[str, Any] = {"form": "two-shot", "saturate": True}


@pytest.mark.parametrize(
    ("method", "shape", "n", "bits"),
    [
        (of.CLTK(), VECTOR, 8, 24 / 64),
        (of.CLTK(density=0.1, chunk_size=64), VECTOR, 8, 24 * 7 / 64),
        (of.OmniReduce(), VECTOR, 8, 16 * 0.5 + 16 / 256),
        (of.OmniReduce(select="union"), VECTOR, 8, 16 * 0.5 + (16 + 8) / 256),
        (of.OmniReduce(select="union"), VECTOR, 256, 16 * 0.5 + (16 + 32) / 256),
        (of.OmniReduce(density=1 / 16, block_size=64), VECTOR, 8, 16 / 16 + 16 / 64),
        (of.SIDCo(density=0.5, headroom=3, block_size=256), VECTOR, 8, 16 + 16 / 256),
        (of.ARCTopK(density=0.25), (1024, 512), 8, 16 * (0.25 + 4 / 512)),
        (of.ARCTopK(density=0.5, rank=8, wire="f32"), (1024, 512), 8, 32 * 0.5 + 16 * 8 / 512),
        (of.PowerSGD(), WIDE, 8, 16 * 4 * (1 / 1024 + 1 / 4096)),
        (of.PowerSGD(rank=8, wire="f32"), WIDE, 8, 32 * 8 * (1 / 1024 + 1 / 4096)),
        (of.PermK(), VECTOR, 8, 8),
        (MinMax(bits=5, rounding="nearest"), VECTOR, 8, 5 + 32 / 128),
        (MinMax(bits=8, bucket_size=1024), VECTOR, 8, 8 + 32 / 1024),
        (QSGD(bits=6), VECTOR, 8, 6 + 32 / 4096),
        (of.MXFP8(), VECTOR, 8, 8.25),
        (of.MXFP6(sum="shared-scale"), VECTOR, 8, 6.25),
        # 32 bits hold so many lanes, which n g fits; 4 up, and 8, 9 and 12 down.
        *((of.THC(), VECTOR, n, bits) for n, bits in ((2, 6.4), (8, 8), (9, 32 / 3), (136, 16))),
        *((of.THC(table=False), VECTOR, n, bits) for n, bits in ((2, 16 / 3), (17, 8))),
        *((of.THC(form="two-shot"), VECTOR, n, bits) for n, bits in ((8, 6), (9, 6.5), (136, 8))),
        *((of.THC(**SATURATED), VECTOR, n, 4) for n in (8, 136)),
        (of.THC(sum_bits=6, **SATURATED), VECTOR, 136, 5),
    ],
)
def test_bits_per_coordinate(method, shape, n, bits):
    """Over 2 (n - 1) / n, as of a ring all-reduce."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    topology = dq.Direct() if isinstance(method, (MinMax, QSGD, of.MXFP8, of.MXFP6)) else None
    told = dq.explain(leaf, n, method=method, topology=topology, verbose=False)
    assert told.bits_per_coord == pytest.approx(bits, rel=5e-4)
    assert method.wire_bits(leaf.size, 1, topology) == 0


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (of.CLTK, {"density": 0}, "density=0 must be above 0 and at most 1"),
        (of.CLTK, {"chunk_size": 257}, "chunk_size=257 must be an integer, 1 to 256"),
        (of.OmniReduce, {"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        (of.OmniReduce, {"block_size": 0}, "block_size=0 must be a positive integer"),
        (of.OmniReduce, {"select": "random"}, "select='random'; expected one of"),
        (of.SIDCo, {"density": 0}, "density=0 must be above 0 and at most 1"),
        (of.SIDCo, {"headroom": math.nan}, "headroom=nan must be at least 1"),
        (of.ARCTopK, {"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        (of.ARCTopK, {"rank": 0}, "rank=0 must be a positive integer"),
        (of.ARCTopK, {"wire": "fp8"}, "wire='fp8'; expected one of"),
        (of.PowerSGD, {"rank": 2.0}, "rank=2.0; expected int, such as rank=4"),
        (of.PowerSGD, {"rank": 0}, "rank=0 must be a positive integer"),
        (of.THC, {"saturate": True}, "with form='psum': native sums wrap; pass form='two"),
        (of.THC, {"bits": 9}, "bits=9 must be an integer from 1 to 8"),
        (of.THC, {"granularity": 14}, "granularity=14 must be 15 to 1023 with bits=4 and table"),
        (of.THC, {"granularity": 16, "table": False}, "granularity=16 must be 1 to 15"),
        (of.THC, {"p": 0}, "p is 0"),
        (of.THC, {"piece_size": 100}, "piece_size is 100"),
        (of.THC, {"form": "ring"}, "form='ring'; expected one of"),
        (of.THC, {"sum_bits": 32}, "sum_bits=32 must be 1 to 31"),
        (of.Marsit, {"period": 1}, r"period=1 must be .* 2 to 4096, or None .* pass dq\.F32\(\)"),
        (of.Marsit, {"period": 5000}, "period=5000 must be an integer from 2 to 4096"),
        (of.Marsit, {"scale": 0}, "scale=0 must be above 0 and finite, such as 1.0"),
        (of.Marsit, {"block_size": 48}, "block_size=48 must be a positive multiple of 32, as"),
        (of.MXFP8, {"element": "e2m1"}, "element='e2m1'; expected one of 'e4m3', 'e5m2'"),
        (of.MXFP6, {"sum": "psum"}, "sum='psum'; expected one of"),
        (of.MXFP4, {"rounding": "up"}, "rounding='up'; expected one of"),
        (of.MXFP4, {"max_saturated": 2}, "max_saturated=2 is not a fraction"),
        (of.MXFP4, {"growth": 0.5}, "growth=0.5 must lie between 1 and 2"),
        (MinMax, {"bits": 9}, "bits=9 must be an integer from 1 to 8"),
        (MinMax, {"bucket_size": 30}, "bucket_size=30 must be a positive multiple of 4"),
        (MinMax, {"rounding": "up"}, "rounding='up'"),
        (QSGD, {"bits": 9}, "bits=9 must be an integer from 3 to 8"),
        (QSGD, {"piece_size": 100}, "piece_size=100 must be a positive multiple of 32"),
        (QSGD, {"levels": "odd"}, "levels='odd'"),
        (LocalError, {"method": dq.DynamiQ()}, r"does not tell what its.*dq\.comparators\.MinMax"),
        (LocalError, {"method": of.THC()}, "does not tell what its"),
        (LocalError, {"method": of.OmniReduce()}, "does not tell what its"),
    ],
)
def test_bad_fields_are_refused(method, fields, message):
    with pytest.raises(ValueError, match=message):
        method(**fields)


@pytest.mark.parametrize(
    ("method", "topology", "n", "message"),
    [
        (QSGD(bits=4), dq.Direct(), 8, "no step for 8 workers.*pass bits=5"),
        (QSGD(), dq.Direct(), 128, "or levels='exponential'"),
        (QSGD(levels="exponential"), dq.Ring(), 128, "may need 135 above the scale"),
        (of.Marsit(), dq.Ring(), 5000, "up to 4096 workers, and here are 5000; pass topology=dq"),
        (of.THC(sum_bits=8), None, 9, r"9 workers.*granularity=30 reach 270.*the 255 of 8 bits"),
        (of.THC(sum_bits=8), None, 9, "pass sum_bits=9, or a granularity of at most 28"),
        (of.THC(), None, 1 << 28, "exceeds the 2147483647 of 31 bits; pass a gran.* most 7"),
    ],
)
def test_sums_that_have_no_room_are_refused(method, topology, n, message):
    leaf = jax.ShapeDtypeStruct(VECTOR, jnp.float32)
    with pytest.raises(ValueError, match=message):
        dq.explain(leaf, n, method=method, topology=topology, verbose=False)


def test_liec_refuses_topologies_and_periods():
    with pytest.raises(NotImplementedError, match=r"topology=Ring\(.*leave topology=None"):
        LocalError(THREE_BITS).check(4, dq.Ring())
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        liec.average_every(0, jnp.int32(1), {}, "data")
    with pytest.raises(ValueError, match=r"liec|LocalError.*call dq.optax.init"):
        liec.liec(optax.sgd(0.1), "data", method=THREE_BITS).init({"w": jnp.ones(500)})
