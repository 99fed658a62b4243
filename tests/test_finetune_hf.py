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
from cases import assert_close, assert_same_bits, auto_mesh
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import dynamiq_jax as dq

N, VOCAB, DIM, HIDDEN, LAYERS, HEADS, LENGTH = 8, 97, 48, 80, 2, 4, 40
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CASES = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "num_key_value_heads": None},
    "llama-grouped-tied": {
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 500.0,
        "tie_word_embeddings": True,
    },
    "llama3": {"model_type": "llama", "num_key_value_heads": 1, "rope_scaling": LLAMA3},
    "llama3-newer-file": {
        "model_type": "llama", "num_key_value_heads": 2,
        "rope_parameters": LLAMA3 | {"rope_theta": 2000.0},
    },
}  # fmt: skip


# --- Checkpoints as others write them -------------------------------------------------------------


def config_of(case):
    return CASES[case] | {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
        "hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip


def sizes(config):
    """(query channels, key channels, whether the head is the embedding)."""
    head_dim = config.get("head_dim") or DIM // HEADS
    kv_heads = config["num_key_value_heads"] or HEADS
    tied = config.get("tie_word_embeddings", False)
    return HEADS * head_dim, kv_heads * head_dim, tied


def random_tensors(config, dtype=np.float32):
    q_dim, kv_dim, tied = sizes(config)
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, DIM)
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,),
            "self_attn.q_proj": (q_dim, DIM), "self_attn.k_proj": (kv_dim, DIM),
            "self_attn.v_proj": (kv_dim, DIM), "self_attn.o_proj": (DIM, q_dim),
            "mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM),
            "mlp.down_proj": (DIM, HIDDEN),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, config, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        own = {name: tensors[name] for name in sorted(tensors)[k::shards]}
        save_file(own, folder / file, metadata={"format": "pt"})
    return folder


def logits(folder, tokens):
    config = finetune_hf.read_config(folder / "config.json")
    params, _ = finetune_hf.load_params(folder, config)
    return np.asarray(llm_model.make_forward(config)(params, jnp.asarray(tokens)))


def random_tokens():
    return np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH), np.int32)


# --- Logits ---------------------------------------------------------------------------------------


