"""`sequential`: gradients of functions, one after another, are those of reductions after `grad`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CHEAP, assert_same_bits, daily, local, mapped, once, small
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse
from dynamiq_jax.request.compression import as_compression
from dynamiq_jax.training import interleaved
from dynamiq_jax.training.phases import cut

N, DIM = 4, 128
METHOD = CHEAP
MINMAX = small(dq.comparators.MinMax())
EXACT = dq.Compression(dq.F32(), min_leaf_size=0, min_bucket_size=0)
KEY = jax.random.key(5)


def embed(w, tokens):
    return w["table"][tokens], tokens


def block(w, x):
    return jnp.tanh(x[0] @ w["kernel"]) + w["bias"][None], x[1]


def head(w, x):
    return jnp.mean((x[0] @ w["kernel"] - x[1][:, None].astype(jnp.float32)) ** 2)


@once
def arrays(n_layers):
    """The parameters of every function, and every worker's tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "kernel": jax.random.normal(keys[0], (n_layers, DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[1], (n_layers, DIM)),
    }
    own = [{name: w[i] for name, w in layers.items()} for i in range(n_layers)]
    table = jax.random.normal(keys[2], (32, DIM))
    tokens = jax.random.randint(keys[3], (N, 6), 0, 32)
    return [{"table": table}, *own, {"kernel": layers["kernel"][0]}], tokens


def model(n_layers):
    """Functions, their parameters, every worker's tokens."""
    return [embed, *[block] * n_layers, head], *arrays(n_layers)


def stacked(params):
    """Stacks the parameters of all layers along a leading axis."""
    return [params[0], jax.tree.map(lambda *w: np.stack(w), *params[1:-1]), params[-1]]


def plain(functions, params, x):
    for function, own in zip(functions, params, strict=True):
        x = function(own, x)
    return x


def grad(functions, params, x, **options):
    """The loss and the reduced gradients."""
    run = lambda p: dq.sequential(functions, p, x, "data", **options)  # noqa: E731
    return jax.value_and_grad(run)(params)


AFTER_GRAD = [(METHOD, True), (MINMAX, True), (small(dq.comparators.PermK()), False)]


@pytest.mark.parametrize(
    ("method", "check_vma"), daily(AFTER_GRAD, AFTER_GRAD[1:2]), ids=["dynamiq", "minmax", "perm-k"]
)
def test_it_has_the_bits_of_reductions_after_grad(method, check_vma):
    functions, params, tokens = model(3)

    def after(params, x):
        loss, own = jax.value_and_grad(partial(plain, functions))(local(params, check_vma), x)
        words = jax.random.key_data(KEY)
        keys = [jax.random.fold_in(jax.random.wrap_key_data(words), i) for i in range(len(own))]
        pairs = zip(own, keys, strict=True)
        return loss, [dq.pmean(g, "data", method=method, key=key) for g, key in pairs]

    inside = partial(grad, functions, method=method, key=KEY)
    found, expected = (mapped(f, check_vma)(params, tokens) for f in (inside, after))
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)
    for g in jax.tree.leaves(found[1]):
        assert_same_bits(g, np.broadcast_to(g[:1], g.shape))
        assert np.any(np.asarray(g) != 0)


