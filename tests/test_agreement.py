"""Workers that were told different things, or computed them: errors that say what and where."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, auto_mesh, gradient
from compiler import FLAGS
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import agreement, fingerprint

TREE = {"w": jnp.ones((300, 400)), "b": jnp.ones(7, jnp.bfloat16)}


def facts(tree=TREE, axis_name="data", method=None, topology=None, key=None):
    return agreement.facts_of(
        tree, auto_mesh(), axis_name, method=method, topology=topology, key=key
    )


def test_one_process_agrees_with_itself():
    dq.check_agreement(TREE, auto_mesh(), "data", key=jax.random.key(1))


DIFFERENT = {
    "method": facts(method=dq.DynamiQ(bits=4.0)),
    "topology": facts(topology=dq.Ring()),
    "limits": facts(method=dq.DynamiQ(min_leaf_size=5)),
    "key": facts(key=jax.random.key(2)),
    "tree": facts({"w": jnp.ones((300, 401)), "b": TREE["b"]}),
    "version of jax": facts() | {"version of jax": "0.0.1"},
}


@pytest.mark.parametrize("fact", DIFFERENT)
def test_what_differs_is_named_with_the_process_and_both_values(fact):
    rows = [facts(), facts(), DIFFERENT[fact], facts()]
    # What processes exchange is text of fixed length.
    rows = [agreement._decode(agreement._encode(row), list(row)) for row in rows]
    with pytest.raises(RuntimeError, match="would not reduce gradients alike") as error:
        agreement.compare(rows)
    message = str(error.value)
    assert f"{fact}: process 0 has" in message
    assert "process 2 has" in message
    assert "on [2]" in message
    agreement.compare([rows[0], rows[1], rows[3]])


def test_long_trees_differ_by_their_hash():
    long = {f"layer_{i:04}": jax.ShapeDtypeStruct((i + 1,), jnp.float32) for i in range(400)}
    other = dict(long, layer_0399=jax.ShapeDtypeStruct((7,), jnp.float32))
    rows = [facts(long), facts(other)]
    rows = [agreement._decode(agreement._encode(row), list(row)) for row in rows]
    with pytest.raises(RuntimeError, match="tree: process 0"):
        agreement.compare(rows)


def test_axes_that_the_mesh_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"'model' is not in the mesh.*data"):
        dq.check_agreement(TREE, auto_mesh(), "model")


def test_fingerprints_tell_bits_places_and_leaves():
    x = jnp.arange(8.0)
    variants = [(x,), (x.at[3].set(3.0000002),), (x[::-1],), (-x,), (x, x), (x.astype(jnp.int32),)]
    hashes = [int(fingerprint.fingerprint(tree)) for tree in variants]
    assert len(set(hashes)) == len(hashes)
    assert int(fingerprint.fingerprint((jnp.array([0.0]),))) != int(
        fingerprint.fingerprint((jnp.array([-0.0]),))
    )


def reduced(method, x):
    def one(x):
        return dq.psum(x[0], "data", method=method)

    mapped = jax.shard_map(one, mesh=auto_mesh(), in_specs=P("data"), out_specs=P())
    return jax.jit(mapped)(x)


def test_debug_checks_change_nothing_where_workers_agree():
    x = gradient(0, 8, 8 * 2048 - 5)
    plain, checked = (
        np.asarray(reduced(dq.DynamiQ(debug_checks=debug, **SMALL), x)) for debug in (False, True)
    )
    np.testing.assert_array_equal(plain, checked)


DISAGREEING = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq import method as dynamiq

good = dynamiq.shared_plan

def per_worker(*arguments):
    plan, noise = good(*arguments)
    other = (jax.lax.axis_index("data") == 1).astype(jnp.uint32)
    return dynamiq.SharedPlan(plan._replace(seed=plan.seed + other), noise)

dynamiq.shared_plan = per_worker
method = dq.DynamiQ(debug_checks=True, min_leaf_size=1, min_bucket_size=1)
mesh = jax.make_mesh((2,), ("data",))
step = lambda x: dq.psum(x, "data", method=method)
mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
x = jax.device_put(jnp.arange(8192.0), jax.NamedSharding(mesh, P("data")))
print(jax.block_until_ready(jax.jit(mapped)(x)))
jax.effects_barrier()
"""


def test_debug_checks_stop_a_step_whose_plans_differ():
    """In a process of its own: what a failed step leaves behind would outlive the test."""
    flags = f"{FLAGS} --xla_force_host_platform_device_count=2"
    ran = subprocess.run(
        [sys.executable, "-c", DISAGREEING],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode != 0
    assert "the plan differs between the workers of axis 'data'" in ran.stderr
