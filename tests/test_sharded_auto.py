"""`dq.optax.sharded` in a plain `jax.jit` on Auto axes, against plain optax on the whole batch.

`test_ways` trains the example's model so, and `test_sharded_updates` has another mesh axis.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_steps
import pytest
from asserts import assert_close, assert_copies_equal, assert_same_bits
from cases import EXACT, daily, small
from flax import nnx
from flax.training.train_state import TrainState
from hlo import moves_of
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, compilations, loss_fn, mesh_of, problem, promoting, put

import dynamiq_jax as dq
import dynamiq_jax.nnx
import dynamiq_jax.optax
from dynamiq_jax.optax.state import PerWorker

F32 = dataclasses.replace(EXACT, min_leaf_size=64)
SMALL = dataclasses.replace(small(dq.contrib.MinMax()), min_leaf_size=64)
MESH = auto_mesh()


def make(inner, compression=F32, **options):
    told = {"compression": dq.Policy(gradients=compression, parameters=compression), **options}
    return promoting(dq.optax.sharded(inner, "data", **told))


def gradients(loss=loss_fn, mesh=MESH, compression=F32, **options):
    told = {"axis_name": "data", "mesh": mesh, "unreduced": True, "compression": compression}
    return dq.value_and_grad(loss, **told, **options)


def stepper(optimizer, grad_fn=None, before=lambda params, _: params, **options):
    grad_fn = grad_fn or gradients()

    @functools.partial(jax.jit, **options)
    def step(params, state, x):
        params = before(params, state)
        loss, grads = grad_fn(params, x)
        updates, state = optimizer.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state, loss

    return step


def placed(steps, mesh=MESH):
    """Parameters on all devices, and split batches."""
    params, batches = problem(steps)
    return put(params, mesh), [put(x, mesh, P("data")) for x in batches]


ADAM = optax.adamw(1e-2)


@functools.cache
def expected(steps, max_norm=None):
    """Parameters after these steps on one device."""
    clip = [optax.clip_by_global_norm(max_norm)] if max_norm else []
    return optax_steps.plain(promoting(optax.chain(*clip, ADAM)), loss_fn, *problem(steps))


def created(optimizer, params):
    """In a program that makes parameters: no array tells the mesh, and they stay whole."""
    values = jax.device_get(params)

    @jax.jit
    def make(scale):
        params = jax.tree.map(lambda x: x * scale, values)
        return params, optimizer.init(params)

    params, state = make(1.0)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    return state


def under_a_set_mesh(optimizer, params):
    with jax.set_mesh(MESH):
        return created(optimizer, params)


STARTS = {
    "init": lambda optimizer, params: optimizer.init(params),
    "jit": lambda optimizer, params: jax.jit(optimizer.init)(params),
    "dq.optax.init": lambda optimizer, params: dq.optax.init(optimizer, params, MESH),
    "mesh=": created,
    "set_mesh": under_a_set_mesh,
}


def test_however_it_starts_a_state_is_placed_as_steps_return_it():
    """No step but the first compiles, with donated arguments; and states have equal bits."""
    optimizer = make(ADAM, max_norm=0.5, mesh=MESH)
    first, batches = placed(3)
    step, found = stepper(optimizer, donate_argnums=(0, 1)), []
    for name, start in STARTS.items():
        params = jax.tree.map(jnp.array, first)
        state = start(optimizer, params)
        assert state.masters["in"].sharding.spec == P(None, "data"), name
        assert state.inner[0].nu["out"].addressable_shards[3].data.shape == (8, 4), name
        params, state, _ = step(params, state, batches[0])
        with compilations() as programs:
            for x in batches[1:]:
                params, state, _ = step(params, state, x)
        assert not programs, name
        found.append(jax.device_get((params, state)))
        assert_copies_equal(params)
    assert_close(found[0][0], expected(3, max_norm=0.5))
    for other in found[1:]:
        assert_same_bits(other, found[0])
    alone = make(ADAM)
    with pytest.raises(ValueError, match="how many workers.*put params on the mesh"):
        created(alone, first)


def test_only_payloads_travel():
    """A bucket scatters and gathers words; no large array of floats is summed or gathered."""
    shapes = {"in": (16, 512), "out": (512, 4)}
    params = put({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, MESH)
    optimizer = make(ADAM, SMALL)
    x = put(np.ones((32, 16), np.float32), MESH, P("data"))
    step = stepper(optimizer, gradients(compression=SMALL))
    hlo = step.lower(params, optimizer.init(params), x).compile().as_text()
    moves = {(name, bits) for name, bits in moves_of(hlo) if bits > 32 * 64}
    assert {name for name, _ in moves} == {"all-to-all", "all-gather"}
    assert max(bits for _, bits in moves) < 8 * 512 * 20  # of 32 each


def token_loss(params, x):
    return jnp.sum(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - 1))


def test_micro_batches_are_added_up_in_a_scan():
    """Terms begin with zeros like them; zeros of the parameters' shapes are refused."""
    optimizer, grad_fn = make(ADAM), gradients(token_loss, op="sum")
    params, batches = placed(4)
    xs = put(np.stack(jax.device_get(batches)), MESH, P(None, "data"))

    def window(like, params, state, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, grad_fn(params, x)[1]), None)
        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, like), xs)
        grads = jax.tree.map(lambda g: g / xs.size, total)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates)

    like = jax.eval_shape(grad_fn, params, batches[0])[1]
    state = optimizer.init(params)
    found = jax.jit(functools.partial(window, like))(params, state, xs)
    whole = lambda params, xs: token_loss(params, xs.reshape(-1, 16)) / xs.size
    assert_close(found, optax_steps.plain(promoting(ADAM), whole, params, [xs]))
    with pytest.raises(ValueError, match=r"8 workers, float32\[8,16,64\].*zeros_like, like"):
        jax.eval_shape(functools.partial(window, params), params, state, xs)


