"""The fine-tuning example: weights in and out, logits, the loss of answers, what is refused."""

import json
import re

import finetune_hf
import jax
import jax.numpy as jnp
import llm_model
import ml_dtypes
import numpy as np
import pytest
from asserts import assert_close, assert_same_bits
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner
from workers import auto_mesh

import dynamiq_jax as dq

N, VOCAB, DIM, HIDDEN, HEADS = 8, 97, 48, 80, 4
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CASES = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "num_key_value_heads": None},
    "llama3": {
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 500.0,
        "rope_scaling": LLAMA3, "tie_word_embeddings": True,
    },
    "newer file": {
        "model_type": "llama", "num_key_value_heads": 2,
        "rope_parameters": LLAMA3 | {"rope_theta": 2000.0},
    },
}  # fmt: skip


# --- Logits ---------------------------------------------------------------------------------------


def config_of(case):
    return CASES[case] | {
        "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": HIDDEN,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "max_position_embeddings": 64,
    }  # fmt: skip


def write(folder, case, dtype=np.float32, shards=1, **changed):
    """A checkpoint as others write it, and its tensors by the names of theirs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    rng, tensors = np.random.default_rng(0), {}
    for name, _, shape in finetune_hf.leaves(finetune_hf.read_config(folder))[0]:
        tensors[name] = rng.normal(0, 0.3, shape).astype(dtype)
    held = {name: x for name, x in (tensors | changed).items() if x is not None}
    for k in range(shards):
        own = {name: held[name] for name in sorted(held)[k::shards]}
        save_file(own, folder / f"model-{k}.safetensors", metadata={"format": "pt"})
    return tensors


def read(folder):
    config = finetune_hf.read_config(folder)
    return config, *finetune_hf.load_params(folder, config)


def logits(folder, tokens):
    config, params, _ = read(folder)
    return np.asarray(llm_model.make_forward(config)(params, jnp.asarray(tokens)), np.float64)


def frequencies(config, head_dim):
    """Radians per position of each pair, by the published rules."""
    newer = config.get("rope_parameters") or {}
    scaling = newer or config.get("rope_scaling")
    base = newer.get("rope_theta", config.get("rope_theta", 10_000.0))
    plain = 1.0 / base ** (np.arange(0, head_dim, 2) / head_dim)
    if not scaling:
        return plain
    factor, low, high, length = (scaling[name] for name in list(LLAMA3)[1:])
    smooth = (length * plain / (2 * np.pi) - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    long, short = 2 * np.pi / plain > length / low, 2 * np.pi / plain < length / high
    return np.where(long, plain / factor, np.where(short, plain, between))


def reference_logits(config, tensors, tokens):
    """One sequence, in f64; positions turn complex numbers."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    head_dim = config.get("head_dim") or DIM // HEADS
    angles = np.outer(np.arange(len(tokens)), frequencies(config, head_dim))[:, None]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)

    def norm(x, name):
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + config.get("rms_norm_eps", 1e-6)) * w[f"{name}.weight"]

    def turn(x):
        z = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=-1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(2):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            (y @ w[f"{at}.self_attn.{name}_proj.weight"].T).reshape(len(y), -1, head_dim)
            for name in "qkv"
        )
        k, v = (np.repeat(z, HEADS // z.shape[1], axis=1) for z in (k, v))
        scores = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / np.sqrt(head_dim) + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(y), -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    tied = config.get("tie_word_embeddings")
    head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


@pytest.mark.release
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_published_formulas(case, tmp_path):
    tensors = write(tmp_path / case, case)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 40), np.int32)
    found = logits(tmp_path / case, tokens)
    expected = np.stack([reference_logits(config_of(case), tensors, row) for row in tokens])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# --- In and out -----------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_saved_again_weights_are_the_same(dtype, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    before = write(source, "llama", dtype, shards=3)
    (source / "tokenizer.json").write_text("{}")
    config, params, dtypes = read(source)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    finetune_hf.new_folder(target, source)
    finetune_hf.save_params(jax.device_put(params), config, target, dtypes)
    files = {file.name for file in target.iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert_same_bits(load_file(target / "model.safetensors"), before)


UNKNOWN = [
    ({"model_type": "gemma2"}, "model_type='gemma2', supported: llama"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn', supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu', supported"),
    ({"attention_bias": True}, "has biases"),
    ({"quantization_config": {"bits": 4}}, "has quantized weights"),
    ({"partial_rotary_factor": 0.5}, "has partial rotations"),
]


def test_what_the_model_does_not_compute_is_refused(tmp_path):
    for field, words in UNKNOWN:
        (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | field))
        with pytest.raises(ValueError, match=words):
            finetune_hf.read_config(tmp_path)
    up = {"model.layers.0.mlp.up_proj.weight": np.zeros((DIM, HIDDEN), np.float32)}
    write(tmp_path / "wrong", "llama", **up, **{"model.norm.weight": None})
    words = r"up_proj.weight: \(48, 80\), \(80, 48\); model.norm.weight: missing, \(48,\)"
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "wrong")


# --- Rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert run("make-tiny", folder).exit_code == 0
    return folder


