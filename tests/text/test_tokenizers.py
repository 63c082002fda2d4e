"""Every kind of tokenizer, taken from the table, and what each alone promises."""

import json
import os
import pickle
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import CheckpointError, ConfigError, DataError
from regard.text import (
    SPECIAL_TOKENS,
    TOKENIZERS,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
    trainers,
)
from regard.text.trainers import sample_texts

CORPUS = [
    "The cat sat on the mat, and the dog sat on the log.\n",
    'She said: "Don\'t look <pad> now (or ever)!" — été, naïve, ΑΣ\n',
    "<start> <stop> <unk> <mask> <cls> <sep> <pad><pad> pad stop <PAD>\n",
    "12,000.5 times, 日本語 and 👩‍🚀 emoji\r\n\ttabs  and   spaces\n",
] * 5
SIZES = {"bpe": 400, "wordpiece": 300, "unigram": 200, "word": 60}
KINDS = list(TOKENIZERS)
FEW = settings(max_examples=60, deadline=None)

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL_TOKENS, *(each.upper() for each in SPECIAL_TOKENS), "<", "pad", ">", " ", ""]
        ),
        st.text("<>/padstounk #▁￭Ġ\n", max_size=5),
        ANY_TEXT,
    )
).map("".join)


@cache
def trained(kind: str, lower: bool = False) -> Tokenizer:
    options = {"vocab_size": SIZES[kind]} if kind in SIZES else {}
    return train_tokenizer({"kind": kind, "lower": lower, **options}, CORPUS)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def test_special_tokens_have_the_same_ids_in_every_kind(kind):
    tokenizer = trained(kind)
    names = ["pad", "bos", "eos", "unk", "mask", "cls", "sep"]
    assert [tokenizer.special_id(name) for name in names] == list(range(7))
    assert [tokenizer.piece(id) for id in range(7)] == list(SPECIAL_TOKENS)
    ids = tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id
    assert ids == (0, 1, 2, 3)


def test_an_unknown_special_name_gets_a_suggestion(kind):
    with pytest.raises(ConfigError, match="did you mean 'eos'"):
        trained(kind).special_id("eoss")


def test_ids_are_in_range_and_every_id_has_a_piece(kind):
    tokenizer = trained(kind)
    ids = tokenizer.encode("".join(CORPUS))
    assert ids
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size == len(tokenizer)
    assert all(tokenizer.piece(id) for id in range(tokenizer.vocab_size))
    assert tokenizer.vocab_size <= SIZES.get(kind, 1000)


def test_ids_outside_the_vocabulary_are_refused(kind):
    tokenizer = trained(kind)
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"id {id} is not one of"):
            tokenizer.decode([1, id, 2])
        with pytest.raises(DataError, match=f"id {id} is not one of"):
            tokenizer.piece(id)


def test_one_by_one_in_a_batch_and_as_an_array_the_ids_are_the_same(kind):
    tokenizer = trained(kind)
    texts = [*CORPUS, "", "unseen: Ж"]
    single = [tokenizer.encode(text) for text in texts]
    arrays = [tokenizer.encode_array(text) for text in texts]
    assert tokenizer.encode_batch(texts) == single == [array.tolist() for array in arrays]
    assert {array.dtype for array in arrays} == {np.dtype(np.uint32)}


