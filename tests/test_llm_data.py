"""The text that the examples train on: ids, and the pieces that they stand for."""

import errno
import io
import os
import re
import threading
from collections import Counter
from pathlib import Path

import llm_data
import numpy as np
import pytest


@pytest.fixture
def folder(tmp_path):
    """Sources with frequent words, rare ones, and bytes that are no letters."""
    for i in range(40):
        lines = (
            f"def frequent(x{i}):",
            f"    return frequent(x) + {'rst'[i % 3] * (i + 1)}",
            "# \xe9, ï",
        )
        (tmp_path / f"m{i}.py").write_text("\n".join(lines) * 3)
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Another cache than the user's."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "dynamiq_jax"


def spelled(tokens, corpus):
    """The pieces of ids."""
    pieces = {number: piece for piece, number in corpus.vocabulary.items()}
    pieces |= {byte: bytes([byte]) for byte in range(256)}
    return map(pieces.__getitem__, tokens.tolist())


@pytest.mark.parametrize("vocab_size", [256, 270, 2000])
def test_ids_spell_the_text(folder, vocab_size):
    corpus = llm_data.load_corpus(vocab_size, folder=folder)
    files = {path.name: path.read_bytes() + b"\0" for path in sorted(folder.glob("*.py"))}
    held_out = [name for name in files if llm_data._is_validation(name)]
    assert 0 < len(held_out) < len(files)
    for tokens, own in ((corpus.train, False), (corpus.validation, True)):
        text = b"".join(files[name] for name in files if (name in held_out) is own)
        assert tokens.dtype == np.int32
        assert tokens.max() < vocab_size
        assert b"".join(spelled(tokens, corpus)) == text
        assert vocab_size == 256 or len(tokens) < 0.8 * len(text)


def test_frequent_pieces_have_ids_of_their_own(folder):
    corpus = llm_data.load_corpus(268, folder=folder)
    assert {*corpus.vocabulary.values()} == {*range(256, 268)}
    assert b" frequent" in corpus.vocabulary
    counts = Counter(llm_data.PIECE.findall(b"".join(spelled(corpus.train, corpus))))
    outside = max(counts[p] for p in counts if len(p) > 1 and p not in corpus.vocabulary)
    assert outside <= min(counts[piece] for piece in corpus.vocabulary)
    (number,) = llm_data.encode(b" frequent", corpus.vocabulary).tolist()
    assert number == corpus.vocabulary[b" frequent"]
    assert llm_data.encode(b" unknown", corpus.vocabulary).tolist() == [*b" unknown"]


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=255: .* at least 256"):
        llm_data.load_corpus(255)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} has no sources")):
        llm_data.load_corpus(folder=tmp_path)


def test_a_start_reads_the_tokens_that_another_one_has_built(folder, cache, monkeypatch):
    load = lambda size=270: llm_data.load_corpus.__wrapped__(size, folder=folder)
    built = load()
    with monkeypatch.context() as patch:
        patch.setattr(llm_data, "_frequent_pieces", lambda *_: 1 / 0)
        read = load()
    np.testing.assert_array_equal(read.train, built.train)
    np.testing.assert_array_equal(read.validation, built.validation)
    assert [*read.vocabulary.items()] == [*built.vocabulary.items()]
    assert load(271).vocabulary.keys() > built.vocabulary.keys()
    (folder / "m0.py").write_text("other = 'text'")
    assert not np.array_equal(load().train[:9], built.train[:9])
    assert len([*cache.iterdir()]) == 3


def test_tokens_that_cannot_be_kept_or_read_are_built(folder, cache):
    load = lambda: llm_data.load_corpus.__wrapped__(270, folder=folder)
    built = load()
    (file,) = cache.iterdir()
    array = io.BytesIO()
    np.save(array, built.train)
    for broken in (file.read_bytes()[:1000], b"no file of NumPy's", b"", array.getvalue()):
        file.write_bytes(broken)
        np.testing.assert_array_equal(load().train, built.train)
    file.unlink()
    cache.rmdir()
    cache.write_text("no folder")
    np.testing.assert_array_equal(load().train, built.train)


def test_two_hosts_that_share_a_cache_keep_whole_tokens(folder, cache, monkeypatch):
    """Their processes may have equal numbers; one of them finds no room on the disk."""
    load = lambda: llm_data.load_corpus.__wrapped__(270, folder=folder)
    both, written, save = threading.Barrier(2, timeout=20), [], np.savez

    def savez(file, **arrays):
        written.append(file)
        both.wait()
        if threading.current_thread().name == "full":
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    threads = [threading.Thread(target=load, name=name) for name in ("full", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*written}) == 2
    (file,) = cache.iterdir()  # nobody left a half one
    assert llm_data._kept(file, 270)


@pytest.mark.parametrize("given", [None, "", "relative"])
def test_a_user_without_a_home_builds_tokens(folder, given, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    if given is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.chdir(folder)
    assert llm_data.cache_folder() is None
    assert llm_data.load_corpus.__wrapped__(270, folder=folder).vocabulary
    assert not [*folder.glob("*/")]
