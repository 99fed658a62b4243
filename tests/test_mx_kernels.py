"""MX floats' kernels give the bits of XLA's codec, and lower for GPUs on any machine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import daily, small
from kernel_runs import MX, assert_same_mx, lowered_for_cuda, mx_gradients, mx_program, mx_results

import dynamiq_jax as dq
from pallas_kernels.triton import call_options

SIZE = 2 * 128 * 19 - 77  # two chunks of 19 parts, which are no power of two, and padding

DAILY = ["e4m3, nearest", "e3m2, stochastic", "e2m1, nearest"]


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "not finite"])
@pytest.mark.parametrize("name", daily(MX, DAILY))
def test_interpreted_kernels_give_the_bits_of_xla(name, finite):
    dtype = jnp.bfloat16 if len(name) % 2 else jnp.float32
    x = mx_gradients(SIZE, finite=finite)
    expected, actual = (mx_results(MX[name], x, dtype, of) for of in ("jnp", "interpret"))
    assert_same_mx(actual, expected, finite=finite)


def ran(call, backend, x):
    """A call of every worker under a backend."""
    method = dq.comparators.MXFP4(rounding="stochastic", backend=backend)
    run = jax.vmap(lambda x: call(x, "data", small(method)), axis_name="data")
    return np.asarray(jax.jit(run)(x))


def summed(topology, x, name, method):
    return dq.psum(x, name, compression=method, topology=topology)


def scattered(x, name, method):
    return dq.psum_scatter(
        x, name, tiled=True, compression=method, topology=dq.Ring(unroll_up_to=1)
    )


def gathered(x, name, method):
    return dq.all_gather(x, name, compression=method)


def remembered(x, name, method):
    memory = small(dq.ErrorFeedback(method.method))
    state = memory.init_state(x, 4)
    out = dq.reduce(x, name, op="sum", state=state, compression=memory, topology=dq.Butterfly())
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
def test_kernels_lower_for_cuda(name, monkeypatch):
    monkeypatch.setattr("dynamiq_jax.comparators.mx.resolve_backend", lambda backend: backend)
    x = jax.ShapeDtypeStruct((4, SIZE), jnp.float32)
    lowered = lowered_for_cuda(mx_program(MX[name], SIZE, jnp.bfloat16, "triton"), x)
    for kernel in ("encode", "hop", "sum", "decode"):
        assert f"dynamiq_mx_{kernel}" in lowered
        assert call_options(f"mx_{kernel}", interpret=False)["compiler_params"].num_warps > 0
