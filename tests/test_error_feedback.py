"""Error feedback around methods: what is delivered, what is remembered, and what is refused.

`test_every_method` and `test_nonfinite` have rows of it; here is what memories promise.
"""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close, assert_same_bits, relative_error
from cases import LOOP, daily, first_state, over, small, stepper
from workers import gradient

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.methods import error_feedback

KEY = jax.random.key(3)
SIZE = 3011
KINDS = ("ef14", "ef21", "ef21m", "econtrol")
DIRECT, BUTTERFLY = dq.Direct(), dq.Butterfly(balance=0.0)
METHODS = {
    "dynamiq": (dq.DynamiQ(bits=5), LOOP),
    "dynamiq, direct": (dq.DynamiQ(bits=4, dither=True), DIRECT),
    "minmax": (dq.contrib.MinMax(), DIRECT),
    "minmax, ring": (dq.contrib.MinMax(bits=6), dq.Ring(streams=2)),
    "mxfp4": (dq.contrib.MXFP4(), BUTTERFLY),
    "qsgd": (dq.contrib.GlobalQSGD(piece_size=128), dq.Direct(transport="permutes")),
    "bf16": (dq.BF16(), LOOP),
    "thc": (dq.contrib.THC(piece_size=512), None),
}  # fmt: skip
"""Methods whose sums lose nothing that their encoders do not know, each over one topology."""
WORKERS = dict(zip(METHODS, (4, 3, 5, 7, 8, 4, 3, 4), strict=True))


def feedback(method, **options):
    """`dq.ErrorFeedback` around a method, for leaves of any size."""
    return small(dq.ErrorFeedback(method, **options))


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@functools.cache
def gradients(n, steps):
    """f32[steps, n, SIZE]: every step's, with a part that all steps share."""
    lasting = np.asarray(gradient(11, n, SIZE))
    return np.stack([lasting + 0.3 * np.asarray(gradient(seed, n, SIZE)) for seed in range(steps)])


def run(method, topology, x, check=lambda step, found, before, after: None):
    """Results f64[steps, SIZE] of x [steps, n, SIZE], and the last state."""
    n = x.shape[1]
    step_of = stepper(method, topology)
    state = first_state(method, x[0], n, topology)
    results, before = [], step_of._cache_size()
    for i, own in enumerate(x):
        found, after = step_of(own, jax.random.fold_in(KEY, i), state)
        assert_same_bits(found, np.broadcast_to(found[:1], found.shape))
        check(i, np.asarray(found[0], np.float64), state[0], after[0])
        results.append(np.asarray(found[0], np.float64))
        state = after
    assert step_of._cache_size() <= before + 1  # one program for all steps
    return np.stack(results), state[0]


LAWS = {
    "ef14": [*list(METHODS)[::2], "thc"],
    "ef21": list(METHODS)[::3],
    "econtrol": ["dynamiq", *list(METHODS)[1::2]],
}
EVERY_DAY = [("ef14", "dynamiq"), ("ef21", "minmax, ring"), ("econtrol", "minmax, ring")]
"""Kinds see of a method no more than its losses, which DynamiQ tells once."""


@pytest.mark.parametrize(
    ("kind", "name"), daily([(kind, name) for kind in LAWS for name in LAWS[kind]], EVERY_DAY)
)
def test_delivered_and_remembered_make_up_the_inputs(kind, name):
    """And a running total is what workers sent, in every step.

    Gradients of "econtrol" change. Of one gradient averages of "ef14" get exact as one over steps
    squared, and errors of "ef21" shrink with every step.
    """
    (method, topology), n = METHODS[name], WORKERS[name]
    x = gradients(n, 6) if kind == "econtrol" else np.broadcast_to(gradients(n, 1), (6, n, SIZE))
    exact = total_of(x[0])
    size, errors = np.abs(exact).max(), []

    def check(step, found, before, after):
        errors.append(relative_error(found, exact))
        if kind != "ef14":
            np.testing.assert_array_equal(found.astype(np.float32), after.total[0])
            assert np.abs(found - total_of(after.sent)).max() < 4e-6 * size

    results, state = run(feedback(method, kind=kind), topology, x, check)
    if kind == "ef21":
        assert errors[1] < errors[0] / 3
        assert errors[-1] < max(errors[0] / 300, 1e-13)
        return
    gap = results.sum(axis=0) + total_of(state.residual) - total_of(x.reshape(-1, SIZE))
    assert np.abs(gap).max() < (6e-6 if kind == "ef14" else 3e-5) * size
    assert all(np.any(leaf) for leaf in (state.residual, state.sent) if leaf is not None)
    if kind == "ef14":
        assert relative_error(results.mean(axis=0), exact) < errors[0] / 8


