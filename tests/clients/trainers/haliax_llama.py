"""A Llama of haliax's layers, with rotary positions and a masked loss, as levanter writes it."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
from haliax.nn.scan import Stacked

Position, KeyPosition, Embed, Heads, HeadDim, Mlp, Vocabulary, Layers = hax.make_axes(
    position=31, key_position=31, embed=128, heads=4, head_dim=32, mlp=512, vocab=256, layers=2
)
SHARDED = {"batch": "data"}


def rotated(x, axis):
    """Rotary positions."""
    half = HeadDim.size // 2
    angles = jnp.arange(axis.size)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    angles = hax.named(jnp.concatenate([angles, angles], axis=1), (axis, HeadDim))
    first, second = x["head_dim", :half], x["head_dim", half:]
    turned = hax.concatenate("head_dim", (-second, first))
    return x * hax.cos(angles) + turned * hax.sin(angles)


class Block(eqx.Module):
    """Attention and a gated network."""

    queries: hnn.Linear
    keys: hnn.Linear
    values: hnn.Linear
    out: hnn.Linear
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    norms: tuple[hnn.RmsNorm, hnn.RmsNorm]

    @staticmethod
    def init(key):
        heads = (Heads, HeadDim)
        sides = [(Embed, heads)] * 3 + [(heads, Embed)] + [(Embed, Mlp)] * 2 + [(Mlp, Embed)]
        keys = jax.random.split(key, 7)
        linears = [
            hnn.Linear.init(a, b, key=k, use_bias=False)
            for (a, b), k in zip(sides, keys, strict=True)
        ]
        return Block(*linears, (hnn.RmsNorm.init(Embed), hnn.RmsNorm.init(Embed)))

    def __call__(self, x):
        h = self.norms[0](x)
        queries = rotated(self.queries(h), Position)
        h = h.rename({"position": "key_position"})
        keys, values = rotated(self.keys(h), KeyPosition), self.values(h)
        mask = hax.arange(Position).broadcast_axis(KeyPosition) >= hax.arange(KeyPosition)
        scores = hax.dot(queries, keys, axis="head_dim") / HeadDim.size**0.5
        scores = hax.nn.softmax(hax.where(mask, scores, -1e9), axis="key_position")
        x = x + self.out(hax.dot(scores, values, axis="key_position"))
        h = hax.shard(self.norms[1](x), SHARDED)
        return x + self.down(hax.nn.silu(self.gate(h)) * self.up(h))


class Llama(eqx.Module):
    """Tokens to logits."""

    embedding: hnn.Embedding
    blocks: Stacked
    norm: hnn.RmsNorm
    head: hnn.Linear

    @staticmethod
    def init(key):
        first, second, third = jax.random.split(key, 3)
        blocks = Stacked.init(Layers, Block, gradient_checkpointing=True)
        return Llama(
            hnn.Embedding.init(Vocabulary, Embed, key=first),
            blocks(key=jax.random.split(second, Layers.size)),
            hnn.RmsNorm.init(Embed),
            hnn.Linear.init(Embed, Vocabulary, key=third, use_bias=False),
        )

    def __call__(self, tokens):
        x = hax.shard(self.embedding(tokens), SHARDED)
        return self.head(self.norm(self.blocks.fold(x)))


def loss_fn(model, rows):
    """The mean over tokens that are not padding."""
    inputs, targets = rows["position", :-1], rows["position", 1:]
    logits = model(inputs)
    losses = hnn.cross_entropy_loss(
        logits, Vocabulary, hnn.one_hot(targets, Vocabulary), reduction=None
    )
    mask = targets > 0
    return (hax.sum(losses * mask) / hax.maximum(hax.sum(mask), 1)).scalar()


optimizer = optax.adamw(3e-3)


@jax.jit
def train_step(model, opt_state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(model, rows)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    return optax.apply_updates(model, updates), opt_state, loss
