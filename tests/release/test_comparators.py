"""The other papers' methods: what all promise alike, and each against its definition in numpy.

`test_every_method` has trees, wire bits and keys of all rows, `test_nonfinite` what is not finite
and extreme magnitudes, `test_golden` the bits.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import scipy.linalg
from asserts import assert_replicas_equal, assert_same_bits, bias, relative_error
from cases import (
    EVERY_METHOD,
    LOOP,
    OVER,
    TOPOLOGIES,
    first_state,
    low,
    over,
    small,
    stepper,
    vmapped,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from test_wire_bytes import lower, moved_bits
from workers import auto_mesh, gradient, loss_fn, mesh_of, problem, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.contrib import hadamard, lanes, liec, mx, sidco, thc
from dynamiq_jax.contrib.local_error import LocalError
from dynamiq_jax.contrib.powersgd import orthonormal
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import Call
from dynamiq_jax.topologies.schedules import gradients_in

KEY = jax.random.key(1)
of = dq.contrib
THC = functools.partial(of.THC, piece_size=1024)
BlockInt, MinMax, QSGD = of.BlockInt, of.MinMax, of.GlobalQSGD
EXACT = functools.partial(of.PowerSGD, wire="f32")


def memory(method):
    return small(dq.ErrorFeedback(method))


METHODS = {
    name: row.method
    for name, row in EVERY_METHOD.items()
    if not name.startswith(("dynamiq", "bf16", "f32"))
} | {
    "mxfp4, memory": memory(of.MXFP4()),
    "mxfp8, ef21m": small(dq.ErrorFeedback(of.MXFP8(), kind="ef21m")),
    "powersgd, memory, f32": memory(of.PowerSGD(rank=5, wire="f32")),
}
MEMORY = [name for name in METHODS if getattr(METHODS[name].method, "kind", "") == "ef14"]
MATRICES = ("powersgd", "arc top-k")


def route(name):
    return None if METHODS[name].method.native_by_default else LOOP


def draw(seed, n, name="", size=3000):
    """Blocks of 64 of very different magnitude, distinct on each worker; matrices if need be."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(rng.standard_normal(size // 64 + 1)), 64)[:size]
    x = jnp.asarray(rng.standard_normal((n, size)) * scale, jnp.float32)
    return x.reshape(n, 50, -1) if name.startswith(MATRICES) else x


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


