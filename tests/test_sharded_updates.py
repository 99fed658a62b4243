"""`dq.optax.sharded` on 8 devices: against plain optax on the whole batch, and its state."""

import collections
import dataclasses
import math
import re
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_copies_equal, assert_refused, assert_same_bits
from cases import CHEAP, EXACT, daily, small
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of, once, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.fingerprint import fingerprint
from dynamiq_jax.methods.metrics import vnmse

sharded_updates = sys.modules["dynamiq_jax.optax.sharded"]  # `dq.optax.sharded` is the function

N = 8
F32 = dataclasses.replace(EXACT, min_leaf_size=256)
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


@jax.jit
def norm_of(params, x):
    return optax.tree.norm(jax.grad(loss_fn)(params, x))


def plain(inner, params, batches, max_norm=None):
    """Parameters after training on one device."""
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
    return optax_steps.plain(promoting(optax.chain(clip, inner)), loss_fn, params, batches)


def start(optimizer, params, mesh=None, axes="data", check_vma=True):
    """The first state, and jit of (params, opt_state, x) -> (params, opt_state) under a map."""
    mesh, grads_of = mesh or auto_mesh(), optax_steps.of_batch(loss_fn, axes)
    first = dq.optax.init(optimizer, params, mesh)
    return first, optax_steps.stepper(
        optimizer, first, grads_of, mesh, axes=axes, check_vma=check_vma
    )


def train(optimizer, params, batches, mesh=None, axes="data", **options):
    state, step = start(optimizer, params, mesh, axes, **options)
    return optax_steps.train(step, params, state, batches, mesh or auto_mesh(), axes)


def make(rule="sgd", method=F32, differences=F32, **options):
    own = {
        "axis_name": "data",
        "compression": dq.Policy(gradients=method, parameters=differences),
        **options,
    }
    return promoting(dq.optax.sharded(RULES[rule] if isinstance(rule, str) else rule, **own))


TWO_AXES = ("node", "gpu")
WORKERS = [*((rule, "data", None) for rule in RULES), ("adamw", TWO_AXES, None)]
WORKERS += [("adamw", TWO_AXES, dq.Hierarchical(outer=dq.Direct()))]


DAILY = [("by sizes", "data", None), ("sgd", "data", None)]


@pytest.mark.parametrize(("rule", "axes", "topology"), daily(WORKERS, DAILY))
def test_exact_halves_train_as_plain_optax_does(rule, axes, topology):
    """SGD without a clip shows a wrong factor of the gradient, which clips and Adam hide."""
    params, batches = problem()
    max_norm = None if rule == "sgd" else 0.5
    mesh = auto_mesh() if axes == "data" else mesh_of(2, 4, names=axes)
    method = dataclasses.replace(F32, topology=topology)
    optimizer = make(rule, method, axis_name=axes, max_norm=max_norm)
    found, state = train(optimizer, params, batches[:4], mesh, axes, check_vma=rule != "lion")
    expected = plain(RULES[rule], params, batches[:4], max_norm)
    assert_close(found, expected)
    assert_close(state.masters, expected)
    assert state.masters["in"].sharding.spec == P(None, axes)
    assert (int(state.step), int(state.skipped)) == (4, 0)