LOOPS = [
    (METHOD, 6, True, False), (MINMAX, 5, False, True), (MINMAX, 2, True, False),
    (MINMAX, 6, True, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "n_layers", "check_vma", "remat"),
    daily(LOOPS, LOOPS[3:]),
    ids=["dynamiq", "remat", "few layers", "minmax"],
)
def test_a_loop_has_the_gradients_of_its_layers_one_by_one(method, n_layers, check_vma, remat):
    """With a key, so that the noise is the same: only the order of additions may differ."""
    functions, params, tokens = model(n_layers)

    def mean(g, number):
        key = jax.random.fold_in(jax.random.wrap_key_data(jax.random.key_data(KEY)), number)
        return dq.pmean(g, "data", method=method, key=key)

    def after(params, x):
        def loss(params):
            layers = [jax.tree.map(lambda w, i=i: w[i], params[1]) for i in range(n_layers)]
            return plain(functions, [params[0], *layers, params[2]], x)

        loss, own = jax.value_and_grad(loss)(local(params, check_vma))
        numbers = 1 + jnp.arange(n_layers)
        layers = jax.lax.map(lambda given: mean(*given), (own[1], numbers))
        return loss, [mean(own[0], 0), layers, mean(own[2], n_layers + 1)]

    each = jax.checkpoint(block) if remat else block
    options = {"method": method, "key": KEY}
    inside = partial(grad, [embed, dq.Scanned(each), head], **options)
    found, expected = (mapped(f, check_vma)(stacked(params), tokens) for f in (inside, after))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected[1])
    for own, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert_same_bits(own, np.broadcast_to(own[:1], own.shape))
        for mine, theirs in zip(own[0], other[0], strict=True):  # every layer
            apart = float(vnmse(mine, theirs))
            assert apart < 1e-4, apart  # another gradient, or other noise, is more than 1e-3


@pytest.mark.release
def test_a_loop_has_the_exact_mean_with_f32_and_passes_its_inputs_gradient():
    functions, params, tokens = model(6)
    x = jax.random.normal(jax.random.key(8), (N, 6, DIM))

    def inside(x, own, params):
        rest = [dq.Scanned(block), head], params
        loss = lambda first, p: dq.sequential(rest[0], p, (first, own), "data", method=EXACT)  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(x, params)

    def alone(x, own, params):
        return jax.grad(lambda x, p: plain(functions[1:], p, (x, own)), argnums=(0, 1))(x, params)

    wanted = [alone(x[i], tokens[i], params[1:]) for i in range(N)]
    weights = stacked([params[0], *params[1:]])[1:]
    found = jax.vmap(inside, (0, 0, None), axis_name="data")(x, tokens, weights)
    for i in range(N):
        np.testing.assert_allclose(found[0][i], wanted[i][0], rtol=1e-4, atol=1e-7)
    for layer in range(6):
        exact = np.mean([w[1][layer]["kernel"] for w in wanted], axis=0)
        np.testing.assert_allclose(found[1][0]["kernel"][2, layer], exact, rtol=2e-5, atol=1e-6)


FULL = [dq.Direct(), dq.Ring(unroll_up_to=N)]


@pytest.mark.parametrize("last", daily(["head", "none", "loop"], ["loop"]))
@pytest.mark.parametrize("topology", daily(FULL, FULL[:1]))
def test_loops_of_any_length_after_anything_keep_their_layers_in_order(topology, last):
    """A pipeline that other reductions leave full, half full or empty, of two and four rounds."""
    rng, head = np.random.default_rng(1), {"kernel": np.eye(8, dtype=np.float32) + 1}
    tokens, x = np.zeros((N, 2), np.int32), np.float32(rng.standard_normal((N, 2, 8)))

    def layers(n):
        kernel = np.float32(rng.standard_normal((n, 8, 8)))
        return {"kernel": kernel, "bias": np.ones((n, 8), np.float32)}

    ends = {
        "head": ([lambda w, x: jnp.mean((x[0] @ w["kernel"]) ** 2)], [head]),
        "none": ([lambda w, x: jnp.mean(x[0] ** 2)], [{}]),
        "loop": ([dq.Scanned(block), lambda w, x: jnp.mean(x[0] ** 2)], [layers(3), {}]),
    }
    for n_layers in (1, 2, 5):
        functions = [dq.Scanned(block), *ends[last][0]]
        params = [layers(n_layers), *ends[last][1]]

        def both(x, tokens, functions=functions, params=params):
            options = {"method": as_compression(EXACT, topology)}
            run = lambda p: dq.sequential(functions, p, (x, tokens), "data", **options)  # noqa: E731

            def loss(params):
                found = x, tokens
                for f, p in zip(functions, params, strict=True):
                    if isinstance(f, dq.Scanned):
                        found, _ = lax.scan(lambda x, w: (block(w, x), None), found, p)
                    else:
                        found = f(p, found)
                return found

            return jax.grad(run)(params), lax.pmean(jax.grad(loss)(params), "data")

        found, expected = jax.jit(jax.vmap(both, axis_name="data"))(x, tokens)
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_a_loop_keeps_no_second_copy_of_its_parameters():
    """The forward loop stacks activations alone; parameters are read where they are."""
    _, params, tokens = model(6)
    looped = partial(grad, [embed, dq.Scanned(block), head], method=EXACT)
    traced = jax.make_jaxpr(looped, axis_env=[("data", N)])(stacked(params), tokens[0])
    forward = next(e for e in traced.jaxpr.eqns if e.primitive.name == "scan")
    shapes = [v.aval.shape for v in forward.outvars]
    assert (6, 6, DIM) in shapes and (6, DIM, DIM) not in shapes


