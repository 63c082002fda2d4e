"""The reference of settings: complete, and equal to the page and to what the code accepts."""

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import regard
from regard.api import settings_page
from regard.api.settings_reference import PROVIDED_TO_TASK, field_comments
from regard.cli import main
from regard.config import DataConfig, TrainConfig, make
from regard.errors import ConfigError
from regard.models.build import FAMILIES, build_model, resolve
from regard.renamed import OTHER_LIBRARIES
from regard.tasks import TASKS
from regard.text import TOKENIZERS
from regard.training.fine_tuning import TUNINGS
from regard.training.optim import OPTIMIZERS, SCHEDULES, optimizers, schedule

CONFIGS = {
    "data": [DataConfig],
    "train": [TrainConfig],
    "task": list(TASKS.values()),
    "model": [config for config, _ in FAMILIES.values()],
}


def test_the_page_is_what_make_settings_writes():
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_page(), "run `make settings`"


@pytest.mark.parametrize("table", CONFIGS)
def test_every_field_of_every_dataclass_is_a_setting(table):
    names = {field.name for config in CONFIGS[table] for field in fields(config)}
    names -= PROVIDED_TO_TASK if table == "task" else set()
    keys = {row["key"] for row in regard.settings() if row["key"].startswith(f"{table}.")}
    extra = (
        {"model.preset", "model.family", "model.position.scaling"} if table == "model" else set()
    )
    assert keys - extra == {f"{table}.{name}" for name in names}


def test_every_setting_has_a_sentence_tasks_and_models():
    for row in regard.settings():
        assert len(row["description"]) > 5, row["key"]
        assert "…" not in row["description"], row["key"]
        assert row["tasks"], row["key"]
        assert row["models"], row["key"]


def test_every_choice_lists_its_names():
    for row in regard.settings():
        if "name" in row["type"]:
            assert row["choices"] or row["key"] == "model.head", row["key"]
            assert (
                not isinstance(row["default"], str)
                or not row["choices"]
                or (row["default"] in row["choices"])
            ), row["key"]


def test_the_comments_of_fields_are_read_behind_and_before_them():
    comments = field_comments(TrainConfig)
    assert comments["steps"] == "optimizer steps"
    assert comments["log"].startswith("hook points whose activations are logged")
    inherited = field_comments(FAMILIES["vision"][0])
    assert {"dim", "norm_placement", "patch_size"} <= {
        name for name, text in inherited.items() if text
    }


def choices(key):
    (row, *_) = regard.settings(key)
    for name, choice in row["choices"].items():
        options = {n: o["default"] for n, o in choice["options"].items() if not o["required"]}
        yield {"kind": name, **options}


@pytest.mark.parametrize("key", ["position", "score", "init"])
def test_the_options_of_a_model_with_their_defaults_are_accepted(key):
    small = {"dim": 16, "heads": 2, "layers": 1, "context": 8, "vocab_size": 9}
    if key == "score":
        small["position"] = "none"
    for choice in choices(f"model.{key}"):
        if choice["kind"] == "location":  # of recurrent models only
            continue
        build_model(resolve({**small, key: choice}))


def test_the_options_of_training_with_their_defaults_are_accepted():
    model = build_model(resolve({"family": "recurrent", "vocab_size": 9, "dim": 8}))
    assert [optimizers(choice, model, 0.1) for choice in choices("train.optimizer")]
    assert [schedule(choice, 10)(0) for choice in choices("train.schedule")]
    assert {choice["kind"] for choice in choices("train.optimizer")} == set(OPTIMIZERS)
    assert {choice["kind"] for choice in choices("train.schedule")} == set(SCHEDULES)
    assert [
        make(choice, TOKENIZERS, "tokenizer", texts=["some text to learn from"] * 99)
        for choice in choices("data.tokenizer")
    ]
    (row,) = regard.settings("train.tune")
    for name, tuning in TUNINGS.items():
        assert [*row["choices"][name]["options"]] == [*signature(tuning).parameters]


def test_a_pattern_is_a_key_a_part_a_glob_or_the_name_of_a_choice():
    def keys(pattern):
        return list(dict.fromkeys(row["key"] for row in regard.settings(pattern)))

    assert keys("train.lr") == ["train.lr"]
    assert keys("accumul") == ["train.accumulate"]
    assert keys("train.evaluate_*") == [
        "train.evaluate_every",
        "train.evaluate_targets",
        "train.evaluate_stride",
    ]
    assert keys("rotary") == ["model.position"]
    assert keys("warmup") == ["train.schedule"]
    assert keys("position.base") == keys("model.position.base") == ["model.position"]
    with pytest.raises(ConfigError, match=r"did you mean 'train\.steps'"):
        regard.settings("train.stepz")


def test_in_python_the_first_argument_may_be_a_setting_as_in_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["model.family=autoregression", "model.order=3"]
    run = regard.train("data.path=sines", *settings, quiet=True)
    assert run.config.data.path == "sines"
    assert run.config.model["order"] == 3


def test_names_of_other_libraries_are_answered_with_the_setting():
    for other, name in OTHER_LIBRARIES.items():
        assert regard.settings(name), other
    for argument, suggestion in {
        "learning_rate=1e-3": "train.lr",
        "rope_theta=500000": "model.position.base",
        "train.weight_decay=0.1": "optimizer.weight_decay",
        "model.n_embd=128": "dim",
        "train.schedule.warmup_steps=9": "warmup",
    }.items():
        with pytest.raises(ConfigError, match=f"did you mean '{suggestion}'"):
            regard.train("numbers", argument)
    with pytest.raises(ConfigError, match=r"did you mean 'position\.base'"):
        regard.settings("rope_theta")


def test_rows_say_who_uses_a_setting():
    (row,) = regard.settings("data.label")
    assert row["tasks"] == ["text_classification", "text_regression"]
    by_models = {tuple(row["models"]): row["default"] for row in regard.settings("model.dim")}
    assert by_models[("transformer", "vision", "captioner")] == 512
    assert by_models[("cbow",)] == 100
    assert regard.settings("task.mask_fraction")[0]["models"] == ["transformer"]
    assert "ngram" not in regard.settings("train.steps")[0]["models"]


@pytest.mark.parametrize("words", [[], ["model"], ["train.schedule"]])
def test_the_command_prints_every_match_within_the_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit:
        main(["settings", *words])
    out = capsys.readouterr().out
    assert not exit.value.code
    assert all(row["key"] in out for row in regard.settings(*words))
    assert max(map(len, out.splitlines())) <= 100


def test_json_gives_the_same_rows(capsys):
    with pytest.raises(SystemExit):
        main(["settings", "--json"])
    assert json.loads(capsys.readouterr().out) == {"settings": regard.settings()}
