"""Methods that take leaves as matrices: which leaves these are, and what the methods see of them.

The method here sums exactly and adds to every coordinate what tells its row and column.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits, auto_mesh, small, wire_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.comparators.native import MatrixMethod
from dynamiq_jax.methods.base import Outcome
from dynamiq_jax.request.compression import as_compression

N = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered(MatrixMethod):
    """Adds 1000 times the row and once the column; its state is as large as its matrix."""

    matrix: tuple[int, int] | None = None

    @property
    def min_side(self):
        return 3

    def init(self, size, n_workers):
        return {"seen": jnp.zeros(self.shape_of(size), jnp.float32)}

    def wire_bits(self, size, n_workers, topology):
        rows, columns = self.shape_of(size)
        return 100 * rows + columns

    def all_reduce(self, x, call):
        rows, columns = self.shape_of(x.shape[0])
        numbers = 1000 * jnp.arange(rows)[:, None] + jnp.arange(columns)[None]
        value = call.axis.psum(x) / call.divisor + numbers.reshape(-1).astype(x.dtype)
        return Outcome(value, jax.tree.map(lambda seen: seen + 1, call.state))


METHOD = dq.Compression(Numbered(), min_leaf_size=10)
SHAPES = {
    "conv": (3, 2, 7),  # a matrix of 6 x 7
    "flat": (2, 40),  # too few rows
    "kernel": (5, 8),
    "small": (3, 3),
    "thin": (40, 2),  # too few columns
    "vector": (50,),
}
MATRICES = {"conv": (6, 7), "kernel": (5, 8)}


def inputs(shapes, n=N):
    rng = np.random.default_rng(0)
    return {k: rng.integers(-9, 9, (n, *s)).astype(np.float32) for k, s in shapes.items()}


def numbers(rows, columns):
    return (1000 * np.arange(rows)[:, None] + np.arange(columns)).astype(np.float32)


def abstract(shapes):
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def test_matrices_are_reduced_alone_and_all_else_exactly():
    x = inputs(SHAPES)
    run = jax.jit(jax.vmap(lambda t: dq.psum(t, "data", method=METHOD), axis_name="data"))
    found = run(x)
    for name, shape in SHAPES.items():
        exact = x[name].sum(axis=0)
        if name in MATRICES:
            exact = exact + numbers(*MATRICES[name]).reshape(shape)
        assert_same_bits(np.asarray(found[name]), np.broadcast_to(exact, (N, *shape)))
    told = dq.explain(abstract(SHAPES), N, method=METHOD, verbose=False)
    assert {row.name[2:-2]: (row.bucket, row.route) for row in told.rows} == {
        "conv": (0, "compressed"),
        "flat": (None, "exact: matrix of 2 x 40 < min_side 3"),
        "kernel": (1, "compressed"),
        "small": (None, "exact: size 9 < min_leaf_size 10"),
        "thin": (None, "exact: matrix of 40 x 2 < min_side 3"),
        "vector": (None, "exact: not a matrix"),
    }
    exact_bits = 32 * (80 + 9 + 80 + 50) * 2 * (N - 1) // N
    assert wire_bits(METHOD)(abstract(SHAPES), N) == exact_bits + 607 + 508


def test_states_have_the_shapes_of_matrices():
    x = inputs(SHAPES)
    state = as_compression(METHOD).init_state(abstract(SHAPES), N, stacked=True)
    assert [part["seen"].shape for part in state] == [(N, 6, 7), (N, 5, 8)]

    def one(tree, state):
        return dq.reduce(tree, "data", method=METHOD, state=state)[1]

    after = jax.vmap(one, axis_name="data")(x, state)
    assert all(np.all(part["seen"] == 1) for part in after)


SPECS = {"columns": P(None, "model"), "rows": P("model", None), "thin": P(None, "model")}
WHOLE = {"columns": (5, 8), "rows": (8, 5), "thin": (9, 4)}
PARTS = {"columns": (5, 4), "rows": (4, 5)}


@pytest.mark.parametrize("kind", ["automatic", "explicit", "manual", "manual, unchecked"])
def test_on_a_mesh_a_matrix_is_what_one_device_holds(kind):
    """A part of two columns is none, though the whole leaf is."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((N, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = inputs(WHOLE)
    placed = {k: jax.device_put(v, NamedSharding(mesh, P("data", *SPECS[k]))) for k, v in x.items()}
    manual = "manual" in kind
    told = None if manual or kind == "explicit" else SPECS

    def one(tree):
        tree = jax.tree.map(lambda v: lax.squeeze(v, (0,)), tree)
        return dq.psum(tree, "data", method=METHOD, specs=told)

    specs = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}}
    if manual:
        specs = {"in_specs": ({k: P("data", *v) for k, v in SPECS.items()},), "out_specs": SPECS}
        specs["check_vma"] = "unchecked" not in kind
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(placed)
    for name, shape in WHOLE.items():
        exact = x[name].sum(axis=0)
        if name in PARTS:
            repeats = [w // p for w, p in zip(shape, PARTS[name], strict=True)]
            exact = exact + np.tile(numbers(*PARTS[name]), repeats)
        np.testing.assert_array_equal(np.asarray(found[name]), exact)


def test_states_on_a_mesh_are_those_of_parts():
    options = {"mesh": jax.make_mesh((N, 2), ("data", "model")), "specs": SPECS}
    state = METHOD.init_state(abstract(WHOLE), N, **options)
    assert [part["seen"].shape for part in state] == [(2, 5, 4), (2, 4, 5)]
    told = METHOD.explain(abstract(WHOLE), N, **options, verbose=False)
    assert [row.bucket for row in told.rows] == [0, 1, None]
    assert [8 * row.wire_bytes for row in told.rows[:2]] == [504, 405]


def test_arrays_of_an_unknown_matrix_are_single_rows():
    known = Numbered(matrix=(5, 10))
    assert Numbered().wire_bits(50, N, None) == 150
    assert known.wire_bits(50, N, None) == 510
    assert math.prod(known.shape_of(50)) == 50


METHODS = {
    "powersgd": dq.comparators.PowerSGD(rank=2, wire="f32"),
    "arc top-k": dq.comparators.ARCTopK(density=0.5, rank=2, wire="f32"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["automatic", "manual", "manual, unchecked"])
def test_parts_on_a_mesh_are_reduced_as_if_there_were_no_others(name, kind):
    """Two steps with memory: a device's sums are those of a mesh of its own part alone."""
    method, spec = small(dq.ErrorFeedback(METHODS[name])), P(None, "model")
    mesh = jax.make_mesh((N, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(1).standard_normal((N, 24, 20)).astype(np.float32)
    manual = "manual" in kind
    told = None if manual else spec

    def two_steps(x, state, specs=None):
        x, state = jax.tree.map(lambda v: lax.squeeze(v, (0,)), (x, state))
        options = {"op": "sum", "method": method, "specs": specs}
        state = dq.reduce(x, "data", state=state, **options).state
        total, state, _ = dq.reduce(x, "data", state=state, **options)
        return total, jax.tree.map(lambda v: v[None], state)

    def alone(part):
        state = as_compression(method).init_state(jnp.zeros(part.shape[1:]), N, stacked=True)
        specs = {"mesh": auto_mesh(N), "in_specs": P("data"), "out_specs": (P(), P("data"))}
        return jax.jit(jax.shard_map(two_steps, **specs))(part, state)

    expected = [alone(part) for part in np.split(x, 2, axis=2)]
    options = {"mesh": mesh, "specs": spec, "stacked": True}
    state = method.init_state(jnp.zeros((24, 20)), N, **options)
    if manual:  # parts of a state are told by the mesh alone

        def both(x, state):
            total, state = two_steps(x, jax.tree.map(lambda v: v[:, 0], state))
            return total, jax.tree.map(lambda v: v[:, None], state)

        specs: Any = {"in_specs": (P("data", None, "model"), P("data", "model"))}
        specs |= {"out_specs": (spec, P("data", "model"))}
        mapped = jax.shard_map(both, mesh=mesh, check_vma="unchecked" not in kind, **specs)
    else:
        own = functools.partial(two_steps, specs=told)
        specs = {"in_specs": P("data"), "out_specs": (P(), P("data")), "axis_names": {"data"}}
        mapped = jax.shard_map(own, mesh=mesh, **specs)
    found, after = jax.jit(mapped)(
        jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))), state
    )
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    for number, (total, own) in enumerate(expected):
        part = np.split(np.asarray(found), 2, axis=1)[number]
        np.testing.assert_allclose(part, total, rtol=1e-4, atol=1e-4)
        residual = np.asarray(after[0].residual)[:, number]
        np.testing.assert_allclose(residual, own[0].residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_groups_of_workers_sum_for_themselves(name):
    x = np.random.default_rng(2).standard_normal((4, 24, 20)).astype(np.float32)
    method = small(METHODS[name])

    def one(x, groups):
        total = dq.psum(x[0], "data", method=method, axis_index_groups=groups)
        return total[None]

    def run(x, groups):
        specs = {"mesh": auto_mesh(len(x)), "in_specs": P("data"), "out_specs": P("data")}
        mapped = jax.shard_map(functools.partial(one, groups=groups), check_vma=False, **specs)
        return np.asarray(jax.jit(mapped)(x))

    found = run(x, [[0, 2], [3, 1]])
    assert_same_bits(found[[0, 1]], found[[2, 3]])
    for group in ([0, 2], [1, 3]):
        np.testing.assert_allclose(found[group], run(x[group], None), rtol=1e-5, atol=1e-5)
