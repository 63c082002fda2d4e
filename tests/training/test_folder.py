"""A run on disk: made whole, never written over, trained by one process at a time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regard.errors import CheckpointError, ConfigError
from regard.text import train_tokenizer
from regard.training.storage.initial_weights import open_initial_run
from regard.training.storage.run_folder import RunFolder, new_folder
from training.runs import config


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("char", ["abc"], total_bytes=3)


@pytest.fixture
def folder(tmp_path, tokenizer):
    made = RunFolder(tmp_path / "runs" / "made")
    made.create(config("cats.txt"), {"data": "x"}, tokenizer)
    return made


def names(path):
    return sorted(each.name for each in Path(path).iterdir())


def test_a_new_run_has_its_settings_its_tokenizer_and_room_for_the_rest(folder):
    assert names(folder.path) == sorted(
        [
            "checkpoints",
            "config.json",
            "environment.json",
            "metrics.jsonl",
            "samples.txt",
            "tokenizer.json",
        ]
    )
    assert folder.load_config() == config("cats.txt")
    assert folder.load_environment() == {"data": "x"}
    assert folder.rows() == []
    assert names(folder.path.parent) == ["made"]


ROW = '{"step": 1, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "targets": 8}\n'
ROWS = {
    "a step": (ROW, 1),
    "one that is still written": (ROW + '{"step": 2, "lo', 1),
    "one that was skipped": (ROW.replace("2.5", "null").replace("8", '8, "skipped": true'), 1),
    "one that was not finite": (ROW.replace("2.5", "NaN").replace("1.0", "Infinity"), 1),
    "an evaluation": ('{"step": 1, "validation": {"loss": 2.5}}\n', 1),
    "a list": ("[1]\n", None),
    "a number": ("1\n", None),
    "nothing": ("\n" + ROW, None),
    "no step": ('{"loss": 2.5}\n', None),
    "a step in words": ('{"step": "one"}\n', None),
    "a step that is not whole": ('{"step": Infinity}\n', None),
    "targets that are none": ('{"step": 1, "targets": null}\n', None),
    "a huge number": (f'{{"step": 1, "targets": 1{"0" * 400}}}\n', None),
    "a list of losses": ('{"step": 1, "loss": [1]}\n', None),
    "an evaluation that is a list": ('{"step": 1, "validation": [1]}\n', None),
    "an evaluation in words": ('{"step": 1, "validation": {"loss": "low"}}\n', None),
    "an evaluation in an evaluation": ('{"step": 1, "validation": {"validation": {}}}\n', None),
    "activations": ('{"step": 1, "activations": {"a.q": {"mean": 0.5, "norm": null}}}\n', 1),
    "activations of an earlier version": ('{"step": 1, "taps": {"a.q": {"mean": 0.5}}}\n', 1),
    "activations without tables": ('{"step": 1, "activations": {"a.q": 0.5}}\n', None),
    "activations in words": ('{"step": 1, "activations": {"a.q": {"mean": "low"}}}\n', None),
    "a long line": (ROW.replace(" ", " " * 1_000_000), None),
    "bytes": ("\udcff\n", None),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_tables_of_numbers_or_the_file_is_said_to_be_corrupted(folder, name):
    content, count = ROWS[name]
    folder.metrics.write_bytes(content.encode("utf-8", "surrogateescape"))
    if count is None:
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl is corrupted: ") as raised:
            folder.rows()
        assert len(str(raised.value)) < 500
    else:
        assert len(folder.rows()) == count


def test_cutting_back_touches_only_what_grows(folder):
    folder.metrics.write_text(2 * ROW)
    kept = folder.config.read_bytes()
    sizes = {"metrics.jsonl": len(ROW), "samples.txt": 9, "config.json": 0, "../../new": 0}
    folder.truncate_logs(sizes)
    assert folder.metrics.read_text() == ROW
    assert folder.samples.read_text() == ""
    assert folder.config.read_bytes() == kept
    assert not (folder.path / "../../new").exists()


def test_an_evaluation_without_the_measure_that_counts_is_not_the_best(folder):
    folder.metrics.write_text(
        '{"step": 1, "validation": {}}\n{"step": 2, "validation": {"loss": 2.5}}\n'
    )
    assert folder.best_metrics() == {"loss": 2.5}


def test_an_existing_folder_is_not_written_over(folder, tokenizer):
    with pytest.raises(ConfigError, match="exists already") as raised:
        folder.create(config("dogs.txt"), {}, tokenizer)
    assert f"regard resume {folder.path}" in str(raised.value)
    assert folder.load_config() == config("cats.txt")


def test_a_run_that_cannot_be_written_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/run: .*/file is a file"):
        RunFolder(tmp_path / "file" / "run").create(config("cats.txt"), {}, tokenizer)

    def fail(*words, **options):
        raise OSError(28, "No space left on device")

    for owner, name in ((os, "fsync"), (Path, "touch"), (Path, "rename"), (Path, "write_text")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(CheckpointError, match="No space left on device"):
                RunFolder(tmp_path / "run").create(config("cats.txt"), {}, tokenizer)
        assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("at", ["mkdir", "touch", "rename"])
def test_a_kill_while_a_run_is_made_leaves_none(tmp_path, tokenizer, monkeypatch, at):
    def killed(*words, **options):
        raise KeyboardInterrupt  # which no `except OSError` sees

    with monkeypatch.context() as patch:
        patch.setattr(Path, at, killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(tmp_path / "run").create(config("cats.txt"), {}, tokenizer)
    assert not (tmp_path / "run").exists()
    RunFolder(tmp_path / "run").create(config("cats.txt"), {}, tokenizer)
    assert names(tmp_path) == ["run"]


def test_a_second_run_is_refused_with_the_process_that_owns_the_folder(folder):
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys\n"
            "file = open(sys.argv[1], 'w')\n"
            "fcntl.flock(file, fcntl.LOCK_EX)\n"
            "print(os.getpid(), file=file, end='', flush=True)\n"
            "print('locked', flush=True)\n"
            "sys.stdin.read()\n",
            str(folder.lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"by process {other.pid};") as raised:
            folder.hold_lock().__enter__()
        assert raised.value.exit_code == 4
        assert folder.lock.read_text() == str(other.pid)
        other.kill()
    with folder.hold_lock():  # the lock died with its owner
        assert re.match(rf"{os.getpid()} on .+", folder.lock.read_text())
        with pytest.raises(CheckpointError, match=f"by process {os.getpid()} on "):
            folder.hold_lock().__enter__()
    with folder.hold_lock():
        pass


def test_a_lock_is_let_go_after_an_error(folder):
    with pytest.raises(ZeroDivisionError), folder.hold_lock():
        raise ZeroDivisionError
    with folder.hold_lock():
        pass


def test_what_a_kill_left_half_written_is_swept_away(folder):
    for name in (".model.safetensors.tmp-1@here", ".config.json.tmp-1@here"):
        (folder.path / name).write_text("half")
    with folder.hold_lock():
        assert not [name for name in names(folder.path) if "tmp" in name]
    assert folder.load_config()


def test_logs_are_cut_back_and_never_grow(folder):
    folder.append({"step": 1})
    folder.append_sample(1, "abc")
    sizes = folder.log_sizes()
    folder.append({"step": 2})
    folder.append_sample(2, "def")
    folder.truncate_logs(sizes)
    assert folder.rows() == [{"step": 1}]
    assert folder.samples.read_text() == "--- step 1\nabc\n"
    folder.truncate_logs({"metrics.jsonl": 10_000})
    assert folder.rows() == [{"step": 1}]


def test_damage_is_named(folder):
    folder.metrics.write_text('{"step": 1}\n{"st\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is corrupted"):
        folder.rows()
    folder.config.write_text('{"name"')
    with pytest.raises(CheckpointError, match=r"config\.json is corrupted"):
        folder.load_config()
    with pytest.raises(CheckpointError, match="no run at nowhere"):
        RunFolder("nowhere").load_config()


def test_a_log_that_cannot_be_written_is_a_matter_of_the_folder(folder):
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a folder and must be a file"):
        folder.append({"step": 1})


def test_settings_survive_a_kill_while_they_are_saved(folder, monkeypatch):
    def fail(*words, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        folder.save_config(config("dogs.txt"))
    assert folder.load_config() == config("cats.txt")


def test_new_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wanted in ("runs/cats", "runs/cats-2", "runs/cats-3"):
        assert new_folder("cats") == Path(wanted)
        Path(wanted).mkdir(parents=True)


def test_a_misspelt_run_is_named(tmp_path):
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / "config.json").write_text("{}")
    (tmp_path / "minilmnn").mkdir()
    with pytest.raises(CheckpointError, match=r"no run at .*minilmm; did you mean '.*/minilm'\?"):
        open_initial_run(tmp_path / "minilmm")
