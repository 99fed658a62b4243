"""Gradients that stay unreduced on Explicit meshes, against JAX's own of the same loss."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers
from asserts import assert_close, assert_refused
from cases import CHEAP, EXACT, daily, small
from compiler import AS_USERS
from hlo import moves_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import network, put

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.reduction.explicit_sums import unreduced_axes

F32 = small(dq.F32(), exclude="bias|scale")
COMPRESSED = small(CHEAP.method, exclude="bias|scale")
WIDTH, KEY, EXPLICIT = 64, jax.random.key(0), AxisType.Explicit


def mesh_of(*sizes):
    return workers.mesh_of(*(sizes or (8,)), kind=AxisType.Explicit)


def placed(mesh=None, axes="data"):
    mesh, (params, batch) = mesh or mesh_of(), network()
    return put(params, mesh), put(batch, mesh, P(axes))


def out(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"][None]) @ params["down"] * params["scale"]


def masked(params, batch):
    """The mean over tokens that count, which are not as many on every worker."""
    errors = jnp.mean(jnp.square(out(params, batch["x"]) - batch["x"]), axis=-1)
    return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


@functools.cache
def plain(loss):
    """The value and the gradient of the whole batch on one device."""
    return jax.jit(jax.value_and_grad(loss))(*network())


def grad_norm(p, b):
    """A penalty on derivatives: with respect to the examples."""
    return jnp.mean(jnp.square(jax.grad(lambda x: jnp.sum(out(p, x)))(b["x"])))


LOSSES = {
    "masked": masked,
    "linear penalty": lambda p, b: masked(p, b) + jnp.sum(p["up"]) + 0.5 * jnp.sum(p["down"]),
    "penalty in jit": lambda p, b: masked(p, b) + jax.jit(lambda w: jnp.sum(jnp.tanh(w)))(p["up"]),
    "checkpointed penalty": lambda p, b: jax.checkpoint(
        lambda p: masked(p, b) + jnp.sum(jnp.tanh(p["up"]))
    )(p),
    "penalty in a loop": lambda p, b: lax.scan(
        lambda total, _: (total + jnp.sum(jnp.tanh(p["up"])), None),
        masked(p, b) + jnp.sum(p["up"]),
        None,
        length=2,
    )[0],
    "hinge": lambda p, b: masked(p, b) + jnp.sum(jnp.maximum(p["up"], 0.0)),
    "weight": lambda p, b: masked(p, b) * p["up"][0, 0],
    "derivative": grad_norm,
    "penalty": lambda p, b: masked(p, b) + 0.1 * jnp.sum(jnp.tanh(p["up"])),
    "factor": lambda p, b: masked(p, b) * jnp.sum(jnp.tanh(p["up"] * p["scale"])),
    "parameters alone": lambda p, b: jnp.sum(jnp.square(p["up"])) * jnp.sum(jnp.tanh(p["down"])),
    "half unused": lambda p, b: jnp.mean(jnp.square(b["x"] @ p["up"])),
    # With JAX 0.12 the scalar's gradient of 0 has been the constant that a slice pads with.
    "scalar unused, beside a slice": lambda p, b: jnp.mean(jnp.square((b["x"] @ p["up"])[:, :8])),
    "vmapped": lambda p, b: jnp.mean(jax.vmap(lambda x: jnp.sum(out(p, x[None])))(b["x"])),
    "conditional": lambda p, b: lax.cond(p["scale"] > 0, masked, lambda p, b: p["scale"], p, b),
    "transposed": lambda p, b: jnp.mean(jnp.square(b["x"] @ p["down"].T @ p["up"].T)),
    "in bf16": lambda p, b: jnp.float32(
        masked(*jax.tree.map(lambda w: w.astype(jnp.bfloat16), (p, b)))
    ),
}


EVERY_DAY = (
    "masked", "linear penalty", "penalty in a loop", "hinge", "weight", "derivative",
    "checkpointed penalty", "half unused", "scalar unused, beside a slice", "conditional",
    "in bf16",
)  # fmt: skip


@pytest.mark.parametrize("name", daily(LOSSES, EVERY_DAY))
def test_losses_and_gradients_are_those_of_the_global_loss(name):
    """Compiled as users do: optimisations move types of unreduced values to constants."""
    method = EXACT if "unused" in name else F32
    f = dq.value_and_grad(LOSSES[name], axis_name="data", compression=method)
    f = jax.jit(f, compiler_options=AS_USERS)
    within = {"rtol": 0.02, "atol": 0.02} if name == "in bf16" else {}
    assert_close(f(*placed()), plain(LOSSES[name]), **within)


def test_arguments_are_those_of_jax_value_and_grad():
    params, batch = placed()
    key = put(jax.random.key(3), mesh_of())

    def loss(first, batch, second, *, dropout, power):
        noise = jax.random.normal(dropout, (16,))
        aux = {"rows": batch["mask"] * 2, "count": jnp.int32(7), "key": dropout}
        aux["own"] = second["up"]
        both = jax.tree.map(jnp.add, first, second)
        return masked(both, batch) ** power + jnp.mean(noise), aux

    options = {"argnums": (0, 2), "has_aux": True}
    f = dq.value_and_grad(loss, axis_name="data", compression=F32, **options)
    (value, aux), grads = jax.jit(f, static_argnames="power")(
        params, batch, params, dropout=key, power=2
    )
    native = jax.jit(jax.value_and_grad(loss, **options), static_argnames="power")
    (plain_value, plain_aux), plain_grads = native(
        *network(), network()[0], dropout=jax.random.key(3), power=2
    )
    assert_close((value, grads), (plain_value, plain_grads))
    assert aux.pop("key") == plain_aux.pop("key")
    assert_close(aux, plain_aux)
    assert aux["rows"].sharding.spec == P("data")
    assert not any(jax.typeof(x).sharding.spec.reduced for x in jax.tree.leaves(aux))


def compiled(function, *args):
    """The program, and (name, coordinates) of each of its collectives."""
    program = jax.jit(function).lower(*args).compile()
    return program, [(name, bits // 32) for name, bits in moves_of(program.as_text())]


@pytest.mark.usefixtures("padding_is_free")
def test_a_window_of_micro_batches_is_reduced_once():
    """Unreduced gradients are added in a scan; zeros of their type begin it."""
    params, batch = placed()
    micro = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), batch)
    first = jax.tree.map(lambda x: x[0], micro)

    def accumulate(reduce_grads, f, params, micro):
        def add(total, batch):
            loss, grads = f(params, batch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(f, params, first)[1])
        total, losses = lax.scan(add, zeros, micro)
        return losses, reduce_grads(total)

    def ours(method):
        f = dq.value_and_grad(masked, axis_name="data", compression=method, unreduced=True)
        reduce_grads = functools.partial(dq.psum, axis_name="data", compression=method)
        return functools.partial(accumulate, reduce_grads, f)

    native = functools.partial(accumulate, lambda total: total, jax.value_and_grad(masked))
    with jax.set_mesh(mesh_of()):
        assert_close(jax.jit(ours(F32))(params, micro), jax.jit(native)(params, micro))
        steps = compiled(ours(COMPRESSED), params, micro)[1]
    assert [name for name, _ in steps].count("all-gather") == 1  # of sums, outside of the loop
    assert max(size for name, size in steps if name == "all-reduce") < 16 * WIDTH / 4


def test_uses_without_a_rule_train_with_a_word():
    """Rows are added to examples coordinate by coordinate; the lookup keeps its type."""
    params, batch = placed()
    params = params | {"table": put(np.ones((256, 16), np.float32), mesh_of())}
    rows = put(np.arange(32, dtype=np.int32), mesh_of(), P("data"))

    def looked_up(params, batch, rows):
        taken = params["table"].at[rows].get(out_sharding=P("data", None))
        return masked(params, batch | {"x": batch["x"] * taken})

    def added(params, batch, rows):
        own = jnp.concatenate([params["table"][:16]] * 2)
        return masked(params, batch | {"x": batch["x"] + jnp.sin(own) * own})

    def on_auto_axes(function):
        run = jax.sharding.auto_axes(function, out_sharding=P("data", None))
        return lambda params, batch, rows: jnp.mean(run(batch["x"], params["table"]) ** 2)

    products = on_auto_axes(lambda x, w: jnp.einsum("bi,oi->bo", x, w))
    sine = on_auto_axes(lambda x, w: x @ jnp.sin(w).T)  # its gradient is whole on Auto axes
    for loss, warned in ((looked_up, False), (added, False), (products, False), (sine, True)):
        f = jax.jit(dq.value_and_grad(loss, axis_name="data", compression=F32))
        with jax.set_mesh(mesh_of()), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = f(params, batch, rows)
            assert_close(found, jax.jit(jax.value_and_grad(loss))(params, batch, rows))
        assert bool(seen) == warned
    refused = lambda p, b: jnp.mean(p["up"][jnp.arange(3)] @ b["x"])
    with jax.set_mesh(mesh_of()), pytest.raises(Exception, match="out_sharding|sharding") as raised:
        dq.value_and_grad(refused, axis_name="data", compression=F32)(params, batch)
    assert "Write a lookup as table.at[ids]" in raised.value.__notes__[0]


def product(x, w):
    return jnp.einsum("bi,io->bo", x, w, out_sharding=P("data"))


def two(params, x):
    return jnp.mean(jnp.square(jnp.tanh(product(x, params["in"])) @ params["out"]))


def resharded(loss, *specs, names=("in", "out")):
    """A loss that reshards some parameters, as FSDP losses of plain JAX do, before it uses them."""

    def own(params, x):
        for spec, name in itertools.product(specs, names):
            params = params | {name: jax.reshard(params[name], spec)}
        return loss(params, x)

    return own


def passed(*names):
    """A loss in which some parameters pass `fsdp`."""

    def own(params, x):
        some = {name: params[name] for name in names}
        return two(params | dq.fsdp(some, "data", compression=CHEAP), x)

    return own


def scanned(params, x):
    layers = {"w": params["layers"]}
    step = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, jax.reshard(w["w"], P()))), None))
    return jnp.mean(jnp.square(lax.scan(step, x, layers)[0]))


def rows(params, x):
    """JAX reads rows by `jax.sharding.auto_axes`, whose axes have no types."""
    own = jax.reshard(params, P())
    read = own["in"].at[jnp.int32(jnp.abs(x) * 8)[:, 0]].get(out_sharding=P("data"))
    return two(own, read)


def asserted(params, x, constrain=dq.with_sharding_constraint):
    """A loss that says of a parameter how it is sharded where it is placed."""
    return two(params | {"in": constrain(params["in"], P("data", None))}, x)


def mapped(params, x):
    """The shards of ``columns`` enter a map; no other worker has terms of their gradient."""

    def layer(x, w):
        every = jnp.tanh(lax.all_gather(x, "data", tiled=True) @ w)
        return lax.all_to_all(every, "data", 0, 1, tiled=True)

    x = product(x, jax.reshard(params["in"], P()))
    return jnp.mean(jnp.square(jax.shard_map(layer, out_specs=P("data"))(x, params["columns"])))


ALL = resharded(two, P())
IN_PLAIN_JAX = {
    "resharded": (ALL, "", ""),
    "resharded in jit": (jax.jit(ALL), "", ""),
    "resharded in scan": (scanned, "", ""),
    "rows, resharded": (rows, "", ""),
    "asserted": (asserted, "", ""),
    "one resharded": (resharded(two, P(), names=["in"]), "", ""),
    "passed": (passed("in", "out"), "", ""),
    "passed, resharded": (
        lambda p, x: ALL(dq.fsdp(p, "data", compression=CHEAP), x), "", "",
    ),
    "resharded, passed": (resharded(passed("in", "out"), P()), "2 sharded parameters", ""),
    "one passed, one resharded": (
        resharded(passed("in"), P(), names=["out"]),
        r"1 sharded parameters of 16,384 bytes \(out\) do not pass dq.fsdp", "",
    ),
    "split, resharded": (
        resharded(two, P("data"), P(), names=["in"]),
        r"1 leaves of 16,384 bytes \(in\) are summed by JAX.* leave jax.reshard out",
        r"1 leaves of 16,384 bytes \(in\)",
    ),
    "beside a map": (mapped, r"1 sharded parameters .*\(in\)", ""),
}  # fmt: skip
"""Losses, and what is said where JAX sums gradients: of shards, and of replicated parameters."""
OF_SHARDS = [name for name in IN_PLAIN_JAX if "passed" in name or "map" in name]
"""Losses that take shards."""


@pytest.mark.parametrize(
    ("name", "sharded"),
    daily(
        itertools.product(IN_PLAIN_JAX, (True, False)),
        [(name, True) for name in ("rows, resharded", "asserted", "beside a map")]
        + [("split, resharded", False)],
    ),
)
@pytest.mark.usefixtures("padding_is_free")
def test_no_large_gradient_is_summed_by_jax_without_a_word(name, sharded):
    loss, *said = IN_PLAIN_JAX[name]
    said = said[not sharded]
    mesh, square = mesh_of(), (WIDTH, WIDTH)
    shapes = dict.fromkeys(("in", "columns" if loss is mapped else "out"), square)
    if loss is scanned:
        shapes = {"layers": (2, *square)}
    keys = dict(zip((*shapes, "x"), jax.random.split(jax.random.key(0), 3), strict=False))
    params = {name: jax.random.normal(keys[name], shape) / 8 for name, shape in shapes.items()}
    x = jax.random.normal(jax.random.key(1), (32, WIDTH))
    specs = {name: P("data", None) for name in shapes} | {"columns": P(None, "data")}
    specs["layers"] = P(None, "data")
    placed = put(params, mesh, {name: specs[name] for name in shapes} if sharded else P())
    args = placed, put(x, mesh, P("data"))
    with warnings.catch_warnings(record=True) as seen, jax.set_mesh(mesh):
        warnings.simplefilter("always")
        f = functools.partial(dq.value_and_grad, loss, axis_name="data", compression=CHEAP)
        found = compiled(f(ungathered=name in OF_SHARDS), *args)[1]
        if sharded and name in OF_SHARDS:
            with pytest.raises(ValueError, match="ungathered=True"):
                jax.eval_shape(f(), *args)
    native = [size for kind, size in found if kind in ("all-reduce", "reduce-scatter")]
    assert (max(native) >= WIDTH * WIDTH) == bool(said)
    assert len(seen) == bool(said)
    assert all(re.search(said, str(one.message)) for one in seen)


def test_an_assertion_that_a_gathered_parameter_fails_is_refused():
    mesh = mesh_of()
    params = put(dict.fromkeys(("in", "out"), jnp.ones((WIDTH, WIDTH))), mesh, P("data", None))
    loss = functools.partial(asserted, constrain=lax.with_sharding_constraint)
    f = dq.value_and_grad(loss, axis_name="data", compression=CHEAP)
    with pytest.raises(ValueError) as raised, jax.set_mesh(mesh):
        jax.eval_shape(f, params, put(jnp.ones((32, WIDTH)), mesh, P("data")))
    assert "call dq.with_sharding_constraint in the place" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(("each", "told"), daily([(1, False), (2, True)], [(2, True)]))
@pytest.mark.usefixtures("padding_is_free")
def test_shards_that_a_map_takes_stay_shards(each, told):
    """A layer of experts under `jax.shard_map`, which uses shared parameters, too.

    A map without in_specs would also take whole experts, by broadcasting one worker's places.
    """
    mesh, count = mesh_of(), 8 * each
    params, batch = placed()
    own = jax.random.normal(jax.random.key(5), (count, WIDTH, WIDTH)) / 8
    params = params | {"experts": put(own, mesh, P("data"))}
    x = put(jax.random.normal(jax.random.key(6), (8 * 16, 16)), mesh, P("data"))

    def layer(exchange, experts, down, x):
        sent = x.reshape(count, -1, WIDTH)
        own = exchange(sent, "data", 0, 1, tiled=True)
        back = exchange(jnp.tanh(own @ experts), "data", 1, 0, tiled=True)
        return back.at[jnp.arange(count)].get().reshape(x.shape) @ down

    def loss(exchange, params, x):
        specs = {"in_specs": (P("data"), P(), P("data"))} if told else {}
        mapped = jax.shard_map(
            functools.partial(layer, exchange), mesh=mesh, out_specs=P("data"), **specs
        )
        return jnp.mean(jnp.square(mapped(params["experts"], params["down"], x @ params["up"]) - x))

    def run(exchange, method):
        own = functools.partial(loss, exchange)
        return dq.value_and_grad(own, axis_name="data", compression=method, ungathered=True)

    native = functools.partial(loss, lax.all_to_all)
    with jax.set_mesh(mesh):
        expected = jax.jit(jax.value_and_grad(native))(params, x)
    exclude = "down|bias|scale" if told else "bias|scale"  # in_specs of P() take no reduced ones
    found = jax.jit(run(lax.all_to_all, small(dq.F32(), exclude=exclude)))(params, x)
    assert_close(found, expected)
    assert found[1]["experts"].sharding.spec == P("data", None, None)
    method = small(CHEAP.method, exclude=exclude)
    exchange = functools.partial(
        dq.all_to_all, compression=dq.Policy(activations=method, cotangents=method)
    )
    compressed, moves = compiled(run(exchange, method), params, x)
    assert 1e-6 < float(vnmse(compressed(params, x)[1], expected[1])) < 0.1
    shared = 16 * WIDTH
    assert (max(size for name, size in moves if name == "all-reduce") >= shared) == told


@pytest.mark.parametrize("sizes", [(8,), (8, 1)])
def test_the_loss_is_traced_once_and_its_errors_are_its_own(sizes):
    params, batch = placed(mesh_of(*sizes))
    calls = []

    def counted(params, batch):
        calls.append(1)
        return masked(params, batch)

    dq.value_and_grad(counted, axis_name="data", compression=F32)(params, batch)
    assert len(calls) == 1  # no search where nothing is wrong

    def wrong(params, batch):
        calls.append(1)
        raise ValueError("no such layer")

    for options in ({"compression": F32}, {}):
        with pytest.raises(ValueError, match="no such layer") as raised:
            dq.value_and_grad(wrong, axis_name="data", **options)(params, batch)
        assert raised.value.__context__ is None  # or the user would read it twice
    assert len(calls) == 1 + 1 + 2  # with no large parameter once, else plainly, too


def test_errors():
    mesh, (params, batch) = mesh_of(), placed()
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, EXPLICIT))
    sharded = params | {"up": put(params["up"], mesh, P("data"))}
    over_both = placed(mesh_of(4, 2), ("data", "model"))

    def of(loss=masked, **options):
        return dq.value_and_grad(loss, **{"axis_name": "data", "compression": F32} | options)

    keyed, three = of(lambda p, b, key=None: masked(p, b)), of(lambda p, b, c: masked(p, b))
    keyed(params, batch, None, key=KEY)
    vector, terms = of(lambda p, b: b["mask"] * p["scale"]), of(unreduced=True)
    metrics, metered = of(unreduced=True, metrics=True), of(metrics=True)
    step = params | {"step": jnp.int32(2)}
    assert_refused(
        (ValueError, r"over axis 'data'.*jax.device_put", lambda: of()(params, network()[1])),
        (ValueError, r"over \('data', 'model'\).*axis_name='data'", lambda: of()(*over_both)),
        (ValueError, "takes key.*and key= is the key of", lambda: keyed(params, batch, key=KEY)),
        (ValueError, "unreduced=True and metrics=.*dq.reduce", lambda: metrics(params, batch)),
        (ValueError, "unreduced=True and state=", lambda: terms(params, batch, state=())),
        (ValueError, "unreduced=True and key=", lambda: terms(params, batch, key=KEY)),
        (ValueError, "there is no mesh.*mesh=mesh", lambda: of()(*network())),
        (TypeError, r"loss has shape \(32,\)", lambda: vector(params, batch)),
        (TypeError, r"\['step'\] is int32\[\].*argnums=", lambda: three(step, batch, None)),
        (ValueError, r"is \{1\}, a set.*frozenset", lambda: three(params, batch, {1})),
        (ValueError, "specs=.* is for Auto axes.*leave it out", lambda: of(specs=P(), mesh=mesh)),
        (ValueError, "make all axes Explicit, or all Auto", lambda: of(mesh=mixed, unreduced=True)),
        (NotImplementedError, "over the data axes.*metrics=False", lambda: metered(sharded, batch)),
    )
    both = of(axis_name=("data", "model"))
    assert_close(both(*over_both), plain(masked))


def test_the_derivative_of_gradients_is_that_of_the_exact_sum():
    """JAX's own transpose of a map of unreduced arrays is 8 times too large."""
    params, batch = placed()
    f = dq.value_and_grad(masked, axis_name="data", compression=F32)
    norm = jax.grad(lambda p: optax.tree.norm(f(p, batch)[1], squared=True))
    of_plain = lambda p, b: optax.tree.norm(jax.grad(masked)(p, b), squared=True)
    expected = jax.jit(jax.grad(of_plain))(*network())
    assert_close(jax.jit(norm)(params), expected)
    with pytest.raises(ValueError, match="outside of jax.jit, and no mesh is set"):
        norm(params)
    with jax.set_mesh(mesh_of()):
        assert_close(norm(params), expected)


