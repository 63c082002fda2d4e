"""`regard show`: the list, a figure as text, as JSON and as a file."""

import json

from regard.explain.figures import FIGURES


def test_without_a_name_it_lists_all_figures(regard):
    completed = regard("show")
    assert completed.code == 0
    assert all(name in completed.out for name in FIGURES)
    listed = json.loads(regard("show", "--json").out)["figures"]
    assert listed["next-token"]["needs"] == "RUN TEXT"
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


def test_figures_of_a_run_of_pairs(regard, pair_run):
    completed = regard("show", "beam-tree", pair_run, "117 cats", "tokens=3", "width=2")
    assert completed.code == 0, completed.err
    assert "◀ best" in completed.out
    assert regard("show", "gradient-flow", pair_run, "117 cats").code == 0
    refused = regard("show", "next-token", pair_run, "117 cats")
    assert "next-token needs a model that predicts the next token; pairs can" in refused.err
    assert "attends from one text to another" in regard("show", "pronoun", pair_run).err
