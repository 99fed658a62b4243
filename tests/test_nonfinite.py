"""NaN, infinities and extreme magnitudes under every method and topology, and in its memory.

What is not finite on one worker is not finite on any, in as many coordinates as the method's
docstring says and no others; what is finite stays so; and memory forgets a bad step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal
from cases import EVERY_METHOD, LOOP, METHODS, Row, daily, first_state, small, stepper
from workers import gradient

import dynamiq_jax as dq
from dynamiq_jax.contrib.loco import BLOCK
from dynamiq_jax.methods.metrics import vnmse

N, SIZE = 4, 4 * 8 * 256 - 77
"""The last block is not full, whatever its size."""
ROWS = EVERY_METHOD | {
    f"format {name}": Row(METHODS[name], {"ring": LOOP}, 256, 0.1)
    for name in ("mean", "geometric", "bf16_scales", "all_widths")
}
ON_ALL_ROUTES = ("dynamiq", "dynamiq, no plan", "bf16", "mxfp8", "minmax")
"""One of each way to find what is not finite; of the others each is on one route."""
CASES = [
    (name, route)
    for name, row in ROWS.items()
    for route in (row.routes if name in ON_ALL_ROUTES else [*row.routes][:1])
]
KEY = jax.random.key(1)
MAX = np.finfo(np.float32).max

KINDS = ("dynamiq", "dynamiq, dither", "dynamiq, no plan", "dynamiq, no plan, memory")
KINDS += ("mxfp8", "minmax", "thc", "omnireduce", "powersgd", "marsit", "bf16")
DAILY = [(name, next(iter(EVERY_METHOD[name].routes))) for name in KINDS]
cases = pytest.mark.parametrize(("name", "route"), daily(CASES, DAILY))


@functools.cache
def runner(name, route):
    """A stepper of this file's own, so that it has one program whatever other files ran."""
    row = ROWS[name]
    return stepper.__wrapped__(row.method, row.routes[route])


class Steps:
    """A method over one topology, step by step."""

    def __init__(self, name, route):
        self.row, self.run = ROWS[name], runner(name, route)
        self.topology = self.row.routes[route]
        self.shape = (N, SIZE) if self.row.columns is None else (N, -1, self.row.columns)
        like = jnp.zeros((N, SIZE)).reshape(self.shape)
        self.state = first_state(self.row.method, like, N, self.topology)

    def __call__(self, x):
        """The sum of all workers' x, after the checks that hold whatever these are."""
        x = jnp.asarray(x, jnp.float32).reshape(self.shape)
        found, self.state = self.run(x, KEY, self.state)
        assert self.run._cache_size() == 1
        assert_replicas_equal(found)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(self.state))
        return np.asarray(found[0]).reshape(-1)


def error(found, exact):
    return float(vnmse(jnp.asarray(found), jnp.asarray(exact)))


def remembered(state):
    """The sum of all workers' memories of gradients."""
    found = memory(state)
    return 0.0 if found is None else np.sum(found, axis=0)


def memory(state):
    """The memories of all workers, in units of gradients."""
    if hasattr(state[0], "codes"):
        codes, scales = (np.asarray(x, np.float64) for x in state[0][:2])
        return codes * np.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]]
    residual = getattr(state[0], "residual", None)
    return None if residual is None else np.asarray(residual, np.float64)


@functools.cache
def inputs(seed=0):
    return np.array(gradient(seed, N, SIZE))


def total(x):
    return np.sum(x, axis=0, dtype=np.float64)


BAD = {
    "nan": (np.nan, np.nan),
    "+inf": (np.inf, np.inf),
    "-inf": (-np.inf, -np.inf),
    "both": (np.inf, -np.inf),
}


@cases
def test_what_is_not_finite_is_so_on_all_workers_and_nowhere_else(name, route):
    """On one worker, on all of them, in the last coordinate, next to padding; then never again."""
    steps, clean = Steps(name, route), inputs()
    blocks = np.arange(SIZE) // steps.row.reach
    one, everyone = 3 * steps.row.reach, 5 * steps.row.reach + steps.row.reach // 2
    one, everyone = one % SIZE, everyone % SIZE
    expected = np.isin(blocks, blocks[[one, everyone, -1]])
    first = error(steps(clean), total(clean))
    assert first < steps.row.error
    for value, other in BAD.values():
        before = steps.state
        x = clean.copy()
        x[1, one] = x[:, everyone] = x[3, -1] = value
        x[2, everyone] = other
        found = steps(x)
        np.testing.assert_array_equal(np.isfinite(found), ~expected)
        for old, new in zip(*map(jax.tree.leaves, (before, steps.state)), strict=True):
            if old.shape == x.shape and name != "loco":  # a memory of gradients
                np.testing.assert_array_equal(new[:, expected], old[:, expected])
        if name == "loco":  # a block has a new scale
            old, new = memory(before), memory(steps.state)
            atol = np.max(np.abs(old)) / 100
            np.testing.assert_allclose(new[:, expected], old[:, expected], rtol=0, atol=atol)
        exact = (total(clean) + remembered(before))[~expected]
        assert error(found[~expected], exact) < steps.row.error
    exact = total(clean) + remembered(steps.state)
    assert error(steps(clean), exact) < steps.row.error


