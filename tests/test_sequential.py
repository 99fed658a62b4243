"""`overlapped`: gradients of functions, one after another, are those of reductions after `grad`."""

import functools
import re
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_close, assert_replicas_equal, assert_same_bits
from cases import CHEAP, EXACT, daily, over, small
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, local, mapped, mesh_of, once

import dynamiq_jax as dq
from dynamiq_jax.jaxprs.phases import Progress, cut
from dynamiq_jax.training import interleaved

N, DIM = 4, 128
MINMAX = small(dq.contrib.MinMax())
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


def plain(functions, params, x):
    for function, own in zip(functions, params, strict=True):
        x = function(own, x)
    return x


def grad(functions, params, x, **options):
    """The loss and the reduced gradients."""
    run = lambda p: dq.overlapped(functions, p, x, "data", **options)
    return jax.value_and_grad(run)(params)


AFTER_GRAD = [(CHEAP, True), (MINMAX, True), (small(dq.contrib.PermK()), False)]


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
        return loss, [dq.pmean(g, "data", compression=method, key=key) for g, key in pairs]

    inside = partial(grad, functions, compression=method, key=KEY)
    found, expected = (mapped(f, check_vma)(params, tokens) for f in (inside, after))
    assert_same_bits(found, expected)
    assert_replicas_equal(found[1])
    assert all(np.any(g != 0) for g in jax.tree.leaves(found[1]))


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


def test_reductions_of_layers_alike_are_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(
        interleaved, "cut", lambda *args, **small: traced.append(args) or cut(*args, **small)
    )
    layers = Weights(jnp.ones((5, 8, 8)), jnp.ones((5, 8)))
    each = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(5)]
    layer = lambda w, x: jnp.tanh(x @ w.kernel) + w.bias[None]

    def loss(params, x):
        return dq.overlapped([layer] * 5, params, x, "data", compression=EXACT).sum()

    jax.make_jaxpr(jax.grad(loss), axis_env=[("data", N)])(each, jnp.ones((2, 8)))
    assert len(traced) == 1


@pytest.mark.parametrize("remat", daily([True, False], [True]))
def test_it_has_the_exact_mean_with_f32_and_passes_the_gradient_of_its_input(remat):
    (_, *functions), params, tokens = model(3)
    functions = [lambda w, x: (embed(w, x[0])[0] + x[1], x[0]), *functions]
    functions = [jax.checkpoint(f) for f in functions] if remat else functions

    def gradients(run, params, own):
        shift = 0 * jnp.ones((6, DIM)) * jnp.float32(own)[:, None]  # varies as the tokens do
        return jax.grad(lambda p, shift: run(p, (own, shift)), argnums=(0, 1))(params, shift)

    inside = partial(dq.overlapped, functions, axis_name="data", compression=EXACT)
    found = mapped(partial(gradients, inside))(params, tokens)
    each = jax.vmap(partial(gradients, partial(plain, functions)), in_axes=(None, 0))
    of_params, of_input = jax.jit(each)(params, tokens)
    mean = jax.tree.map(
        lambda g: jnp.broadcast_to(jnp.mean(g, 0, keepdims=True), g.shape), of_params
    )
    assert_close(found, (mean, of_input), rtol=2e-5)


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
        return dq.overlapped(*rest, "data", compression=EXACT)

    closed = jax.make_jaxpr(jax.grad(loss), axis_env=[("data", N)])(jnp.ones((6, DIM)), params)
    (out,) = closed.jaxpr.outvars
    sums = [e for e in ancestors(closed.jaxpr, out) if "psum" in str(e)]  # also within calls
    assert len(sums) == len(functions) - 2


def test_results_pass_no_barrier():
    """A barrier makes XLA write slices of a bucket, which else fuse with the optimizer."""
    functions, params, tokens = model(6)
    run = lambda p: grad(functions, p, tokens[0], compression=CHEAP)[1]
    jaxpr = jax.make_jaxpr(run, axis_env=[("data", N)])(params).jaxpr
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    held = {out for e in barriers for out in e.outvars}
    assert len(barriers) > len(functions)
    assert not held & set(jaxpr.outvars)


