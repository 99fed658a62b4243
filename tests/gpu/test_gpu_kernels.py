"""The GPU kernels give the integers of the reference, which runs on the CPU of the same machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dynamiq_jax.layout import make_layout
from dynamiq_jax.plan import order_and_tiles
from dynamiq_jax.synthetic import lognormal_mixture

FORMATS = {
    "default": (pk.WireFormat(), 5.0),
    "paper": (pk.WireFormat(levels="geometric", rounding="correlated"), 5.0),
    "uniform": (pk.WireFormat(levels="uniform", rounding="independent"), 4.0),
    "bf16 scales": (pk.WireFormat(group_scale="bf16", group_size=32), 5.0),
    "small groups": (pk.WireFormat(group_size=8, super_group_size=128), 6.0),
    "large groups": (pk.WireFormat(group_size=64, super_group_size=1024), 5.0),
    "odd widths": (pk.WireFormat(widths=(0, 1, 3, 6, 16)), 5.0),
} | {f"width {w}": (pk.WireFormat(widths=(w,)), w + 1.0) for w in range(17)}
SIZES = (2**18, 2**17 + 3 * 256, 100_003)


def _run(backend, device, fmt, bits, size, dtype, payload=None):
    """All kernels of one backend on the same inputs; payload of the other backend if given."""
    with jax.default_device(jax.devices("cpu")[0]):
        layout = make_layout(size, 2, bits=bits, fmt=fmt, stats_per_super_group=2)
        rows = -(-size // fmt.super_group_size)
        x = lognormal_mixture(jax.random.key(1), 2, rows, fmt.super_group_size)
        x = x[:, :size].astype(dtype)
        mean, sqnorm = pk.statistics(x[0], super_group_size=fmt.super_group_size, backend="jnp")
        pad = layout.super_groups - rows
        order, tiles = order_and_tiles(jnp.pad(sqnorm, (0, pad)), layout, fmt)
        mean = jnp.pad(mean, (0, pad)).astype(jnp.bfloat16).astype(jnp.float32)
        noise = pk.slot_noise(jnp.array([3, 4], jnp.uint32), 5, fmt.rounding)
    x, mean, order, tiles, noise = jax.device_put((x, mean, order, tiles, noise), device)
    both, one = jnp.arange(2, dtype=jnp.int32), jnp.int32(1)
    kw = {"fmt": fmt, "backend": backend}
    sized = kw | {"payload_words": layout.payload_words}
    with jax.default_device(device):
        first = jax.jit(lambda: pk.compress(x[0], mean, order, tiles, both, noise[0], **sized))()
        payload = first if payload is None else jax.device_put(payload, device)
        hop = jax.jit(
            lambda p: pk.decompress_accumulate_recompress(
                p, x[1], mean, order, tiles, tiles, one, noise[1], **sized
            )
        )(payload[1:])
        merged = jax.jit(
            lambda p: pk.decompress_accumulate_recompress(
                p, x[1], mean, order, tiles, tiles, one, noise[3], **sized
            )
        )(jnp.stack([payload[1], payload[1]]))
        total = jax.jit(lambda p: pk.decompress_accumulate(p, x[1], mean, order, tiles, one, **kw))(
            payload[1:]
        )
        out = jax.jit(
            lambda p: pk.decompress(
                p, mean, order, tiles, both, rows=rows, dtype=dtype, divisor=3, **kw
            )
        )(payload)
    last = int(tiles[-1])
    used = (last >> 5) * 4 + fmt.tile_words(last & 31)
    return payload, {
        "compress": np.asarray(first)[:, :used],
        "decompress_accumulate_recompress": np.asarray(hop)[:used],
        "two inputs": np.asarray(merged)[:used],
        "decompress_accumulate": np.asarray(total),
        "decompress": np.asarray(out),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_same_bits_as_the_reference(name, dtype):
    fmt, bits = FORMATS[name]
    size = SIZES[len(name) % len(SIZES)]
    payload, expected = _run("jnp", jax.devices("cpu")[0], fmt, bits, size, dtype)
    _, actual = _run("pallas", jax.devices()[0], fmt, bits, size, dtype, np.asarray(payload))
    for kernel, value in expected.items():
        np.testing.assert_array_equal(actual[kernel], value, err_msg=kernel)


@pytest.mark.parametrize("size", SIZES)
def test_statistics_agree_to_rounding(size):
    x = jax.random.normal(jax.random.key(0), (size,)) + 0.5
    expected = pk.statistics(jax.device_put(x, jax.devices("cpu")[0]), backend="jnp")
    actual = pk.statistics(x, backend="pallas")
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=2e-6, atol=1e-6)
