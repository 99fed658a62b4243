"""The axis of a leaf along which neighbours share scales."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import CHEAP, LOOP, daily, over, vmapped
from jax.sharding import PartitionSpec as P
from workers import mesh_of, put

import dynamiq_jax as dq
from dynamiq_jax.tree.leaves import Bucket, concatenate, describe_leaves, split, with_scale_axes

TRANSFORMER = {
    "embed": (1000, 256), "head": (256, 1000), "up": (12, 256, 1024), "down": (12, 1024, 256),
    "query": (12, 256, 4, 64), "output": (12, 4, 64, 256), "norm": (12, 256), "bias": (1024,),
}  # fmt: skip


def along(request, axis):
    """The request with scales along an axis."""
    wire = replace(request.method.format, scale_axis=axis)
    return replace(request, method=replace(request.method, format=wire))


@pytest.mark.parametrize(
    ("scale_axis", "shapes", "expected"),
    [
        # That of the residual stream, and the last of equally common ones.
        ("auto", TRANSFORMER, {"head": 0, "up": 1, "query": 1}),
        ("auto", {"a": (256, 512), "b": (512, 256), "short": (8, 16)}, {}),
        # Numbers count where there are such axes.
        (0, TRANSFORMER, dict.fromkeys(TRANSFORMER, 0) | {"bias": None}),
        (-3, TRANSFORMER, {"up": 0, "down": 0, "query": 1, "output": 1}),
        (None, TRANSFORMER, {}),
    ],
)
def test_the_axis_of_a_leaf(scale_axis, shapes, expected):
    """Leaves that ``expected`` does not have keep the last axis."""
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    leaves = with_scale_axes(describe_leaves(tree), scale_axis)
    found = {leaf.name[2:-2]: leaf.scale_axis for leaf in leaves}
    assert found == dict.fromkeys(shapes) | expected


@pytest.mark.parametrize("scale_axis", daily([0, 1, -2, "auto", None], [0, "auto"]))
def test_a_bucket_comes_apart_as_it_was_put_together(scale_axis):
    rng = np.random.default_rng(0)
    shapes = ((3, 64, 5), (64, 7), (64,), (2, 3, 4, 64))
    values = {i: jnp.asarray(rng.normal(size=shape)) for i, shape in enumerate(shapes)}
    bucket = Bucket(tuple(with_scale_axes(describe_leaves(list(values.values())), scale_axis)))
    flat = concatenate(bucket, values)
    assert flat.shape == (sum(x.size for x in values.values()),)
    for i, x in split(bucket, flat):
        assert_same_bits(x, values[i])


def test_it_is_the_reduction_of_the_transposed_leaf():
    x = jax.random.normal(jax.random.key(0), (4, 96, 256))
    found = vmapped(along(CHEAP, 0))(x, jax.random.key(1))
    expected = vmapped(CHEAP)(jnp.swapaxes(x, 1, 2), jax.random.key(1))
    assert_same_bits(found, np.swapaxes(expected, 1, 2))


def test_every_device_goes_along_the_axis_of_its_own_part():
    """A leaf that "model" splits is scaled part by part, as if there were no other."""
    mesh, method, key = mesh_of(2, 2), along(CHEAP, 0), jax.random.key(1)
    x = jax.random.normal(jax.random.key(0), (2, 128, 512))

    def one(x):
        specs = P(None, "model")
        return dq.pmean(x[0], "data", compression=over(LOOP, method), key=key, specs=specs)

    options = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}}
    split_x = put(x, mesh, P("data", None, "model"))
    found = jax.jit(jax.shard_map(one, mesh=mesh, **options))(split_x)
    for part in (slice(0, 256), slice(256, 512)):
        expected = vmapped(method, mean=True)(x[:, :, part], key)
        np.testing.assert_allclose(found[:, part], expected[0], rtol=1e-6)


def halves(x, method, **options):
    """`psum_scatter` of every worker's x, and the `all_gather` of what it left them with."""

    def one(x):
        part = dq.psum_scatter(x, "data", compression=method, key=jax.random.key(1), **options)
        rest = {"axis": options.get("scatter_dimension", 0), "tiled": options.get("tiled", False)}
        whole = dq.all_gather(part, "data", compression=method, key=jax.random.key(2), **rest)
        return part, whole

    return jax.vmap(one, axis_name="data")(x)


HALVES = [
    (0, 1, True, 0),  # the scale axis is whole in every slice
    (0, 0, True, 1),  # it is the one that is sliced
    (1, 0, False, 1),  # an axis of one slice
]


@pytest.mark.parametrize(("axis", "dimension", "tiled", "moved"), daily(HALVES, HALVES[1:2]))
def test_halves_are_those_of_the_transposed_leaf(axis, dimension, tiled, moved):
    shape = (4, 4, 96, 256) if not tiled else (4, 96, 256)
    x = jax.random.normal(jax.random.key(0), shape)
    method, plain = along(CHEAP, axis), CHEAP
    options = {"tiled": tiled, "scatter_dimension": dimension}
    other = {"tiled": tiled, "scatter_dimension": moved if tiled else 0}
    found = halves(x, method, **options)
    expected = halves(jnp.swapaxes(x, -1, -2), plain, **other)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == np.swapaxes(theirs, -1, -2).shape
    assert_same_bits(found[0], np.swapaxes(expected[0], -1, -2))
    assert not np.array_equal(found[0], halves(x, plain, **options)[0])
    if tiled:  # of an untiled slice axis 1 is the last one, and the default
        assert_same_bits(found[1], np.swapaxes(expected[1], -1, -2))
