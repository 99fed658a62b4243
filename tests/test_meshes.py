"""Reductions over the data axis of a mesh with a model axis: each device its own shards, alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close, assert_copies_equal, assert_same_bits
from cases import EXACT, daily, over, small
from hlo import crossing_bytes
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, gradient, put

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.methods.metrics import vnmse

N, PARTS, MODEL = 4, 2, 1
SPECS = {"columns": P(None, "model"), "norm": P(), "other": P(None), "rows": P("model", None)}
SHAPES = {"columns": (24, 64), "norm": (700,), "other": (300,), "rows": (64, 40)}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MODELS = {
    "automatic": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "data explicit": (EXPLICIT, AUTO),
    "model explicit": (AUTO, EXPLICIT),
}
DYNAMIQ = small(dq.DynamiQ(widths=(6, 8), bits=8, format=dq.Format(group_scale="bf16")))

OPTIONS = {"compression": over(dq.Direct(), DYNAMIQ), "key": jax.random.key(3)}


def mesh_of(kind="automatic"):
    return jax.make_mesh((N, PARTS), ("data", "model"), axis_types=MODELS[kind])


@functools.cache
def inputs():
    """Every worker's own gradients, [N, ...]."""
    return {
        name: np.asarray(gradient(seed, N, int(np.prod(shape)))).reshape(N, *shape)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


SHARDED = {name: P("data", *spec) for name, spec in SPECS.items()}


def placed(mesh):
    return put(inputs(), mesh, SHARDED)


def own_of(tree):
    """A worker's leaves, without the axis of workers."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def all_manual(mesh, reduce, **options):
    """A jitted ``reduce`` of every device's shards."""
    specs = {"in_specs": (SHARDED,), "out_specs": SPECS} | options
    return jax.jit(jax.shard_map(lambda tree: reduce(own_of(tree)), mesh=mesh, **specs))


def part_of(name, x, number):
    """One of the parts in which a leaf is on the model axis."""
    spec = [*SPECS[name]]
    return np.split(x, PARTS, spec.index("model"))[number] if "model" in spec else x


def over_data(mesh, reduce, **options):
    """A jitted ``reduce`` of every worker's tree, whose model axis is left as it is."""

    specs = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}} | options
    return all_manual(mesh, reduce, **specs)


def moved(function, *args):
    """Bytes of collectives over the model axis."""
    return crossing_bytes(function.lower(*args).compile().as_text(), (N, PARTS), MODEL)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_nothing_moves_over_an_axis_that_is_left_to_the_compiler(kind, check_vma):
    mesh = mesh_of(kind)
    tree = placed(mesh)
    specs = None if kind in ("explicit", "model explicit") else SPECS
    options = {"compression": over(dq.Direct(), EXACT), "specs": specs}
    ours = over_data(mesh, lambda t: dq.pmean(t, "data", **options), check_vma=check_vma)
    native = over_data(mesh, lambda t: lax.pmean(t, "data"), check_vma=check_vma)
    with jax.set_mesh(mesh):
        assert moved(ours, tree) == moved(native, tree)
        if "explicit" not in kind:
            assert moved(ours, tree) == 0
        found = ours(tree)
    assert_copies_equal(found)
    assert_close(found, {name: x.mean(axis=0) for name, x in inputs().items()}, rtol=1e-5)


def test_pairs_of_workers_reduce_their_shards():
    options = {"compression": over(dq.Direct(), EXACT), "specs": SPECS}
    options["axis_index_groups"] = [[0, 2], [3, 1]]
    pairs = lambda tree: jax.tree.map(lambda x: x[None], dq.psum(tree, "data", **options))
    run = over_data(mesh_of(), pairs, check_vma=False, out_specs=P("data"))
    assert moved(run, placed(mesh_of())) == 0
    sums = {name: x + np.roll(x, 2, axis=0) for name, x in inputs().items()}
    assert_close(run(placed(mesh_of())), sums)