@pytest.mark.usefixtures("padding_is_free")
def test_leaves_that_are_split_along_unlike_dimensions_share_a_bucket():
    """Each dimension alone has too few coordinates for a bucket of its own."""
    shapes = {"first": (128, 9), "second": (9, 128), "third": (3, 3, 128)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    method = dataclasses.replace(CHEAP, min_bucket_size=3 * 9 * 128)
    optimizer = dq.optax.sharded(
        optax.sgd(0.1), "data", compression=dq.Policy(gradients=method, parameters=method)
    )

    def update(params, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    maps = {"in_specs": (P(), P()), "out_specs": P(), "check_vma": False}
    run = jax.shard_map(update, mesh=auto_mesh(), **maps)
    text = str(jax.make_jaxpr(run)(params, params))
    assert len(re.findall(r"= all_to_all", text)) == 1 and "reduce_scatter" not in text
    assert not re.findall(r"f32\[[\d,]+\] = all_gather", text)


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
    optimizer = dq.optax.sharded(
        optax.sgd(1.0), "data", compression=dq.Policy(gradients=method, parameters=F32)
    )

    def step(params):
        worker = jnp.float32(jax.lax.axis_index("data"))
        grads = jax.tree.map(lambda x: x * (worker + jnp.cos(x.size * x)), params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=auto_mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    exact = jax.tree.map(lambda x: -x * (3.5 + jnp.cos(x.size * x)), params)
    found = jax.device_get((jax.jit(mapped)(params), exact))
    errors = jax.tree.map(lambda x, right: float(vnmse(x, np.float32(right))), *found)
    for path, error in jax.tree_util.tree_leaves_with_path(errors):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
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
    params = put(params, auto_mesh())
    return state, params, step.lower(params, state, batches[0]).compile()


def test_a_step_that_is_not_finite_changes_nothing(compressed):
    (state, params, step), (_, batches) = compressed, problem()
    params, state = before = step(params, state, batches[0])
    kept = lambda params, state: jax.device_get((params, state.masters, state.inner))
    assert np.isfinite(state.norm) and state.norm > 0
    for count, bad in enumerate([np.nan, np.inf, -np.inf], 1):
        x = batches[1].copy()
        x[9, 2] = bad  # worker 2's
        params, state = step(params, state, x)
        assert_same_bits(kept(params, state), kept(*before))
        assert (int(state.step), int(state.skipped)) == (1 + count, count)
        assert int(state.skipped_in_a_row) == count and not np.isfinite(state.norm)
    _, state = step(params, state, batches[1])
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (3, 0)
    assert np.isfinite(state.norm)


def test_a_first_state_can_be_donated():
    """No buffer is in it twice, also where init runs operation by operation."""
    optimizer = make("sgd", method=dq.F32())
    with jax.set_mesh(auto_mesh()):
        state = optimizer.init({"scale": jnp.ones(64)})
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
    assert len({x.unsafe_buffer_pointer() for x in shards}) == len(shards)


def test_a_state_of_an_earlier_version_is_restored_or_goes_on_as_it_is(tmp_path, compressed):
    """Such a state has neither the norm nor the number of steps that were skipped in a row."""
    (fresh, params, step), (_, batches) = compressed, problem()
    params, state = step(params, fresh, batches[0])
    _, state = step(params, state, np.full_like(batches[0], np.nan))
    lacks = dataclasses.replace(state, norm=None, skipped_in_a_row=None, sent=None)
    earlier = {"of": [jax.device_get(lacks)]}
    for saved in (earlier, optax_steps.saved_and_restored(tmp_path, earlier)):
        with pytest.warns(UserWarning) as caught:
            restored = dq.optax.restore_state(saved, {"of": [fresh]})["of"][0]
        assert [str(warning.message) for warning in caught] == [
            "opt_state: of/0/sent was not saved and starts anew; "
            "of/0/norm was not saved and starts anew; "
            "of/0/skipped_in_a_row was not saved and starts anew"
        ]
        assert (float(restored.norm), int(restored.skipped_in_a_row)) == (0, 0)
        kept = dataclasses.replace(restored, norm=None, skipped_in_a_row=None, sent=None)
        assert_same_bits(kept, lacks)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
    )
    with pytest.warns(UserWarning, match="norm was not saved"):
        again = dq.optax.restore_state(lacks, shapes)
    assert_same_bits(again.masters, restored.masters)
    _, goes_on = step(params, restored, batches[1])
    grads_of, optimizer = optax_steps.of_batch(loss_fn), make("adamw", CHEAP, CHEAP)
    lacks = dataclasses.replace(lacks, sent=state.sent)
    _, as_it_is = optax_steps.stepper(optimizer, lacks, grads_of, auto_mesh())(
        params, lacks, batches[1]
    )
    assert as_it_is.norm is None and as_it_is.skipped_in_a_row is None
    assert int(as_it_is.skipped) == int(goes_on.skipped) == 1
    assert_same_bits(as_it_is.masters, goes_on.masters)


def test_steps_that_are_skipped_in_a_row_are_warned_of(recwarn, compressed):
    """From the number on that is given, in a state at any depth; the largest number counts."""
    (state, params, step), (_, batches) = compressed, problem()
    bad = np.full((32, 16), np.nan, np.float32)
    told = []
    for x in (batches[0], bad, bad, bad):
        params, state = step(params, state, x)
        found = dq.optax.warn_of_skipped({"of": [state, state]})
        told.append((found, [str(warning.message) for warning in recwarn]))
    assert [found for found, _ in told] == [0, 1, 2, 3]
    *before, (_, (message,)) = told
    assert not any(messages for _, messages in before)
    assert re.match(
        r"the last 3 steps were skipped, .*is nan\).*learning rate, pass max_norm", message
    )
    assert recwarn[0].category is UserWarning
    one = dataclasses.replace(state, skipped_in_a_row=np.int32(5))
    pmapped = jax.tree.map(lambda x: np.stack([x] * N), jax.device_get(one))
    members = jnp.array([0, 5, 1]), jnp.array([1, np.nan, np.nan])  # of an ensemble under vmap
    vmapped = dataclasses.replace(state, skipped_in_a_row=members[0], norm=members[1])
    for states in ((state, one), pmapped, vmapped):
        with pytest.warns(UserWarning, match="the last 5 steps"):
            assert dq.optax.warn_of_skipped(states, in_a_row=5) == 5
    with_none = dataclasses.replace(one, norm=None, skipped_in_a_row=None)
    for words, call, *args in (
        ("in_a_row=0 must be at least 1", partial(dq.optax.warn_of_skipped, in_a_row=0), state),
        ("while JAX traces", jax.jit(dq.optax.warn_of_skipped), state),
        ("has no state of dq.optax.sharded", dq.optax.warn_of_skipped, state.inner),
        ("an earlier version has made it", dq.optax.warn_of_skipped, with_none),
    ):
        with pytest.raises(ValueError, match=words):
            call(*args)
    dq.optax.warn_of_skipped(one, in_a_row=6)
    assert len(recwarn) == 1


def test_every_step_has_noise_of_its_own(compressed):
    (state, params, step), (_, batches) = compressed, problem()
    later = dataclasses.replace(state, step=state.step + 1)
    (first, _), (other, _) = (step(params, own, batches[0]) for own in (state, later))
    assert np.mean(np.asarray(first["in"]) != np.asarray(other["in"])) > 0.1


def test_parameters_on_an_explicit_mesh_tell_it_where_none_is_set():
    mesh = mesh_of(8, kind=AxisType.Explicit)
    params = put(problem()[0], mesh)
    memory = dataclasses.replace(F32, method=dq.ErrorFeedback(dq.contrib.MinMax()))
    for rule in (make("adamw"), dq.optax.all_reduce("data", compression=memory)):
        state = rule.init(params)
        with jax.set_mesh(mesh):
            expected = rule.init(params)
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, expected)
        assert any("data" in x.sharding.spec for x in jax.tree.leaves(state))
        assert_same_bits(state, expected)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda x: x.name)
