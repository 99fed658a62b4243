"""THC end to end: two forms of one sum, its error, overflow, odd inputs."""

from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    relative_error,
    small,
    vmapped,
    wire_bits,
)
from test_thc_codec import CODES, INDEPENDENT, lognormal_scaled

import dynamiq_jax as dq
from dynamiq_jax.comparators import hadamard
from dynamiq_jax.comparators import thc_codec as thc
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import Call

SHORT: dict[str, Any] = {"piece_size": 1024}
FORMS = ("psum", "two-shot")
KEY = jax.random.key(1)
SEED = jnp.array([7, 8], jnp.uint32)


def reduce(method, x, key=KEY):
    return np.asarray(vmapped(small(method), None)(x, key))


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


def test_one_worker_alone_is_a_round_trip_of_the_codec():
    method, x = dq.comparators.THC(**SHORT), jnp.asarray(lognormal_scaled(1, 1024))
    seed = jnp.array([5, 6], jnp.uint32)

    def one(x):
        return method.all_reduce(x, Call(Axis(("data",)), None, seed)).value

    found = np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x))[0]
    scale = np.sqrt(np.mean(np.asarray(x[0], np.float64) ** 2))
    node = np.asarray(hadamard.rotate(jnp.asarray(found / scale), seed))
    nodes = thc.clip_threshold(1 / 32) * (2 * method.integers / 30 - 1)
    assert np.max(np.min(np.abs(node[:, None] - nodes), axis=1)) < 1e-5
    assert relative_error(found, np.asarray(x[0])) == pytest.approx(0.0204, rel=0.15)
    assert_same_bits(reduce(method, x), np.asarray(x))  # psum has nothing to do


def options_of(code) -> dict[str, Any]:
    table, p = CODES[code]
    uniform = code.startswith("uniform")
    return dict(
        table=not uniform, granularity=int(table[-1]), p=p, bits=(len(table) - 1).bit_length()
    )


@pytest.mark.parametrize("code", CODES)
def test_error_of_independent_and_of_identical_workers(code):
    """The oracles, at D = 2^17: rounding and clipping of one worker, and of a mean of eight."""
    method = dq.comparators.THC(**options_of(code))
    draws = [jnp.asarray(lognormal_scaled(8, seed=seed)) for seed in range(2)]
    found = [relative_error(reduce(method, x)[0], total_of(x)) for x in draws]
    assert np.mean(found) == pytest.approx(INDEPENDENT[code], rel=0.05)
    assert np.array_equal(method.integers, CODES[code][0])
    rounding, clip = thc.expected_error(method.integers, thc.clip_threshold(method.p))
    found = []
    for i in range(4):
        x = jnp.broadcast_to(draws[i % 2][i], draws[0].shape)
        found.append(relative_error(reduce(method, x, jax.random.key(i))[0], total_of(x)))
    assert np.mean(found) == pytest.approx(rounding / 8 + clip, rel=0.1)


def test_correlated_words_cancel_rounding_errors_of_identical_workers():
    """One word in each eighth of the range: so many workers round up, give or take one."""
    x = jnp.broadcast_to(jnp.asarray(lognormal_scaled(1)), (8, 1 << 17))
    independent, correlated = (
        relative_error(reduce(dq.comparators.THC(rounding=own, **options), x)[0], total_of(x))
        for options in [options_of("uniform16")]
        for own in ("independent", "correlated")
    )
    assert correlated < independent / 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "options"), [(8, {}), (17, {"table": False})])
def test_lanes_that_are_full_do_not_overflow(form, n, options):
    """Every coordinate of every worker clips at the top: sums of 8 x 30 and 17 x 15 = 255."""
    method = dq.comparators.THC(form=form, p=0.5, sum_bits=8, **options, **SHORT)
    seed = jnp.array([7, 8], jnp.uint32)
    x = jnp.broadcast_to(hadamard.unrotate(jnp.ones(1024), seed), (n, 1024))

    def one(x):
        return method.all_reduce(x, Call(Axis(("data",)), None, seed)).value

    found = np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x))
    expected = n * thc.clip_threshold(0.5) * np.asarray(x[0])
    np.testing.assert_allclose(found[0], expected, atol=1e-3)  # of 366


def test_sums_that_would_overflow_are_refused():
    eight_bits, x = dq.comparators.THC(sum_bits=8, **SHORT), jnp.zeros((9, 1024))
    with pytest.raises(ValueError, match=r"9 workers.*granularity=30 reach 270.*the 255 of 8 bits"):
        reduce(eight_bits, x)
    with pytest.raises(ValueError, match="pass sum_bits=9, or a granularity of at most 28"):
        wire_bits(small(eight_bits))(x[0], 9)
    with pytest.raises(ValueError, match="exceeds the 2147483647 of 31 bits; pass a gran.* most 7"):
        dq.comparators.THC().check(1 << 28, None)
    assert reduce(dq.comparators.THC(sum_bits=9, **SHORT), x).shape == x.shape


SATURATING: dict[str, Any] = {"form": "two-shot", "table": False, "saturate": True, **SHORT}


