"""`torchrun` itself: ranks that die, stop answering or are told to end, and beginning again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.training.storage.run_folder import RunFolder

pytestmark = pytest.mark.long

STEPS = 400
WORDS = [
    *("data.tokenizer=char", "model.preset=tiny-decoder", "model.dim=8", "model.layers=1"),
    *("model.heads=2", "model.context=8", f"train.steps={STEPS}", "train.batch=4"),
    *(f"train.evaluate_every={STEPS}", "train.save_every=20", "train.timeout=10", "device=cpu"),
]


def start(verb, *words, ranks=4, restarts=0, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, f"--max-restarts={restarts}", "-m", "regard", verb, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.01)


def saved(folder):
    """The newest step that was saved, 0 at first."""
    found = folder.glob("checkpoints/step-*")
    return max((int(path.name[5:]) for path in found if path.name[5:].isdigit()), default=0)


def process_of(folder, rank):
    """The id of the process that is a rank, from its log."""
    log = (folder / "logs" / f"rank-{rank}.txt").read_text()
    return int(re.findall(r"process (\d+) on", log)[-1])


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = start("train", data / "cats.txt", *WORDS, "--out", folder)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    return folder


def equal(left, right):
    rows = [RunFolder(folder).rows() for folder in (left, right)]
    names = ("model.safetensors", "samples.txt")
    return rows[0] == rows[1] and all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("struck", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_lost_rank_ends_the_others_and_a_restart_finishes_the_run(
    struck, victim, data, whole, tmp_path
):
    folder = tmp_path / "run"
    run = start("train", data / "cats.txt", *WORDS, "--out", folder, restarts=1)
    wait_for(lambda: saved(folder) >= 20)
    before = {rank: process_of(folder, rank) for rank in range(4)}
    os.kill(before[victim], struck)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert process_of(folder, 1) != before[1]
    assert equal(folder, whole)


@pytest.mark.parametrize("struck", [signal.SIGKILL, signal.SIGSTOP])
def test_without_restarts_a_lost_rank_ends_it_all(struck, data, tmp_path):
    folder = tmp_path / "run"
    run = start("train", data / "cats.txt", *WORDS, "--out", folder)
    wait_for(lambda: saved(folder) >= 20)
    began = time.monotonic()
    os.kill(process_of(folder, 2), struck)
    said, _ = run.communicate(timeout=300)
    assert run.returncode != 0
    assert time.monotonic() - began < 10 + 30 + 20  # our timeout, torchrun's own, and some
    assert said.count("regard: rank 0 lost the connection to the other ranks") == 1


def test_torchrun_told_to_end_leaves_a_run_that_goes_on(data, whole, tmp_path):
    folder = tmp_path / "run"
    run = start("train", data / "cats.txt", *WORDS, "--out", folder)
    wait_for(lambda: saved(folder) >= 20)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=300)
    assert run.returncode != 0
    at = saved(folder)
    assert f"stopped by SIGTERM at step {at} of {STEPS}; checkpoint saved" in said
    again = start("resume", folder)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert equal(folder, whole)


def test_a_run_that_dies_after_every_second_save_comes_to_its_end(data, whole, tmp_path):
    folder = tmp_path / "run"
    words = [word for word in WORDS if "save_every" not in word]
    run = start(
        *("train", data / "cats.txt", *words, f"train.save_every={STEPS // 4}", "--out", folder),
        restarts=3,
        REGARD_FAULT="end:2",
    )
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "is at step" not in said
    losses = [
        [row["loss"] for row in RunFolder(f).rows() if "loss" in row] for f in (folder, whole)
    ]
    assert losses[0] == losses[1]


def test_the_result_is_printed_once(data, tmp_path):
    words = [*WORDS, "train.steps=3", "--json", "--out", tmp_path / "run"]
    run = start("train", data / "cats.txt", *words, ranks=2)
    said, _ = run.communicate(timeout=300)
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    assert json.loads(line)["run"] == str(Path(tmp_path / "run"))
