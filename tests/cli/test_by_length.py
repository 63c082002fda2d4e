"""Short and long sources apart, and one text by several runs: `--by-length` and `--text`."""

import json
from xml.etree import ElementTree

import pytest


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_evaluate_separates_short_and_long_sources(regard, pair_run, tmp_path):
    data = tmp_path / "mixed.tsv"
    data.write_text(
        "".join(f"{'1 ' * n}cats\t{n} chats sur le tapis\n" for n in range(1, 6) for _ in range(3))
    )
    output = json.loads(regard("evaluate", pair_run, data, "--by-length", "--json").out)
    assert output["unit"] == "words"
    assert [each["longest"] for each in output["lengths"]] == [2, 3, 4, 5, 6]
    assert {each["examples"] for each in output["lengths"]} == {3}
    completed = regard("evaluate", pair_run, data, "--by-length")
    assert rows(completed.out)[0] == [
        "words",
        "examples",
        "exact_match",
        "bleu",
        "bleu_lower",
        "chrf",
    ]
    assert [row[0] for row in rows(completed.out)[1:]] == ["2", "3", "4", "5", "6"]


def test_one_range_of_lengths_has_the_metrics_of_the_whole(regard, pair_run, tmp_path):
    data = tmp_path / "same.tsv"
    data.write_text("".join(f"{n} cats\t{n} chats sur le tapis\n" for n in range(10, 16)))
    whole = json.loads(regard("evaluate", pair_run, data, "--json").out)
    ((span),) = json.loads(regard("evaluate", pair_run, data, "--by-length", "--json").out)[
        "lengths"
    ]
    for name in ("exact_match", "bleu", "bleu_lower", "chrf"):
        assert span[name] == whole[name]


def test_a_built_in_set_is_named_as_a_table(regard, pair_run):
    table = "{ kind = 'copy', examples = 4, min_length = 3, max_length = 3 }"
    output = json.loads(regard("evaluate", pair_run, table, "--by-length", "--json").out)
    assert output["unit"] == "characters"
    (span,) = output["lengths"]
    assert (span["longest"], span["examples"]) == (3, 4)
    assert "bleu" not in span  # no text has four words
    completed = regard("evaluate", pair_run, table)
    assert "bleu " not in completed.out
    assert "no reference has four tokens" in completed.err


def test_a_range_of_lengths_without_four_tokens_has_no_bleu(regard, pair_run, tmp_path):
    data = tmp_path / "two.tsv"
    data.write_text("one\tun chat\n" + "1 2 3 4 5 cats\t5 chats sur le tapis\n")
    head, short, long = rows(regard("evaluate", pair_run, data, "--by-length").out)
    assert head[3:5] == ["bleu", "bleu_lower"]
    assert (short[3:5], "-" in long) == (["-", "-"], False)


def test_the_metrics_are_drawn_over_the_length(regard, pair_run, tmp_path):
    table = "{ kind = 'copy', examples = 20, max_length = 9 }"
    completed = regard("evaluate", pair_run, table, "--by-length", "--out", "curve.svg")
    assert (completed.code, completed.err.splitlines()[-1]) == (0, "curves: curve.svg")
    svg = ElementTree.fromstring((tmp_path / "curve.svg").read_text())
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"pairs", "exact match", "chrf", "source length in characters"} <= set(texts)


def test_options_of_by_length_are_refused_without_it(regard, pair_run):
    completed = regard("evaluate", pair_run, "--out", "curve.svg")
    assert (completed.code, "--by-length" in completed.err) == (2, True)
    completed = regard("compare", pair_run, "--data", "some.tsv")
    assert (completed.code, "--by-length" in completed.err) == (2, True)


def test_a_run_that_writes_no_translation_is_refused(regard, text_run):
    completed = regard("evaluate", text_run, "--by-length")
    assert (completed.code, completed.out) == (2, "")
    assert "'causal'" in completed.err


def test_runs_are_compared_on_one_text(regard, pair_run):
    alone = regard("translate", pair_run, "100 cats").out.strip()
    output = json.loads(regard("compare", pair_run, pair_run, "--text", "100 cats", "--json").out)
    assert [each["translation"] for each in output["runs"]] == [alone, alone]
    completed = regard("compare", pair_run, pair_run, "--text", "100 cats")
    assert "'100 cats'\n  translation" in completed.out
    many = regard("compare", *[pair_run] * 5, "--text", "100 cats")
    assert many.out.count(alone.split()[0]) >= 5


def test_runs_are_compared_by_length_on_any_data(regard, pair_run, tmp_path):
    data = tmp_path / "mixed.tsv"
    data.write_text("".join(f"{'1 ' * n}cats\t{n} chats sur le tapis\n" for n in (1, 2, 3)))
    words = ("compare", pair_run, pair_run, "--by-length", "--data", data)
    output = json.loads(regard(*words, "--json").out)
    one = json.loads(regard("evaluate", pair_run, data, "--by-length", "--json").out)
    assert [each["by_length"] for each in output["runs"]] == [one, one]
    completed = regard(*words, "--out", "both.svg")
    assert "bleu, by words\n  2" in completed.out
    assert "source length in words" in (tmp_path / "both.svg").read_text()


def test_hostile_texts_stay_text_on_a_page(regard, pair_run, tmp_path):
    assert regard("compare", pair_run, "--text", "<script>", "--out", "page.html").code == 0
    assert "<script" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("title", ["cost", "settings"])
def test_a_text_with_the_name_of_a_group_does_not_replace_it(regard, pair_run, title):
    completed = regard("compare", pair_run, "--text", title)
    assert "parameters" in completed.out
    assert f"'{title}'" in completed.out
