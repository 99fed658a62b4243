"""`reduce_in_backward`: gradients are those of a reduction after `jax.grad`, layer by layer."""

import dataclasses
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, assert_same_bits, auto_mesh, daily, local, mapped, once, small
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

N, DIM, LAYERS = 4, 128, 3
METHOD = CHEAP
EXACT = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0)
KEY = jax.random.key(5)


def layer(x, w):
    return jnp.tanh(x @ w["kernel"]) + w["bias"][None]


def model(layers, x, each=lambda w: w, scanned=True):
    """The loss; ``each`` is done to the parameters of every layer."""
    if scanned:
        x, _ = lax.scan(lambda x, w: (layer(x, each(w)), None), x, layers)
    else:
        for i in range(LAYERS):
            x = layer(x, each({name: w[i] for name, w in layers.items()}))
    return jnp.mean(x**2)


own_gradient = jax.jit(jax.grad(model))
"""The gradient of one worker's loss, with nothing reduced."""


@once
def inputs():
    """Layers that all workers have, and every worker's own examples."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "kernel": jax.random.normal(keys[0], (LAYERS, DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[1], (LAYERS, DIM)),
    }
    return layers, jax.random.normal(keys[2], (N, 6, DIM))


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
@pytest.mark.parametrize("op", daily(["mean", "sum"], ["mean"]))
def test_a_whole_model_has_the_bits_of_a_reduction_after_grad(check_vma, op):
    layers, x = inputs()

    def inside(layers, x):
        options = {"op": op, "method": METHOD, "key": KEY}
        each = partial(dq.reduce_in_backward, axis_name="data", **options)
        return jax.grad(lambda layers: model(each(layers), x))(layers)

    def after(layers, x):
        own = jax.grad(model)(local(layers, check_vma), x)
        return dq.reduce(own, "data", op=op, method=METHOD, key=KEY).tree

    found, expected = (mapped(f, check_vma)(layers, x) for f in (inside, after))
    assert_same_bits(found, expected)
    assert_same_bits(found, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), found))
    assert all(np.any(own != 0) for own in found.values())


def means():
    """The gradient's mean over workers, which `inputs` have."""
    layers, x = inputs()
    return jax.tree.map(lambda *g: np.mean(g, 0), *(own_gradient(layers, own) for own in x))


def assert_kernels(kernels):
    """Each is the mean of the workers' gradients."""
    for kernel in kernels:
        np.testing.assert_allclose(kernel, means()["kernel"], rtol=2e-5, atol=1e-7)


WAYS = [*itertools.product([True, False], repeat=3)]


@pytest.mark.parametrize(
    ("check_vma", "scanned", "remat"), daily(WAYS, [(True, True, True), (False, False, True)])
)
def test_layers_have_the_exact_mean_with_f32(check_vma, scanned, remat):
    layers, x = inputs()

    def inside(layers, x):
        each = partial(dq.reduce_in_backward, axis_name="data", method=EXACT)
        loss = partial(model, each=each, scanned=scanned)
        return jax.grad(jax.checkpoint(loss) if remat else loss)(layers, x)

    found = mapped(inside, check_vma)(layers, x)
    assert_kernels(found["kernel"])
    np.testing.assert_allclose(found["bias"][1], means()["bias"], rtol=2e-5, atol=1e-7)


def test_in_a_scan_the_collectives_are_inside_the_backward_loop():
    """After `jax.grad` they are outside of any loop."""
    layers, x = inputs()
    collectives = re.compile(r"= \S+ (all-to-all|all-gather|all-reduce)")

    def counts(f):
        text = mapped(f, True).lower(layers, x).compile().as_text()
        bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
        found = [0, 0]
        for block in re.split(r"\n(?=%|ENTRY)", text):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", block.lstrip())
            found[not (name and name[1] in bodies)] += len(collectives.findall(block))
        return found

    each = partial(
        dq.reduce_in_backward, axis_name="data", method=as_compression(METHOD, dq.Direct())
    )
    within, outside = counts(jax.grad(partial(model, each=each)))
    assert within >= 2 and outside == 0

    def after(layers, x):
        own = jax.grad(model)(lax.pcast(layers, "data", to="varying"), x)
        return dq.pmean(own, "data", method=METHOD, topology=dq.Direct())

    within, outside = counts(after)
    assert within == 0 and outside >= 2


def test_leaves_that_have_no_gradient_pass():
    """So do values of those that have one."""
    layers, x = inputs()
    layers |= {"number": jnp.arange(LAYERS), "none": None}

    def inside(layers, x):
        def loss(kernel, bias):
            whole = layers | {"kernel": kernel, "bias": bias}
            passed = dq.reduce_in_backward(whole, "data", method=EXACT)
            assert passed["none"] is None and passed["number"].dtype == jnp.int32
            return model({k: passed[k] for k in ("kernel", "bias")}, x), passed["kernel"]

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(layers["kernel"], layers["bias"])

    (kernels, _), values = mapped(inside, True)(layers, x)
    assert_kernels(kernels)
    assert_same_bits(values[3], layers["kernel"])


