"""A user's mistake is one to five lines on stderr and an exit code that says whose it is."""

import re
import shutil
from pathlib import Path

import pytest

from cli.conftest import TEXT_WORDS, trained
from regard.cli import EQUIVALENT_COMMANDS


@pytest.fixture
def refused(regard):
    """Run a command that must refuse; returns its stderr."""

    def run(code, *words):
        completed = regard(*words)
        assert completed.code == code, completed.err
        assert completed.out == ""
        assert "Traceback" not in completed.err
        complaint = (
            completed.err[completed.err.rindex("regard: ") :] if "regard: " in completed.err else ""
        )
        assert 1 <= len(complaint.splitlines()) <= 5
        return completed.err

    return run


def test_a_file_that_is_not_there(refused):
    assert "nothing.txt" in refused(3, "train", "nothing.txt")


def test_a_suggested_file_has_a_similar_stem(refused):
    Path("bin.txt").write_text("x")
    assert "did you mean" not in refused(3, "train", "missing.txt")
    assert "did you mean 'bin.txt'?" in refused(3, "train", "binn.txt")


def test_a_run_that_is_not_there(refused):
    for command in (["generate"], ["evaluate"], ["translate"], ["resume"], ["info"]):
        assert "no run at runs/none" in refused(4, *command, "runs/none")
    assert "no run at runs/none" in refused(4, "explain", "runs/none", "x")


def test_an_unknown_key_gets_a_suggestion(refused, materials):
    stderr = refused(2, "train", materials / "cats.txt", "train.stepps=3")
    assert "did you mean 'steps'" in stderr


def test_a_value_of_the_wrong_type(refused, materials):
    assert "train.steps" in refused(2, "train", materials / "cats.txt", "train.steps=many")


def test_heads_that_do_not_divide_the_width(refused, materials):
    words = ["model.dim=32", "model.heads=5"]
    assert "heads=5 must divide dim=32" in refused(2, "train", materials / "cats.txt", *words)


def test_a_folder_that_exists_is_not_written_over(refused, materials, text_run):
    before = sorted(text_run.rglob("*"))
    stderr = refused(2, "train", materials / "cats.txt", *TEXT_WORDS, "--out", text_run)
    assert f"{text_run} exists already" in stderr
    assert sorted(text_run.rglob("*")) == before


def test_nothing_to_train_on(refused):
    assert "no data to train on" in refused(2, "train", "model.dim=16")
    assert "set both data.source and data.target" in refused(2, "train", "data.source=a.txt")


def test_a_corrupted_checkpoint(refused, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "copy")
    corrupted = tmp_path / "copy/checkpoints/step-4/model.safetensors"
    corrupted.write_bytes(corrupted.read_bytes()[:100])
    stderr = refused(4, "resume", "copy", "train.steps=6")
    assert "corrupted checkpoint" in stderr
    assert "--step 3" in stderr


def test_corrupted_weights(refused, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "copy")
    (tmp_path / "copy/model.safetensors").write_bytes(b"no weights")
    assert "corrupted" in refused(4, "generate", "copy", "x")


def test_data_that_changed_since_the_run_began(refused, regard, materials, tmp_path):
    shutil.copy(materials / "cats.txt", tmp_path / "mine.txt")
    assert regard("train", "mine.txt", *TEXT_WORDS).code == 0
    with open(tmp_path / "mine.txt", "a") as file:
        file.write("one more line\n")
    stderr = refused(3, "resume", "runs/mine", "train.steps=6")
    assert "the data has changed" in stderr


def test_text_that_is_not_utf8(refused, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"plain " * 100 + b"caf\xe9 " * 3)
    stderr = refused(3, "train", "latin.txt")
    assert "latin.txt" in stderr
    assert "603" in stderr  # the byte