def test_deferred_differences_are_gathered_at_the_top_of_the_step():
    optimizer = make(ADAM, deferred=True)
    params, batches = placed(3)
    state, step = optimizer.init(params), stepper(optimizer, before=dq.optax.gathered)
    for x in batches:
        params, state, _ = step(params, state, x)
    assert_close(dq.optax.gathered(params, state), expected(3))
    assert not np.allclose(params["in"], expected(3)["in"], rtol=1e-5)


def test_a_state_goes_to_another_number_of_workers(tmp_path):
    optimizer = make(ADAM)
    (params, batches), few = placed(3), auto_mesh(4)
    state, step = optimizer.init(params), stepper(optimizer)
    for x in batches[:2]:
        params, state, _ = step(params, state, x)
    saved = optax_steps.saved_and_restored(tmp_path, state)
    params = put(jax.device_get(params), few)
    state = dq.optax.restore_state(saved, optimizer.init(params))
    step = stepper(optimizer, gradients(mesh=few))
    for x in jax.device_get(batches[2:]):
        params, state, _ = step(params, state, put(x, few, P("data")))
    assert state.sent.step.value.shape == (4,)
    assert_close(params, expected(3))


def test_masters_can_be_set_in_a_program():
    optimizer = make(ADAM)
    params, _ = placed(1)
    state = optimizer.init(params)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    found = jax.jit(dq.optax.set_masters)(state, doubled)
    assert_same_bits(found.masters, doubled)
    assert found.masters["in"].sharding == state.masters["in"].sharding


def test_gradients_that_jax_has_summed_are_warned_of():
    optimizer = make(ADAM)
    params, batches = placed(1)
    step = stepper(optimizer, jax.value_and_grad(loss_fn))
    with pytest.warns(UserWarning, match="no gradient is unreduced over axis 'data'"):
        found, _, _ = step(params, optimizer.init(params), batches[0])
    assert_close(found, expected(1))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.into, self.out = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.into(x)))


def net_loss(net, x):
    return jnp.mean(jnp.square(net(x) - 1))


def test_flax_calls_the_optimizer_as_any_other():
    """Its `TrainState` in `jax.jit`, and its `nnx.Optimizer`, which also runs without."""
    params, batches = placed(3)
    grad_fn = gradients()

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=grad_fn(state.params, x)[1])

    state = TrainState.create(apply_fn=None, params=params, tx=make(ADAM))
    for x in batches:
        state = step(state, x)
    assert_close(state.params, expected(3))

    told = {"axis_name": "data", "mesh": MESH, "compression": F32, "unreduced": True}
    own = dq.nnx.value_and_grad(net_loss, **told)
    found = {}
    for name, value_and_grad, rule in (
        ("plain", nnx.value_and_grad(net_loss), promoting(ADAM)),
        ("ours", own, make(ADAM)),
        ("alone", own, make(ADAM)),
    ):
        net = Net()
        nnx.update(net, put(nnx.state(net), MESH))
        optimizer = nnx.Optimizer(net, rule, wrt=nnx.Param)

        def update(net, optimizer, x, value_and_grad=value_and_grad):
            optimizer.update(net, value_and_grad(net, x)[1])

        update = update if name == "alone" else nnx.jit(update)
        with jax.numpy_dtype_promotion("standard"):
            for x in batches[:2]:
                update(net, optimizer, x)
        found[name] = jax.device_get(nnx.to_pure_dict(nnx.state(net)))
    assert_close(found["ours"], found["plain"])
    assert_close(found["alone"], found["plain"])


