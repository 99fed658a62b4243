"""The rule by which `topology=None` chooses, and where small buckets travel natively.

Where compression starts to pay is measured, and the library takes what was written.
"""

import functools
import json
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from cases import CHEAP, limits_of, over, small, vmapped
from crossover import FILE, MIB, Point, crossover_bytes, questions, written
from jax.sharding import PartitionSpec as P
from workers import gradient, mesh_of

import dynamiq_jax as dq
from dynamiq_jax.compression import compression as compressing
from dynamiq_jax.compression import shards
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, psum_scatter_bytes, push_bytes
from dynamiq_jax.topologies import links
from dynamiq_jax.topologies import schedules as rule


def filled(topology):
    """Where no copy engines serve."""
    return rule.with_transport(topology, n_workers=2)[0]


def devices(count=8, platform="gpu", kind="NVIDIA H200", domains=1):
    return [
        SimpleNamespace(
            platform=platform,
            device_kind=kind,
            slice_index=i * domains // count,
            local_hardware_id=i,
        )
        for i in range(count)
    ]


@pytest.fixture
def hosts(monkeypatch):
    """Pretends to be one of several processes with the given devices."""

    def pretend(processes, found):
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        monkeypatch.setattr(jax, "devices", lambda: found)
        monkeypatch.setattr(jax, "device_count", lambda: len(found))

    return pretend