def test_pairs_whose_files_differ_in_length(refused, tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("un\n")
    assert "line 2" in refused(3, "train", "data.source=a", "data.target=b")


def test_a_verb_that_does_not_fit_the_run(refused, text_run, pair_run):
    assert "the text is empty" in refused(2, "explain", pair_run, " ")
    assert "generate" in refused(2, "translate", text_run, "x")
    assert "translate" in refused(2, "generate", pair_run, "x")
    assert "translate" in refused(2, "generate", pair_run, "x", "--beam", "2")


def test_a_run_that_was_stopped_before_it_saved(refused, text_run, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(text_run, stopped)
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "model.safetensors").unlink()
    stderr = refused(4, "generate", stopped, "x")
    assert f"none were saved yet; to continue training: regard resume {stopped}" in stderr


def test_an_unknown_sampler(refused, text_run):
    assert "did you mean 'top_p'" in refused(2, "generate", text_run, "x", "-s", "topp=0.9")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--temperature", "0.5"], "-s temperature=0.5"),
        (["--temperatur", "2"], "-s temperature=2"),
        (["--top-k", "40", "--seed", "1"], "-s top_k=40"),
        (["--top_p=0.9"], "-s top_p=0.9"),
        (["--no-repeat-ngram", "--json"], "-s no_repeat_ngram=VALUE"),
        (["--greedy"], "-s greedy"),
    ],
)
def test_a_sampler_is_no_option(refused, words, instead):
    first, _ = refused(2, "generate", "runs/my", "Once", *words).splitlines()
    option = words[0].partition("=")[0]
    assert first == f"regard: no such option: {option}; it is a sampler, so write {instead}"


def test_an_option_that_is_no_sampler_is_not_taken_for_one(refused):
    assert "sampler" not in refused(2, "generate", "runs/my", "Once", "--tokenz", "3")


@pytest.mark.parametrize("word", ["lookup", "look_up", "Look-Up"])
def test_a_misspelt_prompt_lookup_gets_a_suggestion(refused, text_run, word):
    stderr = refused(4, "generate", text_run, "x", "--draft", word)
    assert f"no run at {word}; did you mean 'prompt-lookup'?" in stderr
    assert "--draft takes the folder of a smaller run, or prompt-lookup" in stderr


def test_a_draft_that_is_not_there(refused, text_run):
    stderr = refused(4, "generate", text_run, "x", "--draft", "runs/none")
    assert "no run at runs/none\n--draft takes" in stderr


def test_a_text_to_explain_is_missing(refused, text_run):
    stderr = refused(2, "explain", text_run)
    assert f"the text after '{text_run}' is missing" in stderr
    assert "regard explain runs/my 'To be, or not to be'" in stderr
    assert "missing argument 'TEXT'" in refused(2, "explain")


def test_settings_that_do_not_apply(refused, text_run):
    assert "--beam" in refused(2, "generate", text_run, "x", "--beam", "2", "--seed", "1")
    assert "there is only layer 0" in refused(2, "explain", text_run, "x", "--layer", "7")
    assert "2 heads" in refused(2, "explain", text_run, "x", "--head", "2")
    assert "model.layers" in refused(2, "info", "gpt2", "train.steps=3")


def test_a_picture_has_a_known_suffix_and_is_not_written_over(refused, regard, text_run, tmp_path):
    assert ".svg" in refused(2, "explain", text_run, "cat", "--out", "x.gif")
    (tmp_path / "x.svg").write_text("mine")
    assert "--force" in refused(2, "explain", text_run, "cat", "--out", "x.svg")
    assert (tmp_path / "x.svg").read_text() == "mine"
    shown = regard("explain", text_run, "cat", "--out", "x.svg", "--force")
    assert (shown.out, shown.err) == ("x.svg\n", "decoder.blocks.0.attention, 2 heads\n")
    picture = (tmp_path / "x.svg").read_text()
    assert picture.startswith("<?xml")
    assert "decoder.blocks.0.attention: weight" in picture
    shown = regard("explain", text_run, "cat Q", "--out", "x.html", "--force")
    assert "read as unknown tokens: 'Q'" in shown.err
    page = (tmp_path / "x.html").read_text()
    assert "decoder.blocks.0.attention" in page
    assert "<unk>" in page or "&lt;unk&gt;" in page
    assert "cannot write" in refused(4, "explain", text_run, "cat", "--out", "none/x.svg")


