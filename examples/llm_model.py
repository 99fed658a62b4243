"""A LLaMA-style decoder in Flax NNX: RMSNorm, rotary positions, gated feed-forward layers.

The examples train it as a pure function: parameters are a pytree (``nnx.State``), and
``make_loss`` returns ``loss(params, tokens)``. Parameters are f32; matrix products run in
``Config.dtype``.

``Config.init`` decides the deviations of the initial weights. "gpt2" is GPT-2's: 0.02 everywhere,
and 0.02 / sqrt(2 layers) for the matrices that write into the residual stream. "unit" starts with
activations of unit variance at every width: embedding 1, matrices 1 / sqrt(inputs), of which those
into the residual stream are divided by sqrt(2 layers), too, and the head by 4.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

Init = Literal["gpt2", "unit"]
INITS = get_args(Init)
AttentionKernel = Literal["xla", "cudnn"]
Loss = Callable[[Any, jax.Array], jax.Array]
Whole = Callable[[Any], Any]
"""From a module that holds shards of its parameters to the same module with all of them."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """LLaMA 3.1's slower rotation, for sequences longer than those of the first training.

    Pairs that turn less than ``low`` times in ``original_length`` positions turn ``factor`` times
    slower, those that turn more than ``high`` times as before; linear in the turns between.
    """

    factor: float
    low: float
    high: float
    original_length: int

    def __call__(self, frequency: jax.Array) -> jax.Array:
        """Scales ``frequency``, in radians per position."""
        turns = self.original_length * frequency / (2 * jnp.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a model and of its training sequences, and how its weights start."""

    vocab_size: int
    seq_len: int
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    hidden: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    init: Init = "gpt2"
    remat: bool = False  # recompute each block in the backward pass: less memory, a third more work
    head_dim: int | None = None  # default: dim // n_heads
    tied: bool = False  # the head is the embedding, transposed
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention: AttentionKernel = "xla"  # "cudnn" is flash attention, on NVIDIA GPUs in bf16

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.head_dim or self.dim // self.n_heads


CONFIGS = {
    # 1.1M parameters, bytes: minutes on a laptop's CPU.
    "tiny": Config(
        vocab_size=256, seq_len=64, n_layers=2, dim=192, n_heads=6, n_kv_heads=6, hidden=576,
        dtype=jnp.float32,
    ),
    # 123M parameters, the size of GPT-2 small.
    "125m": Config(
        vocab_size=24_576, seq_len=1024, n_layers=12, dim=768, n_heads=12, n_kv_heads=12,
        hidden=2048,
    ),
    # 358M parameters, the size of GPT-2 medium.
    "350m": Config(
        vocab_size=24_576, seq_len=1024, n_layers=24, dim=1024, n_heads=16, n_kv_heads=16,
        hidden=2816,
    ),
    # 1.1B parameters, the shape of LLaMA 3.2 1B (with a smaller vocabulary).
    "1b": Config(
        vocab_size=32_768, seq_len=1024, n_layers=16, dim=2048, n_heads=32, n_kv_heads=8,
        hidden=8192, remat=True,
    ),
    # 6.7B parameters, the shape of LLaMA 2 7B (with shorter sequences).
    "7b": Config(
        vocab_size=32_000, seq_len=1024, n_layers=32, dim=4096, n_heads=32, n_kv_heads=32,
        hidden=11_008, remat=True,
    ),
}  # fmt: skip
MODELS = f"one of {', '.join(CONFIGS)}"
"""The help of ``--model``."""


