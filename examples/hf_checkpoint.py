"""LLaMA and Gemma checkpoints of the Hugging Face layout, to and from ``llm_model``'s parameters.

A checkpoint is a local folder with ``config.json``, ``tokenizer.json`` and the weights, either in
``model.safetensors`` or in the files that ``model.safetensors.index.json`` names. Families (field
``model_type``): "llama" (LLaMA 1 to 3.3, and what shares its layout) and "gemma" (the first one).
Gemma 2 and 3, biases, quantized weights and other rotations than "default" and "llama3" are
refused.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from llm_model import Config, Family, RopeScaling, init_params
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENDS = {"embed.embedding": EMBEDDING, "norm.scale": "model.norm.weight", "head.kernel": HEAD}
IN_BLOCK = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.q.kernel": "self_attn.q_proj.weight",
    "attention.k.kernel": "self_attn.k_proj.weight",
    "attention.v.kernel": "self_attn.v_proj.weight",
    "attention.o.kernel": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
}
COPIED = {".json", ".jinja", ".model", ".txt", ".md"}
LISTED = 4  # of names in an error, at most


# --- config.json ----------------------------------------------------------------------------------


class _Fields:
    """The fields of one JSON object; errors name its file."""

    def __init__(self, file: Path):
        self.file, self.raw = file, read_json(file)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; ``default`` where the field is missing or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.file} has no field {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.file}: {name} is {value!r}, not a positive integer")
        return value

    def refuse(self, name: str, value: Any, why: str) -> NoReturn:
        raise ValueError(f"{self.file}: {name} is {value!r}; {why}")


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no JSON object.
    """
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; pass the folder of a checkpoint in the layout "
            f"of Hugging Face: {CONFIG}, {WEIGHTS}, tokenizer.json"
        )
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


