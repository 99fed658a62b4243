"""To the letter what `jax.lax` does: arguments, groups, no axes, replicated leaves, eager calls."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits, relative_error
from cases import CHEAP, EVERY_METHOD, TOPOLOGIES, daily, low, over, small
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations, gradient, mesh_of

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis

COLLECTIVES = {
    "psum": (dq.psum, lax.psum),
    "pmean": (dq.pmean, lax.pmean),
    "psum_scatter": (dq.psum_scatter, lax.psum_scatter),
    "all_gather": (dq.all_gather, lax.all_gather),
}
METHOD = CHEAP
TILED = {"psum": {}, "pmean": {}, "psum_scatter": {"tiled": True}, "all_gather": {"tiled": True}}
N, SIZE = 8, 2048
GROUPS = [[0, 2, 4, 6], [7, 1, 5, 3]]


def shard_mapped(one, *, check_vma=False, replicated=False):
    """``one`` of every worker's row, and the results along a leading axis or replicated."""
    specs = {"in_specs": P("data"), "out_specs": P() if replicated else P("data")}
    return jax.shard_map(lambda x: one(x[0]), mesh=auto_mesh(N), check_vma=check_vma, **specs)


def on_devices(one, x, **options):
    """As one program."""
    return jax.jit(shard_mapped(one, **options))(x)


def rows(one):
    """``one``, whose results get a leading axis to be put together along."""
    return lambda x: jax.tree.map(lambda y: y[None], one(x))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_arguments_are_those_of_lax(name):
    ours, native = (inspect.signature(f).parameters for f in COLLECTIVES[name])
    shared = {key: (p.kind, p.default) for key, p in ours.items() if key in native}
    assert shared == {key: (p.kind, p.default) for key, p in native.items()}
    assert list(ours)[:2] == list(native)[:2]


# Groups


MAPS = ["pmap", "shard_map", "shard_map, check_vma"]
EACH = [*zip(COLLECTIVES, [*MAPS[:2], *MAPS[1:]], strict=True)]


@pytest.mark.parametrize(
    ("name", "mapped_by"), daily(itertools.product(COLLECTIVES, MAPS), [*EACH, ("psum", MAPS[2])])
)
def test_groups_sum_small_leaves_as_lax(name, mapped_by):
    x = jnp.arange(N * 16.0).reshape(N, 16)

    def run(collective):
        options = {"axis_index_groups": GROUPS, **TILED[name]}
        one = functools.partial(collective, axis_name="data", **options)
        if mapped_by == "pmap":
            return jax.pmap(one, axis_name="data")(x)
        return on_devices(rows(one), x, check_vma="check" in mapped_by)

    ours, native = COLLECTIVES[name]
    if "check" in mapped_by and name in ("psum", "pmean"):
        for collective, words in ((ours, r"=\(\(0, 2, 4, 6\).*check_vma=False"), (native, None)):
            with pytest.raises(NotImplementedError, match=words):
                run(collective)
    else:
        assert_same_bits(run(ours), run(native))


WAYS = [*itertools.product(("psum", "psum_scatter"), ("direct", "ring", "butterfly"))]
WAYS += [("pmean", "ring"), ("all_gather", None)]


@pytest.mark.parametrize(("name", "way"), daily(WAYS, [("psum", "direct"), ("all_gather", None)]))
@pytest.mark.usefixtures("padding_is_free")
def test_a_group_has_the_bits_of_an_axis(name, way):
    """Groups in the order of a mesh's rows: what the mesh's second axis gives."""
    x, key = gradient(0, N, SIZE), jax.random.key(3)
    options = {"compression": METHOD, "key": key, **TILED[name]}
    if way is not None:
        options["compression"] = over(TOPOLOGIES[way][0], METHOD)
    collective, _ = COLLECTIVES[name]
    shuffled = jnp.asarray(sum(GROUPS, []))

    def grouped(x):
        return collective(x, "data", axis_index_groups=GROUPS, **options)

    def by_axis(x):
        return collective(x[0], "gpu", **options)[None]

    mesh = mesh_of(2, 4, names=("node", "gpu"))
    both = P(("node", "gpu"))
    specs = {"mesh": mesh, "in_specs": both, "out_specs": both, "check_vma": False}
    expected = np.asarray(jax.jit(jax.shard_map(by_axis, **specs))(x[shuffled]))
    found = np.asarray(on_devices(rows(grouped), x))
    assert_same_bits(found[shuffled], expected)
    if name == "psum":
        exact = np.asarray(x, np.float64)[GROUPS[1]].sum(axis=0)
        assert relative_error(found[GROUPS[1][0]], exact) < 0.25
    if name in ("psum_scatter", "all_gather"):
        assert_same_bits(np.asarray(on_devices(rows(grouped), x, check_vma=True)), found)


