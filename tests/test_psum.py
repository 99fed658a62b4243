"""`psum` of one array under every method: replicas, unbiasedness, keys, odd inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CHEAP,
    LOOP,
    METHODS,
    TOPOLOGIES,
    UNBIASED,
    assert_replicas_equal,
    assert_same_bits,
    bias,
    daily,
    gradient,
    relative_error,
    vmapped,
)

N, SIZE = 5, 5 * 8 * 1024 - 77
"""Five workers (an odd ring), no multiple of anything; a whole tile even of the largest rows."""
SAMPLES = 300


@functools.cache
def case(n=N):
    """Every worker's gradient and their exact sum."""
    x = gradient(0, n, SIZE)
    return x, np.sum(np.asarray(x, np.float64), axis=0)


def reduce(name, x, key=None, topology=LOOP, **options):
    run = vmapped(METHODS[name], topology, **options)
    return np.asarray(run(x, jax.random.key(1) if key is None else key))


@pytest.mark.parametrize("name", daily(METHODS, ["default", "dither"]))
def test_replicas_agree_and_the_key_alone_decides(name):
    x, exact = case()
    first, again = reduce(name, x), reduce(name, x)
    assert_replicas_equal(first)
    assert relative_error(first[0], exact) < 0.1
    assert_same_bits(first, again)
    other = reduce(name, x, jax.random.key(2))
    # Most coordinates are rounded; only those without error (width 0, exact levels) repeat.
    assert np.mean(other != first) > 0.3


@pytest.mark.parametrize("name", daily(METHODS, ["default"]))
def test_bits_do_not_depend_on_the_compiler(name):
    """Neither on optimisations, which contract products and additions, nor on fusions.

    Most tests compile without them; those of bias over keys do as users have it.
    """
    x, _ = case()
    assert_same_bits(reduce(name, x), reduce(name, x, optimized=True))


@functools.cache
def bias_over_keys(name, route, n):
    """The bias of 20 blocks over SAMPLES keys."""
    x, exact = case(n)
    total, squared = np.zeros((2, SIZE))
    for key in jax.random.split(jax.random.key(3), SAMPLES):
        error = reduce(name, x, key, OVER_KEYS[route], optimized=True)[0] - exact
        total, squared = total + error, squared + error**2
    total, squared, exact = (np.pad(a, (0, 77)) for a in (total, squared, exact))
    return bias(total, squared, SAMPLES, exact, blocks=20)


OVER_KEYS = {"loop": LOOP} | {name: topology for name, (topology, _) in TOPOLOGIES.items()}
ROWS = [(name, "loop", N) for name in UNBIASED]
ROWS += [("independent", route, 4) for route in ("ring, two streams", "butterfly", "direct")]


@pytest.mark.parametrize(("name", "route", "n"), daily(ROWS, ROWS[-1:]))
def test_unbiased_over_keys(name, route, n):
    """The mean over keys is the exact sum, for every block of C = 2048 coordinates.

    The variance is that of n roundings. With N = 300 samples a bias of 2% of the last hop's
    step scores 0.02 sqrt(6 C N / 5) = 17 if it has a direction, and adds 0.0024 N / 5 = 0.14 to
    the spread of any signs; the mean spread of all blocks deviates by less than 0.02.
    """
    found = bias_over_keys(name, route, n)
    assert found.worst_score() < 6.5
    assert abs(np.mean(found.spread) - 1) < 0.12


@pytest.mark.parametrize("name", daily(["default", "correlated"], ["default"]))
def test_correlated_rounding_has_little_bias(name):
    """Related noise of consecutive hops biases what is rounded twice: its square is small.

    Measured: 1% of the variance of a sum ("correlated" 0.4%), and up to 4% on two workers.
    """
    found = bias_over_keys(name, "loop", N)
    squared_bias_over_variance = (np.mean(found.spread) - 1) / SAMPLES
    assert squared_bias_over_variance < 0.03


