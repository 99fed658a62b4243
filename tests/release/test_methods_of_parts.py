"""Methods that send a part of the gradient: which part that is, and that it is summed.

Every expectation is the paper's definition in numpy. `test_comparators` has what all methods share.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    assert_replicas_equal,
    assert_same_bits,
    first_state,
    relative_error,
    small,
    stepper,
    vmapped,
)

import dynamiq_jax as dq
from dynamiq_jax.comparators import sidco
from dynamiq_jax.comparators.powersgd import orthonormal

KEY, BLOCK = jax.random.key(0), 16
of = dq.comparators


def memory(method):
    return small(dq.ErrorFeedback(method))


def draw(seed, n, blocks=40, columns=BLOCK, spread=1.0):
    """f32[n, blocks * columns] whose blocks differ in length, by worker."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, columns))
    x *= np.exp(spread * rng.standard_normal((n, blocks, 1)))
    return x.astype(np.float32).reshape(n, -1)


def total_of(x):
    return np.sum(np.asarray(x, np.float64), axis=0)


def blocks_of(x, columns=BLOCK):
    return np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, columns)


def steps_of(method, x, count, mean=False):
    """Results of ``count`` steps on the same gradients, and the state after them."""
    state, run, found = first_state(method, x, len(x)), stepper(method, mean=mean), []
    for _ in range(count):
        result, state = run(x, KEY, state)
        assert_replicas_equal(result)
        found.append(np.asarray(result[0], np.float64))
    return found, state


def check_sum(found, x, sent):
    """The sum, up to n roundings to bf16, in the coordinates that were sent; else zeros."""
    own = np.asarray(x, np.float64).reshape(len(x), -1)
    np.testing.assert_array_equal(found[~sent], 0)
    error = np.abs(found - own.sum(axis=0))[sent]
    assert np.all(error <= len(own) * 2.0**-8 * np.abs(own).sum(axis=0)[sent])
    assert np.mean(found[sent] != 0) > 0.99


# --- CLT-k ----------------------------------------------------------------------------------------


def chosen_by(x, count):
    """The coordinates of one worker's chunks that are largest."""
    chunks = np.pad(np.abs(x), (0, -x.size % BLOCK), constant_values=-1).reshape(-1, BLOCK)
    sent = np.zeros(chunks.shape, bool)
    np.put_along_axis(sent, np.argsort(-chunks, axis=1, kind="stable")[:, :count], True, axis=1)
    return sent.reshape(-1)[: x.size]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_clt_k_every_worker_leads_in_turn(n):
    """And without memory worker 0 leads; the last chunk is not full."""
    x, method = draw(n, n)[:, :333], small(of.CLTK(chunk_size=BLOCK, density=3 / BLOCK))
    found, state = steps_of(method, x, n + 1)
    for step, total in enumerate(found):
        check_sum(total, x, chosen_by(x[step % n], 3))
    assert np.all(state[0].step == n + 1)
    alone = np.asarray(vmapped(method, None)(x, KEY), np.float64)
    check_sum(alone[0], x, chosen_by(x[0], 3))


def test_clt_k_memory_is_filtered():
    x, before = draw(6, 3)[:, :333], draw(7, 3)[:, :333]
    method = small(dq.ErrorFeedback(of.CLTK(density=0.25, chunk_size=BLOCK), eta=0.3))
    state = first_state(method, x, 3)
    state = (state[0]._replace(residual=jnp.asarray(before)),)
    found, after = stepper(method)(x, KEY, state)
    sent = chosen_by((x + before)[0], 4)
    np.testing.assert_array_equal(np.asarray(found[0]) != 0, sent)
    expected = 0.7 * before + 0.3 * np.where(sent, 0, x + before)
    rest = 0.3 * 2.0**-8 * np.abs(x + before) + 1e-6  # of rounding
    assert np.all(np.abs(after[0].residual - expected) <= rest)


# --- OmniReduce -----------------------------------------------------------------------------------

OmniReduce = functools.partial(of.OmniReduce, block_size=BLOCK)


def energies(x, columns=BLOCK):
    """Squared norms: f64[n, blocks]."""
    return np.sum(blocks_of(x, columns) ** 2, axis=-1)