def with_seed(method, x):
    """Every worker's sum in standard deviations of one worker, rotated; f64."""
    pieces = x.shape[1] // 1024

    def one(own):
        found = method.all_reduce(own, Call(Axis(("data",)), None, SEED)).value
        return hadamard.rotate(found.reshape(pieces, -1), SEED)

    return np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x), np.float64)


def ends_of(method, n):
    """The least and the largest sum in standard deviations of one worker, and the step."""
    step = 2 * thc.clip_threshold(method.p) / method.g
    room = 2**method.sum_bits - 1
    low = -(-(n * method.g - room) // 2)  # half an integer above the middle where that is none
    return (low - n * method.g / 2) * step, (low + room - n * method.g / 2) * step, step


@pytest.mark.parametrize(
    ("n", "bits", "sum_bits", "p"),
    [(4, 6, 6, 1e-3), (16, 8, 8, 1e-17)],
)
def test_sums_saturate_as_often_as_normal_numbers_exceed_them(n, bits, sum_bits, p):
    """Workers of equal norms: their rotated coordinates are normal, and add up as sqrt(n)."""
    method = dq.comparators.THC(bits=bits, sum_bits=sum_bits, p=p, **SATURATING)
    x = np.random.default_rng(n).standard_normal((n, 32, 1024))
    x /= np.sqrt(np.mean(x**2, axis=2, keepdims=True))
    sums = with_seed(method, jnp.asarray(x.reshape(n, -1), jnp.float32))
    assert_replicas_equal(sums)
    least, most, step = ends_of(method, n)
    assert (sums.min(), sums.max()) == pytest.approx((least, most), rel=1e-3)
    at_end = (sums[0] < least + step / 4) | (sums[0] > most - step / 4)
    # What rounds to an end is there, too; rounding adds its own variance.
    spread = NormalDist(0, np.sqrt(n * (1 + step**2 / 6)))
    expected = spread.cdf(least + step / 2) + spread.cdf(step / 2 - most)
    assert 0.02 < expected < 0.2
    assert at_end.mean() == pytest.approx(expected, rel=0.07)
    # All other sums err by rounding alone.
    exact = np.asarray(hadamard.rotate(jnp.asarray(x.sum(axis=0), jnp.float32), SEED), np.float64)
    error = (sums[0] - exact)[~at_end & (np.abs(exact) < most - step)]
    assert np.mean(error**2) == pytest.approx(n * step**2 / 6, rel=0.1)


def test_full_sums_end_at_their_bits_and_do_not_wrap():
    """Every coordinate of every worker clips, the first half at the bottom."""
    method = dq.comparators.THC(p=0.5, sum_bits=5, **SATURATING)
    sign = np.where(np.arange(1024) < 512, -1, 1).astype(np.float32)
    x = hadamard.unrotate(jnp.asarray(sign)[None], SEED)
    sums = with_seed(method, jnp.broadcast_to(x, (8, 1024)))
    least, most, _ = ends_of(method, 8)
    expected = np.broadcast_to(np.where(sign < 0, least, most), sums.shape)
    np.testing.assert_allclose(sums.reshape(expected.shape), expected, rtol=1e-3)


def test_sums_that_fit_do_not_saturate():
    """Sums of 7 x 15 in 7 bits, of which many are 0 and many 105."""
    x = lognormal_scaled(1, 5000) * (1 + jnp.arange(7.0)[:, None] / 100)
    options = {**SATURATING, "sum_bits": 7, "p": 0.5}
    first, *others = (
        reduce(dq.comparators.THC(**{**options, **changed}), x)
        for changed in ({}, {"saturate": False}, {"saturate": False, "form": "psum"})
    )
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"saturate": True}, "saturate=True with form='psum': native sums wrap; pass form='two"),
        ({"bits": 4.0}, "bits=4.0; expected int, such as bits=4"),
        ({"granularity": 14}, "granularity=14 must be 15 to 1023 with bits=4 and table=True"),
        ({"granularity": 16, "table": False}, "granularity=16 must be 1 to 15"),
        ({"p": 0}, "p is 0"),
        ({"piece_size": 100}, "piece_size is 100"),
        ({"form": "ring"}, "form='ring'; expected one of"),
        ({"sum_bits": 32}, "sum_bits=32 must be 1 to 31"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.comparators.THC(**fields)


def test_bits_per_coordinate():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def bits(n, **options):
        found = dq.explain(leaf, n, method=dq.comparators.THC(**options), verbose=False)
        return round(found.bits_per_coord, 2)

    assert [bits(n) for n in (2, 8, 9, 136)] == [6.4, 8, 10.67, 16]
    assert [bits(n, table=False) for n in (2, 4, 8, 17, 32)] == [5.33, 6.4, 8, 8, 10.67]
    # 4 up, and 8, 9 and 12 down.
    assert [bits(n, form="two-shot") for n in (8, 9, 136)] == [6, 6.5, 8]
    saturating = {"form": "two-shot", "saturate": True}
    assert [bits(n, **saturating) for n in (8, 136)] == [4, 4]
    assert bits(136, sum_bits=6, **saturating) == 5