def test_every_bucket_has_a_memory_of_its_own():
    """Nothing that one bucket loses reaches another of the same size."""
    method = feedback(dq.contrib.MXFP4())
    tree = {"lossy": gradient(0, 3, SIZE), "zeros": np.zeros((3, SIZE), np.float32)}
    own = jax.tree.map(lambda x: x[0], tree)
    request = dataclasses.replace(method, bucket_bytes=0, topology=DIRECT)
    state = request.init_state(own, 3, stacked=True)
    reduce = functools.partial(dq.reduce, axis_name="data", compression=request)
    step = jax.jit(jax.vmap(lambda x, state: reduce(x, state=state), axis_name="data"))
    for _ in range(2):
        found, state, _ = step(tree, state)
        assert [bool(np.any(bucket.residual)) for bucket in state] == [True, False]
        assert not np.any(found["zeros"])


def test_econtrol_sends_a_tenth_of_the_residual():
    """Without loss the result is the sum of g + eta e, and e becomes (1 - eta) e."""
    x, method = gradients(3, 2), feedback(dq.F32(), kind="econtrol")
    (fresh,) = first_state(method, x[0], 3, DIRECT)
    found, state = stepper(method, DIRECT)(x[0], KEY, (fresh._replace(residual=x[1]),))
    np.testing.assert_allclose(found[0], total_of(x[0] + 0.1 * x[1]), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(state[0].residual, 0.9 * x[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_reduced_where_jax_promotes_strictly(kind):
    """All tests promote strictly."""
    method, x = feedback(dq.BF16(), kind=kind), jnp.zeros((2, SIZE), jnp.bfloat16)
    state = first_state(method, x, 2, DIRECT)
    found, after = jax.eval_shape(stepper(method, DIRECT).on_devices, x, KEY, state)
    assert found.dtype == x.dtype
    assert [s.dtype for s in jax.tree.leaves(after)] == [s.dtype for s in jax.tree.leaves(state)]


def test_the_momentum_is_what_ef21m_sends():
    """v begins with the first gradient; then (1 - eta) v + eta g. Without loss the result is v."""
    x = gradients(3, 5)
    v = [x[0]]
    for own in x[1:]:
        v.append(0.9 * v[-1] + 0.1 * own)

    def check(step, found, before, after):
        np.testing.assert_allclose(after.momentum, v[step], rtol=1e-5, atol=1e-5)
        assert np.all(np.asarray(after.started))
        errors.append(relative_error(found, total_of(v[step])))

    for method, most in ((dq.F32(), 1e-11), (dq.contrib.MXFP4(), 0.06)):
        errors: list[float] = []
        run(feedback(method, kind="ef21m"), DIRECT, x, check)
        assert max(errors) < most


@pytest.mark.release
def test_momentum_waits_for_a_step_in_which_all_is_finite():
    x, seen = gradients(3, 3).copy(), []
    x[0, 1, 700] = np.inf
    method = feedback(dq.contrib.MXFP8(), kind="ef21m")
    run(method, DIRECT, x, lambda step, found, before, after: seen.append(after))
    assert [bool(np.all(state.started)) for state in seen] == [False, True, True]
    first, *v = (state.momentum for state in seen)
    np.testing.assert_array_equal(first[:, np.arange(SIZE) // 32 == 700 // 32], 0)
    assert_close(v, [x[1], 0.9 * x[1] + 0.1 * x[2]], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", daily(["minmax", "bf16", "thc"], ["bf16"]))
def test_bad_blocks_leave_every_memory_as_it_was(name, kind):
    """And no others; what comes after is as good as before."""
    (method, topology), n = METHODS[name], 3
    x, reach = gradients(n, 4).copy(), {"minmax": 128, "bf16": 1, "thc": 512}[name]
    x[2, 1, 1234], x[2, 0, -1] = np.nan, -np.inf
    blocks = np.arange(SIZE) // reach
    sick = np.isin(blocks, blocks[[1234, -1]])

    def check(step, found, before, after):
        np.testing.assert_array_equal(np.isfinite(found), ~sick if step == 2 else True)
        for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            assert np.all(np.isfinite(new))
            if step == 2 and old.ndim == 2:
                np.testing.assert_array_equal(new[:, sick], old[:, sick])
                assert np.mean(np.asarray(new != old)[:, ~sick]) > 0.5

    results, state = run(feedback(method, kind=kind), topology, x, check)
    if kind in ("ef21", "econtrol"):
        assert relative_error(results[3], total_of(x[3])) < 0.2


def test_the_bytes_of_a_state():
    """The docstring says them. No array is there twice, so that a state can be donated."""
    method = dq.contrib.THC(piece_size=512)
    for kind, each in zip(KINDS, (4, 8, 12, 12), strict=True):
        state = as_compression(feedback(method, kind=kind)).init_state(jnp.zeros(SIZE), 4)
        assert isinstance(state[0], error_feedback.ErrorFeedbackState)
        assert_same_bits(state[0].inner, method.init(SIZE, 4))
        leaves = jax.tree.leaves(state[0]._replace(inner=()))
        assert sum(leaf.nbytes for leaf in leaves) == each * SIZE + (kind == "ef21m")
        assert not any(np.any(leaf) for leaf in leaves)
        assert len({id(leaf) for leaf in leaves}) == len(leaves)


def test_what_makes_no_sense_is_refused():
    alone = dq.contrib.MinMax()
    memory = "keeps a memory of gradients itself.* pass it to dq.reduce"
    for method, message in (
        (dq.ErrorFeedback(alone), memory),
        (dq.contrib.Marsit(), memory),
        (dq.contrib.PermK(), "does not tell what its encodings lose.*TellsLosses"),
        ("minmax", r"'minmax' is not a method; pass .*dq\.ErrorFeedback\(dq\."),
        (dq.contrib.MinMax, "is not a method"),
        (lambda path, leaf: alone, "to choose by path a function that returns"),
    ):
        with pytest.raises(ValueError, match=message):
            dq.ErrorFeedback(method)


def test_without_state_and_in_halves_it_is_refused():
    method, x = feedback(dq.contrib.MinMax()), jnp.ones((2, 8192))
    thc = over(dq.Ring(), feedback(dq.contrib.THC()))
    scatter = functools.partial(dq.psum_scatter, tiled=True)
    for error, words, collective, own in (
        (ValueError, r"needs a state.*init_state", dq.psum, method),
        (NotImplementedError, "does not do psum_scatter", scatter, method),
        (NotImplementedError, r"topology=Ring\(.*leave topology=None", dq.psum, thc),
    ):
        call = functools.partial(collective, axis_name="data", compression=own)
        with pytest.raises(error, match=words):
            jax.eval_shape(jax.vmap(call, axis_name="data"), x)


F16 = {
    "ef14": feedback(dq.contrib.MXFP8()), "ef21": feedback(dq.contrib.MXFP8(), kind="ef21"),
    "arc": feedback(dq.contrib.ARCTopK()), "clt": feedback(dq.contrib.CLTK()),
    "omnireduce": feedback(dq.contrib.OmniReduce(density=1)),
    "sidco": feedback(dq.contrib.SIDCo()), "powersgd": feedback(dq.contrib.PowerSGD()),
}  # fmt: skip


@pytest.mark.parametrize("name", daily(F16, ["ef14", "ef21"]))
def test_what_f16_has_no_room_for_is_forgotten(name):
    """A loss scale that is too large makes infinities, and its step is skipped."""
    method = F16[name]
    large = jnp.full((4, 64, 128), 30000, jnp.float16)
    usual = jnp.full((4, 64, 128), 1, jnp.float16)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="data")
    def step(x, state):
        found = dq.reduce(x, "data", op="sum", key=KEY, compression=method, state=state)
        return found.tree, found.state

    first = as_compression(method).init_state(usual[0], 4, stacked=True)
    overflown, state = step(large, first)
    assert not np.all(np.isfinite(overflown))
    residuals = [x for x in jax.tree.leaves(state) if x.ndim > 1 and x.shape[1] == 64 * 128]
    assert residuals and {x.dtype for x in residuals} == {jnp.dtype(jnp.float32)}
    for x in residuals:
        np.testing.assert_array_equal(x, np.zeros_like(x))
    again, _ = step(usual, state)
    assert np.max(np.abs(np.asarray(again, np.float32))) < 8


@pytest.mark.release
def test_a_hierarchy_remembers_what_its_outer_reduction_loses():
    x = gradients(4, 1)[0]
    method, topology = (feedback(dq.contrib.MXFP4()), dq.Hierarchical(outer=DIRECT))
    own = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    first = over(topology, method).init_state(own, (2, 2))
    state = jax.tree.map(lambda s: jnp.broadcast_to(s, (2, 2, *s.shape)), first)

    def one(x, state):
        options = {"op": "sum", "compression": over(topology, method), "key": KEY}
        return dq.reduce(x, ("a", "b"), state=state, **options)[:2]

    step = jax.jit(jax.vmap(jax.vmap(one, axis_name="b"), axis_name="a"))
    exact, found = total_of(x), []
    for _ in range(6):
        total, state = step(x.reshape(2, 2, SIZE), state)
        assert_same_bits(total, np.broadcast_to(total[:1, :1], total.shape))
        found.append(np.asarray(total[0, 0], np.float64))
    least = max(relative_error(found[0], exact) / 8, 2e-5)  # the inner sums are bf16's, 2^-9
    assert relative_error(np.mean(found, axis=0), exact) < least


def test_explain_says_what_the_method_within_may_err():
    tree = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    alone = dq.DynamiQ(bits=3)
    options = {"verbose": False}
    ours, theirs = (
        dq.explain(tree, 8, compression=small(method, topology=DIRECT), **options)
        for method in (dq.ErrorFeedback(alone), alone)
    )
    assert ours.relative_error == theirs.relative_error > 0.35
    assert ours.advice == theirs.advice and "pass bits=" in ours.advice


def test_memories_that_grow_are_warned_of_with_the_number():
    """The memory's energy grows by what is lost; below 1 it stays."""
    x = jax.ShapeDtypeStruct((4, 300_000), jnp.float32)
    grows = r"Ring among 4 workers loses about 1\.5 times .* from 1 on the memory .* pass more bits"

    def trace(bits, topology):
        method = small(dq.ErrorFeedback(dq.DynamiQ(bits=bits)), topology=topology)
        state = method.init_state(jax.ShapeDtypeStruct((300_000,), jnp.float32), 4)
        one = jax.vmap(
            lambda x: dq.reduce(x, "data", compression=method, state=state).tree, axis_name="data"
        )
        jax.eval_shape(one, x)
        return (
            dq.explain(x.update(shape=(300_000,)), 4, compression=method, verbose=False).advice
            or ""
        )

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert re.search(grows, trace(3, dq.Ring()))
        assert any(re.search(grows, str(warning.message)) for warning in found)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert "the memory" not in trace(3, dq.Direct())  # loses .8
        assert not any("the memory" in str(warning.message) for warning in found)
    assert dq.DynamiQ(bits=3).lost(4, dq.Ring()) == pytest.approx(1.47, abs=0.01)
    assert dq.DynamiQ(bits=3).lost(4, dq.Direct()) == pytest.approx(0.79, abs=0.01)
