"""MX floats: kernels give the bits of XLA's codec, and lower for GPUs on any machine.

Bits are those of Pallas' interpreter; `tests/gpu` compares those of GPUs. The rounding is that of
ml_dtypes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import daily, over, small
from kernel_runs import MX, assert_same_mx, lowered_for_cuda, mx_gradients, mx_program, mx_results

import dynamiq_jax as dq
from dynamiq_jax.contrib.mx import ELEMENTS
from pallas_kernels import mx
from pallas_kernels._compat import RUNS_MOSAIC

SIZE = 2 * 128 * 19 - 77  # two chunks of 19 parts, which are no power of two, and padding

DAILY = ["e4m3, nearest", "e3m2, stochastic", "e2m1, nearest"]

FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_codes_are_those_of_the_nearest_float_and_come_back(name):
    element, dtype = ELEMENTS[name], FLOATS[name]
    top = np.arange(element.max_code + 1, dtype=np.uint8).view(dtype).astype(np.float32)
    near = np.concatenate([top, (top[1:] + top[:-1]) / 2, [2 * top[-1]]]).astype(np.float32)
    x = np.concatenate([near, *(np.nextafter(near, np.float32(to)) for to in (0, np.inf))])
    x = np.concatenate([x, -x])
    expected = np.clip(x, -top[-1], top[-1]).astype(dtype)
    codes = jax.jit(lambda x: mx.quantize(x, element, None))(x)
    np.testing.assert_array_equal(codes, expected.view(np.uint8))
    back = jax.jit(lambda codes: mx.dequantize(codes, element))(codes)
    assert_same_bits(np.asarray(back), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["e4m3, nearest", "e2m1, stochastic"])
def test_multiplications_give_the_bits_of_integer_arithmetic(name):
    """If no number is subnormal: this CPU flushes them, and GPUs keep them."""
    rng, element = np.random.default_rng(7), ELEMENTS[name[:4]]
    shape = mx.QUARTERS, 50, mx.QUADS, 4
    power = np.exp2(rng.integers(-100, 100, (*shape[:2], 1, 1)).astype(np.float64))
    spread = np.exp2(-rng.integers(0, 20, shape))
    x = np.sign(rng.normal(size=shape)) * rng.uniform(1, 2, shape) * spread * power
    noise = rng.integers(0, 2**32, shape, dtype=np.uint32) if name.endswith("ic") else None

    # Elements with the top exponent bit are normal, also as the f32 that begins with their code.
    codes = np.arange(1 << element.exponent_bits + element.mantissa_bits - 1, dtype=np.uint32)
    codes = codes + codes.size
    codes = np.concatenate([codes, codes + 2 * codes.size])

    @jax.jit
    def both(x, noise, codes):
        encode = partial(mx.encode_blocks, x, element, noise)
        decode = partial(mx.dequantize, codes, element)
        return [(encode(keeps_subnormals=k), decode(keeps_subnormals=k)) for k in (False, True)]

    jax.tree.map(assert_same_bits, *both(x.astype(np.float32), noise, codes))


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "not finite"])
@pytest.mark.parametrize("name", daily(MX, DAILY[:1]))  # daily collectives have e2m1
def test_interpreted_kernels_give_the_bits_of_xla(name, finite):
    dtype = jnp.bfloat16 if len(name) % 2 else jnp.float32
    x = mx_gradients(SIZE, finite=finite)
    expected, actual = (mx_results(MX[name], x, dtype, of) for of in ("jnp", "interpret"))
    assert_same_mx(actual, expected, finite=finite)
    bad = np.pad(~np.isfinite(x).all(axis=0), (0, -SIZE % 32)).reshape(-1, 32).any(axis=1)
    assert bad.any() != finite
    np.testing.assert_array_equal(np.isnan(actual["decode"]), np.repeat(bad, 32)[:SIZE])


def ran(call, backend, x):
    """A call of every worker under a backend."""
    method = dq.contrib.MXFP4(rounding="stochastic", backend=backend)
    run = jax.vmap(lambda x: call(x, "data", small(method)), axis_name="data")
    return np.asarray(jax.jit(run)(x))


def summed(topology, x, name, method):
    return dq.psum(x, name, compression=over(topology, method))


def scattered(x, name, method):
    return dq.psum_scatter(x, name, tiled=True, compression=over(dq.Ring(unroll_up_to=1), method))


def gathered(x, name, method):
    return dq.all_gather(x, name, compression=method)


def remembered(x, name, method):
    memory = small(dq.ErrorFeedback(method.method))
    state = memory.init_state(x, 4)
    out = dq.reduce(x, name, op="sum", state=state, compression=over(dq.Butterfly(), memory))
    return jnp.stack([out.tree, *jax.tree.leaves(out.state)])


CALLS = {
    "direct": partial(summed, dq.Direct()),
    "permutes": partial(summed, dq.Direct(transport="permutes")),
    "ring": partial(summed, dq.Ring(unroll_up_to=1, streams=2)),
    "psum_scatter": scattered,
    "all_gather": gathered,
    "memory": remembered,
}


@pytest.mark.parametrize("name", daily(CALLS, ["permutes", "memory"]))
def test_collectives_by_kernels_give_the_bits_of_xla(name):
    x = jnp.asarray(mx_gradients(4 * 600, finite=True))
    expected, actual = (ran(CALLS[name], backend, x) for backend in ("jnp", "interpret"))
    assert np.isfinite(expected).all() and np.any(expected)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", daily(MX, DAILY))
@pytest.mark.parametrize("backend", ["triton", "mosaic"] if RUNS_MOSAIC else ["triton"])
def test_kernels_lower_for_cuda(backend, name, monkeypatch):
    monkeypatch.setattr("dynamiq_jax.contrib.mx.resolve_backend", lambda backend: backend)
    x = jax.ShapeDtypeStruct((4, SIZE), jnp.float32)
    lowered = lowered_for_cuda(mx_program(MX[name], SIZE, jnp.bfloat16, backend), x)
    for kernel in ("encode", "hop", "sum", "decode"):
        assert f"dynamiq_mx_{kernel}" in lowered


@pytest.mark.skipif(not RUNS_MOSAIC, reason="this JAX has too little of Mosaic GPU")
@pytest.mark.parametrize("plane", [8, 4, 2])
def test_a_thread_of_mosaic_finds_its_fields_where_the_format_has_them(plane):
    from pallas_kernels.mx_mosaic import word_of

    # One quad: field i of its 16 is 1 in row i of the batch, and 0 in all others.
    fields = np.eye(16, dtype=np.uint32).reshape(16, mx.QUARTERS, 1, 1, 4)
    join = lambda fields: mx.ARRAYS.join(fields, plane).reshape(-1)
    words = np.asarray(jax.jit(jax.vmap(join))(fields))
    expected = np.zeros((16, plane // 2), np.uint32)
    for i in range(16):
        word, bit = word_of(i, plane)
        expected[i, word] = 1 << bit
    np.testing.assert_array_equal(words, expected)


def test_unknown_backends_and_absent_gpus_are_refused():
    with pytest.raises(ValueError, match="backend='cuda'; expected .*'triton'"):
        dq.contrib.MXFP8(backend="cuda")  # pyright: ignore[reportArgumentType]
    for named in ("triton", "mosaic"):
        method = small(dq.contrib.MXFP8(backend=named))
        with pytest.raises(NotImplementedError, match=f"'{named}' needs an NVIDIA.*backend=None"):
            jax.vmap(lambda x, m=method: dq.psum(x, "data", compression=m), axis_name="data")(
                jnp.ones((4, 600))
            )


@pytest.mark.release
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_every_operation_is_timed_with_its_bytes(name):
    import coding_kernels  # pyright: ignore[reportMissingImports]

    found = coding_kernels.bench_mx(4096, name, repeats=1, backend="jnp")
    assert [*found] == ["encode", "hop", "hop, 3 arrived", "sum", "decode"]
    assert all(timing.time_us > 0 for timing, _ in found.values())
    gradient, payload = 2 * 4096, 4096 * (8.25 if name == "mxfp8" else 4.25) / 8
    moved = {kernel: moved for kernel, (_, moved) in found.items()}
    assert moved["encode"] == moved["decode"] == gradient + payload
    assert moved["hop"] == gradient + 2 * payload
    assert moved["sum"] == 2 * gradient + payload
