"""A config.json that was changed is noticed by every command; `regard edit` accepts it."""

import json
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import regard
from hub.runs import make_checkpoint, model_config
from regard.cli import main
from regard.config import RunConfig, build
from regard.errors import CheckpointError, ConfigError
from regard.files.directory import Directory
from regard.renamed import INVERTED, SETTINGS, current_settings
from regard.training.events import RunStarted
from regard.training.import_export import import_run
from regard.training.run import begin, resume
from regard.training.storage.checkpoint import Checkpoint, write_tensors
from regard.training.storage.run_folder import RunFolder
from survival.test_checkpoint_state import sign
from training.runs import config


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of two steps, not to be changed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    list(begin(config(data / "cats.txt", steps=2, save_every=1, evaluate_every=1), run))
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def change(run, key, value):
    """Change a setting of config.json as an editor would."""
    table = json.loads((run / "config.json").read_text())
    *path, name = key.split(".")
    inner = table
    for part in path:
        inner = inner[part]
    inner[name] = value
    (run / "config.json").write_text(json.dumps(table))


def command(capsys, *words):
    """The exit code of a command and what it printed."""
    with pytest.raises(SystemExit) as exit:
        main([str(word) for word in words])
    return exit.value.code, capsys.readouterr()


COMMANDS = {
    "evaluate": ["evaluate", "RUN"],
    "generate": ["generate", "RUN", "the", "-n", "1"],
    "predict": ["predict", "RUN", "the"],
    "translate": ["translate", "RUN", "the"],
    "explain": ["explain", "RUN", "the cat"],
    "neighbours": ["neighbours", "RUN", "a"],
    "export": ["export", "RUN", "OUT"],
    "info": ["info", "RUN"],
    "diff": ["diff", "RUN", "gpt2"],
    "compare": ["compare", "RUN", "RUN"],
    "resume": ["resume", "RUN", "train.steps=3"],
    "start": ["train", "DATA", "train.start=RUN", "--out", "OUT", "train.steps=1"],
}


def test_every_command_refuses_a_changed_model_and_none_a_moved_file(run, data, tmp_path, capsys):
    out = tmp_path / "out"
    places = {"RUN": str(run), "OUT": str(out), "DATA": str(data / "cats.txt")}
    change(run, "model.norm_eps", 0.5)
    for used, words in COMMANDS.items():
        for name, place in places.items():
            words = [word.replace(name, place) for word in words]
        code, said = command(capsys, *words)
        assert code == 4, used
        assert f"{run}/config.json was changed after the weights were trained:\n" in said.err, used
        assert "\n  model.norm_eps: 1e-05 → 0.5\n" in said.err, used
        assert f"regard edit {run}\n" in said.err, used
        assert not out.exists(), used


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.ffn", "swiglu"),
        ("model.heads", 4),
        ("model.position", "alibi"),
        ("model.more", 1),
        ("task.kind", "masked"),
        ("data.tokenizer", "bpe"),
        ("data.lower", True),
        ("data.text2", "hypothesis"),
    ],
)
def test_what_the_weights_depend_on_is_signed(run, key, value):
    change(run, key, value)
    with pytest.raises(CheckpointError, match=rf"after the weights were trained:\n  {key}: .* → "):
        RunFolder(run).load_config()


def test_many_changes_are_listed_in_part(run):
    for number in range(7):
        change(run, f"model.more{number}", "x" * 5000)
    with pytest.raises(CheckpointError, match=r"… and 2 more\n") as raised:
        RunFolder(run).load_config()
    assert len(str(raised.value)) < 2000


def test_training_settings_may_be_edited_and_are_listed_on_resume(run, data, tmp_path):
    shutil.copy(data / "cats.txt", tmp_path / "moved.txt")
    change(run, "train.lr", 0.5)
    change(run, "task.label_smoothing", 0.2)
    change(run, "data.path", str(tmp_path / "moved.txt"))
    events = list(resume(run, {"train": {"steps": 3, "schedule": {"warmup": 1}}}))
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert [line for line in started.description if line.startswith("changed")] == [
        f"changed    data.path: '{data}/cats.txt' → '{tmp_path}/moved.txt'",
        "changed    task.label_smoothing: 0.1 → 0.2",
        "changed    train.lr: 0.01 → 0.5",
        "changed    train.schedule.warmup: 3 → 1",
        "changed    train.steps: 2 → 3",
    ]
    regard.load(run)  # the weights are still those of this model


def test_the_model_and_its_classes_cannot_change_on_resume(run):
    for over, setting in (
        ({"model": {"norm_eps": 0.5}}, "model.norm_eps=1e-05"),
        ({"data": {"lower": True}}, "data.lower=False"),
    ):
        message = f"cannot change when a run is resumed; it was trained with {setting}"
        with pytest.raises(ConfigError, match=message):
            list(resume(run, over))


