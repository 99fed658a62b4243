"""Programs that are compiled as users compile them have the bits of those that tests compile.

Products that meet additions are exact, so that contracting them changes nothing; `test_psum`
compares the wire formats of DynamiQ, this file topologies, kernels and other methods.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EVERY_METHOD, METHODS, assert_same_bits, gradient, sharded, vmapped
from compiler import AS_USERS
from kernel_runs import FORMATS, operands, payloads, programs, used_words

import dynamiq_jax as dq

KEY = jax.random.key(3)


def both(program, *args):
    """Results of a jitted function without and with optimisations."""
    lowered = program.lower(*args)
    compiled = lowered.compile(), lowered.compile(compiler_options=AS_USERS)
    plain, optimized = (jax.tree.map(np.asarray, run(*args)) for run in compiled)
    return plain, optimized


TOPOLOGIES = [dq.Ring(unroll_up_to=4), dq.Butterfly(), dq.Direct()]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: type(t).__name__)
def test_every_topology(topology):
    x = gradient(3, 4, 2 * 4 * 8 * 256 - 100)
    assert_same_bits(*both(vmapped(METHODS["default"], topology), x, KEY))


def test_devices_of_their_own():
    x = gradient(4, 4, 2 * 4 * 8 * 256 - 100)
    assert_same_bits(*both(sharded(METHODS["paper"], dq.Ring(unroll_up_to=4), n=4), x, KEY))


@pytest.mark.parametrize("collective", [dq.psum_scatter, dq.all_gather])
def test_one_half_of_an_all_reduce(collective):
    def one(x, key):
        return collective(x, "data", tiled=True, method=METHODS["default"], key=key)

    x = gradient(6, 4, 4 * 8 * 256 * 3)
    assert_same_bits(*both(jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data")), x, KEY))


STATELESS = [
    name
    for name, row in EVERY_METHOD.items()
    if not row.method.method.needs_state and row.columns is None and "thc" not in name
]
"""But for "thc", whose rotation adds up what is not exact, and methods of matrices, whose products
do."""


@pytest.mark.parametrize("name", STATELESS[1:])
def test_other_methods(name):
    row = EVERY_METHOD[name]
    x, topology = gradient(5, 3, 3 * 8 * 256 - 77), row.routes.get("ring")
    assert_same_bits(*both(vmapped(row.method, topology), x, KEY))


@pytest.mark.parametrize("backend", ["jnp", "interpret"])
def test_coding_kernels(backend):
    fmt = FORMATS["default"]
    layout, given = operands(fmt, 2 * 8 * 2 * 256 + 1000, jnp.float32)
    arrived = payloads(layout, fmt, given)
    kernels = programs(layout, fmt, jnp.float32, backend)
    for name in ("compress", "decompress_accumulate_recompress", "decompress_accumulate"):
        plain, optimized = both(jax.jit(kernels[name]), given, arrived)
        words = used_words(given.tiles["recompress" in name], fmt)
        words = None if name == "decompress_accumulate" else words
        assert_same_bits(plain[:, :words], optimized[:, :words])