@pytest.mark.parametrize(
    ("n_layers", "shares", "late"), [(1, [1, 1], 2), (5, [1] * 6, 6), (8, [1] * 6, 7)]
)
def test_after_the_backward_pass_finished_reductions_run_before_arrivals(
    n_layers, shares, late, monkeypatch
):
    """Each one's last kernels wait with one arrival, about as many with each of the six.

    The last kernels of the first of many reductions run beside the backward pass. The ``late``
    results wait for the embedding's gradient.
    """
    functions, params, tokens = model(n_layers)
    held, finished, hold = [], [], interleaved.hold

    def recorded(moving, passing):
        if passing is None:
            held.append([progress.done for progress in moving])
            finished.extend(moving[1:])
        return hold(moving, passing)

    monkeypatch.setattr(interleaved, "hold", recorded)
    run = lambda p: grad(functions, p, tokens[0], compression=CHEAP)[1]
    jaxpr = jax.make_jaxpr(run, axis_env=[("data", N)])(params).jaxpr
    assert [len(others) for _, *others in held] == shares
    assert all(not arrives and all(others) for arrives, *others in held)
    assert len(set(map(id, finished))) == len(finished) == sum(shares)
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
        ({"compression": small(dq.ErrorFeedback(dq.DynamiQ()))}, "has memory, and a backward pass"),
        ({"functions": head}, r"functions=head is one .*; pass a list: \[function\]"),
    ],
)
def test_what_cannot_be_is_refused(change, complaint):
    functions, params, tokens = model(3)
    changed = change.pop("functions", None)
    functions = changed if callable(changed) else functions[:changed]
    params = params[: change.pop("params", None)]
    run = partial(dq.overlapped, functions, axis_name="data", **change)
    with pytest.raises(ValueError, match=complaint):
        mapped(lambda p, x: run(p, x))(params, tokens)


def test_an_axis_that_is_not_mapped_is_refused():
    with pytest.raises(NameError, match="data.*call overlapped under"):
        dq.overlapped(*model(3), "data")


# --- Functions that reduce gradients themselves ---------------------------------------------------


def rows(x, w):
    return jnp.tanh(x @ w), None


INNER = {
    "scan": lambda own, x, how: dq.scan(rows, x, own, **how)[0],
    "fsdp": lambda own, x, how: lax.scan(rows, x, dq.fsdp(own, **how))[0],
    "overlapped": lambda own, x, how: dq.overlapped(
        [lambda own, x: lax.scan(rows, x, own)[0]], [own], x, **how
    ),
}
STACK = np.random.default_rng(0).normal(size=(3, 8, 8)).astype("f") / 3
INPUTS = np.random.default_rng(1).normal(size=(8, 8)).astype("f")


@functools.cache
def of_inner(inner, **how):
    """One object, of which JAX takes up traces."""
    return jax.checkpoint(lambda own, x: INNER[inner](own, x, how))


def gradient(inner, form, **how):
    """The gradient of a stack of which a function reduces gradients itself, on 2 x 2 devices."""
    how = {"axis_name": "data", "compression": EXACT} | how
    specs = how.get("specs", P())
    function = of_inner(inner, **how)

    def loss(stack, x):
        if form == "passed on":  # not its own parameters: nobody else reduces their gradients
            functions = [lambda _, x: function(*x), lambda _, x: jnp.mean(x**2)]
            return dq.overlapped(functions, [{}, {}], (stack, x), "data", compression=EXACT)
        first = dq.Scanned(function) if form == "scanned" else function
        own = jax.tree.map(lambda w: w[None], stack) if form == "scanned" else stack
        functions = [first, lambda _, x: jnp.mean(x**2)]
        return dq.overlapped(functions, [own, {}], x, "data", compression=EXACT)

    def one(stack, x):
        if form == "traced before":
            function(stack, x)
        return jax.grad(loss)(stack, x)

    mesh = mesh_of(2, 2)
    axes = ("data",) if how["axis_name"] == "data" else ("data", "model")
    maps: dict = {"in_specs": (specs, P(axes)), "out_specs": specs, "check_vma": False}
    step = jax.jit(jax.shard_map(one, mesh=mesh, **maps))
    return step(STACK, INPUTS)


def exact_gradient(stack, x):
    return jax.grad(lambda w: jnp.mean(lax.scan(rows, x, w)[0] ** 2))(stack)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("form", ["function", "scanned", "traced before"])
def test_a_function_that_sums_gradients_of_its_own_parameters_is_refused(inner, form):
    """They would be twice too large. What is refused once is refused again."""
    said = rf"function 0 of dq.overlapped passes .* another dq.{inner} .*2 times too large"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            gradient(inner, form, op="sum")


@pytest.mark.parametrize("inner", INNER)
def test_a_function_that_averages_gradients_of_its_own_parameters_is_warned_of(inner):
    with pytest.warns(UserWarning, match=f"another dq.{inner} .* averaged and sent twice"):
        found = gradient(inner, "function")
    assert_close(found, exact_gradient(STACK, INPUTS))


@pytest.mark.parametrize("how", [{"form": "passed on"}, {"form": "function", "axis_name": "model"}])
def test_a_function_may_reduce_parameters_of_others_and_over_other_axes(how):
    """FSDP over one axis inside, data parallel over the other one outside."""
    if "axis_name" in how:
        how["specs"] = P(None, "model")
    assert_close(gradient("fsdp", **how), exact_gradient(STACK, INPUTS))


