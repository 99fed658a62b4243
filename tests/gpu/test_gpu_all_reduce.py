"""`psum`, `psum_scatter` and `all_gather` on all GPUs of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import push_between
import pytest
from asserts import assert_copies_equal, assert_replicas_equal, sum_error
from cases import EVERY_METHOD, daily, first_state, over
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import gradient

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.dynamiq import codec
from dynamiq_jax.methods.dynamiq.codec import make_plan
from pallas_kernels import peers
from pallas_kernels._compat import JOINS_PROCESSES, RUNS_MOSAIC
from pallas_kernels.backend import MOST_WORKERS

METHOD = dq.Compression(dq.DynamiQ(plan=True), min_bucket_size=1)
TOPOLOGIES = {
    "ring": dq.Ring(), "ring, two streams": dq.Ring(streams=2),
    "looped ring": dq.Ring(unroll_up_to=1), "butterfly": dq.Butterfly(),
    "butterfly, two streams": dq.Butterfly(streams=2), "direct": dq.Direct(),
    "direct, three streams": dq.Direct(streams=3), "ring, permutes": dq.Ring(transport="permutes"),
    "direct, permutes": dq.Direct(transport="permutes", streams=2),
    "two axes": dq.Hierarchical(), "two axes, direct": dq.Hierarchical(inner=dq.Direct()),
}  # fmt: skip


def _mesh(shape=None, names=("data",)):
    devices = jax.devices()
    if len(devices) < 2 or len(devices) % 2:
        pytest.skip(f"needs an even number of GPUs, this machine has {len(devices)}")
    shape = (len(devices),) if shape is None else shape(len(devices))
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def _gradients(mesh, dtype=jnp.float32):
    """[n, d] with d divisible by n."""
    x = lognormal_mixture(jax.random.key(0), mesh.size, 4096).astype(dtype)
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


@pytest.mark.parametrize("name", daily(TOPOLOGIES, ["ring", "butterfly", "direct", "two axes"]))
@pytest.mark.parametrize(
    "dtype", daily([jnp.float32, jnp.bfloat16], [jnp.bfloat16]), ids=["f32", "bf16"]
)
def test_replicas_are_equal_and_accurate(name, dtype):
    topology = TOPOLOGIES[name]
    """Replicas of a sum, and of its halves."""
    two_levels = isinstance(topology, dq.Hierarchical)
    mesh = _mesh(lambda n: (2, n // 2), ("node", "gpu")) if two_levels else _mesh()
    if isinstance(topology, dq.Butterfly) and mesh.size & (mesh.size - 1):
        pytest.skip(f"{mesh.size} GPUs are no power of two")
    x, axes = _gradients(mesh, dtype), mesh.axis_names
    permutes = not two_levels and topology.transport == "permutes"

    @(dq.jit if permutes else jax.jit)
    @jax.shard_map(mesh=mesh, in_specs=P(axes), out_specs=(P(), P(axes), P(axes)))
    def reduce(x):
        options = {"compression": over(topology, METHOD)}
        own = dq.psum_scatter(x[0], axes, tiled=True, **options)
        gathered = dq.all_gather(own, axes, tiled=True, compression=METHOD)[None]
        return dq.psum(x[0], axes, **options), own, gathered

    out, own, gathered = reduce(x)
    assert_copies_equal(out)
    assert_replicas_equal(gathered)
    assert 1e-6 < sum_error(out, x) < 6e-3
    assert 1e-7 < sum_error(own, x) < 6e-3
    assert 1e-7 < sum_error(gathered[0], np.asarray(own)[None]) < 6e-3


@pytest.mark.parametrize("super_groups", daily([2**14, 2**13 + 48], [2**13 + 48]))
def test_widths_and_order_in_a_psum_are_those_of_the_reference(monkeypatch, super_groups):
    """Wrong widths of the default kernels fill payloads of the same sizes, and raise the error."""
    mesh, layouts, seen = _mesh(), [], []

    def spied(stats, seed, layout, backend=None):
        plan = make_plan(stats, seed, layout, backend)
        layouts.append(layout)
        jax.debug.callback(
            lambda *told: seen.append(jax.tree.map(np.asarray, told)), stats, plan.order, plan.tiles
        )
        return plan

    monkeypatch.setattr(codec, "make_plan", spied)
    jax.clear_caches()  # or a plan of this size is traced already
    x = lognormal_mixture(jax.random.key(1), mesh.size, super_groups)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    def reduce(x):
        return dq.psum(x[0], "data", compression=METHOD)[None]

    assert_replicas_equal(reduce(jax.device_put(x, NamedSharding(mesh, P("data")))))
    jax.effects_barrier()
    assert len(seen) == mesh.size
    assert layouts[0].rows < 2**17
    stats, *_ = seen[0]
    with jax.default_device(jax.devices("cpu")[0]):
        plan = make_plan(jnp.asarray(stats), jnp.uint32(0), layouts[0], "jnp")
    assert len(np.unique(plan.tiles[0] & 31)) > 1  # widths differ
    for told in seen:
        jax.tree.map(np.testing.assert_array_equal, told, (stats, plan.order, plan.tiles))


EVERY_ROUTE = [(name, route) for name, row in EVERY_METHOD.items() for route in row.routes]
OWN = "dynamiq", "dynamiq, no plan", "dynamiq, dither", "mxfp8", "minmax", "thc, memory"
FIRST_ROUTES = [(name, next(iter(EVERY_METHOD[name].routes))) for name in OWN]


@pytest.mark.parametrize(("name", "route"), daily(EVERY_ROUTE, FIRST_ROUTES))
def test_every_method_through_nccl(name, route):
    """Memory and dtypes on the wire included: bytes, 32-bit lanes, bf16 bits in words."""
    mesh, row = _mesh(), EVERY_METHOD[name]
    topology = row.routes[route]
    if isinstance(topology, dq.Butterfly) and mesh.size & (mesh.size - 1):
        pytest.skip(f"{mesh.size} GPUs are no power of two")
    x = jax.device_put(gradient(0, mesh.size, 65536 - 100), NamedSharding(mesh, P("data")))
    state = jax.device_put(
        first_state(row.method, x, mesh.size, topology), NamedSharding(mesh, P("data"))
    )

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P("data"), P("data")),
        check_vma=False,
    )  # fmt: skip
    def reduce(x, state):
        state = jax.tree.map(lambda s: s[0], state)
        options = {"op": "sum", "compression": over(topology, row.method)}
        total, state, _ = dq.reduce(x[0], "data", state=state, **options)
        return jax.tree.map(lambda leaf: leaf[None], (total, state))

    total, state = reduce(x, state)
    total, state = reduce(x, state)
    assert_replicas_equal(total)
    assert sum_error(total[0], x) < 3 * row.error * mesh.size / 4


def test_no_temporary_of_the_size_of_the_gradient():
    mesh = _mesh()
    size = 2**26
    struct = jax.ShapeDtypeStruct((mesh.size, size), jnp.bfloat16)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def reduce(x):
        return dq.psum(x.reshape(-1), "data", compression=dq.Compression(topology=dq.Ring()))

    memory = reduce.lower(struct).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * 2 * size


def _pushing(mesh):
    """The mesh, if its GPUs can push."""
    capability = jax.devices()[0].compute_capability
    if not RUNS_MOSAIC or float(capability) < 9:
        pytest.skip(f"JAX {jax.__version__} on GPUs of capability {capability} has no push kernels")
    if mesh.size > MOST_WORKERS:
        pytest.skip(f"{mesh.size} GPUs are more than {MOST_WORKERS}")
    return mesh


ODD = 3 * 5 * 7 * 11 * 13 * 17 + 2
PUSHED = {
    "plan": {"plan": True},
    "no plan": {"plan": False},
    "dither": {"bits": 4, "plan": False, "dither": True},
    "paper": contenders.PAPER,
    "large groups": {"plan": True, "format": dq.Format(group_size=64)},
}


@pytest.mark.parametrize("name", daily(PUSHED, ["plan", "no plan", "dither"]))
@pytest.mark.parametrize("size", daily([2**18, ODD], [ODD]))
@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_pushed_payloads_give_the_bits_of_other_transports(name, size, check_vma):
    mesh, options = _pushing(_mesh()), PUSHED[name]
    n, spec, key = mesh.size, P("data"), jax.random.key(7)
    method = dq.Compression(dq.DynamiQ(**options), min_bucket_size=1)
    x = jax.random.normal(jax.random.key(size), (n, n * size)) * jnp.arange(1.0, n + 1)[:, None]
    x = jax.device_put(x, NamedSharding(mesh, spec))

    def run(transport):
        options = {"compression": over(dq.Direct(transport=transport, streams=1), method)}

        def all_three(x):
            total = dq.psum(x[0], "data", key=key, **options)
            own = dq.psum_scatter(x[0], "data", tiled=True, key=key, **options)
            whole = dq.all_gather(own, "data", tiled=True, key=key, compression=method)
            return total[None], own[None], whole[None]

        mapped = jax.shard_map(
            all_three, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
        call = dq.jit(mapped)
        first, again = call(x), call(x)  # counters begin at zero again
        jax.tree.map(np.testing.assert_array_equal, first, again)
        return [np.asarray(y) for y in first]

    found = {name: run(name) for name in ("push", "collectives", "permutes")}
    for a, *others in zip(*found.values(), strict=True):
        for number, b in enumerate(others):
            # Of more workers, permutes add up in another order, and NCCL adds statistics up so.
            if n == 2 or (number == 0 and options.get("plan") is False):
                np.testing.assert_array_equal(a, b)
            else:
                assert np.linalg.norm(a - b) < 0.3 * np.linalg.norm(a)
    total = found["push"][0]
    np.testing.assert_array_equal(total, np.broadcast_to(total[:1], total.shape))
    assert 1e-6 < sum_error(total[0], x) < 1e-1


@pytest.mark.parametrize("rounding", daily(["antithetic", "independent"], ["antithetic"]))
@pytest.mark.parametrize("dither", daily([True, False], [True]))
def test_a_push_without_a_key_agrees_on_a_seed(dither, rounding):
    mesh = _pushing(_mesh())
    method = dq.DynamiQ(bits=4, plan=False, dither=dither, rounding=rounding)
    method = dq.Compression(method, min_bucket_size=1, min_bucket_bytes=0)
    x = jax.random.normal(jax.random.key(3), (mesh.size, 2**21 + 77))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def run(transport, x):
        route = dq.Direct(transport=transport, streams=1)
        one = lambda x: dq.psum(x[0], "data", compression=over(route, method))[None]
        mapped = jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return np.asarray(dq.jit(mapped)(x))

    total, other = run("push", x), run("collectives", x)
    np.testing.assert_array_equal(total, np.broadcast_to(total[:1], total.shape))
    np.testing.assert_array_equal(total, run("push", x))
    # A decoder with the noise of another seed would err by more.
    assert 0.9 < sum_error(total[0], x) / sum_error(other[0], x) < 1.1
    assert not np.array_equal(total, run("push", 2 * x) / 2)  # another gradient, other noise


BOTH = (("a", "b"),)


@pytest.mark.parametrize("axes", daily([(("a",),), (("b",),), BOTH], [BOTH]))
@pytest.mark.parametrize("words", daily([4 * 70_000, 2**20 + 3, 5], [2**20 + 3]))
def test_pushes_bring_what_collectives_bring(axes, words):
    mesh = _pushing(_mesh(lambda n: (2, n // 2), ("a", "b")))
    n, spec = int(np.prod([mesh.shape[name] for name in axes])), P(("a", "b"))
    bits = jax.random.bits(jax.random.key(0), (mesh.size, n, words), jnp.uint32)
    leaves = bits, bits[..., :7].astype(jnp.uint8), bits[..., :9].astype(jnp.bfloat16)
    leaves = jax.device_put(leaves, NamedSharding(mesh, spec))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def both(leaves):
        leaves = jax.tree.map(lambda x: x[0], leaves)
        axis, sizes = Axis(axes), {name: mesh.shape[name] for name in axes}
        pushed = [pk.exchange(leaves, sizes, to_all=to_all) for to_all in (False, True)]
        wanted = [axis.all_to_all(leaves), jax.tree.map(axis.all_gather, leaves)]
        return jax.tree.map(lambda x: x[None], (pushed, wanted))

    for _ in range(3):  # counters begin at zero again
        jax.tree.map(np.testing.assert_array_equal, *both(leaves))


def test_two_processes_push_what_collectives_bring():
    if not JOINS_PROCESSES or len(jax.devices()) < 2:
        pytest.skip(f"JAX {jax.__version__} with {len(jax.devices())} GPUs has no such kernels")
    if (version := peers.nccl_version() or ()) < peers.SYMMETRIC_NCCL:
        pytest.skip(f"NCCL {version} is older than {peers.SYMMETRIC_NCCL}")
    if not peers.connected(jax.devices()[:2]):
        pytest.skip("NVLink does not connect the first two GPUs")
    (found,) = push_between.run()
    assert found["exchange"] == found["psum"] == [True] * 3
    assert 1e-4 < found["error"] < 3e-2
