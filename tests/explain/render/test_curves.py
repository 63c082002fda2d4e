import pytest

from regard.explain.render.curves import TRUTH, Curve, MetricPanel, draw_curves
from regard.explain.render.figure import encode, to_svg

FALLING = [(step, 9.0 / step + 1) for step in range(1, 101)]
VALIDATION = [(step, 9.0 / step + 1.2) for step in (20, 40, 60, 80, 100)]


def drawn(runs=2, names=None, validation=VALIDATION, training=FALLING, **options):
    curves = [Curve(run, training, validation) for run in range(runs)]
    names = names or [f"run {number}" for number in range(runs)]
    panels = [
        MetricPanel("loss", "nats", curves, **options),
        MetricPanel("accuracy", "share", curves),
    ]
    return draw_curves(names, panels)


def lines(figure, panel=0):
    return [line for line in figure.axes[panel].lines if len(line.get_xdata())]


def legend(figure):
    (found,) = figure.legends
    return [text.get_text() for text in found.get_texts()], found.get_title().get_text()


def test_every_run_is_in_the_legend_in_a_colour_of_its_own():
    figure = drawn(runs=3)
    names, caption = legend(figure)
    assert names == ["run 0", "run 1", "run 2"]
    assert caption == "thick, with dots: validation; thin: training"
    assert len({line.get_color() for line in lines(figure)}) == 3


def test_axes_have_names_and_units():
    axes = drawn(validation=[(1, 1.0), (9, 40.0)]).axes[0]
    labels = (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel())
    assert labels == ("loss", "steps", "nats, log scale")


def test_a_flat_curve_has_a_linear_axis_and_a_steep_one_a_logarithmic():
    flat, steep = (drawn(validation=[(1, 1.0), (9, end)], training=[]) for end in (1.5, 40))
    assert (flat.axes[0].get_yscale(), steep.axes[0].get_yscale()) == ("linear", "log")
    assert not any("log scale" in axes.get_ylabel() for axes in flat.axes)


def test_the_steep_beginning_of_training_does_not_flatten_the_rest():
    figure = drawn(runs=1, training=[(1, 1000.0), *FALLING[1:]])
    assert figure.axes[0].get_ylim()[1] < 10


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
    figure = drawn(runs=1, training=TRAINED[name])
    (training, _) = lines(figure)
    assert len(training.get_xdata()) == 100
    low, high = figure.axes[0].get_ylim()
    assert low <= min(training.get_ydata()) <= max(training.get_ydata()) <= high


def test_everything_lies_within_the_figure():
    for runs in (1, 9):
        figure = drawn(runs, names=[f"{'long ' * 9}{number}" for number in range(runs)])
        figure.draw_without_rendering()
        outer = figure.bbox.padded(1)
        for part in (*figure.axes, *figure.legends):
            box = part.get_tightbbox()
            assert outer.containsx(box.x0)
            assert outer.containsx(box.x1)
            assert outer.containsy(box.y0)
            assert outer.containsy(box.y1)


def test_after_all_colours_lines_are_dashed():
    thick = [line for line in lines(drawn(runs=8)) if line.get_marker() == "o"]
    assert [line.get_linestyle() for line in thick] == ["-"] * 7 + ["--"]
    assert thick[7].get_color() == thick[0].get_color()


@pytest.mark.parametrize("points", [[(5, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -1.0), (2, 3.0)]])
def test_one_point_a_flat_line_and_negative_values_can_be_drawn(points):
    figure = drawn(runs=1, validation=points, training=[])
    assert list(lines(figure)[0].get_ydata()) == [value for _, value in points]
    encode(figure, ".svg")


def test_a_model_that_takes_no_steps_is_a_line_across():
    curves = [Curve(0, FALLING, VALIDATION), Curve(1, [], [], level=1.5)]
    figure = draw_curves(["net", "ngram"], [MetricPanel("loss", "nats", curves)])
    across = lines(figure)[-1]
    assert list(across.get_ydata()) == [1.5, 1.5]
    assert list(across.get_xdata()) == [0, 1]  # of the width of the panel
    assert "a model fitted without gradients" in legend(figure)[1]
    encode(draw_curves(["ngram"], [MetricPanel("loss", "nats", curves[1:])]), ".svg")


def test_true_values_are_in_the_legend():
    curves = [Curve(TRUTH, [], [(-1, 1.0), (0, 9.0)]), Curve(0, [], [(0, 9.0), (1, 8.0)])]
    figure = draw_curves(
        ["ar"], [MetricPanel("forecast", "value", curves, linear=True, dots=False)]
    )
    assert legend(figure)[0] == ["ar", "true values"]
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[0].get_xlim()[0] < -0.9


def test_dates_are_on_the_axis_and_lines_that_coincide_have_dashes():
    days = [(10957.0 + day, 1.0) for day in range(40)]  # 2000-01-01 is day 10,957
    curves = [Curve(TRUTH, [], days), *(Curve(run, [], days) for run in range(4))]
    panel = MetricPanel("forecast", "value", curves, linear=True, dots=False, dates=True)
    figure = draw_curves(["a", "b", "c", "d"], [panel], dashes=True)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert (labels[0], "Feb" in labels) == ("01\nJan 2000", True)
    truth, *others = lines(figure)
    assert len({str(line._dash_pattern) for line in others}) == 4
    assert truth.get_linewidth() > max(line.get_linewidth() for line in others)


@pytest.mark.parametrize(
    ("step", "first"),
    [
        (1 / 86400, "00:00:00\n01 Jan 2000"),
        (1 / 24, "00:00\n01 Jan 2000"),
        (20, "Jan\n2000"),
        (900, "2000"),
    ],
)
def test_the_first_date_of_an_axis_is_given_in_full(step, first):
    points = [(10957.0 + step * number, 1.0) for number in range(20)]
    panel = MetricPanel("forecast", "value", [Curve(0, [], points)], linear=True, dates=True)
    axes = draw_curves(["a"], [panel]).axes[0]
    axes.figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[0] == first
    assert axes.xaxis.get_offset_text().get_text() == ""


def test_hostile_names_stay_text():
    text = to_svg(drawn(names=["<script>alert(1)</script>", '"&\x1b[2J\u202e\ud800']))
    text.encode()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_fractions_and_scores_start_at_zero_and_are_never_logarithmic():
    for from_zero in (True, False):
        axes = drawn(validation=[(10, 90.0), (20, 2.0)], training=[], from_zero=from_zero).axes[0]
        assert (axes.get_ylim()[0] == 0) == from_zero
        assert (axes.get_yscale() == "linear") == from_zero
