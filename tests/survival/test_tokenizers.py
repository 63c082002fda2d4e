"""Tokenizers out to harm: refused when loaded, or when used; soon, in little memory."""

import json
import resource
import time

import pytest

from regard.errors import CheckpointError, DataError, RegardError
from regard.text import Tokenizer, train_tokenizer
from regard.text.pretrained import load_pretrained
from regard.text.tokenizer_limits import SpeedCheck, check_regex
from storm.hostile_tokenizers import BYTES, SECONDS, added, nested, prose, replace, sequence, split
from text import files


@pytest.fixture(scope="module")
def tables():
    """A tokenizer.json of three kinds."""
    kinds = {"char": {}, "bpe": {"vocab_size": 300}, "unigram": {"vocab_size": 50}}
    trained = [
        train_tokenizer({"kind": kind, **size}, [prose(3000)]) for kind, size in kinds.items()
    ]
    return {each.kind: json.loads(each.backend.to_str()) for each in trained}


@pytest.fixture
def load(tables, tmp_path):
    """Load the tokenizer.json of a kind with changes, of the whole or of its model."""

    def attempt(kind="bpe", model=None, **changes):
        table = {**tables[kind], **changes}
        table["model"] = {**table["model"], **(model or {})}
        (tmp_path / "tokenizer.json").write_text(json.dumps(table))
        return Tokenizer.load(tmp_path / "tokenizer.json")

    return attempt