def test_lines_that_are_not_utf8(refused, pair_run, stdin):
    stdin(b"1 cats\n\xff\xfe\n")
    assert "stdin, line 2" in refused(3, "translate", pair_run)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--minutes", "2"], "no such option: --minutes; it is a setting, so write minutes=2"),
        (["--steps=9"], "it is a setting, so write train.steps=9"),
        (["train.device=cpu"], "unknown key 'device'; it is a top-level setting: device=…"),
        (["train.layers=3"], "did you mean 'model.layers'?"),
        (["train.rate=0.1"], "unknown key 'rate'; it is called 'lr' now"),
        (["rate=0.1"], "did you mean 'train.lr'?"),
        (["train.average=0.9"], "it is called 'ema' now"),
        (["train.recompute=true"], "it is called 'activation_checkpointing' now"),
        (["train.watch=wandb"], "it is called 'trackers' now"),
        (["data.held_out=0.1"], "it is called 'validation_fraction' now"),
        (["model.order=pre"], "it is called 'norm_placement' now"),
        (["task=masked", "task.share=0.1"], "it is called 'mask_fraction' now"),
        (["model.preset=gru", "model.cell=gated"], "it is called 'update_gate' now"),
    ],
)
def test_a_setting_in_the_wrong_place_gets_a_hint(refused, materials, words, hint):
    assert hint in refused(2, "train", materials / "cats.txt", *words)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["minutes=-1"], 2),
        (["model.preset=gtp2"], 2),
        (["model.dim=32", "model.heads=5"], 2),
        (["train.lr=-1"], 2),
        (["train.best_metric=f1"], 2),
        (["train.log=['nothing']"], 2),
        (["train.trackers=['none']"], 2),
        (["device=cuda:99"], 2),
        (["--out", "cats.txt/run"], 4),
        (["--out", "closed/run"], 4),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_measured(
    refused, materials, tmp_path, monkeypatch, words, code
):
    shutil.copy(materials / "cats.txt", tmp_path)
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    assert "measuring" not in refused(code, "train", "cats.txt", "minutes=1", *words)


def test_a_misspelt_setting_gets_a_suggestion_and_a_setting_its_other_defaults(refused, regard):
    assert "did you mean 'lr'?" in refused(2, "settings", "lrr")
    assert "NUL character" in refused(2, "settings", "l\0r")
    shown = " ".join(regard("settings", "train.lr").out.split())  # lines are wrapped
    assert "quickstart 0.003" in shown
    assert "regard train DATA --dry-run" in shown
    assert "DATA" not in regard("settings", "train.timeout").out
    assert "cells false" in regard("settings", "train.baseline").out


def test_a_sampler_with_its_option_gets_no_hint(refused):
    for words in (["--seed", "x"], ["--count", "0"], ["twice"]):
        error = refused(2, "generate", "runs/my", "the", "-s", "top_k=40", *words)
        assert "it is a sampler" not in error
    assert "missing argument 'RUN'" in (error := refused(2, "generate", "-s", "greedy"))
    assert "it is a sampler" not in error


@pytest.mark.parametrize("words", [["temperature=0.5"], ["greedy"], ["--top-k", "5"]])
def test_a_sampler_without_its_option_gets_a_hint(refused, words):
    written = "top_k=5" if words[0] == "--top-k" else words[0]
    error = refused(2, "generate", "runs/my", "the", *words)
    assert f"it is a sampler, so write -s {written}" in error


def test_a_command_of_another_tool_names_what_there_is(refused):
    for command, instead in EQUIVALENT_COMMANDS.items():
        assert f"no such command {command!r}; {instead}\ncommands: quickstart, train" in refused(
            2, command
        )
    assert "no such command 'qqq'\ncommands: quickstart," in refused(2, "qqq")


