"""The figures of the lectures: numbers that theory knows, and that every one can be drawn."""

import json
import math

import pytest
import torch

import regard
from regard.errors import RegardError
from regard.explain.figures import FIGURES
from regard.explain.figures.language import entropy, ngram_counts
from regard.explain.figures.positions import KINDS, similarity
from regard.explain.render.panel_text import TEXT
from regard.explain.render.panels import DRAW
from regard.nn.position import Rotary, Sinusoidal

BE = "To be, or not to be, that is the question"
CORPUS = "the cat sat on the mat and the dog sat on the log\n" * 3
# What each figure is made from here, small enough to be quick.
SMALL = {
    "bag-of-words": ((), {}),
    "next-token": (("tiny-decoder", BE), {}),
    "shannon": ((CORPUS,), {"orders": 2}),
    "score-variance": ((), {"dims": (4, 64), "vectors": 128}),
    "shuffled-words": (("tiny-decoder", BE), {"shuffles": 2}),
    "positions": ((), {"kinds": ("sinusoidal", "alibi"), "length": 12, "dim": 8, "heads": 2}),
}


@pytest.fixture(scope="module")
def shown():
    made = {}

    def show(name):
        if name not in made:
            what, options = SMALL[name]
            made[name] = regard.show(name, *what, **options)
        return made[name]

    return show


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_data_text_and_a_picture(name, shown, tmp_path):
    figure = shown(name)
    table = json.loads(json.dumps(figure.table()))
    assert table["figure"] == name
    assert len(table["panels"]) == len(figure.data.panels) > 0
    for width in (60, 120):
        text = figure.text(width)
        assert figure.data.title in text
    assert "<svg" in figure._repr_html_()
    axes = [axis for axis in figure.figure().axes if axis.get_visible()]
    titles = [axis.get_title(loc="left") for axis in axes]
    assert {panel.title for panel in figure.data.panels} <= {*titles, ""}
    for panel in figure.data.panels:
        assert type(panel) in DRAW
        assert type(panel) in TEXT


def test_a_page_and_a_png_are_written(shown, tmp_path):
    figure = shown("bag-of-words")
    figure.save(tmp_path / "bag.html")
    page = (tmp_path / "bag.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "://" not in page.replace("http://www.w3.org", "")
    figure.save(tmp_path / "bag.png")
    assert (tmp_path / "bag.png").read_bytes().startswith(b"\x89PNG")


def test_the_bag_of_the_lecture():
    (table,) = regard.show("bag-of-words").data.panels
    words, *columns = zip(*table.rows, strict=True)
    assert " ".join(words) == ", bananas for have no say we yes"
    assert ["".join(map(str, column)) for column in columns] == ["11011011", "01100101", "11001110"]


def test_the_log_probability_of_a_text_is_the_sum_of_its_tokens():
    figure = regard.show("next-token", "tiny-decoder", BE).data
    (table,) = figure.panels
    scores = [row[2] for row in table.rows]
    assert figure.facts["log P of the text"] == pytest.approx(sum(scores))
    vocabulary = 8 + len(set(BE.replace(",", " ,").split()))
    assert figure.facts["perplexity"] == pytest.approx(vocabulary, rel=0.6)  # untrained
    first = table.rows[0]
    assert first[0] == "'be'"
    assert float(first[1].rstrip(" %")) == pytest.approx(100 * math.exp(first[2]), abs=0.01)


def test_shannon_counts_and_entropies():
    symbols = list("abab") + list("aabb")
    assert ngram_counts(symbols, 2)[("a",)] == {"b": 3, "a": 1}
    assert sum(ngram_counts(symbols, 3)[("b", "a")].values()) == 3  # the end meets the beginning
    assert entropy(ngram_counts(symbols, 0)) == pytest.approx(1.0)
    assert entropy(ngram_counts(symbols, 1)) == pytest.approx(1.0)
    expected = -2 * (3 * math.log2(3 / 4) + math.log2(1 / 4)) / 8
    assert entropy(ngram_counts(symbols, 2)) == pytest.approx(expected)
    (table,) = regard.show("shannon", "abcd" * 20, orders=3, length=30).data.panels
    assert [round(row[1], 9) for row in table.rows] == [2, 2, 0, 0]
    assert table.rows[2][2] in "abcd" * 20  # of order 2 the text repeats itself


def test_the_variance_of_scores_is_d_and_1():
    facts = regard.show("score-variance", dims=(16, 256)).data.facts
    for dim in (16, 256):
        # 256 queries and keys: the standard error of the variance is about 5 %
        assert facts[f"variance at d = {dim}, q · k"] == pytest.approx(dim, rel=0.15)
        assert facts[f"variance at d = {dim}, q · k / √d"] == pytest.approx(1, rel=0.15)


def test_the_variance_of_the_scores_of_a_run_is_that_of_its_queries_and_keys():
    (table,) = regard.show("score-variance", "tiny-decoder", BE).data.panels
    assert [row[0] for row in table.rows] == [f"decoder.blocks.{n}.attention" for n in range(4)]
    for _, dim, variance, scaled in table.rows:
        assert scaled == pytest.approx(variance / dim)


def test_dot_products_of_positions_depend_on_their_distance():
    for encoding in (Sinusoidal(32), Rotary(32)):
        pairs = similarity(encoding, 20).double()
        assert torch.allclose(pairs, pairs.T, atol=1e-5)
        for distance in range(20):
            diagonal = pairs.diagonal(distance)
            assert torch.allclose(diagonal, diagonal[:1], atol=1e-4)  # float32 sums of 32
    frequencies = 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    expected = (3 * frequencies).cos().mean().item()
    assert similarity(Rotary(32), 8)[0, 3].item() == pytest.approx(expected, abs=1e-5)


def test_positions_of_a_model_are_its_own():
    first, _ = regard.show("positions", "tiny-decoder", length=6).data.panels
    assert "Rotary" in first.title
    assert len(first.columns) == 16
    assert len(regard.show("positions", length=4, dim=4, heads=2).data.panels) == 2 * len(KINDS)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (("nextt",), {}, "did you mean 'next-token'"),
        (("next-token", "a b"), {}, "needs a run or preset: regard show next-token RUN TEXT"),
        (("next-token", "tiny-decoder"), {}, "needs a text"),
        (("next-token", "tiny-decoder", "lstm", "a b"), {}, "takes one run or preset, not 2"),
        (("next-token", "tiny-encoder", "a b"), {}, "predicts the next token; tiny-encoder can"),
        (("next-token", "tiny-decoder", "a"), {}, "1 tokens; next-token needs at least 2"),
        (("next-token", "tiny-decoder", "a " * 70), {}, "70 tokens, and the context of"),
        (("next-token", "ngram", "a b"), {}, "cannot be shown untrained"),
        (("next-token", "llama-7b", "a b"), {}, "such as tiny-decoder"),
        (("shannon", "runs/none"), {}, "no run, no text file and no preset"),
        (("shannon", "tiny-decoder", "a b"), {}, "takes no run or preset"),
        (("shannon", "ab"), {"order": 2}, "did you mean 'orders'"),
        (("shannon", "ab"), {"orders": "x"}, "orders must be an integer"),
        (("positions",), {"kinds": ["rotery"]}, "did you mean 'rotary'"),
        (("positions", "lstm"), {}, "lstm has no position encoding"),
        (("score-variance", "lstm", "a b"), {}, "lstm has no attention"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(what, options, message):
    with pytest.raises(RegardError) as refused:
        regard.show(*what, **options)
    assert message in str(refused.value)
    assert str(refused.value).count("\n") == 0
