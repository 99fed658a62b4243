"""Plans of `dq.explain` and of calls: both refuse the same, in the same words, and send the same.

Programs are only traced. `test_plans.py` compares plans with compiled programs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EVERY_METHOD, daily
from jax.sharding import PartitionSpec as P
from workers import mesh_of

import dynamiq_jax as dq
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.contrib.local_error import LocalError
from dynamiq_jax.plan.plan import known
from dynamiq_jax.plan.traced import bytes_by_scope
from dynamiq_jax.reduction.all_to_all import EIGHT_BITS
from dynamiq_jax.tree.leaves import describe_leaves

METHODS = {name: row.method.method for name, row in EVERY_METHOD.items()} | {
    "default": None,
    "local error": LocalError(dq.contrib.MinMax()),
    "by path": lambda path, leaf: dq.F32() if "w" in path else dq.contrib.PowerSGD(),
}
TOPOLOGIES = {
    "none": None, "ring": dq.Ring(), "butterfly": dq.Butterfly(), "direct": dq.Direct(),
    "push": dq.Direct(transport="push"), "ring, push": dq.Ring(transport="push"),
    "hierarchical": dq.Hierarchical(),
    "inner": dq.Hierarchical(inner=dq.Direct()),
    "inner butterfly": dq.Hierarchical(inner=dq.Butterfly(), outer=dq.Ring()),
}  # fmt: skip
TREES = {
    "large": {"w": (24, 64), "b": (3 * 2048,)},
    "one": {"w": (24, 64)},
    "small": {"b": (24,)},
    "integers": {"i": (24, 64)},
    "excluded": {"no": (24, 64)},
    "some excluded": {"no": (24, 64), "w": (24, 64)},
}
SIZES = [(1,), (3,), (4,), (8,), (2, 4), (1, 4), (4, 1), (3, 2), (2, 1)]
CALLS = {
    "psum": ("all-reduce", dq.psum, {}),
    "pmean": ("all-reduce", dq.pmean, {}),
    "psum_scatter": ("reduce-scatter", dq.psum_scatter, {"tiled": True}),
    "all_gather": ("all-gather", dq.all_gather, {}),
    "all_to_all": ("all-to-all", dq.all_to_all, {"split_axis": 0, "concat_axis": 0, "tiled": True}),
}


def outcome(call):
    """The result of a call, and its error in words."""
    try:
        return call(), None
    except (ValueError, NotImplementedError) as error:
        return None, f"{type(error).__name__}: {error}"


def traced(call, tree, sizes, compression):
    """The program of a call on a mesh of these sizes."""
    mesh = mesh_of(*sizes)
    names = mesh.axis_names if len(sizes) > 1 else mesh.axis_names[0]
    _, function, told = CALLS[call]
    one = lambda tree: function(tree, names, compression=compression, **told)
    whole = {"in_specs": P(mesh.axis_names), "out_specs": P(mesh.axis_names), "check_vma": False}
    global_shape = lambda x: jax.ShapeDtypeStruct(
        (np.prod(sizes) * x.shape[0], *x.shape[1:]), x.dtype
    )
    step = jax.jit(jax.shard_map(one, mesh=mesh, **whole))
    return step.trace(jax.tree.map(global_shape, tree)).jaxpr


def explained(call, tree, sizes, compression):
    """The plan of a call, and the explanation that users have of an all-reduce."""
    kind, leaves = CALLS[call][0], describe_leaves(tree)
    if kind == "all-reduce":
        found = dq.explain(tree, sizes, compression=compression, verbose=False)
        plan = compression.plan(leaves, sizes)
        assert found.wire_bytes == pytest.approx(plan.sent_bytes)
        assert found.needs_state == (plan.needs_state is not None)
        return plan
    # An exchange has one level, and only hierarchies gather otherwise than XLA.
    if kind == "all-to-all" or (kind == "all-gather" and len(sizes) == 1):
        default = EIGHT_BITS if kind == "all-to-all" else None
        compression = as_compression(compression, default=default)
        compression = dataclasses.replace(compression, topology=None)
    return compression.plan(leaves, sizes, kind)


def case(rng):
    pick = lambda table: table[list(table)[rng.integers(len(table))]]
    compression = dq.Compression(
        pick(METHODS), topology=pick(TOPOLOGIES), exclude="no", min_leaf_size=100, min_bucket_size=1
    )
    shapes = pick(TREES)
    dtype = lambda name: jnp.int32 if name == "i" else jnp.float32
    tree = {name: jax.ShapeDtypeStruct(shape, dtype(name)) for name, shape in shapes.items()}
    return tree, SIZES[rng.integers(len(SIZES))], compression


NOT_HERE = "needs NVIDIA GPUs"
"""Refusals of push kernels where devices cannot run them: a plan may be for others."""


def check(*told):
    """A call and its plan refuse the same, or send the same."""
    program, refused = outcome(lambda: traced(*told))
    plan, error = outcome(lambda: explained(*told))
    if refused is not None and NOT_HERE in refused:
        return
    if plan is not None and plan.needs_state is not None:
        assert "needs a state: call dq.reduce" in refused, told
        return
    assert error == refused, told
    if program is None or plan.n_workers == 1:
        return
    asked, _ = bytes_by_scope(program)
    scopes = known(dict.fromkeys(scope for scope, _ in asked))
    sent = sum(asked[scope, narrow] for scope in scopes for narrow in (False, True))
    assert sent == pytest.approx(plan.asked_bytes, rel=0.01), told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("padding_is_free")
@pytest.mark.parametrize("seed", daily(range(60), [0, 1, 2]))
def test_explanations_refuse_and_send_what_calls_do(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        check(list(CALLS)[rng.integers(len(CALLS))], *case(rng))
