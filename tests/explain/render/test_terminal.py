import re
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ShapeError
from regard.explain import heads_overview, heatmap
from regard.explain.render.terminal import COLOUR_MAP
from regard.explain.render.token_text import (
    attention_vmax,
    clusters,
    display_width,
    truncate,
    visible,
)

COLOURS = re.compile(r"\x1b\[(48;5;\d+|0)m")
HOSTILE = ["\x1b[2J", "\x07", "\x9b31m", "\u202eabc", "a\rb", "\u2028", "\ud800", "\x00", "\u0301"]
TOKENS = st.lists(st.text(max_size=20), min_size=1, max_size=8)


def plain(text):
    return COLOURS.sub("", text)


def picture(rows, columns, *, width=80, colour=False):
    weights = torch.rand(len(rows), len(columns), generator=torch.Generator().manual_seed(0))
    return heatmap(weights, rows, columns, width=width, colour=colour)


def test_a_map_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.17], [0.05, 0.5, 0.4]])
    assert heatmap(weights, [" in", "order"], ["im", "a", "x"], width=80, colour=False) == (
        "      i\n"
        "      m a x\n"
        "  ␣in ██  ▒▒\n"
        "order ░░▓▓▓▓\n"
        "░░ 0.04  ▒▒ 0.16  ▓▓ 0.36  ██ 0.64  largest 1.00, square-root scale"
    )


def test_equal_weights_are_said_to_be_equal():
    equal, rows = torch.full((1, 2, 4), 0.25), ["a", "b"]
    note = "all values are about equal, 0.25, so all have the same shade"
    assert note in heatmap(equal[0], rows, [*"wxyz"], width=99, colour=False)
    assert note in heads_overview(equal, width=99, colour=True)
    equal[0, 0, 0] = 0.2
    assert "between 0.2 and 0.25" in heatmap(equal[0], rows, [*"wxyz"], width=99, colour=False)
    assert "all values" not in heatmap(equal[0], rows, [*"wxyz"], width=99, colour=True)
    equal[0, 0, 0] = 0.15  # two shades
    assert "all values" not in heatmap(equal[0], rows, [*"wxyz"], width=99, colour=False)
    assert "all values" not in picture(rows, rows)


def test_even_attention_has_a_medium_shade_and_the_legend_says_which():
    even = torch.full((2, 10), 0.1)
    high = attention_vmax(0.1, 10)
    text = heatmap(even, ["a", "b"], list("0123456789"), width=80, colour=False, high=high)
    *_, row, legend, note = text.splitlines()
    assert row == "b " + "▒" * 20
    assert legend == "░░ 0.02  ▒▒ 0.06  ▓▓ 0.14  ██ 0.26  largest 0.10, square-root scale"
    assert "▒▒" in heads_overview(even[None], width=80, colour=False, high=high)
    assert note == "all values are about equal, 0.1, so all have the same shade"
    assert attention_vmax(0.9, 10) == 0.9


def test_a_linear_scale_begins_at_its_lowest_value():
    values = torch.tensor([[6.0, 6.9, 8.1, 9.9]])
    text = heatmap(values, ["a"], [*"wxyz"], width=80, colour=False, low=6.0, high=10.0)
    assert text.splitlines()[1:] == [
        "a   ░░▒▒██",
        "░░ 6.80  ▒▒ 7.60  ▓▓ 8.40  ██ 9.20  largest 9.90, linear",
    ]


def test_a_legend_of_small_values_tells_them_apart():
    text = heatmap(torch.tensor([[0.002, 0.008]]), ["a"], ["b", "c"], width=80, colour=False)
    assert "░░ 0.0003  ▒▒ 0.0013  ▓▓ 0.0029  ██ 0.0051  largest 0.0080" in text


def test_colours_grow_brighter_with_the_value():
    values = ((torch.arange(11)[None] + 0.5) / 11).square()  # the middle of each step
    text = heatmap(values, ["a"], [*"0123456789a"], width=80, colour=True, high=1.0)
    painted = [code.split(";")[-1] for code in COLOURS.findall(text.splitlines()[1])[:11]]
    assert painted == list(map(str, COLOUR_MAP))
    bright = [2 * red + 7 * green + blue for red, green, blue in map(rgb, COLOUR_MAP)]
    assert bright == sorted(bright)


