"""Real text that every machine has: the source files of the running Python's standard library.

Files go to the training or the validation set *by file* (a stable hash of the relative name), so
that no validation text was seen in training. With ``vocab_size == 256`` every byte is a token. With
more, text is cut into pieces (word, number, punctuation, white space); the most frequent pieces of
the training set get ids from 256 on, every other piece is spelled in bytes. Lossless, and, as with
any large vocabulary, most rows of the embedding's gradient are zero in most steps. It takes seconds
to build, so a file in the user's cache keeps it for the next start.

Byte 0 ends a file. Everything here is NumPy and deterministic: a batch depends on (seed, step)
alone, so runs that compare methods see the same tokens in the same order.
"""

import contextlib
import functools
import hashlib
import os
import re
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_PERCENT = 10
PIECE = re.compile(rb" ?[A-Za-z]+| ?[^A-Za-z0-9\s]+|[0-9]|\s+")


class Corpus(NamedTuple):
    """Token streams, ``int32[tokens]`` each, and the number of ids they draw from."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    vocabulary: Mapping[bytes, int] = MappingProxyType({})
    """The ids of pieces, for `encode`; none where bytes are tokens."""


@functools.cache  # a process that waits for its start may have read it
def load_corpus(
    vocab_size: int = 256, max_bytes: int = 32 * 2**20, folder: Path | None = None
) -> Corpus:
    """Reads the standard library's ``*.py`` files, in order of name, and tokenises them.

    Args:
        vocab_size: 256 for bytes; a larger number adds that many more pieces.
        max_bytes: reading stops before the file that would exceed this total.
        folder: whose ``*.py`` files are read instead; for trainings that take more text.

    Raises:
        ValueError: if ``vocab_size`` is below 256, or no source file was found.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size}: every byte needs an id, pass at least 256")
    files = _read_files(folder or Path(sysconfig.get_paths()["stdlib"]), max_bytes)
    if not files:
        where = folder or "the standard library of this Python"
        raise ValueError(f"{where} has no sources (*.py) to train on")
    train = b"".join(text for name, text in files if not _is_validation(name))
    validation = b"".join(text for name, text in files if _is_validation(name))
    if vocab_size == 256:
        return Corpus(encode(train, {}), encode(validation, {}), vocab_size)
    text = f"{vocab_size} {PIECE.pattern} {len(train)} ".encode() + train + validation
    if (caches := cache_folder()) is None:
        return _tokenised(train, validation, vocab_size)
    file = caches / f"tokens-{hashlib.blake2b(text, digest_size=16).hexdigest()}.npz"
    if kept := _kept(file, vocab_size):
        return kept
    corpus = _tokenised(train, validation, vocab_size)
    with contextlib.suppress(OSError):  # the next start builds it again
        _keep(file, corpus)
    return corpus


def cache_folder() -> Path | None:
    """Where tokens are kept; `None` for a user without a home, as in some containers."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # its specification ignores relative paths
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:
            return None
    return caches / "dynamiq_jax"


def _tokenised(train: bytes, validation: bytes, vocab_size: int) -> Corpus:
    vocabulary = _frequent_pieces(train, vocab_size - 256)
    return Corpus(encode(train, vocabulary), encode(validation, vocabulary), vocab_size, vocabulary)


def _keep(file: Path, corpus: Corpus) -> None:
    """Writes a corpus, of which a process that is killed leaves no half file."""
    pieces = [*corpus.vocabulary]  # in the order of their ids
    kept = {
        "train": corpus.train, "validation": corpus.validation,
        "pieces": np.frombuffer(b"".join(pieces), np.uint8), "ends": np.cumsum([*map(len, pieces)]),
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    # Hosts may share the folder, and containers' processes have equal numbers.
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="half-") as folder:
        half = Path(folder) / file.name
        np.savez(half, **kept)
        half.replace(file)


def _kept(file: Path, vocab_size: int) -> Corpus | None:
    """The corpus of a file; `None` without one that can be read."""
    try:
        with file.open("rb") as opened, np.load(opened) as kept:
            text, ends = kept["pieces"].tobytes(), kept["ends"].tolist()
            pieces = map(slice, [0, *ends], ends)
            vocabulary = {text[own]: 256 + rank for rank, own in enumerate(pieces)}
            return Corpus(kept["train"], kept["validation"], vocab_size, vocabulary)
    except Exception:  # whatever is wrong with it, tokens can be built
        return None


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


def encode(text: bytes, vocabulary: Mapping[bytes, int]) -> np.ndarray:
    """Turns text into ids, ``int32[tokens]``; a piece outside ``vocabulary`` becomes its bytes."""
    if not vocabulary:
        return np.frombuffer(text, np.uint8).astype(np.int32)
    ids = {piece: (number,) for piece, number in vocabulary.items()}
    pieces = PIECE.findall(text)  # each is its bytes, too
    return np.fromiter(chain.from_iterable(map(ids.get, pieces, pieces)), np.int32)


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