def union_of(x, fraction):
    """Blocks that some worker has among the largest ``fraction`` of its own."""
    energy = energies(x)
    count = max(1, round(float(fraction) * energy.shape[1]))
    marked = np.zeros(energy.shape, bool)
    np.put_along_axis(marked, np.argsort(-energy, axis=1)[:, :count], True, axis=1)
    return np.any(marked, axis=0)


def with_fraction(method, x, fraction=None):
    """Every worker's first state, perhaps with another k."""
    state = first_state(method, x, len(x))
    if fraction is None:
        return state
    return (state[0]._replace(fraction=jnp.full(len(x), fraction, jnp.float32)),)


@pytest.mark.parametrize(
    ("method", "columns", "blocks"),
    [(OmniReduce(density=0.11), BLOCK, 640), (of.OmniReduce.top_k_chunked(density=0.25), 64, 160)],
)
def test_omnireduce_sums_the_blocks_of_most_energy(method, columns, blocks):
    """And memory holds all others whole. Energies travel in bf16: 3% may change places."""
    x = draw(0, 8, blocks, columns)
    (found,), state = steps_of(memory(method), x, 1)
    energy = energies(x, columns).sum(axis=0)
    sent = np.any(blocks_of(found, columns) != 0, axis=1)
    count = math.ceil(method.density * blocks)
    assert sent.sum() == count
    limit = np.sort(energy)[-count]
    assert np.all(sent[energy > 1.03 * limit]) and not np.any(sent[energy < limit / 1.03])
    check_sum(found, x, np.repeat(sent, columns))
    left = blocks_of(state[0].residual, columns)
    np.testing.assert_array_equal(left[:, ~sent], blocks_of(x, columns)[:, ~sent])


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_omnireduce_sends_the_union_first(fraction):
    """A union that is too small leaves room for others, one that is too large loses its least."""
    x, method = draw(5, 8, 200), small(OmniReduce(select="union", density=0.3))
    union, energy = union_of(x, fraction), energies(x).sum(axis=0)
    found, _ = stepper(method)(x, KEY, with_fraction(method, x, fraction))
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 60
    assert np.all(sent[union]) if union.sum() < 60 else np.all(union[sent])
    contested = ~union if union.sum() < 60 else union
    assert np.min(energy[contested & sent]) > np.max(energy[contested & ~sent]) / 1.03
    check_sum(np.asarray(found[0], np.float64), x, np.repeat(sent, BLOCK))


@pytest.mark.parametrize("from_above", [False, True])
def test_omnireduce_settles_where_the_union_has_the_density(from_above):
    """Independent workers: at the root of 1 - (1 - k)^8 = 1/2."""
    n, method = 8, small(OmniReduce(select="union"))
    state, run = (
        with_fraction(method, draw(0, n, 1000), 0.5 if from_above else None),
        stepper(method),
    )
    fractions, ratios = [0.5 if from_above else 0.5 / n], []
    for step in range(60):
        x = draw(step, n, 1000)
        ratios.append(union_of(x, fractions[-1]).mean() / 0.5)
        _, state = run(x, KEY, state)
        assert_replicas_equal(state[0].fraction)
        rule = fractions[-1] * (0.75 + 0.25 / np.clip(ratios[-1], 0.6, 1 / 0.6))
        fractions.append(float(state[0].fraction[0]))
        assert fractions[-1] == pytest.approx(min(0.5, rule), rel=1e-5)
    assert np.mean(ratios[40:]) == pytest.approx(1, abs=0.01)
    assert np.mean(fractions[40:]) == pytest.approx(0.66 / n, rel=0.02)


def test_omnireduce_counts_of_many_workers_do_not_wrap():
    """256 workers that mark the same block: 256 is 0 in uint8."""
    x = np.tile(np.array([[1.0] * BLOCK + [0.5] * BLOCK], np.float32), (256, 1))
    method = small(OmniReduce(select="union"))
    found, _ = stepper(method)(x, KEY, with_fraction(method, x))
    np.testing.assert_array_equal(blocks_of(found[0])[:, 0], [256, 0])


# --- SIDCo ----------------------------------------------------------------------------------------


def kept(numbers, density):
    """The part of the numbers above the threshold, over the density, by number of stages."""
    limits = np.asarray(sidco.thresholds(jnp.asarray(numbers, jnp.float32), density))
    return np.mean(numbers[:, None] >= limits, axis=0) / density


