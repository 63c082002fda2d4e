"""`regard show`: the list, a figure as text, as JSON and as a file."""

import io
import json

import pytest

from explain.test_figures import SMALL
from regard import api
from regard.cli.output import ASCII_SUBSTITUTES, replace_unencodable
from regard.explain.figures import FIGURES


def test_without_a_name_it_lists_all_figures(regard):
    completed = regard("show")
    assert completed.code == 0
    assert all(name in completed.out for name in FIGURES)
    listed = json.loads(regard("show", "--json").out)["figures"]
    assert listed["next-token"]["inputs"] == "RUN TEXT"
    assert listed["next-token"]["options"] == {"top": 4}


def test_a_figure_of_a_run_as_text_json_and_a_file(regard, text_run, materials):
    text = "the cat"
    completed = regard("show", "next-token", text_run, text, "top=2")
    assert completed.code == 0
    assert "log P of the text" in completed.out
    assert "random" not in completed.out  # the weights of a run are trained
    table = json.loads(regard("show", "next-token", text_run, text, "--json").out)
    assert table["numbers"]["log P of the text"] < 0
    assert regard("show", "shannon", materials / "cats.txt", "--out", "s.svg").out == "s.svg\n"
    assert "s.svg exists already" in regard("show", "shannon", "ab", "--out", "s.svg").err


def test_mistakes_are_one_sentence(regard):
    completed = regard("show", "nexttoken")
    assert completed.code == 2
    assert "did you mean 'next-token'" in completed.err
    assert "unknown option 'ordrs'" in regard("show", "shannon", "ab", "ordrs=2").err
    assert (
        "unknown sampler 'topp'; did you mean 'top_p'" in regard("show", "samplers", "topp=1").err
    )


def test_a_list_is_written_with_commas_or_in_brackets(regard):
    def kinds(*words):
        completed = regard("show", "positions", "length=4", "dim=4", *words, "--json")
        assert completed.code == 0, completed.err
        return [panel["title"] for panel in json.loads(completed.out)["panels"]]

    titles = kinds("kinds=rotary,alibi", "heads=2")
    assert len(titles) == 4
    assert titles == kinds('kinds=["rotary", "alibi"]', "heads=2")
    table = json.loads(regard("show", "receptive-field", "dilations=1,3", "--json").out)
    assert table["numbers"]["receptive field"] == 5
    one = json.loads(regard("show", "receptive-field", "dilations=3", "--json").out)
    assert one["numbers"]["receptive field"] == 4
    default = json.loads(regard("show", "receptive-field", "dilations=none", "--json").out)
    assert default["numbers"]["receptive field"] == 16
    refused = regard("show", "receptive-field", "dilations=1,x")
    assert "dilations must be an integer, not 'x'" in refused.err


def test_figures_of_a_run_of_pairs(regard, pair_run):
    completed = regard("show", "beam-tree", pair_run, "117 cats", "max_new_tokens=3", "width=2")
    assert completed.code == 0, completed.err
    assert "◀ best" in completed.out
    assert regard("show", "gradient-flow", pair_run, "117 cats").code == 0
    refused = regard("show", "next-token", pair_run, "117 cats")
    assert "next-token needs a model that predicts the next token; pairs supports" in refused.err
    assert "attends from one text to another" in regard("show", "pronoun", pair_run).err


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_for_a_terminal_of_ascii_has_no_character_that_becomes_a_question_mark(name):
    inputs, options = SMALL[name]
    shown = api.show(name, *inputs, **options).text(80)
    plain = replace_unencodable(shown, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert plain.isascii()
    assert replace_unencodable(shown, io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == shown
    assert (
        len(set("░▒▓█·".translate(ASCII_SUBSTITUTES) + ":=#")) == 8
    )  # the shades above and below 0
