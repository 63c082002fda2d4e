"""CoNLL files as they are: comments, index columns, schemes of tags, and what is refused."""

import pytest

from regard.data.labels import from_conll
from regard.data.tag_scheme import to_iob2
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data
from regard.tasks.tag import spans


def write(folder, content, name="a.conll"):
    (folder / name).write_text(content)
    return folder / name


def contents(data):
    return [(parts, tuple(data.class_names[c] for c in classes)) for parts, classes in data.rows]


CONLL_2003 = (
    "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n"
    "Peter NNP B-NP B-PER\nBlackburn NNP I-NP I-PER\n"
)


def test_the_columns_of_conll_2003_are_read_by_number(tmp_path):
    path = write(tmp_path, CONLL_2003)
    read = from_conll(path)
    assert contents(read) == [
        (("EU", "rejects"), ("B-ORG", "O")),
        (("Peter", "Blackburn"), ("B-PER", "I-PER")),
    ]
    assert "words in column 1, tags in column 4 of 4; skipped: 1 -DOCSTART-" in read.description
    assert contents(open_data(str(path), columns={"columns": [1, 2]}))[0][1] == ("NNP", "VBZ")
    for columns in ([1], [0, 2], [2, 2], [1, 2, 3]):
        with pytest.raises(ConfigError, match=r"must be two different column numbers"):
            from_conll(path, columns)
    with pytest.raises(DataError, match=r"line 3 has 4 columns, and data.columns names column 7"):
        from_conll(path, [1, 7])


CONLL_U = (
    "# sent_id = 1\n# text = Vámonos al mar\n"
    "1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_\n"
    + "".join(
        f"{n}\t{word}\t{word.lower()}\t{tag}\t_\t_\t0\troot\t_\t_\n"
        for n, (word, tag) in enumerate(
            [("Vamos", "VERB"), ("nos", "PRON"), ("a", "ADP"), ("el", "DET"), ("mar", "NOUN")], 1
        )
    )
    + "5.1\tx\tx\tX\t_\t_\t_\t_\t_\t_\n"
)


def test_universal_dependencies_have_comments_indices_and_lines_that_are_no_words(tmp_path):
    read = open_data(str(write(tmp_path, CONLL_U + "\n" + CONLL_U, "a.conllu")))
    words, tags = contents(read)[1]
    assert words == ("Vamos", "nos", "a", "el", "mar")
    assert tags == ("VERB", "PRON", "ADP", "DET", "NOUN")
    assert "4 comments, 4 multi-word tokens and empty nodes" in read.description


def test_an_index_column_is_no_word(tmp_path):
    assert contents(from_conll(write(tmp_path, "0 New B-x\n1 York I-x\n\n0 Ulm B-x\n"))) == [
        (("New", "York"), ("B-x", "I-x")),
        (("Ulm",), ("B-x",)),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#\tO\n#lucky\tB-x\n# a comment\nday\tO\n", ("#", "#lucky", "day")),
        ("# O\n# id = 7\n#lucky B-x\nday O\n", ("#", "#lucky", "day")),
        ("# sent_id = 4\nday NN I-NP O\nout RB I-NP B-x\n", ("day", "out")),
    ],
)
def test_a_comment_is_told_from_a_word_that_begins_with_a_hash(tmp_path, content, words):
    read = from_conll(write(tmp_path, content))
    assert contents(read)[0][0] == words
    assert "skipped: 1 comments" in read.description


@pytest.mark.parametrize(
    ("tags", "scheme", "converted"),
    [
        ("B-x I-x B-x O", "IOB2", "B-x I-x B-x O"),
        ("I-x I-x B-x O I-y I-x", "IOB1", "B-x I-x B-x O B-y B-x"),
        ("B-x I-x L-x O U-y", "BILOU", "B-x I-x I-x O B-y"),
        ("B-x E-x S-y O S-y", "BIOES", "B-x I-x B-y O B-y"),
        ("NN VB NN", None, "NN VB NN"),
        ("B-x L-x E-x", None, "B-x L-x E-x"),
    ],
)
def test_every_scheme_becomes_iob2(tags, scheme, converted):
    read = to_iob2([tags.split()])
    assert (read.name, " ".join(read.tags[0]), list(read.invalid)) == (scheme, converted, [])
    if scheme is not None:
        assert spans(tags.split()) == spans(converted.split())


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["B-x I-x", "O I-x"], 1),
        (["B-x I-y", "B-x O"], 1),
        (["B-x L-x U-x", "B-x O", "I-x L-x", "O L-y", "B-x L-y"], 4),
        (["U-x B-x", "U-x O"], 1),  # the text ends inside a span
        (["B-x S-x", "S-x E-x O"], 2),
    ],
)
def test_invalid_transitions_are_counted(texts, count):
    assert len(to_iob2([tags.split() for tags in texts]).invalid) == count


def test_invalid_transitions_are_told_with_the_first_text(tmp_path):
    read = from_conll(write(tmp_path, "a\tB-x\nb\tI-x\n\nc\tO\nd\tI-x\n"))
    assert read.description.endswith("IOB2; 1 invalid transition (the first in the text at line 4)")


def test_a_column_with_as_many_classes_as_words_is_refused_with_a_sample(tmp_path):
    lines = "".join(f"word{n} tag{n % 30}\n" for n in range(200))
    message = r"200 words have 30 classes, more than a tenth: 'tag0', .*\n.*1 'word0', 2 'tag0'\n"
    with pytest.raises(DataError, match=message + r".*data\.columns=\[1,2\]"):
        from_conll(write(tmp_path, lines))
    with pytest.raises(DataError, match=r"same class, '_'.*\n.*1 'a', 2 'O', 3 '_'"):
        from_conll(write(tmp_path, "a O _\nb B-x _\n"))
    few = "".join(f"word{n} tag{n % 20}\n" for n in range(200))
    assert len(from_conll(write(tmp_path, few)).class_names) == 20


def test_lines_of_other_widths_are_refused_unless_columns_are_given(tmp_path):
    path = write(tmp_path, "a x O\nb y B-x\nc B-x\n")
    with pytest.raises(DataError, match=r"line 3 has 2 columns, most lines 3: 'c B-x'"):
        from_conll(path)
    assert contents(from_conll(path, [1, 2]))[0][1] == ("x", "y", "B-x")
