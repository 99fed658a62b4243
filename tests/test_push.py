"""Sums over NVLink push where that is fastest: by size, by the mesh's devices, beside what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, daily
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from stand_ins import exchanged, reduced
from workers import auto_mesh, gradient

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.compression import compression as compressing
from dynamiq_jax.core import axis as core_axis
from dynamiq_jax.methods.dynamiq import method as dynamiq


def needs_of_meshes(names=()):
    """Push kernels need a map over all axes of the mesh, as on GPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    if not names and not mesh.manual_axes:
        return None
    mapped = set(names) <= set(mesh.axis_names) == set(mesh.manual_axes)
    return None if mapped else "jax.shard_map over all axes of a mesh"


@pytest.fixture
def nvlink(monkeypatch):
    """Devices that push kernels would run on, by stand-ins, with limits for small tests."""
    monkeypatch.setattr(compressing, "fast_links", lambda: True)
    monkeypatch.setattr(pk, "needs_of_push", needs_of_meshes)
    monkeypatch.setattr(dynamiq, "push_bytes", lambda n: (2**15, 2**20))
    monkeypatch.setattr(pk, "exchange", exchanged)
    called: list[int] = []

    def all_reduce(*args, **options):
        assert needs_of_meshes(args[5]) is None
        called.append(args[0].x.size)
        return reduced(*args, **options) * 1000.0  # told from the other road

    monkeypatch.setattr(pk, "all_reduce", all_reduce)
    return called


def on_mesh(order, reduce, x, **options):
    """``reduce`` of a row for each device, on a mesh of the devices in an order."""
    mesh = Mesh(np.array(jax.devices())[list(order)], ("data",))
    run = jax.shard_map(
        lambda x: reduce(x[0]), mesh=mesh, in_specs=P("data"), out_specs=P(), **options
    )
    return np.asarray(jax.jit(run)(x))


def off(total, exact):
    """|error| / |sum|."""
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("check_vma", daily([True, False], [True]))
def test_fast_links_push_where_the_mesh_has_its_devices_in_order(nvlink, check_vma):
    x = gradient(5, 2, (3 + check_vma) * 2**15)  # sizes that no other test has traced
    exact = np.asarray(x).sum(0)
    reduce = lambda x: dq.psum(x, "data")
    assert off(on_mesh([0, 1], reduce, x, check_vma=check_vma) / 1000, exact) < 0.2
    assert nvlink
    for order in ([1, 0], [2, 3]):
        assert off(on_mesh(order, reduce, x, check_vma=check_vma), exact) < 0.2


def laid(mesh, x, wanted=None):
    """A row of ``x`` for each device of a mesh; and a psum mapped over ``wanted``'s devices."""
    run = jax.shard_map(
        lambda x: dq.psum(x[0], "data"), mesh=wanted, in_specs=P("data"), out_specs=P()
    )
    return jax.device_put(x, jax.NamedSharding(mesh, P("data"))), jax.jit(run)


def test_each_mesh_that_is_set_has_a_program_by_its_own_devices(nvlink):
    x = gradient(5, 2, 7 * 2**14)  # no other test has traced this size
    exact = np.asarray(x).sum(0)
    run = laid(auto_mesh(2), x)[1]
    for order, pushes in (([0, 1], True), ([1, 0], False), ([2, 3], False), ([0, 1], True)):
        mesh = Mesh(np.array(jax.devices())[order], ("data",))
        with jax.set_mesh(mesh):
            total = np.asarray(run(laid(mesh, x)[0]))
        assert off(total / (1000 if pushes else 1), exact) < 0.2, order


def test_programs_for_devices_that_are_not_known_do_not_push(nvlink):
    x, mesh = gradient(5, 2, 9 * 2**14), auto_mesh(2)  # no other test has traced this size
    exact, (own, run) = np.asarray(x).sum(0), laid(mesh, x, mesh.abstract_mesh)
    assert off(np.asarray(run(own)), exact) < 0.2
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own.sharding)
    exported = jax.export.export(laid(mesh, x, mesh)[1])(shapes)
    reverse = Mesh(np.array(jax.devices())[[1, 0]], ("data",))
    assert off(np.asarray(jax.jit(exported.call)(laid(reverse, x)[0])), exact) < 0.2
    # Nor does what JAX has traced before a mesh of devices was set.
    run, abstract = laid(mesh, x)[1], mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        run.trace(shapes.update(sharding=jax.NamedSharding(abstract, P("data"))))
    for around in (mesh, reverse):
        with jax.set_mesh(around):
            assert off(np.asarray(run(laid(around, x)[0])), exact) < 0.2


def by_terms(x):
    """A sum by gradients of workers, which are summed outside of a map."""
    params = jnp.zeros(x.shape[1])
    loss = lambda params, x: jnp.sum(params * x[0]) * 2  # a mean of two workers' losses

    def total(params, x):
        grad_fn = dq.value_and_grad(loss, axis_name="data", unreduced=True)
        return dq.psum(grad_fn(params, x)[1], "data")

    return lambda: jax.jit(lambda x: total(params, x))


