"""Frozen shards that are packed once: their gathers have the bits of gathers that encode."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import llm_model
import numpy as np
import pytest
from asserts import assert_copies_equal, assert_same_bits
from cases import CHEAP, EIGHT, EXACT, daily, low, small
from jax import lax
from jax.sharding import PartitionSpec as P
from small_llm import CONFIG
from workers import auto_mesh, mesh_of, once, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax import contrib

N = 4
LOW = dataclasses.replace(EIGHT, min_leaf_size=300)
KEY = jax.random.key(3)


@once
def shards():
    """All workers' shards have several dtypes, and some are too small to be compressed."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda dtype, *shape: jax.random.normal(next(keys), shape).astype(dtype)
    return {
        "w": normal(jnp.float32, N * 9, 61),
        "v": [normal(jnp.bfloat16, N * 4, 70), normal(jnp.float32, N * 3, 50)],
        "few": normal(jnp.float32, N * 2, 3),
    }


CASES = {
    "dynamiq": (LOW, {"key": KEY}),
    "no key": (LOW, {}),
    "dither": (dataclasses.replace(LOW, method=dq.DynamiQ(bits=4, dither=True)), {"key": KEY}),
    "plain": (low(contrib.MinMax(bits=6)), {"key": KEY}),
    "exact": (EXACT, {}),
    "to": (LOW, {"key": KEY, "to": "invarying"}),
    "stacked": (LOW, {"key": KEY, "tiled": False, "axis": 1}),
    "one worker": (LOW, {"key": KEY}),
    "two axes": (dataclasses.replace(LOW, topology=dq.Hierarchical()), {"key": KEY}),
}


@pytest.mark.parametrize("name", daily(CASES, ["dither", "plain", "one worker"]))
@pytest.mark.usefixtures("padding_is_free")
def test_packed_shards_have_the_bits_of_an_all_gather(name):
    method, options = CASES[name]
    axes = ("data", "model") if name == "two axes" else "data"
    mesh = mesh_of(2, 2) if name == "two axes" else auto_mesh(1 if name == "one worker" else N)
    key = {"key": options["key"]} if "key" in options else {}
    way = {"tiled": True} | {k: v for k, v in options.items() if k != "key"}
    out = P() if way.get("to") == "invarying" else P(axes)
    over = partial(jax.shard_map, mesh=mesh, in_specs=P(axes))

    def at_once(x):
        return dq.all_gather(x, axes, compression=method, **key, **way)

    pack = over(
        partial(dq.optax.pack, axis_name=axes, compression=method, **key), out_specs=P(axes)
    )
    gather = over(lambda packed: dq.all_gather(packed, axes, **way), out_specs=out)
    packed = jax.jit(pack)(put(shards(), mesh, P(axes)))
    assert all(x.shape[0] == mesh.size for x in jax.tree.leaves(packed))
    found = jax.jit(gather)(packed)
    expected = jax.jit(over(at_once, out_specs=out))(put(shards(), mesh, P(axes)))
    assert_same_bits(*map(jax.device_get, (found, expected)))
    assert_copies_equal(found)


@pytest.mark.usefixtures("padding_is_free")
def test_layers_of_a_scan_are_packed_layer_by_layer():
    layers = np.float32(np.random.default_rng(0).standard_normal((3, N * 8, 64)))

    def pack(own):
        return lax.map(partial(dq.optax.pack, axis_name="data", compression=LOW, key=KEY), own)

    def run(packed, x):
        def layer(x, own):
            return jnp.tanh(x @ dq.all_gather(own, "data", tiled=True)[:64, :32]), None

        def whole(x):
            return lax.scan(jax.checkpoint(layer), x, packed)[0]

        return jax.value_and_grad(lambda x: jnp.sum(whole(x)))(x)

    stacked, mesh = P(None, "data"), auto_mesh(N)
    packed = jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=stacked, out_specs=stacked))(layers)
    maps = {"mesh": mesh, "in_specs": (stacked, P()), "out_specs": P(), "check_vma": False}
    value, grads = jax.jit(jax.shard_map(run, **maps))(packed, np.eye(4, 64, dtype="f")[:, :32])
    assert np.isfinite(value) and np.abs(grads).max() > 0


RANK = 4


