"""The fine-tuning example: weights in and out, logits, the loss of answers, what is refused."""

import json
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import assert_same_bits, auto_mesh
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import dynamiq_jax as dq

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import finetune_hf
import hf_checkpoint
import llm_model
import sft_data

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
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 20},
}  # fmt: skip
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma": "GemmaForCausalLM"}


# --- Checkpoints as others write them -------------------------------------------------------------


def config_of(case):
    return CASES[case] | {
        "architectures": [ARCHITECTURES[CASES[case]["model_type"]]], "vocab_size": VOCAB,
        "hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip


def sizes(config):
    """(query channels, key channels, whether the head is the embedding)."""
    head_dim = config.get("head_dim") or DIM // HEADS
    kv_heads = config["num_key_value_heads"] or HEADS
    tied = config.get("tie_word_embeddings", config["model_type"] == "gemma")
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
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[k % shards] for k, name in enumerate(names)}
    for file in files:
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def written(folder, case, shards=1):
    return write(folder, config_of(case), random_tensors(config_of(case)), shards)


def logits(folder, tokens):
    checkpoint = hf_checkpoint.open_checkpoint(folder)
    params = hf_checkpoint.load_params(checkpoint)
    return np.asarray(llm_model.make_forward(checkpoint.config)(params, jnp.asarray(tokens)))


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
    gemma = config["model_type"] == "gemma"
    q_dim, kv_dim, tied = sizes(config)
    head_dim = q_dim // HEADS
    half, group = head_dim // 2, q_dim // kv_dim

    def norm(x, name):
        scale = w[f"{name}.weight"] + (1.0 if gemma else 0.0)
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + config.get("rms_norm_eps", 1e-6)) * scale
        )

    def turn(x):
        angles = np.outer(np.arange(len(x)), frequencies(config, head_dim))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=1)

    def activation(x):
        if gemma:
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    x = w["model.embed_tokens.weight"][tokens] * (np.sqrt(DIM) if gemma else 1.0)
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


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    reason = "compares with transformers on CPU where torch and transformers are installed"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    folder, tokens = written(tmp_path / case, case), random_tokens()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(folder, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.release
def test_products_in_bf16_stay_close(tmp_path):
    folder, tokens = written(tmp_path / "gemma", "gemma"), jnp.asarray(random_tokens())
    checkpoint = hf_checkpoint.open_checkpoint(folder, dtype=jnp.bfloat16)
    found = llm_model.make_forward(checkpoint.config)(hf_checkpoint.load_params(checkpoint), tokens)
    assert found.dtype == jnp.bfloat16
    exact = logits(folder, tokens)
    assert np.square(np.asarray(found, np.float32) - exact).mean() < 1e-3 * np.square(exact).mean()


# --- In and out -----------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_saved_again_weights_are_the_same(shards, dtype, tmp_path):
    config = config_of("llama")
    source = write(tmp_path / "source", config, random_tensors(config, dtype), shards)
    (source / "tokenizer.json").write_text("{}")
    checkpoint = hf_checkpoint.open_checkpoint(source)
    params = hf_checkpoint.load_params(checkpoint)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    target = tmp_path / "target"
    hf_checkpoint.save_params(jax.device_put(params), checkpoint, target)
    assert sorted(f.name for f in target.iterdir()) == sorted(f.name for f in source.iterdir())
    for file in source.glob("*.safetensors"):
        before, after = load_file(file), load_file(target / file.name)
        assert before.keys() == after.keys()
        assert all(after[name].dtype == dtype for name in after)
        assert_same_bits([after[name] for name in before], [before[name] for name in before])
    again = hf_checkpoint.load_params(hf_checkpoint.open_checkpoint(target))
    assert_same_bits(jax.tree.leaves(again), jax.tree.leaves(params))
    with pytest.raises(FileExistsError, match="target is there already"):
        hf_checkpoint.save_params(params, checkpoint, target)


@pytest.mark.release
def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path):
    config = config_of("gemma")
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(10, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    checkpoint = hf_checkpoint.open_checkpoint(write(tmp_path / "same", config, tensors))
    hf_checkpoint.save_params(hf_checkpoint.load_params(checkpoint), checkpoint, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"][3, 5] += 1
    other = hf_checkpoint.open_checkpoint(write(tmp_path / "other", config, tensors))
    with pytest.raises(ValueError, match="ties the head.*set tie_word_embeddings to false"):
        hf_checkpoint.load_params(other)


Q0 = "model.layers.0.self_attn.q_proj.weight"
TENSOR_ERRORS = {
    "missing": (lambda t: t.pop(Q0), f"has no tensor {re.escape(Q0)}$"),
    "all missing": (lambda t: t.clear() or t.update(x=np.zeros(1)), "has no tensor .* and 17 more"),
    "unknown": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(DIM, np.float32)}),
        "a llama model does not: model.layers.0.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda t: t.update({Q0: t[Q0][:7]}),
        r"q_proj.weight has shape \(7, 48\), but config.json asks for \(48, 48\)",
    ),
    "dtype": (lambda t: t.update({Q0: t[Q0].astype(np.int8)}), "is I8; pass weights in F32, F16"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", TENSOR_ERRORS)
def test_errors_of_tensors(name, tmp_path):
    config = config_of("llama")
    tensors = random_tensors(config)
    spoil, message = TENSOR_ERRORS[name]
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        hf_checkpoint.open_checkpoint(write(tmp_path / "bad", config, tensors))


CONFIG_ERRORS = {
    "family": (
        {"model_type": "gemma3_text"},
        "model_type is 'gemma3_text'; supported: llama, gemma",
    ),
    "biases": ({"attention_bias": True}, "attention_bias is True; only false"),
    "quantized": ({"quantization_config": {"bits": 4}}, "pass weights in bf16"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'; llama has 'silu'"),
    "rotation": ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'; supported: default"),
    "rotation fields": ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "no field": ({"hidden_size": None}, "has no field 'hidden_size'"),
    "not a number": ({"vocab_size": "97"}, "vocab_size is '97', not a positive integer"),
    "groups": ({"num_key_value_heads": 3}, "it must divide the 4 heads"),
    "odd heads": ({"head_dim": 7}, "head_dim is 7; .* even"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_errors_of_config(name, tmp_path):
    change, message = CONFIG_ERRORS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | change))
    with pytest.raises(ValueError, match=message):
        hf_checkpoint.open_checkpoint(tmp_path)


@pytest.mark.release
def test_errors_of_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing; pass the folder"):
        hf_checkpoint.open_checkpoint(tmp_path / "nowhere")
    folder = written(tmp_path / "sharded", "llama", shards=2)
    shard = "model-00002-of-00002.safetensors"
    whole = load_file(folder / shard)
    lost = next(iter(whole))
    save_file({name: x for name, x in whole.items() if name != lost}, folder / shard)
    with pytest.raises(
        ValueError, match=f"{shard} lacks {re.escape(lost)}, which .*index.json has"
    ):
        hf_checkpoint.open_checkpoint(folder)
    (folder / shard).unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard} is missing"):
        hf_checkpoint.open_checkpoint(folder)
    (folder / shard).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=f"{shard} is not a whole safetensors file"):
        hf_checkpoint.open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no object 'weight_map'"):
        hf_checkpoint.open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds a JSON list, not an object"):
        hf_checkpoint.open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        hf_checkpoint.open_checkpoint(folder)


