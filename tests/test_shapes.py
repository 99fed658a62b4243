"""Annotations of shapes and dtypes are checked while tests run, and so are true."""

import jax.numpy as jnp
import pytest
import shapes
from jaxtyping import Array, Int, TypeCheckError, jaxtyped

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.contrib import hadamard, lanes

checked = jaxtyped(typechecker=shapes.checked)


@checked
def first(order: Int[Array, "C m"], tiles: tuple[Int[Array, "C T"], ...]) -> Int[Array, " m"]:
    return order[0] if tiles else order


def test_wrong_arguments_and_results_fail():
    order = jnp.zeros((3, 8), int)
    first(order, (jnp.zeros((3, 2), int), jnp.zeros((3, 2), int)))
    with pytest.raises(TypeCheckError, match="'tiles'"):
        first(order, (jnp.zeros((4, 2), int),))
    with pytest.raises(TypeCheckError, match="'order'"):
        first(order.astype(jnp.float32), ())
    with pytest.raises(TypeCheckError, match="return value"):
        first(order, ())


def test_other_annotations_are_left_to_pyright():
    with pytest.raises(ValueError, match="rounding='up'; expected one of"):
        dq.contrib.MXFP6(rounding="up")  # type: ignore


def test_both_packages_are_checked():
    with pytest.raises(TypeCheckError, match="'x'"):
        pk.statistics(jnp.zeros((2, 256)))
    with pytest.raises(TypeCheckError, match="'x'"):
        hadamard.cut(jnp.zeros((2, 256)))
    with pytest.raises(TypeCheckError, match="'fields'"):
        lanes.pack_bits(jnp.zeros(32), 4)
