"""The GPU kernels give the integers of the reference, which runs on the CPU of the same machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_runs import FORMATS, kernels_of, operands, payloads, run

import pallas_kernels as pk
from pallas_kernels._compat import RUNS_MOSAIC

BACKENDS = ["triton", "mosaic"] if RUNS_MOSAIC else ["triton"]
SIZES = (2**18, 2**17 + 3 * 256, 100_003)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_as_the_reference(backend, name, dtype):
    fmt, size = FORMATS[name], SIZES[len(name) % len(SIZES)]
    with jax.default_device(jax.devices("cpu")[0]):
        layout, given = operands(fmt, size, dtype)
        arrived = payloads(layout, fmt, given)
        expected = run(kernels_of(name), layout, fmt, dtype, "jnp", given, arrived)
    on_gpu = jax.device_put((given, arrived), jax.devices()[0])
    actual = run(kernels_of(name), layout, fmt, dtype, backend, *on_gpu)
    for kernel, value in expected.items():
        np.testing.assert_array_equal(actual[kernel], value, err_msg=kernel)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_agree_to_rounding(backend, size):
    x = jax.random.normal(jax.random.key(0), (size,)) + 0.5
    expected = pk.statistics(jax.device_put(x, jax.devices("cpu")[0]), backend="jnp")
    actual = pk.statistics(x, backend=backend)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=2e-6, atol=1e-6)