def test_decoding_skips_special_tokens(kind):
    tokenizer = trained(kind)
    ids = tokenizer.encode("the cat")
    framed = [tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(framed) == tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(iter(np.array(ids))) == "the cat"
    assert tokenizer.decode([]) == ""


def test_saved_and_loaded_is_the_same(kind, tmp_path):
    tokenizer = trained(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.kind, again.vocab_size) == (kind, tokenizer.vocab_size)
    assert again.fingerprint() == tokenizer.fingerprint()
    for text in [*CORPUS, "<stop>"]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_copy_for_a_worker_process_is_the_same(kind):
    tokenizer = trained(kind)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode("a <stop> b") == tokenizer.encode("a <stop> b")


@pytest.mark.parametrize("lower", [False, True])
def test_text_that_spells_special_tokens_has_no_special_ids(kind, lower):
    tokenizer = trained(kind, lower)
    for text in [
        *SPECIAL_TOKENS,
        *(each.upper() for each in SPECIAL_TOKENS),
        "".join(SPECIAL_TOKENS),
        "a<pad>b",
    ]:
        ids = tokenizer.encode(text)
        assert ids
        assert not {0, 1, 2, 4, 5, 6} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lower", [False, True])
@given(text=HOSTILE)
@FEW
def test_no_text_at_all_has_special_ids(kind, lower, text):
    assert not {0, 1, 2, 4, 5, 6} & set(trained(kind, lower).encode(text))


def test_unknown_punctuation_is_named_without_the_letter_before_it():
    tokenizer = train_tokenizer("word", ["great film\n"])
    assert tokenizer.unknown_parts("great, dull film!") == [",", "dull", "!"]


@pytest.mark.parametrize("value", [5, None, b"x", ["the"], float("nan")])
def test_what_is_no_text_is_refused(value):
    for kind in ("char", "bpe"):
        tokenizer = trained(kind)
        for call in (tokenizer.encode, tokenizer.encode_array, tokenizer.unknown_parts):
            with pytest.raises(DataError, match="a text must be a string, not "):
                call(value)


def test_a_lone_surrogate_is_refused_with_its_position(kind):
    tokenizer = trained(kind)
    for encode in (tokenizer.encode, tokenizer.encode_array, lambda t: tokenizer.encode_batch([t])):
        with pytest.raises(DataError, match="character 3 of the text is a lone surrogate"):
            encode("cat\ud800")
    with pytest.raises(DataError, match=r"character 1 .* lone surrogate"):
        TOKENIZERS[kind](["fine", "a\udfff"])
    with pytest.raises(DataError, match=r"character 1 .* lone surrogate"):
        train_tokenizer(kind, ["fine", "a\udfff"])


LEARN = """
import sys
from regard.text import train_tokenizer
lines = open(sys.argv[1], encoding="utf-8", newline="").read().splitlines(keepends=True)
for kind in sys.argv[2:]:
    print(train_tokenizer(kind, lines).fingerprint())
"""


def test_the_same_text_gives_the_same_tokenizer_in_every_process(tmp_path):
    # Words with many ties, which is where the order in which a trainer visits them would show.
    words = [a + b + c for a in "abcdé" for b in "xyz " for c in "pq日"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words) + "\n" + "".join(CORPUS), encoding="utf-8", newline="")
    command = [sys.executable, "-c", LEARN, str(text), *KINDS]
    threads = [{"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "2"}, {}]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | each)
        for each in threads
    ]
    assert [run.stderr for run in runs] == ["", "", ""]
    assert len({run.stdout for run in runs}) == 1
    assert len(set(runs[0].stdout.split())) == len(KINDS)


def test_lower_folds_case(kind):
    tokenizer = trained(kind, lower=True)
    assert tokenizer.encode("THE Cat ÉTÉ") == tokenizer.encode("the cat été")
    assert tokenizer.decode(tokenizer.encode("THE Cat ÉTÉ")) == "the cat été"
    assert trained(kind).encode("THE") != trained(kind).encode("the")


def test_no_text_is_an_error(kind):
    for nothing in ([], [""]):
        with pytest.raises(DataError, match="no text"):
            train_tokenizer(kind, nothing)


@pytest.mark.parametrize("size", [3, "8k"])
@pytest.mark.parametrize("kind", SIZES)
def test_a_size_that_cannot_be_is_refused(kind, size):
    with pytest.raises(ConfigError, match=r"size(=3)? must be an integer"):
        train_tokenizer({"kind": kind, "vocab_size": size}, CORPUS)


def test_characters_have_no_size_and_unknown_kinds_get_a_suggestion():
    with pytest.raises(ConfigError, match="unknown option 'vocab_size'"):
        train_tokenizer({"kind": "char", "vocab_size": 100}, CORPUS)
    with pytest.raises(ConfigError, match="did you mean 'wordpiece'"):
        train_tokenizer("wordpieces", CORPUS)


# One kind each


@given(text=st.one_of(ANY_TEXT, HOSTILE))
@settings(max_examples=300, deadline=None)
def test_bytes_give_back_any_text(text):
    tokenizer = trained("bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", "\0", "a\r\nb\r", " lead", "trail ", "\ufeff", "\U0010ffff", "e\u0301", "Ġ"]
)
def test_bytes_give_back_awkward_text(text):
    tokenizer = trained("bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_pieces_are_readable_and_half_characters_show_their_bytes():
    tokenizer = trained("bpe")
    assert [tokenizer.piece(id) for id in tokenizer.encode("on the")] == ["on", " the"]
    assert [tokenizer.piece(id) for id in tokenizer.encode("Ж\n")] == ["<0xD0>", "<0x96>", "\n"]


@given(text=ANY_TEXT)
@FEW
def test_byte_pieces_of_ascii_join_to_the_text(text):
    tokenizer = trained("bpe")
    text = text.encode("ascii", errors="ignore").decode()
    assert "".join(map(tokenizer.piece, tokenizer.encode(text))) == text


def backend_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the library itself makes of the same tokenizer.json."""
    library = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("lower", [False, True])
@given(text=st.one_of(HOSTILE, st.text("The caİtΑΣßǅ<pad>\r\n\0é日👩‍🚀")))
@FEW
def test_characters_by_table_are_those_of_the_library(lower, text):
    tokenizer = trained("char", lower)
    assert tokenizer.encode(text) == backend_ids(tokenizer, text)


def test_a_final_sigma_is_lowered_as_the_library_does_it():
    tokenizer = TOKENIZERS["char"](["ΑΣ ας"], lower=True)
    assert tokenizer.encode("ΑΣ ΑΣ") == backend_ids(tokenizer, "ΑΣ ΑΣ")
    assert tokenizer.decode(tokenizer.encode("ΑΣ")) == "ασ"


def test_a_capital_that_becomes_two_small_characters_does_so_in_the_table_too():
    tokenizer = TOKENIZERS["char"](["İstanbul"], lower=True)
    assert len(tokenizer.encode("İ")) == 2
    assert tokenizer.decode(tokenizer.encode("İstanbul")) == "i\u0307stanbul"


@given(text=ANY_TEXT)
@FEW
def test_characters_seen_come_back_and_others_are_unknown(text):
    tokenizer = TOKENIZERS["char"]([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 7 + len(set(text))
    stranger = (
        "a" if "a" not in text else next(c for c in map(chr, range(98, 999)) if c not in text)
    )
    assert tokenizer.encode(stranger) == [tokenizer.unk_id]


def test_words_touch_what_they_touched():
    texts = [
        'She said: "don\'t", (or "do"!) — why?\nA new line… 3.14, x_1 a/b',
        "l'été, naïve-té; «bon»",
        "(a)(b) ...",
    ]
    tokenizer = TOKENIZERS["word"](texts)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    pieces = [tokenizer.piece(id) for id in tokenizer.encode('"don\'t", or')]
    assert pieces == ['"', "don", "'", "t", '"', ",", "or"]


def test_words_lose_only_the_number_of_spaces():
    tokenizer = TOKENIZERS["word"](["a b , \n"])
    assert tokenizer.decode(tokenizer.encode("  a \t b  , a \r\n b ")) == "a b , a\nb"


def test_the_most_frequent_words_are_kept_and_have_one_form():
    tokenizer = TOKENIZERS["word"](["one two two three three three (three) three"], vocab_size=9)
    assert [tokenizer.piece(id) for id in (7, 8)] == ["three", "two"]
    assert tokenizer.encode("(three three one") == [3, 7, 7, 3]


def test_word_pieces_continue_with_a_double_sharp():
    tokenizer = TOKENIZERS["wordpiece"](["hug hugs pug pugs hugging bugs"] * 5, vocab_size=30)
    pieces = [tokenizer.piece(id) for id in tokenizer.encode("nugs, hugs")]
    assert "".join(pieces).replace("##", "") == "nugs<unk>hugs"
    assert pieces[0] == "n"
    assert pieces[1].startswith("##")
    assert tokenizer.decode(tokenizer.encode("pugs hugging")) == "pugs hugging"


def test_the_bytes_of_word_pieces_are_those_of_the_text():
    tokenizer = TOKENIZERS["wordpiece"](["hug hugs pug pugs hugging bugs"] * 5, vocab_size=30)
    ids = tokenizer.encode("nugs")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"nugs"


def test_word_pieces_say_when_the_characters_alone_are_too_many():
    text = "".join(map(chr, range(0x430, 0x450)))
    with pytest.raises(ConfigError, match=r"size=50 .* at least 71:\n.*64 characters"):
        TOKENIZERS["wordpiece"]([text, "b"], vocab_size=50)


def test_unigram_pieces_keep_all_spaces():
    tokenizer = trained("unigram")
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert "".join(map(tokenizer.piece, tokenizer.encode(text))) == text
    assert tokenizer.decode(tokenizer.encode("  the  cat ")) == "  the  cat "


def test_unigram_says_when_the_characters_alone_are_too_many():
    text = "".join(map(chr, range(0x4E00, 0x4E80)))
    with pytest.raises(ConfigError, match=r"size=50 .* at least 135:\n.*128 characters"):
        TOKENIZERS["unigram"]([text], vocab_size=50)


# Files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"PK\x03\x04",
        b'{"model": {"type": "BPE"}}',
        b"hello",
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"odd\.json is not a tokenizer\.json"):
        load_tokenizer(path)


def test_a_corrupted_file_is_named(kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    trained(kind).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not"):
        load_tokenizer(path)


def test_a_missing_file_a_folder_and_a_place_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*none\.json"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write .*missing"):
        trained("char").save(tmp_path / "missing" / "tokenizer.json")


def test_an_external_tokenizer_loads_and_says_which_tokens_it_lacks(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))

    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", library.get_vocab_size())
    text = "The <|endoftext|> of a long line"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 not in ids
    assert tokenizer.special_id("pad") is None
    with pytest.raises(ConfigError, match=r"no eos token;\nits special tokens: <\|endoftext\|>"):
        _ = tokenizer.eos_id


def test_the_fingerprint_does_not_depend_on_how_the_file_is_laid_out(tmp_path):
    tokenizer, path = trained("word"), tmp_path / "tokenizer.json"
    tokenizer.save(path)
    table = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(table, sort_keys=True), encoding="utf-8")
    assert load_tokenizer(path).fingerprint() == tokenizer.fingerprint()
    assert trained("word", lower=True).fingerprint() != tokenizer.fingerprint()


# Sampling


def test_a_sample_is_everything_when_that_fits():
    assert sample_texts(["ab", "", "é"], 4) == ["ab", "é"]


@pytest.mark.parametrize("total", [None, 4000, 100])
def test_a_sample_is_bounded_and_spread_over_the_stream(total):
    pieces = [f"{number:04}" for number in range(1000)]
    taken = sample_texts(iter(pieces), 400, total_bytes=total)
    numbers = [int(piece) for piece in taken]
    steps = set(np.diff(numbers))
    assert 400 / 3 - 4 <= sum(map(len, taken)) <= 400
    assert len(steps) == 1
    assert steps.pop() % 2 == 1
    assert numbers[0] == 0
    assert numbers[-1] > 950


def test_a_sample_of_two_alternating_languages_has_both():
    taken = sample_texts((text for _ in range(1000) for text in ("ab", "éé")), 300)
    assert abs(taken.count("ab") - taken.count("éé")) <= 1


def test_one_long_piece_is_sampled_from_all_over(monkeypatch):
    monkeypatch.setattr(trainers, "WINDOW", 10)
    taken = sample_texts(["a" * 500 + "b" * 500], 100)
    assert sum(map(len, taken)) <= 100
    assert {"a" * 10, "b" * 10} == set(taken)


def test_training_takes_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(trainers, "MAX_TRAINING_BYTES", 100)
    monkeypatch.setattr(trainers, "MAX_BPE_BYTES", 50)
    monkeypatch.setattr(trainers, "WINDOW", 10)
    seen = []
    for kind, limit in (("mine", 100), ("bpe", 50)):
        seen.clear()
        monkeypatch.setitem(TOKENIZERS, kind, lambda texts: seen.extend(texts) or trained("char"))
        train_tokenizer(kind, (f"line {number}" for number in range(10_000)))
        assert limit / 3 - 10 <= sum(map(len, seen)) <= limit


def test_progress_is_told_while_a_tokenizer_is_trained():
    told = []
    train_tokenizer("bpe", ["one two", "three"], progress=lambda *numbers: told.append(numbers))
    assert told == [(7, 12), (12, 12)]
