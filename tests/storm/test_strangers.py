"""Anything in place of any file of a run, then every command: no traceback, no wait, no writes."""

import os
import shutil
import signal
from collections import Counter

import pytest

from regard.cli import main
from regard.training.run import begin
from survival.test_run_folder import HOSTILE, state_of
from training.runs import config

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.name == "nt", reason="FIFOs and alarms")]
SECONDS = 60  # until a command counts as waiting for ever
REPLACED = HOSTILE | {
    "link to itself": lambda path, outside: path.symlink_to(path),
    "link to /dev/zero": lambda path, outside: path.symlink_to("/dev/zero"),
}
COMMANDS = [
    *(["evaluate", "RUN"], ["generate", "RUN", "the", "-n", "1"], ["explain", "RUN", "the cat"]),
    *(["info", "RUN"], ["diff", "RUN", "gpt2"], ["compare", "RUN", "RUN"]),
    *(["edit", "RUN", "name=x"], ["resume", "RUN", "train.steps=3", "--quiet"]),
    ["export", "RUN", "OUT"],
    ["train", "DATA", "train.start=RUN", "--out", "OUT", "--dry-run"],
]


def test_no_command_stumbles_over_a_folder_of_a_stranger(data, tmp_path, capsys):
    whole, run, out, outside = (tmp_path / name for name in ("whole", "run", "out", "outside"))
    list(begin(config(data / "cats.txt", steps=2, save_every=1, evaluate_every=1), whole))
    (outside / "step-1").mkdir(parents=True)
    (outside / "file").write_text("theirs")
    theirs = state_of(outside)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    codes = Counter()
    for name in (*names, "checkpoints", "checkpoints/step-2"):
        for replace in REPLACED.values():
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(whole, run)
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            replace(path, outside)
            for words in COMMANDS:
                places = {"RUN": str(run), "OUT": str(out), "DATA": str(data / "cats.txt")}
                for key, place in places.items():
                    words = [word.replace(key, place) for word in words]
                signal.alarm(SECONDS)  # which ends the process
                with pytest.raises(SystemExit) as ended:
                    main(words)
                signal.alarm(0)
                codes[ended.value.code or 0] += 1
                shutil.rmtree(out, ignore_errors=True)
            assert state_of(outside) == theirs, (name, replace)
    capsys.readouterr()
    print(f"{codes.total()} commands, exit codes {dict(codes)}")
    assert codes.keys() <= {0, 2, 4}
