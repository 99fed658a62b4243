"""`value_and_grad` on Auto meshes: losses written for `jax.jit` against JAX's own gradients."""

import functools
import math
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from asserts import assert_close, assert_refused
from cases import CHEAP, EXACT, daily, low
from flax import linen
from hlo import moves_of
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from workers import WHOLE, compilations, mesh_of, network, put

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.reduction import reduction

OPTIONS = {"axis_name": "data", "compression": EXACT}


def arrays():
    """Two layers, and examples of which another part counts on every worker."""
    params, batch = network()
    return {name: params[name] for name in ("up", "down")}, batch


def errors(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - x), axis=-1)


def loss(params, batch):
    return jnp.mean(errors(params, batch["x"]))


def count(params, batch):
    """The number of tokens that count."""
    return jnp.sum(batch["mask"])


def masked(params, batch):
    """The mean over tokens that count."""
    own = errors(params, batch["x"]) * batch["mask"]
    return jnp.sum(own) / jnp.maximum(count(params, batch), 1)


def ours(loss, mesh=None, **options):
    return dq.value_and_grad(loss, mesh=mesh or mesh_of(8), **OPTIONS | options)


@functools.cache
def plain(loss):
    """The loss of all examples and its gradient, on one device."""
    return jax.jit(jax.value_and_grad(loss))(*arrays())


@pytest.mark.parametrize("argnums", [(0, 3), 3, -1])
def test_arguments_are_those_of_jax_value_and_grad(argnums):
    """Parameters anywhere among the arguments; a flag, a scalar and a tree that stays whole.

    Outside of `jax.jit` they may be numbers of Python, doubles of NumPy and absent.
    """
    params, batch = arrays()
    frozen = {"table": np.linspace(0.0, 1.0, 48).reshape(3, 16), "absent": None}

    def own(up, frozen, batch, down, *, scale, doubled):
        assert isinstance(doubled, bool)
        assert frozen["table"].shape == (3, 16) and frozen["absent"] is None
        params = {"up": up, "down": down["w"] * down["scale"]}
        found = loss(params, batch) + jnp.sum(frozen["table"]) * scale
        return found * 2 if doubled else found

    args = params["up"], frozen, batch, {"w": params["down"], "scale": 2.0}
    kwargs = {"scale": np.float32(0.1), "doubled": True}
    expected = jax.value_and_grad(own, argnums)(*args, **kwargs)
    specs = (P(), None) if isinstance(argnums, tuple) else (P(), P(), None)
    f = ours(own, argnums=argnums, batch_specs=specs)
    assert_close(f(*args, **kwargs), expected)
    with_flag = functools.partial(f, doubled=True)
    assert_close(jax.jit(with_flag)(*args, scale=kwargs["scale"]), expected)


@pytest.mark.parametrize("raw", [False, True])
def test_keys_are_each_workers_own_unless_told(raw):
    params, batch = arrays()
    key = jax.random.PRNGKey(5) if raw else jax.random.key(5)

    def noise(params, batch, key):
        assert len(batch["x"]) == 4  # its own examples, also where a spec is None
        return loss(params, batch), jax.random.normal(key, (1,))

    f = functools.partial(ours, noise, has_aux=True, aux="rows")
    own = jax.jit(f())(params, batch, key)[0][1]
    assert len({*np.asarray(own).tolist()}) == 8
    same = jax.jit(f(batch_specs=(None, P())))(params, batch, key)[0][1]
    np.testing.assert_array_equal(same, np.full(8, jax.random.normal(key, (1,))[0]))


def test_weights_make_a_masked_mean_exact():
    params, batch = arrays()
    expected, f = plain(masked), ours(masked, weight=count)
    assert_close(f(params, batch), expected)
    assert_close(f(put(params, mesh_of(8), P("data")), batch), expected)
    unweighted = ours(masked)(params, batch)
    assert abs(float(unweighted[0] - expected[0])) > 1e-3  # the reason for weight=
    nothing = batch | {"mask": np.zeros(32, np.float32)}
    assert_close(f(params, nothing)[1], jax.tree.map(np.zeros_like, params))


def of_all(params, batch):
    own = errors(params, batch["x"]) * batch["mask"]
    return lax.psum(jnp.sum(own), "data") / lax.psum(count(params, batch), "data")


def total_error(params, batch):
    return jnp.sum(errors(params, batch["x"]))


def in_halves(batch):
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)


def of_micro_batches(params, batch):
    """Keeps the activations of one of them."""
    return jnp.mean(lax.map(jax.checkpoint(functools.partial(loss, params)), in_halves(batch)))


def from_constants(params, batch):
    """Loops and branches that begin with constants, which are typed as the same on all workers."""

    def add(total, rows):
        own = jax.checkpoint(loss)(params, rows)
        return (total[0] + own / 2, total[1] * 2), own

    (total, _), rows = lax.scan(add, (jnp.zeros(()), jnp.ones(())), in_halves(batch))
    again = lax.fori_loop(0, 2, lambda _, x: x + loss(params, batch) / 2, jnp.zeros(()))
    small = lax.cond(total < 1e9, lambda: jnp.mean(rows), lambda: jnp.zeros(()))
    until = lambda x: x[0] < 2, lambda x: (x[0] + 1, x[1] + lax.stop_gradient(total))
    _, twice = lax.while_loop(*until, (0, jnp.zeros(())))
    return (total + again + small + jax.jit(lambda x: x)(twice) / 2 - lax.stop_gradient(total)) / 3


