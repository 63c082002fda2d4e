"""What changed since a run began is noticed when it goes on; what does not matter is not asked."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from regard.errors import CheckpointError, DataError
from regard.training.events import RunFinished
from regard.training.run import begin, resume
from regard.training.storage.checkpoint import latest, sha256
from training.runs import Crash, config, contents, interrupt, write_data


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of 6 steps that died after the fourth, its data, and the same run undisturbed."""
    place = tmp_path_factory.mktemp("world")
    write_data(place)
    settings = config(place / "cats.txt", steps=6, evaluate_every=3)
    list(begin(settings, place / "whole"))
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Crash):
            list(begin(settings, place / "run"))
    return place


@pytest.fixture
def world(begun, tmp_path):
    """A copy that may be changed; its config.json names the data in it."""
    place = shutil.copytree(begun, tmp_path / "world")
    change(place / "run" / "config.json", ("data", "path"), str(place / "cats.txt"))
    return place


def change(file, path, value):
    """Edit one value of a JSON file."""
    table = json.loads(file.read_text())
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(table))


def undisturbed(world, begun):
    """Go on to the end; whether it came out as if nothing had happened."""
    assert isinstance(list(resume(world / "run"))[-1], RunFinished)
    return contents(world / "run") == contents(begun / "whole")


@pytest.mark.parametrize("how", ["edited", "longer", "shorter", "other line ends", "gone"])
def test_data_that_changed_is_refused_and_the_same_elsewhere_is_allowed(how, world, begun):
    file = world / "cats.txt"
    text = file.read_text()
    changed = {
        "edited": text.replace("cat", "cut", 1),
        "longer": text + "x",
        "shorter": text[:-1],
        "other line ends": text.replace("\n", "\r\n"),
    }
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(changed[how].encode())
    before = contents(world / "run")
    with pytest.raises(DataError, match=r"cats\.txt"):
        list(resume(world / "run"))
    assert contents(world / "run") == before
    list(resume(world / "run", {"data": {"path": str(begun / "cats.txt")}}))
    assert contents(world / "run") == contents(begun / "whole")


def test_a_tokenizer_that_was_swapped_is_refused(world):
    file = world / "run" / "tokenizer.json"
    text = file.read_text()
    assert '"a"' in text
    file.write_text(text.replace('"a"', '"A"'))
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* has changed since"):
        list(resume(world / "run"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "heads"), 4),  # of which no tensor tells
        (("model", "dropout"), 0.5),
        (("model", "dim"), 16),
        (("train", "seed"), 2),
        (("train", "optimizer"), "adamw"),
        (("data", "tokenizer"), "bpe"),
    ],
)
def test_settings_that_the_weights_depend_on_cannot_be_edited(path, value, world):
    change(world / "run" / "config.json", path, value)
    before = contents(world / "run")
    with pytest.raises(CheckpointError) as raised:
        list(resume(world / "run"))
    assert raised.value.exit_code == 4
    assert ".".join(path) in str(raised.value)
    assert contents(world / "run") == before
    (world / "run" / "model.safetensors").unlink()  # the checkpoint knows them too
    with pytest.raises(CheckpointError) as raised:
        list(resume(world / "run"))
    key = "model" if path[0] == "model" else ".".join(path)
    told = f"{key} in {world}/run/config.json differs from the checkpoint of step 3"
    assert told in str(raised.value)
    assert f"train.start={world}/run" in str(raised.value)


def test_settings_that_may_change_on_the_way_may_be_edited_too(world):
    change(world / "run" / "config.json", ("train", "steps"), 4)
    assert list(resume(world / "run"))[-1].step == 4


def test_another_version_of_torch_is_no_reason_to_stop(world, begun):
    change(world / "run" / "environment.json", ("torch",), "1.13.1")
    for manifest in (world / "run").glob("checkpoints/*/MANIFEST.json"):
        change(manifest, ("torch",), "1.13.1")
    assert undisturbed(world, begun)


def test_what_a_bit_identical_resume_needs_is_said_where_it_changed(world):
    for key, value in (("torch", "1.13.1"), ("device", "NVIDIA H200"), ("threads", 64)):
        change(world / "run" / "environment.json", (key,), value)
    events = resume(world / "run")
    started = next(events)
    events.close()
    expected = [
        "device     is now cpu and was NVIDIA H200 when the run began, so the resumed run will not "
        "be bit-identical",
        f"torch      is now {torch.__version__} and was 1.13.1 when the run began, so the resumed "
        "run will not be bit-identical",
        "threads    is now 1 and was 64 when the run began, so the resumed run will not be "
        "bit-identical without train.threads=64",
    ]
    assert [line for line in started.description if "when the run began" in line] == expected


def test_the_newest_is_the_highest_step_whatever_the_clock_said(world, begun):
    old, new = 1_000_000_000, 4_000_000_000
    shutil.copytree(world / "run/checkpoints/step-3", world / "run/checkpoints/step-2")
    change(world / "run/checkpoints/step-2/MANIFEST.json", ("step",), 2)
    for folder, when in (("step-3", old), ("step-2", new)):
        for path in (
            world / "run/checkpoints" / folder,
            *(world / "run/checkpoints" / folder).iterdir(),
        ):
            os.utime(path, (when, when))
    assert latest(world / "run/checkpoints").step == 3
    shutil.rmtree(world / "run/checkpoints/step-2")
    assert undisturbed(world, begun)


def test_a_clock_that_was_set_back_is_not_asked(world, begun, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert undisturbed(world, begun)


def test_another_language_and_time_zone_change_nothing(world, begun):
    environment = {
        **os.environ,
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TZ": "Pacific/Kiritimati",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "regard", "resume", str(world / "run"), "--quiet"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert contents(world / "run") == contents(begun / "whole")


def test_the_weights_of_the_run_that_was_not_disturbed_are_its_own(begun):
    """Or the comparisons above would compare a file with itself."""
    assert sha256(begun / "whole/checkpoints/step-6/model.safetensors") != sha256(
        begun / "whole/checkpoints/step-3/model.safetensors"
    )