# --- Prompts and answers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    finetune_hf.write_tiny(folder)
    return folder


def encoder(folder, template="plain"):
    return sft_data.Encoder(folder, sft_data.TEMPLATES[template], 258)


GOOD = b'{"prompt": "p", "answer": "a"}\n'
LINE_ERRORS = {
    "json": (GOOD + b"\n{oops}\n", "line 3 is not JSON"),
    "encoding": (b'{"prompt": "\xff", "answer": "a"}', "line 1 is not JSON"),
    "list": (GOOD * 2 + b"[1]", "line 3 holds a JSON list"),
    "field": (GOOD + b'{"prompt": "p", "output": "a"}', "line 2 has no 'answer'; it has prompt, o"),
    "type": (b'{"prompt": 5, "answer": "a"}', "line 1: 'prompt' is 5, not a string"),
    "empty": (GOOD + b'{"prompt": "p", "answer": ""}', "line 2: 'answer' is empty"),
    "nothing": (b"\n\n", "has no examples"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", LINE_ERRORS)
def test_errors_of_lines(name, tmp_path):
    content, message = LINE_ERRORS[name]
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        sft_data.read_examples(tmp_path / "data.jsonl")


@pytest.mark.release
def test_errors_of_data_and_tokenizer(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.jsonl is missing; pass a file of prompts"):
        sft_data.read_examples(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="tokenizer.json has no token '<start_of_turn>'"):
        encoder(tiny, "gemma")
    with pytest.raises(ValueError, match="has 258 tokens, but the model only 200"):
        sft_data.Encoder(tiny, sft_data.TEMPLATES["plain"], 200)
    with pytest.raises(ValueError, match="all 2 examples have more than 4 tokens, the shortest 5;"):
        sft_data.make_rows(encoder(tiny), [sft_data.Example("p", c) for c in ("a", "bc")], 4)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(ValueError, match="tokenizer_config.json has no 'eos_token'"):
        encoder(tmp_path)


@pytest.mark.release
def test_rows_weigh_the_answer_and_its_end(tiny):
    examples = [
        sft_data.Example("ab", "xyz"),
        sft_data.Example("", "é"),
        sft_data.Example("c", "d"),
    ]
    make = encoder(tiny)
    ids = make.tokenizer.token_to_id
    rows = sft_data.make_rows(make, [*examples, sft_data.Example("too", "l" * 9)], max_length=8)
    first = [ids("<s>"), ids("a"), ids("b"), ids("Ċ"), ids("x"), ids("y"), ids("z"), ids("</s>")]
    assert rows.tokens.tolist()[0] == first
    assert rows.weights.astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0],
    ]  # fmt: skip
    learned = [list(t[1:][w > 0]) for t, w in zip(rows.tokens, rows.weights, strict=True)]
    assert learned == [make(example)[1] for example in examples]


@pytest.mark.release
def test_templates_and_the_first_token(tiny, tmp_path):
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    for i, content in enumerate(["<start_of_turn>", "<end_of_turn>"]):
        special = tokenizer["added_tokens"][0] | {"id": 256 + 2 + i, "content": content}
        tokenizer["added_tokens"].append(special)
        tokenizer["model"]["vocab"][content] = 256 + 2 + i
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"add_bos_token": False, "eos_token": {"content": "</s>"}})
    )
    make = sft_data.Encoder(tmp_path, sft_data.TEMPLATES["gemma"], 260)
    prompt, answer = make(sft_data.Example("Hi", "Ho"))
    text = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert make.tokenizer.decode(prompt, skip_special_tokens=False) == text
    assert prompt[0] == 258 and answer[-1] == 259 and len(answer) == 3
    plain = sft_data.Encoder(tmp_path, sft_data.TEMPLATES["plain"], 260)
    assert plain(sft_data.Example("p", "a"))[1][-1] == plain.tokenizer.token_to_id("</s>")