def test_outside_of_maps_another_axis_splits_leaves(kind):
    """On Explicit axes the loss is that of all examples; `test_ways` has a mesh of one axis."""
    specs = {"in": P("model"), "odd": P(), "out": P(None, "model"), "neither": P(), "scale": P()}
    params, batches = problem()
    optimizer, mesh = make("adamw", max_norm=0.5), mesh_of(4, 2, kind=kind)
    explicit = kind == AxisType.Explicit

    def loss(params, x):
        return loss_fn(params, jax.reshard(x, P("data")) if explicit else x)

    told = {"mesh": mesh, "specs": None if explicit else specs, "unreduced": True}
    grad_fn = dq.value_and_grad(loss, axis_name="data", compression=F32, **told)

    @jax.jit
    def step(params, state, x):
        updates, state = optimizer.update(grad_fn(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        found = put(params, mesh, specs)
        state = optimizer.init(found)
        norms = []
        for x in batches[:3]:
            found, state = step(found, state, put(x, mesh, P("data")))
            norms.append(state.norm)
    norm = norm_of(params, batches[0])
    assert norm > 0.5  # the clip's
    np.testing.assert_allclose(norms[0], norm, rtol=1e-5)
    assert_close(found, plain(RULES["adamw"], params, batches[:3], 0.5))
    assert int(state.skipped_in_a_row) == 0
    assert state.masters["in"].sharding.spec == P("model", "data")
    assert state.inner[0].nu["out"].sharding.spec == P(None, ("model", "data"))
    assert_copies_equal(found)


def test_gradients_of_more_axes_than_those_of_the_optimizer_are_refused():
    axes = ("node", "data")
    mesh, optimizer = mesh_of(2, 4, names=axes, kind=AxisType.Explicit), make("sgd")
    grad_fn = dq.value_and_grad(loss_fn, axis_name=axes, compression=F32, unreduced=True)
    with jax.set_mesh(mesh):
        params, x = put(problem()[0], mesh), put(problem()[1][0], mesh, P(axes))
        state = dq.optax.init(optimizer, params, mesh)
        update = lambda p, s, x: optimizer.update(grad_fn(p, x)[1], s, p)
        with pytest.raises(ValueError, match=r"axes \['data', 'node'\], and axis_name='data'"):
            jax.eval_shape(update, params, state, x)


@pytest.mark.parametrize("n", daily([8, 4], [4]))
def test_a_checkpoint_goes_to_other_numbers_of_workers(tmp_path, n):
    (first, batches), optimizer = problem(), make("adamw")
    params, state = train(optimizer, first, batches[:2])
    saved = optax_steps.saved_and_restored(tmp_path, state)
    params = jax.device_get(params)
    fresh, step = start(optimizer, params, auto_mesh(n))
    again = dq.optax.restore_state(saved, fresh)
    assert_same_bits(jax.device_get(again.masters), jax.device_get(state.masters))
    assert again.masters["in"].addressable_shards[0].data.shape == (16, 64 // n)
    params, _ = optax_steps.train(step, params, again, batches[2:4], auto_mesh(n))
    assert_close(params, plain(RULES["adamw"], first, batches[:4]))


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
    # Skipped steps are no update: masters still follow.
    later = jax.tree.map(lambda x: x + jnp.bfloat16(1), copies)
    _, state = step(later, state, np.full((32, 16), np.nan, np.float32))
    assert_same_bits(state.masters, jax.tree.map(lambda x: x.astype(jnp.float32), later))


def test_set_masters_makes_arrays_of_its_own():
    """The state and the parameters may both be donated."""
    params, _ = problem()
    params = put(params, auto_mesh(), P())
    state = dq.optax.set_masters(dq.optax.init(make("sgd"), params, auto_mesh()), params)
    arrays = jax.tree.leaves((state.masters, state.sent.copies, params))
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in arrays]
    assert len({*pointers}) == len(pointers)


@pytest.mark.parametrize("deferred", [False, True])
def test_differences_do_not_wait_for_those_of_other_leaves(deferred):
    """XLA would hold the differences of all leaves, as large as the copies, at the same time.

    Deferred ones are zeros: held from the start of the step, they also keep the copies from being
    updated in place.
    """
    params, mesh = {name: jnp.zeros((64, 32), jnp.bfloat16) for name in "abc"}, auto_mesh()
    optimizer = make("sgd", deferred=deferred)
    specs = dq.optax.state_specs(state := dq.optax.init(optimizer, params, mesh))

    def update(state, params):
        params = dq.optax.gathered(params, state)
        return optimizer.update(state.masters, state, params)

    maps = {"in_specs": (specs, P()), "out_specs": (P(), specs), "check_vma": False}
    program = jax.make_jaxpr(jax.shard_map(update, mesh=mesh, **maps))(state, params)
    barriers = re.findall(r".* = optimization_barrier .*", str(program))
    assert [line.split(" = ")[0].count("[64,32]") for line in barriers] == [1] * len(barriers)
    assert len(barriers) == (0 if deferred else len(params))


@pytest.mark.parametrize("plan", [None, True])
def test_few_bits_are_those_that_travel(plan):
    few, n = dq.optax.few_bits(), 4
    parts = {
        x: dataclasses.replace(getattr(few, x), plan=plan) for x in ("gradients", "parameters")
    }
    tree = {"kernel": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    told = dq.explain(tree, n, compression=dq.Policy(**parts), verbose=False)
    (way,) = (way for way in told.ways if way.name == "sharded updates")
    bits = way.sent_bytes * 8 / 2**24 * n / (n - 1)
    # Without a plan all tiles but some have one width, and whole ones are left over.
    assert bits == pytest.approx(5.75, rel=0.01) if plan else 5.5 < bits <= 5.75


@pytest.mark.parametrize("made_with", ["float32", "bfloat16"])
@pytest.mark.parametrize("copies", ["float32", "bfloat16", "float16"])
def test_an_update_keeps_the_dtypes_of_a_state(made_with, copies):
    """Else the second step is compiled again, and a scan over steps is refused."""
    (params, batches), optimizer = problem(), make("sgd")
    cast = lambda name: jax.tree.map(lambda x: x.astype(name), params)
    first, own = cast(made_with), cast(copies)
    state, step = start(optimizer, first)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    _, after = jax.eval_shape(step, own, state, batches[0])
    _, again = jax.eval_shape(step, own, after, batches[0])
    assert kinds(again) == kinds(after)
    if made_with == "float32" or copies == "bfloat16":  # else f32 represents both
        assert kinds(after) == kinds(jax.eval_shape(lambda state: state, state))


def test_masters_follow_parameters_that_change_before_other_workers_go_on():
    """How far masters are from their copies is part of a checkpoint."""
    (params, batches), optimizer = problem(), make("sgd")
    params, state = jax.device_get(train(optimizer, params, batches[:1]))
    fresh, step = start(optimizer, params, auto_mesh(4))
    state = dq.optax.restore_state(state, fresh)
    changed = jax.tree.map(lambda x: x + 1, params)
    _, state = step(changed, state, np.full((32, 16), np.nan, np.float32))
    assert_same_bits(jax.device_get(state.unpadded()), changed)


def test_what_does_not_go_is_refused():
    params, batches = problem()
    optimizer = make("sgd")
    init = lambda optimizer, params: dq.optax.init(optimizer, params, auto_mesh())
    state, over_data = init(optimizer, params), dict.fromkeys(params, P("data"))
    splits = dq.optax.state_specs(state)
    maps = {"mesh": auto_mesh(), "in_specs": (P(), splits), "out_specs": (P(), splits)}
    replicated = jax.shard_map(lambda p, s: optimizer.update(p, s, p), **maps)
    for words, call, *args in (
        ("how many workers axis 'data' has; call dq.optax.init", optimizer.init, params),
        (r"optimizer.update\(grads, opt_state, params\)", optimizer.update, params, state),
        ("no map over axis 'data', and no mesh that has it", optimizer.update, params, state,
         params),
        ("max_norm=0 must be above 0", lambda: make("sgd", max_norm=0)),
        ("check_every=-3 must not be neg.* pass 0", lambda: make("sgd", check_every=-3)),
        ("check_every=1.5; expected int", lambda: make("sgd", check_every=1.5)),
        ("deferred='yes'; expected bool", lambda: make("sgd", deferred="yes")),
        ("inner=<function sgd.*pass for example", lambda: dq.optax.sharded(optax.sgd, "data")),
        (r"mesh=\(8,\) is not a mesh", lambda: make("sgd", mesh=(8,))),
        (r"mesh=8 is not a mesh", lambda: dq.optax.init(optimizer, params, 8)),
        (r"leaf in is sharded over \['data'\]", init, make("sgd", specs=over_data), params),
        ("leaf w is int32, and its master", init, optimizer, {"w": np.ones((8, 8), "i4")}),
        ("leaf w is complex64, and its master", init, optimizer, {"w": np.ones((8, 8), "c8")}),
        (r"leaf in is the same on all 8 workers.*pcast", replicated, params, state),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call(*args)
    with pytest.warns(UserWarning, match=r"1 leaves of .* no dimension that the 8 workers of"):
        dq.optax.init(optimizer, {"w": jnp.ones((7, 7, 7))}, auto_mesh())


def test_copies_are_compared_every_so_many_steps(monkeypatch):
    """`test_corruption` has the error of copies that differ, in a process that it may end."""
    hashes = []

    def compare(tree, axis, what):
        jax.debug.callback(lambda own: hashes.append(int(own)), fingerprint(tree))

    monkeypatch.setattr(sharded_updates, "assert_same_on_workers", compare)
    params, batches = problem()
    state, step = start(make("sgd", check_every=2), params)
    params = put(params, auto_mesh())
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
    assert all(math.prod(map(int, shape.split(","))) < 200 for shape in floats)
    assert any(kind == "all-gather" and size > 200 for size, kind in sizes)  # of words


CHANGES = {
    "clip": lambda p: jax.tree.map(lambda w: jnp.clip(w, -0.05, 0.05), p),
    "average": lambda p: jax.tree.map(lambda w: 0.9 * w + 0.01, p),
    "one leaf": lambda p: p | {"in": jnp.where(jnp.abs(p["in"]) > 0.1, p["in"], 0.0)},
    "nothing": lambda p: p,
}


@pytest.mark.parametrize("change", daily(CHANGES, ["clip", "one leaf", "nothing"]))
def test_masters_follow_parameters_that_change_between_updates(change):
    """As plain optax has it; a weight decay acts on what the user left."""
    (params, batches), own = problem(), CHANGES[change]
    rule = promoting(optax.adamw(1e-2, weight_decay=5.0))
    state, step = start(make(rule), params)
    found, plain, inner = put(params, auto_mesh()), params, rule.init(params)

    @jax.jit
    def plainly(plain, inner, batch):
        grads = jax.grad(loss_fn)(plain, batch)
        updates, inner = rule.update(grads, inner, plain)
        return own(optax.apply_updates(plain, updates)), inner, optax.tree.norm(grads)

    for batch in batches[:4]:
        found, state = step(found, state, batch)
        found = put(own(found), auto_mesh())
        plain, inner, norm = plainly(plain, inner, batch)
        np.testing.assert_allclose(state.norm, norm, rtol=1e-3)
    assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_masters_stay_where_only_the_error_of_the_differences_is_between():
    """Compressed differences leave masters some way from their copies, which is no change."""
    params, batches = problem()
    optimizer = make("sgd", differences=dataclasses.replace(CHEAP, min_leaf_size=256))
    state, step = start(optimizer, params)
    found = put(params, auto_mesh())
    for batch in batches[:3]:
        found, state = step(found, state, batch)
    masters = jax.device_get(state.masters)
    assert all(np.any(masters[k] != found[k]) for k in ("in", "out", "odd"))
    _, state = step(found, state, np.full_like(batches[0], np.nan))  # changes nothing
    assert_same_bits(jax.device_get(state.masters), masters)


def test_masters_can_be_set():
    params, batches = problem()
    state, step = start(make("sgd"), params)
    loaded = jax.tree.map(lambda x: x + 1e-7 * jnp.ones_like(x), params)
    found, state = step(put(params, auto_mesh()), state, batches[0])
    after = dq.optax.set_masters(state, loaded)
    assert_same_bits(jax.device_get(after.masters), jax.device_get(loaded))
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)
    specs = dq.optax.state_specs(state)
    options = {
        "mesh": auto_mesh(),
        "in_specs": (specs, P()),
        "out_specs": specs,
        "check_vma": False,
    }
    inside = jax.jit(jax.shard_map(dq.optax.set_masters, **options))(state, loaded)
    assert_same_bits(jax.device_get(inside.masters), jax.device_get(loaded))
    with pytest.raises(ValueError, match="has no state of dq.optax.sharded"):
        dq.optax.set_masters(optax.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match=r"leaf in has shape \(8, 8\)"):
        dq.optax.set_masters(state, params | {"in": jnp.ones((8, 8))})


def test_leaves_that_are_not_those_of_the_masters_are_refused():
    """Leaves of equal shapes in another order would get the updates of other leaves."""
    params = {"a": jnp.ones((8, 4)), "b": jnp.zeros((8, 4))}
    optimizer = make("sgd", deferred=True)
    state = jax.eval_shape(partial(dq.optax.init, optimizer, mesh=auto_mesh()), params)
    turned = collections.OrderedDict(b=params["b"], a=params["a"])
    fewer = params | {"b": None}
    message = r"have {} leaves, and the masters .* have 2; .* differ are {} and {}\. Pass {}"
    for tree, count, (one, other) in ((turned, 2, ("b", "a")), (fewer, 1, ("none", "b"))):
        grads, own = (message.format(count, one, other, x) for x in ("gradients", "params"))
        assert_refused(
            (ValueError, grads, optimizer.update, tree, state, params),
            (ValueError, own, optimizer.update, params, state, tree),
            (ValueError, own, dq.optax.gathered, tree, state),
            (ValueError, own, dq.optax.set_masters, state, tree),
        )
    numbered = list(params.values())  # as of nodes without names
    with pytest.raises(ValueError, match="found no map"):  # and nothing before that
        optimizer.update(numbered, state, numbered)
    with pytest.raises(ValueError, match="differ are 0 and a"):
        dq.optax.set_masters(state, numbered)


def test_copies_are_compared_in_every_step_without_a_hang():
    """A callback that computed with arrays of JAX waited for a device that waited for it."""
    params, batches = problem()
    state, step = start(make("sgd", check_every=1), params)
    found = put(params, auto_mesh())
    for batch in batches[:4]:
        found, state = step(found, state, batch)
    jax.effects_barrier()
    assert int(state.step) == 4


BF16 = dq.Compression(dq.BF16(), min_leaf_size=256, min_bucket_size=1)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_copies_of_the_wires_dtype_are_the_rounded_masters(scale):
    params, batches = problem(jnp.bfloat16)
    params = jax.tree.map(lambda x: x * jnp.bfloat16(scale), params)
    state, step = start(make("adamw", BF16, BF16), params)
    mesh = auto_mesh()
    params, state = put(params, mesh, P()), state
    for batch in batches[:5]:
        params, state = step(params, state, put(batch, mesh, P("data")))
        masters = state.unpadded()
        assert_same_bits(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters))
        # No coordinate was taken for one that the user changed: all masters have more bits.
        assert all((params[name].astype(jnp.float32) != x).any() for name, x in masters.items())


def test_masters_follow_changed_parameters_where_copies_are_rounded_masters():
    params, batches = problem(jnp.bfloat16)
    state, step = start(make("sgd", BF16, BF16), params)
    mesh = auto_mesh()
    params = put(params, mesh, P())
    for batch in batches[:2]:
        params, state = step(params, state, put(batch, mesh, P("data")))
    changed = params | {"in": params["in"] + jnp.bfloat16(0.5)}
    frozen = make(optax.sgd(0.0, momentum=0.9), BF16, BF16)
    _, state = start(frozen, params)[1](changed, state, put(batches[2], mesh, P("data")))
    assert_same_bits(state.unpadded()["in"], changed["in"].astype(jnp.float32))
    assert (state.unpadded()["out"] != params["out"].astype(jnp.float32)).any()


@pytest.mark.filterwarnings("ignore:.*nothing is compressed")
def test_the_limits_of_the_gradients_are_those_of_the_differences():
    """Two leaves that are split along other dimensions are buckets of their own, small ones."""
    params = {"a": jnp.ones((512, 64)) / 22, "c": jnp.ones((64, 512)) / 22}
    every = dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)
    for method, native in ((every, False), (dq.DynamiQ(bits=5), True)):
        optimizer = dq.optax.sharded(optax.sgd(0.1), "data", compression=method)
        state = dq.optax.init(optimizer, params, auto_mesh())
        specs = dq.optax.state_specs(state)
        update = lambda g, s, p, optimizer=optimizer: optimizer.update(g, s, p)
        maps = {"in_specs": (P("data"), specs, P()), "out_specs": (P(), specs)}
        run = jax.jit(jax.shard_map(update, mesh=auto_mesh(), check_vma=False, **maps))
        terms = jax.tree.map(lambda x: jnp.concatenate([x] * N), params)
        text = run.lower(terms, state, params).compile().as_text()
        floats = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
        largest = max((math.prod(map(int, shape.split(","))) for shape in floats), default=0)
        assert (largest >= 64 * 512) == native


def test_other_axes_may_split_parameters_and_the_state_stays_as_its_specs_say():
    mesh = jax.make_mesh((2, 4), ("island", "data"), axis_types=(AxisType.Auto,) * 2)
    params, parts = {"w": jnp.zeros((64, 32))}, {"w": P(None, "data")}
    told = {"compression": F32, "specs": parts}
    optimizer = dq.optax.sharded(optax.sgd(1.0), "island", **told)
    state = dq.optax.init(optimizer, params, mesh)
    specs = dq.optax.state_specs(state)
    steps = jnp.arange(8, dtype=jnp.float32).repeat(4)  # one of each eighth of the columns

    def step(params, state, steps):
        grads = jax.tree.map(lambda x: jnp.ones_like(x) * steps[None], params)
        updates, state = optimizer.update(lax.pcast(grads, "island", to="varying"), state, params)
        return updates, state

    maps = {"in_specs": (parts, specs, P("data")), "out_specs": (parts, specs)}
    mapped = jax.shard_map(step, mesh=mesh, **maps)
    updates, after = jax.jit(mapped)(params, state, steps)
    np.testing.assert_allclose(updates["w"], -np.broadcast_to(steps, (64, 32)))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    copies = after.sent.copies["w"]
    assert after.sent.step.value.tolist() == [1, 1]
    assert copies.sharding.spec == after.masters["w"].sharding.spec
    assert_same_bits(copies, updates["w"])
