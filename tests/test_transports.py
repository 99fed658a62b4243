"""Payloads mean the same however they move: by all-to-all and all-gather, or by ppermutes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, daily, gradient, small
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.core import xla
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.request.compression import as_compression
from dynamiq_jax.topologies import steps_of
from dynamiq_jax.topologies.base import permuted

SIZE = 3000
TOPOLOGIES = [dq.Direct, dq.Ring, dq.Butterfly]
STREAMS = {"streams": 2}


def mesh_of(n):
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def program(reduce, n, out_specs):
    """``reduce`` of one row for each worker, under ``check_vma=True``."""
    mapped = jax.shard_map(
        lambda x: reduce(x[0]), mesh=mesh_of(n), in_specs=P("data"), out_specs=out_specs
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_step_to_all_becomes_permutations_of_the_same_encodings(n):
    topology = dq.Direct()

    def sent(schedule):
        found = set()
        for step in steps_of(schedule):
            for worker in range(n):
                for owner in np.ravel(step.chunks(np.full(1, worker))).tolist():
                    to = owner if step.to is None else int(step.to(worker))
                    if owner != worker:
                        found.add((worker, owner, step.stage, int(step.slot(worker)), to))
        return found

    schedule = topology.schedule(n)
    permutations = permuted(schedule, n)
    assert sent(permutations) == sent(schedule)
    assert all(step.to is not None for step in steps_of(permutations))
    ring = dq.Ring().schedule(n)
    assert permuted(ring, n) == ring


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", daily([2, 4], [4]))
def test_permutes_bring_exact_sums_to_all(topology, n):
    x = jax.random.randint(jax.random.key(n), (n, SIZE), -99, 99).astype(jnp.float32)
    route = topology(transport="permutes", **STREAMS)

    def reduce(x):
        return dq.psum(x, "data", method=small(dq.F32()), topology=route)

    np.testing.assert_array_equal(program(reduce, n, P())(x), x.sum(axis=0))


def test_permutes_bring_sums_of_groups_and_of_what_is_mapped_outside():
    n, route = 4, dq.Direct(transport="permutes")
    x = jax.random.randint(jax.random.key(0), (n, 3, SIZE), -99, 99).astype(jnp.float32)

    def reduce(x, groups=None):
        return dq.psum(x, "data", method=small(dq.F32()), topology=route, axis_index_groups=groups)

    summed = jax.vmap(program(reduce, n, P()), in_axes=1)(x)
    np.testing.assert_array_equal(summed, x.sum(axis=0))
    in_pairs = jax.pmap(lambda x: reduce(x, [[0, 2], [3, 1]]), "data", devices=jax.devices()[:n])
    even, odd = x[::2].sum(axis=0), x[1::2].sum(axis=0)
    np.testing.assert_array_equal(in_pairs(x), jnp.stack([even, odd, even, odd]))


def test_dynamiq_by_permutes_is_the_same_on_all_workers_and_as_accurate():
    n, x = 3, gradient(5, 3, 2**16)
    results = {}
    for transport in ("collectives", "permutes"):
        route = dq.Direct(transport=transport, streams=2)

        def reduce(x, route=route):
            return dq.psum(x, "data", method=CHEAP, topology=route)

        replicas = program(lambda x: reduce(x)[None], n, P("data"))(x)
        np.testing.assert_array_equal(replicas, np.broadcast_to(replicas[:1], replicas.shape))
        results[transport] = float(vnmse(replicas[0], x.sum(axis=0)))
    # Sums are added up in another order, so that a few codes may differ by one.
    assert results["permutes"] == pytest.approx(results["collectives"], rel=1e-2)


STATES = [
    small(dq.ErrorFeedback(CHEAP.method)),  # of each worker
    small(dq.comparators.MXFP4(sum="shared-scale")),  # the same on all
]


@pytest.mark.parametrize("method", daily(STATES, STATES[:1]), ids=["each", "same"])
def test_states_and_metrics_do_not_depend_on_the_transport(method):
    n, x, found = 3, gradient(5, 3, SIZE), {}
    for transport in ("collectives", "permutes"):
        options = {"method": method, "topology": dq.Direct(transport=transport, **STREAMS)}
        state = as_compression(**options).init_state(jnp.zeros(SIZE), n, stacked=True)

        def one(x, state, options=options):
            state = jax.tree.map(lambda s: s[0], state)
            done = dq.reduce(
                x[0], "data", state=state, metrics=True, key=jax.random.key(1), **options
            )
            kept = done.tree, done.state
            own = jax.tree.map(lambda s: Axis(("data",)).to_varying(s)[None], kept)
            return own, done.metrics

        specs = {"in_specs": P("data"), "out_specs": (P("data"), P())}
        found[transport] = jax.jit(jax.shard_map(one, mesh=mesh_of(n), **specs))(x, state)
    for a, b in zip(*(jax.tree.leaves(tree) for tree in found.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_payloads_travel_by_permutes_alone(topology):
    n = 4
    method, route = small(dq.F32()), topology(transport="permutes", **STREAMS)
    streams = route.chunks_per_worker(SIZE)
    lowered = program(lambda x: dq.psum(x, "data", method=method, topology=route), n, P()).lower(
        jnp.zeros((n, SIZE))
    )
    text = lowered.as_text()
    hops = sum(1 for _ in steps_of(permuted(route.schedule(n), n)))
    assert text.count("collective_permute") == streams * (hops + n - 1)
    assert "all_to_all" not in text and "all_gather" not in text


def test_slices_of_a_psum_scatter_travel_by_permutes_too():
    n, x = 4, jax.random.randint(jax.random.key(0), (4, 4 * SIZE), -99, 99).astype(jnp.float32)
    route = dq.Direct(transport="permutes")
    method = small(dq.DynamiQ(widths=(16,), bits=18))

    def scatter(x):
        return dq.psum_scatter(x, "data", tiled=True, method=method, topology=route)

    run = program(scatter, n, P("data"))
    assert "all_to_all" not in run.lower(x).as_text()
    np.testing.assert_allclose(run(x), x.sum(axis=0), rtol=2**-7, atol=2)


def test_the_transport_is_chosen_by_what_is_known_of_copy_engines(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 9)
    tree = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    plain = dq.explain(tree, 4, verbose=False)
    assert "transport='collectives'" in plain.topology
    assert "copy engines" not in plain.reason
    monkeypatch.setattr("dynamiq_jax.topologies.choice.copy_engines", lambda: "it is said so")
    found = dq.explain(tree, 4, verbose=False)
    assert "transport='permutes'" in found.topology
    assert "copy engines, since it is said so" in found.reason
    eight, more = (dq.explain(tree, n, topology=dq.Direct(), verbose=False) for n in (8, 9))
    assert "transport='permutes'" in eight.topology
    assert "transport='collectives'" in more.topology
    why = "9 workers are more than 8, and every copy costs about 15 µs"
    assert more.reason == f"as passed; by collectives, since {why}"
    route = dq.Hierarchical(outer=dq.Ring(), inner=dq.Direct(transport="collectives"))
    both = dq.explain(tree, (2, 4), topology=route, verbose=False).topology
    assert both.count("transport='permutes'") == both.count("transport='collectives'") == 1


@pytest.fixture
def peers(monkeypatch):
    """As on a machine with several GPUs, whose XLA knows the options."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(xla, "_is_known", lambda name, value: True)
    for name in ("NCCL_P2P_DISABLE", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_options_are_empty_where_they_do_not_apply(peers):
    assert xla.copy_engines() is None
    with peers.context() as other:
        other.setattr(jax, "default_backend", lambda: "cpu")
        assert xla.compiler_options() == {}
    with peers.context() as other:
        other.setattr(jax, "device_count", lambda: 1)
        assert xla.compiler_options() == {}
    with peers.context() as other:
        other.setattr(xla, "_is_known", lambda name, value: False)
        assert xla.compiler_options() == {}
    apart = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**15}
    early = apart | {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    }
    with peers.context() as other:
        other.setenv("NCCL_P2P_DISABLE", "1")
        assert xla.compiler_options() == early
    with peers.context() as other:
        other.setattr(jax, "process_count", lambda: 2)
        assert xla.compiler_options() == apart
    with peers.context() as other:
        other.setattr(xla, "_is_known", lambda name, value: "permute_mode" not in name)
        assert xla.compiler_options() == early
    assert xla.copy_engines() is None


