"""Payloads mean the same however they move: by collectives, by ppermutes, or by push kernels."""

import functools
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close
from cases import CHEAP, EXACT, daily, over, small
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from stand_ins import exchanged, reduced
from workers import auto_mesh, gradient

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.topologies import links, steps_of
from dynamiq_jax.topologies.links import TRANSPORTS
from dynamiq_jax.topologies.schedules import permuted
from pallas_kernels import backend

SIZE = 3000
TOPOLOGIES = [dq.Direct, dq.Ring, dq.Butterfly]
STREAMS = {"streams": 2}


def program(reduce, n, out_specs):
    """``reduce`` of one row for each worker, under ``check_vma=True``."""
    specs = {"mesh": auto_mesh(n), "in_specs": P("data"), "out_specs": out_specs}
    return jax.jit(jax.shard_map(lambda x: reduce(x[0]), **specs))


def integers(*shape):
    """f32 of integers, which are summed exactly."""
    return jax.random.randint(jax.random.key(0), shape, -99, 99).astype(jnp.float32)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", daily([2, 4], [4]))
def test_permutes_alone_bring_exact_sums_to_all(topology, n):
    x, route = integers(n, SIZE), topology(transport="permutes", **STREAMS)

    def reduce(x):
        return dq.psum(x, "data", compression=over(route, EXACT))

    lowered = program(reduce, n, P()).lower(x)
    text = lowered.as_text()
    hops = sum(1 for _ in steps_of(permuted(route.schedule(n), n)))
    assert text.count("collective_permute") == route.chunks_per_worker(SIZE) * (hops + n - 1)
    assert "all_to_all" not in text and "all_gather" not in text
    np.testing.assert_array_equal(lowered.compile()(x), x.sum(axis=0))


def test_permutes_bring_sums_of_groups_and_of_what_is_mapped_outside():
    n, route = 4, dq.Direct(transport="permutes")
    x = integers(n, 3, SIZE)

    def reduce(x, groups=None):
        return dq.psum(x, "data", compression=over(route, EXACT), axis_index_groups=groups)

    summed = jax.vmap(program(reduce, n, P()), in_axes=1)(x)
    np.testing.assert_array_equal(summed, x.sum(axis=0))
    in_pairs = jax.pmap(lambda x: reduce(x, [[0, 2], [3, 1]]), "data", devices=jax.devices()[:n])
    even, odd = x[::2].sum(axis=0), x[1::2].sum(axis=0)
    np.testing.assert_array_equal(in_pairs(x), jnp.stack([even, odd, even, odd]))


STATES = [
    small(dq.ErrorFeedback(CHEAP.method)),  # of each worker
    small(dq.ErrorFeedback(CHEAP.method, kind="ef21")),  # and one that is the same on all
]


@pytest.mark.parametrize("method", daily(STATES, STATES[:1]), ids=["ef14", "ef21"])
@pytest.mark.usefixtures("padding_is_free")
def test_states_and_metrics_do_not_depend_on_the_transport(method):
    n, x, found = 3, gradient(5, 3, SIZE), []
    for transport in ("collectives", "permutes"):
        request = over(dq.Direct(transport=transport, **STREAMS), method)
        state = request.init_state(jnp.zeros(SIZE), n, stacked=True)

        def one(x, state, request=request):
            options = {"metrics": True, "key": jax.random.key(1), "compression": request}
            state = jax.tree.map(lambda s: s[0], state)
            *kept, metrics = dq.reduce(x[0], "data", state=state, **options)
            return jax.tree.map(lambda s: Axis(("data",)).to_varying(s)[None], kept), metrics

        specs = {"in_specs": P("data"), "out_specs": (P("data"), P())}
        found.append(jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))(x, state))
    assert_close(*found, rtol=1e-5)


@pytest.mark.usefixtures("padding_is_free")
def test_slices_of_a_psum_scatter_travel_by_permutes_too():
    n, x = 4, integers(4, 4 * SIZE)
    method = small(dq.DynamiQ(widths=(16,), bits=18), topology=dq.Direct(transport="permutes"))
    run = program(
        lambda x: dq.psum_scatter(x, "data", tiled=True, compression=method), n, P("data")
    )
    assert "all_to_all" not in run.lower(x).as_text()
    np.testing.assert_allclose(run(x), x.sum(axis=0), rtol=2**-7, atol=2)