def test_what_does_not_go_is_refused():
    params, batches = placed(1)
    optimizer, mesh = make(ADAM), mesh_of(4, 2)
    state, grads = optimizer.init(params), jax.eval_shape(gradients(), params, batches[0])[1]

    def update(grads, state=state, params=params):
        return jax.eval_shape(optimizer.update, grads, state, params)

    two = {"in": P(None, "model"), "out": P("model")}
    split = jax.eval_shape(gradients(mesh=mesh, specs=two), params, batches[0])[1]
    of_four = dq.optax.init(optimizer, params, mesh)
    with pytest.raises(ValueError, match=r"leaf in.* as P\(None, 'model'\).* pass the same specs="):
        update(split, of_four)
    other = dq.value_and_grad(
        loss_fn, mesh=mesh, axis_name=("data", "model"), unreduced=True, compression=F32
    )
    with pytest.raises(ValueError, match=r"workers of \('data', 'model'\), and axis_name is"):
        update(jax.eval_shape(other, params, batches[0])[1], of_four)
    with pytest.raises(ValueError, match="gradients have 1 leaves, and the masters"):
        update({"in": grads["in"]})
    with pytest.raises(ValueError, match=r"leaf \['out'\] is an array.* terms of the workers of"):
        update(grads | {"out": params["out"]})
    with pytest.raises(ValueError, match="no mesh that has it"):
        update(jax.device_get(params), params=jax.device_get(params))
    with pytest.raises(ValueError, match="apply_if_finite is around dq.optax.sharded.*Leave it"):
        around = optax.apply_if_finite(optimizer, 3)
        jax.eval_shape(around.update, grads, jax.eval_shape(around.init, params), params)
    with pytest.raises(ValueError, match=r"opt_state is a tuple.*pass optimizer.init\(params\)"):
        update(grads, ADAM.init(params))
    later = make(ADAM, deferred=True)
    for told, other in ((optimizer, later), (later, optimizer)):
        with pytest.raises(ValueError, match="made with deferred=.*dq.optax.gathered"):
            jax.eval_shape(other.update, grads, told.init(params), params)
    with pytest.raises(ValueError, match=r"an array \(4,\).* dq.optax.restore_state"):
        PerWorker(jnp.zeros(4), "data").own()
    sharded = put(jax.device_get(params), MESH, P("data"))
    with pytest.raises(ValueError, match="sharded over.*which are workers"):
        optimizer.init(sharded)


RULES = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "windows": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(1e-2),
}
LAYOUTS = [((8,), ("data",)), ((4, 2), ("data", "model")), ((2, 2, 2), ("node", "data", "model"))]


@pytest.mark.parametrize("seed", daily(range(24), [1]))
def test_a_trainer_drawn_at_random_trains_as_plain_optax_does(seed):
    """Meshes, leaves, rules, clips, micro-batches, constraints and starts."""
    rng = np.random.default_rng(seed)
    (sizes, names), rule = LAYOUTS[seed % 3], [*RULES][seed // 3 % 4]
    axes = names[:-1] if "model" in names else names
    mesh = mesh_of(*sizes, names=names)
    wide, out, odd = (int(rng.choice(own)) for own in ([32, 34, 48], [8, 10], [9, 17, 24]))
    shapes = {"in": (16, wide), "scale": (wide,), "out": (wide, out), "odd": (odd, out)}
    params = {name: np.float32(rng.standard_normal(s) / 4) for name, s in shapes.items()}
    specs = {"in": P(None, "model"), "scale": P("model"), "out": P("model"), "odd": P()}
    specs = specs if "model" in names else jax.tree.map(lambda _: P(), params)
    constrains, max_norm = rng.random() < 0.5, 0.5 if rng.random() < 0.5 else None
    count, start, jits = int(rng.integers(1, 4)), rng.choice(["init", "jit"]), rng.random() < 0.8

    def loss(params, x, constrain=False):
        hidden = jnp.tanh(x @ params["in"]) * params["scale"][None]
        if constrain:
            hidden = lax.with_sharding_constraint(hidden, P(axes))
        errors = hidden @ params["out"] - 1 + jnp.sum(params["odd"], axis=0)[None]
        return jnp.mean(jnp.square(errors))

    options = {"compression": F32, "max_norm": max_norm}
    own_specs = None if start == "init" else specs
    optimizer = promoting(dq.optax.sharded(RULES[rule], axes, specs=own_specs, **options))
    grad_fn = dq.value_and_grad(
        functools.partial(loss, constrain=constrains), mesh=mesh, axis_name=axes, unreduced=True,
        compression=F32, specs=specs,
    )  # fmt: skip

    def step(params, state, xs):
        grads = [grad_fn(params, x)[1] for x in xs]
        total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), grads)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / count, total), state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    found, step = put(params, mesh, specs), jax.jit(step) if jits else step
    state = (jax.jit(optimizer.init) if start == "jit" else optimizer.init)(found)
    batches = [np.float32(rng.standard_normal((count, 16, 16))) for _ in range(3)]
    with jax.set_mesh(mesh):
        for xs in batches:
            found, state = step(found, state, put(list(xs), mesh, P(axes)))
    clip = [optax.clip_by_global_norm(max_norm)] if max_norm else []
    plain = promoting(optax.chain(*clip, RULES[rule]))
    batches = [xs.reshape(-1, 16) for xs in batches]
    assert_close(found, optax_steps.plain(plain, loss, params, batches))
    assert_copies_equal(found)
