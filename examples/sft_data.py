"""Prompts and answers for supervised fine-tuning: from JSONL to token rows and weights.

A line is ``{"prompt": "...", "answer": "..."}``; other fields are ignored. A row has the tokens of
one example: the tokenizer's first token (if it has one), the prompt in its template, the answer, a
token that ends it, then padding. Weights are 1 where the *next* token belongs to the answer or ends
it, else 0, so the loss is the answers' alone.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hf_checkpoint import read_json
from tokenizers import Tokenizer


class Example(NamedTuple):
    """One line of a JSONL file."""

    prompt: str
    answer: str


class Template(NamedTuple):
    """Text around a prompt, and the token after an answer (None: the tokenizer's own)."""

    before: str
    after: str
    end: str | None


TEMPLATES = {
    "plain": Template("", "\n", None),
    "llama3": Template(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "gemma": Template(
        "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"
    ),
}


def read_examples(file: Path) -> list[Example]:
    """Reads a JSONL file; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is wrong (the message has its number, from 1), or there is none.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; pass a file of prompts and answers (JSONL)")
    lines = enumerate(file.read_bytes().splitlines(), start=1)
    examples = [_example(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not examples:
        raise ValueError(f"{file} has no examples")
    return examples


def _example(line: bytes, where: str) -> Example:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a JSON {type(value).__name__}, not an object")
    for name in Example._fields:
        if name not in value:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(value) or 'nothing'}")
        if not isinstance(value[name], str):
            raise ValueError(f"{where}: {name!r} is {value[name]!r}, not a string")
    if not value["answer"]:
        raise ValueError(f"{where}: 'answer' is empty, so there is nothing to learn from it")
    return Example(value["prompt"], value["answer"])


class Encoder:
    """Turns examples into tokens by a checkpoint's tokenizer and a template.

    Raises:
        FileNotFoundError: the folder lacks ``tokenizer.json`` or ``tokenizer_config.json``.
        ValueError: these have not the tokens that the template needs.
    """

    def __init__(self, folder: Path, template: Template, vocab_size: int):
        settings, file = read_json(folder / "tokenizer_config.json"), folder / "tokenizer.json"
        read_json(file)  # its errors are clearer
        self.tokenizer, self.file, self.template = Tokenizer.from_file(str(file)), file, template
        n_tokens = 1 + max(self.tokenizer.get_vocab().values())
        if n_tokens > vocab_size:
            raise ValueError(f"{file} has {n_tokens} tokens, but the model only {vocab_size}")
        end = template.end or _content(settings.get("eos_token"))
        if end is None:
            raise ValueError(f"{folder / 'tokenizer_config.json'} has no 'eos_token'")
        for token in re.findall("<[^>]+>", template.before + template.after):
            self._id(token)
        self.end = self._id(end)
        first = _content(settings.get("bos_token"))
        wanted = settings.get("add_bos_token", True)
        self.first = [self._id(first)] if first is not None and wanted else []

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.file} has no token {token!r}; choose another --template")
        return found

    def __call__(self, example: Example) -> tuple[list[int], list[int]]:
        """Returns the tokens of the prompt (with all before the answer) and of the answer."""

        def ids(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        prompt = self.template.before + example.prompt + self.template.after
        return self.first + ids(prompt), [*ids(example.answer), self.end]


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


class Rows(NamedTuple):
    """Token rows ``int32[n, length + 1]`` and weights ``f32[n, length]`` of the tokens to come."""

    tokens: np.ndarray
    weights: np.ndarray

    def take(self, rows: np.ndarray) -> "Rows":
        """Some rows, in the order of their numbers."""
        return Rows(self.tokens[rows], self.weights[rows])


def make_rows(encoder: Encoder, examples: Sequence[Example], max_length: int) -> Rows:
    """Encodes examples; those of more than ``max_length`` tokens are left out.

    Rows are as long as the longest example that is left.

    Raises:
        ValueError: none is left.
    """
    encoded = [encoder(example) for example in examples]
    lengths = [len(prompt) + len(answer) for prompt, answer in encoded]
    kept = [pair for pair, length in zip(encoded, lengths, strict=True) if length <= max_length]
    if not kept:
        raise ValueError(
            f"all {len(examples)} examples have more than {max_length} tokens, the shortest "
            f"{min(lengths)}; raise --max-length"
        )
    length = max(length for length in lengths if length <= max_length)
    tokens = np.zeros((len(kept), length), np.int32)
    weights = np.zeros((len(kept), length - 1), np.float32)
    for row, (prompt, answer) in enumerate(kept):
        end = len(prompt) + len(answer)
        tokens[row, :end] = prompt + answer
        weights[row, max(len(prompt) - 1, 0) : end - 1] = 1.0
    return Rows(tokens, weights)


def train_batch(data: Rows, step: int, *, rows: int, seed: int) -> Rows:
    """The rows of one step, fixed by (seed, step): every pass over the data has an order anew.

    Weights are scaled to sum to ``rows``. A sum of weighted losses over any share of the batch,
    divided by the share's rows, then averages over equal shares to the mean over all answer tokens.
    """
    n = len(data.tokens)
    passes, places = np.divmod(np.arange(step * rows, (step + 1) * rows), n)
    orders = {i: np.random.default_rng((seed, i)).permutation(n) for i in np.unique(passes)}
    batch = data.take(np.array([orders[i][k] for i, k in zip(passes, places, strict=True)]))
    return batch._replace(weights=batch.weights * (rows / batch.weights.sum()))


def all_batches(data: Rows, *, rows: int) -> Iterator[Rows]:
    """All rows once; the last batch is filled up with rows of weight 0."""
    for start in range(0, len(data.tokens), rows):
        batch = data.take(np.arange(start, start + rows) % len(data.tokens))
        batch.weights[max(len(data.tokens) - start, 0) :] = 0.0
        yield batch