def with_ops_that_want_one_type(params, batch):
    """JAX refuses a key beside varying arguments, and a search on Auto axes beside a map's."""
    own = jnp.abs(params["up"][:4, :4])
    drawn = jax.random.gamma(jax.random.key(0), 1 + own[0])
    solved = jax.scipy.linalg.expm(own) @ jnp.linalg.solve(own + 4 * jnp.eye(4), drawn)
    return loss(params, batch) + 1e-2 * jnp.sum(jnp.interp(solved, jnp.arange(4.0), drawn))


def sums_in_a_loop(params, batch):
    """Beside a worker's own sum the loop carries that of all, which is the loss."""

    def add(total, rows):
        own = total_error(params, rows)
        return (total[0] + lax.psum(own, "data"), total[1] + own), None

    first = jnp.zeros(()), jnp.zeros(())
    total, _ = lax.scan(add, first, in_halves(batch))[0]
    return lax.cond(params["up"][0, 0] < 9, lambda: total, lambda: jnp.zeros(()))


OF_ALL = {
    "a quotient of sums": (of_all, masked, (8,), {}),
    # Collectives over one of two data axes leave the other one's mean to us.
    "a mean over one axis": (
        lambda p, b: lax.pmean(loss(p, b), "model"), loss, (4, 2), {"axis_name": ("data", "model")},
    ),
    "a sum": (lambda p, b: lax.psum(total_error(p, b), "data"), total_error, (8,), {"op": "sum"}),
    "micro-batches": (of_micro_batches, loss, (8,), {}),
    "constants": (from_constants, loss, (8,), {}),
    "constants on two axes": (from_constants, loss, (4, 2), {"axis_name": ("data", "model")}),
    "one type": (with_ops_that_want_one_type, with_ops_that_want_one_type, (4, 2), {"specs": P()}),
    "a sum in a loop": (sums_in_a_loop, total_error, (8,), {"op": "sum"}),
}  # fmt: skip
"""A loss that takes collectives, or is a loop; that of all examples; a mesh."""


def large_sums(compiled):
    """All-reduces of a gradient of 2,048 coordinates."""
    moves = moves_of(compiled.as_text())
    return [bits for name, bits in moves if name == "all-reduce" and bits >= 32 * 2048]


@pytest.mark.parametrize("name", OF_ALL)
def test_losses_with_collectives_or_loops_are_those_of_all_examples_and_reduced_once(name):
    own, of_examples, sizes, options = OF_ALL[name]
    compiled = jax.jit(ours(own, mesh_of(*sizes), **options)).lower(*arrays()).compile()
    assert_close(compiled(*arrays()), plain(of_examples))
    assert len(large_sums(compiled)) == 1


def test_equal_constants_of_other_types_are_other_programs():
    """The loss closes over a dict that is no pytree, too."""
    args, mesh = arrays(), mesh_of(2)
    factors = {bool: 1.0, int: 2.0, float: 3.0}
    f = ours(lambda p, b, flag: loss(p, b) * factors[type(flag)], mesh)
    own = [f(*args, flag)[0] / plain(loss)[0] for flag in (True, 1, 1.0)]
    np.testing.assert_allclose(own, list(factors.values()), rtol=1e-5)
    zero = ours(lambda p, b, zero: loss(p, b) * math.copysign(1, zero), mesh)
    assert zero(*args, 0.0)[0] == -zero(*args, -0.0)[0] != 0


def test_arguments_that_may_be_no_examples_are_not_split_silently():
    f = ours(lambda p, b, table: loss(p, b), mesh_of(2))
    with pytest.warns(
        UserWarning, match=r"of 2 lengths.*\(32,\), \(6, 16\)\].*P\(\) in batch_specs"
    ):
        f(*arrays(), np.ones((6, 16), np.float32))


def labelled(params, batch, table):
    """Every worker needs the whole table, which may have as many rows as the batch."""
    return jnp.mean(errors(params, batch["x"]) * table[batch["label"]])


@pytest.mark.parametrize("rows", [32, 48])
def test_placements_say_which_arguments_are_whole(rows):
    """Outside of `jax.jit`; if they have as many rows as the batch, a warning says so."""
    params, batch = arrays()
    mesh = mesh_of(8)
    batch = {"x": batch["x"], "label": np.arange(32)[::-1].copy()}
    table = np.linspace(0.0, 1.0, rows, dtype=np.float32)
    expected = jax.value_and_grad(labelled)(params, batch, table)
    placed = put(batch, mesh, P("data")), put(table, mesh)
    if rows == 48:
        assert_close(ours(labelled)(params, *placed), expected)
        return
    with pytest.warns(UserWarning, match="'table' has shape .32,., as many rows.*every worker"):
        assert_close(ours(labelled)(params, *placed), expected)
    told = ours(labelled, batch_specs={"table": P()})
    assert_close(told(params, *placed), expected)
    assert_close(jax.jit(told)(params, *placed), expected)  # placements cannot be seen


def test_without_a_placement_over_workers_all_arguments_are_split():
    """On one device, of NumPy, or whole on every device; a placement of columns warns."""
    params, batch = arrays()
    mesh = mesh_of(8)
    shapes = []

    def seen(params, batch):
        shapes.append(batch["x"].shape)
        return loss(params, batch)

    whole = put({"x": batch["x"]}, mesh)
    for own in (whole, {"x": jnp.asarray(batch["x"])}, {"x": batch["x"]}):
        jax.make_jaxpr(lambda p, own=own: ours(seen)(p, own))(params)
    columns = put({"x": batch["x"]}, mesh, P(None, "data"))
    with pytest.warns(UserWarning, match=r"batch..x... is sharded as .*None, 'data'.*its leading"):
        jax.make_jaxpr(lambda p: ours(seen)(p, columns))(params)
    assert {*shapes} == {(4, 16)}