@pytest.mark.parametrize("name", daily(METHODS, ["default", "dither"]))
def test_a_bad_super_group_is_bad_on_all_workers_and_others_are_not(name):
    x, exact = case()
    size = METHODS[name].method.format.super_group_size
    group = np.arange(SIZE) // size
    poisons = [(0, 3, np.nan), (2, 11, np.inf), (4, 17, -np.inf), (1, 20, np.inf), (3, 20, -np.inf)]
    bad = x
    for worker, sick, value in poisons:
        bad = bad.at[worker, sick * size + 7 * worker].set(value)
    bad = bad.at[2, SIZE - 1].set(np.nan)  # in the last super-group, which is not full
    result = reduce(name, bad)
    assert_replicas_equal(result)
    sick = np.isin(group, [3, 11, 17, 20, group[-1]])
    np.testing.assert_array_equal(np.isfinite(result[0]), ~sick)
    clean = relative_error(reduce(name, x)[0][~sick], exact[~sick])
    assert relative_error(result[0][~sick], exact[~sick]) < 2 * clean + 1e-9


def special_inputs():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((N, SIZE)).astype(np.float32)
    sign = np.sign(normal)
    huge = 1e-3 * normal
    huge[3] = 1e38 * sign[3]
    outlier = normal.copy()
    outlier[1, 12345] = 1e30
    worker = np.arange(1, N + 1, dtype=np.float32)[:, None]
    return {
        "tiny": np.float32(1e-38) * sign,
        "subnormal": np.float32(1e-42) * sign * worker,
        "huge": huge,
        "outlier": outlier,
        "alternating": np.where(np.arange(SIZE) % 2, 1, -1).astype(np.float32) * worker,
        "wide_range": normal * np.exp2(rng.integers(-120, 120, (1, SIZE))).astype(np.float32),
        "constant": np.full((N, SIZE), 0.1, np.float32) * worker,
        "zeros in part": np.where(np.arange(SIZE) // 1024 % 3 == 1, 0, normal),
    }


SPECIAL = special_inputs()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name",
    daily(
        ["default", "geometric", "bf16_scales", "all_widths", "mean", "dither", "no_plan"],
        ["default", "dither"],
    ),
)
def test_finite_in_finite_out_and_zeros_stay_zero(name, kind):
    x = SPECIAL[kind]
    result = reduce(name, jnp.asarray(x))
    assert_replicas_equal(result)
    assert np.all(np.isfinite(result))
    # Every encoding errs by at most its group's largest value.
    most = np.max(np.abs(np.pad(x.astype(np.float64), ((0, 0), (0, 77)))).reshape(N, -1, 1024), 2)
    most = np.repeat(most.sum(axis=0), 1024)[:SIZE]
    bound = 2 * N * most + np.where(most > 0, 1e-37, 0)
    exact = np.sum(x.astype(np.float64), axis=0)
    assert np.all(np.abs(result[0] - exact) <= bound)


def test_special_inputs_are_accurate():
    def run(kind):
        return reduce("default", jnp.asarray(SPECIAL[kind]))[0].astype(np.float64)

    exact = {kind: np.sum(x.astype(np.float64), axis=0) for kind, x in SPECIAL.items()}
    assert run("outlier")[12345] == pytest.approx(1e30, rel=0.02)
    assert relative_error(run("alternating"), exact["alternating"]) < 0.02
    assert relative_error(run("constant"), exact["constant"]) < 0.001
    # Scales end at 2^125: no value changes its sign.
    assert np.all(run("huge") * exact["huge"] >= 0)


@pytest.mark.release
def test_wide_widths_keep_huge_values():
    x = SPECIAL["huge"]
    found = reduce("all_widths", jnp.asarray(x))[0].astype(np.float64)
    assert relative_error(found / 1e38, np.sum(x.astype(np.float64), axis=0) / 1e38) < 0.1


def test_any_kind_of_key_will_do():
    x = gradient(0, 2, 3000)
    run = vmapped(CHEAP)
    typed = np.asarray(run(x, jax.random.key(5)))
    assert_same_bits(np.asarray(run(x, jax.random.PRNGKey(5))), typed)
    rbg = [np.asarray(run(x, jax.random.key(seed, impl="rbg"))) for seed in (5, 6)]
    assert np.mean(rbg[0] != rbg[1]) > 0.3


def test_one_worker_keeps_its_gradient():
    tree = {
        "f32": jnp.array([[1e-38, -3.7, np.inf, 0.1]]),
        "bf16": jnp.ones((1, 70000), jnp.bfloat16) * jnp.bfloat16(1 / 3),
        "i32": jnp.array([[7, -(2**31)]]),
    }
    assert_same_bits(vmapped(METHODS["default"])(tree, None), tree)
    del tree["i32"]  # whose mean is a float
    assert_same_bits(vmapped(METHODS["default"], mean=True)(tree, None), tree)
