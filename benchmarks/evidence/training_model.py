"""The language models that `training.py` trains: pure functions of a parameter tree.

RMSNorm, rotary positions, SwiGLU, untied head, causal attention. The layers' parameters are
stacked and scanned, so that a model of twelve layers compiles as fast as one of two; `unstack`
gives the tree that real training codes have, with one leaf per layer and matrix.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Tree = Any


class Shape(NamedTuple):
    """Shape of a model, and how it is trained by default."""

    vocab_size: int
    seq_len: int
    n_layers: int
    dim: int
    n_heads: int
    hidden: int
    dtype: jax.typing.DTypeLike
    """The dtype of matrix products; parameters and gradients are f32."""
    sequences: int
    """Per worker and step."""
    steps: int
    windows: int
    """Sequences of the validation text."""
    seeds_at_once: int
    """That a GPU trains in one program."""
    remat: bool = False
    """Recompute each block in the backward pass: less memory, a third more work."""


MODELS = {
    "micro": Shape(256, 16, 2, 64, 2, 128, jnp.float32, 2, 20, 64, 8),  # 0.1 M: for tests
    "tiny": Shape(256, 64, 2, 192, 6, 576, jnp.float32, 2, 200, 512, 32),  # 1.1 M, bytes
    "mid": Shape(4096, 256, 8, 384, 6, 1024, jnp.bfloat16, 4, 400, 256, 8),  # 17 M
    "125m": Shape(24576, 1024, 12, 768, 12, 2048, jnp.bfloat16, 2, 200, 64, 1, remat=True),
}

INITS = ("gpt2", "unit")
"""How parameters start; a traced index into this tuple chooses."""


def init(shape: Shape, key: Array, kind: Array) -> Tree:
    """Fresh f32 parameters.

    Args:
      shape: the model.
      key: a PRNG key; under every ``kind`` it gives the same numbers but for their deviations.
      kind: index into `INITS`. "gpt2": deviation 0.02 everywhere. "unit": activations of unit
        variance (embedding 1, matrices 1/sqrt(inputs), head a quarter of that). Both scale what
        is added to the residual stream by 1/sqrt(2 layers).
    """
    vocab_size, dim, hidden, layers = shape.vocab_size, shape.dim, shape.hidden, shape.n_layers
    residual = (2 * layers) ** -0.5
    square, wide = ((layers, dim, dim), 1.0, dim**-0.5), ((layers, dim, hidden), 1.0, dim**-0.5)
    drawn = {  # size, factor in both, deviation of "unit"
        "embed": ((vocab_size, dim), 1.0, 1.0), "head": ((dim, vocab_size), 1.0, 0.25 * dim**-0.5),
        "q": square, "k": square, "v": square, "gate": wide, "up": wide,
        "o": ((layers, dim, dim), residual, dim**-0.5),
        "down": ((layers, hidden, dim), residual, hidden**-0.5),
    }  # fmt: skip
    ends = np.cumsum([math.prod(size) for size, *_ in drawn.values()])
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])  # one draw compiles fastest
    tree = {
        name: part.reshape(size) * factor * jnp.asarray([0.02, unit])[kind]
        for (name, (size, factor, unit)), part in zip(drawn.items(), parts, strict=True)
    }
    outer = {"embed": tree.pop("embed"), "head": tree.pop("head"), "norm": jnp.ones(dim)}
    scales = {name: jnp.ones((layers, dim)) for name in ("attention_norm", "mlp_norm")}
    return outer | {"blocks": tree | scales}


def unstack(tree: Tree) -> Tree:
    """The tree with one leaf per layer and matrix; `stack` undoes it."""
    n_layers = jax.tree.leaves(tree["blocks"])[0].shape[0]
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(n_layers)]
    return tree | {"blocks": layers}


def stack(tree: Tree) -> Tree:
    """The tree with the layers' leaves stacked."""
    return tree | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *tree["blocks"])}


def is_matrix(params: Tree) -> Tree:
    """True for matrices, stacked or not, False for the scales of norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale[None, None]).astype(x.dtype)


def _rotate(x: Array) -> Array:
    """Turns the pairs (x[i], x[i + head_dim/2]) by position x frequency i; ``[B, T, H, d]``."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None]
    angle = angle[None, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def times(y: Array, layer: Tree, name: str) -> Array:
    """The product with one of a layer's matrices, in the dtype of ``y``."""
    return y @ layer[name].astype(y.dtype)


FeedForward = Callable[[Array, Tree], tuple[Array, Any]]
"""(normed activations [B, T, dim], one layer's parameters) -> what is added to the residual stream,
and terms of the loss, if any."""


def gated(y: Array, layer: Tree) -> tuple[Array, None]:
    """SwiGLU."""
    hidden = jax.nn.silu(times(y, layer, "gate")) * times(y, layer, "up")
    return times(hidden, layer, "down"), None


def _block(
    shape: Shape, feed_forward: FeedForward, x: Array, layer: Tree
) -> tuple[Array, Array | None]:
    """One decoder layer on ``[B, T, dim]``, as `lax.scan` takes it."""
    y = _norm(x, layer["attention_norm"])
    q, k, v = (times(y, layer, name).reshape(*y.shape[:2], shape.n_heads, -1) for name in "qkv")
    attended = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    x = x + times(attended.reshape(x.shape), layer, "o")
    added, terms = feed_forward(_norm(x, layer["mlp_norm"]), layer)
    return x + added, terms


def loss(shape: Shape, params: Tree, tokens: Array, feed_forward: FeedForward = gated) -> Array:
    """Mean cross-entropy in nats per token; ``tokens`` is ``int32[batch, seq_len + 1]``.

    The terms of ``feed_forward``, if any, are added.
    """
    # Looked up in f32: gradients of rows that a batch uses often are summed in f32, too.
    x = params["embed"][tokens[:, :-1]].astype(shape.dtype)
    block = partial(_block, shape, feed_forward)
    x, terms = lax.scan(jax.checkpoint(block) if shape.remat else block, x, params["blocks"])
    logits = _norm(x, params["norm"]) @ params["head"].astype(shape.dtype)
    logits = logits.astype(jnp.float32)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    cross_entropy = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)
    return sum(map(jnp.sum, jax.tree.leaves(terms)), start=cross_entropy)