@pytest.mark.parametrize("inner", ["scan", "fsdp"])
def test_shards_that_only_a_function_gathers_are_refused(inner):
    """The chain would add up gradients of different shards."""
    with pytest.raises(ValueError, match="of the 2 workers' different shards; pass shards to dq.o"):
        gradient(inner, "function", specs=P(None, "data"))


# --- Rounds of a function, between which others run -----------------------------------------------

TABLE = np.arange(5, dtype=np.float32)


def trace(function, *args):
    return cut(*jax.make_jaxpr(function, return_shape=True)(*args), small=0)


def chained(x, y):
    """Three collectives, two of which wait for others; one result needs none, one no argument."""
    total = lax.psum(x * TABLE, "data")
    largest = lax.pmax(total.sum() + y, "data")
    moved = lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])
    return {"a": largest * x + moved, "b": 2 * y, "c": 3.0}


@pytest.mark.parametrize("n_words", [0, 1])
def test_cutting_takes_memory_of_the_size_of_the_program(n_words):
    """A number that is mixed, as without a key, is used twice in each of many operations."""

    def mixed(x, words):
        number = jnp.uint32(7) * jnp.uint32(jnp.arange(1))[0]
        for _ in range(40):
            number = number ^ (number >> 3)
        return lax.psum(x, "data") + number + words

    shapes = jax.make_jaxpr(mixed, axis_env=[("data", N)], return_shape=True)(*[jnp.uint32(1)] * 2)
    tracemalloc.start()
    traced = cut(*shapes, n_words, small=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(traced.rounds) == 1


def in_calls(x, y):
    """Collectives within jit, checkpoint and functions with rules of their own."""

    @jax.custom_jvp
    def total(x):
        return lax.psum(x, "data")

    total.defjvp(lambda primals, tangents: (total(*primals), tangents[0]))
    twice = jax.jit(lambda x: total(x) + TABLE)
    return jax.checkpoint(lambda x: twice(twice(x)))(x) + lax.pmax(y, "data")


def in_a_loop(x, y):
    """A loop with collectives is one of them."""
    return lax.fori_loop(0, 3, lambda i, x: lax.psum(x, "data") / N + y, x) + 1


def called_twice(x, y):
    """JAX traces a jitted function once: its equations are the same objects in both calls."""
    total = jax.jit(lambda x: lax.psum(x, "data") + 1)
    return total(x) * total(2 * x + y)


def rounds(function, x, y):
    """The result and how many rounds it took."""
    progress = Progress.start(trace(function, x, y), x, y)
    progress.compute()
    count = 0
    while not progress.done:
        progress.exchange()
        progress.compute()
        count += 1
    return progress.result, count


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("function", "expected"),
    [(chained, 2), (in_calls, 2), (in_a_loop, 1), (called_twice, 1), (lambda x, y: x - y, 0)],
)
def test_a_function_in_rounds_gives_what_it_gives_at_once(function, expected, check_vma):
    x = jax.random.normal(jax.random.key(0), (N, 5))
    y = jnp.arange(N, dtype=jnp.float32)[:, None]
    counts = []

    def run(x, y):
        if function is in_a_loop:  # the carry of a loop varies from the start
            x = x * 1
        found, count = rounds(function, x[0], y[0, 0])
        counts.append(count)
        pairs = zip(*map(jax.tree.leaves, (found, function(x[0], y[0, 0]))), strict=True)
        return [jnp.stack([a * jnp.ones(5), b * jnp.ones(5)]) + 0 * x for a, b in pairs]

    mapped = jax.shard_map(
        run, mesh=auto_mesh(N), in_specs=P("data"), out_specs=P(None, "data"), check_vma=check_vma
    )
    for pair in jax.tree.leaves(jax.jit(mapped)(x, y)):
        np.testing.assert_array_equal(pair[0], pair[1])
        assert np.any(np.asarray(pair) != 0)
    assert set(counts) == {expected}


@pytest.mark.parametrize(
    ("topology", "count"),
    [(dq.Direct(), 3), (dq.Ring(unroll_up_to=N), N + 1), (dq.Butterfly(), 4)],
    ids=["direct", "ring", "butterfly"],
)
@pytest.mark.usefixtures("padding_is_free")
def test_rounds_of_an_all_reduce(topology, count):
    """The statistics, every hop, and the sums."""
    x = jax.random.normal(jax.random.key(0), (N, 2048))
    reduce = partial(dq.psum, axis_name="data", compression=over(topology, CHEAP))

    def both(x):
        found, rounds_taken = rounds(lambda x, y: reduce(x), x, x[0])
        assert rounds_taken == count
        return found, reduce(x)

    found, expected = jax.jit(jax.vmap(both, axis_name="data"))(x)
    np.testing.assert_array_equal(found, expected)


