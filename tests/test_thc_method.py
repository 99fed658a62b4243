"""THC end to end: two forms of one sum, its error, overflow, odd inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    SMALL,
    assert_replicas_equal,
    assert_same_bits,
    bias,
    relative_error,
    sharded,
    vmapped,
)
from test_thc_codec import CODES, INDEPENDENT, lognormal_scaled

import dynamiq_jax as dq
from dynamiq_jax.codecs import hadamard, thc

SHORT: dict[str, Any] = {"piece_size": 1024, **SMALL}
FORMS = ("psum", "two-shot")
METHODS: dict[str, dict[str, Any]] = {
    "table": {},
    "uniform": {"table": False},
    "31 levels": {"table": False, "bits": 5, "granularity": 30, "p": 1 / 1024},
    "3 bits": {"bits": 3, "granularity": 42, "p": 1 / 1024, "rounding": "correlated"},
    "wide sums": {"bits": 8, "granularity": 300, "p": 1e-4, "rounding": "antithetic"},
}
KEY = jax.random.key(1)


def reduce(method, x, key=KEY):
    return np.asarray(vmapped(method, None)(x, key))


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


@pytest.mark.parametrize("name", METHODS)
def test_both_forms_and_both_maps_give_the_same_bits_on_all_workers(name):
    n = 8
    x = jnp.asarray(lognormal_scaled(n, 5000))
    methods = [dq.THC(form=form, **METHODS[name], **SHORT) for form in FORMS]
    runs = (vmapped, sharded) if name == "3 bits" else (vmapped,)
    found = [np.asarray(run(m, None)(x, KEY)) for m in methods for run in runs]
    assert_replicas_equal(np.concatenate(found))
    assert relative_error(found[0][0], total_of(x)) < 0.1
    # Other keys round differently.
    other = reduce(methods[0], x, jax.random.key(2))
    assert np.mean(other != found[0]) > 0.9


def test_one_worker_alone_is_a_round_trip_of_the_codec():
    method, x = dq.THC(**SHORT), jnp.asarray(lognormal_scaled(1, 1024))
    seed = jnp.array([5, 6], jnp.uint32)

    def one(x):
        return method.all_reduce(x, "data", n_workers=1, topology=None, seed=seed)[0]

    found = np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x))[0]
    scale = np.sqrt(np.mean(np.asarray(x[0], np.float64) ** 2))
    node = np.asarray(hadamard.rotate(jnp.asarray(found / scale), seed))
    nodes = thc.clip_threshold(1 / 32) * (2 * method.integers / 30 - 1)
    assert np.max(np.min(np.abs(node[:, None] - nodes), axis=1)) < 1e-5
    assert relative_error(found, np.asarray(x[0])) == pytest.approx(0.0204, rel=0.15)
    assert_same_bits(reduce(method, x), np.asarray(x))  # psum has nothing to do


def test_unbiased_without_clipping():
    """p = 1e-9: nothing is clipped. Scores as in `cases.Bias`, of 8 blocks of 256 coordinates."""
    samples = 300
    method, x = dq.THC(p=1e-9, **SHORT), jnp.asarray(lognormal_scaled(3, 2048))
    exact = total_of(x)
    total, squared = np.zeros((2, 2048))
    for key in jax.random.split(jax.random.key(3), samples):
        error = reduce(method, x, key)[0] - exact
        total, squared = total + error, squared + error**2
    found = bias(total, squared, samples, exact, blocks=8)
    assert found.worst_score() < 4.5
    assert abs(np.mean(found.spread) - 1) < 0.12


def options_of(code) -> dict[str, Any]:
    table, p = CODES[code]
    uniform = code.startswith("uniform")
    return dict(
        table=not uniform, granularity=int(table[-1]), p=p, bits=(len(table) - 1).bit_length()
    )


@pytest.mark.parametrize("code", CODES)
def test_error_of_independent_and_of_identical_workers(code):
    """The oracles, at D = 2^17: rounding and clipping of one worker, and of a mean of eight."""
    method = dq.THC(**options_of(code))
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "options"), [(8, {}), (17, {"table": False})])
def test_lanes_that_are_full_do_not_overflow(form, n, options):
    """Every coordinate of every worker clips at the top: sums of 8 x 30 and 17 x 15 = 255."""
    method = dq.THC(form=form, p=0.5, sum_bits=8, **options, **SHORT)
    seed = jnp.array([7, 8], jnp.uint32)
    x = jnp.broadcast_to(hadamard.unrotate(jnp.ones(1024), seed), (n, 1024))

    def one(x):
        return method.all_reduce(x, "data", n_workers=n, topology=None, seed=seed)[0]

    found = np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x))
    expected = n * thc.clip_threshold(0.5) * np.asarray(x[0])
    np.testing.assert_allclose(found[0], expected, atol=1e-3)  # of 366


def test_sums_that_would_overflow_are_refused():
    eight_bits, x = dq.THC(sum_bits=8, **SHORT), jnp.zeros((9, 1024))
    with pytest.raises(ValueError, match=r"9 workers.*granularity=30 reach 270.*the 255 of 8 bits"):
        reduce(eight_bits, x)
    with pytest.raises(ValueError, match="pass sum_bits=9, or a granularity of at most 28"):
        dq.wire_bits(x[0], 9, method=eight_bits)
    with pytest.raises(ValueError, match="exceeds the 2147483647 of 31 bits; pass a gran.* most 7"):
        dq.THC().check(1 << 28, None)
    assert reduce(dq.THC(sum_bits=9, **SHORT), x).shape == x.shape


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 4.0}, "bits=4.0 must be an integer from 1 to 8"),
        ({"granularity": 14}, "granularity=14 must be 15 to 1023 with bits=4 and table=True"),
        ({"granularity": 16, "table": False}, "granularity=16 must be 1 to 15"),
        ({"p": 0}, "p is 0"),
        ({"piece_size": 100}, "piece_size is 100"),
        ({"form": "ring"}, "form='ring'; expected one of"),
        ({"sum_bits": 32}, "sum_bits=32 must be 1 to 31"),
        ({"min_leaf_size": -1}, "min_leaf_size=-1"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.THC(**fields)


@pytest.mark.parametrize("form", FORMS)
def test_pieces_of_zeros(form):
    """Pieces of 1024: zeros on no worker, on all, and on all but one."""
    method = dq.THC(form=form, **SHORT)
    x = jnp.asarray(lognormal_scaled(3, 3 * 1024)).at[:, 1024:2048].set(0).at[:2, 2048:3072].set(0)
    found = reduce(method, x)
    assert_replicas_equal(found)
    pieces, exact = found[0].reshape(3, 1024), total_of(x).reshape(3, 1024)
    assert not np.any(pieces[1])
    assert max(relative_error(pieces[i], exact[i]) for i in (0, 2)) < 0.12


@pytest.mark.parametrize("magnitude", [1e-37, 1e-12, 1e25, 1e38])
def test_any_magnitude_will_do(magnitude):
    x = np.float32(magnitude) * np.random.default_rng(0).uniform(-1, 1, (2, 1024))
    x = x.astype(np.float32)
    found = reduce(dq.THC(**SHORT), jnp.asarray(x))[0] / np.float64(magnitude)
    assert relative_error(found, total_of(x / np.float64(magnitude))) < 0.1


def test_bits_per_coordinate():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def bits(n, **options):
        found = dq.explain(leaf, n, method=dq.THC(**options), verbose=False)
        return round(found.bits_per_coord, 2)

    assert [bits(n) for n in (2, 8, 9, 136)] == [6.4, 8, 10.67, 16]
    assert [bits(n, table=False) for n in (2, 4, 8, 17, 32)] == [5.33, 6.4, 8, 8, 10.67]
    # 4 up, and 8, 9 and 12 down.
    assert [bits(n, form="two-shot") for n in (8, 9, 136)] == [6, 6.5, 8]
