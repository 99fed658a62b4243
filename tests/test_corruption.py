"""Payload bits flipped in transit: never a crash, never a non-finite, and errors stay local."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, assert_replicas_equal, gradient

import dynamiq_jax as dq
from dynamiq_jax.topologies import base

N, SIZE = 4, 4 * 2048 * 3
METHODS = {
    "default": dq.DynamiQ(**SMALL),
    "bf16_scales": dq.DynamiQ(group_scale="bf16", bits=6, **SMALL),
    "geometric": dq.DynamiQ(levels="geometric", **SMALL),
    "raw_bf16": dq.DynamiQ(widths=(4, 16), bits=9, **SMALL),
}
TOPOLOGIES = {"ring": dq.Ring(), "butterfly": dq.Butterfly(), "direct": dq.Direct()}


@dataclasses.dataclass(frozen=True, eq=False)
class Flipping:
    """A topology on whose wires the payloads that worker 1 sends are XORed with a mask."""

    inner: Any
    mask: jax.Array

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reduce(self, ops, axis_name, n_workers, streams):
        def encode(arrived, chunks, stage, slot, **rest):
            payloads = ops.encode(arrived, chunks, stage, slot, **rest)
            hit = (jax.lax.axis_index(axis_name) == 1) & (jnp.asarray(stage) == 0)
            mask = jnp.where(hit, self.mask[: payloads.shape[1]], 0).astype(jnp.uint32)
            return payloads ^ mask

        return self.inner.reduce(ops._replace(encode=encode), axis_name, n_workers, streams)


@functools.cache
def flipped(method_name, topology_name):
    """jit of (x, mask) -> every worker's sum."""
    method, inner = METHODS[method_name], TOPOLOGIES[topology_name]

    def one(x, mask):
        key = jax.random.key(3)
        return dq.psum(x, "data", method=method, topology=Flipping(inner, mask), key=key)

    return jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))


def payload_words(method_name, topology_name):
    return max(METHODS[method_name].layout(SIZE, N, TOPOLOGIES[topology_name]).payload_words)


CASES = [(name, "ring") for name in METHODS] + [("default", t) for t in ("butterfly", "direct")]


@pytest.mark.parametrize(("method_name", "topology_name"), CASES)
def test_errors_stay_where_the_bits_were(method_name, topology_name):
    x = gradient(0, N, SIZE)
    run = flipped(method_name, topology_name)
    words = payload_words(method_name, topology_name)
    clean = np.asarray(run(x, jnp.zeros(words, jnp.uint32)))
    rng = np.random.default_rng(0)
    changed = 0
    for _ in range(25):
        mask = np.zeros(words, np.uint32)
        mask[rng.integers(words)] = 1 << rng.integers(32)
        result = np.asarray(run(x, jnp.asarray(mask)))
        assert np.isfinite(result).all()
        assert_replicas_equal(result)
        hurt = (result[0] != clean[0]).reshape(-1, 256).any(axis=1).sum()
        # A word of scales belongs to two super-groups, and the mask hits what worker 1 sends
        # for each chunk: up to three.
        assert hurt <= 2 * 3
        changed += hurt > 0
    assert changed > 12  # most words are used


@pytest.mark.parametrize(("method_name", "topology_name"), CASES)
def test_noise_instead_of_payloads_stays_finite(method_name, topology_name):
    """Also where every scale is a NaN, an infinity or negative."""
    x = gradient(1, N, SIZE)
    words = payload_words(method_name, topology_name)
    run = flipped(method_name, topology_name)
    rng = np.random.default_rng(1)
    masks = [rng.integers(0, 2**32, words, dtype=np.uint32) for _ in range(3)]
    masks += [np.full(words, mask, np.uint32) for mask in (0xFFFFFFFF, 0x80008000, 0x7FFF7FFF)]
    for mask in masks:
        result = np.asarray(run(x, jnp.asarray(mask)))
        assert np.isfinite(result).all()
        assert_replicas_equal(result)


def test_what_one_receiver_alone_got_wrong_is_found_by_debug_checks(monkeypatch):
    """Corruption of the all-gather makes replicas differ: only a comparison can see it."""
    from dynamiq_jax.fingerprint import fingerprint

    good = base.all_gather_invarying

    def gather(x, axis_name):
        hit = (jax.lax.axis_index(axis_name) == 2).astype(jnp.uint32)
        return good(x, axis_name).at[0, 40].add(hit << 4)

    monkeypatch.setattr(base, "all_gather_invarying", gather)

    def one(x):
        return dq.psum(x, "data", method=METHODS["default"], topology=dq.Ring())

    result = jax.vmap(one, axis_name="data")(gradient(2, N, SIZE))
    hashes = [int(fingerprint(row)) for row in result]
    assert [h == hashes[0] for h in hashes] == [True, True, False, True]
