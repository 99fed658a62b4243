"""`F32` and `BF16` as ``compression`` are the bits of all that travels, in every function."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import small
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.compat import inner_jaxprs

N, SIZE = 4, 256
COLLECTIVES = "psum", "all_gather", "all_to_all", "ppermute", "reduce_scatter"
WAYS = {
    "bare": lambda method: method,
    "compression": small,
    "direct": lambda method: small(method, topology=dq.Direct()),
    "by path": lambda method: lambda path, leaf: method,
}


def sent(jaxpr) -> int:
    """Bytes of the operands of all large collectives."""
    found = 0
    for equation in jaxpr.eqns:
        found += sum(sent(getattr(inner, "jaxpr", inner)) for inner in inner_jaxprs(equation))
        if equation.primitive.name.startswith(COLLECTIVES):
            wide = [x.aval for x in equation.invars if x.aval.size >= SIZE]
            found += sum(x.size * x.dtype.itemsize for x in wide)
    return found


def squares(tree):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


def loss_of(tree, x):
    return jnp.mean(jnp.tanh(x @ tree["w"]) ** 2)


def exchanged(w, x, how):
    exchange = functools.partial(dq.all_to_all, axis_name="data", split_axis=0, concat_axis=0)
    return jax.grad(lambda w: squares(exchange(w, tiled=True, compression=how)))(w["w"])


def scattered(w, x, how):
    return dq.psum_scatter(w, "data", tiled=True, compression=how)


def gathered(w, x, how):
    return dq.all_gather(w, "data", tiled=True, compression=how)


def in_backward(w, x, how):
    def loss(own):
        options = {"specs": {"w": P("data")}, "compression": how}
        return loss_of(dq.fsdp(own, "data", **options), x)

    return jax.grad(loss)({"w": w["w"][: SIZE // N]})


def sequential(w, x, how):
    def loss(own):
        functions = [lambda w, x: jnp.tanh(x @ w)] * 2
        options = {"specs": [P("data")] * 2, "compression": how}
        return squares(dq.overlapped(functions, [own["w"]] * 2, x, "data", **options))

    return jax.grad(loss)({"w": w["w"][: SIZE // N]})


def updated(w, x, how, *, deferred=False, differences=None):
    how = how if differences is None else dq.Policy(gradients=how, parameters=differences)
    optimizer = dq.optax.sharded(optax.sgd(0.1), "data", compression=how, deferred=deferred)
    state = optimizer.init(w)
    current = dq.optax.gathered(w, state) if deferred else w
    return optimizer.update(jax.grad(loss_of)(w, x), state, current)


def mapped(run):
    """One worker's function under a map without types."""
    maps = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}

    def mapped(w, x, how):
        one = lambda w, x: jax.tree.map(lambda x: x[None], run(w, x, how))
        return jax.shard_map(one, mesh=auto_mesh(N), **maps)(w, x)

    return mapped


def explicit(w, x, how):
    """`sharded` on Explicit axes, outside of maps."""
    options = {"axis_name": "data", "compression": how}
    optimizer = dq.optax.sharded(optax.sgd(0.1), **options)
    grads = dq.value_and_grad(loss_of, unreduced=True, **options)(w, x)[1]
    return optimizer.update(grads, optimizer.init(w), w)


FUNCTIONS = {
    "psum": mapped(lambda w, x, how: dq.psum(w, "data", compression=how)),
    "psum_scatter": mapped(scattered),
    "all_gather": mapped(gathered),
    "all_to_all": mapped(exchanged),
    "fsdp": mapped(in_backward),
    "overlapped": mapped(sequential),
    "sharded": mapped(updated),
    "sharded, limits of its own": mapped(
        functools.partial(updated, differences=small(min_bucket_bytes=0))
    ),
    "sharded, deferred": mapped(functools.partial(updated, deferred=True)),
    "sharded on Explicit axes": explicit,
}


def total(name, how):
    """Bytes of the operands of all collectives of a function, which is only traced."""
    kind = AxisType.Explicit if "Explicit" in name else AxisType.Auto
    with jax.set_mesh(mesh := mesh_of(N, kind=kind)):

        def placed(shape, spec):
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

        args = {"w": placed((SIZE, SIZE), P())}, placed((N * 8, SIZE), P("data"))
        run = functools.partial(FUNCTIONS[name], how=how)
        return sent(jax.make_jaxpr(run)(*args).jaxpr)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_that_travels_has_the_bits_of_the_method(name, way):
    """Also cotangents, gathers and differences: a payload in other bits breaks the ratio."""
    wide, narrow = (total(name, WAYS[way](method)) for method in (dq.F32(), dq.BF16()))
    assert wide == 2 * narrow > 2 * SIZE * SIZE
