"""`dq.equinox` against JAX: a model has leaves that are no parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close
from cases import EXACT
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import mesh_of, network, put

import dynamiq_jax as dq
import dynamiq_jax.equinox

KEY = jax.random.PRNGKey(3)


def model():
    """An activation function, a number and integers are leaves beside the parameters."""
    params, batch = network()
    order = np.arange(16, dtype=np.int32)[::-1].copy()
    net = {"up": params["up"], "act": jnp.tanh, "down": params["down"], "order": order, "n": 2}
    return net, batch["x"]


def loss(net, x, *, scale, key):
    hidden = net["act"](x @ net["up"]) @ net["down"]
    noise = 0.0 * jnp.sum(jax.random.normal(key, (2,)))
    return jnp.mean((hidden[:, net["order"]] - x) ** net["n"]) * scale + noise


def with_aux(net, x, **rest):
    return loss(net, x, **rest), {"rows": x[:, 0], "own": jnp.mean(x)}


def of_jax(x):
    net, _ = model()

    def of_params(up, down):
        return loss(net | {"up": up, "down": down}, x, scale=2.0, key=KEY)

    return jax.value_and_grad(of_params, (0, 1))(net["up"], net["down"])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_floating_point_arrays_are_the_parameters(kind):
    net, x = model()
    mesh = mesh_of(8) if kind == "Auto" else jax.make_mesh((8,), ("data",))
    assert {*mesh.axis_types} == {getattr(AxisType, kind)}
    options = {"axis_name": "data", "compression": EXACT, "mesh": mesh, "has_aux": True}
    if kind == "Auto":
        options |= {"aux": {"rows": "rows"}, "batch_specs": {"x": P("data")}}
    grad_fn = dq.equinox.filter_value_and_grad(with_aux, **options)
    arrays = {name: put(net[name], mesh) for name in ("up", "down", "order")}

    @jax.jit
    def run(arrays, x):
        return grad_fn(net | arrays, x, scale=2.0, key=KEY)

    ((value, aux), grads) = run(arrays, put(x, mesh, P("data")))
    expected, (up, down) = of_jax(x)
    assert_close((value, grads["up"], grads["down"]), (expected, up, down))
    assert {name for name in grads if grads[name] is not None} == {"up", "down"}
    assert_close(aux, with_aux(net, x, scale=2.0, key=KEY)[1])


def test_a_keyword_key_is_the_losss():
    """Also without a batch of arrays that tells a mesh; a model by keyword is refused."""
    net, x = model()
    grad_fn = dq.equinox.filter_value_and_grad(loss, axis_name="data", mesh=mesh_of(8))
    with pytest.raises(ValueError, match="as the first one"):
        grad_fn(net=net, x=x, scale=2.0, key=KEY)
    shapes = jax.eval_shape(functools.partial(grad_fn, net, scale=2.0), x, key=KEY)
    assert shapes[1]["up"].shape == net["up"].shape


def test_weights_are_of_the_whole_model():
    net, x = model()
    counted = []

    def weight(net, x, **_):
        counted.append(net["n"])
        return jnp.float32(len(x) + net["n"])

    options = {"axis_name": "data", "compression": EXACT, "mesh": mesh_of(8), "weight": weight}
    grad_fn = dq.equinox.filter_value_and_grad(loss, **options)
    value, _ = jax.jit(lambda x: grad_fn(net, x, scale=2.0, key=KEY))(x)
    assert float(value) == pytest.approx(float(of_jax(x)[0]), rel=1e-5) and {*counted} == {2}
