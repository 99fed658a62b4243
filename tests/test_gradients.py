"""Derivatives of `psum`, and `value_and_grad` against the plain gradient of the whole batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    LOOP,
    assert_copies_equal,
    assert_same_bits,
    auto_mesh,
    compilations,
    daily,
    gradient,
    loss_fn,
    problem,
    small,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

METHOD = small(dq.DynamiQ(bits=32, widths=(8,)))
REDUCTIONS = {
    "psum": (functools.partial(dq.psum, method=METHOD, topology=LOOP), lax.psum),
    "pmean": (functools.partial(dq.pmean, method=METHOD, topology=LOOP), lax.pmean),
}
N, SIZE = 4, 700
STEPS = small(dq.comparators.CLTK(density=1.0))
"""Its state is an integer, the number of steps."""


def inputs():
    """Gradients, and what each coordinate of their sum counts on each worker."""
    return gradient(0, N, SIZE), jax.random.normal(jax.random.key(9), (N, SIZE))


MAPPED = ["vmap", "shard_map", "unchecked shard_map", "pmap"]
EACH = [(name, mapping) for name in REDUCTIONS for mapping in MAPPED]


@pytest.mark.parametrize(("name", "mapping"), daily(EACH, [EACH[0], EACH[2], EACH[5]]))
def test_derivatives_are_those_of_the_exact_reduction(name, mapping):
    x, weight = inputs()
    checked = mapping == "shard_map"

    def both(reduce):
        def one(x, weight, tangent):
            loss = lambda x: jnp.sum(reduce({"x": x * x}, "data")["x"] * weight)
            grad = jax.grad(lambda x: lax.psum(loss(x), "data") if checked else loss(x))(x)
            _, pushed = jax.jvp(lambda x: reduce({"x": x}, "data")["x"], (x,), (tangent,))
            return grad, pushed

        if mapping == "vmap":
            return jax.jit(jax.vmap(one, axis_name="data"))(x, weight, x[::-1])
        if mapping == "pmap":
            return jax.pmap(one, axis_name="data")(x, weight, x[::-1])

        def row(*own):
            grad, pushed = one(*(a[0] for a in own))
            return grad[None], pushed if checked else pushed[None]

        out_specs = (P("data"), P() if checked else P("data"))
        specs = {"in_specs": P("data"), "out_specs": out_specs, "check_vma": checked}
        return jax.jit(jax.shard_map(row, mesh=auto_mesh(N), **specs))(x, weight, x[::-1])

    ours, exact = REDUCTIONS[name]
    found, expected = both(ours), both(exact)
    assert np.all(np.asarray(found[0]) != 0)  # rounding has a derivative of zero almost everywhere
    for own, native in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, native, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_pass_states_of_integers(check_vma):
    x, weight = inputs()
    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": check_vma}

    @jax.jit
    @jax.shard_map(mesh=auto_mesh(N), **specs)
    def grad_and_state(x, weight, state):
        own = jax.tree.map(lambda a: a[0], state)

        def loss(x):
            found = dq.reduce(x[0], "data", op="sum", method=STEPS, state=own)
            total = jnp.sum(found.tree * weight[0])
            return lax.psum(total, "data") if check_vma else total, found.state

        grad, state = jax.grad(loss, has_aux=True)(x)
        return grad, jax.tree.map(lambda a: a[None], state)

    grad, state = grad_and_state(x, weight, STEPS.init_state(x[0], N, stacked=True))
    exact = np.broadcast_to(np.sum(weight, axis=0), x.shape)
    np.testing.assert_allclose(grad, exact, rtol=1e-6, atol=1e-6)
    assert state[0].step.tolist() == [1] * N


def test_value_and_grad_is_that_of_the_whole_batch_on_all_devices():
    """The call is one program outside of jit, too; `test_deferred` has Explicit axes."""
    mesh, (params, (batch,)) = auto_mesh(), problem(1)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    method = dataclasses.replace(METHOD, topology=LOOP)
    compressed = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", method=method)

    @jax.jit
    def step(params, batch, key):
        loss, grads = compressed(params, batch, key=key)
        return loss, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    trained = [step(params, batch, jax.random.key(i)) for i in (0, 0, 1)]
    for found_loss, found, after in trained:
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, grads)
        # 8 roundings at width 8: near 1e-4, and not exact.
        assert 1e-7 < float(vnmse(jax.device_get(found), grads)) < 1e-3
        assert_copies_equal((found, after))
    first, again, other = (jax.device_get(found) for _, found, _ in trained)
    assert_same_bits(first, again)
    assert np.mean(first["in"] != other["in"]) > 0.3
    with compilations() as compiled:
        outside = compressed(params, batch, key=jax.random.key(0))
        assert 1 <= len(compiled) <= 3  # one program, not one for each operation
        compiled.clear()
        assert_same_bits(compressed(params, batch, key=jax.random.key(0)), outside)
        assert not compiled
    assert_same_bits(jax.device_get(outside[1]), first)


def test_outside_of_jit_arguments_may_be_numbers_numpy_and_absent():
    f = dq.value_and_grad(
        lambda params, x, absent: (params["scale"] * jnp.mean(x @ params["w"]), {"none": absent}),
        mesh=auto_mesh(),
        axis_name="data",
        has_aux=True,
    )
    params = {"scale": 2.0, "w": np.arange(4, dtype=np.float32)}
    for key in (None, jax.random.key(0)):
        (loss, aux), grads = f(params, np.ones((16, 4)), None, key=key)
        assert float(loss) == 12.0
        assert aux == {"none": None}
        assert float(grads["scale"]) == 6.0
        np.testing.assert_array_equal(grads["w"], np.full(4, 2.0, np.float32))
