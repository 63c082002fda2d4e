"""Train, kill, resume, until so many kills have landed; then say what came of it, as JSON.

    storm.py FOLDER KILLS STEPS SEED

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

from regard.errors import ConfigError
from regard.models.build import count_parameters, resolve
from regard.training.run import begin, resume
from training.runs import config, contents, write_data


def work(settings, folder):
    """What a worker does: begin, or go on, to the end."""
    try:
        try:
            for _ in resume(folder) if folder.exists() else begin(settings, folder):
                pass
        except ConfigError as error:  # killed after all was saved
            if "is at step" not in str(error):
                raise
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def attempt(settings, folder, seconds):
    """Fork a worker and kill it after so long; whether it was faster."""
    pid = os.fork()
    if not pid:
        work(settings, folder)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(f"a worker failed in {folder}")
            return True
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return not os.WIFSIGNALED(status)


def committed(folder):
    """The newest step that has a checkpoint."""
    found = (folder / "checkpoints").glob("step-*")
    return max((int(p.name[5:]) for p in found if p.name[5:].isdigit()), default=0)


def storm(place, kills, steps, seed):
    """Storms over one run after the other; the figures."""
    torch.set_num_threads(1)
    settings = config(
        write_data(place) / "cats.txt", steps=steps, evaluate_every=steps // 4, save_every=3
    )
    count_parameters(resolve(settings.model))  # slow the first time
    began = time.monotonic()
    assert attempt(settings, place / "whole", 600)
    span = time.monotonic() - began
    wanted = contents(place / "whole")
    chance = random.Random(seed)
    figures = {"kills": 0, "runs": 0, "equal": 0, "in a save": 0, "before the first": 0}
    figures |= {"older": 0, "left": 0, "seconds of a run": round(span, 2), "reached": []}
    while figures["kills"] < kills:
        folder = place / f"run-{figures['runs']}"
        figures["runs"] += 1
        before = 0
        while figures["kills"] < kills:
            if attempt(settings, folder, chance.uniform(0, 0.6 * span)):
                break
            now = committed(folder)
            figures["reached"].append(now)
            figures["kills"] += now > 0  # one before the first checkpoint proves little
            figures["before the first"] += not now
            figures["in a save"] += any((folder / "checkpoints").glob("*.tmp-*"))
            figures["older"] += now < before
            before = now
        assert attempt(settings, folder, 600)
        figures["equal"] += contents(folder) == wanted
        figures["left"] += sum("tmp" in path.name for path in folder.rglob("*"))
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    print(json.dumps(storm(Path(where), *map(int, numbers))))
