"""`value_and_grad` in jitted steps, and the derivative of `psum` itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

ALL = dq.DynamiQ(min_leaf_size=0, min_bucket_size=0)
EIGHT_BITS = dq.DynamiQ(bits=9.0, widths=(8,), min_leaf_size=0, min_bucket_size=0)


def _mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def _params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": 0.2 * jax.random.normal(keys[0], (32, 128)),
        "bias": jnp.zeros(128),
        "second": 0.2 * jax.random.normal(keys[1], (128, 16)),
    }


def _loss(params, x, y):
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] - y) ** 2)


def _batch():
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (64, 16))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_value_and_grad_matches_the_full_batch(kind):
    mesh = _mesh(kind)
    params = jax.device_put(_params(), NamedSharding(mesh, P()))
    batch = jax.device_put(_batch(), NamedSharding(mesh, P("data")))
    step = dq.value_and_grad(_loss, mesh=mesh, axis_name="data", method=EIGHT_BITS)
    loss, grads = jax.jit(step)(params, *batch)
    expected_loss, expected = jax.value_and_grad(_loss)(_params(), *_batch())
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert 0 < float(dq.vnmse(grads, expected)) < 2e-3
    for copies in jax.tree.leaves(jax.tree.map(lambda g: g.addressable_shards, grads)):
        assert copies.data.shape  # every device holds a copy
    for leaf in jax.tree.leaves(grads):
        first, *rest = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(rest) == 7
        for copy in rest:
            np.testing.assert_array_equal(copy, first)


def test_aux_and_key():
    mesh = _mesh(AxisType.Auto)

    def loss_with_aux(params, x, y):
        return _loss(params, x, y), {"rows": jnp.int32(x.shape[0]), "mean": jnp.mean(x)}

    step = jax.jit(
        dq.value_and_grad(loss_with_aux, mesh=mesh, axis_name="data", method=ALL, has_aux=True)
    )
    x, y = _batch()
    (_, aux), one = step(_params(), x, y, key=jax.random.key(1))
    assert int(aux["rows"]) == 64  # integers are summed
    np.testing.assert_allclose(aux["mean"], x.mean(), atol=1e-6)
    (_, _), again = step(_params(), x, y, key=jax.random.key(1))
    (_, _), other = step(_params(), x, y, key=jax.random.key(2))
    assert (one["first"] == again["first"]).all()
    assert (one["first"] != other["first"]).any()


@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_derivative_is_that_of_lax(name):
    mesh = _mesh(AxisType.Auto)
    x = jax.random.normal(jax.random.key(0), (8, 4096))
    weight = jax.random.normal(jax.random.key(1), (4096,))

    def total(reduce):
        @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
        def mapped(x):
            return reduce(x[0], "data")

        return lambda x: jnp.vdot(weight, mapped(x))

    compressed = total(lambda x, axis: getattr(dq, name)(x, axis, method=ALL))
    exact = total(getattr(lax, name))
    np.testing.assert_array_equal(jax.jit(jax.grad(compressed))(x), jax.jit(jax.grad(exact))(x))
    tangent = jax.random.normal(jax.random.key(2), x.shape)
    _, actual = jax.jit(lambda x: jax.jvp(compressed, (x,), (tangent,)))(x)
    _, expected = jax.jit(lambda x: jax.jvp(exact, (x,), (tangent,)))(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_derivative_under_vmap():
    x = jax.random.normal(jax.random.key(0), (3, 4096))

    def total(reduce):
        return lambda x: jnp.sum(jax.vmap(lambda x: reduce(x, "w"), axis_name="w")(x)[1] ** 3)

    grad = jax.grad(total(lambda x, axis: dq.psum(x, axis, method=EIGHT_BITS)))(x)
    expected = jax.grad(total(lax.psum))(x)
    assert 0 < float(dq.vnmse(grad, expected)) < 2e-3


def test_a_step_compiles_once():
    mesh = _mesh(AxisType.Auto)
    step = jax.jit(dq.value_and_grad(_loss, mesh=mesh, axis_name="data", method=ALL))
    for seed in range(3):
        x, y = _batch()
        step(_params(), (seed + 1.0) ** 9 * x, y, key=jax.random.key(seed))
    assert step._cache_size() == 1
