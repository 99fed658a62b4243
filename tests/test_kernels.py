"""The Pallas kernels give the reference's bits on the interpreter, and still lower for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import pallas_kernels as pk
from dynamiq_jax.layout import make_layout
from dynamiq_jax.plan import order_and_tiles
from dynamiq_jax.synthetic import lognormal_mixture
from pallas_kernels import triton

SIZE = 2 * 8 * 2 * 256 + 1000  # two chunks of two tiles and more; no multiple of anything
FORMATS = {
    "default": pk.WireFormat(),
    "paper": pk.WireFormat(levels="geometric", rounding="correlated"),
    "uniform": pk.WireFormat(levels="uniform", rounding="independent"),
    "bf16 scales": pk.WireFormat(group_scale="bf16", group_size=32),
    "small groups": pk.WireFormat(group_size=8, super_group_size=128),
    "large groups": pk.WireFormat(group_size=64, super_group_size=1024),
    "odd widths": pk.WireFormat(widths=(0, 1, 3, 6, 16)),
} | {f"width {w}": pk.WireFormat(widths=(w,)) for w in range(17)}


def _inputs(fmt, dtype=jnp.float32):
    bits = 5.0 if len(fmt.widths) > 1 else fmt.widths[0] + 1.0
    layout = make_layout(SIZE, 2, bits=bits, fmt=fmt, stats_per_super_group=2)
    rows = -(-SIZE // fmt.super_group_size)
    x = lognormal_mixture(jax.random.key(1), 2, rows, fmt.super_group_size)[:, :SIZE]
    mean, sqnorm = pk.statistics(x[0], super_group_size=fmt.super_group_size, backend="jnp")
    pad = layout.super_groups - rows
    order, tiles = order_and_tiles(jnp.pad(sqnorm, (0, pad)), layout, fmt)
    mean = jnp.pad(mean, (0, pad)).astype(jnp.bfloat16).astype(jnp.float32)
    noise = pk.slot_noise(jnp.array([3, 4], jnp.uint32), 5, fmt.rounding)
    return layout, x.astype(dtype), mean, order, tiles, noise


def _run(backend, fmt, dtype):
    """Every kernel; each takes the payloads of the reference."""
    layout, x, mean, order, tiles, noise = _inputs(fmt, dtype)
    both, one = jnp.arange(2, dtype=jnp.int32), jnp.int32(1)
    kw = {"fmt": fmt, "backend": backend}
    sized = kw | {"payload_words": layout.payload_words}
    rows = -(-SIZE // fmt.super_group_size)

    def compress(backend):
        return pk.compress(x[0], mean, order, tiles, both, noise[0], **sized | {"backend": backend})

    payload = jax.jit(lambda: compress("jnp"))()
    into = jnp.full((rows, fmt.super_group_size), 7, dtype)

    @jax.jit
    def others(payload):
        hop = pk.decompress_accumulate_recompress(
            payload, x[1], mean, order, tiles, tiles, one, noise[1], **sized
        )
        total = pk.decompress_accumulate(payload, x[1], mean, order, tiles, one, **kw)
        whole = pk.decompress(
            payload, mean, order, tiles, both, rows=rows, dtype=dtype, divisor=3, **kw
        )
        part = pk.decompress(
            payload[1:], mean, order, tiles, both[1:], into, rows=rows, dtype=dtype, **kw
        )
        return hop, total, whole, part

    last = int(tiles[-1])
    used = (last >> 5) * 4 + fmt.tile_words(last & 31)
    hop, total, whole, part = others(payload)
    return {
        "compress": np.asarray(jax.jit(lambda: compress(backend))())[:, :used],
        "hop with two inputs": np.asarray(hop)[:used],
        "decompress_accumulate": np.asarray(total),
        "decompress": np.asarray(whole),
        "decompress into": np.asarray(part),
    }


@pytest.mark.parametrize("name", FORMATS)
def test_interpreted_kernels_give_the_bits_of_the_reference(name):
    dtype = jnp.bfloat16 if len(name) % 2 else jnp.float32
    expected, actual = (_run(backend, FORMATS[name], dtype) for backend in ("jnp", "interpret"))
    for kernel, value in expected.items():
        np.testing.assert_array_equal(actual[kernel], value, err_msg=kernel)


def test_decompress_into_keeps_other_chunks():
    fmt = FORMATS["default"]
    _, _, _, order, _, _ = _inputs(fmt)
    part = _run("jnp", fmt, jnp.float32)["decompress into"]
    other = np.asarray(order)[0]
    other = other[other < part.shape[0]]
    assert (part[other] == 7).all()
    assert (np.delete(part, other, axis=0) != 7).any()


def test_interpreted_statistics_agree_to_rounding():
    x = jax.random.normal(jax.random.key(0), (SIZE,)) + 0.5
    for actual, expected in zip(
        pk.statistics(x, backend="interpret"), pk.statistics(x, backend="jnp"), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)


def _lowered_for_cuda(function, *args) -> str:
    """The GPU program of ``function``, lowered on whatever machine this is."""
    if jax.__version_info__ < (0, 11):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    from jax.sharding import AbstractDevice, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["default", "paper", "bf16 scales", "odd widths"])
def test_kernels_lower_for_cuda(name):
    fmt = FORMATS[name]
    layout, x, mean, order, tiles, noise = _inputs(fmt)
    one = jnp.zeros((1,), jnp.int32)
    payloads = jnp.zeros((2, layout.payload_words), jnp.uint32)
    sized = {"payload_words": layout.payload_words, "fmt": fmt}
    rows = -(-SIZE // fmt.super_group_size)
    programs = {
        "statistics": lambda x: triton.statistics(x, super_group_size=fmt.super_group_size),
        "compress": lambda x: triton.compress(
            x, mean, order, tiles, one, noise[0], **sized
        ),
        "decompress_accumulate_recompress": lambda x: triton.decompress_accumulate_recompress(
            payloads, x, mean, order, tiles, tiles, one[0], noise[1], **sized
        ),
        "decompress_accumulate": lambda x: triton.decompress_accumulate(
            payloads, x, mean, order, tiles, one[0], fmt=fmt
        ),
        "decompress": lambda x: triton.decompress(
            payloads, mean, order, tiles, one.repeat(2), rows=rows, dtype=x.dtype, divisor=1,
            fmt=fmt,
        ),
    }  # fmt: skip
    for kernel, program in programs.items():
        assert f"dynamiq_{kernel}" in _lowered_for_cuda(program, x[0]), kernel
