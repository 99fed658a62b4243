"""`dq.sequential` on GPUs: gradients reduced beside the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.metrics import vnmse

LAYERS, DIM = 6, 512
METHOD = dq.Compression(dq.DynamiQ(), topology=dq.Direct(), min_leaf_size=0, min_bucket_size=0)


def block(w, x):
    return x + jnp.tanh(x @ w)


def head(w, x):
    return jnp.mean(jnp.square(x @ w))


@pytest.mark.parametrize("early", [False, True], ids=["jax.jit", "dq.jit"])
def test_gradients_are_those_of_a_mean_after_the_backward_pass(early):
    if jax.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "blocks": jax.random.normal(keys[0], (LAYERS, DIM, DIM)) / DIM**0.5,
        "head": jax.random.normal(keys[1], (DIM, DIM)) / DIM**0.5,
    }
    x = jax.random.normal(keys[2], (mesh.size, 64, DIM))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def compressed(params, x):
        functions, parts = [*[block] * LAYERS, head], [*params["blocks"], params["head"]]
        return dq.sequential(functions, parts, x, "data", method=METHOD)

    def plain(params, x):
        x, _ = lax.scan(lambda x, w: (block(w, x), None), x, params["blocks"])
        return head(params["head"], x)

    @(dq.jit if early else jax.jit)
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def both(params, x):
        found = jax.grad(compressed)(params, x[0])
        own = jax.grad(plain)(lax.pcast(params, "data", to="varying"), x[0])
        pair = found, lax.pmean(own, "data")
        return jax.tree.map(lambda g: Axis(("data",)).to_varying(g[None]), pair)

    with jax.default_matmul_precision("highest"):
        found, exact = both(params, x)
    bound = 1.5 * METHOD.method.relative_error(mesh.size, dq.Direct())
    for name, gradient in found.items():
        assert_same_bits(gradient, np.broadcast_to(gradient[:1], gradient.shape))
        layers = zip(gradient[0], exact[name][0], strict=True) if name == "blocks" else None
        for own, other in layers or [(gradient[0], exact[name][0])]:
            assert 1e-6 < float(vnmse(own, other)) < bound
