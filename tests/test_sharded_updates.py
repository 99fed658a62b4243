"""`dq.optax.sharded` on 8 devices: against plain optax on the whole batch, and its state."""

import dataclasses
import math
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import (
    CHEAP,
    assert_close,
    assert_copies_equal,
    assert_same_bits,
    auto_mesh,
    daily,
    once,
    promoting,
    small,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.axis import Axis, axis_names
from dynamiq_jax.core.fingerprint import fingerprint
from dynamiq_jax.methods.metrics import vnmse

sharded_updates = sys.modules["dynamiq_jax.optax.sharded"]  # `dq.optax.sharded` is the function

N = 8
EXACT = dq.Compression(dq.F32(), min_leaf_size=256, min_bucket_bytes=0)
TWO_BITS = small(dq.DynamiQ(widths=(2,), bits=2.5, dither=True))
KEY = jax.random.key(0)


def by_size(params):
    return jax.tree.map(lambda x: x.size > 600, params)  # a slice has at most 504


def narrowed(grad, param):
    scaled = grad * jnp.sum(jnp.arange(grad.shape[0])) / param.size
    return scaled if param.shape[0] == 64 else lax.cond(param.ndim > 1, jnp.tanh, abs, scaled)


RULES = {
    "adamw": optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "by sizes": optax.chain(
        optax.adamw(1e-2, weight_decay=0.1, mask=by_size),
        optax.masked(optax.trace(0.9), by_size),
        optax.transforms.conditionally_transform(optax.scale(0.5), lambda step: step > 0),
        optax.stateless_with_tree_map(narrowed),
    ),
}
"""The last follows sizes of whole parameters, constants of them, and branches."""


@once
def problem(dtype=jnp.float32):
    """Parameters of all kinds of leaves, and a batch of 32 rows for each of ten steps."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "in": jax.random.normal(keys[0], (16, 64)) / 4,
        "odd": jax.random.normal(keys[1], (63, 64)) / 8,  # its second dimension divides
        "neither": jax.random.normal(keys[3], (3, 5)) / 8,
        "scale": jnp.ones(64),
        "out": jax.random.normal(keys[2], (64, 8)) / 8,
    }
    return jax.tree.map(lambda x: x.astype(dtype), params), jax.random.normal(keys[4], (10, 32, 16))


def loss_fn(params, x):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    hidden = jnp.tanh(x @ params["in"]) * params["scale"][None]
    hidden = hidden + hidden[:, :63] @ params["odd"]
    bias = jnp.sum(params["neither"] ** 2)
    return jnp.mean(jnp.square(hidden @ params["out"] - 1 + bias))


def plain(inner, params, batches, max_norm=None):
    """Parameters after training on one device."""
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
    optimizer = promoting(optax.chain(clip, inner))

    @jax.jit
    def run(params, batches):
        def step(carry, x):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0]

    return run(params, batches)


def start(optimizer, params, mesh=None, axes="data", check_vma=True, specs=None):
    """The first state, and jit of (params, opt_state, x) -> (params, opt_state) under a map."""
    mesh = auto_mesh() if mesh is None else mesh
    first = dq.optax.init(optimizer, params, mesh)
    return first, stepper(optimizer, first, mesh, axes, check_vma, specs)


def stepper(optimizer, state, mesh, axes="data", check_vma=True, specs=None):
    """The step of `start`, for a state or the shapes of one."""
    splits, specs = dq.optax.state_specs(state), P() if specs is None else specs

    def step(params, opt_state, x):
        local = Axis(axis_names(axes)).to_varying(params)
        grads = jax.grad(loss_fn)(local, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), opt_state

    options = {"in_specs": (specs, splits, P(axes)), "out_specs": (specs, splits)}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **options))


def on_mesh(params, mesh=None):
    """Whole parameters on all devices, where a step leaves them: it is compiled once."""
    return jax.device_put(params, NamedSharding(mesh or auto_mesh(), P()))


def train(optimizer, params, batches, **options):
    state, step = start(optimizer, params, **options)
    params = on_mesh(params, options.get("mesh"))
    for x in batches:
        params, state = step(params, state, x)
    return params, state


def make(rule="sgd", method=EXACT, differences=EXACT, **options):
    own = {"axis_name": "data", "method": method, "differences": differences, **options}
    return promoting(dq.optax.sharded(RULES[rule] if isinstance(rule, str) else rule, **own))


@pytest.mark.parametrize("rule", daily(RULES, ["by sizes"]))
def test_exact_halves_train_as_plain_optax_does(rule):
    params, batches = problem()
    found, state = train(make(rule, max_norm=0.5), params, batches[:4], check_vma=rule != "lion")
    expected, _ = plain(RULES[rule], params, batches[:4], 0.5)
    assert_close(found, expected)
    assert_close(state.masters, expected)
    assert int(state.step) == 4
    assert int(state.skipped) == 0


class Fields(NamedTuple):
    """Parameters in another order than that of their names, split along unlike dimensions."""

    wide: jax.Array
    scale: jax.Array
    narrow: list[jax.Array]


def test_leaves_are_told_apart_by_their_places_and_paths():
    """Lists of more than ten leaves, too, of which the tenth sorts behind the first."""
    shapes = Fields((63, 16), (24,), [(16 if i == 2 else 8, 63) for i in range(11)])
    drawn = np.random.default_rng(0).standard_normal
    params = jax.tree.map(
        lambda shape: jnp.float32(drawn(shape)), shapes, is_leaf=lambda x: type(x) is tuple
    )
    method = small(CHEAP.method, exclude="wide|narrow/1")
    optimizer = dq.optax.sharded(optax.sgd(1.0), "data", method=method, differences=EXACT)

    def step(params):
        worker = jnp.float32(jax.lax.axis_index("data"))
        grads = jax.tree.map(lambda x: x * (worker + jnp.cos(x.size * x)), params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=auto_mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    found = jax.jit(mapped)(params)
    exact = jax.tree.map(lambda x: -x * (3.5 + jnp.cos(x.size * x)), params)
    for (path, x), expected in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(exact), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        error = float(vnmse(x, np.float32(expected)))
        kept = re.search("wide|narrow/1", name)
        assert (error < 1e-12) if kept else (1e-6 < error < 0.1), name


def test_workers_hold_their_slices():
    params, _ = problem()
    params = params | {"stack": np.ones((16, 64, 64), np.float32)}  # layers, two for each worker
    state = dq.optax.init(make("adamw"), params, auto_mesh())
    split = {"in": (16, 8), "odd": (63, 8), "neither": (3, 5), "scale": (64,), "out": (64, 1)}
    split["stack"] = (16, 8, 64)
    for tree in (state.masters, state.inner[0].mu):
        assert {name: x.addressable_shards[3].data.shape for name, x in tree.items()} == split
        assert {name: x.shape for name, x in tree.items()} == jax.tree.map(jnp.shape, params)
    assert state.inner[0].count.sharding.is_fully_replicated
    assert_same_bits(jax.device_get(state.masters), jax.device_get(params))


@pytest.fixture(scope="module")
def compressed():
    """The first state and the compiled step with compressed halves; parameters are on the mesh."""
    params, batches = problem()
    state, step = start(make("adamw", CHEAP, CHEAP), params)
    params = on_mesh(params)
    return state, params, step.lower(params, state, batches[0]).compile()


def test_compressed_halves_train_and_copies_stay_equal(compressed):
    state, found, step = compressed
    params, batches = problem()
    for x in batches[:8]:
        found, state = step(found, state, x)
    expected, _ = plain(RULES["adamw"], params, batches[:8])
    assert_copies_equal(found)
    for name in ("in", "odd", "out"):
        moved = np.linalg.norm(expected[name] - params[name])
        assert 0 < np.linalg.norm(found[name] - expected[name]) < 0.2 * moved
        assert 0 < np.linalg.norm(found[name] - state.masters[name]) < 0.05 * moved
    assert_close({"neither": found["neither"]}, {"neither": state.masters["neither"]}, rtol=1e-6)


def test_what_a_difference_loses_is_in_the_next_one():
    params, batches = problem()
    once = optax.scale_by_schedule(lambda count: -0.1 * (count == 0))
    state, step = start(make(once, EXACT, TWO_BITS), params)
    params = on_mesh(params)
    gaps = []
    for _ in range(4):
        params, state = step(params, state, batches[0])
        gaps.append(float(jnp.linalg.norm(params["in"] - state.masters["in"])))
    assert gaps[0] > 0
    assert gaps[2] < 0.9 * gaps[1] < 0.9**2 * gaps[0]


def test_a_step_that_is_not_finite_changes_nothing(compressed):
    (state, params, step), (_, batches) = compressed, problem()
    params, state = before = step(params, state, batches[0])
    for count, bad in enumerate([np.nan, np.inf, -np.inf], 1):
        x = batches[1].copy()
        x[9, 2] = bad  # worker 2's
        params, state = step(params, state, x)
        assert_same_bits(jax.device_get(params), jax.device_get(before[0]))
        assert_same_bits(jax.device_get(state.masters), jax.device_get(before[1].masters))
        assert_same_bits(jax.device_get(state.inner), jax.device_get(before[1].inner))
        assert (int(state.step), int(state.skipped)) == (1 + count, count)


def explicit_steps(optimizer, params, batches, mesh, axis_name, specs):
    """Trains outside of maps: the loss of all examples, gradients unreduced."""

    def loss(params, x):
        return loss_fn(params, jax.reshard(x, P(axis_name)))

    grad_fn = dq.value_and_grad(loss, axis_name=axis_name, method=EXACT, reduce=False)

    @jax.jit
    def step(params, state, x):
        grads = grad_fn(params, x)[1]
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
        state = dq.optax.init(optimizer, placed, mesh)
        for x in batches:
            x = jax.device_put(x, NamedSharding(mesh, P(axis_name)))
            placed, state = step(placed, state, x)
    return placed, state


TENSOR = {"in": P("model"), "odd": P(), "out": P(None, "model"), "neither": P(), "scale": P()}


OUTSIDE = [
    (("data",), (N,), dict.fromkeys(TENSOR, P()), P(None, "data")),
    (("data", "model"), (4, 2), TENSOR, P(None, ("model", "data"))),
]


@pytest.mark.parametrize(("axes", "sizes", "specs", "split"), OUTSIDE)
def test_outside_of_maps_on_explicit_axes(axes, sizes, specs, split):
    params, batches = problem()
    optimizer, mesh = make("adamw", max_norm=0.5), jax.make_mesh(sizes, axes)
    found, state = explicit_steps(optimizer, params, batches[:3], mesh, "data", specs)
    assert_close(found, plain(RULES["adamw"], params, batches[:3], 0.5)[0])
    assert state.masters["in"].sharding.spec == P(*specs["in"] or (None,), "data")
    assert state.inner[0].nu["out"].sharding.spec == split
    assert_copies_equal(found)


def test_gradients_of_more_axes_than_those_of_the_optimizer_are_refused():
    params, batches = problem()
    mesh, optimizer = jax.make_mesh((2, 4), ("node", "data")), make("sgd")
    grad_fn = dq.value_and_grad(loss_fn, axis_name=("node", "data"), method=EXACT, reduce=False)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        state = dq.optax.init(optimizer, params, mesh)
        x = jax.device_put(batches[0], NamedSharding(mesh, P(("node", "data"))))
        with pytest.raises(
            ValueError, match=r"over the axes \['data', 'node'\], and axis_name='data'"
        ):
            jax.eval_shape(
                lambda p, s, x: optimizer.update(grad_fn(p, x)[1], s, p), params, state, x
            )


@pytest.mark.release
def test_several_axes_of_workers():
    params, batches = problem()
    axes, kinds = ("node", "gpu"), (AxisType.Auto,) * 2
    options = {"mesh": jax.make_mesh((2, 4), axes, axis_types=kinds), "axes": axes}
    expected, _ = plain(RULES["adamw"], params, batches[:2])
    found, state = train(make("adamw", axis_name=axes), params, batches[:2], **options)
    assert_close(found, expected)
    assert state.masters["in"].sharding.spec == P(None, axes)
    topology = dq.Hierarchical(outer=dq.Direct())
    exact = dataclasses.replace(EXACT, topology=topology)
    assert_close(
        train(make("adamw", exact, axis_name=axes), params, batches[:2], **options)[0], expected
    )
    levels = dataclasses.replace(CHEAP, topology=topology)
    found, _ = train(make("adamw", levels, CHEAP, axis_name=axes), params, batches[:2], **options)
    assert_copies_equal(found)
    for name in ("in", "odd", "out"):
        moved = np.linalg.norm(expected[name] - params[name])
        assert 0 < np.linalg.norm(found[name] - expected[name]) < 0.3 * moved


@pytest.mark.parametrize("n", daily([8, 4], [4]))
def test_a_checkpoint_goes_to_other_numbers_of_workers(tmp_path, n):
    params, batches = problem()
    optimizer = make("adamw")
    params, state = train(optimizer, params, batches[:2])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state")
    params = jax.device_get(params)
    fresh, step = start(optimizer, params, auto_mesh(n))
    params = on_mesh(params, auto_mesh(n))
    again = dq.optax.restore_state(saved, fresh)
    assert_same_bits(jax.device_get(again.masters), jax.device_get(state.masters))
    assert again.masters["in"].addressable_shards[0].data.shape == (16, 64 // n)
    for x in batches[2:4]:
        params, again = step(params, again, x)
    assert_close(params, plain(RULES["adamw"], problem()[0], batches[:4])[0])


def test_masters_follow_parameters_until_the_first_update():
    """A step that is not finite shows them: it changes nothing."""
    params, batches = problem()
    fine = jax.tree.map(lambda x: np.float32(1.001 * x + 1), jax.device_get(params))
    copies = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fine)
    _, step = start(optimizer := make("sgd"), params)
    for first, expected in ((fine, fine), (params, copies)):
        state = dq.optax.init(optimizer, first, auto_mesh())
        _, state = step(copies, state, np.full((32, 16), np.nan, np.float32))
        assert (int(state.step), int(state.skipped)) == (1, 1)
        expected = jax.tree.map(lambda x: x.astype(np.float32), expected)
        assert_same_bits(jax.device_get(state.masters), expected)


def test_what_does_not_go_is_refused():
    params, batches = problem()
    optimizer = make("sgd")
    init = lambda optimizer, params: dq.optax.init(optimizer, params, auto_mesh())  # noqa: E731
    state, over_data = init(optimizer, params), dict.fromkeys(params, P("data"))
    splits = dq.optax.state_specs(state)
    maps = {"mesh": auto_mesh(), "in_specs": (P(), splits), "out_specs": (P(), splits)}
    replicated = jax.shard_map(lambda p, s: optimizer.update(p, s, p), **maps)
    for words, call, *args in (
        ("how many workers axis 'data' has; call dq.optax.init", optimizer.init, params),
        (r"optimizer.update\(grads, opt_state, params\)", optimizer.update, params, state),
        ("no map over axis 'data', and no mesh of Explicit axes", optimizer.update, params, state,
         params),
        ("max_norm=0 must be above 0", lambda: make("sgd", max_norm=0)),
        (r"leaf in is sharded over \['data'\]", init, make("sgd", specs=over_data), params),
        ("leaf w is int32, and its master", init, optimizer, {"w": np.ones((8, 8), "i4")}),
        ("leaf w is complex64, and its master", init, optimizer, {"w": np.ones((8, 8), "c8")}),
        (r"leaf in is the same on all 8 workers.*pcast", replicated, params, state),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call(*args)
    with pytest.warns(UserWarning, match=r"1 leaves of .* no dimension that divides by the 8"):
        dq.optax.init(optimizer, {"w": jnp.ones((33, 17))}, auto_mesh())


def test_copies_are_compared_every_so_many_steps(monkeypatch):
    """`test_corruption` has the error of copies that differ, in a process that it may end."""
    hashes = []

    def compare(tree, axis, what):
        jax.debug.callback(lambda own: hashes.append(int(own)), fingerprint(tree))

    monkeypatch.setattr(sharded_updates, "assert_same_on_workers", compare)
    params, batches = problem()
    state, step = start(make("sgd", check_every=2), params)
    params = on_mesh(params)
    for count in (N, N, 2 * N):  # before the updates 0, 1 and 2
        params, state = step(params, state, batches[0])
        jax.effects_barrier()
        assert len(hashes) == count
        assert len({*hashes}) == count // N


def test_what_travels(compressed):
    hlo = compressed[2].as_text()
    large = re.findall(r"= \w+\[([\d,]+)\]\S* (all-reduce|all-gather|reduce-scatter)\(", hlo)
    sizes = [(math.prod(map(int, shape.split(","))), kind) for shape, kind in large]
    floats = re.findall(r"= f32\[([\d,]+)\]\S* all-(?:reduce|gather|to-all)", hlo)
    assert max(math.prod(map(int, shape.split(","))) for shape in floats) < 200
    assert any(kind == "all-gather" and size > 200 for size, kind in sizes)  # of words
