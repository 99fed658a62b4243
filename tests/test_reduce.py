"""`dq.reduce`: states and metrics; `test_error_feedback` has what memories promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal, assert_same_bits, relative_error
from cases import CHEAP, daily, over, small, vmapped
from jax.sharding import PartitionSpec as P
from workers import OnHost, auto_mesh, gradient, mesh_of

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression

N, SIZE = 4, 128 * 256 - 30
KEY, W = jax.random.key(0), jnp.zeros(SIZE)
ROUTES = {"ring": dq.Ring(unroll_up_to=1), "direct": dq.Direct()}


@functools.cache
def reducer(method, topology, **options):
    """jit of (tree with leading worker axis, key, state) -> what every worker gets."""

    def one(tree, key, state):
        return dq.reduce(
            tree, "data", compression=over(topology, method), key=key, state=state, **options
        )

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None, 0), axis_name="data")))


class TestMetrics:
    WITH_METRICS = [
        (dq.Ring(unroll_up_to=1), small(dq.DynamiQ())),
        (dq.Butterfly(), small(dq.DynamiQ(floor=None, format=dq.Format(levels="piecewise")))),
        (dq.Direct(), small(dq.DynamiQ(bits=4))),
    ]

    @pytest.mark.parametrize(
        ("topology", "method"),
        daily(WITH_METRICS, WITH_METRICS[-1:]),
        ids=["ring", "butterfly", "direct"],
    )
    def test_they_say_what_happened(self, topology, method):
        size = 96 * 2048
        x = jax.random.normal(KEY, (N, size)) * jnp.repeat(jnp.exp(jnp.arange(96) / 20), 2048)[None]
        tree = {"w": x.at[2, 7].set(jnp.inf), "b": jnp.ones((N, 3), jnp.int32)}
        found = reducer(method, topology, op="mean", metrics=True)(tree, KEY, None)
        assert found.state is None
        assert_replicas_equal(found)
        metrics = jax.tree.map(lambda m: np.asarray(m[0]), found.metrics)
        good = np.arange(size) >= 256
        lost = relative_error(found.tree["w"][0][good], np.mean(x[:, good], axis=0))
        assert metrics.vnmse == pytest.approx(lost, rel=0.25)
        assert metrics.nonfinite == 256
        promised = dq.explain(
            jax.tree.map(lambda v: v[0], tree),
            N,
            compression=over(topology, method),
            verbose=False,
        )
        assert metrics.wire_bytes == pytest.approx(promised.wire_bytes)
        assert metrics.bits_per_coord == pytest.approx(promised.bits_per_coord)
        layout = method.method.layout(size, N, topology)
        assert np.sum(metrics.widths) == pytest.approx(1)
        sent = {w for w in range(17) if metrics.widths[w] > 0}
        assert sent <= set(layout.fmt.widths)
        words = sum(metrics.widths[w] * layout.fmt.tile_words(w) for w in sent)
        payloads = zip(layout.payload_words, layout.payloads_sent, strict=True)
        room = sum(w * s for w, s in payloads) / sum(layout.payloads_sent) / layout.chunk_tiles
        assert 0.97 * room < words <= room

    def test_they_change_nothing_and_cost_nothing_where_they_are_off(self):
        method, x = CHEAP, gradient(3, N, SIZE)
        on, off = (
            reducer(method, ROUTES["direct"], op="sum", metrics=m)(x, KEY, None)
            for m in (True, False)
        )
        assert_same_bits(on.tree, off.tree)
        assert off.metrics is None
        assert_same_bits(vmapped(method, ROUTES["direct"])(x, KEY), off.tree)

    @pytest.mark.release
    def test_means_that_travel_apart_do_not_count_as_error(self):
        x = jax.random.normal(KEY, (N, 96 * 2048)) + 10
        method = small(dq.DynamiQ(format=dq.Format(subtract_mean=True)))
        found = reducer(method, ROUTES["direct"], op="mean", metrics=True)(x, KEY, None)
        lost = relative_error(found.tree[0], np.mean(np.asarray(x, np.float64), axis=0))
        assert 0.5 < found.metrics.vnmse[0] / lost < 2

    @pytest.mark.parametrize("scale", daily([1e17, 1e-21, 0, np.nan], [1e17, 0]))
    def test_what_f32_cannot_square_is_no_perfect_result(self, scale):
        x = scale * jax.random.normal(KEY, (N, SIZE))
        run = reducer(small(dq.DynamiQ()), ROUTES["direct"], op="mean", metrics=True)
        metrics = run(x, KEY, None).metrics
        assert metrics.vnmse[0] == 0 if scale == 0 else np.isnan(metrics.vnmse[0])
        assert metrics.nonfinite[0] == (SIZE if np.isnan(scale) else 0)

    def test_of_one_worker(self):
        x = jnp.ones((1, SIZE)).at[0, 3].set(jnp.nan)
        found = reducer(CHEAP, None, op="mean", metrics=True)(x, KEY, None)
        assert (found.metrics.vnmse[0], found.metrics.nonfinite[0]) == (0, 1)

    def test_methods_that_cannot_say_say_nan(self):
        x = gradient(3, N, SIZE).at[0, 0].set(jnp.nan)
        method = small(dq.contrib.MXFP8())
        found = reducer(method, ROUTES["direct"], op="sum", metrics=True)(x, KEY, None)
        metrics = jax.tree.map(lambda m: np.asarray(m[0]), found.metrics)
        assert np.isnan(metrics.vnmse)
        assert metrics.nonfinite == 32
        np.testing.assert_array_equal(metrics.widths, 0)

    @pytest.mark.release
    def test_of_a_hierarchy_and_under_jaxs_own_check(self):
        """Scalars of all slices; JAX counts them as replicated."""
        mesh = mesh_of(2, 2, names=("node", "gpu"))
        x, topology = gradient(4, 4, 96 * 1024), dq.Hierarchical(outer=dq.Direct())
        method = small(dq.DynamiQ())

        def one(x):
            options = {"op": "sum", "compression": over(topology, method), "metrics": True}
            return dq.reduce(x[0], ("node", "gpu"), **options)[::2]

        mapped = jax.shard_map(one, mesh=mesh, in_specs=P(("node", "gpu")), out_specs=P())
        total, metrics = jax.jit(mapped)(x)
        lost = relative_error(total, np.sum(np.asarray(x, np.float64), axis=0))
        assert 0.5 < metrics.vnmse / lost < 2
        assert np.sum(metrics.widths) == pytest.approx(1)


def test_unknown_operations_and_memory_inside_of_hosts_are_refused():
    with pytest.raises(ValueError, match="op='max'; expected one of"):
        jax.vmap(lambda x: dq.reduce(x, "data", op="max"), axis_name="data")(jnp.ones((2, 9)))
    with pytest.raises(NotImplementedError, match="pass inner=None"):
        topology = dq.Hierarchical(inner=dq.Direct())
        over(topology, dq.ErrorFeedback(dq.DynamiQ())).init_state(W, (2, 2))


def test_a_stacked_state_is_every_workers():
    x = jax.ShapeDtypeStruct((200_000,), jnp.float32)
    method = dq.ErrorFeedback(dq.DynamiQ())
    (own,), (all_of,) = (as_compression(method).init_state(x, 3, stacked=s) for s in (False, True))
    assert (own.residual.shape, all_of.residual.shape) == ((200_000,), (3, 200_000))
    mesh = auto_mesh(2)
    assert as_compression(dq.DynamiQ()).init_state(x, mesh.size) == ((),)


def test_states_that_do_not_fit_are_refused_with_both_shapes():
    method, x = small(dq.ErrorFeedback(dq.DynamiQ())), jnp.ones((2, 8192))
    init, thc = method.init_state, small(dq.ErrorFeedback(dq.contrib.THC()))
    for state in (init(x[0, 300:], 2), init(x[0], 2, stacked=True), thc.init_state(x[0], 2)):
        one = functools.partial(dq.reduce, axis_name="data", compression=method, state=state)
        with pytest.raises(ValueError, match=r"state has leaves of shapes .* keeps \[\(8192,\)\]"):
            jax.vmap(one, axis_name="data")(x)
    options = {"mesh": auto_mesh(2), "axis_name": "data", "compression": method}
    step = dq.value_and_grad(lambda w, x: jnp.sum(w * x[0]), **options)
    with pytest.raises(ValueError, match=r"shape \(3, .*leading axis .* 2 workers.*stacked=True"):
        step(x[0], x, state=(jnp.zeros((3, 8192)),))
