"""Full, limited and read-only disks: refused before the first step, or nothing is lost."""

import re
import traceback
from contextlib import ExitStack

import pytest
import torch

from regard.errors import CheckpointError
from regard.training.events import Evaluated
from regard.training.run import begin, resume
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder
from storm.disks import mounted, read_only
from training.runs import config, contents

LARGE = {"model": {"dim": 64}}


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "disk", size=20_000_000) as made:
        yield made


def settings(data, over=LARGE):
    """Twelve steps, an evaluation after every second, a checkpoint after 6 and 12."""
    return config(data / "cats.txt", over, evaluate_every=2, save_every=6)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(begin(settings(data), folder))
    return folder


def interrupted(events, at, trouble):
    """Let trouble come right after the evaluation of a step; the error that ends the run."""
    next(event for event in events if isinstance(event, Evaluated) and event.step == at)
    trouble()
    with pytest.raises(CheckpointError) as raised:
        list(events)
    assert raised.value.exit_code == 4
    return raised.value


def trained_weights(error):
    """The weights in memory when a run ended with this error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    model = next(f.f_locals["model"] for f in frames if "model" in f.f_locals)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def goes_on_as(folder, whole):
    """Whether a run that goes on ends as one that was never disturbed."""
    list(resume(folder))
    left = [path for path in folder.rglob("*") if "tmp" in path.name]
    return contents(folder) == contents(whole) and not left


def test_what_does_not_fit_is_refused_before_the_first_step(data, disk):
    large = settings(data, {"model": {"dim": 256}})
    with pytest.raises(CheckpointError) as raised:
        next(begin(large, disk.path / "run"))
    needed, free = re.search(
        r"needs ([\d.]+) MB for .*; ([\d.]+) MB are free", str(raised.value)
    ).groups()
    assert float(needed) > float(free) == pytest.approx(20, abs=0.5)
    assert str(disk.path / "run") in str(raised.value)
    assert not list(disk.path.iterdir())


@pytest.mark.long
def test_nor_does_a_run_go_on_where_it_does_not_fit(data, disk, whole):
    folder = disk.path / "run"
    error = interrupted(begin(settings(data), folder), 4, lambda: disk.fill(leaving=100_000))
    with pytest.raises(CheckpointError, match=r"run needs .* [kM]B are free") as raised:
        next(resume(folder))
    assert raised.value.exit_code == error.exit_code == 4
    disk.make_room()
    assert goes_on_as(folder, whole)


def test_a_disk_filled_between_saves_costs_the_next_save_only(data, disk, whole):
    folder = disk.path / "run"
    error = interrupted(begin(settings(data), folder), 12, lambda: disk.fill(leaving=100_000))
    assert re.fullmatch(
        rf"cannot write {folder}/checkpoints/step-12: No space left on device "
        r"\([\d.]+ kB needed, [\d.]+ (kB|bytes) free\)\nearlier checkpoints are intact",
        str(error),
    )
    assert checkpoint.latest(folder / "checkpoints").step == 6
    assert not list(folder.glob("checkpoints/*tmp*"))
    kept = checkpoint.read_tensors(whole / "checkpoints/step-12/model.safetensors")
    ours = trained_weights(error)
    assert all(torch.equal(ours[name], weight) for name, weight in kept.items())
    disk.make_room()
    assert goes_on_as(folder, whole)


@pytest.mark.long
def test_a_better_model_that_does_not_fit_leaves_the_one_before(data, disk, whole):
    folder = disk.path / "run"
    error = interrupted(begin(settings(data), folder), 8, lambda: disk.fill(leaving=100_000))
    assert re.match(
        rf"cannot write {folder}/model\.safetensors: No space left on device "
        r"\([\d.]+ kB needed, [\d.]+ (kB|bytes) free\)",
        str(error),
    )
    assert checkpoint.read_tensors(folder / "model.safetensors")  # and its hash is right
    assert not [path for path in folder.rglob("*") if "tmp" in path.name]
    disk.make_room()
    assert goes_on_as(folder, whole)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:tracker clock was disabled")
def test_a_disk_that_becomes_read_only_keeps_what_it_has(data, tmp_path, whole):
    folder = tmp_path / "run"

    with ExitStack() as stack:
        error = interrupted(
            begin(settings(data), folder), 8, lambda: stack.enter_context(read_only())
        )
        assert re.search(r"cannot write .*: Read-only file system \(.*B free\)", str(error))
        assert checkpoint.verify(folder / "checkpoints" / "step-6") is None
        for begun in (resume(folder), begin(settings(data), tmp_path / "other")):
            with pytest.raises(CheckpointError, match=r"Read-only file system"):
                next(begun)
    assert goes_on_as(folder, whole)


@pytest.fixture
def limited():
    """Sets how long a file may get; -1 before the test ends, or its own report would be cut."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_length_of_files_is_met_before_the_first_step(data, tmp_path, limited):
    limited(300_000)
    with pytest.raises(
        CheckpointError, match=r"run needs files of [\d.]+ kB; .* 300\.0 kB at most"
    ):
        next(begin(settings(data), tmp_path / "run"))
    limited(-1)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_and_one_that_is_set_later_costs_the_next_save_only(data, tmp_path, limited, whole):
    folder = tmp_path / "run"
    error = interrupted(begin(settings(data), folder), 12, lambda: limited(100_000))
    assert re.match(r"cannot write .*step-12: File too large \([\d.]+ kB needed, ", str(error))
    limited(-1)
    assert checkpoint.latest(folder / "checkpoints").step == 6
    assert goes_on_as(folder, whole)


def test_a_log_that_cannot_grow_ends_the_run_and_goes_on_later(data, tmp_path, limited, whole):
    folder = tmp_path / "run"
    log = folder / "metrics.jsonl"
    error = interrupted(begin(settings(data), folder), 8, lambda: limited(log.stat().st_size))
    assert re.match(rf"cannot write {log}: File too large", str(error))
    limited(-1)
    assert goes_on_as(folder, whole)


def test_a_half_written_row_is_not_read(tmp_path, limited):
    folder = RunFolder(tmp_path)
    folder.append({"step": 1})
    limited(20)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: File too large"):
        folder.append({"step": 2})
    limited(-1)
    assert folder.rows() == [{"step": 1}]


def test_ids_that_cannot_be_stored_are_a_matter_of_the_disk(data, disk, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", str(disk.path))
    disk.fill(leaving=0)
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        next(begin(settings(data), tmp_path / "run"))
    assert str(disk.path) in str(raised.value)