def test_edit_changes_the_settings_and_what_the_weights_carry(run, capsys):
    before = regard.load(run).evaluate()["loss"]
    weights = (run / "model.safetensors").read_bytes()
    code, said = command(capsys, "edit", run, "model.norm_eps=0.5", "name=other")
    assert (code, said.out) == (
        None,
        "model.norm_eps: 1e-05 → 0.5\nname: 'test' → 'other'\n",
    )
    edited = regard.load(run)
    assert (edited.config.model["norm_eps"], edited.config.name) == (0.5, "other")
    assert edited.evaluate()["loss"] != before
    with pytest.raises(CheckpointError, match="differs from the checkpoint of step 2"):
        list(resume(run, {"train": {"steps": 3}}))
    model = replace(edited.model.config, norm_eps=1e-5)  # of the same family
    assert regard.edit(run, model=model) == ["model.norm_eps: 0.5 → 1e-05"]
    assert (run / "model.safetensors").read_bytes() == weights
    list(resume(run, {"train": {"steps": 3}}))


def test_edit_accepts_what_was_changed_by_hand(run, capsys):
    change(run, "model.norm_eps", 0.5)
    printed = json.loads(command(capsys, "edit", run, "--json")[1].out)
    assert printed == {"folder": str(run), "changes": ["model.norm_eps: 1e-05 → 0.5"]}
    regard.load(run)
    assert command(capsys, "edit", run)[1].out == f"{run}: no setting has changed\n"


def test_edit_refuses_what_does_not_fit_the_weights(run, capsys):
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wrong = ["model.dim=16", "model.layers=2", "model.nothing=1", "train.lr=fast", "train.lr=-1"]
    wrong += ["model.preset=tiny-decoder", "model.family=ngram"]
    wrong += ["train.batch=0", "train.schedule=up", "train.optimizer=best", "minutes=-1"]
    for words in ([word] for word in wrong):
        code, said = command(capsys, "edit", run, *words)
        assert code in (2, 4), words
        assert said.err.startswith("regard: ")
    files.pop(run / "lock")
    assert all(path.read_bytes() == content for path, content in files.items())


def test_edit_changes_the_settings_that_the_run_has_when_it_ends(run, monkeypatch):
    """Not those from before it waited for the lock."""

    @contextmanager
    def hold_lock(self, hold=RunFolder.hold_lock):
        change(run, "name", "new")
        with hold(self):
            yield

    monkeypatch.setattr(RunFolder, "hold_lock", hold_lock)
    assert regard.edit(run, train={"keep_checkpoints": 7}) == ["train.keep_checkpoints: 3 → 7"]
    assert RunFolder(run).read_config().name == "new"


def test_edit_waits_for_the_run_that_trains(run):
    with RunFolder(run).hold_lock(), pytest.raises(CheckpointError, match="is in use by"):
        regard.edit(run, name="other")


def test_weights_of_an_earlier_version_are_accepted_with_a_sentence(run, caplog):
    tensors = load_file(run / "model.safetensors")
    write_tensors(Directory(run), "model.safetensors", tensors)
    for _ in range(2):
        RunFolder(run).load_config()
    assert caplog.text.count("does not hold the settings it was trained with") == 1
    assert f"regard edit {run}" in caplog.text
    assert regard.edit(run) == []
    with safe_open(run / "model.safetensors", "pt") as file:
        assert file.metadata().keys() == {"settings", "sha256"}
    save_file(tensors, run / "model.safetensors", {"settings": "{"})
    with pytest.raises(CheckpointError, match="was changed after the weights were trained"):
        RunFolder(run).load_config()