@pytest.mark.parametrize("form", [lambda f: f, jax.jit], ids=["vmap", "vmap of jit"])
def test_vmap_of_unreduced_gradients_is_refused(form):
    (params, batch), mesh = placed(), mesh_of()
    several = put(jax.tree.map(lambda x: x[None], params), mesh)
    unreduced, summed_by_jax = (
        form(dq.value_and_grad(masked, axis_name="data", compression=method))
        for method in (F32, None)
    )
    with jax.set_mesh(mesh):
        found = jax.vmap(summed_by_jax, in_axes=(0, None))(several, batch)
        assert_close(jax.tree.map(lambda x: x[0], found), summed_by_jax(params, batch))
        with pytest.raises(NotImplementedError, match="jax.vmap.*mesh of Auto axes"):
            jax.vmap(unreduced, in_axes=(0, None))(several, batch)


BOTH = ("data", "one")
AXES = [*itertools.product(("data", BOTH), repeat=3)]


def placed_on_ones(of_batch):
    """Parameters, of which one names an axis of size 1, and the batch."""
    mesh, (params, batch) = jax.make_mesh((8, 1), BOTH), network()
    specs = {name: P("one") if name == "up" else P() for name in params}
    return put(params, mesh, specs), put(batch, mesh, P(of_batch))


