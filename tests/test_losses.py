"""Losses that people write, on Explicit meshes: each trains, and has plain JAX's gradients.

A parameter may be used where JAX has no rule for a value that is typed as reduced: such a use alone
has its gradient summed by JAX (`jaxprs.uses`). All parameters count as large here.
"""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import relative_error
from cases import daily, small
from hlo import moves_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import mesh_of, put

import dynamiq_jax as dq
from dynamiq_jax import contrib

WIDTH, ROWS, VOCABULARY, LAYERS = 64, 16, 32, 3
EXACT = small(dq.F32())
BY_HOPS = small(dq.F32(), topology=dq.Direct())
"""Sums that lose nothing, and are none of XLA's: those in a program are what JAX sums by itself."""
MESHES = {"8": (8,), "4 x 2": (4, 2)}


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Shapes and dtypes are promoted, as by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def arrays():
    """Parameters of all kinds, and a batch; rows count differently on every worker."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.standard_normal(shape) / shape[0] ** 0.5)
    params = {
        "w": draw(WIDTH, WIDTH), "table": draw(VOCABULARY, WIDTH), "scale": 1 + draw(WIDTH),
        "bias": draw(WIDTH), "gain": 1 + draw(WIDTH), "kernel": draw(3, WIDTH, WIDTH),
        "layers": draw(LAYERS, WIDTH, WIDTH), "scales": 1 + draw(LAYERS, WIDTH),
    }  # fmt: skip
    x = np.float32(rng.standard_normal((ROWS, 4, WIDTH)))
    ids = rng.integers(0, VOCABULARY, (ROWS, 4), dtype=np.int32)
    mask = np.float32(np.arange(ROWS)[:, None] % 5 > np.arange(4))
    return params, {"x": x, "ids": ids, "mask": mask}


def norm(h, scale):
    return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * scale


@jax.custom_vjp
def halved(w):
    return w / 2


halved.defvjp(lambda w: (w / 2, None), lambda _, g: (g / 2,))


@jax.custom_vjp
def clipped(w):
    """Its gradient is clipped: each worker's terms must not be clipped alone."""
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -1e-4, 1e-4),))


@jax.custom_vjp
def stepped(w, rates):
    """Its rule indexes a constant of the loss in a loop, as that of an ODE does its times."""
    return w * jnp.sum(rates)


stepped.defvjp(
    lambda w, rates: (stepped(w, rates), rates),
    lambda rates, g: (lax.fori_loop(0, 2, lambda i, a: a + rates[i] * g, 0 * g), 0 * rates),
)


def attention(h, w):
    scores = jnp.einsum("bqd,bkd->bqk", h @ w, h)
    return jax.nn.softmax(scores / WIDTH**0.5) @ h


def convolved(h, kernel):
    """A convolution along the sequence, by products: JAX wants no sharding of these."""
    padded = jnp.pad(h, ((0, 0), (1, 1), (0, 0)))
    return sum(padded[:, i : i + h.shape[1]] @ kernel[i] for i in range(3))


def unsplit(h):
    """Types are as after flash attention by cuDNN: nothing says how the result is split."""
    mesh = jax.sharding.get_abstract_mesh()
    return h if mesh.empty else jax.reshard(h, P())


def on_auto_axes(function):
    """A function that runs on Auto axes, as many of `jax.random` do; its result is whole."""

    def run(x):
        no_mesh = jax.sharding.get_abstract_mesh().empty
        return function(x) if no_mesh else jax.sharding.auto_axes(function, out_sharding=P())(x)

    return run


def mapped(own, check, *out):
    """A step that runs under a map of the loss's own, with or without types of values."""

    def run(h, p):
        if jax.sharding.get_abstract_mesh().empty:
            return own(h, p["w"])
        options = {"in_specs": (P("data"), P()), "out_specs": P(*out), "check_vma": check}
        return jax.shard_map(own, **options)(h, p["w"])

    return run


def mean_of_all(h, w):
    """A mean over the examples of all workers, also inside of a map."""
    own = jnp.mean(jnp.tanh(h @ jax.jit(jnp.sin)(2 * w)))
    return own if jax.sharding.get_abstract_mesh().empty else lax.pmean(own, "data")


def scanned(h, p, remat=False):
    def layer(h, own):
        w, scale = own
        return norm(jnp.tanh(h @ w), scale), None

    layer = jax.checkpoint(layer) if remat else layer
    return lax.scan(layer, h, (p["layers"], p["scales"]))[0]


