"""Slices of the optimizer's work: plain training's parameters, and the order of the two halves."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import auto_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import llm_model
import train_llm
import train_zero

N, STEPS = 8, 12
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CONFIG = replace(
    llm_model.CONFIGS["tiny"],
    vocab_size=61, dim=60, n_layers=2, n_heads=2, n_kv_heads=2, hidden=124, seq_len=16,
)  # fmt: skip
"""Of sizes that eight workers do not divide."""
RECIPE = train_llm.Recipe(steps=STEPS, batch_size=2, learning_rate=5e-3, validation_batches=1)
BLOCK, ENDS, SCALES = 4 * 60**2 + 3 * 60 * 124, 2 * 60 * 61, 5 * 60
LARGE = {"min_leaf_size": 2000, "min_bucket_size": BLOCK}  # the blocks' matrices


def gather_together(shards):
    """In f32, a group's leaves by one all-gather, as a bucket travels."""
    ends = np.cumsum([x.size for x in shards])[:-1]
    rows = jax.lax.all_gather(jnp.concatenate(shards), "data")
    return [part.reshape(-1) for part in jnp.split(rows, ends, axis=1)]


def scatter_together(grads):
    """The reverse."""
    ends = np.cumsum([x.size // N for x in grads])[:-1]
    rows = jnp.concatenate([x.reshape(N, -1) for x in grads], axis=1)
    return jnp.split(jax.lax.psum_scatter(rows, "data"), ends)


EXACT = train_zero.Wire("exact", gather_together, scatter_together)
COMPRESSED = train_zero.Wire(
    "compressed",
    partial(train_zero.dynamiq_gather, method=dq.Compression(dq.DynamiQ(bits=8), **LARGE)),
    partial(
        train_zero.dynamiq_scatter,
        method=dq.Compression(dq.DynamiQ(bits=5), topology=dq.Direct(), **LARGE),
    ),
)
COMPLETE = train_zero.make_complete(CONFIG)


def make(wire):
    return train_zero.make_zero(CONFIG, RECIPE, auto_mesh(N), wire)


def batch():
    """Of every worker sequences of its own."""
    tokens = np.random.default_rng(0).integers(0, 32, (2 * N, CONFIG.seq_len + 1), np.int32)
    return jax.device_put(tokens, NamedSharding(auto_mesh(N), P("data")))


def trained(step, params, opt_state):
    losses = []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batch())
        losses.append(float(loss))
    return jax.device_get(params), losses


@pytest.fixture(scope="module")
def plain_run():
    """Every worker holds all, and gradients are averaged by lax.pmean in f32."""
    init = partial(llm_model.init_params, CONFIG)
    params = jax.jit(init, out_shardings=NamedSharding(auto_mesh(N), P()))(jax.random.key(0))
    optimizer = train_llm.make_optimizer(RECIPE)
    method = train_llm.lax_psum(llm_model.make_loss(CONFIG), params, auto_mesh(N), "f32")
    step = train_llm.make_step(method, optimizer)
    return trained(step, params, jax.jit(optimizer.init)(params))


@pytest.fixture(scope="module")
def exact():
    """Programs, and the compiled step."""
    programs = make(EXACT)
    state = programs.init(jax.random.key(0))
    return programs, programs.step.lower(*state, batch()).compile()


def test_exact_halves_train_the_parameters_of_plain_training(plain_run, exact):
    programs, step = exact
    params, losses = trained(step, *programs.init(jax.random.key(0)))
    assert losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(losses, plain_run[1], rtol=1e-5)
    complete = jax.device_get(COMPLETE(params))
    assert jax.tree.structure(complete) == jax.tree.structure(plain_run[0])
    assert float(dq.vnmse(complete, plain_run[0])) < 1e-9


@pytest.mark.release
def test_compressed_halves_are_close(plain_run):
    programs = make(COMPRESSED)
    params, losses = trained(programs.step, *programs.init(jax.random.key(0)))
    assert 1e-7 < float(dq.vnmse(jax.device_get(COMPLETE(params)), plain_run[0])) < 0.05
    np.testing.assert_allclose(losses, plain_run[1], rtol=0.02)


def test_every_worker_carries_an_eighth_of_everything():
    state = make(EXACT).init(jax.random.key(0))
    for leaf in jax.tree.leaves(state):
        held = {shard.data.size for shard in leaf.addressable_shards}
        assert held == {leaf.size // N if leaf.ndim else 1}
    padded = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    n_params = 2 * BLOCK + ENDS + SCALES
    assert n_params < padded < n_params + N * len(jax.tree.leaves(state[0]))


def test_counted_bytes_are_the_bits_asked_for():
    programs = make(COMPRESSED)
    params, opt_state = jax.eval_shape(programs.init, jax.random.key(0))
    count = partial(train_zero.sent_bytes, programs.step, params, opt_state, batch(), n_workers=N)
    share = (N - 1) / N
    scattered = share * (2 * 5 / 8 * BLOCK + 4 * (ENDS + SCALES))
    # Slices of 4590 coordinates: padding adds a sixteenth.
    assert 0.99 * scattered < count(inside="scatter_grads") < (1 + 1 / 16) * scattered
    gathered = share * (2 * 8 / 8 * BLOCK + 4 * (ENDS + SCALES))
    # A slice of 4590 coordinates, filled up to whole super-groups, and what precedes its codes.
    assert gathered < count(inside="gather_params") < 1.1 * gathered


def test_groups_are_modules_in_the_order_of_the_forward_pass():
    params = jax.eval_shape(partial(llm_model.init_params, CONFIG), jax.random.key(0))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    groups = train_zero.groups_of(params)
    names = [{re.match(r"\['(\w+)'\](\[\d\])?", paths[i])[0] for i in group} for group in groups]
    assert names == [
        {"['embed']"}, {"['blocks'][0]"}, {"['blocks'][1]"}, {"['head']", "['norm']"},
    ]  # fmt: skip
    assert sorted(sum(groups, [])) == list(range(len(paths)))


# --- What the compiled step waits for -------------------------------------------------------------

INSTRUCTION = re.compile(r"^ *(?:ROOT )?(%\S+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?(%\S+) .*{$")


class Program:
    """Instructions of a compiled program's entry, and all that each has to wait for."""

    def __init__(self, hlo):
        multiplies: set[str] = set()
        self.kinds: dict[str, str] = {}
        self.needs: dict[str, set[str]] = {}
        self.backward: set[str] = set()
        inside, is_entry = "", False
        for line in hlo.splitlines():
            if found := COMPUTATION.match(line):
                inside, is_entry = found[1], line.startswith("ENTRY")
            elif found := INSTRUCTION.match(line):
                name, kind, rest = found.groups()
                mentioned = re.findall(r"%[\w.-]+", rest)
                if kind == "dot" or multiplies.intersection(mentioned):
                    multiplies.add(inside)
                    kind = "product"
                if is_entry:
                    before = [x for x in mentioned if x in self.needs]
                    self.kinds[name] = kind
                    self.needs[name] = set(before).union(*(self.needs[x] for x in before))
                    if "transpose(jvp" in rest:
                        self.backward.add(name)

    def of(self, kind):
        return {name for name, other in self.kinds.items() if other == kind}


@pytest.fixture
def program(exact):
    return Program(exact[1].as_text())


@pytest.mark.release
def test_a_step_begins_with_gathers_and_ends_with_scatters(program):
    gathers, scatters = program.of("all-gather"), program.of("reduce-scatter")
    products = program.of("product")
    assert len(gathers) == len(scatters) == 4  # embedding, two blocks, norm and head
    assert len(products) >= 3 * (2 * 7 + 1)  # one forward and two backward, of every matrix
    for name in gathers:
        assert not program.needs[name] & (products | scatters)
    for name in products:
        assert program.needs[name] & gathers
        assert not program.needs[name] & scatters
    for name in scatters:
        assert program.needs[name] & products & program.backward


@pytest.mark.release
def test_nothing_waits_for_groups_that_it_does_not_use(program):
    """A block's products for no later group's parameters, its scatter for no earlier gradients."""
    gathers, products = program.of("all-gather"), program.of("product")
    forward, backward = products - program.backward, products & program.backward
    assert {len(program.needs[name] & gathers) for name in forward} == {2, 3, 4}
    waits = sorted(len(program.needs[name] & backward) for name in program.of("reduce-scatter"))
    assert waits[0] <= 2 and len(set(waits)) == 4 and waits[-1] > 2 * 7
