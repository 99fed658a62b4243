"""Promises of all comparators alike: memories, bias, devices, axes, derivatives, refusals.

`test_every_method` has trees, wire bits and keys of all rows, `test_nonfinite` what is not finite
and extreme magnitudes; a method's own file compares it with its definition in numpy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    EVERY_METHOD,
    LOOP,
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    bias,
    first_state,
    relative_error,
    small,
    stepper,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.request.compression import as_compression

KEY = jax.random.key(1)
of = dq.comparators
THC = functools.partial(of.THC, piece_size=1024)
OmniReduce = functools.partial(of.OmniReduce, block_size=64)


def memory(method):
    return small(dq.ErrorFeedback(method))


NATIVE = {
    "thc": small(THC()),
    "thc, two-shot": small(THC(form="two-shot")),
    "thc, memory": memory(THC(bits=2)),
    "thc, two-shot, memory": memory(THC(bits=3, form="two-shot")),
    "thc, saturating, memory": memory(
        THC(bits=3, sum_bits=4, form="two-shot", table=False, saturate=True)
    ),
    "omnireduce": small(OmniReduce()),
    "omnireduce, union": small(OmniReduce(select="union")),
    "omnireduce, memory": memory(OmniReduce(density=0.3)),
    "omnireduce, union, memory": memory(OmniReduce(density=0.3, select="union")),
    "clt-k": small(of.CLTK(chunk_size=64, density=0.5)),
    "clt-k, memory": memory(of.CLTK(chunk_size=64, density=0.3)),
    "sidco, memory": memory(of.SIDCo(block_size=64, density=0.3)),
    "powersgd": small(of.PowerSGD(rank=5)),
    "powersgd, memory": memory(of.PowerSGD(rank=5)),
    "powersgd, memory, f32": memory(of.PowerSGD(rank=5, wire="f32")),
    "arc top-k": small(of.ARCTopK(density=0.5)),
    "arc top-k, memory": memory(of.ARCTopK(density=0.5, rank=6)),
    "perm-k": small(of.PermK()),
}
"""Methods with collectives of their own."""
OVER_TOPOLOGIES = {
    "mxfp8, shared": small(of.MXFP8(sum="shared-scale")),
    "mxfp6": small(of.MXFP6(rounding="stochastic")),
    "mxfp4, memory": memory(of.MXFP4()),
    "minmax, memory": memory(of.MinMax()),
    "qsgd": small(of.GlobalQSGD(piece_size=128)),
    "marsit": small(of.Marsit(period=None, block_size=256)),
}
METHODS = NATIVE | OVER_TOPOLOGIES
WITH_STATE = [name for name in METHODS if METHODS[name].method.needs_state]
MEMORY = [name for name in METHODS if "memory" in name]
MATRICES = ("powersgd", "arc top-k")


def route(name):
    return None if name in NATIVE else LOOP


def draw(seed, n, name="", size=3000):
    """Blocks of 64 of very different magnitude, distinct on each worker; matrices if need be."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(rng.standard_normal(size // 64 + 1)), 64)[:size]
    x = jnp.asarray(rng.standard_normal((n, size)) * scale, jnp.float32)
    return x.reshape(n, 50, -1) if name.startswith(MATRICES) else x


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("mean", [False, True])
def test_what_is_not_delivered_is_in_memory(name, mean):
    """Delivered and remembered make up the inputs; averages of many steps are accurate."""
    n, steps, method = 4, 12, METHODS[name]
    x = draw(2, n, name)
    factor, exact = n if mean else 1, total_of(x)
    state = first_state(method, x, n, route(name))
    run = stepper(method, route(name), mean=mean)
    once, sizes = [], 0.0
    for _ in range(steps):
        sizes = sizes + np.sum(np.abs(x + state[0].residual.reshape(x.shape)), axis=0)
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        once.append(factor * np.asarray(result[0], np.float64))
    assert run._cache_size() == 1
    # All that is lost is rounding: of n - 1 sums to bf16, or of f32 arithmetic, relative to norms.
    in_f32 = name.startswith(("thc", "mxfp4", "minmax")) or "f32" in name
    bound = 3e-6 * np.max(sizes) if in_f32 else (n - 1) * 2.0**-9 * sizes
    bound = np.max(bound) if name.startswith("powersgd") else bound  # of factors of the matrix
    left = total_of(state[0].residual).reshape(exact.shape)
    gap = sum(once) + left - steps * exact
    assert np.all(np.abs(gap) <= bound + 1e-5)
    assert np.mean(once[0] != once[1]) > 0.2
    assert relative_error(sum(once) / steps, exact) < relative_error(once[0], exact) / 2