STEPS = {
    "norm": lambda h, p: norm(h, p["scale"]),
    "bias": lambda h, p: h + p["bias"],
    "matmul": lambda h, p: h @ p["w"],
    "weight norm": lambda h, p: h @ (
        p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True) * p["gain"]
    ),
    "spectral": lambda h, p: h @ (p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2))),
    "tied": lambda h, p: jax.nn.softmax(h @ p["table"].T) @ p["table"],
    "softmax of parameters": lambda h, p: h * jax.nn.softmax(p["gain"]) @ p["w"],
    "attention": lambda h, p: attention(h, p["w"]),
    "convolution": lambda h, p: convolved(h, p["kernel"]),
    "scan": scanned,
    "scan of remat": functools.partial(scanned, remat=True),
    "remat": lambda h, p: jax.checkpoint(lambda h, w: jnp.tanh(h @ w) * w[0])(h, p["w"]),
    "map": mapped(lambda h, w: jnp.tanh(h @ halved(2 * w)), False, "data"),
    "typed map": mapped(lambda h, w: jnp.tanh(h @ (w * w[0])) + w[1], True, "data"),
    "map of all": lambda h, p: h * mapped(mean_of_all, True)(h, p),
    "clipped in map": mapped(lambda h, w: h @ jnp.tanh(clipped(w)), True, "data"),
    "loop in map": mapped(
        lambda h, w: lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w), h), True, "data"
    ),
    "inner jit": lambda h, p: jax.jit(lambda h, w, s: jnp.tanh(h @ w) * s)(h, p["w"], p["scale"]),
    "cond": lambda h, p: lax.cond(
        jnp.sum(p["bias"]) > -99, lambda h, w: h @ w * w[0], lambda h, w: h, h, p["w"]
    ),
    "custom_vjp": lambda h, p: h @ halved(p["w"]),
    "clipped": lambda h, p: h @ jnp.tanh(clipped(p["w"])),
    "stepped": lambda h, p: h @ stepped(p["w"], jnp.array([0.25, 0.5])),
    "clipped in remat": lambda h, p: h @ jax.checkpoint(lambda w: clipped(w) / 2)(p["w"]),
    "lookup": lambda h, p: h @ p["table"][:WIDTH // 2].T @ p["table"][: WIDTH // 2],
    "unsplit": lambda h, p: h + unsplit(jnp.tanh(h @ p["w"])) @ p["w"].T,
    "negative": lambda h, p: h @ -p["w"],
    "reshaped": lambda h, p: jnp.einsum("bsd,dhk->bshk", h, p["w"].reshape(WIDTH, 4, 16)).reshape(
        h.shape, out_sharding=jax.typeof(h).sharding
    ),
    "transposed": lambda h, p: h @ p["w"].T,
}  # fmt: skip
"""From (activations, parameters) to activations."""

DERIVED = {
    "product": lambda p: p["w"] @ p["layers"][0],
    "low rank": lambda p: p["w"] + 2 * p["table"].T @ p["table"],
    "stacked": lambda p: jnp.stack([p["w"], p["layers"][1]])[p["w"][0, 0].astype(jnp.int32)],
    "triangle": lambda p: jnp.tril(p["w"]),
    "leaky": lambda p: jnp.where(p["w"] > 0, p["w"], 0.1 * p["w"]),
    "straight through": lambda p: p["w"] + lax.stop_gradient(jnp.round(p["w"] * 4) / 4 - p["w"]),
    "frozen": lambda p: lax.stop_gradient(p["layers"][2]),
    "spectral": lambda p: p["w"] / lax.stop_gradient(jnp.max(jnp.abs(p["w"]))),
    "loop": lambda p: lax.scan(lambda w, own: (w @ own, None), jnp.eye(WIDTH), p["layers"])[0],
    "branch": lambda p: lax.cond(p["gain"][0] > 0, jnp.tanh, jnp.sin, p["w"]),
    "checkpoint": lambda p: jax.checkpoint(lambda w: jnp.tanh(w @ w))(p["w"]),
    "scaled": lambda p: p["w"] * p["gain"][0] - p["bias"],
    "softmax": lambda p: jax.nn.softmax(p["w"]),
}
"""Matrices that follow from parameters alone."""
ON_AUTO_AXES = {
    "on Auto axes": lambda p: on_auto_axes(lambda w: jnp.tanh(clipped(w)))(p["w"]),
    "scalar on Auto axes": lambda p: p["w"] * on_auto_axes(jnp.sqrt)(jnp.sum(p["table"] ** 2)),
    "gamma": lambda p: p["w"] * jax.random.gamma(jax.random.key(0), 1 + jnp.abs(p["gain"])),
}
"""Matrices whose gradients are whole on Auto axes: JAX would take them for terms there."""
STEPS |= {name: lambda h, p, own=own: h @ own(p) for name, own in (DERIVED | ON_AUTO_AXES).items()}

