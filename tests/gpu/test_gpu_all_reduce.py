"""`psum` on all GPUs of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.synthetic import lognormal_mixture

TOPOLOGIES = {
    "ring": dq.Ring(),
    "two streams": dq.Ring(streams=2, stream_size=1),
    "looped ring": dq.Ring(unroll_up_to=1),
}


def _mesh():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs at least 2 GPUs, this machine has {len(devices)}")
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_replicas_are_equal_and_accurate(topology, dtype):
    mesh = _mesh()
    x = lognormal_mixture(jax.random.key(0), mesh.size, 4096).astype(dtype)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def reduce(x):
        return dq.psum(x[0], "data", topology=topology)

    out = reduce(x)
    copies = [np.asarray(shard.data) for shard in out.addressable_shards]
    assert len(copies) == mesh.size
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy.view(np.uint8), copies[0].view(np.uint8))
    exact = np.asarray(x, np.float64).sum(0)
    error = ((copies[0].astype(np.float64) - exact) ** 2).sum() / (exact**2).sum()
    assert 1e-6 < error < 4e-3


def test_no_temporary_of_the_size_of_the_gradient():
    mesh = _mesh()
    size = 2**26
    struct = jax.ShapeDtypeStruct((mesh.size, size), jnp.bfloat16)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def reduce(x):
        return dq.psum(x.reshape(-1), "data")

    memory = reduce.lower(struct).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * 2 * size