@pytest.fixture(autouse=True)
def _held():
    """Every test here is within the limits of time and memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - began < 2 * SECONDS  # with what the test itself does
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < BYTES


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
PREPEND = {"type": "Prepend", "prepend": "x" * 60}
MANY_TOKENS = [added(i, f"{i:0500x}"[::-1]) for i in range(2000)]
BERT = {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", 0]}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": sequence("normalizers", [replace("a", "a" * 30)] * 8)}, "3e.12 times as"),
        ({"normalizer": sequence("normalizers", [replace(".", "xx", "Regex")] * 20)}, "times as"),
        ({"normalizer": sequence("normalizers", [{"type": "NFKC"}] * 20)}, "times as long"),
        ({"normalizer": sequence("normalizers", [PREPEND] * 9)}, "times as long"),
        ({"normalizer": replace("a", "x" * 99)}, "a Replace .* turns one character into 99"),
        ({"normalizer": replace("", "x")}, "the pattern of a Replace is empty"),
        (
            {"normalizer": replace(r"(\w+)+!", "x", "Regex")},
            "has nested unbounded quantifiers",
        ),
        ({"normalizer": replace(r"(\w)\1", "x", "Regex")}, r"has \\1, which is not supported"),
        ({"normalizer": {"type": "Python"}}, "a step of unknown type 'Python'"),
        ({"normalizer": nested({"type": "NFC"}, "normalizers", 9)}, "more than 8 levels"),
        ({"pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 40)}, "times as long"),
        ({"pre_tokenizer": split(r"(\w|\w\w)+(?=_\z)")}, "retry-limit-in-match over"),
        ({"decoder": replace("", "xx")}, "the pattern of a Replace is empty"),
        ({"decoder": sequence("decoders", [replace("a", "a" * 9)] * 9)}, "when decoding"),
        ({"decoder": {"type": "BPEDecoder", "suffix": ""}}, "replaces an empty string"),
        ({"added_tokens": MANY_TOKENS}, "more than 400,000 different prefixes"),
        ({"added_tokens": [added(300, "x" * 5000)]}, "has 5,000 characters, and the limit is"),
        ({"added_tokens": [added(i, "x" * 999 + str(i)) for i in range(2100)]}, "2,1.. added"),
        ({"post_processor": TEMPLATE}, "more than 256 parts"),
        ({"post_processor": BERT}, "id 1000000000 is not one of the"),
        ({"model": {"continuing_subword_prefix": "x" * 5000}}, "has 5,000 characters"),
    ],
)
def test_what_has_no_bound_is_refused_when_loaded(load, changes, message):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{message}"):
        load(**changes)


def test_a_vocabulary_that_fills_the_memory_is_refused(load):
    """340 bytes in memory for every prefix: 1 GB."""
    vocab = [["<unk>", 0.0], *([f"{i:0300x}"[::-1], -1.0] for i in range(10_000))]
    with pytest.raises(CheckpointError, match="more than 1,400,000 different prefixes"):
        load("unigram", model={"vocab": vocab})
    load("unigram", model={"vocab": [["<unk>", 0.0], *([f"{i:0300x}", -1.0] for i in range(5000))]})


def test_a_key_that_two_readers_understand_differently_is_refused(tables, tmp_path):
    text = json.dumps(tables["bpe"])
    (tmp_path / "tokenizer.json").write_text('{"normalizer": null, ' + text[1:])
    with pytest.raises(CheckpointError, match="has the same key twice"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_panic_at_use_is_an_error_of_ours(load):
    """An expression that is catastrophic only for texts that are not tried when it is loaded."""
    tokenizer = load(pre_tokenizer=split(r"(q|qq)+(?=!\z)"))
    assert tokenizer.encode("the cat")
    message = r"fails on this input.*retry-limit"
    for call in (tokenizer.encode, tokenizer.unknown_parts):
        with pytest.raises(CheckpointError, match=message):
            call("q" * 60 + "?!")
    steps = [{"type": "Fuse"}, replace(r"(q|qq)+(?=!\z)", "x", "Regex")]
    decoding = load(decoder=sequence("decoders", [BYTE_LEVEL, *steps]))
    with pytest.raises(CheckpointError, match=message):
        decoding.decode(load().encode("q" * 60 + "?!"))


def test_a_text_that_takes_too_long_is_refused_before_all_of_it_is_read(load, monkeypatch):
    """Quadratic in the length: for the whole text a minute."""
    tokenizer = load(pre_tokenizer=split(r"q[\s\S]*(?=[st][!?]\z)"))
    monkeypatch.setattr(SpeedCheck, "FIXED_SECONDS", 0.05)  # so that this test is short
    assert tokenizer.encode("the q cat")
    with pytest.raises(
        DataError, match=r"takes .* s for \d+ characters; it is corrupted or malicious"
    ):
        tokenizer.encode("q " * 100_000 + "s!x")


def test_the_pace_is_measured_once_and_only_for_longer_texts():
    pace, lengths = SpeedCheck("characters"), []
    for length in (10, 40, 30, 40, 50, 1 << 18):
        pace.check(lambda part: lengths.append(len(part)), "x" * length)
    assert lengths[:5] == [24, 36, 40, 50, 75]
    assert SpeedCheck.MAX_LENGTH <= lengths[-1] < 2 * SpeedCheck.MAX_LENGTH


def test_a_random_vocabulary_is_made_certain(load):
    tokenizer = load(model={"dropout": 0.9})
    assert len({tuple(tokenizer.encode(prose(200))) for _ in range(5)}) == 1


def test_characters_are_looked_up_only_if_nothing_else_changes_them(load):
    normalizer = sequence("normalizers", [replace("a", "aaa")])
    tokenizer = load("char", normalizer=normalizer)
    assert tokenizer.kind == "word"
    assert len(tokenizer.encode("cat")) == 5
    assert load("char", normalizer={"type": "Lowercase"}).kind == "char"


def test_older_files_have_the_same_limits(tmp_path):
    pieces = [("<unk>", 0.0, files.UNKNOWN), ("x" * 5000, 0.0, files.NORMAL)]
    for name, content in {
        "vocab.txt": b"[UNK]\n" + b"x" * 5000,
        "spiece.model": files.sentencepiece(pieces),
        "tokenizer.model": files.sentencepiece(
            [pieces[0], *((f"{i:03000d}", 0.0, files.NORMAL) for i in range(30))], model=2
        ),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(RegardError, match=r"characters|too long"):
            load_pretrained(folder, {})


REAL = [  # GPT-2, GPT-4, GPT-4o, DeepSeek, Kimi, BLOOM, Falcon, molecules, digits from the right
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t)?|\s*[\r\n]+|\s+(?!\S)",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"[\p{Han}]+|[\p{Lu}\p{Lt}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[0-9][0-9][0-9]|(?:\r?\n)+(?!\r?\n)",
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])",
    r"(?=(\d{3})+(?!\d))|(?<=[a-z])(?=[A-Z])|[[:alpha:]]|\x{4e00}|\A +| +\z",
]


@pytest.mark.parametrize("expression", REAL)
def test_the_expressions_of_real_tokenizers_are_accepted(load, expression):
    check_regex(expression)
    load(pre_tokenizer=sequence("pretokenizers", [split(expression), BYTE_LEVEL]))