PENALTIES = {
    "none": lambda p: 0.0,
    "l2": lambda p: 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "l1": lambda p: 1e-2 * jnp.sum(jnp.abs(p["w"])),
    "log": lambda p: 1e-3 * jnp.sum(jnp.log(p["scale"] ** 2 + 1)),
    "orthogonal": lambda p: 1e-3 * jnp.sum((p["w"].T @ p["w"] - jnp.eye(WIDTH)) ** 2),
}


def make_loss(steps, penalty, spec):
    def loss(p, batch):
        h = p["table"].at[batch["ids"]].get(out_sharding=spec) + batch["x"]
        for name in steps:
            h = STEPS[name](h, p)
        errors = jnp.mean((jnp.tanh(h) - batch["x"]) ** 2, -1)
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"]) + PENALTIES[penalty](p)

    return loss


@functools.cache
def plain(steps, penalty):
    """Values and gradients of plain JAX on one device, on the host."""
    run = jax.jit(jax.value_and_grad(make_loss(steps, penalty, None)))
    return jax.device_get(run(*arrays()))


def check(steps, penalty, sizes, method=EXACT, warned="ignore", **options):
    """Values and gradients, those of plain JAX, and the step with its arguments."""
    params, batch = arrays()
    mesh = mesh_of(*sizes, kind=AxisType.Explicit)
    own = dq.value_and_grad(
        make_loss(steps, penalty, P("data")), axis_name="data", compression=method, **options
    )
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings(warned, message=".*JAX sums gradients of")
        own = jax.jit(own)
        placed = put(params, mesh), put(batch, mesh, P("data"))
        found = own(*placed)
        if options:
            found = found[0], jax.jit(lambda g: dq.psum(g, "data", compression=method))(found[1])
    return found, plain(steps, penalty), (own, placed)


def compare(found, expected):
    """Values, and each parameter's gradient as a whole: single coordinates may nearly cancel."""
    found, expected = jax.device_get((found, expected))  # JAX would compile each operation
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, gradient in expected[1].items():
        error = np.sum((np.float64(found[1][name]) - gradient) ** 2)
        assert error <= 1e-8 * np.sum(np.square(gradient, dtype=np.float64)) + 1e-14, name


RANDOM = np.random.default_rng(0)
DRAWN = [
    (tuple(RANDOM.choice([*STEPS], 3, replace=False)), RANDOM.choice([*PENALTIES]))
    for _ in range(40)
]
SINGLE = [*(((name,), "none") for name in STEPS), *((("matmul",), name) for name in PENALTIES)]
DAILY = [
    (("norm", "bias", "matmul", "weight norm"), "l2", "8"),
    (("scan of remat", "clipped in remat", "norm"), "none", "4 x 2"),
]
DAILY += [(("weight norm", "cond", "softmax of parameters"), "log", "8")]
DAILY += [(("inner jit", "custom_vjp", "attention"), "l1", "4 x 2")]
DAILY += [
    (("remat", "scan", "convolution", "clipped"), "orthogonal", "8"),
    (("unsplit",), "none", "8"),
    (("map", "typed map", "map of all", "clipped in map", "loop in map"), "none", "4 x 2"),
    (("on Auto axes", "scalar on Auto axes", "gamma", "norm", "stepped"), "none", "8"),
]
ALL = [(*case, mesh) for case, mesh in itertools.product(SINGLE + DRAWN, MESHES)]
ALL = DAILY + [case for case in ALL if case not in DAILY]


@pytest.mark.parametrize(("steps", "penalty", "mesh"), daily(ALL, DAILY))
def test_what_plain_jax_trains_trains(steps, penalty, mesh):
    compare(*check(steps, penalty, MESHES[mesh])[:2])


def test_terms_that_are_reduced_later_hold_what_jax_has_summed():
    steps, penalty, mesh = DAILY[0]
    compare(*check(steps, penalty, MESHES[mesh], unreduced=True)[:2])


def largest_native(step, args):
    """The coordinates of the largest sum that XLA makes, in a compiled step."""
    moves = moves_of(step.lower(*args).compile().as_text())
    sums = [bits for kind, bits in moves if kind in ("all-reduce", "reduce-scatter")]
    return max(sums, default=0) // 32


def test_uses_with_a_rule_stay_compressed():
    """A norm's scale, a bias and a penalty cost the matrices nothing."""
    steps = ("norm", "bias", "matmul", "scan of remat", "map", "typed map", "map of all")
    method = small(contrib.MinMax(bits=6))  # which compiles in a third of DynamiQ's time
    found, expected, (step, args) = check(steps, "l2", (8,), method)
    for name in ("w", "layers"):
        assert 0 < relative_error(found[1][name], expected[1][name]) < 0.05
    with jax.set_mesh(args[1]["x"].sharding.mesh):
        assert largest_native(step, args) < WIDTH * WIDTH


