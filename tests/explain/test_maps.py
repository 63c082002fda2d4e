import io
import re
import sys
from xml.etree import ElementTree

import pytest
import torch

from regard.errors import ConfigError, ShapeError
from regard.explain import AttentionMap, StateMap, draw_maps, html_maps
from regard.explain.image_attention import ImageAttentionMap
from regard.explain.render.figure import encode, page
from regard.explain.render.maps import draw_overview
from regard.explain.token_map import AttentionMaps, PatchGridImage

HOSTILE = ["<script>", "&", "]]>", "\x1b[2J", "\x00", "\ud800", "\ufffe", "\u202e", '"', "'", ""]
HOSTILE += ["$x$", "注意"]
SVG = "{http://www.w3.org/2000/svg}"


def numbers(heads, rows, columns):
    return torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(0)) + 0.01


def svg(figure):
    text = encode(figure, ".svg").decode()
    return ElementTree.fromstring(text), text


def texts(root):
    return ["".join(each.itertext()).strip() for each in root.iter(f"{SVG}text")]


def test_hostile_labels_stay_text_in_every_format():
    attention = AttentionMap(HOSTILE, HOSTILE, numbers(1, len(HOSTILE), len(HOSTILE)))
    root, text = svg(attention.figure())
    assert {"<script>", "$x$", "注意"} <= set(texts(root))
    assert not re.search(r"<script|\son\w+=|@import", text)
    html = page("x", attention._repr_html_())
    html.encode()
    assert "&lt;script&gt;" in html
    assert html.count("<script") == 1  # our own
    addresses = set(re.findall(r"\w+://[^\"' )]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, which nothing requests


def test_a_figure_shows_every_head_and_the_tokens_once_per_line():
    root, _ = svg(draw_maps(numbers(3, 2, 2), ["a", "b"], ["x", "y"]))
    found = texts(root)
    assert [each for each in found if each.startswith("head")] == ["head 0", "head 1", "head 2"]
    assert (found.count("a"), found.count("y")) == (1, 3)
    assert "attention: weight, square-root scale" in found


def test_signed_values_have_a_scale_around_zero():
    values = torch.tensor([[[1.0, -2.0]]])
    root, _ = svg(draw_maps(values, ["a"], ["x", "y"]))
    assert "attention: value" in texts(root)
    mesh = draw_maps(values, ["a"], ["x", "y"]).axes[0].collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-2.0, 2.0)
    colours = re.findall(r"background: (#\w+)", html_maps(values, ["a"], ["x", "y"]))
    assert colours == ["#d6604d", "#053061"]  # red, dark blue


def test_an_overview_names_the_scale_of_each_module():
    weights = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]])
    modules = {"weights": (weights, ["head 0"]), "changes": (weights - 0.6, ["head 0"])}
    root, _ = svg(draw_overview(modules))
    scales = [text for text in texts(root) if "scale" in text]
    assert scales == ["0 to 1, square-root scale", "-0.5 to 0.5, linear scale"]


def test_everything_lies_within_the_figure():
    for heads, size in ((1, 1), (3, 20), (2, 90)):
        words = ["w" * (1 + i % 30) for i in range(size)]
        figure = draw_maps(numbers(heads, size, size), words, words)
        figure.draw_without_rendering()
        assert figure.get_figwidth() < 30
        outer = figure.bbox.padded(1)
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert outer.containsx(box.x0), (heads, size)
            assert outer.containsx(box.x1), (heads, size)
            assert outer.containsy(box.y0), (heads, size)
            assert outer.containsy(box.y1), (heads, size)


def test_a_cell_has_its_weight_as_tooltip():
    html = html_maps(torch.tensor([[[0.25, 1.0]]]), ["a"], ["x", "y"])
    assert re.findall(r'title="([^"]*)"', html) == ["a → x: 0.250", "a → y: 1.000"]
    assert re.findall(r"background: (#\w+)", html)[-1] == "#082454"
    assert "square-root scale; largest 1" in html


def test_a_large_map_is_pooled_in_html_and_says_so():
    html = html_maps(numbers(1, 200, 200), ["w"] * 200, ["w"] * 200)
    assert html.count("title=") == 64 * 64
    assert "each cell is the largest of several: 200 × 200 tokens" in html


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".html"])
def test_a_map_is_saved_by_its_suffix(tmp_path, suffix):
    attention = AttentionMap(["a", "b"], ["x", "y"], numbers(2, 2, 2))
    path = tmp_path / f"map{suffix}"
    attention.save(path, head=1)
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF", ".html": b"<!doctype"}
    content = path.read_bytes()
    assert content.startswith(start[suffix])
    attention.save(path, head=1)
    assert path.read_bytes() == content  # no date inside
    if suffix in (".svg", ".html"):
        assert b"head 1" in content
        assert b"head 0" not in content


