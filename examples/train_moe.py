"""Expert parallelism: tokens travel to their experts and back at 8 bits, forwards and backwards.

    python examples/train_moe.py --exact

Every layer has a feed-forward network (an *expert*) on each device, and a router that sends each
token to two of them, by `dq.all_to_all`. An expert takes at most ``--capacity`` times its even
share of tokens; it drops others, and adds nothing to them. `dq.pmean` averages gradients of all
other parameters at 5 bits. The second run has `jax.lax`'s collectives. Expect (8 virtual devices of
2 busy x86-64 cores, jax 0.10.2):

    exchanges  validation loss  sent MB
    dynamiq             2.5842     0.45
    exact               2.5838     1.72

``sent MB`` is what a worker sends between experts in a step, without padding. Single runs differ by
1% whatever the rounding; docs/experts-and-islands.md has means over seeds.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import train_llm as llm  # asks for 8 virtual CPU devices, before JAX looks for any
import typer
from flax import nnx
from llm_model import MODELS, Config, Llama, linear

import dynamiq_jax as dq

CHOICES, BALANCE = 2, 0.1  # experts of a token, and the weight of the loss of uneven loads
HOW: dict[str, Any] = {"axis_name": llm.AXIS, "tiled": True}
EXACT = partial(jax.lax.all_to_all, **HOW)


class OfExperts(nnx.Param):
    """Matrices of all experts, [experts, inputs, outputs], or in a map those of one worker."""


class Experts(nnx.Module):
    """A layer of experts with its router."""

    def __init__(self, config: Config, n_experts: int, capacity: float, rngs: nnx.Rngs):
        hidden = config.hidden // CHOICES  # a token meets as many hidden units as in a dense layer
        self.capacity, self.router = capacity, linear(config.dim, n_experts, config, rngs)

        def stack(n_in: int, n_out: int, scale: float = 0.02) -> OfExperts:
            return OfExperts(scale * jax.random.normal(rngs.params(), (n_experts, n_in, n_out)))

        self.gate, self.up = stack(config.dim, hidden), stack(config.dim, hidden)
        self.down = stack(hidden, config.dim, 0.02 * (2 * config.n_layers) ** -0.5)

    def __call__(self, x: jax.Array, exchange: Any) -> tuple[jax.Array, jax.Array]:
        """Maps ``[batch, seq, dim]`` to the same shape; also returns how uneven loads are."""
        tokens = x.reshape(-1, x.shape[-1])
        chances = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
        weight, chosen = jax.lax.top_k(chances, CHOICES)  # [tokens, 2]
        weight /= jnp.sum(weight, axis=1, keepdims=True)
        n_experts, limit = chances.shape[1], int(self.capacity * chosen.size / chances.shape[1])
        # A choice's place at its expert: how many chose it before. First choices go first.
        order = jax.nn.one_hot(chosen.T.reshape(-1), n_experts, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(order, axis=0) - 1) * order, axis=1).reshape(CHOICES, -1).T
        sent = jnp.zeros((n_experts, limit, x.shape[-1]), x.dtype)
        sent = sent.at[chosen, place].set(tokens[:, None], mode="drop", unique_indices=True)
        own = exchange(sent, split_axis=0, concat_axis=1)  # [own experts, workers * limit, dim]
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        hidden = nnx.silu(own @ gate) * (own @ up)  # batched products, one for each expert
        back = exchange(hidden @ down, split_axis=1, concat_axis=0)
        found = back.at[chosen, place].get(mode="fill", fill_value=0)  # [tokens, 2, dim]
        y = jnp.einsum("tcd,tc->td", found, weight.astype(x.dtype))
        first = jnp.mean(order[: len(tokens)].astype(jnp.float32), axis=0)
        return y.reshape(x.shape), n_experts * jnp.sum(first * jnp.mean(chances, axis=0))


def objective(model: Any, tokens: jax.Array, exchange: Any) -> tuple[jax.Array, jax.Array]:
    """Returns what is minimised, and the cross-entropy in nats per token alone."""
    x, uneven = model.embed(tokens[:, :-1]), jnp.zeros(())
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x))
        y, own = block.mlp(block.mlp_norm(x), exchange)
        x, uneven = x + y, uneven + own / len(model.blocks)
    logits = model.head(model.norm(x)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss + BALANCE * uneven, loss


def make_programs(run: llm.Run, make_layer: Any, exchange: Any, mean: Any) -> tuple:
    """Returns ``init(key)``, ``step``, and ``loss(params, tokens)``, whose exchanges are exact.

    ``step(params, opt_state, tokens) -> (params, opt_state, loss)``; params are [experts', shared].
    """
    optimizer = llm.make_optimizer(run.recipe, optax.identity())  # clips nothing

    def make(key: jax.Array) -> nnx.Module:
        model = Llama(run.model, rngs := nnx.Rngs(key))
        for block in model.blocks:
            block.mlp = make_layer(run.model, rngs=rngs)
        return model

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, *params = nnx.split(make(key), OfExperts, nnx.Param)
        return params, optimizer.init(params)

    key, mapped, each = jax.random.key(0), partial(jax.shard_map, mesh=run.mesh), jax.P(llm.AXIS)
    graph = nnx.graphdef(nnx.eval_shape(make, key))
    # Matrices of experts and their moments are the only arrays of three dimensions.
    specs = jax.tree.map(lambda x: each if x.ndim == 3 else jax.P(), jax.eval_shape(init, key))

    @dq.jit(donate_argnums=(0, 1))
    @partial(mapped, in_specs=(*specs, each), out_specs=(*specs, jax.P()))
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, ...]:
        # Without the cast JAX sums the gradients of replicated parameters itself, in f32.
        own = [params[0], jax.lax.pcast(params[1], llm.AXIS, to="varying")]
        local = jax.grad(lambda p: objective(nnx.merge(graph, *p), tokens, exchange), has_aux=True)
        (experts, shared), value = local(own)
        # Experts' gradients are sums over all workers' tokens already; the loss is a mean.
        grads = [jax.tree.map(lambda g: g / run.mesh.size, experts), mean(shared)]
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(value, llm.AXIS)

    @partial(mapped, in_specs=(specs[0], each), out_specs=jax.P())
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.lax.pmean(objective(nnx.merge(graph, *params), tokens, EXACT)[1], llm.AXIS)

    placed = jax.tree.map(lambda spec: jax.NamedSharding(run.mesh, spec), specs)
    return jax.jit(init, out_shardings=placed), step, loss


def main(
    model: Annotated[str, typer.Option(help=MODELS)] = "tiny",
    bits: Annotated[int, typer.Option(min=2, max=14, help="of a code between experts")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="on each device")] = 1,
    capacity: Annotated[float, typer.Option(help="places of an expert, over its share")] = 1.25,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    exact: Annotated[bool, typer.Option(help="jax.lax's collectives, too")] = False,
) -> None:
    """Trains a LLaMA-style model of experts, with tokens compressed on their ways."""
    llm.check_choice(model, llm.RECIPES, "--model")
    run, _ = llm.start(model, llm.RECIPES[model]._replace(steps=steps), seed=0)
    layer = partial(Experts, n_experts=experts * run.mesh.size, capacity=capacity)
    small = partial(dq.Compression, min_bucket_size=32_768, min_bucket_bytes=0)  # tiny's, too
    mean = partial(dq.pmean, axis_name=llm.AXIS, compression=small(dq.DynamiQ(bits=5)))
    codes = small(dq.DynamiQ(bits=bits + 0.5))
    codes = dq.Policy(activations=codes, cotangents=codes)
    rows = [("dynamiq", bits + 11 / 32, partial(dq.all_to_all, **HOW, compression=codes), mean)]
    wide, table = 8 * jnp.dtype(run.model.dtype).itemsize, ["exchanges  validation loss  sent MB"]
    rows.append(("exact", wide, EXACT, partial(jax.lax.pmean, axis_name=llm.AXIS)))
    for name, wire, *ways in rows[: 1 + exact]:
        init, step, loss = make_programs(run, layer, *ways)
        places = capacity * CHOICES * run.recipe.batch_size * run.model.seq_len
        sent = 4 * run.model.n_layers * run.model.dim * places * (1 - 1 / run.mesh.size) * wire / 8
        found = llm.Result(method=name, wire_bytes=sent, bits_per_coord=wire)
        llm.fit(replace(run, loss_fn=loss), found, step, *init(jax.random.key(run.seed)))
        table.append(f"{name:9}{found.validation_loss:17.4f}{sent / 1e6:9.2f}")
    print("\n".join(table))


if __name__ == "__main__":
    typer.run(main)
