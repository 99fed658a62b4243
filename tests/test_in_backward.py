"""`reduce_in_backward`: gradients are those of a reduction after `jax.grad`, layer by layer."""

import dataclasses
import itertools
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHEAP,
    EXACT,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    daily,
    local,
    mapped,
    mesh_of,
    once,
    small,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

N, DIM, LAYERS = 4, 128, 3
KEY = jax.random.key(5)


def layer(x, w):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def model(layers, x, each=lambda w: w, scanned=True, remat=False):
    """The loss; ``each`` is done to the parameters of every layer."""

    def step(x, w):
        return layer(x, each(w)), None

    step = jax.checkpoint(step) if remat else step
    if scanned:
        x, _ = lax.scan(step, x, layers)
    else:
        for i in range(LAYERS):
            x, _ = step(x, {name: w[i] for name, w in layers.items()})
    return jnp.mean(x**2)


def in_backward(**options):
    return partial(dq.reduce_in_backward, **{"axis_name": "data", "method": EXACT} | options)


@once
def inputs():
    """Layers that all workers have, and every worker's own examples; later ones' are larger."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "kernel": jax.random.normal(keys[0], (LAYERS, DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[1], (LAYERS, DIM)),
    }
    x = jax.random.normal(keys[2], (N, 6, DIM))
    return layers, x * jnp.linspace(0.2, 2.0, N)[:, None, None]


@cache
def means():
    """The gradient of all examples on one device, which is the mean of all workers'."""
    layers, x = inputs()
    return jax.device_get(jax.jit(jax.grad(model))(layers, x.reshape(-1, DIM)))


def assert_means(found):
    """Gradients are `means`, those of every worker if they have an axis of workers."""
    for name, own in found.items():
        expected = np.broadcast_to(means()[name], own.shape)
        np.testing.assert_allclose(own, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
@pytest.mark.parametrize("op", daily(["mean", "sum"], ["mean"]))
def test_a_whole_model_has_the_bits_of_a_reduction_after_grad(check_vma, op):
    options = {"op": op, "method": CHEAP, "key": KEY}

    def inside(layers, x):
        return jax.grad(lambda layers: model(in_backward(**options)(layers), x))(layers)

    def after(layers, x):
        own = jax.grad(model)(local(layers, check_vma), x)
        return dq.reduce(own, "data", **options).tree

    found, expected = (mapped(f, check_vma)(*inputs()) for f in (inside, after))
    assert_same_bits(found, expected)
    assert_replicas_equal(found)
    assert all(np.any(own != 0) for own in found.values())


WAYS = [*itertools.product([True, False], repeat=3)]


@pytest.mark.parametrize(
    ("check_vma", "scanned", "remat"), daily(WAYS, [(True, True, True), (False, False, True)])
)
def test_layers_have_the_exact_mean_with_f32(check_vma, scanned, remat):
    loss = partial(model, each=in_backward(), scanned=scanned)
    grad = jax.grad(jax.checkpoint(loss) if remat else loss)
    assert_means(mapped(grad, check_vma)(*inputs()))


def test_in_a_scan_the_collectives_are_inside_the_backward_loop():
    """After `jax.grad` they are outside of any loop."""
    collectives = re.compile(r"= \S+ (all-to-all|all-gather|all-reduce)")
    method = as_compression(CHEAP, dq.Direct())

    def counts(f):
        text = mapped(f, True).lower(*inputs()).compile().as_text()
        bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
        found = [0, 0]
        for block in re.split(r"\n(?=%|ENTRY)", text):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", block.lstrip())
            found[not (name and name[1] in bodies)] += len(collectives.findall(block))
        return found

    within, outside = counts(jax.grad(partial(model, each=in_backward(method=method))))
    assert within >= 2 and outside == 0

    def after(layers, x):
        own = jax.grad(model)(lax.pcast(layers, "data", to="varying"), x)
        return dq.pmean(own, "data", method=method)

    within, outside = counts(after)
    assert within == 0 and outside >= 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Strict:
    """A pytree that takes arrays alone."""

    kernel: jax.Array
    number: jax.Array

    def __post_init__(self):
        """As modules that validate do."""
        if self.number is None:
            raise TypeError("number is missing")


def test_leaves_that_have_no_gradient_pass():
    """So do values of those that have one; a pytree that refuses `None` may hold integers."""

    def inside(layers, x):
        def loss(kernel, bias):
            strict = Strict(kernel, jnp.arange(LAYERS))
            passed, bias, none = in_backward()((strict, bias, None))
            assert none is None and passed.number.dtype == jnp.int32
            return model({"kernel": passed.kernel, "bias": bias}, x), passed.kernel

        found = jax.grad(loss, argnums=(0, 1), has_aux=True)(layers["kernel"], layers["bias"])
        return dict(zip(("kernel", "bias"), found[0], strict=True)), found[1]

    found, values = mapped(inside, True)(*inputs())
    assert_means(found)
    assert_same_bits(values[3], inputs()[0]["kernel"])


@pytest.mark.parametrize("mapping", daily(["vmap", "pmap"], ["vmap"]))
def test_other_maps(mapping):
    grad = jax.grad(partial(model, each=in_backward()))
    options = {"axis_name": "data", "in_axes": (None, 0)}
    run = jax.jit(jax.vmap(grad, **options)) if mapping == "vmap" else jax.pmap(grad, **options)
    assert_means(run(*inputs()))


def test_sharded_over_another_axis_it_reduces_parts():
    """Partial-manual, with an automatic axis: ``specs`` as for `psum`."""
    each = in_backward(specs={"kernel": P(None, "model"), "bias": P()})
    maps = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}

    @partial(jax.shard_map, mesh=mesh_of(2, 2), **maps)
    def grad(layers, x):
        return jax.grad(partial(model, each=each, scanned=False))(layers, x.reshape(-1, DIM))

    assert_means(jax.jit(grad)(*inputs()))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"op": "max"}, "op='max'"),
        ({"key": 3}, "key=3 is not a PRNG key"),
        ({"method": small(dq.ErrorFeedback(dq.DynamiQ()))}, "has memory, and a backward pass"),
        ({"method": lambda path, leaf: dq.ErrorFeedback(dq.comparators.THC())}, "has memory"),
    ],
)
def test_what_cannot_be_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):  # in the forward pass already
        mapped(partial(model, each=in_backward(**options)), True)(*inputs())


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_there_are_no_second_derivatives(check_vma):
    def curvature(layers, x):
        first = jax.grad(partial(model, each=in_backward(), scanned=False))
        return jax.grad(lambda w: jnp.sum(first(w, x)["kernel"]))(layers)

    with pytest.raises(NotImplementedError, match="first order only"):
        mapped(curvature, check_vma)(*inputs())


