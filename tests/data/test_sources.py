import gzip
import json
import os
import pickle
import subprocess
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import pairs, text
from regard.data import text_files as files
from regard.data.builtin import BUILTINS
from regard.data.labels import LabelledText
from regard.data.pairs import Pairs
from regard.data.series import Series
from regard.data.text import Text
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data


def write_file(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def full_text(opened: Text, limit: int = 1 << 20) -> str:
    return "".join(piece for piece, _ in opened.chunks(limit))


def failure(*arguments, error=DataError, **options) -> str:
    with pytest.raises(error) as caught:
        open_data(*arguments, **options)
    assert 1 <= str(caught.value).count("\n") + 1 <= 5
    return str(caught.value)


def test_a_text_file_is_one_document(tmp_path):
    opened = open_data(write_file(tmp_path / "my.txt", "one\ntwo\n" * 200))
    assert isinstance(opened, Text)
    assert (opened.name, opened.size) == ("my", 1600)
    assert opened.description == "text, 1 file, 1.6 kB"
    assert list(opened.chunks()) == [("one\ntwo\n" * 200, True)]


def test_any_other_ending_is_text_too(tmp_path):
    assert full_text(open_data(write_file(tmp_path / "notes.md", "# hello"))) == "# hello"


@pytest.mark.parametrize("name", ["my.txt.gz", "my.txt"])
def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path, name):
    plain = open_data(write_file(tmp_path / "plain", "naïve\n" * 100))
    zipped = open_data(write_file(tmp_path / name, gzip.compress("naïve\n".encode() * 100)))
    assert full_text(zipped) == full_text(plain)
    assert zipped.size == plain.size
    assert zipped.fingerprint() == plain.fingerprint()
    assert [full_text(part) for part in zipped.split(0.3)] == [
        full_text(part) for part in plain.split(0.3)
    ]


def test_a_byte_order_mark_is_dropped_and_crlf_is_read_as_lf(tmp_path):
    opened = open_data(write_file(tmp_path / "dos.txt", b"\xef\xbb\xbfone\r\ntwo\r\n"))
    assert full_text(opened) == "one\ntwo\n"
    assert "2 CRLF line endings, read as LF" in opened.description
    assert "1 with CRLF line endings" in open_data(str(tmp_path)).description
    assert opened.fingerprint() != replace_crlf(opened).fingerprint()


def replace_crlf(text):
    return replace(text, documents=tuple(replace(each, crlf=False) for each in text.documents))


def test_a_crlf_is_never_cut_in_two(tmp_path):
    content = "one\r\ntwo more\r\r\nthree\r\n"
    opened = open_data(write_file(tmp_path / "dos.txt", content.encode()))
    for offset in range(1, len(content)):
        texts = [
            replace(opened, documents=(part,)) for part in opened.documents[0].split_at(offset)
        ]
        for limit in (8, 9, 10, 11, 100):
            parts = ["".join(chunk for chunk, _ in text.chunks(limit)) for text in texts]
            assert "".join(parts) == content.replace("\r\n", "\n")


def test_a_crlf_at_the_end_of_a_chunk_is_counted(tmp_path):
    content = b"x" * ((1 << 20) - 1) + b"\r\ny"
    opened = open_data(write_file(tmp_path / "dos.txt", content))
    assert "1 CRLF line endings" in opened.description


def test_lower_folds_case_and_changes_the_fingerprint(tmp_path):
    path = write_file(tmp_path / "my.txt", "ÉTÉ Yes")
    folded = open_data(path, lower=True)
    assert full_text(folded) == "été yes"
    assert folded.fingerprint() != open_data(path).fingerprint()


def test_the_direction_of_pairs_changes_the_fingerprint(tmp_path):
    path = write_file(tmp_path / "pairs.tsv", "a b\tc d\ne f\tg h\n")
    forward = open_data(path, columns={"source": "1", "target": "2"})
    backward = open_data(path, columns={"source": "2", "target": "1"})
    assert forward.fingerprint() == open_data(path).fingerprint() != backward.fingerprint()