def test_the_transport_is_chosen_by_what_is_known_of_copy_engines(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 9)
    tree = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    plain = dq.explain(tree, 4, verbose=False)
    assert "transport='collectives'" in plain.topology
    assert "copy engines" not in plain.reason
    monkeypatch.setattr("dynamiq_jax.topologies.schedules.copy_engines", lambda: "it is said so")
    found = dq.explain(tree, 4, verbose=False)
    assert "transport='permutes'" in found.topology
    assert "copy engines, since it is said so" in found.reason
    four, more = (
        dq.explain(tree, n, compression=dq.Compression(topology=dq.Direct()), verbose=False)
        for n in (4, 5)
    )
    assert "transport='permutes'" in four.topology
    assert "transport='collectives'" in more.topology
    why = "5 workers are more than 4, and each of n - 1 copies takes longer"
    assert more.reason == f"as passed; by collectives, since {why}"
    route = dq.Hierarchical(outer=dq.Ring(), inner=dq.Direct(transport="collectives"))
    both = dq.explain(tree, (2, 2), compression=over(route), verbose=False).topology
    assert both.count("transport='permutes'") == both.count("transport='collectives'") == 1


CHANNELS = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")


IN_ONE_DOMAIN = links.in_one_domain  # which the fixture replaces


@pytest.fixture
def peers(monkeypatch):
    """As on a machine with several GPUs, whose XLA knows the options."""
    jax.devices()  # starts the real backend first
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(links, "_is_known", lambda name, value: True)
    monkeypatch.setattr(links, "in_one_domain", lambda: True)
    monkeypatch.setattr(links, "_told", {})
    for name in ("NCCL_P2P_DISABLE", "XLA_FLAGS", CHANNELS, *SOCKETS):
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)
    return monkeypatch