@functools.cache
def expected():
    """The result of each device along the model axis, from meshes of a data axis alone."""

    one = functools.partial(dq.pmean, axis_name="data", **OPTIONS)
    alone = all_manual(auto_mesh(N), one, in_specs=P("data"), out_specs=P())

    def reduced(number, *names):
        return alone({k: np.stack([part_of(k, x, number) for x in inputs()[k]]) for k in names})

    copies = reduced(0, "norm", "other")
    return [jax.device_get(copies | reduced(i, "columns", "rows")) for i in range(PARTS)]


def assert_each_as_alone(found):
    assert_copies_equal(found)
    for name, leaf in found.items():
        whole = np.asarray(leaf)
        for number, alone in enumerate(expected()):
            assert_same_bits(part_of(name, whole, number), alone[name])


@pytest.mark.parametrize("kind", daily(["automatic", "explicit"], ["explicit"]))
@pytest.mark.usefixtures("padding_is_free")
def test_every_device_reduces_its_shards_as_if_there_were_no_others(kind):
    """Statistics, plan and noise are those of a device's own shards, and copies share them."""
    mesh = mesh_of(kind)
    ours = over_data(mesh, lambda t: dq.pmean(t, "data", specs=SPECS, **OPTIONS))
    with jax.set_mesh(mesh):
        found = ours(placed(mesh))
    assert_each_as_alone(found)
    for name, x in inputs().items():
        assert 0 < vnmse(expected()[0][name], part_of(name, x.mean(0), 0)) < 0.003


MANUAL = [(True, None), (False, SPECS), (False, None)]


@pytest.mark.parametrize(("check_vma", "told"), daily(MANUAL, MANUAL[:1]))
@pytest.mark.usefixtures("padding_is_free")
def test_leaves_that_differ_over_other_manual_axes_travel_apart(check_vma, told):
    """With check_vma=False and no specs a leaf shares its widths with no other."""
    mean = functools.partial(dq.pmean, axis_name="data", specs=told, **OPTIONS)
    mapped = all_manual(mesh_of(), mean, check_vma=check_vma)
    tree = placed(mesh_of())
    if check_vma or told:
        assert moved(mapped, tree) == 0
        assert_each_as_alone(mapped(tree))
    else:  # nobody tells copies from shards
        assert_copies_equal(mapped(tree))


def test_derivatives_are_those_of_the_exact_mean():
    def gradient_of(pmean):
        def loss(tree):
            return sum(jnp.sum(leaf**3) for leaf in pmean(tree).values())

        return over_data(mesh_of(), lambda t: lax.pmean(jax.grad(loss)(t), "data"))(
            placed(mesh_of())
        )

    options = {"axis_name": "data", "compression": over(dq.Direct(), EXACT), "specs": SPECS}
    found = gradient_of(functools.partial(dq.pmean, **options))
    exact = gradient_of(lambda tree: lax.pmean(tree, "data"))
    assert all(np.any(np.asarray(leaf)) for leaf in exact.values())
    assert_close(found, exact)


# --- What else there is: states, metrics, explanations, refusals ---------------------------------

MEMORY = small(dq.ErrorFeedback(dq.contrib.OmniReduce(density=0.5)))


