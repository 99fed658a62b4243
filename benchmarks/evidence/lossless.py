"""Bits of gradients that are coded without loss: the entropy of bf16, by steps of a training.

    python benchmarks/evidence/lossless.py --model tiny

One worker trains the example's model on the example's text. Sign and mantissa of a bf16 gradient
are nearly random, and its exponents are not: an entropy coder needs 8 bits and the entropy of the
exponents (ZipCCL, arXiv 2604.27844). The second figure has a code for each leaf.
"""

import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llm_data import load_corpus, train_batch
from llm_model import CONFIGS, init_params, make_loss

SIGN_AND_MANTISSA = 8


def entropy(counts: np.ndarray) -> float:
    """The entropy in bits of codes that occur so often."""
    share = counts[counts > 0] / counts.sum()
    return float(-np.sum(share * np.log2(share)))


def exponents(leaf: jax.Array) -> np.ndarray:
    """How often each of the 256 exponents of bf16 occurs."""
    words = np.asarray(leaf, jnp.bfloat16).view(np.uint16).reshape(-1)
    return np.bincount((words >> 7) & 255, minlength=256)


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(CONFIGS)}")] = "tiny",
    steps: Annotated[str, typer.Option(help="after which steps")] = "1,10,100,200",
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 8,
) -> None:
    """Prints bits of a coordinate after some steps."""
    config, wanted = CONFIGS[model], sorted(map(int, steps.split(",")))
    text = load_corpus(config.vocab_size)
    optimizer, loss = optax.adamw(1e-3), make_loss(config)

    @jax.jit
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    params = init_params(config, jax.random.key(0))
    state = optimizer.init(params)
    print("  step     loss  bits, one code  a code for each leaf")
    for number in range(1, wanted[-1] + 1):
        tokens = train_batch(text, number, rows=batch, length=config.seq_len, seed=0)
        params, state, value, grads = step(params, state, tokens)
        if number in wanted:
            found = [exponents(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))]
            whole = np.sum(found, axis=0)
            by_leaf = sum(counts.sum() * entropy(counts) for counts in found) / whole.sum()
            bits = [SIGN_AND_MANTISSA + each for each in (entropy(whole), by_leaf)]
            print(f"{number:6}  {float(value):7.4f}  {bits[0]:14.2f}  {bits[1]:20.2f}")


if __name__ == "__main__":
    typer.run(main)