def test_rows_weigh_the_answer_and_its_end(tiny, tmp_path):
    examples = [("ab", "xyz"), ("", "é"), ("c", "d"), ("too", "l" * 9)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in examples]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    encode = finetune_hf.make_encoder(tiny, "plain", 258)
    rows = finetune_hf.read_rows(encode, tmp_path / "rows.jsonl", 8)
    of_token = Tokenizer.from_file(str(tiny / "tokenizer.json")).token_to_id
    first = ["<s>", "a", "b", "Ċ", "x", "y", "z", "</s>"]
    assert rows.tokens.tolist()[0] == list(map(of_token, first))
    assert rows.weights.astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0],
    ]  # fmt: skip
    learned = [list(t[1:][w > 0]) for t, w in zip(rows.tokens, rows.weights, strict=True)]
    assert learned == [encode(*example)[1] for example in examples[:3]]
    with pytest.raises(ValueError, match="no token '<.eot_id.>'; choose"):
        finetune_hf.make_encoder(tiny, "llama3", 258)


def test_every_pass_sees_each_example_once_in_another_order():
    rows = finetune_hf.Rows(np.tile(np.arange(10)[:, None], (1, 3)), np.ones((10, 2)))
    batches = list(finetune_hf.train_batches(rows, 5, rows=4, seed=0))
    seen = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert list(seen[:10]) != list(seen[10:])
    other = next(finetune_hf.train_batches(rows, 1, rows=4, seed=1))
    assert list(other.tokens[:, 0]) != list(seen[:4])


# --- Loss and training ----------------------------------------------------------------------------


def shares(mesh):
    return jax.NamedSharding(mesh, jax.P("data"))


@pytest.mark.release
def test_loss_is_the_mean_over_answer_tokens_of_all_workers(tmp_path):
    write(tmp_path / "llama", "llama3")
    config, params, _ = read(tmp_path / "llama")
    rng, n = np.random.default_rng(2), 2 * N
    tokens = rng.integers(0, VOCAB, (n, 13), np.int32)
    weights = (rng.random((n, 12)) < np.linspace(0.1, 0.9, n)[:, None]).astype(np.float32)
    data = finetune_hf.Rows(tokens, weights)
    at = logits(tmp_path / "llama", tokens[:, :-1])
    log_p = at - np.log(np.exp(at).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    expected = -chosen[weights > 0].mean()
    loss_fn, mesh = finetune_hf.make_loss(config), auto_mesh(N)
    batch = next(finetune_hf.train_batches(data, 1, rows=n, seed=0))
    of_one, grads = jax.jit(jax.value_and_grad(loss_fn))(params, *batch)
    parallel = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", compression=dq.F32())
    of_all, mean = parallel(params, *batch)
    np.testing.assert_allclose([of_one, of_all], expected, rtol=1e-5)
    assert_close(mean, grads, rtol=1e-3)
    evaluate = finetune_hf.make_evaluate(loss_fn, shares(mesh), rows=3 * N)  # of 2 * N
    assert evaluate(params, data) == pytest.approx(expected, rel=1e-5)


def run(*arguments):
    result = CliRunner().invoke(finetune_hf.app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.release
def test_the_example_learns_as_fast_compressed(tiny, tmp_path):
    options = ["--validation", tiny / "validation.jsonl", "--learning-rate", 3e-3, "--steps", 20]
    losses = {}
    for method, bits in (("dynamiq", "5.0"), ("bf16", "16.0")):
        told = "--method", method, "--out", tmp_path / method, *options
        result = run("train", tiny, tiny / "train.jsonl", *told)
        assert result.exit_code == 0, result.output
        assert f"wire: {method}, {bits}" in result.output
        losses[method] = [float(x) for x in re.findall("answers .*: (.*)", result.output)]
    before, after = losses["dynamiq"]
    assert before > 5 and after < 2 and after == pytest.approx(losses["bf16"][1], rel=0.03)
    config, params, _ = read(tmp_path / "dynamiq")
    encode = finetune_hf.make_encoder(tiny, "plain", 258)
    rows = finetune_hf.read_rows(encode, tiny / "validation.jsonl", 99)
    evaluate = finetune_hf.make_evaluate(finetune_hf.make_loss(config), shares(auto_mesh(N)), 16)
    assert evaluate(params, rows) == pytest.approx(after, abs=1e-4)


@pytest.mark.release
def test_the_command_says_what_is_wrong(tiny, tmp_path):
    data, bad, out = tiny / "train.jsonl", tmp_path / "bad.jsonl", ("--out", tmp_path / "out")
    bad.write_text('{"prompt": "p", "answer": "a"}\n{')
    wrong = {
        "line 2": ("train", tiny, bad, *out),
        "is there already": ("train", tiny, data, "--out", tiny),
        "as Hugging Face has them": ("train", tmp_path, data, *out),
        "--template": ("train", tiny, data, *out, "--template", "chatml"),
        "--method": ("train", tiny, data, *out, "--method", "fp8"),
        "there already": ("make-tiny", tiny),
    }
    for words, arguments in wrong.items():
        result = run(*arguments)
        said = re.sub(r"[─│╭╮╰╯\s]", "", result.output)  # lines break within words, too
        assert result.exit_code == 2 and words.replace(" ", "") in said, said
    assert not (tmp_path / "out").exists()
