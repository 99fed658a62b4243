"""Methods by path: every leaf by its own, in buckets, states, metrics and bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import over, small, wire_bits
from jax.sharding import PartitionSpec as P
from test_wire_bytes import lower, moved_bits
from workers import OnHost, auto_mesh, gradient, mesh_of, put

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.tree.leaves import describe_leaves

N = 4
KEY = jax.random.key(0)
MX8, MX4 = dq.contrib.MXFP8(), dq.contrib.MXFP4()
DIRECT = dq.Direct(transport="collectives")
OWN = {
    "embed": jax.ShapeDtypeStruct((500, 20), jnp.float32),
    "layers": [
        {
            "kernel": jax.ShapeDtypeStruct((70, 80), jnp.float32),
            "norm": jax.ShapeDtypeStruct((3000,), jnp.float32),
        }
        for _ in range(2)
    ],
    "step": jax.ShapeDtypeStruct((), jnp.int32),
}


def by_path(path, leaf):
    if "norm" in path or leaf.ndim == 0:
        return None
    return MX8 if path == "embed" else MX4


CHOSEN = small(by_path)


def grads():
    """A leading axis of workers."""

    def draw(path, x):
        if x.dtype == jnp.int32:
            return jnp.arange(N, dtype=jnp.int32)
        return gradient(len(str(path)) + len(x.shape), N, x.size).reshape(N, *x.shape)

    return jax.tree_util.tree_map_with_path(draw, OWN)


@functools.cache
def reducer(method, reduce=dq.reduce, **options):
    def one(tree, state):
        more = {} if state is None else {"state": state}
        return reduce(tree, "data", compression=over(DIRECT, method), key=KEY, **more, **options)

    return OnHost(jax.jit(jax.vmap(one, axis_name="data")))


def test_paths_and_leaves_are_what_the_function_is_asked_for():
    asked = []
    method = lambda path, leaf: asked.append((path, leaf.shape, leaf.dtype))
    dq.explain(OWN, N, compression=method, verbose=False)
    assert list(dict.fromkeys(asked)) == [
        ("embed", (500, 20), jnp.float32),
        ("layers/0/kernel", (70, 80), jnp.float32),
        ("layers/0/norm", (3000,), jnp.float32),
        ("layers/1/kernel", (70, 80), jnp.float32),
        ("layers/1/norm", (3000,), jnp.float32),
        ("step", (), jnp.int32),
    ]


def test_leaves_of_a_method_travel_together_and_apart_from_others(capsys):
    found = dq.explain(OWN, N, compression=over(DIRECT, CHOSEN))
    assert capsys.readouterr().out == f"{found}\n"
    assert [(row.name, row.bucket, row.route) for row in found.rows] == [
        ("['embed']", 0, "compressed"),
        ("['layers'][0]['kernel']", 1, "compressed"),
        ("['layers'][0]['norm']", None, "exact: excluded"),
        ("['layers'][1]['kernel']", 1, "compressed"),
        ("['layers'][1]['norm']", None, "exact: excluded"),
        ("['step']", None, "exact: excluded"),
    ]
    kernels = [layer["kernel"] for layer in OWN["layers"]]
    parts = [(MX8, OWN["embed"]), (MX4, kernels)]
    bits = [wire_bits(small(m), DIRECT)(tree, N) for m, tree in parts]
    exact = 1.5 * 32 * (2 * 3000 + 1)
    assert wire_bits(CHOSEN, DIRECT)(OWN, N) == sum(bits) + exact
    size = 10_000 + 2 * 5600 + 6001
    assert found.bits_per_coord == pytest.approx((sum(bits) + exact) / (1.5 * size))
    assert found.topology == repr(DIRECT)
    assert found.method.startswith(f"1 leaves: {MX8!r}; 2 leaves: {MX4!r}; 3 leaves: exact")
    assert sum(row.wire_bytes for row in found.rows) == pytest.approx(found.wire_bytes)
    assert dq.explain({}, N, compression=CHOSEN, verbose=False).rows == ()


def test_bytes_are_those_of_the_program():
    hlo, asked = lower(dq.psum, OWN, (N,), CHOSEN, DIRECT)
    sent = sum(moved_bits(hlo, asked, N).values())
    assert sent == N * wire_bits(CHOSEN, DIRECT)(OWN, N)


def test_every_part_has_the_bits_of_its_method_alone():
    tree = grads()
    total = reducer(CHOSEN, dq.psum)(tree, None)
    assert_same_bits(total, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), total))
    only = {"embed": tree["embed"], "layers": [{}, {}]}
    assert_same_bits(total["embed"], reducer(small(MX8), dq.psum)(only, None)["embed"])
    for layer, own in zip(total["layers"], tree["layers"], strict=True):
        exact = np.sum(np.asarray(own["norm"], np.float64), axis=0)
        np.testing.assert_allclose(layer["norm"][0], exact, rtol=1e-5, atol=1e-5)
    only = {"layers": [{"kernel": layer["kernel"]} for layer in tree["layers"]]}
    alone = reducer(small(MX4), dq.psum)(only, None)
    assert_same_bits([{"kernel": own["kernel"]} for own in total["layers"]], alone["layers"])
    assert total["step"].tolist() == [6] * N


def kernels_share(path, leaf):
    """Two methods, of which one has a memory."""
    shared = dq.ErrorFeedback(dq.contrib.MXFP8())
    return shared if "kernel" in path else by_path(path, leaf)


KEEPS = small(kernels_share)


def test_states_and_metrics_are_those_of_all_methods():
    tree = grads()
    state = over(DIRECT, KEEPS).init_state(OWN, N)
    assert len(state) == 2  # buckets
    assert len(jax.tree.leaves(state)) == 1
    before = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), state)
    stacked = over(DIRECT, KEEPS).init_state(OWN, N, stacked=True)
    assert_same_bits(before, stacked)
    total, after, metrics = reducer(KEEPS, op="mean", metrics=True)(tree, before)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert np.any(np.asarray(after[1].residual)) and not np.any(np.asarray(before[1].residual))
    sent = dq.explain(OWN, N, compression=over(DIRECT, KEEPS), verbose=False)
    assert float(metrics.wire_bytes[0]) == pytest.approx(sent.wire_bytes)
    assert float(metrics.bits_per_coord[0]) == pytest.approx(sent.bits_per_coord)
    compressed = [total["embed"], *(layer["kernel"] for layer in total["layers"])]
    norm = sum(np.sum(np.asarray(leaf[0], np.float64) ** 2) for leaf in compressed)
    assert float(metrics.norm[0]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.release
def test_metrics_weigh_methods_by_what_they_reduce():
    """DynamiQ knows its error and widths: that of the whole is between those of two bits."""
    sizes = {"a": 96 * 256, "b": 3 * 96 * 256, "c": 3000}

    def by_bits(path, leaf):
        return None if path == "c" else dq.DynamiQ(bits=32, widths=(4 if path == "a" else 8,))

    tree = {name: gradient(i, N, size) for i, (name, size) in enumerate(sizes.items())}
    tree["b"] = 10 * tree["b"]
    total, _, metrics = reducer(small(by_bits), op="sum", metrics=True)(tree, None)
    widths = np.asarray(metrics.widths[0])
    assert widths[[4, 8]] == pytest.approx([0.25, 0.75], abs=1e-3)
    exact = {name: np.sum(np.asarray(x, np.float64), axis=0) for name, x in tree.items()}
    wrong = sum(np.sum((np.asarray(total[name][0]) - exact[name]) ** 2) for name in "ab")
    norm = sum(np.sum(exact[name] ** 2) for name in "ab")
    assert 0.5 < float(metrics.vnmse[0]) / (wrong / norm) < 2
    alone = reducer(small(by_bits), op="sum", metrics=True)({"a": tree["a"]}, None)
    assert float(metrics.vnmse[0]) < 0.1 * float(alone.metrics.vnmse[0])


def test_a_state_of_other_methods_is_refused():
    state = over(DIRECT, CHOSEN).init_state(OWN, N)
    for given, said in ((state[:1], "for 1 buckets"), ({}, "for 'dict' buckets")):
        with pytest.raises(ValueError, match=f"state is {said}.* tree has 2; pass what"):
            reducer(CHOSEN).eval_shape(grads(), given)


def test_what_is_no_method_is_refused():
    with pytest.raises(ValueError, match="method='bf16' is not a method"):
        dq.explain(OWN, N, compression=lambda path, leaf: "bf16", verbose=False)
    with pytest.raises(ValueError, match="is not a method"):
        dq.explain(OWN, N, compression=dq.BF16, verbose=False)


def test_agreement_takes_it():
    params = {"w": jnp.ones((16, 64)), "norm": jnp.ones(64)}
    mixed = small(lambda path, leaf: None if path == "norm" else MX8)
    mixed.check_agreement(params, auto_mesh(), "data")
    wrong = dq.Compression(lambda path, leaf: dq.contrib.OmniReduce(), topology=DIRECT)
    with pytest.raises(NotImplementedError, match="leave topology=None"):
        wrong.check_agreement(params, auto_mesh(), "data")


@pytest.mark.usefixtures("padding_is_free")
def test_on_meshes_parts_of_leaves_and_shards_go_by_path_as_well():
    """The kernel is split over "model" alone, the table over "data", too; the norm nowhere."""
    mesh, coarse = mesh_of(4, 2), dq.DynamiQ(bits=32, widths=(8,))
    w = jax.random.normal(KEY, (64, 64)) / 8
    params = {"norm": jnp.ones(64), "table": jax.random.normal(KEY, (16, 64)), "w": w}

    def loss(params, x):
        return jnp.mean(jnp.square(x @ params["table"] * params["norm"][None] @ params["w"]))

    def by_name(path, leaf):
        return {"norm": None, "table": coarse, "w": MX8}[path]

    x = jax.random.normal(jax.random.key(1), (32, 16))
    _, exact = jax.jit(jax.value_and_grad(loss))(params, x)
    for table in (P(None, "model"), P("data", "model")):
        specs = {"norm": P(), "table": table, "w": P(None, "model")}
        options = {"compression": small(by_name, topology=DIRECT), "specs": specs}
        run = jax.jit(dq.value_and_grad(loss, mesh=mesh, axis_name="data", **options))
        _, found = run(put(params, mesh, specs), x)
        np.testing.assert_allclose(found["norm"], exact["norm"], rtol=1e-4)
        error = {name: float(vnmse(jax.device_get(found[name]), exact[name])) for name in exact}
        assert 1e-8 < error["table"] < 1e-3 < error["w"] < 1e-2
        sent = dq.explain(
            params, 4, compression=small(by_name, topology=DIRECT), mesh=mesh,
            specs={"norm": P(), "table": P(None, "model"), "w": P(None, "model")}, verbose=False,
        )  # fmt: skip
        assert [row.shape for row in sent.rows] == [(64,), (16, 32), (64, 32)]


def test_processes_compare_the_methods_of_all_leaves():
    facts = [
        small(choose).facts(Axis(("data",)), (8,), describe_leaves(OWN))["method"]
        for choose in (by_path, kernels_share, lambda path, leaf: by_path(path, leaf))
    ]
    assert facts[0] == facts[2] != facts[1]
    assert "('embed', MXFP8(" in facts[0]
    assert "('layers/0/norm', None)" in facts[0]