def test_a_loop_keeps_one_copy_of_what_layers_share():
    """As `lax.scan`: what a function closes over, and what travels in ``x`` unchanged."""
    _, params, _ = model(5)
    mask = jnp.tril(jnp.ones((DIM, DIM)))

    def masked(w, x):
        angle = jnp.cos(jnp.arange(7 * DIM) / 9).reshape(7, DIM)
        hidden = jnp.tanh(x["h"] @ mask @ w["kernel"] @ x["mask"]) * angle.sum(0)[None]
        return {"h": hidden + w["bias"][None], "mask": x["mask"]}

    def loss(params, mask):
        x = {"h": jnp.ones((3, DIM)), "mask": mask}
        functions = [dq.Scanned(masked), lambda _, x: jnp.mean(x["h"] ** 2)]
        return dq.sequential(functions, [params, ()], x, "data", method=EXACT)

    layers = stacked(params)[1]
    traced = jax.make_jaxpr(jax.grad(loss), axis_env=[("data", N)])(layers, mask)
    forward = next(e for e in traced.jaxpr.eqns if e.primitive.name == "scan")
    stacks = [v.aval.shape for v in forward.outvars if v.aval.shape[:1] == (5,)]
    assert set(stacks) == {(5, 3, DIM)}

    def plainly(params, mask):
        x = {"h": jnp.ones((3, DIM)), "mask": mask}
        x, _ = lax.scan(lambda x, w: (masked(w, x), None), x, params)
        return jnp.mean(x["h"] ** 2)

    found = jax.jit(jax.vmap(jax.grad(loss), (None, 0), axis_name="data"))(layers, mask[None])
    expected = jax.jit(jax.grad(plainly))(layers, mask)
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    for own, other in pairs:
        np.testing.assert_allclose(own[0], other, rtol=1e-4, atol=1e-6)