IN_GROUPS = [EVERY_METHOD[name].method for name in ("bf16", "mxfp8", "thc", "omnireduce")]
IN_GROUPS.append(small(dq.DynamiQ(debug_checks=True)))


@pytest.mark.release
@pytest.mark.parametrize("method", IN_GROUPS, ids=lambda method: type(method.method).__name__)
def test_every_method_sums_in_groups(method):
    x = gradient(1, N, SIZE)

    def one(x):
        return dq.psum(
            x, "data", compression=method, axis_index_groups=GROUPS, key=jax.random.key(0)
        )

    found = np.asarray(on_devices(rows(one), x))
    for group in GROUPS:
        assert_same_bits(found[group], np.broadcast_to(found[group[:1]], (4, SIZE)))
        exact = np.asarray(x, np.float64)[group].sum(axis=0)
        assert relative_error(found[group[0]], exact) < 0.25


def test_groups_differentiate_as_lax():
    x, method = gradient(2, N, SIZE), small(dq.BF16())

    def grads(psum):
        def one(x):
            loss = lambda x: jnp.sum(psum(x * x, "data", axis_index_groups=GROUPS) * x)
            return jax.grad(loss)(lax.reduce_precision(x, 8, 3))

        return on_devices(rows(one), x)

    found, expected = grads(functools.partial(dq.psum, compression=method)), grads(lax.psum)
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())


# No axes, one axis under other names, constants


@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_axes_is_the_identity(name):
    tree = {"a": jnp.arange(3.0), "b": jnp.arange(4), "c": jnp.ones(300_000)}
    ours, native = COLLECTIVES[name]
    found, expected = ours(tree, ()), native(tree, ())
    assert_same_bits(found, expected)
    assert_same_bits(ours(tree, []), expected)


def test_constants_stay_constants():
    """As in `jax.lax`, what no map has touched is multiplied where it is, and costs no traffic.

    So the size of an axis, and that of a group, is a number of Python.
    """
    large = np.linspace(0.1, 1, 300_000, dtype=np.float32)
    tree = {"one": 1, "real": 2.5, "array": np.arange(3), "large": large}

    def one(x):
        total, mean = dq.psum(tree, "data"), dq.pmean(tree, "data")
        assert jax.tree.map(type, total) == jax.tree.map(type, lax.psum(tree, "data"))
        assert mean["real"] == 2.5
        assert_same_bits(mean["large"], large)
        np.testing.assert_array_equal(total["large"], 8 * large)
        for groups, size in ((None, N), (GROUPS, 4)):
            found = dq.psum(1, "data", axis_index_groups=groups)
            native = lax.psum(1, "data", axis_index_groups=groups)
            assert (found, type(found)) == (size, type(native))
        return x

    for check_vma in (False, True):
        on_devices(rows(one), jnp.ones((N, 1)), check_vma=check_vma)


# Leaves that are the same on all workers


def replicated_and_not(reduce):
    """The reduction of a tree with leaves that vary and leaves that do not."""
    x = gradient(3, N, SIZE)
    fixed = {
        "rate": jnp.float32(0.1), "large": jnp.linspace(-1, 1, 4 * SIZE) / 3, "step": jnp.int32(7),
        "flag": jnp.array([True, False]), "phase": jnp.array([1 + 2j]) / 3,
    }  # fmt: skip

    def one(x, fixed):
        return reduce({"x": x[0], "small": x[0, :3], **fixed}, "data")

    specs = {"in_specs": (P("data"), P()), "out_specs": P()}
    mapped = jax.shard_map(one, mesh=auto_mesh(N), **specs)
    return jax.jit(mapped)(x, fixed), fixed, x


