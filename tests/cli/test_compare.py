"""`regard compare`: runs beside each other, finished or not, of one task or of several."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.conftest import TINY
from regard.config import RunConfig, build, merge
from regard.models.build import config_table, preset
from regard.training.storage.evaluation import Evaluation
from regard.training.storage.run_folder import RunFolder

STEPS = 20


def logged(
    path,
    *,
    upto=STEPS,
    over=None,
    start=4.0,
    seconds=72.0,
    preset_name="tiny-decoder",
    evaluated="data",
):
    """A run folder of twenty steps as training leaves it, up to a step."""
    table = {
        "name": path.name,
        "task": "causal",
        "data": {"path": "/data/cats.txt", "tokenizer": "char"},
        "model": config_table(preset(preset_name, vocab_size=65, context=64)),
        "train": {"steps": STEPS, "batch": 12},
    }
    path.mkdir()
    folder = RunFolder(path)
    over = over or {}
    if "family" in over.get("model", {}):
        table["model"] = {}
    folder.save_config(build(RunConfig, merge(table, over)))
    folder.metrics.touch()
    for step in range(1, upto + 1):
        loss = start / step**0.5
        folder.append({"step": step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "targets": 768})
        if step % 5 == 0:
            bits = loss / 0.6931
            folder.append({"step": step, "validation": {"loss": loss + 0.1, "bits_per_byte": bits}})
    if upto and evaluated is not None:
        metrics = folder.best_metrics()
        folder.save_evaluation(Evaluation(metrics=metrics, targets=100, total=100, data=evaluated))
    if seconds is not None:
        folder.clock.write_text(json.dumps({"seconds": seconds}))
    return path


@pytest.fixture
def runs(tmp_path):
    """One that is finished, and one that is not and has chosen differently."""
    one = logged(tmp_path / "one")
    model = {"position": "alibi", "layers": 2}
    other = logged(tmp_path / "other", upto=12, over={"model": model, "train": {"lr": 0.5}})
    return one, other


def lines(completed):
    """The rows of the table by their first word."""
    cells = [line.split("  ") for line in completed.out.splitlines() if line.startswith("  ")]
    output = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    return {row[0]: row[1:] for row in output}


def test_metrics_cost_and_differing_settings_are_side_by_side(regard, runs):
    completed = regard("compare", *runs)
    assert (completed.code, completed.err) == (0, "")
    output = lines(completed)
    assert next(iter(output)) == "one"
    assert output["loss"] == ["0.9944", "1.3649"]
    assert output["steps"] == ["20", "12 of 20"]
    assert output["targets"] == ["15,360", "9,216"]
    assert output["time"] == ["1:12", "1:12"]
    assert output["model.position"] == ["rotary, interleaved yes", "alibi"]
    assert output["model.layers"] == ["4", "2"]
    assert output["train.lr"] == ["0.001", "0.5"]
    assert "model.dim" not in output
    assert "data.tokenizer" not in output
    titles = [line for line in completed.out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["validation", "cost", "settings"]


def test_logged_activations_have_rows_and_curves(regard, runs, tmp_path):
    with open(runs[0] / "metrics.jsonl", "a") as file:
        for step, mean in ((5, 0.5), (10, 0.25)):
            row = {"step": step, "activations": {"layers.0.gate": {"mean": mean, "zeros": None}}}
            file.write(json.dumps(row) + "\n")
    completed = regard("compare", *runs, "--out", "curves.svg")
    assert lines(completed)["layers.0.gate.mean"] == ["0.2500", "-"]
    assert "layers.0.gate.mean" in (tmp_path / "curves.svg").read_text()
    one, other = json.loads(regard("compare", *runs, "--json").out)["runs"]
    assert one["activations"] == {"layers.0.gate.mean": 0.25}
    assert "activations" not in other


def test_as_json_it_is_one_object(regard, runs):
    output = json.loads(regard("compare", *runs, "--json").out)
    one, other = output["runs"]
    assert (one["name"], one["step"], one["steps"]) == ("one", 20, 20)
    assert other["metrics"]["loss"] == pytest.approx(4 / 10**0.5 + 0.1)
    model = json.loads(regard("info", runs[0], "--json").out)
    assert one["parameters"] == model["parameters"]
    assert one["flops"] == model["training_flops_per_token"] * 15_360
    assert output["settings"]["model.position"][1] == "alibi"


def test_one_run_alone_has_nothing_that_differs(regard, runs):
    completed = regard("compare", runs[0])
    assert completed.code == 0
    assert "\nsettings\n" not in completed.out
    assert regard("compare", runs[0], "--out", "one.svg").code == 0


def test_curves_are_drawn_as_svg_and_as_a_page_with_the_table(regard, runs, tmp_path):
    completed = regard("compare", *runs, "--out", "curves.svg")
    assert completed.err == "curves: curves.svg\n"
    svg = ElementTree.fromstring((tmp_path / "curves.svg").read_text())
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one", "other", "loss", "bits per byte", "steps"} <= set(texts)
    assert regard("compare", *runs, "--out", "page.html", "--quiet").code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "<td>model.position</td><td>rotary, interleaved yes</td><td>alibi</td>" in page
    assert "<script" not in page
    assert not re.search(r"src=|@import|url\((?!#)", page)  # nothing is fetched


def test_hostile_names_stay_text_on_a_page(regard, tmp_path):
    hostile = logged(tmp_path / "<script>&")
    assert regard("compare", hostile, "--out", "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "<th>&lt;script&gt;&amp;</th>" in page


def test_an_image_costs_the_flops_of_all_its_patches(regard, tmp_path):
    model = config_table(preset("tiny-vit"))
    run = logged(tmp_path / "images", over={"task": "image_classification", "model": model})
    (output,) = json.loads(regard("compare", run, "--json").out)["runs"]
    each = json.loads(regard("info", "tiny-vit", "--json").out)
    assert output["flops"] == 15_360 * each["context"] * each["training_flops_per_token"]


def test_curves_are_drawn_as_png(regard, runs, tmp_path):
    assert regard("compare", *runs, "--out", "curves.png").code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_with_another_suffix_or_an_existing_file_is_refused(regard, runs, tmp_path):
    completed = regard("compare", *runs, "--out", "curves.gif")
    assert (completed.code, completed.out) == (2, "")
    assert ".svg or .png or .pdf or .html" in completed.err
    (tmp_path / "mine.svg").write_text("mine")
    assert "--force" in regard("compare", *runs, "--out", "mine.svg").err
    assert (tmp_path / "mine.svg").read_text() == "mine"


def test_different_tasks_data_or_tokenizers_are_pointed_out(regard, runs, tmp_path):
    one, _ = runs
    other = {"task": "masked"}
    masked = logged(tmp_path / "masked", over=other, preset_name="tiny-encoder")
    completed = regard("compare", one, masked)
    assert "different tasks" in completed.err
    assert lines(completed)["FLOPs"][1] == "-"  # only the masked are targets, so nobody knows
    dogs = logged(tmp_path / "dogs", evaluated="dogs")
    completed = regard("compare", one, dogs)
    assert "different validation data: their metrics cannot be compared" in completed.err
    assert "loss" not in lines(completed)
    word = logged(tmp_path / "word", over={"data": {"tokenizer": "word"}})
    assert "compare bits_per_byte" in regard("compare", one, word).err


def test_losses_of_translations_with_other_tokenizers_are_not_comparable(regard, tmp_path):
    task = {"task": "seq2seq"}
    metrics = {"loss": 4.0, "perplexity": 54.6}
    for name, tokenizer in (("word", "word"), ("bpe", "bpe")):
        over = {**task, "data": {"tokenizer": tokenizer}}
        path = logged(tmp_path / name, over=over, preset_name="tiny-encoder-decoder")
        RunFolder(path).save_evaluation(
            Evaluation(metrics=metrics, targets=100, total=100, data="data")
        )
    told = regard("compare", tmp_path / "word", tmp_path / "bpe").err
    assert "the tokenizers differ: losses cannot be compared" in told
    assert "bits_per_byte" not in told


def test_losses_of_classes_do_not_depend_on_the_tokenizer(regard, tmp_path):
    for tokenizer in ("word", "bpe"):
        over = {"task": "text_classification", "data": {"tokenizer": tokenizer}}
        logged(tmp_path / tokenizer, over=over, preset_name="tiny-encoder")
    assert "loss is per token" not in regard("compare", tmp_path / "word", tmp_path / "bpe").err


def test_a_run_that_has_just_started_has_no_metrics_yet(regard, runs, tmp_path):
    new = logged(tmp_path / "new", upto=0, seconds=None)
    output = lines(regard("compare", runs[0], new))
    assert output["loss"] == ["0.9944", "-"]
    assert (output["steps"][1], output["time"][1]) == ("0 of 20", "-")
    assert regard("compare", runs[0], new, "--out", "both.svg").code == 0
    completed = regard("compare", new, "--out", "none.svg")
    assert (completed.code, "nothing to draw" in completed.err) == (2, True)


def test_an_incomplete_last_line_is_ignored(regard, runs):
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "loss": 1.')
    assert lines(regard("compare", *runs))["steps"] == ["20", "12 of 20"]


def test_runs_of_one_name_go_by_their_paths(regard, runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "again/one")
    output = json.loads(regard("compare", "one", "again/one", "--json").out)
    assert [each["name"] for each in output["runs"]] == ["one", "again/one"]


def test_what_is_no_run_is_refused(regard, runs, tmp_path):
    completed = regard("compare", runs[0], "nothing")
    assert (completed.code, completed.out) == (4, "")
    assert "no run at nothing" in completed.err


def test_an_imported_run_has_no_steps_and_no_training_settings(regard, runs, tmp_path):
    imported = logged(tmp_path / "imported", upto=0, over={"data": {"path": None}})
    output = lines(regard("compare", runs[1], imported))
    assert output["steps"] == ["12 of 20", "-"]
    assert "train.lr" not in output  # it applies to one run only


def test_only_settings_that_apply_to_several_runs_and_differ_are_listed(regard, runs, tmp_path):
    ngram = logged(tmp_path / "ngram", over={"model": {"family": "ngram", "vocab_size": 65}})
    output = lines(regard("compare", *runs, ngram))
    assert output["model.family"] == ["transformer", "transformer", "ngram"]
    assert output["train.lr"] == ["0.001", "0.5", "-"]
    assert not {"model.dim", "train.steps", "model.smoothing"} & set(output)
    assert output["parameters"][2] == "-"
    assert output["stored values"][:2] == ["-", "-"]


def test_one_name_has_one_meaning(regard, tmp_path):
    cbow = logged(tmp_path / "cbow", over={"model": {"family": "cbow", "vocab_size": 65}})
    model = {**config_table(preset("tiny-decoder", vocab_size=65)), "window": 8}
    windowed = logged(tmp_path / "windowed", over={"model": model})
    assert "model.window" not in regard("compare", cbow, windowed).out


def test_trained_runs_can_be_compared(regard, text_run, pair_run):
    completed = regard("compare", text_run, pair_run)
    assert completed.code == 0
    assert lines(completed)["task"] == ["causal", "seq2seq"]
    assert "-" not in lines(completed)["time"]


def test_a_run_without_text_has_no_tokenizer(regard, materials):
    Path("s.csv").write_text("v\n" + "".join(f"{n % 7}\n" for n in range(300)))
    heading = regard("train", "s.csv", "--out", "series").err
    assert "(to change a setting, write key=value)" in heading
    words = ["data.tokenizer=char", *TINY, "train.steps=1", "--out", "text"]
    heading = regard("train", materials / "cats.txt", *words).err
    assert "(to change a setting, write key=value, as in train.lr=0.0005)" in heading
    settings = json.loads(regard("compare", "series", "text", "--json").out)["settings"]
    assert "task" in settings
    assert "data.tokenizer" not in settings