def test_parameters_may_vary_over_some_of_the_axes_already():
    axes = ("node", "gpu")
    specs = {"in_specs": (P(), P(axes)), "out_specs": P("gpu")}

    @partial(jax.shard_map, mesh=mesh_of(2, 2, names=axes), **specs)
    def grad(layers, x):
        layers = lax.pcast(layers, "gpu", to="varying")
        found = jax.grad(partial(model, each=in_backward(axis_name=axes)))(layers, x[0])
        return jax.tree.map(lambda g: g[None], found)

    assert_means(jax.jit(grad)(*inputs()))


OUTSIDE = [*itertools.product([False, True], ["inside", "outside"])]


@pytest.mark.parametrize(("in_scan", "averaged"), daily(OUTSIDE, OUTSIDE[1:3]))
def test_a_gradient_from_outside_of_the_map_is_refused_where_it_would_be_too_small(
    in_scan, averaged
):
    def own(params, x):
        def layer(total, _):
            return total + jnp.mean(in_backward()(params)[None] * x), None

        start = jnp.sum(0 * x)
        total = jax.lax.scan(layer, start, None, length=2)[0] if in_scan else layer(start, None)[0]
        return jax.lax.pmean(total, "data") if averaged == "inside" else total[None]

    specs = {"in_specs": (P(), P("data")), "out_specs": P() if averaged == "inside" else P("data")}

    def gradient_of(check_vma):
        mapped = jax.shard_map(own, mesh=auto_mesh(N), check_vma=check_vma, **specs)
        return jax.grad(lambda params: jnp.mean(mapped(params, jnp.ones((N, 64)))))(jnp.ones(64))

    with pytest.raises(ValueError, match="jax.grad outside of jax.shard_map.*inside the map"):
        jax.eval_shape(lambda: gradient_of(True))
    np.testing.assert_allclose(gradient_of(False), 2 / 64 if in_scan else 1 / 64, rtol=1e-6)
