"""Train with several ranks, forked from one process that has imported torch; say how they ended.

Reads a list of jobs from each line of stdin, and prints a line of results for it:

    [{"folder": …, "ranks": 2, "train": {…}}, {"words": ["train", …], "ranks": 2}, …]

A run that exists goes on; `words` are those of the command line, and then ranks are told to end
when one has failed, as `torchrun` would; the rank that `fails` has no data. `event` is
[rank, step, "SIGTERM"], what that rank gets after that step. In the place of a signal may stand
"NaN", for a loss that is not a number in that step, or "NaNs", in all from there on, on a rank
whose clock is fast; "full", for a disk that takes no more after it; or "judged", for a SIGTERM
in the evaluation after it.

Only processes that were forked here are ended, each by its own id. What takes long to import is
imported before.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.fsdp

from regard import pipelines
from regard.cli import main
from regard.errors import DataError, RegardError
from regard.training import log, run
from regard.training.loop import Objective
from regard.training.parallel import strategy
from regard.training.parallel.ranks import UnscoredRow
from training.runs import config

EVENTS = {name: getattr(signal, name) for name in ("SIGTERM", "SIGKILL", "SIGSTOP")}


def work(job):
    """What a rank does, and its exit code."""
    if job.get("train", {}).get("compile") != "on":  # torch's compiler warns of itself
        warnings.simplefilter("error")
    torch.set_num_threads(1)
    if "words" in job:
        if int(os.environ["RANK"]) == job.get("fails"):
            run.prepare_training = fail
        os.dup2(2, 1)
        main(job["words"])
    if "event" in job:
        strike(*job["event"])
    folder = Path(job["folder"])
    settings = config(job["data"], job.get("over"), **job.get("train", {}))
    try:
        if folder.exists():
            events = run.resume(folder, {"train": job.get("train", {})})
        else:
            events = run.begin(settings, folder)
        for _ in events:
            pass
    except RegardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def fail(*words, **options):
    raise DataError("my disk is empty")


class Poisoned(Objective):
    """Its loss is not a number in some steps."""

    steps, taken = (), 0

    def forward(self, batch):
        loss = super().forward(batch)
        self.taken += not isinstance(batch, UnscoredRow)
        return loss * torch.nan if self.taken in self.steps else loss


def strike(rank, step, name):
    """Let something happen to this rank after this step, or in it."""
    if int(os.environ["RANK"]) != rank:
        return
    train, losses = run.train, pipelines.validation_metrics
    if name in ("NaN", "NaNs"):
        Poisoned.steps = range(step, step + 1 if name == "NaN" else sys.maxsize)
        strategy.Objective = Poisoned
    if name == "NaNs":
        log.FLUSH_SECONDS = 0

    def judged(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        return losses(*words)

    def struck(*words, **options):
        for each in train(*words, **options):
            if each.index + 1 == step and name in EVENTS:
                os.kill(os.getpid(), EVENTS[name])
            elif each.index + 1 == step and name == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            elif each.index + 1 == step and name == "judged":
                pipelines.validation_metrics = judged
            yield each

    run.train = struck


def fork(job, rank, port):
    pid = os.fork()
    if not pid:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        try:
            os._exit(work(job))
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def launch(job):
    """Fork the ranks of a job; their exit codes, and the seconds after which each ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    running = {fork(job, rank, port): rank for rank in range(job["ranks"])}
    codes, seconds = [None] * job["ranks"], [None] * job["ranks"]
    while running:
        for pid, rank in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                codes[rank] = os.waitstatus_to_exitcode(status)
                seconds[rank] = round(time.monotonic() - began, 1)
        over = time.monotonic() - began > job.get("limit", 60)
        stuck = job.get("event", [None, None, ""])[2] == "SIGSTOP" and len(running) == 1
        if over or stuck:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        elif "words" in job and any(codes):
            for pid in running:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.005)
    return {"codes": codes, "seconds": seconds}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps([launch(job) for job in json.loads(line)]), flush=True)