def test_a_run_with_the_earlier_names_of_settings_loads(run):
    """As if an earlier version had written config.json and the metadata of the weights."""
    config, path = run / "config.json", run / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = {key: text for key, text in file.metadata().items() if key == "settings"}
    before, texts = RunFolder(run).load_config(), [config.read_text(), metadata["settings"]]
    skipped = {*INVERTED, "data.tokenizer.size"}  # a model has a vocab_size too
    for old, new in ((old, new) for old, new in SETTINGS.items() if old not in skipped):
        for key, name in ((old, new), (old.rpartition(".")[2], new.rpartition(".")[2])):
            texts = [text.replace(f'"{name}":', f'"{key}":') for text in texts]
    for name in ("characters", "shape", "inputs", "norm_order"):
        assert all(re.search(rf'[."]{name}":', text) for text in texts), name
    config.write_text(texts[0])
    save_file(load_file(path), path, {"settings": texts[1]})
    assert RunFolder(run).load_config() == before
    tokenizer = current_settings({"data": {"tokenizer": {"kind": "bpe", "size": 9}}})
    assert tokenizer == {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 9}}}
    position = {"kind": "sinusoidal", "halves": True, "projected": True}
    assert current_settings({"model": {"position": position, "smoothing": "interpolated"}}) == {
        "model": {
            "position": {"kind": "sinusoidal", "interleaved": False, "after_projection": True},
            "smoothing": "witten_bell",
        }
    }
    scaling = {"kind": "llama3", "factor": 8.0, "low": 1.0, "high": 4.0}
    position = {"kind": "rotary", "scaling": scaling}
    cell = {"kind": "lstm", "forget": False}
    model = {"patch": 4, "init": "zero_out", "cell": cell, "position": position}
    task = {"kind": "forecast", "patch": 8, "stride": 4}
    assert current_settings({"model": model, "task": task}) == {
        "model": {
            "patch_size": 4,
            "init": "zero_init_residual",
            "cell": {"kind": "lstm", "forget_gate": False},
            "position": {
                "kind": "rotary",
                "scaling": {
                    "kind": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
        },
        "task": {"kind": "forecast", "patch_length": 8, "patch_stride": 4},
    }
    for span in ({"task": {"kind": "span", "stride": 4}}, {"task.kind": "span", "task.stride": 4}):
        assert current_settings(span) == span  # its stride has kept its name
    forecast = {"task.kind": "forecast", "task.stride": 4}
    assert current_settings(forecast) == {"task.kind": "forecast", "task.patch_stride": 4}
    state = {"time_plan": {"at": 3}, "best": {"since": 1}}
    assert current_settings(state) == {
        "time_plan": {"step": 3},
        "best": {"num_bad_evaluations": 1},
    }
    train = {
        "optimizer": {"kind": "adamw", "decay": 0.1},
        "schedule": {"kind": "stable_decay", "decay": 0.2},
    }
    assert current_settings({"train": train}) == {
        "train": {
            "optimizer": {"kind": "adamw", "weight_decay": 0.1},
            "schedule": {"kind": "warmup_stable_decay", "decay_fraction": 0.2},
        }
    }
    assert current_settings({"train.optimizer.decay": 0.1, "data.path.errors": 0.3}) == {
        "train.optimizer.weight_decay": 0.1,
        "data.path.error_rate": 0.3,
    }
    assert current_settings({"task": "label", "task.kind": "classify"}) == {
        "task": "text_classification",
        "task.kind": "image_classification",
    }


FORMER_NAMES = {
    "forecast": (
        {
            "data": {"path": {"kind": "sines", "examples": 300}},
            "task": {
                "kind": "forecast",
                "context": 16,
                "horizon": 4,
                "patch_length": 4,
                "patch_stride": 2,
            },
            "model": {"preset": "tiny-encoder", "dim": 8, "layers": 1, "heads": 2},
        },
        {"patch_length": "patch", "patch_stride": "stride", "model.head.horizon": "steps"},
    ),
    "classes": (
        {
            "data": {"path": {"kind": "parentheses", "examples": 200, "max_length": 6}},
            "task": "text_classification",
            "model": {"preset": "lstm", "dim": 8, "layers": 1, "context": 8},
        },
        {"class_names": "names", "max_length": "longest"},
    ),
    "pairs": (
        {
            "data": {
                "path": {"kind": "reversal", "examples": 200, "min_length": 2, "max_length": 3}
            },
            "task": "seq2seq",
            "model": {"preset": "tiny-encoder-decoder", "dim": 8, "layers": 1, "heads": 2},
        },
        {"min_length": "shortest", "max_length": "longest"},
    ),
    "numbers": (
        {
            "data": {"path": {"kind": "numbers", "examples": 200, "max_number": 300}},
            "task": "seq2seq",
            "model": {"preset": "tiny-encoder-decoder", "dim": 8, "layers": 1, "heads": 2},
        },
        {"max_number": "highest"},
    ),
}


def rename_back(table, names, where=""):
    """A table with the former names of some settings, by their names or dotted names."""
    renamed = {}
    for key, value in table.items():
        dotted = f"{where}{key}"
        *path, last = key.split(".")
        old = names.get(dotted.removeprefix("settings.").removeprefix("config."), names.get(last))
        if isinstance(value, dict):
            value = rename_back(value, names, f"{dotted}.")
        renamed[".".join([*path, old or last])] = value
    return renamed


@pytest.mark.parametrize("kind", FORMER_NAMES)
def test_a_run_with_former_names_is_resumed_as_if_they_were_current(kind, tmp_path):
    """As if an earlier version had written config.json, the weights and the checkpoints."""
    settings, names = FORMER_NAMES[kind]
    train = {"steps": 2, "batch": 4, "save_every": 1, "evaluate_every": 1, "baseline": False}
    table = {"name": "test", "device": "cpu", "train": train, **settings}
    new, old = tmp_path / "new", tmp_path / "old"
    list(begin(build(RunConfig, table), new))
    shutil.copytree(new, old)
    names = {**names, "num_bad_evaluations": "since"}
    written = (old / "config.json", *old.glob("checkpoints/*/state.json"))
    for path in written:
        before = json.loads(path.read_text())
        path.write_text(json.dumps(rename_back(before, names)))
    weights = old / "model.safetensors"
    with safe_open(weights, "pt") as file:
        signed = rename_back(json.loads(file.metadata()["settings"]), names)
    save_file(load_file(weights), weights, {"settings": json.dumps(signed)})
    for step in (old / "checkpoints").iterdir():
        sign(step)
    texts = [json.dumps(signed), *(path.read_text() for path in written)]
    for former in names.values():
        assert any(re.search(rf'[."]{former}":', text) for text in texts), former
    assert RunFolder(old).load_config() == RunFolder(new).load_config()
    assert regard.load(old).evaluate() == regard.load(new).evaluate()
    for run in (old, new):
        list(resume(run, {"train": {"steps": 3}}))
    resumed = [
        load_file(run / "checkpoints" / "step-3" / "model.safetensors") for run in (old, new)
    ]
    assert resumed[0].keys() == resumed[1].keys()
    assert all(torch.equal(resumed[0][name], resumed[1][name]) for name in resumed[0])
    assert (old / "config.json").read_text() == (new / "config.json").read_text()


def test_weights_that_were_saved_without_a_setting_are_accepted(run):
    """Earlier versions did not store data.text2 with the weights."""
    path = run / "model.safetensors"
    with safe_open(path, "pt") as file:
        signed = json.loads(file.metadata()["settings"])
    del signed["data.text2"]
    save_file(load_file(path), path, {"settings": json.dumps(signed)})
    RunFolder(run).load_config()
    list(resume(run, {"train": {"steps": 3}}))
    with safe_open(path, "pt") as file:
        assert "data.text2" in json.loads(file.metadata()["settings"])
    change(run, "data.text2", "hypothesis")
    with pytest.raises(CheckpointError, match=r"data\.text2: None → 'hypothesis'"):
        RunFolder(run).load_config()


def test_tensors_of_an_earlier_version_have_their_current_names(run):
    names = {
        "decoder.blocks.0.ffn_after.weight": "decoder.blocks.0.ffn_post_norm.weight",
        "layers.0.back.input.weight": "layers.0.backward_layer.input.weight",
        "log_move": "log_transition",
        "encoder.blocks.0.attention_norm.mean": "encoder.blocks.0.attention_norm.running_mean",
        "encoder.norm.variance": "encoder.norm.running_var",
        "head.between": "head.transitions",
        "blocks.1.cross_after.bias/exp_avg": "blocks.1.cross_post_norm.bias/exp_avg",
    }
    tensors = {name: torch.ones(2) for name in names}
    save_file(tensors, run / "model.safetensors")
    assert set(RunFolder(run).load_weights()) == set(names.values())
    step = next((run / "checkpoints").iterdir())
    save_file(tensors, step / "model.safetensors")
    assert set(Checkpoint(step, 1).tensors("model")) == set(names.values())


def test_an_imported_run_carries_its_settings(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", model_config("gpt2"))
    import_run(tmp_path / "checkpoint", tmp_path / "run")
    regard.load(tmp_path / "run")
    change(tmp_path / "run", "model.norm_eps", 0.5)
    with pytest.raises(CheckpointError, match=r"model\.norm_eps: 1e-05 → 0\.5"):
        regard.load(tmp_path / "run")


def test_a_flipped_bit_of_imported_weights_is_noticed(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", model_config("gpt2"))
    import_run(tmp_path / "checkpoint", tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata().keys() >= {"settings", "sha256"}
    content = bytearray(file.read_bytes())
    for place in (-1, len(content) // 2):
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="has changed since it was written"):
            regard.load(tmp_path / "run")
        content[place] ^= 1
    file.write_bytes(content)
    regard.load(tmp_path / "run")


def test_corrupted_weights_are_not_blamed_on_the_settings(run, capsys):
    file = run / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'norm_eps\\": 1e-05', b'norm_eps\\": 1e-06'))
    code, said = command(capsys, "evaluate", run)
    assert code == 4
    assert f"{file} has changed since it was written (sha256 differs)\n" in said.err
    assert command(capsys, "resume", run, "--step", "1", "--quiet")[0] is None
    regard.load(run)
