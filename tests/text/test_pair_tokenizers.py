"""Tokenizers of both sides of a pair."""

import pytest

from regard.errors import CheckpointError, ConfigError, DataError
from regard.text import PairTokenizers, train_pair

ROWS = [("one two", "un deux"), ("two three", "deux trois"), ("three", "trois")] * 3


def rows():
    return iter(ROWS)


def test_a_joint_vocabulary_is_one_tokenizer_in_one_file(tmp_path):
    pair = train_pair("word", rows)
    assert pair.joint
    assert pair.source is pair.target
    assert pair.source.decode(pair.source.encode("one deux three")) == "one deux three"
    pair.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    again = PairTokenizers.load(tmp_path)
    assert again.joint
    assert again.source.fingerprint() == pair.source.fingerprint()


def test_separate_vocabularies_are_two_tokenizers_in_two_files(tmp_path):
    pair = train_pair({"kind": "word", "shared": False, "vocab_size": 100}, rows)
    assert not pair.joint
    assert pair.source.encode("deux") == [pair.source.unk_id]
    assert pair.target.encode("two") == [pair.target.unk_id]
    pair.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["tokenizer.source.json", "tokenizer.target.json"]
    again = PairTokenizers.load(tmp_path)
    assert not again.joint
    assert again.source.fingerprint() == pair.source.fingerprint()
    assert again.target.fingerprint() == pair.target.fingerprint()


def test_separate_stays_separate_even_when_both_sides_are_equal(tmp_path):
    pair = train_pair({"kind": "char", "shared": False}, lambda: iter([("ab", "ab")]))
    pair.save(tmp_path)
    assert not PairTokenizers.load(tmp_path).joint


@pytest.mark.parametrize("gone", ["tokenizer.source.json", "tokenizer.target.json"])
def test_a_missing_side_is_named(tmp_path, gone):
    train_pair({"kind": "char", "shared": False}, rows).save(tmp_path)
    (tmp_path / gone).unlink()
    with pytest.raises(CheckpointError, match=gone):
        PairTokenizers.load(tmp_path)


def test_a_folder_with_none_or_with_both_kinds_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*tokenizer\.json"):
        PairTokenizers.load(tmp_path)
    train_pair("char", rows).save(tmp_path)
    train_pair({"kind": "char", "shared": False}, rows).save(tmp_path)
    with pytest.raises(CheckpointError, match="both"):
        PairTokenizers.load(tmp_path)


def test_shared_is_true_or_false_and_rows_are_needed():
    with pytest.raises(ConfigError, match="shared='no' must be true or false"):
        train_pair({"kind": "char", "shared": "no"}, rows)
    with pytest.raises(DataError, match="no text"):
        train_pair("char", lambda: iter([]))
