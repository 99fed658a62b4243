"""One of two processes whose batches end early, and the recipe for them.

    python uneven_worker.py ADDRESS PROCESS

First this process runs the recipe: the other one has no rows in the last step. Then both pass
different numbers of rows without a mask, and with their numbers as weights.
"""

import sys
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.compression import agreement
from dynamiq_jax.methods.metrics import vnmse


def check(found):
    """The last step of the recipe is one of five rows, whoever passed them."""
    params, grads = jax.device_get((found["params"], found["grads"]))
    before = jax.tree.map(lambda p, g: p + 0.01 * g, params, grads)
    five = jax.tree.map(lambda x: x[:5], found["batches"][3])
    loss, exact = jax.value_and_grad(found["loss_fn"])(before, five)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)
    assert 0 < float(vnmse(grads, exact)) < 0.05
    return True


def main(address, process):
    from test_recipes import RECIPES, START

    jax.distributed.initialize(address, 2, process, shutdown_timeout_seconds=10)
    found, start = {}, ModuleType("start")
    sys.modules["start"] = start
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(START.replace("device_count=8", "device_count=4"), vars(start))
        exec(RECIPES["short_batches"], found)
    found = vars(start) | found
    assert found["steps"] == 4 and len(found["own"]) == 4 - process and check(found)

    agreement.SHORT_PATIENCE = 1.0
    mesh, sharding = found["mesh"], NamedSharding(found["mesh"], P("data"))
    rows = (16, 8)[process]
    x = np.random.default_rng(process).standard_normal((rows, 256), np.float32) + process
    x = jax.make_array_from_process_local_data(sharding, x, (2 * rows, 256))
    loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    w = jax.device_put(np.full((256, 8), 0.01, np.float32), NamedSharding(mesh, P()))
    options = {"mesh": mesh, "axis_name": "data", "compression": found["compression"]}
    weight = lambda w, x: jnp.float32(x.shape[0])
    for name, own in {"plain": {}, "weighted": {"weight": weight}}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = float(jax.jit(dq.value_and_grad(loss, **options, **own))(w, x)[0])
        print(f"{name} {value:.5f}; {[str(one.message) for one in caught]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
