"""`psum` of any pytree: structure, shapes and dtypes; `test_every_method` has the sums."""

import dataclasses
import functools
import string

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import EVERY_METHOD, TWO_WIDTHS, daily, vmapped
from hypothesis import strategies as st
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.tree.leaves import joined

COMPRESSED = ("float32", "bfloat16", "float16")
EXACT = ("int32", "bool", "complex64", "uint8")
WIDE = dq.Compression(dq.DynamiQ(widths=(8,), bits=32), min_leaf_size=32, min_bucket_size=64)


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from(COMPRESSED + EXACT))
names = st.text(string.ascii_letters + " ./'é", max_size=4)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3),
        st.tuples(inner, st.none())),
    max_leaves=6,
)  # fmt: skip


def is_leaf(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], str)


@hypothesis.given(trees, st.sampled_from(COMPRESSED), st.integers(1, 5), st.booleans())
@hypothesis.settings(deadline=None, max_examples=25, derandomize=True, database=None)
@pytest.mark.usefixtures("padding_is_free")
def test_any_tree_keeps_structure_shapes_and_dtypes(spec, dtype, n, mean):
    """Traced only: the same avals as lax.psum and lax.pmean return."""
    spec = {"tree": spec, "large": ((13, 31), dtype)}  # so that something is compressed

    def struct(leaf):
        return jax.ShapeDtypeStruct((n, *leaf[0]), leaf[1])

    tree = jax.tree.map(struct, spec, is_leaf=is_leaf)
    ours = functools.partial(dq.pmean if mean else dq.psum, compression=WIDE)
    native = lax.pmean if mean else lax.psum

    def avals(reduce):
        mapped = jax.vmap(lambda t: reduce(t, "data"), axis_name="data", axis_size=n)
        return jax.eval_shape(mapped, tree)

    found, expected = avals(ours), avals(native)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(found)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(expected)
    ]


ROUNDED = [(TWO_WIDTHS, None, 0.2), (TWO_WIDTHS, jax.random.key(0), 0.2)]
ROUNDED += [(EVERY_METHOD[name].method, None, 0.05) for name in ("minmax", "mxfp6", "qsgd")]


@pytest.mark.parametrize(("method", "key", "least"), daily(ROUNDED, ROUNDED[:3]))
@pytest.mark.usefixtures("padding_is_free")
def test_a_bucket_does_not_depend_on_others_and_equal_ones_are_rounded_differently(
    method, key, least
):
    method = dataclasses.replace(method, bucket_bytes=0)
    x = jax.random.normal(jax.random.key(1), (2, 700))
    run = vmapped(method, dq.Direct())
    both, alone = run({"a": x, "b": x}, key), run({"b": x}, key)
    assert_same_bits(np.asarray(alone["b"]), np.asarray(both["b"]))
    assert np.mean(np.asarray(both["a"]) != np.asarray(both["b"])) > least


@pytest.mark.parametrize("mapped", [False, True])
def test_parts_are_joined_alike_on_gpus(monkeypatch, mapped):
    parts = [jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 0)), -jnp.ones((2, 4))]
    weight = jnp.arange(14.0).reshape(2, 7)

    def found():
        own = jax.vmap(joined, ([0, 0, None],)) if mapped else functools.partial(joined)
        given = [*parts[:2], parts[2][0]] if mapped else parts
        slope = jax.grad(lambda parts: jnp.sum(own(parts) * weight))(given)
        return own(given), jax.jvp(own, (given,), (given,))[1], *slope, jax.jit(own).lower(given)

    *expected, _ = found()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    *actual, program = found()
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ("concatenate" in program.as_text()) == mapped
    assert "scatter" not in program.as_text()
