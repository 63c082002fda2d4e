"""Metrics by length: texts of similar length are evaluated together, each one once."""

import random

import pytest

from regard.pipelines.by_length import metrics_by_length


def evaluated(texts):
    """Rows of every range, beside the result."""
    asked = []
    found = metrics_by_length(texts, lambda rows: asked.append(list(rows)) or {"share": len(rows)})
    return found, asked


def test_every_row_is_evaluated_once_with_those_of_similar_length():
    texts = ["a" * random.Random(row).randint(1, 40) for row in range(500)]
    found, asked = evaluated(texts)
    assert sorted(row for rows in asked for row in rows) == list(range(500))
    assert [(span.shortest, span.longest) for span in found.ranges] == [
        (first, first + 4) for first in range(1, 41, 5)
    ]
    for span, rows in zip(found.ranges, asked, strict=True):
        lengths = [len(texts[row]) for row in rows]
        assert (span.examples, span.metrics) == (len(rows), {"share": len(rows)})
        assert (span.shortest, span.longest) == (min(lengths), max(lengths))
        assert span.mean == pytest.approx(sum(lengths) / len(lengths))


def test_length_is_in_words_or_in_characters_where_no_text_has_two_words():
    assert evaluated(["a bc", "abc"])[0].unit == "words"
    words = evaluated(["one", "one two", "one two three"])[0]
    assert [span.longest for span in words.ranges] == [1, 2, 3]
    characters = evaluated(["abc", "ab"])[0]
    assert characters.unit == "characters"
    assert [span.longest for span in characters.ranges] == [2, 3]


def test_a_few_long_texts_join_the_last_range_and_do_not_widen_it():
    texts = ["a" * (1 + row % 8) for row in range(992)] + ["a" * 500] * 8
    found, _ = evaluated(texts)
    assert [span.shortest for span in found.ranges] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (found.ranges[-1].longest, found.ranges[-1].examples) == (500, 132)


def test_one_text_alone_is_a_range():
    (span,) = evaluated(["abc"])[0].ranges
    assert (span.shortest, span.longest, span.examples) == (3, 3, 1)
