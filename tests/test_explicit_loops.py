"""Explicit axes: loops that JAX unrolls in part, lookups however they are spelled, partitioners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import mesh_of

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

N, WIDTH, ROWS = 8, 128, 256
MESH = mesh_of(N, kind=AxisType.Explicit)
SPLIT = P("data")


def on_mesh(*shapes):
    """Normal numbers of these shapes, replicated."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = [jax.random.normal(key, shape) * 0.1 for key, shape in zip(keys, shapes, strict=True)]
    return jax.device_put(made, jax.NamedSharding(MESH, P()))


@pytest.mark.parametrize(
    ("length", "unroll", "reverse"), [(3, 2, False), (5, 2, True), (4, 2, True), (6, 4, False)]
)
def test_a_scan_that_is_unrolled_in_part_is_differentiated(length, unroll, reverse):
    """JAX 0.10 refuses it: it joins dimensions of arrays that are typed as reduced."""
    (layers, x) = on_mesh((length, WIDTH, WIDTH), (16, WIDTH))

    def loss(layers, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h, jnp.mean(h)

        h, means = jax.lax.scan(layer, x, layers, unroll=unroll, reverse=reverse)
        return jnp.mean(h**2) + jnp.sum(means * jnp.arange(1.0, length + 1))

    with jax.set_mesh(MESH):
        x = jax.reshard(x, SPLIT)
        expected, right = jax.jit(jax.value_and_grad(loss))(layers, x)
        exact = dq.value_and_grad(loss, axis_name="data", compression=dq.F32())
        value, grads = jax.jit(exact)(layers, x)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(grads, right, rtol=2e-5, atol=1e-7)
        step = dq.value_and_grad(loss, axis_name="data", compression=CHEAP)
        found = dq.explain(step, layers, x, verbose=False)
    assert found.agrees and any(run.plan.buckets for run in found.plans)
    assert found.native_bytes < 0.1 * found.sent_bytes


def rows_of(table, ids):
    return table.at[ids].get(out_sharding=P("data"))


def by_take(table, ids):
    read = functools.partial(jnp.take, axis=0, mode="clip")
    return jax.sharding.auto_axes(read, out_sharding=P("data"))(table, ids)


def by_embed(table, ids):
    embed = nnx.Embed(*table.shape, rngs=nnx.Rngs(0))
    embed.embedding = nnx.Param(table)
    return embed(ids, out_sharding=P("data"))


@pytest.mark.parametrize("read", [rows_of, by_take, by_embed])
def test_a_lookup_is_compressed_however_it_is_spelled(read):
    table, w = on_mesh((ROWS, WIDTH), (WIDTH, WIDTH))
    ids = jnp.arange(64, dtype=jnp.int32) * 3 % ROWS

    def loss(params, ids):
        return jnp.mean(jnp.tanh(read(params["table"], ids) @ params["w"]) ** 2)

    with jax.set_mesh(MESH):
        ids, params = jax.reshard(ids, SPLIT), {"table": table, "w": w}
        step = dq.value_and_grad(loss, axis_name="data", compression=CHEAP)
        found = dq.explain(step, params, ids, verbose=False)
        exact = dq.value_and_grad(loss, axis_name="data", compression=dq.F32())
        _, grads = jax.jit(exact)(params, ids)
        _, right = jax.jit(jax.value_and_grad(loss))(params, ids)
    for own, expected in zip(*map(jax.tree.leaves, (grads, right)), strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-5, atol=1e-8)
    leaves = [leaf for run in found.plans for move in run.plan.moves for leaf in move.leaves]
    assert sum(leaf.size for leaf in leaves) == ROWS * WIDTH + WIDTH * WIDTH
    assert found.agrees and found.native_bytes < 0.05 * found.sent_bytes


def test_the_former_partitioner_is_refused_by_name():
    (w, x) = on_mesh((WIDTH, WIDTH), (16, WIDTH))
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    with jax.set_mesh(MESH):
        x = jax.reshard(x, SPLIT)
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            with pytest.raises(ValueError, match=r"jax_use_shardy_partitioner is False.*Auto axes"):
                dq.value_and_grad(loss, axis_name="data", compression=CHEAP)(w, x)
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)