@pytest.mark.parametrize("mapping", daily(["vmap", "pmap"], ["vmap"]))
def test_other_maps(mapping):
    layers, x = inputs()
    each = partial(dq.reduce_in_backward, axis_name="data", method=EXACT)
    grad = jax.grad(partial(model, each=each))
    options = {"axis_name": "data", "in_axes": (None, 0)}
    mapped = jax.jit(jax.vmap(grad, **options)) if mapping == "vmap" else jax.pmap(grad, **options)
    assert_kernels(mapped(layers, x)["kernel"])


def test_sharded_over_another_axis_it_reduces_parts():
    """Partial-manual, with an automatic axis: ``specs`` as for `psum`."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layers, x = inputs()
    specs = {"kernel": P(None, "model"), "bias": P()}
    each = partial(dq.reduce_in_backward, axis_name="data", method=EXACT, specs=specs)
    maps = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}

    @partial(jax.shard_map, mesh=mesh, **maps)
    def grad(layers, x):
        return jax.grad(partial(model, each=each, scanned=False))(layers, x.reshape(-1, DIM))

    assert_kernels([jax.jit(grad)(layers, x)["kernel"]])


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
    layers, x = inputs()
    each = partial(dq.reduce_in_backward, axis_name="data", **options)
    with pytest.raises(ValueError, match=complaint):
        mapped(partial(model, each=each), True)(layers, x)  # in the forward pass already


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_there_are_no_second_derivatives(check_vma):
    layers, x = inputs()
    each = partial(dq.reduce_in_backward, axis_name="data", method=EXACT)

    def curvature(layers, x):
        first = jax.grad(partial(model, each=each, scanned=False))
        return jax.grad(lambda w: jnp.sum(first(w, x)["kernel"]))(layers)

    with pytest.raises(NotImplementedError, match="first order only"):
        mapped(curvature, check_vma)(layers, x)


def test_parameters_may_vary_over_some_of_the_axes_already():
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layers, x = inputs()
    each = partial(dq.reduce_in_backward, axis_name=("node", "gpu"), method=EXACT)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(("node", "gpu"))), out_specs=P("gpu"))
    def grad(layers, x):
        layers = lax.pcast(layers, "gpu", to="varying")
        found = jax.grad(partial(model, each=each))(layers, x[0])
        return jax.tree.map(lambda g: g[None], found)

    assert_kernels(jax.jit(grad)(layers, x)["kernel"])


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


def test_a_pytree_that_refuses_none_may_hold_integers():
    layers, x = inputs()

    def inside(kernel, x):
        def loss(kernel):
            passed = dq.reduce_in_backward(Strict(kernel, jnp.int32(3)), "data", method=EXACT)
            return jnp.mean(jnp.tanh(x @ passed.kernel[0]) ** 2)

        return jax.grad(loss)(kernel)

    found = mapped(inside, True)(layers["kernel"], x)
    assert np.all(np.isfinite(found[0])) and np.any(np.asarray(found[0]) != 0)


OUTSIDE = [*itertools.product([False, True], ["inside", "outside"])]


@pytest.mark.parametrize(("in_scan", "averaged"), daily(OUTSIDE, OUTSIDE[1:3]))
def test_a_gradient_from_outside_of_the_map_is_refused_where_it_would_be_too_small(
    in_scan, averaged
):
    params, x = jnp.ones(64), jnp.ones((N, 64))

    def own(params, x):
        def layer(total, _):
            used = dq.reduce_in_backward(params, "data", method=EXACT)
            return total + jnp.mean(used[None] * x), None

        start = jnp.sum(0 * x)
        total = jax.lax.scan(layer, start, None, length=2)[0] if in_scan else layer(start, None)[0]
        return jax.lax.pmean(total, "data") if averaged == "inside" else total[None]

    specs = {"in_specs": (P(), P("data")), "out_specs": P() if averaged == "inside" else P("data")}

    def gradient_of(check_vma):
        mapped = jax.shard_map(own, mesh=auto_mesh(N), check_vma=check_vma, **specs)
        return jax.grad(lambda params: jnp.mean(mapped(params, x)))(params)

    with pytest.raises(ValueError, match="jax.grad outside of jax.shard_map.*inside the map"):
        jax.eval_shape(lambda: gradient_of(True))
    np.testing.assert_allclose(gradient_of(False), 2 / 64 if in_scan else 1 / 64, rtol=1e-6)
