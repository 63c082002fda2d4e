import re
from xml.etree import ElementTree

import pytest
import torch

from regard.errors import ShapeError
from regard.explain import heatmap_svg

HOSTILE = ["<script>", "&", "]]>", "\x1b[2J", "\x00", "\ud800", "\ufffe", "\u202e", '"', "'", ""]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(weights, rows, columns, **given):
    text = heatmap_svg(weights, rows, columns, **given)
    text.encode()
    return ElementTree.fromstring(text), text


def numbers(heads, rows, columns):
    return torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(0)) + 0.01


def test_hostile_labels_stay_text():
    weights = numbers(1, len(HOSTILE), len(HOSTILE))
    root, text = drawn(weights, HOSTILE, HOSTILE, headings=["<b> & \x1b"])
    assert {each.tag for each in root.iter()} == {
        SVG + t for t in ("svg", "title", "rect", "g", "text")
    }
    assert "<script>" in [each.text for each in root.iter(f"{SVG}text")]
    assert text.replace("\n", "").isprintable()


def test_an_svg_has_no_links_and_no_scripts():
    _, text = drawn(numbers(2, 3, 3), list("abc"), list("xyz"))
    assert re.findall(r"\w+://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|href|url\(|\son\w+=|@import", text)


def test_a_cell_has_its_weight_as_tooltip():
    weights = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    root, _ = drawn(weights, ["a", "b"], ["x", "y"])
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert titles == ["attention", "a → x: 0.250", "a → y: 0.750", "b → x: 1.000"]


def test_every_head_has_its_heading_and_its_labels():
    root, _ = drawn(numbers(3, 2, 2), ["a", "b"], ["x", "y"])
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert [each for each in texts if each.startswith("head")] == ["head 0", "head 1", "head 2"]
    assert texts.count("a") == texts.count("y") == 3


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 20), (8, 10), (2, 60)])
def test_everything_lies_within_the_image(heads, size):
    words = ["w" * (1 + i % 30) for i in range(size)]
    root, _ = drawn(numbers(heads, size, size), words, words)
    width, height = float(root.get("width")), float(root.get("height"))
    for panel in root.findall(f"{SVG}g")[:heads]:
        x, y = map(float, re.findall(r"[\d.]+", panel.get("transform")))
        for rect in panel.iter(f"{SVG}rect"):
            assert x + float(rect.get("x")) + float(rect.get("width")) <= width
            assert y + float(rect.get("y")) + float(rect.get("height")) <= height
        for text in panel.iter(f"{SVG}text"):
            if text.get("text-anchor") == "end":
                assert float(text.get("x")) - 7.3 * len(text.text) >= 0
            if text.get("transform"):  # a column's label, which reads upwards
                _, up = map(
                    float, re.findall(r"translate\(([\d.]+) ([\d.]+)\)", text.get("transform"))[0]
                )
                assert up - 7.3 * len(text.text) >= 16  # below the heading


def test_the_largest_weight_is_the_darkest():
    root, _ = drawn(torch.tensor([[[0.1, 0.9]]]), ["a"], ["x", "y"])
    light, dark = (
        r.get("fill") for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None
    )
    assert light > dark == "#082454"


def test_labels_must_fit_the_weights():
    with pytest.raises(ShapeError, match="1 headings, 2 row and 2 column labels do not match"):
        heatmap_svg(numbers(2, 2, 2), ["a", "b"], ["x", "y"], headings=["one"])
