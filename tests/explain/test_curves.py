import io
import re
from xml.etree import ElementTree

import pytest

from regard.errors import ConfigError
from regard.explain.render import curves
from regard.explain.render.curves import COLOURS, Curve, Panel, draw_curves
from regard.explain.render.picture import Dot, Label, Line, Picture, to_png, to_svg

SVG = "{http://www.w3.org/2000/svg}"
FALLING = [(step, 9.0 / step + 1) for step in range(1, 101)]
HELD = [(step, 9.0 / step + 1.2) for step in (20, 40, 60, 80, 100)]


def drawn(runs=2, names=None, held=HELD, training=FALLING):
    found = [Curve(run, training, held) for run in range(runs)]
    names = names or [f"run {number}" for number in range(runs)]
    return draw_curves(names, [Panel("loss", "nats", found), Panel("accuracy", "share", found)])


def parsed(picture):
    text = to_svg(picture)
    return ElementTree.fromstring(text), text


def texts(root):
    return [each.text for each in root.iter(f"{SVG}text")]


def test_every_run_is_in_the_legend_in_a_colour_of_its_own():
    root, _ = parsed(drawn(runs=3))
    assert [each for each in texts(root) if each.startswith("run")] == ["run 0", "run 1", "run 2"]
    strokes = {each.get("stroke") for each in root.iter(f"{SVG}polyline")}
    assert set(COLOURS[:3]) <= strokes


def test_axes_have_names_units_and_round_numbers():
    root, _ = parsed(drawn())
    found = texts(root)
    assert found.count("steps") == 2
    assert "loss" in found
    assert any(each.startswith("nats") for each in found)
    assert {"0", "20", "40", "60", "80", "100"} <= set(found)


def test_a_point_is_at_its_coordinates():
    picture = drawn(runs=1, held=[(0, 1.0), (50, 2.0), (100, 3.0)], training=[])
    first, middle, last = [s for s in picture.shapes if isinstance(s, Dot) and s.tooltip][:3]
    assert middle.x == pytest.approx((first.x + last.x) / 2)
    assert last.x - first.x == pytest.approx(curves.WIDTH)
    assert first.y > middle.y > last.y  # up is more
    # from 1 to 3 is steep: equal ratios are equal distances
    tall = (first.y - middle.y) / (middle.y - last.y)
    assert tall == pytest.approx(0.6931 / 0.4055, rel=1e-3)


def test_a_flat_curve_has_a_linear_axis_and_a_steep_one_a_logarithmic():
    (flat, _), (steep, _) = (
        parsed(drawn(held=[(1, 1.0), (9, end)], training=[])) for end in (1.5, 40)
    )
    assert not any("log scale" in each for each in texts(flat))
    assert sum("log scale" in each for each in texts(steep)) == 2


def test_the_steep_beginning_of_training_does_not_flatten_the_rest():
    picture = drawn(runs=1, training=[(1, 1000.0), *FALLING[1:]])
    heights = [y for s in picture.shapes if isinstance(s, Line) for _, y in s.points]
    assert min(heights) >= 0
    assert not {"200", "500", "1,000"} & set(texts(parsed(picture)[0]))


LEVEL = [(step, 2.0) for step in range(1, 101)]
TRAINED = {
    "diverging": [(step, 2.0 if step < 50 else 2.0**step) for step in range(1, 101)],
    "rising from low": [(step, 0.001 if step < 5 else 2.0) for step in range(1, 101)],
    "with a leap at its beginning": [*LEVEL[:3], (4, 90.0), *LEVEL[4:]],
    "nothing at first": [(1, 0.0), *FALLING[1:]],
    "next to nothing at first": [(1, 5e-324), *FALLING[1:]],
}


@pytest.mark.parametrize("name", TRAINED)
def test_all_but_a_steep_beginning_is_in_the_panel(name):
    picture = drawn(runs=1, training=TRAINED[name])
    lines = [s for s in picture.shapes if isinstance(s, Line) and len(s.points) == 100]
    assert len(lines) == 2  # one in each panel, and no point is missing
    top = curves.EDGE + 2 * curves.LEGEND + 6 + curves.ABOVE
    for line in lines:
        heights = [y for _, y in line.points]
        assert top < min(heights) < max(heights) < top + curves.HEIGHT


