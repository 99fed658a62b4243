"""Every way to train of `benchmarks/ways.py`, on the example's model, against plain JAX."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ways
from asserts import assert_copies_equal
from cases import CHEAP, daily
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llm_model import CONFIGS, init_params, make_loss
from workers import auto_mesh

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

N, STEPS, ROWS = 4, 3, 2
CONFIG = dataclasses.replace(
    CONFIGS["tiny"], dim=64, n_heads=2, n_kv_heads=2, hidden=128, seq_len=16, init="unit"
)
LIMITS = {"min_leaf_size": 1024, "min_bucket_size": 1, "min_bucket_bytes": 0}
"""Each matrix of the model is larger, and each vector smaller."""
MAX_NORM = 1.2
"""Some steps' gradients are larger, and some smaller."""
OPTIMIZER = optax.sgd(0.2, momentum=0.9)
"""Its updates are as wrong as gradients are, where Adam's have the same size whatever these are."""

EXACT = [
    f"{name}{option}:{'/'.join(['f32'] * len(kind.methods))}".rstrip(":")
    for name, kind in ways.KINDS.items()
    for option in ("", "-checkpoint", "-scanned", "-checkpoint-scanned")
    if name not in ("none", "bf16-fsdp") and (kind.scans or "scanned" not in option)
]
"""All ways but those that average nothing, or always in 16 bits."""
BF16 = [
    "auto:f32", "explicit:f32", "dp:f32", "zero:f32/f32", "zero-pipeline:f32/f32",
    "zero-auto:f32/f32", "zero-explicit:f32/f32", "bf16-zero", "bf16-fsdp", "xla-fsdp",
    "fsdp:f32/f32", "fsdp-layers-checkpoint:f32/f32", "fsdp-explicit-checkpoint:f32/f32",
    "zero-dear-checkpoint-scanned:f32/f32", "fsdp-scanned:f32/f32",
]  # fmt: skip
"""Functions take parameters in bf16."""
COMPRESSED = [
    name
    for name, kind in ways.KINDS.items()
    for name in ([f"{name}:{'/'.join(kind.methods)}"] if kind.methods else [])
] + [
    "dp-layers-checkpoint:5", "fsdp-checkpoint:5/8", "fsdp-layers-checkpoint:5/8",
    "zero-pipeline:4d/2", "zero-dear:4d/2", "zero:few/few", "zero-dear:few/few",
    "dp-checkpoint-scanned:5",
    "zero-pipeline-checkpoint-scanned:5/2.5", "zero-dear-checkpoint-scanned:5/2.5",
    "fsdp-checkpoint-scanned:5/8", "fsdp-keep-checkpoint-scanned:5/8",
    "fsdp-explicit-checkpoint:5/8", "fsdp:4d/bf16", "dp:mxfp8", "explicit:mxfp8",
    "zero:mxfp8/mxfp8", "zero-pipeline:mxfp8/mxfp8", "zero-explicit:mxfp8/2.5",
    "fsdp:mxfp8/mxfp8", "fsdp-layers:mxfp8/8", "fsdp-explicit:minmax:4/mxfp8", "fsdp:qsgd/mxfp6",
]  # fmt: skip


def training(mesh: Any, dtype: Any = jnp.float32, **options: Any) -> ways.Training:
    return ways.Training(
        make_model=partial(ways.llama, CONFIG), optimizer=OPTIMIZER, mesh=mesh, dtype=dtype,
        max_norm=MAX_NORM, limits=LIMITS, topology=dq.Direct(), **options,
    )  # fmt: skip