def test_sidco_estimates_laplace_and_normal_numbers():
    """Whatever the number of stages; of normal ones as the stages' own moments say."""
    rng = np.random.default_rng(0)
    for density in (0.5, 0.01):
        np.testing.assert_allclose(kept(np.abs(rng.laplace(size=400_000)), density), 1, atol=0.03)
    expected = []
    for stages in range(1, sidco.MAX_STAGES + 1):
        limit = 0.0
        for part in sidco.parts(0.01, stages):
            height = math.sqrt(2 / math.pi) * math.exp(-(limit**2) / 2)
            limit -= (height / math.erfc(limit / math.sqrt(2)) - limit) * math.log(part)
        expected.append(math.erfc(limit / math.sqrt(2)) / 0.01)
    normal = np.abs(rng.standard_normal(400_000))
    np.testing.assert_allclose(kept(normal, 0.01), expected, atol=0.05)
    for numbers in ([3.0] * 50, [0.0] * 50, [7.0], [0.0] * 25 + [1.0] * 25):
        x = np.array(numbers, np.float32)  # all are equal, and so all are above
        np.testing.assert_array_equal(sidco.thresholds(jnp.asarray(x), 0.01), x.max())


@pytest.mark.parametrize(("place", "room"), [(0, 3), (4, 1), (4, 6), (9, 10)])
def test_sidco_blocks_go_in_order_from_their_place(place, room):
    above = np.isin(np.arange(10), [1, 4, 5, 8])
    order = np.roll(np.arange(10), -place)
    expected = [*order[above[order]], *order[~above[order]]][:room]
    found = sidco.first_of(jnp.asarray(above), jnp.int32(place), room)
    np.testing.assert_array_equal(found, expected)