@pytest.mark.usefixtures("padding_is_free")
def test_the_mean_of_what_is_replicated_is_itself():
    mean = functools.partial(dq.pmean, compression=low(METHOD.method), key=jax.random.key(1))
    with pytest.warns(UserWarning, match="do not vary over axis 'data'"):
        found, fixed, x = replicated_and_not(mean)
    native, _, _ = replicated_and_not(lax.pmean)
    for name in ("rate", "large", "phase"):
        assert_same_bits(found[name], fixed[name])
    for name in ("step", "flag", "small"):
        assert_same_bits(found[name], native[name])
    assert 0 < relative_error(found["x"], np.mean(np.asarray(x, np.float64), axis=0)) < 0.25
    # The leaf that varies is rounded as if the others were not there.
    alone = on_devices(lambda x: mean({"x": x}, "data"), x, check_vma=True, replicated=True)
    assert_same_bits(alone["x"], found["x"])


def test_the_sum_of_what_is_replicated_and_small_is_that_of_lax():
    method = dq.Compression(dq.DynamiQ(), min_leaf_size=5 * SIZE, min_bucket_size=1)
    found, _, _ = replicated_and_not(functools.partial(dq.psum, compression=method))
    native, _, _ = replicated_and_not(lax.psum)
    assert_same_bits(found, native)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("mapped_by", daily(["vmap", *MAPS], ["shard_map, check_vma"]))
