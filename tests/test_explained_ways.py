"""The ways to train that `dq.explain` tells of a tree, and their calls: both send the same bytes.

Where a call is refused, the explanation says so in the same words. Programs are only traced;
`test_plans.py` compiles some.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import daily
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_explained_calls import METHODS, NOT_HERE, TOPOLOGIES, outcome
from workers import mesh_of

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.plan.plan import known
from dynamiq_jax.plan.traced import bytes_by_scope
from dynamiq_jax.tree.leaves import describe_leaves

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

SIZES = [(1,), (2,), (3,), (4,), (6,), (8,), (2, 2), (2, 4), (1, 4), (4, 1), (3, 2), (2, 2, 2)]
LENGTHS = (1, 3, 5, 7, 8, 13, 24, 48, 120)
LIMITS = {"min_leaf_size": 100, "min_bucket_size": 1, "min_bucket_bytes": 0}


def case(rng):
    """A tree of small, large, odd and excluded leaves; workers; a policy."""
    pick = lambda table: table[list(table)[rng.integers(len(table))]]
    chosen: Any = lambda *values: values[rng.integers(len(values))]
    lengths = lambda: tuple(map(int, rng.choice(LENGTHS, rng.integers(0, 4))))
    shapes = [lengths() for _ in range(rng.integers(1, 4))]
    shapes += [chosen((48, 64), (24, 130)), (7,) * 4]
    dtype = chosen(jnp.float32, jnp.float32, jnp.bfloat16)
    name = lambda i: f"{chosen('no', 'w', 'b', 'v')}{i}"
    tree = {name(i): jax.ShapeDtypeStruct(shape, dtype) for i, shape in enumerate(shapes)}

    def compression(methods):
        limits = chosen(LIMITS, LIMITS, {"min_leaf_size": 1, "min_bucket_size": 2000})
        topology = pick(TOPOLOGIES) if rng.random() < 0.2 else chosen(None, None, dq.Ring())
        return dq.Compression(methods, topology=topology, exclude=chosen(None, "no"), **limits)

    if rng.random() < 0.1:
        return tree, chosen(*SIZES), dq.optax.few_bits()
    # A comparator by itself seldom scatters.
    mixed = lambda path, leaf: {"w": dq.F32(), "b": dq.DynamiQ(bits=4), "n": None}.get(path[0])
    usual = [None, dq.DynamiQ(), dq.BF16(), dq.F32(), dq.contrib.MinMax(), mixed, dq.DynamiQ()]
    method = lambda: chosen(*usual) if rng.random() < 0.85 else pick(METHODS)
    gradients = compression(method())
    if rng.random() < 0.3:
        return tree, chosen(*SIZES), gradients
    gathers = compression(method()) if rng.random() < 0.4 else method()
    return tree, chosen(*SIZES), dq.Policy(gradients=gradients, parameters=gathers)


class Steps:
    """The step of each way, traced, on a mesh."""

    def __init__(self, tree, sizes, policy):
        self.tree: Any = tree
        self.policy = policy
        self.n = int(np.prod(sizes))
        self.mesh = mesh_of(*sizes)
        names: Any = self.mesh.axis_names
        self.names = names if len(names) > 1 else names[0]

    def mapped(self, step: Any, in_specs, out_specs, *args):
        maps = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        run = jax.jit(jax.shard_map(step, mesh=self.mesh, **maps))
        return run.trace(*args).jaxpr

    def all_reduce(self):
        first = dq.optax.all_reduce(self.names, compression=self.policy)
        step = lambda tree: first.update(tree, first.init(tree))[0]
        return self.mapped(step, P(), P(), self.tree)

    def updates(self, deferred=False):
        how = {"compression": self.policy, "deferred": deferred}
        optimizer = dq.optax.sharded(optax.sgd(0.1), self.names, **how)
        with jax.set_mesh(self.mesh):
            state = jax.eval_shape(optimizer.init, self.tree)
        specs = dq.optax.state_specs(state)

        def step(grads, state, params):
            params = dq.optax.gathered(params, state)
            return optimizer.update(grads, state, params)

        return self.mapped(step, (P(), specs, P()), (P(), specs), self.tree, state, self.tree)

    def deferred(self):
        return self.updates(deferred=True)

    def fsdp(self):
        """The shards are those of sharded updates where these need no zeros."""
        exact = dq.optax.sharded(optax.sgd(0.1), self.names, compression=self.policy)
        with jax.set_mesh(self.mesh):
            specs = dq.optax.state_specs(jax.eval_shape(exact.init, self.tree)).masters

        def split(spec, x):
            even = all(x.shape[d] % self.n == 0 for d, entry in enumerate(spec) if entry)
            return spec if even else P()

        shards = jax.tree.map(split, specs, self.tree)

        @jax.checkpoint
        def loss(own):
            used = dq.fsdp(own, self.names, specs=shards, compression=self.policy)
            return sum(jnp.sum(jnp.sin(w.astype(jnp.float32))) for w in jax.tree.leaves(used))

        return self.mapped(jax.grad(loss), (shards,), shards, self.tree)

    def of_loss(self, kind):
        mesh = mesh_of(*self.mesh.axis_sizes, kind=kind)
        x = jax.ShapeDtypeStruct((self.n, 1 << 17), jnp.float32)
        place = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
        )

        def loss(params, x):
            parts = (w.astype(jnp.float32).reshape(-1) for w in jax.tree.leaves(params))
            return sum(jnp.mean((x[:, : w.size] @ w) ** 2) for w in parts)

        told: dict[str, Any] = {} if kind == AxisType.Explicit else {"mesh": mesh}
        grads = dq.value_and_grad(loss, axis_name=self.names, compression=self.policy, **told)
        args = jax.tree.map(lambda x: place(x, P()), self.tree), place(x, P(self.names))
        with jax.set_mesh(mesh):
            return jax.jit(grads).trace(*args).jaxpr

    def auto(self):
        return self.of_loss(AxisType.Auto)

    def explicit(self):
        return self.of_loss(AxisType.Explicit)


WAYS = {
    "all_reduce": "data parallel", "auto": "data parallel", "explicit": "data parallel",
    "updates": "sharded updates", "deferred": "sharded updates", "fsdp": "FSDP",
}  # fmt: skip
"""The steps, and the ways that they are."""


def plans_of(found, way, tree, sizes, policy):
    """The plans that an explanation tells of a way; `None` if it tells none."""
    told = {own.name: own for own in found.ways}
    if way in told:
        return told[way].plans
    if way != "data parallel":  # nothing is compressed, or a method does not scatter
        return None
    return [(as_compression(policy).plan(describe_leaves(tree), sizes), 1)]


def check(step, tree, sizes, policy):
    """A step and its way refuse the same, or send the same."""
    told, way = (step, tree, sizes, policy), WAYS[step]
    program, refused = outcome(getattr(Steps(tree, sizes, policy), step))
    if refused is not None and NOT_HERE in refused:
        return
    explain = lambda: dq.explain(tree, sizes, compression=policy, verbose=False)
    found, error = outcome(explain)
    if error is not None:
        # Of several faults a way may find another one first than psum does.
        assert refused == error or (refused and way != "data parallel"), (told, error, refused)
        return
    assert found is not None
    if reasons := [own.reason for own in found.refused if own.name == way]:
        assert refused is not None and [refused.partition(": ")[2]] == reasons, (told, refused)
        return
    plans = plans_of(found, way, tree, sizes, policy)
    if plans is None:
        return
    if found.needs_state and step != "all_reduce":
        assert refused is not None and "needs a state" in refused, told
        return
    assert refused is None, (told, refused)
    asked, _ = bytes_by_scope(program)
    if found.n_workers == 1:
        assert not sum(asked.values()), told
        return
    sent = 0.0
    for scope, plan in known(dict.fromkeys(scope for scope, _ in asked)).items():
        # JAX's own sums on Explicit axes are in no scope.
        own = sum(asked[scope, narrow] for narrow in (False, True))
        sent += plan.asked_bytes if plan.by_jax else own
    planned = sum(times * plan.asked_bytes for plan, times in plans)
    # A scalar of a bucket may travel by itself on Explicit axes.
    assert sent == pytest.approx(planned, rel=0.01 if step == "explicit" else 1e-4, abs=2), told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("padding_is_free")
@pytest.mark.parametrize("seed", daily(range(60), [0, 1]))
def test_ways_are_told_as_their_calls_refuse_and_send(seed):
    rng = np.random.default_rng(seed)
    for step in WAYS:
        check(step, *case(rng))