@pytest.mark.parametrize(
    ("found", "one_domain"),
    [
        (devices(domains=1), True),
        (devices(domains=2), False),
        (devices(platform="cpu", kind="cpu"), False),
        ([SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")] * 8, False),
    ],
    ids=["one NVLink domain", "two domains", "CPUs", "JAX does not say"],
)
def test_domains_of_several_processes(hosts, found, one_domain):
    hosts(2, found)
    assert links.in_one_domain() == one_domain


@pytest.mark.parametrize(
    ("sizes", "topology", "reason"),
    [
        ((8,), dq.Butterfly(), "8 workers on several hosts are a power of two"),
        ((6,), dq.Ring(), "6 workers on several hosts are not a power of two"),
        ((1, 6), dq.Ring(), "not a power"),
        ((2, 4), dq.Hierarchical(outer=dq.Butterfly()), "fast links"),
        ((2, 3, 4), dq.Hierarchical(outer=dq.Ring()), "several axes"),
        ((2, 4, 3), dq.Hierarchical(outer=dq.Butterfly()), "several axes"),
        ((4, 1, 2), dq.Hierarchical(outer=dq.Butterfly()), "several axes"),
        ((4, 1), dq.Butterfly(), "power of two"),
        ((240,), dq.Ring(), "two axes, hosts first, would take fewer hops and err less"),
        ((30, 8), dq.Hierarchical(outer=dq.Direct()), "30 hosts are too many for a ring"),
    ],
)
def test_several_hosts(hosts, sizes, topology, reason):
    hosts(2, devices(domains=2))
    chosen, why = rule.automatic(sizes)
    assert chosen == topology
    assert reason in why


def test_few_hosts_are_rings_unless_they_are_a_power_of_two():
    found = {n: rule.across_hosts(n) for n in range(1, 300)}
    powers = {2**i for i in range(9)}
    assert {n for n, topology in found.items() if topology == dq.Butterfly()} == powers
    assert {n for n, topology in found.items() if topology == dq.Ring()} == {3, 5, 6, 7}
    assert all(found[n] == dq.Direct() for n in range(9, 300) if n not in powers)


def test_all_of_a_large_nvlink_domain_go_direct(hosts):
    """72 GPUs on 18 hosts that JAX knows to be one domain."""
    hosts(18, devices(72, kind="NVIDIA GB200"))
    found = dq.explain(jax.ShapeDtypeStruct((2**28,), jnp.bfloat16), 72, verbose=False)
    assert found.topology == repr(filled(dq.Direct()))
    assert found.reason.endswith("in one process or NVLink domain, where Direct errs least")
    assert rule.automatic((18, 4))[0] == dq.Direct()
    hosts(18, devices(72, kind="NVIDIA GB200", domains=18))
    assert rule.automatic((18, 4))[0] == dq.Hierarchical(outer=dq.Direct())


@pytest.fixture
def slow(monkeypatch):
    """Links between workers are slow, whatever these are."""
    monkeypatch.setattr(rule, "in_one_domain", lambda: False)


def test_halves_over_several_axes_take_two_levels_and_exchanges_one(slow):
    axes = ("node", "gpu")
    mesh = mesh_of(2, 4, names=axes)

    def moves(run, name):
        """The axes over which collectives of this name run."""
        f = jax.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
        program = str(jax.make_jaxpr(f)(jnp.ones((64, 64 * 256))))
        return set(re.findall(name + r"\[[^\]]*axis_name=(\(.*?\))", program))

    both, node, gpu = "('node', 'gpu')", "('node',)", "('gpu',)"
    scatter = lambda x: dq.psum_scatter(x, axes, tiled=True, compression=CHEAP)
    assert moves(scatter, "reduce_scatter") == {gpu}
    assert moves(scatter, "ppermute") == {node}
    assert moves(lambda x: dq.all_gather(x, axes, compression=CHEAP), "all_gather") == {node, gpu}
    eight = small(dq.DynamiQ(bits=8.5))
    exchange = lambda x: dq.all_to_all(x, axes, 0, 0, tiled=True, compression=eight)
    assert moves(exchange, "all_to_all") == {both}


INSIDE = dq.Hierarchical(inner=dq.Direct(), outer=dq.Ring())


@pytest.mark.parametrize(
    ("passed", "sizes", "taken"),
    [
        (dq.Direct(), (2, 4), dq.Direct()),
        (dq.Ring(streams=1), (2, 4), dq.Ring(streams=1)),
        (INSIDE, (4, 2), INSIDE),
        # A hierarchy fills in its outer topology; of nodes of one worker nothing else is left.
        (dq.Hierarchical(), (6, 2), dq.Hierarchical(outer=dq.Ring())),
        (dq.Hierarchical(), (2, 2, 2), dq.Hierarchical(outer=dq.Butterfly())),
        (dq.Hierarchical(), (6, 1), dq.Ring()),
    ],
)
def test_what_is_passed_is_taken(slow, passed, sizes, taken):
    route = over(passed, None).route(sizes)
    assert route.topology == filled(taken)
    assert route.reason.startswith("as passed")
    assert route.n_workers == np.prod(sizes)


def test_psum_follows_the_rule(slow):
    x, key = gradient(0, 2, 3000), jax.random.key(0)
    # `vmapped` keeps programs of tests that have another rule.
    found = vmapped.__wrapped__(CHEAP, None)(x, key)
    assert_same_bits(found, vmapped(CHEAP, dq.Butterfly())(x, key))
    assert np.any(found != vmapped(CHEAP, dq.Direct())(x, key))


FAST = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200"
SLOW = "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA RTX A6000", "cpu"


@pytest.mark.parametrize("kind", FAST + SLOW)
def test_small_buckets_travel_natively_where_all_links_are_fast(hosts, kind):
    hosts(1, devices(kind=kind))
    fast = kind in FAST
    assert links.fast_links() == fast
    least = psum_bytes(8)
    sizes = least // 2 - 1, least // 2
    small, large = (jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in sizes)
    routes = [dq.explain(x, 8, verbose=False).rows[0].route for x in (small, large)]
    expected = f"exact: bucket of {least - 2} bytes < min_bucket_bytes {least}"
    assert routes == [expected if fast else "compressed", "compressed"]
    forced = dq.Compression(dq.DynamiQ(), min_bucket_bytes=0)
    assert dq.explain(small, 8, compression=forced, verbose=False).rows[0].route == "compressed"


@pytest.mark.parametrize(("name", "value", "fast"), [
    ("NCCL_P2P_DISABLE", "1", False),
    ("NCCL_P2P_DISABLE", "0", True),
    ("NCCL_P2P_LEVEL", "loc", False),
    ("NCCL_P2P_LEVEL", "NVL", True),
])  # fmt: skip
@pytest.mark.parametrize("processes", [1, 2])
def test_links_are_not_fast_where_nccl_may_not_use_them(
    name, value, fast, processes, hosts, monkeypatch
):
    hosts(processes, devices())
    monkeypatch.setenv(name, value)
    assert links.fast_links() == fast
    large = jax.ShapeDtypeStruct((psum_bytes(8) // 2 - 1,), jnp.bfloat16)
    explanation = dq.explain(large, 8, verbose=False)
    assert explanation.rows[0].route.startswith("exact") == fast
    first = explanation.defaults[0]
    assert first.startswith("widths have no plan" if fast else "NVLink counts as slow, since the")
    assert (f"environment has {name}" in first) != fast
    assert any("buckets below" in told for told in explanation.defaults) == fast
    assert f"By default on this machine: {first}." in str(explanation)


# Where compression starts to pay


def points(*pairs):
    return [Point(size * MIB, speedup) for size, speedup in pairs]


def test_it_lies_between_the_last_slower_size_and_the_next():
    """Where all sizes pay it is the smallest, and unknown where the largest does not."""
    assert crossover_bytes(points((32, 0.5), (64, 0.8), (128, 1.25))) == 91 * MIB  # 64 * sqrt(2)
    assert crossover_bytes(points((32, 1.1), (64, 0.8), (128, 1.25))) == 91 * MIB
    assert crossover_bytes(points((32, 0.9), (64, 1.0))) == 64 * MIB
    assert crossover_bytes(points((32, 1.0), (64, 1.5))) == 32 * MIB
    with pytest.raises(ValueError, match=r"1\.25 times as long at 64 MiB, the largest size"):
        crossover_bytes(points((32, 1.1), (64, 0.8)))


def test_the_library_takes_what_was_written():
    for entry in json.loads(FILE.read_text()):
        n = entry["n_devices"]
        limits = limits_of(dq.DynamiQ(), n, fast_links=True)
        assert limits.min_bucket_bytes == psum_bytes(n) == entry["psum_bytes"]
        assert psum_scatter_bytes(n) == entry["psum_scatter_bytes"] > psum_bytes(n)


def test_what_one_run_measures_replaces_its_answers_and_no_others():
    """Processes of one GPU each write beside what one process of all GPUs has written."""
    before = [{"n_devices": n, "psum_bytes": n, "measured_on": {"psum_bytes": "A"}} for n in (2, 8)]
    of_processes = {name: n for n, name in enumerate(questions(4, 4), start=1)}
    assert [*of_processes] == ["psum_bytes_of_processes", "push_bytes_of_processes"]
    with_four = written(before, 4, of_processes, "B")
    again = written(with_four, 2, {"push_bytes": [5, 6]}, "C")
    assert [entry["n_devices"] for entry in again] == [2, 4, 8] and again[2] == before[1]
    assert again[0] == before[0] | {
        "push_bytes": [5, 6], "measured_on": {"psum_bytes": "A", "push_bytes": "C"}
    }  # fmt: skip
    assert again[1]["measured_on"] == dict.fromkeys(of_processes, "B")
    every = {**questions(2, 1), **questions(2, 2)}
    assert {*json.loads(FILE.read_text())[0]} == {"n_devices", "measured_on", *every}
    # Four GPUs copy payloads by engines; more use collectives.
    assert [questions(n, 1)["psum_bytes"][0].transport for n in (4, 5)] == [
        "permutes", "collectives"
    ]  # fmt: skip


def test_the_limit_is_of_as_many_gpus_or_the_next_that_were_measured(monkeypatch):
    entries = [{"n_devices": n, "psum_bytes": n * MIB} for n in (2, 4, 8)]
    monkeypatch.setattr("dynamiq_jax.methods.dynamiq.crossover._MEASURED", entries)
    assert [psum_bytes(n) // MIB for n in (2, 3, 4, 6, 8, 16)] == [2, 4, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("collective", "least"),
    [("psum", psum_bytes(4)), ("psum_scatter", psum_scatter_bytes(4))],
)
def test_both_halves_have_the_limit_that_was_measured_for_them(monkeypatch, collective, least):
    """The smallest bucket that is compressed is sent by all_to_all, smaller ones by XLA's sum."""
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)
    n, options = 4, {"tiled": True} if collective == "psum_scatter" else {}
    method = dq.Compression(dq.DynamiQ(backend="jnp"), topology=dq.Direct())
    reduce = functools.partial(
        getattr(dq, collective), axis_name="data", compression=method, **options
    )
    warnings.simplefilter("ignore")  # of large leaves that are not compressed
    native = {"psum": "psum", "psum_scatter": "reduce_scatter"}[collective]
    smallest = -(-least // (4 * n)) * n
    for size, compressed in ((smallest - n, False), (smallest, True)):
        x = jax.ShapeDtypeStruct((size,), "float32")
        text = str(jax.make_jaxpr(reduce, axis_env=[("data", n)])(x))
        assert ("all_to_all[" in text) == compressed
        assert (f"{native}[" in text) or compressed


@pytest.mark.filterwarnings("ignore:.*nothing is compressed")
def test_shards_are_gathered_compressed_where_the_whole_is_large_enough(monkeypatch):
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)
    n, method = 4, dq.Compression(dq.DynamiQ(backend="jnp"))
    gather = functools.partial(dq.all_gather, axis_name="data", tiled=True, compression=method)
    smallest = -(-psum_scatter_bytes(n) // (4 * n))
    for size, dtype in ((smallest - 1, "f32"), (smallest, "u32")):
        x = jax.ShapeDtypeStruct((size,), "float32")
        text = str(jax.make_jaxpr(gather, axis_env=[("data", n)])(x))
        assert ("u32[" in text) == (dtype == "u32")


@pytest.mark.parametrize(("given", "compressed"), [(2**20, True), (2**20 + 1, False)])
def test_a_limit_that_the_user_gave_stands_for_scatters_too(given, compressed):
    """A MiB is a MiB: the ratio of the limits measured over NVLink is no business of it."""
    n, size = 4, 2**18  # f32: 1 MiB
    method = dq.Compression(CHEAP.method, min_bucket_bytes=given, min_leaf_size=1)
    run = lambda x: dq.psum_scatter(x, "data", tiled=True, compression=method)
    jaxpr = str(jax.make_jaxpr(run, axis_env=[("data", n)])(jnp.ones(size)))
    assert ("all_to_all" in jaxpr) == compressed


@pytest.mark.parametrize("fast", [True, False])
def test_explanations_say_where_shards_travel_in_bf16(fast, monkeypatch):
    monkeypatch.setattr(compressing, "fast_links", lambda: fast)
    monkeypatch.setattr(shards, "fast_links", lambda: fast)
    leaf, limits = (
        jax.ShapeDtypeStruct((1024, 256), jnp.float32),
        dq.Compression(min_bucket_bytes=0),
    )
    told = limits.explain(leaf, 2, verbose=False)
    named = dq.Compression(dq.DynamiQ(), min_bucket_bytes=0).explain(leaf, 2, verbose=False)
    for found in (told, named):  # a method of gradients says nothing of parameters
        assert ("shards and their gradients travel in bf16" in str(found)) == fast
        assert ("sharded updates in bf16 take as long over NVLink" in str(found)) == fast
    _, updates, fsdp = (row.sent_bytes for row in told.ways)
    _, alike, scattered = (row.sent_bytes for row in named.ways)
    assert updates == alike
    # Half of the leaf to the other worker, and twice back, of two bytes each.
    gathered = 2 * leaf.size if fast else 2 * leaf.size // 2 * 8 / 8
    assert scattered == pytest.approx(leaf.size // 2 * 5 / 8 + gathered, rel=0.02)
    assert fsdp == (3 * leaf.size if fast else scattered)


def test_processes_of_one_gpu_each_have_a_limit_of_their_own(monkeypatch):
    """Eight were not measured like this, and keep the limit of one process."""
    alone = [psum_bytes(n) for n in (2, 4, 8)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert [psum_bytes(n) for n in (2, 4, 8)] == [37 * MIB, 29 * MIB, alone[2]]
    assert alone[0] < 37 * MIB and alone[1] > 29 * MIB


def test_push_kernels_are_chosen_only_for_measured_numbers_of_gpus():
    for n in (2, 3, 4):
        low, high = push_bytes(n)
        assert low < psum_bytes(n) < high
    assert push_bytes(5) is None and push_bytes(9) is None
