"""Meshes on GPUs: tensor parallel x data parallel, and the losses of `test_deferred`."""

import jax
import numpy as np
import pytest
import test_deferred as cpu
from asserts import assert_close, assert_same_bits
from cases import daily
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import gradient

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

PARTS = 2
ROWS, COLUMNS = 512, 2048
METHOD = dq.Compression(dq.DynamiQ(), min_leaf_size=0, min_bucket_size=0)
SPECS = {"matrix": P(None, "model"), "norm": P()}


def mesh_of(*names):
    devices = jax.devices()
    if len(devices) < 4 or len(devices) % 2:
        pytest.skip(f"needs 4 GPUs or a larger even number, this machine has {len(devices)}")
    shape = len(devices) // PARTS, PARTS
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2)


def test_every_gpu_reduces_its_shard_as_if_there_were_no_others():
    mesh = mesh_of("data", "model")
    n, key = mesh.shape["data"], jax.random.key(1)
    matrix = np.asarray(gradient(0, n, ROWS * COLUMNS)).reshape(n, ROWS, COLUMNS)
    norm = np.asarray(gradient(1, n, 2**16))

    def reduced(mesh, specs, tree):
        def one(tree):
            tree = jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)
            return dq.pmean(tree, "data", compression=METHOD, key=key, specs=specs)

        options = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}}
        return jax.jit(jax.shard_map(one, mesh=mesh, **options))(tree)

    tree = {"matrix": matrix, "norm": norm}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, P("data", *SPECS[name])))
        for name, x in tree.items()
    }
    found = reduced(mesh, SPECS, placed)
    for part, own in enumerate(np.split(matrix, PARTS, axis=2)):
        data = Mesh(mesh.devices[:, part], ("data",))
        alone = reduced(data, None, {"matrix": own})["matrix"]
        copies = reduced(data, None, {"norm": norm})["norm"]
        for device in mesh.devices[:, part]:
            held = {name: _held(leaf, device) for name, leaf in found.items()}
            assert_same_bits(held["matrix"], np.asarray(alone))
            assert_same_bits(held["norm"], np.asarray(copies))
    assert 0 < float(vnmse(np.asarray(found["matrix"]), matrix.mean(axis=0))) < 0.02


def _held(leaf, device):
    """The part of an array on one device."""
    (shard,) = (shard for shard in leaf.addressable_shards if shard.device == device)
    return np.asarray(shard.data)


LOSSES = (
    "masked", "linear penalty", "penalty", "factor", "checkpointed penalty", "parameters alone"
)  # fmt: skip


@pytest.mark.parametrize("name", daily(LOSSES, ["checkpointed penalty"]))
def test_gradients_are_those_of_the_global_loss(name):
    if (n := jax.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {n}")
    args = cpu.placed(jax.make_mesh((n,), ("data",)))
    f = dq.value_and_grad(cpu.LOSSES[name], axis_name="data", compression=cpu.F32)
    with jax.default_matmul_precision("highest"):
        assert_close(jax.jit(f)(*args), cpu.plain(cpu.LOSSES[name]))