def rgb(index):
    """The red, green and blue part of one of the 256 colours of a terminal."""
    if index >= 232:
        return (8 + 10 * (index - 232),) * 3
    levels = (0, 95, 135, 175, 215, 255)
    return tuple(levels[(index - 16) // step % 6] for step in (36, 6, 1))


def test_colour_paints_the_same_cells():
    painted = picture(["a", "b"], ["x", "y", "z"], colour=True)
    row = painted.splitlines()[1]
    assert len(COLOURS.findall(row)) == 4
    assert plain(row) == "a       "
    assert row.endswith("\x1b[0m")


@given(TOKENS, TOKENS, st.booleans(), st.integers(12, 90))
def test_no_label_reaches_the_terminal_raw_and_no_line_is_too_wide(rows, columns, colour, width):
    for line in plain(picture(rows, columns, width=width, colour=colour)).split("\n"):
        assert not any(unicodedata.category(each) in ("Cc", "Cf", "Cs") for each in line)
        assert display_width(line) <= width


@pytest.mark.parametrize("colour", [True, False])
def test_hostile_labels_are_escaped_on_both_axes(colour):
    text = plain(picture(HOSTILE, HOSTILE, colour=colour))
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J" in text
    text.encode()


def test_white_space_and_nothing_are_visible():
    assert [visible(each) for each in (" a", "\n", "\t", "")] == ["␣a", "⏎", "⇥", "∅"]


def test_wide_characters_keep_the_columns_in_line():
    text = picture(["注意力", "a"], ["注", "b", "意"]).splitlines()
    assert text[0] == "       注b 意"
    assert [display_width(line) for line in text[1:3]] == [7 + 6] * 2


def test_a_mark_stands_upon_its_letter():
    assert clusters("e\u0301\u0302a") == ["e\u0301\u0302", "a"]
    assert display_width("e\u0301") == 1


@given(st.text(max_size=30), st.integers(1, 12))
def test_a_cut_label_fits_and_says_that_it_was_cut(text, most):
    shown = truncate(visible(text), most)
    assert display_width(shown) <= most
    assert shown == visible(text) or shown.endswith("…")


def test_columns_that_do_not_fit_are_not_shown_but_counted():
    text = picture(["row"], ["c"] * 60, width=30)
    assert text.splitlines()[-1] == "… 34 of 60 columns not shown"


def test_a_map_of_zeros_is_blank():
    text = heatmap(torch.zeros(1, 2), ["a"], ["b", "c"], width=40, colour=False)
    assert text.splitlines()[1].strip() == "a"


def test_labels_must_fit_the_weights():
    with pytest.raises(ShapeError, match="1 row and 1 column labels"):
        heatmap(torch.rand(2, 2), ["a"], ["b"], width=40, colour=False)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 6), (8, 14), (12, 60)])
@pytest.mark.parametrize("width", [20, 80])
def test_an_overview_shows_every_head_within_the_width(heads, size, width, colour):
    text = plain(heads_overview(torch.rand(heads, size, size), width=width, colour=colour))
    assert re.findall(r"head (\d+)", text) == [str(head) for head in range(heads)]
    assert max(map(display_width, text.splitlines())) <= width


def test_an_overview_is_max_pooled():
    weights = torch.zeros(1, 60, 60)
    weights[0, 30, 17] = 1.0
    text = heads_overview(weights, width=80, colour=False)
    lines = text.splitlines()
    assert sum("█" in line for line in lines[1:13]) == 1
    assert lines[-1] == "60 × 60 tokens in 12 × 24 cells: each cell is the largest of several"


def test_a_map_that_fits_says_nothing_about_pooling():
    assert "several" not in heads_overview(torch.rand(2, 12, 24), width=80, colour=False)


@pytest.mark.parametrize("colour", [True, False])
def test_signed_values_have_two_scales(colour):
    values = torch.tensor([[1.0, -1.0, 0.0, -0.3]])
    text = heatmap(values, ["a"], list("wxyz"), width=80, colour=colour)
    lines = text.splitlines()
    if not colour:
        assert lines[1:] == [
            "a ██##  ··",
            "░░ 0.20  ▒▒ 0.40  ▓▓ 0.60  ██ 0.80",
            "·· -0.20  :: -0.40  == -0.60  ## -0.80",
            "largest 1.00, linear",
        ]
    else:
        assert COLOURS.findall(lines[1])[:3] == [
            "48;5;210",
            "48;5;81",
            "48;5;234",
        ]
    assert "linear" in heads_overview(values[None], width=80, colour=colour)