def on_ones(params, batch, **options):
    up = jax.reshard(params["up"], P()) if options else params["up"]
    hidden = jnp.einsum("bi,io->bo", batch["x"], up, **options)
    return jnp.mean(jnp.square(jnp.tanh(hidden) @ params["down"])) * params["scale"]


def closed(loss, **options):
    return lambda p, b: dq.value_and_grad(lambda p: loss(p, b), **options)(p)


@pytest.mark.parametrize(("axis", "of_batch", "of_loss"), daily(AXES, [AXES[i] for i in (0, 2, 5)]))
def test_axes_of_size_1_count_for_nothing(axis, of_batch, of_loss):
    """Types name them: those of parameters, of the batch, of the loss and of the data axes."""
    params, batch = placed_on_ones(of_batch)
    own = functools.partial(on_ones, out_sharding=P(of_loss))
    options = {"axis_name": axis, "compression": F32, "metrics": True}
    within = axis == of_batch == of_loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = jax.jit((closed if within else dq.value_and_grad)(own, **options))
        value, found = f(params, batch)
    assert_close((value, found.tree), plain(on_ones))
    assert found.metrics.wire_bytes == 2 * 16 * WIDTH * 4 * 2 * 7 / 8  # of a ring of 8
    assert jax.typeof(found.tree["up"]) == jax.typeof(params["up"])


