"""Train, kill, resume, run after run until each is done; then say what came of it, as JSON.

    kills.py FOLDER RUNS STEPS SEED

Every run is killed at a named point of a save, then at another, then at a random time.
Workers are forked from this process, which has imported torch but never computed a gradient, so
each begins at once. Only they are killed, each by its own id.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # or every worker would import it, for its first optimizer

from regard.errors import ConfigError
from regard.files.fault_injection import POINTS
from regard.models.build import count_parameters, resolve
from regard.training.events import RunStarted
from regard.training.run import begin, resume
from training.runs import config, contents, write_data


def work(settings, folder, armed):
    """What a worker does: begin, or go on, to the end; where it began is left beside."""
    try:
        os.environ["REGARD_FAULT"] = armed
        try:
            for event in resume(folder) if folder.exists() else begin(settings, folder):
                if isinstance(event, RunStarted):
                    folder.with_suffix(".from").write_text(str(event.step))
        except ConfigError as error:  # killed after all was saved
            if "is at step" not in str(error):
                raise
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def attempt(settings, folder, seconds=600.0, armed=""):
    """Fork a worker, to be killed after so long or where it is armed; whether it was."""
    pid = os.fork()
    if not pid:
        work(settings, folder, armed)
    until = time.monotonic() + seconds
    done, status = 0, 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.0005)
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and status:
        raise SystemExit(f"a worker failed in {folder}")
    return os.WIFSIGNALED(status)


def committed(folder):
    """The newest step that has a checkpoint."""
    found = (folder / "checkpoints").glob("step-*")
    return max((int(p.name[5:]) for p in found if p.name[5:].isdigit()), default=0)


def storm(place, runs, steps, seed):
    """Storms over one run after the other; the figures."""
    torch.set_num_threads(1)
    settings = config(
        write_data(place) / "cats.txt",
        steps=steps,
        evaluate_every=6,
        save_every=3,
        keep_checkpoints=2,
    )
    count_parameters(resolve(settings.model))  # slow the first time
    began = time.monotonic()
    assert not attempt(settings, place / "whole")
    span = time.monotonic() - began
    wanted = contents(place / "whole")
    chance = random.Random(seed)
    figures = {"runs": runs, "equal": 0, "older": 0, "left": 0}
    figures |= {"kills": 0, "at a point": dict.fromkeys(POINTS, 0), "at a random time": 0}
    figures |= {"of those in a save": 0, "seconds of a run": round(span, 2)}
    for number in range(runs):
        folder = place / f"run-{number}"
        first, second = POINTS[2 * number :][:2] or chance.choices(POINTS, k=2)
        for armed in (first, second, ""):
            before = committed(folder)
            if armed:
                times = 1 if armed == "new" else chance.randint(1, 2)
                killed = attempt(settings, folder, armed=f"{armed}:{times}")
                figures["at a point"][armed] += killed
            else:
                killed = attempt(settings, folder, seconds=chance.uniform(0, span))
                figures["at a random time"] += killed
                in_a_save = any((folder / "checkpoints").glob("*.tmp-*"))
                figures["of those in a save"] += killed and in_a_save
            if folder.with_suffix(".from").exists():  # it got as far as to say where it begins
                figures["older"] += int(folder.with_suffix(".from").read_text()) != before
                folder.with_suffix(".from").unlink()
            figures["older"] += committed(folder) < before
            figures["kills"] += killed
        assert not attempt(settings, folder)
        figures["equal"] += contents(folder) == wanted
        figures["left"] += sum("tmp" in path.name for path in place.rglob("*"))
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    print(json.dumps(storm(Path(where), *map(int, numbers))))