def test_a_wrong_suffix_head_or_gate_is_refused(tmp_path):
    attention = AttentionMap(["a"], ["x"], numbers(2, 1, 1))
    with pytest.raises(ConfigError, match=r"written as \.svg, \.png, \.pdf, \.html, not '\.gif'"):
        attention.save(tmp_path / "x.gif")
    with pytest.raises(ConfigError, match="head 2: there are 2 heads, 0 to 1"):
        attention.figure(2)
    with pytest.raises(ConfigError, match="gate 2: there are 2 gates, 0 to 1"):
        StateMap(["a"], ["0"], numbers(2, 1, 1), ["input_gate", "state"]).figure(2)


def test_without_matplotlib_or_pandas_the_way_out_is_said(tmp_path, monkeypatch):
    attention = AttentionMap(["a"], ["x"], numbers(2, 1, 1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'regard\[plot\]'"):
        attention.save(tmp_path / "x.svg")
    with pytest.raises(ConfigError, match="pip install pandas"):
        attention.to_pandas()
    attention.save(tmp_path / "x.html")


def test_maps_have_short_displays_and_a_table():
    attention = AttentionMap(["a", "b"], ["x", "y"], numbers(2, 2, 2))
    assert repr(attention) == "AttentionMap(2 heads, 2 × 2 tokens)"
    table = attention.to_pandas(head=0)
    assert (list(table.index), list(table.columns)) == (["a", "b"], ["x", "y"])
    assert table.loc["a", "y"] == pytest.approx(attention.weights[0, 0, 1].item())
    assert "&lt;b&gt;" in AttentionMaps({"<b>": attention})._repr_html_()


def test_labels_must_fit_the_weights():
    for draw in (draw_maps, html_maps):
        with pytest.raises(ShapeError, match="1 headings, 2 row and 2 column labels do not match"):
            draw(numbers(2, 2, 2), ["a", "b"], ["x", "y"], headings=["one"])


def test_a_png_is_an_image_of_the_size_of_the_figure():
    image_module = pytest.importorskip("PIL.Image")
    figure = draw_maps(numbers(1, 4, 4), list("abcd"), list("wxyz"))
    image = image_module.open(io.BytesIO(encode(figure, ".png")))
    assert image.size == tuple(int(160 * inches) for inches in figure.get_size_inches())


PIXELS = torch.arange(3 * 4 * 4, dtype=torch.uint8).view(3, 4, 4)


def test_attention_between_patches_is_drawn_on_the_image_for_each_head():
    weights = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    patches = [f"{n // 2},{n % 2}" for n in range(4)]
    tokens, shown = ["<cls>", *patches], PatchGridImage(PIXELS, (2, 2), 1)
    with_class = ImageAttentionMap(tokens, tokens, weights, None, "self", shown)
    names, maps = with_class.region_weights()
    assert names == ["head 0", "head 1"]
    assert torch.equal(maps, weights[:, 0, 1:].view(2, 2, 2))
    figure = with_class.figure()
    assert [axes.get_title() or axes.get_title(loc="left") for axes in figure.axes] == names
    assert "of <cls> over the image" in figure.get_label()
    drawn = torch.tensor(figure.axes[1].images[0].get_array())
    bright = (maps[1] / maps[1].max()).repeat_interleave(2, 0).repeat_interleave(2, 1)
    opacity = 0.1 + 0.9 * bright.unsqueeze(2)
    torch.testing.assert_close(drawn, opacity * PIXELS.permute(1, 2, 0) / 255 + (1 - opacity) * 0.6)
    without = ImageAttentionMap(
        patches, patches, weights[:, 1:, 1:], None, "self", PatchGridImage(PIXELS, (2, 2))
    )
    assert torch.equal(without.region_weights(1)[1], weights[1:, 1:, 1:].mean(1).view(1, 2, 2))
    assert without.text(width=40).startswith("attention to each patch, mean\nhead 0  head 1\n")
    assert "head" not in without.text(1, width=40)  # one head: all its weights


def test_attention_of_a_caption_is_drawn_for_each_token():
    weights = torch.tensor([[[0.7, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]])
    regions = ["0,0", "0,1", "1,0", "1,1"]
    caption = ImageAttentionMap(
        [" a", " cat"], regions, weights, None, "cross", PatchGridImage(PIXELS, (2, 2))
    )
    lines = [line.rstrip() for line in caption.text(width=40).splitlines()[:4]]
    assert lines[:2] == ["attention of each token over the image", "␣a    ␣cat"]
    assert lines[2:] == ["██░░", "░░░░    ██"]
    assert len(caption.figure().axes) == 2


def test_cross_attention_of_a_copy_is_shown_as_the_mean_with_tokens():
    weights = torch.eye(2).expand(2, 2, 2)
    text = AttentionMap(["a", "b"], ["a", "b"], weights, kind="cross").text()
    assert text.splitlines()[1].startswith("a ██")
    assert "head 1" in AttentionMap(["a", "b"], ["a", "b"], weights).text()


def test_maps_in_bfloat16_are_drawn():
    attention = AttentionMap(["a", "b"], ["a", "b"], numbers(2, 2, 2).bfloat16())
    svg(attention.figure())
    svg(AttentionMaps(layer=attention).figure())