@pytest.mark.usefixtures("padding_is_free")
def test_derivatives_are_those_of_lax(name, mapped_by):
    """The transpose, the cotangent and the tangent; rounding alone has a derivative of zero."""
    x = gradient(9, N, SIZE)
    y = {"all_gather": jnp.tile(x, (1, N)), "psum_scatter": x[:, : SIZE // N]}.get(name, x)

    def transposed(collective):
        def one(both):
            x, y = both
            f = functools.partial(collective, axis_name="data", **TILED[name])
            if "check" in mapped_by and name in ("psum", "pmean"):
                y = lax.pmax(y, "data")
            back, whole = jax.linear_transpose(f, x)(y)[0], name in ("psum", "pmean")
            pulled = jax.vjp(f, x)[1](y)[0]
            pushed = jax.jvp(f, (x,), (2 * x + 1,))[1]
            return back, pulled, Axis(("data",)).to_varying(pushed) if whole else pushed

        if mapped_by == "vmap":
            return jax.jit(jax.vmap(one, axis_name="data"))((x, y))
        if mapped_by == "pmap":
            return jax.pmap(one, axis_name="data")((x, y))
        specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": "check" in mapped_by}
        of_row = rows(lambda both: one(jax.tree.map(lambda x: x[0], both)))
        return jax.jit(jax.shard_map(of_row, mesh=auto_mesh(N), **specs))((x, y))

    ours, native = COLLECTIVES[name]
    found, expected = transposed(functools.partial(ours, compression=METHOD)), transposed(native)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_second_derivatives_are_those_of_lax(name):
    x = gradient(9, N, SIZE)

    def curvature(collective):
        def one(x):
            loss = lambda x: jnp.sum(collective(x, "data", **TILED[name]) ** 3)
            return jax.jvp(jax.grad(loss), (x,), (x + 1,))[1]

        return jax.jit(jax.vmap(one, axis_name="data"))(x)

    ours, native = COLLECTIVES[name]
    found = curvature(functools.partial(ours, compression=small(dq.F32())))
    np.testing.assert_allclose(found, curvature(native), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_pass_states_of_integers(check_vma):
    """The state of `CLTK` is the number of steps."""
    x, weight = gradient(0, N, 700), gradient(9, N, 700)
    method = small(dq.contrib.CLTK(density=1.0))
    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": check_vma}

    @jax.jit
    @jax.shard_map(mesh=auto_mesh(N), **specs)
    def grad_and_state(x, weight, state):
        own = jax.tree.map(lambda a: a[0], state)

        def loss(x):
            found = dq.reduce(x[0], "data", op="sum", compression=method, state=own)
            total = jnp.sum(found.tree * weight[0])
            return lax.psum(total, "data") if check_vma else total, found.state

        grad, state = jax.grad(loss, has_aux=True)(x)
        return grad, jax.tree.map(lambda a: a[None], state)

    grad, state = grad_and_state(x, weight, method.init_state(x[0], N, stacked=True))
    exact = np.broadcast_to(np.sum(weight, axis=0), x.shape)
    np.testing.assert_allclose(grad, exact, rtol=1e-6, atol=1e-6)
    assert state[0].step.tolist() == [1] * N


def test_a_half_reduced_leaf_is_left_to_lax():
    x = gradient(10, N, 512)
    mesh = mesh_of(2, 4, names=("a", "b"))

    def run(f):
        def one(x):
            whole = lax.all_gather(x, "b", to="reduced", tiled=True)
            return lax.pcast(f(whole, "a"), "b", to="varying")

        specs = {"in_specs": P(("a", "b")), "out_specs": P("b")}
        return jax.jit(jax.shard_map(one, mesh=mesh, **specs))(x)

    assert_same_bits(run(functools.partial(dq.psum, compression=METHOD)), run(lax.psum))


# all_gather(to=...)


@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
@pytest.mark.parametrize("method", daily([None, METHOD], [METHOD]), ids=["exact", "compressed"])
@pytest.mark.usefixtures("padding_is_free")
def test_what_is_gathered_is_typed_and_differentiates_as_lax(to, method):
    x, weight, types = gradient(4, N, 512), jnp.linspace(-1, 1, N * 512), []

    def run(gather):
        def one(x):
            def loss(x):
                whole = gather(x, "data", to=to, tiled=True)
                types.append(jax.typeof(whole))
                if to == "reduced":
                    whole = lax.pcast(whole, "data", to="varying")
                return jnp.sum(whole * weight), whole

            grads, whole = jax.grad(loss, has_aux=True)(x)
            return grads[None], Axis(("data",)).to_varying(whole[None])

        return jax.device_get(on_devices(one, x, check_vma=True))

    ours = functools.partial(dq.all_gather, compression=method, key=jax.random.key(0))
    (grads, found), (expected_grads, expected) = run(ours), run(lax.all_gather)
    assert types[0] == types[-1]
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-6)
    if method is None:
        assert_same_bits(found, expected)
    else:
        assert 0 < relative_error(found, expected) < 0.2


def test_to_is_checked():
    with pytest.raises(ValueError, match="to='replicated'; expected one of .*'invarying'"):
        jax.vmap(lambda x: dq.all_gather(x, "i", to="replicated"), axis_name="i")(jnp.ones(2))
    with pytest.raises(NotImplementedError, match="to='invarying'.*varies between them"):
        on_devices(
            lambda x: dq.all_gather(x, "data", to="invarying", axis_index_groups=GROUPS),
            jnp.ones((N, 4)),
        )


def test_dimensions_count_from_the_last():
    """`test_sharded` has the axes of `all_gather`."""

    def both(x):
        found = dq.psum_scatter(x, "data", scatter_dimension=-1, tiled=True)
        return found, lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)

    x = jnp.arange(float(N * 3 * N * 2)).reshape(N, 3, N * 2)
    assert_same_bits(*jax.jit(jax.vmap(both, axis_name="data"))(x))


# Eager calls


EAGER = {
    "psum": functools.partial(dq.psum, compression=METHOD),
    "psum_scatter": functools.partial(dq.psum_scatter, compression=METHOD, tiled=True),
    "all_gather": functools.partial(dq.all_gather, compression=METHOD, tiled=True),
}


@pytest.mark.parametrize("name", daily(["psum", "psum_scatter", "all_gather"], ["psum_scatter"]))
@pytest.mark.usefixtures("padding_is_free")
def test_an_eager_vmap_is_one_program(name):
    x = gradient(7, 4, 1024)
    ours = jax.vmap(functools.partial(EAGER[name], axis_name="data"), axis_name="data")
    with compilations() as compiled:
        ours(x)
        assert len(compiled) <= 2  # of which one is vmap's own: a copy for every worker
        compiled.clear()
        found = ours(x)
        assert not compiled
    assert_same_bits(found, jax.jit(ours)(x))


@pytest.mark.usefixtures("padding_is_free")
def test_nothing_is_left_of_it_within_jit():
    """No call within the jaxpr of a training step, under any map."""
    x = gradient(8, N, 1024)
    mapped = shard_mapped(lambda x: EAGER["psum"](x, "data"), check_vma=True, replicated=True)
    for f in (mapped, jax.vmap(functools.partial(EAGER["psum"], axis_name="i"), axis_name="i")):
        assert "reduce_leaves" not in str(jax.make_jaxpr(f)(x))