@pytest.fixture(scope="module")
def counts_run(materials, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "counts"
    return trained(folder, materials / "cats.txt", ["model.family=ngram"])


def test_a_model_without_attention_and_a_run_to_import_name_the_reason(refused, counts_run):
    error = refused(2, "explain", counts_run, "cat")
    assert "is a model of the family ngram, which has no attention;\nfor attention maps" in error
    assert "counts is already a run" in refused(2, "import", counts_run, "imported")


def test_attention_of_a_classifier_without_it_names_a_preset(regard, refused):
    Path("c.tsv").write_text("".join(f"good {n}\tyes\nbad {n}\tno\n" for n in range(40)))
    words = ["model.preset=lstm", "model.dim=8", "train.steps=1", "device=cpu", "--out", "lstm"]
    assert regard("train", "c.tsv", *words).code == 0
    assert "train a transformer: model.preset=tiny-encoder\n" in refused(2, "explain", "lstm", "x")


def test_the_former_names_of_two_tasks_suggest_both(refused, materials):
    for name in ("classify", "label"):
        error = refused(2, "train", materials / "cats.txt", f"task={name}")
        assert "_classification' or '" in error
        assert "'text_classification'" in error
        assert "'image_classification'" in error


def test_an_edit_that_does_not_fit_the_weights_names_the_settings(refused, text_run):
    error = refused(2, "edit", text_run, "model.layers=9")
    assert f"regard: model.layers=9 does not fit the weights of {text_run}" in error
    assert len(error.splitlines()) == 2


def test_what_is_not_a_checkpoint_names_what_is(refused, materials):
    Path("empty").mkdir()
    folder = "give a Hugging Face folder, with config.json and model.safetensors"
    error = refused(4, "import", materials / "cats.txt", "run")
    assert f"cats.txt is not a checkpoint; {folder}" in error
    assert f"empty has no config.json; {folder}" in refused(4, "import", "empty", "run")


def test_a_prompt_of_several_words_is_quoted(refused, text_run):
    assert "quote a text of several words" in refused(2, "generate", text_run, "To", "be")


def test_minutes_measure_nothing_for_a_folder_that_exists(refused, materials, text_run):
    error = refused(2, "train", materials / "cats.txt", "minutes=9", "--out", text_run)
    assert error.startswith(f"regard: {text_run} exists already")


def test_a_former_option_names_the_current_one(refused, text_run):
    names = {"--until": "--stop", "--tokens": "--max-new-tokens"}
    for former, current in names.items():
        stderr = refused(2, "generate", text_run, "the", former, "5")
        assert f"no such option: {former}; it is called {current} now" in stderr


def test_an_option_out_of_range_names_the_value(refused, text_run):
    for words in (["--max-new-tokens", "-5"], ["--max-new-tokens=-5"], ["-n", "-5"]):
        assert "-5" in refused(2, "generate", text_run, "the", *words)


def test_an_unknown_task_without_a_close_name_lists_all(refused, materials):
    stderr = refused(2, "train", materials / "cats.txt", "task=translate")
    assert "did you mean" not in stderr
    assert "seq2seq" in stderr


def test_a_model_setting_that_does_not_fit_the_weights_of_the_start(refused, materials, text_run):
    layers = 3
    words = [f"train.start={text_run}", f"model.layers={layers}", "--out", "runs/unfit"]
    for dry_run in ([], ["--dry-run"]):
        stderr = refused(2, "train", materials / "cats.txt", *words, *dry_run)
        assert f"model.layers={layers} does not fit the weights of train.start=" in stderr
    for preset, setting in {"lstm": "model.family=recurrent", "gpt2": "model.dim=768"}.items():
        words = [f"train.start={text_run}", f"model.preset={preset}", "--dry-run"]
        stderr = refused(2, "train", materials / "cats.txt", *words)
        assert f"regard: {setting} " in stderr
        assert "does not fit the weights of train.start=" in stderr
    assert not Path("runs/unfit").exists()


@pytest.mark.filterwarnings("default::regard.errors.RegardWarning")
def test_text_outside_of_the_vocabulary_is_counted(regard, materials, text_run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("the cat sat on the mat, ça và? " * 40, encoding="utf-8")
    words = [f"train.start={text_run}", "train.steps=1", "--out", tmp_path / "run"]
    heading = regard("train", other, *words).err
    assert "are not in the vocabulary of train.start" in heading
    assert re.search(r"unknown +\d+ tokens for training and \d+ for validation", heading)
    stderr = regard("evaluate", text_run, other).err
    assert "tokens of this text are not in the vocabulary of the run" in stderr
    assert "not in the vocabulary" not in regard("evaluate", text_run).err