def test_types_of_what_a_loss_closes_over_stay_as_they_are():
    """JAX has no rule for these types in the loss's products, and sums their gradients."""
    own = functools.partial(on_ones, out_sharding=P("data"))
    found = jax.jit(closed(own, axis_name="data", compression=F32))(*placed_on_ones(BOTH))
    assert_close(found, plain(on_ones))


# --- psum outside of maps -------------------------------------------------------------------------


@functools.cache
def unreduced(axes="data", mesh=None):
    f = dq.value_and_grad(masked, axis_name=axes, compression=F32, unreduced=True)
    return jax.jit(f)(*placed(mesh, axes))[1]


@pytest.mark.usefixtures("padding_is_free")
def test_unreduced_gradients_cross_jit_and_are_summed_by_psum():
    grads = unreduced()
    assert unreduced_axes(grads["up"]) == {"data"}
    assert not unreduced_axes(grads["bias"])
    expected = plain(masked)[1]
    assert_close(jax.jit(lambda g: dq.psum(g, "data", compression=F32))(grads), expected)
    found = dq.reduce(
        grads, "data", op="sum", compression=CHEAP, metrics=True, key=jax.random.key(0)
    )
    assert 1e-6 < float(vnmse(jax.device_get(found.tree), expected)) < 0.1
    assert float(found.metrics.vnmse) > 0


