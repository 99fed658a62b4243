"""Floors: what every super-group gets at least, what that promises, what is said if it cannot."""

import dataclasses
import functools
import itertools
import math
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, daily, over, small
from hypothesis import strategies as st
from workers import plan_widths

import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq.codec import make_plan, upgrades_of
from dynamiq_jax.methods.dynamiq.layout import width_upgrades
from dynamiq_jax.topologies import Stage
from pallas_kernels import TILE_ROWS, WireFormat, distortion, reference, unpack_tiles

NAMED = {"ring": dq.Ring(), "butterfly": dq.Butterfly(), "direct": dq.Direct()}
BITS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0, 12.0)
widened = jax.jit(reference.widened, static_argnums=(2, 3))


def bits_of(fmt, width):
    return 32 * fmt.tile_words(width) / (TILE_ROWS * fmt.super_group_size)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("bits", BITS)
def test_floors_fit_the_budget_and_no_other_pair_of_neighbours_errs_less(name, n, bits):
    stages = NAMED[name].stages(n)
    found = dq.DynamiQ(bits=bits).allocation(n, NAMED[name])
    fmt = dataclasses.replace(found.fmt, widths=tuple(range(2, 15)))

    def spent(floors):
        return sum(s.sent * bits_of(fmt, w) for s, w in zip(stages, floors, strict=True))

    def error(floors):
        own = (s.error * distortion(fmt, w) for s, w in zip(stages, floors, strict=True))
        return math.prod(1 + e for e in own) - 1  # a later stage encodes the errors of earlier ones

    budget = (bits - 16 / 256) * sum(s.sent for s in stages)
    assert spent(found.floors) <= budget + 1e-6
    assert found.relative_error == pytest.approx(error(found.floors))
    least = min(found.floors)
    pairs = itertools.product((least, min(least + 1, 14)), repeat=len(stages))
    best = min(error(floors) for floors in pairs if spent(floors) <= budget)
    assert found.relative_error <= 1.2 * best
    if len(stages) == 2:
        assert found.relative_error == pytest.approx(best)
    # Not even one more bit for all would fit.
    assert spent([w + 1 for w in (least,) * len(stages)]) > budget or least == 14


def test_floors_by_hand():
    """5 bits less 1/16 of statistics and 5/16 of scales are 4.625 of code, 9.25 for two stages."""
    floors = {
        (5.0, "direct"): (4, 5), (5.0, "ring"): (5, 4), (4.0, "direct"): (3, 4),
        (4.0, "ring"): (4, 3), (3.5, "direct"): (3, 3), (3.0, "direct"): (2, 3),
        (4.375, "direct"): (4, 4), (4.374, "direct"): (3, 4), (8.0, "ring"): (8, 7),
        (5.0, "butterfly"): (4, 4, 5, 5),
    }  # fmt: skip
    for (bits, name), expected in floors.items():
        assert dq.DynamiQ(bits=bits).allocation(8, NAMED[name]).floors == expected
    assert dq.DynamiQ(bits=5).allocation(8, dq.Direct(), "reduce_scatter").floors == (4,)
    assert dq.DynamiQ(bits=8).allocation(8, dq.Direct(), "all_gather").floors == (7,)
    assert dq.DynamiQ(floor=3).allocation(8, dq.Direct()).floors == (3, 3)
    assert dq.DynamiQ(floor=None).allocation(8, dq.Direct()).floors == (2, 2)
    assert dq.DynamiQ().allocation(8, dq.Direct(balance=0.0)).floors == (4, 4)
    assert dq.DynamiQ().allocation(8, dq.Direct(balance=2.0)).floors == (5, 3)


def test_default_widths_follow_the_floors():
    widths = {5: (3, 4, 5, 6, 8, 10), 4: (2, 3, 4, 6, 8, 10), 3: (2, 3, 4, 6, 8, 10),
              8: (6, 7, 8, 10, 12), 14: (12, 13, 14)}  # fmt: skip
    for bits, expected in widths.items():
        assert dq.DynamiQ(bits=bits).allocation(8, dq.Direct()).fmt.widths == expected
    even = tuple(range(2, 15, 2))
    assert dq.DynamiQ(floor=None).allocation(8, dq.Ring()).fmt.widths == even
    geometric = dq.DynamiQ(bits=12, format=dq.Format(levels="geometric")).allocation(8, dq.Ring())
    assert max(geometric.fmt.widths) == 10
    given = dq.DynamiQ(widths=(2, 4, 8)).allocation(8, dq.Direct())
    assert given.fmt.widths == (2, 4, 8)
    assert given.floors == (4, 4)  # 8 for one of them would take 4 bits more


