"""Files and vocabularies that would hang the program, fill its memory or end it."""

import base64
import json
import os

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from regard.errors import CheckpointError
from regard.files.untrusted import (
    MAX_FILE_BYTES,
    as_checkpoint_error,
    check_charsmap,
    open_regular_file,
    read_text,
)
from regard.text import Tokenizer
from regard.text.pretrained import load_pretrained
from text import files


def table(model=None, **changes):
    """A tokenizer.json of two words, changed."""
    library = Library(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    found = json.loads(library.to_str())
    return found | changes | {"model": found["model"] | (model or {})}


def load(folder, content):
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer.load(path)


# Files


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    if name == "tokenizer_config.json":
        load(tmp_path, table())
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: it is not a regular file"):
        load_pretrained(tmp_path, {})


def test_devices_folders_and_files_beyond_all_bounds_are_refused(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # takes no room on the disk
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            open_regular_file(path)
    with pytest.raises(
        CheckpointError, match="it has 100,000,001 bytes, and the limit is 100,000,000"
    ):
        read_text(tmp_path / "huge")
    open_regular_file(tmp_path / "huge").close()


# Ids


@pytest.mark.parametrize(
    "content",
    [
        table(model={"vocab": {"<unk>": 0, "a": 300_000_000}}),
        table(model={"type": "BPE", "merges": [], "vocab": {"a": 300_000_000}}),
        table(added_tokens=[{"id": 2_000_000_000, "content": "x", "special": True}]),
    ],
)
def test_an_id_far_above_all_others_is_refused_before_a_list_that_long_is_made(tmp_path, content):
    with pytest.raises(CheckpointError, match="000000 is far above the number of tokens"):
        load(tmp_path, content)


def test_a_vocab_json_with_such_an_id_is_refused_too(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 100000000}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"vocab\.json cannot be used: id 100000000 is far"):
        load_pretrained(tmp_path, {})


def test_a_vocabulary_may_have_gaps(tmp_path):
    assert load(tmp_path, table(model={"vocab": {"<unk>": 0, "a": 10_000}})).vocab_size == 10_001


# Maps of characters


def with_charsmap(data):
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    return table(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, step]})


def charsmap_pointing_to(offset):
    """A map whose only text begins at some byte of 'é'."""
    data = bytearray(files.charsmap("X", "é"))
    data[4 + 4 * (256 ^ ord("X") ^ 1)] = offset
    return bytes(data)


def test_a_good_map_is_read(tmp_path):
    tokenizer = load(tmp_path, with_charsmap(files.charsmap("X", "a")))
    assert tokenizer.encode("X a b") == [1, 1, 0]
    check_charsmap(charsmap_pointing_to(0))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (with_charsmap(b""), "is truncated"),
        (with_charsmap(b"\x01"), "is truncated"),
        (with_charsmap(b"\x04\0\0\0" + b"\xff\x7f\x12\x34"), "points outside its trie"),
        (with_charsmap(charsmap_pointing_to(1)), "into the middle of a character"),
        (with_charsmap(charsmap_pointing_to(9)), "points outside its texts"),
        (table(normalizer={"type": "Precompiled", "precompiled_charsmap": None}), "not a string"),
        (table(normalizer={"type": "Precompiled", "precompiled_charsmap": "é"}), "corrupted: "),
    ],
)
def test_a_corrupted_map_is_refused_and_the_library_never_sees_it(tmp_path, capfd, content, why):
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path, content)
    assert "panicked" not in capfd.readouterr().err


# Panics


def template(*names):
    part = {name: {"Sequence": {"id": name, "type_id": 0}} for name in "AB"}
    single, pair = [part[name] for name in names], list(part.values())
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


@pytest.mark.parametrize("names", ["B", "AB", ""])
def test_a_template_of_one_text_that_names_another_is_refused(tmp_path, names):
    with pytest.raises(CheckpointError, match="must contain text A only"):
        load(tmp_path, table(post_processor=template(*names)))


def test_a_panic_of_the_library_becomes_an_error_of_ours_and_an_interrupt_does_not():
    def panic():
        Library.from_str(json.dumps(with_charsmap(b"")))

    with (
        pytest.raises(CheckpointError, match="corrupted: Precompiled"),
        as_checkpoint_error("corrupted"),
    ):
        panic()
    with pytest.raises(KeyboardInterrupt), as_checkpoint_error("corrupted"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "model",
    [
        {"unk_token": "<none>"},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None},
        {"type": "WordPiece", "unk_token": "<none>", "max_input_chars_per_word": 9},
    ],
)
def test_a_vocabulary_without_an_unknown_token_is_refused_when_loaded(tmp_path, model):
    extra = {"continuing_subword_prefix": "##"} if model.get("type") == "WordPiece" else {}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .*(UNK|unk)"):
        load(tmp_path, table(model=model | extra))
