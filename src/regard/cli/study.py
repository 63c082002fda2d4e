"""Train the runs of a study one after the other, then put them beside each other."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from regard.cli.compare import compare
from regard.cli.output import bold, say, working
from regard.cli.report import follow
from regard.config import RunConfig
from regard.errors import Stopped
from regard.training.study import left_to_train, train_or_go_on


def train_all(runs: Mapping[str, RunConfig], place: Path, *, as_json: bool) -> None:
    """Train what is left of a study; the result is that of `regard compare`."""
    with working("looking for runs"):
        left = left_to_train(runs, place)
    for number, (name, config) in enumerate(runs.items(), 1):
        there = "" if name in left else ": finished before"
        say(f"{bold(f'{name}, {number} of {len(runs)}', sys.stderr)}{there}")
        if name in left:
            try:
                follow(partial(train_or_go_on, config, place / name))
            except Stopped as stopped:
                way_on = "or with the whole study: the same command again"
                raise Stopped(f"{stopped}\n{way_on}", stopped.exit_code) from None
            say()
    compare([place / name for name in runs], as_json=as_json)
