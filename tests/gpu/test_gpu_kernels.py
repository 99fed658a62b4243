"""The GPU kernels give the integers of the reference, which runs on the CPU of the same machine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from kernel_runs import (
    FORMATS,
    MX,
    assert_same_mx,
    dealt,
    energies,
    kernels_of,
    mx_gradients,
    mx_results,
    operands,
    payloads,
    run,
)

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.methods.dynamiq.codec import make_plan
from pallas_kernels._compat import RUNS_MOSAIC, triton

BACKENDS = ["triton"] * (triton() is not None) + ["mosaic"] * RUNS_MOSAIC
DTYPES = [jnp.float32, jnp.bfloat16]
DEALT = [(1, 3, 1000, 5), (4, 2, 96, 5)]
SIZES = (2**18, 2**17 + 3 * 256, 100_003)


@pytest.mark.parametrize(
    "dtype", daily([jnp.float32, jnp.bfloat16], [jnp.bfloat16]), ids=["f32", "bf16"]
)
@pytest.mark.parametrize("name", daily(FORMATS, ["default", "large groups", "dither, odd widths"]))
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


@pytest.mark.parametrize("super_group_size", daily([128, 256, 1024, 2048], [256]))
@pytest.mark.parametrize("dtype", daily([*DTYPES, jnp.float16], [jnp.bfloat16]))
@pytest.mark.parametrize("size", daily(SIZES, [100_003]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_agree_to_rounding(backend, size, dtype, super_group_size):
    """Also for each of several gradients, and means are not finite where a coordinate is not."""
    x = (jax.random.normal(jax.random.key(0), (3, size)) + 0.5).astype(dtype)
    x = x.at[1, 5000].set(jnp.nan).at[2, -1].set(jnp.inf)

    def statistics(x, backend):
        of = partial(pk.statistics, super_group_size=super_group_size, backend=backend)
        return of(x[0]), jax.vmap(of)(x)

    expected = statistics(jax.device_put(x, jax.devices("cpu")[0]), "jnp")
    assert np.isnan(expected[1][0][1, 5000 // super_group_size])
    actual = statistics(x, backend)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shards", "chunks", "size", "padding"),
    daily([(1, 8, 4096, 0), (1, 1, 8, 3), (2, 1, 2**17 + 64, 9), *DEALT], DEALT[1:]),
)
def test_super_groups_are_dealt_as_by_the_reference(backend, shards, chunks, size, padding):
    deal = jax.jit(lambda energy: [dealt(energy, chunks, size, of) for of in ("jnp", backend)])
    for kind, energy in energies(shards, chunks * size - padding).items():
        expected, actual = deal(energy)
        for field, one, other in zip(expected._fields, expected, actual, strict=True):
            jax.tree.map(
                partial(np.testing.assert_array_equal, err_msg=f"{field}, {kind}"), one, other
            )


@pytest.mark.parametrize("size", daily([2**23, 2**20 + 3 * 256], [2**20 + 3 * 256]))
def test_plans_are_those_of_the_reference(size):
    method, n = dq.DynamiQ(), 8
    layout = method.layout(size, n, dq.Direct())
    (energy,) = energies(1, layout.rows)["spread"]
    stats = jnp.asarray(energy, jnp.bfloat16).at[5].set(jnp.nan)[None]
    expected, actual = (
        jax.jit(partial(make_plan, layout=layout, backend=backend))(stats, jnp.uint32(0))
        for backend in ("jnp", BACKENDS[0])
    )
    for field, one, other in zip(expected._fields, expected, actual, strict=True):
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=field), one, other)


@pytest.mark.parametrize("finite", daily([True, False], [False]), ids=["finite", "not finite"])
@pytest.mark.parametrize("name", daily(MX, ["e4m3, nearest", "e2m1, nearest"]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_mx_kernels_give_the_bits_of_xla(backend, name, finite):
    """XLA's program runs on the GPU, too, where sums keep subnormal numbers."""
    dtype, size = (jnp.bfloat16, 100_003) if len(name) % 2 else (jnp.float32, 2**17)
    x = mx_gradients(size, finite=finite)
    expected, actual = (mx_results(MX[name], x, dtype, of) for of in ("jnp", backend))
    assert_same_mx(actual, expected, finite=finite)


@pytest.mark.parametrize("size", daily([2**20, 2**24 + 128], [2**20]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_mx_kernels_of_many_programs_give_the_bits_of_xla(backend, size):
    method = dq.contrib.MXFP8()
    x = mx_gradients(size, finite=True)
    expected, actual = (mx_results(method, x, jnp.bfloat16, of) for of in ("jnp", backend))
    assert_same_mx(actual, expected, finite=True)