def numbered(n):
    return sft_data.Rows(np.tile(np.arange(n)[:, None], (1, 3)).astype(np.int32), np.ones((n, 2)))


@pytest.mark.release
def test_every_pass_sees_each_example_once_in_another_order():
    batches = [sft_data.train_batch(numbered(10), i, rows=4, seed=0) for i in range(5)]
    seen = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert list(seen[:10]) != list(seen[10:])
    other = sft_data.train_batch(numbered(10), 0, rows=4, seed=1)
    assert list(other.tokens[:, 0]) != list(seen[:4])


@pytest.mark.release
@pytest.mark.parametrize("n", [3, 8, 10])
def test_evaluation_counts_each_row_once(n):
    counted = np.zeros(n)
    for batch in sft_data.all_batches(numbered(n), rows=4):
        assert len(batch.tokens) == 4
        np.add.at(counted, batch.tokens[:, 0], batch.weights[:, 0])
    assert list(counted) == [1.0] * n


# --- Loss and training ----------------------------------------------------------------------------


def some_rows(config, n):
    rng = np.random.default_rng(2)
    weights = (rng.random((n, 12)) < np.linspace(0.1, 0.9, n)[:, None]).astype(np.float32)
    return sft_data.Rows(rng.integers(0, config.vocab_size, (n, 13), np.int32), weights)


