"""`explain` and `wire_bits` of a tree: routes, buckets, totals, and the printed table."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, limits_of, over, wire_bits

import dynamiq_jax as dq
from dynamiq_jax.compression.ways import bytes_per_second

TREE = {
    "big": jax.ShapeDtypeStruct((2000, 300), jnp.float32),
    "half": [jax.ShapeDtypeStruct((280000,), jnp.bfloat16)],
    "few": jax.ShapeDtypeStruct((5000,), jnp.float16),
    "bias": jax.ShapeDtypeStruct((300,), jnp.float32),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "phase": jax.ShapeDtypeStruct((6, 2), jnp.complex64),
}


def routes(explanation):
    return {row.name: row.route for row in explanation.rows}


def test_every_leaf_has_a_route_and_a_reason():
    found = routes(dq.explain(TREE, 8, verbose=False))
    assert found == {
        "['big']": "compressed",
        "['half'][0]": "compressed",
        "['few']": "exact: bucket of 5000 coordinates < min_bucket_size 262144",
        "['bias']": "exact: size 300 < min_leaf_size 4096",
        "['step']": "exact: dtype int32",
        "['phase']": "exact: dtype complex64",
    }


def test_smallest_bucket_grows_with_workers_unless_given():
    # 16 tiles of 2048 coordinates for each worker, and never less than 65536.
    def smallest(method, n):
        limits = limits_of(method, n, fast_links=False)
        assert limits.min_bucket_bytes == 0
        return limits.min_bucket_size

    found = [smallest(dq.DynamiQ(), n) for n in (1, 2, 8, 64)]
    assert found == [65536, 65536, 2**18, 2**21]
    assert smallest(dq.DynamiQ(format=dq.Format(super_group_size=1024)), 8) == 2**20
    given = dq.Compression(dq.DynamiQ(), min_bucket_size=70_000)
    assert smallest(given, 64) == 70_000
    rows = dq.explain(TREE, 64, compression=given, verbose=False).rows
    assert [row.route == "compressed" for row in rows] == [False, True, False, True, False, False]


def test_on_fast_links_only_large_buckets_are_compressed_unless_told():
    """Where native psum is faster, small gradients are left to it; buckets are made larger."""
    fast, slow = (limits_of(dq.DynamiQ(), 8, fast_links=fast) for fast in (True, False))
    assert fast.min_bucket_bytes > slow.min_bucket_bytes == 0
    assert fast.bucket_bytes > fast.min_bucket_bytes
    any_size = dq.Compression(min_bucket_size=0)
    assert limits_of(any_size, 8, fast_links=True).min_bucket_bytes == 0
    given = dq.Compression(
        dq.DynamiQ(), min_bucket_bytes=300_000, bucket_bytes=400_000, min_bucket_size=0
    )
    limits = limits_of(given, 8, fast_links=True)
    assert (limits.min_bucket_bytes, limits.bucket_bytes) == (300_000, 400_000)
    found = routes(dq.explain(TREE, 8, compression=given, verbose=False))
    assert found["['big']"] == found["['half'][0]"] == "compressed"
    assert found["['few']"] == "exact: bucket of 10000 bytes < min_bucket_bytes 300000"


def test_totals_add_up():
    n, method, ring = 8, dq.DynamiQ(), dq.Ring()
    explanation = dq.explain(TREE, n, compression=over(ring), verbose=False)
    share = 2 * (n - 1) / n
    exact = 2 * 5000 + 4 * 300 + 4 + 8 * 12
    compressed = sum(method.wire_bits(d, n, ring) for d in (600_000, 280_000)) / 8
    assert explanation.wire_bytes == pytest.approx(compressed + share * exact)
    assert explanation.wire_bytes == pytest.approx(sum(r.wire_bytes for r in explanation.rows))
    assert explanation.outer_wire_bytes == pytest.approx(explanation.wire_bytes)
    assert wire_bits(None, ring)(TREE, n) == round(8 * explanation.wire_bytes)
    size = 600_000 + 280_000 + 5000 + 300 + 1 + 12
    assert explanation.bits_per_coord == pytest.approx(8 * explanation.wire_bytes / share / size)
    by_name = {row.name: row for row in explanation.rows}
    assert by_name["['bias']"].bits_per_coord == pytest.approx(32)
    assert by_name["['step']"].bits_per_coord == pytest.approx(32)
    assert by_name["['phase']"].bits_per_coord == pytest.approx(64)
    assert by_name["['big']"].bits_per_coord == pytest.approx(5, rel=0.01)
    # Integers and complex numbers would not travel as bf16.
    assert explanation.bf16_wire_bytes == pytest.approx(share * 2 * (size - 13))


def test_leaves_of_one_dtype_share_buckets_up_to_their_size():
    leaves = [jax.ShapeDtypeStruct((d,), jnp.float32) for d in (3000, 3000, 9000, 20000, 1000)]
    leaves.append(jax.ShapeDtypeStruct((3000,), jnp.bfloat16))
    method = dq.Compression(dq.DynamiQ(), bucket_bytes=40000, **SMALL)
    rows = dq.explain(leaves, 2, compression=method, verbose=False).rows
    buckets = [row.bucket for row in rows]
    assert buckets[0] == buckets[1]  # 6000 coordinates of 10000
    assert buckets[2] == buckets[4] != buckets[0]  # 9000 more would not fit, but 9000 and 1000 do
    assert len({buckets[0], buckets[2], buckets[3], buckets[5]}) == 4  # large alone, bf16 apart
    method = dq.Compression(dq.contrib.MXFP8(), bucket_bytes=0, **SMALL)
    separate = dq.explain(leaves, 2, compression=method, verbose=False)
    assert len({row.bucket for row in separate.rows}) == 6


def test_arrays_numbers_and_empty_leaves_are_described():
    tree = (jnp.ones((2, 0)), 1.5, np.ones(3, np.int8), True)
    rows = dq.explain(tree, 4, verbose=False).rows
    assert [row.dtype for row in rows] == ["float32", "float32", "int8", "bool"]
    assert [row.shape for row in rows] == [(2, 0), (), (3,), ()]
    assert rows[0].wire_bytes == 0
    assert rows[0].bits_per_coord == 0


def test_a_method_that_no_leaf_has_is_not_asked():
    """`psum` takes such a call, whatever the method would say about the topology."""
    native = dq.Compression(dq.contrib.PowerSGD(), topology=dq.Ring(), exclude="big")
    tree = {"big": TREE["big"]}
    found = dq.explain(tree, 8, compression=native, verbose=False)
    assert routes(found) == {"['big']": "exact: excluded"}
    assert (found.topology, found.reason) == ("XLA", "no leaf has a method")
    with pytest.raises(NotImplementedError, match="runs on native collectives only"):
        dq.explain(TREE, 8, compression=native, verbose=False)
    assert dq.explain({}, 8, compression=native, verbose=False).wire_bytes == 0


@pytest.mark.parametrize("n", [1, 8])
def test_a_method_that_psum_refuses_is_told_as_that_of_reduce(n):
    """It keeps a state; one worker, which sends nothing, needs none."""
    found = dq.explain(TREE, n, compression=dq.contrib.Marsit(), verbose=False)
    assert found.needs_state == ("dq.reduce with its state" in str(found)) == (n > 1)
    assert not dq.explain(TREE, n, verbose=False).needs_state


def test_a_topology_that_push_kernels_cannot_send_is_refused_by_the_plan():
    ring = dq.Compression(topology=dq.Ring(transport="push"))
    with pytest.raises(ValueError, match="push kernels send to all; pass"):
        dq.explain(TREE, 8, compression=ring, verbose=False)
    assert dq.explain({"bias": TREE["bias"]}, 8, compression=ring, verbose=False).rows


def test_one_worker_sends_nothing():
    explanation = dq.explain(TREE, 1, verbose=False)
    assert explanation.wire_bytes == 0
    assert explanation.bits_per_coord == 0
    assert wire_bits(None)(TREE, 1) == 0


def test_what_is_passed_is_told_and_all_of_a_flat_topology_crosses():
    """`test_wire_bytes` has the bytes of hierarchies."""
    method, ring = dq.DynamiQ(), dq.Ring(transport="collectives")
    topology = dq.Hierarchical(outer=ring)
    explanation = dq.explain(TREE, (4, 2), compression=over(topology), verbose=False)
    assert explanation.n_workers == 8
    assert explanation.topology == repr(topology)
    assert explanation.reason == "as passed"
    assert explanation.method == repr(method)
    assert explanation.outer_wire_bytes < 0.7 * explanation.wire_bytes
    flat = dq.explain(TREE, (4, 2), compression=over(ring), verbose=False)
    assert flat.outer_wire_bytes == pytest.approx(flat.wire_bytes)
    assert dq.explain(TREE, 8, compression=over(ring), verbose=False).wire_bytes == flat.wire_bytes


def test_table_is_printed_unless_told_not_to(capsys):
    explanation = dq.explain(TREE, 8, compression=dq.Compression(topology=dq.Ring(streams=3)))
    printed = capsys.readouterr().out
    assert printed.strip() == str(explanation).strip()
    lines = printed.splitlines()
    table = lines[2 : lines.index("", 2)]
    assert len(table) == len(jax.tree.leaves(TREE)) + 4  # with head, total and two rules
    assert {len(line) for line in table} == {len(table[0])}
    dq.explain(TREE, 8, verbose=False)
    assert capsys.readouterr().out == ""


LARGE = {"w": jax.ShapeDtypeStruct((2**24,), jnp.float32)}


@pytest.mark.parametrize(
    ("sizes", "topology", "said"),
    [
        ((4, 8), "Hierarchical(outer=Butterfly(", "several axes, whose last one has"),
        ((3, 8), "Hierarchical(outer=Ring(", "several axes, whose last one has"),
        (32, "Butterfly(", "32 workers on several hosts are a power of two"),
        (24, "Ring(", "24 workers on several hosts are not a power of two"),
    ],
)
def test_nothing_here_is_a_reason_for_a_cluster_elsewhere(monkeypatch, sizes, topology, said):
    """Its workers are more than the devices here, which could be any: fast ones, with engines."""
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)
    monkeypatch.setattr("dynamiq_jax.topologies.schedules.copy_engines", lambda: "they are here")
    found = dq.explain(LARGE, sizes, verbose=False)
    assert found.topology.startswith(topology)
    assert "permutes" not in found.topology
    assert found.rows[0].route == "compressed"  # 64 MiB, which NVLink would carry natively
    n = found.n_workers
    hosts = f"{n // 8} hosts of 8 workers" if isinstance(sizes, tuple) else "several hosts"
    links = "with links between them that are slower than NVLink"
    assert found.reason.startswith(said)
    more = f"; assumed, as {n} workers are more than the devices here (8): {hosts}, {links}"
    assert found.reason.endswith(more)
    assert wire_bits(None)(LARGE, sizes) == round(8 * found.wire_bytes)
    passed = dq.explain(
        LARGE, sizes, compression=dq.Compression(topology=dq.Direct()), verbose=False
    )
    assert passed.reason == "as passed" + more


@pytest.mark.parametrize("sizes", [8, 4, (2, 4), (2, 2)])
def test_workers_that_the_devices_here_may_be_are_explained_by_them(sizes):
    found = dq.explain(LARGE, sizes, verbose=False)
    assert found.topology.startswith("Direct(")
    known = "all devices are in one process or NVLink domain"
    assert found.reason == f"{known}, where Direct errs least"


def test_ways_to_train_are_compared():
    """By hand: 8 workers; leaves that travel exactly are whole in all three."""
    size, n = 2**24, 8
    shapes = {"w": (size,), "b": (7,)}
    tree = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    method = dq.Compression(dq.DynamiQ(), topology=dq.Direct())
    found = method.explain(tree, n, verbose=False)
    whole, sharded, fsdp = found.ways
    assert whole.sent_bytes == found.wire_bytes
    share = (n - 1) / n * size / 8
    # Gradients have no plan unless a backward pass hides its time: widths fill 4.875 of 5 bits.
    assert sharded.sent_bytes == pytest.approx((4.875 + 2.5) * share, rel=0.01)
    assert fsdp.sent_bytes == pytest.approx((5 + 8 + 8) * share, rel=0.01)
    small = 12 * 7
    # Masters, moments, and slices of the copy, of whole leaves, too.
    updates = 4 * (size + 7) + 16 * (size / n + 7)
    kept = [small + 12 * size, updates, small + 12 / n * size]
    assert [way.kept_bytes for way in found.ways] == kept
    gradients = [4 * (size + 7), 4 * (size + 7), 4 * (size / n + 7)]
    assert [way.gradient_bytes for way in found.ways] == gradients
    *_, head, first, second, third = str(found).splitlines()
    assert head.split() == "way to train sends MB/step keeps MB gradients MB by".split()
    assert second.split()[2:] == ["13.4", "100.7", "67.1", "dq.optax.sharded"]
    assert (first.split()[-1], third.split()[0]) == ("dq.psum", "FSDP")
    half = dataclasses.replace(method, method=dq.ErrorFeedback(dq.contrib.MXFP8()))
    assert half.explain(tree, n, verbose=False).ways == ()
    assert method.explain({"b": tree["b"]}, n, verbose=False).ways == ()


def test_sharded_updates_of_a_leaf_that_cannot_be_split_send_its_sum_compressed():
    """Every worker updates all of a leaf without a dimension of at least as many entries."""
    leaf, n = jax.ShapeDtypeStruct((7,) * 7, jnp.float32), 8
    method = dq.Compression(dq.DynamiQ(plan=True), min_bucket_size=1)
    whole, updates, fsdp = dq.explain(leaf, n, compression=method, verbose=False).ways
    assert updates.sent_bytes == fsdp.sent_bytes == whole.sent_bytes
    assert [plan.kind for plan, _ in updates.plans] == ["all-reduce"]


def test_a_way_whose_leaves_travel_natively_says_so():
    """Two leaves share a bucket of an all-reduce; workers split only one, which is too small."""
    tree = {"a": jax.ShapeDtypeStruct((64, 96), "f"), "b": jax.ShapeDtypeStruct((5,) * 5, "f")}
    explain = lambda method: dq.explain(
        tree,
        8,
        compression=dq.Compression(method, min_leaf_size=1000, min_bucket_size=8000),
        verbose=False,
    )
    found = explain(dq.DynamiQ())
    assert {row.route for row in found.rows} == {"compressed"}
    lines = str(found).splitlines()
    all_of_it = "100% of the bytes travel natively"
    why = f"{all_of_it}; ['b']: bucket of 3125 coordinates < min_bucket_size 8000"
    assert f"sharded updates: {why}" in lines
    why = f"{all_of_it}; ['a']: bucket of 768 coordinates < min_bucket_size 1000"
    assert f"FSDP: {why}" in lines  # an eighth of the leaf and of the limit
    for method in (dq.F32(), None):  # as it was asked, and compressed
        assert not any(
            x.natives for x in dq.explain(LARGE, 8, compression=method, verbose=False).ways
        )


def test_a_rate_gives_the_wires_times_and_the_fastest_way(capsys):
    """By hand: at 25 Gb/s a million bytes take .32 ms."""
    found = dq.explain(LARGE, 8, compression=dq.Compression(topology=dq.Direct()), rate="25gbit")
    for way in found.ways:
        assert way.wire_ms == pytest.approx(way.sent_bytes / 1e6 * 0.32)
    sharded, native = found.ways[1].wire_ms, 2 * 7 / 8 * 2 * 2**24 / 1e6 * 0.32
    said = f"{sharded:,.1f} ms a step least, by sharded updates (dq.optax.sharded); bf16 psum takes"
    assert f"At 25gbit the wire takes {said} {native:,.1f}." in found.fastest
    assert found.fastest in capsys.readouterr().out
    plain = dq.explain(LARGE, 8, compression=dq.Compression(topology=dq.Direct()), verbose=False)
    assert plain.fastest is None and plain.ways[0].wire_ms is None
    # A method that does not scatter has no ways to compare, but a time.
    method = dq.ErrorFeedback(dq.contrib.MXFP8())
    alone = dq.explain(LARGE, 8, compression=method, verbose=False, rate="25gbit")
    assert f"At 25gbit the wire takes {alone.wire_bytes / 1e6 * 0.32:,.1f} ms" in alone.fastest


@pytest.mark.parametrize("rate", ["25", "0mbit", 25, "25GB", "25 G", "b/s", "1e3bit"])
def test_a_rate_has_a_number_and_a_unit(rate):
    with pytest.raises(ValueError, match="give a text of a number and a unit, as in 20mbit"):
        dq.explain(LARGE, 8, rate=rate)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("25gbit", 3.125e9), ("25Gb/s", 3.125e9), ("25 Gbit/s", 3.125e9), ("25Gbps", 3.125e9),
        ("3.1GB/s", 3.1e9), ("20mbit", 2.5e6), ("8kbit", 1e3), ("8bit", 1.0), ("0.4Tb/s", 5e10),
    ],
)  # fmt: skip
def test_spellings_of_a_rate(rate, expected):
    assert bytes_per_second(rate) == pytest.approx(expected)


def test_workers_that_share_a_link_take_the_time_of_one_worker_among_the_hosts():
    """A host of eight sends between four hosts what one of four workers does."""
    method = dq.Compression(dq.DynamiQ(), min_bucket_size=0)
    told = {"verbose": False, "rate": "25gbit"}
    whole = dq.explain(LARGE, 4, compression=over(dq.Butterfly(), method), **told)
    hosts = dq.explain(LARGE, (4, 8), compression=method, **told)
    pairs = zip(hosts.ways, whole.ways, strict=True)
    for ours, alone in pairs:  # two levels fill 5 bits without a plan, and one 4.875
        assert ours.wire_ms == pytest.approx(alone.wire_ms, rel=0.03)
    ms = lambda found: float(re.search(r"bf16 psum takes (\d+\.\d)", found.fastest)[1])
    assert ms(hosts) == pytest.approx(ms(whole), rel=0.01)
    assert "which 8 workers share" in hosts.fastest
    with pytest.raises(ValueError, match=r"n_workers=\(4, 8\) .*cross hosts is not known"):
        dq.explain(LARGE, (4, 8), compression=over(dq.Ring(), method), **told)


def test_a_rate_means_slow_links_and_one_axis_has_no_outer_bytes():
    assert "links carry 25gbit" in dq.explain(LARGE, 4, verbose=False, rate="25gbit").reason
    method = dq.Compression(dq.DynamiQ(), min_bucket_bytes=0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(64, 1024, (rng.integers(3, 20), 2))
        tree = [jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.float32) for shape in sizes]
        assert "outer axes" not in str(dq.explain(tree, 8, compression=method, verbose=False))


def test_columns_are_as_wide_as_their_numbers():
    tree = {"a": jax.ShapeDtypeStruct((10**12,), jnp.bfloat16)}
    found = str(
        dq.explain(tree, 8, compression=dq.Compression(topology=dq.Direct()), verbose=False)
    ).splitlines()
    row = next(line for line in found if line.startswith("data parallel"))
    assert row.split() == [
        "data",
        "parallel",
        "1,093,750.0",
        "10,000,000.0",
        "2,000,000.0",
        "dq.psum",
    ]
    one = str(dq.explain(LARGE, 1, verbose=False))
    assert one.startswith("1 worker, ")


def test_halves_over_two_axes_take_two_levels():
    """By hand: 4 hosts of 8; on the outer axes an eighth of a bucket, of it three quarters."""
    found = dq.explain(LARGE, (4, 8), verbose=False)
    bits = {"data parallel": 2 * 5, "sharded updates": 5 + 2.5, "FSDP": 5 + 8 + 8}
    for way in found.ways:
        outer = bits[way.name] / 8 * 2**24 / 8 * 3 / 4
        assert way.outer_bytes == pytest.approx(outer, rel=0.02)
    assert f"{found.ways[1].outer_bytes / 1e6:.1f}" in str(found).splitlines()[-2].split()
    flat = dq.explain(
        LARGE, (4, 8), compression=dq.Compression(topology=dq.Direct()), verbose=False
    )
    assert all(way.outer_bytes == way.sent_bytes for way in flat.ways)
    assert "outer axes" not in str(flat)


def test_ways_have_the_parameters_of_a_policy():
    """Differences have no plan; parameters by path are those of each leaf."""
    tree = {name: LARGE for name in "ab"}
    sent = lambda how: [
        way.sent_bytes for way in dq.explain(tree, 8, compression=how, verbose=False).ways
    ]
    default = sent(None)
    eight = sent(dq.Policy(parameters=dq.DynamiQ(bits=8)))
    assert eight[0] == default[0] and eight[1] > default[1] and eight[2] == default[2]
    bits = dq.DynamiQ(bits=2.5, dither=True)
    assert sent(dq.Policy(parameters=bits))[1] == default[1]
    by_path = sent(dq.Policy(parameters=lambda path, leaf: bits if path < "b" else None))
    exact = sent(dq.Policy(parameters=dq.F32()))
    half = [(a + b) / 2 for a, b in zip(sent(dq.Policy(parameters=bits)), exact, strict=True)]
    assert by_path == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (dq.contrib.PowerSGD(), "does not do psum_scatter and all_gather"),
        (dq.Compression(topology=dq.Hierarchical()), "needs two axes and got 1"),
        (lambda path, leaf: "exact", "'exact' is not a method"),
    ],
)
def test_a_way_that_parameters_cannot_take_says_so_in_its_line(parameters, reason):
    """`psum` does not read `Policy.parameters`, and its plan does not depend on them."""
    explain = lambda how: dq.explain(LARGE, 8, compression=how, verbose=False, rate="25gbit")
    found = explain(dq.Policy(parameters=parameters))
    (psum,) = found.ways
    assert psum.sent_bytes == found.wire_bytes == explain(None).wire_bytes
    assert [way.name for way in found.refused] == ["sharded updates", "FSDP"]
    for way, line in zip(found.refused, str(found).splitlines()[-4:], strict=False):
        assert reason in way.reason and line == f"{way.name}: {way.call} refuses this: {way.reason}"
    assert "least, by data parallel (dq.psum)" in found.fastest
    assert explain(None).refused == ()


def test_fsdp_of_leaves_that_workers_do_not_split_gathers_nothing():
    """A method and a topology that no leaf takes are not refused."""
    tree = {"b": jax.ShapeDtypeStruct((7,) * 4, jnp.float32)}
    gathers = dq.Compression(dq.contrib.PermK(), topology=dq.Hierarchical())
    small = dq.Compression(dq.F32(), min_leaf_size=100, min_bucket_size=1)
    policy = dq.Policy(gradients=small, parameters=gathers)
    found = dq.explain(tree, 8, compression=policy, verbose=False)
    assert found.refused == () and len({way.sent_bytes for way in found.ways}) == 1
