"""MX elements and blocks: bit for bit as ml_dtypes has them, payloads as the docstring says."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dynamiq_jax.comparators import mx_codec as mx

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
every_element = pytest.mark.parametrize("element", mx.ELEMENTS.values(), ids=mx.ELEMENTS)

encode = jax.jit(mx.encode, static_argnums=1)
decode = jax.jit(mx.decode, static_argnums=(1, 2))
quantize = jax.jit(mx.quantize, static_argnums=1)
dequantize = jax.jit(mx.dequantize, static_argnums=1)
block_exponent = jax.jit(mx.block_exponent, static_argnums=1)
scale_codes = jax.jit(mx.scale_codes, static_argnums=1)
count_saturated = jax.jit(mx.count_saturated, static_argnums=1)


def codes_as_floats(codes, element):
    """Values that ml_dtypes gives to codes, in f32."""
    return np.asarray(codes).astype(np.uint8).view(DTYPES[element.name]).astype(np.float32)


def nearest_codes(u, element):
    """The codes that ml_dtypes rounds to, after clipping."""
    clipped = np.clip(u, -element.max_value, element.max_value)
    return clipped.astype(DTYPES[element.name]).view(np.uint8)


def positive_values(element):
    return codes_as_floats(np.arange(element.max_code + 1), element)


def uniform_words(shape, seed):
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def normal(size, seed):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "bits", "bias", "emax", "largest", "smallest_normal", "smallest"),
    [
        ("e4m3", 8, 7, 8, 448, 2.0**-6, 2.0**-9),
        ("e5m2", 8, 15, 15, 57344, 2.0**-14, 2.0**-16),
        ("e3m2", 6, 3, 4, 28, 2.0**-2, 2.0**-4),
        ("e2m3", 6, 1, 2, 7.5, 1, 2.0**-3),
        ("e2m1", 4, 1, 2, 6, 1, 0.5),
    ],
)
def test_parameters_of_the_elements(name, bits, bias, emax, largest, smallest_normal, smallest):
    element = mx.ELEMENTS[name]
    assert (element.name, element.bits, element.bias, element.emax) == (name, bits, bias, emax)
    assert element.max_value == largest
    codes = np.array([element.max_code, 1 << element.mantissa_bits, 1], np.uint32)
    found = dequantize(codes, element)
    np.testing.assert_array_equal(found, [largest, smallest_normal, smallest])


@every_element
def test_every_code_decodes_as_in_ml_dtypes(element):
    codes = np.arange(1 << element.bits, dtype=np.uint32)
    found, expected = dequantize(codes, element), codes_as_floats(codes, element)
    np.testing.assert_array_equal(found, expected)  # infinity and NaN in their places
    number = ~np.isnan(expected)
    assert_same_bits(np.asarray(found)[number], expected[number])


@every_element
def test_rounding_to_nearest_is_that_of_ml_dtypes(element):
    values = positive_values(element)
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle, [1.5 * values[-1] - 0.5 * values[-2], np.inf]])
    points = points.astype(np.float32)
    beside = [np.nextafter(points, np.float32(side)) for side in (0, np.inf)]
    # Every exponent, and dense mantissas where the elements are.
    everywhere = np.arange(0, 0x7F800000, 65521, dtype=np.uint32).view(np.float32)
    dense = np.linspace(0, 1.2 * element.max_value, 30011, dtype=np.float32)
    fine = np.linspace(0, 4 * 2.0**element.emin, 30011, dtype=np.float32)
    u = np.concatenate([points, *beside, everywhere, dense, fine])
    u = np.concatenate([u, -u])
    np.testing.assert_array_equal(quantize(u, element), nearest_codes(u, element))


@every_element
def test_noise_rounds_up_where_fraction_and_noise_reach_one(element):
    values = positive_values(element).astype(np.float64)
    below = np.arange(element.max_code)
    gap = values[1:] - values[:-1]
    # Eighths of each gap are f32 numbers; so are the words at which rounding changes.
    for eighth in range(1, 8):
        u = (values[:-1] + gap * eighth / 8).astype(np.float32)
        threshold = (8 - eighth) << 29
        for word, up in ((threshold, 1), (threshold - 1, 0), (0, 0), (2**32 - 1, 1)):
            noise = np.full(u.shape, word, np.uint32)
            np.testing.assert_array_equal(quantize(u, element, noise=noise), below + up)
            mirrored = quantize(-u, element, noise=~noise)
            np.testing.assert_array_equal(mirrored, below + up + (1 << element.bits - 1))


@every_element
def test_tiny_values_keep_their_probability(element):
    """Steps below the smallest element: 2^-30 of them is still rounded up by 4 words of 2^32."""
    for power, words in ((30, 4), (32, 1), (33, 0), (140, 0)):
        u = np.full(8, positive_values(element)[1] * 2.0**-power, np.float32)
        noise = (2**32 - 1 - np.arange(8)).astype(np.uint32)
        found = quantize(u, element, noise=noise)
        np.testing.assert_array_equal(found, (np.arange(8) < words).astype(int))


def block_of(top, rest=0.0):
    return np.array([rest] * 17 + [top] + [rest] * 14, np.float32)


@every_element
def test_scale_code_of_powers_of_two_and_their_neighbours(element):
    power = np.arange(-126, 128)
    exact = np.exp2(power.astype(np.float64)).astype(np.float32)
    below, above = np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))
    for top, floor_log2 in ((exact, power), (below, power - 1), (above, power)):
        blocks = np.stack([block_of(t if i % 2 else -t, t / 3) for i, t in enumerate(top)])
        expected = np.clip(floor_log2 - element.emax + 127, 0, 254)
        found = block_exponent(blocks, element)
        assert found.dtype == jnp.uint8
        np.testing.assert_array_equal(found, expected)


@every_element
def test_elements_times_scales_come_back_bit_for_bit(element):
    """Every finite code under every kind of scale, where v or the scale is subnormal too."""
    codes = np.arange(element.max_code + 1)
    codes = np.concatenate([codes, codes + (1 << element.bits - 1)])
    codes = np.resize(codes, -(-codes.size // 31) * 31).reshape(-1, 31)
    codes = np.pad(codes, ((0, 0), (0, 1)), constant_values=element.max_code)
    power = np.array([-127, -126, -120, -64, -1, 0, 1, 64, 127 - element.emax])
    x = codes_as_floats(codes, element) * np.exp2(power.astype(np.float64))[:, None, None]
    x = x.astype(np.float32).reshape(-1)
    assert np.any((np.abs(x) < 2.0**-126) & (x != 0))
    found = scale_codes(x, element).reshape(power.size, -1)
    np.testing.assert_array_equal(found, np.broadcast_to(power[:, None] + 127, found.shape))
    assert_same_bits(decode(encode(x, element), x.size, element), x)
    noise = uniform_words(x.size, seed=3)
    assert_same_bits(decode(encode(x, element, noise=noise), x.size, element), x)


def test_subnormal_values_are_rounded_and_not_flushed():
    element = mx.ELEMENTS["e5m2"]  # in units of 2^-127 = 2^22 smallest subnormals of f32
    x = np.arange(1, 65, dtype=np.float64) * 0.37 * 2.0**-131
    expected = codes_as_floats(nearest_codes(x * 2.0**127, element), element) * 2.0**-127
    x, expected = x.astype(np.float32), expected.astype(np.float32)
    assert np.all(expected > 0)
    assert_same_bits(decode(encode(x, element), x.size, element), expected)


def decode_in_numpy(payload, size, element):
    """The payload as the module describes it, one field at a time: codes and scale codes."""
    bits = np.unpackbits(np.asarray(payload).view(np.uint8), bitorder="little")
    blocks = math.ceil(size / 32)

    def fields(first_word, count, width):
        raw = bits[32 * first_word : 32 * first_word + count * width].reshape(count, width)
        return raw @ (1 << np.arange(width))

    words = math.ceil(blocks / 4)
    scale = fields(0, blocks, 8)
    if element.bits == 6:
        low, high = fields(words, 32 * blocks, 4), fields(words + 4 * blocks, 32 * blocks, 2)
        codes = low + 16 * high
    else:
        codes = fields(words, 32 * blocks, element.bits)
    assert bits.size == 32 * (words + element.bits * blocks)
    return codes, scale


@every_element
@pytest.mark.parametrize("size", [1, 301])
def test_payload_is_laid_out_as_described(element, size):
    x = normal(size, seed=size) * np.exp2(np.arange(size) // 32 - 4).astype(np.float32)
    payload = encode(x, element)
    assert payload.dtype == jnp.uint32
    assert payload.shape == (mx.payload_words(size, element),)
    codes, scale = decode_in_numpy(payload, size, element)
    padded = np.pad(x, (0, -size % 32)).reshape(-1, 32)
    top = np.abs(padded).max(axis=1)
    np.testing.assert_array_equal(scale, np.frexp(top)[1] - 1 - element.emax + 127)
    unit = np.exp2(scale - 127.0)[:, None]
    np.testing.assert_array_equal(codes, nearest_codes(padded / unit, element).reshape(-1))
    by_hand = (codes_as_floats(codes, element).reshape(-1, 32) * unit).reshape(-1)[:size]
    np.testing.assert_array_equal(decode(payload, size, element), by_hand)


@every_element
def test_zeros_are_sent_as_zeros_and_spoilt_blocks_as_nan(element):
    x = normal((5, 32), seed=4)
    x[1] = 0
    spoilt = x.copy()
    spoilt[2, 31], spoilt[3, 0], spoilt[4, 7] = np.nan, np.inf, -np.inf

    def round_trip(blocks):
        return decode(encode(blocks.reshape(-1), element), 160, element).reshape(5, 32)

    clean, found = round_trip(x), round_trip(spoilt)
    assert np.all(np.isfinite(clean)) and np.any(clean[0] != 0) and np.all(clean[1] == 0)
    np.testing.assert_array_equal(found[:2], clean[:2])
    assert np.all(np.isnan(found[2:]))
    payload = encode(np.zeros(160, np.float32), element)
    np.testing.assert_array_equal(payload, np.zeros(mx.payload_words(160, element)))


@every_element
def test_shared_scales_and_multiplier(element):
    """Four workers under the maximum of their scales, with room for the sum of the elements."""
    x = np.stack([normal(96, seed=s) * np.float32(4.0**s) for s in range(4)])
    x[2, 40] = np.inf
    own = np.stack([scale_codes(row, element) for row in x])
    shared = own.max(axis=0)
    assert shared[1] == 255 and np.sum(own == 255) == 1

    @jax.jit
    def round_trip(x, scale_code, multiplier):
        payload = mx.encode(x, element, scale_code=scale_code, multiplier=multiplier)
        return mx.decode(payload, x.size, element, multiplier=multiplier)

    for multiplier in (0.25, 0.21, 3.0):
        found = np.stack([round_trip(row, shared, multiplier) for row in x])
        unit = np.repeat(np.exp2(shared - 127.0), 32)
        with np.errstate(invalid="ignore"):
            u = (x / unit).astype(np.float32) * np.float32(multiplier)
        expected = codes_as_floats(nearest_codes(u, element), element) * unit / multiplier
        expected[:, 32:64] = np.nan
        np.testing.assert_allclose(found, expected, rtol=0 if multiplier == 0.25 else 2e-7)


@every_element
def test_saturated_values_are_counted(element):
    rng = np.random.default_rng(6)
    u = rng.uniform(0, element.max_value, (6, 32)) * rng.choice([-1, 1], (6, 32))
    u[:, 0] = element.max_value  # not beyond itself
    beyond = np.nextafter(np.float32(element.max_value), np.float32(np.inf))
    u[1, 3], u[1, 4], u[4, 31] = beyond, -beyond, 2.0 ** (element.emax + 1) * (1 - 2.0**-23)
    u[5, 9:11] = np.nan, -np.inf
    power = np.array([-127, 0, 3, -20, 90, 0])
    x = (u * np.exp2(power.astype(np.float64))[:, None]).astype(np.float32).reshape(-1)[:-5]
    assert count_saturated(x, element) == 3
    finite = u[:5]
    for multiplier in (2.0, 0.5):
        expected = np.sum(np.abs(finite.astype(np.float32)) * multiplier > element.max_value)
        assert count_saturated(x, element, multiplier=multiplier) == expected
    doubled = jnp.minimum(scale_codes(x, element), 254) + 1
    assert count_saturated(x, element, scale_code=doubled) == 0
    # What is counted decodes to max_value.
    found = decode(encode(x, element), x.size, element)[32:64] / 2.0 ** power[1]
    np.testing.assert_array_equal(found[3:5], [element.max_value, -element.max_value])


def test_shapes_that_do_not_fit_are_errors(unchecked_shapes):
    element = mx.ELEMENTS["e4m3"]
    x = jnp.arange(100.0)
    with pytest.raises(ValueError, match="last axis is 32"):
        mx.block_exponent(x, element)
    with pytest.raises(ValueError, match="4 blocks of 32"):
        mx.encode(x, element, scale_code=jnp.zeros(3, jnp.uint8))
    with pytest.raises(ValueError, match="4 blocks of 32"):
        mx.count_saturated(x, element, scale_code=jnp.zeros(5, jnp.uint8))
    with pytest.raises(ValueError, match="one word per value"):
        mx.encode(x, element, noise=jnp.zeros(128, jnp.uint32))
    with pytest.raises(ValueError, match="100 e4m3 values take 33 words"):
        mx.decode(jnp.zeros(34, jnp.uint32), 100, element)