@pytest.mark.parametrize("runs", [1, 2, 7, 9, 20])
def test_everything_lies_within_the_picture(runs):
    picture = drawn(runs, names=[f"{'long ' * 9}{number}" for number in range(runs)])
    for shape in picture.shapes:
        places = shape.points if isinstance(shape, Line) else [(shape.x, shape.y)]
        for x, y in places:
            assert 0 <= x <= picture.width
            assert 0 <= y <= picture.height
        if isinstance(shape, Label) and shape.anchor == "start":
            assert shape.x + 6 * len(shape.text) <= picture.width


def test_after_all_colours_lines_are_dashed():
    root, _ = parsed(drawn(runs=len(COLOURS) + 1))
    dashed = [e for e in root.iter(f"{SVG}polyline") if e.get("stroke-dasharray")]
    assert {each.get("stroke") for each in dashed} == {COLOURS[0]}


@pytest.mark.parametrize("held", [[(5, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -1.0), (2, 3.0)]])
def test_one_point_a_flat_line_and_negative_values_can_be_drawn(held):
    root, _ = parsed(drawn(runs=1, held=held, training=[]))
    assert len([each for each in root.iter(f"{SVG}circle") if len(each)]) == 2 * len(held)


def test_hostile_names_stay_text_and_nothing_is_fetched():
    names = ["<script>alert(1)</script>", '"&\x1b[2J\u202e\ud800']
    root, text = parsed(drawn(names=names))
    text.encode()
    tags = ("svg", "title", "rect", "polyline", "circle", "text")
    assert {each.tag for each in root.iter()} == {SVG + tag for tag in tags}
    assert re.findall(r"\w+://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_a_png_shows_the_same_as_the_svg():
    image_module = pytest.importorskip("PIL.Image")
    picture = Picture("a square", 40, 20)
    picture.shapes = [Line([(0, 10), (40, 10)], "#0000ff", 4), Dot(30, 10, 4, "#ff0000")]
    picture.shapes.append(Label(3, 8, "II", bold=True))
    image = image_module.open(io.BytesIO(to_png(picture)))
    assert image.size == (80, 40)
    colour = lambda x, y: image.getpixel((2 * x, 2 * y))  # noqa: E731
    assert colour(10, 10) == (0, 0, 255)
    assert colour(30, 10) == (255, 0, 0)
    assert colour(35, 18) == (255, 255, 255)
    dark = [sum(colour(x, y)) < 300 for x in range(3, 12) for y in range(1, 7)]
    assert any(dark)


def test_text_upwards_and_dashes_are_painted_too():
    image_module = pytest.importorskip("PIL.Image")
    picture = Picture("signs", 60, 60)
    picture.shapes = [Line([(30, 0), (60, 0), (60, 60)], "#0000ff", 6, dashed=True)]
    picture.shapes.append(Label(20, 30, "HHH", "middle", upwards=True))
    image = image_module.open(io.BytesIO(to_png(picture))).convert("L")
    rows = [y for y in range(120) for x in range(20, 42) if image.getpixel((x, y)) < 100]
    assert 25 < min(rows) < max(rows) < 95
    assert max(rows) - min(rows) > 30  # longer than high
    edge = [image.getpixel((118, y)) < 128 for y in range(120)]
    assert 0.4 < sum(edge) / len(edge) < 0.8


def test_without_pillow_a_png_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"regard\[images\]"):
        to_png(drawn())


def test_fractions_and_scores_start_at_zero_and_are_never_logarithmic():
    falling = [Curve(0, [], [(10, 90.0), (20, 2.0)])]
    for from_zero in (True, False):
        panel = Panel("share", "share right", falling, from_zero=from_zero)
        labels = texts(parsed(draw_curves(["a"], [panel]))[0])
        assert labels.count("0") == 1 + from_zero  # across, and upwards
        assert ("share right, log scale" in labels) != from_zero