@pytest.mark.release
def test_loss_is_the_mean_over_answer_tokens_of_all_workers(tmp_path):
    folder = written(tmp_path / "llama", "llama-grouped-tied")
    checkpoint = hf_checkpoint.open_checkpoint(folder)
    config, params = checkpoint.config, hf_checkpoint.load_params(checkpoint)
    data = some_rows(config, 2 * N)
    at = logits(folder, data.tokens[:, :-1]).astype(np.float64)
    log_p = at - np.log(np.exp(at).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, data.tokens[:, 1:, None], axis=-1)[..., 0]
    expected = -chosen[data.weights > 0].mean()
    loss_fn, mesh = finetune_hf.make_loss(config), auto_mesh(N)
    batch = sft_data.train_batch(data, 0, rows=2 * N, seed=0)
    of_one, grads = jax.jit(jax.value_and_grad(loss_fn))(params, *batch)
    of_all, mean = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", method=dq.F32())(
        params, *batch
    )
    np.testing.assert_allclose([of_one, of_all], expected, rtol=1e-5)
    for one, many in zip(jax.tree.leaves(grads), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-3, atol=1e-6)
    evaluate = finetune_hf.make_evaluate(loss_fn, mesh, rows=N)
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
    options = "--method", method, "--topology", "direct", "--out", out, *shared
    result = run("train", folder, folder / "train.jsonl", *options)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.release
def test_the_example_learns_as_fast_compressed(tiny, tmp_path):
    output = {method: tuned(tiny, tmp_path / method, method) for method in ("dynamiq", "bf16")}
    (before, after), (_, exact) = losses(output["dynamiq"]), losses(output["bf16"])
    assert before > 5 and after < 2 and after == pytest.approx(exact, rel=0.03)
    assert "wire: dynamiq, 5.0" in output["dynamiq"] and "wire: bf16, 16.0" in output["bf16"]
    checkpoint = hf_checkpoint.open_checkpoint(tmp_path / "dynamiq")
    rows = finetune_hf.read_rows(encoder(tiny), tiny / "validation.jsonl", max_length=99)
    evaluate = finetune_hf.make_evaluate(finetune_hf.make_loss(checkpoint.config), auto_mesh(N), 16)
    assert evaluate(hf_checkpoint.load_params(checkpoint), rows) == pytest.approx(after, abs=1e-4)


def test_method_and_topology_may_come_from_a_file(tiny, tmp_path):
    file, shared = tmp_path / "choice.json", ("--steps", 1, "--out")
    method = dq.comparators.MXFP8()
    dq.Compression(method, topology=dq.Direct(), min_leaf_size=0, min_bucket_size=0).save(file)
    data = tiny / "train.jsonl"
    done = run("train", tiny, data, "--config", file, *shared, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "choice.json, 8.2" in " ".join(done.output.split())
    both = run("train", tiny, data, "--config", file, "--bits", 4, *shared, tmp_path / "other")
    assert both.exit_code == 2 and "leave out --method, --bits and --topology" in " ".join(
        re.sub("[─│╭╮╰╯]", " ", both.output).split()
    )


@pytest.mark.release
def test_gemma_learns_too(tmp_path):
    assert run("make-tiny", tmp_path / "gemma", "--family", "gemma").exit_code == 0
    before, after = losses(tuned(tmp_path / "gemma", tmp_path / "out", "bf16"))
    assert before > 5 and after < 2.5


@pytest.mark.release
def test_the_command_says_what_is_wrong(tiny, tmp_path):
    data = tiny / "train.jsonl"
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(GOOD + b"{")
    wrong = {
        "line 2": ("train", tiny, bad, "--out", tmp_path / "out"),
        "is there already": ("train", tiny, data, "--out", tiny),
        "config.json": ("train", tmp_path, data, "--out", tmp_path / "out"),
        "--template": ("train", tiny, data, "--out", tmp_path / "out", "--template", "chatml"),
        "bits": ("train", tiny, data, "--out", tmp_path / "out", "--bits", "99"),
        "there already": ("make-tiny", tiny),
        "--family": ("make-tiny", tmp_path / "new", "--family", "opt"),
    }
    for words, arguments in wrong.items():
        result = run(*arguments)
        said = " ".join(re.sub("[─│╭╮╰╯]", " ", result.output).split())
        assert result.exit_code == 2 and words in said, said
    assert not (tmp_path / "out").exists()