def test_without_a_floor_squared_error_decides():
    """Plans equal those of the even widths to 10, the default before there were floors."""
    for widths in ((2, 4, 6, 8, 10), None):
        method = dq.DynamiQ(widths=widths, floor=None)
        assert method.layout(10**6, 8, dq.Ring()).payload_words == (19916, 18656)
        even = method.layout(10**6, 8, dq.Direct(balance=0.0))
        assert even.payload_words == (19284, 19284)


def test_the_way_leads_through_a_floor_that_the_hull_leaves_out():
    fmt = WireFormat(widths=(0, 1, 2, 4, 8))
    for floor, expected in ((None, [4, 8]), (0, [4, 8]), (2, [2, 4, 8])):
        assert [u.width for u in width_upgrades(fmt, floor)[1]] == expected


PADDED = [(16, 3.5), (16, 5.0), (3, 3.5), (0, 5.0)]


@pytest.mark.parametrize(("full_tiles", "bits"), daily(PADDED, [(16, 3.5), (0, 5.0)]))
def test_padding_takes_nothing_from_the_floor(full_tiles, bits):
    """The payload grows instead: by a few percent of a chunk of 17 tiles, the least by default."""
    rows = 8 * (full_tiles * TILE_ROWS + 1)  # the last tile of each of 8 chunks holds one
    layout = dq.DynamiQ(bits=bits).layout(rows * 256, 8, dq.Direct(streams=1))

    @jax.jit
    def widths(energy):
        plan = make_plan(energy, jnp.uint32(0), layout)
        return [plan_widths(plan, stage)[:rows] for stage in range(len(layout.floors))]

    energy = np.random.default_rng(2).lognormal(0, 4, (1, rows))
    found = widths(jnp.asarray(energy, jnp.bfloat16))
    assert tuple(map(np.min, found)) == layout.floors
    if full_tiles < 16:
        return
    whole = dq.DynamiQ(bits=bits).layout(8 * 16 * TILE_ROWS * 256, 8, dq.Direct(streams=1))
    for grown, own in zip(layout.payload_words, whole.payload_words, strict=True):
        assert own < grown < 1.07 * own


@pytest.mark.parametrize("bits", [3.5, 5.0])
def test_padding_takes_no_width_without_a_floor(bits):
    """Among equal energies every tile has the width that the bits hold for all."""
    method = dq.DynamiQ(bits=bits, floor=None, widths=(2, 3, 4, 5, 6))
    layout = method.layout(8 * 256, 8, dq.Direct(balance=0.0))
    even = max(w for w in layout.fmt.widths if layout.fmt.bits_per_coord(w) <= bits - 1 / 16)
    told = layout.fmt, layout.chunk_tiles, layout.payload_words, layout.floors
    taken, upgrades = upgrades_of(*told)
    stages = widened(jnp.zeros((1, layout.chunk_tiles), jnp.int32), taken, upgrades, 1)
    assert min(unpack_tiles(tiles[0])[1].min() for tiles in stages) == even > min(layout.floors)