def test_a_batch_in_a_closure_is_warned_of():
    params, batch = arrays()
    for closed in (batch, put(batch, mesh_of(8)), put(batch, mesh_of(8), P("data"))):
        with pytest.warns(UserWarning, match="all workers on axis 'data' compute the same loss"):
            jax.eval_shape(ours(lambda p, closed=closed: loss(p, closed)), params)
    with pytest.warns(UserWarning, match="compute the same loss"):
        given = ours(lambda p, table: loss(p, batch) * table, batch_specs=(P(),))
        jax.eval_shape(given, params, np.ones(()))
    own = lambda p: loss(p, {"x": batch["x"] * jnp.float32(lax.axis_index("data"))})
    drawn = lambda p, key: loss(p, {"x": jax.random.normal(key, (4, 16))})
    jax.eval_shape(ours(own), params)
    jax.eval_shape(ours(drawn), params, jax.random.key(0))
    jax.eval_shape(ours(lambda p: loss(p, batch), mesh_of(1)), params)


def test_aux_that_is_not_the_same_is_warned_of():
    """Batch statistics; what parameters alone say is the same on all workers."""
    params, batch = arrays()

    def statistics(params, batch, before):
        mean = jnp.mean(batch["x"], axis=0)
        after = {"own": 0.9 * before + 0.1 * mean, "all": lax.pmean(mean, "data")}
        after |= {"norm": jnp.sum(params["up"] ** 2), "before": before}
        return loss(params, batch), after

    options = {"has_aux": True, "batch_specs": {"before": P()}}
    f = ours(statistics, aux="same", **options)
    with pytest.warns(UserWarning, match=r"\['own'\]\"\]: JAX's types.*BatchNorm") as caught:
        jax.eval_shape(f, params, batch, np.zeros(16, np.float32))
    assert len(caught) == 1
    f = ours(
        statistics,
        aux={"own": "mean", **dict.fromkeys(("all", "norm", "before"), "same")},
        **options,
    )
    (_, aux), _ = f(params, batch, np.zeros(16, np.float32))
    assert_close(aux["own"], 0.1 * aux["all"])
    assert float(aux["norm"]) == pytest.approx(float(np.sum(params["up"] ** 2)), rel=1e-5)

    def recurrent(params, batch):
        """Its types do not fit where JAX knows parameters to be the same."""
        step = lambda carry, row: (jnp.tanh(carry + row), None)
        last, _ = lax.scan(step, params["up"][:, 0], batch["x"])
        return jnp.mean(last**2), jnp.sum(params["up"])

    with pytest.warns(UserWarning, match="JAX's types do not tell"):
        jax.eval_shape(ours(recurrent, has_aux=True, aux="same"), params, batch)


def test_aux_becomes_what_its_words_say():
    args = arrays()

    def with_aux(params, batch):
        own = errors(params, batch["x"])
        low = jnp.sum(own).astype(jnp.bfloat16)
        return masked(params, batch), {
            "loss": masked(params, batch), "low": low, "rows": own, "step": jnp.int32(7),
            "tokens": count(params, batch).astype(jnp.int32), "nothing": None,
        }  # fmt: skip

    words = {"low": "sum", "rows": "rows", "step": "same", "tokens": "sum"}  # "loss" is a mean
    (_, found), _ = jax.jit(ours(with_aux, has_aux=True, aux=words, weight=count))(*args)
    (_, expected), _ = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(*args)
    low = found.pop("low")
    assert low.dtype == jnp.bfloat16
    assert float(low) == pytest.approx(float(expected.pop("low")), rel=0.02)
    assert_close(found, expected)


def test_aux_without_words_is_what_its_types_tell():
    args = arrays()

    def with_aux(params, batch):
        tokens = count(params, batch).astype(jnp.int32)
        rows = {"tokens": tokens, "rows": errors(params, batch["x"])[:, None]}
        return loss(params, batch), rows | {"loss": loss(params, batch)}

    with pytest.warns(
        UserWarning, match=r"\"\['rows'\]\": 'rows', \"\['tokens'\]\": 'sum'"
    ) as seen:
        (_, found), _ = jax.jit(ours(with_aux, has_aux=True))(*args)
    assert len(seen) == 1
    (_, expected), _ = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(*args)
    assert_close(found, expected)
    words = {"tokens": "sum", "rows": "rows"}
    jax.eval_shape(ours(with_aux, has_aux=True, aux=words), *args)  # without a warning


@pytest.mark.parametrize("constrained", [False, True])
def test_means_over_rows_that_no_worker_has_are_warned_of(constrained):
    """As of a slice by the size of the whole batch. No warning if the loss is of the same kind."""
    args = arrays()

    def with_aux(params, batch, of_loss=False):
        rows = errors(params, batch["x"])
        rows = lax.with_sharding_constraint(rows, P("data")) if constrained else rows
        late = jax.jit(jnp.mean)(rows[8:])
        aux = {"late": late, "twice": lax.map(jnp.sum, jnp.stack([rows[8:], rows[8:]]))[0]}
        aux |= {"whole": jnp.mean(rows), "joined": jnp.mean(jnp.concatenate([rows, rows[8:]]))}
        return jnp.mean(rows) + (late if of_loss else 0.0), aux

    with pytest.warns(UserWarning, match="aux leaves .*'late'.*'twice'.* are .* 'rows'") as seen:
        jax.eval_shape(ours(with_aux, has_aux=True), *args)
    assert len(seen) == 1
    jax.eval_shape(ours(functools.partial(with_aux, of_loss=True), has_aux=True), *args)


