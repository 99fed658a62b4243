"""Real text that every machine has: the source files of the running Python's standard library.

Files go to the training or the validation set *by file* (a stable hash of the relative name), so
that no validation text was seen in training. Three ways to make tokens of it:

* ``vocab_size == 256``: one token per byte.
* "pieces": text is cut into pieces (word, number, punctuation, white space); the most frequent
  pieces of the training set get ids from 256 on, every other piece is spelled in bytes. Lossless,
  built in seconds, and, as with any large vocabulary, most rows of the embedding's gradient are
  zero in most steps.
* "bpe": byte pair encoding by the package ``tokenizers``, as language models use it. Learned from
  the training set once; its ids are kept under ``~/.cache/dynamiq_jax`` (or ``XDG_CACHE_HOME``).

Byte 0 ends a file. Everything here is NumPy and deterministic: a batch depends on (seed, step)
alone, so runs that compare methods see the same tokens in the same order.
"""

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Tokenizer = Literal["pieces", "bpe"]

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_PERCENT = 10
PIECE = re.compile(rb" ?[A-Za-z]+| ?[^A-Za-z0-9\s]+|[0-9]|\s+")


class Corpus(NamedTuple):
    """Token streams, ``int32[tokens]`` each, and the number of ids they draw from."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    n_files: int


def load_corpus(
    vocab_size: int = 256, max_bytes: int = 32 * 2**20, tokenizer: Tokenizer = "pieces"
) -> Corpus:
    """Reads the standard library's ``*.py`` files, in order of name, and tokenises them.

    Args:
        vocab_size: 256 for bytes; a larger number adds that many more pieces.
        max_bytes: reading stops before the file that would exceed this total.
        tokenizer: which pieces.

    Raises:
        ValueError: if ``vocab_size`` is below 256, no source file was found, or the tokenizer is
            not known.
        ImportError: "bpe" lacks the package ``tokenizers``.
    """
    if tokenizer not in get_args(Tokenizer):
        raise ValueError(f"tokenizer={tokenizer!r}: pass one of {', '.join(get_args(Tokenizer))}")
    if vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size}: every byte needs an id, pass at least 256")
    files = _read_files(Path(sysconfig.get_paths()["stdlib"]), max_bytes)
    if not files:
        raise ValueError("this Python has no standard library sources (*.py) to train on")
    train = b"".join(text for name, text in files if not _is_validation(name))
    validation = b"".join(text for name, text in files if _is_validation(name))
    if tokenizer == "bpe" and vocab_size > 256:
        return Corpus(*byte_pairs(train, validation, vocab_size), vocab_size, len(files))
    vocabulary = _frequent_pieces(train, vocab_size - 256)
    return Corpus(encode(train, vocabulary), encode(validation, vocabulary), vocab_size, len(files))


def _read_files(root: Path, max_bytes: int) -> list[tuple[str, bytes]]:
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts):
            continue
        text = path.read_bytes() + b"\0"
        total += len(text)
        if total > max_bytes:
            break
        files.append((name.as_posix(), text))
    return files


def _is_validation(name: str) -> bool:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < VALIDATION_PERCENT


def _frequent_pieces(text: bytes, count: int) -> dict[bytes, int]:
    """The ``count`` most frequent pieces of two bytes or more, with their ids (from 256 on)."""
    if count == 0:
        return {}
    counts = Counter(piece for piece in PIECE.findall(text) if len(piece) > 1)
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return {piece: 256 + rank for rank, piece in enumerate(ranked[:count])}


def byte_pairs(train: bytes, validation: bytes, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of both texts, ``int32[tokens]``, from the cache if they were made before."""
    digest = hashlib.blake2b(validation, digest_size=8)
    digest.update(train)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamiq_jax"
    file = root / f"bpe-{vocab_size}-{digest.hexdigest()}.npz"
    if file.exists():
        with np.load(file) as kept:
            return kept["train"], kept["validation"]
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizer='bpe' needs the package tokenizers: pip install tokenizers, or pass "
            "tokenizer='pieces'"
        ) from error
    encoder = tokenizers.ByteLevelBPETokenizer()
    texts = [_decoded(train), _decoded(validation)]
    options = {"vocab_size": vocab_size, "min_frequency": 2, "show_progress": False}
    encoder.train_from_iterator(texts[0], **options)
    ids = [
        np.concatenate([_encoded(encoder, files[i : i + 256]) for i in range(0, len(files), 256)])
        for files in texts
    ]
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f"{file.stem}.{os.getpid()}.npz"  # whoever reads at this time sees no half file
    np.savez_compressed(draft, train=ids[0], validation=ids[1])
    os.replace(draft, file)
    return ids[0], ids[1]


def _encoded(encoder: Any, files: list[str]) -> np.ndarray:
    return np.array([i for one in encoder.encode_batch(files) for i in one.ids], np.int32)


def _decoded(text: bytes) -> list[str]:
    """Its files, each with the byte 0 that ends it."""
    return [part.decode(errors="replace") + "\0" for part in text.split(b"\0")[:-1]]


def encode(text: bytes, vocabulary: dict[bytes, int]) -> np.ndarray:
    """Turns text into ids, ``int32[tokens]``; a piece outside ``vocabulary`` becomes its bytes."""
    if not vocabulary:
        return np.frombuffer(text, np.uint8).astype(np.int32)
    ids: list[int] = []
    for piece in PIECE.findall(text):
        known = vocabulary.get(piece)
        if known is None:
            ids.extend(piece)
        else:
            ids.append(known)
    return np.array(ids, np.int32)


def train_batch(corpus: Corpus, step: int, *, rows: int, length: int, seed: int) -> np.ndarray:
    """Random windows of the training text, ``int32[rows, length]``, fixed by (seed, step)."""
    rng = np.random.default_rng((seed, step))
    return _windows(corpus.train, rng.integers(0, len(corpus.train) - length, rows), length)


def validation_batches(
    corpus: Corpus, *, rows: int, length: int, count: int
) -> Iterator[np.ndarray]:
    """Yields ``count`` batches ``int32[rows, length]``, spread evenly over the validation text."""
    starts = np.linspace(0, len(corpus.validation) - length, count * rows).astype(np.int64)
    for batch_starts in np.split(starts, count):
        yield _windows(corpus.validation, batch_starts, length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(length)]
