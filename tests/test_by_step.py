"""Methods by step: which, when, and how often they compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, assert_same_bits, auto_mesh, compilations, gradient
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax

N = 8
MX = dq.MXFP8(sum="shared-scale", **SMALL)
SCHEDULE = dq.by_step({4: MX, 0: dq.BF16(), 2: dq.MXFP4(**SMALL)})
DIRECT = {"topology": dq.Direct()}


def test_a_setting_holds_from_its_step_to_the_next():
    found = [SCHEDULE(step) for step in range(7)]
    assert found == [dq.BF16()] * 2 + [dq.MXFP4(**SMALL)] * 2 + [MX] * 3
    assert SCHEDULE(np.int64(3)) == dq.MXFP4(**SMALL)
    assert dq.by_step({0: None})(10**6) is None
    assert hash(SCHEDULE) == hash(dq.by_step(dict(SCHEDULE.settings)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"from steps \[\]"),
        ({5: dq.BF16()}, r"from steps \[5\]; pass ints of which the first is 0"),
        ({-1: dq.BF16(), 0: None}, r"from steps \[-1, 0\]"),
        ({0: dq.BF16(), 1.5: None}, r"from steps \[0, 1.5\]"),
        ({0: "bf16"}, "method='bf16' is not a method"),
    ],
)
def test_by_step_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        dq.by_step(settings)


def test_steps_are_refused_that_are_negative_or_traced():
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        SCHEDULE(-1)
    for step in (2.0, "2"):
        with pytest.raises(ValueError, match="asked outside of jax.jit, with an int"):
            SCHEDULE(step)
    with pytest.raises(ValueError, match="as a static argument"):
        jax.jit(lambda step: SCHEDULE(step) and step)(1)


def test_every_setting_compiles_once_and_memory_waits_for_its_method():
    """bf16 and MXFP4 keep no memory: the scale of MXFP8 starts at step 4, and moves then."""
    mesh, grads = auto_mesh(), gradient(0, N, 4096)
    optimizer = dq.optax.all_reduce("data", method=MX, **DIRECT)
    state = dq.optax.init(optimizer, jnp.zeros(4096), mesh)
    specs = dq.optax.state_specs(state)

    @functools.partial(jax.jit, static_argnames="method")
    def step(grads, state, method):
        def local(grads, state):
            return optimizer.update(grads[0], state, method=method)

        in_specs = P("data"), specs
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(P(), specs))(
            grads, state
        )

    grads = jax.device_put(grads, NamedSharding(mesh, P("data")))
    first = state.memory
    with compilations() as compiled:
        for number in range(7):
            mean, state = step(grads, state, SCHEDULE(number))
            if number < 4:
                assert_same_bits(state.memory, first)
            expected = reduced(mesh, grads, SCHEDULE(number)) if number < 4 else mean
            assert_same_bits(mean, expected)
        assert step._cache_size() == 3
    assert len(compiled) == 3 + 2  # and those that are compared with
    assert int(state.step) == 7
    assert float(state.memory.value[0].mu[0]) != float(first.value[0].mu[0])


@functools.partial(jax.jit, static_argnums=(0, 2))
def reduced(mesh, grads, method):
    def local(grads):
        return dq.pmean(grads[0], "data", method=method, **DIRECT)

    return jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())(grads)


def test_the_memory_of_one_method_serves_other_bits():
    tree = {"w": jax.ShapeDtypeStruct((2**19,), jnp.float32)}
    shapes = [
        jax.eval_shape(
            lambda b=bits: dq.init_state(tree, N, method=dq.DynamiQ(bits=b, error_feedback=True))
        )
        for bits in (3, 5, 8)
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert jax.tree.leaves(shapes[0])