def of_aux(leaf, aux=None):
    return ours(lambda p, b: (loss(p, b), {"leaf": leaf()}), has_aux=True, aux=aux)


@pytest.mark.parametrize(("sizes", "op"), [((8,), "sum"), ((8,), "mean"), ((4, 2), "sum")])
def test_terms_of_micro_batches_are_summed_once(sizes, op):
    """A window's gradient is that of one batch, divided by the tokens of all micro-batches."""
    params, batch = arrays()
    halves = in_halves(batch)
    specs = {"up": P(None, "model"), "down": P("model")} if len(sizes) > 1 else None
    options = {"op": op, "unreduced": True, "has_aux": True, "specs": specs}

    def own_loss(params, batch):
        own = errors(params, batch["x"]) * batch["mask"]
        return (jnp.mean if op == "mean" else jnp.sum)(own), {"tokens": count(params, batch)}

    def window(params, halves):
        f = ours(own_loss, mesh_of(*sizes), **options)

        def add(terms, half):
            (value, aux), more = f(params, half)
            return jax.tree.map(jnp.add, terms, more), (value, aux["tokens"])

        _, like = jax.eval_shape(f, params, jax.tree.map(lambda x: x[0], halves))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        terms, (values, tokens) = lax.scan(add, zeros, halves)
        return (jnp.sum(values), dq.psum(terms, "data", compression=EXACT)), jnp.sum(tokens)

    def whole(params):
        losses = jax.vmap(lambda half: own_loss(params, half)[0])(halves)
        return jnp.sum(losses)

    compiled = jax.jit(window).lower(params, halves).compile()
    found, tokens = compiled(params, halves)
    assert_close(found, jax.jit(jax.value_and_grad(whole))(params))
    assert tokens == pytest.approx(batch["mask"].sum() * (1 if op == "sum" else 1 / sizes[0]))
    if specs is not None:
        assert {name: x.sharding.spec for name, x in found[1].items()} == specs
    else:  # and not in the loop
        assert len(large_sums(compiled)) == 1


class Net(linen.Module):
    """Says how activations and parameters are sharded, over the data axis, too."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = self.param("up", linen.with_partitioning(init, (None, "model")), (16, 64))
        down = self.param("down", linen.with_partitioning(init, ("model", None)), (64, 16))
        hidden = lax.with_sharding_constraint(jnp.tanh(x @ up), P("data", "model"))
        hidden = linen.with_logical_constraint(hidden, ("batch", "width"))
        return lax.with_sharding_constraint({"y": hidden @ down}, {"y": P(("data", "one"))})["y"]


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_constraints_of_the_loss_forget_the_data_axes(sizes):
    mesh, x = mesh_of(*sizes), arrays()[1]["x"]
    with jax.set_mesh(mesh):
        boxed = Net().init(jax.random.key(0), x)
    params = put(linen.unbox(boxed), mesh, linen.get_partition_spec(boxed))

    def net_loss(params, x):
        out = Net().apply(params, x)
        out = lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", None)))
        return jnp.mean(jnp.square(out - x))

    axes = ("data", "one") if sizes[2] > 1 else "data"
    shardings = jax.tree.map(lambda x: x.sharding, params)
    f = ours(net_loss, mesh, axis_name=axes, specs=shardings)
    rules = (("batch", "data"), ("width", "model"))
    with jax.set_mesh(mesh), linen.logical_axis_rules(rules):
        found = jax.jit(f)(params, x)
        expected = jax.jit(jax.value_and_grad(net_loss))(params, x)
    assert_close(found, expected)
    for name, leaf in found[1]["params"].items():
        assert leaf.sharding.is_equivalent_to(params["params"][name].sharding, 2)


def attributes():
    """Every attribute of JAX's modules and of their primitives, by its place."""
    modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "jax"}
    found = {}
    for name, module in modules.items():
        for key, x in list(vars(module).items()):
            found[name, key] = id(x)
            if isinstance(x, Primitive):
                found.update(((name, key, own), id(y)) for own, y in vars(x).items())
    return found


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.usefixtures("padding_is_free")
def test_nothing_of_jax_is_replaced_while_a_loss_is_traced(kind):
    params, batch = arrays()
    mesh = mesh_of(8) if kind == "auto" else jax.make_mesh((8,), ("data",))
    inside = []

    def constrained(params, batch):
        inside.append(attributes())
        if kind == "auto":
            x = lax.with_sharding_constraint(batch["x"], P("data", None))
            return loss(params, batch | {"x": x})
        up, down = (jax.reshard(params[name], P()) for name in ("up", "down"))
        own = jnp.einsum("bi,io->bo", jnp.tanh(batch["x"] @ up), down, out_sharding=P("data"))
        return jnp.mean(jnp.square(own))

    def step():
        with jax.set_mesh(mesh):
            put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
            f = dq.value_and_grad(constrained, axis_name="data", mesh=mesh, compression=CHEAP)
            return jax.jit(f)(put(params, P()), put(batch, P("data")))

    step()  # imports what JAX imports when it is first wanted
    jax.clear_caches()
    inside.clear()
    before = attributes()
    step()
    assert inside
    for seen in (*inside, attributes()):
        shared = seen.keys() & before.keys()
        assert len(shared) > 10_000
        assert not [place for place in shared if seen[place] != before[place]]
        assert not [place for place in seen.keys() ^ before.keys() if len(place) == 3]


