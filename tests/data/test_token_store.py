import hashlib
import json
import os
import re
import tracemalloc
import zlib

import numpy as np
import pytest

from regard.data import pairs, text
from regard.data import token_store as store
from regard.data.text import from_file
from regard.data.token_store import pair_store, text_store
from regard.errors import CheckpointError, DataError
from regard.files import cache
from regard.files.cache import cache_folder


def text_of(*documents):
    return text.from_strings("t", "text", documents)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("REGARD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "regard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "regard"


def test_one_document_is_stored_without_a_stop(tokenizer):
    opened = text_store(text_of("naïve"), tokenizer)
    assert isinstance(opened.tokens, np.memmap)
    assert opened.tokens.dtype == np.uint16
    assert opened.tokens.tolist() == list("naïve".encode())
    assert opened.bytes == 6
    assert len(opened) == 6


def test_each_of_several_documents_is_followed_by_a_stop(tokenizer):
    opened = text_store(text_of("ab", "c"), tokenizer)
    assert opened.tokens.tolist() == [97, 98, 256, 99, 256]
    assert opened.bytes == 3


def test_a_document_of_many_chunks_has_one_stop(tokenizer, monkeypatch):
    monkeypatch.setattr(store, "_CHUNK_BYTES", 8)
    monkeypatch.setattr(store, "_CHUNKS", 2)
    opened = text_store(text_of("x" * 50, "y" * 30), tokenizer)
    assert opened.tokens.tolist() == [120] * 50 + [256] + [121] * 30 + [256]


def test_a_large_vocabulary_needs_32_bits(tokenizer):
    for size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        tokenizer.vocab_size = size
        assert text_store(text_of("ab"), tokenizer).tokens.dtype == dtype


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_a_text_of_many_chunks_is_stored_completely(tokenizer, kind):
    tokenizer.kind = kind
    content = "".join(f"line {i} é\n" for i in range(300_000))
    calls = []
    opened = text_store(text_of(content), tokenizer, progress=lambda *given: calls.append(given))
    assert opened.tokens.astype(np.uint8).tobytes() == content.encode()
    assert opened.bytes == len(content.encode())
    assert calls[-1] == (opened.bytes, opened.bytes)
    assert len(calls) > 1


def test_the_bytes_counted_are_those_tokenized(tokenizer):
    assert text_store(text_of("İ").lowercase(), tokenizer).bytes == len("İ".lower().encode()) == 3


def test_a_second_call_does_not_tokenize(tokenizer):
    first = text_store(text_of("hello"), tokenizer)
    calls = tokenizer.calls
    second = text_store(text_of("hello"), tokenizer)
    assert tokenizer.calls == calls
    assert (second.tokens.tolist(), second.bytes) == (first.tokens.tolist(), first.bytes)
    assert second.fingerprint == first.fingerprint


def test_another_text_or_tokenizer_has_another_store(tokenizer):
    stores = [text_store(text_of("hello"), tokenizer), text_store(text_of("hallo"), tokenizer)]
    tokenizer.vocab_size = 300
    stores.append(text_store(text_of("hello"), tokenizer))
    assert len({each.fingerprint for each in stores}) == 3


@pytest.mark.parametrize("damage", ["truncated", "no index", "bad index", "missing"])
def test_a_corrupted_store_is_made_again(tokenizer, home, damage):
    text_store(text_of("hello"), tokenizer)
    [folder] = (home / "tokens").iterdir()
    if damage == "truncated":
        os.truncate(folder / "tokens.bin", 4)
    elif damage == "no index":
        (folder / "index.json").unlink()
    elif damage == "bad index":
        (folder / "index.json").write_text("{")
    else:
        (folder / "tokens.bin").unlink()
    calls = tokenizer.calls
    assert text_store(text_of("hello"), tokenizer).tokens.tolist() == list(b"hello")
    assert tokenizer.calls > calls


@pytest.mark.parametrize("name", ["tokens.bin", "index.json"])
def test_any_changed_byte_of_a_store_is_seen_said_and_repaired(tokenizer, home, name, caplog):
    first = text_store(text_of("hello"), tokenizer)
    path = home / "tokens" / first.fingerprint / name
    content = path.read_bytes()
    for at in range(0, len(content), 9 if name == "index.json" else 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        caplog.clear()
        again = text_store(text_of("hello"), tokenizer)
        assert (again.tokens.tolist(), again.bytes) == (list(b"hello"), 5)
        assert path.read_bytes() == content
        assert re.match(
            f"corrupted cache: {path} .*; the result is computed again", caplog.messages[0]
        )


def test_a_changed_block_of_a_large_store_is_seen(tokenizer, home, monkeypatch):
    monkeypatch.setattr(cache, "_BLOCK", 64)
    first = text_store(text_of("hello" * 100), tokenizer)
    path = home / "tokens" / first.fingerprint / "tokens.bin"
    content = path.read_bytes()
    for at in range(0, len(content), 50):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        text_store(text_of("hello" * 100), tokenizer)
        assert path.read_bytes() == content


@pytest.mark.parametrize("side", ["source", "source-offsets", "target", "target-offsets"])
def test_corrupted_pairs_are_made_again(tokenizer, home, side):
    rows = pairs.from_rows("p", "made", [("ab", "c"), ("d", "efg")])
    path = home / "tokens" / pair_store(rows, tokenizer, tokenizer).fingerprint / f"{side}.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\1\1")
    opened = pair_store(rows, tokenizer, tokenizer)
    assert [opened.target(row).tolist() for row in (0, 1)] == [list(b"c"), list(b"efg")]
    assert path.read_bytes() == content


def test_an_id_outside_the_vocabulary_is_never_opened(tokenizer, home, monkeypatch, caplog):
    real = tokenizer.encode_batch
    opened = text_store(text_of("hello"), tokenizer)
    folder = home / "tokens" / opened.fingerprint
    (folder / "tokens.bin").write_bytes(np.array([1, 2, 257, 3, 4], np.uint16).tobytes())
    index = json.loads((folder / "index.json").read_text())  # which agrees with the wrong ids
    index["files"]["tokens.bin"] = cache._checksums(folder / "tokens.bin")
    index["sha256"] = cache._hash(index)
    (folder / "index.json").write_text(json.dumps(index))
    assert text_store(text_of("hello"), tokenizer).tokens.tolist() == list(b"hello")
    assert "tokens.bin has the id 257, and the vocabulary 257 ids" in caplog.text
    for ids in ([257], [-1], [1 << 32]):
        monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, ids=ids: [ids for _ in texts])
        with pytest.raises(DataError, match=rf"gives the id {ids[0]}, .* 257 ids"):
            text_store(text_of("hallo"), tokenizer)
    monkeypatch.setattr(tokenizer, "encode_batch", real)
    assert text_store(text_of("hallo"), tokenizer).tokens.tolist() == list(b"hallo")