DRAWS = {
    "Gaussian": lambda rng, shape: rng.standard_normal(shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "Student": lambda rng, shape: rng.standard_t(3, shape),
}


@pytest.mark.parametrize(("name", "n"), daily(itertools.product(NAMED, (2, 4, 8)), [("direct", 2)]))
def test_what_is_said_of_errors_holds_for_four_distributions(name, n):
    """On average and in the worst of 448 super-groups; an eighth more takes what bits are left."""
    rows, request = 8 * TILE_ROWS * 8, small(dq.DynamiQ(), topology=NAMED[name])

    def one(x, key):
        found = dq.reduce(x, "data", key=key, compression=request, op="sum", metrics=True)
        return found.tree, found.metrics.vnmse

    run = jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))
    said = request.explain(gradient_of(rows), n, verbose=False)
    assert f"about {said.relative_error:.2g}, of the worst up to three times that" in str(said)
    quiet, most = np.arange(rows) % 8 != 0, []
    for draw in DRAWS.values():
        x = draw(np.random.default_rng(n), (n, rows, 256)) * np.where(quiet, 1, 1024)[None, :, None]
        exact = x.sum(axis=0)
        energy, errors, known = np.sum(exact**2, axis=1), [], []
        for i in range(6):
            total, vnmse = run(np.float32(x).reshape(n, -1), jax.random.key(i))
            error = np.asarray(total[0], np.float64).reshape(rows, 256) - exact
            errors.append(np.sum(error**2, axis=1))
            known.append(float(vnmse[0]))
        found = np.mean(errors, axis=0)
        average = found[quiet].sum() / energy[quiet].sum()
        assert 0.7 < average / said.relative_error < 1.4
        most.append(np.max(found[quiet] / energy[quiet]) / said.relative_error)
        assert 0.7 < np.mean(known) / (found.sum() / energy.sum()) < 1.4
    assert max(most) < 3
    if name != "ring":
        assert min(most) > 1  # it is not a bound


def gradient_of(rows):
    return {"w": jax.ShapeDtypeStruct((rows * 256,), jnp.float32)}


@pytest.mark.parametrize(("dither", "most"), [(False, 0.38), (True, 0.124)])
def test_too_few_bits_are_said_with_those_that_are_enough(dither, most):
    method, ring = dq.DynamiQ(bits=3, dither=dither), dq.Ring()
    for topology, n, enough in ((ring, 64, 5), (ring, 8, 3.5), (dq.Direct(), 8, 3.5)):
        request = dq.Compression(method, topology=topology, **SMALL)
        found = request.explain(gradient_of(n * 128), n, verbose=False)
        assert found.relative_error == method.relative_error(n, topology) > most
        advice = found.advice or ""
        assert f"bits=3 over {type(topology).__name__} among {n} workers" in advice
        assert f"is about {found.relative_error:.2g} of its energy" in advice
        instead = "floor=None with dither=False" if dither and n == 64 else "floor=None"
        assert f"pass bits={enough:g}, or {instead} to let" in advice
        held = dataclasses.replace(method, bits=enough)
        assert held.relative_error(n, topology) <= most
        almost = dataclasses.replace(method, bits=enough - 0.25)
        assert almost.relative_error(n, topology) > most
        assert held.advice(n, topology) is None
        assert f"{found.relative_error:.2g}" in str(found)
    if dither:
        free = dataclasses.replace(method, floor=None)
        assert "pass dither=False, or dq.Direct()" in (free.advice(64, ring) or "")
        assert dataclasses.replace(free, dither=False).advice(64, ring) is None
        assert free.advice(16, ring) is None
    fixed = dataclasses.replace(method, floor=2).advice(64, ring) or ""
    assert "pass floor='auto'" in fixed
    assert "wider widths" in (dq.DynamiQ(widths=(2,)).advice(8, ring) or "")
    fine = dq.explain(gradient_of(1024), 8, compression=small(dq.DynamiQ()), verbose=False)
    assert fine.advice is None
    assert fine.relative_error == pytest.approx(0.018, rel=0.05)
    assert (
        dq.explain(gradient_of(1024), 8, compression=dq.BF16(), verbose=False).relative_error
        is None
    )