def by_gradients(x):
    """A sum by one function of gradients, which keeps its own program."""
    grad_fn = dq.value_and_grad(lambda params, x: 2 * jnp.mean(x @ params), axis_name="data")
    params = np.zeros(x.shape[1], np.float32)
    return lambda: jax.jit(lambda x: grad_fn(jnp.asarray(params), x)[1])


SUMS = {"map": (15, lambda x: lambda: laid(auto_mesh(2), x)[1]), "terms": (13, by_terms),
        "gradients": (11, by_gradients)}  # fmt: skip
"""{name: (the size in 2**14, which no other test has traced; x -> () -> a new `jax.jit`)}"""


@pytest.mark.parametrize("way", daily(SUMS, ["gradients"]))
def test_programs_for_an_abstract_mesh_do_not_ask_for_devices(nvlink, way):
    """They do not take what was traced of the same shapes while a mesh of devices was set."""
    size, sums = SUMS[way]
    x, mesh = gradient(5, 2, size * 2**14), auto_mesh(2)
    exact, fresh = np.asarray(x).sum(0), sums(x)
    own, _ = laid(mesh, x)
    with jax.set_mesh(mesh):
        assert off(np.asarray(fresh()(own)) / 1000, exact) < 0.2
    abstract = mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        sharding = jax.NamedSharding(abstract, P("data"))
        shapes = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        exported = jax.export.export(fresh())(shapes)
    with jax.set_mesh(mesh):
        assert off(np.asarray(jax.jit(exported.call)(own)), exact) < 0.2
        assert off(np.asarray(fresh()(own)) / 1000, exact) < 0.2


def test_gradients_push_after_a_trace_for_an_abstract_mesh(nvlink):
    """A function of gradients does not take that trace for devices that are known."""
    x, mesh = gradient(5, 2, 10 * 2**14), auto_mesh(2)
    exact, fresh = np.asarray(x).sum(0), by_gradients(x)
    abstract = mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        sharding = jax.NamedSharding(abstract, P("data"))
        fresh().trace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
    with jax.set_mesh(mesh):
        assert off(np.asarray(fresh()(laid(mesh, x)[0])) / 1000, exact) < 0.2


def test_programs_that_push_take_arrays_on_several_meshes(nvlink):
    x, mesh = gradient(5, 2, 9 * 2**14), auto_mesh(2)
    own, run = laid(mesh, x, mesh)
    other = jax.NamedSharding(Mesh(np.array(jax.devices())[:2], ("other",)), P())
    added = jax.device_put(jnp.zeros(x.shape[1]), other)
    total = np.asarray(jax.jit(lambda x, y: run(x) + y)(own, added))
    assert off(total / 1000, np.asarray(x).sum(0)) < 0.2


@pytest.mark.parametrize("part", ["is_mesh_set", "needs_devices"])
def test_a_jax_that_does_not_say_its_mesh_does_not_push(nvlink, part, monkeypatch):
    def lost(*_):
        raise RuntimeError("another JAX")

    monkeypatch.setattr(core_axis, part, lost)
    x = gradient(5, 2, (11 + len(part)) * 2**12)  # no other test has traced this size
    mesh = auto_mesh(2)
    own, run = laid(mesh, x, mesh)
    with jax.set_mesh(mesh):
        assert off(np.asarray(run(own)), np.asarray(x).sum(0)) < 0.2
    assert not nvlink


@pytest.mark.parametrize(("mapped", "compiled"), [(False, False), (True, True)])
def test_axes_of_vmap_do_not_push(nvlink, mapped, compiled):
    n, x = 3, gradient(5, 3, 2**15)
    reduce = lambda x: dq.psum(x, "worker")
    run = jax.vmap(jax.jit(reduce) if compiled else reduce, axis_name="worker", out_axes=None)
    if mapped:
        run = jax.shard_map(run, mesh=auto_mesh(2), in_specs=P(), out_specs=P(), check_vma=False)
    # A size that is compressed among n workers.
    assert off(np.asarray(run(jnp.tile(x, n))), np.tile(np.asarray(x).sum(0), n)) < 0.2
    assert not nvlink