@pytest.mark.parametrize("way", ["name", "partial", "closure", "ours"])
def test_constraints_by_any_name(way, monkeypatch):
    """A module's own name of JAX's function, a partial and a closure forget axes alike."""
    params, batch = arrays()
    mesh, of_jax = mesh_of(4, 2), lax.with_sharding_constraint
    spec = NamedSharding(mesh, P("data", "model"))
    module = types.ModuleType("layers")
    monkeypatch.setitem(sys.modules, "layers", module)
    vars(module)["constrain"] = of_jax
    constrain = {
        "name": lambda x: module.constrain(x, spec),
        "partial": functools.partial(of_jax, shardings=spec),
        "closure": lambda x: of_jax(x, P(("data",), "model")),
        "ours": lambda x: dq.with_sharding_constraint({"x": x}, {"x": spec})["x"],
    }[way]
    traced = []

    def constrained(p, b):
        traced.append(get_abstract_mesh().manual_axes)
        return loss(p, {"x": constrain(b["x"])})

    f = jax.jit(ours(constrained, mesh=mesh, specs=P()))
    assert_close(f(params, batch), plain(loss))
    assert "spec=P(None, 'model')" in str(jax.make_jaxpr(f)(params, batch))
    assert traced == [("data",)] if way == "ours" else len(traced) == 2


def constrained_everywhere(params, x):
    """Constraints in a loop, in checkpoints, in branches, and in rules of derivatives."""
    both = P("data", "model")

    @jax.custom_vjp
    def twice(x):
        return 2 * lax.with_sharding_constraint(x, both)

    def backward(_, gradient):  # a rule that is not the derivative: 3 and not 2
        return (3 * lax.with_sharding_constraint(gradient, P("data")),)

    twice.defvjp(lambda x: (twice(x), None), backward)

    @jax.checkpoint
    def layer(x, w):
        x = jax.nn.silu(x @ w) + jnp.zeros((1, 16))
        own = lambda f: lambda x: lax.with_sharding_constraint(f(x), both)
        x = lax.cond(x[0, 0] > 0, own(jnp.sin), own(jnp.tanh), x)
        return twice(x), jnp.sum(x)

    x, sums = lax.scan(layer, x, params["layers"])
    rounds = lambda c: (c[0] + 1, lax.with_sharding_constraint(c[1], both) * 0.5)
    _, scale = lax.while_loop(lambda c: c[0] < 2, rounds, (0, lax.stop_gradient(x)))
    y = jax.jit(lambda x: lax.with_sharding_constraint(jax.nn.relu(x), both))(x)
    return jnp.mean(jnp.square(y) * (1 + jnp.abs(scale))) + 1e-3 * jnp.mean(sums)


def test_constraints_in_loops_branches_checkpoints_and_rules():
    mesh, x = mesh_of(4, 2), jax.random.normal(jax.random.key(1), (8, 16))
    params = {"layers": jax.random.normal(jax.random.key(0), (2, 16, 16)) / 8}

    def by_worker(params, x):
        """Plain JAX, where each worker's branches are its own."""
        with jax.set_mesh(mesh):
            one = jax.value_and_grad(constrained_everywhere)
            found = [jax.jit(one)(params, rows) for rows in jnp.split(x, 4)]
        return jax.tree.map(lambda *own: sum(own) / 4, *found)

    f = dq.value_and_grad(
        constrained_everywhere, axis_name="data", mesh=mesh, specs=P(), compression=EXACT
    )
    found, expected = jax.jit(f)(params, x), by_worker(params, x)
    assert_close(found, expected)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_constraints_beside_collectives(op):
    """A loss that is the same on all workers, and aux that is, have their types."""
    params, batch = arrays()
    mesh = mesh_of(4, 2)

    def both(params, batch):
        x = lax.with_sharding_constraint(batch["x"], P("data", "model"))
        own = loss(params, batch | {"x": x})
        return lax.pmean(own, "data"), {"mean": lax.pmean(own, "data"), "w": params["up"] * 2}

    options = {"has_aux": True, "op": op, "aux": "same"}
    (value, aux), grads = jax.jit(ours(both, mesh, specs=P(), **options))(params, batch)
    assert_close((value, grads), plain(loss))
    assert_close((aux["mean"], aux["w"]), (plain(loss)[0], 2 * params["up"]))


def mapped_loss(function, mesh, spec=WHOLE, **options):
    """A loss that maps over the data axis itself, as kernels of others do."""

    def own(params, batch):
        x = lax.with_sharding_constraint(batch["x"], P("data"))
        into = {"mesh": mesh, "in_specs": spec, "out_specs": spec} | options
        x = jax.shard_map(function, **into)(jnp.tanh(x @ params["up"]) @ params["down"])
        return jnp.mean(jnp.square(x))

    return own


def varying_sum(x):
    return lax.psum(lax.pcast(jnp.sin(x), "data", to="varying"), "data") / 8


def numbered(x):
    return x * lax.axis_index("data").astype(x.dtype)


@pytest.mark.parametrize(
    ("function", "options"),
    [(varying_sum, {}), (jax.checkpoint(jnp.sin), {"check_vma": False})],
)
def test_a_map_of_the_loss_over_the_data_axes_maps_over_copies(function, options):
    """Its sums are of one worker's values, also those of JAX's derivative."""
    (params, batch), mesh = arrays(), mesh_of(8)
    alone = lambda p, b: jnp.mean(jnp.square(jnp.sin(jnp.tanh(b["x"] @ p["up"]) @ p["down"])))
    f = ours(mapped_loss(function, mesh, **options), mesh, specs=P())
    assert_close(jax.jit(f)(params, batch), plain(alone))