def abstract(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_buckets_of_different_axes_are_told_apart():
    tree = abstract(SHAPES)
    with pytest.raises(ValueError, match="pass mesh="):
        dq.explain(tree, N, specs=SPECS)
    found = dq.explain(tree, N, compression=EXACT, mesh=mesh_of(), specs=SPECS, verbose=False)
    assert [row.bucket for row in found.rows] == [0, 1, 1, 0]
    assert [row.shape for row in found.rows] == [(24, 32), (700,), (300,), (32, 40)]
    coords = 24 * 32 + 700 + 300 + 32 * 40
    assert found.wire_bytes == pytest.approx(48 * coords / 8)
    init = functools.partial(as_compression(MEMORY).init_state, tree, N)
    split, whole = init(mesh=mesh_of(), specs=SPECS, stacked=True)
    assert split.residual.shape == (N, PARTS, 24 * 32 + 32 * 40)
    assert whole.residual.shape == (N, 700 + 300)
    options = {"compression": MEMORY, "specs": SPECS, "state": init()}
    mapped = over_data(mesh_of(), lambda t: dq.reduce(t, "data", **options).tree)
    with pytest.raises(ValueError, match="state is for 1 buckets and the tree has 2"):
        mapped.trace(placed(mesh_of()))


def test_metrics_are_those_of_all_parts():
    mesh, tree = mesh_of(), inputs()
    columns, norm = tree["columns"].copy(), tree["norm"].copy()
    columns[0, 0, [3, 50]], norm[2, 5] = np.nan, np.inf
    options = {"compression": over(dq.Direct(), EXACT), "specs": SPECS, "metrics": True}
    mapped = over_data(mesh, lambda t: dq.reduce(t, "data", **options).metrics)
    metrics = mapped(tree | {"columns": columns, "norm": norm})
    assert metrics.nonfinite == 3
    request = over(dq.Direct(), EXACT)
    promised = request.explain(abstract(SHAPES), N, mesh=mesh, specs=SPECS, verbose=False)
    assert metrics.wire_bytes == pytest.approx(promised.wire_bytes)


REFUSED = [
    (None, r"leaf \['columns'\].*automatic axes \{'model': 2\}.*specs=P\(\)"),
    ({"columns": P()}, r"^specs do not fit the tree: leaf \['norm'\] has no"),
    (SPECS | {"more": P()}, r"^specs do not .*: the entry \['more'\] is that of no leaf; pass"),
    (SPECS | {"norm": "model"}, "leaf 'model' of type str"),
    (SPECS | {"norm": P(None, "model")}, "700.*has 2 entries"),
    (SPECS | {"norm": P("stage")}, "axis .stage.*not in the mesh"),
    (SPECS | {"other": P("model")}, "301 entries.*not a multiple of the 2 devices"),
]


@pytest.mark.parametrize(("specs", "message"), REFUSED)
def test_specs_that_are_missing_or_wrong_are_refused(specs, message):
    tree = inputs() | {"other": np.ones((N, 301), np.float32)}
    mapped = over_data(mesh_of(), lambda t: dq.pmean(t, "data", compression=EXACT, specs=specs))
    with pytest.raises(ValueError, match=message):
        mapped(tree)


def test_small_leaves_need_no_specs():
    """Leaves that are reduced exactly go to lax as they are."""
    mesh = mesh_of()
    ours = over_data(mesh, lambda t: dq.pmean(t, "data"))
    assert moved(ours, placed(mesh)) == 0
    assert_same_bits(ours(placed(mesh)), over_data(mesh, lambda t: lax.pmean(t, "data"))(inputs()))


@pytest.mark.parametrize("collective", [dq.psum_scatter, dq.all_gather])
@pytest.mark.usefixtures("padding_is_free")
def test_halves_group_leaves_by_axes_and_are_refused_where_axes_are_open(collective):
    mesh = mesh_of()

    def one(tree):
        tree = {name: x.reshape(4, -1) for name, x in tree.items()}
        return collective(tree, "data", compression=DYNAMIQ)

    # JAX counts all of a bucket as varying over what one leaf varies over, and refuses `out_specs`.
    outs = {k: P(("data", "model") if "model" in v else "data") for k, v in SPECS.items()}
    specs = {"in_specs": (SHARDED,), "out_specs": outs}
    shapes = jax.eval_shape(jax.shard_map(one, mesh=mesh, **specs), inputs())
    assert shapes.keys() == SPECS.keys()
    with pytest.raises(NotImplementedError, match="left the axes {'model': 2}.*value_and_grad"):
        jax.eval_shape(over_data(mesh, one, out_specs=P("data")), inputs())