def test_a_folder_gives_its_text_files_in_order_and_counts_the_rest(tmp_path):
    (tmp_path / "deep").mkdir()
    write_file(tmp_path / "b.txt", "b")
    write_file(tmp_path / "a.txt", "a")
    write_file(tmp_path / "deep" / "c.txt", gzip.compress(b"c"))
    write_file(tmp_path / "x.png", b"\x89PNG\r\n\x1a\n")
    write_file(tmp_path / "y.bin", b"ab\0c")
    write_file(tmp_path / "latin.txt", "é".encode("latin1"))
    write_file(tmp_path / "blank.txt", " \n")
    write_file(tmp_path / ".hidden", "h")
    (tmp_path / ".git").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "again").symlink_to(tmp_path / "deep")
    os.mkfifo(tmp_path / "pipe")
    opened = open_data(str(tmp_path))
    assert list(opened.chunks()) == [("a", True), ("b", True), ("c", True)]
    assert opened.description == (
        "text, 3 files, 3 bytes; skipped: 2 binary (x.png, …), 1 empty (blank.txt), "
        "2 hidden (.git, …), 1 linked folder (again), 1 missing (gone.txt), "
        "1 not UTF-8 (latin.txt), 1 not a file (pipe)"
    )
    write_file(tmp_path / "t.json", '{"a": "b"}')  # beside texts it is one of them
    assert open_data(str(tmp_path)).description.endswith("; a table read as plain text (t.json)")


def test_a_folder_without_text_is_an_error_that_says_what_is_there(tmp_path):
    write_file(tmp_path / "x.bin", b"\0\1")
    assert "1 binary (x.bin)" in failure(str(tmp_path))
    (tmp_path / "void").mkdir()
    assert "it is empty" in failure(str(tmp_path / "void"))