def test_copy_engines_serve_in_programs_with_the_option_alone(peers):
    options = xla.compiler_options()
    assert options["xla_gpu_collective_permute_mode"] == "COLLECTIVES_PEER_MEMORY"
    assert xla.copy_engines() is None
    with xla.compiled_by(options):
        assert xla.copy_engines() == "dq.jit compiles the program"
        with xla.compiled_by({}):
            assert xla.copy_engines() is None
    with xla.compiled_by(options), peers.context() as other:
        other.setattr(jax, "process_count", lambda: 2)
        assert xla.copy_engines() is None


def test_xla_flags_say_so_too(peers):
    peers.setenv("XLA_FLAGS", "--xla_gpu_collective_permute_mode=peer")
    assert "XLA_FLAGS" in str(xla.copy_engines())


def test_options_that_xla_does_not_know_are_noticed():
    assert not xla._is_known("xla_gpu_no_such_option", 1)
    assert xla._is_known("xla_cpu_enable_fast_math", False)


def test_unknown_transports_are_refused():
    for topology in TOPOLOGIES:
        with pytest.raises(ValueError, match="transport='nccl'; expected one of 'collec"):
            topology(transport="nccl")


def test_what_jit_traces_knows_of_its_options(peers):
    peers.setattr(xla, "compiler_options", lambda: {xla._FLAG: "COLLECTIVES_PEER_MEMORY"})
    found = []

    def step(x, *, number):
        found.append((number, xla.copy_engines()))
        return x

    own = xla.jit(step, static_argnames="number")
    own.trace(1.0, number=1)
    jax.jit(step, static_argnames="number").trace(1.0, number=2)
    assert found == [(1, "dq.jit compiles the program"), (2, None)]
