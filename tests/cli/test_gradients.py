"""`regard explain --gradients`: numbers, figures, and what is refused."""

import json
from xml.etree import ElementTree

import pytest

from cli.conftest import TEXT_WORDS, trained

SVG = "{http://www.w3.org/2000/svg}"
TEXT = "the cat"


@pytest.fixture(scope="module")
def lstm_run(materials, tmp_path_factory):
    words = ["model.preset=lstm", *(w for w in TEXT_WORDS if "heads" not in w)]
    return trained(tmp_path_factory.mktemp("runs") / "lstm", materials / "cats.txt", words)


@pytest.fixture(scope="module")
def ngram_run(materials, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "counts"
    return trained(folder, materials / "cats.txt", ["model.preset=ngram"])


def rows(completed):
    return [line.split() for line in completed.out.splitlines()]


def test_runs_are_compared_by_distance(regard, text_run, lstm_run):
    completed = regard("explain", text_run, lstm_run, TEXT, "--gradients")
    assert completed.code == 0
    title, first, *_ = rows(completed)
    assert title == ["distance", "token", "cats", "lstm"]
    assert first[:2] == ["0", "'a'"]
    table = json.loads(regard("explain", text_run, lstm_run, TEXT, "--gradients", "--json").out)
    assert table["runs"][0]["tokens"] == list("the ca")
    norms = [next(iter(run["layers"].values())) for run in table["runs"]]
    assert [len(each) for each in norms] == [6, 6]
    assert [float(each) for each in first[2:]] == pytest.approx(
        [each[-1] for each in norms], rel=1e-2
    )


def test_a_picture_has_a_curve_for_each_run(regard, text_run, lstm_run, tmp_path):
    out = tmp_path / "reach.svg"
    completed = regard("explain", text_run, lstm_run, TEXT, "--gradients", "--out", out)
    assert completed.code == 0
    root = ElementTree.parse(out).getroot()
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"cats", "lstm", "positions back"} <= set(texts)
    assert not any("validation" in text for text in texts)
    again = regard("explain", text_run, TEXT, "--gradients", "--out", out)
    assert again.code == 2
    assert "exists already" in again.err


def test_a_run_on_pairs_shows_the_source(regard, pair_run):
    completed = regard("explain", pair_run, "123 cats", "--gradients", "--json")
    assert completed.code == 0
    (run,) = json.loads(completed.out)["runs"]
    assert "".join(run["tokens"]).startswith("123 cats")
    assert set(run["layers"]) == {"encoder.blocks.0"}
    assert all(each > 0 for each in run["layers"]["encoder.blocks.0"])


def test_mistakes_are_errors(regard, text_run, lstm_run, ngram_run):
    def error(*words):
        completed = regard("explain", *words)
        assert completed.code == 2
        return completed.err

    assert "has only layer 0" in error(lstm_run, TEXT, "--gradients", "--layer", 3)
    assert "fitted without gradients" in error(ngram_run, TEXT, "--gradients")
    assert "at least 2 are needed" in error(lstm_run, "t", "--gradients")
    for words in (["--head", 0], ["--words"]):
        message = f"are for attention maps, not for --gradients; leave out {words[0]}"
        assert message in error(text_run, TEXT, "--gradients", *words)
    assert "2 runs: attention maps are for one run" in error(text_run, lstm_run, TEXT)
