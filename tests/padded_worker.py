"""Restores padded leaves that lie on the devices of two processes, of two devices each.

    python padded_worker.py ADDRESS PROCESS

Leaves of random shapes end with zeros for four workers. They come to two, and back.
"""

import dataclasses
import sys

import jax
import jax.experimental.multihost_utils
import numpy as np
import optax
from cases import EXACT
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax

COUNT = 6
"""How many parameters there are besides one that is never padded."""


def main(address, process):
    jax.distributed.initialize(address, 2, process, shutdown_timeout_seconds=10)
    compression = dataclasses.replace(EXACT, min_leaf_size=64)
    optimizer = dq.optax.sharded(
        optax.adam(1e-2),
        "data",
        compression=dq.Policy(gradients=compression, parameters=compression),
    )
    rng = np.random.default_rng(0)
    shapes = [
        (69,),
        (9, 35),
        *(tuple(rng.integers(5, 20, 3) | 1) for _ in range(COUNT - 2)),
        (8, 9),
    ]
    params = {str(i): rng.random(shape, np.float32) + 1 for i, shape in enumerate(shapes)}
    devices = np.array(jax.devices())
    auto = (AxisType.Auto,) * 2
    four, two = (Mesh(devices.reshape(n, -1), ("data", "other"), axis_types=auto) for n in (4, 2))

    def state(mesh):
        placed = jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, P()), lambda index: x[index]
            ), params
        )  # fmt: skip
        return dq.optax.init(optimizer, placed, mesh)

    def scaled(factor, tree):
        shardings = jax.tree.map(lambda x: x.sharding, tree)
        return jax.jit(lambda t: jax.tree.map(lambda x: factor * x, t), out_shardings=shardings)(
            tree
        )

    def check(found, like):
        adam = found.inner[0]
        for factor, tree in ((1, found.masters), (2, adam.mu), (3, adam.nu)):
            for name, x in tree.items():
                assert (x.shape, x.sharding) == (like[name].shape, like[name].sharding), name
                ends = [(0, n - own) for n, own in zip(x.shape, params[name].shape, strict=True)]
                expected = np.pad(np.float32(factor) * params[name], ends)
                for shard in x.addressable_shards:
                    np.testing.assert_array_equal(shard.data, expected[shard.index])

    saved, fresh = state(four), state(two)
    adam = saved.inner[0]._replace(mu=scaled(2, saved.masters), nu=scaled(3, saved.masters))
    saved = dataclasses.replace(saved, inner=(adam, *saved.inner[1:]))
    check(saved, saved.masters)
    differ = [n for n in params if saved.masters[n].shape != fresh.masters[n].shape]
    assert len(differ) >= 2, differ
    assert not any(saved.masters[name].is_fully_addressable for name in differ)
    found = dq.optax.restore_state(saved, fresh)
    check(found, fresh.masters)
    check(dq.optax.restore_state(found, saved), saved.masters)
    # An end that is not zero is a part of another model, on whichever process it is.
    other = dataclasses.replace(saved, masters=jax.tree.map(lambda x: x + 1, saved.masters))
    try:
        dq.optax.restore_state(other, fresh)
    except ValueError as error:
        assert f"leaf masters/{differ[0]} has" in str(error)
    else:
        raise AssertionError("an end that is not zero was taken")
    print(f"restored {len(differ)} leaves with other zeros")
    jax.experimental.multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
