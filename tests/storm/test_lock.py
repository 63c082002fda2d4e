"""Two runs on one folder: there is never more than one that writes."""

import platform
import signal

import pytest

from storm.kills import committed
from storm.shell import WORDS, regard, start

pytestmark = pytest.mark.long


@pytest.fixture
def owner(data, tmp_path):
    """A process that trains, and its folder; it is killed in the end."""
    folder = tmp_path / "run"
    words = [*WORDS, "train.steps=100000", "train.evaluate_every=50"]
    with start("train", data / "cats.txt", *words, "--out", folder) as it:
        try:
            for line in it.stderr:
                if line.startswith("step "):
                    break
            yield it, folder
        finally:
            it.kill()


def test_the_second_is_refused_and_the_death_of_the_first_frees_the_folder(owner):
    process, folder = owner
    code, said = regard("resume", folder)
    assert code == 4
    assert f"is in use by process {process.pid} on {platform.node()};" in said
    assert process.poll() is None  # nothing happened to it
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (folder / "lock").read_text() == f"{process.pid} on {platform.node()}"
    step = committed(folder)
    code, said = regard("resume", folder, f"train.steps={step + 3}")
    assert (code, committed(folder)) == (0, step + 3)
    assert f"resumed    from step {step:,}" in said


def test_of_many_that_begin_at_once_one_trains(owner):
    process, folder = owner
    process.kill()
    process.wait()
    step = committed(folder)
    many = [start("resume", folder, f"train.steps={step + 300}") for _ in range(4)]
    ends = [(each.communicate()[1], each.returncode) for each in many]
    assert sorted(code for _, code in ends) == [0, 4, 4, 4], ends
    winner = next(each for each in many if not each.returncode)
    refusals = [said for said, code in ends if code]
    assert all(f"by process {winner.pid} on" in said for said in refusals)
    assert committed(folder) == step + 300