@jax.tree_util.register_pytree_node_class
class Weights:
    """A pytree that compares by identity, as most classes do."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def tree_flatten(self):
        return (self.kernel, self.bias), ["not hashable"]

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("scanned", [True, False])
def test_reductions_of_layers_alike_are_traced_once(scanned, monkeypatch):
    traced = []
    monkeypatch.setattr(interleaved, "cut", lambda *args: traced.append(args) or cut(*args))
    layers = Weights(jnp.ones((5, 8, 8)), jnp.ones((5, 8)))
    each = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(5)]
    layer = lambda w, x: jnp.tanh(x @ w.kernel) + w.bias[None]  # noqa: E731
    functions, params = ([dq.Scanned(layer)], [layers]) if scanned else ([layer] * 5, each)

    def loss(params, x):
        return dq.sequential(functions, params, x, "data", method=EXACT).sum()

    jax.make_jaxpr(jax.grad(loss), axis_env=[("data", N)])(params, jnp.ones((2, 8)))
    assert len(traced) == 1


def test_in_a_loop_all_rounds_are_under_way_at_a_time():
    """The body of the backward loop has the rounds of a reduction, each of another layer."""
    _, params, tokens = model(5)
    looped = partial(
        grad, [embed, dq.Scanned(block), head], method=as_compression(METHOD, dq.Direct())
    )
    traced = jax.make_jaxpr(looped, axis_env=[("data", N)])(stacked(params), tokens[0])
    scans = [e.params["jaxpr"].jaxpr for e in traced.jaxpr.eqns if e.primitive.name == "scan"]
    (body,) = (own for own in scans if any(e.primitive.name == "psum" for e in own.eqns))
    for name in ("psum", "all_to_all", "all_gather"):
        moves = [e for e in body.eqns if e.primitive.name == name]
        assert moves, name
        for equation in moves:  # they wait for no other of this pass through the loop
            others = [e for v in equation.invars for e in ancestors(body, v)]
            assert not {e.primitive.name for e in others} & {"psum", "all_to_all", "all_gather"}


@pytest.mark.release
def test_it_passes_the_gradient_of_its_input():
    functions, params, tokens = model(3)
    x = (jax.random.normal(jax.random.key(8), (N, 6, DIM)), tokens)

    def inside(x, params):
        def loss(first):
            rest = functions[1:], params[1:], (first, x[1])
            return dq.sequential(*rest, "data", method=EXACT)

        return jax.grad(loss)(x[0])

    def of_input(y, own):
        return plain(functions[1:], params[1:], (y, own))

    for i in range(N):
        expected = jax.grad(of_input)(x[0][i], x[1][i])
        found = jax.vmap(inside, (0, None), axis_name="data")(x, params)[i]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("remat", daily([True, False], [True]))
def test_it_has_the_exact_mean_with_f32(remat):
    functions, params, tokens = model(3)
    functions = [jax.checkpoint(f) for f in functions] if remat else functions
    _, found = mapped(partial(grad, functions, method=EXACT))(params, tokens)
    each = jax.jit(jax.grad(partial(plain, functions)))
    own = [each(params, tokens[i]) for i in range(N)]
    exact = jax.tree.map(lambda *g: np.mean(g, axis=0), *own)
    for g, e in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        for worker in range(N):
            np.testing.assert_allclose(g[worker], e, rtol=2e-5, atol=1e-6)


def ancestors(jaxpr, variable):
    """Equations that a variable of a jaxpr follows from."""
    made = {out: i for i, e in enumerate(jaxpr.eqns) for out in e.outvars}
    waiting, found = [variable], set()
    while waiting:
        number = made.get(waiting.pop())
        if number is not None and number not in found:
            found.add(number)
            waiting += [v for v in jaxpr.eqns[number].invars if not hasattr(v, "val")]
    return [jaxpr.eqns[i] for i in found]


def test_reductions_go_on_while_the_backward_pass_does():
    """The cotangent of the input follows from the reductions of all functions but the first one."""
    functions, params, _ = model(3)

    def loss(y, params):
        tokens = jnp.zeros(6, jnp.int32)
        rest = functions[1:], params[1:], (y, tokens)
        return dq.sequential(*rest, "data", method=EXACT)

    closed = jax.make_jaxpr(jax.grad(loss), axis_env=[("data", N)])(jnp.ones((6, DIM)), params)
    (out,) = closed.jaxpr.outvars
    sums = [e for e in ancestors(closed.jaxpr, out) if "psum" in str(e)]  # also within calls
    assert len(sums) == len(functions) - 2


def test_results_pass_no_barrier():
    """A barrier makes XLA write slices of a bucket, which else fuse with the optimizer."""
    functions, params, tokens = model(6)
    run = lambda p: grad(functions, p, tokens[0], method=METHOD)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(run, axis_env=[("data", N)])(params).jaxpr
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    held = {out for e in barriers for out in e.outvars}
    assert len(barriers) > len(functions)
    assert not held & set(jaxpr.outvars)


@pytest.mark.parametrize(
    ("n_layers", "shares", "late"), [(1, [1, 1], 2), (6, [1, 1, 1, 1, 1, 2], 7)]
)
def test_after_the_backward_pass_finished_reductions_run_before_arrivals(
    n_layers, shares, late, monkeypatch
):
    """Each one's last kernels wait with one arrival, about as many with each of the six.

    So ``late`` results wait for rounds of the last reduction, that of the embedding.
    """
    functions, params, tokens = model(n_layers)
    held, finished, hold = [], [], interleaved.hold

    def recorded(moving, passing):
        if passing is None:
            held.append([progress.done for progress in moving])
            finished.extend(moving[1:])
        return hold(moving, passing)

    monkeypatch.setattr(interleaved, "hold", recorded)
    run = lambda p: grad(functions, p, tokens[0], method=METHOD)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(run, axis_env=[("data", N)])(params).jaxpr
    assert [len(others) for _, *others in held] == shares
    assert all(not arrives and all(others) for arrives, *others in held)
    assert len(set(map(id, finished))) == len(finished) == len(functions) - 1
    first, *kernels = (out for out in jaxpr.outvars if len(out.aval.shape) == 2)
    assert first.aval.shape == (32, DIM)
    lookups = [
        [e for e in ancestors(jaxpr, out) if e.primitive.name == "scatter-add"] for out in kernels
    ]
    assert sum(map(bool, lookups)) == late


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"params": 4}, "5 functions and 4 params"),
        ({"functions": 0, "params": 0}, "functions is empty"),
        ({"specs": [None]}, "5 functions and 1 specs"),
        ({"specs": {"a": None}}, "specs is a mapping, which has no order"),
        ({"op": "max"}, "op='max'"),
        ({"key": 3}, "key=3 is not a PRNG key"),
        ({"method": small(dq.ErrorFeedback(dq.DynamiQ()))}, "has memory, and a backward pass"),
    ],
)
def test_what_cannot_be_is_refused(change, complaint):
    functions, params, tokens = model(3)
    functions = functions[: change.pop("functions", None)]
    params = params[: change.pop("params", None)]
    run = partial(dq.sequential, functions, axis_name="data", **change)
    with pytest.raises(ValueError, match=complaint):
        mapped(lambda p, x: run(p, x))(params, tokens)


@pytest.mark.parametrize(
    ("params", "specs", "complaint"),
    [
        ({"kernel": jnp.ones((3, 4)), "bias": jnp.ones(2)}, None, r"which have \(2,\), \(3,\)"),
        ({"kernel": jnp.ones((3, 4)), "bias": jnp.ones(())}, None, r"which have \(\), \(3,\)"),
        ({}, None, "which have no leaves"),
        ({"kernel": jnp.ones((0, 4))}, None, "scanned over 0 layers"),
        ({"kernel": jnp.ones((3, 4))}, [{"kernel": P("model")}], "specs split it"),
    ],
)
def test_layers_that_are_no_stack_are_refused(params, specs, complaint):
    def run(params, x):
        return dq.sequential([dq.Scanned(block)], [params], x, "data", specs=specs)

    with pytest.raises(ValueError, match=rf"functions\[0\].*{complaint}"):
        mapped(run)(params, jnp.ones((N, 4)))


@pytest.mark.parametrize(
    ("function", "name"), [(head, "head"), (dq.Scanned(block), "Scanned")], ids=["head", "Scanned"]
)
def test_one_function_is_refused(function, name):
    with pytest.raises(ValueError, match=rf"functions={name} is one .*; pass a list: \[function\]"):
        jax.vmap(lambda x: dq.sequential(function, [x], x, "data"), axis_name="data")(jnp.ones(4))


def test_it_has_no_second_derivatives():
    functions, params, tokens = model(3)

    def curvature(params, x):
        first = jax.grad(lambda p: dq.sequential(functions, p, x, "data", method=EXACT))
        return jax.grad(lambda p: jnp.sum(first(p)[1]["kernel"]))(params)

    def of_replicated_input(params, x):
        run = lambda p: dq.sequential([block], [p], (jnp.ones((6, DIM)), x), "data")[0].sum()  # noqa: E731
        return jax.grad(lambda p: jnp.sum(jax.grad(run)(p)["kernel"]))(params[1])

    for second in (curvature, of_replicated_input):
        with pytest.raises(NotImplementedError, match="sequential has derivatives of the first"):
            mapped(second)(params, tokens)


def test_it_names_an_axis_that_is_not_mapped():
    functions, params, tokens = model(3)
    with pytest.raises(NameError, match="data.*call sequential under"):
        dq.sequential(functions, params, tokens, "data")