@cases
def test_a_step_in_which_nothing_is_finite_is_forgotten(name, route):
    """One worker has diverged; all see it, and later steps do not."""
    steps = Steps(name, route)
    for value in (np.nan, np.inf):
        x = inputs().copy()
        x[2] = value
        assert not np.any(np.isfinite(steps(x)))
        for seed in (1, 2):
            exact = total(inputs(seed)) + remembered(steps.state)
            assert error(steps(inputs(seed)), exact) < steps.row.error


def extremes():
    normal = np.random.default_rng(0).standard_normal((N, SIZE)).astype(np.float32)
    sign, worker = np.sign(normal), np.arange(1, N + 1, dtype=np.float32)[:, None]
    outlier = normal.copy()
    outlier[1, 1234] = MAX / 8
    one = np.where(np.arange(N)[:, None] == 1, MAX, np.zeros(SIZE, np.float32))
    return {
        "largest of all": one,
        "largest": np.full((N, SIZE), MAX / 8, np.float32),
        "largest, of both signs": MAX / 8 * sign,
        "largest, by turns": MAX / 8 * np.where(np.arange(N) % 2, 1, -1)[:, None] * np.abs(sign),
        "smallest normal": np.finfo(np.float32).tiny * sign,
        "subnormal": np.float32(1e-42) * sign * worker,
        "one large value": outlier,
        "zeros in part": np.where(np.arange(SIZE) // 1024 % 3 == 1, 0, normal),
        "wide": normal * np.exp2(np.random.default_rng(1).integers(-120, 120, SIZE)),
    }


@cases
def test_finite_gradients_of_any_magnitude_have_finite_sums(name, route):
    """Nothing errs by more than the largest value of its block, twice for every encoding."""
    steps = Steps(name, route)
    fresh, starts = steps.state, np.arange(0, SIZE, steps.row.reach)
    for kind, x in extremes().items():
        if kind == "largest of all" and name in ("bf16", "format mean"):
            continue  # the nearest that bf16 has, in which means travel, too, is 2^128
        steps.state = fresh
        found = steps(x)
        assert np.all(np.isfinite(found)), kind
        most = total(np.maximum.reduceat(np.abs(x), starts, axis=1))
        bound = 2 * N * most + np.where(most > 0, 1e-37, 0)  # where all are zero, all stay so
        assert np.all(np.abs(found - total(x)) <= np.repeat(bound, steps.row.reach)[:SIZE]), kind
        assert np.all(np.isfinite(steps(x))), kind  # with what memory adds to it
        lone = name[:3] not in ("clt", "per")  # which one worker's values may not reach
        if kind == "one large value" and lone and steps.row.error < 1:  # one bit has no room
            assert 0.3 < found[1234] / (MAX / 8) < 3
        assert np.all(np.isfinite(steps(0 * x)))
        assert np.all(np.isfinite(steps(inputs())))
    steps.state = fresh
    np.testing.assert_array_equal(steps(np.zeros((N, SIZE))), 0)


@pytest.mark.parametrize(("dtype", "large", "mean"), [
    ("float16", 2e4, 2e4), ("bfloat16", 2e38, 4.24e37), ("float32", 2e38, 4.24e37),
])  # fmt: skip
def test_sums_beyond_the_largest_number_end_there(dtype, large, mean):
    """Only the mean of f16 has to fit; means of bf16 and f32 end at the largest number of bf16."""
    x = jnp.full((8, 8192), large, dtype)
    method = small(dq.DynamiQ())
    run = jax.jit(jax.vmap(lambda x: dq.pmean(x, "d", compression=method), axis_name="d"))
    found = np.asarray(run(x), np.float64)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.mean(), mean, rtol=0.02)