@once
def language_model():
    """The base of the examples' model, adapters of its matrices, and tokens."""
    params = llm_model.init_params(CONFIG, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    adapters = [
        (jax.random.normal(key, (w.shape[0], RANK)) / 8, jnp.full((RANK, w.shape[1]), 0.01))
        if w.ndim == 2
        else ()
        for key, w in zip(keys, jax.tree.leaves(params), strict=True)
    ]
    tokens = jax.random.randint(jax.random.key(2), (2 * N, CONFIG.seq_len + 1), 0, 64)
    return params, adapters, tokens


def adapted(base, adapters):
    """The base with a product of two small matrices added to each of its own."""
    leaves, treedef = jax.tree.flatten(base)
    pairs = zip(leaves, adapters, strict=True)
    return treedef.unflatten(w + pair[0] @ pair[1] if pair else w for w, pair in pairs)


def step_of(whole, loss, compression=CHEAP):
    """(base, adapters, tokens) -> the loss and adapters after a step of SGD, inside of a map."""

    def step(base, adapters, tokens):
        base = whole(base)
        own = lax.pcast(adapters, "data", to="varying")
        value, grads = jax.value_and_grad(lambda a: loss(adapted(base, a), tokens))(own)
        grads = dq.psum(grads, "data", compression=compression, key=KEY)
        return lax.pmean(value, "data"), jax.tree.map(lambda a, g: a - 0.1 * g / N, adapters, grads)

    return step


def names_in(jaxpr):
    """The functions that a program calls, at any depth."""
    found = set()
    for eqn in jaxpr.eqns:
        if isinstance(name := eqn.params.get("name"), str):
            found.add(name)
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= names_in(inner)
    return found


@pytest.mark.release
@pytest.mark.usefixtures("dtypes_promoted")
def test_lora_trains_on_a_packed_base_as_on_one_that_each_step_encodes():
    (base, adapters, tokens), mesh = language_model(), auto_mesh(N)
    loss = llm_model.make_loss(CONFIG)
    told = {"compression": small(dq.DynamiQ(bits=8)), "key": KEY}
    gather = partial(dq.all_gather, axis_name="data", tiled=True, to="invarying")
    pack = partial(dq.optax.pack, axis_name="data", **told)
    maps = {"mesh": mesh, "in_specs": (P("data"), P(), P("data")), "out_specs": (P(), P())}
    encodes = jax.jit(jax.shard_map(step_of(partial(gather, **told), loss), **maps))
    decodes = jax.jit(jax.shard_map(step_of(gather, loss), **maps))
    base, adapters = put(base, mesh, P("data")), put(adapters, mesh)
    split = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    packed = jax.jit(jax.shard_map(pack, **split))(base)
    tokens, found, expected = put(tokens, mesh, P("data")), adapters, adapters
    for _ in range(2):
        one, found = decodes(packed, found, tokens)
        other, expected = encodes(base, expected, tokens)
        assert_same_bits(*map(jax.device_get, ((one, found), (other, expected))))
    assert (np.asarray(found[0][0]) != np.asarray(adapters[0][0])).any()
    # With exact sums of the adapters' gradients the base is all that could be encoded.
    exact = [
        jax.shard_map(step_of(way, loss, EXACT), **maps)
        for way in (partial(gather, **told), gather)
    ]
    names = [
        names_in(jax.make_jaxpr(f)(own, adapters, tokens).jaxpr)
        for f, own in zip(exact, (base, packed), strict=True)
    ]
    assert ["_encode_tiles" in own for own in names] == [True, False]
    assert all("_decode_tiles" in own for own in names)
    kept = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert kept(packed) < 1.1 * kept(base) / 4


def test_what_does_not_go_together_is_refused():
    split = P("data")

    def traced(gather, *, pack=None, spec=split, n=N):
        pack = pack or partial(dq.optax.pack, axis_name="data")
        mesh = auto_mesh(N)
        packed = jax.eval_shape(
            jax.shard_map(pack, mesh=mesh, in_specs=P("data"), out_specs=P("data")), shards()
        )
        mesh = jax.make_mesh((n, 8 // n), ("data", "model"), axis_types=mesh.axis_types * 2)
        run = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
        jax.eval_shape(run, packed)

    gather = partial(dq.all_gather, axis_name="data", tiled=True)
    traced(gather)
    for words, run in (
        (r"axis_name='model', and the shards were packed over 'data'",
         partial(traced, partial(gather, axis_name="model"))),
        ("axis 'data' has 2 workers, and the shards were packed by 4; pack them anew",
         partial(traced, gather, n=2)),
        (r"leading axis of 1; pass P\('data'\) as its spec", partial(traced, gather, spec=P())),
        (r"^compression came with packed shards.* pass this to dq.optax.pack",
         partial(traced, partial(gather, compression=dq.DynamiQ()))),
        ("^key came with packed shards", partial(traced, partial(gather, key=KEY))),
        ("axis=2: leaf .* pass an axis that every leaf has",
         partial(traced, partial(gather, axis=2))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run()
    alone = dq.Compression(contrib.PermK(), min_leaf_size=1, min_bucket_size=1)
    with pytest.raises(
        NotImplementedError, match="PermK.* does not do psum_scatter and all_gather"
    ):
        traced(gather, pack=partial(dq.optax.pack, axis_name="data", compression=alone))
    with pytest.raises(NotImplementedError, match="keeps no payloads for later gathers"):
        Summed().pack(jnp.ones(3), None)


class Summed(dq.methods.Method):
    """A method of a user, who wrote no halves."""

    all_reduce = wire_bits = None
