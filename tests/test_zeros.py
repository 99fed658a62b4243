"""With dither an exact zero stays zero: in payloads, in sums of workers, in sharded updates."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_replicas_equal, bias, bits_of
from cases import daily, first_state, small, stepper, vmapped
from workers import auto_mesh, once, promoting

import dynamiq_jax as dq
import dynamiq_jax.optax
import pallas_kernels as pk
from pallas_kernels.format import DEALT, QUAD, TILE_ROWS

KEY = jax.random.key(0)
FORMATS = {
    "piecewise": pk.WireFormat(levels="piecewise", widths=(1, 2, 3, 4, 6, 9), dither=True),
    "bf16 scales": pk.WireFormat(
        widths=(1, 2, 5), group_scale="bf16", rounding="independent", dither=True
    ),
    "carries NaN": pk.WireFormat(
        levels="uniform", widths=(1, 2, 3, 8), rounding="correlated", carries_nan=True, dither=True
    ),
}
KINDS = "none", "half", "cut", "some", "most", "one", "all", "few"
"""Which coordinates of a super-group are zero. "few" are the coordinates of one group that are not,
beside a group a thousand times as large; one of them is subnormal, and counts as zero."""
ROWS = range(TILE_ROWS)
SLOT, SLOTS = 2, 5


@once
def values(tiles: int) -> jax.Array:
    """f32[tiles, KINDS, 256]: the kinds in every tile."""
    shape = tiles, len(KINDS), 256
    x, u = jax.random.normal(KEY, shape), jax.random.uniform(jax.random.key(1), shape)
    at = jnp.arange(256)[None]
    group = at // QUAD % DEALT + DEALT * (at // 128)
    zero = [at < 0, at < 128, at < 77, u[:, 3] < 0.1, u[:, 4] < 0.9, at == 41, at >= 0, u[:, 7] > 1]
    x = jnp.where(jnp.stack([z | jnp.zeros((tiles, 256), bool) for z in zero], 1), 0.0, x)
    x = x.at[:, 5, 41].set(-0.0)
    few = jnp.where(group == 1, 1e3, jnp.where((group == 2) & (u[:, 7] < 0.3), 1.0, 0.0))
    return x.at[:, 7].multiply(few).at[:, 7, 9].set(2.0**-140)


@partial(jax.jit, static_argnames=("fmt", "backend"))
def decoded(x, seeds, fmt, backend="jnp"):
    """Payloads of tiles [T, 8, 256], one for each width, under every seed, and their values."""
    x, widths = x.reshape(-1), np.array(fmt.widths)
    words = np.array([fmt.tile_words(w) for w in widths])
    tiles = jnp.asarray(pk.pack_tiles(np.cumsum(words) - words, widths), jnp.int32)[None]
    rows = TILE_ROWS * len(widths)
    order, chunk = jnp.arange(rows, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
    source = pk.Source(x, None, order)
    result = pk.Result(jnp.zeros(rows), order, rows, jnp.float32)

    def one(seed):
        noise = pk.slot_noise(seed, SLOTS, fmt.rounding)[SLOT]
        target, told = pk.Target(tiles, noise, int(words.sum())), {"fmt": fmt, "backend": backend}
        payload = pk.compress(source, chunk, target, **told)
        return payload, pk.decompress(payload, tiles, chunk, result, noise[None], **told)

    payloads, found = jax.lax.map(one, seeds)
    return payloads, found.reshape(len(seeds), len(widths), TILE_ROWS, 256)


def seeds(count: int) -> jax.Array:
    return jax.random.bits(jax.random.key(2), (count, 2), jnp.uint32)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_the_rest_has_no_bias(name):
    """Every width, also 1, and every way in which zeros lie among other values."""
    fmt, count = FORMATS[name], 300
    x = values(len(fmt.widths))
    found = np.asarray(decoded(x, seeds(count), fmt)[1], np.float64)
    assert (found[:, np.abs(x) < 1e-37] == 0).all()
    error = found - x
    total, squared = np.sum(error, axis=0), np.sum(error**2, axis=0)
    seen = bias(total, squared, count, x, len(fmt.widths) * len(KINDS))
    assert seen.worst_score() < 4.5
    spread = seen.spread.reshape(-1, len(KINDS))
    assert ((spread > 0) == [kind != "all" for kind in KINDS]).all()
    # A mean of as many squares as there are coordinates with an error; in "few" one group has it.
    squares = np.where(np.array(KINDS) == "few", 32, np.sum(x != 0, axis=2))
    assert (spread < 1 + 6 * np.sqrt(2 / np.maximum(squares, 1))).all()


@pytest.mark.parametrize("name", FORMATS)
def test_groups_without_zeros_keep_their_precision(name):
    fmt = FORMATS[name]
    x = values(len(fmt.widths))
    found = np.asarray(decoded(x, seeds(300), fmt)[1])
    for width, own, other in zip(fmt.widths, x, np.moveaxis(found, 1, 0), strict=True):
        of_error = np.mean((other - own) ** 2, axis=0)

        def distortion(kind, part, own=own, of_error=of_error):
            at = KINDS.index(kind)
            return np.sum(of_error[at, part]) / np.sum(own[at, part] ** 2)

        everywhere, second = slice(None), slice(128, None)
        expected = pk.distortion(fmt, width), pk.distortion(fmt, width, marked=True)
        seen = np.array([
            distortion("none", everywhere) / expected[0],
            distortion("half", second) / expected[0],
            distortion("cut", second) / expected[0],
            distortion("some", everywhere) / expected[1],
        ])  # fmt: skip
        assert (0.6 < seen).all() and (seen < 1.5).all(), (width, seen)


@pytest.mark.parametrize("name", daily(FORMATS, ["carries NaN"]))
def test_interpreted_kernels_give_these_codes(name):
    fmt = FORMATS[name]
    x = values(len(fmt.widths))
    expected, actual = (decoded(x, seeds(2), fmt, backend) for backend in ("jnp", "interpret"))
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(bits_of(actual[1]), bits_of(expected[1]))


def test_any_payload_decodes_to_finite_numbers():
    fmt = dataclasses.replace(FORMATS["piecewise"], widths=(1, 2, 5, 9))
    words = np.array([fmt.tile_words(w) for w in fmt.widths])
    tiles = jnp.asarray(pk.pack_tiles(np.cumsum(words) - words, np.array(fmt.widths)))[None]
    payload = np.random.default_rng(0).integers(0, 2**32, (1, int(words.sum())), np.uint32)
    order = jnp.arange(TILE_ROWS * len(words), dtype=jnp.int32)[None]
    result = pk.Result(jnp.zeros(order.size), order, order.size, jnp.float32)
    noise = pk.slot_noise(jnp.zeros(2, jnp.uint32), 1, fmt.rounding)
    chunk = jnp.zeros(1, jnp.int32)
    decode = jax.jit(partial(pk.decompress, fmt=fmt, result=result))
    found = decode(payload, tiles.astype(jnp.int32), chunk, noise=noise)
    assert np.isfinite(found).all()


def gradients() -> tuple[np.ndarray, np.ndarray]:
    """f32[4, 40, 250] of four workers, and where all of them have zeros: rows, and scattered."""
    rng = np.random.default_rng(0)
    zero = rng.random((40, 250)) < 0.05
    zero[10:30] = True
    x = np.where(zero, 0.0, rng.normal(size=(4, 40, 250)))
    x[0, 35], x[2, :5, 100:] = 0.0, 0.0  # zeros of one worker alone
    return x.astype(np.float32), zero


AXIS = dq.Format(scale_axis=0)
SUMS = {
    "ring, no plan": (dq.DynamiQ(bits=4.4, dither=True, plan=False), dq.Ring(unroll_up_to=1)),
    "butterfly": (dq.DynamiQ(bits=4.4, dither=True), dq.Butterfly()),
    "scale axis": (dq.DynamiQ(bits=4.4, dither=True, plan=False, format=AXIS), dq.Direct()),
}


@pytest.mark.parametrize("name", daily(SUMS, [*SUMS][:1]))
def test_a_sum_of_zeros_is_zero_on_any_topology(name):
    method, topology = SUMS[name]
    x, zero = gradients()
    total = vmapped(small(method), topology)(x, KEY)
    assert_replicas_equal(total)
    assert (total[0][zero] == 0).all()
    exact = np.sum(x, axis=0)
    assert 1e-4 < np.sum((total[0] - exact) ** 2) / np.sum(exact**2) < 0.05


def test_a_memory_keeps_zeros():
    method = small(dq.ErrorFeedback(dq.DynamiQ(bits=4.4, dither=True, plan=False)))
    x, zero = gradients()
    state = first_state(method, x, 4, dq.Direct())
    for step in range(2):
        total, state = stepper(method, dq.Direct())(x, jax.random.key(step), state)
        assert (total[0][zero] == 0).all()
        assert (total[0][~zero] != 0).any()


N, ROWS_USED = 8, 40
DIFFERENCES = dq.DynamiQ(bits=2.5, dither=True)


@once
def model():
    """Parameters of which an exact training moves a part, and tokens of three steps."""
    keys = jax.random.split(KEY, 6)
    sizes = {
        "embed": (512, 24), "trained": (24, 63), "frozen": (63, 57), "masked": (57, 64),
        "unused": (100, 33),
    }  # fmt: skip
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for (name, shape), key in zip(sizes.items(), keys, strict=False)
    }
    return params, jax.random.randint(keys[5], (3, 64), 0, ROWS_USED)


def loss_fn(params, ids):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    taken = jnp.float32(jnp.arange(57 * 64).reshape(57, 64) % 3 > 0)
    hidden = jnp.tanh(params["embed"][ids * 12] @ params["trained"]) @ params["frozen"]
    return jnp.mean(jnp.square(hidden @ (params["masked"] * taken) - 1))


def rule():
    groups = dict.fromkeys(model()[0], "trained") | {"frozen": "frozen"}
    return optax.partition({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, groups)


TRAININGS = [(jnp.float32, False), (jnp.bfloat16, True), (jnp.bfloat16, False), (jnp.float32, True)]


@pytest.mark.parametrize(("dtype", "deferred"), daily(TRAININGS, TRAININGS[1:2]))
def test_sharded_updates_move_what_exact_ones_move(dtype, deferred):
    """A frozen trunk, rows of an embedding without tokens, a mask, an unused leaf."""
    params, tokens = model()
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    wide = jax.tree.map(lambda x: x.astype(np.float32), params)  # as masters are
    exact = optax_steps.plain(promoting(rule()), loss_fn, wide, tokens)
    stays = jax.tree.map(lambda a, b: np.asarray(a) == b, exact, wide)
    assert stays["frozen"].all() and stays["unused"].all()
    assert 0.85 < stays["embed"].mean() < 0.95 and 0.3 < stays["masked"].mean() < 0.5
    assert stays["trained"].mean() < 0.1
    wire = dq.Format(group_scale="bf16")  # one width, which compiles faster
    method = small(dq.DynamiQ(widths=(4,), bits=5.5, dither=True, format=wire))
    policy = dq.Policy(gradients=method, parameters=small(DIFFERENCES))
    optimizer = promoting(dq.optax.sharded(rule(), "data", compression=policy, deferred=deferred))
    state, mesh = dq.optax.init(optimizer, params, auto_mesh(N)), auto_mesh(N)

    def grads_of(params, state, ids):
        if deferred:
            params = dq.optax.gathered(params, state)
        return optax_steps.of_batch(loss_fn)(params, state, ids)

    step = optax_steps.stepper(optimizer, state, grads_of, mesh, check_vma=not deferred)
    found, state = optax_steps.train(step, params, state, tokens, mesh)
    found, masters = jax.device_get((dq.optax.gathered(found, state), state.unpadded()))
    for name, kept in stays.items():
        for own in (found[name], masters[name]):
            moved = own != params[name].astype(own.dtype)
            assert not moved[kept].any(), name
            assert kept.all() or moved[~kept].mean() > 0.5, name
