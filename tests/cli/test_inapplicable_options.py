"""An option that does not apply to a kind of run is refused, with what applies instead."""

import json
import sys
from pathlib import Path

import pytest

from cli.conftest import TINY, trained
from regard.pipelines import detect


@pytest.fixture(scope="module")
def drawing_run(tmp_path_factory):
    """A handwriting run that draws digits."""
    words = ["model.dim=16", "train.steps=1", "train.batch=2", "train.evaluate_targets=50"]
    return trained(tmp_path_factory.mktemp("runs") / "digits", "digits", words)


@pytest.fixture(scope="module")
def series_run(tmp_path_factory):
    """A run that forecasts a series, fitted without steps."""
    return trained(tmp_path_factory.mktemp("runs") / "sines", "sines", [])


@pytest.fixture(scope="module")
def label_run(tmp_path_factory):
    """A classifier of texts."""
    folder = tmp_path_factory.mktemp("labels")
    rows = [
        {"text": f"{word} day {n}", "label": word} for n in range(20) for word in ("glad", "so")
    ]
    (folder / "days.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return trained(folder / "run", folder / "days.jsonl", ["model.dim=8", "train.steps=1"])


@pytest.fixture
def refused(regard):
    """Run a command that must refuse its options; returns its stderr."""

    def run(*words):
        completed = regard(*words)
        assert (completed.code, completed.out) == (2, ""), completed
        return completed.err

    return run


def test_explain_prints_json_and_writes_the_figure(regard, text_run):
    plain = json.loads(regard("explain", text_run, "cat", "--json").out)
    for name in ("map.svg", "map.html", "head.html"):
        words = ["--head", 0] if name == "head.html" else []
        completed = regard("explain", text_run, "cat", *words, "--json", "--out", name)
        table = json.loads(completed.out)
        assert table["weights"] == plain["weights"][: 1 if words else None]
        assert f"figure: {name}" in completed.err
        assert Path(name).stat().st_size > 1000


@pytest.mark.parametrize(
    "words",
    [
        ["-s", "greedy"],
        ["--order", "hf"],
        ["-n", 5],
        ["--stop", "x"],
        ["--draft", "prompt-lookup"],
        ["--amateur", "runs/x"],
        ["--int8"],
        ["--int4"],
        ["--float16"],
        ["--beam", 2],
        ["--search", "beam=2"],
        ["--trace"],
        ["--json"],
    ],
)
def test_handwriting_takes_no_option_of_text(refused, drawing_run, words):
    long = {"-s": "--sampler", "-n": "--max-new-tokens"}.get(words[0], words[0])
    error = refused("generate", drawing_run, "12", *words)
    assert "draws handwriting, which takes --count, --bias, --seed and --out" in error
    assert error.rstrip().endswith(f"; leave out {long}")


def test_text_takes_no_option_of_handwriting(refused, text_run):
    for words in (["--count", 16], ["--bias", 0]):
        error = refused("generate", text_run, "the", *words)
        assert "--count and --bias are for handwriting" in error
        assert error.rstrip().endswith(f"; leave out {words[0]}")
    assert "redirect text" in refused("generate", text_run, "the", "--out", "x.svg")


def test_handwriting_reads_one_text_of_stdin(regard, refused, drawing_run, stdin):
    plain = regard("generate", drawing_run, "12", "--count", 2, "--seed", 1).out
    assert plain
    stdin(b"12\n")
    assert regard("generate", drawing_run, "-", "--count", 2, "--seed", 1).out == plain
    stdin(b"12\n13\n")
    assert "draws one text, and stdin has 2" in refused("generate", drawing_run, "-")


def test_drawings_are_printed_after_the_spinner_has_stopped(regard, drawing_run, monkeypatch):
    running = []

    class Spinner:
        def __init__(self, text):
            pass

        def __enter__(self):
            running.append(self)

        def __exit__(self, *error):
            running.pop()

    def drawings_text(drawings):
        assert not running, "the spinner is still running"
        return "a drawing"

    # the name `regard.cli.generate` is that of the function
    monkeypatch.setattr(sys.modules["regard.cli.generate"], "spinner", Spinner)
    monkeypatch.setattr("regard.api.run_figures.drawings_text", drawings_text)
    assert regard("generate", drawing_run, "12", "--count", 2).out == "a drawing\n"


def test_only_a_forecast_has_steps_and_only_classes_are_ranked(
    refused, label_run, pair_run, series_run
):
    for run in (label_run, pair_run):
        error = refused("predict", run, "12 cats", "--steps", 3)
        assert "--steps is for runs that forecast a series; leave out --steps" in error
    for run, words in ((series_run, []), (pair_run, ["12 cats"])):
        error = refused("predict", run, *words, "-n", 2)
        assert f"--top is for classes, tokens and answers, and {run} predicts none" in error


def test_a_table_of_predictions_is_not_printed_as_json_too(refused, label_run, series_run):
    for words in ([label_run, "day"], [series_run]):
        error = refused("predict", *words, "--out", "x.csv", "--json")
        assert "to a .jsonl file as JSON; leave out --json" in error
    assert not Path("x.csv").exists()


def test_a_forecast_is_drawn_and_printed_as_json(regard, series_run):
    plain = regard("predict", series_run, "--steps", 3, "--json").out
    completed = regard("predict", series_run, "--steps", 3, "--json", "--out", "x.svg")
    assert completed.out == plain
    assert Path("x.svg").exists()


def test_only_generated_text_is_evaluated_with_a_search(
    regard, refused, text_run, label_run, pair_run
):
    for words in (["--beam", 3], ["--length-penalty", 0.5]):
        name = words[0].strip("-").replace("-", "_")
        for command in (["evaluate", text_run], ["evaluate", label_run, "--by-length"]):
            error = refused(*command, *words)
            assert "a beam is for evaluations of translations and captions" in error
            assert error.rstrip().endswith(f"; leave out {name}")
    assert regard("evaluate", pair_run, "--beam", 1, "--by-length").code == 0


def test_metrics_by_length_have_no_column(refused, pair_run):
    words = ["--by-length", "--out", "x.svg", "--column", "a"]
    assert "leave out --column" in refused("evaluate", pair_run, *words)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["evaluate", "runs/my", "--data", "my text.txt"], "regard evaluate RUN 'my text.txt'"),
        (["train", "--data=my.txt"], "regard train my.txt"),
        (["generate", "runs/my", "--prompt", "Once"], "regard generate RUN Once"),
        (["explain", "runs/my", "--text", "Once"], "regard explain RUN Once"),
    ],
)
def test_an_option_that_is_an_argument_here_gets_a_hint(refused, words, instead):
    assert f"; write {instead}\ntry: regard {words[0]} --help" in refused(*words)