def test_runs_of_one_function_share_what_they_compute():
    """Each further run adds calls alone, whatever is computed between its collectives."""

    def function(x):
        for _ in range(2):
            x = lax.psum(jnp.tanh(jnp.sin(jnp.cos(x + 1) * 2) - 3), "data")
        return jnp.exp(jnp.tanh(x / 2) + 1)

    def lines(runs):
        def several(x):
            traced = trace(function, x)
            for _ in range(runs):
                progress = Progress.start(traced, x)
                progress.compute()
                while not progress.done:
                    progress.exchange()
                    progress.compute()
                x = progress.result
            return x

        return str(jax.make_jaxpr(several, axis_env=[("data", N)])(jnp.ones(3))).count("\n")

    calls, sums = 3, 2
    assert lines(9) - lines(1) <= 8 * (calls + sums)


def test_light_sums_of_a_round_are_one():
    """Each would take the network's latency. Sums of other dtypes, axes or plans stay apart."""

    def function(x, y):
        with jax.named_scope("a_plan"):
            sums = [lax.psum(z, "data") for z in (x, y, x.astype(jnp.bfloat16))]
        with jax.named_scope("another_plan"):
            sums.append(lax.psum(2 * y, "data"))
        sums.append(lax.pmax(x, "data"))
        zeros = jnp.zeros((9, 7), x.dtype)  # filled again after the round
        gathered = lax.all_gather(jnp.tile(sums[0], 99) + zeros.sum(), "data")
        return gathered, sums, zeros + sums[-1][0]

    def run(x, y):
        shapes = jax.make_jaxpr(function, return_shape=True)(x, y)
        progress = Progress.start(cut(*shapes, small=0), x, y)
        assert progress.light_left == 1
        progress.compute()
        assert (9, 7) not in {value.shape for value in progress.held.values()}
        while not progress.done:
            progress.exchange()
            progress.compute()
        return progress.result

    x, y = jnp.arange(N * 5.0).reshape(N, 5), jnp.arange(N * 6.0).reshape(N, 2, 3)
    options: dict = {"in_specs": P("data"), "out_specs": P("data"), "mesh": auto_mesh(N)}
    rows = lambda f: lambda *args: jax.tree.map(lambda z: z[None], f(*(z[0] for z in args)))
    ours, plain = (jax.jit(jax.shard_map(rows(f), **options)) for f in (run, function))
    assert_same_bits(ours(x, y), plain(x, y))
    count = str(jax.make_jaxpr(ours)(x, y)).count("psum")
    assert count == str(jax.make_jaxpr(plain)(x, y)).count("psum") - 1
    text = jax.make_jaxpr(ours)(x, y).pretty_print(name_stack=True)
    assert len(re.findall(r"f32\[11\]\S* = psum.*# \[a_plan\]", text)) == 1


def test_small_sums_that_nothing_waits_for_run_when_the_result_is_read():
    """All functions' exchanges then stand side by side, and XLA makes one all-reduce of them."""

    def function(x, y):
        return lax.psum(jnp.exp(lax.psum(x, "data")), "data") + 1, 3 * lax.psum(y, "data")

    def run(x, y, most):
        shapes = jax.make_jaxpr(function, return_shape=True)(x, y)
        progress, count = Progress.start(cut(*shapes, small=most), x, y), 0
        progress.compute()
        while not progress.done:
            progress.exchange()
            progress.compute()
            count += 1
        late = len(progress._traced.late)
        return progress.result, (count, late)

    x, y = jnp.arange(float(N * 512)).reshape(N, 512) / 4096, jnp.ones((N, 2))
    for most, facts in ((4, (2, 0)), (8, (2, 2)), (2**15, (1, 4))):  # rounds, late operations
        counts = []

        def both(x, y, most=most, counts=counts):
            found, count = run(x, y, most)
            counts.append(count)
            return found, function(x, y)

        found, expected = jax.jit(jax.vmap(both, axis_name="data"))(x, y)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert counts == [facts]


def test_a_primitive_that_is_not_known_is_one_round_and_said_so():
    def function(x, y):
        def total(_, x):
            return lax.psum(lax.psum(x, "data"), "data")

        return jax.custom_derivatives.linear_call(total, lambda _, t: t, (), x) + y

    counts = []
    one = lambda x: counts.append(rounds(function, x, x)[1])
    with pytest.warns(UserWarning, match="primitive 'linear_call' has collectives.* one round"):
        jax.make_jaxpr(one, axis_env=[("data", N)])(jnp.ones(3))
    assert counts == [1]