def rotate(x: jax.Array, base: float = 10_000.0, scaling: RopeScaling | None = None) -> jax.Array:
    """Rotary positions: turns the pairs (x[i], x[i + head_dim/2]) by position x frequency i.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        base: the slowest pair turns about once in 2*pi*base positions.
        scaling: changes the frequencies, if given.
    """
    seq_len, head_dim = x.shape[1], x.shape[-1]
    frequency = base ** (-jnp.arange(head_dim // 2) / (head_dim // 2))
    frequency = scaling(frequency) if scaling else frequency
    angle = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * frequency[None]
    angle = angle[None, :, None]  # [1, seq, 1, head_dim/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def linear(n_in: int, n_out: int, config: Config, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    """A matrix without bias whose weights start at ``scale`` times ``config.init``'s deviation."""
    deviation = {"gpt2": 0.02, "unit": n_in**-0.5}[config.init]
    init = nnx.initializers.normal(scale * deviation)
    return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, dtype=config.dtype, rngs=rngs)


def make_norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The norm over the channels."""
    return nnx.RMSNorm(config.dim, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention; ``n_kv_heads`` keys and values serve ``n_heads`` queries."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.head_dim = config.head_size
        self.rope_base, self.rope_scaling = config.rope_base, config.rope_scaling
        self.implementation: AttentionKernel = config.attention
        q_dim, kv_dim = (n * self.head_dim for n in (config.n_heads, config.n_kv_heads))
        self.q = linear(config.dim, q_dim, config, rngs)
        self.k = linear(config.dim, kv_dim, config, rngs)
        self.v = linear(config.dim, kv_dim, config, rngs)
        self.o = linear(q_dim, config.dim, config, rngs, (2 * config.n_layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, seq, dim]`` to the same shape."""

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q, k = (rotate(heads(y), self.rope_base, self.rope_scaling) for y in (self.q(x), self.k(x)))
        attended = jax.nn.dot_product_attention(
            q, k, heads(self.v(x)), is_causal=True, implementation=self.implementation
        )
        if jax.typeof(q).sharding.mesh.explicit_axes:  # cuDNN's results do not say how they lie
            attended = jax.reshard(attended, jax.typeof(q).sharding)
        return self.o(attended.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate = linear(config.dim, config.hidden, config, rngs)
        self.up = linear(config.dim, config.hidden, config, rngs)
        self.down = linear(config.hidden, config.dim, config, rngs, (2 * config.n_layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, seq, dim]`` to the same shape."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One decoder layer: attention and feed-forward, each behind a norm, each added to x."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = make_norm(config, rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, seq, dim]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def make_blocks(config: Config, rngs: nnx.Rngs) -> list[Block]:
    """The blocks, with the weights of as many calls of `Block` one after the other.

    A loop draws them, so that compilation takes as long for one as for all: XLA merges the draws of
    one shape into one GPU kernel, and those of twelve layers would take it a minute.
    """

    @nnx.scan(in_axes=nnx.Carry, out_axes=(nnx.Carry, 0), length=config.n_layers)
    def draw(rngs: nnx.Rngs) -> tuple[nnx.Rngs, Block]:
        return rngs, Block(config, rngs)

    _, stacked = draw(rngs)
    definition, state = nnx.split(stacked)
    return [
        nnx.merge(definition, jax.tree.map(itemgetter(i), state)) for i in range(config.n_layers)
    ]


class Llama(nnx.Module):
    """Token ids ``int32[batch, seq]`` to next-token logits ``[batch, seq, vocab]``."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.remat = config.remat
        self.embed = nnx.Embed(
            config.vocab_size, config.dim, dtype=config.dtype, rngs=rngs,
            embedding_init=nnx.initializers.normal({"gpt2": 0.02, "unit": 1.0}[config.init]),
        )  # fmt: skip
        # A list, not a stack: every layer's gradient is ready as soon as its backward is done, so
        # its all-reduce can overlap with the layers below.
        self.blocks = nnx.List(make_blocks(config, rngs))
        self.norm = make_norm(config, rngs)
        head_scale = {"gpt2": 1.0, "unit": 0.25}[config.init]
        self.head = (
            None if config.tied else linear(config.dim, config.vocab_size, config, rngs, head_scale)
        )

    def __call__(self, tokens: jax.Array, whole: Whole = lambda module: module) -> jax.Array:
        """Predicts at each position the token that follows it; ``whole`` precedes every use."""

        def run(block: Block, x: jax.Array) -> jax.Array:
            return whole(block)(x)

        x = whole(self.embed)(tokens)
        run = nnx.remat(run) if self.remat else run
        for block in self.blocks:
            x = run(block, x)
        head = whole(self.embed).attend if self.head is None else whole(self.head)
        return head(whole(self.norm)(x))


def init_params(config: Config, key: jax.Array) -> nnx.State:
    """Fresh parameters. Pure: wrap it in ``jax.jit(..., out_shardings=...)`` to place them."""
    return nnx.state(Llama(config, nnx.Rngs(key)))


def param_specs(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """How parameters are split over the axes "model" and "fsdp" of a mesh, where it has them.

    Tensor parallelism splits what a matrix makes or what it takes: heads and hidden units, so that
    two matrices in a row need one sum of activations. FSDP splits the other dimension.
    """
    model, fsdp = (name if name in mesh.axis_names else None for name in ("model", "fsdp"))
    takes, makes = P(model, fsdp), P(fsdp, model)
    by_module = {"o": takes, "down": takes}
    by_module |= dict.fromkeys(("q", "k", "v", "gate", "up", "embed", "head"), makes)

    def of_leaf(path: tuple, leaf: Any) -> P:
        if leaf.ndim < 2:
            return P()  # the norms' scales
        names = (getattr(entry, "key", None) for entry in path)
        return next(by_module[name] for name in names if name in by_module)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Operations per second in dense bf16, by how the names of devices begin."""


def peak_flops(device_kind: str) -> float | None:
    """A device's peak in FLOP/s; `None` where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if device_kind.startswith(name)), None)


def training_flops(config: Config, params: Any, tokens: int) -> float:
    """Operations of the forward and backward pass over so many tokens, in whole sequences.

    6 for every parameter of a matrix and token, and ``6 * layers * heads * head_size * sequence``
    per token for causal attention. What is computed again, or masked, does not count.
    """
    matrices = sum(p.size for p in jax.tree.leaves(params) if p.ndim > 1)
    if not config.tied:
        matrices -= config.vocab_size * config.dim  # looking rows up multiplies nothing
    attention = 6 * config.n_layers * config.n_heads * config.head_size * config.seq_len
    return tokens * (6.0 * matrices + attention)


@functools.cache
def make_forward(config: Config) -> Callable[..., jax.Array]:
    """Returns ``forward(params, tokens, whole=...)``: the logits, as of `Llama`, in its dtype."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))

    def forward(params: nnx.State, tokens: jax.Array, whole: Whole = lambda m: m) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, whole)

    return forward


def make_loss(config: Config, whole: Whole = lambda module: module) -> Loss:
    """Returns ``loss(params, tokens)``: mean cross-entropy in nats per token.

    ``tokens`` is ``int32[batch, seq_len + 1]``: each position predicts the next one. If ``params``
    are shards, ``whole`` completes those of one module (embedding, block, norm, head) at a time;
    with ``config.remat`` those of a block once more in its backward pass.
    """
    forward = make_forward(config)

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = forward(params, tokens[:, :-1], whole)
        per_token = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return per_token.mean()

    return loss


class Stages(NamedTuple):
    """A model as functions that follow each other, for `dq.overlapped`."""

    functions: tuple[Callable[[Any, Any], Any], ...]
    """The embedding, every block or a scan over them, and the head with the loss."""
    split: Callable[[nnx.State], tuple[Any, ...]]
    """From the model's parameters to those of each function."""

    def loss(self, parts: Sequence[Any], tokens: jax.Array) -> jax.Array:
        """The loss of parameters that are split, as `dq.overlapped` computes it."""
        x: Any = tokens
        for function, own in zip(self.functions, parts, strict=True):
            x = function(own, x)
        return x


def make_stages(config: Config, scanned: bool = False) -> Stages:
    """Cuts the loss of `make_loss` into functions, which compute it from ``tokens``.

    Args:
        config: of the model.
        scanned: whether one function, a `dq.Scanned`, stands for all blocks. Their parameters are
            then stacked, and the program does not grow with their number.

    Raises:
        ValueError: the head is the embedding: two functions would use it.
    """
    if config.tied:
        raise ValueError("tied=True: the head is the embedding; pass a model with its own head")
    one_block = dataclasses.replace(config, n_layers=1)  # as all the others, and made in less time
    whole = nnx.eval_shape(lambda: Llama(one_block, nnx.Rngs(0)))
    graphs = {name: nnx.graphdef(getattr(whole, name)) for name in ("embed", "norm", "head")}
    block_graph = nnx.graphdef(whole.blocks[0])

    def embed(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nnx.merge(graphs["embed"], params)(tokens[:, :-1])
        return x, tokens[:, 1:]

    def block(params: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(block_graph, params)(carry[0]), carry[1]

    def head(params: Any, carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = carry
        for name in ("norm", "head"):
            x = nnx.merge(graphs[name], params[name])(x)
        return optax.softmax_cross_entropy_with_integer_labels(
            x.astype(jnp.float32), targets
        ).mean()

    def split(params: nnx.State) -> tuple[Any, ...]:
        blocks = [params["blocks"][i] for i in range(config.n_layers)]
        if scanned:
            blocks = [jax.tree.map(lambda *rows: jnp.stack(rows), *blocks)]
        return params["embed"], *blocks, {name: params[name] for name in ("norm", "head")}

    one = jax.checkpoint(block) if config.remat else block
    middle = [dq.Scanned(one)] if scanned else [one] * config.n_layers
    return Stages((embed, *middle, head), split)