@pytest.mark.filterwarnings("ignore:leaf .*other")  # it is too small without push kernels
def test_states_fit_wherever_they_are_made(nvlink, monkeypatch):
    """Buckets of a method without memory have a place among the states of the others."""
    method = lambda path, _: dq.ErrorFeedback(CHEAP.method) if "kept" in path else dq.DynamiQ()
    told = dq.Compression(method, min_leaf_size=1)
    monkeypatch.setattr(dynamiq, "psum_bytes", lambda n: 2**19)  # the first leaf has more
    x = gradient(5, 2, 3 * 2**16)
    tree, mesh = {"kept": x, "other": x[:, : 3 * 2**15]}, auto_mesh(2)
    of_one = {name: x[0] for name, x in tree.items()}

    def reduce(tree, state):
        found = dq.reduce(tree, "data", op="sum", compression=told, state=state)
        return found.tree["other"], found.state

    run = jax.shard_map(
        lambda tree, state: reduce(*jax.tree.map(lambda x: x[0], (tree, state)))[0],
        mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    states = [told.init_state(of_one, 2, stacked=True)]
    with jax.set_mesh(mesh):
        states.append(told.init_state(of_one, 2, stacked=True))
    for state in states:
        total = np.asarray(jax.jit(run)(tree, state))
        assert off(total, np.asarray(tree["other"]).sum(0)) < 0.2
    assert not nvlink


def by(compression=None, **options):
    """A psum that compresses buckets of any size."""
    limits = {"min_bucket_size": 1, "min_bucket_bytes": 0}
    told = dq.Compression(compression, **limits, **options)
    return lambda x: dq.psum(x, "data", compression=told)


NOT_PUSHED = {
    "large": (lambda x: by()([x] * 3)[0], 3 * 2**15),
    "small": (lambda x: dq.psum(x, "data"), 2**12),
    "transport": (by(transport="permutes"), 2**15),
    "topology": (by(topology=dq.Direct(transport="collectives")), 2**15),
    "streams": (by(topology=dq.Direct(streams=2)), 2**15),
    "ring": (by(topology=dq.Ring()), 2**15),
    "plan": (by(dq.DynamiQ(plan=True)), 2**15),
    "checks": (by(dq.DynamiQ(debug_checks=True)), 2**15),
    "jnp": (by(dq.DynamiQ(backend="jnp")), 2**15),
    "another method": (by(dq.contrib.MXFP4()), 2**15),
}


@pytest.mark.parametrize(("reduce", "size"), NOT_PUSHED.values(), ids=NOT_PUSHED.keys())
def test_what_push_kernels_would_not_speed_up_does_not_push(nvlink, reduce, size):
    x = gradient(5, 2, size)
    assert off(on_mesh([0, 1], reduce, x), np.asarray(x).sum(0)) < 0.2
    assert not nvlink


@pytest.mark.parametrize("wrapped", [True, False])
def test_reductions_beside_the_backward_pass_do_not_push(nvlink, wrapped):
    x = gradient(5, 2, 5 * 2**14)  # no other test has traced this size
    limits = {"compression": dq.Compression(min_bucket_size=1, min_bucket_bytes=0), "op": "sum"}

    def reduce(x):
        def loss(w):
            w = dq.fsdp(w, "data", **limits) if wrapped else w
            return jnp.sum(w * x)

        grads = jax.grad(loss)(jnp.zeros_like(x))
        return grads if wrapped else dq.psum(grads, "data", compression=limits["compression"])

    total = on_mesh([0, 1], reduce, x, check_vma=False)
    assert bool(nvlink) is not wrapped
    assert off(total / (1 if wrapped else 1000), np.asarray(x).sum(0)) < 0.2


def test_explanations_say_which_sums_push(nvlink):
    tree = jax.ShapeDtypeStruct((2**17,), jnp.float32)
    said = dq.explain(tree, 2, verbose=False)
    with jax.set_mesh(auto_mesh(2)):
        assert dq.explain(tree, 2, verbose=False).rows == said.rows
    assert "sums of up to 1 MiB by one push kernel for each bucket" in said.defaults
    assert said.rows[0].route == "compressed"
    assert not dq.explain(tree, 2, verbose=False, compression=dq.BF16()).defaults


@pytest.mark.parametrize("transport", daily(["push", "collectives"], ["push"]))
def test_explanations_of_steps_have_plans_that_only_push(transport, monkeypatch):
    """Kernels are no collectives, so there is nothing of them in the compiled program."""

    def moved(tree, axes, *, to_all):
        return jax.tree.map(lambda x: jnp.stack([x] * 2) if to_all else x, tree)

    monkeypatch.setattr(pk, "exchange", moved)
    route = dq.Direct(transport=transport)
    method = dq.Compression(
        dq.contrib.MinMax(), topology=route, min_bucket_size=1, min_leaf_size=1, exclude="exact"
    )
    reduce = jax.shard_map(
        lambda tree: dq.psum(tree, "data", key=jax.random.key(0), compression=method),
        mesh=auto_mesh(2), in_specs=P("data"), out_specs=P(),
    )  # fmt: skip
    # Exact leaves, which take less or more bytes than payloads.
    for size in (0, 2**16):
        shapes = {"exact": 2 * size, "other": 2**16}
        tree = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name, n in shapes.items() if n}
        said = dq.explain(jax.jit(reduce), tree, verbose=False)
        (run,) = said.plans
        assert run.times == 1 and run.sent_bytes == run.plan.sent_bytes > 4 * size
        assert said.agrees and said.sent_bytes == run.sent_bytes
        assert said.pushes == (transport == "push")
        pushed = run.plan.sent_bytes - 4 * size if transport == "push" else 0
        assert abs(said.program_bytes + pushed - said.sent_bytes) <= 0.02 * said.sent_bytes