def test_one_line_of_fifty_megabytes_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "line.txt"
    with path.open("wb") as file:
        for _ in range(50):
            file.write("aé".encode() * 350_000)
    tracemalloc.start()
    opened = open_data(str(path))
    longest = total = 0
    for piece, _ in opened.chunks():
        longest, total = max(longest, len(piece.encode())), total + len(piece.encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == opened.size == 50 * 3 * 350_000
    assert longest <= 1 << 20
    assert peak < 12 << 20


@settings(max_examples=60)
@given(
    st.lists(st.text("aé€😀\n", max_size=30), min_size=1), st.integers(8, 20), st.floats(0.01, 0.99)
)
def test_chunks_and_parts_join_to_the_text(contents, limit, validation_fraction):
    opened = text.from_strings("t", "text", contents)
    pieces = list(opened.chunks(limit))
    assert "".join(piece for piece, _ in pieces) == "".join(contents)
    assert all(0 < len(piece.encode()) <= limit for piece, _ in pieces)
    assert sum(ends for _, ends in pieces) == sum(content != "" for content in contents)
    try:
        train, valid = opened.split(validation_fraction)
    except DataError:
        return
    assert full_text(train, limit) + full_text(valid, limit) == "".join(contents)
    assert 0 < train.size <= opened.size * (1 - validation_fraction) + 1e-6


def test_chunks_end_after_a_newline_if_there_is_one():
    opened = text.from_strings("t", "text", ["ab\ncdefgh\nijklmnopqrst"])
    assert [piece for piece, _ in opened.chunks(10)] == ["ab\ncdefgh\n", "ijklmnopq", "rst"]


@pytest.mark.parametrize(
    ("size", "validation_fraction", "train"),
    [(1_115_394, 0.1, 1_003_854), (10, 0.9, 1), (100, 0.1, 90), (1000, 0.58, 420), (7, 0.5, 3)],
)
def test_the_split_is_exact_for_the_share_as_written(size, validation_fraction, train):
    first, last = text.from_strings("t", "text", ["x" * size]).split(validation_fraction)
    assert (first.size, last.size) == (train, size - train)


def test_a_document_cut_by_the_split_does_not_end_in_the_first_part():
    first, last = text.from_strings("t", "text", ["abcd", "efgh"]).split(0.25)
    assert list(first.chunks()) == [("abcd", True), ("ef", False)]
    assert list(last.chunks()) == [("gh", True)]
    assert first.description == "text, 8 bytes; the first 6 bytes for training"
    assert last.description == "the last 2 bytes"


def test_the_split_never_cuts_a_character():
    first, last = text.from_strings("t", "text", ["aaa😀bbb"]).split(0.5)
    assert (full_text(first), full_text(last)) == ("aaa", "😀bbb")


def test_a_split_that_leaves_nothing_is_an_error():
    with pytest.raises(DataError, match="1 byte is too few"):
        text.from_strings("t", "text", ["x"]).split(0.1)
    with pytest.raises(ConfigError, match=r"validation_fraction=1\.5"):
        text.from_strings("t", "text", ["x"]).split(1.5)


def test_the_fingerprint_follows_content_not_place(tmp_path):
    one, same = write_file(tmp_path / "a.txt", "hello"), write_file(tmp_path / "b.txt", "hello")
    other = write_file(tmp_path / "c.txt", "hallo")
    assert open_data(one).fingerprint() == open_data(same).fingerprint()
    assert open_data(one).fingerprint() != open_data(other).fingerprint()
    train, valid = open_data(one).split(0.5)
    assert len({open_data(one).fingerprint(), train.fingerprint(), valid.fingerprint()}) == 3


def test_a_large_file_is_read_once_and_again_only_when_it_changes(tmp_path, monkeypatch, home):
    monkeypatch.setattr(files, "_MIN_AGE_NS", 0)
    path = tmp_path / "large.txt"
    write_file(path, "line\n" * 300_000)
    first = open_data(str(path)).fingerprint()
    reads = []
    real = files._scan_stream
    monkeypatch.setattr(files, "_scan_stream", lambda *given: reads.append(1) or real(*given))
    assert open_data(str(path)).fingerprint() == first
    assert not reads
    status = path.stat()
    write_file(path, "LINE\n" * 300_000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p and rsync do
    assert open_data(str(path)).fingerprint() != first
    assert reads
    (home / "scans.json").write_text("{ corrupted")
    assert open_data(str(path)).size == 1_500_000


def test_a_file_written_just_now_is_not_trusted_to_stay(tmp_path, home):
    open_data(write_file(tmp_path / "young.txt", "line\n" * 300_000))
    assert not (home / "scans.json").exists()


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", write_file(tmp_path / "a-file", "x"))
    path = tmp_path / "large.txt"
    write_file(path, "line\n" * 300_000)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert open_data(str(path)).size == 1_500_000


def test_bad_bytes_are_named_with_offset_and_line(tmp_path):
    message = failure(write_file(tmp_path / "bad.txt", b"good\nfine\nb\xffd\n"))
    assert "bad.txt" in message
    assert "byte 11 (line 3) is 0xff" in message
    assert message.endswith(f"iconv -f latin1 -t utf-8 {tmp_path / 'bad.txt'} > new.txt")


def test_the_advice_for_latin_1_keeps_the_kind_of_data(tmp_path):
    rows = "".join(f"ein schöner Tag {n};{'ab'[n % 2]}\n" for n in range(8))
    content = f"Satz;Urteil\n{rows}".encode("latin-1")
    for name in ("my rev.csv", "rev.CSV", "rev.csv.gz"):
        is_gzip = name.endswith(".gz")
        path = write_file(tmp_path / name, gzip.compress(content) if is_gzip else content)
        command = failure(path).partition("as in: ")[2]
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        assert open_data(str(tmp_path / "new.csv")).kind == "labels"


def test_bad_bytes_far_into_a_file_are_named_too(tmp_path):
    head = "é\n".encode() * 400_000  # 1.2 MB; the chunk of 1 MiB ends inside a character
    message = failure(write_file(tmp_path / "bad.txt", head + b"\xc3"))
    assert "byte 1200000 (line 400001) is 0xc3" in message
    message = failure(write_file(tmp_path / "bad.txt", b"x" * ((1 << 20) - 1) + b"\xc3x"))
    assert f"byte {(1 << 20) - 1} (line 1) is 0xc3" in message


def test_a_nul_is_named_with_offset_and_line(tmp_path):
    assert "byte 6 (line 2) is NUL" in failure(write_file(tmp_path / "bad.txt", b"good\nb\0d"))


def test_other_bad_files_say_what_they_are(tmp_path):
    assert "is a pickle" in failure(write_file(tmp_path / "m.pkl", pickle.dumps({"a": 1})))
    assert "zip archive" in failure(write_file(tmp_path / "m.pt", b"PK\x03\x04rest"))
    excel = "is an Excel spreadsheet, not UTF-8 text; save it as .csv"
    old_office = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0"
    assert excel in failure(write_file(tmp_path / "a.xlsx", b"PK\x03\x04rest"))
    assert excel in failure(write_file(tmp_path / "a.XLS", old_office))
    sheet = write_file(tmp_path / "a.ods", b"PK\x03\x04rest")
    assert "is an OpenDocument spreadsheet" in failure(sheet)
    assert "an old Office document" in failure(write_file(tmp_path / "a.doc", old_office))
    assert open_data(write_file(tmp_path / "text.xls", "one\ttwo\n")).kind == "text"
    assert "UTF-16" in failure(write_file(tmp_path / "w.txt", "hello".encode("utf-16")))
    assert "is empty" in failure(write_file(tmp_path / "e.txt", ""))
    assert "is empty" in failure(write_file(tmp_path / "bom.txt", b"\xef\xbb\xbf"))
    assert "only whitespace (3 bytes)" in failure(write_file(tmp_path / "s.txt", " \n\t"))
    zipped = gzip.compress(os.urandom(1000))
    assert "corrupted gzip" in failure(write_file(tmp_path / "cut.gz", zipped[:-100]))
    os.mkfifo(tmp_path / "pipe")
    assert "pipe or a device" in failure(str(tmp_path / "pipe"))
    assert "pipe or a device" in failure("/dev/null")


def test_a_missing_path_suggests_what_is_near(tmp_path, monkeypatch):
    write_file(tmp_path / "shakespeare.txt", "x")
    wrong = str(tmp_path / "shakespere.txt")
    assert f"did you mean '{tmp_path / 'shakespeare.txt'}'?" in failure(wrong)
    write_file(tmp_path / "noresp.jsonl", "x")
    assert "did you mean" not in failure(str(tmp_path / "notes.txt"))
    monkeypatch.chdir(tmp_path)
    assert "no file, folder or built-in dataset ''" in failure("")
    message = failure("reversel")
    assert "did you mean 'reversal'?" in message
    assert "built in: reversal, copy, numbers" in message


def test_contradicting_settings_are_config_errors(tmp_path):
    path = write_file(tmp_path / "a", "x")
    assert "give data.path alone" in failure(path, path, path, error=ConfigError)
    assert "data.source is set alone" in failure(None, path, None, error=ConfigError)
    assert "no data" in failure(None, error=ConfigError)
    assert "did you mean 'numbers'?" in failure({"kind": "number"}, error=ConfigError)
    unknown = failure({"kind": "numbers", "max_numbr": 3}, error=ConfigError)
    assert "did you mean 'max_number'?" in unknown


def test_a_tsv_file_is_pairs(tmp_path):
    opened = open_data(
        write_file(tmp_path / "my.tsv", b"\xef\xbb\xbfone\tun\r\ntwo\tdeux\r\n\r\n\tvide\r\n")
    )
    assert isinstance(opened, Pairs)
    assert list(opened.rows()) == [("one", "un"), ("two", "deux")]
    assert list(opened.rows()) == [("one", "un"), ("two", "deux")]  # again from the start
    assert (opened.name, opened.count) == ("my", 2)
    assert opened.description == (
        "pairs, 2 rows, tab-separated; skipped: 2 with an empty side (the first is line 3)"
    )


def test_a_gzipped_tsv_is_pairs(tmp_path):
    opened = open_data(write_file(tmp_path / "my.tsv.gz", gzip.compress(b"A\tB")))
    assert list(opened.rows()) == [("A", "B")]
    assert list(open_data(str(tmp_path / "my.tsv.gz"), lower=True).rows()) == [("a", "b")]


def test_a_tsv_row_without_exactly_one_tab_is_named(tmp_path):
    assert "line 2 has 1 column, the first line 2: 'b'" in failure(
        write_file(tmp_path / "a.tsv", "a\tA\nb\n")
    )
    assert "b.tsv has one line, 'one dog, two dogs, no dog', perhaps a header" in failure(
        write_file(tmp_path / "b.tsv", "one dog\ttwo dogs\tno dog\n")
    )
    assert "each of the 2 rows has an empty side" in failure(
        write_file(tmp_path / "c.tsv", "a\t\n\tA\n")
    )


def test_two_parallel_files_are_pairs(tmp_path):
    source = write_file(tmp_path / "t.de", "eins\u2028und\nzwei\n")  # a line separator ends no line
    target = write_file(tmp_path / "t.en", gzip.compress(b"one and\r\ntwo"))
    opened = open_data(None, source, target)
    assert list(opened.rows()) == [("eins\u2028und", "one and"), ("zwei", "two")]
    assert opened.description == "pairs, 2 rows, t.de to t.en"


def test_parallel_files_of_different_length_name_the_first_lonely_line(tmp_path):
    source = write_file(tmp_path / "t.de", "eins\nzwei\ndrei\nvier\n")
    target = write_file(tmp_path / "t.en", "one\ntwo\n")
    for one, two in ((source, target), (target, source)):
        message = failure(None, one, two)
        assert "t.de has 4 lines" in message
        assert "t.en has 2" in message
        assert "line 3 of" in message
        assert "'drei'" in message
    assert "is a folder" in failure(None, str(tmp_path), target)


def test_validation_pairs_share_no_source_with_training_pairs():
    rows = [(f"s{i % 500}", f"t{i}") for i in range(1000)]
    opened = pairs.from_rows("p", "made", rows)
    train, valid = opened.split(0.1, seed=3)
    kept, held = list(train.rows()), list(valid.rows())
    assert sorted(kept + held) == sorted(rows)
    assert (train.count, valid.count) == (len(kept), len(held))
    assert 60 < len(held) < 140
    assert train.description == f"pairs, 1,000 rows, made; {len(kept)} for training"
    assert valid.description == f"{len(held)} of the 1,000 pairs"
    assert not {source for source, _ in kept} & {source for source, _ in held}
    again = opened.split(0.1, seed=3)[1]
    assert list(again.rows()) == held
    assert again.fingerprint() == valid.fingerprint()
    other = opened.split(0.1, seed=4)[1]
    assert list(other.rows()) != held
    assert len({each.fingerprint() for each in (opened, train, valid, other)}) == 4


@pytest.mark.parametrize("validation_fraction", [1e-9, 1 - 1e-9])
def test_each_side_of_split_pairs_gets_a_row(validation_fraction):
    train, valid = pairs.from_rows("p", "made", [("a", "A"), ("b", "B")]).split(
        validation_fraction, seed=1
    )
    assert (train.count, valid.count) == (1, 1)


def test_pairs_with_one_source_cannot_be_split():
    with pytest.raises(DataError, match="same source"):
        pairs.from_rows("p", "made", [("a", "A"), ("a", "B")]).split(0.1, seed=1)


def test_a_built_in_is_opened_by_name_or_table(tmp_path, monkeypatch):
    assert isinstance(open_data("copy"), Pairs)
    few = open_data({"kind": "reversal", "examples": 3, "max_length": 5})
    assert few.count == 3
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path / "copy", "my own file")
    assert isinstance(open_data("copy"), Pairs)
    assert full_text(open_data("./copy")) == "my own file"


@pytest.mark.parametrize("name", BUILTINS)
def test_every_built_in_says_what_it_is_and_can_be_split(name):
    opened = open_data(name)
    assert opened.name == name
    assert opened.description.startswith(f"{opened.kind}, ")
    assert opened.fingerprint() == open_data(name).fingerprint()
    if isinstance(opened, Series):
        train, valid = opened.split(0.1)
        assert len(train) + len(valid) == len(opened)
    elif isinstance(opened, Text):
        train, valid = opened.split(0.1)
        assert train.size + valid.size == opened.size
    elif isinstance(opened, Pairs | LabelledText):
        train, valid = opened.split(0.1, seed=1)
        count = (lambda each: each.count) if isinstance(opened, Pairs) else len
        assert count(train) + count(valid) == count(opened)
        assert 0.07 < count(valid) / count(opened) < 0.13


def test_what_is_remembered_of_files_is_plain_json_and_verified(tmp_path, home, monkeypatch):
    monkeypatch.setattr(files, "_MIN_AGE_NS", 0)
    path = tmp_path / "large.txt"
    write_file(path, "line\n" * 300_000)
    expected = files.scan(path)
    scans = json.loads((home / "scans.json").read_text())
    assert list(scans) == [str(path)]
    (entry,) = scans.values()
    changed = [[*entry[:at], "0", *entry[at + 1 :]] for at in range(len(entry))]
    for damage in (*changed, 5, "x", [], entry[:-1], [*entry, 1], {}):
        (home / "scans.json").write_text(json.dumps({str(path): damage}))
        assert files.scan(path) == expected
    (home / "scans.json").write_text("[" * 1_000_000)
    assert files.scan(path) == expected


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hugging_face_checkpoint_is_not_data(tmp_path, weights):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    assert open_data(str(tmp_path)).kind == "text"
    (tmp_path / weights).write_bytes(b"\0")
    with pytest.raises(
        DataError, match=r"is a model, not data(.|\n)* DATA train.start=.*\n.*regard import"
    ):
        open_data(str(tmp_path))


def test_a_run_is_not_data(tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="is a run, not data; continue it with regard resume"):
        open_data(str(tmp_path))