def of_norms(seed, scales, blocks=2000, n=4):
    """Blocks whose norms over all workers have a known distribution."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, blocks, BLOCK))
    norm = np.sqrt(np.sum(x**2, axis=(0, 2), keepdims=True))
    scale = {
        "laplace": np.abs(rng.laplace(size=blocks)),
        "normal": np.abs(rng.standard_normal(blocks)),
        "lognormal": np.exp(1.5 * rng.standard_normal(blocks)),
    }[scales]
    return (x / norm * scale[:, None]).reshape(n, -1).astype(np.float32)


def test_sidco_sums_the_blocks_above_the_threshold():
    """And in the room that is left the first others."""
    x, method = of_norms(2, "laplace"), small(of.SIDCo(block_size=BLOCK, density=0.1, headroom=1.5))
    found = np.asarray(vmapped(method, None)(x, KEY), np.float64)
    assert_replicas_equal(found)
    sent = np.any(blocks_of(found[0]) != 0, axis=1)
    assert sent.sum() == 300
    check_sum(found[0], x, np.repeat(sent, BLOCK))
    norms = np.sqrt(energies(x).sum(axis=0))
    limit = np.quantile(norms, 0.9)  # the fit and bf16 norms are within some percent of it
    assert np.all(sent[norms > 1.2 * limit])
    others = np.flatnonzero(sent & (norms < limit / 1.2))
    assert 60 < len(others) < 140
    assert np.mean(sent[: others[-1]]) == 1


def test_sidco_blocks_without_room_are_first_in_the_next_step():
    """Equal blocks are all above the threshold, of which there is room for an eighth."""
    x = np.ones((3, 80 * BLOCK), np.float32) * np.arange(1, 4, dtype=np.float32)[:, None]
    found, state = steps_of(memory(of.SIDCo(block_size=BLOCK, density=0.1, headroom=1.25)), x, 3)
    sent = np.any(blocks_of(found[2]) != 0, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(sent), np.arange(20, 30))
    assert np.all(state[0].inner.place == 30)


@pytest.mark.parametrize(
    ("scales", "density", "settled"),
    [("normal", 0.01, 3), ("lognormal", 0.1, 1), ("laplace", 0.1, 2)],
)
def test_sidco_finds_its_number_of_stages(scales, density, settled):
    """Only at the end of a period, on all workers alike; then about the density is above."""
    method = small(of.SIDCo(block_size=BLOCK, density=density))
    state, run, counts = first_state(method, of_norms(0, scales), 4), stepper(method), []
    for step in range(15):
        before = state[0]
        _, state = run(of_norms(step, scales), KEY, state)
        assert_replicas_equal(state)
        if (step + 1) % sidco.PERIOD:
            assert_same_bits(np.asarray(state[0].stages), np.asarray(before.stages))
            counts.append((state[0].counts - before.counts)[0, before.stages[0] - 1])
    assert state[0].stages[0] == settled
    assert np.mean(counts[-4:]) / (2000 * density) == pytest.approx(1.05, abs=0.25)


# --- PermK ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8])
def test_perm_k_every_coordinate_is_one_workers(n):
    """One of every n neighbours is each worker's, and all shifts occur."""
    rng = np.random.default_rng(n)
    rows = rng.permuted(np.tile(np.arange(-40, 40), (1003, 1)), axis=1)[:, :n]
    x, method = rows.T.astype(np.float32), small(of.PermK())
    found = np.asarray(vmapped(method, None, mean=True)(x, KEY))
    assert_replicas_equal(found)
    owners = np.isclose(found[0], x, rtol=1e-6, atol=1e-6)  # n times and over n
    np.testing.assert_array_equal(owners.sum(axis=0), 1)
    sets = owners[:, : 1003 // n * n].reshape(n, -1, n)
    np.testing.assert_array_equal(sets.sum(axis=2), 1)
    assert np.all(np.abs(owners.mean(axis=1) - 1 / n) < 0.01)
    assert len(np.unique(sets.argmax(axis=2)[0])) == n


# --- ARC-Top-K ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_arc_sums_some_rows_whole(n):
    """In any shape; with all rows in f32 it is exact."""
    shape, density = [((150, 40), 0.2), ((7, 11, 13), 0.5), ((61, 9), 0.03)][n % 3]
    x = draw(n, n, math.prod(shape[:-1]), shape[-1]).reshape(n, *shape)
    (found,), _ = steps_of(small(of.ARCTopK(density=density)), x, 1)
    rows = found.reshape(-1, shape[-1])
    sent = np.any(rows != 0, axis=1)
    assert sent.sum() == np.ceil(density * len(rows))
    check_sum(rows.reshape(-1), x, np.repeat(sent, shape[-1]))
    (found,), _ = steps_of(small(of.ARCTopK(density=1, wire="f32")), x, 1)
    np.testing.assert_allclose(found, total_of(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "low", "high"), [(1, 0.6, 0.87), (20, 0.97, 1.0)])
def test_arc_finds_rows_of_most_energy_as_well_as_its_rank_allows(rank, low, high):
    """Against the best rows, by the mean over keys; at random it would be 0.2."""
    rng = np.random.default_rng(0)
    length = np.exp(rng.standard_normal((150, 1)))
    x = (rng.standard_normal((4, 150, 40)) * length).astype(np.float32)
    method, energy = small(of.ARCTopK(rank=rank)), np.sum(total_of(x) ** 2, axis=1)
    state, shares = first_state(method, x, 4), []
    for i in range(8):
        found = np.asarray(stepper(method)(x, jax.random.key(i), state)[0][0])
        shares.append(energy[np.any(found != 0, axis=1)].sum())
    best = np.sort(energy)[-30:].sum()
    assert low * best < np.mean(shares) < high * best
    assert 0.5 < best / energy.sum() < 0.95


def test_arc_workers_that_cancel_send_what_is_left():
    own = draw(3, 1, 150, 40)[0].reshape(150, 40)
    x = np.array([own, -own])
    x[:, 100:130] = own[100:130]
    (found,), _ = steps_of(small(of.ARCTopK()), x, 1)
    np.testing.assert_array_equal(np.flatnonzero(np.any(found != 0, axis=1)), np.arange(100, 130))


def test_arc_has_a_sketch_for_every_step():
    x, method = draw(8, 3, 150, 40, spread=0.1).reshape(3, 150, 40), small(of.ARCTopK())
    (first, second), _ = steps_of(method, x, 2)
    assert np.mean(first != second) > 0.1


# --- PowerSGD -------------------------------------------------------------------------------------

EXACT = functools.partial(of.PowerSGD, wire="f32")


def of_rank(rank, n, shape=(60, 33), seed=0):
    """f32[n, *shape] of distinct workers, whose sum has that rank."""
    rng = np.random.default_rng(seed)
    total = rng.standard_normal((math.prod(shape[:-1]), rank)) @ rng.standard_normal(
        (rank, shape[-1])
    )
    x = rng.standard_normal((n, *shape))
    return jnp.asarray(x - x.mean(axis=0) + total.reshape(shape) / n, jnp.float32)


@pytest.mark.parametrize("n", [2, 4, 5, 6])
def test_powersgd_finds_a_sum_of_low_rank_at_once(n):
    """With bf16 once the factor is warm: one at random has P's columns nearly parallel.

    After zeros the iteration starts again, where a factor of zeros would stay one for ever.
    """
    rank, shape = 1 + n % 4, [(60, 33), (4, 11, 25), (17, 90)][n % 3]
    x = of_rank(rank, n, shape)
    method = memory(EXACT(rank=rank))
    found, _ = steps_of(method, x, 2)
    assert max(relative_error(total, total_of(x)) for total in found) < 1e-9
    (low, warm), _ = steps_of(small(of.PowerSGD(rank=rank)), x, 2)
    assert 1e-7 < relative_error(warm, total_of(x)) < 1e-3
    assert relative_error(low, total_of(x)) < 0.1
    (zeros,), state = steps_of(method, 0 * x, 1)
    np.testing.assert_array_equal(zeros, 0)
    again, _ = stepper(method)(x, KEY, state)
    assert relative_error(again[0], total_of(x)) < 1e-9


def test_powersgd_warm_starts_find_the_best_matrix_of_the_rank():
    """Which a single step from a factor at random does not."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 60, 33))
    u, _, v = np.linalg.svd(x.sum(axis=0), full_matrices=False)
    x = jnp.asarray(x - x.mean(axis=0) + (u * 0.7 ** np.arange(33)) @ v / 4, jnp.float32)
    found, _ = steps_of(small(EXACT(rank=3)), x, 12)
    first, *_, last = (relative_error(result, total_of(x)) for result in found)
    values = np.linalg.svd(total_of(x), compute_uv=False) ** 2
    best = values[3:].sum() / values.sum()
    assert first > 1.2 * best
    assert best * (1 - 1e-5) < last < 1.01 * best


def test_powersgd_a_rank_that_was_missing_comes_back():
    """After gradients of rank 1 the other columns of the factor still look elsewhere."""
    method, x = small(EXACT(rank=3)), of_rank(3, 2, seed=4)
    _, state = steps_of(method, of_rank(1, 2, seed=3), 5)
    factor = np.asarray(state[0].factor[0], np.float64)
    np.testing.assert_allclose(factor.T @ factor, np.eye(3), atol=1e-5)
    found, _ = stepper(method)(x, KEY, state)
    assert relative_error(found[0], total_of(x)) < 1e-8


def test_powersgd_columns_become_orthonormal_and_dependent_ones_zero_or_others():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 5)).astype(np.float32)
    a[:, 1] = 0
    a[:, 3] = 1e-4 * a[:, 2] - 3 * a[:, 0]  # of the span of those before it
    a[:, 4] *= 1e-25
    found = np.asarray(orthonormal(jnp.asarray(a)), np.float64)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 0, 1, 0, 1]), atol=2e-6)
    for column in (0, 2, 4):
        own = a[:, column] / np.max(np.abs(a[:, column]))
        assert np.linalg.norm(own - found @ (found.T @ own)) < 1e-5 * np.linalg.norm(own)
    other = jnp.asarray(rng.standard_normal((50, 5)), jnp.float32)
    found = np.asarray(orthonormal(jnp.asarray(a), other), np.float64)
    np.testing.assert_allclose(found.T @ found, np.eye(5), atol=2e-6)


@pytest.mark.parametrize("method", [of.PowerSGD(rank=2, wire="f32"), of.ARCTopK(), of.PermK()])
def test_without_a_key_and_a_state_draws_are_those_of_the_gradients(method):
    x = draw(8, 3, 60, 32, spread=0.1).reshape(3, 60, 32)
    run = jax.jit(jax.vmap(lambda x: dq.psum(x, "data", method=small(method)), axis_name="data"))
    first, again = run(x), run(x)
    assert_replicas_equal(first)
    assert_same_bits(first, again)


SENDERS = {
    "clt-k": of.CLTK(chunk_size=BLOCK, density=0.25),
    "omnireduce": OmniReduce(density=0.3),
    "omnireduce, union": OmniReduce(density=0.3, select="union"),
    "sidco": of.SIDCo(block_size=BLOCK, density=0.3),
    "arc top-k": of.ARCTopK(density=0.3),
    "powersgd": of.PowerSGD(rank=3, wire="f32"),
    "perm-k": of.PermK(),
}


@pytest.mark.parametrize("workers", ["identical", "disjoint"])
@pytest.mark.parametrize("name", SENDERS)
def test_identical_and_disjoint_workers(name, workers):
    """Rows of a matrix of rank 3 are of all workers, or of one worker each."""
    n, (rows, columns) = 4, (48, BLOCK)
    x = np.tile(of_rank(3, 1, (rows, columns)), (n, 1, 1))
    if workers == "disjoint":
        x *= (np.arange(rows) % n == np.arange(n)[:, None])[..., None]
    (found, *_), _ = steps_of(small(SENDERS[name]), jnp.asarray(x), 2)
    sent, exact = found != 0, total_of(x)
    if name == "perm-k" and workers == "disjoint":  # a coordinate is sent n times or not at all
        exact = n * exact
    rest = 1e-5 * np.abs(exact).max() if name == "powersgd" else 2.0**-8 * np.abs(exact)
    assert np.all((np.abs(found - exact) <= rest)[sent])
    if workers == "identical":
        whole = name in ("powersgd", "perm-k")
        assert np.all(sent) if whole else 0.2 < np.mean(sent) < 0.5
    else:
        assert 0.05 < np.mean(sent) <= 1


# --- What is sent and what is refused -------------------------------------------------------------

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("method", "shape", "n", "bits"),
    [
        (of.CLTK(), (SIZE,), 8, 24 / 64),
        (of.CLTK(density=0.1, chunk_size=64), (SIZE,), 8, 24 * 7 / 64),
        (of.OmniReduce(), (SIZE,), 8, 16 * 0.5 + 16 / 256),
        (of.OmniReduce(density=0.25, block_size=128), (SIZE,), 8, 16 * 0.25 + 16 / 128),
        (of.OmniReduce(select="union"), (SIZE,), 8, 16 * 0.5 + (16 + 8) / 256),
        (of.OmniReduce(select="union"), (SIZE,), 256, 16 * 0.5 + (16 + 32) / 256),
        (of.OmniReduce.top_k_chunked(1 / 16), (SIZE,), 8, 16 / 16 + 16 / 64),
        (of.SIDCo(density=0.5, headroom=3, block_size=256), (SIZE,), 8, 16 + 16 / 256),
        (of.ARCTopK(density=0.25), (1024, 512), 8, 16 * (0.25 + 4 / 512)),
        (of.ARCTopK(density=0.5, rank=8, wire="f32"), (1024, 512), 8, 32 * 0.5 + 16 * 8 / 512),
        (of.PowerSGD(), (1024, 4096), 8, 16 * 4 * (1 / 1024 + 1 / 4096)),
        (of.PowerSGD(rank=8, wire="f32"), (1024, 4096), 8, 32 * 8 * (1 / 1024 + 1 / 4096)),
        (of.PermK(), (SIZE,), 8, 8),
    ],
)
def test_bits_per_coordinate(method, shape, n, bits):
    """Over 2 (n - 1) / n, as of a ring all-reduce."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    told = dq.explain(leaf, n, method=method, verbose=False)
    assert told.bits_per_coord == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (of.CLTK, {"density": 0}, "density=0 must be above 0 and at most 1"),
        (of.CLTK, {"chunk_size": 257}, "chunk_size=257 must be an integer, 1 to 256"),
        (of.OmniReduce, {"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        (of.OmniReduce, {"block_size": 0}, "block_size=0 must be a positive integer"),
        (of.OmniReduce, {"select": "random"}, "select='random'; expected one of"),
        (of.SIDCo, {"density": 0}, "density=0 must be above 0 and at most 1"),
        (of.SIDCo, {"headroom": math.nan}, "headroom=nan must be at least 1"),
        (of.SIDCo, {"block_size": 1.5}, "block_size=1.5; expected int"),
        (of.ARCTopK, {"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
        (of.ARCTopK, {"rank": 0}, "rank=0 must be a positive integer"),
        (of.ARCTopK, {"wire": "fp8"}, "wire='fp8'; expected one of"),
        (of.PowerSGD, {"rank": 2.0}, "rank=2.0; expected int, such as rank=4"),
        (of.PowerSGD, {"rank": 0}, "rank=0 must be a positive integer"),
        (of.PowerSGD, {"wire": "f16"}, "wire='f16'; expected one of"),
    ],
)
def test_bad_fields(method, fields, message):
    with pytest.raises(ValueError, match=message):
        method(**fields)
