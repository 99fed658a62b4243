"""Collectives by which every process tells all others arrays, or anything that JSON holds."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PIECE = 2**28
"""Bytes that a device holds at most while processes tell each other long texts."""


def rows_of_all(data: np.ndarray) -> np.ndarray:
    """Rows of what each process has told: arrays of one shape and dtype."""
    return np.asarray(multihost_utils.process_allgather(data)).reshape(-1, *data.shape)


def told_by_all(own: Any) -> list[Any]:
    """Values that JSON holds, of any length: one that each process has told, in their order."""
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    lengths = rows_of_all(np.array(text.size, np.uint32)).tolist()
    texts = _bytes_of_all(text, max(lengths))
    return [json.loads(bytes(row[:n])) for row, n in zip(texts, lengths, strict=True)]


def _bytes_of_all(data: np.ndarray, longest: int) -> np.ndarray:
    """Rows of the bytes that each process has told, filled up to ``longest``, in pieces."""
    most = max(2**16, PIECE // jax.process_count())
    size = min(most, 1 << max(longest - 1, 2**8 - 1).bit_length())
    pieces = []
    for start in range(0, longest, size):
        piece = np.zeros(size, np.uint8)
        own = data[start : start + size]
        piece[: own.size] = own
        pieces.append(rows_of_all(piece))
    return np.concatenate(pieces, axis=1)