@pytest.mark.parametrize("command", ["compare", "evaluate", "explain", "generate", "predict"])
def test_force_needs_a_file(refused, text_run, command):
    words = {"explain": ["cat"], "predict": ["cat"]}.get(command, [])
    error = refused(command, text_run, *words, "--force")
    assert "--force overwrites the file of --out, which is not given" in error


def test_a_list_has_no_options_of_one_entry(refused):
    assert "the figures are listed; leave out --out" in refused("show", "--out", "x.svg")
    assert "--force overwrites the file of --out" in refused("show", "--force")
    assert "the presets are listed; leave out --hook-points" in refused("info", "--hook-points")


def test_a_word_compared_with_itself_has_no_neighbours(refused, text_run):
    for words in (["--top", 3], ["--data", "cats.txt"]):
        error = refused("neighbours", text_run, "a", "--in", "a cat", *words)
        assert f"--in compares a word with itself; leave out {words[0]}" in error


def test_one_gpu_has_no_link(refused):
    assert "gpus=1; leave out link" in refused("plan", "gpt2", "--link", 10)


def test_a_model_does_not_depend_on_settings_of_training(regard, refused, text_run):
    for name in ("gpt2", "quickstart", text_run):
        for command in ("info", "plan"):
            error = refused(command, name, "train.steps=3", "data.lower=true")
            assert "train, data.lower: only settings of the model can be changed" in error
    assert "data.tokenizer" in refused("info", text_run, "data.tokenizer=char")
    assert regard("info", "quickstart", "data.tokenizer.vocab_size=50", "--json").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "data.tokenizer=char"], "'handwriting' learns from strokes"),
        (["sines", "data.tokenizer=bpe"], "data.tokenizer is for text; task='forecast' learns"),
        (["days.jsonl", "data.columns=[1,2]"], "name the columns of the table: data.text=…"),
        (
            ["names.conll", "data.columns=[1,2]", "data.tags=2"],
            "data.columns is for CoNLL files",
        ),
        (
            ["cats.txt", "data.validation=cats.txt", "data.validation_fraction=0.3"],
            "data.validation is all validation data, so data.validation_fraction=0.3 would not",
        ),
        (
            ["splits", "data.validation_fraction=0.3"],
            "splits has its own validation split, so data.validation_fraction=0.3 would not",
        ),
    ],
)
def test_settings_of_data_that_would_not_be_used(refused, materials, words, message):
    Path("cats.txt").write_text((materials / "cats.txt").read_text())
    Path("days.jsonl").write_text('{"text": "a day", "label": "glad"}\n' * 9)
    Path("splits").mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"a {split} day {n}", "label": n % 2} for n in range(20)]
        Path("splits", f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("names.conll").write_text("a O\nAnn B-name\n\n" * 9)
    assert message in refused("train", *words)


def test_an_override_replaces_a_setting_of_a_recipe(regard, refused, materials, text_run):
    data = f'path = "{materials / "cats.txt"}"\nvalidation_fraction = 0.3\ntokenizer = "word"'
    context = json.loads((text_run / "config.json").read_text())["model"]["context"]
    model = f'preset = "tiny-decoder"\ncontext = {context}'
    Path("r.toml").write_text(f'task = "causal"\n[data]\n{data}\n[model]\n{model}\n')
    words = ["train", "r.toml", *TINY, "train.steps=1"]
    validation = f"data.validation={materials / 'cats.txt'}"
    assert regard(*words, validation, "--out", "validation").code == 0
    assert regard(*words, f"train.start={text_run}", "--out", "start").code == 0
    settings = [json.loads(Path(run, "config.json").read_text()) for run in (text_run, "start")]
    assert settings[0]["data"]["tokenizer"] == settings[1]["data"]["tokenizer"]
    assert "leave it out" in refused(*words, validation, "data.validation_fraction=0.2")


def test_a_run_of_an_earlier_version_may_have_an_unused_setting(regard, materials, monkeypatch):
    """Earlier versions ignored `data.validation_fraction` beside `data.validation`."""
    validation = [f"data.validation={materials / 'cats.txt'}", "data.validation_fraction=0.3"]
    with monkeypatch.context() as earlier:
        earlier.setattr(detect, "_reject_validation", lambda *_: None)
        words = ["train", materials / "cats.txt", *validation, *TINY, "train.steps=1"]
        assert regard(*words, "--out", "run").code == 0
    assert regard("evaluate", "run").code == 0
    assert regard("resume", "run", "train.steps=2").code == 0


def test_a_run_uses_the_tokenizer_of_its_start(regard, refused, materials, text_run):
    words = ["train", materials / "cats.txt", f"train.start={text_run}", *TINY, "train.steps=1"]
    error = refused(*words, "data.tokenizer=word", "--out", "run")
    assert "has a tokenizer, which the run uses; leave out data.tokenizer" in error
    assert not Path("run").exists()
    tokenizer = json.loads((text_run / "config.json").read_text())["data"]["tokenizer"]
    assert regard(*words, f"data.tokenizer={tokenizer}", "--out", "run").code == 0
