"""The example of experts: its layer against a loop over tokens, training, and what travels."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import train_llm
import train_moe
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_llm import CONFIG, make_run, sequences
from workers import auto_mesh

N = 8
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CONFIG = replace(CONFIG, seq_len=64)


def test_a_step_follows_the_gradient_of_the_mean_loss(monkeypatch):
    """Two experts on each worker; the gradient is JAX's through the map of the exact loss."""
    monkeypatch.setattr(train_moe, "BALANCE", 0.0)
    monkeypatch.setattr(train_llm, "make_optimizer", lambda *args: optax.sgd(1.0))
    run = make_run(model=CONFIG, recipe=train_llm.Recipe(6, 2, 1e-2, 1))
    layer = partial(train_moe.Experts, n_experts=2 * N, capacity=1.25)
    mean = partial(jax.lax.pmean, axis_name="data")
    init, step, loss = train_moe.make_programs(run, layer, train_moe.EXACT, mean)
    tokens, state = run.shard(sequences(CONFIG)), init(jax.random.key(0))
    start = jax.device_get(state[0])
    expected = jax.device_get(jax.jit(jax.grad(loss))(state[0], tokens))
    after = jax.device_get(step(*state, tokens)[0])
    moved = jax.tree.map(np.subtract, start, after)
    for found, exact in zip(*map(jax.tree.leaves, (moved, expected)), strict=True):
        assert np.max(np.abs(exact)) > 0
        np.testing.assert_allclose(found, exact, atol=2e-6)


def test_experts_serve_their_first_tokens_and_drop_the_others():
    """Against a loop over tokens of every worker; 1.25 of an even share is 5 places."""
    tokens, dim = 16, CONFIG.dim
    model = train_moe.Experts(CONFIG, N, 1.25, nnx.Rngs(0))
    graph, own, shared = nnx.split(model, train_moe.OfExperts, nnx.Param)
    shared = jax.tree.map(lambda w: 20 * w, shared)
    x = np.float32(np.random.default_rng(1).standard_normal((N, tokens, dim)))

    def layer(own, x):
        return nnx.merge(graph, own, shared)(x, train_moe.EXACT)[0]

    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    found = np.asarray(jax.jit(jax.shard_map(layer, mesh=auto_mesh(N), **specs))(own, x))
    router, gate, up, down = (
        np.float64(w[...])
        for w in (20 * model.router.kernel[...], model.gate, model.up, model.down)
    )
    drops = 0
    for worker in range(N):
        logits = x[worker] @ router
        chosen = np.argsort(-logits, axis=1)[:, :2]
        chances = np.take_along_axis(np.exp(logits), chosen, axis=1)
        chances /= np.sum(chances, axis=1, keepdims=True)
        expected, served = np.zeros((tokens, dim)), np.zeros(N, int)
        for choice in range(2):
            for token in range(tokens):
                e = chosen[token, choice]
                served[e] += 1
                if served[e] > int(1.25 * 2 * tokens / N):
                    drops += 1
                    continue
                hidden = x[worker, token] @ gate[e]
                hidden = hidden / (1 + np.exp(-hidden)) * (x[worker, token] @ up[e])
                expected[token] += chances[token, choice] * (hidden @ down[e])
        np.testing.assert_allclose(found[worker], expected, atol=1e-6 + 1e-4 * np.max(expected))
    assert 5 < drops < N * tokens


@pytest.mark.release
def test_the_example_trains_and_compares(capsys):
    train_moe.main(steps=3, exact=True)
    row = re.compile(r"^(dynamiq|exact) +([\d.]+) +([\d.]+)$", re.MULTILINE)
    (name, loss, sent), (exact, expected, whole) = row.findall(capsys.readouterr().out)
    assert (name, exact) == ("dynamiq", "exact")
    assert float(loss) == pytest.approx(float(expected), rel=5e-3)
    size = 8 * 40 * 192  # places times channels; four exchanges in each of two layers
    assert float(whole) == pytest.approx(4 * 2 * size * 7 / 8 * 4 / 1e6, rel=5e-3)
    assert float(sent) == pytest.approx(float(whole) * 8.34 / 32, rel=0.02)
    assert len(Path(train_moe.__file__).read_text().splitlines()) <= 165
