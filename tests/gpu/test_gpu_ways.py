"""Every way to train on all GPUs, with the Triton kernels, against plain JAX on one of them."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import test_ways as rows
from cases import daily

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

ROWS = [
    *[(text, "float32", rows.check_exact) for text in rows.EXACT],
    *[(text, "bfloat16", rows.check_exact) for text in rows.BF16],
    *[(text, "float32", rows.check_compressed) for text in rows.COMPRESSED],
]
IN_CORE = (
    "psum:5 dp-layers:5 auto:5 explicit:5 zero:5/2.5 zero-pipeline:5/2.5 zero-dear:5/2.5 "
    "zero-auto:5/2.5 zero-explicit:5/2.5 fsdp:5/8 fsdp-layers:5/8 fsdp-explicit:5/8"
).split()
"""One row for each way; the rest differ in layers, checkpoints and methods."""
CORE = [row for row in ROWS if row[0] in IN_CORE]
WITHIN = {"float32": 1e-3, "bfloat16": 5e-2}


@pytest.fixture(scope="module", autouse=True)
def precise():
    """Without it products of f32 are rounded to TF32, where a rounding more or less is seen."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def programs(precise, request):
    """Every row's training and way, and its step, which other threads compile."""
    n = jax.device_count()
    if n < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {n}")
    mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        items = [item for item in request.session.items if item.path == request.path]
        for text, dtype in [(p["text"], p["dtype"]) for p in (i.callspec.params for i in items)]:
            t = rows.training(mesh, jnp.dtype(dtype))
            if (text, dtype) in found:
                continue
            try:
                way, program = rows.lowered(text, t)
            except Exception as error:  # one row's failure
                way, step = None, Future()
                step.set_exception(error)
            else:
                step = pool.submit(program.compile)
            found[text, dtype] = t, way, step
        yield found


@pytest.mark.parametrize(("text", "dtype", "check"), daily(ROWS, CORE))
def test_a_way_trains_as_plain_jax_does(programs, text, dtype, check):
    t, way, step = programs[text, dtype]
    within = (WITHIN[dtype],) if check is rows.check_exact else ()
    check(way, step.result(), t, *within)
