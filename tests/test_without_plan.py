"""Buckets without a plan: even widths, consecutive super-groups, a seed from samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import relative_error
from cases import low, over, vmapped
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import gradient

import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq.codec import even_plan, sampled
from pallas_kernels import unpack_tiles

EVEN = dq.DynamiQ(plan=False)
OVER = dq.Direct(), dq.Ring(), dq.Butterfly()


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 5_000_000),
    bits=st.sampled_from([2.5, 4.0, 4.6, 5.0, 8.0, 17.0]),
    n=st.sampled_from([2, 4, 8]),
    topology=st.sampled_from(OVER),
    collective=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
)
def test_payloads_hold_even_widths(size, bits, n, topology, collective):
    method = dq.DynamiQ(plan=False, bits=bits)
    if collective == "all_gather":
        layout = method.gather_layout(size, n)
    else:
        layout = method.layout(size, n, topology, collective)
    for stage, words in enumerate(layout.payload_words):
        (some, wide), (others, narrow) = layout.widths(stage)
        assert min(some, others) >= 0 and some + others == layout.chunk_tiles
        assert wide >= narrow
        assert {w for count, w in layout.widths(stage) if count} <= {*layout.fmt.widths}
        assert sum(count * layout.fmt.tile_words(w) for count, w in layout.widths(stage)) <= words
    passed = (2 if collective == "all_reduce" else n) * (n - 1) * size / n
    if size * (1 if collective == "all_reduce" else n) > 2**20 * n:
        # Floors may take all bits, and samples come on top: a quarter of a bit in small buckets.
        assert layout.wire_bits <= bits * passed * 1.01 + layout.stats_bits


@pytest.mark.parametrize("bits", [2.5, 4.6, 8.0])
def test_records_follow_one_another(bits):
    layout = dq.DynamiQ(plan=False, bits=bits).layout(300_001, 2, dq.Ring())
    samples = jnp.ones(jax.eval_shape(lambda x: sampled(x, layout), jnp.zeros(300_001)).shape)
    tiles = even_plan(samples, jnp.uint32(0), layout).tiles
    for stage, found in enumerate(tiles):
        widths = np.concatenate([np.full(count, w) for count, w in layout.widths(stage)])
        ends = np.cumsum([layout.fmt.tile_words(w) for w in widths])
        offsets, own = unpack_tiles(np.asarray(found))
        np.testing.assert_array_equal(own, np.broadcast_to(widths, found.shape))
        np.testing.assert_array_equal(offsets, np.broadcast_to([0, *ends[:-1]], found.shape))


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_every_super_group_has_one_place_and_padding_the_last_numbers(collective):
    layout = EVEN.layout(70_001, 4, dq.Direct(), collective)
    x = jnp.arange(layout.rows * 256.0)
    plan = jax.jit(lambda x: even_plan(sampled(x, layout), jnp.uint32(0), layout))(x)
    order = np.asarray(plan.order)
    np.testing.assert_array_equal(np.sort(order.reshape(-1)), np.arange(layout.super_groups))
    shards = order.reshape(layout.shards, -1)
    for shard, numbers in enumerate(shards):
        own = numbers[numbers < layout.rows]
        np.testing.assert_array_equal(own // layout.shard_rows, shard)
        assert len(own) == layout.shard_rows


@pytest.mark.parametrize("topology", OVER)
def test_the_error_is_that_of_the_floors_and_metrics_tell_it(topology):
    n, size = 4, 2**18
    x = jax.random.normal(jax.random.key(0), (n, size))
    options = {"op": "sum", "compression": over(topology, low(EVEN)), "metrics": True}
    run = jax.vmap(lambda x: dq.reduce(x, "data", **options), axis_name="data")
    told = jax.jit(run)(x)
    exact = np.sum(np.asarray(x, np.float64), axis=0)
    error = relative_error(told.tree[0], exact)
    assert 0.5 < error / EVEN.relative_error(n, topology) < 1.5
    assert 0.7 < float(told.metrics.vnmse[0]) / error < 1.4


def test_without_a_key_rounding_follows_the_samples():
    """Coordinates between two samples are rounded anew if a sample changes, and only then."""
    run, x = vmapped(low(EVEN), dq.Direct()), gradient(0, 4, 2**16)
    layout = EVEN.layout(2**16, 4, dq.Direct())
    step = layout.sample_step * layout.super_group_size
    first = np.asarray(run(x, None))
    between = np.asarray(run(x.at[0, 5].add(1e-3), None))
    sample = np.asarray(run(x.at[0, step].multiply(1.5), None))
    apart = np.arange(2**16) // 256 != 0
    np.testing.assert_array_equal(between[:, apart], first[:, apart])
    apart = np.arange(2**16) // 256 != step // 256
    assert np.mean(sample[:, apart] != first[:, apart]) > 0.1


@pytest.mark.parametrize("rows", [2**14, 2**14 + 1, 2**15 + 4])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_layouts_count_the_samples_that_travel(collective, rows):
    n, size = 4, 256 * rows - 3
    if collective == "all_gather":
        layout = EVEN.gather_layout(size, n)
    elif collective == "all_reduce":
        layout = EVEN.layout(size, n, dq.Direct())
    else:
        layout = EVEN.layout(size // n, n, dq.Direct(), collective)
        size = layout.rows * 256  # slices come in super-groups
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    samples = jax.eval_shape(lambda x: sampled(x, layout), x)
    passes = n if collective == "all_gather" else 2  # of (n - 1)/n of all
    assert layout.stats_bits == passes * 16 * samples.size * (n - 1) // n


def test_fast_links_take_no_plan_unless_told(monkeypatch):
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)

    def method(**fields):
        return dq.Compression(dq.DynamiQ(**fields)).route((8,)).method

    assert method() == EVEN
    assert method(plan=True).plan is True
    means = dq.Format(subtract_mean=True)
    assert method(format=means).plan is None
    assert method(widths=(0, 4), floor=None).plan is None
    memory = dq.Compression(dq.ErrorFeedback(dq.DynamiQ())).route((8,)).method
    assert memory.method == EVEN


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": dq.Format(subtract_mean=True)}, "plan=False adds up no means"),
        ({"widths": (0, 4), "floor": None}, r"widths=\(0, 4\) have 0, which sends no NaN"),
    ],
)
def test_what_needs_statistics_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        dq.DynamiQ(plan=False, **fields)