@pytest.mark.parametrize("part", [slice(0, 7), slice(7, None)], ids=["first", "last"])
def test_what_follows_from_parameters_alone_stays_compressed(part):
    """Weight norm, low ranks and the like cost no more traffic than the parameters do.

    Two losses share the steps: one chain of all of them would amplify the rounding of float32 until
    plain JAX itself is further from the true gradient than `compare` allows.
    """
    steps = ("norm", "bias", *[*DERIVED][part])
    found, expected, (step, args) = check(steps, "none", (8,), BY_HOPS, warned="error")
    compare(found, expected)
    with jax.set_mesh(args[1]["x"].sharding.mesh):
        assert largest_native(step, args) < WIDTH * WIDTH


def test_activations_that_lost_their_sharding_are_met_by_plain_parameters():
    """As those of a kernel that JAX knows no sharding of: every device computes all rows."""
    mesh = mesh_of(8, kind=AxisType.Explicit)
    params, batch = arrays()
    placed = put(params, mesh), put(batch, mesh, P("data"))

    def loss(p, b):
        h = jax.reshard(b["x"] @ p["w"], P())
        return jnp.mean(jnp.tanh(h @ p["layers"][0]) ** 2)

    with jax.set_mesh(mesh):
        own = jax.jit(dq.value_and_grad(loss, axis_name="data", compression=EXACT))
        with pytest.warns(UserWarning, match=r"1 leaves .*\(layers\).* in dot_general"):
            found = own(*placed)
        compare(found, jax.jit(jax.value_and_grad(loss))(*placed))


SHARDED = {"w": P("data"), "layers": P(None, "data"), "scales": P(None, "data")}


def plainly(shards):
    """How a loss of plain JAX gathers shards."""
    return jax.tree.map(lambda w: jax.reshard(w, P()), shards)


def in_layers(gather, gather_last):
    """A loss whose shards are gathered where they are used: layers with norms, and a last one."""

    @jax.checkpoint
    def layer(h, own):
        own = gather(own)
        return norm(jnp.tanh(h @ own["layers"]), own["scales"]), None

    def loss(p, batch):
        h = lax.scan(layer, batch["x"], {name: p[name] for name in ("layers", "scales")})[0]
        w = gather_last({"w": p["w"]})["w"]
        return jnp.mean((h @ (w / 2) * w[0] - batch["x"]) ** 2)

    return loss


plain_shards = jax.jit(jax.value_and_grad(in_layers(plainly, plainly)))


@pytest.mark.parametrize("told", ["", r"1 sharded .*\(layers\) do not pass"])
def test_gathered_shards_have_uses_without_a_rule_too(told):
    mesh = mesh_of(8, kind=AxisType.Explicit)
    params, batch = arrays()
    params = {name: params[name] for name in SHARDED}
    args = put(params, mesh, SHARDED), put(batch, mesh, P("data"))

    options = {"axis_name": "data", "compression": BY_HOPS}
    ours = functools.partial(dq.fsdp, **options)
    loss = in_layers(plainly if told else ours, ours)
    own = jax.jit(dq.value_and_grad(loss, ungathered=True, **options))
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = own(*args)
        assert [bool(re.search(told, str(one.message))) for one in seen] == [True] * bool(told)
        compare(found, plain_shards(*args))
        assert jax.tree.map(jax.typeof, found[1]) == jax.tree.map(jax.typeof, args[0])
        if not told:
            assert largest_native(own, args) < WIDTH * WIDTH


def test_large_gradients_that_jax_sums_are_named_with_the_use():
    """Norms' scales are not worth a word."""
    params, batch = arrays()
    mesh = mesh_of(8, kind=AxisType.Explicit)
    placed = put(params, mesh), put(batch, mesh, P("data"))
    with jax.set_mesh(mesh):
        large = lambda p, b: jnp.mean((b["x"].reshape(64, 64) * p["w"]) ** 2)
        with pytest.warns(
            UserWarning, match=r"sums gradients of 1 leaves .*\(w\).* in (mul|reshard)"
        ):
            jax.eval_shape(dq.value_and_grad(large, axis_name="data", compression=EXACT), *placed)
        quiet = lambda p, b: jnp.mean(norm(b["x"] @ p["w"], p["scale"]) ** 2)
        jax.eval_shape(dq.value_and_grad(quiet, axis_name="data", compression=EXACT), *placed)


def test_an_error_of_the_loss_is_jaxs_own():
    params, batch = arrays()
    mesh = mesh_of(8, kind=AxisType.Explicit)
    placed = put(params, mesh), put(batch, mesh, P("data"))
    wrong = lambda p, b: jnp.mean(b["x"] @ p["scale"][:3])
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="dot_general"):
        jax.eval_shape(dq.value_and_grad(wrong, axis_name="data", compression=EXACT), *placed)