def test_a_failure_half_way_leaves_nothing(tokenizer, home, monkeypatch):
    def fail(texts):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "encode_batch", fail)
    with pytest.raises(KeyboardInterrupt):
        text_store(text_of("hello"), tokenizer)
    assert list((home / "tokens").iterdir()) == []


def test_what_a_killed_process_left_is_swept_up_after_a_day(tokenizer, home):
    old, young = home / "tokens" / ".a.tmp-1@elsewhere", home / "tokens" / ".b.tmp-2@elsewhere"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"half")
    for path in (old / "tokens.bin", old):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    text_store(text_of("hello"), tokenizer)
    assert not old.exists()
    assert young.exists()


def test_a_faster_process_wins_and_its_store_is_used(tokenizer, home, monkeypatch):
    real = tokenizer.encode_batch

    def encode(texts):
        monkeypatch.setattr(tokenizer, "encode_batch", real)
        monkeypatch.setattr(os, "getpid", lambda: 1)  # the other process
        opened = text_store(text_of("hello"), tokenizer)
        (home / "tokens" / opened.fingerprint / "theirs").touch()
        return real(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    assert text_store(text_of("hello"), tokenizer).tokens.tolist() == list(b"hello")
    [folder] = (home / "tokens").iterdir()
    assert (folder / "theirs").exists()


def test_a_store_that_cannot_be_written_says_where_to_put_it(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="REGARD_HOME"):
        text_store(text_of("hello"), tokenizer)


def test_a_text_without_tokens_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [[] for _ in texts])
    with pytest.raises(DataError, match="no tokens"):
        text_store(text_of("hello"), tokenizer)


def test_the_index_is_plain_json(tokenizer, home):
    opened = text_store(text_of("hello"), tokenizer)
    index = json.loads((home / "tokens" / opened.fingerprint / "index.json").read_text())
    digest = index.pop("sha256")
    files = {"tokens.bin": {"size": 10, "crc32": [zlib.crc32(opened.tokens.tobytes())]}}
    assert index == {"format": 1, "files": files, "bytes": 5}
    assert digest == hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def test_pairs_come_back_row_by_row(tokenizer, monkeypatch):
    monkeypatch.setattr(store, "_ROWS", 1)
    rows = [("ab", "é"), ("c", "xyz"), ("defg", "z")]
    opened = pair_store(pairs.from_rows("p", "made", rows), tokenizer, tokenizer)
    assert len(opened) == 3
    for number, (source, target) in enumerate(rows):
        assert opened.source(number).tolist() == list(source.encode())
        assert opened.target(number).tolist() == list(target.encode())
    assert opened.source_lengths.tolist() == [2, 1, 4]
    assert opened.target_lengths.tolist() == [2, 3, 1]


def test_stored_pairs_are_not_tokenized_again(tokenizer):
    opened = pairs.from_rows("p", "made", [("a", "b"), ("c", "d")])
    first = pair_store(opened, tokenizer, tokenizer)
    calls = tokenizer.calls
    second = pair_store(opened, tokenizer, tokenizer)
    assert tokenizer.calls == calls
    assert second.fingerprint == first.fingerprint
    train, _ = opened.split(0.5, seed=1)
    assert pair_store(train, tokenizer, tokenizer).fingerprint != first.fingerprint
    assert tokenizer.calls > calls


def test_sides_that_give_no_ids_can_be_stored(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [[] for _ in texts])
    opened = pair_store(pairs.from_rows("p", "made", [("a", "b")]), tokenizer, tokenizer)
    assert opened.source(0).tolist() == []
    assert opened.target_lengths.tolist() == [0]


def test_memory_does_not_grow_with_the_text(tokenizer, tmp_path):
    tokenizer.kind = "char"
    peaks = []
    for megabytes in (4, 40):
        path = tmp_path / f"{megabytes}.txt"
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(b"0123456789abcde\n" * 62_500)
        tracemalloc.start()
        opened = text_store(from_file(path), tokenizer)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(opened) == opened.bytes == megabytes * 1_000_000
    assert peaks[1] < 1.1 * peaks[0] < 40_000_000