@pytest.mark.parametrize(
    ("function", "spec", "said"),
    [
        (jnp.sin, P(), "cannot split them"),  # its derivative does
        (jnp.sin, P("data"), "cannot split them"),
        (jax.checkpoint(numbered), P(), "cannot call axis_index"),
    ],
)
def test_a_map_of_the_loss_that_tells_workers_apart_is_refused(function, spec, said):
    (params, batch), mesh = arrays(), mesh_of(8)
    batch = {"x": np.tile(batch["x"], (8, 1))}
    f = ours(mapped_loss(function, mesh, spec, check_vma=False), mesh, specs=P())
    with pytest.raises(ValueError, match=said):
        jax.make_jaxpr(f)(params, batch)


def test_constraints_beside_weights_keys_and_maps():
    """A loss without constraints may have weights, a map over other axes, no closures."""
    params, batch = arrays()
    mesh = mesh_of(4, 2)

    def with_map(params, batch):
        x = lax.with_sharding_constraint(batch["x"], P("data", "model"))
        product = lambda a, b: lax.psum(a @ b, "model")
        into = {"in_specs": (P(None, "model"), P("model")), "out_specs": P()}
        up = jax.shard_map(product, axis_names={"model"}, **into)(x, params["up"])
        own = jnp.mean(jnp.square(jnp.tanh(up) @ params["down"] - x), axis=-1) * batch["mask"]
        return jnp.sum(own) / jnp.maximum(count(params, batch), 1)

    f = ours(with_map, mesh, specs=P(), weight=count)
    assert_close(jax.jit(f)(params, batch), plain(masked))

    @jax.jit
    def closing(params, batch):
        own = lambda p: with_map(p, batch)
        return ours(
            own, mesh, specs=P(), closed_specs=P("data"), weight=lambda _: count({}, batch)
        )(params)

    assert_close(closing(params, batch), plain(masked))

    def noisy(params, batch, key):
        x = lax.with_sharding_constraint(batch["x"], P("data"))
        return loss(params, {"x": x}) * jax.random.uniform(key)

    args = params, batch, jax.random.key(3)
    by_ours = lambda p, b, k: loss(p, b) * jax.random.uniform(k)
    found, expected = (jax.jit(ours(own, mesh, specs=P()))(*args) for own in (noisy, by_ours))
    assert_close(found, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_a_workers_number_beside_constraints_is_its_own(nested):
    params, batch = arrays()

    def own(params, batch):
        x = lax.with_sharding_constraint(batch["x"], P("data"))
        number = lambda: lax.axis_index("data")
        found = lax.cond(params["up"][0, 0] > 9, lambda: 9, number) if nested else number()
        return loss(params, {"x": x}), {"number": found, "same": 2 * params["up"]}

    f = ours(own, mesh_of(4, 2), specs=P(), has_aux=True, aux="same")
    with pytest.warns(UserWarning, match=r"aux='same' of leaves .{,2}\['number'\].{,2}:") as seen:
        jax.eval_shape(f, params, batch)
    assert len(seen) == 1


@pytest.mark.parametrize("choice", ["params", "examples"])
@pytest.mark.parametrize("kind", ["branch", "loop"])
def test_what_examples_choose_in_loops_from_constants_is_not_the_same(kind, choice):
    params, batch = arrays()

    def own(params, batch):
        total = lax.fori_loop(0, 1, lambda _, x: x + loss(params, batch), jnp.zeros(()))
        chosen = params["up"][0, 0] if choice == "params" else batch["x"][0, 0]
        if kind == "branch":
            found = lax.cond(chosen > 0, lambda: 1.0, lambda: 2.0)
        else:
            found = lax.while_loop(lambda x: x < chosen, lambda x: x + 1, 0.0)
        return total, found

    f = ours(own, has_aux=True, aux="same")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.eval_shape(f, params, batch)
    assert [str(x.message)[:11] for x in seen] == ["aux='same' "] * (choice == "examples")


def test_a_loop_whose_types_differ_without_a_map_is_refused_by_jax():
    params, batch = arrays()

    def own(params, batch):
        return lax.fori_loop(0, 1, lambda *_: loss(params, batch), jnp.zeros((), jnp.int8))

    with pytest.raises(TypeError, match="equal types") as refused:
        jax.eval_shape(ours(own), params, batch)
    assert "Traced outside of it, it raises TypeError" in "".join(refused.value.__notes__)


@pytest.mark.parametrize("constrained", [False, True])
def test_a_loss_without_examples_is_warned_of(constrained):
    params, batch = arrays()
    closed = np.asarray(batch["x"])

    def own(params, batch):
        x = lax.with_sharding_constraint(closed, P("data")) if constrained else closed
        return loss(params, {"x": x})

    f = ours(own, batch_specs=P())
    with pytest.warns(UserWarning, match="compute the same loss"):
        jax.eval_shape(f, params, batch)


def test_what_does_not_go_is_refused():
    """`test_deferred` has what is refused on meshes of both kinds."""
    args, keys = arrays(), jax.random.split(jax.random.key(0), 32)
    three = ours(lambda p, b, c: loss(p, b), mesh_of(2))
    inside = jax.shard_map(ours(loss), mesh=mesh_of(8), in_specs=(P(), P("data")), out_specs=P())
    _, terms = jax.jit(ours(loss, unreduced=True))(*args)
    sharded = ours(loss, unreduced=True, specs={"up": P("data"), "down": P()})
    flag, vector = lambda: jnp.bool_(True), lambda: jnp.ones(3)
    other, deeper = {"other": "mean"}, {"leaf": {"deeper": "mean"}}
    two = "and the loss got 2 positional"
    by = lambda specs: ours(lambda p, b, *, t=1: loss(p, b), batch_specs=specs)
    entries = r"got 1 positional arguments besides its parameters \('p'\): \['b'\].*a dict"
    assert_refused(
        (ValueError, "inside of a map over axis 'data'.*jax.value_and_grad", inside, *args),
        (ValueError, r"PRNG keys, key<fry>\[32\].*P\('data'\)", three, *args, keys),
        (ValueError, rf"argnums=\(0, 2\), {two}", ours(loss, argnums=(0, 2)), *args),
        (ValueError, rf"argnums=\(0, -2\), {two}", ours(loss, argnums=(0, -2)), *args),
        (ValueError, f"has 2 entries, and the loss {entries}", by((P(), P("data"))), *args),
        (ValueError, f"has 0 entries, and the loss {entries}", by(()), *args),
        (ValueError, r"names 'p'.*differentiated by.*specs=", by({"p": P()}), *args),
        (ValueError, r"names 'c', .*\['b', 't'\]", by({"c": P()}), *args),
        (ValueError, "argument 'b': specs do not fit", by({"b": {"y": P()}}), *args),
        (ValueError, r"b\['mask'\] has shape \(32,\)", by({"b": P(None, "data")}), *args),
        (ValueError, "on the 8 workers of axes.*weight= out", ours(of_all, weight=count), *args),
        (ValueError, "op='sum' and weight=", lambda: ours(loss, op="sum", weight=count)),
        (ValueError, "call dq.psum.*instead of op='mean'", dq.pmean, terms, "data"),
        (ValueError, r"of \('data',\), and axis_name is \('rows',\)", dq.psum, terms, "rows"),
        (NotImplementedError, "unreduced=True.*whole gradients", sharded, *args),
        (ValueError, r"\['leaf'\] is bool\[\] .*aux=None.*'same'", of_aux(flag), *args),
        (ValueError, r"float32\[3\]", of_aux(vector), *args),
        (ValueError, "aux='average'", of_aux(vector, "average"), *args),
        (ValueError, r"\['other'\] is that of no leaf; pass", of_aux(vector, other), *args),
        (ValueError, "does not fit the loss's aux", of_aux(vector, deeper), *args),
    )


def test_keywords_have_specs_and_frozen_shards_are_gathered_by_layer(monkeypatch):
    """LoRA: frozen weights stay sharded, and the loss gathers them; whole ones are warned of."""
    params, batch = arrays()
    up = jax.random.normal(jax.random.key(4), (16, 4096)) / 16
    frozen = {"up": up, "down": jax.random.normal(jax.random.key(5), (4096, 16)) / 64}
    eight = functools.partial(dq.all_gather, compression=low(dq.DynamiQ(bits=8)))
    gathers = {"exact": lax.all_gather, "8 bits": eight}

    def lora(params, x, *, frozen, how=None):
        @jax.checkpoint
        def layer(x, w):
            return x @ (w if how is None else gathers[how](w, "data", tiled=True))

        return loss(params, {"x": layer(layer(x, frozen["up"]), frozen["down"])})

    x = batch["x"]
    expected = jax.jit(jax.value_and_grad(lora))(params, x, frozen=frozen)
    shards = put(frozen, mesh_of(8), P("data"))
    f = ours(lora, batch_specs={"frozen": P("data")})
    assert_close(f(params, x, frozen=shards, how="exact"), expected)
    value, grads = f(params, x, frozen=shards, how="8 bits")
    assert float(value) == pytest.approx(float(expected[0]), rel=0.01)
    assert 1e-6 < float(vnmse(grads, expected[1])) < 1e-3
    whole = ours(lora, batch_specs={"frozen": P()})
    assert_close(whole(params, x, frozen=shards), expected)
    monkeypatch.setattr(reduction, "LARGE_GATHER", 1000)
    with pytest.warns(UserWarning, match="2 sharded arguments.*524,288 bytes.*lax.all_gather"):
        whole(params, x, frozen=shards)
    whole(params, x, frozen=frozen)  # on one device: nothing is gathered
    unknown = ours(lora, batch_specs={"froze": P()})
    with pytest.raises(ValueError, match=r"names 'froze'.*\['frozen', 'how', 'x'\]"):
        unknown(params, x, frozen=frozen, how="exact")


def test_specs_by_name_cover_all_arguments():
    """A few random signatures: what a worker gets is what its spec says, told in either way."""
    rng, length = np.random.default_rng(0), 16
    params = {"w": np.ones(3, np.float32)}

    def seen(specs, *args, **kwargs):
        shapes = {}

        def own(first, params, second, *rest, third, fourth=None):
            given = {"first": first, "second": second, "third": third, "fourth": fourth}
            given |= {f"rest{i}": x for i, x in enumerate(rest)}
            shapes.update({name: None if x is None else x["x"].shape for name, x in given.items()})
            return jnp.sum(params["w"]) * jnp.mean(first["x"])

        jax.eval_shape(ours(own, batch_specs=specs, argnums=1), *args, **kwargs)
        return shapes

    kinds = [(P(), (16, 8)), (P("data"), (2, 8)), (P(None, "data"), (16, 1)), (None, (2, 8))]
    x = {"x": np.ones((length, 8), np.float32)}
    for _ in range(12):
        names = ["first", "second", "rest0", "rest1", "third", "fourth"]
        drawn = dict(zip(names, rng.integers(len(kinds), size=6), strict=True))
        if all(kinds[i][1][0] == 16 for i in drawn.values()):
            continue  # a warning: no argument is split by rows
        specs = {name: kinds[i][0] for name, i in drawn.items()}
        if rng.random() < 0.5:
            specs["first"] = {"x": specs["first"]}
        expected = {name: kinds[i][1] for name, i in drawn.items()}
        rest = specs.pop("rest0"), specs.pop("rest1")
        by_name = specs | {"rest": rest}
        args = x, params, x, x, x
        assert seen(by_name, *args, third=x, fourth=x) == expected
        in_order = (specs["first"], specs["second"], *rest)
        own = expected | {"third": (2, 8), "fourth": None}
        assert seen(in_order, *args, third=x) == own
        without = seen(by_name, *args, third=x)  # a name that the call leaves out
        assert without == expected | {"fourth": None}


@pytest.mark.usefixtures("padding_is_free")
def test_terms_are_summed_outside_of_jit_where_the_mesh_has_another_axis():
    params, batch = arrays()
    specs = {"up": P(None, "model"), "down": P()}
    f = ours(loss, mesh_of(2, 2), unreduced=True, specs=specs, compression=CHEAP)
    run = lambda params, batch: dq.reduce(
        f(params, batch)[1], "data", op="sum", compression=CHEAP, metrics=True
    )
    found, expected = run(params, batch), jax.jit(run)(params, batch)
    assert_close(found, expected)
    assert 0 < float(found.metrics.vnmse) < 0.1
    assert found.tree["up"].sharding.spec == P(None, "model")
    with compilations() as programs:
        run(params, batch)
    assert not programs  # one program serves all calls


@pytest.mark.parametrize("solve", daily(["cg", "gmres", "bicgstab"], ["cg"]))
def test_a_loss_that_jax_refuses_in_a_map_by_any_words_is_traced_outside(solve):
    """`cg` is refused only when JAX lowers it, and `gmres` while it is traced."""
    params, batch = arrays()
    matrix = 3 * np.eye(64, dtype=np.float32) + 1
    solver = getattr(jax.scipy.sparse.linalg, solve)

    def own(params, batch):
        inverse, _ = solver(lambda v: matrix @ v, params["up"][0], maxiter=20)
        return loss(params, batch) * jnp.sum(inverse)

    assert_close(jax.jit(ours(own))(params, batch), plain(own))


def test_an_error_of_the_loss_itself_is_raised_as_it_is():
    params, batch = arrays()
    calls = []

    def own(params, batch):
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine") as refused:
        jax.eval_shape(ours(own), params, batch)
    assert len(calls) == 1
    assert "Traced outside" not in "".join(getattr(refused.value, "__notes__", []))


MESHES = [mesh_of(8), mesh_of(4, 2)]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("own", "around"), [MESHES, MESHES[::-1]])
def test_a_mesh_is_passed_where_another_one_is_set(own, around, explicit):
    """In `jax.jit` JAX may take the other one for it, which is refused."""
    params, batch = arrays()
    typed = lambda mesh: mesh_of(*mesh.devices.shape, kind=AxisType.Explicit)
    own = typed(own) if explicit else own
    specs = None if explicit else P()
    mean = lambda params, batch: jnp.mean(errors(params, batch["x"]))
    f = ours(mean, own, specs=specs)
    args = put(params, own), put({"x": batch["x"]}, own, P("data"))
    expected = jax.value_and_grad(mean)(params, batch)
    for other in (around, typed(around)):
        with jax.set_mesh(other):
            assert_close(jax.device_get(f(*args)), expected)
            if explicit or len(own.axis_names) > 1:
                with pytest.raises(ValueError, match="sum over groups of the latter"):
                    jax.jit(f)(*args)
            else:
                assert_close(jax.device_get(jax.jit(f)(*args)), expected)