def frequencies(config, head_dim):
    """Radians per position of each pair, by the published rules, pair by pair."""
    newer = config.get("rope_parameters") or {}
    scaling = newer or config.get("rope_scaling")
    base = newer.get("rope_theta", config.get("rope_theta", 10_000.0))
    plain = [1.0 / base ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if not scaling:
        return plain
    factor, low, high, length = (scaling[name] for name in list(LLAMA3)[1:])
    scaled = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength > length / low:
            scaled.append(frequency / factor)
        elif wavelength < length / high:
            scaled.append(frequency)
        else:
            smooth = (length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


def reference_logits(config, tensors, tokens):
    """One sequence, in f64, head by head; positions turn complex numbers."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    q_dim, kv_dim, tied = sizes(config)
    head_dim = q_dim // HEADS
    half, group = head_dim // 2, q_dim // kv_dim

    def norm(x, name):
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + config.get("rms_norm_eps", 1e-6)) * w[f"{name}.weight"]

    def turn(x):
        angles = np.outer(np.arange(len(x)), frequencies(config, head_dim))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=1)

    def activation(x):
        return x / (1 + np.exp(-x))

    x = w["model.embed_tokens.weight"][tokens]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        y, out = norm(x, f"{at}.input_layernorm"), []
        q, k, v = (y @ w[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
        for head in range(HEADS):
            own = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(head // group * head_dim, (head // group + 1) * head_dim)
            scores = turn(q[:, own]) @ turn(k[:, shared]).T / np.sqrt(head_dim) + future
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(shares / shares.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(out, axis=1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (activation(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


@pytest.mark.release
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_published_formulas(case, tmp_path):
    config, tokens = config_of(case), random_tokens()
    tensors = random_tensors(config)
    found = logits(write(tmp_path / case, config, tensors), tokens)
    expected = np.stack([reference_logits(config, tensors, row) for row in tokens])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# --- In and out -----------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_saved_again_weights_are_the_same(dtype, tmp_path):
    config = config_of("llama")
    source = write(tmp_path / "source", config, random_tensors(config, dtype), 3)
    (source / "tokenizer.json").write_text("{}")
    shape = finetune_hf.read_config(source / "config.json")
    params, dtypes = finetune_hf.load_params(source, shape)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    target = tmp_path / "target"
    finetune_hf.new_folder(target, source)
    finetune_hf.save_params(jax.device_put(params), shape, target, dtypes)
    files = {file.name for file in target.iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    after, before = load_file(target / "model.safetensors"), random_tensors(config, dtype)
    assert after.keys() == before.keys() and all(after[n].dtype == dtype for n in after)
    assert_same_bits([after[name] for name in before], [before[name] for name in before])
    with pytest.raises(FileExistsError, match="target is there already"):
        finetune_hf.new_folder(target)


def test_what_the_model_does_not_compute_is_refused(tmp_path):
    config, file = config_of("llama"), tmp_path / "config.json"
    for field, words in (
        ({"model_type": "gemma2"}, "model_type='gemma2', supported: llama"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn', supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', supported"),
        ({"attention_bias": True}, "has biases"),
        ({"quantization_config": {"bits": 4}}, "has quantized weights"),
        ({"partial_rotary_factor": 0.5}, "has partial rotations"),
    ):
        file.write_text(json.dumps(config | field))
        with pytest.raises(ValueError, match=words):
            finetune_hf.read_config(file)
    tensors = random_tensors(config)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((DIM, HIDDEN), np.float32)
    folder = write(tmp_path / "wrong", config, tensors)
    shape = finetune_hf.read_config(folder / "config.json")
    words = r"up_proj.weight: \(48, 80\), \(80, 48\); model.norm.weight: missing, \(48,\)"
    with pytest.raises(ValueError, match=words):
        finetune_hf.load_params(folder, shape)


# --- Rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert run("make-tiny", folder).exit_code == 0
    return folder


def encoder(folder, template="plain"):
    return finetune_hf.Encoder(folder, template, 258)


def test_rows_weigh_the_answer_and_its_end(tiny, tmp_path):
    examples = [("ab", "xyz"), ("", "é"), ("c", "d"), ("too", "l" * 9)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in examples]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    make = encoder(tiny)
    ids = make.tokenizer.token_to_id
    rows = finetune_hf.read_rows(make, tmp_path / "rows.jsonl", 8)
    first = [ids("<s>"), ids("a"), ids("b"), ids("Ċ"), ids("x"), ids("y"), ids("z"), ids("</s>")]
    assert rows.tokens.tolist()[0] == first
    assert rows.weights.astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0],
    ]  # fmt: skip
    learned = [list(t[1:][w > 0]) for t, w in zip(rows.tokens, rows.weights, strict=True)]
    assert learned == [make(*example)[1] for example in examples[:3]]
    with pytest.raises(ValueError, match="no token '<.eot_id.>'; choose"):
        encoder(tiny, "llama3")


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


def some_rows(config, n):
    rng = np.random.default_rng(2)
    weights = (rng.random((n, 12)) < np.linspace(0.1, 0.9, n)[:, None]).astype(np.float32)
    return finetune_hf.Rows(rng.integers(0, config.vocab_size, (n, 13), np.int32), weights)


@pytest.mark.release
def test_loss_is_the_mean_over_answer_tokens_of_all_workers(tmp_path):
    config = config_of("llama-grouped-tied")
    folder = write(tmp_path / "llama", config, random_tensors(config))
    config = finetune_hf.read_config(folder / "config.json")
    params, _ = finetune_hf.load_params(folder, config)
    data = some_rows(config, 2 * N)
    at = logits(folder, data.tokens[:, :-1]).astype(np.float64)
    log_p = at - np.log(np.exp(at).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, data.tokens[:, 1:, None], axis=-1)[..., 0]
    expected = -chosen[data.weights > 0].mean()
    loss_fn, mesh = finetune_hf.make_loss(config), auto_mesh(N)
    batch = next(finetune_hf.train_batches(data, 1, rows=2 * N, seed=0))
    of_one, grads = jax.jit(jax.value_and_grad(loss_fn))(params, *batch)
    parallel = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", method=dq.F32())
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


def losses(output):
    return [float(re.search(f"answers {when}: (.*)", output)[1]) for when in ("before", "after")]


def tuned(folder, out, method):
    """Runs the command; returns its output."""
    shared = "--validation", folder / "validation.jsonl", "--learning-rate", 3e-3, "--steps", 20
    options = "--method", method, "--out", out, *shared
    result = run("train", folder, folder / "train.jsonl", *options)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.release
def test_the_example_learns_as_fast_compressed(tiny, tmp_path):
    output = {method: tuned(tiny, tmp_path / method, method) for method in ("dynamiq", "bf16")}
    (before, after), (_, exact) = losses(output["dynamiq"]), losses(output["bf16"])
    assert before > 5 and after < 2 and after == pytest.approx(exact, rel=0.03)
    assert "wire: dynamiq, 5.0" in output["dynamiq"] and "wire: bf16, 16.0" in output["bf16"]
    config = finetune_hf.read_config(tmp_path / "dynamiq" / "config.json")
    rows = finetune_hf.read_rows(encoder(tiny), tiny / "validation.jsonl", 99)
    evaluate = finetune_hf.make_evaluate(finetune_hf.make_loss(config), shares(auto_mesh(N)), 16)
    params, _ = finetune_hf.load_params(tmp_path / "dynamiq", config)
    assert evaluate(params, rows) == pytest.approx(after, abs=1e-4)


@pytest.mark.release
def test_the_command_says_what_is_wrong(tiny, tmp_path):
    data = tiny / "train.jsonl"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p", "answer": "a"}\n{')
    wrong = {
        "line 2": ("train", tiny, bad, "--out", tmp_path / "out"),
        "is there already": ("train", tiny, data, "--out", tiny),
        "config.json": ("train", tmp_path, data, "--out", tmp_path / "out"),
        "--template": ("train", tiny, data, "--out", tmp_path / "out", "--template", "chatml"),
        "--method": ("train", tiny, data, "--out", tmp_path / "out", "--method", "fp8"),
        "there already": ("make-tiny", tiny),
    }
    for words, arguments in wrong.items():
        result = run(*arguments)
        said = " ".join(re.sub("[─│╭╮╰╯]", " ", result.output).split())
        assert result.exit_code == 2 and words in said, said
    assert not (tmp_path / "out").exists()