# --- What all methods promise ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mean"), [(name, i % 2) for i, name in enumerate(MEMORY)])
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
    "minmax": (MinMax(), LOOP),
    "minmax, direct": (MinMax(bits=2), dq.Direct()),
    "block-int": (BlockInt(bits=4, rounding="stochastic"), LOOP),
    "block-int, smooth": (BlockInt(bits=4, rounding="stochastic", smooth=True), dq.Direct()),
    "qsgd": (QSGD(piece_size=128), LOOP),
    "thc": (of.THC(p=1e-9, piece_size=512), None),
    "perm-k": (of.PermK(), None),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_rounding_at_random_is_unbiased(name):
    """See `cases.Bias`: a bias of 2% of a step scores 5 or more in blocks of 128 coordinates.

    Blocks of 32 begin with 1, the largest value, so that no sum of up to 4 saturates.
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


@pytest.mark.parametrize("name", ["mxfp8", "thc, memory", "marsit"])
def test_the_derivative_is_the_exact_sum_and_that_of_the_next_state_is_zero(name):
    method, x, t = METHODS[name], draw(5, 2, name), draw(6, 2, name)
    options = {"op": "sum", "compression": over(route(name), method)}

    def one(x, t, state):
        total = lambda x: dq.reduce(x, "data", state=state, **options)[:2]
        return jax.jvp(total, (x,), (t,))[1]

    run = jax.jit(jax.vmap(one, axis_name="data"))
    tangent, states = run(x, t, first_state(method, x, 2, route(name)))
    np.testing.assert_allclose(tangent[0], total_of(t), rtol=1e-5, atol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states) if leaf.dtype == jnp.float32)


VECTOR = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


@pytest.mark.parametrize(
    ("method", "n", "bits"),
    [
        (of.OmniReduce(density=1 / 16, block_size=64), 8, 16 / 16 + 16 / 64),
        (MinMax(bits=5, rounding="nearest"), 8, 5 + 32 / 128),
        (MinMax(bits=8, bucket_size=1024), 8, 8 + 32 / 1024),
        (BlockInt(), 8, 8 + 16 / 128),
        (BlockInt(bits=4, block_size=512), 8, 4 + 16 / 512),
        # 32 bits hold so many lanes, which n g fits.
        *((of.THC(), n, bits) for n, bits in ((2, 6.4), (8, 8), (9, 32 / 3), (136, 16))),
    ],
)
def test_bits_that_depend_on_workers_and_fields(method, n, bits):
    """Per coordinate, over 2 (n - 1) / n; `test_every_method` has them of programs of 4."""
    topology = dq.Direct() if isinstance(method, MinMax | BlockInt) else None
    told = dq.explain(VECTOR, n, compression=over(topology, method), verbose=False)
    assert told.bits_per_coord == pytest.approx(bits, rel=5e-4)


BAD: dict[Any, dict[str, tuple]] = {
    of.CLTK: {"density": (0, 1.5), "chunk_size": (0, 257)},
    of.OmniReduce: {"density": (1.5,), "block_size": (0,)},
    of.SIDCo: {"density": (0,), "headroom": (math.nan, 0.5), "block_size": (0,)},
    of.ARCTopK: {"density": (1.5,), "rank": (0,), "wire": ("fp8",)},
    of.PowerSGD: {"rank": (0, 2.0), "wire": ("fp8",)},
    of.THC: {
        "bits": (9,), "granularity": (14,), "p": (0, 1), "piece_size": (100,),
    },
    of.Marsit: {"period": (1, 5000), "scale": (0, math.inf), "block_size": (48,)},
    of.MXFP8: {"element": ("e2m1",)},
    of.MXFP6: {"element": ("e4m3",)},
    of.MXFP4: {"rounding": ("up",)},
    BlockInt: {"bits": (1, 9), "block_size": (16, 48), "rounding": ("up",)},
    MinMax: {"bits": (0, 9), "bucket_size": (30,), "rounding": ("up",)},
    QSGD: {"bits": (2, 9), "piece_size": (100,)},
}  # fmt: skip


@pytest.mark.parametrize("method", BAD)
def test_bad_fields_are_refused(method):
    for name, values in BAD[method].items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}(=| is ){value!r}"):
                method(**{name: value})


@pytest.mark.parametrize(
    ("method", "topology", "n", "message"),
    [
        (QSGD(bits=4), dq.Direct(), 8, "no step for 8 workers.*pass bits=5"),
        (QSGD(), dq.Direct(), 128, "no step for 128 workers.*pass topology=dq.Hierarchical"),
        (of.Marsit(), dq.Ring(), 5000, "up to 4096 workers, and here are 5000; pass topology=dq"),
        (of.THC(), None, 1 << 28, "exceeds the 2147483647 of 31 bits; pass a gran.* most 7"),
    ],
)
def test_sums_that_have_no_room_are_refused(method, topology, n, message):
    with pytest.raises(ValueError, match=message):
        dq.explain(VECTOR, n, compression=over(topology, method), verbose=False)


# --- Codecs against formulas in numpy -------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 3, 4, 9, 12, 31])
def test_packed_fields_come_back_and_lanes_add_up(bits):
    """Lanes have room for the sum of all workers; those at their maximum are between others."""
    rng = np.random.default_rng(bits)
    for m in (1, 33, 256):
        fields = rng.integers(0, 1 << bits, (3, m)).astype(np.uint32)
        words = lanes.pack_bits(jnp.asarray(fields), bits)
        assert words.shape == (3, lanes.bit_words(m, bits))
        assert m % 32 or words.shape[1] == m * bits // 32
        np.testing.assert_array_equal(lanes.unpack_bits(words, m, bits), fields)
        with pytest.raises(ValueError, match=f"words, but {m} fields of {bits} bits take"):
            lanes.unpack_bits(words[:, 1:], m, bits)
        most, n = max(1, (1 << bits) // 9), 8 if bits > 3 else 1
        values = rng.integers(0, most + 1, (n, 2, m)).astype(np.uint32)
        values[:, :, ::3] = most
        words = lanes.pack_lanes(jnp.asarray(values), bits)
        assert words.shape == (n, 2, -(-m // (32 // bits)))
        total = np.add.reduce(np.asarray(words), axis=0, dtype=np.uint32)
        found = lanes.unpack_lanes(jnp.asarray(total), m, bits)
        np.testing.assert_array_equal(found, values.sum(axis=0))


FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def mx_scale(x, name):
    """Scales of blocks [..., 32], with a last axis of 1."""
    top = float(ml_dtypes.finfo(FLOATS[name]).max)
    power = np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1] - math.frexp(top)[1]
    return np.exp2(np.maximum(power, -127).astype(np.float64))


def mx_round_trip(x, name):
    """Values on the wire and back, by blocks with scales of their own, clipped and to nearest."""
    blocks, top = np.asarray(x, np.float64).reshape(-1, 32), ml_dtypes.finfo(FLOATS[name]).max
    scale = mx_scale(blocks, name)
    sent = np.clip(blocks / scale, -float(top), float(top)).astype(FLOATS[name])
    return (sent.astype(np.float64) * scale).reshape(np.shape(x))


@pytest.mark.parametrize("name", FLOATS)
def test_mx_blocks_come_back_as_the_elements_next_to_them(name):
    """Tops at powers of two and beside them; elements and ties times any scale; bad blocks.

    At random, a magnitude goes up where its fraction and its word reach one; words of negative
    values are complemented.
    """
    element, rng = mx.ELEMENTS[name], np.random.default_rng(4)
    codes = np.arange(element.max_code + 1, dtype=np.uint8)
    top = codes.view(FLOATS[name]).astype(np.float64)  # all elements that are not negative
    power = np.exp2(np.arange(-110, 110, 10).astype(np.float64)).astype(np.float32)
    tops = np.concatenate([power, *(np.nextafter(power, np.float32(s)) for s in (0, np.inf))])
    near = rng.uniform(-1, 1, (tops.size, 32)) * tops[:, None]
    near[:, 17] = tops * rng.choice([-1, 1], tops.size)
    ties = (top[1:] + top[:-1]) / 2
    exact = np.concatenate([top, -top, ties, -ties])
    exact = np.resize(exact, (exact.size // 31 + 1, 32))
    exact[:, 0] = top[-1]
    scales = np.exp2(np.array([-127.0, -126, -120, -64, 0, 64, 127 - element.emax]))
    exact = (exact * scales[:, None, None]).reshape(-1, 32)
    tiny = np.arange(1, 33)[None] * 0.37 * 2.0**-131
    bad = np.zeros((4, 32))
    bad[1, 31], bad[2, 0], bad[3, 7] = np.nan, np.inf, -np.inf
    x = np.concatenate([near, exact, tiny, bad]).astype(np.float32)
    x = np.concatenate([x, np.zeros((-len(x) % 4, 32), np.float32)])
    sound = np.all(np.isfinite(x), axis=1)

    def there_and_back(words):
        payload = mx.encode(jnp.asarray(x.reshape(-1)), element, words)
        back = np.asarray(mx.decode(payload, x.size, element)).reshape(x.shape)
        assert np.all(np.isnan(back[~sound])) and np.sum(~sound) == 3
        return back[sound]

    fine = x[sound]
    assert_same_bits(there_and_back(None), mx_round_trip(fine, name).astype(np.float32))
    words = rng.integers(0, 2**32, x.shape, dtype=np.uint32)
    found = there_and_back(jnp.asarray(words.reshape(-1)))
    scale = mx_scale(fine.astype(np.float64), name)
    size = np.minimum(np.abs(fine) / scale, top[-1])
    below = np.minimum(np.searchsorted(top, size, side="right") - 1, len(top) - 2)
    fraction = (size - top[below]) / (top[below + 1] - top[below])
    share = np.where(np.signbit(fine), ~words[sound], words[sound]) / 2.0**32
    up = (fraction + share >= 1).astype(int)
    clear = (fraction == 0) | (np.abs(fraction + share - 1) > 1e-6)
    expected = np.copysign(top[below + up] * scale, fine)
    np.testing.assert_array_equal(found[clear], expected[clear])
    assert clear.mean() > 0.99 and 0.1 < up.mean() < 0.9


def as_bf16(x, side):
    """The next bf16 number towards ``side``, as f32."""
    near = x.astype(ml_dtypes.bfloat16)
    beyond = np.nextafter(near, np.asarray(side * np.inf, near.dtype))
    return np.where((near.astype(np.float32) - x) * side < 0, beyond, near).astype(np.float32)


def minmax_grid(x, bits):
    """Offsets and steps of buckets [B, G], f32[B, 1] each."""
    least = x.min(axis=1, keepdims=True)
    low = as_bf16(least, -1)
    return low, as_bf16((x.max(axis=1, keepdims=True) - low) / np.float32(2**bits - 1), 1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_values_come_back_as_levels_between_enclosing_extremes(bits, rounding):
    """Uniform noise rounds up with the probability of the fraction."""
    rng = np.random.default_rng(bits)
    scale, middle = np.meshgrid([1e-30, 1e-20, 1.0, 1e20, 1e35], [0.0, 3.0, -100.0])
    x = rng.standard_normal((15, 32)) + middle.reshape(-1, 1)
    x = (x * scale.reshape(-1, 1)).astype(np.float32)
    words = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    method = of.MinMax(bits=bits, bucket_size=32, rounding=rounding)
    payload = method.encode(jnp.asarray(x.reshape(-1)), jnp.asarray(words))
    found = np.asarray(method.decode(payload, x.size)).reshape(x.shape)
    low, step = minmax_grid(x, bits)
    draws = words.reshape(x.shape) / 2.0**32
    place = (x.astype(np.float64) - low) / step + (0.5 if rounding == "nearest" else draws)
    level = np.clip(np.floor(place), 0, 2**bits - 1)
    clear = np.abs(place - np.round(place)) > 1e-4
    assert clear.mean() > 0.8
    room = 1e-6 * np.abs(x).max(axis=1, keepdims=True)
    assert np.all((np.abs(found - (low + level * step)) <= 2 * room)[clear])
    assert np.all(np.abs(found - x) <= (1 if rounding == "stochastic" else 0.5) * step * 1.001)


RELEASED = {
    (4, 30, 1 / 32): [0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30],
    (4, 42, 1 / 1024): [0, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 42],
    (3, 42, 1 / 1024): [0, 10, 15, 19, 23, 27, 32, 42],
}
"""THC's tables in its authors' code, by (bits, granularity, p)."""
TABLES = RELEASED | {(1, 5, 1 / 10): [0, 5]}
SEED = jnp.array([7, 8], jnp.uint32)


@pytest.mark.parametrize("key", TABLES)
def test_thc_indices_are_nodes_beside_z_and_a_small_word_rounds_up(key):
    """And all beyond the threshold is clipped, of nodes T (2 t / g - 1)."""
    table, rng = np.array(TABLES[key]), np.random.default_rng(1)
    method = of.THC(**dict(zip(("bits", "granularity", "p"), key, strict=True)))
    np.testing.assert_array_equal(method.integers, table)
    threshold, g = thc.clip_threshold(method.p), int(table[-1])
    assert math.erfc(threshold / math.sqrt(2)) == pytest.approx(method.p, rel=1e-4)
    z = np.concatenate([2 * rng.standard_normal(50_000), [1e30, -1e30, np.inf, -np.inf]])
    z, words = z.astype(np.float32), rng.integers(0, 2**32, z.size, dtype=np.uint32)
    found = np.asarray(thc.quantize(jnp.asarray(z), table, threshold, jnp.asarray(words)))
    place = (np.clip(z.astype(np.float64), -threshold, threshold) + threshold) * g / (2 * threshold)
    below = np.clip(np.searchsorted(table, place, side="right") - 1, 0, len(table) - 2)
    fraction = (place - table[below]) / (table[below + 1] - table[below])
    clear = np.abs(words / 2.0**32 - fraction) > 1e-5
    np.testing.assert_array_equal(found[clear], (below + (words / 2.0**32 < fraction))[clear])
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
    expected = scipy.linalg.hadamard(length) * matrix[0]
    np.testing.assert_allclose(matrix, expected, atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix[0]), 1, atol=1e-6)
    assert length < 512 or abs(np.mean(matrix[0, 1:] * matrix[0, :-1])) < 0.2  # all by themselves


def test_pieces_are_powers_of_two_with_little_padding():
    whole = 1 << 17
    shapes = {whole: (1, whole), whole + 1: (17, 1 << 13), 1000: (1, 1024), 1: (1, 1)}
    for size, shape in shapes.items():
        x = jnp.arange(1, size + 1, dtype=jnp.float32)
        pieces = hadamard.cut(x, piece_size=whole)
        assert pieces.shape == shape == hadamard.piece_shape(size)
        np.testing.assert_array_equal(hadamard.join(pieces, size), x)
        assert not np.any(pieces.reshape(-1)[size:])


# --- Sums hop by hop ------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "n"), [("ring", 8), ("butterfly", 4), ("direct", 2)])
def test_qsgd_equal_maxima_neither_wrap_nor_vanish_and_pieces_are_apart(route, n):
    """All workers hold the largest magnitude everywhere, which is a level."""
    sign = np.where(np.arange(2048) % 2 == 0, 1.0, -1.0) * np.repeat([1e-4, 1.0], 1024)
    x = jnp.asarray(np.tile(3 * sign, (n, 1)), jnp.float32)
    found = np.asarray(vmapped(low(QSGD(piece_size=1024)), OVER[route])(x, KEY)[0], np.float64)
    np.testing.assert_allclose(found / (3 * n * sign), 1, rtol=1e-6)


# --- THC ------------------------------------------------------------------------------------------


def test_thc_full_sums_end_at_their_bits_and_do_not_wrap():
    """Every coordinate of every worker clips, the first half at the bottom.

    Lanes of 8 bits hold 8 x 30.
    """
    n, method = 8, THC(p=0.5)
    sign = np.where(np.arange(1024) < 512, -1, 1).astype(np.float32)
    x = hadamard.unrotate(jnp.asarray(sign)[None], SEED)

    def one(own):
        return method.all_reduce(own, Call(Axis(("data",)), None, SEED)).value

    found = jax.jit(jax.vmap(one, axis_name="data"))(jnp.broadcast_to(x, (n, 1024)))
    assert_replicas_equal(found)
    step, room = 2 * thc.clip_threshold(0.5) / method.g, n * method.g
    ends = np.array([-room, room]) / 2 * step
    sums = hadamard.rotate(found[:1], SEED)[0]
    np.testing.assert_allclose(sums, np.where(sign < 0, *ends), rtol=1e-3)


# --- Marsit ---------------------------------------------------------------------------------------

SIZE, BLOCK = 3011, 256


def Marsit(**options):
    return small(of.Marsit(block_size=BLOCK, **options))


@functools.cache
def first_signs(n, topology, samples):
    """(y f32[n, SIZE], key) -> the finished values [samples, n, SIZE] of a first round."""
    method = Marsit(period=None)

    def one(x, key, state):
        options = {"op": "mean", "compression": over(topology, method)}
        return dq.reduce(x, "data", key=key, state=state, **options).tree

    run = jax.vmap(one, in_axes=(0, None, 0), axis_name="data")
    run = jax.jit(jax.vmap(run, in_axes=(None, 0, None)))
    like = np.zeros((n, SIZE), np.float32)
    keys, state = jax.random.split(KEY, samples), first_state(method, like, n, topology)
    return lambda x: np.asarray(run(x.astype(np.float32), keys, state))


ROUTES = [("ring", 5), ("ring, two streams", 5), ("butterfly", 8), ("direct", 3), ("direct", 8)]


@pytest.mark.parametrize(("route", "n"), ROUTES)
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
    assert gradients_in(dq.Ring(), 4).tolist() == [[k] * 4 for k in (1, 2, 3, 0)]
    assert gradients_in(dq.Butterfly(), 4).tolist() == [[k] * 4 for k in (1, 1, 2, 0)]
    assert gradients_in(dq.Direct(), 3).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
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


@pytest.mark.parametrize(("n", "scale"), [(3, 0.5), (8, 1.0)])
def test_marsit_delivered_and_compensations_make_up_the_inputs(n, scale):
    """In every step; full rounds come in time, deliver all, and leave nothing.

    The length of a step is the mean magnitude in a block of all workers, times the scale. Rounds
    have coins of their own under one key, and also without.
    """
    period, rng = 3, np.random.default_rng(7)
    x = np.asarray(gradient(7, n, SIZE)) + 0.3 * rng.standard_normal((7, n, SIZE), np.float32)
    method = Marsit(period=period, scale=scale)
    state, run = first_state(method, x[0], n, LOOP), stepper(method, LOOP)
    second = (state[0]._replace(step=state[0].step + 1),)
    for key in (KEY, None):
        start, later = (run(x[0], key, own)[0] for own in (state, second))
        assert np.mean(np.asarray(start != later)) > 0.2
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
        else:
            blocks = np.array_split(np.abs(own.astype(np.float64)).mean(axis=0),
                                    range(BLOCK, SIZE, BLOCK))  # fmt: skip
            lengths = np.concatenate([np.full(block.size, block.mean()) for block in blocks])
            np.testing.assert_allclose(np.abs(result), n * scale * lengths, rtol=2e-6)
            assert np.all(np.any(residual != 0, axis=0))
    assert run._cache_size() == before  # one program for both kinds of rounds


def test_marsit_wire_bits_are_the_mean_of_both_kinds_of_rounds():
    """A program has both, in the branches of a conditional."""
    n, method, like = 4, Marsit(period=5), jax.ShapeDtypeStruct((20_000,), jnp.float32)

    def total(x, axis_name, **options):
        state = as_compression(method).init_state(x, n)
        return dq.reduce(x, axis_name, op="sum", state=state, **options).tree[None]

    moved = moved_bits(*lower(total, like, (n,), method, dq.Ring()), n)
    full = 2 * (n - 1) * 32 * like.size // n
    agreed = 2 * (n - 1) * 32 * (-(-like.size // BLOCK) + 1) // n
    one_bit = sum(moved.values()) / n - agreed - full
    assert one_bit == pytest.approx(2 * (n - 1) * like.size / n, rel=0.03)
    assert method.method.wire_bits(like.size, n, dq.Ring()) == agreed + (4 * one_bit + full) // 5


# --- Methods that sum a part ----------------------------------------------------------------------

CHUNK = 16
Omni = functools.partial(of.OmniReduce, block_size=CHUNK)


def blocks_of(x):
    return np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, CHUNK)


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


def largest_of(x, count):
    """The coordinates of chunks that are largest."""
    chunks = np.pad(np.abs(x), (0, -x.size % CHUNK), constant_values=-1).reshape(-1, CHUNK)
    sent = np.zeros(chunks.shape, bool)
    np.put_along_axis(sent, np.argsort(-chunks, axis=1, kind="stable")[:, :count], True, axis=1)
    return sent.reshape(-1)[: x.size]


def test_clt_k_every_worker_leads_in_turn():
    """And without memory worker 0 leads; the last chunk is not full."""
    n, method = 3, small(of.CLTK(chunk_size=CHUNK, density=3 / CHUNK))
    x = draw(n, n, size=333)
    found, state = steps_of(method, x, n + 1)
    for step, total in enumerate(found):
        check_sum(total, x, largest_of(x[step % n], 3))
    assert np.all(state[0].step == n + 1)
    alone = np.asarray(vmapped(method, None)(x, KEY), np.float64)
    check_sum(alone[0], x, largest_of(x[0], 3))


def energies(x):
    """Squared norms: f64[n, blocks]."""
    return np.sum(blocks_of(x) ** 2, axis=-1)


def test_omnireduce_sums_the_blocks_of_most_energy():
    """And memory holds all others whole. Energies travel in bf16: 3% may change places."""
    blocks, method = 640, Omni(density=0.11)
    x = draw(0, 8, size=CHUNK * blocks)
    (found,), state = steps_of(memory(method), x, 1)
    energy = energies(x).sum(axis=0)
    sent = np.any(blocks_of(found) != 0, axis=1)
    count = math.ceil(method.density * blocks)
    assert sent.sum() == count
    limit = np.sort(energy)[-count]
    assert np.all(sent[energy > 1.03 * limit]) and not np.any(sent[energy < limit / 1.03])
    check_sum(found, x, np.repeat(sent, CHUNK))
    left = blocks_of(state[0].residual)
    np.testing.assert_array_equal(left[:, ~sent], blocks_of(x)[:, ~sent])


def test_sidco_estimates_laplace_and_normal_numbers():
    """Whatever the number of stages; of normal ones as the stages' own moments say."""

    def kept(numbers, density):
        limits = np.asarray(sidco.thresholds(jnp.asarray(numbers, jnp.float32), density))
        return np.mean(numbers[:, None] >= limits, axis=0) / density

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
    found, state = steps_of(memory(of.SIDCo(block_size=CHUNK, density=0.1, headroom=1.25)), x, 9)
    for step, total in enumerate(found):
        sent = np.any(blocks_of(total) != 0, axis=1)
        expected = np.arange(10 * step, 10 * step + 10) % 80
        np.testing.assert_array_equal(np.flatnonzero(sent), np.sort(expected))
    assert np.all(state[0].inner.place == 10)


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
    """One of every n neighbours is each worker's, and all shifts occur, by gradients or a key."""
    rng = np.random.default_rng(n)
    rows = rng.permuted(np.tile(np.arange(-40, 40), (1003, 1)), axis=1)[:, :n]
    x, method = rows.T.astype(np.float32), small(of.PermK())
    run = vmapped(method, None, mean=True)
    found, first = np.asarray(run(x, KEY)), run(x, None)
    assert_same_bits(first, run(x, None))
    assert np.mean(np.asarray(2 * first != run(2 * x, None))) > 0.2
    owners = np.isclose(found[0], x, rtol=1e-6, atol=1e-6)  # n times and over n
    np.testing.assert_array_equal(owners.sum(axis=0), 1)
    sets = owners[:, : 1003 // n * n].reshape(n, -1, n)
    np.testing.assert_array_equal(sets.sum(axis=2), 1)
    assert np.all(np.abs(owners.mean(axis=1) - 1 / n) < 0.01)
    assert len(np.unique(sets.argmax(axis=2)[0])) == n


# --- Methods of matrices --------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "least", "most"), [(1, 0.6, 0.87), (20, 0.97, 1.0)])
def test_arc_sums_rows_of_most_energy_as_well_as_its_rank_allows(rank, least, most):
    """Whole rows, of a sketch by key and step; against the best ones. At random it would be 0.2.

    Where workers cancel, it sends what is left.
    """
    rng = np.random.default_rng(0)
    length = np.exp(rng.standard_normal((30, 5, 1)))
    x = (rng.standard_normal((4, 30, 5, 40)) * length).astype(np.float32)
    method, energy = small(of.ARCTopK(rank=rank)), np.sum(total_of(x) ** 2, axis=-1).reshape(-1)
    run, state, shares = stepper(method), first_state(method, x, 4), []
    for i in range(8):
        found, state = run(x, jax.random.key(i // 2), state)
        found = np.asarray(found[0], np.float64)
        sent = np.any(found != 0, axis=-1).reshape(-1)
        assert sent.sum() == 30
        check_sum(found.reshape(-1), x, np.repeat(sent, 40))
        shares.append(energy[sent].sum())
    best = np.sort(energy)[-30:].sum()
    assert least * best < np.mean(shares) < most * best
    assert len(set(shares)) > 4 or rank > 1
    x = np.array([x[0], -x[0]])
    x[1, 20:26] = x[0, 20:26]
    (found,), _ = steps_of(method, x, 1)
    np.testing.assert_array_equal(
        np.any(found != 0, axis=-1)[:, 0], np.isin(np.arange(30), range(20, 26))
    )


def of_rank(rank, n, shape, seed=0):
    """f32[n, *shape] of distinct workers, whose sum has that rank."""
    rng = np.random.default_rng(seed)
    total = rng.standard_normal((math.prod(shape[:-1]), rank))
    total = total @ rng.standard_normal((rank, shape[-1]))
    x = rng.standard_normal((n, *shape))
    return np.asarray(x - x.mean(axis=0) + total.reshape(shape) / n, np.float32)


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
    _, state = steps_of(method, of_rank(1, 2, (60, 33), seed=3), 5)
    factor = np.asarray(state[0].factor[0], np.float64)
    np.testing.assert_allclose(factor.T @ factor, np.eye(3), atol=1e-5)
    x = of_rank(3, 2, (60, 33), seed=4)
    assert relative_error(stepper(method)(x, KEY, state)[0][0], total_of(x)) < 1e-8


def test_powersgd_columns_that_depend_on_others_become_zero_or_are_replaced():
    a, other = np.random.default_rng(0).standard_normal((2, 50, 5)).astype(np.float32)
    a[:, 1] = 0
    a[:, 3] = 1e-4 * a[:, 2] - 3 * a[:, 0]  # of the span of those before it
    a[:, 4] *= 1e-25
    for instead, gram in ((None, np.diag([1, 0, 1, 0, 1])), (jnp.asarray(other), np.eye(5))):
        found = np.asarray(orthonormal(jnp.asarray(a), instead), np.float64)
        np.testing.assert_allclose(found.T @ found, gram, atol=2e-6)


RANK_2 = dq.Compression(EXACT(rank=2), min_leaf_size=20)
"""Sums matrices of rank 2 exactly, and others not."""


def test_matrices_are_reduced_alone_and_all_else_exactly():
    """Rows are all axes but the last; the leaf "full" has more than rank 2, and loses some."""
    shapes = {"conv": (3, 2, 7), "flat": (3, 40), "full": (8, 9), "kernel": (5, 8)}
    shapes |= {"small": (4, 4), "thin": (40, 3), "vector": (50,)}
    rng, n = np.random.default_rng(0), 4
    x = {k: rng.integers(-9, 9, (n, *s)).astype(np.float32) for k, s in shapes.items()}
    x |= {k: of_rank(2, n, shapes[k]) for k in ("conv", "kernel")}
    own = jax.tree.map(lambda leaf: leaf[0], x)
    state = as_compression(RANK_2).init_state(own, n, stacked=True)
    assert [part.factor.shape for part in state] == [(n, 7, 2), (n, 9, 2), (n, 8, 2)]
    found, _ = stepper(RANK_2)(x, KEY, state)
    lost = {k: relative_error(found[k][0], total_of(x[k])) for k in shapes}
    assert {k for k, error in lost.items() if error > 1e-9} == {"full"}
    assert all(lost[k] == 0 for k in ("flat", "small", "thin", "vector"))
    told = dq.explain(own, n, compression=RANK_2, verbose=False)
    assert {row.name[2:-2]: (row.bucket, row.route) for row in told.rows} == {
        "conv": (0, "compressed"),
        "flat": (None, "exact: matrix of 3 x 40 < min_side 4"),
        "full": (1, "compressed"),
        "kernel": (2, "compressed"),
        "small": (None, "exact: size 16 < min_leaf_size 20"),
        "thin": (None, "exact: matrix of 40 x 3 < min_side 4"),
        "vector": (None, "exact: not a matrix"),
    }
    assert RANK_2.method.wire_bits(50, 1, None) == 0  # an array of an unknown matrix is a row


SPECS = {"columns": P(None, "model"), "rows": P("model", None), "thin": P(None, "model")}


@pytest.mark.parametrize("manual", [False, True])
def test_on_a_mesh_a_matrix_is_what_one_device_holds(manual):
    """A part of two columns is none, though the whole leaf is. States are those of parts."""
    n, shapes = 4, {"columns": (6, 5), "rows": (5, 7), "thin": (9, 2)}
    mesh = mesh_of(n, 2)
    halves = {k: [of_rank(2, n, v, seed) for seed in (1, 2)] for k, v in shapes.items()}
    x = {k: np.concatenate(v, axis=1 if k == "rows" else 2) for k, v in halves.items()}
    placed = put(x, mesh, {k: P("data", *spec) for k, spec in SPECS.items()})
    like = {k: jax.ShapeDtypeStruct(v.shape[1:], jnp.float32) for k, v in x.items()}
    state = RANK_2.init_state(like, n, mesh=mesh, specs=SPECS, stacked=True)
    assert [part.factor.shape for part in state] == [(n, 2, 5, 2), (n, 2, 7, 2)]

    def one(tree, state):
        tree = jax.tree.map(lambda v: lax.squeeze(v, (0,)), tree)
        own = jax.tree.map(lambda v: lax.squeeze(v, (0, 1) if manual else (0,)), state)
        told = None if manual else SPECS
        total, own, _ = dq.reduce(tree, "data", op="sum", compression=RANK_2, specs=told, state=own)
        return total, jax.tree.map(lambda v: v[None, None] if manual else v[None], own)

    specs: dict = {"in_specs": P("data"), "out_specs": (P(), P("data")), "axis_names": {"data"}}
    if manual:  # parts of a state are told by the mesh alone
        each = P("data", "model")
        specs = {"in_specs": ({k: P("data", *v) for k, v in SPECS.items()}, each)}
        specs |= {"out_specs": (SPECS, each)}
    with jax.set_mesh(mesh):
        found, after = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(placed, state)
    for name, summed in x.items():  # of rank 4, and 2 on every device
        np.testing.assert_allclose(found[name], summed.sum(axis=0), atol=1e-4)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    told = RANK_2.explain(like, n, mesh=mesh, specs=SPECS, verbose=False)
    assert [row.bucket for row in told.rows] == [0, 1, None]
    parts = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    assert told.wire_bytes == RANK_2.explain(parts, n, verbose=False).wire_bytes


# --- LIEC-SGD -------------------------------------------------------------------------------------

THREE_BITS = MinMax(bits=3, bucket_size=16, rounding="nearest")


def test_liec_results_and_what_owners_keep_make_up_all_gradients():
    """Coordinates that are not finite leave the owners' errors alone."""
    n, method = 4, small(LocalError(THREE_BITS))
    x = np.stack([draw(seed, n, size=500) for seed in range(4)])
    x[3, 2, 300] = np.nan
    state, run, gap = first_state(method, x[0], n), stepper(method), 0.0
    for number, own in enumerate(x):
        before = np.asarray(state[0], np.float64).reshape(-1)[:500]
        found, state = run(own, KEY, state)
        kept = np.asarray(state[0], np.float64).reshape(-1)[:500]
        gap = gap + total_of(own) - total_of(found) / n
        sick = np.isnan(np.asarray(found))
        assert_replicas_equal(sick)
        assert (0 < sick[0].sum() <= 16) == (number == 3)
        np.testing.assert_allclose(kept[~sick[0]], gap[~sick[0]], atol=1e-4)
        np.testing.assert_array_equal(kept[sick[0]], before[sick[0]])
        assert np.mean(kept != before) > 0.5


def liec_models(method, every, steps):
    """Every worker's parameters after each step."""
    mesh, (params, batches) = auto_mesh(4), problem(steps)
    optimizer = liec.liec(optax.sgd(0.3), "data", compression=method)
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
        mean = lambda own: Axis(("data",)).to_varying(jax.lax.pmean(own, "data"))
        own = jax.lax.cond(opt_state.step % every == 0, mean, lambda own: own, own)
        return jax.tree.map(lambda p: p[None], own), opt_state

    params = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
    params, found = put(params, mesh, P("data")), []
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


def test_liec_refuses_topologies_and_methods():
    for method in (dq.DynamiQ(), of.THC(), of.OmniReduce()):
        with pytest.raises(ValueError, match=r"does not tell what its.*dq\.contrib\.MinMax"):
            LocalError(method)
    with pytest.raises(NotImplementedError, match=r"topology=Ring\(.*leave topology=None"):
        LocalError(THREE_BITS).check(4, dq.Ring())
    with pytest.raises(ValueError, match=r"liec|LocalError.*call dq.optax.init"):
        liec.liec(optax.sgd(0.1), "data", compression=THREE_BITS).init({"w": jnp.ones(500)})