def test_shards_without_specs_are_warned_of_in_jit():
    """JAX tells how arguments are sharded only when it lowers the program."""
    params, batch = arrays()
    mesh = mesh_of(8)
    params, batch = put(params, mesh, {"up": P("data"), "down": P()}), put(batch, mesh, P("data"))

    def step(params, batch, specs=None):
        inner = jax.jit(lambda x: jnp.mean(x**2))  # a step has more in it
        return ours(loss, specs=specs)(params, batch), inner(batch["x"])

    with pytest.warns(UserWarning, match=r"^1 parameters \(up\) are sharded .*data.*4,096 bytes"):
        jax.jit(step).lower(params, batch)
    jax.jit(functools.partial(step, specs=P())).lower(params, batch)
    jax.jit(functools.partial(step, specs={"up": P("data"), "down": P()})).lower(params, batch)
    whole = put(jax.device_get(params), mesh)
    jax.jit(step).lower(whole, batch)
    scaled = lambda params, batch: step(jax.tree.map(lambda x: 2 * x, params), batch)
    jax.jit(jax.grad(lambda p: scaled(p, batch)[0][0])).lower(whole)


@pytest.mark.parametrize("closes", [False, True])
def test_a_boxed_flax_model_without_a_set_mesh_has_no_constraints(closes):
    """Flax constrains boxed parameters where a mesh is set; here it is none of the user's."""
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("data", None, None))
    layer = linen.DenseGeneral(features=(2, 8), kernel_init=init, use_bias=False)
    x, mesh = arrays()[1]["x"], mesh_of(8)
    boxed = layer.init(jax.random.key(0), x[:1])
    params = put(boxed, mesh, P("data"))

    def square(params, x):
        return jnp.mean(layer.apply(params, x) ** 2)

    def closing(params, x):
        options = {"specs": P("data"), "closed_specs": P("data")}
        return ours(lambda params: square(params, x), mesh, **options)(params)

    found = jax.jit(closing if closes else ours(square, mesh, specs=P("data")))(params, x)
    assert_close(found, jax.value_and_grad(square)(boxed, x))
