"""Which optimizers `dq.optax.sharded` takes: those that act on every coordinate alone.

`test_sharded_updates` has their results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import daily
from jax import lax
from jax.sharding import PartitionSpec as P
from optax import contrib
from workers import auto_mesh, promoting

import dynamiq_jax as dq
import dynamiq_jax.optax

EXACT = dq.Compression(dq.F32(), min_leaf_size=256, min_bucket_bytes=0, exclude="whole")
PARAMS = {
    "a": jax.ShapeDtypeStruct((64, 8), jnp.float32),
    "b": jax.ShapeDtypeStruct((128, 8), jnp.float32),
    "bias": jax.ShapeDtypeStruct((5,), jnp.float32),
    "whole": jax.ShapeDtypeStruct((64, 8), jnp.float32),  # of the shape of another, not split
}


def sharded(inner):
    return promoting(dq.optax.sharded(inner, "data", compression=EXACT))


def begin(inner, params=PARAMS):
    """The types of the state; nothing is compiled."""
    with jax.set_mesh(auto_mesh()), jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(sharded(inner).init, params)


def stepper(inner, state, check_vma=True, **extra):
    """A function of the parameters, the state and every worker's gradients."""
    specs = dq.optax.state_specs(state)

    def step(params, state, grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        updates, state = sharded(inner).update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    options = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs)}
    return jax.shard_map(step, mesh=auto_mesh(), check_vma=check_vma, **options)


def check(inner, **extra):
    """Traces the first update; nothing is compiled."""
    state = begin(inner)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), PARAMS)
    jax.eval_shape(stepper(inner, state, **extra), PARAMS, state, grads)


def each(function):
    return optax.chain(optax.sgd(0.1), optax.stateless_with_tree_map(lambda g, _: function(g)))


RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
LABELS = dict.fromkeys(PARAMS, "adam") | {"b": "frozen"}
RULES = {"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()}
TAKEN = {
    "adabelief": optax.adabelief(1e-3),
    "adamw, schedule": optax.adamw(RATE, weight_decay=optax.linear_schedule(0.0, 0.1, 10)),
    "clip by value": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "conditional": optax.transforms.conditionally_mask(optax.adam(1e-3), lambda step: step > 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(RATE),
    "lion": optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "multi_transform": optax.multi_transform(RULES, LABELS),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "nadam": optax.nadam(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "sgd, momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "yogi": optax.yogi(1e-3),
    "bits": each(
        lambda g: lax.bitcast_convert_type(
            lax.bitcast_convert_type(g, jnp.uint32) & jnp.uint32(0xFFFF0000), g.dtype
        )
    ),
    "stop_gradient": each(lambda g: lax.optimization_barrier(lax.stop_gradient(g)) / 2),
    "custom rules": each(lambda g: jax.nn.softplus(jax.checkpoint(jax.nn.relu)(g))),
}
REFUSED = {
    "clip by norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        r"'reduce_sum' \(clip_by_global_norm, .*Pass max_norm= ",
    ),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), r"\(apply_if_finite, .*are not finite"),
    "zero_nans": (optax.chain(optax.zero_nans(), optax.sgd(0.1)), "zero_nans.*are not finite"),
    "adafactor": (optax.adafactor(1e-3), "'reduce_sum'.*use dq.optax.all_reduce"),
    "sm3": (optax.sm3(1e-3), r"'add' \(scale_by_sm3, .* split differently"),
    "norm of a muon": (
        optax.chain(contrib.muon(1e-3), optax.clip_by_global_norm(1.0)),
        r"\(scale_by_muon, .*use dq.optax.all_reduce",
    ),
    "lamb": (optax.lamb(1e-3), r"'reduce_sum' \(scale_by_trust_ratio, "),
    "noise": (optax.add_noise(0.1, 0.5, jax.random.key(0)), r"\(add_noise, .*noise depends"),
    "flatten": (optax.flatten(optax.adam(1e-3)), "'reshape'"),
    "array of rates": (
        optax.stateless(lambda g, _: g | {"a": g["a"] * np.ones((64, 8), np.float32)}),
        r"'mul' \(stateless, test_elementwise.py:\d+\) of arrays that are split differently",
    ),
    "swapped": (
        optax.stateless(lambda g, _: g | {"a": g["whole"], "whole": g["a"]}),
        r"result\[0\]\['a'\] is \(64, 8\), not split, .* should be \(64, 8\), split by",
    ),
    "slices for whole": (
        optax.stateless(lambda g, _: g | {"whole": g["a"]}),
        r"result\[0\]\['whole'\] is \(64, 8\), split by .* should be \(64, 8\), split by",
    ),
    "effect": (each(lambda g: (jax.debug.print("now"), g)[1]), "with an effect"),
    "other state": (
        optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, jnp.zeros(()))),
        "returns PyTreeDef.* and must return",
    ),
    # The others gave up to all rows wrong, without an error, when every worker ran them on slices.
    "bits of another width": (
        each(lambda g: lax.bitcast_convert_type(g, jnp.uint8)[..., 0] * 0.5),
        "'bitcast_convert_type'",
    ),
    "padding row": (each(lambda g: g.at[0].set(0.0)), "'scatter'"),
    "first rows": (each(lambda g: g.at[:5].multiply(0.0)), "'scatter-mul'"),
    "update of a slice": (
        each(lambda g: lax.dynamic_update_slice(g, jnp.zeros((1,) * g.ndim), (0,) * g.ndim)),
        "'dynamic_update_slice'",
    ),
    "iota mask": (
        each(lambda g: jnp.where(lax.broadcasted_iota(jnp.int32, g.shape, 0) < 5, 0.0, g)),
        "'select_n'.* split differently",
    ),
    "minus the first row": (each(lambda g: g - g[:1]), "'slice'"),
    "rev": (each(lambda g: g[::-1]), "'rev'"),
    "concatenate": (each(lambda g: jnp.concatenate([g, g])[: len(g)]), "'concatenate'"),
    "cumsum": (each(lambda g: jnp.cumsum(g, 0)), "'cumsum'"),
    "transpose": (each(lambda g: g.T.reshape(g.shape)), "'transpose'"),
    "map over rows": (each(lambda g: lax.map(lambda row: row / (1 + row.ravel()[0]), g)), "'scan'"),
}


@pytest.mark.parametrize(
    "name",
    daily(
        TAKEN,
        [
            "adamw, schedule",
            "custom rules",
            "multi_transform",
            "MultiSteps",
            "bits",
            "stop_gradient",
        ],
    ),
)
def test_an_elementwise_optimizer_is_taken(name):
    check(TAKEN[name])


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_mixes_coordinates_or_depends_on_their_place_is_refused(name):
    inner, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        check(inner)


def test_an_optimizer_may_take_extra_arguments():
    loss = {"value": jnp.float32(1.0)}
    taken = optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau())
    check(taken, **loss)
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        check(taken)
    with pytest.raises(ValueError, match=r"'\w+' \(scale_by_polyak, .* of an array \(64, 8\)"):
        check(optax.polyak_sgd(), **loss)


def test_init_inside_a_map_gives_slices_of_the_state_outside():
    """Leaves are uniform (an initial accumulator), sliced (with sizes of the whole), and whole."""

    def kept(params):
        return jax.tree.map(lambda x: x + x.size, params), params["whole"][::2]

    kept = optax.GradientTransformation(kept, lambda g, s, p=None: (g, s))
    optimizer = sharded(optax.chain(optax.adagrad(0.1, initial_accumulator_value=0.25), kept))
    params = jax.tree.map(lambda x: jnp.arange(float(np.prod(x.shape))).reshape(x.shape), PARAMS)
    outside = dq.optax.init(optimizer, params, auto_mesh())
    specs = dq.optax.state_specs(outside)
    mapped = jax.shard_map(optimizer.init, mesh=auto_mesh(), in_specs=P(), out_specs=specs)
    inside = jax.jit(mapped)(params)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)
    assert inside.splits == outside.splits
