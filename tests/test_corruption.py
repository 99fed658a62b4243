"""Payload bits flipped in transit: never a crash, never a non-finite, and errors stay local."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_replicas_equal
from cases import daily, over, small
from compiler import FLAGS
from workers import gradient

import dynamiq_jax as dq

N, SIZE = 4, 4 * 2048 * 3
METHODS = {
    "default": small(dq.DynamiQ()),
    "bf16_scales": small(dq.DynamiQ(format=dq.Format(group_scale="bf16"), bits=6)),
    "geometric": small(dq.DynamiQ(format=dq.Format(levels="geometric"))),
    "raw_bf16": small(dq.DynamiQ(widths=(4, 16), bits=9)),
}
TOPOLOGIES = {"ring": dq.Ring(), "butterfly": dq.Butterfly(), "direct": dq.Direct()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Flipping(dq.DynamiQ):
    """DynamiQ on a wire that XORs the payloads that worker 1 sends with a mask."""

    mask: Any

    def codec(self, x, shared, layout, call):
        codec = dq.DynamiQ.codec(self, x, shared, layout, call)

        def encode(arrived, chunks, encoder, carry, **rest):
            payloads, carry = codec.encode(arrived, chunks, encoder, carry, **rest)
            hit = (encoder.worker == 1) & (encoder.stage == 0)
            mask = jnp.where(hit, self.mask[: payloads.shape[1]], 0).astype(jnp.uint32)
            return payloads ^ mask[None], carry

        return codec._replace(encode=encode)


@functools.cache
def flipped(method_name, topology_name):
    """jit of (x, mask) -> every worker's sum."""
    plain, topology = METHODS[method_name].method, TOPOLOGIES[topology_name]
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}

    def one(x, mask):
        method, key = small(Flipping(**fields, mask=mask)), jax.random.key(3)
        return dq.psum(x, "data", compression=over(topology, method), key=key)

    return jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))


def payload_words(method_name, topology_name):
    return max(METHODS[method_name].method.layout(SIZE, N, TOPOLOGIES[topology_name]).payload_words)


CASES = [(name, "ring") for name in METHODS] + [("default", t) for t in ("butterfly", "direct")]


@pytest.mark.parametrize(("method_name", "topology_name"), daily(CASES, [("default", "direct")]))
def test_sums_stay_finite_and_errors_stay_where_the_bits_were(method_name, topology_name):
    """Also under noise, and where every scale is a NaN, an infinity or negative."""
    x, run = gradient(0, N, SIZE), flipped(method_name, topology_name)
    words = payload_words(method_name, topology_name)
    rng = np.random.default_rng(0)

    def result_of(mask):
        result = np.asarray(run(x, jnp.asarray(mask)))
        assert np.isfinite(result).all()
        assert_replicas_equal(result)
        return result[0]

    clean, changed = result_of(np.zeros(words, np.uint32)), 0
    for _ in range(25):
        mask = np.zeros(words, np.uint32)
        mask[rng.integers(words)] = 1 << rng.integers(32)
        hurt = (result_of(mask) != clean).reshape(-1, 256).any(axis=1).sum()
        # A word of scales belongs to two super-groups, and the mask hits what worker 1 sends
        # for each chunk: up to three.
        assert hurt <= 2 * 3
        changed += hurt > 0
    assert changed > 12  # most words are used
    for _ in range(3):
        result_of(rng.integers(0, 2**32, words, dtype=np.uint32))
    for mask in (0xFFFFFFFF, 0x80008000, 0x7FFF7FFF):
        result_of(np.full(words, mask, np.uint32))


FLIPPED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import dynamiq_jax as dq
from dynamiq_jax.methods.dynamiq import codec
from dynamiq_jax.core.axis import Axis

def flip_on_worker_1(x):
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
    bit = (jax.lax.axis_index("data") == 1).astype(words.dtype) << 4
    words = words.at[5].set(words[5] ^ bit)
    return jax.lax.bitcast_convert_type(words.reshape(x.shape), x.dtype)

good_plan, good_gather = codec.make_plan, Axis.all_gather
if sys.argv[1] == "statistics":
    codec.make_plan = lambda stats, *rest: good_plan(flip_on_worker_1(stats), *rest)
else:
    Axis.all_gather = lambda *args, **options: flip_on_worker_1(good_gather(*args, **options))

wire = dq.Format(group_scale="bf16")
method = dq.DynamiQ(widths=(3, 6), bits=5.5, format=wire, debug_checks=True)
limits = {"min_leaf_size": 1, "min_bucket_size": 1}
method = dq.Compression(method, topology=dq.Direct(), **limits)
mesh = jax.make_mesh((2,), ("data",))
step = lambda x: dq.psum(x, "data", compression=method)
mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
x = jax.device_put(jnp.arange(8192.0), jax.NamedSharding(mesh, P("data")))
jax.block_until_ready(jax.jit(mapped)(x))
jax.effects_barrier()
"""


@pytest.mark.parametrize(("received", "found"), [("statistics", "plan"), ("sums", "result")])
def test_what_one_receiver_alone_got_wrong_is_found_by_debug_checks(received, found):
    """Corruption of what all are to hold makes replicas differ: only a comparison can see it.

    In a process of its own: what a failed step leaves behind would outlive the test.
    """
    flags = f"{FLAGS} --xla_force_host_platform_device_count=2"
    ran = subprocess.run(
        [sys.executable, "-c", FLIPPED, received],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode != 0
    assert f"the {found} differs between the workers of axis 'data'" in ran.stderr