@pytest.mark.parametrize("collective", ["psum", "all_gather"])
def test_too_few_bits_warn_when_traced(collective):
    def trace(**fields):
        reduce, method = getattr(dq, collective), small(dq.DynamiQ(**fields))
        one = jax.vmap(lambda x: reduce(x, "data", compression=method), axis_name="data")
        jax.eval_shape(one, jax.ShapeDtypeStruct((8, 8, 4096), jnp.float32))

    with pytest.warns(UserWarning, match=r"bits=2\.5 over Direct among 8 workers.*pass bits="):
        trace(bits=2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(bits=2.5, floor=None)
        trace(bits=4)


def test_the_levels_of_a_hierarchy_encode_errors_of_those_before():
    method, outer, direct = dq.DynamiQ(), dq.Ring(), dq.Direct()
    error = method.relative_error(4, outer)
    halves = [method.relative_error(2, direct, c) for c in ("reduce_scatter", "all_gather")]
    every = math.prod(1 + e for e in (error, *halves)) - 1
    for inner, expected in ((None, error), (direct, every)):
        request = small(method, topology=dq.Hierarchical(inner=inner, outer=outer))
        found = request.explain(gradient_of(4096), (4, 2), verbose=False)
        assert found.relative_error == pytest.approx(expected)


SIZES = st.one_of(
    st.integers(1, 2**24),
    st.floats(0, 24).map(lambda exponent: int(2**exponent)),
    st.integers(1, 2**11).map(lambda tiles: 2048 * tiles),
)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


NAMES = st.sampled_from([*NAMED])


@hypothesis.given(
    SIZES, st.integers(2, 16), st.floats(3, 6), NAMES, st.sampled_from(COLLECTIVES), st.booleans()
)
@hypothesis.settings(deadline=None, max_examples=150, derandomize=True, database=None)
def test_payloads_hold_the_floors_of_which_errors_are_said_at_any_size(
    size, n, bits, name, collective, dither
):
    if name == "butterfly":
        n = 1 << n.bit_length() - 1
    method, topology = dq.DynamiQ(bits=bits, dither=dither), NAMED[name]
    stages = (Stage(n - 1, range(1), 1.0),) if collective == "all_gather" else topology.stages(n)
    layout = method.layout(size, n, topology, collective)
    energy = 1.0  # of what the next stage encodes, relative to that without errors
    for stage, words, floor in zip(stages, layout.payload_words, layout.floors, strict=False):
        assert words >= layout.chunk_tiles * layout.fmt.tile_words(floor)
        energy *= 1 + stage.error * distortion(layout.fmt, floor)
    assert method.relative_error(n, topology, collective) == pytest.approx(energy - 1)


@pytest.mark.parametrize("bits", [3.0, 5.0, 8.0])
@pytest.mark.parametrize("n", daily([2, 8, 64], [8]))
def test_buckets_whose_padding_takes_all_that_is_saved_travel_exactly(bits, n):
    """Whatever the limits; bf16 takes 16 bits per coordinate."""
    method = dq.Compression(dq.DynamiQ(bits=bits), **SMALL)
    routes = set()
    for size in (*range(1, 40), 256, 1000, 4000, 2048 * n // 4, 2048 * n // 2, 2048 * n):
        leaf = jax.ShapeDtypeStruct((size,), jnp.float32)
        found = dq.explain(leaf, n, compression=over(dq.Direct(), method), verbose=False)
        (row,) = found.rows
        padded = method.method.wire_bits(size, n, dq.Direct()) / (2 * (n - 1) / n * size)
        if padded < 16:
            assert row.route == "compressed"
            assert row.bits_per_coord == pytest.approx(padded)
        else:
            said = f"exact: bucket of {size} among {n} workers, padded to {padded:.1f} bits"
            assert row.route.startswith(said)
            assert found.relative_error is None
            assert row.bits_per_coord == pytest.approx(32)
        routes.add(row.route.split(":")[0])
    assert routes == {"compressed", "exact"}


def test_padded_slices_and_blocks_travel_exactly_as_well():
    """Bits of psum_scatter, all_gather and all_to_all: the wire has f32 where the padding is."""
    method, n = dq.Compression(dq.DynamiQ(bits=5), **SMALL), 4
    exchange = functools.partial(dq.all_to_all, split_axis=0, concat_axis=0)
    for call, share in ((dq.psum_scatter, 1), (dq.all_gather, n), (exchange, 1)):
        for size, compressed in ((128, False), (4096, True)):
            run = functools.partial(call, axis_name="data", tiled=True, compression=method)
            x = jax.ShapeDtypeStruct((size // share,), jnp.float32)
            text = str(jax.make_jaxpr(run, axis_env=[("data", n)])(x))
            assert ("u32" in text) == compressed, (call, size)


def test_large_leaves_that_padding_keeps_exact_are_warned_of():
    method = dq.Compression(dq.DynamiQ(), min_bucket_bytes=0)
    one = functools.partial(dq.psum, axis_name="data", compression=over(dq.Direct(), method))
    x = jax.ShapeDtypeStruct((65_536,), jnp.float32)
    with pytest.warns(UserWarning, match=r"padded to 19\.\d bits per coordinate >= 16.*fewer wor"):
        jax.make_jaxpr(one, axis_env=[("data", 128)])(x)