def batches(n: int = N) -> np.ndarray:
    """i32[steps, rows, tokens]: every worker has tokens of its own; of one kind in the second step.

    The gradient of that step is larger.
    """
    rng, kinds = np.random.default_rng(0), (256 // n, 1, 16)
    shape = ROWS, CONFIG.seq_len + 1
    of = [[256 * i // n + rng.integers(0, kind, shape) for i in range(n)] for kind in kinds]
    return np.concatenate(np.moveaxis(of, 1, 0), 1).astype(np.int32)


@cache
def start() -> Any:
    """The model's first parameters, on the host."""
    return jax.device_get(jax.jit(partial(init_params, CONFIG))(jax.random.key(0)))


@cache
def plain(dtype: Any = jnp.float32, n: int = N) -> tuple[list[float], Any]:
    """Losses and last parameters by plain JAX on one device, with all workers' batches at once."""
    clip = optax.chain(optax.clip_by_global_norm(MAX_NORM), OPTIMIZER)
    loss_fn = make_loss(CONFIG)

    @jax.jit
    def step(params, inner, tokens):
        copies = jax.tree.map(lambda w: w.astype(dtype), params)
        loss, grads = jax.value_and_grad(loss_fn)(copies, tokens)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = clip.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner, loss, optax.tree.norm(grads)

    params, losses, norms = start(), [], []
    inner = clip.init(params)
    for tokens in batches(n):
        params, inner, loss, norm = step(params, inner, tokens)
        losses.append(float(loss))
        norms.append(float(norm))
    assert min(norms) < MAX_NORM < max(norms), norms
    return losses, jax.device_get(params)


def lowered(text: str, t: ways.Training) -> tuple[ways.Way, Any]:
    """A way and the program of its step, to be compiled."""
    way = ways.make_way(text, t)
    split = NamedSharding(way.mesh, P(way.mesh.axis_names))
    tokens = batches(t.mesh.size)[0]
    return way, ways.lower(
        way, way.like, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=split)
    )


def train(way: ways.Way, step: Any) -> tuple[list[float], Any, Any]:
    """Losses of all steps, the last parameters and copies."""
    split, losses = NamedSharding(way.mesh, P(way.mesh.axis_names)), []
    with jax.set_mesh(way.mesh):
        state = way.init(way.model.split(start()))
        for tokens in batches(way.mesh.size):
            state, loss = step(state, jax.device_put(tokens, split))
            losses.append(float(loss))
        return losses, *way.read(state)


def distances(way: ways.Way, params: Any, expected: Any) -> list[float]:
    """How far every leaf is from where it should be, by how far it went."""
    trees = params, way.model.split(expected), way.model.split(start())
    found = []
    for own, right, first in zip(*map(jax.tree.leaves, trees), strict=True):
        own, right, first = (np.float32(jax.device_get(x)) for x in (own, right, first))
        assert own.shape == right.shape
        found.append(float(np.linalg.norm(own - right) / np.linalg.norm(right - first)))
    return found


def check_exact(way: ways.Way, step: Any, t: ways.Training, within: float) -> None:
    """Losses, parameters and copies are those of plain JAX."""
    expected, last = plain(t.dtype, t.mesh.size)
    losses, params, copies = train(way, step)
    assert np.ptp(expected) > 0.1  # it trains
    np.testing.assert_allclose(losses, expected, rtol=max(within / 10, 2e-6))
    assert max(distances(way, params, last)) < within
    assert_copies_equal((params, copies))
    if copies is not None:
        apart = 1e-6 if t.dtype == jnp.float32 else 2.0**-8  # relative, as roundings are
        for copy, master in zip(*map(jax.tree.leaves, (copies, params)), strict=True):
            assert copy.dtype == t.dtype and master.dtype == jnp.float32
            copy, master = np.float32(jax.device_get(copy)), jax.device_get(master)
            assert np.linalg.norm(copy - master) <= apart * np.linalg.norm(master)


def check_compressed(way: ways.Way, step: Any, t: ways.Training, least: float = 1e-3) -> None:
    """Losses are close, replicas have equal bits, and every matrix was compressed.

    A matrix that was compressed ends further than ``least`` from where it should be.
    """
    expected, last = plain(t.dtype, t.mesh.size)
    losses, params, copies = train(way, step)
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert_copies_equal((params, copies))
    for far, shape in zip(
        distances(way, params, last), jax.tree.leaves(way.model.shapes), strict=True
    ):
        matrix = shape.size >= LIMITS["min_leaf_size"]
        assert (least if matrix else 0) < far < 0.5, (far, shape)


F32_ROWS = [(text, jnp.float32, 1e-4) for text in EXACT]
F32_DAILY = [row for row in F32_ROWS if row[0] in ("explicit:f32", "zero-pipeline:f32/f32")]
BF16_ROWS = [(text, jnp.bfloat16, 3e-2) for text in BF16]


@pytest.mark.parametrize(("text", "dtype", "within"), daily(F32_ROWS + BF16_ROWS, F32_DAILY))
def test_an_exact_way_trains_as_plain_jax_does(text, dtype, within):
    t = training(auto_mesh(N), dtype)
    way, program = lowered(text, t)
    check_exact(way, program.compile(), t, within)


class Cheap(ways.Training):
    """A training whose methods have one width, which compiles in a third of the time."""

    def request(self, text: str, dither: bool = False) -> dq.Compression:
        return dataclasses.replace(CHEAP, topology=self.topology, **LIMITS)


CHEAP_ROW = "zero-pipeline:5/2.5", Cheap
COMPRESSED_ROWS = [CHEAP_ROW, *((text, ways.Training) for text in COMPRESSED)]


@pytest.mark.parametrize(("text", "kind"), daily(COMPRESSED_ROWS, [CHEAP_ROW]))
def test_compressed_a_way_trains_and_replicas_have_equal_bits(text, kind):
    t = kind(**vars(training(auto_mesh(N))))
    way, program = lowered(text, t)
    check_compressed(way, program.compile(), t)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zerro:5", r"'zerro:5': pass one of none, bf16-psum.*method 'zerro' is not known"),
        ("zero-checkpoints", "'zero-checkpoints': pass one of none"),
        ("dp:5/8", "'dp:5/8' has 2 methods, and dp takes 1"),
        ("fsdp:5/mxfp8:3", "mxfp8 has no choice of bits"),
        ("fsdp-layers-scanned", "each layer by itself; in a scan run none, .*zero-dear"),
    ],
)
def test_names_of_ways_that_are_not_known_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        ways.parse(text, training(auto_mesh(N)))


def test_a_method_alone_means_the_pipeline():
    t = training(auto_mesh(N))
    assert ways.parse("dynamiq:5", t) == ways.parse("dp:dynamiq:5", t)
    assert t.request("5") == t.request("dynamiq:5")
    assert t.request("4d") == t.request("4", dither=True) == t.request("dynamiq-dither:4")