APART = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**15}
EARLY = APART | {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
}
BETWEEN = APART | {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
NOT_PEERS = [
    ("setattr", (jax, "default_backend", lambda: "cpu"), {}),
    ("setattr", (jax, "device_count", lambda: 1), {}),
    ("setattr", (links, "_between_hosts", lambda: True), BETWEEN),
    ("setattr", (jax, "process_count", lambda: 2), APART),
    ("setattr", (links, "_is_known", lambda name, value: False), {}),
    ("setattr", (links, "_is_known", lambda name, value: "permute_mode" not in name), EARLY),
    ("setenv", ("NCCL_P2P_DISABLE", "1"), EARLY),
]


@pytest.mark.parametrize(("how", "what", "options"), NOT_PEERS)
def test_options_are_empty_where_they_do_not_apply(how, what, options, peers):
    getattr(peers, how)(*what)
    between = options == BETWEEN
    peers.setattr(links, "_peers", links._peers if not between else lambda: False)
    assert links.compiler_options() == options
    assert links.copy_engines() is None
    assert os.environ.get(CHANNELS) == ("0" if between else None)
    assert (links.between_hosts() is None) == (not between)


def test_what_is_chosen_between_hosts_is_said_and_the_users_word_stands(peers):
    """Two processes of two NVLink domains; JAX's devices tell the domains."""
    peers.setattr(jax, "process_count", lambda: 2)
    peers.setattr(jax, "device_count", lambda: 4)
    peers.setattr(links, "in_one_domain", IN_ONE_DOMAIN)
    kind = {"platform": "gpu", "device_kind": "NVIDIA H200"}
    for domains in (2, 1):
        own = [SimpleNamespace(slice_index=i % domains, **kind) for i in range(4)]
        peers.setattr(jax, "devices", lambda own=own: own)
        tree = jax.ShapeDtypeStruct((2**22,), jnp.float32)
        reason = dq.explain(
            tree, 4, compression=dq.Compression(topology=dq.Direct()), verbose=False
        ).reason
        assert ("starts transfers early, 4 at a time" in reason) == (domains == 2)
        assert links.compiler_options() == (BETWEEN if domains == 2 else APART)
    peers.setenv(CHANNELS, "1")
    peers.setattr(links, "_between_hosts", lambda: True)
    links.compiler_options()
    assert os.environ[CHANNELS] == "1"


@pytest.mark.parametrize(
    ("given", "vendor", "chosen"),
    [
        ({}, "0x15b3", ("1", "4")),
        ({}, None, ("1", "4")),  # a virtual network card has no vendor
        ({}, "0x1d0f", (None, None)),
        ({SOCKETS[0]: "2"}, "0x15b3", ("2", None)),
        ({SOCKETS[1]: "8"}, None, (None, "8")),
        ({"NCCL_CONF_FILE": f"{SOCKETS[0]}=2"}, None, (None, None)),
    ],
)
def test_the_first_call_between_hosts_chooses_nccls_sockets_where_nobody_has(
    given, vendor, chosen, peers, tmp_path
):
    """NCCL reads the variables at a process's first collective. Decorating sets nothing."""
    if vendor:
        (tmp_path / "vendor").write_text(f"{vendor}\n")
    peers.setattr(links, "_VENDORS", str(tmp_path / "*"))
    for name, value in given.items():
        if name == "NCCL_CONF_FILE":
            (tmp_path / "nccl.conf").write_text(value)
            value = str(tmp_path / "nccl.conf")
            peers.setattr(links, "_VENDORS", str(tmp_path / "none"))
        peers.setenv(name, value)
    before = dict(os.environ)
    peers.setattr(jax, "default_backend", lambda: pytest.fail("starts the backend"))
    links.jit(lambda x: x)
    step = links.jit(donate_argnums=())(lambda x: x)
    peers.setattr(jax, "default_backend", lambda: "cpu")
    step.trace(1.0)
    assert dict(os.environ) == before
    peers.setattr(jax, "default_backend", lambda: "gpu")
    peers.setattr(links, "_between_hosts", lambda: True)
    for who in ("by the first call of a function of dq.jit", "by dq.jit"):
        said = links.between_hosts()
        for name, value in zip(SOCKETS, chosen, strict=True):
            assert f"{name}={value or 'by NCCL'}" in said
        assert (f"({who})" in said) == (None not in chosen)
        assert dict(os.environ) == before or who == "by dq.jit"
        links.jit(lambda x: x).trace(1.0)
    assert tuple(map(os.environ.get, SOCKETS)) == chosen


def test_copy_engines_serve_in_programs_with_the_option_alone(peers):
    options = links.compiler_options()
    assert options["xla_gpu_collective_permute_mode"] == "COLLECTIVES_PEER_MEMORY"
    assert links.copy_engines() is None
    with links.compiled_by(options):
        assert links.copy_engines() == "dq.jit compiles the program"
        with links.compiled_by({}):
            assert links.copy_engines() is None
        peers.setenv("XLA_FLAGS", "--xla_gpu_collective_permute_mode=peer")
        assert "XLA_FLAGS" in str(links.copy_engines())
        peers.setattr(jax, "process_count", lambda: 2)
        assert links.copy_engines() is None


def test_options_that_xla_does_not_know_are_noticed():
    assert not links._is_known("xla_gpu_no_such_option", 1)
    assert links._is_known("xla_cpu_enable_fast_math", False)


def test_what_jit_traces_knows_of_its_options(peers):
    peers.setattr(links, "compiler_options", lambda: {links._FLAG: "COLLECTIVES_PEER_MEMORY"})
    found = []

    def step(x, *, number):
        found.append((number, links.copy_engines()))
        return x

    own = links.jit(step, static_argnames="number")
    own.trace(1.0, number=1)
    jax.jit(step, static_argnames="number").trace(1.0, number=2)
    assert found == [(1, "dq.jit compiles the program"), (2, None)]


def test_jit_is_a_function_of_jax_jit_and_of_classes():
    @dq.jit(static_argnames="power", donate_argnums=())
    def f(x, *, power):
        """Raises."""
        return x**power

    assert (f.__name__, f.__doc__, float(f(3.0, power=2))) == ("f", "Raises.", 9.0)
    assert f.lower(2.0, power=3).compile()(2.0) == 8.0
    assert f.eval_shape(2.0, power=3).shape == ()
    assert jax.jit(jax.vmap(partial(f, power=2)))(jnp.arange(3.0)).tolist() == [0, 1, 4]
    f.clear_cache()

    class Trainer:
        scale = 3

        @partial(dq.jit, static_argnums=0)
        def step(self, x):
            return self.scale * x

    assert float(Trainer().step(2.0)) == 6.0
    with pytest.raises(ValueError, match="nothing"):
        dq.jit(lambda x: x, static_argnames="nothing")
    with pytest.raises(ValueError, match="nothing"):
        dq.jit(static_argnames="nothing")(lambda x: x)
    with pytest.raises(TypeError, match="donated"):
        dq.jit(donated=0)


def test_jit_starts_no_backend_where_it_decorates():
    """JAX's own start of processes comes after, and refuses to if a backend is there."""
    script = """
import socket, jax, dynamiq_jax as dq
@dq.jit
def step(x): return x + 1
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
print("step", float(step(1.0)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "step 2.0" in done.stdout, done.stderr


def with_memory(x, axis_name, *, compression):
    """A psum whose state keeps what it lost."""
    state = jax.lax.pcast(compression.init_state(x, 3), axis_name, to="varying")
    options = {"op": "sum", "compression": compression}
    total, state, _ = dq.reduce(x, axis_name, state=state, **options)
    return total, jax.tree.map(lambda x: x[None], state)


def keyed_mean(x, axis_name, **options):
    """A mean that is rounded by a key."""
    return dq.pmean(x, axis_name, key=jax.random.key(3), **options)


@pytest.mark.parametrize(
    ("method", "reduce", "streams", "kernels"),
    [
        (small(dq.DynamiQ(bits=5, plan=True)), dq.psum, 1, ["exchange", "all_reduce"]),
        (
            small(dq.DynamiQ(bits=4, dither=True, plan=False)),
            keyed_mean, 1, ["exchange", "all_reduce"],
        ),
        (CHEAP, dq.psum, 2, ["exchange"] * 5),
        (small(dq.ErrorFeedback(CHEAP.method)), with_memory, 1, ["exchange"] * 3),
        (small(dq.DynamiQ(bits=5, plan=False, backend="jnp")), dq.psum, 1, ["exchange"] * 3),
        (small(dq.contrib.MXFP4()), dq.psum, 1, ["exchange"] * 2),
        (CHEAP, functools.partial(dq.psum_scatter, tiled=True), 1, ["exchange"] * 2),
    ],
    ids=["plan", "no plan, dither", "streams", "memory", "backend", "MX", "psum_scatter"],
)  # fmt: skip
def test_what_is_pushed_gives_the_bits_of_collectives(
    method, reduce, streams, kernels, monkeypatch
):
    n, x, called = 3, gradient(5, 3, 3 * 2**13 + 7 * (reduce is keyed_mean)), []

    def recorded(name, run):
        def call(*args, **options):
            called.append(name)
            return run(*args, **options)

        monkeypatch.setattr(pk, name, call)

    recorded("exchange", exchanged)
    recorded("all_reduce", reduced)
    spec, found = P("data") if isinstance(reduce, functools.partial) else P(), []
    spec = (P(), P("data")) if reduce is with_memory else spec
    for transport in ("collectives", "push"):
        route = dq.Direct(transport=transport, streams=streams)
        one = functools.partial(reduce, axis_name="data", compression=over(route, method))
        found.append(program(one, n, spec)(x))
    assert called == kernels
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_push_kernel_without_a_key_gets_a_part_of_the_seed_from_every_worker(monkeypatch):
    n, x, parts = 3, gradient(5, 3, 3 * 2**13), []

    def kept(source, tiles, noise, *rest, **options):
        jax.debug.callback(lambda part: parts.append(np.asarray(part).tolist()), noise)
        return reduced(source, tiles, noise, *rest, **options)

    monkeypatch.setattr(pk, "exchange", exchanged)
    monkeypatch.setattr(pk, "all_reduce", kept)
    method = small(dq.DynamiQ(bits=4, dither=True, plan=False))
    route = dq.Direct(transport="push", streams=1)
    run = program(lambda x: dq.psum(x, "data", compression=over(route, method)), n, P())
    totals = [np.asarray(run(x)) for _ in range(2)]
    jax.effects_barrier()
    np.testing.assert_array_equal(*totals)
    assert len({tuple(part) for part in parts}) == n  # each worker's own, in both runs
    # Decoders with the noise of another seed would err by the whole step of a level.
    own = dq.Compression(method.method, min_leaf_size=0, min_bucket_size=0, min_bucket_bytes=0)
    other = program(lambda x: dq.psum(x, "data", compression=own), n, P())(x)
    exact = np.asarray(x, np.float64).sum(0)
    errors = [np.sum((total - exact) ** 2) for total in (totals[0], np.asarray(other))]
    assert 0.5 < errors[0] / errors[1] < 2
    assert not np.array_equal(totals[0], run(2 * x) / 2)  # another gradient, other noise


def pushed(**options):
    """Traces a psum by push kernels."""

    def reduce(x):
        return dq.psum(x, "data", **{"compression": CHEAP} | options)

    jax.eval_shape(program(reduce, 4, P()), jax.ShapeDtypeStruct((4, SIZE), jnp.float32))


def test_push_kernels_are_refused_where_they_cannot_run(monkeypatch):
    remedy = "pass transport='permutes' or 'collectives'"
    needs = "transport='push' needs "
    with pytest.raises(NotImplementedError, match=f"{needs}NVIDIA GPUs.* 'cpu'; {remedy}"):
        pushed(compression=over(dq.Direct(transport="push", streams=1), CHEAP))
    with pytest.raises(NotImplementedError, match=f"{needs}NVIDIA GPUs"):
        pushed(compression=small(CHEAP.method, transport="push"))
    for topology in (dq.Ring, dq.Butterfly):
        with pytest.raises(ValueError, match="push kernels send to all; pass topology=dq.Direct"):
            pushed(compression=over(topology(transport="push"), CHEAP))
    with pytest.raises(NotImplementedError, match="no axis_index_groups, and got .*permutes"):
        TRANSPORTS["push"].psum(Axis(("data",), ((0, 2), (3, 1))), jnp.ones(4))

    monkeypatch.setattr(backend, "_on_nvidia", lambda: True)
    monkeypatch.setattr(backend, "RUNS_MOSAIC", False)
    gpu = SimpleNamespace(compute_capability="8.0")
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *kind: [gpu] if not kind else devices(*kind))
    with pytest.raises(NotImplementedError, match=rf"capability 9.0 .*have 8.0; {remedy}"):
        backend.check_push(("data",))
    gpu.compute_capability = "10.0"
    with pytest.raises(NotImplementedError, match=f"JAX >= 0.11, and this is .*; {remedy}"):
        backend.check_push(("data",))
    monkeypatch.setattr(backend, "RUNS_MOSAIC", True)
    with pytest.raises(NotImplementedError, match=f"{needs}jax.shard_map over all axes"):
        backend.check_push(("data",))
    with monkeypatch.context() as disabled:
        disabled.setenv("NCCL_P2P_DISABLE", "1")
        with pytest.raises(NotImplementedError, match=f"has NCCL_P2P_DISABLE=1; {remedy}"):
            backend.check_push(("data",))


@pytest.mark.parametrize(("sizes", "manual", "refused"), [
    ((2, 4), "ab", None),
    ((2, 4), "a", "over all axes of a mesh"),
    ((3, 4), "ab", "up to 8 devices, and this one has 12"),
])  # fmt: skip
def test_push_kernels_take_meshes_that_are_mapped_wholly(sizes, manual, refused, monkeypatch):
    monkeypatch.setattr(backend, "_on_nvidia", lambda: True)
    monkeypatch.setattr(backend, "RUNS_MOSAIC", True)
    gpu = SimpleNamespace(compute_capability="9.0", local_hardware_id=0)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    mesh = AbstractMesh(sizes, ("a", "b"))
    with jax.sharding.use_abstract_mesh(mesh):  # what is not called in a map may push in one
        assert pk.needs_of_push() is None
        assert "over all axes of a mesh" in str(pk.needs_of_push(("a",)))

    def check(x):
        backend.check_push(("a",))
        return x

    mapped = jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(manual))
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    if refused is None:
        assert jax.eval_shape(mapped, x).shape == (8,)
    else:
        with pytest.raises(NotImplementedError, match=refused):
            jax.eval_shape(mapped, x)
