"""examples/llm_data.py: byte pairs are learned once and kept."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import llm_data

SMALL = {"vocab_size": 400, "max_bytes": 2**20, "tokenizer": "bpe"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dynamiq_jax"


def test_byte_pairs_are_fewer_than_bytes_and_kept(cache, monkeypatch):
    first = llm_data.load_corpus(**SMALL)
    text = llm_data.load_corpus(256, max_bytes=SMALL["max_bytes"])
    for name in ("train", "validation"):
        ids, in_bytes = getattr(first, name), getattr(text, name)
        assert ids.dtype == np.int32 and 256 < ids.max() < 400
        assert 0.25 * len(in_bytes) < len(ids) < 0.8 * len(in_bytes)
    (file,) = cache.iterdir()
    assert file.name.startswith("bpe-400-")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not asked for again
    again = llm_data.load_corpus(**SMALL)
    np.testing.assert_array_equal(again.train, first.train)
    np.testing.assert_array_equal(again.validation, first.validation)


def test_every_file_ends_with_the_same_token(cache):
    corpus = llm_data.load_corpus(**SMALL)
    ends = np.flatnonzero(corpus.train == corpus.train[-1])
    text = llm_data.load_corpus(256, max_bytes=SMALL["max_bytes"]).train
    assert len(ends) == np.count_nonzero(text == 0)


def test_what_is_missing_is_named(cache, monkeypatch):
    with pytest.raises(ValueError, match="tokenizer='words': pass one of pieces, bpe"):
        llm_data.load_corpus(400, tokenizer="words")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="needs the package tokenizers: pip install tokenizers"):
        llm_data.load_corpus(**SMALL)
    assert not cache.exists()