def read_config(file: Path) -> Config:
    """Reads the shape of a model from ``config.json``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a field is missing or wrong, or asks for what ``llm_model`` does not compute.
    """
    fields = _Fields(file)
    raw, integer = fields.raw, fields.integer
    family: Family = raw.get("model_type", "")
    if family not in get_args(Family):
        fields.refuse("model_type", family, f"supported: {', '.join(get_args(Family))}")
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if raw.get(name):
            fields.refuse(name, raw[name], "only false is supported")
    if raw.get("quantization_config"):
        fields.refuse("quantization_config", "{...}", "pass weights in bf16, f16 or f32")
    # Gemma's first files say "gelu", or two things, and always meant the tanh approximation.
    default, supported = {
        "llama": ("silu", ("silu",)),
        "gemma": ("gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu")),
    }[family]
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or default
    if activation not in supported:
        fields.refuse("hidden_act", activation, f"{family} has {default!r}")
    dim, n_heads = integer("hidden_size"), integer("num_attention_heads")
    n_kv_heads = integer("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        fields.refuse("num_key_value_heads", n_kv_heads, f"it must divide the {n_heads} heads")
    head_dim = integer("head_dim", {"llama": dim // n_heads, "gemma": 256}[family])
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary positions turn pairs, so it must be even")
    rope = _rope(fields)
    return Config(
        vocab_size=integer("vocab_size"), seq_len=integer("max_position_embeddings"),
        n_layers=integer("num_hidden_layers"), dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads,
        hidden=integer("intermediate_size"), dtype=jnp.float32, family=family, head_dim=head_dim,
        tied=bool(raw.get("tie_word_embeddings", family == "gemma")),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)), rope_base=rope.base,
        rope_scaling=rope.scaling,
    )  # fmt: skip


class _Rope(NamedTuple):
    base: float
    scaling: RopeScaling | None


def _rope(fields: _Fields) -> _Rope:
    """From ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters`` of newer files."""
    newer = fields.raw.get("rope_parameters") or {}
    scaling = newer or fields.raw.get("rope_scaling") or {}
    base = float(newer.get("rope_theta") or fields.raw.get("rope_theta") or 10_000.0)
    turned = scaling.get("partial_rotary_factor") or fields.raw.get("partial_rotary_factor") or 1.0
    if turned != 1.0:
        fields.refuse("partial_rotary_factor", turned, "only 1.0 is supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return _Rope(base, None)
    if kind != "llama3":
        fields.refuse("rope_type", kind, "supported: default, llama3")
    names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    missing = [name for name in names if name not in scaling]
    if missing:
        raise ValueError(f"{fields.file}: the rotation 'llama3' lacks {', '.join(missing)}")
    factor, low, high, length = (scaling[name] for name in names)
    return _Rope(base, RopeScaling(factor=factor, low=low, high=high, original_length=length))


# --- Weights --------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Where a tensor is, and how; ``dtype`` as safetensors writes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, the shape of its model, and what is known of its tensors without reading them."""

    folder: Path
    config: Config
    tensors: dict[str, Stored]


class _Leaf(NamedTuple):
    """The tensor of one parameter, with its shape in the file: kernels have outputs first."""

    name: str
    shape: tuple[int, ...]
    transposed: bool


def open_checkpoint(
    folder: Path, *, dtype: jax.typing.DTypeLike = jnp.float32, remat: bool = False
) -> Checkpoint:
    """Checks that a folder's tensors are those of the model that its ``config.json`` describes.

    ``dtype`` and ``remat`` are those of the model's `Config`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged; the model is not supported; or a tensor is missing, unknown,
            of another shape than ``config.json`` asks for, or neither f32 nor f16 nor bf16.
    """
    config = replace(read_config(folder / CONFIG), dtype=dtype, remat=remat)
    tensors = _tensors(folder)
    leaves = {leaf.name: leaf for leaf in _leaves(config)[0]}
    # Old files hold the rotation's frequencies, and some a tied head a second time.
    skipped = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        skipped.add(HEAD)
    if missing := leaves.keys() - tensors.keys():
        raise ValueError(f"{folder} has no tensor {_listed(missing)}")
    if unknown := tensors.keys() - leaves.keys() - skipped:
        raise ValueError(
            f"{folder} has tensors that a {config.family} model does not: {_listed(unknown)}"
        )
    for name, leaf in leaves.items():
        stored, file = tensors[name], folder / tensors[name].file
        if stored.shape != leaf.shape:
            raise ValueError(
                f"{file}: {name} has shape {stored.shape}, but {CONFIG} asks for {leaf.shape}"
            )
        if stored.dtype not in DTYPES:
            raise ValueError(
                f"{file}: {name} is {stored.dtype}; pass weights in {', '.join(DTYPES)}"
            )
    return Checkpoint(folder, config, tensors)


def load_params(checkpoint: Checkpoint) -> nnx.State:
    """Reads the weights, laid out as `llm_model.init_params` does: NumPy arrays, f32.

    Raises:
        ValueError: the head is tied to the embedding, but the files hold another head.
    """
    leaves, treedef = _leaves(checkpoint.config)
    arrays = [_read(checkpoint, leaf.name).astype(np.float32) for leaf in leaves]
    if checkpoint.config.tied and HEAD in checkpoint.tensors:
        if not np.array_equal(_read(checkpoint, HEAD), _read(checkpoint, EMBEDDING)):
            raise ValueError(
                f"{checkpoint.folder / CONFIG} ties the head to the embedding, but {HEAD} is not "
                f"{EMBEDDING}; set tie_word_embeddings to false, or remove {HEAD}"
            )
    pairs = zip(arrays, leaves, strict=True)
    return treedef.unflatten([x.T if leaf.transposed else x for x, leaf in pairs])


def save_params(params: nnx.State, checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a folder laid out as ``checkpoint``'s: the same files, names and dtypes.

    The tokenizer's and other small files are copied. What `load_params` skips is not written.

    Raises:
        FileExistsError: ``folder`` has files already.
    """
    check_unused(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.folder.iterdir()):
        if file.suffix in COPIED and file.name != INDEX:
            shutil.copy(file, folder)
    _write(params, checkpoint.config, checkpoint.tensors, folder)


def save_new(params: nnx.State, folder: Path) -> None:
    """Writes the weights, f32 and in one file, into a folder that has a ``config.json``."""
    config = read_config(folder / CONFIG)
    tensors = {leaf.name: Stored(WEIGHTS, "F32", leaf.shape) for leaf in _leaves(config)[0]}
    _write(params, config, tensors, folder)


def _write(params: nnx.State, config: Config, tensors: dict[str, Stored], folder: Path) -> None:
    by_file: dict[str, dict[str, np.ndarray]] = {}
    for leaf, value in zip(_leaves(config)[0], jax.tree.leaves(params), strict=True):
        stored, value = tensors[leaf.name], np.asarray(value)
        value = (value.T if leaf.transposed else value).astype(DTYPES[stored.dtype])
        by_file.setdefault(stored.file, {})[leaf.name] = np.ascontiguousarray(value)
    for file, arrays in by_file.items():
        save_file(arrays, folder / file, metadata={"format": "pt"})
    if by_file.keys() != {WEIGHTS}:
        index = {
            "metadata": {"total_size": sum(x.nbytes for t in by_file.values() for x in t.values())},
            "weight_map": {name: file for file, arrays in by_file.items() for name in arrays},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def check_unused(folder: Path) -> None:
    """Refuses a folder that has files already.

    Raises:
        FileExistsError: it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already; name a new or empty folder")


def _tensors(folder: Path) -> dict[str, Stored]:
    if not (folder / INDEX).is_file():
        return _header(folder, WEIGHTS)
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(f"{folder / INDEX} has no object 'weight_map' from tensors to files")
    found = {file: _header(folder, file) for file in sorted(set(names.values()))}
    for file, tensors in found.items():
        if lost := {name for name, place in names.items() if place == file} - tensors.keys():
            raise ValueError(f"{folder / file} lacks {_listed(lost)}, which {INDEX} has there")
    return {name: found[file][name] for name, file in names.items()}


def _header(folder: Path, file: str) -> dict[str, Stored]:
    if not (folder / file).is_file():
        raise FileNotFoundError(f"{folder / file} is missing")
    try:
        with safe_open(folder / file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            return {
                name: Stored(file, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{folder / file} is not a whole safetensors file: {error}") from error


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    with safe_open(checkpoint.folder / checkpoint.tensors[name].file, framework="numpy") as tensors:
        return tensors.get_tensor(name)


def _leaves(config: Config) -> tuple[list[_Leaf], Any]:
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    return [_leaf(path, leaf.shape) for path, leaf in leaves], treedef


def _leaf(path: Any, shape: tuple[int, ...]) -> _Leaf:
    ours = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    transposed = ours.endswith(".kernel")
    shape = shape[::-1] if transposed else shape
    if ours in ENDS:
        return _Leaf(ENDS[ours], shape, transposed)
    _, i, part = ours.split(".", 2)
    return _Leaf(f"model.layers.{i}.{IN_BLOCK[part]}", shape, transposed)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more