def test_unreduced_gradients_of_shards_are_scattered_where_specs_say_so():
    """FSDP with accumulation: gradients of whole parameters are added, then scattered once."""
    specs = {"up": P("data"), "bias": P(), "down": P(None, "data"), "scale": P()}
    params, batch = put(network()[0], mesh_of(), specs), placed()[1]
    f = dq.value_and_grad(masked, axis_name="data", compression=F32, unreduced=True)

    def twice(params, batch):
        total = jax.tree.map(jnp.add, f(params, batch)[1], f(params, batch)[1])
        return dq.psum(total, "data", compression=F32, specs=specs)

    program, moves = compiled(twice, params, batch)
    grads = program(params, batch)
    assert_close(grads, jax.tree.map(lambda g: 2 * g, plain(masked)[1]))
    assert grads["down"].sharding.spec == specs["down"]
    sizes = dict(sorted(moves))  # the largest of each kind
    assert sizes["reduce-scatter"] == 16 * WIDTH // 8
    assert sizes["all-reduce"] <= WIDTH + 2


def test_errors_of_psum_outside_of_maps():
    grads, over_both = unreduced(), unreduced(("data", "model"), mesh_of(4, 2))
    two_axes = r"\['data', 'model'\], and axis_name='data'; pass"
    assert_refused(
        (ValueError, "op='mean' over axis 'data' outside.*op='sum'", dq.pmean, grads, "data"),
        (NameError, "unbound axis", dq.psum, network()[0], "data"),
        (NameError, "unbound axis", dq.psum, grads, "rows"),
        (ValueError, two_axes, dq.psum, over_both, "data"),
    )
    with pytest.warns(UserWarning, match="no leaf is unreduced over axis 'data'"):
        dq.psum({"bias": grads["bias"]}, "data")
