"""THC, OmniReduce, CLTK and SIDCo share native collectives and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    auto_mesh,
    first_state,
    low,
    relative_error,
    stepper,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

THC = functools.partial(dq.comparators.THC, piece_size=1024)
CLTK = functools.partial(dq.comparators.CLTK, chunk_size=64)
OmniReduce = functools.partial(dq.comparators.OmniReduce, block_size=64)
MEMORIES = {
    "thc, memory": THC(bits=2),
    "thc, two-shot, memory": THC(bits=3, form="two-shot"),
    "thc, saturating, memory": THC(bits=3, sum_bits=4, form="two-shot", table=False, saturate=True),
    "omnireduce, memory": OmniReduce(density=0.3),
    "omnireduce, union, memory": OmniReduce(density=0.3, select="union"),
    "clt-k, memory": CLTK(density=0.3),
    "sidco, memory": dq.comparators.SIDCo(block_size=64, density=0.3),
}
METHODS = {
    "thc": low(THC()),
    "thc, two-shot": low(THC(form="two-shot")),
    "omnireduce": low(OmniReduce()),
    "omnireduce, union": low(OmniReduce(select="union")),
    "clt-k": low(CLTK(density=0.5)),
} | {name: low(dq.ErrorFeedback(method)) for name, method in MEMORIES.items()}
SOME = ["thc", "thc, two-shot, memory", "omnireduce", "omnireduce, union, memory"]
SOME += ["clt-k", "clt-k, memory", "sidco, memory"]
WITH_STATE = [name for name in SOME if METHODS[name].method.needs_state]
MEMORY = list(MEMORIES)
KEY = jax.random.key(1)


def draw(seed, n, shape=(3000,), dtype="float32"):
    """Blocks of 64 of very different magnitude, distinct on each worker."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    x = (
        rng.standard_normal((n, size))
        * np.repeat(np.exp(rng.standard_normal(size // 64 + 1)), 64)[:size]
    )
    return jnp.asarray(10 * x if dtype == "int32" else x, dtype).reshape(n, *shape)


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@pytest.mark.parametrize("name", WITH_STATE)
def test_several_axes_count_as_one(name):
    method, x = METHODS[name], draw(1, 6)
    state = first_state(method, x, 6)

    def one(x, key, state):
        return dq.reduce(x, ("a", "b"), op="sum", method=method, key=key, state=state)[:2]

    run = jax.vmap(one, in_axes=(0, None, 0), axis_name="b")
    run = jax.jit(jax.vmap(run, in_axes=(0, None, 0), axis_name="a"))
    split, merge = (lambda v: v.reshape(2, 3, *v.shape[1:])), (lambda v: v.reshape(6, *v.shape[2:]))
    found = jax.tree.map(merge, run(split(x), KEY, jax.tree.map(split, state)))
    expected = stepper(method)(x, KEY, state)
    if "thc" in name:
        assert_same_bits(*(jax.tree.map(np.asarray, tree) for tree in (found, expected)))
    else:  # bf16 sums depend on their order
        assert_replicas_equal(found[0])
        np.testing.assert_array_equal(found[0] == 0, expected[0] == 0)
        np.testing.assert_allclose(found[0], expected[0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("name", "mean"), [(name, False) for name in MEMORY] + [(name, True) for name in MEMORY[::2]]
)
def test_what_is_not_delivered_is_in_memory(name, mean):
    """Delivered and remembered make up the inputs; averages of many steps are accurate."""
    n, steps, method = 4, 12, METHODS[name]
    x = draw(2, n)
    factor, exact = n if mean else 1, total_of(x)
    state, run = first_state(method, x, n), stepper(method, mean=mean)
    once, sizes = [], 0.0
    for _ in range(steps):
        sizes = sizes + np.sum(np.abs(x + state[0].residual), axis=0)
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        once.append(factor * np.asarray(result[0], np.float64))
    assert run._cache_size() == 1
    # All that is lost is rounding: of n - 1 sums to bf16, or of rotations, relative to norms.
    bound = (n - 1) * 2.0**-9 * sizes if "thc" not in name else 1e-6 * np.max(sizes)
    gap = sum(once) + total_of(state[0].residual) - steps * exact
    assert np.all(np.abs(gap) <= bound + 1e-5)
    assert np.mean(once[0] != once[1]) > 0.2
    assert relative_error(sum(once) / steps, exact) < relative_error(once[0], exact) / 4


@pytest.mark.parametrize("name", WITH_STATE)
def test_states_travel_through_shard_map_and_scan(name):
    """Three steps in one program with check_vma=True, as in a training loop; as in vmap."""
    n, method = 2, METHODS[name]
    x = draw(4, n)

    def steps(x):
        x = x[0]
        state = lax.pcast(as_compression(method).init_state(x, n), "data", to="varying")

        def step(state, _):
            options = {"op": "sum", "method": method, "key": KEY}
            total, state, _ = dq.reduce(x, "data", state=state, **options)
            return state, total

        return lax.scan(step, state, length=3)[1]

    mapped = jax.shard_map(steps, mesh=auto_mesh(n), in_specs=P("data"), out_specs=P())
    found = jax.jit(mapped)(x)
    state = first_state(method, x, n)
    for i in range(3):
        expected, state = stepper(method)(x, KEY, state)
        np.testing.assert_allclose(found[i], expected[0], rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_differentiates_as_psum_does(name):
    """The derivative is the exact sum; that of the next state is zero."""
    n, method = 2, METHODS[name]
    x, t = draw(5, n), draw(6, n)

    def one(x, t, state):
        def total(x):
            return dq.reduce(x, "data", op="sum", method=method, state=state)[:2]

        return jax.jvp(total, (x,), (t,))[1]

    run = jax.jit(jax.vmap(one, axis_name="data"))
    tangent, states = run(x, t, first_state(method, x, n))
    np.testing.assert_allclose(tangent[0], total_of(t), rtol=1e-5, atol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states) if leaf.dtype == jnp.float32)


@pytest.mark.parametrize("name", METHODS)
def test_topologies_and_missing_states_are_refused(name):
    method, x = METHODS[name], jnp.zeros((2, 2048))

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