UNBIASED = {
    "mxfp8": (of.MXFP8(rounding="stochastic"), LOOP),
    "mxfp6": (of.MXFP6(rounding="stochastic"), LOOP),
    "mxfp4": (of.MXFP4(rounding="stochastic"), LOOP),
    "mxfp4, shared": (of.MXFP4(rounding="stochastic", sum="shared-scale"), LOOP),
    "minmax": (of.MinMax(), LOOP),
    "minmax, direct": (of.MinMax(bits=2), dq.Direct()),
    "qsgd": (of.GlobalQSGD(piece_size=128), LOOP),
    "qsgd, exponential": (of.GlobalQSGD(levels="exponential", piece_size=256), dq.Direct()),
    "thc": (of.THC(p=1e-9, table=False, piece_size=512), None),
    "thc, two-shot": (of.THC(p=1e-9, table=False, form="two-shot", piece_size=512), None),
    "perm-k": (of.PermK(), None),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_rounding_at_random_is_unbiased(name):
    """See `cases.Bias`: a bias of 2% of a step scores 5 or more in blocks of 128 coordinates.

    Blocks of 32 begin with 1, the largest value, so that no sum of up to 4 saturates. `MinMax`'s
    shift is one number for a bucket, and `test_minmax` has it.
    """
    method, topology = UNBIASED[name]
    n, size, samples = 4, 8 * 128, 400
    x = np.random.default_rng(7).uniform(-0.9, 0.9, (n, size)).astype(np.float32)
    x[:, ::32] = 1
    exact = total_of(x)
    run = stepper(small(method), topology)
    state = first_state(small(method), x, n, topology)
    total, squared = np.zeros((2, size))
    for key in jax.random.split(jax.random.key(8), samples):
        error = np.asarray(run(x, key, state)[0][0], np.float64) - exact
        total, squared = total + error, squared + error**2
    found = bias(total, squared, samples, exact, blocks=8)
    assert found.worst_score() < 5
    assert abs(np.mean(found.spread) - 1) < 0.25


@pytest.mark.parametrize("name", METHODS)
def test_devices_compute_what_vmap_does(name):
    """Three steps in one program with check_vma=True, as in a training loop.

    XLA sums bf16 in f32 on devices of a CPU, and `vmap` does in bf16.
    """
    n, method = 2, METHODS[name]
    x = draw(4, n, name)

    def steps(x):
        x = x[0]
        axis = Axis(("data",))
        state = axis.to_varying(as_compression(method, route(name)).init_state(x, n))
        options = {"op": "sum", "method": method, "topology": route(name), "key": KEY}

        def step(state, _):
            total, state, _ = dq.reduce(x, "data", state=state, **options)
            return axis.to_varying(state), total

        return lax.scan(step, state, length=3)[1]

    mapped = jax.shard_map(steps, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P())
    found = jax.jit(mapped)(x)
    state = first_state(method, x, n, route(name))
    for i in range(3):
        expected, state = stepper(method, route(name))(x, KEY, state)
        assert relative_error(found[i], expected[0]) < 1e-4


@pytest.mark.parametrize("name", [name for name in WITH_STATE if name in NATIVE])
def test_several_axes_count_as_one(name):
    method, x = METHODS[name], draw(1, 6, name)
    state = first_state(method, x, 6)

    def one(x, key, state):
        return dq.reduce(x, ("a", "b"), op="sum", method=method, key=key, state=state)[:2]

    run = jax.vmap(one, in_axes=(0, None, 0), axis_name="b")
    run = jax.jit(jax.vmap(run, in_axes=(0, None, 0), axis_name="a"))
    split, merge = (lambda v: v.reshape(2, 3, *v.shape[1:])), (lambda v: v.reshape(6, *v.shape[2:]))
    found = jax.tree.map(merge, run(split(x), KEY, jax.tree.map(split, state)))
    expected = stepper(method)(x, KEY, state)
    assert_replicas_equal(found[0])
    if "thc" in name:
        assert_same_bits(*(jax.tree.map(np.asarray, tree) for tree in (found, expected)))
    else:  # bf16 sums depend on their order
        assert relative_error(found[0], expected[0]) < 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_the_derivative_is_the_exact_sum_and_that_of_the_next_state_is_zero(name):
    n, method = 2, METHODS[name]
    x, t = draw(5, n, name), draw(6, n, name)

    def one(x, t, state):
        def total(x):
            options = {"method": method, "topology": route(name), "state": state}
            return dq.reduce(x, "data", op="sum", **options)[:2]

        return jax.jvp(total, (x,), (t,))[1]

    run = jax.jit(jax.vmap(one, axis_name="data"))
    tangent, states = run(x, t, first_state(method, x, n, route(name)))
    np.testing.assert_allclose(tangent[0], total_of(t), rtol=1e-5, atol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states) if leaf.dtype == jnp.float32)


@pytest.mark.parametrize("name", NATIVE)
def test_topologies_and_missing_states_are_refused(name):
    method, x = METHODS[name], jnp.zeros((2, 40, 60))

    def run(**options):
        reduce = functools.partial(dq.psum, axis_name="data", method=method, **options)
        return jax.eval_shape(jax.vmap(reduce, axis_name="data"), x)

    with pytest.raises(NotImplementedError, match=r"topology=Ring\(.*leave topology=None"):
        run(topology=dq.Ring())
    if method.method.needs_state:
        with pytest.raises(ValueError, match="needs a state"):
            run()
    else:
        assert run().shape == x.shape


def test_every_comparator_is_here():
    classes = {type(getattr(row.method, "method", row)) for row in METHODS.values()}
    classes |= {type(METHODS[name].method.method) for name in MEMORY}
    classes |= {type(row.method.method) for row in EVERY_METHOD.values()}
    assert {
        getattr(of, name) for name in of.__all__ if isinstance(getattr(of, name), type)
    } <= classes
