"""Optimizers of whole matrices under sharded updates: `jaxprs.owners` and `jaxprs.rows`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import daily
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax import contrib
from workers import mesh_of, once

import dynamiq_jax as dq
from dynamiq_jax.core.checks import check_axis
from dynamiq_jax.core.compat import name_of
from dynamiq_jax.jaxprs import rows
from dynamiq_jax.jaxprs.walk import equations_of

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

SHAPES = {
    "layers": [{"up": (24, 40), "down": (40, 24), "bias": (40,)} for _ in range(3)],
    "stack": (5, 24, 24),
    "heads": (24, 3, 8),
    "embedding": (24, 24),
}


def low(method=None):
    return dq.Compression(method, min_leaf_size=256, min_bucket_bytes=0, min_bucket_size=256)


@once
def problem():
    """Parameters, and the gradient of each of eight workers."""
    rng = np.random.default_rng(0)
    normal = lambda shape: rng.standard_normal(shape).astype(np.float32)
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(normal, SHAPES, is_leaf=is_shape)
    grads = jax.tree.map(lambda shape: normal((2, 24, *shape)), SHAPES, is_leaf=is_shape)
    return params, grads


def numbers(tree):
    """Which dimensions of a leaf are a matrix; stacks have one at every row."""

    def own(path, x):
        if "heads" in str(path):
            return contrib.MuonDimensionNumbers(0, (1, 2))
        return {2: contrib.MuonDimensionNumbers(0, 1), 3: contrib.MuonDimensionNumbers(1, 2)}.get(
            x.ndim
        )

    return jax.tree_util.tree_map_with_path(own, tree)


def each(function):
    """An optimizer of matrices as people write their own, leaf by leaf."""

    def one(g, p):
        return -0.1 * (function(g) + 0.01 * p) if g.ndim == 2 else -0.1 * g

    return optax.chain(
        optax.trace(0.9, nesterov=True),
        optax.stateless(lambda updates, params: jax.tree.map(one, updates, params)),
    )


def newton_schulz(x):
    """Not vmapped, and scaled by a norm that is broadcast."""
    x = x / (jnp.linalg.norm(x) + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T

    def step(_, x):
        a = x @ x.T
        return 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x

    x = lax.fori_loop(0, 5, step, x)
    return x if wide else x.T


def muon(**options):
    return contrib.muon(0.02, muon_weight_dimension_numbers=numbers, **options)


INNER = {
    "muon": muon(weight_decay=0.1),
    "adaptive": muon(adaptive=True),
    "aol": muon(preconditioning="aol", nesterov=False),
    "coefficients": muon(ns_coeffs="dion", mu_dtype=jnp.bfloat16, consistent_rms=0.2),
    "own": each(newton_schulz),
    "inverse root": each(
        lambda g: jnp.linalg.solve(g.T @ g + jnp.eye(g.shape[1], dtype=g.dtype), g.T).T
    ),
    "MultiSteps": optax.MultiSteps(muon(), 2).gradient_transformation(),
}
WORKERS = [(name, n) for name in INNER for n in (2, 3, 8)]


def trained(optimizer, mesh):
    """The parameters after two steps, and the compiled step."""
    params, batches = problem()

    def loss(p, batch):  # whose gradient is the batch's mean
        own = lambda x, b: jnp.mean(b.reshape(len(b), -1) @ x.ravel())
        return sum(jax.tree.leaves(jax.tree.map(own, p, batch)))

    if mesh is None:
        grad_fn, state = jax.grad(loss), optimizer.init(params)
    else:
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))
        options = {"axis_name": "data", "mesh": mesh, "compression": low()}
        value = dq.value_and_grad(loss, unreduced=True, **options)
        grad_fn, state = lambda *args: value(*args)[1], dq.optax.init(optimizer, params, mesh)

        batches = jax.device_put(batches, jax.NamedSharding(mesh, P(None, "data")))

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(grad_fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    given = jax.tree.map(lambda x: x[0], batches)
    compiled = step.lower(params, state, given).compile()
    for turn in range(2):
        params, state = step(params, state, jax.tree.map(lambda x, i=turn: x[i], batches))
    return jax.device_get(params), compiled


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(x - y))) for x, y in pairs)


@pytest.mark.parametrize(("name", "n"), daily(WORKERS, [("muon", 8), ("own", 3)]))
def test_owners_give_what_the_optimizer_alone_gives(name, n):
    plain, alone = trained(INNER[name], None)
    optimizer = dq.optax.sharded(INNER[name], "data", compression=low(dq.F32()))
    kind = AxisType.Explicit if n == 2 else AxisType.Auto
    mesh = mesh_of(n, kind=kind)
    with jax.set_mesh(mesh):
        found, compiled = trained(optimizer, mesh)
    moved = largest_difference(plain, problem()[0])
    assert largest_difference(found, plain) < 2e-4 * moved
    if (name, n) == ("muon", 8):  # 5 matrices a worker, one of each group, of 13
        own, whole = ((x.cost_analysis() or {})["flops"] for x in (compiled, alone))
        assert own < 0.5 * whole


@pytest.mark.parametrize(
    ("method", "dtype"), [(dq.F32(), jnp.float32), (dq.DynamiQ(bits=8.0), jnp.bfloat16)]
)
def test_matrices_travel_in_bf16_unless_all_is_exact(method, dtype):
    optimizer = dq.optax.sharded(muon(), "data", compression=low(method))
    params, _ = problem()
    with jax.set_mesh(mesh_of(8)):
        state = jax.eval_shape(optimizer.init, params)
        specs = dq.optax.state_specs(state)
        step = jax.shard_map(
            lambda g, s, p: optimizer.update(g, s, p)[0],
            in_specs=(P("data"), specs, P()),
            out_specs=P(),
        )
        grads = jax.tree.map(lambda x: np.zeros((8 * x.shape[0], *x.shape[1:]), x.dtype), params)
        program = jax.make_jaxpr(step)(grads, state, params)
    moves = [e for e in equations_of(program) if name_of(e) == "all_to_all"]
    avals: list[Any] = [e.invars[0].aval for e in moves]
    dtypes = [x.dtype for x in avals]
    floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    assert len(floats) >= 10 and set(floats) == {jnp.dtype(dtype)}  # five groups, there and back


STACK, MATRIX = jnp.zeros((6, 4, 4)), jnp.zeros((4, 4))


@pytest.mark.parametrize(
    ("function", "alike"),
    [
        (lambda x, m: jnp.einsum("lij,ljk->lik", x, x), True),
        (lambda x, m: x @ m, True),
        (lambda x, m: jnp.swapaxes(m @ jnp.swapaxes(x, 1, 2), 1, 2), True),
        (lambda x, m: x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True), True),
        (lambda x, m: jax.vmap(newton_schulz)(x), True),
        (
            lambda x, m: lax.scan(lambda c, _: (c @ m, c), x, None, length=3)[1].sum(0),
            True,
        ),
        (lambda x, m: x / jnp.linalg.norm(x), False),
        (lambda x, m: x[::-1], False),
        (lambda x, m: x - x[:1], False),
        (lambda x, m: jnp.cumsum(x, 0), False),
        (lambda x, m: x * jnp.arange(6.0).reshape(6, 1, 1), False),
        (lambda x, m: jnp.einsum("lij,kij->lij", x, x), False),
        (
            lambda x, m: x.reshape(3, 2, 4, 4).sum(1, keepdims=True).repeat(2, 1).reshape(x.shape),
            False,
        ),
        (lambda x, m: jnp.swapaxes(x.reshape(4, 6, 4), 0, 1), False),
    ],
)
def test_programs_that_treat_rows_alike_are_told_from_others(function, alike):
    program = jax.make_jaxpr(function)(STACK, MATRIX)
    assert rows.treats_alike(program, 1) == alike
    if alike:  # and run on other numbers of rows
        rng = np.random.default_rng(1)
        x, m = (rng.standard_normal((k, 4, 4)).astype(np.float32) for k in (3, 1))
        run = lambda x: rows.run(program, [x], [jnp.asarray(m[0])], check_axis("data"))[0]
        found = jax.shard_map(run, mesh=mesh_of(1), in_specs=P("data"), out_specs=P("data"))(x)
        np.testing.assert_allclose(found, function(jnp.asarray(x), m[0]), rtol=1e-4, atol=1e-5)
